"""What callbacks and users may see of a Trainer and its run: read only."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import torch

from ..callbacks.callback import CallbackList
from ..strategies.device import DeviceStrategy
from ..strategies.distributed import DistributionStrategy
from ..strategies.errors import CallbackError
from ..strategies.facts import MachineFacts
from ..strategies.precision import PrecisionStrategy
from .counters import Counters
from .outcome import Outcome
from .plan import Plan
from .resolve import Choices
from .run import Run
from .settings import Settings

Status = Literal["new", "running", "completed", "stopped", "interrupted", "failed"]


class RunView:
    """The properties of a Trainer. Asking for ``step``, ``skipped``, ``updates`` or ``outcome`` settles an update."""

    facts: MachineFacts
    callbacks: CallbackList
    _settings: Settings
    _choices: Choices
    _run: Run | None
    _plan: Plan
    _status: Status
    _metrics: dict[str, float]

    @property
    def device(self) -> DeviceStrategy:
        """The device strategy."""
        return self._choices.device.value

    @property
    def precision(self) -> PrecisionStrategy:
        """The precision strategy."""
        return self._choices.precision.value

    @property
    def distribution(self) -> DistributionStrategy:
        """The distribution strategy."""
        return self._choices.distribution.value

    @property
    def is_main(self) -> bool:
        """Whether this process writes and prints."""
        return self.distribution.is_main

    @property
    def plan(self) -> Plan:
        """What the run does and why."""
        return self._plan

    @property
    def status(self) -> Status:
        """Where the last run stands: it is running, or how it ended."""
        return self._status

    @property
    def stop_reason(self) -> str | None:
        """Why the run was stopped; ``None`` if nobody asked."""
        return None if self._run is None else self._run.stop_reason

    @property
    def metrics(self) -> Mapping[str, float]:
        """The last known value of every metric, by name."""
        return MappingProxyType(self._metrics)

    @property
    def max_steps(self) -> int | None:
        """Steps that the run is to make."""
        return self._settings.max_steps if self._run is None else self._run.settings.max_steps

    @property
    def max_epochs(self) -> int | None:
        """Epochs that the run is to make."""
        return self._settings.max_epochs if self._run is None else self._run.settings.max_epochs

    @property
    def log_every(self) -> int | None:
        """Steps between two log records; ``None`` for one at the end."""
        return self._settings.log_every

    @property
    def batches_per_epoch(self) -> int | None:
        """Micro-batches in an epoch; ``None`` where the data does not say."""
        return None if self._run is None else self._run.data.batches_per_epoch

    @property
    def run_dir(self) -> Path:
        """The folder of the run."""
        return self._active.run_dir

    @property
    def can_save(self) -> bool:
        """Whether a save finds all it needs: while the run goes on, where all ranks end together, on one alone."""
        if self.distribution.world_size == 1 or self._status in ("running", "completed", "stopped"):
            return True
        return self._active.failed

    @property
    def keeps_remains(self) -> bool:
        """Whether what a failure left is to be kept as not exact: no rank has the update whole, or it is alone."""
        return self._active.keeps_remains

    @property
    def resumed(self) -> bool:
        """Whether the run goes on from a checkpoint."""
        return self._active.resumed

    @property
    def resumed_step(self) -> int:
        """The step at which the run was taken up; 0 for a fresh one."""
        return self._active.resumed_step

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers of the run."""
        return self._active.updater.optimizers

    # Counters: asking settles the last update ------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Updates that landed (Lightning's ``global_step``). Settles the last update."""
        return self._settled.step

    @property
    def skipped(self) -> int:
        """Updates that were skipped. Settles the last update."""
        return self._settled.skipped

    @property
    def updates(self) -> int:
        """Updates that landed or were skipped. Settles the last update."""
        return self._settled.updates

    @property
    def outcome(self) -> Outcome | None:
        """What became of the last update, settled by asking; ``None`` before the first."""
        return None if self._run is None else self._run.updater.outcome

    @property
    def micro_batches(self) -> int:
        """Draws from the loader."""
        return 0 if self._run is None else self._run.counters.micro_batches

    @property
    def epoch(self) -> int:
        """The pass over the data under way, from 0."""
        if self._run is None:
            return 0
        ended = self._run.ended_epoch
        return self._run.counters.epoch if ended is None else ended

    @property
    def _settled(self) -> Counters:
        if self._run is None:
            return Counters()
        self._run.updater.settle()
        return self._run.counters

    @property
    def _active(self) -> Run:
        if self._run is None:
            raise CallbackError("There is no run yet: this is known from fit() on.")
        return self._run
