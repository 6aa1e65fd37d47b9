"""Tiny runs of every strategy on a CUDA device: the clock and the traffic of the CPU, and the same bits each time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import frozen_runs
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from exogym_core import OptimSpec, Trainer
from exogym_core.strategy import STRATEGIES, AllReduceStrategy, DiLoCoStrategy, Strategy
from netsim.errors import NetsimError

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here")


def run(strategy: str, device: str = "cuda", **more: Any) -> dict[str, Any]:
    return frozen_runs.metrics(frozen_runs.fit(strategy, "linux-tcp", device=device, **more))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_strategy_on_cuda(strategy: str, tmp_path: Path) -> None:
    expected, found = run(strategy, "cpu"), run(strategy)
    assert found["times"] == expected["times"]
    assert found["bytes"] == expected["bytes"]
    assert found["losses"][0] == pytest.approx(expected["losses"][0], rel=1e-3)
    assert run(strategy) == found
    stopped = frozen_runs.resumed(strategy, "linux-tcp", str(tmp_path), device="cuda")
    assert frozen_runs.metrics(stopped) == found
    processes = {"kind": "processes", "processes": 2}
    assert run(strategy, workers=processes) == found


@pytest.mark.parametrize("kind", ["threads", "stacked"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_cuda_graphs_change_no_result(strategy: str, kind: str) -> None:
    """Every rank computes a first pass, captures the second, compares the third, and launches three graphs."""
    graphs, single = run(strategy, workers={"kind": kind, "cuda_graphs": True}), run(strategy, workers=kind)
    if kind == "stacked":  # rounds in another way where a graph gives memory of another alignment
        assert graphs.pop("losses")[0] == pytest.approx(single.pop("losses")[0], rel=1e-5)
    assert graphs == single


class Net(nn.Module):
    """A model with all that a graph has to keep apart: dropout, buffers that change, layers of attention."""

    def __init__(self, of_values: bool = False) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 32), nn.BatchNorm1d(32), nn.Dropout(0.3))
        self.attention = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.1, batch_first=True)
        self.last = nn.Linear(32, 3)
        self.of_values, self.calls = of_values, 0

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        hidden = self.attention(self.first(batch[0])[:, None])[:, 0]
        self.calls += 1
        scale = self.calls if self.of_values else 1
        return nn.functional.cross_entropy(self.last(hidden) * scale, batch[1])


@pytest.mark.parametrize("make", [DiLoCoStrategy, AllReduceStrategy])
def test_dropout_and_buffers_in_a_graph(make: Callable[..., Strategy]) -> None:
    assert losses(Net, make) == losses(Net, make, cuda_graphs=True)


def test_a_model_that_counts_its_calls_is_refused() -> None:
    with pytest.raises(
        NetsimError, match=r"cuda_graphs is not for this model: the graph has another gradient of"
    ):
        losses(partial(Net, of_values=True), DiLoCoStrategy, cuda_graphs=True)


def test_a_model_that_waits_for_the_device_is_refused() -> None:
    class Waits(Net):
        def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
            loss = super().forward(batch)
            return loss * 2 if loss.item() > 1 else loss

    with pytest.raises(NetsimError, match=r"cuda_graphs is not for this model: a pass cannot be captured"):
        losses(Waits, DiLoCoStrategy, cuda_graphs=True)


def losses(make_model: Callable[[], nn.Module], make: Callable[..., Strategy], **workers: Any) -> list[float]:
    torch.manual_seed(0)
    inputs = torch.randn(256, 6, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(inputs, (inputs.sum(dim=1) > 0).long())
    strategy = make(OptimSpec(torch.optim.AdamW, lr=1e-2))
    options: dict[str, Any] = {
        "num_nodes": 4,
        "max_steps": 12,
        "batch_size": 8,
        "minibatch_size": 4,
        "val_size": 0,
    }
    workers = {"kind": "threads", **workers}
    fit = Trainer(make_model(), data, None).fit
    return [
        row["train_loss"]
        for row in fit(
            strategy=strategy, device="cuda", workers=workers, progress=False, **options
        ).fit_result.history
    ]
