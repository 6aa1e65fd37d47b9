"""From what goes wrong in ranks to the one error that the user sees."""

from __future__ import annotations

import os
import traceback
from typing import TYPE_CHECKING, Any

from exogym_core.ranks.turns import Aborted
from netsim.files.errors import DeadlockError, MismatchError, NetsimError, RankError

if TYPE_CHECKING:
    from collections.abc import Callable, MutableSequence

    from exogym_core.communicator.simulated.communicator import SimulatedCommunicator

__all__ = ["FirstFailure", "run_rank", "told"]


def run_rank(
    comm: SimulatedCommunicator, body: Callable[[Any], Any], results: MutableSequence[Any] | dict[int, Any]
) -> BaseException | None:
    """Run one rank to its end; its result goes to `results[comm.rank]`, its failure is returned.

    Raises:
        Aborted: the run is being unwound, and this rank had no failure of its own.
    """
    try:
        results[comm.rank] = body(comm)
        comm.finish()
    except Aborted as aborted:
        cause = _own_cause(aborted)
        if cause is None:
            raise
        return cause
    except BaseException as error:  # SystemExit in a rank must not end the process silently
        return error
    return None


class FirstFailure:
    """The failure that explains a run's end: the first, unless a rank's own exception lies behind it."""

    def __init__(self) -> None:
        self.error: NetsimError | None = None

    def add(self, error: NetsimError) -> None:
        """Take note of a failure."""
        # A collective in a `finally` block turns one rank's KeyError into a mismatch on all ranks.
        explained = isinstance(self.error, DeadlockError | MismatchError) and isinstance(error, RankError)
        if self.error is None or explained:
            self.error = error

    def raise_if_any(self) -> None:
        """Raise the failure, if there was one."""
        if self.error is not None:
            raise self.error


def _own_cause(error: BaseException) -> BaseException | None:
    """The exception of the user's own at or behind `error`, if there is one."""
    cause: BaseException | None = error
    while cause is not None:
        if not isinstance(cause, NetsimError | Aborted):
            return cause
        cause = cause.__context__
    return None


def told(rank: int, error: BaseException) -> NetsimError:
    """What rank `rank`'s failure is to the user.

    Errors of ours are told as they are; any other as a `RankError`: what, which rank, where, and the traceback
    below. The result holds text only: a traceback would keep the rank's model and data alive.
    """
    of_calls = isinstance(error, Aborted | DeadlockError | MismatchError)
    cause = _own_cause(error) if of_calls or not isinstance(error, NetsimError) else None
    if cause is None:
        assert isinstance(error, NetsimError)
        error.__traceback__ = error.__context__ = None
        return error
    text = "".join(traceback.format_exception(cause)).rstrip()
    frames = traceback.extract_tb(cause.__traceback__)
    where = f" at {os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""
    what = f"{type(cause).__name__}: {_text_of(cause)}".splitlines()[0]
    return RankError(f"rank {rank} failed{where}: {what}\n{text}", rank)


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # an exception of a user's own whose __str__ fails must not hide that it was raised
        return "(its text cannot be told: __str__ failed)"
