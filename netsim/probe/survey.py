"""The leading host of a probe: requests measurements from all hosts, one at a time, and collects the results."""

from __future__ import annotations

import contextlib
import itertools
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from netsim.files.signed import PeerAddress, PeerError, SignedChannel, UnreachableError
from netsim.formats.builder import LinkLine, TopologyBuilder, rate, region_entry
from netsim.probe.streams import call
from netsim.topology.protocol import PRESETS
from netsim.units import format_count

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["Asked", "Found", "Limit", "RouteResult", "survey", "topology_text"]

_BUSY = 0.85
_UNSURE = 0.1
_AS_MUCH = 0.98
_MTUS = range(576, 9217)  # of lines; those within a machine are longer

_MOST_CLOCK_SECONDS = 5.0
_MOST_CLOCK_DRIFT = 0.01
_LEAST_TRIPS, _WARM_TRIPS = (
    50,
    15,
)  # round trips that are sent for, and those of them in which TCP finds its rate


@dataclass(frozen=True)
class Asked:
    """Settings of a survey.

    Attributes:
        seconds: duration of each throughput measurement.
        streams: number of streams of the measurements with several.
        most_bytes: most bytes sent in a measurement.
        wait_seconds: time for all hosts to connect.
        gloo: time torch's gloo too.
    """

    seconds: float = 3.0
    streams: int = 8
    most_bytes: int = 2 * 10**9
    wait_seconds: float = 60.0
    gloo: bool = False

    def num_steps(self, num_hosts: int) -> int:
        """Number of measurements of the whole survey."""
        num_pairs = num_hosts * (num_hosts - 1) // 2
        return self._num_sent(num_hosts) + num_pairs * (2 if self.gloo else 1)

    def likely_seconds(self, num_hosts: int) -> float:
        """Expected duration of the whole survey."""
        num_pairs = num_hosts * (num_hosts - 1) // 2
        return self._num_sent(num_hosts) * (self.seconds + 0.7) + num_pairs * (16.0 if self.gloo else 1.0)

    def _num_sent(self, num_hosts: int) -> int:
        """Number of measurements of throughput."""
        return 2 * num_hosts * (num_hosts - 1) + (2 * num_hosts if num_hosts > 2 else 0)


@dataclass
class RouteResult:
    """Figures of the route from one host to another.

    Attributes:
        single, several: goodput of one stream and of several, in bits per second.
        spread: relative spread of the goodput of several streams over time.
        again: share of segments that several streams sent again.
        loaded_rtt_seconds: round trip while several streams send.
        busy: share of a core that the sender's process used.
        machine: share of the sender's processors in use by all processes.
        mtu_bytes: largest packet; 0: unknown.
    """

    single: float = 0.0
    several: float = 0.0
    spread: float = 0.0
    again: float = 0.0
    loaded_rtt_seconds: float = 0.0
    busy: float = 0.0
    machine: float = 0.0
    mtu_bytes: int = 0

    @property
    def best(self) -> float:
        """Larger of both goodputs."""
        return max(self.single, self.several)


@dataclass(frozen=True)
class Limit:
    """Goodput of a host to or from all others at once, and the sum of its routes measured alone."""

    together: float
    alone: float
    spread: float

    @property
    def is_own(self) -> bool:
        """True if the host, or a link that all its routes share, is the limit."""
        return self.together < 0.9 * self.alone


@dataclass
class Found:
    """Measurements of a survey; routes by (from, to)."""

    hosts: list[str]
    asked: Asked
    when: str
    rtt_seconds: dict[tuple[str, str], float] = field(default_factory=dict)
    routes: dict[tuple[str, str], RouteResult] = field(default_factory=dict)
    sends: dict[str, Limit] = field(default_factory=dict)
    receives: dict[str, Limit] = field(default_factory=dict)
    gloo: dict[tuple[str, str], dict[str, float]] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)


def survey(
    places: Mapping[str, PeerAddress], secret: bytes, asked: Asked, report: Callable[[str], None]
) -> tuple[Found, list[SignedChannel]]:
    """Measure between all hosts, as the first of them; the probe must have been started on each.

    Returns:
        Results, and the channels to the hosts, which the caller closes.

    Raises:
        PeerError: a host cannot be reached, is lost, or failed; the others have been told to stop.
    """
    lead = _Lead(places, secret, asked, report)
    try:
        lead.meet()
        lead.measure()
    except BaseException as error:
        text = (
            str(error)
            if isinstance(error, PeerError)
            else f"{next(iter(places))}, the leading host, was stopped"
        )
        lead.give_up(text)
        raise
    return lead.found, list(lead.channels.values())


class _Lead:
    def __init__(
        self, places: Mapping[str, PeerAddress], secret: bytes, asked: Asked, report: Callable[[str], None]
    ) -> None:
        self._places, self._secret, self._asked, self._report_here = places, secret, asked, report
        self.channels: dict[str, SignedChannel] = {}
        self._clocks: dict[str, tuple[float, float]] = {}  # (this host's instant, that host's)
        self._numbers = itertools.count()
        self._num_done = 0
        when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
        self.found = Found(list(places), asked, when)

    def meet(self) -> None:
        """Connect to all hosts; wait for those that start later."""
        deadline = time.monotonic() + self._asked.wait_seconds
        has_reported = False
        for name, place in self._places.items():
            while True:
                try:
                    channel = call(place, self._secret, name, 5.0)
                    break
                except PeerError as error:
                    late = time.monotonic() > deadline
                    if late or not isinstance(error, UnreachableError):
                        after = (
                            f" (waited {self._asked.wait_seconds:.0f} s: is netsim probe running there?)"
                            if late
                            else ""
                        )
                        raise type(error)(f"{error}{after}") from None
                    if not has_reported:
                        self._report_here(f"waiting for {name} ({place[0]}:{place[1]})")
                        has_reported = True
                    time.sleep(0.5)
            self.channels[name] = channel
            sent, steady = time.time(), time.monotonic()
            channel.send(role="control", hosts=list(self._places))
            theirs = self._reply(name, 15.0)
            self._clocks[name] = (steady, theirs["steady"])
            ahead = theirs["clock"] - (sent + time.time()) / 2
            if abs(ahead) > _MOST_CLOCK_SECONDS:
                which = "ahead" if ahead > 0 else "behind"
                remark = f"the clock of {name} is {abs(ahead):.0f} s {which}: no figure depends on it"
                self.found.remarks.append(remark)
                self._report_here(f"note: {remark}")

    def give_up(self, text: str) -> None:
        """Tell all hosts to stop."""
        for channel in self.channels.values():
            with contextlib.suppress(PeerError):
                channel.send(do="stop", text=text)
            channel.close()

    # --- asking --------------------------------------------------------------------------------------------

    def _reply(self, name: str, seconds: float) -> dict[str, Any]:
        reply = self.channels[name].receive(seconds)
        if "error" in reply:
            raise PeerError(reply["error"])
        return reply

    def _ask(self, name: str, limit_seconds: float, /, **what: Any) -> dict[str, Any]:
        self.channels[name].send(**what)
        return self._reply(name, limit_seconds)

    def _done(self, text: str) -> None:
        self._num_done += 1
        line = f"[{self._num_done}/{self._asked.num_steps(len(self._places))}] {text}"
        for channel in self.channels.values():
            channel.send(do="note", text=line)

    # --- measuring -----------------------------------------------------------------------------------------

    def measure(self) -> None:
        """Measure everything, round trips first: hosts that cannot reach each other fail before data are sent."""
        names = list(self._places)
        for one, other in itertools.combinations(names, 2):
            there = self._ask(one, 60.0, do="ping", to=other, place=self._places[other])
            back = self._ask(other, 60.0, do="ping", to=one, place=self._places[one])
            rtt = min(there["rtt"], back["rtt"])
            self.found.rtt_seconds[one, other] = self.found.rtt_seconds[other, one] = rtt
            self._done(f"{one} and {other}: round trip {rtt * 1e3:.3g} ms")
        for one, other in itertools.permutations(names, 2):
            self._measure_route(one, other)
        if len(names) > 2:
            for name in names:
                self._measure_host(name)
        if self._asked.gloo:
            for one, other in itertools.combinations(names, 2):
                self._time_gloo(one, other)
        self._compare_clocks()

    def _measure_route(self, one: str, other: str) -> None:
        route = self.found.routes.setdefault((one, other), RouteResult())
        route.single, _, sender = self._send([(one, other)], 1)[0]
        self._done(f"{one} to {other}: {_rate(route.single)} with one stream")
        route.several, route.spread, sender = self._send([(one, other)], self._asked.streams)[0]
        route.again = sender["again"] / sender["sent"] if sender["sent"] else 0.0
        route.loaded_rtt_seconds, route.busy, route.machine = sender["rtt"], sender["busy"], sender["machine"]
        route.mtu_bytes = sender["mtu"]
        self._done(
            f"{one} to {other}: {_rate(route.several)} with {format_count(self._asked.streams, 'stream')}"
        )

    def _measure_host(self, name: str) -> None:
        others = [other for other in self._places if other != name]
        streams = max(2, self._asked.streams // 2)
        for kept, pairs, verb in (
            (self.found.sends, [(name, other) for other in others], "to"),
            (self.found.receives, [(other, name) for other in others], "from"),
        ):
            rates = self._send(pairs, streams)
            together = sum(rate for rate, _, _ in rates)
            alone = sum(self.found.routes[pair].best for pair in pairs)
            kept[name] = Limit(together, alone, max(spread for _, spread, _ in rates))
            self._done(f"{name} {verb} all at once: {_rate(together)} (alone, their sum: {_rate(alone)})")

    def _send(
        self, pairs: Sequence[tuple[str, str]], streams: int
    ) -> list[tuple[float, float, dict[str, Any]]]:
        """Send between all pairs at once; return goodput, spread and the sender's figures of each."""
        share = self._asked.most_bytes // len(pairs)
        rtt = max(self.found.rtt_seconds[pair] for pair in pairs)
        seconds = max(self._asked.seconds, _LEAST_TRIPS * rtt)
        warm = max(0.3 * seconds, _WARM_TRIPS * rtt)
        numbers = {pair: f"{next(self._numbers)}" for pair in pairs}
        senders = list(dict.fromkeys(one for one, _ in pairs))
        for sender in senders:
            targets = [
                (to, *self._places[to], numbers[one, to], streams) for one, to in pairs if one == sender
            ]
            self.channels[sender].send(
                do="send", targets=targets, seconds=seconds, bytes=share * len(targets)
            )
        replies = {sender: self._reply(sender, seconds + 60.0) for sender in senders}
        rates = []
        for pair in pairs:
            arrived = self._ask(
                pair[1], 30.0, do="arrived", id=numbers[pair], streams=streams, seconds=seconds, warm=warm
            )
            if arrived["rate"] <= 0:
                raise PeerError(
                    f"{pair[0]} to {pair[1]}: nothing arrived within {seconds:g} s: give more with --seconds"
                )
            rates.append((arrived["rate"], arrived["spread"], replies[pair[0]]))
        time.sleep(0.1 + 2 * rtt)  # until queues have drained
        return rates

    def _time_gloo(self, one: str, other: str) -> None:
        port = self._ask(one, 15.0, do="port")["port"]
        number = f"{next(self._numbers)}"
        master = self._places[one][0]
        for rank, name in enumerate((one, other)):
            self._ask(name, 15.0, do="gloo", id=number, rank=rank, master=master, port=port)
        timed = self._ask(one, 120.0, do="gloo result", id=number, seconds=90.0)
        self._ask(other, 30.0, do="gloo result", id=number, seconds=15.0)
        self.found.gloo[one, other] = timed
        self._done(
            f"{one} and {other}: gloo takes {timed['small'] * 1e3:.3g} ms for 4 bytes,"
            f" {_rate(timed['there'])} there, {_rate(timed['back'])} back"
        )

    def _compare_clocks(self) -> None:
        """Check that the hosts' clocks run at one rate, since each measures by its own."""
        for name, (mine, theirs) in self._clocks.items():
            began = time.monotonic()
            now = self._ask(name, 15.0, do="clock")["steady"]
            ended = time.monotonic()
            gone, slack = (began + ended) / 2 - mine, ended - began + 0.1
            if abs((now - theirs) - gone) > _MOST_CLOCK_DRIFT * gone + slack:
                raise PeerError(
                    f"{name}: its clock went {now - theirs:.2f} s while that of {next(iter(self._places))} went"
                    f" {gone:.2f} s: rates cannot be compared; correct the clock of one of them"
                )


def _rate(bits_per_second: float) -> str:
    return f"{bits_per_second / 1e6:.4g} Mbit/s"


def topology_text(found: Found, name: str) -> str:
    """Write the topology as YAML: a region of one host each, its own line as `nic`, and a link for each pair.

    Rates are goodput, `measured` with the streams that reached it; "at least" where a host's own line was the limit.
    """
    builder = TopologyBuilder(name, _sources(found), protocol="linux-tcp", are_ends_measured=True)
    builder.regions = {host: _region(found, host) for host in found.hosts}
    for one, other in itertools.combinations(found.hosts, 2):
        builder.links.append(_link(found, one, other))
    return builder.to_yaml()


def _sources(found: Found) -> list[str]:
    asked = found.asked
    sources = [
        f"netsim probe of {len(found.hosts)} hosts, {found.when}: each route alone for {asked.seconds:g} s with one"
        f" stream and with {asked.streams}{', each host with all others at once' if len(found.hosts) > 2 else ''}.",
        "Rates are the best goodput, of as many streams together as `measured` says; `stream` is that of one.",
        "Latencies are half the least round trip.",
    ]
    if len(found.hosts) == 2:
        sources.append("Of two hosts the path's limit and the hosts' own cannot be distinguished.")
    return [*sources, *(f"Note: {remark}." for remark in found.remarks)]


def _region(found: Found, host: str) -> str:
    sends = _line(found.sends.get(host), [route for (one, _), route in found.routes.items() if one == host])
    receives = _line(
        found.receives.get(host), [route for (_, to), route in found.routes.items() if to == host]
    )
    text = f"sends {sends[1]}; receives {receives[1]}"
    entry = region_entry(1, _round_rate(sends[0]), _round_rate(receives[0]), 0.0, found.asked.streams)
    return f"{entry}  # {text}"


def _line(limit: Limit | None, routes: Sequence[RouteResult]) -> tuple[float, str]:
    """Goodput of a host's own line, and the evidence in words."""
    if limit is None:
        return max(route.best for route in routes), "at least this, its one route"
    if limit.is_own:
        share = limit.together / limit.alone
        return (
            limit.together,
            f"this at most, +-{limit.spread / 2:.1%} ({share:.0%} of the sum of its routes alone)",
        )
    return limit.alone, "at least this, the sum of its routes"


def _link(found: Found, one: str, other: str) -> LinkLine:
    there, back = found.routes[one, other], found.routes[other, one]
    notes = [f"round trip {found.rtt_seconds[one, other] * 1e3:.4g} ms"]
    for source, target, route in ((one, other, there), (other, one, back)):
        notes.append(f"{source} to {target} {_describe(found, source, target, route)}")
    timed = found.gloo.get((one, other))
    if timed:
        notes.append(
            f"gloo: {timed['small'] * 1e3:.4g} ms for 4 bytes, {rate(_round_rate(timed['there']))} there,"
            f" {rate(_round_rate(timed['back']))} back (payload)"
        )
    latency = found.rtt_seconds[one, other] / 2
    # A stream that reaches what all of them together do needs no others.
    streams = [1 if route.single >= _AS_MUCH * route.best else found.asked.streams for route in (there, back)]
    rates = _round_rate(there.best), _round_rate(back.best)
    mtu = min(there.mtu_bytes, back.mtu_bytes)
    stated = mtu if mtu in _MTUS and mtu != PRESETS["linux-tcp"].mtu_bytes else None
    of_stream: Sequence[float | None] = (None, None)
    if streams != [1, 1]:
        at_least = (rate / count for rate, count in zip(rates, streams, strict=True))
        of_stream = [
            max(_round_rate(route.single), least)
            for route, least in zip((there, back), at_least, strict=True)
        ]
    return LinkLine.between(
        one, other, rates, round(latency, 7), "; ".join(notes), 0.0, streams, stated, of_stream
    )


def _describe(found: Found, source: str, target: str, route: RouteResult) -> str:
    words = [
        f"{rate(_round_rate(route.single))} with one stream,"
        f" {rate(_round_rate(route.several))} +-{route.spread / 2:.1%} with {found.asked.streams}"
    ]
    ends = (found.sends.get(source), found.receives.get(target))
    if any(limit is not None and limit.is_own and route.best > 0.93 * limit.together for limit in ends):
        words.append("at least this: a host's own line was the limit")
    if route.again > 0:
        words.append(f"{route.again:.2%} of segments sent again")
    if route.loaded_rtt_seconds > 0:
        words.append(f"round trip {route.loaded_rtt_seconds * 1e3:.3g} ms under load")
    if route.busy > _BUSY:
        words.append(f"UNSURE: the sender's processor was busy ({route.busy:.0%} of a core)")
    if route.machine > _BUSY:
        words.append(f"the sender's processors were {route.machine:.0%} busy")
    if route.spread > 2 * _UNSURE:
        words.append("UNSURE: it changed while it was measured")
    return ", ".join(words)


def _round_rate(bits_per_second: float) -> float:
    return float(f"{bits_per_second:.4g}")
