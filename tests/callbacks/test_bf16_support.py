import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from policyfit.callbacks.bf16_support import BF16Support
from policyfit.strategies.errors import PrecisionError
from policyfit.strategies.facts import GPU, MachineFacts
from policyfit.strategies.mixed import BF16, FP16
from policyfit.strategies.precision import FullPrecision, PrecisionStrategy

T4 = MachineFacts(build="cuda", cuda=(GPU(name="Tesla T4", capability=(7, 5)),))
V100 = MachineFacts(build="cuda", cuda=(GPU(name="Tesla V100", capability=(7, 0)),))
A100 = MachineFacts(build="cuda", cuda=(GPU(name="A100", capability=(8, 0)),))
MI50 = MachineFacts(build="rocm", cuda=(GPU(name="MI50", arch="gfx906"),))
MI300 = MachineFacts(build="rocm", cuda=(GPU(name="MI300X", arch="gfx942"),))
ARC_OLD = MachineFacts(build="xpu", xpu=(GPU(name="Arc", has_fp64=False, bf16=False),))
MACOS_13 = MachineFacts(build="mps", mps=True, macos=(13, 6))
CPU = MachineFacts(cpu_bf16=False)

POLICY = nn.Linear(1, 1)


class FakeTrainer:
    def __init__(self, device: str, facts: MachineFacts, precision: PrecisionStrategy) -> None:
        self.device = SimpleNamespace(name=device, device=torch.device(device))
        self.facts, self.precision = facts, precision
        self.events: list[dict[str, Any]] = []

    def event(self, kind: str, **fields: Any) -> None:
        self.events.append({"event": kind, **fields})


def check(device: str, facts: MachineFacts, precision: PrecisionStrategy, times: int = 1) -> list[dict[str, Any]]:
    trainer: Any = FakeTrainer(device, facts, precision)
    callback = BF16Support()
    for _ in range(times):
        callback.setup(trainer, POLICY, "fit")
    events: list[dict[str, Any]] = trainer.events
    return events


REFUSED = [
    ("cuda:0", T4, "cuda:0 (Tesla T4, compute capability 7.5) only emulates bfloat16", "fp16"),
    ("cuda:0", V100, "cuda:0 (Tesla V100, compute capability 7.0) only emulates bfloat16", "fp16"),
    ("cuda:0", MI50, "cuda:0 (MI50, gfx906) only emulates bfloat16", "fp16"),
    ("xpu:0", ARC_OLD, "xpu:0 (Arc) only emulates bfloat16", "no"),
    ("mps", MACOS_13, "from macOS 14 on and this is macOS 13.6", "fp16"),
    ("xpu:0", CPU, "xpu:0 is not available here", "no"),
]


@pytest.mark.parametrize(("device", "facts", "found", "advice"), REFUSED)
def test_bf16_is_refused_where_it_is_not_native(device: str, facts: MachineFacts, found: str, advice: str) -> None:
    with pytest.raises(PrecisionError) as error:
        check(device, facts, BF16())
    message = str(error.value)
    assert message.startswith("precision='bf16' needs native bfloat16, but ")
    assert found in message.splitlines()[0]
    assert f"Use precision='{advice}'" in message


@pytest.mark.parametrize(("device", "facts", "found", "advice"), REFUSED)
def test_every_remedy_named_holds_on_that_machine(device: str, facts: MachineFacts, found: str, advice: str) -> None:
    with pytest.raises(PrecisionError) as error:
        check(device, facts, BF16())
    remedies = str(error.value).partition("\n")[2]
    makers = {"fp16": FP16, "no": FullPrecision, "auto": FP16}  # auto: "which chooses fp16 here"
    named = re.findall(r"precision='(\w+)'", remedies)
    assert named
    for name in named:
        makers[name]().check(torch.device(device), facts)
    if "BF16(allow_emulated=True)" in remedies:
        check(device, facts, BF16(allow_emulated=True))


@pytest.mark.parametrize(
    ("device", "facts"),
    [("cuda:0", A100), ("cuda:0", MI300), ("cpu", CPU), ("cpu", MachineFacts(cpu_bf16=True))],
)
def test_bf16_passes_in_silence_where_it_is_native_and_on_the_cpu(device: str, facts: MachineFacts) -> None:
    assert check(device, facts, BF16()) == []


@pytest.mark.parametrize("facts", [T4, V100, MI50])
def test_emulation_that_was_allowed_is_warned_of_exactly_once(facts: MachineFacts) -> None:
    (event,) = check("cuda:0", facts, BF16(allow_emulated=True), times=3)
    assert event["event"] == "warning"
    assert "only emulates bfloat16" in event["message"]


def test_allowing_emulation_does_not_help_where_bf16_cannot_run() -> None:
    with pytest.raises(PrecisionError, match="macOS 14") as error:
        check("mps", MACOS_13, BF16(allow_emulated=True))
    assert "allow_emulated" not in str(error.value)


@pytest.mark.parametrize("precision", [FP16(), FullPrecision()])
def test_other_precisions_are_not_judged(precision: PrecisionStrategy) -> None:
    assert check("cuda:0", T4, precision) == []
