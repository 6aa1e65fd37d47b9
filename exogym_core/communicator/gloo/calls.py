"""What stands behind the calls of one rank over real sockets: their order, their comparison, and the end."""

from __future__ import annotations

import hashlib
import os
import queue
import threading
import time
from collections import Counter
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from exogym_core.communicator.gloo.agreement import ENDED, call_record, disagreement
from exogym_core.communicator.gloo.mail import Letters
from exogym_core.communicator.gloo.messages import Mailbox
from exogym_core.communicator.gloo.waits import Want
from exogym_core.communicator.gloo.wire import Wire
from exogym_core.communicator.handle import Handle, Traffic

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from exogym_core.communicator.exchange import Signature
    from exogym_core.communicator.gloo.rendezvous import ProcessGroups, Rendezvous
    from exogym_core.communicator.gloo.vigil import Vigil

__all__ = ["GlooRank", "GroupCalls"]

T = TypeVar("T")
R = TypeVar("R")

# What waits in gloo comes back when its connections are cut; Python must not end under it.
_CUT_SECONDS = 1.0
_IN_FLIGHT = 2  # as torch's gloo has two threads a group, and `netsim`'s protocol of that name two lanes


@dataclass
class GlooRank:
    """What all communicators of one rank share.

    Attributes:
        rendezvous: its way to the others.
        on_mark: receives what is marked.
        on_deposit: receives what is deposited.
        traffic: what it has sent, in all its groups.
        off_clock: calls are not counted now.
        compares_places: members must make a collective at the same place.
        start_seconds: when it began, by `time.monotonic`.
        groups: its side of every group, the run's first.
        reused: those of them that are given again to who asks for the same ranks.
        futures: of asynchronous calls, without the finished ones.
        in_flight: calls that have not been waited for.
        vigil: tells of deadlocks; None where calls are not compared.
        num_made: of groups of the same ranks, by a digest of these.
    """

    rendezvous: Rendezvous
    on_mark: Callable[[Mapping[str, Any]], None]
    on_deposit: Callable[[Mapping[str, Any], Sequence[Tensor]], None] = lambda note, tensors: None
    traffic: Traffic = field(default_factory=Traffic)
    off_clock: bool = False
    compares_places: bool = True
    start_seconds: float = field(default_factory=time.monotonic)
    groups: list[GroupCalls] = field(default_factory=list)
    reused: dict[tuple[int, ...], GroupCalls] = field(default_factory=dict)
    futures: list[Future[Any]] = field(default_factory=list)
    in_flight: dict[Future[Any], Signature] = field(default_factory=dict)
    vigil: Vigil | None = None
    num_made: Counter[str] = field(default_factory=Counter)

    def name_of(self, ranks: tuple[int, ...]) -> str:
        """What the next group of these ranks is called among them: short, and the same on each."""
        digest = hashlib.blake2b(repr(sorted(ranks)).encode(), digest_size=6).hexdigest()
        self.num_made[digest] += 1
        return f"{digest} {self.num_made[digest]}"

    def group(self, ranks: tuple[int, ...], member: int, where: tuple[str, int], reuse: bool) -> GroupCalls:
        """This rank's side of a group of `ranks` (of the run), in which it is `member`.

        Raises:
            MismatchError: a member names other ranks, or another order; `where` is told.
        """
        if reuse and ranks in self.reused:
            return self.reused[ranks]
        made = GroupCalls(self, self._connected(ranks, where), ranks, member)
        if reuse:
            self.reused[ranks] = made
        return made

    def _connected(self, ranks: tuple[int, ...], where: tuple[str, int]) -> ProcessGroups:
        connect = partial(self.rendezvous.subgroup, ranks, where)
        if self.vigil is None or len(ranks) == 1:
            return connect()
        lane = f"group {sorted(ranks)}"
        number = self.vigil.posted.add(lane)
        needs = [(rank, lane, number) for rank in ranks if rank != self.rendezvous.rank]
        text = f"group({list(ranks)}) at {os.path.basename(where[0])}:{where[1]}"
        return self.vigil.wait(Want(text, tuple(needs)), connect)

    def finish(self) -> None:
        """The rank is through: wait for its asynchronous calls, and for the other ranks to be through too.

        Raises:
            DeadlockError: another rank waits for a call that this one will never make, or the reverse.
        """
        if not self.groups:  # it has left already
            return
        for calls in self.groups:
            calls.letters.end()
        if self.rendezvous.check:
            # In all groups at once: in which of them another rank waits is not known.
            endings = [calls.end() for calls in self.groups if len(calls.ranks) > 1]
            self._wait_for_endings(endings)
        for future in self.futures:
            future.result()
        for calls in self.groups:
            calls.mail.settle()

    def _wait_for_endings(self, endings: list[Future[None]]) -> None:
        def wait() -> None:
            for ending in futures.wait(endings, return_when=futures.FIRST_EXCEPTION).done:
                ending.result()

        if self.vigil is None:
            wait()
            return
        needs = [need for calls in self.groups for need in calls.needs()]
        self.vigil.wait(Want("nothing more: it has ended", tuple(needs)), wait)
        self.vigil.close()

    def close(self) -> None:
        """Leave all groups and end this rank's threads; no communicator of it works afterwards."""
        if self.vigil is not None:
            self.vigil.close()
            if self.vigil.abandoned:
                self.rendezvous.cut()
                futures.wait(self.vigil.abandoned, timeout=_CUT_SECONDS)
        for calls in self.groups:
            calls.close()
        self.groups.clear()
        self.reused.clear()


class GroupCalls:
    """One member's calls in one group, in the order in which they are made.

    Attributes:
        ranks: the members, as ranks of the run.
        wire: carries tensors.
        control: carries what members tell each other; always gloo, on the CPU.
        mail: messages.
        letters: mailboxes.
    """

    def __init__(self, rank: GlooRank, groups: ProcessGroups, ranks: Sequence[int], member: int) -> None:
        self.ranks = tuple(ranks)
        self.wire = Wire(groups.data, ranks, member, rank.rendezvous.device)
        self.control = Wire(groups.control, ranks, member, torch.device("cpu"))
        self.name = rank.name_of(self.ranks)
        self.mail = Mailbox(self.control, self.ranks, rank.rendezvous, rank.vigil, self.name)
        self.letters = Letters(self.control, groups.store, rank.rendezvous)
        self._rank, self._member, self._num_posted = rank, member, 0
        self._queue = _CallQueue(_IN_FLIGHT if rank.rendezvous.backend == "gloo" else 1)
        self.wire.issued = self._queue.issued
        rank.groups.append(self)

    def make(
        self, signature: Signature, exchange: Callable[[], R], deliver: Callable[[R], T], async_op: bool
    ) -> T | Handle[T]:
        """Compare calls, then `exchange` staged tensors (may run in the group's thread), then `deliver`."""
        call = partial(self._run, signature, exchange)
        want = self._posted(str(signature))
        if not async_op and self._queue.idle:
            return deliver(call() if self._rank.vigil is None else self._rank.vigil.wait(want, call))
        future = self._queue.submit(call)
        self._rank.futures = [future, *(known for known in self._rank.futures if not known.done())]
        self._rank.in_flight[future] = signature
        handle = _QueuedHandle(future, deliver, self._rank, want)
        return handle if async_op else handle.wait()

    def end(self) -> Future[None]:
        """Tell the other members, after all calls, that no more will come."""
        self._posted(ENDED)
        return self._queue.submit(partial(self._run, ENDED, lambda: None))

    def needs(self) -> list[tuple[int, str, int]]:
        """What the other members must have posted for this one's last call to be under way."""
        mine = self.ranks[self._member]
        return [(rank, self.name, self._num_posted) for rank in self.ranks if rank != mine]

    def _posted(self, text: str) -> Want:
        """Count a call; returns what waiting for it waits for."""
        if self._rank.vigil is not None and len(self.ranks) > 1:
            self._num_posted = self._rank.vigil.posted.add(self.name)
        return Want(text, tuple(self.needs()) if self._num_posted else ())

    def close(self) -> None:
        """Leave the group and end its thread."""
        self._queue.stop()
        self.wire.close()
        self.control.close()

    def _run(self, signature: Signature | str, exchange: Callable[[], R]) -> R:
        def checked() -> R:
            if self._rank.rendezvous.check and len(self.ranks) > 1:
                error = disagreement(self.ranks, self.control.tell(call_record(signature)))
                if error is not None:
                    raise error
            return exchange()

        return self._rank.rendezvous.tell(f"rank {self.ranks[self._member]} waits in {signature}", checked)


class _QueuedHandle(Handle[T]):
    """A call in its group's queue; what it got is handed over, in place or as new tensors, at the first wait."""

    def __init__(self, future: Future[R], deliver: Callable[[R], T], rank: GlooRank, want: Want) -> None:
        self._future, self._deliver, self._rank, self._want = future, deliver, rank, want
        self._result: list[T] = []

    def wait(self) -> T:
        if not self._result:
            vigil = self._rank.vigil
            got = self._future.result() if vigil is None else vigil.until(self._want, self._future)
            self._result.append(self._deliver(got))
            self._rank.in_flight.pop(self._future, None)
        return self._result[0]

    def is_completed(self) -> bool:
        return self._future.done()


class _CallQueue:
    """Runs a group's asynchronous calls, each handed to torch after those before it, some in flight at a time.

    Threads take turns: who has the turn takes the next call, and passes the turn on once that has been issued. So all
    members issue in the same order, and as with torch's own gloo the gaps of one call are filled by the next.

    Args:
        in_flight: how many calls may be under way; as many threads start when they are needed.
    """

    def __init__(self, in_flight: int) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._in_flight, self._threads = in_flight, list[threading.Thread]()
        self._last: Future[Any] | None = None
        self._turn, self._holder = threading.Lock(), 0

    @property
    def idle(self) -> bool:
        """Whether everything submitted has been done, or is at least under way for good."""
        return self._last is None or self._last.done()

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        """Run `call` after those before it."""
        if not self._threads or (len(self._threads) < self._in_flight and not self.idle):
            # A daemon: a call whose members never come must not keep the process from ending.
            self._threads.append(threading.Thread(target=self._work, name="gloo calls", daemon=True))
            self._threads[-1].start()
        self._last = Future()
        self._calls.put((call, self._last))
        return self._last

    def issued(self) -> None:
        """This thread's call has been issued: the next one may be."""
        if self._holder == threading.get_ident():
            self._holder = 0
            self._turn.release()

    def stop(self) -> None:
        """End the threads when they have done what was submitted."""
        self._calls.put(None)

    def _work(self) -> None:
        while True:
            self._turn.acquire()
            self._holder = threading.get_ident()
            item = self._calls.get()
            if item is None:
                self._calls.put(None)  # for the other threads
                self.issued()
                return
            call, future = item
            try:
                result = call()
            except BaseException as error:
                self.issued()
                future.set_exception(error)
            else:
                self.issued()
                future.set_result(result)
                del result
            del item, call, future  # or the last call's tensors would live until the next one
