"""Run files laid over one another, and the command line over all: text, keys and places. No class is imported here.

mappings           merged key by key, but the arguments of a class go when another class takes its place
everything else    replaced, lists too
key+: VALUE        appended to the list that is there; where none is, the checks of keys refuse it
key: null          back to its default
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ..strategies.errors import ConfigError
from . import strict_yaml
from .aliases import TAKEN, MicroBatches
from .imports import full_name
from .recipe import LISTS, SPEC_KEYS
from .strict_yaml import KeyPath, Mark, dotted
from .translate import Notice, notice, real_key, translate, twice

SECTIONS = ("policy", "data", "trainer", "optimizer", "schedule", "eval")
#: Where a run names a class, so that ``policy: module.Class`` says the same as ``policy: {class_path: module.Class}``.
PLACES = (("policy",), ("data", "train"), ("data", "val"), ("optimizer",), ("schedule",), ("eval", "env"))
SHORT = {name: f"trainer.{name}" for name in ("device", "precision", "tf32")}


@dataclass(frozen=True, slots=True)
class RunConfig:
    """What the files and the command line say together, and where each key was said.

    ``values["code"]`` lists the folders whose modules the run may import: those of its files. ``notices`` are the
    words of other tools that were taken.
    """

    values: dict[str, Any]
    marks: Mapping[KeyPath, Mark]
    notices: tuple[Notice, ...] = ()

    def fault(self, path: KeyPath, message: str) -> ConfigError:
        """The error for a key, with the place of the innermost key on the way to it that was written."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.marks:
                return ConfigError(f"{(mark := self.marks[path[:length]])}: {message}{mark.variable}")
        files = dict.fromkeys(mark.file for mark in self.marks.values())
        return ConfigError(f"{', '.join(files)}: {message}" if files else message)

    @contextmanager
    def importable(self) -> Iterator[None]:
        """While this is open, modules beside the run files can be imported."""
        before = list(sys.path)
        sys.path[:0] = [folder for folder in self.values["code"] if folder not in before]
        try:
            yield
        finally:
            sys.path[:] = before


def read_run(files: Sequence[str | Path], overrides: Iterable[tuple[str, str]] = ()) -> RunConfig:
    """Lay the files over one another, and the ``(dotted key, text)`` pairs of the command line over all.

    Raises:
        ConfigError: A file cannot be read or holds no sections, a key leads into something without keys, or a word
            of another tool means something else here.
    """
    config, code = RunConfig({}, {}), list[str]()
    for file in files:
        document = strict_yaml.read_file(file)
        if not isinstance(document.value, dict):
            raise ConfigError(
                f"{file} must hold the sections {', '.join(SECTIONS)}, got {document.value!r}.\n"
                "Begin it with policy: {class_path: module.Class}."
            )
        layer = translate(document.value, document.marks)
        config = _lay_over(config, layer.values, layer.marks, notices=layer.notices)
        code += _folders(Path(file).resolve().parent, document.value.get("code"), config)
    written: dict[str, str] = {}
    for key, text in overrides:
        value = strict_yaml.read_word(text, f"--{key}={text}")
        config = _set(config, key, value, written)
        code += _folders(Path.cwd(), value, config) if key in ("code", "code+") else []
    return _settled(RunConfig({**config.values, "code": list(dict.fromkeys(code))}, config.marks, config.notices))


def _folders(origin: Path, named: Any, config: RunConfig) -> list[str]:
    """The folders of modules that one layer names, by default its own; those of all layers are kept."""
    if "code+" in config.values:
        raise config.fault(("code+",), "code+ is not needed: the folders of all layers are kept.\nWrite code.")
    named = ["."] if named is None else named
    if not isinstance(named, list) or not all(isinstance(entry, str) for entry in named):
        message = f"code must be a list of folders, got {named!r}.\nWrite [.] for the file's own."
        raise config.fault(("code",), message)
    for position, entry in enumerate(named):
        if not Path(entry).is_absolute() and not (origin / entry).is_dir():  # else written by a run, perhaps elsewhere
            raise config.fault(("code", position), f"code[{position}] is no folder: {entry!r}.\nName one of modules.")
    return [str((origin / entry).resolve()) for entry in named]


def _set(config: RunConfig, key: str, value: Any, written: dict[str, str]) -> RunConfig:
    """Lay one key of the command line over a run; ``written`` says by which words keys were set before."""
    place = Mark("command line")
    short, dot, inner = key.partition(".")
    meant, word = (SHORT[short] + dot + inner, "") if short in SHORT else real_key(key)
    notices = [notice(f"{place}: ", word)] if word else []
    if word == key:
        value = TAKEN[word].read(value)
    other = written.setdefault(meant, key)
    if other != key and (word or real_key(other)[1]):
        raise twice(f"{place}: ", word or real_key(other)[1], key if not word else other)
    path, overlay = _override(config, meant, value, key)
    layer = translate(overlay, dict.fromkeys(_paths(overlay), place))
    return _lay_over(config, layer.values, layer.marks, path[:-1], [*notices, *layer.notices])


def _override(config: RunConfig, key: str, value: Any, written: str) -> tuple[KeyPath, dict[str, Any]]:
    """What a key of the command line means, ``optimizer.lr`` as ``optimizer.init_args.lr``; and its overlay."""
    path: KeyPath = ()
    node: Any = config.values
    for part in key.split("."):
        if isinstance(node, Mapping) and "class_path" in node and part not in SPEC_KEYS:
            path, node = (*path, "init_args"), node.get("init_args")
        if not (node is None or isinstance(node, Mapping)):
            said = f"{dotted(path)} is {node!r}, so --{written} cannot set anything in it."
            raise config.fault(path, f"{said}\nSet --{dotted(path)} as a whole.")
        path, node = (*path, part), (node or {}).get(part)
    overlay = value
    for key_part in reversed(path):
        overlay = {key_part: overlay}
    return path, overlay


def _settled(config: RunConfig) -> RunConfig:
    """The run with steps in place of micro-batches, now that every layer has said how many are in a window."""
    trainer = config.values.get("trainer")
    if not isinstance(trainer, Mapping):
        return config
    settled, window = dict(trainer), trainer.get("accumulate")
    window = window if type(window) is int and window > 0 else 1
    notices = list(config.notices)
    for key, value in trainer.items():
        if isinstance(value, MicroBatches):
            steps, rest = divmod(value.count, window)
            if rest:
                raise config.fault(
                    ("trainer", key),
                    f"{value.count} micro-batches make no whole number of steps, with trainer.accumulate at {window}."
                    f"\nWrite trainer.{key}: {steps or 1}, which counts steps.",
                )
            settled[key] = steps
            if window > 1:
                text = f"trainer.{key} is {steps:,}: {value.count:,} micro-batches, {window} to a step"
                notices.append(Notice(key, text))
    return RunConfig({**config.values, "trainer": settled}, config.marks, tuple(notices))


def _lay_over(
    config: RunConfig,
    values: Mapping[str, Any],
    marks: Mapping[KeyPath, Mark],
    outer: KeyPath = (),
    notices: Iterable[Notice] = (),
) -> RunConfig:
    """Lay values over those of a run; what leads to ``outer`` keeps the place where it was said first."""
    merge = _Merge(marks)
    merged = merge.mappings(config.values, values, ())
    kept = {p: m for p, m in config.marks.items() if not any(p[: len(gone)] == gone for gone in merge.replaced)}
    way = {outer[:length] for length in range(1, len(outer) + 1)} & kept.keys()
    new = {merge.place(path): mark for path, mark in marks.items() if path not in way}
    old_lists = {path: kept.get(path, marks[plus]) for plus, path in merge.lists()}
    return RunConfig(merged, {**kept, **new, **old_lists}, (*config.notices, *notices))


class _Appended(NamedTuple):
    """A list that is longer now, how many items it had, and whether it got one that was not in a list."""

    path: KeyPath
    before: int
    single: bool


class _Merge:
    """One layer laid over another, and where the keys of the upper one are then."""

    def __init__(self, marks: Mapping[KeyPath, Mark]) -> None:
        self._layer = RunConfig({}, marks)
        self._appended: dict[KeyPath, _Appended] = {}
        self.replaced: list[KeyPath] = []

    def mappings(self, base: Mapping[str, Any], over: Mapping[str, Any], path: KeyPath) -> dict[str, Any]:
        """``base`` with the keys of ``over``, both at ``path``."""
        merged = dict(base)
        for key, value in over.items():
            here, old = (*path, key), base.get(key)
            value = {"class_path": value} if here in PLACES and isinstance(value, str) else value
            if isinstance(key, str) and self._appends(base, over, here):
                merged[key[:-1]] = self._append(base, over, path, key)
            elif isinstance(old, Mapping) and isinstance(value, Mapping) and _same_class(old, value):
                merged[key] = self.mappings(old, value, here)
            else:
                merged[key] = self.mappings({}, value, here) if isinstance(value, Mapping) else value
                self.replaced.append(here)
        return merged

    @staticmethod
    def _appends(base: Mapping[str, Any], over: Mapping[str, Any], here: KeyPath) -> bool:
        """Whether a key ends in ``+`` and there is what it may mean, so that it is none of a list unknown yet."""
        *path, key = here
        name = str(key)[:-1]
        there = base.get(name) is not None or name in over or (*path, name) in LISTS
        return str(key).endswith("+") and there and here != ("code+",)

    def _append(self, base: Mapping[str, Any], over: Mapping[str, Any], path: KeyPath, key: str) -> list[Any]:
        here, there, added = (*path, key), (*path, key[:-1]), over[key]
        old, name = base.get(key[:-1]), dotted((*path, key[:-1]))
        if key[:-1] in over:
            raise self._layer.fault(here, f"{name}+ and {name} exclude each other in one file.\nKeep one of them.")
        if old is None and there in LISTS:
            old = []
        if not isinstance(old, list):
            raise self._layer.fault(here, f"{name}+ appends to a list, but {name} is {old!r}.\nWrite {name}.")
        if added is None:
            raise self._layer.fault(here, f"{name}+ appends nothing, got null.\nGive an item, or a list of them.")
        self._appended[here] = _Appended(there, len(old), not isinstance(added, list))
        return [*old, *(added if isinstance(added, list) else [added])]

    def lists(self) -> Iterator[tuple[KeyPath, KeyPath]]:
        """The lists that got longer: the path as it was written, with ``+``, and without."""
        return ((plus, appended.path) for plus, appended in self._appended.items())

    def place(self, path: KeyPath) -> KeyPath:
        """Where a key of the upper layer is now."""
        for plus, (there, before, single) in self._appended.items():
            if path[: len(plus)] == plus:
                rest = path[len(plus) :]
                if single:
                    return (*there, before, *rest)
                return (*there, before + int(rest[0]), *rest[1:]) if rest else there
        return path


def _paths(value: Any, path: KeyPath = ()) -> Iterator[KeyPath]:
    """The path of every key and list item in a value."""
    if isinstance(value, Mapping | list):
        for key, inner in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield (*path, key)
            yield from _paths(inner, (*path, key))


def _same_class(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    return "class_path" not in new or full_name(new["class_path"]) == full_name(old.get("class_path"))
