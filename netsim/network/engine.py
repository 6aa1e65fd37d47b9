"""Event loop of the fluid network: transfers, and time that advances from one change to the next.

A transfer waits for its route's latency without using bandwidth, then drains at the rate that fairness gives it
among all that drain, limited by its connection's window, until its bytes are delivered. Messages of one
connection leave whole and in order.

**Within an instant** the order is: timers; then every transfer that is due starts to drain, asks its window again
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

from netsim.network.congestion import CongestionControl, TcpSettings
from netsim.network.connections import (
    Connection,
    Connections,
    Owner,
    Transfer,
    order_of,
    sort_by_sending,
    transfer_of,
)
from netsim.network.heap import Heap, HeapItem
from netsim.network.queues import Queues
from netsim.network.rates import Rates
from netsim.network.route import Route

# Two instants are one when they differ by rounding: of the clock, and of the transfer's duration. Neither bytes nor
# bandwidth appear, so scaling both changes nothing.
CLOCK_TOLERANCE: Final = 2.0**-50
DURATION_TOLERANCE: Final = 1e-12

# Events after which `advance` returns even if nobody has to be called, so that a signal is noticed.
MOST_EVENTS: Final = 20_000


class Timer(HeapItem):
    """Calls code at its `key`, first in that instant."""

    def ring(self) -> None:
        raise NotImplementedError


@final
class DeadLinks:
    """Links that carry nothing, and transfers that wait until they are back.

    Args:
        give_up_seconds: a held transfer is given up after this time.
        needs_both_ways: transfers need the opposite route as well, for their acknowledgements.

    Attributes:
        links: indices.
        held: transfers.
        on_give_up: called with a transfer whose connection is given up.
    """

    def __init__(self, give_up_seconds: float, needs_both_ways: bool) -> None:
        self.give_up_seconds = give_up_seconds
        self.needs_both_ways = needs_both_ways
        self.links: set[int] = set()
        self.held: dict[Transfer, None] = {}
        self.on_give_up: Callable[[Transfer], None] | None = None

    def is_cut(self, route: Route) -> bool:
        """Return whether a route is cut."""
        for link in route.links:
            if link in self.links:
                return True
        if self.needs_both_ways:
            for link in route.back:
                if link in self.links:
                    return True
        return False


@final
class Paused:
    """Hosts whose processes are stopped: they neither send nor take in what arrives, and no connection is lost.

    Attributes:
        hosts: indices.
        transfers: first ones of their connections that stand still, and the seconds left of their timers.
    """

    def __init__(self) -> None:
        self.hosts: set[int] = set()
        self.transfers: dict[Transfer, float] = {}

    def stops(self, connection: Connection) -> bool:
        """Return whether transfers of a connection stand still; background traffic is sent by other processes."""
        route = connection.route
        return (route.source in self.hosts or route.target in self.hosts) and not connection.is_background


@final
class Present:
    """State of the present instant, until owners are called.

    Attributes:
        has_changed: something is to be done.
        delivered: transfers.
        notices: transfers that were sent or dropped, whose owners asked for a call.
    """

    def __init__(self) -> None:
        self.has_changed = False
        self.delivered: list[Transfer] = []
        self.notices: list[Transfer] = []


@final
class Counts:
    """Counts of an engine.

    Attributes:
        num_sent: transfers and timers so far, which are numbered.
        num_in_flight: transfers that are not finished.
        num_events: events so far.
        dropped_bytes: payload that transfers ended by force had not delivered.
    """

    def __init__(self) -> None:
        self.num_sent = 0
        self.num_in_flight = 0
        self.num_events = 0
        self.dropped_bytes = 0.0


@final
class Engine:
    """Event loop of the fluid network.

    Args:
        protocol: a `netsim.Protocol`.
        payload: bytes per second of payload that each link carries.
        processes: bytes per second that the processes of each host send, and that they receive.
        ack_share: payload that a byte's acknowledgements displace on the opposite route.
        queues: bytes that each link's queue holds; infinity: any window.
        drops_at_source: each link drops its own host's data as well.
        find_route: as of `Connections`.
        show_time: called with the instant before code above the network is, and with the last one of `advance`.

    Attributes:
        now: its clock, in seconds.
        connections: connections and routes in use.
        rates: rates of what drains.
        queues: queues of links.
        observers: called as transfers start, end and change their rates.
        has_called_out: code above the network was called, or a transfer came to a halt, since `advance` began.
        counts: of transfers and events.
        dead: links that carry nothing, and transfers held by them.
        singles: transfers in flight that were sent from above the network, by id.
        paused: hosts whose processes are stopped, and the transfers that stand still meanwhile.
        repairing: transfers that have drained, and are delivered when a lost packet has been sent again.
    """

    def __init__(
        self,
        protocol: Any,
        payload: list[float],
        processes: list[float],
        ack_share: float,
        queues: list[float],
        drops_at_source: list[bool],
        find_route: Callable[[int, int, int], Route],
        show_time: Callable[[float], None],
    ) -> None:
        self.now = 0.0
        tcp = TcpSettings(protocol) if protocol.has_windows else None
        is_per_transfer = protocol.connections == "per-transfer"
        num_channels = int(protocol.channels)
        self.connections = Connections(len(processes), is_per_transfer, tcp, num_channels, find_route)
        self.rates = Rates(payload, processes, ack_share)
        self.queues = Queues(
            self.connections, payload, queues, drops_at_source, tcp is not None and tcp.rendezvous
        )
        self.dead = DeadLinks(float(protocol.give_up_seconds), ack_share > 0.0)
        self.show_time = show_time
        self.observers: list[Any] = []
        self.has_called_out = False
        self.counts = Counts()
        self.singles: dict[int, Transfer] = {}
        self.paused = Paused()
        self.repairing: dict[Transfer, None] = {}
        self._heap = Heap()
        self._timers = Heap()
        self._present = Present()

    # -- connections -----------------------------------------------------------------------------------------

    def route(self, source: int, target: int) -> Route:
        return self.connections.route(source, target)

    def connect(
        self, name: Hashable, source: int, target: int, is_background: bool = False, lane: int = 0
    ) -> Connection:
        """The connection of this name and lane between two hosts, or one that lasts for a single transfer."""
        found = self.connections.find(name, source, target, lane)
        if found is None:
            found = self.connections.open(name, source, target, is_background, lane, self.now)
            self.rates.admit(found)
        return found

    def in_flight(self) -> list[Transfer]:
        """All transfers that are not finished, in the order of sending."""
        in_use = {item.connection for item in self._heap.items() if isinstance(item, Transfer)}
        in_use.update([transfer.connection for transfer in self.dead.held])
        in_use.update([transfer.connection for transfer in self.paused.transfers])
        for link in self.rates.gross.links:
            in_use.update([transfer_of(claim).connection for claim in link.claims])
        found: list[Transfer] = []
        for connection in in_use:
            transfer = connection.first
            while transfer is not None:
                found.append(transfer)
                transfer = transfer.next
        found += self.repairing
        sort_by_sending(found)
        return found

    # -- sending ---------------------------------------------------------------------------------------------

    def send(self, transfer: Transfer, tells_sent: bool = False) -> None:
        """Start a transfer now; nothing is called before this returns."""
        now = self.now
        connection = transfer.connection
        route = connection.route
        size = transfer.size
        owner = transfer.owner
        counts = self.counts
        transfer.number = counts.num_sent
        counts.num_sent += 1
        counts.num_in_flight += 1
        transfer.begun = now
        transfer.timer = now + route.latency + route.setup
        if self.connections.tcp is not None:
            self.queues.measure(route)
            if transfer.most == inf and connection.window is None:
                self.connections.open_window(connection)
        is_first = connection.append(transfer)
        if tells_sent:
            if self._fits_buffer(transfer, connection.backlog):
                self._present.notices.append(transfer)
                self._present.has_changed = True
            else:
                transfer.tells_sent = True
        if is_first:
            if transfer.most == inf:
                self.queues.enter(connection)
                transfer.timer += self.queues.line(route, connection, now).wait
            if size == 0.0:
                transfer.timer += self.queues.seconds(route, connection, now)
            self._heap.move(transfer, transfer.timer)
            if self.paused.hosts and self.paused.stops(connection):
                self._stop(transfer)
            elif self.dead.links and self.dead.is_cut(route):
                self._hold_first_byte(transfer)
        else:
            self.queues.recount(connection)
        if isinstance(owner, Outside):
            if owner.id < 0:
                owner.id = transfer.number
            self.singles[owner.id] = transfer
        if self.observers:
            for observer in self.observers:
                observer.transfer_started(transfer.number, route.source, route.target, size, connection.name)

    def set_timer(self, timer: Timer, seconds: float) -> None:
        """Have a timer ring after `seconds`, before whatever the network does at that instant."""
        timer.number = self.counts.num_sent
        self.counts.num_sent += 1
        self._timers.move(timer, self.now + seconds)

    def wake(self, timer: Timer, instant: float) -> None:
        """Have a timer ring at an `instant`, before whatever the network does then."""
        self._timers.move(timer, instant)

    def _fits_buffer(self, transfer: Transfer, num_bytes: float) -> bool:
        """Return whether the socket's buffer holds all unsent bytes."""
        window = transfer.window
        return window is not None and num_bytes <= window.buffer_bytes(self.now)

    def abort(self, transfer: Transfer) -> float:
        """End a transfer that is under way; its owner is not called. Returns the bytes that were delivered."""
        now = self.now
        delivered = 0.0
        if transfer.drains:
            self._drain(transfer, now)
            delivered = transfer.size - transfer.remaining
            window = transfer.window
            if window is not None:
                window.end(now, transfer.remaining)
        if transfer in self.repairing:
            delivered = transfer.size
            self._end_repair(transfer)
        else:
            self.counts.dropped_bytes += transfer.size - delivered
            self._leave(transfer, delivered)
        if transfer in self._present.notices:
            self._present.notices.remove(transfer)
        self._present.has_changed = True
        for observer in self.observers:
            observer.transfer_ended(transfer.number, delivered)
        return delivered

    def drop(self, transfer: Transfer) -> None:
        """End a transfer by force; its owner is called at the end of the instant if it wants to know."""
        self.abort(transfer)
        if transfer.owner.hears_drops:
            transfer.was_dropped = True
            self._present.notices.append(transfer)

    def drop_at(self, host: int) -> None:
        """End all transfers from and to a host and forget its connections.

        Transfers whose owner does not want to know are sent again, in the same order.
        """
        again: list[tuple[Transfer, bool]] = []
        for transfer in self.in_flight():
            route = transfer.connection.route
            if host == route.source or host == route.target:
                waits_for_sent = transfer.tells_sent or transfer in self._present.notices
                self.drop(transfer)
                if not transfer.owner.hears_drops:
                    again.append((transfer, waits_for_sent))
        for connection in self.connections.kept():
            if host == connection.route.source or host == connection.route.target:
                self.connections.close(connection)
        for transfer, waits_for_sent in again:
            lost = transfer.connection
            name, route = lost.name, lost.route
            transfer.restart(self.connect(name, route.source, route.target, lost.is_background, lost.lane))
            self.send(transfer, waits_for_sent)

    def end_connections(self, name: Hashable) -> None:
        """End all transfers of the connections of this name; no owner is called."""
        for transfer in self.in_flight():
            if transfer.connection.name == name:
                self.abort(transfer)

    # -- time ------------------------------------------------------------------------------------------------

    def next_due(self) -> float:
        """The earliest instant at which anything happens by itself; infinity if nothing does."""
        if self._present.has_changed or self._present.delivered or not self.rates.is_settled:
            return self.now
        return max(min(self._heap.least(), self._timers.least()), self.now)

    def advance(self, until: float, is_included: bool) -> None:
        """Advance to the last instant due until `until`, or until code above the network has been called.

        It also returns after many events, for signals.

        Args:
            until: instant, not before now.
            is_included: what is due at `until` happens; else only what is due before.
        """
        self.has_called_out = False
        counts = self.counts
        last_event = counts.num_events + MOST_EVENTS
        while not self.has_called_out and counts.num_events < last_event:
            now = self.now
            if now > until or (now == until and not is_included):
                break
            timer = self._timers.first
            if isinstance(timer, Timer) and timer.key <= now:
                self._timers.move(timer, inf)
                counts.num_events += 1
                if self.observers:
                    self.show_time(now)
                timer.ring()
            elif self._present.has_changed or self._heap.least() <= now:
                self._turn()
            elif not self.rates.is_settled:
                self._settle()
            else:
                due = min(self._timers.least(), self._heap.least())
                if due > until or (due == until and not is_included):
                    break
                self.now = due
        self.show_time(self.now)

    def call_out(self) -> None:
        """Show the time to code above the network, which is called next; `advance` returns after it."""
        self.has_called_out = True
        self.show_time(self.now)

    def _turn(self) -> None:
        """Handle all transfers that are due, then call owners."""
        present = self._present
        present.has_changed = False
        self.take_due()
        delivered, notices = present.delivered, present.notices
        if not (delivered or notices):
            return
        if self.observers:
            self.show_time(self.now)
        present.delivered = []
        present.has_changed = True  # owners may act at this instant, and more may be due
        sort_by_sending(delivered)
        for transfer in delivered:
            if transfer.tells_sent:
                notices.append(transfer)
        if self.observers:
            for transfer in delivered:
                for observer in self.observers:
                    observer.transfer_ended(transfer.number, transfer.size)
        if notices:
            present.notices = []
            sort_by_sending(notices)
            self._notify(notices, delivered)
        else:
            for transfer in delivered:
                transfer.owner.delivered(transfer)

    def _notify(self, notices: list[Transfer], delivered: list[Transfer]) -> None:
        """Call owners in the order of sending; of one transfer, sent before delivered."""
        i = 0
        for transfer in notices:
            while i < len(delivered) and delivered[i].number < transfer.number:
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
        """Start, continue or end transfers that are due; owners are called at the end of the instant."""
        heap = self._heap
        now = self.now
        while True:
            transfer = heap.first
            if not isinstance(transfer, Transfer):
                return
            if transfer.key - (now * CLOCK_TOLERANCE + (now - transfer.begun) * DURATION_TOLERANCE) > now:
                return
            self.counts.num_events += 1
            if self.dead.held and transfer in self.dead.held:
                self._give_up(transfer)
                continue
            heap.move(transfer, inf)
            if self.repairing and transfer in self.repairing:
                if self.dead.links and self.dead.is_cut(transfer.connection.route):
                    self._hold_first_byte(transfer)
                else:
                    self._end_repair(transfer)
                    self._present.delivered.append(transfer)
                continue
            if not (self._continue(transfer, now) if transfer.drains else self._begin(transfer, now)):
                self._leave(transfer, transfer.size)
                window = transfer.window
                if window is not None and window.repaired_at > now:
                    self._wait_for_repair(transfer, window.repaired_at)
                    continue
                self._present.delivered.append(transfer)

    def _wait_for_repair(self, transfer: Transfer, until: float) -> None:
        """Deliver a transfer later, as the receiver lacks a packet; the next of its connection goes on meanwhile."""
        self.counts.num_in_flight += 1
        self.repairing[transfer] = None
        transfer.timer = until
        self._heap.move(transfer, until)
        if transfer.tells_sent:
            transfer.tells_sent = False
            self._present.notices.append(transfer)
        if self.paused.hosts and self.paused.stops(transfer.connection):
            self._stop(transfer)

    def _end_repair(self, transfer: Transfer) -> None:
        """Take out a transfer that waits for a lost packet."""
        self.counts.num_in_flight -= 1
        del self.repairing[transfer]
        self.dead.held.pop(transfer, None)
        self.paused.transfers.pop(transfer, 0.0)
        self._heap.move(transfer, inf)

    def _repair_later(self, transfer: Transfer) -> None:
        """Keep what follows a transfer that waits for a lost packet behind it, as its timer has changed."""
        window = transfer.window
        if window is not None and transfer in self.repairing:
            window.repaired_at = max(window.repaired_at, transfer.timer)

    def _begin(self, transfer: Transfer, now: float) -> bool:
        """The first byte arrives; returns whether there is anything to drain."""
        connection = transfer.connection
        window = connection.window if transfer.most == inf else None
        if self.dead.links and self.dead.is_cut(connection.route):
            self._hold_first_byte(transfer)
            return True
        if transfer.size == 0.0 or connection.gross is None:
            if window is not None:
                window.touch(now)
            return False
        if window is not None and not transfer.was_refused:
            wait = self.queues.refusal_seconds(connection.route)
            if wait > 0.0:
                window.touch(now)
                window.last_used = transfer.timer = now + wait
                self._heap.move(transfer, transfer.timer)
                held: Transfer | None = transfer  # sockets wait once for all that they hold
                while held is not None:
                    held.was_refused = True
                    held = held.next
                return True
        transfer.drains = True
        transfer.since = now
        self.rates.join(transfer)
        if window is None:
            transfer.timer = inf
        else:
            window.following = connection.backlog - transfer.size
            window.start(now, transfer.size, self.queues.state(transfer, transfer.size, now))
            self._accept(transfer, window, transfer.size, now)
        return True

    def _continue(self, transfer: Transfer, now: float) -> bool:
        """A draining transfer has reached its stop or its timer; returns whether it is not finished."""
        window = transfer.window
        if window is None:
            return False
        if self._drain(transfer, now):
            window.end(now, 0.0)
            return False
        left = transfer.remaining
        window.following = transfer.connection.backlog - transfer.size
        window.go_on(now, left, self.queues.state(transfer, left, now))
        self._accept(transfer, window, transfer.remaining, now)
        return True

    def _drain(self, transfer: Transfer, now: float) -> bool:
        """Bring `remaining` up to now, to exactly its stop where it is there, rounding aside; True if finished."""
        left = transfer.remaining - transfer.rate * (now - transfer.since)
        slack = now * CLOCK_TOLERANCE + (now - transfer.begun) * DURATION_TOLERANCE
        reached = left - transfer.stop <= 2 * slack * transfer.rate
        if reached:
            left = transfer.stop
        transfer.remaining = left
        transfer.since = now
        return reached and transfer.stop == 0.0

    def _accept(self, transfer: Transfer, window: CongestionControl, left: float, now: float) -> None:
        """Apply the window's grant to a transfer."""
        cap = window.cap
        self.rates.limit(transfer.connection, cap)
        transfer.stop = window.stop
        transfer.timer = window.timer
        rate = transfer.rate if cap else 0.0
        self._heap.move(transfer, min(now + (left - window.stop) / rate if rate else inf, window.timer))
        if transfer.tells_sent and self._fits_buffer(transfer, left):
            transfer.tells_sent = False
            self._present.notices.append(transfer)

    def _leave(self, transfer: Transfer, delivered: float) -> None:
        """Take a transfer out; the next of its connection follows if it was the first."""
        connection = transfer.connection
        route = connection.route
        owner = transfer.owner
        route.delivered.all += delivered
        if connection.is_background:
            route.delivered.background += delivered
        self.counts.num_in_flight -= 1
        if isinstance(owner, Outside):
            del self.singles[owner.id]
        if self.dead.held:
            self.dead.held.pop(transfer, None)
        if self.paused.transfers:
            self.paused.transfers.pop(transfer, 0.0)
        if transfer.drains:
            transfer.drains = False
            self.rates.leave(connection)
        self._heap.move(transfer, inf)
        is_first = connection.remove(transfer)
        following = connection.first
        if following is None:
            self.queues.leave(connection)
            if transfer.most < inf and connection.window is None:
                self.connections.close(connection)
            return
        self.queues.recount(connection)
        if is_first:
            if following.most == inf:
                self.queues.enter(connection)
            self._heap.move(following, following.timer)
            if self.paused.hosts and self.paused.stops(connection):
                self._stop(following)

    # -- rates -----------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Find rates, and when transfers are due at them."""
        changed = self.rates.settle()
        now = self.now
        for claim in changed:
            rate = claim.next_rate
            claim.rate = rate
            transfer = transfer_of(claim)
            transfer.remaining = max(transfer.remaining - transfer.rate * (now - transfer.since), 0.0)
            transfer.since = now
            transfer.rate = rate
            due = now + (transfer.remaining - transfer.stop) / rate if rate else inf
            self._heap.move(transfer, min(due, transfer.timer))
        if self.observers and changed:
            self.show_time(now)
            orders = [transfer_of(claim).number for claim in changed]
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
        self.rates.resize(link, payload)
        self.queues.resize(link, payload)
        self._present.has_changed = True
        if payload:
            self.dead.links.discard(link)
            for transfer in sorted(self.dead.held, key=order_of):
                self._release(transfer)
        else:
            self.dead.links.add(link)
            for connection in self.rates.users(link):
                self._hold_if_cut(connection)

    def follow(self, changed: list[Route]) -> None:
        """Apply another round trip, loss or weight of routes to their transfers and windows."""
        self._present.has_changed = True
        routes = set(changed)
        for connection in self.connections.kept():
            if connection.route in routes:
                self._follow(connection)
        if self.connections.is_per_transfer:
            for transfer in self.in_flight():
                if transfer.connection.first is transfer and transfer.connection.route in routes:
                    self._follow(transfer.connection)

    def _follow(self, connection: Connection) -> None:
        window = connection.window
        now = self.now
        transfer = connection.first
        is_draining = transfer is not None and transfer.drains and transfer not in self.paused.transfers
        if is_draining and connection.gross is not None:
            self.rates.change(connection, connection.gross.cap)
        if window is None:
            return
        is_limited = transfer is not None and transfer.window is not None
        is_finished = True
        if is_draining and is_limited and transfer is not None:
            is_finished = self._drain(transfer, now)
            window.end(now, transfer.remaining)
        window.follow()
        if is_limited and transfer is not None and not is_finished and transfer not in self.dead.held:
            window.again(now)
            self._accept(transfer, window, transfer.remaining, now)

    def _hold(self, transfer: Transfer, until: float) -> None:
        """Stop a transfer until it is released; it is due again at `until`."""
        self.has_called_out = True  # those above look whether anything moves yet
        self.dead.held[transfer] = None
        transfer.timer = until
        transfer.stop = 0.0
        self._heap.move(transfer, until)

    def _hold_first_byte(self, transfer: Transfer) -> None:
        """Stop a transfer of which nothing has arrived; only windows and empty messages give up."""
        gives_up = transfer.size == 0.0 or transfer.window is not None
        self._hold(transfer, self.now + self.dead.give_up_seconds if gives_up else inf)

    def _hold_if_cut(self, connection: Connection) -> None:
        """Hold a transfer with a window whose route is cut; without windows a rate of zero suffices."""
        transfer = connection.first
        if transfer is None or transfer in self.dead.held or transfer in self.paused.transfers:
            return
        if not self.dead.is_cut(connection.route):
            return
        window = transfer.window
        now = self.now
        if window is not None and not self._drain(transfer, now):
            window.end(now, transfer.remaining)
            self._hold(transfer, now + self.dead.give_up_seconds)
            self.rates.change(connection, 0.0)

    def _release(self, transfer: Transfer) -> None:
        """Resume a held transfer; a connection cut for long starts slowly, and a first byte leaves only now."""
        route = transfer.connection.route
        if self.dead.is_cut(route):
            return
        del self.dead.held[transfer]
        window = transfer.window
        now = self.now
        if not transfer.drains:
            transfer.timer = now + route.latency + route.setup
            self._repair_later(transfer)
        if self.paused.stops(transfer.connection):
            self._stop(transfer)
        elif window is None or not transfer.drains:
            self._heap.move(transfer, transfer.timer)
        else:
            transfer.since = now
            window.start(now, transfer.remaining, None)
            self._accept(transfer, window, transfer.remaining, now)

    # -- hosts whose processes are stopped -------------------------------------------------------------------

    def pause(self, host: int) -> None:
        """Stop the processes of a host: what it sends and receives stands still, and nothing is lost."""
        self.paused.hosts.add(host)
        for transfer in self.in_flight():
            connection = transfer.connection
            is_under_way = connection.first is transfer or transfer in self.repairing
            is_halted = transfer in self.dead.held or transfer in self.paused.transfers
            if is_under_way and not is_halted and self.paused.stops(connection):
                self._stop(transfer)

    def resume(self, host: int) -> None:
        """Continue the processes of a host; under TCP a connection that was idle for long starts slowly."""
        self.paused.hosts.discard(host)
        self._present.has_changed = True
        for transfer in sorted(self.paused.transfers, key=order_of):
            if not self.paused.stops(transfer.connection):
                self._go_on(transfer, self.paused.transfers.pop(transfer))

    def _stop(self, transfer: Transfer) -> None:
        """Stop a transfer that is under way with what it has; a dead link holds none that is stopped."""
        now = self.now
        left = inf
        if not transfer.drains:
            left = max(transfer.timer - now, 0.0)
        elif not self._drain(transfer, now):
            window = transfer.window
            if window is not None:
                window.end(now, transfer.remaining)
            transfer.stop = 0.0
            self.rates.change(transfer.connection, 0.0)
        else:
            return  # it has arrived
        self.paused.transfers[transfer] = left
        transfer.timer = inf
        self._heap.move(transfer, inf)
        self._present.has_changed = self.has_called_out = True

    def _go_on(self, transfer: Transfer, left: float) -> None:
        """Resume a stopped transfer with `left` seconds of its timer."""
        now = self.now
        window = transfer.window
        transfer.since = now
        if not transfer.drains:
            transfer.timer = now + left
            self._repair_later(transfer)
            self._heap.move(transfer, transfer.timer)
        elif window is None:
            self.rates.change(transfer.connection, transfer.most)
        elif self.dead.is_cut(transfer.connection.route):
            self._hold(transfer, now + self.dead.give_up_seconds)
        else:
            window.start(now, transfer.remaining, None)
            self._accept(transfer, window, transfer.remaining, now)

    def _give_up(self, transfer: Transfer) -> None:
        self._hold(transfer, inf)
        call = self.dead.on_give_up
        assert call is not None
        self.call_out()
        call(transfer)

    def is_stuck(self, transfer: Transfer) -> bool:
        """Return whether no byte of the first transfer of a connection moves, nor will as the links are now."""
        if transfer in self.dead.held or transfer in self.paused.transfers:
            return True
        return transfer.drains and (self.dead.is_cut(transfer.connection.route) or transfer.key == inf)

    @property
    def is_busy(self) -> bool:
        """True if something happens at this instant, or a timer is set."""
        if (
            self._present.has_changed
            or self._present.delivered
            or self._present.notices
            or self._timers.first is not None
        ):
            return True
        return not self.rates.is_settled

    def mark_changed(self) -> None:
        """Recompute rates at the end of this instant."""
        self._present.has_changed = True


@final
class Outside(Owner):
    """Owner of a single transfer that was sent from above the network; its callbacks run as it proceeds.

    Attributes:
        id: of the transfer; it keeps it when it is sent again.
    """

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
        self.hears_drops = on_dropped is not None
        self.id = -1

    def delivered(self, transfer: Transfer) -> None:
        self.engine.call_out()
        self.on_delivered()

    def sent(self, transfer: Transfer) -> None:
        call = self.on_sent
        assert call is not None
        self.engine.call_out()
        call()

    def dropped(self, transfer: Transfer) -> None:
        call = self.on_dropped
        assert call is not None
        self.engine.call_out()
        call()
