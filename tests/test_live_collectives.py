"""Collectives on a live network: early members, ties, overlap, shared hosts, cancelled ones; times are exact;
the closed form of lone ones; sizes that are found as members enter.

The reference plays a schedule with `Network.send` and callbacks. Its times and bytes are the engine's, bit by bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import worlds
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from worlds import regions_form

import netsim
from exogym_core.communicator import Communicator, run_ranks
from netsim import Clock, Network, Protocol, Topology, schedule, start_collective
from netsim.collectives.closed_form import contention_free_seconds, undisturbed_seconds
from netsim.collectives.schedules.algorithms import ALGORITHMS, build
from netsim.collectives.schedules.schedule import Schedule
from netsim.testing import calls, topologies

Start = Callable[..., Callable[[int], None]]
ROWS = [(op, name) for op, algorithms in ALGORITHMS.items() for name in algorithms]
# Short queues overflow, and what then happens hangs on comparisons that rounding must not tip.
WITHOUT_NOTES = ["ideal", "linux-tcp", {"preset": "linux-tcp", "queue": 30}]


star = partial(worlds.star, bandwidth="1 Gbit/s")


class Played:
    """A schedule, played with the `send` of a network: a member posts a step when it has done those that gate it."""

    def __init__(
        self,
        network: Any,
        made: Schedule,
        hosts: Sequence[int],
        group: object,
        on_done: Callable[[int], None],
    ) -> None:
        self.network, self.made, self.hosts, self.group, self.on_done = network, made, hosts, group, on_done
        self.steps = [made.step(index) for index in range(made.num_steps)]
        self.open = [
            [int((step.src == member).sum() + (step.dst == member).sum()) for step in self.steps]
            for member in range(made.num_ranks)
        ]
        self.posted = [0] * made.num_ranks
        self.arrived = [False] * made.num_ranks
        self.through = [False] * made.num_ranks
        self.is_unreceived = False
        self.is_buffered = network.protocol.buffers_sends and made.op != "sendrecv"

    def arrive(self, member: int) -> None:
        self.arrived[member] = True
        self.advance(member)
        if self.is_unreceived:
            self.part_done(0, 0)

    def num_done(self, member: int) -> int:
        """Steps that a member has posted and finished, in a row."""
        counts = enumerate(self.open[member])
        posted = self.posted[member]
        return next((index for index, num in counts if num or index >= posted), len(self.steps))

    def advance(self, member: int) -> None:
        gates = self.made.gates
        while self.posted[member] < len(self.steps) and self.num_done(member) >= gates[self.posted[member]]:
            index = self.posted[member]
            self.posted[member] += 1
            step = self.steps[index]
            for src, dst, size in zip(step.src, step.dst, step.num_bytes, strict=True):
                if src == member:
                    self.send(index, int(src), int(dst), float(size))
        if self.num_done(member) == len(self.steps) and not self.through[member]:
            self.through[member] = True
            self.on_done(member)

    def send(self, index: int, src: int, dst: int, size: float) -> None:
        on_sent = partial(self.part_done, index, src) if self.is_buffered else None

        def delivered() -> None:
            self.part_done(index, dst)
            if self.made.op == "sendrecv" and not self.arrived[dst]:
                self.is_unreceived = True
            elif not on_sent:
                self.part_done(index, src)

        hosts = self.hosts[src], self.hosts[dst]
        self.network.send(*hosts, size, delivered, on_sent=on_sent, connection=self.group)

    def part_done(self, index: int, member: int) -> None:
        self.open[member][index] -= 1
        if not self.open[member][index] and self.posted[member] > index:
            self.advance(member)


def started(*where: Any, group: object, on_done: Callable[[int], None]) -> Callable[[int], None]:
    return start_collective(*where, group=group, on_done=on_done).arrive


def played(*where: Any, group: object, on_done: Callable[[int], None]) -> Callable[[int], None]:
    return Played(*where, group, on_done).arrive


class Nobody:
    """Watches, and keeps nothing."""

    def capacity_changed(self, *what: object) -> None: ...
    def transfer_started(self, *what: object) -> None: ...
    def transfer_ended(self, *what: object) -> None: ...
    def rates_changed(self, *what: object) -> None: ...


def ends(
    start: Start,
    network: Network,
    calls: Sequence[tuple[Schedule, Sequence[float]]],
    hosts: Sequence[int],
    groups: Sequence[object] = ("group",),
) -> list[list[float]]:
    """When each member of each call is through; members enter each call at its instants."""
    clock = network.env
    result: list[list[float]] = []
    for number, (made, arrivals) in enumerate(calls):
        done = [math.inf] * made.num_ranks
        result.append(done)

        def on_done(member: int, done: list[float] = done) -> None:
            assert done[member] == math.inf
            done[member] = clock.now

        group = groups[number % len(groups)]
        arrive = start(network, made, hosts[: made.num_ranks], group=group, on_done=on_done)
        for member, instant in enumerate(arrivals):
            clock.at(instant, call=lambda event, arrive=arrive, member=member: arrive(member))
    clock.run()
    assert network.num_in_flight == 0
    return result


@pytest.mark.parametrize(("protocol", "milliseconds"), [("ideal", 240), ("linux-tcp", 145)])
def test_a_ring_of_small_messages_pays_the_longest_latency_or_each_in_turn(
    protocol: str, milliseconds: float
) -> None:
    """Six steps: of 40 ms where a member waits for delivery; else the largest sum of six in a row."""
    links = [
        {"between": [f"h{i}", f"h{(i + 1) % 4}"], "bandwidth": "100 Gbit/s", "latency": latency}
        for i, latency in enumerate(["10 ms", "20 ms", "40 ms", "15 ms"])
    ]
    where = {"hosts": [f"h{i}" for i in range(4)], "links": links, "protocol": protocol}
    took = netsim.collective(where, "all_reduce", num_bytes="4 kB", algorithm="ring")
    assert 1e3 * took.seconds == pytest.approx(milliseconds, rel=1e-3)


# -- every schedule, against the reference ---------------------------------------------------------------------


networks = partial(topologies, 2, 5)


def draw_call(data: st.DataObject, num: int, after: float) -> tuple[Schedule, list[float]]:
    op, algorithm = data.draw(st.sampled_from(ROWS))
    call = data.draw(calls(num, op, element_bytes=(1, 1000), most_elements=40))
    made = build(call.problem(algorithm))
    if data.draw(st.booleans()):
        return made, [after] * made.num_ranks
    return made, [after + data.draw(st.integers(0, 200)) / 1024 for _ in range(made.num_ranks)]


@settings(max_examples=30)
@given(data=st.data(), protocol=st.sampled_from(WITHOUT_NOTES))
def test_every_schedule_takes_what_its_messages_take(data: st.DataObject, protocol: Any) -> None:
    """Several collectives one after the other or at once, of one group or of two, other transfers, changing links."""
    topology = Topology.from_mapping(data.draw(networks()))
    num = len(topology.hosts)
    # Some members share a host.
    hosts = data.draw(st.lists(st.integers(0, num - 1), min_size=num, max_size=num))
    calls, after = [], 0.0
    for _ in range(data.draw(st.integers(1, 3))):
        calls.append(draw_call(data, num, after))
        after += data.draw(st.sampled_from([0.0, 0.5, 20.0]))
    instants = st.integers(0, 2000).map(lambda number: number / 1024)
    host = st.integers(0, num - 1)
    others = data.draw(
        st.lists(st.tuples(instants, host, host, st.sampled_from([0.0, 9e3, 8e4])), max_size=2)
    )
    link = st.integers(0, len(topology.links) - 1)
    changes = data.draw(st.lists(st.tuples(instants, link, st.sampled_from([5e5, 2e7])), max_size=2))
    dead = data.draw(st.lists(st.tuples(instants, link), max_size=1))
    groups = data.draw(st.sampled_from([["one"], ["one", "two"]]))

    def network(observer: Any = None) -> Network:
        made = Network(Clock(), topology, protocol)
        if observer is not None:
            made.observe(observer)
        for instant, *args in others:
            made.env.at(instant, call=lambda event, args=args: made.send(*args, lambda: None))
        for instant, *change in changes:
            made.env.at(instant, call=lambda event, change=change: made.set_capacity(*change))
        for instant, index in dead:
            made.env.at(instant, call=lambda event, index=index: made.set_link_up(index, False))
            made.env.at(instant + 0.5, call=lambda event, index=index: made.set_link_up(index, True))
        return made

    reference, live = network(), network()
    wanted = ends(played, reference, calls, hosts, groups)
    assert ends(started, live, calls, hosts, groups) == wanted
    assert live.link_bytes.tolist() == reference.link_bytes.tolist()
    assert ends(started, network(Nobody()), calls, hosts, groups) == wanted, "whoever watches changes it"


@settings(max_examples=20)
@given(data=st.data())
def test_under_gloo_all_bytes_arrive_not_sooner_than_without_notes(data: st.DataObject) -> None:
    topology = Topology.from_mapping(data.draw(networks()))
    made, arrivals = draw_call(data, len(topology.hosts), 0.0)
    hosts = range(len(topology.hosts))
    live = Network(Clock(), topology, "gloo")
    (done,) = ends(started, live, [(made, arrivals)], hosts)
    assert all(end >= arrival for end, arrival in zip(done, arrivals, strict=True))
    if made.op not in ("broadcast", "scatter", "sendrecv"):
        assert max(done) >= max(arrivals)
    expected = np.zeros(len(topology.links))
    for src, dst, num_bytes in made.pair_bytes:
        expected[list(topology.route(hosts[src], hosts[dst]))] += num_bytes
    np.testing.assert_allclose(live.link_bytes, expected, rtol=1e-9, atol=1e-6)


# -- who waits for whom ------------------------------------------------------------------------------------------


def test_under_gloo_a_late_member_of_an_all_to_all_sends_before_it_asks() -> None:
    """gloo's alltoall.cc posts the send first: data leave at once, and the request for the peer's data follows them."""
    late, latency, num_bytes = (
        0.2,
        0.025,
        1 << 19,
    )  # fits the socket, so that a call does not wait until its data leave
    topology = worlds.chain("ab", "20 Mbit/s", f"{latency} s")
    network = Network(Clock(), topology, "gloo")
    made = schedule("all_to_all", 2, num_bytes=4 * num_bytes, algorithm="gloo")
    for _ in range(4):  # the last on a window that restarts for two round trips at most
        enters = network.env.now + late
        (done,) = ends(started, network, [(made, [network.env.now, enters])], [0, 1])
    drain = num_bytes / network.protocol.payload_bytes_per_second(topology)[0]
    assert 0.999 * (latency + drain) < done[0] - enters < latency + drain + 4 * latency
    assert done[1] - enters == pytest.approx(2 * (latency + drain), rel=0.03)


# -- several at once ---------------------------------------------------------------------------------------------


def test_the_last_member_to_enter_is_notified_however_instants_are_rounded() -> None:
    """A message waits for its receiver while others, each begun as the one before it ends, come and go."""
    topology = star(3, latency="20 ms")
    message = [schedule("sendrecv", 2, num_bytes=37 * case + 1) for case in range(40)]
    for case in range(40):
        clock = Clock()
        network = Network(clock, topology, "ideal")
        done: list[int] = []
        waiting = start_collective(network, message[case], (0, 1), group="waiting", on_done=done.append)
        waiting.arrive(0)

        def begin(left: int, network: Network = network, case: int = case, waiting: Any = waiting) -> None:
            if not left:
                waiting.arrive(1)
                return
            other = start_collective(
                network, message[case], (0, 2), group=left, on_done=lambda member: member or begin(left - 1)
            )
            other.arrive(0)
            other.arrive(1)

        clock.run(until=0.001 * case + 0.0137)
        begin(2 + case % 28)
        clock.run()
        assert sorted(done) == [0, 1], case


# --- calls in a row ------------------------------------------------------------------------------------------


@settings(max_examples=15)
@given(
    op=st.sampled_from(["all_reduce", "broadcast", "reduce", "all_gather"]),
    num_calls=st.integers(1, 4),
    protocol=st.sampled_from(["ideal", "linux-tcp", "gloo", "nccl-sockets"]),
    network=st.sampled_from([regions_form({"a": 3}, "8 Mbit/s", "1 ms"), "wan-4-regions"]),
)
def test_calls_of_a_repetition_end_as_those_of_ranks_that_call_in_turn(
    op: str, num_calls: int, protocol: str, network: Any
) -> None:
    took = netsim.collective(network, op, num_bytes=240_000, protocol=protocol, calls=num_calls)

    def program(comm: Communicator) -> float:
        for _ in range(num_calls):
            tensor = torch.zeros(240_000 // 4 // (comm.world_size if op == "all_gather" else 1))
            getattr(comm, op)(tensor)
        return comm.now()

    settings = {"protocol": protocol, "collectives": took.algorithm}
    ranks = run_ranks(program, len(took.rank_seconds), network, **settings).results
    np.testing.assert_allclose(took.rank_seconds, ranks, rtol=1e-7, atol=1e-8)


def test_calls_without_messages_end_at_once() -> None:
    """Each began within the one before it, as many deep as Python allows."""
    for about in ({"num_bytes": 0}, {"num_bytes": 1_000, "ranks": ["asia.0"]}):
        took = netsim.collective("wan-4-regions", "all_reduce", protocol="linux-tcp", calls=3_000, **about)
        assert took.seconds == 0


# --- the closed form of collectives whose messages share no link --------------------------------------------


@settings(max_examples=20)
@given(data=st.data(), protocol=st.sampled_from(["ideal", {"preset": "ideal", "software": "1 ms"}]))
def test_where_no_messages_meet_it_gives_the_times_of_the_live_network(
    data: st.DataObject, protocol: Any
) -> None:
    topology = Topology.from_mapping(data.draw(networks()))
    made, _ = draw_call(data, len(topology.hosts), 0.0)
    hosts = data.draw(st.permutations(range(len(topology.hosts))))
    found = contention_free_seconds(made, hosts, topology, Protocol.parse(protocol))
    assume(found is not None)
    (wanted,) = ends(started, Network(Clock(), topology, protocol), [(made, [0.0] * made.num_ranks)], hosts)
    np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-12)


@settings(max_examples=20)
@given(data=st.data(), protocol=st.sampled_from(["ideal", "linux-tcp"]))
def test_no_transfer_finishes_before_the_undisturbed_time(data: st.DataObject, protocol: str) -> None:
    topology = Topology.from_mapping(data.draw(networks()))
    made, _ = draw_call(data, len(topology.hosts), 0.0)
    hosts = range(len(topology.hosts))
    least = undisturbed_seconds(made, hosts, topology, Protocol.parse(protocol))
    assume(least is not None)
    arrivals = [0.0] * made.num_ranks
    (live,) = ends(started, Network(Clock(), topology, protocol), [(made, arrivals)], hosts)
    assert (least <= np.array(live) * (1 + 1e-9) + 1e-12).all()


# --- all_to_all, whose sizes are found as its members enter -------------------------------------------------

SLOW_REGION = regions_form({"a": 3}, "8 Mbit/s", "1 ms", protocol="ideal")


def exchange(comm: Communicator, asks: bool, busy: bool) -> list[Any]:
    """Rank 1 comes late, having asked for the time or not, while a message is on its way or not."""
    message = torch.ones(100_000)
    if busy and comm.rank:
        handle = comm.isend(message, 2) if comm.rank == 1 else comm.irecv(message, 1)
    reported = []
    if comm.rank == 1:
        for _ in range(3):
            comm.advance(0.0625)
            reported += [comm.now()] if asks else []
    parts = [torch.full((1000 * (comm.rank + 1) + other,), float(other)) for other in range(3)]
    got = [len(part) for part in comm.all_to_all(parts)]
    if busy and comm.rank:
        handle.wait()
    assert reported == ([0.0625, 0.125, 0.1875] if asks and comm.rank == 1 else [])
    return [got, comm.now(), comm.traffic.bytes_sent]


@pytest.mark.parametrize(
    ("busy", "workers", "protocol"),
    [
        (False, "threads", "ideal"),
        (True, "threads", "gloo"),
        (True, {"kind": "processes", "processes": 3}, "ideal"),
    ],
)
def test_reading_the_clock_before_arriving_changes_nothing(busy: bool, workers: Any, protocol: str) -> None:
    results = [
        run_ranks(
            partial(exchange, asks=asks, busy=busy), 3, SLOW_REGION, workers=workers, protocol=protocol
        ).results
        for asks in (False, True)
    ]
    assert results[0] == results[1]
    assert [row[0] for row in results[0]] == [[1000 + rank, 2000 + rank, 3000 + rank] for rank in range(3)]
    assert min(row[1] for row in results[0]) > 0.1875
