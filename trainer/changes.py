"""How a resumed run takes on the differences that ``differences.py`` finds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from ..strategies.errors import CheckpointError, ConfigError
from .carried import ENDED, ROUNDED
from .checkpoint import CheckpointState
from .describe import class_of
from .differences import KEPT_FOR_SCHEDULES, MOVED, data_facts, settings_of
from .fused import make_safe
from .parts import optimizer_parts
from .run import Run
from .sources import set_statistics

# How an optimizer computes, and not what: this run's own, since the updates were made up for it.
_FORM = {"fused", "foreach", "capturable", "differentiable"}


@dataclass(slots=True)
class Report:
    """What became of each part of the run, for the plan's notes."""

    changed: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    reset: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """One line of each kind that there is."""
        return [f"{kind}: {'; '.join(parts)}" for kind in self.__slots__ if (parts := getattr(self, kind))]


def load_movers(
    run: Run, saved: CheckpointState, checkpoint: Path | str, found: Mapping[str, list[str]], report: Report
) -> None:
    """Load the optimizers and schedules; changed settings and schedules are those of this run, at the saved step.

    Raises:
        CheckpointError: The states do not fit.
        ConfigError: A new schedule ends before the saved step.
    """
    optimizers, schedules = run.updater.optimizers, run.schedules
    fresh = [[settings_of(group) for group in optimizer.param_groups] for optimizer in optimizers]
    anew = "optimizer" in found
    # A schedule that looks at metrics cannot be replayed, and moves the learning rate alone.
    others = set() if any(schedule.monitor for schedule in schedules) else MOVED
    replayed = bool({"optimizer", "schedule", "lr", *others} & set(found))
    try:
        if not anew:
            for optimizer, state in zip(optimizers, saved.optimizers, strict=True):
                optimizer.load_state_dict(_in_form_of(optimizer, optimizer_parts(run.distribution, state, optimizer)))
                make_safe(optimizer)
        if not replayed:
            for schedule, state in zip(schedules, saved.schedules, strict=True):
                schedule.load_state_dict(state)
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"The optimizers or schedules of {checkpoint} do not fit those of the run: {error}.\n"
            "Resume with the optimizer, schedule and policy that the run began with."
        ) from error
    for optimizer, groups in zip(optimizers, fresh, strict=True):
        if schedules:  # it has stepped, before the checkpoint: torch warns of a schedule that is ahead
            optimizer._opt_called = True  # type: ignore[attr-defined]
        for group, settings in zip(optimizer.param_groups, groups, strict=True):
            moved = {*MOVED, *KEPT_FOR_SCHEDULES} if replayed else set()
            group.update({name: value for name, value in settings.items() if name in moved or name in found})
    if anew:
        report.reset.append("the state of the optimizer")
    else:
        report.kept.append("the state of the optimizer")
    counters = saved.manifest["counters"]
    for schedule in schedules if replayed else ():
        past = counters["step" if schedule.interval == "step" else "epoch"]
        try:
            was_replayed = schedule.catch_up(past)
        except ValueError as error:
            raise ConfigError(
                f"The schedule {type(schedule.scheduler).__name__} cannot be brought to {schedule.interval} {past}, "
                f"where the run goes on: {error}.\nMake it at least as long as the run."
            ) from error
        if not was_replayed:
            report.reset.append(f"the schedule {type(schedule.scheduler).__name__}, whose past cannot be replayed")


def _in_form_of(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """A state as this run computes, fused or not: by that torch decides where its step counts go."""
    pairs = zip(state["param_groups"], optimizer.param_groups, strict=True)
    return {**state, "param_groups": [{**old, **{k: new[k] for k in _FORM & new.keys()}} for old, new in pairs]}


def place_in_data(run: Run, saved: CheckpointState, found: Mapping[str, list[str]], report: Report) -> None:
    """Move the position, just loaded from the checkpoint, to where the data goes on.

    After a change of windows that is the first whole window behind the samples that were seen; a source that carries
    its state goes on with the next sample, and the position only counts.
    """
    counters, data, manifest = run.counters, run.data, saved.manifest
    before, now, state = manifest.get("data", {}), data_facts(run), saved.callbacks.get("data")
    accumulate, unit = run.settings.accumulate, now["batch_size"] or run.distribution.world_size
    unit_before = before.get("batch_size") or manifest.get("world_size", 1)  # a micro-batch of all ranks
    if "data" in found:
        state = ENDED if counters.batch_in_epoch else None
        report.reset.append("the position in the data, which goes on with the next epoch")
    elif (unit_before, before.get("accumulate", accumulate)) != (unit, accumulate):
        seen = counters.batch_in_epoch * unit_before
        counters.batch_in_epoch = -(-seen // (unit * accumulate)) * accumulate
        goes_on = state is not None and data.carries_state
        if not goes_on:
            state = ROUNDED
        report.changed.append("the data goes on with the next sample" if goes_on else _left_out(run, seen, unit))
    else:
        report.kept.append("the position in the data")
    data.load_state(state)
    if now["batch_size"] and (had := unit_before * before.get("accumulate", accumulate)) != (has := unit * accumulate):
        keeps, rest = divmod(had, accumulate * run.distribution.world_size)
        advice = "" if rest else f" (batch_size={keeps} keeps it at {had})"
        report.changed.append(f"an update had {had} samples and has {has} now{advice}")


def _left_out(run: Run, seen: int, unit: int) -> str:
    """In words, what lies between the samples that were seen and the position."""
    samples, position = run.data.samples_per_epoch, run.counters.batch_in_epoch * unit
    left = position - seen if samples is None else min(position, samples) - min(seen, samples)
    if not left:
        return "the data goes on with the next sample"
    # Where the samples cannot be counted, the last micro-batch before may have been a small one.
    about = "" if samples is not None else "up to "
    what = "samples" if run.data.batch_size is not None else "micro-batches"
    return f"this epoch leaves out {about}{left} {what}, up to the next whole window"


def renew_statistics(
    run: Run, saved: CheckpointState, found: Mapping[str, list[str]], asked: Iterable[str], report: Report
) -> None:
    """Give the policy the statistics of the data as it is now, if that was asked for."""
    policy = run.policy
    if "statistics" not in found:
        return
    if not callable(getattr(policy, "set_statistics", None)):
        report.kept.append(f"{class_of(policy).__name__} as it is, which has no set_statistics() to take any")
    elif "statistics" in asked:
        set_statistics(policy, run.data.stats)
        policy.to(run.device.device)  # they may be new buffers
        run.precision.convert_module(policy)
        for model in saved.models.values():  # an average has the buffers of the policy
            model.update({name: value for name, value in policy.named_buffers() if name in model})
        report.reset.append("the policy's statistics, which are those of the data as it is now")
    else:
        report.kept.append("the policy's statistics, which are those of the data as it was")
