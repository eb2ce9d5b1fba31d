"""The Trainer and what it trains with."""

from .load import load
from .optimizer import WarmupCosine
from .rollout import RolloutReport
from .trainer import Trainer
from .update import Outcome

__all__ = ["Outcome", "RolloutReport", "Trainer", "WarmupCosine", "load"]
