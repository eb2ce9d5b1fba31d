"""Where an overflow was, where it began, and that looking for it changes nothing."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reads import Reads, ReadsPerBatch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.checkpoint import checkpoint
from toys import MLP, Batch, InMemory, assert_equal, batches, mlp, weights

from policyfit import FP16, Callback, ConfigError, OverflowReport, Trainer
from policyfit.trainer import state
from policyfit.trainer.cli import main

INF, NAN = float("inf"), float("nan")


def precision_of(name: str) -> Any:
    return FP16({"init_scale": 1024.0, "growth_interval": 3}, allow_cpu=True) if name == "fp16" else name


class Log(Callback):
    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.records: list[dict[str, Any]] = []

    def on_log(self, trainer: Trainer, policy: nn.Module, record: Any) -> None:
        (self.events if "event" in record else self.records).append(dict(record))


def marked(n: int, **factors: float) -> list[Batch]:
    """``n`` micro-batches; ``_3=inf`` gives the one with number 3 that factor, by which policies here misbehave."""
    by_number = {int(name[1:]): factor for name, factor in factors.items()}
    return [b._replace(factor=torch.tensor(by_number.get(i, 1.0))) for i, b in enumerate(batches(n))]


def fit(policy: nn.Module, data: list[Batch], report: Callback, *others: Callback, **settings: Any) -> Log:
    log = Log()
    settings = {"max_epochs": 1, "seed": 1, "default_callbacks": False, **settings}
    trainer = Trainer("cpu", callbacks=[report, log, *others], **settings)
    trainer.fit(policy, InMemory(data), optimizer=lambda p: SGD(p, lr=1e-3))
    assert [event["event"] for event in log.events] == ["overflow"] * trainer.skipped
    return log


def only(log: Log) -> dict[str, Any]:
    (event,) = log.events
    return event


@pytest.fixture(autouse=True)
def no_hook_is_left() -> Iterator[None]:
    yield
    assert not torch_module._has_any_global_hook()  # type: ignore[no-untyped-call]


# What was reached -------------------------------------------------------------------------------------------


class BadGradients(MLP):
    """Where the factor is 2, some gradients are bad although loss and forward are fine."""

    def __init__(self) -> None:
        super().__init__()
        self.bad = False
        for name, value in (("net.0.weight", INF), ("net.3.weight", NAN), ("net.3.bias", -INF)):
            parameter: Any = self.get_parameter(name)
            parameter.register_hook(lambda g, value=value: g * value if self.bad else g)

    def forward(self, batch: Batch) -> Tensor:
        self.bad = bool(batch.factor == 2)
        return super().forward(batch._replace(factor=torch.tensor(1.0)))


def test_the_worst_parameters_and_modules_of_that_very_update_come_first() -> None:
    event = only(fit(BadGradients(), marked(6, _2=2.0), OverflowReport()))
    assert event == {
        "step": 2,
        "event": "overflow",
        "update": 3,
        "reason": "non_finite",
        "loss_finite": True,
        "parameters": ["net.3.weight", "net.0.weight", "net.3.bias"],
        "modules": ["net.3", "net.0"],
        "message": "the loss was finite, but 3 of 4 gradients were not finite, in net.3, net.0; worst: net.3.weight",
    }


def test_the_ten_worst_are_named() -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(nn.Linear(6, 6, bias=False) for _ in range(12)))

        def forward(self, batch: Batch) -> Tensor:
            return self.layers(batch.x).square().mean() * batch.factor  # type: ignore[no-any-return]

    event = only(fit(Deep(), marked(2, _1=INF), OverflowReport()))
    assert (len(event["parameters"]), len(event["modules"])) == (10, 10)
    assert "12 of 12 gradients were not finite" in event["message"]


@pytest.mark.parametrize("replay", ["false", 0.5, 1, None])
def test_a_replay_that_is_neither_true_nor_false_is_refused(replay: Any) -> None:
    with pytest.raises(ConfigError, match=r"OverflowReport\.replay must be true or false, got"):
        OverflowReport(replay=replay)


def test_a_loss_that_is_not_finite_is_told_apart_from_a_gradient_that_is_not() -> None:
    log = fit(BadGradients(), marked(6, _1=2.0), OverflowReport())
    assert only(log)["loss_finite"] is True
    log = fit(mlp(), marked(6, _1=INF, _4=NAN), OverflowReport())
    assert [event["loss_finite"] for event in log.events] == [False, False]
    assert log.events[0]["message"].startswith("the loss was inf or NaN, and 4 of 4 gradients were not finite")


class Asking(Callback):
    """Settles the update before, at one of the moments at which one can ask."""

    def __init__(self, when: Callable[[], bool]) -> None:
        self.when = when

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if self.when():
            assert trainer.step >= 0

    on_train_batch_end = on_after_backward = on_train_batch_start  # type: ignore[assignment]


@pytest.mark.parametrize("replay", [False, True])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_whenever_an_update_is_settled_its_own_losses_are_looked_at(accumulate: int, replay: bool) -> None:
    coin = random.Random(0)
    data = marked(18, _0=2.0, _4=INF, _10=2.0, _11=2.0, _13=INF)
    found = []
    for asks in (lambda: False, lambda: True, lambda: coin.random() < 0.4):
        for front in (True, False):
            report, asking = OverflowReport(replay), Asking(asks)
            first, second = (asking, report) if front else (report, asking)
            torch.manual_seed(0)
            policy = Both()
            found.append(fit(policy, data, first, second, accumulate=accumulate).events)
    assert all(events == found[0] for events in found)
    losses = {1: [True, False, True, True, False], 3: [True, False, True, False]}[accumulate]
    assert [event["loss_finite"] for event in found[0]] == losses
    if replay:
        numbers = {1: [0, 4, 10, 11, 13], 3: [0, 4, 10, 13]}[accumulate]
        assert [event["origin"]["micro_batch"] for event in found[0]] == numbers


class Both(BadGradients):
    """An infinite factor makes an infinite loss too."""

    def forward(self, batch: Batch) -> Tensor:
        return super().forward(batch) * (batch.factor if batch.factor == INF else 1.0)


def test_gradients_whose_norm_overflows_are_named_by_their_size_and_not_replayed() -> None:
    reference = mlp()
    reference(batches(2)[1]).backward()
    norms = {name: float(p.grad.norm()) for name, p in reference.named_parameters() if p.grad is not None}
    # A square root of float32's largest is 1.84e19: above it the sum of squares overflows, no part of it does.
    factor = 2e19 / float(torch.tensor(list(norms.values())).norm())
    event = only(fit(mlp(), marked(4, _1=factor), OverflowReport(replay=True), max_steps=2))
    assert event["parameters"] == sorted(norms, key=lambda name: -norms[name])
    assert (event["reason"], event["loss_finite"]) == ("norm_overflow", True)
    assert "the gradients are finite, but their norm overflows float32" in event["message"]
    assert "origin" not in event


class Mends(Callback):
    """Makes gradients finite again, too late for the guard."""

    def on_before_optimizer_step(self, trainer: Trainer, policy: nn.Module, optimizer: Optimizer) -> None:
        for parameter in policy.parameters():
            assert parameter.grad is not None
            parameter.grad.nan_to_num_(0.0, 0.0, 0.0)


def test_gradients_that_a_callback_has_mended_are_reported_without_names() -> None:
    event = only(fit(BadGradients(), marked(4, _1=2.0), OverflowReport(), Mends()))
    assert (event["parameters"], event["modules"]) == ([], [])
    assert "is not any more" in event["message"]


def test_a_window_without_gradients_is_no_overflow() -> None:
    class Constant(MLP):
        def forward(self, batch: Batch) -> Tensor:
            return super().forward(batch) if batch.factor == 1 else torch.zeros(())

    log = Log()
    trainer = Trainer("cpu", max_epochs=1, default_callbacks=False, callbacks=[OverflowReport(replay=True), log])
    trainer.fit(Constant(), InMemory(marked(6, _2=2.0)))
    assert (trainer.skipped, log.events) == (1, [])


def test_a_run_has_it_by_default_and_writes_one_event_a_skip() -> None:
    trainer = Trainer("cpu", max_steps=6, run_dir="run")
    trainer.fit(mlp(), InMemory(marked(9, _1=INF, _5=NAN)))
    records = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert [r["update"] for r in records if r.get("event") == "overflow"] == [2, 6]
    assert trainer.skipped == 2


def test_overflows_while_the_scale_is_found_are_marked() -> None:
    precision = FP16({"init_scale": 2.0**40}, allow_cpu=True)
    log = fit(mlp(), marked(60, _50=INF), OverflowReport(), precision=precision)
    marks = [event.get("calibration", False) for event in log.events]
    assert marks == [event["step"] == 0 for event in log.events]
    assert marks.count(True) > 5
    assert not marks[-1]


@pytest.mark.parametrize("precision", ["no", FP16({"init_scale": 1024.0}, allow_cpu=True)])
def test_nothing_is_read_before_an_update_was_skipped(precision: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = ReadsPerBatch(Reads(monkeypatch))
    fit(mlp(), marked(40, _30=INF), OverflowReport(), reads, precision=precision, accumulate=2, log_every=None)
    assert len(set(reads.counts[:31])) == 1
    assert reads.counts[-1] > reads.counts[0]


# Where it began ---------------------------------------------------------------------------------------------


class Bad(nn.Module):
    """Spoils its output, or only its gradient, where it is told to."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor, bad: Tensor) -> Tensor:
        if not bad:
            return x
        if self.how == "gradient":
            return x + (x * 0).sqrt()
        if self.how == "function":
            return x + Spoil.apply(x)  # type: ignore[no-any-return, no-untyped-call]
        return x * INF


class Spoil(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * NAN


class Chain(nn.Module):
    """first, middle, relu in place, last; where the factor is 2, ``how`` says what goes wrong."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.first, self.middle, self.last = nn.Linear(6, 6), nn.ModuleDict({"bad": Bad(how)}), nn.Linear(6, 3)
        self.relu = nn.ReLU(inplace=True)
        self.scores = nn.Parameter(torch.ones(6))

    def forward(self, batch: Batch) -> Any:
        bad = batch.factor == 2
        x = self.middle["bad"](
            self.first(batch.x), bad if self.how in ("output", "gradient", "function") else bad & False
        )
        if bad and self.how == "between":
            x = x / 0
        if bad and self.how == "sqrt":
            x = x + (x * 0).sqrt()
        if bad and self.how == "twice":
            x = self.middle["bad"](x, bad)
        loss = nn.functional.mse_loss(self.last(self.relu(x * self.scores)), batch.y)
        if bad and self.how == "loss":
            loss = loss * (loss.detach() / 0)
        return loss, {"never": torch.tensor(NAN)}


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize(
    ("how", "origin", "text"),
    [
        ("output", {"what": "output", "module": "middle.bad", "op": None}, "the output of middle.bad"),
        ("twice", {"what": "output", "module": "middle.bad (call 2)", "op": None}, "the output of middle.bad (call 2)"),
        ("between", {"what": "input", "module": "relu", "op": None}, "the input of relu"),
        ("loss", {"what": "loss", "module": "(policy)", "op": None}, "the loss itself"),
        (
            "gradient",
            {"what": "gradient", "module": "middle.bad", "op": "SqrtBackward0"},
            "the gradient of SqrtBackward0, in middle.bad",
        ),
        (
            "function",
            {"what": "gradient", "module": "middle.bad", "op": "SpoilBackward"},
            "the gradient of SpoilBackward, in middle.bad",
        ),
        (
            "sqrt",
            {"what": "gradient", "module": "(policy)", "op": "SqrtBackward0"},
            "the gradient of SqrtBackward0, in (policy)",
        ),
    ],
)
def test_a_replay_names_where_it_began(
    how: str, origin: dict[str, Any], text: str, accumulate: int, precision: str
) -> None:
    torch.manual_seed(0)
    event = only(
        fit(Chain(how), marked(9, _4=2.0), OverflowReport(replay=True), precision=precision_of(precision),
            accumulate=accumulate)
    )  # fmt: skip
    assert event["origin"] == {**origin, "micro_batch": 4, "batch": ()}
    assert f"; it began in {text}" in event["message"]
    assert "(micro-batch 4 of the epoch)" in event["message"]
    assert event["loss_finite"] is (origin["what"] == "gradient")


def test_a_gradient_that_a_hook_of_its_parameter_spoils_is_named_by_the_parameter() -> None:
    event = only(fit(BadGradients(), marked(4, _1=2.0), OverflowReport(replay=True)))
    assert event["origin"] == {"what": "gradient", "module": "net.0.weight", "op": None, "micro_batch": 1, "batch": ()}


def test_a_batch_that_is_not_finite_is_named_by_its_entries() -> None:
    data = marked(4)
    data[2].x[3, 1] = NAN
    event = only(fit(mlp(), data, OverflowReport(replay=True)))
    assert event["origin"] == {"what": "input", "module": "net.0", "op": None, "micro_batch": 2, "batch": ("x",)}
    assert "the batch holds inf or NaN in x" in event["message"]


class Masked(nn.Module):
    """An attention whose mask is meant to hold infinities, and whose scores overflow where the factor is 2."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.out = nn.Linear(6, 3)
        self.register_buffer("mask", torch.full((8, 8), -INF).triu(1))

    def forward(self, batch: Batch) -> Tensor:
        x = batch.x[None]
        x, _ = self.attention(x, x, x, attn_mask=self.mask, need_weights=False)
        x = self.out(x)
        if batch.factor == 2:
            x = x.exp() ** 1000
        return nn.functional.mse_loss(x[0], batch.y)


def test_a_mask_of_infinities_that_is_meant_is_not_taken_for_the_origin() -> None:
    torch.manual_seed(0)
    event = only(fit(Masked(), marked(4, _1=2.0), OverflowReport(replay=True)))
    assert event["origin"]["what"] in ("loss", "gradient")


class Branching(nn.Module):
    """Goes another way through its layers for every micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.bad, self.out = Bad("output"), nn.Linear(6, 3)
        self.ways: list[list[int]] = []

    def forward(self, batch: Batch) -> Tensor:
        way = [int(i) for i in torch.randperm(4)[: int(torch.randint(1, 4, ()))]]
        self.ways.append(way)
        x = batch.x
        for i in way:
            x = self.bad(torch.tanh(self.layers[i](x)), batch.factor == 2)
        return nn.functional.mse_loss(self.out(x), batch.y)


def test_a_forward_with_a_way_of_its_own_is_replayed_on_the_same_way() -> None:
    torch.manual_seed(0)
    policy = Branching()
    log = fit(policy, marked(12, _3=2.0, _7=2.0), OverflowReport(replay=True))
    assert [event["origin"]["module"] for event in log.events] == ["bad", "bad"]
    assert policy.ways[4] == policy.ways[3]  # the replay of micro-batch 3
    assert policy.ways[9] == policy.ways[8]


class Recomputing(MLP):
    """Its layers are computed again in backward."""

    def forward(self, batch: Batch) -> Tensor:
        x = checkpoint(self.net, batch.x, use_reentrant=False)
        assert isinstance(x, Tensor)
        x = x + (x * 0).sqrt() if batch.factor == 2 else x
        return nn.functional.mse_loss(x, batch.y)


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_layers_that_are_recomputed_in_backward_are_replayed_too(precision: str) -> None:
    event = only(fit(Recomputing(), marked(4, _1=2.0), OverflowReport(replay=True), precision=precision_of(precision)))
    assert (event["origin"]["op"], event["origin"]["module"]) == ("SqrtBackward0", "(policy)")


class Writes(MLP):
    """Writes into its batch, so that the overflow would not come a second time."""

    def forward(self, batch: Any) -> Tensor:
        batch["seen"] = batch.pop("new")
        loss = super().forward(Batch(batch["x"], batch["y"], batch["factor"].clone()))
        batch["factor"].fill_(1.0)
        return loss


def test_a_batch_that_the_forward_writes_into_is_replayed_as_it_came() -> None:
    data: list[Any] = [{**b._asdict(), "new": b.x} for b in marked(4, _1=INF)]
    event = only(fit(Writes(), data, OverflowReport(replay=True)))
    assert event["origin"] == {"what": "loss", "module": "(policy)", "op": None, "micro_batch": 1, "batch": ("factor",)}


class Limited(torch.autograd.Function):
    """Spoils gradients above 2, as a type of 16 bits does above 65504."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return torch.where(gradients[0].abs() > 2, INF, gradients[0])


class LimitedLoss(MLP):
    def forward(self, batch: Batch) -> Tensor:
        loss = super().forward(batch._replace(factor=torch.tensor(1.0)))
        return Limited.apply(loss) * batch.factor  # type: ignore[no-any-return, no-untyped-call]


def test_a_micro_batch_is_replayed_with_its_share_of_the_window() -> None:
    # With the whole loss the micro-batch before, whose share has a gradient of 1, would be above the limit too.
    log = fit(LimitedLoss(), marked(3, _0=3.0, _1=9.0), OverflowReport(replay=True), accumulate=3)
    assert (only(log)["origin"]["micro_batch"], only(log)["origin"]["op"]) == (1, "LimitedBackward")


class Large(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return torch.full_like(gradients[0], 2e38)


class Sums(MLP):
    """Two finite gradients whose sum is not."""

    def forward(self, batch: Batch) -> Tensor:
        x = self.net[0](batch.x)
        if batch.factor == 2:
            x = x + Large.apply(x) + Large.apply(x)  # type: ignore[no-untyped-call]
        return nn.functional.mse_loss(self.net[1:](x), batch.y)


def test_a_sum_of_finite_gradients_that_is_not_is_named_by_the_op_that_gets_it() -> None:
    event = only(fit(Sums(), marked(4, _1=2.0), OverflowReport(replay=True)))
    assert (event["origin"]["op"], event["origin"]["module"]) == ("AddmmBackward0", "net.0")


class MakesMask(nn.Module):
    def forward(self, size: int) -> Tensor:
        return torch.full((size, size), -INF).triu(1)


class WithMask(BadGradients):
    """A module whose output is meant to hold infinities, which softmax makes zeros of."""

    def __init__(self) -> None:
        super().__init__()
        self.mask = MakesMask()

    def forward(self, batch: Batch) -> Tensor:
        weights = (batch.x @ batch.x.T + self.mask(len(batch.x))).softmax(-1)
        return super().forward(batch._replace(x=weights @ batch.x))


def test_infinities_that_leave_the_loss_finite_are_not_taken_for_the_origin() -> None:
    event = only(fit(WithMask(), marked(4, _1=2.0), OverflowReport(replay=True)))
    assert (event["origin"]["what"], event["origin"]["module"]) == ("gradient", "net.0.weight")


class AsksInside(Callback):
    """Settles an update inside of a context that takes gradients away."""

    def __init__(self, context: Any) -> None:
        self.context = context

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        with self.context():
            assert trainer.step >= 0


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_a_replay_has_gradients_wherever_the_update_is_settled(context: Any) -> None:
    torch.manual_seed(0)
    event = only(fit(Chain("gradient"), marked(4, _1=2.0), OverflowReport(replay=True), AsksInside(context)))
    assert event["origin"]["op"] == "SqrtBackward0"


class Once(MLP):
    """Overflows once, and never again: its own list is not part of what is put back."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = [1.0, INF, 1.0, 1.0, 1.0, 1.0]

    def forward(self, batch: Batch) -> Tensor:
        return super().forward(batch) * self.factors.pop(0)


def test_what_does_not_happen_a_second_time_is_said_to_be_finite() -> None:
    event = only(fit(Once(), marked(4), OverflowReport(replay=True)))
    assert event["origin"] is None
    assert event["message"].endswith("; computed once more all of it is finite")


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_replay_in_float16_uses_the_scale_of_that_update(accumulate: int) -> None:
    # The last scale that overflows is twice one that does not: with the scale after the update it would be finite.
    precision = FP16({"init_scale": 2.0**40}, allow_cpu=True)
    log = fit(mlp(), marked(99), OverflowReport(replay=True), precision=precision, accumulate=accumulate)
    assert len(log.events) > 5
    assert all(event["origin"]["what"] == "gradient" for event in log.events)
    assert log.events[-1]["loss_finite"]


@pytest.mark.parametrize("factor", [INF, 2.0])
def test_an_origin_names_the_entries_of_the_batch_whatever_it_is(factor: float) -> None:
    torch.manual_seed(0)
    data: Any = [{**b._asdict(), "spare": torch.tensor([1.0, NAN])} for b in marked(4, _1=factor)]
    event = only(fit(Plain(), data, OverflowReport(replay=True)))
    entries = ("factor", "spare") if factor == INF else ("spare",)
    assert event["origin"]["what"] == ("loss" if factor == INF else "gradient")
    assert event["origin"]["batch"] == entries
    assert event["message"].endswith(f"; the batch holds inf or NaN in {', '.join(entries)}")


class Huge(nn.Module):
    """Its gradient is its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.small = nn.Parameter(torch.full((1,), 1e-3)), nn.Parameter(torch.ones(1))

    def forward(self, batch: Batch) -> Tensor:
        return (self.w * batch.factor).sum() * 3 + self.small.sum()


def test_a_sum_over_the_window_that_overflows_is_named_by_its_parameter_and_micro_batch() -> None:
    # The gradients of the window are 1e38, 2e38 and 2e38; the third makes their sum larger than float32's 3.4e38.
    event = only(fit(Huge(), marked(6, _3=1e38, _4=2e38, _5=2e38), OverflowReport(replay=True), accumulate=3))
    assert event["origin"] == {"what": "sum", "module": "w", "op": None, "micro_batch": 5, "batch": ()}
    assert "it began in the sum of the window's gradients of w, each of which is finite" in event["message"]


class Moves(MLP):
    """A frozen parameter that the forward itself moves decides what happens, as in a target network or a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.end = nn.Parameter(torch.zeros(()), requires_grad=False), nn.Identity()

    def forward(self, batch: Batch) -> Tensor:
        self.seen.data += 1
        x = self.net(batch.x) + self.end(torch.where(self.seen == 5, INF, 0.0))
        return nn.functional.mse_loss(x, batch.y)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_weights_that_a_forward_moves_are_for_its_replay_as_they_were_before_it(accumulate: int) -> None:
    torch.manual_seed(0)
    event = only(fit(Moves(), marked(9), OverflowReport(replay=True), accumulate=accumulate))
    place = {"what": "input", "module": "end", "op": None, "micro_batch": 4, "batch": ()}
    assert event["origin"] == place


class Rescales(Callback):
    """Changes batches, as an augmentation does: the third is spoilt by it."""

    def on_train_batch_start(self, trainer: Trainer, policy: nn.Module, batch: Batch, batch_idx: int) -> None:
        batch.x.mul_(NAN if batch_idx == 2 else 0.5)


def test_a_callback_that_changes_batches_has_to_stand_before_it() -> None:
    for first in (True, False):
        log, report = Log(), OverflowReport(replay=True)
        callbacks = [Rescales(), report, log] if first else [report, Rescales(), log]
        trainer = Trainer("cpu", max_epochs=1, default_callbacks=False, callbacks=callbacks)
        trainer.fit(mlp(), InMemory(marked(4)))
        origin = only(log)["origin"]
        assert origin == ({"what": "input", "module": "net.0", "op": None, "micro_batch": 2, "batch": ("x",)} if first
                          else None)  # fmt: skip


# What cannot be looked at -----------------------------------------------------------------------------------


class Maps(MLP):
    def forward(self, batch: Batch) -> Tensor:
        return nn.functional.mse_loss(torch.vmap(self.net)(batch.x), batch.y) * batch.factor


class Fuses(MLP):
    """An encoder that torch runs on nested tensors, where it may."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(6, 2, 12, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1).requires_grad_(False)

    def forward(self, batch: Batch) -> Tensor:
        self.encoder.eval()
        with torch.no_grad():
            padding = torch.tensor([[False, False, True]]).expand(8, 3)
            x = self.encoder(batch.x[:, None].expand(8, 3, 6), src_key_padding_mask=padding)
        return super().forward(batch._replace(x=x[:, 0]))


class Makes(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        return x.detach().to_sparse() if self.how == "sparse" else x.detach().to(torch.float8_e4m3fn)


class Odd(MLP):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.makes = Makes(how)

    def forward(self, batch: Batch) -> Tensor:
        made = self.makes(batch.x)
        return super().forward(batch) + 0 * (made.to_dense() if made.is_sparse else made.float()).sum()  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype:UserWarning")
@pytest.mark.parametrize(
    ("make", "unseen"),
    [(Maps, "the output of net"), (Fuses, None), (lambda: Odd("sparse"), "the output of makes"),
     (lambda: Odd("float8"), "the output of makes")],
)  # fmt: skip
def test_what_torch_cannot_look_at_is_left_out_and_named(make: Callable[[], nn.Module], unseen: str | None) -> None:
    found = []
    for replay in (False, True):
        torch.manual_seed(0)
        policy = make()
        event = only(fit(policy, marked(4, _1=INF), OverflowReport(replay)))
        found.append(weights(policy))
    assert_equal(*found)
    assert event["origin"]["what"] == "loss"
    assert event["origin"]["batch"] == ("factor",)
    names = [text.partition(" (")[0] for text in event.get("unseen", [])]
    assert names[-1:] == ([] if unseen is None else [unseen])
    assert unseen is None or f"; not looked at, as torch cannot: {event['unseen'][0]}" in event["message"]


def test_a_sparse_entry_of_the_batch_is_left_out_and_named() -> None:
    data: Any = [{**b._asdict(), "edges": torch.eye(3).to_sparse()} for b in marked(4, _1=INF)]
    event = only(fit(Plain(), data, OverflowReport(replay=True)))
    assert event["origin"]["batch"] == ("factor",)
    assert event["unseen"][0].startswith("the batch's edges (Could not run 'aten::")


class Uncopyable:
    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("a camera cannot be copied")


class FromDict(MLP):
    """Takes a dict, and fails when it is computed once more: its own list is not part of what is put back."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.left = [1] * calls

    def forward(self, batch: Any) -> Tensor:
        self.left.pop()
        return super().forward(Batch(batch["x"], batch["y"], batch["factor"]))


@pytest.mark.parametrize(
    ("calls", "entries", "error"),
    [
        (9, {"camera": Uncopyable()}, "TypeError: a camera cannot be copied"),
        (2, {}, "IndexError: pop from empty list"),
    ],
)
def test_a_replay_that_fails_says_why_and_leaves_the_run_as_it_is(
    calls: int, entries: dict[str, Any], error: str
) -> None:
    found = []
    for replay in (False, True):
        torch.manual_seed(0)
        policy = FromDict(calls)
        data: Any = [{**b._asdict(), **entries} for b in marked(calls if calls < 4 else 4, _1=INF)]
        event = only(fit(policy, data, OverflowReport(replay)))
        found.append(weights(policy))
    assert_equal(*found)
    assert (event["origin"], event["replay_error"]) == (None, error)
    assert event["message"].endswith(f"; it could not be computed once more: {error}")
    report = OverflowReport(replay=True)  # and the next window is kept again
    data = [{**b._asdict(), **(entries if i == 1 else {})} for i, b in enumerate(marked(6, _1=INF, _3=INF))]
    events = fit(FromDict(9), data, report).events
    assert events[1]["origin"]["what"] == "loss"


# No trace ---------------------------------------------------------------------------------------------------


class Stirring(nn.Module):
    """All that a forward may do beside computing: draw, count, keep, rebind, normalise, move a target, write."""

    scale_seen: Tensor
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(inplace=True), nn.Dropout(0.3))
        self.out = nn.Linear(16, 3)
        self.target = nn.Linear(16, 3).requires_grad_(False)
        self.own, self.generator = torch.Generator().manual_seed(3), np.random.default_rng(3)
        self.python, self.forwards = random.Random(3), 0
        self.plain = torch.zeros(3)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("constant", torch.zeros(1, 3).expand(4, 3))

    def compute(self, batch: dict[str, Tensor]) -> Tensor:
        self.forwards += 1
        self.last = self.forwards * 2
        noise = random.random() + float(np.random.rand()) + torch.rand(()) + torch.rand((), generator=self.own)
        noise = noise + float(self.generator.random()) + self.python.random()
        with torch.no_grad():
            self.mean = 0.9 * self.mean + 0.1 * batch["x"].mean(0)
            self.plain += 0.01
            self.target.weight.lerp_(self.out.weight, 0.1)
            batch["x"] -= self.mean  # as a policy does that normalises in place
        batch["noisy"] = batch["x"] + 0.01 * noise
        x = self.net(batch["noisy"])
        out = self.out(x) + self.target(x).detach() + self.plain + 0.001 * self.forwards
        if batch["factor"] == 2:
            out = out + (out * 0).sqrt()
        return nn.functional.mse_loss(out, batch["y"]) * batch["factor"]


class Plain(Stirring):
    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, float]]:
        return self.compute(batch), {"forwards": float(self.forwards)}


class Lightning(Stirring):
    log: Callable[[str, Any], None]

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.compute(batch)
        self.log("train/forwards", self.forwards)
        self.log("train/value", loss)
        return loss


class Fresh:
    """The same micro-batches at every reading, however the reader wrote into them."""

    def __init__(self, n: int, **factors: float) -> None:
        self.held = marked(n, **factors)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for batch in self.held:
            yield {"x": batch.x.clone(), "y": batch.y, "factor": batch.factor}

    def __len__(self) -> int:
        return len(self.held)


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("kind", [Plain, Lightning])
def test_a_run_with_replays_is_bit_for_bit_the_run_without(kind: Any, accumulate: int, precision: str) -> None:
    found = []
    for report in ([], [OverflowReport()], [OverflowReport(replay=True)]):
        torch.manual_seed(0)
        policy, log = kind(), Log()
        trainer = Trainer(
            "cpu", precision_of(precision), max_steps=9, accumulate=accumulate, seed=2, clip_norm=1.0, log_every=3,
            callbacks=[*report, log], default_callbacks=False,
        )  # fmt: skip
        trainer.fit(policy, Fresh(20, _0=INF, _7=2.0, _13=INF), optimizer=lambda p: AdamW(p, lr=1e-2))
        captured = state.capture(trainer._active, {})
        records = [{k: v for k, v in r.items() if not k.endswith("_per_s")} for r in log.records]
        own: list[Any] = [policy.forwards, policy.last, policy.plain.tolist(), policy.own.get_state().tolist()]
        own += [policy.generator.bit_generator.state, policy.python.getstate()]
        found.append((weights(policy), captured.rng, str(captured.optimizers), captured.scaler, records, own))
        assert trainer.skipped >= 2
        if report and report[0].replay:
            assert len(log.events) == trainer.skipped
            found_out = {(event["loss_finite"], event["origin"]["what"]) for event in log.events}
            assert found_out == {(False, "loss"), (True, "gradient")}
    for other in found[1:]:
        assert_equal(other[0], found[0][0])
        assert_equal(other[1], found[0][1])
        assert other[2:] == found[0][2:]


class Watching(Callback):
    """Sees weights, gradients and buffers before and after the report of a skip, which comes between the two."""

    def __init__(self, before: Watching | None = None) -> None:
        self.before, self.seen, self.looked = before, dict[str, Any](), 0

    @property
    def state_key(self) -> str:
        return f"Watching, {'after' if self.before else 'before'}"

    def on_update_end(self, trainer: Trainer, policy: nn.Module, outcome: Any) -> None:
        tensors = [*policy.parameters(), *policy.buffers()]
        now: dict[str, Any] = {
            "values": [t.detach().clone() for t in tensors],
            "identity": [(id(t), t.data_ptr(), t.requires_grad) for t in policy.parameters()],
            "buffers": [id(t) for t in policy.buffers()],
            "gradients": [(id(p.grad), None if p.grad is None else p.grad.tolist()) for p in policy.parameters()],
            "hooks": [
                (dict(m._forward_hooks), dict(m._forward_pre_hooks), m._backward_hooks) for m in policy.modules()
            ],
            "streams": (random.getstate(), torch.get_rng_state().tolist()),
        }
        if self.before is not None:
            for name, value in self.before.seen.items():
                if name == "values":
                    assert all(torch.equal(a, b) for a, b in zip(now[name], value, strict=True))
                else:
                    assert now[name] == value, name
            self.looked += 1
        self.seen = now


class LeavesGradients(Callback):
    """Puts gradients where there are none at that moment, as somebody's callback may."""

    def on_update_end(self, trainer: Trainer, policy: nn.Module, outcome: Any) -> None:
        for parameter in policy.parameters():
            parameter.grad = torch.ones_like(parameter)


@pytest.mark.parametrize("factor", [INF, 2.0])
def test_a_replay_leaves_every_tensor_hook_and_stream_in_its_place(factor: float) -> None:
    torch.manual_seed(0)
    before = Watching()
    after = Watching(before)
    trainer = Trainer(
        "cpu", max_steps=1, callbacks=[LeavesGradients(), before, OverflowReport(replay=True), after],
        default_callbacks=False,
    )  # fmt: skip
    trainer.fit(Plain(), Fresh(2, _0=factor))
    assert after.looked == 2
    assert trainer.skipped == 1


class Around(nn.Module):
    """A policy whose part may be compiled."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, batch: Batch) -> Any:
        return self.part(batch)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:The .grad:UserWarning")
@pytest.mark.parametrize("how", ["the policy", "a part", "a wrapped part"])
def test_a_compiled_policy_is_replayed_module_by_module_and_stays_compiled(how: str) -> None:
    calls: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        def call(*arguments: Any) -> Any:
            calls.append(1)
            return graph.forward(*arguments)

        return call

    def run(replay: bool) -> dict[str, Any]:
        calls.clear()
        torch._dynamo.reset()
        torch.manual_seed(0)
        chain = Chain("gradient")
        policy: nn.Module = chain
        if how == "a wrapped part":
            compiled: Any = torch.compile(chain, backend=backend)
            policy = Around(compiled)
        else:
            chain.compile(backend=backend)
            policy = chain if how == "the policy" else Around(chain)
        return only(fit(policy, marked(6, _2=2.0), OverflowReport(replay)))

    run(replay=False)
    without = len(calls)
    event = run(replay=True)
    prefix = {"the policy": "", "a part": "part.", "a wrapped part": "part._orig_mod."}[how]
    assert (event["origin"]["module"], event["origin"]["op"]) == (f"{prefix}middle.bad", "SqrtBackward0")
    assert len(calls) == without >= 6


def test_nothing_is_kept_beyond_an_update_or_an_error() -> None:
    class Breaks(Callback):
        def __init__(self) -> None:
            self.held: list[int] = []

        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            self.held.append(len(report._kept))
            if trainer.micro_batches == 7:
                raise KeyError("on purpose")

    report, breaks = OverflowReport(replay=True), Breaks()
    with pytest.raises(KeyError):
        fit(mlp(), marked(9), report, breaks, accumulate=2)
    assert breaks.held == [1, 2] * 3 + [1]
    assert len(report._kept) == 0
    log = fit(mlp(), marked(4, _1=INF), report, accumulate=1)
    assert only(log)["origin"]["micro_batch"] == 1


def test_settings_in_a_run_file_are_those_of_the_callback() -> None:
    Path("overflow_parts.py").write_text(
        "import torch\n"
        "from torch import nn\n\n\n"
        "class Policy(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layer, self.wide = nn.Linear(2, 2), nn.Linear(2, 1)\n\n"
        "    def forward(self, batch):\n"
        "        return self.wide(self.layer(batch) * 1e30 ** batch.max()).square().mean()\n\n\n"
        "class Data:\n"
        "    def __len__(self):\n"
        "        return 8\n\n"
        "    def __getitem__(self, index):\n"
        "        return torch.full((2,), float(index == 5))\n"
    )
    Path("run.yaml").write_text(
        "policy: overflow_parts.Policy\n"
        "data: {train: overflow_parts.Data}\n"
        "trainer:\n"
        "  device: cpu\n"
        "  max_epochs: 1\n"
        "  batch_size: 2\n"
        "  run_dir: done\n"
        "  callbacks:\n"
        "    - class_path: policyfit.OverflowReport\n"
        "      init_args: {replay: true}\n"
    )
    try:
        assert main(["fit", "run.yaml"]) == 0
    finally:
        sys.modules.pop("overflow_parts", None)
    records = [json.loads(line) for line in Path("done/metrics.jsonl").read_text().splitlines()]
    (event,) = (r for r in records if r.get("event") == "overflow")
    assert event["origin"]["what"] == "loss"
    assert event["parameters"]
