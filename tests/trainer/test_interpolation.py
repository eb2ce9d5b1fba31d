"""Variables of the environment in run files."""

from __future__ import annotations

from typing import Any

import pytest

from policyfit.strategies.errors import ConfigError
from policyfit.trainer.strict_yaml import read_text, read_word, write


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUN_COUNT", "8")
    monkeypatch.setenv("RUN_NAME", "arm")
    monkeypatch.setenv("RUN_EMPTY", "")
    monkeypatch.setenv("RUN_NESTED", "${env:RUN_COUNT}")
    monkeypatch.delenv("RUN_UNSET", raising=False)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("${env:RUN_COUNT}", 8),
        ('"${env:RUN_COUNT}"', "8"),
        ("'${env:RUN_COUNT}'", "8"),
        ("${env:RUN_NAME}", "arm"),
        ("runs/${env:RUN_NAME}-${env:RUN_COUNT}", "runs/arm-8"),
        ("1${env:RUN_COUNT}", 18),
        ("${env:RUN_UNSET:-1e-4}", 1e-4),
        ("${env:RUN_EMPTY:-no}", "no"),
        ("${env:RUN_COUNT:-9}", 8),
        ("${env:RUN_UNSET:-}", None),
        ("x${env:RUN_UNSET:-}", "x"),
        ("${env:RUN_NESTED}", "${env:RUN_COUNT}"),
        ("$HOME/runs", "$HOME/runs"),
        ("~/runs", "~/runs"),
        ("$${HOME}", "${HOME}"),
        ('"$${env:RUN_COUNT}"', "${env:RUN_COUNT}"),
        ("a$b{c}", "a$b{c}"),
        ('["${env:RUN_COUNT}", {a: "${env:RUN_NAME}"}]', ["8", {"a": "arm"}]),
    ],
)
def test_a_variable_means_the_same_in_a_file_and_on_the_command_line(text: str, value: Any) -> None:
    for found in (read_text(f"key: {text}\n", "run.yaml").value["key"], read_word(text, "--key")):
        assert found == value
        assert type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("${env:RUN_UNSET}", "${env:RUN_UNSET} needs the environment variable RUN_UNSET, which is not set."),
        ("${env:RUN_EMPTY}", "${env:RUN_EMPTY} needs the environment variable RUN_EMPTY, which is empty."),
        ("${RUN_NAME}", "${RUN_NAME} names no variable of the environment.\nWrite ${env:RUN_NAME}"),
        ("${env:RUN_NAME", "${env:RUN_NAME names no variable of the environment."),
        ("${env:}", "${env:} names no variable of the environment."),
        ('"${trainer.seed}"', "${trainer.seed} names no variable of the environment."),
    ],
)
def test_what_is_no_variable_is_refused_with_its_place(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_text(f"a:\n  key: {text}\n", "run.yaml")
    assert str(refused.value).startswith(f"run.yaml:2:8: a.key: {message}")
    with pytest.raises(ConfigError) as refused:
        read_word(text, "--key")
    assert message in str(refused.value)


def test_text_that_looks_like_a_variable_survives_being_written() -> None:
    value = {"${a}": ["${env:RUN_COUNT}", "$${x}", "$$${", "\x07${env:RUN_NAME}", "$HOME", "${"]}
    assert read_text(write(value), "run.yaml").value == value
