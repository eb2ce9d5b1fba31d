"""What each command does; ``cli.py`` says how it is written."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..strategies.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from torch import nn

    from .config import RunConfig, RunRecipe
    from .rollout import RolloutReport
    from .trainer import Trainer

#: The options of ``validate`` and of ``eval`` that stand in place of a key of the run.
VALIDATE_KEYS = {"device": "device", "precision": "precision", "tf32": "tf32"}
EVAL_KEYS = {**VALIDATE_KEYS, "episodes": "eval.episodes", "seed": "eval.seed"}


def fit(request: argparse.Namespace) -> None:
    """Train, and evaluate where the run names an environment."""
    from .config import read_run, resolve

    config = read_run(_files(request), request.keys)
    if request.audit:
        config = _with_audit(config)
    with config.importable():
        run = resolve(config)
        trainer = _seeded_trainer(run)
        policy = run.build("policy")
        trainer.fit(
            policy,
            run.build("data", "train"),
            run.build("data", "val"),
            optimizer=run.maker("optimizer"),
            schedule=run.maker("schedule"),
            resume=request.resume,
        )
        env = run.build("eval", "env")
        if env is not None:
            report = trainer.evaluate(policy, env, **run.evaluation)
            _report(report, trainer, trainer.run_dir / "eval.json")


def plan(request: argparse.Namespace) -> None:
    """Print what would run, and why."""
    from .config import read_run, resolve

    config = read_run(request.files, request.keys)
    with config.importable():
        run = resolve(config)
        trainer = _seeded_trainer(run)
        plan = trainer.dry_run(run.build("policy"), optimizer=run.maker("optimizer"), schedule=run.maker("schedule"))
    print(json.dumps(plan.to_dict(), indent=2) if request.json else plan.text())


def validate(request: argparse.Namespace) -> None:
    """Print the means of a checkpoint's policy over its run's validation data."""
    from .config import resolve_validation

    with _trained(request, VALIDATE_KEYS, resolve_validation) as (run, trainer, policy):
        metrics = trainer.validate(policy, run.build("data", "val"))
    if trainer.is_main:
        print("\n".join(f"{name} {value:.6g}" for name, value in sorted(metrics.items())))


def evaluate(request: argparse.Namespace) -> None:
    """Let a checkpoint's policy act in its run's environment."""
    from .config import resolve_evaluation

    with _trained(request, EVAL_KEYS, resolve_evaluation) as (run, trainer, policy):
        _report(trainer.evaluate(policy, run.build("eval", "env"), **run.evaluation), trainer)


def checkpoints(request: argparse.Namespace) -> None:
    """List the checkpoints of a run, every file of them verified.

    Raises:
        CheckpointError: One is damaged, or there is none.
    """
    from .listing import list_checkpoints

    run_dir = Path(request.run_dir)
    found = list_checkpoints(run_dir)
    if not found:
        raise CheckpointError(f"There is no checkpoint in {run_dir}.\nGive a run's folder, such as runs/NAME.")
    for entry in found:
        print(entry.line())
    damaged = [entry.name for entry in found if entry.damage]
    if damaged:
        raise CheckpointError(
            f"{len(damaged)} of {len(found)} checkpoints are damaged: {', '.join(damaged)}.\n"
            "A run that goes on takes the newest whole one; delete the folders of the damaged."
        )


def doctor(request: argparse.Namespace) -> None:
    """Print what this machine offers."""
    from .doctor import main_text

    print(main_text())


@contextmanager
def _trained(
    request: argparse.Namespace, keys: dict[str, str], resolve: Callable[[RunConfig], RunRecipe]
) -> Iterator[tuple[RunRecipe, Trainer, nn.Module]]:
    """A checkpoint's policy, and of its run what ``resolve`` makes of the config and the options."""
    from .config import read_run
    from .load import load
    from .manifest import read_manifest
    from .newest import newest_checkpoint

    config_file = _config_of(Path(request.checkpoint))
    checkpoint = newest_checkpoint(Path(request.checkpoint), lambda text: print(text, file=sys.stderr))
    # The device that the run was on, not what its "auto" would choose here: never another one in silence.
    given = {"device": read_manifest(checkpoint)["device"]}
    given |= {name: text for name in keys if (text := getattr(request, name)) is not None}
    config = read_run([config_file], [(keys[name], text) for name, text in given.items()])
    with config.importable():
        run = resolve(config)
        trainer: Trainer = run.trainer.build()
        policy = load(checkpoint, device=trainer.device, precision=trainer.precision, weights=request.weights)
        yield run, trainer, policy


def _with_audit(config: RunConfig) -> RunConfig:
    """The run with ``PrecisionAudit`` among its callbacks; one that has it already, or is faulty there, as it is."""
    audit = {"class_path": "policyfit.PrecisionAudit"}
    trainer = config.values.get("trainer") or {}
    callbacks = (trainer.get("callbacks") or []) if isinstance(trainer, dict) else None
    if not isinstance(callbacks, list):
        return config
    named = [str(c["class_path"]) for c in callbacks if isinstance(c, dict) and "class_path" in c]
    if "PrecisionAudit" in (name.rpartition(".")[2] for name in named):
        return config
    return replace(config, values={**config.values, "trainer": {**trainer, "callbacks": [*callbacks, audit]}})


def _seeded_trainer(run: RunRecipe) -> Trainer:
    """The trainer; what is built after it, such as the policy's first weights, comes from the run's seed."""
    from .rng import seed_everything

    trainer: Trainer = run.trainer.build()
    trainer.config = run.config.values
    if trainer.config["trainer"]["seed"] is not None:
        seed_everything(trainer.config["trainer"]["seed"])
    return trainer


def _report(report: RolloutReport, trainer: Trainer, file: Path | None = None) -> None:
    if not trainer.is_main:
        return
    print(report.summary())
    if file is not None:
        file.write_text(json.dumps(report.to_dict(), indent=2) + "\n")


def _files(request: argparse.Namespace) -> list[Path]:
    """The run files; a run that is gone on with brings its own."""
    from .run_dir import newest_run

    if request.files:
        return [Path(file) for file in request.files]
    if request.resume is None:
        raise ConfigError("fit needs a run file: policyfit fit RUN.yaml.")
    return [_config_of(newest_run() if request.resume == "last" else Path(request.resume))]


def _config_of(path: Path) -> Path:
    """The ``config.yaml`` of a run, given its folder or one of its checkpoints."""
    for folder in (path, path.resolve().parent.parent):
        if (folder / "config.yaml").is_file():
            return folder / "config.yaml"
    found = "does not lie in a run's folder" if path.exists() else "does not exist"
    raise ConfigError(f"{path} {found}, so there is no config.yaml.\nGive a run's folder, or RUN_DIR/checkpoints/STEP.")
