"""Ways that were measured end to end, from any number of files, and the topology that they make."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from netsim.files.errors import InputError, unknown_name, unknown_names
from netsim.topology.foreign.draft import Assumed, Draft, DraftLink, milliseconds, rate, safe_name
from netsim.topology.foreign.own_lines import remarks_on_lines

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["GOODPUT_SHARE", "OneWay", "Pairs"]

GOODPUT_SHARE = 1448 / 1514
"""Payload of a full TCP segment by its bytes on the wire (Ethernet frame), as `linux-tcp` counts them."""


@dataclass
class OneWay:
    """What was measured from one place to another; None where it was not.

    Attributes:
        bits_per_second: goodput.
        rtt_seconds: there and back.
        loss: share of packets.
        notes: on how it was measured.
    """

    bits_per_second: float | None = None
    rtt_seconds: float | None = None
    loss: float | None = None
    notes: list[str] = field(default_factory=list)


class Pairs:
    """Ways by (from, to)."""

    def __init__(self) -> None:
        self.ways: dict[tuple[str, str], OneWay] = {}
        self.sources: list[str] = []

    def way(self, source: str, target: str) -> OneWay:
        """The way from one place to another, new or known."""
        return self.ways.setdefault((source, target), OneWay())

    def add(
        self,
        source: str,
        target: str,
        *,
        bits_per_second: float | None = None,
        rtt_seconds: float | None = None,
        loss: float | None = None,
        note: str = "",
    ) -> None:
        """One measurement. Of several the largest rate and the smallest round trip count."""
        way = self.way(source, target)
        if bits_per_second is not None and bits_per_second > 0:
            way.bits_per_second = max(bits_per_second, way.bits_per_second or 0.0)
        if rtt_seconds is not None and rtt_seconds >= 0:
            way.rtt_seconds = rtt_seconds if way.rtt_seconds is None else min(rtt_seconds, way.rtt_seconds)
        if loss is not None and 0 <= loss < 1:
            way.loss = loss
        if note and note not in way.notes:
            way.notes.append(note)

    def keep(self, places: Sequence[str]) -> None:
        """Leave out the ways of all other places. Raises UnknownNameError for a place that no way has."""
        known = {place for pair in self.ways for place in pair}
        for place in places:
            if place not in known:
                raise unknown_name("place in the measurements", place, known)
        self.ways = {pair: way for pair, way in self.ways.items() if set(pair) <= set(places)}

    def draft(self, name: str, assumed: Assumed) -> Draft:
        """Each place a region with hosts of its own, each pair a link between regions, one figure a direction.

        Raises InputError where a figure is missing and nothing is assumed for it.
        """
        taken: dict[str, str] = {}
        pairs = list(dict.fromkeys(tuple(sorted(pair)) for pair in self.ways if pair[0] != pair[1]))
        if not pairs:
            raise InputError(
                f"{name}: no way between two places was found: give measurements of at least one"
            )
        draft = Draft(name, list(self.sources), protocol="linux-tcp", are_ends_measured=True)
        for one, other in pairs:
            draft.links.append(self._link(one, other, assumed, taken))
        fastest = max(max(link.up_bits_per_second, link.down_bits_per_second) for link in draft.links)
        nic = max(assumed.nic_bits_per_second, fastest)
        lines: dict[str, tuple[int, float, float]] = {}
        for place in dict.fromkeys(place for pair in sorted(pairs) for place in pair):
            up, down = assumed.nics.get(place, (nic, nic))
            lines[place] = assumed.hosts_of.get(place, assumed.hosts), up, down
            draft.regions[safe_name(place, taken)] = _region(*lines[place])
        given = {*assumed.nics, *assumed.hosts_of} - lines.keys()
        if given:
            raise unknown_names("place of --nic and --hosts", sorted(given), lines)
        rates = {ends: way.bits_per_second for ends, way in self.ways.items() if way.bits_per_second}
        wire = {ends: goodput / GOODPUT_SHARE for ends, goodput in rates.items()}
        draft.remarks += remarks_on_lines(wire, lines, GOODPUT_SHARE)
        draft.sources.append(
            f"Assumed: {assumed.hosts} host(s) a place, network cards of {rate(nic)}"
            f"{' where regions say no other' if assumed.nics or assumed.hosts_of else ''}, 50 us to the place's"
            " router. Rates are what was measured times 1514/1448: bytes on the wire, as linux-tcp counts them."
        )
        return draft

    def _link(self, one: str, other: str, assumed: Assumed, taken: dict[str, str]) -> DraftLink:
        there = self.ways.get((one, other), OneWay())
        back = self.ways.get((other, one), OneWay())
        trips = [way.rtt_seconds for way in (there, back) if way.rtt_seconds is not None]
        notes = [f"{one} to {other}: {note}" for note in there.notes]
        notes += [f"{other} to {one}: {note}" for note in back.notes]
        up, down = (
            there.bits_per_second or back.bits_per_second,
            back.bits_per_second or there.bits_per_second,
        )
        if up is None or down is None:
            if assumed.bits_per_second is None:
                raise InputError(f"{one} to {other}: no throughput was measured: assume one with --bandwidth")
            up = down = assumed.bits_per_second * GOODPUT_SHARE
            notes.append(f"rate assumed: {rate(assumed.bits_per_second)}")
        elif there.bits_per_second is None or back.bits_per_second is None:
            notes.append("rate measured one way, assumed the other")
        if trips:
            latency = sum(trips) / len(trips) / 2
            # The way from each host to its place's router is part of what was measured.
            latency = max(latency - 2 * 50e-6, 0.0)
        elif assumed.latency_seconds is not None:
            latency = assumed.latency_seconds
            notes.append(f"latency assumed: {milliseconds(latency)}")
        else:
            raise InputError(f"{one} to {other}: no round trip was measured: assume a latency with --latency")
        losses = [way.loss for way in (there, back) if way.loss is not None]
        return DraftLink(
            safe_name(one, taken),
            safe_name(other, taken),
            up / GOODPUT_SHARE,
            down / GOODPUT_SHARE,
            latency,
            max(losses, default=0.0),
            "; ".join(notes),
        )


def _region(hosts: int, up: float, down: float) -> str:
    line = f"nic: {rate(up)}" if up == down else f"up: {rate(up)}, down: {rate(down)}"
    return f"{{hosts: {hosts}, {line}, latency: 50 us}}"
