"""How much memory weights, gradients and optimizer state take, from their shapes alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn, optim

Group = Mapping[str, Any]

#: Tensors as large as a parameter in the state of an optimizer of torch. Source: torch.optim, the steps of each.
_TENSORS: dict[type[optim.Optimizer], Callable[[Group], int]] = {
    optim.Adam: lambda group: 2 + bool(group["amsgrad"]),
    optim.AdamW: lambda group: 2 + bool(group["amsgrad"]),
    optim.NAdam: lambda group: 2,
    optim.RAdam: lambda group: 2,
    optim.Adamax: lambda group: 2,
    optim.Adadelta: lambda group: 2,
    optim.Rprop: lambda group: 2,
    optim.Adagrad: lambda group: 1,
    optim.ASGD: lambda group: 1,
    optim.RMSprop: lambda group: 1 + bool(group["momentum"]) + bool(group["centered"]),
    optim.SGD: lambda group: int(bool(group["momentum"])),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Bytes on the device, without activations and batches; ``optimizer`` is ``None`` where its class is not known."""

    parameters: int
    buffers: int
    gradients: int
    optimizer: int | None
    average: int

    @property
    def total(self) -> int:
        """All that is known."""
        return self.parameters + self.buffers + self.gradients + (self.optimizer or 0) + self.average

    @property
    def checkpoint(self) -> int | None:
        """Bytes of one checkpoint, but for some kilobytes of its own."""
        policy = self.parameters + self.buffers
        return None if self.optimizer is None else policy + self.optimizer + (policy if self.average else 0)

    def words(self) -> tuple[str, str]:
        """The sum, and what it is made of."""
        optimizer = "unknown" if self.optimizer is None else size(self.optimizer)
        parts = [f"parameters {size(self.parameters)}", f"gradients {size(self.gradients)}", f"optimizer {optimizer}"]
        parts += [f"buffers {size(self.buffers)}"] if self.buffers else []
        parts += [f"average {size(self.average)}"] if self.average else []
        least = "at least " if self.optimizer is None else ""
        return f"{least}{size(self.total)}", f"{', '.join(parts)}; activations and batches come on top"


def memory_of(
    policy: nn.Module,
    optimizers: Sequence[optim.Optimizer],
    *,
    averages: bool,
    part: Callable[[Tensor], Tensor] = lambda whole: whole,
) -> Memory:
    """That of a policy and its optimizers; with ``averages`` EMA keeps another copy of what trains.

    Args:
        part: Gives of each tensor what is counted, such as the shard of a rank.
    """
    trainable = _bytes(part(p) for p in policy.parameters() if p.requires_grad)
    states = [_state(optimizer, part) for optimizer in optimizers]
    return Memory(
        parameters=_bytes(map(part, policy.parameters())),
        buffers=_bytes(map(part, policy.buffers())),
        gradients=trainable,
        optimizer=None if None in states else sum(state or 0 for state in states),
        average=trainable if averages else 0,
    )


def size(count: int) -> str:
    """Bytes as a person reads them."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6)):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count / 1e3:.3g} kB"


def _state(optimizer: optim.Optimizer, part: Callable[[Tensor], Tensor]) -> int | None:
    tensors = _TENSORS.get(type(optimizer))
    if tensors is None:
        return None
    return sum(tensors(group) * _bytes(map(part, group["params"])) for group in optimizer.param_groups)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
