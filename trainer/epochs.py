"""Epochs of micro-batches, and how they fall into windows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from ..strategies.errors import ConfigError
from ..strategies.tree import tensors
from .carried import Carried
from .keyed import keyed_loader, letting_go, loaded
from .rng import derive_seed
from .sampler import Draws, KeptDraws, OrderedDraws, name_of, too_short
from .shares import Part, Share


class MicroBatch(NamedTuple):
    """One draw from the loader, with its place in its window."""

    batch: Any
    index: int  # type: ignore[assignment]  # within the epoch, from 0; hides tuple.index
    divisor: float  # its loss is divided by this before backward; inf for padding, which counts for nothing
    remaining: int  # micro-batches that its window still has; 0 closes it
    next_window: int | None  # micro-batches of the window after it, 0 at the end of the epoch; None where nobody knows


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """What is the same for every source: the run's seed, micro-batches in a window, the rank, notes for the plan."""

    seed: int
    accumulate: int
    rank: int = 0
    world_size: int = 1
    notes: list[str] = field(default_factory=list)


class TrainingData(ABC):
    """Epochs of micro-batches; ``training_data`` makes one from whatever the user has.

    Attributes:
        batches_per_epoch: Micro-batches in an epoch, on every rank; ``None`` where the source has no length.
        samples_per_epoch: Samples that an epoch reads on all ranks; ``None`` where the order is not ours.
        batch_size: Samples in a micro-batch of one rank; ``None`` where the source does not say.
        facts: What else makes the order, in JSON: how it is chosen, and the sizes of what it is chosen from.
        order: What decides the order, and how exact a resume is, in words; see ``not_exact`` where it is not.
        not_exact: ``None`` when order and resume are exact; else the sentence that says why not.
        notes: What was rebuilt, kept or switched off, one line each.
        stats: The dataset's ``stats``, if it has them.
    """

    def __init__(self, dataset: Any, reading: Reading) -> None:
        self.batches_per_epoch: int | None = None
        self.samples_per_epoch: int | None = None
        self.batch_size: int | None = None
        self.facts: dict[str, Any] = {}
        self.order = "order is a function of seed, epoch and index; a resume takes it up exactly"
        self.not_exact: str | None = None
        self.notes = reading.notes
        self.stats: Mapping[str, Any] | None = getattr(dataset, "stats", None)
        self._seed, self._accumulate = reading.seed, reading.accumulate
        self._rank, self._world_size = reading.rank, reading.world_size
        self._is_shared = reading.world_size > 1
        self._carried = Carried()
        self._running: Generator[MicroBatch, None, None] | None = None

    def epoch(self, epoch: int, start: int = 0) -> Iterator[MicroBatch]:
        """The micro-batches of one epoch from number ``start`` on; ends the epoch begun before it.

        Raises:
            ConfigError: The epoch is empty, or has fewer than ``start`` micro-batches.
            RuntimeError: User code failed. Its error is the cause, or is told in full if a worker met it.
        """
        self._stop()
        if self._carried.epoch_is_over():
            return iter(())
        self._carried.keep_loaded(epoch, start)
        self._running = self._windows(epoch, start)
        return self._running

    def window_start(self, index: int) -> int:
        """The number of the first micro-batch of the window of micro-batch ``index`` of an epoch."""
        return index // self._accumulate * self._accumulate

    @property
    def window_sizes_are_unknown(self) -> bool:
        """Whether nobody can say before it is drawn how many micro-batches a window has."""
        return self._accumulate > 1 and self.batches_per_epoch is None

    @property
    def carries_state(self) -> bool:
        """Whether the source itself says where it stands."""
        return self._carried.source is not None

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
    def _batches(self, epoch: int, start: int) -> Iterator[Part]:
        """This rank's batches of one epoch from number ``start`` on."""

    def _windows(self, epoch: int, start: int) -> Generator[MicroBatch, None, None]:
        """Draw each window before its first micro-batch goes out: only then is its size known.

        Of a window that ``start`` cuts, which no checkpoint does, the rest stands for the whole. Where a checkpoint
        has to know that a window was the last, or a rank that fails how the others go on, the next is drawn as well.
        """
        index, count = start, self.batches_per_epoch
        one_ahead = self.carries_state or (self._is_shared and count is None)
        for window, following in _with_next(self._drawn_windows(epoch, start), one_ahead=one_ahead):
            total = sum(part.share.total for part in window) * (index % self._accumulate + len(window)) / len(window)
            if following is None and count is not None:
                following = min(self._accumulate, max(count - index - len(window), 0))
            while window:
                yield self._micro_batch(window.pop(0), index, total, len(window), following)
                index += 1
        if index == 0:
            raise ConfigError(
                f"The training data gave no micro-batch in epoch {epoch}.\n"
                "It must begin anew each time it is iterated; pass a dataset or a loader, not an iterator."
            )

    def _micro_batch(self, part: Part, index: int, total: float, remaining: int, next_window: int | None) -> MicroBatch:
        return MicroBatch(part.item, index, part.share.divisor(total, self._world_size), remaining, next_window)

    def _size(self, batch: Any) -> int:
        """Samples in a batch; where no other is weighed against it, it is one."""
        return count_samples(batch) if self._accumulate > 1 or self._world_size > 1 else 1

    def _drawn_windows(self, epoch: int, start: int) -> Iterator[list[Part]]:
        batches, index = self._batches(epoch, start), start
        while window := list(islice(batches, self._accumulate - index % self._accumulate)):
            index += len(window)
            if self.carries_state:
                self._drawn_to(epoch, index)
                # Two may be ahead, one is under way, and the one before may come to nothing with it.
                self._carried.forget(epoch, index - 4 * self._accumulate)
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

    def _batches(self, epoch: int, start: int) -> Iterator[Part]:
        assert self._loader is not None
        self._draws.place(epoch, start)
        self._generator.manual_seed(derive_seed(self._seed, "workers", epoch))
        with letting_go(self._loader):
            yield from loaded(self._loader, self._draws, start)


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
        order = "shuffled" if draws.shuffle else "sequential"
        self.facts = {"order": order, "dataset_size": draws.n, "drop_last": draws.drop_last}

    def _windows(self, epoch: int, start: int) -> Generator[MicroBatch, None, None]:
        draws, step = self._draws, self._accumulate
        if not self._carried.was_rounded() and start > draws.count:
            raise too_short(draws.count, start, epoch)
        parts = self._batches(epoch, start)
        for index in range(start, draws.count):
            first = index - index % step
            end = min(first + step, draws.count)
            following = min(step, draws.count - end)
            yield self._micro_batch(next(parts), index, draws.size(first, end), end - index - 1, following)


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
        self.batches_per_epoch = length_of(draws.source, self._world_size)
        self.batch_size = getattr(draws.source, "batch_size", None)
        self.facts = {"order": draws.name, "dataset_size": length_of(dataset), "batches": length_of(draws.source)}
        self._carried = draws.carried
        if self.carries_state:
            self.order = carried_order(self._carried.source)
        else:
            self.not_exact = (
                f"{draws.name} decides the order: a resumed run asks it for the epoch from its start, and "
                "goes on exactly only if the same order comes again."
            )
        if self._world_size > 1:
            self.notes.append(
                f"Each of the {self._world_size} ranks reads one in {self._world_size} of the micro-batches that "
                f"{draws.name} gives, which must be the same and in the same order on all of them."
            )

    def _batches(self, epoch: int, start: int) -> Iterator[Part]:
        parts = super()._batches(epoch, start)
        return map(self._sized, parts) if self._world_size == 1 else parts

    def _sized(self, part: Part) -> Part:
        """Alone, a batch can say itself how many samples there are; collation may have made other ones."""
        size = self._size(part.item)
        return Part(part.item, Share(size, size))


def carried_order(source: Any) -> str:
    """What decides the order where ``source`` carries its state."""
    return f"{name_of(source)} decides the order and carries its state; resume is as exact as that"


def _with_next(windows: Iterator[list[Part]], *, one_ahead: bool) -> Iterator[tuple[list[Part], int | None]]:
    """The same, each with the size of the next, which is drawn before it if that is to be known."""
    if not one_ahead:
        yield from ((window, None) for window in windows)
        return
    window = next(windows, None)
    while window is not None:
        following = next(windows, None)
        yield window, len(following or ())
        window = following


def count_samples(batch: Any) -> int:
    """The leading dimension of the first tensor in a batch, searched depth first; 1 if there is none."""
    return next((len(tensor) for tensor in tensors(batch) if tensor.dim()), 1)


def length_of(source: Any, world_size: int = 1) -> int | None:
    """How many of ``len(source)`` batches each rank gets, padding included; ``None`` where there is no length."""
    with suppress(TypeError):  # a DataLoader has __len__ also where its dataset has none
        return -(-len(source) // world_size)
    return None
