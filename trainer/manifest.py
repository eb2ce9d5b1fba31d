"""The manifest of a checkpoint: what it must say, its seal, and whether the files it lists are those written."""

from __future__ import annotations

import hashlib
import json
import re
import stat
from pathlib import Path
from typing import Any

from ..strategies.checks import is_whole
from ..strategies.errors import CheckpointError
from .checkpoint_folders import MANIFEST
from .packing import loads, unpack

FORMAT_VERSION = 1

LARGEST = 2**28  # bytes of a manifest, thousands of times what one has; a larger one would only fill the memory

_FILE_NAME = re.compile(r"(pretrained_model(_[a-z]+)?|training_state)/\w+\.(json|safetensors)", re.ASCII)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint, whose own integrity is verified and not that of the files it lists.

    Raises:
        CheckpointError: There is none, it is damaged, or a newer policyfit wrote it.
    """
    try:
        if (size := _size(folder / MANIFEST)) > LARGEST:
            raise ValueError(f"it has {size} bytes")
        packed = loads((folder / MANIFEST).read_bytes())
        manifest = unpack(packed, {})
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{folder} is not a whole checkpoint of policyfit: it has no {MANIFEST}.\n"
            "Give another checkpoint of the run, or the run's folder, which means its newest whole one."
        ) from error
    except (OSError, ValueError) as error:
        raise damaged(folder, MANIFEST, str(error)) from error
    if not isinstance(manifest, dict) or type(manifest.get("format_version")) is not int:
        raise damaged(folder, MANIFEST, "it names no format_version")
    if manifest["format_version"] > FORMAT_VERSION:
        raise CheckpointError(
            f"Checkpoint {folder} has format {manifest['format_version']}, written by a newer policyfit; "
            f"this one reads format {FORMAT_VERSION}.\nUpdate policyfit to use it."
        )
    if manifest.get("sha256") != seal(packed):
        raise damaged(folder, MANIFEST, "its contents are not those that were written")
    if not _has_shape(manifest):
        raise damaged(folder, MANIFEST, "its counters, its list of files or its facts of the run cannot be read")
    return manifest


def check_files(folder: Path, manifest: dict[str, Any], *, contents: bool) -> None:
    """Compare the files of a checkpoint with its manifest: names and sizes, and with ``contents`` every byte.

    Raises:
        CheckpointError: A file is missing, damaged, or not listed.
    """
    for name, entry in manifest["files"].items():
        try:
            size = _size(folder / name)
            if size != entry.get("size"):
                raise damaged(folder, name, f"it has {size} bytes instead of {entry.get('size')}")
            if contents:
                with (folder / name).open("rb") as file:
                    if hashlib.file_digest(file, "sha256").hexdigest() != entry.get("sha256"):
                        raise damaged(folder, name, "its contents are not those that were written")
        except FileNotFoundError as error:
            raise damaged(folder, name, "it is missing") from error
        except OSError as error:
            raise damaged(folder, name, str(error)) from error
    present = {f"training_state/{path.name}" for path in (folder / "training_state").glob("[!.]*")}
    if foreign := present - set(manifest["files"]):
        raise damaged(folder, min(foreign), "the manifest does not list it")


def seal(packed: dict[str, Any]) -> str:
    """The sha256 of a packed manifest without its own entry for it."""
    rest = {key: value for key, value in packed.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def are_counters(value: Any) -> bool:
    """Whether a manifest's counters have at least ``step`` and ``micro_batches``, both whole numbers."""
    return isinstance(value, dict) and all(is_whole(value.get(n), 0) for n in ("step", "micro_batches"))


def damaged(folder: Path, part: str, what: str) -> CheckpointError:
    """The error for a part of a checkpoint that is not what it must be; ``what`` is a clause that says so."""
    return CheckpointError(
        f"Checkpoint {folder}: {part} is damaged: {what}.\n"
        "Give another checkpoint of the run, or the run's folder, which means its newest whole one."
    )


def _size(path: Path) -> int:
    """The size of a regular file. Raises OSError for a pipe, which would be waited for, and a device without end."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise OSError("it is no regular file")
    return found.st_size


def _has_shape(manifest: dict[str, Any]) -> bool:
    files, layouts = manifest.get("files"), manifest.get("layouts")
    return (
        manifest["format_version"] == FORMAT_VERSION
        and are_counters(manifest.get("counters"))
        and all(isinstance(manifest.get(name), str) for name in ("precision", "device"))
        and all(isinstance(manifest.get(name, {}), dict) for name in ("data", "movers", "settings"))
        and isinstance(files, dict)
        and all(_FILE_NAME.fullmatch(str(name)) and isinstance(entry, dict) for name, entry in files.items())
        and isinstance(layouts, dict)
        and all(isinstance(entry, dict) for entry in layouts.values())
    )
