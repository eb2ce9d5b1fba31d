"""What this machine has, as a plain value.

``probe()`` is the one place that asks torch and the environment what exists. Everything else is a pure
function of ``MachineFacts``, so "an AMD MI300 with a CUDA build of torch" is data in a test.
"""

from __future__ import annotations

import os
import platform
import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from .errors import ConfigError

Build = Literal["cpu", "cuda", "rocm", "xpu", "mps"]

#: The variables that hide devices from a process, by build, in the order in which they act.
MASKS: dict[Build, tuple[str, ...]] = {
    "cpu": (),
    "cuda": ("CUDA_VISIBLE_DEVICES",),
    "rocm": ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
    "xpu": ("ZE_AFFINITY_MASK", "ONEAPI_DEVICE_SELECTOR"),
    "mps": (),
}
#: By these the processes of a run find each other.
RENDEZVOUS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
#: How many tasks another launcher than torchrun has started; such tasks do not find each other by that.
TASKS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_SWITCHES = ("HIPBLASLT_ALLOW_TF32", "CUBLAS_WORKSPACE_CONFIG", "OMP_NUM_THREADS")
_VARIABLES = (*MASKS["rocm"], *MASKS["xpu"], *_SWITCHES, *RENDEZVOUS, *TASKS)
#: accelerate and its launcher read what begins with these.
PREFIXES = ("ACCELERATE_", "FSDP_", "MEGATRON_LM_", "PARALLELISM_CONFIG_")
# Torch and its libraries read what begins with these; kept for the record of a run.
_RECORDED = ("PYTORCH_", "TORCH_", "NCCL_", "MIOPEN_", "MKL_", "CUDNN_")


@dataclass(frozen=True, kw_only=True, slots=True)
class GPU:
    """One device as torch shows it. ``None`` means that this vendor, or this torch, has no such answer."""

    name: str
    memory_bytes: int = 0
    uuid: str = ""
    capability: tuple[int, int] | None = None  # NVIDIA
    arch: str | None = None  # AMD: gcnArchName without its feature suffix
    has_fp64: bool = True
    bf16: bool | None = None  # Intel
    tf32: bool | None = None  # Intel


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineFacts:
    """Torch, its devices and the part of the environment that decides about them.

    Args:
        cuda: NVIDIA or AMD devices (``build`` says which) that torch can use.
        environment: Names and values of the variables that are set; a variable set to "" is in it.
        amd_gpu_present: The Linux kernel knows an AMD GPU, whether or not torch can use it.
        nvidia_gpu_present: The NVIDIA driver shows a GPU, whether or not torch can use it.
        can_distribute: This torch is built with torch.distributed, as some for small robots are not.
        fault: What torch said while it looked for devices; "" when it said nothing.
    """

    torch_version: str = "2.13.0"
    build: Build = "cpu"
    cuda: tuple[GPU, ...] = ()
    xpu: tuple[GPU, ...] = ()
    mps: bool = False
    macos: tuple[int, int] | None = None
    cpu_bf16: bool = False
    cpu_fp16: bool = False
    cpu_count: int = 1
    environment: tuple[tuple[str, str], ...] = ()
    amd_gpu_present: bool = False
    nvidia_gpu_present: bool = False
    can_distribute: bool = True
    fault: str = ""

    @property
    def release(self) -> tuple[int, int]:
        """Major and minor version of torch; a nightly build counts as its release."""
        return _version(self.torch_version) or (0, 0)

    def gpu(self, device: torch.device) -> GPU | None:
        """The GPU that a cuda or xpu device is; ``None`` where there is no such one."""
        gpus = {"cuda": self.cuda, "xpu": self.xpu}.get(device.type, ())
        index = device.index or 0
        return gpus[index] if index < len(gpus) else None

    def variable(self, name: str) -> str | None:
        """An environment variable; ``None`` when unset, "" when set to nothing."""
        return dict(self.environment).get(name)


def describe(device: torch.device, facts: MachineFacts) -> str:
    """A device as people know it: "cuda:0 (NVIDIA H200, 139.8 GiB)", "cpu (16 cores)"."""
    if device.type == "cpu":
        return f"cpu ({facts.cpu_count} core{'' if facts.cpu_count == 1 else 's'})"
    gpu = facts.gpu(device)
    if gpu is None:
        macos = f", macOS {facts.macos[0]}.{facts.macos[1]}" if facts.macos else ""
        return f"mps (Apple GPU{macos})" if device.type == "mps" else str(device)
    memory = f"{gpu.memory_bytes / 2**30:.1f} GiB" if gpu.memory_bytes else ""
    return f"{device} ({', '.join(part for part in (gpu.name, gpu.arch, memory) if part)})"


def world_size(facts: MachineFacts) -> int:
    """How many processes a launcher has started; 1 without one.

    Raises:
        ConfigError: WORLD_SIZE is not a whole number.
    """
    return _count("WORLD_SIZE", 1, facts)


def local_rank(facts: MachineFacts) -> int:
    """The number of this process among those of its machine; 0 in a run of one process.

    Raises:
        ConfigError: A launcher variable is not a whole number.
    """
    return _count("LOCAL_RANK", 0, facts) if world_size(facts) > 1 else 0


def probe(root: Path = Path("/")) -> MachineFacts:
    """Ask torch, the environment and the Linux kernel's files under ``root`` what this machine has."""
    build = _build()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cuda_count, cuda_error = _count_devices(torch.cuda)
        xpu_count, xpu_error = _count_devices(torch.xpu)
        mps_error = _first_operation("mps") if build == "mps" and torch.backends.mps.is_available() else None
    said = [str(warning.message) for warning in caught] + [cuda_error, xpu_error, mps_error or ""]
    has_mkldnn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return MachineFacts(
        torch_version=str(torch.__version__),
        build=build,
        cuda=tuple(_cuda_gpu(i, build) for i in range(cuda_count)),
        xpu=tuple(_xpu_gpu(i) for i in range(xpu_count)),
        mps=mps_error == "",
        macos=_version(platform.mac_ver()[0]) if build == "mps" else None,
        cpu_bf16=has_mkldnn and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()),
        cpu_fp16=has_mkldnn and bool(torch.ops.mkldnn._is_mkldnn_fp16_supported()),
        cpu_count=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        environment=tuple(
            (name, value)
            for name, value in sorted(os.environ.items())
            if name in _VARIABLES or name.startswith((*PREFIXES, *_RECORDED))
        ),
        amd_gpu_present=any(map(_is_amd_gpu, root.glob("sys/class/kfd/kfd/topology/nodes/*/properties"))),
        can_distribute=torch.distributed.is_available(),
        nvidia_gpu_present=any(root.glob("proc/driver/nvidia/gpus/*")) or any(root.glob("dev/nvidia[0-9]*")),
        fault=" ".join(" ".join(said).split()),
    )


def _count(name: str, default: int, facts: MachineFacts) -> int:
    value = facts.variable(name)
    if not value:
        return default
    if not value.isdecimal():
        raise ConfigError(
            f"The environment variable {name} must be a whole number, got {value!r}.\n"
            "Unset it, or start the run with torchrun, which sets it."
        )
    return int(value)


def _build() -> Build:
    if torch.version.hip is not None:
        return "rocm"
    if torch.version.cuda is not None:
        return "cuda"
    if getattr(torch.version, "xpu", None) is not None:
        return "xpu"
    return "mps" if torch.backends.mps.is_built() else "cpu"


def _count_devices(namespace: Any) -> tuple[int, str]:
    """How many devices torch.cuda or torch.xpu has, and its own words where the environment stops it."""
    try:
        return (namespace.device_count(), "") if namespace.is_available() else (0, "")
    except RuntimeError as error:
        return 0, str(error)


def _first_operation(device: str) -> str:
    """What a small operation raised, or ""; a backend can be available and broken."""
    try:
        (torch.ones(2, device=device) + 1).cpu()
    except RuntimeError as error:
        return str(error)
    return ""


def _cuda_gpu(index: int, build: Build) -> GPU:
    properties = torch.cuda.get_device_properties(index)
    return GPU(
        name=properties.name,
        memory_bytes=properties.total_memory,
        uuid=str(getattr(properties, "uuid", "")),
        capability=None if build == "rocm" else torch.cuda.get_device_capability(index),
        arch=properties.gcnArchName.split(":")[0] if build == "rocm" else None,
    )


def _xpu_gpu(index: int) -> GPU:
    """Source: torch.xpu.is_bf16_supported and is_tf32_supported, which read these for the current device."""
    properties: Any = torch.xpu.get_device_properties(index)
    return GPU(
        name=properties.name,
        memory_bytes=properties.total_memory,
        uuid=str(getattr(properties, "uuid", "")),
        has_fp64=bool(properties.has_fp64),
        bf16=getattr(properties, "has_bfloat16_conversions", None),
        tf32=getattr(properties, "has_subgroup_matrix_multiply_accumulate", None),
    )


def _is_amd_gpu(node: Path) -> bool:
    """Source: Linux, kfd_topology.c; nodes of CPUs have no SIMD units, those of other containers refuse."""
    try:
        return re.search(r"^simd_count [1-9]", node.read_text(), re.MULTILINE) is not None
    except PermissionError:
        return True


def _version(text: str) -> tuple[int, int] | None:
    found = re.match(r"(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else None
