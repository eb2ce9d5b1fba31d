import json
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import Tensor, nn

from policyfit import Callback, Trainer
from policyfit.strategies.errors import ConfigError, PolicyfitError
from policyfit.trainer.rollout import RolloutReport, acting, rollout, wilson

Report = Callable[[int, int], dict[str, Any]]


class Toy(gym.Env[Any, Any]):
    """An episode of ``2 + seed % 3`` steps whose rewards are drawn from its own seed; counts its calls."""

    observation_space: gym.Space[Any] = gym.spaces.Box(-1e3, 1e3, (2,), np.float64)
    action_space: gym.Space[Any] = gym.spaces.Box(-1.0, 1.0, (3,), np.float32)

    def __init__(self, calls: Counter[str], info: Report = lambda seed, t: {}, fail_at_reset: int = -1) -> None:
        self.calls, self.info, self.fail_at_reset = calls, info, fail_at_reset
        self.actions: list[Any] = []
        self.seed = -1

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if self.calls["reset"] == self.fail_at_reset:
            raise OSError("the simulator does not start")
        self.calls["reset"] += 1
        self.seed = -1 if seed is None else seed
        self.t = 0
        return self.observe(), {"success": True}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.calls["step"] += 1
        self.actions.append(action)
        self.t += 1
        over = self.t >= (2 + self.seed % 3 if self.seed >= 0 else 2)
        return self.observe(), float(self.np_random.random()), over, False, self.info(self.seed, self.t)

    def observe(self) -> Any:
        return np.array([self.seed, self.t], dtype=np.float64)

    def close(self) -> None:
        self.calls["close"] += 1


class Policy(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.dtype = dtype
        self.resets = 0
        self.observations: list[Any] = []

    def reset(self) -> None:
        self.resets += 1

    def select_action(self, observation: Any) -> Tensor:
        self.observations.append(observation)
        first = observation["state"] if isinstance(observation, dict) else observation
        return torch.full((len(first), 3), 0.5, dtype=self.dtype)


def vector(
    calls: Counter[str],
    n: int,
    info: Report = lambda seed, t: {},
    mode: AutoresetMode = AutoresetMode.NEXT_STEP,
) -> SyncVectorEnv[Any, Any]:
    return SyncVectorEnv([lambda: Toy(calls, info)] * n, autoreset_mode=mode)


def run(policy: Any, env: Any, episodes: int = 5, seed: int = 10, **options: Any) -> RolloutReport:
    options = {"act": getattr(policy, "select_action", None), "to_device": lambda x: x} | options
    return rollout(policy, env, episodes=episodes, seed=seed, **options)


MODES = [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, AutoresetMode.DISABLED]


def test_wilson_gives_the_published_interval() -> None:
    low, high = wilson(49, 50)
    assert low == pytest.approx(0.8950, abs=5e-5)
    assert high == pytest.approx(0.9965, abs=5e-5)
    assert wilson(5, 10) == pytest.approx((0.2366, 0.7634), abs=5e-5)


@pytest.mark.parametrize("n", [1, 3, 10, 50])
def test_wilson_ends_exactly_at_zero_and_one(n: int) -> None:
    assert wilson(0, n)[0] == 0.0
    assert wilson(n, n)[1] == 1.0
    assert wilson(0, n)[1] == pytest.approx(1 - wilson(n, n)[0])


@pytest.mark.parametrize(("successes", "n"), [(0, 0), (-1, 5), (6, 5)])
def test_wilson_refuses_impossible_counts(successes: int, n: int) -> None:
    with pytest.raises(ConfigError, match="successes"):
        wilson(successes, n)


@pytest.mark.parametrize("mode", MODES)
def test_rollout_plays_five_episodes_in_three_environments(mode: AutoresetMode) -> None:
    calls: Counter[str] = Counter()
    policy = Policy()
    report = run(policy, vector(calls, 3, mode=mode))
    assert report.seeds == [10, 11, 12, 13, 14]
    assert report.lengths == [2 + seed % 3 for seed in report.seeds]
    assert report.episodes == 5
    assert report.num_envs == 3
    assert policy.resets == 2
    assert calls["close"] == 3


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("n", [2, 3, 7])
def test_episodes_are_the_same_whatever_the_number_of_environments(n: int, mode: AutoresetMode) -> None:
    alone = run(Policy(), lambda: Toy(Counter()))
    report = run(Policy(), vector(Counter(), n, mode=mode))
    assert report.returns == alone.returns
    assert report.lengths == alone.lengths
    assert len(set(alone.returns)) == 5


def test_returns_are_the_sums_of_the_rewards_of_the_episode_only() -> None:
    expected = []
    for seed in range(10, 15):
        env = Toy(Counter())
        env.reset(seed=seed)
        expected.append(sum(env.step(None)[1] for _ in range(2 + seed % 3)))
    assert run(Policy(), vector(Counter(), 2)).returns == pytest.approx(expected)


def test_single_env_is_reset_once_an_episode_and_closed_once() -> None:
    calls: Counter[str] = Counter()
    report = run(Policy(), Toy(calls))
    assert calls == Counter(reset=5, step=sum(report.lengths), close=1)


def test_env_can_be_made_by_a_function() -> None:
    calls: Counter[str] = Counter()
    first = run(Policy(), lambda: vector(calls, 2))
    second = run(Policy(), lambda: vector(calls, 2))
    assert first.returns == second.returns
    assert calls["close"] == 4


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("key", ["success", "is_success"])
def test_success_at_any_step_of_an_episode_counts(key: str, mode: AutoresetMode) -> None:
    # Seed 10 succeeds at its first step only, 13 at its last; the others report failure, and every reset
    # reports the success of an episode that has not begun.
    def info(seed: int, t: int) -> dict[str, Any]:
        return {key: (seed, t) in ((10, 1), (13, 3))}

    report = run(Policy(), vector(Counter(), 3, info, mode))
    assert report.successes_by_episode == [True, False, False, True, False]
    assert report.successes == 2
    assert report.success_rate == 0.4
    assert report.interval == wilson(2, 5)


@pytest.mark.parametrize("mode", MODES)
def test_success_reported_by_some_episodes_only_is_read_by_its_mask(mode: AutoresetMode) -> None:
    report = run(Policy(), vector(Counter(), 3, lambda seed, t: {"success": 1.0} if seed == 11 else {}, mode))
    assert report.successes_by_episode == [False, True, False, False, False]


@pytest.mark.parametrize("mode", MODES)
def test_success_is_none_when_no_env_reports_it(mode: AutoresetMode) -> None:
    report = run(Policy(), vector(Counter(), 3, mode=mode), episodes=3, seed=9)
    assert (report.successes, report.success_rate, report.interval) == (None, None, None)
    assert report.successes_by_episode is None
    assert "success not reported" in report.summary()


def test_success_after_the_end_of_an_episode_does_not_count() -> None:
    # Seeds 12 and 14 of these are over after 2 and 4 steps; env 0 lives on in an unseeded episode.
    report = run(Policy(), vector(Counter(), 3, lambda seed, t: {"success": seed < 0}), episodes=3, seed=12)
    assert report.successes_by_episode == [False, False, False]


@pytest.mark.parametrize("training", [True, False])
def test_env_is_closed_once_and_modes_come_back_when_the_policy_fails(training: bool) -> None:
    class Failing(Policy):
        def select_action(self, observation: Any) -> Tensor:
            assert not self.training
            if len(self.observations) == 1:
                raise ZeroDivisionError("mid-round")
            return super().select_action(observation)

    calls: Counter[str] = Counter()
    policy = Failing().train(training)
    with pytest.raises(ZeroDivisionError):
        run(policy, vector(calls, 2))
    assert calls["close"] == 2
    assert policy.training is training


def test_env_is_closed_once_when_reset_fails_in_the_second_round() -> None:
    calls: Counter[str] = Counter()
    with pytest.raises(OSError, match="does not start"):
        run(Policy(), Toy(calls, fail_at_reset=1))
    assert calls["close"] == 1


def test_closed_vector_env_is_refused_with_the_remedy() -> None:
    env = vector(Counter(), 2)
    run(Policy(), env)
    with pytest.raises(ConfigError, match="pass a function that makes it"):
        run(Policy(), env)


def test_policy_that_cannot_act_is_refused_and_the_env_closed() -> None:
    calls: Counter[str] = Counter()
    with pytest.raises(ConfigError, match="Linear has no select_action"):
        run(nn.Linear(2, 2), Toy(calls))
    assert calls == Counter(close=1)


@pytest.mark.parametrize("env", [3, lambda: "CartPole-v1"])
def test_env_of_another_kind_is_refused(env: Any) -> None:
    with pytest.raises(ConfigError, match="VectorEnv or Env"):
        run(Policy(), env)


@pytest.mark.parametrize(("name", "value"), [("episodes", 0), ("episodes", 2.5), ("seed", -1)])
def test_numbers_out_of_range_are_refused(name: str, value: Any) -> None:
    calls: Counter[str] = Counter()
    with pytest.raises(ConfigError, match=rf"{name} must be a whole number .*, got {value}\.\nUse "):
        run(Policy(), Toy(calls), **{name: value})
    assert calls["close"] == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_actions_reach_the_env_as_float32_numpy_in_every_precision(dtype: torch.dtype) -> None:
    env = Toy(Counter())
    run(Policy(dtype), env, episodes=1)
    assert all(isinstance(a, np.ndarray) and a.dtype == np.float32 and a.shape == (3,) for a in env.actions)
    assert np.array_equal(env.actions[0], np.full(3, 0.5, np.float32))


class Button(Toy):
    action_space = gym.spaces.Discrete(4)


def test_discrete_actions_reach_the_env_in_its_own_dtype() -> None:
    env = Button(Counter())
    run(Policy(), env, episodes=1, act=lambda obs: torch.tensor([3], dtype=torch.int32))
    assert env.actions[0] == 3
    assert env.actions[0].dtype == np.int64


def test_fractions_are_refused_where_the_env_takes_whole_numbers() -> None:
    with pytest.raises(PolicyfitError, match=r"whole numbers \(Discrete\(4\)\)"):
        run(Policy(), Button(Counter()), act=lambda obs: torch.tensor([0.5]))


def test_actions_of_the_wrong_shape_are_refused_with_both_shapes() -> None:
    with pytest.raises(PolicyfitError, match=r"\(2, 3\).*got \(3,\)"):
        run(Policy(), vector(Counter(), 2), act=lambda obs: torch.zeros(3))


class TwoArms(Toy):
    action_space = gym.spaces.Dict(left=Toy.action_space, right=Toy.action_space)


def test_env_whose_actions_are_not_one_array_is_refused() -> None:
    with pytest.raises(ConfigError, match="actions in one array"):
        run(Policy(), TwoArms(Counter()))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_action_ends_the_rollout_with_step_and_episode(bad: float) -> None:
    def act(observation: Tensor) -> Tensor:
        actions = torch.zeros(2, 3)
        actions[(observation == torch.tensor([13.0, 1.0])).all(dim=1), 1] = bad  # seed 13 after its first step
        return actions

    calls: Counter[str] = Counter()
    with pytest.raises(PolicyfitError, match="non-finite action at step 1 of episode 3"):
        run(Policy(), vector(calls, 2), act=act)
    assert calls["close"] == 2


def test_non_finite_action_for_an_episode_that_is_over_does_not_matter() -> None:
    def act(observation: Tensor) -> Tensor:
        return torch.where((observation[:, :1] < 0).expand(2, 3), math.nan, 0.5)

    env = vector(Counter(), 2, mode=AutoresetMode.SAME_STEP)  # seed 12: 2 steps, 13: 3 steps
    assert run(Policy(), env, episodes=2, seed=12, act=act).lengths == [2, 3]
    toys: list[Any] = list(env.envs)
    assert all(np.isfinite(action).all() for toy in toys for action in toy.actions)


def test_observations_are_float32_tensors_of_their_own_moved_to_the_device() -> None:
    moved = []

    def to_device(observation: Any) -> Any:
        moved.append(observation)
        return observation * 1

    policy = Policy()
    env = SyncVectorEnv([lambda: Toy(Counter())] * 2, copy=False)  # one buffer for all steps
    run(policy, env, episodes=2, seed=12, to_device=to_device)
    assert [m.dtype for m in moved] == [torch.float32] * 3
    assert moved[0].tolist() == [[12.0, 0.0], [13.0, 0.0]]
    assert moved[1].tolist() == [[12.0, 1.0], [13.0, 1.0]]
    assert len(policy.observations) == 3


class Camera(Toy):
    observation_space = gym.spaces.Dict(state=Toy.observation_space, image=gym.spaces.Box(0, 255, (4, 4, 3), np.uint8))

    def observe(self) -> Any:
        return {"state": np.zeros(2), "image": np.full((4, 4, 3), 7, np.uint8)}


def test_dict_observations_become_dicts_of_tensors() -> None:
    policy = Policy()
    run(policy, Camera(Counter()), episodes=1)
    seen = policy.observations[0]
    assert {name: (value.dtype, tuple(value.shape)) for name, value in seen.items()} == {
        "state": (torch.float32, (1, 2)),
        "image": (torch.uint8, (1, 4, 4, 3)),
    }
    assert int(seen["image"].max()) == 7


def test_policy_acts_without_gradients_and_in_eval_mode() -> None:
    weight = torch.ones(3, requires_grad=True)
    policy = Policy()
    modes = []

    def act(observation: Tensor) -> Tensor:
        modes.append((policy.training, torch.is_grad_enabled()))
        return weight.expand(1, 3) * 0.5

    run(policy, Toy(Counter()), episodes=1, act=act)
    assert set(modes) == {(False, False)}
    assert policy.training


def test_latency_has_one_entry_an_action() -> None:
    report = run(Policy(), Toy(Counter()), episodes=1)
    assert 0 < report.latency_ms_p50 <= report.latency_ms_p99


def test_report_is_json_and_reads_well() -> None:
    report = RolloutReport(
        episodes=50,
        successes=49,
        success_rate=0.98,
        interval=wilson(49, 50),
        returns=[1.0, 2.0],
        lengths=[10, 21],
        successes_by_episode=[True] * 49 + [False],
        seeds=list(range(50)),
        latency_ms_p50=1.5,
        latency_ms_p99=2.25,
        num_envs=4,
    )
    assert json.loads(json.dumps(report.to_dict())) == report.to_dict()
    assert report.summary().splitlines() == [
        "success 49/50 = 98.0 %  (95 % Wilson interval 89.5 - 99.6 %)",
        "return  mean 1.5  (from 1 to 2)",
        "length  mean 15.5 steps  (from 10 to 21)",
        "latency 1.50 ms p50, 2.25 ms p99  (actions for 4 at once)",
    ]


@pytest.mark.parametrize("fails", [False, True])
def test_acting_gives_every_module_its_own_mode_back(fails: bool) -> None:
    backbone = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2)).eval()  # frozen ...
    backbone[1].training = True  # ... but for one part
    policy = nn.Sequential(nn.Dropout(), backbone)
    before = {name: module.training for name, module in policy.named_modules()}
    try:
        with acting(policy):
            assert not any(module.training for module in policy.modules())
            if fails:
                raise KeyError("inside")
    except KeyError:
        pass
    assert {name: module.training for name, module in policy.named_modules()} == before
    assert before == {"": True, "0": True, "1": False, "1.0": False, "1.1": True}


class Autocast(Policy):
    """Notes in which type a matmul computes where it acts."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 3)
        self.seen: list[torch.dtype] = []

    def select_action(self, observation: Any) -> Tensor:
        action: Tensor = self.layer(observation)
        self.seen.append(action.dtype)
        return action.tanh()

    def forward(self, batch: Tensor) -> Tensor:
        out = self.layer(batch)
        self.seen.append(out.dtype)
        loss: Tensor = out.square().mean()
        return loss


class Rolls(Callback):
    def due(self, step: int) -> bool:
        return step == 1

    def on_due(self, trainer: Trainer, policy: nn.Module) -> None:
        trainer.evaluate(policy, lambda: Toy(Counter()), episodes=1)


@pytest.mark.parametrize(("precision", "dtype"), [("no", torch.float32), ("bf16", torch.bfloat16)])
def test_policy_acts_in_the_precision_in_which_it_trains(precision: str, dtype: torch.dtype) -> None:
    alone, within = Autocast(), Autocast()
    Trainer("cpu", precision, default_callbacks=False).evaluate(alone, lambda: Toy(Counter()), episodes=2)
    trainer = Trainer("cpu", precision, max_steps=2, default_callbacks=False, callbacks=[Rolls()])
    trainer.fit(within, [torch.ones(2)] * 4)
    assert len(within.seen) > 2
    assert {*alone.seen, *within.seen} == {dtype}
    assert not torch.is_autocast_enabled("cpu")
