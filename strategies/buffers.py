"""The buffers of a policy on several ranks, of which rank 0 gives its own to all."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, distributed, nn

from .errors import DistributedError


class _Form(NamedTuple):
    dtype: torch.dtype
    shape: torch.Size
    device: torch.device

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} of shape {(*self.shape,)} on {self.device}"


class Buffers:
    """Those that are saved with a policy; others (``persistent=False``) are derived, and may change their form.

    Args:
        device: That of the run.
    """

    def __init__(self, policy: nn.Module, device: torch.device) -> None:
        self._modules = [(f"{name}.".lstrip("."), m) for name, m in policy.named_modules()]
        self._known = self._found()
        self._forms = {name: _Form(buffer.dtype, buffer.shape, device) for name, buffer in self._known.items()}

    def look(self) -> None:
        """Take the buffers as they are now.

        Raises:
            DistributedError: One has left the device, or has another form than before, on this rank at least.
        """
        found = self._found()
        forms = {name: _Form(buffer.dtype, buffer.shape, buffer.device) for name, buffer in found.items()}
        if forms != self._forms:
            names = [*self._forms, *forms]
            name = next(name for name in names if forms.get(name) != self._forms.get(name))
            if name not in forms or name not in self._forms:
                came = "is gone since" if name in self._forms else "came after"
                raise DistributedError(
                    f"The buffer {name} {came} the run began.\n"
                    "Register it in __init__ in its shape, or with persistent=False, and fill it in place."
                )
            raise DistributedError(
                f"The buffer {name} was {self._forms[name]}, but is {forms[name]}.\n"
                "Fill it in place (buffer.copy_(new)) instead of replacing it; if it is derived from others, register "
                "it with persistent=False."
            )
        self._known = {name: found[name] for name in self._forms}  # in the same order on all ranks

    @torch.no_grad()
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
            prefix + name: buffer
            for prefix, module in self._modules
            for name, buffer in module._buffers.items()
            if buffer is not None and name not in module._non_persistent_buffers_set
        }
