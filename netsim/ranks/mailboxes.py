"""Mailboxes: messages leave at once, cross the network, and wait until their receiver takes them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from netsim.network.clock import Clock, on_grid
from netsim.ranks.requests import MailboxMessage

if TYPE_CHECKING:
    from collections.abc import Generator, Hashable

    import simpy

    from netsim.ranks.calls import StartCall
    from netsim.ranks.requests import Put, Take

__all__ = ["Mailboxes"]


@dataclass(slots=True, eq=False)
class _Traffic:
    """Number of messages in flight from or to one rank, and the seconds in which there were any."""

    num: int = 0
    since: float = 0.0
    seconds: float = 0.0


@dataclass(slots=True, eq=False)
class _Box:
    """Messages that wait in one rank's mailbox, in order of arrival."""

    messages: list[MailboxMessage] = field(default_factory=list)
    awaited: simpy.Event | None = None


class Mailboxes:
    """Serves `Put` and `Take` on a clock.

    A mailbox is always ready to receive. Senders do not wait, and a message that nobody takes is no error.

    Args:
        clock: virtual time.
        start: starts a message on the network, see `netsim.ranks.kernel.Kernel`.
        instant: starts a message of a rank to itself, which takes no time.
    """

    def __init__(self, clock: Clock, start: StartCall, instant: StartCall) -> None:
        self._clock, self._start, self._instant = clock, start, instant
        self._boxes: dict[Hashable, _Box] = {}
        self._waiting: dict[int, tuple[_Box, bool]] = {}  # rank -> its box, and whether its wait ends
        self._traffic: dict[int, _Traffic] = {}
        self._released: set[int] = set()  # ranks resumed without a message since one last arrived

    def put(self, put: Put) -> None:
        """Send a message to a mailbox."""
        call = put.call
        start = self._start if call.ranks[0] != call.ranks[1] else self._instant

        def done(member: int) -> None:
            if member == 1:
                self._count(put, -1)
                box = self._boxes.setdefault(put.box, _Box())
                box.messages.append(MailboxMessage(call.ranks[0], put.number))
                self._released.clear()
                if box.awaited is not None and not box.awaited.triggered:
                    box.awaited.succeed()

        self._count(put, 1)

        enter, _ = start(call, put.box, done)
        enter(1, call)
        enter(0, call)

    def _count(self, put: Put, change: int) -> None:
        for rank in set(put.call.ranks):
            traffic = self._traffic.setdefault(rank, _Traffic())
            if traffic.num:
                traffic.seconds += self._clock.now - traffic.since
            traffic.num, traffic.since = traffic.num + change, self._clock.now

    def seconds_in_flight(self, rank: int) -> float:
        """Seconds until now in which messages from or to this rank were in flight."""
        traffic = self._traffic.get(rank, _Traffic())
        return traffic.seconds + (self._clock.now - traffic.since if traffic.num else 0.0)

    def take(self, rank: int, take: Take) -> Generator[simpy.Event, None, tuple[MailboxMessage, ...]]:
        """Take the messages that have arrived; wait for one if the request says so."""
        box = self._boxes.setdefault(take.box, _Box())
        if not box.messages and take.seconds > 0:
            box.awaited = self._clock.event()
            self._waiting[rank] = (box, math.isfinite(take.seconds))
            if math.isfinite(take.seconds):
                yield box.awaited | self._clock.timeout(on_grid(take.seconds))
            else:
                yield box.awaited
            box.awaited = None
            del self._waiting[rank]
            yield self._clock.at(on_grid(self._clock.now))
        messages, box.messages = tuple(box.messages), []
        return messages

    def let_one_go(self) -> bool:
        """Resume the first rank that waits for a message that can never arrive.

        It may then send messages itself, so each waiting rank is resumed once until a message arrives again.
        Returns False if no rank is left.
        """
        for rank, (box, ends) in sorted(self._waiting.items()):
            if not ends and rank not in self._released and box.awaited is not None:
                self._released.add(rank)
                if not box.awaited.triggered:
                    box.awaited.succeed()
                return True
        return False
