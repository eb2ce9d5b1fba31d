"""Save the run at intervals and on a new best, and keep only so many of the checkpoints."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from ..strategies.checks import number, whole
from ..strategies.errors import CallbackError, CheckpointError, ConfigError
from .callback import Callback

if TYPE_CHECKING:
    from ..trainer.rollout import RolloutReport
    from ..trainer.trainer import Trainer


class Checkpoint(Callback):
    """Save every so many steps or minutes, at each new best of a metric, and at the end of the run.

    Kept are the newest ``keep``, the best, each at a multiple of ``keep_every``, and the one that ``last`` leads to.
    What is not in this run's own ``checkpoints`` folder is never deleted, and nothing is deleted before a newer one is
    complete.

    Args:
        every_steps: Steps between saves; 0 or ``None`` is never.
        every_minutes: Minutes since the save before, looked at after each step, with several ranks at each log record;
            0 or ``None`` is never.
        keep: How many of the newest are kept, at least 1; ``None`` keeps all.
        keep_every: Steps; a checkpoint at a multiple of it is kept for good. 0 or ``None`` is none.
        monitor: A metric of validation or of rollouts, such as ``"val/loss"`` or ``"rollout/success_rate"``; ``None``
            knows no best.
        mode: Whether the best is the smallest or the largest value. NaN and infinities are never best.
        background: Let training go on while a checkpoint is written; it waits for the copy into memory alone. The
            last one of a run is always waited for.
        save_on_exception: After an error, keep what it left as ``STEP-exception``. It is marked as not exact: no
            resume takes it by itself, and nothing deletes it. Kept without being asked for when one of several ranks
            fails in the middle of an update and no rank, or no full set of shards, has the whole of it; or where it
            cannot tell the others, but has all weights.
        remote: An fsspec URL, such as ``"s3://bucket/run"``, where a copy of the run's folder is kept in the same way:
            its checkpoints, ``config.yaml`` and ``metrics.jsonl``.
    """

    due_last = True

    def __init__(
        self,
        every_steps: int | None = 1000,
        every_minutes: float | None = None,
        keep: int | None = 3,
        monitor: str | None = None,
        mode: Literal["min", "max"] = "min",
        background: bool = True,
        keep_every: int | None = None,
        save_on_exception: bool = False,
        remote: str | None = None,
    ) -> None:
        if every_steps is not None:
            whole("Checkpoint.every_steps", every_steps, 0, "Use 0 or None to save at no interval of steps.")
        if every_minutes is not None:
            remedy = "Use 0 or None to save at no interval of time."
            number("Checkpoint.every_minutes", every_minutes, least=0, remedy=remedy)
        if keep is not None:
            whole("Checkpoint.keep", keep, 1, "Use None to keep all.")
        if keep_every is not None:
            whole("Checkpoint.keep_every", keep_every, 0, "Use 0 or None to keep none for good.")
        if mode not in ("min", "max"):
            raise ConfigError(
                f"Checkpoint.mode must be 'min' or 'max', got {mode!r}.\nUse 'min' where smaller is better."
            )
        if remote is not None and not (isinstance(remote, str) and "://" in remote):
            raise ConfigError(
                f"Checkpoint.remote must be a URL, got {remote!r}.\nA folder of this machine is written file:///FOLDER."
            )
        self.every_steps, self.every_minutes = every_steps or 0, every_minutes or 0
        self.keep, self.monitor, self.mode, self.background = keep, monitor, mode, background
        self.keep_every, self.save_on_exception = keep_every or 0, save_on_exception
        self.remote = remote
        self._best: dict[str, Any] | None = None
        self._other_best: dict[str, Any] | None = None
        self._improved_step: int | None = None
        self._saved_step: int | None = None
        self._saved_at = time.monotonic()
        self._has_begun = False
        self._is_alone, self._main_says_so = True, False

    def setup(self, trainer: Trainer, policy: nn.Module, stage: str) -> None:
        """Nothing can be saved before ``on_fit_start``.

        Raises:
            ConfigError: What is at ``remote`` is another run's, or further than this one. Or there are several ranks,
                and nothing is logged, when ``every_minutes`` is looked at.
            CheckpointError: ``remote`` cannot be reached.
        """
        if stage == "fit":
            self._has_begun = False
            if self.every_minutes > 0 and trainer.log_every is None and trainer.distribution.world_size > 1:
                raise ConfigError(
                    "Checkpoint.every_minutes is looked at when training is logged, if there are several ranks, and "
                    "log_every=None logs at the end alone.\nGive log_every, or save by every_steps."
                )
            if self.remote is not None and trainer.is_main:
                self._check_remote(trainer, self.remote)

    def _check_remote(self, trainer: Trainer, url: str) -> None:
        copy = trainer.remote_run(url)
        found = None
        if not copy.is_own():
            found = "the checkpoints of another run"
        elif (names := copy.names()) and int(names[-1]) > trainer.step:
            found = f"checkpoint {names[-1]} of this run, which goes on from step {trainer.step}"
        if found:
            raise ConfigError(
                f"{url} already holds {found}, and nothing of it is overwritten.\n"
                f"Go on with it by resume={url!r} in a new run_dir, or choose another URL."
            )

    def due(self, step: int) -> bool:
        """At the interval, when the minutes are over, and at a new best; once a step."""
        if step < 1 or step == self._saved_step:
            return False
        return (
            (self.every_steps > 0 and step % self.every_steps == 0)
            or step == self._improved_step
            or (self.every_minutes > 0 and (self._minutes_are_over() if self._is_alone else self._main_says_so))
        )

    def _minutes_are_over(self) -> bool:
        return time.monotonic() - self._saved_at >= 60 * self.every_minutes

    def on_log(self, trainer: Trainer, policy: nn.Module, record: Mapping[str, Any]) -> None:
        """Where there are several ranks, the clock of rank 0 is asked whenever the training is logged, on all alike."""
        if self.every_minutes > 0 and not self._is_alone and "lr" in record and "event" not in record:
            place = f"the log of step {trainer.step}"
            self._main_says_so = trainer.distribution.broadcast(self._minutes_are_over(), place)

    def on_fit_start(self, trainer: Trainer, policy: nn.Module) -> None:
        """The clock starts, and a run from step 0 has no best yet."""
        self._improved_step = self._saved_step = None
        self._saved_at = time.monotonic()
        self._has_begun = True
        self._is_alone, self._main_says_so = trainer.distribution.world_size == 1, False
        if trainer.step == 0:
            self._best = None
        if self._other_best is not None:
            other, self._other_best = self._other_best, None
            trainer.event(
                "warning",
                message=f"The checkpoint's best is the {other['mode']} of {other['monitor']}; the best "
                f"{self.monitor} is looked for anew, and {other['path']} is no longer kept as the best.",
            )

    def on_validation_end(self, trainer: Trainer, policy: nn.Module) -> None:
        """Note a new best, which makes this step due.

        Raises:
            CallbackError: The monitored metric is not among those of the validation.
        """
        if self.monitor is not None and not self.monitor.startswith("rollout/"):
            self._look_for_best(trainer, self.monitor)

    def on_rollout_end(self, trainer: Trainer, policy: nn.Module, report: RolloutReport) -> None:
        """The same for a metric of rollouts; those after the run have no step to be saved at."""
        if self.monitor is not None and self.monitor.startswith("rollout/") and trainer.status == "running":
            self._look_for_best(trainer, self.monitor)

    def _look_for_best(self, trainer: Trainer, monitor: str) -> None:
        if monitor not in trainer.metrics:
            there = ", ".join(sorted(trainer.metrics)) or "none"
            raise CallbackError(
                f"Checkpoint.monitor is {monitor!r}, but the metrics here are: {there}.\nName one of them."
            )
        value = float(trainer.metrics[monitor])
        if math.isfinite(value) and (self._best is None or self._is_better(value, self._best["value"])):
            # The name is needed before the save, because this state is part of what is saved.
            self._best = {"value": value, "step": trainer.step, "path": f"{trainer.step:06d}"}
            self._improved_step = trainer.step
            if trainer.step == self._saved_step:  # the last validation comes after the interval's save
                self._saved_step = None

    def on_due(self, trainer: Trainer, policy: nn.Module) -> None:
        """Save, and delete what is not to be kept, once what replaces it is complete."""
        self._save(trainer, background=self.background, remote=self.remote)
        if not self.background:
            self._delete_others(trainer)

    def on_fit_end(self, trainer: Trainer, policy: nn.Module) -> None:
        """Save the final state, unless the last save was at this very step and has the weights as a whole.

        Raises:
            CheckpointError: It could not be written, or not be copied to ``remote``.
        """
        if trainer.step != self._saved_step or trainer.distribution.saves_shards:
            self._save(trainer, background=False, remote=None, consolidated=True)
        else:
            trainer.wait_for_checkpoint()
        if self.remote is not None and trainer.is_main:  # what is there already is not sent again
            trainer.remote_run(self.remote).upload(trainer.run_dir / "checkpoints" / f"{trainer.step:06d}")
        self._delete_others(trainer)

    def on_exception(self, trainer: Trainer, policy: nn.Module, error: BaseException) -> None:
        """Keep what the error left, if that was asked for, or if nothing better can be saved of it."""
        if self._has_begun and (self.save_on_exception or trainer.keeps_remains) and trainer.can_save:
            try:
                trainer.wait_for_checkpoint()
            except Exception as failure:  # told; what the error left is still to be kept
                trainer.event("warning", source="Checkpoint", message=f"the save before failed too: {failure}")
            path = trainer.run_dir / "checkpoints" / f"{trainer.step:06d}-exception"
            try:
                trainer.save_checkpoint(path, exact=False)
            except BaseException as failure:
                if not trainer.distribution.is_lost(failure):  # else the others wait in it
                    trainer.distribution.excuse(failure)
                raise
            message = f"what the error left is kept in {path}, which is not exact: a resume takes it only by this path"
            trainer.event("warning", source="Checkpoint", message=message)

    def state_dict(self) -> dict[str, Any]:
        """The best so far: ``value``, ``step``, and ``path`` relative to the run's ``checkpoints``."""
        if self._best is None:
            return {}
        return {"monitor": self.monitor, "mode": self.mode, **self._best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the best back, if it is the best of the same metric."""
        same = (state["monitor"], state["mode"]) == (self.monitor, self.mode)
        self._best = {key: state[key] for key in ("value", "step", "path")} if same else None
        self._other_best = None if same or self.monitor is None else state

    def _is_better(self, value: float, best: float) -> bool:
        return value < best if self.mode == "min" else value > best

    def _save(self, trainer: Trainer, *, background: bool, remote: str | None, consolidated: bool = False) -> None:
        if background:  # the one before is complete by now, and this one will be by the next
            trainer.wait_for_checkpoint()
            self._delete_others(trainer)
        trainer.save_checkpoint(background=background, remote=remote, consolidated=consolidated)
        self._saved_step, self._saved_at, self._main_says_so = trainer.step, time.monotonic(), False

    def _delete_others(self, trainer: Trainer) -> None:
        if self.keep is None or not trainer.is_main:
            return
        last = (trainer.run_dir / "checkpoints" / "last").resolve().name
        complete = {path.name: path for path in trainer.checkpoints()}
        for name in self._superfluous(list(complete), last):
            self._try(trainer, partial(trainer.delete_checkpoint, complete[name]))
        if self.remote is not None:
            copy = trainer.remote_run(self.remote)
            names: list[str] = []
            self._try(trainer, lambda: names.extend(copy.names()))
            for name in self._superfluous(names, last):
                self._try(trainer, partial(copy.delete, name))

    def _superfluous(self, names: list[str], last: str) -> list[str]:
        """Those of the checkpoints, oldest first, that are not to be kept."""
        kept = {*names[-(self.keep or 0) :], last, "" if self._best is None else self._best["path"]}
        return [n for n in names if n not in kept and not (self.keep_every and int(n) % self.keep_every == 0)]

    def _try(self, trainer: Trainer, delete: Callable[[], object]) -> None:
        try:
            delete()
        except (CheckpointError, OSError) as error:
            trainer.event("warning", message=f"{error} It is tried again at the next save.")
