"""Batches are trees: dicts, lists and tuples of tensors and other things."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor


def map_tensors(tree: Any, function: Callable[[Tensor, str], Tensor], key: str = "") -> Any:
    """Apply ``function(tensor, "path.to.it")`` to every tensor of a tree; everything else stays as it is."""
    return map_leaves(tree, lambda leaf, key: function(leaf, key) if isinstance(leaf, Tensor) else leaf, key)


def map_leaves(tree: Any, function: Callable[[Any, str], Any], key: str = "") -> Any:
    """Apply ``function(leaf, "path.to.it")`` to every tensor of a tree, and to all else that is no tree.

    Dicts, lists, tuples, named tuples and dataclasses are made anew with their types.
    """
    prefix = f"{key}." if key else ""
    if isinstance(tree, MutableMapping):
        mapped = copy.copy(tree)
        mapped.update({k: map_leaves(v, function, f"{prefix}{k}") for k, v in tree.items()})
        return mapped
    if isinstance(tree, (list, tuple)):
        names = getattr(tree, "_fields", range(len(tree)))
        values = [map_leaves(v, function, f"{prefix}{name}") for name, v in zip(names, tree, strict=True)]
        return tree._make(values) if hasattr(tree, "_make") else type(tree)(values)
    if _is_dataclass(tree):
        mapped = copy.copy(tree)
        for f in fields(tree):
            # not setattr: a batch may be frozen
            object.__setattr__(mapped, f.name, map_leaves(getattr(tree, f.name), function, f"{prefix}{f.name}"))
        return mapped
    return function(tree, key)


def tensors(tree: Any) -> Iterator[Tensor]:
    """Every tensor of a tree, depth first."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, Mapping | list | tuple):
        for item in tree.values() if isinstance(tree, Mapping) else tree:
            yield from tensors(item)
    elif _is_dataclass(tree):
        for f in fields(tree):
            yield from tensors(getattr(tree, f.name))


def _is_dataclass(tree: Any) -> bool:
    return is_dataclass(tree) and not isinstance(tree, type)
