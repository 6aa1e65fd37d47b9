"""Useful work under failures, by mean time between failures or by cluster size, of strategies that wait and do not.

    python benchmarks/goodput.py --mtbf 60 150 300 600 1200 --seeds 3 --out docs/goodput.png
    python benchmarks/goodput.py --mtbf 300 --sizes 2 4 8 16

Workers crash at random (exponential times between failures, drawn by seed) and come back; goodput is the
computing that was not lost to a crash, as a share of all workers' virtual seconds. Elastic strategies continue without
absent workers, Async DiLoCo never waits, NoLoCo waits for the partner of a round, the others for all. Of elastic ones
the share of steps that are in the model is printed too (`counted`): a worker that was left out of a round has computed
in vain.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean
from typing import Any

import harness
import torch
from torch.utils.data import TensorDataset

from exogym_core.strategy import (
    AllReduceStrategy,
    AsyncDiLoCoStrategy,
    DiLoCoStrategy,
    NoLoCoStrategy,
    Strategy,
    StreamingDiLoCoStrategy,
)

H, STEP_SECONDS = 10, 1.0


class Model(torch.nn.Module):
    """As small as can be: time is virtual."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))

    def forward(self, batch: Any) -> torch.Tensor:
        """The mean loss of a batch."""
        return torch.nn.functional.cross_entropy(self.layers(batch[0]), batch[1])


def topology(num_workers: int) -> dict[str, Any]:
    """Homes behind 1 Gbit/s lines."""
    hosts = [f"h{index}" for index in range(num_workers)]
    links = [{"between": [host, "internet"], "bandwidth": "1 Gbit/s", "latency": "20 ms"} for host in hosts]
    return {"hosts": hosts, "routers": ["internet"], "links": links}


def strategies() -> dict[str, Strategy]:
    """One of each kind; rounds have equal length."""
    waits: dict[str, Any] = {"averaging_timeout": 5.0, "timeout_waiting_for_peers": 5.0}
    return {
        "AllReduce": AllReduceStrategy(lr=1e-2),
        "elastic AllReduce": AllReduceStrategy(lr=1e-2, **waits),
        "DiLoCo": DiLoCoStrategy(H=H, lr=1e-2),
        "elastic DiLoCo": DiLoCoStrategy(H=H, lr=1e-2, **waits),
        "Streaming DiLoCo": StreamingDiLoCoStrategy(H=H, num_fragments=2, lr=1e-2),
        "NoLoCo": NoLoCoStrategy(H=H, lr=1e-2),
        "Async DiLoCo": AsyncDiLoCoStrategy(H=H, lr=1e-2),
    }


def goodput(
    strategy: Strategy, num_workers: int, mtbf: float, repair: float, until: float, seed: int
) -> tuple[float, float]:
    """Share of all workers' time that went into computing, and into steps in the model (where that is known)."""
    torch.manual_seed(0)
    inputs = torch.randn(64, 4)
    data = TensorDataset(inputs, (inputs.sum(dim=1) > 0).long())
    failures = {"mtbf": mtbf, "repair": repair}
    steps, network = int(2 * until / STEP_SECONDS), topology(num_workers)
    options: dict[str, Any] = {"until": until, "failures": failures, "compute": STEP_SECONDS, "seed": seed}
    result = harness.fitted(
        Model(), data, strategy, num_workers, steps, batch_size=1, topology=network, **options
    )
    whole = num_workers * until
    steps_a_round = strategy.round_steps or 1
    counted = sum(len(ranks) for ranks in result.averaged_ranks.values()) * steps_a_round * STEP_SECONDS
    return sum(min(seconds, until) for seconds in result.compute_seconds) / whole, counted / whole


def main() -> None:
    """Measure, print, draw."""
    parser = harness.parser(__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[8], help="numbers of workers")
    parser.add_argument(
        "--mtbf", type=float, nargs="+", default=[300.0], help="s between a worker's failures"
    )
    parser.add_argument("--repair", type=float, default=30.0, help="seconds until it is back")
    parser.add_argument("--until", type=float, default=600.0, help="virtual seconds of a run")
    parser.add_argument("--seeds", type=int, default=1, help="runs of which the mean is taken")
    parser.add_argument("--only", nargs="+", choices=list(strategies()), default=list(strategies()))
    parser.add_argument("--out", type=Path, help="a picture")
    given = parser.parse_args()
    points = [(size, mtbf) for size in given.sizes for mtbf in given.mtbf]
    places = given.mtbf if len(given.mtbf) > 1 else given.sizes
    table: dict[str, list[float]] = {}
    for name in given.only:
        figures = [
            [
                goodput(strategies()[name], size, mtbf, given.repair, given.until, seed)
                for seed in range(given.seeds)
            ]
            for size, mtbf in points
        ]
        table[name], counted = (
            [round(mean(each[index] for each in of), 4) for of in figures] for index in (0, 1)
        )
        print(json.dumps({name: dict(zip(map(str, points), table[name], strict=True))}), flush=True)
        if name.startswith("elastic"):
            print(json.dumps({f"{name}, counted": counted}), flush=True)
    if given.out is not None:
        ticks = {"xscale": "log", "xticks": places, "xticklabels": [f"{place:g}" for place in places]}
        of_workers = "mean time between a worker's failures (s)" if places is given.mtbf else "workers"
        labels = {"xlabel": of_workers, "ylabel": "goodput", "ylim": (0, 1)}
        harness.draw_lines(given.out, places, table, **labels, **ticks)


if __name__ == "__main__":
    main()
