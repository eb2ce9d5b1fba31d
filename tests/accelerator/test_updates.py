"""Updates on the device: the same bits as a loop by hand, whenever they are settled, overflows included."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from itertools import cycle
from typing import Any

import pytest
import torch
from rig import INIT_SCALE, OPTIMIZERS, Batch, Make, Rig, Wide, assert_equal, moments, warmup, weights, wide
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from policyfit import FP16, Callback, LossScaleCollapse, Outcome, Trainer, TrainingDiverged
from policyfit.strategies import fabric_precision
from policyfit.strategies.distributed import SingleProcess
from policyfit.strategies.mailbox import SharedMailbox
from policyfit.trainer.agreement import MAILBOX_SIZE, Agreement, Slots

DTYPES = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def by_hand(
    rig: Rig, policy: nn.Module, data: list[Batch], make: Make, precision: str, accumulate: int, steps: int
) -> tuple[Optimizer, float]:
    """The loop one would write: wait for the norm in every update, and step if it is finite."""
    policy.to(rig.device)
    optimizer = make(policy.parameters())
    scheduler = warmup(optimizer)
    scaler = torch.amp.GradScaler(rig.kind, init_scale=INIT_SCALE, growth_interval=3, enabled=precision == "fp16")
    source, landed = cycle(data), 0
    while landed < steps:
        for _ in range(accumulate):
            batch = Batch(*(part.to(rig.device) for part in next(source)))
            with torch.autocast(rig.kind, dtype=DTYPES[precision]) if precision != "no" else nullcontext():
                loss = policy(batch)
            scaler.scale(loss / accumulate).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
        if torch.isfinite(norm):
            optimizer.step()
            scheduler.step()
            landed += 1
        scaler.update()
        optimizer.zero_grad()
    return optimizer, scaler.get_scale()


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_equal_a_loop_by_hand_bit_for_bit(rig: Rig, name: str, precision: str, accumulate: int) -> None:
    chosen, make = rig.precision(precision), rig.optimizer(name)
    data = rig.batches(15, poisoned=(0, 7))
    ours, theirs = wide(), wide()
    optimizer, scale = by_hand(rig, theirs, data, make, precision, accumulate, steps=8)
    trainer = rig.fit(ours, data, make, precision=chosen, accumulate=accumulate, clip_norm=0.5)
    assert trainer.skipped >= 2
    assert ours.computed_in == DTYPES[precision]
    assert_equal(weights(ours), weights(theirs))
    assert_equal(moments(trainer.optimizers[0]), moments(optimizer))
    if precision == "fp16":
        assert trainer.precision.scale is not None
        assert trainer.precision.scale.device.type == rig.kind
        assert float(trainer.precision.scale) == scale


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_parameters_gradients_and_moments_are_float32_on_the_device(rig: Rig, precision: str) -> None:
    policy = wide()
    trainer = rig.fit(policy, rig.batches(4), precision=rig.precision(precision))
    assert {(p.dtype, p.device.type) for p in policy.parameters()} == {(torch.float32, rig.kind)}
    assert {m.dtype for m in moments(trainer.optimizers[0]).values()} == {torch.float32}
    assert policy.computed_in == DTYPES[precision]


def test_optimizer_that_leaves_the_choice_open_is_fused_on_the_device(rig: Rig) -> None:
    trainer = rig.fit(wide(), rig.batches(4), lambda p: AdamW(p, lr=1e-2))
    assert trainer.plan.chosen("optimizer") == "AdamW (fused, which fused=None left open)"
    assert trainer.plan.chosen("device") == rig.strategy.name


@pytest.mark.parametrize("name", ["AdamW fused", "AdamW unfused", "SGD fused"])
def test_run_whose_first_update_overflows_equals_one_that_never_saw_it(rig: Rig, name: str) -> None:
    make, data = rig.optimizer(name), rig.batches(5)
    poisoned = [data[0]._replace(factor=data[0].factor * float("nan")), *data]
    with_it, without = wide(), wide()
    assert rig.fit(with_it, poisoned, make, max_steps=5).skipped == 1
    rig.fit(without, data, make, max_steps=5)
    assert_equal(weights(with_it), weights(without))


# Overflow -------------------------------------------------------------------------------------------------------


class Outcomes(Callback):
    def __init__(self) -> None:
        self.seen: list[Outcome] = []

    def on_update_end(self, trainer: Trainer, policy: nn.Module, outcome: Outcome) -> None:
        self.seen.append(outcome)


def test_float16_overflows_of_a_scale_too_high_are_skipped_until_the_run_recovers(rig: Rig) -> None:
    rig.precision("fp16")
    policy, outcomes = wide(), Outcomes()
    precision = FP16({"init_scale": 2.0**40, "growth_interval": 1000}, allow_cpu=True)
    trainer = rig.fit(policy, rig.batches(4), precision=precision, callbacks=[outcomes], max_steps=10)
    reasons = [outcome.reason for outcome in outcomes.seen]
    skipped = trainer.skipped
    assert reasons == ["non_finite"] * skipped + [None] * 10
    assert skipped > 5  # 2**40 times any loss is beyond float16 in the first backward matmul
    assert float(precision.scale) == 2.0 ** (40 - skipped)
    assert "first.weight" in outcomes.seen[0].non_finite_parameters()
    assert all(bool(p.isfinite().all()) for p in policy.parameters())
    assert outcomes.seen[-1].grad_norm < 100.0  # in units of the loss, not of the scale


def test_float16_overflow_without_end_collapses_at_the_floor_and_leaves_the_weights(rig: Rig) -> None:
    rig.precision("fp16")
    policy, precision = wide(), FP16({"init_scale": 16.0, "min_scale": 2.0}, allow_cpu=True)
    before = weights(policy)
    with pytest.raises(LossScaleCollapse, match="loss scale 2"):
        rig.fit(policy, rig.batches(1, poisoned=(0,)), precision=precision)
    assert_equal(weights(policy), before)


@pytest.mark.parametrize("name", ["AdamW fused", "AdamW unfused"])
def test_endless_overflow_ends_the_run_and_leaves_the_weights(rig: Rig, name: str) -> None:
    policy = wide()
    before = weights(policy)
    with pytest.raises(TrainingDiverged, match="3 skips in a row"):
        rig.fit(policy, rig.batches(1, poisoned=(0,)), rig.optimizer(name), max_skips=3, clip_value=1.0)
    assert_equal(weights(policy), before)


class HalfWeights:
    """What lightning-fabric's HalfPrecision('bf16-true') does, without the package."""

    precision = "bf16-true"

    def forward_context(self) -> Any:
        return nullcontext()

    def convert_module(self, module: nn.Module) -> nn.Module:
        return module.to(torch.bfloat16)

    def convert_input(self, data: Any) -> Any:
        return Batch(*(part.bfloat16() for part in data)) if isinstance(data, tuple) else data.bfloat16()

    def convert_output(self, data: Any) -> Any:
        loss, metrics = data
        return loss.float(), metrics


def test_overflow_of_bfloat16_gradients_is_skipped_and_counted(rig: Rig) -> None:
    # torch's own check takes no bfloat16 on cuda
    rig.precision("bf16")
    policy = wide()
    trainer = rig.fit(
        policy, rig.batches(6, poisoned=(0, 3)), lambda p: SGD(p, lr=1e-2),
        precision=fabric_precision(HalfWeights()), clip_norm=0.5, max_steps=4,
    )  # fmt: skip
    assert (trainer.step, trainer.skipped) == (4, 2)
    assert {p.dtype for p in policy.parameters()} == {torch.bfloat16}
    assert all(bool(p.isfinite().all()) for p in policy.parameters())


# Settling -------------------------------------------------------------------------------------------------------


class Asking(Callback):
    """Asks for the outcome at some of the moments at which one can."""

    def __init__(self, when: Callable[[], bool], *, now: bool = False) -> None:
        self.when, self.needs_outcome_now = when, now
        self.outcomes: list[tuple[bool, str | None, int, int]] = []

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if self.when():
            assert trainer.step == trainer.updates - trainer.skipped

    def on_before_backward(self, trainer: Trainer, *_: Any) -> None:
        if self.when():
            assert trainer.outcome is None or trainer.outcome.update == trainer.updates

    def on_update_end(self, trainer: Trainer, policy: nn.Module, outcome: Outcome) -> None:
        self.outcomes.append(outcome[:4])


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
@pytest.mark.parametrize("name", ["AdamW fused", "AdamW unfused"])
def test_settling_late_early_and_at_random_gives_the_same_bits(rig: Rig, name: str, precision: str) -> None:
    data, coin, found = rig.batches(11, poisoned=(0, 4, 5)), random.Random(3), []
    for asking in (
        Asking(lambda: False),
        Asking(lambda: True),
        Asking(lambda: False, now=True),
        *(Asking(lambda: coin.random() < 0.4) for _ in range(3)),
    ):
        policy = wide(dropout=0.3)
        trainer = rig.fit(
            policy, data, rig.optimizer(name), precision=rig.precision(precision), callbacks=[asking], accumulate=2,
            max_steps=12, log_every=5, seed=0, clip_norm=1.0,
        )  # fmt: skip
        found.append((weights(policy), moments(trainer.optimizers[0]), asking.outcomes, trainer.metrics["train/loss"]))
    for state, optimizer_state, outcomes, loss in found[1:]:
        assert_equal(state, found[0][0])
        assert_equal(optimizer_state, found[0][1])
        assert (outcomes, loss) == found[0][2:]


class Editing(Callback):
    """Writes an infinity into one gradient before the third update."""

    def __init__(self) -> None:
        self.calls = 0

    def on_before_optimizer_step(self, trainer: Trainer, policy: nn.Module, optimizer: Optimizer) -> None:
        self.calls += 1
        gradient = next(iter(policy.parameters())).grad
        if self.calls == 3 and gradient is not None:
            gradient.view(-1)[0] = float("inf")


@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_gradients_edited_before_the_step_are_checked_again(rig: Rig, precision: str) -> None:
    outcomes, policy = Outcomes(), wide()
    rig.fit(policy, rig.batches(9), precision=rig.precision(precision), callbacks=[Editing(), outcomes], max_steps=4)
    assert [outcome.reason for outcome in outcomes.seen] == [None, None, "non_finite", None, None]
    assert isinstance(policy, Wide)
    assert all(bool(p.isfinite().all()) for p in policy.parameters())


def test_losses_on_the_device_are_agreed_on_in_host_memory(rig: Rig) -> None:
    # As under FSDP(cpu_offload=True), where the gradients and so the mailbox are in host memory.
    mailbox = SharedMailbox(MAILBOX_SIZE, torch.device("cpu"))
    agreement = Agreement(SingleProcess(), mailbox)
    bad_losses = []
    for loss in (1.0, float("nan")):
        agreement.reach([torch.tensor(loss, device=rig.device)], meets=None, next_window=None)
        bad_losses.append(Slots(*mailbox.read().tolist()).bad_loss)
    assert bad_losses == [0.0, 1.0]
