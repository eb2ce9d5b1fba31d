"""A policy whose weights are in shards, gathered unit by unit while they are used.

``torch.distributed.fsdp.fully_shard`` shards each unit and the policy itself, in place;
``register_fsdp_forward_method`` does for other methods what it does for ``forward``. They are imported where they are
used, since that takes more than a second.

Source: torch.distributed.fsdp, and ``FSDPState._lazy_init`` of torch 2.11 and 2.13, which is private.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import distributed, nn

from .collectives import Collectives
from .left_out import LeftOut
from .roll_call import RollCall

#: Methods of a policy that are called from outside, and then need its weights as ``forward`` does.
_ENTRANCES = ("training_step", "validation_step", "select_action", "predict_action_chunk")


class ShardedPolicy:
    """Shards a policy, and knows what its forwards and backwards exchange and leave out.

    Args:
        policy: Becomes the last of the units, with the weights that are in no other.
        reshards: Whether units, but for the policy itself, are freed after their forward.
        shards, replicas, roll_call, device: As for ``Collectives``.
        options: Others of ``fully_shard``.
    """

    def __init__(
        self,
        policy: nn.Module,
        units: Sequence[nn.Module],
        *,
        reshards: bool,
        shards: distributed.ProcessGroup,
        replicas: distributed.ProcessGroup | None,
        roll_call: RollCall,
        device: torch.device,
        **options: Any,
    ) -> None:
        from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

        #: How many there are of each class.
        self.units = Counter(type(unit).__name__ for unit in units)
        self._policy: Any = policy
        self._units: list[Any] = [*units, policy]
        self._reshards = reshards
        for unit in self._units:
            fully_shard(unit, reshard_after_forward=self._is_freed(unit), **options)
        self.collectives = Collectives(self._units, device, shards=shards, replicas=replicas, roll_call=roll_call)
        self._left_out = LeftOut(policy, self._units)
        for name in _ENTRANCES:
            if callable(getattr(policy, name, None)):
                register_fsdp_forward_method(policy, name)

    def _is_freed(self, unit: nn.Module) -> bool:
        """After its forward; not the policy's own weights, since backward begins with them."""
        return self._reshards and unit is not self._policy

    def begin(self) -> None:
        """Units know their types and their root, which else would be the first that a hook calls."""
        self._policy._get_fsdp_state()._lazy_init()
        self.collectives.wake()

    @contextmanager
    def micro_batch(self, *, closes: bool) -> Iterator[None]:
        """Gradients stay whole on their rank until the backward that closes the window reduces their sum to shards."""
        self.release()
        with self.collectives.micro_batch(), self._left_out.closing() if closes else self._without_reduction():
            yield

    @contextmanager
    def _without_reduction(self) -> Iterator[None]:
        self._policy.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self._policy.set_requires_gradient_sync(True)

    def padding(self) -> AbstractContextManager[None]:
        """Around a backward whose gradients count as zeros."""
        return self._left_out.padding()

    def take_fingerprint(self) -> float:
        """Of the order of gathers and reductions, and of the parameters that had zeros for a gradient."""
        fingerprint = hash((self.collectives.take_course(), *self._left_out.numbers)) % 2**20
        self._left_out.begin()
        return float(fingerprint)

    @property
    def left_out(self) -> list[str]:
        """Those of units that took part; the backward of a unit without any gradient reduces nothing."""
        return self._left_out.names

    def release(self) -> None:
        """Have only shards, and no zeros for gradients that this rank has not."""
        if self.collectives.take_strays():
            for unit in self._units:
                self.reshard(unit)
        self._left_out.take_back()

    def reshard(self, unit: Any) -> None:
        """Free the gathered weights of a unit."""
        unit.set_reshard_after_forward(True, recurse=False)  # else it stays, where a forward was broken off
        unit.reshard()
        unit.set_reshard_after_forward(self._is_freed(unit), recurse=False)
