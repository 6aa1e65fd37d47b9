"""Protocols of simulated transfers: named presets, mappings that change settings of one, and limits by windows."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal

from netsim.errors import InputError, locate_errors, unknown_name, unknown_names
from netsim.units import (
    format_bits_per_second,
    format_seconds,
    parse_bits_per_second,
    parse_bytes,
    parse_seconds,
    shown,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from netsim.topology.graph import Link
    from netsim.topology.topology import Topology

__all__ = [
    "MEAN_WINDOWS",
    "PRESETS",
    "Protocol",
    "WindowLimit",
    "enough_streams",
    "mean_window_segments",
    "read_mtu",
    "spare_streams",
    "unlimited_cores",
    "window_limit",
]

_DEFAULT = "linux-tcp"
_CONNECTIONS = ("persistent", "per-transfer")

_MTU_BYTES = 1500  # of Ethernet
_HEADER_BYTES = 52  # of a packet: IPv4 (20), TCP (20) and its time stamp (12)
_ETHERNET_BYTES = 14  # that a frame adds to its packet
# A frame that carries an acknowledgement only; one for every two segments (RFC 1122, 4.2.3.2).
_ACK_BYTES = 66


@dataclass(frozen=True, slots=True)
class Protocol:
    """Limits that a protocol puts on transfers of the ideal network, and on collectives.

    Attributes:
        name: the preset it was made from.
        slow_start: windows start small and double every round trip (see `netsim.network.tcp`); False: no window at
            all.
        mtu_bytes: largest packet of links that state none, IP header included.
        initial_segments: full packets that may leave in the first round trip, per stream.
        window_bytes: most payload in flight, per stream; what the send buffer allows.
        streams: parallel connections that one transfer is spread over.
        connections: `persistent` ones keep their window between transfers; `per-transfer` ones are opened for
            each transfer, which costs a handshake of one round trip and starts from the initial window.
        congestion: congestion control of its streams, one of MEAN_WINDOWS.
        queue_packets: full packets that the queue of a route's narrowest link, the sender's own aside, holds before it
            drops; None: enough for any window.
        quick_acks: receivers acknowledge each of the first segments at once, not every second one.
        minimum_timeout_seconds: least retransmission time-out; idling longer than it plus a round trip
            shrinks the window.
        has_headers: bandwidth counts headers and acknowledgements; False: payload only.
        rtt_bias: transfers with longer round trips get smaller shares.
        rendezvous: data leave only when the receiver's note has arrived; honoured by collectives.
        buffers_sends: a member's send is done when the socket's buffer has taken it, not at delivery; honoured by
            collectives, where there are windows.
        software_seconds: what sending one message costs besides the network, added to its latency.
        collectives_in_flight: collectives of one group that run at once; honoured by the kernel.
        give_up_seconds: a connection is given up when a dead link has let no byte of its transfer through for
            longer.
        library: library whose own choice of collective algorithms `auto` takes; empty: the fastest by this model.
        channels: NCCL's connections between two hosts, one a channel, among which `streams` are divided; 0: the preset
            has none.
        socket_threads: of a connection (NCCL_SOCKET_NTHREADS).
        sockets_per_thread: streams of a thread (NCCL_NSOCKS_PERTHREAD).
        core_bits_per_second: payload that the process of a rank sends and receives, together: half of it each way.
        card_bits_per_second: speed of the hosts' network cards, by which NCCL chooses algorithms.
        rank_hosts: host of each rank's process; a host without any has one.
    """

    name: str = "ideal"
    slow_start: bool = False
    mtu_bytes: float = _MTU_BYTES
    initial_segments: float = math.inf
    window_bytes: float = math.inf
    streams: int = 1
    connections: Literal["persistent", "per-transfer"] = "persistent"
    congestion: str = "cubic"
    queue_packets: float | None = None
    quick_acks: bool = False
    minimum_timeout_seconds: float = 0.2
    has_headers: bool = False
    rtt_bias: bool = False
    rendezvous: bool = False
    buffers_sends: bool = False
    software_seconds: float = 0.0
    collectives_in_flight: int = 1
    give_up_seconds: float = math.inf
    library: Literal["", "gloo", "hivemind", "nccl"] = ""
    channels: int = 0
    socket_threads: int = 1
    sockets_per_thread: int = 1
    core_bits_per_second: float = math.inf
    card_bits_per_second: float = 10e9  # NCCL's where the kernel reports none, as on AWS and Google Cloud
    rank_hosts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _read_one_of(_CONNECTIONS, self.connections)
        _read_one_of(tuple(MEAN_WINDOWS), self.congestion)
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type in ("float", "int", "float | None") and value is not None:
                number = float(value) if isinstance(value, Real) else -1.0
                may_be_zero = field.name in ("software_seconds", "channels")
                if not (number > 0 or (number == 0 and may_be_zero)):
                    least = "of at least 0" if may_be_zero else "above 0"
                    raise InputError(f"Protocol: {field.name} must be a number {least}, got {shown(value)}")

    @classmethod
    def parse(cls, spec: str | Mapping[str, Any] | Protocol | None) -> Protocol:
        """Parse the protocol of `spec`: a name, a mapping or None (`linux-tcp`).

        A mapping names a `preset` (default `linux-tcp`) and may set `streams`, `window` (bytes per stream),
        `connections`, `congestion`, `queue` (packets; if not given, it grows with `window`), `mtu` (bytes of a packet),
        `software` (seconds per message) and `core` (bits per second of a rank's process); with the preset
        `nccl-sockets` also `socket_threads`, `sockets_per_thread` and `card` (bits per second).

        Raises UnknownNameError for a preset, key or choice that does not exist and InputError for a bad
        value.

        >>> Protocol.parse({"preset": "linux-tcp", "streams": 8, "window": "4 MiB"}).streams
        8
        """
        if isinstance(spec, Protocol):
            return spec
        settings: dict[str, Any] = {}
        preset: Any = _DEFAULT if spec is None else spec
        if isinstance(spec, Mapping):
            settings = {str(key): value for key, value in spec.items()}
            preset = settings.pop("preset", _DEFAULT)
        if not isinstance(preset, str):
            what = "preset must be a name" if isinstance(spec, Mapping) else "expected a name or a mapping"
            raise InputError(f"protocol: {what}, got {preset!r}")
        if preset not in PRESETS:
            raise unknown_name("protocol", preset, PRESETS)
        base = PRESETS[preset]
        if not settings:
            return base
        changes: dict[str, Any] = {}
        unknown = [key for key in settings if key not in _SETTINGS]
        if unknown:
            raise unknown_names("key in protocol", unknown, [*_SETTINGS, "preset"])
        for key, value in settings.items():
            field, read = _SETTINGS[key]
            with locate_errors(f"protocol: {key}", (key,)):
                if key in _OF_NCCL and base.library != "nccl":
                    raise InputError(f"only nccl-sockets has it, and the preset is {preset}: leave it out")
                changes[field] = read(value)
                if key in ("window", "core", "card") and not changes[field]:
                    raise InputError(f"expected more than 0, got {shown(value)}")
        if "streams" in settings and (both := [key for key in _SOCKETS if key in settings]):
            raise InputError(
                f"protocol: streams and {both[0]} both give the number of sockets: leave one out"
            )
        if base.channels and "streams" in changes:
            changes["channels"] = min(base.channels, changes["streams"])
        elif base.channels:
            threads, each = (changes.get(field, getattr(base, field)) for field in _SOCKETS)
            if threads > _MOST_THREADS or threads * each > _MOST_SOCKETS:
                raise InputError(
                    f"protocol: socket_threads x sockets_per_thread is {threads} x {each}; NCCL takes at most"
                    f" {_MOST_THREADS} threads and {_MOST_SOCKETS} sockets a connection"
                )
            changes["streams"] = base.channels * threads * each
        if "window" in settings and "queue" not in settings and base.queue_packets is not None:
            # Hosts are tuned for larger windows on paths that hold them.
            larger = max(changes["window_bytes"] / base.window_bytes, 1.0)
            changes["queue_packets"] = base.queue_packets * larger
        made = replace(base, **changes)
        if "window" in settings and made.window_bytes < made.segment_bytes:
            raise InputError(
                f"protocol: window: expected at least one segment of {made.segment_bytes:,} bytes,"
                f" got {shown(settings['window'])}"
            )
        return made

    @classmethod
    def resolve(cls, *specs: str | Mapping[str, Any] | Protocol | None) -> Protocol:
        """Parse the first of `specs` that is given, such as an option, the topology's protocol and a default.

        Settings without a `preset` change the next of them.

        >>> Protocol.resolve({"streams": 8}, None, "gloo") == Protocol.parse({"preset": "gloo", "streams": 8})
        True
        """
        settings: dict[str, Any] = {}
        for spec in specs:
            if isinstance(spec, Mapping):
                settings = {**spec, **settings}
            elif spec is not None:
                return cls.parse({"preset": spec, **settings} if settings else spec)
            if "preset" in settings:
                break
        return cls.parse(settings or None)

    def describe(self) -> str:
        """Name and streams, such as `linux-tcp, 8 streams a transfer`; where nothing has windows, the name alone."""
        streams = f"{self.streams} stream{'s' if self.streams > 1 else ''} a transfer"
        return f"{self.name}, {streams}" if self.has_windows else self.name

    def to_mapping(self) -> dict[str, Any]:
        """Every setting by name, as plain values for records."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "rank_hosts"}

    @property
    def segment_bytes(self) -> float:
        """Payload of a full packet.

        >>> Protocol.parse("linux-tcp").segment_bytes, Protocol.parse({"mtu": 9001}).segment_bytes
        (1448, 8949)
        """
        return self.mtu_bytes - _HEADER_BYTES

    @property
    def payload_share(self) -> float:
        """Payload bytes per byte on the wire, in full frames; 1 where bandwidth counts payload."""
        return self.segment_bytes / (self.mtu_bytes + _ETHERNET_BYTES) if self.has_headers else 1.0

    @property
    def ack_share(self) -> float:
        """Bytes on the wire in the other direction per byte of payload."""
        return _ACK_BYTES / (2 * self.segment_bytes) if self.has_headers else 0.0

    def over(self, links: Iterable[Link]) -> Protocol:
        """Return the protocol with the largest packet that all `links` carry whole (path MTU, RFC 4821)."""
        mtu = min([link.mtu_bytes or self.mtu_bytes for link in links], default=self.mtu_bytes)
        return self if mtu == self.mtu_bytes else replace(self, mtu_bytes=mtu)

    def payload_bytes_per_second(self, topology: Topology) -> list[float]:
        """Payload that each link carries: its share of the wire; of a measured link all, which is payload already.

        Args:
            topology: the network.

        Returns:
            Bytes per second, one a link.
        """
        shares = self.link_shares(topology)
        return [link.bits_per_second / 8 * share for link, share in zip(topology.links, shares, strict=True)]

    def for_ranks(self, hosts: Iterable[int]) -> Protocol:
        """Return the protocol with a process for each rank; `hosts` has each rank's."""
        if self.core_bits_per_second == math.inf:
            return self
        return replace(self, rank_hosts=tuple(hosts))

    def process_limits(self, topology: Topology) -> list[float]:
        """Payload that the processes of each host send, and as much that they receive, in bytes per second.

        >>> from netsim import Topology
        >>> topology = Topology.load("lan")
        >>> Protocol.parse("gloo").for_ranks([0, 0, 1]).process_limits(topology)[:2]
        [3750000000.0, 1875000000.0]
        """
        each, counts = self.core_bits_per_second / 2 / 8, Counter(self.rank_hosts)
        return [
            each * (counts[host.index] or 1) if host.store is None else math.inf for host in topology.hosts
        ]

    def link_shares(self, topology: Topology) -> list[float]:
        """Payload that each link of `topology` carries per byte of its bandwidth, in frames as long as it allows."""
        of_frame: dict[float | None, float] = {}  # thousands of links have few kinds of frames
        for link in topology.links:
            if link.mtu_bytes not in of_frame:
                of_frame[link.mtu_bytes] = self.over([link]).payload_share
        return [1.0 if link.measured_streams else of_frame[link.mtu_bytes] for link in topology.links]

    def transfer_window(self, links: Iterable[Link], round_trip_seconds: float) -> float:
        """Most payload in flight of a transfer over `links`, all its streams together, in bytes.

        If N streams filled a measured link, their windows held the link's bandwidth-delay product, losses included. So
        the window of a stream is at least 1 / N of that, or what the preset and the link's loss (by the response
        function of RFC 9438) allow, if that is more. If one stream was measured too, its window is what it had in
        flight. A `window` set by the user is never exceeded, and replaces a measured one. On links that are not
        measured, the rate of a stream is the provider's limit, whatever the window.

        Args:
            links: of the route.
            round_trip_seconds: of the route and back.
        """
        links = list(links)
        measured = [link for link in links if link.measured_streams]
        known, limit = self.stream_windows(links, round_trip_seconds)
        if not measured or self.window_bytes == math.inf:
            return float(min(self.window_bytes, limit) * self.streams)
        elsewhere = round_trip_seconds - sum(2 * link.latency_seconds for link in measured)
        shown = loss = 0.0
        for link in measured:
            assert link.measured_streams
            own_round_trip = max(elsewhere + 2 * link.latency_seconds, 0.0)
            shown = max(shown, link.bits_per_second / 8 * own_round_trip / link.measured_streams)
            loss = 1.0 - (1.0 - loss) * (1.0 - link.loss)
        is_preset = self.name in PRESETS and self.window_bytes == PRESETS[self.name].window_bytes
        if is_preset and known < math.inf:
            return min(known, limit) * self.streams
        largest = max(self.window_bytes, shown) if is_preset else self.window_bytes
        kept = MEAN_WINDOWS[self.congestion](loss, round_trip_seconds) * self.over(links).segment_bytes
        return min(largest, max(shown, kept), limit) * self.streams

    def stream_windows(self, links: Iterable[Link], round_trip_seconds: float) -> tuple[float, float]:
        """Payload in flight of one stream by the links' rates of a stream: measured, and allowed; else infinity.

        Args:
            links: Links on the route.
            round_trip_seconds: Round trip of the route in seconds, without queues.
        """
        known, limit = math.inf, math.inf
        for link in links:
            if link.stream_bits_per_second is not None:
                in_flight = link.stream_bits_per_second / 8 * round_trip_seconds
                if link.measured_streams:
                    known = min(known, in_flight)
                else:
                    limit = min(limit, in_flight * self.over([link]).payload_share)
        return known, limit

    @property
    def is_plain(self) -> bool:
        """True if a lone message takes latency and its narrowest link's rate, independent of earlier messages."""
        per_transfer = self.connections == "per-transfer"
        return not (self.has_windows or self.rendezvous or self.has_headers or per_transfer)

    @property
    def has_windows(self) -> bool:
        """True if windows limit transfers, in addition to latency and fair shares."""
        return self.slow_start or self.window_bytes < math.inf


def mean_window_segments(loss: float, round_trip_seconds: float) -> float:
    """Mean window of one stream that loses this share of its packets (RFC 9438, equations 3 and 6).

    >>> round(mean_window_segments(1e-4, 0.1)), mean_window_segments(0.0, 0.1)
    (187, inf)
    """
    if not loss:
        return math.inf
    return max(1.054 * math.pow(round_trip_seconds / loss, 0.75), math.sqrt(1.5 / loss))


MEAN_WINDOWS: Mapping[str, Callable[[float, float], float]] = {"cubic": mean_window_segments}
"""By congestion control (`netsim/network/tcp_NAME.py`): mean window in segments at a loss and a round trip."""


_MOST_COUNT = 10**9


def _read_count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MOST_COUNT:
        raise InputError(f"expected a whole number from 1 to {_MOST_COUNT:,}, got {shown(value)}")
    return value


def read_mtu(value: Any) -> int:
    """Read the bytes of a largest packet: from the least of IPv4 (RFC 791) to the most of its header."""
    if isinstance(value, bool) or not isinstance(value, int) or not 576 <= value <= 65_535:
        raise InputError(f"expected whole bytes from 576 to 65,535, such as 1500 or 9001, got {shown(value)}")
    return value


def _read_one_of(choices: Sequence[str], value: Any) -> str:
    if value not in choices:
        raise unknown_name("choice", str(value), choices)
    return str(value)


_MOST_THREADS, _MOST_SOCKETS = 16, 64  # of a connection of NCCL (src/transport/net_socket.cc)


_SOCKETS = ("socket_threads", "sockets_per_thread")
_OF_NCCL = (*_SOCKETS, "card")


_SETTINGS: dict[str, tuple[str, Any]] = {
    "streams": ("streams", _read_count),
    "window": ("window_bytes", parse_bytes),
    "connections": ("connections", partial(_read_one_of, _CONNECTIONS)),
    "congestion": ("congestion", partial(_read_one_of, tuple(MEAN_WINDOWS))),
    "queue": ("queue_packets", _read_count),
    "mtu": ("mtu_bytes", read_mtu),
    "software": ("software_seconds", parse_seconds),
    "socket_threads": ("socket_threads", _read_count),
    "sockets_per_thread": ("sockets_per_thread", _read_count),
    "core": ("core_bits_per_second", parse_bits_per_second),
    "card": ("card_bits_per_second", parse_bits_per_second),
}

_LINUX_TCP = Protocol(
    name="linux-tcp",
    slow_start=True,
    initial_segments=10,  # RFC 6928
    window_bytes=4 * 2**20,  # largest send buffer by default: the third number of net.ipv4.tcp_wmem
    queue_packets=1000,  # the default of Linux's interfaces (txqueuelen)
    has_headers=True,
    rtt_bias=True,
    buffers_sends=True,
    # net.ipv4.tcp_retries2 = 15: what ten time-outs from 0.2 s on, each twice the one before, and then six of
    # 120 s come to (Linux, Documentation/networking/ip-sysctl.rst). It is the least: the time-out that is
    # running by then comes to its end first.
    give_up_seconds=924.6,
)

PRESETS: dict[str, Protocol] = {
    "gloo": replace(
        _LINUX_TCP,
        name="gloo",
        queue_packets=None,
        quick_acks=True,
        rendezvous=True,
        software_seconds=0.2e-3,
        core_bits_per_second=30e9,  # real gloo's threads: 20 to 36 on an AMD EPYC (benchmarks/gloo_cores.py)
        collectives_in_flight=2,
        library="gloo",
    ),
    # An averaging is two messages in a row of each peer: 4 s are 7.5 ms for each of 350 tensors and 0.3 s for each of
    # five peers (docs/network.md). A peer's event loop moves 1.1 to 1.5 Gbit/s each way.
    "hivemind": replace(
        _LINUX_TCP, name="hivemind", software_seconds=2.0, core_bits_per_second=2.5e9, library="hivemind"
    ),
    "ideal": Protocol(),
    "linux-tcp": _LINUX_TCP,
    # Two channels of one socket and thread: NCCL's defaults outside of clouds (NCCL_NSOCKS_PERTHREAD,
    # NCCL_SOCKET_NTHREADS). It sends without a rendezvous.
    "nccl-sockets": replace(_LINUX_TCP, name="nccl-sockets", library="nccl", channels=2, streams=2),
}
"""Protocols by name."""


_ALL = 1 - 1e-9  # of a link, rounding aside


@dataclass(frozen=True)
class WindowLimit:
    """A route on which the window, or loss that keeps it small, lets less through than the narrowest link would.

    Attributes:
        source, target: names of hosts.
        round_trip_seconds: of the route.
        window_bits_per_second: payload that the windows of all streams let through.
        link_bits_per_second: payload that the narrowest link carries, and the processes at its ends.
        streams: number of streams that would fill it with the present window.
        window_bytes: window that would fill it with the present number of streams.
        loss: share of packets lost, where it and not the protocol's window is the limit; else 0.
        is_stream_rate: a link's rate of one stream is the limit, which no window changes.
    """

    source: str
    target: str
    round_trip_seconds: float
    window_bits_per_second: float
    link_bits_per_second: float
    streams: int
    window_bytes: int
    loss: float = 0.0
    is_stream_rate: bool = False

    @property
    def share(self) -> float:
        """Share of the links' payload that the window lets through."""
        return self.window_bits_per_second / self.link_bits_per_second

    @property
    def fills(self) -> str:
        """Effect of `streams`, in words."""
        verb = "fills" if self.streams == 1 else "fill"
        rate = format_bits_per_second(self.link_bits_per_second)
        return f"{verb} every route (the last one {self.source} to {self.target} with {rate})"

    def __str__(self) -> str:
        cause = f"a loss of {100 * self.loss:.3g} %" if self.loss else "the window"
        window = f" or window: {math.ceil(self.window_bytes / 2**20)} MiB" if not self.loss else ""
        if self.is_stream_rate:
            cause, window = "the rate of a stream", ""
        return (
            f"limited by {cause} from {self.source} to {self.target}:"
            f" {format_bits_per_second(self.window_bits_per_second)} at a round trip of"
            f" {format_seconds(self.round_trip_seconds)}, of"
            f" {format_bits_per_second(self.link_bits_per_second)} that the links carry;"
            f" streams: {self.streams}{window} would fill them"
        )


def window_limit(
    topology: Topology, protocol: Protocol, messages: Iterable[tuple[int, int, float]]
) -> WindowLimit | None:
    """Find the route that a window limits most, of messages longer than the window; None if there is none.

    Args:
        topology: the network.
        protocol: its `window_bytes` and `streams` hold.
        messages: (from, to, bytes) with indices of hosts, the largest message of each route being enough.

    >>> from netsim import Protocol, Topology
    >>> topology = Topology.from_mapping({"hosts": ["a", "b"], "links": [
    ...     {"between": ["a", "b"], "bandwidth": "10 Gbit/s", "rtt": "40 ms"}]})
    >>> limit = window_limit(topology, Protocol.parse("linux-tcp"), [(0, 1, 1e9)])
    >>> limit.streams, limit.window_bytes
    (12, 47820344)
    >>> window_limit(topology, Protocol.parse("ideal"), [(0, 1, 1e9)])
    """
    if not protocol.has_windows:
        return None
    rates = protocol.payload_bytes_per_second(topology), protocol.process_limits(topology)
    kinds, limits = topology.host_kinds, []
    untouched: dict[tuple[int, int], float] = {}  # bytes that no window limits, by kinds of the two hosts
    for src, dst, num_bytes in messages:
        pair = kinds[src], kinds[dst]
        if src != dst and num_bytes > untouched.get(pair, 0.0):
            least, limit = _limit_between(src, dst, topology, protocol, rates)
            is_full = limit.share >= _ALL
            if is_full or num_bytes > least:
                limits += [] if is_full else [limit]
                least = math.inf  # the first of these hosts stands for them
            untouched[pair] = least
    return min(limits, key=lambda limit: limit.share, default=None)


def enough_streams(
    topology: Topology, protocol: Protocol, hosts: Iterable[int], stores: Iterable[int] = ()
) -> WindowLimit | None:
    """Route that takes the most streams to fill; None if windows limit none under `protocol`.

    Routes are those between `hosts`; with `stores` those that have a store at an end, as hosts send to no others then.

    >>> from netsim import Protocol, Topology
    >>> topology = Topology.from_mapping({"hosts": ["a", "b"], "links": [
    ...     {"between": ["a", "b"], "bandwidth": "1 Gbit/s", "rtt": "90 ms"}]})
    >>> enough_streams(topology, Protocol.parse("linux-tcp"), [0, 1]).streams
    3
    """
    if not protocol.has_windows:
        return None
    rates = protocol.payload_bytes_per_second(topology), protocol.process_limits(topology)
    of_store = set(stores)
    alike: dict[tuple[int, bool], list[int]] = {}
    for host in dict.fromkeys((*hosts, *of_store)):
        alike.setdefault((topology.host_kinds[host], host in of_store), []).append(host)
    ends = [host for of_kind in alike.values() for host in of_kind[:2]]  # two stand for all of a kind
    pairs = (pair for pair in itertools.permutations(ends, 2) if not of_store or of_store.intersection(pair))
    routes = (_limit_between(src, dst, topology, protocol, rates)[1] for src, dst in pairs)
    return max(routes, key=lambda route: route.streams, default=None)


def spare_streams(
    topology: Topology, protocol: Protocol, hosts: Iterable[int], stores: Iterable[int] = ()
) -> str | None:
    """Line on streams that were asked for and bring nothing, as fewer fill every route; else None.

    Routes are those between `hosts`, or from and to `stores`: see `enough_streams`.

    >>> from netsim import Protocol, Topology
    >>> topology = Topology.from_mapping({"hosts": ["a", "b"], "links": [
    ...     {"between": ["a", "b"], "bandwidth": "1 Gbit/s", "rtt": "90 ms"}]})
    >>> print(spare_streams(topology, Protocol.parse({"streams": 64}), [0, 1]))
    streams: 64 bring large transfers no more than 3, which fill every route (the last one a to b with 956.4 Mbit/s)
    >>> spare_streams(topology, Protocol.parse({"streams": 3}), [0, 1])
    """
    if protocol.streams <= PRESETS.get(protocol.name, protocol).streams:
        return None
    most = enough_streams(topology, protocol, hosts, stores)
    if most is None or most.streams >= protocol.streams:
        return None
    return (
        f"streams: {protocol.streams} bring large transfers no more than {most.streams}, which {most.fills}"
    )


def unlimited_cores(topology: Topology, protocol: Protocol, hosts: Iterable[int]) -> str | None:
    """Line on cores, which may limit TCP where all links between `hosts` are of 10 Gbit/s and more; else None.

    >>> from netsim import Protocol, Topology
    >>> topology = Topology.from_mapping({"hosts": ["a", "b"], "links": [
    ...     {"between": ["a", "b"], "bandwidth": "25 Gbit/s", "rtt": "0.1 ms"}]})
    >>> print(unlimited_cores(topology, Protocol.parse("linux-tcp"), [0, 1]))  # doctest: +ELLIPSIS
    cores: not modelled, ...
    """
    if not protocol.has_windows or protocol.core_bits_per_second < math.inf:
        return None
    alike: dict[int, list[int]] = {}
    for host in dict.fromkeys(hosts):
        alike.setdefault(topology.host_kinds[host], []).append(host)
    ends = [host for of_kind in alike.values() for host in of_kind[:2]]  # two stand for all of a kind
    used = {index for pair in itertools.permutations(ends, 2) for index in topology.route(*pair)}
    links = [topology.links[index] for index in used]
    if not links or any(link.measured_streams or link.bits_per_second < 10e9 for link in links):
        return None
    return (
        "cores: not modelled, and may limit TCP over links of 10 Gbit/s and more: hosts measured on 25 to 100 Gbit/s "
        "moved 3 to 9 Gbit/s by gloo, 10 to 48 by NCCL"
    )


def _limit_between(
    src: int, dst: int, topology: Topology, protocol: Protocol, rates: tuple[Sequence[float], Sequence[float]]
) -> tuple[float, WindowLimit]:
    """Bytes that the window lets through at once between two hosts, and how it limits longer messages, if it does.

    `rates` are those of links, and of hosts' processes.
    """
    route = topology.route(src, dst)
    links = [topology.links[index] for index in route]
    round_trip = topology.route_latency_seconds(src, dst) + topology.route_latency_seconds(dst, src)
    window, loss = protocol.transfer_window(links, round_trip), 0.0
    segments = protocol.over(links).segment_bytes * protocol.streams
    lost = 1.0 - math.prod(1.0 - link.loss for link in links if not link.measured_streams)
    if lost and (kept := MEAN_WINDOWS[protocol.congestion](lost, round_trip) * segments) < window:
        window, loss = kept, lost  # loss keeps it below what the protocol allows
    untouched = max(window, segments / loss if loss else 0.0)
    of_links, of_processes = rates
    link = min(of_processes[src], of_processes[dst], *(of_links[index] for index in route)) * 8
    needed = link / 8 * round_trip
    return untouched, WindowLimit(
        topology.hosts[src].name,
        topology.hosts[dst].name,
        round_trip,
        window * 8 / round_trip if round_trip else math.inf,
        link,
        math.ceil(needed * protocol.streams / window * _ALL) or 1,
        math.ceil(needed / protocol.streams),
        loss,
        not loss and protocol.stream_windows(links, round_trip)[1] * protocol.streams <= window,
    )
