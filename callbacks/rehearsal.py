"""Compute once more as in the run, and leave no trace of it."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, UntypedStorage, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..strategies.tree import map_leaves, tensors

if TYPE_CHECKING:
    from ..trainer.trainer import Trainer


@contextmanager
def rehearsing(trainer: Trainer, policy: nn.Module) -> Iterator[None]:
    """Compute inside as in the run, from no gradients; all that ``Moment`` follows and the gradients come back.

    Compiled and fused modules run op by op, so that all of it can be seen. What is logged inside is dropped.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))  # an outcome may be asked for inside it
        stack.enter_context(torch.enable_grad())
        now = Moment(trainer, policy)
        for tensor in now.tensors:
            if tensor.is_leaf:
                stack.callback(setattr, tensor, "grad", tensor.grad)
                tensor.grad = None
        stack.callback(now.put_back)  # before the gradients, which have to fit their tensors
        stack.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "Using `torch.compile.* global hooks")  # those of who looks, not the user's
        stack.enter_context(trainer.collecting(lambda name, value: None))
        yield


class Moment:
    """All of a policy that a forward may change, and the random streams, as they are now.

    It follows modules, parameters and buffers, which of them require gradients, and the attributes of modules, among
    them tensors and random generators. What lists, dicts and other objects hold that modules keep is not followed.

    Args:
        earlier: Another moment of the same policy; memory that is as it was then is held once for both.
    """

    def __init__(self, trainer: Trainer, policy: nn.Module, earlier: Moment | None = None) -> None:
        self._dicts = [(live, dict(live.items())) for module in policy.modules() for live in _dicts(module)]
        values = [value for _, kept in self._dicts for value in kept.values()]
        #: Those that the policy has, as parameters, buffers or attributes.
        self.tensors = list({id(value): value for value in values if isinstance(value, Tensor)}.values())
        self._state = [(tensor, tensor.detach(), tensor.requires_grad, tensor.grad_fn) for tensor in self.tensors]
        self._memory: dict[int, tuple[UntypedStorage, Tensor]] = {}
        for tensor in self.tensors:
            for storage in _storages(tensor):
                key = storage._cdata
                if key not in self._memory:
                    before = None if earlier is None else earlier._memory.get(key)
                    self._memory[key] = (storage, _copy_of(storage, None if before is None else before[1]))
        self._streams = [*filter(None, map(_stream, values)), *_global_streams(trainer)]

    @torch.no_grad()
    def put_back(self) -> None:
        """Make it so again."""
        with ExitStack() as stack:  # what fails at one of them leaves out no other
            for put_back in self._streams:
                stack.callback(put_back)
            for storage, kept in self._memory.values():
                stack.callback(_fill, storage, kept)
            for state in self._state:
                stack.callback(_put_back, *state)
            for live, entries in self._dicts:
                stack.callback(_refill, live, entries)


def copied(batch: Any) -> Any:
    """A copy of a batch that shares no memory with it, whatever it is made of.

    Raises:
        TypeError: It holds something that cannot be copied.
    """
    # Each tensor by itself: the memory of one that is a slice may be a whole data set.
    memo = {id(t): t.detach().clone().requires_grad_(t.requires_grad) for t in tensors(batch)}
    return map_leaves(batch, lambda leaf, key: copy.deepcopy(leaf, memo))


def _dicts(module: nn.Module) -> list[Any]:
    own = vars(module)
    return [own, *(own[name] for name in ("_parameters", "_buffers", "_modules") if name in own)]


def _refill(live: Any, kept: dict[str, Any]) -> None:
    if isinstance(live, dict):
        live.clear()
        live.update(kept)
        return
    for name, value in kept.items():  # a scripted module's, whose names stay
        if live[name] is not value:
            live[name] = value


def _put_back(tensor: Tensor, as_it_was: Tensor, requires_grad: bool, grad_fn: Any) -> None:
    if not is_traceable_wrapper_subclass(tensor):
        tensor.data = as_it_was  # its shape and its memory, which a resize or another .data may have changed
    if tensor.grad_fn is not grad_fn:
        tensor.detach_()
    if tensor.requires_grad != requires_grad:
        tensor.requires_grad_(requires_grad)


def _storages(tensor: Tensor) -> Iterator[UntypedStorage]:
    """The memory in which the values of a tensor are, of whatever kind."""
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            if isinstance(part := getattr(tensor, name), Tensor):  # a DTensor names its mesh as well
                yield from _storages(part)
    elif tensor.layout is not torch.strided:
        yield (tensor._values() if tensor.layout is torch.sparse_coo else tensor.values()).untyped_storage()
    elif not tensor.is_meta:
        yield tensor.untyped_storage()


def _bytes(storage: UntypedStorage) -> Tensor:
    # Bytes are written past autograd: a backward under way may hold the tensors, which are the same again then.
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _copy_of(storage: UntypedStorage, before: Tensor | None) -> Tensor:
    now = _bytes(storage)
    return before if before is not None and torch.equal(now, before) else now.clone()


def _fill(storage: UntypedStorage, kept: Tensor) -> None:
    if storage.nbytes() != kept.numel():
        storage.resize_(kept.numel())
    if not torch.equal(_bytes(storage), kept):  # else it may be memory that nobody may write
        _bytes(storage).copy_(kept)


def _stream(value: Any) -> Callable[[], Any] | None:
    """The call that brings a random generator back to where it is now; ``None`` for anything else."""
    if isinstance(value, torch.Generator):
        return partial(value.set_state, value.get_state())
    if isinstance(value, np.random.RandomState):
        return partial(value.set_state, value.get_state())
    if isinstance(value, np.random.Generator):
        return partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return partial(value.setstate, value.getstate())
    return None


def _global_streams(trainer: Trainer) -> list[Callable[[], Any]]:
    device = trainer.device.rng_state()
    return [
        partial(random.setstate, random.getstate()),
        partial(np.random.set_state, np.random.get_state()),
        partial(torch.set_rng_state, torch.get_rng_state()),
        *([] if device is None else [partial(trainer.device.set_rng_state, device)]),
    ]
