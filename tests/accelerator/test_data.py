"""Batches on their way to the device: the same, in order, one ahead, and never overwritten while they are used."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from rig import Rig, Wide, assert_equal, sleep, weights, wide
from torch import Tensor


def nested(n: int, *, pinned: bool) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(2)
    made = []
    for i in range(n):
        image, state = torch.randn(64, 512, generator=generator), torch.randn(64, 7, generator=generator)
        ids = torch.arange(i, i + 64)
        if pinned:
            image, state, ids = image.pin_memory(), state.pin_memory(), ids.pin_memory()
        made.append({"observation": {"image": image, "state": state}, "ids": [ids, "text"], "number": i})
    return made


@pytest.mark.parametrize("pinned", [False, True])
def test_stream_gives_the_same_batches_in_their_order_on_the_device(rig: Rig, pinned: bool) -> None:
    if pinned and not rig.strategy.pins_memory:
        pytest.skip(f"{rig.kind} takes no pinned memory")
    made = nested(20, pinned=pinned)
    received = list(rig.strategy.stream(made))
    assert [batch["number"] for batch in received] == list(range(20))
    for ours, theirs in zip(received, made, strict=True):
        assert ours["observation"]["image"].device.type == rig.kind
        assert ours["ids"][0].dtype == torch.int64
        assert ours["ids"][1] == "text"
        for key in ("image", "state"):
            assert torch.equal(ours["observation"][key].cpu(), theirs["observation"][key])
        assert torch.equal(ours["ids"][0].cpu(), theirs["ids"][0])


class Counting:
    def __init__(self, held: list[Any]) -> None:
        self.held, self.drawn = held, 0

    def __iter__(self) -> Iterator[Any]:
        for item in self.held:
            self.drawn += 1
            yield item


@pytest.mark.accelerator
def test_stream_is_one_batch_ahead(streaming: Rig) -> None:
    source = Counting(nested(5, pinned=True))
    drawn = [source.drawn for _ in streaming.strategy.stream(source)]
    assert drawn == [2, 3, 4, 5, 5]


@pytest.mark.accelerator
def test_batch_is_not_overwritten_while_slow_work_on_it_is_queued(cuda: Rig) -> None:
    made = nested(60, pinned=True)
    sums: list[Tensor] = []
    for batch in cuda.strategy.stream(made):
        sleep(1_000_000)
        sums.append(batch["observation"]["image"].double().sum())
        del batch  # its memory is free for the next copy as far as the host can tell
    expected = torch.stack([batch["observation"]["image"].double().sum() for batch in made])
    # float64 sums of 32,768 numbers in another order
    assert torch.allclose(torch.stack(sums).cpu(), expected, rtol=0, atol=1e-9)


def test_streamed_run_equals_one_whose_batches_were_on_the_device_before(rig: Rig) -> None:
    data = rig.batches(12)
    resident = [type(batch)(*(part.to(rig.device) for part in batch)) for batch in data]
    streamed, placed = wide(), wide()
    rig.fit(streamed, data, max_steps=12)
    rig.fit(placed, resident, max_steps=12)
    assert_equal(weights(streamed), weights(placed))


class Samples(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(64, generator=generator), torch.randn(32, generator=generator)


class Pairs(Wide):
    def forward(self, batch: Any) -> Tensor:
        return torch.nn.functional.mse_loss(self.act(batch[0]), batch[1])


def test_dataset_with_workers_gives_the_run_of_one_without(rig: Rig) -> None:
    if multiprocessing.get_start_method() != "fork":
        pytest.skip("workers that are not forked cannot import a test's dataset")
    found = []
    for workers in (0, 2):
        torch.manual_seed(0)
        policy = Pairs()
        rig.trainer(workers=workers, seed=3, batch_size=16, max_steps=6).fit(policy, Samples())
        found.append(weights(policy))
    assert_equal(*found)
