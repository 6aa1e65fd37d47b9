"""Copies of a network that go their own way, and what they bring back.

A collective that has a network to itself is played on a copy, ahead of time or after the fact. These
functions know the inside of `Network`, so that others need not.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from netsim.network import Network
from netsim.rates import Rates

if TYPE_CHECKING:
    import simpy

    from netsim.fairness import FloatArray
    from netsim.paths import PathTable
    from netsim.tcp import Window

__all__ = [
    "Windows",
    "Wires",
    "credit",
    "end_show",
    "fork",
    "put_windows",
    "show",
    "take_over",
    "unseen",
    "window_states",
    "windows_of",
    "wires_of",
]

# Source host, target host and connection -> its window.
Windows = Mapping[tuple[int, int, Hashable], "Window"]


@dataclass(frozen=True)
class Wires:
    """Links and routes as they are at present, for those who reckon without events.

    Attributes:
        route: link indices from one host to another.
        latency_seconds: of each link.
        bytes_per_second: payload each link carries.
        software_seconds: added to the latency of each message between hosts.
    """

    route: Callable[[int, int], Sequence[int]]
    latency_seconds: FloatArray
    bytes_per_second: FloatArray
    software_seconds: float = 0.0


_MOVES = (
    "_transfers",
    "_sent",
    "_rates",
    "_channels",
    "_of_slot",
    "_callbacks",
    "_slots",
    "_next_order",
    "_paths",
)


def fork(network: Network, env: simpy.Environment, shift_seconds: float = 0.0) -> Network:
    """A copy of a network that carries nothing, on another clock: same links as they are now, same connections.

    Its clock shows `shift_seconds` more than the original's; nobody observes it, and no byte has crossed it.
    """
    copied = Network(env, network.topology, network.protocol)
    copied._paths = _copied_paths(network._paths)
    copied._capacity = network._capacity
    copied._rates = Rates(copied._capacity)
    copied._next_number = network._next_number
    copied._next_order = network._next_order
    for key, channel in network._channels.items():
        if channel.window is not None:
            own = copied._paths.paths[channel.path.index]
            window = channel.window.moved(shift_seconds)
            copied._channels[key] = type(channel)(key, own, window, is_background=channel.is_background)
    return copied


def _copied_paths(paths: PathTable) -> PathTable:
    copied = copy(paths)
    copied.paths = [replace(path, num_bytes=0.0, background_bytes=0.0) for path in paths.paths]
    copied._by_hosts = {(path.source, path.target): path for path in copied.paths}
    copied.links = paths.links.copy()
    copied.back = paths.back.copy()
    return copied


def show(network: Network) -> Network:
    """A copy on the same clock that only those see who observe the original."""
    shown = fork(network, network.env)
    shown._observers = network._observers
    return shown


def end_show(shown: Network) -> None:
    """Nobody looks at the copy any more."""
    shown._observers = []


@contextmanager
def unseen(network: Network) -> Iterator[None]:
    """What is sent in here has been seen already, on a copy that was shown."""
    observers, network._observers = network._observers, []
    try:
        yield
    finally:
        network._observers = observers


def take_over(network: Network, other: Network) -> None:
    """Have a network that carries nothing go on from where its copy has come; both clocks show the same time."""
    for path, own in zip(other._paths.paths, network._paths.paths, strict=False):
        path.num_bytes += own.num_bytes
        path.background_bytes += own.background_bytes
    for name in _MOVES:
        setattr(network, name, getattr(other, name))
    network._call_at(network.env.now)


def window_states(network: Network, group: Hashable, instant: float) -> tuple[Hashable, ...]:
    """What sets the connections of a group apart from others in the same state, times counted from `instant`."""
    return tuple(
        (key, channel.window.state(instant))
        for key, channel in network._channels.items()
        if channel.window is not None and key == (channel.path.index, group)
    )


def windows_of(network: Network, group: Hashable) -> Windows:
    """The windows of a group's connections."""
    return {
        (channel.path.source, channel.path.target, group): channel.window
        for key, channel in network._channels.items()
        if channel.window is not None and key == (channel.path.index, group)
    }


def put_windows(network: Network, windows: Windows, shift_seconds: float) -> None:
    """Give connections these windows, their times shifted."""
    for (src, dst, connection), window in windows.items():
        channel = network._channel(network._paths.between(src, dst), connection)
        channel.window = window.moved(shift_seconds)


def credit(network: Network, src: int, dst: int, num_bytes: float) -> None:
    """Count bytes that have gone from host `src` to host `dst` on the links between them."""
    network._paths.between(src, dst).num_bytes += num_bytes


def wires_of(network: Network) -> Wires:
    """The links as they are now."""
    paths = network._paths
    return Wires(
        route=lambda src, dst: paths.between(src, dst).links,
        latency_seconds=paths.latency_seconds,
        bytes_per_second=network._capacity.payload_bytes_per_second[:-1],
        software_seconds=network.protocol.software_seconds,
    )
