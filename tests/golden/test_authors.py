"""Strategies beside their authors' own code: parameters that it left behind, kept with their origin.

`authors.json` says which code at which commit, how it was called and on what. Nothing of that code is here.
"""

from __future__ import annotations

import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import strategy_reference as reference
import torch
from torch import Tensor, nn
from worlds import star_form

from exogym_core.communicator import Communicator, run_ranks
from exogym_core.strategy import (
    DeMoStrategy,
    DionStrategy,
    HALoSStrategy,
    MuLoCoStrategy,
    NoLoCoStrategy,
    SlowMoStrategy,
    StreamingDiLoCoStrategy,
)

NUMBERS: dict[str, Any] = json.loads((Path(__file__).parent / "authors.json").read_text())


def fp64(numbers: Any) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


TORCHFT: dict[str, tuple[tuple[int, int, int], list[list[str]], dict[str, Any]]] = {
    "plain": (
        (2, 8, 31),
        [["first", "first_bias", "mixed", "scale"]],
        {"sync_every": 4, "fragment_sync_delay": 0, "fragment_update_alpha": 0.0},
    ),
    "fragments": (
        (2, 13, 32),
        [["first", "mixed"], ["first_bias", "scale"]],
        {"sync_every": 6, "fragment_sync_delay": 2, "fragment_update_alpha": 0.0},
    ),
    "mixed": (
        (3, 13, 33),
        [["first", "mixed"], ["first_bias", "scale"]],
        {"sync_every": 6, "fragment_sync_delay": 1, "fragment_update_alpha": 0.4},
    ),
}


@pytest.mark.parametrize("name", TORCHFT)
def test_streaming_ends_where_torchfts_does(name: str) -> None:
    """Under its own names for the options, to the last digits of fp64; what is in flight at the end is left there."""
    (n, steps, seed), fragments, options = TORCHFT[name]
    model, batches = reference.make_problem(n, steps, 3, 4, seed)
    model.scale = nn.Parameter(model.scale.detach().reshape(1))  # theirs takes no numbers without a dimension
    adamw = {"name": "adamw", "lr": 0.01}
    strategy = StreamingDiLoCoStrategy(adamw, outer_lr=0.7, fragments=fragments, **options)
    run = reference.run_strategy(strategy, model, batches, finish=False)
    for got, numbers in zip(run.results, NUMBERS["torchft"][name], strict=True):
        torch.testing.assert_close(got, fp64(numbers), rtol=1e-12, atol=1e-14)


class Two(nn.Module):
    """A matrix and a vector."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(8, 6, generator=generator))
        self.b = nn.Parameter(torch.randn(6, generator=generator))

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return ((torch.tanh(batch[0] @ self.a + self.b) - batch[1]) ** 2).mean()


def test_demo_ends_where_its_authors_code_does() -> None:
    """Three ranks, six steps, to rounding in fp32: one other sign would be 0.02."""
    draws = torch.Generator().manual_seed(41)
    model = Two(draws)
    batches = [
        [(torch.randn(4, 8, generator=draws), torch.randn(4, 6, generator=draws)) for _ in range(3)]
        for _ in range(6)
    ]
    strategy = DeMoStrategy(lr=0.01, compression_topk=3, compression_chunk=4, weight_decay=0.1)
    run = reference.run_strategy(strategy, model, batches)
    for got, numbers in zip(run.results, NUMBERS["DeMo"], strict=True):
        torch.testing.assert_close(got, torch.tensor(numbers), rtol=1e-5, atol=1e-6)


def test_muloco_ends_where_its_authors_code_does() -> None:
    """One worker, their inner Muon and AdamW and outer Nesterov step."""
    model, batches = reference.make_problem(1, 7, 5, 4, seed=51)
    strategy = MuLoCoStrategy(H=3, lr=0.02, outer_lr=0.7, outer_momentum=0.6)
    (got,) = reference.run_strategy(strategy, model, batches, finish=False).results
    torch.testing.assert_close(got, fp64(NUMBERS["MuLoCo"]), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(("shape", "inputs", "hidden"), [("tall", 4, 6), ("wide", 6, 4)])
def test_dion_ends_where_its_authors_code_does(
    shape: str, inputs: int, hidden: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One worker, from the same Q; wide matrices are transposed."""
    made = DionStrategy.prepare

    def from_their_q(strategy: DionStrategy) -> None:
        made(strategy)
        columns = strategy.factors.right[0].shape[1]
        rows = range(len(strategy.factors.right[0]))
        strategy.factors.right = [
            fp64(
                [[((3 * i + 5 * j) % 7 - 3) / 3 + (0.1 * i - 0.2 * j) for j in range(columns)] for i in rows]
            )
        ]

    monkeypatch.setattr(DionStrategy, "prepare", from_their_q)
    model, batches = reference.make_problem(1, 5, inputs, hidden, seed=61)
    model.mixed.requires_grad_(False)
    (got,) = reference.run_strategy(DionStrategy(lr=0.01, rank_fraction=0.5), model, batches).results
    torch.testing.assert_close(got, fp64(NUMBERS["Dion"][shape]), rtol=1e-7, atol=1e-9)


def test_halos_servers_end_where_their_authors_code_does() -> None:
    """Two regions of two workers of unequal speeds, at unequal distances."""
    model, batches = reference.make_problem(4, 16, 3, 4, seed=71)
    draw = random.Random(71)
    latencies = [draw.uniform(0.001, 0.4) for _ in range(7)]
    paces = [draw.uniform(0.02, 0.5) for _ in range(4)]
    durations = [[pace * draw.uniform(0.5, 1.5) for _ in range(16)] for pace in paces]
    adamw = {"name": "adamw", "lr": 0.01}

    def body(comm: Communicator) -> Tensor | None:
        strategy = HALoSStrategy(adamw, H=2, K=3, regions=2, local_buffer=2, global_buffer=2)
        replica = reference.copy.deepcopy(model)
        strategy.setup(replica, comm, 16, seed=0)
        if comm.rank >= 4:
            seen: list[Tensor] = []
            strategy.serve(lambda steps: seen.append(strategy.phi.clone()))
            return strategy.phi
        for step, duration in zip(batches, durations[comm.rank], strict=True):
            comm.advance(duration)
            strategy.zero_grad()
            replica(step[comm.rank]).backward()
            strategy.step()
        return None

    hosts = [f"h{rank}" for rank in range(7)]
    topology = star_form(
        hosts, "1 Gbit/s", dict(zip(hosts, (f"{each} s" for each in latencies), strict=True))
    )
    run = run_ranks(body, 7, topology=topology, placement=hosts)
    numbers_of = NUMBERS["HALoS"]
    for got, numbers in zip(run.results[4:], [*numbers_of["local"], numbers_of["global"]], strict=True):
        assert got is not None
        torch.testing.assert_close(got, fp64(numbers), rtol=1e-9, atol=1e-11)


MIXING_NUMBERS: dict[str, Any] = json.loads((Path(__file__).parent / "mixing_authors.json").read_text())


def test_noloco_ends_where_its_authors_code_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """With their pairs, which they draw from the number of inner steps; to the last digits of fp64."""

    def group(module: NoLoCoStrategy, rank: int, num_ranks: int, round_number: int) -> list[int]:
        inner_steps = module.H * (round_number + 1)
        order = [int(peer) for peer in np.random.default_rng(inner_steps + 1).permutation(num_ranks)]
        return next(
            sorted(order[k :: num_ranks // 2])
            for k in range(num_ranks // 2)
            if rank in order[k :: num_ranks // 2]
        )

    monkeypatch.setattr(NoLoCoStrategy, "group", group)
    model, batches = reference.make_problem(4, 6, 2, 3, seed=21)
    run = reference.run_strategy(NoLoCoStrategy("adam", lr=0.01, H=2), model, batches)
    for got, numbers in zip(run.results, MIXING_NUMBERS["NoLoCo"], strict=True):
        torch.testing.assert_close(got, torch.tensor(numbers, dtype=torch.float64), rtol=1e-12, atol=1e-14)


def test_slowmo_ends_where_fairscales_does() -> None:
    """To rounding in fp32."""
    model, batches = reference.make_problem(2, 9, 2, 3, seed=22, dtype=torch.float32)
    sgd = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
    run = reference.run_strategy(SlowMoStrategy(sgd, H=3, outer_lr=0.9, outer_momentum=0.5), model, batches)
    for got, numbers in zip(run.results, MIXING_NUMBERS["SlowMo"], strict=True):
        torch.testing.assert_close(got, torch.tensor(numbers), rtol=1e-5, atol=1e-6)
