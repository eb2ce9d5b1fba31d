"""Who is still there: what ranks leave for each other in the store by which they found each other."""

from __future__ import annotations

import threading
import time
from typing import NamedTuple

from torch.distributed import DistError
from torch.distributed.distributed_c10d import Store

_CALL, _PRESENT, _HERE, _LAST_WORDS, _TOLD, _LEFT = "roll call", "present", "here", "last words", "told", "left"
_LISTEN_S = 0.5  # how often a rank looks whether another calls


class Answers(NamedTuple):
    """What came of a call: the words that a rank left, or else who does not answer, and who does from elsewhere."""

    words: str | None
    gone: list[int]
    elsewhere: list[int]


class RollCall:
    """One rank's side of it; a thread answers a call whatever the main thread is at.

    Every method raises torch's RuntimeError when the store is gone.
    """

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="policyfit roll call", daemon=True)
        self._thread.start()

    def call(self, patience_s: float) -> Answers:
        """Call every rank; ends early when one has left words, or all are calling themselves."""
        deadline = time.monotonic() + patience_s
        present, here = ([f"{word} {rank}" for rank in range(self._world_size)] for word in (_PRESENT, _HERE))
        for key in (_CALL, present[self._rank], here[self._rank]):
            self._store.set(key, "")
        while True:
            if self._store.check([_LAST_WORDS]):
                return Answers(self._store.get(_LAST_WORDS).decode(), [], [])
            if self._store.check(here):
                return Answers(None, [], [])
            if time.monotonic() > deadline:
                gone, elsewhere = (
                    [r for r, key in enumerate(k) if not self._store.check([key])] for k in (present, here)
                )
                return Answers(None, gone, elsewhere)
            time.sleep(0.05)

    def leave_words(self, words: str) -> None:
        """Leave words for the others, unless somebody was first: the first to say what it was is right."""
        self._store.compare_set(_LAST_WORDS, "", words)

    def tell(self, key: str, number: int, what: bytes) -> None:
        """Leave something for ranks that have failed; does not wait. All ranks that tell it tell the same.

        Args:
            number: What tells it from what was told by this key before.
        """
        self._store.set(f"{_TOLD} {key}", number.to_bytes(8) + what)  # type: ignore[arg-type]  # bytes are taken

    def hear(self, key: str, number: int, patience_s: float) -> bytes | None:
        """What another rank tells, waited for as long as one is left that could; ``None`` once all have left.

        Raises:
            DistError: It takes too long.
        """
        name, deadline = f"{_TOLD} {key}", time.monotonic() + patience_s
        all_left = [f"{_LEFT} {rank}" for rank in range(self._world_size)]
        while True:
            nobody_is_left = self._store.check(all_left)  # asked first, since a rank tells before it leaves
            if self._store.check([name]):
                told = self._store.get(name)
                if int.from_bytes(told[:8]) == number:
                    return told[8:]
            if nobody_is_left:
                return None
            if time.monotonic() > deadline:
                raise DistError(f"no rank told within {patience_s:g} s what it does")
            time.sleep(0.002)

    def leave(self) -> None:
        """From now on this rank tells nothing."""
        self._store.set(f"{_LEFT} {self._rank}", "")

    def end(self) -> None:
        """Answer no more."""
        self._over.set()
        # A thread that is in the store when the interpreter ends takes the process down with it (std::terminate).
        self._thread.join(_LISTEN_S)

    def _listen(self) -> None:
        while not self._over.wait(_LISTEN_S):
            try:
                if self._store.check([_CALL]):
                    self._store.set(f"{_PRESENT} {self._rank}", "")
                    return
            except RuntimeError:  # the store is gone: nobody can call
                return
