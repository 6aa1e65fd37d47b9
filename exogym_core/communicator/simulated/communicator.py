"""The simulated transport: values through the exchange, times through netsim's kernel.

`Simulation` is the side that all ranks share, `SimulatedCommunicator` the side of one rank. Between them is a
`Port`, which is a method call for ranks in threads of the same process and a pipe for ranks elsewhere.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from exogym_core.communicator.exchange import Signature
from exogym_core.communicator.parts import gathered_tensor, parts_of, scatter_parts
from exogym_core.communicator.simulated.mail import MailRanks
from exogym_core.communicator.simulated.present import PresentRanks
from netsim.files.errors import InputError
from netsim.ranks.requests import Ask, Call, Exit, Key, Lane, Mark

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

    from exogym_core.communicator.handle import Handle

__all__ = ["SimulatedCommunicator"]

T = TypeVar("T")

_CALLS_A_ROUND = 1 << 20  # of a group with a number; JSON and floats hold 2**33 such rounds exactly


class SimulatedCommunicator(PresentRanks, MailRanks):
    """One rank's communicator on the simulated network; its arguments are those of `PostingRank`."""

    transport = "netsim"
    can_leave_behind = True

    # --- collectives ---------------------------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor, op: object = "sum", async_op: bool = False) -> Any:
        reduce_op = self._check_op("all_reduce", op, tensor)
        into = _write_first(tensor)
        return self._collective("all_reduce", [tensor], into, async_op, reduce_op=reduce_op)

    def broadcast(self, tensor: Tensor, src: int = 0, async_op: bool = False) -> Any:
        self._check_rank("broadcast", "src", src)
        self._check_tensors("broadcast", [tensor])
        return self._collective("broadcast", [tensor], _write_first(tensor), async_op, root=src)

    def reduce(self, tensor: Tensor, dst: int = 0, op: object = "sum", async_op: bool = False) -> Any:
        self._check_rank("reduce", "dst", dst)
        reduce_op = self._check_op("reduce", op, tensor)
        into = _write_first(tensor)
        return self._collective("reduce", [tensor], into, async_op, reduce_op=reduce_op, root=dst)

    def all_gather(self, tensor: Tensor, async_op: bool = False) -> Any:
        tensor = gathered_tensor(self, tensor)
        return self._collective("all_gather", [tensor], _copies_on(tensor.device), async_op)

    def gather(self, tensor: Tensor, dst: int = 0, async_op: bool = False) -> Any:
        self._check_rank("gather", "dst", dst)
        self._check_tensors("gather", [tensor])
        deliver = _copies_on(tensor.device) if self.rank == dst else _nothing
        return self._collective("gather", [tensor], deliver, async_op, root=dst)

    def scatter(
        self,
        tensor: Tensor,
        scatter_list: Sequence[Tensor] | None = None,
        src: int = 0,
        async_op: bool = False,
    ) -> Any:
        self._check_rank("scatter", "src", src)
        self._check_tensors("scatter", [tensor])
        parts = scatter_parts(self, tensor, scatter_list) if self.rank == src else []
        into = _write_first(tensor)
        return self._collective("scatter", parts, into, async_op, root=src, like=[tensor])

    def reduce_scatter(
        self, tensor: Tensor | Sequence[Tensor], op: object = "sum", async_op: bool = False
    ) -> Any:
        parts = parts_of(self, "reduce_scatter", tensor)
        reduce_op = self._check_op("reduce_scatter", op, parts[0])
        take = _copies_on(parts[0].device)
        return self._collective(
            "reduce_scatter", parts, lambda got: take(got)[0], async_op, reduce_op=reduce_op
        )

    def all_to_all(
        self,
        tensors: Tensor | Sequence[Tensor],
        async_op: bool = False,
        shapes: Sequence[Sequence[int]] | None = None,
    ) -> Any:
        parts = parts_of(self, "all_to_all", tensors)
        take = _copies_on(parts[0].device)
        if isinstance(tensors, Tensor):
            return self._collective("all_to_all", parts, lambda got: torch.cat(take(got)), async_op)
        return self._collective("all_to_all", parts, take, async_op)

    def barrier(self, async_op: bool = False) -> Any:
        return self._collective("barrier", [], _nothing, async_op)

    @property
    def carrier_of_codes(self) -> str:
        """What the run's `collectives` fix, where it can carry codes."""
        return self._book.carrier_of_codes

    # --- messages ------------------------------------------------------------------------------------------

    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> Handle[None]:
        self._check_rank("send", "dst", dst)
        self._check_tensors("send", [tensor])
        given = tensor.detach() if self._port.copies else tensor.detach().clone()
        return self._message("send", [given], tensor, self.rank, dst, tag, _nothing)

    def irecv(self, tensor: Tensor, src: int, tag: int = 0) -> Handle[Tensor]:
        self._check_rank("recv", "src", src)
        self._check_tensors("recv", [tensor])
        return self._message("recv", [], tensor, src, self.rank, tag, _write_first(tensor))

    def _message(
        self,
        side: str,
        tensors: Sequence[Tensor],
        like: Tensor,
        src: int,
        dst: int,
        tag: int,
        deliver: Callable[[tuple[Tensor, ...]], T],
    ) -> Handle[T]:
        ranks = (self._ranks[src], self._ranks[dst])
        signature = Signature.of("sendrecv", [like], side=side, on_clock=not self._state.off_clock)
        call = Call("sendrecv", ranks, like.nbytes, element_bytes=like.element_size())
        lane = Lane(self._group_id, src, dst, tag)
        number = self._next_number(lane, side)
        member = 0 if side == "send" else 1
        return self._post(Key(lane, number), call, member, signature, tensors, deliver)

    # --- groups and the clock ------------------------------------------------------------------------------

    def _with(
        self, ranks: tuple[int, ...], rank: int, group_id: Hashable, number: int | None = None
    ) -> SimulatedCommunicator:
        made = SimulatedCommunicator(self._port, ranks, rank, self._book, self._state, group_id)
        if number is not None:
            made._num_calls, made._first_call = Counter(), number * _CALLS_A_ROUND
        return made

    def group(
        self, ranks: Sequence[int], reuse: bool = False, number: int | None = None
    ) -> SimulatedCommunicator:
        members = [self._check_rank("group", "ranks", rank) for rank in ranks]
        if self.rank not in members or len(set(members)) != len(members):
            raise self._wrong("group", f"{members} must name this rank, and nobody twice")
        of_run = tuple(self._ranks[rank] for rank in members)
        # A group is its name: where calls are counted and connections kept. Those made anew count from 0.
        if reuse:
            return self._with(of_run, members.index(self.rank), (of_run, -1), number)
        nth = self._state.num_groups[of_run]
        self._state.num_groups[of_run] = nth + 1
        made = self._with(of_run, members.index(self.rank), (of_run, nth))
        # There will never be another of this name here.
        weakref.finalize(made, self._state.num_calls.pop, made._group_id, None).atexit = False
        return made

    def compare_places(self, compare: bool) -> None:
        self._state.compares_places = compare

    def advance(self, seconds: float) -> None:
        if not 0 <= seconds < math.inf:
            raise InputError(
                f"rank {self.rank}, advance: {seconds!r} seconds; give a finite number from 0 up"
            )
        if not self._state.off_clock:
            self._state.pending_seconds += seconds

    def mark(self, row: Mapping[str, Any]) -> None:
        self._request(Mark(row))

    def deposit(self, note: Mapping[str, Any], tensors: Sequence[Tensor]) -> None:
        self._port.deposit(note, tensors)

    def now(self) -> float:
        seconds = self._ask(Ask(None))
        assert isinstance(seconds, float)
        return seconds

    @contextmanager
    def off_clock(self) -> Iterator[None]:
        before, self._state.off_clock = self._state.off_clock, True
        try:
            yield
        finally:
            self._state.off_clock = before

    # --- checkpoints ---------------------------------------------------------------------------------------

    @contextmanager
    def repeating(self) -> Iterator[None]:
        self._state.repeating = True
        try:
            yield
        finally:
            self._state.repeating = False

    @contextmanager
    def noting_calls(self) -> Iterator[list[int]]:
        state = self._state
        noted: list[int] = []
        before, state.noted = state.noted, noted
        try:
            yield noted
        finally:
            state.noted = before

    @contextmanager
    def calls_again(self, numbers: Sequence[int]) -> Iterator[list[int]]:
        state = self._state
        with self.noting_calls() as noted:
            if not state.repeating:
                yield noted
                return
            traffic, seconds = asdict(state.traffic), state.pending_seconds
            state.again = list(numbers)
            try:
                yield list(numbers)
            finally:
                state.again, state.pending_seconds = None, seconds
                for name, value in traffic.items():
                    setattr(state.traffic, name, value)

    def flush(self) -> None:
        self._port.flush()

    def state_dict(self) -> dict[str, Any]:
        state = self._state
        if state.in_flight or state.unwaited is not None:  # whether one is over by now depends on host time
            unwaited = state.unwaited or next(iter(state.in_flight.values())).signature
            raise self._still_in_flight(unwaited)
        if state.withdrawn:
            raise self._still_in_flight(f"the cancelled {next(iter(state.withdrawn.values()))[1]}")
        return {
            "traffic": asdict(state.traffic),
            "pending_seconds": state.pending_seconds,
            "num_calls": {group: dict(counts) for group, counts in state.num_calls.items()},
            "num_groups": dict(state.num_groups),
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        state = self._state
        for name, value in saved["traffic"].items():
            setattr(state.traffic, name, value)
        state.pending_seconds = saved["pending_seconds"]
        state.num_calls.clear()  # the same object: groups that go take their counts with them
        state.num_calls |= {group: Counter(counts) for group, counts in saved["num_calls"].items()}
        state.num_groups = Counter(saved["num_groups"])

    def finish(self) -> None:
        """The rank is through; its communicators must not be used any more."""
        for key in self._state.withdrawn:  # nobody receives these any more
            signature = Signature.of("forget", [])
            of_run = self._ranks[self.rank]
            self._port.post(Key(("forget", *key), 0), (of_run,), 0, signature, [])
        self._request(Exit())


def _nothing(got: tuple[Tensor, ...]) -> None:
    return None


def _write_first(tensor: Tensor) -> Callable[[tuple[Tensor, ...]], Tensor]:
    """Write what comes into `tensor`; where nothing comes (not this member's part) it stays as it is."""

    def write(got: tuple[Tensor, ...]) -> Tensor:
        if got:
            tensor.detach().copy_(got[0])
        return tensor

    return write


def _copies_on(device: torch.device) -> Callable[[tuple[Tensor, ...]], list[Tensor]]:
    """Own copies: what comes is shared by all members."""
    return lambda got: [tensor.to(device, copy=True, memory_format=torch.contiguous_format) for tensor in got]
