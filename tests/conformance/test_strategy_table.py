"""Every strategy of the table against its algorithm, its byte formula, and the laws that hold for all."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import async_references as events
import pytest
import strategy_reference as reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategy_table import SEED, TABLE, Row
from torch import Tensor, nn
from worlds import star_form

from exogym_core.communicator import Communicator, run_ranks
from exogym_core.strategy import (
    ADPSGDStrategy,
    AsyncDiLoCoStrategy,
    DecoupledDiLoCoStrategy,
    HALoSStrategy,
    HeLoCoStrategy,
    Strategy,
)
from netgym.strategy_check import Workload, find_faults

PROBLEMS = [(5, 6, 3, 4, 1), (1, 2, 1, 1, 3)]  # ranks, steps, inputs, hidden values, seed
rows = pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)


@rows
@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: f"{problem[0]} ranks")
def test_equals_its_algorithm_and_sends_the_bytes_of_its_formula(row: Row, problem: tuple[int, ...]) -> None:
    """And replicas agree to the bit where rounds of 1, 2 and 3 steps have exchanged everything."""
    model, batches = reference.make_problem(*problem)
    run = reference.run_strategy(row.make(), model, batches, SEED)
    expected = row.algorithm(copy.deepcopy(model), batches) if row.algorithm else []
    for got, replica in zip(run.results, expected, strict=bool(row.algorithm)):
        torch.testing.assert_close(got, reference.vector(replica), rtol=row.tolerance, atol=row.tolerance)
    for got in run.results:
        assert row.apart or len(batches) % 6 or torch.equal(got, run.results[0])
    n = problem[0]
    payload = sum(row.payload(model, step, n) for step in range(1, len(batches) + 1))
    sent = sum(traffic.bytes_sent for traffic in run.traffic)
    if row.sent is None:
        assert sent == payload * row.sent_factor(n)
    else:
        assert sent == sum(row.sent(model, step, n) for step in range(1, len(batches) + 1))
    if n > 1:
        assert [traffic.payload_bytes for traffic in run.traffic] == [payload] * n


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=row.name, marks=[pytest.mark.thorough] if place % 12 else [])
        for place, row in enumerate(TABLE)
    ],
)
def test_keeps_the_laws_that_netgym_check_asks_for(row: Row) -> None:
    """Processes, which change nothing, are in laws/test_resume_laws.py, and gloo is below."""
    problem = Workload(*reference.make_problem(3, 7, 4, 6, seed=1), SEED)
    assert find_faults(row.make(), problem, ["judged", "state", "bytes", "round", "generator"]) == []


def test_real_sockets_change_no_model_and_no_bytes() -> None:
    """Every row in one run of processes."""
    problems = [reference.make_problem(3, 4, 4, 6, seed) for seed, _ in enumerate(TABLE)]

    def body(comm: Communicator) -> list[tuple[Tensor, int]]:
        ends: list[tuple[Tensor, int]] = []
        for row, (given_model, batches) in zip(TABLE, problems, strict=True):
            strategy, model = row.make(), copy.deepcopy(given_model)
            before = comm.traffic.payload_bytes
            strategy.setup(model, comm, len(batches), SEED)
            reference.train(strategy, model, comm, batches)
            strategy.finish()
            strategy.close()
            ends.append((reference.vector(model), comm.traffic.payload_bytes - before))
        return ends

    simulated, real = (run_ranks(body, 3, **options).results for options in ({}, {"transport": "gloo"}))
    for rank, (ours, theirs) in enumerate(zip(simulated, real, strict=True)):
        for row, (model, sent), (same, counted) in zip(TABLE, ours, theirs, strict=True):
            where = f"{row.name}, rank {rank}"
            assert sent == counted, where
            torch.testing.assert_close(model, same, rtol=1e-4, atol=1e-4, msg=where)


# --- asynchronous ones, as queues of events -----------------------------------------------------------------

adamw = partial(torch.optim.AdamW, lr=0.01)
SAMPLES = 4  # of a batch


def of_one_server(n: int, H: int, strategy: Strategy, rule: Any) -> tuple[Strategy, Any]:  # noqa: N803
    def run(world: events.World, model: nn.Module, batches: reference.Batches) -> Any:
        return events.served(world, model, batches, adamw, H, rule, at=n)

    return strategy, run


def of_async(n: int, buffer: int | None, share: float, H: int) -> tuple[Strategy, Any]:  # noqa: N803
    strategy = AsyncDiLoCoStrategy(adamw, H=H, outer_lr=0.6, buffer=buffer, momentum_share=share)
    return of_one_server(
        n, H, strategy, lambda phi: events.delayed_nesterov(phi, 0.6, 0.9, buffer or n, share)
    )


def of_heloco(n: int, confidence: float, H: int) -> tuple[Strategy, Any]:  # noqa: N803
    strategy = HeLoCoStrategy(adamw, H=H, outer_lr=0.4, outer_momentum=0.8, confidence=confidence)
    return of_one_server(n, H, strategy, lambda phi: events.heloco(phi, 0.4, 0.8, confidence))


def of_decoupled(n: int, P: int, quorum: int, grace: float, H: int) -> tuple[Strategy, Any]:  # noqa: N803
    quorum = min(quorum, n)
    shared: dict[str, Any] = {"H": H, "quorum": quorum, "grace": grace}
    strategy = DecoupledDiLoCoStrategy(adamw, num_fragments=P, mix=0.3, **shared)

    def run(world: events.World, model: nn.Module, batches: reference.Batches) -> Any:
        cut = greedily([p.numel() for p in model.parameters()], min(P, H))
        rest: dict[str, Any] = {"lr": 0.7, "beta": 0.9, "mix": 0.3, "samples": SAMPLES}
        return events.decoupled(world, model, batches, adamw, cut=cut, **shared, **rest)

    return strategy, run


def of_ad_psgd(n: int, interval: int) -> tuple[Strategy, Any]:
    draws = [torch.Generator().manual_seed(rank) for rank in range(n)]  # the run's seed is 0

    def partner(rank: int) -> int:
        other = int(torch.randint(n - 1, (1,), generator=draws[rank]))
        return other + (other >= rank)

    def run(world: events.World, model: nn.Module, batches: reference.Batches) -> Any:
        return events.ad_psgd(world, model, batches, adamw, interval, partner), None

    return ADPSGDStrategy(adamw, interval=interval), run


def greedily(sizes: list[int], count: int) -> list[list[int]]:
    """The largest tensor left to the fragment with the least so far; fragments by their first tensor."""
    cut: list[list[int]] = [[] for _ in range(min(count, len(sizes)))]
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        loads = [sum(sizes[i] for i in members) for members in cut]
        cut[loads.index(min(loads))].append(index)
    return sorted(sorted(members) for members in cut)


CASES = {  # HALoS: golden/test_authors.py
    "AsyncDiLoCo": st.builds(
        lambda n, **options: (n, of_async(n, **options)),
        n=st.integers(1, 4),
        buffer=st.sampled_from([None, 1, 3]),
        share=st.sampled_from([0.0, 0.2]),
        H=st.integers(1, 4),
    ),
    "HeLoCo": st.builds(
        lambda n, **options: (n, of_heloco(n, **options)),
        n=st.integers(1, 4),
        confidence=st.sampled_from([0.5, 3.0]),
        H=st.integers(1, 4),
    ),
    "ADPSGD": st.builds(
        lambda n, **options: (n, of_ad_psgd(n, **options)), n=st.integers(1, 5), interval=st.integers(1, 3)
    ),
    "DecoupledDiLoCo": st.builds(
        lambda n, **options: (n, of_decoupled(n, **options)),
        n=st.integers(1, 4),
        P=st.integers(1, 5),
        quorum=st.integers(1, 4),
        grace=st.sampled_from([0.0, 0.3, 2.0]),
        H=st.integers(1, 6),
    ),
}


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=6)
@given(data=st.data())
def test_equals_its_algorithm_as_a_queue_of_events(name: str, data: st.DataObject) -> None:
    """Replicas and the server's model at the end, in fp64."""
    n, (strategy, algorithm) = data.draw(CASES[name])
    seed, steps = data.draw(st.integers(0, 1000)), data.draw(st.integers(1, 14))
    for got, wanted in zip(*both_ways(n, strategy, algorithm, seed, steps), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)


def trained(
    comm: Communicator,
    n: int,
    strategy: Strategy,
    model: Any,
    batches: Any,
    compute: Callable[[int], None] = lambda step: None,
) -> Tensor:
    """What a rank has at the end: a worker its replica, a server the model that is judged."""
    own, replica = copy.deepcopy(strategy), copy.deepcopy(model)
    own.setup(replica, comm, len(batches), seed=0)
    if comm.rank >= n:
        own.serve(lambda steps: None)
        return torch.cat([value.reshape(-1) for value in own.judged_state().values()])
    own.context.samples = SAMPLES
    for step, of_ranks in enumerate(batches):
        compute(step)
        own.zero_grad()
        replica(of_ranks[comm.rank]).backward()
        own.step()
    own.finish()
    return reference.vector(replica)


def both_ways(
    n: int, strategy: Strategy, algorithm: Any, seed: int, steps: int
) -> tuple[list[Tensor], list[Tensor]]:
    """What ranks have at the end, and what the queue of events has: workers, then the last server if there is one."""
    model, batches = reference.make_problem(n, steps, 3, 4, seed)
    num_ranks = n + strategy.num_servers
    draw = random.Random(seed)
    latencies = [draw.uniform(0.001, 0.4) for _ in range(num_ranks)]
    paces = [draw.uniform(0.02, 0.5) for _ in range(n)]
    durations = [[pace * draw.uniform(0.5, 1.5) for _ in range(steps)] for pace in paces]

    def body(comm: Communicator) -> Tensor:
        return trained(
            comm, n, strategy, model, batches, lambda step: comm.advance(durations[comm.rank][step])
        )

    hosts = [f"h{rank}" for rank in range(num_ranks)]
    topology = star_form(
        hosts, "1 Gbit/s", dict(zip(hosts, (f"{each} s" for each in latencies), strict=True))
    )
    results = run_ranks(body, num_ranks, topology=topology, placement=hosts).results
    replicas, phi = algorithm(events.World(latencies, durations), copy.deepcopy(model), batches)
    expected = [reference.vector(replica) for replica in replicas]
    if phi is not None:
        expected.append(torch.cat([value.reshape(-1) for value in phi]))
    return [*results[:n], *results[-1:]][: len(expected)], expected


# Worlds whose outcome no order of arrivals changes: one worker, or one round of each into one buffer.
ORDERLESS: dict[str, tuple[int, int, Strategy]] = {
    "AsyncDiLoCo": (3, 4, AsyncDiLoCoStrategy(adamw, H=4)),
    "AsyncDiLoCo alone": (1, 8, AsyncDiLoCoStrategy(adamw, H=2)),
    "HeLoCo": (1, 8, HeLoCoStrategy(adamw, H=2)),
    # The global server hears of a round that fills no K at the end.
    "HALoS": (1, 2, HALoSStrategy(adamw, H=2, K=2, regions=1, local_buffer=1)),
    "DecoupledDiLoCo": (3, 3, DecoupledDiLoCoStrategy(adamw, H=3, num_fragments=1)),
}


@pytest.mark.parametrize("name", ORDERLESS)
def test_real_sockets_change_no_outcome_that_does_not_hang_on_order(name: str) -> None:
    """Over gloo, where letters take real time, servers and workers end where they do in simulation."""
    n, steps, strategy = ORDERLESS[name]
    model, batches = reference.make_problem(n, steps, 3, 4, seed=5)

    def body(comm: Communicator) -> Tensor:
        return trained(comm, n, strategy, model, batches)

    simulated, real = (
        run_ranks(body, n + strategy.num_servers, **options).results
        for options in ({}, {"transport": "gloo"})
    )
    assert not torch.equal(simulated[-1], reference.vector(model))
    # Which answer a worker has at the end does hang on order.
    kept = slice(None) if n == 1 else slice(n, None)
    for ours, theirs in zip(simulated[kept], real[kept], strict=True):
        torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=1e-12, atol=1e-14)
