"""How a run begins: anew or where it was saved, in a folder whose ``plan.json`` and ``config.yaml`` say what it is."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from hashlib import sha256
from pathlib import Path

from ..strategies.distributed import AT_THE_START
from ..strategies.errors import DistributedError
from ..strategies.lost import named
from .describe import class_of, describe, frozen
from .parts import parts
from .restore import freeze_again, restore
from .resume import Origin
from .run import Run
from .run_dir import held, make, new_name, replace_text
from .settings import Settings
from .together import on_main

_PLAN = "plan.json"
_ARRIVAL_S = 10.0


def begin_run(
    run: Run, origin: Origin | None, changes: Sequence[str], *, settings: Settings, asked_dir: Path | None
) -> None:
    """All up to the first batch; what is refused before the folder is opened has written nothing.

    Args:
        origin: What the run goes on from; ``None`` for a new run.
        changes: What may differ from there, by name.
        settings: As the trainer was given them.
        asked_dir: The folder that was asked for; ``None`` leaves it to the run.

    Raises:
        CheckpointError: The checkpoint does not fit the run.
        ConfigError: The run differs in what makes it another run, or may not write into its folder.
        DistributedError: A rank that is to write there does not see it.
    """
    trainer, policy, ranks = run.trainer, run.policy, run.distribution
    old = None if origin is None else origin.run_dir
    run_dir = (asked_dir or old or new_name(class_of(policy).__name__)).absolute()
    if origin is not None and (origin.url or old == run_dir.resolve()):
        run.id = origin.saved.manifest.get("run", run.id)
    run.run_dir, run.id = ranks.broadcast((run_dir, run.id), AT_THE_START)
    if origin is not None:
        trainer.plan.notes += restore(run, origin.saved, str(origin), changes)
    run.start()
    run.callbacks.call("setup", trainer, policy, "fit")
    arrived = None if origin is None else origin.arrived
    new = asked_dir is None and old is None
    run.run_dir, digest = on_main(ranks, partial(_open_folder, run, settings, new=new, arrived=arrived))
    _check_shared(run, digest)
    if origin is not None:
        _tell_callbacks(run, origin)
    run.is_open = True
    run.callbacks.call("on_fit_start", trainer, policy)
    run.frozen = frozen(policy)
    if origin is not None:
        freeze_again(run, origin.saved, str(origin))


def _open_folder(run: Run, settings: Settings, *, new: bool, arrived: Path | None) -> tuple[Path, str]:
    """Make the run's folder and describe the run in it as it is now; a script that resumes leaves ``config.yaml``.

    Args:
        new: Whether the folder has to be new; if its name is taken, another is chosen.
        arrived: A copy of the run that was made elsewhere, which becomes its folder.

    Returns:
        The folder, and the digest of the plan in it, by which others know it.
    """
    from .strict_yaml import write  # PyYAML is not needed before a run

    run.run_dir = make(run.run_dir, new=new)
    run.lock.enter_context(held(run.run_dir))
    for path in [] if arrived is None else list(arrived.iterdir()):
        shutil.move(path, run.run_dir / path.name)
    replace_text(run.run_dir / _PLAN, json.dumps(run.trainer.plan.to_dict(), indent=2) + "\n")
    config = run.trainer.config
    if config is None and not (run.run_dir / "config.yaml").exists():
        config = describe(settings, run.device.name, run.precision.name, run.policy, run.seed)
    if config is not None:
        replace_text(run.run_dir / "config.yaml", write(config))
    return run.run_dir, _digest(run.run_dir / _PLAN)


def _check_shared(run: Run, digest: str) -> None:
    """Whether every rank sees the folder that rank 0 has opened.

    Raises:
        DistributedError: One does not, which is to write its shards there.
    """
    ranks = run.distribution
    if ranks.world_size == 1:
        return
    seen = ranks.gather(_sees(run.run_dir / _PLAN, digest), AT_THE_START)
    blind = [rank for rank, sees in enumerate(seen) if not sees]
    if not blind:
        return
    who = f"{named(blind)} {'does' if len(blind) == 1 else 'do'} not see the run's folder {run.run_dir}"
    if ranks.saves_shards:
        raise DistributedError(
            f"{who}, where each rank of a sharded run writes its part of a checkpoint.\n"
            "Use a run_dir on storage that all machines share, or FSDP(checkpoint='whole')."
        )
    run.trainer.plan.notes.append(f"{who}, so a resume will need a copy of it there")


def _digest(path: Path) -> str:
    return sha256(path.read_bytes()).hexdigest()


def _sees(path: Path, digest: str) -> bool:
    """Whether a file has come here, for which network storage may take some seconds."""
    deadline = time.monotonic() + _ARRIVAL_S
    while True:
        with suppress(OSError):
            if _digest(path) == digest:
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)


def _tell_callbacks(run: Run, origin: Origin) -> None:
    """``on_load_checkpoint``: what callbacks added to the checkpoint, of its models what belongs on this rank."""
    saved, own = origin.saved, run.policy.state_dict()
    models = {name: parts(run.distribution, model, own) for name, model in saved.models.items()}
    added = {**saved.callbacks.get("checkpoint", {}), "models": models}
    run.callbacks.call("on_load_checkpoint", run.trainer, run.policy, added)
