"""How fast a run trains."""

from __future__ import annotations

import time

from .counters import Counters


class Pace:
    """Steps and micro-batches a second since it was last read; validations, saves and the like do not count."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self.restart()

    def restart(self) -> None:
        """Count from here."""
        self._began, self._paused = time.perf_counter(), 0.0
        self._before = (self._counters.step, self._counters.micro_batches)

    def pause(self) -> None:
        """What is done until ``go_on`` does not count."""
        self._since = time.perf_counter()

    def go_on(self) -> None:
        """Count again."""
        self._paused += time.perf_counter() - self._since

    def read(self) -> tuple[float, float]:
        """Steps and micro-batches a second, of this rank; counts from here."""
        seconds = max(time.perf_counter() - self._began - self._paused, 1e-9)
        steps, batches = self._before
        rates = (self._counters.step - steps) / seconds, (self._counters.micro_batches - batches) / seconds
        self.restart()
        return rates
