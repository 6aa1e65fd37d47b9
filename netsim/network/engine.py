"""Connections, the transfers on them, and time that passes from one change to the next.

A transfer waits for its route's latency without using bandwidth, then drains at the rate that fairness gives it
among all that drain, as far as its connection's window allows, until its bytes are delivered. Messages of one
connection leave whole and in order.

**Within an instant** the order is: alarms; then every transfer that is due starts to drain, asks its window again
or ends; then owners are called, in the order of sending (of one transfer: sent, then delivered), and may send at the
same instant; when nothing is left to happen, rates are found, which may end a transfer at this very instant.
Whatever runs above the network (weather, ranks) has its turn at an instant before the network; see
`netsim.network.clock`.

Compiled by mypyc where a C compiler is there; see `netsim.network.build`. It imports nothing but its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from math import inf
from typing import Any, Final, final

from netsim.network.fairness import Claim, FairShares
from netsim.network.tcp import QueueState, Window

# Two instants are one when they differ by rounding: of the clock, and of the transfer's duration. Neither bytes nor
# bandwidth appear, so scaling both changes nothing.
OF_CLOCK: Final = 2.0**-50
OF_DURATION: Final = 1e-12

# Share of a link that acknowledgements leave to data however fast they come: those of 1 Gbit/s in one direction would
# fill 10 Mbit/s in the other, and data there would stand still. Real ones are thinned out, or slow the others down.
ACKS_AT_MOST: Final = 0.5

# Idle connections are closed when they are as new; of the others, so many are kept as a machine has file descriptors.
FEW_IDLE: Final = 1024
MOST_IDLE: Final = 1 << 15


class Owner:
    """Sender of transfers; the engine calls it as they proceed."""

    def delivered(self, transfer: Transfer) -> None:
        """The last byte has arrived."""
        raise NotImplementedError

    def sent(self, transfer: Transfer) -> None:
        """The sender need not wait any more; for transfers that `tells_sent`, before they are delivered."""
        raise NotImplementedError

    def dropped(self, transfer: Transfer) -> None:
        """The transfer was ended by force; for transfers that `tells_dropped`."""
        raise NotImplementedError


@final
class Path:
    """Route from one host to another, and what it is like at present.

    Attributes:
        index: position in the engine's list of paths.
        source, target: host indices.
        links: link indices in order; none within a host.
        back: link indices of the opposite route, which carries acknowledgements.
        latency: one-way seconds.
        software, handshake: seconds added before the first byte leaves.
        round_trip: seconds.
        loss: share of packets lost.
        weight: share of a transfer on it relative to others.
        delivered_bytes, background_bytes: payload of finished transfers; of these, background traffic's.
        queue_link: narrowest link, in whose queue data wait, where that queue has an end; else -1.
    """

    def __init__(self, index: int, source: int, target: int, links: list[int], back: list[int]) -> None:
        self.index = index
        self.source = source
        self.target = target
        self.links = links
        self.back = back
        self.latency = 0.0
        self.software = 0.0
        self.handshake = 0.0
        self.round_trip = 0.0
        self.loss = 0.0
        self.weight = 1.0
        self.delivered_bytes = 0.0
        self.background_bytes = 0.0
        self.queue_link = -1


@final
class Connection:
    """Transfers of one sender and receiver, in order; the first one is under way.

    Attributes:
        name: of its group, as the sender calls it.
        gross: claim on the links' payload as if there were no acknowledgements; None within a host.
        net: claim on what acknowledgements leave; the same where there are none.
        window: TCP's limit; None where nothing limits it.
        most: largest rate that its sender offers, bytes per second.
        backlog: bytes of its transfers that are not finished.
        queue_link: link in whose queue its data wait, where its window minds that; else -1.
    """

    def __init__(
        self,
        group: ConnectionGroup,
        path: Path,
        gross: Claim | None,
        net: Claim | None,
        window: Window | None,
        most: float,
    ) -> None:
        self.group = group
        self.path = path
        self.gross = gross
        self.net = net
        self.window = window
        self.most = most
        self.backlog = 0.0
        self.first: Transfer | None = None
        self.last: Transfer | None = None
        self.queue_link = path.queue_link if window is not None and window.has_queue else -1
        if gross is not None and net is not None:
            gross.owner = self
            net.owner = self


@final
class ConnectionGroup:
    """Connections that share a name, by path."""

    def __init__(self, name: Hashable, is_background: bool) -> None:
        self.name = name
        self.is_background = is_background
        self.connections: dict[int, Connection] = {}


@final
class Transfer:
    """Bytes on their way.

    Attributes:
        size: payload bytes.
        owner: called as it proceeds; `step`, `src`, `dst` and `kind` are the owner's.
        order: position among all transfers in the order of sending; its id.
        begun: instant of sending.
        since: instant at which `remaining` held; it drains at `rate` since then.
        stop: it is due when `remaining` has come down to this.
        timer: it is due at this instant whatever its rate.
        due: next instant at which something happens to it by itself.
        drains: its first byte has arrived.
        is_held: a dead link keeps it from starting, or its window from going on.
    """

    def __init__(
        self, connection: Connection, size: float, owner: Owner, step: int, src: int, dst: int, kind: int
    ) -> None:
        self.connection = connection
        self.size = size
        self.owner = owner
        self.step = step
        self.src = src
        self.dst = dst
        self.kind = kind
        self.order = 0
        self.begun = 0.0
        self.since = 0.0
        self.remaining = size
        self.rate = 0.0
        self.stop = 0.0
        self.timer = inf
        self.due = inf
        self.place = -1  # in the heap
        self.next: Transfer | None = None  # on its connection
        self.drains = False
        self.is_held = False
        self.tells_sent = False
        self.tells_dropped = False
        self.was_dropped = False


@final
class Engine:
    """Links in use, and the time of all that crosses them.

    Args:
        payload: bytes per second of payload that each link carries.
        ack_share: payload that a byte's acknowledgements displace on the opposite route.
        give_up_seconds: a held transfer is given up after so long.
        is_per_transfer: every transfer has a connection of its own.
        find_path: path from one host to another, for the first transfer between them.
        open_window: window of a new connection on a path; None where nothing limits it.
        show_time: called with the instant before owners are, and with the last one of `advance`.
        num_hosts: how many hosts there are.

    Attributes:
        now: its clock, in seconds.
        observers: called as transfers start, end and change their rates.
        on_give_up: called with a transfer that is given up.
        has_called_out: code above the network was called, or a transfer came to a halt, since `advance` began.
        num_in_flight, num_events: transfers that are not finished; events so far.
        dropped_bytes: payload that transfers ended by force had not delivered.
        has_queues: some path has a `queue_link`.
        paths, groups: those in use so far; connections that are as new are forgotten.
        dead: links that carry nothing.
        singles: transfers that were sent from above the network and are in flight, by order.
    """

    def __init__(
        self,
        payload: list[float],
        ack_share: float,
        give_up_seconds: float,
        is_per_transfer: bool,
        find_path: Callable[[int, int, int], Path],
        open_window: Callable[[Path], Window | None],
        show_time: Callable[[float], None],
        num_hosts: int,
    ) -> None:
        self.now = 0.0
        self.payload = payload
        self.ack_share = ack_share
        self.give_up_seconds = give_up_seconds
        self.is_per_transfer = is_per_transfer
        self.find_path = find_path
        self.open_window = open_window
        self.show_time = show_time
        self.num_hosts = num_hosts
        self.on_give_up: Callable[[Transfer], None] | None = None
        self.observers: list[Any] = []
        self.has_called_out = False
        self.num_in_flight = 0
        self.num_events = 0
        self.dropped_bytes = 0.0
        self.has_queues = False
        self.paths: list[Path] = []
        self.groups: dict[Hashable, ConnectionGroup] = {}
        self.dead: set[int] = set()
        self.singles: dict[int, Transfer] = {}
        self._gross = FairShares(payload)
        self._net = FairShares(payload) if ack_share else self._gross
        self._path_between: dict[int, Path] = {}
        self._num_connections = 0
        self._sweep_at = FEW_IDLE
        self._num_sent = 0
        self._heap = DueHeap()
        self._alarms = DueHeap()
        self._held: dict[Transfer, None] = {}
        self._is_asked = False  # something is to be done at this instant
        self._delivered: list[Transfer] = []  # at this instant, owners not called yet
        self._notices: list[Transfer] = []  # sent or dropped, owners not called yet
        self._acking: list[dict[Connection, None]] = [{} for _ in payload]
        self._queued: list[dict[Connection, None]] = [{} for _ in payload]  # in use, by narrowest link
        self._stale: list[int] = []
        self._is_stale = [False] * len(payload)
        self._nowhere = ConnectionGroup(None, False)
        self._no_path = Path(-1, -1, -1, [], [])

    # -- connections -----------------------------------------------------------------------------------------

    def path(self, source: int, target: int) -> Path:
        key = source * self.num_hosts + target
        path = self._path_between.get(key)
        if path is None:
            path = self.find_path(len(self.paths), source, target)
            self._path_between[key] = path
            self.paths.append(path)
        return path

    def group(self, name: Hashable, is_background: bool = False) -> ConnectionGroup:
        """The group of this name; a new one is kept when it has a connection."""
        group = self.groups.get(name)
        return ConnectionGroup(name, is_background) if group is None else group

    def connect(self, group: ConnectionGroup, source: int, target: int, most: float = inf) -> Connection:
        """The connection of a group between two hosts, or one that lasts for a single transfer."""
        path = self.path(source, target)
        if not self.is_per_transfer:
            found = group.connections.get(path.index)
            if found is None and self._shares_kept(group):
                found = group.connections.get(path.index)
            if found is not None:
                if found.most == most or found.first is not None or found.window is not None:
                    return found
                self._close(found)  # nothing is left of it but another limit
        if len(self.groups) + self._num_connections >= self._sweep_at:
            self._sweep()
        gross: Claim | None = None
        net: Claim | None = None
        window: Window | None = None
        if path.links:
            gross = Claim([self._gross.links[i] for i in path.links], path.weight)
            net = Claim([self._net.links[i] for i in path.links], path.weight) if self.ack_share else gross
            if most == inf:
                window = self.open_window(path)
        connection = Connection(group, path, gross, net, window, most)
        if not self.is_per_transfer:
            group.connections[path.index] = connection
            self._num_connections += 1
        return connection

    def _shares_kept(self, group: ConnectionGroup) -> bool:
        """Keep a group that is to have a connection; returns whether it now shares those of another of its name."""
        kept = self.groups.get(group.name)
        if kept is None:
            self.groups[group.name] = group
            return False
        if kept.connections is group.connections:
            return False
        group.connections = kept.connections
        return True

    def _close(self, connection: Connection) -> None:
        if connection.group.connections.pop(connection.path.index, None) is not None:
            self._num_connections -= 1

    def _sweep(self) -> None:
        """Close idle connections; called so seldom that it costs next to nothing for each that is opened."""
        idle: list[Connection] = []
        for group in list(self.groups.values()):
            for connection in list(group.connections.values()):
                if connection.first is None:
                    if connection.window is None or connection.window.is_as_new(self.now):
                        self._close(connection)
                    else:
                        idle.append(connection)
            if not group.connections:
                del self.groups[group.name]
        if len(idle) > MOST_IDLE:
            idle.sort(key=last_used)
            for connection in idle[: len(idle) - MOST_IDLE // 2]:
                self._close(connection)
        self._sweep_at = max(2 * (len(self.groups) + self._num_connections), FEW_IDLE)

    def close_at(self, host: int) -> None:
        """Forget the connections from and to a host."""
        for group in list(self.groups.values()):
            for connection in list(group.connections.values()):
                if host == connection.path.source or host == connection.path.target:
                    self._close(connection)

    def in_flight(self) -> list[Transfer]:
        """All transfers that are not finished, in the order of sending."""
        in_use = {transfer.connection for transfer in self._heap.items}
        in_use.update([transfer.connection for transfer in self._held])
        for link in self._gross.links:
            in_use.update([connection_of(claim) for claim in link.claims])
        found: list[Transfer] = []
        for connection in in_use:
            transfer = connection.first
            while transfer is not None:
                found.append(transfer)
                transfer = transfer.next
        found.sort(key=order_of)
        return found

    # -- sending ---------------------------------------------------------------------------------------------

    def send(
        self,
        connection: Connection,
        size: float,
        owner: Owner,
        step: int,
        src: int,
        dst: int,
        kind: int = 0,
        tells_sent: bool = False,
    ) -> Transfer:
        """Start a transfer of `size` bytes now; nothing is called before this returns."""
        transfer = Transfer(connection, size, owner, step, src, dst, kind)
        now = self.now
        transfer.order = self._num_sent
        self._num_sent += 1
        self.num_in_flight += 1
        path = connection.path
        transfer.begun = now
        transfer.timer = now + path.latency + path.software + path.handshake
        connection.backlog += size
        if tells_sent:
            if self._fits_buffer(connection, connection.backlog):
                self._notices.append(transfer)
                self._is_asked = True
            else:
                transfer.tells_sent = True
        last = connection.last
        connection.last = transfer
        if last is not None:
            last.next = transfer
        else:
            connection.first = transfer
            if connection.queue_link >= 0:
                self._queued[connection.queue_link][connection] = None
            if size == 0.0 and self.has_queues:
                transfer.timer += self._queue_seconds(path, connection, now)
            self._heap.set_due(transfer, transfer.timer)
        if isinstance(owner, Outside):
            self.singles[transfer.order] = transfer
        if self.observers:
            for observer in self.observers:
                observer.transfer_started(
                    transfer.order, path.source, path.target, size, connection.group.name
                )
        return transfer

    def _queue_seconds(self, path: Path, own: Connection, now: float) -> float:
        """Wait of a small frame that is sent now, behind others' data in the queues of its path."""
        there = now + path.latency
        seconds = 0.0
        for link in path.links:
            standing = 0.0
            for connection in self._queued[link]:
                if connection is not own:
                    standing += self._standing_bytes(connection, there)
            if standing > 0.0 and self.payload[link] > 0.0:
                seconds += standing / self.payload[link]
        return seconds

    def _standing_bytes(self, connection: Connection, there: float) -> float:
        """Bytes of a connection in its narrowest link's queue that will be received after `there`."""
        window = connection.window
        first = connection.first
        if window is None or first is None:
            return 0.0
        full_rate = self.payload[connection.queue_link]
        if first.drains:
            rate = first.rate
            left = connection.backlog - first.size + first.remaining - rate * (there - first.since)
        else:
            rate = full_rate
            left = connection.backlog - rate * (there - first.timer) if first.timer < there else 0.0
        return window.standing_bytes(there, left, rate, full_rate)

    def _queue_state(self, own: Connection, own_window: Window, size: float, now: float) -> QueueState | None:
        """Queues as a burst of at most `size` bytes and its acknowledgements meet them; None without an end."""
        if own.queue_link < 0:
            return None
        path = own.path
        num_bursts = 1
        standing = 0.0
        feeds = {path.source: own_window.feed}  # a host's bursts share its line
        until = now + own_window.burst_seconds(size)
        for connection in self._queued[own.queue_link]:
            window = connection.window
            first = connection.first
            if connection is own or window is None or first is None:
                continue
            if window.is_bursting(now) if first.drains else first.size > 0.0 and first.timer < until:
                num_bursts += 1
                feeds[connection.path.source] = window.feed
            elif first.drains:
                standing += self._standing_bytes(connection, now)
        ack_wait = self._queue_seconds(self.path(path.target, path.source), own, now)
        following = own.backlog - own.first.size if own.first is not None else 0.0
        return QueueState(num_bursts, sum(feeds.values()), standing, ack_wait, following)

    def alarm(self, seconds: float, owner: Owner, step: int, member: int, kind: int) -> None:
        """Call `owner.delivered` so much later, before whatever the network does at that instant."""
        connection = Connection(self._nowhere, self._no_path, None, None, None, inf)
        transfer = Transfer(connection, 0.0, owner, step, member, member, kind)
        transfer.order = self._num_sent
        self._num_sent += 1
        self._alarms.set_due(transfer, self.now + seconds)

    def _fits_buffer(self, connection: Connection, num_bytes: float) -> bool:
        """Return whether the socket's buffer holds all unsent bytes."""
        window = connection.window
        return window is not None and num_bytes <= window.buffer_bytes(self.now)

    def abort(self, transfer: Transfer) -> float:
        """End a transfer that is under way; its owner is not called. Returns the bytes that were delivered."""
        connection = transfer.connection
        now = self.now
        delivered = 0.0
        if transfer.drains:
            self._drain(transfer, now)
            delivered = transfer.size - transfer.remaining
            if connection.window is not None:
                connection.window.end(now, transfer.remaining)
        self.dropped_bytes += transfer.size - delivered
        self._leave(transfer, delivered)
        if transfer in self._notices:
            self._notices.remove(transfer)
        self._is_asked = True
        for observer in self.observers:
            observer.transfer_ended(transfer.order, delivered)
        return delivered

    def drop(self, transfer: Transfer) -> bool:
        """End a transfer by force. Returns whether its owner is called for it, at the end of the instant."""
        self.abort(transfer)
        if transfer.tells_dropped:
            transfer.was_dropped = True
            self._notices.append(transfer)
        return transfer.tells_dropped

    def drop_at(self, host: int) -> None:
        """End all transfers from and to a host and forget its connections.

        Transfers whose owner does not want to know are sent again, in the same order.
        """
        again: list[Transfer] = []
        for transfer in self.in_flight():
            path = transfer.connection.path
            if host == path.source or host == path.target:
                waits_for_sent = transfer.tells_sent or transfer in self._notices
                if not self.drop(transfer):
                    transfer.tells_sent = waits_for_sent
                    again.append(transfer)
        self.close_at(host)
        for lost in again:
            before = lost.connection
            path = before.path
            group = self.group(before.group.name, before.group.is_background)
            connection = self.connect(group, path.source, path.target, before.most)
            owner, tells_sent = lost.owner, lost.tells_sent
            self.send(connection, lost.size, owner, lost.step, lost.src, lost.dst, lost.kind, tells_sent)

    def end_group(self, name: Hashable) -> None:
        """End all transfers of a group's connections; no owner is called."""
        for transfer in self.in_flight():
            if transfer.connection.group.name == name:
                self.abort(transfer)

    # -- time ------------------------------------------------------------------------------------------------

    def next_due(self) -> float:
        """The earliest instant at which anything happens by itself; infinity if nothing does."""
        if self._is_asked or self._delivered or not self._is_settled():
            return self.now
        return max(min(self._heap.least(), self._alarms.least()), self.now)

    def _is_settled(self) -> bool:
        return self._gross.is_settled and self._net.is_settled and not self._stale

    def advance(self, until: float, is_included: bool) -> None:
        """Let time pass to the last instant due until `until`, or until code above the network has been called.

        Args:
            until: instant, not before now.
            is_included: what is due at `until` happens; else only what is due before.
        """
        self.has_called_out = False
        while not self.has_called_out:
            now = self.now
            if now > until or (now == until and not is_included):
                break
            alarm = self._alarms.least()
            if alarm <= now:
                self._ring()
            elif self._is_asked or self._heap.least() <= now:
                self._turn()
            elif not self._is_settled():
                self._settle()
            else:
                due = min(alarm, self._heap.least())
                if due > until or (due == until and not is_included):
                    break
                self.now = due
        self.show_time(self.now)

    def _ring(self) -> None:
        """Handle the earliest alarm."""
        transfer = self._alarms.items[0]
        self._alarms.set_due(transfer, inf)
        self.num_events += 1
        self.show_time(self.now)
        transfer.owner.delivered(transfer)

    def _turn(self) -> None:
        """Take everything that is due, then call owners."""
        self._is_asked = False
        self.take_due()
        delivered = self._delivered
        notices = self._notices
        if not (delivered or notices):
            return
        self.show_time(self.now)
        self._delivered = []
        self._is_asked = True  # owners may act at this instant, and more may be due
        if len(delivered) > 1:
            delivered.sort(key=order_of)
        for transfer in delivered:
            if transfer.tells_sent:
                notices.append(transfer)
        if self.observers:
            for transfer in delivered:
                for observer in self.observers:
                    observer.transfer_ended(transfer.order, transfer.size)
        if notices:
            self._notices = []
            notices.sort(key=order_of)
            self._notify(notices, delivered)
        else:
            for transfer in delivered:
                transfer.owner.delivered(transfer)

    def _notify(self, notices: list[Transfer], delivered: list[Transfer]) -> None:
        """Call owners in the order of sending; of one transfer, sent before delivered."""
        i = 0
        for transfer in notices:
            while i < len(delivered) and delivered[i].order < transfer.order:
                delivered[i].owner.delivered(delivered[i])
                i += 1
            if transfer.was_dropped:
                transfer.owner.dropped(transfer)
            else:
                transfer.tells_sent = False
                transfer.owner.sent(transfer)
        for transfer in delivered[i:]:
            transfer.owner.delivered(transfer)

    def take_due(self) -> None:
        """Let transfers that are due start to drain, go on or end; owners are called at the end of the instant."""
        heap = self._heap
        now = self.now
        while heap.items:
            transfer = heap.items[0]
            if transfer.due - (now * OF_CLOCK + (now - transfer.begun) * OF_DURATION) > now:
                return
            self.num_events += 1
            if transfer.is_held:
                self._give_up(transfer)
                continue
            heap.set_due(transfer, inf)
            if not (self._continue(transfer, now) if transfer.drains else self._begin(transfer, now)):
                self._leave(transfer, transfer.size)
                self._delivered.append(transfer)

    def _begin(self, transfer: Transfer, now: float) -> bool:
        """The first byte arrives; returns whether there is anything to drain."""
        connection = transfer.connection
        window = connection.window
        if self.dead and (transfer.size == 0.0 or window is not None) and self.is_cut(connection.path):
            self._hold(transfer, now + self.give_up_seconds)
            return True
        gross = connection.gross
        net = connection.net
        if transfer.size == 0.0 or gross is None or net is None:
            if window is not None:
                window.touch(now)
            return False
        transfer.drains = True
        transfer.since = now
        gross.weight = connection.path.weight
        self._gross.join(gross, connection.most)
        if self.ack_share:
            net.weight = connection.path.weight
            self._net.join(net, connection.most)
            for link in connection.path.back:
                self._acking[link][connection] = None
        if window is None:
            transfer.timer = inf
        else:
            window.start(now, transfer.size, self._queue_state(connection, window, transfer.size, now))
            self._accept(transfer, window, transfer.size, now)
        return True

    def _continue(self, transfer: Transfer, now: float) -> bool:
        """A draining transfer has reached its stop or its timer; returns whether it is not finished."""
        connection = transfer.connection
        window = connection.window
        if window is None:
            return False
        if self._drain(transfer, now):
            window.end(now)
            return False
        left = transfer.remaining
        window.go_on(now, left, self._queue_state(connection, window, left, now))
        self._accept(transfer, window, transfer.remaining, now)
        return True

    def _drain(self, transfer: Transfer, now: float) -> bool:
        """Bring `remaining` up to now, to exactly its stop where it is there, rounding aside; True if finished."""
        left = transfer.remaining - transfer.rate * (now - transfer.since)
        slack = now * OF_CLOCK + (now - transfer.begun) * OF_DURATION
        reached = left - transfer.stop <= 2 * slack * transfer.rate
        if reached:
            left = transfer.stop
        transfer.remaining = left
        transfer.since = now
        return reached and transfer.stop == 0.0

    def _accept(self, transfer: Transfer, window: Window, left: float, now: float) -> None:
        """Go on as the window allows."""
        connection = transfer.connection
        cap = window.cap
        gross = connection.gross
        net = connection.net
        assert gross is not None and net is not None
        if gross.cap != cap:
            self._gross.change(gross, connection.path.weight, cap)
            if self.ack_share:
                self._net.change(net, connection.path.weight, cap)
        transfer.stop = window.stop
        transfer.timer = window.timer
        rate = transfer.rate if cap else 0.0
        self._heap.set_due(transfer, min(now + (left - window.stop) / rate if rate else inf, window.timer))
        if transfer.tells_sent and self._fits_buffer(connection, left):
            transfer.tells_sent = False
            self._notices.append(transfer)

    def _leave(self, transfer: Transfer, delivered: float) -> None:
        """Take a transfer out; the next of its connection follows if it was the first."""
        connection = transfer.connection
        path = connection.path
        path.delivered_bytes += delivered
        if connection.group.is_background:
            path.background_bytes += delivered
        connection.backlog -= transfer.size
        self.num_in_flight -= 1
        if isinstance(transfer.owner, Outside):
            del self.singles[transfer.order]
        if transfer.is_held:
            del self._held[transfer]
            transfer.is_held = False
        gross = connection.gross
        net = connection.net
        if transfer.drains and gross is not None and net is not None:
            transfer.drains = False
            self._gross.leave(gross)
            if self.ack_share:
                self._net.leave(net)
                for link in path.back:
                    del self._acking[link][connection]
                    self._note_stale(link)
        self._heap.set_due(transfer, inf)
        is_first = self._unlink(transfer)
        following = connection.first
        if following is None:
            if connection.queue_link >= 0:
                self._queued[connection.queue_link].pop(connection, None)
            if connection.most < inf:
                self._close(connection)
        elif is_first:
            self._heap.set_due(following, following.timer)

    def _unlink(self, transfer: Transfer) -> bool:
        """Take a transfer out of its connection's queue; returns whether it was the first."""
        connection = transfer.connection
        if connection.first is transfer:
            connection.first = transfer.next
            if transfer.next is None:
                connection.last = None
            return True
        before = connection.first
        while before is not None and before.next is not transfer:
            before = before.next
        assert before is not None
        before.next = transfer.next
        if transfer.next is None:
            connection.last = before
        return False

    # -- rates -----------------------------------------------------------------------------------------------

    def _note_stale(self, link: int) -> None:
        if not self._is_stale[link]:
            self._is_stale[link] = True
            self._stale.append(link)

    def _settle(self) -> None:
        """Find rates: first as if there were no acknowledgements, then of what those of such rates leave.

        That is within 0.1 % of where further passes would lead, since acknowledgements take 2.3 % at most.
        """
        changed = self._gross.settle()
        if self.ack_share:
            for claim in changed:
                claim.rate = claim.next_rate
                for link in connection_of(claim).path.back:
                    self._note_stale(link)
            for link in self._stale:
                self._is_stale[link] = False
                taken = 0.0
                for connection in self._acking[link]:
                    gross = connection.gross
                    if gross is not None:
                        taken += gross.rate
                payload = self.payload[link]
                self._net.resize(
                    self._net.links[link], max(payload - self.ack_share * taken, payload * ACKS_AT_MOST)
                )
            changed = self._net.settle()
            del self._stale[:]
        now = self.now
        for claim in changed:
            rate = claim.next_rate
            claim.rate = rate
            transfer = connection_of(claim).first
            assert transfer is not None
            transfer.remaining = max(transfer.remaining - transfer.rate * (now - transfer.since), 0.0)
            transfer.since = now
            transfer.rate = rate
            due = now + (transfer.remaining - transfer.stop) / rate if rate else inf
            self._heap.set_due(transfer, min(due, transfer.timer))
        if self.observers and changed:
            self.show_time(now)
            orders = [order_on(claim) for claim in changed]
            rates = [claim.rate for claim in changed]
            for observer in self.observers:
                observer.rates_changed(orders, rates)

    def crossed_bytes(self, transfer: Transfer) -> float:
        """Payload of a draining transfer that has been delivered by now."""
        left = transfer.remaining - transfer.rate * (self.now - transfer.since)
        return transfer.size - max(left, 0.0)

    # -- links that change -----------------------------------------------------------------------------------

    def resize(self, link: int, payload: float) -> None:
        """Give a link another capacity, in bytes per second of payload; at zero, transfers on it stall."""
        self.payload[link] = payload
        users = [connection_of(claim) for claim in self._gross.links[link].claims]
        self._gross.resize(self._gross.links[link], payload)
        if self.ack_share:
            self._note_stale(link)
        self._is_asked = True
        if payload:
            self.dead.discard(link)
            for transfer in sorted(self._held, key=order_of):
                self._release(transfer)
        else:
            self.dead.add(link)
            for connection in users + list(self._acking[link]):
                self._hold_if_cut(connection)

    def follow(self, changed: list[Path]) -> None:
        """Paths have another round trip, loss or weight: transfers and windows go on accordingly."""
        self._is_asked = True
        indices = {path.index for path in changed}
        for group in list(self.groups.values()):
            for connection in list(group.connections.values()):
                if connection.path.index in indices:
                    self._follow(connection)
        if self.is_per_transfer:
            for transfer in self.in_flight():
                if transfer.connection.first is transfer and transfer.connection.path.index in indices:
                    self._follow(transfer.connection)

    def _follow(self, connection: Connection) -> None:
        path = connection.path
        window = connection.window
        now = self.now
        transfer = connection.first
        gross = connection.gross
        net = connection.net
        is_draining = transfer is not None and transfer.drains
        if is_draining and gross is not None and net is not None:
            self._gross.change(gross, path.weight, gross.cap)
            if self.ack_share:
                self._net.change(net, path.weight, net.cap)
        if window is None:
            return
        is_through = True
        if is_draining and transfer is not None:
            is_through = self._drain(transfer, now)
            window.end(now, transfer.remaining)
        window.follow(path.round_trip, path.loss)
        if transfer is not None and not is_through and not transfer.is_held:
            window.again(now)
            self._accept(transfer, window, transfer.remaining, now)

    def is_cut(self, path: Path) -> bool:
        """Return whether a link of a path is dead; TCP needs the opposite route as well, for its acknowledgements."""
        for link in path.links:
            if link in self.dead:
                return True
        if self.ack_share:
            for link in path.back:
                if link in self.dead:
                    return True
        return False

    def _hold(self, transfer: Transfer, until: float) -> None:
        """Let no byte of a transfer pass until it is released; it is due again at `until`."""
        transfer.is_held = True
        self.has_called_out = True  # those above look whether anything moves yet
        self._held[transfer] = None
        transfer.timer = until
        transfer.stop = 0.0
        self._heap.set_due(transfer, until)

    def _hold_if_cut(self, connection: Connection) -> None:
        """Stop a window whose transfer cannot go on; without windows a rate of zero suffices."""
        transfer = connection.first
        window = connection.window
        if window is None or transfer is None or transfer.is_held or not self.is_cut(connection.path):
            return
        gross = connection.gross
        net = connection.net
        now = self.now
        if not self._drain(transfer, now) and gross is not None and net is not None:
            window.end(now, transfer.remaining)
            self._hold(transfer, now + self.give_up_seconds)
            self._gross.change(gross, connection.path.weight, 0.0)
            if self.ack_share:
                self._net.change(net, connection.path.weight, 0.0)

    def _release(self, transfer: Transfer) -> None:
        """Let a held transfer go on; a connection that was cut for long starts slowly."""
        connection = transfer.connection
        if self.is_cut(connection.path):
            return
        del self._held[transfer]
        transfer.is_held = False
        window = connection.window
        now = self.now
        if window is None or not transfer.drains:
            self._heap.set_due(transfer, now)
        else:
            transfer.since = now
            window.start(now, transfer.remaining, None)
            self._accept(transfer, window, transfer.remaining, now)

    def _give_up(self, transfer: Transfer) -> None:
        self._hold(transfer, inf)
        call = self.on_give_up
        assert call is not None
        self.has_called_out = True
        self.show_time(self.now)
        call(transfer)

    def is_stuck(self, transfer: Transfer) -> bool:
        """Return whether no byte of the first transfer of a connection moves, nor will as the links are now."""
        if transfer.is_held:
            return True
        return transfer.drains and (self.is_cut(transfer.connection.path) or transfer.due == inf)

    @property
    def is_busy(self) -> bool:
        """True if something happens at this instant, or an alarm is set."""
        if self._is_asked or self._delivered or self._notices or self._alarms.items:
            return True
        return not self._is_settled()

    def ask(self) -> None:
        """Something has happened at this instant: rates are found again at its end."""
        self._is_asked = True


@final
class Outside(Owner):
    """Owner of a single transfer that was sent from above the network; its callbacks run as it proceeds."""

    def __init__(
        self,
        engine: Engine,
        on_delivered: Callable[[], None],
        on_sent: Callable[[], None] | None,
        on_dropped: Callable[[], None] | None,
    ) -> None:
        self.engine = engine
        self.on_delivered = on_delivered
        self.on_sent = on_sent
        self.on_dropped = on_dropped

    def delivered(self, transfer: Transfer) -> None:
        self.engine.has_called_out = True
        self.on_delivered()

    def sent(self, transfer: Transfer) -> None:
        call = self.on_sent
        assert call is not None
        self.engine.has_called_out = True
        call()

    def dropped(self, transfer: Transfer) -> None:
        call = self.on_dropped
        assert call is not None
        self.engine.has_called_out = True
        call()


@final
class DueHeap:
    """A binary heap of transfers by due instant, then by order."""

    def __init__(self) -> None:
        self.items: list[Transfer] = []

    def least(self) -> float:
        """The earliest due instant; infinity if there is none."""
        return self.items[0].due if self.items else inf

    def set_due(self, transfer: Transfer, due: float) -> None:
        """Move a transfer to another instant; at infinity it leaves the heap."""
        heap = self.items
        before = transfer.due
        transfer.due = due
        i = transfer.place
        if i < 0:
            if due < inf:
                transfer.place = len(heap)
                heap.append(transfer)
                self._sift_up(len(heap) - 1)
        elif due == inf:
            transfer.place = -1
            last = heap.pop()
            if last is not transfer:
                heap[i] = last
                last.place = i
                self._sift_up(i)
                self._sift_down(last.place)
        elif due < before:
            self._sift_up(i)
        else:
            self._sift_down(i)

    def _sift_up(self, i: int) -> None:
        heap = self.items
        transfer = heap[i]
        while i > 0:
            above = heap[(i - 1) >> 1]
            if above.due < transfer.due or (above.due == transfer.due and above.order < transfer.order):
                break
            heap[i] = above
            above.place = i
            i = (i - 1) >> 1
        heap[i] = transfer
        transfer.place = i

    def _sift_down(self, i: int) -> None:
        heap = self.items
        transfer = heap[i]
        while 2 * i + 1 < len(heap):
            child = 2 * i + 1
            below = heap[child]
            if child + 1 < len(heap):
                other = heap[child + 1]
                if other.due < below.due or (other.due == below.due and other.order < below.order):
                    child += 1
                    below = other
            if below.due > transfer.due or (below.due == transfer.due and below.order > transfer.order):
                break
            heap[i] = below
            below.place = i
            i = child
        heap[i] = transfer
        transfer.place = i


def order_of(transfer: Transfer) -> int:
    return transfer.order


def last_used(connection: Connection) -> float:
    window = connection.window
    return window.last_used if window is not None else 0.0


def connection_of(claim: Claim) -> Connection:
    connection = claim.owner
    assert isinstance(connection, Connection)
    return connection


def order_on(claim: Claim) -> int:
    """Order of the transfer that a claim stands for."""
    transfer = connection_of(claim).first
    assert transfer is not None
    return transfer.order
