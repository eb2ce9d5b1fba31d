"""How a run ends, or a validation without one: every callback, logger and part is told, whatever fails on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from ..strategies.distributed import RankFailed
from ..strategies.errors import DistributedError, add_note, in_words
from ..strategies.lost import is_lost
from .run import Run
from .together import Telling

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
            # A rank that is lost is what the first of its kind tells already, but not one that failed and was met.
            elif isinstance(first, RankFailed) or not (isinstance(first, DistributedError) and is_lost(failure)):
                add_note(first, f"While this was handled, another error came: {in_words(failure)}")
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
    told = loggers if run.distribution.rank == 0 else ()  # one that is alone has logged nothing
    run_all((*raised, *closing, *(partial(logger.finalize, status) for logger in told)), error)


@contextmanager
def stage_without_run(trainer: Trainer, policy: nn.Module, stage: str) -> Iterator[None]:
    """Set the callbacks up for ``stage`` and tear them down after it; the ranks part at its end.

    Raises:
        DistributedError: A rank was lost on the way.
    """

    def ends() -> list[Callable[[], None]]:
        return [*_each(trainer, "teardown", policy, stage), trainer.distribution.teardown]

    try:
        with Telling(trainer.distribution):
            trainer.callbacks.call("setup", trainer, policy, stage)
            yield
            trainer.distribution.gather(None, f"the end of {stage}")  # for a rank that failed after the last meeting
    except BaseException as error:
        run_all(ends(), error)
        raise
    run_all(ends())


def _each(trainer: Trainer, hook: str, *arguments: Any) -> list[Callable[[], None]]:
    """The calls of a hook that has to reach every callback, whatever the ones before it raise."""
    return [partial(bound, trainer, *arguments) for bound in trainer.callbacks.bound[hook]]
