"""What every precision strategy promises. Run it on your own: ``for promise in PROMISES: promise(MyPrecision)``.

Each promise takes a function that makes the strategy, not yet set up, and raises AssertionError where it is broken.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from policyfit.strategies.facts import probe
from policyfit.strategies.precision import PrecisionStrategy

Make = Callable[[], PrecisionStrategy]
DEVICE = torch.device("cpu")


def ready(make: Make) -> PrecisionStrategy:
    strategy = make()
    strategy.check(DEVICE, probe())
    strategy.setup(DEVICE)
    return strategy


def two_layers() -> tuple[nn.Module, Optimizer, Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    return net, SGD(net.parameters(), lr=0.1, fused=True), torch.randn(8, 6)


def gradients_of(net: nn.Module) -> list[Tensor]:
    return [p.grad for p in net.parameters() if p.grad is not None]


def update(
    strategy: PrecisionStrategy, net: nn.Module, optimizer: Optimizer, batch: Tensor, factor: float = 1.0
) -> float:
    """One update as the trainer makes it; returns the flag."""
    with strategy.autocast():
        loss = net(batch).float().square().mean() * factor
    strategy.backward(loss)
    flag = torch.zeros(())
    strategy.unscale(gradients_of(net), flag)
    optimizer.found_inf = flag  # type: ignore[attr-defined]
    optimizer.step()
    strategy.settle_scale(flag)
    optimizer.zero_grad()
    return float(flag)


def it_has_a_name(make: Make) -> None:
    assert isinstance(make().name, str)
    assert make().name


def it_computes_in_its_dtype_and_keeps_parameters_in_float32(make: Make) -> None:
    strategy = ready(make)
    net, optimizer, batch = two_layers()
    with strategy.autocast():
        assert net(batch).dtype == strategy.compute_dtype
    update(strategy, net, optimizer, batch)
    assert {p.dtype for p in net.parameters()} == {torch.float32}


def it_computes_a_step_in_its_dtype_and_hands_everything_on(make: Make) -> None:
    strategy = ready(make)
    net, _, batch = two_layers()
    seen: list[object] = []

    def step(data: Tensor, index: int) -> Tensor:
        output: Tensor = net(data)
        seen.extend((output.dtype, index))
        return output.float().square().mean()

    loss = strategy.forward(step, batch, 7)
    assert seen == [strategy.compute_dtype, 7]
    with strategy.autocast():
        expected = net(batch).float().square().mean()
    assert torch.equal(loss, expected)
    assert loss.dtype == torch.float32


def it_leaves_process_state_as_it_was_also_after_an_error(make: Make) -> None:
    strategy = ready(make)
    before = (torch.get_default_dtype(), torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"))
    try:
        with strategy.autocast():
            raise KeyError
    except KeyError:
        pass
    assert (torch.get_default_dtype(), torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")) == before
    assert torch.is_grad_enabled()


def it_can_be_set_up_without_gradients_and_under_another_default_dtype(make: Make) -> None:
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.no_grad():
            ready(make)
        with torch.inference_mode():
            ready(make)
    finally:
        torch.set_default_dtype(default)


def it_brings_gradients_to_the_units_of_the_loss(make: Make) -> None:
    strategy = ready(make)
    net, _, batch = two_layers()
    with strategy.autocast():
        loss = net(batch).float().square().mean()
    expected = torch.autograd.grad(loss, list(net.parameters()), retain_graph=True)
    strategy.backward(loss)
    flag = torch.ones(())
    strategy.unscale(gradients_of(net), flag)
    assert float(flag) == 0.0
    for found, wanted in zip(gradients_of(net), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-4)  # 16 bits round differently when scaled


def a_gradient_that_is_not_finite_moves_no_weight(make: Make) -> None:
    for bad in (float("inf"), float("-inf"), float("nan")):
        strategy = ready(make)
        net, optimizer, batch = two_layers()
        before = [p.detach().clone() for p in net.parameters()]
        assert update(strategy, net, optimizer, batch, bad) == 1.0
        assert all(torch.equal(p, b) for p, b in zip(net.parameters(), before, strict=True))
        assert update(strategy, net, optimizer, batch) == 0.0
        assert not any(torch.equal(p, b) for p, b in zip(net.parameters(), before, strict=True))


def a_flag_that_is_up_stays_up(make: Make) -> None:
    strategy = ready(make)
    flag = torch.ones(())
    strategy.find_non_finite([torch.ones(3)], flag)
    assert float(flag) == 1.0
    flag.zero_()
    strategy.find_non_finite([torch.ones(3)], flag)
    assert float(flag) == 0.0
    strategy.find_non_finite([torch.ones(3), torch.tensor([1.0, torch.nan])], flag)
    assert float(flag) == 1.0


def its_state_survives_json_and_goes_on_as_if_nothing_was(make: Make) -> None:
    straight, stopped, resumed = ready(make), ready(make), ready(make)
    factors = [1.0, 1.0, float("inf"), 1.0, 1.0, float("inf"), 1.0, 1.0, 1.0, 1.0]
    scales: list[float | None] = []
    net, optimizer, batch = two_layers()
    for factor in factors:
        update(straight, net, optimizer, batch, factor)
        scales.append(None if straight.scale is None else float(straight.scale))
    net, optimizer, batch = two_layers()
    for factor in factors[:4]:
        update(stopped, net, optimizer, batch, factor)
    saved = stopped.state_dict()
    assert (saved is None) == (stopped.scale is None)
    if saved is not None:
        resumed.load_state_dict(json.loads(json.dumps(saved)))
        assert resumed.state_dict() == saved
    for factor, scale in zip(factors[4:], scales[4:], strict=True):
        update(resumed, net, optimizer, batch, factor)
        assert (None if resumed.scale is None else float(resumed.scale)) == scale
    assert resumed.state_dict() == straight.state_dict()


def a_step_that_was_broken_off_does_not_hinder_the_next(make: Make) -> None:
    strategy = ready(make)
    net, optimizer, batch = two_layers()
    with strategy.autocast():
        loss = net(batch).float().square().mean()
    strategy.backward(loss)
    strategy.unscale(gradients_of(net), torch.zeros(()))  # and here an error comes
    optimizer.zero_grad()
    assert update(strategy, net, optimizer, batch) == 0.0


def a_first_pass_without_gradients_takes_none_from_the_second(make: Make) -> None:
    strategy = ready(make)
    net, _, batch = two_layers()
    with strategy.autocast():
        with torch.no_grad():
            target = net(batch)
        loss = (net(batch).float() - 2 * target.float()).square().mean()
    strategy.backward(loss)
    assert len(gradients_of(net)) == len(list(net.parameters()))


def weights_that_were_swapped_are_used_at_the_next_entry(make: Make) -> None:
    strategy = ready(make)
    net, _, batch = two_layers()
    with strategy.autocast():
        before = net(batch)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    with strategy.autocast():
        assert not torch.equal(net(batch), before)
        assert torch.equal(net(batch), torch.zeros_like(before))


PROMISES: tuple[Callable[[Make], None], ...] = (
    it_has_a_name,
    it_computes_in_its_dtype_and_keeps_parameters_in_float32,
    it_computes_a_step_in_its_dtype_and_hands_everything_on,
    it_leaves_process_state_as_it_was_also_after_an_error,
    it_can_be_set_up_without_gradients_and_under_another_default_dtype,
    it_brings_gradients_to_the_units_of_the_loss,
    a_gradient_that_is_not_finite_moves_no_weight,
    a_flag_that_is_up_stays_up,
    its_state_survives_json_and_goes_on_as_if_nothing_was,
    a_step_that_was_broken_off_does_not_hinder_the_next,
    a_first_pass_without_gradients_takes_none_from_the_second,
    weights_that_were_swapped_are_used_at_the_next_entry,
)
