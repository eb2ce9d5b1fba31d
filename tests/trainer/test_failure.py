"""Runs of several processes of which one fails: wherever it does, all end after the same update, saved."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from failing import Breaks, Counted, Dies, Due, Endless, Fails, Leaves, Panics, Thaws
from processes import outcomes_of, run
from ranks import SAMPLES, Policy, Samples, job, same, train, weights
from torch.optim.lr_scheduler import ReduceLROnPlateau

from policyfit import Callback, Checkpoint, DistributedError, Trainer
from policyfit.strategies.ddp import DDP
from policyfit.strategies.fsdp import FSDP
from policyfit.trainer.checkpoint import read_checkpoint


def failed(folder: str) -> dict[str, Any]:
    try:
        train(f"{folder}/run", "ddp", steps=30, fails_at=20)
    except BaseException as error:
        return {"error": type(error).__name__, "text": str(error)}
    return {}


# Where rank 1 fails, at which draw; the update after which all end, and the step that is then saved.
PLACES = [
    ("on_fit_start", 0, None, None),
    ("on_train_batch_start", 0, 0, 0),  # in the first window, of which a sharded rank knows nothing yet
    ("on_after_backward", 0, 0, 0),
    ("on_before_optimizer_step", 1, 0, 0),
    ("on_train_batch_start", 1, 1, 1),
    ("on_train_epoch_start", 6, 6, 6),
    ("on_train_batch_start", 3, 3, 3),
    ("on_train_batch_start", 5, 5, 5),  # in the last window of an epoch, at whose end all know
    ("on_before_backward", 6, 6, 6),
    ("on_after_backward", 6, 6, 6),
    ("on_before_optimizer_step", 4, 3, 3),
    ("on_before_zero_grad", 4, 4, 4),
    ("on_train_batch_end", 3, 3, 3),  # the others go on to a validation
    ("on_train_batch_end", 5, 5, 5),
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
        seen.append({"error": error.__class__, "text": str(error), "told": getattr(error, "is_told", False)})
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
            assert own[number]["told"] is True, place
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
    assert "so all ended after update 1: RuntimeError: only on this rank" in ranks[0]["text"]
    saved = read_checkpoint(tmp_path / "run" / "checkpoints" / "last")
    found = {name: saved.manifest["counters"][name] for name in ("step", "skipped", "batch_in_epoch", "micro_batches")}
    assert found == {"step": 1, "skipped": 0, "batch_in_epoch": 3, "micro_batches": 3}  # nothing is left out
    assert saved.manifest["exact"] is False  # random streams went on in the windows that came to nothing
    assert saved.scaler is not None
    assert saved.callbacks["means"] == {}  # of windows that came to nothing, and are computed again
    # A failure says nothing about the scale, nor that it could grow.
    assert (saved.scaler["scale"], saved.scaler["_growth_tracker"]) == (256.0, 1)


def test_error_of_data_ends_all_and_the_run_goes_on_once_it_is_mended(tmp_path: Path) -> None:
    ranks = run(failed, str(tmp_path), limit_s=40.0)
    texts = [rank["text"] for rank in ranks]
    assert sum("the disk of this rank is gone" in text for text in texts) == 2
    assert sorted(rank["error"] for rank in ranks) == ["RankFailed", "RuntimeError"]
    mended = run(job, str(tmp_path), "ddp", {"steps": 12, "resume": "last"})
    assert "note: it was saved after an error" in mended[0]["plan"]
    straight = run(job, str(tmp_path / "straight"), "ddp", {"steps": 12})
    same(weights(mended[0]), weights(straight[0]))  # this policy draws nothing, and no sample was left out
    for after, all_of_them in zip(mended, straight, strict=True):
        assert after["ids"] == all_of_them["ids"][-len(after["ids"]) :]


# Where the code of rank 1's policy fails, in which forward of windows of two; the step that is then saved, and after
# whose update all end. An epoch has six updates.
BREAKS = [
    ("before", 0, 0),
    ("between", 0, 0),
    ("after", 1, 0),
    ("back", 1, 0),
    ("before", 4, 2),
    ("between", 4, 2),
    ("between", 5, 2),
    ("after", 5, 2),
    ("back", 4, 2),
    ("back", 5, 2),
    ("back", 9, 4),  # the window after it is of one, and an epoch's last
    ("between", 10, 5),
    ("last", 5, 2),  # when the gradients of all parameters are there
    ("every", 0, 0),
    ("every", 5, 2),
]


KINDS: dict[str, Any] = {
    "hsdp": FSDP(shard=2, replicate=2, checkpoint="whole"),
    "replicas": FSDP(shard=1, replicate=2),
    "ddp that looks for unused": DDP(find_unused_parameters=True),
}


def broken(folder: str, distributed: str, batch_size: int, numbers: list[int]) -> dict[int, tuple[str, int, int]]:
    ends, width = {}, 600 if "ddp" in distributed else 12
    for number in numbers:
        where, forward, *_ = BREAKS[number]
        trainer = Trainer(
            "cpu", max_steps=30, batch_size=batch_size, accumulate=2, clip_norm=1.0, seed=7,
            run_dir=f"{folder}/{number}", callbacks=[Checkpoint(every_steps=50)],
            distributed=KINDS.get(distributed, distributed),
        )  # fmt: skip
        text, policy = "", Breaks(where, 1, forward, width)
        try:
            trainer.fit(policy, Samples())
        except Exception as error:
            text = str(error)
        ends[number] = (text, trainer.step, trainer.micro_batches)
        for handle in policy.everywhere:
            handle.remove()
    return ends


@pytest.mark.parametrize(
    ("distributed", "ranks", "numbers"),
    [
        ("ddp", 2, slice(0, None, 2)),
        ("ddp that looks for unused", 2, slice(1, None, 5)),
        ("fsdp", 2, slice(None)),
        ("hsdp", 4, slice(1, 12, 5)),
        ("replicas", 2, slice(0, 12, 4)),
    ],
)
def test_wherever_the_policy_of_one_rank_fails_all_end_after_the_same_update_saved(
    tmp_path: Path, distributed: str, ranks: int, numbers: slice
) -> None:
    chosen = list(range(len(BREAKS)))[numbers]
    others, own, *_ = run(broken, str(tmp_path), distributed, 4 // ranks, chosen, ranks=ranks, limit_s=90.0)
    for number in chosen:
        where, forward, step = BREAKS[number]
        place = f"{where} in forward {forward}"
        assert own[number] == (f"{where} the blocks of this rank", step, 2 * step), place
        assert others[number][1:] == own[number][1:], place
        assert f"so all ended after update {step}: RuntimeError: {where} the blocks" in others[number][0], place
        saved = read_checkpoint(tmp_path / str(number) / "checkpoints" / "last")
        assert saved.manifest["counters"]["step"] == step, place


def undecided(folder: str, distributed: str) -> str:
    try:
        train(f"{folder}/run", distributed, steps=30, extra=[Due(1)], norm=distributed == "ddp")
    except Exception as error:
        return str(error)
    return ""


@pytest.mark.parametrize("distributed", ["ddp", "fsdp"])
def test_callback_that_never_says_again_whether_it_is_due_ends_all_in_order(tmp_path: Path, distributed: str) -> None:
    others, own = run(undecided, str(tmp_path), distributed, limit_s=40.0)
    assert own == "only on this rank"
    assert "Rank 1 failed, so all ended after update 2: RuntimeError: only on this rank" in others
    assert read_checkpoint(tmp_path / "run" / "checkpoints" / "last").manifest["counters"]["step"] == 2


class FreezesInBackward(Breaks):
    """What its forward has used is frozen by the hook that fails."""

    def _fail(self, where: str, *gradient: Any) -> None:
        if self.left < 0 and where == "back":
            self.first.requires_grad_(False)
        super()._fail(where, *gradient)


FROZEN: dict[str, tuple[type[Breaks], list[Callback]]] = {
    "before the forward": (Breaks, [Thaws()]),
    "in the backward": (FreezesInBackward, []),
}


def frozen(folder: str) -> dict[str, str]:
    ends = {}
    for when, (kind, callbacks) in FROZEN.items():
        trainer = Trainer(
            "cpu", max_steps=30, batch_size=2, accumulate=2, seed=7, run_dir=f"{folder}/{when}",
            distributed=DDP(find_unused_parameters=True), callbacks=[*callbacks, Checkpoint(every_steps=50)],
        )  # fmt: skip
        try:
            trainer.fit(kind("back", 1, 7, 600), Samples())
        except Exception as error:
            ends[when] = str(error)
    return ends


def test_backward_that_breaks_off_over_what_was_frozen_ends_all_in_order_saved(tmp_path: Path) -> None:
    others, own = run(frozen, str(tmp_path), limit_s=40.0)
    assert own == dict.fromkeys(FROZEN, "back the blocks of this rank")
    for when, words in others.items():
        assert "Rank 1 failed, so all ended after update 3: RuntimeError: back the blocks" in words, when
        assert read_checkpoint(tmp_path / when / "checkpoints" / "last").manifest["counters"]["step"] == 3, when


def left_out(folder: str, forward: int) -> str:
    trainer = Trainer(
        "cpu", max_steps=30, batch_size=4, seed=7, run_dir=f"{folder}/run", distributed="ddp",
        callbacks=[Checkpoint(every_steps=50)],
    )  # fmt: skip
    try:
        trainer.fit(Leaves(forward), Samples())
    except Exception as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("forward", "step"), [(0, 0), (3, 3)])
def test_parameter_that_one_rank_leaves_out_ends_all_in_order(tmp_path: Path, forward: int, step: int) -> None:
    others, own = run(left_out, str(tmp_path), forward, limit_s=40.0)
    assert "were not averaged: extra.weight, extra.bias." in own
    assert f"Rank 1 failed, so all ended after update {step}: ConfigError: These trainable" in others
    assert read_checkpoint(tmp_path / "run" / "checkpoints" / "last").manifest["counters"]["step"] == step


def panicked(folder: str, distributed: str, kind: type[BaseException]) -> str:
    try:
        train(f"{folder}/run", distributed, steps=30, extra=[Panics(kind)])
    except BaseException as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("distributed", "kind"), [("ddp", BaseException), ("fsdp", SystemExit), ("ddp", SystemExit)])
def test_error_that_is_no_exception_ends_all_in_order(
    tmp_path: Path, distributed: str, kind: type[BaseException]
) -> None:
    others, own = run(panicked, str(tmp_path), distributed, kind, limit_s=40.0)
    assert own == "a panic"
    assert f"Rank 1 failed, so all ended after update 3: {kind.__name__}: a panic" in others
    assert read_checkpoint(tmp_path / "run" / "checkpoints" / "last").manifest["counters"]["step"] == 3


class FailsOnEach(Callback):
    """Each rank fails in its sixth micro-batch, in its own words or in those of all."""

    def __init__(self, *words: str) -> None:
        self.words = words

    def on_after_backward(self, trainer: Trainer, policy: Any) -> None:
        if trainer.micro_batches == 5:
            raise RuntimeError(self.words[trainer.distribution.rank])


def both(folder: str, distributed: str, words: list[str]) -> str:
    try:
        train(f"{folder}/run", distributed, steps=30, extra=[FailsOnEach(*words)])
    except Exception as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("distributed", "words"),
    [("ddp", ["the disk is full", "the sensor is off"]), ("ddp", ["out of space"] * 2), ("fsdp", ["out of space"] * 2)],
)
def test_ranks_that_all_fail_save_what_they_have_and_the_run_goes_on(
    tmp_path: Path, distributed: str, words: list[str]
) -> None:
    assert run(both, str(tmp_path), distributed, words, limit_s=40.0) == words
    assert read_checkpoint(tmp_path / "run" / "checkpoints" / "last").manifest["counters"]["step"] == 5
    if distributed == "fsdp":
        mended = run(job, str(tmp_path), distributed, {"steps": 8, "resume": "last"})
        straight = run(job, str(tmp_path / "straight"), distributed, {"steps": 8})
        same(weights(mended[0]), weights(straight[0]))  # this policy draws nothing, and no sample was left out


def diverged(folder: str) -> str:
    try:
        train(f"{folder}/run", "ddp", steps=30, poisoned=tuple(range(SAMPLES // 2)), max_skips=2, every=1)
    except Exception as error:
        return type(error).__name__
    return ""


def test_run_that_diverged_on_all_ranks_saves_nothing(tmp_path: Path) -> None:
    assert run(diverged, str(tmp_path), limit_s=40.0) == ["TrainingDiverged"] * 2
    assert not (tmp_path / "run" / "checkpoints").exists()


class DiesBeforeAStep(Callback):
    """Rank 0 is killed in the window in which rank 1 fails."""

    def on_before_optimizer_step(self, trainer: Trainer, policy: Any, optimizer: Any) -> None:
        if trainer.is_main and trainer.micro_batches == 6:
            os.kill(os.getpid(), signal.SIGKILL)


def failed_beside_a_death(folder: str) -> None:
    with pytest.raises(RuntimeError, match="only on this rank"):
        train(f"{folder}/run", "ddp", steps=30, every=50, extra=[Fails(1, "on_after_backward", 5), DiesBeforeAStep()])


def test_rank_that_fails_where_another_dies_keeps_what_it_has_and_no_sample_is_left_out(tmp_path: Path) -> None:
    ranks = outcomes_of(failed_beside_a_death, str(tmp_path), limit_s=40.0)
    assert [rank.exit_code for rank in ranks] == [-9, 0], ranks[1].error
    counters = read_checkpoint(tmp_path / "run" / "checkpoints" / "000005-exception").manifest["counters"]
    assert {counters[name] for name in ("step", "micro_batches", "batch_in_epoch")} == {5}


def killed(folder: str, distributed: str) -> str:
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
    assert ranks[0].value.startswith("RanksLost: Rank 1 no longer answers: called for ")
    resumed = run(job, str(tmp_path), distributed, {"steps": 8, "resume": "last"})
    straight = run(job, str(tmp_path / "straight"), distributed, {"steps": 8})
    same(weights(resumed[0]), weights(straight[0]))


def invalid(folder: str, distributed: str) -> dict[str, Any]:
    try:
        train(f"{folder}/run", distributed, steps=6, val=True, val_every=3, val_fails_at=17)
    except BaseException as error:
        return {"error": type(error).__name__, "text": str(error)}
    return {}


@pytest.mark.parametrize("distributed", ["ddp", "fsdp"])
def test_error_in_the_validation_of_one_rank_ends_all_in_time_and_is_told(tmp_path: Path, distributed: str) -> None:
    ranks = run(invalid, str(tmp_path), distributed, limit_s=60.0)
    assert sorted(rank["error"] for rank in ranks) == ["RankFailed", "RuntimeError"]
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
    assert run(kept, str(tmp_path), distributed, limit_s=60.0) == ["RankFailed", "RuntimeError"]
    folders = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir() if not path.name.startswith(".")}
    assert folders == {"000002", "000004", "000006", "last"} | {"000006-exception"}


class FailsToSave(Callback):
    """Rank 0 fails in the save that follows the failure of another."""

    def on_fit_end(self, trainer: Trainer, policy: Any) -> None:
        if trainer.distribution.rank == 0:
            raise OSError("no space left on device")


def failed_twice(folder: str, distributed: str) -> list[str]:
    try:
        train(f"{folder}/run", distributed, extra=[Fails(1, "on_after_backward", 3), FailsToSave()])
    except Exception as error:
        return [str(error).splitlines()[0], *(note.splitlines()[0] for note in error.__notes__)]
    return []


@pytest.mark.parametrize("distributed", ["ddp", "fsdp"])
def test_failure_in_the_save_after_a_failure_has_nobody_wait(tmp_path: Path, distributed: str) -> None:
    first, second = run(failed_twice, str(tmp_path), distributed, limit_s=15.0)
    also = "While this was handled, another error came: "
    assert first[0].startswith("Rank 1 failed, so all ended after update 3: RuntimeError: only on this rank")
    assert first[1:] == [f"{also}OSError: no space left on device"]
    also_told = f"{also}RankFailed: Rank 0 failed: OSError: no space left on device"
    assert second == ["only on this rank", "This was rank 1; all ended after update 3.", also_told]


class BrokenData(Samples):
    def __getitem__(self, index: int) -> dict[str, Any]:
        raise KeyError(f"observation.state of sample {index}")


def failed_everywhere_alike(folder: str) -> tuple[str, bool]:
    try:
        Trainer("cpu", max_steps=3, batch_size=4, run_dir=f"{folder}/run", distributed="ddp").fit(
            Policy(), BrokenData()
        )
    except Exception as error:
        return type(error).__name__, vars(error)["is_told"]
    return "", False


def test_error_that_all_ranks_meet_each_at_its_own_sample_is_told_once(tmp_path: Path) -> None:
    assert run(failed_everywhere_alike, str(tmp_path), limit_s=20.0) == [("RuntimeError", True)] * 2


class FailsIn(Callback):
    """Keeps the steps of validations; in one, rank 1 fails."""

    def __init__(self, step: int | None) -> None:
        self.step, self.seen = step, list[int]()

    def on_validation_start(self, trainer: Trainer, policy: Any) -> None:
        if trainer.step == self.step and trainer.distribution.rank == 1:
            raise OSError("the disk is gone")

    def on_log(self, trainer: Trainer, policy: Any, record: Any) -> None:
        if "val/loss" in record:
            self.seen.append(record["step"])


def validated(folder: str, steps: int, fails_in: int | None) -> list[int]:
    seen = FailsIn(fails_in)
    trainer = Trainer(
        "cpu", max_steps=steps, batch_size=4, val_every=4, run_dir=f"{folder}/run", distributed="ddp", callbacks=[seen]
    )
    try:
        trainer.fit(Policy(), Samples(), Samples(), resume="auto", schedule=lambda o: ReduceLROnPlateau(o))
    except (OSError, DistributedError):
        assert trainer.step == fails_in
    return seen.seen


@pytest.mark.parametrize("steps", [4, 6])
def test_validation_that_failed_is_made_when_the_run_goes_on(tmp_path: Path, steps: int) -> None:
    assert run(validated, str(tmp_path), steps, 4, limit_s=20.0) == [[], []]
    wanted = list(dict.fromkeys([4, steps]))
    assert run(validated, str(tmp_path), steps, None, limit_s=20.0) == [wanted, wanted]


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
    assert "Rank 1 failed, so all ended after update 3: Speechless" in first
    first, second = run(speechless, str(tmp_path), True, limit_s=40.0)
    assert second == "x" * 1000
    assert "Rank 1 failed, so all ended after update 3: RuntimeError: xxx" in first


# Of data whose length nobody knows, three micro-batches an epoch: micro-batches in a window; what fails on rank 1, a
# hook at a draw or a sample of the second epoch; the step that is then saved, and after whose update all end.
UNSIZED: list[tuple[int, str, int, int]] = [
    (1, "on_after_backward", 4, 4),
    (1, "on_train_batch_start", 5, 5),  # the last of an epoch
    (1, "on_train_batch_end", 6, 6),  # after it
    (1, "sample", 0, 3),  # where ranks meet
    (1, "sample", 9, 4),  # it is drawn with the window after the one under way
    (2, "on_train_batch_start", 4, 2),
    (2, "on_before_backward", 5, 3),  # in a window of one
    (2, "sample", 0, 2),
    (2, "sample", 9, 2),  # the second window is drawn with the first
    (4, "on_train_batch_start", 3, 1),  # an epoch is shorter than a window
    (1, "more", 4, 3),  # samples on rank 0
]


def unsized(folder: str, distributed: str) -> list[str]:
    said = []
    for number, (accumulate, where, at, *_) in enumerate(UNSIZED):
        fails = [] if where in ("sample", "more") else [Fails(rank=1, hook=str(where), micro_batch=at)]
        trainer = Trainer(
            "cpu", max_steps=30, batch_size=2, accumulate=accumulate, seed=0, run_dir=f"{folder}/{number}",
            distributed=distributed, callbacks=[*fails, Checkpoint(every_steps=0)],
        )  # fmt: skip
        text = ""
        try:
            trainer.fit(Policy(), Endless(at if where == "sample" else None, more=at if where == "more" else 0))
        except Exception as error:
            text = str(error)
        said.append(text)
    return said


@pytest.mark.parametrize("distributed", ["ddp", "fsdp"])
def test_failure_with_data_of_unknown_length_ends_all_after_the_same_update_saved(
    tmp_path: Path, distributed: str
) -> None:
    first, second = run(unsized, str(tmp_path), distributed, limit_s=60.0)
    for number, (accumulate, where, at, step) in enumerate(UNSIZED):
        place = f"{where} {at}, {accumulate} a window"
        words = {"sample": "the disk of this rank is gone", "more": "it has 0 micro-batches in a window"}
        assert words.get(str(where), "only on this rank") in second[number], place
        assert f"Rank 1 failed, so all ended after update {step}:" in first[number], place
        saved = read_checkpoint(tmp_path / str(number) / "checkpoints" / "last")
        assert saved.manifest["counters"]["step"] == step, place


def resumed_at_an_end(folder: str, distributed: str, fails_at: int | None) -> str:
    trainer = Trainer(
        "cpu", max_steps=3 if fails_at is None else 9, batch_size=2, seed=0, run_dir=f"{folder}/run",
        distributed=distributed,
    )  # fmt: skip
    try:
        trainer.fit(Policy(), Counted(fails_at, epoch=0), resume="auto")
    except Exception as error:
        return str(error)
    return ""


@pytest.mark.parametrize("distributed", ["ddp", "fsdp"])
def test_rank_that_cannot_read_what_was_used_of_an_epoch_ends_all_in_order(tmp_path: Path, distributed: str) -> None:
    assert run(resumed_at_an_end, str(tmp_path), distributed, None, limit_s=40.0) == ["", ""]
    first, second = run(resumed_at_an_end, str(tmp_path), distributed, 0, limit_s=40.0)
    assert "the disk of this rank is gone" in second
    assert "Rank 1 failed" in first
    assert "the disk of this rank is gone" in first
