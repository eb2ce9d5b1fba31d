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
        self._last_step, self._records = 0, 0  # the last step with a record, and how many it has
        self._saved: tuple[int, int] | None = None  # the same at the checkpoint

    def state_dict(self) -> dict[str, Any]:
        """How many records the last step that has one had: those of after the checkpoint come again."""
        return {"step": self._last_step, "records": self._records}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take them back."""
        self._last_step, self._records = self._saved = (int(state["step"]), int(state["records"]))

    def on_fit_start(self, trainer: Trainer, policy: nn.Module) -> None:
        """Bring the file to the state of the checkpoint, and open it."""
        if self._saved is None:
            self._last_step, self._records = 0, 0
        if not trainer.is_main:
            return
        path = trainer.run_dir / "metrics.jsonl"
        if path.exists():  # also of a run that was saved before its first step
            _cut(path, trainer.resumed_step, trainer.updates, self._saved)
        self._file = path.open("a", encoding="utf-8")
        for record in self._early:
            _write(self._file, record)
        self._early.clear()

    def on_log(self, trainer: Trainer, policy: nn.Module, record: Mapping[str, Any]) -> None:
        """Write one line, at once."""
        if "event" not in record:
            self._records = self._records + 1 if record["step"] == self._last_step else 1
            self._last_step = record["step"]
        if self._file is not None:
            _write(self._file, record)
        elif trainer.is_main:
            self._early.append(dict(record))

    def teardown(self, trainer: Trainer, policy: nn.Module, stage: str) -> None:
        """Close the file; a stage without a fit leaves none."""
        if stage == "fit":
            self._saved = None
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


def _cut(path: Path, last_step: int, last_update: int, saved: tuple[int, int] | None) -> None:
    """Keep what was written up to a step; a skipped update makes none, so its events go by the update.

    What was recorded at that very step after the checkpoint, such as a last validation, goes too: ``saved`` says of
    the last step that had records how many it had.

    Raises:
        CallbackError: A whole line is not a record.
    """
    # A line without its end was being written when the run was killed.
    lines = [line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]
    kept: list[str] = []
    records, most = 0, None if saved is None else saved[1] if saved[0] == last_step else 0
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            after = record["step"] > last_step or record.get("update", 0) > last_update
            if record["step"] == last_step and "event" not in record:
                records += 1
                after = after or (most is not None and records > most)
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
