"""Plots of a comparison: loss against virtual time, loss against bytes, and where the time went."""

from __future__ import annotations

import io
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

from exogym_core.names import visible

if TYPE_CHECKING:
    from collections.abc import Callable

    from matplotlib.axes import Axes

    from exogym_core.results.report.results import Results, StrategyResult

__all__ = ["draw_plots"]

# Okabe and Ito's colours, told apart by all kinds of colour vision.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7F7F7F")
_MARKERS = "osD^vPX*"
_COMPUTING, _WAITING = "#0072B2", "#E69F00"
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
    "figure.dpi": 144,
    # Names come from users: no formula is read out of them.
    "text.parse_math": False,
}
_WIDE_RANGE = 12.0  # beyond this ratio between the strategies' ends, the axis is logarithmic


def draw_plots(results: Results) -> dict[str, bytes]:
    """PNG files by name; those about time only where there is virtual time."""
    # Imported here: it takes longer than all the rest of a command's start.
    import matplotlib
    from matplotlib.figure import Figure

    drawings: dict[str, Callable[[Axes, Results], bool]] = {
        "loss_against_time": _loss_against_time,
        "loss_against_bytes": _loss_against_bytes,
        "where_the_time_went": _where_the_time_went,
    }
    pictures: dict[str, bytes] = {}
    # From the defaults, so that a user's own matplotlibrc changes nothing.
    with matplotlib.rc_context(), warnings.catch_warnings():
        # Names may have letters that the font lacks: a box stands for them.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        for name, draw in drawings.items():
            # A figure of its own, not pyplot's: no window, no state kept between plots.
            figure = Figure(figsize=(8.0, 4.5), layout="constrained")
            if draw(figure.subplots(), results):
                picture = io.BytesIO()
                figure.savefig(picture, format="png", metadata={"Software": None})
                pictures[name] = picture.getvalue()
    return pictures


def _loss_against_time(axes: Axes, results: Results) -> bool:
    # A unit that suits the shortest run: the axis becomes logarithmic where others take far longer.
    shortest = min((result.virtual_seconds or 0.0 for result in results.strategies), default=0.0)
    divisor, unit = (3600.0, "h") if shortest >= 7200 else (60.0, "min") if shortest >= 300 else (1.0, "s")
    drawn = _draw_losses(axes, results, "virtual_seconds", divisor)
    axes.set_title("Loss against virtual time")
    axes.set_xlabel(f"virtual time ({unit})")
    return drawn


def _loss_against_bytes(axes: Axes, results: Results) -> bool:
    workers = results.settings.get("workers")
    count = workers.get("count", 1) if isinstance(workers, dict) else 1
    drawn = _draw_losses(axes, results, "bytes_sent", 1e6 * (count or 1))
    axes.set_title("Loss against bytes sent")
    axes.set_xlabel("bytes sent per worker (MB)")
    return drawn


def _draw_losses(axes: Axes, results: Results, column: str, divisor: float) -> bool:
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
    if max(ends) > _WIDE_RANGE * min(ends):
        # Linear up to a little before the first strategy's end, so that step 0 is still on the page.
        linear = min(ends) / 4
        axes.set_xscale("symlog", linthresh=linear, linscale=0.5)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}" if value == 0 or value >= linear else "")
    axes.set_xlim(left=0)
    if results.target_loss is not None:
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
    axes.legend(loc="best")
    return True


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
    known = [
        (result, result.virtual_seconds, result.compute_utilisation)
        for result in results.strategies
        if result.virtual_seconds and result.compute_utilisation is not None
    ]
    if not known:
        return False
    names = [visible(result.name, 30) for result, _, _ in known]
    computing = [seconds * share for _, seconds, share in known]
    waiting = [seconds * (1 - share) for _, seconds, share in known]
    axes.barh(names, computing, color=_COMPUTING, label="computing")
    axes.barh(names, waiting, left=computing, color=_WAITING, label="exposed communication")
    longest = max(seconds for _, seconds, _ in known)
    for row, (_, seconds, share) in enumerate(known):
        axes.annotate(
            f"{share:.1%} computing",
            (seconds, row),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            bbox={"boxstyle": "square,pad=0.1", "color": "white"},
        )
    axes.set_xlim(0, longest * 1.18)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_title("Where the time went")
    axes.set_xlabel("virtual time of a worker (s)")
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 0.99), ncols=2)
    return True
