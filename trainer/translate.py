"""From the words of other tools, which ``aliases.py`` lists, to the keys of policyfit: one layer of a run at a time."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..strategies.errors import ConfigError
from .aliases import LIGHTNING, REFUSED, TAKEN, VALUES, Refused, Taken
from .strict_yaml import KeyPath, Mark


class Notice(NamedTuple):
    """A word that was taken, as it was written, and the line that says so."""

    word: str
    text: str


@dataclass(slots=True)
class Layer:
    """What a file or a key of the command line says, and where."""

    values: dict[str, Any]
    marks: dict[KeyPath, Mark]
    notices: list[Notice] = field(default_factory=list)

    def holds(self, key: str) -> bool:
        """Whether the key is there."""
        *outer, last = key.split(".")
        node: Any = self.values
        for part in outer:
            node = node.get(part) if isinstance(node, Mapping) else None
        return isinstance(node, Mapping) and last in node

    def take_out(self, key: str) -> Any:
        """Its value, which is no longer there; nor are mappings that held nothing else."""
        *outer, last = key.split(".")
        nodes = [self.values]
        for part in outer:
            nodes.append(nodes[-1][part])
        value = nodes[-1].pop(last)
        for part, holder, inner in reversed(list(zip(outer, nodes, nodes[1:], strict=False))):
            if not inner:
                del holder[part]
        return value

    def put(self, key: str, value: Any) -> None:
        """Set the key; what is in its way is left to the checks of sections."""
        *outer, last = key.split(".")
        node = self.values
        for part in outer:
            if not isinstance(node.get(part), dict):
                node[part] = {}
            node = node[part]
        node[last] = value

    def place(self, key: str) -> str:
        """Where the key stands, as the beginning of a message."""
        mark = self.marks.get(tuple(key.split(".")))
        return f"{mark}: " if mark else ""


def translate(values: Mapping[str, Any], marks: Mapping[KeyPath, Mark]) -> Layer:
    """The layer with every word of other tools replaced by its key.

    Raises:
        ConfigError: A word means something else here, or stands beside the key that it is taken as.
    """
    layer, written = Layer(copy.deepcopy(dict(values)), dict(marks)), dict[str, str]()
    for word, taken in TAKEN.items():
        if layer.holds(word):
            _take(layer, word, taken, written)
    for word, refused in REFUSED.items():
        if layer.holds(word):
            _refuse(layer, word, refused)
    for key, words in VALUES.items():
        if layer.holds(key):
            _reword(layer, key, words)
    return layer


def real_key(key: str) -> tuple[str, str]:
    """The dotted key for one that is, or begins with, a word that is taken; and that word, or ``""``."""
    parts = key.split(".")
    for length in range(len(parts), 0, -1):
        word = ".".join(parts[:length])
        if word in TAKEN:
            return ".".join([TAKEN[word].key, *parts[length:]]), word
    return key, ""


def notice(place: str, word: str) -> Notice:
    """The line for a word that was taken."""
    return Notice(word, f"{place}{word} is {TAKEN[word].origin}'s word for {TAKEN[word].key}")


def twice(place: str, word: str, other: str) -> ConfigError:
    """The error for a word beside the key that it is taken as, or beside another word for that."""
    key = TAKEN[word].key
    said = f"{word} means {key}, which is given too" if other == key else f"{word} and {other} both mean {key}"
    return ConfigError(f"{place}{said}.\nKeep one of them.")


def _take(layer: Layer, word: str, taken: Taken, written: dict[str, str]) -> None:
    place = layer.place(word)
    value = taken.read(layer.take_out(word))
    if layer.holds(taken.key):
        raise twice(place, word, written.get(taken.key, taken.key))
    layer.put(taken.key, value)
    old, new = tuple(word.split(".")), tuple(taken.key.split("."))
    layer.marks = {(*new, *p[len(old) :]) if p[: len(old)] == old else p: mark for p, mark in layer.marks.items()}
    layer.notices.append(notice(place, word))
    written[taken.key] = word


def _refuse(layer: Layer, word: str, refused: Refused) -> None:
    place, value = layer.place(word), layer.take_out(word)
    if not any(type(value) is type(fine) and value == fine for fine in refused.harmless):
        said = f"{word} is {refused.origin}'s and means something else here, got {value!r}."
        raise ConfigError(f"{place}{said}\nWrite {refused.instead}.")
    layer.notices.append(Notice(word, f"{place}{word} is {refused.origin}'s word for what happens here anyway"))


def _reword(layer: Layer, key: str, words: Mapping[Any, Any]) -> None:
    place, value = layer.place(key), layer.take_out(key)
    known = isinstance(value, str) and value in words
    layer.put(key, words[value] if known else value)
    if known:
        layer.notices.append(Notice(key, f"{place}{value} is {LIGHTNING}'s word for {key}: {words[value]}"))
