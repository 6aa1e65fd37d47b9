"""Which model could be shipped at an instant: parameters that the strategy itself has paid for."""

from __future__ import annotations

import copy

import pytest
import torch

from exogym_core.communicator import run_ranks
from exogym_core.strategy import STRATEGIES, DiLoCoStrategy, build_strategy
from exogym_core.tasks import build_model

JUDGED = {
    "ADPSGD": "own",
    "AsyncDiLoCo": "server",
    "AsyncSPARTA": "own",
    "DecoupledDiLoCo": "server",
    "HALoS": "server",
    "HeLoCo": "server",
    "AllReduce": "replica",
    "DESLOC": "outer",
    "DPSGD": "own",
    "DeMo": "replica",
    "DelayedDiLoCo": "outer",
    "DiLoCo": "outer",
    "EagerDiLoCo": "own",
    "FedAvg": "outer",
    "GASLoC": "own",
    "LocalSGD": "outer",
    "DGC": "replica",
    "Dion": "replica",
    "MuLoCo": "outer",
    "OneBitAdam": "replica",
    "PowerSGD": "replica",
    "NoLoCo": "own",
    "SGP": "own",
    "QSGD": "replica",
    "QsparseLocalSGD": "outer",
    "SignSGD": "replica",
    "SparseLoCo": "outer",
    "SPARTA": "own",
    "SPARTA+DiLoCo": "outer",
    "SlowMo": "outer",
    "CoCoDC": "outer",
    "StreamingDiLoCo": "outer",
}

OVERLAPPED = ["CoCoDC", "DelayedDiLoCo", "StreamingDiLoCo"]
IN_ROUNDS = [name for name, judged in JUDGED.items() if judged == "outer" and name not in OVERLAPPED]


def model():
    return build_model("mlp", inputs=6, hidden=[5], classes=3, seed=0)


def batch(rank, step):
    generator = torch.Generator().manual_seed(7 * rank + step)
    inputs = torch.randn(4, 6, generator=generator)
    return inputs, inputs[:, :3].argmax(dim=1)


def steps(comm, strategy, replica, num, first=0):
    """Do steps; what is judged after each, and the replica then."""
    told = []
    for step in range(first, first + num):
        strategy.zero_grad()
        strategy.before_backward(last_micro_batch=True)
        replica(batch(comm.rank, step)).backward()
        strategy.step()
        judged = strategy.judged_state()
        told.append(
            (
                strategy.judged_version,
                None if judged is None else {name: value.clone() for name, value in judged.items()},
                {name: value.detach().clone() for name, value in replica.named_parameters()},
            )
        )
    return told


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_says_what_is_judged(name):
    assert build_strategy(name).judged == JUDGED[name]


@pytest.mark.parametrize("name", IN_ROUNDS)
def test_in_rounds_it_is_what_the_last_one_made_and_before_it_the_initial_model(name):
    def body(comm):
        strategy, replica = build_strategy(name, H=3, optim_spec="sgd", lr=0.1), model()
        strategy.setup(replica, comm, 7, 0)
        return steps(comm, strategy, replica, 7)

    ranks = run_ranks(body, 2).results
    initial = {name: value.detach() for name, value in model().named_parameters()}
    for told in ranks:
        assert [version for version, _, _ in told] == [0, 0, 1, 1, 1, 2, 2]
        assert all(same(judged, initial) for _, judged, _ in told[:2])
        for round_end in (2, 5):
            _, judged, replica = told[round_end]
            assert same(judged, replica)  # at its end everybody has it
        assert same(told[3][1], told[2][1])
        assert not same(told[3][1], told[3][2])  # and then goes on
    assert all(same(mine[1], theirs[1]) for mine, theirs in zip(*ranks, strict=True))


@pytest.mark.parametrize("name", [name for name, judged in JUDGED.items() if judged in ("replica", "own")])
def test_else_it_is_the_replica_at_every_step(name):
    def body(comm):
        strategy, replica = build_strategy(name), model()
        strategy.setup(replica, comm, 2, 0)
        return steps(comm, strategy, replica, 2)

    for told in run_ranks(body, 2).results:
        assert [(version, judged) for version, judged, _ in told] == [(1, None), (2, None)]


@pytest.mark.parametrize("name", IN_ROUNDS)
def test_it_comes_back_with_the_rest_of_the_state(name):
    def body(comm):
        strategy, replica = build_strategy(name, H=3), model()
        strategy.setup(replica, comm, 9, 0)
        steps(comm, strategy, replica, 4)
        again, other = build_strategy(name, H=3), model()
        again.setup(other, comm, 9, 0)
        again.load_state_dict(copy.deepcopy(strategy.state_dict()))
        assert again.judged_version == strategy.judged_version == 1
        return strategy.judged_state(), again.judged_state()

    for first, second in run_ranks(body, 2).results:
        assert same(first, second)


def test_the_ranks_of_a_sharded_site_have_it_in_parts():
    def body(comm):
        strategy = DiLoCoStrategy(H=2, ranks_per_worker=2, sharding="FULL_SHARD", optim_spec="sgd", lr=0.1)
        replica = model()
        strategy.setup(replica, comm, 3, 0)
        return steps(comm, strategy, replica, 3)

    results = run_ranks(body, 4).results
    whole = results[0][1][2]  # at the end of the round every rank has gathered it
    for first in (0, 2):
        parts = {**results[first][2][1], **results[first + 1][2][1]}
        for name, value in whole.items():
            flat = torch.full((value.numel(),), torch.nan)
            for key, part in parts.items():
                if key == name:
                    flat.copy_(part.reshape(-1))
                elif key.startswith(f"{name}["):
                    start, stop = key[len(name) + 1 : -1].split(":")
                    flat[int(start) : int(stop)] = part
            assert torch.equal(flat.view(value.shape), value)
