"""What a launcher leaves in the environment: the places of the ranks, and what it must not decide."""

from __future__ import annotations

from .errors import DistributedError
from .facts import PREFIXES, RENDEZVOUS, TASKS, MachineFacts, world_size

COMMAND = "torchrun --nproc-per-node=2 -m policyfit fit RUN.yaml"

_NOTHING = ("", "0", "false", "no", "none")
#: Values that say as little; accelerate's launcher always sets the first.
_SAME_AS_NOTHING = {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1"}
#: These touch logs, places and speed, or say nothing without ACCELERATE_DYNAMO_BACKEND, which is refused.
_HARMLESS = (
    "ACCELERATE_BYPASS_DEVICE_MAP", "ACCELERATE_CPU_AFFINITY", "ACCELERATE_DEBUG_MODE", "ACCELERATE_DEBUG_RDV_FILE",
    "ACCELERATE_DISABLE_RICH", "ACCELERATE_DYNAMO_MODE", "ACCELERATE_DYNAMO_USE_DYNAMIC",
    "ACCELERATE_DYNAMO_USE_FULLGRAPH", "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", "ACCELERATE_ENABLE_RICH",
    "ACCELERATE_LOG_LEVEL",
)  # fmt: skip
#: The setting of the run that decides instead, by the beginning of the variable's name.
_SETTINGS = {
    "ACCELERATE_MIXED_PRECISION": "precision",
    "ACCELERATE_FP8": "precision",
    "ACCELERATE_GRADIENT_ACCUMULATION": "accumulate",
    "ACCELERATE_GRADIENT_CLIPPING": "clip_norm",
    "ACCELERATE_DYNAMO": "compile",
    "ACCELERATE_TORCH_DEVICE": "device",
    "ACCELERATE_USE_CPU": "device",
}


def check_environment(facts: MachineFacts) -> None:
    """Refuse variables of accelerate's launcher that would change the run behind its configuration.

    Raises:
        DistributedError: With every such variable and the setting that decides instead.
    """
    found = [(name, value) for name, value in facts.environment if _decides(name, value)]
    if found:
        settings = {next((s for start, s in _SETTINGS.items() if n.startswith(start)), "distributed") for n, _ in found}
        raise DistributedError(
            f"The environment sets {', '.join(f'{name}={value}' for name, value in found)}, which would change this "
            "run behind its configuration.\n"
            f"Unset {'it' if len(found) == 1 else 'them'} and use the Trainer's {', '.join(sorted(settings))}; "
            "torchrun sets no such variables."
        )


def check_launch(name: str, facts: MachineFacts) -> None:
    """Refuse a run of several processes that was not started as one.

    Raises:
        DistributedError: There is one process, or it cannot find the others, or talk to them.
    """
    if not facts.can_distribute:
        raise DistributedError(
            f"distributed={name!r} was requested, but PyTorch {facts.torch_version} of this machine is built without "
            "torch.distributed.\nUse one process with distributed='none', or a build that has it."
        )
    if (world := world_size(facts)) < 2:
        size = facts.variable("WORLD_SIZE")
        needed = "at least two processes" if size else "a launcher"
        raise DistributedError(
            f"distributed={name!r} was requested, but this is one process (WORLD_SIZE is {size or 'not set'}).\n"
            f"Start it with {needed}, for instance: {COMMAND}"
        )
    missing = [variable for variable in RENDEZVOUS if not facts.variable(variable)]
    if missing:
        raise DistributedError(
            f"A launcher started {world} processes (WORLD_SIZE), but did not set {', '.join(missing)}, without which "
            "they do not find each other.\n"
            f"Start them with torchrun, which sets them, for instance: {COMMAND}"
        )


def check_alone(facts: MachineFacts) -> None:
    """Refuse one process of several that srun or mpirun started, and that do not find each other.

    Raises:
        DistributedError: There are several.
    """
    tasks = next((name for name in TASKS if (facts.variable(name) or "1") not in ("0", "1")), None)
    if tasks is not None:
        raise DistributedError(
            f"{facts.variable(tasks)} tasks were started ({tasks}), but WORLD_SIZE is "
            f"{facts.variable('WORLD_SIZE') or 'not set'}, so that each would train a policy of its own.\n"
            f"Start one task a machine, with torchrun in it: {COMMAND}; or use distributed='none' if that is meant."
        )


def _decides(name: str, value: str) -> bool:
    asks = name.startswith(PREFIXES)
    return asks and name not in _HARMLESS and value.lower() not in (*_NOTHING, _SAME_AS_NOTHING.get(name, ""))
