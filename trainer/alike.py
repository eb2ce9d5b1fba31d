"""Ranks that would each make another run are refused, with what differs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from ..strategies.distributed import AT_THE_START, DistributionStrategy
from ..strategies.errors import DistributedError
from .data import TrainingData
from .describe import written_arguments
from .settings import Settings

if TYPE_CHECKING:
    from .trainer import Trainer


def settings_to_compare(trainer: Trainer, settings: Settings) -> dict[str, Any]:
    """The settings of a run that have to be the same on every rank, by name; the number of data workers need not."""
    strategy = trainer.distribution
    hooks = ("on_before_optimizer_step", "on_save_checkpoint") if strategy.is_sharded else ()
    return {
        **{name: value for name, value in asdict(settings).items() if name != "workers"},
        "device": trainer.device.device.type,
        "precision": trainer.precision.name,
        "grad_scaler": getattr(trainer.precision, "settings", None),
        "distributed": strategy.name,
        **{f"distributed.{name}": value for name, value in strategy.options.items()},
        # With shards these have the ranks talk: a norm is one of all parts, and so is a model that is saved.
        **{f"callbacks with {hook}": [_name_of(bound) for bound in trainer.callbacks.bound[hook]] for hook in hooks},
    }


def _name_of(bound: Any) -> str:
    return type(bound.__self__).__name__


def order_of_parameters(policy: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, str]:
    """A digest for each optimizer of which parameters it has, in their order."""
    names = {id(p): name for name, p in policy.named_parameters()}
    held = [[names.get(id(p)) for group in o.param_groups for p in group["params"]] for o in optimizers]
    digests = [sha256(repr(one).encode()).hexdigest()[:8] for one in held]
    return {f"optimizer {i}: digest of its parameters in order": digest for i, digest in enumerate(digests)}


def check_settings(ranks: DistributionStrategy, settings: Mapping[str, Any]) -> None:
    """Compare settings by name.

    Raises:
        DistributedError: Those of a rank differ from those of rank 0.
    """
    first, *others = ranks.gather(settings, AT_THE_START)
    for rank, found in enumerate(others, 1):
        differing = [name for name in {**first, **found} if found.get(name) != first.get(name)]
        if differing:
            shown = "; ".join(f"{name} is {found.get(name)!r}, and {first.get(name)!r} on rank 0" for name in differing)
            raise DistributedError(
                f"Rank {rank} was started with other settings than rank 0: {shown}.\nStart all with the same run file "
                "and options; ${env:...} in a file is what each machine has."
            )


def differing_arguments(ranks: DistributionStrategy, config: dict[str, Any] | None) -> list[str]:
    """A note for each argument of the policy that the run's file gives otherwise on another rank, as a path may be."""
    first, *others = ranks.gather(written_arguments(config, "policy") or {}, AT_THE_START)
    none = "not written"
    return [
        f"policy.init_args.{name} is {found.get(name, none)} on rank {rank}, and {first.get(name, none)} on rank 0"
        for rank, found in enumerate(others, 1)
        for name in {**first, **found}
        if found.get(name) != first.get(name)
    ]


def check_data(ranks: DistributionStrategy, data: TrainingData) -> None:
    """Compare how much data there is.

    Raises:
        DistributedError: A rank has more or less than rank 0, so that they would wait for each other.
    """
    sizes = ranks.gather((data.batches_per_epoch, data.samples_per_epoch), AT_THE_START)
    other = next((rank for rank, found in enumerate(sizes) if found != sizes[0]), None)
    if other is not None:
        index, what = (0, "batches") if sizes[other][0] != sizes[0][0] else (1, "samples")
        raise DistributedError(
            f"Rank {other} has {sizes[other][index]} {what} an epoch, and rank 0 has {sizes[0][index]}.\n"
            "Give all ranks the same data, of which each takes its own part; data with shards_by_rank has to be as "
            "long on every rank."
        )
