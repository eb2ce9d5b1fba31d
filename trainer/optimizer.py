"""Optimizers and schedules: where they come from, their fused form, and when a schedule advances."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ..strategies.errors import ConfigError

OptimizerFactory = Callable[[Iterable[nn.Parameter]], Optimizer]
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
    seen: int = field(default=0)

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
            return
        if metrics is None or self.monitor not in metrics:
            known = ", ".join(sorted(metrics or {})) or "none yet"
            raise ConfigError(
                f"The schedule {type(self.scheduler).__name__} looks at {self.monitor!r}, which is not among the "
                f"metrics ({known}).\nName one of them as its monitor, or give val_data to fit."
            )
        self.scheduler.step(metrics[self.monitor])  # type: ignore[arg-type]

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
        warmup_steps: Landed steps until the full learning rate; the first step uses ``1 / (warmup_steps + 1)``.
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
        if warmup_steps < 0 or total_steps <= 0:
            raise ConfigError(
                f"WarmupCosine needs warmup_steps of at least 0 and total_steps of at least 1, got warmup_steps="
                f"{warmup_steps} and total_steps={total_steps}."
            )
        if not 0.0 <= min_factor <= 1.0:
            raise ConfigError(f"WarmupCosine.min_factor must lie between 0 and 1, got {min_factor}.")
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


# From what a policy or a run says to objects ------------------------------------------------------------------


def read_configured(
    configured: Any, default_interval: Literal["step", "epoch"]
) -> tuple[list[Optimizer], list[Schedule]]:
    """What ``configure_optimizers`` returned, in any of Lightning's forms.

    Args:
        configured: An optimizer; a list of them; a pair (optimizers, schedules); a dict with ``optimizer`` and
            ``lr_scheduler``; or a sequence of such dicts.
        default_interval: What advances a schedule that does not say.

    Raises:
        ConfigError: It is none of these.
    """
    if isinstance(configured, Optimizer):
        return [configured], []
    if isinstance(configured, Mapping):
        _known(configured, {"optimizer", "lr_scheduler", "monitor"}, "configure_optimizers()")
        schedule = configured.get("lr_scheduler")
        optimizers = [_optimizer(configured.get("optimizer"))]
        if schedule is None:
            return optimizers, []
        return optimizers, [as_schedule(schedule, optimizers, default_interval, configured.get("monitor"))]
    is_sequence = isinstance(configured, Sequence) and not isinstance(configured, str)
    if is_sequence and len(configured) == 2 and isinstance(configured[0], list | tuple) and configured[0]:
        optimizers, schedules = [_optimizer(o) for o in configured[0]], _as_list(configured[1])
        return optimizers, [as_schedule(s, optimizers, default_interval) for s in schedules]
    if is_sequence and configured and not isinstance(configured[0], list | tuple):
        parts = [read_configured(part, default_interval) for part in configured]
        return [o for part in parts for o in part[0]], [s for part in parts for s in part[1]]
    raise ConfigError(
        f"configure_optimizers() must return an optimizer, a list of them, (optimizers, schedules), or a dict with "
        f"'optimizer' and 'lr_scheduler', got {configured!r}."
    )


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [] if value is None else [value]


def _optimizer(value: Any) -> Optimizer:
    if not isinstance(value, Optimizer):
        raise ConfigError(f"configure_optimizers() must give torch.optim.Optimizer objects, got {value!r}.")
    return value


def _known(given: Mapping[str, Any], known: set[str], where: str) -> None:
    unknown = sorted(set(given) - known)
    if unknown:
        raise ConfigError(f"{where} has the key {unknown[0]!r}, which is not one of {', '.join(sorted(known))}.")


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
    _known(options, known, "lr_scheduler")
    scheduler = options.get("scheduler")
    if not isinstance(scheduler, LRScheduler):
        raise ConfigError(f"lr_scheduler must be a torch learning rate scheduler, got {scheduler!r}.")
    if not any(scheduler.optimizer is optimizer for optimizer in optimizers):
        raise ConfigError(
            f"The schedule {type(scheduler).__name__} moves an optimizer that is not one of the run's, so it would "
            "have no effect.\nMake it from the optimizer that is returned with it."
        )
    interval = options.get("interval", default_interval)
    frequency = options.get("frequency", 1)
    if interval not in ("step", "epoch"):
        raise ConfigError(f"lr_scheduler.interval must be 'step' or 'epoch', got {interval!r}.")
    if not isinstance(frequency, int) or frequency < 1:
        raise ConfigError(f"lr_scheduler.frequency must be a whole number of at least 1, got {frequency!r}.")
    monitor = options.get("monitor", monitor)
    if isinstance(scheduler, ReduceLROnPlateau):
        if options.get("interval") == "step":
            raise ConfigError(
                "ReduceLROnPlateau counts epochs here, but lr_scheduler.interval is 'step'.\nUse interval='epoch'."
            )
        return Schedule(scheduler, "epoch", frequency, monitor or "val/loss")
    return Schedule(scheduler, interval, frequency)


def default_optimizer(policy: nn.Module) -> Optimizer:
    """AdamW as torch sets it up, over everything that trains."""
    return AdamW(trainable(policy))


def trainable(policy: nn.Module) -> list[nn.Parameter]:
    """The parameters that an optimizer may move.

    Raises:
        ConfigError: There is none, or one without a shape or with a sparse gradient.
    """
    parameters = [p for p in policy.parameters() if p.requires_grad]
    for name, module in policy.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
            raise ConfigError(
                f"{name} makes sparse gradients, which cannot be checked, clipped and scaled like the others.\n"
                "Make it with sparse=False."
            )
    lazy = [name for name, p in policy.named_parameters() if isinstance(p, nn.UninitializedParameter)]
    if lazy:
        raise ConfigError(f"{lazy[0]} has no shape yet. Call the policy once on a batch before fit.")
    if not parameters:
        raise ConfigError(
            f"{type(policy).__name__} has no trainable parameter, so there is nothing to fit.\n"
            "Check that its layers are attributes of the module, and that requires_grad is not False for all."
        )
    return parameters


# The fused form -----------------------------------------------------------------------------------------------

# Source: torch.optim, whose fused kernels exist on these device types (2.7 and later).
_FUSED: dict[type[Optimizer], frozenset[str]] = {
    Adam: frozenset({"cpu", "cuda", "xpu", "mps"}),
    AdamW: frozenset({"cpu", "cuda", "xpu", "mps"}),
    SGD: frozenset({"cpu", "cuda", "mps"}),
    Adagrad: frozenset({"cpu"}),
}


def lands_on_the_device(optimizer: Optimizer) -> bool:
    """Whether its kernel honours ``found_inf``, so that a skip needs no look from the host."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def prepare(optimizer: Optimizer, *, switch: bool) -> str:
    """Make an optimizer ready for updates that may be skipped on the device; returns what the plan says.

    Args:
        switch: Switch to the fused form where ``fused=None`` leaves it open and the device has one.

    Raises:
        ConfigError: It steps through a closure, which cannot be skipped or scaled.
    """
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError("LBFGS calls the loss through a closure, which no precision or skip can follow. Use AdamW.")
    if switch and _can_fuse(optimizer):
        for group in optimizer.param_groups:
            group["fused"], group["foreach"] = True, False
        optimizer.defaults["fused"] = True
        optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
        form = "fused, which fused=None left open"
    else:
        form = "fused, as asked" if lands_on_the_device(optimizer) else "not fused: one waiting read an update"
    if isinstance(optimizer, SGD) and lands_on_the_device(optimizer):
        form = _make_safe(optimizer) or form
    return f"{name} ({form})"


def _can_fuse(optimizer: Optimizer) -> bool:
    devices = _FUSED.get(type(optimizer), frozenset())
    return not _has_moments(optimizer) and all(
        group.get("fused", False) is None
        and not group.get("foreach")
        and not group.get("differentiable")
        and not (isinstance(optimizer, SGD) and group["momentum"] and group["dampening"])
        and all(p.device.type in devices and p.dtype == torch.float32 for p in group["params"])
        for group in optimizer.param_groups
    )


def _has_moments(optimizer: Optimizer) -> bool:
    return not isinstance(optimizer, Adagrad) and bool(optimizer.state)  # Adagrad makes its state when built


def _make_safe(optimizer: SGD) -> str | None:
    """Give fused SGD zero momentum buffers: a skip in its first update would leave them uninitialised.

    Bit for bit the same, since the first buffer is the gradient either way; not so with dampening, where only
    the form that is not fused is right.
    """
    if any(group["momentum"] and group["dampening"] for group in optimizer.param_groups):
        for group in optimizer.param_groups:
            group["fused"] = False
        optimizer._step_supports_amp_scaling = False
        return "not fused: its fused kernel is wrong when the first update is skipped with dampening"
    for group in optimizer.param_groups:
        for parameter in group["params"] if group["momentum"] else ():
            state = optimizer.state[parameter]
            if state.get("momentum_buffer") is None:
                state["momentum_buffer"] = torch.zeros_like(parameter)
    return None
