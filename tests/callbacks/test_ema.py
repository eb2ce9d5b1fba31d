"""The average of the weights: what moves it, where it is kept, and that the raw weights always come back."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from lightning_fabric.plugins import HalfPrecision
from reads import Reads, ReadsPerBatch
from torch import Tensor, nn
from torch.optim import AdamW
from toys import MLP, Batch, InMemory, assert_equal, batches, mlp, weights

from policyfit import EMA, FP16, Callback, CallbackError, Checkpoint, CheckpointError, ConfigError, Trainer, load
from policyfit.trainer.checkpoint import read_checkpoint
from policyfit.trainer.cli import main
from policyfit.trainer.newest import newest_checkpoint

POISONED = (0, 9, 30)


def precision_of(name: str) -> Any:
    return FP16({"init_scale": 1024.0, "growth_interval": 3}, allow_cpu=True) if name == "fp16" else name


def fit(policy: nn.Module, *callbacks: Callback, data: Any = None, val: Any = None, **settings: Any) -> Trainer:
    resume = settings.pop("resume", None)
    trainer = Trainer(
        "cpu", **{"max_steps": 12, "seed": 1, "default_callbacks": False, **settings}, callbacks=callbacks
    )
    data = InMemory(batches(20)) if data is None else data
    trainer.fit(policy, data, val, optimizer=lambda p: AdamW(p, lr=1e-2), resume=resume)
    return trainer


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    """Bit for bit, in whatever order: files sort their names."""
    assert_equal(dict(sorted(a.items())), dict(sorted(b.items())))


def saved(trainer: Trainer) -> dict[str, Tensor]:
    """The averaged policy as a checkpoint holds it."""
    return read_checkpoint(trainer.save_checkpoint("saved")).models["ema"]


class Log(Callback):
    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def on_log(self, trainer: Trainer, policy: nn.Module, record: Any) -> None:
        if "event" in record:
            self.events.append(dict(record))


class Trajectory(Callback):
    """The weights at the start and after each update that landed."""

    needs_outcome_now = True

    def on_fit_start(self, trainer: Trainer, policy: nn.Module) -> None:
        self.weights = [weights(policy)]

    def on_update_end(self, trainer: Trainer, policy: nn.Module, outcome: Any) -> None:
        if outcome.landed:
            self.weights.append(weights(policy))


class Asking(Callback):
    """Settles the update before, at one of the moments at which one can ask."""

    def __init__(self, when: Callable[[], bool]) -> None:
        self.when = when

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if self.when():
            assert trainer.step >= 0

    def on_before_backward(self, trainer: Trainer, *_: Any) -> None:
        if self.when():
            assert trainer.step >= 0


# What moves it ----------------------------------------------------------------------------------------------


def by_hand(trajectory: list[dict[str, Tensor]], decay: float, warmup: bool) -> dict[str, Tensor]:
    average = {name: value.clone() for name, value in trajectory[0].items() if value.is_floating_point()}
    for n, values in enumerate(trajectory[1:]):
        kept = min(decay, (1 + n) / (10 + n)) if warmup else decay
        for name in average:
            expected = kept * average[name].double() + (1 - kept) * values[name].double()
            average[name] = torch.lerp(average[name], values[name], 1 - kept)
            torch.testing.assert_close(average[name], expected.float(), rtol=1e-6, atol=1e-7)  # roundings of float32
    return average


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
@pytest.mark.parametrize(("decay", "warmup"), [(0.9, False), (0.4, True), (0.9999, True)])
def test_it_moves_once_a_landed_update_whenever_that_is_settled(precision: str, decay: float, warmup: bool) -> None:
    data, settings = InMemory(batches(40, poisoned=POISONED)), {"accumulate": 4, "clip_norm": 1.0, "log_every": 5}
    trajectory = Trajectory()
    fit(mlp(dropout=0.2), trajectory, data=data, precision=precision_of(precision), **settings)
    expected = by_hand(trajectory.weights, decay, warmup)
    coin = random.Random(0)
    for asks in (lambda: False, lambda: True, lambda: coin.random() < 0.3):
        ema = EMA(decay, warmup=warmup)
        trainer = fit(mlp(dropout=0.2), Asking(asks), ema, data=data, precision=precision_of(precision), **settings)
        assert trainer.skipped >= 3
        assert trainer.micro_batches == 4 * (12 + trainer.skipped)
        assert ema.steps == trainer.step == 12
        same(saved(trainer), expected)


@pytest.mark.parametrize("precision", ["no", FP16({"init_scale": 1024.0}, allow_cpu=True)])
def test_a_healthy_step_reads_nothing(precision: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    counter = ReadsPerBatch(Reads(monkeypatch))
    trainer = Trainer("cpu", precision, max_steps=100, accumulate=2, callbacks=[EMA(), counter], log_every=None)
    trainer.fit(mlp(), InMemory(batches(7)))
    assert trainer.skipped == 0
    assert len(set(counter.counts)) == 1


class Parts(nn.Module):
    """A frozen backbone with statistics, and a head whose weight is tied to the encoder's and used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Linear(6, 6).requires_grad_(False)
        self.norm = nn.BatchNorm1d(6)
        self.encoder, self.head, self.out = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.head.weight = self.encoder.weight

    def forward(self, batch: Batch) -> Tensor:
        x = self.head(self.encoder(self.norm(self.backbone(batch.x))))
        return nn.functional.mse_loss(self.out(self.encoder(x)), batch.y)


def test_tied_weights_are_averaged_once_and_frozen_ones_and_buffers_are_those_of_the_policy() -> None:
    torch.manual_seed(0)
    policy, trajectory = Parts(), Trajectory()
    trainer = fit(policy, EMA(0.9), trajectory)
    average, raw = saved(trainer), weights(policy)
    expected = by_hand(trajectory.weights, 0.9, warmup=True)
    assert set(average) == set(raw)
    for name in average:
        kept = name.startswith("backbone") or "running" in name or "tracked" in name
        assert torch.equal(average[name], raw[name] if kept else expected[name]), name
        assert kept or not torch.equal(average[name], raw[name]), name
    filled = Parts()
    filled.load_state_dict(average)
    assert filled.head.weight is filled.encoder.weight
    assert torch.equal(filled.head.weight, expected["encoder.weight"])


class Freezes(Callback):
    """Frozen for one step, trained again from the next."""

    def due(self, step: int) -> bool:
        return step in (3, 4)

    def on_due(self, trainer: Trainer, policy: Any) -> None:
        policy.net[0].requires_grad_(trainer.step == 4)


class HeadFirst(MLP):
    """Its first layer is held by the optimizer from the start, and trained later."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)

    def configure_optimizers(self) -> AdamW:
        return AdamW(self.parameters(), lr=1e-2)


def test_weights_that_are_trained_from_a_later_step_on_are_averaged_too() -> None:
    torch.manual_seed(0)
    trajectory = Trajectory()
    trainer = Trainer("cpu", max_steps=8, callbacks=[EMA(0.5), trajectory, Freezes()], default_callbacks=False)
    trainer.fit(HeadFirst(), InMemory(batches(9)))
    assert not torch.equal(trajectory.weights[0]["net.0.weight"], trajectory.weights[8]["net.0.weight"])
    same(saved(trainer), by_hand(trajectory.weights, 0.5, warmup=True))


def test_weights_that_are_frozen_for_a_while_keep_their_average() -> None:
    policy, trajectory = mlp(), Trajectory()
    trainer = fit(policy, EMA(0.5), trajectory, Freezes(), val=InMemory(batches(1)), val_every=1)
    assert torch.equal(trajectory.weights[3]["net.0.weight"], trajectory.weights[4]["net.0.weight"])
    assert not torch.equal(trajectory.weights[4]["net.0.weight"], trajectory.weights[5]["net.0.weight"])
    same(saved(trainer), by_hand(trajectory.weights, 0.5, warmup=True))


def test_weights_in_16_bits_are_averaged_in_float32_which_a_resumed_run_goes_on_with() -> None:
    def run(max_steps: int, resume: str | None = None, run_dir: str = "run") -> tuple[nn.Module, Trainer]:
        policy: Any = mlp()
        trainer = fit(
            policy, EMA(0.999, warmup=False), Checkpoint(4), precision=HalfPrecision("bf16-true"),
            max_steps=max_steps, resume=resume, run_dir=run_dir, val=InMemory(batches(1)),
        )  # fmt: skip
        return policy, trainer

    straight = saved(run(8, run_dir="straight")[1])
    run(4)
    policy, trainer = run(8, "last")
    same(saved(trainer), straight)
    assert {value.dtype for value in straight.values()} == {torch.float32}
    assert {p.dtype for p in policy.parameters()} == {torch.bfloat16}
    assert any(not torch.equal(value, value.bfloat16().float()) for value in straight.values())


@pytest.mark.parametrize("decay", [0, 1, -0.1, 1.5, True, "0.9", None, float("nan")])
def test_a_decay_that_is_none_is_refused(decay: Any) -> None:
    with pytest.raises(ConfigError, match=r"EMA\.decay must be a finite number above 0 and below 1"):
        EMA(decay)


@pytest.mark.parametrize("value", ["no", "false", 0, 1, None])
def test_a_setting_that_is_neither_true_nor_false_is_refused(value: Any) -> None:
    for settings in ({"warmup": value}, {"evaluate": value}):
        with pytest.raises(ConfigError, match=rf"EMA\.{next(iter(settings))} must be true or false, got"):
            EMA(**settings)


def test_two_averages_in_one_run_are_refused_before_the_first_batch() -> None:
    class Slow(EMA):
        pass

    with pytest.raises(CallbackError, match="A run keeps one EMA"):
        fit(mlp(), EMA(), Slow(0.9999))
    assert not Path("runs").exists()


# Checkpoints ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
@pytest.mark.parametrize("warmup", [True, False])
def test_a_resumed_run_goes_on_with_the_average_and_the_warmup_of_the_straight_one(
    precision: str, warmup: bool
) -> None:
    def run(max_steps: int, run_dir: str, resume: str | None = None) -> tuple[EMA, Trainer]:
        ema = EMA(0.9, warmup=warmup)
        torch.manual_seed(0)
        trainer = fit(
            MLP(0.2), ema, Checkpoint(5), max_steps=max_steps, run_dir=run_dir, accumulate=2, resume=resume,
            data=InMemory(batches(40, poisoned=POISONED)), precision=precision_of(precision),
        )  # fmt: skip
        return ema, trainer

    ema, straight = run(12, "straight")
    assert run(5, "run")[0].steps == 5
    resumed_ema, resumed = run(12, "run", "last")
    assert resumed_ema.steps == ema.steps == 12
    for model in ("model", "models"):
        a, b = (getattr(read_checkpoint(t.checkpoints()[-1]), model) for t in (resumed, straight))
        same(*((a, b) if model == "model" else (a["ema"], b["ema"])))


def test_a_run_resumed_without_an_average_begins_one_with_its_weights_and_says_so() -> None:
    policy, log = mlp(), Log()
    fit(policy, Checkpoint(), run_dir="run", max_steps=3)
    ema = EMA(0.9)
    trainer = fit(mlp(seed=5), ema, log, run_dir="run", max_steps=3, resume="last")
    same(saved(trainer), weights(policy))
    assert ema.steps == 0
    (event,) = log.events
    assert (event["event"], event["source"]) == ("warning", "EMA")
    assert "begins anew with those of step 3" in event["message"]


def test_an_average_that_belongs_to_another_callback_is_said_to_be_so() -> None:
    class Mine(EMA):
        pass

    log = Log()
    fit(mlp(), EMA(), Checkpoint(), run_dir="run", max_steps=3)
    trainer = fit(mlp(), Mine(), Checkpoint(), log, run_dir="run", max_steps=4, resume="last")
    assert [event["message"] for event in log.events] == [
        f"the checkpoint has an average of a callback other than {Mine().state_key!r}, so this one's begins anew with "
        "those of step 3"
    ]
    assert any("EMA" in note for note in trainer.plan.notes)


def test_an_ordinary_resume_says_nothing_and_one_without_the_callback_names_it() -> None:
    log = Log()
    fit(mlp(), EMA(), Checkpoint(), run_dir="run", max_steps=3)
    fit(mlp(), EMA(), Checkpoint(), log, run_dir="run", max_steps=4, resume="last")
    assert log.events == []
    trainer = fit(mlp(), Checkpoint(), run_dir="run", max_steps=5, resume="last")
    assert any("reset: the state of EMA: the run has no such callback" in note for note in trainer.plan.notes)
    assert read_checkpoint(trainer.checkpoints()[-1]).models == {}


class Fails(Callback):
    def on_load_checkpoint(self, *_: Any) -> None:
        raise KeyError("in another callback")


def test_a_run_after_one_that_could_not_be_resumed_begins_anew() -> None:
    ema = EMA(0.9)
    fit(mlp(), ema, Checkpoint(), run_dir="run", max_steps=3)
    with pytest.raises(KeyError):
        fit(mlp(), Fails(), ema, run_dir="run", max_steps=4, resume="last")
    trajectory = Trajectory()
    trainer = fit(mlp(seed=8), ema, trajectory, max_steps=2)
    assert ema.steps == 2
    same(saved(trainer), by_hand(trajectory.weights, 0.9, warmup=True))


def test_a_checkpoint_holds_the_raw_weights_and_the_average_in_folders_of_their_own() -> None:
    policy = mlp()
    trainer = fit(policy, EMA(0.9), Checkpoint(every_steps=4), val=InMemory(batches(1)), val_every=4)
    folder = trainer.checkpoints()[-1]
    state = read_checkpoint(folder)
    same(state.model, weights(policy))
    assert not any(torch.equal(state.model[name], state.models["ema"][name]) for name in state.model)
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.parent.name == "pretrained_model_ema"}
    assert names == {"pretrained_model_ema/config.json", "pretrained_model_ema/model.safetensors"}


def test_a_checkpoint_in_the_background_holds_the_average_of_its_step() -> None:
    trajectory = Trajectory()
    trainer = fit(mlp(), EMA(0.9), trajectory, Checkpoint(every_steps=1, keep=None, background=True), max_steps=6)
    assert len(trainer.checkpoints()) == 6
    for step, folder in enumerate(trainer.checkpoints(), start=1):
        expected = by_hand(trajectory.weights[: step + 1], 0.9, warmup=True)
        same(read_checkpoint(folder).models["ema"], expected)


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
@pytest.mark.parametrize("damage", ["flipped", "missing"])
def test_a_damaged_average_is_named_and_the_checkpoint_before_it_is_used(file: str, damage: str) -> None:
    trainer = fit(mlp(), EMA(), Checkpoint(every_steps=2))
    bad = trainer.checkpoints()[-1] / "pretrained_model_ema" / file
    if damage == "missing":
        bad.unlink()
    else:
        content = bytearray(bad.read_bytes())
        content[-2] ^= 1
        bad.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"pretrained_model_ema/{file} is damaged"):
        read_checkpoint(bad.parent.parent)
    told: list[str] = []
    assert newest_checkpoint(trainer.run_dir, told.append).name == "000010"
    assert f"pretrained_model_ema/{file}" in told[0]


def test_a_checkpoint_that_lost_its_average_is_refused() -> None:
    trainer = fit(mlp(), EMA(), run_dir="run", max_steps=2)
    checkpoint: dict[str, Any] = {"models": {}}
    ema = EMA()
    ema.load_state_dict({"steps": 2})
    with pytest.raises(CheckpointError, match="there are none"):
        ema.on_load_checkpoint(trainer, mlp(), checkpoint)


class Unsaveable(MLP):
    fails = False

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        if self.fails:
            raise OSError("no memory for it")
        return super().state_dict(*args, **kwargs)


def test_a_failure_while_the_average_is_saved_leaves_the_weights_as_they_were() -> None:
    torch.manual_seed(0)
    policy = Unsaveable()
    trainer = fit(policy, EMA(0.9))
    before, pointers = weights(policy), [p.data_ptr() for p in policy.parameters()]
    policy.fails = True
    with pytest.raises(OSError, match="no memory"):
        trainer.save_checkpoint()
    policy.fails = False
    same(weights(policy), before)
    assert [p.data_ptr() for p in policy.parameters()] == pointers


class NamesModel(Callback):
    def on_save_checkpoint(self, trainer: Trainer, policy: nn.Module, checkpoint: dict[str, Any]) -> None:
        checkpoint["models"] = {"Best 2": policy.state_dict()}


def test_weights_with_a_name_that_could_not_be_read_again_are_refused() -> None:
    trainer = fit(mlp(), NamesModel(), max_steps=1)
    with pytest.raises(CheckpointError, match=r"named 'Best 2'.\nUse small letters"):
        trainer.save_checkpoint()
    assert trainer.checkpoints() == []


# Validation and rollouts ------------------------------------------------------------------------------------


class Acting(MLP):
    """Shows the weights with which it validates and acts, and fails where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, list[dict[str, Tensor]]] = {"validation": [], "rollout": []}
        self.fails_in: str | None = None

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self(batch)  # type: ignore[no-any-return]

    def configure_optimizers(self) -> AdamW:
        return AdamW(self.parameters(), lr=1e-2)

    def validation_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        self._show("validation")
        return {"loss": self(batch)}

    def select_action(self, observation: Tensor) -> Tensor:
        self._show("rollout")
        return self.net(observation)  # type: ignore[no-any-return]

    def _show(self, where: str) -> None:
        self.seen[where].append(weights(self))
        if self.fails_in == where:
            raise ValueError("in the policy")


class Env(gymnasium.Env[Any, Any]):
    observation_space = gymnasium.spaces.Box(-1, 1, (6,))
    action_space = gymnasium.spaces.Box(-9, 9, (3,))

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return np.zeros(6, dtype=np.float32), {}

    def step(self, action: Any) -> Any:
        return np.zeros(6, dtype=np.float32), 1.0, True, False, {"is_success": True}


class Evaluating(Callback):
    """Rolls out at step 8, beside the validation."""

    def due(self, step: int) -> bool:
        return step == 8

    def on_due(self, trainer: Trainer, policy: nn.Module) -> None:
        trainer.evaluate(policy, Env, episodes=1)


class RaisesIn(Callback):
    def __init__(self, hook: str) -> None:
        setattr(self, hook, self._raise)

    def _raise(self, *_: Any) -> None:
        raise ValueError("in a callback")


def acting(seed: int = 0) -> Acting:
    torch.manual_seed(seed)
    return Acting()


def state_of(trainer: Trainer, policy: nn.Module) -> dict[str, Any]:
    optimizer = trainer.optimizers[0].state_dict()["state"]
    return {
        "bits": weights(policy),
        "identity": [(id(p), p.data_ptr(), p.requires_grad) for p in policy.parameters()],
        "optimizer": {f"{i}.{k}": v.clone() for i, s in optimizer.items() for k, v in s.items()},
        "modes": [module.training for module in policy.modules()],
    }


def assert_same(a: dict[str, Any], b: dict[str, Any]) -> None:
    same(a["bits"], b["bits"])
    same(a["optimizer"], b["optimizer"])
    assert (a["identity"], a["modes"]) == (b["identity"], b["modes"])


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_the_average_stands_in_for_validation_and_rollouts_and_the_run_is_that_without_them(precision: str) -> None:
    policy, trajectory = acting(), Trajectory()
    trainer = fit(
        policy, EMA(0.9), trajectory, Evaluating(), val=InMemory(batches(1)), val_every=8, max_steps=9,
        precision=precision_of(precision),
    )  # fmt: skip
    expected = by_hand(trajectory.weights[:9], 0.9, warmup=True)
    for where in ("validation", "rollout"):
        same(policy.seen[where][0], expected)
        assert not torch.equal(policy.seen[where][0]["net.0.weight"], trajectory.weights[8]["net.0.weight"])
    alone = acting()
    fit(alone, max_steps=9, precision=precision_of(precision))
    same(weights(policy), weights(alone))
    assert trainer.step == 9


def test_evaluate_false_leaves_the_raw_weights_in_place() -> None:
    policy, trajectory = acting(), Trajectory()
    fit(policy, EMA(0.9, evaluate=False), trajectory, Evaluating(), val=InMemory(batches(1)), val_every=8, max_steps=9)
    same(policy.seen["validation"][0], trajectory.weights[8])
    same(policy.seen["rollout"][0], trajectory.weights[8])


@pytest.mark.parametrize("where", ["validation", "rollout"])
def test_the_raw_weights_come_back_when_the_policy_raises(where: str) -> None:
    policy = acting()
    trainer = fit(policy, EMA(0.9))
    before = state_of(trainer, policy)
    policy.fails_in = where
    evaluation: dict[str, Callable[[], Any]] = {
        "validation": lambda: trainer.validate(policy, InMemory(batches(1))),
        "rollout": lambda: trainer.evaluate(policy, Env, episodes=1),
    }
    with pytest.raises(ValueError, match="in the policy"):
        evaluation[where]()
    assert not torch.equal(policy.seen[where][-1]["net.0.weight"], before["bits"]["net.0.weight"])
    assert_same(state_of(trainer, policy), before)


@pytest.mark.parametrize(
    "hook", ["on_validation_start", "on_validation_batch_start", "on_validation_batch_end", "on_rollout_start"]
)
@pytest.mark.parametrize("order", [1, -1])
def test_the_raw_weights_come_back_when_a_callback_raises_in_the_middle_of_a_run(hook: str, order: int) -> None:
    class Watching(Callback):
        """What the run left behind, at the first moment after the error."""

        def on_train_batch_end(self, trainer: Trainer, policy: nn.Module, *_: Any) -> None:
            if trainer.step == 8:
                self.before = state_of(trainer, policy)

        def on_exception(self, trainer: Trainer, policy: nn.Module, exception: BaseException) -> None:
            self.after = state_of(trainer, policy)

    watching, policy = Watching(), acting()
    callbacks = [EMA(0.9), RaisesIn(hook), Evaluating(), watching][::order]
    with pytest.raises(ValueError, match="in a callback"):
        fit(policy, *callbacks, val=InMemory(batches(1)), val_every=8, max_steps=9)
    assert_same(watching.after, watching.before)


class SavesIn(Callback):
    def __init__(self, hook: str) -> None:
        setattr(self, hook, self._save)

    def _save(self, trainer: Trainer, *_: Any) -> None:
        trainer.save_checkpoint()


@pytest.mark.parametrize(
    "hook", ["on_validation_start", "on_validation_batch_start", "on_validation_batch_end", "on_rollout_start"]
)
def test_saving_while_the_average_stands_in_is_refused(hook: str) -> None:
    trainer = Trainer(
        "cpu", max_steps=9, val_every=8, default_callbacks=False, callbacks=[EMA(), SavesIn(hook), Evaluating()]
    )
    with pytest.raises(CallbackError, match="during a validation or rollout"):
        trainer.fit(acting(), InMemory(batches(9)), InMemory(batches(1)))
    assert trainer.checkpoints() == []


@pytest.mark.parametrize("hook", ["on_validation_end", "on_rollout_end"])
def test_saving_right_after_it_holds_raw_weights_and_average(hook: str) -> None:
    trajectory, policy = Trajectory(), acting()
    trainer = fit(
        policy, EMA(0.9), trajectory, SavesIn(hook), Evaluating(), val=InMemory(batches(1)), val_every=8, max_steps=9
    )
    state = read_checkpoint(trainer.run_dir / "checkpoints" / "000008")
    same(state.model, trajectory.weights[8])
    same(state.models["ema"], by_hand(trajectory.weights[:9], 0.9, warmup=True))


class ValidatesInWindow(Callback):
    """In the middle of the window of step 5, when the update of step 4 may be unsettled."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_before_backward(self, trainer: Trainer, policy: nn.Module, loss: Tensor) -> None:
        if trainer.micro_batches == 4:
            self.losses.append(trainer.validate(policy, InMemory(batches(1, seed=4)))["val/loss"])


def test_a_validation_in_mid_window_knows_of_every_update_and_changes_none() -> None:
    found, losses = [], []
    for asks in (False, True):
        policy, watching = mlp(), ValidatesInWindow()
        fit(policy, Asking(lambda asks=asks: asks), EMA(0.9), watching, max_steps=6)  # type: ignore[misc]
        found.append(weights(policy))
        losses.append(watching.losses)
    assert losses[0] == losses[1] != []
    alone = mlp()
    fit(alone, max_steps=6)
    same(found[0], weights(alone))
    same(found[1], weights(alone))


class Around(nn.Module):
    """Wraps a policy, to act by it."""

    def __init__(self, inner: Acting) -> None:
        super().__init__()
        self.inner = inner

    def select_action(self, observation: Tensor) -> Tensor:
        return self.inner.select_action(observation)


def test_another_policy_is_evaluated_with_its_own_weights_and_one_around_the_runs_with_the_average() -> None:
    policy, other, log = acting(), acting(seed=3), Log()
    trainer = fit(policy, EMA(0.9), log)
    before = weights(other)
    trainer.validate(other, InMemory(batches(1)))
    trainer.evaluate(other, Env, episodes=1)
    same(other.seen["validation"][0], before)
    same(other.seen["rollout"][0], before)
    trainer.evaluate(Around(policy), Env, episodes=1)
    same(policy.seen["rollout"][0], saved(trainer))
    policy.load_state_dict(before)
    trainer.evaluate(other, Env, episodes=1)
    assert log.events == []  # it is not the policy whose weights were changed


def test_the_average_of_a_second_run_stands_in_for_its_own_weights() -> None:
    ema, log = EMA(0.9), Log()
    fit(acting(), ema, log)
    policy, trajectory = acting(seed=7), Trajectory()
    fit(policy, ema, trajectory, log, val=InMemory(batches(1)), max_steps=6)
    same(policy.seen["validation"][0], by_hand(trajectory.weights, 0.9, warmup=True))
    assert log.events == []


def test_after_the_run_the_average_stands_in_until_the_weights_are_changed() -> None:
    policy, log = acting(), Log()
    trainer = fit(policy, EMA(0.9), log)
    trainer.evaluate(policy, Env, episodes=1)
    same(policy.seen["rollout"][0], saved(trainer))
    trainer.evaluate(policy, Env, episodes=1)  # an evaluation is no change
    same(policy.seen["rollout"][1], saved(trainer))
    assert log.events == []
    policy.load_state_dict(acting(seed=4).state_dict())
    trainer.evaluate(policy, Env, episodes=1)
    same(policy.seen["rollout"][2], weights(acting(seed=4)))
    assert "were changed after the run" in log.events[0]["message"]


def negate(policy: nn.Module) -> None:
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.neg_()


def permute(policy: Any) -> None:
    first, last = policy.net[0], policy.net[3]
    for parameter, axis in ((first.weight, 0), (first.bias, 0), (last.weight, 1)):
        parameter.data = parameter.data.flip(axis)


def nudge(policy: Any) -> None:
    policy.net[0].weight.data[0, 0] += 1e-6


@pytest.mark.parametrize("change", [negate, permute, nudge])
def test_weights_of_the_same_norm_are_other_weights(change: Callable[[nn.Module], None]) -> None:
    policy, log = acting(), Log()
    trainer = fit(policy, EMA(0.9), log)
    change(policy)
    changed = weights(policy)
    trainer.evaluate(policy, Env, episodes=1)
    same(policy.seen["rollout"][0], changed)
    same(weights(policy), changed)
    assert "were changed after the run" in log.events[0]["message"]


class LoadsAndEvaluates(Callback):
    """Goes back to other weights at the end of the run, as to the best ones, and rolls out with them."""

    def on_fit_end(self, trainer: Trainer, policy: nn.Module) -> None:
        policy.load_state_dict(acting(seed=4).state_dict())
        trainer.evaluate(policy, Env, episodes=1)


def test_weights_that_are_loaded_at_the_end_of_the_run_are_used_as_they_are() -> None:
    policy = acting()
    fit(policy, EMA(0.9), LoadsAndEvaluates())
    same(policy.seen["rollout"][0], weights(acting(seed=4)))


class Stops(Callback):
    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.micro_batches == 5:
            raise KeyboardInterrupt


def test_after_an_interrupted_run_the_average_stands_in_until_the_weights_are_changed() -> None:
    policy, trajectory = acting(), Trajectory()
    trainer = Trainer("cpu", max_steps=9, callbacks=[EMA(0.9), trajectory, Stops()], default_callbacks=False)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(policy, InMemory(batches(9)))
    trainer.evaluate(policy, Env, episodes=1)
    same(policy.seen["rollout"][0], by_hand(trajectory.weights[:5], 0.9, warmup=True))
    policy.load_state_dict(acting(seed=4).state_dict())
    trainer.evaluate(policy, Env, episodes=1)
    same(policy.seen["rollout"][1], weights(acting(seed=4)))


# Autocast ---------------------------------------------------------------------------------------------------


class ValidatesInForward(MLP):
    """Calls for a validation inside of the run's own autocast, whose cache holds casts of the raw weights."""

    trainer: Trainer
    loss: float | None = None
    x_before: Tensor
    x_after: Tensor

    def forward(self, batch: Batch) -> Tensor:
        loss = super().forward(batch)
        if self.training and self.trainer.micro_batches == 5:
            self.x_before = self.net(batch.x).detach()
            self.loss = self.trainer.validate(self, InMemory(batches(1, seed=4)))["val/loss"]
            self.x_after = self.net(batch.x).detach()
        return loss


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_casts_of_other_weights_are_not_used_across_the_swap(precision: str) -> None:
    torch.manual_seed(0)
    policy = ValidatesInForward()
    trainer = Trainer(
        "cpu", precision_of(precision), max_steps=6, callbacks=[EMA(0.9)], default_callbacks=False, seed=1
    )
    policy.trainer = trainer
    trajectory = Trajectory()
    trainer.fit(policy, InMemory(batches(6)), optimizer=lambda p: AdamW(p, lr=0.1))
    fit_alone(trajectory, precision)
    averaged, raw = mlp(), mlp()
    averaged.load_state_dict(by_hand(trajectory.weights[:6], 0.9, warmup=True))
    raw.load_state_dict(trajectory.weights[5])
    plain = Trainer("cpu", precision_of(precision), default_callbacks=False)
    assert policy.loss == plain.validate(averaged, InMemory(batches(1, seed=4)))["val/loss"]
    assert policy.loss != plain.validate(raw, InMemory(batches(1, seed=4)))["val/loss"]
    assert torch.equal(policy.x_after, policy.x_before)


def fit_alone(trajectory: Trajectory, precision: str) -> None:
    trainer = Trainer(
        "cpu", precision_of(precision), max_steps=6, callbacks=[trajectory], default_callbacks=False, seed=1
    )
    trainer.fit(mlp(), InMemory(batches(6)), optimizer=lambda p: AdamW(p, lr=0.1))


class Zeroes(Callback):
    """Loads other weights between two steps, and keeps the loss of the next forward."""

    losses: list[float]

    def on_fit_start(self, *_: Any) -> None:
        self.losses = []

    def due(self, step: int) -> bool:
        return step == 2

    def on_due(self, trainer: Trainer, policy: nn.Module) -> None:
        policy.load_state_dict({name: torch.zeros_like(value) for name, value in policy.state_dict().items()})

    def on_train_batch_end(
        self, trainer: Trainer, policy: nn.Module, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        if trainer.micro_batches == 3:
            self.losses += [float(outputs["loss"]), float(batch.y.square().mean())]


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_weights_loaded_inside_a_run_are_those_of_the_next_forward(precision: str) -> None:
    zeroes = Zeroes()
    fit(mlp(), zeroes, max_steps=3, precision=precision_of(precision))
    assert zeroes.losses[0] == pytest.approx(zeroes.losses[1], rel=1e-6)  # the order of a sum


class Teacher(MLP):
    """Runs its own net without gradients first, as a target network does, then with them."""

    def forward(self, batch: Batch) -> Tensor:
        with torch.no_grad():
            target = self.net(batch.x) + batch.y
        return nn.functional.mse_loss(self.net(batch.x), target)


class Gradients(Callback):
    def __init__(self) -> None:
        self.missing: list[str] = []
        self.calls = 0

    def on_after_backward(self, trainer: Trainer, policy: nn.Module) -> None:
        self.calls += 1
        self.missing += [name for name, p in policy.named_parameters() if p.grad is None]


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_a_pass_without_gradients_before_the_real_one_takes_none_away(precision: str) -> None:
    gradients = Gradients()
    fit(Teacher(), EMA(), gradients, max_steps=3, precision=precision_of(precision))
    assert (gradients.calls, gradients.missing) == (3, [])


# From a checkpoint and from YAML ----------------------------------------------------------------------------

PARTS = """
import gymnasium
import numpy as np
import torch
from torch import nn

class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, batch):
        return (self.layer(batch) - 1).square().mean()

    def select_action(self, observation):
        return self.layer(observation)

class Data:
    def __len__(self):
        return 16

    def __getitem__(self, index):
        return torch.ones(2) * index / 16

class Env(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (2,))
    action_space = gymnasium.spaces.Box(-9, 9, (1,))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.full(2, 0.5, dtype=np.float32), {}

    def step(self, action):
        return np.full(2, 0.5, dtype=np.float32), float(action[0]), True, False, {"is_success": True}
"""
RUN = """\
policy: ema_parts.Policy
data: {train: ema_parts.Data}
eval: {env: ema_parts.Env, episodes: 1}
optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.1}}
trainer:
  device: cpu
  max_steps: 4
  seed: 3
  run_dir: done
  callbacks:
    - class_path: policyfit.EMA
      init_args: {decay: 0.5, warmup: false}
"""


@pytest.fixture
def run_file() -> Iterator[Path]:
    Path("ema_parts.py").write_text(PARTS)
    Path("run.yaml").write_text(RUN)
    yield Path("run.yaml")
    sys.modules.pop("ema_parts", None)


def returned(capsys: pytest.CaptureFixture[str]) -> float:
    """The mean return, which is the action."""
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("return"))
    return float(line.split()[2])


def test_a_run_file_names_it_and_eval_and_load_take_its_weights(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", str(run_file)]) == 0
    in_run = returned(capsys)
    state = read_checkpoint(newest_checkpoint(Path("done"), print))
    action = {
        name: float(model["layer.weight"].sum() * 0.5 + model["layer.bias"])
        for name, model in (("raw", state.model), ("ema", state.models["ema"]))
    }
    assert action["raw"] != pytest.approx(action["ema"], abs=1e-3)
    assert in_run == pytest.approx(action["ema"], rel=1e-3)  # printed with four digits
    assert main(["eval", "done"]) == 0
    assert returned(capsys) == pytest.approx(action["raw"], rel=1e-3)
    assert main(["eval", "done", "--weights=ema"]) == 0
    assert returned(capsys) == pytest.approx(action["ema"], rel=1e-3)
    for name, expected in action.items():
        policy: Any = load("done", device="cpu", weights=name)
        assert float(policy.select_action(np.full((1, 2), 0.5))) == pytest.approx(expected)
    averaged: Any = load("done", device="cpu", weights="ema")
    same(weights(averaged), state.models["ema"])
    assert not averaged.training
    assert json.loads((newest_checkpoint(Path("done"), print) / "manifest.json").read_text())["counters"]["step"] == 4


def test_weights_that_a_checkpoint_has_not_are_refused_by_name(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    without = RUN.partition("  callbacks:")[0]
    run_file.write_text(without)
    assert main(["fit", str(run_file)]) == 0
    assert main(["eval", "done", "--weights=ema"]) == 2
    assert "has no weights 'ema', but raw" in capsys.readouterr().err
    names: Any
    for names in ("ema", ["ema"], None, {}):
        with pytest.raises(ConfigError, match=r"but raw\.\n.*run with the callback EMA"):
            load("done", device="cpu", weights=names)
