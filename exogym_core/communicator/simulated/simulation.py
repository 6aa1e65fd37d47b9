"""The simulation that all ranks of a run share: the exchange for values, the kernel for times, the network.

Runners, whose ranks are threads of this process or live in others, derive from it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from exogym_core.communicator.base import AVERAGING_ALGORITHMS, CollectiveCall
from exogym_core.communicator.exchange import Exchange, Reduce, Slot, reduce_tensors
from exogym_core.communicator.simulated.meeting_requests import (
    Confirm,
    Fetch,
    Fetched,
    Join,
    Keep,
    Met,
    Publish,
)
from exogym_core.communicator.simulated.meetings import Meetings
from exogym_core.communicator.simulated.reach import Reach
from netsim import Clock, Faults, Network, Protocol, schedule, start_collective
from netsim.collectives.choice import Choices, parse_collectives
from netsim.collectives.schedules.direct import store_exchange
from netsim.collectives.start import start_all_to_all
from netsim.ranks import Call, Kernel, RankSink, RankSource
from netsim.topology.graph import Storage
from netsim.topology.protocol import WindowLimit, window_limit

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator, Hashable, Mapping, Sequence

    import simpy
    from numpy import float64
    from numpy.typing import NDArray

    from netsim import Recorder, Topology
    from netsim.collectives.schedules.schedule import Schedule
    from netsim.network.network import Waiting
    from netsim.ranks import Cancel, Enter, Key, Request, StampedRow

__all__ = ["LinkHistory", "MeetingKernel", "Schedules", "Simulation", "World", "load_of"]

_MOST = 120  # instants that are kept after each thinning; twice as many at most
_MOST_NUMBERS = 50_000  # in all rows: networks of thousands of links are looked at less often


class LinkHistory:
    """Samples the traffic of a network's links when a transfer or collective ends.

    Recording changes nothing in the network. When there are too many recorded instants, every other one is
    dropped, and from then on those that come too soon after the last.

    Args:
        network: owner of the links.
    """

    def __init__(self, network: Network) -> None:
        self._network = network
        self._samples: list[tuple[float, NDArray[float64]]] = [(0.0, np.zeros(len(network.topology.links)))]
        self._gap_seconds = 0.0

    def record(self) -> None:
        """Sample the bytes that have crossed links, if the last sample is long enough ago."""
        now = float(self._network.env.now)
        if now <= self._samples[-1][0] or now < self._samples[-1][0] + self._gap_seconds:
            return
        self._samples.append((now, self._network.link_bytes))
        if len(self._samples) > 2 * _MOST:
            self._samples = self._samples[::2]
            self._gap_seconds = now / (2 * _MOST)

    def rows(self) -> list[dict[str, float]]:
        """A row an instant: `virtual_seconds`, and bytes from the start over each link (`a->b`) that carried any."""
        now = float(self._network.env.now)
        end = (now, self._network.link_bytes)
        samples = [sample for sample in self._samples if sample[0] < now] + [end]
        names = [f"{link.source}->{link.target}" for link in self._network.topology.links]
        used = [index for index, total in enumerate(end[1].tolist()) if total > 0]
        stride = 1 + len(samples) * len(used) // _MOST_NUMBERS
        samples = [sample for number, sample in enumerate(samples) if number % stride == 0 or sample is end]
        return [
            {"virtual_seconds": at, **{names[index]: round(float(totals[index])) for index in used}}
            for at, totals in samples
        ]


# Kinds of collectives that are remembered, so that each is looked at once.
_MOST_NOTED = 512


@dataclass(frozen=True)
class World:
    """World of a run, in plain data that any process can have.

    Attributes:
        num_ranks: number of ranks.
        topology: the network; None where communication takes no time.
        hosts: the host of each rank (index into `topology.hosts`).
        protocol: use of links by transfers.
        collectives: op -> algorithm, for ops that shall not use the fastest one.
        shared_cores: see `Kernel`.
        choose: finds `collectives`, those given among them, for the first call; None: they are found.
    """

    num_ranks: int
    topology: Topology | None
    hosts: tuple[int, ...]
    protocol: Protocol
    collectives: Mapping[str, str]
    shared_cores: int | None = None
    choose: Callable[[], Mapping[str, str]] | None = None

    @classmethod
    def build(
        cls,
        num_ranks: int,
        topology: Topology | None,
        placement: Sequence[str] | None,
        protocol: str | Mapping[str, Any] | Protocol | None,
        collectives: str | Mapping[str, str] | None,
        shared_cores: int | None = None,
        choose: Callable[[], Mapping[str, str]] | None = None,
    ) -> World:
        """Place the ranks, and settle the protocol: the one given, else the topology's, else `linux-tcp`.

        Raises:
            InputError: placement, protocol, a collective or its algorithm does not exist.
        """
        hosts = topology.place(num_ranks, placement) if topology is not None else ()
        of_topology = topology.protocol if topology is not None else None
        resolved = Protocol.resolve(protocol, of_topology).for_ranks(hosts)
        fixed = parse_collectives(collectives) if choose is None else {}  # else it finds those given, too
        return cls(num_ranks, topology, hosts, resolved, fixed, shared_cores, choose)

    def settled(self) -> World:
        """World with its algorithms chosen: plain data."""
        return self if self.choose is None else replace(self, collectives=self.choose(), choose=None)

    def regions(self, ranks: Sequence[int]) -> list[str]:
        """The region of each of these ranks."""
        assert self.topology is not None
        return [self.topology.region_of(self.hosts[rank]) for rank in ranks]


class Schedules:
    """The schedule of every call in a world, and its traffic; computed once."""

    def __init__(self, world: World) -> None:
        self._world = world
        # No cached properties: before Python 3.12 all instances share their lock, and one choice waits for others.
        self._settled = lru_cache(1)(world.settled)
        places = world.topology, world.protocol
        self._choices = lru_cache(1)(lambda: Choices(*places, self._settled().collectives))
        self._traffic = lru_cache(maxsize=_MOST_NOTED)(self._traffic_uncached)
        self._regions = lru_cache(maxsize=_MOST_NOTED)(world.regions)
        self._known = lru_cache(maxsize=_MOST_NOTED)(self._found)
        self._hosts = lru_cache(maxsize=_MOST_NOTED)(self._hosts_uncached)
        self._latest: tuple[Call | None, list[tuple[int, int]]] = (None, [])  # call, and its traffic

    def of(self, call: Call) -> Schedule:
        """The schedule that `call` goes by."""
        return self._known(call) if call.parts is None else self._found(call)

    def _found(self, call: Call) -> Schedule:
        world = self._world
        hosts = self._hosts(call.ranks)
        if call.store is not None:
            return self._exchange(call, hosts)
        return schedule(
            call.op,
            len(call.ranks),
            num_bytes=call.num_bytes,
            algorithm=self._choices().algorithm(call.op, hosts, call.num_bytes, call.root),
            root=call.root,
            element_bytes=call.element_bytes,
            parts=call.parts,
            hosts=hosts or None,
            topology=world.topology,
        )

    def _exchange(self, call: Call, hosts: tuple[int, ...]) -> Schedule:
        """Exchange through a store, in which each rank downloads from the nearest of the store and its relays."""
        stores, topology = self._places(call.store), self._world.topology
        places = [0] * len(call.ranks)
        if topology is not None and len(stores) > 1:
            ways = [[topology.route_latency_seconds(store, host) for store in stores] for host in hosts]
            places = [way.index(min(way)) for way in ways]
        part = call.num_bytes // (len(call.ranks) if call.op == "all_gather" else 1)
        return store_exchange(call.op, part, places, max(len(stores), 1))

    def contenders(self, call: Call, within: float, few_messages: float) -> tuple[str, ...]:
        """Algorithm of `call`, and those that may be faster in a round, see `Choices.contenders`."""
        about = (call.op, self._hosts(call.ranks), call.num_bytes, call.root)
        return self._choices().contenders(*about, within, few_messages)

    def check_store(self, store: tuple[str, ...]) -> None:
        """Raise InputError where the topology has no such store."""
        self._places(store)

    def _places(self, store: tuple[str, ...] | None) -> tuple[int, ...]:
        """Hosts of a store and its relays; none without a store or a network."""
        topology = self._world.topology
        return () if topology is None or store is None else topology.store_hosts(store[0], store[1:])

    def hosts_of(self, call: Call) -> tuple[int, ...]:
        """The host of each member of `of(call)`: of ranks, then of copies in stores; none without a network."""
        if call.store is None:
            return self._hosts(call.ranks)
        return (*self._hosts(call.ranks), *(host for host in self._places(call.store) for _ in call.ranks))

    def dollars(self, call: Call) -> float:
        """Price of the requests of a call to its store and relays."""
        topology = self._world.topology
        if topology is None or call.store is None:
            return 0.0
        stores = [topology.hosts[host].store or Storage() for host in self.hosts_of(call)]
        src, dst, _ = self.of(call).pairs
        puts, gets = (
            [getattr(each, name) for each in stores] for name in ("dollars_per_put", "dollars_per_get")
        )
        return float(np.where(src < len(call.ranks), np.array(puts)[dst], np.array(gets)[src]).sum())

    @property
    def averaging_algorithm(self) -> str:
        """All-reduce algorithm of encoded values, see `Communicator.averaging_algorithm`."""
        fixed = self._settled().collectives.get("all_reduce")
        return fixed if fixed in AVERAGING_ALGORITHMS else AVERAGING_ALGORITHMS[0]

    def _hosts_uncached(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """The host of each rank; none without a network."""
        return tuple(self._world.hosts[rank] for rank in ranks) if self._world.topology is not None else ()

    def traffic(self, call: Call, member: int) -> tuple[int, int]:
        """(bytes sent, bytes sent to another region) by this member; of an all_to_all, as it posts it."""
        if call.op != "all_to_all":
            if call != self._latest[0]:  # members post alike: equal calls compare faster than they hash
                self._latest = (call, self._traffic(call))
            return self._latest[1][member]
        row = _own_row(call)
        sent = sum(row) - row[member]
        if self._world.topology is None:
            return sent, 0
        regions = self._regions(call.ranks)
        return sent, sum(size for size, region in zip(row, regions, strict=True) if region != regions[member])

    def _traffic_uncached(self, call: Call) -> list[tuple[int, int]]:
        if len(set(call.ranks)) == 1:
            return [(0, 0)] * len(call.ranks)
        plan, topology = self.of(call), self._world.topology
        sent = [int(each) for each in plan.sent_bytes[: len(call.ranks)]]
        if topology is None:
            return [(each, 0) for each in sent]
        if call.store is not None:  # what others download counts as theirs, a relay's copy as its owner's
            num, (src, dst, num_bytes) = len(call.ranks), plan.pairs
            regions = np.array([topology.region_of(host) for host in self.hosts_of(call)])
            member = np.where(src < num, src, dst) % num
            wan = np.bincount(member, num_bytes * (regions[src] != regions[dst]), num)
            return list(zip(sent, map(int, wan), strict=True))
        return list(zip(sent, map(int, plan.region_bytes(self._world.regions(call.ranks))), strict=True))


def load_of(call: CollectiveCall, ranks: tuple[int, ...], store: tuple[str, ...] | None = None) -> Call:
    """Load that a member's call puts on the network among these ranks of the run.

    `store` is that of an all_reduce or all_gather, see `Call`.
    """
    name, signed = call.name, call.like or call.tensors
    element_bytes = signed[0].element_size() if signed else 1
    sizes = tuple([tensor.nbytes for tensor in signed])
    num_bytes = sum(sizes)
    if name == "all_to_all":  # the sizes of the others' parts are theirs to say
        return Call(name, ranks, num_bytes, call.root, element_bytes, (sizes,))
    num_tensors = len(ranks) if name in ("all_gather", "gather", "scatter") else 1
    kept = store if name in ("all_reduce", "all_gather") else None
    return Call(name, ranks, num_bytes * num_tensors, call.root, element_bytes, store=kept)


class MeetingKernel(Kernel):
    """Kernel that also serves meetings of ranks, their joint work, and states that they publish and download.

    Args:
        about: arguments of `Kernel`.
        make_reach: makes reachability of ranks, and downloads; by default all reach each other, in no time.
        outdated: called with a group, and the only numbers of its published states that can be asked for yet.
        options: of `Kernel`.
    """

    def __init__(
        self,
        *about: Any,
        make_reach: Callable[[], Reach] = lambda: Reach(None, (), lambda links: False),
        outdated: Callable[[Hashable, Collection[int]], None] = lambda group, numbers: None,
        **options: Any,
    ) -> None:
        super().__init__(*about, **options)
        self._make_reach, self._outdated = make_reach, outdated
        self._meetings: Meetings | None = None
        self._handlers.at_once.update(
            {Publish: lambda rank, request: self.meetings.publish(rank, request), Keep: self._keep}
        )
        self._handlers.questions.update(
            {
                Join: self._join,
                Confirm: lambda rank, request: self.meetings.confirm(rank, request),
                Fetch: self._fetch,
            }
        )

    @property
    def meetings(self) -> Meetings:
        """Meetings of its ranks, made at the first request of one: most runs have none."""
        if self._meetings is None:
            about = (self.clock, self._make_reach(), self.calls, self._ranks.idle, self._outdated)
            self._meetings = Meetings(*about)
            self._uptime.on_lost = self._meetings.crashed
        return self._meetings

    def _keep(self, rank: int, keep: Keep) -> None:
        self._uptime.unkept[rank] = 0.0
        self.meetings.take_part(rank, keep.group)

    def _join(self, rank: int, join: Join) -> Generator[simpy.Event, None, Met | None]:
        """Join a meeting, the next one after a crash once more; None: the others have ended without this rank."""
        if join.key.number is not None:
            return (yield from self.meetings.join(rank, join))
        while rank not in self._uptime.lost:
            met = yield from self.meetings.join_next(rank, join)
            if met is not None:
                return met
            yield from self._uptime.restart(rank)
        return None

    def _fetch(self, rank: int, fetch: Fetch) -> Generator[simpy.Event, None, Fetched | None]:
        begin = self.clock.now
        self.meetings.waiting.add(rank)
        fetched = yield from self.meetings.fetch(rank, fetch)
        self.meetings.waiting.discard(rank)
        self.seconds.network[rank] += self.clock.now - begin
        if fetched is None:
            self._uptime.lost.add(rank)
        return fetched

    def _end(self, rank: int) -> None:
        super()._end(rank)
        if self._meetings is not None:
            self._meetings.leave(rank)

    def _can_go_on(self) -> bool:
        """Let ranks go on that wait in vain.

        Joint work has a time-out of its own. Where other ranks have ended without all that are left, these are lost:
        they continue alone.
        """
        meetings = self._meetings
        if (meetings is not None and meetings.is_under_way) or super()._can_go_on():
            return True
        if meetings is None:
            return False
        running, uptime = self._ranks.running, self._uptime
        ended = set(range(len(self.streams))) - running - uptime.lost
        if not (ended and meetings.have_met and uptime.paused | meetings.waiting == running):
            return False
        uptime.lost |= meetings.waiting
        for rank in sorted(uptime.paused):
            uptime.lost.add(rank)
            uptime.processes[rank].interrupt()
        meetings.give_up()
        return True


class Simulation(RankSource, RankSink):
    """The exchange and the kernel of one run, joined: source and sink of the kernel's ranks.

    Subclasses run the ranks.

    Args:
        world: where it takes place.
        past: requests of each rank in an earlier part of this run, replayed before all else; empty for a run from
            the start.
        recorder: trace of the network; None: no trace.
        reduce: computes reductions.
        schedules: of calls, cached in another run of this world; None: searched again.

    Attributes:
        away: ranks that wait for something outside of the simulation; the clock does not wait for them.
        algorithms: of each operation that was called, the algorithms that it went by.
        request_dollars: price of requests to stores.
        window_limit: the route on which a sender's window limited collectives most; None where links did.
        link_history: bytes over links, sampled with rank 0's rows; None without a topology.
    """

    def __init__(
        self,
        world: World,
        past: Sequence[Sequence[Request]] = (),
        recorder: Recorder | None = None,
        reduce: Reduce = reduce_tensors,
        schedules: Schedules | None = None,
    ) -> None:
        self.world = world
        self.away: set[int] = set()
        self.schedules = schedules if schedules is not None else Schedules(world)
        self.algorithms: dict[str, set[str]] = {}
        self.request_dollars = 0.0
        self.window_limit: WindowLimit | None = None
        self._has_windows = world.protocol.has_windows
        self._once_noted = lru_cache(maxsize=_MOST_NOTED)(self._note_windows)  # each kind of collective
        self.exchange = Exchange(world.num_ranks, self._serve, reduce)
        clock = Clock()
        self.network: Network | None = None
        self.link_history: LinkHistory | None = None
        faults: Faults | None = None
        on_network: dict[str, Any] = {}
        if world.topology is not None:
            network = self.network = Network(clock, world.topology, world.protocol)
            if recorder is not None:
                recorder.watch(network)
            self.link_history = LinkHistory(network)
            faults = Faults(network) if network.lacks_weather else None
            network.on_give_up = partial(self._given_up, network.on_give_up)
            on_network = {
                "start": self._start,
                "find_stop": faults and faults.find_stop,
                "downtime": network.downtime,
                "hosts": world.hosts,
                "make_reach": partial(
                    Reach, network, world.hosts, faults.may_come_back if faults else lambda links: False
                ),
            }
        self.on_span = recorder.spans.append if recorder is not None else None
        in_flight, cores = world.protocol.collectives_in_flight, world.shared_cores
        self.kernel = MeetingKernel(
            world.num_ranks,
            self,
            self,
            clock=clock,
            collectives_in_flight=in_flight,
            shared_cores=cores,
            outdated=self.exchange.forget,
            **on_network,
        )
        if faults is not None:
            faults.on_stuck, faults.on_change = self.kernel.give_up, self.kernel.meetings.look_again
        if recorder is not None:
            recorder.unfinished_spans = self.kernel.unfinished_spans
        for stream, requests in zip(self.kernel.streams, past, strict=bool(past)):
            stream.extend(requests)

    def _given_up(self, otherwise: Callable[[Waiting], None], waiting: Waiting) -> None:
        """End calls over a lost connection: with a time-out they end undone, without one the run ends."""
        if not self.kernel.calls.lose(waiting.connection):
            otherwise(waiting)

    # -- for subclasses --------------------------------------------------------------------------------------

    def _let_run(self, rank: int | None) -> bool:
        """Run ranks, one at least, until the kernel may have `rank`'s next request (None: any); False where none can.

        Raises what ends the run.
        """
        return False

    def _serve(self, slot: Slot, members: Sequence[int]) -> None:
        """Resume the members of `slot` that wait for its values, or its error."""

    # -- the kernel's port to ranks --------------------------------------------------------------------------

    def withdrawn(self, key: Key) -> None:
        """Forget the value of a message."""
        self.exchange.withdraw(key)

    def broken(self, group: Hashable) -> None:
        """End the group's calls in the exchange."""
        self.exchange.break_group(group)

    def undone(self, key: Key) -> None:
        """End the call in the exchange."""
        self.exchange.break_call(key)

    def can_run(self, rank: int) -> bool:
        """True if the rank waits for nothing off the clock."""
        return rank in self.exchange.running and rank not in self.away

    def row(self, row: StampedRow) -> None:
        """Sample the links' traffic with rank 0's rows."""
        # One rank's rows are occasions enough: a sample takes longer than a step of cached collectives.
        if self.link_history is not None and row.rank == 0:
            self.link_history.record()

    def refill(self, rank: int) -> None:
        """Run ranks until the kernel has this one's next request.

        None is left to run where it waits off the clock for one that waits for the clock. If that one can be let
        on, this one stands still until then.

        Raises:
            DeadlockError: nothing can ever come.
        """
        stream = self.kernel.streams[rank]
        while not stream and rank not in self.away:
            if not self._let_run(rank):
                stuck = self.exchange.deadlock()
                if stuck is not None:
                    raise self.exchange.deadlock(kernel_needs=rank) or stuck
                return

    def settle(self) -> None:
        """Run ranks until each waits, or is away."""
        while self._let_run(None):
            pass

    def _note_windows(self, plan: Schedule, hosts: tuple[int, ...]) -> None:
        """Note the route on which a window limits this collective, if one does so more than those before."""
        world = self.world
        assert world.topology is not None
        ways = ((hosts[src], hosts[dst], num_bytes) for src, dst, num_bytes in plan.pair_bytes)
        found = window_limit(world.topology, world.protocol, ways)
        if found is not None and (self.window_limit is None or found.share < self.window_limit.share):
            self.window_limit = found

    def _start(self, call: Call, group: Hashable, on_done: Callable[[int], None]) -> tuple[Enter, Cancel]:
        assert self.network is not None
        hosts = self.schedules.hosts_of(call)
        if call.op == "all_to_all":
            self.algorithms.setdefault(call.op, set()).add("direct")
            enter, cancel = self._start_all_to_all(call, hosts, group, on_done)
            return lambda member, posted: enter(member, _own_row(posted)), cancel
        plan = self.schedules.of(call)
        self.algorithms.setdefault(call.op, set()).add(plan.algorithm)
        self.request_dollars += self.schedules.dollars(call)
        if not plan.phases:
            return (lambda member, _: on_done(member)), lambda: None
        if self._has_windows:
            self._once_noted(plan, hosts)
        arrive, cancel = self._start_plan(plan, hosts, group, on_done)
        return lambda member, _: arrive(member), cancel

    def _start_plan(
        self, plan: Schedule, hosts: tuple[int, ...], group: Hashable, on_done: Callable[[int], None]
    ) -> tuple[Callable[[int], None], Cancel]:
        """Start a collective on the network; return how a member enters, and how it is cancelled."""
        assert self.network is not None
        started = start_collective(self.network, plan, hosts, group=group, on_done=on_done)
        return started.arrive, started.cancel

    def _start_all_to_all(
        self, call: Call, hosts: tuple[int, ...], group: Hashable, on_done: Callable[[int], None]
    ) -> tuple[Callable[[int, Sequence[int]], None], Cancel]:
        """Start an all_to_all, which a member enters with the bytes that it has for each; see `_start_plan`."""
        assert self.network is not None
        return start_all_to_all(self.network, hosts, group=group, on_done=on_done)


def _own_row(call: Call) -> tuple[int, ...]:
    """Bytes that a member of an all_to_all has for each member."""
    assert call.parts is not None
    (row,) = call.parts
    return row
