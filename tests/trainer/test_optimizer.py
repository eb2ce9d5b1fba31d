"""Optimizers in their fused form, schedules in their intervals."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, OneCycleLR, ReduceLROnPlateau, StepLR
from toys import InMemory, assert_equal, batches, mlp, weights

from policyfit import ConfigError, Trainer, WarmupCosine
from policyfit.trainer.optimizer import Schedule, as_schedule, prepare

Make = Callable[[Iterable[nn.Parameter]], Optimizer]


def fit(policy: nn.Module, make: Make | None = None, **settings: Any) -> Trainer:
    options = {name: settings.pop(name) for name in ("schedule", "val_data") if name in settings}
    trainer = Trainer("cpu", **{"max_steps": 4, "default_callbacks": False, **settings})
    trainer.fit(policy, InMemory(batches(4)), options.get("val_data"), optimizer=make, schedule=options.get("schedule"))
    return trainer


def by_hand(policy: nn.Module, make: Make, steps: int = 4) -> Optimizer:
    optimizer = make(policy.parameters())
    for batch in batches(steps):
        policy(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


# The fused form ---------------------------------------------------------------------------------------------

FUSED: dict[str, Callable[..., Optimizer]] = {
    "AdamW": lambda p, **k: AdamW(p, lr=1e-2, weight_decay=0.1, **k),
    "AdamW amsgrad": lambda p, **k: AdamW(p, lr=1e-2, amsgrad=True, **k),
    "Adam": lambda p, **k: Adam(p, lr=1e-2, **k),
    "SGD": lambda p, **k: SGD(p, lr=1e-2, momentum=0.9, nesterov=True, **k),
    "Adagrad": lambda p, **k: Adagrad(p, lr=1e-2, **k),
}


@pytest.mark.parametrize("name", FUSED)
def test_an_optimizer_that_leaves_fused_open_is_switched_with_the_bits_of_one_built_fused(name: str) -> None:
    ours, theirs = mlp(), mlp()
    trainer = fit(ours, FUSED[name])
    by_hand(theirs, lambda p: FUSED[name](p, fused=True))
    assert_equal(weights(ours), weights(theirs))
    assert trainer.optimizers[0].param_groups[0]["fused"] is True
    assert trainer.plan.chosen("optimizer") == f"{name.split()[0]} (fused, which fused=None left open)"


@pytest.mark.parametrize("choice", [{"fused": False}, {"foreach": True}, {"fused": False, "foreach": False}])
def test_an_optimizer_that_chose_its_form_keeps_it(choice: dict[str, Any]) -> None:
    ours, theirs = mlp(), mlp()
    trainer = fit(ours, lambda p: AdamW(p, lr=1e-2, **choice))
    optimizer = by_hand(theirs, lambda p: AdamW(p, lr=1e-2, **choice))
    assert_equal(weights(ours), weights(theirs))
    for key in ("fused", "foreach"):
        assert trainer.optimizers[0].param_groups[0][key] is optimizer.param_groups[0][key]
    assert "not fused: one waiting read an update" in trainer.plan.chosen("optimizer")


def test_one_group_that_chose_its_form_keeps_all_of_the_optimizer_as_it_is() -> None:
    policy = mlp()
    first, *rest = policy.parameters()
    groups: list[dict[str, Any]] = [{"params": [first]}, {"params": rest, "fused": False}]
    optimizer = AdamW(groups)
    assert prepare(optimizer, switch=True) == "AdamW (not fused: one waiting read an update)"
    assert [group["fused"] for group in optimizer.param_groups] == [None, False]


def test_an_optimizer_without_a_fused_form_or_with_a_history_is_left_alone() -> None:
    class Own(AdamW):
        pass

    history = by_hand(mlp(), lambda p: AdamW(p, lr=1e-2))
    for optimizer in (RMSprop(mlp().parameters()), Own(mlp().parameters()), history):
        before = copy.deepcopy(optimizer.state_dict()["param_groups"])
        assert "not fused" in prepare(optimizer, switch=True)
        assert optimizer.state_dict()["param_groups"] == before


def test_without_the_switch_nothing_is_switched() -> None:
    optimizer = AdamW(mlp().parameters())
    assert "not fused" in prepare(optimizer, switch=False)
    assert optimizer.param_groups[0]["fused"] is None


@pytest.mark.parametrize("fused", [None, True])
def test_sgd_with_dampening_uses_the_form_that_a_first_skip_does_not_corrupt(fused: bool | None) -> None:
    ours, theirs = mlp(), mlp()
    trainer = fit(ours, lambda p: SGD(p, lr=0.1, momentum=0.9, dampening=0.5, fused=fused))
    by_hand(theirs, lambda p: SGD(p, lr=0.1, momentum=0.9, dampening=0.5, fused=False, foreach=False))
    assert trainer.optimizers[0].param_groups[0]["fused"] is not True
    assert "not fused" in trainer.plan.chosen("optimizer")
    for name, value in weights(theirs).items():
        torch.testing.assert_close(weights(ours)[name], value)  # foreach and single-tensor may differ in the last bit


def test_lbfgs_is_refused_with_another_optimizer_as_advice() -> None:
    with pytest.raises(ConfigError, match=r"LBFGS calls the loss through a closure.*Use AdamW"):
        fit(mlp(), LBFGS)


def test_one_parameter_in_two_optimizers_is_refused_by_name() -> None:
    policy: Any = mlp()
    policy.configure_optimizers = lambda: [SGD(policy.parameters(), lr=1.0), SGD([policy.net[0].bias], lr=1.0)]
    with pytest.raises(ConfigError, match=r"net\.0\.bias stands in two optimizers"):
        fit(policy)


def test_trainable_parameters_that_no_optimizer_has_are_named_in_the_plan() -> None:
    policy: Any = mlp()
    policy.net[3].requires_grad_(False)
    policy.configure_optimizers = lambda: SGD([policy.net[0].weight], lr=1.0)
    before = weights(policy)
    trainer = fit(policy)
    assert "no optimizer has these trainable parameters, so they stay as they are: net.0.bias" in trainer.plan.notes
    assert torch.equal(policy.net[0].bias, before["net.0.bias"])


@pytest.mark.parametrize("wrong", [AdamW(mlp().parameters()), "AdamW", lambda p: None])
def test_what_does_not_make_an_optimizer_is_refused_with_an_example(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"must be a function that makes an optimizer.*\n.*lambda parameters"):
        fit(mlp(), wrong)


def test_without_an_optimizer_it_is_adamw_as_torch_sets_it_up() -> None:
    ours, theirs = mlp(), mlp()
    trainer = fit(ours)
    by_hand(theirs, lambda p: AdamW(p, fused=True))
    assert_equal(weights(ours), weights(theirs))
    assert next(line.reason for line in trainer.plan.lines if line.what == "optimizer").startswith(
        "AdamW, since neither"
    )


def test_frozen_parameters_are_not_in_the_default_optimizer() -> None:
    policy = mlp()
    policy.net[0].requires_grad_(False)
    before = weights(policy)
    trainer = fit(policy)
    assert len(trainer.optimizers[0].param_groups[0]["params"]) == 2
    assert torch.equal(weights(policy)["net.0.weight"], before["net.0.weight"])


# Schedules --------------------------------------------------------------------------------------------------


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
    assert seen == [0, 1, 2, 3]
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
