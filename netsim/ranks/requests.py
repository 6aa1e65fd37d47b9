"""Requests of ranks to the kernel: the records of a rank's stream."""

from __future__ import annotations

import math
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

from netsim.ranks.deadlines import Deadline

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable

__all__ = [
    "Advance",
    "Answer",
    "Arrival",
    "Ask",
    "Await",
    "Call",
    "CallEnding",
    "Confirm",
    "Exit",
    "Fetch",
    "Fetched",
    "FirstSent",
    "Gathered",
    "GroupPart",
    "HoldUntil",
    "Join",
    "JoinNext",
    "Keep",
    "Key",
    "MailboxMessage",
    "Mark",
    "MessageGroup",
    "Met",
    "Post",
    "Publish",
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
    """

    key: Key | None
    until: float | None = None


class Join(NamedTuple):
    """Ask which of `ranks` join `key` within `seconds` of the first, once that is settled.

    It is settled when all awaited ranks have joined and reach each other, else at the deadline. Ranks that join at
    that very instant are included; ranks out of reach of the others are not. Later ones are answered at once. The
    answer is a `Met`.

    Attributes:
        key: the name of the meeting.
        member: the arriving rank, by its position among `ranks`.
        ranks: all that may join.
        seconds: time that the others have from the first arrival, whose value counts.
        averaging_seconds: time-out of their joint work, until all have sent `Confirm`.
        weight: reported to all that are present, with the member.
        awaited: ranks to wait for; None: all. Ranks that fetched the group's state of this number are, too.
        is_past: it was answered in an earlier part of the run, and is not asked again.
        deadline: learned deadline, quorum and grace; its first member's counts.
        num_positions: member m is at position m modulo this; neither the meeting nor its work goes on while a position
            has no member.
    """

    key: Key
    member: int
    ranks: tuple[int, ...]
    seconds: float
    averaging_seconds: float = math.inf
    weight: float = 1.0
    awaited: tuple[int, ...] | None = None
    is_past: bool = False
    deadline: Deadline = Deadline()
    num_positions: int = 1

    def has_all_positions(self, ranks: Collection[int]) -> bool:
        """True if each position has one of these ranks."""
        return len({self.ranks.index(rank) % self.num_positions for rank in ranks}) == self.num_positions


class Met(NamedTuple):
    """A meeting that is settled: the members present, and the number of those that were alive then.

    Alive is a member that has been awaited or has come before, whose host is up and has a link that is up.
    """

    present: tuple[Arrival, ...]
    num_alive: int


class JoinNext(NamedTuple):
    """Ask for the next meeting of a group with this rank; meetings are formed as torchft's lighthouse forms quorums.

    One is formed as soon as all members of the one before are there; else when more than half of the members that
    answer are, and all of these or `seconds` have passed since the first came. A member answers until it has been
    down, paused or cut off for `HEARTBEAT_SECONDS`. Who comes later is in the next one. A crash takes back what the
    rank has asked; once it is up, and has computed again what it has lost, it asks again. A meeting has the quorum of
    `deadline` at least.

    Attributes:
        group: whose meeting.
        member, ranks, seconds, averaging_seconds, weight, is_past, deadline: as for `Join`; the weight grows from
            meeting to meeting of one state.
    """

    group: Hashable
    member: int
    ranks: tuple[int, ...]
    seconds: float
    averaging_seconds: float
    weight: float
    is_past: bool = False
    deadline: Deadline = Deadline()


class Gathered(NamedTuple):
    """A meeting that has been formed.

    Attributes:
        number: of the meeting, from 0.
        present: its members.
        sources: those with the newest state, of the greatest weight; of states of equal weight the last to have met.
        is_newest: no meeting before had this weight; else these members repeat what others have done without them.
        num_alive: members that were alive then.
        since_last: seconds since the last meeting was formed, or since the start.
    """

    number: int
    present: tuple[Arrival, ...]
    sources: tuple[int, ...]
    is_newest: bool
    num_alive: int
    since_last: float


class Keep(NamedTuple):
    """Take part in the meetings of `group` from now on, and keep the state: a crash loses what is computed later.

    That is computed again when the rank's host is up, before anything else.
    """

    group: Hashable


class Arrival(NamedTuple):
    """A member that joined in time, and its weight."""

    member: int
    weight: float


class Confirm(NamedTuple):
    """Finish the joint work of the ranks that joined `key`; ask whether all have finished.

    The answer is the ranks left: all of them, or at the time-out those that still reach each other
    (without the slowest, where all do), which may begin again. Then calls among them are cancelled at once.

    Attributes:
        key: the name of the meeting.
        attempt: number of times that the ranks left have begun again.
        is_past: as for `Join`.
    """

    key: Key
    attempt: int
    is_past: bool = False


class Await(NamedTuple):
    """Wait until the call `key` is done for this rank or its group breaks; ask which (a `CallEnding`).

    Attributes:
        key: its name.
        seconds: as for `Post`, from now on.
        is_past: as for `Join`.
    """

    key: Key
    seconds: float = math.inf
    is_past: bool = False


class Publish(NamedTuple):
    """Publish this rank's state of `num_bytes` as `key` (group, number), for others to fetch.

    All that publish under one key have the same state, and older numbers are obsolete.
    """

    key: Key
    num_bytes: int


class Fetch(NamedTuple):
    """Download the newest state of `group` from the nearest rank that has it; ask which, on arrival.

    Attributes:
        group: whose state.
        at_least: the oldest number of use; waits until a rank publishes it or a newer one.
        is_past: as for `Join`.
        source: the rank to download from, which is waited for; None: the nearest.
        is_open: a state is of no use once its meeting, of the same number, is settled: waits for the next one.
    """

    group: Hashable
    at_least: int
    is_past: bool = False
    source: int | None = None
    is_open: bool = False


class Fetched(NamedTuple):
    """Result of a `Fetch`: number of the state, rank that sent it, bytes."""

    number: int
    source: int
    num_bytes: int


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
        is_past: as for `Join`.
    """

    box: Hashable
    seconds: float = 0.0
    is_past: bool = False


class FirstSent(NamedTuple):
    """Ask which message to a queue, not yet being received, was sent first; wait until there is one.

    Attributes:
        box: see `MessageGroup`.
        is_past: as for `Join`.
    """

    box: Hashable
    is_past: bool = False


class Withdraw(NamedTuple):
    """Withdraw this rank's post of a message unless the other member has posted; ask whether that succeeded.

    Attributes:
        key: the name of the message.
        is_past: as for `Join`.
    """

    key: Key
    is_past: bool = False


class HoldUntil(NamedTuple):
    """Pause until this virtual time: held off the clock for other ranks, or not started yet."""

    until: float


Question = Ask | Join | JoinNext | Confirm | Fetch | Take | FirstSent | Withdraw | Await
"""A request that is answered, at the rank's virtual time."""

Answer = (
    float
    | CallEnding
    | Met
    | tuple[Arrival, ...]
    | Gathered
    | tuple[MailboxMessage, ...]
    | Fetched
    | Key
    | None
)
"""None: the state to fetch can never arrive."""


class Exit(NamedTuple):
    """End of the rank's stream."""


Request = Advance | Post | Wait | Mark | Question | Publish | Keep | Put | HoldUntil | Exit


def gives_time(request: Request) -> bool:
    """True if a request gives a call a time-out."""
    return isinstance(request, Post | Await) and request.seconds < math.inf
