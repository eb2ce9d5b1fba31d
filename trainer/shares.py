"""Whose part of the data is whose.

A micro-batch of all ranks together has ``world_size`` parts, and rank r takes the r-th. Where the data ends inside
one, a rank without a part gets one that another has, as padding: so all ranks make the same number of micro-batches
and of updates. Padding counts for nothing. Rank 0 never gets any.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

from ..strategies.errors import DistributedError


class Share(NamedTuple):
    """Samples of a micro-batch: those of this rank that count, none in padding, and those of all ranks."""

    own: int
    total: int

    def divisor(self, total: float, world_size: int) -> float:
        """What to divide a loss by, in a window of ``total`` samples on all ranks; infinite for padding.

        The mean over ranks of such losses, summed over the window, is the mean over its samples.
        """
        return total / (world_size * self.own) if self.own else math.inf


class Part(NamedTuple):
    """What one rank makes of a micro-batch."""

    item: Any
    share: Share


def in_turn(
    items: Iterable[Any], rank: int, world_size: int, size: Callable[[Any], int] = lambda item: 1
) -> Iterator[Part]:
    """One of every ``world_size`` of ``items``, the ``rank``-th; at the end, if there is none, the first as padding.

    Args:
        size: How many samples an item stands for.
    """
    items = iter(items)
    while True:
        kept, own, total = None, -1, 0
        for position, item in enumerate(islice(items, world_size)):
            samples = size(item)
            total += samples
            if position in (0, rank):
                kept, own = item, samples if position == rank else 0
        if own < 0:
            return
        yield Part(kept, Share(own, total))


def shards_itself(*parts: Any) -> bool:
    """Whether one of them gives each rank data of its own: it says so, or is like torch's DistributedSampler."""
    return any(getattr(part, "shards_by_rank", False) or getattr(part, "num_replicas", 1) > 1 for part in parts)


def exactly(count: int, batches: Iterable[Any], name: str) -> Iterator[Any]:
    """``batches``, of which there are ``count``: other ranks rely on it.

    Raises:
        DistributedError: There are more or fewer.
    """
    number = 0
    for number, batch in enumerate(batches, 1):
        if number > count:
            break
        yield batch
    if number != count:
        found = "more" if number > count else f"only {number}"
        raise DistributedError(
            f"{name} shares itself out between the ranks and has a length of {count} micro-batches, but gave {found}: "
            "the ranks would wait for each other.\nMake its __len__ say what it gives, the same on every rank."
        )


class Shared(Iterable[tuple[Any, bool]]):
    """The batches that one rank validates on, each with whether it counts: padding does not."""

    def __init__(self, parts: Callable[[], Iterator[Part]]) -> None:
        self._parts = parts

    def __iter__(self) -> Iterator[tuple[Any, bool]]:
        return ((part.item, part.share.own > 0) for part in self._parts())


def counted(batches: Iterable[Any]) -> Iterator[tuple[Any, bool]]:
    """Batches to validate on, shared between ranks or not, each with whether it counts."""
    return iter(batches) if isinstance(batches, Shared) else ((batch, True) for batch in batches)


def uneven_windows(epoch: int, fewest: int, most: int) -> DistributedError:
    """The error where a window of one rank has fewer micro-batches than the same of another, or none."""
    return DistributedError(
        f"In epoch {epoch} one rank's data ends before another's: it has {fewest} micro-batches in a window where the "
        f"other has {most}, which would wait for it.\nData that all ranks read must give the same on each, whatever "
        "its number."
    )
