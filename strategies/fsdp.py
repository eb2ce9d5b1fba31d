"""Weights, gradients and optimizer state in shards, gathered unit by unit while they are used.

Torch's own ``fully_shard`` (``sharded.py``), over a mesh of ``DeviceMesh.from_group``, and not accelerate's
``FullyShardedDataParallelPlugin``, which on cpu is dropped without a word, and elsewhere casts frozen weights and
chooses 16-bit reductions and outputs; accelerate joins the process group (``membership.py``).

Precision: shards keep the type that a parameter has, gradients are reduced in float32, and nothing else is cast
(``MixedPrecisionPolicy`` without ``param_dtype`` and ``output_dtype``): the forward computes under the run's own
autocast. Frozen parameters may have another type than the trainable ones of their unit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, distributed, nn

from .device import DeviceStrategy
from .errors import ConfigError, DistributedError
from .facts import MachineFacts, world_size
from .group import ManyProcesses
from .sharded import ShardedPolicy
from .units import check_shardable, find_units

T = TypeVar("T")

_OLDEST = (2, 9)  # the first whose collectives can be noted
_REDUCE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class FSDP(ManyProcesses):
    """``fsdp``: every rank holds a shard of all weights and sees its own part of each batch.

    Args:
        shard: Over how many ranks weights are sharded; ``None`` for all.
        replicate: How many such groups of ranks hold the same shards; ``None`` for one.
        wrap: The units that are gathered one at a time: names of classes, or of modules with ``*`` for one part of the
            name ("model.layers.*"). Empty for what the policy declares: its attribute ``fsdp_units``, or
            ``_no_split_modules`` of it or of a module in it.
        reshard_after_forward: Free a unit after its forward and gather it again for its backward: less memory, more
            traffic.
        cpu_offload: Keep shards, gradients and optimizer state in host memory, where the optimizer then works.
        reduce_dtype: In what gradients are summed over ranks.
        checkpoint: "shards": each rank writes what it holds, on storage that all share. "whole": rank 0 writes all, and
            needs the memory for it.
        timeout, meeting_timeout: As in ``DDP``.
    """

    name = "fsdp"
    is_sharded = True

    def __init__(
        self,
        *,
        shard: int | None = None,
        replicate: int | None = None,
        wrap: Sequence[str] = (),
        reshard_after_forward: bool = True,
        cpu_offload: bool = False,
        reduce_dtype: Literal["float32", "bfloat16"] = "float32",
        checkpoint: Literal["shards", "whole"] = "shards",
        timeout: float = 600.0,
        meeting_timeout: float = 7200.0,
    ) -> None:
        super().__init__(timeout=timeout, meeting_timeout=meeting_timeout)
        for name, count in (("shard", shard), ("replicate", replicate)):
            if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
                raise ConfigError(
                    f"FSDP.{name} must be a whole number of ranks of at least 1, or null, got {count!r}.\n"
                    "Leave it out to shard over all ranks."
                )
        if isinstance(wrap, str) or not all(isinstance(unit, str) and unit for unit in wrap):
            raise ConfigError(f"FSDP.wrap must be a list of names of classes or modules, got {wrap!r}.")
        for name, flag in (("reshard_after_forward", reshard_after_forward), ("cpu_offload", cpu_offload)):
            if not isinstance(flag, bool):
                raise ConfigError(f"FSDP.{name} must be true or false, got {flag!r}.")
        if reduce_dtype not in _REDUCE_DTYPES:
            raise ConfigError(
                f"FSDP.reduce_dtype must be float32 or bfloat16, got {reduce_dtype!r}.\n"
                "Use float32, unless the sums of gradients over ranks are too slow."
            )
        if checkpoint not in ("shards", "whole"):
            raise ConfigError(
                f"FSDP.checkpoint must be shards or whole, got {checkpoint!r}.\n"
                "Use shards, unless the ranks share no storage."
            )
        self.saves_shards = checkpoint == "shards"
        self.shard, self.replicate, self.units = shard, replicate, tuple(wrap)
        self.reshard_after_forward, self.cpu_offload = reshard_after_forward, cpu_offload
        self.reduce_dtype = reduce_dtype
        self._held: ShardedPolicy | None = None

    @property
    def options(self) -> dict[str, Any]:
        """With all of its own."""
        own = ("shard", "replicate", "reshard_after_forward", "cpu_offload", "reduce_dtype")
        checkpoint = "shards" if self.saves_shards else "whole"
        return {
            **super().options,
            **{name: getattr(self, name) for name in own},
            "wrap": self.units,
            "checkpoint": checkpoint,
        }

    def check(self, facts: MachineFacts) -> None:
        """Refuse also a torch that is too old, and a mesh that is not made of the launched ranks."""
        super().check(facts)
        if facts.release < _OLDEST:
            raise DistributedError(
                f"distributed='fsdp' needs PyTorch {'.'.join(map(str, _OLDEST))} or later, and this is "
                f"{facts.torch_version}.\nUse distributed='ddp', or a later PyTorch."
            )
        self._mesh_shape(world_size(facts))

    def _mesh_shape(self, world: int) -> tuple[int, int]:
        """Groups of ranks with the same shards, and ranks in each.

        Raises:
            DistributedError: They are not as many as were launched.
        """
        replicate = self.replicate or 1
        shard = self.shard or max(1, world // replicate)
        if replicate * shard != world:
            raise DistributedError(
                f"FSDP(shard={self.shard}, replicate={self.replicate}) is for {replicate * shard} processes, but "
                f"{world} were launched.\nChoose the two so that their product is {world}, or leave out shard."
            )
        return replicate, shard

    # Sharding ------------------------------------------------------------------------------------------------

    def setup(self, device: DeviceStrategy) -> None:
        """Join the process group, and in it the groups of ranks that hold the same shards and each other's.

        Raises:
            DistributedError: As for every group; or ``cpu_offload`` on cpu.
        """
        if self.cpu_offload and device.device.type == "cpu":
            raise DistributedError(
                "FSDP(cpu_offload=True) keeps shards in host memory, where they are anyway on device='cpu'.\n"
                "Leave cpu_offload out."
            )
        super().setup(device)

    def _join(self, device: DeviceStrategy, backend: str) -> None:
        kind = device.device.type
        super()._join(device, f"cpu:gloo,{kind}:{backend}" if self.cpu_offload else backend)
        self._sums = torch.float64 if device.has_float64 else torch.float32  # squares overflow in the second alone
        if self.saves_shards:
            self._aside = self._membership.new_meeting()
        from torch.distributed.device_mesh import DeviceMesh

        from .rows import Rows

        replicate, shard = self._mesh_shape(self.world_size)
        if replicate == 1:
            self._shard_group, self._replica_group = self._membership.world, None
            self._mesh = DeviceMesh.from_group(self._shard_group, kind, mesh_dim_names=("shard",))
        else:
            ranks = torch.arange(self.world_size).view(replicate, shard)
            groups = [self._membership.new_subgroup(ranks.T.tolist()), self._membership.new_subgroup(ranks.tolist())]
            self._replica_group, self._shard_group = groups
            self._mesh = DeviceMesh.from_group(groups, kind, mesh=ranks, mesh_dim_names=("replicate", "shard"))
        self._rows = Rows(self._shard_group, shard, self.rank, self._device)

    def teardown(self) -> None:
        """Leave also the policy, in shards."""
        try:
            self.release()
        finally:
            self._held = None
            super().teardown()

    def _wrap(self, policy: nn.Module) -> nn.Module:
        """The policy itself, whose weights are now this rank's shards of rank 0's.

        Raises:
            ConfigError: No units are named or declared, or they cannot be sharded.
        """
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

        units = find_units(policy, self.units)
        check_shardable(policy, units)
        self._take_from_rank_0((*policy.parameters(), *policy.buffers()))
        assert self._roll_call is not None
        self._held = ShardedPolicy(
            policy,
            units,
            reshards=self.reshard_after_forward,
            shards=self._shard_group,
            replicas=self._replica_group,
            roll_call=self._roll_call,
            device=self._device,
            mesh=self._mesh,
            mp_policy=MixedPrecisionPolicy(reduce_dtype=_REDUCE_DTYPES[self.reduce_dtype], cast_forward_inputs=False),
            offload_policy=CPUOffloadPolicy(pin_memory=True) if self.cpu_offload else OffloadPolicy(),
            ignored_params={p for p in policy.parameters() if p.dim() == 0},  # frozen, and whole on every rank
        )
        return policy

    @property
    def layout(self) -> str:
        """Ranks that share the weights, copies of these, and the units."""
        replicate, shard = self._mesh_shape(self.world_size)
        copies = f" in each of {replicate} copies" if replicate > 1 else ""
        units = ", ".join(f"{name} ({count})" for name, count in self._sharded.units.items())
        return f"weights over {shard} rank{'' if shard == 1 else 's'}{copies}, gathered unit by unit: {units}, the rest"

    @property
    def _sharded(self) -> ShardedPolicy:
        assert self._held is not None  # since wrap
        return self._held

    def ready(self, policy: nn.Module) -> None:
        """Its units too, with the types that its weights have now."""
        super().ready(policy)
        self._sharded.begin()

    @contextmanager
    def micro_batch(self, module: nn.Module, *, closes: bool) -> Iterator[None]:
        """As ``ShardedPolicy.micro_batch``; what the run says next is marked."""
        with self._sharded.micro_batch(closes=closes):
            yield
        self._mark(self.timeout)

    def backward_of_nothing(self, module: nn.Module, *, closes: bool) -> None:
        """Refused: each backward gathers weights, and sums of gradients belong on every rank.

        Raises:
            DistributedError: Always.
        """
        raise DistributedError(
            f"The loss of rank {self.rank} has no gradient, so it would run no backward, but in a sharded run each "
            "gathers weights that the others wait for.\n"
            "Return a loss that has a gradient, zero times an output of the policy for instance, or use "
            "distributed='ddp'."
        )

    def backward_of_padding(self, module: nn.Module, loss: Tensor, *, closes: bool) -> None:
        """Its backward, in which the others gather and reduce, with zeros for gradients."""
        with self._sharded.padding():
            loss.backward()  # type: ignore[no-untyped-call]

    def take_fingerprint(self) -> float:
        """As ``ShardedPolicy.take_fingerprint``."""
        return self._sharded.take_fingerprint()

    @property
    def left_out(self) -> list[str]:
        """As ``ShardedPolicy.left_out``."""
        return self._sharded.left_out

    def stand_in(self, module: nn.Module, *, closes: bool) -> None:
        """The collectives of the micro-batch alone, with this rank's weights; needs the memory of a unit."""
        self._mark(self.timeout)

    def silence(self) -> AbstractContextManager[Any]:
        """No unit can be gathered in it."""
        return nullcontext() if self._held is None else self._held.collectives.silence()

    def release(self) -> None:
        """The policy's parameters are shards again, and have no zeros for gradients that this rank has not."""
        if self._held is not None:
            self._held.release()

    def fail(self) -> None:
        """From now on it asks the others which gathers and reductions they make, and makes these."""
        if self._held is not None:
            self._held.collectives.fail()

    def break_off(self) -> bool:
        """On a cpu alone: the host of another device is ahead of it, which would step by what broke off."""
        from .rows import Rows

        assert self._roll_call is not None
        if self._device.type != "cpu":
            return False
        try:
            if not self._roll_call.break_off():
                return False
        except RuntimeError:  # the store is gone, and with it its machine
            return False
        self._aborts = True
        self._sharded.collectives.end()
        self._membership.hurry()
        # Their own group may be the one in which a collective broke off.
        self._rows = Rows(self._meeting, self._shard_group.size(), self.rank, self._device)
        return True

    def _mark(self, patience_s: float) -> None:
        if self._held is not None:
            self._held.collectives.mark(patience_s)

    # Parts and wholes ----------------------------------------------------------------------------------------

    def norms(self, norms: Tensor) -> Tensor:
        """The root of the sum of squares over the ranks that share a gradient; what is not finite stays so."""
        self._mark(self.timeout)
        squares = norms.to(self._sums).square_()
        distributed.all_reduce(squares, group=self._shard_group)
        return squares.sqrt_().to(norms.dtype)

    def local(self, tensor: Tensor) -> Tensor:
        """This rank's shard."""
        return self._rows.local(tensor)

    def whole(self, tensor: Tensor) -> Tensor:
        """All shards together."""
        return self._rows.whole(tensor)

    def part(self, whole: Tensor, like: Tensor) -> Tensor:
        """This rank's shard, in memory of its own."""
        return self._rows.part(whole, like)

    def first_row(self, tensor: Tensor) -> int | None:
        """Of a shard, on the ranks that hold it first; of what is whole everywhere, on rank 0."""
        return self._rows.first(tensor)

    def gather_aside(self, value: T, place: str) -> list[T]:
        """Over a group of its own, if there is one."""
        if not self.saves_shards:
            return self.gather(value, place)
        values: list[Any] = [None] * self.world_size
        distributed.all_gather_object(values, value, group=self._aside)
        return values

    @contextmanager
    def whole_weights(self, policy: nn.Module) -> Iterator[None]:
        """Every unit gathered at once, and kept: needs the memory of the whole policy."""
        from torch.distributed.fsdp import FSDPModule

        self.gather(None, "the gathering of all weights")  # a rank that fails on its way here is not waited for
        units = [module for module in policy.modules() if isinstance(module, FSDPModule)]
        try:
            for unit in units:
                unit.unshard()
                unit.set_reshard_after_forward(False, recurse=False)
            yield
        finally:
            for unit in units:
                self._sharded.reshard(unit)
