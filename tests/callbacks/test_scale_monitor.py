import json
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from policyfit.callbacks.scale_monitor import MAX_DROPS, WINDOW, ScaleMonitor
from policyfit.trainer.update import Outcome

POLICY = nn.Linear(1, 1)


class FakeRun:
    """Feeds outcomes of made-up updates to a monitor, as a trainer would."""

    def __init__(self, precision: str = "fp16", resumed_step: int = 0, init_scale: float = 65536.0) -> None:
        settings = {"settings": SimpleNamespace(init_scale=init_scale)} if precision == "fp16" else {}
        self.precision = SimpleNamespace(name=precision, **settings)
        self.resumed_step = resumed_step
        self.events: list[dict[str, Any]] = []
        self.step = self.update = 0
        self.scale: float | None = init_scale if precision == "fp16" else None

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
            reason = "non_finite" if move == "x" else None
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
    run.resumed_step = max(run.step, 1)
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


def test_monitor_without_its_state_takes_the_first_scale_of_a_resumed_run_as_it_is() -> None:
    run = FakeRun(resumed_step=500)
    run.scale = 1024.0
    run.feed(start(run), "..x")
    assert [event["old"] for event in run.events if event["event"] == "scale_drop"] == [1024.0]
