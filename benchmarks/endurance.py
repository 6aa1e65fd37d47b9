"""Memory and host time a step of long runs, in the course of their steps.

    python benchmarks/endurance.py [steps]          the network alone: 100,000 steps of 64 ranks by default
    python benchmarks/endurance.py ranks [steps]    ranks, their calls and the network: 20,000 steps

On the network, every step: capacities drift, all ranks compute, 8 of 64 drawn at random average over a group of their
own, 16 send something to another one, and now and then everybody averages. Ten lines are printed: processor time a step
and memory in use so far, and what the network and its clock keep. With `ranks` four average and four send to
four others without waiting for it; there are twenty lines.
"""

from __future__ import annotations

import gc
import random
import resource
import sys
import time
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import torch

from exogym_core.communicator import Communicator, run_ranks
from exogym_core.communicator.simulated.communicator import SimulatedCommunicator
from netsim import Clock, Drift, Faults, Network, Topology, schedule, start_collective

if TYPE_CHECKING:
    from netsim.ranks import StampedRow

RANKS = 64
STEP_SECONDS = 1.0
REGIONS = {name: {"hosts": RANKS // 4, "nic": "10 Gbit/s", "latency": "50 us"} for name in "abcd"}
LINES = ("ab", "bc", "cd", "da")
WAN = [{"between": list(pair), "bandwidth": "1 Gbit/s", "latency": "40 ms"} for pair in LINES]


def start(network: Network, op: str, hosts: list[int], num_bytes: int, group: object) -> None:
    """All members of a collective enter now."""
    made = schedule(op, len(hosts), num_bytes=num_bytes, algorithm="direct" if op == "sendrecv" else "ring")
    one = start_collective(network, made, hosts, group=group, on_done=lambda member: None)
    for member in range(len(hosts)):
        one.arrive(member)


def live(steps: int) -> None:
    """Print a line at each tenth of the steps."""
    topology = Topology.from_mapping({"regions": REGIONS, "wan": WAN})
    clock, draw = Clock(), random.Random(0)
    network = Network(clock, topology, "linux-tcp")
    faults = Faults(network)
    for link in topology.links:
        if "." not in link.source + link.target and link.source < link.target:
            ends = link.source, link.target
            faults.add(Drift(link=ends, kind="lognormal", every=10 * STEP_SECONDS, sigma=0.3))
    print(f"{'steps':>8} {'ms a step':>10} {'peak MB':>9} {'connections':>12} {'clock queue':>12}")
    began, every = time.process_time(), max(steps // 10, 1)
    for step in range(1, steps + 1):
        group = sorted(draw.sample(range(RANKS), 8))
        start(network, "all_reduce", group, 100_000, tuple(group))
        for _ in range(8):
            start(network, "sendrecv", draw.sample(range(RANKS), 2), draw.randrange(1000, 20_000), "pairs")
        if not step % 50:
            clock.run(until=clock.now + STEP_SECONDS / 2)
            start(network, "all_reduce", list(range(RANKS)), 1_000_000, "all")
        clock.run(until=step * STEP_SECONDS)
        if not step % every:
            gc.collect()
            now = time.process_time()
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
            print(
                f"{step:8} {1e3 * (now - began) / every:10.2f} {peak:9.1f} {network.num_connections:12} "
                f"{len(clock.upcoming):12}",
                flush=True,
            )
            began = now


@lru_cache(maxsize=1024)
def drawn(step: int) -> tuple[list[int], list[list[int]]]:
    """Ranks that average in a step, and pairs that send; equal for all ranks."""
    draw = random.Random(step)
    return sorted(draw.sample(range(RANKS), 4)), [draw.sample(range(RANKS), 2) for _ in range(4)]


def body(comm: Communicator, steps: int) -> tuple[int, int]:
    """Steps of a rank; returns the calls that it keeps: groups counted, and calls not waited for."""
    values = torch.zeros(256)
    for step in range(1, steps + 1):
        comm.advance(STEP_SECONDS)
        group, pairs = drawn(step)
        if comm.rank in group:
            comm.group(group, reuse=True, number=step).all_reduce(values)
        for source, target in pairs:
            if comm.rank == source:
                comm.isend(values, target)  # nobody waits for it
            if comm.rank == target:
                comm.recv(values, source)
        if not step % 200:
            comm.all_reduce(values)
        if comm.rank == 0:
            comm.mark({"step": step})
    assert isinstance(comm, SimulatedCommunicator)
    return len(comm.state.num_calls), len(comm.state.in_flight)


def run(steps: int) -> None:
    """Print a line at each twentieth of the steps, by 64 threads, their communicators, the kernel and the network."""
    every, before = max(steps // 20, 1), [time.process_time()]
    print(f"{'steps':>8} {'us a rank-step':>15} {'MB in use':>10}")

    def row(marked: StampedRow) -> None:
        step = marked.row["step"]
        if not step % every:
            gc.collect()
            now = time.process_time()
            print(f"{step:8} {1e6 * (now - before[0]) / every / RANKS:15.1f} {in_use():10.1f}", flush=True)
            before[0] = now

    drift = [{"link": list(pair), "kind": "lognormal", "every": "10 s", "sigma": 0.3} for pair in LINES]
    network = {"name": "ring-of-regions", "regions": REGIONS, "wan": WAN, "drift": drift}
    done = run_ranks(partial(body, steps=steps), RANKS, network, on_row=row, keep_rows=False)
    print(f"left: {max(done.results)} (groups counted, calls not waited for), {done.virtual_seconds:.0f} s")


def in_use() -> float:
    """MB of memory that the process has now."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 1e6


if __name__ == "__main__":
    if sys.argv[1:2] == ["ranks"]:
        run(int(sys.argv[2]) if len(sys.argv) > 2 else 20_000)
    else:
        live(int(sys.argv[1]) if len(sys.argv) > 1 else 100_000)
