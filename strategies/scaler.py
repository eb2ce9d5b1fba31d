"""The loss scale of float16: its settings, and torch's ``GradScaler`` used without its ``step``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor

from .checks import number, whole
from .errors import CheckpointError, ConfigError, PrecisionError

_FLOAT32 = torch.finfo(torch.float32)


@dataclass(frozen=True, kw_only=True, slots=True)
class GradScalerConfig:
    """How the loss scale starts and moves.

    The scale is multiplied by ``backoff_factor`` after an overflow and by ``growth_factor`` after
    ``growth_interval`` updates in a row without one. It stays between ``min_scale``, where a further
    overflow ends the run with ``LossScaleCollapse``, and ``max_scale`` (``None``: no limit but float32's).

    Source: torch.amp.GradScaler, whose defaults these are; it has no limits of its own.
    """

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    min_scale: float = 1.0
    max_scale: float | None = None

    def __post_init__(self) -> None:
        for name in ("init_scale", "min_scale", "max_scale"):
            value = getattr(self, name)
            if value is not None or name != "max_scale":
                remedy = "Keep it within float32, in which the scale is kept; torch begins with init_scale=65536.0."
                number(f"grad_scaler.{name}", value, least=_FLOAT32.tiny, most=_FLOAT32.max, remedy=remedy)
        number("grad_scaler.growth_factor", self.growth_factor, above=1, remedy="Use 2.0 to double it.")
        number("grad_scaler.backoff_factor", self.backoff_factor, above=0, below=1, remedy="Use 0.5 to halve it.")
        whole("grad_scaler.growth_interval", self.growth_interval, 1, "Use 2000, which is torch's default.")
        if self.init_scale < self.min_scale:
            raise ConfigError(
                f"grad_scaler.init_scale must be at least min_scale ({self.min_scale}), got {self.init_scale}.\n"
                "Raise init_scale, or lower min_scale."
            )
        if self.max_scale is not None and self.max_scale < self.init_scale:
            raise ConfigError(
                f"grad_scaler.max_scale must be at least init_scale ({self.init_scale}), got {self.max_scale}.\n"
                "Lower init_scale, or use max_scale=None for no limit."
            )


def grad_scaler_config(settings: GradScalerConfig | Mapping[str, Any] | None) -> GradScalerConfig:
    """The settings as an object, from an object, from its fields (``None`` is a field's default), or from nothing.

    Raises:
        ConfigError: Neither of these, an unknown field, or a value out of range.
    """
    if isinstance(settings, GradScalerConfig):
        return settings
    if not isinstance(settings, Mapping | None):
        raise ConfigError(
            f"grad_scaler must be a GradScalerConfig or its fields, got {settings!r}.\n"
            "Write for instance grad_scaler={'init_scale': 1024.0}."
        )
    fields = GradScalerConfig.__dataclass_fields__
    for key in settings or {}:
        if key not in fields:
            near = get_close_matches(str(key), fields, n=1)
            meant = f"Did you mean {near[0]}?" if near else f"It has {', '.join(fields)}."
            raise ConfigError(f"grad_scaler.{key} is not a setting of the loss scaler.\n{meant}")
    return GradScalerConfig(**{name: value for name, value in (settings or {}).items() if value is not None})


class LossScaler:
    """torch's ``GradScaler`` on one device; its ``unscale_`` is done here, on the gradients' own parts of this rank.

    Raises:
        PrecisionError: torch disabled the scaler, as it does in silence for a backend that is not there.
    """

    def __init__(self, settings: GradScalerConfig, device: torch.device) -> None:
        self.settings = settings
        self.first_scale = settings.init_scale
        self._torch = torch.amp.GradScaler(
            device.type,
            init_scale=settings.init_scale,
            growth_factor=settings.growth_factor,
            backoff_factor=settings.backoff_factor,
            growth_interval=settings.growth_interval,
        )
        if not self._torch.is_enabled():
            raise PrecisionError(
                f"precision='fp16' needs a loss scaler, but torch disabled it on {device}.\n"
                "Use precision='bf16' or precision='no', which need none."
            )
        # The scale tensor is made by the first scale(); a resumed run may unscale or clip before any.
        self._torch.scale(torch.zeros((), device=device))

    @property
    def scale(self) -> Tensor:
        """The scale itself, a 0-dimensional float32 tensor on the device that changes in place."""
        return self._torch._get_scale_async()  # type: ignore[return-value]

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss multiplied by the scale."""
        return self._torch.scale(loss)

    def unscale(self, gradients: Sequence[Tensor], overflow: Tensor) -> None:
        """Divide every gradient by the scale, once; ``overflow`` becomes 1.0 if any is not finite, else 0.0."""
        scale = self.scale
        # Source: GradScaler.unscale_, its reciprocal in float64 included.
        inverse = scale.reciprocal() if scale.device.type == "mps" else scale.double().reciprocal().float()
        overflow.zero_()
        torch._amp_foreach_non_finite_check_and_unscale_(list(gradients), overflow, inverse)

    def update(self, overflow: Tensor) -> None:
        """Move the scale, within its limits and on the device, by what ``unscale`` found here or on any rank."""
        states = self._torch._per_optimizer_states
        states.clear()  # where unscale_ would have put it
        states[0]["found_inf_per_device"] = {overflow.device: overflow}
        self._torch.update()
        self.scale.clamp_(self.settings.min_scale, self.settings.max_scale)

    def take_back(self, updates: int, scale: float) -> None:
        """Be as before the last ``updates``, when the scale was ``scale``; where one overflowed, growth begins anew."""
        state = self.state_dict()
        tracker = (state["_growth_tracker"] - updates) % state["growth_interval"]  # it began anew where the scale grew
        if state["scale"] < scale:
            tracker = 0
        self._torch.load_state_dict({**state, "scale": scale, "_growth_tracker": tracker})

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers as torch names them; waits for the device."""
        return dict(self._torch.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back scale and growth tracker; the factors and the interval are those of this run's settings.

        Raises:
            CheckpointError: ``state`` is not a scaler's state.
        """
        scale, tracker = state.get("scale"), state.get("_growth_tracker")
        if not isinstance(scale, int | float) or not 0.0 < scale < math.inf or not isinstance(tracker, int):
            raise CheckpointError(
                f"The saved state of the loss scaler must hold scale and _growth_tracker, got {state!r}.\n"
                "Resume from another checkpoint."
            )
        self.first_scale = float(scale)
        self._torch.load_state_dict({**self.state_dict(), "scale": scale, "_growth_tracker": tracker})
