"""Say what the loss scale does, and tell its calibration apart from trouble."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from .callback import Callback

if TYPE_CHECKING:
    from ..trainer.trainer import Trainer
    from ..trainer.update import Outcome

#: More drops of the scale than this within so many updates are trouble. A sound run drops once a growth
#: interval, when the scale has grown one factor too far.
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
        self._escalated = False

    def state_dict(self) -> dict[str, Any]:
        """Where the scale was, and the recent drops."""
        return {
            "scale": self._scale,
            "calibrated": self._calibrated,
            "drops": list(self._drops),
            "escalated": self._escalated,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on as if the run had not ended."""
        self._scale, self._calibrated = state["scale"], state["calibrated"]
        self._drops, self._escalated = list(state["drops"]), state["escalated"]

    def on_fit_start(self, trainer: Trainer, policy: nn.Module) -> None:
        """A fresh run starts at the scale of its settings; a resumed one has its state already."""
        if trainer.resumed_step == 0:
            settings = getattr(trainer.precision, "settings", None)
            self._scale = None if settings is None else settings.init_scale
            self._calibrated, self._drops, self._escalated = False, [], False

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
            if new < old and not marks:
                self._drops.append(outcome.update)
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
