"""The rows of a tensor that are on this rank, and all of them put together.

``fully_shard`` deals out rows as ``torch.chunk`` does: the last ranks may have fewer, or none.
"""

from __future__ import annotations

import torch
from torch import Tensor, distributed
from torch.distributed.tensor import DTensor


class Rows:
    """This rank's rows of parameters, gradients and states; what is no ``DTensor`` is whole on every rank.

    Args:
        group: The ranks that hold the rows of one copy; or all, of whom the first copy's are put together.
        shards: How many ranks hold the rows of one copy.
        rank: Among all, of which those of the first copy come first, then those of the second.
    """

    def __init__(self, group: distributed.ProcessGroup, shards: int, rank: int, device: torch.device) -> None:
        self._group, self._shards, self._rank, self._device = group, shards, rank, device

    def local(self, tensor: Tensor) -> Tensor:
        """The rows themselves: what is written to them is written to the tensor."""
        if not isinstance(tensor, DTensor):
            return tensor
        with torch.no_grad():  # the rows and not a view of them
            return tensor.to_local()

    def whole(self, tensor: Tensor) -> Tensor:
        """All rows; every rank calls it.

        Not by ``full_tensor``: torch keeps what it knows of meshes, so that states of an optimizer can have the groups
        of an earlier run of this process, which are gone.
        """
        if not isinstance(tensor, DTensor):
            return tensor
        with torch.no_grad():
            here = tensor.to_local()
            padded = here.new_zeros((self._each(tensor), *here.shape[1:]))
            padded[: len(here)] = here
            parts = [torch.empty_like(padded) for _ in range(self._group.size())]
            distributed.all_gather(parts, padded.contiguous(), group=self._group)
            return torch.cat(parts[: self._shards])[: tensor.shape[0]]

    def part(self, whole: Tensor, like: Tensor) -> Tensor:
        """Of ``whole``, or what gives its rows by slices, those that ``like`` has here, in memory of their own."""
        if not isinstance(like, DTensor):
            return whole
        with torch.no_grad():
            first = self._first(like)
            here = whole[first : first + like.to_local().shape[0]]
            own = torch.empty(here.shape, dtype=here.dtype, device=self._device).copy_(here)
            mesh, shape, stride = like.device_mesh, like.shape, like.stride()
            return DTensor.from_local(own, mesh, like.placements, run_check=False, shape=shape, stride=stride)

    def first(self, tensor: Tensor) -> int | None:
        """The number of the first row here; ``None`` where a rank before this has the same rows."""
        if not isinstance(tensor, DTensor):
            return 0 if self._rank == 0 else None
        return self._first(tensor) if self._rank < self._shards else None

    def _first(self, tensor: DTensor) -> int:
        return min(self._each(tensor) * (self._rank % self._shards), tensor.shape[0])

    def _each(self, tensor: DTensor) -> int:
        return -(-tensor.shape[0] // self._shards)
