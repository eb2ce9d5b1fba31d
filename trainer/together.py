"""What one rank does for all, what all try together, and how they are told of an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from ..strategies.distributed import AT_THE_START, DistributionStrategy

T = TypeVar("T")


def on_main(ranks: DistributionStrategy, action: Callable[[], T], place: str = AT_THE_START) -> T:
    """What ``action`` gives on rank 0, where alone it is called, on all ranks; its error is raised on all."""
    if ranks.world_size == 1:
        return action()
    outcome: tuple[Any, Exception | None] = _tried(action) if ranks.is_main else (None, None)
    value, failure = ranks.broadcast(outcome, place)
    if failure is not None:
        raise failure
    return value  # type: ignore[no-any-return]


class Telling:
    """Tells the other ranks of an error on its way out, or raises which ones are lost where it says no more than that.

    Args:
        meets: Whether their next collective is a ``gather``, to which the error is brought.
    """

    # A class, since contextlib sets the error's __traceback__, which one that is a frozen dataclass does not allow.

    def __init__(self, ranks: DistributionStrategy, meets: Callable[[], bool] = lambda: True) -> None:
        self._ranks, self._meets = ranks, meets

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            return
        if self._ranks.is_lost(error):
            raise self._ranks.lost(error) from error
        self._ranks.report(error)
        if self._meets():
            self._ranks.excuse(error)


def agreed(ranks: DistributionStrategy, action: Callable[[], T], place: str = AT_THE_START) -> list[T]:
    """What ``action`` gives on each rank, on all of which it is called; the first error is raised on all."""
    outcomes = ranks.gather_aside(_tried(action), place)
    for _, failure in outcomes:
        if failure is not None:
            raise failure
    return [value for value, _ in outcomes]


def _tried(action: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """What it gives, or the error that is to be raised on all ranks."""
    try:
        return action(), None
    except Exception as error:
        return None, error
