"""How a collective ends that has a network to itself: remembered, or found out ahead of time."""

from __future__ import annotations

import importlib.util
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from netsim.clock import Clock
from netsim.collectives.compiled import compiled_seconds
from netsim.collectives.events import Execution, call_at
from netsim.collectives.recurrence import contention_free_seconds
from netsim.collectives.rendezvous import RendezvousExecution
from netsim.fork import Windows, credit, fork, put_windows, window_states, windows_of, wires_of

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from netsim.collectives.schedules import Schedule
    from netsim.network import Network
    from netsim.protocol import Protocol

__all__ = ["Outcome", "Rehearsals", "execute", "is_plain"]

Seconds = npt.NDArray[np.float64]

_GRID_PER_SECOND = 2.0**30
_MOST_OUTCOMES = 1024
# From so many messages on, loading and running compiled code takes less time than playing them one by one.
_WORTH_COMPILING = 20_000


@dataclass(frozen=True)
class Outcome:
    """What a collective alone on a network comes to; instants count from its first arrival.

    Attributes:
        ends: instants in order, each with the members that are through then.
        traffic: source host, target host and bytes of each pair that exchanged any.
        windows: what it leaves behind of its connections.
    """

    ends: tuple[tuple[float, tuple[int, ...]], ...]
    traffic: tuple[tuple[int, int, int], ...]
    windows: Windows

    def leave_behind(self, network: Network, first: float) -> None:
        """Leave bytes and connections on a network as if it had been played there from instant `first` on."""
        for src, dst, num_bytes in self.traffic:
            credit(network, src, dst, num_bytes)
        put_windows(network, self.windows, first)


class Rehearsals:
    """What one network remembers of collectives that had it to themselves.

    Attributes:
        outcomes: by all that they depend on, the one used last at the end.
    """

    def __init__(self, network: Network) -> None:
        self._network = network
        self.outcomes: OrderedDict[Hashable, Outcome] = OrderedDict()

    def outcome(
        self,
        schedule: Schedule,
        hosts: tuple[int, ...],
        group: Hashable,
        arrivals: Sequence[float],
    ) -> Outcome:
        """How a collective ends if its members arrive at these instants and nobody else is on the network."""
        network, first = self._network, min(arrivals)
        # Request times lie on a grid: arrivals that differ by less are the same arrivals.
        offsets = tuple(round((arrival - first) * _GRID_PER_SECOND) for arrival in arrivals)
        state = window_states(network, group, first)
        key = (schedule, hosts, group, offsets, network.version, state)
        outcome = self.outcomes.get(key)
        if outcome is not None:
            self.outcomes.move_to_end(key)
            return outcome
        alone = _Alone(network, schedule, hosts, group, np.array(arrivals, np.float64) - first)
        seconds, left = alone.ends(first)
        outcome = self.outcomes[key] = Outcome(_by_instant(seconds), _traffic(schedule, hosts), left)
        if len(self.outcomes) > _MOST_OUTCOMES:
            self.outcomes.popitem(last=False)
        return outcome


def execute(
    network: Network,
    schedule: Schedule,
    hosts: Sequence[int],
    group: Hashable,
    on_done: Callable[[int], None],
) -> Execution:
    """The execution by events that the network's protocol asks for."""
    kind = RendezvousExecution if network.protocol.rendezvous else Execution
    return kind(network, schedule, hosts, group, on_done)


def is_plain(protocol: Protocol) -> bool:
    """Whether a message alone takes its latency and then the rate of its narrowest link, whatever was before."""
    per_transfer = protocol.connections == "per-transfer"
    return not (protocol.has_windows or protocol.rendezvous or protocol.ack_share or per_transfer)


@dataclass(frozen=True)
class _Alone:
    """A collective that is to be played alone; arrivals count from the first."""

    network: Network
    schedule: Schedule
    hosts: tuple[int, ...]
    group: Hashable
    arrivals: Seconds

    def ends(self, first: float) -> tuple[Seconds, Windows]:
        """When each member is through (infinity: never), and the windows left behind, as if now were `first`."""
        if is_plain(self.network.protocol):
            wires = wires_of(self.network)
            seconds = contention_free_seconds(self.schedule, self.hosts, self.arrivals, wires)
            if seconds is None and self.schedule.num_messages >= _WORTH_COMPILING and _can_compile():
                seconds = compiled_seconds(self.schedule, self.hosts, self.arrivals, wires)
            if seconds is not None:
                return seconds, {}
        return self._by_events(first)

    def _by_events(self, first: float) -> tuple[Seconds, Windows]:
        copied = fork(self.network, Clock(), -first)
        ends = np.full(self.schedule.num_ranks, np.inf)

        def on_done(member: int) -> None:
            ends[member] = copied.env.now

        execution = execute(copied, self.schedule, self.hosts, self.group, on_done)
        for member in np.argsort(self.arrivals, kind="stable").tolist():
            call_at(copied.env, float(self.arrivals[member]), partial(execution.arrive, member))
        copied.env.run()
        return ends, windows_of(copied, self.group)


def _can_compile() -> bool:
    return importlib.util.find_spec("numba") is not None


def _by_instant(seconds: Seconds) -> tuple[tuple[float, tuple[int, ...]], ...]:
    """Members by the instant at which they are through, those that never are left out."""
    instants, which = np.unique(seconds, return_inverse=True)
    order = np.argsort(which, kind="stable")
    members = np.split(order, np.searchsorted(which[order], np.arange(1, len(instants))))
    ends = zip(instants.tolist(), (tuple(each.tolist()) for each in members), strict=True)
    return tuple((instant, each) for instant, each in ends if instant < np.inf)


def _traffic(schedule: Schedule, hosts: tuple[int, ...]) -> tuple[tuple[int, int, int], ...]:
    """Bytes by pair of hosts."""
    return tuple((hosts[src], hosts[dst], num_bytes) for src, dst, num_bytes in schedule.pair_bytes)
