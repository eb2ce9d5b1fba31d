"""The state that a source of data carries itself, kept for every place at which a checkpoint may be taken.

Drawing runs ahead of training: workers, whole windows, one micro-batch on its way to the device. So the state is
noted when a place is drawn and looked up when the run has come there.

``ENDED`` and ``ROUNDED`` stand in place of a source's state where a run goes on otherwise than it began.
"""

from __future__ import annotations

import copy
from typing import Any

from ..strategies.errors import CheckpointError
from .packing import pack
from .streams import OwnStreams

#: Whatever is left of the epoch is not read: it is over.
ENDED = {"ended": True}
#: The position was rounded up to a whole window, so that the epoch may end before it.
ROUNDED = {"ended": False, "rounded": True}


class Carried:
    """``state_dict`` of the first of ``parts`` that has it and ``load_state_dict``, by epoch and micro-batch.

    Attributes:
        source: That part; ``None`` when no part carries its state.
    """

    def __init__(self, *parts: Any) -> None:
        self.source: Any = next((part for part in parts if carries_state(part)), None)
        self._kept: dict[tuple[int, int], dict[str, Any]] = {}
        self._loaded: dict[str, Any] | None = None
        self._can_be_kept = False

    def note(self, epoch: int, number: int, streams: OwnStreams | None = None) -> None:
        """The source stands before micro-batch ``number`` of ``epoch``.

        Raises:
            CheckpointError: It does not say where, or in what no checkpoint can keep.
        """
        if self.source is not None:
            inside = None if streams is None else streams.inside
            self._kept[epoch, number] = {"source": self._state_of_source(), "streams": inside, "ended": False}

    def _state_of_source(self) -> Any:
        name = type(self.source).__qualname__
        try:
            state = copy.deepcopy(self.source.state_dict())
        except Exception as error:
            raise CheckpointError(
                f"{name} does not say where it stands: {type(error).__name__}: {error}.\n"
                "Its state_dict() must give numbers, strings, None, tensors, or lists and dictionaries of them."
            ) from error
        if not self._can_be_kept:  # else it would be known at the first save only
            pack(state, f"{name}.state_dict()")
            self._can_be_kept = True
        return state

    def note_end(self, epoch: int, number: int) -> None:
        """Before micro-batch ``number``, the epoch has ended: a source may look then as it does at its start."""
        if self.source is not None:
            self._kept[epoch, number] = {**self._kept[epoch + 1, 0], "ended": True}

    def forget(self, epoch: int, number: int) -> None:
        """No checkpoint will ask for a place before this one."""
        for place in [place for place in self._kept if place < (epoch, number)]:
            del self._kept[place]

    def state(self, epoch: int, number: int) -> dict[str, Any] | None:
        """For a checkpoint at this place; ``None`` where nothing was drawn yet."""
        if (epoch, number) not in self._kept:
            return self._loaded
        kept = self._kept[epoch, number]
        return {**kept, "streams": None if kept["streams"] is None else OwnStreams.packed(kept["streams"])}

    def load(self, state: dict[str, Any] | None) -> None:
        """The next epoch to be drawn goes on from ``state``."""
        is_of_a_source = state is not None and "source" in state
        self._loaded = None if is_of_a_source and self.source is None else state

    def keep_loaded(self, epoch: int, number: int) -> None:
        """The loaded state is that of this place, for a checkpoint that asks before another is noted."""
        if self._loaded is not None and "source" in self._loaded and not self._loaded["ended"]:
            streams = self._loaded["streams"]
            inside = None if streams is None else OwnStreams.unpacked(streams)
            self._kept[epoch, number] = {**self._loaded, "streams": inside}

    def epoch_is_over(self) -> bool:
        """Whether the loaded state is that of the end of its epoch; then the next one goes on from it."""
        if self._loaded is None or not self._loaded["ended"]:
            return False
        self._loaded = {**self._loaded, "ended": False} if "source" in self._loaded else None
        return True

    def was_rounded(self) -> bool:
        """Whether the position may lie behind the end of its epoch; to be asked once, when that is begun."""
        if self._loaded is None or "rounded" not in self._loaded:
            return False
        self._loaded = None
        return True

    def begin(self) -> bool:
        """Put the source where the loaded state says; false without one. To be called after ``set_epoch``.

        Raises:
            CheckpointError: The source does not take it.
        """
        if self._loaded is None or "source" not in self._loaded:
            return False
        try:
            self.source.load_state_dict(copy.deepcopy(self._loaded["source"]))
        except Exception as error:
            raise CheckpointError(
                f"{type(self.source).__qualname__} did not take back the state that the checkpoint has of it: "
                f"{type(error).__name__}: {error}.\nResume with the data of the run, or with changes=['data']."
            ) from error
        return True

    def enter(self, streams: OwnStreams) -> None:
        """Put the random streams of the source there too, once it has made its iterator."""
        if self._loaded is not None and self._loaded["streams"] is not None:
            streams.inside = OwnStreams.unpacked(self._loaded["streams"])
        self._loaded = None


def carries_state(part: Any) -> bool:
    """Whether ``part`` can say and take back where it stands."""
    return callable(getattr(part, "state_dict", None)) and callable(getattr(part, "load_state_dict", None))
