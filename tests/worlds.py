"""Small networks in the form of their files, a kernel without ranks, and the engine from its sources."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from exogym_core.communicator.simulated.simulation import MeetingKernel
from netsim import Topology
from netsim.collectives import start
from netsim.network import network
from netsim.network.build import MODULES, load_sources
from netsim.ranks import Answer, Exit, RankSink, RankSource, Request, StampedRow

Form = dict[str, Any]


def star_form(
    hosts: int | Iterable[str] = "abc",
    bandwidth: str | Mapping[str, str] = "8 Mbit/s",
    latency: str | Mapping[str, str] = "10 ms",
    **more: Any,
) -> Form:
    """Hosts around one switch; in the default one 1 MB takes 1.02 s alone. `more` are further keys of the file."""
    names = [f"h{index}" for index in range(hosts)] if isinstance(hosts, int) else list(hosts)
    rates = dict.fromkeys(names, bandwidth) if isinstance(bandwidth, str) else bandwidth
    waits = dict.fromkeys(names, latency) if isinstance(latency, str) else latency
    links = [
        {"between": [name, "switch"], "bandwidth": rates[name], "latency": waits[name]} for name in names
    ]
    return {
        "name": "star",
        "hosts": names,
        "routers": ["switch"],
        "links": links,
        "protocol": "ideal",
        **more,
    }


def star(*arguments: Any, **more: Any) -> Topology:
    """The topology of `star_form`."""
    return Topology.from_mapping(star_form(*arguments, **more))


def chain_form(
    hosts: Iterable[str] = "ab",
    bandwidth: str = "8 Mbit/s",
    latency: str = "10 ms",
    loss: str = "0 %",
    **more: Any,
) -> Form:
    """Hosts in a row, each linked to the next: two by default; a mapping says what each is."""
    links = [
        {"between": list(ends), "bandwidth": bandwidth, "latency": latency, "loss": loss}
        for ends in itertools.pairwise(list(hosts))
    ]
    return {
        "name": "chain",
        "hosts": hosts if isinstance(hosts, dict) else list(hosts),
        "links": links,
        "protocol": "ideal",
        **more,
    }


def chain(*arguments: Any, **more: Any) -> Topology:
    """The topology of `chain_form`."""
    return Topology.from_mapping(chain_form(*arguments, **more))


def regions_form(
    sizes: Mapping[str, int],
    nic: str = "1 Gbit/s",
    latency: str = "50 us",
    wan: str = "100 Mbit/s",
    rtt: str = "40 ms",
    **more: Any,
) -> Form:
    """Regions of so many hosts, each pair of which has a line; without a `protocol`, as files have."""
    names = list(sizes)
    lines = [
        {"between": [one, other], "bandwidth": wan, "rtt": rtt}
        for place, one in enumerate(names)
        for other in names[place + 1 :]
    ]
    regions = {name: {"hosts": size, "nic": nic, "latency": latency} for name, size in sizes.items()}
    return {"name": "regions", "regions": regions, **({"wan": lines} if lines else {}), **more}


# --- a kernel without ranks ---------------------------------------------------------------------------------


class Ports(RankSource, RankSink):
    """Ranks that have requested everything already; what the kernel reports is kept."""

    def __init__(self, num_ranks: int) -> None:
        self.answers: list[tuple[int, Answer]] = []
        self.rows: list[StampedRow] = []
        self.log: list[list[Request]] = [[] for _ in range(num_ranks)]

    def refill(self, rank: int) -> None:
        raise AssertionError(f"the stream of rank {rank} has no Exit")

    def answer(self, rank: int, value: Answer) -> None:
        self.answers.append((rank, value))

    def row(self, row: StampedRow) -> None:
        self.rows.append(row)

    def served(self, rank: int, request: Request) -> None:
        self.log[rank].append(request)


def finished(streams: Sequence[Sequence[Request]], **options: Any) -> tuple[MeetingKernel, Ports]:
    """A kernel that has run these streams to their end; `options` are its own."""
    ports = Ports(len(streams))
    kernel = MeetingKernel(len(streams), ports, ports, **options)
    for stream, requests in zip(kernel.streams, streams, strict=True):
        stream.extend([*requests, Exit()])
    kernel.run()
    return kernel, ports


# --- the engine loaded again from its sources ---------------------------------------------------------------

NAMES = [f"netsim.network.{name}" for name in MODULES]


def use_sources(patch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Have networks and collectives that are made from now on run interpreted; returns the classes, to be patched."""
    for name in NAMES:
        patch.delitem(sys.modules, name)
    load_sources()
    classes: dict[str, type] = {}
    for name in NAMES:
        loaded = vars(sys.modules[name]).items()
        classes |= {key: value for key, value in loaded if getattr(value, "__module__", "") == name}
    for user in (network, start):
        for key, value in list(vars(user).items()):
            if getattr(value, "__module__", "") in NAMES:
                patch.setattr(user, key, classes[key])
    return SimpleNamespace(**classes)


# Peers behind a router; the edge is a relay 2 ms from h2, with a link of its own to the store.
PEERS: dict[str, Any] = {
    "name": "peers",
    "hosts": {
        **{f"h{i}": {"device": "h100"} for i in range(3)},
        "r2": {
            "store": {"latency": "30 ms", "put": "5 $/million", "get": "1 $/million", "egress": "0.1 $/GB"}
        },
        "edge": {"store": {"latency": "1 ms", "get": "2 $/million"}},
    },
    "routers": ["x"],
    "links": [
        *(
            {"between": [f"h{i}", "x"], "up": "8 Mbit/s", "down": "80 Mbit/s", "latency": "10 ms"}
            for i in (0, 1)
        ),
        {"between": ["h2", "edge"], "up": "8 Mbit/s", "down": "80 Mbit/s", "latency": "2 ms"},
        {"between": ["x", "r2"], "bandwidth": "8 Gbit/s"},
        {"between": ["edge", "r2"], "bandwidth": "800 Mbit/s", "latency": "20 ms"},
    ],
    "protocol": "ideal",
}
