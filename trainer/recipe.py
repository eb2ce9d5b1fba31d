"""A class named in a run file, with its arguments checked: everything is known to fit before anything is built.

``{class_path: module.Class, init_args: {...}}`` becomes a ``Recipe``. Unknown keys are refused at any depth,
and values are coerced and checked by the type hints of the class. jsonargparse reads signatures (also through
``**kwargs``), checks types and instantiates; it is handed Python values and never reads text or environment.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, is_dataclass
from difflib import get_close_matches
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from ..strategies.errors import ConfigError, PolicyfitError
from .strict_yaml import KeyPath

Fault = Callable[[KeyPath, str], ConfigError]
SPEC_KEYS = ("class_path", "init_args", "dict_kwargs")
YES, NO = ("true", "yes", "on"), ("false", "no", "off")


class Slot(NamedTuple):
    """What a class may be at one place of a run file.

    ``given`` is the number of leading arguments that come later, such as an optimizer's parameters.
    """

    kind: str
    accepts: Callable[[type], bool]
    given: int = 0


@dataclass(frozen=True, slots=True)
class Recipe:
    """A class or function and its checked arguments. ``values`` is what a resolved run file says."""

    path: KeyPath
    target: Callable[..., Any]
    slot: Slot
    values: dict[str, Any]
    fault: Fault
    arguments: KeyPath
    extra: Mapping[str, Any]

    def build(self, *given: Any) -> Any:
        """The object, and with it every object among its arguments.

        Raises:
            ConfigError: A constructor failed, or gave something else than this place needs.
            PolicyfitError: A constructor refused; the type of the error is kept.
        """
        try:
            parser, parsed = _parse(self.target, self.values)
            ready = parser.instantiate(parsed)
            built = self.target(*given, **self.values | ready.as_dict(), **self.extra)
        except PolicyfitError as error:
            raise type(error)(self._placed(str(error))) from error
        except Exception as error:
            name = _name(self.target)
            message = f"{dotted(self.path)}: building {name} failed: {type(error).__name__}: {error}"
            raise self.fault(self.path, message) from error
        if not self.slot.accepts(type(built)):
            message = (
                f"{dotted(self.path)} must be {self.slot.kind}, but {_name(self.target)} gave {built!r}."
            )
            raise self.fault(self.path, message)
        return built

    def _placed(self, message: str) -> str:
        key = re.match(r"(?:\w+\.)*(\w+)", message)
        path = self.arguments + ((key[1],) if key and key[1] in self.values else ())
        named = message if message.startswith(dotted(self.path)) else f"{dotted(self.path)}: {message}"
        return str(self.fault(path, named))


def read_recipe(
    path: KeyPath, spec: Any, slot: Slot, fault: Fault, fill: Mapping[str, Any] | None = None
) -> Recipe:
    """The recipe that ``spec`` (a class path, or a mapping with ``class_path``) describes.

    ``fill`` holds arguments for which the run need not say a value; those that the class takes are used.

    Raises:
        ConfigError: The class does not exist or does not belong here, or an argument is unknown, missing or wrong.
    """
    spec = {"class_path": spec} if isinstance(spec, str) else spec
    if not isinstance(spec, Mapping) or "class_path" not in spec:
        raise fault(
            path,
            f"{dotted(path)} must name {slot.kind}, got {spec!r}.\n"
            "Write {class_path: module.Class, init_args: {...}}.",
        )
    target = _import((*path, "class_path"), spec["class_path"], fault)
    known = parameters(target)
    for key in spec:
        if key not in SPEC_KEYS:
            inside = f"\nArguments of the class go under {dotted(path)}.init_args." if key in known else ""
            raise unknown_key((*path, key), SPEC_KEYS, fault, inside)
    if isinstance(target, type) and not slot.accepts(target):
        raise fault(
            (*path, "class_path"), f"{dotted(path)} must be {slot.kind}, but {_name(target)} is not one."
        )
    init_args = spec.get("init_args")
    for name, value in (fill or {}).items():
        if name in known and value is not None and isinstance(init_args or {}, Mapping):
            init_args = {**(init_args or {}), name: (init_args or {}).get(name) or value}
    return bind((*path, "init_args"), target, init_args, slot, fault, path, spec.get("dict_kwargs"))


def bind(
    arguments: KeyPath,
    target: Callable[..., Any],
    values: Any,
    slot: Slot,
    fault: Fault,
    path: KeyPath | None = None,
    extra: Any = None,
) -> Recipe:
    """A recipe for ``target`` itself, whose arguments stand at the path ``arguments``."""
    checked = _check(arguments, target, values, fault, skip=slot.given)
    return Recipe(arguments if path is None else path, target, slot, checked, fault, arguments, extra or {})


@cache
def parameters(target: Callable[..., Any]) -> dict[str, Any]:
    """The parameters that a class or function takes by name, also those it hands on through ``**kwargs``."""
    from jsonargparse._parameter_resolvers import get_signature_parameters

    return {p.name: p for p in get_signature_parameters(target, None, logger=False)}


def unknown_key(path: KeyPath, known: Iterable[str], fault: Fault, advice: str = "") -> ConfigError:
    """The error for a key that does not exist, with the nearest that does."""
    known = sorted(known)
    near = get_close_matches(str(path[-1]), known, n=1, cutoff=0.5)
    if not advice and near:
        advice = f" Did you mean {dotted((*path[:-1], near[0]))}?"
    elif not advice:
        advice = f"\nValid here: {', '.join(known)}." if known else " Nothing can be set here."
    return fault(path, f"{dotted(path)} is not a valid key.{advice}")


def dotted(path: KeyPath) -> str:
    """``("trainer", "callbacks", 0)`` as a person writes it: ``trainer.callbacks[0]``."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


def _check(
    path: KeyPath, target: Any, values: Any, fault: Fault, skip: int = 0, partial: bool = False
) -> dict[str, Any]:
    """``values`` coerced to the types of ``target``; what is null and cannot be takes the default."""
    if values is not None and not isinstance(values, Mapping):
        raise fault(path, f"{dotted(path)} must be a mapping of argument names to values, got {values!r}.")
    known = dict(list(parameters(target).items())[skip:])
    checked: dict[str, Any] = {}
    for name, value in (values or {}).items():
        if name not in known:
            raise unknown_key((*path, name), known, fault)
        kind = _annotation(known[name])
        if value is None and known[name].default is not None and not {NoneType, Any} & set(_options(kind)):
            if known[name].default is inspect.Parameter.empty:
                raise fault(
                    (*path, name), f"{dotted((*path, name))} is empty, but must be {_words(_options(kind))}."
                )
            continue
        checked[name] = _value((*path, name), kind, value, fault)
    for name, parameter in known.items():
        if not partial and name not in checked and parameter.default is inspect.Parameter.empty:
            kind = _words(_options(_annotation(parameter)))
            raise fault(path, f"{dotted((*path, name))} is missing: {_name(target)} needs it ({kind}).")
    _check_types(path, target, checked, fault)
    return checked


def _value(path: KeyPath, kind: Any, value: Any, fault: Fault) -> Any:
    """One value, coerced where the type leaves no doubt, and everything inside it checked."""
    options = _options(kind)
    if isinstance(value, Mapping):
        if "class_path" in value:
            return _nested(path, options, value, fault)
        for option in options:
            if isinstance(option, type) and is_dataclass(option):
                return _check(path, option, value, fault)
        return {key: _value((*path, key), _item(options, 1), item, fault) for key, item in value.items()}
    if isinstance(value, list):
        return [_value((*path, i), _item(options, 0), item, fault) for i, item in enumerate(value)]
    word = str(value).lower()
    if bool in options and isinstance(value, str) and word in YES + NO:
        return word in YES
    if bool in options and word in ("0", "1") and not {int, float} & set(options):
        return word == "1"
    if int in options and float not in options and isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _nested(path: KeyPath, options: tuple[Any, ...], spec: Mapping[str, Any], fault: Fault) -> dict[str, Any]:
    classes = [option for option in options if isinstance(option, type) and option is not NoneType]
    everything = len(classes) < len([o for o in options if o is not NoneType])
    partial = any(get_origin(option) is get_origin(Callable[..., Any]) for option in options)
    kind = " or ".join(f"a {option.__name__}" for option in classes if option is not str) or "an object"

    def accepts(target: type) -> bool:
        return everything or any(getattr(c, "_is_protocol", False) or issubclass(target, c) for c in classes)

    slot = Slot(kind, accepts)
    if partial:
        target = _import((*path, "class_path"), spec["class_path"], fault)
        checked = _check((*path, "init_args"), target, spec.get("init_args"), fault, partial=True)
    else:
        checked = read_recipe(path, spec, slot, fault).values
    return {**spec, "init_args": checked}


def _check_types(path: KeyPath, target: Any, values: Mapping[str, Any], fault: Fault) -> None:
    from jsonargparse import ArgumentError

    try:
        _parse(target, values)
    except (ArgumentError, TypeError, ValueError) as error:
        for name, value in values.items():
            if len(values) > 1:
                _check_types(path, target, {name: value}, fault)
        name, value = next(iter(values.items()))
        options = _options(_annotation(parameters(target)[name]))
        choices = [
            str(choice) for option in options if get_origin(option) is Literal for choice in get_args(option)
        ]
        near = get_close_matches(str(value), choices, n=1, cutoff=0.5)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        if str in options and not isinstance(value, Mapping | list):
            hint = " Write it in quotes if you mean the text."
        path = (*path, name)
        raise fault(path, f"{dotted(path)} must be {_words(options)}, got {value!r}.{hint}") from error


def _parse(target: Any, values: Mapping[str, Any]) -> tuple[Any, Any]:
    """A jsonargparse parser for those arguments of ``target`` that it is to check, and what it made of them."""
    from jsonargparse import ArgumentParser, set_loader

    set_loader("words", str)  # text stays text: our reader has already decided what is a number
    known = parameters(target)
    typed = {
        name: value for name, value in values.items() if not _stays_text(_annotation(known[name]), value)
    }
    parser = ArgumentParser(exit_on_error=False, default_env=False, parser_mode="words", add_help=False)
    add = parser.add_class_arguments if isinstance(target, type) else parser.add_function_arguments
    add(target, skip={name for name in known if name not in typed}, fail_untyped=False)
    return parser, parser.parse_object(typed, env=False)


def _stays_text(kind: Any, value: Any) -> bool:
    options = _options(kind)
    return isinstance(value, str) and (Any in options or str in options)


def _annotation(parameter: Any) -> Any:
    """The type hint; ``Any`` where there is none, or none that can be resolved."""
    hint = parameter.annotation
    return Any if hint is inspect.Parameter.empty or isinstance(hint, str) else hint


def _options(kind: Any) -> tuple[Any, ...]:
    """The members of a union, or the type itself."""
    if get_origin(kind) in (Union, UnionType):
        return tuple(option for member in get_args(kind) for option in _options(member))
    return _options(get_args(kind)[0]) if get_origin(kind) is Annotated else (kind,)


def _item(options: tuple[Any, ...], position: int) -> Any:
    """The type of what a container holds: of items (0), or of a mapping's values (1)."""
    for option in options:
        arguments = get_args(option)
        if (
            get_origin(option) is not Literal
            and isinstance(get_origin(option), type)
            and len(arguments) > position
        ):
            return arguments[position]
    return Any


def _words(options: Iterable[Any]) -> str:
    """Types as a person reads them: ``int or null``."""
    words = []
    for option in options:
        if get_origin(option) is Literal:
            words += [repr(choice) for choice in get_args(option)]
        elif option is NoneType:
            words.append("null")
        else:
            text = option.__name__ if isinstance(option, type) and not get_args(option) else str(option)
            words.append(re.sub(r"\b\w+\.", "", text))
    return " or ".join(words)


def _name(target: Any) -> str:
    return f"{target.__module__}.{target.__qualname__}"


def _import(path: KeyPath, name: Any, fault: Fault) -> Any:
    """What ``module.Class`` names.

    Raises:
        ConfigError: There is no such module or class, the import fails, or it is nothing that can be called.
    """
    parts = name.split(".") if isinstance(name, str) else []
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        raise fault(
            path, f"{dotted(path)} must be written as module.Class, such as torch.optim.AdamW, got {name!r}."
        )
    found, rest = _import_module(path, parts, fault)
    for part in rest:
        if not hasattr(found, part):
            near = get_close_matches(part, dir(found), n=1, cutoff=0.5)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise fault(path, f"{dotted(path)}: {found.__name__} holds no {part!r}.{hint}")
        found = getattr(found, part)
    if not callable(found):
        raise fault(path, f"{dotted(path)}: {name} is neither a class nor a function, but {found!r}.")
    return found


def _import_module(path: KeyPath, parts: list[str], fault: Fault) -> tuple[Any, list[str]]:
    for length in range(len(parts) - 1, 0, -1):
        module = ".".join(parts[:length])
        try:
            return importlib.import_module(module), parts[length:]
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module}.".startswith(f"{error.name}."):
                raise fault(path, f"{dotted(path)}: importing {module} failed: {error}.") from error
        except Exception as error:
            raise fault(
                path, f"{dotted(path)}: importing {module} failed: {type(error).__name__}: {error}"
            ) from error
    raise fault(
        path,
        f"{dotted(path)}: there is no module {parts[0]!r}, neither installed nor beside the run file.",
    )
