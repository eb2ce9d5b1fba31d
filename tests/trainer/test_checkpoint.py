"""The format on disk: what is written comes back, and nothing else ever does."""

import errno
import json
import os
import pickle
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

from policyfit.strategies.errors import CheckpointError
from policyfit.trainer import checkpoint_files
from policyfit.trainer.checkpoint import CheckpointState, read_checkpoint, write_checkpoint
from policyfit.trainer.manifest import seal
from policyfit.trainer.newest import delete_checkpoint, newest_checkpoint, point_last_at, whole_checkpoints


def make_state(step: int = 500, **changes: Any) -> CheckpointState:
    generator = torch.Generator().manual_seed(step)
    weight = torch.randn(4, 3, generator=generator)
    counters = {"step": step, "skipped": 1, "updates": step + 1, "micro_batches": 2 * step, "epoch": 0}
    state = CheckpointState(
        manifest={"counters": counters, "precision": "fp16", "device": "cpu", "world_size": 1, "seed": 7},
        model={"weight": weight, "count": torch.tensor(step)},
        policy_config={"type": "act", "chunk_size": 16},
        optimizers=[
            {
                "state": {0: {"step": torch.tensor(float(step)), "exp_avg": weight * 0.5}},
                "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.999), "foreach": None, "params": [0]}],
            }
        ],
        schedules=[{"last_epoch": step, "base_lrs": [1e-3]}],
        scaler={"scale": 65536.0, "_growth_tracker": 3},
        rng={"torch_rng_state": torch.arange(16, dtype=torch.uint8)},
        callbacks={"EMA": {"decay": 0.99, "shadow": {"weight": weight + 1}}},
    )
    return replace(state, **changes)


def plain(value: Any) -> Any:
    """A value that compares equal when two states are the same bit for bit; tuples count as lists."""
    if isinstance(value, Tensor):
        raw = value.detach().contiguous().reshape(-1).view(torch.uint8)
        return ("tensor", value.dtype, tuple(value.shape), value.stride(), bytes(raw.tolist()))
    if isinstance(value, dict):
        return (type(value) is Counter, [(type(k), k, plain(v)) for k, v in sorted(value.items(), key=str)])
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return (type(value), repr(value))


def contents(state: CheckpointState) -> dict[str, Any]:
    manifest = {k: v for k, v in state.manifest.items() if k not in ("format_version", "files", "layouts", "sha256")}
    parts = {f.name: plain(getattr(state, f.name)) for f in fields(state)}
    return {**parts, "manifest": plain(manifest)}


def round_trip(folder: Path, state: CheckpointState) -> CheckpointState:
    return read_checkpoint(write_checkpoint(folder / "000500", state))


@pytest.fixture(autouse=True)
def disk_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def unexpected(message: str) -> None:
    raise AssertionError(f"unexpected warning: {message}")


def edit_manifest(folder: Path, change: Any) -> None:
    """Change a manifest as somebody would who can compute its seal, too."""
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    manifest["sha256"] = seal(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def replace_file(folder: Path, name: str, text: str) -> None:
    """Change a file together with what the manifest says about it."""
    import hashlib

    (folder / name).write_text(text)
    entry = {"size": len(text), "sha256": hashlib.sha256(text.encode()).hexdigest()}
    edit_manifest(folder, lambda m: m["files"].update({name: entry}))


# Round trips


def test_checkpoint_comes_back_bit_for_bit_in_the_documented_layout(tmp_path: Path) -> None:
    state = make_state()
    folder = write_checkpoint(tmp_path / "000500", state)
    assert contents(read_checkpoint(folder)) == contents(state)
    assert contents(read_checkpoint(folder, verify=False)) == contents(state)
    assert sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()) == [
        "manifest.json",
        "pretrained_model/config.json",
        "pretrained_model/model.safetensors",
        "training_state/callbacks.json",
        "training_state/callbacks.safetensors",
        "training_state/optimizer_param_groups.json",
        "training_state/optimizer_state.safetensors",
        "training_state/rng_state.safetensors",
        "training_state/scaler_state.json",
        "training_state/scheduler_state.json",
        "training_state/training_step.json",
    ]


def test_files_are_what_lerobot_and_other_tools_read(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    folder = write_checkpoint(tmp_path / "000500", make_state())
    training = folder / "training_state"
    assert json.loads((training / "training_step.json").read_text())["step"] == 1000
    assert sorted(load_file(training / "optimizer_state.safetensors")) == ["state/0/exp_avg", "state/0/step"]
    assert json.loads((training / "optimizer_param_groups.json").read_text())[0]["betas"] == [0.9, 0.999]
    assert json.loads((training / "scheduler_state.json").read_text())["last_epoch"] == 500
    assert sorted(load_file(folder / "pretrained_model/model.safetensors")) == ["count", "weight"]
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["format_version"] == 1
    listed = manifest["files"]["training_state/scaler_state.json"]["size"]
    assert listed == (training / "scaler_state.json").stat().st_size


def test_weights_are_as_readable_for_others_as_the_other_files(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "000500", make_state())
    modes = {path.stat().st_mode for path in folder.rglob("*") if path.is_file()}
    (tmp_path / "plain").touch()
    assert modes == {(tmp_path / "plain").stat().st_mode}


def test_tied_overlapping_and_strided_weights_come_back(tmp_path: Path) -> None:
    whole = torch.arange(24.0).reshape(4, 6)
    model = {
        "embedding": whole,
        "head": whole,
        "flat": whole.view(-1),
        "transposed": whole.t(),
        "row": whole[1],
        "column": whole[:, 2].clone(),
        "spread": torch.ones(1).expand(5),
        "empty": torch.zeros(0, 3),
        "images": torch.randn(8, 1, 3, 3).to(memory_format=torch.channels_last),
        "half": torch.randn(3).bfloat16(),
        "float8": torch.ones(3).to(torch.float8_e4m3fn),
        "complex": torch.tensor([1 + 2j, 3 - 4j]).conj(),
    }
    read = round_trip(tmp_path, make_state(model=model)).model
    assert read.keys() == model.keys()
    for name in model:
        assert torch.equal(read[name].to(torch.complex64), model[name].to(torch.complex64)), name
        assert read[name].dtype == model[name].dtype, name
    assert read["head"] is read["embedding"]
    assert read["transposed"].stride() == (1, 6)
    assert read["images"].stride() == model["images"].stride()
    aliases = json.loads((tmp_path / "000500" / "manifest.json").read_text())["layouts"]
    assert aliases["pretrained_model/model.safetensors"]["aliases"] == {"head": "embedding"}


def test_read_tensors_do_not_depend_on_the_files(tmp_path: Path) -> None:
    read = round_trip(tmp_path, make_state())
    with (tmp_path / "000500" / "pretrained_model" / "model.safetensors").open("r+b") as file:
        file.write(bytes(os.fstat(file.fileno()).st_size))
    assert torch.equal(read.model["weight"], make_state().model["weight"])


def test_tensors_are_read_into_host_memory_wherever_new_ones_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, asked = write_checkpoint(tmp_path / "000500", make_state()), list[str]()

    def watched(path: Path, **options: Any) -> Any:
        asked.append(options.get("device", "cpu"))
        return safe_open(path, **options)

    monkeypatch.setattr(checkpoint_files, "safe_open", watched)
    with torch.device("meta"):
        state = read_checkpoint(folder)
    assert set(asked) == {"cpu"}  # a bare "cuda" would be the first GPU for every rank
    assert {value.device.type for value in (*state.model.values(), *state.optimizers[0]["state"][0].values())} == {
        "cpu"
    }


@pytest.mark.parametrize("fused", [True, False])
def test_resumed_adamw_moves_channels_last_weights_as_if_never_interrupted(tmp_path: Path, fused: bool) -> None:
    def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for i in steps:
            images = torch.randn(2, 8, 9, 9, generator=torch.Generator().manual_seed(i))
            model(images.to(memory_format=torch.channels_last)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Conv2d(8, 16, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return model, torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2), fused=fused)

    model, optimizer = make()
    train(model, optimizer, range(3))
    saved = make_state(model=model.state_dict(), optimizers=[optimizer.state_dict()])
    read = round_trip(tmp_path, saved)
    train(model, optimizer, range(3, 6))
    resumed, resumed_optimizer = make()
    resumed.load_state_dict(read.model)
    resumed_optimizer.load_state_dict(read.optimizers[0])
    train(resumed, resumed_optimizer, range(3, 6))
    assert plain(resumed.state_dict()) == plain(model.state_dict())
    assert plain(resumed_optimizer.state_dict()) == plain(optimizer.state_dict())


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
        lambda p: torch.optim.SGD(p, lr=torch.tensor(0.1), momentum=0.9),
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3, history_size=2),
        lambda p: torch.optim.Rprop(p, lr=0.1),
    ],
)
@pytest.mark.parametrize("steps", [0, 2])
def test_optimizer_state_comes_back_whatever_it_holds(tmp_path: Path, make: Any, steps: int) -> None:
    parameters = [nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(()))]
    optimizer = make(parameters)

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = torch.stack([((p - 3) ** 2).sum() for p in parameters]).sum()
        value.backward()  # type: ignore[no-untyped-call]
        return value

    for _ in range(steps):
        optimizer.step(loss)
    saved = optimizer.state_dict()
    read = round_trip(tmp_path, make_state(optimizers=[saved])).optimizers[0]
    assert plain(read) == plain(saved)


def test_several_optimizers_and_schedules_keep_their_order(tmp_path: Path) -> None:
    optimizers = [make_state(i).optimizers[0] for i in range(1, 12)]
    schedules = [{"last_epoch": i} for i in range(3)]
    state = make_state(optimizers=optimizers, schedules=schedules)
    assert contents(round_trip(tmp_path, state)) == contents(state)
    assert (tmp_path / "000500/training_state/optimizer_state_1.safetensors").exists()
    for none in (make_state(optimizers=[], schedules=[], scaler=None), make_state(schedules=[])):
        assert contents(round_trip(tmp_path, none)) == contents(none)
    assert not (tmp_path / "000500/training_state/optimizer_state_1.safetensors").exists()


def test_every_schedule_of_torch_goes_on_with_the_same_learning_rates(tmp_path: Path) -> None:
    makers: list[Any] = [
        lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [3, 6, 6]),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=20),
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
        lambda o: torch.optim.lr_scheduler.SequentialLR(
            o, [torch.optim.lr_scheduler.LinearLR(o), torch.optim.lr_scheduler.CosineAnnealingLR(o, 9)], [4]
        ),
    ]
    for make in makers:
        for lr in (0.1, torch.tensor(0.1)):
            optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=lr, momentum=0.9)
            schedule = make(optimizer)
            other = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=lr, momentum=0.9)
            resumed = make(other)
            for _ in range(4):
                optimizer.step()
                schedule.step()
            saved = make_state(optimizers=[optimizer.state_dict()], schedules=[schedule.state_dict()])
            read = round_trip(tmp_path, saved)
            assert plain(read.schedules) == plain(saved.schedules)
            other.load_state_dict(read.optimizers[0])
            resumed.load_state_dict(read.schedules[0])
            for _ in range(6):
                for o, s in ((optimizer, schedule), (other, resumed)):
                    o.step()
                    s.step()
                assert float(other.param_groups[0]["lr"]) == float(optimizer.param_groups[0]["lr"])


def test_callback_states_keep_every_value_json_has_no_word_for(tmp_path: Path) -> None:
    callbacks = {
        "EarlyStopping": {"best": float("inf"), "worst": float("-inf"), "last": float("nan"), "zero": -0.0},
        "Odd": {
            "by_step": {5: 0.1, 10: None, "5": "text"},
            "$tensor": "a name",
            "nested": {"$x": [True, 1, 1.0]},
        },
        "Seen": {"a/b": torch.ones(1), "a": {"b": torch.zeros(2)}, "counts": Counter({3: 2}), "list": []},
        "big": 2**80,
        "": {"tiny": 5e-324, "text": "\ud800 ü \n"},
    }
    state = make_state(callbacks=callbacks)
    assert contents(round_trip(tmp_path, state)) == contents(state)
    read = round_trip(tmp_path, make_state(callbacks={"n": np.float32(0.1), "i": np.int64(3), "t": (1, 2)}))
    assert read.callbacks == {"n": float(np.float32(0.1)), "i": 3, "t": [1, 2]}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"callbacks": {"Mine": {"path": Path("x")}}}, "Mine/path is a pathlib"),
        ({"callbacks": {"Mine": {(1, 2): 3}}}, r"Mine has the key \(1, 2\)"),
        ({"callbacks": {"Mine": torch.ones(2).to_sparse()}}, "sparse"),
        ({"callbacks": {"Mine": torch.ones(2, dtype=torch.complex128)}}, "callbacks.safetensors.*complex128"),
        (
            {"scaler": {"scale": torch.ones(1)}},
            "scaler_state.json keeps JSON values only, but scale is a tensor",
        ),
        ({"manifest": {"step": 3}}, "counters"),
        ({"model": {"_extra_state": {"scale": 1}}}, "state_dict has _extra_state, a dict"),
    ],
)
def test_writing_refuses_what_would_not_come_back_and_leaves_nothing(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(CheckpointError, match=named):
        write_checkpoint(tmp_path / "000500", make_state(**changes))
    assert list(tmp_path.iterdir()) == []


# Failures while writing


def run_python(script: str, *arguments: str) -> str:
    """A fresh interpreter that knows this module as ``here``."""
    prelude = (
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('here', {str(Path(__file__))!r})\n"
        "here = importlib.util.module_from_spec(spec)\n"
        "sys.modules['here'] = here\n"
        "spec.loader.exec_module(here)\n"
    )
    command = [sys.executable, "-W", "ignore", "-c", prelude + script, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


# Forks a child for every operation on the file system that the save makes, and kills it just before that one.
KILL_EVERYWHERE = """
import os, shutil, signal
from pathlib import Path
os.fsync = lambda descriptor: None  # no difference to a kill
template, step = Path(sys.argv[1]), int(sys.argv[2])

def kill_at(number):
    left = number
    def hook(event, arguments):
        nonlocal left
        if event in ("open", "os.rename", "os.symlink", "os.remove", "os.rmdir", "os.mkdir", "os.chmod"):
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)

for number in range(1000):
    run = template.parent / f"killed_{number:03d}"
    shutil.copytree(template, run, symlinks=True)
    child = os.fork()
    if child == 0:
        state = here.make_state(step, callbacks={"new": {"tensor": here.torch.ones(3)}})
        kill_at(number)
        folder = here.write_checkpoint(run / "checkpoints" / f"{step:06d}", state)
        here.point_last_at(folder)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    if status == 0:
        break
    assert os.WTERMSIG(status) == signal.SIGKILL, status
"""


@pytest.mark.parametrize("step", [1000, 500], ids=["new", "replaced"])
def test_killed_at_any_moment_a_save_leaves_a_whole_checkpoint_to_go_on_from(tmp_path: Path, step: int) -> None:
    template = tmp_path / "run"
    before = make_state(500)
    point_last_at(write_checkpoint(template / "checkpoints" / "000500", before))
    run_python(KILL_EVERYWHERE, str(template), str(step))
    after = make_state(step, callbacks={"new": {"tensor": torch.ones(3)}})
    runs = sorted(tmp_path.glob("killed_*"))
    assert len(runs) > 30
    assert any(not (run / "checkpoints" / "000500").exists() for run in runs) == (step == 500)
    seen = []
    for run in runs:
        found = contents(read_checkpoint(newest_checkpoint(run, unexpected if step == 500 else lambda _: None)))
        assert found in (contents(before), contents(after))
        seen.append(found == contents(after))
        if step == 1000:
            assert contents(read_checkpoint(run / "checkpoints" / "last")) in (
                contents(before),
                contents(after),
            )
        point_last_at(write_checkpoint(run / "checkpoints" / "001500", make_state(1500)))
        names = sorted(path.name for path in (run / "checkpoints").glob("[!.]*"))
        assert names in (["000500", "001500", "last"], ["000500", "001000", "001500", "last"])
        assert not list((run / "checkpoints").glob(".*"))
    assert seen == sorted(seen)
    assert seen[0] is False
    assert seen[-1] is True


def test_disk_full_at_the_third_file_leaves_everything_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    point_last_at(write_checkpoint(tmp_path / "000500", make_state(500)))
    real, calls = os.fsync, []

    def full(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(CheckpointError, match=r"optimizer_state\.safetensors could not be written: .*No space"):
            write_checkpoint(tmp_path / "001000", make_state(1000))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000500", "last"]
    assert contents(read_checkpoint(tmp_path / "last")) == contents(make_state(500))


def test_file_size_limit_of_the_system_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    pytest.importorskip("resource", reason="needs a system with resource limits")
    script = """
import resource
from pathlib import Path
resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, 2**16))
try:
    here.write_checkpoint(Path(sys.argv[1]) / "000500", here.make_state(model={"w": here.torch.ones(2**16)}))
except here.CheckpointError as error:
    print(error)
"""
    assert "pretrained_model/model.safetensors could not be written" in run_python(script, str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_every_file_and_folder_is_synced_before_the_checkpoint_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[int | str] = []
    rename = Path.rename
    monkeypatch.setattr(os, "fsync", lambda descriptor: events.append(os.fstat(descriptor).st_ino))

    def note(self: Path, target: Path) -> Path:
        events.append("rename")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", note)
    folder = write_checkpoint(tmp_path / "000500", make_state())
    parts = {path.stat().st_ino for path in [folder, *folder.rglob("*")]}
    assert set(events[: events.index("rename")]) == parts
    assert events[events.index("rename") + 1 :] == [tmp_path.stat().st_ino]


def test_failed_replacement_puts_the_old_checkpoint_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_checkpoint(tmp_path / "000500", make_state(500))
    real = Path.rename

    def refuse(self: Path, target: Path) -> Path:
        if "writing" in self.name:
            raise OSError(errno.EACCES, "Permission denied")
        return real(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", refuse)
        with pytest.raises(CheckpointError, match="Permission denied"):
            write_checkpoint(folder, make_state(500, scaler=None))
    assert [path.name for path in tmp_path.iterdir()] == ["000500"]
    assert contents(read_checkpoint(folder)) == contents(make_state(500))


def test_existing_checkpoint_of_the_step_is_replaced(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "000500", make_state(500))
    write_checkpoint(tmp_path / "000500", make_state(500, scaler=None))
    assert [path.name for path in tmp_path.iterdir()] == ["000500"]
    assert read_checkpoint(tmp_path / "000500").scaler is None


def test_damaged_folder_at_the_place_of_a_step_is_moved_out_of_the_way(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "checkpoints" / "000500", make_state(500))
    (folder / "manifest.json").unlink()
    write_checkpoint(folder, make_state(500))
    assert contents(read_checkpoint(folder)) == contents(make_state(500))
    (aside,) = folder.parent.glob("000500.damaged-*")
    assert (aside / "pretrained_model" / "model.safetensors").exists()
    assert whole_checkpoints(folder.parent) == [folder]


def test_a_folder_of_the_users_own_is_left_alone_although_its_name_is_a_number(tmp_path: Path) -> None:
    mine = tmp_path / "exports" / "2024"
    mine.mkdir(parents=True)
    (mine / "thesis.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="could not be written"):
        write_checkpoint(mine, make_state(500))
    assert [path.name for path in mine.parent.iterdir()] == ["2024"]
    assert (mine / "thesis.txt").read_text() == "mine"


@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_saving_never_replaces_what_is_no_checkpoint(tmp_path: Path, kind: str) -> None:
    mine, target = tmp_path / "mine", tmp_path / "target"
    if kind == "folder":
        target.mkdir()
        (target / "thesis.tex").write_text("years of work")
    elif kind == "file":
        target.write_text("years of work")
    else:
        mine.mkdir()
        target.symlink_to("mine")
    with pytest.raises(CheckpointError, match="could not be written"):
        write_checkpoint(target, make_state())
    assert (target / "thesis.tex").exists() if kind == "folder" else target.is_symlink() == (kind == "link")
    with pytest.raises(CheckpointError, match="no checkpoint of policyfit"):
        delete_checkpoint(target)


def test_sweeping_leaves_the_temporaries_of_others_alone(tmp_path: Path) -> None:
    for name in (".other.writing-0123abcd", ".git", ".mine.writing-0123abcd", ".000500.deleting-0123abcd"):
        (tmp_path / name).mkdir()
    write_checkpoint(tmp_path / "mine", make_state())
    assert {path.name for path in tmp_path.iterdir()} == {
        ".other.writing-0123abcd",
        ".git",
        ".000500.deleting-0123abcd",
        "mine",
    }


# Damage


@pytest.mark.parametrize(
    ("old", "new"), [('"seed": 7', '"seed": 3'), ('"step": 500', '"step": 508'), ('"fp16"', '"bf16"')]
)
def test_changed_manifest_is_never_believed(tmp_path: Path, old: str, new: str) -> None:
    manifest = write_checkpoint(tmp_path / "000500", make_state()) / "manifest.json"
    text = manifest.read_text()
    assert old in text
    manifest.write_text(text.replace(old, new))
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged: its contents are not those"):
        read_checkpoint(manifest.parent, verify=False)
    assert whole_checkpoints(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("training_state/scaler_state.json", "[1, 2]"),
        ("training_state/scaler_state.json", '{"scale": NaN}'),
        ("training_state/scaler_state.json", '{"scale": {"$float": "1e3"}}'),
        ("training_state/scaler_state.json", '{"scale": {"$import": "os.system"}}'),
        ("training_state/scaler_state.json", '{"scale": {"$tensor": "x"}}'),
        ("training_state/scaler_state.json", '{"scale": {"$items": 3}}'),
        ("training_state/scaler_state.json", "[" * 100_000),
        ("training_state/scheduler_state.json", "[1]"),
        ("training_state/scheduler_state.json", "3"),
        ("training_state/training_step.json", "3"),
        ("training_state/callbacks.json", "{}"),
        ("training_state/callbacks.json", "null"),
        ("training_state/optimizer_param_groups.json", "{}"),
        ("training_state/optimizer_param_groups.json", "[3]"),
        ("training_state/optimizer_param_groups.json", "null"),
        ("pretrained_model/config.json", "[]"),
        ("pretrained_model/model.safetensors", "no tensors"),
    ],
)
def test_well_sealed_nonsense_is_an_error_that_names_the_part(tmp_path: Path, name: str, text: str) -> None:
    folder = write_checkpoint(tmp_path / "000500", make_state())
    replace_file(folder, name, text)
    with pytest.raises(CheckpointError, match=f"{name}.* is damaged: |is damaged: .*{name}"):
        read_checkpoint(folder)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda m: m.update(format_version=2), "format 2, written by a newer policyfit.*format 1"),
        (lambda m: m.update(format_version="1"), "no format_version"),
        (lambda m: m.update(format_version=0), "manifest.json is damaged"),
        (lambda m: m.update(files=[]), "manifest.json is damaged"),
        (lambda m: m.update(files={"$items": [[5, {}]]}), "manifest.json is damaged"),
        (
            lambda m: m["files"].update({"../../secret.json": {"size": 1, "sha256": ""}}),
            "manifest.json is damaged",
        ),
        (lambda m: m["files"].update({"/etc/passwd": {"size": 1, "sha256": ""}}), "manifest.json is damaged"),
        (
            lambda m: m["files"].pop("training_state/rng_state.safetensors"),
            r"rng_state\.safetensors is damaged",
        ),
        (lambda m: m["files"].pop("training_state/scaler_state.json"), r"scaler_state\.json is damaged"),
        (lambda m: m.update(counters={"step": "5"}), "counters"),
        (lambda m: m["counters"].update(step=-1), "counters"),
        (lambda m: m.pop("precision"), "facts of the run"),
        (lambda m: m.update(device=3), "facts of the run"),
        (lambda m: m.update(settings=[]), "facts of the run"),
        (
            lambda m: m["layouts"].update({"pretrained_model/model.safetensors": {"strides": {"weight": [0, 1]}}}),
            "fit",
        ),
        (
            lambda m: m["layouts"].update({"pretrained_model/model.safetensors": {"aliases": {"a": "b"}}}),
            "layout",
        ),
        (lambda m: m["layouts"].update({"pretrained_model/model.safetensors": {"aliases": [3]}}), "layout"),
        (
            lambda m: m["layouts"].update({"pretrained_model/model.safetensors": {"strides": {"weight": ["a", "b"]}}}),
            "fit",
        ),
    ],
)
def test_well_sealed_manifest_that_asks_for_other_things_is_refused(tmp_path: Path, change: Any, named: str) -> None:
    (tmp_path / "secret.json").write_text("s")
    folder = write_checkpoint(tmp_path / "run" / "000500", make_state())
    edit_manifest(folder, change)
    with pytest.raises(CheckpointError, match=f"(?s){named}"):
        read_checkpoint(folder)


def test_part_that_nobody_would_restore_is_an_error(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "000500", make_state())
    (folder / "training_state" / ".nfs0001").touch()
    (folder / "notes.txt").touch()
    read_checkpoint(folder)
    (folder / "training_state" / "ema_state.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"ema_state\.json is damaged: the manifest does not list it"):
        read_checkpoint(folder)
    replace_file(folder, "training_state/ema_state.json", "{}")
    with pytest.raises(CheckpointError, match=r"ema_state\.json is damaged: this policyfit does not know"):
        read_checkpoint(folder)


def test_reading_and_writing_never_touch_pickle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def poisoned(*_: Any, **__: Any) -> Any:
        raise AssertionError("pickle was used")

    for module, name in [(pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (pickle, "dump")]:
        monkeypatch.setattr(module, name, poisoned)
    monkeypatch.setattr(torch, "load", poisoned)
    monkeypatch.setattr(torch, "save", poisoned)
    state = make_state(policy_config={"type": "os.system", "class_path": "subprocess.Popen", "args": ["true"]})
    assert contents(round_trip(tmp_path, state)) == contents(state)


# Which checkpoint


def test_order_is_by_step_whatever_the_padding(tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    names = {"10000": 10000, "000900": 900, "0009900": 9900, "1000": 1000}
    for name, step in names.items():
        write_checkpoint(checkpoints / name, make_state(step))
    for foreign in ("best", ".000100.writing-0123abcd", "000200", "tensorboard"):
        (checkpoints / foreign).mkdir()
    shutil.copytree(checkpoints / "10000", checkpoints / "copy of 10000")
    (checkpoints / "99999").touch()
    assert [path.name for path in whole_checkpoints(checkpoints)] == ["000900", "1000", "0009900", "10000"]
    assert newest_checkpoint(tmp_path, unexpected).name == "10000"
    assert newest_checkpoint(checkpoints, unexpected).name == "10000"
    assert whole_checkpoints(tmp_path / "nothing here") == []


def test_damaged_newest_is_reported_and_the_newest_whole_one_used(tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    for step in (500, 1000, 1500, 2000):
        point_last_at(write_checkpoint(checkpoints / f"{step:06d}", make_state(step)))
    with (checkpoints / "002000/pretrained_model/model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x55")
    (checkpoints / "001500/manifest.json").unlink()
    for path in (tmp_path, checkpoints, checkpoints / "last"):
        warnings: list[str] = []
        assert newest_checkpoint(path, warnings.append) == checkpoints / "001000"
        assert len(warnings) == 2
        assert "002000: pretrained_model/model.safetensors is damaged" in warnings[0]
        assert "001500 is not a whole checkpoint" in warnings[1]
        assert all(text.endswith(" The newest whole checkpoint is used instead.") for text in warnings)
    assert [path.name for path in whole_checkpoints(checkpoints)] == ["000500", "001000", "002000"]
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
        newest_checkpoint(checkpoints / "002000", unexpected)
    with pytest.raises(CheckpointError, match="001500 is not a whole checkpoint"):
        newest_checkpoint(checkpoints / "001500", unexpected)


def test_only_checkpoint_that_is_damaged_is_no_reason_to_speak_of_another(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "checkpoints" / "000500", make_state(500))
    (folder / "pretrained_model/model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"There is no whole checkpoint in .*\n.*model\.safetensors is damaged"):
        newest_checkpoint(tmp_path, unexpected)


def test_last_means_what_it_leads_to_and_the_run_its_newest(tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    for step in (500, 1000):
        write_checkpoint(checkpoints / f"{step:06d}", make_state(step))
    point_last_at(checkpoints / "000500")
    assert newest_checkpoint(checkpoints / "last", unexpected) == checkpoints / "000500"
    warnings: list[str] = []
    assert newest_checkpoint(tmp_path, warnings.append) == checkpoints / "001000"
    assert "'last' leads to 000500" in warnings[0]


def test_run_folder_whose_name_is_a_number_is_still_a_run(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "20260101" / "checkpoints" / "000500", make_state(500))
    assert newest_checkpoint(tmp_path / "20260101", unexpected) == folder


def test_moved_run_is_found_through_last(tmp_path: Path) -> None:
    point_last_at(write_checkpoint(tmp_path / "run" / "checkpoints" / "000500", make_state()))
    (tmp_path / "run").rename(tmp_path / "archive")
    last = tmp_path / "archive" / "checkpoints" / "last"
    assert last.readlink() == Path("000500")
    assert contents(read_checkpoint(last)) == contents(make_state())
    assert newest_checkpoint(last, unexpected) == last.parent / "000500"


def test_last_of_a_run_copied_without_links_is_a_link_again_after_the_next_save(tmp_path: Path) -> None:
    point_last_at(write_checkpoint(tmp_path / "a" / "000500", make_state(500)))
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert not (tmp_path / "b" / "last").is_symlink()
    assert newest_checkpoint(tmp_path / "b" / "last", unexpected) == tmp_path / "b" / "last"
    point_last_at(write_checkpoint(tmp_path / "b" / "001000", make_state(1000)))
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == ["000500", "001000", "last"]
    assert (tmp_path / "b" / "last").readlink() == Path("001000")


@pytest.mark.parametrize("where", ["", "nothing", "file", "checkpoints/last"])
def test_no_checkpoint_at_all_is_an_error_that_names_the_place(tmp_path: Path, where: str) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "last").symlink_to("000500")
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"There is no .*checkpoint"):
        newest_checkpoint(tmp_path / where, lambda _: None)


def test_delete_is_aside_first_so_that_half_of_a_checkpoint_never_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (500, 1000):
        write_checkpoint(tmp_path / f"{step:06d}", make_state(step))

    def busy(path: Path, **_: Any) -> None:
        (path / "manifest.json").unlink()
        raise OSError(errno.EBUSY, "Device or resource busy")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", busy)
        with pytest.raises(CheckpointError, match=r"000500 could not be deleted: .*busy"):
            delete_checkpoint(tmp_path / "000500")
    assert not (tmp_path / "000500").exists()
    assert [path.name for path in whole_checkpoints(tmp_path)] == ["001000"]
    write_checkpoint(tmp_path / "001500", make_state(1500))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["001000", "001500"]
