"""An average of the weights, moved by updates that landed and by no others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..strategies.errors import CheckpointError, ConfigError
from .callback import Callback

if TYPE_CHECKING:
    from ..trainer.trainer import Trainer
    from ..trainer.update import Outcome


class EMA(Callback):
    """Keep an exponential moving average of the trainable weights, on their device and without reading it.

    Checkpoints hold the averaged policy beside the raw one, in ``pretrained_model_ema/``, and
    ``policyfit.load(checkpoint, weights="ema")`` loads it alone. Buffers are not averaged.

    Args:
        decay: The part of the average that stays at each landed update, 0 to 1 without the ends.
        warmup: Begin with less, ``(1 + n) / (10 + n)`` after n updates, so that the first weights fade sooner.
        evaluate: Validate and roll out with the averaged weights; the raw ones come back afterwards, whatever happens.

    Source: Polyak and Juditsky (1992), "Acceleration of Stochastic Approximation by Averaging"; the warm-up is that
    of TensorFlow's ExponentialMovingAverage.
    """

    def __init__(self, decay: float = 0.999, *, warmup: bool = True, evaluate: bool = True) -> None:
        if not 0.0 < decay < 1.0:
            raise ConfigError(f"EMA.decay must lie between 0 and 1, got {decay!r}.")
        self.decay, self.warmup, self.evaluate = decay, warmup, evaluate
        self.updates = 0
        self._average: dict[str, Tensor] = {}
        self._weights: list[Tensor] = []
        self._resumed = False

    def state_dict(self) -> dict[str, Any]:
        """How many updates it has seen; the average itself stands in ``pretrained_model_ema/``."""
        return {"updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back the count."""
        self.updates, self._resumed = int(state["updates"]), True

    def on_save_checkpoint(self, trainer: Trainer, policy: nn.Module, checkpoint: dict[str, Any]) -> None:
        """Add the policy with averaged weights."""
        checkpoint.setdefault("models", {})["ema"] = {**policy.state_dict(), **self._average}

    def on_load_checkpoint(self, trainer: Trainer, policy: nn.Module, checkpoint: dict[str, Any]) -> None:
        """Take back the average.

        Raises:
            CheckpointError: The checkpoint has a count and no average, or one of other parameters.
        """
        if not self._resumed:  # the run that is resumed had no EMA: the average begins with its weights
            return
        saved = checkpoint.get("models", {}).get("ema")
        names = [name for name, _ in _trainable(policy)]
        if saved is None or any(name not in saved for name in names):
            raise CheckpointError(
                "The checkpoint has no averaged weights for this policy, so the average would begin anew.\n"
                "Resume without EMA, or from a checkpoint that was saved with it."
            )
        self._average = {name: saved[name] for name in names}

    def on_fit_start(self, trainer: Trainer, policy: nn.Module) -> None:
        """Begin with the weights as they are, or go on with the average of the checkpoint."""
        named = dict(_trainable(policy))
        if not self._resumed:
            self.updates, self._average = 0, {name: p.detach().clone() for name, p in named.items()}
        else:
            self._average = {name: self._average[name].to(p.device) for name, p in named.items()}
        self._weights = [p.detach() for p in named.values()]
        self._resumed = False

    def on_update_end(self, trainer: Trainer, policy: nn.Module, outcome: Outcome) -> None:
        """Move the average towards the weights of a landed update."""
        if outcome.landed:
            decay = min(self.decay, (1 + self.updates) / (10 + self.updates)) if self.warmup else self.decay
            torch._foreach_lerp_(list(self._average.values()), self._weights, 1.0 - decay)
            self.updates += 1

    @contextmanager
    def evaluating(self, trainer: Trainer, policy: nn.Module) -> Iterator[None]:
        """Let the averaged weights stand in for the raw ones."""
        if not (self.evaluate and self._average):
            yield
            return
        parameters = [p for _, p in _trainable(policy)]
        raw = [p.data for p in parameters]
        try:
            for parameter, average in zip(parameters, self._average.values(), strict=True):
                parameter.data = average
            yield
        finally:
            for parameter, weights in zip(parameters, raw, strict=True):
                parameter.data = weights


def _trainable(policy: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in policy.named_parameters() if p.requires_grad]
