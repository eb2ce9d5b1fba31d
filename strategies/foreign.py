"""Whether somebody but the run makes collectives between updates: a policy's own code, or a callback in a window.

A rank that fails could not make those, and its sums would meet one of them, at which gloo ends the processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed


class Foreign:
    """Compares torch's count of the collectives of all ranks with what an update makes of the run's own.

    Those of other groups are not in it, and a backend that does not count is taken for one where nobody talks.
    """

    def __init__(self, device: torch.device) -> None:
        group = distributed.group.WORLD
        assert group is not None
        # Not the group's own, which has none where several backends share it.
        backend: Any = group._get_backend(device)
        counts = backend.name() in ("gloo", "nccl")
        #: How many this process has made.
        self.count: Callable[[], int] = backend._get_sequence_number_for_group if counts else lambda: 0
        #: Whether others than the run's own were among them.
        self.found = False
        self._since = self.count()

    def begin(self) -> None:
        """What was made so far is in order."""
        self._since = self.count()

    def made(self) -> int:
        """How many since then."""
        return self.count() - self._since

    def look(self, own: int) -> None:
        """Compare what was made with the run's own."""
        self.found = self.found or self.made() != own

    @contextmanager
    def besides(self) -> Iterator[None]:
        """What is made here is the run's own, and is not counted."""
        before = self.count()
        yield
        self._since += self.count() - before
