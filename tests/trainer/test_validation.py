"""Validation: right means over held-out data, and no trace of it in the run."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from toys import MLP, Batch, InMemory, assert_equal, batches, mlp, weights

from policyfit import FP16, Callback, Checkpoint, ConfigError, MetricsLog, Trainer
from policyfit.trainer import state
from policyfit.trainer.validation import SampleMeans


def test_a_batch_weighs_as_much_as_it_has_samples() -> None:
    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.offset = nn.Parameter(torch.zeros(()))

        def forward(self, batch: Tensor) -> tuple[Tensor, dict[str, Any]]:
            return batch.mean() + self.offset, {"plain": float(batch.mean()), "numpy": np.float32(batch.mean())}

    data = torch.arange(10.0).reshape(10, 1)
    found = Trainer("cpu", batch_size=4).validate(Mean(), TensorOnly(data))
    assert found == {"val/loss": 4.5, "val/plain": 4.5, "val/numpy": 4.5}


class TensorOnly(torch.utils.data.Dataset[Tensor]):
    def __init__(self, data: Tensor) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Tensor:
        return self.data[index]


def test_a_mean_with_a_nan_is_nan_and_not_a_mean_of_the_others() -> None:
    means = SampleMeans()
    means.add("a", 1.0)
    means.add("a", torch.tensor(math.nan))
    assert math.isnan(means.read()["a"])


def test_values_that_are_written_over_later_count_as_they_were() -> None:
    means, counter = SampleMeans(), torch.zeros(())
    for _ in range(3):
        counter += 1
        means.add("counter", counter)
    assert means.read() == {"counter": 2.0}


@pytest.mark.parametrize("value", [torch.zeros(2), "good", None])
def test_what_is_no_number_is_refused_by_name(value: Any) -> None:
    with pytest.raises(ConfigError, match="The metric 'mine' must be a number"):
        SampleMeans().add("mine", value)


# No trace ---------------------------------------------------------------------------------------------------


class Stirring(MLP):
    """Draws from every stream in training and in validation, and normalises batches."""

    def __init__(self) -> None:
        super().__init__(dropout=0.3)
        self.norm = nn.BatchNorm1d(6)
        self.modes: list[bool] = []

    def forward(self, batch: Batch) -> Tensor:
        self.modes.append(self.training)
        noise = random.random() + float(np.random.rand()) + torch.rand(())
        return super().forward(batch._replace(x=self.norm(batch.x) + 0.01 * noise))


class Meddling(Callback):
    """Draws at every moment of a validation that hooks see."""

    def on_validation_start(self, *_: Any) -> None:
        random.random(), np.random.rand(), torch.rand(3)

    on_validation_batch_start = on_validation_batch_end = on_validation_start  # type: ignore[assignment]


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_validation_in_mid_run_leaves_weights_moments_and_streams_as_without_it(precision: str) -> None:
    def run(val_every: int | None) -> tuple[dict[str, Tensor], Any, dict[str, Tensor], int]:
        torch.manual_seed(0)
        policy = Stirring()
        strategy: Any = FP16({"init_scale": 2.0**30}, allow_cpu=True) if precision == "fp16" else precision
        trainer = Trainer(
            "cpu", strategy, max_steps=7, accumulate=2, seed=3, val_every=val_every, clip_norm=1.0,
            callbacks=[Meddling()], default_callbacks=False, log_every=3,
        )  # fmt: skip
        trainer.fit(policy, InMemory(batches(5)), InMemory(batches(2, seed=9)) if val_every else None)
        saved = state.capture(trainer._active, {})
        return weights(policy), saved.optimizers, saved.rng, policy.modes.count(False)

    with_it, without = run(2), run(None)
    assert (with_it[3], without[3]) == (8, 0)  # at 2, 4, 6 and at the end, two batches each
    assert_equal(with_it[0], without[0])
    assert_equal(with_it[2], without[2])
    assert str(with_it[1]) == str(without[1])


class ValidatesInWindow(Callback):
    """In the middle of a window, when gradients are there."""

    def __init__(self) -> None:
        self.before: list[bool] = []

    def on_after_backward(self, trainer: Trainer, policy: nn.Module) -> None:
        before = [p.grad.clone() for p in policy.parameters() if p.grad is not None]
        trainer.validate(policy, InMemory(batches(1, seed=4)))
        after = [p.grad for p in policy.parameters() if p.grad is not None]
        self.before.append(bool(before) and all(torch.equal(a, b) for a, b in zip(before, after, strict=True)))


def test_validation_in_the_middle_of_a_window_keeps_its_gradients() -> None:
    watching = ValidatesInWindow()
    found = []
    for callbacks in ([], [watching]):
        policy = mlp(dropout=0.2)
        trainer = Trainer("cpu", max_steps=3, accumulate=3, seed=1, callbacks=callbacks, default_callbacks=False)
        trainer.fit(policy, InMemory(batches(9)))
        found.append(weights(policy))
    assert watching.before == [True] * 9
    assert_equal(*found)


def test_every_validation_draws_the_same_numbers() -> None:
    class Drawing(MLP):
        drawn: list[float]

        def forward(self, batch: Batch) -> Tensor:
            if not self.training:
                self.drawn.append(float(torch.rand(())) + random.random() + float(np.random.rand()))
            return super().forward(batch)

    policy = Drawing()
    policy.drawn = []
    trainer = Trainer("cpu", max_steps=3, seed=1, val_every=1, default_callbacks=False)
    trainer.fit(policy, InMemory(batches(3)), InMemory(batches(2)))
    assert policy.drawn[:2] == policy.drawn[2:4] == policy.drawn[4:]
    assert policy.drawn[0] != policy.drawn[1]


def test_modes_come_back_module_by_module_also_when_validation_raises() -> None:
    class Fragile(MLP):
        fails = False

        def forward(self, batch: Batch) -> Tensor:
            if self.fails and not self.training:
                raise KeyError("in validation")
            return super().forward(batch)

    policy = Fragile()
    policy.net[0].eval()
    before = {name: module.training for name, module in policy.named_modules()}
    Trainer("cpu", max_steps=2, val_every=1, default_callbacks=False).fit(
        policy, InMemory(batches(2)), InMemory(batches(1))
    )
    assert {name: module.training for name, module in policy.named_modules()} == before
    policy.fails = True
    with pytest.raises(KeyError):
        Trainer("cpu").validate(policy, InMemory(batches(1)))
    assert {name: module.training for name, module in policy.named_modules()} == before
    assert torch.is_grad_enabled()


def test_validation_runs_in_eval_mode_without_gradients_under_the_runs_precision() -> None:
    seen: list[tuple[bool, bool, torch.dtype]] = []

    class Watching(MLP):
        def forward(self, batch: Batch) -> Tensor:
            seen.append((self.net[2].training, torch.is_grad_enabled(), self.net[0](batch.x).dtype))
            return super().forward(batch)

    Trainer("cpu", "bf16").validate(Watching(), InMemory(batches(1)))
    assert seen == [(False, False, torch.bfloat16)]


# When, and what if there is nothing -------------------------------------------------------------------------


class Steps(Callback):
    """At which steps validations ended, and what was told."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.events: list[dict[str, Any]] = []
        self.records: list[dict[str, Any]] = []

    def on_validation_end(self, trainer: Trainer, policy: nn.Module) -> None:
        self.steps.append(trainer.step)

    def on_log(self, trainer: Trainer, policy: nn.Module, record: Any) -> None:
        (self.events if "event" in record else self.records).append(dict(record))


@pytest.mark.parametrize(
    ("val_every", "steps"), [(2, [2, 4, 5]), (5, [5]), (1, [1, 2, 3, 4, 5]), (7, [5]), (None, [5]), (0, [5])]
)
def test_validation_comes_at_its_interval_and_once_at_the_end(val_every: int | None, steps: list[int]) -> None:
    watching = Steps()
    trainer = Trainer("cpu", max_steps=5, val_every=val_every, callbacks=[watching], default_callbacks=False)
    trainer.fit(mlp(), InMemory(batches(3)), InMemory(batches(2)))
    assert watching.steps == steps


def test_a_stopped_run_is_not_validated_again() -> None:
    class Stops(Steps):
        def on_validation_end(self, trainer: Trainer, policy: nn.Module) -> None:
            super().on_validation_end(trainer, policy)
            if trainer.step == 2:
                trainer.stop("enough")

    watching = Stops()
    Trainer("cpu", max_steps=9, val_every=2, callbacks=[watching], default_callbacks=False).fit(
        mlp(), InMemory(batches(3)), InMemory(batches(2))
    )
    assert watching.steps == [2]


def test_a_run_resumed_at_its_end_is_not_validated_twice() -> None:
    def run(resume: str | None, max_steps: int) -> list[tuple[int, bool]]:
        recorders: list[Callback] = [Checkpoint(), MetricsLog()]
        trainer = Trainer(
            "cpu", max_steps=max_steps, run_dir="run", seed=1, callbacks=recorders, default_callbacks=False
        )
        trainer.fit(mlp(), InMemory(batches(3)), InMemory(batches(1)), resume=resume)
        records = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
        return [(record["step"], "val/loss" in record) for record in records]

    assert run(None, 4) == [(4, False), (4, True)]
    assert run("last", 4) == [(4, False), (4, True)]
    assert run("last", 5) == [(4, False), (4, True), (5, False), (5, True)]


EMPTY: dict[str, Callable[[], Any]] = {
    "dataset": lambda: TensorDataset(torch.zeros(0, 6)),
    "loader": lambda: DataLoader(TensorDataset(torch.zeros(0, 6))),
    "iterable": lambda: InMemory([]),
}


@pytest.mark.parametrize("kind", EMPTY)
def test_validation_data_without_a_batch_is_told_once_and_not_passed_over_in_silence(kind: str) -> None:
    watching = Steps()
    trainer = Trainer("cpu", max_steps=3, val_every=1, log_every=1, callbacks=[watching], default_callbacks=False)
    trainer.fit(mlp(), InMemory(batches(3)), EMPTY[kind]())
    (event,) = watching.events
    assert event["event"] == "warning"
    assert "the data gave no batch" in event["message"]
    assert [record["step"] for record in watching.records] == [1, 2, 3]  # of training alone


@pytest.mark.parametrize("kind", EMPTY)
def test_validate_itself_refuses_data_without_a_batch(kind: str) -> None:
    with pytest.raises(ConfigError, match="the data gave no batch"):
        Trainer("cpu").validate(mlp(), EMPTY[kind]())


def test_validate_without_data_says_where_it_was_looked_for() -> None:
    with pytest.raises(ConfigError, match=r"validate got no val_data, and MLP has no\s+val_dataloader"):
        Trainer("cpu").validate(mlp())


def test_validate_before_and_after_a_run_gives_the_same_numbers_as_within() -> None:
    policy = mlp(dropout=0.5)
    trainer = Trainer("cpu", max_steps=2, seed=5, default_callbacks=False)
    trainer.fit(policy, InMemory(batches(2)), InMemory(batches(2, seed=3)))
    within = trainer.metrics["val/loss"]
    assert Trainer("cpu", seed=5).validate(policy, InMemory(batches(2, seed=3))) == {"val/loss": within}
    assert trainer.validate(policy, InMemory(batches(2, seed=3)))["val/loss"] == within
