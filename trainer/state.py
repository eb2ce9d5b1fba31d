"""What a checkpoint holds of a run, and how a run takes it back."""

from __future__ import annotations

import json
from dataclasses import asdict, is_dataclass
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..strategies.errors import CheckpointError, ConfigError
from .checkpoint import CheckpointState, read_checkpoint
from .counters import Counters
from .rng import capture as capture_streams
from .run import Run
from .settings import Settings

Saved = CheckpointState


def capture(run: Run, extra: dict[str, Any]) -> CheckpointState:
    """The run as it stands, every update settled and no window open.

    Args:
        extra: What callbacks added in ``on_save_checkpoint``; ``models``, whole state dicts of the policy by name, go
            into files of their own.
    """
    models = extra.pop("models", {})
    return CheckpointState(
        models=models,
        manifest={
            "counters": run.counters.to_dict(),
            "seed": run.seed,
            "precision": run.precision.name,
            "device": run.device.device.type,
            "world_size": run.distribution.world_size,
            "torch": torch.__version__,
            "data": _data_facts(run),
            "policy": _name(run.policy),
        },
        model=run.policy.state_dict(),
        policy_config=policy_config(run.policy),
        optimizers=[o.state_dict() for o in run.updater.optimizers],
        schedules=[s.state_dict() for s in run.schedules],
        scaler=run.precision.state_dict(),
        rng=capture_streams(run.device),
        callbacks={
            "states": run.callbacks.state_dict(),
            "checkpoint": extra,
            "means": run.means.state_dict(),
            "metrics": dict(run.trainer.metrics),
            "validated_step": run.validated_step,
        },
    )


def restore(run: Run, saved: Saved, checkpoint: Path) -> list[str]:
    """Put a run where it was saved; returns remarks on what was not taken over as it was.

    The optimizers come before the scaler, and the random streams wait until the data iterator exists.

    Raises:
        CheckpointError: The checkpoint does not fit the run.
        ConfigError: The run asks for other data or other windows than it began with.
    """
    manifest, remarks = saved.manifest, [f"resumed from {checkpoint} at step {saved.manifest['counters']['step']}"]
    for name, value in _data_facts(run).items():
        before = manifest.get("data", {}).get(name)
        if before != value:
            raise ConfigError(
                f"The run that {checkpoint} belongs to had {name}={before}, and now it is {value}: the samples "
                "after the checkpoint would not be those of the run.\n"
                "Keep it as it was, or start a new run in another run_dir."
            )
    load_policy(run.policy, saved.model, checkpoint)
    for what, mine, theirs in (
        ("optimizers", run.updater.optimizers, saved.optimizers),
        ("schedules", run.schedules, saved.schedules),
    ):
        if len(mine) != len(theirs):
            raise CheckpointError(f"{checkpoint} holds {len(theirs)} {what}, but the run has {len(mine)}.")
    try:
        for optimizer, state in zip(run.updater.optimizers, saved.optimizers, strict=True):
            optimizer.load_state_dict(state)
        for schedule, state in zip(run.schedules, saved.schedules, strict=True):
            schedule.load_state_dict(state)
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"The optimizers or schedules of {checkpoint} do not fit those of the run: {error}.\n"
            "Resume with the optimizer, schedule and policy that the run began with."
        ) from error
    remarks += _load_scaler(run, saved)
    counters = Counters.from_dict(manifest["counters"])
    for name in Counters.__dataclass_fields__:
        setattr(run.counters, name, getattr(counters, name))
    run.resumed_step = counters.step
    run.means.load_state_dict(saved.callbacks.get("means", {}))
    run.trainer.metrics.update(saved.callbacks.get("metrics", {}))
    run.validated_step = saved.callbacks.get("validated_step")
    missing = run.callbacks.load_state_dict(saved.callbacks.get("states", {}))
    remarks += [f"the checkpoint has a state for {key}, but the run has no such callback" for key in missing]
    run.streams = saved.rng
    if manifest["device"] != run.device.device.type:
        run.streams = {**capture_streams(run.device), **saved.rng}
        remarks.append(
            f"the run was on {manifest['device']} and is now on {run.device.device.type}: the device's random stream "
            "begins anew, so it is not bit for bit the same run"
        )
    run.start()
    return remarks


def load_policy(policy: torch.nn.Module, model: dict[str, Tensor], checkpoint: Path) -> None:
    """Load the weights, all of them and no others.

    Raises:
        CheckpointError: A name or shape of one is not in the other.
    """
    try:
        policy.load_state_dict(model, strict=True)
    except RuntimeError as error:
        raise CheckpointError(
            f"The weights in {checkpoint} do not fit {type(policy).__name__}: {' '.join(str(error).split())}\n"
            "Build the policy with the settings it was trained with."
        ) from error


def _load_scaler(run: Run, saved: Saved) -> list[str]:
    before, now = saved.manifest["precision"], run.precision.name
    if run.precision.scale is None or saved.scaler is None:
        if before == now and saved.scaler is not None:
            raise CheckpointError("The checkpoint has a scaler state, but its precision has no scaler.")
        scaler = "; the loss scale starts anew" if now == "fp16" else ""
        return [] if before == now else [f"precision was {before} and is now {now}{scaler}"]
    run.precision.load_state_dict(saved.scaler)
    return []


def seed_of(saved: Saved, asked: int | None) -> int:
    """The seed that a run goes on with.

    Raises:
        ConfigError: Another one was asked for.
    """
    seed = saved.manifest.get("seed")
    if not isinstance(seed, int):
        raise CheckpointError(f"manifest.json is damaged: seed is {seed!r}.")
    if asked is not None and asked != seed:
        raise ConfigError(
            f"The run began with seed={seed} and is to go on with seed={asked}: its samples would come in another "
            f"order.\nLeave seed out, or use seed={seed}."
        )
    return seed


def read(checkpoint: Path) -> Saved:
    """Read a checkpoint that was verified when it was found."""
    return read_checkpoint(checkpoint, verify=False)


def _data_facts(run: Run) -> dict[str, Any]:
    """What makes the data's order, in JSON."""
    return {
        "samples_per_epoch": run.data.samples_per_epoch,
        "batches_per_epoch": run.data.batches_per_epoch,
        "batch_size": run.data.batch_size,
        "accumulate": run.accumulate,
    }


# Describing a run that was put together in Python -------------------------------------------------------------


def policy_config(policy: torch.nn.Module) -> dict[str, Any]:
    """``policy.config`` if it has one that JSON can hold, else nothing: the arguments that build it again."""
    config = getattr(policy, "config", {})
    values = asdict(config) if is_dataclass(config) and not isinstance(config, type) else config
    try:
        plain = json.loads(json.dumps(values, allow_nan=False))
    except (TypeError, ValueError):
        return {}
    return plain if isinstance(plain, dict) else {}


def describe(settings: Settings, run: Run) -> dict[str, Any]:
    """``config.yaml`` of a run without a run file: the policy's class and arguments, and the trainer's settings.

    Data, callbacks and loggers were given as objects, which a file cannot repeat. A policy is left out whose
    arguments are not known: one built with others would act differently.
    """
    policy = _recipe(run.policy)
    trainer = {name: getattr(settings, name) for name in Settings.__dataclass_fields__}
    return {
        **({} if policy is None else {"policy": policy}),
        "trainer": {"device": run.device.name, "precision": run.precision.name, **trainer, "seed": run.seed},
    }


def _recipe(policy: torch.nn.Module) -> dict[str, Any] | None:
    """What makes the policy again, or ``None`` when its class has arguments and it does not say which it got."""
    kinds = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    takes = [name for name, p in signature(type(policy)).parameters.items() if p.kind not in kinds]
    config = policy_config(policy)
    if takes and not config:
        return None
    return {"class_path": _name(policy), "init_args": {"config": config} if takes == ["config"] else config}


def _name(policy: torch.nn.Module) -> str:
    return f"{type(policy).__module__}.{type(policy).__qualname__}"
