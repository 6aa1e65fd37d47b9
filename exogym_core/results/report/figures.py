"""Figures of a comparison: PNG at two widths for a page; PDF, SVG and PNG for papers; equal files for equal results."""

from __future__ import annotations

import io
import math
import textwrap
import warnings
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from exogym_core.names import visible
from exogym_core.results.report.curves import COLOURS, curve, rates
from exogym_core.results.report.network import WeatherStrips, draw_weather, low_spans
from netsim.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from exogym_core.results.reading import Results, StrategyResult


__all__ = [
    "DRAWINGS",
    "FORMATS",
    "OF_ONE_RUN",
    "OF_SEVERAL",
    "Picture",
    "Shown",
    "draw_figures",
    "draw_loss",
    "draw_pictures",
    "log_ticks",
]

_MARKERS = "osD^vPX*"
_PARTS = (("computing", "#0072B2"), ("network", "#E69F00"), ("waiting", "#BBBBBB"))
_WIDE_RANGE = 12.0  # beyond this ratio between the strategies' ends, the axis is logarithmic
_MOST_TICKS = 8
_MOST_ABSENCES = 200


class Shown(NamedTuple):
    """Input of drawings: results, and the weather of their network."""

    results: Results
    weather: WeatherStrips = WeatherStrips((), 0.0)


def _loss_against_time(axes: Axes, shown: Shown) -> bool:
    results = shown.results
    # A unit that suits the shortest run: the axis becomes logarithmic where others take far longer.
    shortest = min((result.virtual_seconds or 0.0 for result in results.strategies), default=0.0)
    divisor, unit = (3600.0, "h") if shortest >= 7200 else (60.0, "min") if shortest >= 300 else (1.0, "s")
    if not _draw_losses(axes, shown, results.clock, "seconds", divisor, f"{results.clock}, {unit}"):
        return False
    _shade_weather(axes, shown.weather, divisor)
    _shade_absences(axes, results, divisor)
    return True


def _shade_weather(axes: Axes, weather: WeatherStrips, divisor: float) -> None:
    """Shade the time in which a link or host was down or slow, the darker the less capacity was left."""
    limits = axes.get_xlim()
    for begin, end, share in low_spans(weather):
        alpha = 0.22 * (1 - share)
        axes.axvspan(begin / divisor, end / divisor, color="#555555", alpha=alpha, linewidth=0, zorder=0)
    axes.set_xlim(limits)


def _shade_absences(axes: Axes, results: Results, divisor: float) -> None:
    """Mark absences of ranks at the foot in a strategy's colour; of its first seed."""
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


def _draw_losses(axes: Axes, shown: Shown, against: str, place: str, divisor: float, label: str) -> bool:
    """A line a strategy over a place of its points; False where there is nothing to draw."""
    results, ends, values = shown.results, list[float](), list[float]()
    axes.set_title(f"Loss against {against}")
    for position, result in enumerate(results.strategies):
        points = [point for point in curve(result) if getattr(point, place) is not None]
        known = [point.value for point in points if math.isfinite(point.value)]
        if len(points) < 2 or getattr(points[-1], place) <= 0 or not known:
            continue
        values += known
        places = [getattr(point, place) / divisor for point in points]
        ends.append(places[-1])
        style = _line(position, len(points))
        axes.plot(
            places, [point.value for point in points], label=_wrapped(result.name + result.state), **style
        )
        if len(result.runs) > 1:
            least, most = [point.least for point in points], [point.most for point in points]
            axes.fill_between(places, least, most, color=style["color"], alpha=0.18, linewidth=0)
    if not ends:
        return False
    _set_places(axes, label, ends)
    is_logarithmic = min(values) > 0
    if results.target_loss is not None and (results.target_loss > 0 or not is_logarithmic):
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
    if is_logarithmic:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_minor_formatter(lambda value, _: _minor_label(value, *axes.get_ylim()))
    axes.set_ylabel("loss of the judged model")
    _draw_legend(axes)
    return True


def _minor_label(value: float, low: float, high: float) -> str:
    """Label of a minor tick: on a long axis only where it begins with 2 or 5."""
    text = f"{value:g}"
    return text if high < 5 * low or text[-1] in "25" else ""


def _wrapped(name: str, width: int = 40) -> str:
    """A name on lines of at most `width` characters."""
    return textwrap.fill(visible(name), width)


def _draw_legend(axes: Axes) -> None:
    """A legend below the axes, in as many columns as its longest name leaves room for."""
    import matplotlib
    from matplotlib.figure import Figure

    handles, labels = axes.get_legend_handles_labels()
    figure = axes.figure
    assert isinstance(figure, Figure)
    points = float(matplotlib.rcParams["legend.fontsize"])
    lines = [label.split("\n") for label in labels]
    column_inches = (max(len(line) for each in lines for line in each) * 0.6 + 5) * points / 72
    columns = max(1, min(len(labels), int(figure.get_figwidth() / column_inches)))
    # Room for the label next to the axes, that below them, and the legend's lines.
    text_inches = float(matplotlib.rcParams["font.size"]) / 72
    label_inches = (0.6 * len(axes.get_ylabel()) + 5) * text_inches
    legend_inches = 1.5 * points / 72 * -(-sum(map(len, lines)) // columns)
    figure.set_figheight(max(figure.get_figheight(), label_inches + legend_inches))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns)


def _set_places(axes: Axes, label: str, ends: Sequence[float]) -> None:
    """Set up the axis of places, at whose `ends` strategies end.

    Where these lie far apart, it is linear up to a little before the first, then logarithmic, as its label says.
    """
    axes.set_xlabel(label)
    if max(ends) > _WIDE_RANGE * min(ends):
        linear = float(f"{min(ends) / 4:.1g}")
        axes.set_xscale("symlog", linthresh=linear, linscale=0.5)
        ticks = log_ticks(linear, max(ends))
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.set_xticks([], minor=True)
        axes.set_xlabel(f"{label}\n(logarithmic from {linear:g} on)")
    axes.set_xlim(left=0)


def log_ticks(linear: float, end: float) -> list[float]:
    """Ticks of an axis: 0, and a few round numbers from the start of its logarithmic part to its end.

    >>> log_ticks(2.0, 320.0)
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
    """A line a strategy: bits per second that all workers sent in the first seed's run."""
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
    for position, result, points in drawn:
        axes.step(
            [0.0, *(end for end, _ in points)],
            [points[0][1] / scale, *(rate / scale for _, rate in points)],
            label=_wrapped(result.name),
            color=COLOURS[position % len(COLOURS)],
        )
    _set_places(axes, f"{shown.results.clock}, s", [points[-1][0] for _, _, points in drawn])
    axes.set_ylim(bottom=0)
    axes.set_title("Use of the network")
    axes.set_ylabel(f"sent by all workers, {unit}")
    _draw_legend(axes)
    _shade_weather(axes, shown.weather, 1.0)
    return True


def _where_the_time_went(axes: Axes, shown: Shown) -> bool:
    results = shown.results
    known = [(result, parts) for result in results.strategies if (parts := _parts(result)) is not None]
    if not known:
        return False
    rows = range(len(known))
    seconds = np.array([parts for _, parts in known])
    used = seconds.any(axis=0)
    lefts = np.cumsum(seconds, axis=1) - seconds
    for part in np.flatnonzero(used):
        name, colour = _PARTS[part]
        axes.barh(rows, seconds[:, part], left=lefts[:, part], color=colour, label=name)
    axes.set_yticks(rows, [_wrapped(result.name, 20) for result, _ in known])
    for row, total in enumerate(seconds.sum(axis=1)):
        shares = " / ".join(f"{share:.0%}" for share in seconds[row, used] / (total or 1.0))
        # Right of the axes, where the layout keeps room for it.
        axes.text(1.02, row, shares, transform=axes.get_yaxis_transform(), va="center", fontsize="small")
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_title("Where the time went", pad=24)
    axes.set_xlabel(f"{results.clock} of a worker, s")
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 0.99), ncols=3)
    return True


def _parts(result: StrategyResult) -> tuple[float, float, float] | None:
    """Seconds of computing, of the network and of waiting; without those of waiting, all of it is the network's."""
    seconds, share = result.virtual_seconds, result.compute_utilisation
    if not seconds:
        return None
    if result.computing_seconds is not None:
        return (result.computing_seconds, result.network_seconds or 0.0, result.waiting_seconds or 0.0)
    return None if share is None else (seconds * share, seconds * (1 - share), 0.0)


DRAWINGS: Mapping[str, Callable[[Axes, Shown], bool]] = {
    "loss_against_time": _loss_against_time,
    "loss_against_steps": lambda axes, shown: _draw_losses(axes, shown, "steps", "step", 1.0, "steps"),
    "loss_against_bytes": lambda axes, shown: _draw_losses(
        axes, shown, "bytes sent", "num_bytes", 1e6, "bytes sent per worker, MB"
    ),
    "where_the_time_went": _where_the_time_went,
    "use_of_the_network": _use_of_the_network,
    "what_the_network_did": lambda axes, shown: draw_weather(axes, shown.weather),
}
"""Functions that draw on axes, by name; they return False where there is nothing to draw."""


FORMATS = ("pdf", "svg", "png")
"""File formats of figures for papers."""

OF_ONE_RUN = (
    *("loss_against_time", "loss_against_bytes", "where_the_time_went", "use_of_the_network"),
    "what_the_network_did",
)
"""Pictures on the page of a run."""

OF_SEVERAL = ("loss_against_time", "loss_against_steps", "loss_against_bytes")
"""Pictures on the page of several runs."""

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
    "lines.linewidth": 1.8,
    "lines.markersize": 4.0,
    "legend.fontsize": 9.0,
    # Names come from users: no formula is read out of them.
    "text.parse_math": False,
}
# Text as text, and the same element ids each time.
_PAPER_STYLE: dict[Any, Any] = {
    "font.size": 8.0,
    "legend.fontsize": 7.0,
    "lines.linewidth": 1.1,
    "lines.markersize": 2.6,
    "pdf.fonttype": 42,
    "svg.fonttype": "none",
    "svg.hashsalt": "netgym",
}
_SIZES = {"wide": ((8.0, 4.5), 144), "narrow": ((4.2, 4.4), 180)}  # inches, dots an inch
_INCHES_A_NAME, _INCHES_ELSE = 0.19, 1.2
_PAPER_SIZE = ((3.4, 2.55), 300)  # a column of two
_UNDATED: dict[str, Any] = {
    "png": {"Software": None},
    "svg": {"Date": None},
    "pdf": {"CreationDate": None, "Producer": None},
}


@dataclass(frozen=True)
class Picture:
    """A plot as PNG files, one for a page and one for a telephone's width."""

    wide: bytes
    narrow: bytes


def draw_pictures(
    shown: Shown, names: Sequence[str], each: Callable[..., Iterable[Picture | None]] = map
) -> dict[str, Picture]:
    """Pictures by name; those about time only where there is virtual time.

    Args:
        shown: results and weather.
        names: of the pictures.
        each: draws each, in order, and may do so side by side.
    """
    with _style(_STYLE):
        drawn = each(partial(_picture, shown), names)
        return {name: picture for name, picture in zip(names, drawn, strict=True) if picture is not None}


def _picture(shown: Shown, name: str) -> Picture | None:
    """A picture; None where there is nothing to draw."""
    drawn = [_figure(name, shown, *size) for size in _SIZES.values()]
    files = [_file(figure, "png") for figure in drawn if figure is not None]
    return Picture(*files) if files else None


def draw_figures(shown: Shown, names: Iterable[str], form: str) -> dict[str, bytes]:
    """Files for a paper by name: as wide as one of two columns, without a title, as the caption has it.

    Args:
        shown: results and weather.
        names: of the pictures; those with nothing to show are left out.
        form: `pdf`, `svg` or `png`.
    """
    files = {}
    with _style(_STYLE | _PAPER_STYLE):
        for name in names:
            if (figure := _figure(name, shown, *_PAPER_SIZE)) is not None:
                figure.axes[0].set_title("", loc="left")
                files[name] = _file(figure, form)
    return files


def draw_loss(shown: Shown) -> Figure:
    """Loss against virtual time as a figure to show or to change; against steps where there is no time.

    Raises:
        InputError: no strategy was evaluated twice.
    """
    with _style(_STYLE):
        for name in ("loss_against_time", "loss_against_steps"):
            if (figure := _figure(name, shown, *_SIZES["wide"])) is not None:
                # Notebooks show what has this method; figures of pyplot only register themselves with them.
                figure._repr_png_ = partial(_png, figure)  # type: ignore[attr-defined]
                return figure
    raise InputError("plot: no strategy was evaluated twice: set evaluate.every to fewer steps")


@contextmanager
def _style(style: dict[Any, Any]) -> Iterator[None]:
    # Imported here: it takes longer than all the rest of a command's start.
    import matplotlib
    import matplotlib.figure  # before processes are forked to draw

    # From the defaults, so that a user's own matplotlibrc changes nothing.
    with matplotlib.rc_context(), warnings.catch_warnings():
        # Names may have letters that the font lacks: a box stands for them.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(style)
        yield


def _file(figure: Figure, form: str) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format=form, metadata=_UNDATED[form])
    return file.getvalue()


def _png(figure: Figure) -> bytes:
    with _style(_STYLE):
        return _file(figure, "png")


def _figure(name: str, shown: Shown, inches: tuple[float, float], dpi: int) -> Figure | None:
    """A drawing; None where there is nothing to draw."""
    from matplotlib.figure import Figure

    # As high as its names need: a legend has a line for each.
    room = _INCHES_ELSE + _INCHES_A_NAME * len(shown.results.strategies)
    inches = (inches[0], max(inches[1], room))
    # A figure of its own, not pyplot's: no window, no state kept between plots.
    figure = Figure(figsize=inches, layout="constrained", dpi=dpi)
    return figure if DRAWINGS[name](figure.subplots(), shown) else None
