"""Ending in order when torchrun ends a rank, also while its main thread is inside of gloo."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import threading
from typing import TYPE_CHECKING, NoReturn, Self

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType, TracebackType

__all__ = ["Ending"]


class Ending:
    """Context manager: what happens on SIGTERM and SIGINT.

    Python runs a signal's handler when the main thread is back from what it is in, which in gloo can be never. So a
    thread hears of the signal at once: it tells what is to be told, and ends the process if the main thread has not
    left this context some seconds later. Outside of the main thread it does nothing.

    Args:
        tell: called in that thread, with the signal's number.
        grace_seconds: for the main thread to save what it has.
    """

    def __init__(self, tell: Callable[[int], None], grace_seconds: float) -> None:
        self._tell, self._grace_seconds = tell, grace_seconds
        self._is_main = threading.current_thread() is threading.main_thread()
        self._left, self._heard, self._told = threading.Event(), threading.Event(), threading.Event()
        self._before_term = signal.SIG_DFL

    def __enter__(self) -> Self:
        if self._is_main:
            self._mine, theirs = socket.socketpair()
            self._theirs = theirs
            theirs.setblocking(False)
            self._before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
            if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
                signal.signal(signal.SIGTERM, _interrupt)
                self._restores = True
            else:
                self._restores = False
            threading.Thread(target=self._listen, name="ending", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._left.set()
        # The main thread may have been interrupted before the other one has heard of it.
        interrupted = isinstance(sys.exception(), KeyboardInterrupt)
        if self._is_main and (interrupted or self._heard.is_set()):
            self._told.wait(self._grace_seconds)
        if self._is_main:
            signal.set_wakeup_fd(self._before)
            if self._restores:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._theirs.close()

    def _listen(self) -> None:
        with self._mine:
            while select.select([self._mine], [], []) and (told := self._mine.recv(1)):
                number = told[0]
                if number in (signal.SIGTERM, signal.SIGINT):
                    self._heard.set()
                    with contextlib.suppress(Exception):
                        self._tell(number)
                    self._told.set()
                    if not self._left.wait(self._grace_seconds):
                        _end(128 + number)
                    return


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _end(code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
