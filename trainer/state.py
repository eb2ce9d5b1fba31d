"""What a checkpoint holds of a run, and how it is saved."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..strategies.distributed import DistributionStrategy
from ..strategies.errors import CallbackError, CheckpointError, some
from .checkpoint import CheckpointState, begin, write_checkpoint
from .describe import class_path, frozen, policy_config, written_arguments
from .differences import data_facts, plain_settings
from .metrics import added
from .newest import point_last_at
from .parts import whole
from .remote import RemoteRun
from .rng import capture as capture_streams
from .run import Run
from .shards import in_shards, write_in_shards
from .together import on_main

_PLACES = "Call it from on_due, on_validation_end or on_train_epoch_end."


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
    if run.keeps_remains:
        optimizers = _common_states(ranks, optimizers)
    outcome = run.updater.outcome
    of_window = run.counters.batch_in_epoch - run.position  # micro-batches without a kept gradient: they come again
    counters = replace(run.counters, batch_in_epoch=run.position, micro_batches=run.counters.micro_batches - of_window)
    manifest = {
        "run": run.id,
        "counters": counters.to_dict(),
        "seed": run.seed,
        "precision": run.precision.name,
        "device": run.device.device.type,
        "world_size": run.distribution.world_size,
        "distribution": run.distribution.name,
        "torch": torch.__version__,
        "data": data_facts(run),
        "policy": class_path(run.policy),
        "policy_arguments": written_arguments(run.trainer.config, "policy"),
        "movers": run.movers,
        "settings": plain_settings(run),
        "exact": exact and not run.failed,  # random streams have moved on, and hooks have run on some ranks only
    }
    callbacks: dict[str, Any] = {
        "states": run.callbacks.state_dict(),
        "checkpoint": extra,
        "metrics": dict(run.trainer.metrics),
        "validated_step": run.validated_step,
        "validated": list(run.validated),
        "logged_step": run.logged_step,
        "ended_at": run.ended_at,
        "metrics_before": run.metrics_before,
        "outcome": None if outcome is None else outcome._replace(norms=None, names=(), losses={})._asdict(),
        "lr": float(run.updater.lr),
        "frozen": [run.frozen, frozen(run.policy)],
        "data": run.data.state(counters.epoch, counters.batch_in_epoch),
    }
    config, schedules = policy_config(run.policy), [s.state_dict() for s in run.schedules]
    # A run that was resumed and has not drawn a batch yet still has its streams to come.
    own_streams = capture_streams(run.device) if run.streams is None else run.streams
    own_sums = {} if run.in_window else run.means.state_dict()  # of what comes again too, which cannot be told apart
    of_ranks = ranks.gather((own_streams, own_sums), "save_checkpoint(), which collects random streams and means")
    streams, sums = map(list, zip(*of_ranks, strict=True))
    callbacks["means"] = added(sums)
    if len(sums) > 1:
        callbacks["means_of_ranks"] = sums
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
        CallbackError: A window is open, and the checkpoint is to be exact; or it is not to be, and has no path; or
            ranks do not meet here.
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
    if run.updater.is_uncounted:
        raise CallbackError(
            "save_checkpoint() was called in on_before_zero_grad, when the weights have moved and the step is not "
            f"counted yet.\n{_PLACES}"
        )
    if not run.is_open:
        raise CallbackError(
            f"save_checkpoint() was called before the run has begun, when callbacks have not started.\n{_PLACES}"
        )
    if exact or not run.failed:  # ranks that end by a failure save what there is wherever they are, or alone
        run.check_meeting("save_checkpoint()")
    run.saver.wait()
    run.updater.settle()
    run.distribution.release()
    counts = run.keeps_remains or not run.updater.lacks_update  # else those of another rank are saved
    if counts:
        _check_held(run)
    run.updater.divergence.check_finite(counts=counts)
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


def has_all_that_moves(run: Run) -> bool:
    """Whether the policy still has the parameters that updates move."""
    return _held(run) <= {id(p) for p in run.policy.parameters()}


def _held(run: Run) -> set[int]:
    return {id(p) for o in run.updater.optimizers for group in o.param_groups for p in group["params"]}


def _check_held(run: Run) -> None:
    """Refuse to save a policy that has other parameters than those that updates move."""
    if not has_all_that_moves(run):
        held = _held(run)
        new = [name for name, p in run.policy.named_parameters() if p.requires_grad and id(p) not in held]
        others = f", and not its {some(new)}" if new else ""
        raise CheckpointError(
            f"At step {run.counters.step} the optimizer moves parameters that {type(run.policy).__name__} no longer "
            f"has{others}. It was trained no further.\n"
            "Fill parameters in place (parameter.data.copy_(new)) instead of replacing them."
        )
