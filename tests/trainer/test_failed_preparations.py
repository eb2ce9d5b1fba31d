"""Ranks that fail before the first batch, or without a run: the others hear of it, and all part."""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from failing import Fails
from processes import run
from ranks import Policy, Samples
from torch import nn
from torch.optim import SGD, AdamW

from policyfit import EMA, DistributedError, Trainer
from policyfit.strategies.ddp import DDP
from policyfit.strategies.fsdp import FSDP


def in_a_group_of_the_callers(folder: str, distributed: str) -> list[str]:
    """One fit after another: rank 1 fails before the first batch, in the first window twice, and not at all."""
    torch.distributed.init_process_group("gloo")
    said = []
    for number, where in enumerate(("", "on_after_backward", "on_after_backward", "")):
        optimizer = broken_on_rank_1 if number == 0 else AdamW
        callbacks = [Fails(1, where, 0)] if where else []
        strategy: Any = (FSDP if distributed == "fsdp" else DDP)(timeout=30.0)
        trainer = Trainer(
            "cpu", max_steps=3, batch_size=4, run_dir=f"{folder}/{number}", distributed=strategy, callbacks=callbacks
        )
        try:
            trainer.fit(Policy(), Samples(), optimizer=optimizer)
            said.append(f"step {trainer.step}")
        except Exception as error:
            said.append(str(error).splitlines()[0])
    return said


def broken_on_rank_1(parameters: Any) -> Any:
    if os.environ["RANK"] == "1":
        raise RuntimeError("only on this rank")
    return AdamW(parameters)


@pytest.mark.parametrize("distributed", ["ddp", "fsdp"])
def test_failed_runs_leave_nothing_behind_in_a_process_group_that_goes_on(tmp_path: Path, distributed: str) -> None:
    others, own = run(in_a_group_of_the_callers, str(tmp_path), distributed, limit_s=60.0)
    assert own == ["only on this rank"] * 3 + ["step 3"]
    ended = "Rank 1 failed, so all ended after update 0: RuntimeError: only on this rank"
    assert others == ["Rank 1 failed: RuntimeError: only on this rank", ended, ended, "step 3"]


def validated_alone() -> str:
    trainer = Trainer("cpu", distributed="ddp", callbacks=[Fails(1, "on_validation_end", 0)])
    try:
        trainer.validate(Policy(), Samples())
    except Exception as error:
        return str(error)
    return ""


def test_rank_that_fails_at_the_end_of_a_validation_without_a_run_is_heard_by_the_others() -> None:
    others, own = run(validated_alone, limit_s=40.0)
    assert own == "only on this rank"
    assert "Rank 1 failed: RuntimeError: only on this rank" in others


def refused_without_a_run() -> bool:
    class Unmoving(Policy):
        def to(self, *_: Any, **__: Any) -> Any:
            raise MemoryError("no room on the device")

    with pytest.raises(MemoryError, match="no room"):
        Trainer("cpu", distributed="ddp").validate(Unmoving(), [])
    return torch.distributed.is_initialized()


def test_ranks_part_when_a_validation_without_a_run_cannot_begin() -> None:
    assert run(refused_without_a_run) == [False, False]


def planned_alone() -> str:
    torch.distributed.init_process_group("gloo")
    try:
        Trainer("cpu", distributed="ddp").dry_run(Policy(), optimizer=broken_on_rank_1)
    except Exception as error:
        return str(error).splitlines()[0]
    return ""


def test_rank_that_fails_in_a_dry_run_is_heard_by_the_others() -> None:
    assert run(planned_alone, limit_s=40.0) == ["Rank 1 failed: RuntimeError: only on this rank", "only on this rank"]


def sgd(parameters: Iterable[nn.Parameter], *, lr: float, order: int) -> SGD:
    return SGD([*parameters][::order], lr=lr)


def set_otherwise(settings: dict[str, tuple[Any, Any]]) -> list[str]:
    rank, found = int(os.environ["RANK"]), []
    for name, values in settings.items():
        options = {"distributed": "ddp", "max_steps": 2, "batch_size": 4, name: values[rank]}
        rate, given = options.pop("lr", 0.1), options.pop("val_data", False)
        order = options.pop("order", 1)
        if options.pop("average", False) is not False:
            options |= {"distributed": "fsdp", "callbacks": [EMA()] if rank else []}
        try:
            Trainer("cpu", default_callbacks=False, **options).fit(
                Policy(), Samples(), Samples() if given else None, optimizer=partial(sgd, lr=rate, order=order)
            )
        except DistributedError as error:
            found.append(str(error).splitlines()[0])
    return found


def test_ranks_that_were_started_with_other_settings_are_refused_by_what_differs() -> None:
    slow = DDP(timeout=50.0)
    wide = DDP(timeout=50.0, find_unused_parameters=True)
    settings = {
        "max_steps": (2, 3), "batch_size": (4, 5), "clip_norm": (None, 1.0), "seed": (1, 2),
        "precision": ("no", "bf16"), "distributed": (slow, wide), "lr": (0.1, 0.2),
        "val_data": (True, False), "workers": (0, "auto"), "order": (1, -1), "average": (True, True),
    }  # fmt: skip
    told = "Rank 1 was started with other settings than rank 0: "
    for found in run(set_otherwise, settings, limit_s=60.0):
        *found, order, average = found
        assert order.startswith(f"{told}optimizer 0: digest of its parameters in order is '")
        assert average == f"{told}callbacks with on_save_checkpoint is ['EMA'], and [] on rank 0."
        assert found == [
            f"{told}max_steps is 3, and 2 on rank 0.",
            f"{told}batch_size is 5, and 4 on rank 0.",
            f"{told}clip_norm is 1.0, and None on rank 0.",
            f"{told}seed is 2, and 1 on rank 0.",
            f"{told}precision is 'bf16', and 'no' on rank 0.",
            f"{told}distributed.find_unused_parameters is True, and False on rank 0.",
            f"{told}optimizer 0: lr is 0.2, and 0.1 on rank 0.",
            f"{told}val_data is 'none', and 'given' on rank 0.",
        ]


def interrupted(distributed: str, method: str) -> tuple[str, bool]:
    """On rank 1 an interrupt comes while the others are waited for, or a group of the ranks cannot be made."""

    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    strategy: Any = FSDP(timeout=1.5) if distributed == "fsdp" else DDP(timeout=1.5)
    if os.environ["RANK"] == "1":
        setattr(strategy._membership if method == "new_meeting" else strategy, method, interrupt)
    try:
        Trainer("cpu", max_steps=3, distributed=strategy).fit(Policy(), Samples(), optimizer=broken_on_rank_1)
    except BaseException as error:
        return type(error).__name__, torch.distributed.is_initialized()
    return "", True


@pytest.mark.parametrize(("distributed", "method"), [("ddp", "excuse"), ("fsdp", "new_meeting")])
def test_interrupt_before_the_first_batch_leaves_the_others(distributed: str, method: str) -> None:
    (others, they_are_in), own = run(interrupted, distributed, method, limit_s=40.0)
    assert own == ("KeyboardInterrupt", False)
    assert others == ("RanksLost" if method == "excuse" else "DistributedError")
    assert not they_are_in
