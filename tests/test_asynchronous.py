"""Strategies without waiting for others: servers, mailboxes, and runs that end at a virtual time."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from exogym_core import Trainer
from exogym_core.results.fit_result import FitResult
from exogym_core.strategy import (
    ADPSGDStrategy,
    AsyncDiLoCoStrategy,
    AsyncSPARTAStrategy,
    DecoupledDiLoCoStrategy,
    DiLoCoStrategy,
    DPSGDStrategy,
    EagerDiLoCoStrategy,
    FedAvgStrategy,
    HALoSStrategy,
    HeLoCoStrategy,
    SimpleReduceStrategy,
    Strategy,
    StreamingDiLoCoStrategy,
)
from netgym.tasks import MLP
from netsim.topology.weather import random_crashes

MAKERS: dict[str, Any] = {
    "ADPSGD": lambda: ADPSGDStrategy(lr=0.02),
    "AsyncDiLoCo": lambda: AsyncDiLoCoStrategy(H=4, lr=0.02),
    "AsyncDiLoCo, dylu": lambda: AsyncDiLoCoStrategy(H=4, lr=0.02, dylu=True),
    "AsyncSPARTA": lambda: AsyncSPARTAStrategy(lr=0.02, p_sparta=0.5, interval=4, delay=2),
    "DecoupledDiLoCo": lambda: DecoupledDiLoCoStrategy(H=4, num_fragments=2, lr=0.02),
    "HALoS": lambda: HALoSStrategy(H=2, K=2, lr=0.02),
    "HeLoCo": lambda: HeLoCoStrategy(H=4, lr=0.02),
}
TOPOLOGY = {
    "regions": {
        "us": {"hosts": 2, "nic": "1 Gbit/s"},
        "eu": {"hosts": 2, "nic": "1 Gbit/s", "devices": 1},
    },
    "wan": [{"between": ["us", "eu"], "bandwidth": "100 Mbit/s", "rtt": "80 ms"}],
    "protocol": "ideal",
}
# The last two share a device: 100 ms a step, not 50.
UNEQUAL = {"placement": ["us.0", "us.1", "eu.0", "eu.0"]}


def fit(strategy: Strategy, num_nodes: int = 4, **options: Any) -> FitResult:
    torch.manual_seed(0)
    inputs = torch.randn(400, 6)
    data = TensorDataset(inputs, (inputs.sum(dim=1) > 0).long())
    given = {"max_steps": 24, "num_epochs": 20, "batch_size": 8, "val_interval": 8, "workers": "threads"}
    given |= {"topology": TOPOLOGY, "compute": "50 ms"}
    trainer = Trainer(MLP(6, [], 2), data, data)
    return trainer.fit(strategy=strategy, num_nodes=num_nodes, **{**given, **options}).fit_result


@pytest.mark.parametrize("name", MAKERS)
def test_a_world_of_one_worker_trains(name: str) -> None:
    assert fit(MAKERS[name](), num_nodes=1, max_steps=9).final_loss is not None


def own_samples(rank: int, num_nodes: int, train_dataset: bool) -> TensorDataset:
    inputs = torch.randn(60 + rank, 6, generator=torch.Generator().manual_seed(rank))
    return TensorDataset(inputs, (inputs.sum(dim=1) > 0).long())


def test_workers_with_data_of_their_own_agree_on_them_without_the_server() -> None:
    """Servers read no data, and take no part in the comparison of data sets."""
    given = {"num_nodes": 2, "max_steps": 4, "batch_size": 4, "topology": "lan", "compute": "10 ms"}
    trainer = Trainer(MLP(6, [], 2), own_samples, None)
    model = trainer.fit(strategy=AsyncDiLoCoStrategy(H=2), workers="threads", progress=False, **given)
    assert len(model.fit_result.history) == 4


def test_what_servers_send_between_regions_is_charged_too() -> None:
    """Two workers away from the server: a round is as many bytes up as down, but for the answer's shorter tail."""
    result = fit(AsyncDiLoCoStrategy(H=4, lr=0.02))
    num_rounds, num_values = 24 // 4, 6 * 2 + 2
    assert result.bytes_sent == 4 * num_rounds * 4 * (num_values + 2)
    assert result.wan_bytes == 2 * num_rounds * 4 * (num_values + 2 + num_values + 1)


def test_where_the_server_is_judged_nothing_is_said_of_workers_models() -> None:
    """Its own replica, which nobody trains, passes for no worker's; at the end workers are looked at."""
    result = fit(AsyncDiLoCoStrategy(H=4, lr=0.02))
    for row in result.validation:
        assert row["judged_loss"] is not None
        if row["judged_virtual_seconds"] < result.validation[-1]["judged_virtual_seconds"]:
            assert row["local_loss"] is row["global_loss"] is row["global_perplexity"] is None
    assert result.mean_of_replicas_loss is not None


def test_fast_workers_do_not_wait_for_slow_ones() -> None:
    """With a time budget each worker does as many steps as its own speed allows; synchronous ones go together."""
    apart = fit(AsyncDiLoCoStrategy(H=4, lr=0.02), **UNEQUAL, until="2 s", max_steps=1000)
    together = fit(DiLoCoStrategy(H=4, lr=0.02), **UNEQUAL, until="2 s", max_steps=1000)
    assert apart.history[-1]["step"] > 1.4 * together.history[-1]["step"]
    steps = [
        done / a_step for done, a_step in zip(together.compute_seconds, (0.05, 0.05, 0.1, 0.1), strict=True)
    ]
    assert steps == pytest.approx([len(together.history)] * 4, rel=1e-6), "everybody did every step"
    assert 2.0 <= together.virtual_seconds < 3.0


def test_until_ends_synchronous_ranks_together() -> None:
    """At the first step before which some rank is past the time; no step begins after it."""
    result = fit(SimpleReduceStrategy(lr=0.02), until=1.0, max_steps=1000)
    before_last = result.history[-2]["virtual_seconds"]
    assert before_last < 1.0 <= result.history[-1]["virtual_seconds"]


LOOSE: dict[str, Callable[[], Strategy]] = {
    "islands": lambda: FedAvgStrategy(island_size=3, H=2, lr=0.02),
    "gossip": lambda: DPSGDStrategy(lr=0.02),
    "streaming": lambda: StreamingDiLoCoStrategy(H=4, num_fragments=1, tau=2, lr=0.02),
    "eager": lambda: EagerDiLoCoStrategy(H=2, lr=0.02),
}


@pytest.mark.parametrize("name", LOOSE)
def test_until_ends_ranks_that_do_not_meet_after_the_same_step_and_changes_no_time(name: str) -> None:
    """The first step that none of them finishes before that time: not at the slowest rank's time.

    Ranks that do not meet waited for each other at each exchange; one that was alone on its island for ever.
    """
    options: dict[str, Any] = {"compute": {"fixed": "50 ms", "jitter": 0.5}, "max_steps": 200}
    result = fit(LOOSE[name](), until=0.6, **options)
    whole = fit(LOOSE[name](), **{**options, "max_steps": len(result.history)})
    assert result.final_loss == whole.final_loss
    assert result.virtual_seconds == whole.virtual_seconds >= 0.6
    for one, other in zip(result.history, whole.history, strict=True):
        assert one["virtual_seconds"] == other["virtual_seconds"]
    assert len(result.history) < 20


@pytest.mark.parametrize("name", ["ADPSGD", "AsyncDiLoCo"])
def test_evaluations_by_the_clock(name: str) -> None:
    """Every 0.3 virtual seconds, whatever steps ranks have done; looking changes no time and no bit."""
    result = fit(MAKERS[name](), **UNEQUAL, val_seconds="0.3 s", until="2 s", max_steps=1000)
    rows = result.validation[:-1]
    assert len(rows) >= 6
    for number, row in enumerate(rows):
        assert row["virtual_seconds"] >= 0.3 * number
        assert row["judged_virtual_seconds"] <= row["virtual_seconds"] + 0.2
    by_steps = fit(MAKERS[name](), **UNEQUAL, until="2 s", max_steps=1000)
    assert by_steps.virtual_seconds == result.virtual_seconds
    assert by_steps.final_loss == result.final_loss


def test_dynamic_local_updates_follow_speed() -> None:
    """Workers of 50 and of 100 ms a step do rounds of 12 and of about 6 steps."""
    strategy = AsyncDiLoCoStrategy(H=12, lr=0.02, dylu=True)
    result = fit(strategy, **UNEQUAL, until="4 s", max_steps=2000)
    plain = fit(AsyncDiLoCoStrategy(H=12, lr=0.02), **UNEQUAL, until="4 s", max_steps=2000)
    assert result.bytes_sent > plain.bytes_sent, "slow workers report more often"


def test_decoupled_learners_do_not_wait() -> None:
    """Without quorum every learner computes all the time, whatever the others do."""
    result = fit(DecoupledDiLoCoStrategy(H=4, num_fragments=2, lr=0.02, quorum=1), **UNEQUAL)
    ends = [24 * seconds for seconds in (0.05, 0.05, 0.1, 0.1)]
    assert result.compute_seconds == pytest.approx(ends, rel=1e-6)
    assert result.exposed_seconds == pytest.approx([0.0] * 4, abs=1e-6)


def test_random_crashes_are_exponential_and_by_seed() -> None:
    """Law of the mean over many hosts; hosts draw apart; nothing fails while it is repaired."""
    hosts = [f"host{number}" for number in range(60)]
    crashes = random_crashes(hosts, 100.0, 10.0, 5_000.0, seed=1)
    assert len(crashes) / 60 == pytest.approx(5_000 / 110, rel=0.05)
    of_one = [event.at for event in crashes if event.host == "host7"]
    assert all(later - earlier > 10.0 for earlier, later in itertools.pairwise(of_one))
    assert crashes == random_crashes(hosts, 100.0, 10.0, 5_000.0, seed=1)
    assert crashes != random_crashes(hosts, 100.0, 10.0, 5_000.0, seed=2)
