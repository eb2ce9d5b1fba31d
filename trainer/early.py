"""What a run refuses before it makes its data, which may be recorded or downloaded at length."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Literal

from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ..strategies.errors import ConfigError
from .config import RunRecipe
from .optimizer import trainable
from .policy import adapt, brings
from .recipe import Recipe
from .remote import is_url
from .run_dir import newest_run
from .sketch import sketched

_KNOWN = ("torch.optim", "policyfit.")  # whose constructors are known to leave parameters as they are


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
        raise ConfigError(f"{option}: there is no checkpoint in {where}.\nGive a run's folder, such as runs/NAME.")


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
    """Make the optimizer and the schedule that a run names, if they are torch's or ours, and let the schedule step.

    Raises:
        PolicyfitError: One of them refuses its arguments, or the schedule cannot step.
    """
    if optimizer is None or not optimizer.target.__module__.startswith(_KNOWN):
        return
    made = sketched(optimizer)(trainable(policy))
    if schedule is None or not schedule.target.__module__.startswith(_KNOWN):
        return
    scheduler = schedule.build(made)
    if isinstance(scheduler, ReduceLROnPlateau):  # which needs a metric
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # it moves before its optimizer
        try:
            scheduler.step()
        except Exception as error:
            raise schedule.explained(error) from error
