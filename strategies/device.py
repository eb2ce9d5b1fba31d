"""One object per device: whether it is here, how batches get there, and what is particular about it."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from .checks import whole
from .errors import DeviceUnavailableError
from .facts import MachineFacts, local_rank
from .formats import has_float64
from .mailbox import Mailbox, PinnedMailbox, SharedMailbox, WaitingMailbox
from .obstacles import Obstacle, cuda_obstacle, mps_obstacle, xpu_obstacle
from .tree import map_tensors

T = TypeVar("T")


class DeviceStrategy(ABC):
    """A device and everything that is particular about it.

    Attributes:
        pins_memory: Whether batches in page-locked host memory travel without being waited for.
        has_float64: Whether the device has float64; on xpu known after ``check``, False before.
        distributed_backend: The process group backend of its kind, ``None`` where there is none.
    """

    device: torch.device
    pins_memory: bool = False
    has_float64: bool = True
    distributed_backend: str | None = None
    _told_of_float64 = False

    @property
    def name(self) -> str:
        """As users write it: "cpu", "cuda:0", "mps", "xpu:1"."""
        return str(self.device)

    @abstractmethod
    def obstacle(self, facts: MachineFacts) -> Obstacle | None:
        """What keeps such a machine from having this device; a pure function."""

    def check(self, facts: MachineFacts, asked: str | None = None) -> None:
        """Refuse a machine without this device. ``asked`` is what the user wrote, when it is not ``name``.

        Raises:
            DeviceUnavailableError: With the cause and a remedy.
        """
        found = self.obstacle(facts)
        if found is not None:
            raise unavailable(asked or self.name, found, facts)

    @abstractmethod
    def setup(self) -> None:
        """Make this the current device of the process."""

    def move(self, tree: T) -> T:
        """The same tree of dicts, lists and tuples with every tensor on the device; the rest is left alone.

        Where the device has no float64, such tensors become float32, with one warning that names the keys.
        """
        narrowed: list[str] = []
        moved: T = map_tensors(tree, lambda tensor, key: self._place(tensor, key, narrowed))
        if narrowed and not self._told_of_float64:
            self._told_of_float64 = True
            warnings.warn(
                f"{self.name} has no float64, so float64 tensors of a batch become float32: "
                f"{', '.join(narrowed)}. Make them float32 in the dataset to be rid of this warning.",
                stacklevel=2,
            )
        return moved

    def stream(self, items: Iterable[T]) -> Iterator[T]:
        """``items``, moved to the device, in their order."""
        return (self.move(item) for item in items)

    @abstractmethod
    def mailbox(self, size: int) -> Mailbox:
        """``size`` float32 numbers on their way from the device to the host."""

    def memory(self) -> dict[str, int]:
        """Bytes of device memory: ``allocated``, ``peak`` and ``total``, as far as the device tells."""
        return {}

    @abstractmethod
    def rng_state(self) -> Tensor | None:
        """The state of the device's own random stream; ``None`` on the cpu, whose stream is torch's."""

    @abstractmethod
    def set_rng_state(self, state: Tensor) -> None:
        """Take back what ``rng_state`` gave."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the device has done all queued work."""

    def _place(self, tensor: Tensor, key: str, narrowed: list[str]) -> Tensor:
        if tensor.dtype == torch.float64 and not self.has_float64:
            narrowed.append(key or "the batch itself")
            tensor = tensor.float()
        return tensor.to(self.device, non_blocking=self.pins_memory and tensor.is_pinned())


class CPUDevice(DeviceStrategy):
    """The processor and its memory, always here."""

    distributed_backend = "gloo"

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def obstacle(self, facts: MachineFacts) -> Obstacle | None:
        """None, on any machine."""
        return None

    def setup(self) -> None:
        """Nothing to choose."""

    def stream(self, items: Iterable[T]) -> Iterator[T]:
        """The items themselves: batches are made where they are used."""
        return iter(items)

    def mailbox(self, size: int) -> Mailbox:
        """Memory that both sides share."""
        return SharedMailbox(size, self.device)

    def rng_state(self) -> Tensor | None:
        """None: the trainer keeps torch's own stream in any case."""
        return None

    def set_rng_state(self, state: Tensor) -> None:
        """Nothing to take back."""

    def synchronize(self) -> None:
        """Nothing is queued."""


class _StreamingDevice(DeviceStrategy):
    """What torch.cuda and torch.xpu share: several devices, streams, pinned memory."""

    pins_memory = True
    _torch: ClassVar[Any]  # torch.cuda or torch.xpu, whose functions have the same names

    def __init__(self, index: int = 0) -> None:
        whole(f"{type(self).__name__}.index", index, 0, "Use 0 for the first device.")
        self.index = index
        self.device = torch.device(self._torch.__name__.removeprefix("torch."), index)

    def setup(self) -> None:
        """Make this the current device, so that kernels, streams and events of this process belong to it."""
        self._torch.set_device(self.index)

    def stream(self, items: Iterable[T]) -> Iterator[T]:
        """``items`` on the device, each copied on a stream of its own while the one before is computed on.

        The memory of an item is marked as used by the consumer's stream, so that it is not handed to a later
        copy before the work on it is done.

        Source: PyTorch notes, "CUDA semantics", CUDA streams; the page of ``Tensor.record_stream``.
        """
        side = self._torch.Stream(self.device)
        copies = self._copies(items, side)
        ahead = list(islice(copies, 1))  # or nothing, at the end
        while ahead:
            consumer = self._torch.current_stream(self.device)
            consumer.wait_stream(side)
            ready: T = map_tensors(ahead.pop(), _marked_as_used_on(consumer))
            ahead = list(islice(copies, 1))
            yield ready

    def _copies(self, items: Iterable[T], side: Any) -> Iterator[T]:
        for item in items:
            with self._torch.stream(side):
                moved = self.move(item)
            yield moved

    def mailbox(self, size: int) -> Mailbox:
        """Pinned memory and an event."""
        return PinnedMailbox(size, self.device)

    def memory(self) -> dict[str, int]:
        """Bytes held by tensors now and at most, and the size of the device."""
        return {
            "allocated": self._torch.memory_allocated(self.device),
            "peak": self._torch.max_memory_allocated(self.device),
            "total": self._torch.get_device_properties(self.device).total_memory,
        }

    def rng_state(self) -> Tensor | None:
        """The random stream of this device alone."""
        state: Tensor = self._torch.get_rng_state(self.device)
        return state

    def set_rng_state(self, state: Tensor) -> None:
        """Take back what ``rng_state`` gave."""
        self._torch.set_rng_state(state, self.device)

    def synchronize(self) -> None:
        """Wait for all streams of this device."""
        self._torch.synchronize(self.device)


class CUDADevice(_StreamingDevice):
    """A GPU of NVIDIA, or of AMD through HIP: torch calls both cuda."""

    distributed_backend = "nccl"
    _torch: ClassVar[Any] = torch.cuda

    def obstacle(self, facts: MachineFacts) -> Obstacle | None:
        """The build, the vendor, the masks, the driver or the index."""
        return cuda_obstacle(self.index, facts)


class XPUDevice(_StreamingDevice):
    """A GPU of Intel."""

    has_float64 = False
    distributed_backend = "xccl"
    _torch: ClassVar[Any] = torch.xpu

    def obstacle(self, facts: MachineFacts) -> Obstacle | None:
        """The build, the masks, the driver or the index."""
        return xpu_obstacle(self.index, facts)

    def check(self, facts: MachineFacts, asked: str | None = None) -> None:
        """Refuse a machine without this device, and learn whether it has float64."""
        super().check(facts, asked)
        self.has_float64 = has_float64(self.device, facts)


class MPSDevice(DeviceStrategy):
    """The GPU of an Apple computer. Copies to it are waited for (Source: pytorch/pytorch#139550, #189690)."""

    has_float64 = False

    def __init__(self) -> None:
        self.device = torch.device("mps")

    def obstacle(self, facts: MachineFacts) -> Obstacle | None:
        """Another build, no Metal, or a first operation that failed."""
        return mps_obstacle(facts)

    def setup(self) -> None:
        """There is only one."""

    def mailbox(self, size: int) -> Mailbox:
        """A copy that is waited for."""
        return WaitingMailbox(size, self.device)

    def memory(self) -> dict[str, int]:
        """Bytes held by tensors now, and the working set that Metal recommends at most."""
        total = torch.mps.recommended_max_memory()
        return {"allocated": torch.mps.current_allocated_memory(), "total": total}

    def rng_state(self) -> Tensor | None:
        """The random stream of the GPU."""
        return torch.mps.get_rng_state()

    def set_rng_state(self, state: Tensor) -> None:
        """Take back what ``rng_state`` gave."""
        torch.mps.set_rng_state(state)

    def synchronize(self) -> None:
        """Wait for all queued work."""
        torch.mps.synchronize()


def automatic(facts: MachineFacts) -> DeviceStrategy:
    """The device that ``auto`` takes: cuda, then mps, xpu, cpu; of several, that of the local rank."""
    if facts.cuda:
        return CUDADevice(local_rank(facts))
    if facts.mps:
        return MPSDevice()
    return XPUDevice(local_rank(facts)) if facts.xpu else CPUDevice()


def unavailable(asked: str, obstacle: Obstacle, facts: MachineFacts) -> DeviceUnavailableError:
    """The error for a request this machine cannot honour, naming ``auto`` as a way out where that works."""
    chosen = automatic(facts)
    works = chosen.obstacle(facts) is None
    way_out = f" Or use device='auto', which takes {chosen.name!r} here." if works else ""
    return DeviceUnavailableError(f"device={asked!r} was requested, but {obstacle.cause}.\n{obstacle.remedy}{way_out}")


def _marked_as_used_on(stream: Any) -> Callable[[Tensor, str], Tensor]:
    def mark(tensor: Tensor, key: str) -> Tensor:
        tensor.record_stream(stream)
        return tensor

    return mark
