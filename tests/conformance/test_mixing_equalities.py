"""Gossip, desynchronised averages and slow momentum where they are each other, or strategies known before."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import mixing_references as mixing
import pytest
import strategy_reference as reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from worlds import chain_form

from exogym_core.strategy import (
    AveragingCommunicator,
    Chain,
    DESLOCStrategy,
    DiLoCoStrategy,
    DPSGDStrategy,
    FedAvgStrategy,
    GASLoCStrategy,
    NoLoCoStrategy,
    OptimSpec,
    SGPStrategy,
    Sites,
    SlowMoCommunicator,
    SlowMoStrategy,
)
from exogym_core.strategy.parts.gossip import GRAPHS, Graph
from exogym_core.strategy.parts.muon import MuLoCoMuon, hidden_matrices, split_by_shape
from netsim.errors import InputError

adamw = partial(torch.optim.AdamW, lr=0.01)
sgd = partial(torch.optim.SGD, lr=0.05)

problems = reference.problems(5, 8, 3, 4)


def results(strategy: Any, problem: dict[str, int]) -> list[Tensor]:
    model, batches = reference.make_problem(**problem)
    return reference.run_strategy(strategy, model, batches).results


def same(one: Any, other: Any, problem: dict[str, int]) -> None:
    for got, want in zip(results(one, problem), results(other, problem), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


@settings(max_examples=8)
@given(problem=problems, H=st.integers(1, 4))
def test_noloco_of_one_group_is_diloco_with_heavy_ball_momentum(
    problem: dict[str, int],
    H: int,  # noqa: N803
) -> None:
    heavy_ball = partial(torch.optim.SGD, lr=0.6, momentum=0.3)
    noloco = NoLoCoStrategy(adamw, H=H, group_size=5, outer_lr=0.6, outer_momentum=0.3, gamma=0.9)
    same(noloco, DiLoCoStrategy(adamw, H=H, outer_optim_spec=heavy_ball), problem)


@settings(max_examples=8)
@given(problem=problems, H=st.integers(1, 4))
def test_gasloc_on_the_complete_graph_is_diloco_if_momentum_is_mixed_too(
    problem: dict[str, int],
    H: int,  # noqa: N803
) -> None:
    gasloc = GASLoCStrategy(adamw, H=H, graph="complete", mixed_momentum=True)
    same(gasloc, DiLoCoStrategy(adamw, H=H), problem)


def test_gasloc_with_momenta_of_ones_own_is_not_diloco() -> None:
    problem = {"num_ranks": 3, "steps": 8, "inputs": 2, "hidden": 3, "seed": 4}
    own = results(GASLoCStrategy(adamw, H=2, graph="complete"), problem)
    assert not torch.allclose(own[0], own[1])


@settings(max_examples=8)
@given(
    problem=problems,
    graph=st.sampled_from(["ring", "exponential", "static-exponential", "complete", "random"]),
)
def test_sgp_on_graphs_of_equal_degrees_is_d_psgd_that_mixes_afterwards(
    problem: dict[str, int], graph: str
) -> None:
    """On every graph that has a name, pairs and one left over included."""
    same(SGPStrategy(adamw, graph=graph), DPSGDStrategy(adamw, graph=graph, mix="after"), problem)


def test_orders_of_d_psgd_differ_and_share_the_mean_of_sgd() -> None:
    """W keeps the mean, so one step of SGD from equal models has one mean in either order."""
    problem = {"num_ranks": 5, "steps": 1, "inputs": 3, "hidden": 4, "seed": 2}
    before, after = (
        torch.stack(results(DPSGDStrategy(sgd, mix=mix), problem)) for mix in ("before", "after")
    )
    assert not torch.allclose(before, after)
    torch.testing.assert_close(before.mean(0), after.mean(0))


@settings(max_examples=8)
@given(problem=problems, H=st.integers(1, 4))
def test_slowmo_without_momentum_is_local_averaging(problem: dict[str, int], H: int) -> None:  # noqa: N803
    same(SlowMoStrategy(adamw, H=H, outer_momentum=0), FedAvgStrategy(adamw, H=H), problem)


def test_slowmo_follows_a_schedule_and_is_diloco_without_one() -> None:
    model, batches = reference.make_problem(3, 9, 3, 4, seed=5)
    heavy_ball = partial(torch.optim.SGD, lr=0.8, momentum=0.4)
    options: dict[str, Any] = {"H": 3, "outer_lr": 0.8, "outer_momentum": 0.4}
    plain = reference.run_strategy(SlowMoStrategy("sgd", lr=0.05, **options), model, batches).results
    diloco = DiLoCoStrategy("sgd", lr=0.05, H=3, outer_optim_spec=heavy_ball)
    for got, want in zip(plain, reference.run_strategy(diloco, model, batches).results, strict=True):
        torch.testing.assert_close(got, want)
    halved = {"lr_scheduler": "StepLR", "lr_scheduler_kwargs": {"step_size": 3, "gamma": 0.5}}
    strategy = SlowMoStrategy("sgd", lr=0.05, **options, **halved)
    got = reference.run_strategy(strategy, model, batches).results[0]
    rates = [0.05 * 0.5 ** ((number - 1) // 3) for number in range(1, 10)]
    outer = mixing.slowmo(model, 3, lambda number: rates[number - 1], 0.8, 0.4)
    replicas: list[Any] = [copy.deepcopy(model) for _ in range(3)]
    for number, step in enumerate(batches, start=1):
        for replica, batch in zip(replicas, step, strict=True):
            optim = torch.optim.SGD(replica.parameters(), lr=rates[number - 1])
            reference.apply(optim, replica, reference.gradients(replica, batch))
        with torch.no_grad():
            outer(number, replicas)
    torch.testing.assert_close(got, reference.vector(replicas[0]))


def test_slowmo_resets_or_averages_its_base_optimizers_state() -> None:
    problem = {"num_ranks": 2, "steps": 6, "inputs": 3, "hidden": 4, "seed": 5}
    averaged = SlowMoStrategy(adamw, H=2, outer_momentum=0, buffers="average")
    same(averaged, DESLOCStrategy(adamw, H=2, Ku=2, Kv=2), problem)
    plain, reset = (results(SlowMoStrategy(adamw, H=2, buffers=b), problem)[0] for b in ("maintain", "reset"))
    assert not torch.allclose(plain, reset)
    stateless = [results(SlowMoStrategy("sgd", H=2, buffers=b), problem)[0] for b in ("maintain", "reset")]
    assert torch.equal(*stateless)


def test_of_two_optimizers_in_one_each_parameters_own_moments_are_averaged() -> None:
    """Muon for matrices, AdamW for the rest: looking for their moments failed with an IndexError."""
    model, batches = reference.make_problem(2, 3, 4, 6, seed=1)
    spec = OptimSpec(MuLoCoMuon, params=split_by_shape, lr=0.01)
    run = reference.run_strategy(DESLOCStrategy(spec, H=1, Ku=1, Kv=1), model, batches)
    assert torch.equal(*run.results)
    num_values = sum(p.numel() for p in model.parameters() if p.requires_grad)
    in_matrices = sum(p.numel() for p in hidden_matrices(model))
    assert 0 < in_matrices < num_values
    num_moments = in_matrices + 2 * (num_values - in_matrices)  # one of a matrix, two of the rest
    assert run.traffic[0].payload_bytes == len(batches) * 8 * (num_values + num_moments)


def test_slowmo_stands_behind_a_base_algorithm() -> None:
    """As fairscale's default: averages every 2 steps, slow momentum every 4."""
    model, batches = reference.make_problem(2, 8, 3, 4, seed=6)
    chain = Chain([AveragingCommunicator(H=2), SlowMoCommunicator(H=4)], sgd)
    want = reference.reference_local(
        model,
        batches,
        sgd,
        reference.both(reference.averaging(2, None, 0), mixing.slowmo(model, 4, lambda _: 0.05)),
    )
    for got, replica in zip(reference.run_strategy(chain, model, batches).results, want, strict=True):
        torch.testing.assert_close(got, reference.vector(replica))


# --- graphs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GRAPHS)
@given(size=st.integers(1, 20), number=st.integers(0, 50))
@settings(max_examples=30)
def test_matrices_keep_the_mean_and_reach_all_ranks(name: str, size: int, number: int) -> None:
    graph = Graph(name)
    edges = graph.edges(size, number, seed=7)
    assert all(rank not in to and len(set(to)) == len(to) for rank, to in enumerate(edges))
    for kind in (graph.balanced, graph.pushed):
        matrix = torch.zeros(size, size, dtype=torch.float64)
        for rank in range(size):
            for peer, weight in kind(rank, edges).weights.items():
                matrix[rank, peer] = weight
        assert bool((matrix.diagonal() > 0).all())
        torch.testing.assert_close(matrix.sum(0), torch.ones(size, dtype=torch.float64))
        if kind == graph.balanced:
            torch.testing.assert_close(matrix.sum(1), torch.ones(size, dtype=torch.float64))
    reached = torch.eye(size)
    for exchange in range(200):
        for rank, to in enumerate(graph.edges(size, exchange, seed=7)):
            reached[[rank, *to]] += reached[rank].clone()
        reached = reached.clamp(max=1)
        if bool(reached.all()):
            return
    raise AssertionError("a rank's values do not come to all others")


def test_sgp_corrects_for_a_graph_on_which_plain_averages_drift() -> None:
    """Without gradients every rank ends at the mean of where they began, though rank 0 is sent more than others."""
    lists = [[1], [0, 2], [0]]

    def body(comm: Any) -> tuple[float, list[float]]:
        model = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
        strategy = SGPStrategy("sgd", lr=0.0, graph=lists)
        strategy.setup(model, comm, 60, 0)
        with torch.no_grad():
            model.weight.fill_(float(comm.rank))
        weights = []
        for _ in range(60):
            model(torch.ones(1, 1, dtype=torch.float64)).sum().backward()
            strategy.step()
            weights.append(strategy.weight)
        return model.weight.item(), weights

    values, weights = zip(*reference.run_ranks(body, 3).results, strict=True)
    assert values == pytest.approx([1.0] * 3)
    assert [of_rank[-1] for of_rank in weights] == pytest.approx([4 / 3, 1.0, 2 / 3])
    with pytest.raises(InputError, match="on which this average drifts; SGP corrects for it"):
        results(
            DPSGDStrategy(sgd, graph=lists), {"num_ranks": 3, "steps": 1, "inputs": 1, "hidden": 1, "seed": 0}
        )


def test_sgp_trains_as_published_on_a_graph_of_unequal_degrees() -> None:
    lists = [[1], [0, 2], [0]]
    model, batches = reference.make_problem(3, 7, 3, 4, seed=8)
    got = reference.run_strategy(SGPStrategy(adamw, graph=lists), model, batches).results
    want = mixing.sgp(model, batches, adamw, mixing.along(lists))
    for vector, replica in zip(got, want, strict=True):
        torch.testing.assert_close(vector, reference.vector(replica), rtol=1e-9, atol=1e-9)


GOSSIP = [
    lambda *spec: DPSGDStrategy(*spec),
    lambda *spec: SGPStrategy(*spec),
    lambda *spec: GASLoCStrategy(*spec, H=2, graph="ring"),
    lambda *spec: NoLoCoStrategy(*spec, H=2),
    lambda *spec: DESLOCStrategy(*spec, H=2),
    lambda *spec: SlowMoStrategy(*spec, H=2),
]


@pytest.mark.parametrize("make", GOSSIP, ids=["DPSGD", "SGP", "GASLoC", "NoLoCo", "DESLOC", "SlowMo"])
@pytest.mark.parametrize("sharding", ["NO_SHARD", "SHARD_GRAD_OP"])
def test_behind_sites_a_site_is_one_rank_with_the_sites_batch(make: Any, sharding: str) -> None:
    model, batches = reference.make_problem(6, 5, 4, 6, seed=1)
    joined = [
        [tuple(map(torch.cat, zip(*step[k : k + 2], strict=True))) for k in (0, 2, 4)] for step in batches
    ]
    made = make()
    chain = Chain([Sites(2, sharding=sharding), *getattr(made, "modules", [made])], adamw)
    got = reference.run_strategy(chain, model, batches)
    want = reference.run_strategy(make(adamw), model, joined)  # type: ignore[arg-type]
    for rank, result in enumerate(got.results):
        torch.testing.assert_close(result, want.results[rank // 2], rtol=1e-9, atol=1e-9)


def test_d_psgds_exchange_hides_behind_the_gradient() -> None:
    """The paper's order costs no time that the backward pass covers; the other order does."""
    line = chain_form(bandwidth="1 Mbit/s")
    model, _ = reference.make_problem(2, 1, 40, 60, seed=1)

    def seconds(mix: str) -> float:
        def body(comm: Any) -> None:
            own, replica = DPSGDStrategy(sgd, mix=mix), copy.deepcopy(model)
            own.setup(replica, comm, 3, 0)
            for parameter in replica.parameters():
                parameter.grad = torch.zeros_like(parameter)
            for _ in range(3):
                own.before_backward(last_micro_batch=True)
                comm.advance(2.0)
                own.step()

        run = reference.run_ranks(body, 2, topology=line)
        return float(run.virtual_seconds)

    assert seconds("before") == 6.0
    assert seconds("after") > 6.5


# --- mistakes ----------------------------------------------------------------------------------------------
