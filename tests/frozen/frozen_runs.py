"""A tiny run of every shipped strategy over a small WAN: losses, bytes and virtual times, step by step.

Each runs in threads, in two processes, and stopped and resumed; the three have to give the same.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from experiments import fit_until
from frozen_networks import digest
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from exogym_core import Trainer
from exogym_core.results.fit_result import FitResult
from exogym_core.strategy import STRATEGIES, build_strategy

__all__ = ["CARRIERS", "answer", "fit", "metrics", "names", "options_of", "resumed", "tested"]

_TOPOLOGY = {
    "name": "two-regions",
    "regions": {
        "a": {"hosts": 2, "nic": "100 Mbit/s", "latency": "50 us"},
        "b": {"hosts": 2, "nic": "100 Mbit/s", "latency": "50 us"},
    },
    "wan": [{"between": ["a", "b"], "bandwidth": "2 Mbit/s", "rtt": "20 ms"}],
}
_OPTIONS: dict[str, dict[str, Any]] = {
    "ADPSGD": {"interval": 2},
    "AllReduce": {"max_norm": 0.5},
    "AsyncDiLoCo": {"H": 2},
    "AsyncSPARTA": {"p_sparta": 0.3, "interval": 3, "delay": 2},
    "CoCoDC": {"H": 4, "num_fragments": 2, "tau": 1},
    "DecoupledDiLoCo": {"H": 3, "num_fragments": 2},
    "DeMo": {"compression_topk": 3, "compression_chunk": 4},
    "EDiT": {"H": 1, "outlier_warmup": 2, "outlier_score": 0.1},
    "HALoS": {"H": 1, "K": 2},
    "OneBitAdam": {"freeze_step": 2},
    "SPARTA": {"p_sparta": 0.3, "interval": 2},
    "SPARTA+DiLoCo": {"p_sparta": 0.3, "sparta_interval": 2, "H": 3},
    "StreamingDiLoCo": {"H": 4, "num_fragments": 2, "tau": 1},
}
_EVERY_TWO = {  # H = 2
    *("DelayedDiLoCo", "DESLOC", "DiLoCo", "EagerDiLoCo", "FedAvg", "GASLoC", "HeLoCo", "LocalSGD", "MuLoCo"),
    *("NoLoCo", "QsparseLocalSGD", "SlowMo", "SNOO", "SparseLoCo"),
}
_PROTOCOLS = ("ideal", "linux-tcp")
CARRIERS = ("threads", "processes", "resumed")
_TESTED = ("AllReduce", "DiLoCo", "SPARTA", "StreamingDiLoCo", "AsyncDiLoCo", "NoLoCo")
_NUM_STEPS = 6


def names() -> list[str]:
    """Strategy, protocol, and how its ranks run."""
    return [
        f"{strategy} {protocol} {carrier}"
        for strategy in STRATEGIES
        for protocol in _PROTOCOLS
        for carrier in CARRIERS
    ]


def tested(every: Sequence[str]) -> list[str]:
    """What the test runs: few strategies, in threads, and one of them in processes and resumed."""
    chosen = [f"{strategy} {protocol} threads" for strategy in _TESTED for protocol in _PROTOCOLS]
    return [
        name for name in every if name in [*chosen, "DiLoCo linux-tcp processes", "DiLoCo linux-tcp resumed"]
    ]


def answer(name: str) -> dict[str, Any]:
    """Metrics of a run."""
    strategy, protocol, carrier = name.split()
    given = digest([_TOPOLOGY, options_of(strategy), _NUM_STEPS])
    if carrier == "threads":
        return {"given": given, **metrics(fit(strategy, protocol))}
    if carrier == "processes":
        workers = {"kind": "processes", "processes": 2}
        return {"given": given, **metrics(fit(strategy, protocol, workers=workers))}
    with tempfile.TemporaryDirectory() as folder:
        return {"given": given, **metrics(resumed(strategy, protocol, folder))}


def options_of(strategy: str) -> dict[str, Any]:
    """Options of a strategy's tiny run."""
    return {"H": 2} if strategy in _EVERY_TWO else _OPTIONS.get(strategy, {})


def resumed(strategy: str, protocol: str, folder: str, **more: Any) -> FitResult:
    """Result of a run that was stopped after step 4 and resumed from a checkpoint in `folder`."""
    stopped = fit(strategy, protocol, stop_at=4, checkpoint_interval=1, save_dir=folder, **more)
    return fit(strategy, protocol, resume_from=stopped.checkpoint_folder, **more)


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 3))

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(self.layers(batch[0]), batch[1])


def fit(strategy: str, protocol: str, stop_at: int | None = None, **more: Any) -> FitResult:
    """Result of a tiny run, stopped after a step where one is given."""
    torch.manual_seed(0)
    inputs = torch.randn(64, 6, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(inputs, (inputs.sum(dim=1) > 0).long())
    trainer = Trainer(_Model(), data, data)
    arguments: dict[str, Any] = {
        **{"num_nodes": 4, "max_steps": _NUM_STEPS, "batch_size": 4, "device": "cpu", "workers": "threads"},
        "progress": False,
        **{"val_size": 8, "val_interval": 3, "topology": _TOPOLOGY, "protocol": protocol},
        "compute": {"fixed": "3 ms", "jitter": 0.2},
    }
    strategy_of_run = build_strategy(strategy, **options_of(strategy))
    return fit_until(trainer, stop_at, strategy=strategy_of_run, **{**arguments, **more})


def metrics(result: FitResult) -> dict[str, Any]:
    """Losses, bytes and virtual times of a run."""
    assert result.complete
    history, validation = list(result.history), list(result.validation)
    return {
        "losses": [
            [row["train_loss"] for row in history],
            [row["judged_loss"] for row in validation],
            result.final_loss,
        ],
        "bytes": [[row[name] for name in ("bytes_sent", "payload_bytes", "wan_bytes")] for row in history],
        "times": [
            [row["virtual_seconds"] for row in history],
            [row["judged_virtual_seconds"] for row in validation],
            [result.virtual_seconds, result.compute_seconds, result.exposed_seconds],
        ],
        "collectives": result.collectives,
    }
