"""What the ranks of a run do before one another: one acts for all, and states are put together and shared out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import Tensor

from ..strategies.distributed import DistributionStrategy
from ..strategies.tree import map_tensors

T = TypeVar("T")


def on_main(ranks: DistributionStrategy, action: Callable[[], T]) -> T:
    """What ``action`` gives on rank 0, where alone it is called, on all ranks; its error is raised on all."""
    if ranks.world_size == 1:
        return action()
    outcome: tuple[Any, Exception | None] = (None, None)
    if ranks.is_main:
        try:
            outcome = (action(), None)
        except Exception as error:  # raised again below, on all ranks
            outcome = (None, error)
    value, failure = ranks.broadcast(outcome)
    if failure is not None:
        raise failure
    return value  # type: ignore[no-any-return]


def whole(ranks: DistributionStrategy, state: Any) -> Any:
    """A state with each tensor of which ranks have parts put together on rank 0, and nothing worth keeping elsewhere."""

    def gathered(tensor: Tensor, key: str) -> Tensor:
        found = ranks.whole(tensor)
        if found is tensor:
            return tensor
        return found.cpu() if ranks.is_main else found.new_empty(0)

    return state if ranks.world_size == 1 else map_tensors(state, gathered)


def parts(ranks: DistributionStrategy, model: Mapping[str, Tensor], like: Mapping[str, Any]) -> dict[str, Any]:
    """Of each whole tensor what belongs where the tensor of this name in ``like`` is; others as they are."""
    return {
        name: ranks.part(value, like[name]) if _fits(value, like.get(name)) else value for name, value in model.items()
    }


def optimizer_parts(ranks: DistributionStrategy, state: dict[str, Any], optimizer: Any) -> dict[str, Any]:
    """The state dict of a whole optimizer as that of ``optimizer``, which may hold parts of parameters."""
    if ranks.world_size == 1:
        return state
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    shared = {
        index: {
            name: ranks.part(value, parameters[int(index)]) if _fits(value, parameters[int(index)]) else value
            for name, value in entry.items()
        }
        for index, entry in state["state"].items()
    }
    return {**state, "state": shared}


def _fits(value: Any, like: Any) -> bool:
    return isinstance(value, Tensor) and isinstance(like, Tensor) and value.dim() > 0 and value.shape == like.shape
