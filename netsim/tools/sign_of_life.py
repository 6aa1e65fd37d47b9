"""A sign of life on the terminal, once something has taken longer than one likes to wait without."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["SignOfLife"]


class SignOfLife:
    """While the block runs: after two seconds a line on standard error, where that is a terminal; gone at the end.

    Args:
        what: is being done.
        total: how many things are to be done, told by `advance` as each is; None: the seconds so far are all that is
            told.
        seconds: how long nothing is told.
        console: where; by default standard error.
    """

    def __init__(
        self, what: str, total: int | None = None, seconds: float = 2.0, console: Console | None = None
    ) -> None:
        console = console if console is not None else Console(file=sys.stderr)
        counted = [] if total is None else [MofNCompleteColumn()]
        columns = [
            TextColumn("{task.description}", markup=False),
            BarColumn(24),
            *counted,
            TimeElapsedColumn(),
        ]
        self._progress = Progress(*columns, console=console, transient=True)
        self._task = self._progress.add_task(what, total=total)
        self._timer = threading.Timer(seconds, self._progress.start)
        self._timer.daemon = True
        self._is_seen = console.is_terminal

    def __enter__(self) -> SignOfLife:
        if self._is_seen:
            self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_seen:
            self._timer.cancel()
            self._timer.join()
            self._progress.stop()

    def advance(self) -> None:
        """One more is done."""
        if self._is_seen:
            self._progress.advance(self._task)
