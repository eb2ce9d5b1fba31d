"""FSDP in several processes: the contract, units, types of weights, and what optimizers do with shards."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from distribution_contract import PROMISES, Block, Toy, all_samples, assert_equal, joined, own
from processes import run
from torch import Tensor, nn

from policyfit.strategies.device import CPUDevice
from policyfit.strategies.distributed import DistributionStrategy
from policyfit.strategies.errors import ConfigError
from policyfit.strategies.fsdp import FSDP
from policyfit.strategies.units import check_shardable, find_units

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adam": (torch.optim.Adam, {}),
    "adamw": (torch.optim.AdamW, {}),
    "sgd": (torch.optim.SGD, {"momentum": 0.9}),
    "adagrad": (torch.optim.Adagrad, {}),
}


def sharded() -> FSDP:
    return FSDP(wrap=["Block"])


def replicated() -> FSDP:
    return FSDP(wrap=["blocks.*"], shard=2, replicate=2)


def keep_all(make: str) -> None:
    for promise in PROMISES:
        promise({"sharded": sharded, "replicated": replicated}[make])


def error_of(function: Callable[[], Any]) -> tuple[str, str]:
    try:
        function()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize("make", ["sharded", "replicated"])
def test_fsdp_keeps_every_promise_also_with_layers_smaller_than_the_ranks(make: str) -> None:
    run(keep_all, make, ranks=4)


# Shards ------------------------------------------------------------------------------------------------------


def describe_shards(make: str) -> list[tuple[int, ...]]:
    with joined({"sharded": sharded, "replicated": replicated}[make]) as strategy:
        policy = Toy()
        strategy.wrap(policy)
        return [tuple(strategy.local(p).shape) for p in policy.parameters()]


def test_each_rank_holds_its_part_of_every_weight_and_the_last_may_hold_none() -> None:
    rows = [([(2,), (1, 3), (1,)], 1), ([(2,), (1, 3), (1,)], 1), ([(1,), (1, 3), (1,)], 1), ([(0,), (0, 3), (0,)], 0)]
    for found, (wanted, _) in zip(run(describe_shards, "sharded", ranks=4), rows, strict=True):
        assert [found[0], *found[1:3]] == wanted
    halves = run(describe_shards, "replicated", ranks=4)
    assert halves[0] == halves[2] == [(3,), (2, 3), (2,), (2, 3), (2,)]
    assert halves[1] == halves[3] == [(2,), (1, 3), (1,), (1, 3), (1,)]


def check_own_memory() -> None:
    with joined(sharded) as strategy:
        policy = Toy()
        strategy.wrap(policy)
        weight = policy.blocks.get_parameter("0.linear.weight")
        assert strategy.local(weight).grad_fn is None  # so that it can be written to
        whole = torch.ones(3, 3)
        part = strategy.part(whole, weight)
        whole.fill_(9.0)
        assert strategy.local(part).eq(1.0).all()
        plain = torch.ones(3)
        assert strategy.local(plain) is strategy.whole(plain) is strategy.part(plain, plain) is plain


def test_part_has_memory_of_its_own_and_plain_tensors_stay_themselves() -> None:
    run(check_own_memory)


def hold_gradients_back() -> list[bool]:
    """Whether any shard has a gradient, after each backward of two windows of two."""
    with joined(sharded) as strategy:
        policy = Toy()
        module = strategy.wrap(policy)
        found = []
        for micro_batch in range(4):
            with strategy.micro_batch(module, closes=micro_batch % 2 == 1):
                module(own(all_samples(), strategy)).backward()
            found.append(any(p.grad is not None for p in policy.parameters()))
            if micro_batch % 2:
                policy.zero_grad()
        return found


def test_fsdp_reduces_gradients_once_a_window() -> None:
    assert run(hold_gradients_back) == [[False, True, False, True]] * 2


# Units -------------------------------------------------------------------------------------------------------


class Declaring(Toy):
    fsdp_units = ("Block",)


class Borrowed(nn.Module):
    """As a policy around a model of transformers, which names its own blocks, some of them not there."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Toy()
        self.model._no_split_modules = ["Block", "VisionBlock"]  # type: ignore[assignment]

    def forward(self, data: Tensor) -> Tensor:
        result: Tensor = self.model(data)
        return result


class Contained(nn.Module):
    """More containers than blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Sequential(nn.Linear(3, 3)) for _ in range(3)])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()
        self.second.linear.weight = self.first.linear.weight

    def forward(self, data: Tensor) -> Tensor:
        result: Tensor = self.second(self.first(data)).mean()
        return result


class Tempered(nn.Module):
    """With a temperature, a parameter without a dimension."""

    def __init__(self, *, trainable: bool) -> None:
        super().__init__()
        self.block, self.temperature = Block(), nn.Parameter(torch.tensor(2.0), requires_grad=trainable)

    def forward(self, data: Tensor) -> Tensor:
        result: Tensor = self.block(data).mean() * self.temperature
        return result


def units_of(names: tuple[str, ...], policy: nn.Module) -> list[str]:
    return [name for unit in find_units(policy, names) for name, module in policy.named_modules() if module is unit]


@pytest.mark.parametrize(
    ("names", "policy", "found"),
    [
        (("Block",), Toy(), ["blocks.1", "blocks.0"]),
        (("blocks.*",), Toy(), ["blocks.1", "blocks.0"]),
        (("blocks.0",), Toy(), ["blocks.0"]),
        (("Block", "Linear"), Toy(), ["blocks.1.linear", "blocks.1", "blocks.0.linear", "blocks.0"]),
        ((), Declaring(), ["blocks.1", "blocks.0"]),
        (("blocks.0",), Declaring(), ["blocks.0"]),
        ((), Borrowed(), ["model.blocks.1", "model.blocks.0"]),
    ],
)
def test_units_are_those_named_or_declared_inner_ones_first(
    names: tuple[str, ...], policy: nn.Module, found: list[str]
) -> None:
    assert units_of(names, policy) == found


@pytest.mark.parametrize(
    ("names", "policy", "message"),
    [
        (
            (),
            Toy(),
            r"FSDP\(wrap=\['Block'\]\) \(its blocks are Block \(2\), Sequential \(1\)\), or declare .* fsdp_units",
        ),
        ((), nn.ModuleList([Contained()]), r"FSDP\(wrap=\['Contained'\]\)"),
        (("Blok",), Toy(), r"FSDP.wrap names Blok, but Toy has no .*\nIts blocks are: Block \(2\)"),
        (("Block", "layers.*"), Toy(), r"FSDP.wrap names layers\.\*, but"),
        (("layers",), nn.ModuleDict({"layers": nn.ModuleList([Block()])}), r"names a ModuleList, which has no forward"),
    ],
)
def test_units_that_cannot_be_had_are_refused_with_what_to_name(
    names: tuple[str, ...], policy: nn.Module, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        units_of(names, policy)


def image_policy() -> nn.Module:
    """Whose convolution lies in memory channel by channel, as vision encoders often do."""
    policy = nn.Sequential(nn.Conv2d(2, 2, 3), Block())
    return policy.to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (Tied(), "The parameter second.linear.weight is shared by two units of FSDP, Block and Block"),
        (Tempered(trainable=True), "FSDP cannot shard a parameter without a dimension, and temperature is to be"),
        (image_policy(), r"these lie otherwise in memory: 0.weight.\nUse policy.to\(memory_format="),
        (nn.ModuleList([Block(), nn.Embedding(0, 2)]), "a parameter without an element, and 1.weight is to be trained"),
        (nn.Sequential(Block(), nn.SyncBatchNorm(2)), r"as SyncBatchNorm does: 1\.\nUse a norm of each sample"),
    ],
)
def test_what_shards_cannot_hold_is_refused_by_name(policy: nn.Module, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_shardable(policy, find_units(policy, ["Block"]))


def train_what_is_in_no_unit() -> None:
    with joined(lambda: FSDP(wrap=["Linear"])) as strategy:
        torch.manual_seed(1)
        policy, alone = (nn.Sequential(Tempered(trainable=False), nn.Flatten(0)) for _ in range(2))
        alone.load_state_dict(policy.state_dict())
        module = strategy.wrap(policy)
        module(own(all_samples(), strategy)).sum().backward()
        alone(all_samples()).sum().backward()
        temperature = dict(policy.named_parameters())["0.temperature"]
        assert strategy.whole(temperature) is temperature
        compare_gradients(strategy, policy, alone)
    with joined(lambda: FSDP(wrap=["1"])) as strategy:
        policy, alone = (nn.Sequential(Tied(), nn.Flatten(0)) for _ in range(2))
        policy.append(nn.Identity())
        alone.load_state_dict(policy.state_dict())
        module = strategy.wrap(policy)
        module(own(all_samples(), strategy)).sum().backward()
        alone(all_samples()).sum().backward()
        compare_gradients(strategy, policy, alone)


def compare_gradients(strategy: DistributionStrategy, policy: nn.Module, alone: nn.Module) -> None:
    for parameter, other in zip(policy.parameters(), alone.parameters(), strict=True):
        if other.requires_grad:
            assert parameter.grad is not None
            torch.testing.assert_close(
                strategy.whole(parameter.grad), other.grad, rtol=1e-5, atol=1e-6
            )  # order of sums


def test_frozen_numbers_and_shared_weights_outside_the_units_train_as_in_one_process() -> None:
    run(train_what_is_in_no_unit)


# Types of weights --------------------------------------------------------------------------------------------


class Grafted(nn.Module):
    """A frozen backbone in bfloat16 and a trainable float32 adapter, in the same unit and apart."""

    fsdp_units = ("Block", "Mixed")

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.mixed, self.head = Block().bfloat16().requires_grad_(False), Mixed(), nn.Linear(3, 1)

    def forward(self, data: Tensor) -> Tensor:
        result: Tensor = self.head(self.mixed(self.backbone(data.bfloat16()).float())).mean()
        return result


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(3, 3).bfloat16().requires_grad_(False)
        self.adapter = nn.Linear(3, 3)

    def forward(self, data: Tensor) -> Tensor:
        result: Tensor = self.frozen(data.bfloat16()).float() + self.adapter(data)
        return result


def train_grafted() -> list[str]:
    torch.manual_seed(3)
    alone = Grafted()
    torch.manual_seed(3)
    policy = Grafted()
    frozen = {name: p.clone() for name, p in policy.named_parameters() if not p.requires_grad}
    with joined(FSDP) as strategy:
        module = strategy.wrap(policy)
        alone_sgd = torch.optim.SGD(alone.parameters(), lr=0.1)
        sgd = torch.optim.SGD(policy.parameters(), lr=0.1)
        for _ in range(3):
            alone(all_samples()).backward()
            module(own(all_samples(), strategy)).backward()
            alone_sgd.step()
            sgd.step()
            sgd.zero_grad()
            alone_sgd.zero_grad()
        wholes = {name: strategy.whole(p) for name, p in policy.named_parameters()}
        for name, parameter in alone.named_parameters():
            torch.testing.assert_close(wholes[name], parameter.detach(), rtol=1e-5, atol=1e-6)  # the order of sums
        assert_equal([wholes[name] for name in frozen], list(frozen.values()))
        return sorted({f"{name.split('.')[-2]} {p.dtype}" for name, p in policy.named_parameters()})


def test_frozen_half_precision_weights_are_sharded_as_they_are_beside_float32() -> None:
    for types in run(train_grafted):
        assert types == [
            "adapter torch.float32",
            "frozen torch.bfloat16",
            "head torch.float32",
            "linear torch.bfloat16",
        ]


def train_under_autocast(dtype: torch.dtype) -> None:
    with joined(sharded) as strategy:
        policy = Toy()
        module = strategy.wrap(policy)
        seen: list[tuple[torch.dtype, ...]] = []
        policy.blocks.get_submodule("0.linear").register_forward_hook(
            lambda m, a, out: seen.append((m.weight.dtype, out.dtype))
        )
        with torch.autocast("cpu", dtype):
            loss = module(own(all_samples(), strategy))
        loss.backward()
        assert seen == [(torch.float32, dtype)]
        assert loss.dtype == torch.float32
        assert {p.dtype for p in policy.parameters()} == {torch.float32}
        assert {p.grad.dtype for p in policy.parameters() if p.grad is not None} == {torch.float32}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_what_autocast_says_and_nothing_else(dtype: torch.dtype) -> None:
    run(train_under_autocast, dtype)


# Updates -----------------------------------------------------------------------------------------------------


def parts(strategy: DistributionStrategy, tensors: list[Tensor]) -> list[Tensor]:
    return [strategy.local(t).detach().clone() for t in tensors]


def state_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]


def skip_with_a_flag(name: str) -> tuple[bool, bool, bool, bool]:
    """Whether a plain flag lets updates land, hold weights, hold state, and land again."""
    kind, options = OPTIMIZERS[name]
    with joined(sharded) as strategy:
        policy = Toy()
        module = strategy.wrap(policy)
        optimizer = kind(policy.parameters(), lr=0.125, fused=True, **options)  # type: ignore[call-arg]
        flag = torch.zeros(())
        optimizer.found_inf = flag  # type: ignore[attr-defined]
        weights, states = [parts(strategy, list(policy.parameters()))], []
        for raised in (0.0, 1.0, 0.0):
            module(own(all_samples(), strategy)).backward()
            flag.fill_(raised)
            optimizer.step()
            optimizer.zero_grad()
            weights.append(parts(strategy, list(policy.parameters())))
            states.append(parts(strategy, state_of(optimizer)))

        def same(one: list[Tensor], other: list[Tensor]) -> bool:
            return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))

        first, held = not same(weights[0], weights[1]), same(weights[1], weights[2])
        return first, held, same(states[0], states[1]), not same(weights[2], weights[3])


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_fused_adam_takes_a_plain_flag_and_holds_shards_and_state(name: str) -> None:
    assert run(skip_with_a_flag, name) == [(True, True, True, True)] * 2


def fail_fused(name: str) -> tuple[str, str]:
    return error_of(lambda: skip_with_a_flag(name))


@pytest.mark.parametrize("name", ["sgd", "adagrad"])
def test_fused_sgd_and_adagrad_do_not_know_shards_so_that_the_unfused_form_is_used(name: str) -> None:
    for kind, message in run(fail_fused, name):  # once torch can, the exception in the trainer may go
        assert kind == "NotImplementedError"
        assert f"aten._fused_{name}_.default does not have a sharding strategy" in message


def overflow_on_one_rank(edited_after: bool) -> tuple[float, bool, float]:
    """The road of an update, by hand: check, reduce the flag, norm, clip, step."""
    with joined(sharded) as strategy:
        policy = Toy()
        module = strategy.wrap(policy)
        optimizer = torch.optim.AdamW(policy.parameters(), lr=0.1, fused=True)
        before = parts(strategy, list(policy.parameters()))
        factor = float("inf") if strategy.rank == 1 and not edited_after else 1.0
        (module(own(all_samples(), strategy)) * factor).backward()
        gradients = [strategy.local(p.grad) for p in policy.parameters() if p.grad is not None]
        if edited_after and strategy.rank == 1:
            gradients[0][0] = float("nan")
        flag = torch.zeros(1)
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, flag[0], torch.tensor(0.5))
        mine = float(flag[0])
        strategy.reduce_max(flag)
        norm = torch.linalg.vector_norm(strategy.norms(torch.stack(torch._foreach_norm(gradients))))
        torch._foreach_mul_(gradients, (1.0 / (norm + 1e-6)).clamp_(max=1.0))
        optimizer.found_inf = flag[0]  # type: ignore[attr-defined]
        optimizer.step()
        held = all(torch.equal(a, b) for a, b in zip(before, parts(strategy, list(policy.parameters())), strict=True))
        return float(flag[0]), held, mine


@pytest.mark.parametrize("edited_after", [False, True])
def test_overflow_on_one_rank_holds_the_shards_of_all(edited_after: bool) -> None:
    first, second = run(overflow_on_one_rank, edited_after)
    assert first[:2] == second[:2] == (1.0, True)
    assert second[2] == 1.0
    assert not edited_after or first[2] == 0.0


def clip_like_one_process() -> None:
    with joined(sharded) as strategy:
        policy, alone = Toy(), Toy()
        module = strategy.wrap(policy)
        module(own(all_samples(), strategy)).backward()
        alone(all_samples()).backward()
        wanted = torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
        gradients = [strategy.local(p.grad) for p in policy.parameters() if p.grad is not None]
        norm = torch.linalg.vector_norm(strategy.norms(torch.stack(torch._foreach_norm(gradients))))
        torch._foreach_mul_(gradients, (0.5 / (norm + 1e-6)).clamp_(max=1.0))
        torch.testing.assert_close(norm, wanted, rtol=1e-6, atol=0.0)  # the order of squares
        for parameter, other in zip(policy.parameters(), alone.parameters(), strict=True):
            assert parameter.grad is not None
            torch.testing.assert_close(strategy.whole(parameter.grad), other.grad, rtol=1e-6, atol=0.0)
        torch._foreach_clamp_min_(gradients, -0.01)
        torch._foreach_clamp_max_(gradients, 0.01)
        assert all(float(strategy.whole(p.grad).abs().max()) <= 0.01 for p in policy.parameters() if p.grad is not None)


class WithoutFloat64(CPUDevice):
    has_float64 = False


def sum_squares() -> list[float]:
    strategy = sharded()
    strategy.setup(WithoutFloat64())
    try:
        return strategy.norms(torch.tensor([3.0 if strategy.rank else 4.0, 1e20])).tolist()
    finally:
        strategy.teardown()


def clip_and_sum() -> list[float]:
    clip_like_one_process()
    return sum_squares()


def test_gradients_are_clipped_through_their_shards_as_in_one_process_and_norms_are_summed_in_what_there_is() -> None:
    assert run(clip_and_sum) == [[5.0, math.inf]] * 2  # 1e40 is too much for float32


def keep_weights_gathered(reshard: bool) -> list[bool]:
    """Whether the first block's weight is whole after a forward, and after one inside ``whole_weights``."""
    with joined(lambda: FSDP(wrap=["Block"], reshard_after_forward=reshard)) as strategy:
        policy = Toy()
        module = strategy.wrap(policy)
        found = []
        for context in (nullcontext(), strategy.whole_weights(policy), nullcontext()):
            with torch.no_grad(), context:
                module(all_samples())
                found.append(type(policy.blocks.get_parameter("0.linear.weight")) is nn.Parameter)
        return found


@pytest.mark.parametrize("reshard", [True, False])
def test_units_are_freed_after_forward_as_asked_also_after_whole_weights(reshard: bool) -> None:
    assert run(keep_weights_gathered, reshard) == [[not reshard, True, not reshard]] * 2


def converted(folder: str, plugin: str) -> tuple[int, torch.dtype]:
    from lightning_fabric.plugins.precision import DoublePrecision, HalfPrecision
    from ranks import Policy, Samples

    from policyfit import Trainer

    precision: Any = DoublePrecision() if plugin == "64-true" else HalfPrecision("bf16-true")
    policy = Policy()
    trainer = Trainer("cpu", precision, max_steps=3, batch_size=4, run_dir=folder, distributed="fsdp")
    trainer.fit(policy, Samples())
    return trainer.step, policy.first.weight.dtype


@pytest.mark.parametrize(("plugin", "dtype"), [("64-true", torch.float64), ("bf16-true", torch.bfloat16)])
def test_weights_that_a_precision_converts_are_trained_in_shards(
    tmp_path: Path, plugin: str, dtype: torch.dtype
) -> None:
    assert run(converted, str(tmp_path / "run"), plugin, limit_s=60.0) == [(3, dtype)] * 2
