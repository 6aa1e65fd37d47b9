"""Sweeps of plans: their reports, and that points share work."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from exogym_core.cli.main import main
from exogym_core.planning.sweep import break_even, sooner_throughout, step_ratio_lines

WORDS = (
    "plan --model llama-2m --sequence 64 --strategy DiLoCo --strategy AllReduce --topology wan-4-regions --workers 4 "
    "--device h100 --tokens 1B --protocol linux-tcp"
)
TOPOLOGY = "name: near\nregions:\n  here: {hosts: 4, nic: 10 Gbit/s, latency: 50 us}\n"
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
    assert main([*words, "--sweep", f"topology=wan-4-regions,{path}", "--json"]) == 0
    wan, near = json.loads(capsys.readouterr().out)["plans"]
    assert wan["seconds_per_round"] > near["seconds_per_round"] > 0
    assert main([*words, "--topology", "wan-4-regions", "--sweep", f"topology={path}"]) == 2
    assert "--sweep topology: --topology is given too: leave one of them out" in capsys.readouterr().err


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
