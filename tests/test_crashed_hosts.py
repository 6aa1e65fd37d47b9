"""Ranks on a host that crashes stand still until it is back; work under way is lost; endless waits are reported."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import worlds
from experiments import fitted, three_steps

from exogym_core.communicator import Communicator, RunResult, run_ranks
from exogym_core.strategy import DiLoCoStrategy
from netsim import Topology
from netsim.errors import DeadlockError


def star(*events: dict[str, Any], **weather: Any) -> Topology:
    return worlds.star(events=list(events), **weather)


def crash(host: str, at: float, seconds: float | None = None) -> dict[str, Any]:
    lasting = {} if seconds is None else {"for": f"{seconds} s"}
    return {"host": host, "at": f"{at} s", "crash": True, **lasting}


def ends_of_b(*events: dict[str, Any]) -> list[float]:
    run = run_ranks(three_steps, 3, star(*events))
    assert run.results[0] == run.results[2] == [1.0, 2.0, 3.0]
    return run.results[1]


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([crash("b", 1.5, 10)], [1.0, 12.5, 13.5]),  # the step that began at 1 begins again at 11.5
        ([crash("b", 0, 10)], [11.0, 12.0, 13.0]),
        ([crash("b", 1.5, 0.25)], [1.0, 2.75, 3.75]),
        ([crash("b", 1.25, 1), crash("b", 2.5, 1)], [1.0, 4.5, 5.5]),  # lost twice
        ([crash("b", 1.25, 5), crash("b", 2.5, 1)], [1.0, 7.25, 8.25]),  # one crash in the other
        ([crash("b", 1.25), {"host": "b", "at": "4 s", "up": True}], [1.0, 5.0, 6.0]),
        ([crash("b", 1.0, 1)], [3.0, 4.0, 5.0]),  # what happens to hosts goes first in its instant
        ([crash("b", 3.5, 1)], [1.0, 2.0, 3.0]),
    ],
)
def test_a_rank_stands_still_and_begins_again_what_it_was_computing(
    events: list[dict[str, Any]], expected: list[float]
) -> None:
    assert ends_of_b(*events) == expected


def test_what_is_lost_counts_neither_as_computing_nor_as_waiting(tmp_path: Path) -> None:
    run = run_ranks(three_steps, 3, star(crash("b", 1.5, 10)))
    assert run.compute_seconds == [3.0, 3.0, 3.0]
    assert run.exposed_seconds == [0.0, 0.0, 0.0]
    assert run.virtual_seconds == 13.5


def test_what_a_rank_does_between_steps_waits_for_its_host() -> None:
    def body(comm: Communicator) -> float:
        comm.advance(1.0)
        if comm.rank:
            comm.advance(1.0)
        comm.send(torch.zeros(0), 1) if comm.rank == 0 else comm.rank == 1 and comm.recv(torch.empty(0), 0)
        return comm.now()

    # The message waits for its receiver, and c notices nothing. No call divides b's two seconds: all is lost.
    assert run_ranks(body, 3, star(crash("b", 1.5, 10))).results == [13.5, 13.5, 2.0]


def test_a_rank_that_no_other_waits_for_is_reported_too() -> None:
    with pytest.raises(DeadlockError) as error:
        run_ranks(three_steps, 3, star(crash("b", 2.5)))
    assert str(error.value) == (
        "host b crashed at 2.5 s and never comes back, and rank 1 on a crashed host waits for the network: "
        "let an event bring it back\n"
        "  rank 1: on a crashed host"
    )
    run_ranks(three_steps, 3, star(crash("b", 3.5)))  # it has ended by then


@pytest.mark.parametrize(
    "events", [[crash("a", 1.5, 10)], [crash("a", 1.5), {"host": "a", "at": "11.5 s", "up": True}]]
)
def test_a_host_without_links_comes_back(events: list[dict[str, Any]]) -> None:
    """No link was revived by it, so that it was said never to come back."""
    run = run_ranks(three_steps, 2, {"hosts": ["a"], "links": [], "events": events})
    assert run.results == [[1.0, 12.5, 13.5]] * 2


def walk(comm: Communicator) -> None:
    """Computes and communicates in a random order, the same on all ranks; async calls too."""
    chance = random.Random(1)
    handles = []
    for step in range(12):
        comm.advance(chance.choice([0.05, 0.3, 0.7]) * (1 + comm.rank % 2))
        kind = chance.choice(["all_reduce", "broadcast", "async", "message", "none"])
        if kind == "all_reduce":
            comm.all_reduce(torch.ones(5000))
        elif kind == "broadcast":
            comm.broadcast(torch.ones(5000), step % comm.world_size)
        elif kind == "async":
            handles.append(comm.all_reduce(torch.ones(5000), async_op=True))
        elif kind == "message" and comm.rank < 2:
            comm.send(torch.ones(100), 1) if comm.rank == 0 else comm.recv(torch.empty(100), 0)
        comm.mark({"step": step})
    for handle in handles:
        handle.wait()


def facts(run: RunResult[Any]) -> list[Any]:
    rows = [(row.rank, row.virtual_seconds, row.compute_seconds, row.exposed_seconds) for row in run.rows]
    return [run.rank_virtual_seconds, run.compute_seconds, run.exposed_seconds, rows]


def test_a_crash_of_a_host_without_ranks_changes_nothing() -> None:
    calm = run_ranks(walk, 2, star(), placement=["a", "b"])
    assert facts(run_ranks(walk, 2, star(crash("c", 0.5)), placement=["a", "b"])) == facts(calm)


def test_crashes_that_never_meet_a_step_change_nothing() -> None:
    calm = run_ranks(walk, 3, star())
    end = calm.virtual_seconds
    assert end is not None
    for host in "abc":
        assert facts(run_ranks(walk, 3, star(crash(host, end + 1, 1)))) == facts(calm)


def test_pairs_of_instants(tmp_path: Path) -> None:
    """A crash at, between and after all that happens; nothing hangs, and what returns in time is no excuse."""
    calm = run_ranks(walk, 3, star())
    instants = sorted({row.virtual_seconds for row in calm.rows})[::7]
    points = sorted({*instants, *((one + other) / 2 for one, other in itertools.pairwise(instants))})
    for begin, end in itertools.combinations(points, 2):
        run = run_ranks(walk, 3, star(crash("b", begin, end - begin)))
        assert -1e-6 <= run.virtual_seconds - calm.virtual_seconds < end - begin + 4.0


# -- training ---------------------------------------------------------------------------------------------------


STORM = star(crash("b", 1.3, 2.1), crash("a", 2.2, 0.7), crash("b", 6.0, 3.0), protocol="linux-tcp")


def test_crashes_change_the_times_of_training_and_not_what_is_learnt() -> None:
    """Twelve steps of DiLoCo on three hosts, half a second each."""
    calm, stormy = (
        fitted(strategy=DiLoCoStrategy(H=4), num_nodes=3, max_steps=12, topology=topology, compute=0.5)
        for topology in (star(), STORM)
    )
    for name, value in calm.judged_state.items():
        assert torch.equal(stormy.judged_state[name], value)
    assert [row["train_loss"] for row in calm.history] == [row["train_loss"] for row in stormy.history]
    assert stormy.virtual_seconds > calm.virtual_seconds + 5
    assert stormy.compute_seconds == calm.compute_seconds
    assert stormy.compute_utilisation < calm.compute_utilisation
