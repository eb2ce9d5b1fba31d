"""``--print_config``: the run as resolved, which means the same when it is fed back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from run_parts import BASE, policyfit

from policyfit import load

LAB = (
    "steps: 4\ntrainer: {accumulate: 2, callbacks+: [policyfit.EMA]}\nschedule: {class_path: policyfit.WarmupCosine}\n"
)
WORDS = ["--trainer.clip_norm=${env:RUN_CLIP:-0.5}", "--precision=bf16-mixed", "--eval=null", "--policy.names=['${x}']"]


@pytest.fixture
def resolved() -> str:
    """What is printed for a run in two files, with words of other tools, a variable and an appended list."""
    Path("base.yaml").write_text(BASE.replace(", max_steps: 2", ""))
    Path("lab.yaml").write_text(LAB)
    said = policyfit(
        "fit", "base.yaml", "lab.yaml", *[word.replace("${x}", "$${x}") for word in WORDS], "--print_config"
    )
    assert said.code == 0
    assert not Path("runs").exists()
    Path("resolved.yaml").write_text(said.out)
    return said.out


def test_it_says_what_every_word_and_variable_came_to(resolved: str) -> None:
    for line in ("max_steps: 2", "accumulate: 2", "precision: bf16", "clip_norm: 0.5", "class_path: policyfit.EMA"):
        assert line in resolved
    assert "steps: 4" not in resolved.replace("max_steps", "")


def test_it_prints_itself_when_it_is_fed_back(resolved: str) -> None:
    for command in ("fit", "plan"):
        said = policyfit(command, "resolved.yaml", "--print_config")
        assert (said.code, said.out, said.err) == (0, resolved, "")


def test_it_gives_the_same_plan_and_the_same_weights(resolved: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [word.replace("${x}", "$${x}") for word in WORDS]
    plans = [
        policyfit("plan", *files, "--json").out for files in (["base.yaml", "lab.yaml", *words], ["resolved.yaml"])
    ]
    assert json.loads(plans[0]) == json.loads(plans[1])
    assert policyfit("fit", "base.yaml", "lab.yaml", *words, "--trainer.run_dir=first").code == 0
    monkeypatch.setenv("RUN_CLIP", "9")  # is filled in already
    assert policyfit("fit", "resolved.yaml", "--trainer.run_dir=second").code == 0
    first, second = load("first", device="cpu"), load("second", device="cpu")
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert first.names == second.names == ["${x}"]


def test_what_would_be_refused_is_refused() -> None:
    Path("base.yaml").write_text(BASE)
    said = policyfit("fit", "base.yaml", "--trainer.max_step=3", "--print_config")
    assert (said.code, said.out) == (2, "")
