"""The buffers of a policy on several ranks, of which rank 0 gives its own to all."""

from __future__ import annotations

import torch
from torch import Tensor, distributed, nn

from .errors import DistributedError


class Buffers:
    """Those that are saved with a policy; others (``persistent=False``) are derived, and may change their form.

    Args:
        device: That of the run.
    """

    def __init__(self, policy: nn.Module, device: torch.device) -> None:
        self.policy, self._device = policy, device
        self._modules = [(f"{name}.".lstrip("."), m) for name, m in policy.named_modules() if m._buffers]
        self._known = self._found()

    def look(self) -> None:
        """Take the buffers as they are now.

        Raises:
            DistributedError: One has left the device, or has another form than before, on this rank at least.
        """
        found = self._found()
        for name in self._known.keys() | found.keys():
            before, now = self._known.get(name), found.get(name)
            if now is not None and now.device != self._device:
                what = f"is on {now.device}, but the run is on {self._device}"
            elif before is None or now is None or (before.dtype, before.shape) != (now.dtype, now.shape):
                what = f"was {_form(before)}, and is now {_form(now)}"
            else:
                continue
            raise DistributedError(
                f"The buffer {name} {what}.\nFill it in place (buffer.copy_(new)) instead of replacing it; if it is "
                "derived from others, register it with persistent=False."
            )
        self._known = found

    def send(self, rank: int) -> None:
        """Those of the last look: one broadcast for each type, of its bytes."""
        by_type: dict[torch.dtype, list[Tensor]] = {}
        for buffer in self._known.values():
            by_type.setdefault(buffer.dtype, []).append(buffer)
        for buffers in by_type.values():
            flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
            distributed.broadcast(flat.view(torch.uint8), src=0)
            if rank != 0:
                pieces = torch.split(flat, [buffer.numel() for buffer in buffers])
                for buffer, piece in zip(buffers, pieces, strict=True):
                    buffer.copy_(piece.view(buffer.shape))

    def _found(self) -> dict[str, Tensor]:
        return {
            prefix + name: buffer.detach()
            for prefix, module in self._modules
            for name, buffer in module._buffers.items()
            if buffer is not None and name not in module._non_persistent_buffers_set
        }


def _form(buffer: Tensor | None) -> str:
    return "not there" if buffer is None else f"{str(buffer.dtype).removeprefix('torch.')} of shape {(*buffer.shape,)}"
