"""How simulated transfers use links: named presets, and mappings that change single settings of one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from netsim.files.errors import InputError, unknown_name, unknown_names
from netsim.files.units import parse_bytes, parse_seconds

__all__ = ["PRESETS", "Protocol"]

_SEGMENT_BYTES = 1448  # payload of a full frame: 1500 bytes less IPv4 (20), TCP (20) and its time stamp (12)
_FRAME_BYTES = 1514  # what such a frame counts on the wire, Ethernet header included
_ACK_BYTES = (
    66  # a frame that carries an acknowledgement only; one for every two segments (RFC 1122, 4.2.3.2)
)


@dataclass(frozen=True, slots=True)
class Protocol:
    """What a protocol takes from the ideal network, and what it asks of collectives.

    Attributes:
        name: the preset it was made from.
        slow_start: windows start small and double every round trip (see `netsim.network.tcp`); False: no window at
            all.
        segment_bytes: payload of a full packet.
        initial_window_bytes: payload that may leave in the first round trip, per stream.
        window_bytes: most payload in flight, per stream; what the send buffer allows.
        streams: parallel connections that one transfer is spread over.
        connections: `persistent` ones keep their window between transfers; `per-transfer` ones are opened for
            each transfer, which costs a handshake of one round trip and starts from the initial window.
        queue_packets: full packets that the queue of the narrowest link holds before it drops; None: enough for
            any window.
        quick_acks: receivers acknowledge each of the first segments at once, not every second one.
        minimum_timeout_seconds: least retransmission time-out; idling longer than it plus a round trip
            shrinks the window.
        payload_share: payload bytes per byte on the wire, 1 where bandwidth counts payload.
        ack_share: bytes on the wire in the other direction per byte of payload.
        rtt_bias: transfers with longer round trips get smaller shares.
        rendezvous: data leave only when the receiver's note has arrived; honoured by collectives.
        software_seconds: what sending one message costs besides the network, added to its latency.
        collectives_in_flight: collectives of one group that run at once; honoured by the kernel.
        give_up_seconds: a connection is given up when a dead link has let no byte of its transfer through for
            longer.
    """

    name: str = "ideal"
    slow_start: bool = False
    segment_bytes: float = _SEGMENT_BYTES
    initial_window_bytes: float = math.inf
    window_bytes: float = math.inf
    streams: int = 1
    connections: Literal["persistent", "per-transfer"] = "persistent"
    queue_packets: float | None = None
    quick_acks: bool = False
    minimum_timeout_seconds: float = 0.2
    payload_share: float = 1.0
    ack_share: float = 0.0
    rtt_bias: bool = False
    rendezvous: bool = False
    software_seconds: float = 0.0
    collectives_in_flight: int = 1
    give_up_seconds: float = math.inf

    @classmethod
    def parse(cls, spec: str | Mapping[str, Any] | Protocol | None) -> Protocol:
        """The protocol that `spec` stands for: a name, a mapping or nothing (`ideal`).

        A mapping names a `preset` (default `ideal`) and may set `streams`, `window` (bytes per stream),
        `connections`, `queue` (packets; if not given, it grows with `window`) and `software` (seconds per message).

        Raises UnknownNameError for a preset, key or choice that does not exist and InputError for a bad
        value.

        >>> Protocol.parse({"preset": "linux-tcp", "streams": 8, "window": "4 MiB"}).streams
        8
        """
        if spec is None:
            return PRESETS["ideal"]
        if isinstance(spec, Protocol):
            return spec
        if isinstance(spec, str):
            return _preset(spec)
        if not isinstance(spec, Mapping):
            raise InputError(f"protocol: expected a name or a mapping, got {spec!r}")
        settings = {str(key): value for key, value in spec.items()}
        preset = settings.pop("preset", "ideal")
        if not isinstance(preset, str):
            raise InputError(f"protocol: preset must be a name, got {preset!r}")
        base = _preset(preset)
        changes: dict[str, Any] = {}
        unknown = [key for key in settings if key not in _SETTINGS]
        if unknown:
            raise unknown_names("key in protocol", unknown, [*_SETTINGS, "preset"])
        for key, value in settings.items():
            field, read = _SETTINGS[key]
            try:
                changes[field] = read(value)
            except InputError as error:
                raise type(error)(f"protocol: {key}: {error}") from None
        if "window" in settings and "queue" not in settings and base.queue_packets is not None:
            # Who tunes hosts for larger windows does so for paths that hold them.
            larger = max(changes["window_bytes"] / base.window_bytes, 1.0)
            changes["queue_packets"] = base.queue_packets * larger
        return replace(base, **changes)

    def to_mapping(self) -> dict[str, Any]:
        """Every setting by name, as plain values for records."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def is_plain(self) -> bool:
        """Whether a message alone takes its latency and then the rate of its narrowest link, whatever was before."""
        per_transfer = self.connections == "per-transfer"
        return not (self.has_windows or self.rendezvous or self.ack_share or per_transfer)

    @property
    def has_windows(self) -> bool:
        """Whether transfers have anything but latency and fair shares to wait for."""
        return self.slow_start or self.window_bytes < math.inf


def _preset(name: str) -> Protocol:
    if name not in PRESETS:
        raise unknown_name("protocol", name, PRESETS)
    return PRESETS[name]


def _read_count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"expected a whole number of at least 1, got {value!r}")
    return value


def _read_window(value: Any) -> int:
    window = parse_bytes(value)
    if window < _SEGMENT_BYTES:
        raise InputError(f"expected at least one segment of {_SEGMENT_BYTES} bytes, got {value!r}")
    return window


def _read_connections(value: Any) -> str:
    if value not in ("persistent", "per-transfer"):
        raise unknown_name("choice", str(value), ["persistent", "per-transfer"])
    return str(value)


_SETTINGS: dict[str, tuple[str, Any]] = {
    "streams": ("streams", _read_count),
    "window": ("window_bytes", _read_window),
    "connections": ("connections", _read_connections),
    "queue": ("queue_packets", _read_count),
    "software": ("software_seconds", parse_seconds),
}

_LINUX_TCP = Protocol(
    name="linux-tcp",
    slow_start=True,
    initial_window_bytes=10 * _SEGMENT_BYTES,  # RFC 6928
    window_bytes=4 * 2**20,  # largest send buffer by default: the third number of net.ipv4.tcp_wmem
    queue_packets=1000,  # the default of Linux's interfaces (txqueuelen)
    payload_share=_SEGMENT_BYTES / _FRAME_BYTES,
    ack_share=_ACK_BYTES / (2 * _SEGMENT_BYTES),
    rtt_bias=True,
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
        collectives_in_flight=2,
    ),
    "ideal": Protocol(),
    "linux-tcp": _LINUX_TCP,
}
