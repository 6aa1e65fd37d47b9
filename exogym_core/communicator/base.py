"""The contract between training code and whatever carries its tensors.

Strategies and loops see this class only. `gloo` moves tensors through real sockets, `netsim` through a
simulated network; both keep the semantics written here, and one table of tests holds them to it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor

from exogym_core.plain import packed, unpacked
from netsim.files.errors import InputError, unknown_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

__all__ = ["CODE_CARRIERS", "Communicator", "Handle", "Traffic", "reduce_op_name"]

T = TypeVar("T")

_OPS = ("sum", "avg", "min", "max", "product")

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


def reduce_op_name(op: object) -> str:
    """One of `sum avg min max product` from a string, or a `torch.distributed.ReduceOp`, also as an object.

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
        raise unknown_name("reduce op", text, _OPS)
    return name


@dataclass
class Traffic:
    """What one rank has sent so far, in bytes.

    Attributes:
        bytes_sent: payload that left this rank, headers not counted.
        wan_bytes: the part of it that went to another region (0 where the transport knows no regions).
        payload_bytes: every message counted once in its encoded form, as papers count.
    """

    bytes_sent: int = 0
    wan_bytes: int = 0
    payload_bytes: int = 0


class Handle(ABC, Generic[T]):
    """An operation in flight; `wait()` returns what the synchronous call would have returned."""

    @abstractmethod
    def wait(self) -> T:
        """Block until the result is there. Raises what the operation raised. May be called again."""

    @abstractmethod
    def is_completed(self) -> bool:
        """Whether `wait()` would return at once; on a simulated network, at this rank's virtual time."""

    def cancel(self) -> bool:
        """Take a message back that the other side has not called for yet; returns whether that was so.

        A receive that is cancelled takes nothing: the next one of the same sender and tag gets the message. Wait
        for the handle only where this returns False.

        Raises:
            InputError: the operation is a collective, which others count on.
        """
        raise InputError("cancel: only messages can be cancelled; wait for the handle")


CODE_CARRIERS = ("direct", "ring")
"""All-reduce algorithms for encoded values: parts go straight to one rank each, which decodes, sums and encodes the
mean for all; or sums go around a ring and are encoded again at every hop."""


class Communicator(ABC):
    """Collective and point-to-point operations of one rank in one group.

    Ranks, `src` and `dst` are local to the group. Every member calls the same operations in the same order.
    Calls with `async_op=True` return a `Handle`; their inputs are read at the call, their in-place results
    are written by `wait()`. Reduce ops are `sum`, `avg`, `min`, `max`, `product` or torch's `ReduceOp`;
    `avg` takes floating dtypes only. Tensors are dense, of any shape and any floating or integer dtype (or
    bool without arithmetic), and may live on CPU, CUDA or MPS.

    Raises (every operation):
        MismatchError: members disagree in operation, shape, dtype, reduce op or root.
        DeadlockError: what this rank waits for can never come.
        InputError: an argument is wrong by itself (unknown op, rank out of range, average of integers).
    """

    rank: int
    world_size: int
    transport: str
    traffic: Traffic
    can_leave_behind: bool = False  # `among_present` and its like are there

    # --- collectives ---------------------------------------------------------------------------------------

    @abstractmethod
    def all_reduce(self, tensor: Tensor, op: object = "sum", async_op: bool = False) -> Any:
        """Reduce `tensor` over all ranks, in place on every rank; returns `tensor`."""

    @abstractmethod
    def broadcast(self, tensor: Tensor, src: int = 0, async_op: bool = False) -> Any:
        """Overwrite `tensor` with rank `src`'s, in place; returns `tensor`."""

    @abstractmethod
    def reduce(self, tensor: Tensor, dst: int = 0, op: object = "sum", async_op: bool = False) -> Any:
        """Reduce over all ranks into rank `dst`'s `tensor`; others keep theirs; returns `tensor`."""

    @abstractmethod
    def all_gather(self, tensor: Tensor, async_op: bool = False) -> Any:
        """Every rank's `tensor` (equal shapes), as a list in rank order."""

    @abstractmethod
    def gather(self, tensor: Tensor, dst: int = 0, async_op: bool = False) -> Any:
        """Every rank's `tensor` (equal shapes) as a list in rank order on `dst`, None elsewhere."""

    @abstractmethod
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

    @abstractmethod
    def reduce_scatter(
        self, tensor: Tensor | Sequence[Tensor], op: object = "sum", async_op: bool = False
    ) -> Any:
        """Reduce over all ranks and return this rank's part.

        `tensor` is a list of `world_size` tensors (part r goes to rank r; equal lists on all ranks), or one
        tensor whose first dimension is cut into `world_size` equal parts.
        """

    @abstractmethod
    def all_to_all(self, tensors: Tensor | Sequence[Tensor], async_op: bool = False) -> Any:
        """Send part r to rank r; returns the received parts as a list in rank order.

        `tensors` is a list of `world_size` tensors of any shapes and one dtype, or one tensor cut along its
        first dimension into equal parts (then one tensor of the same shape is returned).
        """

    @abstractmethod
    def barrier(self, async_op: bool = False) -> Any:
        """Return when every rank has called it."""

    # --- who comes in time ---------------------------------------------------------------------------------

    def among_present(
        self,
        work: Callable[[Communicator, list[float]], T],
        seconds: float,
        averaging_seconds: float = math.inf,
        weight: float = 1.0,
        number: int | None = None,
        awaited: Sequence[int] | None = None,
    ) -> tuple[list[int], T | None]:
        """Do `work` together with those who come in time, and again without those who then stop answering.

        In time is who comes within `seconds` (virtual) of the first, that instant included, and can be reached
        by the others then; if all come and can, nobody waits longer, nor for others than `awaited` and those who
        have fetched the state of this `number` (see `publish`). Who comes later is told at once who was
        there. A rank that has ended does not come. The first one's `seconds` count.

        `work(peers, weights)` gets the communicator of those present and their weights, in rank order; it makes
        collective calls on it and changes nothing else, as it may be done several times: if not all are through
        in `averaging_seconds`, its calls end undone, those who cannot be reached are left out (where all can,
        those with the narrowest connection), and the others begin again. Bytes of every attempt are counted.

        Members that give the same `number` meet; it grows from call to call. Without one a rank's calls are counted,
        which is right as long as nobody leaves one out.

        Like `now()` it waits for virtual time: members must not wait for each other off the clock meanwhile.

        Returns:
            The ranks that were through together, and what `work` returned, None on a rank that is not one.

        Raises:
            InputError: negative or infinite `seconds`, `averaging_seconds` or a weight that is not positive,
                calls off the clock; all are slow alike; or a real transport, which cannot do without a member.
        """
        raise self._not_here("among_present")

    def average_present(self, tensor: Tensor, seconds: float, weight: float = 1.0) -> list[int]:
        """Average `tensor` over those who come in time, in place for them; returns their ranks.

        In time is meant as in `among_present`; who is late keeps its `tensor`. The result is
        sum(weight * tensor) / sum(weight) in the tensor's own dtype, added in rank order; weights travel free,
        with the news of who has come.

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
        """Have `tensors` ready for whoever fetches them, from now on and also when this rank has ended.

        Members that publish the same number publish the same tensors; the newest number counts. It takes no
        time: what is fetched is sent by the host beside what the rank does.

        Raises:
            InputError: a real transport.
        """
        raise self._not_here("publish")

    def fetch(self, at_least: int) -> tuple[int, list[Tensor]] | None:
        """Download the newest of what members have published, from the one that is reached best.

        Waits until somebody has published the number `at_least` or a newer one, then for the bytes, at this
        rank's virtual time; nobody else waits. They count as sent by this rank.

        Returns:
            The number and the tensors; None where nobody who has them can ever be reached.

        Raises:
            InputError: a real transport, or a call off the clock.
        """
        raise self._not_here("fetch")

    def _not_here(self, call: str) -> InputError:
        return InputError(
            f"rank {self.rank}, {call}: not over transport {self.transport!r}, which waits for every member; "
            "use 'netsim', or leave time-outs for absent ranks out"
        )

    # --- messages ------------------------------------------------------------------------------------------

    @abstractmethod
    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> Handle[None]:
        """Send to rank `dst`; the handle completes when the message has been received."""

    @abstractmethod
    def irecv(self, tensor: Tensor, src: int, tag: int = 0) -> Handle[Tensor]:
        """Receive from rank `src` into `tensor` (same shape and dtype as sent), written at `wait()`."""

    def send(self, tensor: Tensor, dst: int, tag: int = 0) -> None:
        """`isend` and wait."""
        self.isend(tensor, dst, tag).wait()

    @abstractmethod
    def recv(self, tensor: Tensor, src: int | None = None, tag: int = 0) -> Any:
        """Receive into `tensor` and wait: from `src`, and return `tensor`; or from anyone, and return the rank.

        From anyone means the message with this `tag` that was sent first, at virtual time, ranks in order.
        """

    @abstractmethod
    def put(self, tensor: Tensor, dst: int, box: str = "") -> None:
        """Send `tensor` to a mailbox of rank `dst` and go on at once.

        It leaves now, takes the network as long as any message of its size, and lies in the box until `dst` takes
        it. Nobody waits for it, and a letter that is never taken is no error. Letters of one rank to one box
        arrive in order.
        """

    @abstractmethod
    def take(self, box: str = "", wait: float = 0.0) -> list[tuple[int, Tensor]]:
        """What has come to this rank's mailbox and has not been taken: (rank, tensor) pairs in order of arrival.

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

        Groups drawn anew each round, of ranks that may never meet again, are asked for with `reuse` and the `number` of
        the round, equal on all members and greater each time: nothing is remembered of them then. Such a group is
        dropped when the round is over.
        """

    # --- the clock -----------------------------------------------------------------------------------------

    @abstractmethod
    def now(self) -> float:
        """Seconds since the start: virtual ones on a simulated network (the call waits), else real."""

    def advance(self, seconds: float) -> None:
        """Compute for `seconds` of virtual time. Real transports have their own clock and ignore it."""

    def mark(self, row: Mapping[str, Any]) -> None:
        """Record `row`, stamped with this rank's virtual time, without waiting for that time."""

    def deposit(self, note: Mapping[str, Any], tensors: Sequence[Tensor]) -> None:
        """Hand over `tensors`, which are this rank's no more, to who observes the run; free, and nobody waits.

        Without an observer they are dropped. `note` is plain: numbers, text, lists and mappings.
        """

    @contextmanager
    def off_clock(self) -> Iterator[None]:
        """Calls inside cost no virtual time and count no bytes: for logging, checkpoints, evaluation.

        They are matched among themselves: every member must make them off the clock. A rank that waits in one for a
        rank that waits for the clock (`now`, `is_completed`, ...) stands still until that has its answer.
        """
        yield

    # --- checkpoints ---------------------------------------------------------------------------------------

    @contextmanager
    def repeating(self) -> Iterator[None]:
        """Calls inside are made again after a restart: values are exchanged, the clock hears nothing."""
        yield

    @contextmanager
    def noting_calls(self) -> Iterator[list[int]]:
        """Calls inside may be in flight in a checkpoint: whoever made them makes them again with `calls_again`.

        What is noted names them for that.
        """
        yield []

    @contextmanager
    def calls_again(self, numbers: Sequence[int]) -> Iterator[list[int]]:
        """Within `repeating`, calls inside are those that were noted as `numbers`, in flight at a checkpoint.

        Their values are exchanged again, and nothing is counted; waiting for them later is waiting on the clock.
        Elsewhere they are calls like others, as inside `noting_calls`.
        """
        with self.noting_calls() as noted:
            yield noted

    def flush(self) -> None:
        """Have what this rank has marked so far seen soon, not when it next waits for others."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """This rank's counters, in all its groups, for a checkpoint.

        Raises:
            InputError: a call of this rank is still in flight.
        """

    @abstractmethod
    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on counting from what `state_dict` returned."""

    def _still_in_flight(self, call: object) -> InputError:
        return InputError(
            f"rank {self.rank}, checkpoint: {call} is still in flight at the end of the step; "
            "wait for its handle before, or leave checkpoints out"
        )

    def _mail_not_kept(self) -> InputError:
        return InputError(
            f"rank {self.rank}, checkpoint: what lies in mailboxes cannot be kept; leave checkpoints out"
        )

    @contextmanager
    def counted_as(self, payload_bytes: int) -> Iterator[None]:
        """Count the calls inside as one message of `payload_bytes` in `traffic.payload_bytes`.

        For compound exchanges that move one encoded message in several calls. `bytes_sent` is not touched.
        """
        before = self.traffic.payload_bytes
        try:
            yield
        finally:
            self.traffic.payload_bytes = before + payload_bytes

    @property
    def carrier_of_codes(self) -> str:
        """How encoded values are all-reduced, of `CODE_CARRIERS`.

        A sum of codes is none, so they cannot go by every algorithm. Directly, as over real sockets, unless a
        simulated run fixes one that can carry them.
        """
        return CODE_CARRIERS[0]

    # --- shared argument checks ----------------------------------------------------------------------------

    def _check_rank(self, call: str, name: str, rank: int) -> int:
        """`rank` if it is a member's; `call` and `name` tell the user which argument is wrong."""
        if not isinstance(rank, int) or isinstance(rank, bool) or not 0 <= rank < self.world_size:
            raise InputError(
                f"rank {self.rank}, {call}: {name}={rank!r} is not a rank; use 0 to {self.world_size - 1}"
            )
        return rank

    def _check_present(self, seconds: float, averaging_seconds: float, weight: float) -> None:
        """Refuse a time-out or a weight without meaning."""
        problem = ""
        if not 0 <= seconds < math.inf:
            problem = f"seconds={seconds!r}; give a finite number from 0 up"
        elif not averaging_seconds > 0:
            problem = f"averaging_seconds={averaging_seconds!r}; give a number above 0"
        elif not 0 < weight < math.inf:
            problem = f"weight={weight!r}; give a finite number above 0"
        if problem:
            raise InputError(f"rank {self.rank}, average_present: {problem}")

    def _check_op(self, call: str, op: object, tensor: Tensor) -> str:
        """The reduce op's name, refused where it has no meaning for this dtype."""
        name = reduce_op_name(op)
        if tensor.dtype not in _REDUCIBLE_DTYPES:
            raise InputError(f"rank {self.rank}, {call}: {tensor.dtype} cannot be reduced; convert it first")
        if name == "avg" and not tensor.is_floating_point():
            raise InputError(
                f"rank {self.rank}, {call}: op='avg' of {tensor.dtype} would round; convert to floats"
            )
        return name


def _as_tensor(obj: Any) -> Tensor:
    return torch.frombuffer(bytearray(packed(obj)), dtype=torch.uint8)


def _from_tensor(payload: Tensor) -> Any:
    return unpacked(payload.numpy().tobytes())
