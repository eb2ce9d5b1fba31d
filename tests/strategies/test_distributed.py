"""The single process keeps what every distribution promises, as its plain case."""

from __future__ import annotations

import torch
from torch import nn

from policyfit.strategies.distributed import SingleProcess


def test_a_single_process_is_the_main_one_of_one() -> None:
    alone = SingleProcess()
    assert (alone.name, alone.rank, alone.local_rank, alone.world_size, alone.is_main) == ("none", 0, 0, 1, True)


def test_a_single_process_leaves_policy_gradients_and_flags_alone() -> None:
    alone, policy = SingleProcess(), nn.Linear(2, 1)
    alone.setup(torch.device("cpu"))
    assert alone.wrap(policy) is policy
    with alone.accumulating(policy):
        policy(torch.ones(1, 2)).sum().backward()
    assert policy.weight.grad is not None
    assert policy.weight.grad.tolist() == [[1.0, 1.0]]
    flags = torch.tensor([0.0, 1.0])
    alone.reduce_max(flags)
    assert flags.tolist() == [0.0, 1.0]
    alone.teardown()


def test_only_rank_0_is_the_main_process() -> None:
    other = SingleProcess()
    other.rank = 1
    assert not other.is_main
