"""Runs of several processes in one of which an optimizer or a schedule fails in its step."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from failing import Fails, Tears, Thaws
from processes import run
from ranks import LightningPolicy, Policy, Samples, same
from torch import Tensor
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import ExponentialLR

from policyfit import EMA, Checkpoint, Trainer
from policyfit.trainer.checkpoint import read_checkpoint


class Stumbles(ExponentialLR):
    """Fails at its fourth step on rank 0, if the environment says so."""

    def get_lr(self) -> list[float | Tensor]:
        if self.last_epoch == 4 and (os.environ["RANK"], os.environ.get("STUMBLES")) == ("0", "yes"):
            raise RuntimeError("only on this rank")
        return super().get_lr()


def stumbled(folder: str, distributed: str, where: str) -> str:
    fails = [Fails(0, "on_update_end", 5)] if where == "hook" else []
    os.environ["STUMBLES"] = "yes" if where == "schedule" else "no"
    trainer = Trainer(
        "cpu", max_steps=9, batch_size=4, seed=7, run_dir=f"{folder}/{where}", distributed=distributed,
        callbacks=[*fails, EMA(0.9), Checkpoint(every_steps=4 if where == "straight" else 3)],
    )  # fmt: skip
    try:
        trainer.fit(
            Policy(), Samples(), optimizer=lambda p: SGD(p, lr=1e-2, momentum=0.9),
            schedule=lambda o: Stumbles(o, 0.9),
        )  # fmt: skip
    except Exception as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("distributed", "where"), [("ddp", "schedule"), ("ddp", "hook"), ("fsdp", "hook")])
def test_update_that_one_rank_did_not_settle_is_saved_whole(tmp_path: Path, distributed: str, where: str) -> None:
    own, others = run(stumbled, str(tmp_path), distributed, where, limit_s=40.0)
    assert own == "only on this rank"
    assert "Rank 0 failed, so all ended after update" in others
    run(stumbled, str(tmp_path), distributed, "straight", limit_s=40.0)
    saved = read_checkpoint(tmp_path / where / "checkpoints" / "last")
    straight = read_checkpoint(tmp_path / "straight" / "checkpoints" / "000004")
    assert saved.manifest["counters"]["step"] == 4
    same(saved.model, straight.model)
    same(saved.models["ema"], straight.models["ema"])
    assert saved.schedules[0]["last_epoch"] == straight.schedules[0]["last_epoch"] == 4


def stumbled_at_an_end(folder: str, fails: bool) -> str:
    os.environ["STUMBLES"] = "yes" if fails else "no"
    trainer = Trainer(
        "cpu", max_epochs=6, batch_size=22, seed=7, run_dir=folder, distributed="ddp",
        callbacks=[Checkpoint(every_steps=50)],
    )  # fmt: skip
    try:
        trainer.fit(ByEpoch(), Samples(), resume="auto")
    except Exception as error:
        return str(error)
    return ""


class ByEpoch(LightningPolicy):
    """Its learning rate falls at the end of each epoch."""

    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=1e-2)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": Stumbles(optimizer, 0.9), "interval": "epoch"}}


def test_epoch_whose_schedule_failed_on_one_rank_is_gone_on_with_as_the_others_ended_it(tmp_path: Path) -> None:
    own, others = run(stumbled_at_an_end, str(tmp_path / "broken"), True, limit_s=40.0)
    assert own == "only on this rank"
    assert "Rank 0 failed" in others
    for folder in ("broken", "straight"):
        assert run(stumbled_at_an_end, str(tmp_path / folder), False, limit_s=40.0) == ["", ""]
    mended, straight = (read_checkpoint(tmp_path / name / "checkpoints" / "last") for name in ("broken", "straight"))
    assert mended.schedules[0]["last_epoch"] == straight.schedules[0]["last_epoch"] == 6
    same(mended.model, straight.model)


def test_sharded_update_whose_schedule_failed_is_kept_as_an_exception(tmp_path: Path) -> None:
    own, others = run(stumbled, str(tmp_path), "fsdp", "schedule", limit_s=40.0)
    assert own == "only on this rank"
    assert "so that no process has all of it" in others
    checkpoints = tmp_path / "schedule" / "checkpoints"
    assert read_checkpoint(checkpoints / "last").manifest["counters"]["step"] == 3
    run(stumbled, str(tmp_path), "fsdp", "straight", limit_s=40.0)
    straight = read_checkpoint(tmp_path / "straight" / "checkpoints" / "000004")
    same(read_checkpoint(checkpoints / "000004-exception").model, straight.model)


def torn(folder: str, distributed: str, rank: int | None, every: int, factor: float = math.nan) -> str:
    trainer = Trainer(
        "cpu", max_steps=8, batch_size=4, seed=7, run_dir=f"{folder}/run", distributed=distributed,
        callbacks=[Checkpoint(every_steps=every), EMA(0.9)],
    )  # fmt: skip
    try:
        trainer.fit(Policy(), Samples(), optimizer=lambda p: Tears(p, rank, factor))
    except BaseException as error:
        return "\n".join([str(error), *getattr(error, "__notes__", [])])
    return ""


@pytest.mark.parametrize("rank", [0, 1])
def test_update_that_one_rank_broke_off_is_saved_as_the_others_made_it(tmp_path: Path, rank: int) -> None:
    ends = run(torn, str(tmp_path / "torn"), "ddp", rank, 3, limit_s=40.0)
    came_of_it = (
        f"This was rank {rank}; all ended after update 4.\nWhat was saved can be gone on with once that is mended"
    )
    assert ends[rank] == f"in the middle of a step\n{came_of_it}: --resume=auto."
    kind = ("BaseException", "RuntimeError")[rank]
    assert f"Rank {rank} failed, so all ended after update 4: {kind}: in the mid" in ends[1 - rank]
    run(torn, str(tmp_path / "straight"), "ddp", 2, 4, limit_s=40.0)
    saved, straight = (
        read_checkpoint(tmp_path / name / "run" / "checkpoints" / "000004") for name in ("torn", "straight")
    )
    assert saved.manifest["counters"]["step"] == 4
    same(saved.model, straight.model)
    same(saved.models["ema"], straight.models["ema"])
    for index, entry in straight.optimizers[0]["state"].items():
        same(saved.optimizers[0]["state"][index], entry)


@pytest.mark.parametrize(("distributed", "rank"), [("fsdp", 0), ("fsdp", 1), ("ddp", None)])
def test_update_that_is_whole_on_no_rank_is_kept_as_an_exception_without_being_asked_for(
    tmp_path: Path, distributed: str, rank: int | None
) -> None:
    ends = run(torn, str(tmp_path / "torn"), distributed, rank, 3, 2.0, limit_s=40.0)
    for number in range(2) if rank is None else (rank,):
        assert ends[number].startswith(f"in the middle of a step\nThis was rank {number}; all ended after update 4.\n")
    if rank is not None:
        assert f"Rank {rank} failed, so all ended after update 4: " in ends[1 - rank]
        assert "The last checkpoint can be gone on with once that is mended: --resume=auto." in ends[1 - rank]
    checkpoints = tmp_path / "torn" / "run" / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["000003", "000004-exception", "last"]
    assert read_checkpoint(checkpoints / "last").manifest["counters"]["step"] == 3
    kept = read_checkpoint(checkpoints / "000004-exception")
    assert (kept.manifest["counters"]["step"], kept.manifest["exact"]) == (4, False)
    if rank is not None:
        run(torn, str(tmp_path / "straight"), distributed, 2, 4, limit_s=40.0)
        straight = read_checkpoint(tmp_path / "straight" / "run" / "checkpoints" / "000004")
        for name, weight in straight.model.items():
            assert torch.equal(kept.model[name].chunk(2)[1 - rank], weight.chunk(2)[1 - rank])
            assert not torch.equal(kept.model[name].chunk(2)[rank], weight.chunk(2)[rank])


def torn_for_good(folder: str) -> str:
    """On rank 1 the optimizer fails in its step, and then cannot say its state."""

    class Broken(Tears):
        def state_dict(self) -> Any:
            if self.left == 0:
                raise RuntimeError("its state is lost")
            return super().state_dict()

    trainer = Trainer("cpu", max_steps=8, batch_size=4, seed=7, run_dir=f"{folder}/run", distributed="fsdp")
    try:
        trainer.fit(Policy(), Samples(), optimizer=lambda p: Broken(p, 1, 2.0))
    except Exception as error:
        return "\n".join([str(error), *getattr(error, "__notes__", [])])
    return ""


def test_broken_update_that_cannot_be_kept_ends_all_with_the_reason(tmp_path: Path) -> None:
    others, own = run(torn_for_good, str(tmp_path), limit_s=40.0)
    assert own.splitlines()[0] == "in the middle of a step"
    assert "RuntimeError: its state is lost" in own
    assert "RankFailed: Rank 1 failed: RuntimeError: its state is lost" in others


def torn_at_once(folder: str) -> str:
    """Rank 1's optimizer fails in the first update that moves what thaws with the second epoch."""

    class Fails(AdamW):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            if os.environ["RANK"] == "1" and len(self.state) == 6 and trainer.epoch == 1:
                raise RuntimeError("only on this rank")
            super().step()

    trainer = Trainer(
        "cpu", max_steps=30, batch_size=4, seed=7, run_dir=f"{folder}/run", distributed="fsdp",
        callbacks=[Thaws(), Checkpoint(every_steps=4)],
    )  # fmt: skip
    try:
        trainer.fit(Policy(), Samples(), optimizer=lambda p: Fails(p))
    except Exception as error:
        return "\n".join([str(error), *getattr(error, "__notes__", [])])
    return ""


def test_broken_update_in_which_states_were_first_made_is_kept_without_them(tmp_path: Path) -> None:
    assert run(torn_at_once, str(tmp_path), limit_s=40.0)[1].startswith("only on this rank\n")
    checkpoints = tmp_path / "run" / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["000004", "000007-exception", "last"]
    kept = read_checkpoint(checkpoints / "000007-exception")
    assert sorted(kept.optimizers[0]["state"]) == [*range(2, 8)]  # not those of the first layer


@pytest.mark.parametrize("distributed", ["ddp", "fsdp"])
def test_broken_update_that_is_not_finite_is_kept_by_nobody(tmp_path: Path, distributed: str) -> None:
    ends = run(torn, str(tmp_path), distributed, 1 if distributed == "fsdp" else None, 3, limit_s=40.0)
    assert all("these are inf or NaN and are not saved" in text for text in ends)
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == ["000003", "last"]
