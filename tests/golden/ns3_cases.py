"""Transfers with durations from ns-3, and the same transfers simulated here; see ns3/README.md."""

from __future__ import annotations

import csv
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from simgrid_cases import wan4

from netsim import Topology
from netsim.transfers import time_flows

FOLDER = Path(__file__).parent / "ns3"


@dataclass(frozen=True)
class Comparison:
    """One case: durations in seconds by transfer, there and here, and when each was started."""

    name: str
    num_bytes: int
    round_trip_seconds: float
    start: np.ndarray
    expected: np.ndarray
    seconds: np.ndarray

    @property
    def mean_error(self) -> float:
        """Of the mean duration, relative."""
        return float(self.seconds.mean() / self.expected.mean() - 1)

    @property
    def makespan_error(self) -> float:
        """Of the last instant of delivery, relative."""
        return float((self.start + self.seconds).max() / (self.start + self.expected).max() - 1)


def _rows(name: str) -> list[dict[str, str]]:
    with open(FOLDER / name, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _protocol(row: dict[str, str], know_queue: bool) -> dict[str, Any]:
    protocol = {
        "preset": "linux-tcp",
        "connections": "per-transfer",
        "window": "4 MiB" if row["buf"] == "linux" else "64 MiB",
    }
    return protocol | ({"queue": int(row["queue_pkts"])} if know_queue else {})


def _dumbbell(bits_per_second: float, round_trips: list[float], loss: float) -> Topology:
    """A pair of hosts for each transfer, a0 to b0 and so on, and one link that all of them cross."""
    links: list[dict[str, Any]] = [
        {
            "between": ["left", "right"],
            "bandwidth": f"{bits_per_second:.0f} bit/s",
            "latency": "0 s",
            "loss": f"{loss * 100:.6f} %",
        }
    ]
    for i, round_trip in enumerate(round_trips):
        access = {"bandwidth": "10 Gbit/s", "latency": f"{round_trip / 4:.9f} s"}
        links += [{"between": [f"a{i}", "left"], **access}, {"between": [f"b{i}", "right"], **access}]
    hosts: dict[str, dict[str, Any]] = {f"{side}{i}": {} for i in range(len(round_trips)) for side in "ab"}
    return Topology.from_mapping({"hosts": hosts, "routers": ["left", "right"], "links": links})


def singles(*, lossy: bool, know_queue: bool = False) -> list[Comparison]:
    """One transfer a case."""
    found = []
    for row in _rows("single.csv"):
        if (float(row["loss"]) > 0) != lossy:
            continue
        round_trip, num_bytes = float(row["rtt_s"]), int(row["bytes"])
        topology = _dumbbell(float(row["rate_bps"]), [round_trip], float(row["loss"]))
        seconds = time_flows(topology, [(0.0, "a0", "b0", num_bytes)], _protocol(row, know_queue))
        name = f"{float(row['rate_bps']) / 1e6:.0f} Mbit/s, {round_trip * 1e3:.0f} ms, {row['buf']}, "
        name += f"queue {row['queue_pkts']}, loss {float(row['loss']):g}, {num_bytes / 1e6:g} MB"
        expected = np.array([float(row["fct_s"])])
        found.append(Comparison(name, num_bytes, round_trip, np.zeros(1), expected, seconds))
    return found


def shared(*, know_queue: bool = False) -> list[Comparison]:
    """Several transfers a case: over one bottleneck, and over the network of four regions."""
    cases: defaultdict[str, list[dict[str, str]]] = defaultdict(list)
    for row in [*_rows("multi.csv"), *_rows("wan4.csv")]:
        rate = f", {float(row['rate_bps']) / 1e6:.0f} Mbit/s" if "rate_bps" in row else ""
        cases[f"{row['case']}{rate}, queue {row['queue_pkts']}"].append(row)
    return [_compare(name, rows, know_queue) for name, rows in cases.items()]


def _compare(name: str, rows: list[dict[str, str]], know_queue: bool) -> Comparison:
    start = np.array([float(row["start_s"]) for row in rows])
    sizes = [int(row["bytes"]) for row in rows]
    if "flow_rtt_s" in rows[0]:
        topology = _dumbbell(float(rows[0]["rate_bps"]), [float(row["flow_rtt_s"]) for row in rows], 0.0)
        hosts = [(f"a{i}", f"b{i}") for i in range(len(rows))]
    else:
        topology = wan4(16)
        hosts = [(_region_host(row["src"]), _region_host(row["dst"])) for row in rows]
    flows = [(begin, *pair, size) for begin, pair, size in zip(start.tolist(), hosts, sizes, strict=True)]
    finish = time_flows(topology, flows, _protocol(rows[0], know_queue))
    expected = np.array([float(row["fct_s"]) for row in rows])
    sound = np.array([row["suspect"] == "0" for row in rows])
    return Comparison(name, sizes[0], 0.0, start[sound], expected[sound], (finish - start)[sound])


def _region_host(number: str) -> str:
    region, host = divmod(int(number), 1000)
    return f"r{region}.{host}"
