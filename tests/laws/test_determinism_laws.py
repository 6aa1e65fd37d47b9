"""Law 9 on whole runs, and what must not matter to them: names, hash seeds, the network, neighbours."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import star_form

from exogym_core.communicator import Communicator, RunResult, run_ranks
from netsim import Clock, Network, Topology, schedule, start_collective


def topology(rate: float = 100.0, names: tuple[str, ...] = ("h0", "h1", "h2", "h3")) -> dict[str, Any]:
    """Four hosts of unequal rates and latencies around a switch; `rate` is the WAN's, in Mbit/s."""
    hosts = dict(zip(names, (1.0, 0.5, 2.0, 0.25), strict=True))
    rates = {name: f"{rate * share} Mbit/s" for name, share in hosts.items()}
    form = star_form(hosts, rates, {name: f"{number + 3} ms" for number, name in enumerate(hosts)})
    return form | {"hosts": {name: {} for name in hosts}}


def exchange(comm: Communicator, num_elements: int, ops: list[str]) -> Any:
    """A few collectives after unequal computing."""
    tensor = torch.ones(num_elements)
    for op in ops:
        comm.advance(0.001 * (comm.rank + 1))
        if op == "barrier":
            comm.barrier()
        elif op == "messages":
            handle = comm.isend(tensor, (comm.rank + 1) % comm.world_size)
            comm.recv(tensor.clone(), (comm.rank - 1) % comm.world_size)
            handle.wait()
        else:
            getattr(comm, op)(tensor)
    return comm.rank


programs = st.lists(
    st.sampled_from(["all_reduce", "broadcast", "all_gather", "all_to_all", "messages", "barrier", "reduce"]),
    min_size=1,
    max_size=5,
)
protocols = st.sampled_from(["ideal", "linux-tcp", "gloo"])


def times(result: RunResult[Any]) -> list[float]:
    assert result.rank_virtual_seconds is not None
    return [*result.rank_virtual_seconds, *result.exposed_seconds]


@given(programs, protocols, st.permutations(["z", "a10", "a9", "m"]))
@settings(max_examples=15)
def test_names_of_hosts_do_not_matter_where_ranks_are_placed(
    ops: list[str], protocol: str, names: list[str]
) -> None:
    plain = ("h0", "h1", "h2", "h3")

    def run(hosts: tuple[str, ...]) -> list[float]:
        return times(
            run_ranks(
                lambda comm: exchange(comm, 5000, ops),
                4,
                topology(100.0, hosts),
                placement=hosts,
                protocol=protocol,
            )
        )

    assert run(plain) == run(tuple(names))


@pytest.mark.thorough
def test_the_hash_seed_does_not_matter(capsys: pytest.CaptureFixture[str]) -> None:
    code = (
        "import torch; from exogym_core.communicator import run_ranks; "
        "done = run_ranks(lambda c: [c.all_gather_object({'a', 'b', c.rank}) and c.now(), float(torch.rand(()))], "
        "3, 'wan-4-regions', protocol='linux-tcp'); print(done.results, done.traffic)"
    )
    command = [sys.executable, "-c", code]
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    other = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    exec(code)  # here the seed is another
    assert capsys.readouterr().out == other


def test_two_simulations_in_one_process_do_not_see_each_other() -> None:
    loaded = Topology.from_mapping(topology())

    def start(op: str, ends: list[tuple[float, int]]) -> Clock:
        clock = Clock()
        network = Network(clock, loaded, "linux-tcp")
        collective = start_collective(
            network,
            schedule(op, 4, num_bytes=200_000, element_bytes=4),
            (0, 1, 2, 3),
            on_done=lambda member: ends.append((clock.now, member)),
        )
        for member in range(4):
            clock.at(0.01 * member).callbacks.append(  # type: ignore[union-attr]
                lambda event, member=member: collective.arrive(member)
            )
        return clock

    alone: list[list[tuple[float, int]]] = [[], []]
    for op, ends in zip(("all_reduce", "all_to_all"), alone, strict=True):
        start(op, ends).run()
    together: list[list[tuple[float, int]]] = [[], []]
    clocks = [start(op, ends) for op, ends in zip(("all_reduce", "all_to_all"), together, strict=True)]
    while any(clock.peek() != float("inf") for clock in clocks):
        for clock in clocks:
            if clock.peek() != float("inf"):
                clock.step()
    assert together == alone
    assert all(len(ends) == 4 for ends in alone)
