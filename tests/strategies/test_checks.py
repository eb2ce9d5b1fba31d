"""Plain values are refused in one form: the name, what must hold, what was found, what to do."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from policyfit.strategies.checks import is_whole, number, seed_number, true_or_false, whole
from policyfit.strategies.errors import ConfigError


@pytest.mark.parametrize("value", [0, -1, 1.0, True, "1", None, math.nan])
def test_what_is_no_whole_number_of_at_least_one_is_refused_with_the_remedy(value: Any) -> None:
    with pytest.raises(ConfigError) as refused:
        whole("trainer.accumulate", value, 1, "Use 1 to update after every micro-batch.")
    assert str(refused.value) == (
        f"trainer.accumulate must be a whole number of at least 1, got {value!r}.\n"
        "Use 1 to update after every micro-batch."
    )
    assert not is_whole(value, 1)


def test_whole_numbers_within_pass() -> None:
    whole("n", 0, 0, "Use 0.")
    whole("n", 10**30, 1, "Use 1.")


@pytest.mark.parametrize(
    ("bounds", "inside", "outside", "words"),
    [
        ({}, [0, -2.5, 10**400], [math.inf, -math.inf, math.nan, True, "1", None, np.zeros(1)], "a finite number"),
        ({"above": 0}, [1e-300, 3], [0, 0.0, -1, math.inf], "a finite number above 0"),
        ({"above": 0, "below": 1}, [0.5], [0, 1, 1.0], "a finite number above 0 and below 1"),
        ({"least": 0, "most": 1}, [0, 1, 0.5], [-1e-9, 1.001], "a finite number of at least 0 and of at most 1"),
    ],
)
def test_numbers_are_kept_within_their_bounds(
    bounds: dict[str, float], inside: list[Any], outside: list[Any], words: str
) -> None:
    for value in inside:
        number("x", value, **bounds, remedy="Use 0.5.")
    for value in outside:
        with pytest.raises(ConfigError) as refused:
            number("x", value, **bounds, remedy="Use 0.5.")
        assert str(refused.value) == f"x must be {words}, got {value!r}.\nUse 0.5."


@pytest.mark.parametrize("value", [-1, 2**63, 1.0, True, "3", None])
def test_what_is_no_seed_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.seed must be a whole number from 0 to 2\*\*63 - 1, got .*\nUse "):
        seed_number("trainer.seed", value)


def test_every_seed_that_the_streams_take_passes() -> None:
    for value in (0, 1, 2**63 - 1):
        seed_number("seed", value)


@pytest.mark.parametrize("value", [True, False])
def test_true_and_false_are_taken(value: bool) -> None:
    true_or_false("EMA.warmup", value)


@pytest.mark.parametrize("value", ["false", "no", 0, 1, 0.5, None])
def test_what_is_only_taken_for_true_or_false_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match=r"EMA\.warmup must be true or false, got .*\n.*default"):
        true_or_false("EMA.warmup", value)
