"""The page on the network model: its figures are what the simulator says."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
from worlds import star

from netsim import Protocol, Topology, schedule
from netsim.collectives.start import time_collective
from netsim.topology.protocol import PRESETS
from netsim.transfers import time_flows

PAGE = " ".join((Path(__file__).parents[1] / "docs" / "network.md").read_text().split())


def line(bandwidth: str, latency: str, num_hosts: int = 2) -> Topology:
    return star(num_hosts, bandwidth, latency)


def seconds(topology: Topology, num_bytes: float, protocol: Any) -> float:
    return float(time_flows(topology, [(0.0, "h0", "h1", num_bytes)], protocol)[0])


def test_the_transfers_reckoned_by_hand() -> None:
    path = line("100 Mbit/s", "12.5 ms")
    rate, rtt = 100e6 / 8 * 1448 / 1514, 0.05
    windows = [14_480, 26_064, 52_128, 104_256, 208_512, 417_024]
    assert windows[-1] < rate * rtt < 2 * windows[-1]
    for num_bytes in (1_000_000, 100_000_000):
        by_hand = 0.025 + num_bytes / rate + 6 * rtt - sum(windows) / rate
        assert seconds(path, num_bytes, "linux-tcp") == pytest.approx(by_hand, rel=1e-9)
    rounds = " + ".join(f"{each:,}" for each in windows)
    assert f"B = {rate / 1e6:.3f} MB/s. 1 MB by hand: r = 6 rounds of {rounds} bytes" in PAGE
    assert f"P = {rate * rtt:,.0f};" in PAGE
    assert f"6 RTT - {sum(windows):,} / B = {seconds(path, 1_000_000, 'linux-tcp') * 1e3:.1f} ms" in PAGE
    assert f"Under `ideal` it is {seconds(path, 1_000_000, 'ideal') * 1e3:.0f} ms" in PAGE
    large = [seconds(path, 100_000_000, name) for name in ("linux-tcp", "ideal")]
    assert f"100 MB take {large[0]:.3f} s, under `ideal` {large[1]:.3f} s" in PAGE


def test_the_limit_of_the_window() -> None:
    path = line("10 Gbit/s", "50 ms")
    rate = 4e9 * 8 / (seconds(path, 8e9, "linux-tcp") - seconds(path, 4e9, "linux-tcp"))
    assert f"Over 200 ms that is {rate / 1e6:.0f} Mbit/s" in PAGE


def test_the_mean_rate_under_loss() -> None:
    lossy = [
        {"between": [f"h{index}", "switch"], "bandwidth": "1 Gbit/s", "latency": "25 ms"}
        for index in range(2)
    ]
    lossy[0]["loss"] = "0.01 %"
    topology = Topology.from_mapping({"hosts": ["h0", "h1"], "routers": ["switch"], "links": lossy})
    rate = 2e9 / (seconds(topology, 4e9, "linux-tcp") - seconds(topology, 2e9, "linux-tcp"))
    segments = (0.4 * 3.7 / 1.2) ** 0.25 * 0.1**0.75 / 0.0001**0.75
    assert "(0.4 x 3.7 / 1.2)^(1/4) RTT^(3/4) / p^(3/4) segments" in PAGE
    assert rate == pytest.approx(segments * 1448 / 0.1, rel=0.1)


def test_a_ring_on_equal_links() -> None:
    made = schedule("all_reduce", 4, num_bytes=4_000_000, algorithm="ring")
    timing = time_collective(line("80 Mbit/s", "5 ms", 4), Protocol.parse("ideal"), made, range(4))
    assert timing.seconds == [pytest.approx(2 * 3 * (0.01 + 4e6 / (4 * 10e6)))]
    assert "2 (n-1) (a + S / (n B))" in PAGE


def test_the_table_of_protocols() -> None:
    page = (Path(__file__).parents[1] / "docs" / "network.md").read_text()
    rows = {
        cells[0]: cells[1:]
        for cells in (
            [cell.strip() for cell in row.strip("|").split("|")]
            for row in re.findall(r"^\|.*\|$", page, re.MULTILINE)
        )
    }
    assert {name.strip("`") for name in rows[""]} == set(PRESETS)
    for column, name in enumerate(rows[""]):
        protocol = PRESETS[name.strip("`")]
        cells = {title: row[column] for title, row in rows.items()}
        assert cells["bandwidth counts"] == (
            "payload" if protocol.payload_share == 1 else "bytes on the wire"
        )
        assert cells["windows, loss, queue"].startswith("yes" if protocol.has_windows else "no")
        assert ("any window" in cells["windows, loss, queue"]) == (
            protocol.has_windows and protocol.queue_packets is None
        )
        assert cells["a message begins"] == (
            "when the receiver is ready" if protocol.rendezvous else "when it is sent"
        )
        assert cells["weight of a transfer"].startswith("`streams`" if protocol.rtt_bias else "1")
        assert float(cells["software per message"].split()[0]) == pytest.approx(
            protocol.software_seconds * 1e3
        )
        assert int(cells["collectives of a group at once"]) == protocol.collectives_in_flight
        assert cells["`auto` compares"] == (
            "nothing: gloo's own"
            if protocol.rendezvous
            else ", ".join(protocol.algorithms) or "all algorithms"
        )
        gives_up = f"after {protocol.give_up_seconds:g} s" if protocol.give_up_seconds < math.inf else "never"
        assert cells["gives up on a dead link"] == gives_up


def test_when_linux_gives_up() -> None:
    timeouts = [0.2 * 2**number for number in range(16)]
    assert sum(min(each, 120.0) for each in timeouts) == pytest.approx(PRESETS["linux-tcp"].give_up_seconds)
    assert "0.2 + 0.4 + ... + 102.4 + 6 x 120 = 924.6 s" in PAGE
