"""Process-wide switches come back."""

from __future__ import annotations

import signal
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from torch.utils.data._utils import signal_handling

from policyfit import ConfigError
from policyfit.strategies.facts import MachineFacts
from policyfit.trainer.process import choose_threads, dead_workers_wait_for_a_draw, process_state


@pytest.mark.parametrize(
    ("device", "parameters", "environment", "threads", "reason"),
    [
        ("cpu", 1000, {}, 1, "1,000 parameters are too few to share"),
        ("cpu", 3_000_000, {}, None, "3,000,000 parameters keep several threads busy"),
        ("cpu", 1000, {"OMP_NUM_THREADS": "2"}, None, "OMP_NUM_THREADS is set"),
        ("cpu", 1000, {"OMP_NUM_THREADS": ""}, 1, "too few"),
        ("cuda", 1000, {}, None, "the accelerator computes"),
    ],
)
def test_threads_follow_the_size_of_the_policy_unless_somebody_chose(
    device: str, parameters: int, environment: dict[str, str], threads: int | None, reason: str
) -> None:
    found, why = choose_threads(device, parameters, MachineFacts(environment=tuple(environment.items())))
    assert found == threads
    assert reason in why


def snapshot() -> tuple[Any, ...]:
    return (
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.benchmark,
        torch.get_num_threads(),
    )


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("warn_only", [None, False, True])
def test_every_switch_comes_back_also_after_an_error(fails: bool, warn_only: bool | None) -> None:
    if warn_only is not None:
        torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        before = snapshot()
        with pytest.raises(KeyError) if fails else nullcontext():
            with process_state(deterministic=True, threads=2, device_type="cpu", facts=MachineFacts()):
                assert torch.are_deterministic_algorithms_enabled()
                assert not torch.is_deterministic_algorithms_warn_only_enabled()
                assert torch.get_num_threads() == 2
                torch.set_default_dtype(torch.float64)
                torch.backends.cudnn.benchmark = True
                if fails:
                    raise KeyError
        assert snapshot() == before
    finally:
        torch.use_deterministic_algorithms(False)


def test_without_wishes_nothing_is_changed() -> None:
    before = snapshot()
    with process_state(deterministic=False, threads=None, device_type="cpu", facts=MachineFacts()):
        assert snapshot() == before


def test_deterministic_on_cuda_needs_its_workspace_and_on_the_cpu_does_not() -> None:
    before = snapshot()
    with pytest.raises(ConfigError, match=r"CUBLAS_WORKSPACE_CONFIG=:4096:8"):
        with process_state(deterministic=True, threads=1, device_type="cuda", facts=MachineFacts()):
            pytest.fail("it began")
    assert snapshot() == before
    with process_state(deterministic=True, threads=None, device_type="cpu", facts=MachineFacts()):
        pass
    facts = MachineFacts(environment=(("CUBLAS_WORKSPACE_CONFIG", ":4096:8"),))
    with process_state(deterministic=True, threads=None, device_type="cuda", facts=facts):
        pass


def test_a_worker_that_dies_is_missed_by_the_next_draw_and_not_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    loader: DataLoader[int] = DataLoader([0, 1, 2], num_workers=1)  # type: ignore[arg-type]
    monkeypatch.setattr(signal_handling, "_SIGCHLD_handler_set", False)
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for _ in range(2):  # the second time torch has set its handler
        with dead_workers_wait_for_a_draw():
            assert len(list(loader)) == 3
            assert signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL
        assert len(list(loader)) == 3
        assert callable(signal.getsignal(signal.SIGCHLD))
    signal.signal(signal.SIGCHLD, before)
