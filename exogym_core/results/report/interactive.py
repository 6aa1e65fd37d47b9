"""Data of the interactive curves: what the scripts of the page draw, as plain numbers and names."""

from __future__ import annotations

import math
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any

from exogym_core.names import visible
from exogym_core.results.report.curves import COLOURS, curve, rates, thinned
from exogym_core.results.report.weather import least_shares

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from exogym_core.results.report.curves import Point
    from exogym_core.results.report.results import Results, SeedResult, StrategyResult
    from exogym_core.results.report.weather import WeatherStrips

__all__ = ["ALIGNMENTS", "interactive_curves"]

ALIGNMENTS = ("time", "steps", "bytes")
"""By what curves can be aligned."""

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
    """What the page's script draws; None where no strategy has a curve.

    Args:
        results: strategies, or groups of runs as such, best first where they are many.
        weather: of all of them; without strips where there is none, or each has its own.
        align: by what they are aligned when the page opens: one of `ALIGNMENTS`.
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
        "shade": _shade(weather),
        "left_out": len(results.strategies) - len(strategies),
    }


def _of(result: StrategyResult, position: int, most: int) -> dict[str, Any]:
    state = " (failed)" if result.error is not None else " (incomplete)" if result.incomplete else ""
    measures = {
        name: _columns(points, len(result.runs) > 1)
        for name in _MEASURES
        if len(points := _finite(thinned(curve(result, name), most))) > 1
    }
    first = result.runs[0] if result.runs else None
    return {
        "name": visible(result.name, 60) + state,
        "colour": COLOURS[position % len(COLOURS)],
        "dash": [[], [8, 4], [2, 3]][position // len(COLOURS) % 3],
        "shown": position < _SHOWN_FIRST,
        "runs": len(result.runs),
        "measures": measures,
        "use": _use(first) if first is not None else None,
        "absences": _absences(first) if first is not None else [],
    }


def _finite(points: Sequence[Point]) -> Sequence[Point]:
    return [point for point in points if math.isfinite(point.value)]


def _columns(points: Sequence[Point], has_band: bool) -> dict[str, list[float]]:
    """A list a column; those that are not known are not there."""
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
    """So many digits as a screen can show."""
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


def _absences(run: SeedResult) -> list[dict[str, Any]]:
    return [
        {
            "rank": absence["rank"],
            "time": [
                absence["virtual_seconds"],
                _or_end(absence["back_virtual_seconds"], run.virtual_seconds),
            ],
            "steps": [absence["step"], _or_end(absence["back_step"], None)],
        }
        for absence in list(run.dropped_peers)[:_MOST_ABSENCES]
    ]


def _or_end(value: float | None, end: float | None) -> float | None:
    return end if value is None else value


def _shade(weather: WeatherStrips) -> list[list[float]]:
    """When least of all was left, as [begin, end, share]."""
    shares = least_shares(weather)
    width = weather.until_seconds / max(1, len(shares))
    told = []
    for share, group in groupby(range(len(shares)), key=lambda span: round(shares[span], 1)):
        inside = list(group)
        if share < 1:
            told.append([_short(inside[0] * width), _short((inside[-1] + 1) * width), share])
    return told


def _weather(weather: WeatherStrips) -> list[dict[str, Any]]:
    """For each strip when less than all was left, as [begin, end, share]; spans that do not matter are merged."""
    told = []
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
        if len(merged) > _MOST_SPANS:  # drift: what mattered most
            merged = sorted(sorted(merged, key=lambda span: span[2])[:_MOST_SPANS])
        if merged:
            name = strip.name.replace("\n", ", ")
            told.append({"name": name, "spans": [[_short(value) for value in span] for span in merged]})
    return told
