"""Validation: means over held-out data that leave no trace in the run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .data import count_samples, counted
from .metrics import added, scalar
from .policy import PolicyAdapter
from .rng import derive_seed, seed_everything

if TYPE_CHECKING:
    from .trainer import Trainer


class SampleMeans:
    """Means over samples: each batch weighs as much as it has samples, one that only pads not at all. NaN stays NaN."""

    def __init__(self) -> None:
        self.samples = 1
        self._values: dict[str, list[tuple[Tensor | float, int]]] = {}

    def add(self, name: str, value: Any) -> None:
        """One batch's mean: a number or a scalar tensor.

        Raises:
            ConfigError: It is neither.
        """
        value = scalar(name, value)
        if self.samples:
            self._values.setdefault(name, []).append((value, self.samples))

    def read(self, gather: Callable[[Any], list[Any]] = lambda own: [own]) -> dict[str, float]:
        """The means by name, over what all ranks ``gather``; waits for the device."""
        sums = {
            name: [sum(float(value) * n for value, n in values), float(sum(n for _, n in values))]
            for name, values in self._values.items()
        }
        return {name: total / count for name, (total, count) in added(gather(sums)).items()}


def validate(trainer: Trainer, adapter: PolicyAdapter, data: Iterable[Any], *, seed: int) -> dict[str, float]:
    """The ``val/...`` means of the policy over ``data``, in eval mode, computed in the trainer's precision.

    Random numbers that the policy draws are the same at every validation; gradients, modes and all random
    streams are afterwards what they were.
    """
    policy, means, callbacks = adapter.policy, SampleMeans(), trainer.callbacks
    with trainer.evaluating(policy), trainer.collecting(means.add), torch.no_grad():
        seed_everything(derive_seed(seed, "validation"))
        callbacks.call("on_validation_start", trainer, policy)
        for index, (batch, counts) in enumerate(trainer.device.stream(counted(data))):
            means.samples = count_samples(batch) if counts else 0
            callbacks.call("on_validation_batch_start", trainer, policy, batch, index)
            outputs = trainer.precision.forward(adapter.validation_step, batch, index)
            for name, value in outputs.items():
                means.add(f"val/{name}", value)
            callbacks.call("on_validation_batch_end", trainer, policy, outputs, batch, index)
    return means.read(partial(trainer.distribution.gather, place="validate()"))
