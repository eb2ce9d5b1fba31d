"""DDP in several processes: the contract, what it adds, and how ranks lose each other."""

from __future__ import annotations

import os
import signal
import socket
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
import torch
from distribution_contract import CPU, PROMISES, Toy, all_samples, assert_equal, expected_gradients, joined, own
from processes import outcomes_of, run
from torch import Tensor, nn

from policyfit.strategies import membership
from policyfit.strategies.ddp import DDP
from policyfit.strategies.device import CPUDevice
from policyfit.strategies.fsdp import FSDP


def error_of(function: Callable[[], Any]) -> tuple[str, str]:
    try:
        function()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def keep_all() -> None:
    for promise in PROMISES:
        promise(DDP)


def test_ddp_keeps_every_promise() -> None:
    run(keep_all)


# Gradients ---------------------------------------------------------------------------------------------------


def count_reductions() -> list[int]:
    with joined(DDP) as strategy:
        policy = Toy()
        module: Any = strategy.wrap(policy)
        sent: list[int] = []

        def hook(bucket: Any) -> torch.futures.Future[Tensor]:
            sent[-1] += 1
            future: torch.futures.Future[Tensor] = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future

        module.register_comm_hook(None, lambda state, bucket: hook(bucket))
        for micro_batch in range(4):
            sent.append(0)
            with strategy.micro_batch(module, closes=micro_batch % 2 == 1):
                module(all_samples()).backward()
        return sent


def test_ddp_sends_gradients_once_a_window() -> None:
    first, second = run(count_reductions)
    assert first == second == [0, 1, 0, 1]


class Partly(nn.Module):
    """A policy that leaves ``unused`` out, or from its second forward on ``sometimes``."""

    def __init__(self, *, later: bool) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(3, 1), nn.Linear(3, 1)
        self.later, self.calls = later, 0

    def forward(self, data: Tensor) -> Tensor:
        self.calls += 1
        loss = self.used(data).mean()
        if self.later and self.calls < 2:
            loss = loss + self.unused(data).mean()
        result: Tensor = loss
        return result


def train_partly(later: bool, look: bool) -> tuple[str, str]:
    with joined(lambda: DDP(find_unused_parameters=look)) as strategy:
        policy = Partly(later=later)
        module = strategy.wrap(policy)

        def updates() -> None:
            for _ in range(4):
                with strategy.micro_batch(module, closes=True):
                    module(all_samples()).backward()
                policy.zero_grad()

        return error_of(updates)


@pytest.mark.parametrize("later", [False, True])
def test_ddp_names_parameters_that_got_no_gradient(later: bool) -> None:
    for kind, message in run(train_partly, later, False):
        assert kind == "ConfigError"
        assert "not averaged: unused.weight, unused.bias.\nUse them in the loss, freeze them" in message


def train_with_hooks() -> list[float]:
    with joined(DDP) as strategy:
        policy, seen = Toy(), list[float]()
        scale: Any = policy.scale
        scale.register_hook(lambda gradient: seen.append(float(gradient.abs().sum())))
        scale.register_post_accumulate_grad_hook(lambda parameter: seen.append(-1.0))
        module = strategy.wrap(policy)
        strategy.backward_of_nothing(module, closes=True)
        with strategy.micro_batch(module, closes=True):
            module(own(all_samples(), strategy)).backward()
        return seen


def finish_with_hooks() -> int:
    with joined(DDP) as strategy:
        policy, seen = Toy(), list[Tensor]()

        def fail_at_the_second(gradient: Tensor) -> None:
            seen.append(gradient)
            if len(seen) == 2:
                raise KeyError

        for parameter in policy.parameters():
            hook: Any = parameter.register_hook
            hook(fail_at_the_second)
        module = strategy.wrap(policy)
        with suppress(KeyError), strategy.micro_batch(module, closes=True):
            module(all_samples()).backward()
        strategy.stand_in(module, closes=True)
        return len(seen)


def test_zeros_are_not_for_the_hooks_of_a_user() -> None:
    for found in run(train_with_hooks):
        assert len(found) == 2
        assert found[0] > 0.0 > found[1]
    assert run(finish_with_hooks) == [2, 2]


def train_thawed() -> tuple[str, str]:
    with joined(DDP) as strategy:
        policy = Toy()
        policy.scale.requires_grad_(False)
        module = strategy.wrap(policy)

        def updates() -> None:
            for _ in range(2):
                with strategy.micro_batch(module, closes=True):
                    module(all_samples()).backward()
                policy.zero_grad()
                policy.scale.requires_grad_(True)

        return error_of(updates)


def test_ddp_refuses_to_train_what_thaws_in_mid_run() -> None:
    for kind, message in run(train_thawed):
        assert kind == "ConfigError"
        assert "only of what could be trained then: scale.\nBegin with all that is ever trained thawed" in message


def warned(later: bool, look: bool) -> list[str]:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert train_partly(later, look) == ("", "")
    return [str(one.message) for one in told if "find_unused" in str(one.message)]


def test_ddp_trains_with_unused_parameters_when_told_to_look() -> None:
    assert run(warned, True, True) == [[], []]


def train_in_one_bucket_view() -> None:
    with joined(DDP) as strategy:
        policy = Toy()
        module = strategy.wrap(policy)
        for _ in range(3):
            module(own(all_samples(), strategy)).backward()
            gradients = [p.grad for p in policy.parameters() if p.grad is not None]
            assert_equal(gradients, expected_gradients())
            torch._foreach_mul_(gradients, torch.tensor(0.5))
            torch._foreach_clamp_min_(gradients, -1.0)
            assert min(float(g.min()) for g in gradients) >= -1.0
            for parameter in policy.parameters():
                parameter.grad = None


def test_ddp_gradients_can_be_scaled_and_dropped_in_place() -> None:
    run(train_in_one_bucket_view)


# Setting up --------------------------------------------------------------------------------------------------


def build_unlike(sharded: bool) -> tuple[str, str]:
    with joined(lambda: FSDP(wrap=["Linear"]) if sharded else DDP()) as strategy:
        policy = nn.Sequential(nn.Linear(3 + strategy.rank, 1))
        return error_of(lambda: strategy.wrap(policy))


@pytest.mark.parametrize("sharded", [False, True])
def test_policy_that_differs_between_ranks_is_refused_by_rank(sharded: bool) -> None:
    for kind, message in run(build_unlike, sharded):
        assert kind == "DistributedError"
        assert message.splitlines()[0] == (
            "Rank 1 built another policy than rank 0: 0.weight ([1, 4], float32, trained), where that has 0.weight "
            "([1, 3], float32, trained)."
        )


def move_a_buffer() -> tuple[str, str]:
    with joined(DDP) as strategy:
        policy = Toy()
        strategy.wrap(policy)
        strategy.ready(policy)
        policy.mean = torch.zeros(3, device="meta")
        return error_of(strategy.sync_buffers)


def test_buffer_that_left_the_device_is_named() -> None:
    for kind, message in run(move_a_buffer):
        assert kind == "DistributedError"
        form = "float32 of shape (3,) on"
        assert message.splitlines()[0] == f"The buffer mean was {form} cpu, but is {form} meta."


def set_up_accelerate_first(alone: bool) -> tuple[str, str]:
    from accelerate import Accelerator  # type: ignore[import-untyped]

    Accelerator(cpu=not alone, mixed_precision="no" if alone else "bf16")
    strategy = DDP()

    def begin() -> None:
        strategy.setup(CPU)
        strategy.wrap(Toy())

    try:
        return error_of(begin)
    finally:
        strategy.teardown()


@pytest.mark.parametrize("alone", [True, False])
def test_accelerate_that_was_set_up_otherwise_is_refused(alone: bool) -> None:
    for kind, message in run(set_up_accelerate_first, alone):
        assert kind == "DistributedError"
        assert message.startswith("accelerate was already set up in this process")


def join_a_group_of_others() -> bool:
    torch.distributed.init_process_group("gloo")
    with joined(DDP) as strategy:
        assert strategy.gather(strategy.rank) == [0, 1]
    return torch.distributed.is_initialized()


def test_group_that_was_there_is_used_and_left() -> None:
    assert run(join_a_group_of_others) == [True, True]


def wait_for_a_rank_that_never_comes() -> tuple[str, str]:
    if os.environ["RANK"] == "1":
        return "", ""
    return error_of(lambda: DDP(timeout=1).setup(CPU))


def test_ranks_that_do_not_find_each_other_give_up_in_time() -> None:
    (kind, message), _ = run(wait_for_a_rank_that_never_comes)
    assert kind == "DistributedError"
    assert message.startswith("The processes of this run did not find each other within 1 s")


def outlive_the_launcher() -> tuple[str, str]:
    membership._AGENT_ANSWERS = timedelta(seconds=0.2)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ["MASTER_PORT"] = str(free.getsockname()[1])
    return error_of(lambda: DDP().setup(CPU))


def test_ranks_whose_launcher_has_gone_do_not_wait_for_it() -> None:
    for kind, message in run(outlive_the_launcher, limit_s=20.0):
        assert kind == "DistributedError"
        assert "The client socket has timed out after 200ms" in message


def take_the_wrong_device() -> tuple[str, str]:
    device = CPUDevice()
    device.device = torch.device("cpu", 1 - int(os.environ["LOCAL_RANK"]))
    return error_of(lambda: DDP().setup(device))


def test_rank_on_the_device_of_another_is_refused() -> None:
    for rank, (kind, message) in enumerate(run(take_the_wrong_device)):
        assert kind == "DistributedError"
        assert f"Rank {rank} is local rank {rank} of its machine, but its device is cpu:{1 - rank}" in message


# Losing each other -------------------------------------------------------------------------------------------


def train_until_something_happens(what: str) -> tuple[str, bool, int]:
    strategy = DDP(timeout=2 if what == "sleep" else 60)
    strategy.setup(CPU)
    policy = Toy()
    module = strategy.wrap(policy)
    try:
        for update in range(10):
            module(own(all_samples(), strategy)).backward()
            if update == 3 and strategy.rank == 1:
                if what == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                if what == "sleep":
                    time.sleep(3.3)
                if what == "raise":
                    raise ValueError("a bad sample")
            policy.zero_grad()
    except RuntimeError as error:
        lost = strategy.lost(error)
        strategy.teardown()
        return str(lost), strategy.is_lost(error), lost.exit_code
    except ValueError as error:
        strategy.report(error)
        strategy.teardown()
        raise
    raise AssertionError("nothing happened")


def test_error_of_user_code_about_a_folder_called_gloo_loses_nobody() -> None:
    assert not DDP().is_lost(RuntimeError("cannot read /data/gloo/episode_7.bin"))
    assert not DDP().is_lost(RuntimeError("Application timeout caused pair closure of the gripper"))
    assert DDP().is_lost(RuntimeError("[/src/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed"))
    assert DDP().is_lost(RuntimeError("Application timeout caused pair closure"))


def test_rank_that_was_killed_is_named_by_every_other_in_time() -> None:
    first, dead, last = outcomes_of(train_until_something_happens, "kill", ranks=3, limit_s=40)
    assert dead.exit_code == -signal.SIGKILL
    for survivor in (first, last):
        message, *rest = survivor.value
        assert rest == [True, 1]
        assert message.startswith("Rank 1 no longer answers: called for 1 s after RuntimeError: ")
        assert message.splitlines()[1].startswith("Start the run again in its run_dir with --resume=auto: it goes on")


def test_rank_that_raised_tells_the_others_why() -> None:
    first, raised = outcomes_of(train_until_something_happens, "raise", limit_s=40)
    assert "ValueError: a bad sample" in raised.error
    assert first.value[0].splitlines()[0] == "Rank 1 failed: ValueError: a bad sample"


def test_rank_that_is_busy_elsewhere_is_named_when_the_time_is_up() -> None:
    first, _ = outcomes_of(train_until_something_happens, "sleep", limit_s=40)
    message = first.value[0]
    assert message.startswith("A collective failed; Rank 1 did not join it. The error was RuntimeError: ")
    assert "use DDP(timeout=...) with more than 2 seconds" in message


def lose_the_store() -> str:
    strategy = DDP(timeout=3)
    strategy.setup(CPU)

    class Gone:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("Broken pipe")

    assert strategy._roll_call is not None
    strategy._roll_call._store = Gone()  # type: ignore[assignment]
    strategy.report(ValueError("nobody hears it"))
    message = str(strategy.lost(RuntimeError("/gloo/ Connection reset")))
    strategy.teardown()
    return message


def test_store_that_is_gone_is_told_and_ends_no_report() -> None:
    for message in run(lose_the_store):
        assert "the place where they meet (MASTER_ADDR) no longer answers" in message
