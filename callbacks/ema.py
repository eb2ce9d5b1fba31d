"""An average of the weights, moved by updates that landed and by no others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..strategies.checks import number, true_or_false
from ..strategies.errors import CallbackError, CheckpointError
from .callback import Callback

if TYPE_CHECKING:
    from ..trainer.outcome import Outcome
    from ..trainer.trainer import Trainer


class EMA(Callback):
    """Keep an exponential moving average of the weights that the optimizers hold, on the device, without reading it.

    It begins with the weights of the fit's start. Checkpoints hold the averaged policy beside the raw one, in
    ``pretrained_model_ema/``, and ``policyfit.load(checkpoint, weights="ema")`` loads it alone. Buffers are not
    averaged. Weights in 16 bits are averaged in float32, in which the small moves of an average are not lost.

    Args:
        decay: The part of the average that stays at each landed update, between 0 and 1.
        warmup: Begin with less, ``(1 + n) / (10 + n)`` after n steps, so that the first weights fade sooner.
        evaluate: Validate and roll out with the averaged weights, also after the run, unless the weights were changed
            since. The raw ones come back afterwards, whatever happens.

    Raises:
        ConfigError: An argument is not of its kind or out of range.

    Source: Polyak and Juditsky (1992), "Acceleration of Stochastic Approximation by Averaging"; the warm-up is that
    of TensorFlow's ExponentialMovingAverage.
    """

    def __init__(self, decay: float = 0.999, *, warmup: bool = True, evaluate: bool = True) -> None:
        number("EMA.decay", decay, above=0, below=1, remedy="Use 0.999 to average over about a thousand steps.")
        true_or_false("EMA.warmup", warmup)
        true_or_false("EMA.evaluate", evaluate)
        self.decay, self.warmup, self.evaluate = decay, warmup, evaluate
        #: The steps that the average has seen.
        self.steps = 0
        self._parameters: list[nn.Parameter] = []
        self._averages: list[Tensor] = []
        self._resumed = False
        #: Of a parameter or average, the part that is on this rank.
        self._here: Callable[[Tensor], Tensor] = lambda tensor: tensor
        #: The weights at the end of the run, to which the average belongs.
        self._last: list[Tensor] | None = None

    def state_dict(self) -> dict[str, Any]:
        """How many steps it has seen; the average itself stands in ``pretrained_model_ema/``."""
        return {"steps": self.steps} if self._averages else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back the count."""
        self.steps, self._resumed = int(state["steps"]), True

    def setup(self, trainer: Trainer, policy: nn.Module, stage: str) -> None:
        """Forget the run before, if this is a fit.

        Raises:
            CallbackError: Another EMA is among the callbacks.
        """
        if stage != "fit":
            return
        if any(isinstance(other, EMA) and other is not self for other in trainer.callbacks):
            raise CallbackError(
                "A run keeps one EMA: a checkpoint has one place for averaged weights, and so has a validation.\n"
                "Remove the others from callbacks."
            )
        self._parameters, self._averages, self._last = [], [], None

    def on_save_checkpoint(self, trainer: Trainer, policy: nn.Module, checkpoint: dict[str, Any]) -> None:
        """Add the policy with averaged weights."""
        if self._averages:
            with self._as_parameters():
                model = policy.state_dict()
            if trainer.distribution.is_sharded:  # a shard's data cannot be another's
                model.update(self._by_name(policy))
            checkpoint.setdefault("models", {})["ema"] = model

    def on_load_checkpoint(self, trainer: Trainer, policy: nn.Module, checkpoint: dict[str, Any]) -> None:
        """Take back the average.

        Raises:
            CheckpointError: The checkpoint has a count and no average.
        """
        if not self._resumed:
            found = "has no average of weights, so it begins"
            if "ema" in checkpoint.get("models", {}):
                found = f"has an average of a callback other than {self.state_key!r}, so this one's begins"
            message = f"the checkpoint {found} anew with those of step {trainer.step}"
            trainer.event("warning", source="EMA", message=message)
            return
        saved = checkpoint.get("models", {}).get("ema")
        if saved is None:
            raise CheckpointError(
                "The checkpoint says that it has averaged weights, but there are none, so the average would begin anew."
                "\nResume without EMA, or from another checkpoint."
            )
        self._begin(trainer, policy)
        if trainer.distribution.is_sharded:
            for name, average in self._by_name(policy).items():
                self._here(average).copy_(self._here(saved[name]))
            return
        with self._as_parameters():
            policy.load_state_dict(saved)

    def on_fit_start(self, trainer: Trainer, policy: nn.Module) -> None:
        """Begin with the weights as they are, unless it goes on with the average of a checkpoint."""
        if not self._resumed:
            self.steps = 0
            self._begin(trainer, policy)

    def on_update_end(self, trainer: Trainer, policy: nn.Module, outcome: Outcome) -> None:
        """Move the average towards the weights of a landed update."""
        if not outcome.landed:
            return
        decay = min(self.decay, (1 + self.steps) / (10 + self.steps)) if self.warmup else self.decay
        with torch.no_grad():
            averages = [self._here(average) for average in self._averages]
            pairs = zip(map(self._here, self._parameters), averages, strict=True)
            weights = [p if p.dtype == average.dtype else p.to(average.dtype) for p, average in pairs]
            torch._foreach_lerp_(averages, weights, 1.0 - decay)
        self.steps += 1

    @contextmanager
    def around_evaluation(self, trainer: Trainer, policy: nn.Module) -> Iterator[None]:
        """Let the averaged weights stand in for the raw ones, in the parameters' own memory."""
        own = {id(p) for p in policy.parameters()}  # another policy, or one around the run's
        if not self.evaluate or not any(id(p) in own for p in self._parameters) or self._changed_since(trainer):
            yield
            return
        raw = self._last or self._weights()
        try:
            self._fill_parameters([self._here(average) for average in self._averages])
            yield
        finally:
            self._fill_parameters(raw)

    def on_fit_end(self, trainer: Trainer, policy: nn.Module) -> None:
        """Note which weights the average belongs to, for what is evaluated after the run."""
        self._last = self._weights()

    def teardown(self, trainer: Trainer, policy: nn.Module, stage: str) -> None:
        """The same for a run that failed; the next one is another, unless a state is loaded for it."""
        if stage == "fit":
            self._resumed = False
            self._last = self._last or self._weights()

    def _begin(self, trainer: Trainer, policy: nn.Module) -> None:
        held = {id(p) for optimizer in trainer.optimizers for group in optimizer.param_groups for p in group["params"]}
        self._here = trainer.distribution.local
        trainer.distribution.release()  # else what a forward has left gathered is not among the policy's parameters
        self._parameters = [p for p in policy.parameters() if id(p) in held]
        self._averages = [
            p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True) for p in self._parameters
        ]

    def _changed_since(self, trainer: Trainer) -> bool:
        if self._last is None or all(map(_same, map(self._here, self._parameters), self._last)):
            return False
        message = "the weights were changed after the run, so they are used as they are, and not the run's average"
        trainer.event("warning", source="EMA", message=message)
        return True

    def _weights(self) -> list[Tensor]:
        return [self._here(p.detach()).clone() for p in self._parameters]

    def _fill_parameters(self, values: list[Tensor]) -> None:
        # Through .data: a backward under way may hold the weights, which are the same again when it goes on.
        torch._foreach_copy_([self._here(p.data) for p in self._parameters], values)
        torch.clear_autocast_cache()  # else an autocast around this would go on with casts of the other weights

    def _by_name(self, policy: nn.Module) -> dict[str, Tensor]:
        averages = {id(p): average for p, average in zip(self._parameters, self._averages, strict=True)}
        named = policy.named_parameters(remove_duplicate=False)
        return {name: averages[id(p)] for name, p in named if id(p) in averages}

    @contextmanager
    def _as_parameters(self) -> Iterator[None]:
        """The averages as the parameters themselves, in their own type, for the policy's state dict alone."""
        raw = [p.data for p in self._parameters]
        try:
            for parameter, average in zip(self._parameters, self._averages, strict=True):
                parameter.data = average
            yield
        finally:
            for parameter, weights in zip(self._parameters, raw, strict=True):
                parameter.data = weights


def _same(parameter: Tensor, weights: Tensor) -> bool:
    now = parameter.detach()
    return now.dtype == weights.dtype and torch.equal(now.to(weights.device), weights)
