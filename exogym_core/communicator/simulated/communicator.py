"""The simulated transport: values through the exchange, times through netsim's kernel.

`Simulation` is the side that all ranks share, `SimulatedCommunicator` the side of one rank. Between them is a
`Port`, which is a method call for ranks in threads of the same process and a pipe for ranks elsewhere.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections import Counter
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor

from exogym_core.communicator.collectives import nothing, write_first
from exogym_core.communicator.simulated.calls import PostingRank
from netsim.errors import InputError
from netsim.ranks import (
    Ask,
    Call,
    Confirm,
    Exit,
    Fetch,
    Fetched,
    FirstSent,
    Join,
    Key,
    Lane,
    Mark,
    Publish,
    Put,
    Take,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

    from exogym_core.communicator.base import Communicator, Handle
    from exogym_core.communicator.collectives import Delivery
    from exogym_core.communicator.simulated.calls import Parking
    from netsim.ranks import Arrival, Letter

__all__ = ["SimulatedCommunicator"]


T = TypeVar("T")


_CALLS_A_ROUND = 1 << 20  # of a group with a number; JSON and floats hold 2**33 such rounds exactly


class SimulatedCommunicator(PostingRank):
    """Communicator of a rank on the simulated network; its arguments are those of `PostingRank`."""

    transport = "netsim"
    can_leave_behind = True

    def _own_tensors(self, got: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        # What comes is shared by all members.
        return [tensor.to(device, copy=True, memory_format=torch.contiguous_format) for tensor in got]

    @property
    def carrier_of_codes(self) -> str:
        """Algorithm that the run's `collectives` fix, where it can carry codes."""
        return self._book.carrier_of_codes

    # --- messages ------------------------------------------------------------------------------------------

    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> Handle[None]:
        self._check_peer("send", "dst", dst, tensor)
        given = tensor.detach() if self._port.copies else tensor.detach().clone()
        return self._message("send", [given], tensor, self.rank, dst, tag, nothing)

    def irecv(self, tensor: Tensor, src: int, tag: int = 0) -> Handle[Tensor]:
        self._check_peer("recv", "src", src, tensor)
        return self._message("recv", [], tensor, src, self.rank, tag, write_first(tensor))

    def _message(
        self,
        side: str,
        tensors: Sequence[Tensor],
        like: Tensor,
        src: int,
        dst: int,
        tag: int,
        deliver: Delivery[T],
    ) -> Handle[T]:
        ranks = (self._ranks[src], self._ranks[dst])
        signature = self._signature("sendrecv", [like], side=side)
        call = Call("sendrecv", ranks, like.nbytes, element_bytes=like.element_size())
        lane = Lane(self._group_id, src, dst, tag)
        number = self._next_number(lane, side)
        member = 0 if side == "send" else 1
        return self._post(Key(lane, number), call, member, signature, tensors, deliver)

    def put(self, tensor: Tensor, dst: int, box: str = "") -> None:
        self._check_peer("put", "dst", dst, tensor)
        self._check_on_clock("put")
        ranks = (self._ranks[self.rank], self._ranks[dst])
        name = self._box(dst, box)
        number = self._next_number(name, "put")
        self._post_alone("put", Key(("put", name, ranks[0]), number), [tensor])
        call = Call("sendrecv", ranks, tensor.nbytes, element_bytes=tensor.element_size())
        self._count(call, 0, [tensor])
        self._request(Put(name, number, call))

    def take(self, box: str = "", wait: float = 0.0) -> list[tuple[int, Tensor]]:
        self._check_on_clock("take")
        self._check_wait(wait)
        name = self._box(self.rank, box)
        letters = cast("tuple[Letter, ...]", self._ask(Take(name, float(wait))))
        taken = []
        for source, number in letters:
            (tensor,) = self._handed_over("taken", Key(("taken", name, source), number))
            taken.append((self._ranks.index(source), tensor))
        return taken

    def _receive_any(self, tensor: Tensor, tag: int) -> int:
        self._check_on_clock("recv")
        first = cast("Key", self._ask(FirstSent((self._group_id, self.rank, tag))))
        source = cast("Lane", first.group).source
        self.irecv(tensor, source, tag).wait()
        return source

    def _box(self, dst: int, box: str) -> Hashable:
        return (self._group_id, dst, box)

    # --- among the members that are present ---------------------------------------------------------------

    def among_present(
        self,
        work: Callable[[Communicator, list[float]], T],
        seconds: float,
        averaging_seconds: float = math.inf,
        weight: float = 1.0,
        number: int | None = None,
        awaited: Sequence[int] | None = None,
    ) -> tuple[list[int], T | None]:
        self._check_present(seconds, averaging_seconds, weight)
        self._check_on_clock("average_present")
        lane = self._states
        key = Key(lane, self._next_number(lane) if number is None else number)
        wanted = None if awaited is None else tuple(self._ranks[rank] for rank in awaited)
        join = Join(key, self.rank, self._ranks, seconds, averaging_seconds, weight, wanted)
        present = self._meet(join)
        for attempt in itertools.count():
            members = [arrival.member for arrival in present]
            if self.rank not in members:
                break
            ranks = tuple(self._ranks[member] for member in members)
            peers = self._with(ranks, members.index(self.rank), (lane, ranks), cast("int", key.number))
            result = work(peers, [arrival.weight for arrival in present])
            left = present if averaging_seconds == math.inf else self._meet(Confirm(key, attempt))
            if left == present:
                return members, result
            if not left:
                raise InputError(
                    f"rank {self.rank}, average_present: not finished in {averaging_seconds:g} s, though all "
                    "members answer and none has a narrower connection than the others; raise averaging_seconds"
                )
            present = left
        return members, None

    @property
    def _states(self) -> Hashable:
        """Name of the meetings of this group, and of its published states."""
        return ("present", self._group_id)

    def _meet(self, question: Join | Confirm) -> tuple[Arrival, ...]:
        return cast("tuple[Arrival, ...]", self._ask(question))

    def publish(self, number: int, tensors: Sequence[Tensor]) -> None:
        self._check_on_clock("publish")
        key = Key(("publish", self._states, self._ranks[self.rank]), number)
        self._post_alone("publish", key, tensors)
        self._request(Publish(Key(self._states, number), sum(tensor.nbytes for tensor in tensors)))

    def fetch(self, at_least: int) -> tuple[int, list[Tensor]] | None:
        self._check_on_clock("fetch")
        fetched = self._ask(Fetch(self._states, at_least))
        if fetched is None:
            return None
        assert isinstance(fetched, Fetched)
        of_run = self._ranks[self.rank]
        lane = ("fetch", self._states, of_run, self._next_number(("fetch", self._group_id)))
        tensors = self._handed_over("fetch", Key(lane, fetched.number))
        self._count(Call("sendrecv", (fetched.source, of_run), fetched.num_bytes), 0, tensors)
        return fetched.number, tensors

    def _check_on_clock(self, call: str) -> None:
        if self._state.off_clock or self._state.repeating:
            raise InputError(f"rank {self.rank}, {call}: it needs the clock; call it on the clock")

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
        members = self._check_members(ranks)
        of_run = tuple(self._ranks[rank] for rank in members)
        # A group is its name: where calls are counted and connections kept. Those made again count from 0.
        if reuse:
            return self._with(of_run, members.index(self.rank), (of_run, -1), number)
        nth = self._state.num_groups[of_run]
        self._state.num_groups[of_run] = nth + 1
        made = self._with(of_run, members.index(self.rank), (of_run, nth))
        # There will never be another of this name here.
        weakref.finalize(made, self._state.num_calls.pop, made._group_id, None).atexit = False
        return made

    @property
    def turns(self) -> Parking | None:
        """Turns of the ranks of this process; None where the rank has it to itself."""
        return self._port.turns

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
                state.load_traffic(traffic)

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
        state.load_traffic(saved["traffic"])
        state.pending_seconds = saved["pending_seconds"]
        state.num_calls.clear()  # the same object: groups that go take their counts with them
        state.num_calls |= {group: Counter(counts) for group, counts in saved["num_calls"].items()}
        state.num_groups = Counter(saved["num_groups"])

    def finish(self) -> None:
        """End the rank; its communicators must not be used again."""
        for key in self._state.withdrawn:  # no rank receives these any more
            self._post_alone("forget", Key(("forget", *key), 0))
        self._request(Exit())
