"""Checkpoints of rounds under way: a run that is stopped between begin and apply goes on to the same bits."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import TensorDataset

from exogym_core import Trainer
from exogym_core.strategy import (
    Chain,
    DelayedDiLoCoCommunicator,
    DelayedDiLoCoStrategy,
    EagerDiLoCoStrategy,
    Sites,
    Strategy,
    StreamingDiLoCoStrategy,
)
from exogym_core.tasks import MLP

if TYPE_CHECKING:
    from pathlib import Path

SGD = functools.partial(torch.optim.SGD, lr=0.1)
STREAMING = {"H": 6, "num_fragments": 2, "tau": 4}


def fit(strategy: Strategy, **options: Any) -> Any:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(256, 64, generator=generator)
    data = TensorDataset(inputs, inputs[:, :10].argmax(dim=1))
    torch.manual_seed(0)
    arguments: dict[str, Any] = {
        "num_nodes": 4,
        "max_steps": 10,
        "batch_size": 4,
        "topology": "wan-4-regions",
        "compute": "50 ms",
        "val_size": 0,
        "workers": "threads",
    }
    return (
        Trainer(MLP(inputs=64, hidden=(16, 12, 16)), data)
        .fit(strategy=strategy, **(arguments | options))
        .fit_result
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda: StreamingDiLoCoStrategy(SGD, **STREAMING),
        lambda: StreamingDiLoCoStrategy(SGD, **STREAMING, codec="int8", error_feedback=True),
        lambda: DelayedDiLoCoStrategy(SGD, H=3, codec="e3m0"),
        lambda: EagerDiLoCoStrategy(SGD, H=3),
        lambda: Chain([Sites(2), DelayedDiLoCoCommunicator(H=3)], SGD),
    ],
    ids=["streaming", "streaming int8", "delayed", "eager", "sites"],
)
@pytest.mark.parametrize("workers", ["threads", {"kind": "processes", "processes": 2}])
def test_a_stop_while_rounds_are_in_flight_changes_no_bit(make: Any, workers: Any, tmp_path: Path) -> None:
    whole = fit(make(), workers=workers)
    for stop in (4, 7):
        folder = tmp_path / str(stop)
        stopped = fit(make(), workers=workers, max_steps=stop, checkpoint_interval=stop, save_dir=folder)
        resumed = fit(make(), workers=workers, resume_from=stopped.checkpoint_folder)
        assert resumed.resumed_step == stop
        assert resumed.history == whole.history
        for one, other in zip(resumed.rank_states, whole.rank_states, strict=True):
            assert all(torch.equal(one[name], other[name]) for name in one)
        assert (resumed.virtual_seconds, resumed.bytes_sent) == (whole.virtual_seconds, whole.bytes_sent)
