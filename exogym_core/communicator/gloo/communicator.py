"""The real transport: collectives of `torch.distributed` over sockets, in the semantics of the contract.

gloo carries them (nccl where every rank has its own GPU). Who connects must know the run's secret; what then
travels is neither signed nor encrypted, so between machines the network must be one's own.
"""

from __future__ import annotations

import math
import time
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch
from torch import Tensor

from exogym_core.communicator.base import Communicator
from exogym_core.communicator.exchange import Signature, caller
from exogym_core.communicator.gloo.agreement import exchange_shapes
from exogym_core.communicator.gloo.calls import GlooRank, GroupCalls
from exogym_core.communicator.gloo.rendezvous import Rendezvous
from exogym_core.communicator.gloo.traffic_formulas import sent_bytes
from exogym_core.communicator.gloo.vigil import Vigil
from exogym_core.communicator.gloo.wire import flattened, shaped_like, write_back
from exogym_core.communicator.parts import gathered_tensor, parts_of, scatter_parts
from netsim.files.errors import InputError, MismatchError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from exogym_core.communicator.gloo.wire import Wire
    from exogym_core.communicator.handle import Handle, Traffic

__all__ = ["GlooCommunicator"]

T = TypeVar("T")
R = TypeVar("R")


class GlooCommunicator(Communicator):
    """One rank's communicator over real sockets; made by `launch_gloo` or `from_environment`, and by `group`.

    Tensors of any device are staged to the backend's: the CPU under gloo. A tensor that is reduced keeps its
    dtype (int16 travels as int32, halves as fp32, others have no arithmetic in torch and are refused); what is
    only moved travels as bytes. With `check` each call first compares what members are calling; without it,
    disagreement is what gloo makes of it: wrong values, a time-out, or the end of the process.
    """

    transport = "gloo"

    def __init__(self, state: GlooRank, calls: GroupCalls, member: int) -> None:
        self.rank, self.world_size = member, len(calls.ranks)
        self._state, self._calls = state, calls
        self._wire = calls.wire

    @classmethod
    def connect(
        cls, rendezvous: Rendezvous, on_mark: Callable[[Mapping[str, Any]], None] | None = None
    ) -> GlooCommunicator:
        """Join the other ranks of a run; `on_mark` receives what is marked, with its `wall_seconds` (see `now`)."""
        groups = rendezvous.join()
        state = GlooRank(rendezvous, on_mark if on_mark is not None else lambda row: None)
        if rendezvous.check and rendezvous.num_ranks > 1:
            state.vigil = Vigil(rendezvous)
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
            timeout_seconds: how long a rank waits for others before it gives up; by default four times as long as it
                has itself worked since its last call, and half an hour at least. Who dies is noticed at once, and so
                are ranks that wait for each other, whatever this is.
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

    @property
    def traffic(self) -> Traffic:  # type: ignore[override]
        """What this rank has sent so far, in all its groups."""
        return self._state.traffic

    # --- collectives ---------------------------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor, op: object = "sum", async_op: bool = False) -> Any:
        reduce_op = self._check_op("all_reduce", op, tensor)
        flat = self._stage(tensor, own=async_op)
        return self._collective(
            "all_reduce",
            [tensor],
            lambda: self._wire.all_reduce(flat, reduce_op),
            lambda _: write_back(tensor, flat),
            async_op,
            reduce_op=reduce_op,
        )

    def broadcast(self, tensor: Tensor, src: int = 0, async_op: bool = False) -> Any:
        self._check_rank("broadcast", "src", src)
        self._check_tensors("broadcast", [tensor])
        flat = self._stage(tensor, own=async_op)
        return self._collective(
            "broadcast",
            [tensor],
            lambda: self._wire.broadcast(flat, src),
            lambda _: write_back(tensor, flat),
            async_op,
            root=src,
        )

    def reduce(self, tensor: Tensor, dst: int = 0, op: object = "sum", async_op: bool = False) -> Any:
        self._check_rank("reduce", "dst", dst)
        reduce_op = self._check_op("reduce", op, tensor)
        flat = self._stage(tensor, own=True)
        return self._collective(
            "reduce",
            [tensor],
            lambda: self._wire.reduce(flat, dst, reduce_op),
            lambda _: write_back(tensor, flat) if self.rank == dst else tensor,
            async_op,
            reduce_op=reduce_op,
            root=dst,
        )

    def all_gather(self, tensor: Tensor, async_op: bool = False) -> Any:
        flat = self._stage(gathered_tensor(self, tensor), own=async_op)
        return self._collective(
            "all_gather",
            [tensor],
            lambda: self._wire.all_gather(flat),
            lambda got: [shaped_like(part, tensor) for part in got],
            async_op,
        )

    def gather(self, tensor: Tensor, dst: int = 0, async_op: bool = False) -> Any:
        self._check_rank("gather", "dst", dst)
        self._check_tensors("gather", [tensor])
        flat = self._stage(tensor, own=async_op)
        return self._collective(
            "gather",
            [tensor],
            lambda: self._wire.gather(flat, dst),
            lambda got: [shaped_like(part, tensor) for part in got] if self.rank == dst else None,
            async_op,
            root=dst,
        )

    def scatter(
        self,
        tensor: Tensor,
        scatter_list: Sequence[Tensor] | None = None,
        src: int = 0,
        async_op: bool = False,
    ) -> Any:
        self._check_rank("scatter", "src", src)
        self._check_tensors("scatter", [tensor])
        given = scatter_parts(self, tensor, scatter_list) if self.rank == src else []
        parts = [self._stage(part, own=async_op) for part in given]
        flat = self._stage(tensor, own=True)
        return self._collective(
            "scatter",
            given,
            lambda: self._wire.scatter(flat, parts, src),
            lambda _: write_back(tensor, flat),
            async_op,
            root=src,
            like=[tensor],
        )

    def reduce_scatter(
        self, tensor: Tensor | Sequence[Tensor], op: object = "sum", async_op: bool = False
    ) -> Any:
        parts = parts_of(self, "reduce_scatter", tensor)
        reduce_op = self._check_op("reduce_scatter", op, parts[0])
        flat = torch.cat([self._stage(part, own=False) for part in parts])
        own = slice(*(sum(part.numel() for part in parts[: self.rank + end]) for end in (0, 1)))
        return self._collective(
            "reduce_scatter",
            parts,
            # What gloo does for a reduce-scatter too: reduce everything and keep a part.
            lambda: self._wire.all_reduce(flat, reduce_op),
            lambda _: shaped_like(flat[own].clone(), parts[self.rank]),
            async_op,
            reduce_op=reduce_op,
        )

    def all_to_all(
        self,
        tensors: Tensor | Sequence[Tensor],
        async_op: bool = False,
        shapes: Sequence[Sequence[int]] | None = None,
    ) -> Any:
        parts = parts_of(self, "all_to_all", tensors)
        flat = [self._stage(part, own=async_op) for part in parts]
        mine = [list(part.shape) for part in parts]
        known = None if shapes is None else [list(shape) for shape in shapes]
        whole, like = isinstance(tensors, Tensor), parts[0]

        def exchange() -> list[Tensor]:
            coming = known
            if known is None or self._state.rendezvous.check:
                coming = exchange_shapes(self._calls.control, mine)
            assert coming is not None
            if known is not None and coming != known:
                raise MismatchError(
                    f"rank {self.rank}, all_to_all: shapes={known}, but what is sent here is {coming}"
                )
            sizes = [math.prod(shape) * like.element_size() for shape in coming]
            got = self._wire.all_to_all(flat, sizes)
            return [part.view(like.dtype).reshape(shape) for part, shape in zip(got, coming, strict=True)]

        def deliver(got: list[Tensor]) -> Tensor | list[Tensor]:
            here = [part.to(like.device) for part in got]
            return torch.cat(here) if whole else here

        return self._collective("all_to_all", parts, exchange, deliver, async_op)

    def barrier(self, async_op: bool = False) -> Any:
        # The comparison of records is one already: nobody has everyone's before everyone has called.
        token = torch.zeros(1, dtype=torch.uint8)
        return self._collective(
            "barrier", [], lambda: self._calls.control.tell(token), lambda _: None, async_op
        )

    # --- messages ------------------------------------------------------------------------------------------

    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> Handle[None]:
        self._check_rank("send", "dst", dst)
        self._check_tensors("send", [tensor])
        signature = self._signature("sendrecv", [tensor], side="send")
        self._count("send" if dst != self.rank else "recv", [tensor])
        return self._calls.mail.send(
            flattened(tensor, self._calls.control.device, own=True), dst, tag, signature
        )

    def irecv(self, tensor: Tensor, src: int, tag: int = 0) -> Handle[Tensor]:
        self._check_rank("recv", "src", src)
        self._check_tensors("recv", [tensor])
        signature = self._signature("sendrecv", [tensor], side="recv")
        flat = torch.empty(tensor.numel(), dtype=tensor.dtype)
        return self._calls.mail.receive(flat, src, tag, signature, lambda got: write_back(tensor, got))

    def recv(self, tensor: Tensor, src: int | None = None, tag: int = 0) -> Any:
        if src is not None:
            return self.irecv(tensor, src, tag).wait()
        self._check_tensors("recv", [tensor])
        flat = torch.empty(tensor.numel(), dtype=tensor.dtype)
        found = self._calls.mail.receive_any(flat, tag, self._signature("sendrecv", [tensor], side="recv"))
        write_back(tensor, flat)
        return found

    def put(self, tensor: Tensor, dst: int, box: str = "") -> None:
        self._check_rank("put", "dst", dst)
        self._check_tensors("put", [tensor])
        self._count("send" if dst != self.rank else "recv", [tensor])
        flat = flattened(tensor, self._calls.control.device, own=True)
        self._calls.letters.put(flat.reshape(tensor.shape), dst, box)

    def take(self, box: str = "", wait: float = 0.0) -> list[tuple[int, Tensor]]:
        if not wait >= 0:
            raise InputError(f"rank {self.rank}, take: wait={wait!r}; give seconds from 0 up, or math.inf")
        return self._calls.letters.take(box, wait)

    # --- how every call goes -------------------------------------------------------------------------------

    def _collective(
        self,
        name: str,
        tensors: Sequence[Tensor],
        exchange: Callable[[], R],
        deliver: Callable[[R], T],
        async_op: bool,
        *,
        reduce_op: str = "",
        root: int = 0,
        like: Sequence[Tensor] | None = None,
    ) -> T | Handle[T]:
        """Count a call and make it: `exchange` staged tensors, then `deliver` what has come."""
        signature = self._signature(name, tensors if like is None else like, reduce_op, root)
        self._count(name, tensors, root)
        return self._calls.make(signature, exchange, deliver, async_op)

    def _signature(
        self, name: str, like: Sequence[Tensor], reduce_op: str = "", root: int = 0, side: str = ""
    ) -> Signature:
        state = self._state
        return Signature.of(
            name,
            like,
            reduce_op=reduce_op,
            root=root,
            side=side,
            on_clock=not state.off_clock,
            compares_places=state.compares_places,
        )

    def _count(self, name: str, tensors: Sequence[Tensor], root: int = 0) -> None:
        if self._state.off_clock:
            return
        parts = tuple(tensor.nbytes for tensor in tensors)
        if name != "recv":
            self.traffic.count(tensors)
        self.traffic.bytes_sent += sent_bytes(
            name,
            self.world_size,
            self.rank,
            num_bytes=max(parts, default=0) if name == "scatter" else sum(parts),
            element_bytes=tensors[0].element_size() if tensors else 1,
            root=root,
            parts=parts,
        )

    def _stage(self, tensor: Tensor, own: bool) -> Tensor:
        return flattened(tensor, self._wire.device, own)

    # --- groups, the clock and the end ---------------------------------------------------------------------

    def group(self, ranks: Sequence[int], reuse: bool = False, number: int | None = None) -> GlooCommunicator:
        members = [self._check_rank("group", "ranks", rank) for rank in ranks]
        if self.rank not in members or len(set(members)) != len(members):
            raise self._wrong("group", f"{members} must name this rank, and nobody twice")
        of_run = tuple(self._calls.ranks[rank] for rank in members)
        member = members.index(self.rank)
        return GlooCommunicator(self._state, self._state.group(of_run, member, caller(), reuse), member)

    def patient(self, seconds: float) -> GlooCommunicator:
        """A group of the same ranks in which they wait for each other so long; called by all of them."""
        rendezvous = self._state.rendezvous
        usual, rendezvous.timeout_seconds = rendezvous.timeout_seconds, seconds
        try:
            return self.group(range(self.world_size))
        finally:
            rendezvous.timeout_seconds = usual

    def compare_places(self, compare: bool) -> None:
        self._state.compares_places = compare

    def mark(self, row: Mapping[str, Any]) -> None:
        self._state.on_mark({**row, "wall_seconds": self.now()})

    def deposit(self, note: Mapping[str, Any], tensors: Sequence[Tensor]) -> None:
        self._state.on_deposit(note, tensors)

    def observed_by(self, on_deposit: Callable[[Mapping[str, Any], Sequence[Tensor]], None]) -> None:
        """Have what this rank deposits from now on taken to who observes the run."""
        self._state.on_deposit = on_deposit

    @property
    def control(self) -> Wire:
        """What members tell each other beside their calls; for who has a group of its own."""
        return self._calls.control

    def now(self) -> float:
        return time.monotonic() - self._state.start_seconds

    @contextmanager
    def off_clock(self) -> Iterator[None]:
        before, self._state.off_clock = self._state.off_clock, True
        try:
            yield
        finally:
            self._state.off_clock = before

    def state_dict(self) -> dict[str, Any]:
        state = self._state
        if state.in_flight:
            raise self._still_in_flight(next(iter(state.in_flight.values())))
        if not all(calls.mail.is_empty for calls in state.groups):
            raise self._still_in_flight("a message")
        if any(calls.letters.is_used for calls in state.groups):
            raise self._mail_not_kept()
        return {"traffic": asdict(state.traffic), "seconds": self.now()}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        self._state.start_seconds = time.monotonic() - saved.get("seconds", 0.0)
        for name, value in saved["traffic"].items():
            setattr(self._state.traffic, name, value)

    def finish(self) -> None:
        self._state.finish()

    def close(self) -> None:
        """Leave all groups and end this rank's threads; no communicator of it works afterwards."""
        self._state.close()
