"""Calls of a simulated rank: values go to the exchange, times to the kernel; a handle waits for both."""

from __future__ import annotations

import math
import weakref
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from exogym_core.communicator.base import CallState, Communicator, Handle
from exogym_core.communicator.exchange import Part, own_value
from netsim.errors import BrokenCallError, InputError
from netsim.ranks import Advance, Ask, Await, Call, CallEnding, Key, Post, Wait, Withdraw

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping, Sequence

    from torch import Tensor

    from exogym_core.communicator.base import CollectiveCall, Delivery
    from exogym_core.communicator.exchange import Signature
    from netsim.ranks import Answer, Question, Request

__all__ = ["InFlight", "Own", "Port", "PostingRank", "RankState", "ScheduleBook", "SimulatedHandle"]


class ScheduleBook(Protocol):
    """Traffic of calls, for ranks (counting) and the kernel (timing)."""

    def traffic(self, call: Call, member: int) -> tuple[int, int]:
        """(bytes sent, bytes sent to another region) by this member."""

    @property
    def carrier_of_codes(self) -> str:
        """All-reduce algorithm of encoded values, see `Communicator.carrier_of_codes`."""


class Own(NamedTuple):
    """Ticket of a member that needs its own values alone."""

    tensors: tuple[Tensor, ...]


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

    def deposit(self, note: Mapping[str, Any], tensors: Sequence[Tensor]) -> None:
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
        comm: PostingRank,
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
            self._comm._state.in_flight.pop(self._open, None)
            most = f"{min(seconds, self._comm.call_seconds) * 1e3:.10g}ms"
            reason = f"Timed out waiting {most}" if ending == CallEnding.LATE else "Connection closed by peer"
            raise BrokenCallError(f"rank {self._comm.rank}, {self._signature}: {reason}")

    def deliver(self) -> T:
        """The result, as soon as it is there in host time; the clock is waited for by `wait` alone."""
        if not self._result:
            self._result.append(self._deliver(self._comm._take(self._ticket, self._member)))
            self._comm._taken(self._ticket)
            self._comm._state.in_flight.pop(self._open, None)
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


class PostingRank(Communicator):
    """Base of a simulated communicator: its place in the group, posting and counting of calls.

    Args:
        port: the rank's way to the simulation.
        ranks: the group's members, as ranks of the run.
        rank: this rank's position among them.
        book: traffic of calls.
        state: shared by all communicators of this rank.
        group_id: equal on all members, different for every group.

    Attributes:
        call_seconds: virtual seconds that each call may take from its post; one that takes longer breaks the group:
            its calls end undone, with BrokenCallError in the ranks that wait for one.
    """

    _state: RankState

    def __init__(
        self,
        port: Port,
        ranks: Sequence[int],
        rank: int,
        book: ScheduleBook,
        state: RankState | None = None,
        group_id: Hashable = 0,
    ) -> None:
        self.rank, self.world_size = rank, len(ranks)
        self._port, self._ranks, self._book = port, tuple(ranks), book
        self._state = state if state is not None else RankState()
        self._group_id = group_id
        self.call_seconds = math.inf
        self._num_calls: Counter[Hashable] | None = None  # None: as the state has it
        self._first_call = 0

    @property
    def state(self) -> RankState:
        """State shared by all communicators of this rank."""
        return self._state

    def _withdrawn(self, key: Key, ticket: Any, signature: Signature) -> None:
        """Give this receive's number, and its values if they have come, to the next receive of the lane."""
        self._state.in_flight.pop((key, 1), None)
        counter = self._counter
        counter[key.group, "recv"] -= 1
        if not counter[key.group, "recv"]:
            del counter[key.group, "recv"]
        if self._port.ready(ticket, 1):
            self._state.withdrawn[key] = (ticket, signature)
        else:
            self._port.forget(ticket, 1)

    def _collective(
        self, call: CollectiveCall, deliver: Delivery[T], async_op: bool, *, waits: bool = False
    ) -> T | Handle[T]:
        """Post a call; with `waits`, its handle is waited for next."""
        name, tensors, like, reduce_op, root = call.name, call.tensors, call.signed, call.reduce_op, call.root
        signature = self._signature(name, like, reduce_op, root)
        request = Call(
            name, self._ranks, self._charged_bytes(name, like), root, like[0].element_size() if like else 1
        )
        if name == "all_to_all":  # the sizes of the others' parts are theirs to request
            own = tuple(tensor.nbytes for tensor in tensors)
            request = request._replace(num_bytes=sum(own), parts=(own,))
        lane = self._lane()
        key = Key(lane, self._next_number(lane))
        # Values that are only moved are handed over as they are, and others may take them long after this rank
        # has changed its tensors. Reduced values are read when the last member posts, while the receivers wait.
        goes_on = async_op or not reduce_op or (name == "reduce" and self.rank != root)
        keeps = goes_on and not self._port.copies
        inputs = [tensor.detach().clone() if keeps else tensor.detach() for tensor in tensors]
        waits = waits or not async_op
        handle = self._post(Part(key, self._ranks, self.rank, signature, inputs), request, deliver, waits)
        return handle if async_op else handle.wait()

    def _charged_bytes(self, name: str, like: Sequence[Tensor]) -> int:
        """`num_bytes` of `netsim.collectives.schedule`: the tensor, or the sum over ranks."""
        own = sum([tensor.nbytes for tensor in like])
        return own * self.world_size if name in ("all_gather", "gather", "scatter") else own

    def _post(self, part: Part, call: Call, deliver: Delivery[T], waits: bool = False) -> Handle[T]:
        key, _, member, signature, tensors = part
        on_clock = not self._state.off_clock
        ticket, earlier = self._state.withdrawn.pop(key, (None, signature))
        if ticket is None and signature.needs_nobody(member):
            self._port.post(part)
            value = own_value(signature, tensors, member, len(call.ranks))
            if not waits and self._port.copies:  # the rank may change what it has given before it waits
                value = tuple(tensor.clone() for tensor in value)
            ticket = Own(value)
        elif ticket is None:
            ticket = self._port.post(part, waits)
        elif earlier.agreed() != signature.agreed():
            raise InputError(f"rank {self.rank}: {signature} must ask for what the cancelled {earlier} did")
        if on_clock:
            self._count(call, member, tensors)
            self._request(Post(key, member, call, self.call_seconds))
        handle = SimulatedHandle(self, part, ticket, deliver, on_clock)
        if self._state.noted is None and not waits:
            self._state.in_flight[key, member] = InFlight(signature, ticket, weakref.ref(handle))
            if len(self._state.in_flight) >= self._state.look_at:
                self._let_go()
        return handle

    def _post_alone(self, kind: str, key: Key, tensors: Sequence[Tensor] = ()) -> Any:
        """Post a call of this rank alone, which has the exchange store tensors or return them; returns its ticket."""
        given = [tensor.detach() for tensor in tensors]
        return self._port.post(Part(key, (self._ranks[self.rank],), 0, self._signature(kind, given), given))

    def _handed_over(self, kind: str, key: Key) -> list[Tensor]:
        """Copies of the tensors that the exchange returns."""
        ticket = self._post_alone(kind, key)
        tensors = [tensor.clone() for tensor in self._port.take(ticket, 0)]
        self._port.taken(ticket)
        return tensors

    def _take(self, ticket: Any, member: int) -> tuple[Tensor, ...]:
        return ticket.tensors if isinstance(ticket, Own) else self._port.take(ticket, member)

    def _taken(self, ticket: Any) -> None:
        if not isinstance(ticket, Own):
            self._port.taken(ticket)

    def _is_ready(self, ticket: Any, member: int) -> bool:
        return isinstance(ticket, Own) or self._port.ready(ticket, member)

    def _let_go(self) -> None:
        """Forget calls that are over and that no rank can wait for any more."""
        state = self._state
        for (key, member), flight in list(state.in_flight.items()):
            if flight.handle() is None and self._is_ready(flight.ticket, member):
                del state.in_flight[key, member]
                with suppress(BrokenCallError):
                    self._take(flight.ticket, member)
                    self._taken(flight.ticket)
                state.unwaited = flight.signature
        state.look_at = max(8, 2 * len(state.in_flight))

    def _count(self, call: Call, member: int, tensors: Sequence[Tensor]) -> None:
        traffic = self._state.traffic
        bytes_sent, wan_bytes = self._book.traffic(call, member)
        traffic.bytes_sent += bytes_sent
        traffic.wan_bytes += wan_bytes
        traffic.count(tensors)

    def _lane(self) -> Hashable:
        return (self._group_id, "off") if self._state.off_clock else self._group_id

    def _next_number(self, lane: Hashable, side: str = "") -> int:
        state = self._state
        if state.again is not None:
            return state.again.pop(0)
        counter = self._counter
        number = self._first_call + counter[lane, side]
        counter[lane, side] += 1
        if state.noted is not None:
            state.noted.append(number)
        return number

    @property
    def _counter(self) -> Counter[Hashable]:
        """Number of calls in each lane of this group."""
        if self._num_calls is not None:
            return self._num_calls
        counts = self._state.num_calls.get(self._group_id)
        return counts if counts is not None else self._state.num_calls.setdefault(self._group_id, Counter())

    def _request(self, request: Request) -> None:
        state = self._state
        if state.repeating:
            return
        if state.pending_seconds:
            self._request_advance()
        self._port.request(request)

    def _request_advance(self) -> None:
        """Request the seconds computed since the last request, as one."""
        if self._state.pending_seconds:
            seconds, self._state.pending_seconds = self._state.pending_seconds, 0.0
            self._port.request(Advance(seconds))

    def _ask(self, question: Question) -> Answer:
        self._state.has_asked = True
        self._request_advance()
        return self._port.ask(question)
