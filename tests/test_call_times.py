"""Calls with a virtual time-out: a rank that waits longer gets an error, and the group is broken for its members."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import worlds

from exogym_core.communicator import run_ranks
from exogym_core.communicator.simulated.communicator import SimulatedCommunicator
from netsim import Topology
from netsim.errors import BrokenCallError

if TYPE_CHECKING:
    from collections.abc import Callable

CARRIERS: list[Any] = ["threads", {"kind": "processes", "processes": 2}]
TOLD = tuple[str, float]


def star(*events: dict[str, Any], **more: Any) -> Topology:
    return worlds.star(events=list(events), **more)


def outcome(comm: SimulatedCommunicator, seconds: float = 5.0) -> TOLD:
    """How an all-reduce of little ends here, with a time for each call, and when."""
    comm.call_seconds = seconds
    try:
        comm.all_reduce(torch.ones(1))
    except BrokenCallError as error:
        message = str(error).partition(": ")[2]
    else:
        message = "done"
    return message, comm.now()


def late(comm: SimulatedCommunicator) -> list[Any]:
    if comm.rank == 1:
        comm.advance(7.0)
    first = outcome(comm)
    again = outcome(comm)
    return [first, again, outcome(comm.group([0, 1, 2]))]


@pytest.mark.parametrize("workers", CARRIERS)
def test_a_time_out_raises_at_its_instant_and_breaks_the_group(workers: Any) -> None:
    """All posted at 0 but rank 1, who comes at 7: at 5 the others' time is up. New groups are whole."""
    results = run_ranks(late, 3, star(), workers=workers).results  # type: ignore[arg-type]
    for rank in (0, 2):
        (message, at), (told_again, at_again), new = results[rank]
        assert "Timed out waiting 5000ms" in message
        assert "Connection closed by peer" in told_again
        assert at == at_again == 5.0
        assert new[0] == "done"
        assert new[1] == results[0][2][1] > 7.0
    assert ["Connection closed by peer" in message for message, _ in results[1][:2]] == [True, True]
    assert [at for _, at in results[1][:2]] == [7.0, 7.0]


def first_too_slow(comm: SimulatedCommunicator) -> list[TOLD]:
    comm.call_seconds = 2.0 if comm.rank == 0 else 60.0
    try:
        comm.broadcast(torch.zeros(4_000_000, dtype=torch.uint8))
    except BrokenCallError as error:
        return [(str(error).rpartition(": ")[2], comm.now())]
    return [("done", comm.now())]


def test_a_call_that_takes_too_long_on_the_network_ends_for_all_members() -> None:
    results = run_ranks(first_too_slow, 3, star()).results  # type: ignore[arg-type]
    assert results[0] == [("Timed out waiting 2000ms", 2.0)]
    assert results[1:] == [[("Connection closed by peer", 2.0)]] * 2


def test_a_time_that_is_long_enough_changes_nothing() -> None:
    def body(comm: SimulatedCommunicator, seconds: float) -> list[float]:
        comm.call_seconds = seconds
        ends = []
        for size in (1, 100_000):
            comm.advance(0.1 * comm.rank)
            comm.all_reduce(torch.ones(size))
            handle = comm.isend(torch.ones(size), (comm.rank + 1) % 3)
            comm.irecv(torch.ones(size), (comm.rank - 1) % 3).wait()
            handle.wait()
            ends.append(comm.now())
        return ends

    free, timed = (
        run_ranks(lambda comm, s=s: body(comm, s), 3, star()).results  # type: ignore[misc]
        for s in (float("inf"), 1e6)
    )
    assert free == timed


def test_a_connection_that_tcp_gives_up_is_lost_for_its_group() -> None:
    """A dead link, and calls with more time than TCP has: the connection is given up first, after 924.6 s."""
    topology = star({"link": ["b", "switch"], "at": "1 s", "down": True}, protocol="linux-tcp")

    def body(comm: SimulatedCommunicator) -> TOLD:
        comm.advance(2.0)
        return outcome(comm, 5000.0)

    for message, at in run_ranks(body, 3, topology).results:  # type: ignore[arg-type]
        assert "Connection closed by peer" in message
        assert 900 < at < 1000


def told(call: Callable[[], object]) -> str:
    try:
        call()
    except BrokenCallError as error:
        return str(error).rpartition(": ")[2]
    return "done"


def rank_2_gives_and_goes(comm: SimulatedCommunicator) -> dict[str, str]:
    """Rank 2 gives what others need of it, and ends; these come later, and then need what it never gives."""
    comm.call_seconds, ones = 50.0, torch.ones(1)
    rank, given = comm.rank, torch.full((1,), float(comm.rank))
    if rank == 2:
        comm.broadcast(given, src=2)
        comm.gather(given, dst=0)
        return {}
    comm.advance(5.0 + rank)
    ends = {
        "broadcast": told(lambda: comm.broadcast(given, src=2)),
        "gather": told(lambda: comm.gather(given, dst=0)),
    }
    assert given == 2.0
    to_other = (lambda: comm.send(ones, 1)) if rank == 0 else (lambda: comm.recv(ones, 0))
    ends["message"] = told(to_other)
    ends["all_reduce"] = told(lambda: comm.all_reduce(ones))
    if rank == 0:
        ends["message from 2"] = told(lambda: comm.recv(ones, 2))
    ends["message after"] = told(to_other)
    ends["again"] = told(lambda: comm.all_reduce(ones))
    return ends


@pytest.mark.parametrize("workers", CARRIERS)
def test_an_ended_rank_breaks_only_calls_that_need_more_of_it(workers: Any) -> None:
    """As gloo does: its connections to others are closed, and those between others are not."""
    results = run_ranks(rank_2_gives_and_goes, 3, star(), workers=workers).results  # type: ignore[arg-type]
    closed = "Connection closed by peer"
    expected = {
        "broadcast": "done",
        "gather": "done",
        "message": "done",
        "all_reduce": closed,
        "message after": "done",
        "again": closed,
    }
    assert results[1] == expected
    assert results[0] == expected | {"message from 2": closed}
