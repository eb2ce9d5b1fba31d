"""The list of hooks, the methods of ``Callback`` and the calls of a real run are the same."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box
from torch import Tensor
from toys import MLP, InMemory, batches

from policyfit import Callback, Trainer
from policyfit.callbacks import hooks
from policyfit.callbacks.hooks import HOOKS

PAGE = (Path(__file__).parents[2] / "docs" / "callbacks.md").read_text()
NOT_HOOKS = {"around_evaluation", "state_key", "state_dict", "load_state_dict", "due"}


class Acting(MLP):
    """A toy policy that can also act."""

    def select_action(self, observation: Any) -> Tensor:
        return torch.zeros(1, 1)


class OneStep(gymnasium.Env[Any, Any]):
    """An episode of one step, solved."""

    observation_space = Box(-1, 1, (1,), np.float32)
    action_space = Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        return np.zeros(1, np.float32), 1.0, True, False, {"is_success": True}


class _Recorder(Callback):
    def __init__(self, due_at: tuple[int, ...] = (), at_due: Callable[[Trainer], None] | None = None) -> None:
        self.due_at, self.at_due = due_at, at_due
        self.calls: list[str] = []
        self.arguments: dict[str, tuple[Any, ...]] = {}

    def due(self, step: int) -> bool:
        return step in self.due_at

    def state_dict(self) -> dict[str, Any]:
        return {"calls": len(self.calls)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls.append("load_state_dict")


def _recording(hook: str) -> Callable[..., None]:
    def record(self: Any, *arguments: Any) -> None:
        self.calls.append(hook)
        self.arguments[hook] = arguments
        if hook == "on_due" and self.at_due is not None:
            self.at_due(arguments[0])

    return record


def recorder(**settings: Any) -> Any:
    """A callback that writes down every hook there is."""
    return type("Recorder", (_Recorder,), {hook: _recording(hook) for hook in HOOKS})(**settings)


def fit(callback: Callback, *, steps: int = 3, accumulate: int = 2, val: bool = True, resume: str | None = None,
        log_every: int | None = None, poisoned: tuple[int, ...] = ()) -> Trainer:  # fmt: skip
    trainer = Trainer(
        "cpu", max_steps=steps, accumulate=accumulate, val_every=2, log_every=log_every, seed=0, run_dir="run",
        callbacks=[callback], default_callbacks=False,
    )  # fmt: skip
    data = InMemory(batches(4, poisoned=poisoned))
    trainer.fit(Acting(), data, InMemory(batches(1)) if val else None, resume=resume)
    return trainer


MICRO_BATCH = ["on_train_batch_start", "on_before_backward", "on_after_backward"]
APPLY = ["on_before_optimizer_step", "on_before_zero_grad"]
VALIDATION = ["on_validation_start", "on_validation_batch_start", "on_validation_batch_end"]


def test_hook_list_is_the_methods_of_callback() -> None:
    methods = {name for name in vars(Callback) if not name.startswith("_") and inspect.isfunction(vars(Callback)[name])}
    assert methods - NOT_HOOKS == set(HOOKS)
    assert len(HOOKS) == len(set(HOOKS))


def test_hook_list_is_the_documented_one() -> None:
    named = set(re.findall(r"\bon_\w+|\bsetup\b|\bteardown\b", hooks.__doc__ or ""))
    assert named == set(HOOKS)


def test_page_on_callbacks_names_every_hook_and_no_other() -> None:
    assert set(re.findall(r"\bon_[a-z_]+|\bsetup\b|\bteardown\b", PAGE)) - {"on_"} == set(HOOKS)


def test_callbacks_of_the_page_work_as_written() -> None:
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(block, names)
    curriculum, reasons = names["Curriculum"](every=2), names["SkipReasons"]()
    policy = Acting()
    trainer = Trainer("cpu", max_steps=5, run_dir="run", callbacks=[curriculum, reasons], default_callbacks=False)
    trainer.fit(policy, InMemory(batches(7, poisoned=(1, 4))))
    assert policy.horizon == 4 + 2
    assert reasons.state_dict() == {"reasons": {"non_finite": 2}}
    assert (trainer.step, trainer.status) == (5, "completed")


@pytest.mark.parametrize("hook", HOOKS)
def test_hook_takes_trainer_and_policy_first(hook: str) -> None:
    assert list(inspect.signature(getattr(Callback, hook)).parameters)[:3] == ["self", "trainer", "policy"]


def test_fit_calls_the_hooks_in_the_documented_order() -> None:
    callback = recorder(due_at=(3,))
    fit(callback, log_every=2)
    assert callback.calls == [
        *("setup", "on_fit_start", "on_train_epoch_start"),
        *(*MICRO_BATCH, "on_train_batch_end"),
        *(*MICRO_BATCH, *APPLY, "on_train_batch_end"),  # nothing is due at step 1: its outcome comes later
        *(*MICRO_BATCH, "on_train_batch_end"),
        *(*MICRO_BATCH, "on_update_end", *APPLY, "on_train_batch_end"),
        *("on_update_end", "on_log", *VALIDATION, "on_log", "on_validation_end"),  # step 2: log and validate
        *("on_train_epoch_end", "on_train_epoch_start"),
        *(*MICRO_BATCH, "on_train_batch_end"),
        *(*MICRO_BATCH, *APPLY, "on_train_batch_end"),
        *("on_update_end", "on_due"),  # step 3
        *(
            "on_log",
            *VALIDATION,
            "on_log",
            "on_validation_end",
            "on_fit_end",
            "teardown",
        ),  # not yet logged or validated
    ]


def test_last_update_of_an_epoch_is_settled_before_the_epoch_ends() -> None:
    callback = recorder()
    fit(callback, steps=3, val=False)
    first_end = callback.calls.index("on_train_epoch_end")
    assert callback.calls[first_end - 1] == "on_update_end"
    assert callback.calls[:first_end].count("on_update_end") == 2


def test_resumed_fit_loads_states_first_and_does_not_begin_its_epoch_again() -> None:
    fit(recorder(due_at=(1,), at_due=lambda trainer: trainer.save_checkpoint() and None), steps=1)
    callback = recorder()
    fit(callback, steps=2, resume="last")
    assert callback.calls[:5] == ["load_state_dict", "setup", "on_load_checkpoint", "on_fit_start", MICRO_BATCH[0]]
    assert "on_train_epoch_start" not in callback.calls


def test_save_calls_on_save_checkpoint_whose_additions_come_back_at_a_resume() -> None:
    class Notes(Callback):
        found: dict[str, Any] | None = None

        def due(self, step: int) -> bool:
            return step == 1

        def on_due(self, trainer: Trainer, policy: Any) -> None:
            trainer.save_checkpoint()

        def on_save_checkpoint(self, trainer: Trainer, policy: Any, checkpoint: dict[str, Any]) -> None:
            checkpoint["note"] = {"scale": torch.tensor([0.5])}

        def on_load_checkpoint(self, trainer: Trainer, policy: Any, checkpoint: dict[str, Any]) -> None:
            self.found = checkpoint

    fit(Notes(), steps=1)
    resumed = Notes()
    fit(resumed, steps=2, resume="last")
    assert resumed.found is not None
    assert torch.equal(resumed.found["note"]["scale"], torch.tensor([0.5]))


def test_failed_fit_calls_on_exception_in_place_of_on_fit_end() -> None:
    callback = recorder(due_at=(1,), at_due=lambda trainer: 1 / 0 and None)
    with pytest.raises(ZeroDivisionError) as raised:
        fit(callback)
    assert callback.calls[-3:] == ["on_due", "on_exception", "teardown"]
    assert callback.arguments["on_exception"][2] is raised.value
    assert "on_fit_end" not in callback.calls


def test_stop_ends_the_run_at_that_step_without_a_last_validation() -> None:
    callback = recorder(due_at=(1,), at_due=lambda trainer: trainer.stop("enough"))
    trainer = fit(callback)
    assert (trainer.step, trainer.status, trainer.stop_reason) == (1, "stopped", "enough")
    assert callback.calls[-3:] == ["on_log", "on_fit_end", "teardown"]  # and no validation of a run cut short


def test_skipped_update_reports_its_outcome_and_makes_nothing_due() -> None:
    callback = recorder(due_at=(1,))
    fit(callback, steps=1, accumulate=1, val=False, poisoned=(0,))
    assert callback.calls.count("on_due") == 1
    first = callback.calls.index("on_update_end")
    assert callback.calls[first + 1] == MICRO_BATCH[0]  # the next micro-batch, and no on_due
    assert callback.arguments["on_update_end"][2][:4] == (True, None, 1, 2)


def test_event_reaches_on_log_at_once() -> None:
    callback = recorder(due_at=(1,), at_due=lambda trainer: trainer.event("spilled", litres=2))
    fit(callback, steps=1, val=False)
    assert callback.calls[-5:] == ["on_due", "on_log", "on_log", "on_fit_end", "teardown"]
    at_due = callback.calls.index("on_due")
    assert callback.calls[at_due + 1] == "on_log"


def test_validate_and_evaluate_alone_call_their_hooks_between_setup_and_teardown() -> None:
    callback = recorder()
    trainer = Trainer("cpu", callbacks=[callback], default_callbacks=False)
    trainer.validate(Acting(), InMemory(batches(1)))
    assert callback.calls == ["setup", *VALIDATION, "on_validation_end", "teardown"]
    assert callback.arguments["setup"][2] == "validate"
    callback.calls.clear()
    report = trainer.evaluate(Acting(), OneStep, episodes=2)
    assert callback.calls == ["setup", "on_rollout_start", "on_rollout_end", "teardown"]
    assert (callback.arguments["setup"][2], callback.arguments["on_rollout_end"][2]) == ("evaluate", report)
    assert report.successes == 2


def test_evaluate_inside_a_run_calls_neither_setup_nor_teardown_again() -> None:
    callback = recorder(due_at=(1,))
    callback.at_due = lambda trainer: trainer.evaluate(Acting(), OneStep, episodes=1)
    fit(callback, steps=1, val=False)
    at_due = callback.calls.index("on_due")
    assert callback.calls[at_due : at_due + 4] == ["on_due", "on_rollout_start", "on_log", "on_rollout_end"]
    assert (callback.calls.count("setup"), callback.calls.count("teardown")) == (1, 1)


def test_every_hook_of_the_list_is_called_by_some_run() -> None:
    def act(trainer: Trainer) -> None:
        trainer.save_checkpoint()
        trainer.evaluate(Acting(), OneStep, episodes=1)
        raise KeyboardInterrupt

    interrupted = recorder(due_at=(2,), at_due=act)
    with pytest.raises(KeyboardInterrupt):
        fit(interrupted)
    resumed = recorder()
    trainer = fit(resumed, resume=str(Path("run")))
    assert trainer.status == "completed"
    assert {*interrupted.calls, *resumed.calls} - {"load_state_dict"} == set(HOOKS)
