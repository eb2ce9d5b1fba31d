"""Small policies and data for the tests."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from policyfit.strategies.facts import MachineFacts
from policyfit.trainer.data import TrainingData, training_data


class Batch(NamedTuple):
    """x (batch, 6), y (batch, 3), and a factor on the loss: 1.0, or inf to poison the gradients."""

    x: Tensor
    y: Tensor
    factor: Tensor


def batches(n: int, *, poisoned: Sequence[int] = (), size: int = 8, seed: int = 1) -> list[Batch]:
    """``n`` finished micro-batches; those whose number is in ``poisoned`` have an infinite loss."""
    generator = torch.Generator().manual_seed(seed)
    return [
        Batch(
            torch.randn(size, 6, generator=generator),
            torch.randn(size, 3, generator=generator),
            torch.tensor(float("inf") if i in poisoned else 1.0),
        )
        for i in range(n)
    ]


class Ids(Dataset[int]):
    """Gives the index, and counts how often it was asked (in this process)."""

    def __init__(self, n: int) -> None:
        self.n, self.reads = n, 0

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        self.reads += 1
        return index


class Telling(Ids):
    """Gives the epoch that it was told."""

    told = -1

    def set_epoch(self, epoch: int) -> None:
        self.told = epoch

    def __getitem__(self, index: int) -> int:
        return self.told


def data_of(source: Any, rank: int = 0, world_size: int = 1, **changes: Any) -> TrainingData:
    """What a run with seed 7 and batches of 4 makes of a source, in this process."""
    settings: dict[str, Any] = {
        "seed": 7,
        "batch_size": 4,
        "workers": 0,
        "accumulate": 1,
        "pin_memory": False,
        "device_type": "cpu",
        "facts": MachineFacts(),
    }
    return training_data(source, rank=rank, world_size=world_size, **settings | changes)


class Augmented(Ids):
    """Gives the index and one draw from each of the global random streams."""

    def __getitem__(self, index: int) -> Any:
        draws = [random.random(), float(np.random.rand()), torch.rand((), dtype=torch.float64).item()]
        return torch.tensor([index, *draws], dtype=torch.float64)


class InMemory:
    """A loader of another library: can be read again and again, yields finished batches, in this order."""

    def __init__(self, held: Sequence[Any]) -> None:
        self.held = list(held)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.held)

    def __len__(self) -> int:
        return len(self.held)


class MLP(nn.Module):
    """Plain dialect, with dropout so that random streams matter."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Dropout(dropout), nn.Linear(16, 3))

    def forward(self, batch: Batch) -> Tensor:
        return nn.functional.mse_loss(self.net(batch.x), batch.y) * batch.factor


def mlp(seed: int = 0, dropout: float = 0.0) -> MLP:
    """The same weights for the same seed."""
    torch.manual_seed(seed)
    return MLP(dropout)


def weights(policy: nn.Module) -> dict[str, Tensor]:
    """A copy of the state dict."""
    return {name: value.detach().clone() for name, value in policy.state_dict().items()}


def assert_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    """Bit for bit, names included."""
    assert list(a) == list(b)
    different = [name for name in a if not torch.equal(a[name], b[name])]
    assert not different, f"{different} differ"


def by_hand(policy: nn.Module, make: Callable[[Iterable[nn.Parameter]], Optimizer], steps: int = 4) -> Optimizer:
    """The updates that a plain loop makes on the same batches."""
    optimizer = make(policy.parameters())
    for batch in batches(steps):
        policy(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer
