"""What a run was put together from, as far as its objects say: for ``config.yaml`` and for a later resume."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, is_dataclass
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

from torch import nn

from .settings import Settings


def policy_config(policy: nn.Module) -> dict[str, Any]:
    """``policy.config`` if it has one that JSON can hold, else nothing: the arguments that build it again."""
    config = getattr(policy, "config", {})
    values = asdict(config) if is_dataclass(config) and not isinstance(config, type) else config
    try:
        plain = json.loads(json.dumps(values, allow_nan=False))
    except (TypeError, ValueError):
        return {}
    return plain if isinstance(plain, dict) else {}


def frozen(policy: nn.Module) -> list[str]:
    """The names of the parameters that are not trained now."""
    return [name for name, parameter in policy.named_parameters() if not parameter.requires_grad]


def written_arguments(config: dict[str, Any] | None, *path: str) -> dict[str, str] | None:
    """The ``init_args`` of what a run's file has at this path, each as its repr; ``None`` without a file."""
    if config is None:
        return None
    part = config
    for name in (*path, "init_args"):
        part = part.get(name) or {}
    return {name: repr(value) for name, value in part.items()}


def describe(settings: Settings, device: str, precision: str, policy: nn.Module, seed: int) -> dict[str, Any]:
    """``config.yaml`` of a run without a run file: the policy's class and arguments, and the trainer's settings.

    Data, callbacks and loggers were given as objects, which a file cannot repeat. A policy is left out whose
    arguments are not known: one built with others would act differently.
    """
    recipe = _recipe(policy)
    trainer = {name: getattr(settings, name) for name in Settings.__dataclass_fields__}
    return {
        **({} if recipe is None else {"code": _code(policy), "policy": recipe}),
        "trainer": {"device": device, "precision": precision, **trainer, "seed": seed},
    }


def _recipe(policy: nn.Module) -> dict[str, Any] | None:
    """What makes the policy again, or ``None`` when its class has arguments and it does not say which it got."""
    kinds = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    takes = [name for name, p in signature(class_of(policy)).parameters.items() if p.kind not in kinds]
    config = policy_config(policy)
    if (takes and not config) or class_path(policy).startswith("__main__"):  # a notebook has no file to import
        return None
    return {"class_path": class_path(policy), "init_args": {"config": config} if takes == ["config"] else config}


def class_of(policy: nn.Module) -> type[nn.Module]:
    """The class that the user wrote: sharding puts one of its own over it."""
    cls = type(policy)
    return cls.__bases__[-1] if cls.__module__.startswith("torch.distributed.fsdp") else cls


def class_path(policy: nn.Module) -> str:
    """Where the policy's class can be imported from; one of a script is in the module that the script's file makes."""
    cls = class_of(policy)
    script = getattr(sys.modules.get(cls.__module__), "__file__", None) if cls.__module__ == "__main__" else None
    return f"{Path(script).stem if script else cls.__module__}.{cls.__qualname__}"


def _code(policy: nn.Module) -> list[str]:
    """The folder from which the policy's module is imported, unless it belongs to an installed package."""
    module = class_of(policy).__module__
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None or {"site-packages", "dist-packages"} & set(Path(file).parts):
        return []
    depth = 0 if module == "__main__" else module.count(".")
    depth += Path(file).name == "__init__.py"
    return [str(Path(file).resolve().parents[depth])]
