"""What TF32 does to the error of a matmul and of a convolution during a run, and that it is over afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rig import Rig, wide

from policyfit import TF32, Callback, Trainer
from policyfit.strategies.formats import tf32_support

# Relative errors: float32 rounds to 24 bits, TF32's factors to 11. Both thresholds leave a factor of several.
EXACT, ROUNDED = 1e-5, 1e-4


def matmul_error(device: torch.device) -> float:
    """Relative error of a product of two matrices, against float64 on the host."""
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(512, 512, generator=generator), torch.randn(512, 512, generator=generator)
    return relative_error((a.to(device) @ b.to(device)).cpu(), a.double() @ b.double())


def convolution_error(device: torch.device) -> float:
    """The same for a convolution with the channels of an image encoder."""
    generator = torch.Generator().manual_seed(0)
    image, kernel = torch.randn(4, 64, 24, 24, generator=generator), torch.randn(64, 64, 3, 3, generator=generator)
    made = torch.nn.functional.conv2d(image.to(device), kernel.to(device), padding=1).cpu()
    return relative_error(made, torch.nn.functional.conv2d(image.double(), kernel.double(), padding=1))


def relative_error(made: torch.Tensor, exact: torch.Tensor) -> float:
    return float((made.double() - exact).norm() / exact.norm())


class Errors(Callback):
    """Measures both during the run."""

    def __init__(self) -> None:
        self.matmul = self.convolution = float("nan")

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        self.matmul = matmul_error(trainer.device.device)
        self.convolution = convolution_error(trainer.device.device)


def switches() -> tuple[Any, ...]:
    backends: Any = torch.backends
    return (torch.get_float32_matmul_precision(), backends.cudnn.allow_tf32, backends.cuda.matmul.fp32_precision)


def errors_in_a_run(rig: Rig, enabled: bool | None) -> Errors:
    errors = Errors()
    rig.fit(wide(), rig.batches(1), callbacks=[TF32(enabled), errors], max_steps=1)
    return errors


def test_float32_is_exact_in_a_run_without_tf32_and_the_switches_come_back(rig: Rig) -> None:
    before = switches()
    errors = errors_in_a_run(rig, enabled=False)
    assert errors.matmul < EXACT
    assert errors.convolution < EXACT
    assert switches() == before


def test_tf32_rounds_in_a_run_where_the_device_has_it_and_is_over_afterwards(rig: Rig) -> None:
    support = tf32_support(rig.device, rig.facts)
    if support.native and not support.usable:
        pytest.skip(support.reason)
    before, error_before = switches(), matmul_error(rig.device)
    errors = errors_in_a_run(rig, enabled=True)
    if support.usable:
        assert ROUNDED < errors.matmul < 1e-2
        assert ROUNDED < errors.convolution < 1e-2
    else:
        assert errors.matmul < EXACT
    assert switches() == before
    assert matmul_error(rig.device) == error_before


@pytest.mark.accelerator
def test_tf32_is_over_after_an_exception(accelerator: Rig) -> None:
    class Failing(Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            raise RuntimeError("in the middle")

    before, error_before = switches(), matmul_error(accelerator.device)
    with pytest.raises(RuntimeError, match="in the middle"):
        accelerator.fit(wide(), accelerator.batches(1), callbacks=[TF32(True), Failing()])
    assert switches() == before
    assert matmul_error(accelerator.device) == error_before


def test_switches_are_left_alone_when_nothing_was_asked(rig: Rig) -> None:
    before = switches()
    measured = matmul_error(rig.device)
    assert errors_in_a_run(rig, enabled=None).matmul == measured
    assert switches() == before
