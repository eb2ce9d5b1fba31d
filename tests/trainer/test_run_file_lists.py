"""Lists in layered run files: replaced by their key, appended to by ``key+``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from run_parts import BASE, policyfit, write

from policyfit.strategies.errors import ConfigError
from policyfit.trainer.config import RunConfig, read_run, resolve


def _read(*layers: str, words: tuple[tuple[str, str], ...] = ()) -> RunConfig:
    files = write({f"{number}.yaml": text for number, text in enumerate(layers)})
    return read_run(files, words)


def _names(config: RunConfig) -> list[str]:
    return [item if isinstance(item, str) else item["class_path"] for item in config.values["trainer"]["callbacks"]]


@pytest.mark.parametrize(
    ("layers", "words", "expected"),
    [
        (["callbacks: [a.A]", "callbacks: [a.B]"], [], ["a.B"]),
        (["callbacks: [a.A]", "callbacks+: [a.B]"], [], ["a.A", "a.B"]),
        (["callbacks: [a.A]", "callbacks+: {class_path: a.B}"], [], ["a.A", "a.B"]),
        (["callbacks: [a.A]", "callbacks+: a.B"], [], ["a.A", "a.B"]),
        (["callbacks+: [a.A]", "callbacks+: [a.B, a.C]"], [], ["a.A", "a.B", "a.C"]),
        (["callbacks: null", "callbacks+: [a.A]"], [], ["a.A"]),
        (["seed: 3"], [("trainer.callbacks+", "a.A")], ["a.A"]),
        (["callbacks: [a.A]"], [("trainer.callbacks+", "a.B"), ("trainer.callbacks+", "[a.C]")], ["a.A", "a.B", "a.C"]),
        (["callbacks: [a.A]"], [("trainer.callbacks", "[a.B]"), ("trainer.callbacks+", "a.C")], ["a.B", "a.C"]),
        (["callbacks: [a.A]", "callbacks+: []"], [], ["a.A"]),
    ],
)
def test_a_list_is_replaced_by_its_key_and_appended_to_by_plus(
    layers: list[str], words: list[tuple[str, str]], expected: list[str]
) -> None:
    config = _read(*(f"trainer: {{{layer}}}\n" for layer in layers), words=tuple(words))
    assert _names(config) == expected


def test_a_list_of_numbers_may_be_appended_to_too() -> None:
    base = "policy: {class_path: run_parts.Policy, init_args: {sizes: [1, 2]}}\n"
    lab = "policy: {init_args: {sizes+: [3]}}\n"
    values = resolve(_read(base, lab, words=(("policy.sizes+", "4"),))).config.values
    assert values["policy"]["init_args"]["sizes"] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (
            ["trainer: {seed: 3}\n", "trainer: {seed+: 4}\n"],
            r"1\.yaml:1:11: trainer.seed\+ appends to a list, but .* is 3",
        ),
        (
            ["policy: run_parts.Policy\n", "policy: {init_args: {sizes+: [4]}}\n"],
            r"1\.yaml:1:22: .*sizes\+ appends .* none yet",
        ),
        (
            ["trainer: {callbacks: [a.A], callbacks+: [a.B]}\n"],
            r"0\.yaml:1:29: trainer.callbacks\+ and trainer.callbacks ex",
        ),
        (["trainer: {callbacks+: null}\n"], r"0\.yaml:1:11: trainer.callbacks\+ appends nothing, got null"),
    ],
)
def test_what_cannot_be_appended_is_refused_with_its_place(layers: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(_read(*layers))


def test_items_keep_the_place_where_each_was_written() -> None:
    config = _read(
        "trainer:\n  callbacks: [a.A]\n",
        "trainer:\n  callbacks+:\n    - a.B\n    - {class_path: a.C, init_args: {x: 1}}\n",
        words=(("trainer.callbacks+", "{class_path: a.D}"),),
    )
    place = {path: str(mark) for path, mark in config.marks.items()}
    callbacks: Any = ("trainer", "callbacks")
    assert place[callbacks] == "0.yaml:2:3"
    assert [place[(*callbacks, number)] for number in range(4)] == [
        "0.yaml:2:15",
        "1.yaml:3:7",
        "1.yaml:4:7",
        "command line",
    ]
    assert place[(*callbacks, 2, "init_args", "x")] == "1.yaml:4:37"
    assert place[(*callbacks, 3, "class_path")] == "command line"


def test_a_class_in_a_list_may_be_its_path_alone_and_is_built() -> None:
    Path("run.yaml").write_text(BASE)
    said = policyfit("fit", "run.yaml", "--eval=null", "--trainer.run_dir=out", "--trainer.callbacks+=policyfit.EMA")
    assert said.code == 0
    assert Path("out/checkpoints/last/pretrained_model_ema").is_dir()
    printed = policyfit("fit", "out/config.yaml", "--print_config").out
    assert "class_path: policyfit.EMA" in printed


def test_a_class_of_policyfits_own_may_be_its_name_alone_wherever_a_class_is_named() -> None:
    Path("run.yaml").write_text(
        "policy: run_parts.Policy\nschedule: WarmupCosine\ntrainer:\n  max_steps: 2\n"
        "  precision: {class_path: FP16, init_args: {allow_cpu: true}}\n"
        "  callbacks: [EMA, {class_path: Checkpoint, init_args: {every_steps: 5}}]\n"
    )
    values = resolve(read_run(["run.yaml"])).config.values
    assert values["schedule"]["class_path"] == "policyfit.WarmupCosine"
    Path("lab.yaml").write_text("schedule: {class_path: policyfit.WarmupCosine, init_args: {warmup_steps: 1}}\n")
    layered = resolve(read_run(["lab.yaml", "run.yaml"])).config.values["schedule"]
    assert layered["init_args"] == {"warmup_steps": 1, "total_steps": 2}
    assert values["trainer"]["precision"]["class_path"] == "policyfit.FP16"
    assert [spec["class_path"] for spec in values["trainer"]["callbacks"]] == ["policyfit.EMA", "policyfit.Checkpoint"]


def test_the_folders_of_modules_of_all_layers_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Path.cwd() / "run"
    for folder in ("run/parts", "run/lab", "other"):
        Path(folder).mkdir(parents=True)
    monkeypatch.chdir(here)
    config = _read("code: [parts]\n", "code: [., ../other]\n", words=(("code", "[lab]"),))
    assert config.values["code"] == [str(here / "parts"), str(here), str(here.parent / "other"), str(here / "lab")]
    for layers, words in ((["code+: [parts]\n"], ()), (["code: [.]\n"], (("code+", "[lab]"),))):
        with pytest.raises(ConfigError, match=r"code\+ is not needed: the folders of all layers are kept"):
            _read(*layers, words=words)
