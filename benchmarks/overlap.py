"""How much of the time workers compute, by tau and the line between them, under Streaming DiLoCo.

    python benchmarks/overlap.py --out docs/overlap.png

Two datacentres, 100 ms a step, a model of four layers of a megabyte each, a fragment a layer, H = 40. A fragment that
takes longer than tau steps to be averaged makes workers wait for the rest; with tau = 0 they wait for all of it.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import TensorDataset

from exogym_core import Trainer
from exogym_core.strategy import StreamingDiLoCoStrategy

H, STEP_SECONDS, WIDTH, LAYERS = 40, 0.1, 512, 4
TAUS = (0, 1, 2, 3, 5, 8)
MEGABITS = (10, 30, 100, 300, 1000)


class Model(torch.nn.Module):
    """Four layers of a megabyte."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def forward(self, batch: Any) -> torch.Tensor:
        """A loss; which one does not matter."""
        hidden = batch[0]
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return (hidden**2).mean()


def utilisation(tau: int, megabits: float, steps: int) -> float:
    """Share of the virtual time in which workers computed."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(4, WIDTH), torch.zeros(4))
    topology = {
        "hosts": ["west", "east"],
        "links": [{"between": ["west", "east"], "bandwidth": f"{megabits} Mbit/s", "latency": "20 ms"}],
    }
    strategy = StreamingDiLoCoStrategy("sgd", lr=0.01, H=H, num_fragments=LAYERS, tau=tau)
    result = (
        Trainer(Model(), data)
        .fit(
            strategy=strategy,
            num_nodes=2,
            max_steps=steps,
            num_epochs=steps,
            batch_size=2,
            topology=topology,
            compute=f"{STEP_SECONDS} s",
            workers="threads",
            device="cpu",
        )
        .fit_result
    )
    assert result.compute_utilisation is not None
    return float(result.compute_utilisation)


def plot(rows: dict[int, list[float]], path: Path) -> None:
    """A line a bandwidth."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4))
    for megabits, values in rows.items():
        axes.plot(TAUS, [100 * value for value in values], marker="o", label=f"{megabits} Mbit/s")
    axes.set_xlabel("tau, steps")
    axes.set_ylabel("compute utilisation, %")
    axes.set_ylim(0, 102)
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Measure, print a table, draw."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--out", type=Path, help="a PNG file")
    given = parser.parse_args()
    rows = {megabits: [utilisation(tau, megabits, given.steps) for tau in TAUS] for megabits in MEGABITS}
    print("| line | " + " | ".join(f"tau {tau}" for tau in TAUS) + " |")
    print("|---" * (len(TAUS) + 1) + "|")
    for megabits, values in rows.items():
        print(f"| {megabits} Mbit/s | " + " | ".join(f"{100 * value:.1f} %" for value in values) + " |")
    if given.out is not None:
        plot(rows, given.out)


if __name__ == "__main__":
    main()
