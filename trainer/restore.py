"""How a run takes back what a checkpoint holds of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from ..strategies.errors import CheckpointError, PolicyfitError
from . import changes, differences
from .checkpoint import CheckpointState, fill
from .outcome import Outcome
from .parts import parts
from .rng import capture as capture_streams
from .rng import derive_seed, seed_everything
from .rng import restore as put_streams
from .run import Run

#: What a change does that puts sums of gradients together in another order.
_ROUNDED = ", where sums are rounded otherwise: not bit for bit the same run"


def restore(run: Run, saved: CheckpointState, checkpoint: Path | str, asked: Iterable[str]) -> list[str]:
    """Put a run where it was saved; returns remarks on what was not taken over as it was.

    The optimizers come before the scaler, and the random streams wait until the data iterator exists.

    Args:
        checkpoint: Where it is, for people.
        asked: The changes that were asked for by name; see ``differences.py``.

    Raises:
        CheckpointError: The checkpoint does not fit the run.
        ConfigError: The run differs in what makes it another run, and nobody asked for that.
    """
    manifest, report = saved.manifest, changes.Report()
    found = differences.check(run, manifest, checkpoint, asked)
    report.changed += [text for words in found.values() for text in words]
    report.changed += differences.changed_settings(run, manifest)
    fill(run.policy, parts(run.distribution, saved.model, run.policy.state_dict()), checkpoint)
    report.kept.append("the weights")
    changes.renew_statistics(run, saved, found, asked, report)
    changes.load_movers(run, saved, checkpoint, found, report)
    with _taking_back("the state of the loss scale", checkpoint):
        _load_scaler(run, saved, report)
    counters = run.counters
    counters.take_back(manifest["counters"])
    run.resumed_step = counters.step
    with _taking_back("the position in the data", checkpoint):
        changes.place_in_data(run, saved, found, report)
    with _taking_back("the log", checkpoint):
        _load_means(run, saved.callbacks, len(saved.rng_of_others) + 1)
        metrics, before = saved.callbacks.get("metrics", {}), saved.callbacks.get("metrics_before", {})
        if run.done:  # its last record stays the last
            run.metrics_before = before
        run.trainer.remember(metrics if run.done else metrics | before)
        run.validated_step = saved.callbacks.get("validated_step")
        run.validated = tuple(saved.callbacks.get("validated", ()))
        run.logged_step = saved.callbacks.get("logged_step", counters.step)
        ended = saved.callbacks.get("ended_at")
        run.ended_at = None if ended is None else (int(ended[0]), int(ended[1]))
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
    ranks_before = manifest.get("world_size", len(streams))
    if ranks_before != run.distribution.world_size:
        report.changed.append(f"ranks were {ranks_before} and are now {run.distribution.world_size}{_ROUNDED}")
    kind = manifest.get("distribution", run.distribution.name)
    if kind != run.distribution.name:
        report.changed.append(f"distribution was {kind} and is now {run.distribution.name}{_ROUNDED}")
    saved_alone = len(streams) < ranks_before
    if len(streams) != run.distribution.world_size:
        which = "other" if saved_alone else "new" if len(streams) < run.distribution.world_size else "former"
        report.reset.append(f"the random streams of the {which} ranks, so it is not bit for bit the same run")
    before, now = manifest["device"], run.device.device.type
    if before == now:
        of_one = " of the rank that saved it alone, for rank 0" if saved_alone else ""
        report.kept.append(f"the random streams{of_one}")
    else:
        run.streams = {**capture_streams(run.device), **run.streams}
        report.changed.append(f"device was {before} and is now {now}")
        report.reset.append("the device's random stream, so it is not bit for bit the same run")
    inexact = (
        "it was saved after an error or inside a window, when random streams, running statistics or a part of the "
        "weights had moved on, so this is not bit for bit the run that was begun"
    )
    return [
        f"resumed from {checkpoint} at step {counters.step}",
        *([] if manifest.get("exact", True) else [inexact]),
        *report.lines(),
    ]


def freeze_again(run: Run, saved: CheckpointState, checkpoint: Path | str) -> None:
    """Freeze and thaw what hooks had between ``on_fit_start`` and the save, since theirs may not come again.

    Not where ``on_fit_start`` has left other parameters frozen than in the run that was saved: an event says so.

    Raises:
        CheckpointError: What was frozen cannot be read.
    """
    with _taking_back("what was frozen", checkpoint):
        began, since = saved.callbacks.get("frozen", (run.frozen, run.frozen))
        if since != began == run.frozen:
            for name, parameter in run.policy.named_parameters():
                parameter.requires_grad_(name not in since)
    if since != began != run.frozen:
        message = (
            "other parameters are frozen at the beginning than in the run that was saved, so what its hooks froze and "
            "thawed afterwards is left as it is here"
        )
        run.trainer.event("warning", source="resume", message=message)


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


def _new_streams(run: Run) -> dict[str, Tensor]:
    """For a rank that the checkpoint does not know: its own, from the seed and the step."""
    kept = capture_streams(run.device)
    seed_everything(derive_seed(run.seed, "rank", run.distribution.rank, run.counters.step))
    made = capture_streams(run.device)
    put_streams(kept, run.device)
    return made


def _load_means(run: Run, saved: dict[str, Any], world_size: int) -> None:
    """Each rank its own sums; where ranks were more or fewer, rank 0 those of all, as if they had been as many."""
    ranks, of_ranks = run.distribution, saved.get("means_of_ranks", [])
    if len(of_ranks) == ranks.world_size:
        run.means.load_state_dict(of_ranks[ranks.rank])
    elif ranks.is_main:
        share = ranks.world_size / world_size
        sums = saved.get("means", {})
        run.means.load_state_dict({name: [share * part for part in total] for name, total in sums.items()})


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
