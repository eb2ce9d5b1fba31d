"""One road for every update, in every precision, whose outcome is settled late.

``apply`` tries to move the weights and decides on the device whether they move; ``settle`` looks at that
decision later, from the host, and lets everything that depends on it happen: counters, schedules, the
policy's own averages, ``on_update_end``. Between the two the device is not waited for.

Why it is exact whenever it is settled: ``apply`` settles its predecessor first, so learning rates are right
when they are used and the weights are still those after the predecessor when it is settled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..callbacks.callback import CallbackList
from ..strategies.distributed import DistributionStrategy
from ..strategies.errors import ConfigError, LossScaleCollapse, TrainingDiverged
from ..strategies.mailbox import Mailbox
from ..strategies.precision import PrecisionStrategy
from .counters import Counters
from .optimizer import Schedule, lands_on_the_device
from .settings import NonFinite

if TYPE_CHECKING:
    from .trainer import Trainer

MAILBOX_SIZE = 4  # skip, non_finite, norm, scale


class Outcome(NamedTuple):
    """What became of one update. Everything but ``norms`` is on the host already; reading it costs nothing."""

    landed: bool
    #: ``None`` when it landed; else "non_finite", "norm_overflow" or "no_gradients".
    reason: str | None
    #: Updates that landed so far, this one included.
    step: int
    #: Updates so far, this one included.
    update: int
    #: L2 norm of all gradients before clipping, in units of the loss; not finite when skipped for that.
    grad_norm: float
    #: The loss scale after this update; ``None`` without one.
    scale: float | None
    #: L2 norm of each gradient, shape (gradients,), on the device; ``None`` without gradients or guard.
    norms: Tensor | None
    #: The names that belong to ``norms``.
    names: tuple[str, ...]

    def non_finite_parameters(self) -> list[str]:
        """Names of the parameters whose gradient norm was not finite, worst (NaN) first. Waits for the device."""
        if self.norms is None:
            return []
        norms = self.norms.tolist()
        bad = [(value == value, name) for value, name in zip(norms, self.names, strict=True) if not abs(value) < _INF]
        return [name for _, name in sorted(bad, key=lambda entry: entry[0])]


_INF = float("inf")


class Updater:
    """Applies the updates of one run and settles them.

    Args:
        policy: The bare policy; its buffers are looked at after a skip.
        clip_norm: Largest L2 norm of all gradients, in units of the loss; ``None`` for no limit.
        clip_value: Largest absolute value of a gradient's element; ``None`` for no limit.
        non_finite: What a non-finite gradient does: "skip" the update, "raise", or "off" for no guard.
        max_skips: Skips in a row that are tolerated.
        after_step: Called for each landed update, once it is settled (LeRobot's ``policy.update()``).
    """

    def __init__(
        self,
        trainer: Trainer,
        policy: nn.Module,
        *,
        optimizers: Sequence[Optimizer],
        schedules: Sequence[Schedule],
        precision: PrecisionStrategy,
        distribution: DistributionStrategy,
        mailbox: Mailbox,
        counters: Counters,
        callbacks: CallbackList,
        after_step: Callable[[], None],
        clip_norm: float | None,
        clip_value: float | None,
        non_finite: NonFinite,
        max_skips: int,
    ) -> None:
        self._trainer, self._policy = trainer, policy
        self.optimizers, self._schedules = list(optimizers), [s for s in schedules if s.interval == "step"]
        self._precision, self._distribution, self._mailbox = precision, distribution, mailbox
        self._counters, self._after_step = counters, after_step
        self._clip_norm, self._clip_value = clip_norm, clip_value
        # The scaler of fp16 skips overflows whatever the guard says: a scale without that is no scale.
        self._guard = non_finite != "off" or precision.scale is not None
        self._raise, self._max_skips = non_finite == "raise", max_skips
        self._before_step = callbacks.bound["on_before_optimizer_step"]
        self._before_zero_grad = callbacks.bound["on_before_zero_grad"]
        self._update_end = callbacks.bound["on_update_end"]
        self._named = _named_parameters(policy, self.optimizers)
        self._parameters = list(self._named.values())
        self._names = tuple(self._named)
        self._flags = mailbox.on_device[:2]
        self._on_device = all(lands_on_the_device(o) for o in self.optimizers)
        if self._guard and self._on_device:
            for optimizer in self.optimizers:  # the fused kernels hold still when it is exactly 1.0
                optimizer.found_inf = mailbox.slots[0]  # type: ignore[attr-defined]
        self._watched: frozenset[str] = frozenset()
        self._pending: Callable[[], Outcome] | None = None
        self._outcome: Outcome | None = None
        #: The step that the update applied last makes if it lands; exact, since all before it are settled.
        self.aimed_step = counters.step + 1
        #: The learning rate with which the last settled update moved the weights.
        self.lr: float | Tensor = self.optimizers[0].param_groups[0]["lr"]

    # Applying ------------------------------------------------------------------------------------------------

    def apply(self) -> None:
        """Try one update with the gradients that are there, and drop them."""
        self.settle()
        self.aimed_step = self._counters.step + 1
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        if not gradients:
            self._pending = self._without_gradients
            return
        skip, non_finite, norm, scale_slot = self._mailbox.slots
        precision, scale = self._precision, self._precision.scale
        norms: Tensor | None = None

        if self._guard:
            precision.unscale(self.optimizers, gradients, non_finite)
            norms = _norms(precision, gradients, norm)
            skip.zero_()
            precision.find_non_finite([norm], skip)
        if self._before_step:
            for optimizer in self.optimizers:
                for hook in self._before_step:
                    hook(self._trainer, self._policy, optimizer)
            gradients = [p.grad for p in self._parameters if p.grad is not None]
            if self._guard:  # what was edited is checked again, still before any clipping; the flags only rise
                precision.find_non_finite(gradients, non_finite)
                norms = _norms(precision, gradients, norm)
                precision.find_non_finite([norm], skip)
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
        self._pending = lambda: self._read(norms, names)

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
            TrainingDiverged: Too many skips in a row, any skip under ``non_finite="raise"``, or a buffer that
                the forward left non-finite.
            LossScaleCollapse: The loss scale has fallen to its floor, or too many skips under fp16.
        """
        if self._pending is None:
            return
        read, self._pending = self._pending, None
        lr = self.optimizers[0].param_groups[0]["lr"]
        self.lr = lr.clone() if isinstance(lr, Tensor) else lr  # a schedule changes a tensor in place
        outcome = self._outcome = read()
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
            self._judge(outcome)

    def _read(self, norms: Tensor | None, names: tuple[str, ...]) -> Outcome:
        skip, non_finite, norm, scale = self._mailbox.read().tolist()
        counters = self._counters
        landed = not (self._guard and skip)
        return Outcome(
            landed,
            None if landed else "non_finite" if non_finite else "norm_overflow",
            counters.step + landed,
            counters.updates + 1,
            norm if self._guard else float("nan"),
            scale if self._precision.scale is not None else None,
            norms,
            names,
        )

    def _without_gradients(self) -> Outcome:
        scale = self._precision.scale
        counters = self._counters
        return Outcome(
            False,
            "no_gradients",
            counters.step,
            counters.updates + 1,
            0.0,
            None if scale is None else float(scale),
            None,
            (),
        )

    def _judge(self, outcome: Outcome) -> None:
        """End the run if this skip shows that it is no longer training."""
        self._check_buffers()
        in_a_row, scale = self._counters.skipped_in_a_row, outcome.scale
        if outcome.reason == "no_gradients":
            # One window can be without (every sample masked); a run that begins with two is a mistake.
            if self._counters.step == 0 and in_a_row >= 2:
                raise ConfigError(
                    "The loss has no gradient: no trainable parameter received one in the first two windows.\n"
                    "Return the loss itself, not loss.item() or loss.detach(), and compute it from the parameters."
                )
        elif self._raise:
            self._end(TrainingDiverged, outcome, "and non_finite='raise' ends the run at the first such update")
        elif outcome.reason == "non_finite" and scale is not None and scale <= (self._precision.min_scale or 0.0):
            self._end(LossScaleCollapse, outcome, f"and the loss scale has fallen to its floor, {scale:g}")
        if in_a_row >= self._max_skips:
            kind = TrainingDiverged if scale is None else LossScaleCollapse
            self._end(kind, outcome, f"the last of {in_a_row} skips in a row (max_skips={self._max_skips})")

    def _end(self, kind: type[TrainingDiverged], outcome: Outcome, why: str) -> NoReturn:
        names = outcome.non_finite_parameters()
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        scale = "" if outcome.scale is None else f", loss scale {outcome.scale:g}"
        raise kind(
            f"Update {outcome.update} (after step {outcome.step}{scale}) was skipped: "
            f"{_REASONS[outcome.reason or '']}, {why}.\n"
            f"{f'Non-finite gradient norms: {shown}.' if names else 'No gradient norm was kept.'}\n"
            "The weights are those before it. Look at the loss and the data of this update; a lower learning rate or "
            "clip_norm helps when the loss grew before it, and a higher max_skips tolerates more."
        )

    def _check_buffers(self) -> None:
        bad = non_finite_buffers(self._policy, self._watched)
        if bad:
            raise TrainingDiverged(
                f"The forward of update {self._counters.updates} (after step {self._counters.step}) left a non-finite "
                f"value in the buffer {bad[0]}, so later forwards are wrong although the update was skipped.\n"
                "Look for inf or NaN in the batch, and resume from the last checkpoint."
            )

    def watch_buffers(self) -> None:
        """Remember which buffers are finite now, before the first update: those have to stay so."""
        self._watched = finite_buffers(self._policy)

    def check_finite(self) -> None:
        """Refuse to go on, for a save, with weights or buffers that are no longer finite. Waits for the device.

        Raises:
            TrainingDiverged: With the names.
        """
        bad = [n for n, p in self._policy.named_parameters() if p.is_floating_point() and not bool(p.isfinite().all())]
        bad += non_finite_buffers(self._policy, self._watched)
        if bad:
            raise TrainingDiverged(
                f"At step {self._counters.step} these are inf or NaN and are not saved: {', '.join(bad[:5])}.\n"
                "The checkpoints before this step are untouched; resume from the last of them."
            )

    def release(self) -> None:
        """Leave the optimizers as they came; after the last update."""
        for optimizer in self.optimizers:
            vars(optimizer).pop("found_inf", None)


_REASONS: dict[str, str] = {
    "non_finite": "a gradient was inf or NaN",
    "norm_overflow": "the gradients were finite, but their norm overflowed float32",
    "no_gradients": "no parameter received a gradient",
}


def _norms(precision: PrecisionStrategy, gradients: list[Tensor], total: Tensor) -> Tensor:
    norms = precision.norms(gradients)
    torch.linalg.vector_norm(norms, out=total)
    return norms


def _named_parameters(policy: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, nn.Parameter]:
    """The parameters that the optimizers move, by their name in the policy."""
    names = {id(p): name for name, p in policy.named_parameters()}
    named: dict[str, nn.Parameter] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = names.get(id(parameter), f"(outside the policy, {len(named)})")
                if name in named:
                    raise ConfigError(f"The parameter {name} stands in two optimizers; every update moves it once.")
                if parameter.requires_grad:
                    named[name] = parameter
    return named


def finite_buffers(policy: nn.Module) -> frozenset[str]:
    """Names of the floating-point buffers that are finite now; a mask of -inf is meant and not watched."""
    return frozenset(n for n, b in policy.named_buffers() if b.is_floating_point() and bool(b.isfinite().all()))


def non_finite_buffers(policy: nn.Module, watched: frozenset[str]) -> list[str]:
    """Names of those ``watched`` buffers that are no longer finite. Waits for the device."""
    return [n for n, b in policy.named_buffers() if n in watched and not bool(b.isfinite().all())]
