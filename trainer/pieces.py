"""Tensors whose rows lie on many ranks, in a checkpoint: each rank writes its own rows, and any number of ranks reads.

``model.safetensors`` is then ``model_shard_0.safetensors``, ``model_shard_1.safetensors``, ..., of the ranks that have
rows which no rank before them has; what is whole on every rank is in the first. A header says where its rows begin in
the words of torch.distributed.checkpoint, whose HuggingFaceStorageReader reads such a folder too. Its writer would need
twice the memory of a shard beside it, and takes no snapshot: only what lies sharded on the device.

Source: torch.distributed.checkpoint.hf_storage and _hf_utils (2.13), ``DCP_SHARDING_INFO`` and ``saved_offsets``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor

from .packing import lay_out, loads

if TYPE_CHECKING:
    from .checkpoint_files import FileReader

INFO, OFFSETS, SHAPE = "DCP_SHARDING_INFO", "saved_offsets", "shape"


class Piece(NamedTuple):
    """Some rows of a tensor: the open file and the name in it, the first row and the one after the last."""

    file: Any
    key: str
    first: int
    end: int


class Pieces:
    """A tensor whose rows lie in several files: sliced by rows as a tensor is, and read only then."""

    def __init__(self, shape: list[int], dtype: torch.dtype, pieces: list[Piece]) -> None:
        self.shape, self._dtype, self._pieces = torch.Size(shape), dtype, pieces

    def is_like(self, other: Pieces) -> bool:
        """Whether the whole tensors have the same shape and type."""
        return self.shape == other.shape and self._dtype == other._dtype

    def __getitem__(self, rows: slice) -> Tensor:
        start, stop, _ = rows.indices(self.shape[0])
        found = [
            piece.file.get_slice(piece.key)[max(start, piece.first) - piece.first : min(stop, piece.end) - piece.first]
            for piece in self._pieces
            if max(start, piece.first) < min(stop, piece.end)
        ]
        return torch.cat(found) if found else torch.empty((0, *self.shape[1:]), dtype=self._dtype)


def in_memory(value: Any) -> Any:
    """A tensor that lies in pieces, read as a whole; anything else as it is."""
    return value[:] if isinstance(value, Pieces) else value


def shard_of(stem: str, rank: int) -> str:
    """The name of the file that a rank writes."""
    return f"{stem}_shard_{rank}.safetensors"


def read_tensors(reader: FileReader, stem: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The tensors of ``stem.safetensors`` and its metadata, or those of its shards, where what is cut is ``Pieces``.

    Raises:
        CheckpointError: A file is missing or damaged, or the pieces of a tensor do not make a whole.
    """
    shard = re.compile(rf"{re.escape(stem)}_shard_([0-9]+)\.safetensors")
    files = sorted((int(match[1]), match[0]) for match in map(shard.fullmatch, reader.unread) if match)
    if not files:
        return reader.tensors(f"{stem}.safetensors")
    tensors: dict[str, Any] = {}
    cut: dict[str, list[Piece]] = {}
    metadata: dict[str, str] = {}
    for _, name in files:
        file, own, layout = reader.open(name)
        try:
            _sort(file, loads(own.pop(INFO)), layout, tensors, cut)
        except (OSError, SafetensorError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
            raise reader.damaged(name, f"{type(error).__name__}: {error}") from error
        metadata.update(own)
    for name, pieces in cut.items():
        if pieces[-1].end != tensors[name].shape[0]:
            raise reader.damaged(shard_of(stem, len(files)), f"the last rows of {name} are missing")
    return tensors, metadata


def _sort(
    file: Any, info: Any, layout: Mapping[str, Any], tensors: dict[str, Any], cut: dict[str, list[Piece]]
) -> None:
    """Add what is in a file to the ``tensors``, and to the pieces of those that are ``cut``, rank by rank."""
    entire: dict[str, Tensor] = {}
    aliases = dict(layout.get("aliases", {}))
    for name, key in {**{key: key for key in file.keys()}, **aliases}.items():  # noqa: SIM118 - not a dict
        held, offsets, shape = file.get_slice(key).get_shape(), info[name][OFFSETS], info[name][SHAPE]
        if held == shape and not any(offsets):
            if name not in tensors and name not in aliases:
                entire[name] = file.get_tensor(key).clone()
            continue
        if held[0] == 0:
            continue
        first, pieces = offsets[0], cut.setdefault(name, [])
        if first != (pieces[-1].end if pieces else 0) or held[1:] != shape[1:] or any(offsets[1:]):
            raise ValueError(f"its rows of {name} do not follow those of the files before it")
        pieces.append(Piece(file, key, first, first + held[0]))
        found = Pieces(shape, file.get_slice(key)[:1].dtype, pieces)
        if not found.is_like(tensors.setdefault(name, found)):
            raise ValueError(f"{name} has another shape or type than in the files before it")
    kept = {
        "strides": {name: stride for name, stride in layout.get("strides", {}).items() if name in entire},
        "aliases": {name: key for name, key in aliases.items() if key in entire},
    }
    tensors.update(lay_out(entire, kept))
