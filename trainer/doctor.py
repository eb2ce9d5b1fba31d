"""What this machine offers and what ``auto`` would make of it, for people and for bug reports."""

from __future__ import annotations

from typing import Any

import torch

from ..strategies.errors import PolicyfitError
from ..strategies.facts import (
    MASKS,
    MachineFacts,
    Support,
    bf16_support,
    describe,
    fp16_support,
    probe,
    tf32_support,
)
from ..strategies.obstacles import cuda_obstacle, present_vendors
from .resolve import choose_precision, resolve_device

_BUILD = {
    "cpu": "the cpu alone",
    "cuda": "CUDA (NVIDIA)",
    "rocm": "ROCm (AMD)",
    "xpu": "XPU (Intel)",
    "mps": "MPS (Apple)",
}
_FORMATS = {"bf16": bf16_support, "fp16": fp16_support, "TF32": tf32_support}


def report(facts: MachineFacts) -> list[tuple[str, str]]:
    """Rows of (what, finding): torch, devices and number formats, masks, the choices of auto, warnings."""
    rows = [("torch", f"{facts.torch_version}, built for {_BUILD[facts.build]}")]
    for device in _devices(facts):
        gpus = {"cuda": facts.cuda, "xpu": facts.xpu}.get(device.type)
        uuid = f", uuid {gpus[device.index].uuid}" if gpus and gpus[device.index].uuid else ""
        rows.append((str(device), f"{describe(device, facts)}{uuid}"))
        rows += [(f"{device} {name}", _verdict(support(device, facts))) for name, support in _FORMATS.items()]
    rows += [(name, _as_set(facts.variable(name))) for name in _masks(facts)]
    try:
        choice = resolve_device("auto", facts)
        precision, reason = choose_precision(choice.value.device, facts)
        rows += [
            ("device=auto", f"{choice.chosen}: {choice.reason}"),
            ("precision=auto", f"{precision}: {reason}"),
        ]
    except PolicyfitError as error:
        rows.append(("device=auto", f"refused: {str(error).replace(chr(10), ' ')}"))
    return rows + [("warning", warning) for warning in _warnings(facts)]


def main_text() -> str:
    """The report of this machine, with TF32 as it is set in this process, as aligned lines."""
    rows = report(probe())
    rows.insert(1, ("TF32 as set", tf32_setting()))
    width = max(len(what) for what, _ in rows)
    return "\n".join(f"{what:<{width}}  {finding}" for what, finding in rows)


def tf32_setting() -> str:
    """How TF32 is set in this process; never raises, whatever mixture of old and new switches set it."""
    backends: Any = torch.backends
    if not hasattr(backends, "fp32_precision"):  # torch 2.8 and older have the old switches only
        convolution = "tf32" if backends.cudnn.allow_tf32 else "ieee"
        return f"matmul {torch.get_float32_matmul_precision()}, convolution {convolution}"
    leaves = {
        "matmul": backends.cuda.matmul.fp32_precision,
        "convolution": backends.cudnn.conv.fp32_precision,
        "rnn": backends.cudnn.rnn.fp32_precision,
        "cpu matmul": backends.mkldnn.matmul.fp32_precision,
    }
    text = ", ".join(f"{name} {value}" for name, value in leaves.items())
    return f"{text} (mixed: torch's old getters raise, so torch.compile may)" if _is_mixed() else text


def _is_mixed() -> bool:
    """Whether the old switches of TF32 and the new ones say different things, which the old getters refuse."""
    try:
        torch.get_float32_matmul_precision()
        torch.backends.cudnn.allow_tf32  # noqa: B018 - read to see whether it raises
    except RuntimeError:
        return True
    return False


def _devices(facts: MachineFacts) -> list[torch.device]:
    gpus = [torch.device("cuda", i) for i in range(len(facts.cuda))]
    gpus += [torch.device("mps")] if facts.mps else []
    return [*gpus, *(torch.device("xpu", i) for i in range(len(facts.xpu))), torch.device("cpu")]


def _verdict(support: Support) -> str:
    word = ("yes" if support.native else "emulated") if support.usable else "no"
    return f"{word}: {support.reason}"


def _masks(facts: MachineFacts) -> list[str]:
    """The variables that act on this build, and those of other builds that are set."""
    every = dict.fromkeys(name for names in MASKS.values() for name in names)
    return [name for name in every if name in MASKS[facts.build] or facts.variable(name) is not None]


def _as_set(value: str | None) -> str:
    if value is None:
        return "unset"
    return repr(value) if value else "set to empty"


def _warnings(facts: MachineFacts) -> list[str]:
    found = []
    obstacle = cuda_obstacle(0, facts)
    if obstacle is not None and present_vendors(facts):
        found.append(f"{obstacle.cause}. {obstacle.remedy}")
    others = ("ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
    masks = [name for name in others if facts.variable(name) is not None]
    if facts.build == "rocm" and masks:
        found.append(f"On ROCm set HIP_VISIBLE_DEVICES alone: {' and '.join(masks)} and it add up.")
    if facts.fault and not found:
        found.append(f"torch says: {facts.fault}")
    return found
