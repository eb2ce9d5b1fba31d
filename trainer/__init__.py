"""The Trainer and what it trains with."""

from .load import load
from .outcome import Outcome
from .rollout import RolloutReport
from .schedule import WarmupCosine
from .trainer import Trainer

__all__ = ["Outcome", "RolloutReport", "Trainer", "WarmupCosine", "load"]
