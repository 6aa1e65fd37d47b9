"""`netsim plot`: a picture of a topology."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from netsim.cli.terminal import OneLineCommand, given, takes
from netsim.errors import InputError
from netsim.files.plain_files import output_file
from netsim.topology.sketch import Sketch
from netsim.topology.topology import Topology
from netsim.units import format_bits_per_second, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.figure import Figure

    from netsim.topology.topology import FloatArray

__all__ = ["command", "draw"]

_FORMATS = (".png", ".svg", ".pdf")
_SKETCH_HEIGHT = 6.2  # inches
_BOX_WIDTH, _LINE_HEIGHT = 0.32, 0.055  # of a label; the picture is two wide and two high
_BESIDE = 0.1  # farther from an upright line, since labels are wide
_ALONG = (0.5, 0.4, 0.6, 0.32, 0.68, 0.25, 0.75)  # where on its link a label may stand
_INK, _PAPER = "#222222", "#ffffff"
_PLACE, _HOST = "#cfe3f2", "#fbe3c0"
_STYLE: dict[Any, Any] = {
    "font.size": 9.0,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlesize": 10.5,
    "figure.dpi": 144,
    # Names come from users: no formula is read out of them.
    "text.parse_math": False,
}


@click.command("plot", cls=OneLineCommand)
@takes()
def command(
    topology: str = given(is_argument=True, required=True, metavar="TOPOLOGY.yaml"),
    out: Path | None = given(metavar="FILE.png"),
) -> None:
    """Draw TOPOLOGY: its regions, and its links with bandwidth and one-way latency.

    The line printed is the file's path.

    Args:
        out: Also .svg, .pdf [NAME.png].
    """
    network = Topology.load(topology)
    path = out if out is not None else Path(f"{Path(topology).stem}.png")
    if path.suffix.lower() not in _FORMATS:
        raise InputError(f"--out {path}: expected a name that ends in {', '.join(_FORMATS)}")
    _save(draw(network), path)
    click.echo(path)


def _save(figure: Figure, path: Path) -> None:
    """Write a picture whole, or not at all."""
    import matplotlib

    # Without dates, and with ids that are not random, equal pictures are equal files.
    form = path.suffix.lower()[1:]
    undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {"Software": None}}
    with matplotlib.rc_context({"svg.hashsalt": "netsim"}), output_file(path) as file:
        figure.savefig(file, format=form, metadata=undated[form])


def draw(topology: Topology) -> Figure:
    """Figure of a topology's hosts, routers and links, coloured by rate.

    Returns:
        A matplotlib figure: `figure.savefig("picture.png")`.
    """
    # Imported here: it takes longer than all the rest of a command's start.
    import matplotlib
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    sketch = Sketch.of(topology)
    rates = [rate for wire in sketch.wires for rate in wire.rates] or [1.0]
    # From the defaults, so that a user's own matplotlibrc changes nothing; a figure of its own, not pyplot's.
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        colours = ScalarMappable(LogNorm(min(rates) / 1.3, max(rates) * 1.3), "viridis_r")
        wide = sketch.is_crowded
        figure = Figure(figsize=(13.5 if wide else 9.0, _SKETCH_HEIGHT), layout="constrained")
        panels = figure.subplots(1, 2 if wide else 1, squeeze=False)[0]
        _draw_sketch(panels[0], sketch, colours)
        panels[0].set_title(topology.name)
        if wide:
            _draw_matrix(panels[1], sketch, colours)
        _add_legend(panels[0], sketch)
        if len(set(rates)) > 1:
            bar = figure.colorbar(colours, ax=panels[0], location="bottom", shrink=0.6, aspect=40, pad=0.02)
            ticks = sorted({min(rates), float(np.sqrt(min(rates) * max(rates))), max(rates)})
            bar.set_ticks(ticks, labels=[format_bits_per_second(float(f"{tick:.3g}")) for tick in ticks])
            bar.minorticks_off()
    return figure


def _draw_sketch(axes: Axes, sketch: Sketch, colours: ScalarMappable) -> None:
    """Draw places and wires; what wires carry is written on them unless there are too many.

    Args:
        axes: where; it is taken over as a whole.
        sketch: what.
        colours: of wires, by bits per second.
    """
    spots = sketch.positions()
    axes.set_axis_off()
    axes.set_xlim(-1.25, 1.25)
    axes.set_ylim(-1.2, 1.2)
    fastest = max((rate for wire in sketch.wires for rate in wire.rates), default=1.0)
    taken = [(float(x), float(y), 2.3) for x, y in spots]
    for wire in sorted(sketch.wires, key=lambda wire: max(wire.rates)):
        # Each direction is the half at the place that it leaves: a line that is slow one way shows both.
        middle = (spots[wire.one] + spots[wire.other]) / 2
        for end, bits_per_second in zip((wire.one, wire.other), wire.rates, strict=True):
            width = 1.0 + 3.5 * max(0.0, 1 + np.log10(bits_per_second / fastest) / 2)
            half = np.stack([spots[end], middle])
            shade = _shade(colours, bits_per_second)
            axes.plot(*half.T, color=shade, linewidth=width, zorder=1, alpha=0.9, solid_capstyle="butt")
    if not sketch.is_crowded:
        for wire in sketch.wires:
            num_lines = wire.label.count("\n") + 1
            # In a star a label next to a line could belong to several: there it is on its line.
            is_beside = not wire.leads_to_host
            x, y = _free_spot(spots[wire.one], spots[wire.other], num_lines, taken, is_beside=is_beside)
            axes.text(
                x, y, wire.label, fontsize=7.5, ha="center", va="center", color=_INK, zorder=3, linespacing=1.1,
                bbox={"boxstyle": "round,pad=0.18", "facecolor": _PAPER, "edgecolor": "none", "alpha": 0.9},
            )  # fmt: skip
    for place, (x, y) in zip(sketch.places, spots, strict=True):
        text = f"{place.name}\n{place.details}" if place.details else place.name
        if sketch.is_crowded:
            text = text.replace(", ", "\n")  # narrower
        axes.text(
            x, y, text, fontsize=7.0 if sketch.is_crowded else 8.5, ha="center", va="center", color=_INK, zorder=4,
            bbox={
                "boxstyle": "round,pad=0.4",
                "facecolor": _PLACE if place.is_router else _HOST,
                "edgecolor": _INK,
                "linewidth": 0.8,
            },
        )  # fmt: skip


def _free_spot(
    one: FloatArray,
    other: FloatArray,
    num_lines: float,
    taken: list[tuple[float, float, float]],
    *,
    is_beside: bool,
) -> tuple[float, float]:
    """Find the spot along a wire that covers least of the labels in `taken` (x, y, lines), and add it to them."""

    def covered(x: float, y: float) -> float:
        total = 0.0
        for at_x, at_y, lines in taken:
            wide = _BOX_WIDTH - abs(x - at_x)
            high = _LINE_HEIGHT * (num_lines + lines) / 2 - abs(y - at_y)
            total += max(wide, 0.0) * max(high, 0.0)
        return total

    # Beside the line, which stays visible, above it where it is level.
    length = max(float(np.hypot(*(other - one))), 1e-9)
    aside = np.array([-(other - one)[1], (other - one)[0]]) / length
    aside *= np.where(aside[1] < 0, -1, 1) * (
        0.05 + _BESIDE * abs(aside[0]) + _LINE_HEIGHT * (num_lines - 1) / 2
    )
    spots = [
        tuple((one + (other - one) * along + side * aside).tolist())
        for side in ((1, -1) if is_beside else (0,))
        for along in _ALONG
    ]
    best = min(spots, key=lambda spot: round(covered(*spot), 6))
    taken.append((best[0], best[1], num_lines))
    return best


def _draw_matrix(axes: Axes, sketch: Sketch, colours: ScalarMappable) -> None:
    """Bandwidth above the diagonal, one-way latency below, by place; empty where there is no direct wire."""
    ends = sorted({end for wire in sketch.wires for end in (wire.one, wire.other)})
    row = {end: position for position, end in enumerate(ends)}
    names = [sketch.places[end].name for end in ends]
    size = len(ends)
    font = float(np.clip(80 / size, 4.0, 7.5))
    axes.set_xlim(-0.5, size - 0.5)
    axes.set_ylim(size - 0.5, -0.5)
    for wire in sketch.wires:
        low, high = sorted((row[wire.one], row[wire.other]))
        shade = _shade(colours, wire.there.bits_per_second)
        axes.fill_between([high - 0.5, high + 0.5], low - 0.5, low + 0.5, color=shade, linewidth=0)
        is_light = 0.3 * shade[0] + 0.59 * shade[1] + 0.11 * shade[2] > 0.5
        rate, latency = wire.there.bits_per_second, wire.there.latency_seconds
        above = (high, low, format_bits_per_second(rate), _INK if is_light else _PAPER)
        for x, y, text, ink in (above, (low, high, format_seconds(latency), _INK)):
            short = text.replace(" ", "\n", 1)
            axes.text(x, y, short, fontsize=font, ha="center", va="center", color=ink, linespacing=0.95)
    axes.plot([-0.5, size - 0.5], [-0.5, size - 0.5], color="#bbbbbb", linewidth=0.8)
    axes.set_xticks(range(size), names, rotation=45, ha="left", fontsize=7.5)
    axes.set_yticks(range(size), names, fontsize=7.5)
    axes.tick_params(top=True, labeltop=True, bottom=False, labelbottom=False, length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    axes.set_xlabel("above the diagonal: bandwidth; below: one-way latency", fontsize=8)


def _shade(colours: ScalarMappable, bits_per_second: float) -> tuple[float, ...]:
    return tuple(colours.to_rgba(np.array([bits_per_second]))[0].tolist())


def _add_legend(axes: Axes, sketch: Sketch) -> None:
    """Legend of boxes and links."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    kinds = {place.is_router for place in sketch.places}
    boxes = ((True, _PLACE, "region or router"), (False, _HOST, "host"))
    entries: list[Any] = [
        Patch(facecolor=colour, edgecolor=_INK, label=name) for kind, colour, name in boxes if kind in kinds
    ]
    if sketch.wires:
        text = "link: thicker and darker is faster; half a line a direction, at its sender"
        entries.append(Line2D([], [], color=_INK, linewidth=2.5, label=text))
    axes.legend(
        handles=entries, loc="upper center", bbox_to_anchor=(0.5, 0.0), ncols=3, frameon=False, fontsize=7.5
    )
