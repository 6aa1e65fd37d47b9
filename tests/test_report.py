"""The report from folders written by hand: table, sentence, plots, page; and what is shown while runs go on."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from experiments import VERDICTS, check_verdict, entry, fitted, mlp, samples, stored
from rich.console import Console
from worlds import chain_form, regions_form

from exogym_core.names import visible
from exogym_core.results.fit_result import FitResult
from exogym_core.results.progress import (
    PlainProgress,
    progress_for,
)
from exogym_core.results.report import Results, RunReport, head_facts, verdict, write_report
from exogym_core.results.report import page as page_module
from exogym_core.results.report.figures import (
    FORMATS,
    OF_ONE_RUN,
    Picture,
    draw_figures,
    draw_pictures,
)
from exogym_core.results.report.table import comparison_table, ratio
from exogym_core.results.run_folder import RunFolder
from exogym_core.strategy import STRATEGIES, DiLoCoStrategy, SPARTAStrategy
from exogym_core.workers.processes.jobs import call_each
from netgym.cli.main import main
from netsim.errors import InputError


def headings_of(results: Results) -> list[str]:
    return list(comparison_table(results).headings)


def cells_of(results: Results) -> list[list[str]]:
    return [list(cells) for _, cells in comparison_table(results).rows]


def run_folder(
    path: Path, entries: list[dict[str, Any]], timed: bool = True, **settings: object
) -> RunFolder:
    folder = RunFolder.create(path / "run", "digits")
    plain = stored([one["strategy"] for one in entries], batch_size=8, **settings)
    folder.write_text("experiment.yaml", yaml.safe_dump(plain))
    for one in entries:
        losses = one.pop("losses", {step: 2.0 / (step + 1) for step in (0, 2, 4)})
        seconds = float(str(one["virtual_seconds"] or 0)) / 4
        train = [
            {
                "step": step,
                "train_loss": 2.0 / step,
                "virtual_seconds": seconds * step if timed else None,
                "bytes_sent": 500 * step,
            }
            for step in range(1, 5)
        ]
        validation = [{"step": step, "local_loss": 2.0, "global_loss": loss} for step, loss in losses.items()]
        folder.write_result(str(one["name"]), FitResult(history=train, validation=validation))
    folder.write_summary(entries)
    return folder


def two(**given: object) -> list[dict[str, Any]]:
    slow = entry("AllReduce", virtual_seconds=400.0, virtual_seconds_to_target=200.0, compute_utilisation=0.1)
    return [slow, entry("DiLoCo", bytes_sent_per_worker=50_000, **given)]


class TestTable:
    def test_savings_are_against_all_reduce(self, tmp_path: Path) -> None:
        results = Results.load(run_folder(tmp_path, two()))
        assert headings_of(results)[1] == "to loss 0.3"
        assert headings_of(results)[-2:] == ["bytes saved", "time per step saved"]
        baseline, winner = cells_of(results)
        assert baseline[-2:] == ["-", "-"]
        assert winner == [
            "DiLoCo", "50 s", "0.2000", "95.0%", "100 s", "50.0%", "50 kB", "2 MB", "20x", "4x",
        ]  # fmt: skip

    @pytest.mark.parametrize("given", [{"target": "missed"}, {"target": "touched"}, {"steps": 3}])
    def test_a_strategy_that_misses_the_target_or_does_fewer_steps_saves_nothing(
        self, tmp_path: Path, given: dict[str, object]
    ) -> None:
        """A strategy that diverges sends little too."""
        assert cells_of(Results.load(run_folder(tmp_path, two(**given))))[1][-2:] == ["-", "-"]

    @pytest.mark.parametrize(
        ("baseline", "value", "text"),
        [(1e6, 1e3, "1,000x"), (1.0, 0.0, "all"), (0.0, 0.0, "1x"), (1.0, 3.0, "0.333x"), (1.0, None, "-")],
    )
    def test_ratio(self, baseline: float, value: float | None, text: str) -> None:
        assert ratio(baseline, value) == text


@pytest.mark.parametrize("row", VERDICTS["one seed"].values(), ids=VERDICTS["one seed"])
def test_the_verdict_says_who_wins_and_why(tmp_path: Path, row: dict[str, Any]) -> None:
    entries = [entry(name, **given or {}) for name, given in row["strategies"].items()]
    results = Results.load(run_folder(tmp_path, entries, **row.get("settings", {})))
    check_verdict(results, row)
    assert results.incomplete == any(one.get("incomplete", False) for one in entries)


PAYLOADS = yaml.safe_load(Path(__file__).with_name("hostile.yaml").read_text(encoding="utf-8"))["markup"]


DRAWN = ["a\u202eb\x1b[31mc\x00"]
"""Of this the pictures are drawn too, where names stand in labels."""

ELEMENTS = {
    *("html", "head", "meta", "title", "style", "body", "header", "main", "h1", "h2", "p", "div", "dl", "dt"),
    *("dd", "table", "thead", "tbody", "tr", "th", "td", "figure", "img", "figcaption", "code", "pre"),
    *("details", "summary", "picture", "source", "section", "script", "svg", "line", "circle", "text"),
}

ATTRIBUTES = {
    *("lang", "charset", "http-equiv", "content", "name", "class", "scope", "alt", "src", "srcset", "media"),
    *("id", "hidden", "role", "tabindex", "aria-label", "type", "viewbox", "cx", "cy", "r", "x", "y"),
    *("x1", "y1", "x2", "y2", "stroke-width", "data-link"),
}


class _Elements(HTMLParser):
    """What a browser would take for elements, attributes and text."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.attributes: set[str] = set()
        self.sources: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.sources += [value or "" for name, value in attrs if name in ("src", "srcset")]

    def handle_data(self, data: str) -> None:
        self.text += data


class TestPage:
    @pytest.mark.thorough
    def test_pictures_drawn_side_by_side_are_the_same(self, tmp_path: Path) -> None:
        shown = RunReport(run_folder(tmp_path, two())).few()
        drawn = draw_pictures(shown, OF_ONE_RUN[:2], partial(call_each, num_jobs=2))
        assert drawn == draw_pictures(shown, OF_ONE_RUN[:2])
        assert len(drawn) == 2

    @pytest.mark.parametrize(
        "payload",
        [
            *(pytest.param(each, marks=pytest.mark.pictures) for each in DRAWN),
            *PAYLOADS[::4],
            *(
                pytest.param(each, marks=pytest.mark.thorough)
                for each in PAYLOADS
                if each not in DRAWN + PAYLOADS[::4]
            ),
        ],
    )
    def test_names_are_escaped(self, tmp_path: Path, payload: str, monkeypatch: pytest.MonkeyPatch) -> None:
        if payload not in DRAWN:  # drawing takes longer than all the rest
            monkeypatch.setattr(
                page_module, "draw_pictures", lambda *_: {"loss_against_time": Picture(b"wide", b"narrow")}
            )
        printable = "".join(filter(str.isprintable, payload))
        network = regions_form({"a": 1, "b": 1}, name=printable, source=printable, protocol="ideal")
        entries = [entry("AllReduce"), entry(payload, strategy="DiLoCo")]
        folder = run_folder(tmp_path, entries, name=payload, task={"name": payload}, topology=network)
        page = write_report(folder).read_text(encoding="utf-8")
        seen = _Elements()
        seen.feed(page)
        seen.close()
        assert seen.names <= ELEMENTS
        assert seen.attributes <= ATTRIBUTES
        assert all(source.startswith("data:image/png;base64,") for source in seen.sources)
        # As text it is all there: nothing was obeyed, nothing was lost.
        assert seen.text.count(visible(payload)[:30]) >= 4
        assert all(character.isprintable() or character == "\n" for character in page)

    @pytest.mark.pictures
    def test_it_loads_nothing_and_allows_its_own_scripts_alone(self, tmp_path: Path) -> None:
        page = write_report(run_folder(tmp_path, two())).read_text(encoding="utf-8")
        policy = re.findall(r"Content-Security-Policy\" content=\"([^\"]*)", page)[0]
        assert policy.startswith("default-src 'none'; img-src data:; ")
        assert "unsafe" not in policy
        scripts = re.findall(r"<script>(.*?)</script>", page, re.S)
        assert len(scripts) == 2
        hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts]
        assert re.findall(r"script-src([^;]*)", policy) == ["".join(f" 'sha256-{each}'" for each in hashes)]
        assert not any("eval(" in text or "new Function" in text for text in scripts)
        sources = re.findall(r"(?:src|href|srcset)=\"([^\"]*)", page)
        assert len(sources) == 8
        assert all(source.startswith("data:image/png;base64,") for source in sources)

    @pytest.mark.parametrize("payload", PAYLOADS)
    def test_names_in_the_data_of_curves_are_data(self, tmp_path: Path, payload: str) -> None:
        folder = run_folder(tmp_path, [entry(payload, strategy="DiLoCo")])
        page = write_report(folder).read_text(encoding="utf-8")
        text = re.findall(r"<script type=\"application/json\" id=\"data\">(.*?)</script>", page, re.S)[0]
        assert not set(text) & set("<>&\u2028\u2029")
        assert json.loads(text)["curves"]["curves"][0]["name"] == visible(payload)

    @pytest.mark.parametrize(
        "form",
        [pytest.param(form, marks=pytest.mark.thorough) if form != "svg" else form for form in FORMATS],
    )
    def test_figures_for_papers_are_the_same_every_time(self, tmp_path: Path, form: str) -> None:
        shown = RunReport(run_folder(tmp_path, two())).few()
        drawn = draw_figures(shown, OF_ONE_RUN, form)
        assert len(drawn) == 4
        for name in OF_ONE_RUN[1:3]:
            assert draw_figures(shown, [name], form) == {name: drawn[name]}

    def test_figures_are_written_where_the_command_says(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        folder = run_folder(tmp_path, two()).path
        assert main(["report", str(folder), "--format", "svg,png"]) == 0
        figures = [line.removeprefix("figure ") for line in capsys.readouterr().out.splitlines()]
        assert f"{folder}/plots/loss_against_time.svg" in figures
        assert "<svg" in (folder / "plots/loss_against_time.svg").read_text()
        assert (folder / "plots/loss_against_time.paper.png").is_file(), "the page's own keeps its name"
        assert main(["report", str(folder), "--format", "gif"]) == 2
        assert "'gif' is no format: give one or several of pdf,svg,png,latex" in capsys.readouterr().err

    def test_a_trace_is_linked(self, tmp_path: Path) -> None:
        folder = run_folder(tmp_path, two())
        (folder.path / "trace.json.gz").write_bytes(b"a trace")
        page = write_report(folder).read_text(encoding="utf-8")
        assert '<a href="trace.json.gz" download>' in page

    @pytest.mark.pictures
    def test_without_virtual_time_only_bytes_are_drawn(self, tmp_path: Path) -> None:
        lacking = {"virtual_seconds": None, "virtual_seconds_to_target": None, "compute_utilisation": None}
        folder = run_folder(tmp_path, [entry("DiLoCo", **lacking)], timed=False)
        write_report(folder)
        assert [path.name for path in folder.path.glob("plots/*")] == ["loss_against_bytes.png"]

    def test_incomplete_runs_say_so(self, tmp_path: Path) -> None:
        folder = run_folder(tmp_path, [entry("DiLoCo", incomplete=True)])
        assert "Incomplete: this run was stopped" in write_report(folder).read_text(encoding="utf-8")

    @pytest.mark.parametrize("content", ["{", "3", '[{"name": 3}]', "[1]"])
    def test_a_damaged_summary_is_named(self, tmp_path: Path, content: str) -> None:
        folder = run_folder(tmp_path, two())
        folder.write_text("summary.json", content)
        with pytest.raises(InputError, match=r"summary\.json: "):
            write_report(folder)

    @pytest.mark.parametrize(
        ("count", "stages", "on_hosts"),
        [(4, None, "4 workers on 3 hosts"), (2, 2, "4 ranks of workers on 3 hosts")],
    )
    def test_the_head_says_how_it_was_run(
        self, tmp_path: Path, count: int, stages: int | None, on_hosts: str
    ) -> None:
        """Compute, protocol, jitter, seeds, placement and collectives were not on the page."""
        network = regions_form(
            {"us": 1, "eu": 2}, latency="0 s", wan="800 Mbit/s", rtt="80 ms", protocol="ideal"
        )
        entries = [
            entry("AllReduce", judged="replica", collectives={"all_reduce": "tree"}, computing_seconds=10.0,
                  network_seconds=80.0, waiting_seconds=10.0),
            entry("DiLoCo", judged="outer", collectives={"all_reduce": ["ring", "tree"]}),
        ]  # fmt: skip
        folder = run_folder(
            tmp_path,
            entries,
            topology=network,
            protocol={"preset": "linux-tcp", "streams": 8},
            compute={"fixed": "0.05 s", "jitter": 0.1},
            workers={"count": count},
            stages=stages,
            evaluate={"every": 10},
        )
        seen = _Elements()
        seen.feed(write_report(folder).read_text(encoding="utf-8"))
        for figures in (
            "linux-tcp, streams 8",
            "50 ms a step, jitter 0.1",
            f"({on_hosts}, up to 2 on one)",
            "10 steps",
            "all_reduce: tree",
            "all_reduce: ring, tree",
            "the outer parameters of the last round that ended",
            "80 s",
            "800 Mbit/s\n40 ms",
        ):
            assert figures in seen.text

    @pytest.mark.pictures
    def test_what_the_weather_did_is_drawn(self, tmp_path: Path) -> None:
        """An outage, a crash and a trace could not be seen: the page told of a constant bandwidth."""
        network = chain_form(events=[{"at": "10 s", "link": ["a", "b"], "down": True, "for": "5 s"}])
        folder = run_folder(tmp_path, two(), topology=network)
        assert "outages, crashes, traces" in write_report(folder).read_text(encoding="utf-8")
        assert (folder.path / "plots/what_the_network_did.png").is_file()


def test_seconds_of_real_ranks_are_reported_as_such(tmp_path: Path) -> None:
    """They stand in the place of virtual ones, in table, sentence and page, and under their own name."""
    real = [
        {
            **each,
            "virtual_seconds": None,
            "wall_seconds": each["virtual_seconds"],
            "wan_bytes": 0,
            "compute_utilisation": None,
        }
        for each in two()
    ]
    folder = run_folder(tmp_path, real, timed=False)
    for each in real:
        train = [
            {"step": step, "train_loss": 2.0 / step, "wall_seconds": 10.0 * step} for step in range(1, 5)
        ]
        validation = [{"step": 4, "judged_loss": 0.25, "judged_wall_seconds": 40.0}]
        folder.write_result(str(each["name"]), FitResult(history=train, validation=validation))
    results = Results.load(folder)
    assert headings_of(results)[4] == "wall-clock time"
    assert [cells[4] for cells in cells_of(results)] == ["400 s", "100 s"]
    # Real ranks know no regions: their summary's 0 is no measurement.
    assert [cells[7] for cells in cells_of(results)] == ["-", "-"]
    assert "DiLoCo reaches loss 0.3 first, after 50 s of wall-clock time" in verdict(results).text
    page = write_report(folder).read_text()
    assert "Ranks were real: seconds are wall-clock time." in page
    assert "none: no virtual time" not in page
    assert re.search(r'"clock": ?"wall-clock time"', page), "curves are labelled with it"
    words = page.replace('payload ? payload.clock : "virtual time"', "").lower()
    assert "virtual time" not in words
    assert "virtual seconds" not in words


def test_runs_that_virtual_time_ended_say_what_was_done(tmp_path: Path) -> None:
    """`until` was on no page, and the paragraph for a paper had all steps as trained."""
    folder = run_folder(
        tmp_path, [entry("AllReduce", steps=42), entry("DiLoCo", steps=400)], steps=600, until="25 s"
    )
    report = RunReport(folder)
    facts = dict(head_facts(report.results))
    assert facts["steps"] == "600 at most (AllReduce 42, DiLoCo 400)"
    assert facts["ends at the latest after"] == "25 s of virtual time"
    assert (
        "for at most 600 steps or 25 s of virtual time, whichever came first (AllReduce 42, DiLoCo 400) with 8"
        in report.methods
    )


def test_options_are_reported_as_they_were_used(tmp_path: Path) -> None:
    """Learning rate and optimizer stood in no file where they were defaults."""
    runs = {"DiLoCo": DiLoCoStrategy(H=2), "SPARTA": SPARTAStrategy(optim_spec="sgd", lr=0.25)}
    entries = [fitted(strategy=each).summary(name, name) for name, each in runs.items()]
    diloco, sparta = (each["options"] for each in entries)
    assert [(each["name"], each["lr"]) for each in diloco["optimizers"]] == [("AdamW", 0.001), ("SGD", 0.7)]
    assert (sparta["p_sparta"], sparta["optimizers"][0]["lr"]) == (0.005, 0.25)
    assert entries[0]["parameters"] == sum(each.numel() for each in mlp().parameters())
    report = RunReport(
        run_folder(tmp_path, entries, strategies=[{"name": "DiLoCo", "H": 2}, {"name": "SPARTA"}])
    )
    page = report.write().read_text()
    for text in (report.methods, page):
        assert "optimizer AdamW (betas (0.9, 0.999), " in text
        assert "outer optimizer SGD (dampening 0, lr 0.7, " in text
        assert "p_sparta 0.005" in text
    assert "other options at their defaults" not in report.methods
    assert dict(head_facts(report.results))["parameters"] == "53"


@pytest.mark.pictures
@pytest.mark.parametrize("losses", [[-math.inf, math.nan]])
def test_losses_that_a_logarithm_does_not_take_have_a_page(tmp_path: Path, losses: list[float]) -> None:
    """matplotlib's error came after training, and from every report of that folder."""
    last = losses[-1] if math.isfinite(losses[-1]) else None
    one = entry(
        "DiLoCo", losses=dict(enumerate(losses)), final_loss=last, first_non_finite_step=1, target=None
    )
    report = RunReport(run_folder(tmp_path, [one | {"virtual_seconds_to_target": None}]))
    assert report.table.rows[0][1][2] == ("nan" if last is None else "0.0000")
    page = report.write().read_text()
    assert ("<td>nan</td>" in page) == (last is None)


PAGE = Path(__file__).parents[1] / "docs" / "verdict.md"


def test_the_page_tells_of_every_strategy_which_model_is_judged() -> None:
    """Its table names each once, with the word that the summary has."""
    judged: dict[str, str] = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and len(cells) == 3 and cells[1].startswith("`"):
            names = cells[0].split(", ")
            assert judged.keys().isdisjoint(names)
            judged |= dict.fromkeys(names, cells[1].strip("`"))
    assert judged == {name: make().judged for name, make in STRATEGIES.items()}


# --- runs started from Python: progress, their ends, their results ------------------------------------------


def shown_fit(**options):
    given = {"max_steps": 4, "topology": "lan", "strategy": DiLoCoStrategy(H=2)}
    return fitted(validation=samples(32), data=samples(32), **(given | options))


def test_a_run_says_that_it_begins_and_how_it_ended(capsys):
    """`fit` was mute from beginning to end."""
    result = shown_fit(compute=0.1)
    out, err = capsys.readouterr()
    assert out == ""
    begun, *_, ended = err.splitlines()
    assert begun == "DiLoCoStrategy: 4 steps"
    assert ended.startswith(
        f"DiLoCoStrategy done: step 4 of 4, final loss {result.final_loss:.4f}, virtual time"
    )


def test_runs_side_by_side_have_a_timer_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line of one put off the others': the slower of two was silent for most of its time."""
    lines: list[str] = []
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    with PlainProgress(lines.append, lambda line: None) as progress:
        runs = [progress.begin(label, number, 2, 90) for number, label in enumerate(["slow", "fast"], 1)]
        for step in range(90):
            now = 1.0 * step
            for run in reversed(runs):
                run.event({"kind": "step", "step": step, "train_loss": 1.0})
    assert [sum(line.startswith(f"{run.label}: step") for line in lines) for run in runs] == [18, 18]


def test_a_result_is_reported_in_a_line_however_long_the_run():
    """500 steps were 125,208 characters."""
    result = shown_fit(compute=0.1, target_loss=2.0, progress=False)
    text = repr(result)
    assert text.startswith("FitResult(strategy DiLoCoStrategy, ranks 2, steps 4 of 4, final loss ")
    assert "(outer), virtual time " in text
    assert "target 2 touched" in text
    result.history.extend(result.history[:] * 999)
    assert len(repr(result)) < 250
    html = result._repr_html_()
    assert html.startswith("<table><tr><th>strategy</th><td>DiLoCoStrategy</td>")
    assert "&lt;" in FitResult(strategy="<b>")._repr_html_()


def test_a_notebook_gets_one_bar_that_is_updated(monkeypatch):
    """Each line of progress was an output of its own."""
    from IPython import display

    shown, handle = [], display.DisplayHandle()
    monkeypatch.setattr(display, "display", lambda html, display_id: shown.append(html.data) or handle)
    monkeypatch.setattr(handle, "update", lambda html: shown.append(html.data))
    console, log = Console(force_jupyter=True), []
    with progress_for(console, log.append) as progress:
        run = progress.begin("<b>", 1, 2, 3)
        for step in (1, 2, 3):
            run.event({"kind": "step", "step": step, "train_loss": 0.5})
        run.end("done: step 3 of 3")
    assert shown[0] == '<progress value="0" max="3"></progress> &lt;b&gt; (1 of 2): 3 steps'
    assert shown[1] == '<progress value="1" max="3"></progress> &lt;b&gt;: step 1 of 3, loss 0.5000'
    assert shown[-1] == '<progress value="3" max="3"></progress> &lt;b&gt; done: step 3 of 3'
    assert log == ["<b> (1 of 2): 3 steps", "<b> done: step 3 of 3"]
