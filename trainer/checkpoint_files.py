"""The files of one checkpoint: written synced and hashed, read with every damage named."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..strategies.errors import CheckpointError
from .packing import dumps, lay_flat, lay_out, loads, pack, unpack

T = TypeVar("T")


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
            raise CheckpointError(
                f"{name} keeps JSON values only, but {next(iter(tensors))} is a tensor.\nGive tensor.tolist()."
            )
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

    def tensors(self, name: str, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
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
                    f"{name} has a tensor that safetensors cannot keep: {error}.\nGive it another dtype."
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

    def __init__(self, folder: Path, manifest: dict[str, Any], damaged: Callable[[str, str], CheckpointError]) -> None:
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
        file, metadata, layout = self.open(name)
        try:
            flat = {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118 - not a dict
            return lay_out(flat, layout), metadata
        except (OSError, SafetensorError, ValueError, AttributeError) as error:
            raise self.damaged(name, str(error)) from error

    def open(self, name: str) -> tuple[Any, dict[str, str], dict[str, Any]]:
        """A safetensors file, mapped for as long as it is used; its metadata, and the layout in the manifest."""
        path = self._take(name)
        try:
            file = safe_open(path, framework="pt")
            metadata: dict[str, str] = file.metadata() or {}  # type: ignore[no-untyped-call]
            return file, metadata, self._layouts.get(name, {})
        except (OSError, SafetensorError, ValueError, AttributeError) as error:
            raise self.damaged(name, str(error)) from error

    def optimizer(
        self, groups_name: str, state_name: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
    ) -> dict[str, Any]:
        """The state dict of one optimizer, from its JSON file and what is in the other."""
        try:
            packed = {"state": loads(metadata["state"]), "param_groups": self._packed(groups_name)}
            saved = unpack(packed, tensors)
            state, groups = saved["state"], saved["param_groups"]
            if not isinstance(groups, list) or not all(isinstance(d, dict) for d in [*state.values(), *groups]):
                raise ValueError("it is no state of an optimizer")
            return {"state": {int(index): values for index, values in state.items()}, "param_groups": groups}
        except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
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
