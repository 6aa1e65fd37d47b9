"""Own strategies, drawn: their plan, a run, `netgym check` and a resumed run agree.

    python tests/soak/own_strategies.py --strategies 300 --first 0 --out build/soak

A strategy is drawn from its number: how often it sends (a constant, an option, or by its values), how long it goes on
meanwhile, what it keeps between steps, and what of this it declares. The last line of output is a JSON object, appended
to OUT too.
"""

from __future__ import annotations

import random
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[1]))

from experiments import fit_until
from numbered import soak
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from exogym_core import Trainer
from exogym_core.cost.compute import Compute
from exogym_core.results.fit_result import FitResult
from exogym_core.strategy import State, Strategy
from exogym_core.testing.bits import first_difference
from netgym.planning.measure import Measured, Setting
from netgym.planning.models import SequenceModel
from netgym.strategy_check import Workload, find_faults
from netsim import Topology
from netsim.errors import InputError

NETWORK = {
    "regions": {
        "a": {"hosts": 3, "nic": "1 Gbit/s", "latency": "1 ms"},
        "b": {"hosts": 2, "nic": "1 Gbit/s", "latency": "1 ms"},
    },
    "wan": [{"between": ["a", "b"], "bandwidth": "10 Mbit/s", "rtt": "20 ms"}],
}
NUM_STEPS = 12


class Drawn(Strategy):
    """Averages its parameters at times, and keeps a velocity or a count.

    Args:
        every: steps between averages; 0: whenever the sum of an averaged value says so.
        late: steps for which training goes on before the average is taken in.
        keeps: "nothing", "velocity" or "count".
        chunks: messages of an average.
    """

    judged = "own"

    def __init__(self, every: int, late: int, keeps: str, chunks: int, **options: Any) -> None:
        super().__init__(**options)
        self.every, self.late, self.keeps, self.chunks = every, late, keeps, chunks
        self.velocity: Tensor | None = None
        self.count = 0
        self.under_way: tuple[int, list[Any], list[Tensor]] | None = None

    def step(self) -> None:
        self.optimizer_step()
        self.count += 1
        if self.under_way is not None and self.local_step == self.under_way[0]:
            self.take_in()
        if self.under_way is None and self.is_due():
            flat = torch.cat([parameter.detach().flatten() for parameter in self.trainable])
            sent = [part.clone() for part in flat.tensor_split(self.chunks)]
            self.under_way = (
                self.local_step + self.late,
                [self.comm.all_reduce(part, async_op=True) for part in sent],
                sent,
            )
            if not self.late:
                self.take_in()
        super().step()

    def is_due(self) -> bool:
        if self.every:
            done = self.count if self.keeps == "count" else self.local_step + 1
            return done % self.every == 0
        agreed = torch.stack([parameter.detach().abs().sum() for parameter in self.trainable]).sum()
        self.comm.all_reduce(agreed)
        return int(agreed * 1e4) % 3 == 0

    @torch.no_grad()
    def take_in(self) -> None:
        assert self.under_way is not None
        _, handles, parts = self.under_way
        for handle in handles:
            handle.wait()
        mean = torch.cat(parts) / self.num_nodes
        if self.keeps == "velocity":
            self.velocity = mean if self.velocity is None else self.velocity.lerp(mean, 0.5)
            mean = self.velocity
        nn.utils.vector_to_parameters(mean.clone(), self.trainable)
        self.under_way = None

    def finish(self) -> None:
        if self.under_way is not None:
            self.take_in()


class Saved(Drawn):
    """Declares what it keeps."""

    state = State("velocity", "count")


class AsOption(Saved):
    """Declares its period as an option."""

    round_steps = property(lambda self: self.every or None)


def drawn(number: int) -> Drawn:
    """The strategy of a number; a third declare their period as a number in the class."""
    draw = random.Random(number)
    every = draw.choice((1, 2, 3, 4, 5, 0))
    kind = draw.choice((Drawn, Saved, AsOption))
    if draw.random() < 0.3:
        kind = type(f"Constant{kind.__name__}", (kind,), {"round_steps": every or None})
    late, keeps = draw.randrange(every) if every else 0, draw.choice(("nothing", "velocity", "count"))
    return kind(every, late, keeps, draw.randrange(1, 4), lr=0.1, optim_spec="sgd")


class Task(nn.Module):
    """A small model with its loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(self.layers(batch[0]), batch[1])


def fit(number: int, num_ranks: int, steps: int, stop_at: int | None = None, **options: Any) -> FitResult:
    """A real run of so many steps."""
    inputs = torch.randn(600, 5, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(inputs, inputs[:, :3].argmax(dim=1))
    usual: dict[str, Any] = {
        "topology": NETWORK,
        "protocol": "ideal",
        "compute": "50 ms",
        "workers": "threads",
    }
    usual |= {"batch_size": 2, "val_size": 0, "disable_logging": True, "progress": False, "num_epochs": 9}
    usual |= {"num_nodes": num_ranks, "max_steps": steps, "strategy": drawn(number)}
    return fit_until(Trainer(Task(), data), stop_at, **usual | options)


def disagreements(number: int) -> list[str]:
    """All that does not agree about the strategy of this number."""
    strategy, num_ranks = drawn(number), 2 + number % 4
    found = _plan_and_run(number, num_ranks)
    faults = find_faults(strategy, Workload.small(2, 20), ["state"])
    is_declared = strategy.keeps == "nothing" or isinstance(strategy, Saved)
    if not strategy.late:
        if faults and is_declared:
            found.append(f"check: {faults[0]}")
        if not faults and not is_declared and strategy.keeps == "velocity" and strategy.every:
            found.append("check: a velocity that is not saved is not missed")
    if not faults and not strategy.late:  # checkpoints refuse calls in flight that are not declared
        found += _resumed(number, num_ranks)
    return found


def _plan_and_run(number: int, num_ranks: int) -> list[str]:
    strategy = drawn(number)
    with torch.device("meta"):
        model = SequenceModel(Task(), 1, 0)
    where = Setting(
        model, Topology.from_mapping(NETWORK), Compute.parse("50 ms"), num_ranks, 2, protocol="ideal"
    )
    where = replace(where, tokens=float(where.tokens_a_round(NUM_STEPS)))
    try:
        made = Measured(strategy, where)
    except InputError as error:
        return [] if not strategy.every and "computes with values" in str(error) else [f"plan: {error}"]
    period, rounds = made.plan.steps_per_round, made.figures.round_seconds
    rows = {row["step"]: row for row in fit(number, num_ranks, period * len(rounds)).history}
    found = []
    for place, seconds in enumerate(rounds):
        row, sent = rows[(place + 1) * period], sum(each[place] for each in made.figures.counts["bytes_sent"])
        if abs(row["virtual_seconds"] - seconds) > 1e-9 or row["bytes_sent"] != sent:
            run = f"{row['virtual_seconds']} s and {row['bytes_sent']} bytes"
            found.append(f"plan: round {place + 1} ends at {seconds} s and {sent} bytes, in the run {run}")
    if made.plan.steady is not (strategy.round_steps is not None):
        found.append(f"plan: steady is {made.plan.steady}")
    return found


def _resumed(number: int, num_ranks: int) -> list[str]:
    whole = fit(number, num_ranks, NUM_STEPS)
    with tempfile.TemporaryDirectory() as folder:
        stopped = fit(number, num_ranks, NUM_STEPS, 8, save_dir=folder, checkpoint_interval=3)
        resumed = fit(number, num_ranks, NUM_STEPS, resume_from=stopped.checkpoint_folder)
    found = "" if resumed.resumed_step else "it is not"
    found = found or first_difference(whole, resumed)
    return [f"resumed, and check has nothing against its state: {found}"] if found else []


if __name__ == "__main__":
    soak(__doc__, "strategies", 300, disagreements)
