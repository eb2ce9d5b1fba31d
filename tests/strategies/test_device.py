"""How batches get to a device, and what is particular about each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from policyfit.strategies.device import CPUDevice, CUDADevice, DeviceStrategy, MPSDevice, XPUDevice
from policyfit.strategies.errors import ConfigError
from policyfit.strategies.facts import GPU, MachineFacts
from policyfit.strategies.mailbox import PinnedMailbox, SharedMailbox, WaitingMailbox


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


class WithoutFloat64(CPUDevice):
    has_float64 = False


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


def test_check_learns_of_float64() -> None:
    facts = MachineFacts(build="xpu", xpu=(GPU(name="Arc A770", has_fp64=False), GPU(name="Max 1550")))
    arc, big = XPUDevice(0), XPUDevice(1)
    for device in (arc, big):
        device.check(facts)
    assert (arc.has_float64, big.has_float64) == (False, True)


def test_setup_makes_the_device_current(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch.xpu, "set_device", chosen.append)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    XPUDevice(1).setup()
    CUDADevice(2).setup()
    assert chosen == [1, 2]


def test_gpu_reports_its_own_memory_and_random_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    states: dict[str, Tensor] = {"cuda:1": torch.tensor([7], dtype=torch.uint8)}
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 1 + device.index)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 10 + device.index)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=100 + device.index)
    )
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: states[str(device)])
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: states.update({str(device): state}))
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
