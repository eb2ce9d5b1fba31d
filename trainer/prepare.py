"""From what the user wrote to the parts of a run: every check that needs no batch is made here."""

from __future__ import annotations

import secrets
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from ..strategies.device import DeviceStrategy
from ..strategies.distributed import AT_THE_START
from ..strategies.errors import ConfigError, some
from ..strategies.formats import tf32_support
from ..strategies.mailbox import Mailbox, SharedMailbox
from ..strategies.precision import PrecisionStrategy, check_parameters
from .agreement import MAILBOX_SIZE
from .alike import check_settings, differing_arguments, order_of_parameters, settings_to_compare
from .counters import Counters
from .describe import class_of
from .fused import prepare_optimizer
from .movers import Movers, make_movers, unmoved
from .optimizer import OptimizerFactory, trainable
from .plan import Plan, data_words, rates, schedule_notes, schedule_words, tf32_word
from .policy import PolicyAdapter, adapt
from .process import choose_threads
from .resolve import Choices
from .resume import Origin
from .rng import derive_seed, seed_everything
from .run import Run
from .saving import Saver
from .schedule import ScheduleFactory
from .settings import Settings
from .sources import data_to_train_on, data_to_validate_on
from .update import Updater

if TYPE_CHECKING:
    from .trainer import Trainer


def prepare(
    trainer: Trainer,
    policy: nn.Module,
    train_data: Any,
    val_data: Any,
    optimizer: OptimizerFactory | None,
    schedule: ScheduleFactory | None,
    settings: Settings,
    choices: Choices,
    origin: Origin | None,
) -> tuple[Run, int | None]:
    """Put a run together, every decision in the trainer's plan; draws no batch and writes nothing.

    Args:
        origin: What the run goes on from: seed and statistics are those of its checkpoint. ``None`` for a new run.

    Returns:
        The run, and the number of CPU threads it is to have (``None``: torch's choice).
    """
    device, distribution, plan = trainer.device, trainer.distribution, trainer.plan
    check_settings(distribution, settings_to_compare(trainer, settings))
    plan.notes += differing_arguments(distribution, trainer.config)
    seed = settings.seed if origin is None else origin.seed(settings.seed)
    adapter = _checked(policy, trainer.precision)
    if seed is None:
        seed = distribution.broadcast(secrets.randbelow(2**31), AT_THE_START)
    if settings.seed is not None:
        seed_everything(seed)
    data = data_to_train_on(trainer, adapter, train_data, settings, seed=seed, fresh=origin is None)
    validation = data_to_validate_on(trainer, adapter, val_data, settings)
    movers, threads = _assemble(trainer, adapter, optimizer, schedule, settings, choices)
    moved = movers.settings | order_of_parameters(policy, movers.optimizers)
    facts = {f"data: {name}": value for name, value in data.facts.items()}
    check_settings(distribution, moved | facts | {"val_data": "none" if validation is None else "given"})
    if distribution.rank > 0:  # the weights are alike by now; dropout is not to be
        seed_everything(derive_seed(seed, "rank", distribution.rank))
    order = f"resume is not exact: {data.not_exact}" if data.not_exact else data.order
    plan.add("data", "", data_words(data, settings), order)
    plan.add("seed", settings.seed, seed, "" if settings.seed is not None else "drawn for the data's order")
    plan.notes += data.notes

    counters, settings = Counters(), _with_an_end(settings, plan)
    updater = Updater(
        trainer,
        policy,
        optimizers=movers.optimizers,
        schedules=movers.schedules,
        mailbox=_mailbox(device, movers.optimizers, trainer.precision),
        counters=counters,
        after_step=adapter.after_step,
        settings=settings,
    )
    run = Run(
        trainer=trainer,
        adapter=adapter,
        data=data,
        validation_data=validation,
        schedules=movers.schedules,
        updater=updater,
        saver=Saver(pinned=device.pins_memory, synchronize=device.synchronize),
        counters=counters,
        settings=settings,
        seed=seed,
        movers=movers.settings,
    )
    return run, threads


def dry_run(
    trainer: Trainer,
    policy: nn.Module,
    optimizer: OptimizerFactory | None,
    schedule: ScheduleFactory | None,
    settings: Settings,
    choices: Choices,
) -> None:
    """Take every decision of a run that needs no data, and write it into the trainer's plan."""
    _assemble(trainer, _checked(policy, trainer.precision), optimizer, schedule, settings, choices)
    trainer.plan.add("seed", settings.seed, "drawn at the start" if settings.seed is None else settings.seed)
    _with_an_end(settings, trainer.plan)


def check_whole(policy: nn.Module) -> None:
    """Refuse a policy whose weights are in shards.

    Raises:
        ConfigError: They are.
    """
    # By its name: the class takes more than a second to import.
    if any(base.__name__ == "FSDPModule" for module in policy.modules() for base in type(module).__mro__):
        raise ConfigError(
            f"{class_of(policy).__name__} is sharded already, by fully_shard or by an earlier run in this process.\n"
            "Build it anew, or take policyfit.load() of that run; Trainer(distributed=FSDP(wrap=...)) shards it."
        )


def _checked(policy: nn.Module, precision: PrecisionStrategy) -> PolicyAdapter:
    """The adapter of a policy that can be trained."""
    adapter = adapt(policy)
    check_whole(policy)
    trainable(policy)
    if precision.masters:
        check_parameters(policy.named_parameters())
    return adapter


def _assemble(
    trainer: Trainer,
    adapter: PolicyAdapter,
    optimizer: OptimizerFactory | None,
    schedule: ScheduleFactory | None,
    settings: Settings,
    choices: Choices,
) -> tuple[Movers, int | None]:
    """Bring the policy to its device, prove the precision there, and build what moves the weights.

    Returns:
        The movers, and the number of CPU threads (``None``: torch's choice).
    """
    device, precision, distribution = trainer.device, trainer.precision, trainer.distribution
    policy, plan = adapter.policy, trainer.plan
    policy.to(device.device)
    plan.notes += _put_in_train_mode(policy)
    adapter.compiles = settings.compile
    adapter.module = distribution.wrap(policy)
    precision.setup(device.device)
    precision.convert_module(policy)
    movers = make_movers(adapter, optimizer, schedule)
    forms = [prepare_optimizer(o, sharded=distribution.is_sharded) for o in movers.optimizers]
    plan.notes += unmoved(policy, movers.optimizers)

    size = sum(p.numel() for p in trainable(policy))
    threads, why_threads = choose_threads(device.device.type, size, trainer.facts)
    tf32 = tf32_support(device.device, trainer.facts)
    plan.add("device", choices.device.asked, choices.device.chosen, choices.device.reason)
    plan.add("precision", choices.precision.asked, choices.precision.chosen, choices.precision.reason)
    _add_masters(plan, policy, precision)
    spread = "; ".join(filter(None, (choices.distribution.reason, distribution.layout)))
    plan.add("distribution", choices.distribution.asked, choices.distribution.chosen, spread)
    plan.add("tf32", settings.tf32, tf32_word(settings.tf32, tf32), tf32.reason)
    plan.add("threads", "", torch.get_num_threads() if threads is None else threads, why_threads)
    about = "; ".join([f"{adapter.dialect} dialect", *_frozen_words(policy)])
    plan.add("policy", "", f"{class_of(policy).__name__}, {size:,} trainable parameters", about)
    reasons = [movers.origin, *filter(None, map(rates, movers.optimizers))]
    plan.add("optimizer", "", ", ".join(forms), "; ".join(reasons))
    plan.add("schedule", "", schedule_words(movers.schedules))
    plan.notes += schedule_notes(movers.schedules, settings.max_steps)
    return movers, threads


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


def _put_in_train_mode(policy: nn.Module) -> list[str]:
    """Train mode for a policy that is in eval mode as a whole; parts that alone are in eval mode stay so.

    A module with a ``train()`` of its own is asked what that means for its parts, as a frozen backbone in eval mode.
    """
    notes = []
    if not policy.training:  # as load() and many pretrained policies come
        policy.train()
        notes.append(f"{type(policy).__name__} came in eval mode and was put in train mode")
    else:
        chosen = [module for module in policy.modules() if not module.training]
        for module in policy.modules():
            if module.training and type(module).train is not nn.Module.train:
                module.train(True)
        for module in chosen:
            module.eval()
    resting = [name for name, module in policy.named_modules() if not module.training]
    topmost = [name for name in resting if name.rpartition(".")[0] not in resting]
    if topmost:
        notes.append(f"in eval mode stay, as they came: {', '.join(topmost)}")
    moving = [name for name, module in policy.named_modules() if _is_frozen_but_moves(module)]
    if moving:
        notes.append(
            f"frozen, but in train mode, so that running statistics move: {some(moving)}; a train() of the policy that "
            "calls eval() on them keeps them as they are"
        )
    return notes


def _is_frozen_but_moves(module: nn.Module) -> bool:
    keeps = module.training and isinstance(module, _BatchNorm) and module.track_running_stats
    frozen = [not parameter.requires_grad for parameter in module.parameters(recurse=False)]
    return keeps and bool(frozen) and all(frozen)


def _frozen_words(policy: nn.Module) -> list[str]:
    """How many parameters are frozen, of each type, which may be another than that of those that train."""
    counts = Counter[str]()
    for parameter in policy.parameters():
        if not parameter.requires_grad:
            counts[str(parameter.dtype).removeprefix("torch.")] += parameter.numel()
    return [f"frozen: {', '.join(f'{count:,} of {dtype}' for dtype, count in counts.items())}"] if counts else []


def _add_masters(plan: Plan, policy: nn.Module, precision: PrecisionStrategy) -> None:
    """Say it where updates move weights that are not float32."""
    dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in trainable(policy)} - {"float32"})
    if dtypes:
        plan.add("masters", "", "none", f"trainable weights and optimizer state are {' and '.join(dtypes)}")
    if precision.note:
        plan.notes.append(precision.note)


def _with_an_end(settings: Settings, plan: Plan) -> Settings:
    if settings.max_steps is not None or settings.max_epochs is not None:
        return settings
    plan.notes.append("neither max_steps nor max_epochs is set, so this run is one epoch")
    return replace(settings, max_epochs=1)
