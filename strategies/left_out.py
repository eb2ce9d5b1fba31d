"""Zeros for what a sharded backward leaves out, so that the ranks' sums are of the same parameters.

FSDP2 reduces of each unit the gradients that there are, one after another in one tensor. Where ranks leave out
different parameters these tensors differ in what is where, or in length: sums are wrong, or the process aborts.

Source: ``FSDPParamGroup.post_backward`` of torch 2.11 and 2.13, before which this is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn


class LeftOut:
    """Of a policy's trainable parameters, those that the loss of a window left out on this rank.

    Args:
        units: The modules that ``fully_shard`` has made its own, the policy itself as the last.
    """

    def __init__(self, policy: nn.Module, units: Iterable[Any]) -> None:
        numbered = enumerate(policy.named_parameters())
        self._known = {id(parameter): (number, name) for number, (name, parameter) in numbered}
        self._filled: dict[int, Any] = {}  # by number
        self._is_closed = False
        self._kept: dict[int, Any] | None = None  # in padding, the gradients from before it, by id
        self._groups = [group for unit in units for group in _groups(unit)]
        self._of_root = self._groups[-1].fsdp_params if _groups(policy) else []  # has a part in every forward
        for group in self._groups:
            group.post_backward = partial(self._before, group, group.post_backward)

    @contextmanager
    def closing(self) -> Iterator[None]:
        """Around the backward that closes a window; what the window left out has no gradient afterwards."""
        yield
        self._is_closed = True
        self.take_back()

    def take_back(self) -> None:
        """Of a window that is closed, the zeros, also those of a backward that a callback has made since.

        Not before: until then another rank may have given a gradient to what is left out here so far.
        """
        if self._is_closed:
            for one in self._filled.values():
                one.sharded_param.grad = None

    def begin(self) -> None:
        """The next window begins."""
        self._filled, self._is_closed = {}, False

    @contextmanager
    def padding(self) -> Iterator[None]:
        """Around a backward whose gradients, finite or not, count as zeros."""
        self._kept = {}
        for group in self._groups:
            for one in group.fsdp_params:
                self._kept[id(one)], one._unsharded_param.grad = one._unsharded_param.grad, None
        try:
            yield
        finally:
            self._kept = None

    @property
    def numbers(self) -> list[int]:
        """Their places among all parameters, in order."""
        return sorted(self._filled)

    @property
    def names(self) -> list[str]:
        """Their names, in the same order."""
        return [name for number, name in sorted(self._known.values()) if number in self._filled] if self._filled else []

    def _before(self, group: Any, post_backward: Callable[..., None], *unused: Any) -> None:
        if self._kept is not None:
            for one in group.fsdp_params:
                kept, new = self._kept.pop(id(one), None), one._unsharded_param.grad
                one._unsharded_param.grad = new.zero_() if kept is None and new is not None else kept
        if group.reduce_grads:
            self._fill(group.fsdp_params)
        post_backward(*unused)

    def _fill(self, of_unit: list[Any]) -> None:
        missing = [
            one for one in of_unit if one.unsharded_accumulated_grad is None and one._unsharded_param.grad is None
        ]
        if len(missing) == len(of_unit) and of_unit is not self._of_root:  # the unit has no part in it at all
            return
        if self._filled:  # a unit that runs twice comes here twice
            gone = {id(one) for one in missing}
            self._filled = {n: one for n, one in self._filled.items() if one not in of_unit or id(one) in gone}
        for one in missing:
            if one.sharded_param.requires_grad:
                one._unsharded_param.grad = torch.zeros_like(one._unsharded_param)
                if one.sharded_param.grad is None and id(one.sharded_param) in self._known:
                    self._filled[self._known[id(one.sharded_param)][0]] = one
        if any(one.unsharded_accumulated_grad is not None for one in of_unit):  # what is reduced has to be of one type
            for one in of_unit:
                if one.unsharded_accumulated_grad is None:
                    one.to_accumulated_grad_if_needed()


def _groups(unit: Any) -> list[Any]:
    state = unit._get_fsdp_state()
    found = getattr(state, "_fsdp_param_groups", None)  # since torch 2.12; before, one or none
    return [group for group in ([state._fsdp_param_group] if found is None else found) if group is not None]
