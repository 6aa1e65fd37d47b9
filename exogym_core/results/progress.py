"""What a person sees while strategies train: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from exogym_core.names import visible
from exogym_core.results.losses import format_loss
from netsim.files.units import format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from rich.progress import TaskID

    from exogym_core.results.fit_result import FitResult

__all__ = ["LiveProgress", "PlainProgress", "eta_seconds", "progress_for", "shown"]

_SECONDS_BETWEEN_LINES = 5.0
_SECONDS_TO_FIRST_LINE = 1.0
_NAME_WIDTH = 24


def eta_seconds(step: int, num_steps: int, first: int, seconds: float) -> float | None:
    """Seconds until the end, at the pace of the steps since the `first` one; None: not measured yet.

    >>> eta_seconds(30, 100, 10, 20.0)
    70.0
    """
    return seconds / (step - first) * max(num_steps - step, 0) if step > first else None


def _told(row: Mapping[str, Any]) -> str:
    """Loss and virtual time of a row in a few words."""
    seconds = row.get("virtual_seconds")
    loss = f"loss {format_loss(row['train_loss'])}"
    return loss if seconds is None else f"{loss}, virtual time {format_seconds(seconds)}"


def _ended(label: str, result: FitResult) -> str:
    words = [f"step {len(result.history)} of {result.max_steps}"]
    if result.final_loss is not None:
        words.append(_loss_at_end(result, format_loss(result.final_loss)))
    if result.virtual_seconds is not None:
        words.append(f"virtual time {format_seconds(result.virtual_seconds)}")
    if result.first_non_finite_step is not None:
        words.append(f"loss not finite from step {result.first_non_finite_step}")
    return f"{visible(label, 40)} {'done' if result.complete else 'stopped'}: {', '.join(words)}"


def _loss_at_end(result: FitResult, loss: str) -> str:
    """The last evaluation: of a run that was stopped not that of its end, so with its step."""
    if result.complete or not result.validation:
        return f"final loss {loss}"
    return f"last evaluated: loss {loss} at step {result.validation[-1]['step']}"


def _begun(label: str, position: int, num_strategies: int, num_steps: int) -> str:
    which = f" ({position} of {num_strategies})" if num_strategies > 1 else ""
    return f"{label}{which}: {num_steps} steps"


class PlainProgress:
    """A line now and then: at a strategy's start and end, and every few seconds between.

    Args:
        write: takes a line.
        log: takes the lines that tell what happened, without those in between.
    """

    def __init__(self, write: Callable[[str], None], log: Callable[[str], None]) -> None:
        self._write, self._log = write, log
        self._label, self._num_steps = "", 0
        self._last = 0.0
        self._first: tuple[float, int] | None = None  # when the first step came, and which it was

    def __enter__(self) -> PlainProgress:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def begin(self, label: str, position: int, num_strategies: int, num_steps: int) -> None:
        """Say which strategy starts."""
        self._label, self._num_steps = visible(label, 40), num_steps
        self._last = time.monotonic() - _SECONDS_BETWEEN_LINES + _SECONDS_TO_FIRST_LINE
        self._first = None
        line = _begun(self._label, position, num_strategies, num_steps)
        self._write(line)
        self._log(line)

    def event(self, row: Mapping[str, Any]) -> None:
        """Say how far it is, if that has not been said lately."""
        if row["kind"] != "step":
            return
        now = time.monotonic()
        # What comes before the first step, such as the start of processes, says nothing about the others.
        begun, first = self._first = self._first or (now, row["step"])
        if now - self._last < _SECONDS_BETWEEN_LINES:
            return
        self._last = now
        line = f"{self._label}: step {row['step']} of {self._num_steps}, {_told(row)}"
        left = eta_seconds(row["step"], self._num_steps, first, now - begun)
        if left is not None:
            line += f", ETA {format_seconds(round(left))}"
        self._write(line)

    def end(self, result: FitResult) -> None:
        """Say how it ended."""
        line = _ended(self._label, result)
        self._write(line)
        self._log(line)


class LiveProgress:
    """A bar a strategy with step, loss, virtual time and time left.

    Args:
        console: the terminal.
        log: takes lines that tell what happened.
    """

    def __init__(self, console: Console, log: Callable[[str], None]) -> None:
        self._log = log
        self._label = ""
        self._task: TaskID | None = None
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[told]}", markup=False),
            TimeRemainingColumn(compact=True, elapsed_when_finished=True),
            console=console,
        )

    def __enter__(self) -> LiveProgress:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def begin(self, label: str, position: int, num_strategies: int, num_steps: int) -> None:
        """Add a bar."""
        self._label = visible(label, _NAME_WIDTH)
        self._task = self._progress.add_task(self._label.ljust(14), total=num_steps, told="starting")
        self._log(_begun(self._label, position, num_strategies, num_steps))

    def event(self, row: Mapping[str, Any]) -> None:
        """Move it."""
        if row["kind"] == "step" and self._task is not None:
            self._progress.update(self._task, completed=row["step"], told=_told(row))

    def end(self, result: FitResult) -> None:
        """Leave it with the final figures."""
        line = _ended(self._label, result)
        if self._task is not None:
            self._progress.update(self._task, told=line.split(": ", 1)[1].split(", ", 1)[-1])
            self._progress.stop_task(self._task)
        self._log(line)


def progress_for(console: Console, log: Callable[[str], None]) -> LiveProgress | PlainProgress:
    """A live bar if `console` is a terminal, else lines."""
    if console.is_terminal:
        return LiveProgress(console, log)
    return PlainProgress(lambda line: console.print(Text(line), soft_wrap=True), log)


@contextmanager
def shown(label: str, num_steps: int, result: FitResult) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Show one run on stderr while the block runs, and how it ended; gives what is to be told of its rows."""
    with progress_for(Console(stderr=True), lambda line: None) as progress:
        progress.begin(label, 1, 1, num_steps)
        try:
            yield progress.event
        finally:
            progress.end(result)
