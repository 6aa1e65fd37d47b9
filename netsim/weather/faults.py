"""Faults and weather: changes of a network while it runs.

    faults = Faults(network)                                       # those of the topology's file
    faults.add(LinkEvent(at="3 s", link=("us", "eu"), down=True))    # and one added in Python
    history = simulate_weather(topology, until_seconds=60.0)         # the same by itself, for pictures and reports
    history.links[3]                                                 # [(0.0, 100e6), (10.0, 0.0), (15.0, 100e6)]

Transfers in flight see a change at once. Over a dead link nothing moves: transfers wait, with what they have,
until it is back; under TCP a connection that was cut for longer than its time-out then starts slowly. A host
that crashes loses what is in flight from and to it; what is sent to or from it later waits for its return.
A host that is paused loses nothing: what is in flight from and to it stands still, and then continues. Routes do not
change.

Events and rows of traces come to an end, drift and background traffic do not. Where nothing else is left to
happen, no transfer moves, and no event or row to come can revive a dead link, progress is impossible: the run ends at
once with an error that names the link or host, if it is one, and the waiting transfers or ranks.

Weather comes first in its instant. Drift draws from a stream of its own for each link, made from the seed and
the names of the link's ends: the weather does not depend on the run.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cache, partial
from heapq import heappop, heappush, merge
from typing import TYPE_CHECKING, Any, NamedTuple

from netsim.errors import DeadlockError, InputError
from netsim.network.clock import Clock, Order
from netsim.network.connections import ConnectionPool
from netsim.network.network import MOST_BYTES, BackgroundConnection, Network
from netsim.network.trace import Recorder
from netsim.topology.weather import Background, Drift, Entry, HostEvent, LinkEvent, OfLink, Trace, Weather
from netsim.units import format_count, format_list, shown

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence

    import simpy

    from netsim.network.network import Outage, Waiting
    from netsim.topology.graph import Link
    from netsim.topology.protocol import Protocol
    from netsim.topology.topology import Topology

__all__ = [
    "BackgroundTraffic",
    "Entry",
    "Faults",
    "WeatherHistory",
    "drift_factors",
    "network_with_weather",
    "simulate_weather",
]

# Figures of links by the key of an entry that changes them: field of a Link, and setter of the network.
_FIGURES: dict[str, tuple[str, Callable[[Network, int, float], None]]] = {
    "bandwidth": ("bits_per_second", Network.set_capacity),
    "latency": ("latency_seconds", Network.set_latency),
    "loss": ("loss", Network.set_loss),
}


class _Condition:
    """Condition of a link: the values of the topology, and the causes that override them.

    A cause is named by any hashable. The last value forced stands, and goes when its own cause ends.

    Attributes:
        in_force: the resulting values; an event's overrides a trace's, which overrides the topology's.
        traced: values of traces.
        factors: by which causes such as drift multiply the rate.
        forced: cause and value of events.
        downs: causes that keep the link down.
        dead_since: instant from which on a link that carries nothing has done so.
    """

    __slots__ = ("dead_since", "downs", "factors", "forced", "in_force", "is_up", "stated", "traced")

    def __init__(self, link: Link) -> None:
        self.stated: dict[str, float] = {key: getattr(link, field) for key, (field, _) in _FIGURES.items()}
        self.in_force = dict(self.stated)
        self.traced: dict[str, float] = {}
        self.factors: dict[Hashable, float] = {}
        self.forced: dict[str, tuple[Hashable, float]] = {}
        self.downs: set[Hashable] = set()
        self.is_up = True
        self.dead_since = 0.0

    @property
    def is_dead(self) -> bool:
        return not (self.is_up and self.in_force["bandwidth"])

    def value(self, key: str) -> float:
        _, value = self.forced.get(key, (None, self.traced.get(key, self.stated[key])))
        return value * math.prod(self.factors.values()) if key == "bandwidth" else value

    def release(self, key: str, cause: Hashable) -> None:
        """End an event that set a figure; if another has set it since, that value stays."""
        if self.forced.get(key, (None,))[0] == cause:
            del self.forced[key]


# A steady sender's transfer is as long as this at its own rate, and is followed by another.
_STEADY_SECONDS = 1e6
# Most transfers of one entry at once. Offered more than a link carries they would grow without bound, and every
# share would shrink to nothing: then no run ends.
_MOST_AT_ONCE = 100


class BackgroundTraffic:
    """An entry of background traffic on a network.

    Args:
        network: on which it is sent.
        background: the entry.
        entry: its number, for the names of connections.
    """

    def __init__(self, network: Network, background: Background, entry: int) -> None:
        self._network = network
        self._background = background
        self._source, self._target = map(network.topology.host_index, (background.from_, background.to))
        self._entry = entry
        self._steady: int | None = None
        self._pool = ConnectionPool()

    def send(self) -> None:
        """Start the steady transfer, or send one of the periodic ones unless a link on its route is dead."""
        num_bytes = self._background.bytes
        if num_bytes is None:
            self._send_steadily()
            return
        is_dead = self._network.is_dead_end(self._source, self._target)
        if is_dead or self._pool.num_taken == _MOST_AT_ONCE:
            return
        connection = self._pool.take()
        free = partial(self._pool.free, connection)
        self._network.send(
            self._source,
            self._target,
            num_bytes,
            free,
            connection=BackgroundConnection(self._entry, connection),
            on_dropped=free,
        )

    def stop(self) -> None:
        """End the steady transfer."""
        if self._steady is not None and self._network.is_in_flight(self._steady):
            self._network.abort(self._steady)
        self._steady = None

    def _send_steadily(self) -> None:
        network = self._network
        topology, protocol = network.topology, network.protocol
        links = [topology.links[link] for link in topology.route(self._source, self._target)]
        rate = (self._background.rate or 0.0) / 8 * protocol.over(links).payload_share
        self._steady = network.send(
            self._source,
            self._target,
            min(rate * _STEADY_SECONDS, MOST_BYTES),
            self._send_steadily,
            connection=BackgroundConnection(self._entry, 0),
            on_dropped=self._send_again,
            most_bytes_per_second=rate,
        )

    def _send_again(self) -> None:
        """Send again after a crash, on the host's return, unless it stops at this instant."""
        if self._steady is not None:
            self._send_steadily()


def drift_factors(drift: Drift, link: str) -> Iterator[tuple[float, float]]:
    """Yield instants in seconds and the factors that hold from then on, without end.

    Lognormal: a factor of mean 1 at every interval, the first at 0. Regime: the first of the levels at 0; each
    holds for an exponential time, and then any other follows with equal chance (a Markov chain in continuous
    time).

    Args:
        drift: of which kind, and its seed.
        link: names the link; each has a stream of its own.
    """
    import numpy as np

    digest = hashlib.sha256(link.encode()).digest()
    random = np.random.default_rng([drift.seed, *np.frombuffer(digest, dtype=np.uint32).tolist()])
    if drift.kind == "lognormal":
        assert drift.sigma is not None
        sigma = drift.sigma
        count = 0
        while True:
            yield count * drift.every, math.exp(sigma * random.standard_normal() - sigma**2 / 2)
            count += 1
    assert drift.levels is not None
    instant, level = 0.0, 0
    while True:
        yield instant, drift.levels[level]
        instant += drift.every * random.standard_exponential()
        level = (level + 1 + int(random.integers(len(drift.levels) - 1))) % len(drift.levels)


_MOST_NAMES = 8
_MOST_CHANGES = 20_000


class _Step(NamedTuple):
    """The next action of a weather entry, and the links that it may revive."""

    instant: float
    act: Callable[[], None]
    revives: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class _Crash:
    """Cause that keeps the links of a host down; one that `pauses` it leaves them up."""

    host: int
    number: int
    pauses: bool = False


class Faults:
    """Applies weather to a network as its clock advances.

    Args:
        network: on which it acts.
        weather: None: that of the network's topology.

    Attributes:
        on_stuck: called with a line that names dead links or hosts if waiting transfers can make no progress, or their
            connection is given up; raises DeadlockError by default.
        on_change: called at each instant with a change.
    """

    def __init__(self, network: Network, weather: Weather | None = None) -> None:
        if not isinstance(network, Network) or not isinstance(weather, Weather | None):
            raise InputError(
                f"Faults: expected a Network and a Weather, got {shown(network)} and {shown(weather)}"
            )
        if network.has_faults:
            raise InputError(
                "Faults: this network has its Faults already: add entries to those with add(...)"
            )
        network.has_faults = True
        self._network = network
        self._conditions: dict[int, _Condition] = {}  # by link
        self._steps: list[tuple[float, int, _Step, Iterator[_Step]]] = []
        self._num_entries = 0
        self._claims = set[tuple[object, ...]]()
        links = network.topology.links
        names = [host.name for host in network.topology.hosts]
        # Links that begin or end at a host.
        self._links_at = cache(
            lambda host: tuple(link.index for link in links if names[host] in (link.source, link.target))
        )
        self._crashes: defaultdict[int, set[_Crash]] = defaultdict(set)  # by host
        self._turn_at = math.inf
        self.on_stuck: Callable[[str], None] = self._give_up
        self.on_change: Callable[[], None] = lambda: None
        network.on_give_up = self._give_up_transfer
        network.lacks_weather = False
        for entry in (network.topology.weather if weather is None else weather).entries():
            self._plan(entry)
        self._act()

    def add(self, entry: Entry) -> None:
        """Add an entry; its changes at this instant happen before this returns.

        Raises InputError for what is no entry, begins in the past, or names hosts and links that are not there.
        """
        if type(entry) not in _STEPS:
            *kinds, last = (kind.__name__ for kind in _STEPS)
            raise InputError(
                f"Faults.add: {entry!r} is no entry of weather: give a {', '.join(kinds)} or {last}"
            )
        for key, error in entry.problems(self._network.topology):
            raise type(error)(f"{type(entry).__name__}.{key}: {error}")
        begin, now = next(entry.instants(), math.inf), self._network.env.now
        if begin < now and not isinstance(entry, Trace):  # whose past rows say what holds now
            raise InputError(
                f"Faults.add: {entry} begins at {begin:.10g} s, and it is {now:.10g} s: give a time from now on"
            )
        self._plan(entry)
        self._act()

    def run_until(self, is_over: Callable[[], bool]) -> None:
        """Advance the clock until `is_over()`; call `on_stuck` if progress is impossible."""
        env = self._network.env
        while not is_over():
            stop = self.find_stop()
            if is_over():  # the network has had a turn
                return
            if stop is not None:
                self.on_stuck(stop)
                return
            env.step()

    def find_stop(self) -> str | None:
        """Describe, as `blame`, why no future event can help a waiting transfer or rank; None while one can.

        To be called before the clock advances. Weather and background traffic, which never end, may still be on the
        clock. The network completes this instant, in which transfers may arrive.
        """
        env = self._network.env
        if math.isinf(env.peek()):
            return self.blame()
        # Without weather that is all. Transfers of a steady sender follow each other for ever: before the network has
        # had its turn in the instant of the next one, everything seems to move.
        if not self._num_entries or not env.settle() or env.peek() <= env.now:
            return None
        if not env.only_weather_is_next() or self._moves():
            return None
        return None if self.may_come_back(self._network.dead_links, self._still()) else self.blame()

    def blame(self) -> str:
        """Describe the links and hosts that block transfers for good; "" if there are none."""
        network = self._network
        waiting = network.transfers_waiting()
        dead = {link for each in waiting for link in each.links} or network.dead_links
        return self._dead_places(dead)

    def _dead_places(self, dead: Collection[int]) -> str:
        """Describe the hosts and links that block transfers or ranks, and since when."""
        network = self._network
        causes = {cause for link in dead for cause in self._condition(link).downs}
        crashed = {cause.host for cause in causes if isinstance(cause, _Crash)}
        crashed.update(+network.downtime.awaited)
        values, at_crashed = defaultdict[str, list[str]](list), set[int]()
        for host in sorted(crashed):
            at_host, since = self._links_at(host), network.downtime.since(host)
            at_crashed.update(at_host)
            fate = f"crashed at {self._fate(since, at_host, [host])}"
            values[fate].append(f"host {network.topology.hosts[host].name}")
        for link in sorted(set(dead) - at_crashed):
            ends, since = network.topology.links[link], self._condition(link).dead_since
            values[f"went dead at {self._fate(since, (link,))}"].append(f"link {ends.name}")
        return ", ".join(
            f"{format_list(names, _MOST_NAMES)} {fate.replace('comes', 'come') if names[1:] else fate}"
            for fate, names in values.items()
        )

    def _fate(self, since: float | None, dead: Collection[int], hosts: Iterable[int] = ()) -> str:
        if not self.may_come_back(dead, hosts):
            return f"{since:.10g} s and never comes back"
        protocol = self._network.protocol
        return f"{since:.10g} s and stayed so for longer than {protocol.name} waits ({protocol.give_up_seconds:g} s)"

    def _give_up(self, reason: str) -> None:
        if reason:
            raise DeadlockError(f"{reason}, and transfers wait for it: let an event bring it back")
        in_flight = format_count(self._network.num_in_flight, "transfer")
        raise DeadlockError(
            f"deadlock: what the run waits for cannot come: {in_flight} in flight, no link dead, nothing left to happen"
        )

    def _give_up_transfer(self, waiting: Waiting) -> None:
        """Give up a connection: background traffic is lost, for other transfers the run ends."""
        if isinstance(waiting.connection, BackgroundConnection):
            self._network.end_transfer(waiting.number)
        else:
            self.on_stuck(self._dead_places(waiting.links))

    # -- the clock -------------------------------------------------------------------------------------------

    def _plan(self, entry: Entry) -> None:
        topology = self._network.topology
        links = entry.links(topology) if isinstance(entry, OfLink) else ()
        claims = entry.claims(topology) if isinstance(entry, OfLink) else set()
        if not self._claims.isdisjoint(claims):
            raise InputError(f"{entry}: a second one of its kind on this link: give one")
        self._claims |= claims
        self._num_entries += 1
        self._push(self._num_entries, _STEPS[type(entry)](self, entry, links, self._num_entries))

    def _push(self, number: int, steps: Iterator[_Step]) -> None:
        step = next(steps, None)
        if step is not None:
            heappush(self._steps, (step.instant, number, step, steps))

    def _act(self) -> None:
        """Carry out the steps that are due."""
        now = self._network.env.now
        has_acted = False
        while self._steps and self._steps[0][0] <= now:
            _, number, step, steps = heappop(self._steps)
            self._push(number, steps)
            step.act()
            has_acted = True
        if has_acted:
            self.on_change()
        if self._steps and self._steps[0][0] < self._turn_at:
            self._turn_at = self._steps[0][0]
            self._network.env.at(self._turn_at, Order.WEATHER, self._on_turn)

    def _on_turn(self, event: simpy.Event) -> None:
        if self._network.env.now < self._turn_at:
            return  # an earlier one took its place
        self._turn_at = math.inf
        if self._is_stuck():  # as all instants before this one have left it
            self.on_stuck(self.blame())
        self._act()

    # -- progress ------------------------------------------------------------------------------------------------

    def _is_stuck(self) -> bool:
        """Return whether a transfer or rank waits for the network and no event to come can help."""
        dead, still = self._network.dead_links, self._still()
        # Cheap tests first: this runs at every turn of the weather.
        if not (dead or still) or self.may_come_back(dead, still) or self._moves():
            return False
        return bool(still or self._network.transfers_waiting())

    def _still(self) -> set[int]:
        """Hosts that are paused, or have crashed and are awaited."""
        downtime = self._network.downtime
        return {*+downtime.awaited, *downtime.paused}

    def _moves(self) -> bool:
        """Return whether a transfer moves, or the clock has events other than weather and background traffic."""
        return self._network.can_move() or self._network.env.has_progress()

    def may_come_back(self, dead: Iterable[int], hosts: Iterable[int] = ()) -> bool:
        """Return whether one of these links may carry something again, by an event or a row to come, or by drift.

        Or whether one of these crashed hosts may come back.
        """
        changing = {number for _, number, _, _ in self._steps}
        for condition in map(self._condition, dead):
            zeros = {cause for cause, factor in condition.factors.items() if not factor}
            if condition.is_up and zeros and zeros <= changing:
                return True
        places = {*dead, *(~host for host in hosts)}
        return any(not step.revives.isdisjoint(places) for _, _, step, _ in self._steps)

    # -- links ---------------------------------------------------------------------------------------------------

    def _condition(self, link: int) -> _Condition:
        if link not in self._conditions:
            self._conditions[link] = _Condition(self._network.topology.links[link])
        return self._conditions[link]

    def _change(
        self,
        links: Iterable[int],
        act: Callable[[_Condition], object],
        keys: Iterable[str] = tuple(_FIGURES),
    ) -> None:
        """Change the causes that act on links, and set the resulting values on the network, of these keys."""
        network = self._network
        for link in links:
            condition = self._condition(link)
            was_dead = condition.is_dead
            act(condition)
            if condition.is_up == bool(condition.downs):
                condition.is_up = not condition.downs
                network.set_link_up(link, condition.is_up)
            for key in keys:
                value = condition.value(key)
                if value != condition.in_force[key]:
                    condition.in_force[key] = value
                    _FIGURES[key][1](network, link, value)
            if condition.is_dead and not was_dead:
                condition.dead_since = network.env.now

    # -- steps of entries -------------------------------------------------------------------------------------

    def _link_event(self, event: LinkEvent, links: tuple[int, ...], number: int) -> Iterator[_Step]:
        change = self._change
        if event.up:
            return iter([_Step(event.at, lambda: change(links, _bring_up), frozenset(links))])
        if event.down:
            return _begin_and_end(
                event,
                lambda: change(links, lambda link: link.downs.add(number)),
                lambda: change(links, lambda link: link.downs.discard(number)),
                links,
            )
        key, value = next((key, value) for key in _FIGURES if (value := getattr(event, key)) is not None)
        return _begin_and_end(
            event,
            lambda: change(links, lambda link: link.forced.update({key: (number, value)})),
            lambda: change(links, lambda link: link.release(key, number)),
            links,
            may_revive=True,
        )

    def _host_event(self, event: HostEvent, _: tuple[int, ...], number: int) -> Iterator[_Step]:
        host = self._network.topology.host_index(event.host)
        links = self._links_at(host)
        if event.up:
            return iter([_Step(event.at, lambda: self._end_crashes(host), frozenset((*links, ~host)))])
        if event.pause and not event.for_:
            return iter(())
        crash = _Crash(host, number, pauses=bool(event.pause))
        return _begin_and_end(
            event, lambda: self._crash(crash), lambda: self._end_crash(crash), (*links, ~host)
        )

    def _crash(self, crash: _Crash) -> None:
        self._network.take_arrivals()
        self._crashes[crash.host].add(crash)
        if crash.pauses:
            self._network.pause(crash.host)
            self._network.downtime.pause(crash.host)
            return
        self._change(self._links_at(crash.host), lambda link: link.downs.add(crash))
        self._network.drop_transfers(crash.host)
        self._network.downtime.begin(crash.host)

    def _end_crash(self, crash: _Crash) -> None:
        causes = self._crashes[crash.host]
        causes.discard(crash)
        if not any(cause.pauses for cause in causes):
            self._network.resume(crash.host)
        self._change(self._links_at(crash.host), lambda link: link.downs.discard(crash))
        if not causes:
            self._network.downtime.end(crash.host)

    def _end_crashes(self, host: int) -> None:
        for crash in list(self._crashes[host]):
            self._end_crash(crash)

    def _trace(self, trace: Trace, links: tuple[int, ...], number: int) -> Iterator[_Step]:
        def set_value(value: float) -> None:
            self._change(links, lambda link: link.traced.update({trace.key: value}))

        for instant, value in trace.rows:
            yield _Step(instant, partial(set_value, value), frozenset(links))

    def _traffic(self, entry: Background, _: tuple[int, ...], number: int) -> Iterator[_Step]:
        traffic = BackgroundTraffic(self._network, entry, number)
        stop = math.inf if entry.stop is None else entry.stop
        if entry.every is None:
            yield _Step(entry.start, traffic.send)
            if stop < math.inf:
                yield _Step(stop, traffic.stop)
            return
        count = 0
        while (instant := entry.start + count * entry.every) < stop:
            yield _Step(instant, traffic.send)
            count += 1

    def _drift(self, drift: Drift, links: tuple[int, ...], number: int) -> Iterator[_Step]:
        def of(link: int) -> Iterator[_Step]:
            def set_factor(factor: float) -> None:
                self._change((link,), lambda each: each.factors.update({number: factor}), ("bandwidth",))

            for instant, factor in drift_factors(drift, self._network.topology.links[link].name):
                yield _Step(instant, partial(set_factor, factor))

        return merge(*map(of, links), key=lambda step: step.instant)


_STEPS: dict[type, Callable[[Faults, Any, tuple[int, ...], int], Iterator[_Step]]] = {
    LinkEvent: Faults._link_event,
    HostEvent: Faults._host_event,
    Trace: Faults._trace,
    Background: Faults._traffic,
    Drift: Faults._drift,
}


def _begin_and_end(
    event: LinkEvent | HostEvent,
    begin: Callable[[], None],
    end: Callable[[], None],
    links: tuple[int, ...],
    *,
    may_revive: bool = False,
) -> Iterator[_Step]:
    """Begin of an event, and its end where it has a duration; the end, or also the begin, may revive its links."""
    lasts = event.for_
    yield _Step(event.at, begin, frozenset(links if lasts is not None or may_revive else ()))
    if lasts is not None:
        yield _Step(event.at + lasts, end, frozenset(links))


def _bring_up(link: _Condition) -> None:
    """End events that keep a link down; at crashed hosts it stays down."""
    link.downs = {cause for cause in link.downs if isinstance(cause, _Crash)}


def network_with_weather(
    topology: Topology, protocol: Protocol | None = None, recorder: Recorder | None = None
) -> tuple[Network, Faults]:
    """Make a network with its own clock, and the weather that changes it; `recorder` records both."""
    network = Network(Clock(), topology, protocol)
    if recorder is not None:
        recorder.watch(network)
    return network, Faults(network)


# --- without traffic ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WeatherHistory:
    """Changes of links and hosts.

    Attributes:
        links: link index -> (instant, bits per second that it carries from then on), from 0 s; only of links that
            ever change.
        outages: crashes of hosts; without an end where they last until the end.
        until_seconds: end of the simulation; earlier than requested after `most_changes`.
    """

    links: Mapping[int, Sequence[tuple[float, float]]]
    outages: Sequence[Outage]
    until_seconds: float


def simulate_weather(
    topology: Topology, until_seconds: float, most_changes: int = _MOST_CHANGES
) -> WeatherHistory:
    """Simulate the weather of a topology, without background traffic.

    Args:
        topology: the network, whose weather is played.
        until_seconds: virtual time of its end.
        most_changes: number of changes after which it ends.
    """
    if not isinstance(until_seconds, int | float) or not 0 <= until_seconds < math.inf:
        raise InputError(
            f"simulate_weather: until_seconds must be finite and not negative, got {until_seconds!r}"
        )
    changes = _ChangeCounter()
    quiet = replace(topology, weather=topology.weather.without_traffic())
    network, _ = network_with_weather(quiet, recorder=changes)
    clock = network.env
    while clock.peek() <= until_seconds and changes.num_changes < most_changes:
        clock.step()
    is_cut = changes.num_changes >= most_changes
    downtime = network.downtime
    return WeatherHistory(
        dict(sorted(changes.link_capacity.items())),
        [*downtime.outages, *downtime.under_way()],
        min(float(clock.now), until_seconds) if is_cut else until_seconds,
    )


class _ChangeCounter(Recorder):
    """Recorder that counts changes of links."""

    num_changes = 0

    def capacity_changed(self, link: int, bits_per_second: float) -> None:
        """Record and count a change."""
        super().capacity_changed(link, bits_per_second)
        self.num_changes += 1
