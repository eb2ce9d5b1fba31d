"""A run that is gone on with otherwise than it began: each change refused until it is named, then made and told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import MultiStepLR, OneCycleLR, ReduceLROnPlateau
from toys import assert_equal

from policyfit import Callback, Checkpoint, ConfigError, Trainer, WarmupCosine
from policyfit.trainer.checkpoint import read_checkpoint

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


class Seen(Callback):
    """Sample ids by epoch, and the learning rate of every update."""

    def __init__(self) -> None:
        self.ids: dict[int, list[int]] = {}
        self.rates: list[float] = []

    def on_train_batch_start(self, trainer: Trainer, policy: nn.Module, batch: Any, batch_idx: int) -> None:
        self.ids.setdefault(trainer.epoch, []).extend(batch["index"].tolist())

    def on_before_optimizer_step(self, trainer: Trainer, policy: nn.Module, optimizer: Any) -> None:
        self.rates.append(float(optimizer.param_groups[0]["lr"]))


def cosine(optimizer: Any) -> Any:
    return WarmupCosine(optimizer, warmup_steps=3, total_steps=20)


def fit(
    run_dir: Path, *, data: Any = None, policy: Any = None, schedule: Any = cosine, resume: Any = None,
    changes: Any = (), optimizer: Any = None, lr: float = 1e-2, weight_decay: float = 0.0, **settings: Any,
) -> tuple[Trainer, Seen]:  # fmt: skip
    seen = Seen()
    settings = {"max_steps": STEPS, "batch_size": 4, "seed": 7, **settings}
    trainer = Trainer("cpu", run_dir=run_dir, callbacks=[seen, Checkpoint(every_steps=1)], **settings)
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
    assert "optimizer 0: lr was 0.0025 and is now 0.00025" in note(trainer, "changed")
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
    assert "samples_per_epoch was 34 and is now 50" in note(trainer, "changed")
    assert "the next epoch" in note(trainer, "reset")


@pytest.mark.parametrize("changes", ["data", "statistics"])
def test_statistics_are_those_of_the_run_unless_new_ones_are_asked_for(tmp_path: Path, changes: str) -> None:
    fit(tmp_path, data=Samples(mean=1.0), policy=Normalised())
    trainer, seen = resume(tmp_path, changes, data=Samples(mean=2.0), policy=Normalised())
    assert float(saved(tmp_path, STEPS + 3).model["mean"]) == (1.0 if changes == "data" else 2.0)
    assert list(seen.ids) == [0]  # the samples are the same
    assert "as it was" in note(trainer, "kept") if changes == "data" else "as it is now" in note(trainer, "reset")


def test_plain_settings_change_freely_and_the_plan_lists_them(tmp_path: Path) -> None:
    fit(tmp_path)
    trainer, _ = fit(tmp_path, resume="last", max_steps=STEPS + 1, clip_norm=0.5)
    changed = f"changed: max_steps was {STEPS} and is now {STEPS + 1}; clip_norm was None and is now 0.5"
    assert note(trainer, "changed") == changed


def test_same_run_reports_no_change_and_takes_a_name_that_is_not_needed(tmp_path: Path) -> None:
    fit(tmp_path / "a")
    torch.manual_seed(0)
    policy = Policy()
    fit(tmp_path / "b", max_steps=STEPS + 3, policy=policy)
    again = Policy()
    trainer, _ = fit(tmp_path / "a", resume="last", max_steps=STEPS + 3, changes="lr,data", policy=again)
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
        if trainer.micro_batches == self.after:
            raise RuntimeError("the camera is gone")


def fail(run_dir: Path, checkpoint: Checkpoint) -> None:
    trainer = Trainer(
        "cpu", max_steps=9, batch_size=4, accumulate=2, seed=7, run_dir=run_dir, callbacks=[Fails(7), checkpoint]
    )
    with pytest.raises(RuntimeError, match="the camera is gone") as caught:
        trainer.fit(Policy(), Samples(), optimizer=lambda p: AdamW(p, lr=1e-2))
    assert not getattr(caught.value, "__notes__", [])


def test_error_saves_nothing_unless_that_was_asked_for(tmp_path: Path) -> None:
    fail(tmp_path, Checkpoint(every_steps=2))
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["000002", "last"]


def test_what_an_error_left_is_kept_marked_and_taken_only_when_named(tmp_path: Path) -> None:
    fail(tmp_path, Checkpoint(every_steps=2, save_on_exception=True))
    folder = tmp_path / "checkpoints" / "000003-exception"
    manifest = read_checkpoint(folder).manifest
    assert (manifest["exact"], manifest["counters"]["step"], manifest["counters"]["micro_batches"]) == (False, 3, 7)
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
