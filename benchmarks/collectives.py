"""How fast collectives are simulated, beside SimGrid's times for the same.

    python benchmarks/collectives.py [--large]

Ring all-reduces of 100 MB over a star, over four regions and placed round-robin over four regions, then a
small collective repeated. SimGrid's figures (3.32, plain max-min, whole process on a quiet machine of 2
cores) are those of the golden data; where its Python module is installed it is not run, since its C++ API is
several times faster. `--large` adds 4,096 and 10,000 ranks. Times do not contain loading the topology; the
first play of the compiled loop, which compiles it once per machine, is told apart.
"""

from __future__ import annotations

import resource
import sys
import time

from netsim.clock import Clock
from netsim.collectives import play, schedule
from netsim.network import Network
from netsim.topology import Topology

WAN = {
    "ab": (200, 40),
    "ac": (200, 90),
    "ad": (100, 150),
    "bc": (200, 70),
    "bd": (300, 110),
    "cd": (200, 130),
}

# Kind of network, ranks, SimGrid's seconds of host time, its result in virtual seconds.
SIMGRID = [
    ("star", 64, 0.05, 4.095),
    ("star", 256, 0.43, 11.79375),
    ("star", 1024, 8.5, 42.518449776),
    ("regions", 64, None, 34.6626),
    ("regions", 256, None, 92.4885),
    ("regions", 1024, 10.9, 323.08909776),
    ("round-robin", 64, 0.04, 270.9126),
    ("round-robin", 256, 0.5, 1096.551),
]


def star(num: int) -> Topology:
    """Hosts around a switch: 1 Gbit/s, 10 ms on either side."""
    links = [{"between": [f"h{i}", "sw"], "bandwidth": "1 Gbit/s", "latency": "10 ms"} for i in range(num)]
    hosts = {f"h{i}": {} for i in range(num)}
    plain = {
        "name": "star",
        "source": "SimGrid comparison",
        "hosts": hosts,
        "routers": ["sw"],
        "links": links,
    }
    return Topology.from_mapping(plain)


def regions(num: int) -> Topology:
    """Four regions of equal size, a pipe between each two."""
    region = {"hosts": num // 4, "nic": "10 Gbit/s", "latency": "0.05 ms"}
    wan = [
        {"between": list(pair), "bandwidth": f"{mbit} Mbit/s", "latency": f"{milliseconds} ms"}
        for pair, (mbit, milliseconds) in WAN.items()
    ]
    plain = {
        "name": "regions",
        "source": "SimGrid comparison",
        "regions": dict.fromkeys("abcd", region),
        "wan": wan,
    }
    return Topology.from_mapping(plain)


def time_ring(topology: Topology, hosts: list[int], num_bytes: int = 100_000_000) -> tuple[float, float]:
    """(virtual seconds, host seconds) of one ring all-reduce, schedule and network made anew."""
    started = time.perf_counter()
    clock = Clock()
    network = Network(clock, topology, "ideal")
    made = schedule("all_reduce", len(hosts), num_bytes=num_bytes, algorithm="ring")
    ends: list[float] = []
    one = play(network, made, hosts, on_done=lambda member: ends.append(clock.now))
    for member in range(len(hosts)):
        one.arrive(member)
    clock.run()
    return max(ends), time.perf_counter() - started


def time_repeated(protocol: str, algorithm: str, repetitions: int = 50) -> tuple[float, float, float]:
    """Host seconds of an all-reduce of 1 MB among 8 ranks: the first, the second, and the quickest of the rest."""
    clock = Clock()
    network = Network(clock, star(8), protocol)
    made = schedule("all_reduce", 8, num_bytes=1_000_000, algorithm=algorithm)
    took = []
    for repetition in range(repetitions):
        clock.run(until=16.0 * (repetition + 1))
        started = time.perf_counter()
        one = play(network, made, range(8), group="all", on_done=lambda member: None)
        for member in range(8):
            one.arrive(member)
        clock.run()
        took.append(time.perf_counter() - started)
    return took[0], took[1], min(took[2:])


def main(large: bool) -> None:
    """Print a line for each case."""
    print(
        f"{'ring all-reduce of 100 MB':26} {'virtual s':>14} {'SimGrid':>14} {'host s':>8} {'SimGrid':>8} {'ratio':>7}"
    )
    topologies: dict[tuple[str, int], Topology] = {}
    for kind, num, theirs, wanted in SIMGRID:
        key = ("star" if kind == "star" else "regions", num)
        topology = topologies.setdefault(key, star(num) if kind == "star" else regions(num))
        hosts = [rank % 4 * (num // 4) + rank // 4 if kind == "round-robin" else rank for rank in range(num)]
        first = time_ring(topology, hosts)[1]
        virtual, took = time_ring(topology, hosts)
        ratio = f"{took / theirs:7.3f}" if theirs else "      -"
        simgrid = f"{theirs:8.2f}" if theirs else "       -"
        print(
            f"{kind + ', ' + str(num):26} {virtual:14.9f} {wanted:14.9f} {took:8.3f} {simgrid} {ratio}"
            f"   (first time, routes and compilation included: {first:.2f} s)"
        )
    for num in (4096, 10_000) if large else ():
        for make in (star, regions):
            virtual, took = time_ring(make(num), list(range(num)))
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
            print(
                f"{make.__name__ + ', ' + str(num):26} {virtual:14.6f} {'':14} {took:8.3f}   peak memory {peak:.2f} GB"
            )
    for protocol, algorithm in (("ideal", "ring"), ("linux-tcp", "ring"), ("gloo", "gloo")):
        first, second, later = (1e6 * each for each in time_repeated(protocol, algorithm))
        print(f"8 ranks, {protocol:10} first {first:8.0f} us, second {second:8.0f} us, later {later:6.0f} us")


if __name__ == "__main__":
    main("--large" in sys.argv[1:])
