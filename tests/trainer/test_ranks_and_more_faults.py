"""More of what other libraries get wrong with several processes: averages, full disks, compiled policies, switches."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from failing import Fails
from processes import run
from ranks import Block, Policy, Rolls, Samples, close, same, train
from torch import Tensor, nn
from torch.utils.data._utils import signal_handling

from policyfit import DDP, EMA, FSDP, Callback, Checkpoint, Trainer
from policyfit.trainer import checkpoint_files
from policyfit.trainer.checkpoint import CheckpointState, read_checkpoint

M = TypeVar("M", bound=nn.Module)


def ranks_of(kind: str) -> Any:
    return {"ddp": DDP, "fsdp": FSDP}[kind](timeout=20.0)


def last(folder: Path) -> CheckpointState:
    return read_checkpoint(folder / "checkpoints" / "last")


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


# The average of the weights -----------------------------------------------------------------------------------


class Frail(Policy):
    """Fails where it is told to: when its weights are read for a save, validated or played with."""

    fails = ""

    def _fail(self, where: str) -> None:
        if self.fails == where:
            self.fails = ""
            raise OSError("no memory for it")

    def state_dict(self, *args: Any, **named: Any) -> Any:
        self._fail("save")
        return super().state_dict(*args, **named)

    def forward(self, batch: dict[str, Tensor]) -> Any:
        if not self.training:
            self._fail("validation")
        return super().forward(batch)

    def select_action(self, observation: Tensor) -> Tensor:
        self._fail("rollout")
        return super().select_action(observation)


class Breaks(Callback):
    """Has rank 1 fail at step 3, in one use of the average; notes how much of the average a rank has."""

    def __init__(self, average: EMA, where: str) -> None:
        self.average, self.where, self.held, self.before = average, where, 0, list[Tensor]()
        self.rolls = Rolls(every=3)

    def due(self, step: int) -> bool:
        return step == 3

    def on_update_end(self, trainer: Trainer, policy: nn.Module, outcome: Any) -> None:
        self.before = self._weights(trainer, policy)

    def on_due(self, trainer: Trainer, policy: Any) -> None:
        self.held = sum(trainer.distribution.local(average).numel() for average in self.average._averages)
        policy.fails = self.where if trainer.distribution.rank == 1 else ""
        if self.where == "save":
            trainer.save_checkpoint()
        if self.where == "rollout":
            self.rolls.on_due(trainer, policy)

    def on_validation_start(self, trainer: Trainer, policy: Any) -> None:
        policy.fails = self.where if trainer.distribution.rank == 1 else ""

    def on_exception(self, trainer: Trainer, policy: nn.Module, error: BaseException) -> None:
        trainer.distribution.release()
        assert all(map(torch.equal, self.before, self._weights(trainer, policy)))

    def _weights(self, trainer: Trainer, policy: nn.Module) -> list[Tensor]:
        return [trainer.distribution.local(p.detach()).clone() for p in policy.parameters()]


def averaged(folder: str) -> tuple[list[str], int]:
    errors, held = [], 0
    for where in ("", "save", "validation", "rollout"):
        average = EMA(0.5)
        breaks = Breaks(average, where)
        trainer = Trainer(
            "cpu", max_steps=9 if where else 3, val_every=3 if where == "validation" else None, batch_size=4, seed=7,
            run_dir=f"{folder}/straight{where}", distributed=ranks_of("fsdp"),
            callbacks=[average, breaks, Checkpoint(every_steps=50)],
        )  # fmt: skip
        try:
            trainer.fit(Frail(), Samples(), Samples() if where == "validation" else None)
        except Exception as error:
            errors.append("\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])]))
        held = max(held, breaks.held)
    return errors, held


def test_an_average_that_fails_on_one_rank_leaves_all_ranks_their_own_weights(tmp_path: Path) -> None:
    (others, held), (own, own_held) = run(averaged, str(tmp_path), limit_s=60.0)
    assert [text.splitlines()[0] for text in own] == ["OSError: no memory for it"] * 3
    told = "RankFailed: Rank 1 failed, so all ended after update 3: OSError: no memory for it"
    assert [text.splitlines()[0] for text in others] == [told] * 3
    assert not any("another error" in text for text in others)
    assert 0 < own_held < held < held + own_held == sum(p.numel() for p in Policy().parameters())  # never the whole
    straight = last(tmp_path / "straight")
    assert not torch.equal(straight.model["first.weight"], straight.models["ema"]["first.weight"])
    for where in ("save", "validation", "rollout"):
        left = last(tmp_path / f"straight{where}")
        assert left.manifest["counters"]["step"] == 3
        same(left.model, straight.model)
        same(left.models["ema"], straight.models["ema"])


# A full disk --------------------------------------------------------------------------------------------------


class Fills(Callback):
    """From step 3 on, the disk of rank 0 takes one file more, and no other; of another's shard in test_shards.py."""

    def __init__(self) -> None:
        self.left, self.write = 1, checkpoint_files.save_file  # type: ignore[attr-defined]

    def on_train_batch_start(self, trainer: Trainer, policy: nn.Module, batch: Any, batch_idx: int) -> None:
        if trainer.is_main and trainer.step == 3:
            trainer._active.saver.wait()  # that of step 2 is to be complete
            checkpoint_files.save_file = self._write  # type: ignore[attr-defined,assignment]

    def _write(self, *arguments: Any) -> None:
        self.left -= 1
        if self.left < 0:
            raise OSError(28, "No space left on device")
        self.write(*arguments)

    def teardown(self, trainer: Trainer, policy: nn.Module, stage: str) -> None:
        checkpoint_files.save_file = self.write  # type: ignore[attr-defined]


def filled(folder: str) -> list[tuple[str, list[str], str, int]]:
    found = []
    for kind in ("ddp", "fsdp"):
        run_dir, text = f"{folder}/{kind}", ""
        try:
            train(run_dir, ranks_of(kind), steps=40, extra=[Fills()], ema=True)
        except Exception as error:
            text = str(error)
        left, link = names_in(Path(run_dir)), str(Path(run_dir, "checkpoints", "last").readlink())
        found.append((text, left, link, train(run_dir, ranks_of(kind), steps=4, ema=True, resume="last")["step"]))
    return found


def test_a_disk_that_fills_up_in_a_save_in_the_background_ends_all_with_the_checkpoint_before(tmp_path: Path) -> None:
    for kind, *ranks in zip(("ddp", "fsdp"), *run(filled, str(tmp_path), limit_s=60.0), strict=True):
        for text, left, link, step in ranks:
            file = f"model{'_shard_0' if kind == 'fsdp' else ''}.safetensors"
            assert f"{file} could not be written: [Errno 28] No space left on device" in text
            assert (left, link, step) == (["000002", "last"], "000002", 4)
        assert names_in(tmp_path / kind) == ["000002", "000004", "last"]


# Who looks at the disk ----------------------------------------------------------------------------------------

LOOKS = ("stat", "lstat", "readlink", "listdir", "scandir", "access")


def looking(folder: str) -> dict[str, list[tuple[str, str]]]:
    """What a rank asks the system of the folders of runs that save, go on and delete."""
    seen = dict[str, list[tuple[str, str]]]()

    def watched(name: str, ask: Callable[..., Any]) -> Callable[..., Any]:
        def asked(path: Any = ".", *arguments: Any, **named: Any) -> Any:
            kind, _, rest = str(path).removeprefix(f"{folder}/").partition("/")
            if kind in seen:
                seen[kind].append((name, rest))
            return ask(path, *arguments, **named)

        return asked

    for name in LOOKS:
        setattr(os, name, watched(name, getattr(os, name)))
    for kind in ("ddp", "fsdp"):
        seen[kind] = []
        for steps, resume in ((3, None), (5, "last")):
            trainer = Trainer(
                "cpu", max_steps=steps, batch_size=4, seed=7, run_dir=f"{folder}/{kind}", distributed=ranks_of(kind),
                callbacks=[Checkpoint(every_steps=1, keep=1)],
            )  # fmt: skip
            trainer.fit(Policy(), Samples(), resume=resume)
    return seen


def test_rank_0_alone_looks_for_checkpoints_and_another_at_the_one_it_named_and_its_own_shards(tmp_path: Path) -> None:
    first, second = run(looking, str(tmp_path), limit_s=40.0)
    for kind in ("ddp", "fsdp"):
        assert {"readlink", "listdir"} < {name for name, _ in first[kind]}
        assert {name for name, _ in second[kind]} == {"stat", "lstat"}
        steps = [path.split("/")[1:] for _, path in second[kind] if path.startswith("checkpoints/")]
        written = [parts for parts in steps if ".writing-" in parts[0]]
        assert {parts[0] for parts in steps if parts not in written} == {"000003"}
        files = {parts[-1] for parts in written if parts[-1].endswith((".json", ".safetensors"))}
        assert files == ({f"{name}_shard_1.safetensors" for name in ("model", "optimizer_state")} if written else set())
        assert bool(written) == (kind == "fsdp")


# A compiled policy --------------------------------------------------------------------------------------------


def compiled(folder: str) -> int:
    """A run in two parts that are compiled, and one that is not; how many graphs there were."""
    graphs, compile_ = [0], nn.Module.compile

    def backend(graph: Any, inputs: Any) -> Any:
        graphs[0] += 1
        return graph.forward

    def eager(self: nn.Module) -> None:
        compile_(self, backend=backend)

    nn.Module.compile = eager  # type: ignore[method-assign]
    train(f"{folder}/plain", ranks_of("fsdp"), steps=4, ema=True, val=True)
    for steps, resume in ((2, None), (4, "last")):
        train(
            f"{folder}/compiled", ranks_of("fsdp"), steps=steps, ema=True, val=True, resume=resume, compile=True
        )  # fmt: skip
    return graphs[0]


def test_checkpoints_of_a_compiled_policy_in_shards_are_those_of_the_bare_one(tmp_path: Path) -> None:
    assert min(run(compiled, str(tmp_path), limit_s=60.0)) > 0
    found, plain = (last(tmp_path / name) for name in ("compiled", "plain"))
    assert sorted(found.model) == sorted(Policy().state_dict())
    same(found.model, plain.model)
    same(found.models["ema"], plain.models["ema"])
    for index, entry in plain.optimizers[0]["state"].items():
        same(found.optimizers[0]["state"][index], entry)


# The switches of the process ----------------------------------------------------------------------------------

HOOKS = {
    "ddp": ("setup", "on_train_batch_start", "on_after_backward", "on_due", "on_fit_end", "teardown"),
    "fsdp": ("on_before_backward", "on_validation_batch_end"),
}


class Upsets(Fails):
    """Turns the switches of one rank, and raises there, in one hook."""

    def _fail(self, trainer: Trainer, *_: Any) -> None:
        if trainer.distribution.rank == self.rank:
            torch.use_deterministic_algorithms(False)
            torch.backends.cudnn.benchmark = True
            torch.set_num_threads(2)
            torch.set_default_dtype(torch.float64)
            raise RuntimeError("only on this rank")

    def due(self, step: int) -> bool:
        return step == 2


class Notes(Callback):
    """The switches as they are in the run."""

    def on_fit_start(self, trainer: Trainer, policy: nn.Module) -> None:
        self.switches = switches()


def switches() -> dict[str, Any]:
    return {
        "default dtype": str(torch.get_default_dtype()),
        "gradients": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warns only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "benchmark": torch.backends.cudnn.benchmark,
        "tf32": torch.backends.cuda.matmul.fp32_precision,
        "threads": torch.get_num_threads(),
        "signals": [str(signal.getsignal(s)) for s in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGCHLD)],
        "workers": signal_handling._SIGCHLD_handler_set,
        "environment": dict(os.environ),
        "joined": torch.distributed.is_initialized(),
        "names": [str(f) for f in (torch.no_grad, torch.inference_mode, torch.autocast)],
    }


def upset(folder: str) -> tuple[dict[str, list[str]], list[str]]:
    """After each failure, the switches that are not as they were; and those that a run turns."""
    left, turned = dict[str, list[str]](), list[str]()
    shows_errors = sys.excepthook
    train(f"{folder}/healthy", ranks_of("ddp"), steps=1)
    assert sys.excepthook is shows_errors  # torch's own would stay, once more after each run
    for kind, hooks in HOOKS.items():
        for number, hook in enumerate(hooks):
            before, notes = switches(), Notes()
            error = ""
            try:
                Trainer(
                    "cpu", max_steps=3, val_every=2, batch_size=4, deterministic=True, distributed=ranks_of(kind),
                    run_dir=f"{folder}/{kind} {hook}", callbacks=[notes, Upsets(number % 2, hook, 0), Checkpoint(2)],
                ).fit(Policy(), Samples(), Samples())  # fmt: skip
            except RuntimeError as raised:
                error = str(raised)
            own = number % 2 == int(os.environ["RANK"])
            assert ("only on this rank" in error) or (hook == "teardown" and not own), (hook, error)
            after = switches()
            left[f"{kind} {hook}"] = [name for name in before if before[name] != after[name]]
            if hook == "on_due":
                turned = [name for name in before if before[name] != notes.switches[name]]
    return left, turned


def test_whatever_hook_fails_on_one_rank_the_switches_of_all_processes_come_back(tmp_path: Path) -> None:
    for left, turned in run(upset, str(tmp_path), limit_s=60.0):
        assert len(left) == 8
        assert {name: found for name, found in left.items() if found} == {}
        assert {"deterministic", "signals", "workers", "joined"} <= set(turned)


# A parameter that is another, or trained no more --------------------------------------------------------------


class Changes(Policy):
    """In its third forward, one rank replaces, freezes or thaws a parameter, or fails without gradient mode."""

    def __init__(self, rank: int, how: str) -> None:
        super().__init__()
        self.how, self.left = how, 2 if str(rank) == os.environ["RANK"] else -1
        self.first.bias.requires_grad_(how != "thawed")

    def forward(self, batch: dict[str, Tensor]) -> Any:
        if self.left == 0 and self.how == "replaced":
            self.last.weight = nn.Parameter(torch.zeros(3, 12))
        if self.left == 0 and self.how == "frozen":
            self.last.weight.requires_grad_(False)
        if self.left == 0 and self.how == "thawed":
            self.first.bias.requires_grad_(True)
        if self.left == 0 and self.how == "without gradients":
            torch.set_grad_enabled(False)
            raise RuntimeError("only on this rank")
        self.left -= 1
        return super().forward(batch)


CHANGES = [
    *((kind, how, rank) for kind in ("ddp", "fsdp") for how in ("replaced", "frozen") for rank in (0, 1)),
    ("ddp", "thawed", 1),
    ("ddp", "without gradients", 0),
]


WORDS = {
    "replaced": "have been replaced since the run began, by others that no optimizer moves: last.weight.",
    "frozen": "averaged: last.weight.\n",
    "thawed": "but DDP averages the gradients only of what could be trained then: first.bias.",
    "without gradients": "only on this rank",
}


def changed(folder: str) -> list[str]:
    found = []
    for kind, how, rank in CHANGES:
        run_dir = f"{folder}/{kind} {how} {rank}"
        trainer = Trainer(
            "cpu", max_steps=9, batch_size=4, seed=7, run_dir=run_dir, distributed=ranks_of(kind),
            callbacks=[Checkpoint(every_steps=50)],
        )  # fmt: skip
        try:
            trainer.fit(Changes(rank, how), Samples())
        except Exception as error:
            found.append("\n".join([str(error), *getattr(error, "__notes__", [])]))
    return found


def test_what_one_rank_changes_of_its_parameters_ends_all_in_order_by_name_saved(tmp_path: Path) -> None:
    ranks = run(changed, str(tmp_path), limit_s=60.0)
    for number, (kind, how, rank) in enumerate(CHANGES):
        own, others = ranks[rank][number], ranks[1 - rank][number]
        if kind == "fsdp":
            assert own.startswith("In update 3 the ranks of a sharded run did not use the same units and parameters")
            assert f"Rank {rank} left out: last.weight." in own
            assert others.startswith("In update 3 the ranks of a sharded run")
        else:
            assert WORDS[how] in own
            assert f"Rank {rank} failed, so all ended after update 2: " in others
        assert last(tmp_path / f"{kind} {how} {rank}").manifest["counters"]["step"] == 2


# A frozen backbone in 16 bits ---------------------------------------------------------------------------------


class Grafted(Policy):
    """A frozen backbone in bfloat16, whole units and a part of one, below float32 that is trained."""

    fsdp_units = ["Block", "Mixed"]  # noqa: RUF012

    def __init__(self, moved: bool = False) -> None:
        super().__init__()
        self.first = frozen(nn.Linear(6, 12))
        self.blocks = nn.ModuleList([frozen(Block(12, 0.0)), Mixed()])
        if moved:  # so that what a checkpoint does not bring is seen
            with torch.no_grad():
                for parameter in self.parameters():
                    parameter.add_(1.0)

    def forward(self, batch: dict[str, Tensor]) -> Any:
        x = self.blocks[1](self.blocks[0](self.first(batch["x"].bfloat16())))
        return (self.last(x) - batch["y"]).square().mean(), {}


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.adapter = frozen(nn.Linear(12, 12)), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.frozen(x).float() + self.adapter(x.float())
        return result


def frozen(module: M) -> M:
    return module.bfloat16().requires_grad_(False)


def graft(run_dir: str, ranks: int, steps: int, resume: str | None = None) -> dict[str, str]:
    """The types of the weights at the end."""
    policy = Grafted(moved=resume is not None)
    trainer = Trainer(
        "cpu", max_steps=steps, batch_size=24 // ranks, seed=7, run_dir=run_dir, callbacks=[EMA(0.5), Checkpoint(2)],
        distributed=FSDP(timeout=20.0) if ranks > 1 else "none",
    )  # fmt: skip
    trainer.fit(policy, Samples(), resume=resume)
    return {name: str(p.dtype) for name, p in policy.named_parameters()}


def grafted(folder: str) -> list[dict[str, str]]:
    return [
        graft(f"{folder}/straight", 2, 5),
        graft(f"{folder}/run", 2, 3),
        graft(f"{folder}/run", 2, 5, f"{folder}/run/checkpoints/000002"),
    ]


def test_a_frozen_bf16_backbone_goes_through_checkpoints_of_shards_as_it_is_for_any_number_of_ranks(
    tmp_path: Path,
) -> None:
    types = {name: str(p.dtype) for name, p in Grafted().named_parameters()}
    assert set(types.values()) == {"torch.float32", "torch.bfloat16"}
    assert run(grafted, str(tmp_path), limit_s=40.0) == [[types] * 3] * 2
    straight, begun = last(tmp_path / "straight"), Grafted().state_dict()
    resumed = last(tmp_path / "run")
    same(resumed.model, straight.model)
    same(resumed.models["ema"], straight.models["ema"])
    shutil.copytree(tmp_path / "straight", tmp_path / "others", symlinks=True)
    second = str(tmp_path / "others" / "checkpoints" / "000002")
    assert graft(str(tmp_path / "others"), 1, 5, second) == types
    in_shards = read_checkpoint(tmp_path / "straight" / "checkpoints" / "000002")  # the last have whole weights
    for found in (in_shards, straight, resumed, last(tmp_path / "others")):
        for model in (found.model, found.models["ema"]):
            assert {name: str(value.dtype) for name, value in model.items()} == types
            same({name: model[name] for name in types if "bfloat16" in types[name]}, {
                name: value for name, value in begun.items() if value.dtype == torch.bfloat16
            })  # fmt: skip
    # A kernel may add the products of another number of rows in another order, and bfloat16 keeps 8 bits of the sum.
    close(last(tmp_path / "others").model, straight.model, 1e-3)
    assert not torch.equal(straight.model["last.weight"], begun["last.weight"])
