"""What classes and functions take, and whether values fit: jsonargparse's reading of signatures and type hints.

It is handed Python values only. Text stays text, as our own reader has already decided what is a number, and
the environment is not read. What is plain to see, a signature without ``**kwargs`` and a value that is of its type
already, is not shown to it: importing it takes longer than all else that a plan does.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache, wraps
from os import PathLike
from types import FunctionType, NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    NamedTuple,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from torch import Tensor

from ..strategies.errors import ConfigError
from .aliases import argument_meant
from .imports import nearest

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser, Namespace

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

_NO_VALUE = "None is the default"
#: The hint of an argument for which None is no value of its own, and means its default.
OrDefault = Annotated[T | None, _NO_VALUE]
_ANY = "instantiate_subclass_spec_in_any"  # {class_path: ...} where an argument has no type: what a run file means
#: Where the classes are whose items have the types that a hint says.
_CONTAINERS = ("builtins", "collections", "collections.abc")
YES, NO = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


class Parameter(NamedTuple):
    """One parameter; its hint is ``Any`` where it has none or none that can be resolved."""

    hint: Any
    default: Any

    @property
    def options(self) -> tuple[Any, ...]:
        """The members of the hint."""
        return options(self.hint)

    @property
    def required(self) -> bool:
        """Whether the class cannot do without it."""
        return self.default is inspect.Parameter.empty

    @property
    def takes_null(self) -> bool:
        """Whether null is a value of its own."""
        return self.default is None or not {NoneType, Any}.isdisjoint(self.options)


@cache
def parameters(target: Callable[..., Any]) -> dict[str, Parameter]:
    """The parameters that a class or function takes by name, also those it hands on through ``**kwargs``."""
    plain = _plain_parameters(target)
    if plain is not None:
        return plain
    from jsonargparse._parameter_resolvers import get_signature_parameters

    found = get_signature_parameters(target, None, logger=False)
    unknown = (inspect.Parameter.empty, None)
    return {
        p.name: Parameter(
            Any if p.annotation in unknown or isinstance(p.annotation, str) else _erased(p.annotation), p.default
        )
        for p in found
    }


def none_is_default(function: F) -> F:
    """The function, for which None means in Python what null means in a run file: the default, where it is no value.

    Its signature must say all that it takes. Another name is refused with the one that is meant, as in a run file.
    """

    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        known = parameters(function)
        for name in kwargs:
            if name not in known:
                raise _no_argument(function, name, [other for other in known if other != "self"])
        filled = {name: p.default for name, p in known.items() if not (p.required or p.takes_null)}
        placed = [filled.get(name) if value is None else value for name, value in zip(known, args, strict=False)]
        named = {name: filled.get(name) if value is None else value for name, value in kwargs.items()}
        return function(*placed, *args[len(placed) :], **named)

    return cast(F, called)


def _no_argument(function: Callable[..., Any], name: str, known: list[str]) -> ConfigError:
    owner, near = function.__qualname__.removesuffix(".__init__"), nearest(name, known)
    advice = f"Did you mean {near}?" if near else f"Valid here: {', '.join(known)}."
    return ConfigError(f"{owner} has no argument {name}.\n{argument_meant(name) or advice}")


def _plain_parameters(target: Callable[..., Any]) -> dict[str, Parameter] | None:
    """The parameters, where the signature alone says them all and every hint can be resolved."""
    is_class = isinstance(target, type)
    function = inspect.getattr_static(target, "__init__") if is_class else target
    if not isinstance(function, FunctionType) or (
        is_class and inspect.getattr_static(target, "__new__") is not object.__new__
    ):
        return None
    if is_dataclass(target) and any(f.default_factory is not MISSING for f in fields(target)):
        return None
    listed = list(inspect.signature(function).parameters.values())[is_class:]
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    if not all(p.kind in by_name for p in listed):
        return None
    try:
        found = get_type_hints(function, include_extras=True)
    except (NameError, TypeError, AttributeError):  # a name that only a type checker imports
        return None
    return {p.name: Parameter(_erased(found.get(p.name, Any)), p.default) for p in listed}


def _erased(hint: Any) -> Any:
    """The hint without what a class is generic over, ``Dataset`` for ``Dataset[int]``: no value shows that.

    jsonargparse would take such a hint for the class to make, whatever class a run names.
    """
    origin: Any = get_origin(hint)
    if origin is Annotated:
        if _NO_VALUE in hint.__metadata__:
            return _erased(Union[tuple(option for option in options(hint) if option is not NoneType)])  # noqa: UP007
        return Annotated[_erased(hint.__origin__), *hint.__metadata__]
    if isinstance(origin, type) and origin is not UnionType and origin.__module__ not in _CONTAINERS:
        return origin
    arguments, maker = get_args(hint), get_origin(Callable[[], Any])
    inside = tuple(argument if isinstance(argument, list) else _erased(argument) for argument in arguments)
    if origin in (None, Literal, type) or inside == arguments:
        return hint
    if origin in (Union, UnionType):
        return Union[inside]  # noqa: UP007
    return Callable[inside[0], inside[1]] if origin is maker else origin[inside]


def as_they_are(target: Callable[..., Any], values: Mapping[str, Any]) -> bool:
    """Whether every value is of its parameter's type already."""
    return not _others(target, values)


def _others(target: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, Any]:
    known = parameters(target)
    return {name: value for name, value in values.items() if not _is_plain(value, known[name].hint)}


def parse(target: Callable[..., Any], values: Mapping[str, Any]) -> tuple[ArgumentParser, Namespace]:
    """jsonargparse's parser for those parameters whose values are not as they are, and what it made of them.

    Raises:
        ArgumentError: A value does not fit.
    """
    from jsonargparse import ArgumentParser, set_loader, set_parsing_settings

    set_loader("text", lambda text: text)
    if _ANY in inspect.signature(set_parsing_settings).parameters:  # since 4.51; before, it is so
        set_parsing_settings(**{_ANY: True})  # type: ignore[arg-type]
    known, typed = parameters(target), copy.deepcopy(_others(target, values))
    parser = ArgumentParser(exit_on_error=False, default_env=False, parser_mode="text", add_help=False)
    for name in typed:
        try:
            action: Any = parser.add_argument(f"--{name}", type=known[name].hint)
            action.sub_add_kwargs = {"fail_untyped": False}  # of objects in it, which may lack hints
        except ValueError:  # a hint that it cannot check, such as a TypeVar: the class itself has to
            parser.add_argument(f"--{name}", type=Any)
    return parser, parser.parse_object(typed, env=False)


def misfit(target: Callable[..., Any], values: Mapping[str, Any]) -> Exception | None:
    """Why jsonargparse does not take the values; ``None`` where it does."""
    from jsonargparse import ArgumentError

    try:
        parse(target, values)
    except (ArgumentError, TypeError, ValueError) as error:
        return error
    return None


def instantiate(target: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments for ``target``: values in their types, and the objects among them made."""
    if as_they_are(target, values):
        return dict(values)
    parser, parsed = parse(target, values)
    return {**values, **parser.instantiate(parsed).as_dict()}


def options(hint: Any) -> tuple[Any, ...]:
    """The members of a union, or the type itself."""
    if get_origin(hint) is Annotated:
        return options(get_args(hint)[0])
    if get_origin(hint) in (Union, UnionType):
        return tuple(option for member in get_args(hint) for option in options(member))
    return (hint,)


def item_options(container: Iterable[Any], position: int) -> tuple[Any, ...]:
    """The types of what a container holds: of its items (position 0), or of a mapping's values (1)."""
    for option in container:
        arguments = get_args(option)
        if isinstance(get_origin(option), type) and len(arguments) > position:
            return options(arguments[position])
    return (Any,)


def takes_a_maker(members: Iterable[Any]) -> bool:
    """Whether a class is wanted that is called later with more arguments, as ``Callable[[X], Y]`` says."""
    return any(get_origin(option) is get_origin(Callable[[], Any]) for option in members)


def classes(members: Iterable[Any]) -> tuple[type, ...]:
    """The classes of objects that are wanted; neither text nor numbers, nor what may be anything or holds items."""
    plain = (int, float, str, bytes, PathLike, Enum)
    kinds = [option for option in members if isinstance(option, type) and option not in (Any, NoneType)]
    return tuple(kind for kind in kinds if kind.__module__ != "builtins" and not issubclass(kind, plain))


def takes_a_class(members: Iterable[Any]) -> bool:
    """Whether an object is wanted and no text, so that a dotted word can only be the path of its class."""
    kinds = [option for option in members if option is not NoneType]
    return bool(kinds) and len(classes(kinds)) == len(kinds)


def takes_keys(members: Iterable[Any]) -> bool:
    """Whether a mapping without ``class_path`` is wanted: one of any keys, or the fields of settings."""
    kinds = [get_origin(option) or option for option in members]
    return any(
        kind in (Any, object) or (isinstance(kind, type) and (is_dataclass(kind) or issubclass(kind, Mapping)))
        for kind in kinds
    )


def takes_no_text(members: Iterable[Any]) -> bool:
    """Whether text is wanted at most as a word to choose, and none that looks like a number."""
    kinds = [option for option in members if get_origin(option) is not Literal]
    return all(option in (bool, int, float, Tensor, NoneType) for option in kinds)


def choices(members: Iterable[Any]) -> list[str]:
    """The words that may be chosen among."""
    return [str(choice) for option in members if get_origin(option) is Literal for choice in get_args(option)]


def coerce(value: Any, members: tuple[Any, ...]) -> Any:
    """The value in the type that leaves no doubt: a yes or no as bool, a float without fraction as int."""
    word = str(value).lower()
    numbers = not {int, float}.isdisjoint(members)
    if bool in members and word in YES + NO and (isinstance(value, str) or not numbers):
        return word in YES
    if int in members and float not in members and isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def words(members: Iterable[Any]) -> str:
    """Types as a person reads them: ``int or null``."""
    found = []
    for option in members:
        if get_origin(option) is Literal:
            found += [repr(choice) for choice in get_args(option)]
        elif option is NoneType:
            found.append("null")
        else:
            text = option.__name__ if isinstance(option, type) and not get_args(option) else str(option)
            found.append(re.sub(r"\b\w+\.", "", text))
    return " or ".join(found)


def _is_plain(value: Any, hint: Any) -> bool:
    if isinstance(value, str) and not {str, Any}.isdisjoint(options(hint)):  # jsonargparse might read it as a number
        return True
    if type(value) not in (bool, int, float, str, NoneType) or "Annotated[" in str(hint):  # which says more
        return False
    chosen = [choice for option in options(hint) if get_origin(option) is Literal for choice in get_args(option)]
    literal = any(type(choice) is type(value) and choice == value for choice in chosen)
    return literal or not {type(value), Any}.isdisjoint(options(hint))
