"""Learning rate schedules: torch's own and ``WarmupCosine``, and what advances them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ..strategies.checks import number, whole
from ..strategies.errors import ConfigError

ScheduleFactory = Callable[[Optimizer], LRScheduler]


@dataclass(slots=True)
class Schedule:
    """A learning rate schedule and what advances it: landed steps or epochs.

    Args:
        interval: "step" counts updates that landed, "epoch" passes over the data.
        frequency: Advance every so many of them.
        monitor: For ``ReduceLROnPlateau``: the metric it looks at, such as ``"val/loss"``.
    """

    scheduler: LRScheduler
    interval: Literal["step", "epoch"] = "step"
    frequency: int = 1
    monitor: str | None = None
    seen: int = 0

    def advance(self, metrics: Mapping[str, float] | None = None) -> None:
        """One interval has passed.

        Raises:
            ConfigError: The monitored metric is not among ``metrics``.
        """
        self.seen += 1
        if self.seen % self.frequency:
            return
        if self.monitor is None:
            self.scheduler.step()
            self._check()
            return
        if metrics is None or self.monitor not in metrics:
            known = ", ".join(sorted(metrics or {})) or "none yet"
            raise ConfigError(
                f"The schedule {type(self.scheduler).__name__} looks at {self.monitor!r}, which is not among the "
                f"metrics ({known}).\nName one of them as its monitor, or give val_data to fit."
            )
        self.scheduler.step(metrics[self.monitor])  # type: ignore[arg-type]

    def catch_up(self, intervals: int) -> bool:
        """Bring a new schedule to where it would be after ``intervals``; false if that hangs on metrics of then."""
        self.seen = intervals
        if self.monitor is not None:
            return False
        with warnings.catch_warnings():  # torch warns of a schedule that moves before its optimizer
            warnings.simplefilter("ignore", UserWarning)
            for _ in range(intervals // self.frequency):
                self.scheduler.step()
        return True

    def _check(self) -> None:
        for group in self.scheduler.optimizer.param_groups:
            rate = group["lr"]
            if type(rate) is float and not math.isfinite(rate):  # a tensor is not read: that would wait for the device
                raise ConfigError(
                    f"The schedule {type(self.scheduler).__name__} set the learning rate to {rate} after {self.seen} "
                    f"{self.interval}s.\nA learning rate must be finite: look at its formula at that {self.interval}."
                )

    def state_dict(self) -> dict[str, Any]:
        """The scheduler's own state and how many intervals it has seen."""
        return {**self.scheduler.state_dict(), "policyfit_seen": self.seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what ``state_dict`` gave."""
        own = dict(state)
        self.seen = int(own.pop("policyfit_seen", 0))
        self.scheduler.load_state_dict(own)


class WarmupCosine(LRScheduler):
    """Linear warm-up, then half a cosine down to ``min_factor`` of each group's learning rate.

    Args:
        warmup_steps: Landed steps until the full learning rate; the first step uses ``1 / (warmup_steps + 1)``. A run
            that is shorter, as a quick try may be, is warm-up from end to end.
        total_steps: Landed steps until the floor; the run file fills it from ``trainer.max_steps``.
        min_factor: The floor, as a part of the learning rate, 0 to 1.

    Source: Loshchilov and Hutter (2017), "SGDR", equation 5, without restarts.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        total_steps: int,
        warmup_steps: int = 0,
        min_factor: float = 0.0,
        last_epoch: int = -1,
    ) -> None:
        whole("WarmupCosine.total_steps", total_steps, 1, "Use the max_steps of the run.")
        whole("WarmupCosine.warmup_steps", warmup_steps, 0, "Use 0 to begin at the full learning rate.")
        number("WarmupCosine.min_factor", min_factor, least=0, most=1, remedy="Use 0 to end at a learning rate of 0.")
        self.warmup_steps, self.total_steps, self.min_factor = warmup_steps, total_steps, min_factor
        super().__init__(optimizer, last_epoch)

    def factor(self, step: int) -> float:
        """The part of the learning rate that applies to the step after ``step`` landed ones."""
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        rest = max(1, self.total_steps - self.warmup_steps)
        done = min(1.0, (step - self.warmup_steps) / rest)
        return self.min_factor + (1.0 - self.min_factor) * 0.5 * (1.0 + math.cos(math.pi * done))

    def get_lr(self) -> list[float | Tensor]:
        """The learning rates after ``last_epoch`` landed steps, one a parameter group."""
        factor = self.factor(self.last_epoch)
        return [base * factor for base in self.base_lrs]


def as_schedule(
    value: Any,
    optimizers: Sequence[Optimizer],
    default_interval: Literal["step", "epoch"] = "step",
    monitor: str | None = None,
) -> Schedule:
    """A torch scheduler, or Lightning's dict with one, as a ``Schedule``. ``ReduceLROnPlateau`` counts epochs.

    Raises:
        ConfigError: It is neither, has an unknown key or value, or moves an optimizer that is not of the run.
    """
    options = value if isinstance(value, Mapping) else {"scheduler": value}
    known = {"scheduler", "interval", "frequency", "monitor", "name", "strict", "reduce_on_plateau"}
    check_keys(options, known, "lr_scheduler")
    scheduler = options.get("scheduler")
    if not isinstance(scheduler, LRScheduler):
        raise ConfigError(
            f"lr_scheduler must be a torch learning rate scheduler, got {scheduler!r}.\n"
            "Return an object of torch.optim.lr_scheduler, or a dict that has one as its scheduler."
        )
    if not any(scheduler.optimizer is optimizer for optimizer in optimizers):
        raise ConfigError(
            f"The schedule {type(scheduler).__name__} moves an optimizer that is not one of the run's, so it would "
            "have no effect.\nMake it from the optimizer that is returned with it."
        )
    interval = options.get("interval", default_interval)
    frequency = options.get("frequency", 1)
    if interval not in ("step", "epoch"):
        raise ConfigError(
            f"lr_scheduler.interval must be 'step' or 'epoch', got {interval!r}.\n"
            "Use 'step' to advance after every update that landed."
        )
    whole("lr_scheduler.frequency", frequency, 1, "Use 1 to advance at every interval.")
    monitor = options.get("monitor", monitor)
    if isinstance(scheduler, ReduceLROnPlateau):
        if options.get("interval") == "step":
            raise ConfigError(
                "ReduceLROnPlateau counts epochs here, but lr_scheduler.interval is 'step'.\nUse interval='epoch'."
            )
        return Schedule(scheduler, "epoch", frequency, monitor or "val/loss")
    return Schedule(scheduler, interval, frequency)


def check_keys(given: Mapping[str, Any], known: set[str], where: str) -> None:
    """Refuse a key that would be ignored.

    Raises:
        ConfigError: Naming the key and those that there are.
    """
    unknown = sorted(set(given) - known)
    if unknown:
        raise ConfigError(
            f"{where} has the key {unknown[0]!r}, which would be ignored.\nUse one of {', '.join(sorted(known))}."
        )
