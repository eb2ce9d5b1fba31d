"""Ranks that fail where a policy or a callback talks to the others by itself, of which nobody can take their part."""

from __future__ import annotations

import math
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from failing import Tears
from processes import run
from ranks import Policy, Samples, same
from torch import Tensor, nn
from torch.distributed import all_reduce, init_process_group
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from policyfit import FSDP, Callback, Checkpoint, DistributedError, Trainer
from policyfit.strategies.roll_call import RollCall
from policyfit.trainer.checkpoint import read_checkpoint


class Own(nn.Module):
    """A mean of all ranks, taken off by code that is the policy's own."""

    def forward(self, x: Tensor) -> Tensor:
        mean = x.detach().mean(dim=0)
        all_reduce(mean)
        return x - mean / 2


class Synced(Own, nn.SyncBatchNorm):
    """The same by torch's layer, which is not for a CPU."""


class Backward(torch.autograd.Function):
    """A sum of gradients that nothing in the forward tells of."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        all_reduce(gradient)
        return gradient / 2


class Back(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Backward.apply(x)  # type: ignore[no-any-return, no-untyped-call]


class Unwaited(nn.Module):
    """Both ranks fail in the eighth forward, one of them before a collective and one behind it."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        fails, mean = self.calls == 8, x.detach().mean(dim=0)
        if fails and os.environ["RANK"] == "1":
            raise RuntimeError("before its collective")
        work: Any = all_reduce(mean, async_op=True)
        if fails:
            raise RuntimeError("behind its collective")
        work.wait()
        return x - mean / 2


class Sums(Callback):
    """Talks in the middle of a window."""

    def on_train_batch_start(self, trainer: Trainer, policy: nn.Module, batch: Any, batch_idx: int) -> None:
        all_reduce(torch.ones(1))


WHO: dict[str, type[nn.Module]] = {"forward": Own, "backward": Back, "unwaited": Unwaited, "callback": nn.Identity}


class Talks(Policy):
    """Its forward talks to the other ranks, and fails on some in its middle, of which the others cannot know."""

    def __init__(self, fails_at: int, failing: tuple[int, ...], factor: float, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.add_module("norm", norm or Synced(12, affine=False))
        self.left, self.factor = fails_at if int(os.environ["RANK"]) in failing else -1, factor
        self.first.register_forward_hook(self._fail)

    @torch.no_grad()
    def _fail(self, *_: Any) -> None:
        self.left -= 1
        if self.left == -1:
            self.last.bias.mul_(self.factor)
            raise RuntimeError("only on this rank")


SETTINGS: dict[str, Any] = {"fails_at": 7, "failing": (1,), "factor": 1.0, "tears": None, "who": "synced"}


def talked(folder: str, settings: dict[str, Any], distributed: str = "ddp", resume: str | None = None) -> list[str]:
    chosen = SETTINGS | settings
    if chosen["failing"] != (0, 1):  # where all fail they are waited for
        RollCall.patience_s = 0.3
    # Torch's wrapper refuses the layer on a CPU.
    DistributedDataParallel._passing_sync_batchnorm_handle = lambda *_: None  # type: ignore[method-assign]
    if "backend" in chosen:
        init_process_group(chosen["backend"])
    trainer = Trainer(
        "cpu", max_steps=5, batch_size=2, accumulate=2, seed=7, run_dir=f"{folder}/run",
        distributed=FSDP(timeout=2.0) if distributed == "fsdp" else distributed,
        callbacks=[
            Checkpoint(every_steps=2 if chosen["tears"] is None else 3),
            *([Sums()] if chosen["who"] == "callback" else []),
        ],
    )  # fmt: skip
    tears: Any = partial(Tears, rank=chosen["tears"], factor=2.0)
    norm = WHO[chosen["who"]]() if chosen["who"] in WHO else None
    policy = Talks(chosen["fails_at"], chosen["failing"], chosen["factor"], norm)
    try:
        trainer.fit(policy, Samples(), resume=resume, optimizer=AdamW if chosen["tears"] is None else tears)
    except Exception as error:
        return [f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])]
    return [trainer.plan.text()]


@pytest.mark.parametrize(
    "talk",
    [{}, {"who": "forward"}, {"who": "backward"}, {"who": "callback"}, {"who": "forward", "backend": "cpu:gloo"}],
)
def test_rank_that_fails_where_others_talk_ends_all_and_keeps_what_it_has(tmp_path: Path, talk: dict[str, Any]) -> None:
    others, own = run(talked, str(tmp_path), talk, limit_s=20.0)
    assert others[0].startswith("RanksLost: Rank 1 failed: RuntimeError: only on this rank\nMend that, and start all")
    assert own[0] == "RuntimeError: only on this rank"
    assert "The policy or a callback talks to the other ranks by itself, by a SyncBatchNorm or a collective" in own[1]
    checkpoints = tmp_path / "run" / "checkpoints"
    assert read_checkpoint(checkpoints / "last").manifest["counters"]["step"] == 2
    kept = checkpoints / "000003-exception"
    healthy = {**talk, "fails_at": -1}
    mended, _ = run(talked, str(tmp_path / "mended"), healthy, "ddp", str(kept), limit_s=20.0)
    assert "the random streams of the rank that saved it alone, for rank 0" in mended[0]
    assert "the random streams of the other ranks, so it is not bit for bit" in mended[0]
    run(talked, str(tmp_path / "straight"), healthy, limit_s=20.0)
    ends = [read_checkpoint(tmp_path / name / "run" / "checkpoints" / "last") for name in ("mended", "straight")]
    same(*(end.model for end in ends))  # this policy draws nothing, and no sample was left out


@pytest.mark.parametrize("who", ["forward", "backward"])
def test_sharded_ranks_lose_one_that_fails_where_they_talk_and_save_with_it(tmp_path: Path, who: str) -> None:
    others, own = run(talked, str(tmp_path / "failed"), {"who": who}, "fsdp", limit_s=30.0)
    told = "all ended after update 3{}\nWhat was saved can be gone on with once that is mended: --resume=auto."
    assert others == ["RankFailed: Rank 1 failed, so " + told.format(": RuntimeError: only on this rank")]
    assert own == ["RuntimeError: only on this rank", "This was rank 1; " + told.format(".")]
    last = tmp_path / "failed" / "run" / "checkpoints" / "last"
    assert read_checkpoint(last).manifest["counters"]["step"] == 3
    healthy = {"who": who, "fails_at": -1}
    run(talked, str(tmp_path / "failed"), healthy, "fsdp", "auto", limit_s=30.0)
    run(talked, str(tmp_path / "straight"), healthy, "fsdp", limit_s=30.0)
    straight = tmp_path / "straight" / "run" / "checkpoints" / "last"
    ended, expected = read_checkpoint(last), read_checkpoint(straight)
    same(ended.model, expected.model)  # this policy draws nothing, and no sample was left out
    assert ended.manifest["counters"] == expected.manifest["counters"]


class Interrupts(Callback):
    """On rank 1, which lives on after it, as in a notebook."""

    def on_train_batch_start(self, trainer: Trainer, policy: nn.Module, batch: Any, batch_idx: int) -> None:
        if trainer.distribution.rank == 1 and trainer.micro_batches == 3:
            raise KeyboardInterrupt


def interrupted(folder: str) -> None:
    RollCall.patience_s, ended = 0.3, Path(folder, "ended")
    trainer = Trainer(
        "cpu", max_steps=5, batch_size=2, seed=7, run_dir=f"{folder}/run", distributed=FSDP(timeout=2.5),
        callbacks=[Interrupts()],
    )  # fmt: skip
    try:
        trainer.fit(Policy(), Samples())
    except KeyboardInterrupt:
        while not ended.exists():
            time.sleep(0.1)
    except DistributedError:
        ended.touch()


def test_sharded_ranks_do_not_wait_for_one_that_was_interrupted_to_come(tmp_path: Path) -> None:
    run(interrupted, str(tmp_path), limit_s=20.0)
    assert (tmp_path / "ended").exists()


def test_of_several_ranks_that_fail_in_a_forward_that_talks_one_keeps_what_all_have(tmp_path: Path) -> None:
    ends = run(talked, str(tmp_path), {"failing": (1, 2)}, ranks=3, limit_s=20.0)
    assert ends[0][0].startswith("RanksLost: Rank ")
    assert [len(end) for end in ends] == [1, 2, 2]  # with no note but that they could not be stood in for
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == ["000002", "000003-exception", "last"]


def test_rank_alone_whose_weights_are_not_finite_keeps_nothing_and_waits_for_nobody(tmp_path: Path) -> None:
    own = run(talked, str(tmp_path), {"factor": math.nan}, limit_s=15.0)[1]
    assert own[0] == "RuntimeError: only on this rank"
    assert "TrainingDiverged: At step 3 these are inf or NaN and are not saved: last.bias." in own[2]


def test_rank_alone_that_broke_off_an_update_keeps_what_there_is(tmp_path: Path) -> None:
    own = run(talked, str(tmp_path), {"fails_at": -1, "tears": 1}, limit_s=15.0)[1]
    assert own[0] == "RuntimeError: in the middle of a step"
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == ["000003", "000004-exception", "last"]


def test_ranks_that_all_fail_in_a_forward_that_talks_end_in_order(tmp_path: Path) -> None:
    ends = run(talked, str(tmp_path), {"failing": (0, 1)}, limit_s=20.0)
    assert [own[0] for own in ends] == ["RuntimeError: only on this rank"] * 2
    assert read_checkpoint(tmp_path / "run" / "checkpoints" / "last").manifest["counters"]["step"] == 3


def test_ranks_that_all_fail_one_of_them_behind_a_collective_end_with_their_own_errors(tmp_path: Path) -> None:
    own = {"fails_at": -1, "failing": (0, 1), "who": "unwaited"}
    ends = run(talked, str(tmp_path), own, limit_s=20.0)
    assert [end[0] for end in ends] == [f"RuntimeError: {where} its collective" for where in ("behind", "before")]
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == ["000002", "000003-exception", "last"]
