"""DiLoCo between sites of several ranks: what it computes, and what goes inside sites and between them."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import strategy_reference as reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from worlds import regions_form

from exogym_core import DiLoCoOptimizer
from exogym_core.communicator import Communicator, run_ranks
from exogym_core.strategy import DiLoCoStrategy
from netsim import Topology

SEED = 3
ADAMW = functools.partial(torch.optim.AdamW, lr=0.01)
TWO_SITES = Topology.from_mapping(regions_form({"east": 2, "west": 2}, "10 Gbit/s", protocol="ideal"))


def joined(batches: reference.Batches, ranks_per_worker: int) -> reference.Batches:
    """The batches of a worker's ranks as one, the worker's."""
    return [
        [
            (torch.cat([part[0] for part in site]), torch.cat([part[1] for part in site]))
            for site in (
                step[first : first + ranks_per_worker] for first in range(0, len(step), ranks_per_worker)
            )
        ]
        for step in batches
    ]


def optimizer_of(replica: torch.nn.Module, comm: Communicator, **options: Any) -> DiLoCoOptimizer:
    given = {"batch_size": 4, "num_inner_steps": 100, "inner_optimizer": ADAMW, **options}
    return DiLoCoOptimizer(communicator=comm, params=replica.parameters(), **given)


def own_loop(model: reference.Net, batches: reference.Batches, comm: Communicator, **options: Any) -> Tensor:
    """A training loop of one's own, clipping included."""
    replica = copy.deepcopy(model)
    optimizer = optimizer_of(replica, comm, **options)
    for step in batches:
        optimizer.zero_grad()
        replica(step[comm.rank]).backward()
        optimizer.average_gradients()
        torch.nn.utils.clip_grad_norm_(replica.parameters(), 0.3)
        optimizer.step()
    return reference.vector(replica)


sites = st.fixed_dictionaries({"num_workers": st.integers(1, 3), "ranks_per_worker": st.integers(1, 3)})


@settings(max_examples=15)
@given(shape=sites, H=st.integers(1, 3), steps=st.integers(1, 6), hidden=st.integers(1, 6))
def test_sites_compute_what_single_workers_with_their_whole_batch_would(
    shape: dict[str, int],
    H: int,  # noqa: N803
    steps: int,
    hidden: int,
) -> None:
    size = shape["ranks_per_worker"]
    num_ranks = shape["num_workers"] * size
    model, batches = reference.make_problem(num_ranks, steps, 3, hidden, seed=H)
    expected = reference.reference_local(
        copy.deepcopy(model), joined(batches, size), ADAMW, reference.outer(model, H), max_norm=0.3
    )
    strategy = DiLoCoStrategy(ADAMW, H=H, max_norm=0.3, ranks_per_worker=size)
    by_strategy = reference.run_strategy(strategy, model, batches, SEED)
    options = {"num_inner_steps": H, "ranks_per_worker": size}
    by_optimizer = run_ranks(lambda comm: own_loop(model, batches, comm, **options), num_ranks)
    for rank, (one, other) in enumerate(zip(by_strategy.results, by_optimizer.results, strict=True)):
        want = reference.vector(expected[rank // size])
        torch.testing.assert_close(one, want, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(other, want, rtol=1e-9, atol=1e-9)
        first_of_site = by_strategy.results[rank // size * size]
        assert torch.equal(one, first_of_site), "the ranks of a site are equal to the bit"

    whole = 8 * len(reference.vector(model))
    workers, rounds = shape["num_workers"], steps // H
    gradients = steps * workers * 2 * (size - 1) * whole if size > 1 else 0
    between = rounds * 2 * (workers - 1) * whole
    inside = rounds * workers * (size - 1) * whole if workers > 1 else 0
    sent = sum(traffic.bytes_sent for traffic in by_strategy.traffic)
    assert sent == gradients + between + inside
    start = (num_ranks - 1) * whole  # everyone but the first is told the first one's parameters
    assert sum(traffic.bytes_sent for traffic in by_optimizer.traffic) == sent + start


@pytest.mark.parametrize("codec", [None, "fp16", "uniform8bit"])
def test_the_wan_carries_a_round_once_per_site(codec: str | None) -> None:
    model, batches = reference.make_problem(4, 6, 4, 6, seed=1)
    num_values = len(reference.vector(model))
    strategy = DiLoCoStrategy(ADAMW, H=3, codec=codec, ranks_per_worker=2)
    run = reference.run_strategy(strategy, model, batches, SEED, topology=TWO_SITES)
    rounds, num_sites = 2, 2
    parts = [len(part) for half in torch.zeros(num_values).tensor_split(2) for part in half.tensor_split(2)]
    of_codec = strategy.averaging.codec
    payload = 8 * num_values if of_codec is None else sum(of_codec.encoded_bytes(part) for part in parts)
    assert sum(t.wan_bytes for t in run.traffic) == rounds * 2 * (num_sites - 1) * payload
    assert all(torch.equal(run.results[0], result) for result in run.results)

    options = {"num_inner_steps": 3, "grad_compression": codec, "ranks_per_worker": 2}
    own = run_ranks(lambda comm: own_loop(model, batches, comm, **options), 4, topology=TWO_SITES)
    start = (num_sites - 1) * 8 * num_values
    assert sum(t.wan_bytes for t in own.traffic) == start + rounds * 2 * (num_sites - 1) * payload


def test_sites_are_faster_than_as_many_single_workers_where_gradients_stay_at_home() -> None:
    model, batches = reference.make_problem(4, 4, 4, 6, seed=1)

    def seconds(strategy: DiLoCoStrategy) -> float:
        run = reference.run_strategy(strategy, model, batches, SEED, topology=TWO_SITES, collectives="ring")
        assert run.virtual_seconds is not None
        return run.virtual_seconds

    assert seconds(DiLoCoStrategy(H=2, ranks_per_worker=2)) < seconds(DiLoCoStrategy(H=2))


def test_a_closure_of_a_site_is_averaged_too() -> None:
    model, batches = reference.make_problem(2, 3, 4, 6, seed=1)

    def body(comm: Communicator) -> Tensor:
        replica = copy.deepcopy(model)
        optimizer = optimizer_of(replica, comm, ranks_per_worker=2)
        for step in batches:

            def closure(batch: Any = step[comm.rank]) -> Tensor:
                optimizer.zero_grad()
                loss: Tensor = replica(batch)
                loss.backward()
                return loss

            optimizer.step(closure)
        return reference.vector(replica)

    expected = reference.reference_all_reduce(copy.deepcopy(model), batches, ADAMW)
    for result in run_ranks(body, 2).results:
        torch.testing.assert_close(result, reference.vector(expected[0]), rtol=1e-9, atol=1e-9)
