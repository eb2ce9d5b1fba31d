"""Checkpoints in shards: each rank writes its own rows, and any number of ranks, or one process, reads them."""

from __future__ import annotations

import json
import os
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import outcomes_of, run
from ranks import Policy, Samples, Seen, result
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import AdamW

from policyfit import EMA, Callback, Checkpoint, Trainer, load
from policyfit.strategies.distributed import SingleProcess
from policyfit.strategies.errors import CheckpointError, ConfigError
from policyfit.strategies.fsdp import FSDP
from policyfit.trainer.checkpoint import CheckpointState, read_checkpoint
from policyfit.trainer.checkpoint_files import FileReader
from policyfit.trainer.manifest import damaged, read_manifest
from policyfit.trainer.newest import newest_checkpoint, whole_checkpoints
from policyfit.trainer.pieces import Pieces, read_tensors


class Tied(Policy):
    """A last layer of three rows, a weight that two layers share, a frozen number and a buffer."""

    def __init__(self) -> None:
        super().__init__(dropout=0.3)
        self.again = nn.Linear(12, 3, bias=False)
        self.again.weight = self.last.weight
        self.gain = nn.Parameter(torch.tensor(1.5), requires_grad=False)
        self.register_buffer("count", torch.arange(4))


def train(
    folder: str, distributed: str, *, steps: int, ranks: int = 1, every: int = 2, resume: str | None = None,
    checkpoint: Any = "shards", extra: Any = (), replicate: int | None = None, tied: bool = False, **saves: Any,
) -> dict[str, Any]:  # fmt: skip
    """Some steps of 24 samples each, on however many ranks."""
    strategy: Any = distributed
    if distributed == "fsdp":
        strategy = FSDP(timeout=30.0, checkpoint=checkpoint, replicate=replicate)
    seen = Seen()
    trainer = Trainer(
        "cpu", max_steps=steps, batch_size=24 // ranks, seed=7, clip_norm=1.0, run_dir=folder, distributed=strategy,
        callbacks=[seen, *extra, EMA(0.9), Checkpoint(every_steps=every, keep=None, **saves)],
    )  # fmt: skip
    policy = Tied() if tied else Policy(dropout=0.3 if ranks > 1 else 0.0)
    trainer.fit(policy, Samples(), resume=resume, optimizer=lambda p: AdamW(p, lr=1e-2))
    return result(trainer, seen)


def names(checkpoint: Path, folder: str) -> list[str]:
    return sorted(path.name for path in (checkpoint / folder).glob("*.safetensors"))


def same(found: Any, expected: Any) -> None:
    assert sorted(found) == sorted(expected)
    for name, value in expected.items():
        if isinstance(value, dict):
            same(found[name], value)
        elif isinstance(value, Tensor):
            assert torch.equal(found[name], value), name
        else:
            assert found[name] == value, name


def same_state(found: CheckpointState, expected: CheckpointState) -> None:
    same(found.model, expected.model)
    same(found.models["ema"], expected.models["ema"])
    for mine, theirs in zip(found.optimizers, expected.optimizers, strict=True):
        same(mine["state"], theirs["state"])
        assert mine["param_groups"] == theirs["param_groups"]


def both(folder: str) -> None:
    for kind in ("shards", "whole"):
        train(f"{folder}/{kind}", "fsdp", steps=3, ranks=2, checkpoint=kind, tied=True)


def test_shards_hold_what_the_whole_format_holds_and_the_last_checkpoint_has_whole_weights(tmp_path: Path) -> None:
    run(both, str(tmp_path))
    cut, whole = tmp_path / "shards" / "checkpoints" / "000002", tmp_path / "whole" / "checkpoints" / "000002"
    assert names(cut, "pretrained_model") == ["model_shard_0.safetensors", "model_shard_1.safetensors"]
    assert names(cut, "pretrained_model_ema") == names(cut, "pretrained_model")
    assert names(cut, "training_state") == [
        "optimizer_state_shard_0.safetensors",
        "optimizer_state_shard_1.safetensors",
        "rng_state.safetensors",
        "rng_state_1.safetensors",
    ]
    assert names(whole, "pretrained_model") == ["model.safetensors"]
    same_state(read_checkpoint(cut), read_checkpoint(whole))
    with safe_open(cut / "pretrained_model" / "model_shard_1.safetensors", framework="pt") as file:
        assert file.get_tensor("last.weight").shape == (1, 12)
        assert {"count", "gain"}.isdisjoint(file.keys())
    last = cut.with_name("000003")
    assert names(last, "pretrained_model") == names(last, "pretrained_model_ema") == ["model.safetensors"]
    assert names(last, "training_state") == names(cut, "training_state")
    same_state(read_checkpoint(last), read_checkpoint(whole.with_name("000003")))
    for checkpoint in (cut, last):
        model = load(checkpoint, device="cpu", policy=Tied(), weights="ema").state_dict()
        same(model, {name: read_checkpoint(checkpoint).models["ema"][name] for name in model})
        assert whole_checkpoints(checkpoint.parent)[-1] == last


def test_readers_of_torch_distributed_read_the_shards(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load as load_shards

    run(part, str(tmp_path), {"steps": 3, "ranks": 4}, ranks=4)
    cut = tmp_path / "checkpoints" / "000002"
    expected = read_checkpoint(cut).model
    found = {name: torch.full_like(value, torch.nan) for name, value in expected.items()}
    reader = HuggingFaceStorageReader(str(cut / "pretrained_model"))
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # that it is one process
        load_shards(found, storage_reader=reader, no_dist=True)
    same(found, expected)


def part(folder: str, settings: dict[str, Any]) -> dict[str, Any]:
    return train(folder, "fsdp", **settings)


def resumed_exactly(folder: str) -> None:
    train(f"{folder}/straight", "fsdp", steps=9, ranks=2, tied=True, background=False)
    train(f"{folder}/resumed", "fsdp", steps=5, ranks=2, tied=True)
    train(f"{folder}/resumed", "fsdp", steps=9, ranks=2, tied=True, resume=f"{folder}/resumed/checkpoints/000004")


def test_resume_on_as_many_ranks_is_exact(tmp_path: Path) -> None:
    run(resumed_exactly, str(tmp_path))
    for step in ("000006", "000009"):
        mine, theirs = (read_checkpoint(tmp_path / kind / "checkpoints" / step) for kind in ("resumed", "straight"))
        same_state(mine, theirs)
        same(mine.rng_of_others[0], theirs.rng_of_others[0])


def reloaded(folder: str, distributed: str, resume: str, ranks: int) -> dict[str, Any]:
    """A run that goes on for no step: what it saves is what it loaded."""
    return train(folder, distributed, steps=2, ranks=ranks, resume=resume, checkpoint="whole")


@pytest.mark.parametrize(("distributed", "ranks"), [("none", 1), ("ddp", 2), ("fsdp", 2), ("fsdp", 3), ("fsdp", 4)])
def test_any_number_of_ranks_loads_what_two_saved(
    tmp_path: Path, shards_of_two: Path, distributed: str, ranks: int
) -> None:
    arguments = (str(tmp_path / "run"), distributed, str(shards_of_two), ranks)
    results = [reloaded(*arguments)] if ranks == 1 else run(reloaded, *arguments, ranks=ranks)
    same_state(read_checkpoint(Path(results[0]["last"])), read_checkpoint(shards_of_two))


@pytest.fixture(scope="module")
def shards_of_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    run(part, str(folder), {"steps": 3, "ranks": 2})
    return folder / "checkpoints" / "000002"


def test_groups_of_ranks_with_the_same_shards_write_them_once(tmp_path: Path) -> None:
    run(part, str(tmp_path), {"steps": 3, "ranks": 4, "replicate": 2}, ranks=4)
    cut = tmp_path / "checkpoints" / "000002"
    assert names(cut, "pretrained_model") == ["model_shard_0.safetensors", "model_shard_1.safetensors"]
    one = reloaded(str(tmp_path / "one"), "none", str(cut), 1)
    same_state(read_checkpoint(Path(one["last"])), read_checkpoint(cut))


class Full(Callback):
    """From some step on, this rank's disk is full."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def on_train_batch_start(self, trainer: Trainer, policy: nn.Module, batch: Any, batch_idx: int) -> None:
        if trainer.distribution.rank == self.rank and trainer.step == 3:
            from policyfit.trainer import checkpoint_files

            trainer._active.saver.wait()  # that of step 2 is to be complete

            def full(*_: Any) -> None:
                raise OSError(28, "No space left on device")

            checkpoint_files.save_file = full  # type: ignore[attr-defined,assignment]


def filled(folder: str, background: bool) -> str:
    try:
        train(folder, "fsdp", steps=40, ranks=2, extra=[Full(rank=1)], background=background)
    except Exception as error:
        return str(error)
    return ""


@pytest.mark.parametrize("background", [True, False])
def test_full_disk_of_one_rank_ends_all_and_leaves_nothing_by_halves(tmp_path: Path, background: bool) -> None:
    for text in run(filled, str(tmp_path), background):
        assert "model_shard_1.safetensors could not be written: [Errno 28] No space left on device" in text
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["000002", "last"]
    assert [step["step"] for step in run(part, str(tmp_path), {"steps": 4, "ranks": 2, "resume": "last"})] == [4, 4]


class Unpinned(Callback):
    """From some step on, rank 1 cannot copy what is to be saved."""

    def on_train_batch_start(self, trainer: Trainer, policy: nn.Module, batch: Any, batch_idx: int) -> None:
        if trainer.distribution.rank == 1 and trainer.step == 3:

            def refused(*_: Any) -> Any:
                raise RuntimeError("no more memory can be pinned")

            trainer._active.saver._snapshots.take = refused  # type: ignore[method-assign,assignment]


def uncopied(folder: str) -> str:
    try:
        train(folder, "fsdp", steps=40, ranks=2, extra=[Unpinned()], background=True)
    except Exception as error:
        return str(error).splitlines()[0]
    return ""


def test_rank_that_cannot_copy_what_is_to_be_saved_ends_all_in_time(tmp_path: Path) -> None:
    told = "Rank 1 failed, so all ended after update 4: RuntimeError: no more memory can be pinned"
    assert run(uncopied, str(tmp_path), limit_s=40.0) == [told, "no more memory can be pinned"]
    assert read_checkpoint(tmp_path / "checkpoints" / "last").manifest["counters"]["step"] == 4


class Dies(Callback):
    """Killed while it writes its shards of step 4."""

    def on_train_batch_start(self, trainer: Trainer, policy: nn.Module, batch: Any, batch_idx: int) -> None:
        if trainer.distribution.rank == 1 and trainer.step == 3:
            from policyfit.trainer import checkpoint_files

            trainer._active.saver.wait()  # that of step 2 is to be complete
            checkpoint_files.save_file = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[attr-defined]


def killed(folder: str) -> str:
    try:
        train(folder, "fsdp", steps=40, ranks=2, extra=[Dies()])
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_rank_that_is_killed_while_it_writes_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    ranks = outcomes_of(killed, str(tmp_path), limit_s=40.0)
    assert [rank.exit_code for rank in ranks] == [0, -9]
    assert ranks[0].value.startswith("RanksLost: Rank 1 no longer answers")
    left = tmp_path / "checkpoints" / ".000004.writing-0123abcd"
    left.mkdir(exist_ok=True)  # as rank 0 leaves it when it is killed too
    assert newest_checkpoint(tmp_path, warn=pytest.fail).name == "000002"
    run(part, str(tmp_path), {"steps": 5, "ranks": 2, "resume": "last"})
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["000002", "000004", "000005", "last"]


@pytest.fixture
def checkpoint(tmp_path: Path, shards_of_two: Path) -> Path:
    """A copy that may be damaged."""
    import shutil

    return Path(shutil.copytree(shards_of_two, tmp_path / "000002"))


def shard(checkpoint: Path, rank: int = 1) -> Path:
    return checkpoint / "pretrained_model" / f"model_shard_{rank}.safetensors"


@pytest.mark.parametrize("damage", ["missing", "a byte", "shorter", "another"])
def test_damaged_shard_is_named(checkpoint: Path, damage: str) -> None:
    content = bytearray(shard(checkpoint).read_bytes())
    content[-1] ^= 1
    if damage == "missing":
        shard(checkpoint).unlink()
    elif damage == "another":
        extra = checkpoint / "training_state" / "optimizer_state_shard_2.safetensors"
        extra.write_bytes(content)
    else:
        shard(checkpoint).write_bytes(content if damage == "a byte" else content[:-8])
    name = "optimizer_state_shard_2" if damage == "another" else "model_shard_1"
    with pytest.raises(CheckpointError, match=rf"{name}\.safetensors is damaged"):
        read_checkpoint(checkpoint)


def edited(path: Path, **changes: Any) -> None:
    """The file with other places, or other tensors, than were written."""
    with safe_open(path, framework="pt") as file:
        info = json.loads(file.metadata()["DCP_SHARDING_INFO"])
    tensors = load_file(path)
    for name, change in changes.items():
        key = name.replace("__", ".")
        if isinstance(change, Tensor):
            tensors[key] = change
        else:
            info[key] = change
    save_file(tensors, path, {"DCP_SHARDING_INFO": json.dumps(info)})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"saved_offsets": [1, 0], "shape": [3, 12]}, "its rows of last.weight do not follow"),
        ({"saved_offsets": [2, 1], "shape": [3, 12]}, "its rows of last.weight do not follow"),
        ({"saved_offsets": [2, 0], "shape": [3, 13]}, "its rows of last.weight do not follow"),
        ({"saved_offsets": [2, 0], "shape": [4, 12]}, "last.weight has another shape or type"),
        ({"saved_offsets": [2, 0]}, "KeyError"),
        ({"saved_offsets": None, "shape": [3, 12]}, "TypeError"),
        ({"saved_offsets": [2, 0], "shape": [10**30, 12]}, "last.weight has another shape or type"),
        ("nothing", "TypeError"),
        (torch.zeros(1, 12, dtype=torch.float64), "last.weight has another shape or type"),
    ],
)  # fmt: skip
def test_shards_that_do_not_fit_together_are_damaged(checkpoint: Path, change: Any, words: str) -> None:
    edited(shard(checkpoint), last__weight=change)
    with pytest.raises(CheckpointError, match=rf"model_shard_1\.safetensors is damaged: .*{words}"):
        read_tensors(reader(checkpoint), "pretrained_model/model")


def test_shard_that_the_manifest_does_not_list_leaves_rows_missing(checkpoint: Path) -> None:
    found = reader(checkpoint)
    found.unread.remove("pretrained_model/model_shard_1.safetensors")
    with pytest.raises(CheckpointError, match=r"model_shard_1\.safetensors is damaged: the last rows of"):
        read_tensors(found, "pretrained_model/model")


def reader(checkpoint: Path) -> FileReader:
    manifest = read_manifest(checkpoint)
    return FileReader(checkpoint, manifest, lambda name, what: damaged(checkpoint, name, what))


def test_rows_are_read_where_they_lie_and_as_a_tensor_gives_them(checkpoint: Path) -> None:
    expected = read_checkpoint(checkpoint).model["first.weight"]
    pieces = read_checkpoint(checkpoint, lazy=True).model["first.weight"]
    assert isinstance(pieces, Pieces)
    shard(checkpoint).unlink()  # as when the copy of a remote run is cleared away
    for rows in (slice(None), slice(0, 6), slice(5, 7), slice(6, 12), slice(3, 3), slice(12, 12), slice(4, 99)):
        assert torch.equal(pieces[rows], expected[rows])
        assert pieces[rows].dtype == expected.dtype


def test_ranks_without_common_storage_are_told(tmp_path: Path) -> None:
    texts = run(apart, str(tmp_path), limit_s=40.0)
    assert all(
        "Rank 1 wrote pretrained_model/model_shard_1.safetensors, but rank 0 does not find it" in t for t in texts
    )
    assert not list(tmp_path.glob("*/checkpoints/0*"))


def apart(folder: str) -> str:
    from policyfit.trainer import state

    def here(ranks: Any, temporary: Path, *arguments: Any) -> None:
        write(ranks, Path(f"{temporary}-elsewhere") if ranks.rank else temporary, *arguments)

    write, state.write_in_shards = state.write_in_shards, here  # type: ignore[attr-defined,assignment]
    try:
        train(f"{folder}/run", "fsdp", steps=4, ranks=2, background=False)
    except CheckpointError as error:
        return str(error)
    return ""


def test_checkpoint_argument_is_shards_or_whole() -> None:
    with pytest.raises(ConfigError, match=r"FSDP\.checkpoint must be shards or whole, got 'both'"):
        FSDP(checkpoint="both")  # type: ignore[arg-type]
    assert FSDP().saves_shards
    assert not FSDP(checkpoint="whole").saves_shards
    assert not SingleProcess().saves_shards
