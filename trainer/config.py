"""A run as YAML files: read and laid over one another, checked as a whole, then built.

``read_run`` knows text, keys and lines and imports no class. ``resolve`` finds the classes and refuses every
unknown key and wrong value before anything is built. Later files win over earlier ones, the command line over
all files, and environment variables change nothing.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..strategies.checks import seed_number, whole
from ..strategies.errors import ConfigError
from . import strict_yaml
from .hints import parameters
from .recipe import SPEC_KEYS, Recipe, Slot, bind, dotted, nearest, read_recipe, unknown_key
from .resolve import plain_precision
from .strict_yaml import KeyPath, Mark

SECTIONS = ("policy", "data", "trainer", "optimizer", "schedule", "eval")
AFTERWARDS = ("device", "precision", "tf32", "deterministic", "seed", "batch_size", "workers")
SHORT = {name: f"trainer.{name}" for name in ("device", "precision", "tf32")}


@dataclass(kw_only=True)
class _Evaluation:
    env: Any = None
    episodes: int = 50
    seed: int = 10_000

    def __post_init__(self) -> None:
        whole("eval.episodes", self.episodes, 1, "Use 1 for a single episode, or leave eval out for none.")
        seed_number("eval.seed", self.seed)


def _subclass_of(base: type) -> Callable[[type], bool]:
    return lambda found: issubclass(found, base)


def _is_data(found: type) -> bool:
    return hasattr(found, "__getitem__") or hasattr(found, "__iter__")


def _is_environment(found: type) -> bool:
    steps = hasattr(found, "reset") and hasattr(found, "step")
    return steps or any("__call__" in vars(base) for base in found.__mro__)


POLICY = Slot("a torch.nn.Module", _subclass_of(nn.Module))
DATA = Slot("data with __getitem__ or __iter__", _is_data)
OPTIMIZER = Slot("a torch.optim.Optimizer", _subclass_of(Optimizer), given=1)
SCHEDULE = Slot("a torch.optim.lr_scheduler.LRScheduler", _subclass_of(LRScheduler), given=1)
ENVIRONMENT = Slot("a gymnasium environment, or something that makes one when called", _is_environment)
CLASSES: dict[tuple[str, ...], Slot] = {
    ("policy",): POLICY,
    ("data", "train"): DATA,
    ("data", "val"): DATA,
    ("optimizer",): OPTIMIZER,
    ("schedule",): SCHEDULE,
    ("eval", "env"): ENVIRONMENT,
}


@dataclass(frozen=True, slots=True)
class RunConfig:
    """What the files and the command line say together, and where each key was said.

    ``values["code"]`` lists the folders whose modules the run may import: those of its files.
    """

    values: dict[str, Any]
    marks: Mapping[KeyPath, Mark]

    def fault(self, path: KeyPath, message: str) -> ConfigError:
        """The error for a key, with the place of the innermost key on the way to it that was written."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.marks:
                return ConfigError(f"{self.marks[path[:length]]}: {message}")
        return ConfigError(message)

    @contextmanager
    def importable(self) -> Iterator[None]:
        """While this is open, modules beside the run files can be imported."""
        before = list(sys.path)
        sys.path[:0] = [folder for folder in self.values["code"] if folder not in before]
        try:
            yield
        finally:
            sys.path[:] = before


@dataclass(frozen=True, slots=True)
class RunRecipe:
    """A checked run: its config as resolved, and a recipe for each object. Nothing is built yet."""

    config: RunConfig
    trainer: Recipe
    recipes: Mapping[tuple[str, ...], Recipe]

    def build(self, *path: str) -> Any:
        """The object at a place such as ``"data", "train"``; ``None`` where the run names none."""
        return self.recipes[path].build() if path in self.recipes else None

    def maker(self, path: str) -> Callable[[Any], Any] | None:
        """What makes the optimizer from parameters, or the schedule from an optimizer."""
        return self.recipes[(path,)].build if (path,) in self.recipes else None

    @property
    def evaluation(self) -> dict[str, int]:
        """How many episodes, and from which seed on."""
        return {key: self.config.values["eval"][key] for key in ("episodes", "seed")}


def read_run(files: Sequence[str | Path], overrides: Iterable[tuple[str, str]] = ()) -> RunConfig:
    """Lay the files over one another, and the ``(dotted key, text)`` pairs of the command line over all.

    Mappings are merged key by key. Everything else is replaced, also the arguments of a class when another
    class takes its place. null puts a key back to its default.

    Raises:
        ConfigError: A file cannot be read or holds no sections, or a key leads into something without keys.
    """
    config, code = RunConfig({}, {}), list[str]()
    for file in files:
        document = strict_yaml.read_file(file)
        if not isinstance(document.value, dict):
            raise ConfigError(
                f"{file} must hold the sections {', '.join(SECTIONS)}, got {document.value!r}.\n"
                "Begin it with policy: {class_path: module.Class}."
            )
        config = _lay_over(config, document.value, document.marks)
        folder = Path(file).resolve().parent
        named = document.value.get("code")
        named = ["."] if named is None else named
        if not isinstance(named, list) or not all(isinstance(entry, str) for entry in named):
            raise config.fault(
                ("code",), f"code must be a list of folders, got {named!r}.\nWrite [.] for the file's own."
            )
        code += [str((folder / entry).resolve()) for entry in named]
    for key, text in overrides:
        path, overlay = _override(config, key, strict_yaml.read_word(text, f"--{key}={text}"))
        config = _lay_over(config, overlay, dict.fromkeys(_paths(overlay), Mark("command line")), outer=path[:-1])
    return RunConfig({**config.values, "code": list(dict.fromkeys(code))}, config.marks)


def resolve(config: RunConfig) -> RunRecipe:
    """Check every section against its classes; the result's config has the trainer's defaults written out.

    Raises:
        ConfigError: A class does not exist or does not belong where it stands, or an argument is unknown, missing
            or of the wrong type.
    """
    from .trainer import Trainer

    values = _sections(config)
    trainer = bind(("trainer",), Trainer, values["trainer"], config.fault)
    values["trainer"] = _defaults() | trainer.values
    fill = {} if trainer.values.get("max_steps") is None else {"total_steps": trainer.values["max_steps"]}
    recipes: dict[tuple[str, ...], Recipe] = {}
    for path, slot in CLASSES.items():
        *outer, key = path
        section = values[outer[0]] if outer else values
        spec = section.get(key)
        if spec is not None:
            recipes[path] = read_recipe(path, spec, slot, config.fault, fill if path == ("schedule",) else {})
            section[key] = {**spec, "init_args": recipes[path].values}
    if ("policy",) not in recipes:
        raise ConfigError("The section policy is missing: a run needs policy: {class_path: module.Class}.")
    if values["eval"]:
        values["eval"] = _evaluation(config, values["eval"])
    said = {key: value for key, value in values.items() if value not in (None, {})}
    return RunRecipe(RunConfig(said, config.marks), trainer, recipes)


def build_policy(config: RunConfig) -> nn.Module:
    """The policy of a run, with fresh weights. Nothing else of the run is looked at, so no data is needed.

    Raises:
        ConfigError: The run names no policy, or it cannot be built.
    """
    with config.importable():
        policy: nn.Module = read_recipe(("policy",), config.values.get("policy"), POLICY, config.fault).build()
        return policy


def resolve_evaluation(config: RunConfig) -> RunRecipe:
    """What an evaluation needs of a run: its environment, and the trainer as far as it matters after training.

    Raises:
        ConfigError: The run names no environment, or a setting is not what it must be.
    """
    values = _sections(config)
    values["eval"] = _evaluation(config, values["eval"])
    env = read_recipe(("eval", "env"), values["eval"]["env"], ENVIRONMENT, config.fault)
    return _afterwards(config, values, {("eval", "env"): env})


def resolve_validation(config: RunConfig) -> RunRecipe:
    """What a validation needs of a run: its data for it, where it names any, and the trainer as above.

    Raises:
        ConfigError: The data or a setting is not what it must be.
    """
    values = _sections(config)
    spec = values["data"].get("val")
    path = ("data", "val")
    return _afterwards(config, values, {} if spec is None else {path: read_recipe(path, spec, DATA, config.fault)})


def _afterwards(config: RunConfig, values: dict[str, Any], recipes: dict[tuple[str, ...], Recipe]) -> RunRecipe:
    from .trainer import Trainer

    settings = {name: values["trainer"][name] for name in AFTERWARDS if name in values["trainer"]}
    trainer = bind(("trainer",), Trainer, settings, config.fault)
    return RunRecipe(RunConfig(values, config.marks), trainer, recipes)


def _lay_over(
    config: RunConfig, values: Mapping[str, Any], marks: Mapping[KeyPath, Mark], outer: KeyPath = ()
) -> RunConfig:
    """Lay values over those of a run; what leads to ``outer`` keeps the place where it was said first."""
    replaced: list[KeyPath] = []

    def merge(base: Mapping[str, Any], over: Mapping[str, Any], path: KeyPath) -> dict[str, Any]:
        merged = dict(base)
        for key, value in over.items():
            here, old = (*path, key), base.get(key)
            value = {"class_path": value} if here in CLASSES and isinstance(value, str) else value
            if isinstance(old, Mapping) and isinstance(value, Mapping) and _same_class(old, value):
                merged[key] = merge(old, value, here)
            else:
                merged[key] = merge({}, value, here) if isinstance(value, Mapping) else value
                replaced.append(here)
        return merged

    merged = merge(config.values, values, ())
    kept = {p: m for p, m in config.marks.items() if not any(p[: len(gone)] == gone for gone in replaced)}
    way = {outer[:length] for length in range(1, len(outer) + 1)} & kept.keys()
    return RunConfig(merged, {**kept, **{path: mark for path, mark in marks.items() if path not in way}})


def _paths(value: Any, path: KeyPath = ()) -> Iterator[KeyPath]:
    """The path of every key and list item in a value."""
    if isinstance(value, Mapping | list):
        for key, inner in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield (*path, key)
            yield from _paths(inner, (*path, key))


def _same_class(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    return "class_path" not in new or new["class_path"] == old.get("class_path")


def _override(config: RunConfig, key: str, value: Any) -> tuple[KeyPath, dict[str, Any]]:
    """What a key of the command line means, ``optimizer.lr`` as ``optimizer.init_args.lr``; and its overlay."""
    path: KeyPath = ()
    node: Any = config.values
    for part in SHORT.get(key, key).split("."):
        if isinstance(node, Mapping) and "class_path" in node and part not in SPEC_KEYS:
            path, node = (*path, "init_args"), node.get("init_args")
        if not (node is None or isinstance(node, Mapping)):
            said = f"{dotted(path)} is {node!r}, so --{key} cannot set anything in it."
            raise config.fault(path, f"{said}\nSet --{dotted(path)} as a whole.")
        path, node = (*path, part), (node or {}).get(part)
    overlay = value
    for key_part in reversed(path):
        overlay = {key_part: overlay}
    return path, overlay


def _sections(config: RunConfig) -> dict[str, Any]:
    """A copy of the values in which every section that must be a mapping is one, and no other is there."""

    values = copy.deepcopy(config.values)
    for section in ("data", "trainer", "eval"):
        if values.get(section) is None:
            values[section] = {}
        if not isinstance(values[section], dict):
            said = f"{section} must be a mapping of keys to values, got {values[section]!r}."
            raise config.fault((section,), f"{said}\nWrite its keys indented below it.")
    for key in values:
        if key not in (*SECTIONS, "code"):
            raise unknown_key((key,), SECTIONS, config.fault, _advice(config, str(key)))
    for key in values["data"]:
        if key not in ("train", "val"):
            raise unknown_key(("data", key), ("train", "val"), config.fault)
    values["trainer"]["precision"] = plain_precision(values["trainer"].get("precision"))
    return values


def _advice(config: RunConfig, key: str) -> str:
    """Where in a run a key belongs that stands at the top: by its name among the arguments of what the run has."""
    from .trainer import Trainer

    typed = (key,) in config.marks and not config.marks[(key,)].line  # there init_args may be left out
    places = {name: f"eval.{name}" for name in parameters(_Evaluation)}
    for path in (("policy",), ("schedule",), ("optimizer",)):
        spec = config.values.get(path[0]) or ("torch.optim.AdamW" if path == ("optimizer",) else None)
        with suppress(ConfigError), config.importable():
            recipe = read_recipe(path, spec, CLASSES[path], config.fault)
            inside = path if typed else (*path, "init_args")
            places |= {name: dotted((*inside, name)) for name in list(parameters(recipe.target))[recipe.slot.given :]}
    places |= {name: f"trainer.{name}" for name in parameters(Trainer)}
    near = key if key in places else nearest(key, [*parameters(Trainer), *SECTIONS])
    if near is None:
        return ""
    meant = near if near in SECTIONS else places[near]
    if meant.startswith("optimizer.") and not config.values.get("optimizer"):
        return (
            f" Did you mean {meant}? Name the optimizer, too: optimizer.class_path is for instance torch.optim.AdamW."
        )
    return f" Did you mean {meant}?"


def _evaluation(config: RunConfig, values: Mapping[str, Any]) -> dict[str, Any]:
    """The section ``eval``, checked, with the defaults of what it leaves out."""
    bound = bind(("eval",), _Evaluation, values, config.fault)
    numbers = {name: value for name, value in bound.values.items() if name != "env"}
    section = asdict(replace(bound, values=numbers).build()) | {"env": bound.values.get("env")}
    if section["env"] is None:
        said = "eval.env is missing: it names the environment that the policy acts in."
        raise config.fault(
            ("eval",),
            f"{said}\nWrite eval: {{env: {{class_path: module.Class}}}}, or --env=module.Class with policyfit eval.",
        )
    return section


def _defaults() -> dict[str, Any]:
    """The trainer's defaults, as far as a file can say them."""
    from .trainer import Trainer

    defaults = {name: parameter.default for name, parameter in parameters(Trainer).items()}
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in defaults.items()}
    return {name: value for name, value in plain.items() if isinstance(value, str | int | float | list | None)}
