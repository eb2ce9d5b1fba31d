"""How a run of several ranks ends when one of them fails: all after the same update, with what they have saved.

A rank that has failed cannot just leave, since the others would wait for it. It knows where they are, or come to next:

    in a window         it takes part with gradients of zero, in that update and the next, which are skipped on all;
                        one of the flags that ranks agree on says why (agreement.py)
    where ranks meet    it comes there too (end of a step where something was due, validation, save, end of an epoch)
                        with its error for an answer, which is raised on the others in place of theirs

In the step of an optimizer or a schedule, the others have an update that it lacks: under DDP theirs is saved, and of
shards what is left is kept as not exact.

A sharded rank asks the others which collectives they make (strategies/collectives.py). What a SyncBatchNorm or a
policy's own code says to other ranks nobody knows, so there they lose it: one that has all weights keeps them, alone,
and sharded ranks on CPUs break off what they are at and meet (decision 12).
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from functools import partial
from typing import NoReturn

import torch

from ..strategies.distributed import RankFailed
from ..strategies.errors import TrainingDiverged, add_note, in_words, some
from .ending import run_all
from .metrics import Means
from .run import Run
from .state import has_all_that_moves


def end_together(run: Run, error: BaseException) -> None:
    """Have all ranks end with this one, or with the other whose failure ``error`` tells.

    Raises:
        BaseException: ``error`` itself where that cannot be: alone, or when the others cannot be reached in order.
    """
    ranks, place = run.distribution, run.place
    if ranks.world_size == 1:
        raise error
    is_told = isinstance(error, RankFailed) and place.meeting
    if is_told or ranks.is_lost(error):
        if not is_told and not _meet_one_that_failed(run):
            raise error
        run.end_failed()
        return
    ranks.report(error, comes=True)
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
            add_note(error, f"While the other processes were to be told: {in_words(second).splitlines()[0]}")
        told = False
    if not told and ranks.break_off():
        place.meeting = True
        told = ranks.excuse(error)
    if not told:
        place.meeting = False  # they do not come there any more
        if ranks.stay_alone():
            vars(error)["is_told"] = False  # the others learn of it once this process has ended
            run.failed = run.keeps_remains = True
            _forget_failures(run)
        raise error
    run.failure = error
    run.end_failed()


def _meet_one_that_failed(run: Run) -> bool:
    """Come to where a rank that this one has lost brings its error; whether it did."""
    if not run.distribution.break_off():
        return False
    run.updater.agreement.has_failed = True  # so that no error of on_update_end comes before that of the other
    run.updater.settle()
    try:
        run.distribution.gather(None, "the end of a run that broke off")
    except RankFailed:
        run.place.meeting = True
        return True
    except RuntimeError:  # it has left since
        pass
    return False


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
    if run.place.asked_at < run.updater.applied and run.meets():
        return True
    return not run.in_window and run.updater.agreement.next_window == 0


def fail_with_others(run: Run) -> NoReturn:
    """Save what all ranks have, and end in this rank's error or that of another.

    Not where no rank has the last update whole (``Checkpoint.on_exception`` keeps what there is), nor where all have
    found that the run diverged, of which the checkpoints before it are what is of worth.
    """
    words = None if run.failure is None else in_words(run.failure)
    run.distribution.release()  # so that its parameters are those which updates move
    run.updater.lacks_update |= not has_all_that_moves(run)
    own = (words, isinstance(run.failure, TrainingDiverged), run.updater.lacks_update, run.updater.left_out)
    errors, diverged, lack_update, left_out = zip(
        *run.distribution.gather(own, "the end of a run that failed"), strict=True
    )
    whole = _whole_rank(run, lack_update)
    run.saves_from, run.keeps_remains = whole or 0, whole is None
    _forget_failures(run)
    error = run.failure or _failure_of_another(run, errors)
    if run.updater.agreement.differs:
        for rank, names in enumerate(left_out):
            if names:
                add_note(error, f"Rank {rank} left out: {some(names)}.")
    if run.failure is not None and not all(diverged):
        add_note(error, f"This was rank {run.distribution.rank}; all {_ended(run)}.\n{_remedy(run)}")
    has_moved = not run.resumed or run.counters.step > run.resumed_step  # else there is that checkpoint, perhaps exact
    if has_moved and not run.keeps_remains and not all(diverged):
        # A save in the background that failed too is in nobody's way.
        run_all((run.saver.wait, partial(_save_after_failure, run)), error)
    run.place.meeting = False  # the others end in this error too, so it is brought to no gather any more
    raise error


def _whole_rank(run: Run, lack_update: Sequence[bool]) -> int | None:
    """The first rank that has all of the last update; ``None`` where none has, or a shard of it is missing."""
    if run.distribution.is_sharded and any(lack_update):
        return None
    return next((rank for rank, lacks in enumerate(lack_update) if not lacks), None)


def _forget_failures(run: Run) -> None:
    """Put counters and loss scale where they were before the windows that came to nothing: no sample is left out.

    The means of the log, which cannot be told apart any more, begin anew.
    """
    counters, failures, end = run.counters, run.updater.failures, run.counters.batch_in_epoch
    if failures or run.in_window:
        run.means = Means()
    counters.batch_in_epoch = run.position
    run.place.leave()
    for _ in range(failures):
        counters.batch_in_epoch = run.data.window_start(counters.batch_in_epoch - 1)
    counters.micro_batches -= end - counters.batch_in_epoch
    counters.skipped -= failures
    counters.skipped_in_a_row -= failures
    if failures:
        outcome = run.updater.outcome
        run.precision.take_back(failures, None if outcome is None else outcome.scale)


def _failure_of_another(run: Run, errors: Sequence[str | None]) -> RankFailed:
    rank, words = next((rank, error) for rank, error in enumerate(errors) if error)
    return RankFailed.of(rank, words, so=f", so all {_ended(run)}", remedy=_remedy(run))


def _ended(run: Run) -> str:
    return f"ended after update {run.counters.updates}"


def _remedy(run: Run) -> str:
    on = "can be gone on with once that is mended: --resume=auto."
    if run.keeps_remains:
        return f"A rank was in the middle of that update, so that no process has all of it. The last checkpoint {on}"
    return f"What was saved {on}"


def _save_after_failure(run: Run) -> None:
    try:
        run.callbacks.call("on_fit_end", run.trainer, run.policy)
        run.trainer.wait_for_checkpoint()
    except BaseException as error:
        run.distribution.report(error)
        run.distribution.excuse(error)
        raise
