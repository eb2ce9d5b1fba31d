"""The run that ``killing.py`` kills: everything on that could differ after a resume, and the ways to die in it."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import sys
import time
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from policyfit import EMA, FP16, Callback, Checkpoint, Trainer, WarmupCosine

SAMPLES, BATCH, ACCUMULATE, EPOCHS = 26, 4, 3, 5  # the last micro-batch and the last window of an epoch are shorter
MICRO_BATCHES = EPOCHS * -(-SAMPLES // BATCH)


@dataclass(frozen=True)
class Configuration:
    """What the harness varies."""

    precision: str
    workers: int
    background: bool

    @property
    def name(self) -> str:
        return f"{self.precision}-workers{self.workers}-{'background' if self.background else 'foreground'}"


ALL = [Configuration(*values) for values in product(("no", "bf16", "fp16"), (0, 2), (False, True))]
CONFIGURATIONS = {configuration.name: configuration for configuration in ALL}


@dataclass(frozen=True)
class Moment:
    """When a run is killed: at a place in it, or so long after, wherever it is by then."""

    #: How much of its remaining micro-batches is trained before; 0 counts places from the start of the process.
    part: float
    #: The name of a callback's hook, "file" for an operation on files of the run, or "start".
    place: str
    #: Which one of these places.
    count: int
    #: Seconds from there; ``None`` is there itself.
    delay_s: float | None


HOOKS = ("on_train_batch_start", "on_after_backward", "on_train_batch_end", "on_update_end", "on_save_checkpoint")
#: Audit events of operations on files; os.replace is an os.rename.
FILE_EVENTS = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.chmod", "os.symlink")
OPERATIONS_OF_A_SAVE = 110  # about: files opened, synced and renamed, and an older checkpoint deleted


def draw_moment(number: int, rng: random.Random) -> Moment:
    """One of three kinds, by turns: inside a save, some time after any place, and at a hook."""
    part, kind = rng.choice((0.0, rng.random(), rng.random(), rng.random(), rng.random())), number % 3
    place = ("file", rng.choice(("start", "file", *HOOKS)), rng.choice(HOOKS))[kind]
    count = rng.randint(1, OPERATIONS_OF_A_SAVE if place == "file" else 3)
    return Moment(part, place, count, rng.choice((rng.random() * 0.01, rng.random() * 0.3)) if kind == 1 else None)


def newest_step(run_dir: Path) -> int:
    """That of the newest checkpoint which was complete, under its name or making way for its successor; else 0."""
    names = (re.fullmatch(r"(\d+)|\.(\d+)\.replaced-\w+", path.name) for path in run_dir.glob("checkpoints/*"))
    return max((int(name[1] or name[2]) for name in names if name), default=0)


class Diary:
    """Lines of JSON, each in the file once it is written, whoever is killed after."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def write(self, kind: str, **fields: Any) -> None:
        os.write(self._descriptor, json.dumps({"kind": kind, **fields}).encode() + b"\n")


class Samples:
    """Augmented with draws from all three streams; every sample that is read is noted, by workers too."""

    def __init__(self, n: int, diary: Diary | None = None) -> None:
        self.x = torch.randn(n, 6, generator=torch.Generator().manual_seed(5))
        self.diary, self.epoch = diary, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if self.diary is not None:
            self.diary.write("read", epoch=self.epoch, index=index)
        noise = torch.rand(6) * 0.1 + random.random() * 0.1 + float(np.random.rand()) * 0.1
        return {"x": self.x[index] + noise, "index": torch.tensor(index)}


class Policy(nn.Module):
    """Dropout and BatchNorm; each random stream has its part in the loss, which is infinite now and then."""

    def __init__(self, infinite: float) -> None:
        super().__init__()
        self.infinite = infinite
        self.net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Dropout(0.3), nn.Linear(16, 3))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        loss: Tensor = self.net(batch["x"]).float().square().mean()
        if not self.training:
            return loss
        factor = 1 + 0.1 * random.random() + 0.1 * float(np.random.rand())
        return loss * torch.where(torch.rand(()) < self.infinite, float("inf"), factor)


class Recorder(Callback):
    """Notes where the run begins, every micro-batch, update and new checkpoint; keeps the state at the end."""

    def __init__(self, diary: Diary) -> None:
        self.diary, self.newest = diary, 0

    def on_fit_start(self, trainer: Trainer, policy: nn.Module) -> None:
        self.diary.write("start", step=trainer.resumed_step, micro_batches=trainer.micro_batches)

    def on_fit_end(self, trainer: Trainer, policy: nn.Module) -> None:
        # The last of the run's own may be from before the end of the epoch and the last validation.
        trainer.save_checkpoint(trainer.run_dir.parent / "end")

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        newest = newest_step(trainer.run_dir)
        if newest != self.newest:
            self.newest = newest
            self.diary.write("complete", step=newest)

    def on_train_batch_end(self, trainer: Trainer, policy: nn.Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        where = {"number": trainer.micro_batches, "epoch": trainer.epoch}
        self.diary.write("batch", **where, ids=batch["index"].tolist(), loss=outputs["loss"].item().hex())

    def on_update_end(self, trainer: Trainer, policy: nn.Module, outcome: Any) -> None:
        rate, norm = trainer.optimizers[0].param_groups[0]["lr"].hex(), outcome.grad_norm.hex()
        fields = {"step": outcome.step, "reason": outcome.reason, "scale": outcome.scale}
        self.diary.write("update", number=outcome.update, lr=rate, grad_norm=norm, **fields)


class Killer(Callback):
    """Kills its process at a moment; at the end at the latest."""

    def __init__(self, moment: Moment, run_dir: Path) -> None:
        self.moment, self.run_dir, self.left = moment, str(run_dir), moment.count
        self.first: int | None = 0 if moment.part == 0 else None  # micro-batch from which places are counted
        self.counting = self.first == 0
        self.bell = None if moment.delay_s is None else _executioner(moment.delay_s)
        self._sync = os.fsync
        os.fsync = self._fsync  # has no audit event
        sys.addaudithook(self._audit)
        if moment.place == "start":
            self.strike()

    def strike(self) -> None:
        self.counting, self.left = False, 0
        if self.bell is None:
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            os.write(self.bell, b"!")

    def at_the_end(self) -> None:
        if self.left:
            self.strike()
        signal.pause()

    def on_fit_start(self, trainer: Trainer, policy: nn.Module) -> None:
        done = trainer.micro_batches
        if self.first is None:
            self.first = done + int(self.moment.part * (MICRO_BATCHES - done))

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if self.first is not None and trainer.micro_batches == self.first and self.left:
            self.counting = True
        self._pass("on_train_batch_start")

    def on_after_backward(self, *_: Any) -> None:
        self._pass("on_after_backward")

    def on_train_batch_end(self, *_: Any) -> None:
        self._pass("on_train_batch_end")

    def on_update_end(self, *_: Any) -> None:
        self._pass("on_update_end")

    def on_save_checkpoint(self, *_: Any) -> None:
        self._pass("on_save_checkpoint")

    def _fsync(self, fd: Any) -> None:
        self._pass("file")
        self._sync(fd)

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.counting and event in FILE_EVENTS:
            path = str(arguments[0])
            # shutil.rmtree names what it deletes relative to its folder.
            if path.startswith(self.run_dir) or (event in ("os.remove", "os.rmdir") and not path.startswith("/")):
                self._pass("file")

    def _pass(self, place: str) -> None:
        if self.counting and place == self.moment.place:
            self.left -= 1
            if not self.left:
                self.strike()


def _executioner(delay_s: float) -> int:
    """Fork a process that waits for a byte and so long after it kills this one; returns where to write the byte."""
    reading, writing = os.pipe()
    victim = os.getpid()
    if os.fork() == 0:
        os.read(reading, 1)
        time.sleep(delay_s)
        os.kill(victim, signal.SIGKILL)
        os._exit(0)
    return writing


def train(configuration: Configuration, run_dir: Path, diary: Diary, every: int, resume: str | None,
          extra: tuple[Callback, ...] = ()) -> None:  # fmt: skip
    """One run, to its end, with everything on that could differ after a resume."""
    precision: Any = configuration.precision
    if precision == "fp16":  # the scale grows until a gradient overflows, again and again
        precision = FP16({"init_scale": 2.0**19, "growth_interval": 2}, allow_cpu=True)
    saves = Checkpoint(every_steps=every, keep=2, monitor="val/loss", background=configuration.background)
    trainer = Trainer(
        "cpu", precision, max_epochs=EPOCHS, batch_size=BATCH, accumulate=ACCUMULATE, workers=configuration.workers,
        clip_norm=0.5, seed=7, log_every=2, val_every=4, run_dir=run_dir,
        callbacks=[Recorder(diary), EMA(0.9), saves, *extra],
    )  # fmt: skip
    torch.manual_seed(0)
    trainer.fit(
        Policy(infinite=0.0 if configuration.precision == "fp16" else 0.05), Samples(SAMPLES, diary), Samples(5),
        optimizer=lambda p: AdamW(p, lr=1e-2), schedule=lambda o: WarmupCosine(o, warmup_steps=3, total_steps=15),
        resume=resume,
    )  # fmt: skip
