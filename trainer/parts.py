"""States of which ranks have parts: put together, and shared out again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..strategies.distributed import DistributionStrategy
from ..strategies.tree import map_leaves, map_tensors
from .pieces import Pieces, in_memory


def whole(ranks: DistributionStrategy, state: Any) -> Any:
    """A state with each tensor of which ranks have parts put together on rank 0, and nothing of worth elsewhere."""

    def gathered(tensor: Tensor, key: str) -> Tensor:
        found = ranks.whole(tensor)
        if found is tensor:
            return tensor
        return found.cpu() if ranks.is_main else found.new_empty(0)

    return state if ranks.world_size == 1 else map_tensors(state, gathered)


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
