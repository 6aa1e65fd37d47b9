"""Posting calls: values go to the exchange, times to the kernel; who has posted waits for both by a handle."""

from __future__ import annotations

import math
import weakref
from abc import abstractmethod
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from exogym_core.communicator.base import Communicator
from exogym_core.communicator.exchange import Signature
from exogym_core.communicator.handle import Handle, Traffic
from exogym_core.communicator.simulated.port import InFlight, Own, RankState
from exogym_core.communicator.values import own_value
from netsim.files.errors import BrokenCallError, InputError
from netsim.ranks.requests import Advance, Ask, Await, Call, CallEnding, Key, Post, Wait, Withdraw

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from torch import Tensor

    from exogym_core.communicator.simulated.port import Port, ScheduleBook
    from netsim.ranks.requests import Answer, Question, Request

__all__ = ["PostingRank", "SimulatedHandle"]

T = TypeVar("T")


class SimulatedHandle(Handle[T]):
    """A posted call: its values are taken, and its end is waited for on the clock, at the first `wait`."""

    def __init__(
        self,
        comm: PostingRank,
        key: Key,
        ticket: Any,
        member: int,
        deliver: Callable[[tuple[Tensor, ...]], T],
        on_clock: bool,
        signature: Signature,
    ) -> None:
        self._comm, self._key, self._ticket, self._member = comm, key, ticket, member
        self._signature = signature
        self._deliver, self._on_clock = deliver, on_clock
        self._open = (key, member)
        self._is_charged = False
        self._result: list[T] = []

    def wait(self, seconds: float = math.inf) -> T:
        """Until it is over.

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
            else:  # should others have to go on before, this rank stands still where it is
                self._comm._request_advance()
        return self.deliver()

    def _end(self, seconds: float) -> None:
        """Be told how it ends: only then is it known whether there are values to take."""
        ending = self._comm._ask(Await(self._key, seconds))
        if ending != CallEnding.DONE:
            self._comm._state.in_flight.pop(self._open, None)
            most = f"{min(seconds, self._comm.call_seconds) * 1e3:.10g}ms"
            told = f"Timed out waiting {most}" if ending == CallEnding.LATE else "Connection closed by peer"
            raise BrokenCallError(f"rank {self._comm.rank}, {self._signature}: {told}")

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
    """What the parts of a simulated communicator have in common: who it is, and how calls are posted and counted.

    Args:
        port: the rank's way to the simulation.
        ranks: the group's members, as ranks of the run.
        rank: this rank's position among them.
        book: what calls send.
        state: shared by all communicators of this rank.
        group_id: equal on all members, different for every group.

    Attributes:
        call_seconds: virtual seconds that each call may take from its post; one that takes longer breaks the group:
            its calls end undone, with BrokenCallError for who waits for one.
    """

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
        """What all communicators of this rank share."""
        return self._state

    @property
    def traffic(self) -> Traffic:  # type: ignore[override]
        """What this rank has sent so far, in all its groups."""
        return self._state.traffic

    @abstractmethod
    def _with(
        self, ranks: tuple[int, ...], rank: int, group_id: Hashable, number: int | None = None
    ) -> Communicator:
        """The communicator of other ranks of the run, this one at position `rank` among them.

        With a number, which never comes again, nothing is remembered of its calls.
        """

    def _withdrawn(self, key: Key, ticket: Any, signature: Signature) -> None:
        """The next receive of the lane has this one's number; and its values, should they be here already."""
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
        self,
        name: str,
        tensors: Sequence[Tensor],
        deliver: Callable[[tuple[Tensor, ...]], T],
        async_op: bool,
        *,
        reduce_op: str = "",
        root: int = 0,
        like: Sequence[Tensor] | None = None,
        waits: bool = False,
    ) -> T | Handle[T]:
        """Post a call; with `waits`, whoever gets its handle waits for it next."""
        like = tensors if like is None else like
        state = self._state
        signature = Signature.of(
            name,
            like,
            reduce_op=reduce_op,
            root=root,
            on_clock=not state.off_clock,
            compares_places=state.compares_places,
        )
        call = Call(
            name, self._ranks, self._charged_bytes(name, like), root, like[0].element_size() if like else 1
        )
        if name == "all_to_all":  # what others have is theirs to tell
            own = tuple(tensor.nbytes for tensor in tensors)
            call = call._replace(num_bytes=sum(own), parts=(own,))
        lane = self._lane()
        key = Key(lane, self._next_number(lane))
        # What is only moved is handed over as it is, and others may take it long after this rank has gone on
        # and changed it. What is reduced is read when the last member posts, while those wait who get the result.
        goes_on = async_op or not reduce_op or (name == "reduce" and self.rank != root)
        keeps = goes_on and not self._port.copies
        inputs = [tensor.detach().clone() if keeps else tensor.detach() for tensor in tensors]
        waits = waits or not async_op
        handle = self._post(key, call, self.rank, signature, inputs, deliver, waits)
        return handle if async_op else handle.wait()

    def _charged_bytes(self, name: str, like: Sequence[Tensor]) -> int:
        """What `netsim.collectives.schedule` calls num_bytes: the tensor, or the sum over ranks."""
        own = sum([tensor.nbytes for tensor in like])
        return own * self.world_size if name in ("all_gather", "gather", "scatter") else own

    def _post(
        self,
        key: Key,
        call: Call,
        member: int,
        signature: Signature,
        tensors: Sequence[Tensor],
        deliver: Callable[[tuple[Tensor, ...]], T],
        waits: bool = False,
    ) -> Handle[T]:
        on_clock = not self._state.off_clock
        ticket, earlier = self._state.withdrawn.pop(key, (None, signature))
        if ticket is None and signature.needs_nobody(member):
            self._port.post(key, call.ranks, member, signature, tensors)
            value = own_value(call.op, tensors, member, call.root, len(call.ranks))
            if not waits and self._port.copies:  # the rank may change what it has given before it waits
                value = tuple(tensor.clone() for tensor in value)
            ticket = Own(value)
        elif ticket is None:
            ticket = self._port.post(key, call.ranks, member, signature, tensors, waits)
        elif earlier.agreed() != signature.agreed():
            raise InputError(f"rank {self.rank}: {signature} must ask for what the cancelled {earlier} did")
        if on_clock:
            self._count(call, member, tensors)
            self._request(Post(key, member, call, self.call_seconds))
        handle = SimulatedHandle(self, key, ticket, member, deliver, on_clock, signature)
        if self._state.noted is None:
            self._state.in_flight[key, member] = InFlight(signature, ticket, weakref.ref(handle))
            if len(self._state.in_flight) >= self._state.look_at:
                self._let_go()
        return handle

    def _take(self, ticket: Any, member: int) -> tuple[Tensor, ...]:
        return ticket.tensors if isinstance(ticket, Own) else self._port.take(ticket, member)

    def _taken(self, ticket: Any) -> None:
        if not isinstance(ticket, Own):
            self._port.taken(ticket)

    def _is_ready(self, ticket: Any, member: int) -> bool:
        return isinstance(ticket, Own) or self._port.ready(ticket, member)

    def _let_go(self) -> None:
        """Forget calls that are over and that nobody can wait for any more."""
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
        """How many calls each lane of this group has had."""
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
        """What has been computed since the last request, as one."""
        if self._state.pending_seconds:
            seconds, self._state.pending_seconds = self._state.pending_seconds, 0.0
            self._port.request(Advance(seconds))

    def _ask(self, question: Question) -> Answer:
        self._state.has_asked = True
        self._request_advance()
        return self._port.ask(question)
