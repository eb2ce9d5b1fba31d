"""Facts as data: how a device is described, the environment, and the ranks that a launcher gave."""

from __future__ import annotations

import pytest
import torch

from policyfit.strategies.errors import ConfigError
from policyfit.strategies.facts import GPU, MachineFacts, describe, local_rank, world_size

CUDA, MPS, CPU = (torch.device(name) for name in ("cuda:0", "mps", "cpu"))


def test_describe_names_device_memory_and_cores() -> None:
    h200 = GPU(name="NVIDIA H200", capability=(9, 0), memory_bytes=150_121_545_728)
    mi300 = GPU(name="AMD Instinct MI300X", arch="gfx942", memory_bytes=192 * 2**30)
    assert describe(CUDA, MachineFacts(build="cuda", cuda=(h200,))) == "cuda:0 (NVIDIA H200, 139.8 GiB)"
    assert (
        describe(torch.device("cuda:1"), MachineFacts(build="rocm", cuda=(h200, mi300)))
        == "cuda:1 (AMD Instinct MI300X, gfx942, 192.0 GiB)"
    )
    assert describe(CPU, MachineFacts(cpu_count=16)) == "cpu (16 cores)"
    assert describe(CPU, MachineFacts(cpu_count=1)) == "cpu (1 core)"
    assert describe(MPS, MachineFacts(build="mps", mps=True, macos=(15, 1))) == "mps (Apple GPU, macOS 15.1)"
    assert describe(torch.device("cuda:4"), MachineFacts()) == "cuda:4"


def test_environment_tells_unset_from_empty() -> None:
    facts = MachineFacts(environment=(("HIP_VISIBLE_DEVICES", ""),))
    assert facts.variable("HIP_VISIBLE_DEVICES") == ""
    assert facts.variable("ROCR_VISIBLE_DEVICES") is None


def test_gpu_of_a_device_is_that_of_its_index() -> None:
    first, second, arc = GPU(name="first"), GPU(name="second"), GPU(name="arc")
    facts = MachineFacts(cuda=(first, second), xpu=(arc,))
    found = [facts.gpu(torch.device(name)) for name in ("cuda", "cuda:1", "cuda:2", "xpu:0", "cpu", "mps")]
    assert found == [first, second, None, arc, None, None]


def ranks(**environment: str) -> tuple[int, int]:
    facts = MachineFacts(environment=tuple(environment.items()))
    return world_size(facts), local_rank(facts)


def test_ranks_are_those_of_the_launcher_and_of_one_process_without_one() -> None:
    assert ranks() == ranks(WORLD_SIZE="", LOCAL_RANK="") == ranks(WORLD_SIZE="1", LOCAL_RANK="3") == (1, 0)
    assert ranks(WORLD_SIZE="8", LOCAL_RANK="3") == (8, 3)


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE must be a whole number, got 'two'"),
        ({"WORLD_SIZE": "-1"}, "WORLD_SIZE must be a whole number, got '-1'"),
        ({"WORLD_SIZE": "2", "LOCAL_RANK": "1.5"}, "LOCAL_RANK must be a whole number, got '1.5'"),
    ],
)
def test_rank_that_is_no_number_is_an_error_that_says_who_sets_it(environment: dict[str, str], found: str) -> None:
    with pytest.raises(ConfigError, match=rf"environment variable {found}\.\nUnset it, or start .* torchrun"):
        ranks(**environment)
