"""What a precision does, and full precision as the plain case of it.

Parameters, gradients and optimizer state are float32 in every precision; a precision decides in what the
forward computes and what happens to gradients between backward and the update. All walk one road:
``forward`` and ``backward``, ``unscale`` once a window, ``settle_scale`` once an update.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from .errors import ConfigError, PrecisionError, some
from .facts import MachineFacts
from .scaler import GradScalerConfig

T = TypeVar("T")


class PrecisionStrategy(ABC):
    """One way to compute; its name is what users write and what the plan and the checkpoint say.

    Attributes:
        masters: Whether trainable weights, gradients and optimizer state are float32.
        asked: The word that a user writes for it, where that is not its name.
        description: What it is, where its name does not say enough.
        note: What the plan has to say of it, for a choice that most runs would regret.
    """

    name: str
    asked: str = ""
    description: str = ""
    compute_dtype: torch.dtype = torch.float32
    masters: bool = True
    note: str = ""
    _remedy = "Call it outside of torch.autocast, which changes what everything inside it computes in."

    def check(self, device: torch.device, facts: MachineFacts) -> None:
        """Refuse a device on which this precision would not be what runs; a pure function of its arguments.

        Raises:
            PrecisionError: What runs would not be what was asked for; the message names a remedy that holds.
        """

    def check_native(self, device: torch.device, facts: MachineFacts) -> str | None:
        """Refuse hardware that only emulates this precision; a warning where the user allows that.

        Apart from ``check`` because people may leave it out: it is what the callback ``BF16Support`` asks.

        Raises:
            PrecisionError: The device emulates the precision, and that was not allowed.
        """
        return None

    def setup(self, device: torch.device) -> None:
        """Bind to a device and prove there that the precision is in effect.

        Raises:
            PrecisionError: A matmul under ``autocast`` does not compute in ``compute_dtype``, or a known
                gradient does not come back from scaling and unscaling.
        """
        self._one = torch.ones((), dtype=torch.float32, device=device)
        ones = torch.ones(8, 8, dtype=torch.float32, device=device)
        found = self._dtype_of_a_matmul(ones)
        if found != self.compute_dtype:
            raise PrecisionError(
                f"precision={self.name!r} was requested, but a matmul on {device} computes in {found}, "
                f"not in {self.compute_dtype}.\n{self._remedy}"
            )

    def _dtype_of_a_matmul(self, data: Tensor) -> torch.dtype:
        with self.autocast():
            return (data @ data).dtype

    def with_grad_scaler(self, settings: GradScalerConfig | Mapping[str, Any]) -> PrecisionStrategy:
        """The same precision with these settings of the loss scale.

        Raises:
            ConfigError: It has no loss scale, or was made with settings of its own.
        """
        found = self.description or repr(self.name)
        raise ConfigError(
            f"grad_scaler sets the loss scale of precision='fp16', but precision is {found}.\n"
            "Leave grad_scaler out, or use precision='fp16'."
        )

    @abstractmethod
    def autocast(self) -> AbstractContextManager[Any]:
        """The context of the forward and the loss; entered once a micro-batch, left before backward."""

    def forward(self, step: Callable[..., T], data: Any, *rest: Any) -> T:
        """``step(data, *rest)`` computed in this precision."""
        with self.autocast():
            return step(data, *rest)

    def convert_module(self, module: nn.Module) -> None:
        """Bring the weights to the type they are to have, in place, before an optimizer holds them."""

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of ``loss``, a scalar."""
        loss.backward()  # type: ignore[no-untyped-call]

    def unscale(self, gradients: Sequence[Tensor], non_finite: Tensor) -> None:
        """Bring the gradients to the units of the loss, once a window, before anything looks at them.

        ``non_finite``, a 0-dimensional float32 on the device, becomes 1.0 when any is inf or NaN, else 0.0.
        """
        non_finite.zero_()
        self.find_non_finite(gradients, non_finite)

    def find_non_finite(self, gradients: Sequence[Tensor], flag: Tensor) -> None:
        """Raise ``flag`` to exactly 1.0 when any value is inf or NaN; never lowers it, and does not wait."""
        # Source: GradScaler.unscale_, whose kernel this is: it checks while it multiplies, here by one.
        torch._amp_foreach_non_finite_check_and_unscale_(list(gradients), flag, self._one)

    def norms(self, gradients: Sequence[Tensor]) -> Tensor:
        """The L2 norm of each gradient, shape (gradients,), float32 on the device."""
        return torch.stack(torch._foreach_norm(gradients))  # type: ignore[arg-type]

    @property
    def scale(self) -> Tensor | None:
        """The loss scale, a float32 scalar on the device that changes in place; ``None`` without one."""
        return None

    @property
    def first_scale(self) -> float | None:
        """The scale with which the run begins or goes on, known without asking the device; ``None`` without one."""
        return None

    @property
    def min_scale(self) -> float | None:
        """The scale at which a further overflow ends the run; ``None`` without a scale."""
        return None

    def settle_scale(self, non_finite: Tensor) -> None:
        """Move the loss scale by what ``unscale`` found on any rank; once an update, after the optimizers."""

    def take_back(self, updates: int, scale: float | None) -> None:
        """Let the last updates not have counted as clean for the loss scale, which was ``scale`` before them.

        Args:
            scale: ``None`` for the first.
        """

    def state_dict(self) -> dict[str, Any] | None:
        """The scaler's state in JSON values, or ``None`` without a scaler."""
        return None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back the scaler's state; after the optimizers' own."""


class FullPrecision(PrecisionStrategy):
    """``no``: float32 throughout."""

    name = "no"

    def autocast(self) -> AbstractContextManager[Any]:
        """Nothing to enter."""
        return _NOTHING


_NOTHING = nullcontext()


def check_parameters(parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Refuse trainable parameters that are not float32; frozen ones may be of any type.

    Raises:
        PrecisionError: With the names (the first five) and the way out.
    """
    wrong = [(name, p.dtype) for name, p in parameters if p.requires_grad and p.dtype != torch.float32]
    if wrong:
        shown = some([f"{name} ({str(dtype).removeprefix('torch.')})" for name, dtype in wrong])
        raise PrecisionError(
            f"Trainable parameters stay float32 in every precision, but {len(wrong)} are not: {shown}.\n"
            "Call policy.float() before fit, or freeze them with requires_grad_(False)."
        )
