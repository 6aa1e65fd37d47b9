"""Faults and weather: changes of a network while it runs.

    faults = Faults(network)                                       # those of the topology's file
    faults.add(LinkEvent(at_seconds=3.0, links=(0,), is_up=False))   # and one added in Python
    history = simulate_weather(topology, until_seconds=60.0)         # the same by itself, for pictures and reports
    history.links[3]                                                 # [(0.0, 100e6), (10.0, 0.0), (15.0, 100e6)]

Transfers in flight see a change at once. Over a dead link nothing moves: transfers wait, with what they have,
until it is back; under TCP a connection that was cut for longer than its time-out then starts slowly. A host
that crashes loses what is in flight from and to it; what is sent to or from it later waits for its return.
Routes do not change.

Events and rows of traces come to an end, drift and background traffic do not. Where nothing else is left to
happen, no transfer moves, and no event or row to come can revive a dead link, progress is impossible: the run ends at
once with an error that names the link or host, if it is one, and the waiting transfers or ranks.

Weather comes first in its instant. Drift draws from a stream of its own for each link, made from the seed and
the names of the link's ends: the weather does not depend on the run.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from typing import TYPE_CHECKING, NamedTuple

from netsim.errors import DeadlockError
from netsim.network.clock import Clock, Order
from netsim.network.network import BackgroundConnection, Network
from netsim.network.trace import Recorder
from netsim.topology.weather import Background, Drift, Entry, HostEvent, LinkEvent, Trace, Weather, check
from netsim.weather.conditions import Conditions, Quantity
from netsim.weather.traffic import BackgroundTraffic, drift_factors

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence

    import simpy

    from netsim.network.network import Outage, Waiting
    from netsim.topology.topology import Topology

__all__ = ["Entry", "Faults", "WeatherHistory", "simulate_weather"]

_MOST_NAMES = 8
_MOST_CHANGES = 20_000


class _Step(NamedTuple):
    """The next action of a weather entry, and the links that it may revive."""

    instant: float
    act: Callable[[], None]
    revives: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class _Crash:
    """Cause that keeps the links of a host down."""

    host: int
    number: int


class Faults:
    """Applies weather to a network as its clock goes on.

    Args:
        network: on which it acts.
        weather: None: that of the network's topology.

    Attributes:
        on_stuck: called with a line that names the dead links or hosts when waiting transfers can make no progress, or
            their connection is given up; by default raises DeadlockError.
        on_change: called at each instant with a change.
    """

    def __init__(self, network: Network, weather: Weather | None = None) -> None:
        self._network = network
        self._conditions = Conditions(network)
        self._steps: list[tuple[float, int, _Step, Iterator[_Step]]] = []
        self._num_entries = 0
        self._links_of_host: dict[int, tuple[int, ...]] = {}
        self._crashes: defaultdict[int, set[_Crash]] = defaultdict(set)  # by host
        self._turn_at = math.inf
        self.on_stuck: Callable[[str], None] = _give_up
        self.on_change: Callable[[], None] = _nothing
        network.on_give_up = self._give_up_transfer
        given = network.topology.weather if weather is None else weather
        entries: list[Entry] = [*given.link_events, *given.host_events, *given.traces]
        for entry in [*entries, *given.background, *given.drift]:
            self._plan(entry)
        self._act()

    def add(self, entry: Entry) -> None:
        """Add an entry; its changes until this instant happen before this returns.

        Raises InputError for an entry that makes no sense.
        """
        topology = self._network.topology
        check(entry, topology.hosts, len(topology.links))
        self._plan(entry)
        self._act()

    def run_until(self, is_over: Callable[[], bool]) -> None:
        """Let the clock go on until `is_over()`; calls `on_stuck` where that can never be."""
        env = self._network.env
        while not is_over():
            if self.is_hopeless():
                self.on_stuck(self.blame())
                return
            env.step()

    def is_hopeless(self) -> bool:
        """Return whether no event to come can help a waiting transfer or rank; to be called before the clock advances.

        Weather and background traffic, which never end, may still be on the clock.
        """
        env = self._network.env
        upcoming = env.peek()
        if math.isinf(upcoming):
            return True
        if not self._num_entries or upcoming <= env.now:  # no weather, or something at this very instant
            return False
        if not env.goes_on_with(_is_weather) or self._moves():
            return False
        dead = self._network.dead_links
        return not (dead and self.may_come_back(dead))

    def blame(self) -> str:
        """Describe the links and hosts that keep transfers from ever moving again; "" where there are none."""
        network = self._network
        waiting = network.transfers_waiting(_is_background)
        dead = {link for each in waiting for link in each.links} or network.dead_links
        return self._dead_places(dead)

    def _dead_places(self, dead: Collection[int]) -> str:
        """Describe the hosts and links that keep transfers or ranks waiting, and since when."""
        network, conditions = self._network, self._conditions
        causes = {cause for link in dead for cause in conditions.causes(link)}
        crashed = {cause.host for cause in causes if isinstance(cause, _Crash)}
        crashed.update(+network.downtime.awaited)
        values, at_crashed = defaultdict[str, list[str]](list), set[int]()
        for host in sorted(crashed):
            at_host, since = self._links_at(host), network.downtime.since(host)
            at_crashed.update(at_host)
            fate = f"crashed at {self._fate(since, at_host)}"
            values[fate].append(f"host {network.topology.hosts[host].name}")
        for link in sorted(set(dead) - at_crashed):
            ends, since = network.topology.links[link], conditions.dead_since(link)
            values[f"went dead at {self._fate(since, (link,))}"].append(f"link {ends.name}")
        return ", ".join(f"{_listed(names)} {fate}" for fate, names in values.items())

    def _fate(self, since: float | None, dead: Collection[int]) -> str:
        if not self.may_come_back(dead):
            return f"{since:.10g} s and never comes back"
        protocol = self._network.protocol
        return f"{since:.10g} s and stayed so for longer than {protocol.name} waits ({protocol.give_up_seconds:g} s)"

    def _give_up_transfer(self, waiting: Waiting) -> None:
        """Give up a connection: background traffic is lost, for other transfers the run ends."""
        if _is_background(waiting.connection):
            self._network.end_transfer(waiting.number)
        else:
            self.on_stuck(self._dead_places(waiting.links))

    # -- the clock -------------------------------------------------------------------------------------------

    def _plan(self, entry: Entry) -> None:
        if isinstance(entry, Drift):
            for link in entry.links:
                self._push(self._take_number(), self._drift(entry, link))
            return
        number = self._take_number()
        if isinstance(entry, LinkEvent):
            self._push(number, self._link_event(entry, number))
        elif isinstance(entry, HostEvent):
            self._push(number, self._host_event(entry, number))
        elif isinstance(entry, Trace):
            self._push(number, self._trace(entry))
        else:
            self._push(number, self._background(entry, number))

    def _take_number(self) -> int:
        self._num_entries += 1
        return self._num_entries

    def _push(self, number: int, steps: Iterator[_Step]) -> None:
        step = next(steps, None)
        if step is not None:
            heappush(self._steps, (step.instant, number, step, steps))

    def _act(self) -> None:
        """Carry out all that is due."""
        now = self._network.env.now
        has_acted = False
        while self._steps and self._steps[0][0] <= now:
            _, number, step, steps = heappop(self._steps)
            step.act()
            self._push(number, steps)
            has_acted = True
        if has_acted:
            self.on_change()
        if self._steps and self._steps[0][0] < self._turn_at:
            self._call_at(self._steps[0][0])

    def _call_at(self, instant: float) -> None:
        self._turn_at = instant
        self._network.env.at(instant, Order.WEATHER, self._on_turn)

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
        network = self._network
        dead, stand_still = network.dead_links, bool(+network.downtime.awaited)
        # Cheap tests first: this runs at every turn of the weather.
        if not (dead or stand_still) or self.may_come_back(dead):
            return False
        if self._moves():
            return False
        return stand_still or bool(network.transfers_waiting(_is_background))

    def _moves(self) -> bool:
        """Return whether a transfer moves, or the clock has events other than weather and background traffic."""
        return self._network.can_go_on(_is_background) or self._network.env.has_others(_is_weather)

    def may_come_back(self, dead: Collection[int]) -> bool:
        """Return whether one of these links may carry something again, by an event or a row to come, or by drift."""
        if any(self._conditions.is_adrift(link) for link in dead):
            return True
        return any(not step.revives.isdisjoint(dead) for _, _, step, _ in self._steps)

    # -- steps of entries -------------------------------------------------------------------------------------

    def _link_event(self, event: LinkEvent, number: int) -> Iterator[_Step]:
        conditions, links = self._conditions, event.links
        concerned = frozenset(links)
        if event.is_up is not None:
            if event.is_up:
                yield _Step(event.at_seconds, lambda: self._bring_up(links), concerned)
                return
            over = concerned if event.for_seconds is not None else frozenset()
            yield _Step(event.at_seconds, lambda: conditions.put_down(links, number), over)
            if event.for_seconds is not None:
                end = event.at_seconds + event.for_seconds
                yield _Step(end, lambda: conditions.lift(links, number), concerned)
            return
        values: dict[Quantity, float | None] = {
            "bits_per_second": event.bits_per_second,
            "latency_seconds": event.latency_seconds,
            "loss": event.loss,
        }
        quantity, value = next((name, value) for name, value in values.items() if value is not None)
        yield _Step(event.at_seconds, lambda: conditions.force(links, quantity, value, number), concerned)
        if event.for_seconds is not None:
            end = event.at_seconds + event.for_seconds
            yield _Step(end, lambda: conditions.release(links, quantity, number), concerned)

    def _bring_up(self, links: tuple[int, ...]) -> None:
        """End events that keep links down; crashed hosts stay down."""
        for link in links:
            for cause in self._conditions.causes(link):
                if not isinstance(cause, _Crash):
                    self._conditions.lift((link,), cause)

    def _host_event(self, event: HostEvent, number: int) -> Iterator[_Step]:
        links = self._links_at(event.host)
        if event.is_up:
            yield _Step(event.at_seconds, lambda: self._bring_back(event.host), frozenset(links))
            return
        crash = _Crash(event.host, number)
        over = frozenset(links if event.for_seconds is not None else ())
        yield _Step(event.at_seconds, lambda: self._crash(crash), over)
        if event.for_seconds is not None:
            end = event.at_seconds + event.for_seconds
            yield _Step(end, lambda: self._end_crash(crash), frozenset(links))

    def _crash(self, crash: _Crash) -> None:
        self._network.take_arrivals()
        self._crashes[crash.host].add(crash)
        self._conditions.put_down(self._links_at(crash.host), crash)
        self._network.drop_transfers(crash.host)
        self._network.downtime.begin(crash.host)

    def _end_crash(self, crash: _Crash) -> None:
        causes = self._crashes[crash.host]
        causes.discard(crash)
        self._conditions.lift(self._links_at(crash.host), crash)
        if not causes:
            self._network.downtime.end(crash.host)

    def _bring_back(self, host: int) -> None:
        for crash in list(self._crashes[host]):
            self._end_crash(crash)

    def _links_at(self, host: int) -> tuple[int, ...]:
        """The links that begin or end at a host."""
        if host not in self._links_of_host:
            topology = self._network.topology
            name = topology.hosts[host].name
            self._links_of_host[host] = tuple(
                link.index for link in topology.links if name in (link.source, link.target)
            )
        return self._links_of_host[host]

    def _trace(self, trace: Trace) -> Iterator[_Step]:
        conditions, concerned = self._conditions, frozenset(trace.links)
        for instant, value in zip(trace.times_seconds, trace.values, strict=True):
            yield _Step(
                instant,
                lambda value=value: conditions.trace(trace.links, trace.quantity, value),  # type: ignore[misc]
                concerned,
            )

    def _background(self, entry: Background, number: int) -> Iterator[_Step]:
        traffic = BackgroundTraffic(self._network, entry, number)
        stop = math.inf if entry.stop_seconds is None else entry.stop_seconds
        if entry.every_seconds is None:
            yield _Step(entry.start_seconds, traffic.send)
            if stop < math.inf:
                yield _Step(stop, traffic.stop)
            return
        count = 0
        while (instant := entry.start_seconds + count * entry.every_seconds) < stop:
            yield _Step(instant, traffic.send)
            count += 1

    def _drift(self, drift: Drift, link: int) -> Iterator[_Step]:
        ends = self._network.topology.links[link]
        for instant, factor in drift_factors(drift, ends.name):
            yield _Step(instant, lambda factor=factor: self._conditions.drift(link, factor))  # type: ignore[misc]


def _listed(names: list[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def _nothing() -> None:
    """Ignore a changed link."""


def _give_up(reason: str) -> None:
    if not reason:
        raise DeadlockError("deadlock: transfers wait, and nothing that is still to happen can move them")
    raise DeadlockError(f"{reason}, and transfers wait for it: let an event bring it back")


def _is_background(connection: Hashable) -> bool:
    return isinstance(connection, BackgroundConnection)


def _is_weather(event: simpy.Event) -> bool:
    """Return whether an event on the clock belongs to the weather, which is no progress by itself."""
    return all(isinstance(getattr(call, "__self__", None), Faults) for call in event.callbacks or ())


# --- without traffic ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WeatherHistory:
    """Changes of links and hosts.

    Attributes:
        links: link index -> (instant, bits per second that it carries from then on), from 0 s; only of links that
            ever change.
        outages: crashes of hosts; without an end where they last until the end.
        until_seconds: to where it was simulated; sooner than asked for where too much happens to be shown.
    """

    links: Mapping[int, Sequence[tuple[float, float]]]
    outages: Sequence[Outage]
    until_seconds: float


def simulate_weather(
    topology: Topology, until_seconds: float, most_changes: int = _MOST_CHANGES
) -> WeatherHistory:
    """Simulate the weather of a topology, without the traffic of others.

    Args:
        topology: the network, whose weather is played.
        until_seconds: virtual time at which it ends.
        most_changes: number of changes at which it ends sooner.
    """
    clock = Clock()
    network = Network(clock, replace(topology, weather=replace(topology.weather, background=())))
    changes = _ChangeCounter()
    changes.watch(network)
    Faults(network)
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
