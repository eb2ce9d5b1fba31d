"""A class named in a run file, with its arguments checked before anything is built.

``{class_path: module.Class, init_args: {...}}`` becomes a ``Recipe``. Unknown keys are refused at any depth.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass
from types import NoneType
from typing import Any, NamedTuple

from ..strategies.errors import ConfigError, PolicyfitError
from . import hints
from .aliases import REFUSED
from .blame import culprit, last_named, nested_specs
from .hints import parameters
from .imports import FAILURES, Fault, full_name, import_named, nearest, own_classes
from .resolve import NO_PRECISION
from .strict_yaml import FLOAT, KeyPath, dotted

CLASS_PATH = r"[^\W\d]\w*(\.[^\W\d]\w*)+"
SPEC_KEYS = ("class_path", "init_args", "dict_kwargs")
LISTS = (("trainer", "callbacks"), ("trainer", "loggers"))  # which begin empty where nobody names one
FILLED = {("schedule", "init_args", "total_steps"): "trainer.max_steps"}  # what need not be written beside what


class Slot(NamedTuple):
    """What a class may be at one place of a run file.

    ``given`` is the number of leading arguments that come later, such as an optimizer's parameters.
    """

    kind: str
    accepts: Callable[[type], bool]
    given: int = 0


ANYTHING = Slot("an object", lambda found: True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A class or function and its checked arguments, which stand in the run at ``arguments``."""

    path: KeyPath
    arguments: KeyPath
    target: Callable[..., Any]
    values: dict[str, Any]
    extra: Mapping[str, Any]
    slot: Slot
    fault: Fault

    def build(self, *given: Any) -> Any:
        """The object, and with it every object among its arguments.

        Raises:
            PolicyfitError: A constructor refused; the type of the error is kept.
            ConfigError: A constructor failed, or gave something else than this place needs.
        """
        try:
            built = self.target(*given, **hints.instantiate(self.target, self.values), **self.extra)
        except FAILURES as error:
            raise self.explained(error) from error
        if not self.slot.accepts(type(built)):
            raise self.fault(
                self.path,
                f"{dotted(self.path)} must be {self.slot.kind}, but {name_of(self.target)} gave {built!r}.",
            )
        return built

    @contextmanager
    def placed(self) -> Iterator[None]:
        """While this is open, an error about the arguments gets its place in the run."""
        try:
            yield
        except PolicyfitError as error:
            raise type(error)(self._placed(str(error))) from error

    def explained(self, error: BaseException) -> PolicyfitError:
        """The error with its place in the run: that of the object or the argument that was refused."""
        for path, spec in nested_specs(self.values, self.arguments):
            try:
                read_recipe(path, spec, ANYTHING, self.fault).build()
            except PolicyfitError as inner:
                if inner.__cause__ is not None and str(inner.__cause__).partition("\n")[0] in str(error):
                    return inner
        if isinstance(error, PolicyfitError):
            return type(error)(self._placed(str(error)))
        argument = culprit(str(error), self.values)
        at = self.path if argument is None else (*self.arguments, argument)
        said = f"{dotted(self.path)}: making {name_of(self.target)} failed: {type(error).__name__}: {error}"
        return self.fault(at, f"{said}\nCorrect {dotted(at) if argument else 'its arguments, or it'}.")

    def _placed(self, message: str) -> str:
        """The message with its place: that of the argument it names first, as errors do here, or of the class."""
        key = re.match(r"(?:\w+\.)*(?P<name>\w+)(?:\[(?P<item>\d+)\])?", message)
        message = re.sub(r"\bNone\b", "null", message)
        item: KeyPath = (int(key["item"]),) if key and key["item"] else ()
        if key and key["name"] in self.values:
            at = (*self.arguments, key["name"], *item)
        else:
            at = last_named(message, nested_specs(self.values, self.arguments)) or self.path
        known = self.path == self.arguments or message.startswith(dotted(self.path))
        return str(self.fault(at, message if known else f"{dotted(self.path)}: {message}"))


def read_recipe(path: KeyPath, spec: Any, slot: Slot, fault: Fault, fill: Mapping[str, Any] | None = None) -> Recipe:
    """The recipe that ``spec`` (a class path, or a mapping with ``class_path``) describes.

    ``fill`` holds arguments that the run need not give; those that the class takes are used.

    Raises:
        ConfigError: The class does not exist or does not belong here, or an argument is unknown, missing or of
            the wrong type.
    """
    spec = {"class_path": spec} if isinstance(spec, str) else spec
    if not isinstance(spec, Mapping) or "class_path" not in spec:
        raise _no_class(path, slot, spec, fault)
    target = import_named((*path, "class_path"), spec["class_path"], fault, slot.accepts)
    known = list(parameters(target))[slot.given :]
    for key in spec:
        if key not in SPEC_KEYS:
            inside = f"\nArguments of the class go under {dotted(path)}.init_args." if key in known else ""
            raise unknown_key((*path, key), SPEC_KEYS, fault, inside)
    if isinstance(target, type) and not slot.accepts(target):
        raise fault((*path, "class_path"), f"{dotted(path)} must be {slot.kind}, but {name_of(target)} is not one.")
    arguments, extra = _mapping(path, "init_args", spec, fault), _mapping(path, "dict_kwargs", spec, fault)
    for name, value in (fill or {}).items():
        if name in known and arguments.get(name) is None:
            arguments[name] = value
    return bind((*path, "init_args"), target, arguments, fault, path=path, slot=slot, extra=extra)


def bind(
    arguments: KeyPath,
    target: Callable[..., Any],
    values: Mapping[str, Any],
    fault: Fault,
    *,
    path: KeyPath | None = None,
    slot: Slot = ANYTHING,
    extra: Mapping[str, Any] | None = None,
) -> Recipe:
    """The recipe for ``target`` itself, whose arguments stand at the path ``arguments``."""
    checked = _check(arguments, target, values, fault, given=slot.given)
    where = arguments if path is None else path
    return Recipe(
        path=where,
        arguments=arguments,
        target=target,
        values=checked,
        extra=extra or {},
        slot=slot,
        fault=fault,
    )


def _no_class(path: KeyPath, slot: Slot, spec: Any, fault: Fault) -> ConfigError:
    """The error for what names no class, at the first key in it that only a class could take."""
    arguments = [key for key in spec if key not in SPEC_KEYS] if isinstance(spec, Mapping) else []
    for key in arguments:
        if isinstance(spec[key], str) and nearest(str(key), ["class_path"]):
            return unknown_key((*path, key), SPEC_KEYS, fault)
    near = nearest(spec, own_classes(slot.accepts)) if isinstance(spec, str) else None
    inside = f"{arguments[0]}: ..." if arguments else "..."
    form = f"Did you mean {near}?" if near else f"Write {{class_path: module.Class, init_args: {{{inside}}}}}."
    return fault((*path, *arguments[:1]), f"{dotted(path)} must name {slot.kind}, got {spec!r}.\n{form}")


def unknown_key(path: KeyPath, known: Iterable[str], fault: Fault, advice: str = "") -> ConfigError:
    """The error for a key that does not exist, with the nearest one that does."""
    known, key = list(known), str(path[-1])
    near = nearest(key, known)
    foreign = REFUSED.get(dotted(tuple(part for part in path if part != "init_args")))
    plain = [name for name in known if not name.endswith("+")]
    if key.endswith("+") and key[:-1] in plain:
        name = dotted((*path[:-1], key[:-1]))
        return fault(path, f"{name}+ appends to a list, but there is none yet.\nWrite {name}.")
    if foreign:
        advice = f"\nIt is {foreign.origin}'s: write {foreign.instead}."
    elif "." in key.strip("."):
        outer, _, inner = key.partition(".")
        advice = f"\nKeys are nested in a file: {outer}: {{{': {'.join(inner.split('.'))}: ...{'}' * key.count('.')}."
    if not advice and near:
        advice = f" Did you mean {dotted((*path[:-1], near))}?"
    elif not advice:
        advice = f"\nValid here: {', '.join(plain)}." if plain else "\nNothing can be set here."
    return fault(path, f"{dotted(path)} is not a valid key.{advice}")


def name_of(target: Any) -> str:
    """Module and name of a class or function."""
    return f"{target.__module__}.{getattr(target, '__qualname__', target)}"


def _mapping(path: KeyPath, key: str, spec: Mapping[str, Any], fault: Fault) -> dict[str, Any]:
    value = spec.get(key)
    if not (value is None or isinstance(value, Mapping)):
        raise fault((*path, key), f"{dotted((*path, key))} must map argument names to values, got {value!r}.")
    return dict(value or {})


def _check(
    path: KeyPath, target: Any, values: Mapping[str, Any], fault: Fault, given: int = 0, partial: bool = False
) -> dict[str, Any]:
    """``values`` coerced to the types of ``target``, nested ones too. Null takes the default where it is no value.

    ``given`` leading arguments come later; with ``partial`` others may, too.
    """
    known = dict(list(parameters(target).items())[given:])
    checked: dict[str, Any] = {}
    for name, value in values.items():
        if name not in known:
            lists = [f"{key}+" for key in known if (*path, key) in LISTS or isinstance(values.get(key), list)]
            raise unknown_key((*path, name), [*known, *lists], fault)
        if value is not None or known[name].takes_null:
            checked[name] = _value((*path, name), known[name].options, value, fault)
    for name, parameter in known.items():
        if parameter.required and name not in checked and not partial:
            found = "is empty" if name in values else "is missing"
            here, needed = (*path, name), f"{name_of(target)} needs it ({hints.words(parameter.options)})."
            instead = f"Set {FILLED[here]}, or write" if here in FILLED else "Write"
            raise fault(here, f"{dotted(here)} {found}: {needed}\n{instead} {dotted(here)}.")
    _check_types(path, target, checked, fault)
    return checked


def _value(path: KeyPath, options: tuple[Any, ...], value: Any, fault: Fault) -> Any:
    if isinstance(value, str) and hints.takes_a_class(options) and re.fullmatch(CLASS_PATH, full_name(value)):
        value = {"class_path": value}
    settings_alone = all(is_dataclass(option) for option in options if option is not NoneType)
    if settings_alone and not (value is None or isinstance(value, Mapping)):  # jsonargparse would build with it
        raise _wrong_type(path, options, value, fault)
    if isinstance(value, list):
        inside = hints.item_options(options, 0)
        return [_value((*path, i), inside, item, fault) for i, item in enumerate(value)]
    if not isinstance(value, Mapping):
        return _plain(path, options, value, fault)
    if "class_path" in value:
        return _nested(path, options, value, fault)
    for option in options:
        if isinstance(option, type) and is_dataclass(option):
            settings = bind(path, option, value, fault)
            settings.build()  # which checks them
            return settings.values
    if hints.classes(options) and not hints.takes_keys(options):
        raise _no_class(path, _slot(options), value, fault)
    inside = hints.item_options(options, 1)
    return {key: _value((*path, key), inside, item, fault) for key, item in value.items()}


def _plain(path: KeyPath, options: tuple[Any, ...], value: Any, fault: Fault) -> Any:
    """A word or a number in the type that leaves no doubt."""
    pythons = value == "None" and NoneType in options  # as text, it would name a folder None
    found = value if pythons else hints.coerce(value, options)
    if pythons or (isinstance(found, str) and hints.takes_no_text(options) and found not in hints.choices(options)):
        raise _wrong_type(path, options, value, fault)
    return found


def _wrong_type(path: KeyPath, options: tuple[Any, ...], value: Any, fault: Fault) -> ConfigError:
    near = nearest(str(value), hints.choices(options))
    advice = f" Did you mean {near!r}?" if near else ""
    if str in options and isinstance(value, bool | int | float):
        advice = " Write it in quotes if you mean the text."
    elif NoneType in options and value == "None":
        advice = " Write null, as None is Python's word."
    elif NoneType in options and (value is False or str(value).lower() in NO_PRECISION):
        advice = " Write null for none."
    elif isinstance(value, str) and FLOAT.fullmatch(value) and not {int, float}.isdisjoint(options):
        advice = " Write it without quotes if you mean the number."
    return fault(path, f"{dotted(path)} must be {hints.words(options)}, got {value!r}.{advice}")


def _slot(options: tuple[Any, ...]) -> Slot:
    """The place of an argument that is an object."""
    classes = hints.classes(options)
    kind = " or ".join(f"a {option.__name__}" for option in classes) or ANYTHING.kind
    if not classes or any(getattr(option, "_is_protocol", False) for option in classes) or Any in options:
        return Slot(kind, ANYTHING.accepts)
    return Slot(kind, lambda found: issubclass(found, classes))


def _nested(path: KeyPath, options: tuple[Any, ...], spec: Mapping[str, Any], fault: Fault) -> dict[str, Any] | str:
    """The spec of an object that is an argument of another; of a function that is meant itself, its path."""
    spec = {**spec, "class_path": full_name(spec["class_path"])}
    if hints.takes_a_maker(options):
        target = import_named((*path, "class_path"), spec["class_path"], fault)
        if not isinstance(target, type) and set(spec) == {"class_path"}:
            return str(spec["class_path"])
        arguments = _mapping(path, "init_args", spec, fault)
        return {**spec, "init_args": _check((*path, "init_args"), target, arguments, fault, partial=True)}
    return {**spec, "init_args": read_recipe(path, spec, _slot(options), fault).values}


def _check_types(path: KeyPath, target: Any, values: Mapping[str, Any], fault: Fault) -> None:
    if hints.as_they_are(target, values):
        return
    error = hints.misfit(target, values)
    if error is not None:
        if len(values) > 1:
            for name, value in values.items():
                _check_types(path, target, {name: value}, fault)
        (name, value), *_ = values.items()
        at, members = (*path, name), parameters(target)[name].options
        inside = hints.item_options(members, 0)
        for position, item in enumerate(value if isinstance(value, list) and hints.takes_a_class(inside) else ()):
            if not isinstance(item, Mapping) and hints.misfit(target, {name: [item]}) is not None:
                raise _no_class((*at, position), _slot(inside), item, fault) from error
        missing = re.search(r"arguments are required: (\w+)", str(error))
        if missing:
            raise fault(at, f"{dotted((*at, 'init_args', missing[1]))} is missing.") from error
        raise _wrong_type(at, members, value, fault) from error
