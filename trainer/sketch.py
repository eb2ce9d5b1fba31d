"""An optimizer that is looked at and never stepped, made without the second that importing torch's compiler takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch.optim import Optimizer

from .recipe import Recipe


def sketched(recipe: Recipe) -> Callable[[Any], Any]:
    """What makes the recipe's optimizer for a plan: the class, groups and checks of the real one.

    ``Optimizer.add_param_group`` is wrapped so that torch's compiler leaves it alone, and the wrapper imports the
    compiler. A plan compiles nothing, so the function inside is called.

    Source: torch._compile._disable_dynamo (2.13), which hands the function on as ``__wrapped__``.
    """
    kind, inner = recipe.target, getattr(Optimizer.add_param_group, "__wrapped__", None)
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)) or inner is None:
        return recipe.build
    if kind.add_param_group is not Optimizer.add_param_group:  # it does something of its own
        return recipe.build
    light = type(kind.__name__, (kind,), {"__module__": kind.__module__, "add_param_group": inner})

    def make(parameters: Any) -> Any:
        optimizer = replace(recipe, target=light).build(parameters)
        optimizer.__class__ = kind
        return optimizer

    return make
