"""Completion in a shell."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from run_parts import policyfit

from policyfit.trainer.completion import script

needs_bash = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash, found none")


def _offered(*words: str) -> list[str]:
    """What bash offers for the last of the words; it hands ``=`` over as a word of its own."""
    listed = " ".join(f"'{word}'" for word in words)
    asked = f"COMP_WORDS=({listed}); COMP_CWORD={len(words) - 1}; _policyfit; echo ${{COMPREPLY[*]}}"
    done = subprocess.run(["bash", "-c", f"{script('bash')}\n{asked}"], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout.split()


@needs_bash
@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["policyfit", "pl"], ["plan"]),
        (["policyfit", "fit", "--trainer.clip"], ["--trainer.clip_norm=", "--trainer.clip_value="]),
        (["policyfit", "fit", "run.yaml", "--print"], ["--print_config"]),
        (["policyfit", "fit", "run.yaml", "--precision", "=", "b"], ["bf16"]),
        (["policyfit", "fit", "run.yaml", "--precision=b"], ["--precision=bf16"]),
        (["policyfit", "fit", "run.yaml", "--precision", "b"], ["bf16"]),
        (["policyfit", "fit", "run.yaml", "--trainer.tf32", ""], ["true", "false"]),
        (["policyfit", "fit", "run.yaml", "--precision", "--trainer.clip_n"], ["--trainer.clip_norm="]),
        (["policyfit", "fit", "--audit", "ru"], []),
        (["policyfit", "fit", "run.yaml", "--trainer.non_finite", "="], ["skip", "raise", "off"]),
        (["policyfit", "plan", "--trainer.tf32", "=", "t"], ["true"]),
        (["policyfit", "eval", "runs/x", "--w"], ["--weights"]),
        (["policyfit", "eval", "runs/x", "--weights", "=", "e"], ["ema"]),
        (["policyfit", "fit", "ru"], []),
        (["policyfit", "fit", "run.yaml", "--policy."], ["--policy.class_path=", "--policy.init_args."]),
        (["policyfit", "plan", "--optimizer.c"], ["--optimizer.class_path="]),
        (["policyfit", "completion", ""], ["bash", "zsh"]),
        (["policyfit", "completion", "--de"], ["--debug"]),
        (["policyfit", "checkpoints", "--trainer"], []),
    ],
)
def test_bash_offers_what_fits(words: list[str], offered: list[str]) -> None:
    assert _offered(*words) == offered


@needs_bash
def test_every_command_is_offered() -> None:
    assert {"fit", "plan", "validate", "eval", "checkpoints", "doctor", "schema", "completion"} <= {
        *_offered("policyfit", "")
    }


def test_the_command_prints_the_script_of_the_shell_that_is_asked_for() -> None:
    assert policyfit("completion", "bash").out == script("bash")
    assert "bashcompinit" in policyfit("completion", "zsh").out
    said = policyfit("completion", "fish")
    assert said.code == 2
    assert "invalid choice: 'fish'" in said.err
