"""What a person sees of a run: a bar on a terminal, plain lines anywhere else."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from .callback import Callback

if TYPE_CHECKING:
    from rich.console import Console

    from ..trainer.outcome import Outcome
    from ..trainer.trainer import Trainer

_REFRESH_S = 0.25
_NOT_SHOWN = ("step", "epoch", "samples_per_s", "skip_rate")
#: Events that can come by the hundred: the 1st, 2nd, 4th, 8th ... of a kind get a line.
_FOLDED = ("skip", "overflow", "scale_drop", "scale_growth")


class Progress(Callback):
    """Print the plan, the progress, the events and the end of a run, on rank 0; never reads the device.

    On a terminal a bar is drawn at most four times a second, without a thread of its own: at the end of an
    update, when the clock says so. Elsewhere each log record is one line.

    Events named "note" are for ``metrics.jsonl`` only.

    Args:
        console: Where to print; ``None`` is standard output.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console
        self._bar: Any = None
        self._early: list[Mapping[str, Any]] = []  # events from before on_fit_start: they follow the plan
        self._started: float | None = None
        self._next_refresh = 0.0
        self._step = self._skipped = 0
        self._seen: Counter[str] = Counter()
        self._ended_by: str | None = None  # not the error, whose traceback would keep the run's tensors

    def on_fit_start(self, trainer: Trainer, policy: nn.Module) -> None:
        """Print what is going to run, and start the bar."""
        if not trainer.is_main:
            return
        self._started = time.monotonic()
        self._step, self._skipped = trainer.resumed_step, trainer.skipped
        self._seen.clear()
        self._ended_by = None
        self._print(trainer.plan.text())
        self._print_early()
        if self._open_console().is_terminal:
            self._start_bar(trainer, self._open_console())

    def on_update_end(self, trainer: Trainer, policy: nn.Module, outcome: Outcome) -> None:
        """Count, and redraw the bar if the last time is long ago."""
        self._step = outcome.step
        if not outcome.landed and outcome.reason not in ("failed", "not_alike"):  # which are not counted in the end
            self._skipped += 1
        if self._bar is not None and time.monotonic() >= self._next_refresh:
            if outcome.scale is not None:
                self._bar.update(0, scale=f"  scale {outcome.scale:g}")
            self._redraw(trainer)

    def on_log(self, trainer: Trainer, policy: nn.Module, record: Mapping[str, Any]) -> None:
        """A line, or new numbers beside the bar."""
        kind = record.get("event")
        if kind == "note" or not trainer.is_main:
            return
        if kind == "skip" and record["reason"] == "failed":  # which the error tells
            return
        if self._started is None:
            if kind is not None:
                self._early.append(dict(record))
            return
        if kind is not None:
            self._seen[kind] += 1
            times = self._seen[kind]
            if kind not in _FOLDED or times & (times - 1) == 0:
                self._print(_event_line(record, times))
            return
        self._skipped = record.get("skipped", self._skipped)
        is_training = "lr" in record  # validation and rollouts have records of their own
        if self._bar is None or not is_training:
            values = [f"{_short(name)} {_number(record[name])}" for name in record if name not in _NOT_SHOWN]
            of = "" if trainer.max_steps is None else f"/{trainer.max_steps}"
            self._print("  ".join([f"step {record['step']}{of}", *values]))
        else:
            shown = [name for name in record if name in ("train/loss", "loss", "lr", "steps_per_s")]
            self._bar.update(0, numbers="  ".join(f"{_short(n)} {_number(record[n])}" for n in shown))
            self._redraw(trainer)

    def on_exception(self, trainer: Trainer, policy: nn.Module, exception: BaseException) -> None:
        """Remember it for the last line."""
        self._ended_by = type(exception).__name__

    def teardown(self, trainer: Trainer, policy: nn.Module, stage: str) -> None:
        """Stop the bar, and say how the run ended and where its checkpoints are."""
        if self._bar is not None:
            self._redraw(trainer)
            self._bar.stop()
            self._bar = None
        if self._started is not None:
            self._print(self._last_line(trainer, time.monotonic() - self._started))
            if (trainer.run_dir / "checkpoints").is_dir():
                folder = trainer.run_dir / "checkpoints"
                here = folder.is_relative_to(Path.cwd())
                self._print(f"checkpoints: {folder.relative_to(Path.cwd()) if here else folder}")
        self._started = None
        self._print_early()

    def _last_line(self, trainer: Trainer, seconds: float) -> str:
        line = f"{trainer.status} at step {self._step}, {self._skipped} skipped, after {_duration(seconds)}"
        why = self._ended_by or trainer.stop_reason  # an error's words come with its traceback, or in a panel
        return f"{line}: {why}" if why else line

    def _start_bar(self, trainer: Trainer, console: Console) -> None:
        with _untouched_random():
            from rich import progress

        self._bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.MofNCompleteColumn(),
            progress.BarColumn(bar_width=None),
            progress.TextColumn("{task.fields[numbers]}{task.fields[scale]}{task.fields[skipped]}", markup=False),
            progress.TimeRemainingColumn(),
            console=console,
            auto_refresh=False,
            expand=True,
        )
        unit, done, total = self._position(trainer)
        self._bar.add_task(unit, total=total, completed=done, numbers="", scale="", skipped="")
        self._bar.start()

    def _position(self, trainer: Trainer) -> tuple[str, int, int | None]:
        """Steps of ``max_steps``; without that, micro-batches of all epochs, which skips do not change."""
        if trainer.max_steps is None and trainer.max_epochs is not None and trainer.batches_per_epoch is not None:
            return "batch", trainer.micro_batches, trainer.max_epochs * trainer.batches_per_epoch
        return "step", self._step, trainer.max_steps

    def _redraw(self, trainer: Trainer) -> None:
        skipped = f"  skipped {self._skipped}" if self._skipped else ""
        self._bar.update(0, completed=self._position(trainer)[1], skipped=skipped)
        self._bar.refresh()
        self._next_refresh = time.monotonic() + _REFRESH_S

    def _print(self, text: str) -> None:
        self._open_console().print(text, markup=False, highlight=False, soft_wrap=True)

    def _print_early(self) -> None:
        for event in self._early:
            self._print(_event_line(event, 1))
        self._early.clear()

    def _open_console(self) -> Console:
        if self._console is None:
            with _untouched_random():
                from rich.console import Console

            self._console = Console()
        return self._console


def _event_line(record: Mapping[str, Any], times: int) -> str:
    kind = record["event"]
    if "message" in record:
        text = f"{kind}: {record['message']}"
    elif kind == "skip":
        text = f"update {record['update']} skipped: {record['reason']}"
    elif kind in ("scale_drop", "scale_growth"):
        text = f"loss scale {record['old']:g} -> {record['new']:g}"
    else:
        fields = (f"{name} {_number(value)}" for name, value in record.items() if name not in ("step", "event"))
        text = f"{kind}: {', '.join(fields)}" if len(record) > 2 else str(kind)
    calibration = " (the loss scale is being calibrated)" if record.get("calibration") else ""
    count = f" ({times} so far)" if times > 1 and kind in _FOLDED else ""
    return f"step {record['step']}: {text}{calibration}{count}"


def _short(name: str) -> str:
    return {"steps_per_s": "steps/s"}.get(name, name.removeprefix("train/"))


def _number(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if value.is_integer() and abs(value) < 1e9 else f"{value:.4g}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


@contextmanager
def _untouched_random() -> Iterator[None]:
    """rich draws from python's global stream while it is imported, which a resumed run would do at another time."""
    before = random.getstate()
    yield
    random.setstate(before)
