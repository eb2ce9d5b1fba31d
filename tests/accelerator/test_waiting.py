"""A healthy step waits for nothing: by torch's own alarm, by the profiler's trace, and by the mailbox's event."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest
import torch
from rig import Rig, Wide, sleep, wide
from torch import Tensor, nn

from policyfit import EMA, Callback, Trainer

FIRST, LAST = 3, 36  # the micro-batches between which nothing may wait


@contextmanager
def alarm(kind: str) -> Iterator[None]:
    """Every wait for the device is an error, where torch can tell (cuda)."""
    set_alarm(kind, on=True)
    try:
        yield
    finally:
        set_alarm(kind, on=False)


def set_alarm(kind: str, *, on: bool) -> None:
    if kind == "cuda":
        torch.cuda.set_sync_debug_mode("error" if on else "default")


class Alarm(Callback):
    """Sets the alarm for the micro-batches from FIRST to LAST; counts them."""

    def __init__(self, kind: str) -> None:
        self.kind, self.watched = kind, 0

    def on_train_batch_start(self, trainer: Trainer, policy: nn.Module, batch: Any, batch_idx: int) -> None:
        if batch_idx == FIRST:
            set_alarm(self.kind, on=True)
        elif batch_idx == LAST:
            set_alarm(self.kind, on=False)
        self.watched += FIRST <= batch_idx < LAST

    def on_exception(self, *_: Any) -> None:
        set_alarm(self.kind, on=False)

    def teardown(self, *_: Any) -> None:
        set_alarm(self.kind, on=False)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_healthy_steps_wait_for_nothing_with_all_default_callbacks(rig: Rig, precision: str, accumulate: int) -> None:
    watch = Alarm(rig.kind)
    trainer = rig.fit(
        wide(dropout=0.1), rig.batches(40), precision=rig.precision(precision, growth_interval=2000),
        callbacks=rig.defaults(watch, EMA()), accumulate=accumulate, clip_norm=1.0, clip_value=5.0, log_every=None,
        max_steps=None, max_epochs=1,
    )  # fmt: skip
    assert watch.watched == LAST - FIRST
    assert (trainer.micro_batches, trainer.skipped) == (40, 0)


class Reading(Wide):
    """A policy that looks at its own loss in every step."""

    def forward(self, batch: Any) -> Tensor:
        loss = super().forward(batch)
        float(loss)
        return loss


@pytest.mark.accelerator
def test_policy_that_reads_its_loss_sets_off_the_alarm(cuda: Rig) -> None:
    with pytest.raises(RuntimeError, match="synchroniz"):
        cuda.fit(Reading(), cuda.batches(40), callbacks=[Alarm("cuda")], max_steps=None, max_epochs=1)


# The trace ------------------------------------------------------------------------------------------------------


class Trace(Callback):
    """Profiles the micro-batches from FIRST to LAST, each marked at its start."""

    def __init__(self, kind: str) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if kind == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self.profiler = torch.profiler.profile(activities=activities, acc_events=True)  # 2.11 warns without

    def on_train_batch_start(self, trainer: Trainer, policy: nn.Module, batch: Any, batch_idx: int) -> None:
        if batch_idx == FIRST:
            self.profiler.start()
        if FIRST <= batch_idx <= LAST:
            with torch.profiler.record_function("mark"):
                pass
        if batch_idx == LAST:
            self.profiler.stop()

    def between_the_marks(self) -> list[str]:
        """Names of what happened from the first mark to the last; starting and stopping the profiler waits too."""
        events: Any = cast("Any", self.profiler).events()
        marks = [e.time_range.start for e in events if e.name == "mark"]
        assert len(marks) >= LAST - FIRST + 1
        return [e.name for e in events if min(marks) < e.time_range.start < max(marks)]


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_trace_of_the_loop_shows_no_wait_and_no_copy_that_waits(rig: Rig, precision: str) -> None:
    trace = Trace(rig.kind)
    rig.fit(
        wide(), rig.batches(40), precision=rig.precision(precision, growth_interval=2000),
        callbacks=rig.defaults(trace, EMA()), clip_norm=1.0, log_every=None, max_steps=None, max_epochs=1,
    )  # fmt: skip
    names = trace.between_the_marks()
    updates = LAST - FIRST
    assert names.count("aten::mse_loss") >= updates - 1
    if rig.kind == "cuda":
        if not any(name.endswith("LaunchKernel") for name in names):
            pytest.skip("torch.profiler shows no calls of the driver here")
        waits = [n for n in names if n.endswith(("StreamSynchronize", "DeviceSynchronize"))]
        assert waits == []
        assert [n for n in names if "DtoH" in n and "Pageable" in n] == []
        # the flag of each update on its way to pinned memory, and its event: one each
        assert len([n for n in names if n.startswith("Memcpy DtoH")]) <= updates + 1
        assert len([n for n in names if n.endswith("EventSynchronize")]) <= updates + 1


# The mailbox ----------------------------------------------------------------------------------------------------


def test_mailbox_carries_what_was_written_before_it_was_sent(rig: Rig) -> None:
    mailbox = rig.strategy.mailbox(4)
    for number in range(100):
        for i, slot in enumerate(mailbox.slots):
            slot.fill_(number * 10 + i)
        mailbox.send()
        assert mailbox.read().tolist() == [number * 10 + i for i in range(4)]


@pytest.mark.accelerator
def test_mailbox_is_read_without_waiting_for_work_that_was_queued_after_it(cuda: Rig) -> None:
    mailbox = cuda.strategy.mailbox(1)
    mailbox.slots[0].fill_(7.0)
    mailbox.send()
    sleep(2_000_000_000)  # about a second
    with alarm("cuda"):
        assert mailbox.read().tolist() == [7.0]
    assert not torch.cuda.current_stream().query()  # the work is still going on
    torch.cuda.synchronize()


@pytest.mark.accelerator
def test_host_runs_ahead_of_the_device_by_no_more_than_one_update(cuda: Rig) -> None:
    """With slow work in every forward, the host has queued the next window while the last still computes."""

    class Slow(Wide):
        def forward(self, batch: Any) -> Tensor:
            sleep(100_000_000)
            return super().forward(batch)

    class Ahead(Callback):
        def __init__(self) -> None:
            self.busy: list[bool] = []

        def on_train_batch_end(self, *_: Any) -> None:
            self.busy.append(not torch.cuda.current_stream().query())

    ahead = Ahead()
    cuda.fit(Slow(), cuda.batches(20), callbacks=[ahead], max_steps=20, log_every=None)
    # kernels are loaded in the first steps, and the last is settled at once
    assert all(ahead.busy[3:-1])
