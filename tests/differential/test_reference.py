"""Virtual times of random rank programs against a second computation that shares nothing with the engine."""

from __future__ import annotations

import pytest
from rank_programs import Actor, Program, drawn
from reference import Reference

from exogym_core.communicator import run_ranks
from exogym_core.communicator.simulated.simulation import Schedules, World
from exogym_core.workers.journal import Journal
from netsim import Topology
from netsim.ranks import Request


def compare(program: Program) -> None:
    """Run it, and compute from what its ranks requested when they got where."""
    num_ranks = len(program.ranks)
    topology = Topology.from_mapping(program.topology())
    streams: list[list[Request]] = [[] for _ in range(num_ranks)]
    run = run_ranks(
        lambda comm: (comm.compare_places(False), Actor(comm, lambda: None).run(program.ranks[comm.rank])),
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
        assert reference.marks[rank] == pytest.approx(marks[rank], abs=slack), program.code()
        assert reference.ends[rank] == pytest.approx(run.rank_virtual_seconds[rank], abs=slack), (
            program.code()
        )


@pytest.mark.parametrize("first", [0, 40])
def test_times_are_those_of_the_reference(first: int) -> None:
    for seed in range(first, first + 40):
        compare(drawn(seed, two_way=False))
