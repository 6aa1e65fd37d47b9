"""`netsim import` as somebody meets it who has measured a few places and knows little of their lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from netsim import Topology
from netsim.cli.main import cli

RTT = "rtt ms,home,ore,fra,vir\nhome,-,150,30,95\nore,,-,140,60\nfra,,,-,90\nvir,,,,-\n"
RATES = (
    "throughput Mbit/s,home,ore,fra,vir\n"
    "home,-,38.2,38,37.5\nore,250,-,800,2000\nfra,300,800,-,1200\nvir,290,2000,1200,-\n"
)


@pytest.fixture
def tables(tmp_path: Path) -> list[str]:
    (tmp_path / "rtt.csv").write_text(RTT)
    (tmp_path / "tp.csv").write_text(RATES)
    return [str(tmp_path / "rtt.csv"), str(tmp_path / "tp.csv")]


def imported(arguments: list[str], out: Path) -> tuple[Topology, str, str]:
    """The topology, its file and what was said of it."""
    result = CliRunner().invoke(cli, ["import", *arguments, "--out", str(out)])
    assert result.exit_code == 0, result.output
    return Topology.load(out), out.read_text(), result.stderr


def line(topology: Topology, host: str, end: str) -> float:
    """Bit/s of a host's own link, from it or to it."""
    own = next(link for link in topology.links if getattr(link, end) == host)
    return own.bits_per_second


def refused(*arguments: str) -> str:
    result = CliRunner().invoke(cli, ["import", *arguments])
    assert result.exit_code == 1, result.output
    assert len(result.output.splitlines()) == 1
    return result.output


def test_a_place_whose_rates_are_alike_is_reported_and_can_be_given_its_line(
    tables: list[str], tmp_path: Path
) -> None:
    """Three links of 39 Mbit/s behind a card of 10 Gbit/s let a home send 119 at once, and nothing was said."""
    _, text, notes = imported(tables, tmp_path / "a.yaml")
    wanted = "home's rates to all others are alike (37.5 to 38.2 Mbit/s): probably its own line"
    assert wanted in notes
    assert "--nic home=39.9Mbit/s:10Gbit/s" in notes
    assert f"# Note: {wanted}" in text
    assert notes.count("note: ") == 1
    given = ["--nic", "20 Gbit/s", "--nic", "home=39.9Mbit/s:10Gbit/s"]
    net, _, notes = imported([*tables, *given], tmp_path / "b.yaml")
    assert notes == ""
    assert line(net, "home.0", "source") == 39.9e6
    assert line(net, "home.0", "target") == 10e9
    assert line(net, "ore.0", "source") == 20e9


def test_rates_that_others_lines_explain_are_not_laid_to_a_place(tmp_path: Path) -> None:
    """A server that three homes send 40 Mbit/s each may well take more: it is theirs."""
    rows = ["from,to,rtt,throughput"]
    for one, up in (("h1", 40), ("h2", 30), ("h3", 40)):
        rows += [f"{one},{other},20 ms,{up} Mbit/s" for other in ("h1", "h2", "h3", "dc") if other != one]
        rows.append(f"dc,{one},20 ms,{up * 7} Mbit/s")
    (tmp_path / "ways.csv").write_text("\n".join(rows))
    _, _, notes = imported([str(tmp_path / "ways.csv")], tmp_path / "a.yaml")
    assert [each.split()[1] for each in notes.splitlines()] == ["h1's", "h2's", "h3's"]
    assert "rates to dc" not in notes


def test_places_have_as_many_hosts_as_is_said_of_each(tables: list[str], tmp_path: Path) -> None:
    net, _, notes = imported([*tables, "--hosts", "4", "--hosts", "home=1"], tmp_path / "a.yaml")
    assert len(net.hosts) == 13
    assert sum(host.name.startswith("home.") for host in net.hosts) == 1
    assert "--hosts" not in notes
    _, _, notes = imported([*tables, "--hosts", "4"], tmp_path / "b.yaml")
    assert "--nic home=39.9Mbit/s:10Gbit/s --hosts home=1" in notes


def test_each_link_says_where_its_figures_stand(tables: list[str], tmp_path: Path) -> None:
    _, text, _ = imported(tables, tmp_path / "a.yaml")
    (comment,) = (each for each in text.splitlines() if "between: [fra, home]" in each)
    assert "# fra to home: throughput 300 Mbit/s (tp.csv:4); home to fra: rtt 30 ms (rtt.csv:2)" in comment
    assert "throughput 38 Mbit/s (tp.csv:2)" in comment


def pings(num: int, lost: int) -> str:
    return (
        f"PING eu (192.0.2.7)\n{num} packets transmitted, {num - lost} received, {100 * lost / num:g}% packet loss\n"
        "rtt min/avg/max/mdev = 30.1/31.5/40.2/1.1 ms\n"
    )


@pytest.mark.parametrize(
    ("num", "lost", "loss", "message"),
    [
        (4, 1, 0.0, "1 of 4 pings lost: too few for a loss, which takes 100"),
        (99, 1, 0.0, "1 of 99 pings lost: too few"),
        (100, 1, 0.01, "1 of 100 pings lost"),
        (4, 0, 0.0, "31.5 ms in the mean"),
    ],
)
def test_a_loss_takes_enough_pings(num: int, lost: int, loss: float, message: str, tmp_path: Path) -> None:
    """One lost of four became 25 %, under which TCP's line is dead."""
    (tmp_path / "us--eu.txt").write_text(pings(num, lost))
    net, text, _ = imported([str(tmp_path / "us--eu.txt"), "--bandwidth", "1 Gbit/s"], tmp_path / "a.yaml")
    assert max(net.loss) == pytest.approx(loss)
    assert message in text


def test_files_of_runs_that_failed_are_reported_all_at_once(tmp_path: Path) -> None:
    failed: dict[str, Any] = {"start": {}, "error": "the server is busy running a test. try again later"}
    for name in ("us--eu.json", "eu--us.json"):
        (tmp_path / name).write_text(json.dumps(failed))
    (tmp_path / "us--asia.txt").write_text("PING asia\n5 packets transmitted, 0 received, 100% packet loss\n")
    message = refused(*(str(tmp_path / name) for name in ("us--eu.json", "eu--us.json", "us--asia.txt")))
    for name in (
        "us--eu.json: iperf3 failed: the server is busy",
        "eu--us.json: iperf3",
        "us--asia.txt: nothing",
    ):
        assert name in message
    assert "measure again, or leave these files out" in message


def test_a_link_of_a_host_among_those_of_regions_is_reported_where_it_belongs(tmp_path: Path) -> None:
    path = tmp_path / "net.yaml"
    path.write_text(
        "hosts: [home]\nregions:\n  fra: {hosts: 1, nic: 1 Gbit/s}\nwan:\n"
        "  - {between: [home, fra], bandwidth: 40 Mbit/s}\n"
    )
    result = CliRunner().invoke(cli, ["validate", str(path)])
    assert "wan[0].between: home is a host: put this link under links:" in str(result.exception)
