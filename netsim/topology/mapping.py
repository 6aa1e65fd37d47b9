"""A topology as the plain data of its file format, exact to the last digit."""

from __future__ import annotations

import copy
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from netsim.topology.graph import Host, Link
    from netsim.topology.weather import Weather

__all__ = ["plain_form"]


class _Network(Protocol):
    """What a topology holds, as `netsim.topology.topology.Topology` tells it."""

    @property
    def name(self) -> str: ...
    @property
    def source(self) -> str: ...
    @property
    def hosts(self) -> Sequence[Host]: ...
    @property
    def routers(self) -> Sequence[str]: ...
    @property
    def links(self) -> Sequence[Link]: ...
    @property
    def protocol(self) -> str | Mapping[str, Any] | None: ...
    @property
    def explicit_routes(self) -> Mapping[tuple[int, int], Sequence[int]]: ...
    @property
    def weather(self) -> Weather: ...


def plain_form(topology: _Network) -> dict[str, Any]:
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
        **_weather(topology),
    }
    return {key: value for key, value in form.items() if value}


def _host(host: Host) -> dict[str, Any]:
    return _given(region=host.region, device=host.device, devices=host.devices)


def _pairs(links: Sequence[Link]) -> list[tuple[Link, int]]:
    """Each connection once: its first link in canonical order, and the index of the way back."""
    index = {(link.source, link.target): link.index for link in links}
    ways = [(link, index[link.target, link.source]) for link in links]
    return [(link, back) for link, back in ways if link.index < back]


def _pipe(link: Link, back: Link) -> dict[str, Any]:
    return {
        "between": [link.source, link.target],
        **_rates("bandwidth", link, back),
        **_quality(link),
        **_given(egress=_price(link.dollars_per_byte)),
    }


def _rates(both: str, link: Link, back: Link) -> dict[str, Any]:
    if link.bits_per_second == back.bits_per_second:
        return {both: _rate(link.bits_per_second)}
    return {"up": _rate(link.bits_per_second), "down": _rate(back.bits_per_second)}


def _quality(link: Link) -> dict[str, Any]:
    return {
        "latency": _time(link.latency_seconds),
        **_given(loss=_percentage(link.loss) if link.loss else None, queue=link.queue_packets),
    }


def _uniform_regions(topology: _Network) -> dict[str, Any]:
    """The regions that the file's `regions` can say: hosts REGION.0 ... all alike, behind a router REGION."""
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
                card = _rates("nic", links[0], index[region, host.name])
                machine = _given(device=host.device, devices=host.devices)
                entries.append({"hosts": len(hosts), **card, **_quality(links[0]), **machine})
        if len(entries) == len(hosts) and all(entry == entries[0] for entry in entries):
            regions[region] = entries[0]
    return regions


def _route(topology: _Network, ends: tuple[int, int], links: Sequence[int]) -> dict[str, Any]:
    source, target = (topology.hosts[end].name for end in ends)
    through = [topology.links[link].target for link in links[:-1]]
    return {"from": source, "to": target, **({"through": through} if through else {})}


def _weather(topology: _Network) -> dict[str, Any]:
    return {
        "events": [*_link_events(topology), *_host_events(topology)],
        "traces": _traces(topology),
        "background": _background(topology),
        "drift": _drift(topology),
    }


def _link_events(topology: _Network) -> list[dict[str, Any]]:
    return [
        {
            "at": _time(event.at_seconds),
            **_ends(topology, event.links),
            **_given(
                up=event.is_up or None,
                down=True if event.is_up is False else None,
                bandwidth=_rate(event.bits_per_second),
                latency=_time(event.latency_seconds),
                loss=_percentage(event.loss),
            ),
            **_given(**{"for": _time(event.for_seconds)}),
        }
        for event in topology.weather.link_events
    ]


def _host_events(topology: _Network) -> list[dict[str, Any]]:
    return [
        {
            "at": _time(event.at_seconds),
            "host": topology.hosts[event.host].name,
            "up" if event.is_up else "crash": True,
            **_given(**{"for": _time(event.for_seconds)}),
        }
        for event in topology.weather.host_events
    ]


def _traces(topology: _Network) -> list[dict[str, Any]]:
    traces = []
    for trace in topology.weather.traces:
        key, form = ("bandwidth", _rate) if trace.quantity == "bits_per_second" else ("latency", _time)
        rows = [
            [_time(time), form(value)] for time, value in zip(trace.times_seconds, trace.values, strict=True)
        ]
        traces.append({**_ends(topology, trace.links), key: rows})
    return traces


def _background(topology: _Network) -> list[dict[str, Any]]:
    return [
        {
            "from": topology.hosts[traffic.source].name,
            "to": topology.hosts[traffic.target].name,
            **_given(
                rate=_rate(traffic.bits_per_second),
                bytes=traffic.num_bytes,
                every=_time(traffic.every_seconds),
                start=_time(traffic.start_seconds),
                stop=_time(traffic.stop_seconds),
            ),
        }
        for traffic in topology.weather.background
    ]


def _drift(topology: _Network) -> list[dict[str, Any]]:
    return [
        {
            **_ends(topology, drift.links),
            "kind": drift.kind,
            "every": _time(drift.every_seconds),
            **_given(
                sigma=drift.sigma, levels=drift.levels and [_percentage(level) for level in drift.levels]
            ),
            "seed": drift.seed,
        }
        for drift in topology.weather.drift
    ]


def _ends(topology: _Network, links: Sequence[int]) -> dict[str, Any]:
    link = topology.links[links[0]]
    return {"link": [link.source, link.target], **({"direction": "up"} if len(links) == 1 else {})}


def _given(**entries: Any) -> dict[str, Any]:
    return {key: value for key, value in entries.items() if value is not None}


# Shortest digits that read back to the same number.
def _digits(number: float) -> str:
    return str(int(number)) if number.is_integer() and abs(number) < 1e15 else repr(number)


def _rate(bits_per_second: float | None) -> str | None:
    return None if bits_per_second is None else f"{_digits(bits_per_second)} bit/s"


def _time(seconds: float | None) -> str | None:
    return None if seconds is None else f"{_digits(seconds)} s"


def _price(dollars_per_byte: float) -> str | None:
    """In dollars per byte, whose digits read back exactly; None where nothing is paid."""
    return f"{dollars_per_byte!r} $/B" if dollars_per_byte else None


def _percentage(fraction: float | None) -> str | None:
    """The fraction's own digits with the point moved: multiplying by 100 would round."""
    return None if fraction is None else f"{(Decimal(repr(fraction)) * 100).normalize():f} %"
