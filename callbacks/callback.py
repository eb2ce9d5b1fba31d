"""``Callback``, the class users extend, and ``CallbackList``, which binds the hooks of several once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ..strategies.errors import CallbackError
from .hooks import HOOKS

if TYPE_CHECKING:
    from ..trainer.outcome import Outcome
    from ..trainer.rollout import RolloutReport
    from ..trainer.trainer import Trainer

Bound = Callable[..., None]


class Callback:
    """Something that acts at moments of a run. Override what you need; the rest costs nothing.

    Callbacks observe the trainer through its read-only properties and may call its commands: ``stop``,
    ``save_checkpoint``, ``evaluate``, ``log`` and ``event``. When each hook comes: ``hooks.py``.

    Example:
        >>> class Curriculum(Callback):
        ...     def due(self, step: int) -> bool:
        ...         return step % 500 == 0
        ...
        ...     def on_due(self, trainer, policy):
        ...         policy.horizon += 1
    """

    #: Settle every update at once, so that ``on_update_end`` comes before anything else: one wait per update.
    needs_outcome_now = False

    #: Come last in ``on_due``: a save is to know what the others do at its step.
    due_last = False

    @property
    def state_key(self) -> str:
        """The name of this callback's state in a checkpoint; two callbacks of a run cannot share it."""
        return type(self).__qualname__

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs: JSON values and tensors, nested as you like. ``{}`` for nothing."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what ``state_dict`` gave; comes before ``on_fit_start``."""

    def due(self, step: int) -> bool:
        """Whether ``on_due`` is to come at this step. A pure function of step, settings and clock: asked often."""
        return False

    def around_evaluation(self, trainer: Trainer, policy: nn.Module) -> AbstractContextManager[None]:
        """A context around every validation and rollout: change the policy for it, and put it back whatever happens."""
        return nullcontext()

    def setup(self, trainer: Trainer, policy: nn.Module, stage: str) -> None:
        """Everything is in place and nothing has run. ``stage`` is "fit", "validate" or "evaluate"."""

    def on_fit_start(self, trainer: Trainer, policy: nn.Module) -> None:
        """The run begins, or goes on: counters and states are already restored."""

    def on_train_epoch_start(self, trainer: Trainer, policy: nn.Module) -> None:
        """A pass over the data begins."""

    def on_train_batch_start(self, trainer: Trainer, policy: nn.Module, batch: Any, batch_idx: int) -> None:
        """A micro-batch is on the device. ``batch_idx`` counts within the epoch."""

    def on_before_backward(self, trainer: Trainer, policy: nn.Module, loss: Tensor) -> None:
        """``loss`` is the micro-batch's share of its window's loss, before any loss scale."""

    def on_after_backward(self, trainer: Trainer, policy: nn.Module) -> None:
        """Gradients are there, scaled under fp16."""

    def on_before_optimizer_step(self, trainer: Trainer, policy: nn.Module, optimizer: Optimizer) -> None:
        """Gradients are unscaled and not yet clipped. What is edited here is checked again."""

    def on_before_zero_grad(self, trainer: Trainer, policy: nn.Module, optimizer: Optimizer) -> None:
        """The update was applied; the last moment at which gradients can be seen (clipped)."""

    def on_train_batch_end(
        self, trainer: Trainer, policy: nn.Module, outputs: Mapping[str, Any], batch: Any, batch_idx: int
    ) -> None:
        """A micro-batch is done, its update not yet settled. ``outputs`` holds ``loss`` (detached) and metrics."""

    def on_update_end(self, trainer: Trainer, policy: nn.Module, outcome: Outcome) -> None:
        """An update was settled: it landed or was skipped. Possibly during the next window: observe only."""

    def on_log(self, trainer: Trainer, policy: nn.Module, record: Mapping[str, Any]) -> None:
        """A record of metrics (``step`` and values) or an event (``step``, ``event`` and its fields)."""

    def on_due(self, trainer: Trainer, policy: nn.Module) -> None:
        """A step at which ``due`` said True, between two windows, after its logging and validation."""

    def on_train_epoch_end(self, trainer: Trainer, policy: nn.Module) -> None:
        """A pass over the data is done and every update of it settled."""

    def on_validation_start(self, trainer: Trainer, policy: nn.Module) -> None:
        """The policy is in eval mode; its modes and all random streams come back afterwards."""

    def on_validation_batch_start(
        self, trainer: Trainer, policy: nn.Module, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """A validation batch is on the device."""

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        policy: nn.Module,
        outputs: Mapping[str, Any],
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """``outputs`` holds what the policy reported for this batch."""

    def on_validation_end(self, trainer: Trainer, policy: nn.Module) -> None:
        """``trainer.metrics`` holds the ``val/...`` means."""

    def on_rollout_start(self, trainer: Trainer, policy: nn.Module) -> None:
        """The policy is about to act in an environment."""

    def on_rollout_end(self, trainer: Trainer, policy: nn.Module, report: RolloutReport) -> None:
        """The episodes are over and the environment is closed."""

    def on_save_checkpoint(self, trainer: Trainer, policy: nn.Module, checkpoint: dict[str, Any]) -> None:
        """Add JSON values or tensors to ``checkpoint``; under ``models``, by name, whole state dicts of the policy."""

    def on_load_checkpoint(self, trainer: Trainer, policy: nn.Module, checkpoint: dict[str, Any]) -> None:
        """``checkpoint`` is what ``on_save_checkpoint`` left; weights and states are already restored."""

    def on_fit_end(self, trainer: Trainer, policy: nn.Module) -> None:
        """The run completed or was stopped (``trainer.status`` says which), or ranks failed and save what all have."""

    def on_exception(self, trainer: Trainer, policy: nn.Module, exception: BaseException) -> None:
        """The run failed or was interrupted; the exception goes on its way afterwards."""

    def teardown(self, trainer: Trainer, policy: nn.Module, stage: str) -> None:
        """Always the last call: put back what ``setup`` changed."""


class CallbackList:
    """The callbacks of one run, with each hook bound once.

    ``bound["on_log"]`` and so on are tuples of bound methods, empty where nobody overrides the hook.

    Raises:
        CallbackError: An object is not a ``Callback``, defines a hook that does not exist, or shares its
            ``state_key`` with another.
    """

    def __init__(self, callbacks: Iterable[Callback]) -> None:
        self._callbacks = tuple(callbacks)
        for callback in self._callbacks:
            _check(callback)
        keys = [c.state_key for c in self._callbacks]
        for key in keys:
            if keys.count(key) > 1:
                raise CallbackError(
                    f"Two callbacks of this run keep their state under {key!r}, so one would overwrite the other.\n"
                    "Remove one, or give one of them another state_key."
                )
        self.bound: dict[str, tuple[Bound, ...]] = {
            hook: tuple(getattr(c, hook) for c in self._callbacks if _overrides(c, hook)) for hook in HOOKS
        }
        self.with_due = tuple(
            sorted((c for c in self._callbacks if _overrides(c, "due")), key=lambda callback: callback.due_last)
        )
        self._around_evaluation = tuple(c for c in self._callbacks if _overrides(c, "around_evaluation"))
        self.need_outcome_now = any(c.needs_outcome_now for c in self._callbacks)

    def __iter__(self) -> Iterator[Callback]:
        return iter(self._callbacks)

    def __len__(self) -> int:
        return len(self._callbacks)

    def call(self, hook: str, *arguments: Any) -> None:
        """Call one hook of every callback that has it, in list order."""
        for bound in self.bound[hook]:
            bound(*arguments)

    @contextmanager
    def around_evaluation(self, trainer: Trainer, policy: nn.Module) -> Iterator[None]:
        """The contexts of all callbacks that have one, entered in list order."""
        with ExitStack() as stack:
            for callback in self._around_evaluation:
                stack.enter_context(callback.around_evaluation(trainer, policy))
            yield

    def state_dict(self) -> dict[str, Any]:
        """The states of all callbacks that have one, by ``state_key``."""
        states = {c.state_key: c.state_dict() for c in self._callbacks}
        return {key: state for key, state in states.items() if state}

    def load_state_dict(self, states: Mapping[str, Any]) -> list[str]:
        """Give every callback its state back; returns the keys for which this run has no callback."""
        by_key = {c.state_key: c for c in self._callbacks}
        for key, state in states.items():
            if key in by_key:
                by_key[key].load_state_dict(state)
        return sorted(set(states) - set(by_key))


def _overrides(callback: Callback, name: str) -> bool:
    return getattr(type(callback), name) is not getattr(Callback, name) or name in vars(callback)


def _check(callback: object) -> None:
    if not isinstance(callback, Callback):
        hint = "Pass an instance: add ()." if isinstance(callback, type) else "Derive it from policyfit.Callback."
        raise CallbackError(f"callbacks must hold policyfit callbacks, got {callback!r}.\n{hint}")
    for name in dir(type(callback)):
        if name.startswith("on_") and name not in HOOKS and callable(getattr(type(callback), name)):
            near = get_close_matches(name, HOOKS, n=1)
            meant = f" Did you mean {near[0]}?" if near else ""
            raise CallbackError(
                f"{type(callback).__name__}.{name} is not a hook of policyfit, so it would never be called.{meant}\n"
                "The hooks are listed in policyfit/callbacks/hooks.py; start helper methods with an underscore."
            )
