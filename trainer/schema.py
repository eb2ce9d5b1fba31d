"""The JSON schema of a run file, from the same signatures that check one, so that an editor completes and checks it.

It knows policyfit's own words. Arguments of one's own classes are open: they are checked when the run is read.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import is_dataclass
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from .. import callbacks
from ..strategies.mixed import BF16, FP16
from .config import Evaluation
from .hints import NO, YES, options, parameters
from .resolve import DEVICE, DISTRIBUTIONS, NO_PRECISION, PRECISIONS
from .schedule import WarmupCosine
from .trainer import Trainer

Schema = dict[str, Any]


def _cased(words: Iterable[str]) -> list[str]:
    """The words as a person may write them, each once."""
    listed = list(words)
    return list(dict.fromkeys([*listed, *map(str.capitalize, listed)]))


CLASS: Schema = {"$ref": "#/definitions/class"}
NULL: Schema = {"type": "null"}
VARIABLE: Schema = {"type": "string", "pattern": r"\$\{env:"}
EXAMPLES = {
    "device": ["auto", "cpu", "cuda", "cuda:0", "mps", "xpu"],
    "precision": ["no", "bf16", "fp16", "auto"],
    "distributed": ["auto", *DISTRIBUTIONS],
}
#: The ranges of the trainer's and the evaluation's keys.
_LEAST = {
    **dict.fromkeys(("max_steps", "max_epochs", "batch_size", "accumulate", "max_skips", "episodes"), 1),
    **dict.fromkeys(("workers", "val_every", "log_every", "seed"), 0),
}
LIMITS: dict[str, Schema] = {
    **{name: {"minimum": least} for name, least in _LEAST.items()},
    **{name: {"exclusiveMinimum": 0} for name in ("clip_norm", "clip_value")},
    "device": {"pattern": f"^({DEVICE.pattern})$"},
    "precision": {"enum": [*PRECISIONS, *_cased(NO_PRECISION)]},
    "distributed": {"enum": ["auto", *DISTRIBUTIONS]},
}
_NARROWED: list[Schema] = [{"type": "integer"}, {"type": "number"}, {"type": "string"}]
_BOOLEANS = [True, False, *_cased(word for word in YES + NO if word not in ("true", "false"))]
_PLAIN: dict[Any, Schema] = {
    bool: {"enum": _BOOLEANS},
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
    NoneType: NULL,
}


def schema() -> Schema:
    """The schema of a whole run file, in JSON Schema's draft 7, which editors read."""
    optional = _any_of([CLASS, NULL])
    trainer = _limited(_arguments(Trainer))
    for name in ("callbacks", "loggers"):
        more = f"Appended to the {name} of the files before."
        trainer["properties"][f"{name}+"] = _any_of([{"type": "array", "items": CLASS}, CLASS]) | {"description": more}
    evaluation = _limited(_arguments(Evaluation))
    evaluation["properties"]["env"] = optional
    sections = {
        "policy": _described(CLASS, "What is trained, a torch.nn.Module."),
        "data": _described(_object({"train": optional, "val": optional}), "Datasets, DataLoaders or iterables."),
        "trainer": _described(trainer, "How it is trained: the arguments of Trainer."),
        "optimizer": _described(optional, "A torch.optim.Optimizer; wins over the policy's own."),
        "schedule": _described(optional, "A learning rate schedule, which counts updates that landed."),
        "eval": _described(evaluation, "The environment that the policy acts in after the fit."),
        "code": {"type": "array", "items": {"type": "string"}, "description": "Folders of modules; [.] is the file's."},
    }
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "A run of policyfit",
        **_object(sections),
        "definitions": {"class": _class()},
    }


def _class() -> Schema:
    """A class named by its path, or with its arguments; those of policyfit and some of torch are checked."""
    own = "|".join(_short(name) for name in _known() if _short(name) != name)
    path = {"type": "string", "pattern": rf"^([A-Za-z_]\w*(\.[A-Za-z_]\w*)+|{own})$|{VARIABLE['pattern']}"}
    named = _object({"class_path": path, "init_args": {}, "dict_kwargs": {"type": ["object", "null"]}})
    named |= {"type": "object", "required": ["class_path"]}
    named["allOf"] = [
        {
            "if": {"properties": {"class_path": {"enum": list(dict.fromkeys([name, _short(name)]))}}},
            "then": {"properties": {"init_args": _any_of([_arguments(target), NULL])}},
        }
        for name, target in _known().items()
    ]
    return _any_of([path | {"examples": sorted(_known())}, named])


def _known() -> dict[str, type]:
    """Classes whose arguments an editor may know."""
    built_in = [found for name, found in vars(callbacks).items() if name in callbacks.__all__ and name != "Callback"]
    own = {f"policyfit.{found.__name__}": found for found in (*built_in, FP16, BF16, WarmupCosine)}
    return own | {f"torch.optim.{found.__name__}": found for found in (Adam, AdamW, SGD)}


def _short(name: str) -> str:
    """policyfit's own classes may be named without their module."""
    return name.removeprefix("policyfit.")


def _arguments(target: type) -> Schema:
    """The arguments of a class as the keys of a mapping; null is the default."""
    given = 1 if issubclass(target, Optimizer | LRScheduler) else 0  # the parameters, or the optimizer
    texts = _descriptions(target)
    keys = {}
    for name, parameter in list(parameters(target).items())[given:]:
        whole = any(is_dataclass(option) for option in parameter.options)  # its fields are the keys of the mapping
        members = [_type(o) for o in parameter.options if not (whole and _is_mapping(o))]
        key = _any_of([*members, NULL, VARIABLE])
        key = _described(key, texts[name]) if name in texts else key
        keys[name] = {**key, **({"examples": EXAMPLES[name]} if name in EXAMPLES else {})}
    return _object(keys)


def _limited(arguments: Schema) -> Schema:
    """The keys with the values that are in range; what a type alone says is narrowed."""
    for name, limit in LIMITS.items():
        if name in arguments["properties"]:
            key = arguments["properties"][name]
            key["anyOf"] = [{**way, **limit} if way in _NARROWED else way for way in key["anyOf"]]
    return arguments


def _type(hint: Any) -> Schema:
    origin, arguments = get_origin(hint), get_args(hint)
    if hint in _PLAIN:
        return _PLAIN[hint]
    if origin is Literal:
        return {"enum": list(arguments)}
    if _is_mapping(hint):
        return {"type": "object"}
    if isinstance(origin, type) and issubclass(origin, Iterable):
        items = [_type(option) for option in options(arguments[0])]
        return {"type": "array", "items": _any_of(items)}
    if isinstance(hint, type) and is_dataclass(hint):
        return _arguments(hint)
    return CLASS if isinstance(hint, type) else {}


def _is_mapping(hint: Any) -> bool:
    origin = get_origin(hint)
    return isinstance(origin, type) and issubclass(origin, Mapping)


def _any_of(schemas: list[Schema]) -> Schema:
    different = [schema for place, schema in enumerate(schemas) if schema not in schemas[:place]]
    return {} if {} in different else {"anyOf": different} if len(different) > 1 else different[0]


def _object(properties: dict[str, Schema]) -> Schema:
    return {"type": ["object", "null"], "properties": properties, "additionalProperties": False}


def _described(of: Schema, text: str) -> Schema:
    """A reference hides what stands beside it in draft 7, so it is put inside."""
    return {**({"allOf": [of]} if "$ref" in of else of), "description": text}


def _descriptions(target: Callable[..., Any]) -> dict[str, str]:
    """What the docstring says of each argument."""
    block = (inspect.getdoc(target) or "").partition("Args:\n")[2]
    found = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", block, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in found}
