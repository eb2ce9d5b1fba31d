"""The constructor's plain values, checked one by one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ..strategies.errors import ConfigError

NonFinite = Literal["skip", "raise", "off"]


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
        for name in ("batch_size", "accumulate", "max_skips"):
            whole(f"trainer.{name}", getattr(self, name), 1)
        for name in ("max_steps", "max_epochs", "val_every", "log_every"):
            if getattr(self, name) is not None:
                whole(f"trainer.{name}", getattr(self, name), 1)
        if self.workers != "auto":
            whole("trainer.workers", self.workers, 0, or_else="'auto' or ")
        if self.seed is not None:
            whole("trainer.seed", self.seed, 0)
        for name in ("clip_norm", "clip_value"):
            value = getattr(self, name)
            if value is not None and (not _is_number(value) or not math.isfinite(value) or value <= 0):
                raise ConfigError(f"trainer.{name} must be a number above 0, or None for no limit, got {value!r}.")
        if self.non_finite not in ("skip", "raise", "off"):
            raise ConfigError(f"trainer.non_finite must be 'skip', 'raise' or 'off', got {self.non_finite!r}.")
        for name in ("compile", "deterministic"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"trainer.{name} must be true or false, got {getattr(self, name)!r}.")
        if self.tf32 is not None and not isinstance(self.tf32, bool):
            raise ConfigError(f"trainer.tf32 must be true, false or null, got {self.tf32!r}.")


def whole(name: str, value: object, least: int, *, or_else: str = "") -> None:
    """Refuse what is not a whole number of at least ``least``.

    Raises:
        ConfigError: Naming the setting as the user wrote it.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} must be {or_else}a whole number of at least {least}, got {value!r}.")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
