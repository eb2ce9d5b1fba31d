"""Forty machines as data: what each is asked, what it decides, and that every way out it names is one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from policyfit import BF16, FP16, BF16Support, DeviceUnavailableError, MachineFacts, PrecisionError
from policyfit.strategies import GPU
from policyfit.strategies.formats import tf32_support
from policyfit.trainer.resolve import Choice, resolve_device, resolve_precision


def nvidia(name: str, major: int, minor: int, *, count: int = 1, **facts: Any) -> MachineFacts:
    gpus = (GPU(name=name, capability=(major, minor)),) * count
    return MachineFacts(build="cuda", torch_version="2.13.0+cu130", cuda=gpus, nvidia_gpu_present=True, **facts)


def amd(name: str, arch: str, **variables: str) -> MachineFacts:
    return MachineFacts(
        build="rocm", torch_version="2.13.0+rocm7.1", cuda=(GPU(name=name, arch=arch),), amd_gpu_present=True,
        environment=tuple(variables.items()),
    )  # fmt: skip


def intel(name: str, *, fp64: bool, bf16: bool = True, tf32: bool = True, version: str = "2.13.0+xpu") -> MachineFacts:
    return MachineFacts(build="xpu", torch_version=version, xpu=(GPU(name=name, has_fp64=fp64, bf16=bf16, tf32=tf32),))


def apple(major: int, minor: int, version: str = "2.13.0", **facts: Any) -> MachineFacts:
    return MachineFacts(build="mps", torch_version=version, macos=(major, minor), **{"mps": True, **facts})


def cpu(*, bf16: bool = False, fp16: bool = False, **facts: Any) -> MachineFacts:
    return MachineFacts(torch_version="2.13.0+cpu", cpu_bf16=bf16, cpu_fp16=fp16, **facts)


class Machine(NamedTuple):
    """What a machine decides. A precision that it refuses is the fragment of the refusal that says why."""

    facts: MachineFacts
    device: str
    auto: str
    why: str
    tf32: str
    bf16: str | None = None
    fp16: str | None = None


NATIVE, EMULATES = "computes bfloat16", "only emulates bfloat16"
CUDA_FIRST = "cuda:0", "bf16", NATIVE
NO_CPU = "requested on the cpu, which has no use for it"
ON, NONE, IDLE = "on", "none", "not effective"

MACHINES: dict[str, Machine] = {
    # NVIDIA
    "GTX 1080 Ti": Machine(nvidia("GTX 1080 Ti", 6, 1), "cuda:0", "fp16", "capability 6.1", NONE, bf16=EMULATES),
    "P100": Machine(nvidia("Tesla P100", 6, 0), "cuda:0", "fp16", "capability 6.0", NONE, bf16=EMULATES),
    "V100": Machine(nvidia("Tesla V100", 7, 0), "cuda:0", "fp16", "capability 7.0", NONE, bf16=EMULATES),
    "Jetson Xavier": Machine(nvidia("Xavier", 7, 2), "cuda:0", "fp16", "capability 7.2", NONE, bf16=EMULATES),
    "T4": Machine(nvidia("Tesla T4", 7, 5), "cuda:0", "fp16", "Tesla T4", NONE, bf16="Tesla T4"),
    "RTX 2080 Ti": Machine(nvidia("RTX 2080 Ti", 7, 5), "cuda:0", "fp16", EMULATES, NONE, bf16=EMULATES),
    "A100": Machine(nvidia("A100", 8, 0), *CUDA_FIRST, ON),
    "RTX 3090": Machine(nvidia("RTX 3090", 8, 6), *CUDA_FIRST, ON),
    "Jetson Orin": Machine(nvidia("Orin", 8, 7), *CUDA_FIRST, ON),
    "RTX 4090": Machine(nvidia("RTX 4090", 8, 9), *CUDA_FIRST, ON),
    "H100": Machine(nvidia("H100", 9, 0), *CUDA_FIRST, ON),
    "H200": Machine(nvidia("H200", 9, 0, count=8), *CUDA_FIRST, ON),
    "B200": Machine(nvidia("B200", 10, 0), *CUDA_FIRST, ON),
    "RTX 5090": Machine(nvidia("RTX 5090", 12, 0), *CUDA_FIRST, ON),
    # AMD
    "Radeon VII": Machine(amd("Radeon VII", "gfx906"), "cuda:0", "fp16", "gfx906", NONE, bf16="gfx906"),
    "Vega 64": Machine(amd("RX Vega 64", "gfx900"), "cuda:0", "fp16", "gfx900", NONE, bf16=EMULATES),
    "RX 6800": Machine(amd("RX 6800", "gfx1030"), "cuda:0", "fp16", "gfx1030", NONE, bf16="gfx1030"),
    "MI100": Machine(amd("MI100", "gfx908"), *CUDA_FIRST, NONE),
    "MI210": Machine(amd("MI210", "gfx90a"), *CUDA_FIRST, NONE),
    "MI300X": Machine(amd("MI300X", "gfx942"), *CUDA_FIRST, IDLE),
    "MI300X with its variable": Machine(amd("MI300X", "gfx942", HIPBLASLT_ALLOW_TF32="1"), *CUDA_FIRST, ON),
    "MI355X": Machine(amd("MI355X", "gfx950"), *CUDA_FIRST, IDLE),
    "RX 7900": Machine(amd("RX 7900 XTX", "gfx1100"), *CUDA_FIRST, NONE),
    "RX 9070": Machine(amd("RX 9070", "gfx1201"), *CUDA_FIRST, NONE),
    "Radeon 890M iGPU": Machine(amd("Radeon 890M", "gfx1150"), *CUDA_FIRST, NONE),
    # Intel
    "Arc A770": Machine(intel("Arc A770", fp64=False), "xpu:0", "bf16", NATIVE, ON, fp16="no float64"),
    "Arc B580": Machine(intel("Arc B580", fp64=True), "xpu:0", "bf16", NATIVE, ON),
    "PVC": Machine(intel("Max 1550", fp64=True), "xpu:0", "bf16", NATIVE, ON),
    "PVC with torch 2.9": Machine(
        intel("Max 1550", fp64=True, version="2.9.1+xpu"), "xpu:0", "bf16", NATIVE, NONE
    ),
    "Iris Xe iGPU": Machine(
        intel("Iris Xe", fp64=False, bf16=False, tf32=False), "xpu:0", "no", "no float64", NONE,
        bf16=EMULATES, fp16="no float64",
    ),
    # Apple
    "M1 on macOS 13": Machine(apple(13, 6), "mps", "fp16", "from macOS 14 on and this is macOS 13", NONE, "macOS 13.6"),
    "M1 on macOS 13 with torch 2.7": Machine(
        apple(13, 6, "2.7.1"), "mps", "no", "torch 2.8 on", NONE, bf16="macOS 13.6", fp16="torch 2.8 on"
    ),
    "M1 on macOS 15": Machine(apple(15, 1), "mps", "bf16", "mps computes bfloat16", NONE),
    "M1 on macOS 15 with torch 2.7": Machine(apple(15, 1, "2.7.1"), "mps", "bf16", NATIVE, NONE, fp16="torch 2.8 on"),
    "M1 with a broken shader": Machine(
        apple(15, 1, mps=False, fault="placeholder shader failed"), "cpu", "no", "cpu only emulates", NONE, fp16=NO_CPU
    ),
    # No accelerator, or none that this torch can use
    "CPU with bf16 units": Machine(cpu(bf16=True), "cpu", "bf16", "cpu computes bfloat16", NONE, fp16=NO_CPU),
    "CPU with bf16 and fp16 units": Machine(cpu(bf16=True, fp16=True), "cpu", "bf16", NATIVE, NONE, fp16=NO_CPU),
    "CPU without bf16 units": Machine(cpu(), "cpu", "no", "fp16 is for accelerators", NONE, fp16=NO_CPU),
    "H100 with a CPU build": Machine(cpu(nvidia_gpu_present=True), "cpu", "no", EMULATES, NONE, fp16=NO_CPU),
    "H100 hidden by a mask": Machine(
        MachineFacts(build="cuda", nvidia_gpu_present=True, environment=(("CUDA_VISIBLE_DEVICES", ""),)),
        "cpu", "no", EMULATES, NONE, fp16=NO_CPU,
    ),
    "MI300X with a CUDA build": Machine(
        MachineFacts(build="cuda", amd_gpu_present=True, cpu_bf16=True), "cpu", "bf16", NATIVE, NONE, fp16=NO_CPU
    ),
    "H200 with a ROCm build": Machine(
        MachineFacts(build="rocm", nvidia_gpu_present=True), "cpu", "no", EMULATES, NONE, fp16=NO_CPU
    ),
    "PVC with a CUDA build": Machine(MachineFacts(build="cuda"), "cpu", "no", EMULATES, NONE, fp16=NO_CPU),
}  # fmt: skip

each_machine = pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
POLICY = nn.Linear(1, 1)


def decide(request: Any, facts: MachineFacts, device: torch.device | None = None) -> Choice[Any]:
    """The precision of a run, with BF16Support on as by default."""
    device = device or resolve_device("auto", facts).value.device
    choice = resolve_precision(request, device, facts)
    events: list[Any] = []
    trainer: Any = SimpleNamespace(
        device=SimpleNamespace(device=device),
        facts=facts,
        precision=choice.value,
        event=lambda *e, **f: events.append(f),
    )
    BF16Support().setup(trainer, POLICY, "fit")
    return Choice(value=events, asked=choice.asked, chosen=choice.chosen, reason=choice.reason)


def test_table_has_the_forty_machines() -> None:
    assert len(MACHINES) >= 40


@each_machine
def test_device_auto_takes_the_accelerator_that_torch_can_use(machine: Machine) -> None:
    assert resolve_device("auto", machine.facts).chosen == machine.device


@each_machine
def test_precision_auto_takes_the_best_that_is_native_and_runs_without_a_warning(machine: Machine) -> None:
    choice = decide("auto", machine.facts)
    assert (choice.chosen, choice.value) == (machine.auto, [])
    assert machine.why in choice.reason
    assert decide(machine.auto, machine.facts).chosen == machine.auto


@each_machine
@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_named_precision_runs_or_is_refused_with_the_reason(machine: Machine, name: str) -> None:
    refusal: str | None = getattr(machine, name)
    if refusal is None:
        assert decide(name, machine.facts).chosen == name
        return
    with pytest.raises(PrecisionError) as refused:
        decide(name, machine.facts)
    first, _, remedy = str(refused.value).partition("\n")
    assert first.startswith(f"precision='{name}' ")
    assert refusal in first
    assert list(precisions_in(remedy))


@each_machine
def test_full_precision_runs_everywhere(machine: Machine) -> None:
    assert decide("no", machine.facts).chosen == "no"


@each_machine
def test_tf32_is_judged_by_the_device(machine: Machine) -> None:
    support = tf32_support(resolve_device("auto", machine.facts).value.device, machine.facts)
    assert {(True, True): ON, (True, False): IDLE, (False, False): NONE}[support.native, support.usable] == machine.tf32
    if machine.tf32 == IDLE:
        assert "HIPBLASLT_ALLOW_TF32=1" in support.reason


@each_machine
def test_emulated_bfloat16_runs_with_one_warning_where_it_is_allowed(machine: Machine) -> None:
    emulates = machine.device != "cpu" and machine.bf16 is not None and machine.device != "mps"
    if machine.device == "mps" and machine.bf16:  # mps has none at all, which nothing can allow
        with pytest.raises(PrecisionError, match="macOS"):
            decide(BF16(allow_emulated=True), machine.facts)
        return
    warnings = decide(BF16(allow_emulated=True), machine.facts).value
    assert ["only emulates bfloat16" in w["message"] for w in warnings] == [True] * emulates


# Every way out is one -------------------------------------------------------------------------------------------

_WAYS: tuple[tuple[str, Callable[[str], Any]], ...] = (
    (r"precision='([a-z0-9-]+)'", str),
    (r"(BF16\(allow_emulated=True\))", lambda _: BF16(allow_emulated=True)),
    (r"(FP16\(allow_cpu=True\))", lambda _: FP16(allow_cpu=True)),
)


def precisions_in(remedy: str) -> Iterator[Any]:
    """The precisions that a message names as a way out."""
    for pattern, make in _WAYS:
        for found in re.findall(pattern, remedy):
            yield make(found)


@each_machine
@pytest.mark.parametrize("on", ["auto", "cpu"])
@pytest.mark.parametrize(
    "request_",
    ["bf16", "fp16", BF16(allow_emulated=True), FP16(allow_cpu=True)],
    ids=["bf16", "fp16", "emulated", "on cpu"],
)
def test_precision_that_a_refusal_offers_is_accepted_on_that_machine(machine: Machine, on: str, request_: Any) -> None:
    device = resolve_device(on, machine.facts).value.device
    try:
        decide(request_, machine.facts, device)
    except PrecisionError as error:
        offered = list(precisions_in(str(error).partition("\n")[2]))
        assert offered
        for precision in offered:
            decide(precision, machine.facts, device)
        # "which chooses fp16 here"
        for promised in re.findall(r"precision='auto', which chooses (\w+) here", str(error)):
            assert decide("auto", machine.facts, device).chosen == promised


@each_machine
@pytest.mark.parametrize("request_", ["cuda", "cuda:1", "rocm", "hip", "mps", "xpu", "xpu:1"])
def test_device_that_a_refusal_offers_is_accepted_on_that_machine(machine: Machine, request_: str) -> None:
    try:
        resolve_device(request_, machine.facts)
    except DeviceUnavailableError as error:
        first, _, remedy = str(error).partition("\n")
        assert first.startswith(f"device='{request_}' was requested, but ")
        offered = re.findall(r"device='([a-z0-9:]+)'", remedy)
        assert "auto" in offered
        for device in offered:
            resolve_device(device, machine.facts)
        assert re.findall(r"device='auto', which takes '([a-z0-9:]+)' here", remedy) == [machine.device]


def test_only_what_the_build_can_drive_is_accepted() -> None:
    accepted = {
        name: [d for d in ("cuda", "rocm", "mps", "xpu") if is_accepted(d, machine.facts)]
        for name, machine in MACHINES.items()
    }
    assert accepted["H100"] == ["cuda"]
    assert accepted["MI300X"] == ["cuda", "rocm"]
    assert accepted["Arc A770"] == ["xpu"]
    assert accepted["M1 on macOS 15"] == ["mps"]
    assert not any(accepted[name] for name, machine in MACHINES.items() if machine.device == "cpu")


def is_accepted(device: str, facts: MachineFacts) -> bool:
    try:
        resolve_device(device, facts)
    except DeviceUnavailableError:
        return False
    return True


@pytest.mark.parametrize(
    ("name", "fragments"),
    [
        ("H100 with a CPU build", ("built without CUDA and ROCm, although an NVIDIA GPU is present", "CUDA (NVIDIA)")),
        ("H100 hidden by a mask", ("CUDA_VISIBLE_DEVICES='' (empty)", "Unset CUDA_VISIBLE_DEVICES")),
        ("MI300X with a CUDA build", ("an AMD one", "is a CUDA build", "Install a ROCm build")),
        ("H200 with a ROCm build", ("an NVIDIA one", "is a ROCm build", "Install a CUDA build")),
        ("CPU without bf16 units", ("built without CUDA and ROCm", "CUDA (NVIDIA) or ROCm (AMD)")),
        ("PVC with a CUDA build", ("no NVIDIA GPU was found", "Install an NVIDIA driver")),
        ("Arc A770", ("built without CUDA and ROCm", "device='auto', which takes 'xpu:0' here")),
        ("M1 with a broken shader", ("built without CUDA and ROCm", "device='auto', which takes 'cpu' here")),
    ],
)
def test_missing_cuda_is_told_by_its_own_cause_and_remedy(name: str, fragments: tuple[str, ...]) -> None:
    with pytest.raises(DeviceUnavailableError) as refused:
        resolve_device("cuda", MACHINES[name].facts)
    for fragment in fragments:
        assert fragment in str(refused.value)


def test_second_gpu_of_another_kind_is_judged_by_itself() -> None:
    t4, a100 = GPU(name="Tesla T4", capability=(7, 5)), GPU(name="A100", capability=(8, 0))
    facts = MachineFacts(build="cuda", cuda=(t4, a100))
    assert decide("auto", facts, torch.device("cuda:1")).chosen == "bf16"
    assert decide("auto", facts, torch.device("cuda:0")).chosen == "fp16"
    with pytest.raises(PrecisionError, match=r"cuda:0 \(Tesla T4"):
        decide("bf16", facts, torch.device("cuda:0"))
