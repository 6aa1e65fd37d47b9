"""Being one rank of a run whose processes torchrun has started, on one machine or several."""

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from exogym_core.communicator.gloo.communicator import GlooCommunicator
from exogym_core.communicator.gloo.rendezvous import TIMEOUT_SECONDS, Rendezvous
from exogym_core.ranks.rng import RandomStates
from exogym_core.ranks.torchrun.ending import Ending
from exogym_core.ranks.torchrun.side_channel import SideChannel

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType

__all__ = ["JoinedRank", "agreed", "recalled", "remember", "torchrun_rank"]

# For rank 0 to save what it has, and for the others, who have nothing to save.
_GRACE_SECONDS, _SHORT_GRACE_SECONDS = 10.0, 1.0


def torchrun_rank() -> int | None:
    """This process's rank among those that torchrun has started, None where it did not start this one."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return int(os.environ["RANK"])
    return None


def recalled(name: str) -> str | None:
    """What `remember` kept under that name before torchrun restarted the ranks; None where nothing was."""
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        return None
    store = Rendezvous.from_environment(True, TIMEOUT_SECONDS, "gloo").kept_store()
    return None if store is None or not store.check([name]) else store.get(name).decode()


def remember(name: str, text: str) -> None:
    """Keep a text for when torchrun restarts the ranks (`--max-restarts`)."""
    store = Rendezvous.from_environment(True, TIMEOUT_SECONDS, "gloo").kept_store()
    if store is not None:
        store.set(name, text)


def agreed(value: Any) -> Any:
    """Rank 0's `value`, a plain one, on every rank."""
    with GlooCommunicator.from_environment(backend="gloo") as comm:
        return comm.broadcast_object(value)


@dataclass
class JoinedRank:
    """Context manager: this process as a rank.

    Its random generators are made from (seed, rank), and are as before afterwards. If it is lost, or another is, the
    error tells which, and where it was; under torchrun, which ends all ranks then, rank 0 tells it before it ends.

    Args:
        on_row: on rank 0, called in another thread with (rank, row) for what any rank marks.
        there_is: tells what there is to go on from, such as the last checkpoint.
        seed: of the run.
        timeout_seconds: how long ranks wait for each other; None: as `GlooCommunicator.from_environment` has it.
        compare_calls: whether calls are compared before they run.

    Attributes:
        comm: connects it.
        beside: its side channel.
        facts_at_checkpoint: tells what is added to the rows that mark checkpoints.
    """

    on_row: Callable[[int, Mapping[str, Any]], None]
    there_is: Callable[[], str]
    seed: int = 0
    timeout_seconds: float | None = None
    compare_calls: bool = True

    comm: GlooCommunicator = None  # type: ignore[assignment]
    beside: SideChannel = None  # type: ignore[assignment]
    facts_at_checkpoint: Callable[[], Mapping[str, Any]] = dict

    def __enter__(self) -> Self:
        rendezvous = Rendezvous.from_environment(self.compare_calls, self.timeout_seconds, "auto")
        self._before = RandomStates.of_process()
        self._open = contextlib.ExitStack()
        with contextlib.ExitStack() as opened:
            self.comm = GlooCommunicator.connect(rendezvous, self.mark)
            opened.callback(self.comm.close)
            self.beside = opened.enter_context(SideChannel(rendezvous, self.on_row))
            grace = _GRACE_SECONDS if rendezvous.rank == 0 else _SHORT_GRACE_SECONDS
            opened.enter_context(Ending(self._tell_lost, grace))
            self._open = opened.pop_all()
        RandomStates(self.seed, rendezvous.rank).load()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            explained = error
            if isinstance(error, Exception):
                first = f"{type(error).__name__}: {error}".partition("\n")[0]
                self.beside.say_failed(first)
                explained = self.beside.explained(error, self.there_is())
            elif error is None:
                self.comm.finish()
        finally:
            self._open.close()
            self._before.load()
        if explained is not error and explained is not None:
            raise explained from None

    def mark(self, row: Mapping[str, Any]) -> None:
        """Have rank 0 take in a row, soon."""
        self.beside.mark({**row, **self.facts_at_checkpoint()} if "checkpoint" in row else row)

    def _tell_lost(self, number: int) -> None:
        """The ranks are being ended: if that is because one was lost, say so in a line, once among them."""
        lost, ended = self.beside.missing()
        survivors = [rank for rank in range(self.comm.world_size) if rank not in lost]
        if survivors[:1] != [self.comm.rank]:
            return
        for rank, pulse in [*lost.items(), *ended.items()]:
            print(f"error: {self.beside.told(rank, pulse)}; {self.there_is()}", file=sys.stderr, flush=True)
