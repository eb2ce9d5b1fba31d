"""lightning-fabric's precision plugins: what they say is done, on the same road as everything else."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from contract import PROMISES, Make
from gymnasium import Env
from gymnasium.spaces import Box
from lightning_fabric.plugins.precision import (
    BitsandbytesPrecision,
    DeepSpeedPrecision,
    DoublePrecision,
    FSDPPrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
    TransformerEnginePrecision,
    XLAPrecision,
)
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from toys import MLP, Batch, InMemory, assert_equal, batches, mlp, weights

from policyfit import BF16, FP16, Callback, ConfigError, MachineFacts, Outcome, PrecisionError, Trainer, load
from policyfit.strategies import GPU, fabric_precision
from policyfit.strategies.fabric import FabricPrecision, is_fabric_plugin
from policyfit.trainer.cli import main
from policyfit.trainer.resolve import resolve_precision

CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")
SCALER = {"init_scale": 1024.0, "growth_interval": 3}


def mixed16(**settings: Any) -> FabricPrecision:
    scaler = torch.amp.GradScaler("cpu", **{**SCALER, **settings})
    return fabric_precision(MixedPrecision("16-mixed", "cpu", scaler), allow_cpu=True)


def half16() -> FabricPrecision:
    return fabric_precision(HalfPrecision("16-true"), allow_cpu=True)


def adamw(parameters: Any) -> AdamW:
    return AdamW(parameters, lr=1e-2)


def fit(policy: nn.Module, precision: Any, data: list[Batch], make: Any = adamw, **settings: Any) -> Trainer:
    settings = {"max_steps": 8, "clip_norm": 0.5, "seed": 0, "default_callbacks": False, **settings}
    trainer = Trainer("cpu", precision, **settings)
    trainer.fit(policy, InMemory(data), InMemory(data[1:3]), optimizer=make)
    return trainer


# The same as our own --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize(
    ("plugin", "ours"),
    [
        (lambda: Precision(), lambda: "no"),
        (lambda: MixedPrecision("bf16-mixed", "cpu"), lambda: BF16()),
        (mixed16, lambda: FP16(SCALER, allow_cpu=True)),
    ],
    ids=["32-true", "bf16-mixed", "16-mixed"],
)
def test_plugin_with_float32_weights_equals_our_own_precision_bit_for_bit(
    plugin: Any, ours: Any, accumulate: int
) -> None:
    data = batches(18, poisoned=(0, 4))
    theirs, own = mlp(dropout=0.2), mlp(dropout=0.2)
    by_plugin = fit(theirs, plugin(), data, accumulate=accumulate)
    by_us = fit(own, ours(), data, accumulate=accumulate)
    assert by_plugin.skipped == by_us.skipped >= 2
    assert_equal(weights(theirs), weights(own))
    for key in ("train/loss", "val/loss", "grad_norm"):
        assert by_plugin.metrics[key] == by_us.metrics[key]
    assert by_plugin.precision.name == by_us.precision.name
    assert by_plugin.precision.state_dict() == by_us.precision.state_dict()
    assert by_plugin.precision.min_scale == by_us.precision.min_scale


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.__name__)
@pytest.mark.parametrize(
    "make",
    [
        lambda: fabric_precision(Precision()),
        lambda: fabric_precision(MixedPrecision("bf16-mixed", "cpu")),
        lambda: mixed16(),
    ],
    ids=["32-true", "bf16-mixed", "16-mixed"],
)
def test_plugin_with_float32_weights_keeps_the_contract_of_every_precision(make: Make, promise: Any) -> None:
    promise(make)


# What has no float32 weights ------------------------------------------------------------------------------------

TRUE: dict[str, tuple[Any, torch.dtype]] = {
    "bf16-true": (lambda: HalfPrecision("bf16-true"), torch.bfloat16),
    "16-true": (half16, torch.float16),
    "64-true": (lambda: DoublePrecision(), torch.float64),
}


def by_hand(policy: nn.Module, data: list[Batch], make: Any, dtype: torch.dtype, steps: int) -> float:
    """Weights, batch, gradients and moments all of one type; norms and clipping factor in float32."""
    policy.to(dtype)
    optimizer = make(policy.parameters())
    source, landed, loss = cycle(data), 0, torch.zeros(())
    while landed < steps:
        batch = Batch(*(part.to(dtype) for part in next(source)))
        loss = policy(batch).float()
        loss.backward()
        gradients = [p.grad for p in policy.parameters() if p.grad is not None]
        if all(bool(g.isfinite().all()) for g in gradients):
            wide = torch.promote_types(dtype, torch.float32)
            norm = torch.stack([torch.linalg.vector_norm(g, dtype=wide) for g in gradients]).float().norm()
            factor = (0.5 / (norm + 1e-6)).clamp(max=1.0)
            for gradient in gradients:
                gradient.mul_(factor)
            optimizer.step()
            landed += 1
        optimizer.zero_grad()
    return float(loss.detach())


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("bf16-true", adamw),
        ("bf16-true", lambda p: AdamW(p, lr=1e-2, fused=True)),
        ("16-true", lambda p: SGD(p, lr=0.1, momentum=0.9)),  # Adam's squares underflow in float16
        ("64-true", adamw),
    ],
)
def test_plugin_without_float32_weights_equals_a_loop_by_hand_and_says_so_in_the_plan(name: str, make: Any) -> None:
    plugin, dtype = TRUE[name]
    data = batches(9, poisoned=(0, 4))
    ours, theirs = mlp(), mlp()
    trainer = fit(ours, plugin(), data, make, log_every=1)
    loss = by_hand(theirs, data, make, dtype, steps=8)
    assert trainer.skipped == 3
    assert {p.dtype for p in ours.parameters()} == {dtype}
    assert_equal(weights(ours), weights(theirs))
    assert trainer.metrics["train/loss"] == pytest.approx(loss, rel=1e-6)
    masters = trainer.plan.to_dict()["masters"]
    assert masters["chosen"] == "none"
    assert str(dtype).removeprefix("torch.") in masters["reason"]
    assert [note for note in trainer.plan.notes if "loss scale" in note] == (
        [trainer.precision.note] if name == "16-true" else []
    )


@pytest.mark.parametrize("plugin", [lambda: Precision(), lambda: MixedPrecision("bf16-mixed", "cpu"), mixed16])
def test_plan_of_a_plugin_with_float32_weights_speaks_of_no_masters(plugin: Any) -> None:
    trainer = fit(mlp(), plugin(), batches(2), max_steps=1)
    decisions = trainer.plan.to_dict()
    assert "masters" not in decisions
    assert decisions["precision"]["asked"] == plugin_word(plugin())
    assert "lightning-fabric's" in decisions["precision"]["reason"]


def plugin_word(plugin: Any) -> str:
    return str(plugin.asked if isinstance(plugin, FabricPrecision) else plugin.precision)


def test_policy_made_under_the_plugin_s_module_init_context_is_taken_as_it_is() -> None:
    plugin = HalfPrecision("bf16-true")
    with plugin.module_init_context():
        policy = mlp()
    assert next(policy.parameters()).dtype == torch.bfloat16
    before = policy.net[0].weight
    fit(policy, plugin, batches(3), max_steps=2)
    assert policy.net[0].weight is before
    with pytest.raises(PrecisionError, match="Trainable parameters stay float32"):
        fit(policy, MixedPrecision("bf16-mixed", "cpu"), batches(1))


class Norms(Callback):
    def __init__(self) -> None:
        self.norms: list[float] = []
        self.reasons: list[str | None] = []

    def on_update_end(self, trainer: Trainer, policy: nn.Module, outcome: Outcome) -> None:
        self.norms.append(outcome.grad_norm)
        self.reasons.append(outcome.reason)


class Steep(nn.Module):
    """A gradient of 400 in each of 50,000 elements: finite in float16, its norm (89,443) is not."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(50_000))

    def forward(self, batch: Batch) -> Tensor:
        return (self.weight * 400).sum() * batch.factor


def test_norm_of_float16_gradients_is_taken_in_float32() -> None:
    seen = Norms()
    trainer = fit(Steep(), half16(), batches(1), max_steps=1, callbacks=[seen], clip_value=1e4)
    assert trainer.skipped == 0
    assert seen.norms == pytest.approx([400 * 50_000**0.5], rel=1e-5)


def test_non_finite_bfloat16_gradients_are_found_without_the_kernel_that_cuda_lacks() -> None:
    precision = fabric_precision(HalfPrecision("bf16-true"))
    precision.setup(CPU)
    for value, expected in ((3e38, 0.0), (float("inf"), 1.0), (float("nan"), 1.0), (-float("inf"), 1.0)):
        gradients = [torch.ones(4, dtype=torch.bfloat16), torch.tensor([1.0, value], dtype=torch.bfloat16)]
        flag = torch.ones(())
        precision.unscale(gradients, flag)
        assert float(flag) == expected


# Conversions ----------------------------------------------------------------------------------------------------


class Recording(nn.Module):
    """Keeps the types that it was called with and that it made."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.seen: list[torch.dtype] = []

    def forward(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        self.seen += [batch.x.dtype, batch.y.dtype, torch.empty(1).dtype]
        loss = nn.functional.mse_loss(self.linear(batch.x), batch.y)
        return loss, {"error": loss.detach().sqrt()}

    def select_action(self, observation: Tensor) -> Tensor:
        self.seen.append(observation.dtype)
        action: Tensor = self.linear(observation)
        return action


class Results(Callback):
    def __init__(self) -> None:
        self.dtypes: set[torch.dtype] = set()

    def on_train_batch_end(self, trainer: Trainer, policy: nn.Module, outputs: Any, *_: Any) -> None:
        self.dtypes |= {value.dtype for value in outputs.values()}


def test_half_precision_converts_batch_and_result_and_the_default_type_comes_back() -> None:
    policy, results = Recording(), Results()
    trainer = fit(policy, HalfPrecision("bf16-true"), batches(3), max_steps=1, callbacks=[results])
    assert set(policy.seen) == {torch.bfloat16}
    assert results.dtypes == {torch.float32}
    assert torch.get_default_dtype() == torch.float32
    outputs: Any = trainer.validate(policy, InMemory(batches(1)))
    assert outputs["val/error"] == pytest.approx(outputs["val/loss"] ** 0.5, rel=1e-2)


def test_mixed_precision_leaves_the_targets_of_the_loss_in_float32() -> None:
    policy = Recording()
    fit(policy, MixedPrecision("bf16-mixed", "cpu"), batches(2), max_steps=1)
    assert set(policy.seen) == {torch.float32}


class Halved(Precision):
    """A plugin of a user's own: halves what goes in, doubles what comes out."""

    def convert_input(self, data: Any) -> Any:
        return apply_to_collection(data, Tensor, lambda tensor: tensor / 2)

    def convert_output(self, data: Any) -> Any:
        return apply_to_collection(data, Tensor, lambda tensor: tensor * 2)


def test_conversions_of_a_user_s_own_plugin_are_made() -> None:
    ours, theirs = mlp(), mlp()
    data = batches(1)
    fit(ours, Halved(), data, max_steps=1, clip_norm=None)
    optimizer = AdamW(theirs.parameters(), lr=1e-2, fused=True)
    (theirs(Batch(*(part / 2 for part in data[0]))) * 2).backward()
    optimizer.step()
    assert_equal(weights(ours), weights(theirs))


class Reach(Env[Any, Any]):
    observation_space: Any = Box(-1, 1, (6,), np.float32)
    action_space: Any = Box(-9, 9, (3,), np.float32)

    def reset(self, **_: Any) -> Any:
        return np.ones(6, np.float32), {}

    def step(self, action: Any) -> Any:
        assert action.dtype == np.float32
        return np.ones(6, np.float32), 0.0, True, False, {"success": True}


@pytest.mark.parametrize("name", TRUE)
def test_rollout_acts_under_the_plugin_in_float32(name: str) -> None:
    policy = Recording()
    report = Trainer("cpu", TRUE[name][0](), default_callbacks=False).evaluate(policy, Reach, episodes=2)
    assert report.success_rate == 1.0
    assert set(policy.seen) == {TRUE[name][1]}


# Checkpoints ----------------------------------------------------------------------------------------------------


class Acting(MLP):
    def select_action(self, observation: Tensor) -> Tensor:
        action: Tensor = self.net(observation)
        return action


class Saving(Callback):
    def due(self, step: int) -> bool:
        return step == 3

    def on_due(self, trainer: Trainer, policy: nn.Module) -> None:
        trainer.save_checkpoint()


def test_run_in_bfloat16_weights_resumes_exactly_and_its_policy_loads(tmp_path: Path) -> None:
    def run(folder: str, **options: Any) -> Acting:
        torch.manual_seed(0)
        policy = Acting(0.2)
        trainer = Trainer(
            "cpu", HalfPrecision("bf16-true"), max_steps=6, seed=0, default_callbacks=False, run_dir=tmp_path / folder,
            callbacks=[Saving()],
        )  # fmt: skip
        trainer.fit(policy, InMemory(batches(4)), optimizer=adamw, **options)
        return policy

    whole = run("a")
    again = run("b", resume=tmp_path / "a/checkpoints/000003")
    assert_equal(weights(again), weights(whole))
    acting: Any = load(tmp_path / "a", device="cpu", policy=Acting())
    assert {p.dtype for p in acting.parameters()} == {torch.bfloat16}
    action = acting.select_action(torch.ones(2, 6))
    assert action.dtype == torch.float32


def test_checkpoint_of_a_mixed_plugin_loads_without_the_plugin(tmp_path: Path) -> None:
    trainer = fit(Acting(), MixedPrecision("bf16-mixed", "cpu"), batches(4), run_dir=tmp_path / "a")
    trainer = Trainer("cpu", MixedPrecision("bf16-mixed", "cpu"), max_steps=4, default_callbacks=False,
                      run_dir=tmp_path / "b", callbacks=[Saving()])  # fmt: skip
    trainer.fit(Acting(), InMemory(batches(4)))
    acting: Any = load(tmp_path / "b", device="cpu", policy=Acting())
    assert acting.select_action(torch.ones(2, 6)).dtype == torch.float32


# Run files ------------------------------------------------------------------------------------------------------

RUN = """
policy: {class_path: toys.MLP}
data: {train: {class_path: toys.InMemory, init_args: {held: [1]}}}
trainer:
  device: cpu
  max_steps: 1
  precision: PRECISION
"""
PLUGIN = "class_path: lightning_fabric.plugins.precision"


@pytest.mark.parametrize(
    ("written", "asked"),
    [
        (f"{{{PLUGIN}.MixedPrecision, init_args: {{precision: bf16-mixed, device: cpu}}}}", "bf16-mixed"),
        (f"{{{PLUGIN}.HalfPrecision, init_args: {{precision: bf16-true}}}}", "bf16-true"),
        (f"{{{PLUGIN}.DoublePrecision}}", "64-true"),
        ("bf16-true", "bf16-true"),
        ("64-true", "64-true"),
        (
            "{class_path: policyfit.strategies.fabric_precision, init_args: {allow_cpu: true, "
            f"plugin: {{{PLUGIN}.HalfPrecision, init_args: {{precision: 16-true}}}}}}}}",
            "16-true",
        ),
    ],
)
def test_run_file_names_a_plugin_by_its_class_or_by_its_word(
    written: str, asked: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.yaml").write_text(RUN.replace("PRECISION", written))
    assert main(["plan", str(tmp_path / "run.yaml")]) == 0
    printed = capsys.readouterr().out
    assert f"lightning-fabric's {'Mixed' if 'mixed' in asked else 'Double' if '64' in asked else 'Half'}" in printed
    assert f"'{asked}'" in printed


# The rules ------------------------------------------------------------------------------------------------------

T4 = MachineFacts(build="cuda", cuda=(GPU(name="Tesla T4", capability=(7, 5)),))
A100 = MachineFacts(build="cuda", cuda=(GPU(name="A100", capability=(8, 0)),))
MAC = MachineFacts(build="mps", mps=True, macos=(15, 1))
ARC = MachineFacts(build="xpu", xpu=(GPU(name="Arc A770", has_fp64=False, bf16=True),))


def mixed_for(device: str, word: Any) -> MixedPrecision:
    """A plugin for a device that this machine may not have: torch then disables its scaler."""
    with pytest.warns(UserWarning, match="Disabling") if word == "16-mixed" and not usable(device) else nullcontext():
        return MixedPrecision(word, device)


def usable(device: str) -> bool:
    return device != "cuda" or torch.cuda.is_available()


def test_bf16_rules_hold_for_plugins_alike() -> None:
    for plugin in (mixed_for("cuda", "bf16-mixed"), HalfPrecision("bf16-true")):
        precision = resolve_precision(plugin, CUDA, T4).value
        with pytest.raises(PrecisionError, match=r"needs native bfloat16.*Tesla T4.*\n.*precision='fp16'"):
            precision.check_native(CUDA, T4)
        assert resolve_precision(plugin, CUDA, A100).value.check_native(CUDA, A100) is None
        allowed = fabric_precision(plugin, allow_emulated=True).check_native(CUDA, T4)
        assert allowed is not None
        assert "Tesla T4" in allowed
    old = MachineFacts(build="mps", mps=True, macos=(13, 6))
    with pytest.raises(PrecisionError, match=r"macOS 13\.6"):
        resolve_precision(HalfPrecision("bf16-true"), torch.device("mps"), old)


@pytest.mark.parametrize("plugin", [HalfPrecision("16-true"), MixedPrecision("16-mixed", "cpu")])
def test_float16_on_the_cpu_is_refused_for_plugins_alike(plugin: Any) -> None:
    with pytest.raises(PrecisionError, match=r"is under the same rule: .*fp16.*on the cpu"):
        Trainer("cpu", plugin)
    allowed = resolve_precision(fabric_precision(plugin, allow_cpu=True), CPU, MachineFacts()).value
    assert allowed.compute_dtype == torch.float16


@pytest.mark.parametrize("word", ["16-mixed", "bf16-mixed"])
def test_plugin_for_another_device_is_refused_before_anything_runs(word: str) -> None:
    with pytest.raises(
        PrecisionError, match=r"made for device='cuda', but the run is on cpu.*\nMake it with device='cpu'"
    ):
        Trainer("cpu", mixed_for("cuda", word))
    with pytest.raises(PrecisionError, match="made for device='cpu', but the run is on cuda:0"):
        resolve_precision(MixedPrecision("bf16-mixed", "cpu"), CUDA, A100)


def test_disabled_scaler_is_refused() -> None:
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", enabled=False))
    with pytest.raises(PrecisionError, match="is disabled"):
        resolve_precision(fabric_precision(plugin, allow_cpu=True), CPU, MachineFacts())


def test_scaler_hands_over_its_settings_and_where_it_stands() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=0.5, growth_factor=3.0, backoff_factor=0.25, growth_interval=7)
    precision = fabric_precision(MixedPrecision("16-mixed", "cpu", scaler))
    assert isinstance(precision, FP16)
    settings = precision.settings
    assert (settings.init_scale, settings.growth_factor, settings.backoff_factor) == (0.5, 3.0, 0.25)
    assert (settings.growth_interval, settings.min_scale) == (7, 0.5)


def test_scaler_of_another_make_is_refused() -> None:
    class Sharded(torch.amp.GradScaler):
        pass

    with pytest.raises(PrecisionError, match="scaler is a Sharded"):
        fabric_precision(MixedPrecision("16-mixed", "cpu", Sharded("cpu")))


def test_grad_scaler_beside_a_plugin_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"but precision is lightning-fabric's MixedPrecision\('16-mixed'\)"):
        Trainer("cpu", mixed16(), grad_scaler={"init_scale": 8.0})


@pytest.mark.parametrize(("device", "facts"), [("mps", MAC), ("xpu:0", ARC)])
def test_float64_is_refused_where_the_device_has_none(device: str, facts: MachineFacts) -> None:
    with pytest.raises(PrecisionError, match=r"needs float64, which .* has not\.\nUse precision='no'"):
        resolve_precision(DoublePrecision(), torch.device(device), facts)
    assert resolve_precision(DoublePrecision(), CUDA, A100).chosen == "64-true"


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (TransformerEnginePrecision, "float8"),
        (BitsandbytesPrecision, "quantised"),
        (DeepSpeedPrecision, "DeepSpeed's engine"),
        (FSDPPrecision, "FSDP strategy"),
        (XLAPrecision, "torch_xla"),
    ],
)
def test_plugin_that_needs_its_own_road_is_refused_with_the_reason(kind: type, reason: str) -> None:
    plugin: Any = object.__new__(kind)  # most need a package that is not here
    assert is_fabric_plugin(plugin)
    with pytest.raises(PrecisionError, match=rf"cannot be used here: it .*{reason}.*\nUse precision='auto'"):
        Trainer("cpu", plugin)


class Steps(Precision):
    def optimizer_step(self, optimizer: Any, **options: Any) -> Any:
        return optimizer.step()


class Unscales(MixedPrecision):
    def unscale_gradients(self, optimizer: Any) -> None: ...


class Clips(Precision):
    def clip_gradients(self, optimizer: Any) -> None: ...


@pytest.mark.parametrize(
    ("plugin", "verb"),
    [(Steps(), "optimizer_step"), (Unscales("bf16-mixed", "cpu"), "unscale_gradients"), (Clips(), "clip_gradients")],
)
def test_plugin_with_verbs_that_would_be_bypassed_is_refused_naming_them(plugin: Any, verb: str) -> None:
    with pytest.raises(PrecisionError, match=f"brings its own {verb}, which the update here would bypass"):
        Trainer("cpu", plugin)


class Idle(MixedPrecision):
    """Says bf16-mixed and does nothing."""

    def forward_context(self) -> Any:
        return nullcontext()


def test_self_check_finds_a_plugin_that_does_not_do_what_it_says() -> None:
    with pytest.raises(PrecisionError, match=r"computes in torch\.float32, not in torch\.bfloat16"):
        fit(mlp(), Idle("bf16-mixed", "cpu"), batches(1))


class Unsaid(Precision):
    precision: Any = "8-true"


def test_plugin_whose_word_says_nothing_is_refused() -> None:
    with pytest.raises(PrecisionError, match=r"Unsaid\('8-true'\) names none of 32-true"):
        Trainer("cpu", Unsaid())


class Replaces(Precision):
    def convert_module(self, module: nn.Module) -> nn.Module:
        return nn.Sequential(module)


class Converts(Precision):
    def convert_module(self, module: nn.Module) -> nn.Module:
        return module.to(torch.bfloat16)


class Forgets(HalfPrecision):
    def convert_module(self, module: nn.Module) -> nn.Module:
        return module


@pytest.mark.parametrize(
    ("plugin", "message"),
    [
        (Replaces(), "made another module of the policy"),
        (Converts(), "Trainable parameters stay float32"),
        (Forgets("bf16-true"), r"every trainable weight torch\.bfloat16, but net\.0\.weight is not"),
    ],
)
def test_conversion_of_the_module_is_checked(plugin: Any, message: str) -> None:
    with pytest.raises(PrecisionError, match=message):
        fit(mlp(), plugin, batches(1))


def test_name_of_a_derived_plugin_is_its_own_word() -> None:
    class Mine(MixedPrecision):
        pass

    assert fabric_precision(Mine("bf16-mixed", "cpu")).name == "bf16-mixed"
    assert fabric_precision(MixedPrecision("bf16-mixed", "cpu")).name == "bf16"


def test_lightning_fabric_is_imported_only_when_a_plugin_is_named() -> None:
    script = (
        "import sys, torch, policyfit\n"
        "from policyfit.strategies import MachineFacts\n"
        "from policyfit.trainer.resolve import resolve_precision\n"
        "policyfit.Trainer('cpu', 'bf16')\n"
        "assert 'lightning_fabric' not in sys.modules\n"
        "print(resolve_precision('bf16-true', torch.device('cpu'), MachineFacts()).value.name)\n"
        "assert 'lightning_fabric' in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "bf16-true\n"), done.stderr


def test_sgd_of_a_plugin_s_own_gradients_steps_unfused_with_one_read() -> None:
    trainer = Trainer("cpu", HalfPrecision("bf16-true"), max_steps=2, default_callbacks=False)
    trainer.fit(mlp(), InMemory(batches(2)), optimizer=lambda p: SGD(p, lr=0.1))
    assert "not fused: one waiting read" in trainer.plan.chosen("optimizer")
