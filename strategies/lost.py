"""Why ranks cannot talk to each other any more: one left words when it failed, or does not answer when it is called."""

from __future__ import annotations

import re

from torch import distributed

from .errors import in_words
from .roll_call import RollCall

# Its errors begin with file and line, but not that of a wait which ended because another took too long.
_OF_GLOO = re.compile(r"\[[^]]*/gloo/[^]]*:\d+\]|: Application timeout caused pair closure$")
_GO_ON = "Start the run again in its run_dir with --resume=auto: it goes on from the last checkpoint, or begins anew."


def is_lost(error: BaseException) -> bool:
    """Whether torch.distributed raised it; gloo's own errors have no type but name their file."""
    is_gloo = isinstance(error, RuntimeError) and _OF_GLOO.search(in_words(error)) is not None
    return is_gloo or isinstance(error, distributed.DistError)


def reason(error: BaseException, roll_call: RollCall, timeout_s: float, strategy: str) -> str:
    """What became of the others, in words, and what to do.

    It is left for the ranks that notice later, so that they need not call again.

    Args:
        timeout_s: After which a collective of a window is given up.
        strategy: The name of the class where that is set.
    """
    cause = f"{type(error).__name__}: {first_line(error)}"
    patience = min(roll_call.patience_s, timeout_s)
    try:
        roll_call.withdraw()
        words, gone, elsewhere = roll_call.call(patience)
        if words is None and gone:
            answers = "answers" if len(gone) == 1 else "answer"
            words = f"{named(gone)} no longer {answers}: called for {patience:g} s after {cause}.\n{_GO_ON}"
            roll_call.leave_words(words)
    except RuntimeError:  # the store is gone, and with it the machine that held it
        return (
            "The processes of this run lost each other, and the place where they meet (MASTER_ADDR) no longer "
            f"answers: its machine, or the launcher on it, is gone. The error was {cause}.\n{_GO_ON}"
        )
    if words is not None:
        return words
    who = f"{named(elsewhere)} did not join it" if elsewhere else "every rank is still there"
    return (
        f"A collective failed; {who}. The error was {cause}.\n"
        f"If a rank was busy with other work, use {strategy}(timeout=...) with more than {timeout_s:g} seconds, or "
        "meeting_timeout=... if that was a validation, a rollout, a save or a hook of these."
        + (" A sharded run needs all ranks to run the same units, in the same order." if strategy == "FSDP" else "")
    )


def named(numbers: list[int]) -> str:
    """Those of ranks, for a sentence."""
    return f"Rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def first_line(error: BaseException) -> str:
    """What an error says, without gloo's source lines, guesses and good wishes."""
    line = (str(error).strip() or "no message").splitlines()[0].partition(". This is typically")[0].rstrip(".")
    return re.sub(r"^\[\S+:\d+\] ", "", line)
