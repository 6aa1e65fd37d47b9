"""Failures of ranks, the one error of a run that the user sees, and places in the user's code."""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
import traceback
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

import netsim
from netsim.errors import BrokenCallError, DeadlockError, MismatchError, NetsimError, RankError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType, TracebackType

__all__ = [
    "Aborted",
    "distance_from_cause",
    "is_own",
    "own_cause",
    "own_frames",
    "place_in",
    "place_of_rank",
    "place_text",
    "reported_error",
]

# Path prefixes of library code: this project, site-packages, the standard library.
_LIBRARIES = tuple(
    path + os.sep
    for folder in (
        os.path.dirname(os.path.dirname(__file__)),
        os.path.dirname(netsim.__file__),
        os.path.join(os.path.dirname(os.path.dirname(netsim.__file__)), "netgym"),
        os.path.dirname(os.path.dirname(torch.__file__)),
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib", "scripts")),
    )
    for path in {os.path.abspath(folder), os.path.realpath(folder)}
)


class Aborted(BaseException):
    """The run is being unwound; not an `Exception`, so that `except Exception` in a rank does not keep it."""


def own_cause(error: BaseException) -> BaseException | None:
    """The user's own exception at or behind `error`, or None."""
    return next((each for each in _chain(error) if not isinstance(each, NetsimError | Aborted)), None)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and those behind it."""
    while error is not None:
        yield error
        error = error.__context__


def reported_error(rank: int, error: BaseException) -> NetsimError:
    """Error that reports rank `rank`'s failure to the user.

    Errors of ours stay as they are; any other becomes a `RankError`: what, which rank, where in the user's code, and
    the frames from there on below. The result holds text only: a traceback would keep the rank's model and data alive.
    """
    of_calls = isinstance(error, Aborted | DeadlockError | MismatchError)
    cause = own_cause(error) if of_calls or not isinstance(error, NetsimError) else None
    if cause is None:
        assert isinstance(error, NetsimError)
        if isinstance(error, BrokenCallError) and error.rank is None:
            error = type(error)(f"rank {rank} failed{_place(error)}: {error}", rank)
        error.__traceback__ = error.__context__ = None
        return error
    where = _place(cause)
    what = f"{type(cause).__name__}: {_text_of(cause)}".splitlines()[0]
    failed = RankError("\n".join([f"rank {rank} failed{where}: {what}", *own_frames(cause)]), rank)
    broken = next((each for each in _chain(cause) if isinstance(each, BrokenCallError)), failed)
    failed.is_consequence = broken.is_consequence
    return failed


def _place(error: BaseException) -> str:
    """Innermost line of the user's own at which an error was raised, as " at file:line"; "" where none is known."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if is_own(frame.filename)] or frames
    return f" at {os.path.basename(own[-1].filename)}:{own[-1].lineno}" if own else ""


def distance_from_cause(error: NetsimError) -> int:
    """0 for an error that may be the cause of others, more for one that another rank's failure has most likely caused.

    A collective in a `finally` block turns one rank's KeyError into a mismatch on all ranks.
    """
    return 2 if error.is_consequence else int(isinstance(error, DeadlockError | MismatchError))


def own_frames(error: BaseException) -> list[str]:
    """The lines of a traceback from the first frame of the user's own on; of all frames if there is none.

    Its header and its last line, which repeats the error, are omitted where the error has one
    line and no other behind it.
    """
    whole = first = error.__traceback__
    while first is not None and not is_own(first.tb_frame.f_code.co_filename):
        first = first.tb_next
    trace: TracebackType | None = first or whole
    behind = error.__cause__ or (error.__context__ if not error.__suppress_context__ else None)
    special = isinstance(error, SyntaxError | BaseExceptionGroup) or hasattr(error, "__notes__")
    if behind is None and not special and "\n" not in _text_of(error):
        lines = traceback.format_tb(trace)
    else:
        lines = traceback.format_exception(type(error), error, trace)
    return "".join(lines).rstrip().splitlines()


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # a user's exception whose __str__ fails must still be reported
        return "(its text is unavailable: __str__ failed)"


# --- places in code ------------------------------------------------------------------------------------------


def place_of_rank() -> str:
    """File, line and function of a user's code in which the main thread is."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return ""
    return place_text(place_in(frame))


def place_text(place: tuple[str, int, str]) -> str:
    """A place as `function at file:line`; of a module's own code, as while it is imported, `file:line`."""
    path, line, function = place
    where = f"{os.path.basename(path)}:{line}"
    return where if function == "<module>" else f"{function} at {where}"


def place_in(frame: FrameType) -> tuple[str, int, str]:
    """File, line and function of the innermost call in a user's code, or of the innermost where there is none."""
    # All at once, before anything lets the frames' thread go on: CPython 3.11 crashed at one that had ended meanwhile.
    calls = []
    outer: FrameType | None = frame
    while outer is not None:
        calls.append((outer.f_code.co_filename, outer.f_lineno, outer.f_code.co_name))
        outer = outer.f_back
    return next((call for call in calls if is_own(call[0])), calls[0])


@lru_cache(1000)
def is_own(path: str) -> bool:
    """True if a file of code is a user's: neither ours nor installed nor Python's."""
    return not path.startswith((*_LIBRARIES, "<frozen ")) and not os.path.realpath(path).startswith(
        _LIBRARIES
    )
