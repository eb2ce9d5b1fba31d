"""A run that is gone on with otherwise than it began: each change refused until it is named, then made and told."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning_fabric  # noqa: F401 - sets a variable of the environment when it is imported
import pytest
import torch
from forgery import reseal
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    MultiplicativeLR,
    MultiStepLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)
from torch.utils.data import DataLoader, IterableDataset
from toys import assert_equal

from policyfit import EMA, FP16, Callback, Checkpoint, CheckpointError, ConfigError, Trainer, WarmupCosine
from policyfit.trainer.checkpoint import read_checkpoint
from policyfit.trainer.listing import list_checkpoints

STEPS = 5


class Samples:
    """``n`` samples that say which they are."""

    def __init__(self, n: int = 34, mean: float | None = None) -> None:
        self.x = torch.randn(n, 6, generator=torch.Generator().manual_seed(5))
        if mean is not None:
            self.stats = {"x": {"mean": torch.tensor([mean]), "names": ["x"]}}

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "index": torch.tensor(index)}


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 3))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        loss: Tensor = self.net(batch["x"]).square().mean()
        return loss


class Normalised(Policy):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(1))

    def set_statistics(self, stats: Any) -> None:
        self.mean = stats["x"]["mean"].clone()


class Subtracting(Normalised):
    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        loss: Tensor = self.net(batch["x"] - self.mean).square().mean()
        return loss


class Seen(Callback):
    """Sample ids by epoch, the epochs that ended, and for every update its learning rate and beta1."""

    def __init__(self) -> None:
        self.ids: dict[int, list[int]] = {}
        self.ended: list[int] = []
        self.rates: list[float] = []
        self.betas: list[float] = []
        self.shares: list[float] = []

    def on_train_batch_start(self, trainer: Trainer, policy: nn.Module, batch: Any, batch_idx: int) -> None:
        self.ids.setdefault(trainer.epoch, []).extend(batch["index"].flatten().tolist())

    def on_before_backward(self, trainer: Trainer, policy: nn.Module, loss: Tensor) -> None:
        self.shares.append(float(loss.detach()))

    def on_before_optimizer_step(self, trainer: Trainer, policy: nn.Module, optimizer: Any) -> None:
        self.rates.append(float(optimizer.param_groups[0]["lr"]))
        self.betas.append(optimizer.param_groups[0].get("betas", [0.0])[0])

    def on_train_epoch_end(self, trainer: Trainer, policy: nn.Module) -> None:
        self.ended.append(trainer.epoch)


def cosine(optimizer: Any) -> Any:
    return WarmupCosine(optimizer, warmup_steps=3, total_steps=20)


def fit(
    run_dir: Path, *, data: Any = None, policy: Any = None, schedule: Any = cosine, resume: Any = None,
    changes: Any = (), optimizer: Any = None, lr: float = 1e-2, weight_decay: float = 0.0, callbacks: Any = (),
    **settings: Any,
) -> tuple[Trainer, Seen]:  # fmt: skip
    seen = Seen()
    settings = {"max_steps": STEPS, "batch_size": 4, "seed": 7, **settings}
    trainer = Trainer("cpu", run_dir=run_dir, callbacks=[seen, Checkpoint(every_steps=1), *callbacks], **settings)
    torch.manual_seed(0)
    trainer.fit(
        policy or Policy(), data or Samples(), schedule=schedule, resume=resume, changes=changes,
        optimizer=optimizer or (lambda p: AdamW(p, lr=lr, weight_decay=weight_decay)),
    )  # fmt: skip
    return trainer, seen


def resume(run_dir: Path, changes: Any, **more: Any) -> tuple[Trainer, Seen]:
    """The run gone on with for three steps, after it was refused without ``changes``."""
    with pytest.raises(ConfigError, match=r"would become another one: .*\n.*resume with changes=\["):
        fit(run_dir, resume="last", **{"max_steps": STEPS + 3, **more})
    return fit(run_dir, resume="last", changes=changes, **{"max_steps": STEPS + 3, **more})


def saved(run_dir: Path, step: int = STEPS) -> Any:
    return read_checkpoint(run_dir / "checkpoints" / f"{step:06d}")


def test_new_learning_rate_goes_on_where_its_own_curve_is_with_the_moments_kept(tmp_path: Path) -> None:
    fit(tmp_path)
    trainer, seen = resume(tmp_path, "lr", lr=1e-3)
    fresh = cosine(SGD([torch.zeros(1)], lr=1e-3))
    assert seen.rates == pytest.approx([1e-3 * fresh.factor(step) for step in range(STEPS, STEPS + 3)], rel=1e-12)
    assert "the state of the optimizer" in note(trainer, "kept")
    assert "optimizer 0: lr was 0.01 and is now 0.001;" in note(trainer, "changed")
    steps = [float(entry["step"]) for entry in trainer._active.updater.optimizers[0].state.values()]
    assert steps == [STEPS + 3.0] * 4


def test_learning_rate_without_a_schedule_is_the_new_one(tmp_path: Path) -> None:
    fit(tmp_path, schedule=None)
    _, seen = resume(tmp_path, ["lr"], schedule=None, lr=3e-3)
    assert seen.rates == [3e-3] * 3


def test_new_weight_decay_changes_nothing_else(tmp_path: Path) -> None:
    fit(tmp_path)
    _, straight = fit(tmp_path / "straight", max_steps=STEPS + 3)
    trainer, seen = resume(tmp_path, "weight_decay", weight_decay=0.5)
    group = trainer._active.updater.optimizers[0].param_groups[0]
    assert group["weight_decay"] == 0.5
    assert seen.rates == straight.rates[STEPS:]
    assert seen.ids[0] == straight.ids[0][4 * STEPS :]


@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: WarmupCosine(o, warmup_steps=3, total_steps=50),
        lambda o: MultiStepLR(o, milestones=[2, 6], gamma=0.1),
        lambda o: OneCycleLR(o, max_lr=0.1, total_steps=30),
        None,
    ],
    ids=["longer", "steps", "one cycle", "none"],
)
def test_new_schedule_stands_where_it_would_had_it_been_there_from_the_start(tmp_path: Path, schedule: Any) -> None:
    fit(tmp_path / "a")
    _, straight = fit(tmp_path / "b", schedule=schedule, max_steps=STEPS + 3)
    _, seen = resume(tmp_path / "a", ["schedule", "lr", "optimizer"], schedule=schedule)
    assert seen.rates == straight.rates[STEPS:]


def test_new_schedule_alone_keeps_the_moments_also_one_that_moves_the_momentum(tmp_path: Path) -> None:
    def one_cycle(optimizer: Any) -> Any:
        return OneCycleLR(optimizer, max_lr=0.1, total_steps=30)

    fit(tmp_path / "a")
    _, straight = fit(tmp_path / "b", schedule=one_cycle, max_steps=STEPS + 3)
    trainer, seen = resume(tmp_path / "a", "schedule", schedule=one_cycle)
    assert (seen.rates, seen.betas) == (straight.rates[STEPS:], straight.betas[STEPS:])
    assert "the state of the optimizer" in note(trainer, "kept")
    trainer, seen = fit(tmp_path / "a", schedule=None, changes="schedule", resume="last", max_steps=STEPS + 5)
    assert (seen.rates, seen.betas) == ([1e-2] * 2, [0.9] * 2)
    assert "the state of the optimizer" in note(trainer, "kept")
    assert "schedule 0: class was OneCycleLR and is now None; optimizer 0: max_lr" in note(trainer, "changed")


@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: SequentialLR(o, [LinearLR(o, 0.1, total_iters=3), CosineAnnealingLR(o, 20)], [3]),
        lambda o: ChainedScheduler([LinearLR(o, 0.1, total_iters=3), ExponentialLR(o, 0.9)], optimizer=o),
        lambda o: LambdaLR(o, lambda step: 1 / (step + 1)),
    ],
    ids=["sequence", "chain", "function"],
)
def test_new_learning_rate_needs_no_other_name_whatever_the_schedule(tmp_path: Path, schedule: Any) -> None:
    fit(tmp_path / "a", schedule=schedule)
    _, straight = fit(tmp_path / "b", schedule=schedule, lr=1e-3, max_steps=STEPS + 3)
    trainer, seen = resume(tmp_path / "a", "lr", schedule=schedule, lr=1e-3)
    assert seen.rates == straight.rates[STEPS:]
    assert note(trainer, "changed").startswith("changed: optimizer 0: lr was 0.01 and is now 0.001; max_steps")


def test_new_betas_go_on_where_the_schedule_moves_them(tmp_path: Path) -> None:
    def settings(second: float) -> dict[str, Any]:
        return {
            "optimizer": lambda p: AdamW(p, lr=0.01, betas=(0.9, second)),
            "schedule": lambda o: OneCycleLR(o, max_lr=0.1, total_steps=30),
        }

    fit(tmp_path / "a", **settings(0.95))
    _, straight = fit(tmp_path / "b", max_steps=STEPS + 3, **settings(0.98))
    trainer, seen = resume(tmp_path / "a", "betas", **settings(0.98))
    assert seen.betas == straight.betas[STEPS:]
    assert trainer._active.updater.optimizers[0].param_groups[0]["betas"][1] == 0.98


def test_schedule_that_is_over_before_the_run_goes_on_is_refused(tmp_path: Path) -> None:
    fit(tmp_path)
    with pytest.raises(ConfigError, match=r"OneCycleLR cannot be brought to step 5, where the run goes on: Tried to"):
        fit(tmp_path, schedule=lambda o: OneCycleLR(o, max_lr=0.1, total_steps=3), resume="last", changes="schedule")


class Scheduled(Policy):
    """Lightning's dialect, for what only a dict of its says of a schedule."""

    def __init__(self, make: Any, **options: Any) -> None:
        super().__init__()
        self.make, self.options = make, options

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.forward(batch)

    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=1.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self.make(optimizer), **self.options}}


@pytest.mark.parametrize(
    ("before", "now", "message"),
    [
        (
            Scheduled(lambda o: LambdaLR(o, lambda step: 0.5**step)),
            Scheduled(lambda o: LambdaLR(o, lambda step: 0.9**step)),
            r"schedule 0: factors 0 was \[1\.0, 0\.5, ",
        ),
        (
            Scheduled(lambda o: MultiplicativeLR(o, lambda step: 0.9)),
            Scheduled(lambda o: MultiplicativeLR(o, lambda step: 0.8)),
            "schedule 0: factors 0 was",
        ),
        (
            Scheduled(lambda o: StepLR(o, 2), interval="step"),
            Scheduled(lambda o: StepLR(o, 2), interval="step", frequency=3),
            "schedule 0: frequency was 1 and is now 3",
        ),
        (
            Scheduled(ReduceLROnPlateau, monitor="train/loss"),
            Scheduled(ReduceLROnPlateau, monitor="train/other"),
            "schedule 0: monitor was train/loss and is now train/other",
        ),
    ],
    ids=["function", "factor", "frequency", "monitor"],
)
def test_curve_that_its_state_does_not_show_is_refused(
    tmp_path: Path, before: Policy, now: Policy, message: str
) -> None:
    fit_scheduled(tmp_path, before, data=Samples(), max_steps=STEPS)
    with pytest.raises(ConfigError, match=rf"{message}.*\n.*--changes=schedule"):
        fit_scheduled(tmp_path, now, data=Samples(), max_steps=STEPS + 1, resume="last")
    fit_scheduled(tmp_path, now, data=Samples(), max_steps=STEPS + 1, resume="last", changes="schedule")


def test_function_of_a_schedule_that_ends_is_compared_as_far_as_it_goes(tmp_path: Path) -> None:
    table = [1.0] * 8
    for steps, resumed in ((STEPS, None), (STEPS + 1, "last")):
        fit(tmp_path, schedule=lambda o: LambdaLR(o, lambda step: table[step]), max_steps=steps, resume=resumed)
    assert saved(tmp_path).manifest["movers"]["schedule 0: factors 0"] == [1.0, 1.0]


def test_learning_rate_in_a_tensor_is_the_same_as_the_number(tmp_path: Path) -> None:
    fit(tmp_path)
    trainer, _ = fit(
        tmp_path, optimizer=lambda p: AdamW(p, lr=torch.tensor(1e-2), weight_decay=0.0), resume="last", max_steps=6
    )
    assert trainer.step == 6


def test_last_record_of_a_finished_run_comes_again_as_it_was(tmp_path: Path) -> None:
    def last() -> dict[str, Any]:
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
        record: dict[str, Any] = [json.loads(line) for line in lines if '"event"' not in line][-1]
        return {name: value for name, value in record.items() if not name.endswith("_per_s")}

    fit(tmp_path, log_every=2)
    before = last()
    fit(tmp_path, log_every=2, resume="last")
    assert last() == before
    assert {"lr", "grad_norm", "train/loss"} <= set(before)


def test_schedule_that_looks_at_metrics_starts_anew_and_the_plan_says_so(tmp_path: Path) -> None:
    fit(tmp_path)
    trainer, _ = resume(
        tmp_path, ["schedule", "lr", "optimizer"], schedule=lambda o: ReduceLROnPlateau(o), max_steps=STEPS + 1
    )
    assert "the schedule ReduceLROnPlateau, whose past cannot be replayed" in note(trainer, "reset")


def test_another_optimizer_starts_anew_on_the_kept_weights(tmp_path: Path) -> None:
    fit(tmp_path)
    before = saved(tmp_path).model
    trainer, _ = resume(tmp_path, "optimizer", optimizer=lambda p: SGD(p, lr=1e-2, momentum=0.9), max_steps=STEPS + 1)
    assert note(trainer, "reset") == "reset: the state of the optimizer"
    after = saved(tmp_path, STEPS + 1)
    assert list(after.optimizers[0]["state"][0]) == ["momentum_buffer"]
    moved = {name: before[name] - after.model[name] for name in before}
    lr = 1e-2 * cosine(SGD([torch.zeros(1)], lr=1.0)).factor(STEPS)
    for i, name in enumerate(Policy().state_dict()):  # the first step of momentum is the gradient
        torch.testing.assert_close(moved[name], lr * after.optimizers[0]["state"][i]["momentum_buffer"])


@pytest.mark.parametrize(
    ("changes", "settings", "left_out"),
    [
        ("batch_size", {"batch_size": 8}, 4),  # 20 of 34 seen: windows of 8 go on at 24
        ("batch_size", {"batch_size": 5}, 0),
        ("accumulate", {"accumulate": 2}, 4),
        ("batch_size,accumulate", {"batch_size": 2, "accumulate": 3}, 4),
        ("batch_size", {"batch_size": 40}, 14),  # no whole window is left
    ],
)
def test_other_batches_read_no_sample_twice_and_say_how_many_are_left_out(
    tmp_path: Path, changes: str, settings: dict[str, int], left_out: int
) -> None:
    _, before = fit(tmp_path)
    trainer, seen = resume(tmp_path, changes, **settings)
    first = seen.ids.get(0, [])
    assert not set(first) & set(before.ids[0])
    if trainer.epoch > 0:
        assert len(first) == 34 - 4 * STEPS - left_out
        assert len(set(seen.ids[1])) == len(seen.ids[1])
    told = f"leaves out {left_out} samples" if left_out else "goes on with the next sample"
    assert told in note(trainer, "changed")


def test_other_data_begins_with_the_next_epoch(tmp_path: Path) -> None:
    fit(tmp_path)
    trainer, seen = resume(tmp_path, "data", data=Samples(50), max_steps=STEPS + 13)
    assert list(seen.ids) == [1]
    assert sorted(seen.ids[1]) == list(range(50))
    assert "dataset_size was 34 and is now 50" in note(trainer, "changed")
    assert "the next epoch" in note(trainer, "reset")


def loader(n: int = 34, size: int = 4, **settings: Any) -> DataLoader[Any]:
    return DataLoader(Samples(n), batch_size=size, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("before", "now", "message"),
    [
        # the same 32 samples an epoch, in another order
        ({"drop_last": True, "shuffle": True}, {"drop_last": True, "shuffle": True, "n": 35}, "dataset_size was 34"),
        ({"shuffle": True}, {"shuffle": False}, "order was shuffled and is now sequential"),
        ({"drop_last": False}, {"drop_last": True}, "drop_last was False"),
        ({"sampler": range(34)}, {"shuffle": True}, "order was range and is now shuffled"),
    ],
)
def test_another_order_is_other_data(tmp_path: Path, before: Any, now: Any, message: str) -> None:
    _, seen = fit(tmp_path, data=loader(**before))
    with pytest.raises(ConfigError, match=message):
        fit(tmp_path, data=loader(**now), resume="last", max_steps=STEPS + 3)
    trainer, after = resume(tmp_path, "data", data=loader(**now))
    assert (list(seen.ids), list(after.ids)) == ([0], [1])
    assert "the next epoch" in note(trainer, "reset")


def test_data_that_looks_the_same_begins_with_the_next_epoch_when_it_is_named(tmp_path: Path) -> None:
    fit(tmp_path)
    trainer, seen = fit(tmp_path, resume="last", max_steps=STEPS + 3, changes="data")
    assert list(seen.ids) == [1]
    assert note(trainer, "changed").startswith("changed: data, as asked;")
    _, seen = fit(tmp_path, resume="last", max_steps=STEPS + 4)
    assert list(seen.ids) == [1]  # from here on it is a run like any other


def test_optimizer_that_looks_the_same_begins_anew_when_it_is_named(tmp_path: Path) -> None:
    fit(tmp_path)
    trainer, _ = fit(tmp_path, resume="last", max_steps=STEPS + 3, changes="optimizer")
    assert "the state of the optimizer" in note(trainer, "reset")
    assert [float(entry["step"]) for entry in trainer._active.updater.optimizers[0].state.values()] == [3.0] * 4


def test_other_batches_of_a_loader_that_drops_the_last_are_no_other_data(tmp_path: Path) -> None:
    _, before = fit(tmp_path, data=loader(drop_last=True))
    trainer, seen = resume(tmp_path, "batch_size", data=loader(size=5, drop_last=True))
    assert "goes on with the next sample" in note(trainer, "changed")
    assert seen.ids[0] == list(range(20, 30))
    assert before.ids[0] == list(range(20))


class Constant(Policy):
    """A loss of 1, so that the shares of a window's loss can be seen."""

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return super().forward(batch) * 0 + 1


class Stream(IterableDataset[dict[str, Tensor]]):
    """Of no length, and with no state to carry."""

    def __init__(self, n: int = 34) -> None:
        self.samples, self.reads = Samples(n), 0

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for index in range(len(self.samples)):
            self.reads += 1
            yield self.samples[index]


class Counted(Stream):
    def __len__(self) -> int:
        return len(self.samples)


class Place(Stream):
    """Of no length, and says where it stands."""

    at = 0

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        while self.at < len(self.samples):
            self.at += 1
            yield self.samples[self.at - 1]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class CountedPlace(Place):
    def __len__(self) -> int:
        return len(self.samples)


class Batches:
    """A loader of another library, which does not say how large its batches are."""

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        samples = Samples()
        for first in range(0, 32, 4):
            yield {"x": samples.x[first : first + 4], "index": torch.arange(first, first + 4)}


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: loader(size=None, shuffle=True), "leaves out up to 1 micro-batches"),  # type: ignore[arg-type]
        (Batches, "leaves out up to 1 micro-batches"),
    ],
    ids=["samples", "loader"],
)
def test_windows_are_whole_where_a_batch_has_no_size(tmp_path: Path, make: Any, told: str) -> None:
    _, before = fit(tmp_path, data=make(), policy=Constant())
    trainer, seen = resume(tmp_path, "accumulate", data=make(), policy=Constant(), accumulate=2)
    assert seen.shares == [0.5] * 6
    assert not set(before.ids[0]) & set(seen.ids.get(0, []))
    assert told in note(trainer, "changed")


@pytest.mark.parametrize(
    ("steps", "settings", "first", "told"),
    [
        (5, {"batch_size": 8}, (0, 24), "leaves out up to 4 samples"),
        (5, {"accumulate": 2}, (0, 24), "leaves out up to 4 samples"),
        (9, {"accumulate": 2}, (1, 0), "leaves out up to 4 samples"),  # all were seen: 34, not 36
        (9, {"batch_size": 5}, (1, 0), "leaves out up to 4 samples"),
        (9, {"batch_size": 3, "accumulate": 2}, (1, 0), "goes on with the next sample"),
    ],
)
@pytest.mark.parametrize("make", [Stream, Counted])
def test_source_in_an_order_of_its_own_goes_on_with_the_next_whole_window(
    tmp_path: Path, make: Any, steps: int, settings: Any, first: tuple[int, int], told: str
) -> None:
    fit(tmp_path, data=make(), policy=Constant(), max_steps=steps)
    trainer, seen = resume(
        tmp_path, ",".join(settings), data=make(), policy=Constant(), max_steps=steps + 3, **settings
    )
    assert (min(seen.ids), seen.ids[min(seen.ids)][0]) == first
    assert told in note(trainer, "changed")
    assert seen.ended == list(range(trainer.epoch))


@pytest.mark.parametrize("make", [Place, CountedPlace])
def test_source_that_carries_its_state_goes_on_with_the_next_sample_in_whole_windows(tmp_path: Path, make: Any) -> None:
    fit(tmp_path, data=make(), policy=Constant())
    trainer, seen = resume(
        tmp_path, "batch_size,accumulate", data=make(), policy=Constant(), batch_size=40, accumulate=2
    )
    assert seen.ids == {0: list(range(20, 34)), 1: list(range(34)), 2: list(range(34))}
    assert seen.shares == [1.0] * 3
    assert "goes on with the next sample" in note(trainer, "changed")


def test_position_that_was_rounded_is_understood_by_the_resume_after_the_next(tmp_path: Path) -> None:
    fit(tmp_path, data=Stream(), max_steps=9)
    fit(tmp_path, data=Stream(), max_steps=9, accumulate=2, resume="last", changes="accumulate")  # draws nothing
    trainer, seen = fit(tmp_path, data=Stream(), max_steps=10, accumulate=2, resume="last")
    assert (seen.ended, seen.ids[1][0]) == ([0], 0)
    assert trainer.epoch == 1


@pytest.mark.parametrize("now", [Stream, Counted, Samples])
def test_epoch_of_other_data_ends_without_being_read(tmp_path: Path, now: Any) -> None:
    schedule = Scheduled(lambda o: StepLR(o, 1, 0.1), interval="epoch")
    fit_scheduled(tmp_path, schedule, data=Counted(), max_steps=STEPS)
    data = now(50)
    seen = fit_scheduled(tmp_path, schedule, data=data, max_steps=STEPS + 3, resume="last", changes="data")
    assert seen.rates == [pytest.approx(0.1)] * 3
    assert (seen.ended, list(seen.ids)) == ([0], [1])
    assert getattr(data, "reads", 0) <= 20
    again = fit_scheduled(tmp_path, schedule, data=now(50), max_steps=STEPS + 4, resume="last")
    assert (again.ended, list(again.ids)) == ([], [1])


def fit_scheduled(run_dir: Path, policy: Policy, *, data: Any, max_steps: int, **more: Any) -> Seen:
    """A run whose policy brings its optimizer and schedule."""
    seen = Seen()
    trainer = Trainer("cpu", run_dir=run_dir, batch_size=4, seed=7, max_steps=max_steps, callbacks=[seen])
    trainer.fit(policy, data, **more)
    return seen


@pytest.mark.parametrize("changes", ["data", "statistics"])
def test_statistics_are_those_of_the_run_unless_new_ones_are_asked_for(tmp_path: Path, changes: str) -> None:
    fit(tmp_path, data=Samples(mean=1.0), policy=Normalised())
    trainer, seen = resume(tmp_path, changes, data=Samples(mean=2.0), policy=Normalised())
    assert float(saved(tmp_path, STEPS + 3).model["mean"]) == (1.0 if changes == "data" else 2.0)
    assert list(seen.ids) == [1 if changes == "data" else 0]
    assert "as it was" in note(trainer, "kept") if changes == "data" else "as it is now" in note(trainer, "reset")


def test_plain_settings_change_freely_and_the_plan_lists_them(tmp_path: Path) -> None:
    fit(tmp_path)
    trainer, _ = fit(tmp_path, resume="last", max_steps=STEPS + 1, clip_norm=0.5, log_every=7, val_every=9, tf32=False)
    assert note(trainer, "changed") == (
        f"changed: max_steps was {STEPS} and is now {STEPS + 1}; clip_norm was None and is now 0.5; "
        "val_every was None and is now 9; log_every was 50 and is now 7; tf32 was True and is now False"
    )


def test_new_statistics_are_converted_as_those_of_a_new_run_are(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"precision": "bf16-true", "optimizer": lambda p: SGD(p, lr=0.01)}
    fit(tmp_path, data=Samples(mean=1.0), policy=Subtracting(), **settings)
    policy = Subtracting()
    trainer, _ = resume(tmp_path, "statistics", data=Samples(mean=2.0), policy=policy, **settings)
    assert trainer.step == STEPS + 3
    assert (policy.mean.dtype, float(policy.mean)) == (torch.bfloat16, 2.0)


def test_new_statistics_are_those_of_the_averaged_weights_too(tmp_path: Path) -> None:
    fit(tmp_path, data=Samples(mean=1.0), policy=Normalised(), callbacks=[EMA()])
    trainer, _ = resume(tmp_path, "statistics", data=Samples(mean=2.0), policy=Normalised(), callbacks=[EMA()])
    after = saved(tmp_path, STEPS + 3)
    assert (float(after.model["mean"]), float(after.models["ema"]["mean"])) == (2.0, 2.0)
    assert trainer.step == STEPS + 3


def test_policy_that_takes_no_statistics_is_not_said_to_have_new_ones(tmp_path: Path) -> None:
    fit(tmp_path, data=Samples(mean=1.0))
    trainer, _ = resume(tmp_path, "statistics", data=Samples(mean=2.0))
    assert "Policy as it is, which has no set_statistics() to take any" in note(trainer, "kept")
    assert [text for text in trainer.plan.notes if text.startswith("reset:")] == []


def test_same_run_reports_no_change_and_takes_a_name_that_is_not_needed(tmp_path: Path) -> None:
    fit(tmp_path / "a")
    torch.manual_seed(0)
    policy = Policy()
    fit(tmp_path / "b", max_steps=STEPS + 3, policy=policy)
    again = Policy()
    trainer, _ = fit(tmp_path / "a", resume="last", max_steps=STEPS + 3, changes="lr, accumulate", policy=again)
    assert [n for n in trainer.plan.notes if n.startswith(("kept", "reset"))][1:] == []
    assert_equal(again.state_dict(), policy.state_dict())


@pytest.mark.parametrize(
    ("changes", "message"),
    [("lrr", r"'lrr', which no resume can change\. Did you mean 'lr'"), ("seed", "Use accumulate, batch_size, data")],
)
def test_name_that_no_resume_knows_is_refused(tmp_path: Path, changes: str, message: str) -> None:
    fit(tmp_path)
    with pytest.raises(ConfigError, match=message):
        fit(tmp_path, resume="last", changes=changes)


def test_no_changes_may_be_none(tmp_path: Path) -> None:
    fit(tmp_path)
    trainer, _ = fit(tmp_path, resume="last", changes=None, max_steps=STEPS + 1)
    assert trainer.step == STEPS + 1


def test_changes_without_a_resume_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="for a run that is gone on with"):
        fit(tmp_path, changes=["lr"])
    assert not list(tmp_path.iterdir())


def test_next_resume_compares_with_the_changed_run(tmp_path: Path) -> None:
    fit(tmp_path)
    resume(tmp_path, "lr", lr=1e-3)
    trainer, _ = fit(tmp_path, resume="last", lr=1e-3, max_steps=STEPS + 4)
    assert trainer.step == STEPS + 4


def note(trainer: Trainer, kind: str) -> str:
    """The line of the report that begins with ``kind``."""
    return next(text for text in trainer.plan.notes if text.startswith(f"{kind}:"))


# After an error -----------------------------------------------------------------------------------------------------


class Fails(Callback):
    """Raises in the middle of a window, after so many micro-batches."""

    def __init__(self, after: int) -> None:
        self.after = after

    def on_after_backward(self, trainer: Trainer, policy: nn.Module) -> None:
        trainer.log("mine", 1.0)
        if trainer.micro_batches == self.after:
            raise RuntimeError("the camera is gone")


def fail(run_dir: Path, checkpoint: Checkpoint, after: int = 7) -> None:
    trainer = Trainer(
        "cpu", max_steps=9, batch_size=4, accumulate=2, seed=7, run_dir=run_dir, callbacks=[Fails(after), checkpoint]
    )
    with pytest.raises(RuntimeError, match="the camera is gone") as caught:
        trainer.fit(Policy(), Samples(), optimizer=lambda p: AdamW(p, lr=1e-2))
    assert not getattr(caught.value, "__notes__", [])


def test_error_saves_nothing_unless_that_was_asked_for(tmp_path: Path) -> None:
    fail(tmp_path, Checkpoint(every_steps=2))
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["000002", "last"]


@pytest.mark.parametrize("after", [6, 7])  # in the first micro-batch of a window, and in its second
def test_what_an_error_left_is_kept_marked_and_taken_only_when_named(tmp_path: Path, after: int) -> None:
    fail(tmp_path, Checkpoint(every_steps=2, save_on_exception=True), after)
    folder = tmp_path / "checkpoints" / "000003-exception"
    kept = read_checkpoint(folder)
    counters = {name: kept.manifest["counters"][name] for name in ("step", "micro_batches", "batch_in_epoch")}
    assert counters == {"step": 3, "micro_batches": 6, "batch_in_epoch": 6}  # the window under way comes again
    assert (kept.manifest["exact"], kept.callbacks["means"]) == (False, {})
    assert [entry.name for entry in list_checkpoints(tmp_path)] == ["000002", "000003-exception"]
    assert saved(tmp_path, 2).manifest["exact"] is True
    assert (tmp_path / "checkpoints" / "last").resolve().name == "000002"

    def again(resume: str) -> Trainer:
        trainer = Trainer("cpu", max_steps=9, batch_size=4, accumulate=2, seed=7, run_dir=tmp_path)
        trainer.fit(Policy(), Samples(), optimizer=lambda p: AdamW(p, lr=1e-2), resume=resume)
        return trainer

    trainer = again(str(folder))
    assert trainer.resumed_step == 3
    assert any("not bit for bit the run that was begun" in text for text in trainer.plan.notes)
    assert folder.exists()
    assert again("last").resumed_step == 9


# Content that makes no sense, with the checksums that belong to it ---------------------------------------------------


@pytest.mark.parametrize(
    ("file", "keys", "value", "message"),
    [
        ("training_state/scaler_state.json", ["_growth_tracker"], 2**80, "the state of the loss scale cannot be taken"),
        ("training_state/callbacks.json", ["means"], {"train/loss": 3}, "the log cannot be taken back: TypeError"),
        ("training_state/callbacks.json", ["outcome"], {"step": 3}, "the log cannot be taken back: TypeError"),
        ("training_state/callbacks.json", ["states", "MetricsLog"], {}, "the state of a callback cannot be taken back"),
    ],
)
def test_content_that_makes_no_sense_is_an_error_that_names_its_part(
    tmp_path: Path, file: str, keys: list[str], value: Any, message: str
) -> None:
    fit(tmp_path, precision=FP16(allow_cpu=True))
    folder = tmp_path / "checkpoints" / f"{STEPS:06d}"
    content = json.loads((folder / file).read_text())
    inner = content
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    (folder / file).write_text(json.dumps(content))
    reseal(folder, file)
    with pytest.raises(CheckpointError, match=message):
        fit(tmp_path, precision=FP16(allow_cpu=True), resume="last", max_steps=STEPS + 1)


def test_average_of_other_weights_is_damage(tmp_path: Path) -> None:
    fit(tmp_path, callbacks=[EMA()])
    folder, file = tmp_path / "checkpoints" / f"{STEPS:06d}", "pretrained_model_ema/model.safetensors"
    save_file({name: value[:1].clone() for name, value in saved(tmp_path).models["ema"].items()}, folder / file)
    reseal(folder, file)
    with pytest.raises(CheckpointError, match=r"pretrained_model_ema/model\.safetensors is damaged: its weights are"):
        fit(tmp_path, callbacks=[EMA()], resume="last", max_steps=STEPS + 1)


@pytest.mark.parametrize("metrics", [[1], {"train/loss": "low"}, {"train/loss": {"$tensor": "x"}}])
def test_list_of_checkpoints_calls_metrics_that_make_no_sense_damage(tmp_path: Path, metrics: Any) -> None:
    fit(tmp_path)
    folder, file = tmp_path / "checkpoints" / f"{STEPS:06d}", "training_state/callbacks.json"
    content = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps({**content, "metrics": metrics}))
    reseal(folder, file)
    assert "training_state/callbacks.json is damaged" in list_checkpoints(tmp_path)[-1].damage
