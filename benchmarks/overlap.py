"""Compute utilisation under Streaming DiLoCo, by tau and the line between workers.

    python benchmarks/overlap.py --out docs/overlap.png

Two datacentres, 100 ms a step, a model of four layers of a megabyte each, a fragment a layer, H = 40. A fragment that
takes longer than tau steps to be averaged makes workers wait for the rest; with tau = 0 they wait for all of it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import harness
import torch
from torch.utils.data import TensorDataset

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
        """Mean square of the last layer, as good a loss as any."""
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
    options: dict[str, Any] = {"topology": topology, "compute": f"{STEP_SECONDS} s"}
    result = harness.fitted(Model(), data, strategy, 2, steps, batch_size=2, **options)
    assert result.compute_utilisation is not None
    return float(result.compute_utilisation)


def main() -> None:
    """Measure, print a table, draw."""
    parser = harness.parser(__doc__)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--out", type=Path, help="a PNG file")
    given = parser.parse_args()
    rows = {
        f"{megabits} Mbit/s": [100 * utilisation(tau, megabits, given.steps) for tau in TAUS]
        for megabits in MEGABITS
    }
    harness.heading("line", *(f"tau {tau}" for tau in TAUS))
    for line, values in rows.items():
        harness.row(line, *(f"{value:.1f} %" for value in values))
    if given.out is not None:
        labels = {"xlabel": "tau, steps", "ylabel": "compute utilisation, %", "ylim": (0, 102)}
        harness.draw_lines(given.out, TAUS, rows, **labels)


if __name__ == "__main__":
    main()
