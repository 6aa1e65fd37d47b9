"""Networks and transfers with completion times from SimGrid 3.32; see simgrid/README.md."""

from __future__ import annotations

import csv
import math
import random
from pathlib import Path
from typing import Any

from netsim import Topology

Row = tuple[float, str, str, float]  # start in seconds, from, to, bytes

FOLDER = Path(__file__).parent / "simgrid"
WAN = {
    (0, 1): (200e6, 0.040),
    (0, 2): (200e6, 0.090),
    (0, 3): (100e6, 0.150),
    (1, 2): (200e6, 0.070),
    (1, 3): (300e6, 0.110),
    (2, 3): (200e6, 0.130),
}


def _bandwidth(bits_per_second: float) -> str:
    return f"{bits_per_second:.0f} bit/s"


def star(num_hosts: int) -> Topology:
    """Hosts h0, h1, ... around a switch, 1 Gbit/s and 10 ms each way.

    The golden files had a backbone in its middle that is never full; it is left out here.
    """
    hosts = [f"h{i}" for i in range(num_hosts)]
    return Topology.from_mapping(
        {
            "hosts": {name: {} for name in hosts},
            "routers": ["switch"],
            "links": [
                {"between": [name, "switch"], "bandwidth": "1 Gbit/s", "latency": "10 ms"} for name in hosts
            ],
        }
    )


def wan4(num_hosts: int) -> Topology:
    """Four regions r0 to r3 of hosts r0.0, ... with 10 Gbit/s and 50 us; a pipe between each two of them."""
    region = {"hosts": num_hosts // 4, "nic": "10 Gbit/s", "latency": "50 us"}
    return Topology.from_mapping(
        {
            "regions": {f"r{i}": region for i in range(4)},
            "wan": [
                {"between": [f"r{a}", f"r{b}"], "bandwidth": _bandwidth(rate), "latency": f"{latency} s"}
                for (a, b), (rate, latency) in WAN.items()
            ],
        }
    )


def random_graph(num_hosts: int = 100, seed: int = 20240501) -> Topology:
    """Hosts in the unit square, joined to near ones, with a bandwidth for each direction drawn from four."""
    draw = random.Random(seed)
    place = [(draw.random(), draw.random()) for _ in range(num_hosts)]

    def distance(a: int, b: int) -> float:
        return math.hypot(place[a][0] - place[b][0], place[a][1] - place[b][1])

    def nearest(a: int, others: list[int]) -> int:
        return min(others, key=lambda b: distance(a, b))

    edges = {(nearest(i, list(range(i))), i) for i in range(1, num_hosts)}
    while len(edges) < 2 * num_hosts:
        a, b = draw.sample(range(num_hosts), 2)
        free = [j for j in range(num_hosts) if j != a and (min(a, j), max(a, j)) not in edges]
        best = nearest(a, free)
        b = best if draw.random() < 0.8 else b
        edges.add((min(a, b), max(a, b)))
    links: list[dict[str, Any]] = []
    for a, b in sorted(edges):
        rate = draw.choice([100e6, 1e9, 1e9, 2.5e9, 10e9])
        latency = round(0.0005 + 0.1 * distance(a, b), 6)
        links.append(
            {"between": [f"n{a}", f"n{b}"], "bandwidth": _bandwidth(rate), "latency": f"{latency:.6f} s"}
        )
    return Topology.from_mapping({"hosts": {f"n{i}": {} for i in range(num_hosts)}, "links": links})


def random_rows(topology: Topology, num_flows: int, window_seconds: float, seed: int) -> list[Row]:
    """Transfers of 10 kB to 100 MB between random hosts, starting at random over a window."""
    draw = random.Random(seed)
    names = [host.name for host in topology.hosts]
    rows: list[Row] = []
    start = 0.0
    for _ in range(num_flows):
        start += draw.expovariate(num_flows / window_seconds)
        source, target = draw.sample(range(len(names)), 2)
        rows.append((round(start, 6), names[source], names[target], int(10 ** draw.uniform(4, 8))))
    return rows


def all_to_all_rows(topology: Topology, total_bytes: int = 100_000_000) -> list[Row]:
    """Each host sends its share to each other, all at once."""
    names = [host.name for host in topology.hosts]
    num = len(names)
    part = -(-total_bytes // num)
    return [(0.0, names[i], names[(i + shift) % num], part) for shift in range(1, num) for i in range(num)]


CASES = {
    "star8.a2a8": lambda: (network := star(8), all_to_all_rows(network)),
    "star64.a2a64": lambda: (network := star(64), all_to_all_rows(network)),
    "star256.a2a256": lambda: (network := star(256), all_to_all_rows(network)),
    "wan4_8.a2a8": lambda: (network := wan4(8), all_to_all_rows(network)),
    "wan4_256.a2a256": lambda: (network := wan4(256), all_to_all_rows(network)),
    "random100.random_steady": lambda: (network := random_graph(), random_rows(network, 10_000, 600.0, 7)),
    "random100.random_burst": lambda: (network := random_graph(), random_rows(network, 10_000, 20.0, 8)),
}


def case(name: str) -> tuple[Topology, list[Row]]:
    """The network and the transfers of a case, by its name."""
    return CASES[name]()


def golden(name: str) -> list[float]:
    """The instants in seconds at which SimGrid's transfers were through."""
    with open(FOLDER / f"{name}.csv", newline="", encoding="utf-8") as file:
        return [float(row["finish_s"]) for row in csv.DictReader(file)]
