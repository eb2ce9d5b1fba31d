"""The command line: ``policyfit fit``, ``plan``, ``validate``, ``eval``, ``checkpoints``, ``doctor`` and others.

Exit codes: 0 done, 1 the run failed, 2 a configuration or request that cannot be honoured, 130 interrupted,
143 preempted.
"""

from __future__ import annotations

import argparse
import errno
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from ..strategies.distributed import RankFailed
from ..strategies.errors import ConfigError, PolicyfitError, in_words
from . import commands
from .aliases import FILE_OPTIONS
from .requested import prints

EXAMPLES = """\
examples:
  policyfit fit run.yaml                                   train, and evaluate if the file says in what
  policyfit fit run.yaml --precision=fp16 --optimizer.lr=3e-4
  policyfit fit base.yaml lab.yaml --trainer.max_steps=2000
  policyfit fit run.yaml --resume                          go on with the newest run
  policyfit fit --resume=runs/NAME                         go on with that run, as it was configured
  policyfit fit run.yaml --resume=auto                     go on if there is something to go on with, else begin
  policyfit fit run.yaml --precision=bf16 --audit          prove that it is what runs
  policyfit plan run.yaml                                  what would run, and why
  policyfit validate runs/NAME                             the metrics of its validation data
  policyfit eval runs/NAME --device=cpu --episodes=20      let its newest checkpoint act
  policyfit checkpoints runs/NAME                          which there are, and whether they are whole
  policyfit doctor                                         what this machine offers
  policyfit schema > policyfit.schema.json                 for editors: which keys there are, and of what type
"""
WIDTH = 120  # of an error that goes to a file
KEYS = "Any key of the run file can be set, as --section.key=VALUE; --device, --precision, --tf32 are trainer keys."
PRINT_CONFIG = "print the run as resolved, which means the same when it is fed back, and stop"
RUN_FILES = (".yaml", ".yml", ".json")
LONGEST_LINE = 1200  # characters; of a longer one the middle is left out
_EXIT_DELAY_S = 3.0
_UNTOLD_DELAY_S = 10.0  # for an error that ranks did not tell each other: rank 0 may come to the same, or lose this one
NO_VERIFY = "compare the sizes of the checkpoint's files, not their checksums"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. Errors become one panel of text, with ``--debug`` a traceback too."""
    try:
        code = _run(list(sys.argv[1:] if argv is None else argv))
        print(end="", flush=True)  # now, as an error of it when Python ends could no longer be caught
    except BrokenPipeError:
        # The reader has what it wanted (``| head``), so this ends without a word, and with the code that Python's
        # documentation of SIGPIPE has for it, as rich's output does. The signal stays ignored: it would end a run whose
        # connection to a logger or a bucket is lost.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still to be written
        return 1
    return code


def _run(arguments: list[str]) -> int:
    try:
        request = _parse(arguments)
        request.run(request)
    except SystemExit as ended:
        if hasattr(ended, "is_told"):  # it broke off a run of several ranks
            _tell(ended, known=False)
        elif isinstance(ended.code, str):
            raise
        # else --help or --version has printed, or the run was preempted
        return 1 if isinstance(ended.code, str) else ended.code or 0
    except KeyboardInterrupt:
        if prints():
            print("Interrupted.", file=sys.stderr)
        return 130
    except Exception as raised:
        if isinstance(raised, BrokenPipeError) and _nobody_reads():
            raise
        error = _with_remedy(raised)
        known = isinstance(error, PolicyfitError)
        if "--debug" in arguments:
            traceback.print_exception(error)
        elif not known or isinstance(error, RankFailed):
            error.add_note("Run again with --debug for the traceback.")
        for name, argument in set(re.findall(r"\b(FP16|BF16)\((\w+)=True\)", in_words(error))):
            form = f"{{class_path: policyfit.{name}, init_args: {{{argument}: true}}}}"
            error.add_note(f"On the command line {name}({argument}=True) is written\n  --precision='{form}'")
        for unit in set(re.findall(r"\bFSDP\(wrap=\['([^']+)'\]\)", in_words(error))):
            form = f"{{class_path: policyfit.FSDP, init_args: {{wrap: [{unit}]}}}}"
            error.add_note(f"On the command line FSDP(wrap=['{unit}']) is written\n  --trainer.distributed='{form}'")
        _tell(error, known=known)
        return error.exit_code if isinstance(error, PolicyfitError) else 1
    return 0


def _tell(error: BaseException, *, known: bool) -> None:
    """Show an error on one rank alone, and leave only when the others have shown what they have.

    A launcher ends all ranks once the first has ended, and says of that one that it failed.
    """
    is_told = getattr(error, "is_told", None)
    if prints() or is_told is False:
        _show(error, known=known)
    if isinstance(error, RankFailed):
        time.sleep(2 * _EXIT_DELAY_S)  # longer than the rank that failed, whose exit code is to be the run's
    elif not prints():
        # For rank 0, which has the same error or tells of this one.
        time.sleep(_UNTOLD_DELAY_S if is_told is None else _EXIT_DELAY_S)
        if is_told is None:
            _show(error, known=known)


def _nobody_reads() -> bool:
    """Whether it is our output that nobody reads any more (``| head``), and not the pipe to a process of the run's."""
    try:
        print(flush=True)
    except BrokenPipeError:
        return True
    return False


def _with_remedy(error: Exception) -> Exception:
    """The error, with the remedy where it is a name on the command line that no file system takes."""
    if not (isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG):
        return error
    refused = ConfigError(f"A name is too long for a file or folder: {error.filename}.\nGive a shorter one.")
    refused.__cause__ = error
    return refused


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog}: {message}.\nSee {self.prog} --help.")


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        from importlib.metadata import version

        print(f"policyfit {version('policyfit')}")
        parser.exit()


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser, of_commands = parsers()
    chosen = of_commands.get(next(iter(arguments), ""))
    if chosen is None:
        return parser.parse_args(arguments)
    options = [option for action in chosen._actions for option in action.option_strings if option.startswith("--")]
    elsewhere = {option: name for name, other in of_commands.items() for option in other._option_string_actions}
    own, keys = _split(arguments, options, elsewhere, takes_keys=bool(chosen.get_default("takes_keys")))
    return parser.parse_args(own, argparse.Namespace(keys=keys))


def parsers() -> tuple[_Parser, dict[str, _Parser]]:
    """The parser of the command line, and those of the commands by name."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = _Parser("policyfit", description="Train robot policies.", epilog=EXAMPLES, formatter_class=layout)
    parser.add_argument("--version", action=_Version, nargs=0, help="say which release this is")
    added = parser.add_subparsers(metavar="COMMAND", required=True)

    def command(name: str, run: Callable[[argparse.Namespace], None], text: str, **more: Any) -> _Parser:
        made: _Parser = added.add_parser(name, help=text, description=text, **more)
        made.set_defaults(run=run)
        made.add_argument("--debug", action="store_true", help="show the traceback of an error")
        return made

    fit = command("fit", commands.fit, "Train as a run file says.", epilog=KEYS)
    fit.set_defaults(takes_keys=True)
    fit.add_argument("files", nargs="*", metavar="RUN.yaml", help="later files win over earlier ones")
    fit.add_argument("--resume", metavar="PATH", help="go on: with that run or checkpoint; without =PATH the last")
    fit.add_argument("--changes", metavar="NAME,...", default="", help="what may differ from the run gone on with")
    fit.add_argument("--no-verify", action="store_true", help=NO_VERIFY)
    fit.add_argument("--audit", action="store_true", help="report in what precision the first step really ran")
    plan = command("plan", commands.plan, "Say what a run file would run, and why.", epilog=KEYS)
    plan.set_defaults(takes_keys=True, resume=None, changes="", audit=False)
    plan.add_argument("files", nargs="+", metavar="RUN.yaml")
    plan.add_argument("--json", action="store_true", help="for programs")
    plan.add_argument("--with-data", action="store_true", help="build the training data, and count epochs in it")
    for takes_run_files in (fit, plan):
        takes_run_files.add_argument(
            "--print_config", action="store_const", dest="run", const=commands.print_config, help=PRINT_CONFIG
        )
    validate = command("validate", commands.validate, "Measure a trained policy on the validation data of its run.")
    _take_a_checkpoint(validate, commands.VALIDATE_KEYS)
    evaluate = command("eval", commands.evaluate, "Let a trained policy act in the environment of its run.")
    _take_a_checkpoint(evaluate, commands.EVAL_KEYS)
    listing = command(
        "checkpoints", commands.checkpoints, "List the checkpoints of a run and verify every file of them."
    )
    listing.add_argument("run_dir", metavar="RUN_DIR")
    command("doctor", commands.doctor, "Say what this machine offers.")
    command("schema", commands.schema, "Print the JSON schema of a run file, for editors.")
    completing = command("completion", commands.completion, "Print what makes a shell complete policyfit's words.")
    completing.add_argument("shell", choices=("bash", "zsh"), metavar="bash|zsh")
    return parser, added.choices


def _take_a_checkpoint(parser: argparse.ArgumentParser, keys: dict[str, str]) -> None:
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a run's folder or a checkpoint's")
    for name in keys:
        parser.add_argument(f"--{name}", help="instead of the run's")
    parser.add_argument("--no-verify", action="store_true", help=NO_VERIFY)
    parser.add_argument("--weights", default="raw", help='"raw" (the default), or "ema" for the average of EMA')


def _split(
    arguments: list[str], options: list[str], elsewhere: dict[str, str], *, takes_keys: bool
) -> tuple[list[str], list[tuple[str, str]]]:
    """The command's own arguments, and the ``--section.key=VALUE`` or ``--section.key VALUE`` pairs.

    ``elsewhere`` names a command for every option that some command has.
    """
    own: list[str] = []
    keys: list[tuple[str, str]] = []
    rest, before = iter(arguments), ""
    for argument in rest:
        option, given, text = argument.partition("=")
        if takes_keys and option in FILE_OPTIONS:
            file = text if given else next(rest, "")
            own.append(_no_file(option) if file.startswith("-") or not file else file)
            if prints():
                print(f"note: {option} is {FILE_OPTIONS[option]}'s; the file alone is enough", file=sys.stderr)
            continue
        if option == "--":
            raise ConfigError(f"{argument} names no option.\nWrite --section.key=VALUE, or leave it out.")
        if argument.lower() in ("--resume=true", "--resume=false"):
            instead = "leave it out for a new run" if argument.lower().endswith("false") else "or --resume=PATH"
            raise ConfigError(f"{argument} is LeRobot's.\nWrite --resume for the newest run, {instead}.")
        if before == "--resume" and not argument.startswith("-") and Path(argument).suffix not in RUN_FILES:
            raise ConfigError(f"--resume {argument} could be two things.\nWrite --resume={argument}.")
        before = argument
        if option in options and given and not text.strip():
            raise ConfigError(f"{argument} is empty.\nGive a value, or leave {option} out.")
        if not option.startswith("--") or option in options:
            own.append("--resume=last" if argument == "--resume" else argument)
            continue
        if option in elsewhere and not (takes_keys and option.removeprefix("--") in commands.EVAL_KEYS):
            raise ConfigError(f"{option} is an option of {elsewhere[option]}.\nLeave it out here.")
        near = [o for o in options if o.startswith(option)] or get_close_matches(option, options, n=1, cutoff=0.8)
        if near or not takes_keys:
            advice = f"Did you mean {near[0]}?" if near else f"Valid here: {', '.join(options)}."
            raise ConfigError(f"{option} is not an option. {advice}")
        value = text if given else next(rest, "--")
        if value.startswith("--") and not given:
            is_key = "." in option or option.removeprefix("--") in commands.EVAL_KEYS
            what = "needs" if is_key else f"is none of the options {', '.join(options)}; a key of the run needs"
            raise ConfigError(f"{option} {what} a value: {option}=VALUE.")
        keys.append((option.removeprefix("--"), value))
    return own, keys


def _no_file(option: str) -> NoReturn:
    raise ConfigError(f"{option} needs a file.\nThe file alone is enough: policyfit fit RUN.yaml.")


def _show(error: BaseException, *, known: bool) -> None:
    from rich.console import Console
    from rich.panel import Panel
    from rich.text import Text

    text = "\n".join([str(error) if known else in_words(error), *getattr(error, "__notes__", [])])
    text = "\n".join(map(_shortened, text.splitlines()))
    console = Console(stderr=True)
    if not console.is_terminal:  # prose is wrapped in a log, too, but a path in it stays whole
        longest = max(len(line) for line in text.splitlines())
        console.width = max(80, min(longest + 4, WIDTH), *(len(word) + 4 for word in text.split()))
    of_rank = "" if prints() else f" on rank {os.environ['RANK']}"
    console.print(Panel(Text(text), title=f"{type(error).__name__}{of_rank}", border_style="red"))


def _shortened(line: str) -> str:
    return line if len(line) <= LONGEST_LINE else f"{line[: LONGEST_LINE // 2]} [...] {line[-LONGEST_LINE // 2 :]}"
