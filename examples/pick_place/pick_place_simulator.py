"""Meta-World's ``pick-place-v3`` as a gymnasium environment with one layout of object and goal a seed.

Seed ``k`` is layout ``k % 50`` of ``metaworld.MT1("pick-place-v3", seed=k // 50)``: the simulator's own
``reset`` ignores its seed, and this public road is the one on which layouts repeat and goals are visible.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import gymnasium
import metaworld
import numpy as np
from gymnasium.spaces import Box, Dict
from numpy.typing import NDArray
from pick_place_env import EVALUATION_SEED, LAYOUTS, TASK

Observation = dict[str, NDArray[np.float32]]
Action = NDArray[np.float32]
Step = tuple[Observation, float, bool, bool, dict[str, Any]]


class PickPlaceEnv(gymnasium.Env[Observation, Action]):
    """Pick up the puck and bring it within 7 cm of the goal.

    Observation: ``observation.state`` (4,), hand position in metres and gripper opening in 0..1, and
    ``observation.environment_state`` (10,), object position, object quaternion and goal position.
    Action (4,) in -1..1: hand displacement in centimetres and gripper effort, at 80 Hz.

    ``terminated`` comes with ``info["success"]``, ``truncated`` after ``limit`` steps. A reset without a seed
    draws one of the evaluation layouts from the environment's own random stream.
    """

    def __init__(self, limit: int = 200) -> None:
        self.limit = limit
        self.observation_space: Any = Dict(
            {
                "observation.state": Box(-np.inf, np.inf, (4,), np.float32),
                "observation.environment_state": Box(-np.inf, np.inf, (10,), np.float32),
            }
        )
        self.action_space = Box(-1.0, 1.0, (4,), np.float32)
        self.full_state: NDArray[np.float64] = np.zeros(39)  # what the scripted expert reads
        self._simulator: Any = _benchmark(0).train_classes[TASK]()
        self._steps = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Put hand, object and goal where layout ``seed`` has them."""
        super().reset(seed=seed)
        layout = seed if seed is not None else EVALUATION_SEED + int(self.np_random.integers(LAYOUTS))
        self._simulator.set_task(_benchmark(layout // LAYOUTS).train_tasks[layout % LAYOUTS])
        self.full_state, _ = self._simulator.reset()
        self._steps = 0
        return self._observation(), {}

    def step(self, action: Action) -> Step:
        """Act for 1/80 s. Success is reported for as long as it lasts, so a recording can go on past it."""
        clipped = np.clip(action, -1.0, 1.0)
        self.full_state, reward, _, _, info = self._simulator.step(clipped)
        self._steps += 1
        success = bool(info["success"])
        truncated = self._steps >= self.limit and not success
        return self._observation(), float(reward), success, truncated, {"success": success}

    def close(self) -> None:
        """Free the simulator."""
        self._simulator.close()

    def _observation(self) -> Observation:
        # The 39 numbers are hand and gripper (4), object pose (7), constant padding (7), the same a frame ago
        # (18), goal (3). Padding and the frame ago are left out.
        state = self.full_state.astype(np.float32)
        return {
            "observation.state": state[:4],
            "observation.environment_state": np.concatenate([state[4:11], state[36:39]]),
        }


class FirstEpisodeOnly(gymnasium.Wrapper[Observation, Action, Observation, Action]):
    """Rest after an episode until the next seeded reset, so that waiting for the slowest of a vector is free.

    While at rest the last observation is repeated, with reward 0, nothing ended and no success.
    """

    def __init__(self, env: gymnasium.Env[Observation, Action]) -> None:
        super().__init__(env)
        self._last: Observation | None = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Begin an episode, unless this is a vector's automatic reset after one."""
        if seed is None and self._last is not None:
            return self._last, {}
        self._last = None
        return self.env.reset(seed=seed, options=options)

    def step(self, action: Action) -> Step:
        """Act, or rest."""
        if self._last is not None:
            return self._last, 0.0, False, False, {"success": False}
        observation, reward, terminated, truncated, info = self.env.step(action)
        if terminated or truncated:
            self._last = observation
        return observation, float(reward), terminated, truncated, info


@lru_cache(maxsize=8)
def _benchmark(seed: int) -> metaworld.MT1:
    return metaworld.MT1(TASK, seed=seed)  # type: ignore[no-untyped-call]
