"""Refuse bfloat16 where the hardware only emulates it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from ..strategies.errors import PrecisionError
from ..strategies.facts import bf16_support, fp16_support
from .callback import Callback

if TYPE_CHECKING:
    from ..trainer.trainer import Trainer


class BF16Support(Callback):
    """Stop a bf16 run before its first batch on an accelerator without bfloat16 units.

    Emulation is slow, and a convolution can fail in it. ``BF16(allow_emulated=True)`` opts in, with one
    warning event. The cpu always passes: its emulation is slow and complete.
    """

    def __init__(self) -> None:
        self._warned = False

    def setup(self, trainer: Trainer, policy: nn.Module, stage: str) -> None:
        """Check the device.

        Raises:
            PrecisionError: bfloat16 cannot run on the device, or runs emulated and that was not allowed.
        """
        precision, device = trainer.precision, trainer.device.device
        if precision.name != "bf16":
            return
        support = bf16_support(device, trainer.facts)
        if support.usable and (support.native or device.type == "cpu"):
            return
        if support.usable and getattr(precision, "allow_emulated", False):
            if not self._warned:
                message = f"{support.reason}, as BF16(allow_emulated=True) allows: it is slow, and may fail"
                trainer.event("warning", source="BF16Support", message=message)
            self._warned = True
            return
        if fp16_support(device, trainer.facts).usable:
            remedy = "Use precision='fp16', or precision='auto', which chooses fp16 here."
        else:
            remedy = "Use precision='no', which is float32."
        if support.usable:
            remedy += " BF16(allow_emulated=True) runs it emulated, slowly."
        raise PrecisionError(f"precision='bf16' needs native bfloat16, but {support.reason}.\n{remedy}")
