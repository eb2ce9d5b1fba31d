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
from .counters import Counters
from .divergence import Divergence
from .fused import lands_on_the_device
from .outcome import Outcome
from .schedule import Schedule
from .settings import Settings

if TYPE_CHECKING:
    from .trainer import Trainer

MAILBOX_SIZE = 4  # skip, non_finite, norm, scale


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
        self.divergence = Divergence(policy, counters, settings, self._precision.min_scale)
        bound = trainer.callbacks.bound
        self._before_step, self._before_zero_grad = bound["on_before_optimizer_step"], bound["on_before_zero_grad"]
        self._update_end = bound["on_update_end"]
        self._named = _named_parameters(policy, self.optimizers)
        self._parameters = list(self._named.values())
        self._names = tuple(self._named)
        self._flags = mailbox.on_device[:2]
        self._on_device = all(lands_on_the_device(o) for o in self.optimizers)
        if self._guard and self._on_device:
            for optimizer in self.optimizers:  # the fused kernels hold still when it is exactly 1.0
                optimizer.found_inf = mailbox.slots[0]  # type: ignore[attr-defined]
        self._pending: Callable[[], Outcome] | None = None
        self._outcome: Outcome | None = None
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
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        if not gradients:
            self._pending = lambda: self._without_gradients(drawn)
            return
        skip, non_finite, norm, scale_slot = self._mailbox.slots
        precision, scale = self._precision, self._precision.scale
        norms: Tensor | None = None

        if self._guard:
            precision.unscale(self.optimizers, gradients, non_finite)
            skip.zero_()
            norms = self._check_norm(gradients, norm, skip)
        if self._before_step:
            for optimizer in self.optimizers:
                for hook in self._before_step:
                    hook(self._trainer, self._policy, optimizer)
            gradients = [p.grad for p in self._parameters if p.grad is not None]
            if self._guard:  # what was edited is checked again, still before any clipping; the flags only rise
                precision.find_non_finite(gradients, non_finite)
                norms = self._check_norm(gradients, norm, skip)
        if self._guard:
            self._distribution.reduce_max(self._flags)
        self._clip(gradients, norm)
        if not self._guard or self._on_device:
            self._step_all()
        else:
            self._mailbox.send()
            if not self._mailbox.read()[0]:
                self._step_all()
        if scale is not None:
            precision.settle_scale()
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

    def _check_norm(self, gradients: list[Tensor], norm: Tensor, skip: Tensor) -> Tensor:
        """Write the norm of all gradients, raise ``skip`` if it is not finite, and give those of each."""
        norms = self._precision.norms(gradients)
        torch.linalg.vector_norm(norms, out=norm)
        self._precision.find_non_finite([norm], skip)
        return norms

    def _step_all(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def _clip(self, gradients: list[Tensor], norm: Tensor) -> None:
        if self._clip_value is not None:
            torch._foreach_clamp_min_(gradients, -self._clip_value)
            torch._foreach_clamp_max_(gradients, self._clip_value)
        if self._clip_norm is not None:
            if self._clip_value is not None or not self._guard:
                norm = torch.linalg.vector_norm(self._precision.norms(gradients))
            # Source: torch.nn.utils.clip_grad_norm_, bit for bit, its 1e-6 included.
            torch._foreach_mul_(gradients, (self._clip_norm / (norm + 1e-6)).clamp_(max=1.0))

    # Settling ------------------------------------------------------------------------------------------------

    @property
    def outcome(self) -> Outcome | None:
        """The last update's outcome, settled by asking; ``None`` before the first."""
        self.settle()
        return self._outcome

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
        if not outcome.landed:
            self.divergence.judge(outcome, self._trainer.metrics.get("train/loss"))

    def _read(self, norms: Tensor | None, names: tuple[str, ...], micro_batches: int) -> Outcome:
        skip, non_finite, norm, scale = self._mailbox.read().tolist()
        counters = self._counters
        landed = not (self._guard and skip)
        return Outcome(
            landed=landed,
            reason=None if landed else "non_finite" if non_finite else "norm_overflow",
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
