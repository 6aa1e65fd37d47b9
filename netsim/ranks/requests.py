"""What ranks ask of the kernel: the records that make up a rank's stream of requests."""

from __future__ import annotations

import math
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

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
    "Join",
    "Key",
    "Lane",
    "Letter",
    "Mark",
    "Post",
    "Publish",
    "Put",
    "Question",
    "Request",
    "Stand",
    "Take",
    "Wait",
    "Withdraw",
    "gives_time",
]


class CallEnding(StrEnum):
    """How a call has ended for a rank: it is done; it took longer than the rank gave it; or its group was broken
    by another rank's time-out or end, or by a lost connection."""

    DONE = "done"
    LATE = "late"
    CLOSED = "closed"


class Call(NamedTuple):
    """What a collective or message asks of the network, equal on all its members but for an all_to_all.

    Attributes:
        op: as `netsim.collectives.schedule` takes it.
        ranks: its members' ranks, in group order; for a message the sender and the receiver.
        num_bytes: as `netsim.collectives.schedule` takes it.
        root: position of the root among `ranks`.
        element_bytes: size of one element, the grain of chunks.
        parts: for `all_to_all`, bytes from member i to member j; None where they are equal. A member that
            enters knows what it has itself: that is the only row then, and `num_bytes` its sum.
    """

    op: str
    ranks: tuple[int, ...]
    num_bytes: int
    root: int = 0
    element_bytes: int = 1
    parts: tuple[tuple[int, ...], ...] | None = None


class Advance(NamedTuple):
    """I compute for `seconds`."""

    seconds: float


class Key(NamedTuple):
    """The name of a call: its group (any hashable) and its number among that group's calls."""

    group: Hashable
    number: Hashable


class Lane(NamedTuple):
    """The group that a message's key names: all messages of one tag from one member of a group to another.

    Attributes:
        group: of which these are members.
        source, target: positions in it.
        tag: any whole number.
    """

    group: Hashable
    source: int
    target: int
    tag: int

    @property
    def box(self) -> Hashable:
        """Where messages lie that anybody may have sent; those to oneself lie by themselves."""
        return self if self.source == self.target else (self.group, self.target, self.tag)


class Post(NamedTuple):
    """Start the call known as `key` now, as its member number `member`.

    Attributes:
        key: its name.
        member: who posts, by its position among the call's ranks.
        call: what it asks of the network.
        seconds: when the call is not over for me after so long, its group breaks: all its calls under way end undone,
            and those that are posted later never begin.
    """

    key: Key
    member: int
    call: Call
    seconds: float = math.inf


class Wait(NamedTuple):
    """I go on when the call known as `key` is done for me."""

    key: Key


class Mark(NamedTuple):
    """Stamp this row with my virtual time."""

    row: Mapping[str, Any]


class Ask(NamedTuple):
    """Tell me the time; or, with a key, whether that call is done for me by now."""

    key: Key | None


class Join(NamedTuple):
    """Tell me who of `ranks` comes to `key` within `seconds` of the first, once that is settled.

    It is settled when all who are waited for have come and those there reach each other, else at the deadline;
    who comes at that very instant is included, who cannot be reached by the others then is not. Who comes later
    is told at once.

    Attributes:
        key: the name of the meeting.
        member: who comes, by its position among `ranks`.
        ranks: who could.
        seconds: what the first to come gives the others; its word counts.
        averaging_seconds: how long what they do together may take, until all have said `Confirm`.
        weight: told to all who come, with the member.
        awaited: who is waited for; None: all. Whoever has fetched the group's state of this number is, too.
        is_past: it was answered in an earlier part of the run, and nobody asks any more.
    """

    key: Key
    member: int
    ranks: tuple[int, ...]
    seconds: float
    averaging_seconds: float = math.inf
    weight: float = 1.0
    awaited: tuple[int, ...] | None = None
    is_past: bool = False


class Arrival(NamedTuple):
    """A member that came in time, and the weight it brought."""

    member: int
    weight: float


class Confirm(NamedTuple):
    """I am through with what those who came to `key` do together; tell me whether everybody is.

    The answer is who is left: all of them, or at the end of the time given those who still reach each other
    (without the slowest, where all do), who may begin again. Then calls among them end undone, at once.

    Attributes:
        key: the name of the meeting.
        attempt: how many times those left have begun again.
        is_past: as for `Join`.
    """

    key: Key
    attempt: int
    is_past: bool = False


class Await(NamedTuple):
    """I go on when the call known as `key` is done for me, or its group is broken; tell me which (an `CallEnding`).

    Attributes:
        key: its name.
        seconds: as for `Post`, from now on.
        is_past: as for `Join`.
    """

    key: Key
    seconds: float = math.inf
    is_past: bool = False


class Publish(NamedTuple):
    """From now on others may fetch what I have as `key`: its group's state, by number, of so many bytes.

    Who publishes under the same key has the same, and older numbers are of no use to anybody.
    """

    key: Key
    num_bytes: int


class Fetch(NamedTuple):
    """Bring me the newest state of `group` from the nearest rank that has it; tell me which, when I have it.

    Attributes:
        group: whose state.
        at_least: the oldest number of use; waits until somebody publishes it or a newer one.
        is_past: as for `Join`.
    """

    group: Hashable
    at_least: int
    is_past: bool = False


class Fetched(NamedTuple):
    """What a `Fetch` has brought: which number, from which rank, how many bytes."""

    number: int
    source: int
    num_bytes: int


class Letter(NamedTuple):
    """What lies in a box: who has put it there, and its number among that rank's letters to the box."""

    source: int
    number: int


class Put(NamedTuple):
    """Bring this to a box; I go on at once, and so does whoever it is for.

    Attributes:
        box: the box's name; one rank takes from it.
        number: of my letters to that box.
        call: a message, from me to that rank.
    """

    box: Hashable
    number: int
    call: Call


class Take(NamedTuple):
    """Tell me what has come to my box and has not been taken.

    Attributes:
        box: the box's name.
        seconds: while the box is empty, wait so long for something to come; `math.inf`: until something
            comes or nothing ever can.
        is_past: as for `Join`.
    """

    box: Hashable
    seconds: float = 0.0
    is_past: bool = False


class FirstSent(NamedTuple):
    """Tell me which message to a box that nobody has begun to receive was sent first, as soon as there is one.

    Attributes:
        box: see `Lane`.
        is_past: as for `Join`.
    """

    box: Hashable
    is_past: bool = False


class Withdraw(NamedTuple):
    """Take my part of a message back, unless the other side has posted its own; tell me whether that was so.

    Attributes:
        key: the name of the message.
        is_past: as for `Join`.
    """

    key: Key
    is_past: bool = False


class Stand(NamedTuple):
    """Off the clock I have waited for others, whom the clock had to let on, until this time."""

    until: float


Question = Ask | Join | Confirm | Fetch | Take | FirstSent | Withdraw | Await
"""A request that is answered, at the rank's virtual time."""

Answer = float | CallEnding | tuple[Arrival, ...] | tuple[Letter, ...] | Fetched | Key | None
"""None: what was to be fetched can never be had."""


class Exit(NamedTuple):
    """I am through."""


Request = Advance | Post | Wait | Mark | Question | Publish | Put | Stand | Exit


def gives_time(request: Request) -> bool:
    """Whether a call is given a time by this."""
    return isinstance(request, Post | Await) and request.seconds < math.inf
