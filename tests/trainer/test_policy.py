"""The dialects: what a policy may give, what is refused, and what the trainer calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from types import MethodType
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR, StepLR
from torch.utils.data import DataLoader, TensorDataset
from toys import MLP, Batch, InMemory, batches, mlp, weights

from policyfit import Callback, ConfigError, Trainer, TrainingDiverged
from policyfit.trainer.policy import LightningPolicy, PlainPolicy, adapt, brings


def fit(policy: nn.Module, data: Any = None, val_data: Any = None, **settings: Any) -> Trainer:
    trainer = Trainer("cpu", **{"max_steps": 3, "log_every": 1, "default_callbacks": False, **settings})
    trainer.fit(policy, InMemory(batches(3)) if data is None else data, val_data)
    return trainer


def records(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


# Plain ------------------------------------------------------------------------------------------------------


class Giving(nn.Module):
    """Plain dialect; ``what`` makes its answer from a proper loss."""

    def __init__(self, what: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.net, self.what = nn.Linear(6, 3), what

    def forward(self, batch: Batch) -> Any:
        return self.what(nn.functional.mse_loss(self.net(batch.x), batch.y))


@pytest.mark.parametrize("answer", [lambda loss: loss, lambda loss: (loss, None), lambda loss: (loss, {})])
def test_a_plain_policy_gives_a_loss_with_or_without_metrics(answer: Callable[[Tensor], Any]) -> None:
    policy = Giving(answer)
    before = weights(policy)
    assert fit(policy).step == 3
    assert not torch.equal(policy.net.weight, before["net.weight"])


def test_metrics_of_a_plain_policy_reach_the_records_and_the_loss_stays_the_loss() -> None:
    policy = Giving(lambda loss: (loss, {"twice": 2 * loss, "loss": 1e6, "constant": 3}))
    trainer = fit(policy, val_data=InMemory(batches(2)))
    assert trainer.metrics["train/twice"] == pytest.approx(2 * trainer.metrics["train/loss"])
    assert trainer.metrics["val/twice"] == pytest.approx(2 * trainer.metrics["val/loss"])
    assert trainer.metrics["train/loss"] < 1e5
    assert trainer.metrics["val/loss"] < 1e5
    assert trainer.metrics["train/constant"] == 3.0


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (
            lambda loss: loss.item(),
            r"Giving\.forward must give a loss, a scalar.*got float\.\nDo not call \.item\(\)",
        ),
        (lambda loss: None, r"got NoneType\.\nReturn the tensor that is to become small\.$"),
        (
            lambda loss: {"loss": loss},
            r"got dict\.\nReturn the loss before the dict, for instance \(output\['los",
        ),
        (lambda loss: loss.expand(4), r"must give a scalar loss, got shape \(4,\)"),
        (lambda loss: (loss, loss), "with metrics a dict; got Tensor"),
        (lambda loss: (loss, {"wide": loss.expand(2)}), r"train/wide.*got shape \(2,\)"),
        (lambda loss: (loss, {"text": "good"}), "train/text.*got 'good'"),
    ],
)
def test_what_is_not_a_loss_is_refused_by_name_before_the_weights_move(
    answer: Callable[[Tensor], Any], message: str
) -> None:
    policy = Giving(answer)
    before = weights(policy)
    with pytest.raises(ConfigError, match=message):
        fit(policy)
    assert torch.equal(policy.net.weight, before["net.weight"])


def test_a_loss_without_gradient_is_refused_after_two_windows_of_it() -> None:
    with pytest.raises(ConfigError, match=r"The loss has no gradient.*\n.*not loss.item\(\) or loss.detach\(\)"):
        fit(Giving(lambda loss: loss.detach()))


def test_a_window_without_gradient_is_skipped_with_its_reason_and_the_run_goes_on() -> None:
    answers = iter([True, False, True, True])
    policy = Giving(lambda loss: loss if next(answers) else loss.detach())
    trainer = fit(policy, InMemory(batches(4)))
    assert (trainer.step, trainer.skipped) == (3, 1)


def test_a_micro_batch_without_gradient_takes_no_part_in_its_window() -> None:
    def run(answers: list[bool]) -> dict[str, Tensor]:
        torch.manual_seed(0)
        given = iter(answers)
        policy = Giving(lambda loss: loss if next(given) else loss.detach())
        trainer = Trainer("cpu", max_steps=1, accumulate=2, default_callbacks=False)
        trainer.fit(policy, InMemory(batches(2)), optimizer=lambda p: SGD(p, lr=1.0))
        return weights(policy)

    torch.manual_seed(0)
    expected = Giving(lambda loss: loss)
    (expected(batches(2)[1]) / 2).backward()
    SGD(expected.parameters(), lr=1.0).step()
    found = run([False, True])
    assert all(torch.equal(found[name], value) for name, value in weights(expected).items())


# Which dialect ----------------------------------------------------------------------------------------------


class Speaking(nn.Module):
    """Lightning's dialect; parts are set by the tests."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(6, 3)

    def loss(self, batch: Batch) -> Tensor:
        return nn.functional.mse_loss(self.net(batch.x), batch.y)

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        return self.loss(batch)


def test_a_policy_is_told_by_its_training_step() -> None:
    assert isinstance(adapt(MLP()), PlainPolicy)
    assert isinstance(adapt(Speaking()), LightningPolicy)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (3, "must be a torch.nn.Module, got 3"),
        (MLP, "Pass an instance of it"),
        (lambda batch: batch, "must be a torch.nn.Module"),
        (nn.Module(), "neither forward nor training_step"),
        (nn.ModuleList([nn.Linear(1, 1)]), "neither forward nor training_step"),
        (nn.DataParallel(nn.Linear(1, 1)), "wrapped in DataParallel"),
    ],
)
def test_what_is_no_policy_is_refused(policy: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        adapt(policy)


def test_a_compiled_policy_is_refused_in_favour_of_compile() -> None:
    compiled: Any = torch.compile(MLP(), backend="eager")
    with pytest.raises(ConfigError, match=r"wrapped in OptimizedModule.*\n.*Trainer\(compile=True\)"):
        adapt(compiled)


class Normalised(MLP):
    def set_statistics(self, stats: Any) -> None:
        raise AssertionError(f"it got {stats}")


def test_a_policy_that_wants_statistics_is_not_trained_without_them() -> None:
    with pytest.raises(
        ConfigError, match=r"Normalised has set_statistics\(\), but the training dataset has no .* stats"
    ):
        fit(Normalised())
    assert list(Path.cwd().iterdir()) == []  # so that no checkpoint is without


@pytest.mark.parametrize("std", [torch.tensor([1.0, float("nan")]), np.array([[float("inf")]]), [1.0, float("-inf")]])
def test_statistics_that_are_not_finite_are_refused_by_their_names(std: Any) -> None:
    class Measured(InMemory):
        stats: ClassVar[Any] = {"state": {"mean": [0.0, 1.0], "count": 3, "unit": "m"}, "action": {"std": std}}

    with pytest.raises(ConfigError, match=r"statistics of the training dataset are inf or NaN in action\.std"):
        Trainer("cpu", max_steps=1, run_dir="run").fit(Normalised(), Measured(batches(2, seed=1)))
    assert not Path("run").exists()


def test_plan_says_which_types_are_frozen() -> None:
    policy = MLP()
    policy.backbone = nn.Linear(3, 5).bfloat16().requires_grad_(False)
    plan = Trainer("cpu", run_dir="run").dry_run(policy)
    assert plan.to_dict()["policy"]["reason"] == "plain dialect; frozen: 20 of bfloat16"


class FullyShardedDataParallel(nn.Module):
    """Torch's first sharding as far as its name goes: the real one needs a process group."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._fsdp_wrapped_module = module


def test_a_policy_that_holds_parts_in_torch_s_first_sharding_is_refused() -> None:
    for policy in (FullyShardedDataParallel(mlp()), nn.Sequential(FullyShardedDataParallel(nn.Linear(6, 3)))):
        with pytest.raises(ConfigError, match=r"is wrapped in FullyShardedDataParallel.*\n.*Trainer\(distributed="):
            fit(policy)


@pytest.mark.parametrize("policy", [nn.Identity(), nn.Linear(2, 2).requires_grad_(False)])
def test_a_policy_without_anything_to_train_is_refused(policy: nn.Module) -> None:
    with pytest.raises(ConfigError, match="no trainable parameter"):
        fit(policy)


def test_parameters_without_a_shape_and_sparse_gradients_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"weight has no shape yet\.\nCall the policy once"):
        fit(nn.LazyLinear(3))
    with pytest.raises(ConfigError, match=r"1 makes sparse gradients.*\n.*sparse=False"):
        fit(nn.Sequential(nn.Linear(1, 1), nn.Embedding(3, 3, sparse=True)))


# Lightning --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [None, "loss"])
def test_training_step_returns_a_loss_or_a_dict_with_one(key: str | None) -> None:
    policy: Any = Speaking()
    policy.training_step = lambda batch, index: (
        policy.loss(batch) if key is None else {key: policy.loss(batch), "predictions": torch.zeros(4)}
    )
    trainer = fit(policy)
    assert trainer.step == 3
    assert trainer.metrics["train/loss"] > 0


def test_training_step_returning_none_leaves_the_micro_batch_out() -> None:
    policy: Any = Speaking()
    policy.training_step = lambda batch, index: None if index == 0 else policy.loss(batch)
    trainer = fit(policy)
    assert (trainer.step, trainer.skipped, trainer.micro_batches) == (3, 2, 5)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda loss: {"los": loss}, r"a dict without 'loss': it has \['los'\]"),
        (lambda loss: 0.5, "training_step must give a loss.*got float"),
        (lambda loss: loss.expand(2), r"scalar loss, got shape \(2,\)"),
    ],
)
def test_what_training_step_may_not_return_is_refused(answer: Callable[[Tensor], Any], message: str) -> None:
    policy: Any = Speaking()
    policy.training_step = lambda batch, index: answer(policy.loss(batch))
    with pytest.raises(ConfigError, match=message):
        fit(policy)


class ValidatesNow(Callback):
    def on_train_batch_end(self, trainer: Trainer, policy: nn.Module, *_: Any) -> None:
        trainer.validate(policy, InMemory(batches(1)))


class Logging(Speaking):
    """Logs as Lightning modules do."""

    log: Callable[..., None]
    log_dict: Callable[..., None]

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train/loss", 2 * loss, on_step=True, prog_bar=True)  # the name of the loss itself
        self.log_dict({"three_times": 3 * loss, "index": batch_idx}, sync_dist=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("val_loss", loss)
        return {"loss": loss, "predictions": self.net(batch.x), "note": "not a number"}


def test_what_a_module_logs_in_training_and_validation_reaches_records_and_metrics() -> None:
    trainer = fit(Logging(), val_data=InMemory(batches(2)), run_dir="run", default_callbacks=True)
    last, validated = records(Path("run"))[-2:]
    assert last["three_times"] == pytest.approx(3 * last["train/loss"])
    assert last["index"] == 2.0
    assert validated == {
        "step": 3,
        "epoch": 0,
        "val_loss": validated["val/loss"],
        "val/loss": trainer.metrics["val_loss"],
    }


def test_the_policys_own_log_comes_back_after_the_run_and_after_an_error() -> None:
    policy = Logging()
    policy.log_dict = own = lambda *_: None
    fit(policy)
    assert "log" not in vars(policy)
    assert policy.log_dict is own
    policy.net.weight.data.fill_(float("nan"))
    with pytest.raises(TrainingDiverged):
        fit(policy, non_finite="raise")
    assert "log" not in vars(policy)
    assert policy.log_dict is own


def test_validating_inside_a_run_leaves_log_in_place() -> None:
    trainer = fit(Logging(), callbacks=[ValidatesNow()])
    assert trainer.step == 3
    assert "val_loss" in trainer.metrics


def test_manual_optimization_is_refused_with_a_way_out() -> None:
    policy: Any = Speaking()
    policy.automatic_optimization = False
    with pytest.raises(ConfigError, match=r"automatic_optimization=False.*\n.*Return the loss from training_step"):
        fit(policy)


@pytest.mark.parametrize(
    "hook", ["on_train_start", "optimizer_step", "configure_gradient_clipping", "setup", "backward"]
)
def test_hooks_of_a_module_that_would_not_be_called_are_refused_by_name(hook: str) -> None:
    policy = type("Hooked", (Speaking,), {hook: lambda self, *_: None})()
    with pytest.raises(ConfigError, match=rf"Hooked defines {hook}, which the Trainer would never call"):
        fit(policy)


def test_the_empty_methods_of_lightnings_own_base_class_do_not_count_as_the_users() -> None:
    names = ("on_train_start", "validation_step", "train_dataloader", "val_dataloader", "configure_optimizers", "setup")

    def raises(self: Any, *_: Any) -> None:
        raise AssertionError("the base class's method was called")

    base: Any = type(
        "LightningModule", (nn.Module,), {**dict.fromkeys(names, raises), "__module__": "lightning.pytorch.core.module"}
    )
    policy = type("Mine", (Speaking, base), {})()
    assert not brings(policy, "val_dataloader")
    assert fit(policy).step == 3


def test_validation_data_without_a_validation_step_is_refused() -> None:
    with pytest.raises(ConfigError, match="Speaking has no validation_step"):
        fit(Speaking(), val_data=InMemory(batches(1)))


def test_several_loaders_are_refused_with_the_way_to_one() -> None:
    policy: Any = Speaking()
    loader = DataLoader(TensorDataset(torch.zeros(4, 6)))
    policy.train_dataloader = lambda: [loader, loader]
    with pytest.raises(ConfigError, match=r"train_dataloader\(\) gives 2 loaders"):
        Trainer("cpu", default_callbacks=False).fit(policy)


def test_a_policy_without_data_is_told_where_to_put_it() -> None:
    with pytest.raises(ConfigError, match="fit got no train_data, and Speaking has no train_dataloader"):
        Trainer("cpu").fit(Speaking())
    assert list(Path.cwd().iterdir()) == []


def both(policy: Any) -> Any:
    return [policy.first, policy.second]


def by_step(optimizer: Any) -> dict[str, Any]:
    return {"scheduler": StepLR(optimizer, 2), "interval": "step", "name": "lr"}


FORMS: dict[str, tuple[Callable[[Any], Any], int, list[str]]] = {
    "one": (lambda p: p.first, 1, []),
    "list": (both, 2, []),
    "two lists": (lambda p: (both(p), [StepLR(p.first, 2)]), 2, ["epoch"]),
    "two lists, no schedule": (lambda p: ([p.first], None), 1, []),
    "two lists with a dict": (lambda p: ([p.first], [by_step(p.first)]), 1, ["step"]),
    "dict": (lambda p: {"optimizer": p.first, "lr_scheduler": StepLR(p.first, 2)}, 1, ["epoch"]),
    "dict without": (lambda p: {"optimizer": p.first, "lr_scheduler": None}, 1, []),
    "nested dict": (lambda p: {"optimizer": p.first, "lr_scheduler": by_step(p.first)}, 1, ["step"]),
    "dicts": (
        lambda p: ({"optimizer": p.first}, {"optimizer": p.second, "lr_scheduler": StepLR(p.second, 2)}),
        2,
        ["epoch"],
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_configure_optimizers_is_read(form: str) -> None:
    policy: Any = Speaking()
    policy.first, policy.second = SGD([policy.net.weight], lr=0.5), SGD([policy.net.bias], lr=0.5)
    make, optimizers, intervals = FORMS[form]
    policy.configure_optimizers = lambda: make(policy)
    adapter = adapt(policy)
    found, schedules, origin = adapter.optimizers()
    assert found == [policy.first, policy.second][:optimizers]
    assert [schedule.interval for schedule in schedules] == intervals
    assert origin == "Speaking.configure_optimizers()"
    assert fit(policy).step == 3


@pytest.mark.parametrize(
    ("configured", "message"),
    [
        (lambda p: None, "returned None"),
        (lambda p: "AdamW", "must return an optimizer"),
        (lambda p: [], "must return an optimizer"),
        (lambda p: ([], []), "must return an optimizer"),
        (lambda p: [p.net], "must return an optimizer"),
        (lambda p: {"optimiser": p.first}, "has the key 'optimiser'"),
        (lambda p: {"optimizer": p.first, "frequency": 2}, "has the key 'frequency'"),
        (lambda p: {"lr_scheduler": StepLR(p.first, 2)}, "must give torch.optim.Optimizer objects, got None"),
        (lambda p: ([p.first], [p.first]), "must be a torch learning rate scheduler"),
        (
            lambda p: ([p.first], [{"scheduler": StepLR(p.first, 2), "interval": "batch"}]),
            "'step' or 'epoch', got 'batch'",
        ),
        (lambda p: ([p.first], [{"scheduler": StepLR(p.first, 2), "frequency": 0}]), "at least 1, got 0"),
        (lambda p: ([p.first], [StepLR(SGD(p.parameters()), 2)]), "not one of the run's"),
    ],
)
def test_what_configure_optimizers_may_not_return_is_refused(configured: Callable[[Any], Any], message: str) -> None:
    policy: Any = Speaking()
    policy.first = SGD(policy.parameters(), lr=0.5)
    policy.configure_optimizers = lambda: configured(policy)
    with pytest.raises(ConfigError, match=message):
        fit(policy)


def test_a_plain_policys_schedule_counts_steps_and_a_lightning_modules_epochs() -> None:
    def configured(policy: Any) -> Any:
        optimizer = SGD(policy.parameters(), lr=1.0)
        return [optimizer], [LambdaLR(optimizer, lambda n: 0.5**n)]

    plain: Any = mlp()
    plain.configure_optimizers = lambda: configured(plain)
    speaking: Any = Speaking()
    speaking.configure_optimizers = lambda: configured(speaking)
    assert fit(plain, max_steps=None, max_epochs=2).optimizers[0].param_groups[0]["lr"] == 0.5**6
    assert fit(speaking, max_steps=None, max_epochs=2).optimizers[0].param_groups[0]["lr"] == 0.5**2


# The one line -----------------------------------------------------------------------------------------------


class Own(nn.Module):
    """Brings its data; plain dialect."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(6, 3)
        self.dtypes: set[torch.dtype] = set()

    def forward(self, batch: list[Tensor]) -> Tensor:
        x, y = batch
        out = self.net(x)
        self.dtypes.add(out.dtype)
        return nn.functional.mse_loss(out.float(), y)

    def train_dataloader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(0)
        data = TensorDataset(torch.randn(64, 6, generator=generator), torch.randn(64, 3, generator=generator))
        return DataLoader(data, batch_size=8, shuffle=True)

    val_dataloader = train_dataloader


class OwnLightning(Own):
    """The same in Lightning's dialect."""

    log: Callable[..., None]

    def forward(self, x: Any) -> Tensor:
        out: Tensor = self.net(x)
        self.dtypes.add(out.dtype)
        return out

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self(batch[0]).float(), batch[1])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self(batch[0]).float(), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return AdamW(self.parameters(), lr=1e-2)


@pytest.fixture
def quiet(capsys: pytest.CaptureFixture[str]) -> Iterator[None]:
    yield
    capsys.readouterr()


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("kind", [Own, OwnLightning])
def test_the_one_line_trains_a_policy_that_brings_its_data(kind: type[Own]) -> None:
    policy = kind()
    before = weights(policy)
    Trainer(device="auto", precision="bf16").fit(policy)
    assert policy.dtypes == {torch.bfloat16}
    assert policy.net.weight.dtype == torch.float32
    assert not torch.equal(policy.net.weight, before["net.weight"])
    (run_dir,) = Path("runs").iterdir()
    assert records(run_dir)[-1]["step"] == 8
    assert (run_dir / "checkpoints" / "last" / "pretrained_model" / "model.safetensors").is_file()


class WithoutIndex(MLP):
    """Lightning lets batch_idx be left out, and gives a module its device."""

    seen: Any = None

    def training_step(self, batch: Batch) -> Any:
        self.seen = self.device
        return self(batch)


def test_validation_step_that_sharding_has_wrapped_still_takes_batch_idx() -> None:
    class Sees(nn.Linear):
        def training_step(self, batch: Tensor) -> Tensor:
            return batch.sum()

        def validation_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return batch.sum() + batch_idx

    policy: Any = Sees(2, 1)
    for name in ("training_step", "validation_step"):  # as torch's register_fsdp_forward_method does
        method = getattr(policy, name)

        def wrapped(self: nn.Module, *arguments: Any, method: Any = method) -> Any:
            return method(*arguments)

        setattr(policy, name, MethodType(wraps(method)(wrapped), policy))
    adapter = adapt(policy)
    assert adapter.validation_step(torch.ones(2), 3) == {"loss": 5.0}
    assert adapter._takes_index == {"training_step": False, "validation_step": True}  # type: ignore[attr-defined]


def test_training_step_may_leave_batch_idx_out_and_has_its_device() -> None:
    policy = WithoutIndex()
    fit(policy)
    assert policy.seen == torch.device("cpu")
    assert not hasattr(policy, "device")


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("traning_step", "training_step"),
        ("validation_stpe", "validation_step"),
        ("configure_optimizer", "configure_optimizers"),
        ("train_dataloder", "train_dataloader"),
    ],
)
def test_a_misspelt_method_is_refused_rather_than_never_called(written: str, meant: str) -> None:
    cls = type("Misspelt", (MLP,), {written: lambda self, *_: None})
    with pytest.raises(ConfigError, match=f"defines {written}, .* Did you mean {meant}"):
        fit(cls())


def test_an_unknown_hook_of_a_lightning_policy_is_refused() -> None:
    cls = type("Hooked", (WithoutIndex,), {"on_train_epoch_strat": lambda self: None})
    with pytest.raises(ConfigError, match="defines on_train_epoch_strat"):
        fit(cls())
