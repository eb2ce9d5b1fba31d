"""What an audit found: in what the FLOPs of a micro-batch were computed, and what is not as asked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from ..strategies.errors import PrecisionError
from .audit_recorder import OUTSIDE, Matmul, Recorder, Tally

_SHOWN = 5  # names in a sentence; the JSON has all


@dataclass(frozen=True)
class PrecisionReport:
    """The dtypes of one micro-batch, forward and backward.

    ``matmuls`` are matmuls, convolutions and attention; their dtype is that of their operands, that of other ops
    the dtype of their result. Views are no ops here, and casts are counted on their own.
    """

    #: The step that the micro-batch belongs to, from 1.
    step: int
    precision: str
    compute_dtype: torch.dtype
    device: str
    #: The policy is compiled, wholly or in part.
    compiled: bool
    recorder: Recorder
    #: Modules with parameters, by path.
    with_parameters: frozenset[str]

    @cached_property
    def shares(self) -> dict[str, float]:
        """The share of each dtype in the FLOPs of all matmuls, from 0 to 1; empty where none are known."""
        flops = Counter[str]()
        for key, tally in self.recorder.matmuls.items():
            flops[word(key.dtype)] += tally.amount
        total = flops.total()
        return {name: amount / total for name, amount in flops.most_common()} if total else {}

    @cached_property
    def elsewhere(self) -> list[tuple[Matmul, Tally]]:
        """The matmuls in another dtype than the precision's, those with the most FLOPs first."""
        found = [(k, t) for k, t in self.recorder.matmuls.items() if k.dtype != self.compute_dtype]
        return sorted(found, key=lambda entry: -entry[1].amount)

    @cached_property
    def never(self) -> dict[str, list[str]]:
        """Modules with parameters that ran matmuls, none of them in the precision; and in which dtypes."""
        ran: dict[str, set[torch.dtype]] = {}
        for key in self.recorder.matmuls:
            if key.module in self.with_parameters:
                ran.setdefault(key.module, set()).add(key.dtype)
        return {m: sorted(map(word, d)) for m, d in ran.items() if self.compute_dtype not in d}

    @cached_property
    def findings(self) -> list[str]:
        """What a person should look at, one sentence each."""
        recorder, asked = self.recorder, word(self.compute_dtype)
        total = sum(tally.count for tally in recorder.matmuls.values())
        found = []
        for dtype, modules in _by_dtype(self.elsewhere).items():
            share = f" ({self.shares[dtype]:.1%} of their FLOPs)" if dtype in self.shares else ""
            found.append(
                f"in {dtype}, not in {asked}: {modules.total()} of {total} matmuls and convolutions{share}, in "
                f"{_listed(modules)}"
            )
        if self.never:
            found.append(f"never in {asked}: all matmuls and convolutions of {_listed(self.never)}")
        outside = sum(tally.count for key, tally in recorder.matmuls.items() if key.module == OUTSIDE)
        if outside:
            found.append(f"in modules that are not part of the policy: {outside} of {total} matmuls and convolutions")
        strangers = {key.device: 0 for key in recorder.matmuls if not self._is_here(key.device)}
        if strangers:
            found.append(f"matmuls and convolutions ran on {_listed(strangers)}, not on {self.device} alone")
        back = {f"{module} ({word(half)})": t.count for (module, half), t in recorder.there_and_back.items()}
        if back:
            found.append(
                f"cast from 16 bits to float32 and back unchanged: {sum(back.values())} times, in {_listed(back)}"
            )
        doubles = {f"{module} ({op})": tally.count for (module, op), tally in recorder.float64.items()}
        if doubles and self.compute_dtype != torch.float64:
            found.append(f"in float64: {sum(doubles.values())} ops, in {_listed(doubles)}")
        if recorder.without_formula:
            found.append(f"no FLOPs are known for {_listed(recorder.without_formula)}, so they are in no share")
        if self.compiled:
            found.append(
                "the policy is compiled: the audit sees nothing inside compiled graphs but the library kernels that "
                "they call, and no modules; audit a run with compile=False to see all"
            )
        return found

    @property
    def summary(self) -> str:
        """One line."""
        shares = ", ".join(f"{share:.1%} in {name}" for name, share in self.shares.items())
        what = f"FLOPs of matmuls and convolutions: {shares}" if shares else "no FLOPs of matmuls and convolutions seen"
        return f"audited step {self.step}: {what}; findings: {len(self.findings)}"

    def _is_here(self, device: str) -> bool:
        return torch.device(device).type == torch.device(self.device).type

    def check(self) -> None:
        """Refuse a mixed precision in which nothing ran.

        Raises:
            PrecisionError: The precision computes in 16 bits, and no matmul or convolution did.
        """
        if self.compute_dtype == torch.float32 or self.compiled:
            return
        if len(self.elsewhere) < len(self.recorder.matmuls):
            return
        asked = f"precision={self.precision!r} was requested, but of the audited step"
        if not self.elsewhere:
            raise PrecisionError(
                f"{asked} no matmul or convolution was seen, so nothing computes in {word(self.compute_dtype)}.\n"
                "Use precision='no'."
            )
        ran = "; ".join(
            f"{m.total()} ran in {dtype}, in {_listed(m)}" for dtype, m in _by_dtype(self.elsewhere).items()
        )
        raise PrecisionError(
            f"{asked} no matmul or convolution computed in {word(self.compute_dtype)}: {ran}.\n"
            "Look there for torch.autocast(..., enabled=False) or an autocast of another dtype, and remove it; or use "
            "precision='no'."
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON values: what ``precision_audit.json`` holds."""
        recorder = self.recorder
        return {
            "step": self.step,
            "precision": self.precision,
            "compute_dtype": word(self.compute_dtype),
            "device": self.device,
            "compiled": self.compiled,
            "shares": self.shares,
            "findings": self.findings,
            "ops": [{"device": d, "dtype": word(t), "ops": tally.count} for (d, t), tally in recorder.ops.items()],
            "matmuls": [_entry(key, tally) for key, tally in recorder.matmuls.items()],
            "other_precision": [_entry(key, tally) for key, tally in self.elsewhere],
            "never_in_precision": [{"module": m, "dtypes": dtypes} for m, dtypes in self.never.items()],
            "outside_policy": [_entry(k, tally) for k, tally in recorder.matmuls.items() if k.module == OUTSIDE],
            "casts": [
                {"from": word(a), "to": word(b), "casts": tally.count, "bytes": tally.amount}
                for (a, b), tally in recorder.casts.items()
            ],
            "there_and_back": [
                {"module": m, "dtype": word(d), "casts": tally.count, "bytes": tally.amount}
                for (m, d), tally in recorder.there_and_back.items()
            ],
            "float64": [{"module": m, "op": op, "ops": tally.count} for (m, op), tally in recorder.float64.items()],
            "without_formula": {op: tally.count for op, tally in recorder.without_formula.items()},
        }


def word(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def _entry(key: Matmul, tally: Tally) -> dict[str, Any]:
    return {**key._asdict(), "dtype": word(key.dtype), "ops": tally.count, "flops": tally.amount}


def _by_dtype(entries: Iterable[tuple[Matmul, Tally]]) -> dict[str, Counter[str]]:
    """How many matmuls ran in each dtype, by module, in the order of the entries."""
    found: dict[str, Counter[str]] = {}
    for key, tally in entries:
        found.setdefault(word(key.dtype), Counter())[key.module] += tally.count
    return found


def _listed(names: Mapping[str, Any]) -> str:
    shown = ", ".join(list(names)[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"
