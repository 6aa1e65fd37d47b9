"""The way of collectives that may meet each other, from state to state."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from netsim.collectives.times.sandbox import Sandbox

if TYPE_CHECKING:
    from netsim.collectives.times.memory import Memory
    from netsim.collectives.times.states import Entries, State
    from netsim.fluid.network import Network

__all__ = ["Trajectory"]


class Trajectory:
    """Where collectives under way have got to, and how to get there again.

    What is remembered needs no sandbox. Where one is needed, it is made from the last state that has been kept whole,
    and from who has entered since.

    Args:
        network: of which sandboxes take links and connections.
        memory: what is known of states.

    Attributes:
        state: the state they are in; before anybody is there, one without ends.
        instant: when it began, on the network's clock.
        is_quiet: whether nobody is there yet.
    """

    def __init__(self, network: Network, memory: Memory, quiet: State) -> None:
        self._network = network
        self._memory = memory
        self.state = quiet
        self.instant = 0.0
        self.is_quiet = True
        self._anchor: Sandbox | None = None  # the state that was kept whole; None: nobody was there
        self._since: list[tuple[Entries, float]] = []  # who entered from then on, the first of them when
        self._sandbox: Sandbox | None = None  # as it is now, where that was needed
        self._began = 0.0  # the state, on the sandbox's clock
        self._given = 0  # ends of the state that the sandbox has given
        self._entering = 0.0  # the instant at which the first of those enters who do just now
        self._has_entered = False  # the sandbox is one in which they have

    def enter(self, entries: Entries, instant: float) -> tuple[int, ...]:
        """These enter, the first of them at an instant. Returns the places that are kept."""
        self._entering, self._has_entered = instant, False
        kept, state = self._memory.solve(self, self.state, entries)
        if not self._has_entered or state.ends or state.known_until > entries.lasting:
            self._sandbox, self._given = None, 0  # not this state's, or what follows is known
        if state.start is not None:
            self._anchor, self._since = state.start, []
        else:
            self._since.append((entries, instant))
        self.state, self.instant, self.is_quiet = state, instant, False
        return kept

    def sandbox_after(self, entries: Entries) -> tuple[tuple[int, ...], Sandbox]:
        """The places of collectives that are not over, and the sandbox in which these have entered."""
        sandbox = self.sandbox(0.0, self._given)
        kept, self._began = self._apply(sandbox, entries, self._began, self._entering, self._given)
        self._given = 0
        self._has_entered = True
        return kept, sandbox

    def sandbox(self, seconds: float, num_told: int) -> Sandbox:
        """The sandbox so long after the state began, with no ends given but those that are told."""
        if self._sandbox is None:
            self._sandbox, self._began = self._rebuilt()
            self._given = 0
        self._sandbox.advance(self._began + seconds, num_told - self._given)
        self._given = num_told
        return self._sandbox

    def preview(self, entries: Entries | None, instant: float, num_told: int) -> tuple[Sandbox, float]:
        """A sandbox to look into, in which these have entered too, and when the first of them did on its clock.

        Without any: when the state began.
        """
        sandbox, began = self._rebuilt()
        if entries is not None:
            _, began = self._apply(sandbox, entries, began, instant)
        else:
            sandbox.advance(began, num_told)
        return sandbox, began

    def find_out(self) -> None:
        """Go on from where the state is known."""
        state = self.state
        sandbox = self.sandbox(0.0, len(state.ends))
        if sandbox.next_end - self._began <= state.known_until:
            done = sandbox.step()
            if done:
                state.ends.append((sandbox.now - self._began, done))
                self._given += 1
        state.known_until = sandbox.next_end - self._began
        if sandbox.is_over:
            state.is_over, state.known_until = True, math.inf
            state.windows = sandbox.windows(self._began)

    def _rebuilt(self) -> tuple[Sandbox, float]:
        """A sandbox in the state, just after the last entry, and when the state began on its clock."""
        sandbox = Sandbox(self._network) if self._anchor is None else self._anchor.copied()
        began = 0.0
        for entries, instant in self._since:
            _, began = self._apply(sandbox, entries, began, instant)
        return sandbox, began

    def _apply(
        self, sandbox: Sandbox, entries: Entries, began: float, instant: float, num_given: int = 0
    ) -> tuple[tuple[int, ...], float]:
        """Have these enter a sandbox that has given so many ends, the first of them at an instant of the network.

        Returns the places kept, and when the first of them entered on the sandbox's clock.
        """
        first = entries.seconds[0]
        sandbox.advance(began + first, entries.num_told - num_given)
        num_before, kept, now = len(sandbox.executions), sandbox.prune(), sandbox.now
        openings = iter(entries.openings)
        for seconds, place, member in zip(entries.seconds, entries.places, entries.members, strict=True):
            sandbox.advance(
                now + (seconds - first)
            )  # in this order nothing is rounded for those of one instant
            place_now = kept.index(place) if place < num_before else len(kept) + place - num_before
            if place_now == len(sandbox.executions):
                sandbox.open(next(openings), self._network, instant + seconds - first)
            sandbox.enter(place_now, member)
        return kept, now
