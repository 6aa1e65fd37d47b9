"""Transfers that a crash ends, a dead link holds up, or a change of their path meets.

Knows the inside of `Network`, so that others need not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from netsim.files.errors import DeadlockError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator

    from netsim.fluid.channel import Channel
    from netsim.fluid.network import Network
    from netsim.fluid.paths import Path

__all__ = [
    "Waiting",
    "can_go_on",
    "dead_links",
    "drop_transfers",
    "end_connections",
    "end_transfer",
    "follow_paths",
    "give_up",
    "go_on_unless_cut",
    "hold_if_cut",
    "is_cut",
    "is_dead_end",
    "is_in_flight",
    "may_give_up",
    "not_given_up",
    "take_arrivals",
    "transfers_waiting",
]


@dataclass(frozen=True, slots=True)
class Waiting:
    """A transfer that no byte of can move.

    Attributes:
        number: its id.
        connection: as its sender calls it.
        source, target: its hosts.
        links: the dead links it would have to cross.
    """

    number: int
    connection: Hashable
    source: int
    target: int
    links: tuple[int, ...]


def dead_links(network: Network) -> frozenset[int]:
    """The links that carry nothing at present."""
    return frozenset(network._capacity.dead)


def is_in_flight(network: Network, transfer: int) -> bool:
    """Whether a transfer is under way."""
    return transfer in network._slots


def take_arrivals(network: Network) -> None:
    """What has come through by now is there, whatever else happens in this instant."""
    network._change_is_due(None)
    network.take_due()
    network._call_at(network.env.now)


def drop_transfers(network: Network, host: int) -> None:
    """End all transfers in flight from and to a host, and forget the state of its connections.

    Those whose sender does not want to hear of it are sent once more, in the same order.
    """
    network._change_is_due(None)
    victims = [
        (number, channel)
        for number, slot in network._slots.items()
        if host in ((channel := network._of_slot[slot]).path.source, channel.path.target)
    ]
    resend: list[Callable[[], int]] = []
    for number, channel in victims:
        on_delivered, on_sent, on_dropped = network._callbacks[number]
        if number in network._untold:  # its sender was about to hear that it need not wait: now it must again
            _, on_sent = network._untold[number]
        size = float(network._transfers.size[network._slots[number]])
        end_transfer(network, number)
        if on_dropped is not None:
            continue
        resend.append(
            partial(
                network.send,
                channel.path.source,
                channel.path.target,
                size,
                on_delivered,
                connection=_connection(network, channel),
                on_sent=on_sent,
                most_bytes_per_second=channel.most_bytes_per_second,
            )
        )
    for key, channel in list(network._channels.items()):
        if host in (channel.path.source, channel.path.target):
            del network._channels[key]
    for send in resend:
        send()


def end_transfer(network: Network, number: int) -> None:
    """End a transfer that is under way by force, and tell its sender if it wants to hear of it."""
    order = int(network._transfers.order[network._slots[number]])
    *_, on_dropped = network._callbacks[number]
    network.abort(number)
    if on_dropped is not None:
        network._untold[number] = (order, on_dropped)


def end_connections(network: Network, connection: Hashable) -> None:
    """End all transfers in flight of connections that their sender calls so; nobody hears of it."""
    network._change_is_due(None)
    for number, slot in list(network._slots.items()):
        if _connection(network, network._of_slot[slot]) == connection:
            network.abort(number)


def follow_paths(network: Network, changed: list[Path]) -> None:
    """Paths have other round trips or losses: what is under way on them goes on accordingly."""
    network.version += 1
    network._call_at(network.env.now)
    indices = {path.index for path in changed}
    for channel in network._channels.values():
        if channel.path.index not in indices:
            continue
        path, window, now = channel.path, channel.window, network.env.now
        slot = channel.queue[0] if channel.queue else -1
        drains = slot in network._rates
        if drains:
            network._rates.change(slot, path.weight, float(network._transfers.cap[slot]))
        if window is None:
            continue
        left, through = network._transfers.drain(slot, now) if drains else (0.0, True)
        if drains:
            window.end(now, left)
        window.follow(path.round_trip_seconds, path.loss)
        if not through and slot not in network._transfers.held:
            network._accept(slot, window.again(now), left, now)


def is_cut(network: Network, path: Path) -> bool:
    """Whether a link of a path is dead; TCP needs the way back as well, for its acknowledgements."""
    links = path.links + path.back if network.protocol.ack_share else path.links
    return not network._capacity.dead.isdisjoint(links)


def is_dead_end(network: Network, source: int, target: int) -> bool:
    """Whether nothing gets from one host to another at present."""
    return is_cut(network, network._paths.between(source, target))


def hold_if_cut(network: Network, slot: int) -> None:
    """Have a window wait whose transfer cannot go on; without windows, a rate of zero says it all."""
    channel, now = network._of_slot[slot], network.env.now
    if channel.window is None or slot in network._transfers.held or not is_cut(network, channel.path):
        return
    left, through = network._transfers.drain(slot, now)
    if not through:
        channel.window.end(now, left)
        network._transfers.hold(slot, now + network.protocol.give_up_seconds)
        network._rates.change(slot, channel.path.weight, 0.0)


def go_on_unless_cut(network: Network, slot: int) -> None:
    """What a dead link held up goes on; a connection that was cut for long starts slowly."""
    channel, now = network._of_slot[slot], network.env.now
    if is_cut(network, channel.path):
        return
    network._transfers.held.discard(slot)
    if channel.window is None or slot not in network._rates:
        network._transfers.set_due(slot, now)
    else:
        left = float(network._transfers.remaining[slot])
        network._transfers.since[slot] = now
        network._accept(slot, channel.window.start(now, left), left, now)


def give_up(network: Network, slot: int) -> None:
    """A transfer has been held up for longer than its protocol waits."""
    network._transfers.hold(slot, math.inf)
    network.on_give_up(_waiting(network, slot, network._of_slot[slot]))


def may_give_up(network: Network) -> bool:
    """Whether links are dead that connections would be given up for: then time matters to what waits."""
    return bool(network._capacity.dead) and network.protocol.give_up_seconds < math.inf


def not_given_up(waiting: Waiting) -> NoReturn:
    """Raise DeadlockError for a transfer that nobody gives up."""
    raise DeadlockError(
        f"transfer {waiting.number} from host {waiting.source} to host {waiting.target} cannot cross "
        f"links {list(waiting.links)}, which are dead for longer than its protocol waits: bring them back in time"
    )


def can_go_on(network: Network, ignored: Callable[[Hashable], bool]) -> bool:
    """Whether a transfer moves or will, those of connections that are `ignored` aside, as the links are now."""
    if network._untold or network._delivered:
        return True
    return any(not _is_stuck(network, slot, channel) for slot, channel in _first(network, ignored))


def transfers_waiting(network: Network, ignored: Callable[[Hashable], bool]) -> list[Waiting]:
    """The transfers that dead links keep from moving, those of connections that are `ignored` aside."""
    return [
        _waiting(network, slot, channel)
        for slot, channel in _first(network, ignored)
        if _is_stuck(network, slot, channel)
    ]


def _waiting(network: Network, slot: int, channel: Channel) -> Waiting:
    path, number = channel.path, int(network._transfers.number[slot])
    crossed = path.links + path.back if network.protocol.ack_share else path.links
    links = tuple(link for link in crossed if network._capacity.is_dead(link))
    return Waiting(number, _connection(network, channel), path.source, path.target, links)


def _first(network: Network, ignored: Callable[[Hashable], bool]) -> Iterator[tuple[int, Channel]]:
    """The transfer under way of each connection."""
    for channel in network._channels.values():
        if channel.queue and not ignored(_connection(network, channel)):
            yield channel.queue[0], channel


def _is_stuck(network: Network, slot: int, channel: Channel) -> bool:
    if slot in network._transfers.held:
        return True
    return slot in network._rates and is_cut(network, channel.path)


def _connection(network: Network, channel: Channel) -> Hashable:
    """What its sender calls a connection."""
    name: Hashable = channel.key[1]  # type: ignore[index]
    if network.protocol.connections == "per-transfer":
        return name[0]  # type: ignore[index,no-any-return]
    return name
