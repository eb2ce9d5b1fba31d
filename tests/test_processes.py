"""The helper of the tests of several processes: what its tests say of a rank has to be so."""

from __future__ import annotations

import os
import time

import pytest
from processes import outcomes_of, run


def who_am_i(base: int) -> tuple[int, int, int]:
    return base + int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), os.getpid()


def fail_on_rank_1() -> str:
    if os.environ["RANK"] == "1":
        raise ValueError("only here")
    return "fine"


def die_or_stay() -> None:
    if os.environ["RANK"] == "0":
        os._exit(7)
    time.sleep(60)


def test_each_rank_runs_in_a_process_of_its_own() -> None:
    found = run(who_am_i, 10, ranks=3)
    assert [(rank, world) for rank, world, _ in found] == [(10, 3), (11, 3), (12, 3)]
    assert len({os.getpid(), *(pid for _, _, pid in found)}) == 4


def test_rank_that_raises_is_told_with_its_traceback() -> None:
    with pytest.raises(AssertionError, match=r"rank 1: Traceback[\s\S]*ValueError: only here"):
        run(fail_on_rank_1)
    outcomes = outcomes_of(fail_on_rank_1)
    assert [(o.value, o.exit_code) for o in outcomes] == [("fine", 0), (None, 1)]


def test_rank_that_dies_or_stays_is_told_within_the_limit() -> None:
    start = time.monotonic()
    assert [o.exit_code for o in outcomes_of(die_or_stay, limit_s=1)] == [7, -9]
    assert time.monotonic() - start < 30
