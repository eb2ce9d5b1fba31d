"""The folder of a run: making a new one, and never writing into another run's."""

from __future__ import annotations

import time
from itertools import count
from pathlib import Path

from ..strategies.errors import ConfigError

_MARKS = ("config.yaml", "plan.json", "metrics.jsonl", "checkpoints")


def _marks(folder: Path) -> list[Path]:
    return [folder / mark for mark in _MARKS if (folder / mark).exists()]


def holds_a_run(folder: Path) -> bool:
    """Whether a run has written here."""
    return bool(_marks(folder))


def check_free(folder: Path) -> None:
    """Refuse a folder that a new run may not write into; creates nothing.

    Raises:
        ConfigError: It holds a run, or is not a folder.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"run_dir must be a folder, but {folder} is a file.\nChoose another run_dir.")
    if holds_a_run(folder):
        raise ConfigError(
            f"run_dir {folder} already holds a run, and nothing of it is overwritten.\n"
            "Go on with it by resume='last' (--resume on the command line), or choose another run_dir."
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
    """The run folder under ``runs/`` that was written to last.

    Raises:
        ConfigError: There is none.
    """
    found = [p for p in parent.iterdir() if holds_a_run(p)] if parent.is_dir() else []
    if not found:
        raise ConfigError(f"resume='last' was requested without a run_dir, and there is no run under {parent}/.")
    return max(found, key=lambda p: (max(mark.stat().st_mtime_ns for mark in _marks(p)), p.name))
