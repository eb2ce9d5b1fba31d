"""Batches are trees: dicts, lists and tuples of tensors and other things."""

from __future__ import annotations

import copy
from collections.abc import Callable, MutableMapping
from typing import Any

from torch import Tensor


def map_tensors(tree: Any, function: Callable[[Tensor, str], Tensor], key: str = "") -> Any:
    """Apply ``function(tensor, "path.to.it")`` to every tensor of a tree.

    Dicts, lists, tuples and named tuples are made anew with their types; everything else stays as it is.
    """
    if isinstance(tree, Tensor):
        return function(tree, key)
    prefix = f"{key}." if key else ""
    if isinstance(tree, MutableMapping):
        mapped = copy.copy(tree)
        mapped.update({k: map_tensors(v, function, f"{prefix}{k}") for k, v in tree.items()})
        return mapped
    if isinstance(tree, (list, tuple)):
        values = [map_tensors(v, function, f"{prefix}{i}") for i, v in enumerate(tree)]
        return tree._make(values) if hasattr(tree, "_make") else type(tree)(values)
    return tree
