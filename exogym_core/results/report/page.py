"""The page of one run, from what its folder holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from exogym_core.names import visible
from exogym_core.results.report.document import Figure, Listing, Page, TextTable, encoded, render_page
from exogym_core.results.report.facts import head_facts, run_facts
from exogym_core.results.report.interactive import interactive_curves
from exogym_core.results.report.network import draw_network, link_use, network_matrix
from exogym_core.results.report.pictures import OF_ONE_RUN, draw_pictures
from exogym_core.results.report.plots import Shown
from exogym_core.results.report.results import WALL_CLOCK, Results
from exogym_core.results.report.table import table_cells, table_headings
from exogym_core.results.report.verdict import verdict
from exogym_core.results.report.weather import weather_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from exogym_core.results.record import RunFolder
    from exogym_core.results.report.pictures import Picture

__all__ = ["environment_of", "page_of", "shown_of", "write_report"]

_CAPTIONS = {
    "loss_against_time": "Loss of the judged model against virtual time: when that model came to exist.",
    "loss_against_bytes": "Loss of the judged model against payload bytes that left a worker.",
    "where_the_time_went": (
        "Virtual time in which a worker computed, waited for the network, and waited for slower workers; means over "
        "workers. Shares in this order."
    ),
    "use_of_the_network": "Payload bits per second that all workers sent, in the course of virtual time.",
    "what_the_network_did": (
        "Links and hosts that changed while it ran, as a share of the stated bandwidth: outages, crashes, traces, "
        "events and drift. It is the same for all strategies. The traffic of others is not shown."
    ),
}
_INTERACTIVE = ("loss_against_time", "loss_against_bytes", "use_of_the_network")
_NOTE = (
    "Losses and accuracy are those of the judged model: the one that could be shipped at that instant. Savings are "
    "against AllReduce, of those that did as many steps and held the target, if there is one. Bytes are payload, "
    "headers not counted. Virtual time is the simulated clock's."
)
_NOTE_OF_REAL = _NOTE.replace(
    "Virtual time is the simulated clock's.", "Ranks were real: seconds are wall-clock time."
)
_SEEDS_NOTE = " Figures are means \N{PLUS-MINUS SIGN} standard deviation over seeds."
_TRACE = "trace.json.gz"
_MOST_EMBEDDED_BYTES = 1_500_000  # a larger trace stays beside the page


def write_report(folder: RunFolder, align: str = "time") -> Path:
    """Draw the plots and write the page into a run folder, from what the folder holds; returns the page.

    Args:
        folder: of a run.
        align: by what curves are aligned when the page opens: `time`, `steps` or `bytes`.

    Raises:
        InputError: a file of the run is missing or damaged.
        RecordError: a file cannot be written.
    """
    shown = shown_of(Results.load(folder))
    pictures = draw_pictures(shown, OF_ONE_RUN)
    for name, picture in pictures.items():
        folder.write_text(f"plots/{name}.png", picture.wide)
    return folder.write_text("report.html", render_page(page_of(folder, shown, pictures, align)))


def shown_of(results: Results) -> Shown:
    """Results, and the weather of their network."""
    return Shown(results, weather_of(results))


def page_of(folder: RunFolder, shown: Shown, pictures: Mapping[str, Picture], align: str = "time") -> Page:
    """All that the page says."""
    results = shown.results
    decision = verdict(results)
    # Real ranks have a network of their own, whatever the experiment names for simulation.
    topology = results.settings.get("topology") if results.clock != WALL_CLOCK else None
    runs = run_facts(results)
    return Page(
        title=visible(results.settings.get("name", "run"), 80),
        facts=head_facts(results),
        verdict=decision.text,
        headings=table_headings(results),
        rows=[
            (result.name == decision.winner, cells)
            for result, cells in zip(results.strategies, table_cells(results), strict=True)
        ],
        note=(_NOTE_OF_REAL if results.clock == WALL_CLOCK else _NOTE)
        + (_SEEDS_NOTE if len(results.seeds) > 1 else ""),
        status=_status(results),
        figures=[
            Figure(_caption(name, results), picture, name in _INTERACTIVE)
            for name, picture in pictures.items()
        ],
        curves=interactive_curves(results, shown.weather, align),
        tables=[_how_each_was_run(runs, results.clock)] if runs else [],
        network=network_matrix(topology),
        drawings=draw_network(topology),
        use=link_use(_histories(folder, results), topology),
        trace=_trace_of(folder),
        experiments=[Listing("experiment.yaml", results.experiment_yaml), *environment_of(folder)],
        experiments_note="This file runs again as it is: netgym compare experiment.yaml",
    )


def _how_each_was_run(runs: Sequence[tuple[str, list[str]]], clock: str) -> TextTable:
    return TextTable(
        "How each was run",
        ["strategy", "judged model", "collectives", "computing", "network", "waiting for others"],
        runs,
        f"Seconds of a worker, {clock}, means over all; the three sum to the run's time.",
    )


def environment_of(folder: RunFolder) -> list[Listing]:
    """What the run was made with, if it says so."""
    path = folder.path / "environment.json"
    if not path.is_file():
        return []
    return [Listing("environment.json", path.read_text(encoding="utf-8", errors="replace"))]


def _status(results: Results) -> str:
    if results.running is not None:
        return f"Running: {visible(results.running, 200)}. netgym report shows more later."
    return "Incomplete: this run was stopped before its end." if results.incomplete else ""


def _histories(folder: RunFolder, results: Results) -> list[tuple[str, list[dict[str, float]]]]:
    """Of each strategy's first seed, what had crossed each link."""
    seed = results.seeds[0] if len(results.seeds) > 1 else None
    return [(result.name, folder.read_links(result.name, seed)) for result in results.strategies]


def _trace_of(folder: RunFolder) -> tuple[str, str | None] | None:
    """The trace's name and, where it is small enough to be handed to Perfetto by the page itself, the same base64."""
    path = folder.path / _TRACE
    if not path.is_file():
        return None
    return _TRACE, encoded(path.read_bytes()) if path.stat().st_size <= _MOST_EMBEDDED_BYTES else None


def _caption(name: str, results: Results) -> str:
    told = (
        _CAPTIONS[name]
        .replace("virtual time", results.clock)
        .replace("Virtual time", results.clock.capitalize())
    )
    if len(results.seeds) == 1:
        return told
    if name in ("what_the_network_did", "use_of_the_network"):
        seed = results.settings.get("network_seed")
        if name == "use_of_the_network":
            return f"{told} The run is that of seed {results.seeds[0]}."
        return f"{told} Drift is that of seed {results.seeds[0] if seed is None else seed}."
    if name == "where_the_time_went":
        return f"{told} Means over {len(results.seeds)} seeds."
    band = f"Lines are means over {len(results.seeds)} seeds, bands go from the lowest to the highest seed."
    return f"{told} {band}"
