"""What ranks ask of the kernel: the records that make up a rank's stream of requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

__all__ = [
    "Advance",
    "Answer",
    "Arrival",
    "Ask",
    "Call",
    "Exit",
    "Join",
    "Key",
    "Mark",
    "Post",
    "Request",
    "Wait",
]


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


class Post(NamedTuple):
    """Start the call known as `key` now, as its member number `member`."""

    key: Key
    member: int
    call: Call


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
    """Tell me which of `num_members` come to `key` within `seconds` of the first, once that is settled.

    It is settled when all have come, else at the deadline; who comes at that very instant is included. Who
    comes later is told at once.

    Attributes:
        key: the name of the meeting.
        member: who comes.
        num_members: how many could.
        seconds: what the first to come gives the others; its word counts.
        weight: told to all who come, with the member.
        is_past: it was answered in an earlier part of the run, and nobody asks any more.
    """

    key: Key
    member: int
    num_members: int
    seconds: float
    weight: float = 1.0
    is_past: bool = False


class Arrival(NamedTuple):
    """A member that came in time, and the weight it brought."""

    member: int
    weight: float


Answer = float | tuple[Arrival, ...]


class Exit(NamedTuple):
    """I am through."""


Request = Advance | Post | Wait | Mark | Ask | Join | Exit
