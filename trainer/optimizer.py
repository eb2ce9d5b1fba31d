"""Optimizers: from what a policy or a run says to objects, and what an optimizer may move."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from torch import nn
from torch.optim import AdamW, Optimizer

from ..strategies.errors import ConfigError
from .schedule import Schedule, as_schedule, check_keys

OptimizerFactory = Callable[[Iterable[nn.Parameter]], Optimizer]


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
        check_keys(configured, {"optimizer", "lr_scheduler", "monitor"}, "configure_optimizers()")
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
        f"'optimizer' and 'lr_scheduler', got {configured!r}.\n"
        "Return for instance torch.optim.AdamW(self.parameters())."
    )


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
        raise ConfigError(f"{lazy[0]} has no shape yet.\nCall the policy once on a batch before fit.")
    if not parameters:
        raise ConfigError(
            f"{type(policy).__name__} has no trainable parameter, so there is nothing to fit.\n"
            "Check that its layers are attributes of the module, and that requires_grad is not False for all."
        )
    return parameters


def moved_parameters(policy: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, nn.Parameter]:
    """The parameters that the optimizers move, by their name in the policy; those frozen now may thaw later.

    Raises:
        ConfigError: One is not the policy's, or stands in two optimizers.
    """
    names = {id(p): name for name, p in policy.named_parameters()}
    named: dict[str, nn.Parameter] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = names.get(id(parameter))
                if name is None:
                    raise ConfigError(
                        f"{type(optimizer).__name__} has a parameter of shape {tuple(parameter.shape)} that is not the "
                        f"policy's, so no checkpoint would hold it.\nMake it an attribute of {type(policy).__name__}."
                    )
                if name in named:
                    raise ConfigError(
                        f"The parameter {name} stands in two optimizers, but an update moves it once.\n"
                        "Give each parameter to one of them."
                    )
                named[name] = parameter
    return named


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [] if value is None else [value]


def _optimizer(value: Any) -> Optimizer:
    if not isinstance(value, Optimizer):
        raise ConfigError(
            f"configure_optimizers() must give torch.optim.Optimizer objects, got {value!r}.\n"
            "Return for instance torch.optim.AdamW(self.parameters())."
        )
    return value
