"""The global random streams on the host: python's, numpy's and torch's, and how code gets some of its own."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor

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
