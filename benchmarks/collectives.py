"""Collectives on the live network: processor time of one, by protocol, number of ranks and jitter.

    python benchmarks/collectives.py                      this checkout; compiled where it was built so
    python benchmarks/collectives.py --interpreted        the engine's sources
    python benchmarks/collectives.py --against CHECKOUT   against another checkout, in turns, with the ratio
    python benchmarks/collectives.py --curve              over 2 to 1,024 ranks
    python benchmarks/collectives.py --ranks 256 --best 4 of so many ranks alone, the best of four rounds

Ranks compute for 50 ms, more or less by a normal jitter, and meet in a ring all-reduce; the first collective, which
opens connections, is in the mean. `run_ranks` goes through threads and the kernel as a program does.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import harness

if TYPE_CHECKING:
    from collections.abc import Iterator

ROWS = [
    (kind, ranks, protocol, num_bytes, jitter)
    for kind, ranks, sizes, protocols in (
        ("network", 8, (4_000, 4_000_000), ("ideal", "linux-tcp", "gloo")),
        ("network", 64, (4_000_000,), ("ideal", "linux-tcp", "gloo")),
        ("run_ranks", 8, (4_000,), ("ideal", "linux-tcp", "gloo")),
        ("run_ranks", 64, (4_000,), ("ideal", "linux-tcp")),
    )
    for protocol in protocols
    for num_bytes in sizes
    for jitter in (0.0, 0.1)
]
CURVE = [
    ("network", ranks, protocol, 1_000_000, jitter)
    for ranks in (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
    for protocol in ("ideal", "linux-tcp")
    for jitter in (0.0, 0.1)
]


RANKS_ROWS = [
    (protocol, num_bytes) for num_bytes in (1_000_000, 4_000) for protocol in ("ideal", "linux-tcp", "gloo")
]


def seconds_a_collective(kind: str, ranks: int, protocol: str, num_bytes: int, jitter: float) -> float:
    """Processor seconds of one collective."""
    steps = max(3, min(40, 400 // ranks)) if ranks <= 128 else 1
    delays = [
        [0.05 * max(1 + jitter * random.Random(f"{rank} {step}").gauss(0, 1), 0.0) for step in range(steps)]
        for rank in range(ranks)
    ]
    run = _on_network if kind == "network" else _with_ranks
    return run(ranks, protocol, num_bytes, delays) / steps


def _on_network(ranks: int, protocol: str, num_bytes: int, delays: list[list[float]]) -> float:
    import netsim
    from netsim import schedule, start_collective

    topology = netsim.Topology.load("wan-4-regions")
    hosts = tuple(rank % len(topology.hosts) for rank in range(ranks))
    planned = schedule(
        "all_reduce", ranks, num_bytes=num_bytes, algorithm="ring", hosts=hosts, topology=topology
    )
    clock = netsim.Clock()
    network = netsim.Network(clock, topology, protocol)
    running: dict[int, Any] = {}
    awaited: dict[tuple[int, int], Any] = {}

    def begin(step: int, rank: int) -> Any:
        if step not in running:
            running.pop(step - 3, None)
            running[step] = start_collective(
                network,
                planned,
                hosts,
                group="all",
                on_done=lambda member: awaited.pop((step, member)).succeed(),
            )
        event = awaited[step, rank] = clock.event()
        running[step].arrive(rank)
        return event

    def process(rank: int) -> Iterator[Any]:
        for step, seconds in enumerate(delays[rank]):
            yield clock.timeout(seconds)
            yield begin(step, rank)

    for rank in range(ranks):
        clock.process(process(rank))
    began = time.process_time()
    clock.run()
    return time.process_time() - began


def _with_ranks(ranks: int, protocol: str, num_bytes: int, delays: list[list[float]]) -> float:
    import torch

    from exogym_core.workers.run import run_ranks

    torch.set_num_threads(1)

    def body(comm: Any) -> None:
        tensor = torch.ones(num_bytes // 4)
        for seconds in delays[comm.rank]:
            comm.advance(seconds)
            comm.all_reduce(tensor)

    run_ranks(body, ranks, topology="wan-4-regions", protocol=protocol)
    began = time.process_time()
    run_ranks(body, ranks, topology="wan-4-regions", protocol=protocol)
    return time.process_time() - began


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--against", type=Path, metavar="CHECKOUT")
    parser.add_argument("--interpreted", action="store_true")
    parser.add_argument("--curve", action="store_true")
    parser.add_argument("--ranks", type=int, metavar="N")
    parser.add_argument(
        "--best", type=int, default=1, metavar="N", help="rounds, with the other in turns [1]"
    )
    parser.add_argument("--row", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.interpreted:
        from netsim.network.build import load_sources

        load_sources()
    if given.row:
        print(seconds_a_collective(*json.loads(given.row)))
        return
    titles = ["", "ranks", "protocol", "bytes", "jitter", "ms"]
    harness.heading(*titles, *(["other ms", "ratio"] if given.against else []))
    rows = CURVE if given.curve else ROWS
    if given.ranks is not None:
        rows = [("network", given.ranks, *each, 0.0) for each in RANKS_ROWS]
    for row in rows:
        kind, ranks, protocol, num_bytes, jitter = row
        mine, others = [], []
        for _ in range(given.best):
            mine.append(seconds_a_collective(*row))
            if given.against:
                others.append(harness.in_process(__file__, "--row", json.dumps(row), checkout=given.against))
        cells = [kind, ranks, protocol, f"{num_bytes:,}", f"{jitter:.0%}", f"{1e3 * min(mine):.2f}"]
        if given.against:
            cells += [f"{1e3 * min(others):.2f}", f"{min(mine) / min(others):.3f}"]
        harness.row(*cells)


if __name__ == "__main__":
    main()
