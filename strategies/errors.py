"""Every error policyfit raises on purpose.

    PolicyfitError                    the root; a run that fails (exit code 1)
    ├── ConfigError        ValueError     what was written cannot be meant (exit code 2)
    ├── DeviceUnavailableError   Runtime  the device asked for is not here (exit code 2)
    ├── PrecisionError           Runtime  the precision asked for would not be what runs (exit code 2)
    ├── DistributedError         Runtime  the processes asked for cannot work together (exit code 2)
    │   ├── RankFailed                    ... one of them failed, and all ended (exit code 1)
    │   └── RanksLost                     ... some of them do not answer any more (exit code 1)
    ├── CheckpointError          Runtime  a checkpoint cannot be written, or is not what it says
    ├── CallbackError            Runtime  a callback is not one, or cannot work here (exit code 2)
    └── TrainingDiverged         Runtime  the updates stopped landing
        └── LossScaleCollapse             ... because float16's loss scale has nowhere left to go

A message says what was asked, what was found, and what to do, in whole sentences.
"""

import re
from collections.abc import Sequence
from dataclasses import FrozenInstanceError, is_dataclass


class PolicyfitError(Exception):
    """Root of all errors that a user can act on."""

    exit_code = 1


class ConfigError(PolicyfitError, ValueError):
    """A setting that cannot be meant: unknown, of the wrong type, out of range, or against another one."""

    exit_code = 2


class DeviceUnavailableError(PolicyfitError, RuntimeError):
    """The device that was asked for does not exist here; the message says why and what would work."""

    exit_code = 2


class PrecisionError(PolicyfitError, RuntimeError):
    """The precision that was asked for would not be what runs on this device."""

    exit_code = 2


class DistributedError(PolicyfitError, RuntimeError):
    """The processes that were asked for cannot be had, or do not agree."""

    exit_code = 2


class CheckpointError(PolicyfitError, RuntimeError):
    """A checkpoint could not be written, or is damaged, foreign or missing a part."""


class CallbackError(PolicyfitError, RuntimeError):
    """A callback that cannot be called as its author meant."""

    exit_code = 2


class TrainingDiverged(PolicyfitError, RuntimeError):
    """Updates were skipped one after another until the run could no longer be called training."""


class LossScaleCollapse(TrainingDiverged):
    """The loss scale of float16 fell to its floor: gradients overflow whatever it is."""


def without_numbers(words: str) -> str:
    """What is alike where several processes meet the same error, each at its own sample, line of data or address."""
    return re.sub(r"0x[0-9a-f]+|\d+", "#", words)


def some(names: Sequence[str], most: int = 5) -> str:
    """The first of many names, and how many more there are, for a message."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def add_note(error: BaseException, words: str) -> None:
    """As ``error.add_note``, which one that is a frozen dataclass does not take."""
    vars(error).setdefault("__notes__", []).append(words)


_LONGEST = 10_000  # characters; more than the others of a run need, and less than what carries them can take


def in_words(error: BaseException) -> str:
    """An error's kind and message, for where its traceback does not go; of a loader's worker, the error met there."""
    if isinstance(error, FrozenInstanceError) and is_dataclass(cause := error.__context__):
        error = cause  # a frozen dataclass, on which Python itself fails to put the traceback
    try:
        words = f"{type(error).__name__}: {error}".removesuffix(": ")
    except Exception:  # its own __str__ fails
        return type(error).__name__
    _, traceback, lines = words.partition("\nOriginal Traceback (most recent call last):\n")
    if traceback:  # its frames are indented
        words = next((line for line in reversed(lines.splitlines()) if line and not line.startswith(" ")), words)
    return words[:_LONGEST]
