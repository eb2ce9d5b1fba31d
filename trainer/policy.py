"""The dialects a policy can speak, told apart once; the rest of the trainer sees one adapter.

    plain       forward(batch) gives the loss, or (loss, metrics)
    Lightning   training_step, validation_step, configure_optimizers, train_dataloader, val_dataloader, self.log
    LeRobot     forward(batch) gives (loss, dict), get_optim_params, presets, update()   (its place is `adapt`)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer

from ..strategies.errors import ConfigError
from .optimizer import Schedule, default_optimizer, read_configured

Log = Callable[[str, Any], None]
Metrics = Mapping[str, Any]
NO_METRICS: Metrics = {}


class PolicyAdapter(ABC):
    """One policy, called in its own dialect.

    ``policy`` is what the user gave; ``module`` what runs, which a distribution strategy may have wrapped.
    """

    dialect: str
    default_interval: Literal["step", "epoch"] = "step"

    def __init__(self, policy: nn.Module) -> None:
        self.policy = policy
        self.module = policy

    @abstractmethod
    def training_step(self, batch: Any, index: int) -> tuple[Tensor | None, Metrics]:
        """The loss of a micro-batch, a scalar, and what else the policy reports.

        ``None`` instead of a loss that has no gradient: the micro-batch then takes no part in the update.

        Raises:
            ConfigError: What came back is not a loss.
        """

    @abstractmethod
    def validation_step(self, batch: Any, index: int) -> Metrics:
        """What the policy reports for a validation batch, ``loss`` among it; under no_grad, in eval mode."""

    def attach(self, log: Log) -> None:
        """Before the first batch: the policy may report through ``log`` from now on."""

    def detach(self) -> None:
        """After the run: leave the policy as it came."""

    def after_step(self) -> None:
        """An update landed and was settled."""

    def optimizers(self) -> tuple[list[Optimizer], list[Schedule], str]:
        """Optimizers, schedules, and where they come from."""
        if not callable(getattr(self.policy, "configure_optimizers", None)):
            return [default_optimizer(self.policy)], [], "AdamW, since neither the policy nor the run names one"
        configured = self.policy.configure_optimizers()  # type: ignore[operator]
        if configured is None:
            raise ConfigError(
                "configure_optimizers() returned None, so nothing would move the weights. Return an optimizer."
            )
        optimizers, schedules = read_configured(configured, self.default_interval)
        return optimizers, schedules, f"{type(self.policy).__name__}.configure_optimizers()"

    def own_data(self, name: Literal["train_dataloader", "val_dataloader"]) -> Any:
        """The policy's own data, or ``None`` when it brings none."""
        method = getattr(self.policy, name, None)
        return method() if callable(method) else None


class PlainPolicy(PolicyAdapter):
    """``forward(batch)`` gives the loss, or ``(loss, metrics)``."""

    dialect = "plain"

    def training_step(self, batch: Any, index: int) -> tuple[Tensor | None, Metrics]:
        """Call the module on the batch."""
        result = self.module(batch)
        loss, metrics = result if isinstance(result, tuple) and len(result) == 2 else (result, NO_METRICS)
        return checked_loss(loss, self.policy, "forward"), metrics or NO_METRICS

    def validation_step(self, batch: Any, index: int) -> Metrics:
        """The same call; the loss becomes one of the metrics."""
        result = self.module(batch)
        loss, metrics = result if isinstance(result, tuple) and len(result) == 2 else (result, NO_METRICS)
        return {**(metrics or NO_METRICS), "loss": loss}


class LightningPolicy(PolicyAdapter):
    """``training_step(batch, batch_idx)`` and its company, without a need for Lightning itself.

    A schedule that does not say counts epochs, as it does there. Hooks of the module that would not be called
    are refused by name rather than left out.
    """

    dialect = "Lightning"
    default_interval: Literal["step", "epoch"] = "epoch"

    def __init__(self, policy: nn.Module) -> None:
        super().__init__(policy)
        if getattr(policy, "automatic_optimization", True) is False:
            raise ConfigError(
                f"{type(policy).__name__} sets automatic_optimization=False, but the update is the Trainer's: it is "
                "what keeps precision, skips and resume exact.\nReturn the loss from training_step instead."
            )
        own = [name for name in _UNCALLED if _defines(policy, name)]
        if own:
            raise ConfigError(
                f"{type(policy).__name__} defines {', '.join(own)}, which the Trainer would never call.\n"
                "Move it into a policyfit.Callback (the hooks have the same names); the Trainer clips by clip_norm "
                "and clip_value, and schedules advance by their interval."
            )
        self._log: Log | None = None

    def attach(self, log: Log) -> None:
        """Give the module ``self.log`` and ``self.log_dict``."""
        self._log = log

        def log_one(name: str, value: Any, *_: Any, **__: Any) -> None:
            log(name, value)

        def log_dict(dictionary: Mapping[str, Any], *_: Any, **__: Any) -> None:
            for name, value in dictionary.items():
                log(name, value)

        vars(self.policy).update(log=log_one, log_dict=log_dict)

    def detach(self) -> None:
        """Take them away again."""
        for name in ("log", "log_dict"):
            vars(self.policy).pop(name, None)

    def training_step(self, batch: Any, index: int) -> tuple[Tensor | None, Metrics]:
        """A tensor, a dict with ``loss``, or ``None`` to leave the micro-batch out."""
        result = self.policy.training_step(batch, index)  # type: ignore[operator]
        if result is None:
            return None, NO_METRICS
        if isinstance(result, Mapping):
            if "loss" not in result:
                raise ConfigError(f"training_step returned a dict without 'loss': it has {sorted(map(str, result))}.")
            return checked_loss(result["loss"], self.policy, "training_step"), NO_METRICS
        return checked_loss(result, self.policy, "training_step"), NO_METRICS

    def validation_step(self, batch: Any, index: int) -> Metrics:
        """What ``validation_step`` returned; what it logged goes its own way."""
        result = self.policy.validation_step(batch, index)  # type: ignore[operator]
        if isinstance(result, Mapping):
            return {str(k): v for k, v in result.items()}
        return NO_METRICS if result is None else {"loss": result}


# Source: lightning.pytorch.LightningModule. What a subclass writes here has an effect there, and none here.
_UNCALLED = (
    "on_fit_start", "on_fit_end", "on_train_start", "on_train_end", "on_train_epoch_start", "on_train_epoch_end",
    "on_train_batch_start", "on_train_batch_end", "on_validation_start", "on_validation_end",
    "on_validation_epoch_start", "on_validation_epoch_end", "on_validation_batch_start", "on_validation_batch_end",
    "on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_before_zero_grad",
    "on_save_checkpoint", "on_load_checkpoint", "optimizer_step", "optimizer_zero_grad", "backward",
    "configure_gradient_clipping", "configure_model", "configure_callbacks", "lr_scheduler_step",
    "transfer_batch_to_device", "on_before_batch_transfer", "on_after_batch_transfer", "setup", "prepare_data",
)  # fmt: skip


def _defines(policy: nn.Module, name: str) -> bool:
    """Whether a class of the user's own, not of Lightning or torch, defines the method."""
    for cls in type(policy).__mro__:
        if name in vars(cls):
            return not cls.__module__.partition(".")[0] in ("lightning", "pytorch_lightning", "lightning_fabric", "torch")
    return False


def adapt(policy: Any) -> PolicyAdapter:
    """The adapter for the dialect that the policy speaks.

    Raises:
        ConfigError: It is not an ``nn.Module``, or has nothing to train by.
    """
    if not isinstance(policy, nn.Module):
        hint = " Pass an instance of it." if isinstance(policy, type) and issubclass(policy, nn.Module) else ""
        raise ConfigError(f"The policy must be a torch.nn.Module, got {policy!r}.{hint}")
    if callable(getattr(policy, "training_step", None)):
        return LightningPolicy(policy)
    if type(policy).forward is nn.Module.forward:
        raise ConfigError(
            f"{type(policy).__name__} has neither forward nor training_step.\n"
            "Write forward(batch), which gives the loss or (loss, metrics)."
        )
    return PlainPolicy(policy)


def checked_loss(loss: Any, policy: nn.Module, method: str) -> Tensor | None:
    """The loss if it is one; ``None`` if it has no gradient.

    Raises:
        ConfigError: It is not a tensor, or not a scalar.
    """
    if not isinstance(loss, Tensor):
        raise ConfigError(
            f"{type(policy).__name__}.{method} must give a loss, a scalar tensor, or (loss, metrics); "
            f"got {type(loss).__name__}.\nDo not call .item() or float() on it: that drops the gradient."
        )
    if loss.dim():
        raise ConfigError(
            f"{type(policy).__name__}.{method} must give a scalar loss, got shape {tuple(loss.shape)}.\n"
            "Reduce it, for instance with loss.mean()."
        )
    return loss if loss.requires_grad else None
