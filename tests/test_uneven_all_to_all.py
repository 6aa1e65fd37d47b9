"""all_to_all, whose sizes are found as its members enter one by one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import regions_form

from exogym_core.communicator import Communicator, run_ranks
from netsim import Clock, Network, Protocol, Topology, schedule, start_collective
from netsim.collectives.start import start_all_to_all

TOPOLOGY = regions_form({"a": 3}, "8 Mbit/s", "1 ms", protocol="ideal")


def exchange(comm: Communicator, asks: bool, busy: bool) -> list[Any]:
    """Rank 1 comes late, having asked for the time or not, while a message is on its way or not."""
    message = torch.ones(100_000)
    if busy and comm.rank:
        handle = comm.isend(message, 2) if comm.rank == 1 else comm.irecv(message, 1)
    reported = []
    if comm.rank == 1:
        for _ in range(3):
            comm.advance(0.0625)
            reported += [comm.now()] if asks else []
    parts = [torch.full((1000 * (comm.rank + 1) + other,), float(other)) for other in range(3)]
    got = [len(part) for part in comm.all_to_all(parts)]
    if busy and comm.rank:
        handle.wait()
    assert reported == ([0.0625, 0.125, 0.1875] if asks and comm.rank == 1 else [])
    return [got, comm.now(), comm.traffic.bytes_sent]


@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize("workers", ["threads", {"kind": "processes", "processes": 3}])
@pytest.mark.parametrize("protocol", ["ideal", "gloo"])
def test_reading_the_clock_before_arriving_changes_nothing(busy: bool, workers: Any, protocol: str) -> None:
    results = [
        run_ranks(
            partial(exchange, asks=asks, busy=busy), 3, TOPOLOGY, workers=workers, protocol=protocol
        ).results
        for asks in (False, True)
    ]
    assert results[0] == results[1]
    assert [row[0] for row in results[0]] == [[1000 + rank, 2000 + rank, 3000 + rank] for rank in range(3)]
    assert min(row[1] for row in results[0]) > 0.1875


def ends(
    rows: Sequence[Sequence[int]], arrivals: Sequence[float], known: bool, protocol: str, disturbed: bool
) -> dict[int, float]:
    """When each member is through, with all sizes known from the start or each as its member enters."""
    clock = Clock()
    topology = Topology.from_mapping(TOPOLOGY)
    network = Network(clock, topology, Protocol.parse(protocol))
    made = {}

    def on_done(member: int) -> None:
        made[member] = clock.now

    table = tuple(map(tuple, rows))
    if known:
        started = start_collective(
            network, schedule("all_to_all", 3, parts=table), (0, 1, 2), on_done=on_done
        )
        enter = lambda member, row: started.arrive(member)  # noqa: E731
    else:
        enter, _ = start_all_to_all(network, (0, 1, 2), on_done=on_done)

    def member(rank: int) -> Any:
        yield clock.timeout(arrivals[rank])
        enter(rank, table[rank])

    for rank in range(3):
        clock.process(member(rank))
    if disturbed:
        clock.at(0.02).callbacks.append(lambda event: network.send(0, 1, 30_000, lambda: None))
    clock.run()
    return made


BYTES = st.integers(0, 50_000)


@given(
    st.lists(st.lists(BYTES, min_size=3, max_size=3), min_size=3, max_size=3),
    st.lists(st.sampled_from([0.0, 0.01, 0.03]), min_size=3, max_size=3),
    st.sampled_from(["ideal", "linux-tcp", "gloo"]),
    st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_sizes_that_come_late_give_the_times_of_sizes_known_before(
    rows: list[list[int]], arrivals: list[float], protocol: str, disturbed: bool
) -> None:
    known, unknown = (ends(rows, arrivals, is_known, protocol, disturbed) for is_known in (True, False))
    assert known == unknown
    assert sorted(known) == [0, 1, 2]
