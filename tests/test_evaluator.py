"""Evaluation: no rank waits for it, and its results do not depend on which snapshot comes first."""

from __future__ import annotations

import itertools

import experiments
import pytest
import torch
from experiments import mlp, samples
from torch import nn
from worlds import chain_form

from exogym_core.run.evaluator import Evaluator
from exogym_core.strategy import DiLoCoStrategy, FedAvgStrategy, SPARTAStrategy, Strategy
from exogym_core.workers.journal import SpillBuffer
from netsim.errors import InputError

PROCESSES = {"kind": "processes", "processes": 2}
TOPOLOGY = chain_form({name: {"device": "h100"} for name in "abcd"}, "1 Gbit/s", "1 ms")


def fit(strategy, model=None, **options):
    given = {"strategy": strategy, "num_nodes": 4, "max_steps": 8, "val_interval": 2}
    given |= {"topology": TOPOLOGY, "compute": {"fixed": "1 s", "jitter": 0.5}}
    return experiments.fit(model, samples(64), samples(64), **{**given, **options})


class Restless(nn.Module):
    """A model whose own code does something with its parameters at one of its forward passes in training."""

    def __init__(self, does, at):
        super().__init__()
        self.part, self.late = nn.Linear(6, 1), nn.Parameter(torch.zeros(1), requires_grad=False)
        self.does, self.at, self.num_passes = does, at, 0

    def forward(self, batch):
        self.num_passes += self.training
        if self.training and self.num_passes == self.at:
            self.does(self)
        return (self.part(batch[0]) + self.late).square().mean()


def replaces(model):
    model.part.weight = nn.Parameter(model.part.weight.detach().clone())


def adds(model):
    model.register_parameter("more", nn.Parameter(torch.zeros(1)))


@pytest.mark.parametrize(
    ("does", "at", "message"),
    [
        (replaces, 1, r"replaces its parameter 'part\.weight' after"),
        (adds, 4, r"adds .*'more' after"),
        (lambda model: model.part.register_parameter("bias", None), 4, r"removes its parameter 'part\.bias'"),
        (lambda model: model.late.requires_grad_(True), 4, r"sets requires_grad of its parameter 'late'"),
    ],
    ids=["replaces", "adds", "removes", "unfreezes"],
)
def test_a_model_with_other_parameters_than_those_that_train_is_refused(does, at, message):
    """The optimizer had the first ones, so that the model trained otherwise than in plain torch, or not at all."""
    with pytest.raises(InputError, match=message):
        experiments.fit(
            Restless(does, at), samples(64), samples(64), strategy=FedAvgStrategy(H=8), max_steps=8
        )


class AsksForTheTime(Strategy):
    judged = "own"

    def step(self):
        self.optimizer_step()
        self.comm.now()
        super().step()


class Polls(Strategy):
    """Each rank sends to the next and looks whether something has come, without waiting for it."""

    judged = "own"

    def step(self):
        self.optimizer_step()
        size, rank = self.comm.world_size, self.comm.rank
        sent = self.comm.isend(torch.ones(1), (rank + 1) % size, tag=self.local_step)
        got = self.comm.irecv(torch.zeros(1), (rank - 1) % size, tag=self.local_step)
        while not got.is_completed():
            self.comm.advance(0.1)
        got.wait()
        sent.wait()
        super().step()


@pytest.mark.parametrize("workers", ["threads", PROCESSES], ids=["threads", "processes"])
@pytest.mark.parametrize("make", [AsksForTheTime, Polls])
def test_a_rank_that_reads_the_clock_is_not_disturbed_by_observers(make, workers):
    """Averages were collected by off-clock calls: told as a deadlock when a rank waited for the clock meanwhile."""
    result = fit(make(lr=0.01), workers=workers, correlation_interval=2, max_steps=4).fit_result
    assert (len(result.validation), len(result.correlation)) == (3, 2)


def comparable(result):
    rows = [*result.validation, *result.correlation]
    return repr([*rows, *({name: v.tolist() for name, v in result.judged_state.items()},)])


def test_where_ranks_run_and_how_little_memory_there_is_changes_nothing(monkeypatch):
    seen = set()
    for workers, memory_bytes in (("threads", 1 << 26), ("threads", 0), (PROCESSES, 0)):
        monkeypatch.setattr(Evaluator, "memory_bytes", memory_bytes)
        seen.add(comparable(fit(SPARTAStrategy(lr=0.01), workers=workers, correlation_interval=3).fit_result))
    assert len(seen) == 1


def test_a_rank_far_ahead_fills_files_and_not_memory():
    buffer = SpillBuffer(memory_bytes=1000)
    held = [buffer.put([torch.full((100,), float(number))]) for number in range(50)]
    assert buffer.num_bytes == sum(each.num_bytes for each in held) == 800
    assert [float(buffer.pop(each)[0].mean()) for each in held] == list(range(50))
    assert buffer.num_bytes == 0
    assert [buffer.put([torch.zeros(100), torch.arange(3)]).num_bytes for _ in range(4)] == [424, 424, 0, 0]


class Owes(Strategy):
    """Rank 0 sends after its last step what rank 1 waits for before its first."""

    judged = "own"

    def step(self):
        self.optimizer_step()
        if self.comm.rank == 1 and self.local_step == 0:
            self.comm.recv(torch.zeros(1), 0)
        super().step()
        if self.comm.rank == 0 and self.local_step == 8:
            self.comm.send(torch.ones(1), 1)


def test_a_rank_ahead_deposits_all_its_snapshots_though_it_owes_a_message(monkeypatch):
    """Were it to wait for room, the rank whose snapshots make room would wait for its message."""
    seen = set()
    for workers, memory_bytes in (("threads", 0), ("threads", 1 << 26), (PROCESSES, 0)):
        monkeypatch.setattr(Evaluator, "memory_bytes", memory_bytes)
        result = fit(Owes(lr=0.01), workers=workers, num_nodes=2, val_interval=1).fit_result
        assert [row["step"] for row in result.validation] == list(range(9))
        seen.add(comparable(result))
    assert len(seen) == 1


# --- what comes back ---------------------------------------------------------------------------------------------


class Counting(nn.Module):
    """Counts its forward passes where a state_dict does not see it, and keeps something that is no tensor."""

    def __init__(self):
        super().__init__()
        self.inner = mlp()
        self.notes = {"batches": 0}
        self.register_buffer("count", torch.tensor(0.0), persistent=False)
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, batch):
        if self.training:
            self.count = self.count + 1  # another tensor
            self.seen += 1
            self.notes["batches"] += 1
        return self.inner(batch)

    def get_extra_state(self):
        return dict(self.notes)

    def set_extra_state(self, state):
        self.notes = dict(state)


def test_extra_states_and_passing_buffers_come_back_as_they_were_trained():
    """Training ended in a crash over a state that is no tensor; counters outside the state_dict came back as 0."""
    model = fit(DiLoCoStrategy(H=2), Counting(), workers=PROCESSES)
    assert float(model.count) == 8.0
    assert int(model.seen) == 8
    assert model.notes == {"batches": 8}
    assert model.fit_result.rank_states[3]["_extra_state"] == {"batches": 8}
    judged = model.fit_result.judged_state
    assert (float(judged["count"]), judged["_extra_state"]) == (8.0, {"batches": 8})


def test_buffers_are_judged_as_they_were_when_the_model_came_to_exist():
    result = fit(DiLoCoStrategy(H=3), Counting()).fit_result  # rounds end at 3 and 6
    assert float(result.judged_state["count"]) == 6.0
    assert float(result.mean_state["count"]) == 8.0


def test_a_rank_that_is_through_early_has_waited():
    result = fit(Strategy(lr=0.01), val_size=0).fit_result
    times = result.computing_seconds, result.network_seconds, result.waiting_seconds
    assert sum(times) == pytest.approx(result.virtual_seconds)
    assert times[1] == 0.0
    assert times[2] > 0.0  # jitter makes them unequal, and nobody sends anything
    assert result.compute_utilisation == pytest.approx(times[0] / result.virtual_seconds)


def test_gloo_ranks_are_judged_alike():
    options = {"topology": None, "compute": None, "num_nodes": 2, "max_steps": 4}
    simulated = fit(DiLoCoStrategy(H=3, lr=0.01), **options).fit_result
    real = fit(DiLoCoStrategy(H=3, lr=0.01), transport="gloo", **options).fit_result
    for mine, theirs in itertools.zip_longest(simulated.validation, real.validation):
        assert mine["judged_step"] == theirs["judged_step"]
        for name in ("local_loss", "global_loss", "judged_loss"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-5)
