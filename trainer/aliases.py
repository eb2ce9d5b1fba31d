"""Words of LeRobot and Lightning in a run file: which are taken, as what, and which mean something else here.

A word is taken where its meaning is that of a key of policyfit, and each is said in one line. A word that means
something else is refused with the key that is meant, except with the value that says what happens here anyway.

Source: LeRobot's TrainPipelineConfig and AcceleratorConfig (main, 2026); Lightning's Trainer and LightningCLI (2.6).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from .resolve import LIGHTNING_PRECISIONS

LEROBOT, LIGHTNING = "LeRobot", "Lightning"


@dataclass(frozen=True, slots=True)
class MicroBatches:
    """So many micro-batches, which become steps once it is known how many are in a window."""

    count: int


class Taken(NamedTuple):
    """A word that is taken as ``key``; ``read`` turns its value into the key's."""

    origin: str
    key: str
    read: Callable[[Any], Any] = lambda value: value


class Refused(NamedTuple):
    """A word that means something else here, what to write instead, and the values that ask for nothing."""

    origin: str
    instead: str
    harmless: tuple[Any, ...] = (None,)


def argument_meant(word: str) -> str | None:
    """What a word of another tool means that is given to ``Trainer(...)`` in Python, as a sentence."""
    taken, refused = TAKEN.get(f"trainer.{word}") or TAKEN.get(word), REFUSED.get(f"trainer.{word}")
    if taken and taken.key.startswith("trainer."):
        return f"It is {taken.origin}'s word for {taken.key.removeprefix('trainer.')}."
    return f"It is {refused.origin}'s. Write, in the words of a run file: {refused.instead}." if refused else None


def _micro_batches(value: Any) -> Any:
    return MicroBatches(value) if type(value) is int else value


def _device(value: Any) -> Any:
    """Lightning's gpu is a GPU of NVIDIA, AMD or Apple."""
    if value != "gpu":
        return value
    from ..strategies.facts import probe

    return "mps" if probe().mps else "cuda"


TAKEN: dict[str, Taken] = {
    "steps": Taken(LEROBOT, "trainer.max_steps", _micro_batches),
    "batch_size": Taken(LEROBOT, "trainer.batch_size"),
    "seed": Taken(LEROBOT, "trainer.seed"),
    "output_dir": Taken(LEROBOT, "trainer.run_dir"),
    "num_workers": Taken(LEROBOT, "trainer.workers"),
    "log_freq": Taken(LEROBOT, "trainer.log_every", _micro_batches),
    "tf32": Taken(LEROBOT, "trainer.tf32"),
    "policy.device": Taken(LEROBOT, "trainer.device"),
    "optimizer.grad_clip_norm": Taken(LEROBOT, "trainer.clip_norm"),
    "eval.n_episodes": Taken(LEROBOT, "eval.episodes"),
    "accelerator.mixed_precision": Taken(LEROBOT, "trainer.precision"),
    "accelerator.grad_scaler": Taken(LEROBOT, "trainer.grad_scaler"),
    "accelerator.gradient_accumulation.steps": Taken(LEROBOT, "trainer.accumulate"),
    "model": Taken(LIGHTNING, "policy"),
    "seed_everything": Taken(LIGHTNING, "trainer.seed"),
    "trainer.accelerator": Taken(LIGHTNING, "trainer.device", _device),
    "trainer.strategy": Taken(LIGHTNING, "trainer.distributed"),
    "trainer.accumulate_grad_batches": Taken(LIGHTNING, "trainer.accumulate"),
    "trainer.gradient_clip_val": Taken(LIGHTNING, "trainer.clip_norm"),
    "trainer.log_every_n_steps": Taken(LIGHTNING, "trainer.log_every"),
}

#: Values of policyfit's own keys that are Lightning's words.
VALUES: dict[str, dict[Any, Any]] = {"trainer.precision": LIGHTNING_PRECISIONS}

_CHECKPOINT = "trainer.callbacks: [{class_path: policyfit.Checkpoint, init_args: {every_steps: 1000}}]"
_VALIDATION = "trainer.val_every: N, which counts steps"
_DEFAULTS = "trainer.default_callbacks: false for none of the default callbacks"

_LAUNCH = "start a process for each device: torchrun --nproc-per-node=N"
_ONE = (None, 1, "1", "auto")

REFUSED: dict[str, Refused] = {
    "policy.type": Refused(LEROBOT, "policy.class_path: module.Class"),
    "policy.path": Refused(LEROBOT, "policy.class_path: module.Class, and load what was trained in it"),
    "policy.pretrained_path": Refused(LEROBOT, "policy.class_path: module.Class, and load what was trained in it"),
    "policy.use_amp": Refused(LEROBOT, "trainer.precision: bf16", (None, False)),
    "policy.push_to_hub": Refused(LEROBOT, "nothing: nothing is pushed to a hub", (None, False)),
    "dataset": Refused(LEROBOT, "data.train: {class_path: module.Class}"),
    "env": Refused(LEROBOT, "eval.env: {class_path: module.Class}"),
    "eval.batch_size": Refused(LEROBOT, "the number of environments among eval.env.init_args", (None, 0)),
    "eval_freq": Refused(LEROBOT, "trainer.callbacks: a callback that plays rollouts; eval is played once, at the end"),
    "env_eval_freq": Refused(LEROBOT, "trainer.callbacks: a callback that plays rollouts; eval is played at the end"),
    "eval_steps": Refused(LEROBOT, _VALIDATION, (None, 0)),
    "save_freq": Refused(LEROBOT, _CHECKPOINT),
    "save_checkpoint": Refused(LEROBOT, _DEFAULTS, (None, True)),
    "resume": Refused(LEROBOT, "--resume on the command line", (None, False)),
    "job_name": Refused(LEROBOT, "trainer.run_dir"),
    "cudnn_deterministic": Refused(LEROBOT, "trainer.deterministic, which covers all of torch", (None, False)),
    "use_policy_training_preset": Refused(LEROBOT, "optimizer and schedule, which win over the policy's own"),
    "optimizer.type": Refused(LEROBOT, "optimizer: {class_path: torch.optim.AdamW, init_args: {lr: 1e-4}}"),
    "scheduler": Refused(LEROBOT, "schedule: {class_path: policyfit.WarmupCosine}, which counts steps"),
    "wandb.enable": Refused(LEROBOT, "trainer.loggers: [{class_path: module.Logger}]", (None, False)),
    "wandb": Refused(LEROBOT, "trainer.loggers: [{class_path: module.Logger}]"),
    "ema": Refused(LEROBOT, "trainer.callbacks: [{class_path: policyfit.EMA}]"),
    "accelerator.gradient_accumulation.num_steps": Refused(LEROBOT, "trainer.accumulate"),
    "accelerator": Refused(LEROBOT, "trainer.device, trainer.precision, trainer.grad_scaler or trainer.accumulate"),
    "lr_scheduler": Refused(LIGHTNING, "schedule: {class_path: ...}, which counts steps and not epochs"),
    "ckpt_path": Refused(LIGHTNING, "--resume=PATH on the command line"),
    "trainer.devices": Refused(LIGHTNING, f"nothing, and {_LAUNCH}; trainer.device: cuda:N chooses one", _ONE),
    "trainer.num_nodes": Refused(LIGHTNING, f"nothing, and {_LAUNCH} and --nnodes=M", (None, 1)),
    "trainer.gradient_clip_algorithm": Refused(LIGHTNING, "trainer.clip_value, not gradient_clip_val", (None, "norm")),
    "trainer.default_root_dir": Refused(LIGHTNING, "trainer.run_dir, the folder of this one run"),
    "trainer.val_check_interval": Refused(LIGHTNING, _VALIDATION),
    "trainer.check_val_every_n_epoch": Refused(LIGHTNING, f"{_VALIDATION}; left out, it is once, at the end"),
    "trainer.logger": Refused(LIGHTNING, "trainer.loggers: [{class_path: module.Logger}]"),
    "trainer.enable_checkpointing": Refused(LIGHTNING, _DEFAULTS, (None, True)),
    "trainer.enable_progress_bar": Refused(LIGHTNING, _DEFAULTS, (None, True)),
    "trainer.fast_dev_run": Refused(LIGHTNING, "trainer.max_steps: 1", (None, False)),
    "trainer.limit_train_batches": Refused(LIGHTNING, "trainer.max_steps", (None, 1.0)),
    "trainer.benchmark": Refused(LIGHTNING, "nothing: set torch.backends.cudnn.benchmark in the policy's module"),
}

#: How the tools name a run file on the command line.
FILE_OPTIONS = {"--config": LIGHTNING, "-c": LIGHTNING, "--config_path": LEROBOT}
