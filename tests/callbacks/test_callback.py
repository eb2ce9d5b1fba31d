"""``CallbackList``: what it refuses, what it binds, and how states go round."""

from __future__ import annotations

from typing import Any

import pytest

from policyfit import Callback, CallbackError, Checkpoint, Trainer
from policyfit.callbacks.callback import CallbackList
from policyfit.callbacks.hooks import HOOKS


class Counting(Callback):
    """Counts, keeps the count, and writes into a common diary."""

    def __init__(self, name: str = "", diary: list[str] | None = None) -> None:
        self.name, self.diary, self.count = name, [] if diary is None else diary, 0

    @property
    def state_key(self) -> str:
        return f"Counting{self.name}"

    def on_fit_start(self, trainer: Any, policy: Any) -> None:
        self.count += 1
        self.diary.append(self.name)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count} if self.count else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


class Plain(Callback):
    """Overrides nothing."""


def test_hooks_that_nobody_overrides_are_not_bound() -> None:
    callbacks = CallbackList([Plain(), Counting()])
    assert {hook for hook in HOOKS if callbacks.bound[hook]} == {"on_fit_start"}
    assert callbacks.with_due == ()
    assert callbacks.need_outcome_now is False


def test_hook_that_is_inherited_from_an_own_base_is_bound() -> None:
    class Heir(Counting):
        pass

    heir = Heir()
    assert CallbackList([heir]).bound["on_fit_start"] == (heir.on_fit_start,)


def test_hook_given_to_one_instance_is_bound() -> None:
    seen = []
    callback = Plain()
    callback.on_fit_end = lambda *arguments: seen.append(arguments)  # type: ignore[method-assign]
    CallbackList([callback]).call("on_fit_end", "trainer", "policy")
    assert seen == [("trainer", "policy")]


def test_callbacks_run_in_list_order() -> None:
    diary: list[str] = []
    callbacks = CallbackList([Counting("b", diary), Plain(), Counting("a", diary)])
    callbacks.call("on_fit_start", None, None)
    assert diary == ["b", "a"]
    assert [type(c).__name__ for c in callbacks] == ["Counting", "Plain", "Counting"]
    assert len(callbacks) == 3


def test_due_and_needs_outcome_now_are_found_once() -> None:
    class Waiting(Callback):
        needs_outcome_now = True

        def due(self, step: int) -> bool:
            return step == 7

    waiting = Waiting()
    callbacks = CallbackList([Plain(), waiting])
    assert callbacks.with_due == (waiting,)
    assert callbacks.need_outcome_now is True


def test_callback_that_saves_is_asked_last_whether_it_is_due() -> None:
    class Asks(Plain):
        def due(self, step: int) -> bool:
            return True

    checkpoint, first, second = Checkpoint(), Asks(), Counting()
    second.due = lambda step: False  # type: ignore[method-assign]
    assert CallbackList([first, checkpoint, second]).with_due == (first, second, checkpoint)


def test_calling_a_hook_that_does_not_exist_fails() -> None:
    with pytest.raises(KeyError):
        CallbackList([]).call("on_fit_begin")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("on_train_batch_ends", "on_train_batch_end"),
        ("on_fit_begin", "on_fit_end"),
        ("on_epoch_end", "on_train_epoch_end"),
    ],
)
def test_unknown_hook_is_refused_with_the_nearest_one(name: str, meant: str) -> None:
    callback = type("Mistaken", (Callback,), {name: lambda self, trainer, policy: None})()
    with pytest.raises(CallbackError, match=rf"Mistaken\.{name} is not a hook .* called\. Did you mean {meant}\?"):
        CallbackList([callback])


def test_unknown_hook_without_a_near_one_is_refused_without_a_guess() -> None:
    callback = type("Mistaken", (Callback,), {"on_xyz": lambda self: None})()
    with pytest.raises(CallbackError, match=r"Mistaken\.on_xyz is not a hook") as raised:
        CallbackList([callback])
    assert "Did you mean" not in str(raised.value)


def test_helper_methods_and_plain_values_are_no_hooks() -> None:
    class Tidy(Callback):
        on_board = True

        def _on_something(self) -> None: ...

        def once(self) -> None: ...

    assert len(CallbackList([Tidy()])) == 1


def test_class_in_place_of_an_instance_is_refused_with_the_remedy() -> None:
    given: Any = [Plain]
    with pytest.raises(CallbackError, match=r"Pass an instance: add \(\)"):
        CallbackList(given)


def test_object_that_is_no_callback_is_refused_with_the_remedy() -> None:
    given: Any = [print]
    with pytest.raises(CallbackError, match=r"Derive it from policyfit\.Callback"):
        CallbackList(given)


def test_two_callbacks_with_one_state_key_are_refused_with_the_key() -> None:
    with pytest.raises(CallbackError, match=r"Two callbacks .* under 'Countinga'"):
        CallbackList([Counting("a"), Counting("b"), Counting("a")])


def test_trainer_refuses_a_wrong_callback_when_it_is_made() -> None:
    with pytest.raises(CallbackError, match="Two callbacks"):
        Trainer("cpu", callbacks=[Counting(), Counting()])


def test_states_go_round_by_key_whatever_the_order() -> None:
    first, second = Counting("a"), Counting("b")
    first.count, second.count = 3, 5
    states = CallbackList([first, Plain(), second]).state_dict()
    assert states == {"Countinga": {"count": 3}, "Countingb": {"count": 5}}  # Plain has no state, so no entry
    loaded = CallbackList([Counting("b"), Counting("a"), Plain()])
    assert loaded.load_state_dict(states) == []
    assert [c.count for c in loaded if isinstance(c, Counting)] == [5, 3]


def test_states_without_a_callback_are_named_and_callbacks_without_a_state_keep_theirs() -> None:
    callback = Counting("a")
    callback.count = 2
    assert CallbackList([callback]).load_state_dict({"Gone": {"x": 1}, "Before": {}}) == ["Before", "Gone"]
    assert callback.count == 2
