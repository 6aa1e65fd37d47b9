"""What a probe has found, as a topology file that says how sure it is."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from netsim.topology.foreign.draft import Draft, DraftLink, rate
from netsim.topology.foreign.pairs import GOODPUT_SHARE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from netsim.probe.survey import Found, Limit, WayFound

__all__ = ["written"]

_BUSY = 0.85
_UNSURE = 0.1


def written(found: Found, name: str) -> str:
    """The topology as YAML: each host a region of one, its own line the region's `nic`, each pair a link.

    Goodput becomes bytes on the wire. Where a host's own line is what limits its ways, their rates are "at least".
    """
    draft = Draft(name, _sources(found), protocol="linux-tcp", are_ends_measured=True)
    draft.regions = {host: _region(found, host) for host in found.hosts}
    for one, other in itertools.combinations(found.hosts, 2):
        draft.links.append(_link(found, one, other))
    return draft.to_yaml()


def _sources(found: Found) -> list[str]:
    asked = found.asked
    sources = [
        f"netsim probe of {len(found.hosts)} hosts, {found.when}: each way alone for {asked.seconds:g} s with one"
        f" stream and with {asked.streams}{', each host with all others at once' if len(found.hosts) > 2 else ''}.",
        "Rates are the best goodput times 1514/1448: bytes on the wire, as linux-tcp counts them.",
        "Latencies are half the least round trip.",
    ]
    if len(found.hosts) == 2:
        sources.append("Of two hosts the path's limit and the hosts' own cannot be told apart.")
    return [*sources, *(f"Note: {remark}." for remark in found.remarks)]


def _region(found: Found, host: str) -> str:
    sends = _line(
        found, host, found.sends.get(host), [way for pair, way in found.ways.items() if pair[0] == host]
    )
    receives = _line(
        found, host, found.receives.get(host), [way for pair, way in found.ways.items() if pair[1] == host]
    )
    told = f"sends {sends[1]}; receives {receives[1]}"
    return (
        f"{{hosts: 1, up: {rate(_rounded(sends[0]))}, down: {rate(_rounded(receives[0]))}, latency: 0 ms}}"
        f"  # {told}"
    )


def _line(found: Found, host: str, limit: Limit | None, ways: Sequence[WayFound]) -> tuple[float, str]:
    """A host's own rate on the wire, and how it is known."""
    if limit is None:
        best = max(way.best for way in ways) / GOODPUT_SHARE
        return best, "at least this, its one way"
    if limit.is_own:
        share = limit.together / limit.alone
        return (
            limit.together / GOODPUT_SHARE,
            f"this at most, +-{limit.spread / 2:.1%} ({share:.0%} of the sum of its ways alone)",
        )
    return limit.alone / GOODPUT_SHARE, "at least this, the sum of its ways"


def _link(found: Found, one: str, other: str) -> DraftLink:
    there, back = found.ways[one, other], found.ways[other, one]
    notes = [f"round trip {found.rtt_seconds[one, other] * 1e3:.4g} ms"]
    for source, target, way in ((one, other, there), (other, one, back)):
        notes.append(f"{source} to {target} {_told(found, source, target, way)}")
    timed = found.gloo.get((one, other))
    if timed:
        notes.append(
            f"gloo: {timed['small'] * 1e3:.4g} ms for 4 bytes, {rate(_rounded(timed['there']))} there,"
            f" {rate(_rounded(timed['back']))} back (payload)"
        )
    latency = found.rtt_seconds[one, other] / 2
    up, down = there.best / GOODPUT_SHARE, back.best / GOODPUT_SHARE
    return DraftLink(one, other, _rounded(up), _rounded(down), round(latency, 7), comment="; ".join(notes))


def _told(found: Found, source: str, target: str, way: WayFound) -> str:
    words = [
        f"{rate(_rounded(way.single / GOODPUT_SHARE))} with one stream,"
        f" {rate(_rounded(way.several / GOODPUT_SHARE))} +-{way.spread / 2:.1%} with {found.asked.streams}"
    ]
    ends = (found.sends.get(source), found.receives.get(target))
    if any(limit is not None and limit.is_own and way.best > 0.93 * limit.together for limit in ends):
        words.append("at least this: a host's own line was the limit")
    if way.again > 0:
        words.append(f"{way.again:.2%} of segments sent again")
    if way.loaded_rtt_seconds > 0:
        words.append(f"round trip {way.loaded_rtt_seconds * 1e3:.3g} ms under load")
    if way.busy > _BUSY:
        words.append(f"UNSURE: the sender's processor was busy ({way.busy:.0%} of a core)")
    if way.machine > _BUSY:
        words.append(f"the sender's processors were {way.machine:.0%} busy")
    if way.spread > 2 * _UNSURE:
        words.append("UNSURE: it changed while it was measured")
    return ", ".join(words)


def _rounded(bits_per_second: float) -> float:
    return float(f"{bits_per_second:.4g}")
