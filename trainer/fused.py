"""The fused form of an optimizer, whose kernel can be told on the device to leave the weights alone."""

from __future__ import annotations

import torch
from torch.optim import SGD, Adafactor, Adagrad, Adam, AdamW, Optimizer, Rprop

from ..strategies.errors import ConfigError

# Source: torch.optim, whose fused kernels exist on these device types (2.7 and later).
_FUSED: dict[type[Optimizer], frozenset[str]] = {
    Adam: frozenset({"cpu", "cuda", "xpu", "mps"}),
    AdamW: frozenset({"cpu", "cuda", "xpu", "mps"}),
    SGD: frozenset({"cpu", "cuda", "mps"}),
    Adagrad: frozenset({"cpu"}),
}


def lands_on_the_device(optimizer: Optimizer) -> bool:
    """Whether its kernel honours ``found_inf``, so that a skip needs no look from the host.

    Not so where somebody's own code runs in ``step`` too: it would run in a skipped update.
    """
    hooked = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    torchs_own = any(type(optimizer).step is kind.step for kind in _FUSED)
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False)) and torchs_own and not hooked


def prepare_optimizer(optimizer: Optimizer, *, sharded: bool = False) -> str:
    """Make an optimizer ready for updates that may be skipped on the device; returns what the plan says.

    It is switched to its fused form where ``fused=None`` leaves that open and the device has one.

    Args:
        sharded: Whether it moves shards, for which SGD and Adagrad have no fused kernel.

    Raises:
        ConfigError: It steps through a closure, which cannot be skipped or scaled; or cannot move shards.
    """
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError("LBFGS calls the loss through a closure, which no precision or skip can follow.\nUse AdamW.")
    if sharded and isinstance(optimizer, Adafactor | Rprop):
        raise ConfigError(
            f"{name} cannot move shards: torch has no such form of what it computes.\nUse AdamW, or distributed='ddp'."
        )
    if sharded and isinstance(optimizer, SGD | Adagrad):
        form = _unfuse(optimizer)
    elif _can_fuse(optimizer):
        for group in optimizer.param_groups:
            group["fused"], group["foreach"] = True, False
        optimizer.defaults["fused"] = True
        optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
        form = "fused, which fused=None left open"
    else:
        form = "fused, as asked" if lands_on_the_device(optimizer) else "not fused: one waiting read an update"
    return f"{name} ({make_safe(optimizer) or form})"


def _unfuse(optimizer: Optimizer) -> str:
    for group in optimizer.param_groups:
        group["fused"] = False
    optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
    return "not fused, as shards have no such kernel: one waiting read an update"


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


def make_safe(optimizer: Optimizer) -> str | None:
    """Give fused SGD zero momentum buffers: a skip in its first update would leave them uninitialised.

    Bit for bit the same, since the first buffer is the gradient either way; not so with dampening, where only
    the form that is not fused is right, which is then chosen, and said.
    """
    if not isinstance(optimizer, SGD) or not lands_on_the_device(optimizer):
        return None
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
