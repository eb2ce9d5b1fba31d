"""What every run of several processes does alike: how they join, agree, lose each other and leave.

``accelerate.PartialState`` joins the process group, with our time limit and our store. Flags go by torch itself, since
accelerate's ``reduce`` has no maximum and makes copies; so do Python values, which accelerate's ``gather_object`` would
send over the group of the gradients and under its time limit.

Source: torch.distributed.rendezvous and TCPStore, by which torchrun's processes find each other. Its agent holds the
store, so that it outlives the ranks: what they leave there can be read when they are gone.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import math
import os
import warnings
from abc import abstractmethod
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, distributed, nn
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store, _set_pg_timeout
from torch.distributed.rendezvous import rendezvous

from .buffers import Buffers
from .device import CPUDevice, CUDADevice, XPUDevice
from .distributed import OF_A_CALLBACK, DistributionStrategy, RankFailed
from .errors import ConfigError, DistributedError, in_words
from .facts import MachineFacts
from .launch import check_environment, check_launch
from .lost import GO_ON, first_line, is_lost, named, reason
from .roll_call import RollCall
from .tree import map_tensors

T = TypeVar("T")


class _Answer(NamedTuple):
    """What a rank brings to where ranks meet."""

    place: str
    value: Any
    excuse: str | None = None


_BACKENDS = {
    "cpu": CPUDevice.distributed_backend,
    "cuda": CUDADevice.distributed_backend,
    "xpu": XPUDevice.distributed_backend,
}
_runs = itertools.count()  # each run of a process has its own names in the store, which the ranks count alike


class ManyProcesses(DistributionStrategy):
    """Processes that a launcher started, each with one device.

    Args:
        timeout: Seconds after which a collective that some rank did not join is given up.
        meeting_timeout: The same where ranks meet: in validation, rollouts, saves and hooks of these, where one may be
            at work much longer than the others.
    """

    def __init__(self, *, timeout: float = 600.0, meeting_timeout: float = 7200.0) -> None:
        for name, seconds in (("timeout", timeout), ("meeting_timeout", meeting_timeout)):
            if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
                raise ConfigError(
                    f"{type(self).__name__}.{name} must be a number of seconds above 0, got {seconds!r}.\n"
                    "Use 600 to wait ten minutes for a rank that is late."
                )
        self.timeout, self.meeting_timeout = float(timeout), float(meeting_timeout)
        self._roll_call: RollCall | None = None
        self._owns_group = self._owns_state = self._failed = self._is_wrapping = False
        self._groups: list[distributed.ProcessGroup] = []
        self._meetings: list[distributed.ProcessGroup] = []  # those of them in which ranks meet
        self._buffers: Buffers | None = None

    def check(self, facts: MachineFacts) -> None:
        """Refuse one process, ranks that cannot find each other, and an environment that would change the run."""
        check_environment(facts)
        check_launch(self.name, facts)

    # Joining and leaving -------------------------------------------------------------------------------------

    def setup(self, device: torch.device) -> None:
        """Join the process group, or the one that is there already, which is then left as it is.

        Raises:
            DistributedError: The device has no collectives, the ranks do not find each other in time, or the
                process has been given to accelerate in another way.
        """
        if device.type not in _BACKENDS:
            raise DistributedError(
                f"distributed={self.name!r} was requested, but there are no collectives on {device.type}.\n"
                "Use one process with distributed='none', or device='cpu'."
            )
        self._device, self._failed, self._is_wrapping = device, False, False
        try:
            self._join(device)
        except BaseException:
            self._failed = True
            self.teardown()
            raise

    def _join(self, device: torch.device) -> None:
        from accelerate import PartialState  # type: ignore[import-untyped]  # takes a second

        self._owns_group = not distributed.is_initialized()
        self._owns_state = not PartialState._shared_state
        limit, threads = timedelta(seconds=self.timeout), torch.get_num_threads()
        options: dict[str, Any] = {}
        try:
            if self._owns_group:
                store, rank, size = next(iter(rendezvous("env://", timeout=limit)))
                # torchrun's agent keeps its store when it starts the ranks again: without the attempt in the name they
                # would find the addresses of those that died.
                attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
                store = PrefixStore(f"policyfit/{attempt}/{next(_runs)}", store)
                options = {"store": store, "rank": rank, "world_size": size, "timeout": limit}
                options["backend"] = self._backend(device)
            else:
                store = PrefixStore(f"policyfit/{next(_runs)}", _get_default_store())
            with warnings.catch_warnings(action="ignore"):  # of the threads that it sets
                state = PartialState(cpu=device.type == "cpu", **options)
        except RuntimeError as error:  # torch's own DistError, or what gloo raises
            raise DistributedError(
                f"The processes of this run did not find each other within {self.timeout:g} s: {first_line(error)}.\n"
                "Look whether every rank was started and reaches MASTER_ADDR:MASTER_PORT."
            ) from error
        finally:
            torch.set_num_threads(threads)
        if not distributed.is_initialized() or state.num_processes != distributed.get_world_size():
            raise DistributedError(
                f"accelerate was already set up in this process, for {state.num_processes} process(es), so that it "
                "cannot join the others.\nMake no Accelerator before fit; the Trainer makes what it needs."
            )
        assert distributed.group.WORLD is not None
        self._groups = [distributed.group.WORLD]
        self._meeting = self._meeting_group()
        self.rank, self.world_size = state.process_index, state.num_processes
        self.local_rank = state.local_process_index
        self._roll_call = RollCall(store, self.rank, self.world_size)
        if device.index is not None and device.index != self.local_rank:
            raise DistributedError(
                f"Rank {self.rank} is local rank {self.local_rank} of its machine, but its device is {device}.\n"
                f"Use device='{device.type}', by which each rank takes the device of its local rank."
            )

    def _meeting_group(self) -> distributed.ProcessGroup:
        """Another group of all ranks, for Python values, in which a rank may keep the others waiting for long."""
        try:
            limit = timedelta(seconds=self.timeout)  # for a rank that does not come to the making of the group
            group: distributed.ProcessGroup = distributed.new_group(backend="gloo", timeout=limit)
        except RuntimeError as error:
            raise DistributedError(
                f"The processes of this run cannot talk over gloo, by which they exchange what is not gradients: "
                f"{first_line(error)}.\nName the network interface between the machines in GLOO_SOCKET_IFNAME."
            ) from error
        self._groups.append(group)
        self._meetings.append(group)
        _set_pg_timeout(timedelta(seconds=self.meeting_timeout), group)
        return group

    def _backend(self, device: torch.device) -> str:
        return _BACKENDS[device.type]

    def teardown(self) -> None:
        """Leave a process group that ``setup`` made; after an error without waiting for what is under way."""
        if self._roll_call is not None:
            self._roll_call.end()
        if self._owns_group and distributed.is_initialized():
            for group in self._groups:
                if self._failed or group not in self._meetings:
                    _keep(group)
                if self._failed:
                    group.abort()
            distributed.destroy_process_group()
        elif not self._failed:  # else a wait may be under way in it, which would be waited for
            for group in self._meetings:
                distributed.destroy_process_group(group)
        self._groups, self._meetings = [], []
        if self._owns_state:
            from accelerate.state import AcceleratorState  # type: ignore[import-untyped]

            AcceleratorState._reset_state(reset_partial_state=True)
        self._owns_group = self._owns_state = False
        self._buffers = None

    @torch.no_grad()
    def _take_from_rank_0(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            flat = tensor.detach().contiguous()
            distributed.broadcast(flat.view(-1).view(torch.uint8), src=0)
            tensor.copy_(flat)

    def wrap(self, policy: nn.Module) -> nn.Module:
        """The policy wrapped by ``_wrap``, once all ranks have found that it is alike on them.

        Raises:
            ConfigError: It cannot be wrapped.
            DistributedError: It differs between ranks.
        """
        self.check_alike(policy)
        self._is_wrapping = True  # and stays so after an error
        wrapped = self._wrap(policy)
        self._is_wrapping = False
        return wrapped

    @abstractmethod
    def _wrap(self, policy: nn.Module) -> nn.Module:
        """What ``wrap`` gives. Ranks broadcast in it and do not gather, so that one which fails has no ``excuse``."""

    # Agreeing ------------------------------------------------------------------------------------------------

    def reduce_max(self, flags: Tensor) -> None:
        """One all-reduce."""
        distributed.all_reduce(flags, op=distributed.ReduceOp.MAX)

    def gather(self, value: T, place: str = OF_A_CALLBACK) -> list[T]:
        """Every rank's value on every rank; waits.

        Raises:
            RankFailed: A rank came with an excuse.
            DistributedError: Ranks came from different places.
        """
        self._own_next(self.meeting_timeout)
        answers = self._answers(_Answer(place, value))
        failed = next(((rank, answer.excuse) for rank, answer in enumerate(answers) if answer.excuse is not None), None)
        if failed is not None:
            raise RankFailed.of(*failed)
        elsewhere = next((rank for rank, answer in enumerate(answers) if answer.place != answers[0].place), None)
        if elsewhere is not None:
            raise DistributedError(
                f"Rank {elsewhere} has come to {answers[elsewhere].place}, but rank 0 to {answers[0].place}.\n"
                "Call save_checkpoint(), evaluate() and validate() on every rank, at the same step: due(step) has to "
                "answer alike on all."
            )
        return [answer.value for answer in answers]

    def from_rank(self, rank: int, value: T) -> T:
        """One broadcast of all but the tensors, and one of each of these, so that no device has to hold them all."""
        trees = [map_tensors(value, lambda tensor, _: tensor.to("meta")) if self.rank == rank else None]
        distributed.broadcast_object_list(trees, src=rank)

        def sent(tensor: Tensor, key: str) -> Tensor:
            if self.rank == rank:
                here = tensor.detach().to(self._device).contiguous()
            else:
                here = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
            distributed.broadcast(here, src=rank)
            return here.cpu()

        return map_tensors(value if self.rank == rank else trees[0], sent)  # type: ignore[no-any-return]

    def excuse(self, error: BaseException) -> bool:
        """One gather, of the others' errors if they bring some too."""
        if isinstance(error, (RankFailed, KeyboardInterrupt)):
            return True
        if not self._groups or self._is_wrapping:  # not joined, or where the others do not come to a gather
            return False
        own = in_words(error)
        try:
            self.fail()
            self._own_next(self.meeting_timeout)
            answers = self._answers(_Answer("its end", None, own))
        except RuntimeError:  # they have left
            return False
        # In its dict, since a frozen dataclass takes no attribute.
        vars(error)["is_told"] = own == next(answer.excuse for answer in answers if answer.excuse is not None)
        return True

    def _own_next(self, patience_s: float) -> None:
        """Before each collective of the run's own, for a strategy whose forwards have some too.

        Args:
            patience_s: How long a rank that has failed waits to be told of those that the others make before it.
        """

    def _answers(self, own: _Answer) -> list[_Answer]:
        if not self._groups:
            raise DistributedError(
                "The run is over, and its processes have parted.\nDo in on_fit_end, at the latest, what needs them all."
            )
        answers: list[Any] = [None] * self.world_size
        distributed.all_gather_object(answers, own, group=self._meeting)
        return answers

    def ready(self, policy: nn.Module) -> None:
        """Which buffers there are, and in what form."""
        self._buffers = Buffers(policy, self._device)

    def sync_buffers(self, *, failed: bool = False) -> None:
        """One broadcast for each type of buffer; none without buffers.

        Raises:
            DistributedError: A buffer has left the device or has another form, replaced by a new tensor.
        """
        assert self._buffers is not None
        if not failed:
            self._buffers.look()
        self._own_next(self.timeout)
        self._buffers.send(self.rank)

    def check_alike(self, policy: nn.Module) -> None:
        """Refuse to train policies that differ in more than their values.

        Raises:
            DistributedError: A rank has built another policy than rank 0.
        """
        tensors = [*policy.named_parameters(), *policy.named_buffers()]
        shape = repr([(name, tuple(t.shape), t.dtype, t.requires_grad) for name, t in tensors])
        digests = self.gather(hashlib.sha256(shape.encode()).hexdigest(), "the start of the run")
        other = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        if other:
            raise DistributedError(
                f"{named(other)} built another policy than rank 0: names, shapes, types or what is frozen differ.\n"
                "Build the policy alike on every rank, whatever its number and its data."
            )

    # Losing each other ---------------------------------------------------------------------------------------

    def is_lost(self, error: BaseException) -> bool:
        """Whether torch.distributed or gloo raised it."""
        return is_lost(error)

    def lost(self, error: BaseException) -> DistributedError:
        """The error that another rank left, or the ranks that do not answer a call within some seconds."""
        self._failed = True
        assert self._roll_call is not None
        found = DistributedError(reason(error, self._roll_call, self.timeout, type(self).__name__))
        found.exit_code = 1  # not a request that cannot be met, but a run that failed
        return found

    def report(self, error: BaseException) -> None:
        """Leave this rank's error in the store, if it is the first."""
        self._failed = True
        try:
            if self._roll_call is not None:
                self._roll_call.leave()
                self._roll_call.leave_words(f"Rank {self.rank} failed: {in_words(error)}\n{GO_ON}")
        except RuntimeError:  # the store is gone: nobody could read it
            return


def _keep(group: distributed.ProcessGroup) -> None:
    """Keep a group that is left from ever being freed, with its few threads and sockets.

    Freeing one joins gloo's threads while it holds the interpreter's lock, for which a thread may wait that has just
    ended a collective of DDP's backward: the process then hangs (seen in 1 of 20 runs, torch 2.13).
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
