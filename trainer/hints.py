"""What classes and functions take, and whether values fit: jsonargparse's reading of signatures and type hints.

It is handed Python values only. Text stays text, as our own reader has already decided what is a number, and
the environment is not read.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser, Namespace

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
    from jsonargparse._parameter_resolvers import get_signature_parameters

    found = get_signature_parameters(target, None, logger=False)
    unknown = (inspect.Parameter.empty, None)
    return {
        p.name: Parameter(Any if p.annotation in unknown or isinstance(p.annotation, str) else p.annotation, p.default)
        for p in found
    }


def parse(target: Callable[..., Any], values: Mapping[str, Any]) -> tuple[ArgumentParser, Namespace]:
    """jsonargparse's parser for those parameters of ``target`` that have a value, and what it made of the values.

    Raises:
        ArgumentError: A value does not fit.
    """
    from jsonargparse import ArgumentParser, set_loader

    set_loader("text", lambda text: text)
    known = parameters(target)
    typed = {name: copy.deepcopy(v) for name, v in values.items() if not _is_text(v, known[name].options)}
    parser = ArgumentParser(exit_on_error=False, default_env=False, parser_mode="text", add_help=False)
    for name in typed:
        try:
            parser.add_argument(f"--{name}", type=known[name].hint)
        except ValueError:  # a hint that it cannot check, such as a TypeVar: the class itself has to
            parser.add_argument(f"--{name}", type=Any)
    return parser, parser.parse_object(typed, env=False)


def instantiate(target: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments for ``target``: values in their types, and the objects among them made."""
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


def _is_text(value: Any, members: tuple[Any, ...]) -> bool:
    return isinstance(value, str) and (Any in members or str in members)
