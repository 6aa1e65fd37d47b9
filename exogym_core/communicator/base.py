"""Communicator contract between training code and transports.

Strategies and loops see this class only. `gloo` moves tensors through real sockets, `netsim` through a
simulated network; both keep the semantics written here, and one table of tests holds them to it.
"""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from exogym_core.communicator.deadlines import Deadline
from exogym_core.communicator.exchange import caller, copy_values, signature_of
from exogym_core.plain import packed, unpacked
from netsim.errors import InputError, UnknownNameError, unknown_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from exogym_core.communicator.exchange import Empty, Signature
    from exogym_core.events import Marked

__all__ = [
    "AVERAGING_ALGORITHMS",
    "CallState",
    "CollectiveCall",
    "Communicator",
    "Deadline",
    "Delivery",
    "Handle",
    "JointWork",
    "NextMeeting",
    "Traffic",
    "nothing",
    "reduce_op_name",
    "write_first",
]

T = TypeVar("T")

#: No learned deadline, no quorum.
FIXED = Deadline()

_dtype_name = cache(str)  # `str` of a dtype takes a microsecond


@dataclass
class Traffic:
    """Bytes that one rank has sent so far.

    Attributes:
        bytes_sent: payload of the calls that this rank posted, headers not counted.
        wan_bytes: the part of it that went to another region (0 where the transport knows no regions).
        payload_bytes: every message counted once in its encoded form, as papers count.
        bytes_by_dtype: those of values that may be encoded, by the dtype of what was sent, such as "torch.uint8".
        charged_values: values whose encoding or decoding has been charged.
    """

    bytes_sent: int = 0
    wan_bytes: int = 0
    payload_bytes: int = 0
    bytes_by_dtype: dict[str, int] = field(default_factory=dict, compare=False)
    charged_values: int = field(default=0, compare=False)

    def count(self, tensors: Sequence[Tensor], bytes_sent: int, wan_bytes: int = 0) -> None:
        """Count a call that gives these tensors, with the bytes that it sends, and sends to other regions."""
        self.bytes_sent += bytes_sent
        self.wan_bytes += wan_bytes
        for tensor in tensors:
            num_bytes, dtype = tensor.nbytes, _dtype_name(tensor.dtype)
            self.payload_bytes += num_bytes
            self.bytes_by_dtype[dtype] = self.bytes_by_dtype.get(dtype, 0) + num_bytes

    @contextmanager
    def of_plain_values(self) -> Iterator[None]:
        """Count the calls inside without their dtypes: their values are not encoded, whatever their dtype."""
        before = dict(self.bytes_by_dtype)
        try:
            yield
        finally:
            self.bytes_by_dtype = before


class NextMeeting(NamedTuple):
    """A meeting of whoever came, see `Communicator.among_next`.

    Attributes:
        number: of the meeting, counted by the group.
        ranks: that take part, in order; `weights` are theirs.
        sources: those with the newest state, by their positions in `ranks`.
        is_newest: the state has gone through more rounds than any before; else others have done them too.
        since_last: seconds since the last meeting was formed, or since the start.
    """

    number: int
    ranks: list[int]
    weights: list[float]
    sources: list[int]
    is_newest: bool
    since_last: float


class JointWork(ABC):
    """Ranks present at a meeting, who work together, see `Communicator.meet`.

    Attributes:
        members: the ranks, in order; `weights` are theirs.
        peers: connects them; None: this rank is not one of them.
    """

    members: list[int]
    weights: list[float]
    peers: Communicator | None

    @abstractmethod
    def confirm(self) -> bool:
        """End the work; False: not all were through in time, and those left, now the members, begin it again."""

    def run(self, work: Callable[[Communicator, list[float]], T]) -> T | None:
        """Run `work(peers, weights)` until all are through together; None: without this rank."""
        while self.peers is not None:
            result = work(self.peers, self.weights)
            if self.confirm():
                return result
        return None


class Handle(ABC, Generic[T]):
    """An operation in flight; `wait()` returns what the synchronous call would have returned."""

    @abstractmethod
    def wait(self) -> T:
        """Block until the result is there. Raises what the operation raised. May be called again."""

    @abstractmethod
    def is_completed(self) -> bool:
        """True if `wait()` would return at once; on a simulated network, at this rank's virtual time."""

    def cancel(self) -> bool:
        """Take a message back that the other side has not called for yet; returns whether that was so.

        A receive that is cancelled takes nothing: the next one of the same sender and tag gets the message. Wait
        for the handle only where this returns False.

        Raises:
            InputError: the operation is a collective, which others count on.
        """
        raise InputError("cancel: only messages can be cancelled; wait for the handle")


Delivery = Callable[[Sequence[Tensor]], T]
"""From the values that a member gets to the result of its call."""


class CollectiveCall(NamedTuple):
    """A member's part of a collective.

    Attributes:
        name: of the collective.
        tensors: that this member gives.
        reduce_op: of a reduction.
        root: source or destination, where there is one.
        like: tensors of the signature; None: those given.
        shapes: of what an all_to_all will bring, where they are known.
    """

    name: str
    tensors: Sequence[Tensor]
    reduce_op: str = ""
    root: int = 0
    like: Sequence[Tensor] | None = None
    shapes: Sequence[Sequence[int]] | None = None


@dataclass
class CallState:
    """State shared by all communicators of one rank, on every transport."""

    _: KW_ONLY
    traffic: Traffic = field(default_factory=Traffic)
    device: torch.device | None = None
    empty: Empty | None = None  # where ranks share memory, tensors in it
    off_clock: bool = False
    num_off_clock: int = 0  # times that calls went off the clock
    reads: set[str] = field(default_factory=set)  # figures of the network that the rank has read, by name
    compares_places: bool = True
    num_alive: int | None = None  # ranks that were alive at the last meeting; None: not known
    # False for tensors of shapes alone; None: there are none.
    has_values: Callable[[Tensor], bool] | None = None

    @contextmanager
    def having(self, **values: Any) -> Iterator[None]:
        """Set attributes for the block, and restore them."""
        before = {name: getattr(self, name) for name in values}
        vars(self).update(values)
        try:
            yield
        finally:
            vars(self).update(before)

    def load_traffic(self, saved: Mapping[str, Any]) -> None:
        """Restore a saved traffic in place: others refer to the object."""
        for name, value in saved.items():
            setattr(self.traffic, name, value)


AVERAGING_ALGORITHMS = ("direct", "ring")
"""All-reduce algorithms for encoded values: parts go straight to one rank each, which decodes, sums and encodes the
mean for all; or sums go around a ring and are encoded again at every hop."""


_OPS = ("sum", "avg", "min", "max", "product")

# Names in other libraries.
_ELSEWHERE = {
    "mean": "avg",
    "average": "avg",
    "add": "sum",
    "plus": "sum",
    "total": "sum",
    "minimum": "min",
    "maximum": "max",
    "prod": "product",
    "mul": "product",
    "multiply": "product",
}

# Those that torch can add up.
_REDUCIBLE_DTYPES = frozenset(
    {
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
    }
)


# Those that write into what they are given.
_IN_PLACE = ("all_reduce", "broadcast", "reduce", "scatter", "recv", "average_present")


def reduce_op_name(op: object) -> str:
    """Name of a reduction (`sum avg min max product`), from a string or a `torch.distributed.ReduceOp`.

    Raises:
        UnknownNameError: `op` is none of them.

    >>> reduce_op_name("SUM"), reduce_op_name(torch.distributed.ReduceOp.AVG)
    ('sum', 'avg')
    """
    text = op if isinstance(op, str) else str(op).rsplit(".", maxsplit=1)[-1].strip("<>: 0123456789")
    name = text.lower()
    kinds = torch.distributed.ReduceOp
    if isinstance(op, kinds):  # an object's text is its address
        name = next((known for known in _OPS if op == getattr(kinds, known.upper())), name)
    if name not in _OPS:
        raise unknown_name("reduce op", text, _OPS, _ELSEWHERE.get(name, ""))
    return name


class Communicator(ABC):
    """Collective and point-to-point operations of one rank in one group.

    Ranks, `src` and `dst` are local to the group. Every member calls the same operations in the same order.
    Calls with `async_op=True` return a `Handle`; their inputs are read at the call, their in-place results
    are written by `wait()`. Reduce ops are `sum`, `avg`, `min`, `max`, `product` or torch's `ReduceOp`;
    `avg` takes floating dtypes only. Tensors are dense, of any shape and any floating or integer dtype (or
    bool without arithmetic), and may live on CPU, CUDA or MPS. `tag` distinguishes messages between the same two ranks.

    Attributes:
        state: shared by all communicators of this rank.
        rank, world_size: of this rank in the group, and the number of its members.
        traffic: sent by this rank so far, in all its groups.
        transport: carrier of its tensors.
        can_leave_behind: whether `among_present` and its like are there.
        members_change: ranks may come at any time, and there are no collectives of all of them.
        device: of messages and states that this rank takes, in all its groups; None: each is where it was sent from.
        inside: where members change, those of this rank's site, which come and go together; else None.

    Raises (every operation):
        MismatchError: members disagree in operation, shape, dtype, reduce op or root.
        DeadlockError: what this rank waits for can never come.
        InputError: an argument is wrong by itself (unknown op, rank out of range, average of integers).
    """

    transport: str
    can_leave_behind: bool = False
    members_change: bool = False
    inside: Communicator | None = None

    def __init__(self, rank: int, world_size: int, state: CallState) -> None:
        self.rank, self.world_size = rank, world_size
        self.state = state

    @property
    def traffic(self) -> Traffic:
        """Traffic of this rank so far, in all its groups."""
        self.state.reads.add("traffic")
        return self.state.traffic

    @property
    def device(self) -> torch.device | None:
        """Device of messages and states that this rank takes; None: each is where it was sent from."""
        return self.state.device

    @device.setter
    def device(self, device: torch.device | None) -> None:
        self.state.device = device

    # --- by each transport ---------------------------------------------------------------------------------

    def _collective(self, call: CollectiveCall, deliver: Delivery[T], async_op: bool) -> T | Handle[T]:
        """Make a call of all members.

        Args:
            call: this member's part.
            deliver: called once with the values that it gets.
            async_op: return a handle.
        """
        raise NotImplementedError

    def _own_tensors(self, got: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        """Tensors on `device` that belong to the caller, of values that this member got."""
        raise NotImplementedError

    def _receive_any(self, tensor: Tensor, tag: int) -> int:
        """Receive the first message with `tag` into `tensor`; returns its sender."""
        raise NotImplementedError

    def _signature(
        self, name: str, like: Sequence[Tensor], reduce_op: str = "", root: int = 0, side: str = ""
    ) -> Signature:
        """Signature of a call of this rank, with tensors such as these."""
        # The shapes of an all_to_all may differ; that there is one part a rank is checked before.
        shapes = () if name == "all_to_all" else tuple([tuple(tensor.shape) for tensor in like])
        dtype, state = like[0].dtype if like else None, self.state
        on_clock, compares = not state.off_clock, state.compares_places
        has_values = state.has_values is None or all(map(state.has_values, like))
        return signature_of(
            name, dtype, shapes, reduce_op, root, caller(), side, on_clock, compares, has_values
        )

    def _owned_on(self, tensor: Tensor) -> Delivery[list[Tensor]]:
        device = tensor.device
        return lambda got: self._own_tensors(got, device)

    def room(self, tensors: Sequence[Tensor]) -> Tensor | None:
        """Flat tensor in the memory that ranks share, for the values of `tensors`; None where they share none.

        `all_reduce` and `deposit` make no copy of it: it must neither be changed nor read between such a call and its
        end. The `tensors` share dtype and device.
        """
        if self.state.empty is None or not tensors[0].is_cpu:
            return None
        return self.state.empty((sum([tensor.numel() for tensor in tensors]),), tensors[0].dtype)

    # --- collectives ---------------------------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor, op: object = "sum", async_op: bool = False) -> Any:
        """Reduce `tensor` over all ranks, in place on every rank; returns `tensor`."""
        reduce_op = self._check_op("all_reduce", op, tensor)
        call = CollectiveCall("all_reduce", [tensor], reduce_op)
        return self._collective(call, partial(write_first, tensor), async_op)

    def broadcast(self, tensor: Tensor, src: int = 0, async_op: bool = False) -> Any:
        """Overwrite `tensor` with rank `src`'s, in place; returns `tensor`."""
        self._check_peer("broadcast", "src", src, tensor)
        call = CollectiveCall("broadcast", [tensor], root=src)
        return self._collective(call, partial(write_first, tensor), async_op)

    def reduce(self, tensor: Tensor, dst: int = 0, op: object = "sum", async_op: bool = False) -> Any:
        """Reduce over all ranks into rank `dst`'s `tensor`; others keep theirs; returns `tensor`."""
        self._check_rank("reduce", "dst", dst)
        reduce_op = self._check_op("reduce", op, tensor)
        call = CollectiveCall("reduce", [tensor], reduce_op, dst)
        return self._collective(call, partial(write_first, tensor), async_op)

    def all_gather(self, tensor: Tensor, async_op: bool = False) -> Any:
        """Every rank's `tensor` (equal shapes), as a list in rank order."""
        self._check_tensors("all_gather", [tensor])
        return self._collective(CollectiveCall("all_gather", [tensor]), self._owned_on(tensor), async_op)

    def gather(self, tensor: Tensor, dst: int = 0, async_op: bool = False) -> Any:
        """Every rank's `tensor` (equal shapes) as a list in rank order on `dst`, None elsewhere."""
        self._check_peer("gather", "dst", dst, tensor)
        deliver: Delivery[Any] = self._owned_on(tensor) if self.rank == dst else nothing
        return self._collective(CollectiveCall("gather", [tensor], root=dst), deliver, async_op)

    def scatter(
        self,
        tensor: Tensor,
        scatter_list: Sequence[Tensor] | None = None,
        src: int = 0,
        async_op: bool = False,
    ) -> Any:
        """Write `scatter_list[rank]` of rank `src` into `tensor`, in place; returns `tensor`.

        Only `src` gives `scatter_list`: one tensor a rank, each of `tensor`'s shape.
        """
        self._check_peer("scatter", "src", src, tensor)
        parts = scatter_parts(self, tensor, scatter_list) if self.rank == src else []
        call = CollectiveCall("scatter", parts, root=src, like=[tensor])
        return self._collective(call, partial(write_first, tensor), async_op)

    def reduce_scatter(
        self, tensor: Tensor | Sequence[Tensor], op: object = "sum", async_op: bool = False
    ) -> Any:
        """Reduce over all ranks and return this rank's part.

        `tensor` is a list of `world_size` tensors (part r goes to rank r; equal lists on all ranks), or one
        tensor whose first dimension is cut into `world_size` equal parts.
        """
        parts = parts_of(self, "reduce_scatter", tensor)
        reduce_op = self._check_op("reduce_scatter", op, parts[0])
        owned = self._owned_on(parts[0])
        call = CollectiveCall("reduce_scatter", parts, reduce_op)
        return self._collective(call, lambda got: owned(got)[0], async_op)

    def all_to_all(
        self,
        tensors: Tensor | Sequence[Tensor],
        async_op: bool = False,
        shapes: Sequence[Sequence[int]] | None = None,
    ) -> Any:
        """Send part r to rank r; returns the received parts as a list in rank order.

        `tensors` is a list of `world_size` tensors of any shapes and one dtype, or one tensor cut along its
        first dimension into equal parts (then one tensor of the same shape is returned). The `shapes` of what will
        arrive, one a rank, where the caller knows them, save real ranks a round trip; they must be right.
        """
        parts = parts_of(self, "all_to_all", tensors)
        owned, whole = self._owned_on(parts[0]), isinstance(tensors, Tensor)
        call = CollectiveCall("all_to_all", parts, shapes=shapes)
        return self._collective(call, lambda got: torch.cat(owned(got)) if whole else owned(got), async_op)

    def barrier(self, async_op: bool = False) -> Any:
        """Return when every rank has called it."""
        return self._collective(CollectiveCall("barrier", []), nothing, async_op)

    def charge(self, call: CollectiveCall) -> None:
        """Take the time of a blocking call and count its bytes; all members make it, and have its values already."""
        raise self._not_here("charge")

    # --- ranks in time ------------------------------------------------------------------------------------

    def among_present(
        self,
        work: Callable[[Communicator, list[float]], T],
        seconds: float,
        averaging_seconds: float = math.inf,
        weight: float = 1.0,
        number: int | None = None,
        awaited: Sequence[int] | None = None,
        deadline: Deadline = FIXED,
    ) -> tuple[list[int], T | None]:
        """Run `work` among the ranks that arrive in time, again without ranks that then stop answering.

        A rank is in time if it arrives within `seconds` (virtual) of the first, that instant included, and can be
        reached by the others then. If all are, no rank waits longer, nor for others than `awaited` and those that
        have fetched the state of this `number` (see `publish`). A later rank gets the list of those that were
        there at once. A rank that has ended does not arrive. The first one's `seconds` count.

        `work(peers, weights)` gets the communicator of those present and their weights, in rank order; it makes
        collective calls on it and changes nothing else, as it may be done several times: if not all are through
        in `averaging_seconds`, its calls end undone, ranks that cannot be reached are left out (where all can,
        those with the narrowest connection), and the others begin again. Bytes of every attempt are counted.

        Members that give the same `number` meet; it grows from call to call. Without one a rank's calls are counted,
        which is right as long as no rank omits one.

        A `deadline` may shorten `seconds` by what arrivals have shown, and asks for a quorum: the meeting waits for it.

        Like `now()` it waits for virtual time: members must not wait for each other off the clock meanwhile.

        Returns:
            The ranks that were through together, and what `work` returned, None on a rank that is not one.

        Raises:
            InputError: negative or infinite `seconds`, `averaging_seconds` or a weight that is not positive,
                calls off the clock; all are slow alike; or a real transport, which cannot do without a member.
        """
        if not self.can_leave_behind:
            raise self._not_here("among_present")
        meeting = self.meet(seconds, averaging_seconds, weight, number, awaited, deadline)
        result = meeting.run(work)
        return meeting.members, result

    def meet(
        self,
        seconds: float,
        averaging_seconds: float = math.inf,
        weight: float = 1.0,
        number: int | None = None,
        awaited: Sequence[int] | None = None,
        deadline: Deadline = FIXED,
        num_positions: int = 1,
    ) -> JointWork:
        """Meet as in `among_present`; the caller then does the work itself, as where it begins in a backward pass.

        Args:
            seconds, averaging_seconds, weight, number, awaited, deadline: as for `among_present`.
            num_positions: rank r is at position r modulo this; the ranks wait while a position has none.

        Raises:
            InputError: as `among_present`.
        """
        raise self._not_here("meet")

    def among_next(
        self,
        work: Callable[[Communicator, NextMeeting], T],
        seconds: float,
        averaging_seconds: float = math.inf,
        weight: float = 1.0,
        deadline: Deadline = FIXED,
    ) -> tuple[NextMeeting | None, T | None]:
        """Run `work` in the next meeting of this group with this rank, again without ranks that then stop answering.

        Meetings are formed of whoever comes, as `Join` in `simulated/meeting_requests.py` says. Ranks take part
        from their first `keep_state`. `work(peers, meeting)` is as for `among_present`.

        Args:
            work: is done among the meeting's ranks, perhaps several times.
            seconds: for which ranks that are there wait for others that answer, once they are more than half.
            averaging_seconds: time-out of `work`, as for `among_present`; from the end of a member's last download.
            weight: number of states that this rank's has gone through, greater from meeting to meeting.
            deadline: as for `among_present`.

        Returns:
            The meeting, and what `work` returned, None on a rank that was left out; no meeting for a rank without
            which the others have ended.

        Raises:
            InputError: as `among_present`.
        """
        raise self._not_here("among_next")

    def keep_state(self) -> None:
        """Keep this rank's state: a crash of its host loses what is computed later, which is then computed again."""
        raise self._not_here("keep_state")

    def of_part(self, part: int) -> Communicator:
        """The same group, which publishes and fetches the state of a part of the model."""
        raise self._not_here("of_part")

    def average_present(self, tensor: Tensor, seconds: float, weight: float = 1.0) -> list[int]:
        """Average `tensor` over the ranks that arrive in time, in place for them; returns these ranks.

        In time, within `seconds`, is meant as in `among_present`; a late rank keeps its `tensor`. The result is
        sum(weight * tensor) / sum(weight) in the tensor's own dtype, added in rank order; weights travel free,
        with the list of members.

        Raises:
            InputError: as `among_present`; or no floats.
        """
        self._check_op("average_present", "avg", tensor)

        def work(peers: Communicator, weights: list[float]) -> Tensor:
            total: Tensor = peers.all_reduce(tensor.detach() * weight)
            return total.div_(sum(weights))

        members, mean = self.among_present(work, seconds, weight=weight)
        if mean is not None:
            tensor.detach().copy_(mean)
        return members

    def publish(self, number: int, tensors: Sequence[Tensor]) -> None:
        """Publish `tensors` for `fetch`, from now on and also after this rank has ended.

        Members that publish the same number publish the same tensors; the newest number counts. It takes no
        time: the host sends it while the rank continues.

        Raises:
            InputError: a real transport.
        """
        raise self._not_here("publish")

    def fetch(
        self, at_least: int, source: int | None = None, is_open: bool = False
    ) -> tuple[int, list[Tensor]] | None:
        """Download the newest published tensors, from the member with the best route, or from `source`.

        Waits until a rank (`source`) has published the number `at_least` or a newer one, then for the bytes, at this
        rank's virtual time; no other rank waits. They count as sent by this rank.

        `is_open`: while members work together that have met at the newest number, wait for the next one, whose meeting
        this rank can still join.

        Returns:
            The number and the tensors; None where no rank that has them can ever be reached.

        Raises:
            InputError: a real transport, or a call off the clock.
        """
        raise self._not_here("fetch")

    # --- messages ------------------------------------------------------------------------------------------

    @abstractmethod
    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> Handle[None]:
        """Send `tensor` to rank `dst`; the handle completes when the message has been received."""

    @abstractmethod
    def irecv(self, tensor: Tensor, src: int, tag: int = 0) -> Handle[Tensor]:
        """Receive from rank `src` into `tensor` (same shape and dtype as sent), written at `wait()`."""

    def send(self, tensor: Tensor, dst: int, tag: int = 0) -> None:
        """`isend` of `tensor` to rank `dst`, and wait."""
        self.isend(tensor, dst, tag).wait()

    def recv(self, tensor: Tensor, src: int | None = None, tag: int = 0) -> Any:
        """Receive into `tensor` and wait: from `src`, and return `tensor`; or from anyone, and return the rank.

        From anyone means the message with this `tag` that was sent first, at virtual time, ranks in order.
        """
        if src is not None:
            return self.irecv(tensor, src, tag).wait()
        self._check_tensors("recv", [tensor])
        return self._receive_any(tensor, tag)

    @abstractmethod
    def put(self, tensor: Tensor, dst: int, box: str = "") -> None:
        """Send `tensor` to a mailbox of rank `dst` and return at once.

        It leaves now, takes the network as long as any message of its size, and lies in the box until `dst` takes
        it. No rank waits for it, and a message that is never taken is no error. Messages of one rank to one box
        arrive in order.
        """

    @abstractmethod
    def take(self, box: str = "", wait: float = 0.0) -> list[tuple[int, Tensor]]:
        """Take all messages from this rank's mailbox: (rank, tensor) pairs in order of arrival.

        While the box is empty it waits up to `wait` seconds (virtual ones on a simulated network) for something to
        come; with `math.inf` until something comes or nothing ever can: an empty list then says that everyone else
        has ended or waits likewise. The tensors are the caller's own.
        """

    # --- objects -------------------------------------------------------------------------------------------

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        """Rank `src`'s `obj` on every rank.

        Objects are plain values: None, numbers, text, bytes, tensors, lists, tuples, sets, mappings. They travel in
        a form that carries no code (`exogym_core.plain`).

        Raises:
            InputError: `obj` holds something else; send its parts, and build it there.
        """
        payload = _as_tensor(obj) if self.rank == src else torch.empty(0, dtype=torch.uint8)
        size = self.broadcast(torch.tensor([payload.numel()]), src)
        if self.rank != src:
            payload = torch.empty(int(size), dtype=torch.uint8)
        return _from_tensor(self.broadcast(payload, src))

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Every rank's `obj`, plain values as in `broadcast_object`, in rank order."""
        payload = _as_tensor(obj)
        sizes = [int(size) for size in self.all_gather(torch.tensor([payload.numel()]))]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: payload.numel()] = payload
        return [_from_tensor(got[:size]) for got, size in zip(self.all_gather(padded), sizes, strict=True)]

    # --- groups --------------------------------------------------------------------------------------------

    @abstractmethod
    def group(self, ranks: Sequence[int], reuse: bool = False, number: int | None = None) -> Communicator:
        """The communicator of these ranks of this one, called by its members alone, free of cost.

        Ranks inside it count from 0 in the order given, which is the same on every member. A rank alone may
        form a group. `traffic` is shared with this communicator.

        Each call makes a group of its own, with connections of its own. With `reuse` all such calls with the
        same ranks, in the same order, give the one group that the first of them has made.

        Groups of each round, of ranks that may never meet again, are requested with `reuse` and the `number` of
        the round, equal on all members and greater each time: nothing is remembered of them then. Such a group is
        dropped when the round is over.
        """

    def compare_places(self, compare: bool) -> None:
        """Set whether to `compare` the places of calls of all_reduce, all_gather, reduce_scatter and all_to_all.

        All must call from one place of the code unless this says otherwise, for this rank's calls from now on in all
        its groups: two calls of equal shapes that are swapped on one rank raise an error instead of giving each other's
        values. Say False where ranks rightly meet from different lines.
        """
        self.state.compares_places = compare

    # --- the clock -----------------------------------------------------------------------------------------

    @abstractmethod
    def now(self) -> float:
        """Seconds since the start: virtual ones on a simulated network (the call waits), else real."""

    def is_over(self, until: float, number: int) -> bool:
        """True where this group's ranks end: at the first `number` that none of them passes before `until`.

        All ask at the same numbers. On a simulated network no rank waits for another's question; on real ones they
        agree, and end where the first of them is late.
        """
        with self.off_clock():
            return bool(self.all_reduce(torch.tensor([int(self.now() >= until)]), op="max"))

    def advance(self, seconds: float, work: tuple[Any, ...] = ()) -> None:
        """Compute for `seconds` of virtual time. Real transports have their own clock and ignore it.

        `work` says what takes them, see `exogym_core.workers.streams`; without it they are the same on any network.
        """

    def arrive_at(self, seconds: float) -> None:
        """Let time pass until so many seconds after the start of the run; called at this rank's start."""
        self.advance(seconds)

    def mark(self, row: Marked | Mapping[str, Any]) -> None:
        """Record `row`, stamped with this rank's virtual time, without waiting for that time.

        A program's own row is a mapping of plain values; `fit` marks events.
        """

    def deposit(self, note: Any, tensors: Sequence[Tensor]) -> None:
        """Give `tensors` to the run monitor, free of virtual time; this rank must not use them again.

        Where nobody evaluates they are dropped. `note` says what they are: `fit`'s is a `Snapshot`.
        """

    def off_clock(self) -> AbstractContextManager[None]:
        """Calls inside cost no virtual time and count no bytes: for logging, checkpoints, evaluation.

        They are matched among themselves: every member must make them off the clock. A rank that waits in one for a
        rank that waits for the clock (`now`, `is_completed`, ...) stands still until that has its answer.
        """
        self.state.num_off_clock += 1
        return self.state.having(off_clock=True)

    # --- checkpoints ---------------------------------------------------------------------------------------

    def repeating(self) -> AbstractContextManager[None]:
        """Context of calls repeated after a restart: values are exchanged, without requests to the clock."""
        return nullcontext()

    @contextmanager
    def noting_calls(self) -> Iterator[list[int]]:
        """Context of calls that may be in flight in a checkpoint; the caller repeats them with `calls_again`.

        What is noted names them for that.
        """
        yield []

    @contextmanager
    def calls_again(self, numbers: Sequence[int], are_taken: bool = False) -> Iterator[list[int]]:
        """Within `repeating`: context of the calls noted as `numbers`, in flight at a checkpoint.

        Their values are exchanged again, and nothing is counted; waiting for them later is waiting on the clock.
        Elsewhere they are calls like others, as inside `noting_calls`.

        Args:
            numbers: of the calls.
            are_taken: they are sends whose values the receivers had before the checkpoint: none are exchanged.
        """
        with self.noting_calls() as noted:
            yield noted

    def flush(self) -> None:
        """Send the rows of this rank soon, not at its next wait."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Counters of this rank, in all its groups, for a checkpoint.

        Raises:
            InputError: a call of this rank is still in flight.
        """

    @abstractmethod
    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue the counters that `state_dict` returned, `saved`."""

    @contextmanager
    def counted_as(self, payload_bytes: int) -> Iterator[None]:
        """Count the calls inside as one message of `payload_bytes` in `traffic.payload_bytes`.

        For compound exchanges that move one encoded message in several calls. `bytes_sent` is not touched.
        """
        before = self.state.traffic.payload_bytes
        try:
            yield
        finally:
            self.state.traffic.payload_bytes = before + payload_bytes

    def through_store(self, store: tuple[str, ...]) -> Communicator:
        """Communicator of the same ranks whose all_reduce and all_gather go through an object store.

        Each rank uploads its tensor once, and downloads those of all others; values are the same. Other calls are this
        communicator's.

        Args:
            store: name of a host of the topology ("": its only store), then of relays that ranks download from.

        Raises:
            InputError: a real transport, or one of them is no store.
        """
        raise InputError(
            f"exchange=store goes over the simulated network alone: leave it out over {self.transport!r}"
        )

    @property
    def averaging_algorithm(self) -> str:
        """All-reduce algorithm of encoded values, one of `AVERAGING_ALGORITHMS`, or "store".

        A sum of codes is none, so they cannot go by every algorithm. Directly, as over real sockets, unless a
        simulated run fixes one that can carry them.
        """
        return AVERAGING_ALGORITHMS[0]

    # --- checks of arguments that are wrong by themselves -----------------------------------------------------

    def _check_rank(self, call: str, name: str, rank: int) -> int:
        """`rank` if it is a member's; `call` and `name` are for the error."""
        if not isinstance(rank, int) or isinstance(rank, bool) or not 0 <= rank < self.world_size:
            raise self._wrong(call, f"{name}={rank!r} is not a rank; use 0 to {self.world_size - 1}")
        return rank

    def _check_peer(self, call: str, name: str, rank: int, tensor: object) -> None:
        """Refuse what is no member's rank, and what `_check_tensors` refuses."""
        self._check_rank(call, name, rank)
        self._check_tensors(call, [tensor])

    def _check_members(self, ranks: Sequence[int]) -> list[int]:
        """The members of a new group."""
        members = [self._check_rank("group", "ranks", rank) for rank in ranks]
        if self.rank not in members or len(set(members)) != len(members):
            raise self._wrong("group", f"{members} must name this rank, and each rank once")
        return members

    def _check_wait(self, wait: float) -> None:
        if not wait >= 0:
            raise InputError(f"rank {self.rank}, take: wait={wait!r}; give seconds from 0 up, or math.inf")

    def _check_tensors(self, call: str, given: Sequence[object]) -> None:
        """Refuse what is no tensor, and one that cannot be written where the call does so."""
        for each in given:
            if not isinstance(each, Tensor):
                # torch's all_gather takes the list for the results first
                hint = "; write tensors = comm.all_gather(tensor), which returns the list"
                got = type(each).__name__ + (hint if call == "all_gather" else "")
                raise self._wrong(call, f"takes a tensor, got {got}")
            if call not in _IN_PLACE or each.layout != torch.strided or each.is_contiguous():
                continue
            if any(size > 1 and not stride for size, stride in zip(each.shape, each.stride(), strict=True)):
                shape = list(each.shape)
                raise self._wrong(
                    call, f"writes into its tensor, and {shape} is expanded: call .contiguous() on it"
                )

    def _wrong(self, call: str, problem: str, kind: type[InputError] = InputError) -> InputError:
        """The error for arguments of `call`, with this rank and the place of the user's code that gave them."""
        path, line = caller()
        return kind(f"rank {self.rank}, {call}: {problem} (at {os.path.basename(path)}:{line})")

    def _check_present(
        self, seconds: float, averaging_seconds: float, weight: float, deadline: Deadline
    ) -> None:
        """Refuse a time-out, a weight or a deadline without meaning."""
        problem = ""
        if not 0 <= seconds < math.inf:
            problem = f"seconds={seconds!r}; give a finite number from 0 up"
        elif not averaging_seconds > 0:
            problem = f"averaging_seconds={averaging_seconds!r}; give a number above 0"
        elif not 0 < weight < math.inf:
            problem = f"weight={weight!r}; give a finite number above 0"
        elif not isinstance(deadline, Deadline):
            made = "Deadline(median=1, mad=3) of exogym_core.communicator"
            problem = f"deadline={deadline!r}; give a Deadline, such as {made}"
        if problem:
            raise self._wrong("average_present", problem)

    def _check_op(self, call: str, op: object, tensor: Tensor) -> str:
        """The reduce op's name, refused where it has no meaning for this dtype."""
        self._check_tensors(call, [tensor])
        try:
            name = op if type(op) is str and op in _OPS else reduce_op_name(op)
        except UnknownNameError as error:
            raise self._wrong(call, str(error), UnknownNameError) from None
        if tensor.dtype not in _REDUCIBLE_DTYPES:
            raise self._wrong(call, f"{tensor.dtype} cannot be reduced; convert it first")
        if name == "avg" and not tensor.is_floating_point():
            raise self._wrong(call, f"op='avg' of {tensor.dtype} would round; convert to floats")
        return name

    def _not_here(self, call: str) -> InputError:
        return InputError(
            f"rank {self.rank}, {call}: not over transport {self.transport!r}, which waits for every member; "
            "use 'netsim', or leave time-outs for absent ranks out"
        )

    def _still_in_flight(self, call: object) -> InputError:
        return InputError(
            f"rank {self.rank}, checkpoint: {call} is still in flight at the end of the step; "
            "wait for its handle before, or leave checkpoints out"
        )

    def _mail_not_kept(self) -> InputError:
        return InputError(
            f"rank {self.rank}, checkpoint: over real sockets messages in mailboxes cannot be saved; leave checkpoints "
            "out, or use transport 'netsim'"
        )


def parts_of(comm: Communicator, call: str, tensors: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """A tensor for each rank, from a list or by cutting one tensor along its first dimension.

    Raises:
        InputError: no tensors, not one a rank, not equal parts, or not one dtype.
    """
    size = comm.world_size
    if not isinstance(tensors, Tensor):
        if not isinstance(tensors, Sequence) or isinstance(tensors, str | bytes):
            got = type(tensors).__name__
            raise comm._wrong(call, f"takes a tensor, or a list of one a rank, got {got}")
        comm._check_tensors(f"{call}: each of the list", tensors)
        if len(tensors) != size:
            raise comm._wrong(call, f"{len(tensors)} tensors given, not one for each of {size} ranks")
        if len({part.dtype for part in tensors}) > 1:
            raise comm._wrong(call, "the tensors have several dtypes; give one dtype")
        return list(tensors)
    if tensors.dim() == 0 or tensors.shape[0] % size:
        raise comm._wrong(
            call,
            f"a tensor of shape {list(tensors.shape)} cannot be cut into {size} equal parts along its "
            "first dimension; pad it or give a list",
        )
    return list(tensors.chunk(size)) if len(tensors) else [tensors] * size


def scatter_parts(comm: Communicator, tensor: Tensor, given: Sequence[Tensor] | None) -> list[Tensor]:
    """The source's `scatter_list`, checked against its `tensor`.

    Raises:
        InputError: not one a rank, or not like `tensor`.
    """
    parts = parts_of(comm, "scatter", given if given is not None else [])
    for part in parts:
        if part.shape != tensor.shape or part.dtype != tensor.dtype:
            raise comm._wrong(
                "scatter",
                f"scatter_list has {part.dtype}{list(part.shape)}, tensor is "
                f"{tensor.dtype}{list(tensor.shape)}; make them equal",
            )
    return parts


def nothing(got: Sequence[Tensor]) -> None:
    """`Delivery` of a call that returns nothing."""


def write_first(tensor: Tensor, got: Sequence[Tensor]) -> Tensor:
    """Write the first value into `tensor`, unless it is there; without values it stays as it is."""
    if got and (got[0].device != tensor.device or got[0].data_ptr() != tensor.data_ptr()):
        copy_values(tensor.detach(), got[0])
    return tensor


def _as_tensor(obj: Any) -> Tensor:
    return torch.frombuffer(bytearray(packed(obj)), dtype=torch.uint8)


def _from_tensor(payload: Tensor) -> Any:
    return unpacked(payload.numpy().tobytes())
