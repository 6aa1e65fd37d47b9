"""Copies of a network that go their own way, and what they bring back.

A collective that has a network to itself is played on a copy, ahead of time or after the fact. These
functions know the inside of `Network`, so that others need not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from netsim.fluid.network import Network
from netsim.fluid.rates import Rates

if TYPE_CHECKING:
    import simpy

    from netsim.fluid.channel import Channel
    from netsim.fluid.fairness import FloatArray
    from netsim.fluid.outage import Waiting
    from netsim.fluid.paths import PathTable
    from netsim.fluid.tcp import Window
    from netsim.topology.protocol import Protocol

__all__ = [
    "Windows",
    "Wires",
    "callbacks",
    "carry_over",
    "conditions_of",
    "credit",
    "delivered_bytes",
    "end_show",
    "flight_state",
    "fork",
    "links_in_use",
    "put_windows",
    "show",
    "window_states",
    "windows_of",
    "wires_of",
]

# Source host and target host -> the window of a group's connection.
Windows = Mapping[tuple[int, int], "Window"]


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


_Call = Callable[[], None]
_VALUES = ("size", "remaining", "rate", "stop", "cap")
_INSTANTS = ("due", "timer", "begun", "since")


def fork(network: Network, env: simpy.Environment) -> Network:
    """A copy of a network that carries nothing and knows no connections, on another clock; links are as here now.

    Nobody observes it, and no byte has crossed it. What changes on the original's links changes here.
    """
    copied = Network(env, network.topology, network.protocol)
    copied._paths = _copied_paths(network._paths)
    copied._capacity = network._capacity
    copied._rates = Rates(copied._capacity)
    copied.on_give_up = _no_matter
    return copied


def _no_matter(waiting: Waiting) -> None:
    """What a copy gives up is its original's to judge."""


def _copied_paths(paths: PathTable) -> PathTable:
    copied = copy(paths)
    copied.paths = [replace(path, num_bytes=0.0, background_bytes=0.0) for path in paths.paths]
    copied._by_hosts = {(path.source, path.target): path for path in copied.paths}
    copied.links = paths.links.copy()
    copied.back = paths.back.copy()
    return copied


def show(network: Network) -> Network:
    """A copy on the same clock, with the same connections, that only those see who observe the original."""
    shown = fork(network, network.env)
    for key, channel in network._channels.items():
        if channel.window is not None:
            own = shown._paths.paths[channel.path.index]
            window = channel.window.moved(0.0)
            shown._channels[key] = type(channel)(key, own, window, is_background=channel.is_background)
    shown._observers = network._observers
    return shown


def end_show(shown: Network) -> None:
    """Nobody looks at the copy any more."""
    shown._observers = []


def carry_over(
    network: Network,
    other: Network,
    shift_seconds: float,
    rebind: Callable[[_Call], _Call],
    renumber: Callable[[int], int],
) -> None:
    """Put what one network carries on another one, as far as it has come, and connections as they are.

    Args:
        network: from where; it stays as it is.
        other: to where; its clock shows `shift_seconds` more. Who observes it has seen all that is in flight.
        rebind: what is to be called there instead of a callback here.
        renumber: the id there of a transfer here.
    """
    for channel in network._channels.values():
        if channel.window is not None and not channel.queue:
            _channel_like(channel, other, 0).window = channel.window.moved(shift_seconds)
    for number, slot in network._slots.items():
        channel = _channel_like(network._of_slot[slot], other, renumber(number))
        if not channel.queue and channel.window is not None:
            window = network._of_slot[slot].window
            assert window is not None
            channel.window = window.moved(shift_seconds)
        place = _put(network, slot, other, channel, shift_seconds)
        other._transfers.number[place] = renumber(number)
        other._slots[renumber(number)] = place
        on_delivered, on_sent, on_dropped = network._callbacks[number]
        assert on_dropped is None
        sent = None if on_sent is None else rebind(on_sent)
        other._callbacks[renumber(number)] = (rebind(on_delivered), sent, None)
    moving = np.array([renumber(number) for number, slot in network._slots.items() if slot in network._rates])
    for observer in other._observers if moving.size else ():
        observer.rates_changed(moving, np.zeros(moving.size))  # until they are found there
    for number, (_, call) in network._untold.items():
        order = int(other._transfers.order[other._slots[renumber(number)]])
        other._untold[renumber(number)] = (order, rebind(call))
    if network._turn_at < math.inf:
        other._call_at(other.env.now)  # to find rates


def _channel_like(channel: Channel, other: Network, number: int) -> Channel:
    """The connection of another network that stands for one of a network."""
    path = other._paths.between(channel.path.source, channel.path.target)
    return other._channel(path, connection_of(channel, other.protocol), number, channel.most_bytes_per_second)


def connection_of(channel: Channel, protocol: Protocol) -> Hashable:
    """What its sender calls a connection."""
    name: Hashable = channel.key[1]  # type: ignore[index]
    return name[0] if protocol.connections == "per-transfer" else name  # type: ignore[index]


def _put(network: Network, slot: int, other: Network, channel: Channel, shift_seconds: float) -> int:
    """Give a transfer a slot on another network, on a connection there."""
    mine, theirs = network._transfers, other._transfers
    place = theirs.take()
    if place == len(other._of_slot):
        other._of_slot.append(channel)
    other._of_slot[place] = channel
    for name in _VALUES:
        getattr(theirs, name)[place] = getattr(mine, name)[slot]
    for name in _INSTANTS:
        getattr(theirs, name)[place] = getattr(mine, name)[slot] + shift_seconds
    if slot in network._rates:
        # Its rate is found there: until then it drains nothing, and is due if it was.
        other._rates.join(place, channel.path, float(mine.cap[slot]))
        theirs.remaining[place] = mine.remaining_at(np.array([slot]), network.env.now)[0]
        theirs.rate[place], theirs.since[place] = 0.0, other.env.now
        if mine.due[slot] > network.env.now:
            theirs.due[place] = theirs.timer[place]
    theirs.set_due(place, float(theirs.due[place]))
    theirs.path[place] = channel.path.index
    theirs.order[place] = other._next_order
    other._next_order += 1
    if slot in mine.held:
        theirs.held.add(place)
    channel.queue.append(place)
    channel.backlog += float(mine.size[slot])
    return place


def flight_state(network: Network, describe: Callable[[_Call], Hashable]) -> Hashable:
    """What sets a network apart from others of the same links: connections, and what is in flight on them."""
    now, transfers = network.env.now, network._transfers
    told = tuple((describe(call)) for _, call in network._untold.values())
    channels = []
    for channel in network._channels.values():
        queue = []
        for slot in channel.queue:
            on_delivered, on_sent, _ = network._callbacks[int(transfers.number[slot])]
            waits = None if on_sent is None else describe(on_sent)
            timer, left = float(transfers.timer[slot]) - now, float(transfers.size[slot])
            drains = slot in network._rates
            if drains:
                left = float(transfers.remaining[slot] - transfers.rate[slot] * (now - transfers.since[slot]))
            in_bytes = (left, float(transfers.stop[slot]), float(transfers.cap[slot]))
            numbers = (*(round(each, 4) for each in in_bytes), round(timer + 1.7e-10, 9))
            queue.append((drains, *numbers, describe(on_delivered), waits))
        window = channel.window and (
            channel.window.state(now) if queue else _window_state(channel.window, now, network.protocol)
        )
        if queue or window is not None:
            ends = channel.path.source, channel.path.target
            channels.append((*ends, connection_of(channel, network.protocol), window, tuple(queue)))
    return told, frozenset(channels)


def delivered_bytes(network: Network) -> Iterator[tuple[int, int, float]]:
    """Source host, target host and bytes of each path on which transfers have come through."""
    for path in network._paths.paths:
        if path.num_bytes:
            yield path.source, path.target, path.num_bytes


def callbacks(network: Network) -> Iterator[_Call]:
    """What is to be called for what is in flight."""
    for on_delivered, on_sent, _ in network._callbacks.values():
        yield on_delivered
        if on_sent is not None:
            yield on_sent
    for _, call in network._untold.values():
        yield call


def conditions_of(network: Network, links: Sequence[int]) -> Hashable:
    """What these links are like at present."""
    paths, chosen = network._paths, list(links)
    arrays = (network._capacity.payload_bytes_per_second, paths.latency_seconds, paths.loss)
    return tuple(links), *(tuple(array[chosen].tolist()) for array in arrays)


def links_in_use(network: Network) -> Iterator[tuple[int, ...]]:
    """The links that transfers in flight cross, and those of their ways back."""
    for slot in network._slots.values():
        path = network._of_slot[slot].path
        yield path.links
        yield path.back


def window_states(network: Network, group: Hashable, instant: float) -> Hashable:
    """What sets the connections of a group apart from new ones, times counted from `instant`."""
    return frozenset(
        (source, target, state)
        for (source, target), window in windows_of(network, group).items()
        if (state := _window_state(window, instant, network.protocol)) is not None
    )


def _window_state(window: Window, instant: float, protocol: Protocol) -> Hashable:
    """What sets a connection apart from a new one; None where nothing does."""
    if not window.is_as_new(instant):
        return window.state(instant)
    # Who waits for the socket's buffer alone goes on sooner once that has grown.
    return window.buffer_bytes if protocol.rendezvous else None


def windows_of(network: Network, group: Hashable) -> Windows:
    """The windows of a group's connections."""
    return {
        (channel.path.source, channel.path.target): channel.window
        for key, channel in network._channels.items()
        if channel.window is not None and key == (channel.path.index, group)
    }


def put_windows(network: Network, group: Hashable, windows: Windows, shift_seconds: float) -> None:
    """Give a group's connections these windows, their times shifted."""
    for (src, dst), window in windows.items():
        channel = network._channel(network._paths.between(src, dst), group)
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
