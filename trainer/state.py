"""What a checkpoint holds of a run, and how a run takes it back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..strategies.errors import CallbackError, CheckpointError, ConfigError
from .checkpoint import CheckpointState, write_checkpoint
from .counters import Counters
from .describe import class_path, policy_config
from .newest import point_last_at
from .rng import capture as capture_streams
from .run import Run


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
            "policy": class_path(run.policy),
            "movers": run.movers,
        },
        model=run.policy.state_dict(),
        policy_config=policy_config(run.policy),
        optimizers=[o.state_dict() for o in run.updater.optimizers],
        schedules=[s.state_dict() for s in run.schedules],
        scaler=run.precision.state_dict(),
        # A run that was resumed and has not drawn a batch yet still has its streams to come.
        rng=capture_streams(run.device) if run.streams is None else run.streams,
        callbacks={
            "states": run.callbacks.state_dict(),
            "checkpoint": extra,
            "means": run.means.state_dict(),
            "metrics": dict(run.trainer.metrics),
            "validated_step": run.validated_step,
            "logged_step": run.logged_step,
        },
    )


def save(run: Run, path: str | Path | None, *, background: bool) -> Path:
    """Write the run's checkpoint to ``path``, or as that of its step, to which ``last`` then points.

    Raises:
        CallbackError: A window is open.
    """
    if run.in_window:
        raise CallbackError(
            "save_checkpoint() was called inside a window, whose gradients are not part of a checkpoint.\n"
            "Call it from on_due, on_validation_end or on_train_epoch_end."
        )
    if run.updater.settling or not run.is_open:
        raise CallbackError(
            "save_checkpoint() was called before the run has begun or in on_update_end, where callbacks and counters "
            "are not of one moment.\nCall it from on_due, on_validation_end or on_train_epoch_end."
        )
    run.saver.wait()
    run.updater.settle()
    run.updater.divergence.check_finite()
    extra: dict[str, Any] = {}
    run.callbacks.call("on_save_checkpoint", run.trainer, run.policy, extra)
    folder = run.run_dir / "checkpoints" / f"{run.counters.step:06d}" if path is None else Path(path)

    def write(captured: CheckpointState) -> None:
        write_checkpoint(folder, captured)
        if path is None:
            point_last_at(folder)

    captured = capture(run, extra)
    if background:
        run.saver.save(captured, write)
    else:
        write(captured)
    return folder


def restore(run: Run, saved: CheckpointState, checkpoint: Path) -> list[str]:
    """Put a run where it was saved; returns remarks on what was not taken over as it was.

    The optimizers come before the scaler, and the random streams wait until the data iterator exists.

    Raises:
        CheckpointError: The checkpoint does not fit the run.
        ConfigError: The run asks for other data or other windows than it began with.
    """
    manifest, remarks = saved.manifest, [f"resumed from {checkpoint} at step {saved.manifest['counters']['step']}"]
    _refuse_another_run(run, manifest, checkpoint)
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
    run.trainer.remember(saved.callbacks.get("metrics", {}))
    run.validated_step = saved.callbacks.get("validated_step")
    run.logged_step = saved.callbacks.get("logged_step", counters.step)
    run.resumed = True
    missing = run.callbacks.load_state_dict(saved.callbacks.get("states", {}))
    remarks += [f"the checkpoint has a state for {key}, but the run has no such callback" for key in missing]
    run.streams = saved.rng
    if manifest["device"] != run.device.device.type:
        run.streams = {**capture_streams(run.device), **saved.rng}
        remarks.append(
            f"the run was on {manifest['device']} and is now on {run.device.device.type}: the device's random stream "
            "begins anew, so it is not bit for bit the same run"
        )
    return remarks


def _refuse_another_run(run: Run, manifest: dict[str, Any], checkpoint: Path) -> None:
    """Refuse what would make it another run in silence: other samples, another curve of the learning rate."""
    keep = "Keep it as it was, or start a new run in another run_dir."
    before, now = str(manifest.get("policy")), class_path(run.policy)
    if before.rpartition(".")[2] != now.rpartition(".")[2]:  # a class may have moved to another module
        raise ConfigError(
            f"{checkpoint} belongs to a run that trains {before}, and this one trains {now}.\n"
            "Resume with the path of the run that is meant, or start a new run."
        )
    for name, value in _data_facts(run).items():
        saved = manifest.get("data", {}).get(name)
        if saved != value:
            raise ConfigError(
                f"The run that {checkpoint} belongs to had {name}={saved}, and now it is {value}: the samples "
                f"after the checkpoint would not be those of the run.\n{keep}"
            )
    saved = manifest.get("movers", {})
    changed = [f"{n} was {saved.get(n)} and is now {run.movers.get(n)}" for n in {**saved, **run.movers}
               if saved.get(n) != run.movers.get(n)]  # fmt: skip
    if changed:
        shown = "; ".join(changed[:3]) + (f"; and {len(changed) - 3} more" if len(changed) > 3 else "")
        raise ConfigError(
            f"The run that {checkpoint} belongs to moves its weights in another way: {shown}.\n{keep} A schedule whose "
            "total_steps was filled from max_steps keeps its curve when schedule.init_args.total_steps is written out."
        )


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


def _load_scaler(run: Run, saved: CheckpointState) -> list[str]:
    before, now = saved.manifest["precision"], run.precision.name
    if run.precision.scale is None or saved.scaler is None:
        if before == now and saved.scaler is not None:
            raise CheckpointError("The checkpoint has a scaler state, but its precision has no scaler.")
        scaler = "; the loss scale starts anew" if now == "fp16" else ""
        return [] if before == now else [f"precision was {before} and is now {now}{scaler}"]
    run.precision.load_state_dict(saved.scaler)
    return []


def seed_of(saved: CheckpointState, asked: int | None) -> int:
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


def _data_facts(run: Run) -> dict[str, Any]:
    """What makes the data's order, in JSON."""
    return {
        "samples_per_epoch": run.data.samples_per_epoch,
        "batches_per_epoch": run.data.batches_per_epoch,
        "batch_size": run.data.batch_size,
        "accumulate": run.settings.accumulate,
    }
