"""A few float32 numbers that the device writes and the host reads later, without stopping the device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Mailbox(ABC):
    """``size`` float32 numbers: written on the device through ``slots``, read on the host with ``read()``.

    ``slots`` are 0-dimensional views of one device tensor. After the last of them is written, ``send()``
    starts the way to host memory; ``read()`` gives what was sent last.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.on_device = torch.zeros(size, dtype=torch.float32, device=device)
        self.slots: tuple[Tensor, ...] = self.on_device.unbind()

    @abstractmethod
    def send(self) -> None:
        """Start copying to host memory; does not wait."""

    @abstractmethod
    def read(self) -> NDArray[np.float32]:
        """What was sent last, shape (size,); waits for that copy only, never for work queued after it."""


class SharedMailbox(Mailbox):
    """The cpu: device memory is host memory, so there is nothing to send."""

    def __init__(self, size: int, device: torch.device) -> None:
        super().__init__(size, device)
        self._view: NDArray[np.float32] = self.on_device.numpy()

    def send(self) -> None:
        """Nothing to do: the host reads the very memory that was written."""

    def read(self) -> NDArray[np.float32]:
        """The numbers themselves, not a copy."""
        return self._view


class PinnedMailbox(Mailbox):
    """cuda, hip and xpu: copied on the side into pinned memory, with an event that says when it is there."""

    def __init__(self, size: int, device: torch.device) -> None:
        super().__init__(size, device)
        self._host = torch.zeros(size, dtype=torch.float32, pin_memory=True)
        self._view: NDArray[np.float32] = self._host.numpy()
        self._event: Any = torch.Event(device)  # mypy: torch.Event takes a device at run time

    def send(self) -> None:
        """Queue the copy behind the work that wrote the numbers, and an event behind the copy."""
        self._host.copy_(self.on_device, non_blocking=True)
        self._event.record()

    def read(self) -> NDArray[np.float32]:
        """Wait for the event alone: a forward and a backward queued after it are not waited for."""
        self._event.synchronize()
        return self._view


class WaitingMailbox(Mailbox):
    """mps: non-blocking copies can carry wrong values there, so the copy is made, and waited for, in ``read``.

    Source: pytorch/pytorch#139550.
    """

    def send(self) -> None:
        """Nothing to do before somebody reads."""

    def read(self) -> NDArray[np.float32]:
        """Copy and wait, which includes the work queued in the meantime."""
        return self.on_device.cpu().numpy()
