"""Plots of a comparison: loss against virtual time and bytes, where the time went, what the network did."""

from __future__ import annotations

import io
import math
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from exogym_core.names import visible
from exogym_core.results.report.weather import draw_weather

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from matplotlib.axes import Axes

    from exogym_core.results.report.results import Results, StrategyResult

__all__ = ["Picture", "draw_plots", "draw_study"]

# Okabe and Ito's colours, told apart by all kinds of colour vision.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7F7F7F")
_MARKERS = "osD^vPX*"
_PARTS = {"computing": "#0072B2", "network": "#E69F00", "waiting": "#BBBBBB"}
_STYLE: dict[Any, Any] = {
    "font.size": 10.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "axes.axisbelow": True,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "legend.frameon": False,
    # Names come from users: no formula is read out of them.
    "text.parse_math": False,
}
_WIDE_RANGE = 12.0  # beyond this ratio between the strategies' ends, the axis is logarithmic
_SIZES = {"wide": ((8.0, 4.5), 144), "narrow": ((4.2, 4.4), 180)}  # inches, dots an inch
_MOST_TICKS = 8


@dataclass(frozen=True)
class Picture:
    """One plot as PNG files: for a page, and for a telephone's width, where the same letters fill more of it."""

    wide: bytes
    narrow: bytes


def draw_plots(results: Results) -> dict[str, Picture]:
    """Pictures by name; those about time only where there is virtual time."""
    drawings: dict[str, Callable[[Axes, Results], bool]] = {
        "loss_against_time": _loss_against_time,
        "loss_against_bytes": _loss_against_bytes,
        "where_the_time_went": _where_the_time_went,
        "what_the_network_did": draw_weather,
    }
    return _pictures(drawings, results)


def draw_study(results: Results) -> dict[str, Picture]:
    """Pictures of groups of runs, each a strategy's result: losses against time, steps and bytes."""
    return _pictures(
        {
            "loss_against_time": _loss_against_time,
            "loss_against_steps": _loss_against_steps,
            "loss_against_bytes": _loss_against_bytes,
        },
        results,
    )


def _pictures(
    drawings: Mapping[str, Callable[[Axes, Results], bool]], results: Results
) -> dict[str, Picture]:
    # Imported here: it takes longer than all the rest of a command's start.
    import matplotlib

    pictures: dict[str, Picture] = {}
    # From the defaults, so that a user's own matplotlibrc changes nothing.
    with matplotlib.rc_context(), warnings.catch_warnings():
        # Names may have letters that the font lacks: a box stands for them.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        for name, draw in drawings.items():
            drawn = {size: _drawn(draw, results, *shape) for size, shape in _SIZES.items()}
            if drawn["wide"] is not None and drawn["narrow"] is not None:
                pictures[name] = Picture(drawn["wide"], drawn["narrow"])
    return pictures


def _drawn(
    draw: Callable[[Axes, Results], bool], results: Results, inches: tuple[float, float], dpi: int
) -> bytes | None:
    from matplotlib.figure import Figure

    # A figure of its own, not pyplot's: no window, no state kept between plots.
    figure = Figure(figsize=inches, layout="constrained", dpi=dpi)
    if not draw(figure.subplots(), results):
        return None
    picture = io.BytesIO()
    figure.savefig(picture, format="png", metadata={"Software": None})
    return picture.getvalue()


def _loss_against_time(axes: Axes, results: Results) -> bool:
    # A unit that suits the shortest run: the axis becomes logarithmic where others take far longer.
    shortest = min((result.virtual_seconds or 0.0 for result in results.strategies), default=0.0)
    divisor, unit = (3600.0, "h") if shortest >= 7200 else (60.0, "min") if shortest >= 300 else (1.0, "s")
    axes.set_title("Loss against virtual time")
    return _draw_losses(axes, results, "virtual_seconds", divisor, f"virtual time, {unit}")


def _loss_against_steps(axes: Axes, results: Results) -> bool:
    axes.set_title("Loss against steps")
    return _draw_losses(axes, results, "step", 1.0, "steps")


def _loss_against_bytes(axes: Axes, results: Results) -> bool:
    workers = results.settings.get("workers")
    count = workers.get("count", 1) if isinstance(workers, dict) else 1
    axes.set_title("Loss against bytes sent")
    return _draw_losses(axes, results, "bytes_sent", 1e6 * (count or 1), "bytes sent per worker, MB")


def _draw_losses(axes: Axes, results: Results, column: str, divisor: float, label: str) -> bool:
    """A line a strategy over `column`; False where there is nothing to draw."""
    ends: list[float] = []
    for position, result in enumerate(results.strategies):
        curve = _curve(result, column, divisor)
        if len(curve) < 2 or curve[-1].place <= 0:
            continue
        ends.append(curve[-1].place)
        state = " (failed)" if result.error is not None else " (incomplete)" if result.incomplete else ""
        style = _line(position, len(curve))
        places = [point.place for point in curve]
        axes.plot(places, [point.loss for point in curve], label=visible(result.name, 30) + state, **style)
        if len(result.runs) > 1:
            least, most = [point.least for point in curve], [point.most for point in curve]
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
            fontsize=9,
        )
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:g}"[-1] in "25" else "")
    axes.set_ylabel("loss of the judged model")
    axes.legend(loc="best", fontsize=9)
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


class _Point(NamedTuple):
    """One step of a curve: means over seeds of where it is and of the loss, and the loss's range."""

    place: float
    loss: float
    least: float
    most: float


def _curve(result: StrategyResult, column: str, divisor: float) -> list[_Point]:
    """Loss by step over a column, for the steps that all runs have."""
    runs = []
    for run in result.runs:
        places = run.at_steps(column)
        runs.append({step: (places[step] / divisor, loss) for step, loss in run.losses if step in places})
    curve = []
    for step in sorted(set(runs[0]).intersection(*runs[1:])) if runs else []:
        steps = [run[step] for run in runs]
        losses = [loss for _, loss in steps]
        place = sum(place for place, _ in steps) / len(steps)
        curve.append(_Point(place, sum(losses) / len(losses), min(losses), max(losses)))
    return curve


def _line(position: int, num_points: int) -> dict[str, Any]:
    return {
        "color": _COLOURS[position % len(_COLOURS)],
        "marker": _MARKERS[position % len(_MARKERS)],
        "markersize": 4.0,
        "markevery": max(1, num_points // 20),
        "linewidth": 1.8,
    }


def _where_the_time_went(axes: Axes, results: Results) -> bool:
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
            fontsize=9,
            bbox={"boxstyle": "square,pad=0.1", "color": "white"},
        )
    axes.set_xlim(0, longest * 1.28)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_title("Where the time went", pad=24)
    axes.set_xlabel("virtual seconds of a worker")
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 0.99), ncols=3, fontsize=9)
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
