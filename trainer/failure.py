"""How a run of several ranks ends when one of them fails: all after the same update, with what they have saved.

A rank that has failed cannot just leave, since the others would wait for it. It knows where they are, or come to next:

    in a window         it takes part with gradients of zero, in that update and the next, which are skipped on all;
                        one of the flags that ranks agree on says why (agreement.py)
    where ranks meet    it comes there too (end of a step where something was due, validation, save, end of an epoch)
                        with its error for an answer, which is raised on the others in place of theirs

Not in order: in a sharded forward that has come to its first unit, or in its backward, where what the others wait for
cannot be computed; and once the ranks have agreed on an update that this one did not make. Then it leaves its error in
the store and goes.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..strategies.distributed import RankFailed
from ..strategies.errors import in_words
from ..strategies.tree import map_tensors

if TYPE_CHECKING:
    from .run import Run


class Phase(Enum):
    """How far this rank has come with a micro-batch."""

    BEFORE = auto()
    COMPUTING = auto()
    AFTER = auto()


@dataclass(slots=True)
class Place:
    """Where a rank is between the others: its micro-batch, and whether it is where ranks meet."""

    batch: Any = None
    index: int = 0
    phase: Phase = Phase.BEFORE
    #: Updates tried when the window of the micro-batch began.
    window: int = -1
    #: How often units of a sharded policy had run before the micro-batch.
    units_run: int = 0
    #: Whether the others' next collective is a ``gather``; so it is before the first window and after the last.
    meeting: bool = True
    #: Updates tried at the last time when it was asked whether ranks meet.
    asked: int = 0

    def enter(self, batch: Any, index: int, window: int, units_run: int) -> None:
        """A micro-batch was drawn."""
        self.batch, self.index, self.window, self.units_run = batch, index, window, units_run
        self.phase = Phase.BEFORE

    @property
    def next_index(self) -> int:
        """Of the micro-batch that is still to be computed."""
        return self.index + (self.phase is Phase.AFTER)


def end_together(run: Run, error: Exception) -> None:
    """Have all ranks end with this one, or with the other whose failure ``error`` tells.

    Raises:
        Exception: ``error`` itself where that cannot be: alone, or when the others cannot be reached in order.
    """
    ranks, place = run.distribution, run.place
    if isinstance(error, RankFailed) and place.meeting:
        run.end_failed()
        return
    if ranks.world_size == 1 or ranks.is_lost(error):
        raise error
    ranks.report(error)
    if not place.meeting and not _can_stand_in(run):
        raise error
    try:
        if not place.meeting:
            run.updater.agreement.has_failed = True
            if run.in_window:
                _stand_in(run)
            while not _others_meet(run):
                _stand_in(run)
        place.meeting = True
        told = ranks.excuse(error)
    except Exception as second:
        if not ranks.is_lost(second):  # else the others have ended, by this same error perhaps
            error.add_note(f"While the other processes were to be told: {in_words(second).splitlines()[0]}")
        told = False
    if not told:
        error.of_this_rank = True  # type: ignore[attr-defined]
        raise error
    run.failure = error
    run.end_failed()


def _can_stand_in(run: Run) -> bool:
    place = run.place
    if run.updater.half_applied or run.data.batches_per_epoch is None:  # nobody knows whether it was the last window
        return False
    if not run.distribution.is_sharded:
        return True
    computing = place.phase is Phase.COMPUTING and run.distribution.units_run > place.units_run
    return place.batch is not None and not computing


def _stand_in(run: Run) -> None:
    """Take part in what is left of the window under way, or in the next, and in its update."""
    place, ranks, module = run.place, run.distribution, run.adapter.module
    first = place.next_index
    end = run.data.window_end(place.index if run.in_window else first)
    left = range(first, end)
    for index in left if ranks.is_sharded else left[-1:]:  # else only the last of a window talks
        with nullcontext() if index == end - 1 else ranks.accumulating(module):
            ranks.contribute_nothing(module, lambda: _loss_of_zeros(run))
    place.index, place.phase, place.window = end - 1, Phase.AFTER, run.updater.applied
    run.counters.micro_batches += end - run.counters.batch_in_epoch
    run.counters.batch_in_epoch = end
    run.updater.apply_failed()


def _loss_of_zeros(run: Run) -> Tensor | None:
    """That of a batch like the last one, whose values may be what this rank failed by."""
    batch = map_tensors(run.place.batch, lambda tensor, _: torch.zeros_like(tensor))
    step = run.distribution.through(run.adapter.module, run.adapter.training_step)
    return run.precision.forward(step, batch, run.place.index)[0]


def _others_meet(run: Run) -> bool:
    """Whether the others come to a gather before they come to another window."""
    place = run.place
    if place.asked < run.updater.applied and run.meets():
        return True
    return not run.in_window and place.next_index == run.data.batches_per_epoch
