"""What follows from the facts of a machine for each number format: bfloat16, float16, TF32, float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .facts import GPU, MachineFacts

# Architectures by prefix of gcnArchName. Capability numbers of ROCm mean something else and are never read.
_AMD_BF16 = ("gfx908", "gfx90a", "gfx94", "gfx95", "gfx11", "gfx12")
_AMD_TF32 = ("gfx94", "gfx95")


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
    gpu = facts.gpu(device)
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
    gpu = facts.gpu(device)
    if gpu is None:
        return _absent(device)
    label = _label(device, gpu)
    if not has_float64(device, facts):
        reason = f"{label} computes float16 but has no float64, which torch's GradScaler computes with"
        return Support(True, False, reason)
    flushed = ", flushing denormals in its matrix units" if gpu.arch == "gfx90a" else ""
    return Support(True, True, f"{label} computes float16{flushed}")


def tf32_support(device: torch.device, facts: MachineFacts) -> Support:
    """Whether a device has TF32, and whether switching it on would have an effect."""
    if device.type == "cpu" or (device.type == "mps" and facts.mps):
        return Support(False, False, f"{device.type} has no TF32")
    gpu = facts.gpu(device)
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


def has_float64(device: torch.device, facts: MachineFacts) -> bool:
    """Whether a device has float64: mps has not, and of Intel's GPUs the Arc A series has not."""
    if device.type == "xpu":
        gpu = facts.gpu(device)
        return gpu is not None and gpu.has_fp64
    return device.type != "mps"


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


def _label(device: torch.device, gpu: GPU) -> str:
    detail = f"compute capability {gpu.capability[0]}.{gpu.capability[1]}" if gpu.capability else gpu.arch
    return f"{device} ({gpu.name}, {detail})" if detail else f"{device} ({gpu.name})"


def _absent(device: torch.device) -> Support:
    return Support(False, False, f"{device} is not available here")
