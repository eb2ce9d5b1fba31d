"""From what was asked for and the facts of the machine to what runs, with the reason."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import torch

from ..strategies.ddp import DDP
from ..strategies.device import (
    CPUDevice,
    CUDADevice,
    DeviceStrategy,
    MPSDevice,
    XPUDevice,
    automatic,
    unavailable,
)
from ..strategies.distributed import DistributionStrategy, SingleProcess
from ..strategies.errors import ConfigError
from ..strategies.fabric import FabricPlugin, fabric_precision, is_fabric_plugin
from ..strategies.facts import MachineFacts, describe, local_rank, probe, world_size
from ..strategies.formats import bf16_support, fp16_support
from ..strategies.fsdp import FSDP
from ..strategies.launch import check_alone
from ..strategies.mixed import BF16, FP16
from ..strategies.obstacles import (
    Obstacle,
    cuda_obstacle,
    mps_obstacle,
    present_vendors,
    xpu_obstacle,
)
from ..strategies.precision import FullPrecision, PrecisionStrategy
from ..strategies.scaler import GradScalerConfig

T = TypeVar("T")

_DEVICES = ("auto", "cpu", "cuda", "mps", "xpu", "rocm", "hip")
DEVICE = re.compile(r"(auto|cpu|mps)|(cuda|xpu|rocm|hip)(?::(0|[1-9]\d*))?")
_MEANT_DEVICES = {"gpu": "cuda", "nvidia": "cuda", "amd": "cuda", "metal": "mps", "apple": "mps", "intel": "xpu"}
#: The words that mean "no", beside ``None`` and ``False``: YAML reads an unquoted no as False, an empty value as None.
NO_PRECISION = ("no", "none", "off", "false", "null")
#: Lightning's words for what has a word here.
LIGHTNING_PRECISIONS = {"bf16-mixed": "bf16", "16-mixed": "fp16", "32-true": "no"}
_MEANT_PRECISIONS = {
    ("32", "float32", "fp32", "full"): "no",
    ("bfloat16",): "bf16",
    ("16", "float16", "half"): "fp16",
    ("64", "float64", "double"): "64-true",
}
PRECISIONS = ("auto", "no", "bf16", "fp16", "bf16-true", "16-true", "64-true", *LIGHTNING_PRECISIONS)
DISTRIBUTIONS: dict[str, type[DistributionStrategy]] = {"none": SingleProcess, "ddp": DDP, "fsdp": FSDP}
#: What ``accelerate launch --mixed_precision`` sets for its processes, and in what they would compute.
_LAUNCHER = "ACCELERATE_MIXED_PRECISION"
_COMPUTES_IN = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn}


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice(Generic[T]):
    """One decision: what was asked, what was chosen, and why."""

    value: T
    asked: str
    chosen: str
    reason: str


class Choices(NamedTuple):
    """What the trainer's strategies were chosen from, and why."""

    device: Choice[DeviceStrategy]
    precision: Choice[PrecisionStrategy]
    distribution: Choice[DistributionStrategy]


def resolve_device(request: object, facts: MachineFacts) -> Choice[DeviceStrategy]:
    """The device strategy for a request, a word or a strategy.

    ``auto`` takes cuda, then mps, xpu, cpu. Without an index it is the device of this process's local rank.

    Raises:
        ConfigError: The request is no device.
        DeviceUnavailableError: The device is not here.
    """
    if isinstance(request, DeviceStrategy):
        strategy, asked = request, request.name
    else:
        strategy, asked = automatic(facts) if request == "auto" else _named(request, facts), str(request)
    strategy.check(facts, asked)
    reasons = [describe(strategy.device, facts)]
    if asked == "auto":
        reasons.append(_why_automatic(facts))
    if strategy.device.index and ":" not in asked:
        reasons.append(f"LOCAL_RANK is {strategy.device.index}")
    return Choice(value=strategy, asked=asked, chosen=strategy.name, reason="; ".join(reasons))


def choose_precision(device: torch.device, facts: MachineFacts) -> tuple[Literal["no", "bf16", "fp16"], str]:
    """What precision="auto" means on a device: bf16 where native, else fp16 on an accelerator, else no."""
    bf16 = bf16_support(device, facts)
    if bf16.native:
        return "bf16", bf16.reason
    if device.type == "cpu":
        return "no", f"{bf16.reason}, and fp16 is for accelerators"
    fp16 = fp16_support(device, facts)
    return ("fp16" if fp16.usable else "no"), f"{bf16.reason}, and {fp16.reason}"


def _named(request: object, facts: MachineFacts) -> DeviceStrategy:
    found = DEVICE.fullmatch(request) if isinstance(request, str) else None
    if found is None:
        raise ConfigError(_no_device(request, facts))
    plain, kind, index = found.groups()
    if plain:
        return CPUDevice() if plain == "cpu" else MPSDevice()
    number = local_rank(facts) if index is None else int(index)
    if kind == "xpu":
        return XPUDevice(number)
    if kind in ("rocm", "hip") and facts.build != "rocm":
        cause = f"{kind} is cuda on a ROCm build of PyTorch and this one ({facts.torch_version}) is not"
        remedy = "Where there is an AMD GPU, install a ROCm build of PyTorch."
        raise unavailable(found[0], Obstacle(cause, remedy), facts)
    return CUDADevice(number)


def _no_device(request: object, facts: MachineFacts) -> str:
    valid = "device must be auto, cpu, cuda, cuda:N, mps, xpu or xpu:N, or a device strategy"
    if not isinstance(request, str):
        return f"{valid}, got {request!r}.\nUse a string such as device='auto'."
    word = request.strip().lower()
    if word in _MEANT_DEVICES:
        meant = _MEANT_DEVICES[word]
        makers = {"cuda": "NVIDIA's and AMD's", "mps": "Apple's", "xpu": "Intel's"}[meant]
        return f"{valid}, got {request!r}.\nUse device={meant!r} for {makers} GPUs, or device='auto'."
    kind = word.partition(":")[0]
    near = [word] if DEVICE.fullmatch(word) else get_close_matches(kind, _DEVICES, n=1, cutoff=0.7)
    if near:
        return f"{valid}, got {request!r}.\nUse device={near[0]!r}."
    here = [f"cuda:{i}" for i in range(len(facts.cuda))] + ["mps"] * facts.mps
    here += [f"xpu:{i}" for i in range(len(facts.xpu))]
    return f"{valid}, got {request!r}.\nThis machine has {', '.join([*here, 'cpu'])}. Use device='auto'."


def _why_automatic(facts: MachineFacts) -> str:
    if facts.cuda:
        return "cuda comes first where there is a GPU that torch can use"
    if facts.mps:
        return "there is no cuda here, and mps comes next"
    if facts.xpu:
        return "there is neither cuda nor mps here, and xpu comes next"
    kinds = {"xpu": [xpu_obstacle(0, facts)], "mps": [mps_obstacle(facts)]}
    obstacles = kinds.get(facts.build, [])
    if present_vendors(facts) or not obstacles:
        obstacles.append(cuda_obstacle(0, facts))
    return "; ".join(obstacle.cause for obstacle in obstacles if obstacle)


def resolve_precision(
    request: str | PrecisionStrategy | FabricPlugin | Literal[False] | None,
    device: torch.device,
    facts: MachineFacts,
    grad_scaler: GradScalerConfig | Mapping[str, Any] | None = None,
) -> Choice[PrecisionStrategy]:
    """The precision strategy for a request, checked against the device.

    Args:
        request: "no" (or ``NO_PRECISION``), "bf16", "fp16", "auto", Lightning's word for one of them, a strategy, or a
            precision plugin of lightning-fabric. Those of its own plugins that are none of the first three go by
            their names too ("bf16-true", "16-true", "64-true"), so that what they trained can be loaded.

    Raises:
        ConfigError: The request is no precision, ``grad_scaler`` goes with none of it, or a launcher's environment
            asks for another.
        PrecisionError: The device cannot run it.
    """
    word, reason = plain_precision(request), ""
    asked = word if isinstance(word, str) else ""
    if asked in LIGHTNING_PRECISIONS:
        word, reason = LIGHTNING_PRECISIONS[asked], f"{asked} is Lightning's word for it"
    if word == "auto":
        word, reason = choose_precision(device, facts)
    strategy = _precision_of(word)
    if grad_scaler is not None:
        strategy = strategy.with_grad_scaler(grad_scaler)
    if asked != "auto":
        _check_launcher(strategy, facts)
    strategy.check(device, facts)
    return Choice(
        value=strategy,
        asked=asked or strategy.asked or strategy.name,
        chosen=strategy.name,
        reason=reason or strategy.description or ("" if asked else "an object was given"),
    )


def check_words(device: object, precision: object, distributed: object) -> None:
    """Refuse what no machine knows, without a look at this one.

    Raises:
        ConfigError: A word is none of those that there are.
    """
    if isinstance(device, str) and not DEVICE.fullmatch(device):
        raise ConfigError(_no_device(device, probe()))
    if isinstance(precision, str) and plain_precision(precision) not in PRECISIONS:
        raise ConfigError(_no_precision(precision))
    if isinstance(distributed, str) and distributed not in ("auto", *DISTRIBUTIONS):
        raise ConfigError(_no_distribution(distributed))


def plain_precision(request: object) -> Any:
    """The request, with "no" for every way in which YAML, a shell or Python says that; a number as a word."""
    word = request.strip().lower() if isinstance(request, str) else request
    if word is None or word is False or word in NO_PRECISION:
        return "no"
    return str(request) if type(request) in (int, float) else request


def _precision_of(request: object) -> PrecisionStrategy:
    if isinstance(request, PrecisionStrategy):
        return request
    if is_fabric_plugin(request):
        return fabric_precision(request)
    if request == "no":
        return FullPrecision()
    if request == "bf16":
        return BF16()
    if request == "fp16":
        return FP16()
    if request in ("bf16-true", "16-true"):
        from lightning_fabric.plugins.precision import HalfPrecision  # takes seconds

        return fabric_precision(HalfPrecision(request))
    if request == "64-true":
        from lightning_fabric.plugins.precision import DoublePrecision

        return fabric_precision(DoublePrecision())
    raise ConfigError(_no_precision(request))


def _no_precision(request: object) -> str:
    valid = f"precision must be no, bf16, fp16 or auto, or a precision strategy, got {request!r}."
    word = str(request).strip().lower()
    if re.fullmatch(r"([^\W\d]\w*\.)+\w+", word):
        return f"{valid}\nA class is written {{class_path: {str(request).strip()}}}."
    near = next((meant for words, meant in _MEANT_PRECISIONS.items() if word in words), None)
    near = near or next(iter(get_close_matches(word, ("no", "bf16", "fp16", "auto"), n=1)), "auto")
    return f"{valid}\nUse precision={near!r}."


def _check_launcher(strategy: PrecisionStrategy, facts: MachineFacts) -> None:
    """Refuse a precision other than the one that accelerate's launcher hands on; its "no" says nothing."""
    launched = (facts.variable(_LAUNCHER) or "no").lower()
    if launched in _COMPUTES_IN and strategy.compute_dtype != _COMPUTES_IN[launched]:
        raise ConfigError(
            f"precision is {strategy.asked or strategy.name}, but the launcher set {_LAUNCHER}={launched}.\n"
            "Only the run decides: unset the variable, or set it to no."
        )


def resolve_distribution(request: object, facts: MachineFacts) -> Choice[DistributionStrategy]:
    """The distribution strategy for a request, a word or a strategy, checked against what was launched.

    ``auto`` follows the launcher: ddp for several processes, none for one.

    Raises:
        ConfigError: The request is no distribution.
        DistributedError: It does not fit the launched processes, or the environment would change the run.
    """
    if isinstance(request, DistributionStrategy):
        request.check(facts)
        return Choice(value=request, asked=request.name, chosen=request.name, reason="an object was given")
    if request not in ("auto", *DISTRIBUTIONS):
        raise ConfigError(_no_distribution(request))
    world = world_size(facts)
    asked = str(request)
    chosen = asked if asked != "auto" else "ddp" if world > 1 else "none"
    if asked == "auto" and world == 1:
        check_alone(facts)
    strategy = DISTRIBUTIONS[chosen]()
    strategy.check(facts)
    reason = f"a launcher started {world} processes" if world > 1 else "one process"
    return Choice(value=strategy, asked=asked, chosen=chosen, reason=reason)


def _no_distribution(request: object) -> str:
    near = next(iter(get_close_matches(str(request).strip().lower(), ("auto", *DISTRIBUTIONS), n=1)), "auto")
    return (
        f"distributed must be auto, none, ddp or fsdp, or a distribution strategy, got {request!r}.\n"
        f"Use distributed={near!r}."
    )
