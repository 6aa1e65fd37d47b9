"""Which model could be shipped at an instant: parameters that the strategy itself has paid for."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from experiments import fitted, mlp, samples

from exogym_core.communicator import run_ranks
from exogym_core.results.recorder import Judged, Reached, reach
from exogym_core.strategy import (
    STRATEGIES,
    AllReduceStrategy,
    DelayedDiLoCoStrategy,
    DiLoCoStrategy,
    Strategy,
    StreamingDiLoCoStrategy,
    build_strategy,
)
from netsim.errors import InputError

# docs/verdict.md has the same: test_report.py.
JUDGED = {name: build_strategy(name).judged for name in STRATEGIES}

OVERLAPPED = ["CoCoDC", "DelayedDiLoCo", "StreamingDiLoCo"]
WITHOUT_ROUNDS = ["ACCO", "GPA"]  # whose global model changes at each step
IN_ROUNDS = [
    name
    for name, judged in JUDGED.items()
    if judged == "outer" and name not in [*OVERLAPPED, *WITHOUT_ROUNDS]
]


def batch(rank, step):
    generator = torch.Generator().manual_seed(7 * rank + step)
    inputs = torch.randn(4, 6, generator=generator)
    return inputs, inputs[:, :3].argmax(dim=1)


def steps(comm, strategy, replica, num, first=0):
    """Do steps; what is judged after each, and the replica then."""
    reported = []
    for step in range(first, first + num):
        strategy.zero_grad()
        strategy.before_backward(last_micro_batch=True)
        replica(batch(comm.rank, step)).backward()
        strategy.step()
        judged = strategy.judged_state()
        reported.append(
            (
                strategy.judged_version,
                None if judged is None else {name: value.clone() for name, value in judged.items()},
                {name: value.detach().clone() for name, value in replica.named_parameters()},
            )
        )
    return reported


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("name", IN_ROUNDS)
def test_in_rounds_it_is_what_the_last_one_made_and_before_it_the_initial_model(name):
    def body(comm):
        strategy, replica = build_strategy(name, H=3, optim_spec="sgd", lr=0.1), mlp()
        strategy.setup(replica, comm, 7, 0)
        return steps(comm, strategy, replica, 7)

    ranks = run_ranks(body, 2).results
    initial = {name: value.detach() for name, value in mlp().named_parameters()}
    for reported in ranks:
        assert [version for version, _, _ in reported] == [0, 0, 1, 1, 1, 2, 2]
        assert all(same(judged, initial) for _, judged, _ in reported[:2])
        for round_end in (2, 5):
            _, judged, replica = reported[round_end]
            assert same(judged, replica)  # at its end everybody has it
        assert same(reported[3][1], reported[2][1])
        assert not same(reported[3][1], reported[3][2])  # and then goes on
    assert all(same(mine[1], theirs[1]) for mine, theirs in zip(*ranks, strict=True))


def test_the_ranks_of_a_sharded_site_have_it_in_parts():
    def body(comm):
        strategy = DiLoCoStrategy(H=2, ranks_per_worker=2, sharding="FULL_SHARD", optim_spec="sgd", lr=0.1)
        replica = mlp()
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


class Drifting(Strategy):
    """Local steps and nothing else: whatever it says is judged, ranks' models differ."""

    def __init__(self, judged, on_step=lambda strategy: None):
        super().__init__(optim_spec="sgd", lr=0.1)
        self.judged, self.on_step = judged, on_step

    def step(self):
        self.optimizer_step()
        super().step()

    def judged_state(self):
        return self.on_step(self)


def train(strategy, **options):
    given = {"max_steps": 4, "num_epochs": 9, "batch_size": 1, "val_interval": 2}
    return fitted(mlp(), samples(4), samples(4), **{"strategy": strategy, **given, **options})


@pytest.mark.parametrize(
    ("judged", "on_step", "line"),
    [
        (
            "replica",
            lambda strategy: None,
            "Drifting: judged = 'replica' says that all ranks' models are equal, but after 2 steps rank 1's is not "
            "rank 0's; write judged = 'own' to judge each rank's model, or judged = 'outer' with a judged_state() that "
            "returns the last average",
        ),
        ("server", lambda strategy: None, "Drifting: judged = 'server', but num_servers is 0"),
        (
            "outer",
            lambda strategy: None,
            "Drifting.judged_state(): returns None on rank 0, but judged = 'outer'",
        ),
        ("outer", lambda strategy: {}, "Drifting.judged_state(): lacks 'layers.0.bias'"),
    ],
)
def test_a_claim_that_is_untrue_is_an_error_that_names_the_right_one(judged, on_step, line):
    with pytest.raises(InputError) as caught:
        train(Drifting(judged, on_step))
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_replicas_that_are_equal_but_for_their_buffers_are_judged():
    """Running means are of each rank's own batches; parameters that differ by rounding alone are equal too."""

    class Normed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.inner = torch.nn.BatchNorm1d(6), mlp()

        def forward(self, values):
            return self.inner((self.norm(values[0]), values[1]))

    class LastBits(AllReduceStrategy):
        def step(self):
            super().step()
            with torch.no_grad():
                self.trainable[0].mul_(1 + 1e-7 * self.rank)

    for strategy in (AllReduceStrategy(lr=0.1), LastBits(lr=0.1)):
        result = fitted(Normed(), samples(8), samples(8), strategy=strategy, max_steps=2, num_epochs=9)
        assert result.judged == "replica"
        assert result.final_loss is not None


def run(*losses, versions=None):
    numbers = range(len(losses)) if versions is None else versions
    return [Judged(number, 10.0 * number, loss) for number, loss in zip(numbers, losses, strict=True)]


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ((), Reached("missed")),
        ((0.9, 0.51, 0.6), Reached("missed")),
        ((0.9, 0.5), Reached("touched", 10.0)),  # nothing follows
        ((0.9, 0.5, 0.4), Reached("touched", 10.0)),  # one alone proves nothing
        ((0.9, 0.5, 0.4, 0.4), Reached("held", 10.0)),
        ((0.9, 0.5, 0.9, 0.4, 0.4), Reached("held", 10.0)),  # a spike does not undo it
        ((0.9, 0.34, 0.4, 0.56, 0.7), Reached("touched", 10.0)),  # diverges
        ((0.9, 0.34, math.nan, math.nan, 0.3), Reached("touched", 10.0)),
        ((math.nan, 0.5, 0.5, 0.5), Reached("held", 10.0)),
        ((math.inf, math.nan), Reached("missed")),
    ],
)
def test_the_rule(losses, expected):
    assert reach(run(*losses), 0.5) == expected


def test_a_model_that_is_judged_again_is_no_later_model():
    """Rounds of many steps are judged several times: what is repeated is no evidence that a loss is held."""
    again = run(0.9, 0.4, 0.4, 0.4, 0.4, versions=[0, 1, 1, 1, 1])
    assert reach(again, 0.5).target == "touched"
    followed = run(0.9, 0.4, 0.4, 0.45, 0.45, 0.9, versions=[0, 1, 1, 2, 2, 3])
    assert reach(followed, 0.5).target == "touched"  # the median of 0.45 and 0.9 is above
    assert reach([*followed, *run(0.3, versions=[4])], 0.5).target == "held"


def test_without_virtual_time_it_is_reported_too():
    evaluations = [Judged(number, None, 0.1) for number in range(3)]
    assert reach(evaluations, 0.5) == Reached("held", None)


@pytest.mark.parametrize(
    ("make", "workers"),
    [(lambda: DelayedDiLoCoStrategy(H=2), "processes"), (lambda: StreamingDiLoCoStrategy(H=2), "threads")],
)
def test_a_model_made_of_what_was_in_flight_is_credited_with_the_end_of_the_run(
    make: Any, workers: str
) -> None:
    """It was credited with the last step's time, before its last average had come."""
    options = {"topology": "two-datacenters", "compute": "3 ms", "max_steps": 4, "workers": workers}
    result = fitted(validation=samples(8), strategy=make(), **options)
    assert result.virtual_seconds is not None
    assert result.history[-1]["virtual_seconds"] < result.virtual_seconds
    assert result.validation[-1]["judged_virtual_seconds"] == result.virtual_seconds
