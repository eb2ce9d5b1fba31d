"""The mixed precisions: compute in 16 bits under autocast, parameters and optimizer state in float32."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from .errors import ConfigError, PrecisionError
from .facts import MachineFacts
from .formats import bf16_support, fp16_support
from .precision import PrecisionStrategy
from .scaler import GradScalerConfig, LossScaler, grad_scaler_config


class MixedPrecision(PrecisionStrategy):
    """What bf16 and fp16 share: autocast of the device's own type."""

    _device_type: str
    _cache = True
    _remedy = "Use precision='no', which needs no autocast."

    def setup(self, device: torch.device) -> None:
        """Bind autocast to the device and prove that it is in effect.

        Raises:
            PrecisionError: It is not, or a ``torch.autocast`` is around the run.
        """
        if torch.is_autocast_enabled(device.type):
            # Only the outermost autocast empties the cache: every update after the first would go unseen.
            raise PrecisionError(
                f"precision={self.name!r} was requested inside of a torch.autocast, whose cache of cast weights "
                "outlives their updates.\nCall it outside of torch.autocast: the precision enters its own."
            )
        self._device_type = device.type
        super().setup(device)
        self._cache = _cache_keeps_gradients(self.autocast(), device)

    def autocast(self) -> AbstractContextManager[Any]:
        """Autocast to ``compute_dtype``; its cache of cast weights lasts for the one entry."""
        return torch.autocast(self._device_type, dtype=self.compute_dtype, cache_enabled=self._cache)


def _cache_keeps_gradients(autocast: AbstractContextManager[Any], device: torch.device) -> bool:
    """Whether a weight whose first use is under no_grad, as in a target network's pass, still gets its gradient.

    Source: pytorch/pytorch#112583: older releases keep the cast weight without its history.
    """
    weight = torch.ones(8, 8, dtype=torch.float32, device=device, requires_grad=True)
    with torch.enable_grad(), autocast:
        with torch.no_grad():
            weight @ weight
        return (weight @ weight).requires_grad


class BF16(MixedPrecision):
    """``bf16``: float32's range with 8 bits of precision; needs no loss scale.

    Args:
        allow_emulated: Run on accelerators that only emulate bfloat16 (slow, and convolutions may fail), with
            one warning; they are refused otherwise.
    """

    name = "bf16"
    compute_dtype = torch.bfloat16

    def __init__(self, *, allow_emulated: bool = False) -> None:
        self.allow_emulated = allow_emulated

    def check(self, device: torch.device, facts: MachineFacts) -> None:
        """Refuse devices that cannot run bfloat16 at all; emulation is ``check_native``'s to judge."""
        support = bf16_support(device, facts)
        if not support.usable:
            raise PrecisionError(f"precision='bf16' cannot run here: {support.reason}.\nUse precision='no'.")

    def check_native(self, device: torch.device, facts: MachineFacts) -> str | None:
        """Refuse emulation unless ``allow_emulated``. The cpu passes: its emulation is slow and complete."""
        support = bf16_support(device, facts)
        if support.usable and (support.native or device.type == "cpu"):
            return None
        if support.usable and self.allow_emulated:
            return f"{support.reason}, as BF16(allow_emulated=True) allows: it is slow, and may fail"
        if fp16_support(device, facts).usable:
            remedy = "Use precision='fp16', or precision='auto', which chooses fp16 here."
        else:
            remedy = "Use precision='no', which is float32."
        if support.usable:
            remedy += " BF16(allow_emulated=True) runs it emulated, slowly."
        raise PrecisionError(f"precision='bf16' needs native bfloat16, but {support.reason}.\n{remedy}")


class FP16(MixedPrecision):
    """``fp16``: the loss is scaled so that small gradients survive, and updates that overflow are skipped.

    Args:
        grad_scaler: Settings of the loss scale, a ``GradScalerConfig`` or its fields as a mapping.
        allow_cpu: Run on the cpu too: really float16, with a real scaler, and slow. For tests, and to rehearse
            a run on a laptop.

    Source: Micikevicius et al. (2018), "Mixed Precision Training", section 3.2.
    """

    name = "fp16"
    compute_dtype = torch.float16

    def __init__(
        self, grad_scaler: GradScalerConfig | Mapping[str, Any] | None = None, *, allow_cpu: bool = False
    ) -> None:
        self._has_own_settings = grad_scaler is not None
        self.settings = grad_scaler_config(grad_scaler)
        self.allow_cpu = allow_cpu

    def with_grad_scaler(self, settings: GradScalerConfig | Mapping[str, Any]) -> PrecisionStrategy:
        """float16 with these settings of the loss scale.

        Raises:
            ConfigError: This one was made with settings of its own.
        """
        if self._has_own_settings:
            raise ConfigError(
                "grad_scaler is given twice, to the Trainer and to FP16(...).\nKeep the one in FP16(...)."
            )
        return FP16(settings, allow_cpu=self.allow_cpu)

    def check(self, device: torch.device, facts: MachineFacts) -> None:
        """Refuse the cpu unless allowed, and devices whose scaler or matmul cannot work."""
        if device.type == "cpu" and not self.allow_cpu:
            raise PrecisionError(
                "precision='fp16' was requested on the cpu, which has no use for it: most have no float16 units, "
                "and other trainers then run float32 without a word.\n"
                "Use precision='bf16' or precision='no'. To rehearse a float16 run here, slowly and with a real "
                "loss scaler, use precision=FP16(allow_cpu=True)."
            )
        support = fp16_support(device, facts)
        if not support.usable:
            other = "bf16" if bf16_support(device, facts).native else "no"
            raise PrecisionError(f"precision='fp16' cannot run here: {support.reason}.\nUse precision={other!r}.")

    @torch.inference_mode(False)
    @torch.enable_grad()  # an evaluation may be called without gradients
    def setup(self, device: torch.device) -> None:
        """Make the scaler, and prove autocast and the way of a known gradient through scale and unscale."""
        super().setup(device)
        self._scaler = LossScaler(self.settings, device)
        weight = torch.ones(4, dtype=torch.float32, device=device, requires_grad=True)
        flag = torch.ones((), dtype=torch.float32, device=device)
        self.backward((weight * 3.0).sum() / self.settings.init_scale)
        gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
        self._scaler.unscale([gradient], flag)
        expected = torch.full_like(weight, 3.0) / self.settings.init_scale
        # Not torch.equal: a scale that is no power of two rounds.
        if not torch.allclose(gradient, expected, rtol=1e-5) or bool(flag):
            raise PrecisionError(
                f"precision='fp16' is not sound on {device}: a known gradient of {float(expected[0])} came back from "
                f"scaling and unscaling as {gradient}.\nUse precision='no', and report this to the makers of torch."
            )

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of the scaled loss."""
        self._scaler.scale_loss(loss).backward()  # type: ignore[no-untyped-call]

    def unscale(self, gradients: Sequence[Tensor], non_finite: Tensor) -> None:
        """Unscale every gradient once; torch's kernel checks them on the way."""
        self._scaler.unscale(gradients, non_finite)

    @property
    def scale(self) -> Tensor:
        """The loss scale on the device."""
        return self._scaler.scale

    @property
    def first_scale(self) -> float:
        """That of the settings, or of a state that was loaded."""
        return self._scaler.first_scale

    @property
    def min_scale(self) -> float:
        """The floor of the settings."""
        return self.settings.min_scale

    def settle_scale(self, non_finite: Tensor) -> None:
        """Back off after an overflow, grow after a long time without, within the limits."""
        self._scaler.update(non_finite)

    def take_back(self, updates: int, scale: float | None) -> None:
        """Scale and growth tracker as they were."""
        self._scaler.take_back(updates, self.first_scale if scale is None else scale)

    def state_dict(self) -> dict[str, Any]:
        """Scale, factors, interval and growth tracker."""
        return self._scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back scale and growth tracker."""
        self._scaler.load_state_dict(state)
