"""Ranks of the real transport on this machine: one process each, joined by sockets of the loopback interface."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import secrets
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from exogym_core.communicator.gloo.communicator import GlooCommunicator
from exogym_core.communicator.gloo.rendezvous import ConnectionLostError, Rendezvous, choose_backend
from exogym_core.communicator.handle import Traffic
from exogym_core.ranks.failures import told
from exogym_core.ranks.processes.channel import ChannelClosed, Pipe
from exogym_core.ranks.processes.children import Children
from exogym_core.ranks.rng import RandomStates
from netsim.files.errors import InputError, NetsimError, RankError
from netsim.ranks.kernel import StampedRow

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from exogym_core.ranks.carrier import OnDeposit

__all__ = ["GlooRun", "launch_gloo", "rows_in_order", "untimed_row"]

T = TypeVar("T")

# What the others were doing when a rank failed is told if they say so within this time.
_LAST_WORDS_SECONDS = 0.5


@dataclass
class GlooRun(Generic[T]):
    """What ranks returned, marked and sent.

    Attributes:
        results: what `body` returned, in rank order.
        rows: what ranks marked, without virtual times: everybody's first row in rank order, then the second ...
        traffic: what each rank sent.
    """

    results: list[T]
    rows: list[StampedRow]
    traffic: list[Traffic]


def launch_gloo(
    body: Callable[[GlooCommunicator], T],
    num_ranks: int,
    *,
    seed: int = 0,
    check: bool = True,
    timeout_seconds: float | None = 60.0,
    backend: str = "gloo",
    method: str = "auto",
    intra_op_threads: int = 1,
    on_mark: Callable[[int, Mapping[str, Any]], None] | None = None,
    on_deposit: OnDeposit | None = None,
) -> GlooRun[T]:
    """Run `body(comm)` on every rank, a process each, and gather what it returns.

    Args:
        body: what a rank does; its result must be picklable.
        num_ranks: how many ranks.
        seed: every rank's torch, numpy and `random` streams are made from (seed, rank).
        check: compare calls before they run, so that ranks that disagree are told.
        timeout_seconds: how long a rank waits for others; None: as its rounds tell, half an hour at least.
        backend: `gloo`, `nccl`, or `auto`: nccl where there is a GPU for every rank.
        method: how processes start: `fork`, `spawn`, or `auto` (see `Children`).
        intra_op_threads: torch's threads for one operator; forked processes can have one only.
        on_mark: called in this process with (rank, row) as rows come.
        on_deposit: likewise with (rank, note, tensors) as ranks deposit them.

    Raises:
        RankError: a rank raised an exception or its process died; the message names it, and tells what
            the others were doing.
        MismatchError, DeadlockError, InputError: as raised in a rank.
    """
    if isinstance(num_ranks, bool) or not isinstance(num_ranks, int) or num_ranks < 1:
        raise InputError(f"launch_gloo: num_ranks is {num_ranks!r}; give a whole number from 1 up")
    backend = choose_backend(backend, num_ranks)
    if method == "auto" and intra_op_threads > 1:
        method = "spawn"
    with _store_file() as path:
        make = partial(
            Rendezvous,
            num_ranks=num_ranks,
            store_path=path,
            check=check,
            timeout_seconds=timeout_seconds,
            backend=backend,
            secret=secrets.token_bytes(32),
        )
        target = partial(_rank, body, make, intra_op_threads, seed)
        names = [f"gloo rank {rank}" for rank in range(num_ranks)]
        with Children(target, num_ranks, method=method, names=names) as children:
            return _Gathering(children, num_ranks, on_mark, on_deposit).run()


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
    intra_op_threads: int,
    seed: int,
    rank: int,
    channel: Pipe,
) -> None:
    """One rank's process: tells the parent ("row", row), then ("done", ...) or ("failed", ...)."""
    torch.set_num_threads(intra_op_threads)
    RandomStates(seed, rank).load()
    try:
        rendezvous = make(rank)
        if rendezvous.backend == "nccl":
            rendezvous.use_gpu(rank)
        comm = GlooCommunicator.connect(rendezvous, lambda row: channel.send(("row", dict(row))))
        comm.observed_by(lambda note, tensors: channel.send(("deposit", note, list(tensors))))
        result = body(comm)
        comm.finish()
        channel.send(("done", result, comm.traffic))
    except ChannelClosed:
        return
    except BaseException as error:
        channel.send(("failed", told(rank, error)))
        return
    # The parent's end of the channel closes when all are done: no rank closes connections that others use.
    with contextlib.suppress(ChannelClosed):
        channel.recv()
    comm.close()


class _Gathering:
    """The parent's side of a run: takes what ranks tell until all are done or one has failed."""

    def __init__(
        self,
        children: Children,
        num_ranks: int,
        on_mark: Callable[[int, Mapping[str, Any]], None] | None,
        on_deposit: OnDeposit | None,
    ) -> None:
        self._children, self._on_mark, self._on_deposit = children, on_mark, on_deposit
        self._results: list[Any] = [None] * num_ranks
        self._traffic = [Traffic() for _ in range(num_ranks)]
        self._rows: list[list[Mapping[str, Any]]] = [[] for _ in range(num_ranks)]
        self._running = set(range(num_ranks))
        self._failures: dict[int, NetsimError] = {}  # in the order in which they were told

    def run(self) -> GlooRun[Any]:
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
        return GlooRun(self._results, rows_in_order(self._rows), self._traffic)

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
            self._rows[rank].append(what[0])
            if self._on_mark is not None:
                self._on_mark(rank, what[0])
            return
        if kind == "deposit":
            if self._on_deposit is not None:
                self._on_deposit(rank, *what)
            return
        self._running.discard(rank)
        if kind == "done":
            self._results[rank], self._traffic[rank] = what
        else:
            self._failures[rank] = what[0]

    def _explained(self) -> NetsimError:
        """The first failure that no other one explains, with a line for each other rank."""
        first = min(self._failures, key=lambda rank: _weight(self._failures[rank]))
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


def untimed_row(rank: int, row: Mapping[str, Any]) -> StampedRow:
    """A row marked where there is no virtual time."""
    return StampedRow(rank, 0.0, 0.0, 0.0, row)


def rows_in_order(rows: Sequence[Sequence[Mapping[str, Any]]]) -> list[StampedRow]:
    """Every rank's rows as one list: everybody's first in rank order, then the second ..."""
    return [
        untimed_row(rank, row)
        for same_place in itertools.zip_longest(*rows)
        for rank, row in enumerate(same_place)
        if row is not None
    ]


def _weight(error: NetsimError) -> int:
    """Causes come before what follows from them; equals in the order in which they were told."""
    if isinstance(error, ConnectionLostError):
        return 2
    return 0 if isinstance(error, RankError) else 1
