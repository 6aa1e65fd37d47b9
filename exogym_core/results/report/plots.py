"""Plots of a comparison: loss against virtual time, steps and bytes, where the time went, what the network did."""

from __future__ import annotations

import math
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from exogym_core.names import visible
from exogym_core.results.report.curves import COLOURS, curve, rates
from exogym_core.results.report.weather import WeatherStrips, draw_weather, least_shares

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from matplotlib.axes import Axes

    from exogym_core.results.report.results import Results, StrategyResult

__all__ = ["DRAWINGS", "Shown"]

_MARKERS = "osD^vPX*"
_PARTS = {"computing": "#0072B2", "network": "#E69F00", "waiting": "#BBBBBB"}
_WIDE_RANGE = 12.0  # beyond this ratio between the strategies' ends, the axis is logarithmic
_MOST_TICKS = 8
_MOST_ABSENCES = 200


class Shown(NamedTuple):
    """What is drawn: the results, and what the network did meanwhile."""

    results: Results
    weather: WeatherStrips = WeatherStrips((), 0.0)


def _loss_against_time(axes: Axes, shown: Shown) -> bool:
    results = shown.results
    # A unit that suits the shortest run: the axis becomes logarithmic where others take far longer.
    shortest = min((result.virtual_seconds or 0.0 for result in results.strategies), default=0.0)
    divisor, unit = (3600.0, "h") if shortest >= 7200 else (60.0, "min") if shortest >= 300 else (1.0, "s")
    axes.set_title(f"Loss against {results.clock}")
    if not _draw_losses(axes, results, "seconds", divisor, f"{results.clock}, {unit}"):
        return False
    _shade_weather(axes, shown.weather, divisor)
    _shade_absences(axes, results, divisor)
    return True


def _shade_weather(axes: Axes, weather: WeatherStrips, divisor: float) -> None:
    """Grey where a link or host was down or slow, the darker the less was left."""
    if not weather.strips:
        return
    shares = least_shares(weather)
    width = weather.until_seconds / len(shares) / divisor
    limits = axes.get_xlim()
    for share, columns in groupby(range(len(shares)), key=lambda column: round(shares[column], 1)):
        if share < 1:
            inside = list(columns)
            axes.axvspan(
                inside[0] * width, (inside[-1] + 1) * width, color="#555555", alpha=0.22 * (1 - share),
                linewidth=0, zorder=0,
            )  # fmt: skip
    axes.set_xlim(limits)


def _shade_absences(axes: Axes, results: Results, divisor: float) -> None:
    """In a strategy's colour, at the foot, where ranks were away from it; of its first seed."""
    limits = axes.get_xlim()
    for position, result in enumerate(results.strategies):
        for absence in list(result.runs[0].dropped_peers)[:_MOST_ABSENCES] if result.runs else ():
            back = absence["back_virtual_seconds"]
            end = back if back is not None else result.runs[0].virtual_seconds or limits[1] * divisor
            axes.axvspan(
                absence["virtual_seconds"] / divisor, end / divisor, ymax=0.05,
                color=COLOURS[position % len(COLOURS)], alpha=0.45, linewidth=0,
            )  # fmt: skip
    axes.set_xlim(limits)


def _loss_against_steps(axes: Axes, shown: Shown) -> bool:
    axes.set_title("Loss against steps")
    return _draw_losses(axes, shown.results, "step", 1.0, "steps")


def _loss_against_bytes(axes: Axes, shown: Shown) -> bool:
    axes.set_title("Loss against bytes sent")
    return _draw_losses(axes, shown.results, "num_bytes", 1e6, "bytes sent per worker, MB")


def _draw_losses(axes: Axes, results: Results, place: str, divisor: float, label: str) -> bool:
    """A line a strategy over a place of its points; False where there is nothing to draw."""
    ends: list[float] = []
    for position, result in enumerate(results.strategies):
        points = [point for point in curve(result) if getattr(point, place) is not None]
        if len(points) < 2 or getattr(points[-1], place) <= 0:
            continue
        places = [getattr(point, place) / divisor for point in points]
        ends.append(places[-1])
        state = " (failed)" if result.error is not None else " (incomplete)" if result.incomplete else ""
        style = _line(position, len(points))
        axes.plot(places, [point.value for point in points], label=visible(result.name, 30) + state, **style)
        if len(result.runs) > 1:
            least, most = [point.least for point in points], [point.most for point in points]
            axes.fill_between(places, least, most, color=style["color"], alpha=0.18, linewidth=0)
    if not ends:
        return False
    axes.set_xlabel(label)
    if max(ends) > _WIDE_RANGE * min(ends):
        _make_logarithmic(axes, label, min(ends) / 4, max(ends))
    axes.set_xlim(left=0)
    if results.target_loss is not None and results.target_loss > 0:  # the axis is logarithmic
        axes.axhline(results.target_loss, color="#555555", linestyle="--", linewidth=1.0)
        axes.annotate(
            f"target loss {results.target_loss:g}",
            (1.0, results.target_loss),
            xycoords=("axes fraction", "data"),
            xytext=(0, 3),
            textcoords="offset points",
            ha="right",
            color="#555555",
            fontsize="small",
        )
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:g}"[-1] in "25" else "")
    axes.set_ylabel("loss of the judged model")
    axes.legend(loc="best")
    return True


def _make_logarithmic(axes: Axes, label: str, linear: float, end: float) -> None:
    """Linear up to a little before the first strategy's end, so that step 0 is still on the page; said so."""
    linear = float(f"{linear:.1g}")
    axes.set_xscale("symlog", linthresh=linear, linscale=0.5)
    ticks = _ticks(linear, end)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.set_xlabel(f"{label}\n(logarithmic from {linear:g} on)")


def _ticks(linear: float, end: float) -> list[float]:
    """0, and round numbers from where the axis is logarithmic to its end, so few that they can be read.

    >>> _ticks(2.0, 320.0)
    [0.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0]
    """
    for steps in ((1, 2, 5), (1, 3), (1,)):
        powers = range(math.floor(math.log10(linear)), math.ceil(math.log10(end)) + 1)
        marks = [step * 10.0**power for power in powers for step in steps]
        ticks = [float(f"{mark:.12g}") for mark in marks if linear <= mark * (1 + 1e-9) <= end * (1 + 1e-9)]
        if len(ticks) < _MOST_TICKS:
            break
    return [0.0, *ticks]


def _line(position: int, num_points: int) -> dict[str, Any]:
    return {
        "color": COLOURS[position % len(COLOURS)],
        "marker": _MARKERS[position % len(_MARKERS)],
        "markevery": max(1, num_points // 20),
    }


def _use_of_the_network(axes: Axes, shown: Shown) -> bool:
    """A line a strategy: what all workers sent, in the course of the first seed's run."""
    drawn = [
        (position, result, points)
        for position, result in enumerate(shown.results.strategies)
        for points in [rates(result.runs[0], "bytes_sent") if result.runs else []]
        if any(rate > 0 for _, rate in points)
    ]
    if not drawn:
        return False
    largest = max(rate for _, _, points in drawn for _, rate in points)
    scale, unit = next(
        ((scale, unit) for scale, unit in ((1e9, "Gbit/s"), (1e6, "Mbit/s"), (1e3, "kbit/s")) if largest >= scale),
        (1.0, "bit/s"),
    )  # fmt: skip
    ends = [points[-1][0] for _, _, points in drawn]
    for position, result, points in drawn:
        axes.step(
            [0.0, *(end for end, _ in points)],
            [points[0][1] / scale, *(rate / scale for _, rate in points)],
            label=visible(result.name, 30),
            color=COLOURS[position % len(COLOURS)],
        )
    told = f"{shown.results.clock}, s"
    axes.set_xlabel(told)
    if max(ends) > _WIDE_RANGE * min(ends):
        _make_logarithmic(axes, told, min(ends) / 4, max(ends))
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_title("Use of the network")
    axes.set_ylabel(f"sent by all workers, {unit}")
    axes.legend(loc="best")
    _shade_weather(axes, shown.weather, 1.0)
    return True


def _where_the_time_went(axes: Axes, shown: Shown) -> bool:
    results = shown.results
    known = [(result, parts) for result in results.strategies if (parts := _parts(result)) is not None]
    if not known:
        return False
    names = [visible(result.name, 30) for result, _ in known]
    longest = max(sum(parts) for _, parts in known)
    lefts = [0.0] * len(known)
    used = {name for name, values in zip(_PARTS, zip(*(parts for _, parts in known), strict=True), strict=True)
            if any(values)}  # fmt: skip
    for part, (name, colour) in enumerate(_PARTS.items()):
        widths = [parts[part] for _, parts in known]
        if name in used:
            axes.barh(names, widths, left=lefts, color=colour, label=name)
        lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
    for row, (_, parts) in enumerate(known):
        axes.annotate(
            _shares([part for name, part in zip(_PARTS, parts, strict=True) if name in used]),
            (sum(parts), row),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize="small",
            bbox={"boxstyle": "square,pad=0.1", "color": "white"},
        )
    axes.set_xlim(0, longest * 1.28)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_title("Where the time went", pad=24)
    axes.set_xlabel(f"{results.clock} of a worker, s")
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 0.99), ncols=3)
    return True


def _parts(result: StrategyResult) -> tuple[float, float, float] | None:
    """Seconds of computing, of the network and of waiting for others; a run that does not say waits for the network."""
    seconds, share = result.virtual_seconds, result.compute_utilisation
    if not seconds:
        return None
    if result.computing_seconds is not None:
        return (result.computing_seconds, result.network_seconds or 0.0, result.waiting_seconds or 0.0)
    return None if share is None else (seconds * share, seconds * (1 - share), 0.0)


def _shares(parts: Sequence[float]) -> str:
    whole = sum(parts) or 1.0
    return " / ".join(f"{part / whole:.0%}" for part in parts)


def _what_the_network_did(axes: Axes, shown: Shown) -> bool:
    return draw_weather(axes, shown.weather)


DRAWINGS: Mapping[str, Callable[[Axes, Shown], bool]] = {
    "loss_against_time": _loss_against_time,
    "loss_against_steps": _loss_against_steps,
    "loss_against_bytes": _loss_against_bytes,
    "where_the_time_went": _where_the_time_went,
    "use_of_the_network": _use_of_the_network,
    "what_the_network_did": _what_the_network_did,
}
"""By name: what draws it on axes; False where there is nothing to draw."""
