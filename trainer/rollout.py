"""Let a policy act in an environment: seeded episodes, how they ended, and how long an action took."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..strategies.checks import seed_number, whole
from ..strategies.distributed import DistributionStrategy, SingleProcess
from ..strategies.errors import ConfigError, PolicyfitError

if TYPE_CHECKING:
    from gymnasium.vector import VectorEnv

    Vector = VectorEnv[Any, Any, Any]

Booleans = NDArray[np.bool_]
_Act = Callable[[Any], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutReport:
    """What came of the episodes; lists are in the order of the seeds.

    What speaks of success is ``None`` when the environment never reported it. ``lengths`` count its steps. A
    latency runs from an observation on the device to the actions on the host, all environments at once.
    """

    episodes: int
    successes: int | None
    success_rate: float | None
    interval: tuple[float, float] | None
    returns: list[float]
    lengths: list[int]
    successes_by_episode: list[bool] | None
    seeds: list[int]
    latency_ms_p50: float
    latency_ms_p99: float
    num_envs: int

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self) | {"interval": None if self.interval is None else list(self.interval)}

    def metrics(self) -> dict[str, float]:
        """What a record of a run says of it."""
        success = {} if self.success_rate is None else {"rollout/success_rate": self.success_rate}
        return {
            **success,
            "rollout/return": float(np.mean(self.returns)),
            "rollout/length": float(np.mean(self.lengths)),
        }

    def summary(self) -> str:
        """Four aligned lines for a person."""
        if self.interval is None or self.success_rate is None:
            success = "not reported by the environment (neither info['success'] nor info['is_success'])"
        else:
            low, high = (100 * bound for bound in self.interval)
            success = (
                f"{self.successes}/{self.episodes} = {100 * self.success_rate:.1f} %  "
                f"(95 % Wilson interval {low:.1f} - {high:.1f} %)"
            )
        returns, lengths = self.returns, self.lengths
        return "\n".join(
            (
                f"success {success}",
                f"return  mean {np.mean(returns):.4g}  (from {min(returns):.4g} to {max(returns):.4g})",
                f"length  mean {np.mean(lengths):.1f} steps  (from {min(lengths)} to {max(lengths)})",
                f"latency {self.latency_ms_p50:.2f} ms p50, {self.latency_ms_p99:.2f} ms p99  "
                f"(actions for {self.num_envs} at once)",
            )
        )


def wilson(successes: int, n: int, z: float = 1.959964) -> tuple[float, float]:
    """The Wilson score interval of the rate ``successes / n``, within [0, 1]; 95 % at the default ``z``.

    Raises:
        ConfigError: ``successes`` is not between 0 and ``n``, or there is no episode.

    Source: Wilson (1927), "Probable Inference, the Law of Succession, and Statistical Inference".
    """
    if not 0 <= successes <= n or n < 1:
        raise ConfigError(
            f"A success rate needs 0 <= successes <= n and n >= 1, got {successes} of {n}.\nCount whole episodes."
        )
    rate, shrink = successes / n, 1 + z * z / n
    centre = (rate + z * z / (2 * n)) / shrink
    margin = z * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n)) / shrink
    # At the ends the exact bounds are 0 and 1; floating point misses them by a rounding.
    return (0.0 if successes == 0 else centre - margin, 1.0 if successes == n else centre + margin)


@contextmanager
def acting(policy: nn.Module) -> Iterator[None]:
    """Put every submodule in eval mode, and give each its own mode back at the end, also after an error."""
    # The flags themselves, not eval() and train(): those reach into children and may be overridden.
    modes = [(module, module.training) for module in policy.modules()]
    for module, _ in modes:
        module.training = False
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def rollout(
    policy: nn.Module,
    env: Any,
    *,
    episodes: int,
    seed: int,
    act: _Act,
    to_device: Callable[[Any], Any],
    distribution: DistributionStrategy | None = None,
) -> RolloutReport:
    """Run episodes in rounds, one in each environment; episode i starts from ``seed + i`` in any case.

    Args:
        policy: Has ``select_action``; its ``reset()``, if there is one, comes before every round.
        env: A gymnasium ``VectorEnv``, an ``Env``, or a function that makes either. It belongs to the
            rollout, which closes it exactly once, also after an error.
        act: Gives the actions for an observation on the device, shape (num_envs, action).
        to_device: Moves an observation: a tensor or a dict of tensors, float64 already made float32.
        distribution: Where there are several ranks, they share the rounds, and all report on all of them.

    Raises:
        ConfigError: The policy cannot act, the environment cannot be used, or a number is out of range.
        PolicyfitError: The actions do not fit the environment, or are not finite.
    """
    ranks = distribution or SingleProcess()
    tally, rounds = _Tally(), dict[int, _Tally]()

    def act_on_host(observation: Any) -> Tensor:
        on_device = to_device(to_tensors(observation))
        start = time.perf_counter()
        actions = act(on_device)
        if not isinstance(actions, Tensor):
            raise ConfigError(
                f"select_action must return a tensor, (num_envs, action), got {type(actions).__name__}.\n"
                "Leave it on its device and in its type: what the environment needs is made of it here."
            )
        actions = actions.detach().cpu()
        tally.latencies_ms.append(1000 * (time.perf_counter() - start))
        return actions

    with _opened(env) as vector, acting(policy), torch.no_grad():
        _check_request(policy, vector, episodes, seed)
        for first in range(0, episodes, vector.num_envs)[ranks.rank :: ranks.world_size]:
            these = range(first, min(first + vector.num_envs, episodes))
            if callable(reset := getattr(policy, "reset", None)):
                reset()
            tally = rounds[first] = _Tally()
            _play_round(vector, these, seed, act_on_host, tally)
    every = {first: tally for part in ranks.gather(rounds, "evaluate()") for first, tally in part.items()}
    tally = _Tally.of([every[first] for first in sorted(every)])
    successes = sum(tally.succeeded) if tally.reported else None
    p50, p99 = np.percentile(tally.latencies_ms, (50, 99))
    return RolloutReport(
        episodes=episodes,
        successes=successes,
        success_rate=None if successes is None else successes / episodes,
        interval=None if successes is None else wilson(successes, episodes),
        returns=tally.returns,
        lengths=tally.lengths,
        successes_by_episode=tally.succeeded if tally.reported else None,
        seeds=[seed + i for i in range(episodes)],
        latency_ms_p50=float(p50),
        latency_ms_p99=float(p99),
        num_envs=vector.num_envs,
    )


@dataclass
class _Tally:
    returns: list[float] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    succeeded: list[bool] = field(default_factory=list)
    latencies_ms: list[float] = field(default_factory=list)
    reported: bool = False

    @classmethod
    def of(cls, rounds: Sequence[_Tally]) -> _Tally:
        """All of them as one."""
        return cls(
            returns=[value for tally in rounds for value in tally.returns],
            lengths=[value for tally in rounds for value in tally.lengths],
            succeeded=[value for tally in rounds for value in tally.succeeded],
            latencies_ms=[value for tally in rounds for value in tally.latencies_ms],
            reported=any(tally.reported for tally in rounds),
        )


@contextmanager
def _opened(env: Any) -> Iterator[Vector]:
    try:
        from gymnasium import Env
        from gymnasium.vector import SyncVectorEnv, VectorEnv
    except ImportError as error:
        raise ConfigError("Rollouts need gymnasium, which is not installed.\nUse: pip install gymnasium") from error
    if not isinstance(env, Env | VectorEnv) and callable(env):
        env = env()
    if not isinstance(env, Env | VectorEnv):
        raise ConfigError(
            "env must be a gymnasium VectorEnv or Env, or a function that makes one, got "
            f"{type(env).__name__}.\nPass for instance: lambda: gymnasium.make('Pendulum-v1')."
        )
    if isinstance(env, VectorEnv) and env.closed:
        raise ConfigError(
            "The environment is already closed: a rollout closes what it is given.\n"
            "For more than one rollout pass a function that makes it."
        )
    vector: Any = env
    try:
        if isinstance(env, Env):
            vector = SyncVectorEnv([lambda: env])
        yield vector
    finally:
        vector.close()


def _check_request(policy: nn.Module, env: Vector, episodes: int, seed: int) -> None:
    if not callable(getattr(policy, "select_action", None)):
        raise ConfigError(
            f"A rollout needs a policy that can act, but {type(policy).__name__} has no select_action.\n"
            "Add select_action(observation), which returns actions of shape (num_envs, action)."
        )
    whole("episodes", episodes, 1, "Use 1 for a single episode.")
    seed_number("seed", seed)
    if env.action_space.shape is None:
        raise ConfigError(
            f"A rollout needs actions in one array, but this environment takes {env.single_action_space}.\n"
            "Wrap it so that its action space is a Box or a Discrete."
        )


def _play_round(env: Vector, episodes: range, seed: int, act: _Act, tally: _Tally) -> None:
    """Play ``episodes`` in lockstep, one in each environment; environments left over run along uncounted."""
    from gymnasium.vector import AutoresetMode

    resets_itself = env.metadata.get("autoreset_mode") != AutoresetMode.DISABLED
    seeds: Any = [seed + episodes.start + i for i in range(env.num_envs)]  # gymnasium's base class says int
    observation, _ = env.reset(seed=seeds)
    active: Booleans = np.arange(env.num_envs) < len(episodes)
    returns, lengths = np.zeros(env.num_envs), np.zeros(env.num_envs, dtype=int)
    succeeded = np.zeros(env.num_envs, dtype=bool)
    step = 0
    while active.any():
        actions = _to_actions(act(observation), env, active, step, episodes)
        observation, rewards, terminations, truncations, infos = env.step(actions)
        step += 1
        reported, now_succeeded = _read_success(infos, env.num_envs)
        tally.reported |= bool((reported & active).any())
        succeeded |= now_succeeded & active
        returns[active] += np.asarray(rewards, dtype=np.float64)[active]
        lengths[active] += 1
        done = np.logical_or(terminations, truncations)
        active &= ~done
        if not resets_itself and done.any() and active.any():
            observation, _ = env.reset(options={"reset_mask": done})
    tally.returns += returns[: len(episodes)].tolist()
    tally.lengths += lengths[: len(episodes)].tolist()
    tally.succeeded += succeeded[: len(episodes)].tolist()


def to_tensors(observation: Any) -> Any:
    """Arrays as tensors with their own memory, as environments reuse their buffers; text as it is."""
    if isinstance(observation, dict):
        return {key: to_tensors(value) for key, value in observation.items()}
    if not isinstance(observation, np.ndarray):
        return observation
    dtype = np.float32 if observation.dtype == np.float64 else observation.dtype
    return torch.from_numpy(np.array(observation, dtype=dtype, order="C"))


def _to_actions(actions: Tensor, env: Vector, active: Booleans, step: int, episodes: range) -> NDArray[Any]:
    """The actions in the dtype of the environment's space, floats as float32: numpy has no bfloat16."""
    space = env.action_space
    if tuple(actions.shape) != space.shape:
        raise PolicyfitError(
            f"select_action must return actions of shape {space.shape} (num_envs, then the shape of "
            f"{env.single_action_space}), got {tuple(actions.shape)}.\nReturn one action for each environment."
        )
    if not np.issubdtype(space.dtype, np.floating):
        if actions.is_floating_point():
            raise PolicyfitError(
                f"The environment takes whole numbers ({env.single_action_space}), but select_action gave "
                f"{actions.dtype}.\nReturn for instance logits.argmax(-1)."
            )
        array = actions.numpy()
        whole = array.astype(space.dtype)
        if not np.array_equal(whole, array):
            raise PolicyfitError(
                f"select_action gave {array.tolist()}, which {env.single_action_space} cannot hold.\n"
                "Return whole numbers within the action space."
            )
        return whole
    array = actions.to(torch.float32).numpy().copy()
    bad = ~np.isfinite(array).reshape(len(array), -1).all(axis=1)
    if (bad & active).any():
        i = int(np.flatnonzero(bad & active)[0])
        raise PolicyfitError(
            f"The policy gave a non-finite action at step {step} of episode {episodes[i]}: "
            f"{array[i].tolist()}.\nLook for non-finite weights or observations."
        )
    array[bad] = 0.0  # an environment whose episode is over must not decide how the others end
    return array


def _read_success(infos: dict[str, Any], num_envs: int) -> tuple[Booleans, Booleans]:
    """Which environments said whether they succeeded, and which did.

    Where one was reset in the same step, ``infos`` is of its next episode, ``final_info`` of the ended one.
    """
    reported, succeeded = np.zeros((2, num_envs), dtype=bool)
    for key in ("success", "is_success"):
        if key in infos:
            present = np.asarray(infos.get(f"_{key}", np.ones(num_envs)), dtype=bool)
            said, success = _as_booleans(key, np.asarray(infos[key]).reshape(num_envs, -1)[:, 0])
            present = present & said
            reported |= present
            succeeded |= present & success
    if "final_info" in infos:
        ended = np.asarray(infos["_final_info"], dtype=bool)
        final_reported, final_succeeded = _read_success(infos["final_info"], num_envs)
        reported = np.where(ended, final_reported, reported)
        succeeded = np.where(ended, final_succeeded, succeeded)
    return reported, succeeded


def _as_booleans(key: str, values: NDArray[Any]) -> tuple[Booleans, Booleans]:
    """Who said something (NaN says nothing), and who said yes.

    Raises:
        PolicyfitError: What was said is neither a truth value nor a number.
    """
    if values.dtype == object:
        values = np.asarray([np.nan if value is None else value for value in values.tolist()])
    if values.dtype.kind not in "biuf":
        raise PolicyfitError(
            f"The environment's info[{key!r}] must be true, false or a number, got {values.tolist()}.\n"
            "Report a truth value."
        )
    said = ~np.isnan(values.astype(float))
    return said, said & (values > 0)
