"""Run a function in several processes that find each other as torchrun's do, within a time limit.

The processes are forked from a clean server that has imported torch once. The function must stand at the top level
of a file; that file is loaded anew in each process, so it may be a test's own.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "accelerate",
        "gymnasium",
        "pytest",
        "rich.console",
        "torch._dynamo",
        "torch.distributed.algorithms.ddp_comm_hooks.default_hooks",
        "torch.distributed.fsdp",
        "policyfit",
    ]
)


@dataclass(frozen=True, slots=True)
class Rank:
    """What became of one process: its value, its traceback, or neither when it did not come to say."""

    value: Any = None
    error: str = ""
    exit_code: int | None = 0


def run(function: Callable[..., Any], *arguments: Any, ranks: int = 2, limit_s: float = 60.0) -> list[Any]:
    """What the function returned in each process.

    Raises:
        AssertionError: In one of them it raised, died or ran past the limit; with every traceback.
    """
    outcomes = outcomes_of(function, *arguments, ranks=ranks, limit_s=limit_s)
    failed = {rank: one.error or f"exit code {one.exit_code}" for rank, one in enumerate(outcomes) if one.exit_code}
    if failed:
        raise AssertionError("\n".join(f"rank {rank}: {error}" for rank, error in failed.items()))
    return [one.value for one in outcomes]


def outcomes_of(function: Callable[..., Any], *arguments: Any, ranks: int = 2, limit_s: float = 60.0) -> list[Rank]:
    """What became of each process; those that run past the limit are killed, with exit code -9."""
    # As under torchrun the store outlives the ranks, and its port is taken before they start.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=limit_s))
    task = (function.__code__.co_filename, function.__qualname__, arguments)
    readers: list[Connection] = []
    processes = []
    for rank in range(ranks):
        reader, writer = _CONTEXT.Pipe(duplex=False)
        process = _CONTEXT.Process(target=_run, args=(writer, *task, _environment(rank, ranks, store.port)))
        process.start()
        writer.close()
        readers.append(reader)
        processes.append(process)
    deadline = time.monotonic() + limit_s
    said: dict[int, tuple[Any, str]] = {}
    waiting: dict[Any, int] = {reader: rank for rank, reader in enumerate(readers)}
    while waiting and (ready := wait(list(waiting), max(0.0, deadline - time.monotonic()))):
        for reader in (reader for reader in readers if reader in ready):
            rank = waiting.pop(reader)
            try:
                said[rank] = reader.recv()
            except EOFError:  # it died without a word
                continue
    outcomes = []
    for rank, process in enumerate(processes):
        process.join(max(0.1, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
        value, error = said.get(rank, (None, ""))
        outcomes.append(Rank(value, error, process.exitcode))
        process.close()
    return outcomes


def _environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "1",
    }


def _run(writer: Connection, file: str, name: str, arguments: tuple[Any, ...], environment: dict[str, str]) -> None:
    import torch

    from policyfit.strategies import roll_call

    os.environ.update(environment)
    torch.set_num_threads(1)
    # These ranks are on one machine, and are many in a suite.
    roll_call.RollCall.patience_s, roll_call._LISTEN_S = 1.0, 0.05
    try:
        spec = importlib.util.spec_from_file_location(Path(file).stem, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        writer.send((getattr(module, name)(*arguments), ""))
    except BaseException:
        writer.send((None, traceback.format_exc()))
        os._exit(1)
