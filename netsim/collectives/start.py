"""Start collectives on a live network, where schedules become plans that their members follow; time one alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from netsim.collectives.closed_form import QuietNetwork, contention_free_seconds
from netsim.collectives.schedules.direct import all_to_all_direct
from netsim.network.clock import Clock
from netsim.network.collective import Collective, GlooCollective, StepMessages, StepSequence
from netsim.network.network import Network
from netsim.network.trace import Span
from netsim.weather.faults import Faults

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from netsim.collectives.schedules.schedule import Schedule, Step
    from netsim.network.trace import Recorder
    from netsim.topology.protocol import Protocol
    from netsim.topology.topology import Topology

__all__ = ["Collective", "Timing", "start_all_to_all", "start_collective", "time_collective"]

# The messages of a schedule with more of them are made step by step each time, and not kept.
_MOST_KEPT_MESSAGES = 100_000


def start_collective(
    network: Network,
    schedule: Schedule,
    hosts: Sequence[int],
    *,
    group: Hashable = None,
    on_done: Callable[[int], None],
) -> Collective:
    """Start one collective among members on `hosts`; nothing happens before they `arrive`.

    Args:
        network: on whose links and clock it runs.
        schedule: what is sent.
        hosts: the host of each member; members may share one.
        group: names the connections it uses; collectives of one group share them, and their state.
        on_done: called with a member's position at the instant it finishes, which may be before others
            arrive (the root of a broadcast), and within `arrive` where nothing is to be waited for.
    """
    sequence = network.remember(schedule, partial(_sequence, schedule))
    return _start(network, sequence, hosts[: schedule.num_ranks], group, on_done)


def start_all_to_all(
    network: Network,
    hosts: Sequence[int],
    *,
    group: Hashable = None,
    on_done: Callable[[int], None],
) -> tuple[Callable[[int, Sequence[int]], None], Callable[[], None]]:
    """Start an all_to_all whose sizes become known member by member, as each enters.

    Args:
        network, hosts, group, on_done: as for `start_collective`.

    Returns:
        A function that lets a member enter now with the bytes that it has for each member, and `Collective.cancel`.
    """
    num = len(hosts)
    src, dst = network.remember(("all_to_all", num), partial(_pairs, num))
    messages = StepMessages(num, src, dst, [0.0] * len(src))
    started = _start(
        network, StepSequence(num, [0], lambda index: messages, True, False), hosts, group, on_done
    )

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
    return kind(engine, sequence, list(hosts), engine.group(group), on_done)


def _sequence(schedule: Schedule) -> StepSequence:
    is_kept = schedule.num_messages <= _MOST_KEPT_MESSAGES

    def make(index: int) -> StepMessages:
        return _messages(schedule.num_ranks, schedule.step(index))

    return StepSequence(schedule.num_ranks, schedule.gates, make, is_kept, schedule.op == "sendrecv")


def _messages(num_ranks: int, step: Step) -> StepMessages:
    sizes = step.num_bytes.astype(np.float64).tolist()
    return StepMessages(num_ranks, step.src.tolist(), step.dst.tolist(), sizes)


def _pairs(num: int) -> tuple[list[int], list[int]]:
    """Sender and receiver of each message of an all_to_all, in each sender's order of posting."""
    (phase,) = all_to_all_direct(num, np.arange(num * num + 1, dtype=np.int64))
    step = phase.step(0)
    return step.src.tolist(), step.dst.tolist()


@dataclass(frozen=True)
class Timing:
    """Times and bytes of a collective.

    Attributes:
        seconds: of each repetition, from the common start until the last rank finishes.
        rank_seconds: of the last repetition, by rank.
        link_bytes: its payload that crossed each link in the last repetition, by link index; what a crash had it
            send twice counts twice.
        background_link_bytes: likewise, the payload of background traffic meanwhile.
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
        pause_seconds: virtual time between repetitions.
        recorder: records transfers and spans; None: nothing is recorded.

    Raises:
        DeadlockError: the collective can never end.
    """
    if protocol.is_plain and not topology.weather and recorder is None:
        ends = contention_free_seconds(
            made, hosts, np.zeros(made.num_ranks), QuietNetwork.of(topology, protocol)
        )
        if ends is not None:
            link_bytes = _link_bytes(made, hosts, topology)
            nothing = [0.0] * len(link_bytes)
            return Timing([float(ends.max())] * repeat, ends.tolist(), link_bytes, nothing)
    return _simulated(topology, protocol, made, hosts, repeat, pause_seconds, recorder)


def _link_bytes(made: Schedule, hosts: Sequence[int], topology: Topology) -> list[float]:
    """Payload across each link."""
    totals = [0.0] * len(topology.links)
    for src, dst, num_bytes in made.pair_bytes:
        for link in topology.route(hosts[src], hosts[dst]):
            totals[link] += num_bytes
    return totals


def _simulated(
    topology: Topology,
    protocol: Protocol,
    made: Schedule,
    hosts: Sequence[int],
    repeat: int,
    pause_seconds: float,
    recorder: Recorder | None,
) -> Timing:
    """Time it on a live network."""
    clock = Clock()
    network = Network(clock, topology, protocol)
    if recorder is not None:
        recorder.watch(network)
    faults = Faults(network)
    seconds: list[float] = []
    ends: list[float] = []
    before = others_before = network.link_bytes
    for repetition in range(repeat):
        if repetition and pause_seconds:
            clock.run(until=clock.now + pause_seconds)
        start, before, others_before = clock.now, network.link_bytes, network.background_link_bytes
        ends = [np.inf] * made.num_ranks
        waiting = _Waiting(ends, clock)
        if recorder is not None:
            recorder.unfinished_spans = partial(waiting.spans, made, start)
        one = start_collective(network, made, hosts, on_done=waiting.note)
        for member in range(made.num_ranks):
            one.arrive(member)
        faults.run_until(waiting.is_empty)
        if recorder is not None:
            recorder.spans += waiting.spans(made, start)
            recorder.unfinished_spans = list
        ends = [end - start for end in ends]
        seconds.append(max(ends))
    background = network.background_link_bytes - others_before
    own = network.link_bytes - before - background
    own[own < 0.5] = 0.0  # rounding of sums: nothing of ours has crossed that link
    return Timing(seconds, ends, own.tolist(), background.tolist())


class _Waiting:
    """Records the instant at which each member finishes."""

    def __init__(self, ends: list[float], clock: Clock) -> None:
        self._ends = ends
        self._clock = clock
        self._num_left = len(ends)

    def note(self, member: int) -> None:
        self._ends[member] = self._clock.now
        self._num_left -= 1

    def spans(self, made: Schedule, start: float) -> list[Span]:
        """Span of each member since the start, until it finished or until now."""
        ends = (end if end < np.inf else self._clock.now for end in self._ends)
        return [
            Span(member, "communication", made.op, start, end, made.num_bytes)
            for member, end in enumerate(ends)
        ]

    def is_empty(self) -> bool:
        return not self._num_left
