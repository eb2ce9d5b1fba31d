"""The moments of a run, the class to extend, and the callbacks that come with policyfit."""

from .bf16_support import BF16Support
from .callback import Callback
from .checkpoint import Checkpoint
from .ema import EMA
from .metrics_log import MetricsLog
from .overflow_report import OverflowReport
from .precision_audit import PrecisionAudit
from .preemption import Preemption
from .progress import Progress
from .scale_monitor import ScaleMonitor
from .tf32 import TF32

__all__ = [
    "EMA",
    "TF32",
    "BF16Support",
    "Callback",
    "Checkpoint",
    "MetricsLog",
    "OverflowReport",
    "PrecisionAudit",
    "Preemption",
    "Progress",
    "ScaleMonitor",
]
