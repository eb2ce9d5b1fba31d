"""The constructor's values in Python: null means there what it means in a file, and nothing is taken for another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from run_parts import Logger

from policyfit import MetricsLog, Trainer
from policyfit.strategies.errors import ConfigError


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"default_callbacks": "no"}, "trainer.default_callbacks must be true or false, got 'no'"),
        ({"default_callbacks": None}, "trainer.default_callbacks must be true or false, got None"),
        ({"val_every": False}, "trainer.val_every must be a whole number of at least 1, got False"),
        ({"val_every": ""}, "trainer.val_every must be a whole number of at least 1, got ''"),
        ({"val_every": []}, "trainer.val_every must be a whole number"),
        ({"log_every": False}, "trainer.log_every must be a whole number of at least 1, got False"),
        ({"log_every": 0.0}, "trainer.log_every must be a whole number of at least 1, got 0.0"),
        ({"max_steps": 0}, "trainer.max_steps must be a whole number of at least 1, got 0"),
        ({"run_dir": 1}, "trainer.run_dir must be a folder, got 1"),
        ({"run_dir": ""}, "trainer.run_dir must be a folder, got ''"),
        ({"callbacks": {}}, "trainer.callbacks must be a list, got {}"),
        ({"callbacks": 3}, "trainer.callbacks must be a list, got 3"),
        ({"loggers": "x"}, "trainer.loggers must be a list, got 'x'"),
        ({"loggers": [Logger(), 1]}, "trainer.loggers[1] must be a logger"),
        ({"loggers": [Logger]}, "trainer.loggers[0] must be a logger"),
        ({"workers": "2"}, "trainer.workers must be a whole number of at least 0, got '2'"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_by_its_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Trainer("cpu", **settings)
    assert str(refused.value).startswith(message)


def test_none_is_none_of_them() -> None:
    nothing: Any = None
    trainer = Trainer("cpu", callbacks=nothing, loggers=nothing, run_dir=None, val_every=None, log_every=None)
    assert any(isinstance(callback, MetricsLog) for callback in trainer.callbacks)


def test_zero_is_never_where_it_may_be() -> None:
    Trainer("cpu", val_every=0, log_every=0, run_dir=Path("run"), loggers=iter([Logger()]))
