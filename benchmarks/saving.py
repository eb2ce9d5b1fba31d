"""How long the loop stands still for a save, beside others: ``python -m benchmarks.saving``.

A policy of 50 M parameters with AdamW's state, 604 MB. Wall time, since the disk is part of it, as ratios to
``torch.save`` of the same state in the same run; policyfit's snapshot is that of the second save on, when its
memory is there.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import async_save as dcp_async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from policyfit.trainer.checkpoint import CheckpointState, write_checkpoint
from policyfit.trainer.saving import Saver


def state_of(policy: nn.Module, optimizer: torch.optim.Optimizer) -> CheckpointState:
    return CheckpointState(
        manifest={"counters": {"step": 1, "micro_batches": 1}}, model=policy.state_dict(), policy_config={},
        optimizers=[optimizer.state_dict()], schedules=[], scaler=None, rng={}, callbacks={},
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.saving", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    policy = nn.Sequential(*[nn.Linear(2500, 2500) for _ in range(8)])
    optimizer = torch.optim.AdamW(policy.parameters(), fused=True)
    policy(torch.randn(1, 2500)).sum().backward()
    optimizer.step()
    folder = Path(tempfile.mkdtemp())
    saver = Saver(pinned=False, synchronize=lambda: None)
    under_way: list[Any] = []  # futures of DCP

    def flat() -> dict[str, torch.Tensor]:
        tensors = {f"model.{name}": value for name, value in policy.state_dict().items()}
        for index, entry in optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{index}.{name}": value for name, value in entry.items()}
        return tensors

    def both() -> dict[str, Any]:
        return {"model": policy.state_dict(), "optimizer": optimizer.state_dict()}

    def in_background(state: CheckpointState) -> None:
        write_checkpoint(folder / "000002", state)

    ways: dict[str, Callable[[], Any]] = {
        "torch.save": lambda: torch.save(both(), folder / "torch.pt"),
        "safetensors": lambda: save_file(flat(), folder / "flat.safetensors"),
        "DCP": lambda: dcp_save(flat(), checkpoint_id=folder / "dcp", no_dist=True),
        "DCP async": lambda: under_way.append(dcp_async_save(flat(), checkpoint_id=folder / "async", no_dist=True)),
        "policyfit, foreground": lambda: write_checkpoint(folder / "000001", state_of(policy, optimizer)),
        "policyfit, background": lambda: saver.start(saver.snapshot(state_of(policy, optimizer)), in_background),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    try:
        for _ in range(rounds + 1):
            for name, save in ways.items():
                start = time.perf_counter()
                save()
                times[name].append(time.perf_counter() - start)
                saver.wait()
                while under_way:
                    under_way.pop().result()
    finally:
        shutil.rmtree(folder)
    size = sum(tensor.nbytes for tensor in flat().values()) / 1e6
    print(f"{size:.0f} MB, the loop stands still, torch.save = 1 (median of {rounds}):")
    unit = median(times["torch.save"][1:])
    for name, seconds in times.items():
        print(f"  {name:<22} {median(seconds[1:]) / unit:6.2f}   ({median(seconds[1:]) * 1000:.0f} ms)")


if __name__ == "__main__":
    main()
