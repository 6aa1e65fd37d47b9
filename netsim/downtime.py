"""Which hosts have crashed and not returned, for those who compute on them."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Generator

    import simpy

__all__ = ["Downtime", "Outage"]


class Outage(NamedTuple):
    """A host (index) was down from one instant to another; None: it still is."""

    host: int
    begin_seconds: float
    end_seconds: float | None = None


class Downtime:
    """The hosts of a network that are down, and those that wait for them.

    Args:
        env: whose clock it goes by.

    Attributes:
        outages: all that are over, in the order in which they ended.
        awaited: hosts that somebody waits for, each with how many do.
    """

    def __init__(self, env: simpy.Environment) -> None:
        self.outages: list[Outage] = []
        self.awaited: Counter[int] = Counter()
        self._env = env
        self._since: dict[int, float] = {}
        self._next_crash: dict[int, simpy.Event] = {}
        self._next_return: dict[int, simpy.Event] = {}

    def begin(self, host: int) -> None:
        """A host goes down; nothing where it is down already."""
        if host not in self._since:
            self._since[host] = self._env.now
            _happen(self._next_crash, host)

    def end(self, host: int) -> None:
        """A host is back; nothing where it was up."""
        if host in self._since:
            self.outages.append(Outage(host, self._since.pop(host), self._env.now))
            _happen(self._next_return, host)

    def since(self, host: int) -> float | None:
        """The instant from which on a host has been down; None where it is up."""
        return self._since.get(host)

    def under_way(self) -> list[Outage]:
        """What has not ended, by host."""
        return [Outage(host, since) for host, since in sorted(self._since.items())]

    def next_crash(self, host: int) -> simpy.Event:
        """Happens when a host that is up goes down."""
        return self._next_crash.setdefault(host, self._env.event())

    def until_up(self, host: int) -> Generator[simpy.Event, None, None]:
        """Waits as long as a host is down."""
        self.awaited[host] += 1
        while host in self._since:
            yield self._next_return.setdefault(host, self._env.event())
        self.awaited[host] -= 1


def _happen(events: dict[int, simpy.Event], host: int) -> None:
    event = events.pop(host, None)
    if event is not None:
        event.succeed()
