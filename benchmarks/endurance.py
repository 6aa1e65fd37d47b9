"""Whether long runs stay flat: memory and host time a step, as the steps go by.

    python benchmarks/endurance.py [steps]      100,000 steps of 64 ranks, if not told otherwise

Every step: capacities drift, all ranks compute, 8 of 64 drawn at random average over a group of their own, 16 send
something to another one, and now and then everybody averages. Ten lines are printed: processor time a step and memory
in use so far, and what the network and its collectives remember.
"""

from __future__ import annotations

import gc
import random
import resource
import sys
import time

from netsim.collectives import play, schedule
from netsim.collectives.times.domains import Domains
from netsim.fluid.clock import Clock
from netsim.fluid.network import Network
from netsim.topology import Topology
from netsim.topology.weather import Drift
from netsim.weather.faults import Faults

RANKS = 64
STEP_SECONDS = 1.0


def start(network: Network, op: str, hosts: list[int], num_bytes: int, group: object) -> None:
    """All members of a collective enter now."""
    made = schedule(op, len(hosts), num_bytes=num_bytes, algorithm="direct" if op == "sendrecv" else "ring")
    one = play(network, made, hosts, group=group, on_done=lambda member: None)
    for member in range(len(hosts)):
        one.arrive(member)


def live(steps: int) -> None:
    """Print a line at each tenth of the steps."""
    region = {"hosts": RANKS // 4, "nic": "10 Gbit/s", "latency": "50 us"}
    wan = [
        {"between": list(pair), "bandwidth": "1 Gbit/s", "latency": "40 ms"}
        for pair in ("ab", "bc", "cd", "da")
    ]
    topology = Topology.from_mapping({"regions": dict.fromkeys("abcd", region), "wan": wan})
    clock, draw = Clock(), random.Random(0)
    network = Network(clock, topology, "linux-tcp")
    lines = tuple(link.index for link in topology.links if "." not in link.source + link.target)
    Faults(network).add(Drift(lines, "lognormal", 10 * STEP_SECONDS, sigma=0.3))
    remembered = Domains.of(network).memory
    print(
        f"{'steps':>8} {'ms a step':>10} {'peak MB':>9} {'connections':>12} {'steps kept':>11} {'clock queue':>12}"
    )
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
                f"{len(remembered.steps):11} {len(clock._queue):12}",
                flush=True,
            )
            began = now


if __name__ == "__main__":
    live(int(sys.argv[1]) if len(sys.argv) > 1 else 100_000)
