"""The page of a run, and the template of all reports: text is escaped, nothing is loaded, only our scripts run."""

from __future__ import annotations

import hashlib
import json
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from exogym_core.names import PROGRAM_TASK, visible
from exogym_core.results.reading import WALL_CLOCK, Results
from exogym_core.results.report.curves import interactive_curves
from exogym_core.results.report.facts import (
    head_facts,
    methods,
    options_text,
    origins,
    run_facts,
    search_methods,
)
from exogym_core.results.report.figures import FORMATS, OF_ONE_RUN, Shown, draw_figures, draw_pictures
from exogym_core.results.report.network import NetworkSection, weather_of
from exogym_core.results.report.table import ResultTable, comparison_table, target_table
from exogym_core.results.report.verdict import verdict
from exogym_core.results.templates import asset, base64_text, latex_text, rendered
from netsim.files.plain_files import read_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from exogym_core.results.reading import StrategyResult
    from exogym_core.results.report.figures import Picture
    from exogym_core.results.run_folder import RunFolder


__all__ = [
    "Figure",
    "Listing",
    "Page",
    "Report",
    "RunReport",
    "TextTable",
    "environment_of",
    "render_page",
    "trace_of",
    "write_report",
]

_FOLDER = "results/report"
_SCRIPTS = [
    "data",
    "elements",
    "axes",
    "chart",
    "controls",
    "curves",
    "links",
    "trace",
    "page",
]  # in this order


@dataclass(frozen=True)
class Figure:
    """A picture and its caption.

    Attributes:
        is_curve: whether the interactive curves show the same.
    """

    caption: str
    picture: Picture
    is_curve: bool = False


@dataclass(frozen=True)
class TextTable:
    """A table below the results, whose first column holds headings of rows; `is_prose`: its next two hold sentences."""

    title: str
    headings: Sequence[str]
    rows: Sequence[tuple[str, Sequence[str]]]
    note: str = ""
    is_prose: bool = True


@dataclass(frozen=True)
class Listing:
    """A file, shown in a folded section of the page."""

    name: str
    text: str


@dataclass(frozen=True)
class Page:
    """Content of a page, from top to bottom.

    Attributes:
        title: of the page.
        facts: names and values that all rows of the table share.
        verdict: the sentence; empty where there is none.
        results: the table.
        note: how the table is to be read.
        status: sentence on a run that still trains, or was stopped before its end; empty where it has ended.
        figures: static pictures.
        curves: data of the interactive ones (`exogym_core.results.report.curves`); None: there are none.
        notes: sentences on rows, below the figures.
        tables: further ones.
        network: the section below them.
        trace: the name of a file next to the page, and the same base64, where it is small enough.
        methods: a paper's paragraph on how the run was made.
        experiments: files that run again, and environments.
        experiments_note: how they are run again.
    """

    title: str
    facts: Sequence[tuple[str, Any]]
    verdict: str
    results: ResultTable
    note: str
    status: str = ""
    figures: Sequence[Figure] = ()
    curves: Mapping[str, Any] | None = None
    notes: Sequence[str] = ()
    tables: Sequence[TextTable] = ()
    network: NetworkSection = field(default_factory=NetworkSection)
    trace: tuple[str, str | None] | None = None
    methods: str = ""
    experiments: Sequence[Listing] = ()
    experiments_note: str = ""


def render_page(page: Page) -> str:
    """The page's HTML: one file that loads nothing, and in which only its own two scripts may run, by their hash."""
    is_interactive = page.curves is not None
    style = _asset("page.css") + (_asset("uplot/uPlot.min.css") if is_interactive else "")
    scripts = []
    if is_interactive:  # uPlot with its licence, as that requires; ours in one function without global names
        own = "\n".join(_asset(f"scripts/{name}.js") for name in _SCRIPTS)
        library = f"/*!\n{_asset('uplot/LICENSE').strip()}\n*/\n{_asset('uplot/uPlot.iife.min.js')}"
        scripts = [library, f'(() => {{\n"use strict";\n\n{own}}})();\n']
    data = {"curves": page.curves, "use": page.network.use, "trace": page.trace and page.trace[0]}
    return rendered(
        f"{_FOLDER}/page.html",
        page=page,
        style=style,
        style_hash=_hash(style),
        scripts=scripts,
        script_hashes=[_hash(script) for script in scripts],
        data=_json(data) if is_interactive else None,
    )


def _asset(name: str) -> str:
    return asset(f"{_FOLDER}/{name}")


def _hash(text: str) -> str:
    return base64_text(hashlib.sha256(text.encode()).digest())


def _json(data: Any) -> str:
    """JSON that is safe inside HTML: without `<`, `>`, `&` and line separators."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


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
_BANDS = "Lines are means over {count} seeds, bands go from the lowest to the highest seed."
_OVER_SEEDS = {
    "where_the_time_went": "Means over {count} seeds.",
    "use_of_the_network": "The run is that of seed {first}.",
    "what_the_network_did": "Drift is that of seed {network}.",
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
_MOST_DRAWN = 24  # strategies in a picture
_TRACE = "trace.json.gz"
_MOST_EMBEDDED_BYTES = 1_500_000  # a larger trace stays a file next to the page


class Report(ABC):
    """Verdict, table and figures of a run, or of several.

    Attributes:
        verdict, winner: the sentences, and the name of what wins, if anything does.
        table: of the results.
        caption: of the table in a paper.
        methods: a paper's paragraph on how the runs were made.
        pictures: names of the figures.
    """

    verdict: str
    winner: str | None
    table: ResultTable
    caption: str
    methods: str
    pictures: Sequence[str]
    _png = "png"

    @abstractmethod
    def few(self) -> Shown:
        """Input of figures: as many curves as one can show."""

    def _texts(self) -> dict[str, str]:
        """LaTeX files by name."""
        return {"table.tex": self.table.latex(self.caption), "methods.tex": latex_text(self.methods) + "\n"}

    def write_figures(self, folder: RunFolder, formats: Sequence[str]) -> list[Path]:
        """Write figures for papers (`pdf`, `svg`, `png`) and tables (`latex`) into `plots/` of a folder."""
        files: dict[str, str | bytes] = {
            f"{name}.{self._png if form == 'png' else form}": figure
            for form in formats
            if form in FORMATS
            for name, figure in draw_figures(self.few(), self.pictures, form).items()
        }
        if "latex" in formats:
            files |= self._texts()
        return [folder.write_text(f"plots/{name}", content) for name, content in files.items()]


class RunReport(Report):
    """Report of a run.

    Args:
        folder: of the run.

    Attributes:
        results: of the run.

    Raises:
        InputError: a file of the run is missing or damaged.
    """

    pictures = OF_ONE_RUN
    _png = "paper.png"  # the page has figures of the same names

    def __init__(self, folder: RunFolder) -> None:
        self._folder, self.results = folder, Results.load(folder)
        self.verdict, self.winner = verdict(self.results)
        self.table = comparison_table(self.results, self.winner)
        search = search_methods(folder.path, has_target=self.results.target_loss is not None)
        paragraph = methods([self.results], are_retimed=bool(folder.read_retimed()))
        self.methods = " ".join(filter(None, [paragraph, search]))
        seeds = f": mean \N{PLUS-MINUS SIGN} standard deviation over {len(self.results.seeds)} seeds"
        self.to_target = target_table(self.results, self.winner)
        self.title = visible(self.results.settings.get("name", "run"), 80)
        self.caption = self.title + (seeds if len(self.results.seeds) > 1 else "")

    def _texts(self) -> dict[str, str]:
        files = super()._texts()
        if self.to_target.rows:
            caption = f"{self.caption}; until the first judged model at the target"
            files["target.tex"] = self.to_target.latex(caption, "tab:target")
        return files

    @property
    def basis(self) -> dict[str, str]:
        """Facts that every time depends on."""
        facts, names = dict(head_facts(self.results)), ["network", "protocol", "collectives", "placement"]
        if self.results.settings.get("batch_by_speed"):
            names.append("batch size per worker")
        return {name: facts[name] for name in names if name in facts}

    def few(self) -> Shown:
        """Input with the first strategies at the target, or of the lowest loss, and the weather of their network."""
        strategies = self.results.strategies
        if len(strategies) > _MOST_DRAWN:
            best = sorted(strategies, key=_rank)[:_MOST_DRAWN]
            strategies = [each for each in strategies if each in best]
        return Shown(replace(self.results, strategies=strategies), weather_of(self.results))

    def write(self, align: str = "time", each: Callable[..., Any] = map) -> Path:
        """Write the plots and the page.

        Args:
            align: axis of its curves when it opens: `time`, `steps` or `bytes`.
            each: draws pictures, as for `draw_pictures`.

        Raises:
            RecordError: a file cannot be written.
        """
        shown = self.few()
        pictures = draw_pictures(shown, self.pictures, each)
        for name, picture in pictures.items():
            self._folder.write_text(f"plots/{name}.png", picture.wide)
        return self._folder.write_text("report.html", render_page(self._page(shown, pictures, align)))

    def _page(self, shown: Shown, pictures: Mapping[str, Picture], align: str) -> Page:
        results = self.results
        is_real = results.clock == WALL_CLOCK
        # Real ranks have a network of their own, whatever the experiment names for simulation.
        topology = None if is_real else results.settings.get("topology")
        num, drawn = len(results.strategies), len(shown.results.strategies)
        best = "those first at the target, then those of the lowest loss"
        left_out = f" Drawn are {drawn} of {num} strategies: {best}." if drawn < num else ""
        # Bytes that had crossed each link, of each strategy's first seed.
        seed = results.seeds[0] if len(results.seeds) > 1 else None
        histories = [(each.name, self._folder.read_links(each.name, seed)) for each in results.strategies]
        line = origins([(self._folder, results)])
        again = "This file runs again as it is: netgym compare experiment.yaml"
        if str(results.setting("task.name")).startswith(PROGRAM_TASK):
            again = (
                "These are the settings of a Python program: it runs again there, with fit(..., out=FOLDER)."
            )
        status = "Incomplete: this run was stopped before its end." if results.incomplete else ""
        if results.running is not None:
            status = f"Running: {visible(results.running, 200)}. netgym report shows more later."
        return Page(
            title=self.title,
            methods=self.methods,
            facts=[*head_facts(results), *([("trainings", line)] if line else [])],
            verdict=self.verdict,
            results=self.table.filled(),
            note=(_NOTE_OF_REAL if is_real else _NOTE) + (_SEEDS_NOTE if len(results.seeds) > 1 else ""),
            status=status,
            figures=[
                Figure(_caption(name, results) + left_out, picture, name in _INTERACTIVE)
                for name, picture in pictures.items()
            ],
            curves=interactive_curves(results, shown.weather, align),
            tables=self._tables(),
            network=NetworkSection.of(topology, histories),
            trace=trace_of(self._folder.path),
            experiments=[
                Listing("experiment.yaml", results.experiment_yaml),
                *environment_of(self._folder),
            ],
            experiments_note=again,
        )

    def _tables(self) -> list[TextTable]:
        """Tables below the results: to the target, how each strategy was run, and its options."""
        tables, clock = [], self.results.clock
        if self.to_target.rows:
            headings, marked, _ = self.to_target.filled()
            note = (
                "Until the first judged model at the target existed, of strategies that held it with every seed. The "
                "speed-up is over AllReduce."
            )
            rows = [(cells[0], cells[1:]) for _, cells in marked]
            tables.append(TextTable("To the target", headings, rows, note, is_prose=False))
        if runs := run_facts(self.results):
            headings = [
                "strategy",
                "judged model",
                "collectives",
                "computing",
                "network",
                "waiting for others",
            ]
            note = f"Seconds of a worker, {clock}, means over all; the three sum to the run's time."
            tables.append(TextTable("How each was run", headings, runs, note))
        options = [
            (
                visible(each.name),
                [", ".join(f"{key} {value}" for key, value in options_text(each.options).items())],
            )
            for each in self.results.strategies
            if each.options
        ]
        if options:
            note = "As they were run, defaults included; those that were off or without a value are left out."
            tables.append(TextTable("Options", ["strategy", "options"], options, note))
        return tables


def write_report(folder: RunFolder) -> Path:
    """Write the plots and the page of a run's folder; returns the page.

    Raises:
        InputError: a file of the run is missing or damaged.
        RecordError: a file cannot be written.
    """
    return RunReport(folder).write()


def _rank(result: StrategyResult) -> tuple[float, float]:
    seconds, loss = result.held_seconds, result.final_loss
    return math.inf if seconds is None else seconds, math.inf if loss is None else loss


def environment_of(folder: RunFolder) -> list[Listing]:
    """The run's environment.json, if it has one."""
    path = folder.path / "environment.json"
    if not path.is_file():
        return []
    return [Listing("environment.json", read_bytes(path).decode(errors="replace"))]


def trace_of(folder: Path) -> tuple[str, str | None] | None:
    """Name of a folder's trace, and its content in base64 where the page can open it in Perfetto."""
    path = folder / _TRACE
    if not path.is_file():
        return None
    return _TRACE, base64_text(path.read_bytes()) if path.stat().st_size <= _MOST_EMBEDDED_BYTES else None


def _caption(name: str, results: Results) -> str:
    text = _CAPTIONS[name].replace("virtual time", results.clock)
    text = text.replace("Virtual time", results.clock.capitalize())
    seeds, network = results.seeds, results.settings.get("network_seed")
    if len(seeds) == 1:
        return text
    which = {"first": seeds[0], "network": seeds[0] if network is None else network, "count": len(seeds)}
    return f"{text} {_OVER_SEEDS.get(name, _BANDS).format(**which)}"
