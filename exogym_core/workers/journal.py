"""The ranks' request streams as lines of text, and the messages in flight at a checkpoint.

Generators cannot be saved, but a fresh kernel that is fed the same requests arrives at the same instant with
the same transfers in flight. A request is a line of JSON; groups and keys are nested tuples of numbers and
names, which JSON writes as lists. Tensors stay in memory up to a bound, beyond it in private files.
"""

from __future__ import annotations

import json
import math
import os
import queue
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from exogym_core.communicator.deadlines import Deadline
from exogym_core.communicator.simulated.meeting_requests import (
    Confirm,
    Fetch,
    Join,
    Keep,
    Publish,
)
from exogym_core.events import Saved, from_record, to_record
from netsim.errors import InputError
from netsim.ranks import (
    Advance,
    Ask,
    Await,
    Call,
    FirstSent,
    HoldUntil,
    Key,
    Mark,
    MessageGroup,
    Post,
    Put,
    Request,
    Take,
    Wait,
    Withdraw,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

    from exogym_core.events import Finding, Marked
    from netsim.ranks import MailboxMessage, Request

__all__ = [
    "Computing",
    "Held",
    "Journal",
    "MessageName",
    "MessagesInFlight",
    "SnapshotThread",
    "SpillBuffer",
    "message_name",
    "request_from_record",
    "request_to_line",
    "request_to_record",
    "tuples_of",
]

_MEMORY_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Held:
    """Tensors in a spill buffer, and the bytes of memory that they take there."""

    tensors: list[Tensor]
    num_bytes: int


class SpillBuffer:
    """Keeps lists of flat CPU tensors, beyond a bound mapped from files; threads may share it.

    The files have no names, so nothing of them is left behind however the process ends, and go with their tensors.

    Args:
        memory_bytes: limit of bytes held in memory; more go to files.

    Attributes:
        num_bytes: bytes held in memory now.
    """

    def __init__(self, memory_bytes: int = _MEMORY_BYTES) -> None:
        self.num_bytes, self._memory_bytes = 0, memory_bytes
        self._lock = threading.Lock()

    def put(self, tensors: Sequence[Tensor]) -> Held:
        """Keep `tensors`, which must not change meanwhile."""
        size = sum(tensor.nbytes for tensor in tensors)
        with self._lock:
            fits = self.num_bytes + size <= self._memory_bytes
            self.num_bytes += size if fits else 0
        return Held(list(tensors), size) if fits else Held(list(map(_in_file, tensors)), 0)

    def pop(self, held: Held) -> list[Tensor]:
        """Return the tensors, which are kept no longer."""
        with self._lock:
            self.num_bytes -= held.num_bytes
        return held.tensors


_SECONDS_TO_EXIT = 10.0  # its number may have passed to a new thread


def join(thread: threading.Thread) -> None:
    """Wait until a thread has ended for the operating system too, so that this process may be forked.

    Python's `join` (before 3.13) returns while the thread still runs destructors. MKL's frees memory under a lock that
    a fork in this moment would leave locked in the child: its first product of matrices never returned.
    """
    thread.join()
    deadline = time.monotonic() + _SECONDS_TO_EXIT
    while os.path.exists(f"/proc/self/task/{thread.native_id}") and time.monotonic() < deadline:
        time.sleep(0.0)  # gives the core to it


class SnapshotThread:
    """Takes snapshots one after the other in a thread, which ranks do not wait for.

    Args:
        take: takes a rank's snapshot; its failure is raised by the next call here.
        buffer: of snapshots that wait.
        name: of the thread.
        intra_op_threads: torch's threads for one operator in it; None: as they are.

    Attributes:
        num_taken: snapshots taken so far, by rank.
        failure: of `take`; none is taken after it.
    """

    def __init__(
        self,
        take: Callable[[int, Any, list[Tensor]], None],
        buffer: SpillBuffer,
        name: str,
        intra_op_threads: int | None = None,
    ) -> None:
        self._take, self._buffer, self._intra_op_threads = take, buffer, intra_op_threads
        self._queue: queue.SimpleQueue[tuple[int, Any, Held] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.failure: BaseException | None = None
        self.num_taken: Counter[int] = Counter()

    def put(self, rank: int, note: Any, tensors: Sequence[Tensor]) -> None:
        """Queue a snapshot; its tensors must stay unchanged."""
        self.raise_if_failed()
        if self._thread.ident is None:
            self._thread.start()
        self._queue.put((rank, note, self._buffer.put(tensors)))

    def stop(self) -> None:
        """End the thread when it has taken all snapshots."""
        if self._thread.is_alive():
            self._queue.put(None)
            join(self._thread)

    def raise_if_failed(self) -> None:
        """Raise the failure of `take`, if there was one."""
        if self.failure is not None:
            raise self.failure

    def _run(self) -> None:
        if self._intra_op_threads is not None:
            torch.set_num_threads(self._intra_op_threads)
        while (item := self._queue.get()) is not None:
            rank, note, held = item
            tensors = self._buffer.pop(held)
            try:
                if self.failure is None:
                    self._take(rank, note, tensors)
            except BaseException as failure:
                self.failure = failure
            self.num_taken[rank] += 1


def _in_file(tensor: Tensor) -> Tensor:
    """The tensor with its values in a file of its own; changes stay in memory."""
    if not tensor.nbytes:
        return tensor
    with tempfile.TemporaryFile() as file:
        file.write(tensor.contiguous().view(torch.uint8).numpy().data)
        file.flush()
        place = f"/dev/fd/{file.fileno()}"
        return torch.from_file(place, shared=False, size=tensor.nbytes, dtype=torch.uint8).view(tensor.dtype)


# --- messages in flight at a checkpoint ----------------------------------------------------------------------


MessageName = tuple[tuple["Hashable", int], int]
"""((box, sender), number among the sender's messages to the box)."""


def message_name(take: Take, message: MailboxMessage) -> MessageName:
    """Name of a message that a `Take` returned."""
    return (take.box, message.source), message.number


class MessagesInFlight:
    """Messages in flight, and those that a checkpoint needs.

    Args:
        step: of the checkpoint that the run resumes from; 0 for one from the start.
        kept: the messages that lie in it.

    Attributes:
        kept: as given.
        tensors_of: returns the tensors of a message that has not been taken; set by the owner of the values.
    """

    def __init__(self, step: int = 0, kept: Mapping[MessageName, tuple[Tensor, ...]] | None = None) -> None:
        self.kept = dict(kept or {})
        self.tensors_of: Callable[[MessageName], tuple[Tensor, ...]] = self.kept.__getitem__
        self._last_complete = step
        self._passed: Counter[int] = Counter()  # rank -> the step of the last checkpoint that has its state
        # Message not taken -> checkpoint that its sender had passed.
        self._under_way: dict[MessageName, int] = {}
        self._open: dict[int, dict[MessageName, tuple[Tensor, ...]]] = {}  # step -> messages taken meanwhile

    def requested(self, rank: int, request: Request) -> None:
        """Follow a request as the clock serves it."""
        match request:
            case Put():
                self._under_way[(request.box, rank), request.number] = self._passed[rank]
            case Mark(row=Saved(step=step)):
                self._passed[rank] = step
                if step > self._last_complete:
                    self._open.setdefault(step, {})

    def taken(self, rank: int, names: Iterable[MessageName]) -> None:
        """A rank takes these messages."""
        for name in names:
            sent = self._under_way.pop(name)
            crossed = [step for step in self._open if sent < step <= self._passed[rank]]
            for step in crossed:
                self._open[step][name] = self.tensors_of(name)

    def complete(self, step: int) -> dict[MessageName, tuple[Tensor, ...]]:
        """Messages of a step's checkpoint, which every rank has passed."""
        taken = self._open.pop(step, {})
        waiting = {name: self.tensors_of(name) for name, sent in self._under_way.items() if sent < step}
        self._open = {other: taken for other, taken in self._open.items() if other > step}
        self._last_complete = max(step, self._last_complete)
        return taken | waiting


# --- requests ------------------------------------------------------------------------------------------------


@dataclass
class Journal:
    """Requests of ranks: before this run began, and since.

    Attributes:
        past: the requests of each rank that the kernel serves before the rank's own; empty for a run from the
            start.
        found: findings of the evaluator before this run began.
        on_request: called with each rank and request as it is served, beginning with the past.
        in_flight: messages in flight at checkpoints; None: they are not followed.
    """

    past: list[list[Request]] = field(default_factory=list)
    found: list[Finding] = field(default_factory=list)
    on_request: Callable[[int, Request], None] = lambda rank, request: None
    in_flight: MessagesInFlight | None = None

    def mark(self, rank: int, row: Marked | Mapping[str, Any]) -> None:
        """Log a row of a rank without a kernel."""
        self.on_request(rank, Mark(row))

    def past_rows(self) -> list[tuple[int, Any]]:
        """Rows marked before this run began: (rank, row), rank by rank."""
        return [
            (rank, each.row) for rank, own in enumerate(self.past) for each in own if isinstance(each, Mark)
        ]


class Computing(NamedTuple):
    """A share of a step's computing, whose duration depends on the rank's host; recordings alone have it."""

    step: int
    share: float


#: Kind of a request in a line -> its class.
_KINDS: dict[str, type[Any]] = {
    kind.__name__.lower(): kind
    for kind in (
        *(Advance, Ask, Await, Computing, HoldUntil, Mark, Post, Wait, Withdraw, Put, Take),
        *(Confirm, Fetch, Join, Keep, Publish),
    )
}
_KINDS["receive"] = FirstSent
_NAMES = {kind: name for name, kind in _KINDS.items()}


def request_to_line(rank: int, request: Request) -> str:
    """A line of JSON: `[rank, kind, ...]`.

    Raises:
        InputError: a marked row holds something other than numbers, text, lists and mappings.
    """
    try:
        return json.dumps([rank, *request_to_record(request)], separators=(",", ":"))
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"rank {rank}, checkpoint: the row {request!r} cannot be kept ({error}); "
            "mark rows of numbers, text, lists and mappings"
        ) from None


def request_to_record(request: Request) -> list[Any]:
    """The request in values that JSON can hold, its kind first; KeyError for one that is not logged."""
    name = _NAMES[type(request)]
    match request:
        case Post() | Wait() | Await():
            group, number = request.key
            named = {"message": group} if isinstance(group, MessageGroup) else group
            record = [name, named, number, *request[1:]]
            if isinstance(request, Post) and request.seconds == math.inf:
                record.pop()
            return record
        case Ask(key=None, reader=None):
            return [name]
        case Ask():
            raise KeyError(name)
        case Mark():
            return [name, to_record(request.row)]
    return [name, *request]


def request_from_record(record: list[Any]) -> Request:
    """The request of a record that went through JSON.

    Raises:
        ValueError, TypeError, KeyError: it is none.
    """
    name, *values = record
    if name == "joinnext":  # of earlier logs
        name, values[0], values[6:6] = "join", [values[0], None], [None]
    kind = _KINDS[name]
    if kind is Ask:
        return Ask(None, reader=None)
    values = list(map(from_record if kind is Mark else tuples_of, values))
    if kind in (Post, Wait, Await):
        match values[0]:
            case {"message": group}:
                values[0] = MessageGroup(*tuples_of(group))
            case (group, int(), int(), int()):  # of earlier logs; no other group has four parts
                values[0] = MessageGroup(*values[0])
        values[:2] = [values[:2]]
    if "call" in kind._fields:
        values[2] = Call(*values[2])
    if kind._fields[0] == "key":
        values[0] = Key(*values[0])
    if kind is Join:
        values[8] = Deadline(*values[8])
    if kind is Take:
        values[1] = float(values[1])  # of earlier logs it is text
    return kind(*values)  # type: ignore[no-any-return]


def tuples_of(value: Any) -> Any:
    """A value of JSON, with tuples for lists: names of groups are tuples."""
    return tuple(map(tuples_of, value)) if isinstance(value, list) else value
