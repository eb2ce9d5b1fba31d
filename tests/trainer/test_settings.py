"""The constructor's values in Python: null means there what it means in a file, and nothing is taken for another."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
from run_parts import BASE, Logger

from policyfit import FP16, GradScalerConfig, MetricsLog, Trainer
from policyfit.strategies.errors import ConfigError
from policyfit.trainer.config import read_run, resolve


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"default_callbacks": "no"}, "trainer.default_callbacks must be true or false, got 'no'"),
        ({"val_every": False}, "trainer.val_every must be a whole number of at least 1, got False"),
        ({"val_every": ""}, "trainer.val_every must be a whole number of at least 1, got ''"),
        ({"val_every": []}, "trainer.val_every must be a whole number"),
        ({"log_every": False}, "trainer.log_every must be a whole number of at least 1, got False"),
        ({"log_every": 0.0}, "trainer.log_every must be a whole number of at least 1, got 0.0"),
        ({"max_steps": 0}, "trainer.max_steps must be a whole number of at least 1, got 0"),
        ({"run_dir": 1}, "trainer.run_dir must be a folder, got 1"),
        ({"run_dir": ""}, "trainer.run_dir must be a folder, got ''"),
        ({"callbacks": {}}, "trainer.callbacks must be a list, got {}"),
        ({"callbacks": 3}, "trainer.callbacks must be a list, got 3"),
        ({"loggers": "x"}, "trainer.loggers must be a list, got 'x'"),
        ({"loggers": [Logger(), 1]}, "trainer.loggers[1] must be a logger"),
        ({"loggers": [Logger]}, "trainer.loggers[0] must be a logger"),
        ({"workers": "2"}, "trainer.workers must be a whole number of at least 0, got '2'"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_by_its_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Trainer("cpu", **settings)
    assert str(refused.value).startswith(message)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("max_step", "Did you mean max_steps?"),
        ("accelerator", "It is Lightning's word for device."),
        ("gradient_clip_val", "It is Lightning's word for clip_norm."),
        ("output_dir", "It is LeRobot's word for run_dir."),
        (
            "val_check_interval",
            "It is Lightning's. Write, in the words of a run file: trainer.val_every: N, which",
        ),
        ("model", "Valid here: device, precision, grad_scaler,"),
    ],
)
def test_an_argument_that_does_not_exist_is_refused_with_the_one_that_is_meant(name: str, advice: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Trainer(**{name: 1})  # type: ignore[arg-type]
    assert str(refused.value).startswith(f"Trainer has no argument {name}.\n{advice}")


def test_too_many_arguments_are_pythons_own_error() -> None:
    with pytest.raises(TypeError, match="positional arguments"):
        Trainer("cpu", "no", 3)  # type: ignore[call-arg, arg-type]


# Where null is a value of its own, by what it comes to; elsewhere it is the default.
OWN = {"tf32": None, "log_every": None, "precision": "no"}


@pytest.mark.parametrize("name", inspect.signature(Trainer).parameters)
def test_null_is_the_same_in_python_in_a_file_and_on_the_command_line(name: str) -> None:
    default = inspect.signature(Trainer).parameters[name].default
    wanted = OWN.get(name, list(default) if isinstance(default, tuple) else default)
    for file, null in (("run.yaml", name), ("plain.yaml", "seed")):
        Path(file).write_text(BASE.replace("device: cpu, max_steps: 2, seed: 3", f"{null}: null"))
    in_a_file, typed = (
        resolve(read_run([file], words)).config.values["trainer"]
        for file, words in (("run.yaml", []), ("plain.yaml", [(f"trainer.{name}", "null")]))
    )
    assert in_a_file == typed
    assert in_a_file[name] == wanted

    arguments: dict[str, Any] = {"device": "cpu", name: None}
    in_python, left_out = Trainer(**arguments), Trainer(**{**arguments, name: wanted, "device": "cpu"})
    assert in_python._settings == left_out._settings
    assert in_python._choices.distribution.asked == left_out._choices.distribution.asked
    assert list(map(type, in_python.callbacks)) == list(map(type, left_out.callbacks))


def test_none_needs_no_cast_in_typed_code(tmp_path: Path) -> None:
    batch_size: int | None = None
    trainer = Trainer(None, None, batch_size=batch_size, workers=None, default_callbacks=None, callbacks=None)
    assert trainer._settings.batch_size == 8
    assert trainer._choices.device.asked == "auto"
    assert trainer._choices.precision.chosen == "no"
    assert any(isinstance(callback, MetricsLog) for callback in trainer.callbacks)


def test_a_setting_of_the_loss_scale_that_is_none_is_the_default() -> None:
    fp16 = FP16({"init_scale": None, "growth_interval": 10})
    assert fp16.settings == GradScalerConfig(growth_interval=10)


def test_zero_is_never_where_it_may_be() -> None:
    Trainer("cpu", val_every=0, log_every=0, run_dir=Path("run"), loggers=iter([Logger()]))
