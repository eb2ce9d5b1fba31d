"""What the audit sees, that it changes nothing, and the runs that it stops."""

from __future__ import annotations

import io
import json
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn.functional import layer_norm, mse_loss, scaled_dot_product_attention
from torch.nn.modules import module as torch_module
from torch.utils.checkpoint import checkpoint
from toys import MLP, Batch, InMemory, assert_equal, batches, mlp, weights

from policyfit import FP16, Callback, ConfigError, PrecisionAudit, PrecisionError, Trainer
from policyfit.callbacks import audit_recorder, precision_audit
from policyfit.callbacks.audit_flops import flops, is_matmul
from policyfit.callbacks.audit_recorder import Recorder
from policyfit.callbacks.audit_table import print_report
from policyfit.trainer.cli import main

aten = torch.ops.aten


def of(name: str) -> Any:
    return FP16({"init_scale": 1024.0}, allow_cpu=True) if name == "fp16" else name


def fit(policy: nn.Module, audit: PrecisionAudit | None = None, precision: str = "bf16", **settings: Any) -> Trainer:
    callbacks = [*settings.pop("callbacks", []), *([] if audit is None else [audit])]
    data = InMemory(settings.pop("data", batches(8)))
    settings = {"max_steps": 4, "default_callbacks": False, "callbacks": callbacks, **settings}
    trainer = Trainer("cpu", of(precision), **settings)
    trainer.fit(policy, data)
    return trainer


def audited(policy: nn.Module, precision: str = "bf16", **settings: Any) -> dict[str, Any]:
    """The JSON of a run's audit."""
    trainer = fit(policy, PrecisionAudit(), precision, **settings)
    found: dict[str, Any] = json.loads((trainer.run_dir / "precision_audit.json").read_text())
    return found


def matmuls(found: dict[str, Any], name: str = "matmuls") -> dict[tuple[str, str, str], tuple[str, int, int]]:
    return {(m["module"], m["phase"], m["op"]): (m["dtype"], m["ops"], m["flops"]) for m in found[name]}


def nothing_is_left() -> None:
    assert torch._C._len_torch_dispatch_stack() == 0
    assert not torch_module._global_forward_pre_hooks
    assert not torch_module._global_forward_hooks
    assert not torch_module._global_forward_hooks_always_called


@pytest.fixture(autouse=True)
def no_mode_and_no_hook_is_left() -> Iterator[None]:
    yield
    nothing_is_left()


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
    assert found["shares"] == {dtype: 1.0}
    assert found["findings"] == []
    assert (found["step"], found["device"], found["compute_dtype"], found["compiled"]) == (1, "cpu", dtype, False)


def test_the_casts_of_autocast_are_counted_with_the_bytes_they_write() -> None:
    casts = {(c["from"], c["to"]): (c["casts"], c["bytes"]) for c in audited(mlp())["casts"]}
    parameters, prediction = 6 * 16 + 16 + 16 * 3 + 3, 8 * 3
    assert casts == {
        ("float32", "bfloat16"): (6, 2 * (8 * 6 + parameters + prediction)),  # batch, parameters, gradient of the loss
        ("bfloat16", "float32"): (5, 4 * (prediction + parameters)),  # prediction, gradients of the parameters
    }


def test_ops_count_by_the_dtype_they_compute_in_without_views_and_casts() -> None:
    ops = {(o["device"], o["dtype"]): o["ops"] for o in audited(mlp(dropout=0.0))["ops"]}
    # addmm, gelu, addmm forward; three mm, gelu, two sums for the biases backward; dropout=0 makes no op
    assert ops["cpu", "bfloat16"] == 9
    assert set(ops) == {("cpu", "bfloat16"), ("cpu", "float32")}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(2, 4, 3, padding=1), nn.BatchNorm1d(4)
        self.attend, self.head = Attend(), nn.Linear(24, 3)

    def forward(self, batch: Batch) -> Tensor:
        hidden = self.norm(self.conv(torch.stack([batch.x, batch.x + 1], dim=1)))
        return mse_loss(self.head(self.attend(hidden).flatten(1)), batch.y)


class Attend(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = x.view(8, 2, 2, 6)
        return scaled_dot_product_attention(x, x, x).flatten(1, 2)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_convolution_and_attention_count_with_the_formulas_by_hand(precision: str) -> None:
    torch.manual_seed(0)
    found = matmuls(audited(Block(), precision))
    dtype = {"bf16": "bfloat16", "fp16": "float16"}[precision]
    convolution = 2 * 8 * 4 * 2 * 3 * 6  # batch, channels out and in, kernel, length
    product = 2 * (8 * 2) * 2 * 2 * 6  # batch and heads, queries, keys, width
    assert found["conv", "forward", "convolution"] == (dtype, 1, convolution)
    assert found["conv", "backward", "convolution_backward"] == (dtype, 1, convolution)  # of its weight alone
    [forward] = [v for (module, phase, _), v in found.items() if (module, phase) == ("attend", "forward")]
    [backward] = [v for (module, phase, _), v in found.items() if (module, phase) == ("attend", "backward")]
    assert forward == (dtype, 1, 2 * product)
    assert backward == (dtype, 1, 5 * product)  # the scores again, and four gradients
    assert found["head", "forward", "addmm"] == (dtype, 1, 2 * 8 * 24 * 3)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(6, 4), nn.Linear(4, 3)

    def forward(self, batch: Batch) -> Tensor:
        return mse_loss(self.head(self.rnn(batch.x[None])[0][0]), batch.y)


def test_an_op_without_a_formula_counts_as_a_matmul_and_is_named() -> None:
    found = audited(Recurrent())
    assert {m["dtype"] for m in found["matmuls"] if m["module"] == "rnn"} == {"bfloat16"}
    if found["without_formula"]:  # torch runs the layer as one op where it has oneDNN
        assert any("no FLOPs are known for mkldnn_rnn_layer" in text for text in found["findings"])


@pytest.mark.parametrize(
    ("op", "arguments", "expected"),
    [
        (aten.mv, [(5, 7), (7,)], 2 * 5 * 7),
        (aten.addmv, [(5,), (5, 7), (7,)], 2 * 5 * 7),
        (aten.dot, [(7,), (7,)], 2 * 7),
        (aten.vdot, [(7,), (7,)], 2 * 7),
        (aten.linear, [(2, 3, 7), (5, 7), (5,)], 2 * 6 * 7 * 5),
        (aten.linear_backward, [(2, 3, 7), (2, 3, 5), (5, 7), [True, True, True]], 2 * 2 * 6 * 7 * 5),
        (aten.linear_backward, [(2, 3, 7), (2, 3, 5), (5, 7), [False, True, True]], 2 * 6 * 7 * 5),
        (aten.addbmm, [(5, 3), (4, 5, 7), (4, 7, 3)], 2 * 4 * 5 * 7 * 3),
        (aten._addmm_activation, [(3,), (5, 7), (7, 3)], 2 * 5 * 7 * 3),
        (aten._trilinear, [(2,), (2,), (2,)], None),
        (aten.mm, [(2, 3), (4, 5)], None),  # the formula refuses
    ],
)
def test_ops_that_torch_does_not_price_cost_what_their_matmuls_cost(
    op: Any, arguments: list[Any], expected: int | None
) -> None:
    tensors = [torch.zeros(a) if isinstance(a, tuple) else a for a in arguments]
    assert is_matmul(op)
    assert flops(op, tensors, {}, torch.zeros(())) == expected


@pytest.mark.parametrize("op", [aten.add, aten.gelu, aten._softmax, aten.native_layer_norm])
def test_other_ops_are_no_matmuls(op: Any) -> None:
    assert not is_matmul(op)


class Checkpointed(MLP):
    def forward(self, batch: Batch) -> Tensor:
        return mse_loss(checkpoint(self.net, batch.x, use_reentrant=False), batch.y)


def test_activation_checkpointing_is_seen_twice_in_the_right_modules() -> None:
    found = matmuls(audited(Checkpointed()))
    assert found["net.0", "forward", "addmm"] == found["net.0", "backward", "addmm"]
    assert found["net.3", "backward", "mm"] == ("bfloat16", 2, 2 * 2 * 8 * 16 * 3)
    assert {module for module, _, _ in found} == {"net.0", "net.3"}


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


def test_a_module_with_autocast_off_is_listed_as_never_in_the_precision() -> None:
    found = audited(Half())
    last = 2 * 8 * 16 * 3
    assert found["never_in_precision"] == [{"module": "net.3.inner", "dtypes": ["float32"]}]
    assert list(matmuls(found, "other_precision").items()) == [
        (("net.3.inner", "backward", "mm"), ("float32", 2, 2 * last)),
        (("net.3.inner", "forward", "addmm"), ("float32", 1, last)),
    ]
    share = 3 * last / (3 * last + 2 * 2 * 8 * 6 * 16)
    assert found["shares"] == pytest.approx({"float32": share, "bfloat16": 1 - share})
    assert found["findings"] == [
        f"in float32, not in bfloat16: 3 of 5 matmuls and convolutions ({share:.1%} of their FLOPs), in net.3.inner",
        "never in bfloat16: all matmuls and convolutions of net.3.inner",
    ]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_run_without_a_matmul_in_its_precision_ends_before_the_weights_move(precision: str) -> None:
    policy = Off(mlp())
    before = weights(policy)
    trainer = Trainer("cpu", of(precision), max_steps=3, callbacks=[PrecisionAudit()], run_dir="run")
    with pytest.raises(PrecisionError) as caught:
        trainer.fit(policy, InMemory(batches(3)))
    name = {"bf16": "bfloat16", "fp16": "float16"}[precision]
    assert str(caught.value) == (
        f"precision='{precision}' was requested, but of the audited step no matmul or convolution computed in {name}: "
        "5 ran in float32, in inner.net.0, inner.net.3.\n"
        "Look there for torch.autocast(..., enabled=False) or an autocast of another dtype, and remove it; or use "
        "precision='no'."
    )
    assert caught.value.exit_code == 2
    assert_equal(weights(policy), before)
    assert json.loads(Path("run/precision_audit.json").read_text())["shares"] == {"float32": 1.0}
    assert audited(Off(mlp()), "no")["findings"] == []  # the remedy


class Scales(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(3))

    def forward(self, batch: Batch) -> Tensor:
        return mse_loss(self.factor * batch.x[:, :3], batch.y)


def test_a_run_without_any_matmul_ends_too_and_full_precision_takes_it() -> None:
    with pytest.raises(PrecisionError, match="no matmul or convolution was seen, so nothing computes in bfloat16"):
        fit(Scales(), PrecisionAudit())
    assert audited(Scales(), "no")["shares"] == {}


class OwnAutocast(MLP):
    def forward(self, batch: Batch) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = self.net[0](batch.x)
        return mse_loss(self.net[3](hidden.float()), batch.y)


def test_a_policy_in_16_bits_under_full_precision_is_reported_and_goes_on() -> None:
    found = audited(OwnAutocast(), "no")
    assert set(found["shares"]) == {"float32", "bfloat16"}
    assert found["never_in_precision"] == [{"module": "net.0", "dtypes": ["bfloat16"]}]


class Leaks(MLP):
    def __init__(self, how: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.leak = Applies(how)

    def forward(self, batch: Batch) -> Tensor:
        return mse_loss(self.net(batch.x) + self.leak(self.net[0](batch.x))[:, :3].float(), batch.y)


class Applies(nn.Module):
    def __init__(self, how: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        return self.how(x)


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_float64_is_found_with_op_and_module(precision: str) -> None:
    found = audited(Leaks(lambda x: x.double().sin()), precision)
    assert {(f["module"], f["op"]) for f in found["float64"]} == {
        ("leak", "_to_copy"), ("leak", "sin"), ("leak", "cos"), ("leak", "mul"), ("(policy)", "_to_copy"),
        ("(policy)", "slice_backward"),
    }  # fmt: skip
    assert [text for text in found["findings"] if text.startswith("in float64: 6 ops, in leak (_to_copy)")]


@pytest.mark.parametrize(
    ("how", "times"),
    [
        (lambda x: x.float().bfloat16(), 1),
        (lambda x: x.float().view(-1).bfloat16().view(x.shape), 1),
        (lambda x: (x.float() + 1).bfloat16(), 0),
        (lambda x: x.detach().float().add_(1).bfloat16(), 0),
        (lambda x: layer_norm(x, (16,)), 0),  # autocast itself goes to float32 for it
    ],
)
def test_casts_to_float32_and_back_are_found_only_where_nothing_used_them(
    how: Callable[[Tensor], Tensor], times: int
) -> None:
    found = audited(Leaks(how))
    assert [(f["module"], f["dtype"], f["casts"], f["bytes"]) for f in found["there_and_back"]] == [
        ("leak", "bfloat16", 1, (2 + 4) * 8 * 16)
    ] * times
    assert any("cast from 16 bits" in text for text in found["findings"]) == bool(times)


def test_matmuls_in_modules_that_are_not_of_the_policy_are_told_apart() -> None:
    torch.manual_seed(0)
    teacher = nn.Linear(6, 3)

    class Student(MLP):
        def forward(self, batch: Batch) -> Tensor:
            with torch.no_grad():
                aim = teacher(batch.x)
            return mse_loss(self.net(batch.x), aim)

    found = audited(Student())
    assert list(matmuls(found, "outside_policy").items()) == [
        (("(outside the policy)", "forward", "addmm"), ("bfloat16", 1, 2 * 8 * 6 * 3))
    ]
    assert found["findings"] == ["in modules that are not part of the policy: 1 of 6 matmuls and convolutions"]


class Wanders(MLP):
    """A part of it computes on another device; meta stands for one."""

    def forward(self, batch: Batch) -> Tensor:
        torch.ones(2, 3, device="meta") @ torch.ones(3, 4, device="meta")
        return super().forward(batch)


def test_matmuls_on_another_device_are_found() -> None:
    found = audited(Wanders(), "no")
    assert found["findings"] == ["matmuls and convolutions ran on meta, not on cpu alone"]
    assert {(m["device"], m["module"], m["flops"]) for m in found["matmuls"] if m["device"] != "cpu"} == {
        ("meta", "(policy)", 2 * 2 * 3 * 4)
    }


class InLightningsDialect(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(6, 3), nn.Parameter(torch.eye(3))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return mse_loss(self.layer(batch.x) @ self.scale, batch.y)


def test_a_training_step_has_its_matmuls_counted_as_the_policys_own() -> None:
    found = matmuls(audited(InLightningsDialect()))
    assert found["(policy)", "forward", "mm"] == ("bfloat16", 1, 2 * 8 * 3 * 3)
    assert found["(policy)", "backward", "mm"] == ("bfloat16", 2, 2 * 2 * 8 * 3 * 3)
    assert found["layer", "backward", "mm"] == ("bfloat16", 1, 2 * 8 * 6 * 3)


# It changes nothing -------------------------------------------------------------------------------------------------


class Everything(nn.Module):
    """Dropout, running statistics, recomputation and an encoder that torch runs faster while it has no hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.net = Block(), mlp(dropout=0.4).net
        self.frozen = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True).requires_grad_(False)

    def forward(self, batch: Batch) -> Tensor:
        self.frozen.eval()
        with torch.no_grad():
            x = self.frozen(batch.x[:, None])[:, 0]
        noise = torch.randn_like(batch.x) * random.random() * float(np.random.default_rng(3).random())
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
    for audits in ([], [PrecisionAudit(at_step=2)]):
        torch.manual_seed(0)
        policy, sees = Everything(), Sees()
        trainer = fit(policy, None, precision, callbacks=[sees, *audits], seed=5, accumulate=2)
        state = trainer.optimizers[0].state_dict()["state"]
        moments = {f"{i}.{name}": value for i, entry in state.items() for name, value in entry.items()}
        found.append((weights(policy), moments, sees.seen))
    assert_equal(found[0][0], found[1][0])
    assert_equal(found[0][1], found[1][1])
    assert found[0][2] == found[1][2]
    assert len(found[0][2]) > 100


def test_modules_that_compute_differently_with_hooks_do_not_notice_the_audit() -> None:
    torch.manual_seed(0)
    assert "_transformer_encoder_layer_fwd" in audited(Everything(), "no")["without_formula"]
    assert matmuls(audited(Everything()))["frozen", "forward", "_transformer_encoder_layer_fwd"][0] == "bfloat16"


ENCODER, ATTENTION = (
    nn.TransformerEncoderLayer(6, 2, 8, batch_first=True),
    nn.MultiheadAttention(6, 2, batch_first=True),
)


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize(
    "compute",
    [
        lambda x: ENCODER.eval()(x),
        lambda x: ATTENTION.eval()(x, x, x)[0],
        lambda x: nn.functional.bilinear(x, x + 1, torch.arange(108.0).view(3, 6, 6) / 50),
        lambda x: torch.linalg.pinv(x),
        lambda x: torch.cdist(x, x + 1),
        lambda x: x @ x.mT,
        lambda x: torch.linalg.matrix_exp(x[:, :3, :3]),
    ],
    ids=["encoder", "attention", "bilinear", "pinv", "cdist", "matmul", "matrix_exp"],
)
def test_ops_under_autocast_give_the_same_bits_while_watched(
    compute: Callable[[Tensor], Tensor], enabled: bool
) -> None:
    x = torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(2))
    recorder = Recorder(ENCODER)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
        expected = compute(x)
        recorder.open()
        found = compute(x)
        recorder.close()
        assert torch.is_autocast_enabled("cpu") == enabled
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)


def test_an_op_whose_caller_is_cast_by_autocast_itself_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(audit_recorder._CASTS_INSIDE, "aten._cdist_forward", "aten::cdist")
    x, recorder = torch.randn(40, 6), Recorder(ENCODER)  # so many rows are compared by a matmul
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = torch.cdist(x, x + 1)
        recorder.open()
        found = torch.cdist(x, x + 1)
        recorder.close()
    assert torch.equal(found, expected)


def test_printing_leaves_pythons_random_stream_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    report = PrecisionAudit()
    fit(mlp(), report)
    for name in [name for name in sys.modules if name.partition(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, name)
    random.seed(1)
    before = random.getstate()
    assert report.report is not None
    print_report(report.report)
    assert random.getstate() == before


def _held(policy: nn.Module) -> list[Any]:
    return [{name: str(value) for name, value in vars(module).items() if "hook" in name} for module in policy.modules()]


class Watches(Callback):
    """Notes at every hook whether somebody is looking at the ops."""

    def __init__(self) -> None:
        self.watched: list[str] = []
        for name in ("on_update_end", "on_before_optimizer_step", "on_due", "on_validation_start", "on_train_epoch_end",
                     "on_fit_end", "on_exception", "on_before_backward"):  # fmt: skip
            setattr(self, name, lambda *_, name=name: self._note(name))

    def due(self, step: int) -> bool:
        return True

    def _note(self, name: str) -> None:
        if torch._C._len_torch_dispatch_stack():
            self.watched.append(name)


class Fails(MLP):
    def __init__(self, where: str, error: type[BaseException]) -> None:
        super().__init__()
        self.where, self.error = where, error

    def forward(self, batch: Batch) -> Tensor:
        loss = super().forward(batch)
        if self.where == "backward":
            loss.register_hook(self._fail)  # type: ignore[no-untyped-call]
            return loss
        return self._fail(loss)

    def _fail(self, value: Tensor) -> Tensor:
        raise self.error("the camera is gone")


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_error_in_the_audited_step_leaves_nothing_behind(where: str, error: type[BaseException]) -> None:
    policy, watches = Fails(where, error), Watches()
    before = _held(policy)
    with pytest.raises(error, match="the camera is gone"):
        fit(policy, None, callbacks=[PrecisionAudit(), watches])
    assert watches.watched == ["on_before_backward"] * (where == "backward")
    assert _held(policy) == before
    nothing_is_left()


class FailsInside(MLP):
    """An error inside a module that the policy itself catches."""

    def forward(self, batch: Batch) -> Tensor:
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            self.net(batch.y)
        return super().forward(batch)


def test_an_error_that_the_policy_catches_does_not_mix_up_the_modules() -> None:
    found = matmuls(audited(FailsInside()))
    assert {module for module, _, _ in found} == {"net.0", "net.3"}
    assert found["net.0", "forward", "addmm"] == ("bfloat16", 1, 2 * 8 * 6 * 16)


# When it looks ------------------------------------------------------------------------------------------------------


class Counting(MLP):
    """Counts its micro-batches, and says which of them somebody looked at."""

    def __init__(self, without_loss: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.calls, self.watched, self.without_loss = 0, list[int](), without_loss

    def forward(self, batch: Batch) -> Tensor:
        self.calls += 1
        if torch._C._len_torch_dispatch_stack():
            self.watched.append(self.calls)
        return torch.zeros(()) if self.calls in self.without_loss else super().forward(batch)


@pytest.mark.parametrize(
    ("at_step", "accumulate", "poisoned", "micro_batch"),
    [(1, 1, (), 1), (3, 1, (), 3), (3, 2, (), 5), (3, 1, (1, 2), 5), (1, 1, (0,), 1)],
)
def test_the_first_micro_batch_of_the_step_is_audited_and_no_other(
    at_step: int, accumulate: int, poisoned: tuple[int, ...], micro_batch: int
) -> None:
    torch.manual_seed(0)
    policy, audit = Counting(), PrecisionAudit(at_step=at_step)
    fit(policy, audit, accumulate=accumulate, data=batches(8, poisoned=poisoned), max_steps=6)
    assert policy.watched == [micro_batch]
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


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("without_loss", [1, 2, 3])
def test_a_micro_batch_without_a_loss_is_left_for_the_next(accumulate: int, without_loss: int) -> None:
    torch.manual_seed(0)
    without = tuple(range(accumulate + 1, accumulate + 1 + without_loss))  # from the second step on
    policy, watches, audit = Counting(without), Watches(), PrecisionAudit(at_step=2)
    fit(policy, None, callbacks=[audit, watches], accumulate=accumulate, val_every=1)
    assert policy.watched == [*without, without[-1] + 1]
    assert audit.report is not None
    assert {key.module for key in audit.report.recorder.matmuls} == {"net.0", "net.3"}
    assert set(watches.watched) == {"on_before_backward"}


def test_a_run_that_never_reaches_the_step_says_so() -> None:
    trainer = fit(mlp(), PrecisionAudit(at_step=9), default_callbacks=True)
    events = [json.loads(line) for line in (trainer.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [e["message"] for e in events if e.get("event") == "warning"] == [
        "no step was audited: the run ended at step 4, and at_step is 9"
    ]
    assert not (trainer.run_dir / "precision_audit.json").exists()


def test_other_steps_pay_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    class Counted(Recorder):  # type: ignore[no-untyped-call]
        def open(self) -> None:
            made.append(self)
            super().open()

    monkeypatch.setattr(precision_audit, "Recorder", Counted)
    trainer = fit(mlp(), PrecisionAudit(at_step=2), max_steps=20)
    assert len(made) == 1
    bound = {hook for hook, callbacks in trainer.callbacks.bound.items() if callbacks}
    assert (
        bound & {"on_before_backward", "on_train_batch_end", "on_before_optimizer_step", "on_before_zero_grad"} == set()
    )
    assert trainer.callbacks.need_outcome_now is False


@pytest.mark.parametrize("at_step", [0, -1, 1.5, True, "2", None])
def test_a_step_that_cannot_be_meant_is_refused(at_step: Any) -> None:
    with pytest.raises(ConfigError, match=r"PrecisionAudit\.at_step must be a whole number of at least 1, got"):
        PrecisionAudit(at_step=at_step)


# Compiled policies --------------------------------------------------------------------------------------------------


class Compiled(Callback):
    """How many graphs torch has compiled after each step."""

    def __init__(self) -> None:
        self.graphs: list[int] = []

    def on_after_backward(self, trainer: Trainer, policy: nn.Module) -> None:
        from torch._dynamo.utils import counters

        self.graphs.append(counters["stats"]["unique_graphs"])


@pytest.mark.parametrize("at_step", [1, 3])
def test_a_compiled_policy_stays_compiled_and_the_report_says_what_it_cannot_see(at_step: int) -> None:
    found = []
    for audit in (None, PrecisionAudit(at_step=at_step)):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        policy, compiled, sees = mlp(dropout=0.3), Compiled(), Sees()
        policy.compile(backend="aot_eager")
        fit(policy, audit, callbacks=[compiled, sees], seed=1)
        found.append((weights(policy), compiled.graphs, sees.seen))
        if audit is not None:
            assert audit.report is not None
            assert audit.report.compiled
            assert "the policy is compiled" in audit.report.findings[-1]
    assert_equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1] == [1, 1, 1, 1]
    assert found[0][2] == found[1][2]


def test_a_compiled_policy_in_which_nothing_is_seen_is_no_error() -> None:
    policy = Off(mlp())
    policy.inner.compile(backend="aot_eager")
    assert audited(policy)["compiled"] is True


def test_an_older_torch_leaves_a_compiled_policy_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, watches = Counting(), Watches()
    policy.net.compile(backend="eager")
    monkeypatch.setattr(precision_audit, "TorchDispatchMode", object)
    found = audited(policy, callbacks=[watches])
    assert (found["compiled"], found["matmuls"], watches.watched) == (True, [], [])


# What a person sees -------------------------------------------------------------------------------------------------


def test_the_report_is_printed_as_whole_plain_lines_off_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    audited(Half())
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "precision audit of step 1: precision bf16, on cpu",
        "dtype device ops matmuls forward backward FLOPs share",
        "float32 cpu 9 1 2 2.3 k 42.9%",
        "bfloat16 cpu 5 1 1 3.1 k 57.1%",
        "cast from to times bytes",
        "bfloat16 float32 3 960",
        "float32 bfloat16 4 576",
        "not in bfloat16 op pass dtype times FLOPs",
        "net.3.inner mm backward float32 2 1.5 k",
        "net.3.inner addmm forward float32 1 768",
        "- in float32, not in bfloat16: 3 of 5 matmuls and convolutions (42.9% of their FLOPs), in net.3.inner",
        "- never in bfloat16: all matmuls and convolutions of net.3.inner",
    ]


def test_a_long_name_does_not_break_a_line_off_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    policy = mlp()
    policy.net = nn.Sequential(policy.net)
    policy.net.add_module("x" * 150, Off(nn.Linear(3, 3)))
    audited(policy)
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert f"net.{'x' * 150}.inner addmm forward float32 1 144" in lines


def test_the_table_shows_the_ten_largest_and_counts_the_rest() -> None:
    policy = mlp()
    policy.net = nn.Sequential(
        nn.Linear(6, 6), Off(nn.Sequential(*(nn.Linear(6, 6) for _ in range(7)))), nn.Linear(6, 3)
    )
    audit = PrecisionAudit()
    fit(policy, audit)
    screen = Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None)
    assert audit.report is not None
    print_report(audit.report, screen)
    text = screen.file.getvalue()  # type: ignore[attr-defined]
    assert "─" in text
    assert "and 4 more" in text
    assert text.count("float32   ") >= 10


def test_the_event_tells_shares_and_findings() -> None:
    trainer = fit(Half(), PrecisionAudit(), default_callbacks=True)
    events = [json.loads(line) for line in (trainer.run_dir / "metrics.jsonl").read_text().splitlines()]
    [event] = [e for e in events if e.get("event") == "precision_audit"]
    assert event["audited_step"] == 1
    assert set(event["shares"]) == {"bfloat16", "float32"}
    assert len(event["findings"]) == 2
    assert event["message"] == (
        "audited step 1: FLOPs of matmuls and convolutions: 57.1% in bfloat16, 42.9% in float32; findings: 2"
    )


# From a file and from the command line ------------------------------------------------------------------------------

PARTS = """
import torch
from torch import nn

class Policy(nn.Module):
    def __init__(self, autocast: bool = True) -> None:
        super().__init__()
        self.autocast, self.layer = autocast, nn.Linear(2, 1)

    def forward(self, batch):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.autocast and torch.is_autocast_enabled("cpu")):
            return (self.layer(batch).float() - 1).square().mean()

class Data:
    def __len__(self):
        return 16

    def __getitem__(self, index):
        return torch.ones(2) * index / 16
"""

RUN = """\
policy: {class_path: audit_parts.Policy}
data: {train: audit_parts.Data}
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


def test_the_audit_can_be_named_in_a_run_file(cli: Callable[..., int]) -> None:
    assert cli("{class_path: policyfit.PrecisionAudit, init_args: {at_step: 2}}") == 0
    found = json.loads(Path("done/precision_audit.json").read_text())
    assert (found["step"], found["shares"]) == (2, {"bfloat16": 1.0})


def test_the_command_line_adds_it_beside_the_callbacks_of_the_file(
    cli: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli("{class_path: policyfit.Checkpoint, init_args: {every_steps: 2}}", "--audit") == 0
    assert "precision audit of step 1: precision bf16, on cpu" in capsys.readouterr().out
    assert json.loads(Path("done/precision_audit.json").read_text())["shares"] == {"bfloat16": 1.0}
    assert [p.name for p in sorted(Path("done/checkpoints").iterdir()) if not p.is_symlink()] == ["000002", "000003"]
    assert main(["fit", "done/config.yaml", "--trainer.run_dir=again"]) == 0
    assert Path("again/precision_audit.json").exists()


def test_the_command_line_does_not_add_it_twice(cli: Callable[..., int]) -> None:
    assert cli("{class_path: policyfit.PrecisionAudit, init_args: {at_step: 2}}", "--audit") == 0
    assert json.loads(Path("done/precision_audit.json").read_text())["step"] == 2


def test_the_command_line_ends_with_exit_code_2_where_the_precision_never_ran(
    cli: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli("", "--audit", "--policy.autocast=false") == 2
    text = capsys.readouterr()
    assert "no matmul or convolution computed in bfloat16" in text.err
    assert "ran in float32, in layer" in text.err
    assert "100.0%" in text.out


@pytest.mark.parametrize(
    ("arguments", "code", "text"), [(["--aud"], 2, "Did you mean --audit?"), (["--help"], 0, "--audit ")]
)
def test_the_command_line_knows_the_option(
    cli: Callable[..., int], arguments: list[str], code: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli("", *arguments) == code
    captured = capsys.readouterr()
    assert text in captured.out + captured.err
