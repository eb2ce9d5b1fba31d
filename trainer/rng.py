"""The random streams of a run: kept and put back bit for bit, and seeds derived from names and numbers.

The key names are LeRobot's. Added are ``py_rng_has_gauss`` and ``py_rng_cached_gaussian`` (a pending
``random.gauss``), and numpy's cached Gaussian is float64, as numpy draws it.
"""

from __future__ import annotations

import json
import operator
import random
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ..strategies.checks import seed_number
from ..strategies.errors import CheckpointError

if TYPE_CHECKING:
    from ..strategies.device import DeviceStrategy

_HOST_KEYS = (
    "py_rng_version",
    "py_rng_state",
    "py_rng_has_gauss",
    "py_rng_cached_gaussian",
    "np_rng_state_values",
    "np_rng_state_index",
    "np_rng_has_gauss",
    "np_rng_cached_gaussian",
    "torch_rng_state",
)


def capture(device: DeviceStrategy) -> dict[str, Tensor]:
    """The state of python's, numpy's, torch's and the device's random streams, as tensors on the cpu.

    Raises:
        CheckpointError: numpy's global generator was replaced by one other than its MT19937.
    """
    version, words, pending = random.getstate()
    numpy_state = np.random.get_state(legacy=False)
    if numpy_state["bit_generator"] != "MT19937":
        raise CheckpointError(
            f"numpy's global generator is {numpy_state['bit_generator']}, whose state cannot be kept.\n"
            "Leave the global one an MT19937 and use a numpy.random.Generator of your own for others."
        )
    state = {
        "py_rng_version": torch.tensor([version]),
        "py_rng_state": torch.tensor(words),
        "py_rng_has_gauss": torch.tensor([int(pending is not None)]),
        "py_rng_cached_gaussian": torch.tensor([pending or 0.0], dtype=torch.float64),
        "np_rng_state_values": torch.tensor(numpy_state["state"]["key"].astype(np.int64)),
        "np_rng_state_index": torch.tensor([numpy_state["state"]["pos"]]),
        "np_rng_has_gauss": torch.tensor([numpy_state["has_gauss"]]),
        "np_rng_cached_gaussian": torch.tensor([numpy_state["gauss"]], dtype=torch.float64),
        "torch_rng_state": torch.get_rng_state(),
    }
    on_device = device.rng_state()
    if on_device is not None:
        state[_device_key(device)] = on_device
    return state


def restore(state: dict[str, Tensor], device: DeviceStrategy) -> None:
    """Put back every stream that ``capture`` knows here; streams of other devices in ``state`` stay unused.

    To go on on another device than the one saved, fill in its stream:
    ``restore({**capture(device), **state}, device)``.

    Raises:
        CheckpointError: A stream is missing in ``state`` (nothing was changed) or is not a state of it.
    """
    on_device = [_device_key(device)] if device.rng_state() is not None else []
    missing = [name for name in (*_HOST_KEYS, *on_device) if name not in state]
    if missing:
        raise CheckpointError(
            f"The random state has no {', '.join(missing)}, so the run would not go on as it was.\n"
            "Resume from a checkpoint that was saved on this kind of device."
        )
    try:
        pending = state["py_rng_cached_gaussian"].item() if state["py_rng_has_gauss"].item() else None
        words = tuple(state["py_rng_state"].tolist())
        random.setstate((int(state["py_rng_version"].item()), words, pending))
        key, position = state["np_rng_state_values"].numpy(), int(state["np_rng_state_index"].item())
        if key.shape != (624,) or not 0 <= position <= 624:  # numpy would read beyond the end
            raise ValueError("numpy's has not the shape of an MT19937")
        np.random.set_state(
            {
                "bit_generator": "MT19937",
                "state": {"key": key.astype(np.uint32), "pos": position},
                "has_gauss": int(state["np_rng_has_gauss"].item()),
                "gauss": state["np_rng_cached_gaussian"].item(),
            }
        )
        torch.set_rng_state(state["torch_rng_state"])
        for name in on_device:
            device.set_rng_state(state[name])
    except (TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"The random state cannot be restored: {error}.\nResume from another checkpoint."
        ) from error


@contextmanager
def preserved(device: DeviceStrategy) -> Iterator[None]:
    """Leave all streams as they were, whatever is drawn inside and however it ends."""
    state = capture(device)
    try:
        yield
    finally:
        restore(state, device)


def derive_seed(*parts: int | str) -> int:
    """A seed from 0 to 2**63 - 1 for these parts in this order, such as ``derive_seed(seed, "epoch", 3)``.

    The same on every machine; different parts give different seeds up to the odds of a 63-bit collision.
    """
    plain = [part if isinstance(part, str) else operator.index(part) for part in parts]
    digest = blake2b(json.dumps(plain).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def seed_everything(seed: int) -> None:
    """Seed python's, numpy's and torch's global streams, torch's on every device.

    Raises:
        ConfigError: ``seed`` is not a whole number from 0 to 2**63 - 1.
    """
    seed_number("seed", seed)
    random.seed(seed)
    # From the same words numpy's generator would be python's, number by number: hence one word more.
    np.random.seed(seed if seed < 2**32 else [seed % 2**32, seed // 2**32, 1])
    torch.manual_seed(seed)


def _device_key(device: DeviceStrategy) -> str:
    return f"torch_{device.device.type}_rng_state"
