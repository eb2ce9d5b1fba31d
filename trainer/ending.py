"""How a run ends, or a validation without one: every callback, logger and part is told, whatever fails on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from torch import nn

from ..strategies.distributed import RankFailed
from ..strategies.errors import in_words
from .metrics import Means
from .run import Run
from .together import tell

if TYPE_CHECKING:
    from .trainer import Trainer


def run_all(steps: Iterable[Callable[[], object]], error: BaseException | None = None) -> None:
    """Take every step, also after one has failed: what ends a run has to end all of it.

    Args:
        error: The error that is under way. It stays the one that is told; failures of steps become notes on it.
            Without one, the first failure is raised at the end.
    """
    first = error
    for step in steps:
        try:
            step()
        except BaseException as failure:
            if first is None:
                first = failure
            else:
                first.add_note(f"While this was handled, another error came: {in_words(failure)}")
    if first is not error and first is not None:
        raise first


def end_run(run: Run, loggers: Sequence[Any], aside: ExitStack, error: BaseException | None = None) -> None:
    """End a run, by ``error`` if there is one: callbacks hear of it, and all is left as it is to be left.

    Args:
        aside: Keeps what was copied for the run.
    """
    raised = [] if error is None else _each(run.trainer, "on_exception", run.policy, error)
    closing = [*run.endings(), *_each(run.trainer, "teardown", run.policy, "fit"), aside.close]
    status = "success" if error is None else "failed"
    run_all((*raised, *closing, *(partial(logger.finalize, status) for logger in loggers)), error)


def fail_with_others(run: Run) -> NoReturn:
    """Save what all ranks have, and end in this rank's error or that of another.

    An error that is the same on all is the run's, and not saved, as in a single process.
    """
    words = None if run.failure is None else in_words(run.failure)
    answers = run.distribution.gather((words, run.updater.lacks_update), "the end of a run that failed")
    errors = [answer for answer, _ in answers]
    differ = len(set(errors)) > 1
    whole = _whole_rank(run, [lacks_update for _, lacks_update in answers])
    run.saves_from, run.is_torn = whole or 0, differ and whole is None
    error = run.failure or _failure_of_another(run, errors)
    _forget_failures(run)
    if differ and not run.is_torn:
        run_all((partial(_save_after_failure, run),), error)
    run.place.meeting = False
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
    counters, failures = run.counters, run.updater.failures
    end = counters.batch_in_epoch
    for _ in range(failures):
        counters.batch_in_epoch = run.data.window_start(counters.batch_in_epoch - 1)
    counters.micro_batches -= end - counters.batch_in_epoch
    counters.skipped -= failures
    counters.skipped_in_a_row -= failures
    if failures:
        outcome = run.updater.outcome
        run.means = Means()
        run.precision.take_back(failures, None if outcome is None else outcome.scale)


def _failure_of_another(run: Run, errors: Sequence[str | None]) -> RankFailed:
    rank = next(rank for rank, error in enumerate(errors) if error)
    saved = "What was saved can be gone on with once that is mended: --resume."
    if run.is_torn:
        saved = (
            "It was in the middle of that update, with weights or states that no other process has. The last "
            "checkpoint can be gone on with once that is mended: --resume."
        )
    so = f", so all ended after update {run.counters.updates}"
    return RankFailed.of(rank, errors[rank] or "", so=so, remedy=saved)


def _save_after_failure(run: Run) -> None:
    try:
        run.callbacks.call("on_fit_end", run.trainer, run.policy)
        run.trainer.wait_for_checkpoint()
    except BaseException as error:
        run.distribution.excuse(error)
        raise


@contextmanager
def stage_without_run(trainer: Trainer, policy: nn.Module, stage: str) -> Iterator[None]:
    """Set the callbacks up for ``stage`` and tear them down after it; the ranks part at its end.

    Raises:
        DistributedError: A rank was lost on the way.
    """

    def ends() -> list[Callable[[], None]]:
        return [*_each(trainer, "teardown", policy, stage), trainer.distribution.teardown]

    try:
        trainer.callbacks.call("setup", trainer, policy, stage)
        yield
        trainer.distribution.gather(None, f"the end of {stage}")  # for a rank that failed after the last meeting
    except BaseException as error:
        told = tell(trainer.distribution, error)
        run_all(ends(), told)
        if told is not error:
            raise told from error
        raise
    run_all(ends())


def _each(trainer: Trainer, hook: str, *arguments: Any) -> list[Callable[[], None]]:
    """The calls of a hook that has to reach every callback, whatever the ones before it raise."""
    return [partial(bound, trainer, *arguments) for bound in trainer.callbacks.bound[hook]]
