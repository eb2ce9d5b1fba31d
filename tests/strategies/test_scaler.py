"""The loss scale: its settings, its limits, its state."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from policyfit import FP16, CheckpointError, ConfigError, GradScalerConfig, PrecisionError
from policyfit.strategies.scaler import LossScaler, grad_scaler_config

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"init_scale": "big"}, "grad_scaler.init_scale must be a finite number of .*, got 'big'"),
        ({"init_scale": True}, "grad_scaler.init_scale must be a finite number of .*, got True"),
        ({"init_scale": math.nan}, "grad_scaler.init_scale must be a finite number of .*, got nan"),
        ({"init_scale": math.inf}, "grad_scaler.init_scale must be a finite number"),
        ({"init_scale": 0.0}, r"init_scale must be .* of at least 1.1.*, got 0\.0\.\nKeep it within float32"),
        ({"init_scale": 1e39}, r"grad_scaler.init_scale must be .* of at most 3.4.*, got 1e\+39"),
        ({"max_scale": 1e39}, r"grad_scaler.max_scale must be .* of at most 3.4.*, got 1e\+39"),
        ({"min_scale": -1.0}, "grad_scaler.min_scale must be .* of at least 1.1"),
        ({"min_scale": 1e-60}, "grad_scaler.min_scale must be .* of at least 1.1"),
        ({"growth_factor": 1.0}, "grad_scaler.growth_factor must be a finite number above 1, got 1.0"),
        ({"backoff_factor": 1.0}, "grad_scaler.backoff_factor must be a finite number above 0 and below 1, got 1.0"),
        ({"backoff_factor": 0.0}, "grad_scaler.backoff_factor must be a finite number above 0 and below 1, got 0.0"),
        ({"growth_interval": 0}, "grad_scaler.growth_interval must be a whole number of at least 1, got 0"),
        ({"growth_interval": 2.5}, "grad_scaler.growth_interval must be a whole number of at least 1, got 2.5"),
        ({"growth_interval": True}, "grad_scaler.growth_interval must be a whole number"),
        ({"init_scale": 2.0, "min_scale": 4.0}, "grad_scaler.init_scale must be at least min_scale"),
        ({"init_scale": 8.0, "max_scale": 4.0}, "grad_scaler.max_scale must be at least init_scale"),
        ({"initial_scale": 8.0}, r"grad_scaler.initial_scale is not a setting .*\nDid you mean init_scale\?"),
        ({"xyz": 8.0}, r"grad_scaler.xyz is not a setting of the loss scaler\.\nIt has init_scale"),
        (1024.0, r"must be a GradScalerConfig or its fields, got 1024.0.*\n.*'init_scale'"),
        ("init_scale", "must be a GradScalerConfig or its fields"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        grad_scaler_config(settings)
    with pytest.raises(ConfigError, match=message):
        FP16(settings)


def test_settings_may_be_an_object_its_fields_or_nothing() -> None:
    assert grad_scaler_config(None) == GradScalerConfig() == grad_scaler_config({})
    assert grad_scaler_config({"init_scale": 8, "max_scale": None}) == GradScalerConfig(init_scale=8)
    own = GradScalerConfig(growth_interval=7)
    assert grad_scaler_config(own) is own


def scaler(**settings: Any) -> LossScaler:
    return LossScaler(GradScalerConfig(**settings), CPU)


def attempt(made: LossScaler, gradient: float) -> float:
    """One update with the one scaled gradient that is given; returns the flag."""
    flag = torch.zeros(())
    made.unscale([torch.tensor([gradient])], flag)
    made.update(flag)
    return float(flag)


def test_the_scale_never_leaves_its_limits() -> None:
    made = scaler(init_scale=8.0, min_scale=2.0, max_scale=16.0, growth_interval=1)
    assert [(attempt(made, 1.0), float(made.scale))[1] for _ in range(3)] == [16.0, 16.0, 16.0]
    assert [(attempt(made, math.inf), float(made.scale))[1] for _ in range(5)] == [8.0, 4.0, 2.0, 2.0, 2.0]


def test_the_scale_without_a_maximum_stays_finite() -> None:
    made = scaler(init_scale=2.0**126, growth_interval=1)
    for _ in range(5):
        attempt(made, 1.0)
    assert float(made.scale) == 2.0**127


def test_the_scale_grows_after_its_interval_of_updates_without_overflow() -> None:
    made = scaler(init_scale=8.0, growth_interval=3)
    scales = [(attempt(made, gradient), float(made.scale))[1] for gradient in (1.0, 1.0, math.nan, 1.0, 1.0, 1.0, 1.0)]
    assert scales == [8, 8, 4, 4, 4, 8, 8]


def test_several_overflows_give_one_flag_of_exactly_one_and_one_move_of_the_scale() -> None:
    made = scaler(init_scale=8.0)
    gradients = [torch.tensor([value]) for value in (math.inf, 1.0, math.nan)]
    flag = torch.zeros(())
    made.unscale(gradients, flag)
    made.update(flag)
    assert float(flag) == 1.0
    assert float(made.scale) == 4.0
    assert float(gradients[1]) == 1 / 8


def test_a_resumed_scaler_can_unscale_before_any_loss_was_scaled() -> None:
    saved = scaler(init_scale=512.0)
    attempt(saved, math.inf)
    resumed = scaler(init_scale=4.0)
    resumed.load_state_dict(saved.state_dict())
    assert float(resumed.scale) == 256.0
    gradient = torch.tensor([256.0])
    resumed.unscale([gradient], torch.zeros(()))
    assert float(gradient) == 1.0


def test_a_resumed_scaler_grows_at_the_update_at_which_the_saved_one_would_have() -> None:
    saved = scaler(init_scale=8.0, growth_interval=4)
    for _ in range(3):
        attempt(saved, 1.0)
    resumed = scaler(init_scale=8.0, growth_interval=4)
    resumed.load_state_dict(saved.state_dict())
    attempt(resumed, 1.0)
    assert float(resumed.scale) == 16.0


@pytest.mark.parametrize("interval", [1, 2, 3, 5])
@pytest.mark.parametrize("before", range(7))
def test_updates_that_are_taken_back_leave_scale_and_growth_as_they_were(interval: int, before: int) -> None:
    made = scaler(init_scale=8.0, growth_interval=interval)
    for _ in range(before):
        attempt(made, 1.0)
    state = made.state_dict()
    for _ in range(2):
        attempt(made, 1.0)
    made.take_back(2, state["scale"])
    assert made.state_dict() == state


def test_growth_begins_anew_where_one_of_the_updates_taken_back_overflowed() -> None:
    made = scaler(init_scale=8.0, growth_interval=5)
    for gradient in (1.0, 1.0, math.inf, 1.0):
        attempt(made, gradient)
    made.take_back(2, 8.0)
    assert (float(made.scale), made.state_dict()["_growth_tracker"]) == (8.0, 0)


def test_factors_and_interval_are_those_of_the_settings_and_not_of_the_state() -> None:
    resumed = scaler(growth_factor=4.0, backoff_factor=0.25, growth_interval=9)
    resumed.load_state_dict(scaler(init_scale=64.0).state_dict())
    assert resumed.state_dict() == {
        "scale": 64.0,
        "growth_factor": 4.0,
        "backoff_factor": 0.25,
        "growth_interval": 9,
        "_growth_tracker": 0,
    }


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"scale": 8.0},
        *({"scale": scale, "_growth_tracker": 0} for scale in ("x", math.nan, 0.0, math.inf, -1.0)),
        {"scale": 8.0, "_growth_tracker": None},
    ],
)
def test_a_state_that_is_none_is_refused(state: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="must hold scale and _growth_tracker"):
        scaler().load_state_dict(state)


@pytest.mark.filterwarnings("ignore:torch.cuda.amp.GradScaler is enabled:UserWarning")
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA devices")
def test_a_scaler_that_torch_disabled_in_silence_is_refused() -> None:
    with pytest.raises(PrecisionError, match="torch disabled it on cuda"):
        LossScaler(GradScalerConfig(), torch.device("cuda"))
