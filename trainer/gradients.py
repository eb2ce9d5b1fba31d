"""What an update does with gradients before the optimizer steps: it measures them, and limits them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..strategies.distributed import DistributionStrategy
from ..strategies.precision import PrecisionStrategy
from .agreement import Slots
from .optimizer import moved_parameters
from .settings import Settings


class Gradients:
    """The gradients of an update on this rank, their norms, and the limits set to them.

    Args:
        slots: Where the norm of all is written, and that it was not finite.
        checks: How often ranks put norms together in an update before they agree; 0 without a guard.
    """

    def __init__(
        self,
        policy: nn.Module,
        optimizers: Sequence[Optimizer],
        precision: PrecisionStrategy,
        ranks: DistributionStrategy,
        slots: Slots[Tensor],
        settings: Settings,
        *,
        checks: int,
    ) -> None:
        self._precision, self._ranks, self._slots = precision, ranks, slots
        self._together = ranks.world_size > 1
        self._clip_norm, self._clip_value = settings.clip_norm, settings.clip_value
        self._named = moved_parameters(policy, optimizers)
        self._parameters, self._names = list(self._named.values()), tuple(self._named)
        self._checks = self._checks_left = checks  # counted down, for a rank that fails on the way

    def found(self) -> list[Tensor]:
        """Those that there are, of each the part that is on this rank."""
        gradients = [gradient for p in self._parameters if (gradient := p.grad) is not None]
        return [self._ranks.local(g) for g in gradients] if self._together else gradients

    def names(self, gradients: list[Tensor]) -> tuple[str, ...]:
        """The parameters of ``gradients``, which are all that there are."""
        if len(gradients) == len(self._names):
            return self._names
        return tuple(name for name, p in self._named.items() if p.grad is not None)

    def check(self, gradients: list[Tensor]) -> Tensor:
        """Write the norm of all gradients, raise ``skip`` if it is not finite, and give those of each."""
        self._checks_left -= 1
        norms = self._norms(gradients)
        torch.linalg.vector_norm(norms, out=self._slots.norm)
        self._precision.find_non_finite([self._slots.norm], self._slots.skip)
        return norms

    def _norms(self, gradients: list[Tensor]) -> Tensor:
        """Those of the whole gradients. Ranks exchange as many whatever has one, since one that failed cannot know."""
        norms = self._precision.norms(gradients) if gradients else self._slots.norm.new_zeros(0)
        missing = len(self._parameters) - len(gradients)
        if self._together and missing:
            norms = nn.functional.pad(norms, (0, missing))
        return self._ranks.norms(norms)[: len(gradients)]

    def clip(self, gradients: list[Tensor]) -> None:
        """Limit each element, and the norm of all."""
        if self._clip_value is not None and gradients:
            torch._foreach_clamp_min_(gradients, -self._clip_value)
            torch._foreach_clamp_max_(gradients, self._clip_value)
        if self._clip_norm is not None:
            norm = self._slots.norm
            if self._clip_value is not None or not self._checks:
                norm = torch.linalg.vector_norm(self._norms(gradients))
            # Source: torch.nn.utils.clip_grad_norm_, bit for bit, its 1e-6 included.
            factor = (self._clip_norm / (norm + 1e-6)).clamp_(max=1.0)
            if gradients:
                torch._foreach_mul_(gradients, factor)

    def stand_in(self) -> list[Tensor]:
        """One zero for those of a rank that has failed, with which it makes up the checks that the others make."""
        # Of the type that the others have, whatever the default is by now.
        zero = [torch.zeros(1, dtype=torch.float32, device=self._slots.norm.device)]
        while self._checks_left > 0:
            self.check(zero)
        return zero

    def drop(self) -> None:
        """Once the update is made."""
        for parameter in self._parameters:
            parameter.grad = None
        self._checks_left = self._checks
