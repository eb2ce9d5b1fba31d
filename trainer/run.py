"""One run of a Trainer: its parts, where it stands, and what happens at the steps where something is due."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ..strategies.errors import CallbackError
from .counters import Counters
from .data import MicroBatch, TrainingData
from .metrics import Means
from .pace import Pace
from .place import Place
from .policy import PolicyAdapter
from .rng import restore
from .saving import Saver
from .schedule import Schedule
from .settings import Settings
from .shares import uneven_windows
from .update import Updater
from .validation import validate

if TYPE_CHECKING:
    from .trainer import Trainer


@dataclass(kw_only=True)
class Run:
    """What ``Trainer.fit`` puts together and ``loop.train`` drives."""

    trainer: Trainer
    adapter: PolicyAdapter
    data: TrainingData
    validation_data: Iterable[Any] | None
    schedules: list[Schedule]
    updater: Updater
    saver: Saver
    counters: Counters
    settings: Settings
    seed: int
    #: The settings of optimizers and schedules before the first step, by name; see ``movers.py``.
    movers: dict[str, Any]
    #: Names of the parameters that are frozen once ``on_fit_start`` has been.
    frozen: list[str] = field(default_factory=list)
    means: Means = field(default_factory=Means)
    lock: ExitStack = field(default_factory=ExitStack)
    run_dir: Path = Path()
    #: What its checkpoints are told from another run's by; kept by a run that goes on in its folder or from its copy.
    id: str = field(default_factory=lambda: secrets.token_hex(8))
    stop_reason: str | None = None
    exit_code: int = 0
    place: Place = field(default_factory=Place)
    #: Why this rank asked for a stop, on which all have to agree.
    asked_to_stop: str | None = None
    #: The error of this rank for which all end; ``failed`` says that they do, be it for another's, or that this one
    #: keeps what it has alone.
    failure: BaseException | None = None
    failed: bool = False
    #: The rank whose weights and states are saved: the first that has all of the last update, or 0.
    saves_from: int = 0
    #: Whether what a failure left is to be kept as it is: in the middle of an update that nobody has whole, or on a
    #: rank alone.
    keeps_remains: bool = False
    resumed: bool = False
    resumed_step: int = 0
    logged_step: int = 0
    #: Step and epoch of a record at the end of a run, with which no mean begins anew.
    ended_at: tuple[int, int] | None = None
    #: What its metrics were before that record, for a run that goes on as if there were none.
    metrics_before: dict[str, float] = field(default_factory=dict)
    #: Whether the run's folder is made and its callbacks have begun, so that a checkpoint has a place and a meaning.
    is_open: bool = False
    #: The epoch that is told while ``on_train_epoch_end`` runs, when the counters are already in the next.
    ended_epoch: int | None = None
    validated_step: int | None = None
    #: The names of the metrics that the validation of that step gave.
    validated: tuple[str, ...] = ()
    #: What a value that is logged now weighs in its mean: that of the micro-batch under way, which is 0 for padding.
    weight: float = 1.0
    #: The random streams of a checkpoint, put in place once the data iterator exists.
    streams: dict[str, Tensor] | None = None

    def __post_init__(self) -> None:
        self.device, self.precision = self.trainer.device, self.trainer.precision
        self.distribution, self.callbacks = self.trainer.distribution, self.trainer.callbacks
        self._told_of_nothing = False
        # In windows of different sizes shards would not meet, so that ranks have to know of it before.
        self._must_know_sizes = self.distribution.is_sharded and self.data.window_sizes_are_unknown
        self._pace = Pace(self.counters)

    @property
    def policy(self) -> nn.Module:
        """The bare policy."""
        return self.adapter.policy

    @property
    def done(self) -> bool:
        """Whether the run has what it was asked for; only to be asked when every update is settled."""
        steps, epochs = self.settings.max_steps, self.settings.max_epochs
        return (
            self.stop_reason is not None
            or (steps is not None and self.counters.step >= steps)
            or (epochs is not None and self.counters.epoch >= epochs)
        )

    @property
    def in_window(self) -> bool:
        """Whether there are micro-batches whose update has not been tried."""
        return self.place.began_at == self.updater.applied

    @property
    def position(self) -> int:
        """Micro-batches of the epoch whose update was tried: a window under way comes again after a resume."""
        return self.data.window_start(self.place.end - 1) if self.in_window else self.counters.batch_in_epoch

    # Epochs --------------------------------------------------------------------------------------------------

    def begin_epoch(self) -> Iterator[MicroBatch]:
        """The micro-batches of the epoch under way, from the first that was not used, on the device.

        Raises:
            DistributedError: Its first window has fewer on one rank than on another.
        """
        start = self.counters.batch_in_epoch
        self.place.index = self.place.end = start
        self.place.meeting = True
        if start == 0:
            self.callbacks.call("on_train_epoch_start", self.trainer, self.policy)
        batches = self.device.stream(self.data.epoch(self.counters.epoch, start))
        # The first comes before ranks part, so that those meet one that cannot read it, which does not know how many
        # make up the window; and before the streams, from which some loaders draw when they start.
        first = list(islice(batches, 1))
        if self.streams is not None:
            restore(self.streams, self.device)
            self.streams = None
        sizes = self.distribution.gather(first[0].remaining + 1 if first else 0, "the start of an epoch")
        if min(sizes) < max(sizes):
            raise uneven_windows(self.counters.epoch, min(sizes), max(sizes))
        self.place.meeting = False
        return chain(iter(first), batches)  # its iterator lets the first go once it is used; the list would not

    def end_epoch(self) -> None:
        """The epoch's data is used up: settle its last update and go on to the next epoch; ranks meet at its end.

        Raises:
            DistributedError: It is not on other ranks.
        """
        counters = self.counters
        self.updater.settle()
        if most := self.updater.agreement.next_window:  # the others go on to another window
            raise uneven_windows(counters.epoch, 0, most)
        self.place.meeting = True
        if self.updater.agreement.is_ending:  # by all: every rank has settled every update
            self._take_agreement()
            return
        self._pace.pause()
        for schedule in self.schedules:
            if schedule.interval == "epoch":
                if schedule.monitor is not None:
                    if counters.step == 0:
                        continue  # no update has landed, and there is no metric to look at
                    self._bring_up_to_date(schedule.monitor)
                try:
                    schedule.advance(self.trainer.metrics)
                except BaseException:
                    self.updater.lacks_update = self.distribution.world_size > 1  # the others have advanced theirs
                    raise
        # The counters go on first, so that a checkpoint of the hook's making begins with the next epoch.
        self.ended_epoch = counters.epoch
        counters.epoch += 1
        counters.batch_in_epoch = 0
        self.callbacks.call("on_train_epoch_end", self.trainer, self.policy)
        self.ended_epoch = None
        self._pace.go_on()

    def _bring_up_to_date(self, metric: str) -> None:
        """Validate, and if that does not give the metric, log what was collected since the last record."""
        self._validate_once()
        if metric not in self.validated and self.counters.step != self.logged_step:
            self._log()

    # Steps ---------------------------------------------------------------------------------------------------

    def something_is_due(self) -> bool:
        """Whether the update just applied is to be settled at once, for the step it makes if it lands."""
        step = self.updater.aimed_step
        return (
            self.stop_reason is not None
            or self.updater.ends_now
            or self.saver.error is not None
            or bool(self.saver.notices)
            or self.callbacks.need_outcome_now
            or self._must_know_sizes
            or self.is_due_at(step)
        )

    def at_step(self) -> None:
        """Settle, and if a step was made do what is due at it, in this order: log, validate, ``on_due``.

        Raises:
            DistributedError: The next window has fewer micro-batches on one rank than on another.
        """
        self.saver.check()
        self.updater.settle()
        agreed = self.updater.agreement
        if self._must_know_sizes and agreed.is_uneven and not (self.done or self.updater.ends_now):
            raise uneven_windows(self.counters.epoch, agreed.shortest, agreed.next_window)
        while self.saver.notices:
            self.trainer.event("warning", source="checkpoint", message=self.saver.notices.pop(0))
        meets = self.meets()
        self.place.asked_at = self.updater.applied  # not set where due() failed: then the others' word is asked for
        if not meets:
            return
        self.place.meeting = True
        if self.updater.ends_now:
            self._take_agreement()
        step = self.counters.step
        if step == self.updater.aimed_step:
            if _hits(step, self.settings.log_every):
                self._log()
            self._pace.pause()
            if self._validates_at(step):
                self._validate_once()
            for callback in self.callbacks.with_due:
                if callback.due(step):
                    callback.on_due(self.trainer, self.policy)
            self._pace.go_on()
        self._end_meeting(f"the end of step {step}")

    def meets(self) -> bool:
        """Whether something is to be done together with the other ranks after the update applied last; settles it."""
        self.updater.settle()
        step = self.counters.step
        if step != self.updater.aimed_step or self.updater.agreement.apart:
            # It was skipped, and the next update aims at the same step; or ranks were apart, and this one ends in its
            # own error.
            return self.updater.ends_now
        agreement = self.updater.agreement
        # A rank that has failed, in ``due`` perhaps, goes by what the others said.
        return self.updater.ends_now or self.done or (agreement.meets if agreement.has_failed else self.is_due_at(step))

    def is_due_at(self, step: int) -> bool:
        """Whether something is to be done at this step, once it is made, for which ranks meet."""
        return (
            step == self.settings.max_steps
            or _hits(step, self.settings.log_every)
            or self._validates_at(step)
            or any(callback.due(step) for callback in self.callbacks.with_due)
        )

    def _validates_at(self, step: int) -> bool:
        return self.validation_data is not None and _hits(step, self.settings.val_every)

    def catch_up(self) -> None:
        """Where the run was saved at a step whose validation was due and failed, or had not been made, make it now."""
        self.place.meeting = True
        if self.resumed and self.counters.step > 0 and self._validates_at(self.counters.step):
            self._validate_once()

    def check_meeting(self, what: str) -> None:
        """Refuse what needs every rank at a place to which a rank may have come alone, where the others would not be.

        Raises:
            CallbackError: It is no place where ranks meet.
        """
        if self.distribution.world_size > 1 and not self.place.meeting:
            raise CallbackError(
                f"{what} needs every rank, but was called where the ranks of a run do not meet.\n"
                "Call it from on_due, or from another hook of a log, a validation or the start or end of an epoch."
            )

    def _end_meeting(self, place: str) -> None:
        """The ranks have met, and see whether one of them has failed meanwhile."""
        self.distribution.gather(None, place)
        self.place.meeting = False

    def _log(self, *, ends: bool = False) -> None:
        """Emit the record of this step: the means since the last one, and what the update itself says.

        Where the run ends by it, the next record of one that goes on is that of a run that was never ended.
        """
        counters, outcome = self.counters, self.updater.outcome
        record: dict[str, Any] = {"step": counters.step, "epoch": counters.epoch}
        gather = partial(self.distribution.gather, place=f"the log of step {counters.step}")
        record.update(self.means.read(gather, anew=not ends))
        record["lr"] = float(self.updater.lr)
        if outcome is not None and math.isfinite(outcome.grad_norm):
            record["grad_norm"] = outcome.grad_norm
        if outcome is not None and outcome.scale is not None:
            record["scale"] = outcome.scale
        record["skipped"] = counters.skipped
        record["skip_rate"] = counters.skipped / counters.updates
        record["steps_per_s"], batches_per_s = self._pace.read()
        if self.data.batch_size is not None:
            record["samples_per_s"] = batches_per_s * self.data.batch_size * self.distribution.world_size
        if ends:
            self.ended_at = (counters.step, counters.epoch)
            self.metrics_before = {k: v for k, v in self.trainer.metrics.items() if k in record}
        else:
            self.logged_step = counters.step
        self.trainer.emit(record)

    def _validate_once(self) -> None:
        """Validate, unless this very step was validated already."""
        if self.validation_data is None or self.validated_step == self.counters.step:
            return
        metrics = validate(self.trainer, self.adapter, self.validation_data, seed=self.seed)
        # Not where it failed: a run that goes on makes it then.
        self.validated_step, self.validated = self.counters.step, tuple(metrics)
        if metrics:
            self.trainer.emit({"step": self.counters.step, "epoch": self.counters.epoch, **metrics})
        elif not self._told_of_nothing:
            self._told_of_nothing = True
            message = "validation has no metric: the data gave no batch, or the policy reported nothing for it"
            self.trainer.event("warning", source="validation", message=message)
        self.callbacks.call("on_validation_end", self.trainer, self.policy)

    # Together with other ranks -----------------------------------------------------------------------------------

    def stop(self, reason: str, exit_code: int) -> None:
        """End after the update under way, or where there are ranks to agree with, after the next."""
        if self.distribution.world_size > 1:
            self.asked_to_stop = self.asked_to_stop or reason
            self.updater.agreement.ask_to_stop(exit_code)
        elif self.stop_reason is None:
            self.stop_reason, self.exit_code = reason, exit_code

    def _take_agreement(self) -> None:
        """End for what ranks have agreed on; one that has failed comes here with its error instead."""
        reasons = self.distribution.gather(self.asked_to_stop, "the end of the run")
        self.stop_reason = self.stop_reason or _first(reasons)
        self.exit_code = self.updater.agreement.exit_code

    def end_failed(self) -> None:
        """This rank or another has failed, and all end here."""
        self.failed, self.stop_reason = True, "a process failed"
        self.exit_code = self.updater.agreement.exit_code

    # Beginning and end ---------------------------------------------------------------------------------------

    def start(self) -> None:
        """The policy may report from now on, has no gradients yet, and steps per second count from here."""
        self.distribution.ready(self.policy)
        self.adapter.attach(self.trainer.log)
        self.policy.zero_grad()
        self.updater.divergence.watch_buffers()
        self._pace.restart()

    def endings(self) -> tuple[Callable[[], None], ...]:
        """What leaves optimizers, policy, loader processes and the other ranks as they are to be left."""
        steps = (self.saver.wait, self.updater.let_go, self.policy.zero_grad, self.adapter.detach, self.data.close)
        return (*steps, self.distribution.teardown, self.lock.close)

    def finish(self) -> None:
        """After the loop: settle, log what was not yet logged, and validate a run that was not stopped early."""
        self.place.meeting = True
        self.updater.settle()
        counters = self.counters
        if counters.step != self.logged_step and (counters.step, counters.epoch) != self.ended_at:
            self._log(ends=True)
        if self.stop_reason is None:
            self._validate_once()
        self.take_late_stops("the end of training")

    def take_late_stops(self, place: str) -> None:
        """Those that were asked for when no update was left to agree at, as in the last validation or the last save."""
        asked = self.distribution.gather((self.asked_to_stop, self.updater.agreement.asked_exit_code), place)
        if self.stop_reason is None:
            self.stop_reason = _first([reason for reason, _ in asked])
            self.exit_code = max(self.exit_code, *(code for _, code in asked))


def _first(reasons: list[str | None]) -> str | None:
    """The first rank's that asked for a stop, with its number."""
    asked = (f"{reason} (rank {rank})" for rank, reason in enumerate(reasons) if reason is not None)
    return next(asked, None)


def _hits(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0
