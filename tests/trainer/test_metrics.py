"""Means of what is reported."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from toys import InMemory, batches, mlp

from policyfit import Callback, ConfigError, Trainer
from policyfit.trainer.metrics import Means
from policyfit.trainer.restore import _load_means


def test_a_mean_is_over_the_values_since_the_last_read() -> None:
    means = Means()
    for value in (1.0, torch.tensor(2.0), 3, np.float32(4.0), True):
        means.add("a", value)
    means.add("b", torch.tensor([[5.0]]))
    assert means.read() == {"a": 11 / 5, "b": 5.0}
    means.add("a", 7)
    assert means.read() == {"a": 7.0}
    assert means.read() == {}


def test_more_values_than_are_kept_one_by_one_have_the_same_mean() -> None:
    means = Means()
    for value in range(1000):
        means.add("a", torch.tensor(float(value)))
    assert means.read() == {"a": 499.5}


def test_values_that_are_not_finite_are_left_out_and_a_mean_of_none_is_nan() -> None:
    means = Means()
    for value in (math.nan, torch.tensor(math.inf), 2.0, torch.tensor(4.0), -math.inf):
        means.add("a", value)
    means.add("b", torch.tensor(math.nan))
    found = means.read()
    assert found["a"] == 3.0
    assert math.isnan(found["b"])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.bool])
def test_a_tensor_of_any_type_counts_as_a_number(dtype: torch.dtype) -> None:
    means = Means()
    means.add("a", torch.tensor(1, dtype=dtype))
    means.add("a", torch.tensor(0.0))
    found = means.read()
    assert found == {"a": 0.5}
    assert type(found["a"]) is float


@pytest.mark.parametrize(
    ("value", "message"), [(torch.zeros(2), r"shape \(2,\)"), ("good", "'good'"), (None, "None"), ({}, "{}")]
)
def test_what_is_no_number_is_refused_by_name(value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"The metric 'mine' must be a number or a scalar tensor, got {message}"):
        Means().add("mine", value)


class Whole(Tensor):
    """As a DTensor is told: a part that can be put together."""

    def full_tensor(self) -> Tensor:
        return self


def test_a_number_of_shards_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"The metric 'norm' is of a weight or gradient in shards.*\nReport value."):
        Means().add("norm", torch.ones(()).as_subclass(Whole))


def test_means_that_are_read_and_kept_are_read_again_with_what_is_added() -> None:
    means = Means()
    means.add("a", 1.0)
    assert means.read(anew=False) == {"a": 1.0}
    means.add("a", 2.0)
    assert means.read() == {"a": 1.5}
    assert means.read() == {}


class LogsOutcomes(Callback):
    def on_update_end(self, trainer: Trainer, policy: Any, outcome: Any) -> None:
        trainer.log("number", float(outcome.step))


class Asks(Callback):
    """Settles updates when it likes."""

    def on_train_batch_end(self, trainer: Trainer, policy: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % 3 == 1:
            assert trainer.step >= 0


@pytest.mark.parametrize("others", [[], [Asks()]])
def test_what_is_logged_of_an_update_counts_once_whoever_settles_it(others: list[Callback]) -> None:
    trainer = Trainer("cpu", max_steps=6, accumulate=4, default_callbacks=False, callbacks=[LogsOutcomes(), *others])
    trainer.fit(mlp(), InMemory(batches(24)))
    assert trainer.metrics["number"] == 3.5


def test_a_value_that_is_written_over_later_counts_as_it_was() -> None:
    means, counter = Means(), torch.zeros(())
    for _ in range(3):
        counter += 1
        means.add("counter", counter)
    assert means.read() == {"counter": 2.0}


def test_neither_graphs_nor_large_tensors_are_kept_alive() -> None:
    means = Means()
    weight = torch.ones(100, requires_grad=True)
    for _ in range(20):
        means.add("loss", (weight * 2).sum())
        means.add("first", (weight * 2)[0])
        means.add("detached", (weight * 2).detach()[0])
    held = [t for values in means._scalars.values() for t, _ in values]
    assert len(held) == 60
    assert all(t.grad_fn is None and t.untyped_storage().nbytes() == t.element_size() for t in held)


def test_adding_does_not_read_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    means = Means()

    def refuse(*_: Any) -> None:
        raise AssertionError("a tensor was read")

    with monkeypatch.context() as patch:
        for name in ("item", "tolist", "__float__", "__bool__", "numpy", "cpu"):
            patch.setattr(Tensor, name, refuse)
        for value in torch.arange(600.0).unbind():
            means.add("a", value)
    assert means.read() == {"a": 299.5}


def test_the_state_goes_through_json_and_goes_on() -> None:
    means, other = Means(), Means()
    for value in (1.0, torch.tensor(2.0)):
        means.add("a", value)
    other.load_state_dict(json.loads(json.dumps(means.state_dict())))
    for part in (means, other):
        part.add("a", torch.tensor(6.0))
    assert means.read() == other.read() == {"a": 3.0}


@pytest.mark.accelerator
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs 1 CUDA device, found 0")
def test_one_name_may_come_from_two_devices() -> None:
    means = Means()
    means.add("a", torch.tensor(1.0, device="cuda"))
    means.add("a", torch.tensor(3.0))
    assert means.read() == {"a": 2.0}


def test_values_weigh_as_much_as_they_are_said_to_and_nothing_at_0() -> None:
    means = Means()
    for value, weight in ((torch.tensor(1.0), 1.0), (torch.tensor(4.0), 2.0), (math.nan, 0.0), (7.0, 1.0)):
        means.add("loss", value, weight)
    assert means.read() == {"loss": 4.0}


def test_means_that_other_ranks_go_on_with_weigh_as_much_as_an_update_of_theirs() -> None:
    of_ranks = [{"loss": [3.0, 2.0]}, {"loss": [5.0, 2.0], "only there": [1.0, 1.0]}]
    saved = {"means": {"loss": [8.0, 4.0], "only there": [1.0, 1.0]}, "means_of_ranks": of_ranks}
    found = []
    for world_size, rank in ((2, 1), (1, 0), (4, 0), (4, 1)):
        ranks = SimpleNamespace(world_size=world_size, rank=rank, is_main=rank == 0)
        run: Any = SimpleNamespace(distribution=ranks, means=Means())
        _load_means(run, saved, 2)
        found.append(run.means.state_dict())
    assert found[0] == of_ranks[1]
    assert found[1] == {"loss": [4.0, 2.0], "only there": [0.5, 0.5]}
    assert found[2:] == [{"loss": [16.0, 8.0], "only there": [2.0, 2.0]}, {}]


def test_means_over_ranks_are_those_of_all_their_values() -> None:
    means = Means()
    means.add("loss", 1.0)
    other = {"loss": [8.0, 2.0], "only there": [3.0, 1.0]}
    assert means.read(lambda own: [own, other]) == {"loss": 3.0, "only there": 3.0}
