"""Where an overflow was: the parameters it reached, and on request the module in which it began."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .callback import Callback

if TYPE_CHECKING:
    from ..trainer.trainer import Trainer
    from ..trainer.update import Outcome

_SHOWN = 10


class OverflowReport(Callback):
    """One event for each skipped update: the parameters and modules whose gradients were not finite, worst first.

    The names come from the norms of that very update, which its guard has computed anyway; a healthy step pays
    nothing.

    Args:
        replay: Also compute the window of a skipped update once more, with hooks on every module, and name the first
            one whose output or gradient went non-finite. It keeps the window's batches on the device and settles every
            update at once, so it is for the hunt and not for every run.
    """

    def __init__(self, replay: bool = False) -> None:
        self.replay = self.needs_outcome_now = replay
        self._window: list[_Kept] = []

    def on_train_batch_start(self, trainer: Trainer, policy: nn.Module, batch: Any, batch_idx: int) -> None:
        """Keep what the forward is about to use."""
        if self.replay:
            self._window.append(_Kept(trainer, policy, batch, batch_idx))

    def on_update_end(self, trainer: Trainer, policy: nn.Module, outcome: Outcome) -> None:
        """Report a skip."""
        window, self._window = self._window, []
        if outcome.landed or outcome.reason == "no_gradients":
            return
        names = outcome.non_finite_parameters() or ["(none alone: the norm of all together overflowed)"]
        fields: dict[str, Any] = {
            "update": outcome.update,
            "reason": outcome.reason,
            "parameters": names[:_SHOWN],
            "modules": list(dict.fromkeys(name.rpartition(".")[0] or "(the policy)" for name in names))[:_SHOWN],
        }
        where = ", ".join(fields["modules"][:3]) + (" ..." if len(fields["modules"]) > 3 else "")
        message = f"{outcome.reason} in the gradients of {len(names)} parameters, in {where}; worst: {names[0]}"
        if window:
            fields["origin"] = next(filter(None, (kept.origin(trainer, policy) for kept in window)), None)
            message += f"; it began in {fields['origin'] or 'nothing that a replay shows'}"
        trainer.event("overflow", message=message, **fields)


class _Kept:
    """A micro-batch and the state of everything that its forward depends on beside the weights."""

    def __init__(self, trainer: Trainer, policy: nn.Module, batch: Any, index: int) -> None:
        self.batch, self.index = batch, index
        self.scale = None if trainer.precision.scale is None else trainer.precision.scale.clone()
        self.streams = _streams(trainer)
        self.buffers = {name: buffer.clone() for name, buffer in policy.named_buffers()}

    def origin(self, trainer: Trainer, policy: nn.Module) -> str | None:
        """The first module whose output, or else whose gradient, is not finite; ``None`` if all is finite.

        Weights were not moved by the skipped update, so this is the forward and backward that overflowed.
        """
        watch = _Watch(policy)
        with _as_before(trainer, policy, self.buffers, self.streams), watch.hooks():
            loss = trainer.training_loss(self.batch, self.index)
            if loss is None:
                return None
            (loss if self.scale is None else loss * self.scale).backward()  # type: ignore[no-untyped-call]
            where = watch.origin()
        if where is None and not bool(loss.isfinite()):
            where = "the loss itself"
        return None if where is None else f"{where} (micro-batch {self.index} of the epoch)"


class _Watch:
    """Follows one forward and backward through the modules. Every look waits for the device."""

    def __init__(self, policy: nn.Module) -> None:
        self._names = {module: name or "(the policy)" for name, module in policy.named_modules()}
        self._forward: str | None = None
        self._backward: list[tuple[nn.Module, bool]] = []

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Hooks on every module while this is open."""
        handles = [m.register_forward_hook(self._after_forward) for m in self._names]
        handles += [m.register_full_backward_hook(self._after_backward) for m in self._names if not list(m.children())]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _after_forward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if self._forward is None and _finite(inputs) and not _finite(output):
            self._forward = f"the output of {self._names[module]}"

    def _after_backward(self, module: nn.Module, grad_input: Any, grad_output: Any) -> None:
        if _finite(grad_output):
            self._backward.append((module, _finite(grad_input)))
        elif not self._backward:
            self._backward.append((module, True))  # it came in from above: no module made it

    def origin(self) -> str | None:
        """Where it began; gradients of parameters are looked at last, when they are all there."""
        if self._forward is not None:
            return self._forward
        for module, clean in self._backward:
            own = [p.grad for p in module.parameters(recurse=False) if p.grad is not None]
            if not clean or not _finite(own):
                return f"the gradient of {self._names[module]}"
        return None


@contextmanager
def _as_before(trainer: Trainer, policy: nn.Module, buffers: dict[str, Tensor], streams: Any) -> Iterator[None]:
    """Buffers and random streams as they were; afterwards they and the gradients are as they are now."""
    now, now_streams = {name: b.clone() for name, b in policy.named_buffers()}, _streams(trainer)
    gradients = [(p, p.grad) for p in policy.parameters()]
    try:
        _put(policy, buffers, trainer, streams)
        for parameter, _ in gradients:
            parameter.grad = None
        with trainer.collecting(lambda name, value: None):
            yield
    finally:
        _put(policy, now, trainer, now_streams)
        for parameter, gradient in gradients:
            parameter.grad = gradient


def _streams(trainer: Trainer) -> tuple[Tensor, Tensor | None]:
    return torch.get_rng_state(), trainer.device.rng_state()


def _put(
    policy: nn.Module, buffers: dict[str, Tensor], trainer: Trainer, streams: tuple[Tensor, Tensor | None]
) -> None:
    with torch.no_grad():
        for name, buffer in policy.named_buffers():
            buffer.copy_(buffers[name])
    torch.set_rng_state(streams[0])
    if streams[1] is not None:
        trainer.device.set_rng_state(streams[1])


def _finite(tree: Any) -> bool:
    return all(bool(t.isfinite().all()) for t in _tensors(tree) if t.is_floating_point())


def _tensors(tree: Any) -> Iterable[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from _tensors(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _tensors(value)
