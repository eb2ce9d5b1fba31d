"""Copies of a run under an fsspec URL: kept like the local ones, whole or not there, and gone on with."""

from __future__ import annotations

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
from policyfit import Checkpoint, CheckpointError, ConfigError, Trainer
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


def fit(run_dir: Path, url: str | None, steps: int, resume: str | None = None, **settings: Any) -> Trainer:
    checkpoint = Checkpoint(every_steps=2, **{"keep": 2, "remote": url, **settings})
    trainer = Trainer("cpu", max_steps=steps, batch_size=4, seed=3, run_dir=run_dir, callbacks=[checkpoint])
    torch.manual_seed(0)
    trainer.fit(acting.Acting(), Samples(), optimizer=lambda p: AdamW(p, lr=1e-2), resume=resume)
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
    with pytest.raises(ConfigError, match=f"{url} already holds the checkpoints of a run"):
        fit(tmp_path / "other", url, 3)
    assert RemoteRun(url).names() == ["000004", "000005"]


def test_damaged_copy_is_passed_over_and_told(tmp_path: Path, url: str) -> None:
    fit(tmp_path / "run", url, 5)
    fs, root = fsspec.core.url_to_fs(url)
    file = f"{root}/checkpoints/000005/pretrained_model/model.safetensors"
    held = bytearray(fs.cat_file(file))
    held[-1] ^= 1
    fs.pipe_file(file, bytes(held))
    trainer = fit(tmp_path / "second", None, 6, resume=url)
    assert trainer.resumed_step == 4
    assert f"{url}/checkpoints/000005: pretrained_model/model.safetensors is damaged" in trainer.plan.notes[0]


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


def test_upload_is_tried_again(tmp_path: Path, flaky: str) -> None:
    Flaky.refusals = 2
    fit(tmp_path / "run", flaky, 2)
    assert RemoteRun(flaky).names() == ["000002"]


def test_upload_that_fails_in_the_background_is_told_and_the_next_save_is_copied(tmp_path: Path, flaky: str) -> None:
    Flaky.refusals = 3
    trainer = fit(tmp_path / "run", flaky, 7)
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
