"""What ``policyfit plan`` says of a run that is not started."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from run_parts import BASE, Data, Policy, policyfit
from torch import nn, optim

from policyfit.trainer.memory import memory_of, size

FP16 = "--trainer.precision={class_path: policyfit.FP16, init_args: {allow_cpu: true, grad_scaler: {init_scale: 1024}}}"
WEIGHTS = sum(p.numel() * 4 for p in Policy().parameters())


def _plan(*words: str, text: str = BASE) -> dict[str, Any]:
    Path("run.yaml").write_text(text)
    said = policyfit("plan", "run.yaml", "--json", *words)
    assert said.code == 0
    found: dict[str, Any] = json.loads(said.out)
    return found


def test_a_plan_answers_every_question_and_makes_no_environment() -> None:
    plan = _plan()  # Env raises when it is made
    asked = (
        "device",
        "precision",
        "distribution",
        "tf32",
        "policy",
        "optimizer",
        "schedule",
        "seed",
        "scaler",
        "length",
    )
    more = ("batch", "epoch", "clip", "validation", "memory", "checkpoints", "resume", "eval", "notes")
    assert set(plan) == {*asked, *more, "threads", "environment_variables"}
    assert plan["eval"]["chosen"] == "1 episode of run_parts.Env, seeds from 10000 on"
    assert [path.name for path in Path().iterdir()] == ["run.yaml"]


def test_a_plan_builds_no_data_unless_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Data, index: int) -> Any:
        raise AssertionError("a sample was made")

    monkeypatch.setattr(Data, "__getitem__", refuse)
    monkeypatch.setattr(Data, "__init__", lambda self, size=16: refuse(self, 0))
    plan = _plan()
    assert plan["epoch"] == {
        "asked": "",
        "chosen": "unknown",
        "reason": "plan builds no data; --with-data builds it and counts",
    }
    monkeypatch.setattr(Data, "__init__", lambda self, size=16: setattr(self, "size", size))
    plan = _plan("--with-data")
    assert plan["epoch"]["numbers"] == {"samples": 16, "micro_batches": 2, "updates": 2}


def test_the_arithmetic_of_batches_is_that_of_the_run() -> None:
    words = ["--trainer.batch_size=3", "--trainer.accumulate=4", "--trainer.max_steps=null", "--trainer.max_epochs=5"]
    plan = _plan(*words, "--with-data")
    assert plan["batch"]["chosen"] == "12 samples an update: 4 micro-batches of 3 on 1 process"
    assert plan["batch"]["numbers"] == {"per_rank": 3, "accumulate": 4, "ranks": 1, "global": 12}
    assert plan["epoch"]["numbers"] == {"samples": 16, "micro_batches": 6, "updates": 2}
    assert plan["length"]["chosen"] == "5 epochs, 10 steps"
    assert policyfit("fit", "run.yaml", *words, "--eval=null", "--trainer.run_dir=out").code == 0
    assert Path("out/checkpoints/000010").is_dir()


def test_a_run_without_an_end_is_one_epoch() -> None:
    plan = _plan("--trainer.max_steps=null")
    assert (plan["length"]["chosen"], plan["length"]["numbers"]) == ("1 epoch", {"steps": None})
    assert _plan("--trainer.max_steps=null", "--with-data")["length"]["numbers"] == {"steps": 2}


def test_the_shorter_of_two_limits_is_the_length() -> None:
    limits = ["--trainer.max_epochs=3", "--with-data"]
    assert _plan(*limits, "--trainer.max_steps=4")["length"]["numbers"] == {"steps": 4}
    assert _plan(*limits, "--trainer.max_steps=40")["length"]["numbers"] == {"steps": 6}
    assert _plan("--trainer.max_epochs=3", "--trainer.max_steps=40")["length"]["numbers"] == {"steps": None}


def test_the_scaler_of_float16_is_said_as_it_is_set_and_no_other_precision_has_one() -> None:
    assert _plan(FP16)["scaler"]["chosen"] == "1024"
    assert _plan(FP16)["scaler"]["reason"].startswith(
        "times 2 after 2,000 updates without an overflow, times 0.5 after"
    )
    for precision in ("no", "bf16"):
        assert _plan(f"--precision={precision}")["scaler"]["chosen"] == "none"


def test_memory_is_that_of_weights_gradients_and_optimizer() -> None:
    numbers = _plan()["memory"]["numbers"]
    expected = {"parameters": WEIGHTS, "buffers": 0, "gradients": WEIGHTS, "optimizer": 2 * WEIGHTS, "average": 0}
    assert numbers == {**expected, "total": 4 * WEIGHTS}
    assert _plan("--optimizer=torch.optim.SGD")["memory"]["numbers"]["optimizer"] == 0
    assert _plan("--trainer.callbacks=[policyfit.EMA]")["memory"]["numbers"]["average"] == WEIGHTS
    assert _plan("--optimizer=torch.optim.Adafactor")["memory"]["chosen"].startswith("at least ")


@pytest.mark.parametrize(
    "make",
    [
        lambda p: optim.Adam(p, amsgrad=True),
        optim.AdamW,
        optim.NAdam,
        optim.RAdam,
        optim.Adamax,
        optim.Adadelta,
        optim.Adagrad,
        optim.ASGD,
        optim.Rprop,
        lambda p: optim.RMSprop(p, momentum=0.9, centered=True),
        optim.RMSprop,
        lambda p: optim.SGD(p, momentum=0.9),
        optim.SGD,
    ],
)
def test_the_estimate_of_an_optimizers_state_is_what_a_step_leaves_there(make: Any) -> None:
    policy = nn.Linear(64, 64)
    optimizer = make(policy.parameters())
    estimate = memory_of(policy, [optimizer], averages=False).optimizer
    policy(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    tensors = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
    assert estimate == sum(t.numel() * t.element_size() for t in tensors if t.numel() > 1)


def test_frozen_weights_have_neither_gradient_nor_state() -> None:
    policy = nn.Sequential(nn.Linear(10, 10), nn.BatchNorm1d(10))
    policy[0].requires_grad_(False)
    memory = memory_of(policy, [optim.AdamW(policy[1].parameters())], averages=True)
    assert (memory.parameters, memory.gradients, memory.optimizer, memory.average) == (520, 80, 160, 80)
    assert memory.buffers == 10 * 4 * 2 + 8


def test_sizes_are_read_in_units() -> None:
    assert [size(count) for count in (144, 1_230_000, 2_500_000_000)] == ["0.144 kB", "1.23 MB", "2.5 GB"]


@pytest.mark.parametrize(
    ("words", "count", "chosen"),
    [
        (["max_steps=10"], 1, "every 1,000 steps and at the end: 1 in all"),
        (["max_steps=2500"], 3, "every 1,000 steps and at the end: 3 in all"),
        (["max_steps=2000"], 2, "every 1,000 steps and at the end: 2 in all"),
        (["max_steps=null"], None, "every 1,000 steps and at the end"),
        (["default_callbacks=false"], None, "none"),
    ],
)
def test_the_checkpoints_to_come_are_counted(words: list[str], count: int | None, chosen: str) -> None:
    line = _plan(*(f"--trainer.{word}" for word in words))["checkpoints"]
    assert (line["chosen"], line.get("numbers", {}).get("count")) == (chosen, count)


def test_a_checkpoint_is_about_as_large_as_the_plan_says() -> None:
    words = ["--policy.width=4000", "--trainer.callbacks=[policyfit.EMA]"]
    line = _plan(*words)["checkpoints"]
    assert policyfit("fit", "run.yaml", *words, "--eval=null", "--trainer.run_dir=out").code == 0
    actual = sum(file.stat().st_size for file in Path("out/checkpoints/000002").rglob("*") if file.is_file())
    assert line["numbers"]["bytes_each"] == pytest.approx(actual, rel=0.15)
    assert line["numbers"]["bytes_each"] < actual


def test_a_saver_of_ones_own_is_told_with_all_that_makes_it_save() -> None:
    settings = "every_steps: 0, every_minutes: 30, monitor: val/loss, keep: null, keep_every: 500"
    line = _plan(f"--trainer.callbacks=[{{class_path: policyfit.Checkpoint, init_args: {{{settings}}}}}]")[
        "checkpoints"
    ]
    assert line["chosen"] == "every 30 minutes and at each new best val/loss and at the end"
    assert line["reason"].endswith("all are kept, and each at a multiple of 500, and the best")


@pytest.mark.parametrize(
    ("words", "exact"),
    [
        ([], True),
        (["--with-data"], True),
        (["--data.train=run_parts.Stream"], None),
        (["--data=null", "--policy=run_parts.Whole"], None),
        (["--data=null", "--policy=run_parts.Whole", "--with-data"], True),
    ],
)
def test_what_is_exact_at_resume_is_said_as_far_as_it_is_known(words: list[str], exact: bool | None) -> None:
    line = _plan(*words)["resume"]
    assert line["numbers"] == {"exact": exact}
    assert line["chosen"].startswith("exact, bit for bit" if exact else "exact but")


def test_counting_without_data_is_refused() -> None:
    Path("run.yaml").write_text(BASE)
    said = policyfit("plan", "run.yaml", "--with-data", "--data=null")
    assert said.code == 2
    assert "There is nothing to train on" in said.err


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD", "RMSprop", "NAdam", "Adafactor"])
def test_the_optimizer_of_a_plan_is_told_as_that_of_the_run(name: str) -> None:
    words = [f"--optimizer=torch.optim.{name}", "--optimizer.lr=0.01", "--eval=null"]
    planned = _plan(*words)["optimizer"]
    assert policyfit("fit", "run.yaml", *words, "--trainer.run_dir=out").code == 0
    assert planned == json.loads(Path("out/plan.json").read_text())["optimizer"]


def test_a_plan_of_the_example_imports_nothing_that_takes_long() -> None:
    example = Path(__file__).parents[2] / "examples/pick_place/RUN.yaml"
    slow = ("torch._dynamo", "jsonargparse", "rich", "accelerate", "gymnasium", "metaworld", "scipy", "pyarrow")
    code = (
        f"import sys; from policyfit.trainer.cli import main; assert main(['plan', {str(example)!r}]) == 0\n"
        f"print(*[name for name in {slow} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == ""
