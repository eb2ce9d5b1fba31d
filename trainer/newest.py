"""The checkpoints of a run: which are whole, which is the newest, where ``last`` leads, and how one is deleted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from ..strategies.errors import CheckpointError
from .checkpoint_files import sync_folder, writing
from .checkpoint_folders import MANIFEST, SIBLING, STEP_NAME, is_checkpoint, remove
from .manifest import check_files, read_manifest


def whole_checkpoints(checkpoints: Path) -> list[Path]:
    """The complete checkpoints in a folder by the step in their manifests, oldest first.

    Complete means an intact manifest and every file in its size; contents are compared when they are read.
    """
    steps: list[tuple[int, str]] = []
    for folder in step_folders(checkpoints):
        with suppress(CheckpointError):
            manifest = read_manifest(folder)
            check_files(folder, manifest, contents=False)
            steps.append((manifest["counters"]["step"], folder.name))
    return [checkpoints / name for _, name in sorted(steps)]


def newest_checkpoint(run_or_checkpoint: Path, warn: Callable[[str], None], *, verify: bool = True) -> Path:
    """The checkpoint to go on from, with every file of it verified.

    A run folder and its ``checkpoints`` mean the whole one with the highest step, ``last`` the one it leads
    to or, if that is damaged, the newest whole one. A checkpoint's own folder means just that one.

    Args:
        run_or_checkpoint: RUN_DIR, RUN_DIR/checkpoints, RUN_DIR/checkpoints/last, or a checkpoint's folder.
        warn: Told of every damaged checkpoint that is passed over, and of a ``last`` that leads to an older.
        verify: ``False`` compares the sizes of files and not their contents, which takes long for a huge policy.

    Raises:
        CheckpointError: There is no whole checkpoint, or the one asked for is damaged.
    """
    path = run_or_checkpoint
    checkpoints = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    wanted = path.parent / path.readlink() if path.is_symlink() and path.name == "last" else None
    if wanted is not None:
        checkpoints = path.parent
    elif not path.is_dir():
        raise CheckpointError(f"There is no checkpoint at {path}: no such folder.\nGive a run folder or a checkpoint.")
    elif checkpoints == path and ((path / MANIFEST).exists() or STEP_NAME.fullmatch(path.name)):
        _verified_step(path, verify)
        return path
    found = [*([wanted] if wanted else []), *reversed(_by_step(checkpoints))]
    reasons: list[str] = []
    for folder in dict.fromkeys(found):
        try:
            step = _verified_step(folder, verify)
        except CheckpointError as error:
            reasons.append(str(error).splitlines()[0])
        else:
            for reason in reasons:
                warn(f"{reason} The newest whole checkpoint is used instead.")
            if wanted is None:
                _tell_of_older_last(checkpoints, folder, step, warn)
            return folder
    raise CheckpointError("\n".join([f"There is no whole checkpoint in {checkpoints}.", *reasons]))


def point_last_at(checkpoint: Path) -> None:
    """Make ``last``, beside ``checkpoint``, a relative link to it; it leads somewhere at every moment."""
    last = checkpoint.parent / "last"
    link = checkpoint.parent / ".last.new"
    with writing(str(last)):
        if is_checkpoint(last):  # a copy of the run by a tool that follows links
            remove(last)
        link.unlink(missing_ok=True)
        link.symlink_to(checkpoint.name)
        link.replace(last)
        sync_folder(checkpoint.parent)


def delete_checkpoint(checkpoint: Path) -> None:
    """Delete a checkpoint so that it is whole under its name or not there, whenever this is interrupted.

    Raises:
        CheckpointError: It is no checkpoint, or the disk refused; the rest is swept at the next save.
    """
    if not is_checkpoint(checkpoint):
        raise CheckpointError(
            f"{checkpoint} is no checkpoint of policyfit, so it is not deleted.\nGive the folder that has a {MANIFEST}."
        )
    try:
        remove(checkpoint)
    except OSError as error:
        raise CheckpointError(f"{checkpoint} could not be deleted: {error}.") from error


def step_folders(checkpoints: Path) -> Iterator[Path]:
    """The folders that are meant as checkpoints of steps, whole or not; one that was being replaced among them."""
    for path in checkpoints.iterdir() if checkpoints.is_dir() else ():
        left = SIBLING.fullmatch(path.name)
        halfway = left and left["purpose"] == "replaced" and not (checkpoints / left["name"]).exists()
        name = left["name"] if left and halfway else path.name
        if STEP_NAME.fullmatch(name) and path.is_dir() and not path.is_symlink():
            yield path


def _by_step(checkpoints: Path) -> list[Path]:
    def step(folder: Path) -> tuple[int, str]:
        try:
            return read_manifest(folder)["counters"]["step"], folder.name
        except CheckpointError:
            left = SIBLING.fullmatch(folder.name)
            return int(left["name"] if left else folder.name), folder.name

    return sorted(step_folders(checkpoints), key=step)


def _verified_step(folder: Path, verify: bool) -> int:
    manifest = read_manifest(folder)
    check_files(folder, manifest, contents=verify)
    return int(manifest["counters"]["step"])


def _tell_of_older_last(checkpoints: Path, chosen: Path, step: int, warn: Callable[[str], None]) -> None:
    last = checkpoints / "last"
    if last.is_symlink() and (other := checkpoints / last.readlink()) != chosen:
        with suppress(CheckpointError):  # a damaged one that is older is not needed
            if read_manifest(other)["counters"]["step"] < step:
                warn(f"{chosen.name} is used, but 'last' leads to {other.name}. Give {last} for that one.")
