"""What the audit sees, that it changes nothing, and the runs that it stops."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning_fabric.plugins import DoublePrecision, HalfPrecision, MixedPrecision
from torch import Tensor, nn
from torch.nn.functional import bilinear, layer_norm, linear, mse_loss, scaled_dot_product_attention
from torch.nn.modules import module as torch_module
from torch.utils.checkpoint import checkpoint
from toys import MLP, Batch, InMemory, assert_equal, batches, mlp, weights

from policyfit import FP16, Callback, ConfigError, OverflowReport, PrecisionAudit, PrecisionError, Trainer
from policyfit.callbacks.audit_report import print_report
from policyfit.trainer.cli import main

Matmuls = dict[tuple[str, str, str], tuple[str, int, int]]


def of(name: str) -> Any:
    return FP16({"init_scale": 1024.0}, allow_cpu=True) if name == "fp16" else name


def fit(policy: nn.Module, *callbacks: Callback, precision: Any = "bf16", **settings: Any) -> Trainer:
    data = InMemory(settings.pop("data", batches(8)))
    settings = {"max_steps": 4, "default_callbacks": False, **settings}
    trainer = Trainer("cpu", of(precision), callbacks=callbacks, **settings)
    trainer.fit(policy, data)
    return trainer


def audited(policy: nn.Module, precision: Any = "bf16", **settings: Any) -> dict[str, Any]:
    """The JSON of a run's audit."""
    torch.manual_seed(0)
    trainer = fit(policy, PrecisionAudit(), precision=precision, **settings)
    found: dict[str, Any] = json.loads((trainer.run_dir / "precision_audit.json").read_text())
    return found


def rows(found: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [row for row in found["rows"] if row["kind"] == kind]


def matmuls(found: dict[str, Any]) -> Matmuls:
    return {(r["module"], r["phase"], r["op"]): (r["dtype"], r["times"], r["amount"]) for r in rows(found, "matmul")}


def events(trainer: Trainer, kind: str) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in (trainer.run_dir / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if record.get("event") == kind]


@pytest.fixture(autouse=True)
def no_mode_and_no_hook_is_left() -> Iterator[None]:
    yield
    assert torch._C._len_torch_dispatch_stack() == 0
    assert torch.backends.mha.get_fastpath_enabled()
    assert not torch_module._global_forward_pre_hooks
    assert not torch_module._global_forward_hooks
    assert not torch_module._global_forward_hooks_always_called


# What it counts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", "bfloat16"), ("fp16", "float16"), ("no", "float32")])
def test_linear_layers_count_two_flops_a_multiply_add_in_the_dtype_of_the_precision(precision: str, dtype: str) -> None:
    found = audited(mlp(), precision)
    first, last = 2 * 8 * 6 * 16, 2 * 8 * 16 * 3
    assert matmuls(found) == {
        ("net.0", "forward", "addmm"): (dtype, 1, first),
        ("net.3", "forward", "addmm"): (dtype, 1, last),
        ("net.3", "backward", "mm"): (dtype, 2, 2 * last),
        ("net.0", "backward", "mm"): (dtype, 1, first),  # the batch needs no gradient
    }
    assert (found["shares"], found["findings"]) == ({dtype: 1.0}, [])
    assert (found["step"], found["device"], found["compute_dtype"]) == (1, "cpu", dtype)


@pytest.mark.parametrize(
    ("plugin", "dtype"),
    [
        (MixedPrecision("bf16-mixed", "cpu"), "bfloat16"),
        (HalfPrecision("bf16-true"), "bfloat16"),
        (DoublePrecision(), "float64"),
    ],
)
def test_the_precisions_of_fabric_are_judged_by_what_they_compute_in(plugin: Any, dtype: str) -> None:
    found = audited(mlp(), plugin)
    assert (found["compute_dtype"], found["shares"], found["findings"]) == (dtype, {dtype: 1.0}, [])


def test_casts_count_with_the_bytes_they_write_and_views_do_not_count() -> None:
    found = audited(mlp())
    casts = {(r["phase"], r["module"], r["source"], r["dtype"]): (r["times"], r["amount"]) for r in rows(found, "cast")}
    assert casts["forward", "net.0", "float32", "bfloat16"] == (3, 2 * (8 * 6 + 6 * 16 + 16))
    assert casts["backward", "net.3", "bfloat16", "float32"] == (2, 4 * (16 * 3 + 3))
    frozen = audited(Leaks(lambda x: x + float(inference(lambda: torch.ones(2).bfloat16()).float()[0])))
    assert [r["amount"] for r in rows(frozen, "cast") if r["module"] == "leak"] == [2 * 2, 4 * 2]
    others = [r["op"] for r in rows(found, "other") if r["dtype"] == "bfloat16"]
    assert sorted(others) == ["gelu", "gelu_backward", "sum", "sum"]  # the sums are gradients of the biases


class Eighths(MLP):
    def forward(self, batch: Batch) -> Tensor:
        one, x = torch.ones(()), torch.ones(16, 16).to(torch.float8_e4m3fn)
        return super().forward(batch) * torch._scaled_mm(x, x.t(), one, one, out_dtype=torch.bfloat16).mean()


def test_the_dtype_of_a_matmul_is_that_of_its_operands() -> None:
    assert matmuls(audited(Eighths()))["(policy)", "forward", "_scaled_mm"] == ("float8_e4m3fn", 1, 2 * 16**3)


class Attend(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = x.view(8, 2, 2, 6)
        return scaled_dot_product_attention(x, x, x).flatten(1, 2)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(2, 4, 3, padding=1), nn.BatchNorm1d(4)
        self.attend, self.head = Attend(), nn.Linear(24, 3)

    def forward(self, batch: Batch) -> Tensor:
        hidden = self.norm(self.conv(torch.stack([batch.x, batch.x + 1], dim=1)))
        return mse_loss(self.head(self.attend(hidden).flatten(1)), batch.y)


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", "bfloat16"), ("fp16", "float16")])
def test_convolution_and_attention_count_with_the_formulas_by_hand(precision: str, dtype: str) -> None:
    found = matmuls(audited(Block(), precision))
    convolution = 2 * 8 * 4 * 2 * 3 * 6  # batch, channels out and in, kernel, length
    product = 2 * (8 * 2) * 2 * 2 * 6  # batch and heads, queries, keys, width
    assert found["conv", "forward", "convolution"] == (dtype, 1, convolution)
    assert found["conv", "backward", "convolution_backward"] == (dtype, 1, convolution)  # of its weight alone
    attention = {phase: v for (module, phase, _), v in found.items() if module == "attend"}
    assert attention["forward"] == (dtype, 1, 2 * product)
    assert attention["backward"] == (dtype, 1, 5 * product)  # the scores again, and four gradients
    assert found["head", "forward", "addmm"] == (dtype, 1, 2 * 8 * 24 * 3)


class Applies(nn.Module):
    def __init__(self, how: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        return self.how(x)


class Leaks(MLP):
    """Uses a layer's output, (8, 16), once more in ``leak``."""

    def __init__(self, how: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.leak = Applies(how)

    def forward(self, batch: Batch) -> Tensor:
        return mse_loss(self.net(batch.x) + self.leak(self.net[0](batch.x))[:, :3].float(), batch.y)


def inference(compute: Callable[[], Tensor]) -> Tensor:
    with torch.inference_mode():
        return compute()


@pytest.mark.parametrize(
    ("how", "flops"),
    [
        (lambda x: x + float(inference(lambda: linear(torch.ones(3, 7), torch.ones(5, 7))).mean()), 2 * 3 * 7 * 5),
        (lambda x: x + torch.ones(5, 7).mv(torch.ones(7)).sum(), 2 * 5 * 7),
        (lambda x: x + torch.addbmm(torch.ones(5, 3), torch.ones(4, 5, 7), torch.ones(4, 7, 3)).sum(), 8 * 5 * 7 * 3),
    ],
    ids=["linear", "mv", "addbmm"],
)
def test_matmuls_that_torch_has_no_formula_for_are_counted(how: Callable[[Tensor], Tensor], flops: int) -> None:
    found = matmuls(audited(Leaks(how), "no"))
    assert sum(amount for (module, _, _), (_, _, amount) in found.items() if module == "leak") == flops


class Frozen(MLP):
    """A frozen part in a context without gradients, whose operands are of all kinds."""

    def __init__(self, context: Any) -> None:
        super().__init__()
        self.context = context
        self.frozen = nn.ModuleDict(
            {"conv": nn.Conv2d(1, 4, 3, padding=1), "line": nn.Conv1d(1, 2, 3), "bilinear": nn.Bilinear(6, 6, 2),
             "linear": nn.Linear(6, 6), "attention": nn.MultiheadAttention(6, 2, batch_first=True)}
        ).requires_grad_(False)  # fmt: skip

    def forward(self, batch: Batch) -> Tensor:
        x, parts = batch.x, self.frozen
        with self.context():
            image = x[:, None, :, None] * x[:, None, None, :]
            seen = parts["conv"](image).mean() + parts["line"](x[:, None]).mean() + parts["bilinear"](x, x).mean()
            seen = seen + (x @ x.T).mean() + torch.einsum("bi,ci->bc", x, x).mean() + torch.outer(x[0], x[1]).mean()
            seen = seen + parts["attention"](x[None], x[None], x[None])[0].mean() + parts["linear"](x).mean()
            seen = seen + scaled_dot_product_attention(image, image, image).mean() + torch.matmul(image, image).mean()
        return mse_loss(self.net(x + seen.clone()), batch.y)


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_what_runs_in_inference_mode_counts_as_what_runs_without_gradients(precision: str) -> None:
    def counted(context: Any) -> dict[tuple[str, str], tuple[int, int]]:
        total: dict[tuple[str, str], tuple[int, int]] = {}
        for (module, _, _), (dtype, times, amount) in matmuls(audited(Frozen(context), precision)).items():
            before = total.get((module, dtype), (0, 0))
            total[module, dtype] = (before[0] + times, before[1] + amount)
        return total

    expected = counted(torch.no_grad)
    assert counted(torch.inference_mode) == expected
    assert expected["frozen.conv", "float32" if precision == "no" else "bfloat16"] == (1, 2 * 8 * 4 * 9 * 36)
    assert {module for module, _ in expected} >= {f"frozen.{name}" for name in ("conv", "line", "bilinear", "linear")}


class Differentiates(MLP):
    def forward(self, batch: Batch) -> Tensor:
        x, change = torch.func.jvp(self.net[0], (batch.x,), (torch.ones_like(batch.x),))  # type: ignore[misc]
        return mse_loss(self.net[1:](x + change), batch.y)


class Ragged(MLP):
    def forward(self, batch: Batch) -> Tensor:
        ragged = torch.nested.nested_tensor_from_jagged(batch.x, torch.tensor([0, 3, 8]))
        return mse_loss(self.net[1:](self.net[0](ragged).values()), batch.y)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # of torch's own decompositions for jvp
@pytest.mark.parametrize("make", [Differentiates, Ragged])
def test_ops_are_counted_where_they_run_and_not_where_only_shapes_are_worked_out(make: Any) -> None:
    assert {row["device"] for row in audited(make(), "no")["rows"]} == {"cpu"}


def test_a_matmul_of_a_ragged_tensor_counts_as_that_of_its_values() -> None:
    found = matmuls(audited(Ragged()))
    counted = [row for (module, phase, _), row in found.items() if (module, phase) == ("net.0", "forward")]
    assert counted == [("bfloat16", 1, 2 * 8 * 6 * 16)]


class Grows(MLP):
    """Makes a layer in its first forward."""

    def forward(self, batch: Batch) -> Tensor:
        if not hasattr(self, "made"):
            self.made = nn.Linear(6, 6)
        return super().forward(batch._replace(x=self.made(batch.x)))


def test_a_module_that_is_made_in_the_first_forward_is_one_of_the_policy() -> None:
    policy = Grows()
    found = audited(policy)
    assert matmuls(found)["made", "forward", "addmm"] == ("bfloat16", 1, 2 * 8 * 6 * 6)
    assert found["findings"] == []


class InLightningsDialect(nn.Module):
    log: Callable[..., None]

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(6, 3), nn.Parameter(torch.eye(3))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.log("micro_batch", float(batch_idx))
        return mse_loss(self.layer(batch.x) @ self.scale, batch.y)


def test_a_training_step_has_its_matmuls_and_its_log_counted_once() -> None:
    trainer = fit(InLightningsDialect(), audit := PrecisionAudit(at_step=4), max_steps=4)
    assert audit.report is not None
    found = matmuls(audit.report.to_dict())
    assert found["(policy)", "forward", "mm"] == ("bfloat16", 1, 2 * 8 * 3 * 3)
    assert found["layer", "backward", "mm"] == ("bfloat16", 1, 2 * 8 * 6 * 3)
    assert trainer.metrics["micro_batch"] == (0 + 1 + 2 + 3) / 4


# What it finds ------------------------------------------------------------------------------------------------------


class Off(nn.Module):
    """Computes in float32, whatever is around it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Any) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            result: Tensor = self.inner(x.float() if isinstance(x, Tensor) else x)
        return result


class Half(MLP):
    """Its last layer is not in the precision."""

    def __init__(self) -> None:
        super().__init__()
        self.net[3] = Off(self.net[3])


def test_a_module_with_autocast_off_is_found_in_event_and_print(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = fit(Half(), PrecisionAudit(), default_callbacks=True)
    last = 3 * 2 * 8 * 16 * 3
    share = last / (last + 2 * 2 * 8 * 6 * 16)
    [event] = events(trainer, "precision_audit")
    assert event["audited_step"] == 1
    assert event["shares"] == pytest.approx({"bfloat16": 1 - share, "float32": share})
    assert event["findings"] == [
        "in float32, not in bfloat16: 42.9% of the FLOPs of matmuls, in net.3.inner",
        "never in bfloat16: all matmuls of net.3.inner",
    ]
    message = "audited step 1: FLOPs of matmuls: 57.1% in bfloat16, 42.9% in float32; findings: 2"
    assert event["message"] == message
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "precision audit of step 1: precision bf16, on cpu" in lines
    assert "float32 cpu matmul 3 2,304" in lines
    assert "bfloat16 cpu matmul 2 3,072" in lines
    assert f"- {event['findings'][1]}" in lines


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", "bfloat16"), ("fp16", "float16")])
def test_a_run_without_a_matmul_in_its_precision_ends_before_the_weights_move(precision: str, dtype: str) -> None:
    policy = Off(mlp())
    before = weights(policy)
    with pytest.raises(PrecisionError) as caught:
        fit(policy, PrecisionAudit(), precision=precision, run_dir="run")
    assert str(caught.value) == (
        f"precision='{precision}' was requested, but no matmul or convolution of step 1 computed in {dtype}: "
        "float32 ran in inner.net.0, inner.net.3.\nLook there for torch.autocast(..., enabled=False) or one of another "
        "dtype, and remove it; or use precision='no'."
    )
    assert caught.value.exit_code == 2
    assert_equal(weights(policy), before)
    assert json.loads(Path("run/precision_audit.json").read_text())["shares"] == {"float32": 1.0}
    assert audited(Off(mlp()), "no")["findings"] == []  # the remedy


class Decays(MLP):
    def forward(self, batch: Batch) -> Tensor:
        return next(self.parameters()).square().sum()


def test_a_run_without_any_matmul_ends_too_and_full_precision_takes_it() -> None:
    with pytest.raises(PrecisionError, match="computed in bfloat16: there was none at all"):
        fit(Decays(), PrecisionAudit())
    assert audited(Decays(), "no")["shares"] == {}


@pytest.mark.parametrize(
    ("how", "finding"),
    [
        (lambda x: x.float().bfloat16(), "cast from 16 bits to float32 and back unchanged in leak"),
        (
            lambda x: x.float().view(-1).bfloat16().view(x.shape),
            "cast from 16 bits to float32 and back unchanged in leak",
        ),
        (lambda x: (x.float() + 1).bfloat16(), None),
        (lambda x: x.detach().float().add_(1).bfloat16(), None),
        (lambda x: x + float(inference(lambda: torch.ones(2).bfloat16()).float()[0]), None),  # it has no version
        (lambda x: layer_norm(x, (16,)), None),  # autocast itself goes to float32 for it
        (lambda x: x.double().sin(), "in float64: ops in leak (_to_copy), leak (sin), "),
        (lambda x: bilinear(x, x, torch.ones(16, 16, 16).to(x)), "in no share, as no FLOPs are known: _trilinear"),
    ],
)
def test_needless_casts_float64_and_unknown_flops_are_found(how: Callable[..., Tensor], finding: str | None) -> None:
    found = audited(Leaks(how))["findings"]
    assert len(found) == (finding is not None)
    assert all(text.startswith(str(finding)) for text in found)


def test_matmuls_outside_the_policy_and_on_another_device_are_told_apart() -> None:
    teacher = nn.Linear(6, 3)

    class Student(MLP):
        def forward(self, batch: Batch) -> Tensor:
            torch.ones(2, 3, device="meta") @ torch.ones(3, 4, device="meta")  # stands for another device
            with torch.no_grad():
                aim = teacher(batch.x)
            return mse_loss(self.net(batch.x), aim)

    assert audited(Student(), "no")["findings"] == [
        "outside the policy's modules: the matmuls addmm",
        "on another device than cpu: matmuls on meta",
    ]


# It changes nothing -------------------------------------------------------------------------------------------------


class Everything(nn.Module):
    """Dropout, running statistics, recomputation, draws from every stream, and an encoder that torch fuses."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.net = Block(), mlp(dropout=0.4).net
        self.frozen = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True).requires_grad_(False)
        self.calls = 0

    def forward(self, batch: Batch) -> Tensor:
        self.calls += 1
        self.frozen.eval()
        with torch.no_grad():
            x = self.frozen(batch.x[:, None])[:, 0]
        noise = torch.randn_like(batch.x) * random.random() * float(np.random.rand()) * self.calls
        batch.x.mul_(1.5)  # a batch that is changed in place
        block: Tensor = self.block(batch._replace(x=x))
        return block + mse_loss(checkpoint(self.net, x + noise, use_reentrant=False), batch.y)


class Sees(Callback):
    """Losses, gradients and random streams after each backward."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_before_backward(self, trainer: Trainer, policy: nn.Module, loss: Tensor) -> None:
        self.seen.append(float(loss.detach()))

    def on_after_backward(self, trainer: Trainer, policy: nn.Module) -> None:
        self.seen += [p.grad.tolist() for p in policy.parameters() if p.grad is not None]
        self.seen += [torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())]


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_an_audited_run_is_bit_for_bit_the_run_without(precision: str) -> None:
    found = []
    for audits in ([], [PrecisionAudit(at_step=2)], [OverflowReport(replay=True), PrecisionAudit()]):
        torch.manual_seed(0)
        policy, sees = Everything(), Sees()
        trainer = fit(policy, sees, *audits, precision=precision, seed=5, accumulate=2)
        state = trainer.optimizers[0].state_dict()["state"]
        moments = {f"{i}.{name}": value for i, entry in state.items() for name, value in entry.items()}
        found.append((weights(policy), moments, sees.seen))
    for other in found[1:]:
        assert_equal(found[0][0], other[0])
        assert_equal(found[0][1], other[1])
        assert found[0][2] == other[2]
    assert len(found[0][2]) > 100


def test_printing_leaves_pythons_random_stream_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    fit(mlp(), audit := PrecisionAudit())
    assert audit.report is not None
    for name in [name for name in sys.modules if name.partition(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, name)  # it draws from the stream while it is imported
    before = random.getstate()
    print_report(audit.report)
    assert random.getstate() == before


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("at_step", [1, 3])
def test_a_compiled_policy_is_seen_to_its_modules_and_stays_compiled(at_step: int) -> None:
    found = []
    for audits in ([], [PrecisionAudit(at_step=at_step)]):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        torch.manual_seed(0)
        policy, sees = mlp(dropout=0.3), Sees()
        policy.compile(backend="aot_eager")
        fit(policy, sees, *audits, seed=1)
        found.append((weights(policy), sees.seen, torch._dynamo.utils.counters["stats"]["unique_graphs"]))
    assert_equal(found[0][0], found[1][0])
    assert found[0][1:] == found[1][1:]
    assert found[0][2] == 1
    [audit] = audits
    assert audit.report is not None
    assert matmuls(audit.report.to_dict())["net.3", "backward", "mm"] == ("bfloat16", 2, 2 * 2 * 8 * 16 * 3)


def test_a_fused_encoder_is_seen_in_its_precision() -> None:
    found = matmuls(audited(Everything()))
    assert found["frozen.linear1", "forward", "addmm"] == ("bfloat16", 1, 2 * 8 * 6 * 8)


class Fails(MLP):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def forward(self, batch: Batch) -> Tensor:
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            self.net(batch.y)  # caught by the policy
        loss = super().forward(batch)
        if self.where == "backward":
            loss.register_hook(self._fail)  # type: ignore[no-untyped-call]
        return self._fail(loss) if self.where == "forward" else loss

    def _fail(self, value: Tensor) -> Tensor:
        raise RuntimeError("the camera is gone")


class FailsOnce(MLP):
    """Fails in the rehearsal alone."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[int] = []

    def forward(self, batch: Batch) -> Tensor:
        self.calls.append(1)
        if len(self.calls) == 1:
            raise RuntimeError("the camera is gone")
        return super().forward(batch)


def test_a_rehearsal_that_fails_is_told_and_the_run_goes_on() -> None:
    torch.manual_seed(0)
    audited_policy = FailsOnce()
    trainer = fit(audited_policy, PrecisionAudit(), default_callbacks=True)
    [event] = events(trainer, "warning")
    assert event["message"] == "step 1 could not be audited: RuntimeError: the camera is gone"
    assert not (trainer.run_dir / "precision_audit.json").exists()
    plain = mlp()
    fit(plain)
    assert_equal(weights(audited_policy), weights(plain))


def test_errors_in_the_rehearsal_leave_nothing_behind_and_mix_up_no_modules() -> None:
    for where in ("forward", "backward"):
        with pytest.raises(RuntimeError, match="the camera is gone"):
            fit(Fails(where), PrecisionAudit())  # the fixture above looks for what is left
    assert {module for module, _, _ in matmuls(audited(Fails("")))} == {"net.0", "net.3"}


# When it looks ------------------------------------------------------------------------------------------------------

WATCHED: list[int] = []


class Counting(MLP):
    """Says which of its micro-batches somebody looked at; some give no loss."""

    def __init__(self, without_loss: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.calls, self.without_loss = 0, without_loss

    def forward(self, batch: Batch) -> Tensor:
        self.calls += 1
        if torch._C._len_torch_dispatch_stack():
            WATCHED.append(self.calls)
        return torch.zeros(()) if self.calls in self.without_loss else super().forward(batch)


@pytest.mark.parametrize(
    ("at_step", "accumulate", "poisoned", "without_loss", "watched"),
    [
        (1, 1, (), (), [1]),
        (3, 1, (), (), [3]),
        (3, 2, (), (), [5]),
        (3, 1, (1, 2), (), [5]),  # skipped updates are no steps
        (2, 2, (), (3,), [3, 4]),  # left for the next
        (2, 2, (), (3, 4), [3, 4, 5]),
    ],
)
def test_the_first_micro_batch_of_the_step_is_audited_and_no_other(
    at_step: int, accumulate: int, poisoned: tuple[int, ...], without_loss: tuple[int, ...], watched: list[int]
) -> None:
    WATCHED.clear()
    audit = PrecisionAudit(at_step)
    fit(Counting(without_loss), audit, accumulate=accumulate, data=batches(8, poisoned=poisoned), max_steps=6)
    assert watched == WATCHED
    assert audit.report is not None
    assert audit.report.step == at_step


def test_a_resumed_run_audits_its_first_step_at_or_after_the_one_named() -> None:
    fit(mlp(), run_dir="run", default_callbacks=True)
    for at_step, audited_step in ((1, 5), (5, 5), (7, 7)):
        audit = PrecisionAudit(at_step=at_step)
        trainer = Trainer("cpu", "bf16", max_steps=8, callbacks=[audit], run_dir="run", default_callbacks=False)
        trainer.fit(mlp(), InMemory(batches(8)), resume="last")
        assert audit.report is not None
        assert audit.report.step == audited_step


def test_a_run_that_never_reaches_the_step_says_so() -> None:
    trainer = fit(mlp(), PrecisionAudit(at_step=9), default_callbacks=True)
    expected = "no step was audited: the run ended at step 4, and at_step is 9"
    assert [event["message"] for event in events(trainer, "warning")] == [expected]
    assert not (trainer.run_dir / "precision_audit.json").exists()


@pytest.mark.parametrize("at_step", [0, 1.5, True, "2"])
def test_a_step_that_cannot_be_meant_is_refused(at_step: Any) -> None:
    with pytest.raises(ConfigError, match=r"PrecisionAudit\.at_step must be a whole number of at least 1, got"):
        PrecisionAudit(at_step=at_step)


# From the command line ----------------------------------------------------------------------------------------------

PARTS = """
import torch
from torch import nn

class Policy(nn.Module):
    def __init__(self, autocast: bool = True) -> None:
        super().__init__()
        self.autocast, self.layer = autocast, nn.Linear(1, 1)

    def forward(self, batch):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.autocast and torch.is_autocast_enabled("cpu")):
            return (self.layer(batch[0]).float() - 1).square().mean()

def data() -> torch.utils.data.TensorDataset:
    return torch.utils.data.TensorDataset(torch.arange(16.0)[:, None] / 16)
"""

RUN = """\
policy: {class_path: audit_parts.Policy}
data: {train: audit_parts.data}
trainer: {device: cpu, precision: bf16, max_steps: 3, run_dir: done, callbacks: [CALLBACKS]}
"""


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    def run(callbacks: str, *arguments: str) -> int:
        Path("audit_parts.py").write_text(PARTS)
        Path("run.yaml").write_text(RUN.replace("CALLBACKS", callbacks))
        monkeypatch.delitem(sys.modules, "audit_parts", raising=False)
        return main(["fit", "run.yaml", *arguments])

    return run


def test_the_command_line_adds_it_beside_the_callbacks_of_the_file_once(cli: Callable[..., int]) -> None:
    assert cli("{class_path: policyfit.Checkpoint, init_args: {every_steps: 2}}", "--audit") == 0
    assert json.loads(Path("done/precision_audit.json").read_text())["step"] == 1
    assert [p.name for p in sorted(Path("done/checkpoints").iterdir()) if not p.is_symlink()] == ["000002", "000003"]
    audit = "{class_path: policyfit.PrecisionAudit, init_args: {at_step: 2}}"
    assert cli(audit, "--audit", "--trainer.run_dir=again") == 0
    assert json.loads(Path("again/precision_audit.json").read_text())["step"] == 2
    assert cli("PrecisionAudit", "--audit", "--trainer.run_dir=by_its_name") == 0


def test_the_command_line_ends_with_exit_code_2_where_the_precision_never_ran(
    cli: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli("", "--audit", "--policy.autocast=false") == 2
    assert "computed in bfloat16: float32 ran in layer" in capsys.readouterr().err
