"""`netsim probe` between network namespaces with shaped links: written figures against configured ones.

    sudo python benchmarks/probe.py [NAME ...] [--seconds 3] [--yaml]

Each case is a topology; `netsim probe` is started in the namespace of each of its hosts (benchmarks/shaped_links.py).
Compared are, for each two hosts, the round trip and the narrowest rate each way, and each host's own rate.
"""

from __future__ import annotations

import os
import time
from typing import Any

import harness
import yaml
from shaped_links import ShapedLinks

from netsim import Protocol, Topology


def pair(up: str, down: str, rtt: str) -> dict[str, Any]:
    return {
        "hosts": {"a": {}, "b": {}},
        "routers": ["x", "y"],
        "links": [
            {"between": ["a", "x"], "bandwidth": "10 Gbit/s"},
            {"between": ["b", "y"], "bandwidth": "10 Gbit/s"},
            {"between": ["x", "y"], "up": up, "down": down, "rtt": rtt},
        ],
    }


def regions(nics: dict[str, tuple[str, str]], wan: list[tuple[str, str, str, str, str]]) -> dict[str, Any]:
    return {
        "regions": {name: {"hosts": 1, "up": up, "down": down} for name, (up, down) in nics.items()},
        "wan": [{"between": [a, b], "up": up, "down": down, "rtt": rtt} for a, b, up, down, rtt in wan],
    }


FREE = ("10 Gbit/s", "10 Gbit/s")
FOUR = [
    ("a", "b", "50 Mbit/s", "50 Mbit/s", "20 ms"),
    ("a", "c", "40 Mbit/s", "80 Mbit/s", "40 ms"),
    ("a", "d", "30 Mbit/s", "30 Mbit/s", "60 ms"),
    ("b", "c", "60 Mbit/s", "60 Mbit/s", "30 ms"),
    ("b", "d", "25 Mbit/s", "25 Mbit/s", "80 ms"),
    ("c", "d", "20 Mbit/s", "45 Mbit/s", "100 ms"),
]
CASES: dict[str, dict[str, Any]] = {
    **{
        f"{rate}M-{milliseconds}ms": pair(f"{rate} Mbit/s", f"{rate} Mbit/s", f"{milliseconds} ms")
        for rate in (10, 100)
        for milliseconds in (1, 20, 100)
    },
    "1000M-1ms": pair("1000 Mbit/s", "1000 Mbit/s", "1 ms"),
    "unequal": pair("20 Mbit/s", "80 Mbit/s", "30 ms"),
    "host-limit": regions(
        {"a": ("60 Mbit/s", "70 Mbit/s"), "b": FREE, "c": FREE},
        [
            ("a", "b", "50 Mbit/s", "50 Mbit/s", "20 ms"),
            ("a", "c", "40 Mbit/s", "40 Mbit/s", "40 ms"),
            ("b", "c", "60 Mbit/s", "60 Mbit/s", "30 ms"),
        ],
    ),
    "four": regions(dict.fromkeys("abcd", FREE), FOUR),
    "four-limit": regions(
        {"a": ("70 Mbit/s", "90 Mbit/s"), "b": FREE, "c": FREE, "d": ("35 Mbit/s", "40 Mbit/s")}, FOUR
    ),
}


def case(name: str) -> Topology:
    """The topology of a case; each host is alone in its region where there are any."""
    return Topology.from_mapping({"name": name, **CASES[name]})


def probe(net: ShapedLinks, options: list[str], seconds: float) -> str:
    """Start the command on all hosts; returns the file that the first one writes."""
    hosts = [host.name for host in net.topology.hosts]
    listed = [f"{name.removesuffix('.0')}={net.address(name)}" for name in hosts]
    # The leading one last, as it may well be.
    commands = {name: [*harness.NETSIM, "probe", *listed, *options] for name in reversed(hosts)}
    texts = set(net.run(commands, seconds, NETGYM_SECRET="of this probe of shaped links"))
    assert len(texts) == 1, "all hosts write the same file"
    return texts.pop()


def rows(set_to: Topology, found: Topology) -> list[tuple[str, float, float]]:
    """(what, set, found): round trips in ms, and in Mbit/s rates of ways and what each host sends and receives."""
    names = [host.name.removesuffix(".0") for host in set_to.hosts]
    compared = []
    for one in names:
        for other in names:
            if one != other:
                rates, trips = zip(*(_way(net, one, other) for net in (set_to, found)), strict=True)
                compared.append((f"{one}>{other} Mbit/s", rates[0] / 1e6, rates[1] / 1e6))
                if one < other:
                    compared.append((f"{one}-{other} RTT ms", trips[0] * 1e3, trips[1] * 1e3))
    if len(names) > 2:
        for name in names:
            for what, is_out in (("sends", True), ("receives", False)):
                own = [_own(net, name, is_out) for net in (set_to, found)]
                # A host that carries the sum of its ways gets that rate; it could carry more.
                total = sum(
                    _way(set_to, *((name, other) if is_out else (other, name)))[0]
                    for other in names
                    if other != name
                )
                compared.append((f"{name} {what} Mbit/s", min(own[0], total) / 1e6, own[1] / 1e6))
    return compared


def _host(net: Topology, name: str) -> int:
    return net.host_index(name if any(host.name == name for host in net.hosts) else f"{name}.0")


def _way(net: Topology, one: str, other: str) -> tuple[float, float]:
    src, dst = _host(net, one), _host(net, other)
    rate = min(_goodput(net, link) for link in net.route(src, dst))
    return rate, net.route_latency_seconds(src, dst) + net.route_latency_seconds(dst, src)


def _own(net: Topology, name: str, is_out: bool) -> float:
    host = net.hosts[_host(net, name)].name
    return sum(
        _goodput(net, link.index) for link in net.links if (link.source if is_out else link.target) == host
    )


def _goodput(net: Topology, link: int) -> float:
    return float(Protocol.parse("linux-tcp").payload_bytes_per_second(net)[link]) * 8


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(CASES)}; default: all")
    parser.add_argument("--seconds", default="3")
    parser.add_argument("--yaml", action="store_true", help="print what was written, too")
    args, rest = parser.parse_known_args()
    worst = 0.0
    for name in args.names or CASES:
        began, load = time.monotonic(), os.getloadavg()[0]
        with ShapedLinks(case(name)) as net:
            text = probe(net, ["--seconds", args.seconds, *rest], 600.0)
        compared = rows(net.topology, Topology.from_mapping(yaml.safe_load(text)))
        print(f"{name}: {time.monotonic() - began:.0f} s, load {load:.1f}", flush=True)
        for what, wanted, got in compared:
            print(f"    {what:20} set {wanted:9.2f}  found {got:9.2f}  {got / wanted - 1:+.1%}")
        worst = max(worst, *(abs(got / wanted - 1) for _, wanted, got in compared))
        if args.yaml:
            print(text)
    print(f"largest error {worst:.1%}")


if __name__ == "__main__":
    main()
