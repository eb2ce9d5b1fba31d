"""Hardware as data: what each GPU makes of bf16, fp16 and TF32, and how the facts are asked for."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from policyfit.strategies.facts import (
    GPU,
    Build,
    MachineFacts,
    Support,
    bf16_support,
    describe,
    fp16_support,
    probe,
    tf32_support,
)

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
def test_formats_are_judged_from_the_hardware(
    facts: MachineFacts, device: torch.device, expected: str
) -> None:
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


def test_describe_names_device_memory_and_cores() -> None:
    h200 = GPU(name="NVIDIA H200", capability=(9, 0), memory_bytes=150_121_545_728)
    mi300 = GPU(name="AMD Instinct MI300X", arch="gfx942", memory_bytes=192 * 2**30)
    assert describe(CUDA, MachineFacts(build="cuda", cuda=(h200,))) == "cuda:0 (NVIDIA H200, 139.8 GiB)"
    assert (
        describe(torch.device("cuda:1"), MachineFacts(build="rocm", cuda=(h200, mi300)))
        == "cuda:1 (AMD Instinct MI300X, gfx942, 192.0 GiB)"
    )
    assert describe(CPU, MachineFacts(cpu_count=16)) == "cpu (16 cores)"
    assert describe(CPU, MachineFacts(cpu_count=1)) == "cpu (1 core)"
    assert describe(MPS, apple((15, 1), "2.8.0")) == "mps (Apple GPU, macOS 15.1)"
    assert describe(torch.device("cuda:4"), MachineFacts()) == "cuda:4"


def test_environment_tells_unset_from_empty() -> None:
    facts = MachineFacts(environment=(("HIP_VISIBLE_DEVICES", ""),))
    assert facts.variable("HIP_VISIBLE_DEVICES") == ""
    assert facts.variable("ROCR_VISIBLE_DEVICES") is None


def fake_build(monkeypatch: pytest.MonkeyPatch, build: Build) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4" if build == "rocm" else None)
    monkeypatch.setattr(torch.version, "cuda", "12.8" if build == "cuda" else None)
    monkeypatch.setattr(torch.version, "xpu", "20250001" if build == "xpu" else None, raising=False)
    monkeypatch.setattr(torch.backends.mps, "is_built", lambda: build == "mps")


def fake_gpus(monkeypatch: pytest.MonkeyPatch, namespace: Any, *properties: SimpleNamespace) -> None:
    monkeypatch.setattr(namespace, "is_available", lambda: bool(properties))
    monkeypatch.setattr(namespace, "device_count", lambda: len(properties))
    monkeypatch.setattr(namespace, "get_device_properties", lambda index: properties[index])


def test_probe_does_not_believe_the_bare_bf16_query(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_build(monkeypatch, "cuda")
    t4 = SimpleNamespace(name="Tesla T4", total_memory=15 * 2**30, uuid="GPU-1")
    fake_gpus(monkeypatch, torch.cuda, t4)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 5))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
    facts = probe(tmp_path)
    assert facts.build == "cuda"
    assert facts.cuda == (GPU(name="Tesla T4", memory_bytes=15 * 2**30, uuid="GPU-1", capability=(7, 5)),)
    assert bf16_support(CUDA, facts).native is False


def test_probe_reads_the_architecture_on_rocm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_build(monkeypatch, "rocm")
    mi300 = SimpleNamespace(name="MI300X", total_memory=2**30, gcnArchName="gfx942:sramecc+:xnack-")
    fake_gpus(monkeypatch, torch.cuda, mi300)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 4))
    facts = probe(tmp_path)
    assert facts.build == "rocm"
    assert facts.cuda == (GPU(name="MI300X", memory_bytes=2**30, arch="gfx942"),)


def test_probe_reads_what_each_xpu_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_build(monkeypatch, "xpu")
    arc = SimpleNamespace(
        name="Arc A770",
        total_memory=16 * 2**30,
        has_fp64=False,
        has_bfloat16_conversions=True,
        has_subgroup_matrix_multiply_accumulate=True,
    )
    old = SimpleNamespace(name="Old", total_memory=0, has_fp64=True)
    fake_gpus(monkeypatch, torch.xpu, arc, old)
    assert probe(tmp_path).xpu == (
        GPU(name="Arc A770", memory_bytes=16 * 2**30, has_fp64=False, bf16=True, tf32=True),
        GPU(name="Old"),
    )


def test_probe_asks_no_macos_question_without_mps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*version: int) -> None:
        raise AssertionError("a build without MPS has no answer")

    fake_build(monkeypatch, "cpu")
    monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", refuse)
    monkeypatch.setattr("platform.mac_ver", refuse)
    facts = probe(tmp_path)
    assert (facts.build, facts.mps, facts.macos, facts.cuda, facts.xpu) == ("cpu", False, None, (), ())


def test_probe_keeps_the_text_of_a_first_operation_that_fails_on_mps(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake_build(monkeypatch, "mps")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr("platform.mac_ver", lambda: ("15.1.1", ("", "", ""), "arm64"))
    facts = probe(tmp_path)  # this torch has no MPS, so the operation really fails
    assert facts.mps is False
    assert facts.macos == (15, 1)
    assert "MPS" in facts.fault


def test_probe_keeps_what_torch_warns_about_the_driver(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def is_available() -> bool:
        warnings.warn("The NVIDIA driver on your system\nis too old.", stacklevel=1)
        return False

    fake_build(monkeypatch, "cuda")
    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    facts = probe(tmp_path)
    assert facts.cuda == ()
    assert facts.fault == "The NVIDIA driver on your system is too old."


def test_probe_keeps_what_torch_says_of_conflicting_masks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def device_count() -> int:
        raise RuntimeError("HIP_VISIBLE_DEVICES contains more devices than ROCR_VISIBLE_DEVICES")

    fake_build(monkeypatch, "rocm")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", device_count)
    assert probe(tmp_path).fault == "HIP_VISIBLE_DEVICES contains more devices than ROCR_VISIBLE_DEVICES"


@pytest.mark.parametrize("value", [None, "", "0", "-1"])
@pytest.mark.parametrize("name", ["ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"])
def test_probe_keeps_masks_as_they_are_set(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, value: str | None
) -> None:
    monkeypatch.delenv(name, raising=False)
    if value is not None:
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    assert probe(tmp_path).variable(name) == value
    assert dict(os.environ) == before


@pytest.mark.parametrize(("simd_count", "expected"), [("0", False), ("304", True)])
def test_probe_tells_an_amd_gpu_from_a_cpu_node(tmp_path: Path, simd_count: str, expected: bool) -> None:
    node = tmp_path / "sys/class/kfd/kfd/topology/nodes/0"
    node.mkdir(parents=True)
    (node / "properties").write_text(f"cpu_cores_count 16\nsimd_count {simd_count}\n")
    assert probe(tmp_path).amd_gpu_present is expected


def test_probe_counts_an_amd_gpu_whose_node_may_not_be_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(path: Path) -> str:
        raise PermissionError(1, "Operation not permitted", str(path))

    node = tmp_path / "sys/class/kfd/kfd/topology/nodes/1"
    node.mkdir(parents=True)
    (node / "properties").touch()
    monkeypatch.setattr(Path, "read_text", refuse)
    assert probe(tmp_path).amd_gpu_present is True


@pytest.mark.parametrize("node", ["dev/nvidia0", "proc/driver/nvidia/gpus/0000:01:00.0"])
def test_probe_sees_an_nvidia_gpu_by_its_driver(tmp_path: Path, node: str) -> None:
    assert probe(tmp_path).nvidia_gpu_present is False
    (tmp_path / node).mkdir(parents=True)
    assert probe(tmp_path).nvidia_gpu_present is True


def test_probe_counts_a_cpu_format_only_with_its_units(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", lambda: False)
    facts = probe(tmp_path)
    assert (facts.cpu_bf16, facts.cpu_fp16) == (True, False)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert probe(tmp_path).cpu_bf16 is False


def test_probe_runs_on_this_machine() -> None:
    facts = probe()
    assert facts.torch_version == torch.__version__
    assert len(facts.cuda) == (torch.cuda.device_count() if torch.cuda.is_available() else 0)
    assert facts.cpu_count >= 1
    assert hash(facts) == hash(probe())
