"""What the checkpoints of a run are, for people: step, time, size, metrics, and whether each is whole."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

from ..strategies.errors import CheckpointError
from .checkpoint_folders import EXCEPTION, MANIFEST
from .manifest import check_files, damaged, read_manifest
from .newest import step_folders
from .packing import loads, unpack


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointEntry:
    """One checkpoint; ``damage`` is what is wrong with it, "" when every byte is as it was written."""

    name: str
    is_last: bool
    damage: str = ""
    written_at: float = 0.0  # seconds since the epoch
    size_bytes: int = 0
    metrics: dict[str, float] = field(default_factory=dict)

    def line(self) -> str:
        """The entry as one line."""
        last = "  <- last" if self.is_last else ""
        if self.damage:
            return f"{self.name}  damaged: {self.damage}{last}"
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.written_at))
        metrics = "".join(f"  {name} {value:.4g}" for name, value in sorted(self.metrics.items()))
        return f"{self.name}  {when}  {self.size_bytes / 1e6:.1f} MB{metrics}{last}"


def list_checkpoints(run_dir: Path) -> list[CheckpointEntry]:
    """The checkpoints of a run by name, and what errors left, every file compared with its checksum."""
    checkpoints = run_dir / "checkpoints"
    last = (checkpoints / "last").resolve().name
    folders = [*step_folders(checkpoints), *checkpoints.glob(f"*{EXCEPTION}")]
    return [_entry(folder, folder.name == last) for folder in sorted(folders)]


def _entry(folder: Path, is_last: bool) -> CheckpointEntry:
    try:
        manifest = read_manifest(folder)
        check_files(folder, manifest, contents=True)
        metrics = _metrics(folder)
    except CheckpointError as error:
        return CheckpointEntry(name=folder.name, is_last=is_last, damage=str(error).splitlines()[0])
    return CheckpointEntry(
        name=folder.name,
        is_last=is_last,
        written_at=(folder / MANIFEST).stat().st_mtime,
        size_bytes=sum(file["size"] for file in manifest["files"].values()),
        metrics={name: value for name, value in metrics.items() if name.startswith(("train/", "val/"))},
    )


def _metrics(folder: Path) -> dict[str, float]:
    file = "training_state/callbacks.json"
    try:
        found = unpack(loads((folder / file).read_bytes()).get("metrics", {}), {})
        return {name: float(value) for name, value in found.items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise damaged(folder, file, str(error)) from error
