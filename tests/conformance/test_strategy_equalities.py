"""Strategies that are each other where their parameters meet: the code of one tests the other's for free."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import outer_references
import pytest
import strategy_reference as reference
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from worlds import chain_form

from exogym_core.strategy import (
    Chain,
    CoCoDCStrategy,
    DelayedDiLoCoStrategy,
    DiLoCoStrategy,
    EagerDiLoCoStrategy,
    Sites,
    StreamingDiLoCoStrategy,
)
from exogym_core.strategy.parts.fragments import fragments_of, layers_of
from exogym_core.strategy.parts.rounds import FragmentOptions

adamw = partial(torch.optim.AdamW, lr=0.01)

problems = reference.problems(4, 9, 4, 6)


def results(strategy: Any, problem: dict[str, int]) -> list[torch.Tensor]:
    model, batches = reference.make_problem(**problem)
    return reference.run_strategy(strategy, model, batches).results


@settings(max_examples=10)
@given(problem=problems, H=st.integers(1, 4), codec=st.sampled_from([None, "fp16", "e3m0"]))
def test_streaming_of_one_fragment_without_delay_is_diloco(
    problem: dict[str, int],
    H: int,  # noqa: N803
    codec: str | None,
) -> None:
    one = StreamingDiLoCoStrategy(adamw, H=H, num_fragments=1, tau=0, alpha=0.0, outer_lr=0.7, codec=codec)
    for got, want in zip(
        results(one, problem), results(DiLoCoStrategy(adamw, H=H, codec=codec), problem), strict=True
    ):
        assert torch.equal(got, want)


@settings(max_examples=10)
@given(problem=problems, H=st.integers(1, 4))
@example(
    problem={"num_ranks": 1, "steps": 1, "inputs": 1, "hidden": 2, "seed": 23}, H=1
)  # phi - (phi - theta) is rounded
def test_cocodc_of_one_fragment_without_delay_is_diloco(problem: dict[str, int], H: int) -> None:  # noqa: N803
    one = CoCoDCStrategy(adamw, H=H, num_fragments=1, tau=0, transmissions=1, outer_lr=0.7)
    for got, want in zip(results(one, problem), results(DiLoCoStrategy(adamw, H=H), problem), strict=True):
        assert torch.equal(got, want)


@settings(max_examples=25)
@given(
    problem=problems,
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


@settings(max_examples=10)
@given(problem=problems, H=st.integers(1, 4))
def test_eager_diloco_of_one_worker_is_diloco(problem: dict[str, int], H: int) -> None:  # noqa: N803
    """Also at a run's very end, where it took a step of momentum for the others, of whom there are none."""
    model, rounds = reference.make_problem(**{**problem, "num_ranks": 1, "steps": problem["steps"] * H})
    got = reference.run_strategy(EagerDiLoCoStrategy(adamw, H=H), model, rounds).results[0]
    assert torch.equal(got, reference.run_strategy(DiLoCoStrategy(adamw, H=H), model, rounds).results[0])


@settings(max_examples=8)
@given(problem=problems, H=st.integers(1, 3))
def test_delayed_without_momentum_loses_nothing(problem: dict[str, int], H: int) -> None:  # noqa: N803
    """With an outer rate of 1 every displacement is in phi once, a round late; at the end all are."""
    problem["steps"] = 2 * H
    strategy = DelayedDiLoCoStrategy("sgd", lr=0.0, H=H, outer_optim_spec="sgd", outer_lr=1.0)
    model, batches = reference.make_problem(**problem)
    for got in reference.run_strategy(strategy, model, batches).results:
        torch.testing.assert_close(got, reference.vector(model))


@pytest.mark.parametrize(
    "kind", [StreamingDiLoCoStrategy, CoCoDCStrategy, DelayedDiLoCoStrategy, EagerDiLoCoStrategy]
)
@pytest.mark.parametrize("codec", [None, "e3m0"])
def test_behind_sites_it_is_one_rank_a_site_with_the_sites_batch(kind: Any, codec: str | None) -> None:
    model, batches = reference.make_problem(4, 7, 4, 6, seed=1)
    joined = [[tuple(map(torch.cat, zip(*step[k : k + 2], strict=True))) for k in (0, 2)] for step in batches]
    options = {"num_fragments": 2, "tau": 2} if kind is StreamingDiLoCoStrategy else {}
    if kind is CoCoDCStrategy:
        options = {"num_fragments": 2, "tau": 2, "transmissions": 3}
    alone = kind(adamw, H=3, codec=codec, **options)
    of_sites = Chain([Sites(2), kind(H=3, codec=codec, **options)], adamw)
    got = reference.run_strategy(of_sites, model, batches).results
    want = reference.run_strategy(alone, model, joined).results  # type: ignore[arg-type]
    for rank in range(4):
        assert torch.equal(got[rank], got[rank // 2 * 2])
        if codec is None:
            torch.testing.assert_close(got[rank], want[rank // 2], rtol=1e-9, atol=1e-9)


def test_what_overlaps_costs_no_time_that_training_covers() -> None:
    """Rounds of 2 fragments on a slow line: waited for by DiLoCo, hidden by Streaming, bytes alike."""
    model, batches = reference.make_problem(2, 8, 40, 60, seed=1)

    def run(strategy: Any) -> Any:
        def body(comm: Any) -> None:
            own, replica = copy.deepcopy(strategy), copy.deepcopy(model)
            own.setup(replica, comm, 8, 0)
            for step in batches:
                own.zero_grad()
                comm.advance(10.0)
                replica(step[comm.rank]).backward()
                own.step()

        return reference.run_ranks(body, 2, topology=LINE)

    computing = 80.0
    diloco = run(DiLoCoStrategy(adamw, H=4))
    streaming = run(StreamingDiLoCoStrategy(adamw, H=4, num_fragments=2, tau=1))
    assert diloco.virtual_seconds > computing + 1
    assert streaming.virtual_seconds < computing + (diloco.virtual_seconds - computing) / 2
    staged = run(StreamingDiLoCoStrategy(adamw, H=4, num_fragments=2, tau=2, codec="int8"))
    assert staged.virtual_seconds < computing + (
        run(DiLoCoStrategy(adamw, H=4, codec="int8")).virtual_seconds - 80
    )


LINE = chain_form("ab", "100 kbit/s")


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
