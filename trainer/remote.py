"""A run's copy under an fsspec URL (s3://, gs://, file://, memory:// ...), laid out as the run's folder is.

A checkpoint's manifest goes up last and comes off first: whole is what has one. Read back, every file is compared
with its checksum, and only files that the manifest lists are asked for.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ..strategies.errors import CheckpointError, ConfigError
from .checkpoint_folders import MANIFEST, STEP_NAME, publish, sibling
from .manifest import check_files, read_manifest

_BESIDE = ("config.yaml", "plan.json", "metrics.jsonl")
_PAUSES = (1.0, 5.0)  # seconds before an upload is tried again


def is_url(where: object) -> bool:
    """Whether this is no path of the machine."""
    return "://" in str(where)


class RemoteRun:
    """The copy of a run's folder under ``url``.

    Raises:
        ConfigError: fsspec does not know the protocol, or its package is missing.
    """

    def __init__(self, url: str) -> None:
        from fsspec.core import url_to_fs  # type: ignore[import-untyped]

        self.url = url.rstrip("/")
        try:
            self._fs, root = url_to_fs(self.url)
        except (ImportError, ValueError) as error:
            raise ConfigError(
                f"{url} cannot be reached: {error}.\nInstall the package that it names, or give a URL of another kind."
            ) from error
        self._root: str = root.rstrip("/")

    def names(self) -> list[str]:
        """The whole checkpoints, oldest first."""
        folder = f"{self._root}/checkpoints"
        with self._reaching("listed"):
            self._fs.invalidate_cache()
            found = self._fs.ls(folder, detail=False) if self._fs.isdir(folder) else []
            names = [name for path in found if STEP_NAME.fullmatch(name := path.rstrip("/").rpartition("/")[2])]
            return sorted((n for n in names if self._fs.isfile(f"{folder}/{n}/{MANIFEST}")), key=int)

    def upload(self, checkpoint: Path) -> None:
        """Copy a whole checkpoint and the files beside it; tried three times.

        Raises:
            CheckpointError: It could not be copied; the local one is whole.
        """
        for pause in (*_PAUSES, None):
            try:
                self._upload(checkpoint)
                return
            except Exception as error:  # of whatever library speaks the protocol
                if pause is None:
                    raise CheckpointError(
                        f"{checkpoint} is whole, but was not copied to {self.url}: {type(error).__name__}: {error}."
                    ) from error
                time.sleep(pause)

    def _upload(self, checkpoint: Path) -> None:
        target = f"{self._root}/checkpoints/{checkpoint.name}"
        if self._fs.exists(f"{target}/{MANIFEST}"):
            self._fs.rm_file(f"{target}/{MANIFEST}")
        run_dir = checkpoint.parent.parent
        copied = [(run_dir / name, f"{self._root}/{name}") for name in _BESIDE if (run_dir / name).exists()]
        copied += [(checkpoint / name, f"{target}/{name}") for name in [*read_manifest(checkpoint)["files"], MANIFEST]]
        for folder in dict.fromkeys(path.rpartition("/")[0] for _, path in copied):
            self._fs.makedirs(folder, exist_ok=True)
        for local, path in copied:
            self._fs.put_file(str(local), path)

    def delete(self, name: str) -> None:
        """Delete one checkpoint, its manifest first."""
        target = f"{self._root}/checkpoints/{name}"
        with self._reaching("deleted"):
            self._fs.rm_file(f"{target}/{MANIFEST}")
            self._fs.rm(target, recursive=True)

    def download(self, into: Path, warn: Callable[[str], None], *, every: bool = False) -> Path:
        """Copy the newest whole checkpoint into the run folder ``into``, with the files beside it.

        The URL of one checkpoint means just that one.

        Args:
            warn: Told of every damaged one that is passed over.
            every: Copy all of them, damaged or not.

        Returns:
            The copied checkpoint's folder; with ``every``, ``into``.

        Raises:
            CheckpointError: There is no whole one.
        """
        folder, _, name = self.url.rpartition("/checkpoints/")
        if STEP_NAME.fullmatch(name):
            return RemoteRun(folder)._download([name], into, warn, every)
        run = RemoteRun(self.url.removesuffix("/last").removesuffix("/checkpoints"))
        return run._download(run.names()[::-1], into, warn, every)

    def _download(self, names: list[str], into: Path, warn: Callable[[str], None], every: bool) -> Path:
        into.mkdir(parents=True, exist_ok=True)
        reasons = []
        with self._reaching("read"):
            for name in _BESIDE:
                if self._fs.isfile(f"{self._root}/{name}"):
                    self._fs.get_file(f"{self._root}/{name}", str(into / name))
            for name in names:
                folder = into / "checkpoints" / name
                temporary = sibling(folder, "writing")
                try:
                    self._fetch(name, temporary)
                    if not every:
                        check_files(temporary, read_manifest(temporary), contents=True)
                except CheckpointError as error:
                    shutil.rmtree(temporary, ignore_errors=True)
                    reasons.append(str(error).splitlines()[0].replace(str(temporary), f"{self.url}/checkpoints/{name}"))
                    warn(f"{reasons[-1]} The newest whole checkpoint is used instead.")
                    continue
                publish(temporary, folder)
                if not every:
                    return folder
        if every and names:
            return into
        raise CheckpointError("\n".join([f"There is no whole checkpoint at {self.url}.", *reasons]))

    def _fetch(self, name: str, folder: Path) -> None:
        def get(file: str) -> None:
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            try:
                self._fs.get_file(f"{self._root}/checkpoints/{name}/{file}", str(folder / file))
            except FileNotFoundError as error:
                raise CheckpointError(f"Checkpoint {folder}: {file} is missing.") from error

        get(MANIFEST)
        for file in read_manifest(folder)["files"]:
            get(file)

    @contextmanager
    def _reaching(self, what: str) -> Iterator[None]:
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:  # of whatever library speaks the protocol
            raise CheckpointError(f"{self.url} could not be {what}: {type(error).__name__}: {error}.") from error


@contextmanager
def local(where: str | Path, warn: Callable[[str], None], *, every: bool = False) -> Iterator[Path]:
    """``where`` as a path: itself, or for a URL a copy of its newest checkpoint (or all) for as long as it is used."""
    if not is_url(where):
        yield Path(where)
        return
    with tempfile.TemporaryDirectory() as folder:
        yield RemoteRun(str(where)).download(Path(folder), warn, every=every)
