"""What the accelerator tests share: a device, what it can do, and a policy wide enough for its matrix units.

Needs torch, numpy, safetensors and pytest only, as a borrowed machine may have no more.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer, RMSprop
from torch.optim.lr_scheduler import LambdaLR

from policyfit import FP16, Callback, MachineFacts, Trainer
from policyfit.callbacks.defaults import with_defaults
from policyfit.strategies import DeviceStrategy, PrecisionStrategy
from policyfit.strategies.formats import bf16_support, fp16_support

Make = Callable[[Iterable[nn.Parameter]], Optimizer]
INIT_SCALE = 1024.0

OPTIMIZERS: dict[str, Make] = {
    "AdamW fused": lambda p: AdamW(p, lr=1e-2, fused=True),
    "AdamW unfused": lambda p: AdamW(p, lr=1e-2, fused=False),
    "SGD fused": lambda p: SGD(p, lr=1e-2, momentum=0.9, fused=True),
    "RMSprop": lambda p: RMSprop(p, lr=1e-3),  # has no fused form
}


sleep: Any = torch.cuda._sleep  # keeps the device busy for so many of its cycles


class Batch(NamedTuple):
    """x (batch, 64), y (batch, 32), and a factor on the loss: 1.0, or inf to poison the gradients."""

    x: Tensor
    y: Tensor
    factor: Tensor


class Wide(nn.Module):
    """Its matmuls have shapes that matrix units take; it keeps the type of the first one's result."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 256), nn.Linear(256, 32)
        self.dropout = nn.Dropout(dropout)
        self.computed_in: torch.dtype | None = None

    def act(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        self.computed_in = hidden.dtype
        action: Tensor = self.second(self.dropout(nn.functional.gelu(hidden)))
        return action

    def forward(self, batch: Batch) -> Tensor:
        return nn.functional.mse_loss(self.act(batch.x), batch.y) * batch.factor

    def select_action(self, observation: Tensor) -> Tensor:
        return self.act(observation)


def wide(dropout: float = 0.0) -> Wide:
    """The same weights at every call."""
    torch.manual_seed(0)
    return Wide(dropout)


class InMemory:
    """A loader that yields finished batches, the same and in the same order in every epoch."""

    def __init__(self, held: Sequence[Any]) -> None:
        self.held = list(held)

    def __iter__(self) -> Any:
        return iter(self.held)

    def __len__(self) -> int:
        return len(self.held)


class Rig:
    """One device under test."""

    def __init__(self, strategy: DeviceStrategy, facts: MachineFacts) -> None:
        self.strategy, self.facts = strategy, facts
        self.device = strategy.device
        self.kind = strategy.device.type

    def batches(self, n: int, *, poisoned: Sequence[int] = (), size: int = 64) -> list[Batch]:
        """Micro-batches in host memory, pinned where that is how they travel."""
        generator = torch.Generator().manual_seed(1)
        made = [
            Batch(
                torch.randn(size, 64, generator=generator),
                torch.randn(size, 32, generator=generator),
                torch.tensor(float("inf") if i in poisoned else 1.0),
            )
            for i in range(n)
        ]
        return [Batch(*(part.pin_memory() for part in b)) for b in made] if self.strategy.pins_memory else made

    def precision(self, name: str, growth_interval: int = 3) -> str | PrecisionStrategy:
        """A precision, or a skip that says why the device has it not."""
        if name == "bf16":
            support = bf16_support(self.device, self.facts)
            if not support.native and self.kind != "cpu":
                pytest.skip(support.reason)
        if name == "fp16":
            support = fp16_support(self.device, self.facts)
            if not support.usable:
                pytest.skip(support.reason)
            return FP16({"init_scale": INIT_SCALE, "growth_interval": growth_interval}, allow_cpu=True)
        return name

    def optimizer(self, name: str) -> Make:
        """A maker of optimizers, or a skip where the device has no such kernel."""
        if name == "SGD fused" and self.kind == "xpu":
            pytest.skip("torch has no fused SGD on xpu")
        return OPTIMIZERS[name]

    def trainer(self, precision: Any = "no", **settings: Any) -> Trainer:
        """A Trainer on the device, without the default callbacks unless they are asked for."""
        return Trainer(self.strategy, precision, **{"max_steps": 8, "default_callbacks": False, **settings})

    def fit(self, policy: nn.Module, data: Sequence[Any], make: Make | None = None, **settings: Any) -> Trainer:
        """A whole run over finished batches."""
        trainer = self.trainer(**settings)
        trainer.fit(policy, InMemory(data), optimizer=make or OPTIMIZERS["AdamW fused"], schedule=warmup)
        return trainer

    def defaults(self, *given: Callback, tf32: bool | None = None) -> list[Callback]:
        """The callbacks that a run has by default; the bar needs rich, which may be missing."""
        callbacks = with_defaults(given, tf32=tf32, defaults=True)
        has_rich = importlib.util.find_spec("rich") is not None
        return [c for c in callbacks if has_rich or type(c).__name__ != "Progress"]


def warmup(optimizer: Optimizer) -> LambdaLR:
    """A schedule that skipped updates must not move."""
    return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))


def weights(policy: nn.Module) -> dict[str, Tensor]:
    """A copy of the state dict, on the host."""
    return {name: value.detach().cpu().clone() for name, value in policy.state_dict().items()}


def moments(optimizer: Optimizer) -> dict[str, Tensor]:
    """A copy of the optimizer's tensors, on the host."""
    state = optimizer.state_dict()["state"]
    return {f"{i}.{k}": v.cpu().clone() for i, s in state.items() for k, v in s.items() if isinstance(v, Tensor)}


def assert_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    """Bit for bit, names included."""
    assert list(a) == list(b)
    different = [name for name in a if not torch.equal(a[name], b[name])]
    assert not different, f"{different} differ"
