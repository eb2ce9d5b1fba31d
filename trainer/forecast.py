"""What the settings alone say of a run, for ``policyfit plan``: no batch is drawn and no environment made."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ..callbacks.checkpoint import Checkpoint
from ..callbacks.ema import EMA
from .config import RunRecipe
from .data import TrainingData, training_data
from .memory import Memory, memory_of, size
from .plan import Plan
from .policy import adapt, brings
from .recipe import name_of
from .sketch import sketched

if TYPE_CHECKING:
    from .trainer import Trainer

_NO_DATA = "plan builds no data; --with-data builds it and counts"


def forecast(run: RunRecipe, trainer: Trainer, policy: nn.Module, *, build_data: bool) -> Plan:
    """The plan of a run that is not started: every decision that needs no batch, and what follows from the settings.

    Raises:
        PolicyfitError: As at the start of ``fit``.
    """
    made: list[Optimizer] = []

    def make(parameters: Any) -> Any:
        made.append(sketched(run.recipes[("optimizer",)])(parameters))
        return made[-1]

    plan = trainer.dry_run(policy, optimizer=run.maker("optimizer") and make, schedule=run.maker("schedule"))
    data = _data(run, trainer, policy) if build_data and trainer.is_main else None  # the ranks have parted
    Forecast(run, trainer, policy, made or adapt(policy).optimizers()[0], data).add_to(plan)
    return plan


def _data(run: RunRecipe, trainer: Trainer, policy: nn.Module) -> TrainingData:
    settings = run.config.values["trainer"]
    source = run.build("data", "train")
    if source is None:
        source = adapt(policy).own_data("train_dataloader")
    if source is None:
        raise run.config.fault(
            ("data",),
            f"There is no data to count: the run names no data.train, and {type(policy).__name__} brings none.\n"
            "Write data: {train: {class_path: module.Class}}, or leave --with-data out.",
        )
    return training_data(
        source,
        seed=settings["seed"] or 0,
        batch_size=settings["batch_size"],
        workers=settings["workers"],
        accumulate=settings["accumulate"],
        pin_memory=False,
        device_type=trainer.device.device.type,
        facts=trainer.facts,
        rank=trainer.distribution.rank,
        world_size=trainer.distribution.world_size,
    )


@dataclass(frozen=True, slots=True)
class Forecast:
    """A run as far as its settings say it; ``data`` is there where it was built."""

    run: RunRecipe
    trainer: Trainer
    policy: nn.Module
    optimizers: Sequence[Optimizer]
    data: TrainingData | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """The section ``trainer``, with its defaults."""
        values: dict[str, Any] = self.run.config.values["trainer"]
        return values

    def add_to(self, plan: Plan) -> None:
        """Add a line for each."""
        self._scaler(plan)
        self._length(plan)
        self._batch(plan)
        self._clip(plan)
        self._validation(plan)
        self._memory(plan)
        self._checkpoints(plan)
        self._resume(plan)
        self._evaluation(plan)

    @property
    def steps(self) -> int | None:
        """Steps in the whole run; ``None`` where only the data could say."""
        limits = [self.settings["max_steps"]]
        epochs = self.settings["max_epochs"] or (None if self.settings["max_steps"] else 1)
        if epochs:
            limits.append(None if self._windows is None else epochs * self._windows)
        known = [limit for limit in limits if limit is not None]
        return min(known) if known and (None not in limits[1:]) else None

    @property
    def _windows(self) -> int | None:
        batches = None if self.data is None else self.data.batches_per_epoch
        return None if batches is None else math.ceil(batches / self.settings["accumulate"])

    def _scaler(self, plan: Plan) -> None:
        state = self.trainer.precision.state_dict()
        if state is None:
            plan.add("scaler", "", "none", f"precision {self.trainer.precision.name} needs no loss scale")
            return
        moves = f"times {state['growth_factor']:g} after {state['growth_interval']:,} updates without an overflow"
        least = f"not below {self.trainer.precision.min_scale:g}"
        plan.add("scaler", "", f"{state['scale']:g}", f"{moves}, times {state['backoff_factor']:g} after one, {least}")

    def _length(self, plan: Plan) -> None:
        said = [f"{n:,} {unit}" for unit in ("steps", "epochs") if (n := self.settings[f"max_{unit}"])]
        total = f", {self.steps:,} steps" if self.steps is not None and not self.settings["max_steps"] else ""
        why = "" if said else "neither max_steps nor max_epochs is set"
        plan.add("length", "", f"{' or '.join(said) or '1 epoch'}{total}", why, steps=self.steps)

    def _batch(self, plan: Plan) -> None:
        window, ranks = self.settings["accumulate"], self.trainer.distribution.world_size
        rank = self.settings["batch_size"] if self.data is None else self.data.batch_size
        if rank is None:
            plan.add("batch", "", "finished micro-batches", "the loader makes them")
        else:
            micro = "micro-batch" if window == 1 else "micro-batches"
            chosen = f"{rank * window * ranks:,} samples an update: {window} {micro} of {rank} on {_ranks(ranks)}"
            source = "a DataLoader brings its own size" if self.data is None else ""
            numbers = {"per_rank": rank, "accumulate": window, "ranks": ranks, "global": rank * window * ranks}
            plan.add("batch", "", chosen, source, **numbers)
        batches = None if self.data is None else self.data.batches_per_epoch
        if self.data is None or batches is None or self._windows is None:
            plan.add("epoch", "", "unknown", _NO_DATA if self.data is None else "the data has no length")
            return
        samples = self.data.samples_per_epoch
        parts = [f"{samples:,} samples"] if samples is not None else []
        parts += [f"{batches:,} micro-batches", f"{self._windows:,} updates"]
        epochs = "" if self.steps is None else f"{self.steps / self._windows:.4g} epochs in all"
        plan.add("epoch", "", ", ".join(parts), epochs, samples=samples, micro_batches=batches, updates=self._windows)

    def _clip(self, plan: Plan) -> None:
        said = [f"{kind} {limit:g}" for kind in ("norm", "value") if (limit := self.settings[f"clip_{kind}"])]
        plan.add("clip", "", ", ".join(said) or "none")

    def _validation(self, plan: Plan) -> None:
        every = self.settings["val_every"]
        when = f"every {every:,} steps and at the end" if every else "at the end"
        has_data = ("data", "val") in self.run.recipes or brings(self.policy, "val_dataloader")
        plan.add("validation", "", when if has_data else "none", "" if has_data else "there is no data for it")

    def _memory(self, plan: Plan) -> None:
        ranks = self.trainer.distribution
        memory = self.memory(ranks.local)
        total, parts = memory.words()
        each = " on each rank" if ranks.world_size > 1 else ""
        plan.add("memory", "", f"{total}{each}", parts, **asdict(memory), total=memory.total)

    def memory(self, part: Callable[[Tensor], Tensor]) -> Memory:
        """What weights, gradients and optimizer state take, of each tensor the part that is asked for."""
        averages = any(isinstance(callback, EMA) for callback in self.trainer.callbacks)
        return memory_of(self.policy, self.optimizers, averages=averages, part=part)

    def _checkpoints(self, plan: Plan) -> None:
        saver = next((callback for callback in self.trainer.callbacks if isinstance(callback, Checkpoint)), None)
        if saver is None:
            plan.add("checkpoints", "", "none", "there is no Checkpoint among the callbacks")
            return
        when = [f"every {saver.every_steps:,} steps"] if saver.every_steps else []
        others = [f"every {saver.every_minutes:g} minutes"] if saver.every_minutes else []
        others += [f"at each new best {saver.monitor}"] if saver.monitor else []
        count = None if self.steps is None or others else self._saves(saver)
        kept = "all are kept" if saver.keep is None else f"the newest {saver.keep} are kept"
        kept += f", and each at a multiple of {saver.keep_every:,}" if saver.keep_every else ""
        kept += ", and the best" if saver.monitor else ""
        total = "" if count is None else f": {count:,} in all"
        each = self.memory(lambda whole: whole).checkpoint
        about = "of unknown size" if each is None else f"about {size(each)} each"
        chosen = " and ".join([*when, *others, "at the end"])
        plan.add("checkpoints", "", f"{chosen}{total}", f"{about}; {kept}", count=count, bytes_each=each)

    def _saves(self, saver: Checkpoint) -> int:
        every, steps = saver.every_steps, self.steps or 0
        return math.ceil(steps / every) if every else 1

    def _resume(self, plan: Plan) -> None:
        kept = "weights, optimizer, schedule, loss scale, callbacks, random streams"
        same = "on the same device, precision and number of processes"
        exact, why = self._data_is_exact()
        if exact is None:
            plan.add("resume", "", f"exact but perhaps for the data: {kept}", f"{same}; {why}", exact=None)
        elif exact:
            plan.add("resume", "", f"exact, bit for bit: {kept} and the place in the data", same, exact=True)
        else:
            plan.add("resume", "", f"exact but for the data: {kept}", f"{same}; {why}", exact=False)

    def _data_is_exact(self) -> tuple[bool | None, str]:
        if self.data is not None:
            return self.data.not_exact is None, self.data.not_exact or ""
        recipe = self.run.recipes.get(("data", "train"))
        target = None if recipe is None else recipe.target
        if isinstance(target, type) and hasattr(target, "__getitem__") and hasattr(target, "__len__"):
            return True, ""  # a map-style dataset, whose order is ours
        return None, _NO_DATA

    def _evaluation(self, plan: Plan) -> None:
        if ("eval", "env") not in self.run.recipes:
            plan.add("eval", "", "none", "the run names no eval.env")
            return
        env, asked = name_of(self.run.recipes["eval", "env"].target), self.run.evaluation
        episodes = f"{asked['episodes']} episode{'s' if asked['episodes'] > 1 else ''}"
        plan.add("eval", "", f"{episodes} of {env}, seeds from {asked['seed']} on")


def _ranks(count: int) -> str:
    return "1 process" if count == 1 else f"{count} processes"
