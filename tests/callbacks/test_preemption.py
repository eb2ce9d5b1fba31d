"""SIGTERM and SIGUSR1: finish the update, save, exit with 143."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn
from toys import InMemory, batches, mlp

from policyfit import Callback, Checkpoint, Preemption, Trainer
from policyfit.strategies.distributed import SingleProcess


class Sends(Callback):
    """Sends this process a signal inside a window of the given update."""

    def __init__(self, number: int, at: int, times: int = 1) -> None:
        self.number = number
        self.at, self.times = at, times

    def on_before_backward(self, trainer: Trainer, *_: Any) -> None:
        if trainer.micro_batches == self.at:
            for _sent in range(self.times):
                os.kill(os.getpid(), self.number)


def trainer_with(run_dir: Path, *callbacks: Callback) -> Trainer:
    return Trainer("cpu", max_steps=50, accumulate=2, run_dir=run_dir, callbacks=list(callbacks))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_signal_ends_the_run_after_the_update_under_way_saved_with_exit_code_143(
    number: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(number)
    trainer = trainer_with(tmp_path / "run", Sends(number, at=6))
    with pytest.raises(SystemExit) as ended:
        trainer.fit(mlp(), InMemory(batches(40)))
    assert ended.value.code == 143
    assert (trainer.status, trainer.step) == ("stopped", 4)
    assert trainer.stop_reason == f"{signal.Signals(number).name} was received"
    assert [path.name for path in trainer.checkpoints()] == ["000004"]
    assert signal.getsignal(number) is before
    assert f"{signal.Signals(number).name} was received: the run will end soon, after this" in capfd.readouterr().err


class TwoRanks(SingleProcess):
    world_size = 2


def test_of_several_processes_a_repeat_within_two_seconds_is_the_same_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    now, stops = [100.0], list[Any]()
    trainer: Any = SimpleNamespace(
        distribution=TwoRanks(), is_main=False, stop=lambda reason, exit_code: stops.append((reason, exit_code))
    )
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(os, "_exit", stops.append)
    before, preemption = signal.getsignal(signal.SIGTERM), Preemption()
    preemption.setup(trainer, mlp(), "fit")
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGTERM)
        now[0] += 1.5
    assert stops == [("SIGTERM was received", 143)]
    os.kill(os.getpid(), signal.SIGTERM)
    assert stops == [("SIGTERM was received", 143), 143]
    preemption.teardown(trainer, mlp(), "fit")
    assert signal.getsignal(signal.SIGTERM) is before


def test_signal_whose_words_nobody_reads_any_more_ends_the_run_saved_all_the_same(tmp_path: Path) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    child = os.fork()
    if child == 0:
        os.dup2(writes, 2)
        try:
            trainer_with(tmp_path / "run", Sends(signal.SIGTERM, at=6)).fit(mlp(), InMemory(batches(40)))
        except SystemExit as end:
            os._exit(int(str(end.code)))
        finally:
            os._exit(99)
    os.close(writes)
    _, status = os.waitpid(child, 0)
    assert os.WEXITSTATUS(status) == 143
    assert (tmp_path / "run/checkpoints/000004").is_dir()


def test_saves_itself_when_no_callback_does(tmp_path: Path) -> None:
    trainer = Trainer(
        "cpu", max_steps=50, run_dir=tmp_path / "run", default_callbacks=False,
        callbacks=[Sends(signal.SIGTERM, at=2), Preemption()],
    )  # fmt: skip
    with pytest.raises(SystemExit):
        trainer.fit(mlp(), InMemory(batches(40)))
    assert [path.name for path in trainer.checkpoints()] == ["000003"]


def test_run_that_was_preempted_goes_on_where_it_was(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        trainer_with(tmp_path / "run", Sends(signal.SIGTERM, at=6)).fit(mlp(), InMemory(batches(40)))
    trainer = trainer_with(tmp_path / "run")
    trainer.fit(mlp(), InMemory(batches(40)), resume="last")
    assert (trainer.resumed_step, trainer.step, trainer.status) == (4, 50, "completed")


def test_second_signal_exits_at_once(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        try:
            trainer_with(tmp_path / "run", Sends(signal.SIGTERM, at=6, times=2)).fit(mlp(), InMemory(batches(40)))
        finally:
            os._exit(99)
    _, status = os.waitpid(child, 0)
    assert os.WEXITSTATUS(status) == 143
    assert not (tmp_path / "run/checkpoints").exists()


def test_interrupt_saves_and_exits_with_130_when_asked(tmp_path: Path) -> None:
    trainer = trainer_with(tmp_path / "run", Sends(signal.SIGINT, at=6), Preemption(interrupt=True))
    with pytest.raises(SystemExit) as ended:
        trainer.fit(mlp(), InMemory(batches(40)))
    assert ended.value.code == 130
    assert [path.name for path in trainer.checkpoints()] == ["000004"]


def test_interrupt_is_an_interrupt_when_not_asked(tmp_path: Path) -> None:
    trainer = trainer_with(tmp_path / "run", Sends(signal.SIGINT, at=6))
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(mlp(), InMemory(batches(40)))
    assert trainer.status == "interrupted"
    assert trainer.checkpoints() == []


class Breaks(Callback):
    def on_after_backward(self, trainer: Trainer, policy: nn.Module) -> None:
        raise KeyError("in the middle")


def test_handlers_come_back_after_an_error(tmp_path: Path) -> None:
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    before = [signal.getsignal(number) for number in numbers]
    with pytest.raises(KeyError, match="in the middle"):
        trainer_with(tmp_path / "run", Preemption(interrupt=True), Breaks()).fit(mlp(), InMemory(batches(4)))
    assert [signal.getsignal(number) for number in numbers] == before


def test_slurm_job_is_put_back_into_the_queue_after_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(f'#!/bin/sh\necho "$@" $(ls {tmp_path}/run/checkpoints) > {tmp_path}/asked\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{scontrol.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    trainer = trainer_with(tmp_path / "run", Sends(signal.SIGTERM, at=6), Checkpoint(), Preemption(requeue=True))
    with pytest.raises(SystemExit):
        trainer.fit(mlp(), InMemory(batches(40)))
    assert (tmp_path / "asked").read_text().split() == ["requeue", "77", "000004", "last"]


class Warnings(Callback):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_log(self, trainer: Trainer, policy: nn.Module, record: Any) -> None:
        if record.get("event") == "warning":
            self.seen.append(record["message"])


def test_a_run_outside_the_main_thread_says_that_signals_are_not_handled(tmp_path: Path) -> None:
    warnings, before = Warnings(), signal.getsignal(signal.SIGTERM)
    trainer = Trainer("cpu", max_steps=2, run_dir=tmp_path / "run", callbacks=[warnings])
    thread = threading.Thread(target=lambda: trainer.fit(mlp(), InMemory(batches(2))))
    thread.start()
    thread.join()
    assert trainer.status == "completed"
    assert warnings.seen == ["signals are not handled: this run is not in the main thread"]
    assert signal.getsignal(signal.SIGTERM) is before
