"""Going on with a run: where that is to be from, as a checkpoint on this machine, and what may be otherwise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory

from ..strategies.distributed import DistributionStrategy
from ..strategies.errors import CheckpointError, ConfigError
from .checkpoint import CheckpointState, read_checkpoint
from .newest import newest_checkpoint
from .remote import RemoteRun, is_url
from .run_dir import check_free, has_checkpoint, make, new_name, newest_run, run_of
from .together import agreed, on_main


@dataclass(frozen=True, slots=True)
class Origin:
    """The checkpoint that a run goes on from; ``str`` says where it is, for people."""

    checkpoint: Path
    saved: CheckpointState
    #: Of the copy that it was brought from.
    url: str | None

    def __str__(self) -> str:
        return f"{self.checkpoint.name} of {self.url}" if self.url else str(self.checkpoint)

    @property
    def run_dir(self) -> Path | None:
        """The folder of its run; ``None`` for one that was saved to a path of its own, or that has come from a URL."""
        return None if self.url else run_of(self.checkpoint)

    @property
    def arrived(self) -> Path | None:
        """The copy of its run that has come from a URL, and that is to become the run's folder."""
        return run_of(self.checkpoint) if self.url else None

    def seed(self, asked: int | None) -> int:
        """The seed that the run goes on with.

        Raises:
            ConfigError: Another one was asked for.
        """
        seed = self.saved.manifest.get("seed")
        if not isinstance(seed, int):
            raise CheckpointError(f"manifest.json is damaged: seed is {seed!r}.")
        if asked is not None and asked != seed:
            raise ConfigError(
                f"The run began with seed={seed} and is to go on with seed={asked}: its samples would come in another "
                f"order.\nLeave seed out, or use seed={seed}."
            )
        return seed


def names_of_changes(given: Sequence[str] | None, resume: str | Path | None) -> list[str]:
    """The changes that were asked for, in a list or in one string with commas.

    Raises:
        ConfigError: Nothing is resumed that could be changed.
    """
    names = given.split(",") if isinstance(given, str) else given or ()
    changes = [stripped for name in names if (stripped := name.strip())]
    if changes and resume is None:
        raise ConfigError(f"changes={changes!r} is for a run that is gone on with.\nLeave it out, or resume.")
    return changes


def find_origin(
    ranks: DistributionStrategy,
    resume: str | Path | None,
    *,
    run_dir: Path | None,
    policy: str,
    verify: bool,
    aside: ExitStack,
    warn: Callable[[str], None],
) -> Origin | None:
    """What to go on from, found by rank 0 for all; ``None`` begins a new run. Refuses a folder that may not be written.

    Args:
        resume: As ``Trainer.fit`` takes it.
        run_dir: The folder that was asked for; ``None`` leaves it to the run.
        policy: The name of the policy's class, for the name of a folder.
        verify: Whether files are compared with their checksums.
        aside: Keeps what is copied from a URL until it is closed.
        warn: Told of checkpoints that are passed over.

    Raises:
        CheckpointError: There is no whole checkpoint.
        ConfigError: "auto" has no folder to look in, or the run's folder holds another run.
    """

    def find() -> Path | None:
        if not isinstance(resume, str | PathLike | None) or (resume == "latest" and not Path(resume).exists()):
            raise ConfigError(
                f"resume must be 'last', 'auto' or the path of a run or a checkpoint, got {resume!r}.\n"
                "Use 'last' for the newest checkpoint, or None for a new run."
            )
        if resume == "auto":
            if run_dir is None:
                raise ConfigError("resume='auto' looks for the run in its folder, so it needs one.\nGive run_dir.")
            if not has_checkpoint(run_dir):
                return None  # what was there before ended before its first checkpoint, and begins anew
        found = None if resume is None else resolve("last" if resume == "auto" else resume)
        if run_dir is not None and (found is None or run_of(found) != run_dir.resolve()):
            check_free(run_dir)
        return found

    def resolve(where: str | Path) -> Path:
        if is_url(where):
            check_free(folder := run_dir or new_name(policy))
            parent = make(folder.absolute().parent, new=False)
            copy = aside.enter_context(TemporaryDirectory(prefix=f".{folder.name}.", dir=parent))
            return RemoteRun(str(where)).download(Path(copy), warn)
        return newest_checkpoint(Path(where) if where != "last" else run_dir or newest_run(), warn, verify=verify)

    # On rank 0, since a folder that it makes would be in the way of the others' checks.
    checkpoint = on_main(ranks, find)
    if checkpoint is None:
        return None
    read: list[CheckpointState] = []
    agreed(ranks, lambda: read.append(read_checkpoint(checkpoint, verify=False, lazy=True)))
    return Origin(checkpoint, read[0], str(resume) if is_url(resume) else None)
