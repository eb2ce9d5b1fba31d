"""The commands: what they refuse and how, what they run, and how they end."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import policyfit
from policyfit.trainer import strict_yaml
from policyfit.trainer.cli import main

pytest.importorskip("gymnasium")

PARTS = """
import os
import signal

import gymnasium
import numpy as np
import torch
from torch import nn

class Policy(nn.Module):
    def __init__(self, width: int = 4, rate: float = 0.1, mode: str = "plain") -> None:
        super().__init__()
        if width < 1:
            raise ValueError(f"width must be positive, got {width}")
        self.mode = mode
        self.layer = nn.Sequential(nn.Linear(2, width), nn.Linear(width, 1))

    def forward(self, batch):
        if self.mode == "interrupt":
            raise KeyboardInterrupt
        if self.mode == "unplug":
            raise BrokenPipeError("the worker is gone")
        if self.mode == "fail":
            raise RuntimeError("the camera is gone")
        if self.mode == "preempt":
            os.kill(os.getpid(), signal.SIGTERM)
            self.mode = "plain"
        loss = (self.layer(batch) - 1).square().mean()
        return loss * float("nan") if self.mode == "diverge" else loss

    def select_action(self, observation):
        return self.layer(observation.float())

class Data:
    def __init__(self, size: int = 16, offset: float = 0.0) -> None:
        self.size, self.offset = size, offset

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return torch.ones(2) * index / self.size + self.offset

class Mute(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, batch):
        return self.layer(batch).mean()

class Env(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (2,))
    action_space = gymnasium.spaces.Box(-1, 1, (1,))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, dtype=np.float32), {}

    def step(self, action):
        return np.zeros(2, dtype=np.float32), 1.0, True, False, {"is_success": True}

    def close(self):
        print("environment closed")

class BrokenEnv(Env):
    def __init__(self) -> None:
        raise RuntimeError("the simulator is not there")

def no_env():
    return 3

NOT_CALLABLE = 3
"""

RUN = """\
policy: {class_path: cli_parts.Policy, init_args: {width: 4}}
data: {train: cli_parts.Data}
trainer:
  device: cpu
  max_steps: 2
  seed: 3
  run_dir: done
optimizer: {class_path: torch.optim.AdamW, init_args: {lr: 1e-3}}
"""

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parts")
    (folder / "cli_parts.py").write_text(PARTS)
    (folder / "cli_broken_import.py").write_text("import a_package_that_nobody_has\n")
    (folder / "cli_broken_code.py").write_text("x = 1 / 0\n")
    return folder


@pytest.fixture
def cli(parts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    monkeypatch.syspath_prepend(str(parts))

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(arguments)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def _with(old: str, new: str) -> str:
    assert old in RUN
    return RUN.replace(old, new)


IN_THE_FILE: list[tuple[str, str]] = [
    ("", "run.yaml is empty: it holds no value."),
    ("- a\n- b\n", "must hold the sections policy, data, trainer"),
    ("a run\n", "must hold the sections"),
    (_with("  seed: 3", "\tseed: 3"), "run.yaml:6:1: this is not YAML"),
    (_with("  seed: 3", "  seed: 3\n  seed: 4"), "run.yaml:7:3: the key 'seed' is written twice"),
    (RUN + "trainer: {}\n", "run.yaml:9:1: the key 'trainer' is written twice; it first stands at"),
    (_with("max_steps: 2", "max_steps: 010"), "run.yaml:5:14: trainer.max_steps: 010 could be text or"),
    (_with("max_steps: 2", "max_steps: 1_000"), "run.yaml:5:14: trainer.max_steps: 1_000 could be text or"),
    (_with("max_steps: 2", "max_steps: 1:30"), "run.yaml:5:14: trainer.max_steps: 1:30 could be"),
    (_with("run_dir: done", "run_dir: 2024-01-31"), "run.yaml:7:12: trainer.run_dir: 2024-01-31 could be"),
    (_with("trainer:", "trainer: !!map"), "tags (tag:yaml.org,2002:map) are not supported"),
    (_with("  seed: 3", "  <<: {seed: 3}"), "run.yaml:6:3: merge keys (<<) are not supported"),
    (RUN + "---\nseed: 3\n", "run.yaml:10:1: a second document"),
    (_with("trainer:", "trianer:"), "run.yaml:3:1: trianer is not a valid key. Did you mean trainer?"),
    (RUN + "max_steps: 3\n", "run.yaml:9:1: max_steps is not a valid key. Did you mean trainer.max_steps?"),
    (RUN + "lr: 3\n", "run.yaml:9:1: lr is not a valid key."),
    (
        _with("max_steps", "max_step"),
        "run.yaml:5:3: trainer.max_step is not a valid key. Did you mean trainer.max_steps?",
    ),
    (
        _with("seed: 3", "num-epochs: 3"),
        "trainer.num-epochs is not a valid key. Did you mean trainer.max_epochs?",
    ),
    (
        _with("width", "widht"),
        "policy.init_args.widht is not a valid key. Did you mean policy.init_args.width?",
    ),
    (
        _with("lr: 1e-3", "lrr: 1e-3"),
        "run.yaml:8:56: optimizer.init_args.lrr is not a valid key. Did you mean",
    ),
    (
        _with("init_args: {lr", "init_arg: {lr"),
        "optimizer.init_arg is not a valid key. Did you mean optimizer.init_args?",
    ),
    (_with("init_args: {lr: 1e-3}", "lr: 1e-3"), "Arguments of the class go under optimizer.init_args."),
    (
        _with("train: cli", "trian: cli"),
        "run.yaml:2:8: data.trian is not a valid key. Did you mean data.train?",
    ),
    (
        RUN + "eval: {env: cli_parts.Env, episode: 3}\n",
        "eval.episode is not a valid key. Did you mean eval.episodes?",
    ),
    (RUN + "eval: {episodes: 3}\n", "run.yaml:9:1: eval.env is missing"),
    (
        RUN + "eval: {env: cli_parts.Env, episodes: 0}\n",
        "run.yaml:9:28: eval.episodes must be a whole number of at least 1, got 0.",
    ),
    (RUN + "eval: {env: cli_parts.BrokenEnv}\n", "run.yaml:9:8: eval.env: making cli_parts.BrokenEnv failed: Runtime"),
    (RUN + "eval: {env: cli_parts.no_env}\n", "or something that makes one when called, but cli_parts.no_env gave 3"),
    (
        RUN.replace("cli_parts.Policy, init_args: {width: 4}", "cli_parts.Mute") + "eval: {env: cli_parts.Env}\n",
        "run.yaml:9:1: eval needs a policy that can act, but Mute has no select_action.",
    ),
    (
        _with("seed: 3", "grad_scaler: {init_scal: 3}"),
        "trainer.grad_scaler.init_scal is not a valid key. Did you mean",
    ),
    (
        _with("device: cpu", "precision: {class_path: policyfit.FP16, init_args: {grad_scaler: {scale: 3}}}"),
        "run.yaml:4:69: trainer.precision.init_args.grad_scaler.scale is not a valid key.",
    ),
    (
        _with("seed: 3", "callbacks: [{class_path: policyfit.Checkpoint, init_args: {every: 3}}]"),
        "run.yaml:6:62: trainer.callbacks[0].init_args.every is not a valid key. Did you mean",
    ),
    (
        _with("trainer:", "trainer: 3\nother:"),
        "run.yaml:3:1: trainer must be a mapping of keys to values, got 3.",
    ),
    (_with("{train: cli_parts.Data}", "cli_parts.Data"), "data must be a mapping of keys to values"),
    (
        _with("init_args: {width: 4}", "init_args: [4]"),
        "policy.init_args must map argument names to values, got [4].",
    ),
    (
        _with("policy: {class_path: cli_parts.Policy, init_args: {width: 4}}", "schedule:"),
        "The section policy is missing",
    ),
    (
        _with("max_steps: 2", "max_steps: ten"),
        "run.yaml:5:3: trainer.max_steps must be int or null, got 'ten'.",
    ),
    (_with("max_steps: 2", "max_steps: 1.5"), "trainer.max_steps must be int or null, got 1.5."),
    (_with("max_steps: 2", "max_steps: true"), "trainer.max_steps must be int or null, got True."),
    (
        _with("max_steps: 2", "max_steps: -2"),
        "run.yaml:5:3: trainer.max_steps must be a whole number of at least 1",
    ),
    (
        _with("seed: 3", "batch_size: 0"),
        "run.yaml:6:3: trainer.batch_size must be a whole number of at least 1, got 0.",
    ),
    (_with("seed: 3", "tf32: maybe"), "trainer.tf32 must be bool or null, got 'maybe'."),
    (_with("seed: 3", "deterministic: 2"), "trainer.deterministic must be bool, got 2."),
    (_with("device: cpu", "device: 0"), "got 0. Write it in quotes if you mean the text."),
    (_with("device: cpu", "device: gpu"), "run.yaml:4:3: device must be auto, cpu, cuda"),
    (_with("device: cpu", "device: cuda:99"), "run.yaml:4:3: device='cuda:99' was requested"),
    (_with("seed: 3", "precision: half"), "run.yaml:6:3: precision must be"),
    (_with("seed: 3", "precision: fp16"), "run.yaml:6:3: precision='fp16'"),
    (
        _with("seed: 3", "non_finite: skp"),
        "must be 'skip' or 'raise' or 'off', got 'skp'. Did you mean 'skip'?",
    ),
    (_with("seed: 3", "callbacks: {}"), "trainer.callbacks must be a list, got {}."),
    (_with("seed: 3", "callbacks: [ReLU]"), "run.yaml:6:15: trainer.callbacks[0] must name a Callback, got 'ReLU'."),
    (_with("seed: 3", "callbacks: [torch.nn.ReLU]"), "trainer.callbacks[0] must be a Callback, but torch.nn"),
    (
        _with("seed: 3", "callbacks: [{class_path: torch.nn.ReLU}]"),
        "trainer.callbacks[0] must be a Callback, but torch.nn.modules.activation.ReLU is not one.",
    ),
    (_with("width: 4", "width: wide"), "run.yaml:1:52: policy.init_args.width must be int, got 'wide'."),
    (_with("lr: 1e-3", "lr: fast"), "optimizer.init_args.lr must be float or Tensor, got 'fast'."),
    (_with("lr: 1e-3", "betas: [0.9]"), "optimizer.init_args.betas must be tuple["),
    (
        RUN + "schedule: {class_path: torch.optim.lr_scheduler.StepLR}\n",
        "schedule.init_args.step_size is missing",
    ),
    (
        RUN + "schedule: {class_path: torch.optim.lr_scheduler.StepLR, init_args: {step_size: }}\n",
        "step_size is empty",
    ),
    (
        _with("cli_parts.Policy", "cli_part.Policy"),
        "run.yaml:1:10: policy.class_path: there is no module cli_part,",
    ),
    (
        _with("cli_parts.Policy", "cli_parts.Polcy"),
        "policy.class_path: cli_parts holds no Polcy. Did you mean Policy?",
    ),
    (_with("cli_parts.Policy", "Policy"), "policy.class_path must be written module.Class"),
    (
        _with("cli_parts.Policy", "3"),
        "policy.class_path must be written module.Class, as torch.optim.AdamW is, got 3.",
    ),
    (_with("cli_parts.Policy", "cli_parts.NOT_CALLABLE"), "is neither a class nor a function, but 3."),
    (
        _with("cli_parts.Policy", "cli_broken_import.Policy"),
        "importing cli_broken_import failed: ModuleNotFoundError",
    ),
    (
        _with("cli_parts.Policy", "cli_broken_code.Policy"),
        "importing cli_broken_code failed: ZeroDivisionError",
    ),
    (
        _with("cli_parts.Policy", "cli_parts.Data"),
        "policy must be a torch.nn.Module, but cli_parts.Data is not one.",
    ),
    (
        _with("train: cli_parts.Data", "train: cli_parts.Policy"),
        "data.train must be data with __getitem__ or __iter__",
    ),
    (
        _with("torch.optim.AdamW", "torch.nn.Linear"),
        "run.yaml:8:13: optimizer must be a torch.optim.Optimizer, but",
    ),
    (RUN + "schedule: torch.optim.SGD\n", "schedule must be a torch.optim.lr_scheduler.LRScheduler, but"),
    (RUN + "eval: {env: cli_parts.Data}\n", "eval.env must be a gymnasium environment"),
    (
        _with("policy: {class_path: cli_parts.Policy, ", "policy: {"),
        "run.yaml:1:1: policy must name a torch.nn.Module, got",
    ),
    (
        _with("width: 4", "width: 0"),
        "policy: making cli_parts.Policy failed: ValueError: width must be positive, got 0",
    ),
    (_with("data: {train: cli_parts.Data}\n", ""), "There is nothing to train on"),
    (RUN + "code: here\n", "run.yaml:9:1: code must be a list of folders, got 'here'."),
]

ON_THE_COMMAND_LINE: list[tuple[list[str], str]] = [
    (
        ["--trainer.max_step=3"],
        "command line: trainer.max_step is not a valid key. Did you mean trainer.max_steps?",
    ),
    (["--trainer.max_steps=ten"], "command line: trainer.max_steps must be int or null, got 'ten'."),
    (["--trainer.max_steps", "ten"], "trainer.max_steps must be int or null, got 'ten'."),
    (["--trainer.max_steps"], "--trainer.max_steps needs a value: --trainer.max_steps=VALUE."),
    (["--trainer.max_steps", "--debg"], "--trainer.max_steps needs a value"),
    (["--trainer.max_steps=010"], "--trainer.max_steps=010: 010 could be text or"),
    (["--trainer.callbacks=[1"], "this is not YAML"),
    (["--max_steps=3"], "command line: max_steps is not a valid key. Did you mean trainer.max_steps?"),
    (["--dev=cpu"], "command line: dev is not a valid key. Did you mean trainer.device?"),
    (["--prec=no"], "command line: prec is not a valid key. Did you mean trainer.precision?"),
    (["--resum"], "--resum is not an option. Did you mean --resume?"),
    (["--resum=runs/x"], "--resum is not an option. Did you mean --resume?"),
    (["--resume="], "--resume= is empty. Give a value, or leave --resume out."),
    (["--precision="], "--precision= is empty. Give a value, or write null for nothing."),
    (["--precision", ""], "--precision= is empty."),
    (["--"], "-- names no option."),
    (["--json"], "--json is an option of plan."),
    (["--lr=3"], "command line: lr is not a valid key. Did you mean optimizer.lr?"),
    (["--episodes=3"], "command line: episodes is not a valid key. Did you mean eval.episodes?"),
    (["--policy.width=0"], "command line: policy: making cli_parts.Policy failed: ValueError: width must be positive"),
    (["--debugg"], "--debugg is not an option. Did you mean --debug?"),
    (
        ["--optimizer.lrr=3"],
        "optimizer.init_args.lrr is not a valid key. Did you mean optimizer.init_args.lr?",
    ),
    (["--optimizer.lr=fast"], "optimizer.init_args.lr must be float or Tensor, got 'fast'."),
    (["--policy.init_args.width.x=3"], "policy.init_args.width is 4, so --policy.init_args.width.x cannot"),
    (["--precision=fp16"], "command line: precision='fp16'"),
    (["--device=tpu"], "command line: device must be auto, cpu, cuda"),
    (["--device=tpu"], "This machine has "),
    (["--precision=16"], "Use precision='fp16'."),
    (["--tf32=maybe"], "command line: trainer.tf32 must be bool or null, got 'maybe'."),
    (["--schedule.lr=3"], "schedule must name a torch.optim.lr_scheduler.LRScheduler, got"),
    (["--trainer.=3"], "trainer. is not a valid key."),
    (["--eval.episodes=3"], "eval.env is missing"),
    (["other.yaml"], "other.yaml does not exist"),
    (["-x"], "unrecognized arguments: -x"),
]


def _prose(box: str) -> str:
    """What stands in the box of an error, its lines joined."""
    return " ".join(line.strip("│ ") for line in box.splitlines())


def _assert_refused(code: int, out: str, err: str, fragment: str) -> None:
    assert code == 2
    assert fragment in _prose(err)
    assert "Traceback" not in err
    assert out in ("", "environment closed\n")
    assert not Path("done").exists()
    assert not Path("runs").exists()


@pytest.mark.parametrize(("text", "fragment"), IN_THE_FILE, ids=[fragment[-40:] for _, fragment in IN_THE_FILE])
def test_a_file_that_cannot_be_meant_is_refused_before_anything_starts(cli: Cli, text: str, fragment: str) -> None:
    Path("run.yaml").write_text(text)
    _assert_refused(*cli("fit", "run.yaml"), fragment)


@pytest.mark.parametrize(("words", "fragment"), ON_THE_COMMAND_LINE, ids=[w[-1] for w, _ in ON_THE_COMMAND_LINE])
def test_a_command_line_that_cannot_be_meant_is_refused(cli: Cli, words: list[str], fragment: str) -> None:
    Path("run.yaml").write_text(RUN)
    _assert_refused(*cli("fit", "run.yaml", *words), fragment)


@pytest.mark.parametrize(
    ("words", "fragment"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["fti"], "invalid choice: 'fti'"),
        (["fit"], "fit needs a run file"),
        (["fit", "missing.yaml"], "missing.yaml does not exist"),
        (["fit", "."], "is a folder, but a YAML file was expected"),
        (["fit", "--resume"], "no run under runs/ has a checkpoint"),
        (["fit", "--resume=gone"], "gone does not exist, so there is no config.yaml"),
        (["plan"], "the following arguments are required: RUN.yaml"),
        (["eval"], "the following arguments are required: CHECKPOINT"),
        (["eval", "gone"], "gone does not exist, so there is no config.yaml"),
        (["eval", "."], "is no run's folder"),
        (["eval", "gone", "--dev=cpu"], "--dev is not an option. Did you mean --device?"),
        (
            ["eval", "gone", "--trainer.seed=3"],
            "--trainer.seed is not an option. Valid here: --help, --debug, --device, --precision",
        ),
        (["eval", "gone", "--weight=ema"], "--weight is not an option. Did you mean --weights?"),
        (["validate"], "the following arguments are required: CHECKPOINT"),
        (["validate", "gone", "--episodes=3"], "--episodes is an option of eval."),
        (["validate", "gone", "--width=3"], "--width is not an option. Valid here: --help, --debug, --device"),
        (["plan", "run.yaml", "--resume"], "--resume is an option of fit."),
        (["eval", "gone", "--audit"], "--audit is an option of fit."),
        (["eval", "gone", "--episodes="], "--episodes= is empty. Give a value, or leave --episodes out."),
        (["checkpoints"], "the following arguments are required: RUN_DIR"),
        (["doctor", "me"], "unrecognized arguments: me"),
    ],
)
def test_a_command_that_cannot_be_meant_is_refused(cli: Cli, words: list[str], fragment: str) -> None:
    _assert_refused(*cli(*words), fragment)


def _config(folder: str) -> Any:
    return strict_yaml.read_file(Path(folder) / "config.yaml").value


def test_fit_trains_as_the_file_says_and_writes_what_it_resolved(cli: Cli) -> None:
    Path("run.yaml").write_text(RUN)
    code, _, _ = cli("fit", "run.yaml", "--trainer.max_steps", "3", "--optimizer.lr=3e-4")
    assert code == 0
    config = _config("done")
    assert config["trainer"]["max_steps"] == 3
    assert config["trainer"]["precision"] == "no"
    assert config["optimizer"] == {"class_path": "torch.optim.AdamW", "init_args": {"lr": 3e-4}}
    assert [p.name for p in Path("done/checkpoints").iterdir() if not p.is_symlink()] == ["000003"]


def test_the_resolved_run_fed_back_gives_the_same_weights(cli: Cli) -> None:
    Path("run.yaml").write_text(RUN)
    assert cli("fit", "run.yaml")[0] == 0
    assert cli("fit", "done/config.yaml", "--trainer.run_dir=again")[0] == 0
    assert _config("again") == {**_config("done"), "trainer": _config("again")["trainer"]}
    first, second = (policyfit.load(f"{folder}/checkpoints/last", device="cpu") for folder in ("done", "again"))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_arguments_of_policy_and_data_that_changed_are_told_when_a_run_goes_on(cli: Cli) -> None:
    Path("run.yaml").write_text(RUN)
    assert cli("fit", "run.yaml", "--data.train.init_args.offset=1.5", "--trainer.max_steps=1")[0] == 0
    code, out, _ = cli("fit", "--resume=done", "--trainer.max_steps=3", "--data.train.init_args.offset=0.5")
    assert code == 0
    assert "data.train.init_args.offset was 1.5 and is now 0.5" in " ".join(out.split())
    assert "init_args" not in cli("fit", "--resume=done", "--trainer.max_steps=4")[1]
    out = cli("fit", "--resume=done", "--trainer.max_steps=5", "--policy.init_args.rate=0.2")[1]
    assert "policy.init_args.rate was not written and is now 0.2" in " ".join(out.split())


def test_a_run_goes_on_from_its_folder_alone(cli: Cli) -> None:
    Path("run.yaml").write_text(RUN)
    assert cli("fit", "run.yaml")[0] == 0
    assert cli("fit", "--resume=done", "--trainer.max_steps=4")[0] == 0
    assert cli("fit", "run.yaml", "--resume", "--trainer.max_steps=5")[0] == 0
    assert sorted(p.name for p in Path("done/checkpoints").iterdir() if not p.is_symlink())[-2:] == [
        "000004",
        "000005",
    ]


@pytest.mark.parametrize("move", [shutil.copytree, shutil.move])
@pytest.mark.parametrize("resume", ["--resume=runs/moved", "--resume=runs/moved/checkpoints/000002", "--resume"])
def test_a_run_that_was_moved_or_copied_goes_on_where_it_is(cli: Cli, move: Any, resume: str) -> None:
    Path("run.yaml").write_text(RUN)
    assert cli("fit", "run.yaml")[0] == 0
    Path("runs").mkdir()
    move("done", "runs/moved")
    code, _, err = cli("fit", resume, "--trainer.max_steps=3")
    assert code == 0
    assert "moved/config.yaml says run_dir: done, but the run is in " in err
    assert Path("runs/moved/checkpoints/000003").is_dir()
    assert not Path("done/checkpoints/000003").exists()
    assert Path("done").exists() == (move is shutil.copytree)
    code, _, err = cli("fit", resume, "--trainer.max_steps=4")  # its config.yaml names the new place by now
    assert (code, err) == (0, "")


def test_a_folder_that_is_named_is_that_of_a_moved_run(cli: Cli) -> None:
    Path("run.yaml").write_text(RUN)
    assert cli("fit", "run.yaml")[0] == 0
    Path("done").rename("moved")
    code, _, err = cli("fit", "--resume=moved", "--trainer.max_steps=3", "--trainer.run_dir=branch")
    assert (code, err) == (0, "")
    assert Path("branch/checkpoints/000003").is_dir()
    assert not Path("moved/checkpoints/000003").exists()


def test_a_run_that_outlasts_its_curve_is_told_so_and_the_remedy_works(cli: Cli) -> None:
    Path("run.yaml").write_text(RUN.replace("1e-3", "0.5") + "schedule: {class_path: policyfit.WarmupCosine}\n")
    assert "WarmupCosine is at its end" not in cli("plan", "run.yaml", "--trainer.max_steps=4")[1]
    assert cli("fit", "run.yaml", "--trainer.max_steps=4")[0] == 0
    more = ["--resume=done", "--trainer.max_steps=8", "--trainer.log_every=1"]
    note = (
        "WarmupCosine is at its end at step 4 of 8: from step 5 on the learning rate stays at 0. For a curve as long "
        "as the run give it total_steps=8, in a run file as schedule.init_args.total_steps; at a resume also "
        "changes='schedule', on the command line --changes=schedule --schedule.total_steps=8"
    )
    shutil.copytree("done", "flat")
    assert f"note: {note}\n" in cli("plan", "done/config.yaml", "--trainer.max_steps=8")[1]
    assert cli("fit", "--resume=flat", *more[1:])[0] == 0
    assert note in json.loads(Path("flat/plan.json").read_text())["notes"]
    assert _rates("flat") == [0.0, 0.0, 0.0, 0.0]
    assert cli("fit", *more, "--changes=schedule", "--schedule.total_steps=8")[0] == 0
    assert "is at its end" not in Path("done/plan.json").read_text()
    assert _rates("done") == pytest.approx([0.25 * (1 + math.cos(math.pi * step / 8)) for step in (4, 5, 6, 7)])


def _rates(run: str) -> list[float]:
    records = [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]
    return [record["lr"] for record in records if "lr" in record and record["step"] > 4]


def test_fit_evaluates_in_the_environment_of_its_file(cli: Cli) -> None:
    Path("run.yaml").write_text(RUN + "eval: {env: cli_parts.Env, episodes: 3, seed: 5}\n")
    code, out, _ = cli("fit", "run.yaml")
    assert code == 0
    assert "success 3/3 = 100.0 %" in out
    report = json.loads(Path("done/eval.json").read_text())
    assert (report["episodes"], report["successes"], report["seeds"]) == (3, 3, [5, 6, 7])


def test_the_environment_is_closed_once_when_it_was_used_and_when_the_fit_failed(cli: Cli) -> None:
    Path("run.yaml").write_text(RUN + "eval: {env: cli_parts.Env, episodes: 1}\n")
    code, out, _ = cli("fit", "run.yaml", "--policy.mode=fail", "--trainer.run_dir=failed")
    assert (code, out.count("environment closed")) == (1, 1)
    code, out, _ = cli("fit", "run.yaml")
    assert (code, out.count("environment closed")) == (0, 1)


def test_fp16_on_a_cpu_comes_with_a_form_that_works_on_the_command_line_and_in_a_file(cli: Cli) -> None:
    Path("run.yaml").write_text(RUN)
    code, _, err = cli("fit", "run.yaml", "--precision=fp16")
    form = "{class_path: policyfit.FP16, init_args: {allow_cpu: true}}"
    assert code == 2
    assert any(f"--precision='{form}'" in line for line in err.splitlines())  # whole, to be copied
    assert cli("fit", "run.yaml", f"--precision={form}")[0] == 0
    Path("run.yaml").write_text(_with("seed: 3", f"precision: {form}").replace("done", "again"))
    assert cli("fit", "run.yaml")[0] == 0
    assert "precision fp16" in cli("plan", "again/config.yaml")[1].replace("     ", " ")


def test_an_error_in_a_log_is_wrapped_and_its_paths_stay_whole(cli: Cli) -> None:
    path = f"{'folder/' * 20}run.yaml"
    _, _, err = cli("fit", path)
    assert any(path in line for line in err.splitlines())
    Path("run.yaml").write_text(RUN)
    _, _, err = cli("fit", "run.yaml", "--precision=fp16")
    assert max(len(line) for line in err.splitlines()) <= 120


def test_eval_acts_in_an_environment_that_only_the_command_line_names(cli: Cli) -> None:
    Path("run.yaml").write_text(RUN)
    assert cli("fit", "run.yaml")[0] == 0
    code, _, err = cli("eval", "done")
    assert code == 2
    assert "eval.env is missing" in err
    assert "--env=module.Class" in err
    code, out, _ = cli("eval", "done", "--env=cli_parts.Env", "--episodes=2")
    assert code == 0
    assert "success 2/2" in out


def test_eval_says_first_what_acts_and_where(cli: Cli) -> None:
    ema = "--trainer.callbacks=[{class_path: policyfit.EMA, init_args: {decay: 0.5}}]"
    Path("run.yaml").write_text(RUN + "eval: {env: cli_parts.Env, episodes: 2}\n")
    assert cli("fit", "run.yaml", ema)[0] == 0
    first, *_ = cli("eval", "done", "--precision=bf16", "--weights=ema")[1].splitlines()
    assert first == "checkpoint done/checkpoints/000002  step 2  weights ema  device cpu  precision bf16"


@pytest.mark.parametrize("place", ["done", "done/checkpoints/last", "done/checkpoints/000002"])
def test_eval_takes_its_defaults_from_the_run_and_the_command_line_wins(cli: Cli, place: str) -> None:
    Path("run.yaml").write_text(RUN + "eval: {env: cli_parts.Env, episodes: 3}\n")
    assert cli("fit", "run.yaml")[0] == 0
    assert "success 3/3" in cli("eval", place)[1]
    assert "success 2/2" in cli("eval", place, "--episodes=2", "--seed", "7", "--precision=bf16")[1]
    code, _, err = cli("eval", place, "--device=cuda:99")
    assert code == 2
    assert "device='cuda:99' was requested" in err
    code, _, err = cli("eval", place, "--episodes=0")
    assert code == 2
    assert "episodes must be a whole number of at least 1, got 0" in err


def test_eval_acts_under_the_tf32_and_with_the_weights_that_are_asked_for(cli: Cli) -> None:
    ema = "--trainer.callbacks=[{class_path: policyfit.EMA, init_args: {decay: 0.5}}]"
    Path("run.yaml").write_text(RUN + "eval: {env: cli_parts.Env, episodes: 2}\n")
    assert cli("fit", "run.yaml", ema)[0] == 0
    assert "success 2/2" in cli("eval", "done", "--weights=ema", "--tf32=no")[1]
    code, _, err = cli("eval", "done", "--weights=mean")
    assert code == 2
    assert "has no weights 'mean', but ema and raw" in err
    code, _, err = cli("eval", "done", "--tf32=maybe")
    assert code == 2
    assert "command line: trainer.tf32 must be bool or null, got 'maybe'." in err


def test_validate_prints_the_metrics_of_the_run_s_own_data_and_the_command_line_wins(cli: Cli) -> None:
    Path("run.yaml").write_text(_with("{train: cli_parts.Data}", "{train: cli_parts.Data, val: cli_parts.Data}"))
    assert cli("fit", "run.yaml")[0] == 0
    policy = policyfit.load("done", device="cpu")
    with torch.no_grad():
        expected = float(policy(torch.stack([torch.ones(2) * i / 16 for i in range(16)])))
    code, out, err = cli("validate", "done/checkpoints/last")
    assert (code, err) == (0, "")
    what, metric = out.splitlines()
    assert what == "checkpoint done/checkpoints/000002  step 2  weights raw  device cpu  precision no"
    name, value = metric.split()
    assert name == "val/loss"
    assert float(value) == pytest.approx(expected, rel=1e-5)
    what, metric = cli("validate", "done", "--precision=bf16")[1].splitlines()
    assert what.endswith("device cpu  precision bf16")
    in_bf16 = float(metric.split()[1])
    assert in_bf16 == pytest.approx(expected, rel=2e-2)
    assert in_bf16 != float(value)
    code, _, err = cli("validate", "done", "--device=cuda:99")
    assert code == 2
    assert "device='cuda:99' was requested" in err


def test_validate_without_validation_data_says_so(cli: Cli) -> None:
    Path("run.yaml").write_text(RUN)
    assert cli("fit", "run.yaml")[0] == 0
    code, _, err = cli("validate", "done")
    assert code == 2
    assert "nothing to validate on" in err


def test_checkpoints_lists_them_with_their_metrics_and_tells_the_damaged_by_its_exit_code(cli: Cli) -> None:
    callback = "callbacks: [{class_path: policyfit.Checkpoint, init_args: {every_steps: 1}}]"
    Path("run.yaml").write_text(_with("seed: 3", f"log_every: 1\n  {callback}"))
    assert cli("fit", "run.yaml")[0] == 0
    code, out, err = cli("checkpoints", "done")
    assert (code, err) == (0, "")
    first, second = out.splitlines()
    assert first.startswith("000001  2")
    assert "MB  train/loss " in first
    assert not first.endswith("last")
    assert second.startswith("000002  2")
    assert second.endswith("<- last")
    weights = Path("done/checkpoints/000001/pretrained_model/model.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    code, out, err = cli("checkpoints", "done")
    assert code == 1
    assert "1 of 2 checkpoints are damaged: 000001." in err
    assert "000001  damaged: " in out
    assert "pretrained_model/model.safetensors is damaged: its contents are not those that were written" in out
    assert out.splitlines()[1] == second
    code, _, err = cli("checkpoints", "gone")
    assert code == 2
    assert "There is no checkpoint in gone." in err


@pytest.mark.parametrize(
    ("mode", "code", "message"),
    [
        ("interrupt", 130, "Interrupted."),
        ("fail", 1, "RuntimeError: the camera is gone"),
        ("diverge", 1, "TrainingDiverged"),
    ],
)
def test_a_run_that_ends_early_says_why_and_how_by_its_exit_code(cli: Cli, mode: str, code: int, message: str) -> None:
    Path("run.yaml").write_text(RUN)
    found, _, err = cli("fit", "run.yaml", f"--policy.mode={mode}", "--trainer.max_skips=2")
    assert found == code
    assert message in err
    assert "Traceback" not in err
    assert ("Run again with --debug" in err) == (mode == "fail")


def test_a_run_that_is_preempted_saves_and_ends_with_143(cli: Cli) -> None:
    Path("run.yaml").write_text(RUN)
    code, _, err = cli("fit", "run.yaml", "--policy.mode=preempt", "--trainer.max_steps=1000")
    assert code == 143
    assert "Traceback" not in err
    assert cli("checkpoints", "done")[0] == 0


@pytest.mark.parametrize("words", [["--policy.mode=fail"], ["--trainer.max_step=3"]])
def test_debug_shows_the_traceback(cli: Cli, words: list[str]) -> None:
    Path("run.yaml").write_text(RUN)
    _, _, err = cli("fit", "run.yaml", "--debug", *words)
    assert "Traceback (most recent call last)" in err
    assert "Run again with --debug" not in err


def test_plan_says_what_would_run_and_writes_nothing(cli: Cli) -> None:
    Path("run.yaml").write_text(RUN + "eval: {env: cli_parts.Env}\n")
    code, out, _ = cli("plan", "run.yaml", "--precision=bf16")
    assert code == 0
    assert "bf16" in out
    code, out, _ = cli("plan", "run.yaml", "--json")
    assert code == 0
    assert json.loads(out)["device"]["chosen"] == "cpu"
    assert [p.name for p in Path().iterdir()] == ["run.yaml"]


def test_plan_says_how_long_in_what_pieces_and_what_comes_beside(cli: Cli) -> None:
    Path("run.yaml").write_text(RUN)
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in cli("plan", "run.yaml")[1].splitlines()}
    assert rows["length"] == "2 steps"
    assert rows["batch"].startswith("8 samples an update: 1 micro-batch of 8 on 1 process —")
    assert rows["clip"] == "none"
    assert rows["validation"].startswith("none")
    assert rows["eval"].startswith("none")
    assert rows["optimizer"].endswith("lr 0.001, weight decay 0.01")
    words = ["max_epochs=3", "clip_norm=0.5", "clip_value=2", "val_every=10", "accumulate=4"]
    more = ["--data.val=cli_parts.Data", "--eval.env=cli_parts.BrokenEnv", "--eval.episodes=7", "--optimizer.lr=3e-4"]
    out = cli("plan", "run.yaml", *(f"--trainer.{word}" for word in words), *more)[1]
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in out.splitlines()}
    assert rows["length"] == "2 steps or 3 epochs"
    assert rows["batch"].startswith("32 samples an update: 4 micro-batches of 8 on 1 process —")
    assert rows["clip"] == "norm 0.5, value 2"
    assert rows["validation"] == "every 10 steps and at the end"
    assert rows["eval"] == "7 episodes of cli_parts.BrokenEnv, seeds from 10000 on"
    assert "lr 0.0003," in rows["optimizer"]


def test_doctor_and_help_and_version_print_and_succeed(cli: Cli) -> None:
    assert cli("--version") == (0, f"policyfit {policyfit.__version__}\n", "")
    assert "torch" in cli("doctor")[1]
    for words in (
        ["--help"],
        *([name, "--help"] for name in ("fit", "plan", "validate", "eval", "checkpoints", "doctor")),
    ):
        code, out, err = cli(*words)
        assert (code, err) == (0, "")
        assert "usage: policyfit" in out
    assert "examples:" in cli("--help")[1]


def test_the_module_is_the_command_and_loads_little_for_its_version() -> None:
    watch = (
        "import runpy, sys; sys.argv = ['policyfit', '--version']\n"
        "try: runpy.run_module('policyfit', run_name='__main__')\n"
        "finally: print(sorted({'rich', 'yaml', 'jsonargparse', 'gymnasium', 'accelerate'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", watch], capture_output=True, text=True, check=True)
    assert done.stdout == f"policyfit {policyfit.__version__}\n[]\n"


@pytest.mark.parametrize(
    "words",
    [
        ["schema"],
        ["completion", "bash"],
        ["plan", "run.yaml"],
        ["plan", "run.yaml", "--json"],
        ["fit", "run.yaml", "--print_config"],
        ["doctor"],
        ["fit", "run.yaml"],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("buffered", [True, False])
def test_a_reader_that_has_enough_ends_a_command_without_a_word(
    parts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], buffered: bool
) -> None:
    monkeypatch.syspath_prepend(str(parts))
    Path("run.yaml").write_text(RUN)
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", buffering=-1 if buffered else 1) as output:  # noqa: PTH123 - a descriptor
        monkeypatch.setattr(sys, "stdout", output)
        assert main(words) == 1
        print("as Python does when it ends", file=output, flush=True)
    assert capsys.readouterr().err == ""


def test_a_broken_pipe_of_the_run_itself_is_told(cli: Cli) -> None:
    Path("run.yaml").write_text(RUN)
    code, _, err = cli("fit", "run.yaml", "--policy.mode=unplug")
    assert code == 1
    assert "BrokenPipeError: the worker is gone" in err
