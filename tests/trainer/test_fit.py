"""Whole runs: how long they are, what they leave, what they tell."""

from __future__ import annotations

import csv
import gc
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning_fabric.loggers.csv_logs import CSVLogger  # at import it sets an environment variable
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import IterableDataset, TensorDataset
from toys import MLP, Batch, InMemory, assert_equal, batches, mlp, weights

from policyfit import (
    EMA,
    FP16,
    Callback,
    Checkpoint,
    ConfigError,
    DeviceUnavailableError,
    OverflowReport,
    PrecisionAudit,
    PrecisionError,
    Trainer,
)
from policyfit.trainer import process


def fit(policy: nn.Module | None = None, data: Any = None, **settings: Any) -> Trainer:
    val_data = settings.pop("val_data", None)
    trainer = Trainer("cpu", **{"default_callbacks": False, **settings})
    trainer.fit(mlp() if policy is None else policy, InMemory(batches(5)) if data is None else data, val_data)
    return trainer


class Log(Callback):
    """Keeps records and events, and the names of the hooks that came."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []
        self.events: list[dict[str, Any]] = []
        self.ends: list[tuple[str, str]] = []

    def on_log(self, trainer: Trainer, policy: nn.Module, record: Any) -> None:
        (self.events if "event" in record else self.records).append(dict(record))

    def on_fit_end(self, trainer: Trainer, policy: nn.Module) -> None:
        self.ends.append(("on_fit_end", trainer.status))

    def on_exception(self, trainer: Trainer, policy: nn.Module, exception: BaseException) -> None:
        self.ends.append((type(exception).__name__, trainer.status))

    def teardown(self, trainer: Trainer, policy: nn.Module, stage: str) -> None:
        self.ends.append(("teardown", trainer.status))


# How long ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "steps", "epoch"),
    [
        ({"max_steps": 7}, 7, 1),
        ({"max_steps": 5}, 5, 0),
        ({"max_epochs": 2}, 10, 2),
        ({"max_steps": 7, "max_epochs": 1}, 5, 1),
        ({"max_steps": 7, "max_epochs": 9}, 7, 1),
        ({}, 5, 1),
        ({"max_epochs": 2, "accumulate": 2}, 6, 2),
        ({"max_epochs": 3, "accumulate": 99}, 3, 3),
        ({"max_steps": 4, "accumulate": 99}, 4, 3),
    ],
)
def test_a_run_is_as_long_as_it_was_asked_to_be(limits: dict[str, Any], steps: int, epoch: int) -> None:
    trainer = fit(**limits)
    assert (trainer.step, trainer.epoch, trainer.status) == (steps, epoch, "completed")


def test_a_run_without_a_limit_is_one_epoch_and_says_so() -> None:
    trainer = fit()
    assert "neither max_steps nor max_epochs is set, so this run is one epoch" in trainer.plan.notes
    assert trainer.max_epochs == 1


def test_skips_make_a_run_longer_and_never_shorter() -> None:
    trainer = fit(data=InMemory(batches(5, poisoned=(0, 3))), max_steps=6)
    assert (trainer.step, trainer.skipped, trainer.micro_batches) == (6, 4, 10)


def test_a_window_larger_than_an_epoch_is_the_epoch_as_one_batch() -> None:
    data = batches(3)
    ours, theirs = mlp(), mlp()
    trainer = Trainer("cpu", max_steps=2, accumulate=50, default_callbacks=False)
    trainer.fit(ours, InMemory(data), optimizer=lambda p: SGD(p, lr=0.1, fused=True))
    optimizer = SGD(theirs.parameters(), lr=0.1, fused=True)
    for _ in range(2):
        for batch in data:
            (theirs(batch) / 3).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert trainer.micro_batches == 6
    assert_equal(weights(ours), weights(theirs))


STOPPING = [
    ("on_fit_start", 0),
    ("on_train_epoch_start", 1),
    ("on_train_batch_start", 1),
    ("on_before_backward", 1),
    ("on_before_optimizer_step", 1),
    ("on_train_batch_end", 1),
    ("on_train_epoch_end", 5),
    ("on_validation_end", 2),
    ("on_update_end", 2),  # settled during the second window, which is then the last
]


@pytest.mark.parametrize(("hook", "steps"), STOPPING)
def test_stop_ends_the_run_after_the_update_under_way_from_any_hook(hook: str, steps: int) -> None:
    log = Log()
    stops = type("Stops", (Callback,), {hook: lambda self, trainer, *_: trainer.stop("enough")})()
    trainer = fit(max_steps=50, val_every=2, val_data=InMemory(batches(1)), callbacks=[stops, log])
    assert (trainer.step, trainer.status, trainer.stop_reason) == (steps, "stopped", "enough")
    assert log.ends == [("on_fit_end", "stopped"), ("teardown", "stopped")]


def test_the_first_reason_to_stop_is_the_one_that_is_kept() -> None:
    class Twice(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            trainer.stop("first")
            trainer.stop("second")

    assert fit(max_steps=9, callbacks=[Twice()]).stop_reason == "first"


# Data that gives nothing ------------------------------------------------------------------------------------


class Exhausted(IterableDataset[Tensor]):
    """Gives its samples once."""

    def __init__(self) -> None:
        self.source = iter(torch.randn(10, 6).unbind())

    def __iter__(self) -> Iterator[Tensor]:
        return self.source


class Squares(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(6, 3)

    def forward(self, batch: Any) -> Tensor:
        x = batch[0] if isinstance(batch, list) else batch
        return self.net(x).square().mean()  # type: ignore[no-any-return]


def test_an_iterable_that_is_used_up_ends_the_run_with_its_cause() -> None:
    with pytest.raises(ConfigError, match=r"no micro-batch in epoch 1.*\n.*begin anew"):
        fit(Squares(), Exhausted(), max_steps=50, batch_size=4)


def test_an_iterator_is_refused_before_it_is_read() -> None:
    source = iter(batches(3))
    with pytest.raises(ConfigError, match="once"):
        fit(data=source, max_steps=2)
    assert len(list(source)) == 3


@pytest.mark.parametrize("data", [InMemory([]), TensorDataset(torch.zeros(0, 6)), []])
def test_empty_data_is_refused_and_nothing_is_written(data: Any) -> None:
    with pytest.raises(ConfigError, match="has no micro-batch to give"):
        Trainer("cpu").fit(Squares(), data)
    assert list(Path.cwd().iterdir()) == []


# What the policy keeps --------------------------------------------------------------------------------------


class WithBackbone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)).requires_grad_(False)
        self.head = nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.5))

    def forward(self, batch: Batch) -> Tensor:
        return nn.functional.mse_loss(self.head(self.backbone(batch.x)), batch.y)


def test_parts_that_came_in_eval_mode_stay_in_it_and_their_statistics_stay() -> None:
    policy = WithBackbone()
    policy.backbone.eval()
    before = weights(policy)
    trainer = fit(policy, max_epochs=3, val_every=2, val_data=InMemory(batches(2)))
    after = weights(policy)
    assert torch.equal(after["backbone.1.running_mean"], before["backbone.1.running_mean"])
    assert not policy.backbone[1].training
    assert policy.head[1].training
    assert "in eval mode stay, as they came: backbone" in trainer.plan.notes


def test_a_policy_that_came_in_eval_mode_as_a_whole_is_put_in_train_mode_and_the_plan_says_so() -> None:
    policy = WithBackbone().eval()
    trainer = fit(policy, max_steps=1)
    assert all(module.training for module in policy.modules())
    assert "WithBackbone came in eval mode and was put in train mode" in trainer.plan.notes


def test_a_policy_that_keeps_parts_in_eval_mode_itself_is_asked() -> None:
    class Keeps(WithBackbone):
        def train(self, mode: bool = True) -> Any:
            super().train(mode)
            self.backbone.eval()
            return self

    for policy in (Keeps(), Keeps().eval()):
        trainer = fit(policy, max_steps=1)
        assert not policy.backbone.training
        assert policy.head.training
        assert not [note for note in trainer.plan.notes if "running statistics move" in note]


def test_parts_that_came_in_eval_mode_stay_in_it_also_under_a_train_of_ones_own() -> None:
    class Switches(WithBackbone):
        def train(self, mode: bool = True) -> Any:
            return super().train(mode)

    policy = Switches()
    policy.backbone.eval()
    fit(policy, max_steps=1)
    assert not policy.backbone.training
    assert policy.head.training


def test_frozen_parts_whose_statistics_move_are_told() -> None:
    trainer = fit(WithBackbone(), max_steps=1)
    (note,) = [note for note in trainer.plan.notes if "running statistics move" in note]
    assert note.startswith("frozen, but in train mode, so that running statistics move: backbone.1; a train() of")


def test_gradients_from_before_take_no_part_and_none_are_left() -> None:
    used, fresh = mlp(), mlp()
    used(batches(1)[0]._replace(factor=torch.tensor(1e6))).backward()
    fit(used, max_steps=2)
    fit(fresh, max_steps=2)
    assert_equal(weights(used), weights(fresh))
    assert all(p.grad is None for p in used.parameters())


@pytest.mark.parametrize("precision", ["no", "fp16"])
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_fit_trains_also_where_gradients_are_switched_off(context: Any, precision: str) -> None:
    strategy: Any = FP16({"init_scale": 8.0}, allow_cpu=True) if precision == "fp16" else precision
    inside, outside, data = mlp(), mlp(), InMemory(batches(3))
    with context():
        fit(inside, data, precision=strategy, max_steps=3)
        assert not torch.is_grad_enabled()
    fit(outside, data, precision=strategy, max_steps=3)
    assert_equal(weights(inside), weights(outside))


def test_a_compiled_run_has_the_bits_of_its_backend_and_leaves_the_policy_uncompiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []

    def backend(graph: Any, inputs: Any) -> Any:
        calls.append("compiled")
        return graph.forward

    original = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self: original(self, backend=backend))
    compiled, plain = mlp(), mlp()
    fit(compiled, compile=True, max_steps=3, val_data=InMemory(batches(1)))
    fit(plain, max_steps=3)
    assert calls
    assert compiled._compiled_call_impl is None
    assert_equal(weights(compiled), weights(plain))


def test_deterministic_holds_during_the_run_and_not_after() -> None:
    seen: list[bool] = []

    class Watching(MLP):
        def forward(self, batch: Batch) -> Tensor:
            seen.append(torch.are_deterministic_algorithms_enabled())
            return super().forward(batch)

    fit(Watching(), deterministic=True, max_steps=2)
    fit(Watching(), max_steps=1)
    assert seen == [True, True, False]


def test_a_small_policy_computes_on_one_thread_and_the_process_gets_its_own_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    seen: list[int] = []

    class Watching(MLP):
        def forward(self, batch: Batch) -> Tensor:
            seen.append(torch.get_num_threads())
            return super().forward(batch)

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        trainer = fit(Watching(), max_steps=1)
        assert seen == [1]
        assert torch.get_num_threads() == 2
        assert trainer.plan.chosen("threads") == "1"
        monkeypatch.setattr(process, "_SMALL", 1)
        assert fit(Watching(), max_steps=1).plan.chosen("threads") == "2"
        assert seen == [1, 2]
    finally:
        torch.set_num_threads(before)


class Looking(MLP):
    """Looks at what other libraries are known to replace in torch while they train."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[int]] = []

    def forward(self, batch: Batch) -> Tensor:
        self.seen.append(parts_of_torch())
        return super().forward(batch)


def parts_of_torch() -> list[int]:
    contexts = [torch.no_grad, torch.inference_mode, torch.enable_grad, torch.set_grad_enabled, torch.autocast]
    methods = [nn.Module.__call__, nn.Module.to, nn.Module.train, nn.Module.load_state_dict, Tensor.backward, Tensor.to]
    functions = [torch.save, torch.load, torch.compile, nn.utils.clip_grad_norm_, torch.amp.GradScaler.step]
    return [id(part) for part in (*contexts, *methods, *functions)]


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_nothing_of_torch_is_replaced_during_a_run(precision: str) -> None:
    policy, before = Looking(), parts_of_torch()
    strategy: Any = FP16({"init_scale": 8.0}, allow_cpu=True) if precision == "fp16" else precision
    fit(
        policy, InMemory(batches(5, poisoned=(1,))), precision=strategy, default_callbacks=True, max_steps=3,
        clip_norm=1.0, val_every=1, val_data=InMemory(batches(1)),
        callbacks=[EMA(), OverflowReport(replay=True), PrecisionAudit(), Checkpoint(every_steps=1)],
    )  # fmt: skip
    assert len(policy.seen) > 6  # trained, validated, audited and replayed
    assert all(seen == before for seen in policy.seen)


# Seeds ------------------------------------------------------------------------------------------------------


def random_draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def shuffled() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(32, 6, generator=generator))


def test_one_seed_gives_one_run_and_another_seed_another() -> None:
    def run(seed: int | None) -> dict[str, Tensor]:
        torch.manual_seed(0)
        policy = Squares()
        random_draws()  # whatever was drawn before
        fit(policy, shuffled(), seed=seed, max_steps=3)
        return weights(policy)

    assert_equal(run(3), run(3))
    assert not torch.equal(run(3)["net.weight"], run(4)["net.weight"])


def test_the_streams_after_a_seeded_run_are_those_of_the_seed() -> None:
    fit(seed=11, max_steps=1)
    found = random_draws()
    random.seed(11)
    np.random.seed(11)
    torch.manual_seed(11)
    assert found == random_draws()


def test_without_a_seed_the_global_streams_are_left_alone_and_the_plan_tells_the_one_drawn() -> None:
    policy = Squares()  # draws its weights
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # type: ignore[index]
    trainer = fit(policy, shuffled(), max_steps=6, val_every=2, val_data=shuffled())
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == states  # type: ignore[index]
    assert 0 <= int(trainer.plan.chosen("seed")) < 2**31


def test_the_seed_that_was_drawn_gives_the_run_again() -> None:
    torch.manual_seed(0)
    first, second = Squares(), Squares()
    second.load_state_dict(first.state_dict())
    trainer = fit(first, shuffled(), max_steps=6)
    fit(second, shuffled(), max_steps=6, seed=int(trainer.plan.chosen("seed")))
    assert_equal(weights(first), weights(second))


# Records ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("log_every", "steps"), [(1, [1, 2, 3, 4, 5]), (2, [2, 4, 5]), (5, [5]), (50, [5]), (None, [5]), (0, [5])]
)
def test_records_come_at_their_interval_and_the_last_step_is_never_left_out(
    log_every: int | None, steps: list[int]
) -> None:
    log = Log()
    trainer = fit(max_steps=5, log_every=log_every, callbacks=[log], clip_norm=1.0)
    assert [record["step"] for record in log.records] == steps
    last = log.records[-1]
    assert set(last) >= {"step", "epoch", "train/loss", "lr", "grad_norm", "skipped", "steps_per_s"}
    assert trainer.metrics["train/loss"] == last["train/loss"]


@pytest.mark.parametrize("name", ["log_every", "val_every"])
def test_an_interval_below_zero_is_refused_by_its_name(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be a whole number of at least 1, got -1"):
        Trainer("cpu", **{name: -1})  # type: ignore[arg-type]


def test_the_logged_loss_is_the_mean_since_the_last_record() -> None:
    class Numbered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.offset = nn.Parameter(torch.zeros(()))

        def forward(self, batch: Tensor) -> Tensor:
            return batch.mean() + 0.0 * self.offset

    log = Log()
    data = InMemory([torch.full((2,), float(i)) for i in range(6)])
    fit(Numbered(), data, max_steps=6, log_every=3, callbacks=[log])
    assert [record["train/loss"] for record in log.records] == [1.0, 4.0]


class FakeLogger:
    """What a Fabric logger is asked."""

    def __init__(self) -> None:
        self.metrics: list[tuple[dict[str, Any], int]] = []
        self.ends: list[str] = []

    def log_metrics(self, metrics: dict[str, Any], step: int) -> None:
        self.metrics.append((metrics, step))

    def finalize(self, status: str) -> None:
        self.ends.append(status)


def test_loggers_get_every_record_as_plain_numbers_and_are_finalized_once() -> None:
    logger = FakeLogger()
    fit(max_steps=4, log_every=2, val_every=4, val_data=InMemory(batches(1)), loggers=[logger])
    assert [step for _, step in logger.metrics] == [2, 4, 4]
    assert all(type(value) in (int, float) for metrics, _ in logger.metrics for value in metrics.values())
    assert all(type(step) is int for _, step in logger.metrics)
    assert set(logger.metrics[-1][0]) == {"val/loss"}
    assert logger.ends == ["success"]
    with pytest.raises(ConfigError):
        fit(data=InMemory([]), loggers=[logger])
    with pytest.raises(RuntimeError):
        fit(data=InMemory(batches(1, poisoned=(0,))), non_finite="raise", loggers=[logger])
    assert logger.ends == ["success", "failed"]


def test_fabrics_csv_logger_writes_what_the_run_reports(tmp_path: Path) -> None:
    log = Log()
    logger = CSVLogger(tmp_path / "logs", name="run", version="0")
    fit(max_steps=4, log_every=2, val_data=InMemory(batches(1)), loggers=[logger], callbacks=[log])
    with (tmp_path / "logs" / "run" / "0" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["2", "4", "4"]
    assert [float(row["train/loss"]) for row in rows[:2]] == [record["train/loss"] for record in log.records[:2]]
    assert float(rows[2]["val/loss"]) == log.records[2]["val/loss"]


# Folders ----------------------------------------------------------------------------------------------------


def test_a_run_without_a_folder_makes_a_new_one_and_says_which() -> None:
    trainers = [fit(max_steps=1) for _ in range(3)]
    folders = [trainer.run_dir for trainer in trainers]
    assert len(set(folders)) == 3
    assert all(folder.parent == Path("runs").absolute() and folder.name.partition("-MLP")[1] for folder in folders)
    assert all(json.loads((folder / "plan.json").read_text())["device"]["chosen"] == "cpu" for folder in folders)


def test_variables_that_torch_reads_are_recorded_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.setenv("A_SECRET", "1234")
    trainer = fit(max_steps=1)
    recorded = json.loads((trainer.run_dir / "plan.json").read_text())["environment_variables"]
    assert recorded["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert "1234" not in recorded.values()


def test_a_second_fit_of_one_trainer_starts_afresh_in_a_folder_of_its_own() -> None:
    log = Log()
    trainer = Trainer("cpu", max_steps=3, log_every=1, callbacks=[log, Checkpoint()], default_callbacks=False, seed=1)
    first, second = mlp(), mlp()
    trainer.fit(first, InMemory(batches(3)))
    folder = trainer.run_dir
    trainer.fit(second, InMemory(batches(3)))
    assert trainer.run_dir != folder
    assert (trainer.step, trainer.resumed_step) == (3, 0)
    assert_equal(weights(first), weights(second))
    assert [record["step"] for record in log.records] == [1, 2, 3, 1, 2, 3]
    for run_dir in (folder, trainer.run_dir):
        assert (run_dir / "checkpoints" / "last").resolve().name == "000003"


def test_a_given_folder_is_used_once() -> None:
    trainer = Trainer("cpu", max_steps=1, run_dir="here", default_callbacks=False)
    trainer.fit(mlp(), InMemory(batches(1)))
    with pytest.raises(ConfigError, match="already holds a run"):
        trainer.fit(mlp(), InMemory(batches(1)))
    assert trainer.status == "new"


def test_a_file_in_the_place_of_a_folder_is_refused() -> None:
    Path("here").write_text("mine")
    with pytest.raises(ConfigError, match=r"run_dir must be a folder, but .*here is a file"):
        fit(run_dir="here")
    with pytest.raises(ConfigError, match="cannot be made"):
        fit(run_dir="here/below")
    assert Path("here").read_text() == "mine"


class Refuses(Callback):
    def setup(self, trainer: Trainer, policy: nn.Module, stage: str) -> None:
        raise PrecisionError("not here")


@pytest.mark.parametrize(
    "arguments",
    [
        {"callbacks": [Refuses()]},
        {"policy": nn.Linear(6, 3).half()},
        {"policy": nn.Identity()},
        {"data": [], "policy": Squares()},
        {"val_data": 3},
    ],
)
@pytest.mark.parametrize("run_dir", [None, "here"])
def test_a_run_that_is_refused_writes_nothing(arguments: dict[str, Any], run_dir: str | None) -> None:
    with pytest.raises((ConfigError, PrecisionError)):
        fit(**{"default_callbacks": True, "run_dir": run_dir, **arguments})
    assert list(Path.cwd().iterdir()) == []


def test_fit_inside_a_run_of_the_same_trainer_is_refused() -> None:
    class Fits(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            trainer.fit(mlp(), InMemory(batches(1)))

    with pytest.raises(RuntimeError, match=r"inside a run of the same Trainer"):
        fit(callbacks=[Fits()])


# What this machine cannot do --------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA devices")
def test_cuda_on_a_machine_without_is_refused_by_the_constructor_and_its_remedy_works() -> None:
    with pytest.raises(DeviceUnavailableError, match="device='cuda' was requested") as error:
        Trainer(device="cuda")
    named = re.findall(r"device='(\w+)'", str(error.value).partition("\n")[2])
    assert named
    for name in named:
        assert Trainer(device=name).device.name == "cpu"


def test_fp16_on_the_cpu_is_refused_by_the_constructor_and_every_remedy_works() -> None:
    with pytest.raises(PrecisionError, match="precision='fp16' was requested on the cpu") as error:
        Trainer("cpu", "fp16")
    remedies = str(error.value).partition("\n")[2]
    assert re.findall(r"precision='(\w+)'", remedies) == ["bf16", "no"]
    for name in re.findall(r"precision='(\w+)'", remedies):
        assert fit(precision=name, max_steps=1).step == 1
    assert "precision=FP16(allow_cpu=True)" in remedies
    assert fit(precision=FP16({"init_scale": 8.0}, allow_cpu=True), max_steps=1).step == 1


# Memory -----------------------------------------------------------------------------------------------------


class Counting(Callback):
    """Live tensors after each step."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.micro_batches in (50, 100, 150, 200):
            gc.collect()
            self.counts.append(sum(issubclass(type(o), Tensor) for o in gc.get_objects()))


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_the_number_of_live_tensors_does_not_grow_with_the_steps(precision: str) -> None:
    class Reports(MLP):
        def forward(self, batch: Batch) -> Any:
            loss = super().forward(batch)
            return loss, {"twice": 2 * loss, "first": self.net(batch.x)[0, 0]}

    counting = Counting()
    fit(Reports(), precision=precision, max_steps=201, log_every=10, callbacks=[counting], clip_norm=1.0)
    assert len(counting.counts) == 4
    assert max(counting.counts) - counting.counts[0] <= 5  # fewer may be left of tests before this one
