"""Laws 1 to 3 under faults: a machine that breaks and heals at random, and small scenarios exhaustively."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from test_network_laws import Account, check_rates
from worlds import use_sources

from netsim import (
    Background,
    Clock,
    Faults,
    HostEvent,
    LinkEvent,
    Network,
    Topology,
    Weather,
    schedule,
    start_collective,
)
from netsim.errors import DeadlockError
from netsim.network.clock import Order
from netsim.topology.topology import FloatArray

# a, b - left - right - c, d: the middle is shared and narrow.
TOPOLOGY = Topology.from_mapping(
    {
        "hosts": {name: {} for name in "abcd"},
        "routers": ["left", "right"],
        "links": [
            {"between": ["a", "left"], "bandwidth": "10 Mbit/s", "latency": "1 ms"},
            {"between": ["b", "left"], "up": "2 Mbit/s", "down": "20 Mbit/s", "latency": "5 ms"},
            {"between": ["left", "right"], "bandwidth": "8 Mbit/s", "latency": "30 ms"},
            {"between": ["c", "right"], "bandwidth": "10 Mbit/s", "latency": "0 s"},
            {"between": ["d", "right"], "bandwidth": "100 Mbit/s", "latency": "10 ms"},
        ],
        "protocol": "ideal",
    }
)


def ends_of(link: int) -> tuple[str, str]:
    return TOPOLOGY.links[link].source, TOPOLOGY.links[link].target


NUM_LINKS = len(TOPOLOGY.links)
FORCED = ["nothing", "a fifth", "half", "all"]
SHARES = dict(zip(FORCED, (0.0, 0.2, 0.5, 1.0), strict=True))


class Weathered(RuleBasedStateMachine):
    """Adds transfers, moves time, breaks and heals; its own model says what every link carries."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: dict[int, tuple[float, int, int, int]] = {}
        self.delivered: dict[int, float] = {}
        self.is_up = [True] * NUM_LINKS
        self.share = [1.0] * NUM_LINKS
        self.alive = [True] * len(TOPOLOGY.hosts)

    @initialize(protocol=st.sampled_from(["ideal", "linux-tcp", "gloo"]))
    def build(self, protocol: str) -> None:
        self.clock = Clock()
        self.network = Network(self.clock, TOPOLOGY, protocol)
        self.account = Account(self.network)
        self.faults = Faults(self.network, Weather())
        self.faults.on_stuck = lambda reason: None  # whatever is dead may be healed by the next rule

    @rule(
        src=st.integers(0, 3),
        dst=st.integers(0, 3),
        num_bytes=st.sampled_from([0, 1, 1000, 100_000, 2_000_000]),
        connection=st.integers(0, 1),
    )
    def send(self, src: int, dst: int, num_bytes: int, connection: int) -> None:
        number = len(self.sent)
        self.sent[number] = (self.clock.now, src, dst, num_bytes)
        self.network.send(src, dst, num_bytes, lambda: self._deliver(number), connection=connection)
        self._settle()

    @rule(seconds=st.sampled_from([0.001, 0.03, 0.1, 0.25, 1.0, 7.0]))
    def pass_time(self, seconds: float) -> None:
        self.clock.run(until=self.clock.now + seconds)
        self._settle()

    @rule(link=st.integers(0, NUM_LINKS - 1), up=st.booleans())
    def switch(self, link: int, up: bool) -> None:
        self.is_up[link] = up
        self._set(link, up=up or None, down=not up or None)
        self._settle()

    @rule(link=st.integers(0, NUM_LINKS - 1), share=st.sampled_from(FORCED))
    def degrade(self, link: int, share: str) -> None:
        self.share[link] = SHARES[share]
        rate = TOPOLOGY.links[link].bits_per_second * SHARES[share]
        self._set(link, bandwidth=rate)
        self._settle()

    @rule(link=st.integers(0, NUM_LINKS - 1), more=st.sampled_from([0.0, 0.02, 0.3]))
    def change_latency(self, link: int, more: float) -> None:
        latency = TOPOLOGY.links[link].latency_seconds + more
        self._set(link, latency=latency)
        self._settle()

    @rule(link=st.integers(0, NUM_LINKS - 1), loss=st.sampled_from([0.0, 0.001, 0.05]))
    def change_loss(self, link: int, loss: float) -> None:
        self._set(link, loss=loss)
        self._settle()

    def _set(self, link: int, **values: Any) -> None:
        self.faults.add(LinkEvent(at=self.clock.now, link=ends_of(link), direction="up", **values))

    @rule(host=st.integers(0, 3))
    def crash(self, host: int) -> None:
        self.alive[host] = False
        self.faults.add(HostEvent(at=self.clock.now, host=TOPOLOGY.hosts[host].name, crash=True))
        self._settle()

    @rule(host=st.integers(0, 3))
    def bring_back(self, host: int) -> None:
        self.alive[host] = True
        self.faults.add(HostEvent(at=self.clock.now, host=TOPOLOGY.hosts[host].name, up=True))
        self._settle()

    @invariant()
    def laws_hold(self) -> None:
        if not hasattr(self, "network"):
            return
        self.account.check_bytes()
        fair = not self.network.protocol.has_windows
        check_rates(self.account.rates, self.account.routes.__getitem__, self._capacity(), fair=fair)

    def teardown(self) -> None:
        """When all is healed, everything arrives, once, and the run ends."""
        if not hasattr(self, "network"):
            return
        for link in range(NUM_LINKS):
            self.switch(link, True)
            self.degrade(link, "all")
            self.change_loss(link, 0.0)
        for host in range(4):
            self.bring_back(host)
        self.clock.run()
        assert self.delivered.keys() == self.sent.keys()
        assert self.network.num_in_flight == 0
        self.account.check_bytes()

    def _deliver(self, number: int) -> None:
        assert number not in self.delivered
        self.delivered[number] = self.clock.now
        start, source, target, num_bytes = self.sent[number]
        route = list(TOPOLOGY.route(source, target))
        latency = sum(TOPOLOGY.latency_seconds[route].tolist())
        narrowest = min(TOPOLOGY.bits_per_second[route].tolist(), default=math.inf)
        # Law 3: links never carry more, and are never shorter, than the topology says.
        assert self.clock.now - start >= (latency + num_bytes * 8 / narrowest) * (1 - 1e-9)

    def _capacity(self) -> FloatArray:
        ends = [(link.source, link.target) for link in TOPOLOGY.links]
        names = [host.name for host in TOPOLOGY.hosts]
        down = {name for name, alive in zip(names, self.alive, strict=True) if not alive}
        works = [up and not down & set(pair) for up, pair in zip(self.is_up, ends, strict=True)]
        share = np.array(self.share) * works
        return TOPOLOGY.bits_per_second / 8 * share * self.network.protocol.payload_share

    def _settle(self) -> None:
        """Whatever happens in this instant does."""
        end = self.clock.at(self.clock.now, Order.MEETINGS)
        while not end.processed:
            self.clock.step()


Weathered.TestCase.settings = settings(stateful_step_count=25)
TestWeathered = Weathered.TestCase


# -- planted bugs ------------------------------------------------------------------------------------------------


def dead_links_carry_on(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Network, "set_link_up", lambda self, link, up: None)


def crashes_are_not_counted(patch: pytest.MonkeyPatch) -> None:
    engine = use_sources(patch).Engine
    right = engine.abort

    def abort(self: Any, transfer: Any) -> Any:
        before = self.counts.dropped_bytes
        delivered = right(self, transfer)
        self.counts.dropped_bytes = before
        return delivered

    patch.setattr(engine, "abort", abort)


def crashes_lose_messages(patch: pytest.MonkeyPatch) -> None:
    def drop(network: Network, host: int) -> None:
        for number, transfer in list(network.engine.singles.items()):
            if transfer.connection.route.source == host:
                network.abort(number)

    patch.setattr(Network, "drop_transfers", drop)


def held_transfers_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(use_sources(patch).Engine, "_release", lambda engine, transfer: None)


def latency_is_lost_when_it_changes(patch: pytest.MonkeyPatch) -> None:
    right = Network._follow

    def follow(network: Network, link: int) -> None:
        right(network, link)
        for path in network.engine.connections.routes:
            path.latency = 0.0

    patch.setattr(Network, "_follow", follow)


@pytest.mark.parametrize(
    "plant",
    [
        dead_links_carry_on,
        crashes_are_not_counted,
        crashes_lose_messages,
        held_transfers_are_forgotten,
        latency_is_lost_when_it_changes,
    ],
    ids=lambda plant: plant.__name__,
)
def test_a_planted_bug_is_caught(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    bad_days()
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        bad_days()


def bad_days() -> None:
    a_bad_day("ideal")
    a_bad_day("linux-tcp")


def a_bad_day(protocol: str) -> None:
    """The machine, led through everything once; the laws are checked after each rule, as it does by itself."""
    machine = Weathered()
    middle = next(link.index for link in TOPOLOGY.links if (link.source, link.target) == ("left", "right"))
    machine.build(protocol)
    steps: list[Callable[[], None]] = [
        lambda: machine.send(0, 2, 2_000_000, 0),
        lambda: machine.send(1, 3, 2_000_000, 0),
        lambda: machine.pass_time(0.25),
        lambda: machine.switch(middle, False),
        lambda: machine.send(0, 2, 0, 1),
        lambda: machine.pass_time(1.0),
        lambda: machine.switch(middle, True),
        lambda: machine.pass_time(0.25),
        lambda: machine.degrade(middle, "half"),
        lambda: machine.pass_time(0.1),
        lambda: machine.change_loss(middle, 0.05),
        lambda: machine.change_latency(middle, 0.3),
        lambda: machine.send(1, 3, 0, 1),
        lambda: machine.pass_time(0.25),
        lambda: machine.crash(0),
        lambda: machine.pass_time(0.25),
        lambda: machine.bring_back(0),
        lambda: machine.send(2, 0, 0, 0),
    ]
    for step in steps:
        step()
        machine.laws_hold()
    machine.teardown()


# -- exhaustively ------------------------------------------------------------------------------------------------


def shared_flows(network: Network, done: Callable[[], None]) -> int:
    """Two transfers share the middle, a third begins as they go."""
    network.send(0, 2, 100_000, done)
    network.send(1, 3, 50_000, done)
    network.env.timeout(0.05).callbacks.append(lambda event: network.send(3, 0, 50_000, done))
    return 3


def one_connection(network: Network, done: Callable[[], None]) -> int:
    """Three messages of one connection, one of them empty, in slow start."""
    for num_bytes in (40_000, 0, 20_000):
        network.send(0, 2, num_bytes, done, connection="one")
    return 3


def ring(network: Network, done: Callable[[], None]) -> int:
    """An all-reduce across the middle."""
    one = start_collective(
        network, schedule("all_reduce", 2, num_bytes=90_000), (0, 2), on_done=lambda member: done()
    )
    for member in range(2):
        one.arrive(member)
    return 2


SCENARIOS = {
    "shared flows": (shared_flows, "ideal"),
    "one connection": (one_connection, "linux-tcp"),
    "ring": (ring, "ideal"),
}
# On each wire of the star, both ways at once; and each host.
WIRES = [(index, other) for index, link in enumerate(TOPOLOGY.links) for other, back in enumerate(TOPOLOGY.links)
         if (link.source, link.target) == (back.target, back.source) and index < other]  # fmt: skip


def run_scenario(name: str, weather: Weather) -> tuple[Account, bool, float]:
    """The books, whether all was delivered, and when it ended."""
    begin, protocol = SCENARIOS[name]
    network = Network(Clock(), TOPOLOGY, protocol)
    account = Account(network)
    faults = Faults(network, weather)
    num_done: list[None] = []
    expected = begin(network, lambda: num_done.append(None))
    try:
        faults.run_until(lambda: len(num_done) >= expected)
    except DeadlockError:
        return account, False, network.env.now
    assert len(num_done) == expected
    return account, True, network.env.now


def moments(name: str) -> list[float]:
    """The instants at which something happens in a scenario without weather, and those between them."""
    account, _, end = run_scenario(name, Weather())
    instants = sorted({*account.instants, end})
    between = [(one + other) / 2 for one, other in itertools.pairwise(instants)]
    return sorted({*instants, *between})


def outages(points: Sequence[float]) -> Iterator[Weather]:
    """Every wire and every host off at each moment, and on at each later one, or never.

    At each commit every second of them, which of a next pair of moments are the others.
    """
    for off, on in itertools.combinations([*points, math.inf], 2):
        seconds = None if on == math.inf else on - off
        for wire in WIRES:
            yield Weather(events=[LinkEvent(at=off, link=ends_of(wire[0]), down=True, for_=seconds)])
        for host in range(4):
            name = TOPOLOGY.hosts[host].name
            yield Weather(events=[HostEvent(at=off, host=name, crash=True, for_=seconds)])


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_run_ends_whatever_goes_off_and_on_when(name: str) -> None:
    points = moments(name)
    _, _, calm = run_scenario(name, Weather())
    num_runs = num_stuck = 0
    every = 1 if os.environ.get("HYPOTHESIS_PROFILE") == "thorough" else 2
    for weather in itertools.islice(outages(points), 0, None, every):
        account, finished, end = run_scenario(name, weather)
        num_runs += 1
        num_stuck += not finished
        (event,) = weather.events
        assert finished or event.for_ is None  # what comes back is no excuse
        assert not finished or end >= calm * (1 - 1e-9) or name == "shared flows"
        account.check_bytes()
    assert num_runs >= 9 * 45 / every
    assert 0 < num_stuck < num_runs


def test_recurring_weather_does_not_keep_a_dead_run_alive() -> None:
    weather = Weather(
        events=[LinkEvent(at=0.02, link=ends_of(WIRES[0][0]), down=True)],
        background=[
            Background(from_=TOPOLOGY.hosts[1].name, to=TOPOLOGY.hosts[3].name, bytes=1000, every=0.1),
            Background(from_=TOPOLOGY.hosts[2].name, to=TOPOLOGY.hosts[3].name, rate=1e5),
        ],
    )
    _, finished, end = run_scenario("one connection", weather)
    assert not finished
    assert end < 1.0
