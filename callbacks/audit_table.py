"""An audit's report as tables: drawn on a terminal, plain whole lines anywhere else."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from .audit_report import PrecisionReport, word

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_SHOWN = 10  # rows of matmuls in another dtype; the JSON has all
_WIDE = 1000


def print_report(report: PrecisionReport, console: Console | None = None) -> None:
    """Print the report; ``console=None`` is standard output."""
    before = random.getstate()  # rich draws from python's stream while it is imported
    from rich.console import Console

    random.setstate(before)
    console = console or Console()
    if not console.is_terminal:
        console.width = max(console.width, _WIDE)

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    say(f"precision audit of step {report.step}: precision {report.precision}, on {report.device}")
    console.print(_by_dtype(report, console.is_terminal))
    if report.recorder.casts:
        console.print(_casts(report, console.is_terminal))
    if report.elsewhere:
        console.print(_elsewhere(report, console.is_terminal))
    for finding in report.findings or ["nothing else to look at"]:
        say(f"- {finding}")


def _by_dtype(report: PrecisionReport, drawn: bool) -> Table:
    table = _table(drawn, "dtype", "device", ">ops", ">matmuls forward", ">backward", ">FLOPs", ">share")
    shares = report.shares
    matmuls = report.recorder.matmuls.items()
    for (device, dtype), tally in sorted(report.recorder.ops.items(), key=lambda row: -row[1].count):
        mine = [(k.phase, t) for k, t in matmuls if (k.device, k.dtype) == (device, dtype)]
        forward, backward = (sum(t.count for p, t in mine if p == phase) for phase in ("forward", "backward"))
        flops = sum(t.amount for _, t in mine)
        share = f"{shares[word(dtype)]:.1%}" if flops else ""
        table.add_row(word(dtype), device, *map(str, (tally.count, forward, backward)), _short(flops), share)
    return table


def _casts(report: PrecisionReport, drawn: bool) -> Table:
    table = _table(drawn, "cast from", "to", ">times", ">bytes")
    for (source, result), tally in sorted(report.recorder.casts.items(), key=lambda row: -row[1].amount):
        table.add_row(word(source), word(result), str(tally.count), _short(tally.amount))
    return table


def _elsewhere(report: PrecisionReport, drawn: bool) -> Table:
    table = _table(drawn, f"not in {word(report.compute_dtype)}", "op", "pass", "dtype", ">times", ">FLOPs")
    for key, tally in report.elsewhere[:_SHOWN]:
        table.add_row(key.module, key.op, key.phase, word(key.dtype), str(tally.count), _short(tally.amount))
    if len(report.elsewhere) > _SHOWN:
        table.add_row(f"and {len(report.elsewhere) - _SHOWN} more")
    return table


def _table(drawn: bool, *columns: str) -> Table:
    """A table with these columns; those that begin with > are numbers."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE if drawn else None, pad_edge=False, show_edge=False)
    for name in columns:
        table.add_column(name.removeprefix(">"), justify="right" if name.startswith(">") else "left")
    return table


def _short(amount: int) -> str:
    """A count in thousands, millions and so on: 12,345,678 is 12.3 M."""
    value, unit = float(amount), 0
    while value >= 999.95 and unit < 5:
        value, unit = value / 1000, unit + 1
    return f"{value:.1f} {'kMGTP'[unit - 1]}" if unit else str(amount)
