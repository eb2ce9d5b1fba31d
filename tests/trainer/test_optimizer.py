"""Where optimizers come from, and what they move."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW
from toys import InMemory, assert_equal, batches, by_hand, mlp, weights

from policyfit import ConfigError, Trainer


def fit(policy: nn.Module, make: Any = None) -> Trainer:
    trainer = Trainer("cpu", max_steps=4, default_callbacks=False)
    trainer.fit(policy, InMemory(batches(4)), optimizer=make)
    return trainer


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
