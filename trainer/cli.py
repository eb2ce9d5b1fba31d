"""The command line: ``policyfit fit``, ``eval``, ``plan`` and ``doctor``.

Exit codes: 0 done, 1 the run failed, 2 a configuration or request that cannot be honoured, 130 interrupted,
143 preempted.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ..strategies.errors import ConfigError, PolicyfitError

if TYPE_CHECKING:
    from .config import Run, RunConfig
    from .rollout import RolloutReport
    from .trainer import Trainer

EXAMPLES = """\
examples:
  policyfit fit run.yaml                                   train, and evaluate if the file says in what
  policyfit fit run.yaml --precision=fp16 --optimizer.lr=3e-4
  policyfit fit base.yaml lab.yaml --trainer.max_steps=2000
  policyfit fit run.yaml --resume                          go on with the newest run
  policyfit fit --resume=runs/NAME                         go on with that run, as it was configured
  policyfit fit run.yaml --precision=bf16 --audit          prove that it is what runs
  policyfit plan run.yaml                                  what would run, and why
  policyfit eval runs/NAME --device=cpu --episodes=20
  policyfit doctor                                         what this machine offers
"""
KEYS = "Any key of the run file can be set, as --section.key=VALUE; --device, --precision, --tf32 are trainer keys."
EVAL_KEYS = {"device": "device", "precision": "precision", "episodes": "eval.episodes", "seed": "eval.seed"}
OPTIONS = {
    "fit": ["--resume", "--audit"],
    "plan": ["--json"],
    "eval": [f"--{name}" for name in EVAL_KEYS],
    "doctor": [],
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. Errors become one panel of text, with ``--debug`` a traceback too."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        try:
            request = _parse(arguments)
        except SystemExit as done:  # --help and --version have printed
            return int(done.code or 0)
        request.run(request)
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return 130
    except Exception as error:
        known = isinstance(error, PolicyfitError)
        if "--debug" in arguments:
            traceback.print_exception(error)
        elif not known:
            error.add_note("Run again with --debug for the traceback.")
        _show(error, known=known)
        return error.exit_code if isinstance(error, PolicyfitError) else 1
    return 0


def _fit(request: argparse.Namespace) -> None:
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


def _plan(request: argparse.Namespace) -> None:
    from .config import read_run, resolve

    config = read_run(request.files, request.keys)
    with config.importable():
        run = resolve(config)
        trainer = _seeded_trainer(run)
        plan = trainer.dry_run(run.build("policy"), optimizer=run.maker("optimizer"), schedule=run.maker("schedule"))
    print(json.dumps(plan.to_dict(), indent=2) if request.json else plan.text())


def _eval(request: argparse.Namespace) -> None:
    from .checkpoint import newest_checkpoint, read_manifest
    from .config import read_run, resolve_evaluation
    from .load import load

    config_file = _config_of(Path(request.checkpoint))
    checkpoint = newest_checkpoint(Path(request.checkpoint), lambda text: print(text, file=sys.stderr))
    # The device that the run was on, not what its "auto" would choose here: never another one in silence.
    given = {"device": read_manifest(checkpoint)["device"]}
    given |= {name: text for name in EVAL_KEYS if (text := getattr(request, name)) is not None}
    config = read_run([config_file], [(EVAL_KEYS[name], text) for name, text in given.items()])
    with config.importable():
        run = resolve_evaluation(config)
        trainer = run.trainer.build()
        policy = load(checkpoint, device=trainer.device, precision=trainer.precision)
        _report(trainer.evaluate(policy, run.build("eval", "env"), **run.evaluation), trainer)


def _doctor(request: argparse.Namespace) -> None:
    from .doctor import main_text

    print(main_text())


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


def _seeded_trainer(run: Run) -> Trainer:
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


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog}: {message}.\nSee {self.prog} --help.")


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        from importlib.metadata import version

        print(f"policyfit {version('policyfit')}")
        parser.exit()


def _parse(arguments: list[str]) -> argparse.Namespace:
    layout = argparse.RawDescriptionHelpFormatter
    parser = _Parser("policyfit", description="Train robot policies.", epilog=EXAMPLES, formatter_class=layout)
    parser.add_argument("--version", action=_Version, nargs=0, help="say which release this is")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def command(name: str, run: Any, text: str, epilog: str = "") -> argparse.ArgumentParser:
        added: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text, epilog=epilog)
        added.set_defaults(run=run)
        added.add_argument("--debug", action="store_true", help="show the traceback of an error")
        return added

    fit = command("fit", _fit, "Train as a run file says.", KEYS)
    fit.add_argument("files", nargs="*", metavar="RUN.yaml", help="later files win over earlier ones")
    fit.add_argument("--resume", metavar="PATH", help="go on: with that run or checkpoint; without =PATH the last")
    fit.add_argument("--audit", action="store_true", help="report in what precision the first step really ran")
    plan = command("plan", _plan, "Say what a run file would run, and why.", KEYS)
    plan.add_argument("files", nargs="+", metavar="RUN.yaml")
    plan.add_argument("--json", action="store_true", help="for programs")
    evaluate = command("eval", _eval, "Let a trained policy act in the environment of its run.")
    evaluate.add_argument("checkpoint", metavar="CHECKPOINT", help="a run's folder or a checkpoint's")
    for name in EVAL_KEYS:
        evaluate.add_argument(f"--{name}", help="instead of the run's")
    command("doctor", _doctor, "Say what this machine offers.")

    name = next(iter(arguments), "")
    if name not in OPTIONS:
        return parser.parse_args(arguments)
    own, keys = _split(arguments, [*OPTIONS[name], "--debug", "--help"], takes_keys=name in ("fit", "plan"))
    return parser.parse_args(own, argparse.Namespace(keys=keys))


def _split(arguments: list[str], options: list[str], *, takes_keys: bool) -> tuple[list[str], list[tuple[str, str]]]:
    """The command's own arguments, and the ``--section.key=VALUE`` or ``--section.key VALUE`` pairs."""
    own: list[str] = []
    keys: list[tuple[str, str]] = []
    rest = iter(arguments)
    for argument in rest:
        option, given, text = argument.partition("=")
        if not option.startswith("--") or option in options:
            own.append("--resume=last" if argument == "--resume" else argument)
            continue
        near = [o for o in options if o.startswith(option)] or get_close_matches(option, options, n=1, cutoff=0.8)
        if near or not takes_keys:
            advice = f"Did you mean {near[0]}?" if near else f"Valid here: {', '.join(options)}."
            raise ConfigError(f"{option} is not an option. {advice}")
        value = text if given else next(rest, "--")
        if value.startswith("--") and not given:
            raise ConfigError(f"{option} needs a value: {option}=VALUE.")
        keys.append((option.removeprefix("--"), value))
    return own, keys


def _show(error: Exception, *, known: bool) -> None:
    from rich.console import Console
    from rich.panel import Panel
    from rich.text import Text

    text = "\n".join([str(error) if known else f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
    console = Console(stderr=True)
    if not console.is_terminal:  # a log keeps its lines whole, so that they can be searched
        console.width = max(console.width, *(len(line) + 4 for line in text.splitlines()), 0)
    console.print(Panel(Text(text), title=type(error).__name__, border_style="red"))
