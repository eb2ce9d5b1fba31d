"""Which ops are matmuls, convolutions or attention, and what each costs, by torch's own formulas."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from math import prod
from typing import Any

import torch

_Shape = Sequence[int]
_aten = torch.ops.aten

#: Ops without a formula in torch whose leading arguments are those of an op that has one.
_SAME_AS = {
    "aten._scaled_dot_product_flash_attention_for_cpu": "_scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": "_scaled_dot_product_flash_attention_backward",
    "aten._scaled_dot_product_fused_attention_overrideable": "_scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_fused_attention_overrideable_backward": "_scaled_dot_product_flash_attention_backward",
    "aten._scaled_dot_product_attention_math_for_mps": "_scaled_dot_product_flash_attention",
    "aten._addmm_activation": "addmm",
}

#: Ops without a formula that are matmuls of other shapes: the shapes of their two-dimensional factors.
_AS_MATMULS: dict[str, Callable[..., list[tuple[_Shape, _Shape]]]] = {
    "aten.mv": lambda matrix, vector: [(matrix, (*vector, 1))],
    "aten.addmv": lambda _, matrix, vector: [(matrix, (*vector, 1))],
    "aten.dot": lambda a, b: [((1, *a), (*b, 1))],
    "aten.vdot": lambda a, b: [((1, *a), (*b, 1))],
    "aten.linear": lambda x, weight, *_: [((prod(x[:-1]), x[-1]), weight[::-1])],
    "aten.linear_backward": lambda x, grad, weight, mask: [
        *([((prod(grad[:-1]), grad[-1]), weight)] if mask[0] else []),
        *([((grad[-1], prod(grad[:-1])), (prod(x[:-1]), x[-1]))] if mask[1] else []),
    ],
    "aten.addbmm": lambda _, a, b: [((a[1], a[0] * a[2]), (a[0] * b[1], b[2]))],
}

#: Ops that multiply matrices inside, for which neither torch nor this file has a formula.
_WITHOUT_FORMULA = {
    f"aten.{name}"
    for name in (
        "mkldnn_rnn_layer", "mkldnn_rnn_layer_backward", "_cudnn_rnn", "_cudnn_rnn_backward", "miopen_rnn",
        "miopen_rnn_backward", "_lstm_mps", "lstm_mps_backward", "_trilinear", "_transformer_encoder_layer_fwd",
        "_native_multi_head_attention", "_grouped_mm", "_scaled_grouped_mm", "_int_mm",
    )
}  # fmt: skip


def is_matmul(op: Any) -> bool:
    """Whether an op (an ``OpOverloadPacket`` or a higher-order op) is a matmul, a convolution or attention.

    What ``torch.utils.flop_counter.register_flop_formula`` was told about counts too.
    """
    name = str(op)
    return op in _registry() or name in _SAME_AS or name in _AS_MATMULS or name in _WITHOUT_FORMULA


def flops(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int | None:
    """The floating point operations of one call, a multiplication and an addition each counted; ``None`` if unknown."""
    name = str(op)
    formula = _registry().get(getattr(_aten, _SAME_AS[name]) if name in _SAME_AS else op)
    try:
        if formula is not None:
            return int(formula(*args, **kwargs, out_val=out))
        if name in _AS_MATMULS:
            shapes = (a.shape if isinstance(a, torch.Tensor) else a for a in args)
            return sum(int(_registry()[_aten.mm](a, b)) for a, b in _AS_MATMULS[name](*shapes))
    except Exception:  # a formula that does not know this call's form; the report lists the op as without one
        return None
    return None


@cache
def _registry() -> Mapping[Any, Callable[..., Any]]:
    from torch.utils.flop_counter import flop_registry  # looks for triton, which a run without an audit need not do

    return flop_registry
