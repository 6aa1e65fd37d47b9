"""Runs a sweep: every point as a comparison of its own; failed ones are marked and the rest done.

Where points are run is a `PointRunner`: `Here`, one after the other in this process, or a Ray cluster.
"""

from __future__ import annotations

import math
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

from exogym_core.app.studies.point_run import PointRun, found_by, train_in
from exogym_core.app.studies.search import source_of
from netsim.files.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from exogym_core.app.studies.point_run import Found
    from exogym_core.app.studies.progress import SweepProgress
    from exogym_core.app.studies.study import Study

__all__ = ["Here", "PointRunner", "objective", "run_sweep"]


class PointRunner(Protocol):
    """Where points are run."""

    def run(self, points: Iterable[PointRun]) -> Iterator[tuple[int, Found]]:
        """Run each from `begin` to `end`; yields (number, what came of it) as they end."""


class Here:
    """In this process, one after the other."""

    def run(self, points: Iterable[PointRun]) -> Iterator[tuple[int, Found]]:
        """Run each."""
        for each in points:
            yield each.number, self._run(each)

    def _run(self, each: PointRun) -> Found:
        folder, listener = each.begin()
        try:
            found = found_by(lambda: train_in(folder, each.experiment(folder), listener), folder)
        except BaseException:
            folder.release()
            raise
        return each.end(folder, found)


def run_sweep(study: Study, progress: SweepProgress, runner: PointRunner) -> int:
    """Run every point that is not done yet; returns how many failed.

    A point that was begun and not ended goes on, one that failed is tried again. What is asked of Python or the disk
    and not of a point (no room for a file, Ctrl-C) ends the sweep; everything done is there.
    """
    source = source_of(study.sweep)
    learns = study.sweep.search == "optuna"
    numbered = enumerate(iter(source.ask, None))
    while batch := list(islice(numbered, study.sweep.at_once if learns else None)):
        values: dict[int, float | None] = {}
        left = []
        for number, point in batch:
            known = study.entry(number)
            if known is None or known.get("failed") or known.get("incomplete"):
                left.append(PointRun(study, number, point, progress))
            else:
                progress.skip()
                values[number] = _value(study, known)
        for number, found in runner.run(left):
            values[number] = _value(study, found)
        for number, _ in batch:  # in this order, whatever ended first: so a search proposes the same again
            source.tell(values[number])
    return sum(bool(entry.get("failed")) for entry in study.entries)


def _value(study: Study, found: Mapping[str, Any]) -> float | None:
    return None if found.get("failed") else objective(study.sweep.minimise, found["strategies"])


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
