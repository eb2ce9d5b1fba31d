"""Run files: what they mean, how they are laid over one another, and what is built from them."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from policyfit import FP16, Checkpoint, GradScalerConfig, Trainer, WarmupCosine
from policyfit.strategies.errors import ConfigError, PolicyfitError, PrecisionError
from policyfit.trainer.config import (
    RunRecipe,
    build_policy,
    read_run,
    resolve,
    resolve_evaluation,
    resolve_validation,
)
from policyfit.trainer.strict_yaml import write

PARTS = """
from __future__ import annotations
from dataclasses import dataclass
from typing import Any, Callable, Literal
import torch
from torch import nn

class Policy(nn.Module):
    def __init__(
        self,
        width: int = 4,
        name: str = "plain",
        rate: float = 0.1,
        sizes: tuple[int, ...] = (1, 2),
        mode: Literal["no", "fast"] = "fast",
        shift: bool = False,
        maybe: bool | None = True,
        either: int | str = 0,
        anything: Any = None,
        untyped=5,
        head: nn.Module | None = None,
        activation: Callable[[], nn.Module] | None = None,
        heads: list[nn.Module] = [],
        options: dict[str, float] | None = None,
    ) -> None:
        super().__init__()
        self.given = {k: v for k, v in locals().items() if k not in ("self", "__class__")}
        self.layer = nn.Linear(2, 1)

    def forward(self, batch):
        return self.layer(batch).square().mean()

@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    layers: int = 2
    dropout: float = 0.0

class Configured(Policy):
    def __init__(self, settings: Settings = Settings(), items: list[Any] = []) -> None:
        super().__init__()
        self.settings, self.items = settings, items

def make_policy(width: int, **rest: Any) -> Policy:
    return Policy(width, **{"name": "made", **rest})

class Deep(Policy):
    def __init__(self, depth: int, **rest: Any) -> None:
        super().__init__(**rest)
        self.depth = depth

class Data:
    def __init__(self, split: str = "train") -> None:
        self.split = split

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.ones(2)

class Env:
    def __init__(self, num_envs: int = 1) -> None:
        self.num_envs = num_envs

    def reset(self, seed=None):
        return None

    def step(self, action):
        return None

def make_env(size: int):
    return lambda: size
"""

MINIMAL = "policy: {class_path: config_parts.Policy}\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("run")
    (made / "config_parts.py").write_text(PARTS)
    return made


def _read(folder: Path, text: str, *overrides: tuple[str, str]) -> RunRecipe:
    (folder / "run.yaml").write_text(text)
    config = read_run([folder / "run.yaml"], overrides)
    with config.importable():
        return resolve(config)


def _at(values: dict[str, Any], key: str) -> Any:
    found: Any = values
    for part in key.split("."):
        found = found[part]
    return found


GOOD: list[tuple[str, str, Any]] = [
    ("trainer.precision", "no", "no"),
    ("trainer.precision", "'no'", "no"),
    ("trainer.precision", '"no"', "no"),
    ("trainer.precision", "off", "no"),
    ("trainer.precision", "false", "no"),
    ("trainer.precision", "none", "no"),
    ("trainer.precision", "null", "no"),
    ("trainer.precision", "fp16", "fp16"),
    ("trainer.device", "auto", "auto"),
    ("trainer.device", "cuda:1", "cuda:1"),
    ("trainer.tf32", "null", None),
    ("trainer.tf32", "true", True),
    ("trainer.tf32", "no", False),
    ("trainer.tf32", "0", False),
    ("trainer.deterministic", "Yes", True),
    ("trainer.deterministic", "off", False),
    ("trainer.deterministic", "1", True),
    ("trainer.deterministic", "FALSE", False),
    ("trainer.max_steps", "1000", 1000),
    ("trainer.max_steps", "1e5", 100_000),
    ("trainer.max_steps", "null", None),
    ("trainer.batch_size", "null", 8),
    ("trainer.workers", "auto", "auto"),
    ("trainer.workers", "2", 2),
    ("trainer.clip_norm", "1", 1),
    ("trainer.clip_norm", "1.e-4", 1e-4),
    ("trainer.non_finite", "off", "off"),
    ("trainer.val_every", "0", 0),
    ("trainer.callbacks", "null", []),
    ("trainer.callbacks", "[]", []),
    ("trainer.seed", "7", 7),
    ("trainer.run_dir", "runs/2024-01-31", "runs/2024-01-31"),
    ("trainer.grad_scaler", "{init_scale: 1e3}", {"init_scale": 1000.0}),
    ("policy.init_args.rate", "1e-4", 1e-4),
    ("policy.init_args.rate", "5E-05", 5e-5),
    ("policy.init_args.rate", ".5", 0.5),
    ("policy.init_args.rate", "3", 3),
    ("policy.init_args.name", "no", "no"),
    ("policy.init_args.name", '"1e-4"', "1e-4"),
    ("policy.init_args.name", "1.2.3", "1.2.3"),
    ("policy.init_args.mode", "no", "no"),
    ("policy.init_args.shift", "on", True),
    ("policy.init_args.maybe", "~", None),
    ("policy.init_args.either", "'010'", "010"),
    ("policy.init_args.either", "10", 10),
    ("policy.init_args.anything", "off", "off"),
    ("policy.init_args.anything", "'3'", "3"),
    ("policy.init_args.anything", "[no, {a: 1e-4}]", ["no", {"a": 1e-4}]),
    ("policy.init_args.untyped", "'3'", "3"),
    ("policy.init_args.sizes", "[3, 4.0, 5]", [3, 4, 5]),
    ("policy.init_args.options", "{a: 1, b: 1e-3}", {"a": 1, "b": 1e-3}),
]


def _yaml_of(key: str, text: str) -> str:
    *outer, last = key.split(".")
    lines = ["policy:", "  class_path: config_parts.Policy"] if outer[0] == "policy" else [MINIMAL.strip(), "trainer:"]
    lines += [f"{'  ' * (depth + 1)}{part}:" for depth, part in enumerate(outer[1:])]
    return "\n".join([*lines, f"{'  ' * len(outer)}{last}: {text}", ""])


@pytest.mark.parametrize(("key", "text", "value"), GOOD, ids=[f"{k}={t}" for k, t, _ in GOOD])
def test_a_value_means_the_same_in_a_file_and_on_the_command_line(
    folder: Path, key: str, text: str, value: Any
) -> None:
    from_file = _read(folder, _yaml_of(key, text))
    from_words = _read(folder, MINIMAL, (key, text))
    for run in (from_file, from_words):
        found = _at(run.config.values, key)
        assert found == value
        assert type(found) is type(value)
    assert from_file.config.values == from_words.config.values


@pytest.mark.parametrize("text", ["no", "No", "off", "false", "none", "None", "null", "'no'", '"off"'])
def test_precision_no_is_no_in_a_file_on_the_command_line_and_in_python_alike(folder: Path, text: str) -> None:
    from_file = _read(folder, MINIMAL + f"trainer: {{device: cpu, precision: {text}}}\n").trainer.build()
    from_words = _read(folder, MINIMAL + "trainer: {device: cpu}\n", ("precision", text)).trainer.build()
    python = {"null": None, "false": False}
    in_python = Trainer("cpu", python.get(text, text.strip("'\"")))  # type: ignore[arg-type]
    plans = [trainer.precision.name for trainer in (from_file, from_words, in_python)]
    assert plans == ["no", "no", "no"]


def test_classes_get_values_in_the_types_that_they_ask_for(folder: Path) -> None:
    arguments = "{rate: 3, sizes: [3, 4], anything: no, either: '7', untyped: '8', maybe: null, options: {a: 1}}"
    policy = _read(folder, f"policy: {{class_path: config_parts.Policy, init_args: {arguments}}}").build("policy")
    expected = {"rate": 3.0, "sizes": (3, 4), "anything": "no", "either": "7", "untyped": "8", "maybe": None}
    for name, value in {**expected, "options": {"a": 1.0}}.items():
        assert policy.given[name] == value
        assert type(policy.given[name]) is type(value)


def test_objects_inside_arguments_are_built_too(folder: Path) -> None:
    run = _read(
        folder,
        """
        policy:
          class_path: config_parts.Deep
          init_args:
            depth: 2
            width: 16
            head: {class_path: torch.nn.Linear, init_args: {in_features: 3, out_features: 2}}
            heads: [{class_path: torch.nn.Identity}, {class_path: config_parts.Policy, init_args: {shift: yes}}]
            activation: {class_path: torch.nn.GELU, init_args: {approximate: tanh}}
        """,
    )
    policy = run.build("policy")
    assert (policy.depth, policy.given["width"]) == (2, 16)
    assert policy.given["head"].out_features == 2
    assert [type(head).__name__ for head in policy.given["heads"]] == ["Identity", "Policy"]
    assert policy.given["heads"][1].given["shift"] is True
    assert policy.given["activation"]().approximate == "tanh"


def test_settings_in_a_dataclass_are_keys_of_the_run(folder: Path) -> None:
    text = "policy: {class_path: config_parts.Configured, init_args: {settings: {layers: 3}, items: [no, 1]}}\n"
    policy = _read(folder, text).build("policy")
    assert (policy.settings.layers, policy.settings.dropout, policy.items) == (3, 0.0, ["no", 1])
    with pytest.raises(ConfigError, match=r"run.yaml:1:70: policy.init_args.settings.layrs is not .*settings.layers\?"):
        _read(folder, text.replace("layers", "layrs"))
    with pytest.raises(ConfigError, match=r"policy.init_args.settings.layers must be int, got 'x'"):
        _read(folder, text, ("policy.settings.layers", "x"))


def test_a_function_may_make_an_object_and_take_more_by_dict_kwargs(folder: Path) -> None:
    text = "policy: {class_path: config_parts.make_policy, init_args: {width: 3}, dict_kwargs: {rate: 0.5}}\n"
    given = _read(folder, text).build("policy").given
    assert (given["width"], given["name"], given["rate"]) == (3, "made", 0.5)
    with pytest.raises(ConfigError, match=r"policy must be a torch.nn.Module, but config_parts.make_env gave"):
        _read(folder, "policy: {class_path: config_parts.make_env, init_args: {size: 3}}\n").build("policy")


def test_the_trainer_is_built_as_written(folder: Path) -> None:
    run = _read(
        folder,
        """
        policy: {class_path: config_parts.Policy}
        trainer:
          device: cpu
          precision: {class_path: policyfit.FP16, init_args: {allow_cpu: true, grad_scaler: {init_scale: 1024}}}
          tf32: null
          max_steps: 3
          callbacks: [{class_path: policyfit.Checkpoint, init_args: {every_steps: 250}}]
        """,
    )
    trainer = run.trainer.build()
    assert isinstance(trainer, Trainer)
    assert isinstance(trainer.precision, FP16)
    assert trainer.precision.settings == GradScalerConfig(init_scale=1024.0)
    assert trainer.max_steps == 3
    assert [c.every_steps for c in trainer.callbacks if isinstance(c, Checkpoint)] == [250]


def test_optimizer_and_schedule_are_made_from_what_they_work_on(folder: Path) -> None:
    run = _read(
        folder,
        MINIMAL
        + "optimizer: {class_path: torch.optim.SGD, init_args: {lr: 1e-2, momentum: 0.5}}\n"
        + "schedule: {class_path: torch.optim.lr_scheduler.StepLR, init_args: {step_size: 3}}\n",
    )
    make_optimizer, make_schedule = run.maker("optimizer"), run.maker("schedule")
    assert make_optimizer is not None
    assert make_schedule is not None
    optimizer = make_optimizer([nn.Parameter(torch.ones(2))])
    assert isinstance(optimizer, torch.optim.SGD)
    assert (optimizer.defaults["lr"], optimizer.defaults["momentum"]) == (0.01, 0.5)
    assert make_schedule(optimizer).step_size == 3


@pytest.mark.parametrize(
    ("trainer", "arguments", "total"),
    [
        ("{max_steps: 40}", "{warmup_steps: 4}", 40),
        ("{max_steps: 40}", "{warmup_steps: 4, total_steps: 9}", 9),
    ],
)
def test_a_schedule_without_total_steps_takes_the_trainers(
    folder: Path, trainer: str, arguments: str, total: int
) -> None:
    schedule = f"schedule: {{class_path: policyfit.WarmupCosine, init_args: {arguments}}}\n"
    run = _read(folder, f"{MINIMAL}trainer: {trainer}\n{schedule}")
    assert run.config.values["schedule"]["init_args"] == {"warmup_steps": 4, "total_steps": total}
    make = run.maker("schedule")
    assert make is not None
    assert isinstance(make(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)), WarmupCosine)


def test_later_files_win_over_earlier_ones_and_the_command_line_over_all(folder: Path) -> None:
    (folder / "base.yaml").write_text(
        MINIMAL + "trainer: {seed: 1, batch_size: 2, max_steps: 3}\noptimizer: {class_path: torch.optim.SGD}\n"
    )
    (folder / "lab.yaml").write_text("trainer: {batch_size: 20, max_steps: 30}\n")
    config = read_run([folder / "base.yaml", folder / "lab.yaml"], [("trainer.max_steps", "300")])
    assert config.values["trainer"] == {"seed": 1, "batch_size": 20, "max_steps": 300}
    places = {key: str(config.marks[("trainer", key)]) for key in ("seed", "batch_size", "max_steps")}
    assert places == {
        "seed": f"{folder / 'base.yaml'}:2:11",
        "batch_size": f"{folder / 'lab.yaml'}:1:11",
        "max_steps": "command line",
    }
    with config.importable():
        assert resolve(config).config.values["trainer"]["accumulate"] == 1


def test_another_class_brings_none_of_the_arguments_of_the_one_it_replaces(folder: Path) -> None:
    text = MINIMAL + "optimizer: {class_path: torch.optim.AdamW, init_args: {lr: 1e-3, betas: [0.8, 0.9]}}\n"
    kept = _read(folder, text, ("optimizer.class_path", "torch.optim.AdamW"), ("optimizer.lr", "2e-3"))
    assert kept.config.values["optimizer"]["init_args"] == {"lr": 2e-3, "betas": [0.8, 0.9]}
    replaced = _read(folder, text, ("optimizer", "torch.optim.SGD"), ("optimizer.lr", "0.5"))
    assert replaced.config.values["optimizer"] == {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.5}}


@pytest.mark.parametrize(
    ("key", "text", "place", "value"),
    [
        ("trainer.max_steps", "9", "trainer.max_steps", 9),
        (
            "trainer.grad_scaler.growth_factor",
            "3",
            "trainer.grad_scaler",
            {"init_scale": 64, "growth_factor": 3},
        ),
        (
            "trainer.grad_scaler",
            "{growth_interval: 9}",
            "trainer.grad_scaler",
            {"init_scale": 64, "growth_interval": 9},
        ),
        ("trainer.grad_scaler", "null", "trainer.grad_scaler", None),
        ("policy.init_args.sizes", "[7]", "policy.init_args.sizes", [7]),
        ("policy.width", "7", "policy.init_args.width", 7),
        (
            "policy.init_args.head.init_args.in_features",
            "7",
            "policy.init_args.head.init_args.in_features",
            7,
        ),
        ("policy.head.in_features", "7", "policy.init_args.head.init_args.in_features", 7),
        ("data.train.split", "all", "data.train.init_args.split", "all"),
        ("device", "cpu", "trainer.device", "cpu"),
        ("precision", "bf16", "trainer.precision", "bf16"),
        ("tf32", "null", "trainer.tf32", None),
    ],
)
def test_an_override_of_any_kind_lands(folder: Path, key: str, text: str, place: str, value: Any) -> None:
    run = _read(
        folder,
        """
        policy:
          class_path: config_parts.Policy
          init_args:
            sizes: [1, 2, 3]
            head: {class_path: torch.nn.Linear, init_args: {in_features: 3, out_features: 2}}
        data: {train: config_parts.Data}
        trainer: {precision: fp16, grad_scaler: {init_scale: 64}}
        """,
        (key, text),
    )
    assert _at(run.config.values, place) == value


def test_an_override_inside_something_without_keys_is_refused(folder: Path) -> None:
    for key, found in (("trainer.precision.allow_cpu", "'fp16'"), ("trainer.callbacks.0", "[]")):
        with pytest.raises(ConfigError, match=rf"is {found.replace('[', chr(92) + '[')}, so --{key} cannot"):
            _read(folder, MINIMAL + "trainer: {precision: fp16, callbacks: []}\n", (key, "1"))


@pytest.mark.parametrize("key", ["precision", "device", "trainer.max_steps"])
def test_an_empty_value_on_the_command_line_is_refused_and_an_empty_one_in_a_file_is_null(
    folder: Path, key: str
) -> None:
    for text in ("", "  "):
        with pytest.raises(ConfigError, match=rf"--{key}= *is empty\.\nGive a value, or write null for nothing\."):
            _read(folder, MINIMAL, (key, text))
    *_, name = key.split(".")
    assert (
        _read(folder, f"{MINIMAL}trainer:\n  {name}:\n").config.values
        == _read(folder, MINIMAL, (key, "null")).config.values
    )


@pytest.mark.parametrize(
    ("key", "text", "fragment"),
    [
        ("policy.widht", "3", "policy.init_args.widht is not"),
        ("policy.foo.bar", "3", "policy.init_args.foo is not"),
        ("policy", "{class_path: config_parts.Policy, init_args: {widht: 3}}", "policy.init_args.widht is not"),
        ("trainer", "{max_step: 3}", "trainer.max_step is not"),
        ("eval.episodes", "0", "eval.episodes must be a whole number of at least 1, got 0."),
        ("eval.seed", "-1", "eval.seed must be a whole number from 0"),
        ("schedule.lr", "3", "schedule must name"),
    ],
)
def test_a_mistake_of_the_command_line_is_placed_there_and_not_in_the_file(
    folder: Path, key: str, text: str, fragment: str
) -> None:
    file = MINIMAL + "trainer: {max_steps: 3}\neval: {env: config_parts.Env}\n"
    with pytest.raises(ConfigError, match=f"^command line: {re.escape(fragment)}"):
        _read(folder, file, (key, text))


def test_a_mistake_of_the_file_keeps_its_place_beside_keys_of_the_command_line(folder: Path) -> None:
    text = "policy:\n  class_path: config_parts.Policy\n  init_args: {widht: 3}\n"
    with pytest.raises(ConfigError, match=r"run\.yaml:3:15: policy\.init_args\.widht is not"):
        _read(folder, text, ("policy.width", "3"))
    with pytest.raises(ConfigError, match=r"run\.yaml:1:1: policy must name"):
        _read(folder, "policy: {init_args: {}}\n", ("trainer.seed", "3"))


@pytest.mark.parametrize(
    ("key", "place"),
    [
        ("lr", "optimizer.lr"),
        ("step_size", "schedule.step_size"),
        ("width", "policy.width"),
        ("clip_norm", "trainer.clip_norm"),
    ],
)
def test_a_key_without_its_section_is_looked_for_among_the_arguments_of_the_run(
    folder: Path, key: str, place: str
) -> None:
    text = MINIMAL + (
        "optimizer: torch.optim.SGD\n"
        "schedule: {class_path: torch.optim.lr_scheduler.StepLR, init_args: {step_size: 3}}\n"
    )
    with pytest.raises(ConfigError, match=rf"command line: {key} is not a valid key\. Did you mean {place}\?$"):
        _read(folder, text, (key, "3"))
    in_file = place.replace(".", ".init_args.") if not place.startswith("trainer") else place
    with pytest.raises(ConfigError, match=rf"run\.yaml:\d+:1: {key} is not a valid key\. Did you mean {in_file}\?$"):
        _read(folder, f"{text}{key}: 3\n")


def test_an_argument_of_the_optimizer_that_nobody_named_comes_with_how_to_name_it(folder: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"Did you mean optimizer\.lr\? Name the optimizer, too: .*torch\.optim\.AdamW"
    ):
        _read(folder, MINIMAL, ("lr", "3"))
    both = (("optimizer.class_path", "torch.optim.AdamW"), ("optimizer.lr", "3"))
    assert _read(folder, MINIMAL, *both).config.values["optimizer"]["init_args"] == {"lr": 3}


def test_a_class_in_another_case_is_found(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"config_parts holds no POLICY\. Did you mean Policy\?"):
        _read(folder, "policy: config_parts.POLICY\n")


@pytest.mark.parametrize(("text", "meant"), [("16", "fp16"), ("32", "no"), ("64", "64-true"), ("'16'", "fp16")])
def test_a_precision_in_bits_is_understood_and_the_word_for_it_said(folder: Path, text: str, meant: str) -> None:
    for file, words in ((MINIMAL, [("precision", text)]), (f"{MINIMAL}trainer: {{precision: {text}}}\n", [])):
        with pytest.raises(ConfigError, match=rf"precision must be no, bf16.*\nUse precision='{meant}'\."):
            _read(folder, file, *words)


def test_null_takes_a_section_away_again(folder: Path) -> None:
    text = MINIMAL + "optimizer: torch.optim.SGD\ntrainer:\neval:\n"
    run = _read(folder, text, ("optimizer", "null"))
    assert run.maker("optimizer") is None
    assert "optimizer" not in run.config.values
    assert run.build("eval", "env") is None


FULL = """
policy: {class_path: config_parts.Policy, init_args: {name: "no", rate: 1e-5, sizes: [3], anything: "null"}}
data: {train: config_parts.Data, val: {class_path: config_parts.Data, init_args: {split: "010"}}}
trainer:
  device: cpu
  precision: no
  tf32: null
  max_steps: 20
  run_dir: runs/"1e-4"
  callbacks: [{class_path: policyfit.Checkpoint, init_args: {every_steps: 5}}]
optimizer: {class_path: torch.optim.AdamW, init_args: {lr: 1e-4, betas: [0.9, 0.95], weight_decay: .0}}
schedule: {class_path: policyfit.WarmupCosine, init_args: {warmup_steps: 2}}
eval: {env: {class_path: config_parts.Env, init_args: {num_envs: 10}}, episodes: 5}
"""


def test_a_resolved_run_written_and_read_back_is_the_same_run(folder: Path, tmp_path: Path) -> None:
    config = _read(folder, FULL).config
    (tmp_path / "config.yaml").write_text(write(config.values))
    again = read_run([tmp_path / "config.yaml"])
    assert again.values == config.values
    with again.importable():
        assert resolve(again).config.values == config.values
    text = write(config.values)
    assert '"010"' in text
    assert '"null"' in text
    assert config.values["eval"]["seed"] == 10_000
    assert config.values["trainer"]["tf32"] is None


def test_modules_beside_the_run_file_are_found_wherever_its_resolved_form_lies(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "beside_the_run.py").write_text(PARTS)
    (home / "run.yaml").write_text("policy: {class_path: beside_the_run.Policy, init_args: {width: 9}}\n")
    before = list(sys.path)
    config = read_run([home / "run.yaml"])
    with config.importable():
        resolved = resolve(config).config
    assert sys.path == before
    assert resolved.values["code"] == [str(home)]
    sys.modules.pop("beside_the_run")
    (tmp_path / "config.yaml").write_text(write(resolved.values))
    assert build_policy(read_run([tmp_path / "config.yaml"])).given["width"] == 9  # type: ignore[index]
    assert sys.path == before


def test_a_policy_is_built_without_its_data(folder: Path) -> None:
    (folder / "run.yaml").write_text(MINIMAL + "data: {train: module_of_another_machine.Data}\n")
    assert isinstance(build_policy(read_run([folder / "run.yaml"])), nn.Module)


def test_an_evaluation_looks_only_at_how_the_policy_acts(folder: Path) -> None:
    (folder / "run.yaml").write_text(
        "policy: elsewhere.Policy\ndata: {train: elsewhere.Data}\n"
        "trainer: {device: cpu, callbacks: [elsewhere.Callback], max_steps: 5, tf32: null}\n"
        "eval: {env: {class_path: config_parts.make_env, init_args: {size: 3}}, episodes: 5}\n"
    )
    config = read_run([folder / "run.yaml"], [("eval.episodes", "7"), ("precision", "bf16")])
    with config.importable():
        run = resolve_evaluation(config)
        assert run.build("eval", "env")() == 3
    assert run.evaluation == {"episodes": 7, "seed": 10_000}
    assert run.trainer.values == {"device": "cpu", "precision": "bf16", "tf32": None}


def test_a_validation_looks_only_at_its_data_and_at_what_matters_after_training(folder: Path) -> None:
    text = "policy: elsewhere.Policy\ndata: {train: elsewhere.Data, val: {class_path: config_parts.Data}}\n"
    (folder / "run.yaml").write_text(text + "trainer: {device: cpu, batch_size: 3, max_steps: 5}\n")
    config = read_run([folder / "run.yaml"])
    with config.importable():
        run = resolve_validation(config)
        assert run.build("data", "val").split == "train"
    assert run.trainer.values == {"device": "cpu", "batch_size": 3, "precision": "no"}
    (folder / "run.yaml").write_text("policy: elsewhere.Policy\n")
    assert resolve_validation(read_run([folder / "run.yaml"])).build("data", "val") is None


@pytest.mark.parametrize("found", ["config_parts.Env", "{class_path: config_parts.make_env, init_args: {size: 3}}"])
def test_an_environment_may_be_a_class_or_what_makes_one(folder: Path, found: str) -> None:
    built = _read(folder, f"{MINIMAL}eval: {{env: {found}}}\n").build("eval", "env")
    assert callable(built) or hasattr(built, "step")


def test_the_environment_of_the_process_changes_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = _read(folder, FULL).config.values
    for name in ("JSONARGPARSE_DEFAULT_ENV", "WIDTH", "APP_WIDTH", "POLICYFIT_TRAINER__SEED", "DEVICE", "LR"):
        monkeypatch.setenv(name, "true")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    run = _read(folder, FULL)
    assert run.config.values == plain
    assert run.build("policy").given["width"] == 4


def test_a_launcher_that_asks_for_another_precision_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    with pytest.raises(ConfigError, match=r"precision is no, but .* ACCELERATE_MIXED_PRECISION=fp16"):
        _read(folder, MINIMAL + "trainer: {device: cpu}\n").trainer.build()
    with pytest.raises(ConfigError, match=r"run.yaml:2:24: precision is bf16, but .* ACCELERATE_MIXED_PRECISION=fp16"):
        _read(folder, MINIMAL + "trainer: {device: cpu, precision: bf16}\n").trainer.build()
    with pytest.raises(ConfigError, match=r"precision is no, but .* ACCELERATE_MIXED_PRECISION=fp16"):
        Trainer("cpu")


def test_an_error_of_a_constructor_keeps_its_type_and_gets_its_place(folder: Path) -> None:
    run = _read(folder, MINIMAL + "trainer:\n  precision: fp16\n  device: cpu\n")
    with pytest.raises(PrecisionError, match=r"run.yaml:3:3: precision='fp16'"):
        run.trainer.build()


@pytest.mark.parametrize("word", ["auto", "cpu", "gpu", "cuda:99", "CPU"])
def test_python_files_and_the_command_line_take_the_same_devices(folder: Path, word: str) -> None:
    outcomes = []
    for make in (
        lambda: Trainer(word),
        lambda: _read(folder, f"{MINIMAL}trainer: {{device: {word}}}\n").trainer.build(),
        lambda: _read(folder, MINIMAL, ("device", word)).trainer.build(),
    ):
        try:
            outcomes.append(make().device.name)
        except PolicyfitError as error:
            outcomes.append(str(error)[str(error).index("device") :])
    assert outcomes == outcomes[:1] * 3
