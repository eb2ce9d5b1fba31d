"""Which samples make which micro-batch, and the random streams in which they are made.

Both are pure functions of (seed, epoch, sample index): no worker count, no earlier epoch and no draw of the
policy changes them, and the policy's own random streams are as before after every micro-batch.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Sampler, Subset, get_worker_info

from ..strategies.errors import ConfigError
from .rng import derive_seed

_END = object()

Streams = tuple[Any, Any, Tensor]


def read_streams() -> Streams:
    """The states of the global random streams on the host: python, numpy, torch."""
    return random.getstate(), np.random.get_state(), torch.default_generator.get_state()


def write_streams(streams: Streams) -> None:
    """Put the three streams where ``read_streams`` found them."""
    random.setstate(streams[0])
    np.random.set_state(streams[1])
    torch.default_generator.set_state(streams[2])


def seed_streams(seed: int) -> None:
    """Begin the three streams anew; ``torch.manual_seed`` is not used, it would seed accelerators too."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)  # more words would cost five times as much
    torch.default_generator.manual_seed(seed)


class OwnStreams:
    """Random streams of its own for code that draws from the global ones: in place only inside ``with``.

    The next ``with`` goes on where the last one ended.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.inside: Streams | None = None
        self._outside: Streams | None = None

    def __enter__(self) -> None:
        self._outside = read_streams()
        if self.inside is None:
            seed_streams(self._seed)
        else:
            write_streams(self.inside)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._outside is not None
        self.inside = read_streams()
        write_streams(self._outside)

    @staticmethod
    def packed(streams: Streams) -> dict[str, Any]:
        """``inside`` for a checkpoint: plain values and tensors."""
        (version, words, pending), (kind, key, *rest), torch_state = streams
        return {
            "python": [version, torch.tensor(words), pending],
            "numpy": [kind, torch.from_numpy(key.astype(np.int64)), *rest],
            "torch": torch_state,
        }

    @staticmethod
    def unpacked(state: dict[str, Any]) -> Streams:
        """What ``packed`` was given."""
        version, words, pending = state["python"]
        kind, key, *rest = state["numpy"]
        numpy_state = (kind, key.numpy().astype(np.uint32), *rest)
        return (version, tuple(words.tolist()), pending), numpy_state, state["torch"]


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
    number: int | None  # of the micro-batch, where the order is not ours and an index may come twice


class Draws(Sampler[Draw]):
    """The micro-batches of one epoch, from any position on: ``place`` before ``iter``."""

    def __init__(self) -> None:
        self.epoch, self.start = 0, 0

    def place(self, epoch: int, start: int) -> None:
        """Say where the next ``iter`` begins."""
        self.epoch, self.start = epoch, start


class OrderedDraws(Draws):
    """``epoch_order`` cut into micro-batches of ``batch_size``; ``None`` gives single indices."""

    def __init__(self, n: int, batch_size: int | None, *, seed: int, shuffle: bool, drop_last: bool) -> None:
        super().__init__()
        self.n, self.batch_size, self.seed, self.shuffle = n, batch_size, seed, shuffle
        step = batch_size or 1
        self.count = n // step if drop_last else -(-n // step)

    def size(self, first: int, last: int) -> int:
        """How many samples the micro-batches from ``first`` up to, not including, ``last`` hold."""
        step = self.batch_size or 1
        return min(last * step, self.n) - first * step

    def __iter__(self) -> Iterator[Draw]:
        return self._draws(self.epoch, self.start)

    def _draws(self, epoch: int, start: int) -> Iterator[Draw]:
        order = epoch_order(self.n, self.seed, epoch, self.shuffle)
        for number in range(start, self.count):
            if self.batch_size is None:
                yield Draw(epoch, int(order[number]), None)
            else:
                first = number * self.batch_size
                yield Draw(epoch, order[first : first + self.batch_size].tolist(), None)

    def __len__(self) -> int:
        return self.count - self.start


class KeptDraws(Draws):
    """The micro-batches that a user's own sampler gives, drawn in random streams of their own.

    Those before the start are drawn and dropped, which reads no sample, unless a sampler carries its state.
    ``source`` yields the indices, and ``name`` is that of the class which chooses them.
    """

    def __init__(self, loader: DataLoader[Any], seed: int) -> None:
        from .carried import Carried  # which needs OwnStreams

        super().__init__()
        batches: Any = loader.batch_sampler
        self.source: Any = loader.sampler if batches is None else batches
        self.name = name_of(batches.sampler if type(batches) is BatchSampler else self.source)
        self._parts = (loader.sampler, batches, getattr(batches, "sampler", None))
        self._batched = batches is not None
        self._seed = seed
        self.carried = Carried(batches, loader.sampler, getattr(batches, "sampler", None))

    def __iter__(self) -> Iterator[Draw]:
        return self._draws(self.epoch, self.start)

    def _draws(self, epoch: int, start: int) -> Iterator[Draw]:
        set_epoch(self._parts, epoch)
        streams, carried = OwnStreams(derive_seed(self._seed, "sampler", epoch)), self.carried
        goes_on = carried.begin()
        drawn = drawn_in(streams, self.source, carried.enter)
        number = start
        for indices in drawn if goes_on else beginning_at(start, drawn, epoch):
            carried.note(epoch, number + 1, streams)
            yield Draw(epoch, list(indices) if self._batched else indices, number)
            number += 1
        carried.note(epoch + 1, 0)


def beginning_at(start: int, drawn: Iterator[Any], epoch: int) -> Iterator[Any]:
    """Drop what comes before micro-batch ``start``.

    Raises:
        ConfigError: There are fewer.
    """
    for number in range(start):
        if next(drawn, _END) is _END:
            raise too_short(number, start, epoch)
    yield from drawn


def too_short(found: int, start: int, epoch: int) -> ConfigError:
    """The error for data that has shrunk since the run that is resumed."""
    return ConfigError(
        f"The run goes on from micro-batch {start} of epoch {epoch}, but that epoch has only {found} now.\n"
        "Resume with the training data and the batch size of the run that was interrupted."
    )


def drawn_in(streams: OwnStreams, source: Any, enter: Callable[[OwnStreams], None]) -> Iterator[Any]:
    """What ``source`` yields, with every call of its code made inside ``streams``.

    Args:
        enter: Called once there is an iterator, before anything is drawn from it.
    """
    with streams:
        iterator = iter(source)
    enter(streams)
    while True:
        with streams:
            try:
                item = next(iterator)
            except StopIteration:
                return
        yield item


def set_epoch(parts: Sequence[Any], epoch: int) -> None:
    """Tell the epoch to those that can be told, each of them once."""
    for part in {id(part): part for part in parts}.values():
        if callable(getattr(part, "set_epoch", None)):
            part.set_epoch(epoch)


class _Dataset(Protocol):
    def __getitem__(self, index: Any, /) -> Any: ...


class KeyedSamples:
    """A map-style dataset seen through ``Draw`` keys: each gives one finished micro-batch.

    The random streams are seeded for every sample. In the main process they are put back once the batch
    is made. Attributes of the dataset stay within reach, for a ``worker_init_fn`` that uses them.

    Args:
        dataset: Gives a sample for an index; with ``__getitems__``, the samples of a list of them.
        collate: Makes a batch of a list of samples.
        seed: That of the run.
        tell_epoch: Call the dataset's ``set_epoch``, if it has one, where the samples are made.
    """

    def __init__(self, dataset: _Dataset, collate: Callable[[Any], Any], seed: int, *, tell_epoch: bool = True) -> None:
        vars(self).update(_dataset=dataset, _collate=collate, _seed=seed, _tell_epoch=tell_epoch, _told=None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_dataset" not in vars(self):  # unpickling asks before there is a dataset
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._dataset, name, value)

    def __getitem__(self, draw: Draw) -> Any:
        if get_worker_info() is not None:
            return self._make(draw)
        outside = read_streams()
        try:
            return self._make(draw)
        finally:
            write_streams(outside)

    def _make(self, draw: Draw) -> Any:
        if self._tell_epoch and draw.epoch != self._told:
            set_epoch((self._dataset,), draw.epoch)
            vars(self)["_told"] = draw.epoch
        if not isinstance(draw.indices, list):
            samples = self._sample(draw, 0, draw.indices)
        elif _reads_batches(self._dataset):
            samples = self._samples(draw)
        else:
            samples = [self._sample(draw, position, index) for position, index in enumerate(draw.indices)]
        try:
            return self._collate(samples)
        except Exception as error:
            raise self._failure(f"The batch of samples {draw.indices}", draw, error) from error

    def _sample(self, draw: Draw, position: int, index: Any) -> Any:
        self._seed_for(draw, position, index)
        try:
            return self._dataset[index]
        except Exception as error:  # an IndexError or StopIteration could end the epoch in silence
            raise self._failure(f"Sample {index}", draw, error) from error

    def _samples(self, draw: Draw) -> Any:
        self._seed_for(draw, 0, draw.indices[0])
        try:
            return self._dataset.__getitems__(draw.indices)
        except Exception as error:
            raise self._failure(f"Samples {draw.indices}", draw, error) from error

    def _failure(self, what: str, draw: Draw, error: Exception) -> RuntimeError:
        of = f"{what} of {name_of(self._dataset)} could not be made in epoch {draw.epoch}"
        return RuntimeError(f"{of}: {type(error).__name__}: {error}")

    def _seed_for(self, draw: Draw, position: int, index: Any) -> None:
        if draw.number is None:
            seed_streams(derive_seed(self._seed, "sample", draw.epoch, index))
        else:
            seed_streams(derive_seed(self._seed, "draw", draw.epoch, draw.number, position))


def _reads_batches(dataset: Any) -> bool:
    while type(dataset) is Subset:  # it always has __getitems__, and uses that of its own dataset
        dataset = dataset.dataset
    return callable(getattr(dataset, "__getitems__", None))


def name_of(thing: Any) -> str:
    """The name of a function or class, or of the class of an object."""
    return getattr(thing, "__qualname__", type(thing).__qualname__)
