"""A class named in a run file, with its arguments checked before anything is built.

``{class_path: module.Class, init_args: {...}}`` becomes a ``Recipe``. Unknown keys are refused at any depth.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, is_dataclass
from difflib import get_close_matches
from types import NoneType
from typing import Any, NamedTuple

from ..strategies.errors import ConfigError, PolicyfitError
from . import hints
from .aliases import REFUSED
from .blame import culprit, nested_specs
from .hints import parameters
from .strict_yaml import FLOAT, KeyPath

Fault = Callable[[KeyPath, str], ConfigError]
SPEC_KEYS = ("class_path", "init_args", "dict_kwargs")


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
        except Exception as error:
            raise self._explained(error) from error
        if not self.slot.accepts(type(built)):
            raise self.fault(
                self.path,
                f"{dotted(self.path)} must be {self.slot.kind}, but {name_of(self.target)} gave {built!r}.",
            )
        return built

    def _explained(self, error: Exception) -> PolicyfitError:
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
        key, message = re.match(r"(?:\w+\.)*(\w+)", message), re.sub(r"\bNone\b", "null", message)
        at = (*self.arguments, key[1]) if key and key[1] in self.values else self.path
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
        form = "Write {class_path: module.Class, init_args: {...}}."
        raise fault(path, f"{dotted(path)} must name {slot.kind}, got {spec!r}.\n{form}")
    target = _import((*path, "class_path"), spec["class_path"], fault)
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


def unknown_key(path: KeyPath, known: Iterable[str], fault: Fault, advice: str = "") -> ConfigError:
    """The error for a key that does not exist, with the nearest one that does."""
    known = list(known)
    near = nearest(str(path[-1]), known)
    foreign = REFUSED.get(dotted(tuple(part for part in path if part != "init_args")))
    if foreign:
        advice = f"\nIt is {foreign.origin}'s: write {foreign.instead}."
    if not advice and near:
        advice = f" Did you mean {dotted((*path[:-1], near))}?"
    elif not advice:
        advice = f"\nValid here: {', '.join(known)}." if known else "\nNothing can be set here."
    return fault(path, f"{dotted(path)} is not a valid key.{advice}")


def nearest(word: str, known: Iterable[str]) -> str | None:
    """What was probably meant: a name that begins so, or one that is spelled much like it; case does not count."""
    names, word = {name.lower(): name for name in known}, word.lower()
    begins = [name for name in names if word and name.startswith(word)]
    near = [word] if word in names else begins or get_close_matches(word, names, n=1, cutoff=0.5)
    return names[near[0]] if near else None


def dotted(path: KeyPath) -> str:
    """``("trainer", "callbacks", 0)`` as a person writes it: ``trainer.callbacks[0]``."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


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
            raise unknown_key((*path, name), known, fault)
        if value is not None or known[name].takes_null:
            checked[name] = _value((*path, name), known[name].options, value, fault)
    for name, parameter in known.items():
        if parameter.required and name not in checked and not partial:
            found = "is empty" if name in values else "is missing"
            needed = f"{name_of(target)} needs it ({hints.words(parameter.options)})."
            raise fault((*path, name), f"{dotted((*path, name))} {found}: {needed}")
    _check_types(path, target, checked, fault)
    return checked


def _value(path: KeyPath, options: tuple[Any, ...], value: Any, fault: Fault) -> Any:
    if isinstance(value, str) and hints.takes_a_class(options) and re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)+", value):
        value = {"class_path": value}
    if isinstance(value, list):
        inside = hints.item_options(options, 0)
        return [_value((*path, i), inside, item, fault) for i, item in enumerate(value)]
    if not isinstance(value, Mapping):
        pythons = value == "None" and NoneType in options  # as text, it would name a folder None
        if pythons or (isinstance(value, str) and hints.takes_numbers_alone(options)):
            hint = " Write it without quotes if you mean the number." if FLOAT.fullmatch(str(value)) else ""
            hint = " Write null, as None is Python's word." if pythons else hint
            raise fault(path, f"{dotted(path)} must be {hints.words(options)}, got {value!r}.{hint}")
        return hints.coerce(value, options)
    if "class_path" in value:
        return _nested(path, options, value, fault)
    for option in options:
        if isinstance(option, type) and is_dataclass(option):
            settings = bind(path, option, value, fault)
            settings.build()  # which checks them
            return settings.values
    inside = hints.item_options(options, 1)
    return {key: _value((*path, key), inside, item, fault) for key, item in value.items()}


def _nested(path: KeyPath, options: tuple[Any, ...], spec: Mapping[str, Any], fault: Fault) -> dict[str, Any]:
    """The spec of an object that is an argument of another."""
    if hints.takes_a_maker(options):
        target = _import((*path, "class_path"), spec["class_path"], fault)
        arguments = _mapping(path, "init_args", spec, fault)
        return {**spec, "init_args": _check((*path, "init_args"), target, arguments, fault, partial=True)}
    classes = [option for option in options if isinstance(option, type) and option not in (NoneType, str)]
    slot = ANYTHING
    if classes and not any(getattr(option, "_is_protocol", False) for option in classes) and Any not in options:
        slot = Slot(" or ".join(f"a {option.__name__}" for option in classes), lambda c: issubclass(c, tuple(classes)))
    return {**spec, "init_args": read_recipe(path, spec, slot, fault).values}


def _check_types(path: KeyPath, target: Any, values: Mapping[str, Any], fault: Fault) -> None:
    if hints.as_they_are(target, values):
        return
    from jsonargparse import ArgumentError

    try:
        hints.parse(target, values)
    except (ArgumentError, TypeError, ValueError) as error:
        if len(values) > 1:
            for name, value in values.items():
                _check_types(path, target, {name: value}, fault)
        (name, value), *_ = values.items()
        options = parameters(target)[name].options
        near = nearest(str(value), hints.choices(options))
        hint = f" Did you mean {near!r}?" if near else ""
        if str in options and isinstance(value, bool | int | float):
            hint = " Write it in quotes if you mean the text."
        at = (*path, name)
        missing = re.search(r"arguments are required: (\w+)", str(error))
        if missing:
            raise fault(at, f"{dotted((*at, 'init_args', missing[1]))} is missing.") from error
        raise fault(at, f"{dotted(at)} must be {hints.words(options)}, got {value!r}.{hint}") from error


def _import(path: KeyPath, name: Any, fault: Fault) -> Any:
    """What ``module.Class`` names: a class or a function."""
    parts = name.split(".") if isinstance(name, str) else []
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        raise fault(path, f"{dotted(path)} must be written module.Class, as torch.optim.AdamW is, got {name!r}.")
    found, rest = _import_module(path, parts, fault)
    for part in rest:
        if not hasattr(found, part):
            near = nearest(part, dir(found))
            hint = f" Did you mean {near}?" if near else ""
            raise fault(path, f"{dotted(path)}: {getattr(found, '__name__', found)} holds no {part}.{hint}")
        found = getattr(found, part)
    if not callable(found):
        raise fault(path, f"{dotted(path)}: {name} is neither a class nor a function, but {found!r}.\nName one.")
    return found


def _import_module(path: KeyPath, parts: list[str], fault: Fault) -> tuple[Any, list[str]]:
    for length in range(len(parts) - 1, 0, -1):
        module = ".".join(parts[:length])
        try:
            return importlib.import_module(module), parts[length:]
        except Exception as error:
            missing = error.name if isinstance(error, ModuleNotFoundError) else None
            if missing is None or not f"{module}.".startswith(f"{missing}."):
                cause = f"{type(error).__name__}: {error}"
                raise fault(path, f"{dotted(path)}: importing {module} failed: {cause}\nCorrect it.") from error
    raise fault(
        path,
        f"{dotted(path)}: there is no module {parts[0]}, neither installed nor beside the run file.\n"
        "Install it, put it beside the run file, or list its folder under code.",
    )
