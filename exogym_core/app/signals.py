"""Ctrl-C and SIGTERM: the first ends a run in order, the second at once."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import FrameType

__all__ = ["Interruption"]


class Interruption:
    """While entered, the first signal raises KeyboardInterrupt in the main thread and the second exits.

    SIGINT is taken even where a background shell has handed it down ignored, so that `kill -INT` works.

    Attributes:
        exit_code: 130 after SIGINT, 143 after SIGTERM; None before.
    """

    def __init__(self) -> None:
        self.exit_code: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Interruption:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._interrupt)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self.exit_code is not None:
            os._exit(self.exit_code)
        self.exit_code = 128 + number
        raise KeyboardInterrupt
