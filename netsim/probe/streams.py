"""Bytes from one host to another, as counted by the receiver and the kernel."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from netsim.files.signed import PeerAddress, PeerError, SignedChannel, connect_peer

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["SERVICE", "Arrivals", "KernelFacts", "call", "drain", "echo", "goodput", "ping", "send"]

SERVICE = "netsim probe"
"""Name of the service at which hosts of a probe reach each other."""

_BLOCK = os.urandom(1 << 18)  # incompressible
_UNSENT_BYTES = 1 << 17  # most bytes in the sending kernel that are not in flight
_TCP_NOTSENT_LOWAT = getattr(socket, "TCP_NOTSENT_LOWAT", 25)
_NUM_PINGS, _NUM_CONNECTIONS = 20, 3
_SLICES = 5
_SAMPLE_SECONDS = 0.01
_LARGEST_SEGMENT = 9000


@dataclass(frozen=True)
class KernelFacts:
    """Figures of a connection from Linux (TCP_INFO); zeros on other systems.

    Attributes:
        rtt_seconds: smoothed round trip.
        least_rtt_seconds: smallest round trip, the handshake's included, which no slow program lengthens.
        sent: segments with data sent, retransmissions included.
        again: segments retransmitted.
        arrived: segments with data received, duplicates and those behind a gap included.
        segment_bytes: payload of a full received segment.
        mtu_bytes: largest packet of the route as the kernel found it, IP header included.
    """

    rtt_seconds: float = 0.0
    least_rtt_seconds: float = 0.0
    sent: int = 0
    again: int = 0
    arrived: int = 0
    segment_bytes: int = 0
    mtu_bytes: int = 0

    @classmethod
    def of(cls, opened: socket.socket) -> KernelFacts:
        """Read the figures of an open connection."""
        option = getattr(socket, "TCP_INFO", None)
        if option is None or not hasattr(os, "sched_getaffinity"):  # the layout below is Linux's
            return cls()
        raw = opened.getsockopt(socket.IPPROTO_TCP, option, 256)
        if len(raw) < 160:
            return cls()
        rtt, least, *counts = (
            struct.unpack_from("=I", raw, at)[0] for at in (68, 148, 156, 100, 152, 20, 60)
        )
        sends = struct.unpack_from("=I", raw, 16)[0]  # at most, of what the other end accepts
        headers = (60 if opened.family == socket.AF_INET6 else 40) + (12 if raw[5] & 1 else 0)  # time stamps
        counts[-1] = min(counts[-1], sends + headers)
        return cls(rtt * 1e-6, 0.0 if least == 0xFFFFFFFF else least * 1e-6, *counts)


@dataclass
class Arrivals:
    """Bytes received in one measurement: for each stream (instant, bytes so far)."""

    streams: list[list[tuple[float, int]]] = field(default_factory=list)
    num_open: int = 0
    changed: threading.Condition = field(default_factory=threading.Condition)

    def wait(self, num_streams: int, seconds: float) -> None:
        """Wait until `num_streams` streams have arrived and ended; raises PeerError after `seconds`."""
        with self.changed:
            if not self.changed.wait_for(
                lambda: len(self.streams) >= num_streams and not self.num_open, seconds
            ):
                raise PeerError(
                    f"{len(self.streams)} of {num_streams} streams have ended, {self.num_open} have not"
                )


def goodput(
    streams: Sequence[Sequence[tuple[float, int]]], seconds: float, warm_seconds: float
) -> tuple[float, float]:
    """Goodput in bits per second after the warm-up, and the relative spread (largest - smallest) over its fifths.

    Args:
        streams: (instant, bytes so far) of each stream.
        seconds: duration of sending, from the first byte.
        warm_seconds: warm-up, which is left out.

    >>> goodput([[(0.0, 0), (1.0, 100), (2.0, 1100)], [(0.0, 0), (2.0, 2000)]], 2.0, 1.0)[0] / 8
    2000.0
    """
    start = min(stream[0][0] for stream in streams)
    end = min(start + seconds, *(stream[-1][0] for stream in streams))
    begin = min(start + warm_seconds, start + (end - start) / 2)
    if end <= begin:
        return 0.0, 1.0
    instants = np.linspace(begin, end, _SLICES + 1)
    totals = np.sum([np.interp(instants, *np.array(stream).T) for stream in streams], axis=0)
    rates = np.diff(totals) * _SLICES / (end - begin)
    mean = float(rates.mean())
    return mean * 8, float(np.ptp(rates)) / mean if mean else 1.0


def drain(channel: SignedChannel, arrivals: Arrivals, seconds: float) -> None:
    """Receive one stream to its end, or for at most `seconds`.

    It counts full segments received by the kernel, where that reports them: after losses a program reads in jumps, and
    data behind a gap may have arrived long before.
    """
    samples: list[tuple[float, int, KernelFacts]] = []  # instant, bytes read
    with arrivals.changed:
        arrivals.num_open += 1
    opened, total = channel.socket, 0
    buffer, deadline = memoryview(bytearray(1 << 20)), time.monotonic() + seconds
    opened.settimeout(2 * _SAMPLE_SECONDS)
    try:
        while time.monotonic() < deadline:
            with contextlib.suppress(TimeoutError):
                got = opened.recv_into(buffer)
                if not got:
                    break
                total += got
            now = time.monotonic()
            if total and (not samples or now - samples[-1][0] >= _SAMPLE_SECONDS):
                samples.append((now, total, KernelFacts.of(opened)))
    except OSError:
        pass
    with contextlib.suppress(OSError):
        samples.append((time.monotonic(), total, KernelFacts.of(opened)))
    size = max((kernel.segment_bytes for _, _, kernel in samples), default=0)
    is_counted = 0 < size <= _LARGEST_SEGMENT  # loopback's are of any size
    stream = [(instant, kernel.arrived * size if is_counted else read) for instant, read, kernel in samples]
    with arrivals.changed:
        arrivals.streams.append(stream or [(time.monotonic(), 0)])
        arrivals.num_open -= 1
        arrivals.changed.notify_all()


def call(place: PeerAddress, secret: bytes, name: str, seconds: float) -> SignedChannel:
    """Open a channel to a host of the probe; raises as `netsim.files.signed.connect_peer` does."""
    return connect_peer(place, secret, SERVICE, f"{name} ({place[0]}:{place[1]})", seconds)


def send(
    targets: Sequence[tuple[str, PeerAddress, str, int]], secret: bytes, seconds: float, most_bytes: int
) -> dict[str, Any]:
    """Send to all targets at once, for `seconds` or until `most_bytes` have been sent.

    Args:
        targets: (name, place, id of the measurement, number of streams) of each.
        secret: of the probe.
        seconds: duration.
        most_bytes: most bytes of all streams together.

    Returns:
        `rtt` (largest smoothed one, in seconds), `sent` and `again` (segments of all streams), `mtu` (least one, in
        bytes; 0: unknown), `busy` (share of a core that this process used), `machine` (share of this host's processors
        in use by all processes).

    Raises:
        PeerError: a target cannot be reached.
    """
    channels: list[SignedChannel] = []
    try:
        for name, place, number, num_streams in targets:
            for _ in range(num_streams):
                channels.append(call(place, secret, name, 15.0))
                channels[-1].send(role="data", id=number, seconds=seconds)
        go, ends = threading.Event(), list[KernelFacts]()
        share = most_bytes // len(channels)
        threads = [
            threading.Thread(target=_push, args=(channel.socket, go, seconds, share, ends), daemon=True)
            for channel in channels
        ]
        for thread in threads:
            thread.start()
        began, used, before = time.monotonic(), time.process_time(), _processors()
        go.set()
        for thread in threads:
            thread.join(max(began + seconds + 5.0 - time.monotonic(), 0.0))
        busy = (time.process_time() - used) / max(time.monotonic() - began, 1e-6)
        total, idle = (after - past for after, past in zip(_processors(), before, strict=True))
    finally:
        for channel in channels:
            channel.close()
    return {
        "rtt": max((end.rtt_seconds for end in ends), default=0.0),
        "sent": sum(end.sent for end in ends),
        "again": sum(end.again for end in ends),
        "mtu": min((end.mtu_bytes for end in ends), default=0),
        "busy": busy,
        "machine": 1.0 - idle / total if total else 0.0,
    }


def _processors() -> tuple[int, int]:
    """Ticks of all processors so far, and idle ticks among them; zeros if unavailable."""
    try:
        with open("/proc/stat") as file:
            ticks = [int(word) for word in file.readline().split()[1:9]]
    except (OSError, ValueError):
        return 0, 0
    return sum(ticks), ticks[3] + ticks[4]


def _push(
    opened: socket.socket, go: threading.Event, seconds: float, most_bytes: int, ends: list[KernelFacts]
) -> None:
    with contextlib.suppress(OSError):
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 0)  # segments are full
        # Few bytes should remain unsent at the end, whatever the kernel's buffers are.
        opened.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
    opened.settimeout(seconds + 2.0)
    go.wait()
    deadline, left, block = time.monotonic() + seconds, most_bytes, memoryview(_BLOCK)
    with contextlib.suppress(OSError):
        while left > 0 and time.monotonic() < deadline:
            left -= opened.send(block[:left])
        ends.append(KernelFacts.of(opened))
        opened.shutdown(socket.SHUT_WR)


def ping(place: PeerAddress, secret: bytes, name: str) -> float:
    """Measure the least round trip in seconds: of handshakes (Linux), and of single bytes that the other end echoes."""
    trips = []
    for _ in range(_NUM_CONNECTIONS):
        channel = call(place, secret, name, 15.0)
        try:
            channel.send(role="echo")
            opened = channel.socket
            opened.settimeout(15.0)
            for _ in range(_NUM_PINGS):
                began = time.monotonic()
                opened.sendall(b".")
                if not opened.recv(1):
                    raise PeerError(f"{channel.name}: closed the connection")
                trips.append(time.monotonic() - began)
            least = KernelFacts.of(opened).least_rtt_seconds
            if least > 0:
                trips.append(least)
        except OSError as error:
            raise PeerError(f"{channel.name}: gave no answer ({error.strerror or error})") from None
        finally:
            channel.close()
    return min(trips)


def echo(channel: SignedChannel) -> None:
    """Echo single bytes until the ping ends."""
    channel.socket.settimeout(30.0)
    with contextlib.suppress(OSError):
        for _ in range(_NUM_PINGS):
            byte = channel.socket.recv(1)
            if not byte:
                return
            channel.socket.sendall(byte)
        channel.socket.recv(1)  # the other end closes first
