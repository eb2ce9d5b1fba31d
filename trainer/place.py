"""Where a rank is between the others, so that it knows what they wait for when it fails."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Place:
    """Where a rank is between the others: in which window, and whether it is where ranks meet."""

    #: The micro-batch of the epoch that is computed now or next, and the end of its window: the one after the last.
    index: int = 0
    end: int = 0
    #: Updates tried when that window began.
    began_at: int = -1
    #: Whether the others' next collective is a ``gather``; so it is before the first window and after the last.
    meeting: bool = True
    #: Updates tried at the last time when it was asked whether ranks meet.
    asked_at: int = 0

    def enter(self, index: int, end: int, began_at: int) -> None:
        """A micro-batch was drawn."""
        self.index, self.end, self.began_at = index, end, began_at

    def leave(self) -> None:
        """The window under way is given up."""
        self.began_at = -1
