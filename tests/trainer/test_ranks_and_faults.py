"""What other libraries are known to get wrong with several processes; each test is about one such fault."""

from __future__ import annotations

import math
import os
import pickle
import random
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from processes import outcomes_of, run
from ranks import SAMPLES, Policy, Rolls, Samples, Stops, Walk, train
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from policyfit import DDP, FSDP, Callback, Checkpoint, ConfigError, Trainer
from policyfit.strategies.group import ManyProcesses
from policyfit.trainer import beginning
from policyfit.trainer.checkpoint import read_checkpoint
from policyfit.trainer.pieces import Pieces

# Random streams ----------------------------------------------------------------------------------------------


class Draws(Callback):
    """Draws from every stream before each micro-batch, and on rank 0 once more at the end of each epoch."""

    def __init__(self) -> None:
        self.drawn: list[list[float]] = []

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        self.drawn.append([random.random(), float(np.random.rand()), float(torch.rand((), dtype=torch.float64))])

    def on_train_epoch_end(self, trainer: Trainer, policy: nn.Module) -> None:
        if trainer.is_main:
            random.random(), np.random.rand(), torch.rand(3)


def drawing(folder: str, distributed: str, settings: dict[str, Any]) -> dict[str, Any]:
    draws = Draws()
    return {**train(folder, distributed, extra=[draws], **settings), "drawn": draws.drawn}


def grown(folders: list[str]) -> list[dict[str, Any]]:
    return [drawing(folder, "ddp", {"steps": 12, "batch_size": 4, "resume": "last"}) for folder in folders]


def test_ranks_draw_different_streams_from_the_first_batch_on(tmp_path: Path) -> None:
    ranks = run(drawing, str(tmp_path / "run"), "ddp", {"steps": 2})
    values = [value for rank in ranks for draws in rank["drawn"] for value in draws]
    assert len(set(values)) == 2 * 2 * 3


def test_ranks_that_join_at_a_resume_draw_streams_of_their_own_and_the_order_of_the_data_stays(
    tmp_path: Path,
) -> None:
    drawing(str(tmp_path / "a"), "none", {"steps": 3, "batch_size": 12})
    for copy in ("b", "alone"):
        shutil.copytree(tmp_path / "a", tmp_path / copy, symlinks=True)
    alone = drawing(str(tmp_path / "alone"), "none", {"steps": 12, "batch_size": 12, "resume": "last"})
    ranks = run(grown, [str(tmp_path / "a"), str(tmp_path / "b")], ranks=3)
    first, second, third = ranks
    assert first[0]["drawn"] == alone["drawn"]
    for new in (second, third):
        assert new[0]["drawn"] == new[1]["drawn"]  # derived, so the same again
    values = [value for rank in ranks for draws in rank[0]["drawn"] for value in draws]
    assert len(set(values)) == 3 * 3 * 9
    assert "reset: the random streams of the new ranks, so it is not bit for bit the same run" in first[0]["plan"]
    seen = [index for rank in ranks for ids in rank[0]["ids"][-4:] for index in ids]  # those of the last epoch
    assert sorted(set(seen)) == list(range(SAMPLES))
    assert len(seen) == 4 * 3 * 4  # as the last window is padded


# Checkpoints -------------------------------------------------------------------------------------------------


def reading(folder: str) -> tuple[int, int]:
    """How many numbers of tensors in pieces this rank read at its resume, and how many there are."""
    train(folder, "fsdp", steps=3, ema=True)
    read, slices = [0], Pieces.__getitem__

    def counted(self: Pieces, rows: slice) -> Tensor:
        found = slices(self, rows)
        read[0] += found.numel()
        return found

    Pieces.__getitem__ = counted  # type: ignore[method-assign]
    checkpoint = Path(folder) / "checkpoints" / "000002"
    train(folder, "fsdp", steps=3, ema=True, resume=str(checkpoint))
    held = read_checkpoint(checkpoint, lazy=True)
    models = [*held.model.values(), *held.models["ema"].values()]
    moments = [value for entry in held.optimizers[0]["state"].values() for value in entry.values()]
    return read[0], sum(math.prod(v.shape) for v in (*models, *moments) if isinstance(v, Pieces))


def test_a_rank_of_a_sharded_run_reads_its_own_rows_and_never_the_whole(tmp_path: Path) -> None:
    (first, total), (second, _) = run(reading, str(tmp_path / "run"))
    assert first + second == total
    assert total / 3 < second <= first < total * 2 / 3


def compiled(folder: str) -> list[dict[str, Any]]:
    original: Any = nn.Module.compile

    def eager(self: nn.Module) -> None:
        original(self, backend="eager")

    nn.Module.compile = eager  # type: ignore[method-assign]
    return [train(f"{folder}/{name}", "ddp", steps=3, compile=name == "compiled") for name in ("compiled", "plain")]


def test_the_checkpoint_of_a_compiled_policy_of_several_ranks_has_the_names_of_the_bare_one(tmp_path: Path) -> None:
    found, plain = (read_checkpoint(Path(result["last"])) for result in run(compiled, str(tmp_path))[0])
    assert sorted(found.model) == sorted(Policy().state_dict())
    assert all(torch.equal(found.model[name], value) for name, value in plain.model.items())


# Who decides, writes and ends --------------------------------------------------------------------------------

LOOKS = ("os.listdir", "os.scandir")
WRITES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "os.chmod")


class Preempts(Callback):
    """Rank 1 gets a SIGTERM, of all processes of a step and from their launcher."""

    def on_before_backward(self, trainer: Trainer, *_: Any) -> None:
        if trainer.distribution.rank == 1 and trainer.micro_batches == 7:
            for _sent in range(2):
                os.kill(os.getpid(), signal.SIGTERM)


def preempted(folder: str) -> dict[str, Any]:
    """A run that goes on, saves and is preempted; what is sent for its decisions, and what rank 1 does to files."""
    train(folder, "ddp", steps=4)
    sent, touched, broadcast = [0], list[str](), ManyProcesses.broadcast

    def measured(self: Any, value: Any, *place: str) -> Any:
        if self.is_main:
            sent.append(len(pickle.dumps(value)))
        return broadcast(self, value, *place)

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        path, writes = str(arguments[0]), event in WRITES
        if event == "open":
            writes = bool(arguments[2] & (os.O_WRONLY | os.O_RDWR))
        if (writes and path.startswith(folder)) or (event in LOOKS and path == f"{folder}/checkpoints"):
            touched.append(f"{event} {path}")

    ManyProcesses.broadcast = measured  # type: ignore[assignment, method-assign]
    if os.environ["RANK"] == "1":
        sys.addaudithook(audit)
    code: Any = None
    try:
        train(folder, "ddp", steps=30, resume="last", extra=[Preempts()])
    except SystemExit as end:
        code = end.code
    return {"code": code, "sent": max(sent), "touched": touched}


def test_rank_0_alone_decides_in_few_bytes_and_writes_and_a_signal_to_another_ends_all(tmp_path: Path) -> None:
    ranks = run(preempted, str(tmp_path / "run"))
    assert [rank["code"] for rank in ranks] == [143, 143]
    assert 0 < ranks[0]["sent"] < 1024
    assert ranks[1]["touched"] == []
    assert read_checkpoint(tmp_path / "run/checkpoints/last").manifest["counters"]["step"] == 9


def unreadable(folder: str) -> str:
    """On rank 1 the disk fails once there is something to go on with."""
    train(folder, "ddp", steps=2)

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and str(arguments[0]).startswith(f"{folder}/checkpoints"):
            raise OSError(5, "the disk of this rank is gone")

    if os.environ["RANK"] == "1":
        sys.addaudithook(audit)
    try:
        train(folder, "ddp", steps=4, resume="last")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_checkpoint_that_one_rank_cannot_read_ends_all_in_time_before_the_first_batch(tmp_path: Path) -> None:
    for text in run(unreadable, str(tmp_path / "run"), limit_s=30.0):
        assert text.startswith("CheckpointError: ")
        assert "the disk of this rank is gone" in text


class Own(IterableDataset[dict[str, Tensor]]):
    """Data of each rank's own, as long as it says or shorter."""

    shards_by_rank = True

    def __init__(self, says: int, gives: int) -> None:
        self.says, self.gives = says, gives

    def __len__(self) -> int:
        return self.says

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        sample = {"x": torch.ones(6), "y": torch.zeros(3), "factor": torch.ones(())}
        return iter([sample] * self.gives)


def uneven(folder: str) -> list[str]:
    rank, errors = int(os.environ["RANK"]), []
    for says, gives in ((20 - 4 * rank, 20 - 4 * rank), (20, 20 - 4 * rank)):
        trainer = Trainer(
            "cpu", max_epochs=3, batch_size=4, run_dir=f"{folder}/{says - gives}", distributed="ddp",
            default_callbacks=False,
        )  # fmt: skip
        try:
            trainer.fit(Policy(), Own(says, gives))
        except Exception as error:
            errors.append(str(error))
    return errors


def test_ranks_whose_own_data_is_not_as_long_end_in_time_and_say_so(tmp_path: Path) -> None:
    for other, shorter in run(uneven, str(tmp_path), limit_s=40.0):
        assert other.startswith("Rank 1 has 4 batches an epoch, and rank 0 has 5.\n")
        assert "has a length of 5 micro-batches, but gave only 4" in shorter


class Read(IterableDataset[dict[str, Tensor]]):
    """Data without a length, of which each rank finds another amount."""

    def __init__(self, batches: int) -> None:
        self.samples, self.count = Samples(), 4 * batches

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self.samples[index % SAMPLES] for index in range(self.count))


# How many micro-batches the ranks have together, as each of them sees it, in windows of two; whether one asks for a
# stop after the first; what the run is told of, and its steps before that.
UNEVEN = "it has {} micro-batches in a window where the other has {}, which"
ENDS: dict[str, tuple[tuple[int, ...], bool, str, int]] = {
    "shorter": ((10, 12), False, UNEVEN.format(1, 2), 2),
    "shorter on the other": ((10, 6), False, UNEVEN.format(1, 2), 1),
    "none": ((8, 10), False, UNEVEN.format(0, 1), 2),
    "the first": ((2, 12), False, UNEVEN.format(1, 2), 0),
    "none after a stop": ((4, 8), True, UNEVEN.format(0, 2), 1),
    "none of three": ((12, 15, 18), False, UNEVEN.format(0, 2), 2),
    "not of the run": ((6, 8), False, "", 1),
}


def ended(folder: str, kind: str, names: list[str]) -> list[tuple[str, int]]:
    found = []
    for name in names:
        batches, stops, *_ = ENDS[name]
        trainer = Trainer(
            "cpu", max_steps=1 if name == "not of the run" else 9, batch_size=4, accumulate=2, log_every=50,
            run_dir=f"{folder}/{name}", distributed={"ddp": DDP, "fsdp": FSDP}[kind](timeout=20.0),
            callbacks=[Checkpoint(every_steps=50), *([Stops(rank=1, after=1)] if stops else [])],
        )  # fmt: skip
        words = ""
        try:
            trainer.fit(Policy(), Read(batches[int(os.environ["RANK"])]))
        except Exception as error:
            words = str(error)
        found.append((words, trainer.micro_batches))
    return found


@pytest.mark.parametrize(("kind", "count"), [("ddp", 2), ("fsdp", 2), ("ddp", 3), ("fsdp", 3)])
def test_data_without_a_length_that_ends_on_one_rank_before_another_ends_all_before_that_window(
    tmp_path: Path, kind: str, count: int
) -> None:
    names = [name for name, (batches, *_) in ENDS.items() if len(batches) == count]
    for rank in run(ended, str(tmp_path), kind, names, ranks=count, limit_s=60.0):
        for name, (words, micro_batches) in zip(names, rank, strict=True):
            *_, told, steps = ENDS[name]
            assert told in words if told else not words, name
            counters = read_checkpoint(tmp_path / name / "checkpoints" / "last").manifest["counters"]
            assert counters["step"] == steps, name
            assert counters["micro_batches"] == micro_batches == 2 * steps, name  # of that window nothing is kept


class Broken(Walk):
    """A simulator that does not start on this rank."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        raise OSError("the simulator does not start")


class RollsOnOne(Rolls):
    """Plays in an environment that is broken on one rank."""

    def __init__(self, rank: int) -> None:
        super().__init__(every=2)
        self.rank = rank

    def on_due(self, trainer: Trainer, policy: nn.Module) -> None:
        trainer.evaluate(policy, Broken if trainer.distribution.rank == self.rank else Walk, episodes=4)


def rolling(folder: str, distributed: str, rank: int) -> str:
    try:
        train(f"{folder}/run", distributed, steps=30, extra=[RollsOnOne(rank)])
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(("distributed", "rank"), [("ddp", 0), ("ddp", 1), ("fsdp", 1)])
def test_an_environment_that_breaks_on_one_rank_ends_all_in_time_and_is_told(
    tmp_path: Path, distributed: str, rank: int
) -> None:
    texts = run(rolling, str(tmp_path), distributed, rank, limit_s=30.0)
    assert texts[rank] == "OSError: the simulator does not start"
    assert texts[1 - rank].startswith(f"RankFailed: Rank {rank} failed")
    assert f"Rank {rank} failed" in texts[1 - rank]
    assert "OSError: the simulator does not start" in texts[1 - rank]


class SlowWalk(Walk):
    """Takes longer to begin on rank 0 than a collective may."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if os.environ["RANK"] == "0":
            time.sleep(2.6)
        return super().reset(seed=seed, options=options)


class RollsSlowly(Rolls):
    """Plays one episode, once, while the other rank has none to play."""

    def due(self, step: int) -> bool:
        return step == 2

    def on_due(self, trainer: Trainer, policy: nn.Module) -> None:
        trainer.evaluate(policy, SlowWalk, episodes=1)


def rolling_slowly(folder: str) -> int:
    trainer = Trainer(
        "cpu", max_steps=4, batch_size=4, run_dir=folder, distributed=FSDP(timeout=2.0), callbacks=[RollsSlowly(2)]
    )
    trainer.fit(Policy(), Samples())
    return trainer.step


def test_a_rollout_that_lasts_longer_than_a_collective_may_ends_no_run(tmp_path: Path) -> None:
    assert run(rolling_slowly, str(tmp_path / "run"), limit_s=40.0) == [4, 4]


def apart(folder: str, distributed: Any) -> tuple[str, str]:
    """Rank 1 is on a machine where the run's folder is not."""
    read = Path.read_bytes

    def read_here(path: Path) -> bytes:
        return read(Path("nowhere") if path.name == "plan.json" else path)

    if os.environ["RANK"] == "1":
        beginning._ARRIVAL_S = 0.2
        Path.read_bytes = read_here  # type: ignore[method-assign, assignment]
    trainer = Trainer("cpu", max_steps=1, batch_size=4, run_dir=folder, distributed=distributed)
    try:
        trainer.fit(Policy(), Samples())
    except Exception as error:
        return type(error).__name__, str(error)
    return "", trainer.plan.text()


def test_ranks_without_shared_storage_are_refused_where_each_writes_and_told_elsewhere(tmp_path: Path) -> None:
    blind = f"Rank 1 does not see the run's folder {tmp_path}"
    for kind, text in run(apart, str(tmp_path / "fsdp"), FSDP()):
        assert kind == "DistributedError"
        assert text.startswith(f"{blind}/fsdp, where each rank of a sharded run writes its part")
    assert not (tmp_path / "fsdp" / "checkpoints").exists()
    for distributed in (DDP(), FSDP(checkpoint="whole")):
        folder = tmp_path / distributed.name / "whole"
        for kind, text in run(apart, str(folder), distributed):
            assert kind == ""
            assert f"{blind}/{distributed.name}/whole, so a resume will need a copy of it there" in text
        assert (folder / "checkpoints" / "last").exists()


class Replaces(Policy):
    """On one rank a buffer is replaced in the third forward: by another type or size, or by none."""

    def __init__(self, rank: int, by: str) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("cache", torch.zeros(2), persistent=False)
        self.left, self.by = 2 if str(rank) == os.environ["RANK"] else -1, by

    def forward(self, batch: dict[str, Tensor]) -> Any:
        if self.left == 0:
            self.mean = {"type": torch.zeros(3, dtype=torch.float64), "size": torch.zeros(5), "none": None}[self.by]
        self.left -= 1
        self.cache = torch.zeros(2 + self.left % 2)
        return super().forward(batch)


def replacing(folder: str, distributed: str) -> list[str]:
    errors = []
    for rank, by in ((0, "type"), (1, "size"), (1, "none")):
        trainer = Trainer("cpu", max_steps=9, batch_size=4, run_dir=f"{folder}/{by}", distributed=distributed)
        try:
            trainer.fit(Replaces(rank, by), Samples())
        except Exception as error:
            errors.append(str(error))
    return errors


@pytest.mark.parametrize("distributed", ["ddp", "fsdp"])
def test_a_buffer_that_is_replaced_on_one_rank_ends_all_in_order_by_its_name(tmp_path: Path, distributed: str) -> None:
    first, second = run(replacing, str(tmp_path), distributed, limit_s=60.0)
    forms = {"type": "float64 of shape (3,) on cpu", "size": "float32 of shape (5,) on cpu", "none": None}
    told = [(first[0], second[0]), (second[1], first[1]), (second[2], first[2])]
    for (own, other), (by, form) in zip(told, forms.items(), strict=True):
        said = f"was float32 of shape (3,) on cpu, but is {form}" if form else "is gone since the run began"
        assert own.splitlines()[0] == f"The buffer mean {said}."
        assert "so all ended after update 2: DistributedError: The buffer mean " in other
        saved = read_checkpoint(tmp_path / by / "checkpoints" / "last")
        assert saved.manifest["counters"]["step"] == 2
        assert saved.model["mean"].tolist() == [0.0] * 3


def sharded_twice(folder: str) -> list[str]:
    from torch.distributed.fsdp import fully_shard

    trainer = Trainer("cpu", max_steps=2, run_dir=folder, distributed="fsdp")
    policy = Policy()
    trainer.fit(policy, Samples())
    torch.distributed.init_process_group("gloo")
    by_hand = nn.Sequential(nn.Linear(6, 3))
    fully_shard(by_hand)
    errors = []
    for again in (policy, by_hand):
        for distributed in ("ddp", "fsdp"):
            try:
                Trainer("cpu", max_steps=2, distributed=distributed).fit(again, Samples())
            except ConfigError as error:
                errors.append(str(error).splitlines()[0].partition(" is ")[2])
        try:
            Trainer("cpu", distributed="fsdp").validate(again, Samples())
        except ConfigError as error:
            errors.append(str(error).splitlines()[0].partition(" is ")[2])
    return errors


def sharded_twice_and_validated(folder: str) -> tuple[list[str], float]:
    errors = sharded_twice(folder)
    torch.distributed.destroy_process_group()
    return errors, validated_anew()


def test_a_policy_that_is_sharded_already_is_refused_and_those_of_ranks_are_validated_as_that_of_rank_0(
    tmp_path: Path,
) -> None:
    one = Trainer("cpu", batch_size=4).validate(Policy(), Samples())["val/loss"]
    for errors, loss in run(sharded_twice_and_validated, str(tmp_path / "run")):
        assert loss == pytest.approx(one, rel=1e-6)
        assert errors == ["sharded already, by fully_shard or by an earlier run in this process."] * 6


def validated_anew() -> float:
    policy = Policy()
    if os.environ["RANK"] == "1":
        policy.requires_grad_(False)
        policy.first.weight.add_(1.0)
        policy.requires_grad_(True)
    return Trainer("cpu", batch_size=4, distributed="ddp").validate(policy, Samples())["val/loss"]


def validated(run_dir: str) -> str:
    class Dies(Policy):
        def forward(self, batch: Any) -> Any:
            if os.environ["RANK"] == "1":
                os.kill(os.getpid(), signal.SIGKILL)
            return super().forward(batch)

    try:
        Trainer("cpu", batch_size=4, seed=0, run_dir=run_dir, distributed="ddp").validate(Dies(), Samples())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_rank_that_dies_in_a_validation_of_its_own_is_told_by_its_number(tmp_path: Path) -> None:
    first, second = outcomes_of(validated, str(tmp_path / "run"), limit_s=40.0)
    assert second.exit_code == -9
    assert first.value.startswith("RanksLost: Rank 1 no longer answers")
