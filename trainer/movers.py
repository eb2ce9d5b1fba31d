"""What moves the weights: optimizers and schedules as the run or the policy makes them, and their settings."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..strategies.errors import ConfigError, some
from .optimizer import OptimizerFactory, trainable
from .policy import PolicyAdapter
from .schedule import Schedule, ScheduleFactory, as_schedule

_WHERE_IT_STANDS = {
    "base_lrs", "_last_lr", "last_epoch", "_step_count", "_is_initial", "_get_lr_called_within_step", "_schedulers",
    "lr_lambdas",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Movers:
    """The optimizers and schedules of a run; ``origin`` says in words where they come from."""

    optimizers: list[Optimizer]
    schedules: list[Schedule]
    #: By name, as they were before the first step, so that a later resume can compare them.
    settings: dict[str, Any]
    origin: str


def make_movers(adapter: PolicyAdapter, optimizer: OptimizerFactory | None, schedule: ScheduleFactory | None) -> Movers:
    """Those that the run names, and without its optimizer those of the policy.

    Raises:
        ConfigError: What is to make one makes something else, or a schedule has several optimizers to choose from.
    """
    if optimizer is None:
        optimizers, schedules, origin = adapter.optimizers()
    else:
        optimizers, schedules, origin = [_made_by(optimizer, adapter.policy)], [], "named by the run"
    settings = optimizer_settings(optimizers)
    if schedule is not None:
        if len(optimizers) != 1:
            raise ConfigError(
                f"The run names a schedule, but {origin} gives {len(optimizers)} optimizers, and it would not be plain "
                "which one it moves.\nReturn the schedules from configure_optimizers instead."
            )
        schedules = [as_schedule(schedule(optimizers[0]), optimizers)]
        settings = {**optimizer_settings(optimizers), **settings}  # some write into it what is not the optimizer's
    return Movers(optimizers, schedules, {**settings, **schedule_settings(schedules)}, origin)


def _made_by(factory: Any, policy: nn.Module) -> Optimizer:
    made = None if isinstance(factory, Optimizer) or not callable(factory) else factory(trainable(policy))
    if not isinstance(made, Optimizer):
        got = f"one that gave {made!r}" if callable(factory) else type(factory).__name__
        raise ConfigError(
            f"optimizer must be a function that makes an optimizer from the parameters, got {got}.\n"
            "Write for instance optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4)."
        )
    return made


def unmoved(policy: nn.Module, optimizers: Sequence[Optimizer]) -> list[str]:
    """A remark on the trainable parameters that no optimizer moves, if there are any."""
    moved = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    left = [name for name, p in policy.named_parameters() if p.requires_grad and id(p) not in moved]
    return [f"no optimizer has these trainable parameters, so they stay as they are: {some(left)}"] if left else []


def optimizer_settings(optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """The settings of optimizers, freshly built: name to value, both in JSON.

    The learning rate is that from which a schedule starts. Forms that only change how fast it is (``fused``,
    ``foreach``) are left out.
    """
    found: dict[str, Any] = {}
    for i, optimizer in enumerate(optimizers):
        found |= _plain(f"optimizer {i}", {"class": type(optimizer).__name__})
        for j, group in enumerate(optimizer.param_groups):
            prefix = f"optimizer {i} group {j}" if len(optimizer.param_groups) > 1 else f"optimizer {i}"
            settings = {k: v for k, v in group.items() if k not in ("params", "fused", "foreach", "initial_lr")}
            settings["lr"] = group.get("initial_lr", group["lr"])
            found |= _plain(prefix, {**settings, "parameters": len(group["params"])})
    return found


def schedule_settings(schedules: Sequence[Schedule]) -> dict[str, Any]:
    """The same of schedules, without what follows from the learning rates and where they stand."""
    found: dict[str, Any] = {}
    for i, schedule in enumerate(schedules):
        advanced = {name: getattr(schedule, name) for name in ("interval", "frequency", "monitor")}
        found |= _plain(f"schedule {i}", advanced) | _scheduler_settings(f"schedule {i}", schedule.scheduler)
    return found


def _scheduler_settings(prefix: str, scheduler: LRScheduler) -> dict[str, Any]:
    state = {name: value for name, value in scheduler.state_dict().items() if name not in _WHERE_IT_STANDS}
    found = _plain(prefix, {"class": type(scheduler).__name__, **state})
    for i, function in enumerate(getattr(scheduler, "lr_lambdas", ())):
        found |= _plain(prefix, {f"factors {i}": _sampled(function)})
    for i, part in enumerate(getattr(scheduler, "_schedulers", ())):  # SequentialLR, ChainedScheduler
        found |= _scheduler_settings(f"{prefix} part {i}", part)
    return found


def _sampled(function: Callable[[int], float]) -> list[float]:
    """What a function of the step gives, as far as it goes: the function itself has no form to compare."""
    factors = []
    for step in (0, 1, 10, 100, 1000, 10_000, 100_000):
        try:
            factors.append(float(function(step)))
        except Exception:  # the user's own: a table may end, and then it fails when it is used
            break
    return factors


def _plain(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the values that JSON can hold, as it gives them back; tensors (a tensor lr) as numbers."""
    plain = {}
    for name, value in values.items():
        with suppress(TypeError, ValueError):
            number = value.tolist() if isinstance(value, Tensor) else value
            plain[f"{prefix}: {name}"] = json.loads(json.dumps(number, allow_nan=False))
    return plain
