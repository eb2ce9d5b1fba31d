"""Words of LeRobot and Lightning in run files and on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from run_parts import policyfit

from policyfit import Trainer, load
from policyfit.strategies.errors import ConfigError
from policyfit.trainer import strict_yaml
from policyfit.trainer.aliases import REFUSED, TAKEN
from policyfit.trainer.config import read_run
from policyfit.trainer.hints import parameters

PARTS = "policy: {class_path: run_parts.Policy}\ndata: {train: run_parts.Data}\n"

#: A run as somebody who knows another tool would guess it, the words after the file, and the same run in our words.
RUNS: list[tuple[str, list[str], str]] = [
    (
        PARTS + "steps: 3\nbatch_size: 4\nseed: 1000\noutput_dir: out\ntf32: true\n",
        ["--policy.device=cpu"],
        "trainer: {device: cpu, max_steps: 3, batch_size: 4, seed: 1000, tf32: true}",
    ),
    (
        PARTS.replace("Policy}", "Policy, device: cpu}")
        + "steps: 4\nseed: 1\naccelerator:\n  mixed_precision: bf16\n  gradient_accumulation: {steps: 2}\n",
        ["--output_dir=out"],
        "trainer: {device: cpu, max_steps: 2, accumulate: 2, seed: 1, precision: bf16}",
    ),
    (
        PARTS + "seed: 1\n",
        ["--policy.device=cpu", "--steps=2", "--batch_size=8", "--num_workers=0", "--log_freq=1", "--output_dir=out"],
        "trainer: {device: cpu, max_steps: 2, batch_size: 8, workers: 0, log_every: 1, seed: 1}",
    ),
    (
        PARTS + "optimizer: {class_path: torch.optim.Adam, init_args: {lr: 1e-4}, grad_clip_norm: 10}\nseed: 5\n",
        ["--steps=2", "--policy.device=cpu", "--accelerator.mixed_precision=no", "--output_dir=out"],
        "trainer: {device: cpu, max_steps: 2, clip_norm: 10, seed: 5}\n"
        "optimizer: {class_path: torch.optim.Adam, init_args: {lr: 1e-4}}",
    ),
    (
        PARTS + "save_checkpoint: true\nresume: false\nwandb: {enable: false}\nsteps: 2\nseed: 2\n",
        ["--policy.device=cpu", "--output_dir=out"],
        "trainer: {device: cpu, max_steps: 2, seed: 2}",
    ),
    (
        PARTS + "trainer: {accelerator: cpu, devices: 1, max_steps: 2, precision: bf16-mixed}\nseed_everything: 42\n",
        ["--trainer.run_dir=out"],
        "trainer: {device: cpu, max_steps: 2, precision: bf16, seed: 42}",
    ),
    (
        "model: {class_path: run_parts.Policy, init_args: {width: 7}}\ndata: {train: run_parts.Data}\n"
        "trainer:\n  accelerator: cpu\n  strategy: auto\n  devices: auto\n  num_nodes: 1\n  precision: 32-true\n"
        "  max_epochs: 1\n  accumulate_grad_batches: 2\n  gradient_clip_val: 0.5\n  gradient_clip_algorithm: norm\n"
        "  log_every_n_steps: 1\n  fast_dev_run: false\n  logger: null\nseed_everything: 7\nckpt_path: null\n",
        ["--trainer.run_dir=out"],
        "policy: {class_path: run_parts.Policy, init_args: {width: 7}}\n"
        "trainer: {device: cpu, max_epochs: 1, accumulate: 2, clip_norm: 0.5, log_every: 1, seed: 7}",
    ),
    (
        "model: run_parts.Whole\ntrainer: {max_steps: 3}\n",
        ["--trainer.accelerator=cpu", "--model.width=6", "--seed_everything=1", "--trainer.run_dir=out"],
        "policy: {class_path: run_parts.Whole, init_args: {width: 6}}\ndata: null\n"
        "trainer: {device: cpu, max_steps: 3, seed: 1}",
    ),
    (
        PARTS
        + "trainer: {accelerator: cpu, max_steps: 2, callbacks: [{class_path: policyfit.EMA}]}\nseed_everything: 1\n",
        ["--trainer.callbacks+=policyfit.PrecisionAudit", "--trainer.run_dir=out"],
        "trainer: {device: cpu, max_steps: 2, seed: 1, callbacks: [policyfit.EMA, policyfit.PrecisionAudit]}",
    ),
    (
        PARTS + "trainer: {max_steps: 2, default_root_dir: null, enable_progress_bar: true}\nseed_everything: 1\n",
        [
            "--trainer.accelerator=cpu",
            "--trainer.precision=16-mixed",
            "--trainer.precision=no",
            "--trainer.run_dir=out",
        ],
        "trainer: {device: cpu, max_steps: 2, seed: 1}",
    ),
]


def _config(folder: str) -> dict[str, Any]:
    values: dict[str, Any] = strict_yaml.read_file(Path(folder) / "config.yaml").value
    del values["trainer"]["run_dir"], values["code"]
    return values


@pytest.mark.parametrize(("theirs", "words", "ours"), RUNS, ids=range(len(RUNS)))
def test_a_run_as_another_tool_writes_it_starts_and_means_the_same(theirs: str, words: list[str], ours: str) -> None:
    Path("theirs.yaml").write_text(theirs)
    Path("parts.yaml").write_text(PARTS)
    Path("ours.yaml").write_text(ours + "\n")
    said = policyfit("fit", "theirs.yaml", *words)
    assert said.code == 0
    assert "note: " in said.err
    assert policyfit("fit", "parts.yaml", "ours.yaml", "--trainer.run_dir=same").code == 0
    assert _config("out") == _config("same")
    first, second = load("out", device="cpu"), load("same", device="cpu")
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def _notices(text: str, *overrides: tuple[str, str]) -> list[str]:
    Path("run.yaml").write_text(text)
    return [notice.text for notice in read_run(["run.yaml"], overrides).notices]


def test_every_word_that_is_taken_is_said_in_one_line_with_its_place() -> None:
    assert _notices("seed: 3\naccelerator:\n  mixed_precision: no\n", ("steps", "4"), ("precision", "bf16-mixed")) == [
        "run.yaml:1:1: seed is LeRobot's word for trainer.seed",
        "run.yaml:3:3: accelerator.mixed_precision is LeRobot's word for trainer.precision",
        "command line: steps is LeRobot's word for trainer.max_steps",
        "command line: bf16-mixed is Lightning's word for trainer.precision: bf16",
    ]


def test_a_word_that_is_written_for_several_keys_is_said_once() -> None:
    Path("run.yaml").write_text(PARTS)
    words = ["--accelerator.grad_scaler.init_scale=64", "--accelerator.grad_scaler.growth_interval=5"]
    said = policyfit("plan", "run.yaml", "--accelerator.mixed_precision=fp16", *words, "--print_config")
    assert said.err.count("accelerator.grad_scaler is LeRobot's word for trainer.grad_scaler") == 1


def test_one_process_of_several_says_it(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("run.yaml").write_text(PARTS + "seed: 3\n")
    assert "seed is LeRobot's word" in policyfit("plan", "run.yaml", "--print_config").err
    monkeypatch.setenv("RANK", "1")
    assert policyfit("plan", "run.yaml", "--print_config").err == ""


def test_a_run_in_our_own_words_says_nothing() -> None:
    assert _notices("trainer: {device: cpu, precision: no, tf32: true}\n", ("device", "cpu"), ("tf32", "no")) == []


@pytest.mark.parametrize(
    ("text", "overrides", "steps"),
    [
        ("steps: 12\ntrainer: {accumulate: 3}\n", [], 4),
        ("steps: 12\n", [("trainer.accumulate", "4")], 3),
        ("steps: 12\ntrainer: {accumulate: 3}\n", [("trainer.max_steps", "12")], 12),
        ("trainer: {max_steps: 5, accumulate: 3}\n", [("steps", "12")], 4),
        ("steps: null\n", [], None),
    ],
)
def test_steps_are_micro_batches_and_divided_by_the_window_of_all_layers(
    text: str, overrides: list[tuple[str, str]], steps: int | None
) -> None:
    Path("run.yaml").write_text(text)
    assert read_run(["run.yaml"], overrides).values["trainer"]["max_steps"] == steps


def test_steps_that_make_no_whole_number_of_updates_are_refused() -> None:
    Path("run.yaml").write_text("steps: 10\ntrainer: {accumulate: 3}\n")
    with pytest.raises(
        ConfigError, match=r"run\.yaml:1:1: 10 micro-batches make no whole .* at 3\.\nWrite trainer\.max"
    ):
        read_run(["run.yaml"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("steps: 3\ntrainer: {max_steps: 3}\n", "run.yaml:1:1: steps means trainer.max_steps, which is given too."),
        ("seed: 3\nseed_everything: 3\n", "run.yaml:2:1: seed_everything and seed both mean trainer.seed."),
        ("trainer: {accelerator: cpu, device: cpu}\n", "run.yaml:1:11: trainer.accelerator means trainer.device"),
        ("model: a.B\npolicy: a.B\n", "run.yaml:1:1: model means policy, which is given too."),
        (
            "accelerator: {grad_scaler: {init_scale: 3}}\ntrainer: {grad_scaler: {growth_factor: 3}}\n",
            "run.yaml:1:15: accelerator.grad_scaler means trainer.grad_scaler, which is given too.",
        ),
    ],
)
def test_a_word_beside_its_key_in_one_file_is_refused_by_both_names(text: str, message: str) -> None:
    Path("run.yaml").write_text(text)
    with pytest.raises(ConfigError) as refused:
        read_run(["run.yaml"])
    assert str(refused.value).startswith(message)


def test_a_word_of_a_later_layer_wins_over_the_key_of_an_earlier_one() -> None:
    Path("base.yaml").write_text("trainer: {seed: 1, max_steps: 1}\n")
    Path("lab.yaml").write_text("seed: 2\nsteps: 2\n")
    assert read_run(["base.yaml", "lab.yaml"]).values["trainer"] == {"seed": 2, "max_steps": 2}
    assert read_run(["base.yaml", "lab.yaml"], [("seed_everything", "3")]).values["trainer"]["seed"] == 3


def test_a_part_of_a_word_that_holds_keys_is_taken_with_it() -> None:
    Path("run.yaml").write_text("trainer: {grad_scaler: {init_scale: 3}}\n")
    values = read_run(["run.yaml"], [("accelerator.grad_scaler.growth_factor", "4")]).values
    assert values["trainer"]["grad_scaler"] == {"init_scale": 3, "growth_factor": 4}


def test_a_mistake_behind_a_word_is_placed_where_the_word_stands() -> None:
    Path("run.yaml").write_text(PARTS + "steps: ten\n")
    said = policyfit("plan", "run.yaml")
    assert said.code == 2
    assert "run.yaml:3:1: trainer.max_steps must be int or null, got 'ten'." in said.err
    Path("run.yaml").write_text(PARTS + "accelerator: {grad_scaler: {init_scal: 3}}\n")
    assert "run.yaml:3:29: trainer.grad_scaler.init_scal is not a valid key." in policyfit("plan", "run.yaml").err


def test_a_device_of_the_policys_own_is_not_mistaken_for_the_trainers() -> None:
    Path("run.yaml").write_text(PARTS.replace("Policy", "Placed"))
    said = policyfit("plan", "run.yaml", "--policy.device=cpu")
    assert said.code == 2
    assert (
        "command line: policy.device could be LeRobot's word for trainer.device, or the argument of run_p" in said.err
    )
    assert policyfit("plan", "run.yaml", "--policy.init_args.device=cpu", "--device=cpu").code == 0


@pytest.mark.parametrize(
    "option", [["--config=run.yaml"], ["--config", "run.yaml"], ["-c", "run.yaml"], ["--config_path=run.yaml"]]
)
def test_a_run_file_may_be_named_as_another_tool_does(option: list[str]) -> None:
    Path("run.yaml").write_text(PARTS)
    said = policyfit("plan", *option, "--device=cpu")
    assert said.code == 0
    assert "the file alone is enough" in said.err


@pytest.mark.parametrize("mps", [True, False])
def test_lightnings_gpu_is_apples_where_there_is_one(monkeypatch: pytest.MonkeyPatch, mps: bool) -> None:
    class Facts:
        pass

    facts = Facts()
    facts.mps = mps  # type: ignore[attr-defined]
    monkeypatch.setattr("policyfit.strategies.facts.probe", lambda: facts)
    Path("run.yaml").write_text("trainer: {accelerator: gpu}\n")
    assert read_run(["run.yaml"]).values["trainer"] == {"device": "mps" if mps else "cuda"}


def test_every_word_leads_to_a_key_that_there_is_and_none_hides_one() -> None:
    keys = {f"trainer.{name}" for name in parameters(Trainer)} | {"policy", "eval.episodes"}
    assert {taken.key for taken in TAKEN.values()} <= keys
    assert keys.isdisjoint({*TAKEN, *REFUSED})


def test_the_page_names_every_word_that_is_taken() -> None:
    page = (Path(__file__).parents[2] / "docs/yaml-runs.md").read_text().replace(".*", "")
    short = [word for word in TAKEN if f"`{word}`" not in page and f"`{word.removeprefix('trainer.')}`" not in page]
    assert short == []
