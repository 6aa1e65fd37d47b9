"""Mailboxes of ranks: letters leave at once, arrive over the network, and wait until they are taken."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from netsim.network.clock import Clock, on_grid
from netsim.ranks.requests import Letter

if TYPE_CHECKING:
    from collections.abc import Generator, Hashable

    import simpy

    from netsim.ranks.calls import StartCall
    from netsim.ranks.requests import Put, Take

__all__ = ["Mailboxes"]


@dataclass(slots=True, eq=False)
class _Mail:
    """Letters of one rank, or to it, that are under way, and for how long there have been any so far."""

    num: int = 0
    since: float = 0.0
    seconds: float = 0.0


@dataclass(slots=True, eq=False)
class _Box:
    """What has come to one rank's box and has not been taken, in order of arrival."""

    letters: list[Letter] = field(default_factory=list)
    awaited: simpy.Event | None = None


class Mailboxes:
    """Serves `Put` and `Take` on a clock.

    A letter is a message whose receiver is always ready. Nobody waits for it to arrive, and a letter that
    nobody takes is no error.

    Args:
        clock: whose time it is.
        start: starts a message on the network, see `netsim.ranks.kernel.Kernel`.
    """

    def __init__(self, clock: Clock, start: StartCall, instant: StartCall) -> None:
        self._clock, self._start, self._instant = clock, start, instant
        self._boxes: dict[Hashable, _Box] = {}
        self._waiting: dict[int, tuple[_Box, bool]] = {}  # rank -> its box, and whether its patience ends
        self._mail: dict[int, _Mail] = {}
        self._told: set[int] = set()  # waited in vain, since a letter last came

    def put(self, put: Put) -> None:
        """Send a letter off."""
        call = put.call
        start = self._start if call.ranks[0] != call.ranks[1] else self._instant

        def done(member: int) -> None:
            if member == 1:
                self._under_way(put, -1)
                self._arrive(put)

        self._under_way(put, 1)

        enter, _ = start(call, put.box, done)
        enter(1, call)
        enter(0, call)

    def _under_way(self, put: Put, change: int) -> None:
        for rank in set(put.call.ranks):
            mail = self._mail.setdefault(rank, _Mail())
            if mail.num:
                mail.seconds += self._clock.now - mail.since
            mail.num, mail.since = mail.num + change, self._clock.now

    def seconds_under_way(self, rank: int) -> float:
        """For how long, until now, letters of this rank or to it have been under way."""
        mail = self._mail.get(rank, _Mail())
        return mail.seconds + (self._clock.now - mail.since if mail.num else 0.0)

    def _arrive(self, put: Put) -> None:
        box = self._boxes.setdefault(put.box, _Box())
        box.letters.append(Letter(put.call.ranks[0], put.number))
        self._told.clear()
        if box.awaited is not None and not box.awaited.triggered:
            box.awaited.succeed()

    def take(self, rank: int, take: Take) -> Generator[simpy.Event, None, tuple[Letter, ...]]:
        """What has come, after waiting for something where that is asked for."""
        box = self._boxes.setdefault(take.box, _Box())
        if not box.letters and take.seconds > 0:
            box.awaited = self._clock.event()
            self._waiting[rank] = (box, math.isfinite(take.seconds))
            if math.isfinite(take.seconds):
                yield box.awaited | self._clock.timeout(on_grid(take.seconds))
            else:
                yield box.awaited
            box.awaited = None
            del self._waiting[rank]
            yield self._clock.at(on_grid(self._clock.now))
        letters, box.letters = tuple(box.letters), []
        return letters

    def let_one_go(self) -> bool:
        """Nothing will ever come: have the first rank that waits for a letter go on without.

        It may put letters itself, or end, and so each in turn has its chance; who has waited in vain comes again
        only when a letter has come since. False if there is nobody left.
        """
        for rank, (box, ends) in sorted(self._waiting.items()):
            if not ends and rank not in self._told and box.awaited is not None:
                self._told.add(rank)
                if not box.awaited.triggered:
                    box.awaited.succeed()
                return True
        return False
