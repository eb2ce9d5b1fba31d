"""What ``docs/mixed-precision.md`` shows is what a run shows."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from toys import InMemory

from policyfit import FP16, OverflowReport, PrecisionAudit, Trainer
from policyfit.callbacks.progress import Progress
from policyfit.trainer.cli import main

DOCUMENT = (Path(__file__).parents[1] / "docs" / "mixed-precision.md").read_text()


def words(text: str) -> str:
    return " ".join(text.split())


class Score(nn.Module):
    """The root of a distance, which has no gradient where it is zero."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (x - y).square().sum(-1).sqrt()


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head, self.score = nn.Linear(3, 3), nn.Linear(3, 1), Score()

    def forward(self, batch: Tensor) -> Tensor:
        x = self.encoder(batch)
        return self.score(x, x.detach() + (batch[:, :1] != 7)).mean() + self.head(batch).mean() * 0.01  # type: ignore[no-any-return]


def test_the_overflow_that_it_shows_is_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    data = [torch.full((2, 3), 7.0 if i == 6 else 0.1 * i) for i in range(9)]
    trainer = Trainer("cpu", max_epochs=1, default_callbacks=False, callbacks=[OverflowReport(replay=True), Progress()])
    trainer.fit(Policy(), InMemory(data), optimizer=lambda p: SGD(p, lr=1e-3))
    shown = words(DOCUMENT.partition("```\n   overflow: ")[2].partition("```")[0])
    assert shown.endswith("in score (micro-batch 6 of the epoch)")
    assert shown in words(capsys.readouterr().out)


class Distance(nn.Module):
    """Runs the lines of the document that keep a module in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, batch: Tensor) -> Tensor:
        lines = DOCUMENT.partition("   with torch.autocast(")[2].partition("```")[0]
        source = "with torch.autocast(" + lines.replace("\n   ", "\n")
        found: dict[str, Any] = {"torch": torch, "x": self.layer(batch), "y": batch}
        exec(source, found)
        distance: Tensor = found["distance"]
        assert distance.dtype == torch.float32
        return distance.mean()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_the_lines_that_keep_a_module_in_float32_keep_the_others_in_the_precision(precision: str) -> None:
    audit = PrecisionAudit()
    strategy: Any = FP16(allow_cpu=True) if precision == "fp16" else precision
    trainer = Trainer("cpu", strategy, max_steps=1, default_callbacks=False, callbacks=[audit])
    trainer.fit(Distance(), InMemory([torch.randn(4, 6)]))
    assert audit.report is not None
    norms = {row.dtype for row in audit.report.rows if "norm" in row.op and row.phase == "forward"}
    assert norms == {"float32"}
    assert list(audit.report.shares) == [audit.report.compute_dtype]


PARTS = """
import torch
from torch import nn

class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, batch):
        return self.layer(batch[0]).float().square().mean()

def data() -> torch.utils.data.TensorDataset:
    return torch.utils.data.TensorDataset(torch.rand(16, 1))
"""
RUN = """\
policy: document_parts.Policy
data: {train: document_parts.data, val: document_parts.data}
trainer:
  device: cpu
  precision: {class_path: policyfit.FP16, init_args: {allow_cpu: true}}
  max_steps: 2
  log_every: 1
  seed: 0
  run_dir: done
"""


@pytest.fixture
def run_file() -> Iterator[str]:
    Path("document_parts.py").write_text(PARTS)
    Path("run.yaml").write_text(RUN)
    yield "run.yaml"
    sys.modules.pop("document_parts", None)


def test_the_scale_that_it_sets_on_the_command_line_is_that_of_the_run(run_file: str) -> None:
    flag = DOCUMENT.partition("On the command line: `")[2].partition("`")[0]
    assert flag == "--trainer.grad_scaler.init_scale=1024"
    assert main(["fit", run_file, flag]) == 0
    records = [json.loads(line) for line in Path("done/metrics.jsonl").read_text().splitlines()]
    assert [record["scale"] for record in records if "scale" in record] == [1024.0, 1024.0]


def test_validating_a_checkpoint_of_a_seeded_run_gives_the_same_numbers_at_every_call(
    run_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", run_file]) == 0
    capsys.readouterr()
    printed = []
    for _ in range(2):
        assert main(["validate", "done"]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] != ""
