"""What is measured in the course of a run, as curves: means over runs, and from the lowest to the highest."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from exogym_core.results.report.results import SeedResult, StrategyResult

__all__ = ["COLOURS", "Point", "curve", "rates", "thinned"]

_SPANS = 60  # of a run, in each of which a counter has one rate

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7F7F7F")
"""Okabe and Ito's, told apart by all kinds of colour vision."""


class Point(NamedTuple):
    """One step of a curve: means over runs of where it is and of the value, and the value's range.

    Attributes:
        step: of training.
        seconds: virtual, when what is measured came to exist; None where nothing is known of time.
        num_bytes: payload that a worker had sent by then; None where that is not known.
        value: a mean over runs.
        least, most: of the runs.
    """

    step: float
    seconds: float | None
    num_bytes: float | None
    value: float
    least: float
    most: float


def curve(result: StrategyResult, measure: str = "loss") -> list[Point]:
    """What is measured by step, for the steps that all runs have.

    Args:
        result: a strategy, or a group of runs as one.
        measure: `loss` (of the judged model, where there is one), or a column of the metrics.
    """
    runs = [_measured(run, measure) for run in result.runs]
    points = []
    for step in sorted(set(runs[0]).intersection(*runs[1:])) if runs else []:
        seconds, sent, values = zip(*(run[step] for run in runs), strict=True)
        points.append(
            Point(step, _mean(seconds), _mean(sent), sum(values) / len(values), min(values), max(values))
        )
    return points


def _measured(run: SeedResult, measure: str) -> dict[float, tuple[float | None, float | None, float]]:
    values = run.losses if measure == "loss" else run.measured(measure)
    seconds, sent = run.at_steps("virtual_seconds"), run.at_steps("bytes_sent")
    # A place at step 0 alone says nothing.
    return {
        step: (
            seconds.get(step) if len(seconds) > 1 else None,
            sent[step] / run.num_workers if len(sent) > 1 and step in sent else None,
            value,
        )
        for step, value in values
    }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if values and len(known) == len(values) else None


def rates(run: SeedResult, column: str) -> list[tuple[float, float]]:
    """How fast a counter of bytes rises, as (end of a span, bits per second in it); equal spans of virtual time.

    What a step sent counts evenly from the end of the step before to its own: no more is known of it.
    """
    known = [
        (row["virtual_seconds"], row[column])
        for row in run.train
        if column in row and "virtual_seconds" in row
    ]
    if not known or known[-1][0] <= 0:
        return []
    length = known[-1][0] / _SPANS
    spans = [0.0] * _SPANS
    for (begin, before), (end, after) in pairwise([(0.0, 0.0), *known]):
        first, last = int(begin / length), min(int(end / length), _SPANS - 1)
        for span in range(min(first, last), last + 1):
            inside = min(end, (span + 1) * length) - max(begin, span * length)
            share = inside / (end - begin) if end > begin else 1 / (last - min(first, last) + 1)
            spans[span] += (after - before) * max(share, 0.0)
    return [((span + 1) * length, 8 * sent / length) for span, sent in enumerate(spans)]


def thinned(points: Sequence[Point], most: int) -> Sequence[Point]:
    """At most about so many points, evenly chosen; the last one is always there."""
    stride = -(-len(points) // most)
    if stride <= 1:
        return points
    return [*points[:-1:stride], points[-1]]
