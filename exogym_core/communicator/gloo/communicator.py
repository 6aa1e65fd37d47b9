"""The real transport: collectives of `torch.distributed` over sockets, in the semantics of the contract.

gloo carries them (nccl where every rank has its own GPU). Whatever connects must prove the run's secret; what then
travels is neither signed nor encrypted, so use a private network (WireGuard, SSH) between machines.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch
from torch import Tensor

from exogym_core.communicator.base import Communicator, write_first
from exogym_core.communicator.exchange import caller
from exogym_core.communicator.gloo.calls import GlooRank, GroupCalls
from exogym_core.communicator.gloo.deadlock_detector import DeadlockDetector
from exogym_core.communicator.gloo.rendezvous import Rendezvous
from exogym_core.communicator.gloo.wire import exchange_shapes, flattened
from exogym_core.communicator.simulated.simulation import load_of
from netsim.errors import MismatchError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from exogym_core.communicator.base import CollectiveCall, Delivery, Handle
    from exogym_core.communicator.gloo.wire import Wire
    from exogym_core.events import Marked

__all__ = ["GlooCommunicator"]


T = TypeVar("T")
R = TypeVar("R")


class GlooCommunicator(Communicator):
    """Communicator of a rank over real sockets; made by `run_ranks` or `from_environment`, and by `group`.

    Tensors of any device are staged to the backend's: the CPU under gloo. A tensor that is reduced keeps its
    dtype (int16 travels as int32, halves as fp32, others have no arithmetic in torch and are refused); what is
    only moved travels as bytes. With `check` each call first compares what members are calling; without it,
    disagreement is what gloo makes of it: wrong values, a time-out, or the end of the process.
    """

    transport = "gloo"
    state: GlooRank

    def __init__(self, state: GlooRank, calls: GroupCalls, member: int) -> None:
        super().__init__(member, len(calls.ranks), state)
        self._calls, self._wire = calls, calls.wire

    @classmethod
    def connect(
        cls, rendezvous: Rendezvous, on_mark: Callable[[Any], None] | None = None
    ) -> GlooCommunicator:
        """Join the other ranks of a run; `on_mark` receives what is marked, with its `wall_seconds` (see `now`)."""
        groups = rendezvous.join()
        state = GlooRank(rendezvous, on_mark if on_mark is not None else lambda row: None)
        if rendezvous.check and rendezvous.num_ranks > 1:
            state.detector = DeadlockDetector(rendezvous)
        calls = GroupCalls(state, groups, range(rendezvous.num_ranks), rendezvous.rank)
        return cls(state, calls, rendezvous.rank)

    @classmethod
    def from_environment(
        cls, *, check: bool = True, timeout_seconds: float | None = None, backend: str = "auto"
    ) -> GlooCommunicator:
        """The communicator of a process that torchrun has started; use it as a context manager.

        Its processes show each other that they know one secret: NETGYM_SECRET, the file of mode 0600 that
        NETGYM_SECRET_FILE names, or else the user's own, ~/.config/netgym/secret, which is made when it is missing.

        Args:
            check: compare calls before they run.
            timeout_seconds: limit of a rank's wait for others; by default four times as long as it
                has itself worked since its last call, and half an hour at least. Lost ranks and ranks
                that wait for each other are noticed at once, whatever this is.
            backend: `gloo`, `nccl`, or `auto`: nccl where each local rank has a GPU of its own.

        Raises:
            InputError: torchrun's variables (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT) are not set, or the
                secret cannot be read or can be read by others.
            RankError: another process of the run, or a stranger, does not know the secret.
        """
        return cls.connect(Rendezvous.from_environment(check, timeout_seconds, backend))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        try:
            if kind is None:
                self.finish()
        finally:
            self.close()

    # --- messages ------------------------------------------------------------------------------------------

    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> Handle[None]:
        self._check_peer("send", "dst", dst, tensor)
        signature = self._signature("sendrecv", [tensor], side="send")
        return self._calls.messages.send(self._outgoing(tensor, dst), dst, tag, signature)

    def _outgoing(self, tensor: Tensor, dst: int) -> Tensor:
        """Count a message; returns its own flat copy of `tensor`."""
        if dst != self.rank:
            self._count([tensor], tensor.nbytes)
        return flattened(tensor, self._calls.control.device, own=True)

    def irecv(self, tensor: Tensor, src: int, tag: int = 0) -> Handle[Tensor]:
        self._check_peer("recv", "src", src, tensor)
        signature = self._signature("sendrecv", [tensor], side="recv")
        flat = torch.empty(tensor.numel(), dtype=tensor.dtype)
        return self._calls.messages.receive(
            flat, src, tag, signature, lambda got: write_first(tensor, [got.reshape(tensor.shape)])
        )

    def _receive_any(self, tensor: Tensor, tag: int) -> int:
        flat = torch.empty(tensor.numel(), dtype=tensor.dtype)
        found = self._calls.messages.receive_any(
            flat, tag, self._signature("sendrecv", [tensor], side="recv")
        )
        tensor.detach().copy_(flat.reshape(tensor.shape))
        return found

    def put(self, tensor: Tensor, dst: int, box: str = "") -> None:
        self._check_peer("put", "dst", dst, tensor)
        self._calls.mailboxes.put(self._outgoing(tensor, dst).reshape(tensor.shape), dst, box)

    def take(self, box: str = "", wait: float = 0.0) -> list[tuple[int, Tensor]]:
        self._check_wait(wait)
        return [(source, tensor.to(self.device)) for source, tensor in self._calls.mailboxes.take(box, wait)]

    # --- how every call goes -------------------------------------------------------------------------------

    def _collective(self, call: CollectiveCall, deliver: Delivery[T], async_op: bool) -> T | Handle[T]:
        """Count a call and make it: exchange staged tensors, then deliver what has come."""
        like = call.like or call.tensors
        signature = self._signature(call.name, like, call.reduce_op, call.root)
        load = load_of(call, self._calls.ranks)
        self._count(call.tensors, self.state.book.traffic(load, self.rank)[0])
        exchange = self._exchange(call, async_op)
        if call.name == "all_to_all" or not like:
            return self._calls.make(signature, exchange, deliver, async_op)
        shape = like[self.rank if call.name == "reduce_scatter" else 0].shape
        return self._calls.make(
            signature, exchange, lambda got: deliver([part.reshape(shape) for part in got]), async_op
        )

    def _exchange(self, call: CollectiveCall, async_op: bool) -> Callable[[], list[Tensor]]:
        """The part of a call that runs in its turn: from staged tensors to the flat tensors that this member gets."""
        name, tensors, reduce_op, root = call.name, call.tensors, call.reduce_op, call.root
        wire = self._wire
        if self.world_size == 1:  # what a rank gives itself is what it gets
            own_parts = [self._stage(part, own=True).reshape(part.shape) for part in tensors]
            return lambda: own_parts
        if name == "barrier":
            # The comparison of records is one already: no member has all records before all have called.
            token = torch.zeros(1, dtype=torch.uint8)
            return lambda: self._calls.control.gather_records(token)
        if name == "all_to_all":
            return self._all_to_all(tensors, async_op, call.shapes)
        if name == "reduce_scatter":
            line = torch.cat([self._stage(part, own=False) for part in tensors])
            own = slice(*(sum(part.numel() for part in tensors[: self.rank + end]) for end in (0, 1)))
            # As gloo does for a reduce-scatter: reduce everything and keep a part.
            return lambda: [wire.all_reduce(line, reduce_op)[own].clone()]
        flat = self._stage((call.like or tensors)[0], own=async_op or name in ("reduce", "scatter"))
        match name:
            case "all_reduce":
                return lambda: [wire.all_reduce(flat, reduce_op)]
            case "broadcast":
                return lambda: [wire.broadcast(flat, root)]
            case "reduce":
                return lambda: [wire.reduce(flat, root, reduce_op)][: self.rank == root]
            case "all_gather":
                return lambda: wire.all_gather(flat)
            case "gather":
                return lambda: wire.gather(flat, root)
        parts = [self._stage(part, own=async_op) for part in tensors]
        return lambda: [wire.scatter(flat, parts, root)]

    def _all_to_all(
        self, parts: Sequence[Tensor], async_op: bool, shapes: Sequence[Sequence[int]] | None
    ) -> Callable[[], list[Tensor]]:
        flat = [self._stage(part, own=async_op) for part in parts]
        mine, like = [list(part.shape) for part in parts], parts[0]
        known = None if shapes is None else [list(shape) for shape in shapes]

        def exchange() -> list[Tensor]:
            coming = known
            if known is None or self.state.rendezvous.check:
                coming = exchange_shapes(self._calls.control, mine)
            assert coming is not None
            if known is not None and coming != known:
                raise MismatchError(
                    f"rank {self.rank}, all_to_all: shapes={known}, but the ranks send {coming}"
                )
            sizes = [math.prod(shape) * like.element_size() for shape in coming]
            got = self._wire.all_to_all(flat, sizes)
            return [part.view(like.dtype).reshape(shape) for part, shape in zip(got, coming, strict=True)]

        return exchange

    def _own_tensors(self, got: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        return [tensor.to(device) for tensor in got]

    def _count(self, tensors: Sequence[Tensor], bytes_sent: int) -> None:
        if not self.state.off_clock:
            self.state.traffic.count(tensors, bytes_sent)

    def _stage(self, tensor: Tensor, own: bool) -> Tensor:
        return flattened(tensor, self._wire.device, own)

    # --- groups, the clock and the end ---------------------------------------------------------------------

    def group(self, ranks: Sequence[int], reuse: bool = False, number: int | None = None) -> GlooCommunicator:
        members = self._check_members(ranks)
        of_run = tuple(self._calls.ranks[rank] for rank in members)
        member, (path, line) = members.index(self.rank), caller()
        place = f" at {os.path.basename(path)}:{line}"
        return GlooCommunicator(self.state, self.state.group(of_run, member, place, reuse), member)

    def patient(self, seconds: float) -> GlooCommunicator:
        """A group of the same ranks with a time-out of `seconds`; called by all of them."""
        rendezvous = self.state.rendezvous
        usual, rendezvous.timeout_seconds = rendezvous.timeout_seconds, seconds
        try:
            return self.group(range(self.world_size))
        finally:
            rendezvous.timeout_seconds = usual

    def mark(self, row: Marked | Mapping[str, Any]) -> None:
        now = self.now()
        self.state.on_mark(
            {**row, "wall_seconds": now} if isinstance(row, Mapping) else row._replace(wall_seconds=now)
        )

    def deposit(self, note: Any, tensors: Sequence[Tensor]) -> None:
        self.state.on_deposit(note, tensors)

    def observed_by(self, on_deposit: Callable[[Any, Sequence[Tensor]], None]) -> None:
        """Set the receiver of this rank's snapshots."""
        self.state.on_deposit = on_deposit

    @property
    def control(self) -> Wire:
        """Wire for records between members, alongside their calls."""
        return self._calls.control

    def now(self) -> float:
        return time.monotonic() - self.state.start_seconds

    def state_dict(self) -> dict[str, Any]:
        state = self.state
        if state.in_flight:
            raise self._still_in_flight(next(iter(state.in_flight.values())))
        if not all(calls.messages.is_empty for calls in state.groups):
            raise self._still_in_flight("a message")
        if any(calls.mailboxes.is_used for calls in state.groups):
            raise self._mail_not_kept()
        return {"traffic": asdict(state.traffic), "seconds": self.now()}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        self.state.start_seconds = time.monotonic() - saved.get("seconds", 0.0)
        self.state.load_traffic(saved["traffic"])

    def finish(self) -> None:
        self.state.finish()

    def close(self) -> None:
        """Leave all groups and end this rank's threads; no communicator of it works afterwards."""
        self.state.close()
