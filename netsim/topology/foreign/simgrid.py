"""SimGrid's platform files: one zone with full routing, and clusters without a backbone.

Links of SimGrid have no ends, only routes that lead over them. Ours are written as `a->b`, which names both; such files
are read back as they were. Of others, routes of one link lead from host to host, and such of two of which each is one
host's own make a star. Elsewhere each link becomes one between two routers of its own, over which routes lead as told:
what share it in SimGrid share it here, in both directions together.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import TYPE_CHECKING
from xml.sax.saxutils import quoteattr

from netsim.files.errors import InputError
from netsim.topology.foreign.draft import Draft, DraftLink, safe_name
from netsim.topology.foreign.xml import parse_xml

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element

    from netsim.topology.topology import Topology

__all__ = ["read_simgrid", "write_simgrid"]

_QUANTITY = re.compile(r"\s*([\d.]+(?:[eE][+-]?\d+)?)\s*([A-Za-z]*)\s*")
_PREFIXES = {
    "": 1.0,
    "k": 1e3,
    "K": 1e3,
    "M": 1e6,
    "G": 1e9,
    "T": 1e12,
    "Ki": 2.0**10,
    "Mi": 2.0**20,
    "Gi": 2.0**30,
}
_RATES = {
    prefix + unit: factor * bits
    for prefix, factor in _PREFIXES.items()
    for unit, bits in (("Bps", 8), ("bps", 1))
}
_TIMES = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9, "ps": 1e-12, "m": 60.0, "h": 3600.0}
_MOST_ROUTES = 1_000_000
_MUCH_WIDER = 1000.0  # than the widest link: a joint between links, which limits nothing
_OTHER_WAY = {"UP": "DOWN", "DOWN": "UP"}

_Figures = tuple[float, float]  # bits per second, seconds
_Route = tuple[str, str, list[str]]


def write_simgrid(topology: Topology) -> str:
    """A platform of version 4.1 with hosts, a link each direction and a route for each pair of hosts.

    SimGrid's own corrections (`network/bandwidth-factor`, `latency-factor`, `weight-S`, TCP windows) are for its users
    to set; with all off it shares as the protocol `ideal` does. Raises InputError for more than 1,000 hosts.
    """
    num = len(topology.hosts)
    if num * (num - 1) > _MOST_ROUTES:
        raise InputError(f"{topology.name}: {num} hosts have too many routes to write out: 1,000 at the most")
    lines = [
        "<?xml version='1.0'?>",
        '<!DOCTYPE platform SYSTEM "https://simgrid.org/simgrid.dtd">',
        '<platform version="4.1">',
        f'  <zone id={quoteattr(topology.name)} routing="Full">',
    ]
    lines += [f'    <host id={quoteattr(host.name)} speed="1Gf"/>' for host in topology.hosts]
    names = [f"{link.source}->{link.target}" for link in topology.links]
    for name, link in zip(names, topology.links, strict=True):
        lines.append(
            f'    <link id={quoteattr(name)} bandwidth="{link.bits_per_second / 8!r}Bps"'
            f' latency="{link.latency_seconds!r}s"/>'
        )
    for src in topology.hosts:
        for dst in topology.hosts:
            if src.index != dst.index:
                steps = "".join(
                    f"<link_ctn id={quoteattr(names[link])}/>"
                    for link in topology.route(src.index, dst.index)
                )
                ends = f"src={quoteattr(src.name)} dst={quoteattr(dst.name)}"
                lines.append(f'    <route {ends} symmetrical="NO">{steps}</route>')
    return "\n".join([*lines, "  </zone>", "</platform>", ""])


def read_simgrid(path: str | Path, text: str) -> Draft:
    """The network of a platform file. Raises InputError for what is no platform, or another kind of one."""
    root = parse_xml(path, text)
    if root.tag != "platform":
        raise InputError(f"{path}: is no SimGrid platform: its root is <{root.tag[:40]}>")
    clusters = list(root.iter("cluster"))
    hosts = [_text(path, host, "id") for host in root.iter("host")]
    sources = [f"{Path(path).name}: SimGrid platform, version {root.get('version', 'unknown')}."]
    draft = Draft(Path(path).stem, sources)
    if clusters and not hosts:
        for number, cluster in enumerate(clusters):
            _add_cluster(path, draft, cluster, number)
        if len(clusters) > 1:
            raise InputError(
                f"{path}: {len(clusters)} clusters and their zones' routes: only one cluster is read"
            )
        return draft
    for zone in (*root.iter("zone"), *root.iter("AS")):
        if zone.get("routing", "Full").lower() not in ("full", "none"):
            raise InputError(
                f"{path}: routing {zone.get('routing')!r}: only zones with full routing are read"
            )
    if next(root.iter("zoneRoute"), next(root.iter("ASroute"), None)) is not None:
        raise InputError(f"{path}: zones with routes between them: only one zone is read")
    links = _links(path, root)
    routes = _routes(path, root)
    if not hosts or not routes or clusters:
        raise InputError(f"{path}: expected a zone with full routing (hosts, links, routes), or one cluster")
    if len(set(hosts)) < len(hosts):
        raise InputError(f"{path}: two hosts have one id: give each its own")
    figures = links
    for src, dst, steps in routes:
        for end in {src, dst} - set(hosts):
            raise InputError(f"{path}: a route begins or ends at host {end!r}, which is not there")
        for step in steps:
            if step not in figures:
                raise InputError(f"{path}: a route goes over link {step!r}, which is not there")
    told = {(src, dst) for src, dst, _ in routes}
    for src, dst in itertools.permutations(hosts, 2):
        if (src, dst) not in told:
            raise InputError(
                f"{path}: no route from {src!r} to {dst!r}: full routing tells of every two hosts"
            )
    draft.hosts = list(hosts)
    named = [name.split("->") for name in figures]
    if all(len(ends) == 2 for ends in named):
        draft.routers = sorted({end for ends in named for end in ends} - set(hosts))
        draft.links = _joined({(one, other): figures[f"{one}->{other}"] for one, other in named})
        draft.through = {
            (src, dst): [step.split("->")[1] for step in steps][:-1] for src, dst, steps in routes
        }
        return draft
    _from_routes(path, draft, routes, figures)
    return draft


def _from_routes(path: str | Path, draft: Draft, routes: list[_Route], figures: dict[str, _Figures]) -> None:
    """Ends of links by the routes over them."""
    taken: dict[str, str] = {}
    draft.hosts = [safe_name(host, taken) for host in draft.hosts]
    lengths = {len(steps) for _, _, steps in routes}
    own = _star(routes) if lengths == {2} else None
    if lengths == {1}:
        ways = {(taken[src], taken[dst]): figures[step] for src, dst, (step,) in routes}
        draft.are_ends_measured = True
    elif own is not None:
        draft.routers = [safe_name("switch", taken)]
        ways = {(taken[src], draft.routers[0]): figures[step] for src, step in own[0].items()}
        ways |= {(draft.routers[0], taken[dst]): figures[step] for dst, step in own[1].items()}
    else:
        _over_shared_links(draft, routes, figures, taken)
        return
    draft.sources.append("A link that SimGrid shares between both directions is given to each here.")
    draft.links = _joined(ways)


def _star(routes: list[_Route]) -> tuple[dict[str, str], dict[str, str]] | None:
    """Each host's own link out and in, where every route goes over the one of its begin and the other of its end."""
    first, last = dict[str, str](), dict[str, str]()
    for src, dst, (out, into) in routes:
        if first.setdefault(src, out) != out or last.setdefault(dst, into) != into:
            return None
    return (first, last) if len(set(first.values())) == len(first) else None


def _over_shared_links(
    draft: Draft, routes: list[_Route], figures: dict[str, _Figures], taken: dict[str, str]
) -> None:
    """Every link between two routers of its own, which all that go over it pass in the same direction."""
    used = list(dict.fromkeys(step for _, _, steps in routes for step in steps))
    ends = {step: (safe_name(f"{step}.in", taken), safe_name(f"{step}.out", taken)) for step in used}
    draft.routers = [router for pair in ends.values() for router in pair]
    for step, (into, out) in ends.items():
        rate, seconds = figures[step]
        draft.links.append(DraftLink(into, out, rate, rate, seconds, comment=f"link {step}"))
    wide = _MUCH_WIDER * max(figures[step][0] for step in used)
    joints: dict[tuple[str, str], None] = {}
    for src, dst, steps in routes:
        through = [router for step in steps for router in ends[step]]
        draft.through[taken[src], taken[dst]] = through
        nodes = [taken[src], *through, taken[dst]]
        for one, other in itertools.pairwise(nodes):
            if (one, other) not in ends.values():
                joints[min(one, other), max(one, other)] = None
    draft.links += [
        DraftLink(one, other, wide, wide, 0.0, comment="a joint, no limit") for one, other in joints
    ]
    draft.sources.append(
        "Its links have no ends: each is one between two routers, shared by all whose routes it is on, and joints "
        "without limit lead from one to the next."
    )


def _joined(ways: dict[tuple[str, str], _Figures]) -> list[DraftLink]:
    """Both directions of each connection in one entry; the latency is the larger one where they differ."""
    joined = []
    for (one, other), (up, seconds) in ways.items():
        back = ways.get((other, one))
        if back is not None and (other, one) < (one, other):
            continue
        down, back_seconds = back if back is not None else (up, seconds)
        comment = "" if seconds == back_seconds else "latency differs by direction: the larger one"
        joined.append(DraftLink(one, other, up, down, max(seconds, back_seconds), comment=comment))
    return joined


def _links(path: str | Path, root: Element) -> dict[str, _Figures]:
    """Links by id; one that is split by direction is two, as SimGrid itself names them."""
    found: dict[str, _Figures] = {}
    for link in root.iter("link"):
        name, figures = _text(path, link, "id"), _figures(path, link)
        found[name] = figures
        if link.get("sharing_policy") == "SPLITDUPLEX":
            found[f"{name}_UP"] = found[f"{name}_DOWN"] = figures
    return found


def _routes(path: str | Path, root: Element) -> list[_Route]:
    routes = []
    for route in root.iter("route"):
        src, dst = _text(path, route, "src"), _text(path, route, "dst")
        steps = []
        for step in route.iter("link_ctn"):
            way = step.get("direction", "")
            steps.append(_text(path, step, "id") + (f"_{way}" if way in _OTHER_WAY else ""))
        if src == dst:
            continue
        if not steps:
            raise InputError(f"{path}: the route from {src!r} to {dst!r} has no links")
        routes.append((src, dst, steps))
        if route.get("symmetrical", "YES").upper() != "NO":
            routes.append((dst, src, [_turned(step) for step in steps[::-1]]))
    return routes


def _turned(step: str) -> str:
    """The other direction of a link that is split by direction."""
    name, _, way = step.rpartition("_")
    return f"{name}_{_OTHER_WAY[way]}" if name and way in _OTHER_WAY else step


def _add_cluster(path: str | Path, draft: Draft, cluster: Element, number: int) -> None:
    """A star of equal links; a backbone is an extra latency, and its rate is told and left out."""
    radical = _text(path, cluster, "radical")
    if cluster.get("topology", "FLAT").upper() != "FLAT":
        raise InputError(f"{path}: a cluster that is a {cluster.get('topology')}: only flat ones are read")
    prefix, suffix = cluster.get("prefix", ""), cluster.get("suffix", "")
    router = f"switch{number}"
    draft.routers.append(router)
    rate, seconds = _figures(path, cluster, "bw", "lat")
    backbone = _quantity(path, cluster, "bb_lat", _TIMES) if cluster.get("bb_lat") else 0.0
    if cluster.get("bb_bw"):
        draft.sources.append("The cluster's backbone is taken to be no bottleneck.")
    taken: dict[str, str] = {}
    for part in radical.split(","):
        low, _, high = part.partition("-")
        if not low.isdigit() or not (high or low).isdigit() or int(high or low) - int(low) > 20_000:
            raise InputError(f"{path}: cluster: radical {radical[:40]!r} is no list of numbers such as 0-15")
        for index in range(int(low), int(high or low) + 1):
            host = safe_name(f"{prefix}{index}{suffix}", taken)
            draft.hosts.append(host)
            draft.links.append(DraftLink(host, router, rate, rate, seconds + backbone / 2))


def _figures(
    path: str | Path, element: Element, rate_key: str = "bandwidth", time_key: str = "latency"
) -> _Figures:
    seconds = _quantity(path, element, time_key, _TIMES) if element.get(time_key) else 0.0
    return _quantity(path, element, rate_key, {**_RATES, "": 8.0}), seconds


def _quantity(path: str | Path, element: Element, key: str, units: dict[str, float]) -> float:
    text = _text(path, element, key)
    match = _QUANTITY.fullmatch(text)
    if match is None or match.group(2) not in units:
        raise InputError(f"{path}: <{element.tag}> {key}={text[:40]!r}: expected a number with its unit")
    return float(match.group(1)) * units[match.group(2)]


def _text(path: str | Path, element: Element, key: str) -> str:
    value = element.get(key)
    if not value:
        raise InputError(f"{path}: <{element.tag}> has no {key}")
    return value
