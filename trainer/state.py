"""What a checkpoint holds of a run, and how a run takes it back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..strategies.distributed import DistributionStrategy
from ..strategies.errors import CallbackError, CheckpointError, PolicyfitError, some
from . import changes
from .checkpoint import CheckpointState, begin, write_checkpoint
from .counters import Counters
from .describe import class_path, policy_config
from .metrics import added
from .newest import point_last_at
from .outcome import Outcome
from .remote import RemoteRun
from .rng import capture as capture_streams
from .rng import derive_seed, seed_everything
from .rng import restore as put_streams
from .run import Run
from .shards import in_shards, write_in_shards
from .together import on_main, parts, whole

_PLACES = "Call it from on_due, on_validation_end or on_train_epoch_end."
#: What a change does that puts sums of gradients together in another order.
_ROUNDED = ", where sums are rounded otherwise: not bit for bit the same run"


def capture(run: Run, extra: dict[str, Any], *, exact: bool = True, consolidated: bool = False) -> CheckpointState:
    """The run as it stands, every update settled and, if ``exact``, no window open.

    Args:
        extra: What callbacks added in ``on_save_checkpoint``; ``models``, whole state dicts of the policy by name, go
            into files of their own.
        consolidated: Put weights together on rank 0 also where each rank writes what it holds.
    """
    ranks = run.distribution
    in_parts = ranks.saves_shards and not consolidated
    # What user code gives comes before ranks put anything together, so that one in which it fails can answer for it.
    models, model = extra.pop("models", {}), run.policy.state_dict()
    optimizers = [optimizer.state_dict() for optimizer in run.updater.optimizers]
    if run.is_torn:
        optimizers = _common_states(ranks, optimizers)
    outcome = run.updater.outcome
    manifest = {
        "run": run.id,
        "counters": run.counters.to_dict(),
        "seed": run.seed,
        "precision": run.precision.name,
        "device": run.device.device.type,
        "world_size": run.distribution.world_size,
        "distribution": run.distribution.name,
        "torch": torch.__version__,
        "data": changes.data_facts(run),
        "policy": class_path(run.policy),
        "movers": run.movers,
        "settings": changes.plain_settings(run),
        "exact": exact and not run.failed,  # random streams have moved on, and hooks have run on some ranks only
    }
    callbacks = {
        "states": run.callbacks.state_dict(),
        "checkpoint": extra,
        "metrics": dict(run.trainer.metrics),
        "validated_step": run.validated_step,
        "validated": list(run.validated),
        "logged_step": run.logged_step,
        "outcome": None if outcome is None else outcome._replace(norms=None, names=(), losses={})._asdict(),
        "lr": float(run.updater.lr),
        "data": run.data.state(run.counters.epoch, run.counters.batch_in_epoch),
    }
    config, schedules = policy_config(run.policy), [s.state_dict() for s in run.schedules]
    # A run that was resumed and has not drawn a batch yet still has its streams to come.
    own_streams = capture_streams(run.device) if run.streams is None else run.streams
    streams = ranks.gather(own_streams, "save_checkpoint(), which collects random streams")
    callbacks["means"] = added(ranks.gather(run.means.state_dict(), "save_checkpoint(), which collects means"))
    if not in_parts:
        models, model = whole(ranks, models), whole(ranks, model)
    state = CheckpointState(
        models=models,
        manifest=manifest,
        model=model,
        policy_config=config,
        optimizers=optimizers if ranks.saves_shards else whole(ranks, optimizers),
        schedules=schedules,
        scaler=run.precision.state_dict(),
        rng=streams[0],
        rng_of_others=streams[1:],
        callbacks=callbacks,
    )
    return in_shards(ranks, state, weights=in_parts) if ranks.saves_shards else state


def _common_states(ranks: DistributionStrategy, optimizers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without states that a rank has not come to make, in the update that an error broke off."""
    made = ranks.gather([set(optimizer["state"]) for optimizer in optimizers], "save_checkpoint() of a broken update")
    return [
        {**optimizer, "state": {k: v for k, v in optimizer["state"].items() if all(k in others for others in keys)}}
        for optimizer, *keys in zip(optimizers, *made, strict=True)
    ]


def save(
    run: Run, path: str | Path | None, *, background: bool, exact: bool, remote: str | None, consolidated: bool
) -> Path:
    """Write the run's checkpoint to ``path``, or as that of its step, to which ``last`` then points.

    Raises:
        CallbackError: A window is open, and the checkpoint is to be exact; or it is not to be, and has no path.
        CheckpointError: It could not be written, or the policy has replaced parameters.
    """
    if path is None and not exact:
        raise CallbackError(
            "save_checkpoint(exact=False) was called without a path, and what is not exact is not to be the newest "
            "checkpoint of the run.\nGive it a folder, such as trainer.run_dir / 'look'."
        )
    if run.in_window and exact:
        raise CallbackError(
            f"save_checkpoint() was called inside a window, whose gradients are not part of a checkpoint.\n{_PLACES}"
        )
    if run.updater.settling and exact:
        raise CallbackError(
            f"save_checkpoint() was called in on_update_end, which some callbacks have seen and others not.\n{_PLACES}"
        )
    if not run.is_open:
        raise CallbackError(
            f"save_checkpoint() was called before the run has begun, when callbacks have not started.\n{_PLACES}"
        )
    if exact:
        run.check_meeting("save_checkpoint()")
    run.saver.wait()
    run.updater.settle()
    run.distribution.release()
    _check_held(run)
    run.updater.divergence.check_finite(counts=run.is_torn or not run.updater.lacks_update)
    extra: dict[str, Any] = {}
    run.callbacks.call("on_save_checkpoint", run.trainer, run.policy, extra)
    folder = run.run_dir / "checkpoints" / f"{run.counters.step:06d}" if path is None else Path(path)

    ranks = run.distribution
    place = "save_checkpoint(), which rank 0 writes"
    temporary = on_main(ranks, partial(begin, folder), place) if ranks.saves_shards else None

    def write(captured: CheckpointState) -> None:
        if temporary is not None:
            write_in_shards(ranks, temporary, folder, captured)
        else:
            write_checkpoint(folder, captured)

    def finish() -> None:
        if path is None:
            point_last_at(folder)
        if remote is not None:
            try:
                RemoteRun(remote, run.id).upload(folder)
            except CheckpointError as error:  # the checkpoint itself is whole: no reason to end a run
                run.saver.notices.append(f"{error} The next save is copied again.")

    def write_and_finish(captured: CheckpointState) -> None:
        write(captured)
        if ranks.is_main:
            finish()

    captured = capture(run, extra, exact=exact, consolidated=consolidated)
    if run.saves_from:  # rank 0 has not all of the last update
        captured = ranks.from_rank(run.saves_from, captured)
    if background:
        if ranks.is_main or ranks.saves_shards:
            snapshot = run.saver.snapshot(captured)
            if ranks.saves_shards:
                ranks.gather(None, place)  # in its thread a rank would wait for one that could not copy
            run.saver.start(snapshot, write_and_finish)
    elif ranks.saves_shards:
        write(captured)
        on_main(ranks, finish, place)
    else:
        on_main(ranks, partial(write_and_finish, captured), place)
    return folder


def _check_held(run: Run) -> None:
    """Refuse to save a policy that has other parameters than those that updates move."""
    held = {id(p) for o in run.updater.optimizers for group in o.param_groups for p in group["params"]}
    named = list(run.policy.named_parameters())
    if not held <= {id(p) for _, p in named}:
        new = [name for name, p in named if p.requires_grad and id(p) not in held]
        others = f", and not its {some(new)}" if new else ""
        raise CheckpointError(
            f"At step {run.counters.step} the optimizer moves parameters that {type(run.policy).__name__} no longer "
            f"has{others}. It was trained no further.\n"
            "Fill parameters in place (parameter.data.copy_(new)) instead of replacing them."
        )


def restore(run: Run, saved: CheckpointState, checkpoint: Path | str, asked: Iterable[str]) -> list[str]:
    """Put a run where it was saved; returns remarks on what was not taken over as it was.

    The optimizers come before the scaler, and the random streams wait until the data iterator exists.

    Args:
        checkpoint: Where it is, for people.
        asked: The changes that were asked for by name; see ``changes.py``.

    Raises:
        CheckpointError: The checkpoint does not fit the run.
        ConfigError: The run differs in what makes it another run, and nobody asked for that.
    """
    manifest, report = saved.manifest, changes.Report()
    found = changes.check(run, manifest, checkpoint, asked)
    report.changed += [text for words in found.values() for text in words]
    report.changed += changes.changed_settings(run, manifest)
    load_policy(run.policy, parts(run.distribution, saved.model, run.policy.state_dict()), checkpoint)
    report.kept.append("the weights")
    changes.renew_statistics(run, saved, found, asked, report)
    changes.load_movers(run, saved, checkpoint, found, report)
    with _taking_back("the state of the loss scale", checkpoint):
        _load_scaler(run, saved, report)
    counters = Counters.from_dict(manifest["counters"])
    for name in Counters.__dataclass_fields__:
        setattr(run.counters, name, getattr(counters, name))
    run.resumed_step = counters.step
    with _taking_back("the position in the data", checkpoint):
        changes.place_in_data(run, saved, found, report)
    with _taking_back("the log", checkpoint):
        if run.distribution.is_main:  # those of all ranks
            run.means.load_state_dict(saved.callbacks.get("means", {}))
        run.trainer.remember(saved.callbacks.get("metrics", {}))
        run.validated_step = saved.callbacks.get("validated_step")
        run.validated = tuple(saved.callbacks.get("validated", ()))
        run.logged_step = saved.callbacks.get("logged_step", counters.step)
        outcome, lr = saved.callbacks.get("outcome"), saved.callbacks.get("lr", run.updater.lr)
        run.updater.go_on_from(None if outcome is None else Outcome(**outcome), float(lr))
    run.resumed = True
    with _taking_back("the state of a callback", checkpoint):
        states = saved.callbacks.get("states", {})
        missing = run.callbacks.load_state_dict(states)
    if taken := [key for key in states if key not in missing]:
        report.kept.append(f"the state of {', '.join(taken)}")
    report.reset += [f"the state of {key}: the run has no such callback" for key in missing]
    streams = [saved.rng, *saved.rng_of_others]
    run.streams = streams[run.distribution.rank] if run.distribution.rank < len(streams) else _new_streams(run)
    if len(streams) != run.distribution.world_size:
        report.changed.append(f"ranks were {len(streams)} and are now {run.distribution.world_size}{_ROUNDED}")
    kind = manifest.get("distribution", run.distribution.name)
    if kind != run.distribution.name:
        report.changed.append(f"distribution was {kind} and is now {run.distribution.name}{_ROUNDED}")
    if len(streams) < run.distribution.world_size:
        report.reset.append("the random streams of the new ranks, so it is not bit for bit the same run")
    before, now = manifest["device"], run.device.device.type
    if before == now:
        report.kept.append("the random streams")
    else:
        run.streams = {**capture_streams(run.device), **run.streams}
        report.changed.append(f"device was {before} and is now {now}")
        report.reset.append("the device's random stream, so it is not bit for bit the same run")
    inexact = (
        "it was saved after an error, when random streams, running statistics, a window or a part of the weights had "
        "moved on, so this is not bit for bit the run that was begun"
    )
    return [
        f"resumed from {checkpoint} at step {counters.step}",
        *([] if manifest.get("exact", True) else [inexact]),
        *report.lines(),
    ]


@contextmanager
def _taking_back(part: str, checkpoint: Path | str) -> Iterator[None]:
    """Name the part whose content makes no sense, though it is what was written."""
    try:
        yield
    except PolicyfitError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{checkpoint}: {part} cannot be taken back: {type(error).__name__}: {error}.\n"
            "Resume from another checkpoint, with the callbacks of the run."
        ) from error


def load_policy(policy: torch.nn.Module, model: dict[str, Tensor], checkpoint: Path | str) -> None:
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


def _new_streams(run: Run) -> dict[str, Tensor]:
    """For a rank that the checkpoint does not know: its own, from the seed and the step."""
    kept = capture_streams(run.device)
    seed_everything(derive_seed(run.seed, "rank", run.distribution.rank, run.counters.step))
    made = capture_streams(run.device)
    put_streams(kept, run.device)
    return made


def _load_scaler(run: Run, saved: CheckpointState, report: changes.Report) -> None:
    before, now = saved.manifest["precision"], run.precision.name
    if before != now:
        report.changed.append(f"precision was {before} and is now {now}")
    if run.precision.scale is not None and saved.scaler is not None:
        run.precision.load_state_dict(saved.scaler)
        report.kept.append("the loss scale")
    elif before == now and saved.scaler is not None:
        raise CheckpointError("The checkpoint has a scaler state, but its precision has no scaler.")
    elif before != now and run.precision.scale is not None:
        report.reset.append("the loss scale")
