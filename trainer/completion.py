"""Completion of the command line, as a script for a shell that ``policyfit completion`` prints.

Its words are those of the release that prints it.
"""

from __future__ import annotations

from .cli import parsers
from .config import Evaluation
from .hints import Parameter, choices, parameters
from .layers import PLACES, SHORT
from .schema import EXAMPLES
from .strict_yaml import dotted
from .trainer import Trainer

SCRIPT = """\
# Completion of policyfit for {shell}; in its start-up file:  eval "$(policyfit completion {shell})"
{setup}_policyfit() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" option="" prefix="" offers=""
    case "$word" in
        --*=*) option="${{word%%=*}}" prefix="${{word%%=*}}=" word="${{word#*=}}" ;;
        =) option="${{COMP_WORDS[COMP_CWORD-1]}}" word="" ;;
        -*) ;;
        *) case "${{COMP_WORDS[COMP_CWORD-1]}}" in
            =) option="${{COMP_WORDS[COMP_CWORD-2]}}" ;;
            --*) option="${{COMP_WORDS[COMP_CWORD-1]}}" ;;
        esac ;;
    esac
    if [ -n "$option" ]; then
        case "$option" in
{values}
        esac
    elif [ "$COMP_CWORD" = 1 ]; then
        offers="{commands}"
    elif [ "${{COMP_WORDS[1]}}" = completion ] && [ "${{word#-}}" = "$word" ]; then
        offers="{shells}"
    elif [ "${{word#-}}" != "$word" ]; then
        case "${{COMP_WORDS[1]}}" in
{options}
        esac
    fi
    COMPREPLY=($(compgen -P "$prefix" -W "$offers" -- "$word"))
    case "${{COMPREPLY[0]}}" in *[=.]) type compopt >/dev/null 2>&1 && compopt -o nospace 2>/dev/null ;; esac
}}
complete -o default -F _policyfit policyfit
"""
SETUP = {"bash": "", "zsh": "autoload -Uz compinit bashcompinit && compinit && bashcompinit\n"}


def script(shell: str) -> str:
    """The script for ``bash`` or ``zsh``; where it has no word to offer, the shell offers files."""
    _, commands = parsers()
    keys = {f"trainer.{name}": parameter for name, parameter in parameters(Trainer).items()}
    keys |= {f"eval.{name}": parameter for name, parameter in parameters(Evaluation).items()}
    keys |= {short: keys[key] for short, key in SHORT.items()}
    values = {f"--{key}": " ".join(_values(key, parameter)) for key, parameter in keys.items()} | {
        "--weights": "raw ema"
    }
    named = [f"{dotted(place)}.{end}" for place in PLACES for end in ("class_path=", "init_args.")]
    options = {}
    for name, command in commands.items():
        own = [option for option in command._option_string_actions if option.startswith("--")]
        takes_keys = command.get_default("takes_keys")
        options[name] = " ".join([*own, *(f"--{key}" for key in [*(f"{key}=" for key in keys), *named] if takes_keys)])
    return SCRIPT.format(
        shell=shell,
        setup=SETUP[shell],
        commands=" ".join(commands),
        shells=" ".join(SETUP),
        values=_cases({option: words for option, words in values.items() if words}),
        options=_cases(options),
    )


def _values(key: str, parameter: Parameter) -> list[str]:
    *_, name = key.split(".")
    words = EXAMPLES.get(name, [word for word in choices(parameter.options) if word != "False"])
    return [*words, "true", "false"] if bool in parameter.options else words


def _cases(words: dict[str, str]) -> str:
    return "\n".join(f'            {pattern}) offers="{found}" ;;' for pattern, found in words.items())
