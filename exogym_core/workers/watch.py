"""Warnings of a rank that makes no call for long, with the place of its code. Never an error."""

from __future__ import annotations

import contextlib
import os
import sys
import sysconfig
import threading
import time
import warnings
from typing import TYPE_CHECKING, NamedTuple

import torch

import netsim

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType, TracebackType

__all__ = [
    "SECONDS_BETWEEN_ROWS",
    "SECONDS_OF_SILENCE",
    "Silence",
    "Watch",
    "is_own",
    "place_in",
    "place_of_rank",
    "spent_seconds",
]

SECONDS_OF_SILENCE = 30.0  # host time
# Rows reach whoever watches at least this often (host time: what ranks compute does not depend on it).
SECONDS_BETWEEN_ROWS = 0.1

# Code that is not a user's: ours, what was installed, and Python's own.
_LIBRARIES = tuple(
    path + os.sep
    for folder in (
        os.path.dirname(os.path.dirname(__file__)),
        os.path.dirname(netsim.__file__),
        os.path.dirname(os.path.dirname(torch.__file__)),
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    )
    for path in {os.path.abspath(folder), os.path.realpath(folder)}
)


class Silence(NamedTuple):
    """A rank has made no call for a while.

    Attributes:
        rank: which.
        seconds: for how long, in host time.
        num_calls: how often ranks of its process have called so far.
        place: file, line and function of a user's code where it is; else of ours, the innermost.
        is_unusual: nothing in this run took as long before.
    """

    rank: int
    seconds: float
    num_calls: int
    place: tuple[str, int, str]
    is_unusual: bool

    def warn(self) -> None:
        """Warn the user in a line."""
        path, line, function = self.place
        where = f"in {function} at {os.path.basename(path)}:{line}" if is_own(path) else "inside of netgym"
        text = (
            f"rank {self.rank} has made no call for {self.seconds:.0f} s while others wait for it: it is {where} "
            "(if it only computes, wait; else end the run)"
        )
        warnings.warn_explicit(text, UserWarning, path, line)


class Watch:
    """Context manager: a thread that checks whether the rank that has the turn still makes calls.

    Args:
        current: returns the rank that has the turn, None for none, and how many calls have been made.
        thread_of: the thread that runs a rank, None if it has ended.
        report: called in the watching thread, every `SECONDS_OF_SILENCE` while a rank is silent.
    """

    def __init__(
        self,
        current: Callable[[], tuple[int | None, int]],
        thread_of: Callable[[int], threading.Thread | None],
        report: Callable[[Silence], None],
    ) -> None:
        self._current, self._thread_of, self._report = current, thread_of, report
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch of ranks", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        seen, since, num_reported, longest = self._current(), time.monotonic(), 0, 0.0
        while not self._ended.wait(SECONDS_OF_SILENCE / 10):
            now, (rank, num_calls) = time.monotonic(), self._current()
            if (rank, num_calls) != seen or rank is None:
                longest = max(longest, now - since)
                seen, since, num_reported = (rank, num_calls), now, 0
            elif now - since >= SECONDS_OF_SILENCE * (num_reported + 1):
                num_reported += 1
                thread = self._thread_of(rank)
                frame = sys._current_frames().get(thread.ident or 0) if thread is not None else None
                if frame is not None:
                    # A step that took long once may do so again.
                    unusual = now - since > 2 * longest
                    self._report(Silence(rank, now - since, num_calls, place_in(frame), unusual))


def place_of_rank() -> str:
    """File, line and function of a user's code in which the main thread is."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return ""
    path, line, function = place_in(frame)
    return f"{function} at {os.path.basename(path)}:{line}"


def place_in(frame: FrameType) -> tuple[str, int, str]:
    """File, line and function of the innermost call in a user's code, or of the innermost where there is none."""
    found: FrameType | None = frame
    while found is not None and not is_own(found.f_code.co_filename):
        found = found.f_back
    chosen = found if found is not None else frame
    return chosen.f_code.co_filename, chosen.f_lineno, chosen.f_code.co_name


def is_own(path: str) -> bool:
    """True if a file of code is a user's: neither ours nor installed nor Python's."""
    return not path.startswith((*_LIBRARIES, "<frozen ")) and not os.path.realpath(path).startswith(
        _LIBRARIES
    )


def spent_seconds(pid: int) -> tuple[float, bool]:
    """Processor seconds of a process and all its threads, and whether it sleeps; (0, False) if unknown."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), fields[0] == "S"
    return 0.0, False
