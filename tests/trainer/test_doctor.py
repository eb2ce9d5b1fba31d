"""The doctor's report of machines given as data, and of torch's TF32 switches in any mixture."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from policyfit.strategies.facts import GPU, MachineFacts
from policyfit.trainer.doctor import main_text, report, tf32_setting

backends: Any = torch.backends
has_leaves = pytest.mark.skipif(
    not hasattr(torch.backends, "fp32_precision"), reason="needs torch 2.9, whose TF32 switches have leaves"
)


def test_report_of_a_t4_tells_emulated_from_native() -> None:
    t4 = GPU(name="Tesla T4", capability=(7, 5), memory_bytes=15 * 2**30, uuid="GPU-42")
    rows = dict(report(MachineFacts(torch_version="2.9.0+cu128", build="cuda", cuda=(t4,), cpu_count=4)))
    label = "cuda:0 (Tesla T4, compute capability 7.5)"
    assert rows == {
        "torch": "2.9.0+cu128, built for CUDA (NVIDIA)",
        "cuda:0": "cuda:0 (Tesla T4, 15.0 GiB), uuid GPU-42",
        "cuda:0 bf16": f"emulated: {label} only emulates bfloat16",
        "cuda:0 fp16": f"yes: {label} computes float16",
        "cuda:0 TF32": f"no: {label} has no TF32",
        "cpu": "cpu (4 cores)",
        "cpu bf16": "emulated: cpu only emulates bfloat16",
        "cpu fp16": "emulated: cpu only emulates float16",
        "cpu TF32": "no: cpu has no TF32",
        "CUDA_VISIBLE_DEVICES": "unset",
        "device=auto": "cuda:0: cuda:0 (Tesla T4, 15.0 GiB); cuda comes first where there is a GPU that torch can use",
        "precision=auto": f"fp16: {label} only emulates bfloat16, and {label} computes float16",
    }


def test_report_lists_every_device() -> None:
    mi300 = GPU(name="MI300X", arch="gfx942")
    names = [what for what, _ in report(MachineFacts(build="rocm", cuda=(mi300, mi300)))]
    assert [name for name in names if name in ("cuda:0", "cuda:1", "cpu")] == ["cuda:0", "cuda:1", "cpu"]
    assert "mps" in dict(report(MachineFacts(build="mps", mps=True, macos=(15, 0))))
    assert "xpu:0" in dict(report(MachineFacts(build="xpu", xpu=(GPU(name="Arc"),))))


@pytest.mark.parametrize(("value", "expected"), [(None, "unset"), ("", "set to empty"), ("0", "'0'"), ("-1", "'-1'")])
@pytest.mark.parametrize("name", ["ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"])
def test_report_on_rocm_tells_for_each_mask_how_it_is_set(name: str, value: str | None, expected: str) -> None:
    environment = () if value is None else ((name, value),)
    rows = dict(report(MachineFacts(build="rocm", environment=environment)))
    masks = {key: rows[key] for key in rows if key.endswith("VISIBLE_DEVICES")}
    others = {"ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"} - {name}
    assert masks == {name: expected} | dict.fromkeys(others, "unset")


def warnings_of(facts: MachineFacts) -> list[str]:
    return [finding for what, finding in report(facts) if what == "warning"]


@pytest.mark.parametrize(
    ("facts", "part"),
    [
        (MachineFacts(build="cuda", amd_gpu_present=True), "Install a ROCm build of PyTorch."),
        (MachineFacts(build="rocm", nvidia_gpu_present=True), "Install a CUDA build of PyTorch."),
        (MachineFacts(nvidia_gpu_present=True), "Install a build of PyTorch for CUDA (NVIDIA)."),
        (
            MachineFacts(
                build="rocm",
                cuda=(GPU(name="MI300X", arch="gfx942"),),
                environment=(("ROCR_VISIBLE_DEVICES", "0"), ("HIP_VISIBLE_DEVICES", "0")),
            ),
            "On ROCm set HIP_VISIBLE_DEVICES alone: ROCR_VISIBLE_DEVICES and it add up.",
        ),
        (MachineFacts(build="mps", fault="no Metal"), "torch says: no Metal"),
    ],
)
def test_report_warns_of_what_keeps_a_gpu_idle(facts: MachineFacts, part: str) -> None:
    (warning,) = warnings_of(facts)
    assert part in warning


@pytest.mark.parametrize(
    "facts",
    [
        MachineFacts(),
        MachineFacts(build="cuda", cuda=(GPU(name="A100", capability=(8, 0)),), amd_gpu_present=True),
        MachineFacts(
            build="rocm",
            cuda=(GPU(name="MI300X", arch="gfx942"),),
            environment=(("HIP_VISIBLE_DEVICES", "0"),),
        ),
    ],
)
def test_report_does_not_warn_of_a_machine_that_is_well(facts: MachineFacts) -> None:
    assert warnings_of(facts) == []


def test_report_says_what_auto_refuses_and_does_not_raise() -> None:
    environment = (("WORLD_SIZE", "2"), ("LOCAL_RANK", "1"))
    facts = MachineFacts(build="cuda", cuda=(GPU(name="A100", capability=(8, 0)),), environment=environment)
    found = dict(report(facts))["device=auto"]
    assert found.startswith("refused: device='auto' was requested, but LOCAL_RANK is 1")
    assert "\n" not in found


@pytest.fixture
def tf32_restored() -> Iterator[None]:
    leaves = (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn, backends.mkldnn.matmul)
    before = [leaf.fp32_precision for leaf in leaves]
    yield
    torch.set_float32_matmul_precision("highest")
    backends.cudnn.allow_tf32 = True
    for leaf, value in zip(leaves, before, strict=True):
        leaf.fp32_precision = value


@has_leaves
@pytest.mark.usefixtures("tf32_restored")
def test_tf32_setting_reads_every_leaf() -> None:
    torch.set_float32_matmul_precision("high")
    backends.cudnn.allow_tf32 = False
    backends.cudnn.conv.fp32_precision = backends.cudnn.rnn.fp32_precision = "ieee"
    assert tf32_setting() == "matmul tf32, convolution ieee, rnn ieee, cpu matmul tf32"


@has_leaves
@pytest.mark.usefixtures("tf32_restored")
def test_doctor_says_mixed_where_the_old_getters_raise() -> None:
    torch.set_float32_matmul_precision("highest")
    backends.cuda.matmul.fp32_precision = "tf32"
    with pytest.raises(RuntimeError):
        torch.get_float32_matmul_precision()
    assert tf32_setting().startswith("matmul tf32, convolution tf32, rnn tf32, ")
    assert "mixed" in tf32_setting()
    assert "mixed" in main_text()


def test_doctor_prints_this_machine_as_aligned_lines() -> None:
    lines = main_text().splitlines()
    assert lines[0].startswith("torch")
    assert lines[0].endswith(("the cpu alone", "(NVIDIA)", "(AMD)", "(Intel)", "(Apple)"))
    assert lines[1].startswith("TF32 as set")
    column = lines[0].index(torch.__version__)
    assert all(line[column - 2 : column] == "  " and line[column] != " " for line in lines)
