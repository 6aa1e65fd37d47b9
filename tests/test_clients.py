"""Clients drawn for each round, shares of unequal labels and sizes, and steps balanced by speed."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from experiments import experiment
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import TensorDataset

from exogym_core.data.partition import Partition
from exogym_core.data.samples import shared_out
from exogym_core.results.fit_result import FitResult
from exogym_core.strategy import (
    AllReduceStrategy,
    DiLoCoStrategy,
    FedAvgStrategy,
    GPAStrategy,
    SNOOStrategy,
    Strategy,
)
from exogym_core.strategy.participation.sampling import balanced_steps, draw_clients
from exogym_core.testing.bits import assert_same_bits
from netgym import Trainer
from netgym.experiment.experiment import Experiment
from netgym.tasks import build_task
from netsim.errors import InputError

MEGABIT = 10**6


class Line(nn.Module):
    """Least squares on 8 inputs; 36 bytes of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1)
        nn.init.constant_(self.layer.weight, 0.5)
        nn.init.zeros_(self.layer.bias)

    def forward(self, batch: Any) -> torch.Tensor:
        inputs, labels = batch
        return ((self.layer(inputs)[:, 0] - labels) ** 2).mean()


def samples(number: int, labels: int = 5) -> TensorDataset:
    draws = torch.Generator().manual_seed(number)
    return TensorDataset(
        torch.randn(number, 8, generator=draws), torch.randint(labels, (number,), generator=draws)
    )


def star(hosts: int) -> dict[str, Any]:
    return {"regions": {"us": {"hosts": hosts, "nic": "1 Mbit/s", "latency": "1 ms"}}}


def trained(strategy: Any, num_nodes: int = 6, data: Any = None, **options: Any) -> FitResult:
    given = {
        "max_steps": 11,
        "batch_size": 2,
        "val_interval": 2,
        "workers": "threads",
        "topology": star(num_nodes),
        "compute": "10 ms",
        "protocol": "ideal",
        "device": "cpu",
        "progress": False,
    } | options
    trainer = Trainer(Line(), samples(96) if data is None else data, samples(8))
    trainer.fit(strategy=strategy, num_nodes=num_nodes, **given)
    return trainer.result


UNTIMED = dict.fromkeys(("topology", "compute", "protocol"))
STRATEGIES = {
    "FedAvg": lambda **drawn: FedAvgStrategy(H=2, lr=0.05, **drawn),
    "FedAdam": lambda **drawn: DiLoCoStrategy(H=2, lr=0.05, outer_optim_spec="adam", outer_lr=0.01, **drawn),
}


# --- clients -----------------------------------------------------------------------------------------------


@given(num=st.integers(1, 40), share=st.floats(0.01, 1), seed=st.integers(0, 9))
@settings(max_examples=20)
def test_draws_are_distinct_and_depend_on_seed_and_round_alone(num: int, share: float, seed: int) -> None:
    drawn = max(1, round(share * num))
    clients = [draw_clients(seed, number, num, drawn) for number in range(3)]
    assert all(len(set(each)) == drawn and list(each) == sorted(each) for each in clients)
    assert all(0 <= client < num for each in clients for client in each)
    draw_clients.cache_clear()
    assert clients == [draw_clients(seed, number, num, drawn) for number in range(3)]


def test_each_client_is_drawn_as_often_as_others() -> None:
    counts = Counter(client for number in range(600) for client in draw_clients(1, number, 20, 5))
    deviation = (600 * 0.25 * 0.75) ** 0.5
    assert all(abs(counts[client] - 150) < 4 * deviation for client in range(20))


def test_all_clients_drawn_is_the_run_without_drawing() -> None:
    make = STRATEGIES["FedAdam"]
    plain = trained(make())
    for drawn in ({"clients_per_round": 6}, {"fraction": 1.0}):
        run = trained(make(**drawn))
        run.options = plain.options  # which name the clients
        assert_same_bits(plain, run)


def test_threads_processes_and_resumed_runs_draw_the_same(tmp_path: Path) -> None:
    make = STRATEGIES["FedAdam"]
    whole = trained(make(clients_per_round=2))
    assert_same_bits(whole, trained(make(clients_per_round=2), workers={"kind": "processes", "processes": 2}))
    for every in (3, 4):  # within a round, and at its end
        part = trained(
            make(clients_per_round=2),
            max_steps=9,
            save_dir=str(tmp_path / str(every)),
            checkpoint_interval=every,
        )
        where = {"resume_from": part.checkpoint_folder, "checkpoint_interval": every}
        assert_same_bits(whole, trained(make(clients_per_round=2), **where))


@pytest.mark.parametrize("name", STRATEGIES)
def test_newcomers_download_what_leavers_hand_over(name: str) -> None:
    """Bytes are those of the averages, and a download for each client that was not in the round before."""
    result = trained(STRATEGIES[name](clients_per_round=3), max_steps=12)
    rounds = [set(ranks) for ranks in result.averaged_ranks.values()]
    assert [sorted(each) for each in rounds] == [list(draw_clients(42, k, 6, 3)) for k in range(6)]
    coming = sum(len(now - before) for before, now in itertools.pairwise(rounds))
    assert coming
    averages, downloads = 6 * 2 * (3 - 1) * 36, coming * 36
    sent = result.bytes_sent
    if name == "FedAvg":
        assert sent == averages + downloads
    else:  # the outer optimizer's state travels too
        assert sent > averages + 2 * downloads
    assert result.dropped_peers == []
    assert {row["num_peers"] for row in result.history} == {3}
    assert [bool(state) for state in result.rank_states] == [rank in rounds[-1] for rank in range(6)]


def test_a_download_takes_its_bytes_at_the_leavers_rate() -> None:
    """Rounds of one client: 20 ms of steps each, then 2 ms and 36 bytes at 1 Mbit/s wherever the client changes."""
    result = trained(FedAvgStrategy(H=2, lr=0.05, clients_per_round=1), max_steps=20)
    ranks = [each[0] for each in result.averaged_ranks.values()]
    changes = sum(before != now for before, now in itertools.pairwise(ranks))
    assert 0 < changes < 9
    assert result.virtual_seconds == pytest.approx(10 * 0.02 + changes * (0.002 + 36 * 8 / MEGABIT), abs=1e-6)


def test_clients_that_sit_out_hold_no_replica_and_no_optimizer_state() -> None:
    held: list[int] = []

    class Watched(FedAvgStrategy):
        def sit_out(self, num_steps: int) -> None:
            super().sit_out(num_steps)
            storages = [each.untyped_storage().nbytes() for each in self.model.parameters()]
            states = [each for state in self.optim.state.values() for each in state.values()]
            held.append(sum(storages) + len(states) + 1000 * (self.outer is not None))

    trained(Watched(H=2, lr=0.05, clients_per_round=2), max_steps=20)
    assert len(held) > 20
    assert set(held) == {8}  # one value of each of two parameters


def test_runs_that_end_at_a_time_end_for_all_clients() -> None:
    result = trained(FedAvgStrategy(H=2, lr=0.05, clients_per_round=2), max_steps=40, until=0.09)
    assert [row["step"] for row in result.history] == list(range(1, len(result.history) + 1))
    assert result.history[-3]["virtual_seconds"] < 0.09 <= result.history[-1]["virtual_seconds"]
    assert len(result.history) % 2 == 0


def test_samples_weigh_clients_of_unequal_size() -> None:
    """A round of one full-batch step each is the mean of the clients' steps, weighed by their samples."""
    data = Partition(samples(60), dirichlet=0.5)
    sizes = data.sizes(4)
    assert len(set(sizes)) > 1
    result = trained(
        FedAvgStrategy(optim_spec="sgd", lr=0.1),
        4,
        data,
        max_steps=1,
        batch_size=60,
        **UNTIMED,
    )
    mean, by_worker = torch.zeros(9, dtype=torch.float64), torch.zeros(9, dtype=torch.float64)
    inputs, labels = data.dataset.tensors
    for share in data.shares(4):
        model = Line().double()
        model((inputs[share].double(), labels[share])).backward()
        after = torch.cat([(each - 0.1 * each.grad).flatten().detach() for each in model.parameters()])
        mean += after * len(share) / 60
        by_worker += after / 4
    assert result.judged_state is not None
    found = torch.cat([each.flatten().double() for each in result.judged_state.values()])
    assert torch.allclose(found, mean, atol=1e-6)
    assert not torch.allclose(found, by_worker, atol=1e-3)


# --- partitions --------------------------------------------------------------------------------------------

partitions = st.fixed_dictionaries({"dirichlet": st.floats(0.01, 100)}) | st.fixed_dictionaries(
    {"labels_per_client": st.integers(1, 5)}
)


@given(options=partitions, num=st.integers(5, 30), seed=st.integers(0, 9))
@settings(max_examples=25)
def test_every_sample_belongs_to_one_client(options: dict[str, Any], num: int, seed: int) -> None:
    data = Partition(samples(120), **options, seed=seed)
    shares = data.shares(num)
    assert sorted(np.concatenate(shares).tolist()) == list(range(120))
    assert data.sizes(num) == [len(each) for each in shares]
    assert min(data.sizes(num)) >= 1
    again = Partition(samples(120), **options, seed=seed).shares(num)
    assert all(np.array_equal(*pair) for pair in zip(shares, again, strict=True))


@given(count=st.integers(1, 5), num=st.integers(5, 20), seed=st.integers(0, 9))
@settings(max_examples=15)
def test_clients_hold_so_many_labels_evenly(count: int, num: int, seed: int) -> None:
    dataset = samples(400)
    shares = Partition(dataset, labels_per_client=count, seed=seed).shares(num)
    held = [set(dataset.tensors[1][share].tolist()) for share in shares]
    assert {len(each) for each in held} == {count}
    holders = Counter(label for each in held for label in each)
    assert max(holders.values()) - min(holders.values()) <= 1


@pytest.mark.parametrize("alpha", [0.1, 10.0])
def test_shares_have_the_variance_of_a_dirichlet_distribution(alpha: float) -> None:
    """Var p = (1/N)(1 - 1/N) / (N alpha + 1) of N clients' shares of a label (Kotz et al. 2000, chapter 49)."""
    num, labels = 8, 400
    dataset = TensorDataset(torch.zeros(labels * 50, 1), torch.arange(labels).repeat(50))
    counts = np.stack(
        [
            np.bincount(dataset.tensors[1][share], minlength=labels)
            for share in Partition(dataset, dirichlet=alpha).shares(num)
        ]
    )
    expected = (1 / num) * (1 - 1 / num) / (num * alpha + 1)
    assert (counts / 50).mean() == pytest.approx(1 / num)
    assert (counts / 50).var() == pytest.approx(expected, rel=0.1)


def test_files_partition_any_labelled_task(tmp_path: Path) -> None:
    task = build_task("digits", partition={"labels_per_client": 2, "seed": 3})
    assert isinstance(task.train, Partition)
    assert sum(task.train.sizes(10)) == len(task.train.dataset)
    path = tmp_path / "file.yaml"
    path.write_text(experiment(task="{name: digits, partition: {labels_per_client: 11}}"))
    with pytest.raises(
        InputError, match=r"file.yaml:\d+: task.partition.labels_per_client: .* has 10 labels"
    ):
        Experiment.load(path).build_task()


def test_clients_pass_through_all_of_their_own_samples() -> None:
    """Clients of 30 and of 5 samples: each epoch of a client has all of its own, whatever the others have."""
    labels = torch.tensor([0] * 30 + [1] * 5)
    data = Partition(TensorDataset(torch.arange(35.0)[:, None].repeat(1, 8), labels), labels_per_client=1)
    seen: dict[int, list[float]] = {}

    class Seeing(Line):
        def forward(self, batch: Any) -> torch.Tensor:
            for value, label in zip(batch[0][:, 0].tolist(), batch[1].tolist(), strict=True):
                seen.setdefault(label, []).append(value)
            return super().forward(batch)

    trainer = Trainer(Seeing(), data, None)
    options = {"max_steps": 8, "batch_size": 4, "workers": "threads", "progress": False, "val_size": 0}
    trainer.fit(strategy=FedAvgStrategy(lr=1e-9), num_nodes=2, device="cpu", **options)
    assert sorted(seen[0][-30:]) == list(range(30))
    assert sorted(seen[1][-20:]) == sorted([30.0, 31.0, 32.0, 33.0, 34.0] * 4)


# --- balanced steps ----------------------------------------------------------------------------------------

UNEQUAL: dict[str, Any] = {
    "topology": {
        "regions": {
            "fast": {"hosts": 2, "nic": "1 Tbit/s", "latency": "1 ms"},
            "slow": {"hosts": 1, "devices": 1, "nic": "1 Tbit/s", "latency": "1 ms"},
        },
        "wan": [{"between": ["fast", "slow"], "bandwidth": "1 Tbit/s", "rtt": "2 ms"}],
    },
    "placement": ["fast.0", "fast.1", "slow.0", "slow.0"],  # two of the workers share a device
    "max_steps": 12,
}


@given(seconds=st.lists(st.floats(0.01, 10), min_size=1, max_size=6), steps=st.integers(1, 50))
def test_balanced_rounds_end_within_half_a_step_of_each_other(seconds: list[float], steps: int) -> None:
    counts = balanced_steps(seconds, steps)
    assert max(counts) == counts[seconds.index(min(seconds))] == steps
    for each, count in zip(seconds, counts, strict=True):
        assert count == 1 or abs(count * each - steps * min(seconds)) <= each * 0.5 * (1 + 1e-9)


def test_equal_speeds_are_the_run_without_balance() -> None:
    plain, balanced = trained(DiLoCoStrategy(H=4)), trained(DiLoCoStrategy(H=4, balance=True))
    balanced.options, balanced.recording = plain.options, plain.recording  # of which one cannot be retimed
    assert_same_bits(plain, balanced)


def test_balance_removes_the_wait_for_slow_workers() -> None:
    """Steps of 10 and 20 ms, H = 4: fast workers wait 40 ms a round, and slow ones take 2 steps instead."""
    plain, balanced = (trained(DiLoCoStrategy(H=4, balance=each), 4, **UNEQUAL) for each in (False, True))
    assert plain.compute_seconds == pytest.approx([0.12, 0.12, 0.24, 0.24])
    assert balanced.compute_seconds == pytest.approx([0.12] * 4)
    assert plain.virtual_seconds - balanced.virtual_seconds == pytest.approx(3 * 0.04, abs=1e-6)
    assert plain.exposed_seconds[0] - balanced.exposed_seconds[0] == pytest.approx(3 * 0.04, abs=1e-6)
    assert [row["num_peers"] for row in balanced.history] == [2, 2, 4, 4] * 3
    assert balanced.bytes_sent == plain.bytes_sent
    processes = trained(DiLoCoStrategy(H=4, balance=True), 4, workers="processes", **UNEQUAL)
    assert_same_bits(balanced, processes)


def test_steps_weigh_balanced_workers() -> None:
    """Weights are 4, 4, 2, 2 over their mean: the same as a mean in which each fast worker counts twice."""
    by_steps = trained(FedAvgStrategy(H=4, lr=0.05, balance=True), 4, **UNEQUAL | {"max_steps": 4})
    states = {}
    for weigh_by in ("worker", "steps"):
        run = trained(
            FedAvgStrategy(H=4, lr=0.05, balance=True, weigh_by=weigh_by), 4, **UNEQUAL | {"max_steps": 4}
        )
        states[weigh_by] = run.judged_state["layer.weight"]
    assert torch.equal(by_steps.judged_state["layer.weight"], states["steps"])
    assert not torch.allclose(states["worker"], states["steps"], atol=1e-5)


# --- batches by speed ---------------------------------------------------------------------------------------

BY_SPEED = UNEQUAL | {
    "compute": {"flops": {"device": "a100", "utilisation": 1e-8}},
    "batch_size": 6,
    "max_steps": 9,
}


@given(weights=st.lists(st.floats(0.01, 10), min_size=1, max_size=8), more=st.integers(0, 200))
def test_samples_are_shared_out_in_proportion(weights: list[float], more: int) -> None:
    total = len(weights) + more
    shares = shared_out(total, weights)
    assert sum(shares) == total
    assert min(shares) >= 1
    exact = [total * each / sum(weights) for each in weights]
    if min(exact) >= 1:
        assert all(abs(share - each) < 1 + 1e-6 for share, each in zip(shares, exact, strict=True))
    ascending = [share for _, share in sorted(zip(weights, shares, strict=True))]
    assert ascending == sorted(ascending)
    assert shared_out(64, [4.0, 4.0, 4.0, 1.0]) == [20, 20, 19, 5]


def test_workers_of_unequal_speed_arrive_together_with_the_gradients_of_equal_batches(tmp_path: Path) -> None:
    """Batches of 8, 8, 4 and 4 of steps of 24 samples; the last one of an epoch has 7."""
    data = samples(103)
    plain, by_speed = (
        trained(AllReduceStrategy(lr=0.05), 4, data, **BY_SPEED, batch_by_speed=each)
        for each in (False, True)
    )
    losses = [[row["train_loss"] for row in run.history] for run in (plain, by_speed)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert plain.compute_seconds[3] == pytest.approx(2 * plain.compute_seconds[0], rel=0.05)
    assert by_speed.compute_seconds[3] == pytest.approx(by_speed.compute_seconds[0], rel=0.05)
    part = BY_SPEED | {"max_steps": 6, "save_dir": str(tmp_path), "checkpoint_interval": 3}
    folder = trained(AllReduceStrategy(lr=0.05), 4, data, **part, batch_by_speed=True).checkpoint_folder
    where = {"resume_from": folder, "checkpoint_interval": 3, "workers": "processes", "batch_by_speed": True}
    resumed = trained(AllReduceStrategy(lr=0.05), 4, data, **BY_SPEED | where)
    resumed.recording = by_speed.recording  # names the first call that prevents it
    assert_same_bits(by_speed, resumed)


ONE_STEP: list[Strategy] = [
    DiLoCoStrategy(H=1, optim_spec="sgd", lr=0.05, outer_optim_spec="sgd", outer_lr=1.0, outer_momentum=0.0),
    SNOOStrategy(H=1, optim_spec="sgd", lr=0.05, outer_lr=1.0, outer_momentum=0.0),
    GPAStrategy(mu_x=0.0, optim_spec="sgd", lr=0.05),
]


@pytest.mark.parametrize("strategy", ONE_STEP, ids=lambda each: type(each).__name__)
def test_samples_weigh_rounds_of_batches_by_speed(strategy: Strategy) -> None:
    """Rounds of one step of SGD are steps of the mean gradient of all samples."""
    run = trained(strategy, 4, **BY_SPEED, batch_by_speed=True)
    gradients = trained(AllReduceStrategy(optim_spec="sgd", lr=0.05), 4, **BY_SPEED)
    mean = gradients.judged_state["layer.weight"]
    assert torch.allclose(run.judged_state["layer.weight"], mean, rtol=1e-4, atol=1e-6)


# --- what does not go together --------------------------------------------------------------------------------
