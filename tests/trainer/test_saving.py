"""Saving in the background: the state of its own step, complete or reported, one at a time."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toys import MLP, InMemory, assert_equal, batches, mlp, weights

from policyfit import Callback, Checkpoint, CheckpointError, Trainer
from policyfit.trainer import state as state_module
from policyfit.trainer.checkpoint import CheckpointState, read_checkpoint, write_checkpoint
from policyfit.trainer.saving import Saver, Snapshots


def state_of(model: dict[str, Tensor], **parts: Any) -> CheckpointState:
    rest: dict[str, Any] = {
        "manifest": {"counters": {"step": 1}},
        "policy_config": {},
        "optimizers": [],
        "schedules": [],
    }
    return CheckpointState(**{**rest, "scaler": None, "rng": {}, "callbacks": {}, "model": model, **parts})


def test_snapshot_is_the_state_of_its_moment_and_reuses_its_memory() -> None:
    weight, count = torch.ones(3), Counter({4: 2})
    snapshots = Snapshots(pinned=False)
    schedule: dict[str, Any] = {"milestones": count, "lr": [0.1]}
    first = snapshots.take(state_of({"w": weight}, schedules=[schedule]))
    weight.mul_(5)
    schedule["lr"][0] = 7.0
    assert first.model["w"].tolist() == [1.0, 1.0, 1.0]
    assert first.schedules == [{"milestones": Counter({4: 2}), "lr": [0.1]}]
    assert isinstance(first.schedules[0]["milestones"], Counter)
    second = snapshots.take(state_of({"w": weight}))
    assert second.model["w"].data_ptr() == first.model["w"].data_ptr()
    assert second.model["w"].tolist() == [5.0, 5.0, 5.0]


def test_snapshot_keeps_ties_strides_and_types_and_takes_new_shapes() -> None:
    weight = torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    snapshots = Snapshots(pinned=False)
    taken = snapshots.take(state_of({"a": weight, "b": weight, "n": torch.tensor(3)})).model
    assert taken["a"] is taken["b"]
    assert taken["a"].stride() == weight.stride()
    assert torch.equal(taken["a"], weight)
    assert taken["n"].dtype == torch.int64
    assert snapshots.take(state_of({"a": torch.ones(5)})).model["a"].tolist() == [1.0] * 5


def test_error_of_the_thread_comes_out_once_where_it_is_asked_for() -> None:
    saver = Saver(pinned=False, synchronize=lambda: None)

    def write(state: CheckpointState) -> None:
        raise CheckpointError("the disk is full")

    saver.start(saver.snapshot(state_of({})), write)
    with pytest.raises(CheckpointError, match="the disk is full"):
        saver.wait()
    saver.wait()


class SlowDisk:
    """Holds every write back until it is released, and keeps how many were under way at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.release, self.running, self.most = threading.Event(), 0, 0
        self._write = write_checkpoint
        monkeypatch.setattr(state_module, "write_checkpoint", self.write)

    def write(self, folder: Path, state: CheckpointState) -> Path:
        self.running += 1
        self.most = max(self.most, self.running)
        self.release.wait(timeout=60)
        try:
            return self._write(folder, state)
        finally:
            self.running -= 1


class Weights(Callback):
    """The weights after each step, and the disk released at one of them."""

    def __init__(self, disk: SlowDisk, release_at: int) -> None:
        self.disk, self.release_at = disk, release_at
        self.after: dict[int, dict[str, Tensor]] = {}

    def due(self, step: int) -> bool:
        return True

    def on_due(self, trainer: Trainer, policy: nn.Module) -> None:
        self.after[trainer.step] = weights(policy)
        if trainer.step == self.release_at:
            self.disk.release.set()


def test_what_is_written_is_the_state_of_its_step_though_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SlowDisk(monkeypatch)
    seen = Weights(disk, release_at=5)
    trainer = Trainer(
        "cpu", max_steps=8, run_dir=tmp_path / "run", callbacks=[seen, Checkpoint(every_steps=3, keep=None)]
    )
    trainer.fit(mlp(), InMemory(batches(4)))
    assert [path.name for path in trainer.checkpoints()] == ["000003", "000006", "000008"]
    for path in trainer.checkpoints():
        assert_equal(
            dict(sorted(read_checkpoint(path).model.items())), dict(sorted(seen.after[int(path.name)].items()))
        )
    assert disk.most == 1
    assert (tmp_path / "run/checkpoints/last").resolve().name == "000008"
    assert not [t for t in threading.enumerate() if t.name == "policyfit-checkpoint"]


def test_training_in_the_background_is_bit_for_bit_training_in_the_foreground(tmp_path: Path) -> None:
    found = []
    for background in (True, False):
        policy = mlp(dropout=0.2)
        callback = Checkpoint(every_steps=2, background=background)
        Trainer("cpu", max_steps=9, seed=0, run_dir=tmp_path / str(background), callbacks=[callback]).fit(
            policy, InMemory(batches(4))
        )
        found.append(weights(policy))
    assert_equal(*found)


def test_failed_save_in_the_background_ends_the_run_at_the_next_step_and_leaves_the_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = write_checkpoint

    def full_at_four(folder: Path, state: CheckpointState) -> Path:
        if folder.name == "000004":
            raise CheckpointError("No space left on device.")
        return write(folder, state)

    monkeypatch.setattr(state_module, "write_checkpoint", full_at_four)
    trainer = Trainer("cpu", max_steps=10_000, run_dir=tmp_path / "run", callbacks=[Checkpoint(every_steps=2)])
    with pytest.raises(CheckpointError, match="No space left"):
        trainer.fit(mlp(), InMemory(batches(4)))
    assert trainer.step < 10_000
    assert trainer.status == "failed"
    assert [path.name for path in trainer.checkpoints()] == ["000002"]


def test_exception_in_training_waits_for_the_save_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Raises(MLP):
        calls = 0

        def forward(self, batch: Any) -> Tensor:
            self.calls += 1
            if self.calls == 4:
                disk.release.set()
                raise ValueError("a bad sample")
            return super().forward(batch)

    disk = SlowDisk(monkeypatch)
    trainer = Trainer("cpu", max_steps=9, run_dir=tmp_path / "run", callbacks=[Checkpoint(every_steps=2)])
    with pytest.raises(ValueError, match="a bad sample"):
        trainer.fit(Raises(), InMemory(batches(4)))
    assert [path.name for path in trainer.checkpoints()] == ["000002"]


def test_what_an_error_left_is_kept_though_the_save_under_way_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Raises(MLP):
        calls = 0

        def forward(self, batch: Any) -> Tensor:
            self.calls += 1
            if self.calls == 5:
                failing.set()
                raise ValueError("a bad sample")
            return super().forward(batch)

    failing, write = threading.Event(), write_checkpoint

    def full_at_four(folder: Path, state: CheckpointState) -> Path:
        if folder.name == "000004":
            failing.wait(timeout=60)
            raise CheckpointError("No space left on device.")
        return write(folder, state)

    monkeypatch.setattr(state_module, "write_checkpoint", full_at_four)
    callback = Checkpoint(every_steps=2, save_on_exception=True)
    trainer = Trainer("cpu", max_steps=9, run_dir=tmp_path / "run", callbacks=[callback])
    with pytest.raises(ValueError, match="a bad sample"):
        trainer.fit(Raises(), InMemory(batches(4)))
    assert {path.name for path in (tmp_path / "run/checkpoints").iterdir()} == {"000002", "000004-exception", "last"}
    assert "the save before failed too: No space left on device." in (tmp_path / "run/metrics.jsonl").read_text()


class Rolls(Callback):
    """A rollout at some steps, of which only the metric is made."""

    def __init__(self, rates: dict[int, float]) -> None:
        self.rates = rates

    def due(self, step: int) -> bool:
        return step in self.rates

    def on_due(self, trainer: Trainer, policy: nn.Module) -> None:
        trainer.emit({"step": trainer.step, "epoch": 0, "rollout/success_rate": self.rates[trainer.step]})
        trainer.callbacks.call("on_rollout_end", trainer, policy, None)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("every", [3, 7])
def test_best_rollout_is_saved_wherever_the_callback_stands(tmp_path: Path, first: bool, every: int) -> None:
    saving = Checkpoint(every_steps=every, keep=1, monitor="rollout/success_rate", mode="max")
    rolls = Rolls({3: 0.2, 6: 0.9, 9: 0.5})
    trainer = Trainer(
        "cpu", max_steps=16, run_dir=tmp_path / "run", callbacks=[saving, rolls] if first else [rolls, saving]
    )
    trainer.fit(mlp(), InMemory(batches(4)))
    assert [path.name for path in trainer.checkpoints()] == ["000006", "000016"]
    best = read_checkpoint(tmp_path / "run/checkpoints/000006").callbacks["states"]["Checkpoint"]
    assert (best["value"], best["path"]) == (0.9, "000006")


def test_retention_deletes_only_when_the_newer_one_is_complete(tmp_path: Path) -> None:
    there: list[list[str]] = []

    class Looks(Callback):
        def on_update_end(self, trainer: Trainer, *_: Any) -> None:
            there.append([path.name for path in trainer.checkpoints()])

    trainer = Trainer(
        "cpu", max_steps=12, run_dir=tmp_path / "run", callbacks=[Looks(), Checkpoint(every_steps=2, keep=1)]
    )
    trainer.fit(mlp(), InMemory(batches(4)))
    assert all(there[4:])  # from the first complete one on there is always one
    assert [path.name for path in trainer.checkpoints()] == ["000012"]


class Keeps(Callback):
    """The value of the validation of each step."""

    def __init__(self) -> None:
        self.by_step: dict[int, float] = {}

    def on_log(self, trainer: Trainer, policy: nn.Module, record: Any) -> None:
        if "val/loss" in record:
            self.by_step[record["step"]] = record["val/loss"]


@pytest.mark.parametrize("first", [True, False])
def test_metric_in_a_checkpoint_is_that_of_the_validation_of_its_step(tmp_path: Path, first: bool) -> None:
    saving, keeps = Checkpoint(every_steps=2, keep=None, monitor="val/loss", mode="max"), Keeps()
    trainer = Trainer(
        "cpu",
        max_steps=6,
        val_every=2,
        run_dir=tmp_path / "run",
        callbacks=[saving, keeps] if first else [keeps, saving],
    )
    trainer.fit(mlp(), InMemory(batches(4)), InMemory(batches(2, seed=5)))
    found = {int(path.name): read_checkpoint(path).callbacks for path in trainer.checkpoints()}
    assert list(found) == [2, 4, 6]
    assert {step: callbacks["metrics"]["val/loss"] for step, callbacks in found.items()} == keeps.by_step
    assert len(set(keeps.by_step.values())) == 3
    best = found[6]["states"]["Checkpoint"]
    assert (best["step"], best["value"]) == (2, keeps.by_step[2])  # the loss falls, so no later one is a new best
    assert (tmp_path / "run/checkpoints/last").resolve().name == "000006"
