"""Train over real or simulated networks, and measure loss and virtual time together.

from exogym_core import LocalTrainer
from exogym_core.strategy import DiLoCoStrategy

model = LocalTrainer(model, train_dataset, val_dataset).fit(strategy=DiLoCoStrategy(H=100), num_nodes=4)
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from exogym_core.moved import NAMES, install, moved

if TYPE_CHECKING:
    from exogym_core.communicator import Communicator
    from exogym_core.results.fit_result import FitResult
    from exogym_core.results.reading import load_runs
    from exogym_core.run.optimizer import DiLoCoOptimizer
    from exogym_core.run.trainer import LocalTrainer, Trainer
    from exogym_core.strategy import OptimSpec, Strategy

__all__ = [
    "Communicator",
    "DiLoCoOptimizer",
    "FitResult",
    "LocalTrainer",
    "OptimSpec",
    "Strategy",
    "Trainer",
    "load_runs",
]

_HOMES = {
    "Communicator": "communicator",
    "DiLoCoOptimizer": "run.optimizer",
    "FitResult": "results.fit_result",
    "LocalTrainer": "run.trainer",
    "OptimSpec": "strategy",
    "Strategy": "strategy",
    "Trainer": "run.trainer",
    "load_runs": "results.reading",
}


# MKL's results depend on where in memory matrices happen to lie, unless this is set before its first call. Processes
# that are started from here, and those that import this (Ray's and torchrun's), have it too.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

# To look for CUDA by its runtime would start it, after which no forked process could use it.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

install()


def __getattr__(name: str) -> Any:
    # Imported when asked for, so that `netgym --version` does not wait for torch.
    if name in _HOMES:
        return getattr(importlib.import_module(f"exogym_core.{_HOMES[name]}"), name)
    if name in NAMES:
        return moved(f"{__name__}.{name}", NAMES[name])
    if name == "TrainNode":
        raise AttributeError(f"{__name__}.TrainNode does not exist: its loop is exogym_core.run.loop:Loop")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
