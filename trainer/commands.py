"""What each command does; ``cli.py`` says how it is written."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..strategies.errors import CheckpointError, ConfigError, DistributedError
from ..strategies.facts import probe, world_size
from .requested import config_of, configured, prints, read, warn

if TYPE_CHECKING:
    from torch import nn

    from .config import RunConfig, RunRecipe
    from .rollout import RolloutReport
    from .trainer import Trainer

#: The options of ``validate`` and of ``eval`` that stand in place of a key of the run.
VALIDATE_KEYS = {"device": "device", "precision": "precision", "tf32": "tf32"}
EVAL_KEYS = {**VALIDATE_KEYS, "env": "eval.env", "episodes": "eval.episodes", "seed": "eval.seed"}


def _alone(command: Callable[[argparse.Namespace], None]) -> Callable[[argparse.Namespace], None]:
    """A command that needs no other rank, which rank 0 therefore does alone."""

    @wraps(command)
    def done_once(request: argparse.Namespace) -> None:
        if prints():
            command(request)

    return done_once


def fit(request: argparse.Namespace) -> None:
    """Train, and evaluate where the run names an environment."""
    with configured(request) as run:
        trainer, policy = _trainable(run, request.resume)
        env = run.build("eval", "env")  # a mistake in it is to be known before data is recorded and hours of training
        with ExitStack() as unused:
            if hasattr(env, "reset") and hasattr(env, "close"):  # an environment, and not what makes one
                unused.callback(env.close)
            train_data, val_data = run.build("data", "train"), run.build("data", "val")
            trainer.fit(
                policy,
                train_data,
                val_data,
                optimizer=run.maker("optimizer"),
                schedule=run.maker("schedule"),
                resume=request.resume,
                changes=request.changes,
                verify=not request.no_verify,
            )
            unused.pop_all()  # the evaluation closes it
        if env is not None:
            if trainer.distribution.is_sharded:  # its shards are of no use to anybody alone
                policy = _whole_policy(run, trainer)
            report = trainer.evaluate(policy, env, **run.evaluation)
            _report(report, trainer, trainer.run_dir / "eval.json")


def plan(request: argparse.Namespace) -> None:
    """Print what would run, and why."""
    from .forecast import forecast

    with configured(request) as run:
        trainer, policy = _trainable(run)
        plan = forecast(run, trainer, policy, build_data=request.with_data)
    if trainer.is_main:
        print(json.dumps(plan.to_dict(), indent=2) if request.json else plan.text())


@_alone
def print_config(request: argparse.Namespace) -> None:
    """Print the run as resolved; nothing is built."""
    from .strict_yaml import write

    with configured(request) as run:
        print(write(run.config.values), end="")


def validate(request: argparse.Namespace) -> None:
    """Print the means of a checkpoint's policy over its run's validation data."""
    from .config import resolve_validation
    from .early import check_data

    with _trained(request, VALIDATE_KEYS, resolve_validation) as (run, trainer, policy, origin):
        check_data(run, policy, "val")
        _say(origin)
        metrics = trainer.validate(policy, run.build("data", "val"))
    if trainer.is_main:
        print("\n".join(f"{name} {value:.6g}" for name, value in sorted(metrics.items())))


def evaluate(request: argparse.Namespace) -> None:
    """Let a checkpoint's policy act in its run's environment."""
    from .config import resolve_evaluation

    with _trained(request, EVAL_KEYS, resolve_evaluation) as (run, trainer, policy, origin):
        _say(origin)
        _report(trainer.evaluate(policy, run.build("eval", "env"), **run.evaluation), trainer)


@_alone
def checkpoints(request: argparse.Namespace) -> None:
    """List the checkpoints of a run, every file of them verified.

    Raises:
        CheckpointError: One is damaged.
        ConfigError: There is none.
    """
    from .listing import list_checkpoints
    from .remote import local

    with local(request.run_dir, warn, every=True) as run_dir:
        found = list_checkpoints(run_dir)
    if not found:
        raise ConfigError(f"There is no checkpoint in {request.run_dir}.\nGive a run's folder, such as runs/NAME.")
    for entry in found:
        print(entry.line().replace(str(run_dir), request.run_dir))
    damaged = [entry.name for entry in found if entry.damage]
    if damaged:
        raise CheckpointError(
            f"{len(damaged)} of {len(found)} checkpoints are damaged: {', '.join(damaged)}.\n"
            "A run that goes on takes the newest whole one; delete the folders of the damaged."
        )


@_alone
def schema(request: argparse.Namespace) -> None:
    """Print the JSON schema of a run file."""
    from .schema import schema

    print(json.dumps(schema(), indent=2))


@_alone
def completion(request: argparse.Namespace) -> None:
    """Print the completion of a shell."""
    from .completion import script

    print(script(request.shell), end="")


@_alone
def doctor(request: argparse.Namespace) -> None:
    """Print what this machine offers."""
    from .doctor import main_text

    print(main_text())


class _Trained(NamedTuple):
    """A checkpoint's policy with the rest of its run; ``origin`` says whose weights it has, and where they compute."""

    run: RunRecipe
    trainer: Trainer
    policy: nn.Module
    origin: str


@contextmanager
def _trained(
    request: argparse.Namespace, keys: dict[str, str], resolve: Callable[[RunConfig], RunRecipe]
) -> Iterator[_Trained]:
    """A checkpoint's policy, and of its run what ``resolve`` makes of the config and the options."""
    from .load import load
    from .manifest import read_manifest
    from .newest import newest_checkpoint
    from .remote import local

    with ExitStack() as stack:
        where = stack.enter_context(local(request.checkpoint, warn))
        config_file = config_of(where)
        verify = not request.no_verify
        checkpoint = newest_checkpoint(where, warn, verify=verify)
        # The device that the run was on, not what its "auto" would choose here: never another one in silence.
        manifest = read_manifest(checkpoint)
        given = {"device": manifest["device"]}
        given |= {name: text for name in keys if (text := getattr(request, name)) is not None}
        config = read([config_file], [(keys[name], text) for name, text in given.items()])
        stack.enter_context(config.importable())
        run = resolve(config)
        trainer = _seeded_trainer(run)
        policy = load(
            checkpoint,
            device=trainer.device,
            precision=trainer.precision,
            weights=request.weights,
            verify=False,  # done
        )
        step = manifest["counters"]["step"]
        weights = f"checkpoint {checkpoint}  step {step}  weights {request.weights}"
        place = f"device {trainer.device.name}  precision {trainer.precision.name}"
        yield _Trained(run, trainer, policy, f"{weights}  {place}")


def _whole_policy(run: RunRecipe, trainer: Trainer) -> nn.Module:
    """The policy of the run's last checkpoint, with the weights that the run evaluates with."""
    from ..callbacks.ema import EMA
    from .load import load

    averages = any(isinstance(callback, EMA) and callback.evaluate for callback in trainer.callbacks)
    return load(
        trainer.run_dir / "checkpoints" / "last",
        device=trainer.device,
        precision=trainer.precision,
        policy=_policy(run),
        weights="ema" if averages else "raw",
        verify=False,
    )


def _say(text: str) -> None:
    if prints():
        print(text, flush=True)


def _trainable(run: RunRecipe, resume: str | None = None) -> tuple[Trainer, nn.Module]:
    """The trainer and the policy of a run, with all refused that can be known before its data is made."""
    from .early import check_resumable, check_trainable

    try:
        trainer = _seeded_trainer(run)
    except DistributedError as error:
        if resume is not None and world_size(probe()) == 1:
            error.add_note("The run goes on in this one process, too: --trainer.distributed=auto")
        raise
    check_resumable(resume, run.config.values["trainer"]["run_dir"])
    policy = _policy(run)
    check_trainable(run, policy)
    return trainer, policy


def _seeded_trainer(run: RunRecipe) -> Trainer:
    """The trainer; what is built after it, such as the policy's first weights, comes from the run's seed."""
    from .rng import seed_everything

    trainer: Trainer = run.trainer.build()
    trainer.config = run.config.values
    seed = trainer.config["trainer"].get("seed")
    if seed is not None:
        seed_everything(seed)
    return trainer


def _policy(run: RunRecipe) -> nn.Module:
    """The policy, refused where the run is to evaluate it and it cannot act."""
    policy: nn.Module = run.build("policy")
    if ("eval", "env") in run.recipes and not callable(getattr(policy, "select_action", None)):
        raise run.config.fault(
            ("eval",),
            f"eval needs a policy that can act, but {type(policy).__name__} has no select_action.\n"
            "Add select_action(observation), which returns actions of shape (num_envs, action), or leave eval out.",
        )
    return policy


def _report(report: RolloutReport, trainer: Trainer, file: Path | None = None) -> None:
    if not trainer.is_main:
        return
    print(report.summary())
    if file is not None:
        file.write_text(json.dumps(report.to_dict(), indent=2) + "\n")
