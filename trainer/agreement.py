"""What the ranks of a run agree on, once an update and on its way: to stop, and that one of them has failed.

Both are numbers of the vector that an update reduces by max anyway. What is agreed at one update takes effect after
the next, or at the end of its epoch: by then every rank has read it, however early or late it settles.
"""

from __future__ import annotations

from torch import Tensor


class Agreement:
    """The two slots of the mailbox, and what became of them.

    Args:
        stop: Becomes 1 + the exit code of the rank that asks to stop; never lowered.
        failed: Becomes 1 on a rank that has failed.
    """

    def __init__(self, stop: Tensor, failed: Tensor) -> None:
        self._slots = (stop, failed)
        self._own = [0.0, 0.0]
        self._update: int | None = None
        self.exit_code = 0
        self.failed = False

    def ask_to_stop(self, exit_code: int) -> None:
        """From the next update on; an exit code that another rank asks for too wins if it is higher."""
        self._own[0] = max(self._own[0], 1.0 + exit_code)

    def fail(self) -> None:
        """From the next update on."""
        self._own[1] = 1.0

    @property
    def has_failed(self) -> bool:
        """Whether this rank has."""
        return bool(self._own[1])

    def speak(self) -> None:
        """Say it, right before the ranks reduce the vector: the slots still held the update before until then."""
        for slot, own in zip(self._slots, self._own, strict=True):
            if own:
                slot.fill_(own)

    def note(self, update: int, stop: float, failed: float) -> None:
        """What the ranks said at the update of this process with this number, read when it is settled."""
        if not (stop or failed):
            return
        if self._update is None:
            self._update = update
        self.exit_code = max(self.exit_code, int(stop) - 1)
        self.failed = self.failed or bool(failed)

    @property
    def is_noted(self) -> bool:
        """Whether there is something to end for, as far as this rank has settled its updates."""
        return self._update is not None

    def ends(self, applied: int) -> bool:
        """Whether the run ends after the update with this number."""
        return self._update is not None and applied > self._update
