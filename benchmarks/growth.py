"""Time and memory of whole runs over ranks, parameters and steps.

    python benchmarks/growth.py [--most SECONDS]    a table, and docs/growth.svg

A `fit` of a linear model with DiLoCo over `wan-4-regions`, ranks in threads; one of ranks (8), parameters (10,000) and
steps (100) grows at a time. Each run has a process of its own. A curve ends where its next run would take longer than
SECONDS of processor time [120], by the growth so far, and the table names the runs left out.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import harness

CURVES = {
    "ranks": [2, 8, 32, 128, 512, 1024],
    "parameters": [10_000, 100_000, 1_000_000, 10_000_000, 100_000_000],
    "steps": [100, 1_000, 10_000, 100_000],
}
USUAL = {"ranks": 8, "parameters": 10_000, "steps": 100}
PICTURE = Path(__file__).parents[1] / "docs" / "growth.svg"


def run(ranks: int, parameters: int, steps: int) -> None:
    """Train, and print what it took, imports left out."""
    import torch
    from torch.utils.data import TensorDataset

    from exogym_core import LocalTrainer, OptimSpec
    from exogym_core.strategy import DiLoCoStrategy

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(100, parameters // 100)

        def forward(self, batch: list[torch.Tensor]) -> torch.Tensor:
            mean: torch.Tensor = self.layer(batch[0]).square().mean()
            return mean

    def fit(num_steps: int) -> None:
        strategy = DiLoCoStrategy(OptimSpec(torch.optim.SGD, lr=0.01), H=10)
        trainer = LocalTrainer(Model(), data, None)
        trainer.fit(strategy=strategy, num_nodes=ranks, max_steps=num_steps, device="cpu", **options)

    data = TensorDataset(torch.randn(4096, 100))
    options: dict[str, Any] = {
        "topology": "wan-4-regions",
        "compute": "50 ms",
        "workers": "threads",
        "batch_size": 1,
        "val_size": 0,
    }
    if parameters == USUAL["parameters"]:
        fit(1)  # what the first one imports
    before = harness.cpu_seconds()
    fit(steps)
    print(json.dumps({"cpu": harness.cpu_seconds() - before, "peak_mb": harness.peak_mb()}))


def curve(name: str, most: float) -> dict[int, dict[str, float]]:
    """Runs over one size."""
    found: dict[int, dict[str, float]] = {}
    for size in CURVES[name]:
        if found:
            last = next(reversed(found))
            seconds = found[last]["cpu"] * (size / last) ** (2 if name == "ranks" else 1)
            if seconds > most:
                harness.row(name, f"{size:,}", "left out", "")
                continue
        found[size] = harness.in_process(__file__, "--run", json.dumps({**USUAL, name: size}))
        harness.row(name, f"{size:,}", f"{found[size]['cpu']:.2f}", f"{found[size]['peak_mb']:.0f}")
    return found


def draw(curves: dict[str, dict[int, dict[str, float]]]) -> None:
    """Seconds above, memory below, a column a size."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 3, figsize=(9, 5), sharex="col", constrained_layout=True)
    for column, (name, found) in enumerate(curves.items()):
        for row, (key, label) in enumerate([("cpu", "processor seconds"), ("peak_mb", "peak memory, MB")]):
            axis = axes[row][column]
            axis.loglog(list(found), [each[key] for each in found.values()], "o-")
            axis.set_ylabel(label if column == 0 else "")
            axis.grid(alpha=0.3)
        axes[1][column].set_xlabel(name)
    figure.savefig(PICTURE)


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--most", type=float, default=120.0, metavar="SECONDS")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.run:
        run(**json.loads(given.run))
        return
    harness.heading("size", "", "processor s", "peak MB")
    draw({name: curve(name, given.most) for name in CURVES})


if __name__ == "__main__":
    main()
