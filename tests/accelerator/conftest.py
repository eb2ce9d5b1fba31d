"""The device under test: the cpu, to find faults of the tests themselves, and the accelerator if there is one."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from policyfit import CPUDevice, probe
from policyfit.trainer.resolve import resolve_device

sys.path.insert(0, str(Path(__file__).parent))  # the tests share rig.py

from rig import Rig

FACTS = probe()
ACCELERATOR = resolve_device("auto", FACTS)


@pytest.fixture(autouse=True)
def process_is_left_as_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In place of the one for all tests: CUDA and the profiler set variables of their own when they start."""
    here, threads = Path.cwd(), torch.get_num_threads()
    os.chdir(tmp_path)
    torch.set_num_threads(1)
    if importlib.util.find_spec("yaml") is None:  # a borrowed machine: config.yaml is then written as JSON
        monkeypatch.setattr("policyfit.trainer.strict_yaml.write", json.dumps)
    yield
    torch.set_num_threads(threads)
    os.chdir(here)


@pytest.fixture
def accelerator() -> Rig:
    """The accelerator that device='auto' takes."""
    if ACCELERATOR.chosen == "cpu":
        pytest.skip(f"needs an accelerator (cuda, mps or xpu): {ACCELERATOR.reason}")
    ACCELERATOR.value.setup()
    return Rig(ACCELERATOR.value, FACTS)


@pytest.fixture
def streaming(accelerator: Rig) -> Rig:
    """An accelerator with streams, events and pinned memory."""
    if not accelerator.strategy.pins_memory:
        pytest.skip(f"needs streams and pinned memory (cuda or xpu), found {accelerator.kind}")
    return accelerator


@pytest.fixture
def cuda(accelerator: Rig) -> Rig:
    """A GPU of NVIDIA or AMD."""
    if accelerator.kind != "cuda":
        pytest.skip(f"needs a CUDA or ROCm device, found {accelerator.kind}")
    return accelerator


@pytest.fixture(params=["cpu", pytest.param("accelerator", marks=pytest.mark.accelerator)])
def rig(request: pytest.FixtureRequest) -> Rig:
    """The cpu, and the accelerator."""
    if request.param == "cpu":
        return Rig(CPUDevice(), FACTS)
    found: Rig = request.getfixturevalue("accelerator")
    return found
