"""What a run trains and validates on: the data that it was given or that its policy brings, alike on all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor, nn

from ..strategies.errors import ConfigError, some
from ..strategies.tree import map_leaves
from .alike import check_data
from .data import TrainingData, training_data, validation_loader
from .policy import PolicyAdapter, brings
from .settings import Settings

if TYPE_CHECKING:
    from .trainer import Trainer


def data_to_train_on(
    trainer: Trainer, adapter: PolicyAdapter, given: Any, settings: Settings, *, seed: int, fresh: bool
) -> TrainingData:
    """The epochs of the run, alike on all ranks.

    Args:
        given: What ``fit`` was given; ``None`` takes the policy's own.
        fresh: Whether the policy starts anew and takes the data's statistics.

    Raises:
        ConfigError: There is no data, or none that can be read, or no statistics for a policy that needs them.
        DistributedError: Ranks have different data.
    """
    policy, distribution = adapter.policy, trainer.distribution
    source = given if given is not None else adapter.own_data("train_dataloader")
    if source is None:
        raise ConfigError(
            f"There is nothing to train on: fit got no train_data, and {type(policy).__name__} has no "
            "train_dataloader().\nPass a dataset or a DataLoader as the second argument of fit."
        )
    data = training_data(
        source,
        seed=seed,
        batch_size=settings.batch_size,
        workers=settings.workers,
        accumulate=settings.accumulate,
        pin_memory=trainer.device.pins_memory,
        device_type=trainer.device.device.type,
        facts=trainer.facts,
        rank=distribution.rank,
        world_size=distribution.world_size,
    )
    if fresh:
        set_statistics(policy, data.stats)
    check_data(distribution, data)
    return data


def data_to_validate_on(
    trainer: Trainer, adapter: PolicyAdapter, given: Any, settings: Settings
) -> Iterable[Any] | None:
    """The batches of a validation: those given, else the policy's own, else ``None``.

    Raises:
        ConfigError: The policy has no step for them, or they cannot be read.
    """
    source = given if given is not None else adapter.own_data("val_dataloader")
    if source is None:
        return None
    if adapter.dialect == "Lightning" and not brings(adapter.policy, "validation_step"):
        raise ConfigError(
            f"There is validation data, but {type(adapter.policy).__name__} has no validation_step(batch, batch_idx)."
        )
    return validation_loader(
        source,
        batch_size=settings.batch_size,
        workers=settings.workers,
        pin_memory=trainer.device.pins_memory,
        device_type=trainer.device.device.type,
        facts=trainer.facts,
        rank=trainer.distribution.rank,
        world_size=trainer.distribution.world_size,
    )


def set_statistics(policy: nn.Module, stats: Mapping[str, Any] | None) -> None:
    """Give the policy the data's statistics, once, if it asks for them: they are its buffers from then on."""
    take = getattr(policy, "set_statistics", None)
    if not callable(take):
        return
    if stats is None:
        raise ConfigError(
            f"{type(policy).__name__} has set_statistics(), but the training dataset has no attribute stats to give it."
            "\nGive the dataset one (feature -> mean, std, ...), or call set_statistics yourself and remove the method."
        )
    bad: list[str] = []
    map_leaves(stats, lambda leaf, key: None if _is_finite(leaf) else bad.append(key))
    if bad:
        raise ConfigError(
            f"The statistics of the training dataset are inf or NaN in {some(bad)}, and so would be all that "
            "the policy computes with them.\nCompute them from samples that are finite."
        )
    take(stats)


def _is_finite(leaf: Any) -> bool:
    """Whether it holds no inf or NaN; what is no number does not."""
    array = leaf.detach().cpu().double().numpy() if isinstance(leaf, Tensor) else np.asarray(leaf)
    return array.dtype.kind != "f" or bool(np.isfinite(array).all())
