"""The pick-and-place example: its simulator, its demonstrations on disk, and its policy."""
# ruff: noqa: E402  (the example cannot be imported without its simulator)

from __future__ import annotations

import contextlib
import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from policyfit import ConfigError, PolicyfitError

pytest.importorskip("metaworld", reason="needs the examples extra: pip install metaworld==3.1.1 packaging")
pq = pytest.importorskip("pyarrow.parquet", reason="needs the examples extra: pip install pyarrow")

import lerobot_format
import pick_place_data
from custom_callback import QuickRollout
from pick_place_data import Demonstrations
from pick_place_env import EVALUATION_SEED, PickPlace
from pick_place_policy import ActPolicy
from pick_place_simulator import FirstEpisodeOnly, PickPlaceEnv

pytestmark = pytest.mark.simulator

EPISODES, VAL_EPISODES = 5, 2  # what the fixture `root` has recorded


@pytest.fixture(scope="module")
def env() -> PickPlaceEnv:
    return PickPlaceEnv(limit=12)


@pytest.fixture
def policy() -> ActPolicy:
    torch.manual_seed(0)
    policy = ActPolicy()
    policy.set_statistics(_statistics())
    return policy


def _statistics() -> dict[str, dict[str, Tensor]]:
    widths = {"observation.state": 4, "observation.environment_state": 10, "action": 4}
    return {key: {"mean": torch.full((n,), 0.5), "std": torch.full((n,), 2.0)} for key, n in widths.items()}


def _batch(size: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "observation.state": torch.randn(size, 4, generator=generator),
        "observation.environment_state": torch.randn(size, 10, generator=generator),
        "action": torch.randn(size, 16, 4, generator=generator),
        "action_is_pad": torch.arange(16).repeat(size, 1) >= 10,
    }


def _play(env: PickPlaceEnv, seed: int) -> NDArray[np.float32]:
    """Everything observed in one short episode under fixed actions, shape (time, 14)."""
    observation, _ = env.reset(seed=seed)
    seen = [np.concatenate(list(observation.values()))]
    generator = np.random.default_rng(0)
    for _ in range(10):
        observation, *_ = env.step(generator.uniform(-1, 1, 4).astype(np.float32))
        seen.append(np.concatenate(list(observation.values())))
    return np.stack(seen)


# The simulator


def test_a_seed_repeats_exactly_whatever_ran_before(env: PickPlaceEnv) -> None:
    first = _play(env, 10_003)
    _play(env, 10_004)
    np.random.seed(7)
    other = PickPlaceEnv(limit=12)
    assert np.array_equal(_play(env, 10_003), first)
    assert np.array_equal(_play(other, 10_003), first)
    other.close()


def test_two_seeds_differ_in_object_and_goal(env: PickPlaceEnv) -> None:
    one, two = (env.reset(seed=seed)[0]["observation.environment_state"] for seed in (10_003, 10_004))
    assert not np.array_equal(one[:3], two[:3])
    assert not np.array_equal(one[7:], two[7:])


def test_observations_lie_in_the_declared_space(env: PickPlaceEnv) -> None:
    observation, _ = env.reset(seed=0)
    assert env.observation_space.contains(observation)
    assert env.observation_space.contains(env.step(np.ones(4, np.float32))[0])


def test_recorded_and_evaluated_layouts_have_no_object_or_goal_in_common(env: PickPlaceEnv) -> None:
    def layouts(seeds: range) -> NDArray[np.float32]:
        return np.stack([env.reset(seed=seed)[0]["observation.environment_state"] for seed in seeds])

    recorded = np.concatenate([layouts(range(50)), layouts(range(20_000, 20_005))])
    evaluated = layouts(range(EVALUATION_SEED, EVALUATION_SEED + 50))
    for columns in (slice(0, 2), slice(7, 10)):
        both = np.concatenate([recorded[:, columns], evaluated[:, columns]])
        assert len(np.unique(both, axis=0)) == 105


def test_an_unseeded_reset_draws_from_the_stream_of_its_own_environment(env: PickPlaceEnv) -> None:
    def drawn() -> list[NDArray[np.float32]]:
        env.reset(seed=5)
        return [env.reset()[0]["observation.environment_state"] for _ in range(2)]

    np.random.seed(1)
    before = drawn()
    np.random.seed(2)
    assert np.array_equal(before, drawn())
    assert not np.array_equal(before[0], before[1])


def test_a_vector_ends_each_episode_once_and_then_rests() -> None:
    vector = PickPlace(num_envs=2, limit=3)()
    vector.reset(seed=[0, 1])
    ended, actions = [], np.zeros((2, 4), np.float32)
    for _ in range(6):
        observation, _, terminated, truncated, _ = vector.step(actions)
        ended.append((terminated | truncated).tolist())
        if len(ended) == 3:
            last = observation
    assert ended == [[False] * 2, [False] * 2, [True] * 2, [False] * 2, [False] * 2, [False] * 2]
    assert all(np.array_equal(observation[key], last[key]) for key in last)
    again, _ = vector.reset(seed=[0, 2])
    assert not np.array_equal(again["observation.environment_state"], last["observation.environment_state"])
    vector.step(actions)
    vector.close()


def test_success_ends_the_episode_and_is_reported(root: str) -> None:
    actions = _episodes(root)[0]["action"]
    env = FirstEpisodeOnly(PickPlaceEnv())
    env.reset(seed=0)
    steps = [env.step(action) for action in actions]
    ends = [terminated for _, _, terminated, _, _ in steps]
    assert ends.index(True) + 1 == len(actions) - pick_place_data.STEPS_AFTER_SUCCESS
    assert sum(ends) == 1
    assert [info["success"] for *_, info in steps] == ends
    assert not any(truncated for _, _, _, truncated, _ in steps)
    env.close()


# The demonstrations


def _episodes(root: str) -> list[dict[str, NDArray[Any]]]:
    frames, lengths = lerobot_format.read(Path(root))
    ends = np.cumsum(lengths)
    return [{key: frames[key][end - n : end] for key in frames} for end, n in zip(ends, lengths, strict=True)]


def test_the_expert_solves_every_recorded_layout(root: str) -> None:
    episodes = _episodes(root)
    assert len(episodes) == EPISODES + VAL_EPISODES
    for episode in episodes:
        last = episode["observation.environment_state"][-1]
        assert np.linalg.norm(last[:3] - last[7:]) <= 0.07  # Meta-World's own measure of success
        assert len(episode["action"]) < 100


def test_written_episodes_come_back_bit_equal(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    written = [
        {
            "observation.state": generator.normal(size=(n, 3)).astype(np.float32),
            "action": generator.normal(size=(n, 2)).astype(np.float32),
        }
        for n in (4, 1, 7)
    ]
    lerobot_format.write(
        tmp_path,
        written,
        names={"observation.state": ["a", "b", "c"], "action": ["d", "e"]},
        task="Do it.",
        fps=10,
        robot_type="toy",
        splits={"train": "0:3"},
    )

    frames, lengths = lerobot_format.read(tmp_path)
    assert lengths.tolist() == [4, 1, 7]
    for key in ("observation.state", "action"):
        expected = np.concatenate([episode[key] for episode in written])
        assert frames[key].dtype == np.float32
        assert frames[key].tobytes() == expected.tobytes()
    assert frames["index"].tolist() == list(range(12))
    assert frames["frame_index"].tolist() == [0, 1, 2, 3, 0, 0, 1, 2, 3, 4, 5, 6]
    assert frames["episode_index"].tolist() == [0] * 4 + [1] + [2] * 7
    assert np.array_equal(frames["timestamp"][:4], np.array([0.0, 0.1, 0.2, 0.3], np.float32))

    actions = np.concatenate([episode["action"] for episode in written]).astype(np.float64)
    stats = json.loads((tmp_path / "meta/stats.json").read_text())["action"]
    assert np.allclose(stats["mean"], np.mean(actions, axis=0), rtol=1e-12)
    assert np.allclose(stats["std"], np.std(actions, axis=0), rtol=1e-12)
    assert np.allclose(stats["q10"], np.quantile(actions, 0.1, axis=0), rtol=1e-12)
    assert stats["min"] == actions.min(0).tolist()
    assert stats["max"] == actions.max(0).tolist()
    assert stats["count"] == [12]


def test_a_recording_has_the_layout_that_lerobot_reads(root: str) -> None:
    info = json.loads((Path(root) / "meta/info.json").read_text())
    assert info["codebase_version"] == "v3.0"
    assert info["splits"] == {"train": "0:5", "val": "5:7"}
    assert info["features"]["action"] == {
        "dtype": "float32",
        "shape": [4],
        "names": ["dx", "dy", "dz", "grip"],
    }

    data = pq.ParquetFile(Path(root) / info["data_path"].format(chunk_index=0, file_index=0))
    assert data.num_row_groups == EPISODES + VAL_EPISODES
    assert str(data.schema_arrow.field("observation.state").type) == "fixed_size_list<element: float>[4]"
    assert data.schema_arrow.names == list(info["features"])

    tasks = pq.read_table(Path(root) / "meta/tasks.parquet")
    assert tasks.to_pydict() == {"task_index": [0], "task": [pick_place_data.WORDS]}
    assert json.loads(tasks.schema.metadata[b"pandas"])["index_columns"] == ["task"]

    rows = pq.read_table(Path(root) / "meta/episodes/chunk-000/file-000.parquet").to_pylist()
    assert [row["dataset_from_index"] for row in rows[1:]] == [row["dataset_to_index"] for row in rows[:-1]]
    assert rows[-1]["dataset_to_index"] == info["total_frames"] == sum(row["length"] for row in rows)
    assert rows[0]["tasks"] == [pick_place_data.WORDS]
    assert rows[2]["stats/action/mean"] == _episodes(root)[2]["action"].astype(np.float64).mean(0).tolist()


def test_an_item_repeats_and_marks_the_last_action_past_the_end_of_its_episode(root: str) -> None:
    data = Demonstrations(root, EPISODES, VAL_EPISODES)
    first, second = _episodes(root)[:2]
    length = len(first["action"])

    item = data[length - 3]
    assert item["action_is_pad"].tolist() == [False] * 3 + [True] * 13
    assert np.array_equal(item["action"][:3], first["action"][-3:])
    assert np.array_equal(item["action"][3:], np.repeat(first["action"][-1:], 13, axis=0))
    assert not data[length - 16]["action_is_pad"].any()
    assert np.array_equal(data[length]["action"], second["action"][:16])
    assert np.array_equal(data[length]["observation.state"], second["observation.state"][0])


def test_the_splits_share_no_episode_and_cover_the_recording(root: str) -> None:
    episodes = _episodes(root)
    train, val = (Demonstrations(root, EPISODES, VAL_EPISODES, split=split) for split in ("train", "val"))
    assert len(train) == sum(len(episode["index"]) for episode in episodes[:EPISODES])
    assert len(val) == sum(len(episode["index"]) for episode in episodes[EPISODES:])
    assert np.array_equal(val[0]["observation.state"], episodes[EPISODES]["observation.state"][0])
    assert val[len(val) - 1]["action_is_pad"].tolist() == [False] + [True] * 15


def test_the_statistics_are_of_the_frames_of_the_split(root: str) -> None:
    stats = Demonstrations(root, EPISODES, VAL_EPISODES).stats
    for key, found in stats.items():
        values = np.concatenate([episode[key] for episode in _episodes(root)[:EPISODES]]).astype(np.float64)
        assert found["std"].dtype == torch.float32
        assert torch.equal(found["max"], torch.from_numpy(values.max(0)).float())
        # Both are computed in float64; one unit in the last place of float32 is 1.2e-7.
        assert np.allclose(found["mean"], values.mean(0), rtol=2e-7)
        assert np.allclose(found["std"], values.std(0), rtol=2e-7)


def test_a_recording_of_another_size_is_refused(root: str) -> None:
    with pytest.raises(ConfigError, match=r"split as .*0:5.*0:6.* was asked for"):
        Demonstrations(root, 6, VAL_EPISODES)


@pytest.mark.parametrize("damage", ["cut", "flip", "missing"])
def test_a_damaged_recording_is_refused_with_the_remedy(root: str, tmp_path: Path, damage: str) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(root, copy)
    file = copy / "data/chunk-000/file-000.parquet"
    content = bytearray(file.read_bytes())
    if damage == "cut":
        file.write_bytes(content[: len(content) // 2])
    elif damage == "flip":
        content[len(content) // 4] ^= 1
        file.write_bytes(content)
    else:
        file.unlink()
    with pytest.raises(PolicyfitError, match=r"cannot be read: .*\nDelete that folder"):
        Demonstrations(str(copy), EPISODES, VAL_EPISODES)


def test_an_interrupted_recording_leaves_no_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(lerobot_format, "_write_tasks", cut)
    with pytest.raises(KeyboardInterrupt), contextlib.redirect_stdout(io.StringIO()):
        pick_place_data.record(tmp_path / "new", 1, 1)
    assert not (tmp_path / "new").exists()


# The policy


def test_the_policy_has_the_size_of_the_description() -> None:
    assert sum(parameter.numel() for parameter in ActPolicy().parameters()) == 105_732


def test_the_policy_can_be_rebuilt_from_its_config() -> None:
    policy = ActPolicy(chunk=4, execute=2, layers=1)
    again = ActPolicy(**json.loads(json.dumps(policy.config)))
    again.load_state_dict(policy.state_dict())
    assert again.config == policy.config


def test_padded_actions_change_neither_loss_nor_gradients(policy: ActPolicy) -> None:
    batch = _batch(3)
    changed = {**batch, "action": batch["action"].clone()}
    changed["action"][:, 10:] = 1000.0
    results = []
    for each in (batch, changed):
        policy.zero_grad()
        loss, metrics = policy(each)
        loss.backward()
        assert policy.head.weight.grad is not None
        results.append((loss.item(), metrics["l1"].item(), policy.head.weight.grad.clone()))
    assert results[0][:2] == results[1][:2]
    assert torch.equal(results[0][2], results[1][2])


def test_the_loss_is_the_mean_absolute_error_of_real_actions(policy: ActPolicy) -> None:
    batch = _batch(3)
    torch.nn.init.zeros_(policy.head.weight)
    torch.nn.init.zeros_(policy.head.bias)
    loss, metrics = policy(batch)  # predicts the mean action, 0.5, everywhere
    expected = (batch["action"][:, :10] - 0.5).abs().mean()
    # A sum of 120 float32 numbers, in two orders.
    torch.testing.assert_close(metrics["l1"], expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(loss, expected / 2.0, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_policy_computes_in_16_bit_and_hands_out_float32(policy: ActPolicy, dtype: torch.dtype) -> None:
    batch = _batch(8)
    exact, _ = policy(batch)
    with torch.autocast("cpu", dtype):
        loss, _ = policy(batch)
        action = policy.select_action(batch)
    loss.backward()
    assert loss.dtype == action.dtype == torch.float32
    assert loss.item() != exact.item()
    # bfloat16 keeps 8 bits, 0.4 % a rounding; the mean over 320 errors of both signs stays well within one.
    assert loss.item() == pytest.approx(exact.item(), rel=4e-3)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in policy.parameters())


def test_statistics_are_buffers_and_nan_until_they_are_set() -> None:
    policy = ActPolicy()
    names = {"obs_mean_F", "obs_std_F", "action_mean_A", "action_std_A"}
    assert names == {name for name, _ in policy.named_buffers()}
    assert names <= set(policy.state_dict())
    assert all(policy.state_dict()[name].isnan().all() for name in names)
    assert policy(_batch(2))[0].isnan()
    with pytest.raises(ConfigError, match="has no normalisation statistics"):
        policy.select_action(_batch(2))

    policy.set_statistics(_statistics())
    again = ActPolicy()
    again.load_state_dict(policy.state_dict())
    assert torch.equal(again.select_action(_batch(2)), policy.select_action(_batch(2)))


def test_a_constant_feature_is_centred_and_not_blown_up(policy: ActPolicy) -> None:
    stats = _statistics()
    stats["observation.state"]["std"][0] = 0.0
    policy.set_statistics(stats)
    assert policy.obs_std_F[:2].tolist() == [pytest.approx(1e-4), 2.0]


def test_statistics_of_another_width_or_not_finite_are_refused(policy: ActPolicy) -> None:
    stats = _statistics()
    stats["action"]["std"] = torch.ones(3)
    with pytest.raises(ConfigError, match=r"std of action has shape \(3,\), but this policy takes \(4,\)"):
        policy.set_statistics(stats)
    stats["action"]["std"] = torch.tensor([1.0, 1.0, float("inf"), 1.0])
    with pytest.raises(ConfigError, match="std of action is not finite"):
        policy.set_statistics(stats)


def test_actions_are_replanned_every_8_steps_and_after_a_reset(
    policy: ActPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[Tensor] = []
    predict = policy._predict

    def spy(observation: dict[str, Tensor]) -> Tensor:
        plans.append(predict(observation))
        return plans[-1]

    monkeypatch.setattr(policy, "_predict", spy)
    actions = [policy.select_action(_batch(3)) for _ in range(17)]
    assert len(plans) == 3
    assert torch.equal(torch.stack(actions[:8], 1), plans[0][:, :8] * 2.0 + 0.5)
    policy.reset()
    policy.select_action(_batch(3))
    assert len(plans) == 4


def test_an_execute_beyond_the_chunk_is_refused() -> None:
    with pytest.raises(ConfigError, match="got execute=9 with chunk=8"):
        ActPolicy(chunk=8, execute=9)


def test_the_custom_callback_is_due_every_so_many_steps_and_not_before_the_first() -> None:
    callback = QuickRollout(every=250)
    assert [step for step in range(0, 1001, 50) if callback.due(step)] == [250, 500, 750, 1000]
