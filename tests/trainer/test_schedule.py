"""Schedules advance in their intervals, and only by steps that landed."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, OneCycleLR, ReduceLROnPlateau, StepLR
from toys import InMemory, batches, mlp

from policyfit import ConfigError, Trainer, WarmupCosine
from policyfit.trainer.schedule import Schedule, as_schedule

Make = Callable[[Iterable[nn.Parameter]], Optimizer]


def fit(policy: nn.Module, make: Make | None = None, **settings: Any) -> Trainer:
    options = {name: settings.pop(name) for name in ("schedule", "val_data") if name in settings}
    trainer = Trainer("cpu", **{"max_steps": 4, "default_callbacks": False, **settings})
    trainer.fit(policy, InMemory(batches(4)), options.get("val_data"), optimizer=make, schedule=options.get("schedule"))
    return trainer


@pytest.mark.parametrize(("warmup", "total", "floor"), [(0, 10, 0.0), (3, 10, 0.1), (10, 10, 0.0), (20, 10, 0.5)])
def test_warmup_cosine_follows_its_formula(warmup: int, total: int, floor: float) -> None:
    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=2.0)
    schedule = WarmupCosine(optimizer, warmup_steps=warmup, total_steps=total, min_factor=floor)
    for step in range(25):
        if step < warmup:
            expected = (step + 1) / (warmup + 1)
        else:
            done = min(1.0, (step - warmup) / max(1, total - warmup))
            expected = floor + (1 - floor) * (1 + math.cos(math.pi * done)) / 2
        assert optimizer.param_groups[0]["lr"] == pytest.approx(2.0 * expected, abs=1e-12)
        optimizer.step()
        schedule.step()


def test_warmup_cosine_ends_exactly_at_its_floor_and_keeps_the_ratio_of_groups() -> None:
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (1.0, 10.0)]
    optimizer = SGD(groups)
    schedule = WarmupCosine(optimizer, warmup_steps=2, total_steps=6, min_factor=0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [pytest.approx(1 / 3), pytest.approx(10 / 3)]
    for _ in range(6):
        optimizer.step()
        schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 2.5]


@pytest.mark.parametrize(
    "wrong", [{"total_steps": 0}, {"total_steps": 5, "warmup_steps": -1}, {"total_steps": 5, "min_factor": 1.5}]
)
def test_warmup_cosine_refuses_settings_out_of_range(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="WarmupCosine"):
        WarmupCosine(SGD([nn.Parameter(torch.zeros(1))], lr=1.0), **wrong)


def halving(optimizer: Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda n: 0.5**n)


def test_a_schedule_of_the_run_counts_landed_steps_and_not_skips_or_micro_batches() -> None:
    seen = []

    def recording(optimizer: Optimizer) -> LambdaLR:
        def factor(step: int) -> float:
            seen.append(step)
            return 0.5**step

        return LambdaLR(optimizer, factor)

    trainer = Trainer("cpu", max_steps=3, accumulate=2, default_callbacks=False)
    trainer.fit(mlp(), InMemory(batches(8, poisoned=(0, 5))), optimizer=lambda p: SGD(p, lr=1.0), schedule=recording)
    assert (trainer.step, trainer.skipped) == (3, 3)
    asked = [0, *(0, 1, 10, 100, 1000, 10_000, 100_000)]  # when it is built, and for what a resume compares
    assert seen == [*asked, 1, 2, 3]
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.125


def test_an_epoch_schedule_advances_at_epoch_ends_every_so_many() -> None:
    policy: Any = mlp()
    optimizer = SGD(policy.parameters(), lr=1.0)
    epochs = {"scheduler": halving(optimizer), "interval": "epoch", "frequency": 2}
    policy.configure_optimizers = lambda: {"optimizer": optimizer, "lr_scheduler": epochs}
    fit(policy, max_steps=None, max_epochs=5)
    assert optimizer.param_groups[0]["lr"] == 0.25


def plateau(optimizer: Optimizer) -> ReduceLROnPlateau:
    return ReduceLROnPlateau(optimizer, factor=0.1, patience=0, threshold=1e9, threshold_mode="abs")


def test_reduce_on_plateau_of_the_run_looks_at_the_validation_loss_of_its_epoch() -> None:
    policy = mlp()
    trainer = fit(
        policy, lambda p: SGD(p, lr=1.0), schedule=plateau, val_data=InMemory(batches(2)), max_steps=None, max_epochs=3
    )
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.01)  # the first epoch sets the best


@pytest.mark.parametrize("log_every", [1, None])
def test_reduce_on_plateau_can_look_at_a_training_metric_of_its_epoch(log_every: int | None) -> None:
    policy: Any = mlp()
    optimizer = SGD(policy.parameters(), lr=1.0)
    by_loss = {"scheduler": plateau(optimizer), "monitor": "train/loss", "interval": "epoch"}
    policy.configure_optimizers = lambda: {"optimizer": optimizer, "lr_scheduler": by_loss}
    fit(policy, max_steps=None, max_epochs=3, log_every=log_every)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


class PoisonedAtFirst(InMemory):
    """All batches of the first epoch overflow."""

    def __iter__(self) -> Iterator[Any]:
        held, self.held = self.held, batches(4)
        return iter(held)


@pytest.mark.parametrize("monitor", ["train/loss", "val/loss"])
def test_reduce_on_plateau_waits_for_the_first_update_that_lands(monitor: str) -> None:
    policy: Any = mlp()
    optimizer = SGD(policy.parameters(), lr=1.0)
    schedule = plateau(optimizer)
    by_metric = {"scheduler": schedule, "monitor": monitor, "interval": "epoch"}
    policy.configure_optimizers = lambda: {"optimizer": optimizer, "lr_scheduler": by_metric}
    trainer = Trainer("cpu", max_epochs=3, default_callbacks=False)
    trainer.fit(policy, PoisonedAtFirst(batches(4, poisoned=range(4))), InMemory(batches(2)))
    assert (trainer.step, trainer.skipped) == (8, 4)
    assert schedule.last_epoch == 2
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)


def test_reduce_on_plateau_names_the_metrics_when_its_own_is_not_among_them() -> None:
    with pytest.raises(ConfigError, match=r"looks at 'val/loss', which is not among the metrics \(.*train/loss"):
        fit(mlp(), lambda p: SGD(p, lr=1.0), schedule=plateau, max_steps=None, max_epochs=1)


def test_reduce_on_plateau_by_steps_is_refused() -> None:
    optimizer = SGD(mlp().parameters(), lr=1.0)
    with pytest.raises(ConfigError, match=r"ReduceLROnPlateau counts epochs here.*\n.*interval='epoch'"):
        as_schedule({"scheduler": plateau(optimizer), "interval": "step"}, [optimizer])


def test_a_schedule_of_the_run_needs_one_optimizer() -> None:
    policy: Any = mlp()
    policy.configure_optimizers = lambda: [SGD([p], lr=1.0) for p in policy.parameters()]
    with pytest.raises(ConfigError, match="gives 4 optimizers"):
        fit(policy, schedule=halving)


@pytest.mark.parametrize(
    "wrong", [lambda o: None, lambda o: SGD(mlp().parameters()), lambda o: halving(SGD(mlp().parameters()))]
)
def test_what_is_no_schedule_of_the_optimizer_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"torch learning rate scheduler|not one of the run's"):
        fit(mlp(), schedule=wrong)


@pytest.mark.parametrize(
    "make",
    [
        halving,
        lambda o: StepLR(o, 3),
        lambda o: ExponentialLR(o, 0.9),
        lambda o: OneCycleLR(o, max_lr=1.0, total_steps=40),
        lambda o: WarmupCosine(o, warmup_steps=4, total_steps=12),
        plateau,
    ],
)
def test_the_state_of_a_schedule_goes_on_as_if_it_had_not_stopped(make: Any) -> None:
    def made() -> tuple[Optimizer, Schedule]:
        optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=1.0, momentum=0.9)
        return optimizer, Schedule(make(optimizer), frequency=2, monitor="loss" if make is plateau else None)

    def advance(optimizer: Optimizer, schedule: Schedule, times: int) -> list[float]:
        rates = []
        for _ in range(times):
            optimizer.step()
            schedule.advance({"loss": 1.0})
            rates.append(float(optimizer.param_groups[0]["lr"]))
        return rates

    straight, resumed = made(), made()
    expected = advance(*straight, 11)
    stopped = made()
    advance(*stopped, 5)
    resumed[0].load_state_dict(stopped[0].state_dict())
    resumed[1].load_state_dict(json.loads(json.dumps(stopped[1].state_dict())))
    assert advance(*resumed, 6) == expected[5:]
    assert resumed[1].seen == 11


def test_one_cycle_may_be_as_long_as_the_run() -> None:
    trainer = fit(
        mlp(), lambda p: SGD(p, lr=1.0, momentum=0.9), schedule=lambda o: OneCycleLR(o, max_lr=1.0, total_steps=4)
    )
    assert trainer.step == 4
