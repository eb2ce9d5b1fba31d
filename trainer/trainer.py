"""``Trainer``: the object users hold. It composes strategies and callbacks; the loop is in ``loop.py``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from ..callbacks.callback import Callback, CallbackList
from ..callbacks.defaults import with_defaults
from ..callbacks.tf32 import TF32
from ..strategies.checks import true_or_false
from ..strategies.device import DeviceStrategy
from ..strategies.distributed import DistributionStrategy
from ..strategies.errors import CallbackError, ConfigError
from ..strategies.fabric import FabricPlugin
from ..strategies.facts import probe
from ..strategies.precision import PrecisionStrategy
from ..strategies.scaler import GradScalerConfig
from .beginning import begin_run
from .ending import end_run, stage_without_run
from .failure import fail_with_others
from .hints import OrDefault, none_is_default
from .loop import train
from .optimizer import OptimizerFactory
from .plan import Plan
from .policy import adapt
from .prepare import check_whole, dry_run, prepare
from .process import choose_threads, dead_workers_wait_for_a_draw, process_state
from .resolve import Choices, resolve_device, resolve_distribution, resolve_precision
from .resume import Origin, find_origin, names_of_changes
from .rng import preserved
from .rollout import RolloutReport, acting, rollout
from .run import Run
from .run_commands import RunCommands
from .schedule import ScheduleFactory
from .settings import NonFinite, Settings, checked_loggers, listed, run_folder
from .sources import data_to_validate_on
from .together import Telling
from .validation import validate


class Trainer(RunCommands):
    """Trains a robot policy on the device and in the precision that it was asked for, or says why not.

    ``None`` stands for the default of an argument, as null does in a run file, unless it says something else.

    Args:
        device: "auto", "cpu", "cuda", "cuda:N", "mps", "xpu", "xpu:N" ("rocm", "hip" on ROCm), or a strategy.
        precision: "no", "bf16", "fp16", "auto", a strategy such as ``FP16(allow_cpu=True)``, or a precision plugin
            of lightning-fabric.
        grad_scaler: Settings of fp16's loss scale, a ``GradScalerConfig`` or its fields.
        tf32: On (True) or off (False) where the device has it; ``None`` leaves torch's switches alone.
        distributed: "auto" (what was launched), "none", "ddp", "fsdp", or a strategy such as ``FSDP(shard=8)``.
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

    @none_is_default
    def __init__(
        self,
        device: OrDefault[str | DeviceStrategy] = "auto",
        precision: str | PrecisionStrategy | FabricPlugin | Literal[False] | None = "no",
        *,
        grad_scaler: GradScalerConfig | Mapping[str, Any] | None = None,
        tf32: bool | None = True,
        distributed: OrDefault[str | DistributionStrategy] = "auto",
        compile: OrDefault[bool] = False,
        max_steps: int | None = None,
        max_epochs: int | None = None,
        batch_size: OrDefault[int] = 8,
        workers: OrDefault[int | Literal["auto"]] = "auto",
        accumulate: OrDefault[int] = 1,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        non_finite: OrDefault[NonFinite] = "skip",
        max_skips: OrDefault[int] = 100,
        val_every: int | None = None,
        log_every: int | None = 50,
        seed: int | None = None,
        deterministic: OrDefault[bool] = False,
        run_dir: str | Path | None = None,
        callbacks: OrDefault[Iterable[Callback]] = (),
        loggers: OrDefault[Iterable[Any]] = (),
        default_callbacks: OrDefault[bool] = True,
    ) -> None:
        defaults = true_or_false("trainer.default_callbacks", default_callbacks)
        given = listed("trainer.callbacks", callbacks)
        self.callbacks = CallbackList(with_defaults(given, tf32=tf32, defaults=defaults))
        checked: Callable[..., Settings] = Settings  # none of which is None any more where None is no value
        self._settings = checked(
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
        on = resolve_device(device, self.facts)
        self._choices = Choices(
            on,
            resolve_precision(precision, on.value.device, self.facts, grad_scaler),
            resolve_distribution(distributed, self.facts),
        )
        self._run_dir = run_folder(run_dir)
        self._loggers = checked_loggers(loggers)
        self._metrics = {}
        self._collect = None
        self._evaluating = False
        self._proven = False  # whether the precision is set up: doing it again would make a new loss scale
        self._run = None
        self._plan = self._new_plan()
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
        self._plan, self._metrics, self._run, self._status = self._new_plan(), {}, None, "new"
        changes = names_of_changes(changes, resume)
        with ExitStack() as process:
            with self._joined(), ExitStack() as aside:  # for what is copied from a URL, until the run's folder takes it
                origin = find_origin(
                    self.distribution,
                    resume,
                    run_dir=self._run_dir,
                    policy=type(policy).__name__,
                    verify=verify,
                    aside=aside,
                    warn=self._plan.notes.append,
                )
                run, threads = prepare(
                    self, policy, train_data, val_data, optimizer, schedule, self._settings, self._choices, origin
                )
                process.enter_context(self._process_state(threads))
                if self.distribution.world_size > 1:
                    process.enter_context(dead_workers_wait_for_a_draw())
                aside = aside.pop_all()
            self._proven = True
            self._fit(run, origin, changes, aside)

    def _fit(self, run: Run, origin: Origin | None, changes: Sequence[str], aside: ExitStack) -> None:
        end = partial(end_run, run, self._loggers, aside)
        self._run, self._status = run, "running"
        try:
            with Telling(self.distribution, lambda: run.place.meeting):
                begin_run(run, origin, changes, settings=self._settings, asked_dir=self._run_dir)
                train(run)
                if run.failed:
                    fail_with_others(run)
                self._status = "completed" if run.stop_reason is None else "stopped"
                self.callbacks.call("on_fit_end", self, run.policy)
                self.wait_for_checkpoint()  # so that it is there for every rank
                run.take_late_stops("the end of the run")
                if run.stop_reason is not None:
                    self._status = "stopped"
        except BaseException as error:
            self._status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
            end(error)
            raise
        try:
            end()
        except BaseException:
            self._status = "failed"
            raise
        if run.exit_code:
            raise SystemExit(run.exit_code)

    def _new_plan(self) -> Plan:
        return Plan(environment=dict(self.facts.environment))

    @contextmanager
    def _joined(self) -> Iterator[None]:
        """Device and ranks in place; they are left again if what is prepared with them fails.

        Raises:
            DistributedError: The error says no more than that another rank has left; this says why.
        """
        self.device.setup()
        self.distribution.setup(self.device)
        try:
            with Telling(self.distribution):
                yield
        except BaseException:
            self.distribution.teardown()
            raise

    def _process_state(self, threads: int | None) -> AbstractContextManager[None]:
        device_type, deterministic = self.device.device.type, self._settings.deterministic
        return process_state(deterministic=deterministic, threads=threads, device_type=device_type, facts=self.facts)

    # Without training -------------------------------------------------------------------------------------------

    def dry_run(
        self,
        policy: nn.Module,
        *,
        optimizer: OptimizerFactory | None = None,
        schedule: ScheduleFactory | None = None,
    ) -> Plan:
        """The plan of a run with this policy, as far as it goes without data; moves the policy to its device.

        Under a launcher it is called on every rank, and the policy is prepared as for a run of all of them.
        """
        self._plan = self._new_plan()
        with self._joined():
            dry_run(self, policy, optimizer, schedule, self._settings, self._choices)
            self.distribution.gather(None, "the end of a dry run")  # to which a rank that failed comes too
        self.distribution.teardown()
        return self._plan

    def validate(self, policy: nn.Module, val_data: Any = None) -> dict[str, float]:
        """The ``val/...`` means of ``policy`` over ``val_data``, or over its own ``val_dataloader()``.

        Raises:
            ConfigError: There is no validation data, or no batch in it.
        """
        with self._standing(policy, "validate"):
            adapter = adapt(policy)
            data = data_to_validate_on(self, adapter, val_data, self._settings)
            if data is None:
                raise ConfigError(
                    f"There is nothing to validate on: validate got no val_data, and {type(policy).__name__} has no "
                    "val_dataloader()."
                )
            adapter.attach(self.log)
            try:
                metrics = validate(self, adapter, data, seed=self._settings.seed or 0)
                if not metrics:
                    raise ConfigError(
                        "validate() found no metric: the data gave no batch, or the policy reported nothing for it."
                    )
                self.remember(metrics)
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
                move, ranks = self.device.move, self.distribution
                report = rollout(policy, env, episodes=episodes, seed=seed, act=act, to_device=move, distribution=ranks)
            if self._status == "running":
                counters = self._active.counters
                self.emit({"step": counters.step, "epoch": counters.epoch, **report.metrics()})
            self.callbacks.call("on_rollout_end", self, policy, report)
        return report

    @contextmanager
    def evaluating(self, policy: nn.Module) -> Iterator[None]:
        """Eval mode, and what callbacks put in place for it; modes, weights and random streams come back exactly."""
        if self._status == "running":
            self._active.updater.settle()  # what stands in for the weights must know of every update
        self.distribution.release()  # and the weights are to be those that it finds
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
            self._active.check_meeting(f"{stage}()")
            yield
            return
        check_whole(policy)
        with self._joined():
            policy.to(self.device.device)
            self.distribution.align(policy)
            if not self._proven:
                self.precision.setup(self.device.device)
                self._proven = True
            self.precision.convert_module(policy)
        size = sum(p.numel() for p in policy.parameters())
        threads, _ = choose_threads(self.device.device.type, size, self.facts)
        with self._process_state(threads), stage_without_run(self, policy, stage):
            yield
