"""Everything that ends a run ends all of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from policyfit.trainer.ending import run_all


def failing(error: BaseException) -> Callable[[], None]:
    def step() -> None:
        raise error

    return step


def test_every_step_is_taken_and_the_first_failure_is_raised() -> None:
    taken: list[int] = []
    first, second = ValueError("first"), KeyError("second")
    steps = [lambda: taken.append(1), failing(first), lambda: taken.append(2), failing(second), lambda: taken.append(3)]
    with pytest.raises(ValueError, match="first") as raised:
        run_all(steps)
    assert raised.value is first
    assert taken == [1, 2, 3]
    assert first.__notes__ == ["While this was handled, another error came: KeyError: 'second'"]


@dataclass(frozen=True)
class Framed(Exception):
    words: str


def test_a_failure_beside_an_error_that_is_a_frozen_dataclass_is_told() -> None:
    error = Framed("the cause")
    run_all([failing(OSError("on the way"))], error)
    assert error.__notes__ == ["While this was handled, another error came: OSError: on the way"]


def test_the_error_under_way_stays_the_one_that_is_told() -> None:
    error = ValueError("the cause")
    run_all([failing(OSError("on the way")), failing(KeyboardInterrupt())], error)
    assert error.__notes__ == [
        "While this was handled, another error came: OSError: on the way",
        "While this was handled, another error came: KeyboardInterrupt",
    ]
