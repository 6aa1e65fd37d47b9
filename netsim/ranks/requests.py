"""Requests of ranks to the kernel: the records of a rank's stream."""

from __future__ import annotations

import math
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Hashable

__all__ = [
    "Advance",
    "Answer",
    "Ask",
    "Await",
    "Call",
    "CallEnding",
    "Exit",
    "FirstSent",
    "GroupPart",
    "HoldUntil",
    "Key",
    "MailboxMessage",
    "Mark",
    "MessageGroup",
    "Post",
    "Put",
    "Question",
    "Request",
    "Take",
    "Wait",
    "Withdraw",
    "gives_time",
]


class CallEnding(StrEnum):
    """End of a call for a rank: it is done; its time-out passed; or its group broke by another rank's time-out or end,
    or by a lost connection."""

    DONE = "done"
    LATE = "late"
    CLOSED = "closed"


class Call(NamedTuple):
    """Network load of a collective or message, equal on all its members but for an all_to_all.

    Attributes:
        op: as `netsim.collectives.schedule` takes it.
        ranks: its members' ranks, in group order; for a message the sender and the receiver.
        num_bytes: as `netsim.collectives.schedule` takes it.
        root: position of the root among `ranks`.
        element_bytes: size of one element, the grain of chunks.
        parts: for `all_to_all`, bytes from member i to member j; None where they are equal. A member that
            enters knows what it has itself: that is the only row then, and `num_bytes` its sum.
        store: names of the store through which an all_reduce or all_gather goes ("": the topology's only one) and of
            relays that ranks download from; None: members send to each other.
    """

    op: str
    ranks: tuple[int, ...]
    num_bytes: int
    root: int = 0
    element_bytes: int = 1
    parts: tuple[tuple[int, ...], ...] | None = None
    store: tuple[str, ...] | None = None


class Advance(NamedTuple):
    """The rank computes for `seconds` of virtual time.

    Attributes:
        seconds: of it.
        work: what takes these seconds, part by part, for recordings: the kernel ignores it.
    """

    seconds: float
    work: tuple[Any, ...] = ()


class Key(NamedTuple):
    """The name of a call: its group (any hashable) and its number among that group's calls."""

    group: Hashable
    number: Hashable


class MessageGroup(NamedTuple):
    """Group of a message's key: all messages of one tag from one member of a group to another.

    Attributes:
        group: the group of both members.
        source, target: their positions in it.
        tag: any whole number.
    """

    group: Hashable
    source: int
    target: int
    tag: int

    @property
    def box(self) -> Hashable:
        """Queue of messages from any sender; messages to oneself have their own."""
        return self if self.source == self.target else (self.group, self.target, self.tag)


class GroupPart(NamedTuple):
    """Part of a group: calls of some of its ranks, which end with the group's, or the state of a part of a model.

    Attributes:
        group: the whole.
        part: ranks, or the number of the part.
    """

    group: Hashable
    part: Hashable


class Post(NamedTuple):
    """Start the call `key` now, as its member number `member`.

    Attributes:
        key: its name.
        member: position of the rank that posts it among the call's ranks.
        call: what it asks of the network.
        seconds: time-out, after which the group breaks: its calls in flight end undone, and later ones never begin.
    """

    key: Key
    member: int
    call: Call
    seconds: float = math.inf


class Wait(NamedTuple):
    """Wait until the call `key` is done for this rank."""

    key: Key


class Mark(NamedTuple):
    """Stamp this row with the rank's virtual time."""

    row: Any  # a mapping, or an object that its reader knows


class Ask(NamedTuple):
    """Ask for the time; with a key, whether that call is done for this rank; with `until`, whether ranks end here.

    Attributes:
        key: of the call; with `until`, a group and the number of a point in its ranks' programs.
        until: ranks of a group end at the first point that none of them passes before this instant.
        reader: what a program reads, and where, for recordings: the kernel ignores it. None: it shows the time, and no
            request depends on it.
    """

    key: Key | None
    until: float | None = None
    reader: str | None = ""


class Await(NamedTuple):
    """Wait until the call `key` is done for this rank or its group breaks; ask which (a `CallEnding`).

    Attributes:
        key: its name.
        seconds: as for `Post`, from now on.
        is_past: it was answered in an earlier part of the run, and is not asked again.
    """

    key: Key
    seconds: float = math.inf
    is_past: bool = False


class MailboxMessage(NamedTuple):
    """A message in a mailbox: its sender, and its number among that rank's messages to the mailbox."""

    source: int
    number: int


class Put(NamedTuple):
    """Send a message to a mailbox; neither sender nor receiver waits.

    Attributes:
        box: the box's name; one rank takes from it.
        number: position among this rank's messages to that mailbox.
        call: the message.
    """

    box: Hashable
    number: int
    call: Call


class Take(NamedTuple):
    """Take the messages that have arrived in this rank's mailbox.

    Attributes:
        box: the box's name.
        seconds: longest wait for a message while the box is empty; `math.inf`: until one arrives or none ever can.
        is_past: as for `Await`.
    """

    box: Hashable
    seconds: float = 0.0
    is_past: bool = False


class FirstSent(NamedTuple):
    """Ask which message to a queue, not yet being received, was sent first; wait until there is one.

    Attributes:
        box: see `MessageGroup`.
        is_past: as for `Await`.
    """

    box: Hashable
    is_past: bool = False


class Withdraw(NamedTuple):
    """Withdraw this rank's post of a message unless the other member has posted; ask whether that succeeded.

    Attributes:
        key: the name of the message.
        is_past: as for `Await`.
    """

    key: Key
    is_past: bool = False


class HoldUntil(NamedTuple):
    """Pause until this virtual time: held off the clock for other ranks, or not started yet."""

    until: float


Question: TypeAlias = tuple[Any, ...]
"""A request that is answered, at the rank's virtual time."""

Answer: TypeAlias = Any
"""Of `Ask` a number; of `Await` a `CallEnding`; of `Take` messages; of `FirstSent` a key; of `Withdraw` a number."""


class Exit(NamedTuple):
    """End of the rank's stream."""


Request: TypeAlias = tuple[Any, ...]
"""A named tuple of this module, or of another one that gives its kernel a handler for it."""


def gives_time(request: Request) -> bool:
    """True if a request gives a call a time-out."""
    return isinstance(request, Post | Await) and request.seconds < math.inf
