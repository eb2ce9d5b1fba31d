"""An overflow in the example's training: what the terminal and metrics.jsonl say, and how it goes on or ends."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import policyfit
from policyfit.trainer.cli import main

pytest.importorskip("metaworld", reason="needs the examples extra: pip install metaworld==3.1.1 packaging")
pytest.importorskip("pyarrow", reason="needs the examples extra: pip install pyarrow")

pytestmark = pytest.mark.simulator

EXAMPLE = Path(__file__).parents[2] / "examples" / "pick_place"
STEPS = 12

INJECT = """
from policyfit import Callback

class Inject(Callback):
    def __init__(self, first: int, last: int) -> None:
        self.first, self.last = first, last

    def on_after_backward(self, trainer, policy):
        if self.first <= trainer.micro_batches <= self.last:
            policy.head.weight.grad[0, 0] = float("inf")
"""
BF16 = "bf16"
FP16 = {"class_path": "policyfit.FP16", "init_args": {"allow_cpu": True, "grad_scaler": {"init_scale": 64.0}}}


def fit(folder: Path, root: str, precision: Any, first: int, last: int) -> tuple[int, list[dict[str, Any]]]:
    """Train the example with an inf in one gradient of micro-batches ``first`` to ``last``: exit code and records."""
    for module in EXAMPLE.glob("*.py"):
        shutil.copy(module, folder)
    (folder / "inject.py").write_text(INJECT)
    run = yaml.safe_load((EXAMPLE / "RUN.yaml").read_text())
    for split in run["data"].values():
        split["init_args"] |= {"root": root, "episodes": 5, "val_episodes": 2}
    inject = {"class_path": "inject.Inject", "init_args": {"first": first, "last": last}}
    checkpoint = {"class_path": "policyfit.Checkpoint", "init_args": {"every_steps": 2}}
    del run["eval"]
    run["trainer"] |= {
        "precision": precision, "max_steps": STEPS, "batch_size": 16, "log_every": 4, "callbacks": [inject, checkpoint],
        "val_every": None, "workers": 0, "run_dir": str(folder / "run"),
    }  # fmt: skip
    (folder / "RUN.yaml").write_text(yaml.safe_dump(run))
    code = main(["fit", str(folder / "RUN.yaml")])
    return code, [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def of(kind: str, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [record for record in records if record.get("event") == kind]


@pytest.mark.parametrize("precision", [BF16, FP16], ids=["bf16", "fp16"])
def test_overflow_at_a_chosen_step_is_told_and_training_goes_on(
    tmp_path: Path, root: str, capfd: pytest.CaptureFixture[str], precision: Any
) -> None:
    code, records = fit(tmp_path, root, precision, first=5, last=5)
    assert code == 0
    (skip,) = of("skip", records)
    assert (skip["step"], skip["reason"]) == (5, "non_finite")
    (overflow,) = of("overflow", records)
    assert (overflow["step"], overflow["parameters"], overflow["modules"]) == (5, ["head.weight"], ["head"])
    last = [record for record in records if "train/loss" in record][-1]
    assert (last["step"], last["skipped"]) == (STEPS, 1)
    drops = of("scale_drop", records)
    assert [(drop["old"], drop["new"]) for drop in drops] == ([] if precision is BF16 else [(64.0, 32.0)])
    terminal = " ".join("".join(capfd.readouterr()).split())
    assert "head.weight" in terminal
    assert "skip" in terminal


@pytest.mark.parametrize("precision", [BF16, FP16], ids=["bf16", "fp16"])
def test_endless_overflow_ends_by_itself_with_a_message_and_a_usable_checkpoint(
    tmp_path: Path, root: str, capfd: pytest.CaptureFixture[str], precision: Any
) -> None:
    code, _ = fit(tmp_path, root, precision, first=5, last=10**9)
    assert code == 1
    terminal = " ".join("".join(capfd.readouterr()).split())
    assert ("LossScaleCollapse" if precision is FP16 else "TrainingDiverged") in terminal
    assert "head.weight" in terminal
    assert "Traceback" not in terminal
    newest = tmp_path / "run" / "checkpoints" / "last"
    assert newest.resolve().name == "000004"
    policy = policyfit.load(newest, device="cpu", precision="no")
    assert all(torch.isfinite(value).all() for value in policy.state_dict().values())
