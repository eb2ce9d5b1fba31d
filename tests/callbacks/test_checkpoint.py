"""When a run is saved, and which checkpoints stay."""

import json
import math
import os
import random
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from policyfit.callbacks.checkpoint import Checkpoint
from policyfit.strategies.distributed import SingleProcess
from policyfit.strategies.errors import CallbackError, CheckpointError, ConfigError

POLICY = nn.Identity()


class FakeTrainer:
    """The public side of a trainer that ``Checkpoint`` uses; a checkpoint is a folder with a state in it."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.step = 0
        self.metrics: dict[str, float] = {}
        self.events: list[str] = []
        self.saved: list[int] = []
        self.undeletable: set[str] = set()
        self.callback: Checkpoint | None = None
        self.waits = 0
        self.status = "running"
        self.is_main = True
        self.distribution = SingleProcess()
        self.log_every: int | None = 50
        (run_dir / "checkpoints").mkdir(parents=True, exist_ok=True)

    def wait_for_checkpoint(self) -> None:
        self.waits += 1

    def save_checkpoint(
        self, *, background: bool = False, remote: str | None = None, consolidated: bool = False
    ) -> Path:
        assert not background
        assert remote is None
        path = self.run_dir / "checkpoints" / f"{self.step:06d}"
        path.mkdir(exist_ok=True)
        state = {} if self.callback is None else self.callback.state_dict()
        (path / "state.json").write_text(json.dumps(state))
        last = path.parent / "last"
        last.unlink(missing_ok=True)
        last.symlink_to(path.name)
        self.saved.append(self.step)
        return path

    def checkpoints(self) -> list[Path]:
        folders = [path for path in (self.run_dir / "checkpoints").iterdir() if path.name.isdecimal()]
        return sorted(folders, key=lambda path: int(path.name))

    def delete_checkpoint(self, path: Path) -> None:
        if path.name in self.undeletable:
            raise CheckpointError(f"{path} could not be deleted: busy.")
        assert path.parent == self.run_dir / "checkpoints"
        (path / "state.json").unlink()
        path.rmdir()

    def event(self, kind: str, *, message: str) -> None:
        assert kind == "warning"
        self.events.append(message)

    def steps(self) -> list[int]:
        return [int(path.name) for path in self.checkpoints()]


def drive(trainer: Any, callback: Any, steps: range, metrics: dict[int, float] | None = None) -> None:
    """The part of the loop that concerns saving, in the order of hooks.py."""
    trainer.callback = callback
    for step in steps:
        trainer.step = step
        if metrics and step in metrics:
            trainer.metrics = {"val/loss": metrics[step], "train/loss": 1.0}
            callback.on_validation_end(trainer, POLICY)
        if callback.due(step):
            callback.on_due(trainer, POLICY)


def start(tmp_path: Path, **settings: Any) -> tuple[Any, Any]:
    trainer: Any = FakeTrainer(tmp_path / "run")
    callback: Any = Checkpoint(**{"background": False, **settings})
    callback.on_fit_start(trainer, POLICY)
    return trainer, callback


def test_saves_come_at_the_interval_and_the_newest_are_kept(tmp_path: Path) -> None:
    trainer, callback = start(tmp_path, every_steps=3, keep=2)
    drive(trainer, callback, range(1, 14))
    assert trainer.saved == [3, 6, 9, 12]
    assert trainer.steps() == [9, 12]
    callback.on_fit_end(trainer, POLICY)
    assert trainer.saved == [3, 6, 9, 12, 13]


def test_due_is_answered_alike_until_the_save_and_once_a_step(tmp_path: Path) -> None:
    trainer, callback = start(tmp_path, every_steps=3)
    assert [callback.due(3) for _ in range(3)] == [True, True, True]
    drive(trainer, callback, range(3, 4))
    assert not callback.due(3)
    assert not callback.due(0)


@pytest.mark.parametrize("never", [0, None])
def test_run_without_intervals_is_saved_at_its_end_only(tmp_path: Path, never: int | None) -> None:
    trainer, callback = start(tmp_path, every_steps=never, every_minutes=never)
    drive(trainer, callback, range(1, 3000))
    assert trainer.saved == []
    callback.on_fit_end(trainer, POLICY)
    assert trainer.saved == [2999]


def test_end_of_the_run_is_not_saved_twice(tmp_path: Path) -> None:
    trainer, callback = start(tmp_path, every_steps=4)
    drive(trainer, callback, range(1, 9))
    callback.on_fit_end(trainer, POLICY)
    assert trainer.saved == [4, 8]


def test_minutes_count_from_the_save_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    trainer, callback = start(tmp_path, every_steps=5, every_minutes=0.5, keep=None)
    for step in range(1, 13):
        now[0] += 10
        drive(trainer, callback, range(step, step + 1))
    assert trainer.saved == [3, 5, 8, 10]


class TwoRanks(SingleProcess):
    """The first of two, as it is seen from there; keeps where it was told from."""

    world_size = 2

    def __init__(self) -> None:
        self.places: list[str] = []

    def gather(self, value: Any, place: str = "") -> list[Any]:
        self.places.append(place)
        return [value, value]


def test_minutes_of_several_ranks_are_asked_for_at_log_records_and_not_at_events_of_one_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    trainer = FakeTrainer(tmp_path)
    trainer.distribution = ranks = TwoRanks()
    callback: Any = Checkpoint(every_minutes=0.5)
    callback.setup(trainer, POLICY, "fit")
    callback.on_fit_start(trainer, POLICY)
    trainer.step, now[0] = 7, 1031.0
    callback.on_log(trainer, POLICY, {"step": 7, "event": "drop", "lr": 1e-4})
    assert (ranks.places, callback.due(7)) == ([], False)
    callback.on_log(trainer, POLICY, {"step": 7, "epoch": 0, "lr": 1e-4})
    assert (ranks.places, callback.due(7)) == (["the log of step 7"], True)


def test_minutes_of_several_ranks_that_log_nothing_are_refused(tmp_path: Path) -> None:
    trainer: Any = FakeTrainer(tmp_path)
    trainer.log_every = None
    callback = Checkpoint(every_minutes=10)
    callback.setup(trainer, POLICY, "fit")  # alone it looks at each step
    trainer.distribution = TwoRanks()
    with pytest.raises(ConfigError, match=r"every_minutes is looked at when training is logged.*\nGive log_every"):
        callback.setup(trainer, POLICY, "fit")


@pytest.mark.parametrize("is_main", [True, False])
def test_rank_0_alone_looks_at_the_copy(tmp_path: Path, is_main: bool) -> None:
    trainer: Any = FakeTrainer(tmp_path)
    trainer.is_main, looked = is_main, list[str]()

    def remote_run(url: str) -> Any:
        looked.append(url)
        raise CheckpointError("no credentials")

    trainer.remote_run = remote_run
    with pytest.raises(CheckpointError) if is_main else nullcontext():
        Checkpoint(remote="s3://lab/run").setup(trainer, POLICY, "fit")
    assert looked == ["s3://lab/run"] * is_main


def test_best_is_saved_at_the_step_of_its_validation_and_kept(tmp_path: Path) -> None:
    trainer, callback = start(tmp_path, every_steps=4, keep=1, monitor="val/loss")
    drive(trainer, callback, range(1, 13), {2: 0.5, 6: 0.7, 8: 0.6, 10: 0.55})
    assert trainer.saved == [2, 4, 8, 12]
    assert trainer.steps() == [2, 12]
    assert callback.state_dict() == {
        "monitor": "val/loss",
        "mode": "min",
        "value": 0.5,
        "step": 2,
        "path": "000002",
    }


def test_checkpoint_of_the_best_knows_that_it_is(tmp_path: Path) -> None:
    trainer, callback = start(tmp_path, every_steps=0, monitor="val/loss")
    drive(trainer, callback, range(1, 4), {3: 0.25})
    state = json.loads((tmp_path / "run/checkpoints/000003/state.json").read_text())
    assert (state["value"], state["step"], state["path"]) == (0.25, 3, "000003")


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("mode", ["min", "max"])
def test_metric_that_is_not_finite_is_never_best_and_never_in_the_way(tmp_path: Path, odd: float, mode: str) -> None:
    trainer, callback = start(tmp_path, every_steps=0, keep=1, monitor="val/loss", mode=mode)
    values = [odd, 1.0, 0.5, odd] if mode == "min" else [odd, 0.5, 1.0, odd]
    drive(trainer, callback, range(1, 5), dict(enumerate(values, 1)))
    assert trainer.saved == [2, 3]
    assert callback.state_dict()["step"] == 3


def test_metric_that_is_not_there_is_an_error_that_lists_those_that_are(tmp_path: Path) -> None:
    trainer, callback = start(tmp_path, monitor="val/los")
    with pytest.raises(CallbackError, match=r"'val/los', but the metrics here are: train/loss, val/loss\."):
        drive(trainer, callback, range(1, 2), {1: 0.5})


def test_kept_are_exactly_the_newest_and_the_best_whatever_the_metrics(tmp_path: Path) -> None:
    dice = random.Random(0)
    for case in range(40):
        keep, mode, every = (
            dice.choice([1, 2, 3, None]),
            dice.choice(["min", "max"]),
            dice.choice([2, 3, 900]),
        )
        validate, steps = dice.choice([1, 2, 5]), dice.choice([900, 9990]) + 1
        trainer, callback = start(tmp_path / str(case), every_steps=every, keep=keep, monitor="val/loss", mode=mode)
        best: tuple[float, int] | None = None
        for step in range(steps, steps + 30):
            value = dice.choice([math.nan, math.inf, -math.inf, *[dice.random() for _ in range(6)]])
            sign = 1 if mode == "min" else -1
            improved = step % validate == 0 and math.isfinite(value) and (best is None or sign * value < best[0])
            if improved:
                best = (sign * value, step)
            drive(trainer, callback, range(step, step + 1), {step: value} if step % validate == 0 else None)
            assert (step in trainer.saved) == (step % every == 0 or improved)
            newest = trainer.saved if keep is None else trainer.saved[-keep:]
            assert trainer.steps() == sorted({*newest, *([best[1]] if best else [])})


def test_order_is_by_number_and_padding_does_not_matter(tmp_path: Path) -> None:
    trainer, callback = start(tmp_path, every_steps=1, keep=2)
    for name in ("000900", "1000", "0009900"):
        (tmp_path / "run/checkpoints" / name).mkdir()
        (tmp_path / "run/checkpoints" / name / "state.json").touch()
    drive(trainer, callback, range(10000, 10001))
    assert trainer.steps() == [9900, 10000]


def test_one_that_last_leads_to_stays_although_it_is_not_the_newest(tmp_path: Path) -> None:
    trainer, callback = start(tmp_path, every_steps=10, keep=1)
    drive(trainer, callback, range(1, 41))
    trainer, callback = start(tmp_path, every_steps=5, keep=1)
    drive(trainer, callback, range(21, 26))
    assert trainer.steps() == [25, 40]
    assert (tmp_path / "run/checkpoints/last").readlink() == Path("000025")


def test_nothing_is_deleted_when_the_save_fails(tmp_path: Path) -> None:
    trainer, callback = start(tmp_path, every_steps=1, keep=1)
    drive(trainer, callback, range(1, 2))

    def full(**_: Any) -> Path:
        raise CheckpointError("disk full")

    trainer.save_checkpoint = full
    with pytest.raises(CheckpointError, match="disk full"):
        drive(trainer, callback, range(2, 3))
    assert trainer.steps() == [1]


def test_failed_deletion_is_a_warning_and_is_tried_again(tmp_path: Path) -> None:
    trainer, callback = start(tmp_path, every_steps=1, keep=1)
    trainer.undeletable = {"000001"}
    drive(trainer, callback, range(1, 3))
    assert trainer.steps() == [1, 2]
    (warning,) = trainer.events
    assert "000001 could not be deleted: busy. It is tried again at the next save." in warning
    trainer.undeletable = set()
    drive(trainer, callback, range(3, 4))
    assert trainer.steps() == [3]
    assert len(trainer.events) == 1


def test_rank_that_is_not_the_first_deletes_nothing(tmp_path: Path) -> None:
    trainer, callback = start(tmp_path, every_steps=1, keep=1)
    trainer.is_main = False
    drive(trainer, callback, range(1, 4))
    assert trainer.steps() == [1, 2, 3]  # the first one's own turn


def test_run_folder_given_in_a_roundabout_way_keeps_its_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x").mkdir()
    trainer: Any = FakeTrainer(Path("x/../run"))
    callback: Any = Checkpoint(every_steps=2, keep=1, monitor="val/loss", background=False)
    for step in range(1, 7):
        drive(trainer, callback, range(step, step + 1), {step: float(step)})
        assert trainer.steps() == sorted({1, step - step % 2 or 1})
    assert os.path.lexists(tmp_path / "run/checkpoints/last")


def test_checkpoint_that_a_run_was_resumed_from_elsewhere_stays(tmp_path: Path) -> None:
    trainer, callback = start(tmp_path / "old", every_steps=1, keep=1, monitor="val/loss")
    drive(trainer, callback, range(1, 4), {3: 0.5})
    resumed_trainer: Any = FakeTrainer(tmp_path / "new" / "run")
    resumed: Any = Checkpoint(every_steps=1, keep=1, monitor="val/loss", background=False)
    resumed.load_state_dict(callback.state_dict())
    resumed_trainer.step = 3
    resumed.on_fit_start(resumed_trainer, POLICY)
    drive(resumed_trainer, resumed, range(4, 8), {5: 0.6})
    assert trainer.steps() == [3]
    assert resumed_trainer.steps() == [7]


def test_resumed_run_saves_and_keeps_what_the_uninterrupted_one_does(tmp_path: Path) -> None:
    metrics = {step: abs(step - 9) + 0.5 for step in range(2, 30, 2)}
    straight_trainer, straight = start(tmp_path / "a", every_steps=5, keep=2, monitor="val/loss")
    drive(straight_trainer, straight, range(1, 30), metrics)
    trainer, callback = start(tmp_path / "b", every_steps=5, keep=2, monitor="val/loss")
    drive(trainer, callback, range(1, 16), metrics)
    resumed: Any = Checkpoint(every_steps=5, keep=2, monitor="val/loss", background=False)
    resumed.load_state_dict(json.loads((trainer.run_dir / "checkpoints/last/state.json").read_text()))
    resumed.on_fit_start(trainer, POLICY)
    drive(trainer, resumed, range(16, 30), metrics)
    assert trainer.saved == straight_trainer.saved
    assert trainer.steps() == straight_trainer.steps() == [8, 20, 25]
    assert resumed.state_dict() == straight.state_dict()


def test_best_of_another_metric_is_not_taken_over_and_that_is_said(tmp_path: Path) -> None:
    trainer, callback = start(tmp_path, every_steps=1, monitor="val/loss")
    drive(trainer, callback, range(1, 3), {2: 0.1})
    other: Any = Checkpoint(every_steps=1, monitor="train/loss", mode="max", background=False)
    other.load_state_dict(callback.state_dict())
    other.on_fit_start(trainer, POLICY)
    assert trainer.events == [
        "The checkpoint's best is the min of val/loss; the best train/loss is looked for anew, "
        "and 000002 is no longer kept as the best."
    ]
    drive(trainer, other, range(3, 4), {3: 0.9})
    assert other.state_dict()["value"] == 1.0


def test_second_run_with_the_same_callback_starts_without_a_best(tmp_path: Path) -> None:
    trainer, callback = start(tmp_path / "first", every_steps=4, monitor="val/loss")
    drive(trainer, callback, range(1, 5), {3: 0.1})
    second: Any = FakeTrainer(tmp_path / "second")
    callback.on_fit_start(second, POLICY)
    drive(second, callback, range(1, 5), {3: 0.7})
    assert second.saved == [3, 4]
    assert callback.state_dict()["value"] == 0.7


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"every_steps": -1}, "Checkpoint.every_steps"),
        ({"every_steps": 1.5}, "Checkpoint.every_steps"),
        ({"every_steps": True}, "Checkpoint.every_steps"),
        ({"every_minutes": -0.1}, "Checkpoint.every_minutes"),
        ({"every_minutes": math.nan}, "Checkpoint.every_minutes"),
        ({"every_minutes": "10"}, "Checkpoint.every_minutes"),
        ({"keep": 0}, "Checkpoint.keep"),
        ({"keep": -2}, "Checkpoint.keep"),
        ({"keep": 2.0}, "Checkpoint.keep"),
        ({"mode": "lowest"}, "Checkpoint.mode"),
    ],
)
def test_setting_that_cannot_be_meant_is_refused_by_name(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Checkpoint(**settings)


def test_checkpoint_at_a_multiple_of_keep_every_is_kept_for_good(tmp_path: Path) -> None:
    trainer, callback = start(tmp_path, every_steps=2, keep=1, keep_every=6)
    drive(trainer, callback, range(1, 16))
    callback.on_fit_end(trainer, POLICY)
    assert trainer.steps() == [6, 12, 15]


def test_best_rollout_is_saved_and_one_after_the_run_is_not(tmp_path: Path) -> None:
    trainer, callback = start(tmp_path, every_steps=None, monitor="rollout/success_rate", mode="max")
    for step, rate in ((1, 0.2), (2, math.nan), (3, 0.9), (4, 0.5)):
        trainer.step, trainer.metrics = step, {"rollout/success_rate": rate}
        callback.on_validation_end(trainer, POLICY)  # has no rollout to look at
        callback.on_rollout_end(trainer, POLICY, None)
        if callback.due(step):
            callback.on_due(trainer, POLICY)
    assert trainer.saved == [1, 3]
    trainer.status, trainer.metrics = "completed", {}
    callback.on_rollout_end(trainer, POLICY, None)
    assert callback.state_dict()["step"] == 3
