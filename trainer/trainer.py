"""``Trainer``: the object users hold. It composes strategies and callbacks; the loop is in ``loop.py``."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NoReturn

import torch
from torch import nn

from ..callbacks.callback import Callback, CallbackList
from ..callbacks.defaults import with_defaults
from ..callbacks.tf32 import TF32
from ..strategies.checks import true_or_false
from ..strategies.device import DeviceStrategy
from ..strategies.distributed import DistributionStrategy
from ..strategies.errors import CallbackError, ConfigError, DistributedError
from ..strategies.fabric import FabricPlugin
from ..strategies.facts import probe
from ..strategies.precision import PrecisionStrategy
from ..strategies.scaler import GradScalerConfig
from . import state
from .checkpoint import CheckpointState, read_checkpoint
from .describe import class_of, describe
from .loop import train
from .newest import delete_checkpoint, newest_checkpoint, whole_checkpoints
from .optimizer import OptimizerFactory
from .plan import Plan
from .prepare import Choices, dry_run, prepare, prepare_validation
from .process import choose_threads, process_state, run_all
from .remote import RemoteRun, is_url
from .resolve import resolve_device, resolve_distribution, resolve_precision
from .rng import preserved
from .rollout import RolloutReport, acting, rollout
from .run import Run
from .run_dir import check_free, has_checkpoint, held, make, new_name, newest_run, replace_text, run_of
from .schedule import ScheduleFactory
from .settings import NonFinite, Settings, checked_loggers, listed, run_folder
from .together import on_main, parts
from .validation import validate
from .view import RunView


class Trainer(RunView):
    """Trains a robot policy on the device and in the precision that it was asked for, or says why not.

    Args:
        device: "auto", "cpu", "cuda", "cuda:N", "mps", "xpu", "xpu:N" ("rocm", "hip" on ROCm), or a strategy.
        precision: "no", "bf16", "fp16", "auto", a strategy such as ``FP16(allow_cpu=True)``, or a precision plugin
            of lightning-fabric.
        grad_scaler: Settings of fp16's loss scale, a ``GradScalerConfig`` or its fields.
        tf32: On (True) or off (False) where the device has it; ``None`` leaves torch's switches alone.
        distributed: "auto" or "none": one process. Others come with a later release.
        compile: Compile the policy with ``torch.compile``.
        max_steps: Updates that land; ``None`` for no limit. With neither limit a run is one epoch.
        max_epochs: Passes over the data; ``None`` for no limit.
        batch_size: Samples in a micro-batch, where the data is a dataset.
        workers: Processes that load data; "auto" is none on the cpu, else up to 4.
        accumulate: Micro-batches in an update's window.
        clip_norm: Largest L2 norm of all gradients, in units of the loss; ``None`` for no limit.
        clip_value: Largest absolute value of a gradient's element; ``None`` for no limit.
        non_finite: What a non-finite gradient does: "skip" its update, "raise", or "off" for no guard.
        max_skips: Skips in a row that end the run.
        val_every: Steps between validations; ``None`` or 0: once, at the end.
        log_every: Steps between log records; ``None`` or 0: only at the end.
        seed: Seeds every random stream at the start of ``fit``; ``None`` leaves them and draws a seed for the data.
        deterministic: Ask torch for deterministic algorithms during the run.
        run_dir: The folder of the run; ``None`` makes a new one under ``runs/``.
        callbacks: More callbacks. One of a default's class replaces that default.
        loggers: Fabric or Lightning loggers, which get every record of metrics.
        default_callbacks: False leaves out all defaults but ``BF16Support``.

    Raises:
        ConfigError: A setting out of range, or two that exclude each other.
        DeviceUnavailableError: The device is not here.
        PrecisionError: The device cannot run the precision.

    Example:
        >>> Trainer(device="auto", precision="bf16").fit(policy)  # doctest: +SKIP
    """

    def __init__(
        self,
        device: str | DeviceStrategy = "auto",
        precision: str | PrecisionStrategy | FabricPlugin | Literal[False] | None = "no",
        *,
        grad_scaler: GradScalerConfig | Mapping[str, Any] | None = None,
        tf32: bool | None = True,
        distributed: str | DistributionStrategy = "auto",
        compile: bool = False,
        max_steps: int | None = None,
        max_epochs: int | None = None,
        batch_size: int = 8,
        workers: int | Literal["auto"] = "auto",
        accumulate: int = 1,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        non_finite: NonFinite = "skip",
        max_skips: int = 100,
        val_every: int | None = None,
        log_every: int | None = 50,
        seed: int | None = None,
        deterministic: bool = False,
        run_dir: str | Path | None = None,
        callbacks: Iterable[Callback] = (),
        loggers: Iterable[Any] = (),
        default_callbacks: bool = True,
    ) -> None:
        true_or_false("trainer.default_callbacks", default_callbacks)
        given = listed("trainer.callbacks", callbacks)
        self.callbacks = CallbackList(with_defaults(given, tf32=tf32, defaults=default_callbacks))
        self._settings = Settings(
            tf32=next((c.enabled for c in self.callbacks if isinstance(c, TF32)), None),
            compile=compile,
            max_steps=max_steps,
            max_epochs=max_epochs,
            batch_size=batch_size,
            workers=workers,
            accumulate=accumulate,
            clip_norm=clip_norm,
            clip_value=clip_value,
            non_finite=non_finite,
            max_skips=max_skips,
            val_every=val_every,
            log_every=log_every,
            seed=seed,
            deterministic=deterministic,
        )
        self.facts = probe()
        place = resolve_device(device, self.facts)
        self._choices = Choices(
            place,
            resolve_precision(precision, place.value.device, self.facts, grad_scaler),
            resolve_distribution(distributed, self.facts),
        )
        self._run_dir = run_folder(run_dir)
        self._url: str | None = None  # of the copy that is gone on with
        self._aside = ExitStack()  # what was copied from there, until the run's folder takes it
        self._loggers = checked_loggers(loggers)
        self._metrics = {}
        self._collect: Callable[[str, Any], None] | None = None
        self._evaluating = False
        self._proven = False  # whether the precision is set up: doing it again would make a new loss scale
        self._run = None
        self._plan = Plan()
        self._status = "new"
        #: The run as resolved, written to ``config.yaml``; the command line sets it, else the trainer describes itself.
        self.config: dict[str, Any] | None = None

    # Training ---------------------------------------------------------------------------------------------------

    @torch.inference_mode(False)
    @torch.enable_grad()  # fit may be called inside their opposites
    def fit(
        self,
        policy: nn.Module,
        train_data: Any = None,
        val_data: Any = None,
        *,
        optimizer: OptimizerFactory | None = None,
        schedule: ScheduleFactory | None = None,
        resume: str | Path | None = None,
        changes: Sequence[str] | None = (),
        verify: bool = True,
    ) -> None:
        """Train ``policy``, in place.

        Args:
            policy: A module that speaks one of the dialects of ``policy.py``.
            train_data: A map-style dataset, an iterable dataset or a DataLoader; ``None`` takes the policy's
                own ``train_dataloader()``.
            val_data: The same for validation; ``None`` takes the policy's own ``val_dataloader()``, if it has one.
            optimizer: Makes the optimizer from the trainable parameters; wins over ``configure_optimizers``.
            schedule: Makes the schedule from that optimizer; it counts steps.
            resume: ``None`` for a new run, "last" for the newest checkpoint of ``run_dir``, "auto" for that if there is
                one and else a new run in ``run_dir`` (for jobs that start again), or a path or fsspec URL: a run's
                folder or a checkpoint's. What a URL has is copied into ``run_dir``.
            changes: What may differ from the run that is gone on with, by name: "lr" and other settings of the
                optimizer, "optimizer", "schedule", "batch_size", "accumulate", "data", "statistics".
            verify: ``False`` compares the sizes of the checkpoint's files and not their checksums, for a huge policy.

        Raises:
            PolicyfitError: Any of its kinds, before the first batch where that is possible.
        """
        if self._status == "running":
            raise CallbackError("fit() was called inside a run of the same Trainer. Use a Trainer of its own.")
        self._plan, self._metrics, self._run, self._status = Plan(), {}, None, "new"
        names = changes.split(",") if isinstance(changes, str) else changes or ()
        changes = [name for given in names if (name := given.strip())]
        self._url = str(resume) if is_url(resume) else None
        if changes and resume is None:
            raise ConfigError(f"changes={list(changes)!r} is for a run that is gone on with.\nLeave it out, or resume.")
        self.device.setup()
        self.distribution.setup(self.device.device)
        try:
            # On rank 0, since a folder that it makes would be in the way of the others' checks.
            checkpoint = on_main(self.distribution, partial(self._find_checkpoint, policy, resume, verify))
            saved = None if checkpoint is None else read_checkpoint(checkpoint, verify=False, lazy=True)
            run, threads = prepare(
                self,
                policy,
                train_data,
                val_data,
                settings=self._settings,
                choices=self._choices,
                optimizer=optimizer,
                schedule=schedule,
                seed=None if saved is None else state.seed_of(saved, self._settings.seed),
                fresh=saved is None,
                plan=self._plan,
            )
        except BaseException as error:
            self._aside.close()
            self.distribution.report(error)
            self.distribution.teardown()
            raise
        self._proven = True
        with self._process_state(threads):
            self._fit(run, checkpoint, saved, changes)

    def _fit(self, run: Run, checkpoint: Path | None, saved: CheckpointState | None, changes: Sequence[str]) -> None:
        lies_in = None if checkpoint is None else run_of(checkpoint)
        old = None if self._url else lies_in
        self._run, self._status = run, "running"
        try:
            run_dir = self._run_dir or old or new_name(class_of(run.policy).__name__)
            run.run_dir = self.distribution.broadcast(run_dir.absolute())
            if saved is not None and checkpoint is not None:
                if self._url or old == run.run_dir.resolve():
                    run.id = saved.manifest.get("run", run.id)
                origin = f"{checkpoint.name} of {self._url}" if self._url else checkpoint
                self._plan.notes += state.restore(run, saved, origin, changes)
            run.id = self.distribution.broadcast(run.id)
            run.start()
            self.callbacks.call("setup", self, run.policy, "fit")
            # What was refused until here wrote nothing.
            arrived = lies_in if self._url else None
            write = partial(self._write_description, run, new=old is None, arrived=arrived)
            run.run_dir = on_main(self.distribution, write)
            if saved is not None:
                own = run.policy.state_dict()
                models = {name: parts(self.distribution, model, own) for name, model in saved.models.items()}
                added = {**saved.callbacks.get("checkpoint", {}), "models": models}
                self.callbacks.call("on_load_checkpoint", self, run.policy, added)
            run.is_open = True
            self.callbacks.call("on_fit_start", self, run.policy)
            train(run)
            run.finish()
            if run.failed:
                self._fail_with_others(run)
            self._status = "completed" if run.stop_reason is None else "stopped"
            self.callbacks.call("on_fit_end", self, run.policy)
            self.wait_for_checkpoint()  # so that it is there for every rank
        except BaseException as error:
            self._status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
            if self.distribution.is_lost(error):
                lost = self.distribution.lost(error)
                run_all((*self._each("on_exception", run.policy, lost), *self._endings(run, "failed")), lost)
                raise lost from error
            self.distribution.report(error)
            run_all((*self._each("on_exception", run.policy, error), *self._endings(run, "failed")), error)
            raise
        try:
            run_all(self._endings(run, "success"))
        except BaseException:
            self._status = "failed"
            raise
        if run.exit_code:
            raise SystemExit(run.exit_code)

    def _fail_with_others(self, run: Run) -> NoReturn:
        """Save what all ranks have, if only some have failed, and end in this rank's error or that of another."""
        errors = run.distribution.gather(
            None if run.failure is None else f"{type(run.failure).__name__}: {run.failure}"
        )
        if None in errors:
            self.callbacks.call("on_fit_end", self, run.policy)
        if run.failure is not None:
            run.failure.of_this_rank = None in errors  # type: ignore[attr-defined]  # else rank 0 tells it
            raise run.failure
        rank = next(rank for rank, error in enumerate(errors) if error)
        ended = DistributedError(
            f"Rank {rank} failed, so all ended after update {run.counters.updates}: {errors[rank]}\n"
            "What was saved can be gone on with once that is mended: --resume."
        )
        ended.exit_code = 1  # the run failed; its settings are good
        raise ended

    def _each(self, hook: str, *arguments: Any) -> list[Callable[[], None]]:
        """The calls of a hook that has to reach every callback, whatever the ones before it raise."""
        return [partial(bound, self, *arguments) for bound in self.callbacks.bound[hook]]

    def _endings(self, run: Run, status: str) -> list[Callable[[], None]]:
        finalize = [partial(logger.finalize, status) for logger in self._loggers]
        return [*run.endings(), *self._each("teardown", run.policy, "fit"), self._aside.close, *finalize]

    def _process_state(self, threads: int | None) -> AbstractContextManager[None]:
        device_type, deterministic = self.device.device.type, self._settings.deterministic
        return process_state(deterministic=deterministic, threads=threads, device_type=device_type, facts=self.facts)

    def _find_checkpoint(self, policy: nn.Module, resume: str | Path | None, verify: bool) -> Path | None:
        """The checkpoint to go on from; refuses a folder in which the run may not write."""
        if resume == "auto":
            if self._run_dir is None:
                raise ConfigError("resume='auto' looks for the run in its folder, so it needs one.\nGive run_dir.")
            if not has_checkpoint(self._run_dir):
                return None  # what was there before ended before its first checkpoint, and begins anew
            resume = "last"
        found = None if resume is None else self._resolve(policy, resume, verify)
        run_dir = self._run_dir
        if run_dir is not None and (found is None or run_of(found) != run_dir.resolve()):
            check_free(run_dir)
        return found

    def _resolve(self, policy: nn.Module, resume: str | Path, verify: bool) -> Path:
        if is_url(resume):
            check_free(folder := self._run_dir or new_name(type(policy).__name__))
            parent = make(folder.absolute().parent, new=False)
            aside = self._aside.enter_context(TemporaryDirectory(prefix=f".{folder.name}.", dir=parent))
            return RemoteRun(str(resume)).download(Path(aside), self._plan.notes.append)
        where = Path(resume) if resume != "last" else (self._run_dir or newest_run())
        return newest_checkpoint(where, self._plan.notes.append, verify=verify)

    def _write_description(self, run: Run, *, new: bool, arrived: Path | None) -> Path:
        """``plan.json`` and ``config.yaml``, as the run is now; a script that resumes a run file's run leaves its.

        Args:
            arrived: A copy of the run that was made elsewhere, which becomes its folder.

        Returns:
            The run's folder, made if need be.
        """
        from .strict_yaml import write  # PyYAML is not needed before a run

        run.run_dir = make(run.run_dir, new=new and self._run_dir is None)
        run.lock.enter_context(held(run.run_dir))
        for path in [] if arrived is None else list(arrived.iterdir()):
            shutil.move(path, run.run_dir / path.name)
        replace_text(run.run_dir / "plan.json", json.dumps(self._plan.to_dict(), indent=2) + "\n")
        if self.config is not None or not (run.run_dir / "config.yaml").exists():
            config = self.config
            if config is None:
                config = describe(self._settings, self.device.name, self.precision.name, run.policy, run.seed)
            replace_text(run.run_dir / "config.yaml", write(config))
        return run.run_dir

    # Commands of callbacks --------------------------------------------------------------------------------------

    def stop(self, reason: str, *, exit_code: int = 0) -> None:
        """End the run after the update under way; it counts as stopped, not as failed.

        Args:
            exit_code: Other than 0, ``fit`` ends in ``SystemExit`` with it, once everything is saved and closed.
        """
        self._active.stop(reason, exit_code)

    def log(self, name: str, value: Any) -> None:
        """Report a metric, a number or a scalar tensor: its mean stands in the next log record.

        Called during validation it becomes a mean over the validation data.

        Raises:
            ConfigError: The name is one of a record's own fields.
        """
        if name in ("step", "epoch", "event"):
            raise ConfigError(f"The metric name {name!r} is a field of every record. Log it under another name.")
        (self._collect or self._active.means.add)(name, value)

    def event(self, kind: str, **fields: Any) -> None:
        """Report that something happened, at once: every ``on_log`` gets it, ``metrics.jsonl`` among them."""
        step, policy = (0, None) if self._run is None else (self._run.counters.step, self._run.policy)
        self.callbacks.call("on_log", self, policy, {"step": step, "event": kind, **fields})

    def emit(self, record: Mapping[str, Any]) -> None:
        """Hand a record of metrics to every ``on_log`` and logger, and remember its values as ``metrics``."""
        values = {name: value for name, value in record.items() if name not in ("step", "epoch")}
        self.remember(values)
        self.callbacks.call("on_log", self, self._active.policy, record)
        for logger in self._loggers:
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
            consolidated: Write ``model.safetensors`` as a whole also where each rank writes the weights that it holds.

        Raises:
            CallbackError: Called inside a window, whose gradients no checkpoint holds; ``on_due`` is the place.
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
        on_main(self.distribution, self._active.saver.wait)

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

    # Without training -------------------------------------------------------------------------------------------

    def dry_run(
        self,
        policy: nn.Module,
        *,
        optimizer: OptimizerFactory | None = None,
        schedule: ScheduleFactory | None = None,
    ) -> Plan:
        """The plan of a run with this policy, as far as it goes without data; moves the policy to its device."""
        self._plan = Plan()
        dry_run(
            self,
            policy,
            settings=self._settings,
            choices=self._choices,
            optimizer=optimizer,
            schedule=schedule,
            plan=self._plan,
        )
        return self._plan

    def validate(self, policy: nn.Module, val_data: Any = None) -> dict[str, float]:
        """The ``val/...`` means of ``policy`` over ``val_data``, or over its own ``val_dataloader()``.

        Raises:
            ConfigError: There is no validation data, or no batch in it.
        """
        with self._standing(policy, "validate"):
            adapter, data = prepare_validation(policy, val_data, self._settings, self)
            adapter.attach(self.log)
            try:
                metrics = validate(self, adapter, data, seed=self._settings.seed or 0)
                if not metrics:
                    raise ConfigError(
                        "validate() found no metric: the data gave no batch, or the policy reported nothing for it."
                    )
                self._metrics.update(metrics)
                self.callbacks.call("on_validation_end", self, policy)
            finally:
                adapter.detach()
        return metrics

    def evaluate(self, policy: nn.Module, env: Any, episodes: int = 50, *, seed: int = 10_000) -> RolloutReport:
        """Let ``policy`` act for ``episodes`` episodes and measure its success.

        Inside a run its ``rollout/...`` metrics become a record of the step.

        Args:
            policy: A module with ``select_action(observation)`` and, if it keeps state, ``reset()``.
            env: A Gymnasium (vector) environment, which is closed afterwards, or a function that makes one.
            episodes: Episodes in all.
            seed: Episode i is reset with ``seed + i``; the default is far from the seeds that people record with.
        """

        def act(observation: Any) -> torch.Tensor:
            action: torch.Tensor = self.precision.forward(policy.select_action, observation)  # type: ignore[arg-type]
            return action

        with self._standing(policy, "evaluate"):
            with self.evaluating(policy):
                self.callbacks.call("on_rollout_start", self, policy)
                report = rollout(
                    policy,
                    env,
                    episodes=episodes,
                    seed=seed,
                    act=act,
                    to_device=self.device.move,
                    distribution=self.distribution,
                )
            if self._status == "running":
                counters = self._active.counters
                self.emit({"step": counters.step, "epoch": counters.epoch, **report.metrics()})
            self.callbacks.call("on_rollout_end", self, policy, report)
        return report

    @contextmanager
    def evaluating(self, policy: nn.Module) -> Iterator[None]:
        """Eval mode, and what callbacks put in place for it; modes, weights and random streams come back exactly."""
        if self._run is not None and self._status == "running":
            self._run.updater.settle()  # what stands in for the weights must know of every update
        before, self._evaluating = self._evaluating, True
        try:
            with (
                preserved(self.device),
                acting(policy),
                self.callbacks.around_evaluation(self, policy),
                self.distribution.whole_weights(policy),
            ):
                yield
        finally:
            self._evaluating = before

    @contextmanager
    def _standing(self, policy: nn.Module, stage: str) -> Iterator[None]:
        """Device and precision in place for ``policy``, as they are anyway inside its own run."""
        if self._status == "running":
            yield
            return
        self.device.setup()
        self.distribution.setup(self.device.device)
        policy.to(self.device.device)
        if not self._proven:
            self.precision.setup(self.device.device)
            self._proven = True
        self.precision.convert_module(policy)
        size = sum(p.numel() for p in policy.parameters())
        threads, _ = choose_threads(self.device.device.type, size, self.facts)
        with self._process_state(threads):
            try:
                self.callbacks.call("setup", self, policy, stage)
                yield
            except BaseException as error:
                self.distribution.report(error)
                run_all((*self._each("teardown", policy, stage), self.distribution.teardown), error)
                raise
            run_all((*self._each("teardown", policy, stage), self.distribution.teardown))
