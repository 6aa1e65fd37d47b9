"""A rank that has its process for itself: where it waits, it reads the channel."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

from exogym_core.communicator.base import CODE_CARRIERS

if TYPE_CHECKING:
    from collections.abc import Callable

    from netsim.ranks.requests import Call

__all__ = ["Alone", "Uncounted"]


class Alone:
    """The turn of one rank in the thread that called it, in place of `exogym_core.ranks.turns:Turns`.

    Nothing has to be handed over: programs that others have written keep their main thread, their signals and
    their random streams. Calls may come from any thread of the process, one at a time.

    Args:
        unwinding: makes what is raised when the run is being unwound.

    Attributes:
        ready: filled by what is read: the rank can go on.
        read: takes in one message from the channel; False when the run is being unwound.
    """

    def __init__(self, unwinding: Callable[[], BaseException]) -> None:
        self._unwinding = unwinding
        self.ready: deque[int] = deque()
        self.aborting = False
        self.read: Callable[[], bool] = lambda: False
        self._reading = threading.RLock()

    def check(self) -> None:
        """Whether what has been read says to go on.

        Raises:
            BaseException: the run is being unwound.
        """
        if self.aborting:
            raise self._unwinding()

    def require_rank_thread(self, rank: int) -> None:
        """Any thread may wait."""

    def give_way(self, rank: int) -> None:
        """Read until the rank can go on.

        Raises:
            BaseException: the run is being unwound.
        """
        with self._reading:
            while rank not in self.ready:
                if not self.read():
                    raise self._unwinding()
            self.ready.remove(rank)


class Uncounted:
    """Knows nothing of what calls send: the simulation counts it (`exogym_core.ranks.sent`).

    To find the fastest algorithm of every call takes longer than many a program's call.
    """

    carrier_of_codes = CODE_CARRIERS[0]

    def traffic(self, call: Call, member: int) -> tuple[int, int]:
        """Nothing."""
        return 0, 0
