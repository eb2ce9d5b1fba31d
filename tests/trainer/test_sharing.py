"""Ranks that share training and validation data; each rank is made here in turn, in one process."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    Sampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from toys import Augmented, Ids, Telling, data_of

from policyfit.strategies.errors import ConfigError, DistributedError
from policyfit.strategies.facts import MachineFacts
from policyfit.trainer.data import TrainingData, counted, validation_loader
from policyfit.trainer.sampler import epoch_order

WORLDS = [1, 2, 3, 4]


class Stream(IterableDataset[Any]):
    """Yields the index and a draw of a global random stream, in an order drawn from another."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[Any]:
        for index in random.sample(range(self.n), self.n):
            yield torch.tensor([index, torch.rand((), dtype=torch.float64).item()], dtype=torch.float64)


class CarriedStream(Stream):
    """Says where it stands, and is asked for what comes next only."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.rest, self.reads = list[int](), 0

    def __iter__(self) -> Iterator[Any]:
        if not self.rest:
            self.rest = random.sample(range(self.n), self.n)
        while self.rest:
            self.reads += 1
            index = self.rest.pop()
            yield torch.tensor([index, torch.rand((), dtype=torch.float64).item()], dtype=torch.float64)

    def state_dict(self) -> dict[str, Any]:
        return {"rest": self.rest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rest = list(state["rest"])


class Shuffled(Sampler[int]):
    """An order of its own, which it carries."""

    def __init__(self, n: int) -> None:
        self.n, self.rest = n, list[int]()

    def __iter__(self) -> Iterator[int]:
        if not self.rest:
            self.rest = random.sample(range(self.n), self.n)
        while self.rest:
            yield self.rest.pop()

    def state_dict(self) -> dict[str, Any]:
        return {"rest": self.rest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rest = list(state["rest"])


class Uneven(Sampler[list[int]]):
    """Batches of these sizes, and nobody knows how many there are."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes

    def __iter__(self) -> Iterator[list[int]]:
        first = 0
        for size in self.sizes:
            yield list(range(first, first + size))
            first += size


class Loader:
    """The loader of another library, which shuffles in a global random stream."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes

    def __iter__(self) -> Iterator[Tensor]:
        first = int(torch.randint(1000, ()))
        for size in self.sizes:
            yield torch.arange(first, first + size)
            first += size


class SizedLoader(Loader):
    def __len__(self) -> int:
        return len(self.sizes)


def validation_of(source: Any, rank: int, world_size: int, **changes: Any) -> Any:
    settings: dict[str, Any] = {
        "batch_size": 2,
        "workers": 0,
        "pin_memory": False,
        "device_type": "cpu",
        "facts": MachineFacts(),
    }
    return validation_loader(source, rank=rank, world_size=world_size, **settings | changes)


def ranks_of(make: Callable[[], Any], world_size: int, **changes: Any) -> list[TrainingData]:
    return [data_of(make(), rank, world_size, **changes) for rank in range(world_size)]


def together(ranks: list[TrainingData], epoch: int = 0) -> list[list[Any]]:
    """What counts of every micro-batch, over all ranks; all ranks make the same number of them."""
    drawn = [list(data.epoch(epoch)) for data in ranks]
    return [
        [row for micro in micros if micro.divisor != math.inf for row in micro.batch.tolist()]
        for micros in zip(*drawn, strict=True)
    ]


def rows(data: TrainingData, epoch: int, start: int = 0) -> list[tuple[int, float, bool, Any]]:
    return [
        (micro.index, micro.divisor, micro.remaining == 0, micro.batch.tolist()) for micro in data.epoch(epoch, start)
    ]


# Our order


@pytest.mark.parametrize(
    ("world_size", "n", "batch_size", "drop_last"),
    [row for row in product(WORLDS, [1, 5, 12, 23], [1, 4], [False, True]) if row[1] >= row[0] * row[2] or not row[3]],
)
def test_ranks_together_see_what_one_rank_with_their_batch_sees(
    world_size: int, n: int, batch_size: int, drop_last: bool
) -> None:
    def loader(size: int) -> DataLoader[int]:
        return DataLoader(Ids(n), size, shuffle=True, drop_last=drop_last)

    ranks = ranks_of(lambda: loader(batch_size), world_size)
    alone = data_of(loader(batch_size * world_size))
    for epoch in (0, 1):
        assert together(ranks_of(lambda: loader(batch_size), world_size), epoch) == together([alone], epoch)
    for data in ranks:
        assert data.batches_per_epoch == alone.batches_per_epoch == len(list(data.epoch(0)))
        assert (data.samples_per_epoch, data.batch_size) == (alone.samples_per_epoch, batch_size)


@pytest.mark.parametrize("workers", [0, 2])
def test_parts_are_cut_from_each_micro_batch_in_the_order_of_the_ranks(workers: int) -> None:
    order = epoch_order(11, 7, 1, shuffle=True).tolist()
    first, second = ranks_of(lambda: Ids(11), 2, batch_size=2, workers=workers)
    assert [micro.batch.tolist() for micro in first.epoch(1)] == [order[0:2], order[4:6], order[8:10]]
    assert [micro.batch.tolist() for micro in second.epoch(1)] == [order[2:4], order[6:8], order[10:]]
    assert [micro.divisor for micro in first.epoch(1)] == [1.0, 1.0, 3 / 4]
    assert [micro.divisor for micro in second.epoch(1)] == [1.0, 1.0, 3 / 2]
    first.close()
    second.close()


def test_a_rank_without_samples_pads_with_the_start_of_the_order_and_counts_for_nothing() -> None:
    order = epoch_order(9, 7, 0, shuffle=True).tolist()
    last = [list(data.epoch(0))[-1] for data in ranks_of(lambda: Ids(9), 4, batch_size=2)]
    assert [micro.batch.tolist() for micro in last] == [order[8:], order[:2], order[:2], order[:2]]
    assert [micro.divisor for micro in last] == [1 / 4, math.inf, math.inf, math.inf]
    assert all(micro.remaining == 0 for micro in last)


def test_data_of_fewer_samples_than_ranks_is_padded_on_all_but_the_first() -> None:
    drawn = [list(data.epoch(0)) for data in ranks_of(lambda: Ids(1), 3)]
    assert [[(m.batch.tolist(), m.divisor, m.remaining == 0) for m in micros] for micros in drawn] == [
        [([0], 1 / 3, True)],
        [([0], math.inf, True)],
        [([0], math.inf, True)],
    ]


def test_single_items_are_shared_one_by_one() -> None:
    order = epoch_order(5, 7, 0, shuffle=True).tolist()
    ranks = ranks_of(lambda: DataLoader(Ids(5), batch_size=None, shuffle=True), 2, accumulate=2)
    drawn = [[(m.batch, m.divisor) for m in data.epoch(0)] for data in ranks]
    assert drawn[0] == [(order[0], 2.0), (order[2], 2.0), (order[4], 1 / 2)]
    assert drawn[1] == [(order[1], 2.0), (order[3], 2.0), (order[0], math.inf)]


@pytest.mark.parametrize("world_size", [2, 3])
def test_augmentation_is_the_same_for_any_number_of_ranks(world_size: int) -> None:
    alone = together([data_of(Augmented(12), batch_size=4 * world_size)], 3)
    assert together(ranks_of(lambda: Augmented(12), world_size), 3) == alone


def test_drop_last_that_leaves_no_micro_batch_for_every_rank_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one batch of them for each of the 2 ranks"):
        data_of(DataLoader(Ids(7), 4, drop_last=True), 1, 2)


# Weights


UNEVEN = [5, 1, 4, 4, 2, 3, 6]


def ours(inputs: Tensor) -> Any:
    return TensorDataset(inputs)


def sampled(inputs: Tensor) -> Any:
    return DataLoader(TensorDataset(inputs), batch_sampler=Uneven(UNEVEN))


class Finished:
    def __init__(self, inputs: Tensor) -> None:
        self.inputs = inputs

    def __iter__(self) -> Iterator[Any]:
        return ((part,) for part in torch.split(self.inputs, UNEVEN))


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("source", [ours, sampled, Finished])
def test_the_mean_over_ranks_of_gradients_is_that_of_all_samples_of_the_window(
    source: Callable[[Tensor], Any], world_size: int, accumulate: int
) -> None:
    torch.manual_seed(0)
    inputs, model = torch.randn(25, 3, dtype=torch.float64), nn.Linear(3, 1, dtype=torch.float64)
    ranks = ranks_of(lambda: source(inputs), world_size, accumulate=accumulate)
    drawn = [list(data.epoch(0)) for data in ranks]
    gradients, seen, samples = torch.zeros(1, 3, dtype=torch.float64), list[Tensor](), 0
    for micros in zip(*drawn, strict=True):
        for micro in micros:
            share = model(micro.batch[0]).square().mean() / micro.divisor / world_size
            gradients += torch.autograd.grad(share, [model.weight])[0]
            seen += [micro.batch[0]] if micro.divisor < math.inf else []
        assert len({micro.remaining == 0 for micro in micros}) == 1
        if micros[0].remaining == 0:
            whole = model(torch.cat(seen)).square().mean()
            # the same float64 numbers, summed in another order
            torch.testing.assert_close(gradients, torch.autograd.grad(whole, [model.weight])[0], rtol=1e-12, atol=1e-14)
            gradients.zero_()
            samples += sum(len(batch) for batch in seen)
            seen = []
    assert seen == []
    assert samples == 25


@pytest.mark.parametrize(
    "source", [lambda: Ids(25), lambda: DataLoader(Ids(25), 4, sampler=Shuffled(25)), lambda: SizedLoader([4] * 5)]
)
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("world_size", WORLDS)
def test_the_shares_of_a_window_sum_to_the_number_of_ranks(
    source: Callable[[], Any], world_size: int, accumulate: int
) -> None:
    drawn = [list(data.epoch(0)) for data in ranks_of(source, world_size, accumulate=accumulate)]
    total = 0.0
    for micros in zip(*drawn, strict=True):
        total += sum(1 / micro.divisor for micro in micros)
        if micros[0].remaining == 0:
            assert total == pytest.approx(world_size, rel=1e-12)
            total = 0.0
    assert total == 0.0


# Resuming and workers


SOURCES: dict[str, Callable[[int], Any]] = {
    "ours": lambda workers: DataLoader(
        Augmented(23), 2, shuffle=True, num_workers=workers, persistent_workers=workers > 0
    ),
    "kept": lambda workers: DataLoader(
        Augmented(23),
        2,
        sampler=WeightedRandomSampler([1.0] * 23, 23),
        num_workers=workers,
        persistent_workers=workers > 0,
    ),
    "iterable": lambda workers: DataLoader(Stream(23), 2, num_workers=workers // 2),
}


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", SOURCES)
def test_every_rank_goes_on_from_any_start(kind: str, workers: int, accumulate: int) -> None:
    for rank in range(3):
        whole = rows(data_of(SOURCES[kind](workers), rank, 3, accumulate=accumulate), 1)
        assert len(whole) == 4
        data = data_of(SOURCES[kind](workers), rank, 3, accumulate=accumulate)
        for start in range(0, 5, accumulate):
            assert rows(data, 1, start) == whole[start:]
        data.close()


@pytest.mark.parametrize("sampler", [None, SequentialSampler(range(23)), Uneven([2] * 11 + [1])])
def test_a_rank_reads_its_own_samples_only_and_none_from_before_the_start(sampler: Any) -> None:
    reads = []
    for rank in range(3):  # 23 samples in twelve batches of two, the last of one
        options = {"batch_sampler": sampler} if isinstance(sampler, Uneven) else {"batch_size": 2, "sampler": sampler}
        dataset = Ids(23)
        list(data_of(DataLoader(dataset, **options), rank, 3).epoch(0, start=2))
        reads.append(dataset.reads)
    assert reads == [4, 4, 3]


@pytest.mark.parametrize("world_size", [1, 2])
def test_persistent_workers_of_every_rank_hear_of_epochs(world_size: int) -> None:
    for rank in range(world_size):
        data = data_of(Telling(16), rank, world_size, workers=1)
        assert [[set(m.batch.tolist()) for m in data.epoch(epoch)] for epoch in (0, 1, 5)] == [
            [{epoch}] * (4 // world_size) for epoch in (0, 1, 5)
        ]
        data.close()


def carried_sampler(n: int) -> Any:
    return DataLoader(Augmented(n), 2, sampler=Shuffled(n))


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("make", [CarriedStream, carried_sampler])
def test_the_state_of_one_rank_puts_any_rank_where_it_was(make: Callable[[int], Any], accumulate: int) -> None:
    settings = {"batch_size": 2, "accumulate": accumulate}
    first = data_of(make(13), 0, 3, **settings)
    states = {0: None} | {m.index + 1: first.state(0, m.index + 1) for m in first.epoch(0) if m.remaining == 0}
    assert list(states)[-1] == 3
    for rank in range(3):
        straight = data_of(make(13), rank, 3, **settings)
        expected, following = rows(straight, 0), rows(straight, 1)
        for start, state in states.items():
            source = make(13)
            data = data_of(source, rank, 3, **settings)
            data.load_state(state)
            assert rows(data, 0, start) == expected[start:]
            assert rows(data, 1) == following


# A sampler of the user's


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_take_the_batches_of_a_kept_sampler_in_turn(world_size: int, workers: int) -> None:
    def loader() -> DataLoader[Any]:
        return DataLoader(Augmented(11), 2, sampler=WeightedRandomSampler([1.0] * 11, 19), num_workers=workers)

    alone = [micro.batch.tolist() for micro in data_of(loader()).epoch(2)]
    ranks = ranks_of(loader, world_size)
    assert [data.batches_per_epoch for data in ranks] == [-(-10 // world_size)] * world_size
    assert together(ranks, 2) == [
        [row for batch in alone[i : i + world_size] for row in batch] for i in range(0, 10, world_size)
    ]


def test_a_kept_sampler_without_a_length_ends_on_all_ranks_alike() -> None:
    ranks = ranks_of(lambda: DataLoader(Ids(15), batch_sampler=Uneven([1, 2, 3, 4, 5])), 2)
    assert [data.batches_per_epoch for data in ranks] == [None, None]
    drawn = [rows(data, 0) for data in ranks]
    assert drawn[0] == [(0, 3 / 2, True, [0]), (1, 7 / 6, True, [3, 4, 5]), (2, 1 / 2, True, [10, 11, 12, 13, 14])]
    assert drawn[1] == [
        (0, 3 / 4, True, [1, 2]),
        (1, 7 / 8, True, [6, 7, 8, 9]),
        (2, math.inf, True, [10, 11, 12, 13, 14]),
    ]


def test_single_items_of_a_kept_sampler_count_alike() -> None:
    def loader() -> DataLoader[Any]:
        parts: Any = [torch.zeros(size) for size in (1, 2, 3)]
        return DataLoader(parts, batch_size=None, sampler=SequentialSampler(range(2)))

    assert [[m.divisor for m in data.epoch(0)] for data in ranks_of(loader, 2)] == [[1.0], [1.0]]


def test_the_plan_says_that_a_kept_sampler_must_be_alike_on_all_ranks() -> None:
    data = data_of(DataLoader(Ids(4), sampler=Shuffled(4)), 1, 2)
    assert "Each of the 2 ranks reads one in 2 of the micro-batches that Shuffled gives" in data.notes[-1]


# Sources of finished batches


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("loader", [Loader, SizedLoader])
def test_ranks_take_the_batches_of_another_library_in_turn(loader: type[Loader], world_size: int) -> None:
    sizes = [3, 1, 4, 2, 2]
    drawn = []
    for rank in range(world_size):
        torch.manual_seed(rank)  # the ranks' own streams differ, and must not part what they share
        data = data_of(loader(sizes), rank, world_size)
        drawn.append(list(data.epoch(0)))
        assert data.batches_per_epoch == (None if loader is Loader else -(-5 // world_size))
    own = [m for micros in zip(*drawn, strict=True) for m in micros if m.divisor < math.inf]
    assert [len(micro.batch) for micro in own] == sizes
    seen = torch.cat([micro.batch for micro in own])
    assert torch.equal(seen, torch.arange(12) + seen[0])
    assert [len(micros) for micros in drawn] == [-(-5 // world_size)] * world_size


@pytest.mark.parametrize("workers", [0, 1])
def test_ranks_take_the_batches_of_an_iterable_dataset_in_turn(workers: int) -> None:
    alone = [row for batch in together([data_of(Stream(13), workers=workers)], 1) for row in batch]
    ranks = ranks_of(lambda: Stream(13), 3, workers=workers)
    assert "Each of the 3 ranks reads all of Stream" in ranks[0].notes[-1]
    assert [row for batch in together(ranks, 1) for row in batch] == alone


class Own(Stream):
    """Each rank's own part of the data."""

    shards_by_rank = True

    def __init__(self, n: int, said: int) -> None:
        super().__init__(n)
        self.said = said

    def __len__(self) -> int:
        return self.said


def test_a_rank_uses_all_of_what_its_own_data_gives() -> None:
    ranks = ranks_of(lambda: Own(8, 8), 2, accumulate=2)
    assert [data.batches_per_epoch for data in ranks] == [2, 2]
    drawn = [list(data.epoch(0)) for data in ranks]
    assert [[(m.divisor, m.remaining == 0) for m in micros] for micros in drawn] == [[(2.0, False), (2.0, True)]] * 2
    first, second = (torch.cat([m.batch for m in micros]) for micros in drawn)
    assert sorted(first[:, 0].tolist()) == sorted(second[:, 0].tolist()) == list(range(8))
    assert set(first[:, 1].tolist()).isdisjoint(second[:, 1].tolist())  # drawn in streams of each rank's own
    assert "the micro-batches of all ranks count alike" in ranks[0].notes[-1]


def test_data_of_a_ranks_own_is_read_again_when_a_run_resumes() -> None:
    class OwnCarried(CarriedStream):
        shards_by_rank = True

        def __len__(self) -> int:
            return self.n

    data = data_of(OwnCarried(8), 1, 2)
    whole = rows(data, 0)
    assert data.state(0, 1) is None
    assert data.not_exact is not None
    assert data.not_exact.endswith("goes on exactly only if the same data comes again.")
    assert rows(data_of(OwnCarried(8), 1, 2), 0, start=1) == whole[1:]


def test_data_of_a_ranks_own_needs_a_length() -> None:
    loader = Loader([4, 4])
    loader.shards_by_rank = True  # type: ignore[attr-defined]
    with pytest.raises(
        DistributedError, match="Loader says that it gives each of the 2 ranks data of its own, but has no length"
    ):
        data_of(loader, 0, 2)
    assert data_of(loader).batches_per_epoch is None


@pytest.mark.parametrize(("gives", "found"), [(1, "only 1"), (2, None), (3, "more")])
def test_data_of_a_ranks_own_must_have_the_length_it_says(gives: int, found: str | None) -> None:
    class Said(Loader):
        shards_by_rank = True

        def __len__(self) -> int:
            return 2

    data = data_of(Said([4] * gives), 0, 2)
    if found is None:
        assert len(list(data.epoch(0))) == 2
    else:
        with pytest.raises(DistributedError, match=f"has a length of 2 micro-batches, but gave {found}"):
            list(data.epoch(0))


# Data that is shared already


def loader_with_distributed_sampler(cls: type[DataLoader[Any]] = DataLoader) -> DataLoader[Any]:
    return cls(Ids(8), 2, sampler=DistributedSampler(Ids(8), num_replicas=2, rank=1, shuffle=False))


def batches_of_distributed_sampler() -> DataLoader[Any]:
    sampler: Any = DistributedSampler(Ids(8), num_replicas=2, rank=1, shuffle=False)
    return DataLoader(Ids(8), batch_sampler=BatchSampler(sampler, 2, False))


def marked_dataset() -> Any:
    dataset = Ids(8)
    dataset.shards_by_rank = True  # type: ignore[attr-defined]
    return dataset


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (loader_with_distributed_sampler, "DistributedSampler"),
        (batches_of_distributed_sampler, "DistributedSampler"),
        (marked_dataset, "Ids"),
        (lambda: DataLoader(marked_dataset(), 2), "Ids"),
    ],
)
def test_a_part_is_not_shared_again(make: Callable[[], Any], name: str) -> None:
    for share in (data_of, validation_of):
        with pytest.raises(DistributedError, match=f"{name} gives each of the 2 ranks its own part of Ids"):
            share(make(), 1, 2)
    assert data_of(make()).batches_per_epoch in (2, 4)  # alone, it is the data there is


def test_a_loader_of_another_class_keeps_its_distributed_sampler() -> None:
    class Other(DataLoader[Any]):
        pass

    data = data_of(loader_with_distributed_sampler(Other), 1, 2)
    assert [micro.batch.tolist() for micro in data.epoch(0)] == [[1, 3], [5, 7]]
    assert list(validation_of(loader_with_distributed_sampler(Other), 1, 2))[1][0].tolist() == [5, 7]


# Validation


class Chunks:
    def __iter__(self) -> Iterator[Tensor]:
        return (torch.arange(9)[i : i + 2] for i in range(0, 9, 2))


class Counting(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(9))


VALIDATED: dict[str, Callable[[int], Any]] = {
    "dataset": lambda workers: Ids(9),
    "loader": lambda workers: DataLoader(Ids(9), 2, num_workers=workers),
    "another class": lambda workers: type("Own", (DataLoader,), {})(Ids(9), 2, num_workers=workers),
    "iterable dataset": lambda workers: Counting(),
    "another library": lambda workers: Chunks(),
}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", VALIDATED)
@pytest.mark.parametrize("world_size", WORLDS)
def test_ranks_validate_on_disjoint_batches_in_order(world_size: int, kind: str, workers: int) -> None:
    loaders = [validation_of(VALIDATED[kind](workers), rank, world_size, workers=workers) for rank in range(world_size)]
    for _ in range(2):  # every pass is the same
        drawn = [[(batch.tolist(), counts) for batch, counts in counted(loader)] for loader in loaders]
        assert [len(batches) for batches in drawn] == [-(-5 // world_size)] * world_size
        taken = [batch for batches in zip(*drawn, strict=True) for batch, counts in batches if counts]
        assert taken == [[0, 1], [2, 3], [4, 5], [6, 7], [8]]


def test_a_rank_reads_only_its_own_batches_of_a_validation_loader() -> None:
    reads = []
    for rank in range(2):
        loader = DataLoader(Ids(8), 2)
        list(validation_of(loader, rank, 2))
        reads.append(loader.dataset.reads)  # type: ignore[attr-defined]
    assert reads == [4, 4]


def test_validation_samples_of_a_dataset_are_the_same_for_any_number_of_ranks() -> None:
    alone = [row for batch, _ in counted(validation_of(Augmented(6), 0, 1)) for row in batch.tolist()]
    ranks = [[batch.tolist() for batch, counts in validation_of(Augmented(6), r, 2) if counts] for r in range(2)]
    assert [*ranks[0][0], *ranks[1][0], *ranks[0][1]] == alone


def test_validation_does_not_ask_a_sampler_for_its_state() -> None:
    class Asked(Shuffled):
        def state_dict(self) -> dict[str, Any]:
            raise AssertionError

    loader = validation_of(DataLoader(Ids(8), 2, sampler=Asked(8)), 0, 2)
    assert [len(list(loader)) for _ in range(2)] == [2, 2]


def test_an_empty_validation_dataset_has_no_batch_on_any_rank() -> None:
    assert [list(counted(validation_of([], rank, 2))) for rank in range(2)] == [[], []]


def test_one_process_validates_on_bare_batches_and_all_count() -> None:
    loader = DataLoader(Ids(4), 2)
    assert validation_of(loader, 0, 1) is loader
    assert [(batch.tolist(), counts) for batch, counts in counted(loader)] == [([0, 1], True), ([2, 3], True)]


def test_own_validation_data_of_each_rank_is_used_whole() -> None:
    assert [len(list(validation_of(Own(4, 4), rank, 2))) for rank in range(2)] == [2, 2]
    with pytest.raises(DistributedError, match="gave only 2"):
        list(validation_of(Own(4, 6), 0, 2))
