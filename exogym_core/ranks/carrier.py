"""What carrying ranks has in common, wherever they run: one simulation, who is told, and what has come of its ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from exogym_core.communicator.simulated.port import RankState
from exogym_core.communicator.simulated.simulation import Simulation
from exogym_core.communicator.values import Combine, combine
from exogym_core.ranks.crossing import letter_name
from exogym_core.ranks.failures import FirstFailure
from exogym_core.ranks.journal import Journal

if TYPE_CHECKING:
    from exogym_core.communicator.exchange import Slot
    from exogym_core.communicator.simulated.simulation import World
    from exogym_core.ranks.watch import Silence
    from netsim.network.recorder import Recorder
    from netsim.ranks.kernel import StampedRow
    from netsim.ranks.requests import Answer, Letter, Take

__all__ = ["Carrier", "OnDeposit", "Sinks"]

OnDeposit = Callable[[int, Mapping[str, Any], Sequence[Tensor]], None]


@dataclass(frozen=True)
class Sinks:
    """Who is told of what happens in a run.

    Attributes:
        on_row: of every row that a rank has marked, in order of virtual time.
        on_deposit: (rank, note, tensors) of what a rank deposits for whoever looks on; the tensors are there until it
            returns. None: nobody does.
        journal: of every request as it is served; it has those from before the run.
        recorder: of all that the network does; None: nobody wants to know.
    """

    on_row: Callable[[StampedRow], None]
    on_deposit: OnDeposit | None = None
    journal: Journal = field(default_factory=Journal)
    recorder: Recorder | None = None


class Carrier(ABC):
    """One run of a world's ranks.

    Args:
        world: where it takes place.
        sinks: who is told of it.
        combined: what collectives compute.

    Attributes:
        simulation: run to its end when the run is through.
        failure: what went wrong, if anything.
        results: what `body` returned, in rank order.
        states: every rank's counters.
    """

    def __init__(self, world: World, sinks: Sinks, combined: Combine = combine) -> None:
        self.on_deposit, journal = sinks.on_deposit, sinks.journal
        self.simulation = Simulation(
            world,
            self._let_run,
            self._served,
            self._answered,
            sinks.on_row,
            journal.past,
            journal.on_request,
            sinks.recorder,
            combined,
            self._recall,
            self._taken,
        )
        self._letters = journal.letters
        if self._letters is not None:
            self._letters.look = self.simulation.exchange.letter
            for name, tensors in self._letters.kept.items():
                self.simulation.exchange.keep_letter(name, tensors)
        self.failure = FirstFailure()
        self.results: list[Any] = [None] * world.num_ranks
        self.states = [RankState() for _ in range(world.num_ranks)]
        self._told_silences: set[tuple[int, int]] = set()

    def _taken(self, rank: int, take: Take, letters: tuple[Letter, ...]) -> None:
        names = [letter_name(take, letter) for letter in letters]
        if self._letters is not None:
            self._letters.taken(rank, names)
        if take.is_past:  # its state has them
            for name in names:
                self.simulation.exchange.drop_letter(name)

    def _silent(self, silence: Silence, block: range) -> None:
        """Warn of a rank that makes no call, once, if it is those of its process alone that can go on."""
        which = (silence.rank, silence.num_calls)
        others_wait = self.simulation.exchange.running <= set(block) and len(self.states) > 1
        if silence.is_unusual and others_wait and which not in self._told_silences:
            self._told_silences.add(which)
            silence.warn()

    @abstractmethod
    def _let_run(self, rank: int | None) -> bool:
        """Let ranks get on, since the kernel needs `rank`'s next request, if it needs one; False where none can.

        Raises what ends the run.
        """

    def _recall(self) -> bool:
        """Wait for a call of a rank that is away; False where none is."""
        return False

    @abstractmethod
    def _served(self, slot: Slot, members: Sequence[int]) -> None:
        """These members of `slot` have their values, or its error; those who wait for that can go on."""

    @abstractmethod
    def _answered(self, rank: int, value: Answer) -> None:
        """`rank` has its answer from the kernel and can go on."""
