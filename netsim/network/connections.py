"""Connections, and the transfers on them in order.

Compiled by mypyc where a C compiler is there; see `netsim.network.build`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from heapq import heappop, heappush
from math import inf
from typing import Final, final

from netsim.network.bursts import open_window
from netsim.network.congestion import CongestionControl, TcpSettings
from netsim.network.fairness import Claim
from netsim.network.heap import HeapItem
from netsim.network.route import Route

# Idle connections are closed when they are as new; of the others, as many are kept as a machine has file descriptors.
SWEEP_AFTER: Final = 1024
MOST_IDLE: Final = 1 << 15


class Owner:
    """Sender of transfers; the engine calls it as they proceed.

    Attributes:
        hears_drops: `dropped` is called when a crash ends its transfer; else the transfer is sent again.
    """

    hears_drops: bool = False

    def delivered(self, transfer: Transfer) -> None:
        """The last byte has arrived."""
        raise NotImplementedError

    def sent(self, transfer: Transfer) -> None:
        """The sender need not wait any more; for transfers that `tells_sent`, before they are delivered."""
        raise NotImplementedError

    def dropped(self, transfer: Transfer) -> None:
        """The transfer was ended by force."""
        raise NotImplementedError


@final
class Connection:
    """Transfers of one sender and receiver, in order; the first one is under way.

    Attributes:
        name: shared by the connections of one user, one a route and lane.
        is_background: it carries background traffic.
        lane: number among those of a name and route; below zero it is a channel of NCCL.
        gross: claim on the links' payload as if there were no acknowledgements; None within a host.
        net: claim on what acknowledgements leave; `gross` if the protocol has none.
        window: TCP's limit; None without one.
        backlog: bytes of its unfinished transfers.
        wanted: bytes of its least windows, as counted at its own line's queue.
    """

    def __init__(self, name: Hashable, is_background: bool, lane: int, route: Route) -> None:
        self.name = name
        self.is_background = is_background
        self.lane = lane
        self.route = route
        self.gross: Claim | None = None
        self.net: Claim | None = None
        self.window: CongestionControl | None = None
        self.backlog = self.wanted = 0.0
        self.first: Transfer | None = None
        self.last: Transfer | None = None

    def append(self, transfer: Transfer) -> bool:
        """Put a transfer behind the others; returns whether it is the first."""
        self.backlog += transfer.size
        last = self.last
        self.last = transfer
        if last is None:
            self.first = transfer
            return True
        last.next = transfer
        return False

    def remove(self, transfer: Transfer) -> bool:
        """Take a transfer out; returns whether it was the first."""
        self.backlog -= transfer.size
        following = transfer.next
        transfer.next = None
        if self.first is transfer:
            self.first = following
            if following is None:
                self.last = None
            return True
        before = self.first
        while before is not None and before.next is not transfer:
            before = before.next
        assert before is not None
        before.next = following
        if following is None:
            self.last = before
        return False


class Transfer(HeapItem):
    """Bytes in flight; due at its `key`, numbered in the order of sending.

    Attributes:
        size: payload bytes.
        owner: called as it proceeds.
        most: bytes per second that its sender offers; with a limit TCP's window does not apply.
        begun: instant of sending.
        since: instant at which `remaining` held; it drains at `rate` since then.
        stop: it is due when `remaining` has come down to this.
        timer: it is due at this instant whatever its rate.
        drains: its first byte has arrived.
        tells_sent: its owner is to be called when it need not wait any more.
        was_refused: it has waited for the queue of its host's own line.
        was_dropped: its owner is to be called since it was ended by force.
    """

    def __init__(self, connection: Connection, size: float, owner: Owner, most: float = inf) -> None:
        super().__init__(-1)
        self.connection = connection
        self.size = size
        self.owner = owner
        self.most = most
        self.begun = 0.0
        self.since = 0.0
        self.remaining = size
        self.rate = 0.0
        self.stop = 0.0
        self.timer = inf
        self.next: Transfer | None = None  # on its connection
        self.drains = False
        self.tells_sent = False
        self.was_refused = False
        self.was_dropped = False

    def restart(self, connection: Connection) -> None:
        """Put it back to its first byte, to be sent again on another connection."""
        self.connection = connection
        self.remaining = self.size
        self.rate = self.stop = 0.0
        self.tells_sent = self.was_refused = False

    @property
    def window(self) -> CongestionControl | None:
        """TCP's limit; None without one."""
        return self.connection.window if self.most == inf else None


@final
class Connections:
    """Connections by name and route.

    Args:
        num_hosts: number of hosts.
        is_per_transfer: every transfer has a connection of its own.
        tcp: settings of windows; None: without windows.
        num_channels: over so many connections NCCL divides its streams between two hosts; 0: over one.
        find_route: finds the route from one host to another, for the first transfer between them, and for the first of
            a channel: its last argument is the number of connections that share the streams.

    Attributes:
        routes: those in use so far.
        by_name: connections that are kept, by name, and by pair of hosts and lane.
    """

    def __init__(
        self,
        num_hosts: int,
        is_per_transfer: bool,
        tcp: TcpSettings | None,
        num_channels: int,
        find_route: Callable[[int, int, int], Route],
    ) -> None:
        self.num_hosts = num_hosts
        self.is_per_transfer = is_per_transfer
        self.tcp = tcp
        self.num_channels = num_channels
        self.find_route = find_route
        self.routes: list[Route] = []
        self.by_name: dict[Hashable, dict[int, Connection]] = {}
        self._route_between: dict[int, Route] = {}
        self._num_kept = 0
        self._num_single: dict[Route, int] = {}  # windows of single transfers so far, whose losses differ
        self._sweep_at = SWEEP_AFTER

    def route(self, source: int, target: int, is_channel: bool = False) -> Route:
        pair = source * self.num_hosts + target
        if is_channel:
            pair += self.num_hosts * self.num_hosts
        route = self._route_between.get(pair)
        if route is None:
            route = self.find_route(source, target, self.num_channels if is_channel else 1)
            self._route_between[pair] = route
            self.routes.append(route)
        return route

    def find(self, name: Hashable, source: int, target: int, lane: int) -> Connection | None:
        """The connection of this name and lane between two hosts, if one is kept."""
        named = self.by_name.get(name)
        return None if named is None else named.get(self._key(source, target, lane))

    def open(
        self, name: Hashable, source: int, target: int, is_background: bool, lane: int, now: float
    ) -> Connection:
        """Open a connection; it is kept unless connections are per transfer."""
        if len(self.by_name) + self._num_kept >= self._sweep_at:
            self._sweep(now)
        is_channel = self.num_channels > 0 and lane < 0
        connection = Connection(name, is_background, lane, self.route(source, target, is_channel))
        if not self.is_per_transfer:
            named = self.by_name.get(name)
            if named is None:
                named = self.by_name[name] = {}
            named[self._key(source, target, lane)] = connection
            self._num_kept += 1
        return connection

    def open_window(self, connection: Connection) -> None:
        """Give a connection a window, where the protocol has any, for its first transfer that needs one."""
        if self.tcp is not None and connection.route.links:
            route = connection.route
            number = self._num_single.get(route, 0)
            connection.window = open_window(self.tcp, route, connection.lane, number)
            if self.is_per_transfer:
                self._num_single[route] = number + 1

    def close(self, connection: Connection) -> None:
        route, lane = connection.route, connection.lane
        if self.find(connection.name, route.source, route.target, lane) is connection:
            del self.by_name[connection.name][self._key(route.source, route.target, lane)]
            self._num_kept -= 1

    def kept(self) -> list[Connection]:
        return [connection for named in self.by_name.values() for connection in named.values()]

    def _key(self, source: int, target: int, lane: int) -> int:
        if 0 < self.num_channels < -lane:  # fewer streams than channels, which share the last connection
            lane = -self.num_channels
        return (lane * self.num_hosts + source) * self.num_hosts + target

    def _sweep(self, now: float) -> None:
        """Close idle connections; called so seldom that it costs next to nothing for each that is opened."""
        idle: list[Connection] = []
        for connection in self.kept():
            if connection.first is None:
                if connection.window is None or connection.window.is_as_new(now):
                    self.close(connection)
                else:
                    idle.append(connection)
        if len(idle) > MOST_IDLE:
            idle.sort(key=last_used)
            for connection in idle[: len(idle) - MOST_IDLE // 2]:
                self.close(connection)
        for name, named in list(self.by_name.items()):
            if not named:
                del self.by_name[name]
        self._sweep_at = max(2 * (len(self.by_name) + self._num_kept), SWEEP_AFTER)


@final
class ConnectionPool:
    """Numbered connections; idle ones are taken before new ones are opened.

    Attributes:
        num_taken: number of connections in use.
    """

    def __init__(self) -> None:
        self._idle: list[int] = []
        self.num_taken = 0

    def take(self) -> int:
        """Take the idle connection with the least number, or a new one."""
        self.num_taken += 1
        return heappop(self._idle) if self._idle else self.num_taken - 1

    def free(self, connection: int) -> None:
        """Return a connection to the idle ones."""
        self.num_taken -= 1
        heappush(self._idle, connection)


def last_used(connection: Connection) -> float:
    window = connection.window
    return window.last_used if window is not None else 0.0


def order_of(transfer: Transfer) -> int:
    return transfer.number


def sort_by_sending(transfers: list[Transfer]) -> None:
    """Sort transfers by number, unless they are sorted: most are, and a sort calls Python's code for each."""
    before = -1
    for transfer in transfers:
        if transfer.number < before:
            transfers.sort(key=order_of)
            return
        before = transfer.number


def transfer_of(claim: Claim) -> Transfer:
    """The transfer whose rate is that of a claim."""
    transfer = claim.owner
    assert isinstance(transfer, Transfer)
    return transfer
