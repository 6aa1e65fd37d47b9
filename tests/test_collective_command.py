"""`netsim collective` as a user meets it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from worlds import star_form

from netsim import Topology, schedule
from netsim.cli.timing import collective_command as command
from netsim.topology.protocol import WindowLimit

STAR = yaml.safe_dump(star_form("abcd", "50 Mbit/s"))


@pytest.fixture
def star(tmp_path: Path) -> str:
    path = tmp_path / "star.yaml"
    path.write_text(STAR)
    return str(path)


def run(*arguments: str) -> Any:
    result = CliRunner().invoke(command, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)  # progress, where it takes seconds, is on stderr


def test_ring_all_reduce_to_the_digit(star: str) -> None:
    got = run(star, "all_reduce", "--bytes", "4MB", "--algorithm", "ring")
    assert got["algorithm"] == "ring"
    assert got["seconds"] == pytest.approx([6 * (0.02 + 8e6 / 50e6)], rel=1e-12)
    assert got["rank_seconds"] == pytest.approx(got["seconds"] * 4, rel=1e-12)
    # Whatever the algorithm: 2 (n - 1) tensors pass between four parties that can send 4 x 50 Mbit/s together.
    assert got["lower_bound_seconds"] == pytest.approx(0.02 + 6 * 32e6 / 200e6, rel=1e-12)
    assert got["link_bytes"] == {
        name: 6_000_000 for host in "abcd" for name in (f"{host}->switch", f"switch->{host}")
    }


def test_keys_of_the_window_limit_are_documented() -> None:
    """`streams` beside `window_bits_per_second` reads as those there are, not as those that would fill the link."""
    page = (Path(__file__).parents[1] / "docs/network.md").read_text()
    for field in dataclasses.fields(WindowLimit):
        assert f"`{field.name}`" in page


def test_repetitions_keep_connections_warm_and_pauses_cool_them(star: str) -> None:
    options = (star, "all_reduce", "--bytes", "1MiB", "--protocol", "gloo")
    warm = run(*options, "--repeat", "4", "--pause", "50ms")["seconds"]
    cold = run(*options, "--repeat", "4", "--pause", "10s")["seconds"]
    assert len(warm) == 4
    assert warm[0] == cold[0]
    assert warm[3] < 0.9 * warm[0]
    assert cold[3] > 0.9 * cold[0]


def test_ranks_and_root_by_name(star: str) -> None:
    got = run(star, "broadcast", "--bytes", "1MB", "--ranks", "d,b", "--root", "b")
    assert set(got["link_bytes"]) == {"b->switch", "switch->d"}
    assert len(got["rank_seconds"]) == 2
    message = run(star, "sendrecv", "--bytes", "1MB", "--ranks", "c,a")
    assert message["link_bytes"] == {"c->switch": 1_000_000, "switch->a": 1_000_000}


def test_a_barrier_needs_no_bytes(star: str) -> None:
    assert run(star, "barrier")["seconds"] == pytest.approx([0.04])


@pytest.mark.parametrize(("hosts", "op"), [(4, "all_to_all"), (3, "all_to_all"), (4, "all_gather")])
def test_the_size_is_printed_as_it_was_given(tmp_path: Path, hosts: int, op: str) -> None:
    """One meaning: of all_to_all a rank's tensor, its own part included, of which the others leave."""
    result = CliRunner().invoke(command, [lan(tmp_path, hosts), op, "--bytes", "12MB"])
    assert f"{op} of 12 MB by" in result.output
    if op == "all_to_all":
        got = run(lan(tmp_path, hosts), op, "--bytes", "12MB")
        assert got["bytes"] == 12_000_000
        assert got["link_bytes"]["lan.0->lan"] == 12_000_000 * (hosts - 1) / hosts


@pytest.mark.parametrize(
    ("op", "events"),
    [("all_gather", []), ("all_reduce", [{"at": "1 ms", "link": ["a", "switch"], "latency": "30 ms"}])],
)
def test_what_a_ring_takes_is_said_beside_what_auto_takes(tmp_path: Path, op: str, events: Any) -> None:
    path = tmp_path / "cities.yaml"
    path.write_text(yaml.safe_dump(star_form("abcd", "1 Gbit/s", "40 ms", events=events)))
    options = (str(path), op, "--bytes", "1kB", "--protocol", "linux-tcp")
    auto, ring = run(*options), run(*options, "--algorithm", "ring")
    assert auto["algorithm"] != "ring"
    assert auto["ring_seconds"] == ring["seconds"][0] > 1.5 * auto["seconds"][0]
    assert ring["ring_seconds"] is None
    said = CliRunner().invoke(command, list(options)).output
    assert f"auto chose {auto['algorithm']}; a ring, as most libraries run it, takes" in said


BACKGROUND = """
background:
  - {from: a, to: b, rate: 10 Mbit/s}
  - {from: c, to: a, bytes: 100 kB, every: 20 ms, start: 5 ms}
"""


@pytest.mark.parametrize("protocol", ["ideal", "linux-tcp", "gloo"])
def test_background_traffic_is_reported_separately(star: str, tmp_path: Path, protocol: str) -> None:
    busy = tmp_path / "busy.yaml"
    busy.write_text(STAR + BACKGROUND)
    arguments = ("all_reduce", "--bytes", "4MB", "--repeat", "3", "--protocol", protocol)
    calm, got = run(star, *arguments), run(str(busy), *arguments)
    assert got["seconds"][0] > calm["seconds"][0]
    assert calm["background_link_bytes"] == {}
    assert got["link_bytes"] == calm["link_bytes"]
    others = got["background_link_bytes"]
    assert others.keys() == {"a->switch", "switch->b", "c->switch", "switch->a"}
    assert others["a->switch"] == others["switch->b"] <= 10e6 / 8 * got["seconds"][-1] + 1
    assert others["c->switch"] == pytest.approx(100e3 / 0.02 * got["seconds"][-1], rel=0.3)


def lan(tmp_path: Path, num_hosts: int) -> str:
    path = tmp_path / "lan.yaml"
    path.write_text(f"regions: {{lan: {{hosts: {num_hosts}, nic: 1 Gbit/s, latency: 100 us}}}}")
    return str(path)


def test_a_ring_of_millions_of_messages_is_estimated_and_says_so(tmp_path: Path) -> None:
    """2 (n - 1) steps of latency and bytes over rate, as simulated whole under `ideal` by the closed form."""
    got = run(lan(tmp_path, 2100), "all_reduce", "--bytes", "1GB", "--algorithm", "ring")
    whole = 2 * 2099 * (200e-6 + 1e9 / 2100 * 8 / 1e9)
    assert whole < got["seconds"][0] < 1.1 * whole, "headers and acknowledgements are some 8 %"
    assert got["rank_seconds"] == pytest.approx(got["seconds"] * 2100, rel=0.01)
    assert "simulated" in got["estimate"]


def test_so_many_direct_messages_are_refused_in_one_line(tmp_path: Path) -> None:
    result = CliRunner().invoke(command, [lan(tmp_path, 3000), "all_to_all", "--bytes", "1MB"])
    assert result.exit_code
    assert "8,997,000 at once" in result.output


def test_auto_takes_few_rounds_among_more_than_a_thousand_hosts(tmp_path: Path) -> None:
    """Its 22,000 messages were taken for a crowd that cannot be timed, and a ring of 2,200 steps was chosen."""
    topology, hosts = Topology.load(lan(tmp_path, 1100)), range(1100)
    made = schedule("all_reduce", 1100, num_bytes=10**6, algorithm="auto", hosts=hosts, topology=topology)
    assert made.algorithm == "halving-doubling"
