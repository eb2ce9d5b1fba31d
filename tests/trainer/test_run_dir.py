"""The folder of a run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from policyfit import ConfigError
from policyfit.trainer.run_dir import check_free, has_checkpoint, make, new_name, newest_run


def test_a_new_folder_never_is_one_that_is_there() -> None:
    wanted = new_name("Policy")
    assert wanted.parent == Path("runs")
    assert not Path("runs").exists()
    made = [make(wanted, new=True) for _ in range(3)]  # as three processes begun in one second would
    assert [folder.name for folder in made] == [wanted.name, f"{wanted.name}-1", f"{wanted.name}-2"]
    assert all(folder.is_dir() for folder in made)


def test_a_given_folder_may_be_there() -> None:
    assert make(Path("mine"), new=False) == make(Path("mine"), new=False) == Path("mine")


@pytest.mark.parametrize("new", [True, False])
def test_what_the_file_system_refuses_is_told_with_its_reason(new: bool) -> None:
    Path("file").write_text("")
    with pytest.raises(ConfigError, match=r"run_dir file.below cannot be made: .*\nChoose another run_dir"):
        make(Path("file/below"), new=new)


def test_what_an_error_left_is_nothing_that_auto_goes_on_from() -> None:
    for name, is_one in (("000003-exception", False), ("last", False), ("000002", True)):
        folder = Path("run") / "checkpoints" / name
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text("{}")
        assert has_checkpoint(Path("run")) is is_one


@pytest.mark.parametrize("mark", ["config.yaml", "plan.json", "metrics.jsonl", "checkpoints"])
def test_a_folder_with_anything_of_a_run_is_not_free(mark: str) -> None:
    Path("here").mkdir()
    (Path("here") / "notes.txt").write_text("mine")
    check_free(Path("here"))
    check_free(Path("not here"))
    (Path("here") / mark).write_text("")
    with pytest.raises(ConfigError, match="already holds a run"):
        check_free(Path("here"))


def test_the_newest_run_is_the_one_written_to_last_and_not_the_one_begun_last() -> None:
    for name, begun, written in (("first", 1000, 5000), ("second", 2000, 3000)):
        folder = Path("runs") / name
        (folder / "checkpoints/000001").mkdir(parents=True)
        (folder / "checkpoints/000001/manifest.json").write_text("")
        (folder / "config.yaml").write_text("")
        (folder / "metrics.jsonl").write_text("")
        os.utime(folder / "config.yaml", (begun, begun))
        os.utime(folder / "metrics.jsonl", (written, written))
        os.utime(folder / "checkpoints", (begun, begun))
        os.utime(folder, (begun, begun))
    arriving = Path("runs/.third.xyz/checkpoints/000001")  # from a URL, or what a kill left of that
    arriving.mkdir(parents=True)
    (arriving / "manifest.json").write_text("")
    (Path("runs") / "without").mkdir()
    (Path("runs") / "without" / "config.yaml").write_text("")
    assert newest_run() == Path("runs/first")


def test_there_must_be_a_run_to_be_the_newest() -> None:
    with pytest.raises(ConfigError, match=r"no run under runs/ has a checkpoint"):
        newest_run()
    Path("runs/empty").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"no run under runs/ has a checkpoint"):
        newest_run()


def test_a_run_without_a_checkpoint_is_not_said_to_be_resumable() -> None:
    folder = Path("early")
    folder.mkdir()
    (folder / "plan.json").write_text("{}")
    with pytest.raises(ConfigError, match="before its first checkpoint, so there is nothing to go on from: delete"):
        check_free(folder)
    (folder / "checkpoints/000003").mkdir(parents=True)
    (folder / "checkpoints/000003/manifest.json").write_text("{}")
    with pytest.raises(ConfigError, match="resume='last'"):
        check_free(folder)
