"""A run killed anywhere and resumed is the run that was never killed, bit for bit."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from damage import change
from forgery import reseal
from run_parts import BASE, policyfit
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import ReduceLROnPlateau
from toys import assert_equal

from policyfit import (
    FP16,
    Callback,
    CallbackError,
    Checkpoint,
    CheckpointError,
    ConfigError,
    MetricsLog,
    Trainer,
    WarmupCosine,
    load,
)
from policyfit.trainer import state
from policyfit.trainer.checkpoint import read_checkpoint

PRECISIONS = ("no", "bf16", "fp16")


class Augmented:
    """Samples drawn with noise from all three host streams, as augmentation would."""

    def __init__(self, n: int = 22) -> None:
        self.x = torch.randn(n, 6, generator=torch.Generator().manual_seed(5))
        self.reads: list[int] = []

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.reads.append(index)
        noise = torch.rand(6) * 0.1 + random.random() * 0.1 + float(np.random.rand()) * 0.1
        return {"x": self.x[index] + noise, "index": torch.tensor(index)}


class Policy(nn.Module):
    """Dropout, BatchNorm, and an overflow now and then that depends on the weights' own randomness."""

    def __init__(self, overflows: float = 0.15) -> None:
        super().__init__()
        self.overflows = overflows
        self.net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Dropout(0.3), nn.Linear(16, 3))

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        out = self.net(batch["x"])
        loss = out.float().square().mean()
        factor = torch.where(torch.rand(()) < self.overflows, float("inf"), 1.0)
        return loss * factor, {"spread": out.float().std()}


class Recorder(Callback):
    """Sample ids and losses of every micro-batch; dies at one of them if told to."""

    def __init__(self, die_at: int | None = None) -> None:
        self.die_at, self.seen = die_at, list[tuple[int, list[int]]]()

    def on_train_batch_end(self, trainer: Trainer, policy: nn.Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append((trainer.epoch, batch["index"].tolist()))
        if trainer.micro_batches == self.die_at:
            os.kill(os.getpid(), signal.SIGKILL)


def start(run_dir: Path, precision: str, recorder: Recorder, *, accumulate: int = 1, workers: int = 0,
          resume: str | None = None, **settings: Any) -> Trainer:  # fmt: skip
    strategy: Any = (
        FP16({"init_scale": 256.0, "growth_interval": 4}, allow_cpu=True) if precision == "fp16" else precision
    )
    trainer = Trainer(
        "cpu", strategy, max_steps=17, batch_size=4, accumulate=accumulate, workers=workers, clip_norm=1.0, seed=7,
        log_every=4, run_dir=run_dir, callbacks=[recorder, Checkpoint(every_steps=3, background=False)], **settings,
    )  # fmt: skip
    torch.manual_seed(0)
    policy = Policy(overflows=0.15 / accumulate)
    trainer.fit(
        policy, Augmented(), resume=resume, optimizer=lambda p: AdamW(p, lr=1e-2),
        schedule=lambda o: WarmupCosine(o, warmup_steps=5, total_steps=17),
    )  # fmt: skip
    return trainer


def everything(trainer: Trainer) -> dict[str, Any]:
    """All that a run is: what a checkpoint holds, and the streams."""
    saved = state.capture(trainer._active, {})
    records = [json.loads(line) for line in (trainer.run_dir / "metrics.jsonl").read_text().splitlines()]
    records = [r for r in records if r.get("event") != "note"]  # said at every start, also at a resume
    return {
        "model": saved.model,
        "optimizers": json.dumps(saved.optimizers, default=lambda t: t.tolist()),
        "schedules": saved.schedules,
        "scaler": saved.scaler,
        "counters": saved.manifest["counters"],
        "rng": saved.rng,
        "records": [{k: v for k, v in r.items() if not k.endswith("_per_s")} for r in records],
    }


def run_and_die(run_dir: Path, **arguments: Any) -> None:
    """The run in a child that SIGKILLs itself."""
    child = os.fork()
    if child == 0:
        try:
            start(run_dir, **arguments)
        finally:
            os._exit(99)  # only reached when it did not die
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGKILL


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("accumulate", "workers"), [(1, 0), (3, 0), (1, 2)])
def test_a_run_killed_and_resumed_equals_the_uninterrupted_one_bit_for_bit(
    precision: str, accumulate: int, workers: int, tmp_path: Path
) -> None:
    straight = Recorder()
    reference = everything(start(tmp_path / "straight", precision, straight, accumulate=accumulate, workers=workers))
    assert reference["counters"]["skipped"] > 0
    for die_at in (4 * accumulate, 7 * accumulate + 1, 16 * accumulate):
        run_dir = tmp_path / f"killed-{die_at}"
        run_and_die(run_dir, precision=precision, recorder=Recorder(die_at), accumulate=accumulate, workers=workers)
        torch.manual_seed(123)  # whatever the streams are, the checkpoint's come back
        resumed = Recorder()
        trainer = start(run_dir, precision, resumed, accumulate=accumulate, workers=workers, resume="last")
        found = everything(trainer)
        assert_equal(found.pop("model"), reference["model"])
        assert_equal(found.pop("rng"), reference["rng"])
        assert found == {k: v for k, v in reference.items() if k not in ("model", "rng")}
        assert straight.seen[-len(resumed.seen) :] == resumed.seen


class Records(Callback):
    """Keeps what was logged after a step: which metrics, and of which step."""

    def __init__(self, after: int) -> None:
        self.after, self.kept = after, list[dict[str, Any]]()

    def on_train_batch_start(self, trainer: Trainer, policy: nn.Module, batch: Any, batch_idx: int) -> None:
        if trainer.step == 5:
            self.kept.append({"known in step 5": trainer.metrics["train/loss"]})

    def on_log(self, trainer: Trainer, policy: nn.Module, record: Mapping[str, Any]) -> None:
        if trainer.step > self.after and "event" not in record:
            self.kept.append({name: value for name, value in record.items() if not name.endswith("per_s")})


class Stops(Callback):
    def __init__(self, step: int | None) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Trainer, policy: nn.Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.step == self.step:
            trainer.stop("enough")


@pytest.mark.parametrize("monitor", ["val/loss", "train/loss"])
def test_what_is_logged_after_a_resume_at_an_epochs_end_is_what_the_straight_run_logs(
    monitor: str, tmp_path: Path
) -> None:
    # The epoch ends with a validation at step 4, between the logs of 3 and 6, and the schedule looks at a metric there.
    def fit(
        run_dir: Path, resume: Path | str | None = None, *, steps: int = 8, stops_at: int | None = None
    ) -> list[dict[str, Any]]:
        torch.manual_seed(0)
        policy: Any = Policy(overflows=0.0)
        optimizer = AdamW(policy.parameters(), lr=0.1)
        plateau = {"scheduler": ReduceLROnPlateau(optimizer), "monitor": monitor}
        policy.configure_optimizers = lambda: ([optimizer], [plateau])
        records = Records(after=4)
        callbacks = [records, Stops(stops_at), Checkpoint(every_steps=4, keep=None, background=False)]
        trainer = Trainer(
            "cpu", max_steps=steps, batch_size=4, val_every=2, log_every=3, seed=3, run_dir=run_dir, callbacks=callbacks
        )
        trainer.fit(policy, Augmented(16), Augmented(4), resume=resume)
        return records.kept

    straight = fit(tmp_path / "straight")
    assert [record.get("step") for record in straight] == [None, 6, 6, 8, 8]
    assert fit(tmp_path / "other", tmp_path / "straight" / "checkpoints" / "000004") == straight
    fit(tmp_path / "stopped", stops_at=5)
    fit(tmp_path / "longer", steps=5)
    for ended in ("stopped", "longer"):  # they have logged step 5, and go on as if they had not
        assert fit(tmp_path / ended, "last") == straight


class Looks(Callback):
    """Saves in the middle of a window."""

    def __init__(self, path: Path | None) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Trainer, policy: nn.Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 4:
            trainer.save_checkpoint(self.path, exact=False)


class AtEpochEnds(Callback):
    """Logs which epoch has ended."""

    def on_train_epoch_end(self, trainer: Trainer, policy: nn.Module) -> None:
        trainer.log("ended", float(trainer.epoch))


def test_a_stop_in_the_last_update_of_the_last_epoch_leaves_the_end_of_the_epoch_to_the_resume(tmp_path: Path) -> None:
    def fit(name: str, stops_at: int | None = None, resume: str | None = None) -> list[tuple[Any, ...]]:
        callbacks = [AtEpochEnds(), Stops(stops_at), Checkpoint(), MetricsLog()]
        trainer = Trainer(
            "cpu", max_epochs=2, batch_size=4, log_every=50, seed=0, run_dir=tmp_path / name, callbacks=callbacks
        )
        trainer.fit(Policy(overflows=0.0), Augmented(8), resume=resume)
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        return [(r["step"], r["epoch"], r.get("ended")) for r in map(json.loads, lines) if "lr" in r]

    assert fit("straight") == [(4, 2, 0.5)]
    assert fit("stopped", stops_at=4) == [(4, 1, 0.0)]
    assert fit("stopped", resume="last")[-1] == (4, 2, 0.5)


def test_the_record_at_the_end_stands_once_also_where_the_last_step_is_saved_before_it(tmp_path: Path) -> None:
    for resume in (None, "last"):
        callbacks = [Checkpoint(every_steps=4), MetricsLog()]
        trainer = Trainer(
            "cpu", max_steps=4, batch_size=4, log_every=3, seed=0, run_dir=tmp_path / "run", callbacks=callbacks
        )
        trainer.fit(Policy(overflows=0.0), Augmented(), resume=resume)
        records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
        assert [record["step"] for record in records if "lr" in record] == [3, 4]


def test_what_is_saved_inside_a_window_is_gone_on_with_by_its_own_path_alone(tmp_path: Path) -> None:
    def fit(name: str, look: Path | None) -> Trainer:
        callbacks = [Looks(look), Checkpoint(every_steps=1)]
        trainer = Trainer(
            "cpu", max_steps=2, accumulate=3, batch_size=2, seed=0, run_dir=tmp_path / name, callbacks=callbacks
        )
        trainer.fit(Policy(overflows=0.0), Augmented())
        return trainer

    with pytest.raises(CallbackError, match=r"what is not exact is not to be the newest checkpoint of the run\.\nGive"):
        fit("without", None)
    assert (tmp_path / "without" / "checkpoints" / "last").readlink() == Path("000001")
    fit("with", tmp_path / "with" / "look")
    saved = sorted(path.name for path in (tmp_path / "with" / "checkpoints").iterdir())
    assert saved == ["000001", "000002", "last"]
    assert not read_checkpoint(tmp_path / "with" / "look").manifest["exact"]


def test_no_sample_of_before_the_checkpoint_is_read_again(tmp_path: Path) -> None:
    start(tmp_path / "run", "no", Recorder())
    data = Augmented()
    trainer = Trainer("cpu", max_steps=19, batch_size=4, clip_norm=1.0, seed=7, run_dir=tmp_path / "run")
    trainer.fit(
        Policy(), data, resume="last", optimizer=lambda p: AdamW(p, lr=1e-2),
        schedule=lambda o: WarmupCosine(o, warmup_steps=5, total_steps=17),
    )  # fmt: skip
    new = trainer.micro_batches - read_checkpoint(trainer.checkpoints()[-2]).manifest["counters"]["micro_batches"]
    assert trainer.step == 19
    assert len(data.reads) <= 4 * new


class Thaws(Callback):
    """The first layer is trained from the second epoch on; the norm behind it is trained until then."""

    def on_fit_start(self, trainer: Trainer, policy: nn.Module) -> None:
        policy.get_submodule("net.0").requires_grad_(False)

    def on_train_epoch_start(self, trainer: Trainer, policy: nn.Module) -> None:
        if trainer.epoch == 1:
            policy.get_submodule("net.0").requires_grad_(True)
            policy.get_submodule("net.1").requires_grad_(False)


class Freezes(Callback):
    """The last layer is never trained."""

    def on_fit_start(self, trainer: Trainer, policy: nn.Module) -> None:
        policy.get_submodule("net.4").requires_grad_(False)


def test_what_a_hook_froze_and_thawed_is_so_again_after_a_resume_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    def fit(name: str, steps: int, *callbacks: Callback, resume: str | None = None) -> dict[str, Tensor]:
        trainer = Trainer(
            "cpu", max_steps=steps, batch_size=4, seed=0, run_dir=tmp_path / name, callbacks=[*callbacks, Checkpoint()]
        )
        torch.manual_seed(0)
        policy = Policy(overflows=0.0)
        trainer.fit(policy, Augmented(16), resume=resume)
        return policy.state_dict()

    def warned(name: str) -> bool:
        return "what its hooks froze and thawed afterwards is left" in (tmp_path / name / "metrics.jsonl").read_text()

    straight = fit("straight", 9, Thaws())
    fit("cut", 6, Thaws())  # in the second epoch, each of four updates
    resumed = fit("cut", 9, Thaws(), resume="last")
    assert all(torch.equal(resumed[name], straight[name]) for name in straight)
    assert not warned("cut")
    # What is asked for now is what runs, though it was otherwise before.
    before = fit("other", 6, Thaws())
    after = fit("other", 7, Thaws(), Freezes(), resume="last")
    assert torch.equal(after["net.4.weight"], before["net.4.weight"])
    assert warned("other")
    before = fit("new", 6)
    after = fit("new", 7, Freezes(), resume="last")
    assert torch.equal(after["net.4.weight"], before["net.4.weight"])
    assert not torch.equal(after["net.0.weight"], before["net.0.weight"])
    assert not warned("new")  # no hook froze anything afterwards


def test_a_run_resumed_at_its_end_makes_no_further_step(tmp_path: Path) -> None:
    ended = start(tmp_path / "run", "bf16", Recorder())
    before, metrics = everything(ended), dict(ended.metrics)
    resumed = Recorder()
    trainer = start(tmp_path / "run", "bf16", resumed, resume="last")
    assert trainer.step == 17
    assert resumed.seen == []
    assert_equal(everything(trainer)["model"], before["model"])
    assert trainer.metrics == metrics  # those of step 17, and not of the record before


def test_resume_takes_a_run_folder_a_checkpoint_folder_and_last_alike(tmp_path: Path) -> None:
    start(tmp_path / "run", "no", Recorder())
    for path in ("run", "run/checkpoints", "run/checkpoints/last", "run/checkpoints/000015"):
        trainer = Trainer("cpu", max_steps=17, batch_size=4, seed=7, run_dir=tmp_path / "other" / path)
        trainer.fit(
            Policy(), Augmented(), resume=tmp_path / path, optimizer=lambda p: AdamW(p, lr=1e-2),
            schedule=lambda o: WarmupCosine(o, warmup_steps=5, total_steps=17),
        )  # fmt: skip
        assert trainer.resumed_step == (15 if path.endswith("15") else 17)


def test_a_fresh_run_refuses_a_folder_that_holds_one_and_changes_nothing(tmp_path: Path) -> None:
    start(tmp_path / "run", "no", Recorder())
    before = {p: p.read_bytes() for p in sorted((tmp_path / "run").rglob("*")) if p.is_file()}
    with pytest.raises(ConfigError, match=r"already holds a run.*\n.*resume='last'"):
        start(tmp_path / "run", "no", Recorder())
    assert {p: p.read_bytes() for p in sorted((tmp_path / "run").rglob("*")) if p.is_file()} == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 8}, "began with seed=7"),
        ({"batch_size": 8}, "batch_size was 4 and is now 8"),
        ({"accumulate": 2}, "accumulate was 1 and is now 2"),
    ],
)
def test_what_would_change_the_samples_is_refused_at_resume(
    change: dict[str, int], message: str, tmp_path: Path
) -> None:
    start(tmp_path / "run", "no", Recorder())
    settings = {"max_steps": 20, "batch_size": 4, "seed": 7, "run_dir": tmp_path / "run", **change}
    with pytest.raises(ConfigError, match=message):
        Trainer("cpu", **settings).fit(Policy(), Augmented(), resume="last")  # type: ignore[arg-type]


def resumed(run_dir: Path, policy: nn.Module, lr: float = 1e-2, total_steps: int = 17) -> None:
    Trainer("cpu", max_steps=20, batch_size=4, seed=7, run_dir=run_dir).fit(
        policy, Augmented(), resume="last", optimizer=lambda p: AdamW(p, lr=lr),
        schedule=lambda o: WarmupCosine(o, warmup_steps=5, total_steps=total_steps),
    )  # fmt: skip


def test_a_checkpoint_of_other_shapes_is_refused_naming_the_parameters(tmp_path: Path) -> None:
    start(tmp_path / "run", "no", Recorder())
    wider = Policy()
    wider.net[4] = nn.Linear(16, 4)
    with pytest.raises(CheckpointError, match=r"do not fit Policy.*net\.4\.weight"):
        resumed(tmp_path / "run", wider)


class Other(Policy):
    """Of the same shapes."""


def test_a_checkpoint_of_another_policy_is_refused_although_its_weights_would_fit(tmp_path: Path) -> None:
    start(tmp_path / "run", "no", Recorder())
    with pytest.raises(ConfigError, match=r"run that trains .*\.Policy, and this one trains .*\.Other"):
        resumed(tmp_path / "run", Other())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lr": 1e-3}, r"optimizer 0: lr was 0\.01 and is now 0\.001\."),
        ({"total_steps": 20}, "schedule 0: total_steps was 17 and is now 20"),
    ],
)
def test_another_curve_of_the_learning_rate_is_refused_at_resume(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    start(tmp_path / "run", "no", Recorder())
    with pytest.raises(ConfigError, match=message):
        resumed(tmp_path / "run", Policy(), **change)


def test_another_optimizer_is_refused_at_resume(tmp_path: Path) -> None:
    start(tmp_path / "run", "no", Recorder())
    with pytest.raises(ConfigError, match="optimizer 0: class was AdamW and is now SGD"):
        Trainer("cpu", max_steps=20, batch_size=4, seed=7, run_dir=tmp_path / "run").fit(
            Policy(), Augmented(), resume="last", optimizer=lambda p: SGD(p, lr=1e-2),
            schedule=lambda o: WarmupCosine(o, warmup_steps=5, total_steps=17),
        )  # fmt: skip


@pytest.mark.parametrize("before", PRECISIONS)
@pytest.mark.parametrize("after", PRECISIONS)
def test_precision_can_change_at_resume_and_the_plan_says_so(before: str, after: str, tmp_path: Path) -> None:
    start(tmp_path / "run", before, Recorder())
    trainer = start(tmp_path / "run", after, Recorder(), resume=str(tmp_path / "run" / "checkpoints" / "000015"))
    assert trainer.step == 17
    moved = [p for group in trainer.optimizers[0].param_groups for p in group["params"]]
    assert {t.dtype for p in moved for t in (p, trainer.optimizers[0].state[p]["exp_avg"])} == {torch.float32}
    told = [note for note in trainer.plan.notes if not note.startswith("resumed from")]
    scale = "; the loss scale" if before == after == "fp16" else ""
    kept = f"kept: the weights; the state of the optimizer{scale}; the position in the data; "
    kept += "the state of ScaleMonitor, MetricsLog; the random streams"
    said = [f"changed: precision was {before} and is now {after}", kept]
    said += ["reset: the loss scale"] if after == "fp16" else []
    assert told == ([kept] if before == after else said)


def test_device_can_change_at_resume_and_the_plan_says_what_is_not_exact(tmp_path: Path) -> None:
    straight, resumed, checkpoint = Recorder(), Recorder(), tmp_path / "run/checkpoints/000015"
    start(tmp_path / "run", "no", straight)
    change(checkpoint / "manifest.json", lambda text: text.replace(b'"device": "cpu"', b'"device": "cuda"'))
    reseal(checkpoint, "manifest.json")
    trainer = start(tmp_path / "run", "no", resumed, resume=str(checkpoint))
    assert trainer.step == 17
    assert resumed.seen == straight.seen[-len(resumed.seen) :]
    assert "changed: device was cuda and is now cpu" in trainer.plan.notes
    assert "reset: the device's random stream, so it is not bit for bit the same run" in trainer.plan.notes


def test_there_must_be_something_to_resume(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        start(tmp_path / "nothing", "no", Recorder(), resume="last")
    assert not (tmp_path / "nothing").exists()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_auto_begins_where_nothing_is_and_goes_on_where_a_checkpoint_is(tmp_path: Path) -> None:
    straight = everything(start(tmp_path / "straight", "no", Recorder()))
    run_dir = tmp_path / "run"
    run_and_die(run_dir, precision="no", recorder=Recorder(2), resume="auto")  # before the first checkpoint
    assert not list(run_dir.glob("checkpoints/[0-9]*"))
    run_and_die(run_dir, precision="no", recorder=Recorder(8), resume="auto")
    trainer = start(run_dir, "no", Recorder(), resume="auto")
    assert trainer.resumed_step == 6
    found = everything(trainer)
    assert_equal(found["model"], straight["model"])
    assert found["records"] == straight["records"]


def test_auto_needs_a_folder_to_look_in() -> None:
    with pytest.raises(ConfigError, match=r"needs one\.\nGive run_dir"):
        Trainer("cpu", max_steps=1).fit(Policy(), Augmented(), resume="auto")


class Tempered(Policy):
    """Keeps a number that follows from a weight, which torch's own hook brings up to date after every load."""

    def __init__(self) -> None:
        super().__init__(overflows=0.0)
        self.log_alpha = nn.Parameter(torch.zeros(()))
        self.used: list[tuple[float, float]] = []
        self.refresh()
        self.register_load_state_dict_post_hook(lambda policy, _: policy.refresh())  # type: ignore[no-untyped-call]

    def refresh(self) -> None:
        self.alpha = self.log_alpha.exp().item()

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        self.used.append((self.alpha, self.log_alpha.exp().item()))
        loss, metrics = super().forward(batch)
        return loss + (self.log_alpha - 1).square(), metrics


def test_what_a_policy_derives_from_its_weights_is_right_after_resume_and_load(tmp_path: Path) -> None:
    def fit(policy: Tempered, steps: int, resume: str | None) -> None:
        trainer = Trainer("cpu", max_steps=steps, batch_size=4, seed=7, run_dir=tmp_path / "run")
        trainer.fit(policy, Augmented(), optimizer=lambda p: SGD(p, lr=0.1), resume=resume)

    fit(Tempered(), 3, None)
    resumed, loaded = Tempered(), Tempered()
    fit(resumed, 4, "last")
    load(tmp_path / "run/checkpoints/000003", device="cpu", policy=loaded)
    kept, right = resumed.used[0]
    assert kept == right == loaded.alpha == loaded.log_alpha.exp().item() != 1.0


def test_overrides_at_a_resume_are_those_of_the_class_of_the_run() -> None:
    Path("base.yaml").write_text(BASE.replace("eval:", "eval: null  #"))
    more = ["--policy=run_parts.Takes", "--policy.anything=3", "--trainer.run_dir=done"]
    assert policyfit("fit", "base.yaml", *more).code == 0
    said = policyfit("fit", "--resume=done", "--policy.anythin=4")
    assert said.code == 2
    assert "policy.init_args.anythin is not a valid key. Did you mean policy.init_args.anything?" in said.err
    assert policyfit("fit", "--resume=done", "--policy.anything=4", "--trainer.max_steps=3").code == 0
    assert "anything: 4" in Path("done/config.yaml").read_text()


@pytest.mark.parametrize("resume", [True, False, 3, "latest"])
def test_what_names_no_run_is_refused_with_the_word_for_the_newest(resume: Any) -> None:
    with pytest.raises(ConfigError, match=r"resume must be .*\nUse 'last' for the newest checkpoint"):
        Trainer("cpu").fit(Tempered(), Augmented(), resume=resume)
