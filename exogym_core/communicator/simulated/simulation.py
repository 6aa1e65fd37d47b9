"""What all ranks of a simulated run share: the exchange for values, the kernel for times, the network.

Whoever carries the ranks (threads of this process, other processes) owns one of these.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import numpy as np

from exogym_core.communicator.base import CODE_CARRIERS
from exogym_core.communicator.exchange import Exchange, Slot
from exogym_core.communicator.simulated.link_history import LinkHistory
from exogym_core.communicator.values import Combine, combine
from netsim.collectives import (
    Abridged,
    Choices,
    Gathering,
    Schedule,
    are_many,
    is_crowd,
    parse_collectives,
    schedule,
    start_all_to_all,
    start_collective,
)
from netsim.network.clock import Clock
from netsim.network.network import Network
from netsim.ranks.calls import start_at_once
from netsim.ranks.kernel import Kernel
from netsim.ranks.reach import Reach
from netsim.topology.protocol import Protocol
from netsim.topology.windows import WindowLimit, window_limit
from netsim.weather.faults import Faults

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Mapping, Sequence

    from netsim.collectives import Collective
    from netsim.network.network import Waiting
    from netsim.network.recorder import Recorder
    from netsim.ranks.calls import Cancel, Enter
    from netsim.ranks.kernel import StampedRow
    from netsim.ranks.requests import Answer, Call, Letter, Request, Take
    from netsim.topology.topology import Topology

# Kinds of collectives that are remembered, so that each is looked at once.
_MOST_NOTED = 512

__all__ = ["Schedules", "Simulation", "World", "reckons_crowd"]


@dataclass(frozen=True)
class World:
    """Where a run takes place, in plain data that any process can have.

    Attributes:
        num_ranks: how many ranks there are.
        topology: the network; None where communication takes no time.
        hosts: the host of each rank (index into `topology.hosts`).
        protocol: how transfers use links.
        collectives: op -> algorithm, for ops that shall not use the fastest one.
    """

    num_ranks: int
    topology: Topology | None
    hosts: tuple[int, ...]
    protocol: Protocol
    collectives: Mapping[str, str]

    @classmethod
    def build(
        cls,
        num_ranks: int,
        topology: Topology | None,
        placement: Sequence[str] | None,
        protocol: object,
        collectives: str | Mapping[str, str] | None,
    ) -> World:
        """Place the ranks, and settle the protocol: the one given, else the topology's, else ideal.

        Raises:
            InputError: placement, protocol, a collective or its algorithm does not exist.
        """
        hosts = topology.place(num_ranks, placement) if topology is not None else ()
        chosen = protocol if protocol is not None or topology is None else topology.protocol
        parsed = Protocol.parse(chosen)  # type: ignore[arg-type]
        return cls(num_ranks, topology, hosts, parsed, parse_collectives(collectives))

    def regions(self, ranks: Sequence[int]) -> list[str]:
        """The region of each of these ranks."""
        assert self.topology is not None
        return [self.topology.region_of(self.hosts[rank]) for rank in ranks]


class Schedules:
    """The schedule of every call in a world, and what it sends; computed once."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._choices = Choices(world.topology, world.protocol, world.collectives)
        self._traffic = lru_cache(maxsize=_MOST_NOTED)(self._traffic_uncached)
        self._regions = lru_cache(maxsize=_MOST_NOTED)(world.regions)
        self._known = lru_cache(maxsize=_MOST_NOTED)(self._found)

    def of(self, call: Call) -> Schedule:
        """The schedule that `call` goes by."""
        return self._known(call) if call.parts is None else self._found(call)

    def _found(self, call: Call) -> Schedule:
        world = self._world
        hosts = self._hosts(call.ranks)
        return schedule(
            call.op,
            len(call.ranks),
            num_bytes=call.num_bytes,
            algorithm=self._choices.algorithm(call.op, hosts, call.num_bytes, call.root),
            root=call.root,
            element_bytes=call.element_bytes,
            parts=call.parts,
            hosts=hosts or None,
            topology=world.topology,
        )

    @property
    def carrier_of_codes(self) -> str:
        """What all-reduces encoded values, see `Communicator.carrier_of_codes`."""
        fixed = self._world.collectives.get("all_reduce")
        return fixed if fixed in CODE_CARRIERS else CODE_CARRIERS[0]

    def _hosts(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """The host of each rank; none without a network."""
        return tuple(self._world.hosts[rank] for rank in ranks) if self._world.topology is not None else ()

    def traffic(self, call: Call, member: int) -> tuple[int, int]:
        """(bytes sent, bytes sent to another region) by this member; of an all_to_all, as it posts it."""
        if call.op == "all_to_all":
            return self._all_to_all_traffic(call.ranks, _own_row(call), member)
        sent, wan = self._traffic(call)
        return int(sent[member]), int(wan[member])

    def _all_to_all_traffic(self, ranks: Sequence[int], row: Sequence[int], member: int) -> tuple[int, int]:
        sent = sum(row) - row[member]
        if self._world.topology is None:
            return sent, 0
        regions = self._regions(tuple(ranks))
        return sent, sum(size for size, region in zip(row, regions, strict=True) if region != regions[member])

    def _traffic_uncached(self, call: Call) -> tuple[np.ndarray, np.ndarray]:
        if len(set(call.ranks)) == 1:
            return (np.zeros(len(call.ranks)),) * 2
        plan = self.of(call)
        if self._world.topology is None:
            return plan.sent_bytes, np.zeros(len(call.ranks))
        return plan.sent_bytes, plan.region_bytes(self._world.regions(call.ranks))


class Simulation:
    """The exchange and the kernel of one run, joined.

    Args:
        world: where it takes place.
        let_run: lets ranks get on, at least one by one call, or raises what ends the run; False where none can.
            Told whose next request the kernel needs, if it needs one.
        on_served: told of calls, and of their members whose values have become known.
        on_answer: told (rank, value) when the kernel has answered a question; unblocks the rank in the exchange.
        on_row: told of every row that a rank has marked, in order of virtual time.
        past: what each rank has requested in an earlier part of this run, replayed before all else; empty for
            a run from the start.
        on_request: told of every request as it is served, the past included.
        recorder: keeps what happens; None: nobody wants to know.
        recall: blocks until one of those who are away makes a call again; False where nobody is.
        on_taken: told of every rank that takes letters, what it asked, and which.
        schedules: of calls, where they are known from another run of this world; None: found anew.
        abridged: long collectives and crowds of messages are reckoned, see `netsim.collectives.Abridged`.

    Attributes:
        away: ranks that wait for something of their own while others' time is running out: the clock goes on.
        algorithms: of each operation that was called, the algorithms that it went by.
        window_limit: the way on which a sender's window limited collectives most; None where links did.
        link_history: what crossed links, looked at with rank 0's rows; None without a topology.
    """

    def __init__(
        self,
        world: World,
        let_run: Callable[[int | None], bool],
        on_served: Callable[[Slot, Sequence[int]], None],
        on_answer: Callable[[int, Answer], None],
        on_row: Callable[[StampedRow], None],
        past: Sequence[Sequence[Request]] = (),
        on_request: Callable[[int, Request], None] = lambda rank, request: None,
        recorder: Recorder | None = None,
        combined: Combine = combine,
        recall: Callable[[], bool] = lambda: False,
        on_taken: Callable[[int, Take, tuple[Letter, ...]], None] = lambda rank, take, letters: None,
        schedules: Schedules | None = None,
        abridged: bool = False,
    ) -> None:
        self.world = world
        self.away: set[int] = set()
        self.schedules = schedules if schedules is not None else Schedules(world)
        self._begin: Callable[..., Collective | Gathering] = start_collective
        self._abridged: Abridged | None = None
        if abridged and world.topology is not None:
            self._abridged = Abridged(world.topology, world.protocol)
            self._begin = self._abridged.start
        self.algorithms: dict[str, set[str]] = {}
        self.window_limit: WindowLimit | None = None
        self._has_windows = world.protocol.has_windows
        self._windows_noted: set[tuple[Schedule, tuple[int, ...]]] = set()
        self.exchange = Exchange(world.num_ranks, on_served, combined)
        clock = Clock()
        self.network = Network(clock, world.topology, world.protocol) if world.topology is not None else None
        if recorder is not None and self.network is not None:
            recorder.watch(self.network)
        self.link_history = LinkHistory(self.network) if self.network is not None else None
        self._let_run, self._on_answer, self._on_row = let_run, on_answer, on_row
        self.kernel = self._kernel(clock, on_request, recall, on_taken, recorder)
        for stream, requests in zip(self.kernel.streams, past, strict=bool(past)):
            stream.extend(requests)

    def _kernel(
        self,
        clock: Clock,
        on_request: Callable[[int, Request], None],
        recall: Callable[[], bool],
        on_taken: Callable[[int, Take, tuple[Letter, ...]], None],
        recorder: Recorder | None,
    ) -> Kernel:
        """The kernel, joined to the exchange, the network and its weather."""
        world, network = self.world, self.network
        faults = Faults(network) if network is not None else None
        kernel = Kernel(
            world.num_ranks,
            self._refill,
            answer=self._on_answer,
            start=self._start if network is not None else start_at_once,
            clock=clock,
            collectives_in_flight=world.protocol.collectives_in_flight,
            on_row=self._row,
            blame=faults.blame if faults is not None else lambda: "",
            is_hopeless=faults.is_hopeless if faults is not None else None,
            on_span=recorder.spans.append if recorder is not None else None,
            downtime=network.downtime if network is not None else None,
            hosts=world.hosts,
            reach=Reach(network, world.hosts, faults.may_come_back if faults is not None else _never),
            on_older=self.exchange.forget,
            on_request=on_request,
            can_run=lambda rank: rank in self.exchange.running and rank not in self.away,
            settle=self._settle,
            recall=recall,
            on_broken=self.exchange.break_group,
            on_taken=on_taken,
            on_withdrawn=self.exchange.withdraw,
        )
        if recorder is not None:
            recorder.unfinished_spans = kernel.unfinished_spans
        if faults is not None:
            faults.on_stuck, faults.on_change = kernel.give_up, kernel.network_changed
        if network is not None:
            network.on_give_up = partial(self._given_up, network.on_give_up)
        return kernel

    def _given_up(self, otherwise: Callable[[Waiting], None], waiting: Waiting) -> None:
        """A connection is lost: who has given its calls a time is told so, for all others the run ends."""
        if not self.kernel.connection_lost(waiting.connection):
            otherwise(waiting)

    def wait_for_clock(self, rank: int) -> None:
        """`rank`, which has a question in its stream, is blocked until `on_answer`."""
        self.exchange.block_for_clock(rank)

    def _row(self, row: StampedRow) -> None:
        # One rank's rows are occasions enough: a look takes longer than a step, where collectives are known by heart.
        if self.link_history is not None and row.rank == 0:
            self.link_history.look()
        self._on_row(row)

    def _refill(self, rank: int) -> None:
        """Have ranks run until the kernel has this one's next request.

        None is left to run where it waits off the clock for one that waits for the clock. If that one can be let
        on, this one stands still until then.

        Raises:
            DeadlockError: nothing can ever come.
        """
        stream = self.kernel.streams[rank]
        while not stream and rank not in self.away:
            if not self._let_run(rank):
                hopeless = self.exchange.deadlock()
                if hopeless is not None:
                    raise self.exchange.deadlock(kernel_needs=rank) or hopeless
                return

    def _settle(self) -> None:
        """Have ranks run until each waits for something, or is away."""
        while self._let_run(None):
            pass

    def _note_windows(self, plan: Schedule, hosts: tuple[int, ...]) -> None:
        """Look once at each kind of collective whether a window limits it."""
        world, key = self.world, (plan, hosts)
        if key in self._windows_noted or world.topology is None:
            return
        if len(self._windows_noted) >= _MOST_NOTED:
            self._windows_noted.clear()
        self._windows_noted.add(key)
        ways = [(hosts[src], hosts[dst], num_bytes) for src, dst, num_bytes in plan.pair_bytes]
        found = window_limit(world.topology, world.protocol, ways)
        if found is not None and (self.window_limit is None or found.share < self.window_limit.share):
            self.window_limit = found

    def _start(self, call: Call, group: Hashable, on_done: Callable[[int], None]) -> tuple[Enter, Cancel]:
        assert self.network is not None
        hosts = tuple([self.world.hosts[rank] for rank in call.ranks])
        if call.op == "all_to_all":
            self.algorithms.setdefault(call.op, set()).add("direct")
            if self._abridged is None:
                enter, cancel = start_all_to_all(self.network, hosts, group=group, on_done=on_done)
            else:
                enter, cancel = self._abridged.start_all_to_all(
                    self.network,
                    hosts,
                    lambda rows: self.schedules.of(_all_to_all(call, rows)),
                    group=group,
                    on_done=on_done,
                )
            return lambda member, posted: enter(member, _own_row(posted)), cancel
        plan = self.schedules.of(call)
        self.algorithms.setdefault(call.op, set()).add(plan.algorithm)
        if not plan.phases:
            return (lambda member, _: on_done(member)), _nothing
        if self._has_windows and not is_crowd(plan):
            self._note_windows(plan, hosts)
        started = self._begin(self.network, plan, hosts, group=group, on_done=on_done)
        return lambda member, _: started.arrive(member), started.cancel


def reckons_crowd(num_ranks: int) -> bool:
    """Whether so many ranks that all send to each other at once are reckoned, where a simulation is abridged."""
    return are_many(num_ranks * (num_ranks - 1))


def _nothing() -> None:
    """There is nothing to cancel."""


def _never(links: Collection[int]) -> bool:
    return False


def _own_row(call: Call) -> tuple[int, ...]:
    """What a member that posts an all_to_all has for each member, in bytes."""
    assert call.parts is not None
    (row,) = call.parts
    return row


def _all_to_all(call: Call, rows: tuple[tuple[int, ...], ...]) -> Call:
    """The call in which member i sends `rows[i][j]` bytes to member j."""
    even = len({num_bytes for row in rows for num_bytes in row}) == 1
    return call._replace(num_bytes=sum(map(sum, rows)), parts=None if even else rows)
