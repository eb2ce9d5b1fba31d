"""Edges of a run that were found by attacking it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR
from torch.utils.data import DataLoader, IterableDataset
from toys import MLP, Batch, InMemory, assert_equal, batches, mlp, weights

from policyfit import Callback, CallbackError, Checkpoint, CheckpointError, ConfigError, Trainer
from policyfit.trainer.checkpoint import read_checkpoint


def fit(policy: nn.Module, data: Any, run_dir: Path | None = None, **rest: Any) -> Trainer:
    arguments = {name: rest.pop(name) for name in ("optimizer", "schedule", "resume") if name in rest}
    trainer = Trainer("cpu", run_dir=run_dir, **{"default_callbacks": False, "max_steps": 6, **rest})
    trainer.fit(policy, data, **arguments)
    return trainer


class Thaws(Callback):
    def due(self, step: int) -> bool:
        return step == 3

    def on_due(self, trainer: Trainer, policy: nn.Module) -> None:
        policy.net[0].requires_grad_(True)  # type: ignore[index]


def test_a_parameter_that_thaws_during_the_run_is_clipped_and_dropped_like_the_others() -> None:
    ours, theirs = mlp(), mlp()
    for policy in (ours, theirs):
        policy.net[0].requires_grad_(False)
    fit(
        ours,
        InMemory(batches(6)),
        optimizer=lambda _: SGD(ours.parameters(), lr=0.1),
        callbacks=[Thaws()],
        clip_norm=0.1,
    )
    optimizer = SGD(theirs.parameters(), lr=0.1, fused=True)
    for step, batch in enumerate(batches(6)):
        if step == 3:
            theirs.net[0].requires_grad_(True)
        optimizer.zero_grad()
        theirs(batch).backward()
        nn.utils.clip_grad_norm_(theirs.parameters(), 0.1)
        optimizer.step()
    assert_equal(weights(ours), weights(theirs))


def test_a_resume_that_makes_no_step_leaves_the_run_as_it_was(tmp_path: Path) -> None:
    found = []
    for stops in ([10, 10, 14], [10, 14]):
        run_dir = tmp_path / str(len(stops))
        for i, steps in enumerate(stops):
            policy = mlp(dropout=0.5)
            fit(policy, InMemory(batches(5)), run_dir, max_steps=steps, seed=3, resume="last" if i else None,
                callbacks=[Checkpoint(every_steps=None)])  # fmt: skip
        found.append(weights(policy))
    assert_equal(*found)


class SavesAtEpochEnd(Callback):
    def __init__(self) -> None:
        self.epochs: list[int] = []

    def on_train_epoch_end(self, trainer: Trainer, policy: nn.Module) -> None:
        self.epochs.append(trainer.epoch)
        trainer.save_checkpoint()


class ByEpoch(MLP):
    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        return self(batch)

    def configure_optimizers(self) -> tuple[list[Optimizer], list[ExponentialLR]]:
        optimizer = SGD(self.parameters(), lr=0.1)
        return [optimizer], [ExponentialLR(optimizer, 0.5)]


def test_a_checkpoint_made_at_an_epochs_end_goes_on_with_the_next_epoch(tmp_path: Path) -> None:
    straight, saves = ByEpoch(), SavesAtEpochEnd()
    straight.load_state_dict(mlp().state_dict())
    reference = fit(straight, InMemory(batches(4)), tmp_path / "a", max_steps=None, max_epochs=4, callbacks=[saves])
    assert saves.epochs == [0, 1, 2, 3]
    policy = ByEpoch()
    resumed = fit(policy, InMemory(batches(4)), tmp_path / "b", max_steps=None, max_epochs=4,
                  resume=tmp_path / "a/checkpoints/000008", callbacks=[SavesAtEpochEnd()])  # fmt: skip
    assert_equal(weights(policy), weights(straight))
    assert resumed.optimizers[0].param_groups[0]["lr"] == reference.optimizers[0].param_groups[0]["lr"] == 0.1 / 16


def test_a_resume_does_not_write_into_the_folder_of_another_run(tmp_path: Path) -> None:
    for name in ("a", "b"):
        fit(mlp(), InMemory(batches(3)), tmp_path / name, default_callbacks=True)
    before = {path: path.read_bytes() for path in (tmp_path / "b").rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match="already holds a run"):
        fit(mlp(), InMemory(batches(3)), tmp_path / "b", resume=tmp_path / "a", max_steps=9)
    assert {path: path.read_bytes() for path in (tmp_path / "b").rglob("*") if path.is_file()} == before


class Exports(Callback):
    """Saves to a path of the user's own at step 3."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def due(self, step: int) -> bool:
        return step == 3

    def on_due(self, trainer: Trainer, policy: nn.Module) -> None:
        trainer.save_checkpoint(self.path)


def test_a_checkpoint_saved_to_a_path_of_its_own_is_resumed_in_a_new_folder(tmp_path: Path) -> None:
    straight, policy = mlp(), mlp(seed=1)
    exported = tmp_path / "shared" / "best"
    fit(straight, InMemory(batches(4)), tmp_path / "run", callbacks=[Exports(exported)], seed=2)
    before = sorted(tmp_path.iterdir())
    trainer = fit(policy, InMemory(batches(4)), resume=exported, seed=2)
    assert trainer.resumed_step == 3
    assert trainer.run_dir.parent == Path("runs").absolute()
    assert (trainer.run_dir / "config.yaml").exists()
    assert sorted(tmp_path.iterdir()) == sorted([*before, tmp_path / "runs"])
    assert_equal(weights(policy), weights(straight))


def test_the_folder_of_a_run_may_be_spelt_in_another_way_at_its_resume(tmp_path: Path) -> None:
    fit(mlp(), InMemory(batches(4)), tmp_path / "run", callbacks=[Checkpoint()])
    (tmp_path / "link").symlink_to("run")
    trainer = fit(mlp(), InMemory(batches(4)), tmp_path / "link", resume=tmp_path / "run" / ".." / "run", max_steps=8)
    assert (trainer.resumed_step, trainer.step) == (6, 8)


HOLDS = """
import sys, time, pathlib
from policyfit.trainer.run_dir import held
with held(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_two_processes_do_not_write_into_one_folder(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    other = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match="Another process is writing into"):
            fit(mlp(), InMemory(batches(3)), tmp_path)
    finally:
        other.kill()
        other.communicate()
    assert fit(mlp(), InMemory(batches(3)), tmp_path).step == 6


@pytest.mark.parametrize("name", ["step", "epoch", "event"])
def test_a_metric_cannot_take_the_name_of_a_records_own_field(name: str) -> None:
    class Logs(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            trainer.log(name, 1.0)

    with pytest.raises(ConfigError, match=f"'{name}' is a field of every record"):
        fit(mlp(), InMemory(batches(2)), callbacks=[Logs()])


class Decays(AdamW):
    """A third party's optimizer: its own code runs in step, fused kernel or not."""

    def step(self, closure: Any = None) -> Any:
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.mul_(0.99)
        return super().step(closure)


def hooked(parameters: Iterable[nn.Parameter]) -> AdamW:
    optimizer = AdamW(parameters, lr=1e-2, fused=True)

    def decay(decayed: Optimizer, *_: Any) -> None:
        for parameter in decayed.param_groups[0]["params"]:
            parameter.data.mul_(0.99)

    optimizer.register_step_post_hook(decay)
    return optimizer


@pytest.mark.parametrize("make", [lambda p: Decays(p, lr=1e-2, fused=True), hooked])
def test_a_skip_runs_nobodys_code_in_step(make: Any) -> None:
    with_skip, without = mlp(), mlp()
    assert fit(with_skip, InMemory(batches(6, poisoned=(2,))), optimizer=make, max_steps=5).skipped == 1
    fit(without, InMemory([b for i, b in enumerate(batches(6)) if i != 2]), optimizer=make, max_steps=5)
    assert_equal(weights(with_skip), weights(without))


def test_an_optimizer_with_a_parameter_that_is_not_the_policys_is_refused() -> None:
    temperature = nn.Parameter(torch.ones(()))
    with pytest.raises(ConfigError, match="not the policy's, so no checkpoint would hold it"):
        fit(mlp(), InMemory(batches(2)), optimizer=lambda p: AdamW([*p, temperature]))


class Replaces(Callback):
    """Gives the policy a new layer in place of one that the optimizer moves."""

    def __init__(self, *, trained: bool) -> None:
        self.trained = trained

    def due(self, step: int) -> bool:
        return step == 2

    def on_due(self, trainer: Trainer, policy: nn.Module) -> None:
        policy.net[3] = nn.Linear(16, 3).requires_grad_(self.trained)  # type: ignore[assignment, operator]


@pytest.mark.parametrize(("trained", "others"), [(True, r", and not its net\.3\.weight, net\.3\.bias"), (False, "")])
def test_a_policy_that_replaced_parameters_is_told_so_and_not_saved(trained: bool, others: str, tmp_path: Path) -> None:
    saves = Checkpoint(every_steps=2, background=False)
    with pytest.raises(
        CheckpointError, match=rf"At step 2 the optimizer moves parameters that MLP no longer has{others}\. It was"
    ):
        fit(mlp(), InMemory(batches(4)), tmp_path / "run", callbacks=[Replaces(trained=trained), saves])
    assert not (tmp_path / "run/checkpoints").exists()


class SavesEarly(Callback):
    def __init__(self, hook: str) -> None:
        setattr(self, hook, lambda trainer, *_: trainer.save_checkpoint())


@pytest.mark.parametrize(
    ("hook", "why"),
    [
        ("on_update_end", "in on_update_end, which some callbacks have seen and others not"),
        ("on_before_zero_grad", "in on_before_zero_grad, when the weights have moved and the step is not counted yet"),
        ("setup", "before the run has begun, when callbacks have not started"),
    ],
)
def test_saving_where_the_run_is_not_of_one_moment_is_refused(hook: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(CallbackError, match=f"called {why}\\.\nCall it from on_due"):
        fit(mlp(), InMemory(batches(2)), tmp_path / "run", callbacks=[SavesEarly(hook)], log_every=1)


class Unequal(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.arange(5.0))


class Shift(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, batch: Tensor) -> Tensor:
        return (self.weight * batch).mean()


@pytest.mark.parametrize("data", [Unequal(), [torch.tensor(float(i)) for i in range(5)]])
def test_a_short_micro_batch_weighs_as_much_as_it_has_samples(data: Any) -> None:
    policy = Shift()
    fit(policy, data, batch_size=4, accumulate=2, max_steps=1, optimizer=lambda p: SGD(p, lr=1.0))
    assert policy.weight.item() == pytest.approx(-2.0)  # the mean of 0 to 4, whatever their order


@dataclass(frozen=True)
class Framed:
    x: Tensor
    note: str = ""


class Mean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, batch: Framed) -> Tensor:
        return (batch.x + self.weight).mean()


def test_validation_means_count_the_samples_of_dataclass_batches() -> None:
    data = InMemory([Framed(torch.zeros(7)), Framed(torch.ones(1))])
    assert Trainer("cpu").validate(Mean(), data) == {"val/loss": 0.125}


def test_a_learning_rate_that_is_not_a_number_ends_the_run_before_it_moves_a_weight() -> None:
    policy = mlp()
    with pytest.raises(ConfigError, match="LambdaLR set the learning rate to nan after 2 steps"):
        fit(
            policy,
            InMemory(batches(4)),
            schedule=lambda o: LambdaLR(o, lambda step: float("nan") if step == 2 else 1.0),
        )
    assert all(bool(p.isfinite().all()) for p in policy.parameters())


def test_a_relative_run_dir_stays_where_the_run_began(tmp_path: Path) -> None:
    class Moves(Callback):
        def on_fit_start(self, trainer: Trainer, policy: nn.Module) -> None:
            (tmp_path / "elsewhere").mkdir()
            os.chdir(tmp_path / "elsewhere")

    trainer = fit(mlp(), InMemory(batches(2)), Path("here"), callbacks=[Moves(), Checkpoint()])
    assert trainer.run_dir == tmp_path / "here"
    assert [path.name for path in (tmp_path / "here/checkpoints").glob("0*")] == ["000006"]
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_log_record_that_was_due_after_the_checkpoint_is_written_by_the_resumed_run(tmp_path: Path) -> None:
    steps = []
    for name, resume, log_every in (("run", None, 4), ("run", tmp_path / "run/checkpoints/000005", 4)):
        fit(mlp(), InMemory(batches(3)), tmp_path / name, default_callbacks=True, log_every=log_every, resume=resume,
            callbacks=[Checkpoint(every_steps=5, background=False)])  # fmt: skip
        records = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        steps.append([record["step"] for record in records if "lr" in record])
    assert steps == [[4, 6], [4, 6]]
    assert read_checkpoint(tmp_path / "run/checkpoints/000006").manifest["counters"]["step"] == 6


class Holds(Callback):
    """Which of the batches so far are still somewhere in memory when the next has come."""

    def __init__(self) -> None:
        self.batches: list[weakref.ref[Tensor]] = []
        self.alive: list[list[int]] = []

    def on_train_batch_start(self, trainer: Trainer, policy: nn.Module, batch: Any, batch_idx: int) -> None:
        self.alive.append([number for number, ref in enumerate(self.batches) if ref() is not None])
        self.batches.append(weakref.ref(batch["x"]))


class Fresh(IterableDataset[Any]):
    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return ({"x": torch.randn(4, 3)} for _ in range(3))


class OfX(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.layer(batch["x"]).square().mean()  # type: ignore[no-any-return]


def test_no_batch_of_an_epoch_is_held_once_it_is_used() -> None:
    holds = Holds()
    fit(OfX(), DataLoader(Fresh(), batch_size=None), callbacks=[holds])
    assert holds.alive == [[]] * 6
