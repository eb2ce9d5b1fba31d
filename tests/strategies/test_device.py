"""Where devices are refused, how batches get to them, and what an error about them says."""

from __future__ import annotations

import re
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from policyfit.strategies.device import CPUDevice, CUDADevice, DeviceStrategy, MPSDevice, XPUDevice, automatic
from policyfit.strategies.errors import ConfigError, DeviceUnavailableError
from policyfit.strategies.facts import GPU, MachineFacts
from policyfit.strategies.mailbox import PinnedMailbox, SharedMailbox, WaitingMailbox

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
        MachineFacts(
            build="rocm", cuda=(MI300, MI300), environment=environment(WORLD_SIZE="4", LOCAL_RANK="3")
        ),
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


@pytest.mark.parametrize(
    ("device", "name", "backend", "pins"),
    [
        (CPUDevice(), "cpu", "gloo", False),
        (CUDADevice(2), "cuda:2", "nccl", True),
        (XPUDevice(1), "xpu:1", "xccl", True),
        (MPSDevice(), "mps", None, False),
    ],
)
def test_device_knows_its_name_backend_and_pinning(
    device: DeviceStrategy, name: str, backend: str | None, pins: bool
) -> None:
    assert (device.name, device.device) == (name, torch.device(name))
    assert (device.distributed_backend, device.pins_memory) == (backend, pins)


@pytest.mark.parametrize("index", [-1, 1.0, "0", True])
def test_index_must_be_a_whole_number(index: Any) -> None:
    with pytest.raises(ConfigError, match=r"CUDADevice\.index must be a whole number of at least 0"):
        CUDADevice(index)


class Step(NamedTuple):
    obs: Tensor
    task: str


class WithoutFloat64(CPUDevice):
    has_float64 = False


def test_move_keeps_the_shape_of_a_batch_and_what_is_no_tensor() -> None:
    counts: defaultdict[str, Tensor] = defaultdict(lambda: torch.zeros(1), {"a": torch.ones(1)})
    batch: dict[str, Any] = {
        "step": Step(torch.ones(2), "pick"),
        "list": [torch.zeros(1), None, 3, 1.5, "x"],
        "tuple": (torch.tensor(1), {"deep": torch.tensor(2)}),
        "ordered": OrderedDict(b=torch.ones(1), a=True),
        "default": counts,
        "array": np.zeros(2),
    }
    moved = CPUDevice().move(batch)
    assert moved is not batch
    assert isinstance(moved["step"], Step)
    assert moved["step"].task == "pick"
    assert moved["list"][1:] == [None, 3, 1.5, "x"]
    assert moved["tuple"][1]["deep"].item() == 2
    assert list(moved["ordered"]) == ["b", "a"]
    assert type(moved["default"]) is defaultdict
    assert moved["default"]["missing"].item() == 0
    assert moved["array"] is batch["array"]


def test_move_makes_float64_into_float32_with_one_warning_that_names_the_keys() -> None:
    device = WithoutFloat64()
    batch: dict[str, Any] = {
        "obs": {"state": torch.ones(2, dtype=torch.float64)},
        "n": [torch.ones(1, dtype=torch.int64)],
    }
    with pytest.warns(UserWarning, match=r"cpu has no float64.*float32: obs\.state\. ") as told:
        moved = device.move(batch)
    assert len(told) == 1
    assert moved["obs"]["state"].dtype == torch.float32
    assert moved["n"][0].dtype == torch.int64
    device.move(batch)  # warnings are errors here, so a second one would fail
    assert batch["obs"]["state"].dtype == torch.float64


def test_move_keeps_float64_where_the_device_has_it() -> None:
    assert CPUDevice().move(torch.ones(1, dtype=torch.float64)).dtype == torch.float64
    assert (MPSDevice().has_float64, XPUDevice().has_float64, CUDADevice().has_float64) == (
        False,
        False,
        True,
    )


@pytest.mark.parametrize(
    ("device", "pinned", "expected"),
    [
        (CUDADevice(), True, True),
        (CUDADevice(), False, False),
        (XPUDevice(), True, True),
        (MPSDevice(), True, False),
        (CPUDevice(), True, False),
    ],
)
def test_move_is_non_blocking_only_from_pinned_memory_and_never_to_mps(
    monkeypatch: pytest.MonkeyPatch, device: DeviceStrategy, pinned: bool, expected: bool
) -> None:
    calls: list[tuple[torch.device, bool]] = []

    def to(tensor: Tensor, target: torch.device, non_blocking: bool) -> Tensor:
        calls.append((target, non_blocking))
        return tensor

    monkeypatch.setattr(Tensor, "to", to)
    monkeypatch.setattr(Tensor, "is_pinned", lambda tensor: pinned)
    device.move({"obs": torch.ones(1)})
    assert calls == [(device.device, expected)]


def test_stream_on_the_cpu_gives_the_items_themselves() -> None:
    items = [{"obs": torch.ones(1)}, None]
    streamed = list(CPUDevice().stream(items))
    assert streamed[0] is items[0]
    assert streamed[1] is None


def test_stream_without_streams_moves_every_item_in_order() -> None:
    items = [torch.full((1,), float(i), dtype=torch.float64) for i in range(3)]
    device = MPSDevice()
    device.device = torch.device("cpu")
    with pytest.warns(UserWarning, match="the batch itself"):
        moved = list(device.stream(items))
    assert [(t.item(), t.dtype) for t in moved] == [(float(i), torch.float32) for i in range(3)]


class Rehearsal(CUDADevice):
    """A CUDADevice whose copies stay on the cpu and whose streams write down what they are told."""

    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self.device = torch.device("cpu")
        self.log = log

        class Stream:
            def __init__(self, device: torch.device) -> None:
                log.append("side stream made")

        def on(stream: Stream) -> AbstractContextManager[None]:
            log.append("on side stream")
            return nullcontext()

        consumer = SimpleNamespace(wait_stream=lambda side: log.append("consumer waits"))
        names = {"Stream": Stream, "stream": on, "current_stream": lambda device: consumer}
        self._torch = SimpleNamespace(**names)  # type: ignore[misc]

    def move(self, tree: Any) -> Any:
        self.log.append(f"copy {tree['i']}")
        return super().move(tree)


def test_stream_copies_one_item_ahead_and_guards_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []

    def loader() -> Iterator[dict[str, Any]]:
        for i in range(3):
            log.append(f"load {i}")
            yield {"i": i, "obs": torch.full((1,), float(i))}

    def record_stream(tensor: Tensor, stream: Any) -> None:
        log.append(f"record {int(tensor)}")

    monkeypatch.setattr(Tensor, "record_stream", record_stream)
    for item in Rehearsal(log).stream(loader()):
        log.append(f"compute {item['i']}")
    copy = "load {0};on side stream;copy {0}"
    use = "consumer waits;record {0}"
    assert ";".join(log) == ";".join(
        [
            "side stream made",
            copy.format(0),
            use.format(0),
            copy.format(1),
            "compute 0",
            use.format(1),
            copy.format(2),
            "compute 1",
            use.format(2),
            "compute 2",
        ]
    )


def test_stream_of_nothing_is_empty() -> None:
    assert list(Rehearsal([]).stream([])) == []


def test_setup_makes_the_device_current_and_learns_of_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch.xpu, "set_device", chosen.append)
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda device: SimpleNamespace(has_fp64=True))
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    xpu = XPUDevice(1)
    xpu.setup()
    CUDADevice(2).setup()
    assert chosen == [1, 2]
    assert xpu.has_float64 is True


def test_gpu_reports_its_own_memory_and_random_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    states: dict[str, Tensor] = {"cuda:1": torch.tensor([7], dtype=torch.uint8)}
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 1 + device.index)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 10 + device.index)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=100 + device.index)
    )
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: states[str(device)])
    monkeypatch.setattr(
        torch.cuda, "set_rng_state", lambda state, device: states.update({str(device): state})
    )
    device = CUDADevice(1)
    assert device.memory() == {"allocated": 2, "peak": 11, "total": 101}
    kept = device.rng_state()
    assert kept is not None
    device.set_rng_state(kept + 1)
    assert states["cuda:1"].item() == 8


def test_cpu_has_no_random_stream_of_its_own_and_a_shared_mailbox() -> None:
    device = CPUDevice()
    device.setup()
    device.synchronize()
    assert device.rng_state() is None
    assert device.memory() == {}
    mailbox = device.mailbox(2)
    assert isinstance(mailbox, SharedMailbox)
    mailbox.slots[1].fill_(3.0)
    mailbox.send()
    assert mailbox.read().tolist() == [0.0, 3.0]


@pytest.mark.parametrize(
    ("device", "kind"),
    [(CUDADevice(), PinnedMailbox), (XPUDevice(), PinnedMailbox), (MPSDevice(), WaitingMailbox)],
)
def test_mailbox_fits_the_device(
    monkeypatch: pytest.MonkeyPatch, device: DeviceStrategy, kind: type[PinnedMailbox | WaitingMailbox]
) -> None:
    seen: list[tuple[int, torch.device]] = []
    monkeypatch.setattr(kind, "__init__", lambda self, size, device: seen.append((size, device)))
    assert isinstance(device.mailbox(4), kind)
    assert seen == [(4, device.device)]


@pytest.mark.accelerator
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs 1 CUDA device, found 0")
def test_stream_gives_what_was_loaded_on_a_real_gpu() -> None:
    device = CUDADevice()
    device.setup()
    items = [{"obs": torch.full((1 << 20,), float(i)).pin_memory()} for i in range(20)]
    sums = []
    for item in device.stream(items):
        assert item["obs"].device == device.device
        sums.append((item["obs"] @ item["obs"]).sqrt() / 1024)
        del item
    assert torch.stack(sums).tolist() == [float(i) for i in range(20)]
    assert device.memory()["allocated"] > 0
    state = device.rng_state()
    assert state is not None
    first = torch.rand(3, device=device.device)
    device.set_rng_state(state)
    assert torch.equal(torch.rand(3, device=device.device), first)
