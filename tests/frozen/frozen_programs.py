"""Random programs of ranks: groups, calls that overlap, messages, letters, clocks; in all weathers.

A case's answer: `times` of ranks (ends, computing, waiting), of marks and of what the clock told them; `sent` bytes;
and `looks`, the bytes that crossed each link, where nobody else sends anything.
"""

from __future__ import annotations

import math
from collections import Counter
from random import Random
from typing import Any

import torch
from frozen_networks import digest, with_weather

import netsim
from exogym_core.communicator import Communicator, run_ranks

__all__ = ["answer", "names"]

_NUM_RANKS = 5
_TOPOLOGY = {
    "name": "two-regions",
    "regions": {
        "a": {"hosts": 3, "nic": "100 Mbit/s", "latency": "50 us"},
        "b": {"hosts": 2, "nic": "100 Mbit/s", "latency": "50 us"},
    },
    "wan": [{"between": ["a", "b"], "bandwidth": "10 Mbit/s", "rtt": "40 ms"}],
}
_PRESETS = ("ideal", "linux-tcp", "gloo")
_WEATHERS = ("none", "none", "events", "drift", "periodic", "crash", "mixed") * 2
_STEPS = (
    *("all_reduce", "all_reduce", "buckets", "all_gather", "broadcast", "all_to_all", "barrier"),
    *("send", "ring", "letters", "clock"),
)


def names() -> list[str]:
    """Protocol, weather, number; or a lone rank a host, shared hosts."""
    return [
        f"{protocol} {weather} {where} {number}"
        for protocol in _PRESETS
        for number, weather in enumerate(_WEATHERS)
        for where in ("apart", "shared")
    ]


def answer(name: str) -> dict[str, Any]:
    """When ranks came to what, and what they sent."""
    protocol, weather, where, _ = name.split()
    draw = Random(f"programs {name}")
    program = [_step(draw) for _ in range(10)]
    mapping = with_weather(_TOPOLOGY, weather, draw, 800)
    placement = ["a.0", "a.0", "b.0", "a.1", "b.0"] if where == "shared" else None
    algorithm = draw.choice(["auto", "ring"])

    def body(comm: Communicator) -> list[float]:
        values: list[float] = []
        letters: Counter[str] = Counter()
        groups = {members: comm.group(members) for _, members, *_ in program if comm.rank in members}
        for number, (what, members, num_elements, delays) in enumerate(program):
            comm.advance(delays[comm.rank] / 1e6)
            if comm.rank in members:
                _perform(groups[members], what, num_elements, values, letters)
            comm.mark({"number": number})
        return values

    try:
        run = run_ranks(
            body,
            _NUM_RANKS,
            mapping,
            protocol=protocol,
            placement=placement,
            collectives={"all_reduce": algorithm},
        )
    except netsim.DeadlockError as error:
        return {"given": digest([program, mapping]), "error": str(error).splitlines()}
    looks = (
        {}
        if "background" in mapping
        else {str(i): float(crossed) for i, crossed in enumerate(run.link_bytes)}
    )
    return {
        "given": digest([program, mapping]),
        "times": [
            run.rank_virtual_seconds,
            run.compute_seconds,
            run.exposed_seconds,
            run.network_seconds,
            run.results,
            [
                row.virtual_seconds
                for row in sorted(run.rows, key=lambda row: (row.rank, row.virtual_seconds))
            ],
        ],
        "sent": [traffic.bytes_sent for traffic in run.traffic],
        "collectives": run.collectives,
        "looks": looks,
    }


def _step(draw: Random) -> tuple[str, tuple[int, ...], int, list[int]]:
    """What is done, by which ranks, with how many elements, and how many microseconds each computes before."""
    members = tuple(sorted(draw.sample(range(_NUM_RANKS), draw.choice([2, 3, 5, 5, 5]))))
    delays = [draw.randrange(draw.choice([1, 2000, 60_000])) for _ in range(_NUM_RANKS)]
    return draw.choice(_STEPS), members, draw.choice([1, 7, 3000, 60_000]), delays


def _perform(
    comm: Communicator, what: str, num_elements: int, values: list[float], letters: Counter[str]
) -> None:
    tensor, last = torch.ones(num_elements), comm.world_size - 1
    if what == "all_reduce":
        comm.all_reduce(tensor, "avg")
    elif what == "buckets":
        handles = []
        for _ in range(3):
            comm.advance(0.004)
            handles.append(comm.all_reduce(tensor, async_op=True))
        comm.advance(0.01)
        for handle in handles:
            handle.wait()
    elif what == "all_gather":
        comm.all_gather(tensor)
    elif what == "broadcast":
        comm.broadcast(tensor, src=last)
    elif what == "all_to_all":
        comm.all_to_all([tensor[: (rank + 1) * (comm.rank + 2)] for rank in range(comm.world_size)])
    elif what == "barrier":
        comm.barrier()
    elif what == "send":
        if comm.rank == 0:
            comm.send(tensor, last)
        elif comm.rank == last:
            comm.recv(tensor, 0)
    elif what == "ring":
        waiting = comm.irecv(torch.empty(num_elements), (comm.rank - 1) % comm.world_size)
        comm.send(tensor, (comm.rank + 1) % comm.world_size)
        waiting.wait()
    elif what == "letters":
        if comm.rank == last:
            letters["awaited"] += last
            while letters["taken"] < letters["awaited"]:
                letters["taken"] += len(comm.take(wait=math.inf))
        else:
            comm.put(tensor, last)
    values.append(comm.now() if what in ("clock", "letters") else 0.0)
