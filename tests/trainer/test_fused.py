"""Optimizers in their fused form, and those that keep another."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, Adafactor, Adagrad, Adam, AdamW, Optimizer, RMSprop, Rprop
from toys import InMemory, assert_equal, batches, by_hand, mlp, weights

from policyfit import ConfigError, Trainer
from policyfit.trainer.fused import prepare_optimizer


def fit(policy: nn.Module, make: Any = None) -> Trainer:
    trainer = Trainer("cpu", max_steps=4, default_callbacks=False)
    trainer.fit(policy, InMemory(batches(4)), optimizer=make)
    return trainer


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
    assert prepare_optimizer(optimizer) == "AdamW (not fused: one waiting read an update)"
    assert [group["fused"] for group in optimizer.param_groups] == [None, False]


def test_an_optimizer_without_a_fused_form_or_with_a_history_is_left_alone() -> None:
    class Own(AdamW):
        pass

    history = by_hand(mlp(), lambda p: AdamW(p, lr=1e-2))
    for optimizer in (RMSprop(mlp().parameters()), Own(mlp().parameters()), history):
        before = copy.deepcopy(optimizer.state_dict()["param_groups"])
        assert "not fused" in prepare_optimizer(optimizer)
        assert optimizer.state_dict()["param_groups"] == before


@pytest.mark.parametrize("fused", [None, True])
def test_sgd_with_dampening_uses_the_form_that_a_first_skip_does_not_corrupt(fused: bool | None) -> None:
    ours, theirs = mlp(), mlp()
    trainer = fit(ours, lambda p: SGD(p, lr=0.1, momentum=0.9, dampening=0.5, fused=fused))
    by_hand(theirs, lambda p: SGD(p, lr=0.1, momentum=0.9, dampening=0.5, fused=False, foreach=False))
    assert trainer.optimizers[0].param_groups[0]["fused"] is not True
    assert "not fused" in trainer.plan.chosen("optimizer")
    for name, value in weights(theirs).items():
        torch.testing.assert_close(weights(ours)[name], value)  # foreach and single-tensor may differ in the last bit


@pytest.mark.parametrize("kind", [Adafactor, Rprop])
def test_an_optimizer_that_cannot_move_shards_is_refused_before_the_first_step(kind: type[Optimizer]) -> None:
    optimizer = kind(mlp().parameters())  # type: ignore[call-arg]
    assert "not fused" in prepare_optimizer(optimizer)
    with pytest.raises(ConfigError, match=rf"{kind.__name__} cannot move shards.*\nUse AdamW, or distributed='ddp'"):
        prepare_optimizer(optimizer, sharded=True)


def test_lbfgs_is_refused_with_another_optimizer_as_advice() -> None:
    with pytest.raises(ConfigError, match=r"LBFGS calls the loss through a closure.*\nUse AdamW"):
        fit(mlp(), LBFGS)
