"""A topology in use: transfers in flight, bytes by link, links that change and hosts that crash.

`netsim.network.engine` simulates; this module connects it with topologies, protocols and callers.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn

from netsim.errors import DeadlockError, InputError
from netsim.network.clock import Clock
from netsim.network.connections import Transfer
from netsim.network.engine import Engine, Outside
from netsim.network.route import Route
from netsim.network.tcp import share_weight
from netsim.topology.protocol import Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Hashable, Iterable, KeysView, Mapping, Sequence

    import simpy

    from netsim.topology.graph import Link
    from netsim.topology.topology import FloatArray, Topology

__all__ = [
    "MOST_BYTES",
    "BackgroundConnection",
    "Downtime",
    "Network",
    "Outage",
    "Waiting",
    "not_given_up",
]


MOST_BYTES = 1e17
"""Bytes of a transfer at most: of more, a window would be less than rounding."""


@dataclass(frozen=True, slots=True)
class BackgroundConnection:
    """Name of a connection of background traffic: which entry, and which of its connections."""

    entry: int
    number: int


@dataclass(frozen=True, slots=True)
class Waiting:
    """A transfer that a dead link stops.

    Attributes:
        number: its id.
        connection: as its sender calls it.
        source, target: its hosts.
        links: the dead links that it would have to cross.
    """

    number: int
    connection: Hashable
    source: int
    target: int
    links: tuple[int, ...]


class _LinkBytes:
    """Payload bytes that have crossed each link.

    Args:
        engine: its transfers.
        num_links: of the network.

    Attributes:
        credited: bytes that were not sent here, by link.
        at_rest: transfers sent so far, and bytes, when none was last in flight; None: not known.
    """

    def __init__(self, engine: Engine, num_links: int) -> None:
        self._engine, self._num_links = engine, num_links
        self.credited: FloatArray | float = 0.0
        self.at_rest: tuple[int, FloatArray] | None = None

    def all(self) -> FloatArray:
        """Bytes of all traffic; shape (links,)."""
        counts = self._engine.counts
        if counts.num_in_flight:
            return self.of("all") + self.credited
        if self.at_rest is None or self.at_rest[0] != counts.num_sent:
            self.at_rest = counts.num_sent, self.of("all")
        return self.at_rest[1] + self.credited

    def of(self, kind: Literal["all", "background"]) -> FloatArray:
        """Bytes of the transfers of a kind; shape (links,)."""
        import numpy as np

        routes = self._engine.connections.routes
        crossed = {route: getattr(route.delivered, kind) for route in routes}
        for transfer in self._engine.in_flight() if self._engine.counts.num_in_flight else ():
            connection = transfer.connection
            if transfer.drains and (connection.is_background or kind == "all"):
                crossed[connection.route] += self._engine.crossed_bytes(transfer)
        links = [link for route in routes for link in route.links]
        lengths = np.array([len(route.links) for route in routes], dtype=int)
        payload = np.repeat(np.array(list(crossed.values()), dtype=np.float64), lengths)
        return np.bincount(np.array(links, dtype=int), payload, self._num_links).astype(np.float64)


class _Links:
    """Figures of links as they are at present, by index.

    Attributes:
        latency_seconds: one way.
        loss: share of packets that is lost at random; that of a measured link is in its rate and its windows.
        bytes_per_second: as stated, whether they are up or not.
    """

    def __init__(self, topology: Topology, protocol: Protocol) -> None:
        links = topology.links
        self.latency_seconds: list[float] = [link.latency_seconds for link in links]
        self.loss: list[float] = [0.0 if link.measured_streams else link.loss for link in links]
        self.bytes_per_second = [link.bits_per_second / 8 for link in links]
        self.is_up = [True] * len(links)
        self._share = protocol.link_shares(topology)

    def rate(self, link: int) -> float:
        """Bytes per second at present; 0 while it is down."""
        return self.bytes_per_second[link] if self.is_up[link] else 0.0

    def payload_rate(self, link: int) -> float:
        """Payload bytes per second at present."""
        return self.rate(link) * self._share[link]


class Network:
    """A topology in use: transfers in flight, their rates, and bytes by link.

        clock = netsim.Clock()
        network = netsim.Network(clock, netsim.Topology.load("lan"))
        network.send(0, 1, 1_000_000, lambda: print(clock.now))
        clock.run()

    `send` and `transfer` start transfers, `abort` ends one; `set_capacity`, `set_latency`, `set_loss` and
    `set_link_up` change links while it runs; `link_bytes`, `num_in_flight` and `is_in_flight` report its state. The
    other methods serve collectives and weather.

    Hosts and links are indices into `topology.hosts` and `topology.links`; times are seconds.

    Args:
        env: the clock that it lives on.
        topology: hosts, links and routes.
        protocol: how transfers use links, as `Protocol.parse` takes it; None: the topology's, else `linux-tcp`.
        weather: False leaves out the topology's weather. True: `netsim.Faults(network)` must apply it before the first
            transfer, if there is any.

    Attributes:
        env, topology: as given.
        has_faults: a `Faults` acts on it.
        lacks_weather: the topology's weather is not applied yet, and not left out.
        protocol: how transfers use links.
        downtime: the hosts that have crashed.
        engine: connections, transfers and time.
        on_give_up: called with a transfer whose connection is given up (`Protocol.give_up_seconds`); it continues to
            wait if that returns. By default raises DeadlockError.

    Raises InputError where `env` is not a `netsim.Clock`.
    """

    def __init__(
        self,
        env: Clock,
        topology: Topology,
        protocol: Protocol | str | Mapping[str, Any] | None = None,
        *,
        weather: bool = True,
    ) -> None:
        if not isinstance(env, Clock):
            raise InputError(f"Network: its clock is a {type(env).__name__}; give a netsim.Clock()")
        self.env = env
        self.topology = topology
        self.protocol = Protocol.resolve(protocol, topology.protocol)
        self.has_faults = False
        self.lacks_weather = weather and bool(topology.weather)
        self.downtime = Downtime(env)
        self.on_give_up: Callable[[Waiting], None] = not_given_up
        self._links = _Links(topology, self.protocol)
        self._moving: Transfer | None = None  # last seen to move
        self._limits = self.protocol.process_limits(topology)
        self.engine = Engine(
            self.protocol,
            [self._links.payload_rate(link) for link in range(len(topology.links))],
            self._limits,
            self.protocol.ack_share * self.protocol.payload_share,
            [self._queue_bytes(link) for link in topology.links],
            [link.queue_packets is not None for link in topology.links],
            self._find_route,
            env.show,
        )
        self.engine.dead.on_give_up = lambda transfer: self.on_give_up(self._waiting(transfer))
        env.attach(self.engine)
        self._crossed = _LinkBytes(self.engine, len(topology.links))

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
    ) -> int:
        """Start a transfer now.

        Messages of one (src, dst, connection) leave whole and in order. Within a host they are delivered at once.
        The callbacks of one instant are called in the order of sending, when all else that happens in that
        instant has happened; nothing is called before `send` returns.

        Args:
            src, dst: host indices.
            num_bytes: payload; zero takes the latency alone.
            on_delivered: called at the instant the last byte has arrived.
            connection: distinguishes connections between the same hosts.
            on_sent: called at the instant from which the sender need not wait any more, before
                `on_delivered`: the delivery on an ideal network; under TCP when the socket's buffer holds
                what has not left yet.
            on_dropped: called if a host's crash ends it (`netsim.weather.faults`); None: it is then sent once more,
                from its first byte, with the same id and callbacks.
            most_bytes_per_second: rate that its sender offers at most; with a limit TCP does not shape it.

        Returns:
            The transfer's id; ids grow with each call.

        Raises InputError for a host that does not exist, and for bytes and rates that are no such numbers.
        """
        call = f"send from host {src} to host {dst}"
        source, target = self._index(call, "host", src), self._index(call, "host", dst)
        _check(call, "bytes", num_bytes, most=MOST_BYTES)
        if most_bytes_per_second != math.inf:
            _check(call, "most_bytes_per_second", most_bytes_per_second, above=0)
        engine = self.engine
        is_background = isinstance(connection, BackgroundConnection)
        opened = engine.connect(connection, source, target, is_background)
        owner = Outside(engine, on_delivered, on_sent, on_dropped)
        engine.send(
            Transfer(opened, float(num_bytes), owner, float(most_bytes_per_second)), on_sent is not None
        )
        return owner.id

    def transfer(self, src: int, dst: int, num_bytes: float, *, connection: Hashable = None) -> simpy.Event:
        """Start a transfer now, as `send` does; the event happens when it is delivered.

        `num_bytes` go from host `src` to host `dst`, behind those of the same `connection`.
        """
        delivered = self.env.event()

        def succeed() -> None:
            delivered.succeed()

        self.send(src, dst, num_bytes, succeed, connection=connection)
        return delivered

    def abort(self, transfer: int) -> float:
        """End a transfer in flight; its callbacks are never called.

        Returns the bytes that were delivered. Raises InputError where there is no such transfer in flight.
        """
        return self.engine.abort(self._single(transfer, "abort"))

    def end_transfer(self, transfer: int) -> None:
        """End the transfer of this id by force; its sender is called if it gave `on_dropped`."""
        self.engine.drop(self._single(transfer, "end_transfer"))

    def is_in_flight(self, transfer: int) -> bool:
        """Return whether a transfer is in flight."""
        return transfer in self.engine.singles

    def _single(self, transfer: int, call: str) -> Transfer:
        found = self.engine.singles.get(transfer)
        if found is None:
            raise InputError(f"{call}: no transfer {transfer} is in flight")
        return found

    def _index(self, call: str, what: Literal["host", "link"], given: int) -> int:
        """An index of a host or link, as a call was given it; raises InputError if there is none."""
        num = len(self.topology.hosts if what == "host" else self.topology.links)
        try:
            index = operator.index(given)
        except TypeError:
            index = -1
        if not 0 <= index < num:
            hint = (
                "; Topology.host_index finds one by name" if what == "host" and isinstance(given, str) else ""
            )
            raise InputError(f"{call}: no {what} {given!r}: {what}s are numbers from 0 to {num - 1}{hint}")
        return index

    # -- state ---------------------------------------------------------------------------------------------

    def observe(self, observer: Any) -> None:
        """Call `observer` for what happens from now on: the four methods of `Recorder` that the network calls."""
        self.engine.observers.append(observer)

    @property
    def link_bytes(self) -> FloatArray:
        """Payload bytes that have crossed each link so far; shape (links,)."""
        return self._crossed.all()

    @property
    def background_link_bytes(self) -> FloatArray:
        """Background traffic's part of `link_bytes`; shape (links,)."""
        return self._crossed.of("background")

    @property
    def num_in_flight(self) -> int:
        """Transfers sent and not yet delivered or aborted."""
        return self.engine.counts.num_in_flight

    @property
    def num_connections(self) -> int:
        """Connections that are kept: those in use, and idle ones whose state matters."""
        return len(self.engine.connections.kept())

    @property
    def dropped_bytes(self) -> float:
        """Undelivered payload of transfers that were ended by force."""
        return self.engine.counts.dropped_bytes

    def route_bytes_per_second(self, source: int, target: int) -> float:
        """Payload from host `source` to host `target` at present, by links and processes; 0 if a link is down."""
        widths = [self.engine.rates.payload[link] for link in self.topology.route(source, target)]
        return min(*widths, self._limits[source], self._limits[target]) if widths else math.inf

    def credit(self, hosts: Sequence[int], pair_bytes: Iterable[tuple[int, int, float]]) -> None:
        """Count `pair_bytes` between members on `hosts` as sent: (source, target, bytes), by position."""
        for src, dst, num_bytes in pair_bytes:
            self.engine.route(hosts[src], hosts[dst]).delivered.all += num_bytes
        self._crossed.at_rest = None

    def credit_links(self, link_bytes: FloatArray) -> None:
        """Count bytes as having crossed links; shape (links,)."""
        self._crossed.credited = self._crossed.credited + link_bytes

    # -- routes ----------------------------------------------------------------------------------------------

    def _find_route(self, source: int, target: int, sharing: int) -> Route:
        """Route of one of the connections that share the protocol's streams."""
        if self.lacks_weather:
            raise InputError(
                f"Network: nothing applies the weather of topology '{self.topology.name}': make netsim.Faults(network) "
                "before the first transfer, or leave it out with Network(..., weather=False)"
            )
        links = self.topology.route(source, target)
        route = Route(source, target, list(links), list(self.topology.route(target, source)))
        crossed = [self.topology.links[link] for link in links]
        protocol = self.protocol.over(crossed)
        route.streams = protocol.streams / sharing
        route.segment = protocol.segment_bytes * route.streams
        if protocol.has_headers:
            route.acks = protocol.ack_share / self.protocol.ack_share
        self._measure(route)
        if self.protocol.has_windows:
            route.window_limit = self.protocol.transfer_window(crossed, route.round_trip) / sharing
        return route

    def _measure(self, route: Route) -> None:
        """Set a route's latency, weight and loss from its links at present."""
        seconds_of = self._links.latency_seconds.__getitem__
        route.latency = float(sum(map(seconds_of, route.links)))
        route.round_trip = route.latency + float(sum(map(seconds_of, route.back)))
        route.weight = share_weight(route.streams, self.protocol.rtt_bias, route.round_trip)
        route.loss = 1.0 - math.prod([1.0 - self._links.loss[link] for link in route.links])
        if route.links:
            is_per_transfer = self.protocol.connections == "per-transfer"
            route.setup = self.protocol.software_seconds + (route.round_trip if is_per_transfer else 0.0)

    def _queue_bytes(self, link: Link) -> float:
        """Bytes that a link's queue holds; infinity: any window."""
        # Drops at the queue of a measured link, of whatever length, are in its rate.
        by_default = None if link.measured_streams else self.protocol.queue_packets
        packets = link.queue_packets or by_default
        return math.inf if packets is None else float(packets * self.protocol.over([link]).segment_bytes)

    # -- links that change -----------------------------------------------------------------------------------

    def set_capacity(self, link: int, bits_per_second: float) -> None:
        """Give a link (index) another capacity from now on; at zero `bits_per_second`, transfers on it stall.

        Raises InputError for a link that does not exist and a number that is negative or not finite.
        """
        link = self._index("set_capacity", "link", link)
        _check(f"set_capacity of link {link}", "bits_per_second", bits_per_second)
        self._links.bytes_per_second[link] = bits_per_second / 8
        self._resize(link)

    def set_link_up(self, link: int, up: bool) -> None:
        """Take a link (index) down, or bring it back `up`.

        Raises InputError for a link that does not exist.
        """
        link = self._index("set_link_up", "link", link)
        self._links.is_up[link] = up
        self._resize(link)

    def _resize(self, link: int) -> None:
        self.engine.resize(link, self._links.payload_rate(link))
        for observer in self.engine.observers:
            observer.capacity_changed(link, self._links.rate(link) * 8)

    def set_latency(self, link: int, seconds: float) -> None:
        """Give a link (index) another latency, one way, in `seconds`: for what is sent from now on, and windows.

        Raises InputError for a link that does not exist and a number that is negative or not finite.
        """
        link = self._index("set_latency", "link", link)
        _check(f"set_latency of link {link}", "seconds", seconds)
        self._links.latency_seconds[link] = seconds
        self._follow(link)

    def set_loss(self, link: int, share: float) -> None:
        """Set the `share` of packets that a link (index) loses from now on.

        Raises InputError for a link that does not exist and a share below 0 or from 1 up.
        """
        link = self._index("set_loss", "link", link)
        _check(f"set_loss of link {link}", "share", share, below=1)
        stated = self.topology.links[link]
        is_included = stated.measured_streams and stated.loss
        lost = max(1.0 - (1.0 - share) / (1.0 - stated.loss), 0.0) if is_included else share
        self._links.loss[link] = lost
        self._follow(link)

    def _follow(self, link: int) -> None:
        routes = self.engine.connections.routes
        changed = [route for route in routes if link in route.links or link in route.back]
        for route in changed:
            self._measure(route)
        self.engine.follow(changed)

    @property
    def dead_links(self) -> frozenset[int]:
        """The links that carry nothing at present."""
        return frozenset(self.engine.dead.links)

    def is_dead_end(self, source: int, target: int) -> bool:
        """Return whether the route from host `source` to host `target` is dead at present."""
        source, target = (self._index("is_dead_end", "host", host) for host in (source, target))
        return self.engine.dead.is_cut(self.engine.route(source, target))

    # -- hosts that crash or pause -----------------------------------------------------------------------------

    def take_arrivals(self) -> None:
        """Deliver all transfers that have arrived by now."""
        self.engine.take_due()
        self.engine.mark_changed()

    def drop_transfers(self, host: int) -> None:
        """End all transfers in flight from and to a host, and forget the state of its connections.

        Those without `on_dropped` are sent once more, in the same order.
        """
        self.engine.drop_at(self._index("drop_transfers", "host", host))

    def pause(self, host: int) -> None:
        """Stop a host's processes: transfers from and to it stand still, and none is lost."""
        self.engine.pause(self._index("pause", "host", host))

    def resume(self, host: int) -> None:
        """Continue a host's processes."""
        self.engine.resume(self._index("resume", "host", host))

    # -- transfers that wait ---------------------------------------------------------------------------------

    def can_move(self) -> bool:
        """Return whether a transfer, background traffic aside, moves or will with the links as they are."""
        engine, last = self.engine, self._moving
        if engine.is_busy:
            return True
        is_first = last is not None and (last.connection.first is last or last in engine.repairing)
        if last is None or not is_first or engine.is_stuck(last):
            self._moving = next((each for each in self._first() if not engine.is_stuck(each)), None)
        return self._moving is not None

    def transfers_waiting(self) -> list[Waiting]:
        """The transfers that dead links keep from moving, background traffic aside."""
        return [self._waiting(transfer) for transfer in self._first() if self.engine.is_stuck(transfer)]

    def _waiting(self, transfer: Transfer) -> Waiting:
        connection, owner = transfer.connection, transfer.owner
        route = connection.route
        crossed = route.links + route.back if self.protocol.has_headers else route.links
        links = tuple(link for link in crossed if link in self.engine.dead.links)
        number = owner.id if isinstance(owner, Outside) else transfer.number
        return Waiting(number, connection.name, route.source, route.target, links)

    def _first(self) -> list[Transfer]:
        """Each connection's first transfer, and those that wait for a lost packet, background traffic aside."""
        repairing = self.engine.repairing
        return [
            transfer
            for transfer in self.engine.in_flight()
            if (transfer.connection.first is transfer or transfer in repairing)
            and not transfer.connection.is_background
        ]


def _check(
    call: str, name: str, given: float, *, most: float = math.inf, below: float = math.inf, above: float = -1
) -> None:
    """Raise InputError for a number outside its limits, with the call and the argument."""
    is_number = type(given) is float or isinstance(given, Real)  # asking an abstract class takes longer
    if is_number and 0 <= given < below and above < given <= most:
        return
    limits = [f"at most {most:g}"] * (most < math.inf) + [f"less than {below:g}"] * (below < math.inf)
    limits += ["above 0" if above == 0 else "not negative", "finite"]
    raise InputError(f"{call}: {name} must be {', '.join(limits[:-1])} and {limits[-1]}, got {given!r}")


def not_given_up(waiting: Waiting) -> NoReturn:
    """Raise DeadlockError for a transfer whose connection is given up."""
    raise DeadlockError(
        f"transfer {waiting.number} from host {waiting.source} to host {waiting.target} cannot cross "
        f"links {list(waiting.links)}, which are dead for longer than its protocol waits: bring them back in time"
    )


class Outage(NamedTuple):
    """Downtime of a host (index); `end_seconds` None: it is still down."""

    host: int
    begin_seconds: float
    end_seconds: float | None = None


class Downtime:
    """Hosts of a network that are down, and processes that wait for them.

    Args:
        env: its clock.

    Attributes:
        outages: all that are over, in the order in which they ended.
        awaited: by host, how many processes wait for it.
        hosts: those that are down, paused ones included.
        paused: those whose processes are stopped and lose nothing.
        on_crash, on_pause: called with a host that crashes or is paused.
    """

    def __init__(self, env: simpy.Environment) -> None:
        self.outages: list[Outage] = []
        self.awaited: Counter[int] = Counter()
        self.paused: set[int] = set()
        self.on_crash: Callable[[int], None] = lambda host: None
        self.on_pause: Callable[[int], None] = lambda host: None
        self._env = env
        self._since: dict[int, float] = {}
        self.hosts: KeysView[int] = self._since.keys()
        self._returns: dict[int, simpy.Event] = {}

    def begin(self, host: int) -> None:
        """Record that a host crashes, unless it is down already; one that is paused loses its work."""
        if host not in self._since or host in self.paused:
            self.paused.discard(host)
            self._since.setdefault(host, self._env.now)
            self.on_crash(host)

    def pause(self, host: int) -> None:
        """Record that a host's processes are stopped, unless it is down already."""
        if host not in self._since:
            self._since[host] = self._env.now
            self.paused.add(host)
            self.on_pause(host)

    def end(self, host: int) -> None:
        """Record that a host is back, unless it was up."""
        if host not in self._since:
            return
        self.paused.discard(host)
        self.outages.append(Outage(host, self._since.pop(host), self._env.now))
        returned = self._returns.pop(host, None)
        if returned is not None:
            returned.succeed()

    def since(self, host: int) -> float | None:
        """The instant at which a host went down; None if it is up."""
        return self._since.get(host)

    def under_way(self) -> list[Outage]:
        """Outages in progress, by host."""
        return [Outage(host, since) for host, since in sorted(self._since.items())]

    def until_up(self, host: int) -> Generator[simpy.Event, None, None]:
        """Wait until a host is up."""
        self.awaited[host] += 1
        try:
            while host in self._since:
                if host not in self._returns:
                    self._returns[host] = self._env.event()
                yield self._returns[host]
        finally:
            self.awaited[host] -= 1
