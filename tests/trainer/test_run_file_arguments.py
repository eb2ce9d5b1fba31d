"""What an argument of a class takes in a run file: an object, settings, or text that stays text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from run_parts import BASE, Half, Options, Takes, Unannotated, half, policyfit

from policyfit.trainer.config import read_run, resolve

TAKES = "policy: {class_path: run_parts.Takes}\n"


def _given(argument: str, text: str) -> Any:
    """What the policy gets, for which a file and the command line must say the same."""
    Path("run.yaml").write_text(TAKES)
    Path("lab.yaml").write_text(f"policy: {{init_args: {{{argument}: {text}}}}}\n")
    from_file, from_words = (
        resolve(config)
        for config in (read_run(["run.yaml", "lab.yaml"]), read_run(["run.yaml"], [(f"policy.{argument}", text)]))
    )
    assert from_file.config.values["policy"] == from_words.config.values["policy"]
    policy = from_file.build("policy")
    assert isinstance(policy, Takes)
    return policy.given[argument]


@pytest.mark.parametrize(
    ("argument", "text"),
    [
        ("scale", "run_parts.Half"),
        ("scale", "{class_path: run_parts.Half}"),
        ("anything", "{class_path: run_parts.Half}"),
        ("untyped", "{class_path: run_parts.Half}"),
    ],
)
def test_the_class_that_is_named_is_the_one_that_is_built(argument: str, text: str) -> None:
    assert type(_given(argument, text)) is Half


def test_classes_in_a_list_and_those_that_are_called_later_are_the_ones_that_are_named() -> None:
    assert [type(found) for found in _given("scales", "[run_parts.Half, {class_path: run_parts.Half}]")] == [Half, Half]
    assert type(_given("make", "run_parts.Half")()) is Half


def test_parameters_without_annotations_are_set_in_callbacks_too() -> None:
    Path("run.yaml").write_text(BASE)
    callbacks = "[{class_path: run_parts.Unannotated, init_args: {kind: plain, at: 3}}]"
    trainer = resolve(read_run(["run.yaml"], [("trainer.callbacks", callbacks)])).trainer.build()
    assert [(c.kind, c.at) for c in trainer.callbacks if isinstance(c, Unannotated)] == [("plain", 3)]


@pytest.mark.parametrize("text", ["run_parts.half", "{class_path: run_parts.half}"])
def test_a_function_that_is_called_later_is_the_function_itself(text: str) -> None:
    Path("run.yaml").write_text(BASE)
    schedule = f"{{class_path: torch.optim.lr_scheduler.LambdaLR, init_args: {{lr_lambda: {text}}}}}"
    run = resolve(read_run(["run.yaml"], [("schedule", schedule)]))
    assert run.config.values["schedule"]["init_args"] == {"lr_lambda": "run_parts.half"}
    import torch

    made = run.maker("schedule")(torch.optim.SGD([torch.ones(1)], lr=1.0))  # type: ignore[misc]
    assert made.lr_lambdas == [half]


@pytest.mark.parametrize("argument", ["anything", "untyped", "things"])
@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("model.pt", "model.pt"),
        ("os.getcwd", "os.getcwd"),
        ("resnet18.a1_in1k", "resnet18.a1_in1k"),
        ("[obs.front, obs.wrist]", ["obs.front", "obs.wrist"]),
        ("{a: lerobot.pusht}", {"a": "lerobot.pusht"}),
    ],
)
def test_text_with_dots_stays_text_where_it_may_be_text(argument: str, text: str, value: Any) -> None:
    assert _given(argument, text) == value


def test_settings_take_a_mapping_and_an_empty_one_is_their_defaults() -> None:
    assert _given("options", "{}") == Options()
    assert _given("own", "{depth: 3}") == Options(3)


@pytest.mark.parametrize(
    ("key", "text", "message"),
    [
        ("policy.init_args.scale", "run_parts.Data", "policy.init_args.scale must be a Scale, but run_parts.Data is"),
        ("policy.init_args.scale", "{}", "policy.init_args.scale must name a Scale, got {}. Write {class_path: module"),
        ("policy.init_args.norm", "{}", "policy.init_args.norm must name a Module, got {}. Write {class_path: module"),
        ("policy.init_args.norm", "{a: 1}", "Write {class_path: module.Class, init_args: {a: ...}}."),
        ("policy.init_args.own", "1", "policy.init_args.own must be Options, got 1."),
        ("policy.init_args.own", "[1]", "policy.init_args.own must be Options, got [1]."),
        ("policy.init_args.options", "1", "policy.init_args.options must be Options or null, got 1."),
        ("policy.init_args.own", "{depth: x}", "policy.init_args.own.depth must be int, got 'x'."),
        ("policy", "{class_path: run_parts.Leaves}", "policy: making run_parts.Leaves failed: SystemExit: 0"),
        ("policy", "{class_path: run_parts.Leaves, init_args: {code: 3}}", "run_parts.Leaves failed: SystemExit: 3"),
        ("policy", "leaves_at_import.Policy", "policy.class_path: importing leaves_at_import failed: SystemExit: 0"),
        ("trainer.callbacks", "[{}]", "trainer.callbacks[0] must name a Callback, got {}."),
        ("trainer.loggers", "[x]", "trainer.loggers[0].class_path must be written module.Class"),
        ("trainer.loggers", "[run_parts.Half]", "trainer.loggers[0] must be a logger, with log_metrics and finalize"),
        ("trainer.loggers", "[3]", "trainer.loggers[0] must name a logger, with log_metrics and finalize as"),
        ("trainer.loggers", "[{class_path: run_parts.Half}]", "trainer.loggers[0] must be a logger, with log_metrics"),
        ("trainer.precision", "{}", "trainer.precision must name a PrecisionStrategy or a FabricPlugin, got {}."),
        ("trainer.precision", "policyfit.BF16", "A class is written {class_path: policyfit.BF16}."),
        ("precision.allow_cpu", "yes", "trainer.precision must name a PrecisionStrategy or a FabricPlugin, got {'all"),
    ],
)
def test_what_is_no_such_object_is_refused_by_its_key(key: str, text: str, message: str) -> None:
    Path("leaves_at_import.py").write_text("raise SystemExit(0)\n")
    Path("run.yaml").write_text(BASE.replace("run_parts.Policy", "run_parts.Takes"))
    said = policyfit("plan", "run.yaml", f"--{key}={text}")
    assert (said.code, said.out) == (2, "")
    assert message in said.err
    assert "command line: " in said.err


def test_a_logger_may_be_any_class_with_what_a_run_calls() -> None:
    Path("run.yaml").write_text(BASE)
    for named in ("[{class_path: run_parts.Logger}]", "[run_parts.Logger]", "null"):
        assert policyfit("plan", "run.yaml", f"--trainer.loggers={named}").code == 0
    assert policyfit("plan", "run.yaml", "--trainer.loggers+=run_parts.Logger").code == 0
    Path("run.yaml").write_text(BASE.replace("seed: 3", "seed: 3, loggers: [{class_path: run_parts.Logger}, x]"))
    column = len("trainer: {device: cpu, max_steps: 2, seed: 3, loggers: [{class_path: run_parts.Logger}, ") + 1
    assert f"run.yaml:3:{column}: trainer.loggers[1].class_path must be written" in policyfit("plan", "run.yaml").err
