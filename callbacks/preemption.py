"""Leave in good order when the machine is wanted back."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
import time
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING, Any

from torch import nn

from .callback import Callback

if TYPE_CHECKING:
    from ..trainer.trainer import Trainer


_ECHO_S = 2.0


class Preemption(Callback):
    """At SIGTERM or SIGUSR1 finish the update, save, and end the process with exit code 143; at a second one, at once.

    With several processes a repeat within two seconds counts as the same signal, since SLURM and torchrun both send it.

    The handlers that were there come back after the run. A run outside the main thread cannot have handlers, and says
    so in an event.

    Args:
        interrupt: Do the same at SIGINT (Ctrl-C), with exit code 130; otherwise it ends the run where it is, unsaved.
        requeue: Inside a SLURM job, put it back into the queue by ``scontrol requeue`` after saving.
    """

    def __init__(self, *, interrupt: bool = False, requeue: bool = False) -> None:
        self.interrupt, self.requeue = interrupt, requeue
        self._received: signal.Signals | None = None
        self._received_at, self._process = 0.0, 0
        self._before: dict[signal.Signals, Any] = {}
        self._trainer: Trainer | None = None

    def setup(self, trainer: Trainer, policy: nn.Module, stage: str) -> None:
        """Put the handlers in place, for a fit."""
        if stage != "fit":
            return
        if threading.current_thread() is not threading.main_thread():
            message = "signals are not handled: this run is not in the main thread"
            trainer.event("warning", source="Preemption", message=message)
            return
        self._received, self._trainer, self._process = None, trainer, os.getpid()
        for number in (signal.SIGTERM, signal.SIGUSR1, *([signal.SIGINT] if self.interrupt else [])):
            self._before[number] = signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        code, now, trainer = 130 if number == signal.SIGINT else 143, time.monotonic(), self._trainer
        if trainer is None:
            os._exit(code)
        if self._received is not None:
            if trainer.distribution.world_size == 1 or now - self._received_at > _ECHO_S:
                os._exit(code)
            return
        self._received, self._received_at = signal.Signals(number), now
        if os.getpid() != self._process:  # a data worker, forked with this handler, which the run needs to its end
            return
        said = f"{self._received.name} was received"
        trainer.stop(said, exit_code=code)
        if trainer.is_main:
            # Past sys.stderr, which may be in the middle of a line of its own; nobody may be there to read it.
            with suppress(OSError):
                os.write(2, f"{said}: the run will end soon, after this update or the next, and be saved\n".encode())

    def on_fit_end(self, trainer: Trainer, policy: nn.Module) -> None:
        """Save, unless another callback has; then ask for the queue. A signal to one rank is one to all."""
        ranks = trainer.distribution
        if not any(ranks.gather(self._received is not None, "the end of the run")):
            return
        trainer.wait_for_checkpoint()
        name = f"{trainer.step:06d}"
        is_saved = ranks.is_main and name in [path.name for path in trainer.checkpoints()]
        if not ranks.broadcast(is_saved, "the end of the run"):
            trainer.save_checkpoint()
        job = os.environ.get("SLURM_JOB_ID")
        if self.requeue and job and trainer.is_main:
            scontrol = shutil.which("scontrol")
            done = subprocess.run([scontrol, "requeue", job], check=False) if scontrol else None
            if done is None or done.returncode:
                message = f"SLURM job {job} could not be put back into the queue: scontrol requeue failed"
                trainer.event("warning", source="Preemption", message=message)

    def teardown(self, trainer: Trainer, policy: nn.Module, stage: str) -> None:
        """Put back the handlers that were there."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()
        self._trainer = None
