"""A run's copy under an fsspec URL (s3://, gs://, file://, memory:// ...), laid out as the run's folder is.

A checkpoint's manifest goes up last and comes off first: whole is what has one. It names the run, and a copy belongs to
one run only. Read back, every file is compared with its checksum, and only files that the manifest lists are asked for.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ..strategies.errors import CheckpointError, ConfigError
from .checkpoint_folders import MANIFEST, STEP_NAME, publish, sibling
from .manifest import LARGEST, check_files, damaged, read_manifest

_BESIDE = ("config.yaml", "plan.json", "metrics.jsonl")
_PAUSES = (1.0, 5.0)  # seconds before an upload is tried again


def is_url(where: object) -> bool:
    """Whether this is no path of the machine."""
    return "://" in str(where)


class RemoteRun:
    """The copy of a run's folder under ``url``.

    Args:
        run: The id of the run that writes there; ``None`` only reads.

    Raises:
        ConfigError: fsspec does not know the protocol, or its package is missing.
    """

    def __init__(self, url: str, run: str | None = None) -> None:
        from fsspec.core import url_to_fs  # type: ignore[import-untyped]

        self.url, self._run = url.rstrip("/"), run
        try:
            self._fs, root = url_to_fs(self.url)
        except (ImportError, ValueError) as error:
            raise ConfigError(
                f"{url} cannot be reached: {error}.\nInstall the package that it names, or give a URL of another kind."
            ) from error
        self._root: str = root.rstrip("/")

    def names(self) -> list[str]:
        """The whole checkpoints, oldest first."""
        with self._reaching("listed"):
            return sorted((name for name in self._folders() if STEP_NAME.fullmatch(name) and self._has(name)), key=int)

    def owner(self) -> str | None:
        """The id of the run whose checkpoints are here, as the newest that can be read says; ``None`` without one."""
        names = self.names()
        with self._reaching("read"):
            for name in reversed(names):
                with suppress(CheckpointError), tempfile.TemporaryDirectory() as folder:
                    return str(self._manifest(name, Path(folder)).get("run"))
        return "" if names else None

    def is_own(self) -> bool:
        """Whether the run may write here: nothing is there yet, or what is there is its own."""
        return self.owner() in (None, self._run)

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
        if not self.is_own():
            raise CheckpointError("it holds the checkpoints of another run")
        run_dir, name = checkpoint.parent.parent, checkpoint.name
        files = [*read_manifest(checkpoint)["files"], MANIFEST]
        self._put(run_dir, [file for file in _BESIDE if (run_dir / file).exists()], self._root)
        if not self._has(name):
            self._put(checkpoint, files, self._path(name))
        elif self._fs.cat_file(self._path(name, MANIFEST)) != (checkpoint / MANIFEST).read_bytes():
            # It stays until another is there as a whole, and makes way without anything having to be sent.
            self._put(checkpoint, files, self._path(f".{name}"))
            self._fs.rm_file(self._path(name, MANIFEST))
            for file in files:
                self._fs.cp_file(self._path(f".{name}", file), self._path(name, file))
        for left in self._folders():  # by this, or by a run that was killed
            if STEP_NAME.fullmatch(left.removeprefix(".")) and (left.startswith(".") or not self._has(left)):
                self._fs.rm(self._path(left), recursive=True)

    def _put(self, folder: Path, files: list[str], target: str) -> None:
        for file in files:
            path = f"{target}/{file}"
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            self._fs.put_file(str(folder / file), path)

    def delete(self, name: str) -> None:
        """Delete one checkpoint of the run, its manifest first.

        Raises:
            CheckpointError: It is another run's, or could not be deleted.
        """
        with self._reaching("deleted"), tempfile.TemporaryDirectory() as folder:
            if self._manifest(name, Path(folder)).get("run") != self._run:
                raise CheckpointError(f"{self.url}/checkpoints/{name} is another run's, so it is not deleted.")
            self._fs.rm_file(self._path(name, MANIFEST))
            self._fs.rm(self._path(name), recursive=True)

    def download(self, into: Path, warn: Callable[[str], None], *, every: bool = False) -> Path:
        """Copy the newest whole checkpoint into the run folder ``into``, with the files beside it.

        The URL of one checkpoint means just that one, unless a run is there.

        Args:
            warn: Told of every damaged one that is passed over.
            every: Copy all of them, damaged or not.

        Returns:
            The copied checkpoint's folder; with ``every``, ``into``.

        Raises:
            CheckpointError: There is no whole one.
        """
        if names := self.names():
            return self._download(names[::-1], into, warn, every)
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
                    if not every:
                        shutil.rmtree(temporary, ignore_errors=True)
                        reason = str(error).splitlines()[0]
                        reasons.append(reason.replace(str(temporary), f"{self.url}/checkpoints/{name}"))
                        continue
                publish(temporary, folder)
                if not every:
                    for reason in reasons:
                        warn(f"{reason} The newest whole checkpoint is used instead.")
                    return folder
        if every and names:
            return into
        raise CheckpointError("\n".join([f"There is no whole checkpoint at {self.url}.", *reasons]))

    def _fetch(self, name: str, folder: Path) -> None:
        for file in self._manifest(name, folder)["files"]:
            self._get(name, file, folder)

    def _manifest(self, name: str, folder: Path) -> dict[str, Any]:
        """The manifest of a checkpoint, copied into ``folder``."""
        path = self._path(name, MANIFEST)
        if self._fs.isfile(path) and (self._fs.size(path) or 0) > LARGEST:
            raise damaged(folder, MANIFEST, "it is too large to be one")
        self._get(name, MANIFEST, folder)
        return read_manifest(folder)

    def _get(self, name: str, file: str, folder: Path) -> None:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        try:
            self._fs.get_file(self._path(name, file), str(folder / file))
        except FileNotFoundError as error:
            raise CheckpointError(f"Checkpoint {folder}: {file} is missing.") from error

    def _path(self, *parts: str) -> str:
        return "/".join([self._root, "checkpoints", *parts])

    def _has(self, name: str) -> bool:
        return bool(self._fs.isfile(self._path(name, MANIFEST)))

    def _folders(self) -> list[str]:
        """The names of what lies beside the checkpoints, and of them."""
        self._fs.invalidate_cache()
        found = self._fs.ls(self._path(), detail=False) if self._fs.isdir(self._path()) else []
        return [path.rstrip("/").rpartition("/")[2] for path in found]

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
