"""What signatures say, read at once or by jsonargparse: the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal

import pytest
import torch
from run_parts import Placed, Policy
from torch import nn

from policyfit import EMA, FP16, Checkpoint, GradScalerConfig, Trainer, WarmupCosine
from policyfit.strategies.errors import ConfigError
from policyfit.trainer import hints
from policyfit.trainer.hints import OrDefault, Parameter, as_they_are, none_is_default, parameters


@dataclass
class WithFactory:
    items: list[int] = field(default_factory=list)


class Derived(Policy):
    def __init__(self, depth: int, **rest: Any) -> None:
        super().__init__(**rest)


def make(size: int, kind: Literal["a", "b"] = "a", *, rate: float = 0.1) -> Policy:
    return Policy(size)


def untyped(size, rate=0.1):  # type: ignore[no-untyped-def]
    return size, rate


TARGETS: list[Callable[..., Any]] = [
    *(
        Checkpoint,
        EMA,
        FP16,
        GradScalerConfig,
        WarmupCosine,
        Policy,
        Placed,
        Derived,
        WithFactory,
        make,
        untyped,
    ),
    *(torch.optim.AdamW, torch.optim.SGD, torch.optim.lr_scheduler.StepLR, nn.Linear, nn.Identity, nn.GELU, nn.LSTM),
]


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.__name__)
def test_a_signature_is_read_as_jsonargparse_reads_it(
    target: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters.cache_clear()
    at_once = parameters(target)
    monkeypatch.setattr(hints, "_plain_parameters", lambda target: None)
    parameters.cache_clear()
    assert _told(at_once) == _told(parameters(target))
    parameters.cache_clear()


def _told(found: dict[str, Parameter]) -> dict[str, tuple[Any, ...]]:
    """Names, types and defaults; a default that is made anew is told by its type."""
    return {n: (p.options, type(p.default), p.default if p.default == p.default else "") for n, p in found.items()}


def test_what_the_signature_says_alone_is_read_at_once() -> None:
    at_once = {target.__name__ for target in [Trainer, *TARGETS] if hints._plain_parameters(target) is not None}
    assert {"Trainer", "Checkpoint", "WarmupCosine", "Policy", "AdamW", "make", "Linear"} <= at_once
    assert at_once.isdisjoint({"Derived", "WithFactory", "LSTM"})


@none_is_default
def filled(
    size: int,
    word: OrDefault[Literal["a", "b"]] = "a",
    *,
    place: OrDefault[str | Path] = "here",
    limit: int | None = 3,
    seed: int | None = None,
) -> tuple[Any, ...]:
    return size, word, place, limit, seed


def test_none_is_the_default_where_it_is_no_value() -> None:
    nothing: Any = None
    assert filled(1) == filled(1, None, place=None) == (1, "a", "here", 3, None)
    assert filled(nothing, "b", limit=None, seed=None) == (None, "b", "here", None, None)
    with pytest.raises(ConfigError, match=r"^filled has no argument sed\.\nDid you mean seed\?$"):
        filled(1, sed=None)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="takes from 1 to 2 positional arguments but 3 were given"):
        filled(1, None, None)  # type: ignore[call-arg]


def test_null_is_read_as_none_is() -> None:
    @none_is_default
    def plain(
        word: OrDefault[Literal["a", "b"]] = "a", place: OrDefault[str | Path] = "", limit: int | None = 3
    ) -> None: ...

    found = parameters(plain)
    assert [p.options for p in found.values()] == [(Literal["a", "b"],), (str, Path), (int, NoneType)]
    assert [name for name, p in found.items() if p.takes_null] == ["limit"]


def typed(
    count: int = 0,
    rate: float = 0.0,
    maybe: float | None = None,
    word: str = "",
    flag: bool = False,
    choice: Literal["a", 1] = "a",
    anything: Any = None,
    bounded: Annotated[int, "positive"] = 1,
    sizes: tuple[int, ...] = (),
) -> None: ...


class Word(str):
    pass


@pytest.mark.parametrize(
    ("hint", "wanted"),
    [
        (nn.Module, True),
        (nn.Module | None, True),
        (nn.Module | str, False),
        (Any, False),
        (object, False),
        (str, False),
        (Word, False),
        (Path, False),
        (list, False),
        (list[nn.Module], False),
        (None, False),
    ],
)
def test_a_dotted_word_is_a_class_only_where_nothing_else_is_wanted(hint: Any, wanted: bool) -> None:
    assert hints.takes_a_class(hints.options(hint)) is wanted


@pytest.mark.parametrize(
    ("name", "value", "plain"),
    [
        ("count", 3, True),
        ("count", True, False),
        ("count", 3.0, False),
        ("count", "3", False),
        ("rate", 0.5, True),
        ("rate", 1, False),
        ("maybe", None, True),
        ("word", "x", True),
        ("word", 3, False),
        ("flag", True, True),
        ("flag", 1, False),
        ("choice", "a", True),
        ("choice", 1, True),
        ("choice", True, False),
        ("choice", "b", False),
        ("anything", 3, True),
        ("anything", [3], False),
        ("bounded", 3, False),
        ("sizes", [3], False),
    ],
)
def test_only_a_value_of_its_type_is_taken_as_it_is(name: str, value: Any, plain: bool) -> None:
    assert as_they_are(typed, {name: value}) is plain
