"""What happens to a network while it carries: links change or die, hosts crash, connections are given up."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from netsim.files.errors import DeadlockError, InputError
from netsim.fluid.carrier import TransferCarrier

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Mapping

    import simpy

    from netsim.fluid.channel import Channel
    from netsim.fluid.paths import Path
    from netsim.topology.protocol import Protocol
    from netsim.topology.topology import Topology

__all__ = ["ChangingCarrier", "Waiting", "not_given_up"]


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


class ChangingCarrier(TransferCarrier):
    """A carrier whose links change and whose hosts crash."""

    def __init__(
        self,
        env: simpy.Environment,
        topology: Topology,
        protocol: Protocol | str | Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(env, topology, protocol)
        self.on_give_up: Callable[[Waiting], None] = not_given_up

    # -- links -----------------------------------------------------------------------------------------------

    def set_capacity(self, link: int, bits_per_second: float) -> None:
        """Give a link (index) another capacity from now on; at zero `bits_per_second`, transfers on it stall.

        Raises InputError for a number that is negative or not finite.
        """
        if not 0 <= bits_per_second < math.inf:
            raise InputError(
                f"set_capacity of link {link}: must be finite and not negative, got {bits_per_second}"
            )
        self._change_is_due((link,))
        self._capacity.set(link, bits_per_second)
        self._touch(link)
        self._tell_capacity(link)

    def set_link_up(self, link: int, up: bool) -> None:
        """Let a link (index) carry nothing from now on, or, if `up`, what it did before."""
        self._change_is_due((link,))
        self._capacity.set_up(link, up)
        self._touch(link)
        self._tell_capacity(link)

    def _tell_capacity(self, link: int) -> None:
        for observer in self._observers:
            observer.capacity_changed(link, self._capacity.bits_per_second(link))

    def set_latency(self, link: int, seconds: float) -> None:
        """Give a link (index) another latency, one way, in `seconds`: for what is sent from now on, and windows.

        Raises InputError for a number that is negative or not finite.
        """
        if not 0 <= seconds < math.inf:
            raise InputError(f"set_latency of link {link}: must be finite and not negative, got {seconds}")
        self._change_is_due((link,))
        self._follow_paths(self._paths.set_latency(link, seconds))

    def set_loss(self, link: int, share: float) -> None:
        """Have a link (index) lose another `share` of its packets from now on.

        Raises InputError for a share below 0 or from 1 up.
        """
        if not 0 <= share < 1:
            raise InputError(f"set_loss of link {link}: must be at least 0 and less than 1, got {share}")
        self._change_is_due((link,))
        self._follow_paths(self._paths.set_loss(link, share))

    @property
    def dead_links(self) -> frozenset[int]:
        """The links that carry nothing at present."""
        return frozenset(self._capacity.dead)

    @property
    def may_give_up(self) -> bool:
        """Whether links are dead that connections would be given up for: then time matters to what waits."""
        return bool(self._capacity.dead) and self.protocol.give_up_seconds < math.inf

    def is_dead_end(self, source: int, target: int) -> bool:
        """Whether nothing gets from host `source` to host `target` at present."""
        return self._is_cut(self._paths.between(source, target))

    def _touch(self, link: int) -> None:
        """A link has another capacity."""
        self.version += 1
        self._rates.resize(link)
        self._call_at(self.env.now)
        if self._capacity.is_dead(link):
            for slot in self._rates.on(link):
                self._hold_if_cut(slot)
        else:
            for slot in sorted(self._transfers.held):
                self._go_on_unless_cut(slot)

    def _hold_if_cut(self, slot: int) -> None:
        """Have a window wait whose transfer cannot go on; without windows, a rate of zero says it all."""
        channel, now = self._of_slot[slot], self.env.now
        if channel.window is None or slot in self._transfers.held or not self._is_cut(channel.path):
            return
        left, through = self._transfers.drain(slot, now)
        if not through:
            channel.window.end(now, left)
            self._transfers.hold(slot, now + self.protocol.give_up_seconds)
            self._rates.change(slot, channel.path.weight, 0.0)

    def _go_on_unless_cut(self, slot: int) -> None:
        """What a dead link held up goes on; a connection that was cut for long starts slowly."""
        channel, now = self._of_slot[slot], self.env.now
        if self._is_cut(channel.path):
            return
        self._transfers.held.discard(slot)
        if channel.window is None or slot not in self._rates:
            self._transfers.set_due(slot, now)
        else:
            left = float(self._transfers.remaining[slot])
            self._transfers.since[slot] = now
            self._accept(slot, channel.window.start(now, left), left, now)

    def _follow_paths(self, changed: list[Path]) -> None:
        """Paths have other round trips or losses: what is under way on them goes on accordingly."""
        self.version += 1
        self._call_at(self.env.now)
        indices = {path.index for path in changed}
        for channel in self._channels:
            if channel.path.index in indices:
                self._follow_path(channel)

    def _follow_path(self, channel: Channel) -> None:
        path, window, now = channel.path, channel.window, self.env.now
        slot = channel.queue[0] if channel.queue else -1
        drains = slot in self._rates
        if drains:
            self._rates.change(slot, path.weight, float(self._transfers.cap[slot]))
        if window is None:
            return
        left, through = self._transfers.drain(slot, now) if drains else (0.0, True)
        if drains:
            window.end(now, left)
        window.follow(path.round_trip_seconds, path.loss)
        if not through and slot not in self._transfers.held:
            self._accept(slot, window.again(now), left, now)

    # -- transfers ended by force ----------------------------------------------------------------------------

    def take_arrivals(self) -> None:
        """What has come through by now is there, whatever else happens in this instant."""
        self._change_is_due(None)
        self.take_due()
        self._call_at(self.env.now)

    def drop_transfers(self, host: int) -> None:
        """End all transfers in flight from and to a host, and forget the state of its connections.

        Those whose sender does not want to hear of it are sent once more, in the same order.
        """
        self._change_is_due(None)
        victims = [
            number
            for number, slot in self._slots.items()
            if host in ((path := self._of_slot[slot].path).source, path.target)
        ]
        resend = [again for number in victims if (again := self._drop(number)) is not None]
        for channel in list(self._channels):
            if host in (channel.path.source, channel.path.target):
                self._channels.remove(channel)
        for again in resend:
            again()

    def _drop(self, number: int) -> Callable[[], int] | None:
        """End a transfer by force. Returns what sends it once more, where nobody is told instead."""
        slot = self._slots[number]
        channel = self._of_slot[slot]
        on_delivered, on_sent, on_dropped = self._callbacks[number]
        if number in self._untold:  # its sender was about to hear that it need not wait: now it must again
            _, on_sent = self._untold[number]
        size = float(self._transfers.size[slot])
        self.end_transfer(number)
        if on_dropped is not None:
            return None
        return partial(
            self.send,
            channel.path.source,
            channel.path.target,
            size,
            on_delivered,
            connection=channel.connection,
            on_sent=on_sent,
            most_bytes_per_second=channel.most_bytes_per_second,
        )

    def end_transfer(self, number: int) -> None:
        """End the transfer of id `number`, which is under way, by force; tell its sender if it wants to hear of it."""
        order = int(self._transfers.order[self._slots[number]])
        *_, on_dropped = self._callbacks[number]
        self.abort(number)
        if on_dropped is not None:
            self._untold[number] = (order, on_dropped)

    def end_connections(self, connection: Hashable) -> None:
        """End all transfers in flight of what their sender calls `connection`; nobody hears of it."""
        self._change_is_due(None)
        for number, slot in list(self._slots.items()):
            if self._of_slot[slot].connection == connection:
                self.abort(number)

    # -- transfers that wait ---------------------------------------------------------------------------------

    def can_go_on(self, ignored: Callable[[Hashable], bool]) -> bool:
        """Whether a transfer moves or will, those of connections that are `ignored` aside, as the links are now."""
        if self._untold or self._delivered or self._turn_at <= self.env.now:
            return True
        return any(not self._is_stuck(slot, channel) for slot, channel in self._first(ignored))

    def transfers_waiting(self, ignored: Callable[[Hashable], bool]) -> list[Waiting]:
        """The transfers that dead links keep from moving, those of connections that are `ignored` aside."""
        return [
            self._waiting(slot, channel)
            for slot, channel in self._first(ignored)
            if self._is_stuck(slot, channel)
        ]

    def _give_up(self, slot: int) -> None:
        self._transfers.hold(slot, math.inf)
        self.on_give_up(self._waiting(slot, self._of_slot[slot]))

    def _waiting(self, slot: int, channel: Channel) -> Waiting:
        path, number = channel.path, int(self._transfers.number[slot])
        crossed = path.links + path.back if self.protocol.ack_share else path.links
        links = tuple(link for link in crossed if self._capacity.is_dead(link))
        return Waiting(number, channel.connection, path.source, path.target, links)

    def _first(self, ignored: Callable[[Hashable], bool]) -> Iterator[tuple[int, Channel]]:
        """The transfer under way of each connection."""
        for slot in self._slots.values():
            channel = self._of_slot[slot]
            if channel.queue[0] == slot and not ignored(channel.connection):
                yield slot, channel

    def _is_stuck(self, slot: int, channel: Channel) -> bool:
        if slot in self._transfers.held:
            return True
        return slot in self._rates and (self._is_cut(channel.path) or self._transfers.due[slot] == math.inf)


def not_given_up(waiting: Waiting) -> NoReturn:
    """Raise DeadlockError for a transfer that nobody gives up."""
    raise DeadlockError(
        f"transfer {waiting.number} from host {waiting.source} to host {waiting.target} cannot cross "
        f"links {list(waiting.links)}, which are dead for longer than its protocol waits: bring them back in time"
    )
