"""What this machine has, as a plain value, and what follows from it for each number format.

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

Build = Literal["cpu", "cuda", "rocm", "xpu", "mps"]

#: The variables that hide devices from a process, by build, in the order in which they act.
MASKS: dict[Build, tuple[str, ...]] = {
    "cpu": (),
    "cuda": ("CUDA_VISIBLE_DEVICES",),
    "rocm": ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
    "xpu": ("ZE_AFFINITY_MASK", "ONEAPI_DEVICE_SELECTOR"),
    "mps": (),
}
_RANKS = ("WORLD_SIZE", "RANK", "LOCAL_RANK")
_VARIABLES = (*MASKS["rocm"], *MASKS["xpu"], "HIPBLASLT_ALLOW_TF32", *_RANKS)
# Architectures by prefix of gcnArchName. Capability numbers of ROCm mean something else and are never read.
_AMD_BF16 = ("gfx908", "gfx90a", "gfx94", "gfx95", "gfx11", "gfx12")
_AMD_TF32 = ("gfx94", "gfx95")


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
    fault: str = ""

    @property
    def release(self) -> tuple[int, int]:
        """Major and minor version of torch; a nightly build counts as its release."""
        return _version(self.torch_version) or (0, 0)

    def variable(self, name: str) -> str | None:
        """An environment variable; ``None`` when unset, "" when set to nothing."""
        return dict(self.environment).get(name)


@dataclass(frozen=True, slots=True)
class Support:
    """What a device makes of a number format; ``reason`` is a clause that says so.

    Args:
        native: The hardware computes in it.
        usable: Torch can run it here at all, perhaps by emulation.
    """

    native: bool
    usable: bool
    reason: str


def bf16_support(device: torch.device, facts: MachineFacts) -> Support:
    """Whether a device computes in bfloat16.

    Emulation is usable, not native: slow, and without a convolution below compute capability 8.0. The bare
    ``torch.cuda.is_bf16_supported()`` counts it and is never asked.
    """
    if device.type == "cpu":
        return _on_cpu("bfloat16", facts.cpu_bf16)
    if device.type == "mps" and facts.mps:
        return _mps_bf16(facts)
    gpu = _gpu(device, facts)
    if gpu is None:
        return _absent(device)
    if device.type == "xpu":
        native = bool(gpu.bf16)
    elif facts.build == "rocm":
        native = (gpu.arch or "").startswith(_AMD_BF16)
    else:
        native = _is_ampere_or_newer(gpu)
    verb = "computes" if native else "only emulates"
    return Support(native, True, f"{_label(device, gpu)} {verb} bfloat16")


def fp16_support(device: torch.device, facts: MachineFacts) -> Support:
    """Whether a device computes in float16, and can train in it with a loss scale."""
    if device.type == "cpu":
        return _on_cpu("float16", facts.cpu_fp16)
    if device.type == "mps" and facts.mps:
        if facts.release < (2, 8):
            reason = f"mps trains in float16 from torch 2.8 on and this is {facts.torch_version}"
            return Support(True, False, reason)
        return Support(True, True, "mps computes float16")
    gpu = _gpu(device, facts)
    if gpu is None:
        return _absent(device)
    label = _label(device, gpu)
    if not gpu.has_fp64:
        reason = f"{label} computes float16 but has no float64, which torch's GradScaler computes with"
        return Support(True, False, reason)
    flushed = ", flushing denormals in its matrix units" if gpu.arch == "gfx90a" else ""
    return Support(True, True, f"{label} computes float16{flushed}")


def tf32_support(device: torch.device, facts: MachineFacts) -> Support:
    """Whether a device has TF32, and whether switching it on would have an effect."""
    if device.type == "cpu" or (device.type == "mps" and facts.mps):
        return Support(False, False, f"{device.type} has no TF32")
    gpu = _gpu(device, facts)
    if gpu is None:
        return _absent(device)
    label = _label(device, gpu)
    if device.type == "xpu" and facts.release < (2, 10):
        reason = f"torch knows from 2.10 on whether {label} has TF32 and this is {facts.torch_version}"
        return Support(False, False, reason)
    if device.type == "xpu":
        native = bool(gpu.tf32)
    elif facts.build == "rocm":
        native = (gpu.arch or "").startswith(_AMD_TF32)
        if native and facts.variable("HIPBLASLT_ALLOW_TF32") != "1":
            reason = f"{label} has TF32, not effective unless HIPBLASLT_ALLOW_TF32=1 is set before the start"
            return Support(True, False, reason)
    else:
        native = _is_ampere_or_newer(gpu)
    return Support(native, native, f"{label} has {'' if native else 'no '}TF32")


def describe(device: torch.device, facts: MachineFacts) -> str:
    """A device as people know it: "cuda:0 (NVIDIA H200, 139.8 GiB)", "cpu (16 cores)"."""
    if device.type == "cpu":
        return f"cpu ({facts.cpu_count} core{'' if facts.cpu_count == 1 else 's'})"
    gpu = _gpu(device, facts)
    if gpu is None:
        macos = f", macOS {facts.macos[0]}.{facts.macos[1]}" if facts.macos else ""
        return f"mps (Apple GPU{macos})" if device.type == "mps" else str(device)
    memory = f"{gpu.memory_bytes / 2**30:.1f} GiB" if gpu.memory_bytes else ""
    return f"{device} ({', '.join(part for part in (gpu.name, gpu.arch, memory) if part)})"


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
        environment=tuple((name, os.environ[name]) for name in _VARIABLES if name in os.environ),
        amd_gpu_present=any(map(_is_amd_gpu, root.glob("sys/class/kfd/kfd/topology/nodes/*/properties"))),
        nvidia_gpu_present=any(root.glob("proc/driver/nvidia/gpus/*")) or any(root.glob("dev/nvidia[0-9]*")),
        fault=" ".join(" ".join(said).split()),
    )


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


def _on_cpu(dtype: str, native: bool) -> Support:
    return Support(native, True, f"cpu {'computes' if native else 'only emulates'} {dtype}")


def _is_ampere_or_newer(gpu: GPU) -> bool:
    return gpu.capability is not None and gpu.capability >= (8, 0)


def _mps_bf16(facts: MachineFacts) -> Support:
    if facts.release < (2, 6):
        return Support(False, False, f"mps has bfloat16 from torch 2.6 on and this is {facts.torch_version}")
    if facts.macos is None or facts.macos < (14, 0):
        found = "an unknown macOS" if facts.macos is None else f"macOS {facts.macos[0]}.{facts.macos[1]}"
        return Support(False, False, f"mps has bfloat16 from macOS 14 on and this is {found}")
    return Support(True, True, "mps computes bfloat16")


def _gpu(device: torch.device, facts: MachineFacts) -> GPU | None:
    gpus = {"cuda": facts.cuda, "xpu": facts.xpu}.get(device.type, ())
    index = device.index or 0
    return gpus[index] if index < len(gpus) else None


def _label(device: torch.device, gpu: GPU) -> str:
    detail = f"compute capability {gpu.capability[0]}.{gpu.capability[1]}" if gpu.capability else gpu.arch
    return f"{device} ({gpu.name}, {detail})" if detail else f"{device} ({gpu.name})"


def _absent(device: torch.device) -> Support:
    return Support(False, False, f"{device} is not available here")


def _version(text: str) -> tuple[int, int] | None:
    found = re.match(r"(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else None
