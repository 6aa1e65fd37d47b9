"""A topology in use: the whole of what carries transfers, with copies of it that go their own way.

Cut by subject: `carrier.py` sends, drains and delivers; `changes.py` has links change and hosts crash; here is what one
looks at, and how a network's state is kept and put on another one. A collective that has a network to itself is timed
on a copy, ahead of time or after the fact.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from netsim.fluid.changes import ChangingCarrier
from netsim.fluid.rates import Rates
from netsim.fluid.snapshot import Connection, Snapshot, TransferState
from netsim.fluid.wires import Wires

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence

    import simpy

    from netsim.fluid.carrier import Call
    from netsim.fluid.channel import Channel
    from netsim.fluid.fairness import FloatArray, IntArray
    from netsim.fluid.observer import NetworkObserver
    from netsim.fluid.snapshot import Windows

__all__ = ["Network"]


class Network(ChangingCarrier):
    """A topology in use: transfers under way, their rates, and what has crossed each link.

        clock = netsim.Clock()
        network = netsim.Network(clock, netsim.Topology.load("lan"))
        network.send(0, 1, 1_000_000, lambda: print(clock.now))
        clock.run()

    `send` and `transfer` start transfers, `abort` ends one; `set_capacity`, `set_latency`, `set_loss` and `set_link_up`
    change links while it runs; `link_bytes`, `num_in_flight` and `is_in_flight` tell how far it is. The other methods
    are for those who carry collectives and weather: windows of connections, copies, and what waits.

    Hosts and links are indices into `topology.hosts` and `topology.links`; times are seconds.

    Args:
        env: the SimPy environment whose clock it lives on. On a `netsim.fluid.clock.Clock` instants are hit
            exactly.
        topology: hosts, links and routes.
        protocol: how transfers use links, as `Protocol.parse` takes it; None: what the topology's file says.

    Attributes:
        env, topology: as given.
        protocol: how transfers use links.
        version: grows whenever a capacity, a latency or a loss changes.
        dropped_bytes: payload of transfers that were ended by force, as far as it had not come through.
        downtime: which hosts have crashed.
        elsewhere: what belongs to it and is reckoned without it; None: nothing ever was.
        on_give_up: called with a transfer whose connection is given up (`Protocol.give_up_seconds`); it goes on
            waiting if that returns. By default raises DeadlockError.
    """

    _credited: FloatArray | float = 0.0  # bytes by link that nobody has sent here

    # -- looking ---------------------------------------------------------------------------------------------

    def observe(self, observer: NetworkObserver) -> None:
        """Tell `observer` of what happens from now on."""
        self._observers.append(observer)

    @property
    def is_observed(self) -> bool:
        """Whether anybody watches."""
        return bool(self._observers)

    @property
    def link_bytes(self) -> FloatArray:
        """Payload bytes that have crossed each link so far, wherever they are reckoned; shape (links,)."""
        over = self._bytes.copy()
        if self.elsewhere is not None:
            for source, target, num_bytes in self.elsewhere.host_bytes():
                over[self._paths.between(source, target).index] += num_bytes
        return self._by_link(over, list(self._rates)) + self._credited

    @property
    def background_link_bytes(self) -> FloatArray:
        """Of `link_bytes`, what is background traffic's; shape (links,)."""
        return self._by_link(
            self._background_bytes, [slot for slot in self._rates if self._of_slot[slot].is_background]
        )

    def _by_link(self, over: Mapping[int, float], slots: list[int]) -> FloatArray:
        """Bytes on links, of those over (by path) and those in flight (slots)."""
        by_path = np.zeros(len(self._paths.paths))
        by_path[list(over)] = list(over.values())
        if slots:
            places: IntArray = np.array(slots, dtype=np.int64)
            crossed = self._transfers.size[places] - self._transfers.remaining_at(places, self.env.now)
            np.add.at(by_path, self._transfers.path[places], crossed)
        totals = np.zeros(self._paths.num_links + 1)
        np.add.at(totals, self._paths.links[: len(by_path)], by_path[:, None])
        return totals[:-1]

    @property
    def num_in_flight(self) -> int:
        """Transfers that it carries itself, sent and not yet delivered or aborted."""
        return len(self._slots)

    @property
    def num_connections(self) -> int:
        """Connections that it knows: those in use, and idle ones whose state matters."""
        return len(self._channels)

    @property
    def links_in_use(self) -> Iterator[tuple[int, ...]]:
        """The links that transfers in flight cross, and those of their ways back."""
        for slot in self._slots.values():
            path = self._of_slot[slot].path
            yield path.links
            yield path.back

    @property
    def wires(self) -> Wires:
        """The links as they are now, for those who reckon without events."""
        paths = self._paths
        return Wires(
            route=lambda src, dst: paths.between(src, dst).links,
            latency_seconds=paths.latency_seconds,
            bytes_per_second=self._capacity.payload_bytes_per_second[:-1],
            software_seconds=self.protocol.software_seconds,
        )

    def conditions(self, links: Sequence[int]) -> bytes:
        """All that these links are like at present, exactly; of equal length for equally many links."""
        chosen = np.array(links, dtype=np.int64)
        paths = self._paths
        arrays = (self._capacity.payload_bytes_per_second, paths.latency_seconds, paths.loss)
        return chosen.tobytes() + b"".join(array[chosen].tobytes() for array in arrays)

    # -- connections -----------------------------------------------------------------------------------------

    def windows_of(self, group: Hashable, pairs: Iterable[tuple[int, int]] | None = None) -> Windows:
        """The windows of a group's connections by their hosts; with `pairs`, only of those."""
        if not self.protocol.has_windows:
            return {}
        if pairs is None:
            found: Iterable[Channel | None] = self._channels.of(group)
        else:
            found = (self._channels.find(group, self._paths.between(*pair)) for pair in pairs)
        return {
            (channel.path.source, channel.path.target): channel.window
            for channel in found
            if channel is not None and channel.window is not None
        }

    def window_states(
        self, group: Hashable, pairs: Iterable[tuple[int, int]] | None, instant: float
    ) -> Hashable:
        """What sets a group's connections between these pairs of hosts apart from new ones; times from `instant`."""
        windows = self.windows_of(group, pairs)
        states = [(ends, window.idle_state(instant)) for ends, window in windows.items()]
        return frozenset([each for each in states if each[1] is not None])

    def put_windows(self, group: Hashable, windows: Windows, shift_seconds: float) -> None:
        """Give a group's connections these windows, their times moved by `shift_seconds`."""
        between = self._paths.between
        for ends, window in windows.items():
            self._channel(between(*ends), group).window = window.moved(shift_seconds)

    def credit(self, hosts: Sequence[int], pair_bytes: Iterable[tuple[int, int, float]]) -> None:
        """Count `pair_bytes` that have gone between members on `hosts`: (source, target, bytes), by position."""
        counted = self._bytes
        for index, num_bytes in self._paths.numbered(hosts, pair_bytes):
            counted[index] += num_bytes

    def credit_links(self, link_bytes: FloatArray) -> None:
        """Count bytes that have crossed links; shape (links,)."""
        self._credited = self._credited + link_bytes

    # -- copies ----------------------------------------------------------------------------------------------

    def host_bytes(self) -> Iterator[tuple[int, int, float]]:
        """Source host, target host and payload bytes that it has carried by now; a pair may come more than once."""
        yield from self._delivered_bytes()
        slots = list(self._rates)
        if slots:
            places: IntArray = np.array(slots, dtype=np.int64)
            crossed = self._transfers.size[places] - self._transfers.remaining_at(places, self.env.now)
            for slot, num_bytes in zip(slots, crossed.tolist(), strict=True):
                path = self._of_slot[slot].path
                yield path.source, path.target, num_bytes

    def _delivered_bytes(self) -> Iterator[tuple[int, int, float]]:
        """Likewise, of transfers that are over."""
        for index, num_bytes in self._bytes.items():
            if num_bytes:
                path = self._paths.paths[index]
                yield path.source, path.target, num_bytes

    def fork(self, env: simpy.Environment) -> Network:
        """A network of the same links, which carries nothing and knows no connections, on another clock, `env`.

        Nobody observes it, and no byte has crossed it. What changes on the original's links changes here. What it
        gives up is the original's to judge.
        """
        forked = Network(env, self.topology, self.protocol)
        forked._paths, forked._capacity = self._paths, self._capacity
        forked._rates = Rates(self._capacity)
        forked.on_give_up = _no_matter
        return forked

    def watched(self) -> Network:
        """A fork on the same clock, with the same connections, that only those see who observe this one."""
        shown = self.fork(self.env)
        for channel in self._channels:
            if channel.window is not None:
                shown._channel(channel.path, channel.connection).window = channel.window.moved(0.0)
        shown._observers = self._observers
        return shown

    def end_watch(self) -> None:
        """Nobody observes it any more."""
        self._observers = []

    def snapshot(self) -> Snapshot:
        """All that it carries, as far as it has come, and its connections as they are."""
        in_use: dict[Channel, list[TransferState]] = {}
        for number, slot in self._slots.items():
            in_use.setdefault(self._of_slot[slot], []).append(self._flight(number, slot))
        connections = [
            self._connection(channel, in_use.get(channel, []))
            for channel in self._channels
            if channel.queue or channel.window is not None
        ]
        has_turn = self._turn is not None
        return Snapshot(self.env.now, tuple(connections), tuple(self._delivered_bytes()), has_turn)

    def _connection(self, channel: Channel, flights: list[TransferState]) -> Connection:
        path, window = channel.path, channel.window and channel.window.moved(0.0)
        limit = channel.most_bytes_per_second
        return Connection(path.source, path.target, channel.connection, window, limit, tuple(flights))

    def _flight(self, number: int, slot: int) -> TransferState:
        transfers, now = self._transfers, self.env.now
        drains = slot in self._rates
        left = (
            float(transfers.remaining_at(np.array([slot]), now)[0]) if drains else float(transfers.size[slot])
        )
        due = float(transfers.due[slot])
        if drains and due > now:
            due = float(transfers.timer[slot])  # its rate is found where it goes on
        untold = self._untold.get(number)
        return TransferState(
            number=number,
            order=int(transfers.order[slot]),
            size=float(transfers.size[slot]),
            left=left,
            drains=drains,
            stop=float(transfers.stop[slot]),
            cap=float(transfers.cap[slot]),
            due=due,
            timer=float(transfers.timer[slot]),
            begun=float(transfers.begun[slot]),
            is_held=slot in transfers.held,
            callbacks=self._callbacks[number],
            untold=None if untold is None else untold[1],
        )

    def restore(self, kept: Snapshot, rebind: Callable[[Call], Call], renumber: Callable[[int], int]) -> None:
        """Go on with what a snapshot holds, besides what is here already; the instant of the snapshot is now.

        Args:
            kept: of a network of the same links. Who observes this one has seen all that is in flight.
            rebind: what is to be called here instead of a callback there.
            renumber: the id here of a transfer there.
        """
        shift = self.env.now - kept.instant
        for source, target, num_bytes in kept.num_bytes:
            self._bytes[self._paths.between(source, target).index] += num_bytes
        flights: list[tuple[int, Connection, TransferState]] = []
        for connection in kept.connections:
            if connection.flights:
                flights += [(flight.order, connection, flight) for flight in connection.flights]
            elif connection.window is not None:
                path = self._paths.between(connection.source, connection.target)
                self._channel(path, connection.name).window = connection.window.moved(shift)
        moving = []
        for _, connection, flight in sorted(flights, key=lambda entry: entry[0]):
            number = renumber(flight.number)
            self._resume(connection, flight, number, rebind, shift)
            if flight.drains:
                moving.append(number)
        for observer in self._observers if moving else ():
            observer.rates_changed(np.array(moving), np.zeros(len(moving)))  # until they are found here
        if kept.has_turn:
            self._call_at(self.env.now)  # to find rates

    def _resume(
        self,
        connection: Connection,
        flight: TransferState,
        number: int,
        rebind: Callable[[Call], Call],
        shift: float,
    ) -> None:
        """A transfer goes on here, on a connection of here."""
        path = self._paths.between(connection.source, connection.target)
        channel = self._channel(path, connection.name, number, connection.most_bytes_per_second)
        if not channel.queue and connection.window is not None:
            channel.window = connection.window.moved(shift)
        slot = self._take_slot(number, channel, flight.size)
        transfers = self._transfers
        transfers.remaining[slot], transfers.stop[slot], transfers.cap[slot] = (
            flight.left,
            flight.stop,
            flight.cap,
        )
        transfers.timer[slot], transfers.begun[slot] = flight.timer + shift, flight.begun + shift
        transfers.rate[slot], transfers.since[slot] = 0.0, self.env.now
        transfers.set_due(slot, flight.due + shift)
        if flight.drains:
            self._rates.join(slot, path, flight.cap)
        if flight.is_held:
            transfers.held.add(slot)
        on_delivered, on_sent, on_dropped = flight.callbacks
        assert on_dropped is None
        self._callbacks[number] = (rebind(on_delivered), None if on_sent is None else rebind(on_sent), None)
        if flight.untold is not None:
            self._untold[number] = (int(transfers.order[slot]), rebind(flight.untold))


def _no_matter(waiting: object) -> None:
    """What a copy gives up is its original's to judge."""
