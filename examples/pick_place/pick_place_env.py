"""What ``RUN.yaml`` evaluates in: vectors of the simulator, which is imported when they are made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gymnasium.vector import SyncVectorEnv

TASK = "pick-place-v3"
LAYOUTS = 50  # what one seed of MT1 gives
FPS = 80  # 5 simulator steps of 2.5 ms
TRAINING_SEED, EVALUATION_SEED, VALIDATION_SEED, PREVIEW_SEED = 0, 10_000, 20_000, 30_000


class PickPlace:
    """Makes vectors of pick-and-place environments; what ``trainer.evaluate`` takes.

    Each member plays one episode for each seeded ``reset`` of the vector.

    Args:
        num_envs: Environments that step together, and so the policy's batch size.
        limit: Steps after which an episode is truncated; the expert needs about 55.
    """

    def __init__(self, num_envs: int = 10, limit: int = 200) -> None:
        self.num_envs, self.limit = num_envs, limit

    def __call__(self) -> SyncVectorEnv[Any, Any]:
        """A new vector of environments, to be closed by the caller."""
        from gymnasium.vector import SyncVectorEnv  # takes seconds, which a plan need not wait for
        from pick_place_simulator import FirstEpisodeOnly, PickPlaceEnv

        return SyncVectorEnv([lambda: FirstEpisodeOnly(PickPlaceEnv(self.limit))] * self.num_envs)
