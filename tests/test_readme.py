"""The README's programs run as they are printed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from policyfit.strategies.facts import probe
from policyfit.trainer.cli import main

pytest.importorskip("gymnasium")

README = (Path(__file__).parents[1] / "README.md").read_text()


def _block(language: str, first: str) -> str:
    """The code block that begins with a line."""
    (found,) = re.findall(rf"^```{language}\n({re.escape(first)}\n.*?)^```$", README, re.MULTILINE | re.DOTALL)
    return str(found)


def _run(script: str) -> str:
    return subprocess.run([sys.executable, script], capture_output=True, text=True, check=True).stdout


@pytest.mark.slow
@pytest.mark.skipif(bool(probe().cuda), reason="the README's bf16 is refused on a GPU that emulates it")
def test_readme_trains_loads_and_evaluates(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    Path("my_policy.py").write_text(_block("python", "# my_policy.py"))
    Path("my_callbacks.py").write_text(_block("python", "# my_callbacks.py"))
    Path("run.yaml").write_text(_block("yaml", "# run.yaml"))
    Path("robot.py").write_text(_block("python", "import torch") + "print(tuple(action.shape), action.dtype)\n")
    assert "return  mean" in _run("my_policy.py")
    assert _run("robot.py") == "(1, 1) torch.float32\n"
    monkeypatch.syspath_prepend(str(Path.cwd()))
    assert main(["eval", "runs/first", "--env=my_policy.make_env", "--episodes=1"]) == 0
    callback = "--trainer.callbacks=[{class_path: my_callbacks.QuickRollout, init_args: {every: 100}}]"
    assert main(["plan", "run.yaml"]) == 0
    assert main(["fit", "run.yaml", callback, "--trainer.run_dir=runs/second", "--trainer.log_every=null"]) == 0
    assert '"event": "quick_rollout"' in Path("runs/second/metrics.jsonl").read_text()
    assert main(["validate", "runs/second"]) == 0
    assert "val/l1" in capsys.readouterr().out
