"""Random streams, memory, errors and checkpoints of the device."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from rig import OPTIMIZERS, Batch, InMemory, Rig, Wide, assert_equal, moments, warmup, weights, wide
from torch import Tensor, nn

from policyfit import Callback, Trainer, load


def test_random_stream_of_the_device_comes_back(rig: Rig) -> None:
    state = rig.strategy.rng_state()
    if state is None:
        state = torch.get_rng_state()
    first = torch.rand(8, device=rig.device)
    if rig.kind == "cpu":
        torch.set_rng_state(state)
    else:
        rig.strategy.set_rng_state(state)
    assert torch.equal(torch.rand(8, device=rig.device), first)
    assert not torch.equal(torch.rand(8, device=rig.device), first)


class Saving(Callback):
    def due(self, step: int) -> bool:
        return step == 5

    def on_due(self, trainer: Trainer, policy: nn.Module) -> None:
        trainer.save_checkpoint()


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
@pytest.mark.parametrize("name", ["AdamW fused", "AdamW unfused"])
def test_resumed_run_equals_the_whole_one_with_dropout_on_the_device(
    rig: Rig, name: str, precision: str, tmp_path: Path
) -> None:
    def run(folder: str, resume: Path | None = None) -> tuple[Wide, Trainer]:
        policy, settings = wide(dropout=0.3), dict[str, Any](run_dir=tmp_path / folder, callbacks=[Saving()])
        trainer = rig.trainer(rig.precision(precision), max_steps=12, seed=0, clip_norm=1.0, **settings)
        data = InMemory(rig.batches(7, poisoned=(2, 6)))
        trainer.fit(policy, data, optimizer=rig.optimizer(name), schedule=warmup, resume=resume)
        return policy, trainer

    whole, trainer = run("whole")
    torch.rand(5, device=rig.device)  # the stream has moved on when the run is resumed
    again, resumed = run("again", tmp_path / "whole/checkpoints/000005")
    assert (resumed.step, resumed.skipped) == (trainer.step, trainer.skipped)
    assert_equal(weights(again), weights(whole))
    assert_equal(moments(resumed.optimizers[0]), moments(trainer.optimizers[0]))
    assert resumed.precision.state_dict() == trainer.precision.state_dict()


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_loaded_policy_acts_on_the_device_as_the_trained_one(rig: Rig, precision: str, tmp_path: Path) -> None:
    policy, chosen = wide(), rig.precision(precision)
    trainer = rig.trainer(chosen, max_steps=5, run_dir=tmp_path / "run", callbacks=[Saving()])
    trainer.fit(policy, InMemory(rig.batches(5)), optimizer=OPTIMIZERS["AdamW fused"])
    acting: Any = load(tmp_path / "run", device=rig.strategy, precision=rig.precision(precision), policy=wide())
    observation = torch.randn(3, 64)
    action = acting.select_action(observation)
    assert (action.device.type, action.dtype, acting.training) == (rig.kind, torch.float32, False)
    policy.eval()
    with torch.no_grad(), trainer.precision.autocast():
        expected = policy.act(observation.to(rig.device)).float()
    assert torch.equal(action, expected)


@pytest.mark.accelerator
def test_loaded_policy_of_the_device_acts_on_the_cpu_nearly_alike(accelerator: Rig, tmp_path: Path) -> None:
    policy = wide()
    trainer = accelerator.trainer(max_steps=5, run_dir=tmp_path / "run", callbacks=[Saving()])
    trainer.fit(policy, InMemory(accelerator.batches(5)))
    acting: Any = load(tmp_path / "run", device="cpu", policy=wide())
    observation = torch.randn(3, 64)
    with torch.no_grad():
        expected = policy.eval().act(observation.to(accelerator.device)).cpu()
    # float32 sums of 256 products in another order
    assert torch.allclose(acting.select_action(observation), expected, rtol=1e-4, atol=1e-5)


# Memory ---------------------------------------------------------------------------------------------------------

MEGABYTE = 2**20


@pytest.mark.accelerator
def test_memory_figures_follow_what_tensors_hold(accelerator: Rig) -> None:
    before = accelerator.strategy.memory()
    assert {"allocated", "total"} <= set(before)
    held = torch.zeros(64 * MEGABYTE, dtype=torch.uint8, device=accelerator.device)
    during = accelerator.strategy.memory()
    assert during["allocated"] - before["allocated"] >= 64 * MEGABYTE
    assert during["allocated"] <= during["total"]
    assert during.get("peak", during["allocated"]) >= during["allocated"]
    del held
    after = accelerator.strategy.memory()
    assert after["allocated"] < during["allocated"]
    assert after.get("peak", during["allocated"]) >= during["allocated"]


class Held(Callback):
    """The bytes that tensors hold at the start of each micro-batch."""

    def __init__(self, rig: Rig) -> None:
        self.rig, self.bytes = rig, list[int]()

    def on_train_batch_start(self, *_: Any) -> None:
        self.bytes.append(self.rig.strategy.memory()["allocated"])


@pytest.mark.accelerator
def test_steps_hold_on_to_no_memory(accelerator: Rig) -> None:
    held = Held(accelerator)
    data = accelerator.batches(60, size=4096)  # 1.5 MB each
    accelerator.fit(wide(), data, callbacks=accelerator.defaults(held), max_steps=60, log_every=None)
    # the means keep a scalar for each step, in blocks of 512 bytes
    assert max(held.bytes[40:]) - max(held.bytes[10:30]) < MEGABYTE


class Greedy(Wide):
    """Asks for a thousand terabytes in its third forward."""

    def __init__(self) -> None:
        super().__init__()
        self.forwards = 0

    def forward(self, batch: Batch) -> Tensor:
        self.forwards += 1
        if self.forwards == 3:
            torch.empty(2**50, dtype=torch.uint8, device=batch.x.device)
        return super().forward(batch)


@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_out_of_memory_is_an_error_that_leaves_trainer_and_device_usable(rig: Rig, precision: str) -> None:
    data, chosen = rig.batches(6), rig.precision(precision)
    trainer = rig.trainer(chosen, max_steps=6, seed=0)
    # torch.OutOfMemoryError is a RuntimeError, which is what the cpu's allocator and mps raise
    with pytest.raises(RuntimeError, match=r"(?i)memory|too large|invalid buffer size"):
        trainer.fit(Greedy(), InMemory(data), optimizer=OPTIMIZERS["AdamW fused"])
    assert trainer.status == "failed"
    again, fresh = wide(), wide()
    trainer.fit(again, InMemory(data), optimizer=OPTIMIZERS["AdamW fused"])
    assert (trainer.status, trainer.step, trainer.skipped) == ("completed", 6, 0)
    rig.trainer(rig.precision(precision), max_steps=6, seed=0).fit(
        fresh, InMemory(data), optimizer=OPTIMIZERS["AdamW fused"]
    )
    assert_equal(weights(again), weights(fresh))


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_deterministic_runs_are_the_same_bits(rig: Rig, precision: str) -> None:
    if rig.kind == "cuda" and not os.environ.get("CUBLAS_WORKSPACE_CONFIG"):
        pytest.skip("needs CUBLAS_WORKSPACE_CONFIG=:4096:8, which scripts/test-accelerator sets")
    found = []
    for _ in range(2):
        policy = wide(dropout=0.2)
        rig.fit(policy, rig.batches(6), precision=rig.precision(precision), seed=1, deterministic=True)
        found.append(weights(policy))
    assert_equal(*found)
    assert not torch.are_deterministic_algorithms_enabled()


def test_validation_on_the_device_leaves_its_random_stream_alone(rig: Rig) -> None:
    data = rig.batches(8)
    found = []
    for val_data in (None, InMemory(data[:2])):
        policy = wide(dropout=0.3)
        trainer = rig.trainer(max_steps=8, seed=0, val_every=2)
        trainer.fit(policy, InMemory(data), val_data, optimizer=OPTIMIZERS["AdamW fused"])
        found.append(weights(policy))
    assert trainer.metrics["val/loss"] > 0.0
    assert_equal(*found)
