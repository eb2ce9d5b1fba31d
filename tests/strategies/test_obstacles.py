"""Why a device is refused, on machines given as data, and that every remedy named works there."""

from __future__ import annotations

import re

import pytest

from policyfit.strategies.device import CPUDevice, CUDADevice, DeviceStrategy, MPSDevice, XPUDevice, automatic
from policyfit.strategies.errors import DeviceUnavailableError
from policyfit.strategies.facts import GPU, MachineFacts

A100 = GPU(name="A100", capability=(8, 0))
MI300 = GPU(name="MI300X", arch="gfx942")
ARC = GPU(name="Arc A770", has_fp64=False, bf16=True)


def environment(**variables: str) -> tuple[tuple[str, str], ...]:
    return tuple(variables.items())


REFUSALS: dict[str, tuple[DeviceStrategy, MachineFacts, list[str]]] = {
    "no build at all": (
        CUDADevice(),
        MachineFacts(torch_version="2.13.0+cpu"),
        ["built without CUDA and ROCm", "CUDA (NVIDIA) or ROCm (AMD)"],
    ),
    "cpu build beside an AMD GPU": (
        CUDADevice(),
        MachineFacts(amd_gpu_present=True),
        ["although an AMD GPU is present", "Install a build of PyTorch for ROCm (AMD)."],
    ),
    "CUDA build beside an AMD GPU": (
        CUDADevice(),
        MachineFacts(build="cuda", torch_version="2.9.0+cu128", amd_gpu_present=True),
        ["the GPU here is an AMD one", "2.9.0+cu128", "CUDA build", "Install a ROCm build"],
    ),
    "ROCm build beside an NVIDIA GPU": (
        CUDADevice(),
        MachineFacts(build="rocm", nvidia_gpu_present=True),
        ["the GPU here is an NVIDIA one", "ROCm build", "Install a CUDA build"],
    ),
    "no NVIDIA driver": (CUDADevice(), MachineFacts(build="cuda"), ["no NVIDIA GPU was found", "driver"]),
    "old NVIDIA driver": (
        CUDADevice(),
        MachineFacts(build="cuda", nvidia_gpu_present=True, fault="The driver is too old."),
        ["torch cannot use it (torch says: The driver is too old)", "new enough"],
    ),
    "empty CUDA mask": (
        CUDADevice(),
        MachineFacts(build="cuda", nvidia_gpu_present=True, environment=environment(CUDA_VISIBLE_DEVICES="")),
        ["CUDA_VISIBLE_DEVICES='' (empty)", "Unset CUDA_VISIBLE_DEVICES"],
    ),
    "empty HIP mask": (
        CUDADevice(),
        MachineFacts(build="rocm", amd_gpu_present=True, environment=environment(HIP_VISIBLE_DEVICES="")),
        ["HIP_VISIBLE_DEVICES='' (empty)", "empty or -1"],
    ),
    "CUDA mask on ROCm": (
        CUDADevice(),
        MachineFacts(build="rocm", amd_gpu_present=True, environment=environment(CUDA_VISIBLE_DEVICES="-1")),
        ["with CUDA_VISIBLE_DEVICES='-1'", "Set HIP_VISIBLE_DEVICES alone"],
    ),
    "conflicting ROCm masks": (
        CUDADevice(),
        MachineFacts(
            build="rocm",
            amd_gpu_present=True,
            environment=environment(HIP_VISIBLE_DEVICES="1", ROCR_VISIBLE_DEVICES="1"),
        ),
        ["ROCR_VISIBLE_DEVICES='1' and HIP_VISIBLE_DEVICES='1'", "acts first and renumbers"],
    ),
    "AMD device without permission": (
        CUDADevice(),
        MachineFacts(build="rocm", amd_gpu_present=True),
        ["an AMD GPU is present but torch cannot use it", "groups video and render", "/dev/kfd"],
    ),
    "index out of range": (
        CUDADevice(3),
        MachineFacts(build="cuda", cuda=(A100, A100)),
        ["its index is 3 and torch sees 2 devices (cuda:0, cuda:1)", "device='cuda:1'"],
    ),
    "index out of a mask": (
        CUDADevice(1),
        MachineFacts(build="rocm", cuda=(MI300,), environment=environment(HIP_VISIBLE_DEVICES="2")),
        ["torch sees 1 device (cuda:0), with HIP_VISIBLE_DEVICES='2'", "device='cuda:0'"],
    ),
    "local rank out of range": (
        CUDADevice(3),
        MachineFacts(build="rocm", cuda=(MI300, MI300), environment=environment(WORLD_SIZE="4", LOCAL_RANK="3")),
        ["LOCAL_RANK is 3 and torch sees 2 devices", "--nproc-per-node=2", "device='cuda:0'"],
    ),
    "no XPU build": (XPUDevice(), MachineFacts(), ["built without XPU", "install an XPU build"]),
    "XPU mask": (
        XPUDevice(),
        MachineFacts(build="xpu", environment=environment(ZE_AFFINITY_MASK="0.0")),
        ["ZE_AFFINITY_MASK='0.0'", "not 0.0"],
    ),
    "no Intel driver": (XPUDevice(), MachineFacts(build="xpu"), ["no Intel GPU was found", "Level Zero"]),
    "XPU index": (
        XPUDevice(2),
        MachineFacts(build="xpu", xpu=(ARC,)),
        ["index is 2 and torch sees 1 device"],
    ),
    "no MPS build": (MPSDevice(), MachineFacts(build="cuda", cuda=(A100,)), ["built without MPS"]),
    "failing MPS": (
        MPSDevice(),
        MachineFacts(build="mps", macos=(12, 7), fault="no Metal device"),
        ["torch cannot use the GPU on macOS 12.7 (torch says: no Metal device)"],
    ),
}


@pytest.mark.parametrize(("device", "facts", "parts"), REFUSALS.values(), ids=REFUSALS)
def test_refusal_names_what_was_asked_why_not_and_the_fix(
    device: DeviceStrategy, facts: MachineFacts, parts: list[str]
) -> None:
    with pytest.raises(DeviceUnavailableError) as refused:
        device.check(facts)
    message = str(refused.value)
    assert message.startswith(f"device='{device.name}' was requested, but ")
    for part in parts:
        assert part in message


@pytest.mark.parametrize(("device", "facts", "parts"), REFUSALS.values(), ids=REFUSALS)
def test_refusal_names_only_devices_that_pass_the_check(
    device: DeviceStrategy, facts: MachineFacts, parts: list[str]
) -> None:
    with pytest.raises(DeviceUnavailableError) as refused:
        device.check(facts)
    remedies = re.findall(r"device='([a-z]+)(?::(\d+))?'", str(refused.value).split("\n", 1)[1])
    kinds = {"cpu": CPUDevice, "mps": MPSDevice}
    for kind, index in remedies:
        if kind == "auto":
            automatic(facts).check(facts)
        elif kind in kinds:
            kinds[kind]().check(facts)
        else:
            {"cuda": CUDADevice, "xpu": XPUDevice}[kind](int(index)).check(facts)
    assert remedies


def test_refusal_does_not_offer_auto_when_auto_would_be_refused_too() -> None:
    facts = MachineFacts(build="cuda", cuda=(A100,), environment=environment(WORLD_SIZE="2", LOCAL_RANK="1"))
    with pytest.raises(DeviceUnavailableError, match="LOCAL_RANK is 1") as refused:
        CUDADevice(1).check(facts)
    assert "auto" not in str(refused.value)


@pytest.mark.parametrize(
    ("device", "facts"),
    [
        (CPUDevice(), MachineFacts(build="cuda", amd_gpu_present=True)),
        (CUDADevice(1), MachineFacts(build="cuda", cuda=(A100, A100))),
        (CUDADevice(), MachineFacts(build="rocm", cuda=(MI300,))),
        (MPSDevice(), MachineFacts(build="mps", mps=True)),
        (XPUDevice(), MachineFacts(build="xpu", xpu=(ARC,))),
    ],
)
def test_device_that_is_here_passes_the_check(device: DeviceStrategy, facts: MachineFacts) -> None:
    assert device.obstacle(facts) is None
    device.check(facts)
