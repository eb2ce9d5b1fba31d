"""What a rehearsal changes comes back, whatever a policy does in its forward, and its batch is its own."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW
from toys import MLP, Batch, assert_equal, batches, weights

from policyfit import Callback, OverflowReport, PrecisionAudit, Trainer
from policyfit.callbacks.rehearsal import Moment, copied, rehearsing


class Log(Callback):
    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []
        self.events: list[dict[str, Any]] = []

    def on_log(self, trainer: Trainer, policy: nn.Module, record: Any) -> None:
        (self.events if "event" in record else self.records).append(dict(record))


class Fresh:
    """Micro-batches that are made anew at every reading, the third of them with an infinite loss."""

    def __init__(self, wrap: Callable[[Batch], Any]) -> None:
        self.wrap = wrap

    def __iter__(self) -> Iterator[Any]:
        return (self.wrap(batch._replace(x=batch.x[:4], y=batch.y[:4])) for batch in batches(8, poisoned=(2,)))

    def __len__(self) -> int:
        return 8


class Policy(MLP):
    """Does something in ``out`` that a rehearsal must not leave behind."""

    def __init__(self) -> None:
        super().__init__(dropout=0.2)

    def out(self, x: Tensor) -> Tensor:
        return self.net(x)  # type: ignore[no-any-return]

    def forward(self, batch: Any) -> Tensor:
        return nn.functional.mse_loss(self.out(batch.x), batch.y) * batch.factor  # type: ignore[no-any-return]

    def training_step(self, batch: Any, index: int) -> Tensor:
        return self(batch)  # type: ignore[no-any-return]

    def configure_optimizers(self) -> AdamW:
        return AdamW(self.parameters(), lr=1e-2)


class DrawsFromNumpy(Policy):
    def __init__(self) -> None:
        super().__init__()
        self.old, self.new = np.random.RandomState(1), np.random.default_rng(1)

    def out(self, x: Tensor) -> Tensor:
        return super().out(x + float(self.old.rand()) + float(self.new.random()))


class DrawsFromTorchAndPython(Policy):
    def __init__(self) -> None:
        super().__init__()
        self.torch, self.python, self.system = torch.Generator(), random.Random(1), random.SystemRandom()

    def out(self, x: Tensor) -> Tensor:
        return super().out(x + torch.rand((), generator=self.torch) + self.python.random())


class MakesModule(Policy):
    def out(self, x: Tensor) -> Tensor:
        if not hasattr(self, "made"):
            self.made = nn.Linear(16, 16).requires_grad_(False)
        return self.net[3](self.made(self.net[0](x)))  # type: ignore[no-any-return]


class MakesParameter(Policy):
    extra: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("extra", None)

    def out(self, x: Tensor) -> Tensor:
        if self.extra is None:
            self.extra = nn.Parameter(torch.randn(6), requires_grad=False)
        return super().out(x + self.extra)


class Thaws(Policy):
    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)

    def forward(self, batch: Any) -> Tensor:
        loss = super().forward(batch)
        self.net[0].requires_grad_(True)
        return loss


class Resizes(Policy):
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))

    def out(self, x: Tensor) -> Tensor:
        self.seen.resize_(self.seen.numel() + 1).fill_(0.5)
        return super().out(x) + self.seen.sum()


class Rebinds(Policy):
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))

    def out(self, x: Tensor) -> Tensor:
        self.seen.data = torch.cat([self.seen.data, torch.ones(1)])
        return super().out(x) + self.seen.sum()


class KeepsInferenceTensor(Policy):
    def __init__(self) -> None:
        super().__init__()
        self.hidden: Tensor | None = None

    def out(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            self.hidden = torch.zeros(4, 6) if self.hidden is None else self.hidden
            self.hidden.add_(x)
        return super().out(self.hidden.clone() + x)


class MovesFrozenWeights(Policy):
    """As target networks move, past autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.target = nn.Linear(6, 6).requires_grad_(False)

    def out(self, x: Tensor) -> Tensor:
        self.target.weight.data.mul_(0.9)
        return super().out(x + self.target(x))


class AddsUpGradients(Policy):
    """A leaf that is no parameter and keeps its gradient, which the forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = torch.zeros((), requires_grad=True)

    def out(self, x: Tensor) -> Tensor:
        seen = 0.0 if self.temperature.grad is None else self.temperature.grad.nan_to_num(0.0, 0.0, 0.0)
        return super().out(x) * self.temperature.exp() + seen


class AddsUpWithGradient(Policy):
    """A plain attribute that becomes part of the graph in place."""

    def __init__(self) -> None:
        super().__init__()
        self.state = torch.zeros(4, 3)

    def out(self, x: Tensor) -> Tensor:
        self.state.detach_()
        return self.state.mul_(0.5).add_(super().out(x)) * 1.0


class Sparse(Policy):
    adjacency: Tensor
    rows: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("adjacency", torch.eye(4).to_sparse())
        self.register_buffer("rows", torch.eye(4).to_sparse_csr())

    def out(self, x: Tensor) -> Tensor:
        self.adjacency.mul_(1.5)
        self.rows.mul_(1.5)
        return torch.sparse.mm(self.adjacency, super().out(x)) + self.rows.values().sum()  # type: ignore[no-any-return]


class Counts(nn.Module):
    """To be scripted: moves a buffer in place and rebinds another."""

    if TYPE_CHECKING:  # TorchScript cannot read what is written for mypy
        seen: Tensor
        mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add_(1.0)
        self.mean = self.mean * 0.9 + x.mean() * 0.1
        x = self.layer(x)
        return x + self.mean + self.seen


class Scripted(Policy):
    def __init__(self) -> None:
        super().__init__()
        self.scripted = torch.jit.script(Counts())

    def out(self, x: Tensor) -> Tensor:
        return super().out(self.scripted(x))


class Carrying(dict[str, Any]):
    """Has no attribute but its entries, and says so with the wrong error, as many do."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class Holder:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def carrying(batch: Batch) -> Any:
    return Carrying(**batch._asdict(), array=np.ones(3, dtype=np.float32), held=Holder(batch.x), same=batch.x)


class Writes(Policy):
    def forward(self, batch: Any) -> Tensor:
        batch["array"] *= 2
        batch["held"].tensor += 1
        batch["same"].mul_(1.5)
        return super().forward(batch) * float(batch["array"].sum())


POLICIES = [
    DrawsFromNumpy, DrawsFromTorchAndPython, MakesModule, MakesParameter, Thaws, Resizes, Rebinds,
    KeepsInferenceTensor, MovesFrozenWeights, AddsUpGradients, AddsUpWithGradient, Sparse, Scripted, Writes,
]  # fmt: skip


def run(make: Any, *callbacks: Callback, wrap: Callable[[Batch], Any], accumulate: int) -> tuple[Any, ...]:
    torch.manual_seed(0)
    policy, log = make(), Log()
    trainer = Trainer(
        "cpu", max_steps=4 if accumulate == 1 else 2, seed=2, callbacks=[*callbacks, log], default_callbacks=False,
        log_every=1, accumulate=accumulate,
    )  # fmt: skip
    trainer.fit(policy, Fresh(wrap))
    assert trainer.skipped == 1
    dense = {name: value.to_dense() for name, value in weights(policy).items()}
    records = [{k: v for k, v in record.items() if not k.endswith("per_s")} for record in log.records]
    return dense, str(records), (torch.get_rng_state().tolist(), random.random(), np.random.rand()), log.events


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:Sparse CSR:UserWarning")
@pytest.mark.parametrize("make", POLICIES)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_audited_and_a_replayed_run_are_bit_for_bit_the_run_without(make: Any, accumulate: int) -> None:
    wrap = carrying if make is Writes else lambda batch: batch
    plain = run(make, wrap=wrap, accumulate=accumulate)
    for callback in (PrecisionAudit(), OverflowReport(replay=True)):
        other = run(make, callback, wrap=wrap, accumulate=accumulate)
        assert_equal(plain[0], other[0])
        assert plain[1:3] == other[1:3]
        (event,) = other[3]
        assert event["event"] == ("overflow" if isinstance(callback, OverflowReport) else "precision_audit")
        assert event["event"] != "overflow" or event["origin"]["what"] == "loss"


class Stepping(Callback):
    """Looks at a run from inside, at its first micro-batch."""

    def __init__(self, look: Callable[[Trainer, Any], None]) -> None:
        self.look, self.looked = look, 0

    def on_train_batch_start(self, trainer: Trainer, policy: nn.Module, batch: Any, batch_idx: int) -> None:
        if not self.looked:
            self.look(trainer, policy)
        self.looked += 1


def inside(look: Callable[[Trainer, Any], None]) -> None:
    stepping = Stepping(look)
    run(Policy, stepping, wrap=lambda batch: batch, accumulate=1)
    assert stepping.looked > 3


def test_what_fails_to_come_back_keeps_nothing_else_from_it() -> None:
    def look(trainer: Trainer, policy: Any) -> None:
        policy.count, before = 1, weights(policy)
        moment = Moment(trainer, policy)
        moment._streams.append(lambda: int("no stream"))
        policy.count = 2
        policy.net[0].weight.data.zero_()
        with pytest.raises(ValueError, match="no stream"):
            moment.put_back()
        assert policy.count == 1
        assert_equal(weights(policy), before)

    inside(look)


def test_two_moments_share_the_memory_that_has_not_changed_between_them() -> None:
    def look(trainer: Trainer, policy: Any) -> None:
        first = Moment(trainer, policy)
        before = weights(policy)
        policy.net[0].bias.data.add_(1.0)
        second = Moment(trainer, policy, first)
        shared = [first._memory[key][1] is second._memory[key][1] for key in second._memory]
        assert sorted(shared) == [False, True, True, True]
        first.put_back()
        assert_equal(weights(policy), before)

    inside(look)


def test_a_rehearsal_computes_with_gradients_and_op_by_op_wherever_it_is_called() -> None:
    def look(trainer: Trainer, policy: Any) -> None:
        before = weights(policy)
        with torch.inference_mode(), rehearsing(trainer, policy):
            assert torch.is_grad_enabled()
            assert not torch.is_inference_mode_enabled()
            assert not torch.backends.mha.get_fastpath_enabled()
            policy.net[0](torch.ones(1, 6)).sum().backward()
            policy.net[0].weight.data.zero_()
        assert torch.backends.mha.get_fastpath_enabled()
        assert policy.net[0].weight.grad is None
        assert_equal(weights(policy), before)

    inside(look)


def test_a_copied_batch_shares_no_memory_and_keeps_what_is_one_object_one() -> None:
    x = torch.zeros(1000)[:2]
    batch: dict[str, Any] = {
        "x": x,
        "also": x,
        "array": np.zeros(2),
        "held": Holder(torch.zeros(2)),
        "leaf": x.clone().requires_grad_(),
    }
    copy = copied(batch)
    for value in (copy["x"], copy["array"], copy["held"].tensor):
        value += 1
    assert copy["also"] is copy["x"]
    assert copy["x"].untyped_storage().nbytes() == 2 * 4  # not the thousand that it is a slice of
    assert (float(x.sum()), float(batch["array"].sum()), float(batch["held"].tensor.sum())) == (0, 0, 0)
    assert copy["leaf"].is_leaf
    assert copy["leaf"].requires_grad
