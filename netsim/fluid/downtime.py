"""Which hosts have crashed and not returned, for those who compute on them."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, KeysView

    import simpy

__all__ = ["Downtime", "Outage"]


class Outage(NamedTuple):
    """A host (index) was down from one instant to another; None: it still is."""

    host: int
    begin_seconds: float
    end_seconds: float | None = None


class Downtime:
    """The hosts of a network that are down, and who waits for them.

    Args:
        env: whose clock it goes by.

    Attributes:
        outages: all that are over, in the order in which they ended.
        awaited: hosts that somebody waits for, each with how many do.
        hosts: those that are down.
        on_crash: called with a host that goes down.
    """

    def __init__(self, env: simpy.Environment) -> None:
        self.outages: list[Outage] = []
        self.awaited: Counter[int] = Counter()
        self.on_crash: Callable[[int], None] = _nobody
        self._env = env
        self._since: dict[int, float] = {}
        self.hosts: KeysView[int] = self._since.keys()
        self._returns: dict[int, simpy.Event] = {}

    def begin(self, host: int) -> None:
        """A host goes down; nothing where it is down already."""
        if host not in self._since:
            self._since[host] = self._env.now
            self.on_crash(host)

    def end(self, host: int) -> None:
        """A host is back; nothing where it was up."""
        if host not in self._since:
            return
        self.outages.append(Outage(host, self._since.pop(host), self._env.now))
        returned = self._returns.pop(host, None)
        if returned is not None:
            returned.succeed()

    def since(self, host: int) -> float | None:
        """The instant from which on a host has been down; None where it is up."""
        return self._since.get(host)

    def under_way(self) -> list[Outage]:
        """What has not ended, by host."""
        return [Outage(host, since) for host, since in sorted(self._since.items())]

    def until_up(self, host: int) -> Generator[simpy.Event, None, None]:
        """Waits as long as a host is down."""
        self.awaited[host] += 1
        try:
            while host in self._since:
                if host not in self._returns:
                    self._returns[host] = self._env.event()
                yield self._returns[host]
        finally:
            self.awaited[host] -= 1


def _nobody(host: int) -> None:
    """Nobody computes there."""
