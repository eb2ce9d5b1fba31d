import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

from policyfit.callbacks.metrics_log import MetricsLog
from policyfit.strategies.errors import CallbackError

POLICY = nn.Linear(1, 1)


class FakeTrainer:
    def __init__(self, run_dir: Path, resumed: int = 0, updates: int | None = None, is_main: bool = True) -> None:
        self.run_dir, self.resumed_step, self.is_main = run_dir, resumed, is_main
        self.updates = resumed if updates is None else updates


def write(trainer: Any, *records: dict[str, Any]) -> None:
    log = MetricsLog()
    log.setup(trainer, POLICY, "fit")
    log.on_fit_start(trainer, POLICY)
    for record in records:
        log.on_log(trainer, POLICY, record)
    log.teardown(trainer, POLICY, "fit")


def lines(folder: Path) -> list[Any]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_records_and_events_are_one_json_object_a_line(tmp_path: Path) -> None:
    record = {"step": 50, "epoch": 0, "train/loss": 0.12, "lr": 1e-3, "skipped": 0}
    event = {"step": 50, "event": "skip", "reason": "non_finite", "update": 51}
    write(FakeTrainer(tmp_path), record, event)
    assert lines(tmp_path) == [record, event]
    assert isinstance(lines(tmp_path)[0]["step"], int)


def test_each_record_can_be_read_at_once(tmp_path: Path) -> None:
    trainer: Any = FakeTrainer(tmp_path)
    log = MetricsLog()
    log.on_fit_start(trainer, POLICY)
    for step in range(1, 4):
        log.on_log(trainer, POLICY, {"step": step})
        assert lines(tmp_path)[-1] == {"step": step}
    log.teardown(trainer, POLICY, "fit")


def test_non_finite_floats_are_strings_that_float_reads(tmp_path: Path) -> None:
    values = {"a": math.nan, "b": math.inf, "c": [-math.inf, 1.0], "d": {"e": np.float64("nan")}}
    write(FakeTrainer(tmp_path), {"step": 1, **values})
    text = (tmp_path / "metrics.jsonl").read_text()
    read = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert read == {"step": 1, "a": "nan", "b": "inf", "c": ["-inf", 1.0], "d": {"e": "nan"}}
    assert math.isnan(float(read["a"]))


def test_resumed_run_has_each_step_once(tmp_path: Path) -> None:
    write(FakeTrainer(tmp_path), *({"step": step, "run": 1} for step in range(1, 8)))
    write(FakeTrainer(tmp_path, resumed=5), *({"step": step, "run": 2} for step in range(6, 11)))
    assert [(r["step"], r["run"]) for r in lines(tmp_path)] == [
        *((step, 1) for step in range(1, 6)),
        *((step, 2) for step in range(6, 11)),
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_resumed_run_drops_skips_after_the_checkpoint_that_made_no_step(tmp_path: Path) -> None:
    before = {"step": 5, "event": "skip", "update": 6}
    after = {"step": 5, "event": "skip", "update": 7}
    write(FakeTrainer(tmp_path), {"step": 5}, before, {"step": 5, "val/loss": 0.5}, after)
    write(FakeTrainer(tmp_path, resumed=5, updates=6), after, {"step": 6})
    assert lines(tmp_path) == [{"step": 5}, before, {"step": 5, "val/loss": 0.5}, after, {"step": 6}]


@pytest.mark.parametrize("at_the_save", [0, 1])
def test_resumed_run_drops_records_of_the_same_step_that_came_after_the_checkpoint(
    at_the_save: int, tmp_path: Path
) -> None:
    trainer: Any = FakeTrainer(tmp_path)
    log = MetricsLog()
    log.on_fit_start(trainer, POLICY)
    log.on_log(trainer, POLICY, {"step": 4})
    for _ in range(at_the_save):
        log.on_log(trainer, POLICY, {"step": 5, "train/loss": 1.0})
    saved = log.state_dict()
    log.on_log(trainer, POLICY, {"step": 5, "val/loss": 0.5})  # and then the run is killed
    log.teardown(trainer, POLICY, "fit")
    resumed: Any = FakeTrainer(tmp_path, resumed=5)
    log = MetricsLog()
    log.load_state_dict(saved)
    log.on_fit_start(resumed, POLICY)
    log.on_log(resumed, POLICY, {"step": 5, "val/loss": 0.5})
    log.teardown(resumed, POLICY, "fit")
    assert lines(tmp_path) == [
        {"step": 4},
        *at_the_save * [{"step": 5, "train/loss": 1.0}],
        {"step": 5, "val/loss": 0.5},
    ]


def test_line_cut_short_by_a_kill_is_dropped_at_resume(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2, "train/lo')
    write(FakeTrainer(tmp_path, resumed=1), {"step": 2})
    assert lines(tmp_path) == [{"step": 1}, {"step": 2}]


@pytest.mark.parametrize("damaged", ["{", "[1]", '{"loss": 1}', '{"step": null}'])
def test_damaged_line_is_refused_by_its_number_and_left_in_place(tmp_path: Path, damaged: str) -> None:
    text = '{"step": 1}\n' + damaged + '\n{"step": 2}\n'
    (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(CallbackError, match="Line 2 of "):
        write(FakeTrainer(tmp_path, resumed=2))
    assert (tmp_path / "metrics.jsonl").read_text() == text


def test_resume_in_a_new_folder_starts_a_file(tmp_path: Path) -> None:
    write(FakeTrainer(tmp_path, resumed=5), {"step": 6})
    assert lines(tmp_path) == [{"step": 6}]


def test_events_from_before_the_start_are_written_first_and_survive_the_cut(tmp_path: Path) -> None:
    write(FakeTrainer(tmp_path), {"step": 5}, {"step": 6})
    trainer: Any = FakeTrainer(tmp_path, resumed=5)
    log = MetricsLog()
    log.on_log(trainer, POLICY, {"step": 5, "event": "warning"})
    log.on_fit_start(trainer, POLICY)
    log.on_log(trainer, POLICY, {"step": 6, "again": True})
    log.teardown(trainer, POLICY, "fit")
    assert lines(tmp_path) == [{"step": 5}, {"step": 5, "event": "warning"}, {"step": 6, "again": True}]


def test_only_rank_zero_writes(tmp_path: Path) -> None:
    write(FakeTrainer(tmp_path, is_main=False), {"step": 1})
    assert list(tmp_path.iterdir()) == []


def test_evaluation_leaves_no_file_and_nothing_for_a_later_fit(tmp_path: Path) -> None:
    trainer: Any = FakeTrainer(tmp_path)
    log = MetricsLog()
    log.on_log(trainer, POLICY, {"step": 0, "event": "warning"})
    log.teardown(trainer, POLICY, "evaluate")
    assert list(tmp_path.iterdir()) == []
    log.on_fit_start(trainer, POLICY)
    log.teardown(trainer, POLICY, "fit")
    assert lines(tmp_path) == []


def test_file_is_closed_after_the_run(tmp_path: Path) -> None:
    trainer: Any = FakeTrainer(tmp_path)
    log = MetricsLog()
    log.on_fit_start(trainer, POLICY)
    file: Any = log._file
    log.teardown(trainer, POLICY, "fit")
    assert file.closed
