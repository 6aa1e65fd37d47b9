"""Networks in virtual time: topologies, transfers that share links, collectives as schedules of messages.

Names are loaded when they are first used, so `import netsim` costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from netsim.collectives.times.choose import parse_collectives
    from netsim.fluid.clock import Clock
    from netsim.fluid.network import Network
    from netsim.topology.topology import Topology

__all__ = ["Clock", "Network", "Topology", "parse_collectives"]

_PLACES = {
    "Clock": "netsim.fluid.clock",
    "Network": "netsim.fluid.network",
    "Topology": "netsim.topology.topology",
    "parse_collectives": "netsim.collectives.times.choose",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'netsim' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_PLACES])
