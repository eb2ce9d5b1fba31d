"""Which of its arguments made a constructor fail, so that the error can name the line in the run file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from .strict_yaml import KeyPath


def culprit(message: str, values: Mapping[str, Any]) -> str | None:
    """The argument that the message names, or the only one whose value it names."""
    named = [word for word in re.findall(r"\w+", message) if word in values]
    if named:
        return str(named[0])
    words = set(re.findall(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?|\w+", message))
    holding = [name for name, value in values.items() if not words.isdisjoint(_words(value))]
    return holding[0] if len(holding) == 1 else None


def nested_specs(value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, Mapping[str, Any]]]:
    """Every class with arguments inside a value, the innermost first."""
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from nested_specs(inner, (*path, key))
        if isinstance(inner, Mapping) and "class_path" in inner:
            yield (*path, key), inner


def last_named(message: str, specs: Iterable[tuple[KeyPath, Mapping[str, Any]]]) -> KeyPath | None:
    """Where the last of the classes stands whose name is in the message."""
    words = re.findall(r"\w+", message)
    named = [path for path, spec in specs if str(spec["class_path"]).rpartition(".")[2] in words]
    return named[-1] if named else None


def _words(value: Any) -> set[str]:
    """How a message may spell a value, or one in it: 1 is 1.0 where a float was asked for."""
    if isinstance(value, Mapping | list):
        return set().union(*(_words(inner) for inner in (value.values() if isinstance(value, Mapping) else value)))
    spelled = {str(value)}
    return spelled | {str(float(value))} if isinstance(value, int | float) and not isinstance(value, bool) else spelled
