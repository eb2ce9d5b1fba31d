"""The constructor's plain values, checked one by one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from ..strategies.checks import number, seed_number, whole
from ..strategies.errors import ConfigError

NonFinite = Literal["skip", "raise", "off"]

# What may be left out, and what None means there.
_OPTIONAL = {
    "max_steps": "for no limit of steps",
    "max_epochs": "for no limit of epochs",
    "val_every": "to validate once, at the end",
    "log_every": "to log only at the end",
}
A_LOGGER = "a logger, with log_metrics and finalize as Fabric's have"
_NEVER = ("val_every", "log_every")  # where 0 means the same as None


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The constructor's plain values, each checked; meanings and units: ``Trainer``."""

    tf32: bool | None
    compile: bool
    max_steps: int | None
    max_epochs: int | None
    batch_size: int
    workers: int | Literal["auto"]
    accumulate: int
    clip_norm: float | None
    clip_value: float | None
    non_finite: NonFinite
    max_skips: int
    val_every: int | None
    log_every: int | None
    seed: int | None
    deterministic: bool

    def __post_init__(self) -> None:
        whole("trainer.batch_size", self.batch_size, 1, "Use 1 to compute each sample by itself.")
        whole("trainer.accumulate", self.accumulate, 1, "Use 1 to update after every micro-batch.")
        whole("trainer.max_skips", self.max_skips, 1, "Use 1 to end the run at the first update that is skipped.")
        for name, without in _OPTIONAL.items():
            value = getattr(self, name)
            if name in _NEVER and type(value) is int and value == 0:
                object.__setattr__(self, name, None)
            elif value is not None:
                whole(f"trainer.{name}", value, 1, f"Use None {without}.")
        if self.workers != "auto":
            remedy = "Use 'auto' to let the device decide, or 0 to make batches in the process that trains."
            whole("trainer.workers", self.workers, 0, remedy)
        if self.seed is not None:
            seed_number("trainer.seed", self.seed)
        for name in ("clip_norm", "clip_value"):
            if getattr(self, name) is not None:
                number(f"trainer.{name}", getattr(self, name), above=0, remedy="Use None for no limit.")
        if self.non_finite not in ("skip", "raise", "off"):
            raise ConfigError(
                f"trainer.non_finite must be 'skip', 'raise' or 'off', got {self.non_finite!r}.\n"
                "Use 'skip' to go on without the updates that are not finite."
            )
        for name in ("compile", "deterministic"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(
                    f"trainer.{name} must be true or false, got {getattr(self, name)!r}.\nUse false to leave it off."
                )
        if self.tf32 is not None and not isinstance(self.tf32, bool):
            raise ConfigError(
                f"trainer.tf32 must be true, false or null, got {self.tf32!r}.\nUse null to leave it as it is."
            )


def listed(name: str, given: object) -> tuple[Any, ...]:
    """The items of a list.

    Raises:
        ConfigError: It is no list, nor anything else with items.
    """
    if isinstance(given, str | Mapping) or not isinstance(given, Iterable):
        raise ConfigError(f"{name} must be a list, got {given!r}.\nPut a single one in a list, too.")
    return tuple(given)


def is_logger(found: object) -> bool:
    """Whether a logger, or what a class makes, has what a run calls."""
    return all(callable(getattr(found, name, None)) for name in ("log_metrics", "finalize"))


def checked_loggers(given: object) -> tuple[Any, ...]:
    """The loggers, each with what a run calls.

    Raises:
        ConfigError: One is no logger.
    """
    loggers = listed("trainer.loggers", given)
    for position, logger in enumerate(loggers):
        if isinstance(logger, type) or not is_logger(logger):
            raise ConfigError(
                f"trainer.loggers[{position}] must be {A_LOGGER}, got {logger!r}.\n"
                "Make one; a run file writes {class_path: module.Class, init_args: {...}}."
            )
    return loggers


def run_folder(given: object) -> Path | None:
    """The folder of a run, absolute; ``None`` leaves it to the run.

    Raises:
        ConfigError: It is no path, or an empty one, which would be the current folder.
    """
    if given is None:
        return None
    if not isinstance(given, str | PathLike) or not str(given).strip():
        raise ConfigError(f"trainer.run_dir must be a folder, got {given!r}.\nUse None for a new one under runs/.")
    return Path(given).absolute()
