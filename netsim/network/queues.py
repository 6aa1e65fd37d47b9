"""Queues of links, as data and small frames of other connections meet them.

Compiled by mypyc where a C compiler is there; see `netsim.network.build`.
"""

from __future__ import annotations

from math import inf
from typing import Final, final

from netsim.network.bursts import BurstyWindow
from netsim.network.congestion import QueueState
from netsim.network.connections import Connection, Connections, Transfer
from netsim.network.route import Route
from netsim.network.tail_drop import Burst, meet


@final
class SendingLine:
    """A host's own line, as frames of one connection meet it.

    Attributes:
        wait: seconds that they wait for what others' small queues have there.
        others: seconds of all that other connections have not put through yet.
        windows: bytes of the windows of all sockets with data.
    """

    def __init__(self, wait: float, others: float, windows: float) -> None:
        self.wait, self.others, self.windows = wait, others, windows


IDLE_LINE: Final = SendingLine(0.0, 0.0, 0.0)


@final
class Queues:
    """Backlogs in the queues of links, and measurements of the narrowest link of each route.

    Args:
        connections: gives the route back.
        payload: bytes per second of payload that each link carries at present.
        sizes: bytes that each link's queue holds; infinity: any window.
        drops_at_source: each link drops its own host's data as well, as a shaper or modem there does.
        are_overrun: bursts may overrun queues that follow faster links, and small frames wait there.

    Attributes:
        revision: number of changes of rates so far.
    """

    def __init__(
        self,
        connections: Connections,
        payload: list[float],
        sizes: list[float],
        drops_at_source: list[bool],
        are_overrun: bool,
    ) -> None:
        self.revision = 0
        self._connections = connections
        self._payload = payload
        self._last_payload = payload[:]  # what a link carries, or carried last
        self._sizes = sizes
        self._drops_at_source = drops_at_source
        self._are_overrun = are_overrun
        self._in_use: list[dict[Connection, None]] = [{} for _ in payload]  # by narrowest link
        self._ending: list[dict[Connection, None]] = [{} for _ in payload]  # by last link, under a rendezvous
        self._starting: list[dict[Connection, None]] = [{} for _ in payload]  # by first link, likewise
        self._wanted = [0.0 for _ in payload]  # by first link that drops, bytes of the least windows in use
        self._has_any = False  # some route has a queue that bursts may overrun

    def resize(self, link: int, payload: float) -> None:
        """Record the payload rate that a link carries from now on."""
        if not payload:
            return
        self._last_payload[link] = payload
        self.revision += 1
        if self._has_any:
            for waiting in self._in_use:
                for connection in list(waiting):
                    self.measure(connection.route)

    def measure(self, route: Route) -> None:
        """Find the narrowest link of a route, unless no rate has changed since it was found."""
        narrowest = route.narrowest
        if narrowest.revision == self.revision or not route.links:
            return
        narrowest.revision = self.revision
        rates = [self._last_payload[link] for link in route.links]
        narrowest.least = min(rates)
        # Linux keeps what a host's own line does not carry yet in the sockets (small queues): nothing is lost there,
        # and a queue grows behind it only while it is not full.
        narrowest.follows_source = not (self._are_overrun or self._drops_at_source[route.links[0]])
        if narrowest.follows_source and len(rates) == 1:
            narrowest.rate = rates[0]
            narrowest.queue = inf
            return
        rate = min(rates[1:] if narrowest.follows_source else rates)
        at = rates.index(rate, 1 if narrowest.follows_source else 0)
        narrowest.rate = rate
        narrowest.feed = min(rates[:at]) if at else 0.0
        narrowest.queue = self._sizes[route.links[at]]
        before = narrowest.bursts_at
        narrowest.bursts_at = -1
        if self._are_overrun:
            if narrowest.feed <= rate:  # a host's own line
                narrowest.queue = inf
            elif narrowest.queue < inf:
                narrowest.bursts_at = route.links[at]
                self._has_any = True
        if before >= 0 and narrowest.bursts_at != before:
            for connection in list(self._in_use[before]):
                if connection.route is route:
                    del self._in_use[before][connection]
                    self.enter(connection)

    def enter(self, connection: Connection) -> None:
        """Count a connection's data in the queue of its narrowest link from now on."""
        link = connection.route.narrowest.bursts_at
        if link >= 0:
            self._in_use[link][connection] = None
        links = connection.route.links
        if self._are_overrun and links:
            self._ending[links[-1]][connection] = None
        if links and (self._are_overrun or self._drops_at_source[links[0]]):
            self._starting[links[0]][connection] = None
            self.recount(connection)

    def recount(self, connection: Connection) -> None:
        """Count what a connection's least windows put into its own line's queue, as its backlog is now."""
        links = connection.route.links
        if not links or not self._drops_at_source[links[0]] or connection not in self._starting[links[0]]:
            return
        wanted = min(2.0 * connection.route.segment, connection.backlog)
        self._wanted[links[0]] += wanted - connection.wanted
        connection.wanted = wanted

    def leave(self, connection: Connection) -> None:
        link = connection.route.narrowest.bursts_at
        if link >= 0:
            self._in_use[link].pop(connection, None)
        links = connection.route.links
        if self._are_overrun and links:
            self._ending[links[-1]].pop(connection, None)
        if links and (self._are_overrun or self._drops_at_source[links[0]]):
            self._starting[links[0]].pop(connection, None)
            self._wanted[links[0]] -= connection.wanted
            connection.wanted = 0.0

    def refusal_seconds(self, route: Route) -> float:
        """Mean wait of a message's sockets whose host's own queue does not hold two packets of each that has data.

        Linux leaves a refused packet in the socket. If nothing of the socket is in flight, it tries again when its
        probe timer fires, after a retransmission time-out (`tcp_check_probe_timer` in `include/net/tcp.h`). Windows
        never fall below two packets, so this share of them is refused.
        """
        link, tcp = route.links[0], self._connections.tcp
        if tcp is None or not self._drops_at_source[link]:
            return 0.0
        room, wanted = self._sizes[link], self._wanted[link]
        if wanted <= room:
            return 0.0
        timeout = tcp.minimum_timeout + route.round_trip + room / self._last_payload[link]
        return (1.0 - room / wanted) * timeout

    def line(self, route: Route, own: Connection, now: float) -> SendingLine:
        """State of the first line of a route, as frames of `own` sent now meet it."""
        if not self._are_overrun or not route.links:
            return IDLE_LINE
        starting, payload = self._starting[route.links[0]], self._payload[route.links[0]]
        num_busy, windows, is_alone = 0, 0.0, True
        for connection in starting:
            window = connection.window
            if connection.backlog > 0.0:
                num_busy += 1
                is_alone = is_alone and connection is own
                if isinstance(window, BurstyWindow):
                    windows += window.window
        if is_alone or not payload:
            return IDLE_LINE
        standing, ahead = 0.0, 0.0
        for connection in starting:
            first, window = connection.first, connection.window
            if connection is own or first is None or not isinstance(window, BurstyWindow):
                continue
            if connection.backlog <= 0.0:
                continue
            left = connection.backlog
            there = now + route.setup + connection.route.latency
            if first.drains:
                left -= first.size - first.remaining + first.rate * (there - first.since)
            else:  # the line carries it before its first byte arrives
                left -= payload / num_busy * max(there - first.timer, 0.0)
            if left > 0.0 and connection.route.narrowest.feed == 0.0:
                standing += min(left, window.small_queue_bytes(payload, windows))
                ahead += left
        return SendingLine(standing / payload, ahead / payload, windows)

    def seconds(self, route: Route, own: Connection, now: float, span: float = 0.0) -> float:
        """Longest wait of small frames sent within `span` seconds, behind others' data in the queues of their route."""
        if not self._has_any:
            return 0.0
        there = now + route.latency
        seconds = 0.0
        for link in route.links:
            standing = 0.0
            for connection in self._in_use[link]:
                if connection is not own:
                    standing += self._standing_bytes(connection, there, span)
            if standing > 0.0 and self._payload[link] > 0.0:
                seconds += standing / self._payload[link]
        return seconds

    def _standing_bytes(self, connection: Connection, there: float, span: float) -> float:
        """Bytes of a connection in its narrowest link's queue that will be received after `there`; see `seconds`."""
        first = connection.first
        if first is None:
            return 0.0
        window = first.window
        if not isinstance(window, BurstyWindow):
            return 0.0
        full_rate = self._payload[connection.route.narrowest.bursts_at]
        rate = first.rate
        left = first.remaining - rate * (there - first.since) if first.drains else 0.0
        each = first.next if first.drains else first
        while each is not None and each.timer < there + span:  # sent in time to stand there
            left += each.size
            each = each.next
        if first.drains:
            return window.standing_bytes(there, span, left, rate, full_rate)
        return window.coming_bytes(there, span, left, full_rate, first.timer)

    def _crowd_seconds(self, route: Route) -> float:
        """Wait in the queue of a route's last link, by what all connections that end there may have in flight."""
        last = route.links[-1]
        num_bytes = 0.0
        for connection in self._ending[last]:
            window = connection.window
            if isinstance(window, BurstyWindow):
                num_bytes += min(window.window, connection.backlog)
        payload = self._last_payload[last]
        return num_bytes / payload - route.round_trip if payload else 0.0

    def state(self, transfer: Transfer, size: float, now: float) -> QueueState | None:
        """Queues as a burst of at most `size` bytes and its acknowledgements meet them; None if none overruns them."""
        own = transfer.connection
        route = own.route
        narrowest = route.narrowest
        if narrowest.revision != self.revision:
            self.measure(route)
        gross = own.gross
        if transfer.rate > 0.0 and gross is not None:
            narrowest.is_held = narrowest.follows_source and gross.links[0].is_full
            for i in range(len(route.links), len(gross.links)):  # processes
                narrowest.is_held = narrowest.is_held or gross.links[i].is_full
        window = transfer.window
        if not isinstance(window, BurstyWindow):
            return None
        if window.is_growing():
            window.crowd_seconds = max(self._crowd_seconds(route), 0.0)
        window.line_seconds = window.share_seconds = 0.0
        hears_line = not window.avoidance.has_lost and window.window < narrowest.rate * route.round_trip
        if narrowest.bursts_at < 0 and not hears_line:
            return None
        back = self._connections.route(route.target, route.source)
        if hears_line:
            line = self.line(route, own, now - route.latency - route.setup)
            window.line_seconds = line.wait + self.line(back, own, now).wait
            if line.wait > 0.0:
                # The line carries a small queue of each socket in turn, while others have data.
                payload = self._payload[route.links[0]]
                turns = window.window / window.small_queue_bytes(payload, line.windows)
                window.share_seconds = window.window / payload + min(turns * line.wait, line.others)
        if narrowest.bursts_at < 0:
            return None
        standing = 0.0
        bursts = [Burst(now, inf, route.source, narrowest.feed)]
        until = now + window.burst_seconds(size)
        for connection in self._in_use[narrowest.bursts_at]:
            first = connection.first
            if connection is own or first is None:
                continue
            other = first.window
            if not isinstance(other, BurstyWindow):
                continue
            there = connection.route
            if first.drains and other.is_bursting(now):
                bursts.append(Burst(other.burst_began, other.burst, there.source, there.narrowest.feed))
            elif first.drains:
                standing += self._standing_bytes(connection, now, 0.0)
            elif first.size > 0.0 and first.timer < until:
                num_bytes = min(other.window, connection.backlog)
                bursts.append(Burst(first.timer, num_bytes, there.source, there.narrowest.feed))
        room = max(narrowest.queue - standing, route.segment)
        feed, heard, full_at = meet(bursts, room, narrowest.rate)
        following = own.backlog - transfer.size
        ack_wait = self.seconds(back, own, now, min(window.window, size + following) / narrowest.rate)
        return QueueState(feed, heard, full_at, ack_wait, following)
