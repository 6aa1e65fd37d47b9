"""What a run remembers does not grow with its length: entries are counted here, not seconds."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch
from kernel_ports import finished
from worlds import chain_form

from exogym_core.communicator import Communicator, run_ranks
from exogym_core.communicator.simulated.communicator import SimulatedCommunicator
from netsim.ranks import Advance, Call, Kernel, Key, Post, Request, Wait


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
    calls = kernel._calls
    assert kernel.end_seconds == [200.0, 200.0]
    assert (len(calls._in_flight), len(calls._queues), len(calls._sent), len(calls._asleep)) == (0, 0, 0, 0)


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
    for rounds in (100, 200):
        for groups, lanes, in_flight in run_ranks(partial(remembered, rounds=rounds, anew=anew), 8).results:
            assert (groups, lanes) == (1, 2), "the world's, sending and receiving"
            assert in_flight <= 8


def meeting(comm: Communicator) -> int:
    """Twenty rounds, of which rank 2 misses every second one without coming late; and each has a time to end in."""
    for number in range(20):
        comm.advance(1.0)
        if comm.rank == 2 and number % 2:
            continue
        members, got = comm.among_present(
            lambda peers, weights: peers.all_reduce(torch.ones(1)), 0.1, 100.0, number=number
        )
        assert got is None or float(got) == len(members)
    return len(comm.state.num_calls)  # type: ignore[attr-defined]


def test_rounds_that_a_rank_never_comes_to_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who comes to a later round comes to none before: what it missed was kept for it all the same."""
    kernels: list[Kernel] = []
    run = Kernel.run
    monkeypatch.setattr(Kernel, "run", lambda kernel: (kernels.append(kernel), run(kernel))[1])
    done = run_ranks(meeting, 3, chain_form("ab", "1 Gbit/s", "1 ms"))
    (kernel,) = kernels
    meetings = kernel._meetings
    assert len(meetings._meetings) <= 1, "the last, which rank 2 has not come past"
    assert not meetings._teams
    assert not kernel._calls._dissolved
    assert max(done.results) <= 1
