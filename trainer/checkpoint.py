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
        rng_state.safetensors
        callbacks.json

``scheduler_state.safetensors`` and ``callbacks.safetensors`` exist when those states hold tensors. A
checkpoint is written into a sibling that starts with a dot, synced and renamed. Siblings are
``.<name>.writing-*``, ``.<name>.replaced-*`` (whole: the one before, until its successor is in place) and
``.<name>.deleting-*``.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from ..strategies.errors import CheckpointError
from .files import FileReader, FileWriter, sync_folder, writing
from .folders import MANIFEST, SIBLING, STEP_NAME, is_checkpoint, publish, remove, sibling, sweep
from .tree import dumps, loads, pack, unpack

FORMAT_VERSION = 1

_CONFIG = "pretrained_model/config.json"
_MODEL = "pretrained_model/model.safetensors"
_STEP = "training_state/training_step.json"
_SCHEDULES = "training_state/scheduler_state"
_SCALER = "training_state/scaler_state.json"
_RNG = "training_state/rng_state.safetensors"
_CALLBACKS = "training_state/callbacks"

_BESIDE = re.compile(r"pretrained_model_(?P<name>[a-z]+)/model\.safetensors", re.ASCII)
_FILE_NAME = re.compile(r"(pretrained_model(_[a-z]+)?|training_state)/\w+\.(json|safetensors)", re.ASCII)


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
    #: More weights of the same policy by name, such as "ema".
    models: dict[str, dict[str, Tensor]] = field(default_factory=dict)


def write_checkpoint(folder: Path, state: CheckpointState) -> Path:
    """Write ``state`` as ``folder``, which appears only when it is complete; a checkpoint there is replaced.

    Raises:
        CheckpointError: A state holds what a file cannot, or the disk refused; whatever was there before is
            untouched.
    """
    _check_weights(state.model)
    with writing(str(folder)):
        folder.parent.mkdir(parents=True, exist_ok=True)
        sweep(folder)
    temporary = sibling(folder, "writing")
    try:
        _write_files(FileWriter(temporary), state)
        with writing(str(folder)):
            publish(temporary, folder)
    except BaseException:
        # The error is what counts; the next save sweeps what cannot be removed now.
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return folder


def read_checkpoint(folder: Path, *, verify: bool = True) -> CheckpointState:
    """Read the checkpoint in ``folder``; ``verify=False`` skips sizes and hashes, for one just verified.

    Raises:
        CheckpointError: There is none, a newer policyfit wrote it, or a part is missing or damaged.
    """
    manifest = read_manifest(folder)
    if verify:
        _check_files(folder, manifest, contents=True)
    reader = FileReader(folder, manifest, lambda part, what: _damaged(folder, part, what))
    optimizers = 0
    while _optimizer_files(optimizers)[0] in reader.unread:
        optimizers += 1
    schedules: Any = reader.tree(_SCHEDULES, object)
    if isinstance(schedules, dict):
        schedules = [schedules]
    if not isinstance(schedules, list) or not all(isinstance(schedule, dict) for schedule in schedules):
        raise _damaged(folder, f"{_SCHEDULES}.json", "it holds no states of schedules")
    reader.json(_STEP, dict)  # LeRobot's; the manifest says the same
    state = CheckpointState(
        manifest=manifest,
        model=reader.tensors(_MODEL)[0],
        policy_config=reader.json(_CONFIG, dict),
        optimizers=[reader.optimizer(*_optimizer_files(i)) for i in range(optimizers)],
        schedules=schedules,
        scaler=reader.json(_SCALER, dict) if _SCALER in reader.unread else None,
        rng=reader.tensors(_RNG)[0],
        callbacks=reader.tree(_CALLBACKS, dict),
        models={name: _read_model(reader, name) for name in _models_beside(reader.unread)},
    )
    if reader.unread:
        raise _damaged(folder, min(reader.unread), "this policyfit does not know what it is for")
    return state


def point_last_at(checkpoint: Path) -> None:
    """Make ``last``, beside ``checkpoint``, a relative link to it; it leads somewhere at every moment."""
    last = checkpoint.parent / "last"
    link = checkpoint.parent / ".last.new"
    with writing(str(last)):
        if is_checkpoint(last):  # a copy of the run by a tool that follows links
            remove(last)
        link.unlink(missing_ok=True)
        link.symlink_to(checkpoint.name)
        link.replace(last)
        sync_folder(checkpoint.parent)


def whole_checkpoints(checkpoints: Path) -> list[Path]:
    """The complete checkpoints in a folder by the step in their manifests, oldest first.

    Complete means an intact manifest and every file in its size; contents are compared when they are read.
    """
    steps: list[tuple[int, str]] = []
    for folder in _step_folders(checkpoints):
        with suppress(CheckpointError):
            manifest = read_manifest(folder)
            _check_files(folder, manifest, contents=False)
            steps.append((manifest["counters"]["step"], folder.name))
    return [checkpoints / name for _, name in sorted(steps)]


def newest_checkpoint(run_or_checkpoint: Path, warn: Callable[[str], None]) -> Path:
    """The checkpoint to go on from, with every file of it verified.

    A run folder and its ``checkpoints`` mean the whole one with the highest step, ``last`` the one it leads
    to or, if that is damaged, the newest whole one. A checkpoint's own folder means just that one.

    Args:
        run_or_checkpoint: RUN_DIR, RUN_DIR/checkpoints, RUN_DIR/checkpoints/last, or a checkpoint's folder.
        warn: Told of every damaged checkpoint that is passed over, and of a ``last`` that leads to an older.

    Raises:
        CheckpointError: There is no whole checkpoint, or the one asked for is damaged.
    """
    path = run_or_checkpoint
    checkpoints = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    wanted = path.parent / path.readlink() if path.is_symlink() and path.name == "last" else None
    if wanted is not None:
        checkpoints = path.parent
    elif not path.is_dir():
        raise CheckpointError(f"There is no checkpoint at {path}: no such folder.\nGive a run folder or a checkpoint.")
    elif checkpoints == path and ((path / MANIFEST).exists() or STEP_NAME.fullmatch(path.name)):
        _verified_step(path)
        return path
    found = [*([wanted] if wanted else []), *reversed(_by_step(checkpoints))]
    reasons: list[str] = []
    for folder in dict.fromkeys(found):
        try:
            step = _verified_step(folder)
        except CheckpointError as error:
            reasons.append(str(error).splitlines()[0])
            warn(f"{reasons[-1]} The newest whole checkpoint is used instead.")
        else:
            if wanted is None:
                _tell_of_older_last(checkpoints, folder, step, warn)
            return folder
    raise CheckpointError("\n".join([f"There is no whole checkpoint in {checkpoints}.", *reasons]))


def delete_checkpoint(checkpoint: Path) -> None:
    """Delete a checkpoint so that it is whole under its name or not there, whenever this is interrupted.

    Raises:
        CheckpointError: It is no checkpoint, or the disk refused; the rest is swept at the next save.
    """
    if not is_checkpoint(checkpoint):
        raise CheckpointError(f"{checkpoint} is no checkpoint of policyfit, so it is not deleted.")
    try:
        remove(checkpoint)
    except OSError as error:
        raise CheckpointError(f"{checkpoint} could not be deleted: {error}.") from error


def _write_files(writer: FileWriter, state: CheckpointState) -> None:
    manifest = state.manifest
    if not _are_counters(manifest.get("counters")):
        raise CheckpointError("manifest needs counters, with step and micro_batches as whole numbers.")
    processes = {
        "num_processes": manifest.get("world_size", 1),
        "dp_world_size": manifest.get("world_size", 1),
    }
    writer.json(_CONFIG, state.policy_config)
    writer.tensors(_MODEL, state.model)
    for name, model in state.models.items():
        writer.json(_beside(_CONFIG, name), state.policy_config)
        writer.tensors(_beside(_MODEL, name), model)
    writer.json(_STEP, {"step": manifest["counters"]["micro_batches"], **processes})
    for i, optimizer in enumerate(state.optimizers):
        groups, values = _optimizer_files(i)
        named = {str(index): entry for index, entry in optimizer["state"].items()}
        packed, tensors = pack({"state": named, "param_groups": optimizer["param_groups"]})
        writer.text(groups, dumps(packed["param_groups"]))
        writer.tensors(values, tensors, {"state": json.dumps(packed["state"], allow_nan=False)})
    writer.tree(_SCHEDULES, state.schedules[0] if len(state.schedules) == 1 else state.schedules)
    if state.scaler is not None:
        writer.json(_SCALER, state.scaler)
    writer.tensors(_RNG, state.rng)
    writer.tree(_CALLBACKS, state.callbacks)
    own = {"format_version": FORMAT_VERSION, "files": dict(writer.files), "layouts": writer.layouts}
    packed, tensors = pack({**manifest, **own})
    if tensors:
        raise CheckpointError(f"{MANIFEST} keeps JSON values only, but {next(iter(tensors))} is a tensor.")
    writer.text(MANIFEST, dumps({**packed, "sha256": _seal(packed)}))
    with writing(str(writer.folder)):
        for folder in {str(Path(name).parent) for name in writer.files}:
            sync_folder(writer.folder / folder)


def _beside(file: str, name: str) -> str:
    return file.replace("pretrained_model", f"pretrained_model_{name}", 1)


def _models_beside(files: set[str]) -> list[str]:
    found = (_BESIDE.fullmatch(file) for file in files)
    return sorted(match["name"] for match in found if match)


def _read_model(reader: FileReader, name: str) -> dict[str, Tensor]:
    reader.json(_beside(_CONFIG, name), dict)  # for other tools; the policy is built from the run's config
    return reader.tensors(_beside(_MODEL, name))[0]


def _optimizer_files(index: int) -> tuple[str, str]:
    suffix = f"_{index}" if index else ""
    return (
        f"training_state/optimizer_param_groups{suffix}.json",
        f"training_state/optimizer_state{suffix}.safetensors",
    )


def _check_weights(model: dict[str, Tensor]) -> None:
    for name, value in model.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"The policy's state_dict has {name}, a {type(value).__name__}, but only tensors are kept.\n"
                "Return a tensor from get_extra_state, or keep the value in a buffer."
            )


def _seal(packed: dict[str, Any]) -> str:
    rest = {key: value for key, value in packed.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint, whose own integrity is verified and not that of the files it lists.

    Raises:
        CheckpointError: There is none, it is damaged, or a newer policyfit wrote it.
    """
    try:
        packed = loads((folder / MANIFEST).read_bytes())
        manifest = unpack(packed, {})
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} is not a whole checkpoint of policyfit: it has no {MANIFEST}.") from error
    except (OSError, ValueError) as error:
        raise _damaged(folder, MANIFEST, str(error)) from error
    if not isinstance(manifest, dict) or type(manifest.get("format_version")) is not int:
        raise _damaged(folder, MANIFEST, "it names no format_version")
    if manifest["format_version"] > FORMAT_VERSION:
        raise CheckpointError(
            f"Checkpoint {folder} has format {manifest['format_version']}, written by a newer policyfit; "
            f"this one reads format {FORMAT_VERSION}.\nUpdate policyfit to use it."
        )
    if manifest.get("sha256") != _seal(packed):
        raise _damaged(folder, MANIFEST, "its contents are not those that were written")
    if not _has_shape(manifest):
        raise _damaged(folder, MANIFEST, "its counters or its list of files cannot be read")
    return manifest


def _has_shape(manifest: dict[str, Any]) -> bool:
    files, layouts = manifest.get("files"), manifest.get("layouts")
    return (
        manifest["format_version"] == FORMAT_VERSION
        and _are_counters(manifest.get("counters"))
        and isinstance(files, dict)
        and all(_FILE_NAME.fullmatch(str(name)) and isinstance(entry, dict) for name, entry in files.items())
        and isinstance(layouts, dict)
        and all(isinstance(entry, dict) for entry in layouts.values())
    )


def _are_counters(value: Any) -> bool:
    return isinstance(value, dict) and all(type(value.get(n)) is int for n in ("step", "micro_batches"))


def _check_files(folder: Path, manifest: dict[str, Any], *, contents: bool) -> None:
    for name, entry in manifest["files"].items():
        try:
            size = (folder / name).stat().st_size
            if size != entry.get("size"):
                raise _damaged(folder, name, f"it has {size} bytes instead of {entry.get('size')}")
            if contents:
                with (folder / name).open("rb") as file:
                    if hashlib.file_digest(file, "sha256").hexdigest() != entry.get("sha256"):
                        raise _damaged(folder, name, "its contents are not those that were written")
        except FileNotFoundError as error:
            raise _damaged(folder, name, "it is missing") from error
        except OSError as error:
            raise _damaged(folder, name, str(error)) from error
    present = {f"training_state/{path.name}" for path in (folder / "training_state").glob("[!.]*")}
    if foreign := present - set(manifest["files"]):
        raise _damaged(folder, min(foreign), "the manifest does not list it")


def _damaged(folder: Path, part: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"Checkpoint {folder}: {part} is damaged: {what}.\n"
        "Give another checkpoint of the run, or the run's folder, which means its newest whole one."
    )


def _step_folders(checkpoints: Path) -> Iterator[Path]:
    for path in checkpoints.iterdir() if checkpoints.is_dir() else ():
        left = SIBLING.fullmatch(path.name)
        halfway = left and left["purpose"] == "replaced" and not (checkpoints / left["name"]).exists()
        name = left["name"] if left and halfway else path.name
        if STEP_NAME.fullmatch(name) and path.is_dir() and not path.is_symlink():
            yield path


def _by_step(checkpoints: Path) -> list[Path]:
    def step(folder: Path) -> tuple[int, str]:
        try:
            return read_manifest(folder)["counters"]["step"], folder.name
        except CheckpointError:
            left = SIBLING.fullmatch(folder.name)
            return int(left["name"] if left else folder.name), folder.name

    return sorted(_step_folders(checkpoints), key=step)


def _verified_step(folder: Path) -> int:
    manifest = read_manifest(folder)
    _check_files(folder, manifest, contents=True)
    return int(manifest["counters"]["step"])


def _tell_of_older_last(checkpoints: Path, chosen: Path, step: int, warn: Callable[[str], None]) -> None:
    last = checkpoints / "last"
    if last.is_symlink() and (other := checkpoints / last.readlink()) != chosen:
        with suppress(CheckpointError):  # a damaged one that is older is not needed
            if read_manifest(other)["counters"]["step"] < step:
                warn(f"{chosen.name} is used, but 'last' leads to {other.name}. Give {last} for that one.")
