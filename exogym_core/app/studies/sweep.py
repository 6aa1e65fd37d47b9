"""Runs a sweep: point after point, each as a comparison of its own; failed ones are marked and the rest done."""

from __future__ import annotations

import math
import time
import warnings
from typing import TYPE_CHECKING, Any

from exogym_core.app.comparison import compare
from exogym_core.app.experiment import Experiment
from exogym_core.app.studies.points import point_text
from exogym_core.app.studies.search import source_of
from exogym_core.names import visible
from exogym_core.results.record import RecordError
from netsim.files.errors import InputError, NetsimError
from netsim.files.units import format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from exogym_core.app.studies.points import Point
    from exogym_core.app.studies.study import Study
    from exogym_core.results.fit_result import FitResult
    from exogym_core.results.record import RunFolder

__all__ = ["SweepProgress", "objective", "run_sweep"]

_SECONDS_BETWEEN_LINES = 5.0


class SweepProgress:
    """Lines that tell how far a sweep is; an `Audience` of each point's comparison.

    Args:
        write: takes a line.
        num_points: how many there are in all.
    """

    def __init__(self, write: Callable[[str], None], num_points: int) -> None:
        self._write, self._num_points = write, num_points
        self._begun = self._last = time.monotonic()
        self._old = 0  # points that were done before
        self._done = 0.0  # points
        self._point, self._run, self._runs, self._steps = "", 1, 1, 1

    def skip(self) -> None:
        """A point was done before this process began."""
        self._old += 1

    def point(self, number: int, point: Point) -> None:
        """A point begins; numbers count from 0."""
        self._point = f"point {number + 1} of {self._num_points}"
        self._number = number
        self._write(f"{self._point}: {visible(point_text(point), 200)}")

    def over(self, told: str) -> None:
        """It ended."""
        self._done = self._number + 1 - self._old
        self._write(f"{self._point}: {told}{self._left()}")

    def begin(self, label: str, position: int, num_strategies: int, num_steps: int) -> None:
        """One of its runs begins."""
        self._run, self._runs, self._steps = position, num_strategies, num_steps
        self._label = visible(label, 40)

    def event(self, row: Mapping[str, Any]) -> None:
        """A row of metrics."""
        now = time.monotonic()
        if row["kind"] != "step" or now - self._last < _SECONDS_BETWEEN_LINES:
            return
        self._last = now
        share = (self._run - 1 + row["step"] / self._steps) / self._runs
        self._done = self._number - self._old + share
        self._write(
            f"{self._point}: {self._label}: step {row['step']} of {self._steps}, "
            f"loss {row['train_loss']:.4f}{self._left()}"
        )

    def end(self, result: FitResult) -> None:
        """One of its runs ended; the point's end tells what came of all."""

    def _left(self) -> str:
        left = self._num_points - self._old - self._done
        if not self._done or left <= 0:
            return ""
        elapsed = time.monotonic() - self._begun
        return f", ETA {format_seconds(round(elapsed / self._done * left))}"


def run_sweep(study: Study, progress: SweepProgress) -> int:
    """Run every point that is not done yet; returns how many failed.

    A point that was begun and not ended goes on, one that failed is tried again. What is asked of Python or the disk
    and not of a point (no room for a file, Ctrl-C) ends the sweep; everything done is there.
    """
    source = source_of(study.sweep)
    number = 0
    while (point := source.ask()) is not None:
        known = study.entry(number)
        if known is not None and not (known.get("failed") or known.get("incomplete")):
            progress.skip()
            found: Mapping[str, Any] = known
        else:
            progress.point(number, point)
            found = _run_point(study, number, point, progress)
        source.tell(None if found.get("failed") else objective(study.sweep.minimise, found["strategies"]))
        number += 1
    return sum(bool(entry.get("failed")) for entry in study.entries)


def _run_point(study: Study, number: int, point: Point, progress: SweepProgress) -> dict[str, Any]:
    study.note(number, point, {"incomplete": True})
    folder = study.point_folder(number)
    found: dict[str, Any]
    try:
        entries = _compare(study, point, folder, progress)
        failed = [entry for entry in entries if entry.get("failed")]
        found = {"strategies": entries}
        if failed:
            found |= {"failed": True, "error": f"{failed[0]['name']}: {failed[0].get('error')}"}
    except RecordError:
        raise
    except Exception as error:
        text = str(error) if isinstance(error, NetsimError) else f"{type(error).__name__}: {error}"
        told = visible(text.partition("\n")[0].removeprefix(f"point {point_text(point)}: "), 500)
        found = {"failed": True, "error": told, "strategies": folder.read_summary()}
    finally:
        folder.release()
    study.note(number, point, found)
    progress.over(f"failed: {found['error']}" if found.get("failed") else _told(found["strategies"]))
    return found


def _compare(study: Study, point: Point, folder: RunFolder, progress: SweepProgress) -> list[dict[str, Any]]:
    """Train the point's strategies in its folder, or what is left of them."""
    folder.owned().clean()
    if folder.read_summary():  # as it was begun: with what was measured then
        experiment = Experiment.load(folder.path / "experiment.yaml", trust=True)
    else:
        experiment = study.experiment_at(point)
        folder.write_text("experiment.yaml", experiment.to_yaml())
        folder.write_environment(next((code.folder for code in experiment.own_code if code.folder), None))

    def note(message: Warning | str, *_: object, **__: object) -> None:
        folder.log(f"warning: {visible(message, 500)}")

    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = note
        return compare(experiment, folder, progress, resume=True)


def objective(field: str | None, entries: Sequence[Mapping[str, Any]]) -> float:
    """The number that a search wants small: the best strategy's; infinite where none has one.

    A time to the target counts only where the target was held.

    Raises:
        InputError: summaries have no such field.

    >>> objective("final_loss", [{"final_loss": 0.4}, {"final_loss": 0.2}, {"final_loss": None}])
    0.2
    """
    if field is None:
        return 0.0
    if entries and not any(field in entry for entry in entries):
        numbers = sorted(
            {key for entry in entries for key, value in entry.items() if isinstance(value, int | float)}
        )
        raise InputError(f"minimise {field}: the summary has no such field: choose from {', '.join(numbers)}")
    values = [
        entry[field]
        for entry in entries
        if isinstance(entry.get(field), int | float)
        and not entry.get("failed")
        and (field != "virtual_seconds_to_target" or entry.get("target") == "held")
    ]
    return min(values, default=math.inf)


def _told(entries: Sequence[Mapping[str, Any]]) -> str:
    """What came of a point, in a few words."""
    words = []
    for entry in entries:
        loss, seconds = entry.get("final_loss"), entry.get("virtual_seconds_to_target")
        told = str(visible(entry["name"], 40))
        if loss is not None:
            told += f" {loss:.4g}"
        if seconds is not None and entry.get("target") == "held":
            told += f" (target at {format_seconds(seconds)})"
        words.append(told)
    return "; ".join(words[:6]) + ("; ..." if len(words) > 6 else "")
