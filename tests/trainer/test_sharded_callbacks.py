"""Callbacks that run a sharded policy: in any hook, the run stays the run, and ends in order where one rank fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from failing import Fails
from processes import run
from ranks import Policy, Samples, same, train, weights

from policyfit import FSDP, Callback, PrecisionAudit, Trainer
from policyfit.trainer.checkpoint import read_checkpoint

HOOKS = [
    "on_fit_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
    "on_train_batch_end",
    "on_log",
    "on_validation_start",
    "on_validation_end",
    "on_due",
    "on_save_checkpoint",
    "on_train_epoch_end",
]


def _forward(policy: Any) -> None:
    with torch.no_grad():
        policy({"x": torch.ones(2, 6), "y": torch.ones(2, 3), "factor": torch.ones(2)})


class Probes(Fails):
    """Runs the policy in some hooks, wherever they come; broken off in the middle if ``breaks``."""

    def __init__(self, *hooks: str, breaks: bool = False) -> None:
        self.breaks = breaks
        for hook in hooks:
            setattr(self, hook, self._fail)

    def _fail(self, trainer: Trainer, policy: Any, *_: Any) -> None:
        if not self.breaks:
            _forward(policy)
            return
        handle = policy.last.register_forward_pre_hook(lambda *_: 1 / 0)
        try:
            with pytest.raises(ZeroDivisionError):
                _forward(policy)
        finally:
            handle.remove()


def probed(folder: str, groups: list[list[str]], ema: bool, breaks: bool) -> list[Any]:
    results: list[Any] = []
    for group in groups:
        extra = [Probes(*group, breaks=breaks)]
        results.append(train(f"{folder}/{len(results)}", "fsdp", steps=7, extra=extra, ema=ema, val=True, val_every=3))
    return results


@pytest.mark.parametrize(("ema", "breaks", "hooks"), [(False, True, HOOKS[::2]), (True, False, HOOKS[1::2])])
def test_forward_of_a_callback_changes_nothing_whatever_hook_it_is_in(
    tmp_path: Path, ema: bool, breaks: bool, hooks: list[str]
) -> None:
    groups = [hooks[start::3] for start in range(3)]
    without, *others = run(probed, str(tmp_path), [[], *groups], ema, breaks, limit_s=90.0)[0]
    for group, other in zip(groups, others, strict=True):
        same(weights(other), weights(without))
        assert other["records"] == without["records"], group  # those of validation among them
        if ema:
            saved, wanted = (read_checkpoint(Path(one["last"])).models["ema"] for one in (other, without))
            same(saved, wanted)


def failed(folder: str, hooks: list[str], first: bool) -> list[str]:
    texts = []
    settings: Any = {"steps": 9, "every": 3, "val": True, "val_every": 3}
    for hook in hooks:
        draw = {"on_fit_start": 0, "on_train_epoch_end": 6}.get(hook, 3)
        extra = [Probes(hook), Fails(1, hook, draw)]
        try:
            train(f"{folder}/{hook}", "fsdp", extra=extra[::-1] if first else extra, **settings)
        except Exception as error:
            texts.append(str(error).splitlines()[0])
    return texts


@pytest.mark.parametrize("first", [False, True])
def test_rank_that_fails_where_others_run_the_policy_makes_their_gathers(tmp_path: Path, first: bool) -> None:
    hooks = [hook for hook in HOOKS if hook not in ("on_train_epoch_start", "on_log")][int(first) :: 2]
    others, own = run(failed, str(tmp_path), hooks, first, limit_s=90.0)
    assert own == ["only on this rank"] * len(hooks)
    for hook, text in zip(hooks, others, strict=True):
        assert text.startswith("Rank 1 failed"), hook
        assert text.endswith("RuntimeError: only on this rank"), hook
        is_saved = hook not in ("on_fit_start", "on_save_checkpoint")
        assert (tmp_path / hook / "checkpoints" / "last").exists() == is_saved, hook


class Reads(Callback):
    """Has rank 0 settle earlier than the others."""

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.is_main:
            assert trainer.step > 0


class ProbesAtTheEnd(Callback):
    def on_update_end(self, trainer: Trainer, policy: Any, outcome: Any) -> None:
        _forward(policy)


def probed_at_the_end(folder: str) -> str:
    try:
        train(f"{folder}/run", "fsdp", extra=[Reads(), ProbesAtTheEnd()])
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_forward_where_each_rank_comes_in_its_own_time_is_refused(tmp_path: Path) -> None:
    for text in run(probed_at_the_end, str(tmp_path), limit_s=40.0):
        assert text.startswith("CallbackError: A sharded policy was run in on_update_end")


def probed_with_one_shard(folder: str) -> list[Any]:
    """Where torch gathers nothing, and so tells nobody that it has taken the shards away."""
    results: list[Any] = []
    for hook in ("", "on_before_optimizer_step", "on_due"):
        strategy: Any = FSDP(shard=1, replicate=2)
        extra = [Probes(hook)] if hook else []
        results.append(train(f"{folder}/{hook}", strategy, steps=7, extra=extra, val=True, val_every=3))
    return results


def test_forward_of_a_callback_changes_nothing_with_one_shard_either(tmp_path: Path) -> None:
    without, *others = run(probed_with_one_shard, str(tmp_path), limit_s=60.0)[0]
    for other in others:
        same(weights(other), weights(without))
        assert other["records"] == without["records"]


class Counts(Callback):
    """How many gradients there are where gradients may be looked at."""

    def __init__(self) -> None:
        self.counts: dict[str, set[int]] = {}

    def _count(self, hook: str, policy: Any) -> None:
        self.counts.setdefault(hook, set()).add(sum(p.grad is not None for p in policy.parameters()))

    def on_after_backward(self, trainer: Trainer, policy: Any) -> None:
        self._count("on_after_backward", policy)

    def on_before_optimizer_step(self, trainer: Trainer, policy: Any, optimizer: Any) -> None:
        self._count("on_before_optimizer_step", policy)

    def on_before_zero_grad(self, trainer: Trainer, policy: Any, optimizer: Any) -> None:
        self._count("on_before_zero_grad", policy)


def counted(folder: str) -> list[dict[str, set[int]]]:
    found = []
    for hook in ("on_after_backward", "on_before_optimizer_step", "on_before_zero_grad"):
        counts = Counts()
        train(f"{folder}/{hook}", "fsdp", steps=3, extra=[Probes(hook), counts])
        found.append(counts.counts)
    return found


def test_gradients_are_there_for_a_callback_after_another_has_run_the_policy(tmp_path: Path) -> None:
    every = {hook: {8} for hook in ("on_after_backward", "on_before_optimizer_step", "on_before_zero_grad")}
    assert run(counted, str(tmp_path), limit_s=40.0) == [[every] * 3] * 2


class CallsAUnit(Callback):
    """Before anything has run the policy."""

    def on_fit_start(self, trainer: Trainer, policy: Any) -> None:
        with torch.no_grad():
            policy.blocks[1](torch.ones(2, 12))


def called(folder: str) -> list[Any]:
    return [train(f"{folder}/{n}", "fsdp", steps=3, extra=extra) for n, extra in enumerate([[], [CallsAUnit()]])]


def test_unit_may_run_before_its_policy_does(tmp_path: Path) -> None:
    without, with_call = run(called, str(tmp_path))[0]
    same(weights(with_call), weights(without))


def audited(folder: str) -> list[str]:
    audit = PrecisionAudit()
    trainer = Trainer(
        "cpu", "bf16", max_steps=2, batch_size=4, run_dir=folder, distributed=FSDP(), callbacks=[audit], seed=1
    )
    trainer.fit(Policy(), Samples())
    return (Path(folder) / "metrics.jsonl").read_text().splitlines()


def test_sharded_run_is_audited(tmp_path: Path) -> None:
    records = run(audited, str(tmp_path / "run"))[0]
    assert any("FLOPs of matmuls: 100.0% in bfloat16" in record for record in records), records
