"""Sharded ranks that lose one which has failed, and meet once more to save what they have."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run
from ranks import Policy, Samples, same
from torch import nn
from torch.distributed import all_reduce

from policyfit import FSDP, Callback, Checkpoint, DistributedError, Trainer
from policyfit.strategies.roll_call import RollCall
from policyfit.trainer.checkpoint import read_checkpoint


class Own(Callback):
    """Talks by itself in the hook ``where``; the last rank fails in the hook ``fails``, at step 3 or before it."""

    def __init__(self, where: str, fails: str) -> None:
        self.where, self.fails = where, fails

    def _at(self, hook: str, trainer: Trainer, policy: nn.Module) -> None:
        ranks = trainer.distribution
        if hook == self.fails and trainer.micro_batches == 3 and ranks.rank == ranks.world_size - 1:
            raise RuntimeError("only on this rank")
        if hook == self.where == "on_after_backward":
            gradient: Any = next(p.grad for p in policy.parameters() if p.grad is not None)
            gradient.full_tensor()  # over the ranks of one copy
        elif hook == self.where:
            all_reduce(torch.ones(1))

    def on_train_batch_start(self, trainer: Trainer, policy: nn.Module, batch: Any, batch_idx: int) -> None:
        self._at("on_train_batch_start", trainer, policy)

    def on_after_backward(self, trainer: Trainer, policy: nn.Module) -> None:
        self._at("on_after_backward", trainer, policy)

    def on_train_batch_end(self, trainer: Trainer, policy: nn.Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._at("on_train_batch_end", trainer, policy)

    def due(self, step: int) -> bool:
        return step == 3

    def on_due(self, trainer: Trainer, policy: nn.Module) -> None:
        self._at("on_due", trainer, policy)


def trained(folder: str, where: str, fails: str, options: dict[str, Any]) -> list[str]:
    RollCall.patience_s = 0.3
    trainer = Trainer(
        "cpu", max_steps=5, batch_size=2, seed=7, run_dir=folder, distributed=FSDP(timeout=2.0, **options),
        callbacks=[Own(where, fails), Checkpoint(every_steps=2 if fails else 3, keep=None)],
    )  # fmt: skip
    try:
        trainer.fit(Policy(), Samples())
    except Exception as error:
        return [f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])]
    return []


def failed(folder: str, where: str, fails: str, options: dict[str, Any]) -> list[str]:
    assert trained(f"{folder}/straight", where, "", options) == []
    return trained(f"{folder}/failed", where, fails, options)


@pytest.mark.parametrize(
    ("where", "fails", "ranks", "options"),
    [
        ("on_due", "on_due", 2, {}),
        ("on_due", "on_train_batch_end", 3, {"checkpoint": "whole"}),
        ("on_after_backward", "on_train_batch_start", 4, {"shard": 2, "replicate": 2}),
    ],
)
def test_sharded_ranks_meet_wherever_they_lost_one_that_failed(
    tmp_path: Path, where: str, fails: str, ranks: int, options: dict[str, Any]
) -> None:
    ends = run(failed, str(tmp_path), where, fails, options, ranks=ranks, limit_s=30.0)
    came_of_it = "all ended after update 3{}\nWhat was saved can be gone on with once that is mended: --resume=auto."
    others = [f"RankFailed: Rank {ranks - 1} failed, so {came_of_it.format(': RuntimeError: only on this rank')}"]
    own = ["RuntimeError: only on this rank", f"This was rank {ranks - 1}; {came_of_it.format('.')}"]
    assert ends == [others] * (ranks - 1) + [own]
    saved, straight = (read_checkpoint(tmp_path / name / "checkpoints" / "000003") for name in ("failed", "straight"))
    same(saved.model, straight.model)
    for index, state in straight.optimizers[0]["state"].items():
        same(saved.optimizers[0]["state"][index], state)
    assert saved.manifest["counters"] == straight.manifest["counters"]


class Leaves(Callback):
    """Of rank 1 and of the last: leaves the run by Ctrl-C, fails, or is stuck; and lives on, as in a notebook."""

    def __init__(self, what: str, ended: Path) -> None:
        self.what, self.ended = what, ended

    def on_train_batch_start(self, trainer: Trainer, policy: nn.Module, batch: Any, batch_idx: int) -> None:
        rank = trainer.distribution.rank
        if trainer.micro_batches != 3:
            return
        if rank == 1:
            raise KeyboardInterrupt if self.what == "interrupted" else RuntimeError("only on this rank")
        if rank == 2 and self.what == "stuck":
            wait_for(self.ended)


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.1)


def left(folder: str, what: str) -> str:
    RollCall.patience_s, ended = 0.3, Path(folder, "ended")
    trainer = Trainer(
        "cpu", max_steps=5, batch_size=2, seed=7, run_dir=f"{folder}/run", distributed=FSDP(timeout=1.0),
        callbacks=[Leaves(what, ended)],
    )  # fmt: skip
    try:
        trainer.fit(Policy(), Samples())
    except DistributedError as error:
        if trainer.distribution.rank == 0:
            ended.touch()
        return str(error)
    except BaseException:
        wait_for(ended)
    return ""


@pytest.mark.parametrize(("what", "ranks", "error"), [("interrupted", 2, "KeyboardInterrupt"), ("stuck", 3, "only on")])
def test_sharded_ranks_do_not_wait_long_for_one_that_does_not_come(
    tmp_path: Path, what: str, ranks: int, error: str
) -> None:
    first = run(left, str(tmp_path), what, ranks=ranks, limit_s=20.0)[0]
    assert first.startswith("Rank 1 failed: ")
    assert error in first
