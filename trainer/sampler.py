"""Which samples make which micro-batch of which rank.

The order is a pure function of (seed, epoch), or that of a user's own sampler drawn in random streams from the run's
seed: the same on every rank, which takes its part of every micro-batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Sampler

from ..strategies.errors import ConfigError
from .carried import Carried
from .rng import derive_seed
from .shares import Part, Share, in_turn
from .streams import OwnStreams, drawn_in

_END = object()


def epoch_order(n: int, seed: int, epoch: int, shuffle: bool) -> Tensor:
    """The order in which one epoch reads ``n`` samples, shape (n,), int64; nothing else decides it."""
    if not shuffle:
        return torch.arange(n)
    generator = torch.Generator()
    generator.manual_seed(derive_seed(seed, "order", epoch))
    return torch.randperm(n, generator=generator)


class Draw(NamedTuple):
    """What a worker needs to know to make one micro-batch; it reaches persistent workers with every epoch."""

    epoch: int
    indices: Any  # a list of sample indices, or one index where batches are not collated
    number: int | None  # among those of all ranks, where the order is not ours and an index may come twice


class Draws(Sampler[Draw], ABC):
    """One rank's micro-batches of one epoch, from any position on: ``place`` before ``iter``."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.epoch, self.start = 0, 0
        self._rank, self._world_size = rank, world_size

    def place(self, epoch: int, start: int) -> None:
        """Say where the next ``iter`` begins."""
        self.epoch, self.start = epoch, start

    @abstractmethod
    def share(self, number: int) -> Share:
        """Whose the samples of micro-batch ``number`` are; asked once, after it was drawn."""


class OrderedDraws(Draws):
    """``epoch_order`` cut into micro-batches of ``batch_size`` on each rank; ``None`` gives single indices.

    All ranks together read what one with ``world_size * batch_size`` would. A rank for which nothing is left pads with
    the start of the order.
    """

    def __init__(
        self,
        n: int,
        batch_size: int | None,
        *,
        seed: int,
        shuffle: bool,
        drop_last: bool,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        super().__init__(rank, world_size)
        self.n, self.batch_size, self.seed = n, batch_size, seed
        self.shuffle, self.drop_last = shuffle, drop_last
        self._step = batch_size or 1
        self._stride = self._step * world_size
        self.count = n // self._stride if drop_last else -(-n // self._stride)

    def size(self, first: int, last: int) -> int:
        """How many samples the micro-batches from ``first`` up to, not including, ``last`` hold on all ranks."""
        return min(last * self._stride, self.n) - first * self._stride

    def share(self, number: int) -> Share:
        """Known before anything is drawn."""
        left = self.n - self._first(number)
        return Share(max(0, min(self._step, left)), self.size(number, number + 1))

    def _first(self, number: int) -> int:
        return number * self._stride + self._rank * self._step

    def __iter__(self) -> Iterator[Draw]:
        return self._draws(self.epoch, self.start)

    def _draws(self, epoch: int, start: int) -> Iterator[Draw]:
        order = epoch_order(self.n, self.seed, epoch, self.shuffle)
        for number in range(start, self.count):
            first = self._first(number)
            if first >= self.n:
                first = 0
            if self.batch_size is None:
                yield Draw(epoch, int(order[first]), None)
            else:
                yield Draw(epoch, order[first : first + self.batch_size].tolist(), None)

    def __len__(self) -> int:
        return self.count - self.start


class KeptDraws(Draws):
    """The micro-batches that a user's own sampler gives, drawn in random streams of their own; ranks take turns.

    Those before the start are drawn and dropped, which reads no sample, unless a sampler carries its state.
    ``source`` yields the indices, and ``name`` is that of the class which chooses them. Where it yields single ones,
    how many samples each stands for is unknown: all count alike.
    """

    def __init__(self, loader: DataLoader[Any], seed: int, rank: int = 0, world_size: int = 1) -> None:
        super().__init__(rank, world_size)
        batches: Any = loader.batch_sampler
        self.source: Any = loader.sampler if batches is None else batches
        self.name = name_of(batches.sampler if type(batches) is BatchSampler else self.source)
        self._parts = (loader.sampler, batches, getattr(batches, "sampler", None))
        self._batched = batches is not None
        self._seed = seed
        self._shares: dict[int, Share] = {}
        self.carried = Carried(batches, loader.sampler, getattr(batches, "sampler", None))

    def share(self, number: int) -> Share:
        """Known from when it was drawn until it is asked."""
        return self._shares.pop(number)

    def __iter__(self) -> Iterator[Draw]:
        return self._draws(self.epoch, self.start)

    def _draws(self, epoch: int, start: int) -> Iterator[Draw]:
        set_epoch(self._parts, epoch)
        streams, carried = OwnStreams(derive_seed(self._seed, "sampler", epoch)), self.carried
        goes_on = carried.begin()
        taken = self._taken(drawn_in(streams, self.source, carried.enter))
        number = start
        for indices, share in taken if goes_on else beginning_at(start, taken, epoch, may_end=carried.was_rounded()):
            carried.note(epoch, number + 1, streams)
            self._shares[number] = share
            yield Draw(epoch, indices, number * self._world_size + self._rank)
            number += 1
        carried.note(epoch + 1, 0)

    def _taken(self, drawn: Iterator[Any]) -> Iterator[Part]:
        if self._batched:
            return in_turn(map(list, drawn), self._rank, self._world_size, len)
        return in_turn(drawn, self._rank, self._world_size)


def beginning_at(start: int, drawn: Iterator[Any], epoch: int, *, may_end: bool) -> Iterator[Any]:
    """Drop what comes before micro-batch ``start``.

    Raises:
        ConfigError: There are fewer, and the epoch may not end before it.
    """
    for number in range(start):
        if next(drawn, _END) is _END:
            if may_end:
                return
            raise too_short(number, start, epoch)
    yield from drawn


def too_short(found: int, start: int, epoch: int) -> ConfigError:
    """The error for data that has shrunk since the run that is resumed."""
    return ConfigError(
        f"The run goes on from micro-batch {start} of epoch {epoch}, but that epoch has only {found} now.\n"
        "Resume with the training data and the batch size of the run that was interrupted."
    )


def set_epoch(parts: Sequence[Any], epoch: int) -> None:
    """Tell the epoch to those that can be told, each of them once."""
    for part in {id(part): part for part in parts}.values():
        if callable(getattr(part, "set_epoch", None)):
            part.set_epoch(epoch)


def name_of(thing: Any) -> str:
    """The name of a function or class, or of the class of an object."""
    return getattr(thing, "__qualname__", type(thing).__qualname__)
