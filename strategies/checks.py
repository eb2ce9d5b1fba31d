"""Checks of plain values, in one form: what must hold, what was found, and what to do."""

from __future__ import annotations

import math
from typing import TypeGuard

from .errors import ConfigError

_LAST_SEED = 2**63 - 1  # the largest that python, numpy and torch all take


def whole(name: str, value: object, least: int, remedy: str) -> None:
    """Refuse what is not a whole number of at least ``least``.

    Args:
        name: The setting as the user wrote it.
        remedy: What to do, as a sentence.

    Raises:
        ConfigError: It is not.
    """
    if not is_whole(value, least):
        raise ConfigError(f"{name} must be a whole number of at least {least}, got {value!r}.\n{remedy}")


def number(
    name: str,
    value: object,
    *,
    above: float | None = None,
    below: float | None = None,
    least: float | None = None,
    most: float | None = None,
    remedy: str,
) -> None:
    """Refuse what is not a finite number within the bounds that are given; ``least`` and ``most`` are within.

    Args:
        name: The setting as the user wrote it.
        remedy: What to do, as a sentence.

    Raises:
        ConfigError: It is not.
    """
    if (
        _is_finite(value)
        and (above is None or value > above)
        and (below is None or value < below)
        and (least is None or value >= least)
        and (most is None or value <= most)
    ):
        return
    bounds = {"above": above, "below": below, "of at least": least, "of at most": most}
    words = " and ".join(f"{word} {bound}" for word, bound in bounds.items() if bound is not None)
    raise ConfigError(f"{name} must be a finite number{f' {words}' if words else ''}, got {value!r}.\n{remedy}")


def true_or_false(name: str, value: object) -> bool:
    """The value, unless it is no bool: the text "false" and the number 0 are none.

    Args:
        name: The setting as the user wrote it.

    Raises:
        ConfigError: It is not.
    """
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be true or false, got {value!r}.\nLeave it out for the default.")
    return value


def seed_number(name: str, value: object) -> None:
    """Refuse what is not a seed: a whole number from 0 to 2**63 - 1.

    Raises:
        ConfigError: It is not.
    """
    if not is_whole(value, 0) or value > _LAST_SEED:
        raise ConfigError(
            f"{name} must be a whole number from 0 to 2**63 - 1, got {value!r}.\nUse a small one, such as {name}=0."
        )


def is_whole(value: object, least: int) -> TypeGuard[int]:
    """Whether it is a whole number of at least ``least``; true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_finite(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and -math.inf < value < math.inf
