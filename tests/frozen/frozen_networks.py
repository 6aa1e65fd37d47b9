"""Networks, protocols and weather of the frozen cases, drawn with whole numbers only: equal on every machine."""

from __future__ import annotations

import hashlib
import json
from random import Random
from typing import Any

import netsim

__all__ = ["PROTOCOLS", "WEATHERS", "digest", "mapping_of", "random_tree", "star", "with_weather"]

PROTOCOLS: dict[str, Any] = {
    "ideal": "ideal",
    "linux-tcp": "linux-tcp",
    "gloo": "gloo",
    "4-streams": {"preset": "linux-tcp", "streams": 4},
    "small-window": {"preset": "linux-tcp", "window": "64 KiB"},
    "large-window": {"preset": "linux-tcp", "window": "16 MiB", "queue": 100_000},
    "per-transfer": {"preset": "linux-tcp", "connections": "per-transfer"},
    "shallow-queue": {"preset": "linux-tcp", "queue": 20},
    "gloo-2-streams": {"preset": "gloo", "streams": 2, "window": "1 MiB"},
    "no-slow-start": {"preset": "ideal", "window": "256 KiB"},
    "software": {"preset": "ideal", "software": "1 ms", "streams": 4},
    "handshake": {"preset": "ideal", "connections": "per-transfer"},
}

WEATHERS = (
    "none",
    "direct",
    "events",
    "traces",
    "drift",
    "steady",
    "periodic",
    "crash",
    "crash-told",
    "mixed",
)


def digest(given: Any) -> str:
    """Hex digits that identify an input."""
    return hashlib.sha256(json.dumps(given, sort_keys=True).encode()).hexdigest()[:8]


def star(num_hosts: int, bandwidth: str = "10 Mbit/s", latency: str = "5 ms") -> dict[str, Any]:
    """Equal hosts around one router: everything that can tie does."""
    links = [
        {"between": [f"h{i}", "sw"], "bandwidth": bandwidth, "latency": latency} for i in range(num_hosts)
    ]
    return {"name": "star", "hosts": [f"h{i}" for i in range(num_hosts)], "routers": ["sw"], "links": links}


def random_tree(draw: Random) -> dict[str, Any]:
    """Hosts and routers in a tree, links uneven in both directions, some of them lossy or with a short queue."""
    num_hosts, num_routers = draw.randrange(3, 7), draw.randrange(1, 4)
    names = [f"r{i}" for i in range(num_routers)] + [f"h{i}" for i in range(num_hosts)]
    links = []
    for index, name in enumerate(names[1:], 1):
        link: dict[str, Any] = {
            "between": [name, names[draw.randrange(min(index, num_routers))]],
            "up": f"{draw.choice([1, 2, 5, 10, 37, 100, 1000])} Mbit/s",
            "down": f"{draw.choice([2, 5, 10, 100, 250])} Mbit/s",
            "latency": f"{draw.choice([0, 1, 3, 10, 37, 80])} ms",
        }
        if draw.randrange(4) == 0:
            link["loss"] = f"{draw.choice(['0.01', '0.1', '0.5'])} %"
        if draw.randrange(4) == 0:
            link["queue"] = draw.choice([10, 50, 200])
        links.append(link)
    return {"name": "tree", "hosts": names[num_routers:], "routers": names[:num_routers], "links": links}


def mapping_of(name: str, draw: Random) -> dict[str, Any]:
    """A topology as a mapping: `tree`, `star`, or the name of a shipped one."""
    if name == "tree":
        return random_tree(draw)
    if name == "star":
        return star(5)
    mapping = netsim.Topology.load(name).to_mapping()
    # Frozen before rates of shipped networks were said to be measured: taken as rates on the wire.
    for entry in [*mapping.get("links", []), *mapping.get("regions", {}).values()]:
        entry.pop("measured", None)
    return mapping


def with_weather(mapping: dict[str, Any], kind: str, draw: Random, span_ms: int) -> dict[str, Any]:
    """The mapping with weather of this kind in its first `span_ms` milliseconds."""
    topology = netsim.Topology.from_mapping(mapping)
    both_ways = {tuple(sorted((link.source, link.target))): link.bits_per_second for link in topology.links}
    links = [(list(ends), rate) for ends, rate in sorted(both_ways.items())]
    hosts = [host.name for host in topology.hosts]
    more: dict[str, Any] = {}
    if kind in ("events", "mixed"):
        more["events"] = [_link_event(draw, *draw.choice(links), span_ms) for _ in range(6)]
    if kind in ("traces", "mixed"):
        more["traces"] = [_trace(draw, *link, span_ms) for link in draw.sample(links, 3)]
    if kind in ("drift", "mixed"):
        more["drift"] = [_drift(draw, *link) for link in draw.sample(links, 2)]
    if kind in ("steady", "periodic", "mixed"):
        least = min(both_ways.values())
        more["background"] = [_background(draw, kind, hosts, least, span_ms) for _ in range(3)]
    if kind in ("crash", "crash-told", "mixed"):
        crashes = [_crash(draw, host, span_ms) for host in draw.sample(hosts, 2)]
        more["events"] = more.get("events", []) + crashes
    return {**mapping, **more}


def _link_event(draw: Random, ends: list[str], rate: float, span_ms: int) -> dict[str, Any]:
    event: dict[str, Any] = {"at": f"{draw.randrange(span_ms)} ms", "link": ends}
    event.update(
        draw.choice(
            [
                {"down": True},
                {"bandwidth": f"{int(rate * draw.choice([1, 3, 20]) / 10)} bit/s"},
                {"latency": f"{draw.randrange(120)} ms"},
                {"loss": f"0.{draw.randrange(1, 100):02} %"},
            ]
        )
    )
    event["for"] = f"{draw.randrange(1, span_ms)} ms"
    if draw.randrange(2):
        event["direction"] = draw.choice(["up", "down"])
    return event


def _trace(draw: Random, ends: list[str], rate: float, span_ms: int) -> dict[str, Any]:
    instants = sorted(draw.sample(range(span_ms), 5))
    if draw.randrange(3) == 0:
        return {"link": ends, "latency": [[f"{at} ms", f"{draw.randrange(90)} ms"] for at in instants]}
    values = [int(rate * draw.choice([1, 2, 5, 9, 15]) / 10) for _ in instants]
    values[-1] = int(rate)
    if draw.randrange(3) == 0:
        values[1] = 0
    return {
        "link": ends,
        "bandwidth": [[f"{at} ms", f"{value} bit/s"] for at, value in zip(instants, values, strict=True)],
    }


def _drift(draw: Random, ends: list[str], rate: float) -> dict[str, Any]:
    every = f"{draw.randrange(50, 900)} ms"
    if draw.randrange(2):
        return {"link": ends, "kind": "lognormal", "every": every, "sigma": 0.3, "seed": draw.randrange(9)}
    levels = ["100 %", "30 %", "60 %"]
    return {"link": ends, "kind": "regime", "every": every, "levels": levels, "seed": draw.randrange(9)}


def _background(draw: Random, kind: str, hosts: list[str], least: float, span_ms: int) -> dict[str, Any]:
    source, target = draw.sample(hosts, 2)
    entry: dict[str, Any] = {"from": source, "to": target, "start": f"{draw.randrange(span_ms // 2)} ms"}
    if kind == "steady" or (kind == "mixed" and draw.randrange(2)):
        entry["rate"] = f"{int(least * draw.choice([1, 4, 15]) / 10)} bit/s"
    else:
        entry["bytes"] = f"{draw.randrange(1, 50) * 4} kB"
        entry["every"] = f"{draw.randrange(40, 400)} ms"
    if draw.randrange(2):
        entry["stop"] = f"{span_ms + draw.randrange(span_ms)} ms"
    return entry


def _crash(draw: Random, host: str, span_ms: int) -> dict[str, Any]:
    length = f"{draw.randrange(1, span_ms)} ms"
    return {"at": f"{draw.randrange(span_ms)} ms", "host": host, "crash": True, "for": length}
