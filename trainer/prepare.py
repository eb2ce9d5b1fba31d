"""From what the user wrote to the parts of a run: every check that needs no batch is made here."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn
from torch.optim import Optimizer

from ..strategies.device import DeviceStrategy
from ..strategies.distributed import DistributionStrategy
from ..strategies.errors import ConfigError, DistributedError
from ..strategies.formats import tf32_support
from ..strategies.mailbox import Mailbox, SharedMailbox
from ..strategies.precision import PrecisionStrategy, check_parameters
from .counters import Counters
from .data import TrainingData, training_data, validation_loader
from .describe import class_of, optimizer_settings, schedule_settings
from .fused import prepare_optimizer
from .optimizer import OptimizerFactory, trainable
from .plan import Plan, data_words, rates, schedule_words, tf32_word
from .policy import PolicyAdapter, adapt, brings
from .process import choose_threads
from .resolve import Choice
from .rng import derive_seed, seed_everything
from .run import Run
from .saving import Saver
from .schedule import Schedule, ScheduleFactory, as_schedule
from .settings import Settings
from .update import MAILBOX_SIZE, Updater

if TYPE_CHECKING:
    from .trainer import Trainer


class Choices(NamedTuple):
    """What the trainer's strategies were chosen from, and why."""

    device: Choice[DeviceStrategy]
    precision: Choice[PrecisionStrategy]
    distribution: Choice[DistributionStrategy]


def prepare(
    trainer: Trainer,
    policy: nn.Module,
    train_data: Any,
    val_data: Any,
    *,
    settings: Settings,
    choices: Choices,
    optimizer: OptimizerFactory | None,
    schedule: ScheduleFactory | None,
    seed: int | None,
    fresh: bool,
    plan: Plan,
) -> tuple[Run, int | None]:
    """Put a run together; draws no batch and writes nothing.

    Args:
        seed: The seed of the run that is resumed; ``None`` for a new run.
        fresh: Whether the policy starts anew, so that statistics come from the data and not from a checkpoint.

    Returns:
        The run, and the number of CPU threads it is to have (``None``: torch's choice).
    """
    device, distribution = trainer.device, trainer.distribution
    adapter = _checked(policy, trainer.precision)
    if seed is None:
        seed = settings.seed if settings.seed is not None else distribution.broadcast(secrets.randbelow(2**31))
    if settings.seed is not None:
        seed_everything(seed)
    source = train_data if train_data is not None else adapter.own_data("train_dataloader")
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
        pin_memory=device.pins_memory,
        device_type=device.device.type,
        facts=trainer.facts,
        rank=distribution.rank,
        world_size=distribution.world_size,
    )
    if fresh:
        set_statistics(policy, data.stats)
    _check_alike(distribution, data)
    validation = _validation(adapter, val_data, settings, trainer)
    parts = _assemble(trainer, adapter, settings, choices, optimizer, schedule, plan)
    if distribution.rank > 0:  # the weights are alike by now; dropout is not to be
        seed_everything(derive_seed(seed, "rank", distribution.rank))
    plan.add(
        "data",
        "",
        data_words(data, settings),
        f"resume is not exact: {data.not_exact}" if data.not_exact else data.order,
    )
    plan.add("seed", settings.seed, seed, "" if settings.seed is not None else "drawn for the data's order")
    plan.notes += data.notes

    counters, settings = Counters(), _with_an_end(settings, plan)
    updater = Updater(
        trainer,
        policy,
        optimizers=parts.optimizers,
        schedules=parts.schedules,
        mailbox=_mailbox(device, parts.optimizers, trainer.precision),
        counters=counters,
        after_step=adapter.after_step,
        settings=settings,
    )
    run = Run(
        trainer=trainer,
        adapter=adapter,
        data=data,
        validation_data=validation,
        schedules=parts.schedules,
        updater=updater,
        saver=Saver(pinned=device.pins_memory, synchronize=device.synchronize),
        counters=counters,
        settings=settings,
        seed=seed,
        movers=parts.movers,
    )
    return run, parts.threads


def dry_run(
    trainer: Trainer,
    policy: nn.Module,
    *,
    settings: Settings,
    choices: Choices,
    optimizer: OptimizerFactory | None,
    schedule: ScheduleFactory | None,
    plan: Plan,
) -> None:
    """Take every decision of a run that needs no data, and write it into ``plan``."""
    _assemble(trainer, _checked(policy, trainer.precision), settings, choices, optimizer, schedule, plan)
    seed = "drawn at the start" if settings.seed is None else settings.seed
    plan.add("seed", settings.seed, seed)
    _with_an_end(settings, plan)


@dataclass(frozen=True, slots=True)
class _Parts:
    """What a run has besides its data; ``threads`` is ``None`` for torch's choice."""

    optimizers: list[Optimizer]
    schedules: list[Schedule]
    #: See ``Run.movers``.
    movers: dict[str, Any]
    threads: int | None


def _checked(policy: nn.Module, precision: PrecisionStrategy) -> PolicyAdapter:
    """The adapter of a policy that can be trained."""
    adapter = adapt(policy)
    trainable(policy)
    if precision.masters:
        check_parameters(policy.named_parameters())
    return adapter


def _assemble(
    trainer: Trainer,
    adapter: PolicyAdapter,
    settings: Settings,
    choices: Choices,
    optimizer: OptimizerFactory | None,
    schedule: ScheduleFactory | None,
    plan: Plan,
) -> _Parts:
    """Bring the policy to its device, prove the precision there, and build what moves the weights."""
    device, precision, distribution = trainer.device, trainer.precision, trainer.distribution
    policy = adapter.policy
    device.setup()
    policy.to(device.device)
    plan.notes += _put_in_train_mode(policy)
    adapter.compiles = settings.compile
    adapter.module = distribution.wrap(policy)
    precision.setup(device.device)
    precision.convert_module(policy)
    optimizers, schedules, movers, origin = _optimizers(adapter, optimizer, schedule)
    forms = [prepare_optimizer(o, sharded=distribution.is_sharded) for o in optimizers]
    plan.notes += _unmoved(policy, optimizers)

    size = sum(p.numel() for p in trainable(policy))
    threads, why_threads = choose_threads(device.device.type, size, trainer.facts)
    tf32 = tf32_support(device.device, trainer.facts)
    plan.add("device", choices.device.asked, choices.device.chosen, choices.device.reason)
    plan.add("precision", choices.precision.asked, choices.precision.chosen, choices.precision.reason)
    _add_masters(plan, policy, precision)
    plan.add("distribution", choices.distribution.asked, choices.distribution.chosen, choices.distribution.reason)
    plan.add("tf32", settings.tf32, tf32_word(settings.tf32, tf32), tf32.reason)
    plan.add("threads", "", "torch's choice" if threads is None else threads, why_threads)
    plan.add("policy", "", f"{class_of(policy).__name__}, {size:,} trainable parameters", f"{adapter.dialect} dialect")
    plan.add("optimizer", "", ", ".join(forms), "; ".join([origin, *filter(None, map(rates, optimizers))]))
    plan.add("schedule", "", schedule_words(schedules))
    return _Parts(optimizers, schedules, movers, threads)


def prepare_validation(
    policy: nn.Module, val_data: Any, settings: Settings, trainer: Trainer
) -> tuple[PolicyAdapter, Iterable[Any]]:
    """Adapter and data for a validation without a run.

    Raises:
        ConfigError: There is no validation data.
    """
    adapter = adapt(policy)
    data = _validation(adapter, val_data, settings, trainer)
    if data is None:
        raise ConfigError(
            f"There is nothing to validate on: validate got no val_data, and {type(policy).__name__} has no "
            "val_dataloader()."
        )
    return adapter, data


def _validation(adapter: PolicyAdapter, val_data: Any, settings: Settings, trainer: Trainer) -> Iterable[Any] | None:
    source = val_data if val_data is not None else adapter.own_data("val_dataloader")
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


def _mailbox(device: DeviceStrategy, optimizers: list[Optimizer], precision: PrecisionStrategy) -> Mailbox:
    """Where the gradients are: with shards in host memory that is not the device."""
    where = optimizers[0].param_groups[0]["params"][0].device
    if where.type == device.device.type:
        return device.mailbox(MAILBOX_SIZE)
    if precision.scale is not None:
        raise ConfigError(
            f"FSDP(cpu_offload=True) has the gradients on {where}, but the loss scale is on {device.device}.\n"
            "Use precision='bf16', or leave cpu_offload out."
        )
    return SharedMailbox(MAILBOX_SIZE, where)


def _check_alike(distribution: DistributionStrategy, data: TrainingData) -> None:
    """Refuse ranks that would wait for each other: those that have other data than rank 0."""
    sizes = distribution.gather((data.batches_per_epoch, data.samples_per_epoch))
    other = next((rank for rank, found in enumerate(sizes) if found != sizes[0]), None)
    if other is not None:
        raise DistributedError(
            f"Rank {other} has {sizes[other][1]} samples an epoch, and rank 0 has {sizes[0][1]}.\n"
            "Give all ranks the same data: each takes its own part of it."
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
    take(stats)


def _optimizers(
    adapter: PolicyAdapter, optimizer: OptimizerFactory | None, schedule: ScheduleFactory | None
) -> tuple[list[Optimizer], list[Schedule], dict[str, Any], str]:
    if optimizer is None:
        optimizers, schedules, origin = adapter.optimizers()
    else:
        optimizers, schedules, origin = [_made_by(optimizer, adapter.policy)], [], "named by the run"
    movers = optimizer_settings(optimizers)
    if schedule is not None:
        if len(optimizers) != 1:
            raise ConfigError(
                f"The run names a schedule, but {origin} gives {len(optimizers)} optimizers, and it would not be plain "
                "which one it moves.\nReturn the schedules from configure_optimizers instead."
            )
        schedules = [as_schedule(schedule(optimizers[0]), optimizers)]
        movers = {**optimizer_settings(optimizers), **movers}  # some write into it what is not the optimizer's
    return optimizers, schedules, {**movers, **schedule_settings(schedules)}, origin


def _made_by(factory: Any, policy: nn.Module) -> Optimizer:
    made = None if isinstance(factory, Optimizer) or not callable(factory) else factory(trainable(policy))
    if not isinstance(made, Optimizer):
        got = f"one that gave {made!r}" if callable(factory) else type(factory).__name__
        raise ConfigError(
            f"optimizer must be a function that makes an optimizer from the parameters, got {got}.\n"
            "Write for instance optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4)."
        )
    return made


def _put_in_train_mode(policy: nn.Module) -> list[str]:
    """Train mode for a policy that is in eval mode as a whole; parts that alone are in eval mode stay so."""
    notes = []
    if not policy.training:  # as load() and many pretrained policies come
        policy.train()
        notes.append(f"{type(policy).__name__} came in eval mode and was put in train mode")
    resting = [name for name, module in policy.named_modules() if not module.training]
    topmost = [name for name in resting if name.rpartition(".")[0] not in resting]
    if topmost:
        notes.append(f"in eval mode stay, as they came: {', '.join(topmost)}")
    return notes


def _add_masters(plan: Plan, policy: nn.Module, precision: PrecisionStrategy) -> None:
    """Say it where updates move weights that are not float32."""
    dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in trainable(policy)} - {"float32"})
    if dtypes:
        plan.add("masters", "", "none", f"trainable weights and optimizer state are {' and '.join(dtypes)}")
    if precision.note:
        plan.notes.append(precision.note)


def _unmoved(policy: nn.Module, optimizers: list[Optimizer]) -> list[str]:
    moved = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    left = [name for name, p in policy.named_parameters() if p.requires_grad and id(p) not in moved]
    if not left:
        return []
    more = f" and {len(left) - 5} more" if len(left) > 5 else ""
    return [f"no optimizer has these trainable parameters, so they stay as they are: {', '.join(left[:5])}{more}"]


def _with_an_end(settings: Settings, plan: Plan) -> Settings:
    if settings.max_steps is not None or settings.max_epochs is not None:
        return settings
    plan.notes.append("neither max_steps nor max_epochs is set, so this run is one epoch")
    return replace(settings, max_epochs=1)
