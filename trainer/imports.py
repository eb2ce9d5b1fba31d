"""What a run file names by ``module.Class``, found, and what was meant where nothing is."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import Any

from ..strategies.errors import ConfigError
from .strict_yaml import KeyPath, dotted

Fault = Callable[[KeyPath, str], ConfigError]
#: What ends an import or a constructor of the user's own code, and is to be said with its place.
FAILURES = (Exception, SystemExit)


def nearest(word: str, known: Iterable[str]) -> str | None:
    """What was probably meant: a name that begins so, or one that is spelled much like it; case does not count."""
    names, word = {name.lower(): name for name in known}, word.lower()
    begins = [name for name in names if word and name.startswith(word)]
    near = [word] if word in names else begins or get_close_matches(word, names, n=1, cutoff=0.6)
    return names[near[0]] if near else None


def _policyfit() -> Any:
    return importlib.import_module(__package__.partition(".")[0])


def full_name(name: Any) -> Any:
    """The path of a class; policyfit's own may be named without it."""
    own = _policyfit()
    return f"{own.__name__}.{name}" if name in own.__all__ else name


def own_classes(accepts: Callable[[type], bool]) -> list[str]:
    """The names of policyfit's own classes that may stand at a place."""
    named = [(name, getattr(_policyfit(), name)) for name in _policyfit().__all__]
    return [name for name, found in named if isinstance(found, type) and accepts(found)]


def import_named(path: KeyPath, name: Any, fault: Fault, accepts: Callable[[type], bool] = lambda found: False) -> Any:
    """What ``module.Class`` names: a class or a function. ``accepts`` says what may be meant by another name."""
    name = full_name(name)
    parts = name.split(".") if isinstance(name, str) else []
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        near = nearest(str(name), own_classes(accepts))
        hint = f" Did you mean {near}?" if near else ""
        raise fault(path, f"{dotted(path)} must be written module.Class, as torch.optim.AdamW is, got {name!r}.{hint}")
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
        except FAILURES as error:
            missing = error.name if isinstance(error, ModuleNotFoundError) else None
            if missing is None or not f"{module}.".startswith(f"{missing}."):
                cause = f"{type(error).__name__}: {error}"
                raise fault(path, f"{dotted(path)}: importing {module} failed: {cause}\nCorrect it.") from error
    raise fault(
        path,
        f"{dotted(path)}: there is no module {parts[0]}, neither installed nor beside the run file.\n"
        "Install it, put it beside the run file, or list its folder under code.",
    )
