"""What a step costs beside the idiomatic loop written by hand: CPU time, from interleaved slices of one run.

Both train the tiny MLP 64→128→7 on batches of 32 held in memory, with fused AdamW, a cosine schedule and, in the
first case, clipping by norm; the loop by hand reads nothing from the device. policyfit runs with its default
callbacks, logging every 50 steps, the bar on. The net is tiny on purpose: everything but the loop is small.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR

from policyfit import Callback, Progress, Trainer

SLICE = 300
Batch = tuple[Tensor, Tensor]


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 7))

    def forward(self, batch: Batch) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])


class InMemory:
    """A loader over batches in memory, in one order."""

    def __init__(self, batches: list[Batch]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def by_hand(batches: list[Batch], clip: float | None) -> Iterator[float]:
    """CPU seconds of each slice of the hand-written loop, for ever."""
    torch.manual_seed(0)
    policy = MLP()
    optimizer = AdamW(policy.parameters(), lr=1e-3, fused=True)
    schedule = CosineAnnealingLR(optimizer, 1_000_000)
    while True:
        start = time.process_time()
        for batch in batches:
            optimizer.zero_grad(set_to_none=True)
            policy(batch).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(policy.parameters(), clip)
            optimizer.step()
            schedule.step()
        yield time.process_time() - start


class Slices(Callback):
    """Hands over to the other loops at the end of each epoch, which is a slice, and leaves them out of its time."""

    def __init__(self, others: Callable[[], None], rounds: int) -> None:
        self.others, self.rounds, self.seconds = others, rounds, list[float]()

    def on_train_epoch_start(self, *_: Any) -> None:
        self.start = time.process_time()

    def on_train_epoch_end(self, trainer: Trainer, policy: nn.Module) -> None:
        self.seconds.append(time.process_time() - self.start)
        self.others()
        if len(self.seconds) == self.rounds:
            trainer.stop("measured")


def measure(clip: float | None, rounds: int, *, bar: bool) -> None:
    batches = [(torch.randn(32, 64), torch.randn(32, 7)) for _ in range(SLICE)]
    first, second = by_hand(batches, clip), by_hand(batches, clip)
    a: list[float] = []
    b: list[float] = []

    def others() -> None:
        a.append(next(first))
        b.append(next(second))

    slices = Slices(others, rounds + 3)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            "cpu", "no", clip_norm=clip, max_epochs=1_000_000, run_dir=Path(folder) / "run",
            callbacks=[slices, *([] if bar else [Quiet()])],
        )  # fmt: skip
        trainer.fit(
            MLP(), InMemory(batches), optimizer=lambda p: AdamW(p, lr=1e-3),
            schedule=lambda o: CosineAnnealingLR(o, 1_000_000),
        )  # fmt: skip
    ours = sorted(x / y for x, y in zip(slices.seconds[3:], a[3:], strict=True))
    itself = sorted(x / y for x, y in zip(b[3:], a[3:], strict=True))
    step = sorted(a[3:])[rounds // 2] / SLICE * 1e6
    quarter, half, rest = rounds // 4, rounds // 2, rounds - 1 - rounds // 4
    print(
        f"clip_norm={clip!s:<5} policyfit / by hand {ours[half]:.3f} ({ours[quarter]:.3f} to {ours[rest]:.3f})   "
        f"by hand / itself {itself[half]:.3f} ({itself[quarter]:.3f} to {itself[rest]:.3f})   "
        f"by hand {step:.0f} us a step",
        file=sys.stderr,
    )


class Quiet(Progress):
    """Progress without a word."""

    def __init__(self) -> None:
        super().__init__()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=41, help=f"slices of {SLICE} steps that are measured")
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    print("CPU-time ratios, median (quartiles):", file=sys.stderr)
    for clip in (1.0, None):
        measure(clip, rounds, bar=True)


if __name__ == "__main__":
    main()
