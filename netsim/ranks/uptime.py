"""What ranks compute while their hosts are up, and the crashes that stop them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from simpy import Interrupt

from netsim.network.clock import on_grid

if TYPE_CHECKING:
    from collections.abc import Collection, Generator, Sequence

    import simpy

    from netsim.network.clock import Clock
    from netsim.network.network import Downtime
    from netsim.ranks.spans import Diary

__all__ = ["Uptime"]


class Uptime:
    """What ranks compute, which a crash of their host cuts off.

    Args:
        clock: whose time it is.
        downtime: tells when hosts are down; None: never.
        hosts: the host of each rank, where there is a downtime.
        lost: ranks that go on alone, whether their host is down or not.
        diary: told of what they do; None: nobody wants to know.

    Attributes:
        processes: the ranks' processes, which a crash interrupts.
        standing: ranks whose hosts are down.
    """

    def __init__(
        self,
        clock: Clock,
        downtime: Downtime | None,
        hosts: Sequence[int],
        lost: Collection[int],
        diary: Diary | None,
    ) -> None:
        self.processes: list[simpy.Process] = []
        self.standing: set[int] = set()
        self._clock, self._downtime, self._hosts = clock, downtime, hosts
        self._lost, self._diary = lost, diary
        self._busy: set[int] = set()
        if downtime is not None:
            downtime.on_crash = self._crashed

    def compute(self, rank: int, seconds: float) -> Generator[simpy.Event, None, None]:
        """Compute for so long without a crash: what one cuts off is lost, and begun again at the return."""
        diary = self._diary
        while True:
            if diary is not None:
                diary.begin(rank, "compute", "compute")
            self._busy.add(rank)
            try:
                yield self._clock.timeout(seconds)
            except Interrupt:
                if diary is not None:
                    diary.end(rank, as_kind="lost")
                yield from self.until_up(rank)
            else:
                self._busy.discard(rank)
                if diary is not None:
                    diary.end(rank)
                return

    def _crashed(self, host: int) -> None:
        """A host goes down: those of its ranks that compute stop."""
        for rank in sorted(self._busy):
            if self._hosts[rank] == host:
                self._busy.discard(rank)
                self.processes[rank].interrupt()

    def is_down(self, rank: int) -> bool:
        """Whether the rank's host is down, and the rank with it."""
        down = self._downtime
        return down is not None and rank not in self._lost and down.since(self._hosts[rank]) is not None

    def until_up(self, rank: int) -> Generator[simpy.Event, None, None]:
        """Stand still until the rank's host is back."""
        assert self._downtime is not None
        self.standing.add(rank)
        try:
            while self.is_down(rank):
                yield from self._downtime.until_up(self._hosts[rank])
                yield self._clock.at(on_grid(self._clock.now))
        except Interrupt:  # it is lost
            pass
        self.standing.discard(rank)
