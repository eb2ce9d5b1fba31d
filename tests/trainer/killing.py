"""Kills training runs with SIGKILL at random moments, resumes them, and compares with a run that was never killed.

As a program it makes so many trials and prints a line for each configuration; ``--serve`` is for ``test_kills.py``:

    OMP_NUM_THREADS=1 python tests/trainer/killing.py --trials=500
    OMP_NUM_THREADS=1 python tests/trainer/killing.py --only=fp16-workers2-background --trial=17 --seed=0

torch is imported once, by this process, which computes nothing and so has one thread; every run is a fork of it. What
a trial does follows from configuration, number and seed; only a kill that comes some time after a point of the run hits
another instruction when it is repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import rich.console  # noqa: F401 - this and what follows is imported by every run, so before the fork
import torch
import torch._dynamo
import yaml  # noqa: F401
from killed_differences import Reference, differing_diary, differing_ends, left_of_saves, records, reference_of
from killed_run import CONFIGURATIONS, Configuration, Diary, Killer, Moment, draw_moment, newest_step, train

HUNG_S = 120


@dataclass(frozen=True)
class Trial:
    """What came out of one."""

    configuration: str
    number: int
    kills: int
    #: Kills that left a checkpoint half written, half replaced or half deleted.
    inside: int
    #: Updates of the uninterrupted run that were skipped.
    skipped: int
    differences: list[str]


class Harness:
    """Makes trials in ``folder``, where a run that differs is left for a look."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.seed = folder, seed
        self.reference = cache(self._reference)

    def trial(self, configuration: Configuration, number: int) -> Trial:
        """Kill a run once or twice, let it end, and compare."""
        rng = random.Random(f"{configuration.name} {number} {self.seed}")
        every = rng.choice((1, 2, 3))
        moments = [draw_moment(number, rng)]
        if rng.random() < 0.4:
            moments.append(draw_moment(rng.randrange(3), rng))
        reference = self.reference(configuration.precision)
        folder = self.folder / f"{configuration.name}-{number}"
        run_dir = folder / "run"
        differences: list[str] = []
        inside = 0
        for attempt, moment in enumerate((*moments, None)):
            newest, before = newest_step(run_dir), left_of_saves(run_dir)
            if not newest:  # nothing to go on from: as the Trainer advises, the folder goes
                shutil.rmtree(run_dir, ignore_errors=True)
            log, output = folder / f"diary-{attempt}.jsonl", folder / f"output-{attempt}.txt"
            ended = _fork(partial(_attempt, configuration, run_dir, log, every, newest > 0, moment), output)
            found = differing_diary(log, reference, newest, killed=moment is not None)
            complete = max((r["step"] for r in records(log) if r["kind"] == "complete"), default=newest)
            if newest_step(run_dir) < complete:
                found.append(f"the checkpoint of step {complete} is lost")
            if ended != (0 if moment is None else -signal.SIGKILL):
                found.append(f"it ended with {ended}: {output.read_text()[-3000:]}")
            elif moment is None:
                found += differing_ends(folder, self.folder / f"reference-{configuration.precision}")
            else:
                inside += not left_of_saves(run_dir) <= before
            if found:
                told = f"[killed at {moments}, saved every {every}, see {folder}]"
                differences = [f"attempt {attempt}: {what}   {told}" for what in found]
                break
        else:
            shutil.rmtree(folder)
        skipped = sum(update["reason"] is not None for update in reference["update"].values())
        return Trial(configuration.name, number, len(moments), inside, skipped, differences)

    def _reference(self, precision: str) -> Reference:
        """The diary of the uninterrupted run; neither workers nor the way of saving may make it another one."""
        folder = self.folder / f"reference-{precision}"
        configuration = Configuration(precision, workers=0, background=False)
        log, output = folder / "diary.jsonl", folder / "output.txt"
        ended = _fork(partial(_attempt, configuration, folder / "run", log, 2, False, None), output)
        if ended != 0:
            raise RuntimeError(f"The uninterrupted run ended with {ended}: {output.read_text()}")
        return reference_of(log)


def _attempt(
    configuration: Configuration, run_dir: Path, log: Path, every: int, resume: bool, moment: Moment | None
) -> None:
    killer = () if moment is None else (Killer(moment, run_dir),)
    train(configuration, run_dir, Diary(log), every, "last" if resume else None, killer)
    if killer:
        killer[0].at_the_end()


def _fork(task: Callable[[], None], output: Path) -> int:
    """The exit code of ``task`` in a fork of this process, or minus the signal that ended it; leaves no process."""
    if len(list(Path("/proc/self/task").iterdir())) != 1:
        raise RuntimeError("A process with several threads cannot be forked safely. Start it with OMP_NUM_THREADS=1.")
    output.parent.mkdir(parents=True, exist_ok=True)
    child = os.fork()
    if child == 0:
        try:
            os.setpgid(0, 0)
            signal.alarm(HUNG_S)
            descriptor = os.open(output, os.O_WRONLY | os.O_CREAT)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            task()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(1)
    try:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # loader processes, which would notice after seconds only


def serve(harness: Harness) -> None:
    """A line of JSON in, ``[configuration, number]``, and one out, the trial, until the input ends."""
    for line in sys.stdin:
        name, number = json.loads(line)
        print(json.dumps(vars(harness.trial(CONFIGURATIONS[name], number))), flush=True)


def check(harness: Harness, names: list[str], numbers: list[range]) -> bool:
    """Make the trials and print how they went; whether no run differed."""
    everything: list[Trial] = []
    for name, own in zip(names, numbers, strict=True):
        start = time.monotonic()
        trials = [harness.trial(CONFIGURATIONS[name], number) for number in own]
        for trial in trials:
            for difference in trial.differences:
                print(f"--only={name} --trial={trial.number} --seed={harness.seed}: {difference}", flush=True)
        everything += trials
        print(f"{_summary(name, trials)}, {time.monotonic() - start:.0f} s", flush=True)
    print(_summary("all", everything))
    return not any(trial.differences for trial in everything)


def _summary(name: str, trials: list[Trial]) -> str:
    kills, inside = sum(t.kills for t in trials), sum(t.inside for t in trials)
    differ = sum(bool(t.differences) for t in trials)
    return f"{name:<26} {len(trials):4} trials, {kills:4} kills, {inside:4} of them inside a save, {differ} runs differ"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=500, help="of all configurations together")
    parser.add_argument("--only", choices=CONFIGURATIONS, help="one configuration")
    parser.add_argument("--trial", type=int, help="one trial of it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where to work; otherwise a temporary folder")
    parser.add_argument("--serve", action="store_true", help="take trials from the input")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="policyfit-kills-"))
    harness = Harness(folder, arguments.seed)
    if arguments.serve:
        serve(harness)
        return 0
    names = [arguments.only] if arguments.only else list(CONFIGURATIONS)
    share, rest = divmod(arguments.trials, len(names))
    numbers = [range(share + (i < rest)) for i in range(len(names))]
    if arguments.trial is not None:
        numbers = [range(arguments.trial, arguments.trial + 1) for _ in names]
    same = check(harness, names, numbers)
    if same and arguments.folder is None:
        shutil.rmtree(folder)
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
