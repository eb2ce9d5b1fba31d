"""A run as YAML files: read and laid over one another (``layers.py``), checked as a whole, then built.

``read_run`` knows text, keys and lines and imports no class. ``resolve`` finds the classes and refuses every
unknown key and wrong value before anything is built. Later files win over earlier ones, the command line over
all files, and environment variables change nothing but what a file asks of them by name.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..strategies.checks import seed_number, whole
from ..strategies.errors import ConfigError
from .hints import parameters
from .imports import full_name, nearest
from .layers import PLACES, SECTIONS, RunConfig, read_run
from .recipe import LISTS, Recipe, Slot, bind, name_of, read_recipe, unknown_key
from .resolve import check_words, plain_precision
from .settings import A_LOGGER, Settings, is_logger, run_folder
from .strict_yaml import dotted

__all__ = [
    "RunConfig",
    "RunRecipe",
    "build_policy",
    "read_run",
    "resolve",
    "resolve_evaluation",
    "resolve_validation",
]

AFTERWARDS = ("device", "precision", "tf32", "deterministic", "seed", "batch_size", "workers")


@dataclass(kw_only=True)
class Evaluation:
    """The section ``eval``.

    Args:
        env: What the policy acts in: an environment, or something that makes one when called.
        episodes: Episodes to play after the fit.
        seed: Seed of the first of them; each has the next.
    """

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
LOGGER = Slot(A_LOGGER, is_logger)
CLASSES: dict[tuple[str, ...], Slot] = dict(
    zip(PLACES, (POLICY, DATA, DATA, OPTIMIZER, SCHEDULE, ENVIRONMENT), strict=True)
)


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


def resolve(config: RunConfig) -> RunRecipe:
    """Check every section against its classes; the result's config has the trainer's defaults written out.

    Raises:
        ConfigError: A class does not exist or does not belong where it stands, or an argument is unknown, missing
            or of the wrong type.
    """
    from .trainer import Trainer

    values = _sections(config)
    for place in LISTS:
        given = values[place[0]].get(place[1])
        if not (given is None or isinstance(given, list)):
            advice = f"Put a single one in a list, too, or write {dotted(place)}+."
            raise config.fault(place, f"{dotted(place)} must be a list, got {given!r}.\n{advice}")
    loggers = values["trainer"].get("loggers")
    if isinstance(loggers, list):  # of any class with what a run calls, so that no hint says that text is a path
        values["trainer"]["loggers"] = [{"class_path": item} if isinstance(item, str) else item for item in loggers]
    trainer = bind(("trainer",), Trainer, values["trainer"], config.fault)
    values["trainer"] = _defaults() | trainer.values
    with trainer.placed():
        Settings(**{field.name: values["trainer"][field.name] for field in fields(Settings)})
        run_folder(values["trainer"]["run_dir"])
        check_words(**{name: values["trainer"][name] for name in ("device", "precision", "distributed")})
    for position, spec in enumerate(trainer.values.get("loggers", ())):
        read_recipe(("trainer", "loggers", position), spec, LOGGER, config.fault)
    fill = {} if trainer.values.get("max_steps") is None else {"total_steps": trainer.values["max_steps"]}
    recipes: dict[tuple[str, ...], Recipe] = {}
    for path, slot in CLASSES.items():
        *outer, key = path
        section = values[outer[0]] if outer else values
        spec = section.get(key)
        if spec is not None:
            recipes[path] = read_recipe(path, spec, slot, config.fault, fill if path == ("schedule",) else {})
            section[key] = {**spec, "class_path": full_name(spec["class_path"]), "init_args": recipes[path].values}
    if ("policy",) in recipes:
        _refuse_two_devices(config, recipes[("policy",)])
    else:
        message = "The section policy is missing: a run needs policy: {class_path: module.Class}."
        raise config.fault(("policy",), message)
    if values["eval"]:
        values["eval"] = _evaluation(config, values["eval"])
    said = {key: value for key, value in values.items() if value not in (None, {})}
    return RunRecipe(RunConfig(said, config.marks), trainer, recipes)


def _refuse_two_devices(config: RunConfig, policy: Recipe) -> None:
    """``policy.device`` is LeRobot's word for the trainer's, unless the policy has a device of its own."""
    if "device" in parameters(policy.target) and any(notice.word == "policy.device" for notice in config.notices):
        raise config.fault(
            ("trainer", "device"),
            f"policy.device could be LeRobot's word for trainer.device, or the argument of {name_of(policy.target)}.\n"
            "Write trainer.device or policy.init_args.device.",
        )


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
    places = {name: f"eval.{name}" for name in parameters(Evaluation)}
    for path in (("policy",), ("schedule",), ("optimizer",)):
        spec = config.values.get(path[0]) or ("torch.optim.AdamW" if path == ("optimizer",) else None)
        with suppress(ConfigError), config.importable():
            recipe = read_recipe(path, spec, CLASSES[path], config.fault)
            inside = path if typed else (*path, "init_args")
            places |= {name: dotted((*inside, name)) for name in list(parameters(recipe.target))[recipe.slot.given :]}
    places |= {name: f"trainer.{name}" for name in parameters(Trainer)}
    lists = {f"{name}+": f"{section}.{name}+" for section, name in LISTS}
    places |= lists
    near = key if key in places else nearest(key, [*parameters(Trainer), *SECTIONS, *lists])
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
    numbers = {name: value for name, value in values.items() if name != "env"}
    section = asdict(bind(("eval",), Evaluation, numbers, config.fault).build()) | {"env": values.get("env")}
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
