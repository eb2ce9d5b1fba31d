"""Nested values and tensors as inert files: JSON for the values, safetensors for the tensors, and back.

What JSON cannot say is an object with one key that starts with ``$``: ``{"$tensor": name}`` (a tensor of the
file beside it), ``{"$float": "nan"}``, ``{"$items": [[key, value], ...]}`` (a mapping whose keys are not all
plain strings) and ``{"$counter": [[key, count], ...]}`` (MultiStepLR has one). Tuples come back as lists.
Nothing that is read is imported, called or unpickled.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..strategies.errors import CheckpointError

T = TypeVar("T")


def pack(value: Any, path: str = "") -> tuple[Any, dict[str, Tensor]]:
    """``value`` as JSON values, and the tensors in it by the path to them, such as ``state/0/exp_avg``.

    Raises:
        CheckpointError: Something in it is neither a JSON value nor a tensor; the message names its path.
    """
    tensors: dict[str, Tensor] = {}
    return _pack(value, path, tensors), tensors


def _pack(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        while path in tensors:  # "a/b" and "a" -> "b" have the same path
            path += "'"
        tensors[path] = value
        return {"$tensor": path}
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": str(float(value))}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_pack(v, _join(path, i), tensors) for i, v in enumerate(value)]
    if isinstance(value, Mapping):
        for key in value:
            if not (key is None or isinstance(key, (bool, int, float, str))):
                raise CheckpointError(
                    f"{path or 'The state'} has the key {key!r}, which a checkpoint cannot keep.\n"
                    "Use strings or numbers as keys."
                )
        packed = [(key, _pack(v, _join(path, key), tensors)) for key, v in value.items()]
        if isinstance(value, Counter):
            return {"$counter": [[_pack(key, path, {}), v] for key, v in packed]}
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return dict(packed)
        return {"$items": [[_pack(key, path, {}), v] for key, v in packed]}
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    raise CheckpointError(
        f"{path or 'The state'} is a {kind}, which a checkpoint cannot keep.\n"
        "Give numbers, strings, None, lists and dictionaries of them, or tensors."
    )


def _join(path: str, key: object) -> str:
    return f"{path}/{key}" if path else str(key)


def unpack(packed: Any, tensors: Mapping[str, Tensor]) -> Any:
    """What ``pack`` was given. Raises ValueError where the two do not fit together."""
    named: list[str] = []
    try:
        value = _unpack(packed, tensors, named)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if sorted(named) != sorted(tensors):
        raise ValueError("its tensors are not those of the file beside it")
    return value


def _unpack(packed: Any, tensors: Mapping[str, Tensor], named: list[str]) -> Any:
    if isinstance(packed, list):
        return [_unpack(v, tensors, named) for v in packed]
    if not isinstance(packed, dict):
        return packed
    if not any(key.startswith("$") for key in packed):
        return {key: _unpack(v, tensors, named) for key, v in packed.items()}
    try:
        ((mark, content),) = packed.items()
        if mark == "$tensor":
            named.append(content)
            return tensors[content]
        if mark == "$float" and content in ("nan", "inf", "-inf"):
            return float(content)
        if mark in ("$items", "$counter"):
            items = {_unpack(k, tensors, named): _unpack(v, tensors, named) for k, v in content}
            return items if mark == "$items" else Counter(items)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{str(packed)[:60]} cannot be read") from error
    raise ValueError(f"{str(packed)[:60]} cannot be read")


def dumps(value: Any) -> str:
    """JSON text of packed values, in their order."""
    return json.dumps(value, allow_nan=False, indent=2)


def loads(text: str | bytes) -> Any:
    """Packed values of a JSON text. Raises ValueError when it is not strict JSON."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _refuse_constant(word: str) -> None:
    raise ValueError(f"{word} is not JSON")


def lay_flat(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Contiguous tensors on the cpu that share no memory, and how to make the originals of them again.

    Strides are kept: fused Adam on the cpu walks weights and moments as flat memory, so moments that come
    back in another memory format than their ``channels_last`` weights corrupt the run (torch 2.13).
    """
    flat: dict[str, Tensor] = {}
    first: dict[tuple[Any, ...], str] = {}
    taken: set[int] = set()
    aliases: dict[str, str] = {}
    strides: dict[str, list[int]] = {}
    for name, tensor in tensors.items():
        if tensor.layout is not torch.strided or tensor.is_meta:
            raise CheckpointError(
                f"{name} is a {tensor.layout} tensor on {tensor.device}, which a checkpoint cannot keep.\n"
                "Give dense tensors that hold values."
            )
        identity = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and first.setdefault(identity, name) != name:
            aliases[name] = first[identity]
            continue
        stride = torch.empty_like(tensor, device="meta").stride()
        if stride != torch.empty(tensor.shape, device="meta").stride():
            strides[name] = list(stride)
        plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        storage = plain.untyped_storage()
        if storage.data_ptr() in taken or storage.nbytes() != plain.nbytes:
            plain = plain.clone()
        taken.add(plain.untyped_storage().data_ptr())
        flat[name] = plain
    layout = {"aliases": aliases, "strides": strides}
    return flat, {key: value for key, value in layout.items() if value}


def lay_out(flat: Mapping[str, Tensor], layout: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors that ``lay_flat`` was given. Raises ValueError where the layout is not one of them."""
    tensors = dict(flat)
    try:
        for name, stride in layout.get("strides", {}).items():
            tensor = tensors[name]
            if 1 + sum((n - 1) * s for n, s in zip(tensor.shape, stride, strict=True)) != tensor.numel():
                raise ValueError(f"the strides of {name} do not fit its shape")
            tensors[name] = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype).copy_(tensor)
        for name, kept in layout.get("aliases", {}).items():
            tensors[name] = tensors[kept]
    except (KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(f"its layout in the manifest cannot be read ({error})") from error
    return tensors


@contextmanager
def writing(name: str) -> Iterator[None]:
    """Turn a failure of the disk into a CheckpointError that names what was being written."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{name} could not be written: {error}.\n"
            "Earlier checkpoints are untouched: the run can go on from them once there is space and access."
        ) from error


def sync_folder(folder: Path) -> None:
    """Make the names in ``folder`` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class FileWriter:
    """Writes the files of one checkpoint, each synced; ``files`` and ``layouts`` go into its manifest."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: dict[str, dict[str, Any]] = {}
        self.layouts: dict[str, dict[str, Any]] = {}

    def json(self, name: str, value: Any) -> None:
        """One JSON file of values without tensors."""
        packed, tensors = pack(value)
        if tensors:
            raise CheckpointError(f"{name} keeps JSON values only, but {next(iter(tensors))} is a tensor.")
        self.text(name, dumps(packed))

    def tree(self, stem: str, value: Any) -> None:
        """``stem.json``, and ``stem.safetensors`` when there are tensors in ``value``."""
        packed, tensors = pack(value)
        self.text(f"{stem}.json", dumps(packed))
        if tensors:
            self.tensors(f"{stem}.safetensors", tensors)

    def text(self, name: str, text: str) -> None:
        """One file of text."""
        with writing(name):
            path = self._place(name)
            path.write_text(text + "\n", encoding="utf-8")
            self._seal(name, path)

    def tensors(
        self, name: str, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None
    ) -> None:
        """One safetensors file; tensors that share memory are written once."""
        flat, layout = lay_flat(tensors)
        if layout:
            self.layouts[name] = layout
        with writing(name):
            path = self._place(name)
            path.touch()
            mode = path.stat().st_mode
            try:
                save_file(flat, path, metadata)
            except (KeyError, ValueError) as error:
                raise CheckpointError(
                    f"{name} has a tensor that safetensors cannot keep: {error}."
                ) from error
            path.chmod(mode)  # safetensors 0.8 leaves 0600, so that colleagues could not read the weights
            self._seal(name, path)

    def _place(self, name: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def _seal(self, name: str, path: Path) -> None:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            os.fsync(file.fileno())
        self.files[name] = {"size": path.stat().st_size, "sha256": digest}


class FileReader:
    """Reads the files that a manifest lists; ``unread`` are those that nobody asked for.

    ``damaged(part, what)`` makes the error that every method raises.
    """

    def __init__(
        self, folder: Path, manifest: dict[str, Any], damaged: Callable[[str, str], CheckpointError]
    ) -> None:
        self.folder = folder
        self.damaged = damaged
        self.unread: set[str] = set(manifest["files"])
        self._layouts = manifest["layouts"]

    def json(self, name: str, kind: type[T]) -> T:
        """The values of a JSON file, which must be a ``kind`` at the top."""
        return self._unpacked(name, self._packed(name), {}, kind)

    def tree(self, stem: str, kind: type[T]) -> T:
        """The values of ``stem.json`` with the tensors of ``stem.safetensors``."""
        name = f"{stem}.safetensors"
        tensors = self.tensors(name)[0] if name in self.unread else {}
        return self._unpacked(f"{stem}.json", self._packed(f"{stem}.json"), tensors, kind)

    def tensors(self, name: str) -> tuple[dict[str, Tensor], dict[str, str]]:
        """The tensors of a safetensors file, in memory of their own, and its metadata."""
        path = self._take(name)
        try:
            with safe_open(path, framework="pt") as file:
                flat = {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118 - not a dict
                metadata = file.metadata() or {}
            return lay_out(flat, self._layouts.get(name, {})), metadata
        except (OSError, SafetensorError, ValueError, AttributeError) as error:
            raise self.damaged(name, str(error)) from error

    def optimizer(self, groups_name: str, state_name: str) -> dict[str, Any]:
        """The state dict of one optimizer, from its two files."""
        tensors, metadata = self.tensors(state_name)
        try:
            packed = {"state": loads(metadata["state"]), "param_groups": self._packed(groups_name)}
            saved = unpack(packed, tensors)
            state, groups = saved["state"], saved["param_groups"]
            if not isinstance(groups, list) or not all(
                isinstance(d, dict) for d in [*state.values(), *groups]
            ):
                raise ValueError("it is no state of an optimizer")
            return {"state": {int(index): values for index, values in state.items()}, "param_groups": groups}
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise self.damaged(state_name, f"{error}, together with {groups_name}") from error

    def _take(self, name: str) -> Path:
        if name not in self.unread:
            raise self.damaged(name, "the manifest does not list it")
        self.unread.remove(name)
        return self.folder / name

    def _packed(self, name: str) -> Any:
        path = self._take(name)
        try:
            return loads(path.read_bytes())
        except (OSError, ValueError) as error:
            raise self.damaged(name, str(error)) from error

    def _unpacked(self, name: str, packed: Any, tensors: Mapping[str, Tensor], kind: type[T]) -> T:
        try:
            value = unpack(packed, tensors)
        except ValueError as error:
            raise self.damaged(name, str(error)) from error
        if not isinstance(value, kind):
            raise self.damaged(name, f"it holds a {type(value).__name__}, not a {kind.__name__}")
        return value
