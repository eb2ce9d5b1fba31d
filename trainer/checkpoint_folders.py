"""The folders of a run's checkpoints: put in place, replaced and deleted so that each is whole or not there."""

from __future__ import annotations

import re
import secrets
import shutil
from contextlib import suppress
from pathlib import Path

from .checkpoint_files import sync_folder

MANIFEST = "manifest.json"
STEP_NAME = re.compile(r"[0-9]{1,18}")
EXCEPTION = "-exception"  # after the step, of what an error left
SIBLING = re.compile(r"\.(?P<name>.+)\.(?P<purpose>writing|replaced|deleting)-[0-9a-f]{8}")


def is_checkpoint(folder: Path) -> bool:
    """Whether a checkpoint was published here, to the eye; its manifest says whether it is whole."""
    return not folder.is_symlink() and (folder / MANIFEST).is_file() and (folder / "training_state").is_dir()


def sibling(folder: Path, purpose: str) -> Path:
    """A free name beside ``folder`` for a folder that is being written, replaced or deleted."""
    return folder.parent / f".{folder.name}.{purpose}-{secrets.token_hex(4)}"


def publish(temporary: Path, folder: Path) -> None:
    """Give the finished ``temporary`` its name; a checkpoint that has it makes way only then."""
    if not is_checkpoint(folder):
        is_of_a_step = STEP_NAME.fullmatch(folder.name.removesuffix(EXCEPTION))
        if is_of_a_step and folder.parent.name == "checkpoints" and folder.is_dir():
            folder.rename(f"{folder}.damaged-{secrets.token_hex(4)}")  # without its manifest
        temporary.rename(folder)  # refused by the system where something else is
        sync_folder(folder.parent)
        return
    before = sibling(folder, "replaced")
    folder.rename(before)
    try:
        temporary.rename(folder)
    except OSError:
        before.rename(folder)
        raise
    sync_folder(folder.parent)
    with suppress(OSError):  # the new one is in place; the rest is swept at the next save
        remove(before)


def remove(folder: Path) -> None:
    """Delete a folder, under another name first so that a half-deleted one is never taken for whole."""
    left = SIBLING.fullmatch(folder.name)
    if not (left and left["purpose"] == "deleting"):
        folder = folder.rename(sibling(folder.with_name(left["name"]) if left else folder, "deleting"))
        sync_folder(folder.parent)
    shutil.rmtree(folder)


def sweep(folder: Path) -> None:
    """Clear away what killed processes left of this checkpoint and, in a run, of its others."""
    for path in list(folder.parent.iterdir()):
        left = SIBLING.fullmatch(path.name)
        if left is None:
            continue
        in_run = STEP_NAME.fullmatch(left["name"]) and STEP_NAME.fullmatch(folder.name)
        if left["name"] != folder.name and not in_run:
            continue
        if left["purpose"] == "replaced" and not (folder.parent / left["name"]).exists():
            path.rename(folder.parent / left["name"])
        else:
            with suppress(OSError):  # a busy file is no reason to lose the run; the next save tries again
                remove(path)
