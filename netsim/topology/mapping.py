"""A topology as the data of its file: exact to the last digit, or with quantities as they are shown to readers."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from netsim.topology.values import Duration, Loss, Price, Rate, written
from netsim.topology.weather import Places, write_weather

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from netsim.topology.graph import Host, Link
    from netsim.topology.topology import Topology

__all__ = ["plain_form", "quality", "rates"]


def rates(both: str, up: float, down: float, write: Callable[[Any, float], Any] = written) -> dict[str, Any]:
    """Rates of a link: one under the key `both` where they are equal, else `up` and `down`; `write` writes one."""
    if up == down:
        return {both: write(Rate, up)}
    return {"up": write(Rate, up), "down": write(Rate, down)}


def quality(
    latency_seconds: float,
    loss: float = 0.0,
    queue_packets: int | None = None,
    measured_streams: int | None = None,
    write: Callable[[Any, float], Any] = written,
) -> dict[str, Any]:
    """Latency, loss, queue and measurement of a link, as keys of a file; without those it leaves out."""
    return {
        "latency": write(Duration, latency_seconds),
        **_given(
            loss=write(Loss, loss) if loss else None,
            queue=queue_packets,
            measured={"streams": measured_streams} if measured_streams else None,
        ),
    }


def plain_form(topology: Topology) -> dict[str, Any]:
    """The topology as a mapping that `Topology.from_mapping` reads back to an equal one; empty keys left out."""
    regions = _uniform_regions(topology)
    inside = {host.name for host in topology.hosts if host.region in regions}
    form: dict[str, Any] = {
        "name": topology.name,
        "source": topology.source,
        "hosts": {host.name: _host(host) for host in topology.hosts if host.name not in inside},
        "routers": [name for name in topology.routers if name not in regions],
        "links": [
            _pipe(link, topology.links[back])
            for link, back in _pairs(topology.links)
            if link.source not in inside and link.target not in inside
        ],
        "regions": regions,
        "routes": [_route(topology, ends, links) for ends, links in topology.explicit_routes.items()],
        "protocol": copy.deepcopy(topology.protocol),
        **write_weather(topology.weather, Places(topology.hosts, topology.links)),
    }
    return {key: value for key, value in form.items() if value}


def _host(host: Host) -> dict[str, Any]:
    return _given(region=host.region, device=host.device, devices=host.devices)


def _pairs(links: Sequence[Link]) -> list[tuple[Link, int]]:
    """Each connection once: its first link in canonical order, and the index of the reverse one."""
    index = {(link.source, link.target): link.index for link in links}
    ways = [(link, index[link.target, link.source]) for link in links]
    return [(link, back) for link, back in ways if link.index < back]


def _pipe(link: Link, back: Link) -> dict[str, Any]:
    return {
        "between": [link.source, link.target],
        **rates("bandwidth", link.bits_per_second, back.bits_per_second),
        **_quality(link),
        **_given(egress=written(Price, link.dollars_per_byte or None)),
    }


def _quality(link: Link) -> dict[str, Any]:
    return quality(link.latency_seconds, link.loss, link.queue_packets, link.measured_streams)


def _uniform_regions(topology: Topology) -> dict[str, Any]:
    """Regions that the key `regions` can express: hosts REGION.0 ... all alike, behind a router REGION."""
    outgoing: dict[str, list[Link]] = {}
    for link in topology.links:
        outgoing.setdefault(link.source, []).append(link)
    index = {(link.source, link.target): link for link in topology.links}
    members: dict[str, list[Host]] = {}
    for host in topology.hosts:
        if host.region is not None and host.region in topology.routers:
            members.setdefault(host.region, []).append(host)
    regions = {}
    for region, hosts in members.items():
        entries = []
        for number, host in enumerate(hosts):
            links = outgoing[host.name]
            if host.name == f"{region}.{number}" and [link.target for link in links] == [region]:
                back = index[region, host.name]
                card = rates("nic", links[0].bits_per_second, back.bits_per_second)
                machine = _given(device=host.device, devices=host.devices)
                entries.append({"hosts": len(hosts), **card, **_quality(links[0]), **machine})
        if len(entries) == len(hosts) and all(entry == entries[0] for entry in entries):
            regions[region] = entries[0]
    return regions


def _route(topology: Topology, ends: tuple[int, int], links: Sequence[int]) -> dict[str, Any]:
    source, target = (topology.hosts[end].name for end in ends)
    through = [topology.links[link].target for link in links[:-1]]
    return {"from": source, "to": target, **({"through": through} if through else {})}


def _given(**entries: Any) -> dict[str, Any]:
    return {key: value for key, value in entries.items() if value is not None}
