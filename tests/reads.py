"""Counts how often the host looks at the value of a tensor."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from policyfit import Callback


class Reads:
    """Counts every way in which the host looks at a tensor's value, from when it is made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        for name in ("item", "tolist", "__bool__", "__float__", "__int__", "__index__", "numpy", "cpu"):
            monkeypatch.setattr(Tensor, name, self._counting(getattr(Tensor, name)))

    def _counting(self, original: Any) -> Any:
        def counted(tensor: Tensor, *arguments: Any, **options: Any) -> Any:
            self.count += 1
            return original(tensor, *arguments, **options)

        return counted


class ReadsPerBatch(Callback):
    """The count after each micro-batch."""

    def __init__(self, reads: Reads) -> None:
        self.reads, self.counts = reads, list[int]()

    def on_train_batch_end(self, *_: Any) -> None:
        """Note it."""
        self.counts.append(self.reads.count)
