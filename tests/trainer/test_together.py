"""Runs of several processes: the same run as one, agreed by all, whatever happens to one of them."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from failing import Thaws
from processes import outcomes_of, run
from ranks import OPTIMIZERS, Overflows, Policy, Rates, Samples, Seen, Stops, close, job, same, train, weights
from torch import nn

from policyfit import DDP, Callback, Checkpoint, ConfigError, Trainer, load
from policyfit.trainer.checkpoint import read_checkpoint


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
    settings = {"precision": "fp16", "optimizer": optimizer, "poisoned": (3, 17), "steps": 6, "keeps": True}
    one = alone(tmp_path, **settings)
    ranks = run(job, str(tmp_path), distributed, settings)
    assert ranks[0]["outcomes"] == ranks[1]["outcomes"] == one["outcomes"]
    assert ranks[0]["skipped"] == one["skipped"] > 0
    assert_moved_alike(ranks, distributed)
    close(weights(ranks[0]), weights(one), 2e-3)  # 16 bits round each rank's half differently


def assert_moved_alike(ranks: list[dict[str, Any]], distributed: str) -> None:
    """Landed updates moved what a rank holds, skipped ones did not, and whole weights are the same on all."""
    for rank in ranks:
        before = [None, *rank["weights"][:-1]]
        moved = [after != then for after, then in zip(rank["weights"], before, strict=True)]
        assert moved == [landed for landed, *_ in rank["outcomes"]]
    assert distributed == "fsdp" or ranks[0]["weights"] == ranks[1]["weights"]


def edited(folder: str, distributed: str, precision: str) -> dict[str, Any]:
    from ranks import Edits, Events

    told, edits = Events("overflow"), Edits(rank=1, update=2)
    result = train(f"{folder}/run", distributed, precision=precision, steps=5, extra=[edits, told], keeps=True)
    return {**result, "told": told.messages}


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
    assert_moved_alike(ranks, distributed)
    elsewhere = "a gradient was inf or NaN before on_before_optimizer_step, and is not any more, or a callback has made"
    here = "the loss of every rank was finite, but 1 of 8 gradients were not finite"
    assert ranks[0]["told"][0].startswith(elsewhere if distributed == "ddp" else here)


def overflowing(folder: str, distributed: str, rank: int) -> dict[str, Any]:
    return train(f"{folder}/run", distributed, precision="fp16", steps=4, extra=[Overflows(rank, update=2)], keeps=True)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("distributed", ["ddp", "fsdp"])
def test_gradient_that_overflows_in_the_part_of_one_rank_moves_the_scale_of_all(
    tmp_path: Path, distributed: str, rank: int
) -> None:
    ranks = first, second = run(overflowing, str(tmp_path), distributed, rank)
    assert_moved_alike(ranks, distributed)
    assert first["outcomes"] == second["outcomes"]
    assert [reason for _, reason, _ in first["outcomes"]] == [None, None, "non_finite", None, None]
    assert first["outcomes"][2][2] == first["outcomes"][1][2] / 2


class Logs(Callback):
    """Logs the loss of each micro-batch once more, and asks for a stop in the last validation."""

    def on_train_batch_end(self, trainer: Trainer, policy: nn.Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        trainer.log("again", outputs["loss"])

    def on_validation_end(self, trainer: Trainer, policy: nn.Module) -> None:
        if trainer.distribution.rank == 1:
            trainer.stop("the machine is wanted back", exit_code=143)


class LateStop(Callback):
    """Asks for a stop when all is over but the last save."""

    def on_fit_end(self, trainer: Trainer, policy: nn.Module) -> None:
        if trainer.distribution.rank == 1:
            trainer.stop("interrupted", exit_code=130)


class Keeps:
    """A logger that keeps the steps of its records, and how it ended."""

    def __init__(self) -> None:
        self.heard = list[Any]()

    def log_metrics(self, metrics: dict[str, Any], step: int) -> None:
        self.heard.append(step)

    def finalize(self, status: str) -> None:
        self.heard.append(status)


def logged(folder: str) -> Any:
    keeps, codes = Keeps(), list[Any]()
    seen = Seen()
    trainer = Trainer(
        "cpu", max_epochs=1, batch_size=3, log_every=8, run_dir=f"{folder}/run", seed=7, distributed="ddp",
        callbacks=[seen, Logs()], loggers=[keeps],
    )  # fmt: skip
    try:
        trainer.fit(Policy(), Samples(), Samples())
    except SystemExit as end:
        codes.append(end.code)
    late = Trainer("cpu", max_steps=1, run_dir=f"{folder}/late", distributed="ddp", callbacks=[LateStop()])
    try:
        late.fit(Policy(), Samples())
    except SystemExit as end:
        codes.append(end.code)
    return [r for r in seen.records if "again" in r], keeps.heard, (trainer.status, late.status, *codes)


def test_padding_is_not_logged_loggers_are_rank_0s_and_stops_after_the_last_update_count(
    tmp_path: Path,
) -> None:
    (records, heard, end), (other_records, unheard, other_end) = run(logged, str(tmp_path))
    assert [record["step"] for record in records] == [8]  # 44 samples: rank 1 pads the last window
    for record in (*records, *other_records):
        assert record["again"] == pytest.approx(record["train/loss"], rel=1e-6)
    assert heard == [8, 8, "success"]
    assert unheard == []
    assert end == other_end == ("stopped", "stopped", 143, 130)


def rated(folder: str, settings: dict[str, Any]) -> list[float]:
    rates = Rates()
    train(f"{folder}/run", "ddp", extra=[rates], **settings)
    return rates.samples_a_step


def test_samples_per_second_are_those_of_all_ranks(tmp_path: Path) -> None:
    settings = {"steps": 6, "batch_size": 2, "accumulate": 2}
    for rank in run(rated, str(tmp_path), settings):
        assert rank[:2] == pytest.approx([2 * 2 * 2] * 2)  # before the epoch's last window, which has less


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


def test_resume_on_four_ranks_is_exact_where_the_order_of_a_sum_matters(tmp_path: Path) -> None:
    straight = run(job, str(tmp_path / "straight"), "ddp", {"steps": 8}, ranks=4)
    run(job, str(tmp_path), "ddp", {"steps": 4}, ranks=4)
    resumed = run(job, str(tmp_path), "ddp", {"steps": 8, "resume": "last"}, ranks=4)
    same(weights(resumed[0]), weights(straight[0]))


def thawed(folder: str, kind: str, steps: int, resume: str | None = None) -> dict[str, Any]:
    distributed: Any = DDP(find_unused_parameters=True) if kind == "ddp" else kind
    return train(f"{folder}/run", distributed, steps=steps, resume=resume, extra=[Thaws()])


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_what_a_hook_has_thawed_is_so_again_on_all_ranks_after_a_resume(tmp_path: Path, kind: str) -> None:
    straight = run(thawed, str(tmp_path / "straight"), kind, 12)
    run(thawed, str(tmp_path), kind, 9)  # in the second epoch, whose beginning does not come again
    resumed = run(thawed, str(tmp_path), kind, 12, "last")
    same(weights(resumed[0]), weights(straight[0]))


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
        assert f"ranks were {ranks_before} and are now {ranks_after}, where sums are" in results[0]["plan"]
        which = "new" if ranks_after > ranks_before else "former"
        assert f"reset: the random streams of the {which} ranks" in results[0]["plan"]
    assert f"distribution was {before} and is now {after}, where sums are rounded otherwise" in results[0]["plan"]
    assert "an update had" not in results[0]["plan"]
    assert load(f"{tmp_path}/run", device="cpu", policy=Policy()).training is False


@pytest.mark.parametrize("optimizer", ["momentum", "adagrad"])
def test_optimizer_without_a_fused_form_for_shards_goes_on_from_ddp_and_back(tmp_path: Path, optimizer: str) -> None:
    straight = run(job, str(tmp_path / "straight"), "ddp", {"steps": 6, "optimizer": optimizer})
    for steps, distributed in ((2, "ddp"), (4, "fsdp"), (6, "ddp")):
        resumed = run(job, str(tmp_path), distributed, {"steps": steps, "optimizer": optimizer, "resume": "auto"})
        assert (("not fused" in resumed[0]["plan"]), resumed[0]["step"]) == (distributed == "fsdp", steps)
    close(weights(resumed[0]), weights(straight[0]))


def test_run_that_goes_on_with_more_ranks_says_what_an_update_has_now(tmp_path: Path) -> None:
    train(f"{tmp_path}/run", "none", steps=3, batch_size=4)
    plan = run(job, str(tmp_path), "ddp", {"steps": 4, "batch_size": 4, "resume": "last"})[0]["plan"]
    assert "an update had 4 samples and has 8 now (batch_size=2 keeps it at 4)" in plan
    with pytest.raises(ConfigError, match=r"batch_size was 8 \(4 on each of 2 ranks\) and is now 2\."):
        train(f"{tmp_path}/run", "none", steps=5, batch_size=2, resume="last")


def test_three_ranks_go_on_with_what_two_saved_in_shards(tmp_path: Path) -> None:
    run(job, str(tmp_path), "fsdp", {"steps": 3, "batch_size": 12})
    results = run(job, str(tmp_path), "fsdp", {"steps": 5, "batch_size": 8, "resume": "last"}, ranks=3)
    assert {result["step"] for result in results} == {5}
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
    from ranks import Detached, Samples

    torch.manual_seed(0)
    trainer = Trainer(
        "cpu", max_steps=5, batch_size=4, seed=7, run_dir=f"{folder}/run", distributed="ddp", default_callbacks=False
    )
    trainer.fit(Detached(windows=(0, 2, 4), rank=int(os.environ["RANK"]), ranks=(1,)), Samples())
    return trainer.step


def test_rank_whose_loss_has_no_gradient_keeps_nobody_waiting(tmp_path: Path) -> None:
    assert run(masked, str(tmp_path), limit_s=30.0) == [5, 5]


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
    for how in ("due", "save", "look", "evaluate"):
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
    calls = ("save_checkpoint()", "save_checkpoint()", "evaluate()")
    for what, refused, told in zip(calls, own[1:], others[1:], strict=True):
        assert refused.startswith(f"CallbackError: {what} needs every rank")
        assert f"Rank 1 failed, so all ended after update 3: {refused.splitlines()[0]}" in told


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
