"""What some ranks use and others do not: never summed with what it is not, and refused where shards cannot follow."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from processes import run
from ranks import Block, Samples, weights
from torch import Tensor, nn
from torch.optim import SGD

from policyfit import DDP, FSDP, Callback, Trainer
from policyfit.trainer.checkpoint import read_checkpoint


class Heads(nn.Module):
    """Two heads of one size, of which each micro-batch uses one.

    Args:
        choice: Which, by the micro-batch; ``None`` for both.
    """

    fsdp_units: ClassVar[list[str]] = ["Block"]

    def __init__(self, choice: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block = Block(6, 0.0)
        self.heads = nn.ModuleList([nn.Linear(6, 3) for _ in range(2)])
        self.choice, self.calls = choice, 0

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        self.calls += 1
        index, rank = int(batch["index"][0]), int(os.environ.get("RANK", "0"))
        number = {
            "first": 0,
            "by rank": rank,
            "by sample": index % 2,
            "by pair": (index // 2 + index // 4) % 2,
            "detached once": 0,
            "in turns": self.calls % 2,
            "one rank in turns": rank and self.calls % 2,
        }[self.choice]
        error = (self.heads[number](self.block(batch["x"])) - batch["y"]).square().mean(dim=1)
        loss: Tensor = (error * batch["factor"]).mean()
        return loss.detach() if self.choice == "detached once" and self.calls == 2 else loss


class InOrder(torch.utils.data.Dataset[dict[str, Any]]):
    """The first samples, with infinite ones if asked for."""

    def __init__(self, count: int, poisoned: tuple[int, ...] = ()) -> None:
        self.samples, self.count = Samples(poisoned), count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.samples[index]


class Reasons(Callback):
    """Keeps what became of updates; and has gradients of its own between them, if it ``looks``."""

    def __init__(self, looks: bool = False) -> None:
        self.reasons, self.looks = list[str | None](), looks
        self.shards: list[list[list[Any]]] = []  # of the policy's parameters, at the start and after each update

    def on_train_batch_end(self, trainer: Trainer, policy: nn.Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.looks:
            x = batch["x"].clone().requires_grad_()
            torch.autograd.grad(policy({**batch, "x": x}), x)

    def on_update_end(self, trainer: Trainer, policy: nn.Module, outcome: Any) -> None:
        self.reasons.append(outcome.reason)
        self.on_fit_start(trainer, policy)

    def on_fit_start(self, trainer: Trainer, policy: nn.Module) -> None:
        self.shards.append([trainer.distribution.local(p.detach()).tolist() for p in policy.parameters()])


STRATEGIES: dict[str, Any] = {
    "none": lambda: "none",
    "ddp": lambda: DDP(find_unused_parameters=True),
    "fsdp": lambda: FSDP(timeout=30.0),
    "bf16 sums": lambda: FSDP(timeout=30.0, reduce_dtype="bfloat16"),
    "replicas": lambda: FSDP(timeout=30.0, shard=1, replicate=2),
}


def policies() -> dict[str, Any]:
    return {"Heads": Heads, "Drops": Drops, "Flagged": Flagged}


def trained(
    folder: str, kind: str, what: str, batch_size: int, accumulate: int = 1, data: Any = (16,), epochs: int = 1,
    looks: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """One rank's part of a run; what it ends with, weights whole.

    Args:
        what: The name of a policy, and of what its heads go by.
        data: What ``InOrder`` takes.
    """
    name, _, choice = what.partition(": ")
    reasons = Reasons(looks)
    trainer = Trainer(
        "cpu", distributed=STRATEGIES[kind](), run_dir=folder, max_epochs=epochs, accumulate=accumulate, seed=0,
        callbacks=[reasons],
    )  # fmt: skip
    loader = torch.utils.data.DataLoader(InOrder(*data), batch_size=batch_size)
    policy = policies()[name](choice)
    found: dict[str, Any] = {"reasons": reasons.reasons, "shards": reasons.shards, "last": f"{folder}/checkpoints/last"}
    try:
        trainer.fit(policy, loader, optimizer=lambda p: SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1))
    except Exception as error:
        found |= {"error": f"{type(error).__name__}: {error}", "notes": getattr(error, "__notes__", [])}
    return found | {"step": trainer.step}


@pytest.mark.parametrize(("choice", "accumulate"), [("first", 1), ("in turns", 1), ("in turns", 2)])
def test_what_all_ranks_leave_out_stays_as_in_one_process(tmp_path: Path, choice: str, accumulate: int) -> None:
    one = trained(str(tmp_path / "one"), "none", f"Heads: {choice}", 4, accumulate)
    for number, both in enumerate(run(trained, str(tmp_path / "two"), "fsdp", f"Heads: {choice}", 2, accumulate)):
        assert "error" not in both, number
        wanted, found = weights(one), weights(both)
        for name, value in found.items():
            torch.testing.assert_close(value, wanted[name], rtol=1e-5, atol=1e-7, msg=name)
        if choice == "first":  # not even decayed
            assert torch.equal(found["heads.1.weight"], Heads("first").state_dict()["heads.1.weight"])


@pytest.mark.parametrize("kind", ["fsdp", "replicas"])
def test_gradients_that_a_callback_takes_leave_none_behind(tmp_path: Path, kind: str) -> None:
    one = weights(trained(str(tmp_path / "one"), "none", "Heads: first", 4))
    two = weights(run(trained, str(tmp_path / "two"), kind, "Heads: first", 2, 1, (16,), 1, True)[0])
    for name, value in two.items():
        torch.testing.assert_close(value, one[name], rtol=1e-5, atol=1e-7, msg=name)


def test_gradients_that_a_callback_takes_in_the_middle_of_a_window_lose_none(tmp_path: Path) -> None:
    one = weights(trained(str(tmp_path / "one"), "none", "Heads: by pair", 2, 4))
    two = weights(run(trained, str(tmp_path / "two"), "fsdp", "Heads: by pair", 2, 2, (16,), 1, True)[0])
    for name, value in two.items():
        torch.testing.assert_close(value, one[name], rtol=1e-5, atol=1e-7, msg=name)


def test_window_without_gradients_on_any_rank_is_a_skip_where_ranks_look_for_what_is_unused(tmp_path: Path) -> None:
    for rank in run(trained, str(tmp_path / "run"), "ddp", "Heads: detached once", 2):
        assert rank["reasons"] == [None, "no_gradients", None, None]


def test_what_is_left_out_is_reduced_in_the_type_of_the_rest(tmp_path: Path) -> None:
    for rank in run(trained, str(tmp_path / "run"), "bf16 sums", "Heads: in turns", 2, 2):
        assert "error" not in rank
        assert rank["reasons"] == [None] * 2


@pytest.mark.parametrize(
    ("choice", "accumulate", "lacking"),
    [("by rank", 1, [0, 1]), ("one rank in turns", 1, [0, 1]), ("one rank in turns", 2, [0])],
)
def test_shards_of_ranks_that_use_different_parameters_do_not_move(
    tmp_path: Path, choice: str, accumulate: int, lacking: list[int]
) -> None:
    first, second = run(trained, str(tmp_path / "run"), "fsdp", f"Heads: {choice}", 2, accumulate)
    assert first["error"] == second["error"]
    assert first["error"].startswith("DistributedError: In update 1 the ranks of a sharded run did not use the same")
    assert (first["reasons"][0], first["step"]) == ("not_alike", 0)
    for rank in (first, second):
        assert len(rank["shards"]) > 1
        assert all(shards == rank["shards"][0] for shards in rank["shards"])
    counters = read_checkpoint(tmp_path / "run" / "checkpoints" / "last").manifest["counters"]
    assert {counters[name] for name in ("step", "skipped", "batch_in_epoch", "micro_batches")} == {0}
    told = [f"Rank {rank} left out: heads.{1 - rank}.weight, heads.{1 - rank}.bias." for rank in lacking]
    for number, rank in enumerate((first, second)):
        assert rank["notes"][:-1] == told
        assert rank["notes"][-1].startswith(f"This was rank {number}; all ended after update 0.\n")


def test_ddp_averages_what_one_rank_uses_with_zeros(tmp_path: Path) -> None:
    one = trained(str(tmp_path / "one"), "none", "Heads: by sample", 1, accumulate=2)
    two = run(trained, str(tmp_path / "two"), "ddp", "Heads: by sample", 1)[0]
    for name, value in weights(two).items():
        torch.testing.assert_close(value, weights(one)[name], rtol=1e-5, atol=1e-7, msg=name)


class Drops(nn.Module):
    """Leaves out a block in each forward: another one on each rank."""

    fsdp_units: ClassVar[list[str]] = ["Block"]

    def __init__(self, _: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.last = nn.ModuleList([Block(6, 0.0) for _ in range(3)]), nn.Linear(6, 3)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        x = batch["x"]
        for number, block in enumerate(self.blocks):
            x = x if number == int(os.environ["RANK"]) else block(x)
        loss: Tensor = (self.last(x) - batch["y"]).square().mean()
        return loss


def test_blocks_of_one_size_that_ranks_drop_each_by_itself_are_not_mixed_in_silence(tmp_path: Path) -> None:
    for rank in run(trained, str(tmp_path / "run"), "fsdp", "Drops", 2):
        assert "did not use the same units and parameters" in rank["error"]
        assert rank["step"] == 0


# Padding: of six samples rank 1 has two, and pads the second window with the first samples -----------------------


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_padding_whose_loss_is_not_finite_skips_nothing(tmp_path: Path, kind: str) -> None:
    data = (6, (0,))
    one = trained(str(tmp_path / "one"), "none", "Heads: first", 4, data=data, epochs=3)
    assert one["reasons"] == ["non_finite", None] * 3
    for accumulate, size in ((1, 2), (2, 1)):
        two = run(trained, str(tmp_path / f"{size}"), kind, "Heads: first", size, accumulate, data, 3)
        for rank in two:
            assert rank["reasons"] == one["reasons"]
        for name, value in weights(two[0]).items():
            torch.testing.assert_close(value, weights(one)[name], rtol=1e-5, atol=1e-7, msg=name)


def test_padding_of_the_first_window_gives_no_gradient_to_what_no_rank_uses(tmp_path: Path) -> None:
    two = run(trained, str(tmp_path / "two"), "ddp", "Heads: first", 2, 1, (2,), 3)[0]
    assert torch.equal(weights(two)["heads.1.weight"], Heads("first").state_dict()["heads.1.weight"])
    one = weights(trained(str(tmp_path / "one"), "none", "Heads: first", 4, data=(2,), epochs=3))
    for name, value in weights(two).items():
        torch.testing.assert_close(value, one[name], rtol=1e-5, atol=1e-7, msg=name)


class Flagged(Heads):
    """Uses the second head too, where a sample is one of the first four."""

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        loss = super().forward(batch)
        early = batch["index"] < 4
        if early.any():
            loss = loss + (self.heads[1](batch["x"]).square().mean(dim=1) * early).mean()
        return loss


def test_what_padding_alone_uses_does_not_move(tmp_path: Path) -> None:
    one = trained(str(tmp_path / "one"), "none", "Flagged: first", 4, data=(6,))
    two = run(trained, str(tmp_path / "two"), "ddp", "Flagged: first", 2, 1, (6,))
    for name, value in weights(two[0]).items():
        torch.testing.assert_close(value, weights(one)[name], rtol=1e-5, atol=1e-7, msg=name)
