"""Refuse bfloat16 where the hardware only emulates it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

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
        message = trainer.precision.check_native(trainer.device.device, trainer.facts)
        if message is not None and not self._warned:
            self._warned = True
            trainer.event("warning", source="BF16Support", message=message)
