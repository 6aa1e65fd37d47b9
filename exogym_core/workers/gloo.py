"""Ranks of the real transport on this machine: one process each, joined by sockets of the loopback interface."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from exogym_core.communicator.base import Traffic
from exogym_core.communicator.gloo.communicator import GlooCommunicator
from exogym_core.communicator.gloo.rendezvous import Rendezvous
from exogym_core.workers.failures import distance_from_cause, reported_error
from exogym_core.workers.host import RunResult, Sinks
from exogym_core.workers.processes.children import ChannelClosed, Children, Pipe
from exogym_core.workers.rng import seed_process
from netsim.errors import NetsimError, RankError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["GlooHost"]

T = TypeVar("T")

# The error of a failed rank lists what others were doing if they report it within this time.
_LAST_WORDS_SECONDS = 0.5


@dataclass(frozen=True)
class GlooHost:
    """A process a rank, on this machine.

    Attributes:
        num_ranks: number of ranks.
        seed: every rank's torch, numpy and `random` streams are made from (seed, rank).
        check: compare calls before they run, so that ranks that disagree raise an error.
        timeout_seconds: limit of a rank's wait for others; None: four times its longest work, half an hour at least.
        method: start of processes: `fork`, `spawn`, or `auto` (see `Children`).
    """

    num_ranks: int
    seed: int = 0
    check: bool = True
    timeout_seconds: float | None = 60.0
    method: str = "auto"

    def run(self, body: Callable[[Any], T], sinks: Sinks) -> RunResult[T]:
        """Run `body(comm)` on every rank; its result must be picklable.

        The journal has marked rows alone, since sockets are not replayed.

        Raises:
            RankError: a rank raised an exception or its process died; the message names it, and says what
                the others were doing.
            MismatchError, DeadlockError, InputError: as raised in a rank.
        """
        sinks.replay_untimed(self.num_ranks)
        with _store_file() as path:
            make = partial(
                Rendezvous,
                num_ranks=self.num_ranks,
                store_path=path,
                check=self.check,
                timeout_seconds=self.timeout_seconds,
                secret=secrets.token_bytes(32),
            )
            target = partial(_rank, body, make, self.seed)
            names = [f"gloo rank {rank}" for rank in range(self.num_ranks)]
            with Children(target, self.num_ranks, method=self.method, names=names) as children:
                return _Gathering(children, self.num_ranks, sinks).run()


@contextlib.contextmanager
def _store_file() -> Iterator[str]:
    """A file by which ranks find each other, that cannot stay behind however this process ends."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("netgym rendezvous")
        try:
            yield f"/proc/{os.getpid()}/fd/{fd}"
        finally:
            os.close(fd)
    else:
        with tempfile.TemporaryDirectory(prefix="netgym-") as folder:
            yield os.path.join(folder, "rendezvous")


def _rank(
    body: Callable[[GlooCommunicator], Any],
    make: Callable[..., Rendezvous],
    seed: int,
    rank: int,
    channel: Pipe,
) -> None:
    """Program of a rank's process: sends the parent ("row", row), then ("done", ...) or ("failed", ...)."""
    torch.set_num_threads(1)
    seed_process(seed, rank)
    try:
        comm = GlooCommunicator.connect(make(rank), lambda row: channel.send(("row", row)))
        comm.observed_by(lambda note, tensors: channel.send(("deposit", note, list(tensors))))
        result = body(comm)
        comm.finish()
        channel.send(("done", result, comm.traffic))
    except ChannelClosed:
        return
    except BaseException as error:
        channel.send(("failed", reported_error(rank, error)))
        return
    # The parent's end of the channel closes when all are done: no rank closes connections that others use.
    with contextlib.suppress(ChannelClosed):
        channel.recv()
    comm.close()


class _Gathering:
    """The parent's side of a run: takes messages of ranks until all are done or one has failed."""

    def __init__(self, children: Children, num_ranks: int, sinks: Sinks) -> None:
        self._children, self._sinks = children, sinks
        self._results: list[Any] = [None] * num_ranks
        self._traffic = [Traffic() for _ in range(num_ranks)]
        self._running = set(range(num_ranks))
        self._failures: dict[int, NetsimError] = {}  # in the order of their reports

    def run(self) -> RunResult[Any]:
        """Gather everything; raises the failure that explains the others."""
        deadline: float | None = None
        while self._running:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                break
            for rank in self._children.ready(sorted(self._running), left):
                self._take(rank)
            if self._failures and deadline is None:
                deadline = time.monotonic() + _LAST_WORDS_SECONDS
        if self._failures:
            raise self._explained()
        return RunResult.untimed(self._results, self._traffic)

    def _take(self, rank: int) -> None:
        try:
            kind, *what = self._children.channels[rank].recv()
        except ChannelClosed:
            self._running.discard(rank)
            how = self._children.describe_exit(rank, timeout_seconds=1.0) or "closed its channel"
            hint = ", as the system does when memory runs out" if "SIGKILL" in how else ""
            self._failures[rank] = RankError(f"rank {rank} died: {how}{hint}", rank)
            return
        if kind == "row":
            self._sinks.take_untimed(rank, what[0])
            return
        if kind == "deposit":
            if self._sinks.on_deposit is not None:
                self._sinks.on_deposit(rank, *what)
            return
        self._running.discard(rank)
        if kind == "done":
            self._results[rank], self._traffic[rank] = what
        else:
            self._failures[rank] = what[0]

    def _explained(self) -> NetsimError:
        """The first failure that no other one explains, with a line for each other rank."""
        first = min(self._failures, key=lambda rank: distance_from_cause(self._failures[rank]))
        error = self._failures[first]
        lines = []
        for rank in range(len(self._results)):
            if rank in self._failures and rank != first:
                line = str(self._failures[rank]).splitlines()[0]
                if line != str(error).splitlines()[0]:
                    lines.append(f"  rank {rank}: {re.sub(f'^rank {rank},? ', '', line)}")
            elif rank in self._running:
                lines.append(f"  rank {rank}: was computing, or waiting for something else")
        if lines:
            error.args = ("\n".join([str(error).rstrip(), "other ranks:", *lines]),)
        return error
