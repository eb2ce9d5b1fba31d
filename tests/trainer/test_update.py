"""The road of every update: against a loop written by hand, and however late it is settled."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from itertools import cycle
from typing import Any

import pytest
import torch
from reads import Reads
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop
from torch.optim.lr_scheduler import LambdaLR
from toys import MLP, Batch, InMemory, assert_equal, batches, mlp, weights

from policyfit import FP16, Callback, LossScaleCollapse, Outcome, Trainer, TrainingDiverged

Make = Callable[[Iterable[nn.Parameter]], Optimizer]
SCALE = 1024.0

OPTIMIZERS: dict[str, Make] = {
    "AdamW": lambda p: AdamW(p, lr=1e-2, fused=True),
    "Adam": lambda p: Adam(p, lr=1e-2, fused=True),
    "SGD": lambda p: SGD(p, lr=1e-2, momentum=0.9, fused=True),
    "Adagrad": lambda p: Adagrad(p, lr=1e-2, fused=True),
    "RMSprop": lambda p: RMSprop(p, lr=1e-2),  # has no fused form
}


def precision_of(name: str) -> Any:
    return FP16({"init_scale": SCALE, "growth_interval": 3}, allow_cpu=True) if name == "fp16" else name


def warmup(optimizer: Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))


def by_hand(
    policy: nn.Module, data: list[Batch], make: Make, precision: str, accumulate: int, steps: int
) -> tuple[Optimizer, LambdaLR, float]:
    """The loop one would write: read at once whether the gradients are finite, and step if so."""
    optimizer = make(policy.parameters())
    scheduler = warmup(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=3, enabled=precision == "fp16")
    dtype = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    source, landed = cycle(data), 0
    while landed < steps:
        for _ in range(accumulate):
            with torch.autocast("cpu", dtype=dtype, enabled=precision != "no"):
                loss = policy(next(source))
            scaler.scale(loss / accumulate).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
        if torch.isfinite(norm):
            optimizer.step()
            scheduler.step()
            landed += 1
        scaler.update()
        optimizer.zero_grad()
    return optimizer, scheduler, scaler.get_scale()


def fit(policy: nn.Module, data: list[Batch], make: Make = OPTIMIZERS["AdamW"], **settings: Any) -> Trainer:
    trainer = Trainer("cpu", default_callbacks=False, **{"max_steps": 8, **settings})
    trainer.fit(policy, InMemory(data), optimizer=make, schedule=warmup)
    return trainer


def optimizer_tensors(optimizer: Optimizer) -> dict[str, Tensor]:
    state = optimizer.state_dict()["state"]
    return {f"{i}.{k}": v.clone() for i, s in sorted(state.items()) for k, v in sorted(s.items()) if v is not None}


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_equal_a_loop_by_hand_with_overflows_in_the_first_and_later_updates(
    name: str, precision: str, accumulate: int
) -> None:
    data = batches(15, poisoned=(0, 7))
    theirs, ours = mlp(), mlp()
    optimizer, scheduler, scale = by_hand(theirs, data, OPTIMIZERS[name], precision, accumulate, steps=8)
    trainer = fit(ours, data, OPTIMIZERS[name], precision=precision_of(precision), accumulate=accumulate, clip_norm=0.5)
    assert trainer.step == 8
    assert trainer.skipped >= 2
    assert_equal(weights(ours), weights(theirs))
    assert_equal(optimizer_tensors(trainer.optimizers[0]), optimizer_tensors(optimizer))
    assert trainer.optimizers[0].param_groups[0]["lr"] == scheduler.get_last_lr()[0]
    if precision == "fp16":
        assert trainer.precision.scale is not None
        assert float(trainer.precision.scale) == scale


class Asking(Callback):
    """Asks for the outcome at some of the moments at which one can."""

    def __init__(self, when: Callable[[], bool]) -> None:
        self.when = when
        self.outcomes: list[tuple[bool, str | None, int, int]] = []

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if self.when():
            assert trainer.step == trainer.updates - trainer.skipped

    def on_before_backward(self, trainer: Trainer, *_: Any) -> None:
        if self.when():
            assert trainer.outcome is None or trainer.outcome.update == trainer.updates

    def on_update_end(self, trainer: Trainer, policy: nn.Module, outcome: Outcome) -> None:
        self.outcomes.append(outcome[:4])


class AskingNow(Asking):
    needs_outcome_now = True


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
@pytest.mark.parametrize("name", ["AdamW", "RMSprop"])
def test_settling_late_early_and_at_random_gives_the_same_bits(name: str, precision: str) -> None:
    data = batches(11, poisoned=(0, 4, 5))
    coin = random.Random(3)
    found = []
    for asking in (
        Asking(lambda: False),
        Asking(lambda: True),
        AskingNow(lambda: False),
        *(Asking(lambda: coin.random() < 0.4) for _ in range(3)),
    ):
        policy = mlp(dropout=0.3)
        trainer = fit(
            policy,
            data,
            OPTIMIZERS[name],
            precision=precision_of(precision),
            callbacks=[asking],
            accumulate=2,
            max_steps=12,
            log_every=5,
            seed=0,
            clip_norm=1.0,
        )
        found.append((weights(policy), optimizer_tensors(trainer.optimizers[0]), asking.outcomes, trainer.metrics))
    for state, moments, outcomes, metrics in found[1:]:
        assert_equal(state, found[0][0])
        assert_equal(moments, found[0][1])
        assert outcomes == found[0][2]
        assert metrics["train/loss"] == found[0][3]["train/loss"]
        assert metrics["lr"] == found[0][3]["lr"]


def test_outcomes_come_once_an_update_and_in_order_with_reasons() -> None:
    asking = Asking(lambda: False)
    fit(mlp(), batches(6, poisoned=(1, 2)), callbacks=[asking], max_steps=6)
    assert asking.outcomes == [
        (True, None, 1, 1),
        (False, "non_finite", 1, 2),
        (False, "non_finite", 1, 3),
        (True, None, 2, 4),
        (True, None, 3, 5),
        (True, None, 4, 6),
        (True, None, 5, 7),
        (False, "non_finite", 5, 8),
        (False, "non_finite", 5, 9),
        (True, None, 6, 10),
    ]


class ReadsPerUpdate(Callback):
    def __init__(self, reads: Reads) -> None:
        self.reads, self.after_update = reads, list[int]()

    def on_train_batch_end(self, *_: Any) -> None:
        self.after_update.append(self.reads.count)


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_healthy_updates_read_nothing_with_all_default_callbacks(
    precision: str, accumulate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = Reads(monkeypatch)
    counter = ReadsPerUpdate(reads)
    strategy: Any = FP16({"init_scale": SCALE}, allow_cpu=True) if precision == "fp16" else precision
    trainer = Trainer(
        "cpu", strategy, max_steps=400, accumulate=accumulate, clip_norm=1.0, clip_value=5.0,
        callbacks=[counter], log_every=None,
    )  # fmt: skip
    trainer.fit(mlp(), InMemory(batches(7)), optimizer=OPTIMIZERS["AdamW"], schedule=warmup)
    assert trainer.skipped == 0
    assert len(counter.after_update) >= 400
    assert counter.after_update[-1] == counter.after_update[0]


def test_log_points_read_once_however_many_updates_lie_between(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = Reads(monkeypatch)
    counter = ReadsPerUpdate(reads)
    trainer = Trainer("cpu", max_steps=50, callbacks=[counter], log_every=10, clip_norm=1.0)
    trainer.fit(mlp(), InMemory(batches(50)))
    assert counter.after_update[-1] - counter.after_update[0] == 4


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("dampening", [0.0, 0.5])
def test_sgd_whose_first_update_is_skipped_equals_a_run_that_never_saw_it(momentum: float, dampening: float) -> None:
    def make(parameters: Iterable[nn.Parameter]) -> SGD:
        return SGD(parameters, lr=0.1, momentum=momentum, dampening=dampening)

    data = batches(5)
    poisoned = [data[0]._replace(factor=torch.tensor(float("nan"))), *data]
    with_it, without = mlp(), mlp()
    assert fit(with_it, poisoned, make, max_steps=5).skipped == 1
    fit(without, data, make, max_steps=5)
    assert_equal(weights(with_it), weights(without))


def test_clipping_by_value_is_checked_before_it_hides_an_infinity() -> None:
    policy = mlp()
    before = weights(policy)
    asking = Asking(lambda: False)
    with pytest.raises(TrainingDiverged, match="2 skips in a row"):
        fit(policy, batches(1, poisoned=(0,)), clip_value=1.0, max_skips=2, callbacks=[asking])
    assert [reason for _, reason, _, _ in asking.outcomes] == ["non_finite", "non_finite"]
    assert_equal(weights(policy), before)


def test_clipping_by_value_and_norm_equals_torchs_own() -> None:
    data = batches(4)
    ours, theirs = mlp(), mlp()
    fit(ours, data, lambda p: SGD(p, lr=1.0, fused=True), clip_value=0.02, clip_norm=0.05, max_steps=4)
    optimizer = SGD(theirs.parameters(), lr=1.0, fused=True)
    scheduler = warmup(optimizer)
    for batch in data:
        theirs(batch).backward()
        nn.utils.clip_grad_value_(theirs.parameters(), 0.02)
        nn.utils.clip_grad_norm_(theirs.parameters(), 0.05)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    assert_equal(weights(ours), weights(theirs))


@pytest.mark.parametrize("name", ["AdamW", "RMSprop"])
def test_finite_gradients_whose_norm_overflows_are_skipped_with_their_own_reason(name: str) -> None:
    policy = mlp()
    before = weights(policy)
    asking = Asking(lambda: False)
    data = [batch._replace(factor=torch.tensor(1e30)) for batch in batches(1)]
    with pytest.raises(TrainingDiverged, match="norm overflowed"):
        fit(policy, data, OPTIMIZERS[name], max_skips=3, callbacks=[asking], clip_norm=1.0)
    assert {reason for _, reason, _, _ in asking.outcomes} == {"norm_overflow"}
    assert_equal(weights(policy), before)


class Edits(Callback):
    """Writes a value into one gradient before the third update."""

    def __init__(self, value: float) -> None:
        self.value, self.calls = value, 0

    def on_before_optimizer_step(self, trainer: Trainer, policy: nn.Module, optimizer: Optimizer) -> None:
        self.calls += 1
        if self.calls == 3:
            gradient = next(iter(policy.parameters())).grad
            assert gradient is not None
            gradient.view(-1)[0] = self.value


@pytest.mark.parametrize("precision", ["no", "fp16"])
@pytest.mark.parametrize(
    ("value", "reason"), [(float("nan"), "non_finite"), (-float("inf"), "non_finite"), (2e38, "norm_overflow")]
)
def test_gradients_edited_before_the_step_are_checked_again(precision: str, value: float, reason: str) -> None:
    asking = Asking(lambda: False)
    policy = mlp()
    fit(policy, batches(9), precision=precision_of(precision), callbacks=[Edits(value), asking], max_steps=4)
    assert [reason for _, reason, _, _ in asking.outcomes] == [None, None, reason, None, None]
    assert all(bool(p.isfinite().all()) for p in policy.parameters())


class TwoHeads(nn.Module):
    """Two parts with an optimizer each; only the second part's loss is poisoned."""

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, batch: Batch) -> Tensor:
        actor = nn.functional.mse_loss(self.actor(batch.x), batch.y)
        return actor + nn.functional.mse_loss(self.critic(batch.x), batch.y) * batch.factor

    def configure_optimizers(self) -> list[Optimizer]:
        return [AdamW(self.actor.parameters(), lr=1e-2), self.second(self.critic.parameters())]

    second: Make = staticmethod(lambda p: SGD(p, lr=1e-2, momentum=0.9))


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
@pytest.mark.parametrize("second", ["SGD", "RMSprop"])
def test_several_optimizers_land_all_or_none(second: str, precision: str) -> None:
    def run(data: list[Batch]) -> tuple[TwoHeads, Trainer]:
        torch.manual_seed(0)
        policy = TwoHeads()
        policy.second = OPTIMIZERS[second]
        trainer = Trainer("cpu", precision_of(precision), max_steps=3, default_callbacks=False)
        trainer.fit(policy, InMemory(data))
        return policy, trainer

    data = batches(3)
    healthy, _ = run(data)
    poisoned = [data[0]._replace(factor=torch.tensor(float("inf"))), *data]
    skipping, trainer = run(poisoned)
    assert (trainer.step, trainer.skipped) == (3, 1)
    assert_equal(weights(skipping), weights(healthy))
    if precision == "fp16":  # halved once for the update, not once an optimizer, and grown once after three
        assert trainer.precision.scale is not None
        assert float(trainer.precision.scale) == SCALE


class SometimesConstant(MLP):
    """A batch whose factor is zero has nothing to learn from: its loss has no gradient."""

    def forward(self, batch: Batch) -> Tensor:
        return super().forward(batch) if batch.factor else torch.zeros(())


@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_a_window_without_gradients_is_a_skip_that_leaves_the_scale_alone(precision: str) -> None:
    torch.manual_seed(0)
    policy, asking = SometimesConstant(), Asking(lambda: False)
    data = [b._replace(factor=torch.tensor(float(i != 2))) for i, b in enumerate(batches(6))]
    trainer = fit(policy, data, precision=precision_of(precision), callbacks=[asking], max_steps=5)
    assert [reason for _, reason, _, _ in asking.outcomes] == [None, None, "no_gradients", None, None, None]
    theirs = mlp()
    fit(theirs, [b for i, b in enumerate(batches(6)) if i != 2], precision=precision_of(precision), max_steps=5)
    assert_equal(weights(policy), weights(theirs))
    if precision == "fp16":
        assert trainer.precision.state_dict() == {
            "scale": 2 * SCALE, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 3, "_growth_tracker": 2,
        }  # fmt: skip


def test_skips_move_neither_schedule_nor_intervals() -> None:
    class Seen(Callback):
        def __init__(self) -> None:
            self.steps: list[int] = []
            self.rates: list[float] = []

        def on_log(self, trainer: Trainer, policy: nn.Module, record: Any) -> None:
            if "lr" in record:
                self.steps.append(record["step"])
                self.rates.append(record["lr"])

    seen = Seen()
    trainer = fit(mlp(), batches(5, poisoned=(0, 3)), callbacks=[seen], log_every=2, max_steps=6)
    assert seen.steps == [2, 4, 6]
    assert seen.rates == pytest.approx([1e-2 * 2 / 5, 1e-2 * 4 / 5, 1e-2])  # schedule(landed), whatever was skipped
    assert trainer.updates == trainer.step + trainer.skipped == 10


def test_endless_skips_end_the_run_naming_step_and_parameters() -> None:
    with pytest.raises(TrainingDiverged) as caught:
        fit(mlp(), batches(3, poisoned=(1, 2)) + batches(9, poisoned=range(9)), max_skips=5)
    assert not isinstance(caught.value, LossScaleCollapse)
    for part in ("after step 1", "5 skips in a row", "net.0.weight", "a gradient was inf or NaN"):
        assert part in str(caught.value)


def test_a_scale_at_its_floor_is_a_collapse_that_names_it() -> None:
    precision = FP16({"init_scale": 8.0, "min_scale": 2.0}, allow_cpu=True)
    policy = mlp()
    before = weights(policy)
    with pytest.raises(LossScaleCollapse, match=r"loss scale 2\) was skipped.*\n.*net\.0\.weight"):
        fit(policy, batches(1, poisoned=(0,)), precision=precision)
    assert float(precision.scale) == 2.0
    assert_equal(weights(policy), before)


def test_non_finite_raise_ends_at_the_first_such_update() -> None:
    with pytest.raises(TrainingDiverged, match="Update 3 \\(after step 2\\)"):
        fit(mlp(), batches(4, poisoned=(2,)), non_finite="raise")


def test_non_finite_off_drops_the_guard_and_lets_the_weights_go() -> None:
    policy = mlp()
    trainer = fit(policy, batches(4, poisoned=(2,)), non_finite="off", max_steps=4)
    assert (trainer.step, trainer.skipped) == (4, 0)
    assert all(bool(p.isnan().any()) for p in policy.parameters())


class WithBatchNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(6), nn.Linear(6, 3)
        self.register_buffer("mask", torch.tensor([0.0, -float("inf")]))

    def forward(self, batch: Batch) -> Tensor:
        return nn.functional.mse_loss(self.head(self.norm(batch.x)), batch.y) * batch.factor


def test_a_buffer_poisoned_by_a_sample_ends_the_run_naming_it() -> None:
    data = batches(4)
    data[2].x[0, 0] = float("nan")
    with pytest.raises(TrainingDiverged, match=r"update 3 \(after step 2\).*buffer norm.running_mean"):
        fit(WithBatchNorm(), data)


def test_a_skip_that_leaves_the_buffers_finite_goes_on_beside_a_mask_of_infinities() -> None:
    assert fit(WithBatchNorm(), batches(4, poisoned=(2,)), max_steps=4).skipped == 1


class Interrupting(Callback):
    """Raises between backward and update, in the second window."""

    def on_before_optimizer_step(self, trainer: Trainer, *_: Any) -> None:
        if trainer.updates == 1:
            raise RuntimeError("out of memory, say")


def test_an_exception_before_the_step_leaves_a_scaler_that_works() -> None:
    precision = precision_of("fp16")
    with pytest.raises(RuntimeError, match="out of memory"):
        fit(mlp(), batches(4), precision=precision, callbacks=[Interrupting()])
    parameter = nn.Parameter(torch.ones(3))
    flag = torch.zeros(())
    precision.backward((parameter * 2).sum())
    assert parameter.grad is not None
    precision.unscale([parameter.grad], flag)
    precision.settle_scale(flag)
    assert parameter.grad.tolist() == [2.0, 2.0, 2.0]
    assert float(flag) == 0.0


def test_the_gradient_norm_reported_is_unscaled_and_before_clipping() -> None:
    norms = []
    for scale in (1.0, 2.0**14):
        asking = Norms()
        fit(mlp(), batches(2), precision=FP16({"init_scale": scale}, allow_cpu=True), callbacks=[asking], clip_norm=0.1,
            max_steps=2)  # fmt: skip
        norms.append(asking.norms)
    reference = mlp()
    reference(batches(1)[0]).backward()
    expected = float(nn.utils.get_total_norm([p.grad for p in reference.parameters() if p.grad is not None]))
    # float16's forward and backward round to 11 bits
    assert [n[0] for n in norms] == pytest.approx([expected, expected], rel=2e-3)


class Norms(Callback):
    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_update_end(self, trainer: Trainer, policy: nn.Module, outcome: Outcome) -> None:
        self.norms.append(outcome.grad_norm)


def test_optimizers_are_left_without_the_flag_after_the_run() -> None:
    trainer = fit(mlp(), batches(2), max_steps=2)
    assert not hasattr(trainer.optimizers[0], "found_inf")


class Saving(Callback):
    """Breaks a tensor at step 2, then saves."""

    def __init__(self, name: str) -> None:
        self.name = name

    def due(self, step: int) -> bool:
        return step == 2

    def on_due(self, trainer: Trainer, policy: nn.Module) -> None:
        policy.state_dict()[self.name].view(-1)[0] = float("nan")
        trainer.save_checkpoint()


@pytest.mark.parametrize("name", ["head.weight", "norm.running_var"])
def test_weights_and_buffers_that_are_no_longer_finite_are_never_saved(name: str) -> None:
    trainer = Trainer("cpu", max_steps=4, default_callbacks=False, callbacks=[Saving(name)])
    with pytest.raises(TrainingDiverged, match=f"At step 2 these are inf or NaN and are not saved: {name}"):
        trainer.fit(WithBatchNorm(), InMemory(batches(4)))
    assert trainer.checkpoints() == []


def test_a_buffer_that_is_infinite_from_the_start_is_meant_and_saved() -> None:
    trainer = Trainer("cpu", max_steps=2, default_callbacks=False)
    trainer.fit(WithBatchNorm(), InMemory(batches(2)))
    trainer.save_checkpoint()
    assert [path.name for path in trainer.checkpoints()] == ["000002"]
