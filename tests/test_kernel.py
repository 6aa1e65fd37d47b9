"""The kernel: streams of requests in, exact virtual times out; what it remembers; ranks that poll the clock."""

from __future__ import annotations

import math
import random
from functools import partial

import pytest
import torch
from worlds import chain_form, finished

from exogym_core.communicator import Communicator, run_ranks
from exogym_core.communicator.simulated.communicator import SimulatedCommunicator
from netsim.errors import DeadlockError, InputError
from netsim.network.clock import on_grid
from netsim.ranks import Advance, Call, Key, Post, Request, Wait

GRID = 2.0**-30


def test_never_is_on_the_grid_and_no_time_is_not() -> None:
    assert on_grid(math.inf) == math.inf
    for seconds in (-1e-9, math.nan):
        with pytest.raises(InputError, match=f"must not be negative, got {seconds}"):
            on_grid(seconds)


@pytest.mark.parametrize("seconds", [math.inf, math.nan, -1.0])
def test_computing_takes_a_finite_time(seconds: float) -> None:
    with pytest.raises(InputError, match=f"rank 1: advance: got {seconds} seconds; give a finite time"):
        finished([[Advance(1.0)], [Advance(seconds)]])


# --- what a run remembers does not grow with its length -----------------------------------------------------


@pytest.mark.parametrize("waits", [True, False])
def test_calls_that_are_over_are_forgotten_waited_for_or_not(waits: bool) -> None:
    """Each call without a wait stayed for ever, as did the queue of each group that ever was."""

    def rank(member: int) -> list[Request]:
        requests: list[Request] = []
        for number in range(100):
            for key, op in ((Key(("group", number), 0), "all_reduce"), (Key("pair", number), "sendrecv")):
                requests += [Advance(1.0), Post(key, member, Call(op, (0, 1), 8))]
                requests += [Wait(key)] if waits or member else []
        return requests

    kernel, _ = finished([rank(0), rank(1)])
    calls = kernel.calls
    assert kernel.seconds.end == [200.0, 200.0]
    assert (len(calls._in_flight), len(calls._queues), len(calls.sent._keys), len(calls._asleep)) == (
        0,
        0,
        0,
        0,
    )


def remembered(comm: Communicator, rounds: int, anew: bool) -> tuple[int, int, int]:
    draw, value = random.Random(0), torch.ones(1)
    for number in range(rounds):
        ranks = list(range(comm.world_size))
        draw.shuffle(ranks)
        place = ranks.index(comm.rank) // 4 * 4
        island = ranks[place : place + 4]
        group = comm.group(island) if anew else comm.group(island, reuse=True, number=number)
        total = group.all_reduce(torch.tensor([float(comm.rank)]))
        assert float(total) == sum(island)
        comm.isend(value, (comm.rank + 1) % comm.world_size)  # nobody waits for it
        comm.recv(value, (comm.rank - 1) % comm.world_size)
    del group
    assert isinstance(comm, SimulatedCommunicator)
    state = comm.state
    return len(state.num_calls), sum(map(len, state.num_calls.values())), len(state.in_flight)


@pytest.mark.parametrize("anew", [True, False])
def test_ranks_release_closed_groups_and_sends_without_a_wait(anew: bool) -> None:
    """Every group ever made kept a counter on each of its ranks, and every send whose handle was dropped its values."""
    for groups, lanes, in_flight in run_ranks(partial(remembered, rounds=60, anew=anew), 8).results:
        assert (groups, lanes) == (1, 2), "the world's, sending and receiving"
        assert in_flight <= 8


# --- ranks that wait for the clock beside others that are off it --------------------------------------------

WORKERS = ["threads", {"kind": "processes", "processes": 3}]
TOPOLOGY = chain_form("abc", "1 Gbit/s", "1 ms")


@pytest.mark.parametrize("workers", WORKERS)
def test_a_deadlock_is_reported_as_before(workers):
    def body(comm):
        if comm.rank == 1:
            comm.now()
            return
        with comm.off_clock():
            comm.all_reduce(torch.ones(1))

    with pytest.raises(DeadlockError, match=r"deadlock: rank 0 waits for rank"):
        run_ranks(body, 3, TOPOLOGY, workers=workers)
