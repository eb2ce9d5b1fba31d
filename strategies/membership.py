"""The process groups of a run: joined as torchrun's processes find each other, and left as they were found.

``accelerate.PartialState`` joins the process group, with our time limit and our store. Python values have a group of
their own over gloo, since one rank may be long at work where they are exchanged (a rollout, a save), and gradients
have a time limit that must not wait for it.

Source: torch.distributed.rendezvous and TCPStore, by which torchrun's processes find each other. Its agent holds the
store, so that it outlives the ranks: what they leave there can be read when they are gone.
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
import os
import sys
import time
import warnings
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from .errors import DistributedError
from .lost import first_line

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_GLOO_ENDS_S = 0.1
_AGENT_ANSWERS = timedelta(seconds=30)
_runs = itertools.count()  # each run of a process has its own names in the store, which the ranks count alike


class Membership:
    """Of one run in the groups of its ranks.

    Args:
        timeout: Seconds after which a collective that some rank did not join is given up.
        meeting_timeout: The same in groups for Python values.
    """

    rank: int
    local_rank: int
    world_size: int
    world: distributed.ProcessGroup
    store: Store
    _left: tuple[Any, Any] = (None, None)  # the excepthooks of the run before, as ``_excepthooks``

    def __init__(self, timeout: float, meeting_timeout: float) -> None:
        self._limit, self._meeting_limit = timedelta(seconds=timeout), timedelta(seconds=meeting_timeout)
        self._owns_group = self._owns_state = False
        self._excepthooks = (sys.excepthook, sys.excepthook)  # before torch joins, which sets its own, and after
        self._groups: list[distributed.ProcessGroup] = []
        self._meetings: list[distributed.ProcessGroup] = []  # those of them that are for Python values

    @property
    def is_joined(self) -> bool:
        """Whether ranks can talk."""
        return bool(self._groups)

    def join(self, device: torch.device, backend: str) -> None:
        """Join the process group, or the one that is there already; from here on the attributes are set.

        To be followed by ``leave``, also after an error.

        Raises:
            DistributedError: The ranks do not find each other in time, this one has another's device, or the process
                has been given to accelerate in another way.
        """
        from accelerate import PartialState  # type: ignore[import-untyped]  # takes a second
        from torch.distributed.distributed_c10d import PrefixStore, _get_default_store  # not in every build of torch
        from torch.distributed.rendezvous import rendezvous

        atexit.unregister(_let_gloo_end)  # once a process, and last registered, so that it is called first
        atexit.register(_let_gloo_end)
        self._owns_group = not distributed.is_initialized()
        self._owns_state = not PartialState._shared_state
        options: dict[str, Any] = {}
        # torchrun's agent holds the store before it starts a rank: one that is not there has gone.
        has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        patience = min(self._limit, _AGENT_ANSWERS) if has_agent else self._limit
        _restore_excepthook()
        threads, excepthook, began = torch.get_num_threads(), sys.excepthook, time.monotonic()
        try:
            if self._owns_group:
                store, rank, size = next(iter(rendezvous("env://", timeout=patience)))
                store.set_timeout(self._limit)
                # torchrun's agent keeps its store when it starts the ranks again: without the attempt in the name they
                # would find the addresses of those that died.
                attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
                self.store = PrefixStore(f"policyfit/{attempt}/{next(_runs)}", store)
                options = {"store": self.store, "rank": rank, "world_size": size}
                options |= {"timeout": self._limit, "backend": backend}
            else:
                self.store = PrefixStore(f"policyfit/{next(_runs)}", _get_default_store())
            with warnings.catch_warnings(action="ignore"):  # of the threads that it sets
                state = PartialState(cpu=device.type == "cpu", **options)
        except RuntimeError as error:  # torch's own DistError, or what gloo raises
            raise DistributedError(
                f"The processes of this run did not find each other within {time.monotonic() - began:.0f} s: "
                f"{first_line(error)}.\nLook whether every rank was started and reaches MASTER_ADDR:MASTER_PORT, and "
                "whether its launcher still runs."
            ) from error
        finally:
            torch.set_num_threads(threads)
            self._excepthooks = (excepthook, sys.excepthook)
        if not distributed.is_initialized() or state.num_processes != distributed.get_world_size():
            raise DistributedError(
                f"accelerate was already set up in this process, for {state.num_processes} process(es), so that it "
                "cannot join the others.\nMake no Accelerator before fit; the Trainer makes what it needs."
            )
        assert distributed.group.WORLD is not None
        self.world = distributed.group.WORLD
        self._groups = [self.world]
        self.rank, self.world_size = state.process_index, state.num_processes
        self.local_rank = state.local_process_index
        if device.index is not None and device.index != self.local_rank:
            raise DistributedError(
                f"Rank {self.rank} is local rank {self.local_rank} of its machine, but its device is {device}.\n"
                f"Use device='{device.type}', by which each rank takes the device of its local rank."
            )

    def new_meeting(self) -> distributed.ProcessGroup:
        """Another group of all ranks, for Python values, in which a rank may keep the others waiting for long.

        Raises:
            DistributedError: They cannot talk over gloo.
        """
        try:
            # The shorter limit for a rank that does not come to the making of the group.
            group: distributed.ProcessGroup = distributed.new_group(backend="gloo", timeout=self._limit)
        except RuntimeError as error:
            raise DistributedError(
                f"The processes of this run cannot talk over gloo, by which they exchange what is not gradients: "
                f"{first_line(error)}.\nName the network interface between the machines in GLOO_SOCKET_IFNAME."
            ) from error
        self._groups.append(group)
        self._meetings.append(group)
        distributed.distributed_c10d._set_pg_timeout(self._meeting_limit, group)
        return group

    def new_subgroup(self, ranks: list[list[int]]) -> distributed.ProcessGroup:
        """This rank's own of the groups, with our time limit, which a mesh of torch's making would not have."""
        own, _ = distributed.new_subgroups_by_enumeration(ranks, timeout=self._limit)  # type: ignore[no-untyped-call]
        assert isinstance(own, distributed.ProcessGroup)
        self._groups.append(own)
        return own

    def hurry(self) -> None:
        """Wait in groups for Python values only as long as ranks need that lose each other one after another."""
        for group in self._meetings:
            distributed.distributed_c10d._set_pg_timeout(2 * self._limit, group)

    def leave(self, *, aborts: bool) -> None:
        """Leave the groups, and the process group if ``join`` made it.

        Args:
            aborts: Not to wait for what is under way in them.
        """
        Membership._left = self._excepthooks
        if not aborts:  # else the error under way is to be shown by torch's
            _restore_excepthook()
        if self._owns_group and distributed.is_initialized():
            for group in self._groups:
                if aborts or group not in self._meetings:
                    _keep(group)
                if aborts:
                    group.abort()
            distributed.destroy_process_group()
        elif not aborts:  # else a wait may be under way in it, which would be waited for
            # Subgroups of a caller's process group stay: in them lies a policy that is sharded.
            for group in self._meetings:
                distributed.destroy_process_group(group)
        self._groups, self._meetings = [], []
        if self._owns_state:
            from accelerate.state import AcceleratorState  # type: ignore[import-untyped]

            AcceleratorState._reset_state(reset_partial_state=True)
        self._owns_group = self._owns_state = False


def _restore_excepthook() -> None:
    """Take off torch's of a run that was left, which would say the rank once more in each line of a traceback."""
    before, torchs = Membership._left
    if before is not None and sys.excepthook is torchs:
        sys.excepthook = before


def _let_gloo_end() -> None:
    """Before the interpreter ends, let gloo's threads have its lock once more.

    A thread takes it to drop the tensor of a collective that it has ended, and if the interpreter is gone by then it
    takes the process down with it (std::terminate, after 1 in 30 runs of 2 processes that ended in an evaluation; torch
    2.13).
    """
    time.sleep(_GLOO_ENDS_S)


def _keep(group: distributed.ProcessGroup) -> None:
    """Keep a group that is left from ever being freed, with its few threads and sockets.

    Freeing one joins gloo's threads while it holds the interpreter's lock, for which a thread may wait that has just
    ended a collective of DDP's backward: the process then hangs (seen in 1 of 20 runs, torch 2.13).
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
