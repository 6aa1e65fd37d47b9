"""The simulated transport: values through the exchange, times through netsim's kernel.

`Simulation` is the side that all ranks share, `SimulatedCommunicator` the side of one rank, with handles that wait for
values and for times. Between them is a `Port`, which is a method call for ranks in threads of the same process and a
pipe for ranks elsewhere.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter, defaultdict
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar, cast

import torch
from torch import Tensor

from exogym_core.communicator.base import (
    FIXED,
    CallState,
    Communicator,
    Handle,
    JointWork,
    NextMeeting,
    nothing,
    write_first,
)
from exogym_core.communicator.exchange import Part, own_value
from exogym_core.communicator.simulated.meeting_requests import (
    Confirm,
    Fetch,
    Fetched,
    Join,
    Keep,
    Met,
    Publish,
)
from exogym_core.communicator.simulated.simulation import load_of
from netsim.collectives.schedules.direct import STORE
from netsim.errors import BrokenCallError, InputError, MemberEndedError
from netsim.ranks import (
    Advance,
    Ask,
    Await,
    Call,
    CallEnding,
    Exit,
    FirstSent,
    GroupPart,
    HoldUntil,
    Key,
    Mark,
    MessageGroup,
    Post,
    Put,
    Take,
    Wait,
    Withdraw,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from exogym_core.communicator.base import CollectiveCall, Delivery
    from exogym_core.communicator.deadlines import Deadline
    from exogym_core.communicator.exchange import Signature
    from exogym_core.communicator.simulated.meeting_requests import Arrival
    from exogym_core.events import Marked
    from netsim.ranks import Answer, Question, Request

__all__ = ["InFlight", "Port", "RankState", "ScheduleBook", "SimulatedCommunicator", "SimulatedHandle"]

T = TypeVar("T")


class ScheduleBook(Protocol):
    """Traffic of calls, for ranks (counting) and the kernel (timing)."""

    def traffic(self, call: Call, member: int) -> tuple[int, int]:
        """(bytes sent, bytes sent to another region) by this member."""

    def check_store(self, store: tuple[str, ...]) -> None:
        """Raise InputError where the topology has no such store."""

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

    def take(self, ticket: Any, member: int, deliver: Delivery[T]) -> T:
        """Block until the values are there, and deliver copies of them; raises what the exchange found wrong."""

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
    pending_work: list[Any] = field(default_factory=list)  # what takes them, part by part
    # By group.
    num_calls: defaultdict[Hashable, Counter[Hashable]] = field(default_factory=partial(defaultdict, Counter))
    num_groups: Counter[tuple[int, ...]] = field(default_factory=Counter)
    repeating: bool = False  # what is requested now is in the kernel's past already
    noted: list[int] | None = None  # numbers of calls made inside `noting_calls`
    again: list[int] | None = None  # numbers that calls made inside `calls_again` have
    are_taken: bool = False  # the values of these calls
    withdrawn: dict[Key, tuple[Any, Signature]] = field(default_factory=dict)  # receives, with tickets
    in_flight: dict[tuple[Key, int], InFlight] = field(default_factory=dict)  # posted, not waited for
    look_at: int = 8  # so many in flight: see which of them no call can wait for any more
    unwaited: Signature | None = None  # a call without a wait


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
            self._comm.state.in_flight.pop((self._key, self._member), None)
            rank = self._comm.rank
            where = f"rank {rank}, {self._signature}"
            if ending != CallEnding.LATE:
                raise MemberEndedError(f"{where}: Connection closed by peer", rank)
            most = min(seconds, self._comm.call_seconds) * 1e3
            raise BrokenCallError(f"{where}: Timed out waiting {most:.10g}ms", rank)

    def deliver(self) -> T:
        """The result, as soon as it is there in host time; the clock is waited for by `wait` alone."""
        if not self._result:
            ticket, port = self._ticket, self._comm._port
            if isinstance(ticket, tuple):  # of a member that needs its own values alone: these
                self._result.append(self._deliver(ticket))
            else:
                self._result.append(port.take(ticket, self._member, self._deliver))
            if in_flight := self._comm.state.in_flight:
                in_flight.pop((self._key, self._member), None)
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


_CALLS_A_ROUND = 1 << 20  # of a group with a number; JSON and floats hold 2**33 such rounds exactly


class SimulatedJointWork(JointWork):
    """Ranks present at the meeting `key` of a group; with a time-out those that are left work again without others."""

    def __init__(
        self,
        comm: SimulatedCommunicator,
        key: Key,
        present: tuple[Arrival, ...],
        averaging_seconds: float,
    ) -> None:
        self._comm, self._key, self._averaging_seconds = comm, key, averaging_seconds
        self._attempt = 0
        self._take(present)

    def _take(self, present: tuple[Arrival, ...]) -> None:
        self._present = present
        self.members = [arrival.member for arrival in present]
        self.weights = [arrival.weight for arrival in present]
        self.peers = None
        if self._comm.rank in self.members:
            (group, counted), comm = self._key, self._comm
            ranks = tuple(comm._ranks[member] for member in self.members)
            place = self.members.index(comm.rank)
            self.peers = comm._with(ranks, place, (group, ranks), cast("int", counted))

    def confirm(self) -> bool:
        if self._averaging_seconds == math.inf:
            return True
        left: tuple[Arrival, ...] = self._comm._ask(Confirm(self._key, self._attempt))
        self._attempt += 1
        if left == self._present:
            return True
        if not left:
            named = ", ".join(map(str, self.members))  # by each of them, and the first error is the run's
            raise InputError(
                f"average_present of ranks {named}: not finished in {self._averaging_seconds:g} s, though all members "
                "answer and none has a narrower connection than the others; raise the strategy's averaging_timeout "
                "(averaging_seconds of a call); with stages it is the limit of a whole step, which takes longer with "
                "adopted workers"
            )
        self._take(left)
        return False


class SimulatedCommunicator(Communicator):
    """Communicator of a rank on the simulated network.

    Args:
        port: the rank's way to the simulation.
        ranks: the group's members, as ranks of the run.
        rank: this rank's position among them.
        book: traffic of calls.
        state: shared by all communicators of this rank.
        group_id: equal on all members, different for every group.
        num_calls: number of calls of joint work, and of messages between two members; None: of the group, in the state.
        first_call: number of the first call of joint work.

    Attributes:
        call_seconds: virtual seconds that each call may take from its post; one that takes longer breaks the group:
            its calls end undone, with BrokenCallError in the ranks that wait for one.
    """

    transport = "netsim"
    can_leave_behind = True
    state: RankState

    def __init__(
        self,
        port: Port,
        ranks: Sequence[int],
        rank: int,
        book: ScheduleBook,
        state: RankState | None = None,
        group_id: Hashable = 0,
        num_calls: Counter[Hashable] | None = None,
        first_call: int = 0,
    ) -> None:
        super().__init__(rank, len(ranks), state if state is not None else RankState())
        self._port, self._ranks, self._book = port, tuple(ranks), book
        self._group_id = group_id
        self.call_seconds = math.inf
        self._is_joint_work = num_calls is not None
        self._num_calls = self.state.num_calls[group_id] if num_calls is None else num_calls
        self._first_call = first_call
        self._store: tuple[str, ...] | None = None
        self._part: int | None = None

    def through_store(self, store: tuple[str, ...]) -> SimulatedCommunicator:
        self._book.check_store(store)
        made = copy(self)
        made._store = store
        return made

    def _withdrawn(self, key: Key, ticket: Any, signature: Signature) -> None:
        """Give this receive's number, and its values if they have come, to the next receive of its messages."""
        self.state.in_flight.pop((key, 1), None)
        self._num_calls[key.group, "recv"] -= 1
        if not self._num_calls[key.group, "recv"]:
            del self._num_calls[key.group, "recv"]
        if self._port.ready(ticket, 1):
            self.state.withdrawn[key] = (ticket, signature)
        else:
            self._port.forget(ticket, 1)

    def _collective(
        self, call: CollectiveCall, deliver: Delivery[T], async_op: bool, *, waits: bool = False
    ) -> T | Handle[T]:
        """Post a call; with `waits`, its handle is waited for next."""
        name, tensors, reduce_op, root = call.name, call.tensors, call.reduce_op, call.root
        signature = self._signature(name, call.like or tensors, reduce_op, root)
        key = self._next_key()
        # Values that are only moved are handed over as they are, and others may take them long after this rank
        # has changed its tensors. Reduced values are read when the last member posts, while the receivers wait.
        goes_on = async_op or not reduce_op or (name == "reduce" and self.rank != root)
        keeps = goes_on and not self._port.copies
        inputs = [tensor.detach().clone() if keeps else tensor.detach() for tensor in tensors]
        waits = waits or not async_op
        part = Part(key, self._ranks, self.rank, signature, inputs)
        handle = self._post(part, load_of(call, self._ranks, self._store), deliver, waits)
        return handle if async_op else handle.wait()

    def charge(self, call: CollectiveCall) -> None:
        key, load = self._next_key(), load_of(call, self._ranks, self._store)
        self.state.traffic.count(call.tensors, *self._book.traffic(load, self.rank))
        self._request(Post(key, self.rank, load, self.call_seconds))
        self._request(Wait(key))

    def _post(self, part: Part, call: Call, deliver: Delivery[T], waits: bool = False) -> Handle[T]:
        key, _, member, signature, tensors = part
        on_clock = not self.state.off_clock
        ticket, earlier = None, signature
        if self.state.withdrawn:
            ticket, earlier = self.state.withdrawn.pop(key, (ticket, earlier))
        if self.state.are_taken:
            ticket = ()
        elif not signature.has_values:
            self._port.post(part._replace(tensors=()))
            ticket, deliver = (), cast("Delivery[T]", nothing)
        elif ticket is None and signature.needs_nobody(member):
            self._port.post(part)
            value = own_value(signature, tensors, member, len(call.ranks))
            if not waits and self._port.copies:  # the rank may change what it has given before it waits
                value = tuple(tensor.clone() for tensor in value)
            ticket = value
        elif ticket is None:
            ticket = self._port.post(part, waits)
        elif earlier.agreed() != signature.agreed():
            raise InputError(f"rank {self.rank}: {signature} must ask for what the cancelled {earlier} did")
        if on_clock:
            self.state.traffic.count(tensors, *self._book.traffic(call, member))
            self._request(Post(key, member, call, self.call_seconds))
        handle = SimulatedHandle(self, part, ticket, deliver, on_clock)
        if self.state.noted is None and not waits:
            self.state.in_flight[key, member] = InFlight(signature, ticket, weakref.ref(handle))
            if len(self.state.in_flight) >= self.state.look_at:
                self._let_go()
        return handle

    def _post_alone(self, kind: str, key: Key, tensors: Sequence[Tensor] = ()) -> Any:
        """Post a call of this rank alone, which has the exchange store tensors or return them; returns its ticket."""
        given = [tensor.detach() for tensor in tensors]
        return self._port.post(Part(key, (self._ranks[self.rank],), 0, self._signature(kind, given), given))

    def _handed_over(self, kind: str, key: Key) -> list[Tensor]:
        """Copies of the tensors that the exchange returns."""
        ticket, device = self._post_alone(kind, key), self.device
        return self._port.take(ticket, 0, lambda got: [tensor.clone().to(device) for tensor in got])

    def _is_ready(self, ticket: Any, member: int) -> bool:
        return isinstance(ticket, tuple) or self._port.ready(ticket, member)

    def _let_go(self) -> None:
        """Forget calls that are over and that no rank can wait for any more."""
        state = self.state
        for (key, member), flight in list(state.in_flight.items()):
            if flight.handle() is None and self._is_ready(flight.ticket, member):
                del state.in_flight[key, member]
                if not isinstance(flight.ticket, tuple):
                    with suppress(BrokenCallError):
                        self._port.take(flight.ticket, member, nothing)
                state.unwaited = flight.signature
        state.look_at = max(8, 2 * len(state.in_flight))

    def _next_key(self, group: Hashable = None, side: str = "") -> Key:
        """Key of the next call of `group` from this `side`; None: of this group's next collective."""
        state = self.state
        if group is None:
            group = (self._group_id, "off") if state.off_clock else self._group_id
        if state.again is not None:
            return Key(group, state.again.pop(0))
        number = self._first_call + self._num_calls[group, side]
        self._num_calls[group, side] += 1
        if state.noted is not None:
            state.noted.append(number)
        return Key(group, number)

    def _request(self, request: Request) -> None:
        state = self.state
        if state.repeating:
            return
        if state.pending_work:
            self._request_advance()
        self._port.request(request)

    def _request_advance(self) -> None:
        """Request the seconds computed since the last request, as one."""
        state = self.state
        if state.pending_work:
            request = Advance(state.pending_seconds, tuple(state.pending_work))
            state.pending_seconds, state.pending_work = 0.0, []
            self._port.request(request)

    def _ask(self, question: Question) -> Any:
        self.state.reads.add("clock")
        self._request_advance()
        return self._port.ask(question)

    def _own_tensors(self, got: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        # Received tensors are shared by all members.
        return [tensor.to(device, copy=True, memory_format=torch.contiguous_format) for tensor in got]

    @property
    def averaging_algorithm(self) -> str:
        """Algorithm that the run's `collectives` fix, where it can carry codes."""
        if self._store is not None:
            return STORE
        self.state.reads.add("averaging_algorithm")
        return self._book.averaging_algorithm

    # --- messages ------------------------------------------------------------------------------------------

    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> Handle[None]:
        self._check_peer("send", "dst", dst, tensor)
        given = tensor.detach() if self._port.copies else tensor.detach().clone()
        return self._message("send", tensor, dst, tag, [given], nothing)

    def irecv(self, tensor: Tensor, src: int, tag: int = 0) -> Handle[Tensor]:
        self._check_peer("recv", "src", src, tensor)
        return self._message("recv", tensor, src, tag, [], partial(write_first, tensor))

    def _message(
        self, side: str, like: Tensor, peer: int, tag: int, tensors: Sequence[Tensor], deliver: Delivery[T]
    ) -> Handle[T]:
        src, dst = (self.rank, peer) if side == "send" else (peer, self.rank)
        ranks = (self._ranks[src], self._ranks[dst])
        signature = self._signature("sendrecv", [like], side=side)
        call = Call("sendrecv", ranks, like.nbytes, element_bytes=like.element_size())
        key = self._next_key(MessageGroup(self._group_id, src, dst, tag), side)
        member = 0 if side == "send" else 1
        return self._post(Part(key, ranks, member, signature, tensors), call, deliver)

    def put(self, tensor: Tensor, dst: int, box: str = "") -> None:
        self._check_peer("put", "dst", dst, tensor)
        self._check_on_clock("put")
        ranks = (self._ranks[self.rank], self._ranks[dst])
        name = (self._group_id, dst, box)
        number = cast("int", self._next_key(name, "put").number)
        self._post_alone("put", Key(("put", (name, ranks[0])), number), [tensor])
        call = Call("sendrecv", ranks, tensor.nbytes, element_bytes=tensor.element_size())
        self.state.traffic.count([tensor], *self._book.traffic(call, 0))
        self._request(Put(name, number, call))

    def take(self, box: str = "", wait: float = 0.0) -> list[tuple[int, Tensor]]:
        self._check_on_clock("take")
        self._check_wait(wait)
        name = (self._group_id, self.rank, box)
        taken = []
        for source, number in self._ask(Take(name, float(wait))):
            (tensor,) = self._handed_over("taken", Key(("taken", (name, source)), number))
            taken.append((self._ranks.index(source), tensor))
        return taken

    def _receive_any(self, tensor: Tensor, tag: int) -> int:
        self._check_on_clock("recv")
        group: MessageGroup = self._ask(FirstSent((self._group_id, self.rank, tag))).group
        self.irecv(tensor, group.source, tag).wait()
        return group.source

    # --- among the members that are present ---------------------------------------------------------------

    def meet(
        self,
        seconds: float,
        averaging_seconds: float = math.inf,
        weight: float = 1.0,
        number: int | None = None,
        awaited: Sequence[int] | None = None,
        deadline: Deadline = FIXED,
        num_positions: int = 1,
    ) -> SimulatedJointWork:
        about = (seconds, averaging_seconds, weight)
        self._check_joining("average_present", about, deadline)
        key = self._next_key(self._states) if number is None else Key(self._states, number)
        wanted = None if awaited is None else tuple(self._ranks[rank] for rank in awaited)
        met = self._join(key, about, deadline, awaited=wanted, num_positions=num_positions)
        return SimulatedJointWork(self, key, met.present, averaging_seconds)

    def _check_joining(self, call: str, about: tuple[float, float, float], deadline: Deadline) -> None:
        self._check_present(*about, deadline)
        self._check_on_clock(call)

    def _join(self, key: Key, about: tuple[float, float, float], deadline: Deadline, **more: Any) -> Any:
        """The `Met` of a meeting, see `Join`; `about` are its seconds, averaging seconds and weight."""
        met: Met | None = self._ask(Join(key, self.rank, self._ranks, *about, deadline=deadline, **more))
        if met is not None:
            self.state.num_alive = met.num_alive
        return met

    def among_next(
        self,
        work: Callable[[Communicator, NextMeeting], T],
        seconds: float,
        averaging_seconds: float = math.inf,
        weight: float = 1.0,
        deadline: Deadline = FIXED,
    ) -> tuple[NextMeeting | None, T | None]:
        about = (seconds, averaging_seconds, weight)
        self._check_joining("among_next", about, deadline)
        met = self._join(Key(self._states, None), about, deadline)
        if met is None:
            return None, None
        formed: NextMeeting | None = None

        def work_on(peers: Communicator, weights: list[float]) -> T:
            nonlocal formed
            ranks = gathering.members
            sources = [place for place, rank in enumerate(ranks) if rank in met.sources]
            # Where all of them have gone, one of those that are left leads the others.
            sources = sources or [weights.index(max(weights))]
            formed = NextMeeting(met.number, ranks, weights, sources, met.is_newest, met.since_last)
            return work(peers, formed)

        key = Key(self._states, met.number)
        gathering = SimulatedJointWork(self, key, met.present, averaging_seconds)
        result = gathering.run(work_on)
        return formed, result

    def keep_state(self) -> None:
        self._request(Keep(self._states))

    @property
    def _states(self) -> Hashable:
        """Name of the meetings of this group, and of its published states."""
        states = ("present", self._group_id)
        return states if self._part is None else GroupPart(states, self._part)

    def of_part(self, part: int) -> SimulatedCommunicator:
        made = copy(self)
        made._part = part
        return made

    def publish(self, number: int, tensors: Sequence[Tensor]) -> None:
        self._check_on_clock("publish")
        key = Key(("publish", self._states, self._ranks[self.rank]), number)
        self._post_alone("publish", key, tensors)
        self._request(Publish(Key(self._states, number), sum(tensor.nbytes for tensor in tensors)))

    def fetch(
        self, at_least: int, source: int | None = None, is_open: bool = False
    ) -> tuple[int, list[Tensor]] | None:
        self._check_on_clock("fetch")
        of_source = None if source is None else self._ranks[source]
        fetched: Fetched | None = self._ask(Fetch(self._states, at_least, source=of_source, is_open=is_open))
        if fetched is None:
            return None
        of_run = self._ranks[self.rank]
        group = ("fetch", self._states, of_run, self._next_key(("fetch", self._group_id)).number)
        tensors = self._handed_over("fetch", Key(group, fetched.number))
        with self.state.traffic.of_plain_values():
            call = Call("sendrecv", (fetched.source, of_run), fetched.num_bytes)
            self.state.traffic.count(tensors, *self._book.traffic(call, 0))
        return fetched.number, tensors

    def _check_on_clock(self, call: str) -> None:
        if self.state.off_clock or self.state.repeating:
            raise InputError(f"rank {self.rank}, {call}: it needs the clock; call it on the clock")

    # --- groups and the clock ------------------------------------------------------------------------------

    def _with(
        self, ranks: tuple[int, ...], rank: int, group_id: Hashable, number: int | None = None
    ) -> SimulatedCommunicator:
        about = self._port, ranks, rank, self._book, self.state, group_id
        if number is None:
            return SimulatedCommunicator(*about)
        return SimulatedCommunicator(*about, Counter(), number * _CALLS_A_ROUND)

    def group(
        self, ranks: Sequence[int], reuse: bool = False, number: int | None = None
    ) -> SimulatedCommunicator:
        members = self._check_members(ranks)
        of_run = tuple(self._ranks[rank] for rank in members)
        if self._is_joint_work:  # with which its calls end
            about = (
                self._book,
                self.state,
                GroupPart(self._group_id, of_run),
                self._num_calls,
                self._first_call,
            )
            return SimulatedCommunicator(self._port, of_run, members.index(self.rank), *about)
        # A group is its name: where calls are counted and connections kept. Those made again count from 0.
        if reuse:
            return self._with(of_run, members.index(self.rank), (of_run, -1), number)
        nth = self.state.num_groups[of_run]
        self.state.num_groups[of_run] = nth + 1
        made = self._with(of_run, members.index(self.rank), (of_run, nth))
        # There will never be another of this name here.
        weakref.finalize(made, self.state.num_calls.pop, made._group_id, None).atexit = False
        return made

    @property
    def turns(self) -> Parking | None:
        """Turns of the ranks of this process; None where the rank has it to itself."""
        return self._port.turns

    def advance(self, seconds: float, work: tuple[Any, ...] = ()) -> None:
        if not 0 <= seconds < math.inf:
            raise InputError(
                f"rank {self.rank}, advance: {seconds!r} seconds; give a finite number from 0 up"
            )
        if not self.state.off_clock:
            self.state.pending_seconds += seconds
            self.state.pending_work.append(work or seconds)

    def arrive_at(self, seconds: float) -> None:
        self._request(HoldUntil(seconds))

    def mark(self, row: Marked | Mapping[str, Any]) -> None:
        self._request(Mark(row))

    def deposit(self, note: Any, tensors: Sequence[Tensor]) -> None:
        self._port.deposit(note, tensors)

    def now(self, reader: str | None = "") -> float:
        return self._ask(Ask(None, reader=reader))  # type: ignore[no-any-return]

    @property
    def group_id(self) -> Hashable:
        """Name of the group, equal on all members and in the keys of its calls."""
        return self._group_id

    def instant(self, reader: str | None = "") -> float:
        """Virtual time of the rank's last request: `now` without the seconds that it has computed since.

        Args:
            reader: as of `Ask`.
        """
        self.state.reads.add("clock")
        return self._port.ask(Ask(None, reader=reader))  # type: ignore[no-any-return]

    @property
    def pending_seconds(self) -> float:
        """Seconds that the rank has computed since its last request."""
        self.state.reads.add("clock")
        return self.state.pending_seconds

    def is_over(self, until: float, number: int) -> bool:
        return bool(self._ask(Ask(Key(self._group_id, number), until)))

    # --- checkpoints ---------------------------------------------------------------------------------------

    def repeating(self) -> AbstractContextManager[None]:
        return self.state.having(repeating=True)

    @contextmanager
    def noting_calls(self) -> Iterator[list[int]]:
        noted: list[int] = []
        with self.state.having(noted=noted):
            yield noted

    @contextmanager
    def calls_again(self, numbers: Sequence[int], are_taken: bool = False) -> Iterator[list[int]]:
        state = self.state
        with self.noting_calls() as noted:
            if not state.repeating:
                yield noted
                return
            traffic, seconds, work = asdict(state.traffic), state.pending_seconds, state.pending_work
            state.again, state.are_taken = list(numbers), are_taken
            try:
                yield list(numbers)
            finally:
                state.again, state.are_taken = None, False
                state.pending_seconds, state.pending_work = seconds, work
                state.load_traffic(traffic)

    def flush(self) -> None:
        self._port.flush()

    def state_dict(self) -> dict[str, Any]:
        state = self.state
        if state.in_flight or state.unwaited is not None:  # whether one is over by now depends on host time
            unwaited = state.unwaited or next(iter(state.in_flight.values())).signature
            raise self._still_in_flight(unwaited)
        if state.withdrawn:
            raise self._still_in_flight(f"the cancelled {next(iter(state.withdrawn.values()))[1]}")
        state.reads.add("traffic")
        return {
            "traffic": asdict(state.traffic),
            "pending_seconds": state.pending_seconds,
            "num_calls": {group: dict(counts) for group, counts in state.num_calls.items() if counts},
            "num_groups": dict(state.num_groups),
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        state = self.state
        state.load_traffic(saved["traffic"])
        state.pending_seconds = saved["pending_seconds"]
        state.pending_work = [state.pending_seconds] if state.pending_seconds else []
        # In place: groups have them, and take them with them when they go.
        for counts in state.num_calls.values():
            counts.clear()
        for group, numbers in saved["num_calls"].items():
            state.num_calls[group].update(numbers)
        state.num_groups = Counter(saved["num_groups"])

    def finish(self) -> None:
        """End the rank; its communicators must not be used again."""
        for key in self.state.withdrawn:  # no rank receives these any more
            self._post_alone("forget", Key(("forget", *key), 0))
        self._request(Exit())
