"""When a run no longer trains: at which skip it ends, with which error, and that odd tensors do not end it."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from toys import MLP, Batch, InMemory, batches, mlp, weights

from policyfit import (
    FP16,
    Callback,
    ConfigError,
    GradScalerConfig,
    LossScaleCollapse,
    Outcome,
    Trainer,
    TrainingDiverged,
)


class Outcomes(Callback):
    def __init__(self) -> None:
        self.seen: list[Outcome] = []

    def on_update_end(self, trainer: Trainer, policy: nn.Module, outcome: Outcome) -> None:
        self.seen.append(outcome)


def fit(policy: nn.Module, data: list[Any], *callbacks: Callback, lr: float = 1e-3, **settings: Any) -> Trainer:
    trainer = Trainer("cpu", default_callbacks=False, callbacks=callbacks, **{"max_steps": 4, **settings})
    trainer.fit(policy, InMemory(data), optimizer=lambda p: SGD(p, lr=lr))
    return trainer


def fp16(**settings: float) -> FP16:
    return FP16(settings, allow_cpu=True)


# The floor of the loss scale ------------------------------------------------------------------------------------


class Steep(nn.Module):
    """Its gradient in float16 is 40000 times the scale: finite at 1, not at 2."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, batch: Batch) -> Tensor:
        return (self.layer(batch.x[:1, :1]).float() * 40000.0).sum()  # type: ignore[no-any-return]


@pytest.mark.parametrize(("init_scale", "skipped"), [(1.0, 0), (2.0, 1), (16.0, 4)])
def test_the_floor_is_a_scale_to_train_with(init_scale: float, skipped: int) -> None:
    precision = fp16(init_scale=init_scale)
    trainer = fit(Steep(), batches(8), lr=1e-9, precision=precision)
    assert (trainer.status, trainer.step, trainer.skipped) == ("completed", 4, skipped)
    assert float(precision.scale) == 1.0


@pytest.mark.parametrize("growth_interval", [1, 2000])
def test_an_overflow_at_the_floor_ends_the_run_and_the_one_that_led_there_does_not(growth_interval: int) -> None:
    outcomes, policy = Outcomes(), mlp()
    before = weights(policy)
    with pytest.raises(LossScaleCollapse, match=r"Update 3 \(after step 0, loss scale 2\).*fallen to its floor, 2\."):
        fit(policy, batches(1, poisoned=(0,)), outcomes,
            precision=fp16(init_scale=8.0, min_scale=2.0, growth_interval=growth_interval))  # fmt: skip
    assert [outcome.scale for outcome in outcomes.seen] == [4.0, 2.0, 2.0]
    assert all(torch.equal(value, before[name]) for name, value in weights(policy).items())


def test_a_run_that_is_resumed_at_the_floor_ends_at_its_first_overflow() -> None:
    class Saves(Callback):
        def on_fit_end(self, trainer: Trainer, policy: nn.Module) -> None:
            trainer.save_checkpoint()

    fit(mlp(), batches(6, poisoned=(0,)), Saves(), precision=fp16(init_scale=2.0), run_dir="run", max_steps=2)
    trainer = Trainer("cpu", fp16(init_scale=2.0), max_steps=4, run_dir="run", default_callbacks=False)
    with pytest.raises(LossScaleCollapse, match=r"Update 4 \(after step 2, loss scale 1\)"):
        trainer.fit(mlp(), InMemory(batches(6, poisoned=(3,))), optimizer=lambda p: SGD(p, lr=1e-3), resume="last")


class Wide(nn.Module):
    """Every gradient is finite, and their norm is not, where the factor is 2."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))

    def forward(self, batch: Batch) -> Tensor:
        return ((self.a + self.b) * torch.where(batch.factor == 2, 3e38, 1.0)).sum()


def test_a_norm_that_overflows_at_the_floor_is_no_matter_of_the_scale() -> None:
    data = [b._replace(factor=torch.tensor(2.0 if i < 3 else 1.0)) for i, b in enumerate(batches(8))]
    outcomes = Outcomes()
    trainer = fit(Wide(), data, outcomes, precision=fp16(init_scale=1.0))
    assert [outcome.reason for outcome in outcomes.seen[:4]] == ["norm_overflow"] * 3 + [None]
    assert (trainer.status, trainer.skipped) == ("completed", 3)
    with pytest.raises(LossScaleCollapse, match=r"norm overflowed float32, the last of 2 skips in a row"):
        fit(Wide(), data, precision=fp16(init_scale=1.0), max_skips=2)


# Skips in a row -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("precision", "kind"), [("no", TrainingDiverged), ("bf16", TrainingDiverged),
                                                 ("fp16", LossScaleCollapse)])  # fmt: skip
def test_as_many_skips_in_a_row_end_the_run_as_it_allows(precision: str, kind: type[TrainingDiverged]) -> None:
    for poisoned, ends in ((range(2, 4), False), (range(2, 5), True)):
        strategy: Any = fp16(init_scale=1024.0) if precision == "fp16" else precision
        data = batches(9, poisoned=list(poisoned))
        if not ends:
            assert fit(mlp(), data, precision=strategy, max_skips=3).skipped == 2
            continue
        with pytest.raises(TrainingDiverged, match=r"Update 5 \(after step 2.*the last of 3 skips in a row") as caught:
            fit(mlp(), data, precision=strategy, max_skips=3)
        assert type(caught.value) is kind


def test_the_defaults_are_those_of_the_documentation() -> None:
    config = GradScalerConfig()
    assert (config.init_scale, config.backoff_factor, config.growth_factor) == (65536.0, 0.5, 2.0)
    assert (config.growth_interval, config.min_scale, config.max_scale) == (2000, 1.0, None)
    defaults = {name: p.default for name, p in inspect.signature(Trainer.__init__).parameters.items()}
    assert (defaults["max_skips"], defaults["non_finite"]) == (100, "skip")


class Masked(MLP):
    """Has no gradient in its first windows."""

    def __init__(self, without: int) -> None:
        super().__init__()
        self.without = without

    def forward(self, batch: Batch) -> Tensor:
        self.without -= 1
        return super().forward(batch) if self.without < 0 else torch.zeros(())


def test_one_window_without_a_gradient_is_a_skip_and_two_at_the_start_end_the_run() -> None:
    assert fit(Masked(1), batches(8)).skipped == 1
    outcomes = Outcomes()
    with pytest.raises(ConfigError, match="in the first two windows"):
        fit(Masked(2), batches(8), outcomes)
    assert [outcome.reason for outcome in outcomes.seen] == ["no_gradients"] * 2


def test_fp16_keeps_its_guard_whatever_non_finite_says() -> None:
    policy, precision = mlp(), fp16(init_scale=1024.0)
    trainer = fit(policy, batches(8, poisoned=(1,)), precision=precision, non_finite="off")
    assert (trainer.step, trainer.skipped, float(precision.scale)) == (4, 1, 512.0)
    assert all(bool(p.isfinite().all()) for p in policy.parameters())


def test_the_message_names_the_last_loss_only_where_one_was_logged() -> None:
    for log_every, named in ((1, True), (None, False)):
        with pytest.raises(TrainingDiverged) as caught:
            fit(mlp(), batches(2) + batches(9, poisoned=range(9)), max_skips=2, log_every=log_every)
        assert ("The last training loss that was logged: " in str(caught.value)) == named
        assert "loss scale" not in str(caught.value)


# Tensors of all kinds -------------------------------------------------------------------------------------------


class Odd(MLP):
    """Holds buffers and frozen weights that are no dense numbers of 16 bits or more, one of them infinite later."""

    edges: Tensor

    def __init__(self, spoils: bool = False) -> None:
        super().__init__()
        self.spoils = spoils
        eye = torch.eye(4)
        self.register_buffer("edges", eye.to_sparse(), persistent=False)
        self.register_buffer("rows", eye.to_sparse_csr(), persistent=False)
        self.register_buffer("eighths", eye.to(torch.float8_e4m3fn), persistent=False)
        self.register_buffer("ragged", torch.nested.nested_tensor([eye[0], eye[1, :2]]), persistent=False)
        self.frozen = nn.Parameter(eye.to(torch.float8_e4m3fn), requires_grad=False)

    def forward(self, batch: Batch) -> Tensor:
        self.edges.mul_(float("inf") if self.spoils and batch.factor != 1 else 1.0)
        return super().forward(batch)


@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning", "ignore:.*nested tensors is in prototype:UserWarning")
def test_a_policy_with_sparse_ragged_and_8_bit_tensors_is_trained_and_watched() -> None:
    trainer = fit(Odd(), batches(6, poisoned=(2,)))
    assert (trainer.step, trainer.skipped) == (4, 1)
    trainer._active.updater.divergence.check_finite()
    with pytest.raises(TrainingDiverged, match="left a non-finite value in the buffer edges"):
        fit(Odd(spoils=True), batches(6, poisoned=(2,)))
