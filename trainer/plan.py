"""What a run is going to do, and why: printed at its start and kept as ``plan.json``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.optim import Optimizer

from ..strategies.formats import Support
from .epochs import TrainingData
from .schedule import Schedule, WarmupCosine
from .settings import Settings


@dataclass(frozen=True, slots=True)
class Line:
    """One decision: what was asked, what was chosen, and the reason; ``numbers`` are for programs."""

    what: str
    asked: str
    chosen: str
    reason: str = ""
    numbers: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Plan:
    """The decisions of a run in the order in which they were taken, and remarks on them.

    ``environment`` has the variables that torch and accelerate read, as they were.
    """

    lines: list[Line] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    environment: Mapping[str, str] = field(default_factory=dict)

    def add(self, what: str, asked: object, chosen: object, reason: str = "", **numbers: Any) -> None:
        """Add one decision."""
        self.lines.append(Line(what, str(asked), str(chosen), reason, numbers))

    def chosen(self, what: str) -> str:
        """What was chosen for ``what``."""
        return next(line.chosen for line in self.lines if line.what == what)

    def text(self) -> str:
        """A few aligned lines for people."""
        width = max((len(line.what) for line in self.lines), default=0)
        rows = []
        for line in self.lines:
            asked = "" if line.asked in (line.chosen, "") else f"  (asked: {line.asked})"
            reason = f"  — {line.reason}" if line.reason else ""
            rows.append(f"{line.what:<{width}}  {line.chosen}{asked}{reason}")
        return "\n".join([*rows, *(f"note: {note}" for note in self.notes)])

    def to_dict(self) -> dict[str, Any]:
        """For ``plan.json``: one object a decision, keyed by what it is about."""
        decisions: dict[str, Any] = {}
        for line in self.lines:
            decision = {"asked": line.asked, "chosen": line.chosen, "reason": line.reason}
            decisions[line.what] = {**decision, **({"numbers": dict(line.numbers)} if line.numbers else {})}
        return {**decisions, "notes": list(self.notes), "environment_variables": dict(self.environment)}


# The words of single decisions --------------------------------------------------------------------------------------


def tf32_word(asked: bool | None, support: Support) -> str:
    """What becomes of TF32 on a device."""
    if asked is None:
        return "left alone"
    if not support.native:
        return "not applicable"
    return "off" if not asked else "on" if support.usable else "on, but not effective"


def rates(optimizer: Optimizer) -> str:
    """Learning rate and weight decay, of every group that has others; rates are those before the schedule."""
    found: dict[str, dict[str, None]] = {"lr": {}, "weight decay": {}}
    for group in optimizer.param_groups:
        for name, value in (
            ("lr", group.get("initial_lr", group.get("lr"))),
            ("weight decay", group.get("weight_decay")),
        ):
            if value is not None:
                found[name][f"{float(value):.4g}"] = None
    return ", ".join(f"{name} {' and '.join(values)}" for name, values in found.items() if values)


def schedule_words(schedules: Sequence[Schedule]) -> str:
    """The schedules, and what each counts."""
    return ", ".join(f"{type(s.scheduler).__name__} by {s.interval}" for s in schedules) or "none"


def schedule_notes(schedules: Sequence[Schedule], max_steps: int | None) -> list[str]:
    """A remark on each ``WarmupCosine`` that is at its floor before the run ends."""
    notes = []
    for schedule in schedules:
        curve, frequency = schedule.scheduler, schedule.frequency
        if max_steps is None or schedule.interval != "step" or type(curve) is not WarmupCosine:
            continue
        end = max(curve.total_steps, curve.warmup_steps + 1) * frequency
        if end < max_steps:
            floors = dict.fromkeys(f"{float(rate) * curve.min_factor:.4g}" for rate in curve.base_lrs)
            total = -(-max_steps // frequency)
            notes.append(
                f"WarmupCosine is at its end at step {end:,} of {max_steps:,}: from step {end + 1:,} on the learning "
                f"rate stays at {' and '.join(floors)}. For a curve as long as the run give it total_steps={total}, in "
                "a run file as schedule.init_args.total_steps; at a resume also changes='schedule', on the command "
                f"line --changes=schedule --schedule.total_steps={total}"
            )
    return notes


def data_words(data: TrainingData, settings: Settings) -> str:
    """Samples, micro-batches and windows of an epoch."""
    size = f"{data.samples_per_epoch:,} samples, " if data.samples_per_epoch is not None else ""
    batch = f"micro-batches of {data.batch_size}" if data.batch_size is not None else "finished micro-batches"
    per_epoch = f", {data.batches_per_epoch:,} an epoch" if data.batches_per_epoch is not None else ""
    window = f", {settings.accumulate} a window" if settings.accumulate > 1 else ""
    return f"{size}{batch}{per_epoch}{window}"
