"""Demonstrations of the expert that Meta-World ships: recorded at first use, kept as a LeRobotDataset v3."""

from __future__ import annotations

import shutil
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from pick_place_env import FPS, TRAINING_SEED, VALIDATION_SEED
from torch import Tensor
from torch.utils.data import Dataset

from policyfit import ConfigError, PolicyfitError

if TYPE_CHECKING:
    from lerobot_format import Column, Vectors
    from pick_place_simulator import PickPlaceEnv

WORDS = "Pick up the puck and bring it to the goal."
NAMES = {
    "observation.state": ["x", "y", "z", "gripper"],
    "observation.environment_state": [
        *(f"object_{axis}" for axis in ("x", "y", "z", "qx", "qy", "qz", "qw")),
        *(f"goal_{axis}" for axis in ("x", "y", "z")),
    ],
    "action": ["dx", "dy", "dz", "grip"],
}
STEPS_AFTER_SUCCESS = 5


class Demonstrations(Dataset[dict[str, Tensor]]):
    """Frames of expert episodes, each with the ``chunk`` actions from there on; all in memory.

    An item holds ``observation.state`` (4,), ``observation.environment_state`` (10,), ``action`` (chunk, 4)
    and ``action_is_pad`` (chunk,): past the end of the episode the last action is repeated and marked.

    Args:
        root: Folder of the recording, from the current directory. Made in some seconds if it does not exist.
        episodes: Training episodes in the recording.
        val_episodes: Held-out episodes in the recording, of other layouts.
        chunk: Actions an item.
        split: Which of the two to read.

    Raises:
        ConfigError: A count is below 1, ``split`` is unknown, or the recording is of another size.
        PolicyfitError: The recording is damaged.
    """

    def __init__(
        self,
        root: str = ".cache/pick_place",
        episodes: int = 50,
        val_episodes: int = 5,
        chunk: int = 16,
        split: Literal["train", "val"] = "train",
    ) -> None:
        if min(episodes, val_episodes, chunk) < 1:
            raise ConfigError(
                "episodes, val_episodes and chunk of Demonstrations must be at least 1, "
                f"got {episodes}, {val_episodes} and {chunk}."
            )
        if split not in ("train", "val"):
            raise ConfigError(f"Demonstrations.split must be 'train' or 'val', got {split!r}.")
        path = Path(root)
        if not path.exists():
            record(path, episodes, val_episodes)
        frames, lengths = _read(path, _splits(episodes, val_episodes))
        ends = np.cumsum(lengths)
        first, last = (0, episodes) if split == "train" else (episodes, episodes + val_episodes)
        rows = slice(ends[first] - lengths[first], ends[last - 1])

        self.chunk = chunk
        self._vectors = {key: torch.from_numpy(frames[key][rows]) for key in NAMES}
        self._end = torch.from_numpy(np.repeat(ends, lengths)[rows] - rows.start)

    def __len__(self) -> int:
        return len(self._end)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        times = torch.arange(index, index + self.chunk)
        last = self._end[index] - 1
        return {
            "observation.state": self._vectors["observation.state"][index],
            "observation.environment_state": self._vectors["observation.environment_state"][index],
            "action": self._vectors["action"][times.clamp(max=last)],
            "action_is_pad": times > last,
        }

    @property
    def stats(self) -> dict[str, dict[str, Tensor]]:
        """Mean, standard deviation, minimum and maximum of each feature over this split's frames, float32."""
        doubles = {key: vectors.double() for key, vectors in self._vectors.items()}
        return {
            key: {
                "mean": values.mean(0).float(),
                "std": values.std(0, correction=0).float(),
                "min": values.amin(0).float(),
                "max": values.amax(0).float(),
            }
            for key, values in doubles.items()
        }


def record(root: str | Path, episodes: int = 50, val_episodes: int = 5) -> None:
    """Record the scripted expert into the new folder ``root``, which appears whole or not at all."""
    import lerobot_format
    from pick_place_simulator import PickPlaceEnv
    from rich.progress import track

    root = Path(root)
    seeds = [TRAINING_SEED + i for i in range(episodes)] + [VALIDATION_SEED + i for i in range(val_episodes)]
    env = PickPlaceEnv()
    recording = [_episode(env, seed) for seed in track(seeds, f"Recording {len(seeds)} demonstrations to {root}")]
    env.close()

    root.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f"{root.name}.partial-", dir=root.parent))
    lerobot_format.write(
        aside,
        recording,
        names=NAMES,
        task=WORDS,
        fps=FPS,
        robot_type="sawyer",
        splits=_splits(episodes, val_episodes),
    )
    aside.chmod(0o755)
    try:
        aside.rename(root)
    except OSError:
        shutil.rmtree(aside)
        if not root.is_dir():
            raise
        # Another process of this run was faster; the expert is deterministic, so its recording is the same.


def _episode(env: PickPlaceEnv, seed: int) -> dict[str, Vectors]:
    from metaworld.policies import SawyerPickPlaceV3Policy

    expert = SawyerPickPlaceV3Policy()
    steps: list[dict[str, Vectors]] = []
    observation, _ = env.reset(seed=seed)
    succeeded_at = None
    while succeeded_at is None or len(steps) < succeeded_at + STEPS_AFTER_SUCCESS:
        with warnings.catch_warnings():
            # On long ways the expert asks for more than the arm's speed; recorded is what the arm does.
            warnings.filterwarnings("ignore", message="Constant.s. may be too high")
            action = np.clip(expert.get_action(env.full_state), -1.0, 1.0).astype(np.float32)
        steps.append({**observation, "action": action})
        observation, _, terminated, truncated, _ = env.step(action)
        if terminated and succeeded_at is None:
            succeeded_at = len(steps)
        if truncated and succeeded_at is None:
            raise PolicyfitError(
                f"The scripted expert failed on layout {seed}, which it solves in Meta-World 3.1.1 with "
                "MuJoCo 3.3.0.\nInstall these versions: pip install metaworld==3.1.1"
            )
    return {key: np.stack([step[key] for step in steps]) for key in NAMES}


def _splits(episodes: int, val_episodes: int) -> dict[str, str]:
    return {"train": f"0:{episodes}", "val": f"{episodes}:{episodes + val_episodes}"}


def _read(root: Path, splits: dict[str, str]) -> tuple[dict[str, Column], Column]:
    import lerobot_format
    from pyarrow import ArrowException  # type: ignore[import-untyped]

    try:
        found = lerobot_format.read_info(root)["splits"]
        frames, lengths = lerobot_format.read(root)
    except (OSError, ValueError, KeyError, ArrowException) as error:
        raise PolicyfitError(
            f"The demonstrations in {root} cannot be read: {error}\n"
            "Delete that folder; they are recorded again at the next start."
        ) from error
    if found != splits:
        raise ConfigError(
            f"The demonstrations in {root} are split as {found}, but {splits} was asked for.\n"
            "Give another root, or delete that folder to record again."
        )
    return frames, lengths
