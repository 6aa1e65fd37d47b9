"""Calls of a simulated rank: its port to the simulation, its state, and handles that wait for values and for times."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from exogym_core.communicator.base import CallState, Handle
from netsim.errors import BrokenCallError, InputError
from netsim.ranks import Ask, Await, CallEnding, Key, Wait, Withdraw

if TYPE_CHECKING:
    import weakref
    from collections.abc import Hashable, Iterable, Sequence

    from torch import Tensor

    from exogym_core.communicator.base import Delivery
    from exogym_core.communicator.exchange import Part, Signature
    from exogym_core.communicator.simulated.communicator import SimulatedCommunicator
    from netsim.ranks import Answer, Call, Question, Request

__all__ = ["InFlight", "Port", "RankState", "ScheduleBook", "SimulatedHandle"]


class ScheduleBook(Protocol):
    """Traffic of calls, for ranks (counting) and the kernel (timing)."""

    def traffic(self, call: Call, member: int) -> tuple[int, int]:
        """(bytes sent, bytes sent to another region) by this member."""

    @property
    def averaging_algorithm(self) -> str:
        """All-reduce algorithm of encoded values, see `Communicator.averaging_algorithm`."""


class Parking(Protocol):
    """Ranks of one process that wait for each other outside of the simulation."""

    def park(self, rank: int) -> None:
        """Give way until another rank says `unpark`, or no other rank is ready."""

    def unpark(self, ranks: Iterable[int]) -> None:
        """Make parked ones of these ranks ready."""


class Port(Protocol):
    """Port of one rank to the simulation."""

    @property
    def copies(self) -> bool:
        """True if values are copied as they are posted, so that the rank may change its own at once."""

    @property
    def turns(self) -> Parking | None:
        """Turns of the ranks in this thread's process; None where a rank has its process to itself."""

    def request(self, request: Request) -> None:
        """Append to this rank's request stream."""

    def post(self, part: Part, waits: bool = False) -> Any:
        """Give this member's values to the exchange; returns the ticket for `take`, which comes next if it `waits`.

        A member that needs no other (`Signature.needs_nobody`) does not `take`.
        """

    def take(self, ticket: Any, member: int) -> tuple[Tensor, ...]:
        """Block until the values are there; raises what the exchange found wrong."""

    def taken(self, ticket: Any) -> None:
        """Release the values of `take`, which have been copied."""

    def ready(self, ticket: Any, member: int) -> bool:
        """True if `take` would return at once, in host time."""

    def forget(self, ticket: Any, member: int) -> None:
        """Drop a ticket's values: the post has been taken back."""

    def deposit(self, note: Any, tensors: Sequence[Tensor]) -> None:
        """Give tensors to the run monitor without waiting for it."""

    def flush(self) -> None:
        """Serve this rank's requests, as far as the clock can."""

    def ask(self, question: Question) -> Answer:
        """The kernel's answer, at this rank's virtual time."""


class InFlight(NamedTuple):
    """A posted call without a wait; `handle` is None after its last reference has gone."""

    signature: Signature
    ticket: Any
    handle: weakref.ref[Any]


@dataclass
class RankState(CallState):
    """State shared by all communicators of one rank: its clock-side counters."""

    pending_seconds: float = 0.0  # advanced, not yet requested
    num_calls: dict[Hashable, Counter[Hashable]] = field(default_factory=dict)  # by group
    num_groups: Counter[tuple[int, ...]] = field(default_factory=Counter)
    repeating: bool = False  # what is requested now is in the kernel's past already
    noted: list[int] | None = None  # numbers of calls made inside `noting_calls`
    again: list[int] | None = None  # numbers that calls made inside `calls_again` have
    has_asked: bool = False  # the kernel, for the time or what depends on it
    withdrawn: dict[Key, tuple[Any, Signature]] = field(default_factory=dict)  # receives, with tickets
    in_flight: dict[tuple[Key, int], InFlight] = field(default_factory=dict)  # posted, not waited for
    look_at: int = 8  # so many in flight: see which of them no call can wait for any more
    unwaited: Signature | None = None  # a call without a wait


T = TypeVar("T")


class SimulatedHandle(Handle[T]):
    """A posted call: its values are taken, and its end is waited for on the clock, at the first `wait`."""

    def __init__(
        self,
        comm: SimulatedCommunicator,
        part: Part,
        ticket: Any,
        deliver: Delivery[T],
        on_clock: bool,
    ) -> None:
        self._comm, self._key, self._member, self._signature = comm, part.key, part.member, part.signature
        self._ticket, self._deliver, self._on_clock = ticket, deliver, on_clock
        self._open = (part.key, part.member)
        self._is_charged = False
        self._result: list[T] = []

    def wait(self, seconds: float = math.inf) -> T:
        """Wait for the end of the call.

        Args:
            seconds: of virtual time; after them it ends undone.

        Raises:
            BrokenCallError: it has ended undone.
        """
        if not self._is_charged:
            self._is_charged = True
            if self._on_clock and min(seconds, self._comm.call_seconds) < math.inf:
                self._end(seconds)
            elif self._on_clock:
                self._comm._request(Wait(self._key))
            else:  # where others have to continue first, this rank stands still
                self._comm._request_advance()
        return self.deliver()

    def _end(self, seconds: float) -> None:
        """Ask how the call ends, which decides whether it has values."""
        ending = self._comm._ask(Await(self._key, seconds))
        if ending != CallEnding.DONE:
            self._comm.state.in_flight.pop(self._open, None)
            most = f"{min(seconds, self._comm.call_seconds) * 1e3:.10g}ms"
            reason = f"Timed out waiting {most}" if ending == CallEnding.LATE else "Connection closed by peer"
            raise BrokenCallError(f"rank {self._comm.rank}, {self._signature}: {reason}")

    def deliver(self) -> T:
        """The result, as soon as it is there in host time; the clock is waited for by `wait` alone."""
        if not self._result:
            self._result.append(self._deliver(self._comm._take(self._ticket, self._member)))
            self._comm._taken(self._ticket)
            self._comm.state.in_flight.pop(self._open, None)
        return self._result[0]

    def is_completed(self) -> bool:
        if self._result:
            return True
        if self._on_clock:
            return bool(self._comm._ask(Ask(self._key))) and self._comm._is_ready(self._ticket, self._member)
        return self._comm._is_ready(self._ticket, self._member)

    def cancel(self) -> bool:
        if self._signature.name != "sendrecv":
            raise InputError(f"rank {self._comm.rank}, cancel: {self._signature} is no message; wait for it")
        if self._result or not self._on_clock or self._signature.side == "send":
            return False
        is_off = bool(self._comm._ask(Withdraw(self._key)))
        if is_off:
            self._comm._withdrawn(self._key, self._ticket, self._signature)
        return is_off
