"""What this machine offers and what ``auto`` would make of it, for people and for bug reports."""

from __future__ import annotations

import torch

from ..callbacks.tf32 import save_state
from ..strategies.errors import PolicyfitError
from ..strategies.facts import MASKS, MachineFacts, describe, probe
from ..strategies.formats import Support, bf16_support, fp16_support, tf32_support
from ..strategies.obstacles import cuda_obstacle, present_vendors
from .resolve import choose_precision, resolve_device

_BUILD = {
    "cpu": "the cpu alone",
    "cuda": "CUDA (NVIDIA)",
    "rocm": "ROCm (AMD)",
    "xpu": "XPU (Intel)",
    "mps": "MPS (Apple)",
}
_LEAVES = {"matmul": "cuda.matmul", "convolution": "cudnn.conv", "rnn": "cudnn.rnn", "cpu matmul": "mkldnn.matmul"}
_FORMATS = {"bf16": bf16_support, "fp16": fp16_support, "TF32": tf32_support}


def report(facts: MachineFacts) -> list[tuple[str, str]]:
    """Rows of (what, finding): torch, devices and number formats, masks, the choices of auto, warnings."""
    rows = [("torch", f"{facts.torch_version}, built for {_BUILD[facts.build]}")]
    for device in _devices(facts):
        gpu = facts.gpu(device)
        uuid = f", uuid {gpu.uuid}" if gpu and gpu.uuid else ""
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
    state = save_state()
    if not state.leaves:  # torch 2.8 and older have the old switches only
        return f"matmul {state.word}, convolution {'tf32' if state.cudnn else 'ieee'}"
    text = ", ".join(f"{name} {state.leaves[leaf]}" for name, leaf in _LEAVES.items())
    return f"{text} (mixed: torch's old getters raise, so torch.compile may)" if state.raised else text


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
