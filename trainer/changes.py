"""What a resumed run does otherwise than the run it goes on with.

applied                       device, precision, max_steps, clipping and the other plain settings
asked for by name, else       what moves the weights, and which samples come: ``NAMES``, and any setting of an
refused (``changes=``)        optimizer's groups under its own name, such as ``weight_decay``
refused                       another class of policy, another seed
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from ..strategies.errors import CheckpointError, ConfigError
from .checkpoint import CheckpointState
from .describe import class_path
from .prepare import set_statistics
from .run import Run
from .together import optimizer_parts

NAMES = ("lr", "optimizer", "schedule", "batch_size", "accumulate", "data", "statistics")

# What a schedule moves in an optimizer's groups, beside what it added to them.
_MOVED = {"lr", "initial_lr", "momentum", "betas"}
_PLAIN = ("max_steps", "max_epochs", "clip_norm", "clip_value", "non_finite", "max_skips", "deterministic", "compile")


@dataclass(slots=True)
class Report:
    """What became of each part of the run, for the plan's notes."""

    changed: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    reset: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """One line of each kind that there is; none when nothing changed."""
        if not (self.changed or self.reset):
            return []
        return [f"{kind}: {'; '.join(parts)}" for kind in self.__slots__ if (parts := getattr(self, kind))]


def data_facts(run: Run) -> dict[str, Any]:
    """What makes the data's order, and the sha256 of its statistics, in JSON; ``batch_size`` is that of all ranks."""
    size, ranks = run.data.batch_size, run.distribution.world_size
    return {
        "samples_per_epoch": run.data.samples_per_epoch,
        "batches_per_epoch": run.data.batches_per_epoch,
        "batch_size": None if size is None else size * ranks,
        "batch_size_of_a_rank": size,
        "accumulate": run.settings.accumulate,
        "statistics": None if run.data.stats is None else _digest(run.data.stats),
    }


def plain_settings(run: Run) -> dict[str, Any]:
    """The settings that may change freely, for the report of a later resume."""
    return {name: getattr(run.settings, name) for name in _PLAIN}


def check(run: Run, manifest: dict[str, Any], checkpoint: Path, asked: Iterable[str]) -> dict[str, list[str]]:
    """What differs, in words, by the name that allows it.

    Raises:
        ConfigError: It makes another run of it and was not asked for, or no change has a name that was.
    """
    asked = set(asked)
    keep = "Keep it as it was, or start a new run in another run_dir."
    before, now = str(manifest.get("policy")), class_path(run.policy)
    if before.rpartition(".")[2] != now.rpartition(".")[2]:  # a class may have moved to another module
        raise ConfigError(
            f"{checkpoint} belongs to a run that trains {before}, and this one trains {now}.\n"
            "Resume with the path of the run that is meant, or start a new run."
        )
    found = _movers(manifest.get("movers", {}), run.movers)
    for name, text in _data(manifest.get("data", {}), data_facts(run)):
        found[name].append(text)
    known = {*NAMES, *_group_settings(run), *found}
    for name in asked - known:
        near = get_close_matches(name, known, n=1, cutoff=0.75)
        advice = f"Did you mean {near[0]!r}?" if near else f"Use {', '.join(sorted(NAMES))}, or an optimizer's setting."
        raise ConfigError(f"changes names {name!r}, which no resume can change. {advice}")
    refused = [name for name in found if not {name, _wider(name)} & asked]
    if refused:
        shown = "; ".join(found[name][0] for name in refused)
        curve = (
            " A schedule whose total_steps was filled from max_steps keeps its curve when "
            "schedule.init_args.total_steps is written out."
        )
        raise ConfigError(
            f"The run that {checkpoint} belongs to would become another one: {shown}.\n{keep} If it is meant, resume "
            f"with changes={refused!r}, on the command line --changes={','.join(refused)}."
            f"{curve if 'schedule' in refused else ''}"
        )
    return found


def load_movers(
    run: Run, saved: CheckpointState, checkpoint: Path, found: Mapping[str, list[str]], report: Report
) -> None:
    """Load the optimizers and schedules; changed settings and schedules are those of this run, at the saved step.

    Raises:
        CheckpointError: The states do not fit.
    """
    optimizers, schedules = run.updater.optimizers, run.schedules
    fresh = [[_settings(group) for group in optimizer.param_groups] for optimizer in optimizers]
    anew = "optimizer" in found
    replayed = anew or "lr" in found or "schedule" in found
    try:
        if not anew:
            for optimizer, state in zip(optimizers, saved.optimizers, strict=True):
                optimizer.load_state_dict(optimizer_parts(run.distribution, state, optimizer))
        if not replayed:
            for schedule, state in zip(schedules, saved.schedules, strict=True):
                schedule.load_state_dict(state)
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"The optimizers or schedules of {checkpoint} do not fit those of the run: {error}.\n"
            "Resume with the optimizer, schedule and policy that the run began with."
        ) from error
    for optimizer, groups in zip(optimizers, fresh, strict=True):
        for group, settings in zip(optimizer.param_groups, groups, strict=True):
            moved = {*_MOVED, *(set(settings) - set(optimizer.defaults))} if replayed else set()
            group.update({name: value for name, value in settings.items() if name in moved or name in found})
    if anew:
        report.reset.append("the state of the optimizer")
    else:
        report.kept.append("the state of the optimizer")
    counters = saved.manifest["counters"]
    for schedule in schedules if replayed else ():
        if not schedule.catch_up(counters["step" if schedule.interval == "step" else "epoch"]):
            report.reset.append(f"the schedule {type(schedule.scheduler).__name__}, whose past cannot be replayed")


def place_in_data(run: Run, manifest: dict[str, Any], found: Mapping[str, list[str]], report: Report) -> None:
    """Move the position, just loaded from the checkpoint, to where the changed data goes on."""
    counters, data, before = run.counters, run.data, manifest.get("data", {})
    if "data" in found:
        if counters.batch_in_epoch and data.batches_per_epoch is not None:
            counters.batch_in_epoch = data.batches_per_epoch  # used up: the loop ends the epoch as it ends any
        elif counters.batch_in_epoch:
            counters.epoch, counters.batch_in_epoch = counters.epoch + 1, 0
        report.reset.append("the position in the data, which goes on with the next epoch")
    elif (now := data_facts(run)) and _windows_differ(before, now) and before.get("batch_size") and data.batch_size:
        samples = data.samples_per_epoch or counters.batch_in_epoch * before["batch_size"]
        seen = min(counters.batch_in_epoch * before["batch_size"], samples)
        window = now["batch_size"] * run.settings.accumulate
        counters.batch_in_epoch = -(-seen // window) * run.settings.accumulate
        if data.batches_per_epoch is not None:
            counters.batch_in_epoch = min(counters.batch_in_epoch, data.batches_per_epoch)
        left_out = min(counters.batch_in_epoch * now["batch_size"], samples) - seen
        report.changed.append(f"this epoch leaves out {left_out} samples, up to the next whole window" if left_out else
                              "the data goes on with the next sample")  # fmt: skip
    else:
        report.kept.append("the position in the data")


def renew_statistics(run: Run, found: Mapping[str, list[str]], asked: Iterable[str], report: Report) -> None:
    """Give the policy the statistics of the data as it is now, if that was asked for."""
    if "statistics" not in found:
        return
    if "statistics" in asked:
        set_statistics(run.policy, run.data.stats)
        report.reset.append("the policy's statistics, which are those of the data as it is now")
    else:
        report.kept.append("the policy's statistics, which are those of the data as it was")


def changed_settings(run: Run, manifest: dict[str, Any]) -> list[str]:
    """The plain settings that differ, in words."""
    before = manifest.get("settings", {})
    now = plain_settings(run)
    return [_differs(name, before[name], now[name]) for name in now if name in before and before[name] != now[name]]


def _movers(before: Mapping[str, Any], now: Mapping[str, Any]) -> defaultdict[str, list[str]]:
    found: defaultdict[str, list[str]] = defaultdict(list)
    for mover in {**before, **now}:
        if before.get(mover) == now.get(mover):
            continue
        part, _, setting = mover.partition(": ")
        if setting in ("lr", "initial_lr", "base_lrs", "_last_lr"):
            name = "lr"
        elif part.startswith("schedule"):
            name = "schedule"
        else:
            whole = setting in ("class", "parameters") or mover not in before or mover not in now
            name = "optimizer" if whole else setting
        found[name].append(_differs(mover, before.get(mover), now.get(mover)))
    for texts in found.values():
        texts.sort(key=lambda text: ": class" not in text)  # what else another class brings with it says less
    return found


def _data(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    resized = before.get("batch_size") != now["batch_size"]
    fewer_ranks = resized and before.get("batch_size_of_a_rank") == now["batch_size_of_a_rank"]  # or more: told as such
    for name, value in now.items():
        if name not in before or before[name] == value or name == "batch_size_of_a_rank":
            continue
        if (name == "batches_per_epoch" and resized) or (name == "batch_size" and fewer_ranks):
            continue
        if name == "statistics":
            yield name, "the data has other statistics"
        else:
            yield name if name in NAMES else "data", _differs(name, before[name], value)


def _windows_differ(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    return any(before.get(name) != now[name] for name in ("batch_size", "accumulate"))


def _wider(name: str) -> str:
    """The name that allows a change too, because it says more."""
    return "data" if name == "statistics" else name if name in NAMES and name != "lr" else "optimizer"


def _differs(name: str, before: Any, now: Any) -> str:
    return f"{name} was {before} and is now {now}"


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v.clone() if isinstance(v, Tensor) else v for k, v in group.items() if k != "params"}


def _group_settings(run: Run) -> set[str]:
    return {name for o in run.updater.optimizers for group in o.param_groups for name in _settings(group)}


def _digest(stats: Any) -> str:
    """The sha256 of nested statistics: names, and values as float64."""
    found = sha256()

    def add(path: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for key in sorted(value, key=str):
                add(f"{path}/{key}", value[key])
            return
        array = value.detach().cpu().double().numpy() if isinstance(value, Tensor) else np.asarray(value)
        numbers = array.dtype.kind in "biuf"
        found.update(path.encode() + (array.astype(np.float64).tobytes() if numbers else repr(value).encode()))

    add("", stats)
    return found.hexdigest()
