"""The folder of a run: making a new one, and never writing into another run's."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from ..strategies.errors import ConfigError
from .checkpoint_folders import MANIFEST, STEP_NAME

_MARKS = ("config.yaml", "plan.json", "metrics.jsonl", "checkpoints")


def _marks(folder: Path) -> list[Path]:
    return [folder / mark for mark in _MARKS if (folder / mark).exists()]


def holds_a_run(folder: Path) -> bool:
    """Whether a run has written here."""
    return bool(_marks(folder))


def has_checkpoint(folder: Path) -> bool:
    """Whether a checkpoint was completed here that a resume takes by itself."""
    return any(STEP_NAME.fullmatch(path.parent.name) for path in folder.glob(f"checkpoints/*/{MANIFEST}"))


def run_of(checkpoint: Path) -> Path | None:
    """The run that a checkpoint lies in; ``None`` for one that was saved to a path of its own."""
    folder = checkpoint.resolve().parent
    return folder.parent if folder.name == "checkpoints" else None


def replace_text(path: Path, text: str) -> None:
    """Write a file so that a kill leaves the old one or the new one."""
    aside = path.with_name(f".{path.name}.new")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Keep other processes from writing into the run's folder at the same time; ends with the process at the latest.

    Raises:
        ConfigError: Another one is at work there.
    """
    if sys.platform == "win32":
        yield
        return
    import fcntl

    with (folder / ".lock").open("a") as lock:
        try:
            # Not flock: loader processes would inherit it, and keep it for a while after a kill.
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            raise ConfigError(
                f"Another process is writing into {folder}.\nWait until it is done, or choose another run_dir."
            ) from error
        yield


def check_free(folder: Path) -> None:
    """Refuse a folder that a new run may not write into; creates nothing.

    Raises:
        ConfigError: It holds a run, or is not a folder.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"run_dir must be a folder, but {folder} is a file.\nChoose another run_dir.")
    if holds_a_run(folder):
        resumable = "Go on with it by resume='last' (--resume on the command line)"
        ended = "It ended before its first checkpoint, so there is nothing to go on from: delete the folder"
        raise ConfigError(
            f"run_dir {folder} already holds a run, and nothing of it is overwritten.\n"
            f"{resumable if has_checkpoint(folder) else ended}, or choose another run_dir."
        )


def new_name(policy: str, parent: Path = Path("runs")) -> Path:
    """Where a run without a ``run_dir`` goes: under ``runs/``, named by the time and the policy; creates nothing."""
    return parent / f"{time.strftime('%Y-%m-%d_%H-%M-%S')}-{policy}"


def make(folder: Path, *, new: bool) -> Path:
    """Make the folder; if it has to be ``new`` and is there already, the first of ``folder-1``, ``folder-2``, ...

    Raises:
        ConfigError: The file system refuses.
    """
    try:
        if not new:
            folder.mkdir(parents=True, exist_ok=True)
            return folder
        folders = (folder.with_name(f"{folder.name}-{n}") if n else folder for n in count())
        return next(free for free in folders if _made(free))
    except OSError as error:
        raise ConfigError(f"run_dir {folder} cannot be made: {error}.\nChoose another run_dir.") from error


def _made(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True)
    except FileExistsError:  # perhaps by another process, a moment ago
        return False
    return True


def newest_run(parent: Path = Path("runs")) -> Path:
    """The run folder under ``runs/`` that was written to last, of those with a checkpoint.

    Raises:
        ConfigError: There is none.
    """
    runs = [p for p in parent.iterdir() if not p.name.startswith(".")] if parent.is_dir() else []  # else it is arriving
    found = [p for p in runs if has_checkpoint(p)]
    if not found:
        raise ConfigError(
            f"resume='last' was requested without a run_dir, and no run under {parent}/ has a checkpoint.\n"
            "Name the run's folder, or start a new run."
        )
    return max(found, key=lambda p: (max(mark.stat().st_mtime_ns for mark in _marks(p)), p.name))
