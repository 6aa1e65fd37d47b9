"""Pictures: what they show, that nothing covers anything, and that they are the same each time."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from worlds import star_form

from netsim import Topology, shipped_topologies
from netsim.cli.plot import command, draw
from netsim.topology.sketch import Sketch

AT_EACH_COMMIT = ("home-tiers", "wan-4-regions")


def regions(count: int) -> Topology:
    names = [f"region-{number:02}" for number in range(count)]
    pairs = itertools.combinations(range(count), 2)
    return Topology.from_mapping(
        {
            "name": f"{count} regions",
            "regions": {name: {"hosts": 3, "nic": "1 Gbit/s", "latency": "50 us"} for name in names},
            "wan": [
                {
                    "between": [names[one], names[other]],
                    "bandwidth": f"{100 + 10 * one} Mbit/s",
                    "latency": f"{5 + 7 * abs(one - other)} ms",
                }
                for one, other in pairs
            ],
            "protocol": "ideal",
        }
    )


def drawn(figure: Any) -> Any:
    """The renderer that has drawn a figure."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return canvas.get_renderer()


def overlapping(figure: Any) -> list[tuple[str, str]]:
    """Pairs of boxes with places in them that cover each other."""
    renderer = drawn(figure)
    axes = figure.subfigs[0].axes[0] if figure.subfigs else figure.axes[0]
    boxes = [text for text in axes.texts if text.get_bbox_patch() and text.get_zorder() == 4]
    extents = [(text.get_text(), text.get_bbox_patch().get_window_extent(renderer)) for text in boxes]
    return [
        (one, other)
        for (one, box), (other, its_box) in itertools.combinations(extents, 2)
        if box.overlaps(its_box)
    ]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in AT_EACH_COMMIT else [pytest.mark.thorough])
        for name in sorted(shipped_topologies())
    ],
)
def test_every_shipped_topology_has_a_picture_without_covered_places(name: str) -> None:
    figure = draw(Topology.load(name))
    assert overlapping(figure) == []


@pytest.mark.parametrize("count", [1, 3, 12])
def test_up_to_twelve_regions_are_legible(count: int) -> None:
    topology = regions(count)
    figure = draw(topology)
    assert overlapping(figure) == []
    shown = " ".join(text.get_text() for axes in figure.axes for text in axes.texts)
    for link in topology.links:
        if "." not in link.source + link.target:
            assert f"{round(link.latency_seconds * 1000)}" in shown
            assert f"{round(link.bits_per_second / 1e6)}" in shown


def test_hosts_behind_the_router_of_their_region_are_drawn_with_it() -> None:
    sketch = Sketch.of(regions(2))
    assert [(place.name, place.details) for place in sketch.places] == [
        ("region-00", "3 hosts, 1 Gbit/s each"),
        ("region-01", "3 hosts, 1 Gbit/s each"),
    ]
    assert [wire.label for wire in sketch.wires] == ["100 Mbit/s\n12 ms"]


def test_many_hosts_that_are_alike_are_drawn_as_one() -> None:
    form = star_form(40, "1 Gbit/s", "1 ms")
    form["links"][7]["bandwidth"] = "2 Gbit/s"
    sketch = Sketch.of(Topology.from_mapping(form))
    names = [(place.name, place.details) for place in sketch.places]
    assert names == [("switch", ""), ("h0 ... h39", "39 hosts"), ("h7", "")]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(command, [*arguments])


@pytest.mark.parametrize("suffix", ["png", "pdf"])
def test_the_command_writes_equal_files_and_tells_where(tmp_path: Path, suffix: str) -> None:
    files = [tmp_path / f"{name}.{suffix}" for name in ("one", "two")]
    for file in files:
        made = run("wan-4-regions", "--out", str(file))
        assert made.exit_code == 0, made.output
        assert made.output.splitlines()[-1] == str(file)
    assert files[0].read_bytes() == files[1].read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"one.{suffix}", f"two.{suffix}"]


def home_line() -> Topology:
    return Topology.from_mapping(
        {
            "name": "home",
            "source": "test",
            "hosts": ["a", "b"],
            "links": [{"between": ["a", "b"], "up": "10 Mbit/s", "down": "1 Gbit/s", "latency": "5 ms"}],
            "protocol": "ideal",
        }
    )


def test_a_line_that_is_slow_one_way_shows_both_and_a_legend_says_how() -> None:
    """It used to be drawn at one of its rates, with nothing that told what colours and boxes mean."""
    figure = draw(home_line())
    first, second = figure.axes[0].lines
    assert first.get_linewidth() < second.get_linewidth()
    assert first.get_color() != second.get_color()
    labels = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert "host" in labels
    assert any("half a line a direction" in text for text in labels)
    bars = [label.get_text() for axes in figure.axes[1:] for label in axes.get_xticklabels()]
    assert bars[0] == "10 Mbit/s"
    assert bars[-1] == "1 Gbit/s"
