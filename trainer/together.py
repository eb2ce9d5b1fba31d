"""What the ranks of a run do before one another: one acts for all, and states are put together and shared out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import Tensor

from ..strategies.distributed import DistributionStrategy
from ..strategies.tree import map_leaves, map_tensors
from .pieces import Pieces, in_memory

T = TypeVar("T")


def on_main(ranks: DistributionStrategy, action: Callable[[], T], place: str = "the start of the run") -> T:
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


def whole(ranks: DistributionStrategy, state: Any) -> Any:
    """A state with each tensor of which ranks have parts put together on rank 0, and nothing of worth elsewhere."""

    def gathered(tensor: Tensor, key: str) -> Tensor:
        found = ranks.whole(tensor)
        if found is tensor:
            return tensor
        return found.cpu() if ranks.is_main else found.new_empty(0)

    return state if ranks.world_size == 1 else map_tensors(state, gathered)


def agreed(ranks: DistributionStrategy, action: Callable[[], T]) -> list[T]:
    """What ``action`` gives on each rank, on all of which it is called; the first error is raised on all."""
    outcomes = ranks.gather_aside(_tried(action))
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


def parts(ranks: DistributionStrategy, model: Mapping[str, Tensor], like: Mapping[str, Any]) -> dict[str, Any]:
    """Of each whole tensor what belongs where the tensor of this name in ``like`` is; others as they are."""
    return {name: _part(ranks, value, like.get(name)) for name, value in model.items()}


def optimizer_parts(ranks: DistributionStrategy, state: dict[str, Any], optimizer: Any) -> dict[str, Any]:
    """The state dict of a whole optimizer as that of ``optimizer``, which may hold parts of parameters."""
    parameters = dict(enumerate(p for group in optimizer.param_groups for p in group["params"]))

    def shared(index: Any, entry: Any) -> Any:
        return map_leaves(entry, lambda leaf, _: _part(ranks, leaf, parameters.get(int(index))))

    return {**state, "state": {index: shared(index, entry) for index, entry in state["state"].items()}}


def _part(ranks: DistributionStrategy, value: Any, like: Any) -> Any:
    fits = isinstance(value, Tensor | Pieces) and isinstance(like, Tensor) and value.shape == like.shape
    return in_memory(ranks.part(value, like) if fits and like.dim() > 0 else value)
