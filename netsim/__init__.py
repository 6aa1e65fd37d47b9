"""Networks in virtual time: topologies, transfers that share links, collectives as schedules of messages.

    import netsim

    netsim.collective("wan-4-regions", "all_reduce", num_bytes="25 MB").seconds
    netsim.flows("lan", [(0.0, "host0", "host1", 1_000_000)]).finish_seconds

Names outside `__all__` are private. Names are loaded when they are first used: `import netsim` costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from netsim.cli.signals import Stoppable as Stoppable
    from netsim.cli.signals import interrupt as interrupt
    from netsim.cli.signals import raise_lost_interrupt as raise_lost_interrupt
    from netsim.cli.terminal import CommandGroup as CommandGroup
    from netsim.cli.terminal import DelayedProgress as DelayedProgress
    from netsim.cli.terminal import given as given
    from netsim.cli.terminal import takes as takes
    from netsim.cli.terminal import usage_message as usage_message
    from netsim.collectives.choice import Choices as Choices
    from netsim.collectives.choice import parse_collectives as parse_collectives
    from netsim.collectives.choice import schedule as schedule
    from netsim.collectives.collective import CollectiveTimes as CollectiveTimes
    from netsim.collectives.collective import collective as collective
    from netsim.collectives.estimate import Estimator as Estimator
    from netsim.collectives.operations import OPERATIONS as OPERATIONS
    from netsim.collectives.schedules.algorithms import ALGORITHMS as ALGORITHMS
    from netsim.collectives.schedules.algorithms import algorithm_names as algorithm_names
    from netsim.collectives.schedules.algorithms import default_algorithm as default_algorithm
    from netsim.collectives.schedules.schedule import Schedule as Schedule
    from netsim.collectives.start import Collective as Collective
    from netsim.collectives.start import start_all_to_all as start_all_to_all
    from netsim.collectives.start import start_collective as start_collective
    from netsim.collectives.start import time_collective as time_collective
    from netsim.docstrings import documented_lines as documented_lines
    from netsim.docstrings import section_of as section_of
    from netsim.errors import DeadlockError as DeadlockError
    from netsim.errors import InputError as InputError
    from netsim.errors import MismatchError as MismatchError
    from netsim.errors import NetsimError as NetsimError
    from netsim.errors import RankError as RankError
    from netsim.errors import UnknownNameError as UnknownNameError
    from netsim.errors import unknown_name as unknown_name
    from netsim.files.documents import ConfigError as ConfigError
    from netsim.files.documents import Document as Document
    from netsim.files.documents import KeyPath as KeyPath
    from netsim.files.documents import load_document as load_document
    from netsim.files.documents import parse_document as parse_document
    from netsim.files.plain_files import check_output as check_output
    from netsim.files.plain_files import input_file as input_file
    from netsim.files.plain_files import is_written_in_place as is_written_in_place
    from netsim.files.plain_files import output_file as output_file
    from netsim.files.plain_files import read_bytes as read_bytes
    from netsim.files.schemas import Schema as Schema
    from netsim.files.schemas import validate_document as validate_document
    from netsim.files.signed import PeerAddress as PeerAddress
    from netsim.files.signed import PeerError as PeerError
    from netsim.files.signed import SignedChannel as SignedChannel
    from netsim.files.signed import StrangerError as StrangerError
    from netsim.files.signed import answer_peer as answer_peer
    from netsim.files.signed import connect_peer as connect_peer
    from netsim.files.signed import shared_secret as shared_secret
    from netsim.files.signed import user_secret as user_secret
    from netsim.network.build import engine_state as engine_state
    from netsim.network.clock import Clock as Clock
    from netsim.network.clock import rare_collections as rare_collections
    from netsim.network.network import Network as Network
    from netsim.network.network import Waiting as Waiting
    from netsim.network.trace import Recorder as Recorder
    from netsim.network.trace import Span as Span
    from netsim.network.trace import tracing as tracing
    from netsim.network.trace import write_trace as write_trace
    from netsim.topology import shipped_topologies as shipped_topologies
    from netsim.topology.devices import device_name as device_name
    from netsim.topology.devices import device_problems as device_problems
    from netsim.topology.devices import device_table as device_table
    from netsim.topology.file import TopologyFile as TopologyFile
    from netsim.topology.graph import Link as Link
    from netsim.topology.protocol import PRESETS as PRESETS
    from netsim.topology.protocol import Protocol as Protocol
    from netsim.topology.protocol import WindowLimit as WindowLimit
    from netsim.topology.protocol import window_limit as window_limit
    from netsim.topology.sketch import Sketch as Sketch
    from netsim.topology.topology import Topology as Topology
    from netsim.topology.weather import Background as Background
    from netsim.topology.weather import Drift as Drift
    from netsim.topology.weather import HostEvent as HostEvent
    from netsim.topology.weather import LinkEvent as LinkEvent
    from netsim.topology.weather import Trace as Trace
    from netsim.topology.weather import Weather as Weather
    from netsim.topology.weather import random_crashes as random_crashes
    from netsim.transfers import Flow as Flow
    from netsim.transfers import FlowTimes as FlowTimes
    from netsim.transfers import flows as flows
    from netsim.transfers import read_flows as read_flows
    from netsim.transfers import time_flows as time_flows
    from netsim.weather.faults import Faults as Faults
    from netsim.weather.faults import WeatherHistory as WeatherHistory
    from netsim.weather.faults import simulate_weather as simulate_weather

_NAMES = {  # by module
    "cli.signals": "Stoppable interrupt raise_lost_interrupt",
    "cli.terminal": "CommandGroup DelayedProgress given takes usage_message",
    "collectives.choice": "Choices parse_collectives schedule",
    "collectives.collective": "CollectiveTimes collective",
    "collectives.estimate": "Estimator",
    "collectives.operations": "OPERATIONS",
    "collectives.schedules.algorithms": "ALGORITHMS algorithm_names default_algorithm",
    "collectives.schedules.schedule": "Schedule",
    "collectives.start": "Collective start_all_to_all start_collective time_collective",
    "docstrings": "documented_lines section_of",
    "errors": "DeadlockError InputError MismatchError NetsimError RankError UnknownNameError unknown_name",
    "files.documents": "ConfigError Document KeyPath load_document parse_document",
    "files.plain_files": "check_output input_file is_written_in_place output_file read_bytes",
    "files.schemas": "Schema validate_document",
    "files.signed": (
        "PeerAddress PeerError SignedChannel StrangerError answer_peer connect_peer shared_secret user_secret"
    ),
    "network.build": "engine_state",
    "network.clock": "Clock rare_collections",
    "network.network": "Network Waiting",
    "network.trace": "Recorder Span tracing write_trace",
    "topology": "shipped_topologies",
    "topology.devices": "device_name device_problems device_table",
    "topology.file": "TopologyFile",
    "topology.graph": "Link",
    "topology.protocol": "PRESETS Protocol WindowLimit window_limit",
    "topology.sketch": "Sketch",
    "topology.topology": "Topology",
    "topology.weather": "Background Drift HostEvent LinkEvent Trace Weather random_crashes",
    "transfers": "Flow FlowTimes flows read_flows time_flows",
    "weather.faults": "Faults WeatherHistory simulate_weather",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_MODULES)

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            raise AttributeError(
                f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}"
            )
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*(name for name in globals() if name.startswith("__")), *__all__})
