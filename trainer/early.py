"""What a run refuses before it makes its data, which may be recorded or downloaded at length."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from types import NoneType
from typing import Literal, TypeVar

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ..strategies.device import CPUDevice
from ..strategies.errors import ConfigError, PolicyfitError
from .config import RunRecipe
from .optimizer import trainable
from .policy import adapt, brings
from .recipe import Recipe
from .remote import is_url
from .rng import preserved
from .run_dir import newest_run
from .sketch import sketched

T = TypeVar("T")

_KNOWN = ("torch.optim", "policyfit.")  # whose constructors are known to leave parameters as they are
_REFUSALS = (ValueError, TypeError, ArithmeticError, NoneType)  # None: what was made is no optimizer


def check_resumable(resume: str | None, run_dir: str | None) -> None:
    """Refuse early to go on with what is not there; that it is whole is seen when it is read.

    Raises:
        ConfigError: There is no such run, or it has no checkpoint.
    """
    if resume in (None, "auto") or is_url(resume):
        return
    where = Path(resume) if resume != "last" else Path(run_dir) if run_dir else newest_run()
    if where.is_symlink():  # as last is, beside which there may be others
        return
    if not any(True for within in ("", "*/", "checkpoints/*/") for _ in where.glob(f"{within}manifest.json")):
        option = "--resume" if resume == "last" else f"--resume={resume}"
        remedy = "Give a run's folder, such as runs/NAME."
        if (where / "plan.json").exists():
            remedy = f"It ended before its first one. --resume=auto --trainer.run_dir={where} begins it anew there."
        raise ConfigError(f"{option}: there is no checkpoint in {where}.\n{remedy}")


def check_trainable(run: RunRecipe, policy: nn.Module) -> None:
    """Refuse a policy that the run cannot train, and what it names to train it by.

    Raises:
        PolicyfitError: The policy has no loss or no data, or the optimizer or the schedule cannot be made.
    """
    with run.recipes[("policy",)].placed():
        adapt(policy)
    check_data(run, policy, "train")
    _rehearse(policy, run.recipes.get(("optimizer",)), run.recipes.get(("schedule",)))


def check_data(run: RunRecipe, policy: nn.Module, kind: Literal["train", "val"]) -> None:
    """Refuse a run without data.

    Raises:
        ConfigError: It names none, and its policy brings none.
    """
    if ("data", kind) not in run.recipes and not brings(policy, f"{kind}_dataloader"):
        purpose, name = {"train": "train", "val": "validate"}[kind], type(policy).__name__
        raise run.config.fault(
            ("data",),
            f"There is nothing to {purpose} on: the run names no data.{kind}, and {name} brings none.\n"
            f"Write data: {{{kind}: {{class_path: module.Class}}}} in its file.",
        )


def _rehearse(policy: nn.Module, optimizer: Recipe | None, schedule: Recipe | None) -> None:
    """Make the optimizer and the schedule that a run names, and let the schedule step.

    An optimizer of one's own may do what it likes with its parameters, so it gets stand-ins: of their shapes, all zero.

    Raises:
        PolicyfitError: One of them refuses its arguments, or the schedule cannot step.
    """
    if optimizer is None:
        return
    parameters = trainable(policy)
    if not _is_known(optimizer):
        parameters = [_stand_in(p) for p in parameters]
    made = _tried(optimizer, lambda: sketched(optimizer)(parameters))
    if made is None or schedule is None:
        return
    scheduler = _tried(schedule, lambda: schedule.build(made))
    if scheduler is None or isinstance(scheduler, ReduceLROnPlateau):  # which needs a metric
        return

    def step() -> None:
        try:
            scheduler.step()
        except Exception as error:
            raise schedule.explained(error) from error

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # it moves before its optimizer
        _tried(schedule, step)


def _stand_in(parameter: nn.Parameter) -> nn.Parameter:
    """One of the same shape and type, and with the same marks of its owner's, in the memory of one number."""
    found = nn.Parameter(torch.zeros((), dtype=parameter.dtype).expand(parameter.shape))
    vars(found).update(vars(parameter))
    return found


def _is_known(recipe: Recipe) -> bool:
    return recipe.target.__module__.startswith(_KNOWN)


def _tried(recipe: Recipe, attempt: Callable[[], T]) -> T | None:
    """What the attempt gives; ``None`` where one's own fails without refusing: stand-ins may not do for it."""
    try:
        with preserved(CPUDevice()):
            return attempt()
    except PolicyfitError as error:
        if _is_known(recipe) or isinstance(error.__cause__, _REFUSALS):
            raise
        return None
