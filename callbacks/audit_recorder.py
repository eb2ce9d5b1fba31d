"""Sees every op of a micro-batch as torch runs it, after autocast: what ran, in which module, in which dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

#: The path of what runs in no module of the policy, and of the policy's own code.
OUTSIDE, POLICY = "(outside the policy)", "(policy)"

_FLOATS = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
_CASTS = ("_to_copy", "to")  # the latter of tensors made in inference mode
_FLASH = "_scaled_dot_product_flash_attention"

#: Matmuls without a formula in torch: their own, the name of an op with the same arguments that has one, or ``None``.
_MATMULS: dict[str, Callable[..., int] | str | None] = {
    f"{_FLASH}_for_cpu": _FLASH,
    f"{_FLASH}_for_cpu_backward": f"{_FLASH}_backward",
    "_scaled_dot_product_attention_math_for_mps": _FLASH,
    "mv": lambda matrix, _: 2 * matrix.numel(),
    "addmv": lambda _, matrix, __: 2 * matrix.numel(),
    "dot": lambda a, _: 2 * a.numel(),
    "vdot": lambda a, _: 2 * a.numel(),
    "addbmm": lambda _, a, b: 2 * a.numel() * b.shape[2],
    "linear": lambda x, weight, *_: 2 * x.numel() * weight.shape[0],
    "linear_backward": lambda x, _, weight, mask: 2 * x.numel() * weight.shape[0] * sum(mask[:2]),
    **dict.fromkeys(
        ("_trilinear", "_int_mm", "_grouped_mm", "_scaled_grouped_mm", "mkldnn_rnn_layer", "mkldnn_rnn_layer_backward",
         "_cudnn_rnn", "_cudnn_rnn_backward", "miopen_rnn", "miopen_rnn_backward", "_lstm_mps", "lstm_mps_backward")
    ),
}  # fmt: skip


class Row(NamedTuple):
    """What is counted together.

    The dtype of a matmul (also a convolution or attention) is that of its operands, else that of the result. A
    "cast back" only takes back a cast from 16 bits to float32. ``source`` is what a cast began with, else "".
    """

    kind: str  # "matmul", "cast", "cast back" or "other"
    phase: str  # "forward" or "backward"
    module: str
    op: str
    device: str
    dtype: str
    source: str = ""


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts ops while it watches: ``rows[row]`` is ``[times, FLOPs of matmuls or bytes that casts write]``."""

    supports_higher_order_operators = True

    def __init__(self, policy: nn.Module) -> None:
        from torch.utils.flop_counter import flop_registry  # looks for triton, which other runs need not do

        super().__init__()  # type: ignore[no-untyped-call]
        self._registry: Mapping[Any, Callable[..., Any]] = flop_registry
        self.rows: dict[Row, list[int]] = {}
        self._names = {module: name or POLICY for name, module in policy.named_modules()}
        self._stack: list[str] = []
        self._module_of_node: dict[int, str] = {}
        self._widened: Any = WeakTensorKeyDictionary()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count inside; compiled and fused modules run op by op for it, so that all of them is seen."""
        fused = torch.backends.mha.get_fastpath_enabled()
        enter = register_module_forward_pre_hook(self._enter_module)
        leave = register_module_forward_hook(self._leave_module, always_call=True)
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            with torch.compiler.set_stance("force_eager"), self:
                yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fused)
            leave.remove()
            enter.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Run the op and count it."""
        out = func(*args, **(kwargs or {}))
        op, module = getattr(func, "_overloadpacket", func), self._module()
        result = next((o for o in (out if isinstance(out, tuple | list) else (out,)) if isinstance(o, Tensor)), None)
        if result is not None and (str(op) == "aten.to" or not getattr(func, "is_view", False)):
            self._count(op, module, args, kwargs or {}, out, result)
        return out

    def _count(self, op: Any, module: str, args: Any, kwargs: Mapping[str, Any], out: Any, result: Tensor) -> None:
        name = str(op).removeprefix("aten.")
        kind, counted, amount, source = "other", result, 0, ""
        if name in _CASTS and len({args[0].dtype, result.dtype} & _FLOATS) == 2:
            kind = "cast back" if self._takes_back(args[0], result) else "cast"
            amount, source = result.numel() * result.element_size(), _word(args[0].dtype)
        elif op in self._registry or name in _MATMULS:
            kind, amount = "matmul", self._flops(op, name, args, kwargs, out)
            counted = next((a for a in args if isinstance(a, Tensor) and a.is_floating_point()), result)
        phase = "forward" if torch._C._current_autograd_node() is None else "backward"
        row = Row(kind, phase, module, name, str(counted.device), _word(counted.dtype), source)
        total = self.rows.setdefault(row, [0, 0])
        total[0], total[1] = total[0] + 1, total[1] + amount

    def _takes_back(self, source: Tensor, result: Tensor) -> bool:
        """Whether a cast only brings back the 16 bits that another cast widened, unchanged in between."""
        if torch._C._current_autograd_node() is not None:  # a gradient passes a sum unchanged, by no fault of the sum
            return False
        if source.is_inference() or result.is_inference():  # such tensors do not say whether they changed
            return False
        if result.dtype == torch.float32 and source.itemsize == 2:
            self._widened[result] = (source.dtype, result._version)
        origin = source if source._base is None else source._base
        return bool(self._widened.get(origin) == (result.dtype, origin._version))

    def _module(self) -> str:
        """The path of the module under way; in backward that of the forward op whose gradient is computed."""
        node = torch._C._current_autograd_node()
        if node is not None and not self._stack:
            return self._module_of_node.get(node._sequence_nr(), POLICY)
        module = self._stack[-1] if self._stack else POLICY
        # autograd numbers its nodes in order, and has just numbered that of the op under way
        self._module_of_node.setdefault(torch._C._autograd._get_sequence_nr() - 1, module)
        return module

    def _flops(self, op: Any, name: str, args: Any, kwargs: Mapping[str, Any], out: Any) -> int:
        """A multiplication and an addition each counted; 0 where no formula is known."""
        own = _MATMULS.get(name)
        if callable(own):
            return own(*args)
        formula = self._registry.get(op if own is None else getattr(torch.ops.aten, own))
        try:
            return int(formula(*args, **kwargs, out_val=out)) if formula is not None else 0
        except Exception:  # a formula that does not know this call's form; the report lists the op as without one
            return 0

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        self._stack.append(self._names.get(module, OUTSIDE))

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        self._stack.pop()


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
