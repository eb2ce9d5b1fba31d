"""Checkpoints whose weights and optimizer states lie on many ranks: each writes its own rows, in files of its own.

Reading them, and their format, is in ``pieces.py``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from ..strategies.distributed import DistributionStrategy
from ..strategies.errors import CheckpointError
from ..strategies.tree import map_tensors
from .checkpoint import TREES, CheckpointState, check_state, removed_after_an_error, tensor_files, write_files
from .checkpoint_files import FileReader, FileWriter, writing
from .checkpoint_folders import publish
from .pieces import INFO, OFFSETS, SHAPE, read_tensors, shard_of
from .together import agreed


def in_shards(ranks: DistributionStrategy, state: CheckpointState, *, weights: bool) -> CheckpointState:
    """Of a state that ranks hold parts of, what this rank is to write.

    Args:
        weights: Whether ``model`` and ``models`` are held in parts too, and not only ``optimizers``.
    """
    files = [file for file in tensor_files(state) if weights or file[0].startswith("training_state/")]
    local = {name: map_tensors(getattr(state, name), lambda tensor, _: ranks.local(tensor)) for name in TREES}
    return replace(state, **local, places={stem: _places(ranks, tensors) for stem, tensors, _ in files})


def write_in_shards(ranks: DistributionStrategy, temporary: Path, folder: Path, state: CheckpointState) -> None:
    """Write what this rank holds into ``temporary``; once all have, rank 0 adds the rest and makes it ``folder``.

    To be called by all ranks, from the main thread or another.

    Raises:
        CheckpointError: As ``write_checkpoint``, on all ranks; or a rank's files are not where rank 0 is.
    """
    writer = FileWriter(temporary)

    def complete(written: list[FileWriter]) -> None:
        for rank, other in enumerate(written):
            for name, entry in other.files.items():
                if not (path := temporary / name).is_file() or path.stat().st_size != entry["size"]:
                    raise CheckpointError(
                        f"Rank {rank} wrote {name}, but rank 0 does not find it: they share no storage in {folder}.\n"
                        "Use a run_dir on storage that all machines share, or FSDP(checkpoint='whole')."
                    )
            writer.files.update(other.files)
            writer.layouts.update(other.layouts)
        _check_fit(writer, state, folder)
        write_files(writer, state)
        with writing(str(folder)):
            publish(temporary, folder)

    with removed_after_an_error(temporary) if ranks.is_main else nullcontext():
        written = agreed(ranks, partial(_write_shards, writer, state, ranks.rank), "the writing of shards")
        agreed(ranks, partial(complete, written) if ranks.is_main else lambda: None, "the end of a save")


def _write_shards(writer: FileWriter, state: CheckpointState, rank: int) -> FileWriter:
    check_state(state)
    for stem, tensors, metadata in tensor_files(state):
        found = state.places.get(stem)
        if found or (found is not None and rank == 0):  # one file at least, also of an optimizer without a state
            mine = {name: tensors[name] for name in found}
            writer.tensors(shard_of(stem, rank), mine, {**metadata, **_header(found)})
    return writer


def _check_fit(writer: FileWriter, state: CheckpointState, folder: Path) -> None:
    """Refuse shards of ranks that hold different things, for instance where one has made no optimizer state yet."""

    def unfit(part: str, what: str) -> CheckpointError:
        return CheckpointError(
            f"{folder} is not written, since what the ranks hold does not fit together: {part}: {what}.\n"
            "Earlier checkpoints are untouched: the run can go on from them."
        )

    reader = FileReader(writer.folder, {"files": writer.files, "layouts": writer.layouts}, unfit)
    for stem in state.places:
        read_tensors(reader, stem)


def _places(ranks: DistributionStrategy, tensors: Mapping[str, Tensor]) -> dict[str, dict[str, list[int]]]:
    """Of the tensors that have something for this rank to write: where that begins, and the shape of the whole."""
    found = {}
    for name, tensor in tensors.items():
        first = ranks.first_row(tensor)
        if first is not None:
            offsets = [first, *[0] * (tensor.dim() - 1)] if tensor.dim() else []
            found[name] = {OFFSETS: offsets, SHAPE: list(tensor.shape)}
    return found


def _header(found: Mapping[str, Any]) -> dict[str, str]:
    """The metadata of a shard file with these places."""
    return {"format": "pt", "DCP_VERSION": "1.0", INFO: json.dumps(found)}
