"""How a run of several ranks ends when one of them fails: all after the same update, with what they have saved.

A rank that has failed cannot just leave, since the others would wait for it. It knows where they are, or come to next:

    in a window         it takes part with gradients of zero, in that update and the next, which are skipped on all;
                        one of the flags that ranks agree on says why (agreement.py)
    where ranks meet    it comes there too (end of a step where something was due, validation, save, end of an epoch)
                        with its error for an answer, which is raised on the others in place of theirs

In the step of an optimizer or a schedule, the others have an update that it lacks: under DDP theirs is saved, and of
shards what is left is kept as not exact (ending.py).

A sharded rank asks the others which collectives they make (strategies/collectives.py). What a forward says to other
ranks by itself nobody knows, so there they lose it (decision 12).
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..strategies.distributed import RankFailed
from ..strategies.errors import in_words

if TYPE_CHECKING:
    from .run import Run


@dataclass(slots=True)
class Place:
    """Where a rank is between the others: in which window, and whether it is where ranks meet."""

    #: The micro-batch of the epoch that is computed now or next, and the end of its window: the one after the last.
    index: int = 0
    end: int = 0
    #: Updates tried when that window began.
    window: int = -1
    #: Whether the others' next collective is a ``gather``; so it is before the first window and after the last.
    meeting: bool = True
    #: Updates tried at the last time when it was asked whether ranks meet.
    asked: int = 0

    def enter(self, index: int, end: int, window: int) -> None:
        """A micro-batch was drawn."""
        self.index, self.end, self.window = index, end, window


def end_together(run: Run, error: BaseException) -> None:
    """Have all ranks end with this one, or with the other whose failure ``error`` tells.

    Raises:
        BaseException: ``error`` itself where that cannot be: alone, or when the others cannot be reached in order.
    """
    ranks, place = run.distribution, run.place
    if isinstance(error, RankFailed) and place.meeting:
        run.end_failed()
        return
    if ranks.world_size == 1 or ranks.is_lost(error):
        raise error
    ranks.report(error)
    if isinstance(error, torch.OutOfMemoryError):
        # They hold what was computed, and there is no room to spare; a debugger finds them empty.
        traceback.clear_frames(error.__traceback__)
    try:
        if not place.meeting:
            ranks.fail()
            run.updater.agreement.has_failed = True
            while not _others_meet(run):
                _stand_in(run)
        place.meeting = True
        told = ranks.excuse(error)
    except Exception as second:
        if not ranks.is_lost(second):  # else the others have ended, by this same error perhaps
            error.add_note(f"While the other processes were to be told: {in_words(second).splitlines()[0]}")
        told = False
    if not told:
        raise error
    run.failure = error
    run.end_failed()


def _stand_in(run: Run) -> None:
    """Take part in what is left of the window under way, or in the next, and in its update."""
    place, updater, counters = run.place, run.updater, run.counters
    if not run.in_window:
        place.enter(place.end, place.end + updater.agreement.next_window, updater.applied)
    for index in range(place.index, place.end):
        run.distribution.stand_in(run.adapter.module, closes=index + 1 == place.end)
    place.index = place.end
    counters.micro_batches += place.end - counters.batch_in_epoch
    counters.batch_in_epoch = place.end
    updater.apply_failed()


def _others_meet(run: Run) -> bool:
    """Whether the others come to a gather before they come to another window."""
    if run.place.asked < run.updater.applied and run.meets():
        return True
    return not run.in_window and run.updater.agreement.next_window == 0
