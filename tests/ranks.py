"""Runs of several processes for the tests: a policy of blocks, data that says which sample it is, what came of it."""

from __future__ import annotations

import math
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW
from torch.utils.data import Dataset, Subset

from policyfit import EMA, FP16, Callback, Checkpoint, Trainer, WarmupCosine
from policyfit.strategies.fsdp import FSDP
from policyfit.trainer.checkpoint import read_checkpoint

SAMPLES = 44  # an epoch of 8 a time ends with a window of 4
VALIDATED = range(8, 20)  # samples, and again 8 and 4 a time


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.inner, self.drop = nn.Linear(width, width), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.drop(torch.tanh(self.inner(x)))
        return out


class Policy(nn.Module):
    """Two blocks; the loss of a sample is multiplied by a factor that can poison it."""

    fsdp_units: ClassVar[list[str]] = ["Block"]

    def __init__(self, dropout: float = 0.0, norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 12)
        self.blocks = nn.ModuleList([Block(12, dropout) for _ in range(2)])
        self.norm = nn.BatchNorm1d(12) if norm else nn.Identity()
        self.last = nn.Linear(12, 3)

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        x = self.first(batch["x"])
        for block in self.blocks:
            x = block(x)
        error = (self.last(self.norm(x)).float() - batch["y"]).square().mean(dim=1)
        return (error * batch["factor"]).mean(), {"error": error.mean()}

    def select_action(self, observation: Tensor) -> Tensor:
        x = self.first(observation)
        for block in self.blocks:
            x = block(x)
        action: Tensor = self.last(self.norm(x))
        return action


class LightningPolicy(Policy):
    """The same in Lightning's dialect."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self(batch)[0]
        return loss

    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=1e-2)


class Detached(Policy):
    """On some ranks the loss has no gradient in some windows."""

    def __init__(self, windows: tuple[int, ...], rank: int, ranks: tuple[int, ...]) -> None:
        super().__init__()
        self.windows, self.detaches, self.calls = windows, rank in ranks, 0

    def forward(self, batch: dict[str, Tensor]) -> Any:
        loss, metrics = super().forward(batch)
        self.calls += 1
        return (loss.detach() if self.detaches and self.calls - 1 in self.windows else loss), metrics


class Samples(Dataset[dict[str, Any]]):
    """``poisoned`` samples have an infinite loss."""

    def __init__(self, poisoned: tuple[int, ...] = (), fails_at: int | None = None) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(SAMPLES, 6, generator=generator)
        self.y = torch.randn(SAMPLES, 3, generator=generator)
        self.poisoned, self.fails_at = poisoned, fails_at

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == self.fails_at:
            raise ValueError("the disk of this rank is gone")
        factor = math.inf if index in self.poisoned else 1.0
        return {"x": self.x[index], "y": self.y[index], "factor": torch.tensor(factor), "index": index}


class Seen(Callback):
    """Sample ids of every micro-batch, outcomes of every update, records; and what this rank has then of weights.

    These it ``keeps`` where they are asked for: whole weights that a forward has left could not be freed.
    """

    def __init__(self, keeps: bool = False) -> None:
        self.keeps = keeps
        self.ids: list[list[int]] = []
        self.outcomes: list[tuple[bool, str | None, float | None]] = []
        self.weights: list[str] = []
        self.records: list[dict[str, Any]] = []

    def on_train_batch_start(self, trainer: Trainer, policy: nn.Module, batch: Any, batch_idx: int) -> None:
        self.ids.append(batch["index"].tolist())

    def on_update_end(self, trainer: Trainer, policy: nn.Module, outcome: Any) -> None:
        self.outcomes.append((outcome.landed, outcome.reason, outcome.scale))
        if not self.keeps:
            return
        local = [trainer.distribution.local(p.detach()).numpy().tobytes() for p in policy.parameters()]
        self.weights.append(sha256(b"".join(local)).hexdigest())

    def on_log(self, trainer: Trainer, policy: nn.Module, record: Any) -> None:
        if "event" not in record:
            self.records.append(dict(record))


OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda p: AdamW(p, lr=1e-2),
    "adam unfused": lambda p: Adam(p, lr=1e-2, fused=False),
    "momentum": lambda p: SGD(p, lr=1e-2, momentum=0.9),
    "adagrad": lambda p: Adagrad(p, lr=1e-2),
    "sgd": lambda p: SGD(p, lr=1e-2),
}


def precision_of(name: str) -> Any:
    return FP16({"init_scale": 256.0, "growth_interval": 4}, allow_cpu=True) if name == "fp16" else name


def train(
    run_dir: str, distributed: str, *, precision: str = "no", optimizer: str = "adamw", batch_size: int = 4,
    steps: int = 8, dropout: float = 0.0, norm: bool = False, poisoned: tuple[int, ...] = (), extra: Any = (),
    resume: str | None = None, fails_at: int | None = None, every: int = 2, ema: bool = False, val: bool = False,
    val_fails_at: int | None = None, own: bool = True, keeps: bool = False,
    **settings: Any,
) -> dict[str, Any]:  # fmt: skip
    """One rank's part of a run; what it ends with, weights whole."""
    seen = Seen(keeps)
    strategy: Any = FSDP(timeout=30.0) if distributed == "fsdp" else distributed
    trainer = Trainer(
        "cpu", precision_of(precision), max_steps=steps, batch_size=batch_size, seed=7, clip_norm=1.0, log_every=2,
        run_dir=run_dir, distributed=strategy, callbacks=[seen, *extra, *([EMA(0.9)] if ema else []),
        *([Checkpoint(every_steps=every)] if own else [])], **settings,
    )  # fmt: skip
    policy = Policy(dropout, norm)
    trainer.fit(
        policy, Samples(poisoned, fails_at), Subset(Samples((), val_fails_at), VALIDATED) if val else None,
        resume=resume, optimizer=OPTIMIZERS[optimizer],
        schedule=lambda o: WarmupCosine(o, warmup_steps=3, total_steps=20),
    )  # fmt: skip
    return result(trainer, seen)


def result(trainer: Trainer, seen: Seen) -> dict[str, Any]:
    """Values that can be sent to the test."""
    timeless = [{k: v for k, v in r.items() if not k.endswith("_per_s")} for r in seen.records]
    return {
        "ids": seen.ids,
        "outcomes": seen.outcomes,
        "weights": seen.weights,
        "records": timeless,
        "step": trainer.step,
        "skipped": trainer.skipped,
        "plan": trainer.plan.text(),
        "last": str(Path(trainer.run_dir) / "checkpoints" / "last"),
    }


class Edits(Callback):
    """Puts an inf into a gradient on one rank, after the ranks have combined theirs."""

    def __init__(self, rank: int, update: int) -> None:
        self.rank, self.update = rank, update

    def on_before_optimizer_step(self, trainer: Trainer, policy: nn.Module, optimizer: Any) -> None:
        if trainer.distribution.rank == self.rank and trainer.updates == self.update:
            gradient = next(p.grad for p in policy.parameters() if p.grad is not None)
            trainer.distribution.local(gradient).view(-1)[0] = math.inf


class Overflows(Callback):
    """The same before the update looks at the gradients, as when a rank's own part of the sum overflows."""

    def __init__(self, rank: int, update: int) -> None:
        self.rank, self.update = rank, update

    def on_after_backward(self, trainer: Trainer, policy: nn.Module) -> None:
        if trainer.distribution.rank == self.rank and trainer.updates == self.update:
            gradient = next(p.grad for p in policy.parameters() if p.grad is not None)
            trainer.distribution.local(gradient).view(-1)[0] = math.inf


class Stops(Callback):
    def __init__(self, rank: int, after: int) -> None:
        self.rank, self.after = rank, after

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.distribution.rank == self.rank and trainer.micro_batches == self.after:
            trainer.stop("the machine is wanted back", exit_code=143)


class SavesAlone(Callback):
    """Has its own rank alone save at step 3."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def due(self, step: int) -> bool:
        return step == 3

    def on_due(self, trainer: Trainer, policy: nn.Module) -> None:
        if trainer.distribution.rank == self.rank:
            trainer.save_checkpoint()


class Rates(Callback):
    """How many samples a step has by the records of the log."""

    def __init__(self) -> None:
        self.samples_a_step = list[float]()

    def on_log(self, trainer: Trainer, policy: nn.Module, record: Any) -> None:
        if "steps_per_s" in record:
            self.samples_a_step.append(record["samples_per_s"] / record["steps_per_s"])


class Events(Callback):
    """The messages of one kind of event."""

    def __init__(self, kind: str) -> None:
        self.kind, self.messages = kind, list[str]()

    def on_log(self, trainer: Trainer, policy: nn.Module, record: Any) -> None:
        if record.get("event") == self.kind:
            self.messages.append(record["message"])


class Rolls(Callback):
    """Plays five episodes every so many steps."""

    def __init__(self, every: int) -> None:
        self.every, self.reports = every, list[dict[str, Any]]()

    def due(self, step: int) -> bool:
        return step > 0 and step % self.every == 0

    def on_due(self, trainer: Trainer, policy: nn.Module) -> None:
        report = trainer.evaluate(policy, Walk, episodes=5).to_dict()
        self.reports.append({k: v for k, v in report.items() if not k.startswith("latency")})


class Walk(gymnasium.Env[Any, Any]):
    """Episodes whose length depends on their seed."""

    observation_space = gymnasium.spaces.Box(-1, 1, (6,), np.float32)
    action_space = gymnasium.spaces.Box(-100, 100, (3,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.left = 2 + int(self.np_random.integers(5))
        return np.zeros(6, np.float32), {}

    def step(self, action: Any) -> Any:
        self.left -= 1
        return np.zeros(6, np.float32), 1.0, self.left == 0, False, {"success": self.left == 0}


class Telling(Walk):
    """Whose reward is the first number of the action, so that a return tells which weights acted."""

    def step(self, action: Any) -> Any:
        observation, _, *end = super().step(action)
        return observation, float(action[0]), *end


class Alone(Callback):
    """On one rank alone something is due at step 3, or asks for the others in a window."""

    def __init__(self, rank: int, how: str) -> None:
        self.rank, self.how, self.here = rank, how, False

    def on_fit_start(self, trainer: Trainer, policy: nn.Module) -> None:
        self.here = trainer.distribution.rank == self.rank

    def due(self, step: int) -> bool:
        return self.how == "due" and self.here and step == 3

    def on_train_batch_end(self, trainer: Trainer, policy: nn.Module, *_: Any) -> None:
        if self.here and trainer.micro_batches == 3:
            if self.how == "save":
                trainer.save_checkpoint()
            if self.how == "look":
                trainer.save_checkpoint(trainer.run_dir / "look", exact=False)
            if self.how == "evaluate":
                trainer.evaluate(policy, Walk, episodes=2)


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
