"""Copies of a run under an fsspec URL: kept like the local ones, whole or not there, and gone on with."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec  # type: ignore[import-untyped]
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem  # type: ignore[import-untyped]
from torch.optim import AdamW
from toys import assert_equal

import policyfit
from policyfit import Callback, Checkpoint, CheckpointError, ConfigError, Trainer
from policyfit.trainer import remote
from policyfit.trainer.cli import main
from policyfit.trainer.remote import RemoteRun

sys.path.insert(0, str(Path(__file__).parent))  # config.yaml names the policy's module

import acting


class Flaky(MemoryFileSystem):  # type: ignore[misc]
    """Refuses so many uploads."""

    protocol = "flaky"
    refusals = 0
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]

    def put_file(self, *args: Any, **more: Any) -> Any:
        if Flaky.refusals > 0:
            Flaky.refusals -= 1
            raise ConnectionError("the network is gone")
        return super().put_file(*args, **more)


fsspec.register_implementation("flaky", Flaky, clobber=True)


class Samples:
    stats: ClassVar[dict[str, Any]] = {"x": {"mean": torch.zeros(6), "std": torch.ones(6)}}

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.full((6,), index / 40), "y": torch.full((3,), 1.0)}


@pytest.fixture(params=["memory", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "file":
        yield f"file://{tmp_path}/bucket/run"
    else:
        yield "memory://bucket/run"
        MemoryFileSystem.store.clear()
        MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.fixture
def flaky(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(remote, "_PAUSES", (0.0, 0.0))
    yield "flaky://bucket/run"
    Flaky.refusals = 0
    Flaky.store.clear()
    Flaky.pseudo_dirs[:] = [""]


def fit(
    run_dir: Path | None, url: str | None, steps: int, resume: str | None = None, lr: float = 1e-2, changes: str = "",
    callbacks: Any = (), **settings: Any,
) -> Trainer:  # fmt: skip
    saving = Checkpoint(every_steps=2, **{"keep": 2, "remote": url, **settings})
    trainer = Trainer("cpu", max_steps=steps, batch_size=4, seed=3, run_dir=run_dir, callbacks=[*callbacks, saving])
    torch.manual_seed(0)
    trainer.fit(acting.Acting(), Samples(), optimizer=lambda p: AdamW(p, lr=lr), resume=resume, changes=changes)
    return trainer


@pytest.mark.parametrize("background", [True, False])
def test_copy_has_the_checkpoints_that_are_kept_and_what_lies_beside_them(
    tmp_path: Path, url: str, background: bool
) -> None:
    trainer = fit(tmp_path / "run", url, 9, background=background)
    assert RemoteRun(url).names() == [path.name for path in trainer.checkpoints()] == ["000008", "000009"]
    copy = RemoteRun(url).download(tmp_path / "copy", pytest.fail)
    original = tmp_path / "run" / "checkpoints" / "000009"
    files = sorted(str(path.relative_to(original)) for path in original.rglob("*") if path.is_file())
    assert sorted(str(path.relative_to(copy)) for path in copy.rglob("*") if path.is_file()) == files
    assert all((copy / file).read_bytes() == (original / file).read_bytes() for file in files)
    for name in ("config.yaml", "plan.json"):
        assert (tmp_path / "copy" / name).read_text() == (tmp_path / "run" / name).read_text()


def test_run_gone_on_with_on_another_machine_is_the_same_run(tmp_path: Path, url: str) -> None:
    fit(tmp_path / "straight", None, 9)
    fit(tmp_path / "first", url, 5)
    trainer = fit(tmp_path / "second", url, 9, resume=url)
    assert trainer.resumed_step == 5
    ends = [policyfit.load(tmp_path / name, device="cpu").state_dict() for name in ("straight", "second")]
    assert_equal(*ends)
    assert RemoteRun(url).names() == ["000008", "000009"]  # those of the first machine have made way


def test_policy_is_loaded_from_the_copy(tmp_path: Path, url: str) -> None:
    fit(tmp_path / "run", url, 5, keep=None)
    for step, where in (("000005", url), ("000002", f"{url}/checkpoints/000002")):
        loaded = policyfit.load(where, device="cpu")
        assert_equal(
            loaded.state_dict(), policyfit.load(tmp_path / f"run/checkpoints/{step}", device="cpu").state_dict()
        )


def test_new_run_is_refused_where_a_copy_is_and_changes_nothing(tmp_path: Path, url: str) -> None:
    fit(tmp_path / "run", url, 5)
    with pytest.raises(ConfigError, match=f"{url} already holds the checkpoints of another run"):
        fit(tmp_path / "other", url, 3)
    assert RemoteRun(url).names() == ["000004", "000005"]
    assert not (tmp_path / "other").exists()


def test_run_that_goes_on_is_refused_where_the_copy_of_another_is(tmp_path: Path, url: str) -> None:
    fit(tmp_path / "run", url, 5)
    fit(tmp_path / "other", None, 3)
    with pytest.raises(ConfigError, match=f"{url} already holds the checkpoints of another run"):
        fit(tmp_path / "other", url, 9, resume="last", keep=1)
    assert RemoteRun(url).names() == ["000004", "000005"]


@pytest.mark.parametrize("own_folder", [True, False])
def test_run_that_goes_back_does_not_mix_with_what_is_ahead_of_it(tmp_path: Path, url: str, own_folder: bool) -> None:
    fit(tmp_path / "run", url, 9, keep=None)
    older = str(tmp_path / "run/checkpoints/000002")
    own = "checkpoint 000009 of this run, which goes on from step 2"
    with pytest.raises(ConfigError, match=own if own_folder else "the checkpoints of another run"):
        fit(tmp_path / ("run" if own_folder else "branch"), url, 4, resume=older)
    assert fit(tmp_path / "copy", None, 10, resume=url).resumed_step == 9


def test_run_keeps_its_id_in_its_folder_and_its_copy_and_a_branch_has_a_new_one(tmp_path: Path, url: str) -> None:
    def run_id(name: str) -> str:
        last = (tmp_path / name / "checkpoints/last").resolve()
        return str(json.loads((last / "manifest.json").read_text())["run"])

    fit(tmp_path / "run", url, 5)
    first = run_id("run")
    fit(tmp_path / "run", url, 6, resume="last")
    fit(tmp_path / "copy", url, 7, resume=url)
    fit(tmp_path / "branch", None, 8, resume=str(tmp_path / "run"))
    assert (run_id("run"), run_id("copy"), RemoteRun(url).owner()) == (first, first, first)
    assert run_id("branch") != first


def test_second_of_two_new_runs_at_one_url_copies_and_deletes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_PAUSES", (0.0, 0.0))
    url = f"file://{tmp_path}/bucket"

    class Other(Callback):
        def due(self, step: int) -> bool:
            return step == 1

        def on_due(self, trainer: Trainer, policy: torch.nn.Module) -> None:
            fit(tmp_path / "second", url, 9)

    with pytest.raises(CheckpointError, match="it holds the checkpoints of another run"):
        fit(tmp_path / "first", url, 6, callbacks=[Other()], keep=1)
    assert RemoteRun(url).names() == ["000008", "000009"]
    told = (tmp_path / "first" / "metrics.jsonl").read_text()
    assert "is another run's, so it is not deleted" in told


def test_checkpoint_that_is_there_stays_until_another_is_whole(tmp_path: Path, flaky: str) -> None:
    fit(tmp_path / "run", flaky, 4, keep=1)
    before = RemoteRun(flaky).download(tmp_path / "a", pytest.fail)
    Flaky.refusals = 10**9
    with pytest.raises(CheckpointError, match="was not copied"):  # the step that is there, with another time in it
        fit(tmp_path / "run", flaky, 4, resume="last", keep=1)
    again = RemoteRun(flaky).download(tmp_path / "b", pytest.fail)
    assert (again / "manifest.json").read_bytes() == (before / "manifest.json").read_bytes()
    Flaky.refusals = 0
    trainer = fit(tmp_path / "run", flaky, 4, resume="last", keep=1)
    now = RemoteRun(flaky).download(tmp_path / "c", pytest.fail)
    assert (now / "manifest.json").read_bytes() == (trainer.checkpoints()[-1] / "manifest.json").read_bytes()
    assert not [path for path in Flaky.store if "/.000004" in path]


def test_checkpoint_that_is_there_is_not_sent_again(tmp_path: Path, flaky: str) -> None:
    fit(tmp_path / "run", None, 4)
    run = json.loads((tmp_path / "run/checkpoints/000004/manifest.json").read_text())["run"]
    RemoteRun(flaky, run).upload(tmp_path / "run/checkpoints/000004")
    sent = {path: file.modified for path, file in Flaky.store.items() if "/checkpoints/" in path}
    RemoteRun(flaky, run).upload(tmp_path / "run/checkpoints/000004")
    assert {path: file.modified for path, file in Flaky.store.items() if "/checkpoints/" in path} == sent


def test_what_a_killed_upload_left_is_cleared_away(tmp_path: Path, url: str) -> None:
    fs, root = fsspec.core.url_to_fs(url)
    for left in ("000001", ".000001"):
        fs.makedirs(f"{root}/checkpoints/{left}/pretrained_model")
        fs.pipe_file(f"{root}/checkpoints/{left}/pretrained_model/model.safetensors", b"x")
    fs.pipe_file(f"{root}/checkpoints/notes.txt", b"mine")
    fit(tmp_path / "run", url, 2)
    assert sorted(path.rpartition("/")[2] for path in fs.ls(f"{root}/checkpoints", detail=False)) == [
        "000002",
        "notes.txt",
    ]


def test_folder_with_a_name_of_thousands_of_digits_is_no_checkpoint(tmp_path: Path) -> None:
    fit(tmp_path / "run", "memory://digits", 2)
    fsspec.filesystem("memory").pipe_file(f"/digits/checkpoints/{'9' * 5000}/manifest.json", b"{}")
    assert RemoteRun("memory://digits").names() == ["000002"]
    MemoryFileSystem.store.clear()


def test_manifest_of_no_likely_size_is_not_fetched(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fit(tmp_path / "run", url, 5)
    fs, root = fsspec.core.url_to_fs(url)
    fs.pipe_file(f"{root}/checkpoints/000005/manifest.json", b" " * 100_000)
    monkeypatch.setattr(remote, "LARGEST", 50_000)
    reasons: list[str] = []
    assert RemoteRun(url).download(tmp_path / "copy", reasons.append).name == "000004"
    assert "manifest.json is damaged: it is too large to be one" in reasons[0]


def test_run_may_lie_where_a_checkpoint_could(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/bucket/checkpoints/42"
    fit(tmp_path / "run", url, 5)
    assert fit(tmp_path / "copy", url, 6, resume=url).resumed_step == 5


@pytest.mark.parametrize("named", [True, False])
def test_refused_resume_of_a_copy_writes_nothing_and_can_be_corrected(
    tmp_path: Path, url: str, named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    fit(tmp_path / "run", url, 5)
    run_dir = tmp_path / "new" if named else None
    with pytest.raises(ConfigError, match=f"The run that 000005 of {url} belongs to would become another one"):
        fit(run_dir, url, 8, resume=url, lr=1e-3)
    assert sorted(path.name for path in tmp_path.glob("runs/*")) == []
    assert not (tmp_path / "new").exists()
    trainer = fit(run_dir, url, 8, resume=url, lr=1e-3, changes="lr")
    assert (trainer.resumed_step, trainer.step) == (5, 8)
    assert [path.name for path in trainer.checkpoints()] == ["000006", "000008"]
    left = [path.name for path in (trainer.run_dir.parent).iterdir() if path.name.startswith(".")]
    assert left == []


def test_copy_without_a_checkpoint_leaves_nothing(tmp_path: Path, url: str) -> None:
    fs, root = fsspec.core.url_to_fs(url)
    fs.makedirs(root)
    fs.pipe_file(f"{root}/config.yaml", b"a: 1\n")
    with pytest.raises(CheckpointError, match="no whole checkpoint"):
        fit(tmp_path / "run", None, 5, resume=url)
    fit(tmp_path / "run", None, 2)


@pytest.mark.parametrize("wrong", ["", "a/folder", 123, Path("folder")])
def test_what_is_no_url_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"Checkpoint\.remote must be a URL, got"):
        Checkpoint(remote=wrong)


def test_damaged_copy_is_passed_over_and_told(tmp_path: Path, url: str) -> None:
    fit(tmp_path / "run", url, 5)
    fs, root = fsspec.core.url_to_fs(url)
    file = f"{root}/checkpoints/000005/pretrained_model/model.safetensors"
    held = bytearray(fs.cat_file(file))
    held[-1] ^= 1
    fs.pipe_file(file, bytes(held))
    trainer = fit(tmp_path / "second", None, 6, resume=url)
    assert trainer.resumed_step == 4
    note = trainer.plan.notes[0]
    assert f"{url}/checkpoints/000005: pretrained_model/model.safetensors is damaged" in note
    assert note.endswith(" The newest whole checkpoint is used instead.")
    fs.rm(f"{root}/checkpoints/000004", recursive=True)
    with pytest.raises(CheckpointError, match=r"There is no whole checkpoint at .*\n.*model\.safetensors is damaged"):
        RemoteRun(url).download(tmp_path / "third", pytest.fail)


def test_checkpoint_without_manifest_is_none(tmp_path: Path, url: str) -> None:
    fit(tmp_path / "run", url, 5)
    fs, root = fsspec.core.url_to_fs(url)
    fs.rm_file(f"{root}/checkpoints/000005/manifest.json")  # as an upload that was killed leaves it
    assert RemoteRun(url).names() == ["000004"]


def test_file_that_the_manifest_does_not_list_is_not_fetched(tmp_path: Path, url: str) -> None:
    fit(tmp_path / "run", url, 5)
    fs, root = fsspec.core.url_to_fs(url)
    fs.pipe_file(f"{root}/checkpoints/000005/training_state/evil.pkl", b"x")
    copy = RemoteRun(url).download(tmp_path / "copy", pytest.fail)
    assert not (copy / "training_state" / "evil.pkl").exists()


def test_nothing_there_is_an_error_that_names_the_url(tmp_path: Path, url: str) -> None:
    with pytest.raises(CheckpointError, match=f"There is no whole checkpoint at {url}"):
        fit(tmp_path / "run", None, 5, resume=url)


def test_url_of_no_kind_is_refused_before_the_first_batch(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing://x cannot be reached: Protocol not known: nothing"):
        fit(tmp_path / "run", "nothing://x", 5)
    assert not (tmp_path / "run").exists()


def test_upload_is_tried_again(tmp_path: Path, flaky: str) -> None:
    Flaky.refusals = 2
    fit(tmp_path / "run", flaky, 2)
    assert RemoteRun(flaky).names() == ["000002"]


@pytest.mark.parametrize("background", [True, False])
def test_upload_that_fails_at_an_interval_is_told_and_the_next_save_is_copied(
    tmp_path: Path, flaky: str, background: bool
) -> None:
    Flaky.refusals = 3
    trainer = fit(tmp_path / "run", flaky, 7, background=background)
    assert RemoteRun(flaky).names() == ["000006", "000007"]
    told = (trainer.run_dir / "metrics.jsonl").read_text()
    assert "000002 is whole, but was not copied to flaky://bucket/run: ConnectionError: the network is gone" in told


@pytest.mark.parametrize("steps", [4, 5])  # the last save at an interval, in the background, or at the end
def test_upload_that_fails_at_the_end_is_an_error_and_the_local_checkpoint_whole(
    tmp_path: Path, flaky: str, steps: int
) -> None:
    Flaky.refusals = 10**9
    with pytest.raises(CheckpointError, match="is whole, but was not copied to flaky://bucket/run"):
        fit(tmp_path / "run", flaky, steps)
    assert policyfit.load(tmp_path / "run", device="cpu") is not None
    assert (tmp_path / "run" / "checkpoints" / "last").resolve().name == f"{steps:06d}"


def test_checkpoints_command_lists_and_verifies_a_copy(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(tmp_path / "run", url, 5)
    capsys.readouterr()
    assert main(["checkpoints", url]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["000004", "000005"]


def test_checkpoints_command_tells_of_the_damaged_in_a_copy(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(tmp_path / "run", url, 6, keep=None)
    fs, root = fsspec.core.url_to_fs(url)
    fs.rm_file(f"{root}/checkpoints/000006/training_state/callbacks.json")
    fs.pipe_file(f"{root}/checkpoints/000004/manifest.json", b"{")
    capsys.readouterr()
    assert main(["checkpoints", url]) == 1
    whole, fourth, sixth = capsys.readouterr().out.splitlines()
    assert whole.startswith("000002  ")
    assert fourth.startswith(f"000004  damaged: Checkpoint {url}/checkpoints/000004: manifest.json is damaged")
    sixth_is = "training_state/callbacks.json is damaged: it is missing."
    assert sixth == f"000006  damaged: Checkpoint {url}/checkpoints/000006: {sixth_is}"
