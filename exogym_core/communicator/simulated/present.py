"""What ranks of a simulated run do with those who come in time, and how the others catch up."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, TypeVar, cast

from exogym_core.communicator.exchange import Signature
from exogym_core.communicator.simulated.posting import PostingRank
from netsim.files.errors import InputError
from netsim.ranks.requests import Call, Confirm, Fetch, Fetched, Join, Key, Publish

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from torch import Tensor

    from exogym_core.communicator.base import Communicator
    from netsim.ranks.requests import Arrival

__all__ = ["PresentRanks"]

T = TypeVar("T")


class PresentRanks(PostingRank):
    """The part of a simulated communicator that can do without a member."""

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
                    f"rank {self.rank}, average_present: not through in {averaging_seconds:g} s, though all "
                    "members answer and none has a narrower connection than the others; give it more time"
                )
            present = left
        return members, None

    @property
    def _states(self) -> Hashable:
        """Those who meet in this group, and what they publish."""
        return ("present", self._group_id)

    def _meet(self, question: Join | Confirm) -> tuple[Arrival, ...]:
        return cast("tuple[Arrival, ...]", self._ask(question))

    def publish(self, number: int, tensors: Sequence[Tensor]) -> None:
        self._check_on_clock("publish")
        of_run = self._ranks[self.rank]
        signature = Signature.of("publish", tensors)
        given = [tensor.detach() for tensor in tensors]
        self._port.post(Key(("publish", self._states, of_run), number), (of_run,), 0, signature, given)
        self._request(Publish(Key(self._states, number), sum(tensor.nbytes for tensor in tensors)))

    def fetch(self, at_least: int) -> tuple[int, list[Tensor]] | None:
        self._check_on_clock("fetch")
        fetched = self._ask(Fetch(self._states, at_least))
        if fetched is None:
            return None
        assert isinstance(fetched, Fetched)
        of_run = self._ranks[self.rank]
        lane = ("fetch", self._states, of_run, self._next_number(("fetch", self._group_id)))
        signature = Signature.of("fetch", [])
        ticket = self._port.post(Key(lane, fetched.number), (of_run,), 0, signature, [])
        tensors = [tensor.clone() for tensor in self._port.take(ticket, 0)]
        self._port.taken(ticket)
        self._count(Call("sendrecv", (fetched.source, of_run), fetched.num_bytes), 0, tensors)
        return fetched.number, tensors

    def _check_on_clock(self, call: str) -> None:
        if self._state.off_clock or self._state.repeating:
            raise InputError(f"rank {self.rank}, {call}: it needs the clock; call it on the clock")
