"""Hardware as data: what each GPU makes of bf16, fp16, TF32 and float64."""

from __future__ import annotations

import pytest
import torch

from policyfit.strategies.facts import GPU, MachineFacts
from policyfit.strategies.formats import Support, bf16_support, fp16_support, has_float64, tf32_support

CUDA, XPU, MPS, CPU = (torch.device(name) for name in ("cuda:0", "xpu:0", "mps", "cpu"))


def nvidia(name: str, major: int, minor: int) -> MachineFacts:
    return MachineFacts(build="cuda", cuda=(GPU(name=name, capability=(major, minor)),))


def amd(name: str, arch: str, *, allow_tf32: bool = True) -> MachineFacts:
    environment = (("HIPBLASLT_ALLOW_TF32", "1"),) if allow_tf32 else ()
    return MachineFacts(build="rocm", cuda=(GPU(name=name, arch=arch),), environment=environment)


def intel(name: str, *, fp64: bool, version: str = "2.13.0+xpu", tf32: bool = True) -> MachineFacts:
    gpu = GPU(name=name, has_fp64=fp64, bf16=True, tf32=tf32)
    return MachineFacts(build="xpu", torch_version=version, xpu=(gpu,))


def apple(macos: tuple[int, int] | None, version: str) -> MachineFacts:
    return MachineFacts(build="mps", mps=True, macos=macos, torch_version=version)


def flags(*answers: Support) -> str:
    """Native and usable of each answer, as in "yes", "emulated" or "no"."""
    words = [("yes" if a.native else "emulated") if a.usable else "no" for a in answers]
    return " ".join(words)


@pytest.mark.parametrize(
    ("facts", "device", "expected"),  # bf16, fp16, tf32
    [
        (nvidia("Tesla V100", 7, 0), CUDA, "emulated yes no"),
        (nvidia("Tesla T4", 7, 5), CUDA, "emulated yes no"),
        (nvidia("GeForce RTX 2080 Ti", 7, 5), CUDA, "emulated yes no"),
        (nvidia("A100", 8, 0), CUDA, "yes yes yes"),
        (nvidia("GeForce RTX 3090", 8, 6), CUDA, "yes yes yes"),
        (nvidia("GeForce RTX 4090", 8, 9), CUDA, "yes yes yes"),
        (nvidia("H100", 9, 0), CUDA, "yes yes yes"),
        (nvidia("GeForce RTX 5090", 12, 0), CUDA, "yes yes yes"),
        (amd("Radeon VII", "gfx906"), CUDA, "emulated yes no"),
        (amd("Instinct MI100", "gfx908"), CUDA, "yes yes no"),
        (amd("Instinct MI210", "gfx90a"), CUDA, "yes yes no"),
        (amd("Instinct MI300X", "gfx942"), CUDA, "yes yes yes"),
        (amd("Instinct MI300X", "gfx942", allow_tf32=False), CUDA, "yes yes no"),
        (amd("Instinct MI355X", "gfx950"), CUDA, "yes yes yes"),
        (amd("Radeon RX 6800", "gfx1030"), CUDA, "emulated yes no"),
        (amd("Radeon RX 7900 XTX", "gfx1100"), CUDA, "yes yes no"),
        (amd("Radeon RX 9070", "gfx1201"), CUDA, "yes yes no"),
        (intel("Arc A770", fp64=False), XPU, "yes no yes"),
        (intel("Arc B580", fp64=True), XPU, "yes yes yes"),
        (intel("Data Center GPU Max 1550", fp64=True), XPU, "yes yes yes"),
        (intel("Data Center GPU Max 1550", fp64=True, version="2.9.1+xpu"), XPU, "yes yes no"),
        (intel("Iris Xe", fp64=False, tf32=False), XPU, "yes no no"),
        (apple((13, 6), "2.7.1"), MPS, "no no no"),
        (apple((13, 6), "2.8.0"), MPS, "no yes no"),
        (apple((15, 1), "2.7.1"), MPS, "yes no no"),
        (apple((15, 1), "2.8.0"), MPS, "yes yes no"),
        (apple((14, 0), "2.10.0.dev20260101"), MPS, "yes yes no"),
        (apple((15, 1), "2.5.1"), MPS, "no no no"),
        (apple(None, "2.13.0"), MPS, "no yes no"),
        (MachineFacts(cpu_bf16=True, cpu_fp16=True), CPU, "yes yes no"),
        (MachineFacts(cpu_bf16=True), CPU, "yes emulated no"),
        (MachineFacts(), CPU, "emulated emulated no"),
        (MachineFacts(), CUDA, "no no no"),
        (MachineFacts(), XPU, "no no no"),
        (MachineFacts(), MPS, "no no no"),
        (nvidia("A100", 8, 0), torch.device("cuda:1"), "no no no"),
    ],
)
def test_formats_are_judged_from_the_hardware(facts: MachineFacts, device: torch.device, expected: str) -> None:
    answers = bf16_support(device, facts), fp16_support(device, facts), tf32_support(device, facts)
    assert flags(*answers) == expected


@pytest.mark.parametrize(("arch", "capability"), [("gfx90a", (9, 0)), ("gfx1030", (10, 3))])
def test_capability_numbers_never_decide_on_rocm(arch: str, capability: tuple[int, int]) -> None:
    facts = MachineFacts(build="rocm", cuda=(GPU(name="AMD", arch=arch, capability=capability),))
    assert bf16_support(CUDA, facts).native is (arch == "gfx90a")
    assert tf32_support(CUDA, facts).native is False


@pytest.mark.parametrize(
    ("support", "reason"),
    [
        (
            bf16_support(CUDA, nvidia("Tesla T4", 7, 5)),
            "cuda:0 (Tesla T4, compute capability 7.5) only emulates bfloat16",
        ),
        (bf16_support(CUDA, amd("MI300X", "gfx942")), "cuda:0 (MI300X, gfx942) computes bfloat16"),
        (
            bf16_support(MPS, apple((13, 6), "2.8.0")),
            "mps has bfloat16 from macOS 14 on and this is macOS 13.6",
        ),
        (
            fp16_support(MPS, apple((15, 1), "2.7.1")),
            "mps trains in float16 from torch 2.8 on and this is 2.7.1",
        ),
        (
            fp16_support(CUDA, amd("MI210", "gfx90a")),
            "cuda:0 (MI210, gfx90a) computes float16, flushing denormals in its matrix units",
        ),
        (
            tf32_support(CUDA, nvidia("Tesla V100", 7, 0)),
            "cuda:0 (Tesla V100, compute capability 7.0) has no TF32",
        ),
        (bf16_support(XPU, MachineFacts()), "xpu:0 is not available here"),
        (bf16_support(CPU, MachineFacts()), "cpu only emulates bfloat16"),
    ],
)
def test_reason_names_device_and_fact(support: Support, reason: str) -> None:
    assert support.reason == reason


@pytest.mark.parametrize("value", [None, "", "0", "1"])
def test_tf32_on_rocm_is_not_effective_without_its_variable(value: str | None) -> None:
    environment = () if value is None else (("HIPBLASLT_ALLOW_TF32", value),)
    facts = MachineFacts(build="rocm", cuda=(GPU(name="MI300X", arch="gfx942"),), environment=environment)
    support = tf32_support(CUDA, facts)
    assert support.native is True
    assert support.usable is (value == "1")
    assert ("not effective" in support.reason) is (value != "1")


@pytest.mark.parametrize(
    ("device", "facts", "expected"),
    [
        (CPU, MachineFacts(), True),
        (CUDA, nvidia("A100", 8, 0), True),
        (MPS, apple((15, 1), "2.8.0"), False),
        (XPU, intel("Arc A770", fp64=False), False),
        (XPU, intel("Data Center GPU Max 1550", fp64=True), True),
        (XPU, MachineFacts(), False),
    ],
)
def test_float64_is_there_but_on_apple_s_gpu_and_some_of_intel(
    device: torch.device, facts: MachineFacts, expected: bool
) -> None:
    assert has_float64(device, facts) is expected
