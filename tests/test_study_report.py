"""Several runs on one page: groups by any key, intervals over seeds, a sentence that seeds support."""

from __future__ import annotations

import csv
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from worlds import chain_form

from exogym_core import load_runs
from exogym_core.results.fit_result import FitResult
from exogym_core.results.reading import value_key, value_texts
from exogym_core.results.report import RunReport
from exogym_core.results.run_folder import RunFolder
from exogym_core.results.seeds import paired_interval, t_interval
from netgym.cli.main import main
from netgym.experiment.experiment import apply_overrides
from netgym.studies.report import StudyReport
from netsim.errors import InputError
from netsim.files.documents import Document

NETWORK = chain_form("xy", "1 Gbit/s", "0 s")


def test_intervals_of_known_values() -> None:
    """Three times of a run, for which the least and the greatest were given as the interval of their mean."""
    assert t_interval([5.11, 5.0, 7.66]) == pytest.approx((2.18, 9.66), abs=0.01)
    assert t_interval([0.0, 2.0]) == pytest.approx((-11.706, 13.706))
    assert t_interval([3.0] * 10) == (3.0, 3.0)
    assert t_interval([1.0]) is None
    assert t_interval([1.0, math.inf]) is None
    assert paired_interval([1.0, 101.0], [0.0, 100.0]) == (1.0, 1.0), "what seeds share is no doubt"


@pytest.mark.parametrize("count", [2, 3, 4, 5, 6, 7, 11, 31, 201])
def test_intervals_are_student_s(count: int) -> None:
    stats = pytest.importorskip("scipy.stats")
    values = [float(place * place % 17) for place in range(count)]
    error = stats.tstd(values) / math.sqrt(count)
    expected = stats.t.interval(0.95, count - 1, loc=math.fsum(values) / count, scale=error)
    assert t_interval(values) == pytest.approx(expected, rel=2e-3, abs=2e-3)


def write_run(folder: Path, times: dict[str, list[float]], **settings: Any) -> Path:
    """A run folder of strategies that reach the target at these virtual seconds, one a seed."""
    seeds = settings.get("seeds", list(range(len(next(iter(times.values()))))))
    run = RunFolder.create(folder, "run")
    strategies = [{"name": name, "H": 4} for name in times]
    settings = {"task": {"name": "digits"}, "workers": {"count": 1}, "steps": 2, "batch_size": 8} | settings
    if "topology" in settings:
        settings["topology"] = NETWORK | settings["topology"]
    run.write_text("experiment.yaml", yaml.safe_dump({"strategies": strategies, "seeds": seeds, **settings}))
    entries = []
    for name, values in times.items():
        by_seed = [
            {
                "seed": seed,
                "final_loss": value / 10,
                "virtual_seconds_to_target": value,
                "target": "held",
                "bytes_sent_per_worker": 8,
                "wan_bytes": 4,
            }
            for seed, value in zip(seeds, values, strict=True)
        ]
        entries.append({"name": name, "seeds": seeds, "by_seed": by_seed})
        for seed, value in zip(seeds, values, strict=True):
            rows = [
                {"step": s, "virtual_seconds": s * value, "bytes_sent": 8 * s, "examples_trained": 8 * s}
                for s in (1, 2)
            ]
            looks = [{"step": s, "judged_loss": 1 / (1 + s), "judged_step": s} for s in (0, 1, 2)]
            run.write_result(name, FitResult(history=rows, validation=looks), seed=seed)
    run.write_summary(entries)
    run.release()
    return folder


def test_a_winner_is_named_where_pairs_of_seeds_support_it(tmp_path: Path) -> None:
    """Seeds differ by far more than strategies do, but equally for both: that is reported. Noise of its own is not."""
    path = write_run(tmp_path / "clear", {"A": [1.0, 50.0, 100.0], "B": [11.0, 61.5, 110.0]})
    report = StudyReport([path])
    assert [group.name for group in report.winners] == ["A"]
    assert report.verdict == (
        "A comes first (50.33 s to the target), 1.21x sooner than B (60.83 s); the difference is 8.348 s to 12.65 s "
        "(95 % t interval over 3 seeds in common)."
    )
    path = write_run(tmp_path / "split", {"A": [1.0, 5.0, 9.0], "B": [2.0, 4.0, 12.0]})
    report = StudyReport([path])
    assert report.winners == []
    assert "but the order is uncertain" in report.verdict
    path = write_run(tmp_path / "one", {"A": [1.0], "B": [2.0]}, seed=0)
    assert "one seed in common does not show how much seeds differ" in StudyReport([path]).verdict


def test_groups_of_equal_times_come_first_together(tmp_path: Path) -> None:
    report = StudyReport([write_run(tmp_path / "equal", {"A": [1.0, 2.0], "B": [2.0, 1.0], "C": [2.0, 2.0]})])
    assert report.winners == []
    assert report.verdict == "A and B come first together (1.5 s to the target)."


def test_a_lead_that_evaluations_cannot_tell_is_none(tmp_path: Path) -> None:
    """Each seed had the same order, by less than the time from one evaluation to the next."""
    times = {"A": [8.0, 8.1, 8.2], "B": [9.0, 9.1, 9.2]}
    report = StudyReport([write_run(tmp_path / "coarse", times, target_loss=0.5)])
    assert report.winners == []
    assert report.verdict == (
        "A comes first (8.1 s to the target), 1.12x sooner than B (9.1 s), but they are equal: the lead is below the "
        "time between evaluations, which is up to 9.1 s."
    )
    times = {"A": [8.0] * 3, "B": [9.0] * 3}
    report = StudyReport([write_run(tmp_path / "same", times, target_loss=0.5)])
    assert report.groups[0].cells()[0] == "8.000 s [0.000, 8.000]", (
        "it was reached since the evaluation before"
    )
    assert report.decisions[0].interval == (-8.0, 9.0)
    close = {"A": [8.0, 8.1, 8.2], "B": [8.3, 8.4, 8.5]}
    report = StudyReport([write_run(tmp_path / "close", close)])
    assert report.winners == []
    assert report.verdict.endswith(
        "are equal: leads of less than 5% change with the protocol and with jitter."
    )


def test_points_of_a_sweep_are_named_by_their_values(tmp_path: Path) -> None:
    """Each was called by its topology, `star`, and that three times."""
    swept = {"topology.links.{*}.bandwidth": ["50 Mbit/s", "1 Gbit/s"], "strategies.*.lr": [0.1]}
    sweep = RunFolder.create(tmp_path / "sweep", "sweep")
    sweep.write_text("experiment.yaml", yaml.safe_dump({"sweep": swept}))
    entries = []
    for number, rate in enumerate(swept["topology.links.{*}.bandwidth"]):
        point = chain_form("xy", rate, "0 s")
        times = {"A": [1.0, 1.1, 1.2], "B": [3.0, 3.1, 3.2]}
        (tmp_path / "sweep/points").mkdir(exist_ok=True)
        write_run(tmp_path / f"sweep/points/{number}", times, topology=point)
        entries.append(
            {"name": str(number), "point": {"topology.links.{*}.bandwidth": rate, "strategies.*.lr": 0.1}}
        )
    sweep.write_summary(entries)
    report = StudyReport([tmp_path / "sweep"])
    assert report.table.headings[:2] == ["bandwidth", "strategy"]
    assert report.verdict.startswith(
        "bandwidth 50 Mbit/s: A comes first (1.1 s to the target), 2.82x sooner than B (3.1 s);"
    )
    assert (
        "\nbandwidth 1 Gbit/s: A comes first (1.1 s to the target), 2.82x sooner than B (3.1 s);"
        in report.verdict
    )
    assert "topology" not in report.verdict
    told = r"differ in topology.links.\{\*\}.bandwidth \(50 Mbit/s, 1 Gbit/s\)"  # which no resolved file has
    with pytest.raises(InputError, match=told):
        StudyReport([tmp_path / "sweep"], by=["topology"])
    assert main(["report", str(tmp_path / "sweep"), "--by", "topology, topology.links.{*}.bandwidth"]) == 0
    sweep.write_summary([entry | {"point": {}} for entry in entries])
    with pytest.raises(InputError, match="add --group-by point"):
        StudyReport([tmp_path / "sweep"], by=["topology"])


PLAIN = st.none() | st.booleans() | st.integers(0, 2) | st.floats(0, 2) | st.sampled_from(["A", "B"])
NAMED = st.fixed_dictionaries(
    {"name": st.sampled_from("AB")}, optional={"H": PLAIN, "lr": PLAIN, "label": st.just("A")}
)


@given(
    st.lists(st.recursive(PLAIN | NAMED, lambda inner: st.lists(inner, max_size=2), max_leaves=3), max_size=8)
)
def test_different_values_of_a_sweep_have_different_texts(values: list[Any]) -> None:
    texts = value_texts(values)
    assert texts.keys() == set(map(value_key, values))
    assert len(set(texts.values())) == len(texts)


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        (
            [{"strategies": [{"name": "A", "H": number}, "B"]} for number in (2, 4)],
            ["A(H=2)+B, A", "A(H=2)+B, B", "A(H=4)+B, A", "A(H=4)+B, B"],
        ),
        ([{"steps": 2}, {"batch_size": 8}], ["0, A", "0, B", "1, A", "1, B"]),
    ],
    ids=["values of one name", "one experiment"],
)
def test_points_that_look_alike_are_groups_of_their_own(
    points: list[Any], expected: list[str], tmp_path: Path
) -> None:
    """All had been trained when the page was refused."""
    sweep = RunFolder.create(tmp_path / "sweep", "sweep")
    sweep.write_text("experiment.yaml", "sweep: {}")
    (tmp_path / "sweep/points").mkdir()
    for number in range(2):
        write_run(tmp_path / f"sweep/points/{number}", {"A": [1.0, 1.1], "B": [3.0, 3.1]})
    sweep.write_summary([{"name": str(number), "point": point} for number, point in enumerate(points)])
    report = StudyReport([tmp_path / "sweep"])
    assert sorted(group.name for group in report.groups) == expected


def test_networks_are_no_replicates(tmp_path: Path) -> None:
    """Nine runs of three seeds were pooled as nine: the interval shrank with no new information."""
    for name in ("x", "y", "z"):
        write_run(tmp_path / name, {"A": [1.0, 2.0], "B": [3.0, 4.0]}, topology=NETWORK | {"name": name})
    with pytest.raises(InputError) as caught:
        StudyReport([tmp_path], by=["strategy"])
    assert str(caught.value) == (
        "--group-by strategy: A holds runs that differ in topology (x, y, z), and only seeds are replicates: add "
        "--group-by topology, or --where topology=x"
    )
    report = StudyReport([tmp_path], by=["strategy"], where=["topology=y"])
    assert [group.cells()[0] for group in report.groups] == [
        "1.500 s [-4.853, 7.853]",
        "3.500 s [-2.853, 9.853]",
    ]
    write_run(tmp_path / "x-again", {"A": [1.0, 2.0]}, topology=NETWORK | {"name": "x"})
    with pytest.raises(
        InputError, match=r"A holds seed 0 more than once \(in x, x-again\), which adds no evidence"
    ):
        StudyReport([tmp_path], by=["strategy"], where=["topology=x"])
    summary = tmp_path / "y/summary.json"
    # As of FedAvg's islands once.
    text = summary.read_text().replace('"seed": 0', '"seed": 0, "judged": "own"')
    summary.write_text(text.replace('"seed": 1', '"seed": 1, "judged": "replica"'))
    with pytest.raises(InputError, match=r"differ in the judged model \(own, replica\)"):
        StudyReport([tmp_path / "y"])


def test_networks_are_compared_by_their_content(tmp_path: Path) -> None:
    """Equal networks that a changed key had named were no replicates, and others of one name were."""
    same = chain_form("xy", "1000 Mbit/s", "0 s") | {"name": "chain with links.0.bandwidth 1000 Mbit/s"}
    for seed, network in enumerate([NETWORK, same, chain_form("xy", "50 Mbit/s", "0 s")]):
        write_run(tmp_path / f"{seed}", {"A": [1.0]}, topology=network, seeds=[seed])
    (group,) = StudyReport([tmp_path / "0", tmp_path / "1"], by=["strategy"]).groups
    assert len(group.runs) == 2
    with pytest.raises(InputError, match=r"differ in topology \(.*\), .* replicates: add --group-by run$"):
        StudyReport([tmp_path / "0", tmp_path / "2"], by=["topology"])


def test_a_group_with_a_diverged_seed_does_not_compete(tmp_path: Path) -> None:
    """Its mean was that of the seeds that did not diverge, and so it came first."""
    path = write_run(tmp_path / "x", {"A": [1.0, 2.0, 3.0], "B": [4.0, 5.0, 6.0]}, topology=NETWORK)
    entries = RunFolder(path).read_summary()
    for entry in entries:
        for run in entry["by_seed"]:
            run |= {"target": None, "virtual_seconds_to_target": None}
    entries[0]["by_seed"][2]["final_loss"] = None
    RunFolder(path).write_summary(entries)
    report = StudyReport([path])
    assert report.winners == []
    assert report.verdict == (
        "B: 0.5000 final loss; nothing to compare it with. Not every run of A ended with a finite loss, so it does not "
        "compete."
    )
    assert [group.values for group in report.groups] == [("B",), ("A",)]
    assert report.groups[1].cells()[2] == "0.1500 [-0.4853, 0.7853] (1 of 3 not finite)"


def test_each_network_has_its_own_winner_and_missed_targets_are_named(tmp_path: Path) -> None:
    """The sentence compared one strategy on two networks, and named no strategy that missed the target."""
    write_run(tmp_path / "1", {"A": [1.0, 2.0], "B": [3.0, 4.1]}, topology=NETWORK | {"name": "x"})
    write_run(tmp_path / "2", {"A": [9.0, 8.0], "B": [3.0, 2.2]}, topology=NETWORK | {"name": "y"})
    report = StudyReport([tmp_path], by=["topology"])
    assert report.verdict == (
        "topology x: A comes first (1.5 s to the target), 2.37x sooner than B (3.55 s); the difference is 1.415 s to "
        "2.685 s (95 % t interval over 2 seeds in common).\ntopology y: B comes first (2.6 s to the target), 3.27x "
        "sooner than A (8.5 s); the difference is 4.629 s to 7.171 s (95 % t interval over 2 seeds in common).\n"
        "No strategy is first under all of these."
    )
    assert [group.name for group in report.winners] == ["x, A", "y, B"]
    assert [cells for _, cells in report.firsts.rows] == [
        ["topology x", "A", "1.5 s", "B", "2.05 s (2.37x)", "yes"],
        ["topology y", "B", "2.6 s", "A", "5.9 s (3.27x)", "yes"],
    ]
    decision = report.decisions[1].plain()
    assert (decision["first"], decision["second_value"], decision["is_certain"]) == ("y, B", 8.5, True)
    assert [group.name for group in report.groups] == ["x, A", "x, B", "y, B", "y, A"], (
        "a network's are together"
    )
    assert re.findall(r"textbf{(.)} & \\textbf{(.)} &", report.table.latex("")) == [("x", "A"), ("y", "B")]
    missed = write_run(tmp_path / "3", {"A": [1.0, 2.0], "B": [3.0, 4.0], "C": [5.0, 6.0]})
    entries = RunFolder(missed).read_summary()
    entries[1]["by_seed"][0] |= {"target": "missed", "virtual_seconds_to_target": None}
    for run in entries[2]["by_seed"]:
        run |= {"target": "missed", "virtual_seconds_to_target": None}
    RunFolder(missed).write_summary(entries)
    report = StudyReport([missed])
    assert report.verdict == (
        "A comes first (1.5 s to the target), alone. B (held by 1 of 2 runs), C did not hold the target."
    )
    assert [group.name for group in report.winners] == ["A"]
    by_steps = StudyReport([missed], by=["steps"])
    steps = by_steps.groups[0].values[0]
    assert by_steps.verdict.endswith(
        f"alone. {steps}, B (held by 1 of 2 runs); {steps}, C did not hold the target."
    ), "commas inside names are no ends of names"


_LATEX = re.compile(
    r"\\(?P<command>[a-z]+[0-9]*)\{\}|\\(?P<escaped>[&%$#_{}])|\{(?P<braced>[\[\]*`]?)\}|\$(?P<maths>\\pm|[<>])\$"
    r"|(?P<plain>[^\\&%$#_{}~^<>|\"\[\]*`\x00-\x1f])"
)
_COMMANDS = {
    **{"textbackslash": "\\", "textasciitilde": "~", "textasciicircum": "^", "textbar": "|"},
    **{"char34": '"', "\\pm": "\N{PLUS-MINUS SIGN}"},
}


def read_latex(text: str) -> str:
    """The text that LaTeX would print; whatever it would take for more than text is an error here."""
    assert "--" not in text, "printed as one dash"
    parts, place = [], 0
    while place < len(text):
        part = _LATEX.match(text, place)
        assert part is not None, text[place:]
        found = next(each for each in part.groups() if each is not None)
        parts.append(_COMMANDS.get(found, found))
        place = part.end()
    return "".join(parts)


def test_every_table_for_latex_prints_its_cells(tmp_path: Path) -> None:
    """pdflatex stopped at names that begin with a bracket: `\\\\` takes it for a length."""
    hostile = yaml.safe_load(Path(__file__).with_name("hostile.yaml").read_text(encoding="utf-8"))
    names = ["[bold]", "*", "a -- b --- c", "``q''", *hostile["markup"]]
    settings = {"task": {"name": "text", "block_size": 8}, "workers": {"count": 4}}
    times = {name: [1.0 + place, 2.5 + place] for place, name in enumerate(names)}
    one = write_run(tmp_path / "o_n&e", times, target_loss=0.3, **settings)
    others = [write_run(tmp_path / name, times, topology={"name": name}, **settings) for name in "xy"]
    for report in (RunReport(RunFolder(one)), StudyReport([one]), StudyReport(others)):
        table, text = report.table.filled(), report.table.latex(report.caption)
        (caption,) = re.findall(r"^  \\caption\{(.*)\}$", text, re.M)
        assert read_latex(caption) == report.caption
        (align,) = re.findall(r"begin\{tabular\}\{([lr]+)\}", text)
        lines = [line.removesuffix(r" \\").strip() for line in text.splitlines() if line.endswith(r" \\")]
        rows = [re.split(r"(?<!\\)&", re.sub(r"\\textbf\{(.*?)\}(?= &|$)", r"\1", line)) for line in lines]
        assert {len(row) for row in rows} == {len(align)}
        cells = [[read_latex(cell.strip()) for cell in row] for row in rows]
        assert cells == [list(table.headings), *([each.strip() for each in cells] for _, cells in table.rows)]
        bare = re.sub(r"\\.", "", text)
        assert bare.count("{") == bare.count("}")


def test_runs_are_grouped_and_filtered_by_any_key(tmp_path: Path) -> None:
    folders = [
        write_run(
            tmp_path / "a", {"A": [1.0, 2.0], "B": [3.0, 4.0]}, workers={"count": 4}, topology={"name": "x"}
        ),
        write_run(
            tmp_path / "b", {"A": [5.0, 6.0], "B": [7.0, 8.0]}, workers={"count": 8}, topology={"name": "y"}
        ),
    ]
    report = StudyReport(folders)
    assert report.keys == ["run", "strategy"]
    assert [group.values for group in report.groups] == [("a", "A"), ("a", "B"), ("b", "A"), ("b", "B")]
    assert report.table.rows[0][1] == [
        "a",
        "A",
        "1.500 s [-4.853, 7.853]",
        "2 of 2",
        "0.1500 [-0.4853, 0.7853]",
        "2",
        "-",
        "8 B",
        "4 B",
        "-",
    ]
    report = StudyReport([tmp_path], by=["workers.count"], where=["strategy=B", "topology=y"])
    assert [group.values for group in report.groups] == [("8", "B")]
    report = StudyReport(folders, by=["strategies.*.H"], where=["run=a"])
    assert [group.values for group in report.groups] == [("4", "A"), ("4", "B")]
    with pytest.raises(InputError, match="--group-by nothing: no run has such a key"):
        StudyReport(folders, by=["nothing"])
    with pytest.raises(InputError, match="--where strategy=C: no run has it: strategy is A, B"):
        StudyReport(folders, where=["strategy=C"])


def test_several_runs_have_tokens_to_target_and_one_paragraph_on_methods(tmp_path: Path) -> None:
    """Both were of single runs alone."""
    model, task = {"name": "gpt", "preset": "byte", "width": 32}, {"name": "text", "block_size": 1000}
    common: dict[str, Any] = {"model": model, "task": task, "target_loss": 0.5}
    folders = [
        write_run(tmp_path / name, {"A": [1.0, 2.0], "B": [3.0, 4.0]}, **common, **given)
        for name, given in (("one", {}), ("two", {"topology": {"name": "far"}}))
    ]
    report = StudyReport(folders, by=["run"], where=["strategy=A"])
    assert report.table.headings[-1] == "tokens to target"
    assert [cells[-1] for _, cells in report.table.rows] == ["8k [8k, 8k]"] * 2
    assert report.methods.startswith(
        "1 worker trained the model gpt (preset byte, width 32) on the task text (block_size 1000) for 2 steps "
        "with 8 samples per worker and step, with the "
        "seeds 0, 1. Strategies and their settings: A (H 4); other options at their defaults. "
    )
    assert report.methods.count("simulation of the network far") == 1
    assert report.methods.count("The target loss of 0.5 counts") == 1
    assert f"<h2>Methods</h2>\n<p>{report.methods}</p>" in report.html()
    folders.append(write_run(tmp_path / "near", {"A": [1.0, 2.0]}, topology={}, protocol={"streams": 8}))
    text = StudyReport(folders, by=["run"]).methods
    assert "simulations of 2 networks and settings; collective algorithms: auto; " in text
    assert "(2) chain (protocol: linux-tcp, streams 8)" in text, "the preset is named"


def test_a_changed_network_is_named_by_what_was_changed() -> None:
    """Ten megabits a second were on no page."""
    document = Document("file", {"topology": "two-datacenters"})
    for value in ("1 Gbit/s", "10 Mbit/s"):  # the later one replaces the earlier
        document = apply_overrides(
            document, [f"topology.wan.0.bandwidth={value}", "topology.regions.east.hosts=8"]
        )
    assert document.data["topology"]["name"] == (
        "two-datacenters with wan.0.bandwidth 10 Mbit/s; regions.east.hosts 8"
    )


def test_the_page_is_the_same_every_time_and_its_groups_are_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [
        write_run(tmp_path / name, {"A": [1.0, 2.0]}, topology=NETWORK | {"name": name})
        for name in ("a", "b")
    ]
    page = tmp_path / "page.html"
    arguments = ["report", *map(str, folders), "--out", str(page)]
    assert main(arguments) == 0
    text = page.read_text()
    capsys.readouterr()
    assert main([*arguments, "--json"]) == 0
    assert page.read_text() == text
    document = json.loads(capsys.readouterr().out)
    assert {group["run"] for group in document["groups"]} == {"a", "b"}
    assert main(["report", str(folders[0]), "--group-by", "topology", "--out", str(page)]) == 0
    assert "A comes first" not in page.read_text(), "one run can be grouped too"
    capsys.readouterr()
    assert main(["report", str(tmp_path / "nothing"), str(folders[0])]) == 2
    assert "there is no such folder" in capsys.readouterr().err


@pytest.mark.parametrize("align", ["time", "steps", "bytes"])
def test_curves_can_be_aligned_by_time_steps_and_bytes(tmp_path: Path, align: str) -> None:
    write_run(tmp_path / "a", {"A": [1.0, 2.0], "B": [3.0, 4.0]})
    page = tmp_path / "page.html"
    assert main(["report", str(tmp_path), "--align", align, "--out", str(page), "--where", "strategy=B"]) == 0
    data = json.loads(re.findall(r"id=\"data\">(.*?)</script>", page.read_text(), re.S)[0])["curves"]
    assert data["align"] == align
    (drawn,) = data["curves"]
    assert drawn["name"] == "B"
    assert drawn["measures"]["loss"] == {
        "steps": [0, 1, 2],
        "time": [0, 3.5, 7],
        "bytes": [0, 8, 16],
        "value": [1, 0.5, 0.333333],
        "least": [1, 0.5, 0.333333],
        "most": [1, 0.5, 0.333333],
    }


def test_load_runs_gives_a_row_an_evaluation(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    write_run(tmp_path / "a", {"A": [1.0, 2.0], "B": [3.0, 4.0]})
    frame = load_runs(tmp_path / "a")
    assert len(frame) == 2 * 2 * 3
    assert list(frame.columns[:5]) == ["run", "point", "strategy", "seed", "step"]
    row = frame[(frame.strategy == "B") & (frame.seed == 1) & (frame.step == 2)].iloc[0]
    assert (row.judged_loss, row.bytes_sent, row.virtual_seconds_to_target) == (pytest.approx(1 / 3), 16, 4.0)
    assert len(load_runs(tmp_path)) == len(frame), "a folder of runs"
    with pytest.raises(InputError, match="there is no such folder"):
        load_runs(tmp_path / "nothing")


def test_parquet_holds_what_the_csv_does(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    from exogym_core.results.reading import find_runs, tidy_rows, write_tables

    path = write_run(tmp_path / "a", {"A": [1.0, 2.0]})
    written = write_tables(RunFolder(path), tidy_rows(find_runs([path])))
    assert [file.name for file in written] == ["results.csv", "results.parquet"]
    table = parquet.read_table(written[1])
    with written[0].open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert table.column_names == list(rows[0])
    assert [float(row["judged_loss"]) for row in rows] == table["judged_loss"].to_pylist()


def test_a_page_replaces_no_file_of_another_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It replaced the summary of the run that it was made of."""
    write_run(tmp_path / "a", {"A": [1.0]}, seed=0)
    summary = tmp_path / "a/summary.json"
    before = summary.read_bytes()
    assert main(["report", str(tmp_path / "a"), "--out", str(summary)]) == 2
    refused = f"{summary}: is there and is no .html file: choose another name"
    assert capsys.readouterr().err == f"error: {refused}\n"
    assert summary.read_bytes() == before


def test_tables_are_written_where_figures_have_too_many_groups(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--format latex,png` of nine groups gave nothing."""
    path = write_run(tmp_path / "run", {name: [1.0] for name in "ABCDEFGHI"})
    page = tmp_path / "page" / "report.html"
    assert main(["report", str(path), "--group-by", "run", "--format", "latex,png", "--out", str(page)]) == 2
    line = " ".join(capsys.readouterr().err.split())
    assert (
        "--format png: a figure shows 8 groups at most, and there are 9: choose with --where KEY=VALUE"
        in line
    )
    assert page.is_file()
    assert sorted(each.name for each in (page.parent / "plots").iterdir()) == ["methods.tex", "table.tex"]
