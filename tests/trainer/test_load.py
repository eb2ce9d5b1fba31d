"""From a checkpoint to a policy that acts."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from toys import assert_equal, weights

from policyfit import Checkpoint, CheckpointError, ConfigError, PrecisionError, Trainer, load


@pytest.fixture(autouse=True)
def importable() -> Iterator[None]:
    sys.path.insert(0, str(Path(__file__).parent))
    yield
    sys.path.remove(str(Path(__file__).parent))


class Demonstrations:
    """A dataset with the statistics of its features."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = 5.0 + 2.0 * torch.randn(24, 6, generator=generator)
        self.y = torch.randn(24, 3, generator=generator)
        self.stats = {"x": {"mean": self.x.mean(0), "std": self.x.std(0)}}

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "y": self.y[index]}


OBSERVATION = {"x": 5.0 + torch.arange(6.0).reshape(1, 6)}


def trained(kind: str = "Acting", *arguments: Any, precision: Any = "no", **settings: Any) -> Any:
    import acting

    torch.manual_seed(0)
    policy = getattr(acting, kind)(*arguments)
    trainer = Trainer(
        "cpu", precision, run_dir="run", max_steps=3, callbacks=[Checkpoint()], default_callbacks=False, **settings
    )
    trainer.fit(policy, Demonstrations())
    return policy


def action_of(policy: Any, observation: Any = OBSERVATION) -> Tensor:
    action: Tensor = policy.select_action(observation)
    return action


def test_a_loaded_policy_acts_as_the_trained_one_from_any_path_to_its_checkpoint() -> None:
    policy = trained("Acting", 12, 3.0, 0.9).eval()
    with torch.no_grad():
        expected = policy.select_action(OBSERVATION)
    for path in ("run", "run/checkpoints", "run/checkpoints/last", "run/checkpoints/000003"):
        loaded: Any = load(path)
        assert_equal(weights(loaded), weights(policy))
        assert loaded.config == {"width": 12, "scale": 3.0, "dropout": 0.9}
        assert torch.equal(action_of(loaded), expected)


def test_a_loaded_policy_has_its_statistics_and_is_in_eval_mode_without_gradients() -> None:
    trained()
    loaded: Any = load("run")
    assert torch.equal(loaded.mean, Demonstrations().stats["x"]["mean"])
    assert not any(module.training for module in loaded.modules())
    assert torch.equal(action_of(loaded), action_of(loaded))  # no dropout
    assert not action_of(loaded).requires_grad
    assert loaded.grad_was_on is False


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_actions_are_float32_whatever_the_precision_of_the_run(precision: str) -> None:
    policy = trained(precision=precision).eval()
    loaded: Any = load("run")
    action = action_of(loaded)
    assert action.dtype == torch.float32
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
        assert torch.equal(action, policy.select_action(OBSERVATION).float())


def test_another_precision_can_be_asked_for() -> None:
    trained(precision="bf16")
    exact: Any = load("run", precision="no")
    rounded: Any = load("run")
    assert not torch.equal(action_of(exact), action_of(rounded))
    torch.testing.assert_close(action_of(exact), action_of(rounded), rtol=0.05, atol=0.05)  # 8 bits


def test_a_precision_that_is_not_here_is_refused_with_one_that_is() -> None:
    from policyfit import FP16

    trained(precision=FP16({"init_scale": 8.0}, allow_cpu=True))
    with pytest.raises(PrecisionError, match=r"fp16.*cpu.*\n.*precision='no'"):
        load("run", device="cpu")
    assert action_of(load("run", device="cpu", precision="no")).dtype == torch.float32
    assert action_of(load("run", device="cpu", precision=FP16(allow_cpu=True))).dtype == torch.float32


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_observations_may_be_arrays(dtype: Any) -> None:
    trained()
    loaded: Any = load("run")
    array = OBSERVATION["x"].numpy().astype(dtype)
    assert torch.equal(action_of(loaded, {"x": array}), action_of(loaded))


def test_numbers_of_discrete_actions_stay_whole() -> None:
    trained("Discrete", precision="bf16")
    loaded: Any = load("run")
    chosen = loaded.select_action(OBSERVATION)
    assert chosen["action"].dtype == torch.int64
    assert chosen["scores"].dtype == torch.float32


def test_a_policy_whose_class_takes_one_config_is_built_from_it() -> None:
    import acting

    trained("ConfiguredActing", acting.ActingConfig(width=10, scale=2.0))
    loaded: Any = load("run")
    assert loaded.config == acting.ActingConfig(width=10, scale=2.0)
    assert loaded.net[0].out_features == 10


def test_a_class_without_arguments_needs_no_config() -> None:
    policy = trained("Fixed").eval()
    assert torch.equal(action_of(load("run")), action_of(policy))


def test_a_policy_that_does_not_say_its_arguments_is_not_built_with_others() -> None:
    import acting

    policy = trained("Silent", 12).eval()
    with pytest.raises(ConfigError, match=r"does not say how the policy was built.*\n.*policy=YourPolicy"):
        load("run")
    assert torch.equal(action_of(load("run", policy=acting.Silent(12))), action_of(policy))


def test_a_policy_of_another_size_is_refused_naming_the_parameter_and_both_shapes() -> None:
    import acting

    trained("Acting", 12)
    with pytest.raises(CheckpointError, match=r"do not fit Acting.*net\.0\.weight.*\[12, 6\].*\[5, 6\]"):
        load("run", policy=acting.Acting(5))


def test_statistics_of_another_width_are_refused_by_name_before_the_robot_moves() -> None:
    import acting

    trained()
    other = acting.Acting()
    other.register_buffer("mean", torch.zeros(7))
    with pytest.raises(CheckpointError, match=r"size mismatch for mean.*\[6\].*\[7\]"):
        load("run", policy=other)


def test_a_checkpoint_copied_elsewhere_needs_the_policy_and_says_so() -> None:
    import acting

    policy = trained().eval()
    shutil.copytree("run/checkpoints/000003", "elsewhere/best")
    Path("config.yaml").write_text("not: {this: one}\n")
    with pytest.raises(CheckpointError, match=r"a checkpoint alone never names code.*\n.*policy=YourPolicy"):
        load("elsewhere/best")
    assert torch.equal(action_of(load("elsewhere/best", policy=acting.Acting())), action_of(policy))


def test_a_run_copied_elsewhere_loads_as_it_is() -> None:
    policy = trained().eval()
    shutil.copytree("run", "robot/run", symlinks=True)
    shutil.rmtree("run")
    assert torch.equal(action_of(load("robot/run")), action_of(policy))


def test_a_run_without_its_config_says_what_to_do() -> None:
    trained()
    Path("run/config.yaml").unlink()
    with pytest.raises(CheckpointError, match=r"no config\.yaml.*\n.*policy=YourPolicy"):
        load("run")


def test_a_class_that_cannot_be_found_any_more_says_what_to_do() -> None:
    trained()
    config = Path("run/config.yaml")
    config.write_text(config.read_text().replace("acting.Acting", "acting.Gone"))
    with pytest.raises(ConfigError, match=r"holds no Gone(.*\n)*.*policy=YourPolicy"):
        load("run")


def test_what_is_no_checkpoint_is_refused() -> None:
    with pytest.raises(CheckpointError):
        load("nowhere")
    Path("empty").mkdir()
    with pytest.raises(CheckpointError):
        load("empty")


def test_a_policy_that_does_not_act_is_loaded_too() -> None:
    Trainer("cpu", run_dir="run", max_steps=1, callbacks=[Checkpoint()], default_callbacks=False).fit(
        Plain(), torch.utils.data.TensorDataset(torch.ones(4, 2))
    )
    assert isinstance(load("run", policy=Plain()), Plain)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 2)

    def forward(self, batch: list[Tensor]) -> Tensor:
        return self.net(batch[0]).square().mean()  # type: ignore[no-any-return]


def test_a_loaded_policy_can_be_trained_further() -> None:
    trained()
    policy: Any = load("run")
    before = weights(policy)
    Trainer("cpu", max_steps=2, default_callbacks=False).fit(policy, Demonstrations())
    assert policy.training
    assert not torch.equal(policy.net[0].weight, before["net.0.weight"])


def test_checksums_are_compared_unless_that_is_switched_off_and_sizes_always() -> None:
    policy = trained()
    file = Path("run/checkpoints/000003/pretrained_model/model.safetensors")
    held = bytearray(file.read_bytes())
    held[-1] ^= 1  # the last byte of the last tensor
    file.write_bytes(held)
    with pytest.raises(CheckpointError, match="its contents are not those that were written"):
        load(file.parents[1])
    changed = [n for n, v in load("run", verify=False).state_dict().items() if not torch.equal(v, weights(policy)[n])]
    assert len(changed) == 1

    def resume(verify: bool) -> int:
        trainer = Trainer("cpu", run_dir="run", max_steps=4, default_callbacks=False)
        trainer.fit(type(policy)(), Demonstrations(), resume="last", verify=verify)
        return trainer.resumed_step

    with pytest.raises(CheckpointError, match="There is no whole checkpoint"):
        resume(verify=True)
    assert resume(verify=False) == 3
    file.write_bytes(held[:-1])
    with pytest.raises(CheckpointError, match="bytes instead of"):
        load(file.parents[1], verify=False)
