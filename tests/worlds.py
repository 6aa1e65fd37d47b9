"""Small networks, in the form of their files."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from netsim import Topology

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
