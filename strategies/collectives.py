"""The collectives of a sharded micro-batch, noted so that a rank that cannot compute it can make them all the same.

FSDP2 decides in its hooks when a unit is gathered and when its gradients are reduced, and tells nobody. But it lets
the two calls be replaced (``set_custom_all_gather``, ``set_custom_reduce_scatter``): those here do what its own do, and
note it beforehand, where a thread tells it to a rank that has failed and asks (``roll_call.py``).

Source: torch.distributed.fsdp.FSDPModule; ``foreach_all_gather`` and ``foreach_reduce`` of torch 2.11 and 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed

from .roll_call import RollCall

_NO_MORE = ()  # the end of a micro-batch


class _Gather(NamedTuple):
    """An all-gather of the weights of the unit with this number."""

    unit: int


class _Reduction(NamedTuple):
    """A reduce-scatter of gradients, of which torch all-reduces the result between replicas, if there are any."""

    numel: int
    dtype: str  # in torch
    op: str  # in torch.distributed.ReduceOp

    @classmethod
    def of(cls, numel: int, dtype: torch.dtype, op: Any) -> _Reduction:
        """In words that the store can carry."""
        return cls(numel, str(dtype).removeprefix("torch."), getattr(op, "name", "SUM"))  # a scaled sum has no name


class Collectives:
    """Notes the all-gathers and reduce-scatters of a policy's units, and makes those of the others.

    Args:
        units: The modules that ``fully_shard`` has made its own, the policy itself as the last.
        device: The policy's, on which gradients of zero are made.
        shards: The group of ranks that hold the shards of one copy.
        replicas: The group of ranks that hold the same shards; ``None`` where there are no others.
        roll_call: Where ranks are asked what they do.
        timeout: Seconds to wait for an answer.
    """

    def __init__(
        self,
        units: Sequence[Any],
        device: torch.device,
        *,
        shards: distributed.ProcessGroup,
        replicas: distributed.ProcessGroup | None,
        roll_call: RollCall,
        timeout: float,
    ) -> None:
        self._units, self._device, self.shards, self._replicas = units, device, shards, replicas
        self._roll_call, self._timeout = roll_call, timeout
        #: Whether all-gathers leave out the other ranks, and give nothing of worth.
        self.is_mute = False
        self._number = self._made = 0  # micro-batches so far, and collectives in the one under way
        self._under_way = False  # also after an error, until the rest is made
        for number, unit in enumerate(units):
            unit.set_custom_all_gather(_AllGather(self, _Gather(number)))
            unit.set_custom_reduce_scatter(_ReduceScatter(self))

    @contextmanager
    def micro_batch(self) -> Iterator[None]:
        """Note the collectives of a forward and its backward."""
        self._begin()
        yield
        self._under_way = False
        self._roll_call.note(self._place, _NO_MORE)

    def _begin(self) -> None:
        if self._number == 0:
            self._wake()
        self.reshard()  # else what a callback's forward left gathered is computed with, after the weights have moved
        self._number += 1
        self._made, self._under_way = 0, True

    @property
    def _place(self) -> str:
        return f"{self._number}/{self._made}"

    def note(self, one: _Gather | _Reduction) -> None:
        """What is about to be done; left out where it is not in a micro-batch."""
        if self._under_way:
            self._roll_call.note(self._place, one)
            self._made += 1

    def repeat(self) -> None:
        """Make those of a micro-batch that has not begun, or the rest of those of one that an error broke off.

        Where all ranks have failed, each has made what any of them had begun: they stand at the same place.

        Raises:
            DistError: Nobody tells in time what they are.
        """
        if self._under_way:
            self._reshard_all()
        else:
            self._begin()
        self._under_way = False
        while one := self._roll_call.ask(self._place, self._timeout):
            self._made += 1
            match one:
                case [unit]:
                    self._units[unit].unshard()
                    self._units[unit].reshard()
                case [numel, dtype, op]:
                    self._reduce_nothing(_Reduction(numel, dtype, op))

    def reshard(self) -> None:
        """Let go of units that are still gathered, as after a forward outside of micro-batches."""
        for unit in self._units:
            unit.reshard()

    def _reduce_nothing(self, one: _Reduction) -> None:
        zeros = torch.zeros(one.numel, dtype=getattr(torch, one.dtype), device=self._device)
        own, op = zeros.new_empty(one.numel // self.shards.size()), getattr(distributed.ReduceOp, one.op)
        if self.shards.size() > 1:
            _reduce_scatter()(own, zeros, op=op, group=self.shards)
        if self._replicas is not None:
            distributed.all_reduce(own, op=op, group=self._replicas)

    def _reshard_all(self) -> None:
        """Have no unit gathered, nor about to be, wherever the error found it."""
        for unit in self._units:
            # Else ``reshard`` does nothing within a forward; it stays so, since no forward comes any more.
            unit.set_reshard_after_forward(True, recurse=False)
        self._wake()  # which ends a gather that was begun

    def _wake(self) -> None:
        """Gather every unit without the others and let it go.

        Once before all else, since torch fails in a backward that comes to a unit never gathered; and not in ``wrap``,
        since it takes the types of weights from then, which a precision may convert after that.
        """
        self.is_mute = True
        try:
            for unit in self._units:
                unit.unshard()
                unit.reshard()
        finally:
            self.is_mute = False


class _AllGather:
    """That of one unit's weights."""

    def __init__(self, collectives: Collectives, gather: _Gather) -> None:
        self._collectives, self._gather = collectives, gather

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        if self._collectives.is_mute:
            return None
        self._collectives.note(self._gather)
        return _all_gather()(output_tensor, input_tensor, group=group, async_op=async_op)


class _ReduceScatter:
    """That of a unit's gradients. With all rows on each rank torch does not call it, but allocates twice for it."""

    def __init__(self, collectives: Collectives) -> None:
        self._collectives, self._is_second = collectives, False

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        if self._collectives.shards.size() == 1:
            if self._is_second:
                self._collectives.note(_Reduction.of(size[0], dtype, distributed.ReduceOp.AVG))
            self._is_second = not self._is_second
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        self._collectives.note(_Reduction.of(input_tensor.numel(), input_tensor.dtype, op))
        return _reduce_scatter()(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


def _all_gather() -> Callable[..., Any]:
    """Torch's, which has another name since 2.13."""
    return getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor


def _reduce_scatter() -> Callable[..., Any]:
    return getattr(distributed, "reduce_scatter_single", None) or distributed.reduce_scatter_tensor
