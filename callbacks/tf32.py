"""TF32 for float32 matmuls and convolutions: switched for the time of a run, then put back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..strategies.errors import ConfigError
from ..strategies.formats import tf32_support
from .callback import Callback

if TYPE_CHECKING:
    from ..trainer.trainer import Trainer

_backends: Any = torch.backends  # its properties are written as fields, which its annotations do not say

# Torch keeps one state behind two interfaces. Old setters write both sides, new ones only their own, and an
# old getter raises RuntimeError while the sides differ. Hence the order in ``apply`` and ``restore``.
_OLD_GETTERS: dict[str, Callable[[], Any]] = {
    "torch.get_float32_matmul_precision()": torch.get_float32_matmul_precision,
    "torch.backends.cuda.matmul.allow_tf32": lambda: torch.backends.cuda.matmul.allow_tf32,
    "torch.backends.cudnn.allow_tf32": lambda: torch.backends.cudnn.allow_tf32,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TF32State:
    """Every switch that ``apply`` moves; ``None`` where torch has none, or where its getter raised.

    Args:
        word: ``torch.get_float32_matmul_precision()``.
        cudnn: ``torch.backends.cudnn.allow_tf32``.
        onednn: ``torch.backends.mkldnn.allow_tf32``, which only builds for Intel GPUs have.
        leaves: The new interface (torch 2.9 and later), by name.
        raised: The old getters that raised because the two interfaces disagreed.
    """

    word: str | None
    cudnn: bool | None
    onednn: bool | None
    leaves: dict[str, str]
    raised: tuple[str, ...]

    def disagreement(self) -> str:
        """What disagreed, by name; "" when nothing did."""
        if not self.raised:
            return ""
        leaves = ", ".join(f"{name}={value!r}" for name, value in self.leaves.items())
        return f"{' and '.join(self.raised)} cannot be read beside torch.backends {leaves}"


def save_state() -> TF32State:
    """Read every switch without changing any."""
    old: dict[str, Any] = {}
    raised = []
    for name, getter in _OLD_GETTERS.items():
        try:
            old[name] = getter()
        except RuntimeError:
            raised.append(name)
    return TF32State(
        word=old.get("torch.get_float32_matmul_precision()"),
        cudnn=old.get("torch.backends.cudnn.allow_tf32"),
        onednn=getattr(_backends.mkldnn, "allow_tf32", None),
        leaves={name: leaf.fp32_precision for name, leaf in _leaves().items()},
        raised=tuple(raised),
    )


def apply(flag: bool, device_type: str) -> None:
    """Switch TF32 on or off for matmul, convolution and rnn, so that all getters agree."""
    torch.set_float32_matmul_precision("high" if flag else "highest")
    _backends.cudnn.allow_tf32 = flag
    leaves = _leaves()
    for name in ("cudnn.conv", "cudnn.rnn"):
        if name in leaves:  # a generic "tf32" would keep convolutions on when they are switched off
            leaves[name].fp32_precision = "tf32" if flag else "ieee"
    if device_type == "xpu":
        _backends.mkldnn.allow_tf32 = flag


def restore(state: TF32State) -> None:
    """Put every switch back; a start at which the interfaces disagreed disagrees again."""
    torch.set_float32_matmul_precision(state.word or "highest")
    # Where the getter had raised, the old switch was not what the leaves say.
    old_is_known = state.cudnn is not None
    _backends.cudnn.allow_tf32 = state.cudnn if old_is_known else state.leaves["cudnn.conv"] != "tf32"
    if state.onednn is not None:
        _backends.mkldnn.allow_tf32 = state.onednn
    for name, leaf in _leaves().items():
        leaf.fp32_precision = state.leaves[name]


def _leaves() -> dict[str, Any]:
    if not hasattr(_backends, "fp32_precision"):
        return {}
    return {
        "cuda.matmul": _backends.cuda.matmul,
        "cudnn.conv": _backends.cudnn.conv,
        "cudnn.rnn": _backends.cudnn.rnn,
        "mkldnn.matmul": _backends.mkldnn.matmul,
    }


class TF32(Callback):
    """Compute float32 matmuls and convolutions in TF32, or not, on devices that have it.

    The switches belong to the whole process, so every rank sets its own; they come back in ``teardown``. On a
    device without TF32 nothing is changed, and a "note" says so. A "warning" says when TF32 was asked for and
    has no effect, and when the switches contradicted each other before the run.

    Args:
        enabled: ``True`` for TF32, ``False`` for full float32, ``None`` to leave the switches alone.
    """

    def __init__(self, enabled: bool | None = True) -> None:
        if enabled is not None and not isinstance(enabled, bool):
            raise ConfigError(f"tf32 must be true, false or null, got {enabled!r}.\nUse null to leave it as it is.")
        self.enabled = enabled
        self._saved: dict[str, TF32State] = {}  # by stage: an evaluation can come inside a fit

    def setup(self, trainer: Trainer, policy: nn.Module, stage: str) -> None:
        """Save the switches and set them."""
        if self.enabled is None:
            return
        device = trainer.device.device
        support = tf32_support(device, trainer.facts)
        state = save_state()
        message = self._message(support.native, support.usable, support.reason, state)
        if message:
            trainer.event(
                "warning" if support.native else "note",
                source="TF32",
                requested=self.enabled,
                effective=self.enabled and support.usable,
                message=message,
            )
        if support.native:
            self._saved[stage] = state
            apply(self.enabled, device.type)

    def teardown(self, trainer: Trainer, policy: nn.Module, stage: str) -> None:
        """Put the switches back as they were."""
        state = self._saved.pop(stage, None)
        if state is not None:
            restore(state)

    def _message(self, native: bool, usable: bool, reason: str, state: TF32State) -> str:
        if not native:
            return f"TF32 is not applicable: {reason}" if self.enabled else ""
        parts = [f"TF32 was requested and is not effective: {reason}"] if self.enabled and not usable else []
        if state.raised:
            parts.append(f"before the run {state.disagreement()}; all come back as they were")
        return "; ".join(parts)
