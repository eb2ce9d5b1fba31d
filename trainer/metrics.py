"""Means of what a run reports, collected without reading the device."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..strategies.errors import ConfigError

_CHUNK = 256  # scalars kept one by one before they are packed into one tensor, still on the device


def scalar(name: str, value: Any) -> Tensor | float:
    """A reported value as a float, or as a detached tensor that nobody changes later and that keeps no other alive.

    Raises:
        ConfigError: It is neither a number nor a scalar tensor, or is a DTensor, of which each rank has a part.
    """
    if isinstance(value, Tensor):
        if hasattr(value, "full_tensor"):
            raise ConfigError(
                f"The metric {name!r} is of a weight or gradient in shards (DTensor), of which each rank has a part.\n"
                "Report value.full_tensor(), called on every rank alike; item() would give the part of one."
            )
        if value.numel() != 1:
            raise ConfigError(
                f"The metric {name!r} must be a number or a scalar tensor, got shape {tuple(value.shape)}.\n"
                "Report its mean()."
            )
        fresh = value.grad_fn is not None and not value._is_view()  # the result of an operation, such as the loss
        return value.detach() if fresh else value.detach().clone()
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"The metric {name!r} must be a number or a scalar tensor, got {value!r}.\nLeave out what is no number."
        ) from error


class Means:
    """Running means by name; values that are not finite are left out (they belong to skipped updates).

    Tensors stay on their device until ``read``, which makes one copy for all of a device.
    """

    def __init__(self) -> None:
        self._scalars: dict[str, list[tuple[Tensor, float]]] = {}
        self._chunks: dict[str, list[tuple[Tensor, list[float]]]] = {}
        self._sums: dict[str, list[float]] = {}

    def add(self, name: str, value: Any, weight: float = 1.0) -> None:
        """Take in one value: a number or a scalar tensor, on whatever device; nothing if its weight is 0.

        Raises:
            ConfigError: The value is neither.
        """
        value = scalar(name, value)
        if weight == 0.0:
            return
        if not isinstance(value, Tensor):
            self._add_number(name, value, weight)
            return
        scalars = self._scalars.setdefault(name, [])
        scalars.append((value, weight))
        if len(scalars) >= _CHUNK:
            self._pack(name)

    def _pack(self, name: str) -> None:
        alike: dict[tuple[torch.device, torch.dtype, torch.Size], list[tuple[Tensor, float]]] = {}
        for value, weight in self._scalars.pop(name):
            alike.setdefault((value.device, value.dtype, value.shape), []).append((value, weight))
        for scalars in alike.values():
            packed = torch.stack([value for value, _ in scalars]).flatten().float()
            self._chunks.setdefault(name, []).append((packed, [weight for _, weight in scalars]))

    def _add_number(self, name: str, number: float, weight: float) -> None:
        total = self._sums.setdefault(name, [0.0, 0.0])
        if math.isfinite(number):
            total[0] += number * weight
            total[1] += weight

    def _take_in(self) -> None:
        for name in list(self._scalars):
            self._pack(name)
        by_device: dict[torch.device, list[tuple[str, Tensor, list[float]]]] = {}
        for name, chunks in self._chunks.items():
            for chunk, weights in chunks:
                by_device.setdefault(chunk.device, []).append((name, chunk, weights))
        self._chunks = {}
        for named in by_device.values():
            values = iter(torch.cat([chunk for _, chunk, _ in named]).tolist())
            for name, _, weights in named:
                for weight in weights:
                    self._add_number(name, next(values), weight)

    def read(self, gather: Callable[[Any], list[Any]] = lambda own: [own], *, anew: bool = True) -> dict[str, float]:
        """The means since the last ``read``, NaN where no value was finite. Waits for the device.

        Args:
            gather: What all ranks give for one's own, for means over all of them.
            anew: Whether the next means begin here.
        """
        sums = added(gather(self.state_dict()))
        if anew:
            self._sums = {}
        return {name: total / count if count else math.nan for name, (total, count) in sums.items()}

    def state_dict(self) -> dict[str, list[float]]:
        """Sums and counts so far, by name. Waits for the device."""
        self._take_in()
        return {name: list(total) for name, total in self._sums.items()}

    def load_state_dict(self, state: Mapping[str, list[float]]) -> None:
        """Take back what ``state_dict`` gave."""
        self._sums = {name: list(total) for name, total in state.items()}


def added(parts: Iterable[Mapping[str, list[float]]]) -> dict[str, list[float]]:
    """Sums and counts of several, by name."""
    added: dict[str, list[float]] = {}
    for part in parts:
        for name, (total, count) in part.items():
            both = added.setdefault(name, [0.0, 0.0])
            both[0] += total
            both[1] += count
    return added
