"""Variables of the environment in a run file, by one explicit spelling.

    ${env:NAME}           the variable; an error where it is not set, or empty
    ${env:NAME:-VALUE}    VALUE where it is not set, or empty
    $${                   the text ${

No other spelling reads the environment: ``$NAME`` is text, and ``${NAME}`` is refused.
"""

from __future__ import annotations

import os
import re

BRACES = re.compile(r"\$(?P<escaped>\$\{)|\$\{(?P<inside>[^}]*)(?P<end>\}?)")
VARIABLE = re.compile(r"env:(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>.*))?", re.DOTALL)


def fill_in(text: str) -> str:
    """The text with the variables that it names in place.

    Raises:
        ValueError: A variable is not set and has no default, or something else stands between the braces.
    """
    return BRACES.sub(_value, text)


def escape(text: str) -> str:
    """Text of which ``fill_in`` makes this one again."""
    return text.replace("${", "$${")


def _value(found: re.Match[str]) -> str:
    if found["escaped"]:
        return "${"
    variable = VARIABLE.fullmatch(found["inside"])
    if variable is None or not found["end"]:
        word = found["inside"].rpartition(":")[2]
        name = word if word.isidentifier() else "NAME"
        raise ValueError(
            f"{found[0]} names no variable of the environment.\n"
            f"Write ${{env:{name}}}, or ${{env:{name}:-VALUE}} with a default; for the text ${{ write $${{."
        )
    name, default = variable["name"], variable["default"]
    value = os.environ.get(name) or default
    if value is None:
        problem = "is empty" if name in os.environ else "is not set"
        raise ValueError(
            f"{found[0]} needs the environment variable {name}, which {problem}.\n"
            f"Set it, or give a default: ${{env:{name}:-VALUE}}."
        )
    return value
