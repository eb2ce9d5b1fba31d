"""What ranks leave for each other, on a store in this process."""

from __future__ import annotations

import pytest
from torch.distributed import DistError, HashStore  # type: ignore[attr-defined]

from policyfit.strategies.ddp import DDP
from policyfit.strategies.roll_call import RollCall


def test_call_tells_who_is_gone_and_who_is_elsewhere() -> None:
    store = HashStore()
    caller, listener = RollCall(store, 0, 3), RollCall(store, 1, 3)
    assert caller.call(0.6) == (None, [2], [1, 2])
    caller.end()
    listener.end()


def test_call_ends_at_once_when_every_rank_calls() -> None:
    store = HashStore()
    one, other = RollCall(store, 0, 2), RollCall(store, 1, 2)
    assert one.call(0.0) == (None, [1], [1])
    assert other.call(1000.0) == (None, [], [])
    one.end()
    other.end()


def test_first_words_stay_and_are_the_answer() -> None:
    store = HashStore()
    one, other = RollCall(store, 0, 2), RollCall(store, 1, 2)
    other.leave_words("the cause")
    one.leave_words("a consequence")
    assert one.call(1000.0) == other.call(1000.0) == ("the cause", [], [])
    one.end()
    other.end()


def test_what_a_rank_has_noted_is_told_to_one_that_asks_and_nothing_once_all_have_left() -> None:
    store = HashStore()
    rank, failed = RollCall(store, 0, 2), RollCall(store, 1, 2)
    rank.note(30, [7, "float32"])
    assert failed.ask(30, 1000.0) == [7, "float32"]
    with pytest.raises(DistError, match=r"no rank told within 0\.1 s"):
        failed.ask(31, 0.1)
    failed.withdraw()
    rank.note(31, ())
    rank.withdraw()
    assert failed.ask(31, 1000.0) == []  # noted before it left
    assert failed.ask(40, 1000.0) is None
    rank.end()
    failed.end()


def test_rank_that_asks_is_told_that_others_have_broken_off_if_one_that_failed_is_to_come() -> None:
    store = HashStore()
    rank, failed = RollCall(store, 0, 2), RollCall(store, 1, 2)
    failed.leave_words("the cause")
    assert not rank.break_off()
    failed.leave_words("the cause", comes=True)
    assert rank.break_off()
    with pytest.raises(DistError, match="another rank has given up"):
        failed.ask(30, 1000.0)
    rank.end()
    failed.end()


def test_ranks_that_notice_later_are_told_what_the_first_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RollCall, "patience_s", 0.1)
    store, ranks = HashStore(), [DDP(), DDP()]
    ranks[0]._roll_call = RollCall(store, 0, 3)
    first = ranks[0].lost(RuntimeError("Connection reset. This is typically caused by"))
    ranks[1]._roll_call = RollCall(store, 2, 3)
    assert str(first).startswith(
        "Ranks 1, 2 no longer answer: called for 0.1 s after RuntimeError: Connection reset.\n"
    )
    assert str(ranks[1].lost(RuntimeError("another error"))) == str(first)
    assert ranks[0]._roll_call is not None
    store.set("left 1", "")
    assert ranks[0]._roll_call.ask(10, 1000.0) is None  # both have left, so nobody waits for what they do
    for strategy in ranks:
        strategy.teardown()
