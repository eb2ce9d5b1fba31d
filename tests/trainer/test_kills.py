"""Runs killed by SIGKILL at random moments, inside saves too, end with the bits of the run that was never killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

Make = Callable[[str, int], dict[str, Any]]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks a process that has been counted as one thread")


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Make]:
    """Makes a trial in a process of its own, which has imported torch once and computed nothing."""
    program, folder = Path(__file__).with_name("killing.py"), tmp_path_factory.mktemp("kills")
    harness = subprocess.Popen(
        [sys.executable, program, "--serve", "--folder", folder],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    with harness:
        assert harness.stdin is not None
        assert harness.stdout is not None

        def make(configuration: str, number: int) -> dict[str, Any]:
            print(json.dumps([configuration, number]), file=harness.stdin, flush=True)
            made: dict[str, Any] = json.loads(harness.stdout.readline())  # type: ignore[union-attr]
            return made

        yield make


@pytest.mark.parametrize(("workers", "trials"), [(0, 7), (2, 2)])
@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_killed_runs_equal_the_uninterrupted_one_bit_for_bit(
    precision: str, workers: int, trials: int, trial: Make
) -> None:
    names = [f"{precision}-workers{workers}-{saves}" for saves in ("foreground", "background")]
    made = [trial(name, number) for name in names for number in range(trials)]
    # Each can be repeated alone: bash scripts/kill-check --only=CONFIGURATION --trial=NUMBER
    assert {(m["configuration"], m["number"]): m["differences"] for m in made if m["differences"]} == {}
    assert all(m["kills"] >= 1 for m in made)
    assert any(m["inside"] for m in made)
    assert all(m["skipped"] >= 1 for m in made)
