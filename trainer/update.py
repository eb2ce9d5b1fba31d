"""One road for every update, in every precision, whose outcome is settled late.

``apply`` tries to move the weights and decides on the device whether they move; ``settle`` looks at that
decision later, from the host, and lets everything that depends on it happen: counters, schedules, the
policy's own averages, ``on_update_end``. Between the two the device is not waited for.

Why it is exact whenever it is settled: ``apply`` settles its predecessor first, so learning rates are right
when they are used and the weights are still those after the predecessor when it is settled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.optim import Optimizer

from ..strategies.errors import DistributedError, add_note, in_words
from ..strategies.mailbox import Mailbox
from .agreement import Agreement, Slots
from .counters import Counters
from .divergence import Divergence
from .fused import lands_on_the_device
from .gradients import Gradients
from .outcome import Outcome, Reason
from .schedule import Schedule
from .settings import Settings
from .shares import uneven_windows

if TYPE_CHECKING:
    from .trainer import Trainer


class Updater:
    """Applies the updates of one run and settles them.

    Args:
        policy: The bare policy.
        schedules: Those that count steps advance when a landed update is settled.
        after_step: Called for each landed update, once it is settled (LeRobot's ``policy.update()``).
    """

    def __init__(
        self,
        trainer: Trainer,
        policy: nn.Module,
        *,
        optimizers: Sequence[Optimizer],
        schedules: Sequence[Schedule],
        mailbox: Mailbox,
        counters: Counters,
        after_step: Callable[[], None],
        settings: Settings,
    ) -> None:
        self._trainer, self._policy = trainer, policy
        self.optimizers, self._schedules = list(optimizers), [s for s in schedules if s.interval == "step"]
        self._precision, self._distribution = trainer.precision, trainer.distribution
        self._mailbox, self._slots = mailbox, Slots(*mailbox.slots)
        self._counters, self._after_step = counters, after_step
        # The scaler of fp16 skips overflows whatever the guard says: a scale without that is no scale.
        self._guard = settings.non_finite != "off" or self._precision.scale is not None
        self._together = self._distribution.world_size > 1
        self._may_skip = self._guard or self._together
        self.divergence = Divergence(policy, counters, settings, self._precision.min_scale, self._distribution)
        bound = trainer.callbacks.bound
        self._before_step, self._before_zero_grad = bound["on_before_optimizer_step"], bound["on_before_zero_grad"]
        self._update_end = bound["on_update_end"]
        checks = (1 + bool(self._before_step)) if self._guard else 0
        self._gradients = Gradients(
            policy, self.optimizers, self._precision, self._distribution, self._slots, settings, checks=checks
        )
        self.agreement = Agreement(self._distribution, mailbox)
        #: Updates tried so far, whether settled or not.
        self.applied = 0
        #: Whether an error left weights and optimizer of this rank in the middle of an update that the others made.
        self.lacks_update = False
        #: Updates that came to nothing because a rank had failed or sums did not fit; they are the last ones of a run.
        self.failures = 0
        #: What each micro-batch since the last update brought to the loss, by the number of its draw.
        self.losses: dict[int, Tensor] = {}
        self._states = [0 for _ in self.optimizers]  # how many parameters had one before the update applied last
        self._on_device = all(lands_on_the_device(o) for o in self.optimizers)
        if self._may_skip and self._on_device:
            for optimizer in self.optimizers:  # the fused kernels hold still when it is exactly 1.0
                optimizer.found_inf = self._slots.skip  # type: ignore[attr-defined]
        self._pending: Callable[[], Outcome] | None = None
        #: Trainable parameters without a part in the losses of the update applied last, as far as this rank knows.
        self.left_out: list[str] = []
        self._outcome: Outcome | None = None
        self._scale_used: float | None = None  # the loss scale of the update that is settled next
        #: Whether ``on_update_end`` is under way, in which some callbacks have seen the update and some have not.
        self.settling = False
        #: Whether the weights may have moved and nothing tells of it yet, in ``on_before_zero_grad``.
        self.is_uncounted = False
        #: The step that the update applied last makes if it lands; exact, since all before it are settled.
        self.aimed_step = counters.step + 1
        #: The learning rate with which the last settled update moved the weights.
        self.lr: float | Tensor = self.optimizers[0].param_groups[0]["lr"]

    # Applying ------------------------------------------------------------------------------------------------

    def apply(self, next_window: int | None, is_due_at: Callable[[int], bool]) -> None:
        """Try one update with the gradients that are there, and drop them.

        Args:
            next_window: Micro-batches of the window that comes next in the epoch; ``None`` where nobody
                knows, which is so in a run of one process only.
            is_due_at: Whether something is to be done at a step, for which ranks then meet.

        Raises:
            DistributedError: The window that ends here has other micro-batches on other ranks.
        """
        self._begin()
        drawn, losses = self._counters.micro_batches, self._take_losses()
        gradients = self._gradients.found()
        if not gradients and not self._together:
            self.applied += 1
            self._pending = lambda: self._without_gradients(drawn)
            return
        slots, precision = self._slots, self._precision
        if self._scale_used is None and precision.scale is not None:
            self._scale_used = precision.first_scale
        norms: Tensor | None = None

        if self._may_skip:
            slots.skip.zero_()
        if self._guard:
            precision.unscale(gradients, slots.non_finite)
            norms = self._gradients.check(gradients)
        if self._before_step:
            self._call(self._before_step)
            gradients = self._gradients.found()
            if self._guard:  # what was edited is checked again, still before any clipping, and leaves the scale alone
                slots.edited.zero_()
                precision.find_non_finite(gradients, slots.edited)
                norms = self._gradients.check(gradients)
        if self._together:
            meets = is_due_at(self.aimed_step)  # user code, so before the first collective of the agreement
            self._distribution.sync_buffers()
            self.left_out = self._distribution.left_out
            self.agreement.reach(losses.values(), meets=meets, next_window=next_window)
        self.applied += 1
        read = partial(self._read, norms, self._gradients.names(gradients), drawn, losses)
        try:
            self._move(gradients)
        except BaseException:
            if self._together:  # on the other ranks the update is made
                self.lacks_update = True
                self._move_scale_and_send()
                self._close(read)
            raise
        self._move_scale_and_send()
        self.is_uncounted = True
        try:
            self._call(self._before_zero_grad)
        finally:  # on the other ranks, and on the device, the update is made
            self.is_uncounted = False
            self._close(read)

    def _call(self, hooks: Sequence[Callable[..., None]]) -> None:
        for optimizer in self.optimizers:
            for hook in hooks:
                hook(self._trainer, self._policy, optimizer)
                self._distribution.release()

    def _begin(self) -> None:
        self.settle()
        agreed = self.agreement
        if agreed.is_uneven and agreed.shortest and not agreed.has_failed:  # a rank that has none says so itself
            raise uneven_windows(self._counters.epoch, agreed.shortest, agreed.next_window)
        self._distribution.release()
        self.aimed_step = self._counters.step + 1
        self._states = [len(optimizer.state) for optimizer in self.optimizers]

    def _move(self, gradients: list[Tensor]) -> None:
        """Clip, and let the optimizers step unless the update is a skip."""
        self._gradients.clip(gradients)
        if not self._may_skip or self._on_device:
            self._step_all()
        else:
            self._mailbox.send()
            if not self._mailbox.read()[0]:
                self._step_all()

    def _move_scale_and_send(self) -> None:
        if self._precision.scale is not None:
            self._precision.settle_scale(self._slots.non_finite)
            self._slots.scale.copy_(self._precision.scale)
        self._mailbox.send()

    def _take_losses(self) -> dict[int, Tensor]:
        losses, self.losses = self.losses, {}
        return losses

    def _close(self, read: Callable[[], Outcome]) -> None:
        self._gradients.drop()
        self._pending = read

    def apply_failed(self) -> None:
        """Take part in the update of a window when this rank has failed: no rank's weights move."""
        self._begin()
        drawn, gradients = self._counters.micro_batches, self._gradients.stand_in()
        for flag in (self._slots.non_finite, self._slots.edited):
            flag.zero_()
        self._slots.skip.fill_(1.0)
        self._distribution.sync_buffers(failed=True)
        self.agreement.reach(self._take_losses().values(), meets=None, next_window=None)
        self._gradients.clip(gradients)  # by value, or without the guard, its norm is one more collective
        self.applied += 1  # only now: until here a rank may be lost, and the window is open
        self._move_scale_and_send()
        self._close(partial(self._read, None, (), drawn, {}))

    @property
    def ends_now(self) -> bool:
        """Whether the ranks have agreed that the update applied last is the last one."""
        return self.agreement.ends(self.applied)

    def _step_all(self) -> None:
        self._distribution.release()  # else a forward after it has the old weights, if a callback's forward left some
        for optimizer in self.optimizers:
            optimizer.step()

    # Settling ------------------------------------------------------------------------------------------------

    @property
    def outcome(self) -> Outcome | None:
        """The last update's outcome, settled by asking; ``None`` before the first."""
        self.settle()
        return self._outcome

    def go_on_from(self, outcome: Outcome | None, lr: float) -> None:
        """Let what a checkpoint says of the update before it be that of the last one."""
        self._outcome, self.lr = outcome, lr

    def settle(self) -> None:
        """Let everything happen that depends on the last applied update; nothing if that is done.

        Raises:
            TrainingDiverged: The run is no longer training; see ``divergence.py``.
            DistributedError: Ranks differ in whether they meet now, or in what they exchanged.
        """
        if self._pending is None:
            return
        read, self._pending, self.settling = self._pending, None, True
        try:
            with self._distribution.silence():
                self._settle(read())
        finally:
            self.settling = False

    def _settle(self, outcome: Outcome) -> None:
        lr = self.optimizers[0].param_groups[0]["lr"]
        self.lr = lr.clone() if isinstance(lr, Tensor) else lr  # a schedule changes a tensor in place
        came_to_nothing = outcome.reason in ("failed", "not_alike")
        if came_to_nothing:
            self.failures += 1
            self._forget_states()
        else:
            self._outcome = outcome
        if outcome.landed:
            self._counters.step += 1
            self._counters.skipped_in_a_row = 0
            try:
                for schedule in self._schedules:
                    schedule.advance()
                self._after_step()
            except BaseException as failure:
                self.lacks_update = self._together
                if isinstance(failure, KeyboardInterrupt) or not self.agreement.has_failed:
                    raise
        else:
            self._counters.skipped += 1
            self._counters.skipped_in_a_row += 1
        error: BaseException | None = None
        for hook in self._update_end:  # all of them: one that fails does not keep the others from the update
            try:
                hook(self._trainer, self._policy, outcome)
            except KeyboardInterrupt:
                raise
            except BaseException as failure:
                if error is not None:
                    add_note(error, f"Another callback failed too: {in_words(failure)}")
                error = error or failure
        if self.agreement.has_failed:  # an error of its own ends this rank
            return
        if error is not None:
            raise error
        if not outcome.landed and not came_to_nothing:
            self.divergence.judge(outcome, self._scale_used or 0.0, self._trainer.metrics.get("train/loss"))
        self._scale_used = outcome.scale
        if self.agreement.differs:
            raise self._not_alike(outcome)
        if self.agreement.apart:
            raise DistributedError(
                f"At step {outcome.step} something is due on one rank, but nothing on another.\n"
                "Let due(step) depend on the step and on settings alone, so that it answers alike on every rank; "
                "trainer.distribution.broadcast() in on_log gives all of them the view of rank 0."
            )

    def _not_alike(self, outcome: Outcome) -> DistributedError:
        return DistributedError(
            f"In update {outcome.update} the ranks of a sharded run did not use the same units and parameters, so that "
            "what they summed does not belong together. It moved nothing.\nUse all in every forward (zero times what "
            "is left out is enough) and drop blocks alike on all ranks, or use distributed='ddp', for parameters that "
            "some ranks leave out with DDP(find_unused_parameters=True)."
        )

    def _forget_states(self) -> None:
        """Have no optimizer keep a state that it made in the last update: nothing moved."""
        for optimizer, before in zip(self.optimizers, self._states, strict=True):
            for parameter in list(optimizer.state)[before:]:
                del optimizer.state[parameter]

    def _read(
        self, norms: Tensor | None, names: tuple[str, ...], micro_batches: int, losses: Mapping[int, Tensor]
    ) -> Outcome:
        said, counters = Slots(*self._mailbox.read().tolist()), self._counters
        landed = not (self._may_skip and said.skip)
        if self._together:
            self.agreement.note(self.applied, said, landed=landed)
        return Outcome(
            landed=landed,
            reason=None if landed else self._reason(said),
            step=counters.step + landed,
            update=counters.updates + 1,
            grad_norm=said.norm if self._guard else float("nan"),
            scale=said.scale if self._precision.scale is not None else None,
            norms=norms,
            names=names,
            micro_batches=micro_batches,
            losses=losses,
            bad_loss_rank=int(said.bad_loss) - 1 if said.bad_loss else None,
        )

    def _reason(self, said: Slots[float]) -> Reason:
        if said.failed:
            return "failed"
        if self._together and not said.has_gradients:
            return "no_gradients"
        if self._together and said.unlike > 0:
            return "not_alike"
        return "non_finite" if said.non_finite or said.edited else "norm_overflow"

    def _without_gradients(self, micro_batches: int) -> Outcome:
        scale, counters = self._precision.scale, self._counters
        return Outcome(
            landed=False,
            reason="no_gradients",
            step=counters.step,
            update=counters.updates + 1,
            grad_norm=0.0,
            scale=None if scale is None else float(scale),
            norms=None,
            names=(),
            micro_batches=micro_batches,
        )

    def let_go(self) -> None:
        """Leave the optimizers as they came; after the last update."""
        for optimizer in self.optimizers:
            vars(optimizer).pop("found_inf", None)
