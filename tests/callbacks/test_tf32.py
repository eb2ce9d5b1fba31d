import json
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from toys import InMemory, batches, mlp

from policyfit import Callback, Trainer
from policyfit.callbacks import tf32
from policyfit.callbacks.defaults import with_defaults
from policyfit.callbacks.tf32 import TF32, TF32State
from policyfit.strategies.errors import ConfigError
from policyfit.strategies.facts import GPU, MachineFacts
from policyfit.strategies.formats import Support

STARTS = {
    "untouched": "",
    "high": "torch.set_float32_matmul_precision('high')",
    "medium": "torch.set_float32_matmul_precision('medium')",
    "old matmul switch": "b.cuda.matmul.allow_tf32 = True",
    "old cudnn switch": "b.cudnn.allow_tf32 = False",
    "matmul leaf": "b.cuda.matmul.fp32_precision = 'tf32'",
    "conv leaf": "b.cudnn.conv.fp32_precision = 'ieee'",
    "rnn leaf": "b.cudnn.rnn.fp32_precision = 'ieee'",
    "generic tf32": "b.fp32_precision = 'tf32'",
    "generic ieee": "b.fp32_precision = 'ieee'",
    "cudnn ieee": "b.cudnn.fp32_precision = 'ieee'",
    "mkldnn bf16": "b.mkldnn.matmul.fp32_precision = 'bf16'",
    "mixed matmul": "torch.set_float32_matmul_precision('high'); b.cuda.matmul.fp32_precision = 'ieee'",
    "mixed conv": "b.cudnn.allow_tf32 = False; b.cudnn.conv.fp32_precision = 'tf32'",
}
# Where the two interfaces disagree on every torch that has both; how far "ieee" reaches depends on the release.
MIXED = {"matmul leaf", "conv leaf", "rnn leaf", "generic tf32", "mkldnn bf16", "mixed matmul", "mixed conv"}

# Switches cannot be put back to "never touched", so every start gets a process of its own: a fork of one that
# has loaded torch and nothing else.
SCRIPT = """
import json, os, sys, torch
from policyfit.callbacks.tf32 import apply, restore, save_state
b = torch.backends

def read(getter):
    try:
        return getter()
    except RuntimeError:
        return "raises"

def readings():
    return {
        "word": read(torch.get_float32_matmul_precision),
        "cuda.matmul old": read(lambda: b.cuda.matmul.allow_tf32),
        "cudnn old": read(lambda: b.cudnn.allow_tf32),
        "cuda.matmul": b.cuda.matmul.fp32_precision,
        "cudnn.conv": b.cudnn.conv.fp32_precision,
        "cudnn.rnn": b.cudnn.rnn.fp32_precision,
        "mkldnn.matmul": b.mkldnn.matmul.fp32_precision,
    }

def observe(start):
    exec(start)
    seen = {"before": readings()}
    state = save_state()
    seen["after saving"] = readings()
    seen["disagreement"] = state.disagreement()
    for name, flag in (("on", True), ("off", False)):
        apply(flag, "cuda")
        seen[name] = readings()
        restore(state)
        seen["after " + name] = readings()
    return seen

for name, start in json.loads(sys.argv[1]).items():
    sys.stdout.flush()
    if os.fork() == 0:
        print(json.dumps([name, observe(start)]), flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.fixture(scope="module")
def observed() -> dict[str, Any]:
    if not hasattr(torch.backends, "fp32_precision"):
        pytest.skip("this torch has the old switches only")
    command = [sys.executable, "-c", SCRIPT, json.dumps(STARTS)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return dict(json.loads(line) for line in output.splitlines())


@pytest.mark.parametrize("start", STARTS)
def test_switches_come_back_exactly_after_tf32_was_on_or_off(observed: dict[str, Any], start: str) -> None:
    seen = observed[start]
    assert seen["after saving"] == seen["before"]
    assert seen["after on"] == seen["before"]
    assert seen["after off"] == seen["before"]


@pytest.mark.parametrize("start", STARTS)
def test_tf32_on_is_on_everywhere_and_every_getter_agrees(observed: dict[str, Any], start: str) -> None:
    on = observed[start]["on"]
    assert (on["word"], on["cuda.matmul old"], on["cudnn old"]) == ("high", True, True)
    assert {on[leaf] for leaf in ("cuda.matmul", "cudnn.conv", "cudnn.rnn")} == {"tf32"}


@pytest.mark.parametrize("start", STARTS)
def test_tf32_off_is_off_everywhere_and_every_getter_agrees(observed: dict[str, Any], start: str) -> None:
    off = observed[start]["off"]
    assert (off["word"], off["cuda.matmul old"], off["cudnn old"]) == ("highest", False, False)
    assert {off[leaf] for leaf in ("cuda.matmul", "cudnn.conv", "cudnn.rnn")} == {"ieee"}


@pytest.mark.parametrize("start", STARTS)
def test_start_state_is_called_mixed_when_a_getter_raises(observed: dict[str, Any], start: str) -> None:
    raises = "raises" in observed[start]["before"].values()
    assert bool(observed[start]["disagreement"]) is raises
    assert raises or start not in MIXED


class FakeTrainer:
    def __init__(self, device: str, **facts: Any) -> None:
        self.device = SimpleNamespace(name=device, device=torch.device(device))
        self.facts = MachineFacts(**facts)
        self.events: list[dict[str, Any]] = []

    def event(self, kind: str, **fields: Any) -> None:
        self.events.append({"event": kind, **fields})


def a100() -> FakeTrainer:
    return FakeTrainer("cuda:0", build="cuda", cuda=(GPU(name="A100", capability=(8, 0)),))


def mi300(**environment: str) -> FakeTrainer:
    gpu = GPU(name="MI300X", arch="gfx942")
    return FakeTrainer("cuda:0", build="rocm", cuda=(gpu,), environment=tuple(environment.items()))


def switches() -> TF32State:
    return tf32.save_state()


@pytest.fixture(autouse=True)
def _switches_come_back() -> Iterator[None]:
    before = switches()
    yield
    assert switches() == before


POLICY = nn.Linear(1, 1)


@pytest.mark.parametrize(("enabled", "word"), [(True, "high"), (False, "highest")])
def test_callback_sets_the_switches_for_the_stage_and_puts_them_back(enabled: bool, word: str) -> None:
    trainer: Any = a100()
    before = switches()
    callback = TF32(enabled)
    callback.setup(trainer, POLICY, "fit")
    during = switches()
    callback.teardown(trainer, POLICY, "fit")
    assert (during.word, during.cudnn) == (word, enabled)
    assert switches() == before
    assert trainer.events == []


def test_evaluation_inside_a_fit_leaves_the_fit_its_switches() -> None:
    trainer: Any = a100()
    before = switches()
    callback = TF32()
    callback.setup(trainer, POLICY, "fit")
    callback.setup(trainer, POLICY, "evaluate")
    callback.teardown(trainer, POLICY, "evaluate")
    assert switches().word == "high"
    callback.teardown(trainer, POLICY, "fit")
    assert switches() == before


def test_failing_event_leaves_the_switches_alone() -> None:
    class Broken(FakeTrainer):
        def event(self, kind: str, **fields: Any) -> None:
            raise OSError("disk full")

    trainer: Any = mi300()
    trainer.__class__ = Broken
    before = switches()
    with pytest.raises(OSError, match="disk full"):
        TF32().setup(trainer, POLICY, "fit")
    assert switches() == before


@pytest.mark.parametrize(
    ("trainer", "device"),
    [
        (FakeTrainer("cpu"), "cpu"),
        (FakeTrainer("mps", build="mps", mps=True), "mps"),
        (FakeTrainer("cuda:0", build="cuda", cuda=(GPU(name="T4", capability=(7, 5)),)), "T4"),
        (FakeTrainer("cuda:0", build="rocm", cuda=(GPU(name="MI210", arch="gfx90a"),)), "gfx90a"),
    ],
)
def test_device_without_tf32_changes_nothing_and_says_so(trainer: Any, device: str) -> None:
    before = switches()
    TF32(True).setup(trainer, POLICY, "fit")
    assert switches() == before
    (event,) = trainer.events
    assert event["event"] == "note"
    assert event["effective"] is False
    assert event["message"].startswith("TF32 is not applicable: ")
    assert device in event["message"]


def test_full_float32_on_a_device_without_tf32_is_what_was_asked() -> None:
    trainer: Any = FakeTrainer("cpu")
    TF32(False).setup(trainer, POLICY, "fit")
    assert trainer.events == []


def test_null_leaves_the_switches_alone() -> None:
    trainer: Any = a100()
    before = switches()
    TF32(None).setup(trainer, POLICY, "fit")
    assert switches() == before
    assert trainer.events == []


def test_rocm_without_its_variable_is_requested_and_not_effective() -> None:
    trainer: Any = mi300()
    callback = TF32(True)
    callback.setup(trainer, POLICY, "fit")
    callback.teardown(trainer, POLICY, "fit")
    (event,) = trainer.events
    assert (event["event"], event["requested"], event["effective"]) == ("warning", True, False)
    assert "HIPBLASLT_ALLOW_TF32=1" in event["message"]


@pytest.mark.parametrize(("enabled", "environment"), [(True, {"HIPBLASLT_ALLOW_TF32": "1"}), (False, {})])
def test_rocm_is_silent_when_what_was_asked_is_so(enabled: bool, environment: dict[str, str]) -> None:
    trainer: Any = mi300(**environment)
    callback = TF32(enabled)
    callback.setup(trainer, POLICY, "fit")
    callback.teardown(trainer, POLICY, "fit")
    assert trainer.events == []


def test_mixed_start_state_is_reported_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    mixed = TF32State(
        word=None,
        cudnn=True,
        onednn=None,
        leaves={"cuda.matmul": "tf32", "cudnn.conv": "tf32"},
        raised=("torch.get_float32_matmul_precision()",),
    )
    trainer: Any = a100()
    callback = TF32()
    start = switches()
    with monkeypatch.context() as patch:
        patch.setattr(tf32, "save_state", lambda: mixed)
        callback.setup(trainer, POLICY, "fit")
    tf32.restore(start)
    (event,) = trainer.events
    assert (event["event"], event["effective"]) == ("warning", True)
    assert "torch.get_float32_matmul_precision() cannot be read" in event["message"]
    assert "cuda.matmul='tf32'" in event["message"]


def test_old_torch_and_intel_gpus_have_their_own_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    # Torch before 2.9 has no fp32_precision anywhere; XPU eager obeys mkldnn.allow_tf32 alone.
    backends = SimpleNamespace(
        cudnn=SimpleNamespace(allow_tf32=True),
        mkldnn=SimpleNamespace(allow_tf32=False),
        cuda=SimpleNamespace(),
    )
    start = switches()
    monkeypatch.setattr(tf32, "_backends", backends)
    state = TF32State(word="highest", cudnn=True, onednn=False, leaves={}, raised=())
    tf32.apply(False, "cuda")
    assert (backends.cudnn.allow_tf32, backends.mkldnn.allow_tf32) == (False, False)
    tf32.apply(True, "xpu")
    assert (backends.cudnn.allow_tf32, backends.mkldnn.allow_tf32) == (True, True)
    backends.cudnn.allow_tf32 = False
    tf32.restore(state)
    assert (backends.cudnn.allow_tf32, backends.mkldnn.allow_tf32) == (True, False)
    monkeypatch.undo()
    tf32.restore(start)


@pytest.mark.parametrize("enabled", ["yes", 1])
def test_setting_other_than_true_false_or_null_is_refused(enabled: Any) -> None:
    with pytest.raises(ConfigError, match="tf32 must be true, false or null"):
        TF32(enabled)


@pytest.mark.parametrize("setting", [False, None])
def test_callback_that_contradicts_the_setting_is_refused(setting: bool | None) -> None:
    with pytest.raises(ConfigError, match=rf"tf32={setting} and the callback TF32\(enabled=True\) contradict"):
        with_defaults((TF32(True),), tf32=setting, defaults=True)


def test_callback_stands_where_the_setting_agrees_or_was_not_made() -> None:
    for callback, setting in ((TF32(False), True), (TF32(False), False), (TF32(None), None)):
        assert callback in with_defaults((callback,), tf32=setting, defaults=True)


class Looks(Callback):
    """Keeps the switches of a step, and fails in it if told to."""

    def __init__(self, fails: bool) -> None:
        self.fails, self.seen = fails, list[TF32State]()

    def on_after_backward(self, trainer: Trainer, policy: nn.Module) -> None:
        self.seen.append(switches())
        if self.fails:
            raise KeyError("in the middle")


def test_two_runs_of_a_process_have_their_own_switches_though_the_first_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    native = Support(native=True, usable=True, reason="a machine that has it")
    monkeypatch.setattr(tf32, "tf32_support", lambda device, facts: native)
    before, first, second = switches(), Looks(fails=True), Looks(fails=False)
    with pytest.raises(KeyError, match="in the middle"):
        Trainer("cpu", tf32=True, max_steps=2, callbacks=[first]).fit(mlp(), InMemory(batches(2)))
    assert switches() == before
    Trainer("cpu", tf32=False, max_steps=2, callbacks=[second]).fit(mlp(), InMemory(batches(2)))
    assert switches() == before
    assert [state.word for state in (*first.seen, *second.seen)] == ["high", "highest", "highest"]
