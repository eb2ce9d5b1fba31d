"""How fast a run trains."""

from __future__ import annotations

import time

from .counters import Counters


class Pace:
    """Steps and micro-batches a second since it was last read."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._paused_at: float | None = None
        self.restart()

    def restart(self) -> None:
        """Count from here."""
        self._began, self._paused = time.perf_counter(), 0.0
        self._before = (self._counters.step, self._counters.micro_batches)
        if self._paused_at is not None:
            self._paused_at = self._began

    def pause(self) -> None:
        """What is done until ``go_on`` does not count, as a validation or a save."""
        self._paused_at = time.perf_counter()

    def go_on(self) -> None:
        """Count again."""
        if self._paused_at is not None:
            self._paused += time.perf_counter() - self._paused_at
            self._paused_at = None

    def read(self) -> tuple[float, float]:
        """Steps and micro-batches a second, of this rank; counts from here."""
        until = time.perf_counter() if self._paused_at is None else self._paused_at
        seconds = max(until - self._began - self._paused, 1e-9)
        steps, batches = self._before
        rates = (self._counters.step - steps) / seconds, (self._counters.micro_batches - batches) / seconds
        self.restart()
        return rates
