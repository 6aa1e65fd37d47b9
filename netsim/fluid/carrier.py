"""Transfers in flight on a SimPy clock.

A transfer waits for its path's latency without using bandwidth, then drains at the rate that weighted max-min
fairness gives it among all that drain, until its bytes are through: that instant is its delivery. Rates are
found once per instant, at its end, however many transfers start or end in it, and only among those that the
changes can reach. One SimPy event stands for the next change of all transfers.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from netsim.files.errors import InputError
from netsim.fluid.capacity import Capacity
from netsim.fluid.channel import Channel, Channels
from netsim.fluid.clock import Order, cancel, event_at
from netsim.fluid.downtime import Downtime
from netsim.fluid.paths import PathTable
from netsim.fluid.rates import Rates
from netsim.fluid.tcp import Window, share_weight
from netsim.fluid.transfers import Transfers
from netsim.topology.protocol import Protocol as TransferProtocol

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping

    import simpy

    from netsim.fluid.elsewhere import Elsewhere
    from netsim.fluid.observer import NetworkObserver
    from netsim.fluid.paths import Path
    from netsim.fluid.tcp import Grant
    from netsim.topology.topology import Topology

__all__ = ["Call", "Callbacks", "TransferCarrier"]

Call = Callable[[], None]
# When it is delivered, when its sender need not wait any more, and when it is dropped.
Callbacks = tuple[Call, Call | None, Call | None]


class TransferCarrier:
    """Sends, drains and delivers transfers; `netsim.fluid.network.Network` is the whole."""

    def __init__(
        self,
        env: simpy.Environment,
        topology: Topology,
        protocol: TransferProtocol | str | Mapping[str, Any] | None = None,
    ) -> None:
        self.env = env
        self.topology = topology
        self.protocol = TransferProtocol.parse(topology.protocol if protocol is None else protocol)
        self.version = 0
        self.dropped_bytes = 0.0
        self.downtime = Downtime(env)
        self.elsewhere: Elsewhere | None = None
        self._paths = PathTable(topology, partial(share_weight, self.protocol))
        self._transfers = Transfers()
        self._channels = Channels()
        self._of_slot: list[Channel] = []
        self._callbacks: dict[int, Callbacks] = {}
        self._slots: dict[int, int] = {}
        # Bytes that have come through, of transfers that are over, by path; and of these, others' traffic.
        self._bytes: defaultdict[int, float] = defaultdict(float)
        self._background_bytes: defaultdict[int, float] = defaultdict(float)
        self._next_number = 0
        self._next_order = 0
        self._turn: simpy.Event | None = None
        self._turn_at = math.inf
        self._observers: list[NetworkObserver] = []
        # To be told at the end of this instant, by transfer: its place in the order of sending, and what to call.
        self._untold: dict[int, tuple[int, Call]] = {}
        # At this instant, not told yet: order, id and bytes.
        self._delivered: list[tuple[int, int, float]] = []
        self._capacity = Capacity(topology.bits_per_second, self.protocol)
        self._rates = Rates(self._capacity)

    # -- sending ---------------------------------------------------------------------------------------------

    def send(
        self,
        src: int,
        dst: int,
        num_bytes: float,
        on_delivered: Call,
        *,
        connection: Hashable = None,
        on_sent: Call | None = None,
        on_dropped: Call | None = None,
        most_bytes_per_second: float = math.inf,
        number: int | None = None,
    ) -> int:
        """Start a transfer now.

        Messages of one (src, dst, connection) leave whole and in order. Within a host they are there at once.
        The callbacks of one instant are called in the order of sending, when all else that happens in that
        instant has happened; nothing is called before `send` returns.

        Args:
            src, dst: host indices.
            num_bytes: payload; zero takes the latency alone.
            on_delivered: called at the instant the last byte has arrived.
            connection: tells connections between the same hosts apart.
            on_sent: called at the instant from which the sender need not wait any more, before
                `on_delivered`: the delivery on an ideal network; under TCP when the socket's buffer holds
                what has not left yet.
            on_dropped: called if a host's crash ends it (`netsim.weather.faults`); None: it is then sent once more,
                from its first byte, as another transfer with the same callbacks.
            most_bytes_per_second: what its sender offers at most; with a limit TCP does not shape it.
            number: the transfer's id, one of those set aside by `reserve`; None: the next one.

        Returns:
            The transfer's id; ids that are not reserved grow with each call.
        """
        if not 0 <= num_bytes < math.inf:
            raise InputError(
                f"send from host {src} to host {dst}: bytes must be finite and not negative, got {num_bytes}"
            )
        path = self._paths.between(src, dst)
        self._change_is_due(path.links + path.back)
        now = self.env.now
        if number is None:
            (number,) = self.reserve(1)
        channel = self._channel(path, connection, number, most_bytes_per_second)
        slot = self._enter(number, channel, num_bytes, now)
        if on_sent is not None and channel.swallows(channel.backlog, now):
            self._untold[number] = (int(self._transfers.order[slot]), on_sent)
            self._call_at(now)
            on_sent = None
        self._callbacks[number] = (on_delivered, on_sent, on_dropped)
        if len(channel.queue) == 1:
            ready = float(self._transfers.timer[slot])
            self._transfers.set_due(slot, ready)
            self._call_at(ready)
        for observer in self._observers:
            observer.transfer_started(number, src, dst, num_bytes, connection)
        return number

    def reserve(self, count: int) -> range:
        """Set aside `count` ids of transfers."""
        first = self._next_number
        self._next_number += count
        return range(first, first + count)

    def transfer(self, src: int, dst: int, num_bytes: float, *, connection: Hashable = None) -> simpy.Event:
        """Start a transfer now, as `send` does; the event happens when it is delivered.

        `num_bytes` go from host `src` to host `dst`, behind those of the same `connection`.
        """
        delivered = self.env.event()
        self.send(src, dst, num_bytes, lambda: _happen(delivered), connection=connection)
        return delivered

    def abort(self, transfer: int) -> float:
        """End a transfer that is under way; its callbacks are never called.

        Returns the bytes that had come through. Raises InputError where there is no such transfer in flight.
        """
        self._change_is_due(None)
        slot = self._slots.get(transfer)
        if slot is None:
            raise InputError(f"abort: no transfer {transfer} is in flight")
        channel = self._of_slot[slot]
        delivered = 0.0
        if slot in self._rates:
            left, _ = self._transfers.drain(slot, self.env.now)
            delivered = float(self._transfers.size[slot]) - left
            if channel.window is not None:
                channel.window.end(self.env.now, left)
        first = channel.queue[0] == slot
        self.dropped_bytes += float(self._transfers.size[slot]) - delivered
        self._leave(slot, delivered, first=first)
        self._callbacks.pop(transfer)
        self._untold.pop(transfer, None)
        self._call_at(self.env.now)
        for observer in self._observers:
            observer.transfer_ended(transfer, delivered)
        return delivered

    def is_in_flight(self, transfer: int) -> bool:
        """Whether a transfer is under way."""
        return transfer in self._slots

    def _channel(self, path: Path, connection: Hashable, number: int = 0, limit: float = math.inf) -> Channel:
        """The connection of a transfer: the one there is, or a new one."""
        protocol = self.protocol
        lane = (connection, number) if protocol.connections == "per-transfer" else connection
        channel = self._channels.find(lane, path)
        if channel is not None:
            return channel
        window = None
        if protocol.has_windows and path.links and limit == math.inf:
            rate, link = self._capacity.narrowest(path)
            queue = self.topology.links[link].queue_packets or protocol.queue_packets
            window = Window(protocol, path.round_trip_seconds, path.loss, rate, queue)
        return self._channels.add(Channel(lane, connection, path, window, limit), self.env.now)

    def _enter(self, number: int, channel: Channel, num_bytes: float, now: float) -> int:
        """Put a transfer behind the others of its connection. Returns its slot."""
        path = channel.path
        slot = self._take_slot(number, channel, num_bytes)
        ready = now + path.latency_seconds
        if path.links:
            ready += self.protocol.software_seconds
            if self.protocol.connections == "per-transfer":
                ready += path.round_trip_seconds  # the handshake
        transfers = self._transfers
        transfers.remaining[slot] = num_bytes
        transfers.begun[slot] = now
        transfers.timer[slot] = ready  # until it drains, the instant from which it can
        return slot

    def _take_slot(self, number: int, channel: Channel, num_bytes: float) -> int:
        transfers = self._transfers
        slot = transfers.take()
        if slot == len(self._of_slot):
            self._of_slot.append(channel)
        self._of_slot[slot] = channel
        self._slots[number] = slot
        transfers.number[slot] = number
        transfers.order[slot] = self._next_order
        self._next_order += 1
        transfers.path[slot] = channel.path.index
        transfers.size[slot] = num_bytes
        channel.queue.append(slot)
        channel.backlog += num_bytes
        return slot

    def _change_is_due(self, links: Iterable[int] | None) -> None:
        """Something is about to start or change: what is reckoned elsewhere hears of it first."""
        if self.elsewhere is not None:
            self.elsewhere.before_change(links)

    # -- the clock -------------------------------------------------------------------------------------------

    def _call_at(self, instant: float) -> None:
        """See to it that `_on_turn` runs at `instant` or before."""
        if instant >= self._turn_at:
            return
        if self._turn is not None:
            cancel(self.env, self._turn)
        self._turn_at = instant
        self._turn = event_at(self.env, instant, Order.NETWORK, self._on_turn)

    def _on_turn(self, event: simpy.Event) -> None:
        """The end of an instant: what is due happens; when nothing is, rates follow what has changed."""
        self._turn = None
        self._turn_at = math.inf
        self.take_due()
        delivered, self._delivered = sorted(self._delivered), []
        now = self.env.now
        if delivered or self._untold:
            # Whoever hears of it may act in this same instant, so rates are found in another turn.
            self._call_at(now)
            self._tell(delivered)
            return
        self._find_rates(now)
        next_due = self._transfers.next_due()
        if next_due < math.inf:
            self._call_at(max(next_due, now))

    def take_due(self) -> None:
        """Let transfers that are due begin to drain or end; their senders are told at the end of the instant."""
        transfers, now = self._transfers, self.env.now
        while due := transfers.due_at(now):
            for slot in due:
                if slot in transfers.held:
                    self._give_up(slot)
                    continue
                under_way = self._go_on(slot, now) if slot in self._rates else self._begin(slot, now)
                if not under_way:
                    num_bytes = float(transfers.size[slot])
                    self._delivered.append(
                        (int(transfers.order[slot]), int(transfers.number[slot]), num_bytes)
                    )
                    self._leave(slot, num_bytes, first=True)

    def _begin(self, slot: int, now: float) -> bool:
        """A transfer has waited its latency. Returns whether there is anything to drain."""
        transfers = self._transfers
        channel = self._of_slot[slot]
        num_bytes = float(transfers.size[slot])
        if (
            self._capacity.dead
            and (num_bytes == 0 or channel.window is not None)
            and self._is_cut(channel.path)
        ):
            transfers.hold(slot, now + self.protocol.give_up_seconds)
            return True
        if num_bytes == 0 or not channel.path.links:
            if channel.window is not None:
                channel.window.touch(now)
            return False
        transfers.since[slot] = now
        transfers.cap[slot] = channel.most_bytes_per_second
        self._rates.join(slot, channel.path, channel.most_bytes_per_second)
        if channel.window is None:
            transfers.timer[slot] = math.inf
            transfers.set_due(slot, math.inf)
        else:
            self._accept(slot, channel.window.start(now, num_bytes), num_bytes, now)
        return True

    def _go_on(self, slot: int, now: float) -> bool:
        """A draining transfer is due. Returns whether it is not through yet."""
        window = self._of_slot[slot].window
        if window is None:
            return False
        transfers = self._transfers
        left, through = transfers.drain(slot, now)
        if through:
            window.end(now)
            return False
        self._accept(slot, window.go_on(now, left), left, now)
        return True

    def _accept(self, slot: int, grant: Grant, left: float, now: float) -> None:
        """Let a draining transfer go on as its window allows."""
        transfers = self._transfers
        if transfers.cap[slot] != grant.cap:
            transfers.cap[slot] = grant.cap
            self._rates.change(slot, self._of_slot[slot].path.weight, grant.cap)
        transfers.stop[slot] = grant.stop
        transfers.timer[slot] = grant.timer
        rate = float(transfers.rate[slot]) if grant.cap else 0.0
        transfers.set_due(slot, min(now + (left - grant.stop) / rate if rate else math.inf, grant.timer))
        number = int(transfers.number[slot])
        on_delivered, on_sent, on_dropped = self._callbacks[number]
        if on_sent is not None and self._of_slot[slot].swallows(left, now):
            self._callbacks[number] = (on_delivered, None, on_dropped)
            self._untold[number] = (int(transfers.order[slot]), on_sent)

    def _leave(self, slot: int, delivered_bytes: float, *, first: bool) -> None:
        """Take a transfer out; the next of its connection follows if it was the first."""
        channel = self._of_slot[slot]
        self._bytes[channel.path.index] += delivered_bytes
        if channel.is_background:
            self._background_bytes[channel.path.index] += delivered_bytes
        channel.backlog -= float(self._transfers.size[slot])
        if slot in self._rates:
            self._rates.leave(slot)
        if first:
            channel.queue.popleft()
        else:
            channel.queue.remove(slot)
        del self._slots[int(self._transfers.number[slot])]
        self._transfers.release(slot)
        if not channel.queue:
            if channel.window is None or self.protocol.connections == "per-transfer":
                self._channels.remove(channel)
        elif first:
            following = channel.queue[0]
            self._transfers.set_due(following, float(self._transfers.timer[following]))

    def _tell(self, delivered: list[tuple[int, int, float]]) -> None:
        calls = list(self._untold.values())
        self._untold.clear()
        for order, number, num_bytes in delivered:
            on_delivered, on_sent, _ = self._callbacks.pop(number)
            if on_sent is not None:
                calls.append((order, on_sent))
            calls.append((order, on_delivered))
            for observer in self._observers:
                observer.transfer_ended(number, num_bytes)
        calls.sort(key=itemgetter(0))  # stable: sent comes before delivered
        for _, call in calls:
            call()

    def _find_rates(self, now: float) -> None:
        rates = self._rates.settle()
        if not rates:
            return
        transfers = self._transfers
        slots, values = np.array(list(rates)), np.array(list(rates.values()))
        transfers.set_rates(slots, values, now)
        for observer in self._observers:
            observer.rates_changed(transfers.number[slots], values)

    # -- dead links ------------------------------------------------------------------------------------------

    def _is_cut(self, path: Path) -> bool:
        """Whether a link of a path is dead; TCP needs the way back as well, for its acknowledgements."""
        links = path.links + path.back if self.protocol.ack_share else path.links
        return not self._capacity.dead.isdisjoint(links)

    def _give_up(self, slot: int) -> None:
        """A transfer has been held up for longer than its protocol waits."""
        raise NotImplementedError


def _happen(event: simpy.Event) -> None:
    event.succeed()
