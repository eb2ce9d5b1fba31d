"""Which callbacks a run has when nobody says otherwise, and in which order."""

from __future__ import annotations

from ..strategies.errors import ConfigError
from .bf16_support import BF16Support
from .callback import Callback
from .checkpoint import Checkpoint
from .metrics_log import MetricsLog
from .overflow_report import OverflowReport
from .preemption import Preemption
from .progress import Progress
from .scale_monitor import ScaleMonitor
from .tf32 import TF32


def with_defaults(given: tuple[Callback, ...], *, tf32: bool | None, defaults: bool) -> list[Callback]:
    """The user's callbacks between the defaults that prepare a run and those that record it.

    A callback of the class of a default, or derived from it, takes that default's place.

    Raises:
        ConfigError: ``tf32`` and a ``TF32`` among them say opposite things.
    """
    for callback in given:
        if isinstance(callback, TF32) and tf32 is not True and callback.enabled != tf32:  # True may be the default
            raise ConfigError(
                f"tf32={tf32} and the callback TF32(enabled={callback.enabled}) contradict each other.\n"
                "Keep one of them."
            )
    before: list[Callback] = (
        [TF32(tf32), BF16Support(), ScaleMonitor(), OverflowReport()] if defaults else [BF16Support()]
    )
    after: list[Callback] = [Checkpoint(), Preemption(), MetricsLog(), Progress()] if defaults else []

    def missing(candidates: list[Callback]) -> list[Callback]:
        return [c for c in candidates if not any(isinstance(g, type(c)) for g in given)]

    return [*missing(before), *given, *missing(after)]
