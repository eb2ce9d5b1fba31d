"""``RUN_DIR/metrics.jsonl``: every record and event of a run, one JSON object a line."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from torch import nn

from ..strategies.errors import CallbackError
from .callback import Callback

if TYPE_CHECKING:
    from ..trainer.trainer import Trainer


class MetricsLog(Callback):
    """Write what is logged to ``RUN_DIR/metrics.jsonl``, readable at any moment, on rank 0.

    JSON has no NaN and no infinity; they become the strings "nan", "inf" and "-inf", which Python's ``float``
    and numpy read. Resuming drops what was written after the checkpoint, so that each step stands once.
    """

    def __init__(self) -> None:
        self._file: TextIO | None = None
        self._early: list[Mapping[str, Any]] = []  # events from before on_fit_start, which opens the file

    def on_fit_start(self, trainer: Trainer, policy: nn.Module) -> None:
        """Bring the file to the state of the checkpoint, and open it."""
        if not trainer.is_main:
            return
        path = trainer.run_dir / "metrics.jsonl"
        if path.exists():  # also of a run that was saved before its first step
            _cut(path, trainer.resumed_step, trainer.updates)
        self._file = path.open("a", encoding="utf-8")
        for record in self._early:
            _write(self._file, record)
        self._early.clear()

    def on_log(self, trainer: Trainer, policy: nn.Module, record: Mapping[str, Any]) -> None:
        """Write one line, at once."""
        if self._file is not None:
            _write(self._file, record)
        elif trainer.is_main:
            self._early.append(dict(record))

    def teardown(self, trainer: Trainer, policy: nn.Module, stage: str) -> None:
        """Close the file; a stage without a fit leaves none."""
        if stage == "fit":
            if self._file is not None:
                self._file.close()
            self._file = None
        if self._file is None:
            self._early.clear()


def _write(file: TextIO, record: Mapping[str, Any]) -> None:
    file.write(json.dumps(_plain(record), allow_nan=False, default=str) + "\n")
    file.flush()


def _plain(value: Any) -> Any:
    """The value with its non-finite floats as text."""
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _cut(path: Path, last_step: int, last_update: int) -> None:
    """Keep what was written up to a step; a skipped update makes none, so its events go by the update.

    Raises:
        CallbackError: A whole line is not a record.
    """
    # A line without its end was being written when the run was killed.
    lines = [line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]
    kept = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            after = record["step"] > last_step or record.get("update", 0) > last_update
        except (ValueError, KeyError, TypeError) as error:
            raise CallbackError(
                f"Line {number} of {path} is not a record of metrics, so the run cannot go on in it.\n"
                "Repair the line, or move the file away."
            ) from error
        if not after:
            kept.append(line)
    aside = path.with_name(path.name + ".tmp")
    with aside.open("w", encoding="utf-8") as file:
        file.writelines(kept)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
