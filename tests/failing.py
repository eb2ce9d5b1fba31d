"""What fails on one rank: a policy, an optimizer, data, a callback, a process."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Iterator
from functools import partial
from typing import Any, ClassVar

import torch
from ranks import Block, Samples
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import IterableDataset

from policyfit import Callback, Trainer


class Breaks(nn.Module):
    """Its own code fails on a rank, from a forward on: ``before``, ``between`` or ``after`` its blocks, or ``back``.

    Args:
        where: ``back`` is between the blocks in the backward.
        rank: ``None`` for none.
        width: From 600 on, the sums of gradients that DDP makes are several.
    """

    fsdp_units: ClassVar[list[str]] = ["Block"]

    def __init__(self, where: str, rank: int | None, forward: int, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, width), nn.Linear(width, 3)
        self.blocks = nn.ModuleList([Block(width, 0.0) for _ in range(3)])
        self.where, self.left = where, forward if str(rank) == os.environ.get("RANK") else math.inf

    def _fail(self, where: str, *_: Any) -> None:
        if where == self.where and self.left < 0:
            raise RuntimeError(f"{where} the blocks of this rank")

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        self.left -= 1
        self._fail("before")
        x = self.first(batch["x"])
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == 1:
                self._fail("between")
                x.register_hook(partial(self._fail, "back"))
        x = self.last(x)
        self._fail("after")
        loss: Tensor = (x - batch["y"]).square().mean()
        return loss


class Tears(SGD):
    """Fails on a rank in its fourth step, with one weight changed."""

    def __init__(self, parameters: Any, rank: int) -> None:
        super().__init__(parameters, lr=1e-2, momentum=0.9)
        self.left = 3 if str(rank) == os.environ["RANK"] else -1

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if self.left == 0:
            next(p for group in self.param_groups for p in group["params"] if p.numel()).mul_(math.nan)
            raise RuntimeError("in the middle of a step")
        self.left -= 1
        super().step()


class Endless(IterableDataset[dict[str, Any]]):
    """Twelve samples, of which nothing says how many they are; in one epoch one cannot be read on rank 1."""

    def __init__(self, fails_at: int | None = None, epoch: int = 1) -> None:
        self.fails_at, self.epoch, self.epochs = fails_at, epoch, 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        fails = self.epochs == self.epoch and os.environ.get("RANK") == "1"
        self.epochs += 1
        samples = Samples(fails_at=self.fails_at if fails else None)
        return (samples[i] for i in range(12))


class Counted(Endless):
    """The same, saying how many they are."""

    def __len__(self) -> int:
        return 12


class Fails(Callback):
    """Raises in one hook, on one rank."""

    def __init__(self, rank: int, hook: str, micro_batch: int) -> None:
        self.rank, self.micro_batch = rank, micro_batch
        setattr(self, hook, self._fail)

    def _fail(self, trainer: Trainer, *_: Any) -> None:
        if trainer.distribution.rank == self.rank and trainer.micro_batches == self.micro_batch:
            raise RuntimeError("only on this rank")

    def setup(self, trainer: Trainer, policy: nn.Module, stage: str) -> None: ...
    def on_fit_start(self, trainer: Trainer, policy: nn.Module) -> None: ...
    def on_train_epoch_start(self, trainer: Trainer, policy: nn.Module) -> None: ...
    def on_train_batch_start(self, trainer: Trainer, policy: nn.Module, batch: Any, batch_idx: int) -> None: ...
    def on_before_backward(self, trainer: Trainer, policy: nn.Module, loss: Tensor) -> None: ...
    def on_after_backward(self, trainer: Trainer, policy: nn.Module) -> None: ...
    def on_before_optimizer_step(self, trainer: Trainer, policy: nn.Module, optimizer: Any) -> None: ...
    def on_before_zero_grad(self, trainer: Trainer, policy: nn.Module, optimizer: Any) -> None: ...
    def on_train_batch_end(self, trainer: Trainer, policy: nn.Module, outputs: Any, batch: Any, i: int) -> None: ...
    def on_update_end(self, trainer: Trainer, policy: nn.Module, outcome: Any) -> None: ...
    def on_log(self, trainer: Trainer, policy: nn.Module, record: Any) -> None: ...
    def on_validation_start(self, trainer: Trainer, policy: nn.Module) -> None: ...
    def on_validation_batch_end(self, *_: Any) -> None: ...
    def on_validation_end(self, trainer: Trainer, policy: nn.Module) -> None: ...
    def on_due(self, trainer: Trainer, policy: nn.Module) -> None: ...
    def on_save_checkpoint(self, trainer: Trainer, policy: nn.Module, checkpoint: Any) -> None: ...
    def on_train_epoch_end(self, trainer: Trainer, policy: nn.Module) -> None: ...
    def on_fit_end(self, trainer: Trainer, policy: nn.Module) -> None: ...

    def due(self, step: int) -> bool:
        return step % 3 == 0


class Dies(Callback):
    def __init__(self, rank: int, micro_batch: int) -> None:
        self.rank, self.micro_batch = rank, micro_batch

    def on_train_batch_start(self, trainer: Trainer, policy: nn.Module, batch: Any, batch_idx: int) -> None:
        if trainer.distribution.rank == self.rank and trainer.micro_batches == self.micro_batch:
            os.kill(os.getpid(), signal.SIGKILL)
