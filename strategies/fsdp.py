"""Weights, gradients and optimizer state in shards, gathered unit by unit while they are used.

``torch.distributed.fsdp.fully_shard`` shards each unit and the policy itself, in place, over a mesh of
``DeviceMesh.from_group``; ``register_fsdp_forward_method`` does for other methods what it does for ``forward``. These
are torch's own calls and not accelerate's ``FullyShardedDataParallelPlugin``, which on cpu is dropped without a word,
and elsewhere casts frozen weights and chooses 16-bit reductions and outputs; accelerate joins the process group
(``group.py``). They are imported where they are used, since that takes more than a second.

Precision: shards keep the type that a parameter has, gradients are reduced in float32, and nothing else is cast
(``MixedPrecisionPolicy`` without ``param_dtype`` and ``output_dtype``): the forward computes under the run's own
autocast. Frozen parameters may have another type than the trainable ones of their unit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import Tensor, distributed, nn

from .errors import ConfigError, DistributedError
from .facts import MachineFacts, world_size
from .group import ManyProcesses

_OLDEST = (2, 8)  # the first that shards frozen parameters of another type, and can keep units whole for a while
_REDUCE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
#: Methods of a policy that are called from outside, and then need its weights as ``forward`` does.
_ENTRANCES = ("training_step", "validation_step", "select_action", "predict_action_chunk")
_DECLARATIONS = ("fsdp_units", "_no_split_modules")


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
        timeout: Seconds after which a collective that some rank did not join is given up.
    """

    name = "fsdp"

    def __init__(
        self,
        *,
        shard: int | None = None,
        replicate: int | None = None,
        wrap: Sequence[str] = (),
        reshard_after_forward: bool = True,
        cpu_offload: bool = False,
        reduce_dtype: Literal["float32", "bfloat16"] = "float32",
        timeout: float = 600.0,
    ) -> None:
        super().__init__(timeout=timeout)
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
        self.shard, self.replicate, self.units = shard, replicate, tuple(wrap)
        self.reshard_after_forward, self.cpu_offload = reshard_after_forward, cpu_offload
        self.reduce_dtype = reduce_dtype
        self._sums = torch.float64  # squares do not overflow in it

    def check(self, facts: MachineFacts) -> None:
        """Refuse also a torch that is too old, and a mesh that is not made of the launched ranks."""
        super().check(facts)
        if facts.release < _OLDEST:
            raise DistributedError(
                f"distributed='fsdp' needs PyTorch {'.'.join(map(str, _OLDEST))} or later, and this is "
                f"{facts.torch_version}.\nUse distributed='ddp', or a later PyTorch."
            )
        self._mesh_shape(world_size(facts))
        if not all(gpu.has_fp64 for gpu in facts.xpu):
            self._sums = torch.float32  # some Intel GPUs have no float64

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

    def setup(self, device: torch.device) -> None:
        """Join the process group, and in it the groups of ranks that hold the same shards and each other's.

        Raises:
            DistributedError: As for every group; or ``cpu_offload`` on cpu.
        """
        if self.cpu_offload and device.type == "cpu":
            raise DistributedError(
                "FSDP(cpu_offload=True) keeps shards in host memory, where they are anyway on device='cpu'.\n"
                "Leave cpu_offload out."
            )
        super().setup(device)
        from torch.distributed.device_mesh import DeviceMesh

        replicate, shard = self._mesh_shape(self.world_size)
        if replicate == 1:
            assert distributed.group.WORLD is not None
            self._shard_group = distributed.group.WORLD
            self._mesh = DeviceMesh.from_group(self._shard_group, device.type, mesh_dim_names=("shard",))
            return
        ranks = torch.arange(self.world_size).view(replicate, shard)
        groups = [self._groups(ranks.T.tolist()), self._groups(ranks.tolist())]
        self._shard_group = groups[1]
        self._mesh = DeviceMesh.from_group(groups, device.type, mesh=ranks, mesh_dim_names=("replicate", "shard"))

    def _groups(self, ranks: list[list[int]]) -> distributed.ProcessGroup:
        """This rank's own of the groups, with our time limit, which a mesh of torch's making would not have."""
        limit = timedelta(seconds=self.timeout)
        own, _ = distributed.new_subgroups_by_enumeration(ranks, timeout=limit)  # type: ignore[no-untyped-call]
        assert isinstance(own, distributed.ProcessGroup)
        return own

    def _backend(self, device: torch.device) -> str:
        backend = super()._backend(device)
        return f"cpu:gloo,{device.type}:{backend}" if self.cpu_offload else backend

    def wrap(self, policy: nn.Module) -> nn.Module:
        """The policy itself, whose weights are now this rank's shards of rank 0's.

        Raises:
            ConfigError: No units are named or declared, or they cannot be sharded.
            DistributedError: The policy is sharded already, or differs between ranks.
        """
        from torch.distributed.fsdp import (
            CPUOffloadPolicy,
            FSDPModule,
            MixedPrecisionPolicy,
            OffloadPolicy,
            fully_shard,
            register_fsdp_forward_method,
        )

        if any(isinstance(module, FSDPModule) for module in policy.modules()):
            raise DistributedError(
                f"{type(policy).__name__} is sharded already, by an earlier run in this process.\n"
                "Build it anew and load the checkpoint of that run."
            )
        units = self._find_units(policy)
        ignored = {p for p in policy.parameters() if p.dim() == 0}
        _check_parameters(policy, units)
        self.check_alike(policy)
        with torch.no_grad():
            for tensor in (*policy.parameters(), *policy.buffers()):
                distributed.broadcast(tensor.detach().view(-1).view(torch.uint8), src=0)
        precision = MixedPrecisionPolicy(reduce_dtype=_REDUCE_DTYPES[self.reduce_dtype], cast_forward_inputs=False)
        offload = CPUOffloadPolicy(pin_memory=True) if self.cpu_offload else OffloadPolicy()
        for unit in (*units, policy):
            fully_shard(
                unit,
                mesh=self._mesh,
                reshard_after_forward=self._reshards(unit, policy),
                mp_policy=precision,
                offload_policy=offload,
                ignored_params=ignored,
            )
        for name in _ENTRANCES:
            if callable(getattr(policy, name, None)):
                register_fsdp_forward_method(policy, name)
        return policy

    def _reshards(self, unit: nn.Module, policy: nn.Module) -> bool:
        """Not the policy's own weights: backward begins with them."""
        return self.reshard_after_forward and unit is not policy

    def _find_units(self, policy: nn.Module) -> list[nn.Module]:
        """The modules to shard by themselves, inner ones before those that hold them."""
        named = [(name, module) for name, module in policy.named_modules() if name]
        names, origin = self.units or _declared(policy), "FSDP.wrap" if self.units else "fsdp_units"
        if not names:
            raise ConfigError(
                f"FSDP gathers a policy unit by unit, but {type(policy).__name__} does not say what its units are.\n"
                f"Name them, for instance {_suggestion(policy)}, or declare them in its class: "
                "fsdp_units = [...]. Good units are the blocks that repeat."
            )
        found = {unit: [module for name, module in named if _is_named(name, module, unit)] for unit in names}
        unknown = [unit for unit, modules in found.items() if not modules]
        if unknown and (self.units or len(unknown) == len(names)):
            raise ConfigError(
                f"{origin} names {', '.join(unknown)}, but {type(policy).__name__} has no module or class of that name."
                f"\nIts blocks are: {_blocks(policy)}."
            )
        chosen = {id(module) for modules in found.values() for module in modules}
        units = [module for _, module in reversed(named) if id(module) in chosen]
        lists = [type(m).__name__ for m in units if type(m).forward is nn.ModuleList.forward]
        if lists:
            raise ConfigError(
                f"{origin} names a {lists[0]}, which has no forward before which it could be gathered.\n"
                'Name what is in it, for instance with "*" at the end of its name.'
            )
        return units

    def accumulating(self, module: nn.Module) -> AbstractContextManager[Any]:
        """Gradients stay whole on their rank; the next backward outside reduces their sum to shards."""
        return _without_reduction(module)

    # Parts and wholes ----------------------------------------------------------------------------------------

    def norms(self, norms: Tensor) -> Tensor:
        """The root of the sum of squares over the ranks that share a gradient; what is not finite stays so."""
        squares = norms.to(self._sums).square_()
        distributed.all_reduce(squares, group=self._shard_group)
        return squares.sqrt_().to(norms.dtype)

    def local(self, tensor: Tensor) -> Tensor:
        """This rank's shard."""
        from torch.distributed.tensor import DTensor

        if not isinstance(tensor, DTensor):
            return tensor
        with torch.no_grad():  # the shard itself and not a view of it
            return tensor.to_local()

    def whole(self, tensor: Tensor) -> Tensor:
        """All shards together."""
        from torch.distributed.tensor import DTensor

        if not isinstance(tensor, DTensor):
            return tensor
        with torch.no_grad():
            return tensor.full_tensor()

    def part(self, whole: Tensor, like: Tensor) -> Tensor:
        """This rank's shard, in memory of its own."""
        from torch.distributed.tensor import DTensor, distribute_tensor

        if not isinstance(like, DTensor):
            return whole
        with torch.no_grad():
            view = distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
            return DTensor.from_local(
                view.to_local().clone(),
                like.device_mesh,
                like.placements,
                run_check=False,
                shape=view.shape,
                stride=view.stride(),
            )

    @contextmanager
    def whole_weights(self, policy: nn.Module) -> Iterator[None]:
        """Every unit gathered at once, and kept: needs the memory of the whole policy."""
        from torch.distributed.fsdp import FSDPModule

        units = [module for module in policy.modules() if isinstance(module, FSDPModule)]
        try:
            for unit in units:
                unit.unshard()
                unit.set_reshard_after_forward(False, recurse=False)
            yield
        finally:
            for unit in units:
                unit.reshard()
                unit.set_reshard_after_forward(self._reshards(unit, policy), recurse=False)


@contextmanager
def _without_reduction(module: Any) -> Iterator[None]:
    module.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        module.set_requires_gradient_sync(True)


def _declared(policy: nn.Module) -> tuple[str, ...]:
    """What the policy says its units are; else what modules in it say, as those of transformers do."""
    for attribute in _DECLARATIONS:
        owners = [policy] if attribute == "fsdp_units" else policy.modules()
        names = [name for module in owners for name in getattr(module, attribute, None) or ()]
        if names:
            return tuple(dict.fromkeys(names))
    return ()


def _is_named(name: str, module: nn.Module, unit: str) -> bool:
    """Whether ``unit`` is the module's class, or its name with ``*`` for one part of it."""
    parts, pattern = name.split("."), unit.split(".")
    by_name = len(parts) == len(pattern) and all(map(fnmatchcase, parts, pattern))
    return by_name or type(module).__name__ == unit


def _check_parameters(policy: nn.Module, units: Sequence[nn.Module]) -> None:
    """Refuse what shards cannot hold: trainable numbers without a dimension, and weights that two units share."""
    numbers = [name for name, p in policy.named_parameters() if p.dim() == 0 and p.requires_grad]
    if numbers:
        raise ConfigError(
            f"FSDP cannot shard a parameter without a dimension, and {', '.join(numbers)} is to be trained.\n"
            "Give it one (nn.Parameter(torch.zeros(1))), freeze it, or use distributed='ddp'."
        )
    owners: dict[nn.Parameter, nn.Module] = {}
    for unit in (*units, policy):
        for module in unit.modules():
            for parameter in module.parameters(recurse=False):
                owners.setdefault(parameter, unit)
    for name, parameter in policy.named_parameters(remove_duplicate=False):
        holder = _innermost(policy, units, name)
        if owners[parameter] is not holder:
            raise ConfigError(
                f"The parameter {name} is shared by two units of FSDP, {type(holder).__name__} and "
                f"{type(owners[parameter]).__name__}, but belongs to one.\n"
                "Leave the units that share it out of wrap: what is in no unit is kept with the policy itself."
            )


def _innermost(policy: nn.Module, units: Sequence[nn.Module], parameter: str) -> nn.Module:
    """The unit under which a parameter of that name stands."""
    holder = policy
    module = policy
    for part in parameter.split(".")[:-1]:
        module = getattr(module, part)
        if any(module is unit for unit in units):
            holder = module
    return holder


def _blocks(policy: nn.Module) -> str:
    """The classes that could be units, the most frequent first."""
    return ", ".join(f"{name} ({count})" for name, count in _candidates(policy)) or "none"


def _suggestion(policy: nn.Module) -> str:
    candidates = _candidates(policy)
    return f"FSDP(wrap=['{candidates[0][0]}']); its blocks are {_blocks(policy)}" if candidates else "FSDP(wrap=[...])"


def _candidates(policy: nn.Module) -> list[tuple[str, int]]:
    lists = (nn.ModuleList, nn.ModuleDict)
    modules = [m for m in policy.modules() if m is not policy and not isinstance(m, lists) and any(m.children())]
    return Counter(type(m).__name__ for m in modules if any(True for _ in m.parameters())).most_common(5)
