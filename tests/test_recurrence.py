"""The fast ways of simulating a collective give the times of the event path."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from netsim.collectives import ALGORITHMS, Schedule, schedule, start_collective
from netsim.collectives.schedules.ring import RingPhase
from netsim.collectives.times.compiled import compiled_seconds
from netsim.collectives.times.domains import Domains
from netsim.collectives.times.recurrence import contention_free_seconds, undisturbed_seconds
from netsim.collectives.times.sandbox import execute
from netsim.fluid.clock import Clock
from netsim.fluid.network import Network
from netsim.fluid.wires import Wires
from netsim.topology import Topology

ROWS = [(op, name) for op, algorithms in ALGORITHMS.items() for name in algorithms]
WAN = {
    (0, 1): (200, 40),
    (0, 2): (200, 90),
    (0, 3): (100, 150),
    (1, 2): (200, 70),
    (1, 3): (300, 110),
    (2, 3): (200, 130),
}


def star(num: int) -> Topology:
    """Hosts around a switch: 1 Gbit/s, 10 ms on either side of it."""
    links = [{"between": [f"h{i}", "sw"], "bandwidth": "1 Gbit/s", "latency": "10 ms"} for i in range(num)]
    hosts: dict[str, Any] = {f"h{i}": {} for i in range(num)}
    return Topology.from_mapping(
        {"name": "star", "source": "test", "hosts": hosts, "routers": ["sw"], "links": links}
    )


def four_regions(num: int) -> Topology:
    """Four regions of equal size; 10 Gbit/s network cards, one pipe for each pair of regions."""
    region = {"hosts": num // 4, "nic": "10 Gbit/s", "latency": "0.05 ms"}
    # Named by letter: hosts keep their order, and 'between' its ends.
    wan = [
        {"between": ["abcd"[a], "abcd"[b]], "bandwidth": f"{mbit} Mbit/s", "latency": f"{milliseconds} ms"}
        for (a, b), (mbit, milliseconds) in WAN.items()
    ]
    return Topology.from_mapping(
        {"name": "wan", "source": "test", "regions": dict.fromkeys("abcd", region), "wan": wan}
    )


Way = Callable[[Network, Schedule, list[int], Callable[[int], None]], Callable[[int], None]]


def by_events(
    network: Network, made: Schedule, hosts: list[int], on_done: Callable[[int], None]
) -> Callable[[int], None]:
    return execute(network, made, hosts, "group", on_done).arrive


def by_any_way(
    network: Network, made: Schedule, hosts: list[int], on_done: Callable[[int], None]
) -> Callable[[int], None]:
    return start_collective(network, made, hosts, group="group", on_done=on_done).arrive


class Watcher:
    """Notes every message: when it began and ended, from where to where, and its bytes."""

    clock: Clock

    def __init__(self) -> None:
        self.messages: dict[int, list[float]] = {}

    def capacity_changed(self, link: int, bits_per_second: float) -> None: ...

    def transfer_started(
        self, transfer: int, source: int, target: int, num_bytes: float, connection: object
    ) -> None:
        assert transfer not in self.messages
        self.messages[transfer] = [self.clock.now, source, target, num_bytes]

    def transfer_ended(self, transfer: int, delivered_bytes: float) -> None:
        self.messages[transfer] += [self.clock.now, delivered_bytes]

    def rates_changed(self, transfers: object, bytes_per_second: object) -> None:
        """Not of interest here."""


def ends(
    way: Way,
    topology: Topology,
    protocol: Any,
    calls: list[tuple[Schedule, list[float]]],
    hosts: list[int],
    others: list[tuple[float, int, int, float]] = (),  # type: ignore[assignment]
    changes: list[tuple[float, int, float]] = (),  # type: ignore[assignment]
    observer: Watcher | None = None,
) -> tuple[list[list[float]], np.ndarray]:
    """When each member of each call is through, and the bytes on links; calls follow each other by `arrivals`."""
    clock = Clock()
    network = Network(clock, topology, protocol)
    if observer is not None:
        observer.clock = clock
        network.observe(observer)
    result: list[list[float]] = []

    def at(instant: float, call: Callable[[], object]) -> None:
        clock.at(instant).callbacks.append(lambda event: call())

    for made, arrivals in calls:
        done = [np.inf] * made.num_ranks
        result.append(done)

        def on_done(member: int, done: list[float] = done) -> None:
            assert done[member] == np.inf
            done[member] = clock.now

        arrive = way(network, made, hosts, on_done)
        for member, instant in enumerate(arrivals):
            at(instant, lambda arrive=arrive, member=member: arrive(member))
    for instant, src, dst, num_bytes in others:
        at(instant, lambda src=src, dst=dst, size=num_bytes: network.send(src, dst, size, lambda: None))
    for instant, link, rate in changes:
        at(instant, lambda link=link, rate=rate: network.set_capacity(link, rate))
    clock.run()
    return result, network.link_bytes


@pytest.mark.parametrize(("num", "seconds"), [(64, 4.095), (256, 11.79375)])
def test_ring_on_a_star_takes_what_simgrid_says(num: int, seconds: float) -> None:
    made = schedule("all_reduce", num, num_bytes=100_000_000)
    done, _ = ends(by_any_way, star(num), "ideal", [(made, [0.0] * num)], list(range(num)))
    assert max(done[0]) == pytest.approx(seconds, rel=1e-9)


@pytest.mark.parametrize(("num", "seconds"), [(64, 34.6626), (256, 92.4885)])
def test_ring_over_four_regions_takes_what_simgrid_says(num: int, seconds: float) -> None:
    made = schedule("all_reduce", num, num_bytes=100_000_000)
    done, _ = ends(by_any_way, four_regions(num), "ideal", [(made, [0.0] * num)], list(range(num)))
    assert max(done[0]) == pytest.approx(seconds, rel=1e-9)


def test_ring_round_robin_over_four_regions_takes_what_simgrid_says() -> None:
    made = schedule("all_reduce", 64, num_bytes=100_000_000)
    hosts = [rank % 4 * 16 + rank // 4 for rank in range(64)]
    done, _ = ends(by_any_way, four_regions(64), "ideal", [(made, [0.0] * 64)], hosts)
    assert max(done[0]) == pytest.approx(270.9126, rel=1e-9)


def test_ring_over_a_thousand_hosts_needs_no_events() -> None:
    made = schedule("all_reduce", 1024, num_bytes=100_000_000)
    network = Network(Clock(), four_regions(1024), "ideal")
    seconds = contention_free_seconds(made, range(1024), np.zeros(1024), network.wires)
    assert seconds is not None
    # SimGrid was told 1,024 chunks of ceil(1e8 / 1024) bytes; ours add up to 1e8, so the last is 768 bytes shorter.
    assert seconds.max() == pytest.approx(323.08909776, rel=1e-6)


@pytest.mark.parametrize("num", [3, 8])
@pytest.mark.parametrize("num_bytes", [40_000_000_000, 40_000_000_123])
def test_steps_that_put_off_everybody_alike_are_one_multiplication(
    num: int, num_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gloo's ring of many pieces takes the same by its steps and by the pace they settle to."""
    links = [
        {"between": [f"h{i}", "sw"], "bandwidth": f"{1 + i % 3} Gbit/s", "latency": f"{i + 1} ms"}
        for i in range(num)
    ]
    topology = Topology.from_mapping(
        {"hosts": {f"h{i}": {} for i in range(num)}, "routers": ["sw"], "links": links}
    )
    wires = Wires(topology.route, topology.latency_seconds, topology.bits_per_second / 8, 0.0)
    made = schedule("all_reduce", num, num_bytes=num_bytes, algorithm="gloo", element_bytes=1)
    whole = undisturbed_seconds(made, range(num), wires)
    monkeypatch.setattr("netsim.collectives.times.recurrence._LONG", 50)
    monkeypatch.setattr(
        "netsim.collectives.schedules.ring.RingPhase.num_bytes", counted(RingPhase.num_bytes, calls := [])
    )
    found = undisturbed_seconds(made, range(num), wires)
    assert whole is not None
    assert found == pytest.approx(whole, rel=1e-12)
    assert len(calls) < made.num_steps / 2


def counted(call: Callable[..., Any], calls: list[Any]) -> Callable[..., Any]:
    """The same, and what it was called with."""

    def noting(*arguments: Any) -> Any:
        calls.append(arguments)
        return call(*arguments)

    return noting


def test_messages_that_meet_on_a_link_are_noticed() -> None:
    network = Network(Clock(), four_regions(16), "ideal")
    hosts = [rank % 4 * 4 + rank // 4 for rank in range(16)]
    made = schedule("all_reduce", 16, num_bytes=1600)
    assert contention_free_seconds(made, hosts, np.zeros(16), network.wires) is None
    direct = schedule("all_to_all", 16, num_bytes=25600)
    assert contention_free_seconds(direct, range(16), np.zeros(16), network.wires) is None


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    """Hosts on a random tree of routers, links of any speed, some of them slower back than forth."""
    num = draw(st.integers(2, 6))
    routers = [f"r{i}" for i in range(draw(st.integers(1, 3)))]
    links = []
    ends_of = [(router, routers[draw(st.integers(0, i))]) for i, router in enumerate(routers[1:])]
    ends_of += [(f"h{i}", draw(st.sampled_from(routers))) for i in range(num)]
    for first, second in ends_of:
        up, down = draw(st.sampled_from([1, 3, 10, 50])), draw(st.sampled_from([1, 10, 50]))
        latency = draw(st.sampled_from([0, 1, 7, 30]))
        links.append(
            {
                "between": [first, second],
                "up": f"{up} Mbit/s",
                "down": f"{down} Mbit/s",
                "latency": f"{latency} ms",
            }
        )
    hosts: dict[str, Any] = {f"h{i}": {} for i in range(num)}
    return Topology.from_mapping(
        {"name": "random", "source": "test", "hosts": hosts, "routers": routers, "links": links}
    )


def draw_schedule(data: st.DataObject, num: int, element_bytes: int = 1) -> Schedule:
    op, algorithm = data.draw(st.sampled_from(ROWS))
    num_bytes = data.draw(st.sampled_from([0, 5, 1000, 40_000])) * element_bytes
    num = 2 if op == "sendrecv" else num
    root = data.draw(st.integers(0, num - 1))
    return schedule(op, num, num_bytes=num_bytes, algorithm=algorithm, root=root, element_bytes=element_bytes)


def draw_arrivals(data: st.DataObject, num: int, after: float) -> list[float]:
    if data.draw(st.booleans()):
        return [after] * num
    return [after + data.draw(st.integers(0, 200)) / 1024 for _ in range(num)]


@settings(max_examples=60)
@given(data=st.data())
def test_recurrence_and_compiled_loop_agree_with_events(data: st.DataObject) -> None:
    topology = data.draw(topologies())
    num = len(topology.hosts)
    made = draw_schedule(data, num)
    arrivals = np.array(draw_arrivals(data, made.num_ranks, 0.0))
    hosts = data.draw(st.permutations(range(num)))
    (wanted,), _ = ends(by_events, topology, "ideal", [(made, arrivals.tolist())], hosts)
    wires = Network(Clock(), topology, "ideal").wires
    quick = contention_free_seconds(made, hosts, arrivals, wires)
    if quick is not None:
        np.testing.assert_allclose(quick, wanted, rtol=1e-9, atol=1e-12)
    if importlib.util.find_spec("numba") and made.num_steps:
        np.testing.assert_allclose(
            compiled_seconds(made, hosts, arrivals, wires), wanted, rtol=1e-9, atol=1e-12
        )


def test_who_enters_two_at_one_instant_sends_in_the_order_of_the_calls() -> None:
    """What began earlier elsewhere does not go first on a connection because of that."""
    empty, large = (schedule("all_reduce", 2, num_bytes=size, algorithm="ring") for size in (0, 40_000))
    calls = [(empty, [1.0, 1.0]), (large, [0.0, 1.0])]
    wanted, _ = ends(by_events, star(2), "ideal", calls, [0, 1])
    got, _ = ends(by_any_way, star(2), "ideal", calls, [0, 1])
    np.testing.assert_allclose(got, wanted, rtol=1e-9)


# Short queues overflow, and what then happens hangs on comparisons that rounding must not tip.
PROTOCOLS = ["ideal", "linux-tcp", "gloo", {"preset": "gloo", "queue": 30}]


@settings(max_examples=60)
@given(data=st.data(), protocol=st.sampled_from(PROTOCOLS))
def test_it_gives_the_times_and_bytes_of_events_whatever_else_happens(
    data: st.DataObject, protocol: Any
) -> None:
    """Several collectives one after the other or at once, other transfers, changing capacities."""
    topology = data.draw(topologies())
    num = len(topology.hosts)
    hosts = data.draw(st.permutations(range(num)))
    calls = []
    after = 0.0
    for _ in range(data.draw(st.integers(1, 3))):
        made = draw_schedule(data, num)
        calls.append((made, draw_arrivals(data, made.num_ranks, after)))
        after += data.draw(st.sampled_from([0.0, 0.5, 20.0]))
    instants = st.integers(0, 2000).map(lambda number: number / 1024)
    others = data.draw(
        st.lists(
            st.tuples(
                instants, st.integers(0, num - 1), st.integers(0, num - 1), st.sampled_from([0, 9e3, 8e4])
            ),
            max_size=2,
        )
    )
    changes = data.draw(
        st.lists(
            st.tuples(instants, st.integers(0, len(topology.links) - 1), st.sampled_from([5e5, 2e7])),
            max_size=2,
        )
    )
    wanted, wanted_bytes = ends(by_events, topology, protocol, calls, hosts, others, changes)
    got, got_bytes = ends(by_any_way, topology, protocol, calls, hosts, others, changes)
    for mine, theirs in zip(got, wanted, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(got_bytes, wanted_bytes, rtol=1e-9, atol=1e-6)
    # Looking is free: to the bit the same, and what is seen is what events do.
    watcher, reference = Watcher(), Watcher()
    watched, _ = ends(by_any_way, topology, protocol, calls, hosts, others, changes, watcher)
    assert watched == got
    ends(by_events, topology, protocol, calls, hosts, others, changes, reference)
    seen = np.array(sorted(watcher.messages.values()))
    np.testing.assert_allclose(seen, np.array(sorted(reference.messages.values())), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("protocol", ["ideal", "linux-tcp", "gloo"])
def test_the_same_again_comes_from_memory_and_is_exactly_the_same(protocol: str) -> None:
    clock = Clock()
    network = Network(clock, star(4), protocol)
    made = schedule("all_reduce", 4, num_bytes=1 << 20, algorithm="gloo", element_bytes=4)
    offsets = [0.0, 0.25, 0.0, 0.125]
    seconds = []
    for repetition in range(8):
        start = repetition * 16.0
        done = [0.0] * 4
        one = start_collective(
            network, made, range(4), on_done=lambda member, done=done: done.__setitem__(member, clock.now)
        )
        for member, offset in enumerate(offsets):
            clock.at(start + offset).callbacks.append(
                lambda event, one=one, member=member: one.arrive(member)
            )
        clock.run(until=start + 16.0)
        seconds.append([end - start for end in done])
    np.testing.assert_allclose(seconds[-1], seconds[-2], rtol=0, atol=1e-12)
    assert network.num_in_flight == 0
    # A window that was idle for long is as a new one; under gloo the sockets' buffers have grown meanwhile.
    assert len(Domains.of(network).memory.steps) == {"ideal": 1, "linux-tcp": 1, "gloo": 2}[protocol]
    wanted = 8 * made.sent_bytes.sum() * 2  # each message crosses two links
    assert network.link_bytes.sum() == pytest.approx(wanted, rel=1e-12)


def test_members_of_a_broadcast_go_on_before_the_last_arrives() -> None:
    made = schedule("broadcast", 4, num_bytes=1000)
    (done,), _ = ends(by_any_way, star(4), "ideal", [(made, [0.0, 0.0, 0.0, 5.0])], [0, 1, 2, 3])
    assert max(done[:3]) < 1.0
    assert done[3] == 5.0


def test_a_send_completes_with_its_receive() -> None:
    made = schedule("sendrecv", 2, num_bytes=1000)
    (late,), _ = ends(by_any_way, star(2), "ideal", [(made, [0.0, 3.0])], [0, 1])
    assert late == [3.0, 3.0]
    (soon,), _ = ends(by_any_way, star(2), "ideal", [(made, [1.0, 0.0])], [0, 1])
    assert soon == pytest.approx([1.020008, 1.020008], rel=1e-12)


def test_members_on_one_host_exchange_for_free() -> None:
    made = schedule("all_reduce", 4, num_bytes=1000)
    (done,), crossed = ends(by_any_way, star(2), "ideal", [(made, [0.0] * 4)], [0, 0, 0, 0])
    assert done == [0.0] * 4
    assert crossed.sum() == 0


def chained(
    way: Way,
    topology: Topology,
    protocol: Any,
    hosts: list[int],
    calls: list[tuple[Schedule, list[int]]],
    pauses: list[float],
) -> tuple[list[list[float]], Network]:
    """Calls among members (positions in `hosts`); each enters its next call a pause after it is through the last."""
    clock = Clock()
    network = Network(clock, topology, protocol)
    done: list[list[float]] = [[np.inf] * made.num_ranks for made, _ in calls]
    arrives: dict[int, Callable[[int], None]] = {}

    def enter_next(who: int, after: int) -> None:
        for number in range(after, len(calls)):
            made, members = calls[number]
            if who in members:
                if number not in arrives:
                    group = [hosts[member] for member in members]
                    arrives[number] = way(network, made, group, lambda member, n=number: finish(n, member))
                arrives[number](members.index(who))
                return

    def finish(number: int, member: int) -> None:
        done[number][member] = clock.now
        who = calls[number][1][member]
        clock.at(clock.now + pauses[who]).callbacks.append(lambda event: enter_next(who, number + 1))

    for who in range(len(hosts)):
        enter_next(who, 0)
    clock.run()
    return done, network


@given(data=st.data(), protocol=st.sampled_from(PROTOCOLS))
def test_members_that_go_on_at_once_meet_the_same_times_as_with_events(
    data: st.DataObject, protocol: Any
) -> None:
    """Collectives of all members and of groups, of which the next begins before the last is over."""
    topology = data.draw(topologies())
    num = len(topology.hosts)
    calls = []
    for _ in range(data.draw(st.integers(1, 4))):
        size = data.draw(st.integers(2, num))
        members = data.draw(st.permutations(range(num)))[:size]
        op = data.draw(st.sampled_from(["all_reduce", "all_gather", "all_to_all", "barrier", "broadcast"]))
        made = schedule(op, size, num_bytes=data.draw(st.sampled_from([0, 30, 4000])))
        calls.append((made, list(members)))
    calls *= data.draw(st.sampled_from([1, 1, 4]))
    pauses = [data.draw(st.sampled_from([0.0, 0.001, 0.25])) for _ in range(num)]
    wanted, _ = chained(by_events, topology, protocol, list(range(num)), calls, pauses)
    got, _ = chained(by_any_way, topology, protocol, list(range(num)), calls, pauses)
    for mine, theirs in zip(got, wanted, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-8, atol=1e-8)


RING = schedule("all_reduce", 8, num_bytes=100_000)
PAIR = schedule("all_reduce", 2, num_bytes=100_000)


@pytest.mark.parametrize(
    "calls",
    [
        [(RING, list(range(8)))] * 4,
        [(PAIR, [first, first + 1]) for first in (0, 2, 4, 6)] * 3,
    ],
    ids=["everyone", "pairs"],
)
def test_steps_of_training_stay_off_the_network(calls: list[tuple[Schedule, list[int]]]) -> None:
    """Over a WAN some are through early and begin the next step while others are busy: still no events."""
    sent: list[int] = []

    def watched(
        network: Network, made: Schedule, hosts: list[int], on_done: Callable[[int], None]
    ) -> Callable[[int], None]:
        def note(member: int) -> None:
            sent.append(network.num_in_flight)
            on_done(member)

        return start_collective(network, made, hosts, on_done=note).arrive

    pauses = [0.001 * who for who in range(8)]
    got, _ = chained(watched, four_regions(8), "ideal", list(range(8)), calls, pauses)
    wanted, _ = chained(by_events, four_regions(8), "ideal", list(range(8)), calls, pauses)
    for mine, theirs in zip(got, wanted, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-8, atol=1e-8)
    assert len(sent) == sum(made.num_ranks for made, _ in calls)
    assert set(sent) == {0}
