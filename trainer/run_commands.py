"""What callbacks may ask of a run: to stop, to report, to save."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ..strategies.errors import CallbackError, ConfigError
from . import state
from .newest import delete_checkpoint, whole_checkpoints
from .remote import RemoteRun
from .together import on_main
from .view import RunView


class RunCommands(RunView):
    """The commands of a Trainer, for what happens in a run."""

    _loggers: tuple[Any, ...]
    _collect: Callable[[str, Any], None] | None
    _evaluating: bool

    def stop(self, reason: str, *, exit_code: int = 0) -> None:
        """End the run after the update under way, of several ranks after the next; it counts as stopped, not as failed.

        Args:
            exit_code: Other than 0, ``fit`` ends in ``SystemExit`` with it, once everything is saved and closed.
        """
        self._active.stop(reason, exit_code)

    def log(self, name: str, value: Any) -> None:
        """Report a metric, a number or a scalar tensor: its mean stands in the next log record.

        What is reported of a micro-batch, from its start to ``on_train_batch_end``, weighs as much as its loss, and
        nothing where it only pads. Called during validation it becomes a mean over the validation data.

        Raises:
            ConfigError: The name is one of a record's own fields.
        """
        if name in ("step", "epoch", "event"):
            raise ConfigError(f"The metric name {name!r} is a field of every record. Log it under another name.")
        if self._collect is not None:
            self._collect(name, value)
        else:
            run = self._active
            run.means.add(name, value, 1.0 if run.updater.settling else run.weight)

    def event(self, kind: str, **fields: Any) -> None:
        """Report that something happened, at once: every ``on_log`` gets it, ``metrics.jsonl`` among them."""
        step, policy = (0, None) if self._run is None else (self._run.counters.step, self._run.policy)
        self.callbacks.call("on_log", self, policy, {"step": step, "event": kind, **fields})

    def emit(self, record: Mapping[str, Any]) -> None:
        """Hand a record of metrics to every ``on_log`` and, on rank 0, logger; remember its values as ``metrics``."""
        values = {name: value for name, value in record.items() if name not in ("step", "epoch")}
        self.remember(values)
        self.callbacks.call("on_log", self, self._active.policy, record)
        for logger in self._loggers if self.is_main else ():
            logger.log_metrics(values, step=record["step"])

    def remember(self, metrics: Mapping[str, float]) -> None:
        """Make these the last known values of their metrics."""
        self._metrics.update(metrics)

    @contextmanager
    def collecting(self, add: Callable[[str, Any], None]) -> Iterator[None]:
        """Lead ``log`` to ``add`` for a while."""
        before, self._collect = self._collect, add
        try:
            yield
        finally:
            self._collect = before

    def training_loss(self, batch: Any, batch_idx: int) -> torch.Tensor | None:
        """The loss of a micro-batch that is on the device, as the loop computes it; ``None`` without a gradient."""
        return self.precision.forward(self._active.adapter.training_step, batch, batch_idx)[0]

    # Checkpoints ------------------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        path: str | Path | None = None,
        *,
        background: bool = False,
        exact: bool = True,
        remote: str | None = None,
        consolidated: bool = False,
    ) -> Path:
        """Save the run as it stands, complete or not at all; returns the checkpoint's folder.

        Args:
            path: A folder; ``None`` is ``RUN_DIR/checkpoints/STEP``, to which ``last`` then points.
            background: Return once everything is copied, and write while training goes on. The folder appears when it
                is complete; an error ends the run at its next step. A save still under way is waited for first.
            exact: ``False`` saves also inside a window of a run of one process, without its gradients, and the window
                comes again after a resume; several ranks save where they meet alone. It needs a ``path`` of your own,
                by which alone a resume takes it.
            remote: An fsspec URL to which the checkpoint is copied once it is complete.
            consolidated: Write ``model.safetensors`` as a whole also where each rank writes the weights that it holds.

        Raises:
            CallbackError: Called where ranks do not meet, or, if ``exact``, inside a window, whose gradients no
                checkpoint holds; ``on_due`` is the place. Or not ``exact``, and without a path.
            CheckpointError: It could not be written; earlier checkpoints are untouched.
            TrainingDiverged: Weights or buffers are no longer finite.
        """
        if self._evaluating:
            raise CallbackError(
                "save_checkpoint() was called during a validation or rollout, in which other weights may stand in.\n"
                "Call it from on_validation_end, on_rollout_end or on_due."
            )
        return state.save(
            self._active, path, background=background, exact=exact, remote=remote, consolidated=consolidated
        )

    def wait_for_checkpoint(self) -> None:
        """Until a save in the background is complete.

        Raises:
            CheckpointError: It failed.
        """
        on_main(self.distribution, self._active.saver.wait, "the end of a save")

    def checkpoints(self) -> list[Path]:
        """The whole checkpoints of the run, oldest first."""
        return whole_checkpoints(self.run_dir / "checkpoints")

    def delete_checkpoint(self, checkpoint: Path) -> None:
        """Delete one of them."""
        delete_checkpoint(checkpoint)

    def remote_run(self, url: str) -> RemoteRun:
        """The copy of a run under an fsspec URL: its checkpoints' names, and how one is uploaded or deleted.

        Raises:
            ConfigError: There is no such kind of URL here.
        """
        return RemoteRun(url, None if self._run is None else self._run.id)
