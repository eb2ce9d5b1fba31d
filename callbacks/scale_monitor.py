"""Say what the loss scale does, and tell its calibration apart from trouble."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from .callback import Callback

if TYPE_CHECKING:
    from ..trainer.outcome import Outcome
    from ..trainer.trainer import Trainer

#: More drops of the scale than this within so many updates are trouble. Those that take back a growth are not
#: counted: in a sound run the scale grows one factor too far once in a while.
MAX_DROPS, WINDOW = 5, 100


class ScaleMonitor(Callback):
    """Events for every skipped update, and in fp16 for every move of the loss scale.

    - "skip" with reason and update, in every precision;
    - "scale_drop" and "scale_growth" with the update, the old and the new scale;
    - one "scale_escalation" when drops come too close together, and no other before a whole window is quiet.

    Until the first update has landed the scale is only finding its height: skips and drops carry
    ``calibration: true`` and never escalate.
    """

    def __init__(self) -> None:
        self._scale: float | None = None
        self._calibrated = False
        self._drops: list[int] = []
        self._grown = self._escalated = False
        self._resumed = False

    def state_dict(self) -> dict[str, Any]:
        """Whether the scale has found its height, and the recent drops."""
        return {
            "calibrated": self._calibrated,
            "grown": self._grown,
            "drops": list(self._drops),
            "escalated": self._escalated,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on as if the run had not ended."""
        self._calibrated, self._grown = state["calibrated"], state["grown"]
        self._drops, self._escalated = list(state["drops"]), state["escalated"]
        self._resumed = True

    def on_fit_start(self, trainer: Trainer, policy: nn.Module) -> None:
        """Begin at the scale as it is: that of the settings, or of the checkpoint."""
        scale = trainer.precision.scale
        self._scale = None if scale is None else float(scale)
        if not self._resumed:
            self._calibrated = self._grown = self._escalated = False
            self._drops = []

    def on_update_end(self, trainer: Trainer, policy: nn.Module, outcome: Outcome) -> None:
        """Compare the scale with the one before; both are already on the host."""
        calibration = {} if self._calibrated or outcome.scale is None else {"calibration": True}
        if not outcome.landed:
            trainer.event("skip", reason=outcome.reason, update=outcome.update, **calibration)
        old, new = self._scale, outcome.scale
        self._scale = new
        if new is None:
            return
        self._calibrated |= outcome.landed
        if old is not None and new != old:
            kind = "scale_drop" if new < old else "scale_growth"
            marks = calibration if new < old else {}
            trainer.event(kind, update=outcome.update, old=old, new=new, **marks)
            if new < old and not marks and not self._grown:
                self._drops.append(outcome.update)
            self._grown = new > old
        self._escalate(trainer, outcome.update, new)

    def _escalate(self, trainer: Trainer, update: int, scale: float) -> None:
        self._drops = [drop for drop in self._drops if drop > update - WINDOW]
        if not self._drops:
            self._escalated = False
        elif len(self._drops) > MAX_DROPS and not self._escalated:
            self._escalated = True
            message = (
                f"the loss scale fell {len(self._drops)} times within {WINDOW} updates, to {scale:g}: "
                "gradients overflow again and again; look for bad samples, or lower the learning rate"
            )
            trainer.event("scale_escalation", update=update, drops=len(self._drops), scale=scale, message=message)

    def teardown(self, trainer: Trainer, policy: nn.Module, stage: str) -> None:
        """The next run is another, unless a state is loaded for it."""
        self._resumed = False
