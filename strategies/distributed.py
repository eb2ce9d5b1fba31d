"""How a run is spread over processes: the verbs, and the single process as the plain case of them.

Every rank calls the verbs that talk in the same order: ``setup``, ``align``, ``wrap``, ``micro_batch`` with its
backward (or ``backward_of_nothing``, or ``stand_in``); ``reduce_max``, ``norms`` and ``sync_buffers``, which do not
make the host wait for the device; ``whole``, ``whole_weights``, ``gather``, ``broadcast``, ``excuse`` and
``from_rank``, which do. ``gather_aside`` may come from a thread.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

from torch import Tensor, nn

from .device import DeviceStrategy
from .errors import DistributedError
from .facts import MachineFacts, world_size

T = TypeVar("T")
#: Places where ranks meet, in words.
AT_THE_START = "the start of the run"
OF_A_CALLBACK = "a gather() or broadcast() of a callback"
_NOTHING = nullcontext()


class RankFailed(DistributedError):
    """Another rank gave its error for an answer when the ranks met."""

    exit_code = 1  # the run failed; its settings are good

    @classmethod
    def of(cls, rank: int, words: str, *, so: str = "", remedy: str | None = None) -> RankFailed:
        """The error for that of a rank, of which ``words`` give kind and message; ``so`` is what came of it."""
        remedy = remedy or "Mend that, and start all ranks again; --resume=auto goes on in a run_dir that is there."
        return cls(f"Rank {rank} failed{so}: {words}\n{remedy}")


class DistributionStrategy(ABC):
    """The processes of a run and what they agree on.

    ``rank`` is global, ``local_rank`` within a machine; both are 0 in a run of one process.
    """

    name: str
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    #: Whether parameters, gradients and optimizer state are shards on each rank, so that every forward talks.
    is_sharded: bool = False
    #: Whether each rank writes its own rows into a checkpoint.
    saves_shards: bool = False

    @property
    def is_main(self) -> bool:
        """Whether this process writes and prints."""
        return self.rank == 0

    @property
    def options(self) -> dict[str, Any]:
        """What it was made with, by the names of its arguments: plain values, the same on every rank."""
        return {}

    # A run ---------------------------------------------------------------------------------------------------

    @abstractmethod
    def check(self, facts: MachineFacts) -> None:
        """Refuse what could not be the run that was asked for; a pure function of its arguments.

        Raises:
            DistributedError: The launched processes do not fit, or the environment would change the run.
        """

    @abstractmethod
    def setup(self, device: DeviceStrategy) -> None:
        """Join the other processes; from here on ``rank``, ``local_rank`` and ``world_size`` are theirs."""

    @abstractmethod
    def teardown(self) -> None:
        """Leave them; called once, also after an error, and never waits for them."""

    def align(self, policy: nn.Module) -> None:
        """Give every rank the weights and buffers of rank 0, for a policy that is not to be trained.

        Raises:
            DistributedError: Policies differ in more than their values.
        """

    @abstractmethod
    def wrap(self, policy: nn.Module) -> nn.Module:
        """The module whose forward trains: ``policy`` itself, or a wrapper that talks to the other ranks.

        Every rank has the weights and buffers of rank 0 afterwards.
        """

    @property
    def layout(self) -> str:
        """How the wrapped policy lies on the ranks, in words; nothing where each has all of it."""
        return ""

    def ready(self, policy: nn.Module) -> None:
        """The wrapped policy is as it trains, with its weights, and hooks are about to see it; does not talk."""

    def through(self, module: nn.Module, step: Callable[..., T]) -> Callable[..., T]:
        """``step``, a function that runs the policy, called through a module of ``wrap`` as its forward has to be."""
        return step

    @abstractmethod
    def micro_batch(self, module: nn.Module, *, closes: bool) -> AbstractContextManager[Any]:
        """The context of a forward and its backward; unless they close their window, ranks need not sum gradients."""

    def backward_of_nothing(self, module: nn.Module, *, closes: bool) -> None:
        """In place of the backward of a loss that has no gradient: add zeros to what the others sum.

        Raises:
            DistributedError: That cannot be.
        """

    def backward_of_padding(self, module: nn.Module, loss: Tensor, *, closes: bool) -> None:
        """In place of the backward of a loss whose samples only pad an epoch's end: zeros, whatever it is."""
        self.backward_of_nothing(module, closes=closes)

    def take_fingerprint(self) -> float:
        """A number for what this rank's window has had forwards and backwards exchange, the same on ranks that agree.

        A whole number below 2 ** 20; 0.0 where nothing is exchanged. The next window begins with the call.
        """
        return 0.0

    @property
    def left_out(self) -> list[str]:
        """Names of the trainable parameters that the last window's losses left out on this rank, as far as known."""
        return []

    def fail(self) -> None:
        """This rank has failed: it computes nothing any more, and takes part in what the others do."""

    def stand_in(self, module: nn.Module, *, closes: bool) -> None:
        """Take this rank's part in a micro-batch that it cannot compute, with gradients of zero.

        The whole part, or where ``micro_batch`` was left by an error, the rest of it. Gradients are of no worth
        afterwards.

        Raises:
            RuntimeError: It could not; the others then lose this rank.
        """

    # What ranks agree on -------------------------------------------------------------------------------------

    @abstractmethod
    def reduce_max(self, flags: Tensor) -> None:
        """Make ``flags``, float32 on the device, the largest over all ranks, in place and without waiting."""

    def broadcast(self, value: T, place: str = OF_A_CALLBACK) -> T:
        """Rank 0's value, on every rank; anything that can be pickled. Otherwise as ``gather``."""
        return self.gather(value if self.is_main else None, place)[0]  # type: ignore[return-value]

    @abstractmethod
    def gather(self, value: T, place: str = OF_A_CALLBACK) -> list[T]:
        """Every rank's value in the order of ranks, on every rank; anything that can be pickled.

        Args:
            place: Where in the run this is, in words. Ranks that meet at different places are told so.

        Raises:
            RankFailed: A rank came with ``excuse``.
            DistributedError: Ranks came from different places.
        """

    def from_rank(self, rank: int, value: T) -> T:
        """The value of that rank, on every rank, its tensors on the cpu; anything that can be pickled."""
        return value

    def excuse(self, error: BaseException) -> bool:
        """Come to the others' next ``gather`` or ``broadcast`` with nothing but this rank's error; whether they came.

        An error that came from another rank, or that ends the process at once, is no excuse: nothing is done. The
        error's attribute ``is_told`` says whether it is the one that is raised on the others.
        """
        return True

    @abstractmethod
    def sync_buffers(self, *, failed: bool = False) -> None:
        """Give every rank the buffers that the policy of ``ready`` has on rank 0, without waiting.

        Args:
            failed: Take part with those of the last time, whatever became of them.
        """

    # Parts and wholes ----------------------------------------------------------------------------------------

    def norms(self, norms: Tensor) -> Tensor:
        """The L2 norm of each whole gradient, given those of the local parts, shape (gradients,)."""
        return norms

    def local(self, tensor: Tensor) -> Tensor:
        """The part of a parameter, gradient or state that is here; writing to it in place writes the tensor."""
        return tensor

    def whole(self, tensor: Tensor) -> Tensor:
        """All of a parameter, gradient or state, on every rank."""
        return tensor

    def part(self, whole: Tensor, like: Tensor) -> Tensor:
        """Of a whole tensor, or what gives its rows by slices, what belongs where ``like`` is, of the same kind.

        Does not talk.
        """
        return whole

    def first_row(self, tensor: Tensor) -> int | None:
        """The row of the whole tensor with which ``local`` begins; ``None`` where a rank before this has the same."""
        return 0 if self.is_main else None

    def gather_aside(self, value: T, place: str) -> list[T]:
        """As ``gather``, and where ``saves_shards`` also from a thread, whatever the main thread is at."""
        return self.gather(value, place)

    def whole_weights(self, policy: nn.Module) -> AbstractContextManager[Any]:
        """The context in which each rank can run the policy alone, under ``no_grad``, without the others."""
        return nullcontext()

    def silence(self) -> AbstractContextManager[Any]:
        """The context to which each rank comes in its own time, so that no forward in it may talk to the others."""
        return _NOTHING

    def release(self) -> None:
        """Let go of weights that a forward outside of the loop has left gathered; does not talk."""

    # When a rank is lost -------------------------------------------------------------------------------------

    def is_lost(self, error: BaseException) -> bool:
        """Whether an error says that ranks could not talk to each other, so that ``lost`` can say more."""
        return False

    def lost(self, error: BaseException) -> DistributedError:
        """What to raise in place of an error of talking: which ranks no longer answer, or what one of them left."""
        return DistributedError(f"A collective failed: {type(error).__name__}: {error}")

    def report(self, error: BaseException, *, comes: bool = False) -> None:
        """Leave this rank's error for the others to find, before it leaves them; never raises.

        Args:
            comes: Whether it still comes to a ``gather`` with this error, where ranks that lose it may wait for it
                (``break_off``).
        """

    def break_off(self) -> bool:
        """Give up what is under way, since a rank has failed that cannot stand in; whether all can still meet.

        Called by that rank and by those that lose it. Afterwards ``gather`` waits for a rank no longer than twice
        ``timeout``, and there is no forward or update until ``teardown``. Does not talk.
        """
        return False

    def stay_alone(self) -> bool:
        """This rank has failed and cannot tell the others; returns whether it is the one that keeps what there is.

        From now on until ``teardown`` it is the one that writes then, and ``gather`` gives its own value alone. Does
        not talk.
        """
        return False


class SingleProcess(DistributionStrategy):
    """``none``: one process on one device."""

    name = "none"

    def check(self, facts: MachineFacts) -> None:
        """Refuse to be one of several that know nothing of each other."""
        if (world := world_size(facts)) > 1:
            raise DistributedError(
                f"distributed='none' was requested, but a launcher started {world} processes (WORLD_SIZE), each of "
                "which would train a policy of its own.\n"
                "Use distributed='auto', or start one process without a launcher."
            )

    def setup(self, device: DeviceStrategy) -> None:
        """Nobody to join."""

    def teardown(self) -> None:
        """Nobody to leave."""

    def wrap(self, policy: nn.Module) -> nn.Module:
        """The policy itself."""
        return policy

    def micro_batch(self, module: nn.Module, *, closes: bool) -> AbstractContextManager[Any]:
        """Nobody to talk to."""
        return _NOTHING

    def reduce_max(self, flags: Tensor) -> None:
        """Its own flags are all there are."""

    def gather(self, value: T, place: str = OF_A_CALLBACK) -> list[T]:
        """Its own value alone."""
        return [value]

    def sync_buffers(self, *, failed: bool = False) -> None:
        """They are its own."""
