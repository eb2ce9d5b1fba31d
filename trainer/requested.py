"""The run that a command is asked for: its files, found and read with the command line over them."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..strategies.errors import ConfigError

if TYPE_CHECKING:
    from .config import RunConfig, RunRecipe


def prints() -> bool:
    """Whether this process is the one to print, as its launcher says: before ranks meet they know no more."""
    return os.environ.get("RANK", "0") == "0"


def warn(text: str) -> None:
    """Say on standard error what a user should know."""
    if prints():
        print(text, file=sys.stderr)


def read(files: Sequence[str | Path], keys: Sequence[tuple[str, str]]) -> RunConfig:
    """The run of files and command line; words of other tools in it are said, one a line."""
    from .config import read_run

    config = read_run(files, keys)
    for text in dict.fromkeys(notice.text for notice in config.notices):
        warn(f"note: {text}")
    return config


@contextmanager
def configured(request: argparse.Namespace) -> Iterator[RunRecipe]:
    """The run that files and command line say, checked as a whole; while this is open, its modules can be imported."""
    from .config import resolve

    if request.changes and request.resume is None:
        raise ConfigError("--changes is for a run that is gone on with.\nLeave it out, or give --resume, too.")
    files = _files(request)
    config = read(files, request.keys)
    if not request.files:
        config = _where_it_is(config, files[0].parent)
    if request.audit:
        config = _with_audit(config)
    with config.importable():
        yield resolve(config)


def _files(request: argparse.Namespace) -> list[Path]:
    """The run files; a run that is gone on with brings its own."""
    from .remote import is_url
    from .run_dir import newest_run

    if request.files:
        return [Path(file) for file in request.files]
    if request.resume in (None, "auto") or is_url(request.resume):
        raise ConfigError("fit needs a run file: policyfit fit RUN.yaml.")
    return [config_of(newest_run() if request.resume == "last" else Path(request.resume))]


def config_of(path: Path) -> Path:
    """The ``config.yaml`` of a run, given its folder or one of its checkpoints."""
    for folder in (path, path.resolve().parent.parent):
        if (folder / "config.yaml").is_file():
            return folder / "config.yaml"
    found = "does not exist" if not path.exists() else "is a file" if path.is_file() else "is no run's folder"
    raise ConfigError(f"{path} {found}, so there is no config.yaml.\nGive a run's folder, or RUN_DIR/checkpoints/STEP.")


def _where_it_is(config: RunConfig, folder: Path) -> RunConfig:
    """The run with the folder that its file is in for a ``run_dir``, if the file names another and nobody else one."""
    mark, trainer = config.marks.get(("trainer", "run_dir")), config.values.get("trainer")
    if mark is None or not mark.line or not isinstance(trainer, dict):
        return config
    said = trainer.get("run_dir")
    if not isinstance(said, str) or Path(said).resolve() == folder.resolve():
        return config
    warn(f"note: {folder / 'config.yaml'} says run_dir: {said}, but the run is in {folder} now and goes on there")
    return replace(config, values={**config.values, "trainer": {**trainer, "run_dir": str(folder)}})


def _with_audit(config: RunConfig) -> RunConfig:
    """The run with ``PrecisionAudit`` among its callbacks; one that has it already, or is faulty there, as it is."""
    audit = {"class_path": "policyfit.PrecisionAudit"}
    trainer = config.values.get("trainer") or {}
    callbacks = (trainer.get("callbacks") or []) if isinstance(trainer, dict) else None
    if not isinstance(callbacks, list):
        return config
    named = [c.get("class_path") if isinstance(c, dict) else c for c in callbacks]
    if "PrecisionAudit" in (str(name).rpartition(".")[2] for name in named):
        return config
    return replace(config, values={**config.values, "trainer": {**trainer, "callbacks": [*callbacks, audit]}})
