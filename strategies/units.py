"""The units of a sharded policy: which modules are gathered by themselves, by name or as the policy declares them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from .errors import ConfigError, some

_DECLARATION = "fsdp_units"
_BORROWED = "_no_split_modules"  # what models of transformers say of themselves


def find_units(policy: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    """The modules to shard by themselves, inner ones before those that hold them.

    Args:
        names: Classes, or modules with ``*`` for one part of the name; empty for what the policy declares.

    Raises:
        ConfigError: No units are named or declared, or they are not there.
    """
    wanted, origin = (names, "FSDP.wrap") if names else _declared(policy)
    if not wanted:
        raise ConfigError(
            f"FSDP gathers a policy unit by unit, but {type(policy).__name__} does not say what its units are.\n"
            f"Name them, for instance {_suggestion(policy)}, or declare them in its class: "
            f"{_DECLARATION} = [...]. Good units are the blocks that repeat."
        )
    named = [(name, module) for name, module in policy.named_modules() if name]
    found = {unit: [module for name, module in named if _is_named(name, module, unit)] for unit in wanted}
    unknown = [unit for unit, modules in found.items() if not modules]
    if unknown and (origin != _BORROWED or len(unknown) == len(wanted)):
        raise ConfigError(
            f"{origin} names {', '.join(unknown)}, but {type(policy).__name__} has no module or class of that name.\n"
            f"Its blocks are: {_blocks(policy)}."
        )
    chosen = {id(module) for modules in found.values() for module in modules}
    units = [module for _, module in reversed(named) if id(module) in chosen]
    containers = [type(unit).__name__ for unit in units if isinstance(unit, nn.ModuleList | nn.ModuleDict)]
    if containers:
        raise ConfigError(
            f"{origin} names a {containers[0]}, which has no forward before which it could be gathered.\n"
            'Name what is in it, for instance with "*" at the end of its name.'
        )
    return units


def check_shardable(policy: nn.Module, units: Sequence[nn.Module]) -> None:
    """Refuse what shards cannot hold: trainable weights without a dimension or an element, those that do not lie row by
    row in memory, and those that two units share; and layers in whose talk a rank that failed could take no part.

    Raises:
        ConfigError: With the parameter's name.
    """
    numbers = [name for name, p in policy.named_parameters() if p.dim() == 0 and p.requires_grad]
    if numbers:
        raise ConfigError(
            f"FSDP cannot shard a parameter without a dimension, and {', '.join(numbers)} is to be trained.\n"
            "Give it one (nn.Parameter(torch.zeros(1))), freeze it, or use distributed='ddp'."
        )
    empty = [name for name, p in policy.named_parameters() if p.numel() == 0 and p.requires_grad]
    if empty:
        raise ConfigError(
            f"FSDP cannot shard a parameter without an element, and {some(empty)} is to be trained.\n"
            "Leave it out of the policy, freeze it, or use distributed='ddp'."
        )
    scattered = [name for name, p in policy.named_parameters() if not p.is_contiguous()]
    if scattered:
        raise ConfigError(
            f"FSDP shards parameters by their rows, but these lie otherwise in memory: {some(scattered)}.\nUse "
            "policy.to(memory_format=torch.contiguous_format), or for a transposed one .contiguous(); or "
            "distributed='ddp'."
        )
    talking = [name for name, module in policy.named_modules() if isinstance(module, nn.SyncBatchNorm)]
    if talking:
        raise ConfigError(
            f"Under FSDP ranks end together, saved, when one fails, but not where layers talk to the other ranks by "
            f"themselves, as SyncBatchNorm does: {some(talking)}.\n"
            "Use a norm of each sample (GroupNorm, LayerNorm) or a frozen one, or distributed='ddp'."
        )
    holders: dict[nn.Parameter, nn.Module] = {}
    for name, parameter in policy.named_parameters(remove_duplicate=False):
        holder = _holder(policy, units, name)
        if holders.setdefault(parameter, holder) is not holder:
            raise ConfigError(
                f"The parameter {name} is shared by two units of FSDP, {type(holders[parameter]).__name__} and "
                f"{type(holder).__name__}, but belongs to one.\n"
                "Leave the units that share it out of wrap: what is in no unit is kept with the policy itself."
            )


def _declared(policy: nn.Module) -> tuple[Sequence[str], str]:
    """What the policy says its units are, and where; else what modules in it say."""
    own = getattr(policy, _DECLARATION, None)
    if own:
        return tuple(own), f"{type(policy).__name__}.{_DECLARATION}"
    borrowed = [name for module in policy.modules() for name in getattr(module, _BORROWED, None) or ()]
    return tuple(dict.fromkeys(borrowed)), _BORROWED


def _is_named(name: str, module: nn.Module, unit: str) -> bool:
    """Whether ``unit`` is the module's class, or its name with ``*`` for one part of it."""
    parts, pattern = name.split("."), unit.split(".")
    by_name = len(parts) == len(pattern) and all(map(fnmatchcase, parts, pattern))
    return by_name or type(module).__name__ == unit


def _holder(policy: nn.Module, units: Sequence[nn.Module], parameter: str) -> nn.Module:
    """The innermost unit under which a parameter of that name stands; the policy itself where there is none."""
    holder = module = policy
    for part in parameter.split(".")[:-1]:
        module = getattr(module, part)
        if any(module is unit for unit in units):
            holder = module
    return holder


def _blocks(policy: nn.Module) -> str:
    return ", ".join(f"{name} ({count})" for name, count in _candidates(policy)) or "none"


def _suggestion(policy: nn.Module) -> str:
    candidates = _candidates(policy)
    return f"FSDP(wrap=['{candidates[0][0]}']) (its blocks are {_blocks(policy)})" if candidates else "FSDP(wrap=[...])"


def _candidates(policy: nn.Module) -> list[tuple[str, int]]:
    """The classes that could be units and how often they occur, the most frequent first, mere containers last."""
    lists = (nn.ModuleList, nn.ModuleDict)
    modules = [m for m in policy.modules() if m is not policy and not isinstance(m, lists) and any(m.children())]
    counts = Counter(type(m).__name__ for m in modules if any(True for _ in m.parameters())).most_common()
    return sorted(counts, key=lambda found: found[0] == "Sequential")[:5]
