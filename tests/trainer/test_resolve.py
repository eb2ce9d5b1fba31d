"""From a request and a machine to a device and a precision."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from policyfit.strategies.device import CPUDevice, CUDADevice, MPSDevice, XPUDevice
from policyfit.strategies.errors import ConfigError, DeviceUnavailableError
from policyfit.strategies.facts import GPU, MachineFacts
from policyfit.strategies.mixed import BF16, FP16
from policyfit.strategies.scaler import GradScalerConfig
from policyfit.trainer.resolve import NO_PRECISION, choose_precision, resolve_device, resolve_precision

T4 = GPU(name="Tesla T4", capability=(7, 5))
H200 = GPU(name="NVIDIA H200", capability=(9, 0), memory_bytes=150_121_545_728)
MI300 = GPU(name="MI300X", arch="gfx942")
RADEON_VII = GPU(name="Radeon VII", arch="gfx906")
ARC = GPU(name="Arc A770", has_fp64=False, bf16=True, tf32=True)

LAPTOP = MachineFacts(torch_version="2.13.0+cpu", cpu_count=8)
NVIDIA = MachineFacts(build="cuda", cuda=(H200, H200), nvidia_gpu_present=True)
AMD = MachineFacts(build="rocm", cuda=(MI300, MI300), amd_gpu_present=True)
INTEL = MachineFacts(build="xpu", xpu=(ARC, ARC))
MAC = MachineFacts(build="mps", mps=True, macos=(15, 1))


def rank(number: int) -> tuple[tuple[str, str], ...]:
    return (("WORLD_SIZE", "2"), ("RANK", str(number)), ("LOCAL_RANK", str(number)))


@pytest.mark.parametrize(
    ("request_", "facts", "kind", "name"),
    [
        ("auto", NVIDIA, CUDADevice, "cuda:0"),
        ("auto", AMD, CUDADevice, "cuda:0"),
        ("auto", MAC, MPSDevice, "mps"),
        ("auto", INTEL, XPUDevice, "xpu:0"),
        ("auto", LAPTOP, CPUDevice, "cpu"),
        ("cpu", NVIDIA, CPUDevice, "cpu"),
        ("cuda", NVIDIA, CUDADevice, "cuda:0"),
        ("cuda:1", NVIDIA, CUDADevice, "cuda:1"),
        ("cuda", AMD, CUDADevice, "cuda:0"),
        ("rocm", AMD, CUDADevice, "cuda:0"),
        ("hip:1", AMD, CUDADevice, "cuda:1"),
        ("mps", MAC, MPSDevice, "mps"),
        ("xpu", INTEL, XPUDevice, "xpu:0"),
        ("xpu:1", INTEL, XPUDevice, "xpu:1"),
    ],
)
def test_device_of_a_request(request_: str, facts: MachineFacts, kind: type, name: str) -> None:
    choice = resolve_device(request_, facts)
    assert type(choice.value) is kind
    assert (choice.asked, choice.chosen, choice.value.name) == (request_, name, name)
    assert choice.value.device == torch.device(name)


@pytest.mark.parametrize("request_", ["auto", "cuda"])
def test_device_without_an_index_is_that_of_the_local_rank(request_: str) -> None:
    facts = MachineFacts(build="cuda", cuda=(H200, H200), environment=rank(1))
    choice = resolve_device(request_, facts)
    assert choice.chosen == "cuda:1"
    assert choice.reason.endswith("LOCAL_RANK is 1")
    assert resolve_device("cuda:0", facts).chosen == "cuda:0"


def test_local_rank_of_a_run_of_one_process_is_ignored() -> None:
    facts = MachineFacts(build="cuda", cuda=(H200, H200), environment=(("LOCAL_RANK", "1"),))
    assert resolve_device("auto", facts).chosen == "cuda:0"


def test_local_rank_that_is_no_number_is_an_error() -> None:
    facts = MachineFacts(build="cuda", cuda=(H200,), environment=(("WORLD_SIZE", "2"), ("LOCAL_RANK", "first")))
    with pytest.raises(ConfigError, match="LOCAL_RANK must be a whole number, got 'first'"):
        resolve_device("auto", facts)


def test_auto_does_not_put_one_rank_of_several_on_the_cpu() -> None:
    facts = MachineFacts(build="cuda", cuda=(H200,), environment=rank(1))
    with pytest.raises(DeviceUnavailableError, match=r"device='auto' .* LOCAL_RANK is 1 and torch sees 1 device "):
        resolve_device("auto", facts)


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        (NVIDIA, "cuda:0 (NVIDIA H200, 139.8 GiB); cuda comes first where there is a GPU that torch can use"),
        (LAPTOP, "cpu (8 cores); this PyTorch (2.13.0+cpu) was built without CUDA and ROCm"),
        (
            MachineFacts(build="cuda", torch_version="2.9.0+cu128", amd_gpu_present=True),
            "cpu (1 core); the GPU here is an AMD one and this PyTorch (2.9.0+cu128) is a CUDA build, "
            "which cannot use it",
        ),
        (
            MachineFacts(build="mps", fault="placeholder shader failed"),
            "cpu (1 core); torch cannot use the GPU (torch says: placeholder shader failed)",
        ),
        (
            MachineFacts(build="xpu", torch_version="2.9.0+xpu", nvidia_gpu_present=True),
            "cpu (1 core); no Intel GPU was found; this PyTorch (2.9.0+xpu) was built without CUDA and ROCm, "
            "although an NVIDIA GPU is present",
        ),
    ],
)
def test_auto_says_why(facts: MachineFacts, reason: str) -> None:
    assert resolve_device("auto", facts).reason == reason


def test_auto_prefers_cuda_then_mps_then_xpu() -> None:
    everything = MachineFacts(build="cuda", cuda=(H200,), mps=True, xpu=(ARC,))
    assert resolve_device("auto", everything).chosen == "cuda:0"
    assert resolve_device("auto", MachineFacts(build="mps", mps=True, xpu=(ARC,))).chosen == "mps"


@pytest.mark.parametrize("request_", ["cuda", "cuda:0", "mps", "xpu", "rocm", "hip"])
def test_named_device_that_is_missing_is_refused_as_it_was_asked(request_: str) -> None:
    with pytest.raises(DeviceUnavailableError, match=f"device='{request_}' was requested, but ") as refused:
        resolve_device(request_, LAPTOP)
    assert "device='auto', which takes 'cpu' here" in str(refused.value)


def test_rocm_is_refused_on_a_cuda_build() -> None:
    with pytest.raises(DeviceUnavailableError, match="rocm is cuda on a ROCm build of PyTorch") as refused:
        resolve_device("rocm", NVIDIA)
    assert "install a ROCm build" in str(refused.value)
    assert "device='auto', which takes 'cuda:0' here" in str(refused.value)


@pytest.mark.parametrize(
    ("request_", "meant"),
    [
        ("gpu", "cuda"),
        ("GPU", "cuda"),
        ("nvidia", "cuda"),
        ("amd", "cuda"),
        ("metal", "mps"),
        ("intel", "xpu"),
        ("CUDA", "cuda"),
        ("Cuda:1", "cuda:1"),
        ("cdua", "cuda"),
        ("mps:0", "mps"),
        ("cpu:0", "cpu"),
        ("cuda:01", "cuda"),
        ("cuda:-1", "cuda"),
        ("xpu0", "xpu"),
        ("tpu", "auto"),
        ("npu", "auto"),
        ("", "auto"),
        (None, "auto"),
        (0, "auto"),
        (torch.device("cuda:0"), "auto"),
    ],
)
def test_word_that_is_no_device_is_an_error_with_the_nearest_one(request_: Any, meant: str) -> None:
    with pytest.raises(ConfigError, match="device must be auto, cpu, cuda") as refused:
        resolve_device(request_, NVIDIA)
    (suggested, *_) = re.findall(r"[Uu]se (?:a string such as )?device='([a-z0-9:]+)'", str(refused.value))
    assert suggested == meant
    everything = MachineFacts(build="cuda", cuda=(H200, H200), mps=True, xpu=(ARC,))
    resolve_device(suggested, everything)


def test_word_that_is_like_no_device_is_answered_with_those_of_the_machine() -> None:
    everything = MachineFacts(build="cuda", cuda=(H200, H200), mps=True, xpu=(ARC,))
    for facts, here in ((everything, "cuda:0, cuda:1, mps, xpu:0, cpu"), (LAPTOP, "cpu")):
        with pytest.raises(ConfigError, match=f"got 'tpu'.\nThis machine has {here}. Use device='auto'."):
            resolve_device("tpu", facts)


def test_device_instance_is_accepted_and_checked() -> None:
    device = CUDADevice(1)
    choice = resolve_device(device, NVIDIA)
    assert choice.value is device
    assert (choice.asked, choice.chosen) == ("cuda:1", "cuda:1")
    with pytest.raises(DeviceUnavailableError, match="device='cuda:1' was requested"):
        resolve_device(device, LAPTOP)


def apple(macos: tuple[int, int], version: str) -> MachineFacts:
    return MachineFacts(build="mps", mps=True, macos=macos, torch_version=version)


@pytest.mark.parametrize(
    ("device", "facts", "precision", "reason"),
    [
        ("cuda:0", NVIDIA, "bf16", "cuda:0 (NVIDIA H200, compute capability 9.0) computes bfloat16"),
        (
            "cuda:0",
            MachineFacts(build="cuda", cuda=(T4,)),
            "fp16",
            "cuda:0 (Tesla T4, compute capability 7.5) only emulates bfloat16, "
            "and cuda:0 (Tesla T4, compute capability 7.5) computes float16",
        ),
        ("cuda:0", AMD, "bf16", "computes bfloat16"),
        ("cuda:0", MachineFacts(build="rocm", cuda=(RADEON_VII,)), "fp16", "only emulates bfloat16"),
        ("xpu:0", INTEL, "bf16", "computes bfloat16"),
        (
            "xpu:0",
            MachineFacts(build="xpu", xpu=(GPU(name="Old", has_fp64=False, bf16=False),)),
            "no",
            "has no float64",
        ),
        ("mps", apple((15, 1), "2.7.1"), "bf16", "mps computes bfloat16"),
        ("mps", apple((13, 6), "2.8.0"), "fp16", "macOS 13.6, and mps computes float16"),
        ("mps", apple((13, 6), "2.7.1"), "no", "mps trains in float16 from torch 2.8 on"),
        ("cpu", MachineFacts(cpu_bf16=True), "bf16", "cpu computes bfloat16"),
        (
            "cpu",
            MachineFacts(cpu_fp16=True),
            "no",
            "cpu only emulates bfloat16, and fp16 is for accelerators",
        ),
        ("cpu", LAPTOP, "no", "fp16 is for accelerators"),
    ],
)
def test_automatic_precision_is_the_best_native_one(
    device: str, facts: MachineFacts, precision: str, reason: str
) -> None:
    chosen, why = choose_precision(torch.device(device), facts)
    assert chosen == precision
    assert reason in why


# Precision ------------------------------------------------------------------------------------------------------

CPU = torch.device("cpu")


@pytest.mark.parametrize("request_", [None, False, *NO_PRECISION, "No", "OFF", " none "])
def test_every_way_to_say_no_is_full_precision(request_: Any) -> None:
    choice = resolve_precision(request_, CPU, LAPTOP)
    assert (choice.asked, choice.chosen, choice.reason) == ("no", "no", "")


@pytest.mark.parametrize(
    ("request_", "meant"),
    [
        ("half", "fp16"),
        ("float32", "no"),
        ("bfloat16", "bf16"),
        ("b16", "bf16"),
        (True, "auto"),
        (0, "auto"),
        (16, "fp16"),
        (32, "no"),
    ],
)
def test_word_that_is_no_precision_is_an_error_with_the_nearest_one(request_: Any, meant: str) -> None:
    with pytest.raises(ConfigError, match=rf"precision must be no, bf16, .*\nUse precision='{meant}'\."):
        resolve_precision(request_, CPU, LAPTOP)


@pytest.mark.parametrize(("word", "name"), [("bf16-mixed", "bf16"), ("16-mixed", "fp16"), ("32-true", "no")])
def test_lightnings_word_for_a_precision_is_taken_and_said(word: str, name: str) -> None:
    choice = resolve_precision(word, torch.device("cuda:0"), NVIDIA)
    assert (choice.asked, choice.chosen, choice.reason) == (word, name, f"{word} is Lightning's word for it")


def test_precision_object_is_taken_as_it_is_and_says_so() -> None:
    given = BF16()
    choice = resolve_precision(given, CPU, LAPTOP)
    assert choice.value is given
    assert (choice.asked, choice.chosen, choice.reason) == ("bf16", "bf16", "an object was given")


@pytest.mark.parametrize("request_", ["fp16", FP16(), FP16(allow_cpu=True)])
def test_grad_scaler_goes_to_fp16_and_leaves_a_given_object_alone(request_: Any) -> None:
    settings = GradScalerConfig(init_scale=8.0)
    for given in (settings, {"init_scale": 8.0}):
        value: Any = resolve_precision(request_, torch.device("cuda:0"), NVIDIA, given).value
        assert value.settings == settings
        assert value.allow_cpu == getattr(request_, "allow_cpu", False)
    assert request_ == "fp16" or request_.settings == GradScalerConfig()


@pytest.mark.parametrize("request_", ["no", "bf16", BF16(), None])
def test_grad_scaler_without_a_loss_scale_is_refused(request_: Any) -> None:
    name = getattr(request_, "name", request_ or "no")
    with pytest.raises(ConfigError, match=f"precision='fp16', but precision is '{name}'\\.\nLeave grad_scaler out"):
        resolve_precision(request_, CPU, LAPTOP, {"init_scale": 8.0})


def test_grad_scaler_that_is_given_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"given twice, .*\nKeep the one in FP16"):
        resolve_precision(FP16({"init_scale": 4.0}), torch.device("cuda:0"), NVIDIA, {"init_scale": 8.0})


LAUNCHED: list[tuple[str, Any, bool]] = [
    ("no", "bf16", True),  # what a launcher sets when it was told nothing
    ("", "bf16", True),
    ("bf16", "bf16", True),
    ("bf16", BF16(), True),
    ("BF16", "bf16", True),
    ("fp16", "fp16", True),
    ("fp16", "auto", True),  # the run leaves it open, and the plan says what it chose
    ("fp16", "no", False),
    ("fp16", None, False),
    ("fp16", "bf16", False),
    ("bf16", "fp16", False),
    ("bf16", FP16(), False),
    ("fp8", "bf16", False),
]


@pytest.mark.parametrize(("launched", "request_", "agrees"), LAUNCHED)
def test_precision_of_a_launcher_must_be_that_of_the_run(launched: str, request_: Any, agrees: bool) -> None:
    environment = (("ACCELERATE_MIXED_PRECISION", launched),)
    facts = MachineFacts(build="cuda", cuda=(H200,), environment=environment)
    if agrees:
        resolve_precision(request_, torch.device("cuda:0"), facts)
    else:
        with pytest.raises(ConfigError, match=f"the launcher set ACCELERATE_MIXED_PRECISION={launched}.\nOnly the run"):
            resolve_precision(request_, torch.device("cuda:0"), facts)
