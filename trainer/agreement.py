"""What the ranks of a run agree on once an update: the first numbers of its mailbox, each reduced by maximum.

    skip            the update moves nothing
    non_finite      a gradient is inf or NaN, so the loss scale falls
    edited          the same, but only since a callback had it
    stop            1 + the exit code of a rank that asks to stop
    failed          a rank has failed
    has_gradients   a rank has a loss with a gradient; without any the update is a skip
    bad_loss        1 + the number of a rank whose loss is inf or NaN
    meets, goes_on  a rank has something to do, or nothing, together with the others after this update
    next_window     micro-batches of the window after it; 0 at the end of an epoch

A stop or failure that is agreed at one update takes effect after the next, or at the end of its epoch: by then every
rank has read it, however early or late it settles.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ..strategies.distributed import DistributionStrategy
from ..strategies.mailbox import Mailbox

AGREED = 10


class Agreement:
    """What a rank has to say of stops and failures, and what became of them.

    Args:
        mailbox: That of the updates.
    """

    def __init__(self, ranks: DistributionStrategy, mailbox: Mailbox) -> None:
        self._ranks, self._flags = ranks, mailbox.on_device[:AGREED]
        slots = mailbox.slots[:AGREED]
        self._skip, _, _, self._stop, self._failed, self._has_gradients, self._bad_loss, *more = slots
        *self._meets, self._next_window = more
        self._asks = 0.0  # what this rank says of a stop
        #: Whether this rank has failed, which it says from the next update on.
        self.has_failed = False
        self._update: int | None = None
        self.exit_code = 0
        #: Whether a rank had something to do together with the others at the last update, and some without the others.
        self.meets = self.apart = False
        #: Micro-batches of the window that the others come to next in this epoch.
        self.next_window = 0

    def ask_to_stop(self, exit_code: int) -> None:
        """From the next update on; an exit code that another rank asks for too wins if it is higher."""
        self._asks = max(self._asks, 1.0 + exit_code)

    def reach(self, losses: Iterable[Tensor], *, meets: bool | None, next_window: int | None) -> None:
        """Make the flags of an update those of all ranks, without waiting.

        Args:
            losses: Those of this rank's window that have a gradient.
            meets: Whether ranks have something to do together afterwards, as this one sees it; ``None`` without a view.
            next_window: Micro-batches of the window that comes next in this epoch, as this rank has drawn it.
        """
        losses = list(losses)
        self._has_gradients.fill_(float(bool(losses)))
        self._bad_loss.zero_()
        for loss in losses:
            self._bad_loss.add_(loss.to(self._bad_loss.device))  # with shards in host memory the mailbox is there
        self._bad_loss.sub_(self._bad_loss)  # NaN unless the sum was finite
        self._bad_loss.ne_(self._bad_loss).mul_(self._ranks.rank + 1)
        for slot, answer in zip(self._meets, (True, False), strict=True):
            slot.fill_(float(meets is answer))
        self._next_window.fill_(float(next_window or 0))
        for slot, own in ((self._stop, self._asks), (self._failed, float(self.has_failed))):
            if own:  # only now: until here the slot held the update before
                slot.fill_(own)
        self._ranks.reduce_max(self._flags)
        self._skip.copy_(torch.maximum(self._skip, 1.0 - self._has_gradients))

    def note(self, update: int, stop: float, failed: float, *, meets: bool, apart: bool, next_window: float) -> None:
        """What the ranks said at the update of this process with this number, read when it is settled."""
        self.meets, self.apart, self.next_window = meets, self.apart or apart, int(next_window)
        if not (stop or failed):
            return
        if self._update is None:
            self._update = update
        self.exit_code = max(self.exit_code, int(stop) - 1)

    @property
    def is_noted(self) -> bool:
        """Whether there is something to end for, as far as this rank has settled its updates."""
        return self._update is not None

    def ends(self, applied: int) -> bool:
        """Whether the run ends after the update with this number."""
        return self._update is not None and applied > self._update
