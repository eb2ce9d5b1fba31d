"""Every tensor of a batch is reached, and the batch keeps its form."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from policyfit.strategies.tree import map_leaves, map_tensors, tensors


class Step(NamedTuple):
    obs: Tensor
    task: str


def test_map_tensors_keeps_containers_and_what_is_no_tensor() -> None:
    default: defaultdict[str, Tensor] = defaultdict(lambda: torch.zeros(1), {"a": torch.ones(1)})
    batch: dict[str, Any] = {
        "step": Step(torch.ones(2), "pick"),
        "list": [torch.zeros(1), None, 3, 1.5, "x", True],
        "ordered": OrderedDict(b=torch.ones(1), a=True),
        "default": default,
        "array": np.zeros(2),
    }
    mapped = map_tensors(batch, lambda tensor, key: tensor + 1)
    assert isinstance(mapped["step"], Step)
    assert (mapped["step"].obs.tolist(), mapped["step"].task) == ([2.0, 2.0], "pick")
    assert mapped["list"] == [torch.ones(1), None, 3, 1.5, "x", True]
    assert list(mapped["ordered"].items()) == [("b", torch.full((1,), 2.0)), ("a", True)]
    assert type(mapped["default"]) is defaultdict
    assert mapped["default"]["missing"].item() == 0
    assert mapped["array"] is batch["array"]
    assert batch["step"].obs.tolist() == [1.0, 1.0]


def test_map_tensors_tells_the_path_of_each_tensor() -> None:
    keys: list[str] = []

    def see(tensor: Tensor, key: str) -> Tensor:
        keys.append(key)
        return tensor

    one = torch.ones(1)
    map_tensors({"obs": {"state": one, "images": (one, [one])}, 3: one}, see)
    map_tensors(one, see)
    assert keys == ["obs.state", "obs.images.0", "obs.images.1.0", "3", ""]


def test_tensors_are_those_of_the_tree_depth_first() -> None:
    a, b, c, d = (torch.full((1,), float(n)) for n in range(4))
    tree = {"obs": Step(a, "pick"), "rest": [None, (b, MappingProxyType({"x": c})), "text"], "last": d}
    assert [t.item() for t in tensors(tree)] == [0.0, 1.0, 2.0, 3.0]
    assert [t.item() for t in tensors(d)] == [3.0]
    assert list(tensors("text")) == []


def test_map_tensors_names_what_it_finds_by_keys_numbers_and_fields() -> None:
    found: list[str] = []

    def look(tensor: Tensor, key: str) -> Tensor:
        found.append(key)
        return tensor

    map_tensors({"step": Step(torch.ones(1), "pick"), "list": [0, (torch.ones(1),)]}, look)
    assert found == ["step.obs", "list.1.0"]


def test_map_leaves_reaches_what_is_neither_a_tree_nor_a_tensor() -> None:
    batch = {"x": torch.ones(1), "more": [np.zeros(2), {"task": "pick"}]}
    seen: dict[str, str] = {}
    map_leaves(batch, lambda leaf, key: seen.setdefault(key, type(leaf).__name__))
    assert seen == {"x": "Tensor", "more.0": "ndarray", "more.1.task": "str"}
