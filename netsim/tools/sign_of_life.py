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

    Elsewhere nothing is told, or a plain line now and then.

    Args:
        what: is being done.
        total: how many things are to be done, told by `advance` as each is; None: the seconds so far are all that is
            told.
        seconds: how long nothing is told.
        console: where; by default standard error.
        every_seconds: between plain lines where that is no terminal; None: nothing is told there.
    """

    def __init__(
        self,
        what: str,
        total: int | None = None,
        seconds: float = 2.0,
        console: Console | None = None,
        every_seconds: float | None = None,
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
        self._is_seen = console.is_terminal
        self._every_seconds = every_seconds
        self._is_over = threading.Event()
        self._timer = threading.Timer(seconds, self._progress.start if self._is_seen else self._tell_lines)
        self._timer.daemon = True

    def __enter__(self) -> SignOfLife:
        if self._is_seen or self._every_seconds is not None:
            self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        if self._timer.is_alive():
            self._timer.cancel()
            self._timer.join()
        if self._is_seen:
            self._progress.stop()

    def advance(self) -> None:
        """One more is done."""
        self._progress.advance(self._task)

    def now(self, what: str) -> None:
        """Say what is being done."""
        self._progress.update(self._task, description=what)

    def _tell_lines(self) -> None:
        task = self._progress.tasks[0]
        while not self._is_over.is_set():
            done = "" if task.total is None else f", {task.completed:.0f} of {task.total:.0f} done"
            self._progress.console.print(
                f"{task.description}{done}", markup=False, highlight=False, soft_wrap=True
            )
            self._is_over.wait(self._every_seconds)
