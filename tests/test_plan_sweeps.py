"""Sweeps of plans: their reports, and that points share work."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from experiments import json_of

from netgym.cli.main import main
from netgym.planning.sweep import break_even, placed, sooner_throughout, step_ratio_lines

WORDS = (
    "plan --model llama-2m --sequence 64 --strategy DiLoCo --strategy AllReduce --topology wan-4-regions --workers 4 "
    "--device h100 --tokens 1B --protocol linux-tcp"
)
TOPOLOGY = "name: near\nregions:\n  here: {hosts: 4, nic: 10 Gbit/s, latency: 50 us}\n"
LENGTH = "strategies.DiLoCo.H"
CODEC, BANDWIDTH = "strategies.DiLoCo.codec", "wan.bandwidth"


def row(strategy: str, tokens_per_second: float, **point: str) -> dict[str, Any]:
    named = {"codec": CODEC, "bandwidth": BANDWIDTH, "streams": "protocol.streams"}
    swept = {named[name]: value for name, value in point.items()}
    return {"strategy": strategy, "tokens_per_second": tokens_per_second, "point": swept}


def test_variants_of_one_strategy_break_even_too() -> None:
    """int8 is sooner on narrow lines and fp32 on wide ones; AllReduce is compared with both, and not with itself."""
    rows = [
        row("DiLoCo", 1.0, codec="fp32", bandwidth="1 Gbit/s"),
        row("DiLoCo", 2.0, codec="int8", bandwidth="1 Gbit/s"),
        row("DiLoCo", 4.0, codec="fp32", bandwidth="100 Gbit/s"),
        row("DiLoCo", 2.0, codec="int8", bandwidth="100 Gbit/s"),
        *(
            row("AllReduce", 1.5, codec=c, bandwidth=b)
            for c in ("fp32", "int8")
            for b in ("1 Gbit/s", "100 Gbit/s")
        ),
    ]
    lines = break_even(rows, BANDWIDTH)
    assert [(line["first"], line["second"]) for line in lines] == [
        ("DiLoCo codec=fp32", "DiLoCo codec=int8"),
        ("DiLoCo", "AllReduce"),
    ]
    variants, others = lines
    assert variants["at"] == pytest.approx(1e10)  # half-way, on the logarithm
    assert (variants["sooner_below"], variants["sooner_above"]) == ("DiLoCo codec=int8", "DiLoCo codec=fp32")
    assert (others["sooner_above"], others["point"]) == ("DiLoCo", {CODEC: "fp32"})
    assert sooner_throughout(rows, BANDWIDTH) == [
        {"sooner": "DiLoCo", "later": "AllReduce", "key": BANDWIDTH, "point": {CODEC: "int8"}}
    ]


def test_ratios_of_steps_are_reported_where_what_is_learned_differs() -> None:
    """Two codecs may need other numbers of steps; two numbers of streams do not."""
    rows = [
        row("DiLoCo", 1.0, codec="fp32", streams="1"),
        row("DiLoCo", 3.0, codec="int8", streams="1"),
        row("DiLoCo", 2.0, codec="fp32", streams="8"),
    ]
    assert step_ratio_lines(rows) == [
        {
            "faster": "DiLoCo codec=int8",
            "slower": "DiLoCo codec=fp32",
            "steps_ratio": 3.0,
            "point": {"protocol.streams": "1"},
        }
    ]


def test_plans_for_money_are_compared_by_what_the_money_buys() -> None:
    """The sooner of two has fewer tokens where its links charge for traffic."""
    rows = [
        {**row("DiLoCo", speed, bandwidth=at), "tokens": tokens, "tokens_low": 0.9 * tokens}
        for at, speed, tokens in (("1 Gbit/s", 2.0, 10.0), ("100 Gbit/s", 4.0, 10.0))
    ]
    rows += [
        {**row("AllReduce", 1.0, bandwidth=at), "tokens": tokens, "tokens_low": 0.9 * tokens}
        for at, tokens in (("1 Gbit/s", 5.0), ("100 Gbit/s", 20.0))
    ]
    (line,) = break_even(rows, BANDWIDTH)
    assert (line["at"], line["sooner_above"]) == (pytest.approx(1e10), "AllReduce")
    assert [(each["faster"], each["steps_ratio"]) for each in step_ratio_lines(rows[1::2])] == [
        ("AllReduce", 2.0)
    ]


def test_networks_are_swept(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A path is taken from the current folder, as of --topology; both at once are refused."""
    words = WORDS.replace("--topology wan-4-regions ", "").replace("--strategy AllReduce ", "").split()
    path = tmp_path / "near.yaml"
    path.write_text(TOPOLOGY)
    wan, near = json_of([*words, "--sweep", f"topology=wan-4-regions,{path}", "--json"], capsys)["plans"]
    assert wan["seconds_per_round"] > near["seconds_per_round"] > 0
    assert main([*words, "--topology", "wan-4-regions", "--sweep", f"topology={path}"]) == 2
    assert "--sweep topology: --topology is given too: leave one of them out" in capsys.readouterr().err


LOCAL = "plan --model llama-2m --sequence 64 --strategy DiLoCo --strategy AllReduce --workers 4 --device h100"
LOCAL += " --tokens 1B"


def planned(capsys: pytest.CaptureFixture[str], words: str, code: int = 0) -> Any:
    assert main(words.split()) == code
    printed = capsys.readouterr()
    return (json.loads(printed.out) if printed.out.startswith(("[", "{")) else printed.out), printed.err


def test_a_swept_key_without_effect_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A network without links between sites has no such bandwidth to set; streams of `ideal` change nothing."""
    (tmp_path / "near.yaml").write_text(TOPOLOGY)
    near = f"{LOCAL} --topology {tmp_path / 'near.yaml'}"
    _, error = planned(capsys, f"{near} --sweep wan.bandwidth=1Gbit/s,10Gbit/s", 2)
    assert "wan.bandwidth: near has no links between sites, only those of hosts: here - here.0" in error
    streams = f"{LOCAL} --topology lan --protocol ideal --sweep protocol.streams=1,8"
    _, error = planned(capsys, f"{streams} --json")
    assert error == "warning: --sweep protocol.streams: changes nothing in any row\n"
    table, _ = planned(capsys, streams)
    assert "protocol.streams changes nothing in any row" in table
    _, error = planned(capsys, f"{LOCAL} --topology lan --sweep price=1,2 --json")
    assert "changes nothing" not in error


def test_flags_are_swept_and_sites_of_each_network_have_their_price(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """One --price for two networks names sites of both; a price is a swept key; an unknown site is refused."""
    (tmp_path / "near.yaml").write_text(TOPOLOGY)
    networks = f"--sweep topology=wan-4-regions,{tmp_path / 'near.yaml'} --json"
    price = "--price here=3,us-east=2,us-west=2,eu=2,asia=2"
    rows = planned(capsys, f"{LOCAL} {networks} {price}")[0]["plans"]
    assert [row["cost"] / row["days"] / 24 for row in rows] == pytest.approx([8, 8, 12, 12])
    _, error = planned(capsys, f"{LOCAL} {networks} {price},moon=1", 2)
    assert "unknown site 'moon'" in error
    rows = planned(capsys, f"{LOCAL} --topology lan --sweep price=1,2 --json")[0]["plans"]
    assert [row["cost"] / row["days"] / 24 for row in rows] == pytest.approx([4, 4, 8, 8])
    _, error = planned(capsys, f"{LOCAL} --topology lan --sweep price=1,2 --price 3", 2)
    assert "--sweep price: --price is given too: leave one of them out" in error
    _, error = planned(capsys, f"{LOCAL} --topology lan --sweep price=1,free", 2)
    assert "--price free: expected dollars of a worker's hour" in error


def test_places_count_each_plan_once_and_equal_rows_stay_behind_none() -> None:
    """AllReduce at two values of H is one plan; of rows whose bands overlap neither stays ahead."""

    def at(name: str, length: str, days: float) -> dict[str, Any]:
        band = {"days": days, "days_low": 0.9 * days, "days_high": 1.1 * days, "fits": True}
        return {
            "name": name,
            "strategy": name,
            "tokens_per_second": 1 / days,
            "point": {LENGTH: length},
            **band,
        }

    rows = [
        at("AllReduce", "5", 1.0),
        at("AllReduce", "10", 1.0),
        at("DiLoCo", "5", 9.0),
        at("DiLoCo", "10", 8.0),
    ]
    assert [row["place"] for row in placed(rows)] == [1, 1, 2, 2]
    ratios = {(line["faster"], line["slower"]) for line in step_ratio_lines(rows)}
    assert ratios == {("AllReduce", "DiLoCo")}


def test_a_swept_table_says_each_thing_once(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A column a key, by its last word; a strategy that a key does not concern has a row less; a limit a strategy."""
    from matplotlib.figure import Figure  # here, where it is needed: forks of all other tests are cheaper

    below = set[bool]()

    def savefig(figure: Figure, *arguments: Any, **options: Any) -> None:
        save(figure, *arguments, **options)
        for axes in figure.axes:
            legend, plot = axes.get_legend().get_window_extent(), axes.get_window_extent()
            below.add(legend.y1 < plot.y0)

    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", savefig)
    sweeps = " --sweep strategies.DiLoCo.H=5,10 --sweep wan.bandwidth=10Mbit/s,100Gbit/s --out " + str(
        tmp_path
    )
    assert main((WORDS + sweeps).split()) == 0
    lines = capsys.readouterr().out.splitlines()
    (heading,) = (line for line in lines if line.split()[:3] == ["H", "wan.bandwidth", "strategy"])
    assert "dollars" not in heading, "no price is given, so no row has dollars"
    assert sum("AllReduce" in line and " any " in f" {line} " for line in lines) == 2
    assert sum("limited by" in line for line in lines) == 2
    assert any("DiLoCo H=10 is sooner than DiLoCo H=5" in line or "times the steps" in line for line in lines)
    page = (tmp_path / "plan.html").read_text()
    assert page.count("limited by") == 6
    assert (tmp_path / "utilisation.png").stat().st_size > 1000
    assert below == {True}, "legends cover no curve"


def test_break_even_lines_need_an_order_beyond_the_bands() -> None:
    """Rows of one place were equal, and yet one of them `is sooner`."""

    def at(name: str, bandwidth: str, days: float, share: float) -> dict[str, Any]:
        band = {"days": days, "days_low": (1 - share) * days, "days_high": (1 + share) * days, "fits": True}
        return {**row(name, 1 / days, bandwidth=bandwidth), "name": name, **band}

    def lines(days: tuple[float, float], share: float) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        rates = ("1 Gbit/s", "100 Gbit/s")
        rows = [at("DiLoCo", rate, own, share) for rate, own in zip(rates, days, strict=True)]
        rows += [at("AllReduce", rate, 2.0, share) for rate in rates]
        return break_even(rows, BANDWIDTH), sooner_throughout(rows, BANDWIDTH)

    assert [line["sooner_above"] for line in lines((1.0, 4.0), 0.1)[0]] == ["AllReduce"]
    assert lines((1.0, 2.1), 0.1) == ([], []), "nothing is sooner at 100 Gbit/s"
    assert [line["sooner"] for line in lines((1.0, 1.2), 0.1)[1]] == ["DiLoCo"]
    assert lines((1.0, 1.9), 0.1) == ([], []), "equal at 100 Gbit/s"


def test_points_that_were_refused_are_left_out_of_break_even_lines() -> None:
    """Points were paired by their place: the first strategy's at 1 Gbit/s with the second's at 10."""
    rates = ("1 Gbit/s", "10 Gbit/s", "100 Gbit/s")
    rows = [row("DiLoCo", pace, bandwidth=at) for at, pace in zip(rates, (1.0, 4.0, 4.0), strict=True)]
    rows += [row("AllReduce", pace, bandwidth=at) for at, pace in zip(rates[1:], (2.0, 8.0), strict=True)]
    (line,) = break_even(rows, BANDWIDTH)
    assert (line["at"], line["sooner_above"]) == (pytest.approx(10**10.5), "AllReduce")


def test_swept_models_need_no_model_and_refused_points_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    """`--sweep model.name=...` stands for --model; a point without a plan is named; short days are durations."""
    words = WORDS.replace("--model llama-2m ", "").replace("--strategy AllReduce ", "").replace("1B", "1M")
    swept = ["--sweep", "model.name=llama-2m,gpt-byte", "--sweep", "strategies.DiLoCo.H=10,200000"]
    assert main([*words.split(), *swept]) == 0
    printed = capsys.readouterr().out
    assert printed.count(": rounds of 200,000 steps are longer than those that are planned") == 2
    assert "(at model.name=gpt-byte, H=200000)" in printed
    assert "e-0" not in printed


def test_a_table_does_not_break_inside_a_time(capsys: pytest.CaptureFixture[str]) -> None:
    """`5 min 43 s / 30` stood above `steps x 317`."""
    words = (
        "plan --model llama-1b --strategy DiLoCo --strategy AllReduce --topology wan-4-regions --workers 4"
    )
    words += " --tokens 20B --price 3 --device h100 --set strategies.DiLoCo.H=30"
    assert main(words.split()) == 0
    printed = capsys.readouterr().out
    assert "5 min 43 s / 30 steps x 317 + 27" in printed
    assert "2,392 (2,139 to 2,621)" in printed
