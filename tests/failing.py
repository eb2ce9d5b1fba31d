"""What fails on one rank: a policy, an optimizer, data, a callback, a process."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Iterator
from functools import partial
from typing import Any, ClassVar

import torch
from ranks import Block, Policy, Samples
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import SGD
from torch.utils.data import IterableDataset
from torch.utils.hooks import RemovableHandle

from policyfit import Callback, Trainer


class Breaks(nn.Module):
    """Its own code fails on a rank, from a forward on: ``before``, ``between`` or ``after`` its blocks, or ``back``.

    Args:
        where: ``back`` is between the blocks in the backward, ``last`` at its end, and ``every`` before every module
            of the process.
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
        self.everywhere: list[RemovableHandle] = []  # hooks on all modules there are

    def _fail(self, where: str, *_: Any) -> None:
        if where == self.where and self.left < 0:
            raise RuntimeError(f"{where} the blocks of this rank")

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        self.left -= 1
        self._fail("before")
        if self.where == "every" and self.left < 0:
            self.everywhere.append(register_module_forward_pre_hook(partial(self._fail, "every")))
        x = batch["x"].requires_grad_(self.where == "last") * 1.0
        if self.where == "last":
            x.register_hook(partial(self._fail, "last"))  # type: ignore[no-untyped-call]
        x = self.first(x)
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
    """Fails on a rank in its fourth step, with one weight multiplied; on rank 0 by what is no Exception.

    Args:
        rank: ``None`` for all.
    """

    def __init__(self, parameters: Any, rank: int | None, factor: float) -> None:
        super().__init__(parameters, lr=1e-2, momentum=0.9)
        fails = rank is None or str(rank) == os.environ["RANK"]
        self.left, self.factor = 3 if fails else -1, factor
        self.kind = BaseException if os.environ["RANK"] == "0" else RuntimeError

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if self.left == 0:
            next(p for group in self.param_groups for p in group["params"] if p.numel()).mul_(self.factor)
            raise self.kind("in the middle of a step")
        self.left -= 1
        super().step()


class Twice(nn.Module):
    """One block that runs twice in a forward, in one of which, and after, its policy fails on rank 1."""

    fsdp_units: ClassVar[list[str]] = ["Block"]

    def __init__(self, forward: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.block, self.last = nn.Linear(6, 12), Block(12, 0.0), nn.Linear(12, 3)
        self.left = forward if os.environ["RANK"] == "1" else math.inf

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        self.left -= 1
        x = self.block(self.first(batch["x"]))
        if self.left < 0:
            raise RuntimeError("only on this rank")
        loss: Tensor = (self.last(self.block(x)) - batch["y"]).square().mean()
        return loss


class Skips(Policy):
    """Its second block has no part in every other forward, from some forward on."""

    def __init__(self, begins: int = 0) -> None:
        super().__init__()
        self.calls, self.begins = 0, begins

    def forward(self, batch: dict[str, Tensor]) -> Any:
        self.calls += 1
        blocks = list(self.blocks)
        x = self.first(batch["x"])
        for block in blocks[: 1 if self.calls > self.begins and self.calls % 2 == 0 else 2]:
            x = block(x)
        return (self.last(x) - batch["y"]).square().mean(), {}


class Unready(Policy):
    """On rank 1 one of its methods fails, once: ``forward`` in a validation, or ``state_dict`` in a save."""

    def __init__(self, method: str) -> None:
        super().__init__()
        self.fails = method if os.environ["RANK"] == "1" else ""
        self.losses = 0

    def forward(self, batch: dict[str, Tensor]) -> Any:
        if self.fails == "forward" and not self.training:
            raise RuntimeError("only on this rank")
        result = super().forward(batch)
        self.losses += self.training
        if self.fails == "forward later" and not self.training:
            raise RuntimeError("only on this rank")
        return result

    def state_dict(self, *args: Any, **named: Any) -> Any:
        if self.fails == "state_dict" and self.losses:
            self.fails = ""
            raise RuntimeError("only on this rank")
        return super().state_dict(*args, **named)


class Leaves(Policy):
    """On rank 1 a layer has no part in one loss."""

    def __init__(self, forward: int) -> None:
        super().__init__()
        self.extra, self.left = nn.Linear(3, 3), forward if os.environ["RANK"] == "1" else math.inf

    def forward(self, batch: dict[str, Tensor]) -> Any:
        loss, metrics = super().forward(batch)
        self.left -= 1
        return (loss if self.left == -1 else loss + self.extra(batch["y"]).square().mean()), metrics


class Panics(Callback):
    """Raises what is no Exception on rank 1, as extensions in Rust do, or one who calls ``sys.exit``."""

    def __init__(self, kind: type[BaseException]) -> None:
        self.kind = kind

    def on_after_backward(self, trainer: Trainer, policy: nn.Module) -> None:
        if trainer.distribution.rank == 1 and trainer.micro_batches == 3:
            raise self.kind("a panic")


class Due(Callback):
    """From step 3 on it cannot say on one rank whether it is due."""

    def __init__(self, rank: int) -> None:
        self.rank = str(rank)

    def due(self, step: int) -> bool:
        if os.environ["RANK"] == self.rank and step >= 3:
            raise RuntimeError("only on this rank")
        return False


class Thaws(Callback):
    """The first layer is trained from the second epoch on."""

    def on_fit_start(self, trainer: Trainer, policy: nn.Module) -> None:
        policy.first.requires_grad_(False)

    def on_train_epoch_start(self, trainer: Trainer, policy: nn.Module) -> None:
        policy.first.requires_grad_(trainer.epoch > 0)


class Endless(IterableDataset[dict[str, Any]]):
    """Twelve samples, of which nothing says how many they are; in one epoch one cannot be read on rank 1.

    Args:
        more: So many more on rank 0.
    """

    def __init__(self, fails_at: int | None = None, epoch: int = 1, more: int = 0) -> None:
        self.fails_at, self.epoch, self.epochs = fails_at, epoch, 0
        self.count = 12 + (more if os.environ.get("RANK") == "0" else 0)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        fails = self.epochs == self.epoch and os.environ.get("RANK") == "1"
        self.epochs += 1
        samples = Samples(fails_at=self.fails_at if fails else None)
        return (samples[i] for i in range(self.count))


class Counted(Endless):
    """The same, saying how many they are."""

    def __len__(self) -> int:
        return 12


class Absent(Samples):
    """Cannot be made on one rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        if str(rank) == os.environ["RANK"]:
            raise OSError("no such share on this machine")


class Fails(Callback):
    """Raises in one hook, on one rank."""

    def __init__(self, rank: int, hook: str, micro_batch: int, words: str = "only on this rank") -> None:
        self.rank, self.micro_batch, self.words = rank, micro_batch, words
        setattr(self, hook, self._fail)

    def _fail(self, trainer: Trainer, *_: Any) -> None:
        if trainer.distribution.rank == self.rank and trainer.micro_batches == self.micro_batch:
            raise RuntimeError(self.words)

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
    def teardown(self, trainer: Trainer, policy: nn.Module, stage: str) -> None: ...

    def due(self, step: int) -> bool:
        return step % 3 == 0


class FailsToo(Fails):
    """Another beside it."""


class Dies(Callback):
    def __init__(self, rank: int, micro_batch: int) -> None:
        self.rank, self.micro_batch = rank, micro_batch

    def on_train_batch_start(self, trainer: Trainer, policy: nn.Module, batch: Any, batch_idx: int) -> None:
        if trainer.distribution.rank == self.rank and trainer.micro_batches == self.micro_batch:
            os.kill(os.getpid(), signal.SIGKILL)
