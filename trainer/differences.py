"""What is otherwise in a resumed run than in the run it goes on with, and whether it may be.

applied                       device, precision, max_steps, clipping and the other plain settings
asked for by name, else       what moves the weights, and which samples come: ``NAMES``, and any setting of an
refused (``changes=``)        optimizer's groups under its own name, such as ``weight_decay``
refused                       another class of policy, another seed
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from ..strategies.errors import ConfigError
from .describe import class_path, written_arguments
from .run import Run

#: What a change may be asked for by, besides any setting of an optimizer's groups.
NAMES = ("lr", "optimizer", "schedule", "batch_size", "accumulate", "data", "statistics")

# What a schedule moves in an optimizer's groups, and what some keep there for it.
MOVED = {"lr", "momentum", "betas"}
KEPT_FOR_SCHEDULES = {"initial_lr", "min_lr", "max_lr", "base_momentum", "max_momentum"}
# Asked for by name, these are made anew even where no difference can be seen.
_ALWAYS = ("data", "statistics", "optimizer", "schedule")
_PLAIN = (
    "max_steps", "max_epochs", "clip_norm", "clip_value", "non_finite", "max_skips", "val_every", "log_every", "tf32",
    "deterministic", "compile",
)  # fmt: skip


def data_facts(run: Run) -> dict[str, Any]:
    """What makes the data's order, and the sha256 of its statistics, in JSON.

    ``batch_size`` is that of all ranks; ``arguments`` are those of the dataset in the run's file, if it has one.
    """
    size, ranks = run.data.batch_size, run.distribution.world_size
    return {
        **run.data.facts,
        "batch_size": None if size is None else size * ranks,
        "batch_size_of_a_rank": size,
        "accumulate": run.settings.accumulate,
        "statistics": None if run.data.stats is None else _digest(run.data.stats),
        "arguments": written_arguments(run.trainer.config, "data", "train"),
    }


def plain_settings(run: Run) -> dict[str, Any]:
    """The settings that may change freely, for the report of a later resume."""
    return {name: getattr(run.settings, name) for name in _PLAIN}


def check(run: Run, manifest: dict[str, Any], checkpoint: Path | str, asked: Iterable[str]) -> dict[str, list[str]]:
    """What differs or is to be made anew, in words, by the name that allows it.

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
            f"{curve if 'total_steps was' in shown else ''}"
        )
    for name in _ALWAYS:
        if name in asked and name not in found:
            found[name].append(f"{name}, as asked")
    return found


def changed_settings(run: Run, manifest: dict[str, Any]) -> list[str]:
    """The plain settings that differ, and what the run's files say of policy and data, in words."""
    before, now = manifest.get("settings", {}), plain_settings(run)
    now_of_data = written_arguments(run.trainer.config, "data", "train")
    told = [_differs(name, before[name], now[name]) for name in now if name in before and before[name] != now[name]]
    for name, was, written in (
        ("policy", manifest.get("policy_arguments"), written_arguments(run.trainer.config, "policy")),
        ("data.train", manifest.get("data", {}).get("arguments"), now_of_data),
    ):
        if was is not None and written is not None:
            missing = "not written"
            differing = [key for key in {**was, **written} if was.get(key) != written.get(key)]
            told += [
                _differs(f"{name}.init_args.{key}", was.get(key, missing), written.get(key, missing))
                for key in differing
            ]
    return told


def _movers(before: Mapping[str, Any], now: Mapping[str, Any]) -> defaultdict[str, list[str]]:
    found: defaultdict[str, list[str]] = defaultdict(list)
    differing = [mover for mover in {**before, **now} if not _same(before.get(mover), now.get(mover))]
    for mover in differing:
        part, _, setting = mover.partition(": ")
        if setting != "class" and f"{part}: class" in differing:  # which says it all
            continue
        if part.startswith("schedule") or setting in KEPT_FOR_SCHEDULES:
            name = "schedule"
        else:
            whole = setting in ("class", "parameters") or mover not in before or mover not in now
            name = "optimizer" if whole else setting
        found[name].append(_differs(mover, before.get(mover), now.get(mover)))
    for texts in found.values():
        texts.sort(key=lambda text: ": class" not in text)  # the first is what a refusal shows
    return found


def _same(before: Any, now: Any) -> bool:
    """Whether two settings are equal; numbers but for the rounding to float32, which a tensor lr has."""
    if isinstance(before, float) and isinstance(now, float):
        return math.isclose(before, now, rel_tol=1e-6)
    if isinstance(before, list) and isinstance(now, list):
        return len(before) == len(now) and all(map(_same, before, now))
    return bool(before == now)


def _data(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    as_large = before.get("batch_size_of_a_rank") == now["batch_size_of_a_rank"]
    for name, value in now.items():
        if name not in before or before[name] == value or name in ("batch_size_of_a_rank", "arguments"):
            continue
        # More or fewer ranks are told as such, and of larger batches there are fewer.
        if (name == "batch_size" and as_large) or (name == "batches" and not as_large):
            continue
        if name == "statistics":
            yield name, "the data has other statistics"
        elif name == "batch_size":
            yield name, _differs(name, _dealt(before), _dealt(now))
        else:
            yield name if name in NAMES else "data", _differs(name, before[name], value)


def _dealt(facts: Mapping[str, Any]) -> str:
    """A batch size, and how many ranks share it."""
    size, each = facts["batch_size"], facts.get("batch_size_of_a_rank")
    return f"{size}" if not each or size == each else f"{size} ({each} on each of {size // each} ranks)"


def _wider(name: str) -> str:
    """The name that allows a change too, because it says more."""
    return "data" if name == "statistics" else name if name in NAMES and name != "lr" else "optimizer"


def _differs(name: str, before: Any, now: Any) -> str:
    return f"{name} was {before} and is now {now}"


def _group_settings(run: Run) -> set[str]:
    return {name for o in run.updater.optimizers for group in o.param_groups for name in settings_of(group)}


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


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Those of an optimizer's group, copied."""
    return {k: v.clone() if isinstance(v, Tensor) else v for k, v in group.items() if k != "params"}
