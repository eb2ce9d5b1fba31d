"""The collectives of a sharded micro-batch, noted so that a rank that cannot compute it can make them all the same.

FSDP2 decides in its hooks when a unit is gathered and when its gradients are reduced, and tells nobody. But it lets
the two calls be replaced (``set_custom_all_gather``, ``set_custom_reduce_scatter``): those here do what its own do, and
note it. A micro-batch that closes its window is taken to be like the last one that did, and any other to be the same
without the reductions. Where that is not so (a unit runs in some windows only), ranks lose each other.

Source: torch.distributed.fsdp.FSDPModule; ``foreach_all_gather`` and ``foreach_reduce`` of torch 2.11 and 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, distributed


class _Collective(Protocol):
    def repeat(self) -> None: ...


class Collectives:
    """Notes the all-gathers and reduce-scatters of a policy's units, and repeats them.

    Args:
        units: The modules that ``fully_shard`` has made its own, the policy itself among them.
        replicas: The group of ranks that hold the same shards; ``None`` where there are no others.
    """

    def __init__(self, units: Sequence[Any], replicas: Any = None) -> None:
        self._units, self.replicas = units, replicas
        #: Whether all-gathers leave out the other ranks, and give nothing of worth.
        self.is_mute = False
        self._noted: list[_Collective] = []
        self._under_way = False  # also after an error, until the rest is made
        self._window_is_open = False
        #: Of the last one that closed a window: by whether others went before it, since what these have left in units
        #: that run twice is reduced too.
        self._last: dict[bool, list[_Collective]] = {}
        self._parameters = [parameter for unit in units for parameter in unit.parameters()]
        self._trained: list[bool] = []
        for unit in units:
            unit.set_custom_all_gather(_AllGather(self, unit))
            unit.set_custom_reduce_scatter(_ReduceScatter(self))

    @contextmanager
    def micro_batch(self, *, closes: bool) -> Iterator[None]:
        """Note the collectives of a forward and its backward."""
        self._noted, self._under_way = [], True
        yield
        self._under_way = False
        if closes:
            self._last[self._window_is_open], self._trained = self._noted, self._what_trains()
        self._window_is_open = not closes

    def _what_trains(self) -> list[bool]:
        return [parameter.requires_grad for parameter in self._parameters]

    def note(self, one: _Collective) -> None:
        """What is about to be done; ignored outside a micro-batch."""
        if self._under_way:
            self._noted.append(one)

    @property
    def are_known(self) -> bool:
        """Whether there has been a micro-batch that closed its window, since anything froze or thawed."""
        return bool(self._last) and self._trained == self._what_trains()

    def repeat(self, *, closes: bool) -> None:
        """Make those of a micro-batch that has not begun, or the rest of those of one that an error broke off."""
        last, done = self._last.get(self._window_is_open) or next(iter(self._last.values())), 0
        if self._under_way:
            done, self._under_way = len(self._noted), False
            self._reshard_all()
        for one in [one for one in last if closes or isinstance(one, _AllGather)][done:]:
            one.repeat()
        self._window_is_open = not closes

    def _reshard_all(self) -> None:
        """Have no unit gathered, nor about to be, wherever the error found it."""
        self.is_mute = True
        try:
            for unit in self._units:
                # Else ``reshard`` does nothing within a forward; it stays so, since no forward comes any more.
                unit.set_reshard_after_forward(True, recurse=False)
                unit.unshard()  # ends a gather that was begun
                unit.reshard()
        finally:
            self.is_mute = False


class _Memory:
    """Allocates as torch's own calls do."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _AllGather(_Memory):
    """That of one unit's weights."""

    def __init__(self, collectives: Collectives, unit: Any) -> None:
        self._collectives, self._unit = collectives, unit

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        if self._collectives.is_mute:
            return None
        self._collectives.note(self)
        return _all_gather()(output_tensor, input_tensor, group=group, async_op=async_op)

    def repeat(self) -> None:
        self._unit.unshard()
        self._unit.reshard()


class _ReduceScatter(_Memory):
    """That of a unit's gradients."""

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        self._collectives.note(_Reduction(input_tensor, group, op, self._collectives.replicas))
        return _reduce_scatter()(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


class _Reduction:
    """A reduce-scatter that was made; between replicas torch all-reduces its result by the same operation."""

    def __init__(self, gradients: Tensor, group: Any, op: Any, replicas: Any) -> None:
        self._numel, self._dtype, self._device = gradients.numel(), gradients.dtype, gradients.device
        self._group, self._op, self._replicas = group, op, replicas

    def repeat(self) -> None:
        zeros = torch.zeros(self._numel, dtype=self._dtype, device=self._device)
        own = zeros.new_empty(self._numel // self._group.size())
        _reduce_scatter()(own, zeros, op=self._op, group=self._group)
        if self._replicas is not None:
            distributed.all_reduce(own, op=self._op, group=self._replicas)


def _all_gather() -> Callable[..., Any]:
    """Torch's, which has another name since 2.13."""
    return getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor


def _reduce_scatter() -> Callable[..., Any]:
    return getattr(distributed, "reduce_scatter_single", None) or distributed.reduce_scatter_tensor
