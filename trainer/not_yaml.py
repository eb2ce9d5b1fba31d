"""What to say of text that is not YAML."""

from __future__ import annotations

import re
from typing import Any

COMMAS = ", or put the missing comma between two of its items"
#: What PyYAML calls that which is open, and what else than its end may be missing.
UNCLOSED = {
    "while parsing a flow mapping": COMMAS,
    "while parsing a flow sequence": COMMAS,
    "while scanning a quoted scalar": "",
}


def syntax_message(error: Any, text: str, name: str) -> str:
    """Where the text is not YAML, why, and what to do; ``error`` is a ``yaml.MarkedYAMLError``, ``name`` the file's."""
    mark, lines = error.problem_mark, text.splitlines()
    line = lines[mark.line] if mark.line < len(lines) else ""
    what = ", ".join(part for part in (error.context, error.problem) if part)
    if line[max(0, mark.column - 1) : mark.column + 1] == "${":
        advice = "Within [ ] and { } put ${...} in double quotes."
    elif "\t" in line:
        advice = "Indent with spaces: YAML does not allow tabs there."
    else:
        advice = _advice(error, lines, name)
    return f"{_place(mark, name)}: this is not YAML: {what}.\n{advice}"


def _advice(error: Any, lines: list[str], name: str) -> str:
    """What to do; PyYAML stops where it cannot go on, which may be a line after the mistake."""
    mark, begun = error.problem_mark, error.context_mark
    if error.context in UNCLOSED:
        opening = lines[begun.line][begun.column]
        return f"Close the {opening} at {_place(begun, name)}{UNCLOSED[error.context]}."
    for number in (begun.line if begun else mark.line - 1, mark.line):
        close = re.match(r"\s*(?:- )?[\w.+-]+:(?=[^\s:/])", lines[number]) if 0 <= number < len(lines) else None
        if close:
            return f"Line {number + 1}: a space after the colon? {close[0].strip()} {lines[number][close.end() :]}"
    return "Indent alike what belongs together, and put text with signs in it in single quotes."


def _place(mark: Any, name: str) -> str:
    return f"{name}:{mark.line + 1}:{mark.column + 1}"
