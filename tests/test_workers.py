"""How ranks are carried: the option, random generators that travel, values in shared memory, memory in threads."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from exogym_core import Trainer
from exogym_core.communicator import Communicator, run_ranks
from exogym_core.strategy import AllReduceStrategy, FedAvgStrategy
from exogym_core.workers.rng import RandomStates, seed_process
from exogym_core.workers.run import Transport, register_transport, transport_named
from exogym_core.workers.spec import WorkerSpec
from netsim.errors import InputError, RankError


@pytest.mark.parametrize(
    ("given_spec", "kind", "processes"),
    [
        ("threads", "threads", None),
        ("processes", "processes", 2),
        ("auto", "threads", None),
        ({"kind": "auto", "processes": 3}, "processes", 3),
        ({"kind": "processes", "processes": 9}, "processes", 4),
        (None, "threads", None),
    ],
)
def test_settling_decides_kind_and_number(given_spec: Any, kind: str, processes: int | None) -> None:
    settled = WorkerSpec.parse(given_spec).settle(num_ranks=4, num_cores=2)
    assert (settled.kind, settled.processes) == (kind, processes)


def test_auto_takes_processes_for_runs_worth_it() -> None:
    auto = WorkerSpec.parse("auto")
    assert auto.settle(8, 2, step_flops=1e6, num_steps=1_000).kind == "processes"
    assert auto.settle(8, 2, step_flops=1e6, num_steps=200).kind == "threads"
    assert auto.settle(1, 2, step_flops=1e6, num_steps=100_000).kind == "threads"
    assert auto.settle(8, 2, step_flops=1e10).kind == "processes"
    assert auto.settle(8, 2, step_flops=1e6).kind == "threads"
    assert auto.settle(8, 1, step_flops=1e10).kind == "threads"


class Located(torch.nn.Module):
    """A model that notes the process of its passes."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.weight, self.folder = torch.nn.Parameter(torch.ones(1)), folder

    def forward(self, batch: Any) -> torch.Tensor:
        (self.folder / str(os.getpid())).touch()
        return (self.weight * batch[0]).square().mean()


@pytest.mark.thorough
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
@pytest.mark.parametrize("num_steps", [10, 1_000])
def test_many_tiny_steps_are_taken_in_a_process_a_core(tmp_path: Path, num_steps: int) -> None:
    """Steps were judged one by one: a run of any length stayed on one core."""
    data = torch.utils.data.TensorDataset(torch.ones(4_000, 1))
    trainer = Trainer(Located(tmp_path), data)
    trainer.fit(
        strategy=FedAvgStrategy("sgd", H=num_steps, lr=0.1), num_nodes=4, batch_size=1, max_steps=num_steps
    )
    passes = {path.name for path in tmp_path.iterdir()}
    assert (len(passes - {str(os.getpid())}) > 1) == (num_steps == 1_000)


GPU = torch.Generator()  # in the place of a GPU's, which is got and set in the same way

draws = st.lists(
    st.sampled_from(["rand", "randn", "seed", "random", "torch", "normal", "integers", "gpu"]), max_size=6
)


def draw(kind: str) -> Any:
    match kind:
        case "rand":
            return np.random.rand()
        case "randn":
            return np.random.randn()  # keeps a second Gaussian for the next call
        case "seed":
            return np.random.seed(5)
        case "random":
            return random.gauss(0, 1)
        case "torch":
            return float(torch.rand(()))
        case "normal":
            return float(torch.randn(()))  # likewise
        case "gpu":
            return float(torch.rand((), generator=GPU))
    return np.random.randint(100)


@given(st.lists(st.tuples(st.integers(0, 2), draws), max_size=8))
def test_generators_that_travel_are_as_good_as_ones_own(turns: list[tuple[int, list[str]]]) -> None:
    """Three ranks by turns draw what each would have drawn alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "default_generators", (GPU,))
        outside = RandomStates.of_process()
        alone = []
        for rank in range(3):
            seed_process(7, rank)
            GPU.manual_seed(rank)
            alone.append([draw(kind) for who, kinds in turns if who == rank for kind in kinds])
        together: list[list[Any]] = [[], [], []]
        ranks: dict[int, RandomStates] = {}
        outside.load()
        inside = outside
        for who, kinds in turns:
            inside.save()
            if who in ranks:
                ranks[who].load(inside)
            else:  # a rank seeds its streams as it begins
                ranks[who] = RandomStates()
                seed_process(7, who)
                GPU.manual_seed(who)
            inside = ranks[who]
            together[who] += [draw(kind) for kind in kinds]
        inside.save()
        outside.load(inside)
        assert together == alone


def test_a_killed_rank_is_reported_with_its_step_and_the_call_in_flight() -> None:
    def body(comm: Communicator) -> None:
        for step in range(1, 6):
            comm.all_reduce(torch.ones(1))
            comm.mark({"step": step})
            if comm.rank == 1 and step == 3:
                comm.now()
                os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RankError) as caught:
        run_ranks(body, 2, "lan", workers={"kind": "processes", "processes": 2})
    assert re.match(
        r"the process of rank 1 ended after step [23]: killed by signal 9 \(SIGKILL\); in flight: rank 0's all_reduce",
        str(caught.value),
    )


def test_one_of_ones_own_is_carried_and_its_capabilities_are_asked():
    seen = []

    def host(job):
        seen.append((job.num_ranks, job.seed))
        return transport_named("netsim").host(job)

    mine = Transport("untimed", host)
    register_transport(mine)
    register_transport(mine)  # again changes nothing
    assert run_ranks(lambda comm: comm.rank, 2, transport="untimed", seed=5).results == [0, 1]
    assert seen == [(2, 5)]
    with pytest.raises(InputError, match="there is a transport 'untimed' already"):
        register_transport(Transport("untimed", host))
    with pytest.raises(InputError, match="no virtual time over 'untimed'"):
        run_ranks(lambda comm: None, 1, transport="untimed", trace="trace.json")
    with pytest.raises(
        InputError, match="transport 'untimed' has no virtual time and no topology; drop topology"
    ):
        Trainer(None, None).fit(
            strategy=AllReduceStrategy(), num_nodes=1, topology="lan", transport="untimed"
        )


# --- values that travel through shared memory ---------------------------------------------------------------

_ROUNDS = 30
_NUMBERS = 40_000  # large enough not to travel inside the messages


def _gather_rounds(comm: Communicator) -> int:
    """How many values were not what their rank had sent."""
    wrong = 0
    for turn in range(_ROUNDS):
        got = comm.all_gather(torch.full((_NUMBERS,), 100 * turn + comm.rank))
        expected = torch.arange(comm.world_size)[:, None] + 100 * turn
        wrong += int((torch.stack(got) != expected).sum())
        root = turn % comm.world_size
        sent = comm.broadcast(torch.full((_NUMBERS,), 100 * turn + comm.rank), root)
        wrong += int((sent != 100 * turn + root).sum())
    return wrong


def test_a_process_that_has_its_values_overwrites_none_of_the_others() -> None:
    run = run_ranks(_gather_rounds, 4, workers={"kind": "processes", "processes": 4})
    assert run.results == [0, 0, 0, 0]


# torch's own pickles of most of them cannot be read.
NEW_DTYPES = [torch.uint16, torch.float8_e4m3fn]


@pytest.mark.parametrize(
    ("transport", "workers"), [("netsim", {"kind": "processes", "processes": 2}), ("gloo", "threads")]
)
def test_results_come_back_as_they_were(transport: str, workers: Any) -> None:
    """They travel outside of the pickle: values, dtypes, layouts and identities stay, and they are the caller's own."""

    def body(comm: Communicator) -> dict[str, Any]:
        large = torch.arange(100_000) + comm.rank
        parameter = torch.nn.Parameter(torch.full((300, 300), 2.0))
        return {
            "one": large,
            "again": [large],
            "whole": parameter,
            "half": large.bfloat16(),
            "t": large.view(2, -1).T,
            "new": [torch.arange(6).to(dtype).view(2, 3)[:, ::2] for dtype in NEW_DTYPES],
        }

    results = run_ranks(body, 2, transport=transport, workers=workers).results
    for rank, got in enumerate(results):
        assert got["one"] is got["again"][0]
        assert torch.equal(got["one"], torch.arange(100_000) + rank)
        assert isinstance(got["whole"], torch.nn.Parameter)
        assert got["whole"].requires_grad
        assert torch.equal(got["half"], got["one"].bfloat16())
        assert torch.equal(got["t"], got["one"].view(2, -1).T)
        assert [each.dtype for each in got["new"]] == NEW_DTYPES
        assert [each.to(torch.int64).tolist() for each in got["new"]] == [[[0, 2], [3, 5]]] * 2
        got["one"].add_(1)
        assert got["again"][0][0] == rank + 1


# --- memory of ranks in threads -----------------------------------------------------------------------------

DATA_BYTES = 64 * 2**20

# The proportional set size counts a page that several mappings share once, whoever maps it.
SCRIPT = """
import gc, json, re, sys
import torch
from exogym_core import Trainer
from exogym_core.strategy import FedAvgStrategy
from netgym.tasks import build_task

class Probe(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, batch):
        tokens, targets = batch
        return (self.weight - tokens.float().mean()).square().sum()

def pss():
    return int(re.search(r"Pss:\\s+(\\d+) kB", open("/proc/self/smaps_rollup").read()).group(1)) * 1024

def memory(count, **limits):
    # Before the run, and the most of it while it goes through all data.
    gc.collect()  # the mapping of the last run's data goes
    task = build_task("text", paths=sys.argv[1], block_size=4096)
    steps = len(task.train) // (16 * count)
    before, peak = pss(), []

    def watch(row):
        if row["step"] % 64 == 0 or row["step"] == steps:
            peak.append(pss())

    Trainer(Probe(), task.train).fit(
        num_epochs=1, strategy=FedAvgStrategy("sgd", H=16, lr=0.1), num_nodes=count, batch_size=16,
        device="cpu", workers="threads", on_event=watch, **limits,
    )
    return before, max([*peak, pss()])

torch.set_num_threads(1)
memory(8, max_steps=2)  # what else is imported
eight = memory(8)
print(json.dumps([*eight, *memory(1)]))
"""


@pytest.mark.thorough
@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="memory is told by Linux only")
def test_eight_workers_in_threads_need_less_than_one_and_a_half_times_the_memory_of_one(
    tmp_path: Path,
) -> None:
    path = tmp_path / "tokens.bin"
    np.zeros(DATA_BYTES // 2, np.uint16).tofile(path)
    command = [sys.executable, "-c", SCRIPT, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    before_eight, eight, before_one, one = json.loads(done.stdout)
    one -= before_one
    assert one > 0.8 * DATA_BYTES, "the run has read its data, and they count"
    assert eight < 1.5 * (before_eight + one)
    assert eight - before_eight - one < 0.5 * DATA_BYTES, "not even half a copy more"
