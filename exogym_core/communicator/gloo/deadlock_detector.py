"""The deadlock detector of real ranks: calls that can never complete are reported within seconds, not by a time-out.

A rank counts its posts, lane by lane: calls of a group, messages of a tag from one rank to another. A wait needs so
many posts of others. Counts only grow, and those of a rank that waits stand still. So reports may be old and still show
a deadlock truly: the first rank to continue would have needed a post that another one had not made when it reported.

A rank that has waited for half a second reports its wait in the store at which the ranks have met (signed, and
no port more). Each checks whether all reports amount to a deadlock. gloo cannot be called back from a wait: so it
waits in a helper thread, which is abandoned when the wait has become pointless.
"""

from __future__ import annotations

import contextlib
import json
import queue
import sys
import threading
import time
import traceback
import weakref
from concurrent.futures import Future, InvalidStateError
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from exogym_core.communicator.exchange import deadlock_error, rank_names, ranks_stuck
from exogym_core.communicator.gloo.rendezvous import NoAnswerError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from collections.abc import Set as AbstractSet

    from exogym_core.communicator.gloo.rendezvous import Rendezvous, SignedStore
    from netsim.errors import DeadlockError

__all__ = [
    "CallQueue",
    "DeadlockDetector",
    "Pending",
    "Posted",
    "Waits",
    "Want",
    "deadlock_among",
    "fulfil",
    "in_thread",
]

# --- waits and posts -----------------------------------------------------------------------------------------


_MOST_LANES = 500  # that a rank reports, those it has used last


class Want(NamedTuple):
    """Posts that a rank waits for.

    Attributes:
        text: the call and its place.
        needs: (rank, lane, how many posts of that rank in that lane), all of them.
        any_one: one of them is enough.
    """

    text: str
    needs: tuple[tuple[int, str, int], ...]
    any_one: bool = False


class Pending(NamedTuple):
    """Report of a waiting rank: the posts it needs, and its own posts."""

    want: Want
    posted: dict[str, int]
    is_all: bool

    def to_text(self) -> str:
        """JSON for the store."""
        return json.dumps([self.want, self.posted, self.is_all])

    @classmethod
    def of_text(cls, text: bytes) -> Pending:
        """Parse the JSON of `to_text`."""
        want, posted, is_all = json.loads(text)
        return cls(Want(*want), posted, is_all)

    def has_posted(self, lane: str, number: int) -> bool:
        """True if at least `number` posts in a lane may have been made."""
        found = self.posted.get(lane)
        return not self.is_all if found is None else found >= number


class Posted:
    """Counts a rank's posts by lane."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def add(self, lane: str) -> int:
        """Count one more, and return the new count."""
        number = self._counts.pop(lane, 0) + 1
        self._counts[lane] = number  # the last used stand last
        return number

    def count(self, lane: str) -> int:
        """Number of posts in a lane."""
        return self._counts.get(lane, 0)

    def pending(self, want: Want) -> Pending:
        """Report of this rank while it waits for `want`."""
        lanes = list(self._counts.items())
        return Pending(want, dict(lanes[-_MOST_LANES:]), len(lanes) <= _MOST_LANES)


def deadlock_among(pending: Mapping[int, Pending], others: Mapping[int, str]) -> DeadlockError | None:
    """The error if some of the ranks can never make progress, by their last reports.

    Args:
        pending: of ranks that have reported that they wait; the others may do anything.
        others: other lines of the table, by rank.
    """
    missing = {rank: _missing(report, pending) for rank, report in pending.items()}

    def can_go_on(rank: int, able: AbstractSet[int]) -> bool:
        enough = any if pending[rank].want.any_one else all
        awaited = missing[rank]
        return not awaited or enough(each in able or each not in pending for each in awaited)

    stuck = {}
    for rank in ranks_stuck(pending, (), can_go_on):
        want = pending[rank].want
        stuck[rank] = f"{'any of ' if want.any_one else ''}{rank_names(missing[rank])} in {want.text}"
    if not stuck:
        return None
    table = {rank: f"waits in {report.want.text}" for rank, report in pending.items()} | dict(others)
    table |= {rank: f"waits for {text}" for rank, text in stuck.items()}
    return deadlock_error(stuck, dict(sorted(table.items())))


def _missing(report: Pending, pending: Mapping[int, Pending]) -> list[int]:
    """The ranks whose posts are not known to be there; none if what it waits for is under way."""
    needs = [
        (rank, rank in pending and pending[rank].has_posted(lane, number))
        for rank, lane, number in report.want.needs
    ]
    if report.want.any_one and any(is_there for _, is_there in needs):
        return []
    return sorted({rank for rank, is_there in needs if not is_there})


# --- the detector --------------------------------------------------------------------------------------------


T = TypeVar("T")

_TICK_SECONDS = 0.25
_FIRST_LOOK_SECONDS, _LONGEST_BETWEEN_LOOKS = 0.5, 8.0
_ANSWER_SECONDS = 1.5  # in which a running rank reports its stack, on a busy machine too
_MOST_FRAMES = 12
_STORE_ERRORS = (RuntimeError, ValueError, OSError)  # the store may have gone with its host


class _Wait(NamedTuple):
    """A wait under way: what for, where its result goes, and since when."""

    want: Want
    result: Future[Any]
    since: float


class Waits:
    """Waits of a rank that no detector watches."""

    def __init__(self) -> None:
        self.posted = Posted()
        self.abandoned: list[Future[Any]] = []

    def wait(self, want: Want, call: Callable[[], T]) -> T:
        """Return `call()`, which waits for `want`."""
        return call()

    def until(self, want: Want, future: Future[T]) -> T:
        """The result of a future that waits for `want`."""
        return future.result()

    def close(self) -> None:
        """Stop watching, and end its threads."""


class DeadlockDetector(Waits):
    """Deadlock detector of a rank, for the thread that creates it.

    Args:
        rendezvous: where the ranks have met.

    Attributes:
        posted: posts of this rank; count before you wait.
        abandoned: futures still waited for in threads, though no call needs them any more.
    """

    def __init__(self, rendezvous: Rendezvous) -> None:
        super().__init__()
        self._rank, self._num_ranks = rendezvous.rank, rendezvous.num_ranks
        self._rendezvous = rendezvous
        self._now: _Wait | None = None
        self._users: set[int] = set()
        self._helper: CallQueue | None = None
        self._ended = threading.Event()
        self._store: SignedStore | None = None
        self._main = threading.get_ident()
        self._thread = threading.Thread(target=self._watch, name="detector", daemon=True)
        self._thread.start()

    def wait(self, want: Want, call: Callable[[], T]) -> T:
        """Return `call()`, which waits for `want`.

        Raises:
            DeadlockError: it never will; also when the time is over, with the places of all ranks.
        """
        helper, self._helper = (
            self._helper or CallQueue(1),
            None,
        )  # another thread of the user's takes another
        future = helper.submit(call)
        try:
            return self.until(want, future)
        finally:
            if future.done():
                self._helper = helper

    def until(self, want: Want, future: Future[T]) -> T:
        """The result of a future that waits for `want`; raises as `wait` does."""
        result = future
        if not future.done():
            result = Future()
            future.add_done_callback(partial(_hand_over, result))
            self._users.add(threading.get_ident())
            self._now = _Wait(want, result, time.monotonic())
        try:
            return result.result()
        except NoAnswerError as error:
            if "\n" not in str(error):
                error.args = ("\n".join([str(error), *self._where_everybody_is()]),)
            raise
        finally:
            self._now = None
            if not future.done():
                self.abandoned.append(future)

    def close(self) -> None:
        """Stop watching, and end its threads."""
        self._ended.set()
        self._thread.join()
        if self._helper is not None:
            self._helper.stop()

    # --- the thread ----------------------------------------------------------------------------------------

    def _watch(self) -> None:
        reported: _Wait | None = None
        next_look = 0.0
        while not self._ended.wait(_TICK_SECONDS):
            wait, now = self._now, time.monotonic()
            with contextlib.suppress(*_STORE_ERRORS):
                if self._store is None:
                    self._store = self._rendezvous.another_store()
                if reported is not None and reported is not wait:
                    reported = None
                    self._store.set(f"waits {self._rank}", "")
                if self._store.check(["ask"]):
                    self._store.set(f"stack {self._rank}", self._stack())
                # With several threads of the user's, one that waits does not mean that the rank does.
                if wait is None or now - wait.since < _FIRST_LOOK_SECONDS or len(self._users) > 1:
                    continue
                if reported is None:
                    reported, next_look = wait, now
                    self._store.set(f"waits {self._rank}", self.posted.pending(wait.want).to_text())
                if now >= next_look or self._store.check(["deadlock"]):
                    next_look = now + min(max(now - wait.since, _FIRST_LOOK_SECONDS), _LONGEST_BETWEEN_LOOKS)
                    self._judge(wait)

    def _judge(self, wait: _Wait) -> None:
        assert self._store is not None
        pending, others = self._reports()
        error = deadlock_among(pending, others)
        if error is not None:
            if not self._store.check(["deadlock"]):
                # The others check at once, before connections end.
                self._store.set("deadlock", "seen")
                self._ended.wait(2 * _TICK_SECONDS)
            with contextlib.suppress(InvalidStateError):
                wait.result.set_exception(error)

    def _reports(self) -> tuple[dict[int, Pending], dict[int, str]]:
        """Reports of waiting ranks; of the others, that they run."""
        assert self._store is not None
        pending: dict[int, Pending] = {}
        for rank in range(self._num_ranks):
            text = self._store.get(f"waits {rank}") if self._store.check([f"waits {rank}"]) else b""
            if text:
                pending[rank] = Pending.of_text(text)
        running = set(range(self._num_ranks)) - pending.keys()
        return pending, dict.fromkeys(running, "computes, or waits for something else")

    # --- when the time is over -----------------------------------------------------------------------------

    def _where_everybody_is(self) -> list[str]:
        """A line for each other rank that waits; for those that do not, where they are."""
        with contextlib.suppress(*_STORE_ERRORS):
            self._store = store = self._rendezvous.another_store()
            pending, running = self._reports()
            store.set("ask", "where are you?")
            deadline, silent = time.monotonic() + _ANSWER_SECONDS, set(running) - {self._rank}
            while silent and time.monotonic() < deadline:
                silent -= {rank for rank in silent if store.check([f"stack {rank}"])}
                time.sleep(0.02)
            lines = []
            for rank in range(self._num_ranks):
                if rank in silent:
                    lines.append(
                        f"  rank {rank}: does not answer: it is stopped, or in code that holds the GIL"
                    )
                elif rank in running and rank != self._rank:
                    lines += [f"  rank {rank}: does not wait; it is in", store.get(f"stack {rank}").decode()]
                elif rank != self._rank:
                    lines.append(f"  rank {rank}: waits in {pending[rank].want.text}")
            return lines
        return []

    def _stack(self) -> str:
        """The innermost frames of the rank's own thread, each a line."""
        frame = sys._current_frames().get(self._main)
        frames = traceback.extract_stack(frame)[-_MOST_FRAMES:] if frame is not None else []
        return "\n".join(f"    {each.name} at {each.filename}:{each.lineno}: {each.line}" for each in frames)


def in_thread(call: Callable[[], T]) -> Future[T]:
    """Begin `call()` in a thread of its own."""
    future: Future[T] = Future()
    threading.Thread(target=fulfil, args=(future, call), name="gloo wait", daemon=True).start()
    return future


class CallQueue:
    """Runs calls in threads, each handed to torch after those before it, some in flight at a time.

    Threads take turns: the thread of the turn takes the next call, and passes the turn on once that is issued. So all
    members issue in the same order, and as with torch's own gloo the gaps of one call are filled by the next.

    Args:
        in_flight: most calls in flight; as many threads start when they are needed.
    """

    def __init__(self, in_flight: int) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._in_flight, self._threads = in_flight, list[threading.Thread]()
        # Of the last call, as long as anyone has it: its tensors are not kept.
        self._last: Callable[[], Future[Any] | None] = lambda: None
        self._turn, self._holder = threading.Lock(), 0

    @property
    def idle(self) -> bool:
        """True if everything submitted has been done, or is at least under way for good."""
        last = self._last()
        return last is None or last.done()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Run `call` after those before it."""
        if not self._threads or (len(self._threads) < self._in_flight and not self.idle):
            # A daemon: a call whose members never come must not keep the process from ending.
            self._threads.append(threading.Thread(target=self._work, name="gloo calls", daemon=True))
            self._threads[-1].start()
        future: Future[T] = Future()
        self._last = weakref.ref(future)
        self._calls.put((future, call))
        return future

    def issued(self) -> None:
        """Pass the turn on: this thread's call has been issued."""
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
            fulfil(*item)
            self.issued()  # unless it has been
            del item  # or the last call's tensors would live until the next one


def fulfil(future: Future[T], call: Callable[[], T]) -> None:
    """Set a future to the result of `call`, or to its exception."""
    try:
        result = call()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)


def _hand_over(result: Future[Any], done: Future[Any]) -> None:
    with contextlib.suppress(InvalidStateError):  # its wait has ended
        fulfil(result, done.result)
