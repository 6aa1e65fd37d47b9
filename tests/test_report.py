"""The report from folders written by hand: table, sentence, plots, page."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from exogym_core.cli.main import main
from exogym_core.names import visible
from exogym_core.results.report import (
    Results,
    RunReport,
    head_facts,
    verdict,
    write_report,
)
from exogym_core.results.report import page as page_module
from exogym_core.results.report.figures import (
    FORMATS,
    OF_ONE_RUN,
    Picture,
    draw_figures,
    draw_pictures,
    log_ticks,
)
from exogym_core.results.report.network import link_use, strip_columns
from exogym_core.results.report.page import methods
from exogym_core.results.report.table import comparison_table, ratio
from exogym_core.results.run_folder import RunFolder
from exogym_core.strategy import STRATEGIES
from netsim import Topology
from netsim.errors import InputError


def headings_of(results: Results) -> list[str]:
    return list(comparison_table(results).headings)


def cells_of(results: Results) -> list[list[str]]:
    return [list(cells) for _, cells in comparison_table(results).rows]


def entry(name: str, **given: object) -> dict[str, object]:
    return {
        "name": name,
        "final_loss": 0.2,
        "accuracy": 0.95,
        "virtual_seconds": 100.0,
        "virtual_seconds_to_target": 50.0,
        "compute_utilisation": 0.5,
        "bytes_sent_per_worker": 1_000_000,
        "wan_bytes": 2_000_000,
        "strategy": name,
        "steps": 4,
    } | given


def run_folder(
    path: Path, entries: list[dict[str, object]], timed: bool = True, **settings: object
) -> RunFolder:
    folder = RunFolder.create(path / "run", "digits")
    plain = {
        "name": "digits",
        "task": {"name": "digits"},
        "workers": {"count": 2},
        "steps": 4,
        "batch_size": 8,
        "seed": 0,
        "target_loss": 0.3,
        "topology": None,
        "strategies": [{"name": str(one["strategy"])} for one in entries],
    } | settings
    folder.write_text("experiment.yaml", yaml.safe_dump(plain))
    for one in entries:
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
        validation = [
            {"step": step, "local_loss": 2.0, "global_loss": 2.0 / (step + 1)} for step in (0, 2, 4)
        ]
        folder.write_strategy(str(one["name"]), train, validation, None)
    folder.write_summary(entries)
    return folder


def two(**given: object) -> list[dict[str, object]]:
    slow = entry("AllReduce", virtual_seconds=400.0, virtual_seconds_to_target=200.0, compute_utilisation=0.1)
    return [slow, entry("DiLoCo", bytes_sent_per_worker=50_000, **given)]


class TestTable:
    def test_savings_are_against_all_reduce(self, tmp_path: Path) -> None:
        results = Results.load(run_folder(tmp_path, two()))
        assert headings_of(results)[1] == "to loss 0.3"
        baseline, winner = cells_of(results)
        assert baseline[-2:] == ["-", "-"]
        assert winner == [
            "DiLoCo", "50 s", "0.2000", "95.0%", "100 s", "50.0%", "50 kB", "2 MB", "20x", "4x",
        ]  # fmt: skip

    def test_what_is_not_known_is_a_dash_and_never_is_said(self, tmp_path: Path) -> None:
        entries = [entry("DiLoCo", virtual_seconds_to_target=None, accuracy=None)]
        cells = cells_of(Results.load(run_folder(tmp_path, entries)))[0]
        assert (cells[3], cells[1], cells[8]) == ("-", "never", "-")

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

    @pytest.mark.parametrize("width", [50, 80, 100, 120])
    def test_a_narrow_terminal_gets_fewer_columns_but_whole_cells(self, tmp_path: Path, width: int) -> None:
        results = Results.load(run_folder(tmp_path, [*two(), entry("SPARTA+DiLoCo")]))
        table, left_out = comparison_table(results).rich(width)
        console = Console(width=width, file=io.StringIO())
        console.print(table)
        text = console.file.getvalue()  # type: ignore[attr-defined]
        assert "\N{HORIZONTAL ELLIPSIS}" not in text
        assert len(text.splitlines()) == 3 + 3 + 2, "a row of the table is one line"
        shown = set(range(10)) - {headings_of(results).index(heading) for heading in left_out}
        for cells in cells_of(results):
            assert any(line.split() == " ".join(cells[each] for each in sorted(shown)).split()
                       for line in text.splitlines())  # fmt: skip
        assert bool(left_out) == (width < 102)

    def test_what_no_strategy_knows_takes_no_column_of_a_terminal(self, tmp_path: Path) -> None:
        results = Results.load(run_folder(tmp_path, [entry("DiLoCo", accuracy=None)]))
        table, left_out = comparison_table(results).rich(200)
        assert [str(column.header) for column in table.columns][:3] == [
            "strategy",
            "to\nloss 0.3",
            "final\nloss",
        ]
        assert not left_out


class TestVerdict:
    def test_a_run_that_virtual_time_may_have_ended_is_not_said_to_have_done_all_steps(
        self, tmp_path: Path
    ) -> None:
        missed: dict[str, object] = {"virtual_seconds_to_target": None, "target": "missed"}
        entries = [entry("AllReduce", **missed), entry("DiLoCo", bytes_sent_per_worker=0, **missed)]
        text = verdict(Results.load(run_folder(tmp_path, entries, until="1 s"))).text
        span = "in 4 steps or 1 s of virtual time, whichever came first"
        assert f"No strategy reached loss 0.3 {span}, so there is no winner." in text
        assert f"DiLoCo sent nothing {span}:" in text

    def test_a_single_strategy_is_not_first(self, tmp_path: Path) -> None:
        text = verdict(Results.load(run_folder(tmp_path, [entry("DiLoCo")]))).text
        assert text.startswith("DiLoCo reaches loss 0.3, after 50 s of virtual time.")

    def test_a_site_stopped_before_its_first_message_is_not_called_silent(self, tmp_path: Path) -> None:
        entries = [entry("AllReduce"), entry("DiLoCo", bytes_sent_per_worker=0, incomplete=True)]
        assert "sent nothing" not in verdict(Results.load(run_folder(tmp_path, entries))).text

    def test_the_first_at_the_target_wins_and_the_reason_is_given(self, tmp_path: Path) -> None:
        decision = verdict(Results.load(run_folder(tmp_path, two())))
        assert decision.winner == "DiLoCo"
        assert decision.text == (
            "DiLoCo reaches loss 0.3 first, after 50 s of virtual time, 4x sooner than AllReduce (3.333 min). "
            "It sends 50 kB per worker (AllReduce: 1 MB) and its workers compute 50.0% of the time instead of 10.0%. "
            "This is one seed: run with --set seeds=3 to check it with others."
        )

    def test_a_close_second_and_a_lower_loss_are_reported(self, tmp_path: Path) -> None:
        entries = [*two(), entry("SPARTA", virtual_seconds_to_target=53.0, final_loss=0.1)]
        text = verdict(Results.load(run_folder(tmp_path, entries))).text
        assert "SPARTA is next with 53 s" in text
        assert "The lowest final loss is SPARTA's (0.1000 against 0.2000)." in text

    def test_a_lead_that_the_network_decides_is_none(self, tmp_path: Path) -> None:
        """The other protocol named the other strategy, with the same certainty."""
        entries = [*two(), entry("SPARTA", virtual_seconds_to_target=51.0)]
        decision = verdict(Results.load(run_folder(tmp_path, entries)))
        assert decision.winner is None
        assert decision.text.startswith(
            "DiLoCo (50 s) and SPARTA (51 s) reach loss 0.3 first and are equal: leads of less than 5% change with the "
            "protocol and with jitter. DiLoCo is 4x sooner than AllReduce (3.333 min). It sends 50 kB"
        )

    def test_no_strategy_reaches_the_target(self, tmp_path: Path) -> None:
        entries = [entry(name, virtual_seconds_to_target=None, final_loss=loss) for name, loss in
                   (("AllReduce", 0.5), ("DiLoCo", 0.6))]  # fmt: skip
        decision = verdict(Results.load(run_folder(tmp_path, entries)))
        assert decision.winner is None, "a winner holds the target"
        assert decision.text.startswith(
            "No strategy reached loss 0.3 in 4 steps, so there is no winner. AllReduce ends with the lowest"
        )

    def test_a_target_that_was_only_touched_is_not_called_unreached(self, tmp_path: Path) -> None:
        entries = [
            entry(name, target="touched", virtual_seconds_to_target=None) for name in ("AllReduce", "DiLoCo")
        ]
        text = verdict(Results.load(run_folder(tmp_path, entries))).text
        assert text.startswith(
            "No strategy held loss 0.3 in 4 steps, so there is no winner. AllReduce touched"
        )
        assert text.count("at least two later evaluations confirm it") == 1

    def test_without_a_network_nothing_is_said_of_time(self, tmp_path: Path) -> None:
        entries = two(virtual_seconds=None, virtual_seconds_to_target=None, final_loss=0.1)
        entries[0] |= {"virtual_seconds": None, "virtual_seconds_to_target": None}
        text = verdict(Results.load(run_folder(tmp_path, entries))).text
        assert text.startswith("DiLoCo ends with the lowest loss, 0.1000 (next: AllReduce, 0.2000).")
        assert "There is no topology" in text

    def test_one_strategy_is_no_comparison(self, tmp_path: Path) -> None:
        decision = verdict(Results.load(run_folder(tmp_path, [entry("DiLoCo")], target_loss=None)))
        assert decision.winner is None
        assert decision.text == "DiLoCo ends with a loss of 0.2000 after 100 s of virtual time."

    def test_one_that_is_left_of_several_says_so(self, tmp_path: Path) -> None:
        entries = [entry("DiLoCo"), entry("DeMo", incomplete=True, virtual_seconds_to_target=None)]
        decision = verdict(Results.load(run_folder(tmp_path, entries, target_loss=None)))
        assert decision.text.startswith(
            "Only DiLoCo ran to its end, with a loss of 0.2000: nothing to compare"
        )

    def test_the_evaluation_interval_is_printed_with_the_time(self, tmp_path: Path) -> None:
        """The time is that of an evaluation: nothing is interpolated, and how often it was looked is said."""
        text = verdict(Results.load(run_folder(tmp_path, two(), evaluate={"every": 10}))).text
        assert "after 50 s of virtual time (evaluated every 10 steps), 4x sooner" in text

    def test_a_strategy_that_touched_the_target_does_not_win(self, tmp_path: Path) -> None:
        entries = two(target="touched", virtual_seconds_to_target=None)
        entries[0]["target"] = "held"
        results = Results.load(run_folder(tmp_path, entries, target_loss=0.7))
        decision = verdict(results)
        assert decision.winner == "AllReduce"
        assert " DiLoCo touched loss 0.7 after 50 s but was not seen to hold it." in decision.text
        assert cells_of(results)[1][1] == "not held"

    def test_a_touched_target_is_not_held(self, tmp_path: Path) -> None:
        entries = two(target="touched", virtual_seconds_to_target=None)
        entries[0] |= {"target": "missed", "virtual_seconds_to_target": None}
        decision = verdict(Results.load(run_folder(tmp_path, entries, target_loss=0.7)))
        assert decision.winner is None
        assert "DiLoCo touched loss 0.7 after 50 s but was not seen to hold it." in decision.text

    def test_a_failed_strategy_is_reported_and_does_not_compete(self, tmp_path: Path) -> None:
        entries = [*two(), entry("DeMo", failed=True, error="rank 1: boom.", virtual_seconds_to_target=1.0)]
        results = Results.load(run_folder(tmp_path, entries))
        decision = verdict(results)
        assert decision.winner == "DiLoCo"
        assert decision.text.endswith(" DeMo failed: rank 1: boom.")
        assert cells_of(results)[2][0] == "DeMo (failed)"
        assert not results.incomplete

    def test_two_at_the_same_instant_are_no_winner(self, tmp_path: Path) -> None:
        entries = [entry("AllReduce"), entry("DeMo")]
        decision = verdict(Results.load(run_folder(tmp_path, entries)))
        assert decision.winner is None
        assert decision.text.startswith("There is no winner: no strategy alone reaches loss 0.3 first.")

    def test_stopped_and_diverged_strategies_do_not_compete(self, tmp_path: Path) -> None:
        entries = [entry("DiLoCo", incomplete=True), entry("DeMo", final_loss=float("nan"),
                   virtual_seconds_to_target=None)]  # fmt: skip
        decision = verdict(Results.load(run_folder(tmp_path, entries)))
        assert decision.winner is None
        assert decision.text.startswith("No strategy ran to its end")

    def test_ranks_that_never_communicated_are_named(self, tmp_path: Path) -> None:
        entries = [entry("AllReduce"), entry("DiLoCo", bytes_sent_per_worker=0)]
        text = verdict(Results.load(run_folder(tmp_path, entries))).text
        assert text.endswith(" DiLoCo sent nothing in 4 steps: the workers trained each on their own.")
        alone = verdict(Results.load(run_folder(tmp_path / "one", entries, workers={"count": 1}))).text
        assert "sent nothing" not in alone


PAYLOADS = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "\"'><svg/onload=alert(1)>",
    "</style><script>alert(1)</script>",
    "</pre><iframe src=//evil.example>",
    "{{ 7*7 }}",
    "{% include '/etc/passwd' %}",
    "$\\frac{1}{0}$",
    "javascript:alert(1)",
    "a\u202eb\x1b[31mc\x00",
    "<!--",
    "[bold]x[/bold] [link=http://evil.example]y[/link]",
    "<a href=javascript:alert(1)>x</a>",
    "<body onload=alert(1)>",
    "</title><script>alert(1)</script>",
    "<math><mtext></mtext><mglyph><style><!--</style><img title=--&gt;&lt;img src=1 onerror=alert(1)&gt;>",
    "<object data=data:text/html,x>",
    "<embed src=//evil.example>",
    "<link rel=stylesheet href=//evil.example>",
    "<meta http-equiv=refresh content=0;url=//evil.example>",
    "<base href=//evil.example>",
    "<form action=//evil.example><input autofocus onfocus=alert(1)>",
    "<svg><animate onbegin=alert(1) attributeName=x>",
    "<template><script>alert(1)</script></template>",
    "&lt;script&gt;alert(1)&lt;/script&gt;",
    "&#60;script&#62;",
    "x' onmouseover='alert(1)",
    'x" style="background:url(//evil.example)',
    "]]><script>alert(1)</script>",
    "\uff1cscript\uff1ealert(1)",
    "<scr\x00ipt>alert(1)</scr\x00ipt>",
    "\u2028<script>\u2029",
    "{{ ''.__class__.__mro__ }}",
    "{# note #}{{ self }}",
]


DRAWN = [PAYLOADS[0], "$\\frac{1}{0}$", "a\u202eb\x1b[31mc\x00"]
"""Of these the pictures are drawn too, where names stand in labels."""

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
    @pytest.mark.parametrize("target", [0, -1.0])
    def test_a_target_that_a_logarithmic_axis_cannot_show_is_left_out(
        self, tmp_path: Path, target: float
    ) -> None:
        """And leaves no warning, which would be an error here."""
        shown = RunReport(run_folder(tmp_path, two(), target_loss=target)).few()
        assert draw_pictures(shown, OF_ONE_RUN)

    @pytest.mark.parametrize(
        "payload",
        [pytest.param(each, marks=[pytest.mark.pictures] if each in DRAWN else []) for each in PAYLOADS],
    )
    def test_names_are_escaped(self, tmp_path: Path, payload: str, monkeypatch: pytest.MonkeyPatch) -> None:
        if payload not in DRAWN:  # drawing takes longer than all the rest
            monkeypatch.setattr(
                page_module, "draw_pictures", lambda *_: {"loss_against_time": Picture(b"wide", b"narrow")}
            )
        nic = {"hosts": 1, "nic": "1 Gbit/s"}
        network = {
            "name": "".join(filter(str.isprintable, payload)),
            "source": "".join(filter(str.isprintable, payload)),
            "regions": {"a": nic, "b": dict(nic)},
            "wan": [{"between": ["a", "b"], "bandwidth": "1 Gbit/s"}],
            "protocol": "ideal",
        }
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
        assert json.loads(text)["curves"]["curves"][0]["name"] == visible(payload, 60)

    @pytest.mark.parametrize("form", FORMATS)
    def test_figures_for_papers_are_the_same_every_time(self, tmp_path: Path, form: str) -> None:
        shown = RunReport(run_folder(tmp_path, two())).few()
        drawn = draw_figures(shown, OF_ONE_RUN, form)
        assert len(drawn) == 4
        assert drawn == draw_figures(shown, OF_ONE_RUN, form)

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
        assert "'gif' is none: give one or several of pdf,svg,png,latex" in capsys.readouterr().err

    def test_a_trace_is_linked(self, tmp_path: Path) -> None:
        folder = run_folder(tmp_path, two())
        (folder.path / "trace.json.gz").write_bytes(b"a trace")
        page = write_report(folder).read_text(encoding="utf-8")
        assert '<a href="trace.json.gz" download>' in page

    @pytest.mark.pictures
    def test_plots_are_written_and_rebuilt_alike(self, tmp_path: Path) -> None:
        folder = run_folder(tmp_path, two())
        write_report(folder)
        first = {path.name: path.read_bytes() for path in folder.path.rglob("*") if path.is_file()}
        assert {"loss_against_time.png", "loss_against_bytes.png", "where_the_time_went.png"} <= first.keys()
        write_report(folder)
        assert {path.name: path.read_bytes() for path in folder.path.rglob("*") if path.is_file()} == first

    @pytest.mark.pictures
    def test_without_virtual_time_only_bytes_are_drawn(self, tmp_path: Path) -> None:
        lacking = {"virtual_seconds": None, "virtual_seconds_to_target": None, "compute_utilisation": None}
        folder = run_folder(tmp_path, [entry("DiLoCo", **lacking)], timed=False)
        write_report(folder)
        assert [path.name for path in folder.path.glob("plots/*")] == ["loss_against_bytes.png"]

    def test_the_network_is_shown_as_a_matrix(self, tmp_path: Path) -> None:
        network = {
            "name": "two",
            "source": "made up",
            "regions": {
                "us": {"hosts": 2, "nic": "10 Gbit/s", "latency": "50 us"},
                "eu": {"hosts": 2, "nic": "10 Gbit/s", "latency": "50 us"},
            },
            "wan": [{"between": ["us", "eu"], "bandwidth": "800 Mbit/s", "rtt": "80 ms"}],
            "protocol": "ideal",
        }
        page = write_report(run_folder(tmp_path, two(), topology=network)).read_text(encoding="utf-8")
        assert "<td>800 Mbit/s\n40.1 ms</td>" in page

    def test_incomplete_runs_say_so(self, tmp_path: Path) -> None:
        folder = run_folder(tmp_path, [entry("DiLoCo", incomplete=True)])
        assert "Incomplete: this run was stopped" in write_report(folder).read_text(encoding="utf-8")

    @pytest.mark.parametrize("content", ["{", "3", '[{"name": 3}]', "[1]"])
    def test_a_damaged_summary_is_named(self, tmp_path: Path, content: str) -> None:
        folder = run_folder(tmp_path, two())
        folder.write_text("summary.json", content)
        with pytest.raises(InputError, match=r"summary\.json: "):
            write_report(folder)

    def test_the_head_says_how_it_was_run(self, tmp_path: Path) -> None:
        """Compute, protocol, jitter, seeds, placement and collectives were not on the page."""
        network = {
            "name": "two",
            "regions": {"us": {"hosts": 1, "nic": "1 Gbit/s"}, "eu": {"hosts": 2, "nic": "1 Gbit/s"}},
            "wan": [{"between": ["us", "eu"], "bandwidth": "800 Mbit/s", "rtt": "80 ms"}],
            "protocol": "ideal",
        }
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
            workers={"count": 4},
            evaluate={"every": 10},
        )
        seen = _Elements()
        seen.feed(write_report(folder).read_text(encoding="utf-8"))
        for figures in (
            "linux-tcp, streams 8",
            "50 ms a step, jitter 0.1",
            "eu: 3, us: 1 (4 workers on 3 hosts, up to 2 on one)",
            "10 steps",
            "all_reduce: tree",
            "all_reduce: ring, tree",
            "the outer parameters of the last round that ended",
            "80 s",
        ):
            assert figures in seen.text

    def test_a_long_source_is_not_cut(self, tmp_path: Path) -> None:
        source = "measured by somebody who wrote down everything about it " * 10
        network = {
            "name": "two",
            "source": source,
            "hosts": ["a", "b"],
            "links": [{"between": ["a", "b"], "bandwidth": "1 Gbit/s"}],
            "protocol": "ideal",
        }
        assert source.strip() in write_report(run_folder(tmp_path, two(), topology=network)).read_text(
            "utf-8"
        )

    @pytest.mark.parametrize("changes", [False, True])
    @pytest.mark.pictures
    def test_what_the_weather_did_is_drawn(self, tmp_path: Path, changes: bool) -> None:
        """An outage, a crash and a trace could not be seen: the page told of a constant bandwidth."""
        network: dict[str, object] = {
            "name": "two",
            "hosts": ["a", "b"],
            "links": [{"between": ["a", "b"], "bandwidth": "1 Gbit/s"}],
            "protocol": "ideal",
        }
        if changes:
            network["events"] = [{"at": "10 s", "link": ["a", "b"], "down": True, "for": "5 s"}]
        folder = run_folder(tmp_path, two(), topology=network)
        text = write_report(folder).read_text(encoding="utf-8")
        assert ("outages, crashes, traces" in text) == changes
        assert (folder.path / "plots/what_the_network_did.png").is_file() == changes


def test_strips_of_weather_hide_no_short_outage() -> None:
    columns = strip_columns([(0.0, 1.0), (50.0, 0.0), (50.001, 0.5)], 100.0)
    half = len(columns) // 2
    assert set(columns[:half]) == {1.0}
    assert columns[half] == 0.0
    assert set(columns[half + 1 :]) == {0.5}


def test_ticks_of_a_logarithmic_axis_are_few_and_reach_to_its_end() -> None:
    for linear, end in ((1.0, 330.0), (0.2, 1e6), (5.0, 70.0)):
        ticks = log_ticks(linear, end)
        assert ticks[0] == 0.0
        assert len(ticks) <= 10
        assert end / 10 <= ticks[-1] <= end


@pytest.mark.pictures
def test_a_page_of_forty_strategies_has_room_for_their_names(tmp_path: Path) -> None:
    """Pictures grow with the legend: a warning of matplotlib's would fail this."""
    folder = run_folder(tmp_path, [entry(f"strategy {number}") for number in range(40)])
    assert "strategy 39" in write_report(folder).read_text()


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
        folder.write_strategy(str(each["name"]), train, validation, None)
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


def test_a_real_run_names_no_simulated_network(tmp_path: Path) -> None:
    """The topology of its file was not used: neither the facts nor the paragraph for a paper may claim it."""
    real = [{**each, "virtual_seconds": None, "wall_seconds": 100.0} for each in two()]
    topology = Topology.load("wan-4-regions").to_mapping()
    folder = run_folder(tmp_path, real, timed=False, topology=topology, workers={"count": 4})
    results = Results.load(folder)
    facts = dict(head_facts(results))
    assert facts["network"] == "the real one; seconds are by the clock"
    assert not {"protocol", "collectives", "compute", "placement"} & set(facts)
    assert "Communication went over a real network, and all times are by the clock." in methods(results)
    assert "simulation" not in methods(results)


def test_the_paragraph_on_methods_has_the_options_of_model_and_task(tmp_path: Path) -> None:
    """Width and depth of a model, and the length of samples, belong to what a reader needs to repeat it."""
    folder = run_folder(
        tmp_path,
        two(),
        model={"name": "gpt", "preset": "byte", "width": 32},
        task={"name": "text", "block_size": 16},
    )
    paragraph = methods(Results.load(folder))
    assert "the model gpt (preset byte, width 32) on the task text (block_size 16)" in paragraph


def test_a_table_for_latex_has_every_strategy_and_escapes_names(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, [*two(), entry("a_b & 5%", final_loss=None)])
    assert main(["report", str(folder.path), "--format", "latex"]) == 0
    text = (folder.path / "plots" / "table.tex").read_text()
    assert r"a\_b \& 5\%" in text
    (widths,) = re.findall(r"begin{tabular}{(lr*)}", text)
    rows = [line for line in text.splitlines() if line.endswith(r" \\")]
    assert len(rows) == 4
    assert {len(re.findall(r"(?<!\\)&", row)) for row in rows} == {len(widths) - 1}
    assert text.count("{") == text.count("}")
    methods = (folder.path / "plots" / "methods.tex").read_text()
    assert methods.startswith("2 workers trained on the task ")
    assert "The target loss of 0.3 counts from the first evaluation" in methods
    assert "<h2>Methods</h2>\n<p>2 workers trained on the task " in (folder.path / "report.html").read_text()


def test_tokens_to_the_target_are_a_column_of_tasks_that_have_tokens(tmp_path: Path) -> None:
    results = Results.load(
        run_folder(tmp_path, two(), target_loss=2.0, task={"name": "text", "block_size": 64})
    )
    assert headings_of(results)[-1] == "tokens to target"
    first, second = results.strategies
    train = [{"step": float(step), "examples_trained": 16.0 * step} for step in range(1, 5)]
    validation = [{"step": 2.0, "judged_loss": 2.5}, {"step": 4.0, "judged_step": 3.0, "judged_loss": 1.9}]
    run = replace(first.runs[0], target="held", train=train, validation=validation)
    measured = replace(results, strategies=[replace(first, runs=[run]), second])
    assert cells_of(measured)[0][-1] == "3.07k", "16 samples a step, 3 steps, 64 tokens a sample"
    assert "tokens to target" not in headings_of(replace(results, settings={"target_loss": 2.0}))


def test_seconds_too_small_for_the_use_of_links_leave_it_out() -> None:
    rows = [{"virtual_seconds": 0.0, "a->b": 0.0}, {"virtual_seconds": 1e-320, "a->b": 1e20}]
    topology = {
        "name": "two",
        "hosts": ["a", "b"],
        "links": [{"between": ["a", "b"], "bandwidth": "1 Mbit/s", "latency": "1 ms"}],
        "protocol": "ideal",
    }
    assert link_use([("AllReduce", rows)], topology) == []


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
