"""How the facts of a machine are asked for; only torch's low-level answers are replaced, never a decision."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from policyfit.strategies.facts import GPU, Build, probe
from policyfit.strategies.formats import bf16_support

CUDA = torch.device("cuda:0")


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


def test_probe_keeps_what_torch_warns_about_the_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def is_available() -> bool:
        warnings.warn("The NVIDIA driver on your system\nis too old.", stacklevel=1)
        return False

    fake_build(monkeypatch, "cuda")
    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    facts = probe(tmp_path)
    assert facts.cuda == ()
    assert facts.fault == "The NVIDIA driver on your system is too old."


def test_probe_keeps_what_torch_says_of_conflicting_masks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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
    with monkeypatch.context() as patch:
        patch.delenv(name, raising=False)
        if value is not None:
            patch.setenv(name, value)
        before = dict(os.environ)
        assert probe(tmp_path).variable(name) == value
        assert dict(os.environ) == before


@pytest.mark.parametrize(("simd_count", "expected"), [("0", False), ("304", True)])
def test_probe_tells_an_amd_gpu_from_a_cpu_node(tmp_path: Path, simd_count: str, expected: bool) -> None:
    node = tmp_path / "sys/class/kfd/kfd/topology/nodes/0"
    node.mkdir(parents=True)
    (node / "properties").write_text(f"cpu_cores_count 16\nsimd_count {simd_count}\n")
    assert probe(tmp_path).amd_gpu_present is expected


def test_probe_counts_an_amd_gpu_whose_node_may_not_be_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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


def test_probe_counts_a_cpu_format_only_with_its_units(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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
