"""Calls of a function on ranks, compared with the definition of a collective and with other runs of the same calls."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from exogym_core.data.batches import batch_tensors
from exogym_core.testing.group_calls import (
    IN_PLACE,
    GroupCall,
    difference,
    import_of,
    name_of,
    short_repr,
    source_of,
)
from exogym_core.workers.run import run_ranks
from netsim.errors import NetsimError
from netsim.testing import LawError

if TYPE_CHECKING:
    from exogym_core.communicator.base import Communicator
    from exogym_core.workers.host import RunResult

__all__ = [
    "CallChoices",
    "CollectiveTrial",
    "Definition",
    "Tolerance",
    "signature_of",
]

Definition = Callable[[list[Tensor]], Sequence[Any]]
"""Results of all members, from their tensors."""

Tolerance = float | Callable[[int], float]
"""Absolute error of floats, or that by the number of ranks."""

PLACES: dict[str, dict[str, Any]] = {
    "threads": {},
    "processes": {"workers": {"kind": "processes", "processes": 2}},
    "gloo": {"transport": "gloo"},
}
_MOST_COLUMNS = 200  # of the problem in a program
_SAME_ON_ALL = ("all_reduce", "broadcast", "all_gather")


@dataclass(frozen=True)
class CollectiveTrial:
    """Calls of a function by the ranks of a group, on a network.

    Attributes:
        num_ranks: ranks of the world.
        calls: made one after the other.
        group: ranks that make them, in the group's order; empty: all.
        topology: the network and its weather, as `Topology.from_mapping` takes them; None: communication is free.
        protocol: use of links by transfers.
        delays: virtual seconds that each rank computes before its first call; empty: none.
        place: where ranks run: "threads", "processes" or "gloo".
    """

    num_ranks: int
    calls: tuple[GroupCall, ...]
    group: tuple[int, ...] = ()
    topology: Mapping[str, Any] | None = None
    protocol: str = "ideal"
    delays: tuple[float, ...] = ()
    place: str = "threads"

    def __repr__(self) -> str:
        return short_repr(self, 2)

    @property
    def members(self) -> tuple[int, ...]:
        """Ranks that make the calls."""
        return self.group or tuple(range(self.num_ranks))

    def check(
        self,
        function: Callable[..., Any],
        definition: Definition | None = None,
        tolerance: float | None = None,
        most_bytes: int | None = None,
    ) -> None:
        """Run the function on the ranks, and again with one change at a time.

        Args:
            function, definition: as for `check_collective`, `definition` in the place of `like`.
            tolerance: absolute error of floats; None: that of a sum in another order.
            most_bytes: that all ranks together may send in all calls.

        Raises:
            LawError: a law is broken; the error has the difference and a program that shows it.
        """
        wanted = [self._expected(call, definition) for call in self.calls]
        options = {"definition": definition, "tolerance": tolerance, "most_bytes": most_bytes}
        is_plain, returns_nothing = True, False
        try:
            run = self._run(function)
            seen = [run.results[rank] for rank in self.members]
            returns_nothing = seen[0].returns_nothing
            problem = self._wrong_result(seen, wanted, tolerance)
            is_plain = bool(problem)
            sent = sum(run.traffic[rank].bytes_sent for rank in self.members)
            if not problem and most_bytes is not None and sent > most_bytes:
                problem = f"all ranks together send {sent} bytes, and {most_bytes} at most are allowed"
            problem = problem or self._side_effect(seen) or self._change(function, run)
        except NetsimError as error:
            problem = str(error).partition("\n")[0]
        if problem:
            where = "over gloo" if self.place == "gloo" else f"in {self.place}"
            problem = f"{name_of(function)} {where}: {problem}"

            def write() -> str:
                line = problem if len(problem) <= _MOST_COLUMNS else f"{problem[: _MOST_COLUMNS - 3]}..."
                if is_plain:
                    return f"# {line}\n{self._plain_program(function, wanted, tolerance, returns_nothing)}"
                return f"# {line}\n{self._program(function, options)}"

            raise LawError(problem, write)

    def _wrong_result(
        self, seen: Sequence[_Seen], wanted: Sequence[Sequence[Any]], tolerance: float | None
    ) -> str:
        """Difference of results from what they must be, and among ranks that get the same."""
        for number, call in enumerate(self.calls):
            results = [each.results[number] for each in seen]
            errors = self._errors(call, tolerance)
            for member, (got, expected) in enumerate(zip(results, wanted[number], strict=True)):
                if found := difference(got, expected, *errors):
                    return f"{_called(call)}: the result of rank {member} of {len(results)} {found}"
        return ""

    def _errors(self, call: GroupCall, tolerance: float | None) -> tuple[float, float]:
        """Relative and absolute error that results of a call may have."""
        return (call.tolerance(exact=False),) * 2 if tolerance is None else (0.0, tolerance)

    def _side_effect(self, seen: Sequence[_Seen]) -> str:
        """Wrong effect of the calls besides the values of their results."""
        for member, each in enumerate(seen):
            for call, got, kept in zip(self.calls, each.returned, each.results, strict=True):
                if found := difference(got, kept):
                    line = f"{_called(call)}: the result of rank {member} {found}, after a later call"
                    return f"{line}: return a tensor of its own"
            if each.changed:
                return f"rank {member} changes {each.changed}: leave inputs as they are"
            if each.is_off_clock:
                return f"rank {member} communicates off the clock, which nobody counts"
            for call, got, first in zip(self.calls, each.results, seen[0].results, strict=True):
                if call.operation in _SAME_ON_ALL and (found := difference(got, first)):
                    return f"{_called(call)}: the result of rank {member} {found} as on rank 0: give all the same bits"
        entered, left = (pick(each.seconds[at] for each in seen) for at, pick in enumerate((max, min)))
        if left < entered:
            return f"a rank leaves the barrier at {left:g} s, before another enters it at {entered:g} s"
        return ""

    def _change(self, function: Callable[..., Any], run: RunResult[_Seen]) -> str:
        """Difference of other runs from this one."""
        if self.place != "threads":
            others = {"in threads": replace(self, place="threads")}
        else:
            others = {"when it runs again": self}
            if self.topology is not None or any(self.delays):
                others["without network and stragglers"] = replace(self, topology=None, delays=())
        for where, trial in others.items():
            other = trial._run(function)
            for rank in self.members:
                for number, call in enumerate(self.calls):
                    one, two = (each.results[rank].results[number] for each in (run, other))
                    if found := difference(two, one, call.tolerance(exact=self.place != "gloo")):
                        return f"{_called(call)}: the result of rank {rank} {found}, {where}"
                # Of the same topology alone: the fastest algorithm of a call inside depends on the network.
                counted = "bytes_sent" if trial.topology is self.topology else "payload_bytes"
                sent, again = (getattr(each.traffic[rank], counted) for each in (run, other))
                if sent != again:
                    return f"rank {rank} sends {sent} bytes, and {again} {where}"
            if trial is self and run.virtual_seconds != other.virtual_seconds:
                return f"it takes {run.virtual_seconds} virtual seconds, and {other.virtual_seconds} {where}"
        return ""

    def _expected(self, call: GroupCall, definition: Definition | None) -> Sequence[Any]:
        size = len(self.members)
        if definition is None:
            return [call.expected(size, member) for member in range(size)]
        return definition([call.arguments(size, member)[0] for member in range(size)])

    def input_bytes(self, call: GroupCall) -> list[int]:
        """Bytes of each member's tensor, or list of parts."""
        size = len(self.members)
        given = [call.arguments(size, member)[:1] for member in range(size)]
        return [sum(each.nbytes for each in batch_tensors(arguments)) for arguments in given]

    def _run(self, function: Callable[..., Any]) -> RunResult[_Seen]:
        num_arguments, takes_op = signature_of(function)
        members = self.members

        def body(comm: Communicator) -> _Seen:
            if self.delays:
                comm.advance(self.delays[comm.rank])
            if comm.rank not in members:
                return _Seen()
            group = comm if members == tuple(range(comm.world_size)) else comm.group(members)
            seen, num_off_clock = _Seen(), comm.state.num_off_clock
            for call in self.calls:
                arguments = call.arguments(group.world_size, group.rank)[:num_arguments]
                given = batch_tensors(arguments)
                kept = [each.clone() for each in given]
                entered = comm.now() if call.operation == "barrier" else 0.0
                got = function(group, *arguments, **({"op": call.reduce_op} if takes_op else {}))
                if call.operation == "barrier":
                    seen.seconds = (entered, comm.now())
                if got is None and call.operation in IN_PLACE:
                    got, seen.returns_nothing = arguments[0], True
                for position, (now, then) in enumerate(zip(given, kept, strict=True)):
                    is_result = (
                        position == 0 and call.operation in (*IN_PLACE, "own") and not difference(now, got)
                    )
                    if not is_result and difference(now, then):
                        seen.changed = f"input {position} of {_called(call)}"
                seen.results.append(_copied(got))
                seen.returned.append(got)
            seen.returned = [_copied(got) for got in seen.returned]  # as they are after the last call
            seen.is_off_clock = comm.state.num_off_clock > num_off_clock
            return seen

        options = dict(PLACES[self.place])
        if self.place != "gloo" and self.topology is not None:
            options |= {"topology": self.topology, "protocol": self.protocol}
        return run_ranks(body, self.num_ranks, **options)

    def _program(self, function: Callable[..., Any], options: Mapping[str, Any]) -> str:
        """Program that checks the trial again."""
        given = [
            f", {name}={name_of(value) if callable(value) else value!r}"
            for name, value in options.items()
            if value is not None
        ]
        lines = [
            "import torch",
            "from netgym.testing import CollectiveTrial, GroupCall, TensorForm",
            *import_of(function),
            *(line for value in options.values() if callable(value) for line in import_of(value)),
            f"trial = {self!r}",
            f"trial.check({name_of(function)}{''.join(given)})\n",
        ]
        return "\n".join(lines)

    def _plain_program(
        self,
        function: Callable[..., Any],
        wanted: Sequence[Sequence[Any]],
        tolerance: float | None,
        returns_nothing: bool,
    ) -> str:
        """Program that calls the function, and compares its results with what they must be."""
        num_arguments, takes_op = signature_of(function)
        members, size = self.members, len(self.members)
        calls = [
            [call.arguments(size, member)[:num_arguments] for member in range(size)] for call in self.calls
        ]
        ops = [call.reduce_op for call in self.calls]
        listed = [source_of(given, call.form.layout) for call, given in zip(self.calls, calls, strict=True)]
        source = f"calls = [{', '.join(listed)}]"
        options = dict(PLACES[self.place])
        if self.place != "gloo" and self.topology is not None:
            options |= {"topology": dict(self.topology), "protocol": self.protocol}
        given = "".join(f", {name}={value!r}" for name, value in options.items())
        relative, absolute = max(self._errors(call, tolerance) for call in self.calls)
        expected = [
            [wanted[number][members.index(rank)] for number in range(len(calls))] if rank in members else None
            for rank in range(self.num_ranks)
        ]
        name = name_of(function)
        loop = "for arguments, op in zip(calls, ops)" if takes_op else "for arguments in calls"
        call = f"{name}(comm, *arguments[comm.rank]{', op=op' if takes_op else ''})"
        if returns_nothing:  # it works in place
            call = f"({call}, arguments[comm.rank][0])[1]"
        lines = [
            "import torch",
            "from netgym import run_ranks",
            *(["from netgym.testing import laid_out"] if "laid_out(" in source else []),
            *import_of(function),
            source,
            *([f"ops = {ops!r}"] if takes_op else []),
            "def body(comm):",
            *([f"    comm.advance({self.delays!r}[comm.rank])"] if any(self.delays) else []),
            *([f"    if comm.rank not in {members!r}: return None"] if size < self.num_ranks else []),
            *([f"    comm = comm.group({members!r})"] if members != tuple(range(self.num_ranks)) else []),
            f"    return [{call} {loop}]",
            f"run = run_ranks(body, {self.num_ranks}{given})",
            f"expected = {source_of(expected)}",
            f"torch.testing.assert_close(run.results, expected, rtol={relative}, atol={absolute})\n",
        ]
        return "\n".join(lines)


@dataclass
class _Seen:
    """Observations of a rank: results of its calls, and their side effects."""

    results: list[Any] = field(default_factory=list)
    returned: list[Any] = field(default_factory=list)  # the same after all calls
    changed: str = ""
    is_off_clock: bool = False
    returns_nothing: bool = False
    seconds: tuple[float, float] = (0.0, 0.0)  # at which it enters a barrier, and leaves it


def _called(call: GroupCall) -> str:
    form = call.form
    what = (
        ""
        if call.operation == "barrier"
        else f"{form.dtype}{'' if call.is_uneven else list(form.shape)} {form.layout}"
    )
    return f"{call.operation}({what}{f', {call.reduce_op}' if call.reduce_op != 'sum' else ''})"


def signature_of(function: Callable[..., Any]) -> tuple[int | None, bool]:
    """Number of positional arguments behind the communicator (None: any), and whether it takes `op`."""
    parameters = inspect.signature(function).parameters
    kinds = [each.kind for name, each in parameters.items() if name != "op"]
    takes_any = inspect.Parameter.VAR_POSITIONAL in kinds
    positional = sum(
        kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD) for kind in kinds
    )
    return None if takes_any else positional - 1, "op" in parameters


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return [_copied(each) for each in value] if isinstance(value, list | tuple) else value


class CallChoices(NamedTuple):
    """Choices of drawn calls."""

    operation: str
    num_ranks: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[tuple[int, ...], ...]
    layouts: tuple[str, ...]
    reduce_ops: tuple[str, ...]
    is_uneven: bool
