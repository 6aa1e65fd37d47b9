"""Replay of recorded request streams on a network: no rank runs, and no tensor moves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from exogym_core.communicator.simulated.simulation import Simulation
from exogym_core.workers.host import Runner, SimulatedHost
from netsim.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from exogym_core.workers.host import Sinks
    from exogym_core.workers.streams import Streams
    from netsim.ranks import Answer, Request

__all__ = ["Replay", "ReplayHost"]

_AT_ONCE = 64  # requests of a rank that are decoded together


class Replay(Simulation):
    """A simulation whose ranks have made all their requests before: `recorded` has those of each rank."""

    recorded: Sequence[Iterator[Request]]

    def answer(self, rank: int, value: Answer) -> None:
        """Refuse a `Question`: requests that depend on virtual time cannot be recorded once for all networks."""
        raise InputError(f"rank {rank}: it asks for the time, and its requests were recorded")

    def _let_run(self, rank: int | None) -> bool:
        if rank is None:
            return False
        stream = self.kernel.streams[rank]
        for request in self.recorded[rank]:
            stream.append(request)
            if len(stream) == _AT_ONCE:
                break
        if not stream:
            raise InputError(f"rank {rank}: its recorded requests end without its own end")
        return True


class _ReplayRunner(Replay, Runner):
    """A run of ranks whose requests were recorded."""


@dataclass(frozen=True, kw_only=True)
class ReplayHost(SimulatedHost):
    """Host of ranks whose requests were recorded.

    Attributes:
        streams: of a training.
        seconds: of computing on the host of each worker, see `Streams.requests`.
        results: what each rank's body returned.
    """

    streams: Streams
    seconds: Sequence[Callable[[int, int], float]]
    results: Sequence[Any]

    def simulate(self, body: Callable[[Any], Any], sinks: Sinks) -> Runner:
        """Replay the streams; `body` is not called."""
        run = _ReplayRunner(self.world, sinks)
        traffic = run.schedules.traffic
        run.recorded = [
            self.streams.requests(rank, seconds, traffic) for rank, seconds in enumerate(self.seconds)
        ]
        run.results = list(self.results)
        run.kernel.run()
        return run
