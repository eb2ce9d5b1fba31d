"""A map-style dataset whose finished micro-batches are asked for by ``Draw`` keys, and the loader that asks.

What a sample draws at random while it is made is a function of (seed, epoch, index): no worker count, no number of
ranks and no draw of the policy changes it, and the policy's own random streams are as before after every micro-batch.
"""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Subset, get_worker_info

from ..strategies.errors import ConfigError, in_words
from .rng import derive_seed
from .sampler import Draw, Draws, name_of, set_epoch
from .shares import Part
from .streams import read_streams, seed_streams, write_streams


class _Dataset(Protocol):
    def __getitem__(self, index: Any, /) -> Any: ...


class KeyedSamples:
    """A map-style dataset seen through ``Draw`` keys: each gives one finished micro-batch.

    The random streams are seeded for every sample. In the main process they are put back once the batch
    is made. Attributes of the dataset stay within reach, for a ``worker_init_fn`` that uses them.

    Args:
        dataset: Gives a sample for an index; with ``__getitems__``, the samples of a list of them.
        collate: Makes a batch of a list of samples.
        seed: That of the run.
        tell_epoch: Call the dataset's ``set_epoch``, if it has one, where the samples are made.
    """

    def __init__(self, dataset: _Dataset, collate: Callable[[Any], Any], seed: int, *, tell_epoch: bool = True) -> None:
        vars(self).update(_dataset=dataset, _collate=collate, _seed=seed, _tell_epoch=tell_epoch, _told=None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_dataset" not in vars(self):  # unpickling asks before there is a dataset
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._dataset, name, value)

    def __getitem__(self, draw: Draw) -> Any:
        if get_worker_info() is not None:
            return self._make(draw)
        outside = read_streams()
        try:
            return self._make(draw)
        finally:
            write_streams(outside)

    def _make(self, draw: Draw) -> Any:
        if self._tell_epoch and draw.epoch != self._told:
            set_epoch((self._dataset,), draw.epoch)
            vars(self)["_told"] = draw.epoch
        if not isinstance(draw.indices, list):
            samples = self._sample(draw, 0, draw.indices)
        elif _reads_batches(self._dataset):
            samples = self._samples(draw)
        else:
            samples = [self._sample(draw, position, index) for position, index in enumerate(draw.indices)]
        try:
            return self._collate(samples)
        except Exception as error:
            raise self._failure(f"The batch of samples {draw.indices}", draw, error) from error

    def _sample(self, draw: Draw, position: int, index: Any) -> Any:
        self._seed_for(draw, position, index)
        try:
            return self._dataset[index]
        except Exception as error:  # an IndexError or StopIteration could end the epoch in silence
            raise self._failure(f"Sample {index}", draw, error) from error

    def _samples(self, draw: Draw) -> Any:
        self._seed_for(draw, 0, draw.indices[0])
        try:
            return self._dataset.__getitems__(draw.indices)
        except Exception as error:
            raise self._failure(f"Samples {draw.indices}", draw, error) from error

    def _failure(self, what: str, draw: Draw, error: Exception) -> RuntimeError:
        of = f"{what} of {name_of(self._dataset)} could not be made in epoch {draw.epoch}"
        return RuntimeError(f"{of}: {in_words(error)}")

    def _seed_for(self, draw: Draw, position: int, index: Any) -> None:
        if draw.number is None:
            seed_streams(derive_seed(self._seed, "sample", draw.epoch, index))
        else:
            seed_streams(derive_seed(self._seed, "draw", draw.epoch, draw.number, position))


def _reads_batches(dataset: Any) -> bool:
    while type(dataset) is Subset:  # it always has __getitems__, and uses that of its own dataset
        dataset = dataset.dataset
    return callable(getattr(dataset, "__getitems__", None))


def keyed_loader(
    dataset: Any,
    draws: Draws,
    collate: Callable[[Any], Any],
    settings: Mapping[str, Any],
    *,
    seed: int,
    tell_epoch: bool = True,
    generator: torch.Generator,
) -> DataLoader[Any]:
    """A DataLoader in which one key of ``draws`` makes one finished batch of a map-style dataset.

    Raises:
        ConfigError: Forked workers would inherit tensors on an accelerator.
    """
    _refuse_accelerator_tensors_in_forks(dataset, settings)
    return DataLoader(
        KeyedSamples(dataset, collate, seed, tell_epoch=tell_epoch),  # type: ignore[arg-type]  # map-style
        batch_size=None,
        sampler=draws,
        collate_fn=_as_it_is,
        generator=generator,
        **settings,
    )


def loaded(loader: DataLoader[Any], draws: Draws, start: int = 0) -> Iterator[Part]:
    """What the loader of ``draws`` makes from micro-batch ``start`` on, each with its share."""
    return map(lambda number, batch: Part(batch, draws.share(number)), count(start), loader)


@contextmanager
def letting_go(source: Any) -> Iterator[None]:
    """Keep an error from holding on to the workers: they end with the last reference to their iterator."""
    try:
        yield
    except Exception as error:
        if getattr(source, "num_workers", 0):
            traceback.clear_frames(error.__traceback__)
        raise


def _refuse_accelerator_tensors_in_forks(dataset: Any, settings: Mapping[str, Any]) -> None:
    """An accelerator's runtime does not survive a fork, and its own messages say little about datasets."""
    if settings["num_workers"] == 0:
        return
    context = settings["multiprocessing_context"]
    method = context if isinstance(context, str) else (context or multiprocessing).get_start_method()
    if method != "fork":
        return
    for name, value in getattr(dataset, "__dict__", {}).items():
        for item in value if isinstance(value, tuple) else (value,):
            if isinstance(item, Tensor) and item.device.type != "cpu":
                raise ConfigError(
                    f"{name_of(dataset)}.{name} is on {item.device}, where forked workers cannot read it.\n"
                    "Keep the dataset on the cpu (batches are moved for you), or set trainer.workers=0."
                )


def _as_it_is(batch: Any) -> Any:
    return batch
