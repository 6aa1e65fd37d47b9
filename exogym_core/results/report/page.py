"""One self-contained HTML page: nothing is loaded from elsewhere, no script runs, every name is escaped."""

from __future__ import annotations

import base64
import hashlib
from importlib import resources
from typing import TYPE_CHECKING, Any

from exogym_core.names import visible
from exogym_core.results.report.facts import head_facts, run_facts
from exogym_core.results.report.plots import draw_plots
from exogym_core.results.report.results import Results
from exogym_core.results.report.table import table_cells, table_headings
from exogym_core.results.report.verdict import verdict
from netsim.files.units import format_bits_per_second, format_seconds
from netsim.topology.topology import Topology

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from exogym_core.results.record import RunFolder
    from exogym_core.results.report.plots import Picture

__all__ = ["network_matrix", "render_page", "write_report"]

_CAPTIONS = {
    "loss_against_time": "Loss of the judged model against virtual time: when that model came to exist.",
    "loss_against_bytes": "Loss of the judged model against payload bytes that left a worker.",
    "where_the_time_went": (
        "Virtual time in which a worker computed, waited for the network, and waited for slower workers; means over "
        "workers. Shares in this order."
    ),
    "what_the_network_did": (
        "Links and hosts that changed while it ran, as a share of the stated bandwidth: outages, crashes, traces, "
        "events and drift. It is the same for all strategies. The traffic of others is not shown."
    ),
}
_MAX_PLACES = 24  # a larger matrix is not read by anyone


def write_report(folder: RunFolder) -> Path:
    """Draw the plots and write the page into a run folder, from what the folder holds; returns the page.

    Raises:
        InputError: a file of the run is missing or damaged.
        RecordError: a file cannot be written.
    """
    results = Results.load(folder)
    pictures = draw_plots(results)
    for name, picture in pictures.items():
        folder.write_text(f"plots/{name}.png", picture.wide)
    return folder.write_text("report.html", render_page(results, pictures))


def render_page(results: Results, pictures: Mapping[str, Picture]) -> str:
    """The page's HTML."""
    import jinja2

    assets = resources.files("exogym_core.results.report")
    style = assets.joinpath("page.css").read_text(encoding="utf-8")
    template = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    ).from_string(assets.joinpath("page.html").read_text(encoding="utf-8"))
    decision = verdict(results)
    return template.render(
        style=style,
        style_hash=base64.b64encode(hashlib.sha256(style.encode()).digest()).decode(),
        title=visible(results.settings.get("name", "run"), 80),
        facts=head_facts(results),
        verdict=decision.text,
        winner=decision.winner,
        incomplete=results.incomplete,
        headings=table_headings(results),
        several_seeds=len(results.seeds) > 1,
        rows=list(zip([result.name for result in results.strategies], table_cells(results), strict=True)),
        runs=run_facts(results),
        pictures=[
            (_caption(name, results), _encoded(picture.wide), _encoded(picture.narrow))
            for name, picture in pictures.items()
        ],
        network=network_matrix(results.settings.get("topology")),
        experiment=results.experiment_yaml,
    )


def _encoded(picture: bytes) -> str:
    return base64.b64encode(picture).decode()


def _caption(name: str, results: Results) -> str:
    if len(results.seeds) == 1:
        return _CAPTIONS[name]
    if name == "what_the_network_did":
        seed = results.settings.get("network_seed")
        return f"{_CAPTIONS[name]} Drift is that of seed {results.seeds[0] if seed is None else seed}."
    if name == "where_the_time_went":
        return f"{_CAPTIONS[name]} Means over {len(results.seeds)} seeds."
    band = f"Lines are means over {len(results.seeds)} seeds, bands go from the lowest to the highest seed."
    return f"{_CAPTIONS[name]} {band}"


def network_matrix(topology: Any) -> dict[str, Any] | None:
    """Bandwidth and one-way latency between regions (hosts, where there are none) as rows of texts.

    None without a topology, or where it has more places than a page can show.
    """
    if not isinstance(topology, dict):
        return None
    network = Topology.from_mapping(topology, "experiment.yaml: topology")
    places: dict[str, list[int]] = {}
    for host in network.hosts:
        places.setdefault(network.region_of(host.index), []).append(host.index)
    if not 1 < len(places) <= _MAX_PLACES:
        return None
    rows = []
    for source in places.values():
        row = []
        for target in places.values():
            ends = (source[0], target[-1])
            row.append("" if ends[0] == ends[1] else _path_text(network, *ends))
        rows.append(row)
    names = [visible(name, 30) for name in places]
    return {
        "name": visible(network.name, 80),
        "source": visible(network.source, 2000),
        "places": names,
        "rows": list(zip(names, rows, strict=True)),
    }


def _path_text(network: Topology, source: int, target: int) -> str:
    links = list(network.route(source, target))
    rate = min(float(network.bits_per_second[link]) for link in links)
    latency = network.route_latency_seconds(source, target)
    return f"{format_bits_per_second(rate)}\n{format_seconds(latency)}"
