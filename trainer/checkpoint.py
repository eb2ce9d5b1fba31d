"""Checkpoints on disk: complete or invisible, verified when read, and inert (JSON and safetensors only).

    000500/
      manifest.json                   format_version, what the trainer says, size and sha256 of every file,
                                      and the sha256 of the manifest itself
      pretrained_model/               config.json, model.safetensors
      pretrained_model_ema/           the same with other weights, for each of ``CheckpointState.models``
      training_state/
        training_step.json            LeRobot's step: micro-batches
        optimizer_state.safetensors   state/<parameter index>/<name>; what is no tensor is in its metadata
        optimizer_param_groups.json   a second optimizer: optimizer_state_1, optimizer_param_groups_1, ...
        scheduler_state.json          the state of the only schedule, or a list when there is not just one
        scaler_state.json             only with a loss scaler
        rng_state.safetensors         of rank 0, or one that saved alone; of the others rng_state_1, rng_state_2, ...
        callbacks.json

A run whose ranks hold shards of weights and optimizer state writes model_shard_0.safetensors,
optimizer_state_shard_0.safetensors and so on in place of those files; see ``pieces.py``.
``scheduler_state.safetensors`` and ``callbacks.safetensors`` exist when those states hold tensors. A
checkpoint is written into a sibling that starts with a dot, synced and renamed. Siblings are
``.<name>.writing-*``, ``.<name>.replaced-*`` (whole: the one before, until its successor is in place) and
``.<name>.deleting-*``.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..strategies.errors import CheckpointError
from ..strategies.tree import map_leaves
from .checkpoint_files import FileReader, FileWriter, sync_folder, writing
from .checkpoint_folders import MANIFEST, publish, sibling, sweep
from .describe import class_of
from .manifest import FORMAT_VERSION, are_counters, check_files, damaged, read_manifest, seal
from .packing import dumps, pack
from .pieces import in_memory, read_tensors

_CONFIG = "pretrained_model/config.json"
_MODEL = "pretrained_model/model"
_STEP = "training_state/training_step.json"
_SCHEDULES = "training_state/scheduler_state"
_SCALER = "training_state/scaler_state.json"
_RNG = "training_state/rng_state.safetensors"
_CALLBACKS = "training_state/callbacks"

TREES = ("model", "models", "optimizers")
_BESIDE = re.compile(r"pretrained_model_(?P<name>[a-z]+)/config\.json", re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointState:
    """Everything that a run needs to go on. Tensors lie anywhere when written and on the cpu when read.

    ``manifest`` holds ``counters`` (at least ``step`` and ``micro_batches``) and what else the trainer says,
    in JSON; read back, it also has the writer's ``format_version``, ``files``, ``layouts`` and ``sha256``.
    """

    manifest: dict[str, Any]
    model: dict[str, Tensor]
    policy_config: dict[str, Any]
    optimizers: list[dict[str, Any]]
    schedules: list[dict[str, Any]]
    scaler: dict[str, Any] | None
    rng: dict[str, Tensor]
    callbacks: dict[str, Any]
    #: Of a rank that writes shards: where its rows begin, by file and tensor. ``model``, ``models`` and ``optimizers``
    #: then are what this rank holds.
    places: dict[str, dict[str, Any]] = field(default_factory=dict)
    #: The random streams of ranks 1, 2, ...; ``rng`` is that of rank 0.
    rng_of_others: list[dict[str, Tensor]] = field(default_factory=list)
    #: More weights of the same policy by name, such as "ema".
    models: dict[str, dict[str, Tensor]] = field(default_factory=dict)


def write_checkpoint(folder: Path, state: CheckpointState) -> Path:
    """Write ``state`` as ``folder``, which appears only when it is complete; a checkpoint there is replaced.

    Raises:
        CheckpointError: A state holds what a file cannot, or the disk refused; whatever was there before is
            untouched.
    """
    check_state(state)
    temporary = begin(folder)
    with removed_after_an_error(temporary):
        write_files(FileWriter(temporary), state)
        with writing(str(folder)):
            publish(temporary, folder)
    return folder


def begin(folder: Path) -> Path:
    """The folder into which ``folder`` is to be written, after what killed processes left was swept away."""
    with writing(str(folder)):
        folder.parent.mkdir(parents=True, exist_ok=True)
        sweep(folder)
    return sibling(folder, "writing")


def read_checkpoint(folder: Path, *, verify: bool = True, lazy: bool = False) -> CheckpointState:
    """Read the checkpoint in ``folder``; ``verify=False`` skips sizes and hashes, for one just verified.

    With ``lazy``, tensors that lie in shards are ``Pieces``, to be read by rows.

    Raises:
        CheckpointError: There is none, a newer policyfit wrote it, or a part is missing or damaged.
    """
    manifest = read_manifest(folder)
    if verify:
        check_files(folder, manifest, contents=True)
    reader = FileReader(folder, manifest, lambda part, what: damaged(folder, part, what))
    optimizers = 0
    while _optimizer_files(optimizers)[0] in reader.unread:
        optimizers += 1
    ranks = 1
    while _rng_of(ranks) in reader.unread:
        ranks += 1
    schedules: Any = reader.tree(_SCHEDULES, object)
    if isinstance(schedules, dict):
        schedules = [schedules]
    if not isinstance(schedules, list) or not all(isinstance(schedule, dict) for schedule in schedules):
        raise damaged(folder, f"{_SCHEDULES}.json", "it holds no states of schedules")
    reader.json(_STEP, dict)  # LeRobot's; the manifest says the same
    state = CheckpointState(
        manifest=manifest,
        model=read_tensors(reader, _MODEL)[0],
        policy_config=reader.json(_CONFIG, dict),
        optimizers=[_read_optimizer(reader, i) for i in range(optimizers)],
        schedules=schedules,
        scaler=reader.json(_SCALER, dict) if _SCALER in reader.unread else None,
        rng=reader.tensors(_RNG)[0],
        rng_of_others=[reader.tensors(_rng_of(rank))[0] for rank in range(1, ranks)],
        callbacks=reader.tree(_CALLBACKS, dict),
        models={name: _read_model(reader, name) for name in _models_beside(reader.unread)},
    )
    shapes = {name: value.shape for name, value in state.model.items()}
    for name, model in state.models.items():
        if {key: value.shape for key, value in model.items()} != shapes:
            raise damaged(folder, f"{_beside(_MODEL, name)}.safetensors", f"its weights are not those of {_MODEL}")
    if reader.unread:
        raise damaged(folder, min(reader.unread), "this policyfit does not know what it is for")
    if lazy:
        return state
    trees = {name: map_leaves(getattr(state, name), lambda leaf, _: in_memory(leaf)) for name in TREES}
    return replace(state, **trees)


def tensor_files(state: CheckpointState) -> Iterator[tuple[str, dict[str, Tensor], dict[str, str]]]:
    """The safetensors files of weights and optimizer states: stem, tensors and metadata."""
    for name, model in {"": state.model, **state.models}.items():
        yield _beside(_MODEL, name), model, {}
    for i, optimizer in enumerate(state.optimizers):
        packed, tensors = _pack_optimizer(optimizer)
        yield _optimizer_files(i)[1], tensors, {"state": json.dumps(packed["state"], allow_nan=False)}


def _pack_optimizer(optimizer: dict[str, Any]) -> tuple[Any, dict[str, Tensor]]:
    named = {str(index): entry for index, entry in optimizer["state"].items()}
    return pack({"state": named, "param_groups": optimizer["param_groups"]})


def write_files(writer: FileWriter, state: CheckpointState) -> None:
    """All files that are not shards, the manifest last, which lists those that ``writer`` knows already too."""
    manifest = state.manifest
    if not are_counters(manifest.get("counters")):
        raise CheckpointError("manifest needs counters, with step and micro_batches as whole numbers.")
    processes = {
        "num_processes": manifest.get("world_size", 1),
        "dp_world_size": manifest.get("world_size", 1),
    }
    for name in ("", *state.models):
        writer.json(_beside(_CONFIG, name), state.policy_config)
    for stem, tensors, metadata in tensor_files(state):
        if stem not in state.places:
            writer.tensors(f"{stem}.safetensors", tensors, metadata)
    writer.json(_STEP, {"step": manifest["counters"]["micro_batches"], **processes})
    for i, optimizer in enumerate(state.optimizers):
        writer.text(_optimizer_files(i)[0], dumps(_pack_optimizer(optimizer)[0]["param_groups"]))
    writer.tree(_SCHEDULES, state.schedules[0] if len(state.schedules) == 1 else state.schedules)
    if state.scaler is not None:
        writer.json(_SCALER, state.scaler)
    writer.tensors(_RNG, state.rng)
    for rank, streams in enumerate(state.rng_of_others, start=1):
        writer.tensors(_rng_of(rank), streams)
    writer.tree(_CALLBACKS, state.callbacks)
    own = {"format_version": FORMAT_VERSION, "files": dict(writer.files), "layouts": writer.layouts}
    packed, tensors = pack({**manifest, **own})
    if tensors:
        raise CheckpointError(
            f"{MANIFEST} keeps JSON values only, but {next(iter(tensors))} is a tensor.\nGive tensor.tolist()."
        )
    writer.text(MANIFEST, dumps({**packed, "sha256": seal(packed)}))
    with writing(str(writer.folder)):
        for folder in {str(Path(name).parent) for name in writer.files}:
            sync_folder(writer.folder / folder)


def _rng_of(rank: int) -> str:
    return _RNG.replace(".", f"_{rank}.")


def _beside(file: str, name: str) -> str:
    return file.replace("pretrained_model", f"pretrained_model_{name}", 1) if name else file


def _models_beside(files: set[str]) -> list[str]:
    found = (_BESIDE.fullmatch(file) for file in files)
    return sorted(match["name"] for match in found if match)


def _read_model(reader: FileReader, name: str) -> dict[str, Tensor]:
    reader.json(_beside(_CONFIG, name), dict)  # for other tools; the policy is built from the run's config
    return read_tensors(reader, _beside(_MODEL, name))[0]


def _read_optimizer(reader: FileReader, index: int) -> dict[str, Any]:
    groups, stem = _optimizer_files(index)
    return reader.optimizer(groups, f"{stem}.safetensors", *read_tensors(reader, stem))


def _optimizer_files(index: int) -> tuple[str, str]:
    """The JSON file and the stem of the other."""
    suffix = f"_{index}" if index else ""
    return (
        f"training_state/optimizer_param_groups{suffix}.json",
        f"training_state/optimizer_state{suffix}",
    )


@contextmanager
def removed_after_an_error(temporary: Path) -> Iterator[None]:
    """Remove what was begun in the folder, if it was not finished."""
    try:
        yield
    except BaseException:
        # The error is what counts; the next save sweeps what cannot be removed now.
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def check_state(state: CheckpointState) -> None:
    """Refuse weights that no file can hold."""
    for model in (state.model, *state.models.values()):
        _check_weights(model)
    for name in state.models:
        if not re.fullmatch("[a-z]+", name):
            raise CheckpointError(
                f"Weights beside the policy's own are named {name!r}.\nUse small letters from a to z."
            )


def _check_weights(model: dict[str, Tensor]) -> None:
    for name, value in model.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"The policy's state_dict has {name}, a {type(value).__name__}, but only tensors are kept.\n"
                "Return a tensor from get_extra_state, or keep the value in a buffer."
            )


def fill(policy: nn.Module, model: dict[str, Tensor], checkpoint: Path | str) -> None:
    """Load the weights, all of them and no others.

    Raises:
        CheckpointError: A name or shape of one is not in the other.
    """
    try:
        policy.load_state_dict(model, strict=True)
    except RuntimeError as error:
        raise CheckpointError(
            f"The weights in {checkpoint} do not fit {class_of(policy).__name__}: {' '.join(str(error).split())}\n"
            "Build the policy with the settings it was trained with."
        ) from error
