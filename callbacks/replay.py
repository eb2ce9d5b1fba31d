"""Compute a window once more, to see where inf or NaN began."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from ..strategies.tree import map_tensors, tensors
from .audit_recorder import OUTSIDE, POLICY, Paths
from .rehearsal import Moment, copied, rehearsing

if TYPE_CHECKING:
    from ..trainer.trainer import Trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where inf or NaN began.

    ``output`` and ``input``: of the first module whose output is not finite, made in it or by the code before it.
    ``loss``: from finite outputs. ``gradient``: in the backward of ``op``, which the module's forward ran, or where
    the gradients that reach it are added; without ``op`` it is the parameter of that name. ``sum``: of the gradients
    of the parameter of that name, finite in each micro-batch of the window, up to this one.
    """

    what: Literal["output", "input", "loss", "gradient", "sum"]
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
            "sum": f"the sum of the window's gradients of {self.module}, each of which is finite",
        }[self.what]
        batch = f"; the batch holds inf or NaN in {', '.join(self.batch)}" if self.batch else ""
        return f"{place} (micro-batch {self.micro_batch} of the epoch){batch}"


def find_origin(
    trainer: Trainer, policy: nn.Module, window: Sequence[KeptMicroBatch], losses: Mapping[int, Tensor]
) -> tuple[Origin | None, list[str]]:
    """Where a window first goes non-finite, ``None`` if it does not, and what could not be looked at.

    Args:
        losses: What the loss of each micro-batch contributed to that of the window, by number, before any loss scale.
    """
    look, sums = _Look(), dict[str, Tensor]()
    with rehearsing(trainer, policy):
        for kept in window:
            if kept.number in losses:
                origin = kept.origin(trainer, policy, losses[kept.number], look, sums)
                if origin is not None:
                    return origin, look.unseen
    return None, look.unseen


class KeptMicroBatch:
    """A micro-batch, and what its forward reads, from the moment before it.

    Args:
        earlier: The one before it in the window, with which it shares what has not changed in between.
    """

    def __init__(
        self, trainer: Trainer, policy: nn.Module, batch: Any, index: int, earlier: KeptMicroBatch | None = None
    ) -> None:
        self.number = trainer.micro_batches
        self._batch, self._index = copied(batch), index
        self._scale = None if trainer.precision.scale is None else trainer.precision.scale.clone()
        self._before: Moment = Moment(trainer, policy, None if earlier is None else earlier._before)

    def origin(
        self, trainer: Trainer, policy: nn.Module, share: Tensor, look: _Look, sums: dict[str, Tensor]
    ) -> Origin | None:
        """Where it first goes non-finite, or the sums of its and earlier gradients do; ``None`` if they do not."""
        bad = look.non_finite_entries(self._batch)
        watch = _Watch(policy, look)
        self._before.put_back()
        with watch.forward():
            loss = trainer.training_loss(self._batch, self._index)
        if loss is None:
            return None
        if not look.finite(loss, "the loss"):
            what, name = watch.first or ("loss", POLICY)
            return Origin(what=what, module=name, micro_batch=self._index, batch=bad)
        if not look.finite(share, "the loss"):  # then nothing is the same a second time
            return None
        part = share / loss.detach() if bool(loss) else 1.0
        watch.backward(loss * part if self._scale is None else loss * part * self._scale)
        if watch.first_gradient is not None:
            op, name = watch.first_gradient
            return Origin(what="gradient", module=name, op=op, micro_batch=self._index, batch=bad)
        for name, parameter in policy.named_parameters():
            if parameter.grad is not None:
                sums[name] = parameter.grad + sums[name] if name in sums else parameter.grad
                parameter.grad = None
                if not look.finite(sums[name], f"the gradient of {name}"):
                    return Origin(what="sum", module=name, micro_batch=self._index, batch=bad)
        return None


class _Look:
    """Tells what is finite, and notes of what torch cannot tell."""

    def __init__(self) -> None:
        self.unseen: list[str] = []

    def finite(self, tree: Any, place: str) -> bool:
        """Whether nothing in it is known to be inf or NaN. Waits for the device."""
        return all(self._finite(tensor, place) for tensor in tensors(tree))

    def non_finite_entries(self, batch: Any) -> tuple[str, ...]:
        """The names of the entries of a batch that hold inf or NaN."""
        bad: list[str] = []

        def look(tensor: Tensor, key: str) -> Tensor:
            if not self._finite(tensor, f"the batch's {key or 'tensor'}"):
                bad.append(key or "its only tensor")
            return tensor

        map_tensors(batch, look)
        return tuple(bad)

    @torch.no_grad()  # else a module that is recomputed in backward would find this among what it has saved
    def _finite(self, tensor: Tensor, place: str) -> bool:
        if not (tensor.is_floating_point() or tensor.is_complex()):
            return True
        try:
            return bool(tensor.isfinite().all())
        except RuntimeError as error:  # of a sparse or nested tensor, say, or inside of torch.vmap
            text = f"{place} ({str(error).partition(chr(10))[0]:.100})"
            if text not in self.unseen:
                self.unseen.append(text)
            return True


class _Watch:
    """Follows one forward and backward. Every look waits for the device."""

    def __init__(self, policy: nn.Module, look: _Look) -> None:
        self._policy, self._look, self._paths = policy, look, Paths(policy)
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
            leave = register_module_forward_hook(self._leave, with_kwargs=True, always_call=True)
            hooks.callback(leave.remove)
            hooks.callback(torch_module._global_forward_hooks_with_kwargs.pop, leave.id, None)  # remove() leaves it
            yield

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of ``loss`` and look at each on its way."""
        for node in _nodes(loss):
            owner = self._owners[bisect_right(self._numbers, node._sequence_nr()) - 1]
            node.register_hook(partial(self._after_node, node.name(), owner))
        loss.backward()  # type: ignore[no-untyped-call]
        for name, parameter in self._policy.named_parameters():  # may have hooks of their own
            if self.first_gradient is None and not self._look.finite(parameter.grad, f"the gradient of {name}"):
                self.first_gradient = (None, name)

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._calls[id(module)] += 1
        name, call = self._paths.of(module), self._calls[id(module)]
        self._stack.append(name if call == 1 or name == OUTSIDE else f"{name} (call {call})")
        self._note_owner()

    def _leave(self, module: nn.Module, *given: Any) -> None:
        *inputs, output = given  # after an error torch gives no keyword arguments
        name = self._stack.pop()
        self._note_owner()
        # The policy itself gives the loss, and metrics that may be what they like.
        if self.first is None and module is not self._policy and not self._look.finite(output, f"the output of {name}"):
            self.first = ("output" if self._look.finite(inputs, f"the input of {name}") else "input", name)

    def _note_owner(self) -> None:
        self._numbers.append(torch._C._autograd._get_sequence_nr())
        self._owners.append(self._stack[-1] if self._stack else POLICY)

    def _after_node(self, op: str, owner: str, gradients_in: Any, gradients_out: Any) -> None:
        # Where finite gradients were added to one that is not, it is the op that gets it.
        if self.first_gradient is None and not self._look.finite(gradients_in, f"the gradient of {op}"):
            self.first_gradient = (op, owner)


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
