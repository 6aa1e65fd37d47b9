"""Bytes counted without a simulation are those of the schedules that simulations carry out."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from conformance_cases import TRANSPORTS, run
from hypothesis import given
from hypothesis import strategies as st

from exogym_core.communicator import Communicator
from exogym_core.communicator.simulated.simulation import Schedules, World
from netsim import schedule
from netsim.collectives.schedules.algorithms import default_algorithm
from netsim.ranks import Call


def counted(load: Call, member: int) -> int:
    """Bytes that a rank over sockets counts."""
    return Schedules(World.build(1, None, None, None, None)).traffic(load, member)[0]


_WHOLE = ("all_reduce", "broadcast", "reduce", "reduce_scatter")


@pytest.mark.parametrize(
    "op", ["all_reduce", "broadcast", "reduce", "reduce_scatter", "all_gather", "gather", "scatter"]
)
@given(st.integers(1, 20), st.integers(0, 50), st.sampled_from([1, 2, 4, 8]), st.integers(0, 19))
def test_bytes_over_sockets_are_those_of_the_schedules(
    op: str, num_ranks: int, elements: int, width: int, root: int
) -> None:
    root %= num_ranks
    num_bytes = elements * width * (num_ranks if op == "reduce_scatter" else 1)
    plan_bytes = num_bytes * (1 if op in _WHOLE else num_ranks)
    plan = schedule(
        op,
        num_ranks,
        num_bytes=plan_bytes,
        algorithm=default_algorithm(op),
        root=root,
        element_bytes=width,
    )
    load = Call(op, tuple(range(num_ranks)), plan_bytes, root, width)
    assert [counted(load, member) for member in range(num_ranks)] == plan.sent_bytes.tolist()


@given(st.integers(1, 6), st.data())
def test_uneven_parts_are_counted_as_they_are(num_ranks: int, data: st.DataObject) -> None:
    row = st.lists(st.integers(0, 9), min_size=num_ranks, max_size=num_ranks)
    parts = [tuple(data.draw(row)) for _ in range(num_ranks)]
    plan = schedule("all_to_all", num_ranks, parts=tuple(parts))
    ranks = tuple(range(num_ranks))
    own = [
        counted(Call("all_to_all", ranks, sum(row), parts=(row,)), member) for member, row in enumerate(parts)
    ]
    assert own == plan.sent_bytes.tolist()


def _calls(comm: Communicator) -> None:
    size, rank = comm.world_size, comm.rank
    comm.all_reduce(torch.ones(7))
    comm.all_reduce(torch.ones(7, dtype=torch.float64), async_op=True).wait()
    comm.broadcast(torch.ones(5), src=1)
    comm.reduce(torch.ones(5), dst=2)
    comm.all_gather(torch.ones(3, dtype=torch.int16))
    comm.gather(torch.ones(3), dst=1)
    comm.scatter(torch.ones(3), [torch.ones(3)] * size if rank == 1 else None, src=1)
    comm.reduce_scatter(torch.ones(2 * size, 3))
    comm.all_to_all([torch.ones(rank + part) for part in range(size)])
    comm.all_to_all(torch.ones(size, 2))
    comm.barrier()
    ring = [comm.irecv(torch.ones(4), (rank - 1) % size), comm.isend(torch.ones(4), (rank + 1) % size)]
    for handle in ring:
        handle.wait()
    comm.broadcast_object("some text")
    comm.all_gather_object({"rank": rank})
    if rank > 0:
        comm.group([2, 1]).all_reduce(torch.ones(9))
    with comm.off_clock():
        comm.all_reduce(torch.ones(100))
        comm.send(torch.ones(4), 1) if rank == 0 else comm.recv(torch.ones(4), 0) if rank == 1 else None
    with comm.counted_as(11):
        comm.all_gather(torch.ones(6))
        comm.all_gather(torch.ones(2))
    comm.group([rank]).all_reduce(torch.ones(9))


def _counters(transport: str) -> list[tuple[int, int]]:
    traffic: list[Any] = run(transport, _calls, 3).traffic
    return [(rank.bytes_sent, rank.payload_bytes) for rank in traffic]


def test_every_transport_counts_the_same() -> None:
    counted = {transport: _counters(transport) for transport in TRANSPORTS}
    assert counted == dict.fromkeys(TRANSPORTS, counted["gloo"])
    sent, payload = counted["gloo"][0]
    assert payload > 0
    assert sent > 0


def _one(op: str, comm: Communicator) -> int:
    tensor = torch.ones(6)  # 24 bytes
    {"all_reduce": comm.all_reduce, "broadcast": comm.broadcast, "all_gather": comm.all_gather}[op](tensor)
    return comm.traffic.bytes_sent


@pytest.mark.parametrize(("op", "sent"), [("all_reduce", 32), ("broadcast", 48), ("all_gather", 48)])
def test_what_rank_0_of_three_sends(op: str, sent: int) -> None:
    assert run("threads", partial(_one, op), 3).results[0] == sent
