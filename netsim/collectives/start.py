"""Collectives on a live network: started from a schedule, or timed alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from netsim.collectives.closed_form import MessageRoutes, contention_free_seconds
from netsim.collectives.schedules.algorithms import build, default_algorithm
from netsim.collectives.schedules.schedule import Problem
from netsim.network.collective import (
    Collective,
    GlooCollective,
    StepMessages,
    StepSequence,
    StoreExchange,
)
from netsim.network.trace import Span
from netsim.weather.faults import network_with_weather

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from netsim.collectives.schedules.schedule import Schedule
    from netsim.network.network import Network
    from netsim.network.trace import Recorder
    from netsim.topology.protocol import Protocol
    from netsim.topology.topology import Topology

__all__ = ["Collective", "Timing", "link_bytes", "start_all_to_all", "start_collective", "time_collective"]


def start_collective(
    network: Network,
    schedule: Schedule,
    hosts: Sequence[int],
    *,
    group: Hashable = None,
    on_done: Callable[[int], None],
) -> Collective:
    """Start a collective among members on `hosts`; its members act when they `arrive`.

    Args:
        network: on whose links and clock it runs.
        schedule: what is sent.
        hosts: the host of each member, copies in stores included; members may share one.
        group: name of its connections, which collectives of one group share; None: connections of its own.
        on_done: called with a member's position at the instant it finishes, which may be before others arrive (the
            root of a broadcast), or within `arrive` if it waits for nobody.
    """
    hosts = hosts[: schedule.num_ranks]
    if not schedule.num_copies:
        return _start(network, schedule.sequence, hosts, group, on_done)
    num_ranks = schedule.num_ranks - schedule.num_copies

    def done(member: int) -> None:
        if member < num_ranks:
            on_done(member)

    stores = [network.topology.hosts[host].store for host in hosts]
    delays = [store.latency_seconds if store is not None else 0.0 for store in stores]
    name = object() if group is None else group
    about = (network.engine, schedule.sequence, list(hosts), name)
    exchange = StoreExchange(*about, done, num_ranks, delays)
    for copy in range(num_ranks, schedule.num_ranks):
        exchange.arrive(copy)
    return exchange


def start_all_to_all(
    network: Network,
    hosts: Sequence[int],
    *,
    group: Hashable = None,
    on_done: Callable[[int], None],
) -> tuple[Callable[[int, Sequence[int]], None], Callable[[], None]]:
    """Start an all_to_all in which each member brings its sizes when it enters.

    Args:
        network, hosts, group, on_done: as for `start_collective`.

    Returns:
        A function that enters a member with the bytes that it has for each other, and `Collective.cancel`.
    """
    num = len(hosts)
    op = "all_to_all"
    made = build(Problem(op, default_algorithm(op), num, 0, 0, 1, None, ()))
    step = made.step(0)  # each sender's messages in the order of posting
    messages = StepMessages(num, step.src.tolist(), step.dst.tolist(), [0.0] * len(step.src))
    started = _start(network, made.walked(lambda index: messages, True), hosts, group, on_done)

    def enter(member: int, row: Sequence[int]) -> None:
        for send in range(messages.first[member], messages.first[member + 1]):
            messages.sizes[send] = float(row[messages.targets[send]])
        started.arrive(member)

    return enter, started.cancel


def _start(
    network: Network,
    sequence: StepSequence,
    hosts: Sequence[int],
    group: Hashable,
    on_done: Callable[[int], None],
) -> Collective:
    kind = GlooCollective if network.protocol.rendezvous else Collective
    engine = network.engine
    return kind(engine, sequence, list(hosts), object() if group is None else group, on_done)


@dataclass(frozen=True)
class Timing:
    """Times and bytes of a collective.

    Attributes:
        seconds: of each repetition, from the common start until the last rank finishes.
        rank_seconds: of the last repetition, by rank.
        link_bytes: its payload across each link in the last repetition, by link index; bytes sent again after a
            crash count twice.
        background_link_bytes: payload of background traffic across each link in the last repetition.
    """

    seconds: list[float]
    rank_seconds: list[float]
    link_bytes: list[float]
    background_link_bytes: list[float]


def time_collective(
    topology: Topology,
    protocol: Protocol,
    made: Schedule,
    hosts: Sequence[int],
    *,
    repeat: int = 1,
    calls: int = 1,
    pause_seconds: float = 0.0,
    recorder: Recorder | None = None,
) -> Timing:
    """Simulate a collective several times; connections keep their state from one repetition to the next.

    Args:
        topology: the network; its weather applies.
        protocol: how transfers use it.
        made: schedule of the collective.
        hosts: index of each member's host.
        repeat: number of repetitions.
        calls: of each repetition; a member enters the next one when it has finished its own.
        pause_seconds: virtual time between repetitions.
        recorder: records transfers and spans; None: nothing is recorded.

    Raises:
        DeadlockError: the collective can never end.
    """
    if protocol.is_plain and not topology.weather and recorder is None and calls == 1:
        quiet = contention_free_seconds(made, hosts, topology, protocol)
        if quiet is not None:
            none = [0.0] * len(topology.links)
            return Timing(
                [float(quiet.max())] * repeat,
                quiet.tolist(),
                link_bytes(made, hosts, topology, protocol),
                none,
            )
    network, faults = network_with_weather(topology, protocol, recorder)
    clock = network.env
    seconds, ends = list[float](), dict[int, float]()

    def note(member: int) -> None:
        ends[member] = clock.now

    for repetition in range(repeat):
        if repetition and pause_seconds:
            clock.run(until=clock.now + pause_seconds)
        start, before, others_before = clock.now, network.link_bytes, network.background_link_bytes
        ends.clear()
        _enter_in_a_row(network, made, hosts, calls, note)
        try:
            faults.run_until(lambda: len(ends) == made.num_ranks)
        finally:
            if recorder is not None:
                recorder.spans += [
                    Span(member, "communication", made.op, start, ends.get(member, clock.now), made.num_bytes)
                    for member in range(made.num_ranks)
                ]
        seconds.append(max(ends.values()) - start)
    background = network.background_link_bytes - others_before
    own = network.link_bytes - before - background
    own[own < 0.5] = 0.0  # rounding of sums: nothing of ours has crossed that link
    rank_seconds = [ends[member] - start for member in range(made.num_ranks)]
    return Timing(seconds, rank_seconds, own.tolist(), background.tolist())


def _enter_in_a_row(
    network: Network, made: Schedule, hosts: Sequence[int], calls: int, on_done: Callable[[int], None]
) -> None:
    """Enter all members into the first of so many equal calls; each enters the next when it has ended its own.

    Args:
        network, made, hosts: as for `start_collective`.
        calls: in a row.
        on_done: called with a member at the instant at which it ends its last call.
    """
    started = list[Collective]()
    entered, ended = [0] * made.num_ranks, [0] * made.num_ranks
    entering = set[int]()  # members within `arrive`, in which a call without messages ends at once

    def go_on(member: int) -> None:
        entering.add(member)
        while entered[member] == ended[member] < calls:
            number = entered[member]
            entered[member] += 1
            if number == len(started):
                started.append(start_collective(network, made, hosts, group=made.op, on_done=end))
            started[number].arrive(member)
        entering.remove(member)

    def end(member: int) -> None:
        ended[member] += 1
        if ended[member] == calls:
            on_done(member)
        elif member not in entering:
            go_on(member)

    for member in range(made.num_ranks):
        go_on(member)


def link_bytes(made: Schedule, hosts: Sequence[int], topology: Topology, protocol: Protocol) -> list[float]:
    """Payload of a collective across each link."""
    routes = MessageRoutes(hosts, topology, protocol)
    src, dst, num_bytes = made.pairs
    carried: list[float] = routes.carried(routes.links(src, dst), num_bytes)[: len(topology.links)].tolist()
    return carried
