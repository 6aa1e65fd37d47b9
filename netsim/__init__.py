"""Networks in virtual time: topologies, transfers that share links, collectives as schedules of messages.

    import netsim

    netsim.collective("wan-4-regions", "all_reduce", num_bytes="25 MB").seconds
    netsim.flows("lan", [(0.0, "host0", "host1", 1_000_000)]).finish_seconds

Names are loaded when they are first used: `import netsim` costs next to nothing.
Rooms have more: `netsim.topology`, `netsim.network`, `netsim.collectives`, `netsim.ranks`, `netsim.errors`.
"""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from netsim.collectives.choice import schedule as schedule
    from netsim.collectives.collective import collective as collective
    from netsim.collectives.start import start_collective as start_collective
    from netsim.errors import DeadlockError as DeadlockError
    from netsim.errors import InputError as InputError
    from netsim.errors import NetsimError as NetsimError
    from netsim.network.clock import Clock as Clock
    from netsim.network.network import Network as Network
    from netsim.network.trace import Recorder as Recorder
    from netsim.topology import shipped_topologies as shipped_topologies
    from netsim.topology.protocol import Protocol as Protocol
    from netsim.topology.topology import Topology as Topology
    from netsim.topology.weather import Background as Background
    from netsim.topology.weather import Drift as Drift
    from netsim.topology.weather import HostEvent as HostEvent
    from netsim.topology.weather import LinkEvent as LinkEvent
    from netsim.topology.weather import Trace as Trace
    from netsim.topology.weather import Weather as Weather
    from netsim.transfers import flows as flows
    from netsim.weather.faults import Faults as Faults

_NAMES = {  # by module
    "collectives.choice": "schedule",
    "collectives.collective": "collective",
    "collectives.start": "start_collective",
    "errors": "DeadlockError InputError NetsimError",
    "network.clock": "Clock",
    "network.network": "Network",
    "network.trace": "Recorder",
    "topology": "shipped_topologies",
    "topology.protocol": "Protocol",
    "topology.topology": "Topology",
    "topology.weather": "Background Drift HostEvent LinkEvent Trace Weather",
    "transfers": "flows",
    "weather.faults": "Faults",
}
_FORMER = {  # names of this package until release 0.3: each works, with a line of warning
    "cli.signals": "Stoppable interrupt raise_lost_interrupt",
    "cli.terminal": "CommandGroup DelayedProgress given takes usage_message",
    "collectives.choice": "Choices parse_collectives",
    "collectives.collective": "CollectiveTimes",
    "collectives.estimate": "Estimator",
    "collectives.operations": "OPERATIONS",
    "collectives.schedules.algorithms": "ALGORITHMS algorithm_names default_algorithm",
    "collectives.schedules.schedule": "Schedule",
    "collectives.start": "Collective start_all_to_all time_collective",
    "docstrings": "documented_lines section_of",
    "errors": "MismatchError RankError UnknownNameError unknown_name",
    "files.documents": "ConfigError Document KeyPath load_document parse_document",
    "files.plain_files": "check_output input_file is_written_in_place output_file read_bytes",
    "files.schemas": "Schema validate_document",
    "files.signed": (
        "PeerAddress PeerError SignedChannel StrangerError answer_peer connect_peer shared_secret user_secret"
    ),
    "network.build": "engine_state",
    "network.clock": "raised_gc_threshold",
    "network.network": "Waiting",
    "network.trace": "Span tracing write_trace",
    "topology.devices": "device_name device_problems device_table",
    "topology.file": "TopologyFile",
    "topology.graph": "Link",
    "topology.protocol": "PRESETS WindowLimit window_limit",
    "topology.sketch": "Sketch",
    "topology.weather": "random_crashes",
    "transfers": "Flow FlowTimes read_flows time_flows",
    "weather.faults": "WeatherHistory simulate_weather",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}
_FORMER_MODULES = {name: module for module, names in _FORMER.items() for name in names.split()}

__all__ = sorted(_MODULES)

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        module = _MODULES.get(name) or _FORMER_MODULES.get(name)
        if module is None:
            line = f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}"
            raise AttributeError(line)
        found = getattr(import_module(f"{__name__}.{module}"), name)
        if name in _FORMER_MODULES:
            line = f"netsim.{name} has moved: write netsim.{module}.{name}"
            warnings.warn(line, FutureWarning, stacklevel=2)
        return found


def __dir__() -> list[str]:
    return sorted({*(name for name in globals() if name.startswith("__")), *__all__})
