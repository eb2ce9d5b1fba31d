import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from toys import InMemory, batches, mlp

from policyfit import FP16, Callback, Checkpoint, LossScaleCollapse, MetricsLog, Trainer
from policyfit.callbacks.scale_monitor import MAX_DROPS, WINDOW, ScaleMonitor
from policyfit.trainer.outcome import Outcome, Reason

POLICY = nn.Linear(1, 1)


class FakeRun:
    """Feeds outcomes of made-up updates to a monitor, as a trainer would."""

    def __init__(self, precision: str = "fp16", init_scale: float = 65536.0) -> None:
        self.events: list[dict[str, Any]] = []
        self.step = self.update = 0
        self.scale: float | None = init_scale if precision == "fp16" else None

    @property
    def precision(self) -> Any:
        return SimpleNamespace(scale=None if self.scale is None else torch.tensor(self.scale))

    def event(self, kind: str, **fields: Any) -> None:
        self.events.append({"event": kind, **fields})

    def feed(self, monitor: ScaleMonitor, moves: str) -> None:
        """``.`` lands, ``x`` overflows and halves the scale, ``+`` lands and doubles it."""
        trainer: Any = self
        for move in moves:
            self.update += 1
            self.step += move != "x"
            if self.scale is not None:
                self.scale *= {".": 1.0, "x": 0.5, "+": 2.0}[move]
            reason: Reason | None = "non_finite" if move == "x" else None
            outcome = Outcome(move != "x", reason, self.step, self.update, 1.0, self.scale, None, ())
            monitor.on_update_end(trainer, POLICY, outcome)


def start(run: FakeRun) -> ScaleMonitor:
    monitor = ScaleMonitor()
    trainer: Any = run
    monitor.on_fit_start(trainer, POLICY)
    return monitor


def kinds(run: FakeRun) -> list[str]:
    return [event["event"] for event in run.events]


def test_first_drops_are_calibration_until_an_update_lands() -> None:
    run = FakeRun()
    run.feed(start(run), "xx.x")
    assert run.events == [
        {"event": "skip", "reason": "non_finite", "update": 1, "calibration": True},
        {"event": "scale_drop", "update": 1, "old": 65536.0, "new": 32768.0, "calibration": True},
        {"event": "skip", "reason": "non_finite", "update": 2, "calibration": True},
        {"event": "scale_drop", "update": 2, "old": 32768.0, "new": 16384.0, "calibration": True},
        {"event": "skip", "reason": "non_finite", "update": 4},
        {"event": "scale_drop", "update": 4, "old": 16384.0, "new": 8192.0},
    ]


def test_growth_is_one_event() -> None:
    run = FakeRun()
    run.feed(start(run), "..+.")
    assert run.events == [{"event": "scale_growth", "update": 3, "old": 65536.0, "new": 131072.0}]


@pytest.mark.parametrize(
    ("moves", "escalates"),
    [
        (".xxxxx", False),
        (".xxxxxx", True),
        (".xxxxx" + 94 * "." + "x", True),  # the first drop is update 2 and the last update 101
        (".xxxxx" + 95 * "." + "x", False),
    ],
)
def test_more_than_5_drops_within_100_updates_escalate(moves: str, escalates: bool) -> None:
    run = FakeRun(init_scale=2.0**60)
    run.feed(start(run), moves)
    assert ("scale_escalation" in kinds(run)) == escalates


def test_long_calibration_does_not_escalate() -> None:
    run = FakeRun(init_scale=2.0**40)
    run.feed(start(run), "x" * 30 + "...")
    assert kinds(run).count("scale_drop") == 30
    assert "scale_escalation" not in kinds(run)


def test_ten_drops_in_twelve_updates_escalate_once() -> None:
    run = FakeRun()
    run.feed(start(run), ".xxxxx.xxxxx")
    assert kinds(run).count("scale_drop") == 10
    assert kinds(run).count("skip") == 10
    (escalation,) = [event for event in run.events if event["event"] == "scale_escalation"]
    assert escalation["update"] == 1 + 1 + MAX_DROPS + 1  # after one landed, one landed in between
    assert escalation["drops"] == MAX_DROPS + 1
    assert f"fell {MAX_DROPS + 1} times within {WINDOW} updates" in escalation["message"]


def test_drops_far_apart_do_not_escalate() -> None:
    run = FakeRun(init_scale=2.0**60)
    run.feed(start(run), ("." * WINDOW + "x") * (MAX_DROPS + 3))
    assert kinds(run).count("scale_drop") == MAX_DROPS + 3
    assert "scale_escalation" not in kinds(run)


def test_drops_that_take_back_a_growth_do_not_escalate() -> None:
    run = FakeRun()
    run.feed(start(run), "..+x" * 3 * MAX_DROPS)
    assert kinds(run).count("scale_drop") == 3 * MAX_DROPS
    assert "scale_escalation" not in kinds(run)
    run.feed(start(run), "..+x" + "x" * MAX_DROPS + ".x")
    assert kinds(run).count("scale_escalation") == 1


def test_escalation_comes_again_only_after_a_quiet_window() -> None:
    run = FakeRun(init_scale=2.0**60)
    trouble = "x" * (MAX_DROPS + 3)
    run.feed(start(run), "." + trouble + "." + trouble)
    assert kinds(run).count("scale_escalation") == 1
    run = FakeRun(init_scale=2.0**60)
    run.feed(start(run), "." + trouble + "." * WINDOW + trouble)
    assert kinds(run).count("scale_escalation") == 2


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_skips_without_a_scale_are_one_event_each(precision: str) -> None:
    run = FakeRun(precision)
    run.feed(start(run), "x.x")
    assert run.events == [
        {"event": "skip", "reason": "non_finite", "update": 1},
        {"event": "skip", "reason": "non_finite", "update": 3},
    ]


@pytest.mark.parametrize("split", range(1, 21))
def test_resumed_run_emits_the_events_of_the_uninterrupted_one(split: int) -> None:
    moves = "xx..x+.xxxx..xxx.x.xx"
    straight = FakeRun()
    straight.feed(start(straight), moves)
    assert "scale_escalation" in kinds(straight)

    run = FakeRun()
    first = start(run)
    run.feed(first, moves[:split])
    saved = json.loads(json.dumps(first.state_dict()))
    second = ScaleMonitor()
    second.load_state_dict(saved)
    trainer: Any = run
    second.on_fit_start(trainer, POLICY)
    run.feed(second, moves[split:])
    assert run.events == straight.events


def test_second_fresh_run_with_the_same_monitor_starts_anew() -> None:
    first, second = FakeRun(), FakeRun()
    monitor = start(first)
    first.feed(monitor, ".xxxxxx")
    trainer: Any = second
    monitor.on_fit_start(trainer, POLICY)
    second.feed(monitor, "x.")
    assert second.events == [
        {"event": "skip", "reason": "non_finite", "update": 1, "calibration": True},
        {"event": "scale_drop", "update": 1, "old": 65536.0, "new": 32768.0, "calibration": True},
    ]


def test_monitor_without_its_state_takes_the_scale_of_a_resumed_run_as_it_is() -> None:
    run = FakeRun(init_scale=1024.0)
    run.feed(start(run), "..x")
    assert [event["old"] for event in run.events if event["event"] == "scale_drop"] == [1024.0]


# In runs ----------------------------------------------------------------------------------------------------


class StopsAt(Callback):
    """Ends the run after so many updates, whether they landed or not."""

    def __init__(self, updates: int) -> None:
        self.updates = updates

    def on_update_end(self, trainer: Trainer, policy: nn.Module, outcome: Outcome) -> None:
        if outcome.update == self.updates:
            trainer.stop("it is enough")


class FailsAt(StopsAt):
    """Ends the run where it stands."""

    def on_update_end(self, trainer: Trainer, policy: nn.Module, outcome: Outcome) -> None:
        if outcome.update == self.updates:
            raise KeyError("the node is gone")


def fit(run_dir: str, stop_at: int = 0, resume: str | None = None, fail_at: int = 0) -> Trainer:
    """The first three updates overflow, as does the seventh; the scale doubles after four in a row."""
    trainer = Trainer(
        "cpu", FP16({"init_scale": 1024.0, "growth_interval": 4}, allow_cpu=True), max_steps=9, seed=1, run_dir=run_dir,
        callbacks=[ScaleMonitor(), Checkpoint(), MetricsLog(), StopsAt(stop_at), FailsAt(fail_at)],
        default_callbacks=False,
    )  # fmt: skip
    trainer.fit(mlp(), InMemory(batches(20, poisoned=(0, 1, 2, 6))), resume=resume)
    return trainer


def events(run_dir: str) -> list[dict[str, Any]]:
    lines = Path(run_dir, "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if "event" in record and record["event"] != "note"]


def test_a_run_tells_each_drop_and_growth_once_with_step_and_both_scales() -> None:
    trainer = fit("run")
    calibrating = {"calibration": True}
    assert events("run") == [
        {"step": 0, "event": "skip", "reason": "non_finite", "update": 1, **calibrating},
        {"step": 0, "event": "scale_drop", "update": 1, "old": 1024.0, "new": 512.0, **calibrating},
        {"step": 0, "event": "skip", "reason": "non_finite", "update": 2, **calibrating},
        {"step": 0, "event": "scale_drop", "update": 2, "old": 512.0, "new": 256.0, **calibrating},
        {"step": 0, "event": "skip", "reason": "non_finite", "update": 3, **calibrating},
        {"step": 0, "event": "scale_drop", "update": 3, "old": 256.0, "new": 128.0, **calibrating},
        {"step": 3, "event": "skip", "reason": "non_finite", "update": 7},
        {"step": 3, "event": "scale_drop", "update": 7, "old": 128.0, "new": 64.0},
        {"step": 7, "event": "scale_growth", "update": 11, "old": 64.0, "new": 128.0},
    ]
    assert (trainer.metrics["scale"], trainer.metrics["skipped"]) == (128.0, 4)
    assert trainer.metrics["skip_rate"] == 4 / 13


@pytest.mark.parametrize("stop_at", [1, 2, 3, 4, 6, 7, 10])
def test_events_of_a_run_that_was_resumed_anywhere_stand_once(stop_at: int) -> None:
    fit("straight")
    fit("run", stop_at)
    with pytest.raises(KeyError):
        fit("run", resume="last", fail_at=stop_at + 3)
    fit("run", resume="last")
    assert events("run") == events("straight")


def test_a_collapse_ends_the_run_after_one_event_a_drop_and_names_step_scale_and_gradients() -> None:
    trainer = Trainer(
        "cpu", FP16({"init_scale": 2.0**15, "min_scale": 4.0}, allow_cpu=True), max_steps=9, run_dir="run",
        callbacks=[ScaleMonitor(), MetricsLog()], default_callbacks=False, log_every=1,
    )  # fmt: skip
    data = batches(3) + batches(40, poisoned=range(40), seed=2)
    with pytest.raises(LossScaleCollapse) as caught:
        trainer.fit(mlp(), InMemory(data))
    for part in ("after step 3", "loss scale 4", "net.0.weight", f"{trainer.metrics['train/loss']:.4g}"):
        assert part in str(caught.value)
    told = [event["event"] for event in events("run")]
    assert told.count("scale_drop") == 13
    assert told.count("scale_escalation") == 1
