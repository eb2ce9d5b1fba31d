"""Runs of several processes: the same run as one, agreed by all, whatever happens to one of them."""

from __future__ import annotations

import math
import os
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import outcomes_of, run
from ranks import OPTIMIZERS, Fails, Policy, Stops, train
from torch import Tensor

from policyfit import EMA, Callback, Checkpoint, ConfigError, DistributedError, Trainer, load
from policyfit.trainer.checkpoint import read_checkpoint


def weights(result: dict[str, Any]) -> dict[str, Tensor]:
    """Those of the last checkpoint, whole."""
    return read_checkpoint(Path(result["last"])).model


def close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 2e-6) -> None:
    assert list(found) == list(expected)
    for name, value in found.items():
        assert float((value - expected[name]).abs().max()) <= tolerance, name


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def job(folder: str, distributed: str, settings: dict[str, Any]) -> dict[str, Any]:
    return train(f"{folder}/run", distributed, **settings)


def alone(folder: Path, **settings: Any) -> dict[str, Any]:
    """One process that sees as many samples in an update as two do."""
    return train(str(folder / "alone"), "none", **{"batch_size": 8, **settings})


@pytest.mark.parametrize("distributed", ["ddp", "fsdp"])
def test_two_ranks_make_the_run_of_one_with_the_same_global_batch(tmp_path: Path, distributed: str) -> None:
    settings = {"steps": 13, "val": True, "val_every": 6, "ema": True, "accumulate": 1}
    one = alone(tmp_path, **settings)
    ranks = run(job, str(tmp_path), distributed, settings)
    for step, ids in enumerate(one["ids"]):
        together = ranks[0]["ids"][step] + ranks[1]["ids"][step]
        assert ids == together[: len(ids)]  # what is more pads an epoch's end, and counts for nothing
    close(weights(ranks[0]), weights(one))
    averages = [read_checkpoint(Path(result["last"])).models["ema"] for result in (ranks[0], one)]
    close(averages[0], averages[1])
    assert ranks[0]["records"] == ranks[1]["records"]
    for found, expected in zip(ranks[0]["records"], one["records"], strict=True):
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert ranks[0]["step"] == ranks[1]["step"] == one["step"]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("distributed", ["ddp", "fsdp"])
def test_overflow_on_one_rank_skips_on_all_and_moves_the_scale_of_all(
    tmp_path: Path, distributed: str, optimizer: str
) -> None:
    settings = {"precision": "fp16", "optimizer": optimizer, "poisoned": (3, 17), "steps": 6}
    one = alone(tmp_path, **settings)
    ranks = run(job, str(tmp_path), distributed, settings)
    assert ranks[0]["outcomes"] == ranks[1]["outcomes"] == one["outcomes"]
    assert ranks[0]["skipped"] == one["skipped"] > 0
    close(weights(ranks[0]), weights(one), 2e-3)  # 16 bits round each rank's half differently


def edited(folder: str, distributed: str, precision: str) -> dict[str, Any]:
    from ranks import Edits

    return train(f"{folder}/run", distributed, precision=precision, steps=5, extra=[Edits(rank=1, update=2)])


@pytest.mark.parametrize("precision", ["no", "fp16"])
@pytest.mark.parametrize("distributed", ["ddp", "fsdp"])
def test_gradient_that_goes_bad_after_the_reduction_on_one_rank_skips_on_all(
    tmp_path: Path, distributed: str, precision: str
) -> None:
    ranks = run(edited, str(tmp_path), distributed, precision)
    assert ranks[0]["outcomes"] == ranks[1]["outcomes"]
    assert [reason for _, reason, _ in ranks[0]["outcomes"]] == [None, None, "non_finite", None, None, None]
    scales = {scale for *_, scale in ranks[0]["outcomes"]}
    assert scales == ({None} if precision == "no" else {256.0, 512.0})  # an edit says nothing about the scale
    assert all(math.isfinite(float(value.sum())) for value in weights(ranks[0]).values())


def stopped(folder: str, distributed: str, rank: int) -> Any:
    try:
        train(f"{folder}/run", distributed, steps=30, extra=[Stops(rank=rank, after=3)])
    except SystemExit as end:
        return end.code, read_checkpoint(Path(f"{folder}/run/checkpoints/last")).manifest["counters"]["step"]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("distributed", ["ddp", "fsdp"])
def test_stop_that_one_rank_asks_for_ends_all_after_the_same_update(
    tmp_path: Path, distributed: str, rank: int
) -> None:
    assert run(stopped, str(tmp_path), distributed, rank) == [(143, 5), (143, 5)]


def failed(folder: str, distributed: str, where: str) -> dict[str, Any]:
    extra = [] if where == "data" else [Fails(rank=1, hook=where, micro_batch=6)]
    try:
        train(f"{folder}/run", distributed, steps=30, extra=extra, fails_at=20 if where == "data" else None)
    except BaseException as error:
        return {"error": type(error).__name__, "text": str(error), "own": getattr(error, "of_this_rank", False)}
    return {}


# Where rank 1 fails, at which draw; the update after which all end, and the step that is then saved.
PLACES = [
    ("on_fit_start", 0, None, None),
    ("on_train_epoch_start", 6, 6, 6),
    ("on_train_batch_start", 3, 5, 3),
    ("on_train_batch_start", 5, 6, 5),  # in the last window of an epoch, at whose end all know
    ("on_before_backward", 6, 8, 6),
    ("on_after_backward", 6, 8, 6),
    ("on_before_optimizer_step", 4, 5, 3),
    ("on_before_zero_grad", 4, 4, 4),
    ("on_train_batch_end", 3, 3, 3),  # the others go on to a validation
    ("on_train_batch_end", 5, 6, 5),
    ("on_update_end", 4, 4, 4),
    ("on_log", 4, 4, 4),
    ("on_validation_start", 3, 3, 3),
    ("on_validation_batch_end", 3, 3, 3),
    ("on_validation_end", 3, 3, 3),
    ("on_due", 3, 3, 3),
    ("on_save_checkpoint", 4, 4, 2),  # what fails in a save is not saved
    ("on_train_epoch_end", 6, 6, 6),
    ("on_log", 9, 9, 9),  # after the last step, where ranks meet as well
    ("on_fit_end", 9, None, 8),
]


def failed_everywhere(folder: str, distributed: str) -> list[dict[str, Any]]:
    seen = []
    for number, (hook, draw, *_) in enumerate(PLACES):
        error: BaseException | None = None
        try:
            extra = [Fails(rank=1, hook=hook, micro_batch=draw)]
            train(f"{folder}/{number}", distributed, steps=9, extra=extra, val=True, val_every=3)
        except Exception as raised:
            error = raised
        seen.append({"error": error.__class__, "text": str(error), "own": getattr(error, "of_this_rank", False)})
    return seen


@pytest.mark.parametrize("distributed", ["ddp", "fsdp"])
def test_wherever_one_rank_fails_all_end_after_the_same_update_saved_and_told(tmp_path: Path, distributed: str) -> None:
    others, own = run(failed_everywhere, str(tmp_path), distributed, limit_s=90.0)
    for number, (hook, draw, update, step) in enumerate(PLACES):
        place = f"{hook} at draw {draw}"
        assert (own[number]["error"], own[number]["text"]) == (RuntimeError, "only on this rank"), place
        assert issubclass(others[number]["error"], DistributedError), place
        assert "Rank 1 failed" in others[number]["text"], place
        assert "RuntimeError: only on this rank" in others[number]["text"], place
        if update is not None:
            assert f"so all ended after update {update}:" in others[number]["text"], place
            assert own[number]["own"] is True, place
        last = tmp_path / str(number) / "checkpoints" / "last"
        if step is None:
            assert not last.exists(), place
        else:
            assert read_checkpoint(last).manifest["counters"]["step"] == step, place


def failed_in_a_window_of_three(folder: str, distributed: str) -> dict[str, Any]:
    try:
        extra = [Fails(rank=1, hook="on_train_batch_start", micro_batch=4)]
        train(f"{folder}/run", distributed, steps=30, batch_size=2, accumulate=3, extra=extra, precision="fp16")
    except Exception as error:
        return {"text": str(error)}
    return {}


@pytest.mark.parametrize("distributed", ["ddp", "fsdp"])
def test_rank_that_fails_inside_a_window_stands_in_for_all_of_it(tmp_path: Path, distributed: str) -> None:
    ranks = run(failed_in_a_window_of_three, str(tmp_path), distributed, limit_s=60.0)
    assert "so all ended after update 3: RuntimeError: only on this rank" in ranks[0]["text"]
    saved = read_checkpoint(tmp_path / "run" / "checkpoints" / "last")
    found = {name: saved.manifest["counters"][name] for name in ("step", "skipped", "batch_in_epoch", "micro_batches")}
    assert found == {"step": 1, "skipped": 0, "batch_in_epoch": 3, "micro_batches": 3}  # nothing is left out
    assert saved.manifest["exact"] is False  # random streams went on in the windows that came to nothing
    assert saved.scaler is not None
    assert saved.scaler["scale"] == 256.0  # a failure says nothing about the scale


def test_error_of_data_ends_all_and_the_run_goes_on_once_it_is_mended(tmp_path: Path) -> None:
    ranks = run(failed, str(tmp_path), "ddp", "data", limit_s=40.0)
    texts = [rank["text"] for rank in ranks]
    assert sum("the disk of this rank is gone" in text for text in texts) == 2
    assert sorted(rank["error"] for rank in ranks) == ["DistributedError", "RuntimeError"]
    mended = run(job, str(tmp_path), "ddp", {"steps": 12, "resume": "last"})
    assert "note: it was saved after an error" in mended[0]["plan"]
    straight = run(job, str(tmp_path / "straight"), "ddp", {"steps": 12})
    same(weights(mended[0]), weights(straight[0]))  # this policy draws nothing, and no sample was left out
    for after, all_of_them in zip(mended, straight, strict=True):
        assert after["ids"] == all_of_them["ids"][-len(after["ids"]) :]


# Where the code of rank 1's policy fails, in which forward of windows of two; the update after which all end, and the
# step that is then saved. An epoch has six updates.
BREAKS = [
    ("before", 6, 5, 3),
    ("between", 6, 5, 3),
    ("between", 7, 5, 3),
    ("after", 7, 5, 3),
    ("back", 6, 5, 3),
    ("back", 7, 5, 3),
    ("back", 9, 6, 4),  # the window after it is of one, and an epoch's last
    ("between", 10, 6, 5),
]


def broken(folder: str, distributed: str, batch_size: int) -> list[tuple[str, int, int]]:
    from ranks import Breaks, Samples

    from policyfit.strategies.fsdp import FSDP

    ends = []
    for number, (where, forward, *_) in enumerate(BREAKS):
        trainer = Trainer(
            "cpu", max_steps=30, batch_size=batch_size, accumulate=2, clip_norm=1.0, seed=7,
            run_dir=f"{folder}/{number}", callbacks=[Checkpoint(every_steps=50)],
            distributed=FSDP(shard=2, replicate=2) if distributed == "hsdp" else distributed,
        )  # fmt: skip
        text = ""
        try:
            trainer.fit(Breaks(where, 1, forward, 600), Samples())
        except Exception as error:
            text = str(error)
        ends.append((text, trainer.step, trainer.micro_batches))
    return ends


@pytest.mark.parametrize(("distributed", "ranks"), [("ddp", 2), ("fsdp", 2), ("hsdp", 4)])
def test_wherever_the_policy_of_one_rank_fails_all_end_after_the_same_update_saved(
    tmp_path: Path, distributed: str, ranks: int
) -> None:
    others, own, *_ = run(broken, str(tmp_path), distributed, 4 // ranks, ranks=ranks, limit_s=90.0)
    for number, (where, forward, update, step) in enumerate(BREAKS):
        place = f"{where} in forward {forward}"
        assert own[number] == (f"{where} the blocks of this rank", step, 2 * step), place
        assert others[number][1:] == own[number][1:], place
        assert f"so all ended after update {update}: RuntimeError: {where} the blocks" in others[number][0], place
        saved = read_checkpoint(tmp_path / str(number) / "checkpoints" / "last")
        assert saved.manifest["counters"]["step"] == step, place


def exhausted(folder: str) -> tuple[bool, str]:
    from ranks import Samples

    class Exhausted(Policy):
        held: weakref.ref[Tensor] | None = None

        def forward(self, batch: dict[str, Tensor]) -> Any:
            held = self.first(batch["x"])
            if os.environ["RANK"] == "1" and (batch["index"] == 20).any():
                self.held = weakref.ref(held)
                raise torch.OutOfMemoryError("no room on the device")
            return super().forward(batch)

    policy = Exhausted()
    try:
        Trainer("cpu", max_steps=9, batch_size=4, seed=7, run_dir=folder, distributed="fsdp").fit(policy, Samples())
    except Exception as error:
        return policy.held is not None and policy.held() is None, str(error)
    return False, ""


def test_rank_that_ran_out_of_memory_lets_go_of_what_it_computed_before_it_takes_part(tmp_path: Path) -> None:
    (_, others), (is_free, own) = run(exhausted, str(tmp_path / "run"), limit_s=40.0)
    assert own == "no room on the device"
    assert "Rank 1 failed, so all ended after update" in others
    assert is_free


def torn(folder: str, distributed: str, rank: int, every: int) -> str:
    from ranks import Samples, Tears

    trainer = Trainer(
        "cpu", max_steps=8, batch_size=4, seed=7, run_dir=f"{folder}/run", distributed=distributed,
        callbacks=[Checkpoint(every_steps=every, save_on_exception=True), EMA(0.9)],
    )  # fmt: skip
    try:
        trainer.fit(Policy(), Samples(), optimizer=lambda p: Tears(p, rank))
    except Exception as error:
        return str(error)
    return ""


@pytest.mark.parametrize("rank", [0, 1])
def test_update_that_one_rank_broke_off_is_saved_as_the_others_made_it(tmp_path: Path, rank: int) -> None:
    ends = run(torn, str(tmp_path / "torn"), "ddp", rank, 3, limit_s=40.0)
    assert ends[rank] == "in the middle of a step"
    assert f"Rank {rank} failed, so all ended after update 6: RuntimeError: in the mid" in ends[1 - rank]
    run(torn, str(tmp_path / "straight"), "ddp", 2, 4, limit_s=40.0)
    saved, straight = (
        read_checkpoint(tmp_path / name / "run" / "checkpoints" / "000004") for name in ("torn", "straight")
    )
    assert saved.manifest["counters"]["step"] == 4
    same(saved.model, straight.model)
    same(saved.models["ema"], straight.models["ema"])
    for index, entry in straight.optimizers[0]["state"].items():
        same(saved.optimizers[0]["state"][index], entry)


def test_shard_that_an_optimizer_broke_is_not_saved_and_the_last_checkpoint_stays(tmp_path: Path) -> None:
    first, second = run(torn, str(tmp_path), "fsdp", 1, 3, limit_s=40.0)
    assert second == "in the middle of a step"
    assert "so all ended after update 6: RuntimeError: in the middle of a step" in first
    assert "the weights are whole in no process. The last checkpoint can be gone on with" in first
    checkpoints = tmp_path / "run" / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["000003", "last"]
    assert read_checkpoint(checkpoints / "last").manifest["counters"]["step"] == 3


def killed(folder: str, distributed: str) -> str:
    from ranks import Dies

    try:
        train(f"{folder}/run", distributed, steps=30, extra=[Dies(rank=1, micro_batch=5)])
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("distributed", ["ddp", "fsdp"])
def test_death_of_a_rank_ends_the_others_with_its_number_and_the_run_can_go_on(
    tmp_path: Path, distributed: str
) -> None:
    ranks = outcomes_of(killed, str(tmp_path), distributed, limit_s=60.0)
    assert ranks[1].exit_code == -9
    assert ranks[0].exit_code == 0
    assert ranks[0].value.startswith("DistributedError: ")
    assert "1" in ranks[0].value.splitlines()[0]
    settings = {"steps": 8, "dropout": 0.3}
    del settings["dropout"]
    resumed = run(job, str(tmp_path), distributed, {**settings, "resume": "last"})
    straight = run(job, str(tmp_path / "straight"), distributed, settings)
    same(weights(resumed[0]), weights(straight[0]))


FULL = {"steps": 10, "dropout": 0.3, "precision": "fp16", "norm": True, "ema": True, "accumulate": 2, "batch_size": 2}


@pytest.mark.parametrize("distributed", ["ddp", "fsdp"])
def test_resume_on_as_many_ranks_is_exact(tmp_path: Path, distributed: str) -> None:
    settings = {**FULL, "norm": distributed == "ddp"}
    straight = run(job, str(tmp_path / "straight"), distributed, settings)
    run(job, str(tmp_path), distributed, {**settings, "steps": 5})
    resumed = run(job, str(tmp_path), distributed, {**settings, "resume": "last"})
    same(weights(resumed[0]), weights(straight[0]))
    for mine, theirs in zip(resumed, straight, strict=True):
        assert mine["ids"] == theirs["ids"][-len(mine["ids"]) :]
    mine, theirs = (read_checkpoint(Path(r[0]["last"])) for r in (resumed, straight))
    same(mine.models["ema"], theirs.models["ema"])
    same(mine.rng, theirs.rng)
    same(mine.rng_of_others[0], theirs.rng_of_others[0])
    for index, entry in mine.optimizers[0]["state"].items():
        same(entry, theirs.optimizers[0]["state"][index])
    assert mine.scaler == theirs.scaler


WAYS = [
    ("ddp", 2, "none", 1),
    ("none", 1, "ddp", 2),
    ("fsdp", 2, "none", 1),
    ("ddp", 2, "fsdp", 2),
    ("fsdp", 2, "ddp", 2),
]


@pytest.mark.parametrize(("before", "ranks_before", "after", "ranks_after"), WAYS)
def test_run_goes_on_with_other_ranks_and_says_so(
    tmp_path: Path, before: str, ranks_before: int, after: str, ranks_after: int
) -> None:
    one = alone(tmp_path, steps=9)

    def part(distributed: str, count: int, **settings: Any) -> list[Any]:
        settings |= {"batch_size": 8 // count}
        if count == 1:
            return [train(f"{tmp_path}/run", "none", **settings)]
        return run(job, str(tmp_path), distributed, settings)

    part(before, ranks_before, steps=4)
    results = part(after, ranks_after, steps=9, resume="last")
    close(weights(results[0]), weights(one))
    if ranks_before != ranks_after:
        assert f"ranks were {ranks_before} and are now {ranks_after}" in results[0]["plan"]
    assert load(f"{tmp_path}/run", device="cpu", policy=Policy()).training is False


def test_three_and_four_ranks_load_what_two_saved_in_shards(tmp_path: Path) -> None:
    run(job, str(tmp_path), "fsdp", {"steps": 3, "batch_size": 12})
    for steps, count in ((4, 3), (5, 4)):
        results = run(
            job, str(tmp_path), "fsdp", {"steps": steps, "batch_size": 24 // count, "resume": "last"}, ranks=count
        )
        assert {result["step"] for result in results} == {steps}
    one = alone(tmp_path, steps=5, batch_size=24)
    close(weights(results[0]), weights(one))


def evaluated(folder: str, distributed: str) -> Any:
    from ranks import Rolls

    rolls = Rolls(every=2)
    result = train(f"{folder}/run", distributed, steps=4, extra=[rolls])
    return rolls.reports, [r for r in result["records"] if "rollout/return" in r]


@pytest.mark.parametrize("distributed", ["ddp", "fsdp"])
def test_rollouts_are_shared_and_their_report_is_that_of_one(tmp_path: Path, distributed: str) -> None:
    pytest.importorskip("gymnasium")
    (reports, records), (other, _) = run(evaluated, str(tmp_path), distributed)
    assert reports == other
    assert [report["seeds"] for report in reports] == [list(range(10_000, 10_005))] * 2
    assert len(records) == 2
    expected, _ = evaluated(str(tmp_path / "one"), "none")
    assert [r["lengths"] for r in reports] == [r["lengths"] for r in expected]


def replaying(folder: str) -> str:
    from policyfit import OverflowReport

    try:
        train(f"{folder}/run", "fsdp", steps=2, extra=[OverflowReport(replay=True)])
    except ConfigError as error:
        return str(error)
    return ""


def test_replay_is_refused_where_weights_are_in_shards(tmp_path: Path) -> None:
    assert all("here the weights are in shards" in text for text in run(replaying, str(tmp_path)))
    assert not list(tmp_path.glob("run/*.yaml"))


def lightning(folder: str, distributed: str) -> Any:
    from ranks import LightningPolicy, Samples

    torch.manual_seed(0)
    policy = LightningPolicy()
    trainer = Trainer(
        "cpu", max_steps=4, batch_size=4 if distributed == "ddp" else 8, seed=7, run_dir=f"{folder}/{distributed}",
        distributed=distributed, callbacks=[Checkpoint()],
    )  # fmt: skip
    trainer.fit(policy, Samples())
    return {name: value.tolist() for name, value in policy.state_dict().items()}


def test_gradients_of_training_step_are_averaged_too(tmp_path: Path) -> None:
    first, second = run(lightning, str(tmp_path), "ddp")
    assert first == second
    one = lightning(str(tmp_path), "none")
    for name, value in first.items():
        assert torch.tensor(value) == pytest.approx(torch.tensor(one[name]), abs=2e-6)


def masked(folder: str) -> Any:
    from ranks import Masked, Samples

    torch.manual_seed(0)
    trainer = Trainer(
        "cpu", max_steps=5, batch_size=4, seed=7, run_dir=f"{folder}/run", distributed="ddp", default_callbacks=False
    )
    trainer.fit(Masked(rank=int(os.environ["RANK"])), Samples())
    return trainer.step


def test_rank_whose_loss_has_no_gradient_keeps_nobody_waiting(tmp_path: Path) -> None:
    assert run(masked, str(tmp_path), limit_s=30.0) == [5, 5]


def invalid(folder: str, distributed: str) -> dict[str, Any]:
    try:
        train(f"{folder}/run", distributed, steps=6, val=True, val_every=3, val_fails_at=17)
    except BaseException as error:
        return {"error": type(error).__name__, "text": str(error)}
    return {}


@pytest.mark.parametrize("distributed", ["ddp", "fsdp"])
def test_error_in_the_validation_of_one_rank_ends_all_in_time_and_is_told(tmp_path: Path, distributed: str) -> None:
    ranks = run(invalid, str(tmp_path), distributed, limit_s=60.0)
    assert sorted(rank["error"] for rank in ranks) == ["DistributedError", "RuntimeError"]
    assert all("the disk of this rank is gone" in rank["text"] for rank in ranks)


def kept(folder: str, distributed: str) -> str:
    checkpoint = Checkpoint(every_steps=2, save_on_exception=True)
    try:
        train(f"{folder}/run", distributed, steps=30, extra=[Fails(1, "on_after_backward", 6), checkpoint], own=False)
    except BaseException as error:
        return type(error).__name__
    return ""


@pytest.mark.parametrize("distributed", ["ddp", "fsdp"])
def test_saving_after_an_exception_waits_for_nobody(tmp_path: Path, distributed: str) -> None:
    assert run(kept, str(tmp_path), distributed, limit_s=60.0) == ["DistributedError", "RuntimeError"]
    folders = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir() if not path.name.startswith(".")}
    assert folders == {"000002", "000004", "000006", "last"} | {"000006-exception"}


def test_sharded_run_whose_optimizer_keeps_nothing_is_loaded_and_gone_on_with(tmp_path: Path) -> None:
    settings = {"optimizer": "sgd", "steps": 4, "every": 2}
    run(job, str(tmp_path), "fsdp", settings)
    assert load(f"{tmp_path}/run/checkpoints/000002", device="cpu", policy=Policy()).training is False
    resumed = run(job, str(tmp_path), "fsdp", {**settings, "steps": 7, "resume": "last"})
    close(weights(resumed[0]), weights(alone(tmp_path, optimizer="sgd", steps=7)))


def apart(folder: str, distributed: str) -> str:
    from ranks import SavesAlone

    try:
        train(f"{folder}/run", distributed, steps=9, extra=[SavesAlone(rank=1)], own=False)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("distributed", ["ddp", "fsdp"])
def test_save_that_one_rank_asks_for_alone_is_refused_at_once(tmp_path: Path, distributed: str) -> None:
    for text in run(apart, str(tmp_path), distributed, limit_s=40.0):
        assert "DistributedError: Rank 1 has come to save_checkpoint(), but rank 0 to the end of step 3." in text


def without_gradients(folder: str, distributed: str, ranks: tuple[int, ...]) -> Any:
    from ranks import Detached, Samples, Seen

    torch.manual_seed(0)
    seen = Seen()
    trainer = Trainer(
        "cpu", max_steps=4, batch_size=4, seed=7, run_dir=f"{folder}/run", distributed=distributed,
        callbacks=[seen], default_callbacks=False,
    )  # fmt: skip
    policy = Detached(windows=(1,) if ranks else (0, 1), rank=int(os.environ["RANK"]), ranks=ranks or (0, 1))
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    try:
        trainer.fit(policy, Samples())
    except Exception as error:
        state = policy.state_dict() if distributed == "ddp" else before
        return f"{type(error).__name__}: {error}", any(not torch.equal(state[name], before[name]) for name in before)
    return seen.outcomes


def test_window_in_which_no_rank_has_a_gradient_is_skipped_on_all(tmp_path: Path) -> None:
    landed, skipped = (True, None, None), (False, "no_gradients", None)
    assert run(without_gradients, str(tmp_path), "ddp", (0, 1)) == [[landed, skipped, landed, landed, landed]] * 2
    assert run(without_gradients, str(tmp_path / "one"), "ddp", (1,)) == [[landed] * 4] * 2


def test_run_that_begins_without_gradients_on_all_ranks_is_refused(tmp_path: Path) -> None:
    for text, moved in run(without_gradients, str(tmp_path), "ddp", ()):
        assert text.startswith("ConfigError: The loss has no gradient")
        assert not moved


def test_rank_whose_loss_has_no_gradient_is_refused_where_its_backward_gathers_weights(tmp_path: Path) -> None:
    outcomes = outcomes_of(without_gradients, str(tmp_path), "fsdp", (1,), limit_s=60.0)
    texts = [outcome.value[0] for outcome in outcomes]
    assert all("The loss of rank 1 has no gradient" in text for text in texts)
    assert "distributed='ddp'" in texts[1]


def overflowed(folder: str, distributed: str) -> list[Any]:
    from ranks import Events

    events = Events("overflow")
    train(f"{folder}/run", distributed, precision="fp16", steps=6, poisoned=(3, 17), extra=[events])
    return events.messages


@pytest.mark.parametrize("distributed", ["ddp", "fsdp"])
def test_overflow_says_whose_loss_it_was(tmp_path: Path, distributed: str) -> None:
    first, second = run(overflowed, str(tmp_path), distributed)
    assert first == second
    assert [message.partition(" was inf")[0] for message in first] == ["the loss of rank 1"]


def alone_with_it(folder: str, distributed: str) -> list[str]:
    from ranks import Alone

    said = []
    for how in ("due", "save", "evaluate"):
        try:
            train(f"{folder}/{how}", distributed, steps=9, extra=[Alone(rank=1, how=how)])
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


@pytest.mark.parametrize("distributed", ["ddp", "fsdp"])
def test_rank_that_is_alone_with_what_needs_all_is_refused_before_anybody_waits(
    tmp_path: Path, distributed: str
) -> None:
    others, own = run(alone_with_it, str(tmp_path), distributed, limit_s=60.0)
    for text in (own[0], others[0]):
        assert text.startswith("DistributedError: At step 3 something is due on one rank, but nothing on another.")
    for what, refused, told in zip(("save_checkpoint()", "evaluate()"), own[1:], others[1:], strict=True):
        assert refused.startswith(f"CallbackError: {what} needs every rank")
        assert f"Rank 1 failed, so all ended after update 5: {refused.splitlines()[0]}" in told


def parted(folder: str) -> list[str]:
    said = []
    trainer, policy = Trainer("cpu", max_steps=2, seed=0, run_dir=f"{folder}/run", distributed="ddp"), Policy()
    from ranks import Samples

    trainer.fit(policy, Samples())
    for call in (trainer.save_checkpoint, trainer.wait_for_checkpoint):
        try:
            call()
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def test_save_after_the_run_says_that_its_processes_have_parted(tmp_path: Path) -> None:
    for said in run(parted, str(tmp_path)):
        assert [text.partition(".")[0] for text in said] == [
            "DistributedError: The run is over, and its processes have parted"
        ] * 2


class Speechless(Exception):
    def __str__(self) -> str:
        raise ValueError("str fails")


def speechless(folder: str, long: bool) -> str:
    class Raises(Callback):
        def on_after_backward(self, trainer: Trainer, policy: Any) -> None:
            if trainer.distribution.rank == 1 and trainer.micro_batches == 3:
                raise RuntimeError("x" * 20_000_000) if long else Speechless

    try:
        train(f"{folder}/{long}", "ddp", steps=9, extra=[Raises()])
    except Speechless:
        return "Speechless"
    except Exception as error:
        return str(error)[:1000]
    return ""


def test_error_whose_words_are_none_or_too_many_ends_all_in_order(tmp_path: Path) -> None:
    first, second = run(speechless, str(tmp_path), False, limit_s=40.0)
    assert second == "Speechless"
    assert "Rank 1 failed, so all ended after update 5: Speechless" in first
    first, second = run(speechless, str(tmp_path), True, limit_s=40.0)
    assert second == "x" * 1000
    assert "Rank 1 failed, so all ended after update 5: RuntimeError: xxx" in first


# Of data whose length nobody knows, three micro-batches an epoch: micro-batches in a window; what fails on rank 1, a
# hook at a draw or a sample of the second epoch; the update after which all end, and the step that is then saved.
UNSIZED: list[tuple[int, str | int, int, int, int]] = [
    (1, "on_after_backward", 4, 6, 4),
    (1, "on_train_batch_start", 5, 6, 5),  # the last of an epoch
    (1, "on_train_batch_end", 6, 6, 6),  # after it
    (1, "sample", 0, 5, 3),
    (1, "sample", 9, 6, 4),  # it is drawn with the window after the one under way
    (2, "on_train_batch_start", 4, 4, 2),
    (2, "on_before_backward", 5, 4, 3),  # in a window of one
    (2, "sample", 0, 4, 2),
    (2, "sample", 9, 4, 2),
]


def unsized(folder: str, distributed: str) -> list[str]:
    from ranks import Endless

    said = []
    for number, (accumulate, where, at, *_) in enumerate(UNSIZED):
        fails = [] if where == "sample" else [Fails(rank=1, hook=str(where), micro_batch=at)]
        trainer = Trainer(
            "cpu", max_steps=30, batch_size=2, accumulate=accumulate, seed=0, run_dir=f"{folder}/{number}",
            distributed=distributed, callbacks=[*fails, Checkpoint(every_steps=0)],
        )  # fmt: skip
        text = ""
        try:
            trainer.fit(Policy(), Endless(at if where == "sample" else None))
        except Exception as error:
            text = str(error)
        said.append(text)
    return said


@pytest.mark.parametrize("distributed", ["ddp", "fsdp"])
def test_failure_with_data_of_unknown_length_ends_all_after_the_same_update_saved(
    tmp_path: Path, distributed: str
) -> None:
    first, second = run(unsized, str(tmp_path), distributed, limit_s=60.0)
    for number, (accumulate, where, at, update, step) in enumerate(UNSIZED):
        place = f"{where} {at}, {accumulate} a window"
        words = "the disk of this rank is gone" if where == "sample" else "only on this rank"
        assert words in second[number], place
        assert f"Rank 1 failed, so all ended after update {update}:" in first[number], place
        saved = read_checkpoint(tmp_path / str(number) / "checkpoints" / "last")
        assert saved.manifest["counters"]["step"] == step, place


def replayed(folder: str) -> list[Any]:
    from ranks import Events

    from policyfit import OverflowReport

    events = Events("overflow")
    train(f"{folder}/run", "ddp", steps=6, poisoned=(3, 17), extra=[OverflowReport(replay=True), events])
    return events.messages


def test_replay_under_ddp_does_not_clear_the_batch_of_another_rank(tmp_path: Path) -> None:
    first, second = run(replayed, str(tmp_path))
    assert first[0].startswith("the loss of rank 1 was inf or NaN")
    assert first[0].endswith("; rank 0, which tells this, does not have that rank's batches")
    assert "it began in the loss itself" in second[0]


def refused_without_a_run() -> bool:
    class Unmoving(Policy):
        def to(self, *_: Any, **__: Any) -> Any:
            raise MemoryError("no room on the device")

    with pytest.raises(MemoryError, match="no room"):
        Trainer("cpu", distributed="ddp").validate(Unmoving(), [])
    return torch.distributed.is_initialized()


def test_ranks_part_when_a_validation_without_a_run_cannot_begin() -> None:
    assert run(refused_without_a_run) == [False, False]
