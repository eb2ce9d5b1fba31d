from __future__ import annotations

import itertools
import multiprocessing
import os
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)
from toys import Augmented, Ids, Telling, data_of

from policyfit.strategies.errors import ConfigError
from policyfit.strategies.facts import MachineFacts
from policyfit.trainer.data import TrainingData, count_samples, validation_loader
from policyfit.trainer.sampler import epoch_order
from policyfit.trainer.streams import read_streams


class Failing(Ids):
    def __init__(self, error: type[Exception]) -> None:
        super().__init__(10)
        self.error = error

    def __getitem__(self, index: int) -> int:
        if index == 5:
            raise self.error("no such frame")
        return index


class Stream(IterableDataset[Any]):
    """Yields the epoch that it was told, the index, and one draw of each global random stream."""

    def __init__(self, n: int) -> None:
        self.n, self.told = n, -1

    def set_epoch(self, epoch: int) -> None:
        self.told = epoch

    def __iter__(self) -> Iterator[Any]:
        for index in range(self.n):
            draws = [random.random(), float(np.random.rand()), torch.rand(()).item()]
            yield torch.tensor([self.told, index, *draws], dtype=torch.float64)


class SizedStream(Stream):
    def __len__(self) -> int:
        return self.n


class Reversed(Sampler[int]):
    """A sampler of a user's own; remembers the epochs that it was told."""

    def __init__(self, n: int) -> None:
        self.n, self.epochs = n, list[int]()

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.n - 1, -1, -1))

    def __len__(self) -> int:
        return self.n


class Batches:
    """The loader of some other library: finished batches, a length, nothing else."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.full((4,), number) for number in range(self.n))

    def __len__(self) -> int:
        return self.n


def loader_of(source: Any, **changes: Any) -> Any:
    settings: dict[str, Any] = {"workers": 0, "pin_memory": False, "device_type": "cpu", "facts": MachineFacts()}
    return validation_loader(source, **settings | changes)


def ids(data: TrainingData, epoch: int, start: int = 0) -> list[list[int]]:
    return [micro.batch.tolist() for micro in data.epoch(epoch, start)]


def rows(data: TrainingData, epoch: int, start: int = 0) -> list[list[float]]:
    return [row for batch in ids(data, epoch, start) for row in batch]  # type: ignore[misc]


def same(before: Any, after: Any) -> bool:
    numpy_same = all(np.array_equal(b, a) for b, a in zip(before[1], after[1], strict=True))
    return bool(before[0] == after[0] and numpy_same and torch.equal(before[2], after[2]))


# Order


def test_epoch_order_is_the_same_again_and_differs_between_epochs_and_seeds() -> None:
    first = epoch_order(100, 7, 3, shuffle=True).tolist()
    assert first == epoch_order(100, 7, 3, shuffle=True).tolist()
    assert sorted(first) == list(range(100))
    assert first != epoch_order(100, 7, 4, shuffle=True).tolist()
    assert first != epoch_order(100, 8, 3, shuffle=True).tolist()
    assert epoch_order(5, 7, 3, shuffle=False).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("workers", [0, 2])
def test_training_data_keeps_its_order_for_any_workers_epoch_and_start(workers: int) -> None:
    data = data_of(Ids(11), workers=workers)
    for epoch in (2, 0, 1):
        order = epoch_order(11, 7, epoch, shuffle=True).tolist()
        expected = [order[:4], order[4:8], order[8:]]
        for start in range(4):
            assert ids(data, epoch, start) == expected[start:]
    data.close()


def test_training_data_tells_its_sizes() -> None:
    data = data_of(Ids(11))
    assert (data.batches_per_epoch, data.samples_per_epoch, data.batch_size) == (3, 11, 4)
    assert data.not_exact is None
    assert data.notes == []
    assert data.stats is None


def test_training_data_passes_on_the_statistics_of_its_dataset() -> None:
    dataset = Ids(4)
    dataset.stats = {"action": {"mean": [0.0]}}  # type: ignore[attr-defined]
    assert data_of(dataset).stats == {"action": {"mean": [0.0]}}
    assert data_of(DataLoader(dataset)).stats == {"action": {"mean": [0.0]}}


def test_training_data_reads_no_sample_that_was_seen_before_the_start() -> None:
    dataset = Ids(4000)
    list(data_of(dataset).epoch(0, start=998))
    assert dataset.reads == 8


def test_training_data_numbers_micro_batches_within_the_epoch() -> None:
    assert [micro.index for micro in data_of(Ids(20)).epoch(3, start=2)] == [2, 3, 4]


def test_training_data_reads_a_list_of_samples() -> None:
    data = data_of([{"x": torch.tensor([float(i)])} for i in range(4)], batch_size=2)
    order = epoch_order(4, 7, 0, shuffle=True).tolist()
    assert [m.batch["x"].flatten().tolist() for m in data.epoch(0)] == [order[:2], order[2:]]


def test_training_data_ends_an_epoch_left_in_the_middle_when_the_next_begins() -> None:
    data = data_of(Ids(12), workers=2)
    next(iter(data.epoch(0)))
    order = epoch_order(12, 7, 1, shuffle=True).tolist()
    assert ids(data, 1) == [order[:4], order[4:8], order[8:]]
    data.close()


def test_training_data_reuses_its_workers_and_ends_them_at_close() -> None:
    data = data_of(Ids(8), workers=2)
    ids(data, 0)
    workers = {child.pid for child in multiprocessing.active_children()}
    ids(data, 1)
    assert {child.pid for child in multiprocessing.active_children()} == workers
    assert len(workers) == 2
    data.close()
    assert multiprocessing.active_children() == []


def test_training_data_resumed_at_the_end_of_an_epoch_gives_nothing_more_of_it() -> None:
    assert ids(data_of(Ids(8)), 0, start=2) == []


@pytest.mark.parametrize(
    "source",
    [Ids(8), DataLoader(Ids(8), 4, sampler=Reversed(8)), Batches(2)],
    ids=["ours", "kept", "iterable"],
)
def test_training_data_says_so_when_the_epoch_has_shrunk_below_the_start(source: Any) -> None:
    with pytest.raises(ConfigError, match="goes on from micro-batch 3 of epoch 1, but that epoch has only 2"):
        list(data_of(source).epoch(1, start=3))


# Random streams


@pytest.mark.parametrize("epoch", [0, 3])
def test_augmentation_is_the_same_for_any_workers_batch_size_and_start(epoch: int) -> None:
    expected = rows(data_of(Augmented(12)), epoch)
    two = data_of(Augmented(12), workers=2)
    rows(two, 1)  # persistent workers have made another epoch before
    assert rows(two, epoch) == expected
    assert rows(two, epoch, start=1) == expected[4:]
    two.close()
    assert rows(data_of(Augmented(12), batch_size=3), epoch) == expected


def test_augmentation_differs_between_samples_epochs_streams_and_seeds() -> None:
    data = data_of(Augmented(40))
    drawn = [row[1:] for epoch in range(3) for row in rows(data, epoch)]
    drawn += [row[1:] for row in rows(data_of(Augmented(40), seed=8), 0)]
    values = list(itertools.chain.from_iterable(drawn))
    assert len(set(values)) == 4 * 40 * 3


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["map", "iterable", "kept", "loader"])
def test_global_random_streams_stay_untouched(kind: str, workers: int) -> None:
    sources = {
        "map": Augmented(8),
        "iterable": Stream(8),
        "kept": DataLoader(Augmented(8), 4, sampler=WeightedRandomSampler([1.0] * 8, 8), num_workers=workers),
        "loader": DataLoader(Stream(8), 4, num_workers=workers),
    }
    np.random.randn()
    random.gauss(0, 1)  # both leave a second number pending
    data = data_of(sources[kind], workers=workers)
    before = read_streams()
    for _ in data.epoch(0):
        assert same(before, read_streams())
    assert same(before, read_streams())
    data.close()


def test_validation_leaves_the_global_random_streams_untouched() -> None:
    loader = loader_of(Augmented(8), batch_size=4)
    before = read_streams()
    list(loader)
    assert same(before, read_streams())


def test_global_random_streams_come_back_after_an_error() -> None:
    before = read_streams()
    with pytest.raises(RuntimeError):
        list(data_of(Failing(ValueError)).epoch(0))
    assert same(before, read_streams())


def test_global_random_draws_do_not_change_order_or_augmentation() -> None:
    expected = rows(data_of(Augmented(8)), 0)
    torch.rand(3)
    np.random.rand(3)
    random.random()
    assert rows(data_of(Augmented(8)), 0) == expected


@pytest.mark.parametrize("workers", [0, 2])
def test_a_drawing_collate_function_depends_on_its_batch_only(workers: int) -> None:
    loader = DataLoader(Ids(8), 4, shuffle=True, num_workers=workers, collate_fn=_drawing_collate)
    before = read_streams()
    drawn = [micro.batch for micro in data_of(loader).epoch(0)]
    assert same(before, read_streams())
    assert drawn == [
        micro.batch for micro in data_of(DataLoader(Ids(8), 4, True, collate_fn=_drawing_collate)).epoch(0)
    ]
    assert len(set(drawn)) == 2


def _drawing_collate(samples: list[int]) -> float:
    return random.random()


def test_a_batch_reading_dataset_is_asked_for_whole_batches_in_seeded_streams() -> None:
    class Batched(Ids):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            self.reads += 1
            return [torch.tensor([i, random.random()], dtype=torch.float64) for i in indices]

    dataset = Batched(8)
    first = rows(data_of(dataset), 0)
    assert dataset.reads == 2
    assert [int(row[0]) for row in first] == epoch_order(8, 7, 0, shuffle=True).tolist()
    assert rows(data_of(dataset), 0) == first
    assert rows(data_of(dataset), 0, start=1) == first[4:]
    assert len({row[1] for row in first}) == 8


def test_a_subset_is_read_sample_by_sample() -> None:
    subset = Subset(Augmented(20), [3, 5, 7, 9])
    one_by_one = rows(data_of(subset, batch_size=1), 0)
    assert rows(data_of(subset, batch_size=4), 0) == one_by_one
    assert sorted(int(row[0]) for row in one_by_one) == [3, 5, 7, 9]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataset_hears_of_every_epoch_where_its_samples_are_made(workers: int) -> None:
    data = data_of(Telling(8), workers=workers)
    assert [ids(data, epoch) for epoch in (0, 1, 5)] == [[[e] * 4] * 2 for e in (0, 1, 5)]
    data.close()


def test_validation_does_not_tell_a_dataset_its_own_epoch() -> None:
    dataset = Telling(4)
    dataset.set_epoch(3)
    loader = loader_of(dataset, batch_size=4)
    assert [batch.tolist() for batch in loader] == [[3] * 4]


# Errors in user code


@pytest.mark.parametrize("error", [IndexError, StopIteration, KeyError, ValueError])
@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_in_a_dataset_surfaces_with_the_index_and_its_cause(error: type[Exception], workers: int) -> None:
    data = data_of(Failing(error), workers=workers, batch_size=2)
    with pytest.raises(RuntimeError, match="Sample 5 of Failing could not be made in epoch 1") as caught:
        list(data.epoch(1))
    assert f"{error.__name__}: " in str(caught.value)
    assert "no such frame" in str(caught.value)
    if workers == 0:
        assert isinstance(caught.value.__cause__, error)
    data.close()
    assert multiprocessing.active_children() == []  # although the error is still held here


def test_an_error_in_a_validation_dataset_surfaces_with_the_index() -> None:
    loader = loader_of(Failing(StopIteration), batch_size=2)
    with pytest.raises(RuntimeError, match="Sample 5 of Failing"):
        list(loader)


def test_an_error_in_a_collate_function_surfaces_with_the_indices() -> None:
    def collate(samples: list[int]) -> Any:
        raise StopIteration

    with pytest.raises(RuntimeError, match=r"The batch of samples \[0, 1\] of Ids .*StopIteration"):
        list(data_of(DataLoader(Ids(4), 2, collate_fn=collate)).epoch(0))


def test_an_error_in_a_batch_reading_dataset_surfaces_with_the_indices() -> None:
    class Batched(Ids):
        def __getitems__(self, indices: list[int]) -> list[int]:
            raise IndexError("gone")

    with pytest.raises(RuntimeError, match=r"Samples \[0, 1\] of .*Batched .*IndexError: gone"):
        list(data_of(DataLoader(Batched(4), 2)).epoch(0))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("error", [IndexError, StopIteration])
def test_an_error_in_an_iterable_surfaces_with_the_micro_batch(error: type[Exception], workers: int) -> None:
    class Broken(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            yield from range(4)
            raise error("no such frame")

    with pytest.raises(RuntimeError, match="Micro-batch 2 of epoch 0 could not be drawn") as caught:
        list(data_of(DataLoader(Broken(), 2, num_workers=min(workers, 1))).epoch(0))
    assert caught.value.__cause__ is not None
    assert "no such frame" in str(caught.value) or error is StopIteration


# Windows


def windows(data: TrainingData, start: int = 0) -> list[tuple[float, bool]]:
    return [(micro.divisor, micro.remaining == 0) for micro in data.epoch(0, start)]


@pytest.mark.parametrize("source", [Ids(20), Batches(5)], ids=["ours", "iterable"])
def test_the_last_shorter_window_is_weighted_by_its_true_size(source: Any) -> None:
    data = data_of(source, accumulate=4)
    assert windows(data) == [(4.0, False)] * 3 + [(4.0, True), (1.0, True)]


@pytest.mark.parametrize("source", [Ids(12), Batches(3)], ids=["ours", "iterable"])
def test_a_window_longer_than_the_epoch_ends_with_it(source: Any) -> None:
    data = data_of(source, accumulate=4)
    for _ in range(2):
        assert windows(data) == [(3.0, False), (3.0, False), (3.0, True)]


@pytest.mark.parametrize("source", [Ids(10), Batches(3)], ids=["ours", "iterable"])
def test_without_accumulation_every_micro_batch_is_a_window(source: Any) -> None:
    assert windows(data_of(source)) == [(1.0, True)] * 3


@pytest.mark.parametrize("source", [Ids(28), Batches(7)], ids=["ours", "iterable"])
@pytest.mark.parametrize("start", range(8))
def test_windows_do_not_move_with_the_start(source: Any, start: int) -> None:
    data = data_of(source, accumulate=3)
    assert windows(data, start) == windows(data)[start:]


def test_a_smaller_last_batch_has_its_share_of_the_window() -> None:
    assert windows(data_of(Ids(10), accumulate=2)) == [(2.0, False), (2.0, True), (1.0, True)]
    assert windows(data_of(Ids(10), accumulate=3)) == [(2.5, False), (2.5, False), (5.0, True)]


@pytest.mark.parametrize(("n", "accumulate"), [(20, 4), (12, 4), (10, 3), (18, 4), (10, 1)])
def test_gradients_of_a_window_equal_those_of_its_concatenated_batch(n: int, accumulate: int) -> None:
    torch.manual_seed(0)
    inputs, model = torch.randn(n, 3), nn.Linear(3, 1)
    data = data_of(TensorDataset(inputs), accumulate=accumulate)
    seen: list[Tensor] = []
    for micro in data.epoch(0):
        (model(micro.batch[0]).square().mean() / micro.divisor).backward()
        seen.append(micro.batch[0])
        if micro.remaining == 0:
            gradient = model.weight.grad
            assert gradient is not None
            model.weight.grad = None
            (expected,) = torch.autograd.grad(model(torch.cat(seen)).square().mean(), [model.weight])
            # the same float32 numbers, summed in another order
            torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-6)
            seen = []
    assert seen == []


def test_an_iterable_without_accumulation_is_not_drawn_ahead() -> None:
    drawn = []

    class Watched(Batches):
        def __iter__(self) -> Iterator[Tensor]:
            for number in range(3):
                drawn.append(number)
                yield torch.zeros(1)

    micros = data_of(Watched(3)).epoch(0)
    next(micros)
    assert drawn == [0]


# DataLoaders


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("drop_last", [True, False])
def test_a_dataloader_with_torch_samplers_is_rebuilt_with_its_settings(shuffle: bool, drop_last: bool) -> None:
    loader = DataLoader(Ids(11), 3, shuffle=shuffle, drop_last=drop_last, collate_fn=tuple, generator=torch.Generator())
    data = data_of(loader)
    order = epoch_order(11, 7, 1, shuffle=shuffle).tolist()
    expected = [tuple(order[i : i + 3]) for i in range(0, 11, 3)]
    assert [micro.batch for micro in data.epoch(1)] == (expected[:3] if drop_last else expected)
    assert (data.batches_per_epoch, data.samples_per_epoch, data.batch_size) == ((3, 9, 3) if drop_last else (4, 11, 3))
    assert data.not_exact is None
    (note,) = data.notes
    assert f"rebuilt with policyfit's {'shuffled' if shuffle else 'sequential'} order" in note
    assert f"batch_size=3, drop_last={drop_last}" in note


def test_a_dataloader_keeps_its_workers_and_what_starts_them() -> None:
    loader = DataLoader(_Opened(6), 3, num_workers=2, worker_init_fn=_open, persistent_workers=True)
    data = data_of(loader)
    for epoch in (0, 1):
        batches = ids(data, epoch)
        assert [batch[0] == os.getpid() for batch in batches] == [False, False]
        assert len({batch[0] for batch in batches}) == 2
    data.close()


class _Opened(Ids):
    file = 0

    def __getitem__(self, index: int) -> int:
        return self.file


def _open(worker: int) -> None:
    info = torch.utils.data.get_worker_info()
    assert info is not None
    info.dataset.file = os.getpid()  # type: ignore[attr-defined]


def test_a_dataloader_works_with_spawned_workers() -> None:
    loader = DataLoader(Augmented(4), 2, num_workers=1, multiprocessing_context="spawn")
    spawned = data_of(loader)
    assert rows(spawned, 2) == rows(data_of(DataLoader(Augmented(4), 2)), 2)
    spawned.close()


def test_a_dataloader_without_collation_gives_single_items() -> None:
    data = data_of(DataLoader(Ids(5), batch_size=None, shuffle=True), accumulate=2)
    order = epoch_order(5, 7, 0, shuffle=True).tolist()
    assert [(m.batch, m.divisor) for m in data.epoch(0)] == list(zip(order, [2, 2, 2, 2, 1], strict=True))
    assert (data.batches_per_epoch, data.samples_per_epoch, data.batch_size) == (5, None, None)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"batch_size": 4, "sampler": WeightedRandomSampler([1.0] * 8, 8)}, "WeightedRandomSampler"),
        ({"batch_size": 4, "sampler": RandomSampler(range(8), replacement=True)}, "RandomSampler"),
        ({"batch_size": 4, "sampler": RandomSampler(range(8), num_samples=4)}, "RandomSampler"),
        ({"batch_size": 4, "sampler": SequentialSampler(range(4))}, "SequentialSampler"),
        ({"batch_size": 4, "sampler": Reversed(8)}, "Reversed"),
        ({"batch_sampler": BatchSampler(Reversed(8), 4, False)}, "Reversed"),
        ({"batch_sampler": [(0, 1), (2, 3)]}, "list"),
        ({"batch_size": None, "sampler": Reversed(8)}, "Reversed"),
    ],
)
def test_a_dataloader_with_another_sampler_keeps_it_and_says_so(options: dict[str, Any], name: str) -> None:
    loader = DataLoader(Ids(8), **options)
    data = data_of(loader)
    assert data.not_exact is not None
    assert data.not_exact.startswith(f"{name} decides the order")
    assert data.batches_per_epoch == len(loader) == len(list(data.epoch(0)))


def test_a_kept_sampler_gives_its_order_hears_of_epochs_and_skips_without_reading() -> None:
    dataset, sampler = Ids(8), Reversed(8)
    data = data_of(DataLoader(dataset, 4, sampler=sampler))
    assert ids(data, 0) == [[7, 6, 5, 4], [3, 2, 1, 0]]
    assert ids(data, 1, start=1) == [[3, 2, 1, 0]]
    assert sampler.epochs == [0, 1]
    assert dataset.reads == 12


@pytest.mark.parametrize("workers", [0, 2])
def test_a_kept_random_sampler_depends_on_seed_and_epoch_only(workers: int) -> None:
    def loader(workers: int) -> DataLoader[Any]:
        return DataLoader(Augmented(8), 4, sampler=WeightedRandomSampler([1.0] * 8, 64), num_workers=workers)

    expected = [rows(data_of(loader(0)), epoch) for epoch in (0, 1)]
    data = data_of(loader(workers))
    assert [rows(data, epoch) for epoch in (0, 1)] == expected
    assert rows(data, 1, start=2) == expected[1][8:]
    assert expected[0] != expected[1]
    assert len({row[1] for row in expected[0]}) == 64  # a sample that comes again is augmented anew
    data.close()


def test_a_dataloader_of_another_class_is_used_as_it_is() -> None:
    class Doubling(DataLoader[Any]):
        def __iter__(self) -> Any:
            return (batch * 2 for batch in super().__iter__())

    data = data_of(Doubling(Ids(4), 2))
    assert ids(data, 0) == [[0, 2], [4, 6]]
    assert data.notes[0].endswith("Doubling is used as it is.")
    assert data.not_exact is not None


def test_a_dataloader_of_another_class_is_refused_when_its_workers_cannot_hear_of_epochs() -> None:
    class Own(DataLoader[Any]):
        pass

    with pytest.raises(ConfigError, match="persistent_workers=False"):
        data_of(Own(Telling(4), 2, num_workers=1, persistent_workers=True))


@pytest.mark.parametrize("device_type", ["cpu", "mps"])
def test_pinning_is_switched_off_with_a_note_where_the_device_does_not_pin(device_type: str) -> None:
    loaders: list[DataLoader[Any]] = [
        DataLoader(Ids(4), 2, pin_memory=True),
        DataLoader(Stream(4), 2, pin_memory=True),
        type("Own", (DataLoader,), {})(Ids(4), 2, pin_memory=True),
    ]
    for loader in loaders:
        data = data_of(loader, device_type=device_type)
        assert len(list(data.epoch(0))) == 2  # torch would warn here
        assert (
            f"pin_memory=True of the DataLoader was switched off: pinned memory is of no use to {device_type}."
            in data.notes
        )
        assert loader.pin_memory  # the user's own stays as it was
        validation = loader_of(loader, batch_size=2, device_type=device_type)
        assert isinstance(validation, DataLoader)
        assert not validation.pin_memory


def test_batches_out_of_order_are_switched_off_with_a_note() -> None:
    data = data_of(DataLoader(Ids(4), 2, in_order=False))
    assert data.notes[0] == "in_order=False of the DataLoader was switched off: its batches come in order."


# Iterables


@pytest.mark.parametrize("workers", [0, 1])
def test_an_iterable_dataset_depends_on_seed_and_epoch_only(workers: int) -> None:
    data = data_of(Stream(8), workers=workers)
    first, second = rows(data, 0), rows(data, 1)
    assert [row[:2] for row in first] == [[0, i] for i in range(8)]
    assert [row[:2] for row in second] == [[1, i] for i in range(8)]  # set_epoch reached the worker
    assert {row[2] for row in first}.isdisjoint({row[2] for row in second})
    again = data_of(Stream(8), workers=workers)
    assert rows(again, 1) == second
    assert rows(again, 1, start=1) == second[4:]
    assert data.not_exact is not None
    assert "Stream decides the order" in data.not_exact


def test_an_iterable_dataset_has_a_length_only_if_it_says_one() -> None:
    assert data_of(Stream(9)).batches_per_epoch is None
    assert data_of(SizedStream(9)).batches_per_epoch == 3


def test_a_dataloader_over_an_iterable_tells_its_workers_every_epoch() -> None:
    loader = DataLoader(Stream(4), 2, num_workers=1, persistent_workers=True)
    data = data_of(loader)
    assert [row[0] for epoch in (0, 1) for row in rows(data, epoch)] == [0.0] * 4 + [1.0] * 4
    assert any("persistent_workers of the DataLoader was switched off" in note for note in data.notes)
    assert multiprocessing.active_children() == []


def test_the_loader_of_another_library_is_used_as_it_is() -> None:
    data = data_of(Batches(3))
    assert ids(data, 0) == ids(data, 1) == [[0] * 4, [1] * 4, [2] * 4]
    assert ids(data, 1, start=2) == [[2] * 4]
    assert (data.batches_per_epoch, data.samples_per_epoch) == (3, None)


@pytest.mark.parametrize("source", [iter([torch.zeros(1)]), (torch.zeros(1) for _ in range(3))])
def test_an_iterator_is_refused_because_it_can_be_read_once_only(source: Any) -> None:
    with pytest.raises(ConfigError, match="read once only"):
        data_of(source)
    with pytest.raises(ConfigError, match="read once only"):
        loader_of(source, batch_size=1)


def test_what_is_no_data_is_refused() -> None:
    with pytest.raises(ConfigError, match="got int"):
        data_of(3)


def test_an_iterable_that_is_used_up_after_one_epoch_is_noticed() -> None:
    class Once(Batches):
        def __init__(self) -> None:
            self.iterator = iter([torch.zeros(1)])

        def __iter__(self) -> Iterator[Tensor]:
            return self.iterator

        def __len__(self) -> int:
            return 1

    data = data_of(Once())
    assert len(list(data.epoch(0))) == 1
    with pytest.raises(ConfigError, match="gave no micro-batch in epoch 1"):
        list(data.epoch(1))


@pytest.mark.parametrize(
    "source",
    [
        [],
        Ids(0),
        DataLoader(Ids(3), 4, drop_last=True),
        DataLoader(Ids(3), sampler=Reversed(0)),
        SizedStream(0),
        Batches(0),
    ],
)
def test_data_without_a_single_micro_batch_is_refused(source: Any) -> None:
    with pytest.raises(ConfigError, match="has no micro-batch to give"):
        data_of(source)


# Workers


@pytest.mark.parametrize(
    ("device_type", "cpus", "expected"),
    [("cpu", 64, 0), ("cuda", 64, 4), ("cuda", 3, 2), ("xpu", 1, 0), ("mps", 1, 0)],
)
def test_automatic_workers_follow_device_and_processors(
    monkeypatch: pytest.MonkeyPatch, device_type: str, cpus: int, expected: int
) -> None:
    facts = MachineFacts(cpu_count=cpus)
    monkeypatch.setattr(DataLoader, "check_worker_number_rationality", lambda self: None)
    for source, most in ((Ids(4), 4), (Stream(4), 1)):
        loader = loader_of(source, batch_size=2, workers="auto", device_type=device_type, facts=facts)
        assert isinstance(loader, DataLoader)
        assert loader.num_workers == min(expected, most)


def test_workers_are_spawned_on_rocm() -> None:
    for source in (Ids(4), Stream(4)):
        facts = MachineFacts(build="rocm")
        loader = loader_of(source, batch_size=2, workers=1, pin_memory=True, device_type="cuda", facts=facts)
        assert isinstance(loader, DataLoader)
        assert loader.multiprocessing_context.get_start_method() == "spawn"


def test_a_dataset_on_an_accelerator_is_refused_for_forked_workers() -> None:
    dataset = TensorDataset(torch.zeros(4, device="meta"))
    with pytest.raises(ConfigError, match=r"TensorDataset.tensors is on meta.*\n.*workers=0"):
        data_of(DataLoader(dataset, num_workers=1, multiprocessing_context="fork"))
    assert len(list(data_of(dataset).epoch(0))) == 1


# Validation


@pytest.mark.parametrize("workers", [0, 2])
def test_validation_reads_in_order_and_the_same_at_every_pass(workers: int) -> None:
    loader = loader_of(Augmented(5), batch_size=2, workers=workers)
    first, second = ([row for batch in loader for row in batch.tolist()] for _ in range(2))
    assert [row[0] for row in first] == [0, 1, 2, 3, 4]
    assert first == second


def test_validation_uses_a_dataloader_as_it_is() -> None:
    loader = DataLoader(Ids(4), 2, sampler=Reversed(4))
    assert loader_of(loader, batch_size=1) is loader


def test_validation_of_an_empty_dataset_has_no_batch() -> None:
    assert list(loader_of([], batch_size=2)) == []


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (torch.zeros(3, 2), 3),
        ({"task": ["a", "b"], "obs": {"state": torch.zeros(5, 2)}, "action": torch.zeros(4)}, 5),
        ((torch.tensor(1.0), [torch.zeros(6)]), 6),
        ({"task": ["a", "b"]}, 1),
        (torch.tensor(1.0), 1),
    ],
)
def test_count_samples_is_the_leading_dimension_of_the_first_tensor(batch: Any, expected: int) -> None:
    assert count_samples(batch) == expected
