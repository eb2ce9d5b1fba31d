"""What every distribution strategy promises, in each of its processes.

Run it on your own in every process of a launched run: ``for promise in PROMISES: promise(MyDistribution)``. Each
promise takes a function that makes the strategy, not yet set up, and raises AssertionError where it is broken. Numbers
here are small multiples of powers of two, so that sums are exact in any order and "equal" means bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch
from torch import Tensor, nn

from policyfit.strategies.device import CPUDevice
from policyfit.strategies.distributed import DistributionStrategy, RankFailed
from policyfit.strategies.errors import DistributedError
from policyfit.strategies.facts import probe

Make = Callable[[], DistributionStrategy]
CPU = CPUDevice()
SAMPLES = 16


class Block(nn.Module):
    """A residual linear layer whose rows (3) are fewer than the ranks of some tests."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, data: Tensor) -> Tensor:
        result: Tensor = data + self.linear(data).relu()
        return result


class Toy(nn.Module):
    """Two blocks and a weight of its own; whole numbers throughout."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        self.scale = nn.Parameter(torch.ones(5))
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("known", torch.zeros(2, 2, dtype=torch.bool))
        random = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randint(-2, 3, parameter.shape, generator=random))

    def forward(self, data: Tensor) -> Tensor:
        result: Tensor = (self.blocks(data) * self.scale.sum()).sum(1).mean()
        return result

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss: Tensor = self(batch) * index + self.scale.sum()  # a weight that is used outside of any forward
        return loss


def all_samples() -> Tensor:
    return torch.randint(-2, 3, (SAMPLES, 3), generator=torch.Generator().manual_seed(1)).float()


def own(samples: Tensor, strategy: DistributionStrategy) -> Tensor:
    return samples.chunk(strategy.world_size)[strategy.rank]


@contextmanager
def joined(make: Make) -> Iterator[DistributionStrategy]:
    strategy = make()
    strategy.check(probe())
    strategy.setup(CPU)
    try:
        yield strategy
    finally:
        strategy.teardown()


@contextmanager
def raised(kind: type[Exception]) -> Iterator[list[Exception]]:
    failures: list[Exception] = []
    try:
        yield failures
    except kind as error:
        failures.append(error)
    assert failures, f"{kind.__name__} was not raised"


def whole_gradients(strategy: DistributionStrategy, policy: nn.Module) -> list[Tensor]:
    return [strategy.whole(p.grad) for p in policy.parameters() if p.grad is not None]


def expected_gradients(index: int | None = None) -> list[Tensor]:
    """Those of one process that sees every sample, in its forward or its training step."""
    toy = Toy()
    loss = toy(all_samples()) if index is None else toy.training_step(all_samples(), index)
    loss.backward()
    return [p.grad for p in toy.parameters() if p.grad is not None]


def assert_equal(found: list[Tensor], wanted: list[Tensor]) -> None:
    assert len(found) == len(wanted) > 0
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other), f"{one} is not {other}"


def it_has_one_main_rank_among_all(make: Make) -> None:
    with joined(make) as strategy:
        assert strategy.gather(strategy.rank) == list(range(strategy.world_size))
        assert strategy.gather(strategy.local_rank) == list(range(strategy.world_size))
        assert strategy.gather(strategy.is_main) == [True] + [False] * (strategy.world_size - 1)


def it_starts_every_rank_from_rank_0(make: Make) -> None:
    with joined(make) as strategy:
        policy = Toy(seed=strategy.rank)
        policy.count.fill_(strategy.rank + 5)  # type: ignore[operator]
        strategy.wrap(policy)
        assert_equal([strategy.whole(p) for p in policy.parameters()], [p.detach() for p in Toy(0).parameters()])
        assert policy.count == 5


def it_gives_every_rank_the_policy_of_rank_0_without_wrapping_it(make: Make) -> None:
    with joined(make) as strategy:
        policy = Toy(strategy.rank)
        policy.count.fill_(strategy.rank + 5)  # type: ignore[operator]
        policy.register_buffer("wide", torch.full((1,), float(strategy.rank)).expand(3))
        strategy.align(policy)
        assert policy.get_buffer("wide").tolist() == [0.0] * 3
        assert_equal([p.detach() for p in policy.parameters()], [p.detach() for p in Toy(0).parameters()])
        assert policy.count == 5


def it_averages_gradients_over_ranks(make: Make) -> None:
    with joined(make) as strategy:
        policy = Toy()
        module = strategy.wrap(policy)
        for _ in range(3):  # DDP lays its buckets anew after the first
            module(own(all_samples(), strategy)).backward()
            assert_equal(whole_gradients(strategy, policy), expected_gradients())
            policy.zero_grad()


def it_averages_those_of_other_methods_too(make: Make) -> None:
    with joined(make) as strategy:
        policy = Toy()
        module = strategy.wrap(policy)
        step = strategy.through(module, policy.training_step)
        for _ in range(2):
            loss: Tensor = step(own(all_samples(), strategy), 2)
            loss.backward()  # type: ignore[no-untyped-call]
            assert_equal(whole_gradients(strategy, policy), expected_gradients(2))
            policy.zero_grad()


def a_window_talks_only_when_it_closes(make: Make) -> None:
    with joined(make) as strategy:
        policy = Toy()
        module = strategy.wrap(policy)
        for _ in range(2):
            first, second = own(all_samples(), strategy).chunk(2)
            with strategy.micro_batch(module, closes=False):
                (module(first) / 2).backward()
            before = [None if p.grad is None else strategy.local(p.grad).tolist() for p in policy.parameters()]
            seen = strategy.gather(before)
            assert strategy.world_size == 1 or seen[0] != seen[1] or seen[0] == [None] * len(before)
            (module(second) / 2).backward()
            assert_equal(whole_gradients(strategy, policy), expected_gradients())
            policy.zero_grad()


def a_window_that_was_broken_off_does_not_mute_the_next(make: Make) -> None:
    with joined(make) as strategy:
        policy = Toy()
        module = strategy.wrap(policy)
        with suppress(KeyError), strategy.micro_batch(module, closes=False):
            raise KeyError
        module(own(all_samples(), strategy)).backward()
        assert_equal(whole_gradients(strategy, policy), expected_gradients())


def a_rank_that_cannot_compute_stands_in_with_zeros(make: Make) -> None:
    for where in ("before", "forward", "backward"):
        with joined(make) as strategy:
            policy, last = Toy(), strategy.world_size - 1
            if last == 0:
                return
            module = strategy.wrap(policy)
            strategy.ready(policy)
            samples = own(all_samples(), strategy)
            with strategy.micro_batch(module, closes=True):
                module(samples).backward()
            strategy.reduce_max(torch.zeros(3))
            policy.zero_grad()
            if strategy.rank < last:
                for closes in (False, True):
                    with strategy.micro_batch(module, closes=closes):
                        module(samples).backward()
                toy = Toy()
                (2 * toy(torch.cat(all_samples().chunk(last + 1)[:last])) * last / (last + 1)).backward()
                for parameter, expected in zip(policy.parameters(), toy.parameters(), strict=True):
                    assert parameter.grad is not None
                    assert expected.grad is not None
                    wanted = strategy.local(strategy.part(expected.grad, parameter))
                    torch.testing.assert_close(strategy.local(parameter.grad), wanted)
            else:
                if where != "before":
                    _break_off(strategy, module, policy, where)
                strategy.fail()
                strategy.stand_in(module, closes=False)
                strategy.stand_in(module, closes=True)
            strategy.gather(None)


def _break_off(strategy: DistributionStrategy, module: nn.Module, policy: Toy, where: str) -> None:
    def fail(*_: object) -> None:
        raise KeyError

    with suppress(KeyError), strategy.micro_batch(module, closes=False):
        if where == "forward":
            policy.blocks[1].register_forward_hook(fail)
        loss = module(own(all_samples(), strategy))
        loss.register_hook(fail)
        loss.backward()


def it_reduces_flags_in_place(make: Make) -> None:
    with joined(make) as strategy:
        last = strategy.world_size - 1
        mailbox = torch.tensor([0.0, float(strategy.rank == last), 0.0, 7.0 + strategy.rank])
        strategy.reduce_max(mailbox[:3])
        assert mailbox.tolist() == [0.0, 1.0, 0.0, 7.0 + strategy.rank]


def it_knows_the_norm_of_each_whole_gradient(make: Make) -> None:
    with joined(make) as strategy:
        policy = Toy()
        module = strategy.wrap(policy)  # kept: DDP averages for as long as its wrapper lives
        module(own(all_samples(), strategy)).backward()
        local = [strategy.local(p.grad) for p in policy.parameters() if p.grad is not None]
        norms = strategy.norms(torch.stack(torch._foreach_norm(local)))
        assert (norms.dtype, norms.shape) == (torch.float32, (len(local),))
        wanted = torch.stack([gradient.norm() for gradient in expected_gradients()])
        torch.testing.assert_close(norms, wanted, rtol=1e-6, atol=0.0)  # the order of squares


def a_norm_that_is_not_finite_stays_so_and_a_large_one_stays_finite(make: Make) -> None:
    with joined(make) as strategy:
        main = strategy.is_main
        norms = strategy.norms(torch.tensor([math.inf if main else 1.0, math.nan if main else 1.0, 1e20, 1e-30]))
        bad = strategy.gather([math.isfinite(norm) for norm in norms.tolist()])
        assert bad[0] == [False, False, True, True]
        assert norms[2] >= 1e20
        assert norms[3] >= 1e-30


def what_is_written_to_a_local_part_is_written_to_the_whole(make: Make) -> None:
    with joined(make) as strategy:
        policy = Toy()
        module = strategy.wrap(policy)  # kept: DDP averages for as long as its wrapper lives
        module(own(all_samples(), strategy)).backward()
        for parameter in policy.parameters():
            assert parameter.grad is not None
            with torch.no_grad():
                strategy.local(parameter).fill_(3.0)
            strategy.local(parameter.grad).mul_(0.0).add_(4.0)
            assert torch.equal(strategy.whole(parameter), torch.full(parameter.shape, 3.0))
            assert torch.equal(strategy.whole(parameter.grad), torch.full(parameter.shape, 4.0))


def a_whole_tensor_is_put_together_from_its_parts(make: Make) -> None:
    with joined(make) as strategy:
        policy = Toy()
        strategy.wrap(policy)
        for parameter in policy.parameters():
            whole = torch.arange(float(parameter.numel())).view(parameter.shape)
            part = strategy.part(whole, parameter)
            assert type(part) is type(parameter.data)
            assert strategy.local(part).shape == strategy.local(parameter).shape
            assert torch.equal(strategy.whole(part), whole)
            with torch.no_grad():
                parameter.copy_(part)
            assert torch.equal(strategy.whole(parameter), whole)


def it_carries_values_between_ranks(make: Make) -> None:
    with joined(make) as strategy:
        value = {"rank": strategy.rank, "list": [None, "text"]}
        assert strategy.broadcast(value) == {"rank": 0, "list": [None, "text"]}
        assert [v["rank"] for v in strategy.gather(value)] == list(range(strategy.world_size))
        assert strategy.broadcast(None) is None
        last = strategy.world_size - 1
        words, here = strategy.from_rank(last, (str(strategy.rank), torch.full((2, 2), strategy.rank).t()))
        assert (words, here.tolist()) == (str(last), [[last, last], [last, last]])


def a_rank_that_failed_answers_with_its_error(make: Make) -> None:
    with joined(make) as strategy:
        last = strategy.world_size - 1
        if strategy.rank == last and last > 0:
            assert strategy.excuse(KeyError("a key"))
            assert strategy.excuse(RankFailed(0, "of another rank"))  # asks for nothing
        elif last > 0:
            with raised(RankFailed) as failure:
                strategy.gather(None)
            assert str(failure[0]).splitlines()[0] == f"Rank {last} failed: KeyError: 'a key'"
        assert strategy.gather(strategy.rank, "the end") == list(range(strategy.world_size))


def ranks_that_meet_at_different_places_are_told(make: Make) -> None:
    with joined(make) as strategy:
        last = strategy.world_size - 1
        if last > 0:
            with raised(DistributedError) as failure:
                strategy.gather(None, "one" if strategy.rank < last else "another")
            assert f"Rank {last} has come to another, but rank 0 to one." in str(failure[0])


def it_gives_every_rank_the_buffers_of_rank_0(make: Make) -> None:
    with joined(make) as strategy:
        policy = Toy()
        strategy.wrap(policy)
        strategy.ready(policy)
        for number in (1, 2):
            policy.mean.fill_(strategy.rank + number)  # type: ignore[operator]
            policy.count.fill_(strategy.rank + 10 * number)  # type: ignore[operator]
            policy.known = torch.tensor([[strategy.is_main, True], [False, not strategy.is_main]])  # replaced
            strategy.sync_buffers()
            assert policy.mean.tolist() == [number] * 3  # type: ignore[operator]
            assert policy.count == 10 * number
            assert policy.known.tolist() == [[True, True], [False, False]]


def a_rank_runs_alone_inside_whole_weights(make: Make) -> None:
    with joined(make) as strategy:
        policy = Toy()
        module = strategy.wrap(policy)
        wanted = [float(Toy()(all_samples()).detach()), float(Toy().training_step(all_samples(), 2).detach())]
        for trained in (False, True):
            with suppress(KeyError), strategy.whole_weights(policy), torch.no_grad():
                if strategy.is_main:
                    assert float(policy(all_samples())) == wanted[0]
                    assert float(policy.training_step(all_samples(), 2)) == wanted[1]
                raise KeyError
            module(own(all_samples(), strategy)).backward()
            assert_equal(whole_gradients(strategy, policy), expected_gradients())
            policy.zero_grad()
            assert trained or [p.grad for p in policy.parameters()] == [None] * 5


def it_can_leave_and_join_again(make: Make) -> None:
    threads = torch.get_num_threads()
    for _ in range(2):
        with joined(make) as strategy:
            assert strategy.gather(strategy.rank) == list(range(strategy.world_size))
        assert not torch.distributed.is_initialized()
    assert torch.get_num_threads() == threads


PROMISES: tuple[Callable[[Make], None], ...] = (
    it_has_one_main_rank_among_all,
    it_starts_every_rank_from_rank_0,
    it_gives_every_rank_the_policy_of_rank_0_without_wrapping_it,
    it_averages_gradients_over_ranks,
    it_averages_those_of_other_methods_too,
    a_window_talks_only_when_it_closes,
    a_window_that_was_broken_off_does_not_mute_the_next,
    a_rank_that_cannot_compute_stands_in_with_zeros,
    it_reduces_flags_in_place,
    it_knows_the_norm_of_each_whole_gradient,
    a_norm_that_is_not_finite_stays_so_and_a_large_one_stays_finite,
    what_is_written_to_a_local_part_is_written_to_the_whole,
    a_whole_tensor_is_put_together_from_its_parts,
    it_carries_values_between_ranks,
    a_rank_that_failed_answers_with_its_error,
    ranks_that_meet_at_different_places_are_told,
    it_gives_every_rank_the_buffers_of_rank_0,
    a_rank_runs_alone_inside_whole_weights,
    it_can_leave_and_join_again,
)
