import io
import re
import threading
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from torch import nn

from policyfit.callbacks import progress
from policyfit.callbacks.progress import Progress
from policyfit.trainer.outcome import Outcome

POLICY = nn.Linear(1, 1)


class FakeTrainer:
    def __init__(self, run_dir: Path, **changes: Any) -> None:
        self.run_dir = run_dir
        self.max_steps: int | None = 10
        self.max_epochs: int | None = None
        self.batches_per_epoch: int | None = None
        self.micro_batches = self.resumed_step = self.skipped = 0
        self.is_main, self.status = True, "running"
        self.stop_reason: str | None = None
        self.plan = SimpleNamespace(text=lambda: "device     cpu\nprecision  fp16")
        vars(self).update(changes)


class Screen:
    def __init__(self, terminal: bool) -> None:
        self.buffer = io.StringIO()
        self.console = Console(file=self.buffer, force_terminal=terminal, width=120, color_system=None)

    @property
    def text(self) -> str:
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.buffer.getvalue())

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines()


def outcome(step: int, update: int, landed: bool = True, scale: float | None = None) -> Outcome:
    return Outcome(landed, None if landed else "non_finite", step, update, 1.0, scale, None, ())


RECORD = {
    "step": 5,
    "epoch": 0,
    "train/loss": 0.123456,
    "lr": 1e-3,
    "grad_norm": 0.8,
    "scale": 65536.0,
    "skipped": 1,
    "steps_per_s": 41.0,
    "samples_per_s": 328.0,
}


def test_plain_output_is_the_plan_a_line_a_record_and_the_end(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    trainer: Any = FakeTrainer(tmp_path)
    screen = Screen(terminal=False)
    bar = Progress(screen.console)
    bar.on_fit_start(trainer, POLICY)
    bar.on_update_end(trainer, POLICY, outcome(5, 6))
    bar.on_log(trainer, POLICY, RECORD)
    bar.on_log(trainer, POLICY, {"step": 5, "epoch": 0, "val/loss": 2.0})
    trainer.status = "completed"
    bar.teardown(trainer, POLICY, "fit")
    assert screen.lines == [
        "device     cpu",
        "precision  fp16",
        "step 5/10  loss 0.1235  lr 0.001  grad_norm 0.8  scale 65536  skipped 1  steps/s 41",
        "step 5/10  val/loss 2",
        "completed at step 5, 1 skipped, after 0 s",
        "checkpoints: checkpoints",
    ]


def test_output_goes_to_standard_output_by_default(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer: Any = FakeTrainer(tmp_path)
    bar = Progress()
    bar.on_fit_start(trainer, POLICY)
    bar.teardown(trainer, POLICY, "fit")
    assert capsys.readouterr().out.startswith("device     cpu\n")


def test_terminal_shows_a_bar_with_the_last_known_numbers(tmp_path: Path) -> None:
    trainer: Any = FakeTrainer(tmp_path)
    screen = Screen(terminal=True)
    bar = Progress(screen.console)
    threads = threading.active_count()
    bar.on_fit_start(trainer, POLICY)
    bar.on_update_end(trainer, POLICY, outcome(5, 6, scale=32768.0))
    bar.on_log(trainer, POLICY, RECORD)
    assert threading.active_count() == threads
    trainer.status = "completed"
    bar.teardown(trainer, POLICY, "fit")
    for shown in ("5/10", "loss 0.1235", "lr 0.001", "steps/s 41", "scale 32768", "skipped 1"):
        assert shown in screen.text
    assert "grad_norm" not in screen.text
    assert "completed at step 5" in screen.lines[-1]


def test_terminal_prints_validation_above_the_bar(tmp_path: Path) -> None:
    trainer: Any = FakeTrainer(tmp_path)
    screen = Screen(terminal=True)
    bar = Progress(screen.console)
    bar.on_fit_start(trainer, POLICY)
    bar.on_log(trainer, POLICY, {"step": 5, "epoch": 0, "val/loss": 0.5})
    bar.teardown(trainer, POLICY, "fit")
    assert any(line.strip() == "step 5/10  val/loss 0.5" for line in screen.lines)


def test_run_counted_in_epochs_has_a_bar_of_batches(tmp_path: Path) -> None:
    trainer: Any = FakeTrainer(tmp_path, max_steps=None, max_epochs=3, batches_per_epoch=7, micro_batches=9)
    screen = Screen(terminal=True)
    bar = Progress(screen.console)
    bar.on_fit_start(trainer, POLICY)
    bar.teardown(trainer, POLICY, "fit")
    assert re.search(r"batch +9/21", screen.text)


def test_resumed_run_starts_where_it_stopped(tmp_path: Path) -> None:
    trainer: Any = FakeTrainer(tmp_path, resumed_step=6, skipped=2)
    screen = Screen(terminal=True)
    bar = Progress(screen.console)
    bar.on_fit_start(trainer, POLICY)
    bar.teardown(trainer, POLICY, "fit")
    assert re.search(r"step +6/10", screen.text)
    assert "at step 6, 2 skipped" in screen.lines[-1]


def test_bar_is_drawn_at_most_four_times_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now[0]))
    trainer: Any = FakeTrainer(tmp_path, max_steps=1000)
    bar = Progress(Screen(terminal=True).console)
    bar.on_fit_start(trainer, POLICY)
    drawn: list[float] = []
    monkeypatch.setattr(bar._bar, "refresh", lambda: drawn.append(now[0]))
    for step in range(1, 1001):
        now[0] = 100.0 + step / 500
        bar.on_update_end(trainer, POLICY, outcome(step, step))
    assert 7 <= len(drawn) <= 8
    assert all(later - earlier >= 0.25 for earlier, later in pairwise(drawn))
    bar.teardown(trainer, POLICY, "fit")


def test_skips_and_scale_moves_are_folded_to_powers_of_two(tmp_path: Path) -> None:
    trainer: Any = FakeTrainer(tmp_path)
    screen = Screen(terminal=False)
    bar = Progress(screen.console)
    bar.on_fit_start(trainer, POLICY)
    for update in range(1, 101):
        event = {"step": 0, "event": "skip", "reason": "non_finite", "update": update, "calibration": True}
        bar.on_log(trainer, POLICY, event)
    bar.on_log(trainer, POLICY, {"step": 9, "event": "scale_drop", "update": 9, "old": 65536.0, "new": 32768.0})
    skips = [line for line in screen.lines if "skipped" in line]
    assert skips[0] == "step 0: update 1 skipped: non_finite (the loss scale is being calibrated)"
    assert skips[-1] == "step 0: update 64 skipped: non_finite (the loss scale is being calibrated) (64 so far)"
    assert len(skips) == 7
    assert screen.lines[-1] == "step 9: loss scale 65536 -> 32768"


def test_other_events_are_one_readable_line_each(tmp_path: Path) -> None:
    trainer: Any = FakeTrainer(tmp_path)
    screen = Screen(terminal=False)
    bar = Progress(screen.console)
    bar.on_fit_start(trainer, POLICY)
    before = len(screen.lines)
    bar.on_log(trainer, POLICY, {"step": 3, "event": "warning", "source": "x", "message": "[bold] is [text]"})
    bar.on_log(trainer, POLICY, {"step": 4, "event": "overflow", "module": "head", "count": 2})
    bar.on_log(trainer, POLICY, {"step": 5, "event": "preempted"})
    bar.on_log(trainer, POLICY, {"step": 6, "event": "note", "message": "for the file"})
    assert screen.lines[before:] == [
        "step 3: warning: [bold] is [text]",
        "step 4: overflow: module head, count 2",
        "step 5: preempted",
    ]


def test_events_from_before_the_start_follow_the_plan(tmp_path: Path) -> None:
    trainer: Any = FakeTrainer(tmp_path)
    screen = Screen(terminal=False)
    bar = Progress(screen.console)
    bar.on_log(trainer, POLICY, {"step": 0, "event": "warning", "message": "emulated"})
    assert screen.text == ""
    bar.on_fit_start(trainer, POLICY)
    assert screen.lines == ["device     cpu", "precision  fp16", "step 0: warning: emulated"]


def test_warnings_of_an_evaluation_are_printed_at_its_end(tmp_path: Path) -> None:
    trainer: Any = FakeTrainer(tmp_path)
    screen = Screen(terminal=False)
    bar = Progress(screen.console)
    bar.on_log(trainer, POLICY, {"step": 0, "event": "warning", "message": "emulated"})
    bar.teardown(trainer, POLICY, "evaluate")
    assert screen.lines == ["step 0: warning: emulated"]


@pytest.mark.parametrize("terminal", [False, True])
def test_end_names_the_reason_of_a_stop(tmp_path: Path, terminal: bool) -> None:
    trainer: Any = FakeTrainer(tmp_path, status="stopped", stop_reason="val/loss stayed above 0.3")
    screen = Screen(terminal)
    bar = Progress(screen.console)
    bar.on_fit_start(trainer, POLICY)
    bar.teardown(trainer, POLICY, "fit")
    assert screen.lines[-1] == "stopped at step 0, 0 skipped, after 0 s: val/loss stayed above 0.3"


@pytest.mark.parametrize(
    ("status", "error", "end"),
    [
        ("failed", ValueError("bad batch\nwith details"), ": ValueError"),
        ("interrupted", KeyboardInterrupt(), ": KeyboardInterrupt"),
    ],
)
def test_end_names_the_exception_and_the_bar_is_stopped(
    tmp_path: Path, status: str, error: BaseException, end: str
) -> None:
    trainer: Any = FakeTrainer(tmp_path)
    screen = Screen(terminal=True)
    bar = Progress(screen.console)
    bar.on_fit_start(trainer, POLICY)
    trainer.status = status
    bar.on_exception(trainer, POLICY, error)
    bar.teardown(trainer, POLICY, "fit")
    assert screen.lines[-1] == f"{status} at step 0, 0 skipped, after 0 s{end}"
    assert bar._bar is None


def test_other_ranks_print_nothing(tmp_path: Path) -> None:
    trainer: Any = FakeTrainer(tmp_path, is_main=False)
    screen = Screen(terminal=True)
    bar = Progress(screen.console)
    bar.on_log(trainer, POLICY, {"step": 0, "event": "warning", "message": "emulated"})
    bar.on_fit_start(trainer, POLICY)
    bar.on_update_end(trainer, POLICY, outcome(1, 1))
    bar.on_log(trainer, POLICY, RECORD)
    bar.teardown(trainer, POLICY, "fit")
    assert screen.text == ""


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (61, "1 min 01 s"), (3725, "1 h 02 min")])
def test_durations_read_like_time(seconds: float, text: str) -> None:
    assert progress._duration(seconds) == text
