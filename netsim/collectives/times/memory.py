"""What is remembered of collectives: a bounded decorator over the ways of finding out.

From a state all goes on by itself until somebody enters, so two things are worth remembering: into which state it turns
if these enter then, and who is through when (which the state itself keeps). Where a collective begins beside others,
the new state is compared with all that are known: steps of training that repeat come to states that were there before,
however much they overlap.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, TypeVar

from netsim.collectives.times.states import State, Transition

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from netsim.collectives.times.sandbox import Sandbox
    from netsim.collectives.times.solvers import Solver, Way
    from netsim.collectives.times.states import Entries

__all__ = ["Memory", "Recent"]

_MOST_STEPS = 2048
_MOST_STATES = 512
# After so many steps in a row that were new, only every so-manieth is kept: nothing seems to repeat.
_PATIENCE = 64

Value = TypeVar("Value")


class Recent(OrderedDict["Hashable", Value]):
    """At most so many values, those used last."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def recall(self, key: Hashable) -> Value | None:
        """The value of a key, if it is still there."""
        value = self.get(key)
        if value is not None:
            self.move_to_end(key)
        return value

    def keep(self, key: Hashable, value: Value) -> Value:
        """Have a value there for a while."""
        self[key] = value
        if len(self) > self._most:
            self.popitem(last=False)
        return value


class Memory:
    """Remembers where entries have led, and asks the solvers, one after the other, about what it does not know.

    Args:
        solvers: the last one never refuses.

    Attributes:
        steps: by the state before and who enters.
        states: those in which a collective began beside others, by all that sets them apart.
    """

    def __init__(self, solvers: Sequence[Solver]) -> None:
        self._solvers = solvers
        self.steps: Recent[Transition] = Recent(_MOST_STEPS)
        self.states: Recent[State] = Recent(_MOST_STATES)
        self._num_new = 0

    @property
    def is_in_vain(self) -> bool:
        """Whether nothing has repeated for long, and this is not one of those kept nevertheless."""
        return self._num_new > _PATIENCE and self._num_new % _PATIENCE > 0

    def skip(self) -> None:
        """One more goes by that is not looked up."""
        self._num_new += 1

    def solve(self, way: Way, state: State, entries: Entries) -> Transition:
        """Where it leads that these enter, from a state that the way has got to."""
        edge = (state.number, entries.key())
        step = self.steps.recall(edge)
        if step is not None:
            self._num_new = 0
            return step
        if entries.openings:
            self._num_new += 1
        step = next(step for solver in self._solvers if (step := solver.solve(way, entries)) is not None)
        start, step.state.start = step.state.start, None
        if self.is_in_vain:
            return step
        if not state.is_kept and (start is None or not entries.openings):
            return step
        if start is not None and entries.openings and not way.is_quiet:
            conditions = tuple(opening.conditions for opening in entries.openings)
            step = Transition(step.kept, self._state(step.state, start, (start.key(), conditions)))
        step.state.is_kept = True
        return self.steps.keep(edge, step) if state.is_kept else step

    def _state(self, state: State, start: Sandbox, key: Hashable) -> State:
        """The state that is known by this key; else this one."""
        known = self.states.recall(key)
        if known is not None:
            self._num_new = 0
            return known
        state.start = start.copied()
        return self.states.keep(key, state)
