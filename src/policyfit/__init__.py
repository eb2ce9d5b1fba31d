"""policyfit trains robot policies: the device and the precision you ask for are what runs.

Trainer(device="auto", precision="bf16").fit(policy)
"""

from policyfit.callbacks import (
    EMA,
    TF32,
    BF16Support,
    Callback,
    Checkpoint,
    MetricsLog,
    OverflowReport,
    PrecisionAudit,
    Progress,
    ScaleMonitor,
)
from policyfit.strategies import (
    BF16,
    FP16,
    CallbackError,
    CheckpointError,
    ConfigError,
    CPUDevice,
    CUDADevice,
    DeviceUnavailableError,
    DistributedError,
    FullPrecision,
    GradScalerConfig,
    LossScaleCollapse,
    MachineFacts,
    MPSDevice,
    PolicyfitError,
    PrecisionError,
    TrainingDiverged,
    XPUDevice,
    probe,
)
from policyfit.trainer import Outcome, RolloutReport, Trainer, WarmupCosine, load

__version__ = "0.1.0"

__all__ = [
    "BF16",
    "EMA",
    "FP16",
    "TF32",
    "BF16Support",
    "CPUDevice",
    "CUDADevice",
    "Callback",
    "CallbackError",
    "Checkpoint",
    "CheckpointError",
    "ConfigError",
    "DeviceUnavailableError",
    "DistributedError",
    "FullPrecision",
    "GradScalerConfig",
    "LossScaleCollapse",
    "MPSDevice",
    "MachineFacts",
    "MetricsLog",
    "Outcome",
    "OverflowReport",
    "PolicyfitError",
    "PrecisionAudit",
    "PrecisionError",
    "Progress",
    "RolloutReport",
    "ScaleMonitor",
    "Trainer",
    "TrainingDiverged",
    "WarmupCosine",
    "XPUDevice",
    "__version__",
    "load",
    "probe",
]
