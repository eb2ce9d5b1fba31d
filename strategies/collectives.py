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

from .errors import CallbackError
from .roll_call import RollCall

_MARK = ()  # between gathers and reductions: a collective of the run's own, or the end of a micro-batch


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

    They stand in one order with the run's own collectives, which are marks between them.

    Args:
        units: The modules that ``fully_shard`` has made its own, the policy itself as the last.
        device: The policy's, on which gradients of zero are made.
        shards: The group of ranks that hold the shards of one copy.
        replicas: The group of ranks that hold the same shards; ``None`` where there are no others.
        roll_call: Where ranks are asked what they do.
    """

    def __init__(
        self,
        units: Sequence[Any],
        device: torch.device,
        *,
        shards: distributed.ProcessGroup,
        replicas: distributed.ProcessGroup | None,
        roll_call: RollCall,
    ) -> None:
        self._units, self._device, self.shards, self._replicas = units, device, shards, replicas
        self._roll_call = roll_call
        #: Whether all-gathers leave out the other ranks, and give nothing of worth.
        self.is_mute = False
        self._in_micro_batch = self._is_silent = self._has_strays = self._is_over = False
        self._number = 0  # of the next in the order
        self._course = 0  # a hash of what was noted since it was asked for
        self._has_failed = False
        for number, unit in enumerate(units):
            unit.set_custom_all_gather(_AllGather(self, _Gather(number)))
            unit.set_custom_reduce_scatter(_ReduceScatter(self))

    @contextmanager
    def micro_batch(self) -> Iterator[None]:
        """A micro-batch is under way, after which torch lets its units go by itself."""
        self._in_micro_batch = True
        try:
            yield
        finally:
            self._in_micro_batch = False

    @contextmanager
    def silence(self) -> Iterator[None]:
        """Each rank comes here in its own time, so that none could tell when the others gather."""
        self._is_silent = True
        try:
            yield
        finally:
            self._is_silent = False

    def take_strays(self) -> bool:
        """Whether a forward outside of micro-batches may have left units gathered; forgets it.

        Not on a rank that has failed, on which each unit is let go at once.
        """
        had, self._has_strays = self._has_strays, False
        # With all rows on each rank torch gathers nothing that could be noted.
        return (had or self.shards.size() == 1) and not self._has_failed

    def take_course(self) -> int:
        """A hash of the gathers and reductions since the last call, and of their order."""
        course, self._course = self._course, 0
        return course

    def note(self, one: _Gather | _Reduction | tuple[()]) -> None:
        """What is about to be done.

        Raises:
            CallbackError: No rank can know when the others do it.
        """
        if one and self._is_silent:
            raise CallbackError(
                "A sharded policy was run in on_update_end, to which each rank comes in its own time, and its weights "
                "could not be gathered.\nRun it in on_due or on_train_batch_end."
            )
        self._has_strays = self._has_strays or (bool(one) and not self._in_micro_batch)
        if one:
            self._course = hash((self._course, one[0]))  # of numbers, whose hash is alike in all processes
        self._roll_call.note(self._number, one)
        self._number += 1

    def mark(self, patience_s: float) -> None:
        """The end of a micro-batch, or a collective of the run's own, is next; a rank that failed makes all before it.

        Where all ranks have failed, each makes what any of them had begun: so they stand at the same place. After
        ``end`` there is nothing to mark.

        Raises:
            DistError: Nobody tells in time what they are.
        """
        if self._is_over:
            return
        if not self._has_failed:
            self.note(_MARK)
            return
        while one := self._roll_call.ask(self._number, patience_s):
            match one:
                case [unit]:
                    number = self._number
                    self._units[unit].unshard()  # which comes to note it
                    self._units[unit].reshard()
                    assert self._number > number
                case [numel, dtype, op]:
                    self._reduce_nothing(_Reduction(numel, dtype, op))
                    self._number += 1
        self._number += 1

    def fail(self) -> None:
        """This rank has failed: from now on it makes what the others do."""
        if not self._has_failed:
            self._has_failed = True
            # Have no unit gathered, nor about to be, wherever the error found it. Without this ``reshard`` does nothing
            # within a forward; it stays so, since none comes any more.
            for unit in self._units:
                unit.set_reshard_after_forward(True, recurse=False)
            self.wake()  # which ends a gather that was begun

    def end(self) -> None:
        """Nothing is to be made together any more; units that were gathered are let go."""
        self.fail()
        self._is_over = True

    def wake(self) -> None:
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

    def _reduce_nothing(self, one: _Reduction) -> None:
        zeros = torch.zeros(one.numel, dtype=getattr(torch, one.dtype), device=self._device)
        own, op = zeros.new_empty(one.numel // self.shards.size()), getattr(distributed.ReduceOp, one.op)
        if self.shards.size() > 1:
            _reduce_scatter()(own, zeros, op=op, group=self.shards)
        if self._replicas is not None:
            distributed.all_reduce(own, op=op, group=self._replicas)


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
