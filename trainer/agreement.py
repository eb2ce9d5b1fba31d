"""What the ranks of a run agree on once an update.

A stop or failure that is agreed at one update takes effect after the next, or at the end of its epoch: by then every
rank has read it, however early or late it settles.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..strategies.distributed import DistributionStrategy
from ..strategies.mailbox import Mailbox

T = TypeVar("T", Tensor, float)


class Slots(NamedTuple, Generic[T]):
    """The numbers in the mailbox of an update: on the device as they are written, on the host as they are read.

    Those up to ``least`` are what ranks agree on, each the largest of all ranks.
    """

    skip: T  # the update moves nothing
    non_finite: T  # a gradient is inf or NaN, so the loss scale falls
    edited: T  # the same, but only since a callback had it
    stop: T  # 1 + the exit code of a rank that asks to stop
    failed: T  # a rank has failed
    has_gradients: T  # a rank has a loss with a gradient; without any the update is a skip
    bad_loss: T  # 1 + the number of a rank whose loss is inf or NaN
    meets: T  # a rank has something to do together with the others after this update
    goes_on: T  # a rank has not
    next_window: T  # micro-batches of the window after it; 0 at the end of an epoch
    shortest: T  # the smallest of these numbers, negated; -inf of a rank that has failed
    most: T  # the largest fingerprint of what ranks have exchanged in the window
    least: T  # the smallest, negated
    norm: T  # of all gradients
    scale: T  # of the loss, as this update leaves it

    @property
    def unlike(self) -> T:
        """Above 0 where ranks have exchanged different things."""
        return self.most + self.least


MAILBOX_SIZE = len(Slots._fields)
_AGREED = Slots._fields.index("norm")


class Agreement:
    """What a rank has to say of stops and failures, and what became of them.

    Args:
        mailbox: That of the updates.
    """

    def __init__(self, ranks: DistributionStrategy, mailbox: Mailbox) -> None:
        self._ranks, self._agreed, self._slots = ranks, mailbox.on_device[:_AGREED], Slots(*mailbox.slots)
        self._asks = 0.0  # what this rank says of a stop
        #: Whether this rank has failed, which it says from the next update on, or has lost one that did.
        self.has_failed = False
        #: The first update at which a rank said so, or asked for a stop.
        self._agreed_at: int | None = None
        self.exit_code = 0
        #: Whether a rank had something to do together with the others at the last update, and some without the others.
        self.meets = self.apart = False
        #: Whether ranks exchanged different gathers or gradients in a window, which moves nothing then.
        self.differs = False
        #: Micro-batches of the window that the others come to next in this epoch, and of the rank that has fewest.
        self.next_window = self.shortest = 0

    def ask_to_stop(self, exit_code: int) -> None:
        """From the next update on; an exit code that another rank asks for too wins if it is higher."""
        self._asks = max(self._asks, 1.0 + exit_code)

    @property
    def asked_exit_code(self) -> int:
        """The exit code with which this rank asks for a stop; 0 too where it asks for none."""
        return max(0, int(self._asks) - 1)

    def reach(self, losses: Collection[Tensor], *, meets: bool | None, next_window: int | None) -> None:
        """Make the flags of an update those of all ranks, without waiting.

        Args:
            losses: Those of this rank's window that have a gradient.
            meets: Whether ranks have something to do together afterwards, as this one sees it; ``None`` without a view.
            next_window: Micro-batches of the window that comes next in this epoch, as this rank has drawn it; ``None``
                where it has failed.
        """
        slots = self._slots
        slots.has_gradients.fill_(float(bool(losses)))
        bad = slots.bad_loss.zero_()
        for loss in losses:
            bad.add_(loss.to(bad.device))  # with shards in host memory the mailbox is there
        bad.sub_(bad)  # NaN unless the sum was finite
        bad.ne_(bad).mul_(self._ranks.rank + 1)
        slots.meets.fill_(float(meets is True))
        slots.goes_on.fill_(float(meets is False))
        slots.next_window.fill_(float(next_window or 0))
        slots.shortest.fill_(-math.inf if next_window is None else -float(next_window))
        if self._ranks.is_sharded:
            fingerprint = self._ranks.take_fingerprint()
            slots.most.fill_(-math.inf if self.has_failed else fingerprint)
            slots.least.fill_(-math.inf if self.has_failed else -fingerprint)
        for slot, own in ((slots.stop, self._asks), (slots.failed, float(self.has_failed))):
            if own:  # only now: until here the slot held the update before
                slot.fill_(own)
        self._ranks.reduce_max(self._agreed)
        slots.skip.copy_(torch.maximum(slots.skip, 1.0 - slots.has_gradients))
        if self._ranks.is_sharded:
            slots.skip.copy_(torch.maximum(slots.skip, slots.unlike.sign()))

    def note(self, update: int, said: Slots[float], *, landed: bool) -> None:
        """What the ranks said at the update of this process with this number, read when it is settled."""
        self.meets, self.next_window = bool(said.meets), int(said.next_window)
        self.shortest = int(min(said.next_window, -said.shortest))  # inf where all have failed
        self.differs = self.differs or said.unlike > 0
        self.apart = self.apart or (landed and bool(said.meets and said.goes_on))
        if not (said.stop or said.failed):
            return
        if self._agreed_at is None:
            self._agreed_at = update
        self.exit_code = max(self.exit_code, int(said.stop) - 1)

    @property
    def is_uneven(self) -> bool:
        """Whether one rank comes to a smaller window than another, or to none."""
        return self.shortest < self.next_window

    @property
    def is_ending(self) -> bool:
        """Whether there is something to end for, as far as this rank has settled its updates."""
        return self._agreed_at is not None

    def ends(self, applied: int) -> bool:
        """Whether the run ends after the update with this number."""
        return self._agreed_at is not None and applied > self._agreed_at
