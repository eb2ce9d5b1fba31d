"""What a run is going to do, and why: printed at its start and kept as ``plan.json``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Line:
    """One decision: what was asked, what was chosen, and the reason."""

    what: str
    asked: str
    chosen: str
    reason: str = ""


@dataclass(slots=True)
class Plan:
    """The decisions of a run in the order in which they were taken, and remarks on them."""

    lines: list[Line] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, what: str, asked: object, chosen: object, reason: str = "") -> None:
        """Add one decision."""
        self.lines.append(Line(what, str(asked), str(chosen), reason))

    def chosen(self, what: str) -> str:
        """What was chosen for ``what``."""
        return next(line.chosen for line in self.lines if line.what == what)

    def text(self) -> str:
        """A few aligned lines for people."""
        width = max((len(line.what) for line in self.lines), default=0)
        rows = []
        for line in self.lines:
            asked = "" if line.asked in (line.chosen, "") else f"  (asked: {line.asked})"
            reason = f"  — {line.reason}" if line.reason else ""
            rows.append(f"{line.what:<{width}}  {line.chosen}{asked}{reason}")
        return "\n".join([*rows, *(f"note: {note}" for note in self.notes)])

    def to_dict(self) -> dict[str, Any]:
        """For ``plan.json``: one object a decision, keyed by what it is about."""
        decisions = {
            line.what: {"asked": line.asked, "chosen": line.chosen, "reason": line.reason} for line in self.lines
        }
        return {**decisions, "notes": list(self.notes)}
