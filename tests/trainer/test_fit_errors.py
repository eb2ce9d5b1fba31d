"""A run that fails anywhere leaves process, policy and optimizers as it found them, and says so to everybody."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from toys import Batch, InMemory, batches

from policyfit import FP16, Callback, Checkpoint, Trainer
from policyfit.callbacks.hooks import HOOKS
from policyfit.strategies.distributed import SingleProcess


class Policy(nn.Module):
    """Lightning's dialect, which gets ``log`` for the run; can act."""

    log: Callable[..., None]

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(6, 3)
        self.backbone = nn.Linear(6, 6).eval()
        self.optimizer = AdamW(self.parameters(), lr=1e-2, fused=True)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.log("seen", 1.0)
        return nn.functional.mse_loss(self.net(self.backbone(batch.x)), batch.y)

    validation_step = training_step

    def configure_optimizers(self) -> Optimizer:
        return self.optimizer

    def select_action(self, observation: Tensor) -> Tensor:
        return torch.zeros(1, 1)


class Ends(Callback):
    """Which of the last hooks came, and with which status."""

    def __init__(self) -> None:
        self.came: list[tuple[str, str]] = []

    def on_fit_end(self, trainer: Trainer, policy: nn.Module) -> None:
        self.came.append(("on_fit_end", trainer.status))

    def on_exception(self, trainer: Trainer, policy: nn.Module, exception: BaseException) -> None:
        self.came.append((type(exception).__name__, trainer.status))

    def teardown(self, trainer: Trainer, policy: nn.Module, stage: str) -> None:
        if stage == "fit":
            self.came.append(("teardown", trainer.status))


class Sets(Callback):
    """A switch of the process, as ``TF32`` sets some."""

    on = False

    def setup(self, *_: Any) -> None:
        Sets.on = True

    def teardown(self, *_: Any) -> None:
        Sets.on = False


class OneStep(gymnasium.Env[Any, Any]):
    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (1,))
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        return np.zeros(1, np.float32), 1.0, True, False, {}


class Evaluates(Callback):
    def due(self, step: int) -> bool:
        return step == 2

    def on_due(self, trainer: Trainer, policy: nn.Module) -> None:
        trainer.evaluate(policy, OneStep, episodes=1)


def raising(hook: str, error: BaseException) -> Callback:
    def method(self: Any, *_: Any) -> None:
        raise error

    members: dict[str, Any] = {hook: method}
    if hook == "on_due":
        members["due"] = lambda self, step: step == 1
    made: Callback = type(f"Raises_{hook}", (Callback,), members)()  # two of one name would share a state
    return made


def everything(policy: Policy) -> tuple[Any, ...]:
    return (
        {name: module.training for name, module in policy.named_modules()},
        sorted(vars(policy)),
        sorted(vars(policy.optimizer)),
        [p.grad for p in policy.parameters()],
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        Sets.on,
    )


def trainer_with(*callbacks: Callback, precision: str = "no", max_steps: int = 4) -> Trainer:
    strategy: Any = FP16({"init_scale": 8.0}, allow_cpu=True) if precision == "fp16" else precision
    return Trainer(
        "cpu", strategy, max_steps=max_steps, accumulate=2, val_every=2, log_every=1, deterministic=True, run_dir="run",
        callbacks=callbacks, default_callbacks=False,
    )  # fmt: skip


def fit(trainer: Trainer, policy: nn.Module, resume: str | None = None) -> None:
    trainer.fit(policy, InMemory(batches(4)), InMemory(batches(1)), resume=resume)


@pytest.mark.parametrize("precision", ["no", "fp16"])
@pytest.mark.parametrize("hook", HOOKS)
def test_an_error_in_any_hook_leaves_everything_as_found_and_reaches_everybody(hook: str, precision: str) -> None:
    policy, ends, resume = Policy(), Ends(), None
    if hook == "on_load_checkpoint":
        fit(trainer_with(Checkpoint(), precision=precision, max_steps=2), Policy())
        resume = "last"
    failing = [raising(hook, KeyError(hook))]
    if hook == "on_exception":
        failing.insert(0, raising("on_after_backward", OSError("the cause")))
    trainer = trainer_with(Sets(), *failing, Evaluates(), Checkpoint(), ends, precision=precision)
    before = everything(policy)
    with pytest.raises(OSError if hook == "on_exception" else KeyError) as raised:
        fit(trainer, policy, resume)
    assert everything(policy) == before
    assert trainer.status == "failed"
    if hook == "teardown":
        assert ends.came == [("on_fit_end", "completed"), ("teardown", "completed")]
    elif hook == "on_exception":
        assert raised.value.__notes__ == ["While this was handled, another error came: KeyError: 'on_exception'"]
        assert ends.came == [("OSError", "failed"), ("teardown", "failed")]
    else:
        assert ends.came == [("KeyError", "failed"), ("teardown", "failed")]


@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_after_backward", "on_update_end", "on_validation_start"])
def test_an_interrupt_is_raised_again_and_leaves_everything_as_found(hook: str) -> None:
    policy = Policy()
    before = everything(policy)
    with pytest.raises(KeyboardInterrupt):
        fit(trainer_with(raising(hook, KeyboardInterrupt())), policy)
    assert everything(policy) == before


def test_an_interrupt_reaches_on_exception_and_teardown_and_no_on_fit_end() -> None:
    ends = Ends()
    with pytest.raises(KeyboardInterrupt):
        fit(trainer_with(raising("on_after_backward", KeyboardInterrupt()), ends), Policy())
    assert ends.came == [("KeyboardInterrupt", "interrupted"), ("teardown", "interrupted")]


def test_an_interrupt_while_other_ranks_are_told_of_an_error_ends_all_of_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(SingleProcess, "excuse", interrupted)
    policy, ends = Policy(), Ends()
    before = everything(policy)
    with pytest.raises(KeyboardInterrupt):
        fit(trainer_with(Sets(), raising("on_fit_start", KeyError()), ends), policy)
    assert everything(policy) == before
    assert ends.came == [("KeyboardInterrupt", "interrupted"), ("teardown", "interrupted")]


class Breaks(Policy):
    """Fails in its own code."""

    where = ""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        if self.where == "training" and batch_idx == 2:
            raise KeyError("training")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Batch, batch_idx: int) -> Tensor:
        raise KeyError("validation")


@pytest.mark.parametrize("where", ["training", "validation"])
def test_an_error_in_the_policy_leaves_it_as_it_came(where: str) -> None:
    policy = Breaks()
    policy.where = where
    before = everything(policy)
    with pytest.raises(KeyError, match=where):
        fit(trainer_with(), policy)
    assert everything(policy) == before


def test_a_run_that_failed_can_be_begun_again_with_the_same_policy_and_trainer() -> None:
    policy, ends = Breaks(), Ends()
    policy.where = "training"
    settings: dict[str, Any] = {"max_steps": 4, "accumulate": 2, "callbacks": [ends], "default_callbacks": False}
    trainer = Trainer("cpu", FP16({"init_scale": 8.0}, allow_cpu=True), **settings)
    with pytest.raises(KeyError):
        trainer.fit(policy, InMemory(batches(4)))
    policy.where = ""
    trainer.fit(policy, InMemory(batches(4)))
    assert (trainer.step, trainer.status) == (4, "completed")
    assert [name for name, _ in ends.came] == ["KeyError", "teardown", "on_fit_end", "teardown"]


def test_loggers_hear_how_the_run_ended_also_when_a_teardown_fails() -> None:
    heard: list[str] = []

    class Logger:
        def log_metrics(self, metrics: dict[str, float], step: int) -> None:
            heard.append(f"step {step}")

        def finalize(self, status: str) -> None:
            heard.append(status)

    for failing in (raising("teardown", KeyError("teardown")), raising("on_after_backward", KeyError("backward"))):
        with pytest.raises(KeyError):
            Trainer("cpu", max_steps=1, callbacks=[failing], loggers=[Logger()], default_callbacks=False).fit(
                Policy(), InMemory(batches(1))
            )
    assert heard == ["step 1", "success", "failed"]
