"""Compute a micro-batch once more, to see where inf or NaN began, and leave no trace of it."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from ..strategies.tree import map_tensors, tensors
from .audit_recorder import OUTSIDE, POLICY

if TYPE_CHECKING:
    from ..trainer.trainer import Trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where inf or NaN began.

    ``output`` and ``input``: of the first module whose output is not finite, made in it or by the code before it.
    ``loss``: from finite outputs. ``gradient``: in the backward of ``op``, which the module's forward ran, or where
    the gradients that reach it are added; without ``op`` it is the parameter of that name.
    """

    what: Literal["output", "input", "loss", "gradient"]
    module: str
    micro_batch: int
    op: str | None = None
    #: Entries of the batch that are not finite themselves; such a mask may be meant.
    batch: tuple[str, ...] = ()

    def __str__(self) -> str:
        place = {
            "output": f"the output of {self.module}",
            "input": f"the input of {self.module}",
            "loss": "the loss itself, while the outputs of all modules are finite",
            "gradient": f"the gradient of {f'{self.op}, in {self.module}' if self.op else self.module}",
        }[self.what]
        batch = f"; the batch holds inf or NaN in {', '.join(self.batch)}" if self.batch else ""
        return f"{place} (micro-batch {self.micro_batch} of the epoch){batch}"


class KeptMicroBatch:
    """A micro-batch, and what its forward reads beside the weights, from the moment before it."""

    def __init__(self, trainer: Trainer, policy: nn.Module, batch: Any, index: int) -> None:
        self.number = trainer.micro_batches
        self._batch, self._index = map_tensors(batch, lambda tensor, key: tensor.clone()), index
        self._scale = None if trainer.precision.scale is None else trainer.precision.scale.clone()
        self._before = _Moment(trainer, policy)

    @torch.inference_mode(False)
    @torch.enable_grad()  # an outcome may be asked for inside their opposites
    def origin(self, trainer: Trainer, policy: nn.Module, share: Tensor) -> Origin | None:
        """Where it first goes non-finite; ``None`` if it does not. The weights are still those of its forward.

        Args:
            share: What the loss contributed to its window's, before any loss scale.
        """
        bad = _non_finite_entries(self._batch)
        watch = _Watch(policy)
        with rehearsing(trainer, policy):
            self._before.put_back()
            for module in policy.modules():
                module._compiled_call_impl = None  # eager, in which modules can be told apart
            with watch.forward():
                loss = trainer.training_loss(self._batch, self._index)
            if loss is None:
                return None
            if not _finite(loss):
                what, name = watch.first or ("loss", POLICY)
                return Origin(what=what, module=name, micro_batch=self._index, batch=bad)
            if not _finite(share):  # then nothing is the same a second time
                return None
            part = share / loss.detach() if bool(loss) else 1.0
            watched = loss * part if self._scale is None else loss * part * self._scale
            watch.backward(watched)
            if watch.first_gradient is None:
                return None
            op, name = watch.first_gradient
            return Origin(what="gradient", module=name, op=op, micro_batch=self._index, batch=bad)


@contextmanager
def rehearsing(trainer: Trainer, policy: nn.Module) -> Iterator[None]:
    """Compute inside as in the run, from no gradients; all that ``_Moment`` follows and the gradients come back.

    What is logged inside is dropped.
    """
    now, gradients = _Moment(trainer, policy, weights=True), [(p, p.grad) for p in policy.parameters()]
    try:
        for parameter, _ in gradients:
            parameter.grad = None
        with trainer.collecting(lambda name, value: None):
            yield
    finally:
        now.put_back()
        for parameter, gradient in gradients:
            parameter.grad = gradient


class _Watch:
    """Follows one forward and backward. Every look waits for the device."""

    def __init__(self, policy: nn.Module) -> None:
        self._policy = policy
        self._names = {id(module): name or POLICY for name, module in policy.named_modules()}
        self._calls: Counter[int] = Counter()
        self._stack: list[str] = []
        #: From which of autograd's numbers on the ops belong to which module.
        self._numbers, self._owners = [0], [POLICY]
        self.first: tuple[Literal["output", "input"], str] | None = None
        self.first_gradient: tuple[str | None, str] | None = None

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Look at every module that is called while this is open."""
        # Hooks on all modules of the process: some modules of torch compute differently once they have their own.
        with ExitStack() as hooks:
            hooks.callback(register_module_forward_pre_hook(self._enter).remove)
            hooks.callback(register_module_forward_hook(self._leave, with_kwargs=True, always_call=True).remove)
            yield

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of ``loss`` and look at each on its way."""
        for node in _nodes(loss):
            owner = self._owners[bisect_right(self._numbers, node._sequence_nr()) - 1]
            node.register_hook(partial(self._after_node, node.name(), owner))
        loss.backward()  # type: ignore[no-untyped-call]
        for name, parameter in self._policy.named_parameters():  # may have hooks of their own
            if self.first_gradient is None and parameter.grad is not None and not _finite(parameter.grad):
                self.first_gradient = (None, name)

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._calls[id(module)] += 1
        name, call = self._names.get(id(module), OUTSIDE), self._calls[id(module)]
        self._stack.append(name if call == 1 or name == OUTSIDE else f"{name} (call {call})")
        self._note_owner()

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        name = self._stack.pop()
        self._note_owner()
        # The policy itself gives the loss, and metrics that may be what they like.
        if self.first is None and module is not self._policy and not _finite(output):
            self.first = ("output" if _finite((args, kwargs)) else "input", name)

    def _note_owner(self) -> None:
        self._numbers.append(torch._C._autograd._get_sequence_nr())
        self._owners.append(self._stack[-1] if self._stack else POLICY)

    def _after_node(self, op: str, owner: str, gradients_in: Any, gradients_out: Any) -> None:
        # Where finite gradients were added to one that is not, it is the op that gets it.
        if self.first_gradient is None and not _finite(gradients_in):
            self.first_gradient = (op, owner)


class _Moment:
    """What a forward may change: buffers, attributes of modules, random streams; on request also the weights.

    Lists and other objects that modules keep and change in place are not followed.
    """

    def __init__(self, trainer: Trainer, policy: nn.Module, *, weights: bool = False) -> None:
        live: list[dict[str, Any]] = []
        for module in policy.modules():
            live += [vars(module), vars(module).get("_buffers", {})]
        self._dicts = [(d, dict(d)) for d in live]
        values = [value for d in live for value in d.values()] + (list(policy.parameters()) if weights else [])
        self._tensors = [(value, value.detach().clone()) for value in values if isinstance(value, Tensor)]
        self._streams = _streams(trainer, values)

    def put_back(self) -> None:
        """Make it so again."""
        for live, kept in self._dicts:
            for name in live.keys() - kept.keys():
                del live[name]
            live.update(kept)
        with torch.no_grad():
            for tensor, value in self._tensors:
                if not torch.equal(tensor, value):
                    tensor.copy_(value)
        for put_back in self._streams:
            put_back()


def _streams(trainer: Trainer, attributes: list[Any]) -> list[Callable[[], Any]]:
    """Calls that bring the random streams back to where they are now: the global ones and the policy's own."""
    device = trainer.device.rng_state()
    calls: list[Callable[[], Any]] = [
        partial(random.setstate, random.getstate()),
        partial(np.random.set_state, np.random.get_state()),
        partial(torch.set_rng_state, torch.get_rng_state()),
        *([] if device is None else [partial(trainer.device.set_rng_state, device)]),
    ]
    for value in attributes:
        if isinstance(value, torch.Generator):
            calls.append(partial(value.set_state, value.get_state()))
        elif isinstance(value, np.random.Generator):
            calls.append(partial(setattr, value.bit_generator, "state", value.bit_generator.state))
        elif isinstance(value, random.Random):
            calls.append(partial(value.setstate, value.getstate()))
    return calls


def _nodes(loss: Tensor) -> Iterator[Any]:
    """Every op of the graph of ``loss``, without the ends at which gradients are kept."""
    seen: set[Any] = set()
    waiting: list[Any] = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen or node.name().endswith("AccumulateGrad"):
            continue
        seen.add(node)
        waiting += [function for function, _ in node.next_functions]
        yield node


def _non_finite_entries(batch: Any) -> tuple[str, ...]:
    bad: list[str] = []

    def look(tensor: Tensor, key: str) -> Tensor:
        if not _finite(tensor):
            bad.append(key or "its only tensor")
        return tensor

    map_tensors(batch, look)
    return tuple(bad)


@torch.no_grad()  # else a module that is recomputed in backward would find this among what it has saved
def _finite(tree: Any) -> bool:
    return all(bool(t.isfinite().all()) for t in tensors(tree) if t.is_floating_point() or t.is_complex())
