"""Random streams are put back bit for bit, or the difference is an error."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from policyfit.strategies.errors import CheckpointError, ConfigError
from policyfit.trainer.rng import capture, derive_seed, preserved, restore, seed_everything


class FakeDevice:
    """A device strategy as far as random streams go, with a stream of its own unless it is the cpu."""

    def __init__(self, kind: str = "cpu") -> None:
        self.device = torch.device(kind)
        self.generator = torch.Generator().manual_seed(1) if kind != "cpu" else None

    def rng_state(self) -> Tensor | None:
        return None if self.generator is None else self.generator.get_state()

    def set_rng_state(self, state: Tensor) -> None:
        assert self.generator is not None
        self.generator.set_state(state)

    def draw(self) -> float:
        return 0.0 if self.generator is None else float(torch.rand((), generator=self.generator))


def device(kind: str = "cpu") -> Any:
    return FakeDevice(kind)


def draws(machine: Any) -> list[Any]:
    """What every stream gives next; the odd number of Gaussians leaves one pending in python and in numpy."""
    return [
        random.gauss(0, 1),
        random.random(),
        np.random.normal(),
        np.random.rand(),
        torch.rand(3).tolist(),
        torch.randn(17).tolist(),
        machine.draw(),
    ]


@pytest.fixture(autouse=True)
def streams_as_before() -> Any:
    with preserved(device()):
        yield


@pytest.mark.parametrize("kind", ["cpu", "cuda", "mps", "xpu"])
@pytest.mark.parametrize("before", [0, 1])
def test_restored_streams_draw_the_same_numbers_again(kind: str, before: int) -> None:
    machine = device(kind)
    seed_everything(3)
    for _ in range(before):
        draws(machine)
    state = capture(machine)
    first = [draws(machine) for _ in range(3)]
    restore(state, machine)
    assert [draws(machine) for _ in range(3)] == first


def test_pending_gaussians_come_back_exactly() -> None:
    seed_everything(5)
    random.gauss(0, 1)
    np.random.normal()
    state = capture(device())
    expected = random.gauss(0, 1), np.random.normal()
    assert all(value != float(np.float32(value)) for value in expected)
    seed_everything(6)
    restore(state, device())
    assert (random.gauss(0, 1), np.random.normal()) == expected


def test_captured_streams_have_the_names_and_types_of_lerobot() -> None:
    state = capture(device("cuda"))
    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in state.items()} == {
        "py_rng_version": (torch.int64, (1,)),
        "py_rng_state": (torch.int64, (625,)),
        "py_rng_has_gauss": (torch.int64, (1,)),
        "py_rng_cached_gaussian": (torch.float64, (1,)),
        "np_rng_state_values": (torch.int64, (624,)),
        "np_rng_state_index": (torch.int64, (1,)),
        "np_rng_has_gauss": (torch.int64, (1,)),
        "np_rng_cached_gaussian": (torch.float64, (1,)),
        "torch_rng_state": (torch.uint8, (5056,)),
        "torch_cuda_rng_state": (torch.uint8, (5056,)),
    }


def test_capture_does_not_change_what_is_drawn_next() -> None:
    machine = device("cuda")
    seed_everything(3)
    expected = draws(machine)
    seed_everything(3)
    machine.generator.manual_seed(1)
    state = capture(machine)
    assert draws(machine) == expected
    kept = {name: tensor.clone() for name, tensor in state.items()}
    draws(machine)
    assert all(torch.equal(state[name], kept[name]) for name in kept)


@pytest.mark.parametrize("missing", sorted(capture(device("cuda"))))
def test_missing_stream_is_an_error_that_names_it_and_changes_nothing(missing: str) -> None:
    machine = device("cuda")
    state = {name: tensor for name, tensor in capture(machine).items() if name != missing}
    with preserved(machine):
        expected = draws(machine)
    with preserved(machine):
        with pytest.raises(CheckpointError, match=f"has no {missing},"):
            restore(state, machine)
        assert draws(machine) == expected


def test_stream_of_another_device_is_left_out_and_a_new_one_can_be_filled_in() -> None:
    seed_everything(3)
    saved = capture(device("cuda"))
    expected = draws(device())
    restore(saved, device())
    assert draws(device()) == expected
    machine = device("mps")
    fresh = machine.rng_state()
    restore({**capture(machine), **saved}, machine)
    assert torch.equal(machine.rng_state(), fresh)
    assert draws(machine)[:-1] == expected[:-1]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("py_rng_state", torch.arange(3)),
        ("py_rng_version", torch.tensor([99])),
        ("np_rng_state_values", torch.arange(3)),
        ("np_rng_state_values", torch.arange(625)),
        ("np_rng_state_index", torch.tensor([1, 2])),
        ("np_rng_state_index", torch.tensor([625])),
        ("torch_rng_state", torch.zeros(7, dtype=torch.uint8)),
        ("torch_cuda_rng_state", torch.zeros(3)),
    ],
)
def test_damaged_stream_is_a_checkpoint_error(name: str, value: Tensor) -> None:
    machine = device("cuda")
    with pytest.raises(CheckpointError, match="cannot be restored"):
        restore({**capture(machine), name: value}, machine)


def test_other_generator_as_numpys_global_one_is_refused() -> None:
    numpy_random: Any = np.random  # its stubs leave these two out
    before = numpy_random.get_bit_generator()
    try:
        numpy_random.set_bit_generator(np.random.PCG64(3))
        with pytest.raises(CheckpointError, match="PCG64"):
            capture(device())
    finally:
        numpy_random.set_bit_generator(before)


def test_preserved_puts_all_streams_back_also_after_an_error() -> None:
    machine = device("xpu")
    seed_everything(3)
    np.random.normal()
    random.gauss(0, 1)
    with preserved(machine):
        expected = draws(machine)
    for error in (None, ValueError("x"), KeyboardInterrupt()):
        try:
            with preserved(machine):
                seed_everything(99)
                draws(machine)
                machine.generator.manual_seed(99)
                if error is not None:
                    raise error
        except (ValueError, KeyboardInterrupt) as raised:
            assert raised is error  # noqa: PT017 - both kinds are one case each
        with preserved(machine):
            assert draws(machine) == expected


def test_dropout_goes_on_as_if_never_interrupted() -> None:
    dropout = nn.Dropout(0.5)
    seed_everything(3)
    dropout(torch.ones(64))
    state = capture(device())
    expected = dropout(torch.ones(64))
    seed_everything(4)
    restore(state, device())
    assert torch.equal(dropout(torch.ones(64)), expected)


def test_derived_seeds_are_distinct_for_rank_worker_epoch_and_index() -> None:
    seeds = {
        derive_seed(0, rank, worker, epoch, index)
        for rank in range(64)
        for worker in range(16)
        for epoch in range(10)
        for index in range(3)
    }
    assert len(seeds) == 64 * 16 * 10 * 3
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_derived_seeds_tell_their_parts_apart() -> None:
    numbers: list[tuple[int | str, ...]] = [(), (0,), (0, 0), (1, 23), (12, 3), (-1,)]
    parts = [*numbers, ("0",), ("a", "b"), ("ab",), ("a,b",)]
    assert len({derive_seed(*p) for p in parts}) == len(parts)
    assert derive_seed(np.int64(5), "order") == derive_seed(5, "order")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        derive_seed(1.5)  # type: ignore[arg-type]


def test_derived_seeds_are_the_same_on_every_machine_and_release() -> None:
    assert derive_seed(0, "order", 3) == 6254814875441857239


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1, 2**32, 2**63 - 1])
def test_seed_everything_makes_every_stream_repeat(seed: int) -> None:
    seed_everything(seed)
    first = draws(device())
    seed_everything(seed)
    assert draws(device()) == first
    assert torch.initial_seed() == seed


def test_large_seeds_give_numpy_streams_of_their_own() -> None:
    firsts = set()
    for seed in (5, 5 + 2**32, 5 + 2**33):
        seed_everything(seed)
        firsts.add(np.random.rand())
    assert len(firsts) == 3


@pytest.mark.parametrize("seed", [0, 7, 2**32 - 1, 2**32, 3 * (2**32 + 1), 2**63 - 1])
def test_python_and_numpy_do_not_draw_the_same_numbers(seed: int) -> None:
    seed_everything(seed)
    assert [random.random() for _ in range(3)] != [np.random.rand() for _ in range(3)]


@pytest.mark.parametrize("seed", [-1, 2**63, 1.0, True, "3", None])
def test_seed_that_cannot_be_meant_is_refused(seed: Any) -> None:
    with pytest.raises(ConfigError, match=r"seed must be a whole number from 0 to 2\*\*63 - 1"):
        seed_everything(seed)
