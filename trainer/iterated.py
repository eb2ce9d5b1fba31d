"""Epochs of a source that yields finished batches in an order of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from ..strategies.errors import DistributedError
from .carried import Carried, carries_state
from .epochs import Reading, TrainingData, carried_order, length_of
from .keyed import letting_go
from .rng import derive_seed
from .sampler import beginning_at, name_of, set_epoch
from .shares import Part, exactly, in_turn, shards_itself
from .streams import OwnStreams, drawn_in


class IteratedData(TrainingData):
    """A source that yields finished batches in an order of its own.

    Every rank reads all of them and keeps its share, unless the source gives each rank data of its own.

    Raises:
        DistributedError: It does, but has no length.
    """

    def __init__(self, source: Any, reading: Reading) -> None:
        dataset = getattr(source, "dataset", source)
        super().__init__(dataset, reading)
        self._source = source
        self._streams: OwnStreams | None = None
        self._stream: tuple[int, ...] = ()
        workers = getattr(source, "num_workers", 0)
        self._carried = Carried(source, None if workers else dataset)
        # A loader of another library has its own ways with random numbers, and swapping the streams around each
        # of its batches costs more than a small step; but ranks that share them must draw alike, and so must a run
        # that goes on where its source says.
        self._draws_in_streams = isinstance(source, DataLoader) or reading.world_size > 1 or self.carries_state
        self._own_length: int | None = None
        if reading.world_size > 1:
            self._share(reading)
        self.batches_per_epoch = length_of(source, self._world_size)
        self.batch_size = getattr(source, "batch_size", None)
        size = None if dataset is source else length_of(dataset)
        self.facts = {"order": name_of(dataset), "dataset_size": size, "batches": length_of(source)}
        if self._carried.source is not None:
            self.order = carried_order(self._carried.source)
        else:
            self.not_exact = (
                f"{name_of(dataset)} decides the order: a resumed run reads the epoch from its start, drops what "
                "was seen, and goes on exactly only if the same data comes again."
            )
            if carries_state(dataset) and self._own_length is None:
                self.not_exact += " Its state_dict is of no use in workers: set workers to 0."

    def _share(self, reading: Reading) -> None:
        name, ranks = name_of(getattr(self._source, "dataset", self._source)), f"Each of the {reading.world_size} ranks"
        self._own_length = own_length(self._source, reading.world_size)
        if self._own_length is None:
            self.notes.append(
                f"{ranks} reads all of {name}, which must come in the same order on all of them, and keeps one in "
                f"{reading.world_size} of its micro-batches. Data that gives each rank its own can say so: "
                "shards_by_rank = True."
            )
            return
        self.notes.append(f"{ranks} reads data of its own from {name}; the micro-batches of all ranks count alike.")
        self._rank, self._world_size = 0, 1  # nothing is left to share
        self._stream = (reading.rank,)
        self._carried = Carried()  # a checkpoint has the state of one rank, which says nothing of the others'

    def _batches(self, epoch: int, start: int) -> Iterator[Part]:
        set_epoch(parts_of(self._source), epoch)
        goes_on = self._carried.begin()
        drawn = self._drawn(epoch, start if goes_on else 0)
        if self._own_length is not None:
            drawn = exactly(self._own_length, drawn, name_of(self._source))
        parts = in_turn(drawn, self._rank, self._world_size, self._size)
        return parts if goes_on else beginning_at(start, parts, epoch, may_end=self._carried.was_rounded())

    def _drawn_to(self, epoch: int, number: int) -> None:
        self._carried.note(epoch, number, self._streams if number else None)

    def _drawn(self, epoch: int, start: int) -> Iterator[Any]:
        number = start * self._world_size
        try:
            with letting_go(self._source):
                for batch in self._draws(epoch):
                    yield batch
                    number += 1
        except Exception as error:
            raise RuntimeError(
                f"Micro-batch {number // self._world_size} of epoch {epoch} could not be drawn from "
                f"{name_of(self._source)}: {type(error).__name__}: {error}"
            ) from error

    def _draws(self, epoch: int) -> Iterator[Any]:
        streams = OwnStreams(derive_seed(self._seed, "iterable", epoch, *self._stream))
        if not self._draws_in_streams:
            self._carried.enter(streams)
            return iter(self._source)
        self._streams = streams
        return drawn_in(streams, self._source, self._carried.enter)


def own_length(source: Any, world_size: int) -> int | None:
    """How many batches a source gives that has data of its own for each rank; ``None`` if it has the same for all.

    Raises:
        DistributedError: It has no length.
    """
    if not shards_itself(*parts_of(source)):
        return None
    length = length_of(source)
    if length is None:
        raise DistributedError(
            f"{name_of(getattr(source, 'dataset', source))} says that it gives each of the {world_size} ranks data "
            "of its own, but has no length: ranks that got more would wait for the others.\nGive it a __len__, the "
            "same on every rank; or let it yield all of its data on every rank, without shards_by_rank."
        )
    return length


def parts_of(source: Any) -> tuple[Any, ...]:
    """A loader and what is in it, as far as it is there."""
    batches = getattr(source, "batch_sampler", None)
    return (
        source,
        getattr(source, "sampler", None),
        batches,
        getattr(batches, "sampler", None),
        getattr(source, "dataset", None),
    )
