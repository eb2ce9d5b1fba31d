"""The folder of a run: making a new one, and never writing into another run's."""

from __future__ import annotations

import time
from pathlib import Path

from ..strategies.errors import ConfigError

_MARKS = ("config.yaml", "plan.json", "metrics.jsonl", "checkpoints")


def holds_a_run(folder: Path) -> bool:
    """Whether a run has written here."""
    return any((folder / mark).exists() for mark in _MARKS)


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


def new_run_dir(name: str, parent: Path = Path("runs")) -> Path:
    """Make a new folder under ``runs/``, named by the time and the policy."""
    stem = f"{time.strftime('%Y-%m-%d_%H-%M-%S')}-{name}"
    for number in range(1000):
        folder = parent / (stem if number == 0 else f"{stem}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
    raise ConfigError(f"No free name was found for a run folder like {parent / stem}. Choose a run_dir.")


def newest_run(parent: Path = Path("runs")) -> Path:
    """The run folder under ``runs/`` that was written to last.

    Raises:
        ConfigError: There is none.
    """
    found = [p for p in parent.iterdir() if holds_a_run(p)] if parent.is_dir() else []
    if not found:
        raise ConfigError(f"resume='last' was requested without a run_dir, and there is no run under {parent}/.")
    return max(found, key=lambda p: (p.stat().st_mtime, p.name))
