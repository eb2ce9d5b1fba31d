"""Saving in the background: a snapshot into memory that is used again, written by a thread while training goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from .checkpoint import CheckpointState


class Snapshots:
    """Copies of states on the cpu, in buffers that are reused: new memory would cost five times as much.

    Args:
        pinned: Copy into page-locked memory, where the device copies without being waited for one by one.
    """

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._buffers: dict[str, Tensor] = {}

    def take(self, state: CheckpointState) -> CheckpointState:
        """``state`` with every tensor and container copied; it overwrites what the snapshot before gave."""
        copied: dict[tuple[Any, ...], Tensor] = {}
        return CheckpointState(**{f.name: self._copy(getattr(state, f.name), f.name, copied) for f in fields(state)})

    def _copy(self, value: Any, path: str, copied: dict[tuple[Any, ...], Tensor]) -> Any:
        if isinstance(value, Tensor):
            return self._copy_tensor(value.detach(), path, copied)
        if isinstance(value, list | tuple):
            return [self._copy(v, f"{path}/{i}", copied) for i, v in enumerate(value)]
        if isinstance(value, dict):
            # Filled in place: a subclass such as Counter keeps its meaning.
            twin = type(value)()
            for key, v in value.items():
                twin[key] = self._copy(v, f"{path}/{key}", copied)
            return twin
        return value

    def _copy_tensor(self, tensor: Tensor, path: str, copied: dict[tuple[Any, ...], Tensor]) -> Tensor:
        # Tied tensors stay tied, which is how a checkpoint knows to write them once.
        identity = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and identity in copied:
            return copied[identity]
        buffer = self._buffers.get(path)
        if buffer is None or (buffer.shape, buffer.dtype, buffer.stride()) != (
            tensor.shape,
            tensor.dtype,
            tensor.stride(),
        ):
            buffer = torch.empty_like(tensor, device="cpu", pin_memory=self._pinned and tensor.device.type != "cpu")
            self._buffers[path] = buffer
        buffer.copy_(tensor, non_blocking=self._pinned)
        copied[identity] = buffer
        return buffer


class Saver:
    """Has at most one save under way; an error of it comes out in ``check`` and ``wait``."""

    def __init__(self, *, pinned: bool, synchronize: Callable[[], None]) -> None:
        self._snapshots = Snapshots(pinned=pinned)
        self._synchronize = synchronize
        self._thread: Thread | None = None
        self.error: BaseException | None = None
        #: What went wrong without harm to the checkpoint; told at the next step.
        self.notices: list[str] = []

    def snapshot(self, state: CheckpointState) -> CheckpointState:
        """A copy of ``state``, in the memory of the one before, whose save must be over."""
        snapshot = self._snapshots.take(state)
        self._synchronize()  # copies into pinned memory are queued, not made
        return snapshot

    def start(self, snapshot: CheckpointState, write: Callable[[CheckpointState], None]) -> None:
        """``write`` it while training goes on."""
        self._thread = Thread(target=self._run, args=(write, snapshot), name="policyfit-checkpoint")
        self._thread.start()

    def _run(self, write: Callable[[CheckpointState], None], state: CheckpointState) -> None:
        try:
            write(state)
        except BaseException as error:  # raised where the run can end by it
            self.error = error

    def check(self) -> None:
        """Raise the error of a save that failed, once."""
        error, self.error = self.error, None
        if error is not None:
            raise error

    def wait(self) -> None:
        """Until the save under way is over; raises its error."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()
