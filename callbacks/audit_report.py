"""What an audit found: in what the FLOPs of a micro-batch were computed, and what is not as asked."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..strategies.errors import PrecisionError
from .audit_recorder import OUTSIDE, Row

_SHOWN = 5  # names in a sentence; the JSON has all


@dataclass(frozen=True, kw_only=True)
class PrecisionReport:
    """The dtypes of one micro-batch, forward and backward; ``rows`` are as ``Recorder`` counts them."""

    #: The step that the micro-batch belongs to, from 1.
    step: int
    precision: str
    compute_dtype: str
    device: str
    rows: dict[Row, list[int]]
    #: The paths of the modules with parameters.
    modules: frozenset[str]

    @cached_property
    def matmuls(self) -> dict[Row, list[int]]:
        """The matmuls, convolutions and attentions, those with the most FLOPs first."""
        found = [(row, total) for row, total in self.rows.items() if row.kind == "matmul"]
        return dict(sorted(found, key=lambda entry: -entry[1][1]))

    @cached_property
    def ran(self) -> dict[str, list[str]]:
        """The modules of the matmuls, by dtype."""
        dtypes = dict.fromkeys(row.dtype for row in self.matmuls)
        return {dtype: [row.module for row in self.matmuls if row.dtype == dtype] for dtype in dtypes}

    @cached_property
    def shares(self) -> dict[str, float]:
        """The share of each dtype in the FLOPs of all matmuls, from 0 to 1; empty where none are known."""
        flops = Counter[str]()
        for row, (_, amount) in self.matmuls.items():
            flops[row.dtype] += amount
        return {dtype: amount / flops.total() for dtype, amount in flops.most_common()} if flops.total() else {}

    @cached_property
    def findings(self) -> list[str]:
        """What a person should look at, one sentence each."""
        asked, rows, matmuls, ran = self.compute_dtype, self.rows, self.matmuls, self.ran
        here = self.device.partition(":")[0]
        elsewhere = [row.device for row in matmuls if not row.device.startswith(here)]
        found = [
            f"in {dtype}, not in {asked}: {self.shares.get(dtype, 0):.1%} of the FLOPs of matmuls, in {_listed(names)}"
            for dtype, names in ran.items()
            if dtype != asked
        ]
        for text, names in (
            (f"never in {asked}: all matmuls of",
             [r.module for r in matmuls if r.module in self.modules and r.module not in ran.get(asked, [])]),
            ("outside the policy's modules: the matmuls", [r.op for r in matmuls if r.module == OUTSIDE]),
            (f"on another device than {here}: matmuls on", elsewhere),
            ("cast from 16 bits to float32 and back unchanged in", [r.module for r in rows if r.kind == "cast back"]),
            ("in float64: ops in", [f"{r.module} ({r.op})" for r in rows if r.dtype == "float64" != asked]),
            ("in no share, as no FLOPs are known:", [r.op for r, (_, amount) in matmuls.items() if not amount]),
        ):  # fmt: skip
            if names:
                found.append(f"{text} {_listed(names)}")
        return found

    @property
    def summary(self) -> str:
        """One line."""
        shares = ", ".join(f"{share:.1%} in {dtype}" for dtype, share in self.shares.items()) or "none known"
        return f"audited step {self.step}: FLOPs of matmuls: {shares}; findings: {len(self.findings)}"

    def check(self) -> None:
        """Refuse a mixed precision in which nothing ran.

        Raises:
            PrecisionError: The precision computes in 16 bits, and no matmul or convolution did.
        """
        asked, ran = self.compute_dtype, self.ran
        if asked not in ("bfloat16", "float16") or asked in ran:
            return
        places = "; ".join(f"{dtype} ran in {_listed(names)}" for dtype, names in ran.items())
        remedy = "Look there for torch.autocast(..., enabled=False) or one of another dtype, and remove it; or use"
        raise PrecisionError(
            f"precision={self.precision!r} was requested, but no matmul or convolution of step {self.step} computed in "
            f"{asked}: {places or 'there was none at all'}.\n{remedy if ran else 'Use'} precision='no'."
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON values: what ``precision_audit.json`` holds."""
        names = ("step", "precision", "compute_dtype", "device", "shares", "findings")
        rows = [{**row._asdict(), "times": times, "amount": amount} for row, (times, amount) in self.rows.items()]
        return {**{name: getattr(self, name) for name in names}, "rows": rows}


def print_report(report: PrecisionReport) -> None:
    """Print a table of dtypes, devices and kinds, and the findings below it."""
    before = random.getstate()  # rich draws from python's stream while it is imported
    from rich.console import Console
    from rich.table import Table

    random.setstate(before)
    totals: dict[tuple[str, str, str], list[int]] = {}
    for row, (times, amount) in report.rows.items():
        dtype = f"{row.source} -> {row.dtype}" if row.source else row.dtype
        total = totals.setdefault((dtype, row.device, row.kind), [0, 0])
        total[0], total[1] = total[0] + times, total[1] + amount
    table = Table("dtype", "device", "kind", "times", "FLOPs or bytes", box=None, pad_edge=False)
    for column in table.columns[3:]:
        column.justify = "right"
    for key, (times, amount) in sorted(totals.items(), key=lambda entry: (entry[0][2], -entry[1][1])):
        table.add_row(*key, f"{times:,}", f"{amount:,}" if amount else "")
    console = Console()
    console.print(f"precision audit of step {report.step}: precision {report.precision}, on {report.device}")
    console.print(table)
    for finding in report.findings or ["nothing else to look at"]:
        console.print(f"- {finding}", markup=False, highlight=False, soft_wrap=True)


def _listed(names: Iterable[str]) -> str:
    unique = list(dict.fromkeys(names))
    shown = ", ".join(unique[:_SHOWN])
    return shown if len(unique) <= _SHOWN else f"{shown} and {len(unique) - _SHOWN} more"
