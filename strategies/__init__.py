"""Device, precision and distribution; the facts they decide from; the error tree."""

from .ddp import DDP
from .device import CPUDevice, CUDADevice, DeviceStrategy, MPSDevice, XPUDevice
from .distributed import DistributionStrategy, SingleProcess
from .errors import (
    CallbackError,
    CheckpointError,
    ConfigError,
    DeviceUnavailableError,
    DistributedError,
    LossScaleCollapse,
    PolicyfitError,
    PrecisionError,
    TrainingDiverged,
)
from .fabric import FabricPlugin, fabric_precision
from .facts import GPU, MachineFacts, probe
from .fsdp import FSDP
from .mixed import BF16, FP16
from .precision import FullPrecision, PrecisionStrategy
from .scaler import GradScalerConfig

__all__ = [
    "BF16",
    "DDP",
    "FP16",
    "FSDP",
    "GPU",
    "CPUDevice",
    "CUDADevice",
    "CallbackError",
    "CheckpointError",
    "ConfigError",
    "DeviceStrategy",
    "DeviceUnavailableError",
    "DistributedError",
    "DistributionStrategy",
    "FabricPlugin",
    "FullPrecision",
    "GradScalerConfig",
    "LossScaleCollapse",
    "MPSDevice",
    "MachineFacts",
    "PolicyfitError",
    "PrecisionError",
    "PrecisionStrategy",
    "SingleProcess",
    "TrainingDiverged",
    "XPUDevice",
    "fabric_precision",
    "probe",
]
