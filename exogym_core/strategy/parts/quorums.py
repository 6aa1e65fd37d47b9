"""Messages of rounds that are merged when enough senders have sent theirs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from exogym_core.strategy.parts.state import State, Stateful

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Quorums"]


class Quorums(Stateful):
    """Messages about fragments of a model in rounds, by fragment and round.

    Args:
        quorum: number of senders whose messages must have arrived.
        everyone: number of senders.
        grace: virtual seconds of waiting for the others after the quorum has arrived.

    Attributes:
        pending: messages by sender, of each fragment in each round.
        deadlines: when those that have a quorum are due.
    """

    state = State("pending", "deadlines")

    def __init__(self, quorum: int, everyone: int, grace: float) -> None:
        self.quorum, self.everyone, self.grace = quorum, everyone, grace
        self.pending: dict[tuple[int, int], dict[int, Tensor]] = {}
        self.deadlines: dict[tuple[int, int], float] = {}

    @property
    def next_deadline(self) -> float:
        """When the next is due; infinite where none has a quorum."""
        return min(self.deadlines.values(), default=math.inf)

    def put(self, p: int, round_number: int, source: int, message: Tensor) -> None:
        """Keep a message."""
        self.pending.setdefault((p, round_number), {})[source] = message

    def due(self, now: float, *, is_over: bool) -> list[tuple[int, int]]:
        """Fragments and rounds that are due now; where `is_over`, nothing came before the next deadline."""
        for key, messages in self.pending.items():
            if len(messages) >= self.quorum:
                grace = self.grace if len(messages) < self.everyone else 0.0
                self.deadlines[key] = min(self.deadlines.get(key, math.inf), now + grace)
        until = max(now, min(self.deadlines.values(), default=now)) if is_over else now
        return sorted(key for key, deadline in self.deadlines.items() if deadline <= until)

    def taken(self, p: int, round_number: int) -> dict[int, Tensor]:
        """Messages of a round; those of older rounds of the fragment are dropped with it."""
        messages = self.pending[p, round_number]
        for key in [key for key in self.pending if key[0] == p and key[1] <= round_number]:
            del self.pending[key]
            self.deadlines.pop(key, None)
        return messages
