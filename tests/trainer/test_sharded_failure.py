"""Sharded runs of which one process fails: it makes the others' gathers and reductions, or what they tell of them."""

from __future__ import annotations

import os
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from failing import Breaks, Fails, Skips, Thaws, Twice, Unready
from processes import run
from ranks import Policy, Samples, job, same, train, weights
from torch import Tensor

from policyfit import Callback, Checkpoint, Trainer
from policyfit.strategies.fsdp import FSDP
from policyfit.trainer.checkpoint import read_checkpoint
from policyfit.trainer.saving import Saver


def at_once(folder: str, same_words: bool) -> str:
    """Each rank fails in its first window, one in the forward, one in the backward or the same."""
    rank = int(os.environ["RANK"])
    trainer = Trainer("cpu", max_steps=30, batch_size=2, accumulate=2, run_dir=folder, distributed="fsdp")
    try:
        trainer.fit(Breaks("between" if same_words or rank == 0 else "back", rank, 0, 6), Samples())
    except Exception as error:
        return str(error)
    return ""


@pytest.mark.parametrize("same_words", [True, False])
def test_sharded_ranks_that_all_fail_in_the_first_window_end_in_order_each_by_its_own_error(
    tmp_path: Path, same_words: bool
) -> None:
    where = ["between", "between" if same_words else "back"]
    ends = run(at_once, str(tmp_path / "run"), same_words, limit_s=40.0)
    assert ends == [f"{place} the blocks of this rank" for place in where]
    assert read_checkpoint(tmp_path / "run" / "checkpoints" / "last").manifest["counters"]["step"] == 0


def resumed_first(folder: str) -> list[str]:
    texts = []
    for steps, fails in ((3, []), (30, [Fails(1, "on_before_backward", 3)]), (6, [])):
        try:
            train(f"{folder}/run", "fsdp", steps=steps, extra=fails, resume="auto")
            texts.append("")
        except Exception as error:
            texts.append(str(error))
            assert read_checkpoint(Path(folder, "run/checkpoints/last")).manifest["exact"]  # still that of before
    return texts


def test_failure_in_the_first_window_after_a_resume_leaves_a_run_that_can_be_gone_on_with(tmp_path: Path) -> None:
    others, own = run(resumed_first, str(tmp_path), limit_s=60.0)
    assert own == ["", "only on this rank", ""]
    assert "Rank 1 failed, so all ended after update 3:" in others[1]
    straight = run(job, str(tmp_path / "straight"), "fsdp", {"steps": 6})
    same(read_checkpoint(tmp_path / "run" / "checkpoints" / "last").model, weights(straight[0]))


def twice(folder: str, forward: int) -> str:
    trainer = Trainer(
        "cpu", max_steps=30, batch_size=2, accumulate=2, seed=0, run_dir=f"{folder}/run", distributed="fsdp"
    )
    try:
        trainer.fit(Twice(forward), Samples())
    except Exception as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("forward", "update"), [(10, 5), (12, 6), (21, 11)])  # in a window of one or after it
def test_sharded_windows_of_one_are_told_from_longer_ones(tmp_path: Path, forward: int, update: int) -> None:
    others, own = run(twice, str(tmp_path), forward, limit_s=40.0)
    assert own == "only on this rank"
    assert f"Rank 1 failed, so all ended after update {update}: RuntimeError: only on this rank" in others


def thawed(folder: str) -> str:
    try:
        train(f"{folder}/run", "fsdp", steps=30, extra=[Thaws(), Fails(1, "on_train_batch_start", 6)])
    except Exception as error:
        return str(error)
    return ""


def test_failure_right_after_a_thaw_ends_all_after_the_same_update_saved(tmp_path: Path) -> None:
    others, own = run(thawed, str(tmp_path), limit_s=40.0)
    assert own == "only on this rank"
    assert "Rank 1 failed, so all ended after update 6: RuntimeError: only on this rank" in others
    assert read_checkpoint(tmp_path / "run" / "checkpoints" / "last").manifest["counters"]["step"] == 6


class Flips(Callback):
    """Thaws or freezes the first layer for the fourth window, a hook which fails on rank 1 before that."""

    def __init__(self, thaws: bool) -> None:
        self.thaws = thaws

    def on_fit_start(self, trainer: Trainer, policy: Any) -> None:
        policy.first.requires_grad_(not self.thaws)

    def on_train_batch_start(self, trainer: Trainer, policy: Any, batch: Any, batch_idx: int) -> None:
        if trainer.micro_batches == 3:
            if trainer.distribution.rank == 1:
                raise RuntimeError("only on this rank")
            policy.first.requires_grad_(self.thaws)


def flipped(folder: str, thaws: bool) -> str:
    try:
        train(f"{folder}/run", "fsdp", steps=30, extra=[Flips(thaws)])
    except Exception as error:
        return str(error)
    return ""


@pytest.mark.parametrize("thaws", [True, False])
def test_failure_of_what_thaws_or_freezes_ends_all_in_order(tmp_path: Path, thaws: bool) -> None:
    others, own = run(flipped, str(tmp_path), thaws, limit_s=40.0)
    assert own == "only on this rank"
    assert "Rank 1 failed, so all ended after update 3: RuntimeError: only on this rank" in others
    assert read_checkpoint(tmp_path / "run" / "checkpoints" / "last").manifest["counters"]["step"] == 3


def by_turns(folder: str, begins: int, draw: int) -> str:
    try:
        fails = [Fails(1, "on_before_backward", draw), Checkpoint(every_steps=50)]
        Trainer(
            "cpu", max_steps=30, batch_size=4, run_dir=folder, distributed="fsdp", callbacks=fails
        ).fit(Skips(begins), Samples())  # fmt: skip
    except Exception as error:
        return str(error)
    return ""


# With windows that differ from the first on, and once three have been alike: in them, and right before.
@pytest.mark.parametrize(("begins", "draw"), [(0, 0), (0, 1), (3, 2), (3, 3)])
def test_units_that_run_in_some_windows_only_are_told(tmp_path: Path, begins: int, draw: int) -> None:
    others, own = run(by_turns, str(tmp_path / "run"), begins, draw, limit_s=40.0)
    assert own == "only on this rank"
    assert f"Rank 1 failed, so all ended after update {draw}: RuntimeError: only on this rank" in others
    saved = read_checkpoint(tmp_path / "run" / "checkpoints" / "last")
    assert saved.manifest["counters"]["step"] == draw


def left_out_first(folder: str) -> int:
    trainer = Trainer("cpu", max_steps=3, batch_size=2, accumulate=2, run_dir=folder, distributed="fsdp")
    policy = Skips()
    policy.calls = 1  # begins with a forward without its second block
    trainer.fit(policy, Samples())
    return trainer.step


def test_sharded_unit_that_the_first_micro_batch_leaves_out_is_trained(tmp_path: Path) -> None:
    assert run(left_out_first, str(tmp_path / "run"), limit_s=40.0) == [3, 3]


def unready(folder: str, method: str) -> str:
    trainer = Trainer(
        "cpu", max_steps=30, batch_size=4, seed=7, val_every=3, run_dir=f"{folder}/run",
        distributed=FSDP(checkpoint="whole"), callbacks=[Checkpoint(every_steps=3)],
    )  # fmt: skip
    try:
        trainer.fit(Unready(method), Samples(), Samples())
    except Exception as error:
        return str(error)
    return ""


@pytest.mark.parametrize("method", ["forward", "forward later", "state_dict"])
def test_sharded_policy_that_fails_where_ranks_meet_is_saved(tmp_path: Path, method: str) -> None:
    others, own = run(unready, str(tmp_path), method, limit_s=40.0)
    assert own == "only on this rank"
    assert "Rank 1 failed, so all ended after update 3: RuntimeError: only on this rank" in others
    assert read_checkpoint(tmp_path / "run" / "checkpoints" / "last").manifest["counters"]["step"] == 3


def exhausted(folder: str) -> tuple[bool, str]:
    class Exhausted(Policy):
        held: weakref.ref[Tensor] | None = None

        def forward(self, batch: dict[str, Tensor]) -> Any:
            held = self.first(batch["x"])
            if os.environ["RANK"] == "1" and (batch["index"] == 20).any():
                self.held = weakref.ref(held)
                raise torch.OutOfMemoryError("no room on the device")
            return super().forward(batch)

    policy = Exhausted()
    try:
        Trainer("cpu", max_steps=9, batch_size=4, seed=7, run_dir=folder, distributed="fsdp").fit(policy, Samples())
    except Exception as error:
        return policy.held is not None and policy.held() is None, str(error)
    return False, ""


def test_rank_that_ran_out_of_memory_lets_go_of_what_it_computed_before_it_takes_part(tmp_path: Path) -> None:
    (_, others), (is_free, own) = run(exhausted, str(tmp_path / "run"), limit_s=40.0)
    assert own == "no room on the device"
    assert "Rank 1 failed, so all ended after update" in others
    assert is_free


class Probes(Callback):
    """Runs the policy where ranks meet, without a backward."""

    def due(self, step: int) -> bool:
        return step in (3, 4)  # after the second comes a checkpoint

    def on_due(self, trainer: Trainer, policy: Any) -> None:
        with torch.no_grad():
            policy({"x": torch.ones(2, 6), "y": torch.ones(2, 3), "factor": torch.ones(2)})


def probed(folder: str, draw: int) -> str:
    try:
        train(f"{folder}/run", "fsdp", steps=30, extra=[Probes(), Fails(1, "on_before_backward", draw)])
    except Exception as error:
        return str(error)
    return ""


@pytest.mark.parametrize("draw", [3, 4])
def test_forward_of_a_callback_changes_neither_the_save_after_it_nor_what_ranks_say_then(
    tmp_path: Path, draw: int
) -> None:
    others, own = run(probed, str(tmp_path), draw, limit_s=60.0)
    assert own == "only on this rank"
    assert f"Rank 1 failed, so all ended after update {draw}: RuntimeError: only on this rank" in others


class Forgets(Callback):
    """On rank 1 the optimizer loses what it has kept, before step 3 is saved."""

    def on_before_optimizer_step(self, trainer: Trainer, policy: Any, optimizer: Any) -> None:
        self.optimizer = optimizer

    def due(self, step: int) -> bool:
        return step == 3

    def on_due(self, trainer: Trainer, policy: Any) -> None:
        if trainer.distribution.rank == 1:
            self.optimizer.state.clear()


def unfit(folder: str, late: bool) -> str:
    run_save = Saver._run

    def late_run(saver: Saver, write: Any, state: Any) -> None:
        def write_late(state: Any) -> None:
            try:
                write(state)
            finally:
                time.sleep(1.0)

        run_save(saver, write_late, state)

    if late and os.environ["RANK"] == "0":
        Saver._run = late_run  # type: ignore[assignment,method-assign]
    try:
        train(f"{folder}/run", "fsdp", steps=9, extra=[Forgets()], every=3)
    except Exception as error:
        return str(error)
    return ""


@pytest.mark.parametrize("late", [False, True])  # whether rank 0 finds its save failed after another has told of that
def test_shards_that_do_not_fit_together_make_no_checkpoint(tmp_path: Path, late: bool) -> None:
    texts = run(unfit, str(tmp_path), late, limit_s=40.0)
    assert all("000003 is not written, since what the ranks hold does not fit together: " in text for text in texts)
    assert all("the last rows of state/0/exp_avg are missing" in text for text in texts)
    saved = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert saved == ["000004", "last"]  # by when a step had made the state anew
