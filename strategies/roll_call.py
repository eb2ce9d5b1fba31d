"""Who is still there, and what each is about to do: what ranks leave for each other in the store they met by."""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import distributed

if TYPE_CHECKING:  # some builds of torch have none
    from torch.distributed.distributed_c10d import Store

_CALL, _PRESENT, _HERE, _LAST_WORDS, _COMES = "roll call", "present", "here", "last words", "comes"
_ASKED, _TOLD, _LEFT, _BROKE_OFF = "asked", "told", "left", "broke off"
_LISTEN_S = 0.25  # how often a rank looks whether another calls or asks
_TELL_S = 0.002  # how often it tells what is new, once one has asked
_KEPT = 10_000  # notes; some windows of a large policy, by which a device's host may be ahead


class Answers(NamedTuple):
    """What came of a call: the words that a rank left, or else who does not answer, and who does from elsewhere."""

    words: str | None
    gone: list[int]
    elsewhere: list[int]


class RollCall:
    """One rank's side of it; a thread answers whatever the main thread is at, also while that waits for others.

    Every method raises torch's RuntimeError when the store is gone.
    """

    patience_s = 5.0  # how long a rank that is there may take to say so

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self._notes: deque[tuple[int, Any]] = deque(maxlen=_KEPT)
        self._is_leaving = self._is_over = False
        self._place = 0
        self._stirred = threading.Event()
        self._owner = threading.current_thread()  # without which it ends, whatever became of the run
        # No daemon: one that is in the store when the interpreter ends takes the process down with it (std::terminate).
        self._thread = threading.Thread(target=self._listen, name="policyfit roll call", daemon=False)
        self._thread.start()

    def call(self, patience_s: float) -> Answers:
        """Call every rank; ends early when one has left words, or all are calling themselves."""
        deadline = time.monotonic() + patience_s
        for key in (_CALL, f"{_PRESENT} {self._rank}", f"{_HERE} {self._rank}"):
            self._store.set(key, "")
        while True:
            if self._store.check([_LAST_WORDS]):
                return Answers(self._store.get(_LAST_WORDS).decode(), [], [])
            if self._store.check(self._keys(_HERE)):
                return Answers(None, [], [])
            if time.monotonic() > deadline:
                return Answers(None, self._without(_PRESENT), self._without(_HERE))
            time.sleep(0.05)

    def leave_words(self, words: str, *, comes: bool = False) -> bool:
        """Leave words for the others, unless some were left, since the first are right; whether these are the ones.

        Args:
            comes: As for ``DistributionStrategy.report``.
        """
        if comes:
            self._store.set(_COMES, "")
        return bool(self._store.compare_set(_LAST_WORDS, "", words) == words.encode())

    def break_off(self) -> bool:
        """Whether a rank that has failed comes to where ranks meet; then nobody that asks is told any more."""
        if not self._store.check([_COMES]):
            return False
        self._store.set(_BROKE_OFF, "")
        return True

    def note(self, number: int, what: Any) -> None:
        """Keep what this rank is about to do, plain values, for ranks that fail and ask; costs next to nothing.

        Args:
            number: Its place in the order of what is done, by which it is asked for. All ranks note the same of it.
        """
        self._notes.append((number, what))

    def ask(self, number: int, patience_s: float) -> Any:
        """What another rank has noted, waited for as long as one is left; ``None`` once all have left.

        Raises:
            DistError: It takes too long, a rank has broken off what it did, or nobody else is there.
        """
        name, began = f"{_TOLD} {number}", time.monotonic()
        others = {*range(self._world_size)} - {self._rank}
        for key in (_ASKED, _CALL):
            self._store.set(key, "")
        while True:
            nobody_is_left = self._store.check(self._keys(_LEFT))  # looked at first: a rank tells all before it leaves
            if self._store.check([name]):
                return json.loads(self._store.get(name))
            if nobody_is_left:
                return None
            if self._store.check([_BROKE_OFF]):
                raise distributed.DistError("another rank has given up what it was at")
            waited = time.monotonic() - began
            is_alone = waited > self.patience_s and others <= {*self._without(_PRESENT)}
            if waited > patience_s or is_alone:
                raise distributed.DistError(f"no rank told within {waited:.1f} s what it does")
            time.sleep(_TELL_S)

    def all_have_left(self) -> bool:
        """Whether every rank has withdrawn, at the same place; waits ``patience_s`` for those that have not."""
        deadline = time.monotonic() + self.patience_s
        while not self._store.check(self._keys(_LEFT)):
            if time.monotonic() > deadline:
                return False
            time.sleep(_LISTEN_S)
        return len({self._store.get(key) for key in self._keys(_LEFT)}) == 1

    def withdraw(self, place: int = 0) -> None:
        """This rank has failed, at this place: what it has noted so far is told, and from now on nothing."""
        if not self._is_leaving:
            self._place = place
        self._is_leaving = True
        self._stirred.set()

    def end(self) -> None:
        """Answer no more."""
        self._is_over = True
        self._stirred.set()

    def _listen(self) -> None:
        asked = answered = False
        try:
            while not self._is_over and self._owner.is_alive():
                if not answered and self._store.check([_CALL]):
                    self._store.set(f"{_PRESENT} {self._rank}", "")
                    answered = True
                asked = asked or self._is_leaving or self._store.check([_ASKED])
                if asked:
                    self._tell()
                self._stirred.wait(_TELL_S if asked else _LISTEN_S)
                self._stirred.clear()
            if self._is_leaving:  # what was said since the last look
                self._tell()
        except RuntimeError:  # the store is gone: nobody can call
            return

    def _tell(self) -> None:
        is_leaving = self._is_leaving  # looked at before the notes, which are all told before it
        while self._notes:
            number, what = self._notes.popleft()
            self._store.set(f"{_TOLD} {number}", json.dumps(what))
        if is_leaving:
            self._store.set(f"{_LEFT} {self._rank}", str(self._place))

    def _keys(self, word: str) -> list[str]:
        return [f"{word} {rank}" for rank in range(self._world_size)]

    def _without(self, word: str) -> list[int]:
        return [rank for rank, key in enumerate(self._keys(word)) if not self._store.check([key])]
