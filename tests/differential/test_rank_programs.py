"""The same values, times and errors wherever ranks run, and however long they take about it in host time."""

from __future__ import annotations

from typing import Any

import pytest
import random_experiments
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import Reference
from worlds import star_form

from exogym_core.communicator import run_ranks
from exogym_core.communicator.simulated.simulation import Schedules, World
from exogym_core.testing import Action, RankProgram, programs
from exogym_core.workers.journal import Journal
from netsim import Topology
from netsim.ranks import Request


@settings(max_examples=30)
@given(programs())
def test_sleeping_ranks_change_nothing_in_threads(program: RankProgram) -> None:
    program.check([0])


@settings(max_examples=6)
@given(programs(), st.integers(1, 4))
def test_processes_change_nothing(program: RankProgram, num_processes: int) -> None:
    """Of such programs 9 % differed when members were held until values existed in host time."""
    program.check([num_processes])


def star(*links: tuple[float, float]) -> dict[str, Any]:
    """Hosts at a switch, by rate in Mbit/s and delay in ms."""
    rates = {f"h{at}": f"{rate} Mbit/s" for at, (rate, _) in enumerate(links)}
    return star_form(
        rates, bandwidth=rates, latency={f"h{at}": f"{delay} ms" for at, (_, delay) in enumerate(links)}
    )


def early(kind: str) -> RankProgram:
    """Rank 0 needs nobody, and calls a group whose other member waits for rank 1, which asks for the time."""
    call, both = (
        (kind, (0, 2), 0 if kind == "all_gather" else 3, 0 if kind in ("broadcast", "scatter") else 1),
        (1, 2),
    )
    first = Action(1, "collective", call)
    second = Action(2, "collective", ("all_reduce", both, 3, 0))
    ranks = ((first,), (Action(0, "advance", (0.5,)), Action(0, "now"), second), (second, first))
    return RankProgram(ranks, star(*[(100, 5)] * 3))


@pytest.mark.parametrize("kind", ["reduce", "scatter", "all_gather"])
def test_a_member_without_dependencies_finishes_before_others_come(kind: str) -> None:
    """It was through at 0.5 s in threads and later in processes: when the other's post existed in host time."""
    ends = early(kind).check([3])["ends"]
    assert ends[0] == (0.0 if kind == "all_gather" else pytest.approx(0.01, abs=1e-4))


def test_a_rank_held_off_the_clock_continues_at_the_same_instant() -> None:
    """Ranks 2 and 3 meet at virtual time 0 and then compute their average, ahead of the clock in threads alone."""
    met = (
        Action(3, "average_present", ((3, 2), 0.02, 1)),
        Action(7, "off", ("all_reduce", (0, 1, 2, 3), 4, 0)),
    )
    barrier = (Action(5, "collective", ("barrier", (1, 0), 0, 0)), met[1])
    RankProgram((barrier, barrier, met, met), star((20, 5), (1000, 5), (5, 1), (100, 0))).check([4])


# --- against the reference ----------------------------------------------------------------------------------


@settings(max_examples=30)
@given(programs(two_way=False, has_weather=False))
def test_times_are_those_of_the_reference(program: RankProgram) -> None:
    """Computed from what ranks requested."""
    num_ranks = len(program.ranks)
    topology = Topology.from_mapping(program.topology)
    streams: list[list[Request]] = [[] for _ in range(num_ranks)]
    run = run_ranks(
        program.body,
        num_ranks,
        topology,
        protocol="ideal",
        collectives=program.collectives,
        journal=Journal(on_request=lambda rank, request: streams[rank].append(request)),
    )
    world = World.build(num_ranks, topology, None, "ideal", program.collectives)
    book = Schedules(world)
    reference = Reference(
        topology,
        world.hosts,
        lambda call: book.of(call._replace(parts=None) if call.parts is not None else call),
        streams,
    )
    reference.run()
    marks = [[row.virtual_seconds for row in run.rows if row.rank == rank] for rank in range(num_ranks)]
    for rank in range(num_ranks):
        # A time may fall on either side of an instant of the ranks' grid (0.93 ns), once a call.
        slack = 1e-9 * (1 + len(streams[rank]))
        assert reference.marks[rank] == pytest.approx(marks[rank], abs=slack)
        assert reference.ends[rank] == pytest.approx(run.rank_virtual_seconds[rank], abs=slack)


# --- whole experiments --------------------------------------------------------------------------------------


# Absences, sites and chains, some with several seeds: in threads, stacked and in 1 to 4 processes; stopped, killed.
@pytest.mark.parametrize(
    "seed", [20, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in (1, 2, 7, 13, 14, 18))]
)
def test_experiments_give_the_same_everywhere(seed: int) -> None:
    case = random_experiments.drawn(seed)
    assert not random_experiments.differences(case), case.text()
