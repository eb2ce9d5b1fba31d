"""The JSON schema of run files: what an editor takes and what it marks."""

from __future__ import annotations

import json
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from run_parts import BASE, layer, policyfit

from policyfit import Trainer
from policyfit.trainer import strict_yaml
from policyfit.trainer.hints import parameters
from policyfit.trainer.schema import schema

SCHEMA = schema()
KINDS: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "number": (int, float),
    "null": type(None),
    "boolean": bool,
}


def faults(value: Any, rule: Any, path: str = "") -> list[str]:
    """Where a value breaks a schema: the keywords of draft 7 that ours uses, and no others."""
    unknown = set(rule) - {"$ref", "$schema", "title", "definitions", "description", "examples", *HANDLED}
    assert not unknown, unknown
    if "$ref" in rule:
        rule = SCHEMA["definitions"][rule["$ref"].removeprefix("#/definitions/")]
    return [fault for keyword, check in HANDLED.items() if keyword in rule for fault in check(value, rule, path)]


def _type(value: Any, rule: Any, path: str) -> list[str]:
    kinds = rule["type"] if isinstance(rule["type"], list) else [rule["type"]]
    is_number = isinstance(value, float) and value.is_integer() and "integer" in kinds
    fine = is_number or any(isinstance(value, KINDS[kind]) for kind in kinds)
    return [] if fine and not (isinstance(value, bool) and "boolean" not in kinds) else [f"{path}: no {kinds}"]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _properties(value: Any, rule: Any, path: str) -> list[str]:
    inner = [(key, value[key]) for key in rule["properties"] if isinstance(value, dict) and key in value]
    return [fault for key, found in inner for fault in faults(found, rule["properties"][key], f"{path}.{key}")]


def _additional(value: Any, rule: Any, path: str) -> list[str]:
    assert rule["additionalProperties"] is False
    return [
        f"{path}.{key}: unknown" for key in (value if isinstance(value, dict) else ()) if key not in rule["properties"]
    ]


def _if(value: Any, rule: Any, path: str) -> list[str]:
    return [] if faults(value, rule["if"], path) else faults(value, rule["then"], path)


HANDLED: dict[str, Any] = {
    "type": _type,
    "properties": _properties,
    "additionalProperties": _additional,
    "if": _if,
    "then": lambda value, rule, path: [],
    "required": lambda v, rule, path: [
        f"{path}.{k}: missing" for k in rule["required"] if isinstance(v, dict) and k not in v
    ],
    "enum": lambda v, rule, path: (
        [] if any(type(v) is type(c) and v == c for c in rule["enum"]) else [f"{path}: none of"]
    ),
    "minimum": lambda v, rule, path: [f"{path}: small"] if _is_number(v) and v < rule["minimum"] else [],
    "exclusiveMinimum": lambda v, rule, path: (
        [f"{path}: small"] if _is_number(v) and v <= rule["exclusiveMinimum"] else []
    ),
    "pattern": lambda v, rule, path: (
        [] if not isinstance(v, str) or re.search(rule["pattern"], v) else [f"{path}: pattern"]
    ),
    "items": lambda v, rule, path: [
        f for i in (v if isinstance(v, list) else ()) for f in faults(i, rule["items"], path)
    ],
    "allOf": lambda v, rule, path: [fault for inner in rule["allOf"] for fault in faults(v, inner, path)],
    "anyOf": lambda v, rule, path: (
        [] if any(not faults(v, inner, path) for inner in rule["anyOf"]) else [f"{path}: {v!r} fits none"]
    ),
}


def _marked(text: str) -> list[str]:
    return faults(strict_yaml.read_text(text, "run.yaml").value, SCHEMA)


def test_the_command_prints_the_schema_as_json() -> None:
    assert json.loads(policyfit("schema").out) == SCHEMA


def test_the_example_and_a_run_as_resolved_are_not_marked() -> None:
    example = Path(__file__).parents[2] / "examples/pick_place/RUN.yaml"
    assert faults(strict_yaml.read_file(example).value, SCHEMA) == []
    Path("run.yaml").write_text(BASE)
    assert _marked(policyfit("fit", "run.yaml", "--print_config").out) == []


def test_it_knows_every_key_of_the_trainer_with_what_it_means() -> None:
    keys = SCHEMA["properties"]["trainer"]["properties"]
    assert set(keys) == {*parameters(Trainer), "callbacks+", "loggers+"}
    assert keys["max_steps"]["description"].startswith("Updates that land")
    assert all(keys[name]["description"] for name in parameters(Trainer))
    assert "bf16" in keys["precision"]["examples"]


def test_every_class_that_it_knows_can_be_named_so() -> None:
    conditions = SCHEMA["definitions"]["class"]["anyOf"][1]["allOf"]
    names = [condition["if"]["properties"]["class_path"]["enum"][0] for condition in conditions]
    assert {
        "policyfit.Checkpoint",
        "policyfit.EMA",
        "policyfit.FP16",
        "policyfit.WarmupCosine",
        "torch.optim.AdamW",
    } <= {*names}
    for name in names:
        module, _, attribute = name.rpartition(".")
        assert isinstance(getattr(import_module(module), attribute), type)


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("trainer.precision", "no"),
        ("trainer.precision", "{class_path: policyfit.FP16, init_args: {allow_cpu: yes}}"),
        ("trainer.tf32", "null"),
        ("trainer.tf32", "no"),
        ("trainer.deterministic", "On"),
        ("trainer.max_steps", "1e3"),
        ("trainer.max_steps", "null"),
        ("trainer.max_steps", '"$${env:STEPS}"'),
        ("trainer.clip_norm", "1"),
        ("trainer.workers", "auto"),
        ("trainer.workers", "0"),
        ("trainer.val_every", "0"),
        ("trainer.device", "cuda:1"),
        ("trainer.precision", "bf16-mixed"),
        ("trainer.precision", "Off"),
        ("trainer.precision", '"$${env:P}"'),
        ("trainer.distributed", "fsdp"),
        ("policy", '"$${env:P}"'),
        ("policy.class_path", '"$${env:P}"'),
        ("trainer.grad_scaler", "{init_scale: 1e3}"),
        ("trainer.callbacks", "[policyfit.EMA, {class_path: my.Callback, init_args: {anything: [1]}}]"),
        ("trainer.callbacks+", "policyfit.EMA"),
        ("trainer.callbacks", "[EMA, {class_path: EMA, init_args: {decay: 0.5}}]"),
        ("trainer.callbacks", "[{class_path: policyfit.Checkpoint, init_args: {every_steps: 5, mode: max}}]"),
        ("optimizer", "torch.optim.SGD"),
        ("optimizer", "null"),
        ("schedule", "{class_path: policyfit.WarmupCosine, init_args: {warmup_steps: 3}}"),
        ("trainer", "null"),
        ("code", "[., ../parts]"),
    ],
)
def test_what_is_meant_is_not_marked(key: str, text: str) -> None:
    assert _marked(layer(key, text)) == []


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("trianer", "{}"),
        ("trainer.max_step", "3"),
        ("trainer.max_steps", "ten"),
        ("trainer.max_steps", "1.5"),
        ("trainer.max_steps", "-1"),
        ("trainer.batch_size", "0"),
        ("trainer.clip_norm", "0"),
        ("trainer.seed", "-1"),
        ("trainer.precision", "fp8"),
        ("trainer.device", "gpu"),
        ("trainer.device", "cuda:01"),
        ("trainer.distributed", "x"),
        ("eval.episodes", "0"),
        ("trainer.tf32", "maybe"),
        ("trainer.non_finite", "skp"),
        ("trainer.workers", "many"),
        ("trainer.grad_scaler", "{init_scal: 1}"),
        ("trainer.callbacks", "{}"),
        ("trainer.callbacks", "[3]"),
        ("trainer.callbacks", "[EMAA]"),
        ("trainer.callbacks", "[{class_path: EMA, init_args: {deca: 0.5}}]"),
        ("trainer.callbacks", "[{class_path: policyfit.EMA, init_args: {deca: 0.5}}]"),
        ("trainer.callbacks", "[{class_path: policyfit.Checkpoint, init_args: {mode: best}}]"),
        ("trainer.callbacks", "[{init_args: {decay: 0.5}}]"),
        ("trainer.precision", "{class_path: policyfit.BF16, init_args: {allow_cpu: true}}"),
        ("optimizer", "{class_path: torch.optim.AdamW, init_args: {lrr: 1}}"),
        ("optimizer", "{class_path: torch.optim.AdamW, lr: 1}"),
        ("schedule", "{class_path: policyfit.WarmupCosine, init_args: {optimizer: 3}}"),
        ("policy", "Policy"),
        ("policy", "null"),
        ("data.trian", "a.B"),
        ("eval.episode", "3"),
    ],
)
def test_what_would_be_refused_is_marked(key: str, text: str) -> None:
    assert _marked(layer(key, text)) != []
