"""Published times of NCCL over sockets, predicted: `python benchmarks/nccl_sockets.py [Simulate_DP.md [held]]`.

The cells and their split are those of tests/golden/nccl/split.py. With the source's page as argument the errors of the
half that was read while building are printed, with `held` those of the other. Inputs: the source's scripts (delay and
rate of `tc netem` on each egress, tensors, gloo's barrier at the end of a measurement), NCCL's defaults on AWS (two
threads of eight sockets), AWS's packets of 9,001 bytes. Assumed: 10 Gbit/s and a round trip of 0.1 ms where nothing is
shaped.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "golden" / "nccl"))

from split import CELLS, figures

import netsim
from netsim import Protocol, Topology, schedule
from netsim.collectives.choice import library_algorithm
from netsim.collectives.start import Collective, start_collective
from netsim.weather.faults import network_with_weather

SHAPES = {
    "AWS default": ("10 Gbit/s", 0.0),
    "1 ms, 5 Gbit/s": ("5 Gbit/s", 1.0),
    "5 ms, 2 Gbit/s": ("2 Gbit/s", 5.0),
    "10 ms, 1 Gbit/s": ("1 Gbit/s", 10.0),
    "50 ms, 1 Gbit/s": ("1 Gbit/s", 50.0),
}
OPERATIONS = {"all_reduce": ("all_reduce",), "reduce and broadcast": ("reduce", "broadcast")}
NCCL = {"preset": "nccl-sockets", "socket_threads": 2, "sockets_per_thread": 8, "mtu": 9001}


def predict(cell: tuple[str, str, int, int]) -> float:
    """Seconds of one measurement: as many tensors as hosts, and a barrier of gloo's."""
    method, network, megabytes, num = cell
    rate, delay = SHAPES[network]
    names = [f"h{index}" for index in range(num)]
    links = [
        {
            "between": [name, "switch"],
            "up": rate,
            "down": "10 Gbit/s",
            "latency": f"{delay / 2 + 0.025} ms",
            "queue": 22_500,
        }
        for name in names
    ]
    star = Topology.from_mapping({"hosts": names, "routers": ["switch"], "links": links})
    size = (megabytes << 20) // num
    calls = [op for op in OPERATIONS[method] for _ in range(num)]
    barrier = netsim.collective(star, "barrier", protocol={"preset": "gloo", "mtu": 9001}, repeat=2).seconds
    return _stream_seconds(star, calls, size) + barrier


def _stream_seconds(star: Topology, calls: list[str], size: int) -> float:
    """Seconds of calls that every rank has queued on its GPU: it enters one when its part of the last is done.

    Played twice; the second time counts, on warm connections.
    """
    protocol = Protocol.parse(NCCL)
    network, faults = network_with_weather(star, protocol, None)
    hosts = list(range(len(star.hosts)))
    schedules = [
        schedule(
            op,
            len(hosts),
            num_bytes=size,
            algorithm=library_algorithm(protocol, op, hosts, size),
            hosts=hosts,
            topology=star,
        )
        for op in calls
    ]
    started = 0.0
    for _ in range(2):
        started, finished = network.env.now, [0] * len(hosts)
        queue: list[Collective] = []

        def enter_next(member: int, finished: list[int] = finished, queue: list[Collective] = queue) -> None:
            if (number := finished[member]) < len(schedules):
                if number == len(queue):
                    queue.append(
                        start_collective(network, schedules[number], hosts, group="nccl", on_done=leave)
                    )
                queue[number].arrive(member)

        def leave(member: int, finished: list[int] = finished) -> None:
            finished[member] += 1
            enter_next(member)

        for member in hosts:
            enter_next(member)
        faults.run_until(lambda finished=finished: min(finished) == len(schedules))
    return network.env.now - started


def main(arguments: list[str]) -> None:
    predicted = {cell: predict(cell) for cell in CELLS}
    if not arguments:
        for cell, seconds in predicted.items():
            print(*cell, f"{seconds:.3f}", sep="\t")
        return
    measured = figures(Path(arguments[0]).read_text())
    wanted = "held" if arguments[1:] == ["held"] else "build"
    errors: dict[str, list[float]] = {}
    for cell, half in CELLS.items():
        if half == wanted:
            error = predicted[cell] / measured[cell] - 1
            errors.setdefault(cell[0], []).append(error)
            print(*cell, f"{predicted[cell]:.3f}", measured[cell], f"{error:+.1%}", sep="\t")
    for name, some in (*errors.items(), ("all", [error for each in errors.values() for error in each])):
        sizes = sorted(map(abs, some))
        print(f"{name}: {len(some)} cells, median {median(sizes):.1%}, worst {sizes[-1]:.1%}")


if __name__ == "__main__":
    main(sys.argv[1:])
