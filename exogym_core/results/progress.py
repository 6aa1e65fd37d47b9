"""Progress of a run: bars or lines on the terminal, and a file in its folder for `netgym status` and `report`."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import textwrap
import threading
import time
import warnings
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, contextmanager
from html import escape
from typing import TYPE_CHECKING, Any, Self

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from exogym_core.names import visible
from exogym_core.results.disk import Forgiving, RecordError, owner_of, write_whole
from exogym_core.results.run_folder import RunFolder
from netsim.cli.terminal import plain_console
from netsim.errors import InputError
from netsim.files.documents import load_document
from netsim.files.plain_files import read_bytes
from netsim.units import format_count, format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from rich.console import Console

    from exogym_core.results.fit_result import FitResult


__all__ = [
    "AnyProgress",
    "LiveProgress",
    "NotebookBar",
    "NotebookProgress",
    "PlainProgress",
    "RunProgress",
    "ending",
    "eta_seconds",
    "folder_status",
    "format_loss",
    "loss_format",
    "progress_elsewhere",
    "progress_for",
    "shown",
    "warnings_to",
]

_MOST_PLAIN = 1000.0  # a larger loss has diverged


def format_loss(loss: float) -> str:
    """A loss with four decimals, or with three digits below 0.01; one that has diverged with two digits.

    >>> format_loss(0.19634), format_loss(-2.5), format_loss(0.0031218), format_loss(313_488.2741)
    ('0.1963', '-2.5000', '0.00312', '3.1e+05')
    """
    return f"{loss:{loss_format(loss)}}"


def loss_format(loss: float) -> str:
    """Format specification of a loss and its deviation."""
    if abs(loss) >= _MOST_PLAIN:
        return ".2g"
    return ".3g" if 0 < abs(loss) < 0.01 else ".4f"


_SECONDS_BETWEEN_LINES = 5.0
_SECONDS_TO_FIRST_LINE = 1.0
_SECONDS_BETWEEN_BARS = 0.2
_SECONDS_TO_A_MARK = 5.0
_LABEL_WIDTH = 24  # beside a bar


def eta_seconds(step: int, num_steps: int, first: int, seconds: float) -> float | None:
    """Seconds until the end, at the pace of the steps since the `first` one; None: not measured yet.

    >>> eta_seconds(30, 100, 10, 20.0)
    70.0
    """
    return seconds / (step - first) * max(num_steps - step, 0) if step > first else None


def _loss_and_time(row: Mapping[str, Any]) -> str:
    seconds = row.get("virtual_seconds")
    loss = f"loss {format_loss(row['train_loss'])}"
    return loss if seconds is None else f"{loss}, virtual time {format_seconds(seconds)}"


def _of(steps: int) -> str:
    """ " of" so many steps; "" where only the ranks can count them."""
    return f" of {steps}" if steps else ""


def ending(result: FitResult) -> str:
    """Sentence on how a run ended: done or stopped, its steps, loss and virtual time."""
    words = [f"step {len(result.history)}{_of(result.max_steps)}"]
    if result.final_loss is not None:
        loss = format_loss(result.final_loss)
        if result.complete or not result.validation:
            words.append(f"final loss {loss}")
        else:  # the last evaluation of a stopped run is not that of its end
            words.append(f"last evaluated: loss {loss} at step {result.validation[-1]['step']}")
    if result.virtual_seconds is not None:
        words.append(f"virtual time {format_seconds(result.virtual_seconds)}")
    if result.first_non_finite_step is not None:
        words.append(f"loss not finite from step {result.first_non_finite_step}")
    return f"{'done' if result.complete else 'stopped'}: {', '.join(words)}"


class RunProgress:
    """Progress of one run.

    Attributes:
        label: its strategy's, as shown.
        status: its object in the folder's status file.
        view: its bar or cell, as the display keeps it.
        due: time from which it may be shown again.
    """

    def __init__(self, display: AnyProgress, label: str, status: dict[str, Any]) -> None:
        self.label, self.status, self._display = label, status, display
        self.view: Any = None
        self.due = 0.0
        # Times and numbers of steps: of the first, and of two marks, in the second half of the time so far, between
        # which steps are counted: after a jump (a site that has joined late) and where the pace changes.
        self._marks: tuple[tuple[float, int], ...] = ()

    def event(self, row: Mapping[str, Any]) -> None:
        """Take a row of metrics."""
        if row["kind"] != "step":
            return
        now = time.monotonic()
        here = (now, row["step"])
        # Time before the first step, such as the start of processes, is no measure of the others.
        first, older, newer = self._marks or (here, here, here)
        if now - newer[0] > max(_SECONDS_TO_A_MARK, newer[0] - first[0]):
            older, newer = newer, here
        self._marks = (first, older, newer)
        left = eta_seconds(row["step"], self.status["steps"], older[1], now - older[0])
        self._display._step(self, row, left)
        self.status |= {"step": row["step"], "at": time.time(), "eta_seconds": left}
        self.status |= {name: row[name] for name in _KEPT if name in row}
        self._display.write_status(at_once=left is None)

    def is_due(self, seconds: float) -> bool:
        """Whether to show it again, as it is every so many `seconds` at most."""
        now = time.monotonic()
        is_due = now >= self.due
        if is_due:
            self.due = now + seconds
        return is_due

    def end(self, words: str) -> None:
        """Show and log how the run ended; empty `words` show and log nothing."""
        self._display.end(self, words)

    def line(self, row: Mapping[str, Any], left: float | None) -> str:
        """Label, step, loss, virtual time and time left on one line."""
        ending = "" if left is None else f", ETA {format_seconds(round(left))}"
        return f"{self.label}: step {row['step']}{_of(self.status['steps'])}, {_loss_and_time(row)}{ending}"


_STATUS_FILE = ".status.json"
_MOST_BYTES = 10_000_000  # of it
_SECONDS_BETWEEN = 1.0
_KEPT = ("train_loss", "virtual_seconds", "wall_seconds", "num_peers", "num_alive", "dropped_peers")


class AnyProgress(AbstractContextManager["AnyProgress"], ABC):
    """Progress of several runs, a context manager; subclasses show it in `_show`, `_step` and `_finish`.

    Args:
        log: takes the lines of beginnings and ends, without those in between.
        folder: of the runs: a file there has their progress, written at most once a second, until the block ends.
    """

    def __init__(self, log: Callable[[str], None], folder: Path | None = None) -> None:
        self.log = log
        self._status_path = None if folder is None else folder / _STATUS_FILE
        self._runs: list[RunProgress] = []
        self._written = 0.0
        self._next_write: threading.Timer | None = None

    def __exit__(self, *exception: object) -> None:
        if self._next_write is not None:
            self._next_write.cancel()
            self._next_write.join()
        if self._status_path is not None:
            with contextlib.suppress(OSError):
                self._status_path.unlink()

    def begin(self, label: str, position: int, num_strategies: int, num_steps: int) -> RunProgress:
        """Show the strategy that starts, at `position` of `num_strategies`."""
        status = {"strategy": label, "position": position, "num_strategies": num_strategies}
        status |= {"step": 0, "steps": num_steps, "at": time.time()}
        run = RunProgress(self, visible(label), status)
        which = f" ({position} of {num_strategies})" if num_strategies > 1 else ""
        length = format_count(num_steps, "step") if num_steps else "as many steps as its data have"
        line = f"{run.label}{which}: {length}"
        self._show(run, line)
        self.log(line)
        self._runs.append(run)
        self.write_status(at_once=True)
        return run

    def end(self, run: RunProgress, words: str) -> None:
        """Show and log how a run ended, and drop it from the status file."""
        self._finish(run, words)
        if words:
            self.log(f"{run.label} {words}")
        self._runs.remove(run)
        if self._runs:  # else the last progress stands until the next run begins
            self.write_status(at_once=True)

    def write_status(self, *, at_once: bool) -> None:
        """Write the status file, `at_once` or a second after its last write at the earliest."""
        wait = self._written + _SECONDS_BETWEEN - time.time()
        if self._status_path is None:
            return
        if at_once or wait <= 0:
            self._write_status(self._status_path)
        elif self._next_write is None or not self._next_write.is_alive():
            # Steps of a whole round come at once where ranks are apart: the last of them is to be seen until the next.
            self._next_write = threading.Timer(wait, self._write_status, [self._status_path])
            self._next_write.daemon = True
            self._next_write.start()

    def _write_status(self, path: Path) -> None:
        self._written = time.time()
        # A full disk is reported by the results; no run is under way.
        with contextlib.suppress(OSError, ValueError, RecordError):
            first, *others = [dict(run.status) for run in list(self._runs)]
            write_whole(path, json.dumps(first | ({"others": others} if others else {})))

    @abstractmethod
    def _show(self, run: RunProgress, line: str) -> None:
        """Show a run's first `line`."""

    @abstractmethod
    def _step(self, run: RunProgress, row: Mapping[str, Any], left: float | None) -> None:
        """Show a step, with the seconds `left` until the end (None: not measured yet)."""

    @abstractmethod
    def _finish(self, run: RunProgress, words: str) -> None:
        """Show how a run ended; nothing where there are no `words`."""


class PlainProgress(AnyProgress):
    """A line at a run's start and end, and every few seconds between, whatever other runs print.

    Args:
        write: takes a line.
        log, folder: as for `AnyProgress`.
    """

    def __init__(
        self, write: Callable[[str], None], log: Callable[[str], None], folder: Path | None = None
    ) -> None:
        super().__init__(log, folder)
        self._write = write

    def _show(self, run: RunProgress, line: str) -> None:
        run.due = time.monotonic() + _SECONDS_TO_FIRST_LINE
        self._write(line)

    def _step(self, run: RunProgress, row: Mapping[str, Any], left: float | None) -> None:
        if run.is_due(_SECONDS_BETWEEN_LINES):
            self._write(run.line(row, left))

    def _finish(self, run: RunProgress, words: str) -> None:
        if words:
            self._write(f"{run.label} {words}")


class LiveProgress(AnyProgress):
    """A bar a run with step, loss, virtual time and time left.

    Args:
        console: the terminal.
        log, folder: as for `AnyProgress`.
    """

    def __init__(self, console: Console, log: Callable[[str], None], folder: Path | None = None) -> None:
        super().__init__(log, folder)
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}", markup=False),
            TimeRemainingColumn(compact=True, elapsed_when_finished=True),
            console=console,
        )

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bars.stop()
        super().__exit__()

    def _show(self, run: RunProgress, line: str) -> None:
        run.view = self._bars.add_task(
            textwrap.fill(run.label, _LABEL_WIDTH).ljust(14),
            total=run.status["steps"] or None,
            status="starting",
        )

    def _step(self, run: RunProgress, row: Mapping[str, Any], left: float | None) -> None:
        self._bars.update(run.view, completed=row["step"], status=_loss_and_time(row))

    def _finish(self, run: RunProgress, words: str) -> None:
        self._bars.stop_task(run.view)
        if words:
            self._bars.update(run.view, status=words.split(": ", 1)[1].split(", ", 1)[-1])


class NotebookProgress(AnyProgress):
    """A bar a run in the output of a notebook's cell, which steps update."""

    def _show(self, run: RunProgress, line: str) -> None:
        run.view = NotebookBar(run.status["steps"], line)

    def _step(self, run: RunProgress, row: Mapping[str, Any], left: float | None) -> None:
        if run.is_due(_SECONDS_BETWEEN_BARS):
            run.view.update(row["step"], run.line(row, left))

    def _finish(self, run: RunProgress, words: str) -> None:
        if words:
            run.view.update(run.status["steps"], f"{run.label} {words}")


class NotebookBar:
    """A bar of `most` parts and a line, in the output of a notebook's cell."""

    def __init__(self, most: int, line: str) -> None:
        self._most, self._ipython = most, importlib.import_module("IPython.display")
        self._view = self._ipython.display(self._html(0, line), display_id=True)

    def update(self, done: float, line: str) -> None:
        """Show that so many parts are done."""
        self._view.update(self._html(done, line))

    def _html(self, done: float, line: str) -> Any:
        bar = f'<progress value="{done:g}" max="{self._most}"></progress>'
        return self._ipython.HTML(f"{bar} {escape(line)}")


def progress_for(console: Console, log: Callable[[str], None], folder: Path | None = None) -> AnyProgress:
    """Bars if `console` is a terminal or a notebook's, else lines; `folder` as for `AnyProgress`."""
    if console.is_terminal:
        return LiveProgress(console, log, folder)
    if console.is_jupyter and not console.quiet:
        return NotebookProgress(log, folder)
    return PlainProgress(lambda line: console.print(Text(line), soft_wrap=True), log, folder)


@contextmanager
def shown(
    label: str, result: FitResult, log: Callable[[str], None], folder: Path | None, *, is_quiet: bool
) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Show one run while the block runs, and how it ended; gives the function that takes its rows.

    Args:
        label: of the run.
        result: of the run.
        log: takes the lines of its beginning and end.
        folder: also keeps the progress, for `netgym status`; None: none does.
        is_quiet: show nothing on stderr.
    """
    stream = None if sys.stderr is None else Forgiving(sys.stderr)
    console = plain_console(file=stream, stderr=True, quiet=is_quiet)
    with progress_for(console, log, folder) as progress:
        run = progress.begin(label, 1, 1, result.max_steps)
        try:
            yield run.event
        finally:
            run.end(ending(result))


@contextmanager
def warnings_to(write: Callable[[str], None]) -> Iterator[None]:
    """Pass warnings to `write`, each line once: a model may warn at every pass."""
    written: set[str] = set()

    def show(message: Warning | str, *_: object, **__: object) -> None:
        line = f"warning: {visible(message, 500)}"
        if line not in written:
            written.add(line)
            write(line)

    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = show
        yield


def progress_elsewhere(path: Path) -> tuple[str | None, bool]:
    """Progress of another process on the run of a folder, in words, and whether it trains on a real transport.

    None in place of the words where no other process works on it.
    """
    now, owner = _now(path), owner_of(path)
    is_wall = now is not None and "wall_seconds" in now
    if owner in (None, os.getpid()):
        return None, is_wall
    if now is None:
        return f"process {owner}", is_wall
    return f"{now['strategy']}: step {now['step']}{_of(now['steps'])}", is_wall


def folder_status(path: Path) -> dict[str, Any]:
    """Progress of the run of a folder.

    Returns:
        `state` ("running", "stopped" or "finished"), `process`, `strategies` (those that have ended, each with `name`,
        `state`, `steps`, `final_loss` and `dropped_peers`), `now` (what is trained at present, with its `dropped_peers`
        so far) and `checkpoint` (the newest one's step).

    Raises:
        InputError: it is no run's folder.
    """
    folder = RunFolder.open(path)
    summary, owner = folder.read_summary(), owner_of(path)
    experiment = load_document(path / "experiment.yaml").data
    seeds = experiment.get("seeds") if isinstance(experiment, dict) else None
    num_seeds = len(seeds) if isinstance(seeds, list) else 1
    incomplete = any(entry.get("incomplete") for entry in summary)
    ended = [
        {
            "name": entry["name"],
            "state": _state(entry, num_seeds),
            "steps": entry.get("steps"),
            "final_loss": entry.get("final_loss"),
            "dropped_peers": entry.get("dropped_peers") or [],
        }
        for entry in summary
    ]
    now = _now(path)
    has_result = bool(summary) or (path / "tune.json").is_file()
    is_over = owner is None and has_result and not incomplete and now is None
    checkpoints = [int(each.name.rpartition("-")[2]) for each in path.glob("checkpoints/*/step-*")]
    return {
        "kind": "run",
        "folder": str(path),
        "state": "finished" if is_over else "running" if owner is not None else "stopped",
        "process": owner,
        "strategies": ended,
        "now": now,
        "checkpoint": max(checkpoints, default=None),
    }


def _state(entry: Mapping[str, Any], num_seeds: int) -> str:
    if entry.get("failed") or not entry.get("incomplete"):
        return "failed" if entry.get("failed") else "finished"
    runs = entry.get("by_seed") or [entry]
    if any(run.get("incomplete") for run in runs):
        return "stopped"
    return f"finished with {len(runs)} of {num_seeds} seeds"


def _now(path: Path) -> dict[str, Any] | None:
    """Progress that the run has written; None where it trains nothing."""
    try:
        found = json.loads(read_bytes(path / _STATUS_FILE, _MOST_BYTES))
        for each in (found, *found.get("others", ())):
            each["silent_seconds"] = round(max(time.time() - each.pop("at"), 0.0), 1)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path / _STATUS_FILE}: cannot be read: {error}") from None
    return dict(found)
