"""Sees every op of a micro-batch as torch runs it: after autocast, forward and backward, with the module it ran in."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from .audit_flops import flops, is_matmul

#: The path of what runs in no module of the policy, and of the policy's own code.
OUTSIDE, POLICY = "(outside the policy)", "(policy)"

_HALVES = (torch.bfloat16, torch.float16)

#: Ops that autocast passes by but that call, from inside, ops which it casts; and the op of torch's interface that
#: brings them about, which autocast does not pass by on every device. A dispatch mode finds autocast switched off.
_CASTS_INSIDE = {
    "aten._transformer_encoder_layer_fwd": None,
    "aten._native_multi_head_attention": None,
    "aten.linalg_pinv": None,
    "aten._trilinear": "aten::bilinear",
}


@dataclass(slots=True)
class Tally:
    """How often something came, and how much it was: FLOPs or bytes."""

    count: int = 0
    amount: int = 0

    def add(self, amount: int = 0) -> None:
        """One more."""
        self.count += 1
        self.amount += amount


class Matmul(NamedTuple):
    """One kind of matmul, convolution or attention."""

    phase: Literal["forward", "backward"]
    module: str
    op: str
    device: str
    dtype: torch.dtype


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts while it is open; leaves results, gradients and random streams as they are.

    Module paths come from hooks on all modules of the process, not of the policy: some modules of torch compute
    differently once they carry hooks of their own.

    Args:
        policy: Whose modules are named.
        with_modules: False installs no hooks, which would make ``torch.compile`` compile again.
    """

    supports_higher_order_operators = True

    def __init__(self, policy: nn.Module, *, with_modules: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: defaultdict[tuple[str, torch.dtype], Tally] = defaultdict(Tally)
        self.matmuls: defaultdict[Matmul, Tally] = defaultdict(Tally)
        self.without_formula: defaultdict[str, Tally] = defaultdict(Tally)
        self.casts: defaultdict[tuple[torch.dtype, torch.dtype], Tally] = defaultdict(Tally)
        self.there_and_back: defaultdict[tuple[str, torch.dtype], Tally] = defaultdict(Tally)
        self.float64: defaultdict[tuple[str, str], Tally] = defaultdict(Tally)
        self._names = {id(module): name or POLICY for name, module in policy.named_modules()}
        self._with_modules = with_modules
        self._stack: list[str] = []
        self._module_of_node: dict[int, str] = {}
        self._widened: Any = WeakTensorKeyDictionary()
        self._open = ExitStack()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled functions stay compiled; without this torch would run them op by op, with other bits."""
        return True

    def open(self) -> None:
        """Begin to count."""
        if self._with_modules:
            self._open.callback(register_module_forward_pre_hook(self._enter_module).remove)
            self._open.callback(register_module_forward_hook(self._leave_module, always_call=True).remove)
        self._open.enter_context(self)

    def close(self) -> None:
        """End; a second time is harmless."""
        self._open.close()
        self._module_of_node.clear()
        self._widened.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Run the op and count it."""
        kwargs = kwargs or {}
        op = getattr(func, "_overloadpacket", func)
        with _autocast_inside(op, args):
            out = func(*args, **kwargs)
        module = self._module()
        if not getattr(func, "is_view", False):
            self._count(op, module, args, kwargs, out)
        return out

    def _count(self, op: Any, module: str, args: Any, kwargs: Mapping[str, Any], out: Any) -> None:
        result = _first_tensor(out)
        if result is None:
            return
        if op is torch.ops.aten._to_copy and _is_cast(args[0], result):
            self._count_cast(module, args[0], result)
        elif is_matmul(op):
            operands = [result] if str(op) in _CASTS_INSIDE else [*args, result]
            operand = next((a for a in operands if isinstance(a, Tensor) and a.is_floating_point()), result)
            phase: Literal["forward", "backward"] = "forward" if _node() is None else "backward"
            price = flops(op, args, kwargs, out)
            if price is None:
                self.without_formula[_name(op)].add()
            key = Matmul(phase, module, _name(op), str(operand.device), operand.dtype)
            self.matmuls[key].add(price or 0)
            self.ops[str(operand.device), operand.dtype].add()
        else:
            self.ops[str(result.device), result.dtype].add()
        if result.dtype == torch.float64:
            self.float64[module, _name(op)].add()

    def _count_cast(self, module: str, source: Tensor, result: Tensor) -> None:
        """A cast, and whether it only takes back what another did to the same, unchanged values."""
        self.casts[source.dtype, result.dtype].add(_size(result))
        if source.is_inference() or result.is_inference():  # such tensors do not say whether they changed
            return
        if _node() is not None:  # a gradient passes through a sum unchanged, which is no fault of the sum
            return
        if source.dtype in _HALVES and result.dtype == torch.float32:
            self._widened[result] = (source.dtype, result._version)
        origin = source if source._base is None else source._base
        if self._widened.get(origin) == (result.dtype, origin._version):
            self.there_and_back[module, result.dtype].add(_size(result) + _size(source))

    def _module(self) -> str:
        """The path of the module under way; in backward that of the forward op whose gradient is computed."""
        node = _node()
        if node is not None and not self._stack:
            return self._module_of_node.get(node._sequence_nr(), POLICY)
        module = self._stack[-1] if self._stack else POLICY
        # autograd numbers its nodes in order, and has just numbered that of the op under way
        self._module_of_node.setdefault(torch._C._autograd._get_sequence_nr() - 1, module)
        return module

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        self._stack.append(self._names.get(id(module), OUTSIDE))

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._stack:
            self._stack.pop()


@contextmanager
def _autocast_inside(op: Any, args: Any) -> Iterator[None]:
    """For the ops that need it, autocast as it was where they were called."""
    if str(op) not in _CASTS_INSIDE:
        yield
        return
    device = next(a.device.type for a in args if isinstance(a, Tensor))
    caller = _CASTS_INSIDE[str(op)]
    with torch._C._RestorePythonTLSSnapshot():  # type: ignore[attr-defined]
        enabled = torch.is_autocast_enabled(device)
    if caller is not None and torch._C._dispatch_has_kernel_for_dispatch_key(caller, f"Autocast{device.upper()}"):
        enabled = False
    torch.set_autocast_enabled(device, enabled)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device, False)


def _node() -> Any:
    """autograd's node under way; ``None`` outside of backward."""
    return torch._C._current_autograd_node()


def _name(op: Any) -> str:
    return str(op).removeprefix("aten.")


def _is_cast(source: Tensor, result: Tensor) -> bool:
    return source.dtype != result.dtype and source.is_floating_point() and result.is_floating_point()


def _size(tensor: Tensor) -> int:
    """Bytes, also of the layouts that have no ``nbytes``."""
    return tensor.numel() * tensor.element_size()


def _first_tensor(out: Any) -> Tensor | None:
    outputs = out if isinstance(out, tuple | list) else (out,)
    return next((o for o in outputs if isinstance(o, Tensor)), None)
