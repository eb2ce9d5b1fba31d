"""Sources that carry their own state: a resumed run goes on with the next sample and reads none twice."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader, IterableDataset, Sampler
from toys import assert_equal, data_of

from policyfit import Callback, Checkpoint, CheckpointError, Trainer
from policyfit.trainer.data import TrainingData

N = 22


class Stream(IterableDataset[Tensor]):
    """A shuffle buffer of three: what comes next is in the buffer and in the random streams."""

    def __init__(self) -> None:
        self.position, self.buffer, self.reads = 0, list[int](), list[int]()

    def __iter__(self) -> Iterator[Tensor]:
        while self.position < N or self.buffer:
            while self.position < N and len(self.buffer) < 3:
                self.reads.append(self.position)
                self.buffer.append(self.position)
                self.position += 1
            index = self.buffer.pop(random.randrange(len(self.buffer)))
            yield torch.tensor([index, torch.rand(()).item()])
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "buffer": self.buffer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position, self.buffer = state["position"], list(state["buffer"])


class Shuffled(Sampler[int]):
    """An order of its own from a generator of its own, which differs from epoch to epoch."""

    def __init__(self) -> None:
        self.random = random.Random(3)
        self.rest: list[int] = []

    def __iter__(self) -> Iterator[int]:
        if not self.rest:
            self.rest = self.random.sample(range(N), N)
        while self.rest:
            yield self.rest.pop()

    def __len__(self) -> int:
        return N

    def state_dict(self) -> dict[str, Any]:
        version, words, pending = self.random.getstate()
        return {"rest": self.rest, "random": [version, list(words), pending]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        version, words, pending = state["random"]
        self.rest = list(state["rest"])
        self.random.setstate((version, tuple(words), pending))


class Samples:
    def __init__(self) -> None:
        self.reads: list[int] = []

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Tensor:
        self.reads.append(index)
        return torch.tensor([index, torch.rand(()).item()])


class Batches:
    """A loader of another library, which says where it stands."""

    batch_size = 4

    def __init__(self) -> None:
        self.next, self.reads = 0, list[int]()

    def __iter__(self) -> Iterator[Tensor]:
        while self.next < N:
            indices = list(range(self.next, min(self.next + 4, N)))
            self.reads += indices
            self.next += 4
            yield torch.tensor([[index, torch.rand(()).item()] for index in indices])  # from the global stream
        self.next = 0

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


def sampled(workers: int = 0) -> Any:
    return DataLoader(Samples(), batch_size=4, sampler=Shuffled(), num_workers=workers)  # type: ignore[arg-type]


SOURCES: dict[str, Any] = {
    "iterable": Stream,
    "sampler": sampled,
    "sampler of workers": lambda: sampled(2),
    "loader": Batches,
}


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.3), nn.Linear(4, 1))

    def forward(self, batch: Tensor) -> Tensor:
        loss: Tensor = self.net(batch).square().mean()
        return loss


class Seen(Callback):
    def __init__(self) -> None:
        self.rows: list[list[float]] = []

    def on_train_batch_start(self, trainer: Trainer, policy: nn.Module, batch: Tensor, batch_idx: int) -> None:
        self.rows += batch.tolist()


def fit(
    run_dir: Path, source: Any, accumulate: int, max_steps: int, resume: str | None = None, changes: Any = ()
) -> tuple[Policy, Seen, Trainer]:
    seen = Seen()
    trainer = Trainer(
        "cpu", max_steps=max_steps, batch_size=4, accumulate=accumulate, seed=1, run_dir=run_dir,
        callbacks=[seen, Checkpoint(every_steps=1, keep=None)],
    )  # fmt: skip
    torch.manual_seed(0)
    policy = Policy()
    trainer.fit(policy, source, optimizer=lambda p: SGD(p, lr=1e-3), resume=resume, changes=changes)
    return policy, seen, trainer


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("kind", SOURCES)
def test_resume_at_every_step_goes_on_with_the_next_sample(tmp_path: Path, kind: str, accumulate: int) -> None:
    steps = 13 // accumulate  # past the end of the second epoch
    straight, all_seen, trainer = fit(tmp_path / "straight", SOURCES[kind](), accumulate, steps)
    assert "decides the order and carries its state" in next(x.reason for x in trainer.plan.lines if x.what == "data")
    for step in range(1, steps):
        source = SOURCES[kind]()
        checkpoint = str(tmp_path / "straight" / "checkpoints" / f"{step:06d}")
        policy, seen, trainer = fit(tmp_path / f"from {step}", source, accumulate, steps, resume=checkpoint)
        assert seen.rows == all_seen.rows[-len(seen.rows) :]
        assert trainer.step == steps
        assert_equal(policy.state_dict(), straight.state_dict())


class Fails(Callback):
    def on_after_backward(self, trainer: Trainer, policy: nn.Module) -> None:
        raise RuntimeError("the camera is gone")


@pytest.mark.parametrize("kind", ["iterable", "sampler", "loader"])
def test_error_in_the_first_window_after_a_resume_keeps_where_the_source_stands(tmp_path: Path, kind: str) -> None:
    _, all_seen, _ = fit(tmp_path / "straight", SOURCES[kind](), 1, 9)
    trainer = Trainer(
        "cpu", max_steps=9, batch_size=4, seed=1, run_dir=tmp_path / "run",
        callbacks=[Fails(), Checkpoint(save_on_exception=True)],
    )  # fmt: skip
    from_second_epoch = tmp_path / "straight" / "checkpoints" / "000007"
    with pytest.raises(RuntimeError, match="the camera is gone"):
        trainer.fit(Policy(), SOURCES[kind](), optimizer=lambda p: SGD(p, lr=1e-3), resume=from_second_epoch)
    kept = str(tmp_path / "run" / "checkpoints" / "000007-exception")
    _, seen, _ = fit(tmp_path / "mended", SOURCES[kind](), 1, 9, resume=kept)
    assert [row[0] for row in seen.rows] == [row[0] for row in all_seen.rows[-len(seen.rows) :]]
    assert len(seen.rows) == 8


@pytest.mark.parametrize("kind", ["iterable", "sampler", "loader"])
def test_seen_samples_are_not_read_again(tmp_path: Path, kind: str) -> None:
    fit(tmp_path, SOURCES[kind](), 1, 3)
    source = SOURCES[kind]()
    fit(tmp_path, source, 1, 4, resume="last")
    reads = getattr(source, "dataset", source).reads
    assert len(reads) <= 12  # a batch, a buffer and what is drawn ahead; dropping would have read twelve before those


@pytest.mark.parametrize("accumulate", [1, 2])
def test_states_are_kept_as_far_back_as_a_failure_of_ranks_goes_also_where_a_device_copies_ahead(
    accumulate: int,
) -> None:
    def data() -> TrainingData:
        return data_of(Stream(), 0, 2, batch_size=1, accumulate=accumulate)

    plain = data()
    stood = {batch.index: plain.state(0, batch.index) for batch in plain.epoch(0)}
    assert len({state["source"]["position"] for state in stood.values() if state}) > 4
    copying = data()
    copied = copying.epoch(0)
    ahead = list(islice(copied, 1))
    while ahead:
        index = ahead.pop().index
        ahead = list(islice(copied, 1))
        begins = max(0, index // accumulate - 1) * accumulate  # of the window before, which came to nothing too
        state, then = copying.state(0, begins), stood[begins]
        assert (state or {}).get("source") == (then or {}).get("source"), index  # none before anything is drawn


def test_iterable_in_workers_is_not_exact_and_the_plan_says_what_would_be(tmp_path: Path) -> None:
    loader = DataLoader(Stream(), batch_size=4, num_workers=1)
    _, _, trainer = fit(tmp_path, loader, 1, 2)
    reason = next(x.reason for x in trainer.plan.lines if x.what == "data")
    assert reason.startswith("resume is not exact: Stream decides the order")
    assert "set workers to 0" in reason


def test_state_that_the_source_does_not_take_back_is_an_error_that_names_it_and_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit(tmp_path, Batches(), 1, 2)

    def failing(state: dict[str, Any]) -> None:
        raise KeyError("offset")

    source = Batches()
    monkeypatch.setattr(source, "load_state_dict", failing)
    message = r"Batches did not take back the state .*KeyError: 'offset'\.\n.*changes=\['data'\]"
    with pytest.raises(CheckpointError, match=message):
        fit(tmp_path, source, 1, 4, resume="last")
    _, seen, _ = fit(tmp_path, source, 1, 4, resume="last", changes=["data"])
    assert [row[0] for row in seen.rows] == list(range(8))  # the next epoch, without the state


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"order": {1, 2}}, r"Batches\.state_dict\(\)/order is a builtins\.set, which a checkpoint cannot keep"),
        ({"lock": threading.Lock()}, "Batches does not say where it stands: TypeError: cannot pickle"),
        (None, "Batches does not say where it stands: ZeroDivisionError"),
    ],
    ids=["set", "lock", "error"],
)
def test_state_that_no_checkpoint_can_keep_is_refused_at_the_first_window(
    tmp_path: Path, state: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Batches()
    monkeypatch.setattr(source, "state_dict", lambda: 1 / 0 if state is None else state)
    with pytest.raises(CheckpointError, match=message):
        fit(tmp_path, source, 1, 9)
    assert not (tmp_path / "checkpoints").exists()


def test_sampler_whose_state_cannot_be_kept_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = sampled()
    monkeypatch.setattr(source.sampler, "state_dict", lambda: {"order": {1}})
    with pytest.raises(CheckpointError, match=r"Shuffled\.state_dict\(\)/order is a builtins\.set"):
        fit(tmp_path, source, 1, 9)


def test_checkpoint_of_a_resumed_run_that_drew_nothing_has_the_state_still(tmp_path: Path) -> None:
    fit(tmp_path, Stream(), 1, 3)

    class AtOnce(Callback):
        def on_fit_start(self, trainer: Trainer, policy: nn.Module) -> None:
            trainer.save_checkpoint(tmp_path / "copy")

    trainer = Trainer("cpu", max_steps=3, batch_size=4, seed=1, run_dir=tmp_path, callbacks=[AtOnce()])
    trainer.fit(Policy(), Stream(), optimizer=lambda p: SGD(p, lr=1e-3), resume="last")
    _, seen, _ = fit(tmp_path / "a", Stream(), 1, 6, resume=str(tmp_path / "copy"))
    _, straight, _ = fit(tmp_path / "b", Stream(), 1, 6)
    assert seen.rows == straight.rows[12:]
