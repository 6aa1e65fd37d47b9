"""Transfers in flight on a SimPy clock.

A transfer waits for its path's latency without using bandwidth, then drains at the rate that weighted max-min
fairness gives it among all that drain, until its bytes are through: that instant is its delivery. Rates are
found once per instant, at its end, however many transfers start or end in it, and only among those that the
changes can reach. One SimPy event stands for the next change of all transfers.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import simpy
from simpy.events import EventPriority

from netsim.files.errors import InputError
from netsim.fluid.capacity import Capacity
from netsim.fluid.channel import BackgroundConnection, Channel
from netsim.fluid.clock import Clock
from netsim.fluid.downtime import Downtime
from netsim.fluid.observer import Observer
from netsim.fluid.outage import (
    Waiting,
    follow_paths,
    give_up,
    go_on_unless_cut,
    hold_if_cut,
    is_cut,
    not_given_up,
)
from netsim.fluid.paths import Path, PathTable
from netsim.fluid.rates import Rates
from netsim.fluid.tcp import Window, share_weight
from netsim.fluid.transfers import Transfers
from netsim.topology.protocol import Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping

    from netsim.fluid.fairness import FloatArray, IntArray
    from netsim.fluid.tcp import Grant
    from netsim.topology.topology import Topology

__all__ = ["Network", "Observer"]

# SimPy's own events have priority 0 and 1: ours come last in their instant, when everybody has had their say.
_LAST = EventPriority(10)

_Callbacks = tuple["Callable[[], None]", "Callable[[], None] | None", "Callable[[], None] | None"]


class Network:
    """A topology in use: transfers under way, their rates, and what has crossed each link.

    Args:
        env: the SimPy environment whose clock it lives on. On a `netsim.fluid.clock.Clock` instants are hit
            exactly.
        topology: hosts, links and routes.
        protocol: how transfers use links, as `Protocol.parse` takes it; None: what the topology's file says.

    Attributes:
        before_change: called before anything starts, ends by force or changes, with the links concerned (None: any).
        version: grows whenever a capacity, a latency or a loss changes.
        dropped_bytes: payload of transfers that were ended by force, as far as it had not come through.
        stage: what collectives keep with this network.
        downtime: which hosts have crashed.
        on_give_up: called with a transfer whose connection is given up (`Protocol.give_up_seconds`); it goes on
            waiting if that returns. By default raises DeadlockError.
    """

    def __init__(
        self,
        env: simpy.Environment,
        topology: Topology,
        protocol: Protocol | str | Mapping[str, Any] | None = None,
    ) -> None:
        self.env = env
        self.topology = topology
        self.protocol = Protocol.parse(topology.protocol if protocol is None else protocol)
        self._paths = PathTable(topology, partial(share_weight, self.protocol))
        self._transfers = Transfers()
        self._channels: dict[Hashable, Channel] = {}
        self._of_slot: list[Channel] = []
        self._callbacks: dict[int, _Callbacks] = {}
        self._slots: dict[int, int] = {}
        self._next_number = 0
        self._next_order = 0
        self._turn: simpy.Event | None = None
        self._turn_at = math.inf
        self._observers: list[Observer] = []
        self.before_change: Callable[[Iterable[int] | None], None] | None = None
        self.version = 0
        self.dropped_bytes = 0.0
        self.stage: Any = None
        self.downtime = Downtime(env)
        self.on_give_up: Callable[[Waiting], None] = not_given_up
        # To be told at the end of this instant, by transfer: its place in the order of sending, and what to call.
        self._untold: dict[int, tuple[int, Callable[[], None]]] = {}
        self._delivered: list[
            tuple[int, int, float]
        ] = []  # at this instant: order, id and bytes; not told yet
        self._capacity = Capacity(topology.bits_per_second, self.protocol)
        self._rates = Rates(self._capacity)

    # -- sending ---------------------------------------------------------------------------------------------

    def send(
        self,
        src: int,
        dst: int,
        num_bytes: float,
        on_delivered: Callable[[], None],
        *,
        connection: Hashable = None,
        on_sent: Callable[[], None] | None = None,
        on_dropped: Callable[[], None] | None = None,
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
        slot = self._enter(number, path, num_bytes, now)
        self._of_slot[slot] = channel
        channel.queue.append(slot)
        channel.backlog += num_bytes
        if on_sent is not None and channel.swallows(channel.backlog):
            self._untold[number] = (int(self._transfers.order[slot]), on_sent)
            self._call_at(now)
            on_sent = None
        self._callbacks[number] = (on_delivered, on_sent, on_dropped)
        self._slots[number] = slot
        if len(channel.queue) == 1:
            ready = float(self._transfers.timer[slot])
            self._transfers.set_due(slot, ready)
            self._call_at(ready)
        for observer in self._observers:
            observer.transfer_started(number, src, dst, num_bytes, connection)
        return number

    def reserve(self, count: int) -> range:
        """Set aside so many ids of transfers."""
        first = self._next_number
        self._next_number += count
        return range(first, first + count)

    def transfer(self, src: int, dst: int, num_bytes: float, *, connection: Hashable = None) -> simpy.Event:
        """Start a transfer now; the event happens when it is delivered."""
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

    def _channel(self, path: Path, connection: Hashable, number: int = 0, limit: float = math.inf) -> Channel:
        protocol = self.protocol
        is_background = isinstance(connection, BackgroundConnection)
        if protocol.connections == "per-transfer":
            connection = (connection, number)
        key = (path.index, connection)
        channel = self._channels.get(key)
        if channel is None:
            window = None
            if protocol.has_windows and path.links and limit == math.inf:
                rate, link = self._capacity.narrowest(path)
                queue = self.topology.links[link].queue_packets or protocol.queue_packets
                window = Window(protocol, path.round_trip_seconds, path.loss, rate, queue)
            channel = self._channels[key] = Channel(key, path, window, limit, is_background=is_background)
        return channel

    def _enter(self, number: int, path: Path, num_bytes: float, now: float) -> int:
        transfers = self._transfers
        slot = transfers.take()
        if slot == len(self._of_slot):
            self._of_slot.append(None)  # type: ignore[arg-type]
        ready = now + path.latency_seconds
        if path.links:
            ready += self.protocol.software_seconds
            if self.protocol.connections == "per-transfer":
                ready += path.round_trip_seconds  # the handshake
        transfers.number[slot] = number
        transfers.order[slot] = self._next_order
        self._next_order += 1
        transfers.path[slot] = path.index
        transfers.size[slot] = transfers.remaining[slot] = num_bytes
        transfers.begun[slot] = now
        transfers.timer[slot] = ready  # until it drains, the instant from which it can
        return slot

    # -- the clock -------------------------------------------------------------------------------------------

    def _call_at(self, instant: float) -> None:
        """See to it that `_on_turn` runs at `instant` or before."""
        if instant >= self._turn_at:
            return
        self._turn_at = instant
        if isinstance(self.env, Clock):
            turn = self.env.at(instant, _LAST)
        else:
            turn = simpy.Event(self.env)
            turn._ok = True
            turn._value = None
            self.env.schedule(turn, _LAST, max(instant - self.env.now, 0.0))
        turn.callbacks.append(self._on_turn)
        self._turn = turn

    def _on_turn(self, event: simpy.Event) -> None:
        """The end of an instant: what is due happens; when nothing is, rates follow what has changed."""
        if event is not self._turn:
            return  # an earlier one took its place
        self._turn = None
        self._turn_at = math.inf
        now = self.env.now
        self.take_due()
        delivered, self._delivered = sorted(self._delivered), []
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
                    give_up(self, slot)
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
            and is_cut(self, channel.path)
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
        if on_sent is not None and self._of_slot[slot].swallows(left):
            self._callbacks[number] = (on_delivered, None, on_dropped)
            self._untold[number] = (int(transfers.order[slot]), on_sent)

    def _leave(self, slot: int, delivered_bytes: float, *, first: bool) -> None:
        """Take a transfer out; the next of its connection follows if it was the first."""
        channel = self._of_slot[slot]
        channel.count(delivered_bytes)
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
                del self._channels[channel.key]
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
        calls.sort(key=_order_of)  # stable: sent comes before delivered
        for _, call in calls:
            call()

    # -- rates -----------------------------------------------------------------------------------------------

    def _find_rates(self, now: float) -> None:
        rates = self._rates.settle()
        if not rates:
            return
        transfers = self._transfers
        slots, values = np.array(list(rates)), np.array(list(rates.values()))
        transfers.set_rates(slots, values, now)
        for observer in self._observers:
            observer.rates_changed(transfers.number[slots], values)

    # -- what changes while it runs --------------------------------------------------------------------------

    def set_capacity(self, link: int, bits_per_second: float) -> None:
        """Give a link (index) another capacity from now on; at zero, transfers on it stall."""
        if not 0 <= bits_per_second < math.inf:
            raise InputError(
                f"set_capacity of link {link}: must be finite and not negative, got {bits_per_second}"
            )
        self._change_is_due((link,))
        self._capacity.set(link, bits_per_second)
        self._touch(link)
        self._tell_capacity(link)

    def set_link_up(self, link: int, up: bool) -> None:
        """Let a link (index) carry nothing from now on, or what it did before."""
        self._change_is_due((link,))
        self._capacity.set_up(link, up)
        self._touch(link)
        self._tell_capacity(link)

    def _tell_capacity(self, link: int) -> None:
        for observer in self._observers:
            observer.capacity_changed(link, self._capacity.bits_per_second(link))

    def set_latency(self, link: int, seconds: float) -> None:
        """Give a link (index) another latency: for what is sent from now on, and for the pace of windows."""
        if not 0 <= seconds < math.inf:
            raise InputError(f"set_latency of link {link}: must be finite and not negative, got {seconds}")
        self._change_is_due((link,))
        follow_paths(self, self._paths.set_latency(link, seconds))

    def set_loss(self, link: int, share: float) -> None:
        """Have a link (index) lose another share of its packets from now on."""
        if not 0 <= share < 1:
            raise InputError(f"set_loss of link {link}: must be at least 0 and less than 1, got {share}")
        self._change_is_due((link,))
        follow_paths(self, self._paths.set_loss(link, share))

    def _touch(self, link: int) -> None:
        self.version += 1
        self._rates.resize(link)
        self._call_at(self.env.now)
        if self._capacity.is_dead(link):
            for slot in self._rates.on(link):
                hold_if_cut(self, slot)
        else:
            for slot in sorted(self._transfers.held):
                go_on_unless_cut(self, slot)

    def _change_is_due(self, links: Iterable[int] | None) -> None:
        """Something is about to start or change: who counts on quiet links hears of it first."""
        if self.before_change is not None:
            self.before_change(links)

    # -- looking ---------------------------------------------------------------------------------------------

    def observe(self, observer: Observer) -> None:
        """Tell `observer` of what happens from now on."""
        self._observers.append(observer)

    @property
    def link_bytes(self) -> FloatArray:
        """Payload bytes that have crossed each link so far; shape (links,)."""
        slots = np.fromiter(self._rates, dtype=np.int64)
        return self._by_link([path.num_bytes for path in self._paths.paths], slots)

    @property
    def background_link_bytes(self) -> FloatArray:
        """Of `link_bytes`, what is background traffic's; shape (links,)."""
        slots = [slot for slot in self._rates if self._of_slot[slot].is_background]
        return self._by_link(
            [path.background_bytes for path in self._paths.paths], np.array(slots, dtype=np.int64)
        )

    def _by_link(self, over: list[float], slots: IntArray) -> FloatArray:
        """Bytes on links, of those over (by path) and those in flight (slots)."""
        by_path = np.array(over)
        if slots.size:
            crossed = self._transfers.size[slots] - self._transfers.remaining_at(slots, self.env.now)
            np.add.at(by_path, self._transfers.path[slots], crossed)
        totals = np.zeros(self._paths.num_links + 1)
        np.add.at(totals, self._paths.links[: len(by_path)], by_path[:, None])
        return totals[:-1]

    @property
    def is_observed(self) -> bool:
        """Whether anybody watches."""
        return bool(self._observers)

    @property
    def num_in_flight(self) -> int:
        """Transfers sent and not yet delivered or aborted."""
        return len(self._slots)


def _happen(event: simpy.Event) -> None:
    event.succeed()


def _order_of(call: tuple[int, Callable[[], None]]) -> int:
    return call[0]
