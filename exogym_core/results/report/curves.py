"""Curves of a run's measures: means and ranges over seeds, and the data of the page's interactive chart."""

from __future__ import annotations

import math
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from exogym_core.names import visible
from exogym_core.results.report.network import low_spans, mean_rates

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from exogym_core.results.reading import Results, SeedResult, StrategyResult
    from exogym_core.results.report.network import WeatherStrips


__all__ = ["ALIGNMENTS", "COLOURS", "Point", "curve", "interactive_curves", "rates", "thinned"]

_SPANS = 60  # of a run, in each of which a counter has one rate

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7F7F7F")
"""Colours of Okabe and Ito, distinct for all kinds of colour vision."""


class Point(NamedTuple):
    """Point of a curve: means over runs of its place and value, and the value's range.

    Attributes:
        step: of training.
        seconds: virtual, when the measured model was made; None without a clock.
        num_bytes: payload that a worker had sent by then; None where it was not counted.
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
    """A measure by step, for the steps that all runs have.

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
    # A value at step 0 alone means that the column is missing.
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
    """Rate of a counter of bytes as (end of a span, bits per second in it), in equal spans of virtual time.

    The bytes of a step are spread evenly from the end of the step before to its own.
    """
    known = [row for row in run.train if column in row and "virtual_seconds" in row]
    if not known or known[-1]["virtual_seconds"] <= 0:
        return []
    instants, counts = [0.0], [0.0]
    for row in known:
        instants.append(row["virtual_seconds"])
        counts.append(row[column])
    return [(end, 8 * rate) for end, rate in mean_rates(instants, counts, _SPANS)]


def thinned(points: Sequence[Point], most: int) -> Sequence[Point]:
    """About `most` points at most, evenly chosen, the last one among them."""
    stride = -(-len(points) // most)
    if stride <= 1:
        return points
    return [*points[:-1:stride], points[-1]]


ALIGNMENTS = ("time", "steps", "bytes")
"""Axes by which curves can be aligned."""

_MEASURES = {
    "loss": "loss of the judged model",
    "accuracy": "accuracy of the judged model",
    "train_loss": "training loss",
}
_MOST_CURVES = 48
_MOST_POINTS = 40_000  # of all curves together: some MB of text
_SHOWN_FIRST = 8  # the others can be switched on
_MOST_SPANS = 600  # of weather
_MOST_ABSENCES = 200
_DIGITS = 6


def interactive_curves(
    results: Results, weather: WeatherStrips, align: str = "time"
) -> dict[str, Any] | None:
    """Data of the page's chart; None where no strategy has a curve.

    Args:
        results: strategies, or groups of runs as such, best first where they are many.
        weather: of all of them; without strips where there is none, or each has its own.
        align: alignment when the page opens, one of `ALIGNMENTS`.
    """
    strategies = results.strategies[:_MOST_CURVES]
    most = max(50, _MOST_POINTS // max(1, len(strategies) * len(_MEASURES)))
    curves = [_of(result, position, most) for position, result in enumerate(strategies)]
    curves = [each for each in curves if each["measures"]]
    if not curves:
        return None
    measures = [name for name in _MEASURES if any(name in each["measures"] for each in curves)]
    timed = any("time" in measure for each in curves for measure in each["measures"].values())
    return {
        "clock": results.clock,
        "align": align if timed or align != "time" else "steps",
        "alignments": [name for name in ALIGNMENTS if timed or name != "time"],
        "measures": {name: _MEASURES[name] for name in measures},
        "curves": curves,
        "target": results.target_loss,
        "weather": _weather(weather),
        "shade": [[_short(begin), _short(end), share] for begin, end, share in low_spans(weather)],
        "left_out": len(results.strategies) - len(strategies),
    }


def _of(result: StrategyResult, position: int, most: int) -> dict[str, Any]:
    measures = {}
    for name in _MEASURES:
        points = [each for each in thinned(curve(result, name), most) if math.isfinite(each.value)]
        if len(points) > 1:
            measures[name] = _columns(points, len(result.runs) > 1)
    first = result.runs[0] if result.runs else None
    return {
        "name": visible(result.name) + result.state,
        "colour": COLOURS[position % len(COLOURS)],
        "dash": [[], [8, 4], [2, 3]][position // len(COLOURS) % 3],
        "shown": position < _SHOWN_FIRST,
        "runs": len(result.runs),
        "measures": measures,
        "use": _use(first) if first is not None else None,
        "absences": [
            {
                "rank": absence["rank"],
                "time": [absence["virtual_seconds"], first.virtual_seconds if back is None else back],
                "steps": [absence["step"], absence["back_step"]],
            }
            for absence in list(first.dropped_peers)[:_MOST_ABSENCES]
            for back in [absence["back_virtual_seconds"]]
        ]
        if first is not None
        else [],
    }


def _columns(points: Sequence[Point], has_band: bool) -> dict[str, list[float]]:
    """A list a column; columns that lack a value are left out."""
    columns: dict[str, list[float | None]] = {
        "steps": [point.step for point in points],
        "time": [point.seconds for point in points],
        "bytes": [point.num_bytes for point in points],
        "value": [point.value for point in points],
    }
    if has_band:
        columns["least"] = [_bounded(point.least, point.value) for point in points]
        columns["most"] = [_bounded(point.most, point.value) for point in points]
    return {
        name: [_short(value) for value in column if value is not None]
        for name, column in columns.items()
        if None not in column
    }


def _bounded(value: float, instead: float) -> float:
    return value if math.isfinite(value) else instead


def _short(value: float) -> float:
    """Round to the digits that a screen can show."""
    return float(f"{value:.{_DIGITS}g}")


def _use(run: SeedResult) -> Mapping[str, Any] | None:
    """Bits per second that all workers sent, and of these between regions, in equal spans of virtual time."""
    sent, wan = rates(run, "bytes_sent"), rates(run, "wan_bytes")
    if not any(rate > 0 for _, rate in sent):
        return None
    return {
        "seconds": [_short(end) for end, _ in sent],
        "sent": [_short(rate) for _, rate in sent],
        "wan": [_short(rate) for _, rate in wan] if any(rate > 0 for _, rate in wan) else None,
    }


def _weather(weather: WeatherStrips) -> list[dict[str, Any]]:
    """Spans of each strip with less than its capacity, as [begin, end, share]; equal neighbours are merged."""
    shown = []
    for strip in weather.strips[:24]:
        points = [*strip.points, (weather.until_seconds, 1.0)]
        spans = [
            (begin, end, round(share, 2)) for (begin, share), (end, _) in pairwise(points) if end > begin
        ]
        merged = [
            [inside[0][0], inside[-1][1], share]
            for share, group in groupby(spans, key=lambda span: span[2])
            if share < 1 and (inside := list(group))
        ]
        if len(merged) > _MOST_SPANS:  # drift: keep the lowest
            merged = sorted(sorted(merged, key=lambda span: span[2])[:_MOST_SPANS])
        if merged:
            name = strip.name.replace("\n", ", ")
            shown.append({"name": name, "spans": [[_short(value) for value in span] for span in merged]})
    return shown
