"""Law 7: stopping and resuming gives the same run as not stopping, bit for bit. Law 6: checkpoints are free."""

from __future__ import annotations

import random
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from experiments import FIRST_ALGORITHMS, digest, fit_until, outcome
from torch import Tensor, nn
from torch.utils.data import Dataset

from exogym_core import Trainer
from exogym_core.checkpoints.checkpoint import StoredCheckpoint, find_checkpoint
from exogym_core.communicator.simulated.communicator import SimulatedCommunicator
from exogym_core.data.samples import Source
from exogym_core.events import Saved
from exogym_core.results.fit_result import FitResult
from exogym_core.run import loop
from exogym_core.strategy import STRATEGIES, DiLoCoStrategy, Strategy, build_strategy
from exogym_core.strategy.options import accepted_arguments
from netsim import DeadlockError

NUM_NODES, NUM_STEPS = 3, 7
PROCESSES = {"kind": "processes", "processes": 2}
SCHEDULES: dict[str, dict[str, Any]] = {
    "cosine": {
        "lr_scheduler": "lambda_cosine",
        "lr_scheduler_kwargs": {"warmup_steps": 3, "cosine_anneal": True},
    },
    "one cycle": {"lr_scheduler": "OneCycleLR", "lr_scheduler_kwargs": {"max_lr": 0.1, "total_steps": 20}},
    "steps": {"lr_scheduler": "MultiStepLR", "lr_scheduler_kwargs": {"milestones": [2, 4, 4]}},
}
# Ranks of these go at their own pace: a checkpoint is complete when the slowest rank and all servers have come to it.
AT_OWN_PACE = {"ADPSGD", "AsyncDiLoCo", "DecoupledDiLoCo", "HALoS", "HeLoCo"}
# Schedules, codecs, islands, rounds that a stop falls into.
OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("AllReduce", {"codec": "int8", "max_norm": 0.5, **SCHEDULES["cosine"]}),  # and micro-batches
    ("FedAvg", {"H": 2, "island_size": 2, "optim_spec": {"name": "sgd", "lr": 0.1, "momentum": 0.9}}),
    ("DiLoCo", {"H": 3, "codec": "bf16", **SCHEDULES["one cycle"]}),
    ("DiLoCo", {"H": 3, "codec": "uniform8bit", "error_feedback": True, "ranks_per_worker": 3}),
    ("DiLoCo", {"H": 2, "codec": "int8", "error_feedback": True}),
    ("SPARTA", {"p_sparta": 0.3, "index_selector": "shuffled_sequential", "interval": 2}),
    ("SPARTA+DiLoCo", {"p_sparta": 0.3, "H": 3, **SCHEDULES["steps"]}),
    ("DeMo", {"compression_topk": 2, "compression_chunk": 4, "codec": "compact"}),
    # Rounds so short that letters and averages are under way at every stop.
    ("ADPSGD", {"interval": 2}),
    ("AsyncDiLoCo", {"H": 2, "dylu": True, "buffer": 2, "momentum_share": 0.2}),
    ("AsyncSPARTA", {"p_sparta": 0.5, "interval": 3, "delay": 2}),
    ("CoCoDC", {"H": 4, "num_fragments": 2, "tau": 2, "transmissions": 4}),
    ("DecoupledDiLoCo", {"H": 3, "num_fragments": 3, "quorum": 2, "grace": 0.004}),
    ("HALoS", {"H": 1, "K": 2, "local_buffer": 2}),
    ("HeLoCo", {"H": 1}),
    ("StreamingDiLoCo", {"H": 6, "num_fragments": 2, "tau": 4}),
    ("StreamingDiLoCo", {"H": 6, "num_fragments": 2, "tau": 4, "codec": "int8", "error_feedback": True}),
    ("DelayedDiLoCo", {"H": 3, "codec": "e3m0"}),
    ("EagerDiLoCo", {"H": 3}),
]
# Those of each commit: a codec with an error, sites, a stop inside a round, and ranks at their own pace.
AT_EACH_COMMIT = {3, 8, 16}
# And every other strategy, in short rounds: with those of its defaults no round would end here.
OPTIONS += [
    (name, {"H": 2} if "H" in accepted_arguments(kind) else {})
    for name, kind in STRATEGIES.items()
    if name not in dict(OPTIONS)
]


class Model(nn.Module):
    """Draws random numbers, and keeps a buffer that its state_dict leaves out."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3))
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        if self.training:
            self.calls += 1
        logits = self.layers(batch[0]) * (1 + 0.01 * self.calls)
        return nn.functional.cross_entropy(logits, batch[1])


class Augmented(Dataset[tuple[Tensor, int]]):
    """Samples that are different each time."""

    def __init__(self, noise: float = 0.1) -> None:
        self.noise = noise
        self.samples = torch.randn(NUM_NODES * 4 * 3, 6, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        noise = self.noise * (np.random.randn() + random.random())
        return self.samples[index] + torch.tensor(noise, dtype=torch.float32), index % 3


def fit(strategy: Strategy, stop_at: int | None = None, **options: Any) -> FitResult:
    arguments: dict[str, Any] = {
        **{"num_nodes": NUM_NODES, "max_steps": NUM_STEPS, "batch_size": 4},
        **{"val_size": 8, "val_interval": 3, "correlation_interval": 2, "topology": "two-datacenters"},
        **{"protocol": "linux-tcp", "compute": {"fixed": "3 ms", "jitter": 0.2}, "workers": "threads"},
        **{"device": "cpu", "collectives": FIRST_ALGORITHMS},  # chosen ones are in test_choice_laws.py
    }
    trainer = Trainer(Model(), Augmented(), Augmented(noise=0.0))
    return fit_until(trainer, stop_at, strategy=strategy, **{**arguments, **options})


def last_checkpoint(result: FitResult) -> Any:
    assert result.checkpoint_folder is not None
    checkpoint = find_checkpoint(result.checkpoint_folder)
    assert isinstance(checkpoint, StoredCheckpoint)
    states = [checkpoint.rank_state(rank) for rank in range(NUM_NODES)]
    logs = [
        [request for request in log if not isinstance(getattr(request, "row", None), Saved)]
        for log in checkpoint.past()[0]
    ]
    return checkpoint.step, digest(states), repr(logs)


def make(number: int) -> Strategy:
    name, options = OPTIONS[number]
    return build_strategy(name, **options)


def micro(number: int) -> dict[str, int]:
    """Two micro-batches a step, of the first strategy."""
    return {} if number else {"minibatch_size": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def whole(folder: Path) -> Any:
    """Outcome of each strategy without a checkpoint before its end, and that checkpoint."""

    @cache
    def run(number: int) -> tuple[Any, Any]:
        result = fit(make(number), checkpoint_interval=NUM_STEPS, save_dir=folder, **micro(number))
        return outcome(result), last_checkpoint(result)

    return run


# That the states of the others are whole is in conformance/test_strategy_table.py, too.
@pytest.mark.parametrize(
    "number",
    [
        pytest.param(number, id=name, marks=[] if number in AT_EACH_COMMIT else [pytest.mark.thorough])
        for number, (name, _) in enumerate(OPTIONS)
    ],
)
def test_stops_at_any_step_change_no_bit(number: int, folder: Path, whole: Any) -> None:
    """A stop at a random step: of every third strategy in processes, of every sixth in threads as well.

    Runs that stop have checkpoints every step or two, the whole run none: so these change nothing, either.
    """
    expected, draw = whole(number), random.Random(number)
    processes = {"kind": "processes", "processes": 2 + number % 2}
    kinds = ["threads", processes] if number % 6 == 0 else ["threads" if number % 3 else processes]
    stops = sorted(draw.sample(range(1, NUM_STEPS), len(kinds)))
    where: dict[str, Any] = {"save_dir": folder}
    least = most = 0
    for stop_at, workers in zip(stops, kinds, strict=True):
        every = draw.choice((1, 2))
        stopped = fit(
            make(number), stop_at, checkpoint_interval=every, workers=workers, **micro(number), **where
        )
        assert least <= stopped.resumed_step <= most
        # Stopped before its first checkpoint, it has nothing to go on from.
        if find_checkpoint(stopped.checkpoint_folder) is not None:
            where = {"resume_from": stopped.checkpoint_folder}
        # A stop does not wait for evaluations, and a checkpoint is complete when those before it are.
        least, most = stopped.resumed_step, NUM_STEPS
        if workers == "threads":
            most = max(least, (stop_at - 1) // every * every)
            least = least if OPTIONS[number][0] in AT_OWN_PACE else most
    resumed = fit(make(number), checkpoint_interval=1, **micro(number), **where)
    assert least <= resumed.resumed_step <= most
    assert (outcome(resumed), last_checkpoint(resumed)) == expected


def test_a_run_stopped_after_its_last_step_ends_as_it_would_have(folder: Path) -> None:
    """The last evaluation was in the last step: its mean model must be had again."""
    whole = fit(make(0), max_steps=6, checkpoint_interval=3, save_dir=folder)
    resumed = fit(make(0), max_steps=6, resume_from=whole.checkpoint_folder, workers=PROCESSES)
    assert resumed.resumed_step == 6
    assert outcome(resumed) == outcome(whole)


def forget(*_: object) -> None:
    pass


PLANTED: dict[str, tuple[Any, str]] = {
    "random streams": (loop, "restore_random_streams"),
    "the place in the data": (Source, "load_state_dict"),
    "the communicator's counters": (SimulatedCommunicator, "load_state_dict"),
    "the optimizers": (Strategy, "load_state_dict"),
    "buffers": (loop, "load_named"),
    "that the clock has heard it": (SimulatedCommunicator, "repeating"),
}


class TalksInSetup(DiLoCoStrategy):
    def _init_node(self, model: nn.Module, rank: int, num_nodes: int) -> None:
        super()._init_node(model, rank, num_nodes)
        self.comm.all_reduce(torch.ones(100_000))


@pytest.fixture(scope="module")
def talking(folder: Path) -> tuple[Any, FitResult]:
    """Outcome of a run, and the same run stopped, which resumes to it where nothing is forgotten."""
    expected = outcome(fit(TalksInSetup(H=3)))
    stopped = fit(TalksInSetup(H=3), 5, checkpoint_interval=1, save_dir=folder)
    assert outcome(fit(TalksInSetup(H=3), resume_from=stopped.checkpoint_folder)) == expected
    return expected, stopped


@pytest.mark.parametrize("forgotten", PLANTED)
def test_the_law_sees_what_is_forgotten(
    forgotten: str, talking: tuple[Any, FitResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, stopped = talking
    owner, name = PLANTED[forgotten]
    counted_as = SimulatedCommunicator.counted_as
    monkeypatch.setattr(owner, name, (lambda comm: counted_as(comm, 0)) if name == "repeating" else forget)
    with suppress(DeadlockError):  # calls that are counted differently meet nobody
        assert outcome(fit(TalksInSetup(H=3), resume_from=stopped.checkpoint_folder)) != expected
