"""What a network carries at an instant, as data: to be put on another one, and to be compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from netsim.fluid.clock import to_nanosecond

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator

    from netsim.fluid.carrier import Call, Callbacks
    from netsim.fluid.tcp import Window

__all__ = ["Connection", "Snapshot", "TransferState", "Windows"]

# Source host and target host -> the window of a group's connection.
Windows = Mapping[tuple[int, int], "Window"]


@dataclass(frozen=True, slots=True)
class TransferState:
    """A transfer under way: the columns of `netsim.fluid.transfers` and who is to be told; `left` bytes remain."""

    number: int
    order: int
    size: float
    left: float
    drains: bool
    stop: float
    cap: float
    due: float
    timer: float
    begun: float
    is_held: bool
    callbacks: Callbacks
    untold: Call | None


@dataclass(frozen=True, slots=True)
class Connection:
    """A connection: its window, what its sender offers at most, and what it carries."""

    source: int
    target: int
    name: Hashable
    window: Window | None
    most_bytes_per_second: float
    flights: tuple[TransferState, ...]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that a network carries.

    Attributes:
        instant: when, on its clock.
        connections: those in use, and those that have a window.
        num_bytes: source host, target host and bytes of transfers that are over.
        has_turn: whether something is to be settled yet at this instant, or later.
    """

    instant: float
    connections: tuple[Connection, ...]
    num_bytes: tuple[tuple[int, int, float], ...]
    has_turn: bool

    def calls(self) -> Iterator[Call]:
        """What is to be called for what is in flight."""
        for connection in self.connections:
            for flight in connection.flights:
                yield from (call for call in (*flight.callbacks, flight.untold) if call is not None)

    def key(self, describe: Callable[[Call], Hashable]) -> Hashable:
        """What sets it apart from others of the same links; times count from its instant, to a nanosecond."""
        return frozenset(
            (connection.source, connection.target, connection.name, state, queue)
            for connection in self.connections
            for state, queue in (self._connection_key(connection, describe),)
            if queue or state is not None
        )

    def _connection_key(
        self, connection: Connection, describe: Callable[[Call], Hashable]
    ) -> tuple[Hashable, tuple[Hashable, ...]]:
        queue = []
        for flight in connection.flights:
            on_delivered, on_sent, _ = flight.callbacks
            numbers = (
                *(round(each, 4) for each in (flight.left, flight.stop, flight.cap)),
                to_nanosecond(flight.timer - self.instant),
            )
            told = tuple(
                None if call is None else describe(call) for call in (on_delivered, on_sent, flight.untold)
            )
            queue.append((flight.drains, flight.is_held, *numbers, told))
        window = connection.window
        if window is None:
            return None, tuple(queue)
        return (window.state if queue else window.idle_state)(self.instant), tuple(queue)
