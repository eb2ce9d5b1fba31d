"""What every run of several processes does alike: how they agree, and lose each other.

Flags go by torch itself, since accelerate's ``reduce`` has no maximum and makes copies; so do Python values, which
accelerate's ``gather_object`` would send over the group of the gradients and under its time limit.
"""

from __future__ import annotations

import hashlib
import math
from abc import abstractmethod
from collections.abc import Iterable
from itertools import zip_longest
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, distributed, nn

from .buffers import Buffers
from .device import DeviceStrategy
from .distributed import AT_THE_START, OF_A_CALLBACK, DistributionStrategy, RankFailed
from .errors import ConfigError, DistributedError, in_words, without_numbers
from .facts import MachineFacts
from .launch import check_environment, check_launch
from .lost import is_lost, named, reason
from .membership import Membership
from .roll_call import RollCall
from .tree import map_tensors

T = TypeVar("T")


class _Answer(NamedTuple):
    """What a rank brings to where ranks meet."""

    place: str
    value: Any
    excuse: str | None = None


class RanksLost(DistributedError):
    """Other ranks do not answer any more."""

    exit_code = 1  # the run failed; its settings are good


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
        self._membership = Membership(self.timeout, self.meeting_timeout)
        self._roll_call: RollCall | None = None
        self._is_wrapping = False
        self._aborts = False  # whether groups are left without waiting for what is under way in them
        self._spoke_first = self._is_alone = False
        self._buffers: Buffers | None = None

    @property
    def is_main(self) -> bool:
        """Rank 0, or who is alone."""
        return self.rank == 0 or self._is_alone

    @property
    def options(self) -> dict[str, Any]:
        """The time limits, for the strategies to add theirs."""
        return {"timeout": self.timeout, "meeting_timeout": self.meeting_timeout}

    def check(self, facts: MachineFacts) -> None:
        """Refuse one process, ranks that cannot find each other, and an environment that would change the run."""
        check_environment(facts)
        check_launch(self.name, facts)

    # Joining and leaving -------------------------------------------------------------------------------------

    def setup(self, device: DeviceStrategy) -> None:
        """Join the process group, or the one that is there already, which is then left as it is.

        Raises:
            DistributedError: The device has no collectives, the ranks do not find each other in time, or the
                process has been given to accelerate in another way.
        """
        if device.distributed_backend is None:
            raise DistributedError(
                f"distributed={self.name!r} was requested, but there are no collectives on {device.name}.\n"
                "Use one process with distributed='none', or device='cpu'."
            )
        self._device = device.device
        self._aborts = self._is_wrapping = self._spoke_first = False
        try:
            self._join(device, device.distributed_backend)
        except BaseException:
            self._aborts = True
            self.teardown()
            raise

    def _join(self, device: DeviceStrategy, backend: str) -> None:
        self._membership.join(device.device, backend)
        self.rank, self.local_rank = self._membership.rank, self._membership.local_rank
        self.world_size = self._membership.world_size
        self._meeting = self._membership.new_meeting()
        self._roll_call = RollCall(self._membership.store, self.rank, self.world_size)

    def teardown(self) -> None:
        """Leave a process group that ``setup`` made; after an error without waiting for what is under way."""
        if self._roll_call is not None:
            self._roll_call.end()
        self._membership.leave(aborts=self._aborts)
        self._buffers, self._is_alone = None, False

    def align(self, policy: nn.Module) -> None:
        """One broadcast for each parameter and buffer."""
        self._check_alike(policy)
        self._take_from_rank_0((*policy.parameters(), *policy.buffers()))

    @torch.no_grad()
    def _take_from_rank_0(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            # Of one that was expanded, what there is in memory.
            once = tensor[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())]
            flat = once.detach().reshape(-1)
            if flat.stride(0) != 1:
                flat = flat.clone(memory_format=torch.contiguous_format)
            distributed.broadcast(flat.view(torch.uint8), src=0)
            once.copy_(flat.view(once.shape))

    def wrap(self, policy: nn.Module) -> nn.Module:
        """The policy wrapped by ``_wrap``, once all ranks have found that it is alike on them.

        Raises:
            ConfigError: It cannot be wrapped.
            DistributedError: It differs between ranks.
        """
        self._check_alike(policy)
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
        if self._is_alone:
            return [value]
        self._mark(self.meeting_timeout)
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
        if self._is_alone or self._is_wrapping or not self._membership.is_joined:  # the others come to no gather
            return False
        own = in_words(error)
        try:
            self.fail()
            self._mark(self.meeting_timeout)
            answers = self._answers(_Answer("its end", None, own))
        except RuntimeError:  # they have left
            return False
        # In its dict, since a frozen dataclass takes no attribute.
        first = next(answer.excuse for answer in answers if answer.excuse is not None)
        vars(error)["is_told"] = without_numbers(own) == without_numbers(first)
        return True

    def _mark(self, patience_s: float) -> None:
        """The run itself talks next: a place that a rank which failed can find among what forwards talk, if they do.

        What follows at once on such a collective needs none of its own.

        Args:
            patience_s: How long a rank that has failed waits to be told of what the others do before it.
        """

    def _answers(self, own: _Answer) -> list[_Answer]:
        if not self._membership.is_joined:
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
        self._mark(self.timeout)
        self._buffers.send(self.rank)

    def _check_alike(self, policy: nn.Module) -> None:
        """Refuse policies that differ in more than their values.

        Raises:
            DistributedError: A rank has built another policy than rank 0.
        """
        kinds = {True: ", trained", False: ", frozen"}
        shapes = [_shape(name, p, kinds[p.requires_grad]) for name, p in policy.named_parameters()]
        shapes += [_shape(name, buffer) for name, buffer in policy.named_buffers()]
        digests = self.gather(hashlib.sha256(repr(shapes).encode()).hexdigest(), AT_THE_START)
        other = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        if other:
            of_ranks = self.gather(shapes, AT_THE_START)
            pairs = zip_longest(of_ranks[other[0]], of_ranks[0], fillvalue="nothing more")
            found, expected = next(pair for pair in pairs if pair[0] != pair[1])
            raise DistributedError(
                f"{named(other)} built another policy than rank 0: {found}, where that has {expected}.\n"
                "Build the policy alike on every rank, whatever its number and its data."
            )

    def _place(self) -> int:
        """A number by which ranks that have failed see whether they stand at the same collective; 0 for wherever."""
        return 0

    # Losing each other ---------------------------------------------------------------------------------------

    def is_lost(self, error: BaseException) -> bool:
        """Whether torch.distributed or gloo raised it."""
        return is_lost(error)

    def lost(self, error: BaseException) -> DistributedError:
        """The error that another rank left, or the ranks that do not answer a call within some seconds."""
        self._aborts = True
        assert self._roll_call is not None
        return RanksLost(reason(error, self._roll_call, self.timeout, type(self).__name__))

    def report(self, error: BaseException, *, comes: bool = False) -> None:
        """Leave this rank's error in the store, if it is the first."""
        self._aborts = True
        try:
            if self._roll_call is not None:
                self._roll_call.withdraw(self._place())
                words = str(RankFailed.of(self.rank, in_words(error)))
                self._spoke_first = self._roll_call.leave_words(words, comes=comes)
        except RuntimeError:  # the store is gone: nobody could read it
            return


def _shape(name: str, tensor: Tensor, kind: str = "") -> str:
    return f"{name} ({list(tensor.shape)}, {str(tensor.dtype).removeprefix('torch.')}{kind})"
