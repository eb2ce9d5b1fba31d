"""Epochs of micro-batches, and how they fall into windows."""

from __future__ import annotations

import multiprocessing
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from ..strategies.errors import ConfigError
from ..strategies.tree import tensors
from .carried import Carried, carries_state
from .rng import derive_seed
from .sampler import (
    Draws,
    KeptDraws,
    KeyedSamples,
    OrderedDraws,
    OwnStreams,
    beginning_at,
    drawn_in,
    name_of,
    set_epoch,
    too_short,
)


class MicroBatch(NamedTuple):
    """One draw from the loader, with its place in its window."""

    batch: Any
    index: int  # type: ignore[assignment]  # within the epoch, from 0; hides tuple.index
    divisor: float  # its loss is divided by this before backward
    closes: bool  # the last of its window


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """What is the same for every source: the run's seed, micro-batches in a window, notes for the plan."""

    seed: int
    accumulate: int
    notes: list[str] = field(default_factory=list)


class TrainingData(ABC):
    """Epochs of micro-batches; ``training_data`` makes one from whatever the user has.

    Attributes:
        batches_per_epoch: Micro-batches in an epoch; ``None`` where the source has no length.
        samples_per_epoch: Samples that an epoch reads; ``None`` where the order is not ours.
        batch_size: Samples in a micro-batch; ``None`` where the source does not say.
        order: What decides the order, and how exact a resume is, in words; see ``not_exact`` where it is not.
        not_exact: ``None`` when order and resume are exact; else the sentence that says why not.
        notes: What was rebuilt, kept or switched off, one line each.
        stats: The dataset's ``stats``, if it has them.
    """

    def __init__(self, dataset: Any, reading: Reading) -> None:
        self.batches_per_epoch: int | None = None
        self.samples_per_epoch: int | None = None
        self.batch_size: int | None = None
        self.order = "order is a function of seed, epoch and index; resume is exact"
        self.not_exact: str | None = None
        self.notes = reading.notes
        self.stats: Mapping[str, Any] | None = getattr(dataset, "stats", None)
        self._seed, self._accumulate = reading.seed, reading.accumulate
        self._carried = Carried()
        self._running: Generator[MicroBatch, None, None] | None = None

    def epoch(self, epoch: int, start: int = 0) -> Iterator[MicroBatch]:
        """The micro-batches of one epoch from number ``start`` on; ends the epoch begun before it.

        Raises:
            ConfigError: The epoch is empty, or has fewer than ``start`` micro-batches.
            RuntimeError: User code failed. Its error is the cause, or is told in full if a worker met it.
        """
        self._stop()
        self._running = self._windows(epoch, start)
        return self._running

    def state(self, epoch: int, batch: int) -> dict[str, Any] | None:
        """What the source says of itself before micro-batch ``batch`` of ``epoch``; ``None`` if it says nothing."""
        return self._carried.state(epoch, batch)

    def load_state(self, state: dict[str, Any] | None) -> None:
        """The next ``epoch`` goes on from what ``state`` gave."""
        self._carried.load(state)

    def close(self) -> None:
        """End the epoch that is running, and the workers."""
        self._stop()

    def _stop(self) -> None:
        if self._running is not None:
            self._running.close()
            self._running = None

    @abstractmethod
    def _batches(self, epoch: int, start: int) -> Iterator[Any]:
        """The batches of one epoch from number ``start`` on."""

    def _windows(self, epoch: int, start: int) -> Generator[MicroBatch, None, None]:
        """Draw each window before its first micro-batch goes out: only then is its size known.

        Of a window that ``start`` cuts, which no checkpoint does, the rest stands for the whole.
        """
        if self._carried.epoch_is_over():
            return
        windows, index = self._drawn_windows(epoch, start), start
        for window in windows if self._carried.source is None else _one_ahead(windows):
            sizes = [count_samples(batch) for batch in window] if self._accumulate > 1 else [1]
            total = sum(sizes) * (index % self._accumulate + len(window)) / len(window)
            while window:
                batch, size = window.pop(0), sizes.pop(0)
                yield MicroBatch(batch, index, total / size, closes=not window)
                index += 1
        if index == 0:
            raise ConfigError(
                f"The training data gave no micro-batch in epoch {epoch}.\n"
                "It must begin anew each time it is iterated; pass a dataset or a loader, not an iterator."
            )

    def _drawn_windows(self, epoch: int, start: int) -> Iterator[list[Any]]:
        batches, index = self._batches(epoch, start), start
        while window := list(islice(batches, self._accumulate - index % self._accumulate)):
            index += len(window)
            self._drawn_to(epoch, index)
            self._carried.forget(epoch, index - 3 * self._accumulate)  # one window is ahead, one under way
            yield window
        self._drawn_to(epoch + 1, 0)
        self._carried.note_end(epoch, index)

    def _drawn_to(self, epoch: int, number: int) -> None:
        """The source stands before this micro-batch."""


class KeyedData(TrainingData):
    """A map-style dataset; one loader, and so one set of persistent workers, for all epochs."""

    def __init__(
        self,
        dataset: Any,
        draws: Draws,
        collate: Callable[[Any], Any],
        settings: Mapping[str, Any],
        reading: Reading,
    ) -> None:
        super().__init__(dataset, reading)
        self._draws, self._generator = draws, torch.Generator()
        self._loader: DataLoader[Any] | None = keyed_loader(
            dataset, draws, collate, settings, seed=self._seed, generator=self._generator
        )

    def close(self) -> None:
        """End the epoch that is running, and the workers, which live as long as their loader."""
        super().close()
        self._loader = None

    def _batches(self, epoch: int, start: int) -> Iterator[Any]:
        assert self._loader is not None
        self._draws.place(epoch, start)
        self._generator.manual_seed(derive_seed(self._seed, "workers", epoch))
        with _letting_go(self._loader):
            yield from self._loader


class OrderedData(KeyedData):
    """Our order over a map-style dataset: every size is known before anything is read."""

    _draws: OrderedDraws

    def __init__(
        self,
        dataset: Any,
        draws: OrderedDraws,
        collate: Callable[[Any], Any],
        settings: Mapping[str, Any],
        reading: Reading,
    ) -> None:
        super().__init__(dataset, draws, collate, settings, reading)
        self.batches_per_epoch, self.batch_size = draws.count, draws.batch_size
        self.samples_per_epoch = None if draws.batch_size is None else draws.size(0, draws.count)

    def _windows(self, epoch: int, start: int) -> Generator[MicroBatch, None, None]:
        draws, step = self._draws, self._accumulate
        if start > draws.count:
            raise too_short(draws.count, start, epoch)
        batches = self._batches(epoch, start)
        for index in range(start, draws.count):
            first = index - index % step
            last = min(first + step, draws.count)
            divisor = draws.size(first, last) / draws.size(index, index + 1)
            yield MicroBatch(next(batches), index, divisor, closes=index + 1 == last)


class KeptData(KeyedData):
    """The order of a user's own sampler over a map-style dataset."""

    def __init__(
        self,
        dataset: Any,
        draws: KeptDraws,
        collate: Callable[[Any], Any],
        settings: Mapping[str, Any],
        reading: Reading,
    ) -> None:
        super().__init__(dataset, draws, collate, settings, reading)
        self.batches_per_epoch = length_of(draws.source)
        self.batch_size = getattr(draws.source, "batch_size", None)
        self._carried = draws.carried
        if self._carried.source is not None:
            self.order = _carries(self._carried.source)
        else:
            self.not_exact = (
                f"{draws.name} decides the order: a resumed run asks it for the epoch from its start, and "
                "goes on exactly only if the same order comes again."
            )


class IteratedData(TrainingData):
    """A source that yields finished batches in an order of its own."""

    def __init__(self, source: Any, reading: Reading) -> None:
        dataset = getattr(source, "dataset", source)
        super().__init__(dataset, reading)
        self._source = source
        self.batches_per_epoch = length_of(source)
        self.batch_size = getattr(source, "batch_size", None)
        self._streams: OwnStreams | None = None
        workers = getattr(source, "num_workers", 0)
        self._carried = Carried(source, None if workers else dataset)
        if self._carried.source is not None:
            self.order = _carries(self._carried.source)
        else:
            self.not_exact = (
                f"{name_of(dataset)} decides the order: a resumed run reads the epoch from its start, drops what "
                "was seen, and goes on exactly only if the same data comes again."
            )
            if carries_state(dataset):
                self.not_exact += " Its state_dict is of no use in workers: set workers to 0."

    def _batches(self, epoch: int, start: int) -> Iterator[Any]:
        parts = (getattr(self._source, name, None) for name in ("sampler", "batch_sampler", "dataset"))
        set_epoch([self._source, *parts], epoch)
        if self._carried.begin():
            return self._drawn(epoch, start)
        return beginning_at(start, self._drawn(epoch, 0), epoch)

    def _drawn_to(self, epoch: int, number: int) -> None:
        self._carried.note(epoch, number, self._streams if number else None)

    def _drawn(self, epoch: int, number: int) -> Iterator[Any]:
        try:
            with _letting_go(self._source):
                for batch in self._draws(epoch):
                    yield batch
                    number += 1
        except Exception as error:
            raise RuntimeError(
                f"Micro-batch {number} of epoch {epoch} could not be drawn from {name_of(self._source)}: "
                f"{type(error).__name__}: {error}"
            ) from error

    def _draws(self, epoch: int) -> Iterator[Any]:
        # A loader of another library has its own ways with random numbers, and swapping the streams around each
        # of its batches costs more than a small step.
        streams = OwnStreams(derive_seed(self._seed, "iterable", epoch))
        if not isinstance(self._source, DataLoader):
            self._carried.enter(streams)
            return iter(self._source)
        self._streams = streams
        return drawn_in(streams, self._source, self._carried.enter)


def _carries(source: Any) -> str:
    return f"{name_of(source)} decides the order and carries its state; resume is as exact as that"


def _one_ahead(windows: Iterator[list[Any]]) -> Iterator[list[Any]]:
    """The same, each given out when the next was drawn: so that a checkpoint after the last one knows that it is."""
    for first in islice(windows, 1):
        window = first
        for following in windows:
            yield window
            window = following
        yield window


def count_samples(batch: Any) -> int:
    """The leading dimension of the first tensor in a batch, searched depth first; 1 if there is none."""
    return next((len(tensor) for tensor in tensors(batch) if tensor.dim()), 1)


def length_of(source: Any) -> int | None:
    """``len(source)``, or ``None`` where there is none."""
    with suppress(TypeError):  # a DataLoader has __len__ also where its dataset has none
        return len(source)
    return None


def keyed_loader(
    dataset: Any,
    draws: Draws,
    collate: Callable[[Any], Any],
    settings: Mapping[str, Any],
    *,
    seed: int,
    tell_epoch: bool = True,
    generator: torch.Generator,
) -> DataLoader[Any]:
    """A DataLoader in which one key of ``draws`` makes one finished batch of a map-style dataset.

    Raises:
        ConfigError: Forked workers would inherit tensors on an accelerator.
    """
    _refuse_accelerator_tensors_in_forks(dataset, settings)
    return DataLoader(
        KeyedSamples(dataset, collate, seed, tell_epoch=tell_epoch),  # type: ignore[arg-type]  # map-style
        batch_size=None,
        sampler=draws,
        collate_fn=_as_it_is,
        generator=generator,
        **settings,
    )


@contextmanager
def _letting_go(source: Any) -> Iterator[None]:
    """Keep an error from holding on to the workers: they end with the last reference to their iterator."""
    try:
        yield
    except Exception as error:
        if getattr(source, "num_workers", 0):
            traceback.clear_frames(error.__traceback__)
        raise


def _refuse_accelerator_tensors_in_forks(dataset: Any, settings: Mapping[str, Any]) -> None:
    """An accelerator's runtime does not survive a fork, and its own messages say little about datasets."""
    if settings["num_workers"] == 0:
        return
    context = settings["multiprocessing_context"]
    method = context if isinstance(context, str) else (context or multiprocessing).get_start_method()
    if method != "fork":
        return
    for name, value in getattr(dataset, "__dict__", {}).items():
        for item in value if isinstance(value, tuple) else (value,):
            if isinstance(item, Tensor) and item.device.type != "cpu":
                raise ConfigError(
                    f"{name_of(dataset)}.{name} is on {item.device}, where forked workers cannot read it.\n"
                    "Keep the dataset on the cpu (batches are moved for you), or set trainer.workers=0."
                )


def _as_it_is(batch: Any) -> Any:
    return batch
