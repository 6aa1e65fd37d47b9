"""Collectives that overlap, followed from state to state, meet the times of the event path."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from netsim.collectives import default_algorithm, schedule, start_collective
from netsim.collectives.times.sandbox import execute
from netsim.fluid.clock import Clock
from netsim.fluid.network import Network
from netsim.ranks.kernel import Kernel
from netsim.ranks.requests import Advance, Call, Exit, Key, Post, Request, Wait
from netsim.topology import Topology

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from netsim.collectives import Schedule

    Way = Callable[[Network, Schedule, Sequence[int], Hashable, Callable[[int], None]], Any]

PROTOCOLS = ["ideal", "linux-tcp", "gloo"]


def by_events(
    network: Network, made: Schedule, hosts: Sequence[int], group: Hashable, on_done: Callable[[int], None]
) -> Any:
    return execute(network, made, hosts, group, on_done)


def by_any_way(
    network: Network, made: Schedule, hosts: Sequence[int], group: Hashable, on_done: Callable[[int], None]
) -> Any:
    return start_collective(network, made, hosts, group=group, on_done=on_done)


def star(num: int, milliseconds: float) -> Topology:
    link = {"bandwidth": "10 Mbit/s", "latency": f"{milliseconds} ms"}
    links = [{"between": [f"h{i}", "sw"], **link} for i in range(num)]
    hosts: dict[str, Any] = {f"h{i}": {} for i in range(num)}
    return Topology.from_mapping(
        {"name": "star", "source": "test", "hosts": hosts, "routers": ["sw"], "links": links}
    )


def run(
    way: Way,
    topology: Topology,
    protocol: str,
    streams: list[list[Request]],
    changes: list[tuple[float, int, float]] | tuple[()] = (),
    observer: Any = None,
) -> tuple[Kernel, Network]:
    """Ranks make these requests; links change at some instants."""
    clock, hosts = Clock(), topology.place(len(streams))
    network = Network(clock, topology, protocol)
    if observer is not None:
        network.observe(observer)

    def start(call: Call, group: Hashable, on_done: Callable[[int], None]) -> tuple[Any, Any]:
        num, algorithm = len(call.ranks), default_algorithm(call.op, gloo=network.protocol.rendezvous)
        made = schedule(call.op, num, num_bytes=call.num_bytes, algorithm=algorithm, element_bytes=4)
        one = way(network, made, [hosts[rank] for rank in call.ranks], group, on_done)
        return lambda member, _: one.arrive(member), one.cancel

    def refill(rank: int) -> NoReturn:
        raise AssertionError(rank)

    kernel = Kernel(
        len(streams),
        refill,
        answer=lambda rank, value: None,
        start=start,
        clock=clock,
        collectives_in_flight=network.protocol.collectives_in_flight,
        on_row=lambda row: None,
    )
    for instant, link, rate in changes:
        clock.at(instant).callbacks.append(lambda event, it=(link, rate): network.set_capacity(*it))
    for stream, requests in zip(kernel.streams, streams, strict=True):
        stream.extend(requests)
    kernel.run()
    clock.run()
    return kernel, network


def training(
    num: int, steps: int, seconds: Callable[[int, int], float], sizes: list[int]
) -> list[list[Request]]:
    """Steps of ranks: `seconds(rank, step)` of computing, meanwhile an all-reduce for each bucket of `sizes`."""
    streams: list[list[Request]] = []
    for rank in range(num):
        made: list[Request] = []
        for step in range(steps):
            keys = [Key("all", step * len(sizes) + bucket) for bucket in range(len(sizes))]
            for key, num_bytes in zip(keys, sizes, strict=True):
                made.append(Advance(seconds(rank, step) / len(sizes)))
                made.append(Post(key, rank, Call("all_reduce", tuple(range(num)), num_bytes, 0, 4)))
            made += map(Wait, keys)
        streams.append([*made, Exit()])
    return streams


def check(got: tuple[Kernel, Network], wanted: tuple[Kernel, Network]) -> None:
    # Ranks go on at the next instant of a grid of 2**-30 s: rounding of one picosecond may cost a grid step.
    for name in ("end_seconds", "exposed_seconds"):
        mine, theirs = getattr(got[0], name), getattr(wanted[0], name)
        np.testing.assert_allclose(mine, theirs, rtol=1e-9, atol=2e-8)
    np.testing.assert_allclose(got[1].link_bytes, wanted[1].link_bytes, rtol=1e-9, atol=1e-6)


@settings(max_examples=15)
@given(data=st.data(), protocol=st.sampled_from(PROTOCOLS))
def test_overlapping_steps_take_what_events_take(data: st.DataObject, protocol: str) -> None:
    """Buckets posted early, up to two in flight, stragglers, groups, changing links; watched or not."""
    num = data.draw(st.integers(2, 4))
    topology = star(num, data.draw(st.sampled_from([0, 1, 20])))
    sizes = data.draw(st.lists(st.sampled_from([40, 4000, 100_000]), min_size=1, max_size=3))
    slow = data.draw(st.lists(st.integers(0, 5), max_size=2))
    streams = training(
        num, 6, lambda rank, step: 0.02 * (3 if rank == 0 and step in slow else 1) + rank / 1000, sizes
    )
    if num > 2:
        op = data.draw(st.sampled_from(["broadcast", "all_to_all"]))
        for rank in range(num - 1):
            call = Call(op, tuple(range(num - 1)), 4000, 0, 4)
            streams[rank][2:2] = [Post(Key("some", 0), rank, call), Wait(Key("some", 0))]
    changes = data.draw(
        st.lists(
            st.tuples(
                st.integers(1, 500).map(lambda number: number / 1024),
                st.integers(0, 2 * num - 1),
                st.sampled_from([3e6, 2e7]),
            ),
            max_size=2,
        )
    )
    wanted = run(by_events, topology, protocol, streams, changes)
    got = run(by_any_way, topology, protocol, streams, changes)
    check(got, wanted)
    watched = run(by_any_way, topology, protocol, streams, changes, Nobody())
    assert watched[0].end_seconds == got[0].end_seconds


class Nobody:
    """Watches, and keeps nothing."""

    def capacity_changed(self, link: int, bits_per_second: float) -> None: ...

    def transfer_started(self, *what: object) -> None: ...
    def transfer_ended(self, *what: object) -> None: ...
    def rates_changed(self, *what: object) -> None: ...


def count_messages(
    monkeypatch: pytest.MonkeyPatch, protocol: str, streams: list[list[Request]]
) -> tuple[int, tuple[Kernel, Network]]:
    """How many messages are simulated on any network, and what comes out."""
    sent = 0
    send = Network.send

    def counted(self: Network, *args: Any, **options: Any) -> int:
        nonlocal sent
        sent += 1
        return send(self, *args, **options)

    with monkeypatch.context() as patched:
        patched.setattr(Network, "send", counted)
        found = run(by_any_way, Topology.load("wan-4-regions"), protocol, streams)
    return sent, found


@pytest.mark.parametrize("sizes", [[200_000], [100_000, 40_000, 400_000]], ids=["one", "buckets"])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_steps_that_overlap_again_and_again_come_from_memory(
    monkeypatch: pytest.MonkeyPatch, protocol: str, sizes: list[int]
) -> None:
    """Over a WAN some begin the next step while others are busy; after some steps no message is simulated any more."""

    def made(steps: int) -> list[list[Request]]:
        return training(8, steps, lambda rank, step: 0.05, sizes)

    few, _ = count_messages(monkeypatch, protocol, made(12))
    many, found = count_messages(monkeypatch, protocol, made(24))
    assert many == few
    check(found, run(by_events, Topology.load("wan-4-regions"), protocol, made(24)))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_after_a_straggler_steps_come_from_memory_again(
    monkeypatch: pytest.MonkeyPatch, protocol: str
) -> None:
    def made(steps: int, slow: int) -> list[list[Request]]:
        return training(8, steps, lambda rank, step: 0.3 if (rank, step) == (3, slow) else 0.05, [200_000])

    calm, _ = count_messages(monkeypatch, protocol, made(30, -1))
    one, _ = count_messages(monkeypatch, protocol, made(30, 15))
    assert one <= 4 * calm + 1  # some states are new, most of the 30 steps are not


def test_what_changes_elsewhere_leaves_a_collective_alone() -> None:
    topology = star(6, 10)
    clock = Clock()
    network = Network(clock, topology, "linux-tcp")
    made = schedule("all_reduce", 3, num_bytes=100_000)
    ends: list[float] = []
    one = start_collective(network, made, range(3), on_done=lambda member: ends.append(clock.now))
    for member in range(3):
        one.arrive(member)
    link = {(link.source, link.target): link.index for link in topology.links}
    clock.run(until=0.01)
    network.set_capacity(link["h4", "sw"], 5e6)
    network.set_latency(link["sw", "h3"], 0.5)
    network.send(4, 5, 30_000, lambda: None)
    assert network.num_in_flight == 1  # what was sent, and nothing of the collective
    network.set_capacity(link["h1", "sw"], 5e6)
    assert network.num_in_flight > 1
    clock.run()
    assert len(ends) == 3


def test_whoever_enters_last_is_told_however_instants_are_rounded() -> None:
    """A message waits for its receiver while others, each begun as the one before it ends, come and go beside it.

    Where the sums of their times round up, the sandbox was a rounding error past the receiver's entry, found everybody
    through and was done with, and nobody was told: about one case in forty here, one in 25,000 steps of training.
    """
    topology = Topology.from_mapping(
        {
            "hosts": ["a", "b", "c"],
            "routers": ["r"],
            "links": [
                {"between": [host, "r"], "bandwidth": "1 Gbit/s", "latency": "20 ms"} for host in "abc"
            ],
        }
    )
    for case in range(120):
        clock = Clock()
        network = Network(clock, topology, "ideal")
        message = schedule("sendrecv", 2, num_bytes=37 * case + 1)
        done: list[int] = []
        waiting = start_collective(network, message, (0, 1), group="waiting", on_done=done.append)
        waiting.arrive(0)

        def begin(
            left: int, network: Network = network, message: Any = message, waiting: Any = waiting
        ) -> None:
            if not left:
                waiting.arrive(1)
                return
            other = start_collective(
                network, message, (0, 2), group=left, on_done=lambda member: member or begin(left - 1)
            )
            other.arrive(0)
            other.arrive(1)

        clock.run(until=0.001 * case + 0.0137)
        begin(2 + case % 28)
        clock.run()
        assert sorted(done) == [0, 1], case
