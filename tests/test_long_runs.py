"""What grows with the length of a run, or with what has been there before, and what may not."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from netsim.collectives import play, play_all_to_all, schedule
from netsim.collectives.times.domains import Domains
from netsim.collectives.times.sandbox import Sandbox, execute
from netsim.fluid.channel import Channels
from netsim.fluid.clock import Clock
from netsim.fluid.network import Network
from netsim.fluid.tcp import Window
from netsim.topology import Topology
from netsim.topology.weather import Drift
from netsim.weather.faults import Faults

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from netsim.collectives import Schedule


def star(num: int, bandwidth: str = "80 Mbit/s", latency: str = "1 ms") -> Topology:
    link = {"bandwidth": bandwidth, "latency": latency}
    links = [{"between": [f"h{i}", "sw"], **link} for i in range(num)]
    return Topology.from_mapping(
        {"hosts": {f"h{i}": {} for i in range(num)}, "routers": ["sw"], "links": links}
    )


def run_one(
    clock: Clock, network: Network, made: Schedule, hosts: Sequence[int], group: Hashable, pause: float = 0.5
) -> None:
    one = play(network, made, hosts, group=group, on_done=lambda member: None)
    for member in range(made.num_ranks):
        one.arrive(member)
    clock.run(until=clock.now + pause)


def count_copied_windows(patch: pytest.MonkeyPatch, num_others: int) -> int:
    """How many windows are copied or looked at by a message of two who have talked, beside others who have."""
    clock = Clock()
    network = Network(clock, star(24), "linux-tcp")
    pairs = [(src, dst) for src in range(24) for dst in range(24) if src != dst][:num_others]
    made = schedule("sendrecv", 2, num_bytes=10_000)
    for src, dst in [(22, 23), *pairs]:
        network.send(src, dst, 10_000, lambda: None, connection="all")
        clock.run(until=clock.now + 0.01)
    count = 0

    def counted(name: str) -> Any:
        right = getattr(Window, name)

        def call(self: Window, *args: Any) -> Any:
            nonlocal count
            count += 1
            return right(self, *args)

        return call

    with patch.context() as patched:
        for name in ("moved", "state", "idle_state"):
            patched.setattr(Window, name, counted(name))
        run_one(clock, network, made, (22, 23), "all", 0.1)
    return count


def test_a_message_costs_no_more_because_others_of_its_group_have_talked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A state holds the connections of the operation's own pairs, not all of its group's."""
    assert count_copied_windows(monkeypatch, 400) <= count_copied_windows(monkeypatch, 3) < 20


def test_what_never_repeats_and_is_cheap_to_play_is_played(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a while of random messages hardly any sandbox is made for another one."""
    draw = random.Random(7)
    clock = Clock()
    network = Network(clock, star(16), "linux-tcp")
    sandboxes = 0
    made = Sandbox.__init__

    def counted(self: Sandbox, network: Network) -> None:
        nonlocal sandboxes
        sandboxes += 1
        made(self, network)

    monkeypatch.setattr(Sandbox, "__init__", counted)
    for _ in range(300):
        message = schedule("sendrecv", 2, num_bytes=draw.randrange(1000, 100_000))
        run_one(clock, network, message, draw.sample(range(16), 2), "all", draw.random() / 64)
    assert sandboxes < 150


@pytest.mark.parametrize("protocol", ["linux-tcp", "gloo"])
def test_idle_connections_whose_state_matters_to_nobody_are_forgotten(protocol: str) -> None:
    clock = Clock()
    network = Network(clock, star(2), protocol)
    for number in range(3000):
        network.send(0, 1, 4000, lambda: None, connection=number)
        clock.run(until=clock.now + (0.1 if protocol == "linux-tcp" else 20.0))
    assert network.num_connections < 1500  # each of the 3,000 was opened


def test_connections_are_closed_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where each differs from a new one, as over lines that lose packets: those idle for longest go."""
    monkeypatch.setattr("netsim.fluid.channel._MOST_IDLE", 256)
    monkeypatch.setattr("netsim.fluid.channel._FEW_IDLE", 64)
    clock = Clock()
    network = Network(clock, star(2), "linux-tcp")
    network.set_loss(0, 0.01)
    for number in range(1000):
        network.send(0, 1, 500_000, lambda: None, connection=number)
        clock.run(until=clock.now + 0.1)
    assert network.num_connections < 1000


def test_looking_for_a_groups_connections_is_not_slowed_by_others(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    network = Network(clock, star(4), "linux-tcp")
    for number in range(500):
        network.send(0, 1, 1000, lambda: None, connection=number)
    clock.run()
    made = schedule("all_reduce", 4, num_bytes=4000)
    monkeypatch.setattr(Channels, "__iter__", lambda self: pytest.fail("all connections are walked through"))
    run_one(clock, network, made, range(4), "group")


def entries_of(network: Network) -> int:
    """All that a network and its collectives remember."""
    domains = Domains.of(network)
    memories = [
        domains.memory.steps,
        domains.memory.states,
        domains._reach,
        domains._conditions,
        domains._fits,
    ]
    return (
        sum(map(len, memories)) + network.num_connections + len(network._callbacks) + len(network.env._queue)
    )


def live(num_steps: int) -> int:
    """Steps of training with drift, point-to-point messages, uneven exchanges and groups that change."""
    draw = random.Random(3)
    clock = Clock()
    network = Network(clock, star(8), "linux-tcp")
    faults = Faults(network)
    faults.add(Drift((0, 1, 2, 3), "lognormal", 0.3, sigma=0.2))
    faults.add(Drift((8,), "regime", 5.0, levels=(1.0, 0.5)))
    most = 0
    for step in range(num_steps):
        hosts = draw.sample(range(8), 4)
        run_one(clock, network, schedule("all_reduce", 4, num_bytes=40_000), hosts, tuple(hosts), 0.2)
        run_one(clock, network, schedule("sendrecv", 2, num_bytes=1000 + step), hosts[:2], "pairs", 0.1)
        rows = np.array([[draw.randrange(3000) for _ in range(3)] for _ in range(3)])
        enter, _ = play_all_to_all(
            network,
            hosts[:3],
            lambda parts: schedule("all_to_all", 3, parts=parts),
            group="uneven",
            on_done=lambda member: None,
        )
        for member in range(3):
            enter(member, rows[member].tolist())
        clock.run(until=clock.now + 0.2)
        most = max(most, entries_of(network))
    return most


def test_a_long_run_remembers_no_more_than_a_short_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drift, messages, uneven exchanges and changing groups; the bounds are made small, so that they are met soon."""
    for name, most in (("memory._MOST_STEPS", 32), ("memory._MOST_STATES", 16), ("domains._MOST_KNOWN", 32)):
        monkeypatch.setattr(f"netsim.collectives.times.{name}", most)
    monkeypatch.setattr("netsim.fluid.channel._FEW_IDLE", 64)
    assert live(160) <= live(60) * 1.25 + 20


def test_what_was_planned_and_came_to_nothing_leaves_the_clocks_queue() -> None:
    """Steady traffic of others is due far ahead; each change of its rate plans that anew."""
    clock = Clock()
    network = Network(clock, star(2))
    network.send(0, 1, 1e13, lambda: None, connection="steady")
    for _ in range(2000):
        network.send(0, 1, 1000, lambda: None)
        clock.run(until=clock.now + 0.01)
    assert len(clock._queue) < 200


# -- the way a time was found does not show in what has crossed the links -----------------------------------------


@pytest.mark.parametrize("protocol", ["ideal", "linux-tcp", "gloo"])
def test_bytes_on_links_are_those_of_events_at_any_instant(protocol: str) -> None:
    """Also while members are still to come, and looking changes no time, to the bit."""
    topology = star(4, "80 Mbit/s", "5 ms")
    made = schedule("all_reduce", 4, num_bytes=4_000_000, algorithm="gloo" if protocol == "gloo" else "ring")
    instants = [k / 16 + 1 / 128 for k in range(14)]

    def look(by_events: bool, looks: bool) -> tuple[list[np.ndarray], list[float]]:
        clock = Clock()
        network = Network(clock, topology, protocol)
        ends: list[float] = []

        def done(member: int) -> None:
            ends.append(clock.now)

        one = (
            execute(network, made, range(4), "group", done)
            if by_events
            else play(network, made, range(4), group="group", on_done=done)
        )
        for member, instant in enumerate([0.0, 0.0, 0.0, 0.25]):
            clock.at(instant).callbacks.append(lambda event, member=member: one.arrive(member))  # type: ignore[union-attr]
        seen = []
        for instant in instants:
            clock.run(until=instant)
            seen += [network.link_bytes] if looks else []
        clock.run()
        return seen, ends

    wanted, _ = look(by_events=True, looks=True)
    got, ends = look(by_events=False, looks=True)
    np.testing.assert_allclose(got, wanted, rtol=1e-9, atol=1e-3)
    assert max(np.diff(got, axis=0).max(axis=1)) > 0
    assert ends == look(by_events=False, looks=False)[1]
