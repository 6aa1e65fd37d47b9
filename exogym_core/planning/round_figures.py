"""What some simulated rounds have shown."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable

__all__ = ["RoundFigures"]


@dataclass
class RoundFigures:
    """What some simulated rounds have shown.

    Attributes:
        round_seconds: virtual time at which the last rank was through with each round.
        compute_seconds, exposed_seconds: of each rank, over all of them.
        bytes_sent, wan_bytes, payload_bytes: of each rank, after each round: [rank][round].
        memory: bytes of the first rank by purpose.
        collectives: the algorithms that were used, by operation.
        link_bytes: payload that crossed each link, over all of them.
        peers: whom ranks met in each round.
        rank_ends: virtual time at which each worker was through with each round: [rank][round].
        staleness: of what servers took in, see `PlannedServer`.
        server_wan_bytes: payload that servers sent to other regions.
        contributions: of ranks to rounds, where rounds may go on without some.
    """

    round_seconds: list[float]
    compute_seconds: list[float]
    exposed_seconds: list[float]
    bytes_sent: list[list[int]]
    wan_bytes: list[list[int]]
    payload_bytes: list[list[int]]
    memory: dict[str, int] = field(default_factory=dict)
    collectives: dict[str, list[str]] = field(default_factory=dict)
    link_bytes: list[float] = field(default_factory=list)
    peers: list[Hashable] = field(default_factory=list)
    rank_ends: list[list[float]] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)
    server_wan_bytes: int = 0
    contributions: int = 0
