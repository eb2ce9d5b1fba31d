"""Sees every op of a micro-batch as torch runs it, after autocast: what ran, in which module, in which dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from ..strategies.tree import tensors

#: The path of what runs in no module of the policy, and of the policy's own code.
OUTSIDE, POLICY = "(outside the policy)", "(policy)"

_FLOATS = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
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


class Paths:
    """The paths of a policy's modules, those that it makes while it computes included."""

    def __init__(self, policy: nn.Module) -> None:
        self._policy = policy
        self._known: dict[nn.Module, str] = {}

    def of(self, module: nn.Module) -> str:
        """Its path, or ``OUTSIDE``."""
        if module not in self._known:
            self._known.update((m, name or POLICY) for name, m in self._policy.named_modules())
        return self._known.setdefault(module, OUTSIDE)


class _Autocast(TorchFunctionMode):
    """Remembers where autocast is on when Python calls torch: where ops arrive in a mode it always looks off."""

    def __init__(self, device_types: set[str]) -> None:
        super().__init__()
        self._on = dict.fromkeys(device_types, False)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        self._on = {device_type: torch.is_autocast_enabled(device_type) for device_type in self._on}
        return func(*args, **(kwargs or {}))

    def again(self, args: Any) -> AbstractContextManager[Any]:
        """Autocast as it was, for the parts of an op with these arguments."""
        device_types = {tensor.device.type for tensor in tensors(args)}
        on = next((device_type for device_type in device_types if self._on.get(device_type)), None)
        return nullcontext() if on is None else torch.autocast(on)


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts ops while it watches: ``rows[row]`` is ``[times, FLOPs of matmuls or bytes that casts write]``."""

    supports_higher_order_operators = True

    def __init__(self, policy: nn.Module) -> None:
        from torch.utils.flop_counter import flop_registry  # looks for triton, which other runs need not do

        super().__init__()  # type: ignore[no-untyped-call]
        self._registry: Mapping[Any, Callable[..., Any]] = flop_registry
        self.rows: dict[Row, list[int]] = {}
        self._paths, self._autocast = Paths(policy), _Autocast({"cpu", *(p.device.type for p in policy.parameters())})
        self._stack: list[str] = []
        self._module_of_node: dict[int, str] = {}
        self._widened: Any = WeakTensorKeyDictionary()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count inside, where compiled and fused modules have to run op by op."""
        enter = register_module_forward_pre_hook(self._enter_module)
        leave = register_module_forward_hook(self._leave_module, always_call=True)
        try:
            with self._autocast, self:
                yield
        finally:
            leave.remove()
            enter.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Run the op and count it, or let it come in the ops that it is made of."""
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):  # made of other tensors, which come next
            return NotImplemented
        op = getattr(func, "_overloadpacket", func)
        if isinstance(func, OpOverload) and not self._is_matmul(op):
            with self._autocast.again(args), self:  # in inference mode; elsewhere autograd has done this
                out = func.decompose(*args, **(kwargs or {}))
            if out is not NotImplemented:
                return out
        out, module = func(*args, **(kwargs or {})), self._module()
        result = next((o for o in (out if isinstance(out, tuple | list) else (out,)) if isinstance(o, Tensor)), None)
        if result is not None and not getattr(func, "is_view", False):
            self._count(op, module, args, kwargs or {}, out, result)
        return out

    def _count(self, op: Any, module: str, args: Any, kwargs: Mapping[str, Any], out: Any, result: Tensor) -> None:
        name = str(op).removeprefix("aten.")
        kind, counted, amount, source = "other", result, 0, ""
        if name == "_to_copy" and len({args[0].dtype, result.dtype} & _FLOATS) == 2:
            kind = "cast back" if self._takes_back(args[0], result) else "cast"
            amount, source = result.numel() * result.element_size(), _word(args[0].dtype)
        elif self._is_matmul(op):
            kind, amount = "matmul", self._flops(op, name, args, kwargs, out)
            counted = next((a for a in args if isinstance(a, Tensor) and a.is_floating_point()), result)
        elif result.is_meta:  # only a shape was worked out
            return
        phase = "forward" if torch._C._current_autograd_node() is None else "backward"
        row = Row(kind, phase, module, name, str(counted.device), _word(counted.dtype), source)
        total = self.rows.setdefault(row, [0, 0])
        total[0], total[1] = total[0] + 1, total[1] + amount

    def _is_matmul(self, op: Any) -> bool:
        return op in self._registry or str(op).removeprefix("aten.") in _MATMULS

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
        self._stack.append(self._paths.of(module))

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        self._stack.pop()


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
