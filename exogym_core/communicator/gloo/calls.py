"""Calls of one rank over real sockets: their order, their comparison, and the end."""

from __future__ import annotations

import time
from concurrent import futures
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from exogym_core.communicator.base import CallState, Handle
from exogym_core.communicator.gloo.deadlock_detector import CallQueue, Waits, Want
from exogym_core.communicator.gloo.messages import GlooHandle, GlooMailboxes, PeerMessages
from exogym_core.communicator.gloo.wire import ENDED, Wire, call_record, disagreement
from exogym_core.communicator.simulated.simulation import Schedules, World

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from torch import Tensor

    from exogym_core.communicator.exchange import Signature
    from exogym_core.communicator.gloo.rendezvous import ProcessGroups, Rendezvous

__all__ = ["GlooRank", "GroupCalls"]

T = TypeVar("T")
R = TypeVar("R")

# Waits in gloo return when its connections are cut; Python must not end under them.
_CUT_SECONDS = 1.0
_IN_FLIGHT = 2  # as torch's gloo has two threads a group, and `netsim`'s protocol of that name two lanes


@dataclass
class GlooRank(CallState):
    """State shared by all communicators of one rank.

    Attributes:
        rendezvous: its way to the others.
        on_mark: receives marked rows.
        on_deposit: receives snapshots.
        traffic: sent so far, in all its groups.
        off_clock: calls are not counted now.
        compares_places: members must make a collective at the same place.
        start_seconds: when it began, by `time.monotonic`.
        groups: its side of every group, the run's first.
        reused: those of them that are returned again for the same ranks.
        futures: of asynchronous calls, without the finished ones.
        in_flight: calls that have not been waited for.
        detector: raises for deadlocks; None where calls are not compared.
    """

    rendezvous: Rendezvous
    on_mark: Callable[[Any], None]
    on_deposit: Callable[[Any, Sequence[Tensor]], None] = lambda note, tensors: None
    start_seconds: float = field(default_factory=time.monotonic)
    groups: list[GroupCalls] = field(default_factory=list)
    reused: dict[tuple[int, ...], GroupCalls] = field(default_factory=dict)
    futures: list[Future[Any]] = field(default_factory=list)
    in_flight: dict[Future[Any], Signature] = field(default_factory=dict)
    detector: Waits = field(default_factory=Waits)
    book: Schedules = field(default_factory=lambda: Schedules(World.build(1, None, None, None, None)))

    def group(self, ranks: tuple[int, ...], member: int, place: str, reuse: bool) -> GroupCalls:
        """Side of this rank of a group of `ranks` (of the run), in which it is `member`; the call is at `place`.

        Raises:
            MismatchError: a member names other ranks, or another order.
        """
        if reuse and ranks in self.reused:
            return self.reused[ranks]
        made = GroupCalls(self, self._connected(ranks, place), ranks, member)
        if reuse:
            self.reused[ranks] = made
        return made

    def _connected(self, ranks: tuple[int, ...], place: str) -> ProcessGroups:
        lane = f"group {sorted(ranks)}"
        number = self.detector.posted.add(lane)
        needs = [(rank, lane, number) for rank in ranks if rank != self.rendezvous.rank]
        connect = partial(self.rendezvous.subgroup, ranks, place)
        return self.detector.wait(Want(f"group({list(ranks)}){place}", tuple(needs)), connect)

    def finish(self) -> None:
        """End the rank: wait for its asynchronous calls and for the other ranks' ends.

        Raises:
            DeadlockError: another rank waits for a call that this one will never make, or the reverse.
        """
        if not self.groups:  # it has left already
            return
        for calls in self.groups:
            calls.mailboxes.end()
        if self.rendezvous.check:
            # In all groups at once: in which of them another rank waits is not known.
            endings = [calls.end() for calls in self.groups if len(calls.ranks) > 1]
            needs = [need for calls in self.groups for need in calls.needs()]

            def wait() -> None:
                for ending in futures.wait(endings, return_when=futures.FIRST_EXCEPTION).done:
                    ending.result()

            self.detector.wait(Want("nothing more: it has ended", tuple(needs)), wait)
            self.detector.close()
        for future in self.futures:
            future.result()
        for calls in self.groups:
            calls.messages.settle()

    def close(self) -> None:
        """Leave all groups and end this rank's threads; no communicator of it works afterwards."""
        self.detector.close()
        if self.detector.abandoned:
            self.rendezvous.cut()
            futures.wait(self.detector.abandoned, timeout=_CUT_SECONDS)
        for calls in self.groups:
            calls.close()
        self.groups.clear()
        self.reused.clear()


class GroupCalls:
    """Calls of a member in a group, in order.

    Attributes:
        ranks: the members, as ranks of the run.
        wire: carries tensors.
        control: carries records between members; always gloo, on the CPU.
        messages: between two members.
        mailboxes: of the member.
    """

    def __init__(self, rank: GlooRank, groups: ProcessGroups, ranks: Sequence[int], member: int) -> None:
        self.ranks = tuple(ranks)
        self.wire = Wire(groups.data, ranks, member, rank.rendezvous.device)
        self.control = Wire(groups.control, ranks, member, torch.device("cpu"))
        self.name = groups.name
        self.messages = PeerMessages(self.control, self.ranks, rank.rendezvous, rank.detector, self.name)
        self.mailboxes = GlooMailboxes(self.control, groups.store, rank.rendezvous)
        self._rank, self._member, self._num_posted = rank, member, 0
        self._queue = CallQueue(_IN_FLIGHT if rank.rendezvous.backend == "gloo" else 1)
        self.wire.issued = self._queue.issued
        rank.groups.append(self)

    def make(
        self, signature: Signature, exchange: Callable[[], R], deliver: Callable[[R], T], async_op: bool
    ) -> T | Handle[T]:
        """Compare calls, then `exchange` staged tensors (may run in the group's thread), then `deliver`."""
        call = partial(self._run, signature, exchange)
        want = self._posted(str(signature))
        if not async_op and self._queue.idle:
            return deliver(self._rank.detector.wait(want, call))
        future = self._queue.submit(call)
        self._rank.futures = [future, *(known for known in self._rank.futures if not known.done())]
        self._rank.in_flight[future] = signature

        def delivered(got: R) -> T:
            self._rank.in_flight.pop(future, None)
            return deliver(got)

        handle = GlooHandle(self._rank.detector, want, delivered, future)
        return handle if async_op else handle.wait()

    def end(self) -> Future[None]:
        """Report to the other members, after all calls, that no more will come."""
        self._posted(ENDED)
        return self._queue.submit(partial(self._run, ENDED, lambda: None))

    def needs(self) -> list[tuple[int, str, int]]:
        """Posts of the other members that this one's last call needs."""
        mine = self.ranks[self._member]
        return [(rank, self.name, self._num_posted) for rank in self.ranks if rank != mine]

    def _posted(self, text: str) -> Want:
        """Count a call; returns what waiting for it waits for."""
        self._num_posted = self._rank.detector.posted.add(self.name)
        return Want(text, tuple(self.needs()))

    def close(self) -> None:
        """Leave the group and end its thread."""
        self._queue.stop()
        self.wire.close()
        self.control.close()

    def _run(self, signature: Signature | str, exchange: Callable[[], R]) -> R:
        def checked() -> R:
            if self._rank.rendezvous.check and len(self.ranks) > 1:
                error = disagreement(self.ranks, self.control.gather_records(call_record(signature)))
                if error is not None:
                    raise error
            return exchange()

        return self._rank.rendezvous.guarded(f"rank {self.ranks[self._member]} waits in {signature}", checked)
