"""Where an overflow was: the parameters it reached, and on request the place in which it began."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ..strategies.checks import true_or_false
from ..strategies.errors import ConfigError
from .audit_recorder import POLICY
from .callback import Callback
from .replay import KeptMicroBatch, find_origin

if TYPE_CHECKING:
    from ..trainer.outcome import Outcome
    from ..trainer.trainer import Trainer

_SHOWN = 10


class OverflowReport(Callback):
    """One event "overflow" for each skipped update: the parameters and modules it reached, worst first.

    The names come from the norms of that very update, which its guard has computed anyway, and ``loss_finite`` tells a
    bad loss from a bad backward. Nothing is read from the device before an update was skipped.

    Args:
        replay: Also compute the micro-batches of a skipped update once more, and name the first module whose output,
            or the first op whose gradient, went non-finite. The replay changes nothing of the run, and says what it
            could not look at; of several ranks it computes the batches of rank 0. It keeps a copy of the weights and of
            every micro-batch until their update has landed and settles every update at once, so it is for the hunt and
            not for every run. Stand it behind callbacks that change batches in ``on_train_batch_start``.

    Raises:
        ConfigError: ``replay`` is neither true nor false.
    """

    def __init__(self, replay: bool = False) -> None:
        true_or_false("OverflowReport.replay", replay)
        self.replay = self.needs_outcome_now = replay
        self._kept: list[KeptMicroBatch] = []
        self._error: Exception | None = None

    def setup(self, trainer: Trainer, policy: nn.Module, stage: str) -> None:
        """Refuse a replay that would wait for the shards of ranks that replay something else.

        Raises:
            ConfigError: ``replay`` in a sharded run.
        """
        if stage == "fit" and self.replay and trainer.distribution.is_sharded:
            raise ConfigError(
                "OverflowReport.replay computes a micro-batch again on its own, but here the weights are in shards.\n"
                "Leave replay out, or find the overflow with distributed='ddp' or one process."
            )

    def on_fit_start(self, trainer: Trainer, policy: nn.Module) -> None:
        """Begin with nothing kept."""
        self._forget()

    def on_train_batch_start(self, trainer: Trainer, policy: nn.Module, batch: Any, batch_idx: int) -> None:
        """Keep what the forward is about to use."""
        if self.replay:
            earlier = self._kept[-1] if self._kept else None
            try:
                self._kept.append(KeptMicroBatch(trainer, policy, batch, batch_idx, earlier))
            except Exception as error:  # the report says so, and the run goes on
                self._error = error

    def on_update_end(self, trainer: Trainer, policy: nn.Module, outcome: Outcome) -> None:
        """Report a skip."""
        window, self._kept, error, self._error = self._kept, [], self._error, None
        if outcome.landed or outcome.norms is None or outcome.reason not in ("non_finite", "norm_overflow"):
            return
        names = _worst_first(outcome)
        where = list(dict.fromkeys(name.rpartition(".")[0] or POLICY for name in names))
        if trainer.distribution.world_size == 1:
            loss_finite, whose = all(bool(loss.isfinite()) for loss in outcome.losses.values()), ""
        else:
            rank = outcome.bad_loss_rank
            loss_finite, whose = rank is None, " of every rank" if rank is None else f" of rank {rank}"
        message = _message(outcome, names, where, loss_finite, whose)
        if not names and trainer.distribution.world_size > 1:
            message += ", or a callback has made it so on another rank"
        fields: dict[str, Any] = {
            "update": outcome.update,
            "reason": outcome.reason,
            "loss_finite": loss_finite,
            "parameters": names[:_SHOWN],
            "modules": where[:_SHOWN],
        }
        if outcome.scale is not None and outcome.step == 0:  # the scale has not found its height yet
            fields["calibration"] = True
        if self.replay and outcome.reason == "non_finite":
            try:
                if error is not None:
                    raise error
                if outcome.bad_loss_rank in (None, trainer.distribution.rank):
                    found, words = _replay(trainer, policy, window, outcome.losses)
                else:
                    found, words = {"origin": None}, "; rank 0, which tells this, does not have that rank's batches"
            except Exception as failure:  # what ends a replay is no reason to end the run
                found = {"origin": None, "replay_error": f"{type(failure).__name__}: {failure}"}
                words = f"; it could not be computed once more: {found['replay_error']}"
            fields |= found
            message += words
        trainer.event("overflow", message=message, **fields)

    def teardown(self, trainer: Trainer, policy: nn.Module, stage: str) -> None:
        """Let go of what is on the device."""
        if stage == "fit":
            self._forget()

    def _forget(self) -> None:
        self._kept.clear()
        self._error = None


def _worst_first(outcome: Outcome) -> list[str]:
    """Names of the non-finite gradients, NaN before inf; where only the norm overflowed, of the largest."""
    if outcome.reason != "norm_overflow" or outcome.norms is None:
        return outcome.non_finite_parameters()
    by_norm = sorted(zip(outcome.norms.tolist(), outcome.names, strict=True), key=lambda pair: -pair[0])
    return [name for _, name in by_norm[:_SHOWN]]


def _message(outcome: Outcome, names: list[str], where: list[str], loss_finite: bool, whose: str) -> str:
    if not names:
        return "a gradient was inf or NaN before on_before_optimizer_step, and is not any more"
    modules = ", ".join(where[:3]) + (" ..." if len(where) > 3 else "")
    if outcome.reason == "norm_overflow":
        return f"the gradients are finite, but their norm overflows float32; largest: {names[0]}, in {modules}"
    cause = f"the loss{whose} was {'finite, but' if loss_finite else 'inf or NaN, and'}"
    return f"{cause} {len(names)} of {len(outcome.names)} gradients were not finite, in {modules}; worst: {names[0]}"


def _replay(
    trainer: Trainer, policy: nn.Module, window: list[KeptMicroBatch], losses: Mapping[int, Tensor]
) -> tuple[dict[str, Any], str]:
    """Fields and words on where it began, and on what could not be looked at."""
    origin, unseen = find_origin(trainer, policy, window, losses)
    fields: dict[str, Any] = {"origin": None if origin is None else asdict(origin)}
    words = f"; it began in {origin}" if origin else "; computed once more all of it is finite"
    if unseen:
        fields["unseen"] = unseen[:_SHOWN]
        words += f"; not looked at, as torch cannot: {', '.join(unseen[:3])}"
    return fields, words
