"""Every precision keeps the contract, proves itself before it is used, and refuses what it cannot do."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from contract import PROMISES, Make
from torch import Tensor, nn

from policyfit import BF16, FP16, Checkpoint, FullPrecision, PrecisionError, Trainer, load
from policyfit.strategies import mixed
from policyfit.strategies.facts import GPU, MachineFacts, probe
from policyfit.strategies.precision import PrecisionStrategy, check_parameters
from policyfit.strategies.scaler import LossScaler
from policyfit.trainer.resolve import resolve_precision

CPU = torch.device("cpu")
SCALER = {"init_scale": 256.0, "growth_interval": 3}
PRECISIONS: dict[str, Make] = {"no": FullPrecision, "bf16": BF16, "fp16": lambda: FP16(SCALER, allow_cpu=True)}


@pytest.mark.parametrize("name", PRECISIONS)
@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.__name__)
def test_precision_keeps_its_promise(promise: Callable[[Make], None], name: str) -> None:
    promise(PRECISIONS[name])


# Self-checks ------------------------------------------------------------------------------------------------


class Silent(BF16):
    """Its autocast is off, as torch's is where a backend is missing (pytorch/pytorch#67598)."""

    def autocast(self) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()


def test_an_autocast_that_is_silently_off_is_refused_at_setup() -> None:
    with pytest.raises(PrecisionError, match=r"precision='bf16'.*computes in torch.float32, not in torch.bfloat16"):
        Silent().setup(CPU)


@pytest.mark.parametrize(
    ("name", "message"),
    [("no", r"computes in torch.bfloat16"), ("bf16", "inside of a torch.autocast"), ("fp16", "inside of a torch.auto")],
)
def test_an_autocast_around_the_run_is_refused(name: str, message: str) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(PrecisionError, match=rf"{message}.*\n.*outside of torch.autocast"):
            PRECISIONS[name]().setup(CPU)


def test_a_scaler_that_zeroes_gradients_is_refused_at_setup(monkeypatch: pytest.MonkeyPatch) -> None:
    original = LossScaler.unscale

    def zeroing(self: LossScaler, gradients: list[Tensor], overflow: Tensor) -> None:
        original(self, gradients, overflow)
        for gradient in gradients:
            gradient.zero_()

    monkeypatch.setattr(LossScaler, "unscale", zeroing)
    with pytest.raises(PrecisionError, match=r"not sound on cpu: a known gradient .* came back"):
        PRECISIONS["fp16"]().setup(CPU)


def test_a_scaler_that_sees_an_overflow_where_none_is_is_refused_at_setup(monkeypatch: pytest.MonkeyPatch) -> None:
    original = LossScaler.unscale

    def alarmed(self: LossScaler, gradients: list[Tensor], overflow: Tensor) -> None:
        original(self, gradients, overflow)
        overflow.fill_(1.0)

    monkeypatch.setattr(LossScaler, "unscale", alarmed)
    with pytest.raises(PrecisionError, match="not sound on cpu"):
        PRECISIONS["fp16"]().setup(CPU)


def test_the_self_check_comes_before_the_first_batch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Untouched(torch.utils.data.Dataset[Tensor]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> Tensor:
            raise AssertionError("a sample was read")

    with pytest.raises(PrecisionError):
        Trainer("cpu", Silent(), run_dir=tmp_path / "run").fit(nn.Linear(1, 1), Untouched())
    assert not (tmp_path / "run").exists()


def test_a_cache_that_keeps_a_weight_without_its_history_is_seen() -> None:
    with torch.no_grad():
        assert mixed._cache_keeps_gradients(torch.autocast("cpu", dtype=torch.bfloat16), CPU)
    assert not mixed._cache_keeps_gradients(torch.no_grad(), CPU)  # as if every cast were cached without it


def test_a_cache_that_loses_gradients_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    # What releases with pytorch/pytorch#112583 answer.
    monkeypatch.setattr(mixed, "_cache_keeps_gradients", lambda autocast, device: False)
    strategy = BF16()
    strategy.setup(CPU)
    with strategy.autocast():
        assert not torch.is_autocast_cache_enabled()
    healthy = FP16(allow_cpu=True)
    monkeypatch.undo()
    healthy.setup(CPU)
    with healthy.autocast():
        assert torch.is_autocast_cache_enabled()


# What a device can do ---------------------------------------------------------------------------------------

T4 = MachineFacts(build="cuda", cuda=(GPU(name="Tesla T4", capability=(7, 5)),))
ARC = MachineFacts(build="xpu", xpu=(GPU(name="Arc", has_fp64=False, bf16=True),))
OLD_MPS = MachineFacts(build="mps", mps=True, macos=(15, 0), torch_version="2.7.1")


@pytest.mark.parametrize(
    ("device", "facts", "message"),
    [
        ("cpu", MachineFacts(), "has no use for it"),
        ("xpu:0", ARC, "has no float64"),
        ("mps", OLD_MPS, "from torch 2.8 on"),
        ("cuda:0", MachineFacts(), "not available"),
    ],
)
def test_fp16_is_refused_where_it_cannot_train_and_every_remedy_is_accepted(
    device: str, facts: MachineFacts, message: str
) -> None:
    with pytest.raises(PrecisionError, match=message) as error:
        FP16().check(torch.device(device), facts)
    remedies = str(error.value).partition("\n")[2]
    named = re.findall(r"precision='(\w+)'", remedies)
    assert named
    for name in named:
        resolve_precision(name, torch.device(device), facts)
    if "FP16(allow_cpu=True)" in remedies:
        FP16(allow_cpu=True).check(torch.device(device), facts)


def test_the_rehearsal_computes_in_float16_with_a_scaler_that_is_on() -> None:
    strategy = FP16(allow_cpu=True)
    strategy.check(CPU, probe())
    strategy.setup(CPU)
    with strategy.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float16
    assert float(strategy.scale) == 65536.0


@pytest.mark.parametrize("precision", [FullPrecision(), FP16(allow_cpu=True)])
def test_only_bf16_asks_for_native_hardware(precision: PrecisionStrategy) -> None:
    assert precision.check_native(torch.device("cuda:0"), T4) is None


def test_loading_a_bf16_policy_where_bf16_is_emulated_is_refused_as_training_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"default_callbacks": False, "callbacks": [Checkpoint()], "run_dir": tmp_path / "run"}
    trainer = Trainer("cpu", "bf16", max_steps=1, **settings)
    trainer.fit(Square(), [torch.ones(2, 2)])
    native = BF16.check_native
    # The cpu plays the T4: only what is asked of the facts is put in their place.
    monkeypatch.setattr(BF16, "check_native", lambda self, device, facts: native(self, torch.device("cuda:0"), T4))
    with pytest.raises(PrecisionError, match=r"only emulates bfloat16.*\nUse precision='fp16'"):
        load(tmp_path / "run", device="cpu")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load(tmp_path / "run", device="cpu", precision=BF16(allow_emulated=True))
    assert [str(w.message) for w in caught] == [
        "precision='bf16' on cuda:0 (Tesla T4, compute capability 7.5) only emulates bfloat16, as "
        "BF16(allow_emulated=True) allows: it is slow, and may fail."
    ]


class Square(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 2)

    def forward(self, batch: Tensor) -> Tensor:
        return self.net(batch).square().mean()  # type: ignore[no-any-return]


# Parameters -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", PRECISIONS)
def test_trainable_parameters_of_another_type_are_refused_by_name_and_float_is_the_way_out(
    name: str, dtype: torch.dtype
) -> None:
    policy = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).to(dtype))
    with pytest.raises(PrecisionError, match=r"but 2 are not: 1\.weight .*1\.bias") as error:
        Trainer("cpu", PRECISIONS[name]()).fit(policy, [torch.ones(1, 2)])
    assert "policy.float()" in str(error.value)
    check_parameters(policy.float().named_parameters())


def test_frozen_parameters_may_be_of_any_type_and_stay_so() -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = nn.Linear(2, 2).to(torch.bfloat16).requires_grad_(False)
            self.head = nn.Linear(2, 2)

        def forward(self, batch: Tensor) -> Tensor:
            return self.head(self.backbone(batch.to(torch.bfloat16)).float()).square().mean()  # type: ignore[no-any-return]

    policy = Frozen()
    trainer = Trainer("cpu", max_steps=2, default_callbacks=False)
    trainer.fit(policy, [torch.ones(1, 2)])
    assert trainer.step == 2
    assert policy.backbone.weight.dtype == torch.bfloat16


def test_many_names_are_shortened() -> None:
    policy = nn.Sequential(*(nn.Linear(1, 1).half() for _ in range(4)))
    with pytest.raises(PrecisionError, match=r"but 8 are not: .* and 3 more"):
        check_parameters(policy.named_parameters())
