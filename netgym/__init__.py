"""Compare training strategies on a simulated network, from Python.

import netgym

result = netgym.compare("examples/digits_wan.yaml")
print(result.verdict)
result.table()
result.report("page.html")

The names of `exogym_core` and `netsim` that most programs need are here too, strategies in `netgym.strategy`.
Nothing imports torch before it is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from exogym_core.meeting_place import register_sites

if TYPE_CHECKING:
    from exogym_core import (
        Communicator,
        DiLoCoOptimizer,
        FitResult,
        LocalTrainer,
        OptimSpec,
        Strategy,
        Trainer,
        load_runs,
    )
    from exogym_core.communicator import run_ranks
    from netgym.commands import compare, plan, retime, run, sweep
    from netgym.launch.session import advance, now
    from netgym.results import Comparison, SweepResult, load
    from netgym.strategy_check import check
    from netgym.studies.tuning import tune
    from netsim import Network, Topology, collective, flows

__all__ = [
    "Communicator",
    "Comparison",
    "DiLoCoOptimizer",
    "FitResult",
    "LocalTrainer",
    "Network",
    "OptimSpec",
    "Strategy",
    "SweepResult",
    "Topology",
    "Trainer",
    "advance",
    "check",
    "collective",
    "compare",
    "flows",
    "load",
    "load_runs",
    "now",
    "plan",
    "retime",
    "run",
    "run_ranks",
    "sweep",
    "tune",
]

_MODULES = {
    "exogym_core.communicator": ("run_ranks",),
    "netgym.launch.session": ("advance", "now"),
    "netgym.strategy_check": ("check",),
    "netgym.studies.tuning": ("tune",),
    "netgym.commands": ("compare", "plan", "retime", "run", "sweep"),
    "netgym.results": ("Comparison", "SweepResult", "load"),
    "netsim": ("Network", "Topology", "collective", "flows"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

register_sites("netgym.sites.elastic_runs:fit_elastic")


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF.get(name, "exogym_core")), name)


def __dir__() -> list[str]:
    return __all__
