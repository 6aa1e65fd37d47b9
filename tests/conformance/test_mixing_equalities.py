"""Strategies that are another: which of those that mix, compress or average in rounds give the same bits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import outer_references
import pytest
import strategy_reference as reference
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from worlds import chain_form

from exogym_core.strategy import (
    AsyncSparseCommunicator,
    AveragingCommunicator,
    Chain,
    CoCoDCStrategy,
    DelayedDiLoCoStrategy,
    DESLOCStrategy,
    DiLoCoStrategy,
    DPSGDStrategy,
    EagerDiLoCoStrategy,
    FedAvgStrategy,
    GASLoCStrategy,
    NoLoCoStrategy,
    SGPStrategy,
    Sites,
    SlowMoStrategy,
    SparseCommunicator,
    Strategy,
    StreamingDiLoCoStrategy,
)
from exogym_core.strategy.parts.gossip import GRAPHS, Graph
from exogym_core.strategy.parts.rounds import FragmentOptions, fragments_of, layers_of
from netsim.errors import InputError

adamw = partial(torch.optim.AdamW, lr=0.01)
sgd = partial(torch.optim.SGD, lr=0.05)

problems = reference.problems(5, 8, 3, 4)


def results(strategy: Any, problem: dict[str, int]) -> list[Tensor]:
    model, batches = reference.make_problem(**problem)
    return reference.run_strategy(strategy, model, batches).results


def same(one: Any, other: Any, problem: dict[str, int], tolerance: float = 1e-9) -> None:
    for got, want in zip(results(one, problem), results(other, problem), strict=True):
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@settings(max_examples=5)
@given(problem=problems, H=st.integers(1, 4))
def test_noloco_of_one_group_is_diloco_with_heavy_ball_momentum(
    problem: dict[str, int],
    H: int,  # noqa: N803
) -> None:
    heavy_ball = partial(torch.optim.SGD, lr=0.6, momentum=0.3)
    noloco = NoLoCoStrategy(adamw, H=H, group_size=5, outer_lr=0.6, outer_momentum=0.3, gamma=0.9)
    same(noloco, DiLoCoStrategy(adamw, H=H, outer_optim_spec=heavy_ball), problem)


@settings(max_examples=5)
@given(problem=problems, H=st.integers(1, 4))
def test_gasloc_on_the_complete_graph_is_diloco_if_momentum_is_mixed_too(
    problem: dict[str, int],
    H: int,  # noqa: N803
) -> None:
    gasloc = GASLoCStrategy(adamw, H=H, graph="complete", mixed_momentum=True)
    same(gasloc, DiLoCoStrategy(adamw, H=H), problem)


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


@settings(max_examples=5)
@given(problem=problems, H=st.integers(1, 4))
def test_slowmo_without_momentum_is_local_averaging(problem: dict[str, int], H: int) -> None:  # noqa: N803
    same(SlowMoStrategy(adamw, H=H, outer_momentum=0), FedAvgStrategy(adamw, H=H), problem)


def test_slowmo_resets_or_averages_its_base_optimizers_state() -> None:
    problem = {"num_ranks": 2, "steps": 6, "inputs": 3, "hidden": 4, "seed": 5}
    averaged = SlowMoStrategy(adamw, H=2, outer_momentum=0, buffers="average")
    same(averaged, DESLOCStrategy(adamw, H=2, Ku=2, Kv=2), problem)
    plain, reset = (results(SlowMoStrategy(adamw, H=2, buffers=b), problem)[0] for b in ("maintain", "reset"))
    assert not torch.allclose(plain, reset)
    stateless = [results(SlowMoStrategy("sgd", H=2, buffers=b), problem)[0] for b in ("maintain", "reset")]
    assert torch.equal(*stateless)


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


MEMBERS: dict[str, Callable[..., Strategy]] = {
    "SPARTA": partial(SparseCommunicator, p_sparta=0.3),
    "AsyncSPARTA": partial(AsyncSparseCommunicator, p_sparta=0.3, interval=2, delay=1),
    "FedAvg": partial(AveragingCommunicator, H=2),
    "DPSGD": DPSGDStrategy,
    "SGP": SGPStrategy,
    "GASLoC": partial(GASLoCStrategy, H=2, graph="ring"),
    "NoLoCo": partial(NoLoCoStrategy, H=2),
    "DESLOC": partial(DESLOCStrategy, H=2),
    "SlowMo": partial(SlowMoStrategy, H=2),
    "StreamingDiLoCo": partial(StreamingDiLoCoStrategy, H=3, num_fragments=2, tau=2),
    "CoCoDC": partial(CoCoDCStrategy, H=3, num_fragments=2, tau=2, transmissions=3),
    "DelayedDiLoCo": partial(DelayedDiLoCoStrategy, H=3),
    "EagerDiLoCo": partial(EagerDiLoCoStrategy, H=3),
}
UNSHARDED = ["CoCoDC", "EagerDiLoCo"]
WITH_CODEC = ["StreamingDiLoCo", "DelayedDiLoCo", *UNSHARDED]


def members_behind_sites() -> list[Any]:
    """Every second one at each commit."""
    plain = [(name, "NO_SHARD" if name in UNSHARDED else "SHARD_GRAD_OP", None) for name in MEMBERS]
    rows = [*plain, *((name, "NO_SHARD", "e3m0") for name in WITH_CODEC)]
    return [pytest.param(*row, marks=[pytest.mark.thorough] * (place % 2)) for place, row in enumerate(rows)]


@pytest.mark.parametrize(("name", "sharding", "codec"), members_behind_sites())
def test_behind_sites_a_site_is_one_rank_with_the_sites_batch(
    name: str, sharding: str, codec: str | None
) -> None:
    """At the end too, where what is in flight is applied."""
    model, batches = reference.make_problem(6, 5, 4, 6, seed=1)
    joined = [
        [tuple(map(torch.cat, zip(*step[k : k + 2], strict=True))) for k in (0, 2, 4)] for step in batches
    ]
    make = partial(MEMBERS[name], codec=codec) if codec else MEMBERS[name]
    got = reference.run_strategy(Chain([Sites(2, sharding=sharding), make()], adamw), model, batches).results
    assert all(torch.equal(got[rank], got[rank + 1]) for rank in (0, 2, 4))
    if codec or (sharding != "NO_SHARD" and "SPARTA" in name):  # shards encode and choose among their own
        return
    want = reference.run_strategy(Chain([make()], adamw), model, joined)  # type: ignore[arg-type]
    for rank, result in enumerate(got):
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


# --- equalities of strategies that all agree ----------------------------------------------------------------

larger_problems = reference.problems(4, 9, 4, 6)


@settings(max_examples=5)
@given(problem=larger_problems, H=st.integers(1, 4), codec=st.sampled_from([None, "fp16", "e3m0"]))
def test_streaming_of_one_fragment_without_delay_is_diloco(
    problem: dict[str, int],
    H: int,  # noqa: N803
    codec: str | None,
) -> None:
    one = StreamingDiLoCoStrategy(adamw, H=H, num_fragments=1, tau=0, alpha=0.0, outer_lr=0.7, codec=codec)
    same(one, DiLoCoStrategy(adamw, H=H, codec=codec), problem, tolerance=0)


@settings(max_examples=5)
@given(problem=larger_problems, H=st.integers(1, 4))
# phi - (phi - theta) is rounded.
@example(problem={"num_ranks": 1, "steps": 1, "inputs": 1, "hidden": 2, "seed": 23}, H=1)
def test_cocodc_of_one_fragment_without_delay_is_diloco(problem: dict[str, int], H: int) -> None:  # noqa: N803
    one = CoCoDCStrategy(adamw, H=H, num_fragments=1, tau=0, transmissions=1, outer_lr=0.7)
    same(one, DiLoCoStrategy(adamw, H=H), problem, tolerance=0)


@settings(max_examples=8)
@given(
    problem=larger_problems,
    H=st.integers(2, 6),
    share=st.integers(1, 6),
    P=st.integers(1, 4),
    tau=st.integers(0, 3),
    correction=st.sampled_from([(0.5, "relative"), (2.0, "fixed"), (0.0, "fixed")]),
)
def test_cocodc_chooses_and_corrects_as_written(
    problem: dict[str, int],
    H: int,  # noqa: N803
    share: int,
    P: int,  # noqa: N803
    tau: int,
    correction: tuple[float, str],
) -> None:
    """Fragments that leave by how fast they change, against parameter by parameter; and the bytes of those chosen."""
    strength, scale = correction
    P, tau, transmissions = min(P, H), min(tau, H - 1), min(share, H)  # noqa: N806
    model, batches = reference.make_problem(**problem)
    cut = fragments_of(
        [name for name, _ in model.named_parameters()], FragmentOptions(num_fragments=P), H, ""
    )
    sent: list[int] = []
    exchange = outer_references.cocodc(
        model,
        cut,
        H,
        tau,
        len(batches),
        transmissions=transmissions,
        lam=strength,
        relative=scale == "relative",
        sent=sent,
    )
    expected = reference.reference_local(copy.deepcopy(model), batches, adamw, exchange)
    strategy = CoCoDCStrategy(
        adamw, H=H, num_fragments=P, tau=tau, transmissions=transmissions, compensation=strength, scale=scale
    )
    run = reference.run_strategy(strategy, model, batches)
    for got, replica in zip(run.results, expected, strict=True):
        torch.testing.assert_close(got, reference.vector(replica), rtol=1e-9, atol=1e-9)
    sizes = [p.numel() for p in model.parameters()]
    if len(run.traffic) > 1:
        assert run.traffic[0].payload_bytes == 8 * sum(sizes[index] for p in sent for index in cut[p])


@settings(max_examples=5)
@given(problem=larger_problems, H=st.integers(1, 4))
def test_eager_diloco_of_one_worker_is_diloco(problem: dict[str, int], H: int) -> None:  # noqa: N803
    """Also at a run's very end, where it took a step of momentum for the others, of whom there are none."""
    problem |= {"num_ranks": 1, "steps": problem["steps"] * H}
    same(EagerDiLoCoStrategy(adamw, H=H), DiLoCoStrategy(adamw, H=H), problem, tolerance=0)


def test_layers_and_fragments() -> None:
    names = ["embed.weight", *(f"blocks.{i}.{part}" for i in range(4) for part in "ab"), "head.weight"]
    assert [len(layer) for layer in layers_of(names)] == [1, 2, 2, 2, 2, 1]
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(6)))

    def members(**options: Any) -> list[list[int]]:
        def body(comm: Any) -> list[list[int]]:
            strategy = StreamingDiLoCoStrategy(**options)
            strategy.setup(model, comm, 1, 0)
            return strategy.fragments.members

        return reference.run_ranks(body, 1).results[0]

    assert members() == [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7, 10, 11]]
    assert members(pattern="sequential") == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]
    assert members(fragments=["1", ["0", "2"]]) == [[2, 3], [0, 1, 4, 5], [6, 7, 8, 9, 10, 11]]
