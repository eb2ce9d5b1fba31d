"""What every test leaves as it found it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)  # the nets here are too small to share
# A store asks the name server who connects to it, which the C library waits 5 s for if a packet is lost.
os.environ.setdefault("RES_OPTIONS", "timeout:1")


@pytest.fixture(autouse=True)
def process_is_left_as_found(tmp_path: os.PathLike[str]) -> Iterator[None]:
    here = Path.cwd()
    os.chdir(tmp_path)  # runs without a run_dir land here
    environment = dict(os.environ)
    before = (
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_num_threads(),
    )
    yield
    os.chdir(here)
    after = (
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_num_threads(),
    )
    assert after == before
    changed = {k for k in {**environment, **os.environ} if environment.get(k) != os.environ.get(k)}
    assert changed <= {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR"}  # torch sets the latter when it likes
