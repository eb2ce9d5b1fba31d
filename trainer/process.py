"""The process-wide switches that a run sets, and how they come back."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..strategies.errors import ConfigError
from ..strategies.facts import MachineFacts

_SMALL = 3_000_000  # parameters; below, a second CPU thread costs more in hand-over than it computes


def choose_threads(device_type: str, parameters: int, facts: MachineFacts) -> tuple[int | None, str]:
    """How many CPU threads torch is to use for this run, and why; ``None`` leaves torch's choice.

    Source: measured on 2 cores: an MLP step took 5 ms of CPU time on one thread, 75 ms on two.
    """
    if facts.variable("OMP_NUM_THREADS"):
        return None, "OMP_NUM_THREADS is set"
    if device_type != "cpu":
        return None, "the accelerator computes"
    if parameters >= _SMALL:
        return None, f"{parameters:,} parameters keep several threads busy"
    return 1, f"{parameters:,} parameters are too few to share; set OMP_NUM_THREADS to choose"


@contextmanager
def dead_workers_wait_for_a_draw() -> Iterator[None]:
    """Let a loader's worker that dies be missed by the next draw alone.

    Torch would raise in whatever runs at that moment, right after a collective too, so that a rank would not know where
    the others are.

    Source: torch.utils.data._utils.signal_handling, which sets its handler of SIGCHLD once a process.
    """
    if not hasattr(signal, "SIGCHLD"):  # Windows, where torch has no handler either
        yield
        return
    from torch.utils.data._utils import signal_handling

    is_main = threading.current_thread() is threading.main_thread()
    handler, is_set = signal.getsignal(signal.SIGCHLD), signal_handling._SIGCHLD_handler_set
    signal_handling._SIGCHLD_handler_set = True
    if is_main and is_set:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        signal_handling._SIGCHLD_handler_set = is_set
        if is_main and is_set:
            signal.signal(signal.SIGCHLD, handler)


@contextmanager
def process_state(*, deterministic: bool, threads: int | None, device_type: str, facts: MachineFacts) -> Iterator[None]:
    """Set what the run needs; afterwards, also after an error, everything is as it was.

    Raises:
        ConfigError: ``deterministic`` on CUDA without the workspace setting that cuBLAS needs.
    """
    default_dtype = torch.get_default_dtype()
    algorithms = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark = torch.backends.cudnn.benchmark
    num_threads = torch.get_num_threads()
    try:
        if threads is not None:
            torch.set_num_threads(threads)
        if deterministic:
            if device_type == "cuda" and not facts.variable("CUBLAS_WORKSPACE_CONFIG"):
                raise ConfigError(
                    "deterministic=True on cuda needs CUBLAS_WORKSPACE_CONFIG=:4096:8 in the environment before the "
                    "first matmul, and this process has started cuda without it.\n"
                    "Start it with CUBLAS_WORKSPACE_CONFIG=:4096:8 set."
                )
            torch.use_deterministic_algorithms(True)
            torch.backends.cudnn.benchmark = False
        yield
    finally:
        torch.set_default_dtype(default_dtype)
        torch.use_deterministic_algorithms(algorithms, warn_only=warn_only)
        torch.backends.cudnn.benchmark = benchmark
        torch.set_num_threads(num_threads)
