"""The single rank of a process, run in the thread of a user's program."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from typing import TYPE_CHECKING, cast

from exogym_core.communicator.base import AVERAGING_ALGORITHMS
from exogym_core.communicator.simulated.communicator import RankState
from exogym_core.workers.failures import Aborted
from exogym_core.workers.processes.protocol import Ended
from exogym_core.workers.processes.rank_group import RankGroup

if TYPE_CHECKING:
    from collections.abc import Callable

    from exogym_core.workers.processes.children import RankEnd
    from exogym_core.workers.processes.rank_group import Body
    from exogym_core.workers.processes.shared_memory import Store
    from exogym_core.workers.threads import Turns
    from netsim.ranks import Call

__all__ = ["LoneRank", "ended"]


def ended(rank: int) -> Ended:
    """End of a rank that returns None."""
    return Ended(rank, b"\x80\x04N.", [], RankState())


class _OnlyTurn:
    """The turn of one rank in the thread that called it, in place of `Turns`.

    No turn is handed over: users' programs keep their main thread, their signals and their random streams. Calls may
    come from any thread of the process, one at a time.

    Args:
        read: takes in one message from the channel; False when the run is being unwound.
        unwinding: makes what is raised then.

    Attributes:
        ready: the rank, once a message lets it continue.
    """

    def __init__(self, read: Callable[[], bool], unwinding: Callable[[], BaseException]) -> None:
        self._read, self._unwinding = read, unwinding
        self.ready: deque[int] = deque()
        self.aborting = False
        self._reading = threading.RLock()

    def check(self) -> None:
        """Raise if the run is being unwound.

        Raises:
            BaseException: the run is being unwound.
        """
        if self.aborting:
            raise self._unwinding()

    def require_rank_thread(self, rank: int) -> None:
        """Any thread may wait."""

    def give_way(self, rank: int) -> None:
        """Read messages until the rank can continue.

        Raises:
            BaseException: the run is being unwound.
        """
        with self._reading:
            while rank not in self.ready:
                if not self._read():
                    raise self._unwinding()
            self.ready.remove(rank)


class _Uncounted:
    """Traffic of zero: the simulation counts what calls send.

    To find the fastest algorithm of every call takes longer than many a program's call.
    """

    averaging_algorithm = AVERAGING_ALGORITHMS[0]

    def traffic(self, call: Call, member: int) -> tuple[int, int]:
        """Return zero: the simulation counts traffic."""
        return 0, 0

    def check_store(self, store: tuple[str, ...]) -> None:
        """Check nothing: the simulation knows the topology."""


class LoneRank(RankGroup):
    """One rank, run in the calling thread, without counting its traffic.

    Args:
        num_ranks: of the whole run.
        rank: this one.
        channel: to the process of the simulation.
        arena: memory shared with it.
        unwind: makes what is raised in the rank when the run has failed, from the reason.
    """

    has_turns = False

    def __init__(
        self,
        num_ranks: int,
        rank: int,
        channel: RankEnd,
        arena: Store,
        unwind: Callable[[str], BaseException] = lambda reason: Aborted(),
    ) -> None:
        alone = _OnlyTurn(self._read, lambda: unwind(self.reason))
        super().__init__(num_ranks, range(rank, rank + 1), channel, arena, cast("Turns", alone), _Uncounted())

    def run(self, body: Body) -> None:
        """Run `body(comm)`, to the end or until the run is given up."""
        with contextlib.suppress(Aborted):  # the other side reports what ended the run
            self.run_rank(self.ranks[0], body)
        self.flush()

    def _read(self) -> bool:
        self.flush()
        return self.take_in(self.channel.recv())
