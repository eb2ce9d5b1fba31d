"""YAML as a person means it: ``no`` is a word, ``1e-4`` a number, and a key that is written twice an error.

Every value is plain Python (dict, list, str, int, float, bool, None), and every key keeps its place in the
text, so that an error found later can name file, line and column. What other YAML readers would read in two
ways (``010``, ``1_000``, dates) is refused with the advice to quote it.

Source: YAML 1.2.2, section 10.3.2 (core schema), which PyYAML, a YAML 1.1 reader, does not follow.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..strategies.errors import ConfigError
from .interpolation import escape, fill_in
from .not_yaml import syntax_message

KeyPath = tuple[str | int, ...]

CONSTANTS: dict[str, bool | float | None] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **{sign + word: float(sign + "inf") for sign in ("", "+", "-") for word in (".inf", ".Inf", ".INF")},
    **dict.fromkeys((".nan", ".NaN", ".NAN"), math.nan),
}
INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*)")
FLOAT = re.compile(r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
DIGITS = ", or the number in plain decimal digits"
#: A word, what else than text it could be, and how that is written.
TWO_MEANINGS = (
    (re.compile(r"[-+]?0o[0-7]+|[-+]?0[xX][0-9a-fA-F]+|[-+]?0[bB][01]+"), "a number that is not decimal", DIGITS),
    (re.compile(r"[-+]?0[0-9_]+(\.[0-9_]*)?([eE][-+]?[0-9]+)?"), "a number with leading zeros", DIGITS),
    (re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?([eE][-+]?[0-9]+)?"), "a number with underscores", DIGITS),
    (re.compile(r"[-+]?[0-9]+(:[0-5]?[0-9])+(\.[0-9]*)?"), "a time, or a number to the base 60", DIGITS),
    (re.compile(r"[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}([Tt ].*)?"), "a date", ""),
    (re.compile(r"[-+]?(inf|infinity)", re.IGNORECASE), "a number", ", or .inf or -.inf for the number"),
    (re.compile(r"[-+]?nan", re.IGNORECASE), "a number", ", or .nan for what is no number"),
)
LONGEST_NUMBER = 300  # characters; int() of a much longer one is slow and then refused by Python
DEEPEST = 100  # levels; the readers recurse
LARGEST_FILE = 10_000_000  # bytes; a device such as /dev/zero never ends
LARGEST_DOCUMENT = 100_000  # values; aliases of aliases grow exponentially


@dataclass(frozen=True, slots=True)
class Mark:
    """A place in a run file, or on the command line (where ``line`` is 0).

    ``variable`` is a line that says so where a variable of the environment is in the value.
    """

    file: str
    line: int = 0
    column: int = 0
    variable: str = field(default="", compare=False)

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}" if self.line else self.file


@dataclass(frozen=True, slots=True)
class Document:
    """What a text says, and where it says it: one mark for each key and list item, by its path."""

    value: Any
    marks: dict[KeyPath, Mark] = field(default_factory=dict)


def dotted(path: KeyPath) -> str:
    """``("trainer", "callbacks", 0)`` as a person writes it: ``trainer.callbacks[0]``."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


def read_file(path: str | Path) -> Document:
    """The one document of a YAML (or JSON) file.

    Raises:
        ConfigError: The file is missing, unreadable, empty or not text, or its text is refused.
    """
    path = Path(path)
    try:
        if path.is_dir():
            raise ConfigError(f"{path} is a folder, but a YAML file was expected.\nName the file in it.")
        with path.open("rb") as file:
            content = file.read(LARGEST_FILE + 1)
    except FileNotFoundError:
        advice = f"To set a key write --{path}." if re.match(r"[\w.]+\+?=", str(path)) else "Check the path."
        raise ConfigError(f"{path} does not exist; a YAML file was expected.\n{advice}") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.\nCheck the path and its permissions.") from error
    if len(content) > LARGEST_FILE:
        size = f"{LARGEST_FILE // 1_000_000} MB"
        raise ConfigError(f"{path} is larger than {size}, so it is no run file.\nCheck the path.")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = content[: error.start].decode("utf-8-sig")
        raise ConfigError(
            f"{_mark_after(before, str(path))}: this is not text in UTF-8 (byte {error.start} of the file).\n"
            "Save the file as UTF-8."
        ) from error
    return read_text(text, str(path))


def read_text(text: str, name: str) -> Document:
    """The one document in ``text``; ``name`` stands for the file in messages.

    Raises:
        ConfigError: The text is empty, is not YAML, holds several documents, or means two things.
    """
    import yaml

    try:
        events: Iterable[Any] = yaml.parse(text, Loader=yaml.SafeLoader)
        depth = 0
        for event in events:
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > DEEPEST:
                raise ConfigError(f"{_mark(event, name)}: more than {DEEPEST} levels are nested here.")
            if getattr(event, "tag", None) is not None:
                raise ConfigError(f"{_mark(event, name)}: tags ({event.tag}) are not supported.\nLeave it out.")
        nodes = list(yaml.compose_all(text, Loader=yaml.SafeLoader))
    except yaml.MarkedYAMLError as error:
        raise ConfigError(syntax_message(error, text, name)) from error
    except yaml.reader.ReaderError as error:
        place, found = _mark_after(text[: error.position], name), chr(error.character)
        raise ConfigError(f"{place}: the character {found!r} is not allowed in YAML text.\nRemove it.") from error
    if len(nodes) > 1:
        raise ConfigError(
            f"{_mark(nodes[1], name)}: a second document begins here, but one file describes one run.\n"
            "Remove the line '---', or make two files of it."
        )
    if not nodes or (_plain(nodes[0]) and nodes[0].value == ""):
        raise ConfigError(f"{name} is empty: it holds no value.\nBegin it with policy: {{class_path: module.Class}}.")
    builder = _Builder(name)
    return Document(builder.value(nodes[0], ()), builder.marks)


def read_word(text: str, name: str) -> Any:
    """What a value on the command line means: exactly what it would mean in a file.

    Lists, mappings and quotes are YAML as well; any other text is one word, even with ``:`` or ``#`` in it.

    Raises:
        ConfigError: The text is empty, is not YAML, or means two things.
    """
    text = text.strip()
    if not text:  # in a file that is null; here it is more likely a shell variable that is not set
        raise ConfigError(f"{name} is empty.\nGive a value, or write null for nothing.")
    if text[:1] in ("[", "{", '"', "'"):
        return read_text(text, name).value
    try:
        return _word(text)
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from None


def _word(text: str) -> Any:
    """What a plain word means, its variables filled in."""
    filled = fill_in(text)
    try:
        return scalar(filled)
    except ValueError as error:
        raise ValueError(f"{text} is {filled}: {error}" if filled != text else str(error)) from None


def scalar(text: str) -> str | int | float | bool | None:
    """What a plain word means.

    Raises:
        ValueError: YAML readers disagree about the word.
    """
    if text in CONSTANTS:
        return CONSTANTS[text]
    if len(text) <= LONGEST_NUMBER:
        if INTEGER.fullmatch(text):
            return int(text)
        if FLOAT.fullmatch(text):
            number = float(text)
            if math.isinf(number):
                raise ValueError(f"{text} is too large for a floating-point number.")
            return number
        for pattern, meaning, other in TWO_MEANINGS:
            if pattern.fullmatch(text):
                raise ValueError(f'{text} could be text or {meaning}.\nWrite "{text}" in quotes for the text{other}.')
    return text


def write(value: Any) -> str:
    """YAML text that ``read_text`` reads back as an equal value.

    Raises:
        ConfigError: The value is not plain (dict, list, str, int, float, bool or None).
    """
    import yaml

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

    Dumper.add_representer(str, _represent_text)
    Dumper.add_representer(tuple, yaml.SafeDumper.represent_list)
    try:
        text = yaml.dump(value, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=110)
    except yaml.representer.RepresenterError as error:
        raise ConfigError(
            f"{error.args[-1]!r} cannot be written as YAML: it is no plain value.\n"
            "Use numbers, words, lists and mappings of them."
        ) from error
    return str(text)


class _Builder:
    def __init__(self, name: str) -> None:
        self.name = name
        self.marks: dict[KeyPath, Mark] = {}
        self._open: list[Any] = []
        self._count = 0

    def value(self, node: Any, path: KeyPath) -> Any:
        self._count += 1
        if self._count > LARGEST_DOCUMENT:
            raise self._error(node, f"the file holds more than {LARGEST_DOCUMENT} values, counting each alias.")
        if node.id == "scalar":
            return self._scalar(node, path)
        if any(node is outer for outer in self._open):
            raise self._error(node, "this anchor contains itself.\nWrite its value out.")
        self._open.append(node)
        value = self._mapping(node, path) if node.id == "mapping" else self._list(node, path)
        self._open.pop()
        return value

    def _mapping(self, node: Any, path: KeyPath) -> dict[str | int, Any]:
        mapping: dict[str | int, Any] = {}
        written: dict[str, str | int] = {}  # 1 and "1" are one key to whoever reads it
        for key_node, value_node in node.value:
            key = self._scalar(key_node, ()) if key_node.id == "scalar" else None
            if key == "<<" and _plain(key_node):
                raise self._error(key_node, "merge keys (<<) are not supported.\nWrite the keys out, or use two files.")
            if isinstance(key, bool) or not isinstance(key, str | int):
                raise self._error(key_node, "a key must be a word or a whole number.\nWrite it in quotes.")
            other = written.setdefault(str(key), key)
            if (*path, other) in self.marks:
                first = self.marks[(*path, other)]
                raise self._error(key_node, f"the key {key!r} is written twice; it first stands at {first}.\nKeep one.")
            self.marks[(*path, key)] = _mark(key_node, self.name, value_node)
            mapping[key] = self.value(value_node, (*path, key))
        return mapping

    def _list(self, node: Any, path: KeyPath) -> list[Any]:
        items = []
        for index, item in enumerate(node.value):
            self.marks[(*path, index)] = _mark(item, self.name, item)
            items.append(self.value(item, (*path, index)))
        return items

    def _scalar(self, node: Any, path: KeyPath) -> Any:
        try:
            return _word(node.value) if _plain(node) else fill_in(node.value)
        except ValueError as error:
            raise self._error(node, f"{dotted(path)}: {error}" if path else str(error)) from None

    def _error(self, node: Any, message: str) -> ConfigError:
        return ConfigError(f"{_mark(node, self.name)}: {message}")


def _represent_text(dumper: Any, text: str) -> Any:
    text = escape(text)
    try:
        plain = scalar(text) == text and text != "<<"
    except ValueError:
        plain = False
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if plain else '"')


def _plain(node: Any) -> bool:
    return node.id == "scalar" and node.style is None


def _mark(node: Any, name: str, value: Any = None) -> Mark:
    """The place of a node; ``value`` is the one that is written there."""
    variable = value is not None and value.id == "scalar" and "${env:" in value.value
    said = f"\nThe value is what {value.value} gave." if variable else ""
    return Mark(name, node.start_mark.line + 1, node.start_mark.column + 1, said)


def _mark_after(text: str, name: str) -> Mark:
    """The place of what comes after ``text``."""
    return Mark(name, text.count("\n") + 1, len(text) - text.rfind("\n"))
