"""A rank's way to the simulation, and what all its communicators share: counters, and calls in flight."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from exogym_core.communicator.handle import Traffic

if TYPE_CHECKING:
    import weakref
    from collections.abc import Hashable, Mapping, Sequence

    from torch import Tensor

    from exogym_core.communicator.exchange import Signature
    from netsim.ranks.requests import Answer, Call, Key, Question, Request

__all__ = ["InFlight", "Own", "Port", "RankState", "ScheduleBook"]


class ScheduleBook(Protocol):
    """What a call sends over the network, known to ranks (for counting) and to the kernel (for timing)."""

    def traffic(self, call: Call, member: int) -> tuple[int, int]:
        """(bytes sent, bytes sent to another region) by this member."""

    @property
    def carrier_of_codes(self) -> str:
        """What all-reduces encoded values, see `Communicator.carrier_of_codes`."""


class Own(NamedTuple):
    """In the place of a ticket: the values of a member that needs nobody's but its own."""

    tensors: tuple[Tensor, ...]


class Port(Protocol):
    """One rank's way to the simulation."""

    @property
    def copies(self) -> bool:
        """Whether values are copied as they are posted, so that the rank may change its own at once."""

    def request(self, request: Request) -> None:
        """Append to this rank's request stream."""

    def post(
        self,
        key: Key,
        ranks: tuple[int, ...],
        member: int,
        signature: Signature,
        tensors: Sequence[Tensor],
        waits: bool = False,
    ) -> Any:
        """Give this member's values to the exchange; returns the ticket for `take`, which comes next if it `waits`.

        A member that needs nobody (`Signature.needs_nobody`) does not `take`.
        """

    def take(self, ticket: Any, member: int) -> tuple[Tensor, ...]:
        """Block until the values are there; raises what the exchange found wrong."""

    def taken(self, ticket: Any) -> None:
        """The values of `take` have been copied and may go."""

    def ready(self, ticket: Any, member: int) -> bool:
        """Whether `take` would return at once, in host time."""

    def forget(self, ticket: Any, member: int) -> None:
        """Drop a ticket's values: the post has been taken back."""

    def deposit(self, note: Mapping[str, Any], tensors: Sequence[Tensor]) -> None:
        """Hand tensors over to the observer, without waiting for it."""

    def flush(self) -> None:
        """Have the clock serve what this rank has requested, as far as it can."""

    def ask(self, question: Question) -> Answer:
        """The kernel's answer, at this rank's virtual time."""


class InFlight(NamedTuple):
    """A call that has been posted and not waited for; `handle` is None when nobody has it any more."""

    signature: Signature
    ticket: Any
    handle: weakref.ref[Any]


@dataclass
class RankState:
    """What all communicators of one rank share: its clock-side counters."""

    traffic: Traffic = field(default_factory=Traffic)
    pending_seconds: float = 0.0  # advanced, not yet requested
    off_clock: bool = False
    compares_places: bool = True
    num_calls: dict[Hashable, Counter[Hashable]] = field(default_factory=dict)  # by group
    num_groups: Counter[tuple[int, ...]] = field(default_factory=Counter)
    repeating: bool = False  # what is requested now is in the kernel's past already
    noted: list[int] | None = None  # numbers of calls made inside `noting_calls`
    again: list[int] | None = None  # numbers that calls made inside `calls_again` have
    has_asked: bool = False  # the kernel, for the time or what depends on it
    withdrawn: dict[Key, tuple[Any, Signature]] = field(
        default_factory=dict
    )  # receives taken back, with tickets
    in_flight: dict[tuple[Key, int], InFlight] = field(default_factory=dict)  # posted, not waited for
    look_at: int = 8  # so many in flight: see which of them nobody can wait for any more
    unwaited: Signature | None = None  # a call that nobody has waited for
