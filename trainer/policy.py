"""The dialects a policy can speak, told apart once; the rest of the trainer sees one adapter.

plain       forward(batch) gives the loss, or (loss, metrics)
Lightning   training_step, validation_step, configure_optimizers, train_dataloader, val_dataloader, self.log
LeRobot     forward(batch) gives (loss, dict), get_optim_params, presets, update()   (its place is `adapt`)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from inspect import ismethod, signature, unwrap
from numbers import Number
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from ..strategies.errors import ConfigError
from .describe import class_of
from .optimizer import default_optimizer, read_configured
from .schedule import Schedule

Log = Callable[[str, Any], None]
Metrics = Mapping[str, Any]
NO_METRICS: Metrics = {}
# By their names: the last takes more than a second to import.
_WRAPPERS = ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel")


class PolicyAdapter(ABC):
    """One policy, called in its own dialect.

    ``policy`` is what the user gave; ``module`` what a distribution strategy made of it, through which the loop calls.
    With ``compiles`` it runs compiled from ``attach`` to ``detach``.
    """

    dialect: str
    default_interval: Literal["step", "epoch"] = "step"

    def __init__(self, policy: nn.Module) -> None:
        self.policy = policy
        self.module = policy
        self.compiles = self._compiled = False

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
        if self.compiles and self.policy._compiled_call_impl is None:
            self.policy.compile()
            self._compiled = True

    def detach(self) -> None:
        """After the run: leave the policy as it came."""
        if self._compiled:
            self.policy._compiled_call_impl = None
            self._compiled = False

    def after_step(self) -> None:
        """An update landed and was settled."""

    def optimizers(self) -> tuple[list[Optimizer], list[Schedule], str]:
        """Optimizers, schedules, and where they come from."""
        if not brings(self.policy, "configure_optimizers"):
            return [default_optimizer(self.policy)], [], "AdamW, since neither the policy nor the run names one"
        configured = self.policy.configure_optimizers()  # type: ignore[operator]
        if configured is None:
            raise ConfigError(
                "configure_optimizers() returned None, so nothing would move the weights.\nReturn an optimizer."
            )
        optimizers, schedules = read_configured(configured, self.default_interval)
        return optimizers, schedules, f"{class_of(self.policy).__name__}.configure_optimizers()"

    def own_data(self, name: Literal["train_dataloader", "val_dataloader"]) -> Any:
        """The policy's own data, or ``None`` when it brings none.

        Raises:
            ConfigError: It brings several loaders.
        """
        data = getattr(self.policy, name)() if brings(self.policy, name) else None
        parts = list(data.values()) if isinstance(data, Mapping) else data
        if isinstance(parts, list | tuple) and any(isinstance(part, DataLoader) for part in parts):
            raise ConfigError(
                f"{class_of(self.policy).__name__}.{name}() gives {len(parts)} loaders, but a run reads one.\n"
                "Return one DataLoader, for instance over a torch.utils.data.ConcatDataset."
            )
        return data


class PlainPolicy(PolicyAdapter):
    """``forward(batch)`` gives the loss, or ``(loss, metrics)``."""

    dialect = "plain"

    def training_step(self, batch: Any, index: int) -> tuple[Tensor | None, Metrics]:
        """Call the module on the batch."""
        loss, metrics = self._forward(batch)
        return (loss if loss.requires_grad else None), metrics

    def validation_step(self, batch: Any, index: int) -> Metrics:
        """The same call; the loss becomes one of the metrics."""
        loss, metrics = self._forward(batch)
        return {**metrics, "loss": loss}

    def _forward(self, batch: Any) -> tuple[Tensor, Metrics]:
        result = self.policy(batch)
        loss, metrics = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
        if metrics is None:
            return checked_loss(loss, self.policy, "forward"), NO_METRICS
        if not isinstance(metrics, Mapping):
            raise ConfigError(
                f"{class_of(self.policy).__name__}.forward must give a loss, or (loss, metrics) with metrics a dict; "
                f"got {type(metrics).__name__} in place of the dict.\nReturn for instance (loss, {{'l1': l1}})."
            )
        if "loss" in metrics:  # the loss has this name already
            metrics = {name: value for name, value in metrics.items() if name != "loss"}
        return checked_loss(loss, self.policy, "forward"), metrics


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
        own = [name for name in _own_methods(policy) if name in _UNCALLED or name.startswith("on_")]
        if own:
            raise ConfigError(
                f"{type(policy).__name__} defines {', '.join(own)}, which the Trainer would never call.\n"
                "Move what it does into a policyfit.Callback, whose hooks stand in policyfit/callbacks/hooks.py; the "
                "Trainer clips by clip_norm and clip_value, and schedules advance by their interval."
            )
        self._takes_index = {name: _takes_index(policy, name) for name in ("training_step", "validation_step")}
        self._hidden: dict[str, Any] | None = None

    def attach(self, log: Log) -> None:
        """Give the module ``self.log`` and ``self.log_dict``, and ``self.device`` if it has none."""
        super().attach(log)

        def log_one(name: str, value: Any, *_: Any, **__: Any) -> None:
            if name != "train/loss":  # the loss that training_step returns has this name already
                log(name, value)

        def log_dict(dictionary: Mapping[str, Any], *_: Any, **__: Any) -> None:
            for name, value in dictionary.items():
                log_one(name, value)

        own = vars(self.policy)
        if self._hidden is None:
            self._hidden = {name: own[name] for name in _GIVEN if name in own}
        own.update(log=log_one, log_dict=log_dict)
        if not hasattr(self.policy, "device"):
            own["device"] = next(self.policy.parameters()).device

    def detach(self) -> None:
        """Take them away again."""
        super().detach()
        if self._hidden is not None:
            for name in _GIVEN:
                vars(self.policy).pop(name, None)
            vars(self.policy).update(self._hidden)
            self._hidden = None

    def training_step(self, batch: Any, index: int) -> tuple[Tensor | None, Metrics]:
        """A tensor, a dict with ``loss``, or ``None`` to leave the micro-batch out."""
        result = self._call("training_step", batch, index)
        if result is None:
            return None, NO_METRICS
        if isinstance(result, Mapping):
            if "loss" not in result:
                raise ConfigError(
                    f"training_step returned a dict without 'loss': it has {sorted(map(str, result))}.\n"
                    "Return the loss under 'loss', or None to leave the micro-batch out."
                )
            result = result["loss"]
        loss = checked_loss(result, self.policy, "training_step")
        return (loss if loss.requires_grad else None), NO_METRICS

    def validation_step(self, batch: Any, index: int) -> Metrics:
        """The numbers and scalars that ``validation_step`` returned; what it logged goes its own way."""
        result = self._call("validation_step", batch, index)
        named = result if isinstance(result, Mapping) else {} if result is None else {"loss": result}
        return {str(name): value for name, value in named.items() if _is_scalar(value)}

    def _call(self, name: str, batch: Any, index: int) -> Any:
        step = getattr(self.policy, name)
        return step(batch, index) if self._takes_index[name] else step(batch)


_GIVEN = ("log", "log_dict", "device")


def _takes_index(policy: nn.Module, name: str) -> bool:
    """Whether the step takes ``batch_idx``, which Lightning lets it leave out."""
    step = getattr(policy, name, None)
    if not callable(step):
        return True
    # Sharding puts a function of its own over a method, whose signature would lose an argument once more.
    written = unwrap(getattr(step, "__func__", step))
    parameters = signature(written if ismethod(written) else step).parameters.values()
    return len([p for p in parameters if p.kind is not p.KEYWORD_ONLY]) != 1 or any(
        p.kind is p.VAR_POSITIONAL for p in parameters
    )


def _is_scalar(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)


# Source: lightning.pytorch.LightningModule. What a subclass writes here has an effect there, and none here.
_UNCALLED = (
    "on_fit_start", "on_fit_end", "on_train_start", "on_train_end", "on_train_epoch_start", "on_train_epoch_end",
    "on_train_batch_start", "on_train_batch_end", "on_validation_start", "on_validation_end",
    "on_validation_epoch_start", "on_validation_epoch_end", "on_validation_batch_start", "on_validation_batch_end",
    "on_validation_model_eval", "on_validation_model_train", "training_epoch_end", "validation_epoch_end",
    "on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_before_zero_grad",
    "on_save_checkpoint", "on_load_checkpoint", "optimizer_step", "optimizer_zero_grad", "backward",
    "configure_gradient_clipping", "configure_model", "configure_callbacks", "lr_scheduler_step",
    "transfer_batch_to_device", "on_before_batch_transfer", "on_after_batch_transfer", "setup", "teardown",
    "prepare_data",
)  # fmt: skip
_CALLED = ("training_step", "validation_step", "configure_optimizers", "train_dataloader", "val_dataloader")
_LIGHTNING = ("lightning.pytorch.core", "pytorch_lightning.core")


def brings(policy: nn.Module, name: str) -> bool:
    """Whether the policy has the method, and not only as the empty one of LightningModule."""
    if not callable(getattr(policy, name, None)):
        return False
    owner = None if name in vars(policy) else next((c for c in type(policy).__mro__ if name in vars(c)), None)
    return owner is None or not owner.__module__.startswith(_LIGHTNING)


def _own_methods(policy: nn.Module) -> list[str]:
    """The names of the methods that the user's classes define, those of torch and Lightning left out."""
    classes = [c for c in type(policy).__mro__ if not c.__module__.startswith(("torch.", "builtins", *_LIGHTNING))]
    return sorted({name for c in classes for name, value in vars(c).items() if callable(value)} - {"__init__"})


def _refuse_misspelt(policy: nn.Module) -> None:
    """Refuse a method that is one letter away from one that would be called."""
    own = _own_methods(policy)
    for name in own:
        near = get_close_matches(name, _CALLED, n=1, cutoff=0.88)
        if name not in _CALLED and near and near[0] not in own:
            raise ConfigError(
                f"{type(policy).__name__} defines {name}, which the Trainer would never call. Did you mean {near[0]}?"
                "\nRename it; a leading underscore says that it is a helper of your own."
            )


def adapt(policy: Any) -> PolicyAdapter:
    """The adapter for the dialect that the policy speaks.

    Raises:
        ConfigError: It is not an ``nn.Module``, is wrapped already, or has nothing to train by.
    """
    if not isinstance(policy, nn.Module):
        is_class = isinstance(policy, type) and issubclass(policy, nn.Module)
        remedy = "Pass an instance of it." if is_class else "Derive its class from nn.Module."
        raise ConfigError(f"The policy must be a torch.nn.Module, got {policy!r}.\n{remedy}")
    classes = {base.__name__ for module in policy.modules() for base in type(module).__mro__}
    wrappers = [type(policy).__name__] if hasattr(policy, "_orig_mod") else [n for n in _WRAPPERS if n in classes]
    if wrappers:
        raise ConfigError(
            f"The policy is wrapped in {wrappers[0]}, which hides its methods and renames its parameters.\n"
            "Pass the policy itself; Trainer(compile=True) compiles it, and Trainer(distributed=...) spreads the run."
        )
    _refuse_misspelt(policy)
    if brings(policy, "training_step"):
        return LightningPolicy(policy)
    if type(policy).forward is nn.Module.forward:
        raise ConfigError(
            f"{type(policy).__name__} has neither forward nor training_step.\n"
            "Write forward(batch), which gives the loss or (loss, metrics)."
        )
    return PlainPolicy(policy)


def checked_loss(loss: Any, policy: nn.Module, method: str) -> Tensor:
    """The loss, if it is one; whether it has a gradient is not looked at.

    Raises:
        ConfigError: It is not a tensor, or not a scalar.
    """
    if not isinstance(loss, Tensor):
        raise ConfigError(
            f"{class_of(policy).__name__}.{method} must give a loss, a scalar tensor, or (loss, metrics); "
            f"got {type(loss).__name__}.\n{_loss_meant(loss)}"
        )
    if loss.dim():
        raise ConfigError(
            f"{class_of(policy).__name__}.{method} must give a scalar loss, got shape {tuple(loss.shape)}.\n"
            "Reduce it, for instance with loss.mean()."
        )
    return loss


def _loss_meant(found: object) -> str:
    if isinstance(found, Number):
        return "Do not call .item() or float() on it: that drops the gradient."
    if isinstance(found, Mapping):
        return "Return the loss before the dict, for instance (output['loss'], {})."
    return "Return the tensor that is to become small."
