"""Data: from what a user has to epochs of micro-batches.

    map-style dataset, or a DataLoader over one with torch's own samplers
                                  our order: a pure function of (seed, epoch), exact from any micro-batch on
    DataLoader over a map-style dataset with another sampler
                                  its order, our random streams for the samples; resuming skips indices only
    IterableDataset, other loaders
                                  used as they are; resuming reads and drops

A sampler, an iterable dataset or a loader that has ``state_dict`` and ``load_state_dict`` goes on where it was.

Processes that train together read disjoint parts of one order, and each makes as many micro-batches as the others:
see ``shares.py``. Nothing is agreed on the way: what a rank reads is a function of its number and of how many there
are.

Draw from the thread in which the policy runs: where there are no workers, the global random streams are
swapped while user code makes a sample.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from ..strategies.errors import ConfigError, DistributedError
from ..strategies.facts import MachineFacts
from .carried import Carried, carries_state
from .epochs import KeptData, MicroBatch, OrderedData, Reading, TrainingData, count_samples
from .iterated import IteratedData, own_length, parts_of
from .keyed import keyed_loader, loaded
from .sampler import Draws, KeptDraws, OrderedDraws, name_of
from .shares import Shared, counted, exactly, in_turn, shards_itself

__all__ = ["MicroBatch", "TrainingData", "count_samples", "counted", "training_data", "validation_loader"]

Workers = int | Literal["auto"]


def training_data(
    source: Any,
    *,
    seed: int,
    batch_size: int,
    workers: Workers,
    accumulate: int,
    pin_memory: bool,
    device_type: str,
    facts: MachineFacts,
    rank: int = 0,
    world_size: int = 1,
) -> TrainingData:
    """Make epochs of micro-batches from a dataset, a DataLoader, or any other iterable of finished batches.

    Args:
        source: What ``Trainer.fit`` was given, or the policy's ``train_dataloader()``.
        seed: That of the run: order and augmentation follow from it.
        batch_size: Samples in a micro-batch; a loader keeps its own.
        workers: Processes that make batches; a loader keeps its own. "auto" is none on the cpu.
        accumulate: Micro-batches in a window.
        pin_memory: Whether the device reads pinned memory.
        device_type: Of the device that trains, for "auto" and for the notes.
        facts: Of the machine: how many processors there are, and whether workers can be forked.
        rank: Of this process.
        world_size: Processes that train together.

    Raises:
        ConfigError: The source cannot be read, or read once only, or has no micro-batch to give.
        DistributedError: The source shares its data between processes itself, in a way that cannot be kept.
    """
    reading = Reading(seed=seed, accumulate=accumulate, rank=rank, world_size=world_size)
    if isinstance(source, DataLoader):
        data = _from_loader(source, pin_memory, device_type, facts, reading)
    elif isinstance(source, IterableDataset):
        # Where it carries its state, only this process can ask for it.
        most = 0 if carries_state(source) else 1
        settings = _settings(_worker_count(workers, device_type, facts, most), pin_memory, facts)
        data = IteratedData(DataLoader(source, batch_size=batch_size, **settings), reading)
    elif _is_map_style(source):
        settings = _settings(_worker_count(workers, device_type, facts), pin_memory, facts)
        settings["persistent_workers"] = settings["num_workers"] > 0
        _refuse_own_shares(source, world_size)
        draws = OrderedDraws(
            len(source), batch_size, seed=seed, shuffle=True, drop_last=False, rank=rank, world_size=world_size
        )
        data = OrderedData(source, draws, default_collate, settings, reading)
    else:
        data = IteratedData(_re_iterable(source), reading)
    if data.batches_per_epoch == 0:
        raise ConfigError(
            f"The training data ({name_of(getattr(source, 'dataset', source))}) has no micro-batch to give.\n"
            "Pass data with samples; with drop_last=True, with at least one batch of them"
            f"{'' if world_size == 1 else f' for each of the {world_size} ranks'}."
        )
    return data


def validation_loader(
    source: Any,
    *,
    batch_size: int,
    workers: Workers,
    pin_memory: bool,
    device_type: str,
    facts: MachineFacts,
    rank: int = 0,
    world_size: int = 1,
) -> Iterable[Any]:
    """Batches to validate on, in the order of the dataset; a DataLoader is used as it is.

    Every pass over a map-style dataset makes the same batches and leaves the global random streams as they
    were. Processes that validate together take turns, batch by batch; read what they get through ``counted``.

    Raises:
        ConfigError: The source cannot be read, or read once only.
        DistributedError: The source shares its data between processes itself, in a way that cannot be kept.
    """
    if isinstance(source, DataLoader):
        loader = _without_pinning(source, pin_memory, device_type, [])
        if world_size > 1 and type(loader) is DataLoader and not isinstance(loader.dataset, IterableDataset):
            kept = KeptDraws(loader, 0, rank, world_size)
            kept.carried = Carried()  # every pass is made from its start
            settings = _settings_of(loader, facts) | {"persistent_workers": loader.persistent_workers}
            _refuse_own_shares(loader, world_size)
            return _validating(loader.dataset, kept, loader.collate_fn, settings, world_size)
        return _in_turn(loader, rank, world_size)
    if isinstance(source, IterableDataset):
        settings = _settings(_worker_count(workers, device_type, facts, most=1), pin_memory, facts)
        return _in_turn(DataLoader(source, batch_size=batch_size, **settings), rank, world_size)
    if _is_map_style(source):
        settings = _settings(_worker_count(workers, device_type, facts), pin_memory, facts)
        _refuse_own_shares(source, world_size)
        draws = OrderedDraws(
            len(source), batch_size, seed=0, shuffle=False, drop_last=False, rank=rank, world_size=world_size
        )
        return _validating(source, draws, default_collate, settings, world_size)
    return _in_turn(_re_iterable(source), rank, world_size)


def _validating(dataset: Any, draws: Draws, collate: Any, settings: dict[str, Any], world_size: int) -> Iterable[Any]:
    loader = keyed_loader(dataset, draws, collate, settings, seed=0, tell_epoch=False, generator=torch.Generator())
    return loader if world_size == 1 else Shared(lambda: loaded(loader, draws))


def _in_turn(batches: Iterable[Any], rank: int, world_size: int) -> Iterable[Any]:
    """Every rank reads all and keeps its share, unless each has its own."""
    if world_size == 1:
        return batches
    length = own_length(batches, world_size)
    if length is None:
        return Shared(lambda: in_turn(batches, rank, world_size))
    return Shared(lambda: in_turn(exactly(length, batches, name_of(batches)), 0, 1))


def _refuse_own_shares(source: Any, world_size: int) -> None:
    dataset = getattr(source, "dataset", source)
    for part in parts_of(source) if world_size > 1 else ():
        if shards_itself(part):
            raise DistributedError(
                f"{name_of(part)} gives each of the {world_size} ranks its own part of {name_of(dataset)}, which is "
                "shared between them by index already: each would see a part of its part.\nGive every rank the whole "
                "dataset, and a DataLoader no sampler of that kind; shuffle=True says all that is needed."
            )


def _from_loader(
    loader: DataLoader[Any], pin_memory: bool, device_type: str, facts: MachineFacts, reading: Reading
) -> TrainingData:
    loader = _without_pinning(loader, pin_memory, device_type, reading.notes)
    if type(loader) is not DataLoader:  # a rebuilt one would lose what the subclass does
        _refuse_deaf_workers(loader)
        reading.notes.append(f"{name_of(loader)} is used as it is.")
        return IteratedData(loader, reading)
    settings = _settings_of(loader, facts)
    if isinstance(loader.dataset, IterableDataset):
        return IteratedData(_with_new_workers(loader, settings, reading.notes), reading)
    settings["persistent_workers"] = loader.persistent_workers
    _refuse_own_shares(loader, reading.world_size)
    if not loader.in_order:
        reading.notes.append("in_order=False of the DataLoader was switched off: its batches come in order.")
    draws = _draws_in_our_order(loader, reading)
    if draws is None:
        kept = KeptDraws(loader, reading.seed, reading.rank, reading.world_size)
        reading.notes.append(
            f"The DataLoader keeps its {kept.name}; its samples are made in random streams from the run's seed."
        )
        return KeptData(loader.dataset, kept, loader.collate_fn, settings, reading)
    reading.notes.append(
        f"The DataLoader was rebuilt with policyfit's {'shuffled' if draws.shuffle else 'sequential'} order; "
        f"its dataset, batch_size={draws.batch_size}, drop_last={loader.drop_last}, collate_fn and "
        f"num_workers={loader.num_workers} were kept."
    )
    return OrderedData(loader.dataset, draws, loader.collate_fn, settings, reading)


def _draws_in_our_order(loader: DataLoader[Any], reading: Reading) -> OrderedDraws | None:
    """Our order for a loader with torch's own samplers over the whole dataset; ``None`` for any other."""
    batches: Any = loader.batch_sampler
    if batches is not None and type(batches) is not BatchSampler:
        return None
    sampler: Any = loader.sampler if batches is None else batches.sampler
    shuffle = type(sampler) is RandomSampler and not sampler.replacement
    n = len(loader.dataset)  # type: ignore[arg-type]  # map-style
    if not (shuffle or type(sampler) is SequentialSampler) or len(sampler) != n:
        return None
    size, drop_last = (None, False) if batches is None else (batches.batch_size, batches.drop_last)
    return OrderedDraws(
        n,
        size,
        seed=reading.seed,
        shuffle=shuffle,
        drop_last=drop_last,
        rank=reading.rank,
        world_size=reading.world_size,
    )


def _with_new_workers(loader: DataLoader[Any], settings: dict[str, Any], notes: list[str]) -> DataLoader[Any]:
    """The same loader with workers that start anew in every epoch: living ones never hear of set_epoch."""
    if loader.persistent_workers:
        notes.append("persistent_workers of the DataLoader was switched off: workers start anew in every epoch.")
    return DataLoader(
        loader.dataset,
        batch_size=loader.batch_size,
        collate_fn=loader.collate_fn,
        drop_last=loader.drop_last,
        in_order=loader.in_order,
        **settings,
    )


def _refuse_deaf_workers(loader: DataLoader[Any]) -> None:
    if loader.persistent_workers and callable(getattr(loader.dataset, "set_epoch", None)):
        raise ConfigError(
            f"{name_of(loader.dataset)} has set_epoch, but the persistent workers of {name_of(loader)} would "
            "never hear of a new epoch.\nBuild the loader with persistent_workers=False."
        )


def _without_pinning(loader: DataLoader[Any], pin_memory: bool, device_type: str, notes: list[str]) -> DataLoader[Any]:
    if pin_memory or not loader.pin_memory:
        return loader
    notes.append(f"pin_memory=True of the DataLoader was switched off: pinned memory is of no use to {device_type}.")
    loader = copy.copy(loader)  # the user's own stays as it was
    loader.pin_memory = False
    return loader


def _settings_of(loader: DataLoader[Any], facts: MachineFacts) -> dict[str, Any]:
    settings = _settings(loader.num_workers, loader.pin_memory, facts, loader.multiprocessing_context)
    return settings | {name: getattr(loader, name) for name in ("timeout", "worker_init_fn", "prefetch_factor")}


def _settings(workers: int, pin_memory: bool, facts: MachineFacts, context: Any = None) -> dict[str, Any]:
    if workers and context is None and facts.build == "rocm":
        context = "spawn"  # the HIP runtime is up by now, and does not survive a fork
    return {"num_workers": workers, "pin_memory": pin_memory, "multiprocessing_context": context}


def _worker_count(workers: Workers, device_type: str, facts: MachineFacts, most: int = 4) -> int:
    """``most`` is 1 for iterable datasets: each worker reads all of one that does not split itself."""
    if workers != "auto":
        return workers
    if device_type == "cpu":
        return 0
    return min(most, facts.cpu_count - 1)


def _is_map_style(source: Any) -> bool:
    return hasattr(source, "__len__") and hasattr(source, "__getitem__")


def _re_iterable(source: Any) -> Iterable[Any]:
    if isinstance(source, Iterator):
        raise ConfigError(
            f"The data is a {name_of(type(source))}, which is read once only; every epoch begins anew.\n"
            "Pass the dataset or the loader itself, not iter() of it or a generator."
        )
    if not isinstance(source, Iterable):
        raise ConfigError(
            "The data must be a dataset with __len__ and __getitem__, an IterableDataset, a DataLoader or "
            f"another iterable of batches, got {name_of(source)}.\n"
            "A list of samples is a dataset, and torch.utils.data.TensorDataset makes one of tensors."
        )
    return source
