"""Networks in virtual time: topologies, transfers that share links, collectives as schedules of messages.

    import netsim

    netsim.collective("wan-4-regions", "all_reduce", num_bytes="25 MB").seconds
    netsim.flows("lan", [(0.0, "host0", "host1", 1_000_000)]).finish_seconds

What is not in `__all__` is private. Names are loaded when they are first used: `import netsim` costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from netsim.collectives.choice import parse_collectives
    from netsim.face.calls import CollectiveTimes, FlowTimes, collective, flows
    from netsim.files.errors import (
        DeadlockError,
        InputError,
        MismatchError,
        NetsimError,
        RankError,
        UnknownNameError,
        unknown_name,
    )
    from netsim.network.clock import Clock
    from netsim.network.network import Network
    from netsim.topology.protocol import Protocol
    from netsim.topology.topology import Topology, shipped_topologies
    from netsim.topology.windows import WindowLimit

_PLACES = {
    "Clock": "network.clock",
    "CollectiveTimes": "face.calls",
    "DeadlockError": "files.errors",
    "FlowTimes": "face.calls",
    "InputError": "files.errors",
    "MismatchError": "files.errors",
    "NetsimError": "files.errors",
    "Network": "network.network",
    "Protocol": "topology.protocol",
    "RankError": "files.errors",
    "Topology": "topology.topology",
    "UnknownNameError": "files.errors",
    "WindowLimit": "topology.windows",
    "collective": "face.calls",
    "flows": "face.calls",
    "parse_collectives": "collectives.choice",
    "shipped_topologies": "topology.topology",
    "unknown_name": "files.errors",
}

__all__ = [
    "Clock",
    "CollectiveTimes",
    "DeadlockError",
    "FlowTimes",
    "InputError",
    "MismatchError",
    "NetsimError",
    "Network",
    "Protocol",
    "RankError",
    "Topology",
    "UnknownNameError",
    "WindowLimit",
    "collective",
    "flows",
    "parse_collectives",
    "shipped_topologies",
    "unknown_name",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'netsim' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"netsim.{_PLACES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*(name for name in globals() if name.startswith("__")), *__all__})
