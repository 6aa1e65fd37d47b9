"""How fast collectives are simulated, beside SimGrid's times for the same.

    python benchmarks/collectives.py [--large]

Ring all-reduces of 100 MB over a star, over four regions and placed round-robin over four regions, a small
collective repeated, and the collectives of training over a WAN, whose steps overlap. SimGrid's figures
(3.32, plain max-min, whole process on a quiet machine of 2 cores) are those of the golden data; where its
Python module is installed it is not run, since its C++ API is several times faster. `--large` adds 4,096
and 10,000 ranks. Times do not contain loading the topology; the first run of the compiled loop, which
compiles it once per machine, is told apart.
"""

from __future__ import annotations

import math
import random
import resource
import sys
import time
from typing import TYPE_CHECKING, NoReturn

from netsim.collectives import default_algorithm, schedule, start_collective
from netsim.fluid.clock import Clock
from netsim.fluid.network import Network
from netsim.ranks.kernel import Kernel
from netsim.ranks.requests import Advance, Call, Exit, Key, Post, Request, Wait
from netsim.topology import Topology
from netsim.topology.protocol import Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

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
    hosts: dict[str, dict[str, str]] = {f"h{i}": {} for i in range(num)}
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
    one = start_collective(network, made, hosts, on_done=lambda member: ends.append(clock.now))
    for member in range(len(hosts)):
        one.arrive(member)
    clock.run()
    return max(ends), time.perf_counter() - started


def time_repeated(
    topology: Topology, protocol: str, pause_seconds: float, repetitions: int = 50
) -> list[float]:
    """Host seconds of an all-reduce of 1 MB among 8 ranks: each of the first five, and the quickest of the rest."""
    clock = Clock()
    network = Network(clock, topology, protocol)
    algorithm = default_algorithm("all_reduce", gloo=network.protocol.rendezvous)
    made = schedule("all_reduce", 8, num_bytes=1_000_000, algorithm=algorithm)
    took = []
    for _ in range(repetitions):
        if pause_seconds:
            clock.run(until=clock.now + pause_seconds)
        started = time.perf_counter()
        one = start_collective(network, made, range(8), group="all", on_done=lambda member: None)
        for member in range(8):
            one.arrive(member)
        clock.run()
        took.append(time.perf_counter() - started)
    return [*took[:5], min(took[5:])]


# Kind of training: bytes of each of its all-reduces, in steps of 50 ms; every how many steps they happen.
TRAINING = {
    "AllReduce": ([200_000], 1),
    "AllReduce, 4 buckets": ([1_000_000] * 4, 1),
    "DiLoCo, H = 20": ([200_000], 20),
}
DISTURBED = {"": (0.0, 0.0), "10 % jitter": (0.1, 0.0), "1 % stragglers": (0.0, 0.01)}
STEP_SECONDS = 0.05


def requests(kind: str, disturbance: str, rank: int, steps: int) -> list[Request]:
    """What a rank of 8 asks of the kernel: buckets leave during the backward pass, which is half of a step."""
    sizes, every = TRAINING[kind]
    jitter, stragglers = DISTURBED[disturbance]
    draw = random.Random(rank)
    made: list[Request] = []
    for step in range(steps):
        seconds = STEP_SECONDS * math.exp(draw.gauss(0.0, jitter) - jitter**2 / 2)
        seconds *= 5 if draw.random() < stragglers else 1
        made.append(Advance(seconds / 2))
        if step % every:
            made.append(Advance(seconds / 2))
            continue
        keys = [Key("all", step * len(sizes) + bucket) for bucket in range(len(sizes))]
        for key, num_bytes in zip(keys, sizes, strict=True):
            made.append(Advance(seconds / 2 / len(sizes)))
            made.append(Post(key, rank, Call("all_reduce", tuple(range(8)), num_bytes, element_bytes=4)))
        made += map(Wait, keys)
    return [*made, Exit()]


def time_training(kind: str, disturbance: str, protocol: str, steps: int = 60) -> float:
    """Host seconds of each collective, the ranks' other requests included."""
    clock, topology = Clock(), Topology.load("wan-4-regions")
    network = Network(clock, topology, protocol)
    hosts = topology.place(8)

    def start(
        call: Call, group: Hashable, on_done: Callable[[int], None]
    ) -> tuple[Callable[[int, Call], None], Callable[[], None]]:
        algorithm = default_algorithm(call.op, gloo=network.protocol.rendezvous)
        made = schedule(call.op, 8, num_bytes=call.num_bytes, algorithm=algorithm, element_bytes=4)
        one = start_collective(network, made, hosts, group=group, on_done=on_done)
        return lambda member, _: one.arrive(member), one.cancel

    def refill(rank: int) -> NoReturn:
        raise AssertionError(rank)

    kernel = Kernel(
        8,
        refill,
        answer=lambda rank, value: None,
        start=start,
        clock=clock,
        collectives_in_flight=Protocol.parse(protocol).collectives_in_flight,
        on_row=lambda row: None,
    )
    for rank, stream in enumerate(kernel.streams):
        stream.extend(requests(kind, disturbance, rank, steps))
    started = time.perf_counter()
    kernel.run()
    sizes, every = TRAINING[kind]
    return (time.perf_counter() - started) / (len(sizes) * len(range(0, steps, every)))


PROTOCOLS = ("ideal", "linux-tcp", "gloo")


def print_small() -> None:
    """Two tables: a collective repeated, and those of training."""
    print(
        f"\n{'8 ranks, 1 MB, microseconds':32}"
        + "".join(f"{f'no. {i}':>8}" for i in range(1, 6))
        + "   later"
    )
    for name, topology in (("star", star(8)), ("wan", Topology.load("wan-4-regions"))):
        for pause in (0.0, 16.0):
            for protocol in PROTOCOLS:
                took = time_repeated(topology, protocol, pause)
                title = f"{name}, {protocol}" + (f", {pause:g} s apart" if pause else "")
                print(f"{title:32}" + "".join(f"{1e6 * each:8.0f}" for each in took))
    print(
        f"\n{'8 ranks on a WAN, ms a collective':40}" + "".join(f"{protocol:>10}" for protocol in PROTOCOLS)
    )
    for kind in TRAINING:
        for disturbance in DISTURBED:
            took = [time_training(kind, disturbance, protocol) for protocol in PROTOCOLS]
            title = f"{kind}, {disturbance}" if disturbance else kind
            print(f"{title:40}" + "".join(f"{1e3 * each:10.2f}" for each in took))


def main(large: bool) -> None:
    """Print a line for each case."""
    print_rings(large)
    print_small()


def print_rings(large: bool) -> None:
    """Rings of many ranks beside SimGrid's."""
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


if __name__ == "__main__":
    main("--large" in sys.argv[1:])
