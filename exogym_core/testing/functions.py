"""`check_collective`: a function on ranks held to the definition of a collective, wherever its ranks run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from exogym_core.testing.collectives import PLACES, CallChoices, signature_of
from exogym_core.testing.drawing import collective_trials, hold_for_all, packed_trial
from exogym_core.testing.failures import name_of
from exogym_core.testing.group_calls import DTYPES, FLOATS, LAYOUTS, REDUCE_OPS, REDUCING
from netsim.errors import InputError, unknown_name
from netsim.testing import LawError
from netsim.units import format_count

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from exogym_core.testing.collectives import CollectiveTrial, Definition, Tolerance

__all__ = ["CollectiveReport", "check_collective"]

_OPERATIONS = (*REDUCING, "broadcast", "all_gather", "gather", "scatter", "all_to_all", "barrier")
_SPLIT = ("all_gather", "gather", "scatter", "reduce_scatter", "all_to_all")


def check_collective(
    function: Callable[..., Any],
    like: str | Definition = "all_reduce",
    *,
    num_ranks: Sequence[int] = range(1, 7),
    dtypes: Sequence[torch.dtype] = (),
    shapes: Sequence[tuple[int, ...]] = (),
    layouts: Sequence[str] = LAYOUTS,
    is_uneven: bool = False,
    tolerance: Tolerance | None = None,
    most_bytes: Callable[[list[int]], int] | None = None,
    places: Sequence[str] = ("processes", "gloo"),
    cases: int | None = None,
    seed: int | None = None,
    on_case: Callable[[], object] = lambda: None,
) -> CollectiveReport:
    """Check a function on ranks against the definition of a collective.

    It is called as the communicator's method of that name: `function(comm, tensor)`, with `src` or `dst` behind it
    where the operation has a root and the function takes it, with `op` where it has a parameter of that name; scatter
    has the list between, reduce_scatter and all_to_all take a list of a tensor a rank. A result is returned, or written
    into the tensor by what works in place.

    On drawn networks with drawn stragglers, in groups and several times in a row, results must be those of the
    definition, with the same bits on all ranks that get the same, again and without network and stragglers; inputs stay
    as they are, and all bytes are counted. Then many calls run in processes and over real sockets.

    Args:
        function: of a communicator and tensors, made of its calls.
        like: the method; or a function from all members' tensors to their results.
        num_ranks: numbers of ranks that it supports.
        dtypes: of tensors; by default all that the operation takes.
        shapes: of tensors; by default many, without elements, scalars and uneven multiples among them.
        layouts: "plain", "transposed" (Fortran's order), "strided" (with gaps).
        is_uneven: ranks' tensors, or parts, have other sizes too.
        tolerance: absolute error of floats, for values from -2 to 2, or a function from the number of ranks to it; by
            default that of a sum in another order; 0: the values of the definition.
        most_bytes: from the bytes of each rank's tensor to those that all ranks together send at most.
        places: besides threads.
        cases: number of drawn programs in threads; None: `max_examples` of hypothesis's profile.
        seed: of the draws; None: as hypothesis's profile says.
        on_case: called before each case, those that make a failing one smaller included.

    Raises:
        LawError: a law is broken; the error has the difference and a program that shows it.
        InputError: `like` or a place does not exist.

    >>> print(check_collective(lambda comm, tensor: comm.all_reduce(tensor), cases=3, places=[]))
    all_reduce by <lambda>: 3 programs passed
    """
    if isinstance(like, str) and like not in _OPERATIONS:
        raise unknown_name("operation", like, _OPERATIONS)
    if unknown := [place for place in places if place not in PLACES]:
        raise unknown_name("place", unknown[0], PLACES)
    if is_uneven and like not in _SPLIT:
        raise InputError(
            f"check_collective: is_uneven: tensors of {like} have one size; it is for {', '.join(_SPLIT)}"
        )
    operation = like if isinstance(like, str) else "own"
    definition = None if isinstance(like, str) else like
    drawn = CallChoices(
        operation,
        tuple(num_ranks),
        tuple(dtypes or (DTYPES[:-1] if operation in REDUCING else FLOATS if operation == "own" else DTYPES)),
        tuple(shapes),
        tuple(layouts),
        REDUCE_OPS if signature_of(function)[1] else ("sum",),
        is_uneven,
    )
    num_checked = 0

    def check(trial: CollectiveTrial) -> None:
        nonlocal num_checked
        on_case()
        num_checked += 1
        error = tolerance(len(trial.members)) if callable(tolerance) else tolerance
        most = sum(most_bytes(trial.input_bytes(call)) for call in trial.calls) if most_bytes else None
        trial.check(function, definition, error, most)

    hold_for_all(collective_trials(drawn), check, cases, seed)
    for place in places:
        for size in sorted({drawn.num_ranks[-1], drawn.num_ranks[len(drawn.num_ranks) // 2]}):
            packed = replace(packed_trial(drawn, size), place=place)
            try:
                check(packed)
            except LawError:
                for call in packed.calls:  # as a smaller program, if one of them is enough
                    check(replace(packed, calls=(call,)))
                raise
    return CollectiveReport(name_of(function), operation, num_checked)


@dataclass(frozen=True)
class CollectiveReport:
    """A function that keeps all laws; printed as a line.

    Attributes:
        function: its name.
        operation: such as "all_reduce"; "own": a definition of the user's.
        num_cases: number of programs that ran.
    """

    function: str
    operation: str
    num_cases: int

    def __str__(self) -> str:
        return f"{self.operation} by {self.function}: {format_count(self.num_cases, 'program')} passed"
