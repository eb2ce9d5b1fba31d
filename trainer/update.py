"""One road for every update, in every precision, whose outcome is settled late.

``apply`` tries to move the weights and decides on the device whether they move; ``settle`` looks at that
decision later, from the host, and lets everything that depends on it happen: counters, schedules, the
policy's own averages, ``on_update_end``. Between the two the device is not waited for.

Why it is exact whenever it is settled: ``apply`` settles its predecessor first, so learning rates are right
when they are used and the weights are still those after the predecessor when it is settled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..strategies.errors import ConfigError
from ..strategies.mailbox import Mailbox
from .agreement import Agreement
from .counters import Counters
from .divergence import Divergence
from .fused import lands_on_the_device
from .outcome import Outcome, Reason
from .schedule import Schedule
from .settings import Settings

if TYPE_CHECKING:
    from .trainer import Trainer

MAILBOX_SIZE = 7  # skip, non_finite, edited, stop, failed: those that ranks agree on; norm, scale
_AGREED = 5


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
        self._precision, self._distribution, self._mailbox = trainer.precision, trainer.distribution, mailbox
        self._counters, self._after_step = counters, after_step
        self._clip_norm, self._clip_value = settings.clip_norm, settings.clip_value
        # The scaler of fp16 skips overflows whatever the guard says: a scale without that is no scale.
        self._guard = settings.non_finite != "off" or self._precision.scale is not None
        self._together = self._distribution.world_size > 1
        self._may_skip = self._guard or self._together
        self.divergence = Divergence(policy, counters, settings, self._precision.min_scale, self._distribution)
        bound = trainer.callbacks.bound
        self._before_step, self._before_zero_grad = bound["on_before_optimizer_step"], bound["on_before_zero_grad"]
        self._update_end = bound["on_update_end"]
        self._named = _named_parameters(policy, self.optimizers)
        self._parameters = list(self._named.values())
        self._names = tuple(self._named)
        self._flags = mailbox.on_device[:_AGREED]
        self.agreement = Agreement(mailbox.slots[3], mailbox.slots[4])
        #: Updates tried so far, whether settled or not; and whether an error broke one off that ranks had agreed on.
        self.applied, self.half_applied = 0, False
        self._on_device = all(lands_on_the_device(o) for o in self.optimizers)
        if self._may_skip and self._on_device:
            for optimizer in self.optimizers:  # the fused kernels hold still when it is exactly 1.0
                optimizer.found_inf = mailbox.slots[0]  # type: ignore[attr-defined]
        self._pending: Callable[[], Outcome] | None = None
        self._outcome: Outcome | None = None
        self._scale_used: float | None = None  # the loss scale of the update that is settled next
        #: Whether ``on_update_end`` is under way, in which some callbacks have seen the update and some have not.
        self.settling = False
        #: The step that the update applied last makes if it lands; exact, since all before it are settled.
        self.aimed_step = counters.step + 1
        #: The learning rate with which the last settled update moved the weights.
        self.lr: float | Tensor = self.optimizers[0].param_groups[0]["lr"]

    # Applying ------------------------------------------------------------------------------------------------

    def apply(self) -> None:
        """Try one update with the gradients that are there, and drop them."""
        self.settle()
        self.aimed_step = self._counters.step + 1
        drawn = self._counters.micro_batches
        gradients = self._gradients()
        if not gradients and not self._together:
            self._pending = lambda: self._without_gradients(drawn)
            return
        skip, non_finite, edited, _, _, norm, scale_slot = self._mailbox.slots
        precision, scale = self._precision, self._precision.scale
        if self._scale_used is None and scale is not None:
            self._scale_used = precision.first_scale
        norms: Tensor | None = None

        if self._may_skip:
            skip.zero_()
        if self._guard:
            precision.unscale(gradients, non_finite)
            norms = self._check_norm(gradients, norm, skip)
        if self._before_step:
            for optimizer in self.optimizers:
                for hook in self._before_step:
                    hook(self._trainer, self._policy, optimizer)
            gradients = self._gradients()
            if self._guard:  # what was edited is checked again, still before any clipping, and leaves the scale alone
                edited.zero_()
                precision.find_non_finite(gradients, edited)
                norms = self._check_norm(gradients, norm, skip)
        if self._together:
            self._distribution.sync_buffers(self._policy)
            self.agreement.speak()
            self._distribution.reduce_max(self._flags)
        self.applied += 1
        self.half_applied = True
        self._clip(gradients, norm)
        if not self._may_skip or self._on_device:
            self._step_all()
        else:
            self._mailbox.send()
            if not self._mailbox.read()[0]:
                self._step_all()
        if scale is not None:
            precision.settle_scale(non_finite)
            scale_slot.copy_(scale)
        self._mailbox.send()

        for hook in self._before_zero_grad:
            for optimizer in self.optimizers:
                hook(self._trainer, self._policy, optimizer)
        names = self._names
        if len(gradients) != len(names):
            names = tuple(name for name, p in self._named.items() if p.grad is not None)
        for parameter in self._parameters:
            parameter.grad = None
        self._pending = lambda: self._read(norms, names, drawn)
        self.half_applied = False

    def _check_norm(self, gradients: list[Tensor], norm: Tensor, skip: Tensor) -> Tensor:
        """Write the norm of all gradients, raise ``skip`` if it is not finite, and give those of each."""
        norms = self._distribution.norms(self._precision.norms(gradients))
        torch.linalg.vector_norm(norms, out=norm)
        self._precision.find_non_finite([norm], skip)
        return norms

    def _gradients(self) -> list[Tensor]:
        """Those that there are, of each the part that is on this rank."""
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        return [self._distribution.local(g) for g in gradients] if self._together else gradients

    def apply_failed(self) -> None:
        """Take part in the update of a window in which this rank has failed: no rank's weights move."""
        self.settle()
        drawn = self._counters.micro_batches
        self._mailbox.slots[0].fill_(1.0)
        self.agreement.fail()
        self.agreement.speak()
        self._distribution.sync_buffers(self._policy)
        self._distribution.reduce_max(self._flags)
        self.applied += 1
        self._mailbox.send()
        for parameter in self._parameters:
            parameter.grad = None
        self._pending = lambda: self._read(None, (), drawn)

    @property
    def ends_now(self) -> bool:
        """Whether the ranks have agreed that the update applied last is the last one."""
        return self._together and self.agreement.ends(self.applied)

    def _step_all(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def _clip(self, gradients: list[Tensor], norm: Tensor) -> None:
        if self._clip_value is not None:
            torch._foreach_clamp_min_(gradients, -self._clip_value)
            torch._foreach_clamp_max_(gradients, self._clip_value)
        if self._clip_norm is not None:
            if self._clip_value is not None or not self._guard:
                norm = torch.linalg.vector_norm(self._distribution.norms(self._precision.norms(gradients)))
            # Source: torch.nn.utils.clip_grad_norm_, bit for bit, its 1e-6 included.
            torch._foreach_mul_(gradients, (self._clip_norm / (norm + 1e-6)).clamp_(max=1.0))

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
        """
        if self._pending is None:
            return
        read, self._pending, self.settling = self._pending, None, True
        try:
            self._settle(read())
        finally:
            self.settling = False

    def _settle(self, outcome: Outcome) -> None:
        lr = self.optimizers[0].param_groups[0]["lr"]
        self.lr = lr.clone() if isinstance(lr, Tensor) else lr  # a schedule changes a tensor in place
        self._outcome = outcome
        if outcome.landed:
            self._counters.step += 1
            self._counters.skipped_in_a_row = 0
            for schedule in self._schedules:
                schedule.advance()
            self._after_step()
        else:
            self._counters.skipped += 1
            self._counters.skipped_in_a_row += 1
        for hook in self._update_end:
            hook(self._trainer, self._policy, outcome)
        if not outcome.landed and outcome.reason != "failed":
            self.divergence.judge(outcome, self._scale_used or 0.0, self._trainer.metrics.get("train/loss"))
        self._scale_used = outcome.scale

    def _read(self, norms: Tensor | None, names: tuple[str, ...], micro_batches: int) -> Outcome:
        skip, non_finite, edited, stop, failed, norm, scale = self._mailbox.read().tolist()
        counters = self._counters
        landed = not (self._may_skip and skip)
        if self._together:
            self.agreement.note(counters.updates + 1, stop, failed)
        return Outcome(
            landed=landed,
            reason=None if landed else _reason(failed, non_finite or edited),
            step=counters.step + landed,
            update=counters.updates + 1,
            grad_norm=norm if self._guard else float("nan"),
            scale=scale if self._precision.scale is not None else None,
            norms=norms,
            names=names,
            micro_batches=micro_batches,
        )

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

    def release(self) -> None:
        """Leave the optimizers as they came; after the last update."""
        for optimizer in self.optimizers:
            vars(optimizer).pop("found_inf", None)


def _reason(failed: float, non_finite: float) -> Reason:
    return "failed" if failed else "non_finite" if non_finite else "norm_overflow"


def _named_parameters(policy: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, nn.Parameter]:
    """The parameters that the optimizers move, by their name in the policy; those frozen now may thaw later."""
    names = {id(p): name for name, p in policy.named_parameters()}
    named: dict[str, nn.Parameter] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = names.get(id(parameter))
                if name is None:
                    raise ConfigError(
                        f"{type(optimizer).__name__} has a parameter of shape {tuple(parameter.shape)} that is not the "
                        f"policy's, so no checkpoint would hold it.\nMake it an attribute of {type(policy).__name__}."
                    )
                if name in named:
                    raise ConfigError(
                        f"The parameter {name} stands in two optimizers, but an update moves it once.\n"
                        "Give each parameter to one of them."
                    )
                named[name] = parameter
    return named
