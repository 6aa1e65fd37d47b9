"""Sockets over which NCCL splits each message of a connection: one packet lost concerns one of them, and holds up all.

A message arrives when the socket that is most behind has delivered its part. The others are ahead of it by at most
what the sender has posted, which the socket's buffer bounds; so a socket that has fallen delays messages once its lead
is used up. Sockets that are ahead do not use their windows, which then do not grow (Linux's `tcp_is_cwnd_limited`).

Packets are lost at random: distances between them, and the sockets that they are of, are drawn from a generator that
the connection's hosts seed. A loss is noticed after three more packets of its socket, or one and a quarter of a round
trip (RFC 8985), and repaired a round trip later; messages wait for it in order, while the data behind it go on. A
window falls to 0.7, its plateau lower where it had not reached the one before (RFC 9438, 4.7), and grows after the
repair. Round trips include what the sockets of all channels have in flight beyond the pipe, at most a small queue each.

Compiled by mypyc where a C compiler is there; see `netsim.network.build`.
"""

from __future__ import annotations

from math import cbrt, inf, log
from typing import Final, final

from netsim.network.congestion import Avoidance, QueueState, TcpSettings
from netsim.network.route import Route
from netsim.network.tcp import FORGOTTEN_SECONDS, Window
from netsim.network.tcp_cubic import CUBIC_BETA, CUBIC_C, RENO_GROWTH

SMALL_QUEUE_SEGMENTS: Final = 4.0  # of a socket at its host's line: two bursts of two (tcp_small_queue_check)
LEAST_SEGMENTS: Final = 2.0  # of a window after a loss
FULL_SHARE: Final = 0.99  # of what windows allow; a connection that gets less is limited by a link


@final
class Socket:
    """One of a connection's sockets, in segments and bytes of as many like it as the connection has.

    Attributes:
        least: segments of the window after its last loss.
        plateau: segments at which CUBIC's growth is slowest.
        since: instant from which it grows.
        used: segments of the window that were in flight, at most, since the last loss.
        lead: bytes that it has delivered beyond the messages delivered.
    """

    def __init__(self, segments: float, since: float) -> None:
        self.least = self.plateau = segments
        self.since = since
        self.used = inf
        self.lead = 0.0

    def segments(self, now: float, round_trip: float) -> float:
        """The window at an instant."""
        seconds = max(now - self.since, 0.0)
        cubic = CUBIC_C * (seconds - cbrt((self.plateau - self.least) / CUBIC_C)) ** 3 + self.plateau
        return max(cubic, self.least + RENO_GROWTH * seconds / round_trip)

    def lose(self, segments: float, since: float) -> None:
        """Fall from a window of `segments`, and grow from the instant `since` on."""
        self.plateau = segments if segments >= self.plateau else segments * (1 + CUBIC_BETA) / 2
        self.least = self.used = max(segments * CUBIC_BETA, LEAST_SEGMENTS)
        self.plateau = max(self.plateau, self.least)
        self.since = since


@final
class SocketsWindow(Window):
    """Window of a connection's sockets, which are alike until a packet is lost.

    Args:
        tcp, route, avoidance: as of `Window`.
        seed: of its losses, from 1 up.
    """

    def __init__(self, tcp: TcpSettings, route: Route, avoidance: Avoidance, seed: int) -> None:
        self._seed = seed
        self._draw()
        super().__init__(tcp, route, avoidance)
        self._sockets: list[Socket] = []  # once they differ
        self._turn = route.round_trip  # of a packet, with queues
        self._rate = 0.0
        self._drained_at = 0.0

    @property
    def _loss_bytes(self) -> float:
        return -log(self._draw()) * self.route.segment / self.route.streams / self.loss if self.loss else inf

    def is_as_new(self, now: float) -> bool:
        if self.loss and self.last_used < inf and now - self.last_used <= FORGOTTEN_SECONDS:
            return False
        return self.last_used == inf or super().is_as_new(now)

    def start(self, now: float, num_bytes: float, queues: QueueState | None) -> None:
        self._drained_at = now
        super().start(now, num_bytes, queues)

    def _draw(self) -> float:
        """Draw a number between 0 and 1 (Park and Miller's generator)."""
        self._seed = self._seed * 48271 % 2147483647
        return self._seed / 2147483647

    def _bytes(self, socket: Socket, now: float) -> float:
        """Window of all sockets if all were like this one."""
        return min(socket.segments(now, self._turn) * self.route.segment, self.route.window_limit)

    def _avoided(self, now: float) -> float:
        if not self._sockets:
            return super()._avoided(now)
        return min([self._bytes(socket, now) for socket in self._sockets])

    def _is_idle(self, now: float) -> bool:
        if not super()._is_idle(now):
            return False
        self._sockets = []
        return True

    def _use(self, now: float, left: float) -> None:
        drained, seconds, since = self.left - left, now - self._drained_at, self._drained_at
        self._drained_at = now
        if drained > 0.0 and seconds > 0.0:
            self._rate = drained / seconds
            if self._sockets:
                self._spread(since, now, drained, min(left + self.following, self.buffer_bytes(now)))
        super()._use(now, left)

    def _spread(self, since: float, now: float, drained: float, posted: float) -> None:
        """Advance the sockets while `drained` bytes of messages were delivered; `posted` are not."""
        seconds, turn = now - since, self._turn
        small_queue = SMALL_QUEUE_SEGMENTS * self.route.segment
        is_full = drained < FULL_SHARE * self.cap * seconds
        in_flight = 0.0
        for socket in self._sockets:
            window, before = self._bytes(socket, (since + now) / 2), socket.lead
            sent = window * seconds / turn
            if is_full:  # the line serves sockets alike
                sent = min(sent, drained)
            socket.lead = max(min(before + sent - drained, posted), 0.0)
            used = (socket.lead - before + drained) / seconds * turn
            used = min(window, used + small_queue if is_full else used)
            socket.used = max(socket.used, used / self.route.segment)
            in_flight += used if socket.lead >= posted else window
        self._turn = self._turn_with(in_flight / len(self._sockets))

    def _turn_with(self, in_flight: float) -> float:
        """Round trip with the queue at the narrowest link, if every channel has as much `in_flight`."""
        route, num = self.route, self.tcp.num_channels
        line = route.narrowest.least
        held = min(in_flight, line / num * route.round_trip + SMALL_QUEUE_SEGMENTS * route.segment)
        return max(num * held / line, route.round_trip)

    def _grant_piece(self, now: float) -> None:
        if not self._sockets:
            super()._grant_piece(now)
            return
        turn, rate = self._turn, inf
        for socket in self._sockets:
            rate = min(rate, (self._bytes(socket, now + turn / 2) + socket.lead) / turn)
        self._allow(max(self.left - self.until_loss, 0.0), rate, now + turn)

    def _lose_packet(self, now: float, window: float) -> None:
        segment, slow = self.route.segment, self.slow_start
        if not self.avoids and slow.ended < inf:  # by HyStart, as after a pause
            self.avoidance.enter(slow.ended_at, slow.ended)
            window = min(window, super()._avoided(now))
            slow.ended = inf
        if not self._sockets:
            num = max(round(self.route.streams), 1)
            self._sockets = [Socket(window / segment, now) for _ in range(num)]
            self._turn = self._turn_with(window)
        socket = self._sockets[int(self._draw() * len(self._sockets))]
        rate = max(self._rate, 1.0)
        repair = self._turn + min(3 * segment / rate, segment / rate + self._turn / 4)
        self.repaired_at = max(self.repaired_at, now + repair - socket.lead / rate)
        if now >= socket.since:  # else it has fallen for a packet sent before
            socket.lose(min(self._bytes(socket, now) / segment, socket.used), now + repair)
        self._fall(now)

    def _lose(self, now: float, window: float) -> None:
        self._sockets = []
        super()._lose(now, window)
