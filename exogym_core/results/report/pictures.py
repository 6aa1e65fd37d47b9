"""Plots as files: PNG for a page at two widths, PDF, SVG and PNG for papers; equal results give equal files."""

from __future__ import annotations

import io
import warnings
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from exogym_core.results.report.plots import DRAWINGS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from matplotlib.axes import Axes

    from exogym_core.results.report.plots import Shown

__all__ = ["FORMATS", "OF_ONE_RUN", "OF_SEVERAL", "Picture", "draw_figures", "draw_pictures"]

FORMATS = ("pdf", "svg", "png")
"""Of figures for papers."""

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
# Letters that a printer has as letters, no picture ids that are drawn at random.
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
    """One plot as PNG files: for a page, and for a telephone's width, where the same letters fill more of it."""

    wide: bytes
    narrow: bytes


def draw_pictures(shown: Shown, names: Iterable[str]) -> dict[str, Picture]:
    """Pictures by name; those about time only where there is virtual time."""
    pictures: dict[str, Picture] = {}
    with _style(_STYLE):
        for name in names:
            wide = _drawn(DRAWINGS[name], shown, *_SIZES["wide"])
            narrow = _drawn(DRAWINGS[name], shown, *_SIZES["narrow"]) if wide is not None else None
            if wide is not None and narrow is not None:
                pictures[name] = Picture(wide, narrow)
    return pictures


def draw_figures(shown: Shown, names: Iterable[str], form: str) -> dict[str, bytes]:
    """Files for a paper by name: as wide as one of two columns, without a title, as the caption has it.

    Args:
        shown: what.
        names: which pictures; those with nothing to show are left out.
        form: `pdf`, `svg` or `png`.
    """
    with _style(_STYLE | _PAPER_STYLE):
        drawn = {
            name: _drawn(DRAWINGS[name], shown, *_PAPER_SIZE, form=form, is_titled=False) for name in names
        }
    return {name: figure for name, figure in drawn.items() if figure is not None}


@contextmanager
def _style(style: dict[Any, Any]) -> Iterator[None]:
    # Imported here: it takes longer than all the rest of a command's start.
    import matplotlib

    # From the defaults, so that a user's own matplotlibrc changes nothing.
    with matplotlib.rc_context(), warnings.catch_warnings():
        # Names may have letters that the font lacks: a box stands for them.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(style)
        yield


def _drawn(
    draw: Callable[[Axes, Shown], bool],
    shown: Shown,
    inches: tuple[float, float],
    dpi: int,
    *,
    form: str = "png",
    is_titled: bool = True,
) -> bytes | None:
    from matplotlib.figure import Figure

    # As high as its names are: a legend beside the curves has a line each.
    room = _INCHES_ELSE + _INCHES_A_NAME * len(shown.results.strategies)
    inches = (inches[0], max(inches[1], room))
    # A figure of its own, not pyplot's: no window, no state kept between plots.
    figure = Figure(figsize=inches, layout="constrained", dpi=dpi)
    axes = figure.subplots()
    if not draw(axes, shown):
        return None
    if not is_titled:
        axes.set_title("", loc="left")
    picture = io.BytesIO()
    figure.savefig(picture, format=form, metadata=_UNDATED[form])
    return picture.getvalue()
