"""When a run no longer trains: what ends it, and what is never saved."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn

import torch
from torch import Tensor, nn

from ..strategies.distributed import DistributionStrategy
from ..strategies.errors import ConfigError, LossScaleCollapse, TrainingDiverged, some
from .counters import Counters
from .outcome import REASONS, Outcome
from .settings import Settings


class Divergence:
    """Judges the skips of a run, and the weights and buffers that are to be saved.

    Args:
        policy: The bare policy; after a skip its buffers are looked at, which the forward has moved.
        min_scale: The loss scale at which the run is given up; ``None`` without a scale.
        ranks: The processes of the run, which agree before a save.
    """

    def __init__(
        self,
        policy: nn.Module,
        counters: Counters,
        settings: Settings,
        min_scale: float | None,
        ranks: DistributionStrategy,
    ) -> None:
        self._policy, self._counters, self._settings, self._min_scale = policy, counters, settings, min_scale
        self._ranks = ranks
        self._watched: list[str] = []

    def watch_buffers(self) -> None:
        """Remember which buffers are finite now, before the first update: those have to stay so.

        A mask of -inf is meant, and not watched.
        """
        buffers = [(name, buffer) for name, buffer in self._policy.named_buffers() if buffer.is_floating_point()]
        bad = _non_finite(buffers)
        self._watched = [name for name, _ in buffers if name not in bad]

    def judge(self, outcome: Outcome, scale_used: float, loss: float | None = None) -> None:
        """End the run if this skip shows that it is no longer training.

        Args:
            scale_used: The loss scale with which the update was computed, where there is one.
            loss: The last training loss that was logged, for the message.

        Raises:
            ConfigError: The loss never had a gradient.
            TrainingDiverged: Too many skips in a row, any under ``non_finite="raise"``, or a buffer that the
                forward left non-finite.
            LossScaleCollapse: A gradient overflows with the loss scale at its floor, or too many skips under fp16.
        """
        bad = self._non_finite_buffers()
        if bad:
            raise TrainingDiverged(
                f"The forward of update {outcome.update} (after step {outcome.step}) left a non-finite value in the "
                f"buffer {bad[0]}, so later forwards are wrong although the update was skipped.\n"
                "Look for inf or NaN in the batch, and resume from the last checkpoint."
            )
        in_a_row, scale, most = self._counters.skipped_in_a_row, outcome.scale, self._settings.max_skips
        if outcome.reason == "no_gradients":
            # One window can be without (every sample masked); a run that begins with two is a mistake.
            if self._counters.step == 0 and in_a_row >= 2:
                raise ConfigError(
                    "The loss has no gradient: no trainable parameter received one in the first two windows.\n"
                    "Return the loss itself, not loss.item() or loss.detach(), and compute it from the parameters."
                )
        elif self._settings.non_finite == "raise":
            _end(TrainingDiverged, outcome, "and non_finite='raise' ends the run at the first such update", loss)
        elif outcome.reason == "non_finite" and scale is not None and scale_used <= (self._min_scale or 0.0):
            _end(LossScaleCollapse, outcome, f"and the loss scale has fallen to its floor, {scale:g}", loss)
        if in_a_row >= most:
            kind = TrainingDiverged if scale is None else LossScaleCollapse
            _end(kind, outcome, f"the last of {in_a_row} skips in a row (max_skips={most})", loss)

    def check_finite(self, *, counts: bool = True) -> None:
        """Refuse to go on, for a save, with weights or buffers that are no longer finite. Waits for the device.

        Args:
            counts: Whether those of this rank matter.

        Raises:
            TrainingDiverged: With the names.
        """
        here = [(name, self._ranks.local(p)) for name, p in self._policy.named_parameters()]
        own = _non_finite(here) + self._non_finite_buffers() if counts else []
        bad = list(dict.fromkeys(name for names in self._ranks.gather(own, "save_checkpoint()") for name in names))
        if bad:
            raise TrainingDiverged(
                f"At step {self._counters.step} these are inf or NaN and are not saved: {some(bad)}.\n"
                "The checkpoints before this step are untouched; resume from the last of them."
            )

    def _non_finite_buffers(self) -> list[str]:
        buffers = dict(self._policy.named_buffers())
        return _non_finite((name, buffers[name]) for name in self._watched if name in buffers)


def _non_finite(named: Iterable[tuple[str, Tensor]]) -> list[str]:
    """The names of those that hold inf or NaN; of 8 bits torch cannot tell."""
    bad = []
    for name, tensor in named:
        values = tensor.detach()
        if values.layout is torch.sparse_coo:
            values = values.coalesce().values()
        elif values.layout is not torch.strided or values.is_nested:
            values = values.values()
        if values.is_floating_point() and values.itemsize > 1 and not bool(values.isfinite().all()):
            bad.append(name)
    return bad


def _end(kind: type[TrainingDiverged], outcome: Outcome, why: str, loss: float | None) -> NoReturn:
    names = outcome.non_finite_parameters()
    shown = some(names)
    scale = "" if outcome.scale is None else f", loss scale {outcome.scale:g}"
    reason = "" if outcome.reason is None else REASONS[outcome.reason]
    raise kind(
        f"Update {outcome.update} (after step {outcome.step}{scale}) was skipped: {reason}, {why}.\n"
        f"{f'Non-finite gradient norms: {shown}.' if names else 'No single norm was non-finite.'}"
        f"{'' if loss is None else f' The last training loss that was logged: {loss:.4g}.'}\n"
        "The weights are those before it. Look at the loss and the data of this update; a lower learning rate or "
        "clip_norm helps when the loss grew before it, and a higher max_skips tolerates more."
    )
