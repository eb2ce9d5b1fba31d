"""What the packages offer, they list, and what they list says what it is."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

PACKAGES = ("policyfit", "policyfit.trainer", "policyfit.strategies", "policyfit.callbacks")


@pytest.fixture(params=PACKAGES)
def package(request: pytest.FixtureRequest) -> ModuleType:
    return importlib.import_module(request.param)


def sort_key(name: str) -> tuple[int, str]:
    """Ruff's order (RUF022): constants, then classes, then the rest."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)


def undocumented(name: str, thing: Any) -> Iterator[str]:
    """The names in a public class or function that have no docstring of their own."""
    inherited = [base.__doc__ for base in inspect.getmro(thing)[1:]] if inspect.isclass(thing) else []
    written_by_python = str(thing.__doc__).startswith(f"{getattr(thing, '__name__', '')}(")
    if not thing.__doc__ or thing.__doc__ in inherited or written_by_python:
        yield name
    if inspect.isclass(thing):
        for member_name, member in vars(thing).items():
            member = member.__func__ if isinstance(member, classmethod | staticmethod) else member
            is_code = inspect.isfunction(member) or isinstance(member, property)
            if is_code and not member_name.startswith("_") and not member.__doc__:
                yield f"{name}.{member_name}"


def test_all_lists_exactly_the_public_names(package: ModuleType) -> None:
    here = {name for name, value in vars(package).items() if name[0] != "_" and not inspect.ismodule(value)}
    assert set(package.__all__) - {"__version__"} == here


def test_all_is_sorted_without_repeats(package: ModuleType) -> None:
    assert package.__all__ == sorted(set(package.__all__), key=sort_key)


def test_public_names_are_documented(package: ModuleType) -> None:
    things = {name: getattr(package, name) for name in package.__all__ if name != "__version__"}
    assert [entry for name, thing in things.items() for entry in undocumented(name, thing)] == []


def test_root_offers_nothing_that_the_folders_keep_to_themselves() -> None:
    import policyfit

    offered = {name for package in PACKAGES[1:] for name in importlib.import_module(package).__all__}
    assert set(policyfit.__all__) - {"__version__"} <= offered


def test_documentation_check_finds_a_class_and_its_members_without_docstrings() -> None:
    class Bare:
        def method(self) -> None: ...

        @property
        def value(self) -> int:
            return 1

        @classmethod
        def make(cls) -> None: ...

    class Heir(Bare):
        """Documented."""

        def _helper(self) -> None: ...

    assert list(undocumented("Bare", Bare)) == ["Bare", "Bare.method", "Bare.value", "Bare.make"]
    assert list(undocumented("Heir", Heir)) == []
