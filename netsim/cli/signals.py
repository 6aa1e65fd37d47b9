"""Ctrl-C, SIGTERM and SIGHUP: the first signal ends a command in order, the second at once.

Both command lines enter `Interruption` around every command. A command that has results before its end computes them
in a `Stoppable` block, shows them after it, and calls its `end`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any

from netsim.errors import NetsimError

if TYPE_CHECKING:
    from types import FrameType, TracebackType

__all__ = ["NOTHING_FINISHED", "Interruption", "Stoppable", "interrupt", "raise_lost_interrupt"]

NOTHING_FINISHED = "nothing was finished"
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _end_while_torch_loads(number: int) -> None:
    """An exception that passes through torch's own start aborts the process: end it in order instead."""
    spec = getattr(sys.modules.get("torch"), "__spec__", None)
    if getattr(spec, "_initializing", False):
        with contextlib.suppress(OSError):
            os.write(2, f"interrupted: {NOTHING_FINISHED}\n".encode())
        os._exit(128 + number)


def interrupt(number: int, frame: FrameType | None) -> None:
    """SIGINT's handler while no `Interruption` is entered: Python's own, but where that would abort the process.

    Args:
        number: of the signal.
        frame: where it came.

    Raises:
        KeyboardInterrupt: always, where it does not end the process.
    """
    _end_while_torch_loads(number)
    raise KeyboardInterrupt


class Interruption:
    """While entered, the first signal raises KeyboardInterrupt in the main thread and the second exits.

    SIGINT is taken even where a background shell has handed it down ignored, so that `kill -INT` works; SIGHUP stays
    ignored under nohup. In another thread than the main one nothing is changed.

    Attributes:
        exit_code: 130 after SIGINT, 143 after SIGTERM, 129 after SIGHUP; None before.
    """

    def __init__(self) -> None:
        self.exit_code: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Interruption:
        if threading.current_thread() is not threading.main_thread():
            return self
        for number in _ENDING:
            if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue
            self._previous[number] = signal.signal(number, self._interrupt)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        _end_while_torch_loads(number)
        if self.exit_code is not None:
            os._exit(self.exit_code)
        self.exit_code = 128 + number
        raise KeyboardInterrupt


def raise_lost_interrupt(error: Exception | None = None) -> None:
    """Raise KeyboardInterrupt again where a signal has come and compiled code has made `error` of it, or nothing.

    Raises:
        KeyboardInterrupt: an `Interruption` is entered and has had a signal.
    """
    entered = getattr(signal.getsignal(signal.SIGINT), "__self__", None)
    if isinstance(entered, Interruption) and entered.exit_code is not None:
        raise KeyboardInterrupt from error


class Stoppable:
    """Block that a signal may end before its time.

    >>> with Stoppable() as work:
    ...     raise KeyboardInterrupt
    >>> work.is_stopped  # `work.end("1 of 3 rows was computed")` ends the command, and doctest too
    True

    Attributes:
        is_stopped: whether one has.
    """

    is_stopped = False

    def __enter__(self) -> Stoppable:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        try:
            if isinstance(error, Exception) and not isinstance(error, NetsimError):
                raise_lost_interrupt(error)
        except KeyboardInterrupt as interrupt:
            error = interrupt
        self.is_stopped = isinstance(error, KeyboardInterrupt)
        return self.is_stopped

    def end(self, line: str) -> None:
        """End the command where its block was stopped.

        Args:
            line: says how far it came; printed after "interrupted: ".

        Raises:
            KeyboardInterrupt: with `line`; not raised if the block ended.
        """
        if self.is_stopped:
            raise KeyboardInterrupt(line)
