"""What became of an update."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

from torch import Tensor

Reason = Literal["non_finite", "norm_overflow", "no_gradients", "not_alike", "failed"]

REASONS: dict[Reason, str] = {
    "non_finite": "a gradient was inf or NaN",
    "norm_overflow": "the gradients were finite, but their norm overflowed float32",
    "no_gradients": "no parameter received a gradient",
    "not_alike": "the ranks of a sharded run used different units or parameters",
    "failed": "another process of the run failed",
}


class Outcome(NamedTuple):
    """What became of one update. All but ``norms`` and ``losses`` is on the host already; reading it costs nothing."""

    landed: bool
    #: ``None`` when it landed.
    reason: Reason | None
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
    #: Draws from the loader so far, this update's window included.
    micro_batches: int = 0
    #: What each micro-batch of the window brought to its loss, by the number of its draw, on the device; of this rank.
    losses: Mapping[int, Tensor] = MappingProxyType({})
    #: Where there are several ranks, the last one whose loss was inf or NaN.
    bad_loss_rank: int | None = None

    def non_finite_parameters(self) -> list[str]:
        """Names of the parameters whose gradient norm was not finite, worst (NaN) first. Waits for the device."""
        if self.norms is None:
            return []
        norms = self.norms.tolist()
        bad = [(not math.isnan(n), name) for n, name in zip(norms, self.names, strict=True) if not math.isfinite(n)]
        return [name for _, name in sorted(bad, key=lambda entry: entry[0])]
