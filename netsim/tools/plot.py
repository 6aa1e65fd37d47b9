"""`netsim plot`: a picture of a topology, and of how its links are used."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from netsim.face.flows import read_flows, time_flows
from netsim.files.errors import InputError, NetsimError
from netsim.files.units import format_bits_per_second
from netsim.network.recorder import Recorder
from netsim.tools.picture import HOST, INK, PLACE, Sketch, draw_matrix, draw_sketch
from netsim.topology.protocol import Protocol
from netsim.topology.topology import Topology

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from netsim.topology.topology import FloatArray

__all__ = ["command", "draw", "mean_use"]

_FORMATS = (".png", ".svg", ".pdf")
_SKETCH_HEIGHT = 6.2  # inches
_MOST_ROWS = 24  # links whose use is shown
_COLUMNS = 480  # instants of the picture of use
_STYLE: dict[Any, Any] = {
    "font.size": 9.0,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlesize": 10.5,
    "figure.dpi": 144,
    # Names come from users: no formula is read out of them.
    "text.parse_math": False,
}


@click.command("plot")
@click.argument("topology", metavar="TOPOLOGY.yaml")
@click.option(
    "--flows", type=click.Path(path_type=Path), metavar="FLOWS.csv", help="Show how these use the links."
)
@click.option("--protocol", metavar="NAME", help="ideal, linux-tcp or gloo; default: what the topology says.")
@click.option(
    "--out", type=click.Path(path_type=Path), metavar="FILE.png", help="Also .svg, .pdf [NAME.png]."
)
def command(topology: str, flows: Path | None, protocol: str | None, out: Path | None) -> None:
    """Draw TOPOLOGY: its regions, and its links with bandwidth and one-way latency.

    With FLOWS.csv, as `netsim flows` takes it, the use of the links over time stands below. The last line
    printed is the file's path.
    """
    try:
        network = Topology.load(topology)
        path = out if out is not None else Path(f"{Path(topology).stem}.png")
        if path.suffix.lower() not in _FORMATS:
            raise InputError(f"--out {path}: expected a name that ends in {', '.join(_FORMATS)}")
        recorder = _recorded(network, flows, protocol) if flows is not None else None
        _save(draw(network, recorder), path)
    except NetsimError as error:
        raise click.ClickException(str(error)) from None
    click.echo(path)


def _recorded(topology: Topology, flows: Path, protocol: str | None) -> Recorder:
    recorder = Recorder()
    parsed = Protocol.parse(topology.protocol if protocol is None else protocol)
    time_flows(topology, read_flows(flows, topology).flows, parsed, recorder=recorder)
    return recorder


def _save(figure: Figure, path: Path) -> None:
    """Write a picture that is there as a whole or not at all."""
    import matplotlib

    partial = path.with_name(f".{path.stem}.{os.getpid()}.tmp{path.suffix}")
    # Without dates, and with ids that are not random, equal pictures are equal files.
    undated = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}, ".png": {"Software": None}}
    try:
        with matplotlib.rc_context({"svg.hashsalt": "netsim"}):
            figure.savefig(partial, metadata=undated[path.suffix.lower()])
        partial.replace(path)
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror}") from None
    finally:
        partial.unlink(missing_ok=True)


def draw(topology: Topology, recorder: Recorder | None = None) -> Figure:
    """A picture of a topology, and of how its links were used if a recorder watched.

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
    used = _used_links(recorder) if recorder is not None else []
    # From the defaults, so that a user's own matplotlibrc changes nothing; a figure of its own, not pyplot's.
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        colours = ScalarMappable(LogNorm(min(rates) / 1.3, max(rates) * 1.3), "viridis_r")
        wide, below = sketch.is_crowded, 1.2 + 0.2 * len(used) if recorder is not None else 0.0
        figure = Figure(figsize=(13.5 if wide else 9.0, _SKETCH_HEIGHT + below), layout="constrained")
        upper, lower = _halves(figure, below) if below else (figure, None)
        panels = upper.subplots(1, 2 if wide else 1, squeeze=False)[0]
        draw_sketch(panels[0], sketch, colours)
        panels[0].set_title(topology.name)
        if wide:
            draw_matrix(panels[1], sketch, colours)
        _add_legend(panels[0], sketch)
        if len(set(rates)) > 1:
            bar = upper.colorbar(colours, ax=panels[0], location="bottom", shrink=0.6, aspect=40, pad=0.02)
            ticks = sorted({min(rates), float(np.sqrt(min(rates) * max(rates))), max(rates)})
            bar.set_ticks(ticks, labels=[format_bits_per_second(float(f"{tick:.3g}")) for tick in ticks])
            bar.minorticks_off()
        if lower is not None and recorder is not None:
            _draw_use(lower.subplots(), topology, recorder, used)
    return figure


def _add_legend(axes: Axes, sketch: Sketch) -> None:
    """What boxes and lines stand for."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    kinds = {place.is_router for place in sketch.places}
    entries: list[Any] = []
    if True in kinds:
        entries.append(Patch(facecolor=PLACE, edgecolor=INK, label="region or router"))
    if False in kinds:
        entries.append(Patch(facecolor=HOST, edgecolor=INK, label="host"))
    if sketch.wires:
        told = "link: thicker and darker is faster; half a line a direction, at its sender"
        entries.append(Line2D([], [], color=INK, linewidth=2.5, label=told))
    axes.legend(
        handles=entries, loc="upper center", bbox_to_anchor=(0.5, 0.0), ncols=3, frameon=False, fontsize=7.5
    )


def _halves(figure: Figure, below: float) -> tuple[Any, Any]:
    upper, lower = np.ravel(np.asarray(figure.subfigures(2, 1, height_ratios=[_SKETCH_HEIGHT, below])))
    return upper, lower


def _used_links(recorder: Recorder) -> list[int]:
    """The links that carried most, in order of index."""
    end = _end(recorder)
    bytes_of = {
        link: float(mean_use(use, np.array([0.0, end]))[0]) * end for link, use in recorder.link_use.items()
    }
    return sorted(sorted(bytes_of, key=lambda link: (-bytes_of[link], link))[:_MOST_ROWS])


def _end(recorder: Recorder) -> float:
    return max((use[-1][0] for use in recorder.link_use.values()), default=0.0) or 1.0


def mean_use(use: Sequence[tuple[float, float]], edges: FloatArray) -> FloatArray:
    """The mean of a piecewise constant rate between one instant of `edges` and the next.

    Args:
        use: (instant, rate from then on), ascending; zero before the first.
        edges: ascending instants in seconds; shape (n + 1,).

    Returns:
        In the unit of the rate; shape (n,).
    """
    instants, rates = np.array(use, dtype=np.float64).reshape(-1, 2).T
    total = np.concatenate([[0.0], np.cumsum(rates[:-1] * np.diff(instants))])
    at = np.searchsorted(instants, edges, side="right") - 1
    known = np.maximum(at, 0)
    sums = np.where(at < 0, 0.0, total[known] + rates[known] * (edges - instants[known]))
    means: FloatArray = np.diff(sums) / np.diff(edges)
    return means


def _mark_weather(axes: Axes, recorder: Recorder, links: Sequence[int], end: float) -> None:
    """Over the row of a link: red where it is down, a line where it carries less than at the start."""
    for row, link in enumerate(links):
        points = recorder.link_capacity.get(link, [])
        for (begin, rate), (until, _) in pairwise([*points, (end, 0.0)]):
            if rate == 0:
                axes.fill_between(
                    [begin, until], row - 0.5, row + 0.5, color="#c0392b", alpha=0.5, linewidth=0
                )
            elif rate != points[0][1]:
                share = min(rate / points[0][1], 1.0)
                axes.plot([begin, until], [row + 0.5 - share] * 2, color="#c0392b", linewidth=1.2)


def _draw_use(axes: Axes, topology: Topology, recorder: Recorder, links: Sequence[int]) -> None:
    """A row a link, dark where it is full."""
    end = _end(recorder)
    edges = np.linspace(0.0, end, _COLUMNS + 1)
    rows = [
        mean_use(recorder.link_use[link], edges) * 8 / topology.links[link].bits_per_second for link in links
    ]
    left_out = len(recorder.link_use) - len(links)
    axes.set_title("use of links" + (f" (the {len(links)} that carry most)" if left_out else ""))
    axes.set_xlabel("virtual seconds")
    if not rows:
        axes.text(0.5, 0.5, "nothing crossed a link", ha="center", va="center", transform=axes.transAxes)
        axes.set_yticks([])
        return
    image = axes.imshow(
        np.array(rows) * 100, aspect="auto", interpolation="nearest", cmap="Blues", vmin=0.0, vmax=100.0,
        extent=(0.0, end, len(rows) - 0.5, -0.5),
    )  # fmt: skip
    names = [f"{topology.links[link].source} \u2192 {topology.links[link].target}" for link in links]
    axes.set_yticks(range(len(links)), names, fontsize=7.5)
    axes.set_yticks(np.arange(len(links) - 1) + 0.5, minor=True)
    axes.grid(which="minor", axis="y", color="#ffffff", linewidth=2.0)
    axes.tick_params(which="both", axis="y", length=0)
    _mark_weather(axes, recorder, links, end)
    axes.figure.colorbar(image, ax=axes, pad=0.01, aspect=12, label="% of bandwidth")
