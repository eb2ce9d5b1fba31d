"""How a run is spread over processes: the verbs, and the single process as the plain case of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn


class DistributionStrategy(ABC):
    """The processes of a run and what they agree on.

    ``rank`` is global, ``local_rank`` within a machine; both are 0 in a run of one process.
    """

    name: str
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this process writes and prints."""
        return self.rank == 0

    @abstractmethod
    def setup(self, device: torch.device) -> None:
        """Join the other processes."""

    @abstractmethod
    def teardown(self) -> None:
        """Leave them; called once, also after an error."""

    @abstractmethod
    def wrap(self, policy: nn.Module) -> nn.Module:
        """The module whose forward trains: ``policy`` itself, or a wrapper that talks to the other ranks."""

    @abstractmethod
    def accumulating(self, module: nn.Module) -> AbstractContextManager[Any]:
        """The context of a backward that does not close its window, so that ranks need not talk yet."""

    @abstractmethod
    def reduce_max(self, flags: Tensor) -> None:
        """Make ``flags``, float32 on the device, the largest over all ranks, in place and without waiting."""


class SingleProcess(DistributionStrategy):
    """``none``: one process on one device."""

    name = "none"

    def setup(self, device: torch.device) -> None:
        """Nobody to join."""

    def teardown(self) -> None:
        """Nobody to leave."""

    def wrap(self, policy: nn.Module) -> nn.Module:
        """The policy itself."""
        return policy

    def accumulating(self, module: nn.Module) -> AbstractContextManager[Any]:
        """Nothing to hold back."""
        return nullcontext()

    def reduce_max(self, flags: Tensor) -> None:
        """Its own flags are all there are."""
