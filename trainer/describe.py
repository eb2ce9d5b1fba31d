"""What a run was put together from, as far as its objects say: for ``config.yaml`` and for a later resume."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, is_dataclass
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from .schedule import Schedule
from .settings import Settings

_WHERE_IT_STANDS = {
    "base_lrs", "_last_lr", "last_epoch", "_step_count", "_is_initial", "_get_lr_called_within_step", "_schedulers",
    "lr_lambdas",
}  # fmt: skip


def policy_config(policy: nn.Module) -> dict[str, Any]:
    """``policy.config`` if it has one that JSON can hold, else nothing: the arguments that build it again."""
    config = getattr(policy, "config", {})
    values = asdict(config) if is_dataclass(config) and not isinstance(config, type) else config
    try:
        plain = json.loads(json.dumps(values, allow_nan=False))
    except (TypeError, ValueError):
        return {}
    return plain if isinstance(plain, dict) else {}


def describe(settings: Settings, device: str, precision: str, policy: nn.Module, seed: int) -> dict[str, Any]:
    """``config.yaml`` of a run without a run file: the policy's class and arguments, and the trainer's settings.

    Data, callbacks and loggers were given as objects, which a file cannot repeat. A policy is left out whose
    arguments are not known: one built with others would act differently.
    """
    recipe = _recipe(policy)
    trainer = {name: getattr(settings, name) for name in Settings.__dataclass_fields__}
    return {
        **({} if recipe is None else {"code": _code(policy), "policy": recipe}),
        "trainer": {"device": device, "precision": precision, **trainer, "seed": seed},
    }


def _recipe(policy: nn.Module) -> dict[str, Any] | None:
    """What makes the policy again, or ``None`` when its class has arguments and it does not say which it got."""
    kinds = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    takes = [name for name, p in signature(class_of(policy)).parameters.items() if p.kind not in kinds]
    config = policy_config(policy)
    if (takes and not config) or class_path(policy).startswith("__main__"):  # a notebook has no file to import
        return None
    return {"class_path": class_path(policy), "init_args": {"config": config} if takes == ["config"] else config}


def class_of(policy: nn.Module) -> type[nn.Module]:
    """The class that the user wrote: sharding puts one of its own over it."""
    cls = type(policy)
    return cls.__bases__[-1] if cls.__module__.startswith("torch.distributed.fsdp") else cls


def class_path(policy: nn.Module) -> str:
    """Where the policy's class can be imported from; one of a script is in the module that the script's file makes."""
    cls = class_of(policy)
    script = getattr(sys.modules.get(cls.__module__), "__file__", None) if cls.__module__ == "__main__" else None
    return f"{Path(script).stem if script else cls.__module__}.{cls.__qualname__}"


def _code(policy: nn.Module) -> list[str]:
    """The folder from which the policy's module is imported, unless it belongs to an installed package."""
    module = class_of(policy).__module__
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None or {"site-packages", "dist-packages"} & set(Path(file).parts):
        return []
    depth = 0 if module == "__main__" else module.count(".")
    depth += Path(file).name == "__init__.py"
    return [str(Path(file).resolve().parents[depth])]


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
