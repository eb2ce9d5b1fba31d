"""Where a run stands: the counters that a checkpoint carries."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ..strategies.checks import is_whole
from ..strategies.errors import CheckpointError


@dataclass(slots=True)
class Counters:
    """``step`` counts updates that landed, ``skipped`` those that did not, ``micro_batches`` draws of the loader.

    ``epoch`` is the pass under way, 0-based, and ``batch_in_epoch`` the micro-batches of it already used, so
    the two are the position in the data. ``skipped_in_a_row`` ends a run that no longer trains.
    """

    step: int = 0
    skipped: int = 0
    micro_batches: int = 0
    epoch: int = 0
    batch_in_epoch: int = 0
    skipped_in_a_row: int = 0

    @property
    def updates(self) -> int:
        """Attempts to move the weights, landed or not."""
        return self.step + self.skipped

    def to_dict(self) -> dict[str, int]:
        """For the manifest of a checkpoint."""
        return {**asdict(self), "updates": self.updates}

    def take_back(self, saved: dict[str, Any]) -> None:
        """Stand where a manifest says.

        Raises:
            CheckpointError: A counter is missing or is not a whole number.
        """
        for name in self.__dataclass_fields__:
            if not is_whole(value := saved.get(name), 0):
                raise CheckpointError(
                    f"manifest.json is damaged: counters.{name} is {value!r}.\nResume from another checkpoint."
                )
            setattr(self, name, value)
