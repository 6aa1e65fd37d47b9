"""Compare training strategies on a simulated network, from Python.

import netgym

result = netgym.compare("examples/digits_wan.yaml")
print(result.verdict)
result.table()
result.report("page.html")

The names of `exogym_core` and `netsim` that most programs need are here too. Nothing imports torch before it is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import exogym_core  # noqa: F401 - sets what MKL reads at its first call

if TYPE_CHECKING:
    from exogym_core import (
        Communicator,
        FitResult,
        LocalTrainer,
        OptimSpec,
        Strategy,
        Trainer,
        check,
        tune,
    )
    from netgym.commands import compare, plan, run, sweep
    from netgym.results import Comparison, SweepResult, load
    from netsim import Network, Topology, collective, flows

__all__ = [
    "Communicator",
    "Comparison",
    "FitResult",
    "LocalTrainer",
    "Network",
    "OptimSpec",
    "Strategy",
    "SweepResult",
    "Topology",
    "Trainer",
    "check",
    "collective",
    "compare",
    "flows",
    "load",
    "plan",
    "run",
    "sweep",
    "tune",
]

_MODULES = {
    "netgym.commands": ("compare", "plan", "run", "sweep"),
    "netgym.results": ("Comparison", "SweepResult", "load"),
    "netsim": ("Network", "Topology", "collective", "flows"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF.get(name, "exogym_core")), name)


def __dir__() -> list[str]:
    return __all__
