"""`check_collective`: a function on ranks held to the definition of a collective, wherever its ranks run."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from exogym_core.testing.collectives import PLACES, CallChoices, signature_of
from exogym_core.testing.drawing import collective_trials, hold_for_all, packed_trial
from exogym_core.testing.group_calls import (
    DTYPES,
    FLOATS,
    LAYOUTS,
    REDUCE_OPS,
    REDUCING,
    ROOTED,
    GroupCall,
    name_of,
)
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
    num_ranks: Sequence[int] = range(1, 9),
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
        num_ranks: numbers of ranks that it supports; by default 1 to 8.
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
        InputError: an option is not what is accepted, or the function cannot be called so.

    >>> print(check_collective(lambda comm, tensor: comm.all_reduce(tensor), cases=3, places=[]))
    all_reduce by <lambda>: 3 programs passed
    """
    places = _listed("places", places, PLACES.__contains__, f"some of {', '.join(PLACES)}, or none")
    for name, value, is_right, what in (
        ("is_uneven", is_uneven, isinstance(is_uneven, bool), "true or false"),
        (
            "tolerance",
            tolerance,
            tolerance is None
            or callable(tolerance)
            or (isinstance(tolerance, int | float) and tolerance >= 0),
            "an absolute error, such as 0.01, or in Python a function from the number of ranks to it",
        ),
        (
            "most_bytes",
            most_bytes,
            most_bytes is None or callable(most_bytes),
            "a function from the bytes of each rank's tensor, in Python",
        ),
        ("cases", cases, cases is None or _is_count(cases, 1), "a number from 1"),
        ("seed", seed, seed is None or isinstance(seed, int), "a number"),
    ):
        if not is_right:
            raise InputError(f"check_collective: {name}={value!r}: expected {what}")
    drawn = _drawn_calls(function, like, num_ranks, dtypes, shapes, layouts, is_uneven)
    definition = None if isinstance(like, str) else like
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
    return CollectiveReport(name_of(function), drawn.operation, num_checked)


def _drawn_calls(
    function: Callable[..., Any],
    like: str | Definition,
    num_ranks: Sequence[int],
    dtypes: Sequence[torch.dtype],
    shapes: Sequence[tuple[int, ...]],
    layouts: Sequence[str],
    is_uneven: bool,
) -> CallChoices:
    """Choices of drawn calls, as `check_collective` describes them; raises InputError as it does."""
    if not callable(like) and like not in _OPERATIONS:
        raise unknown_name("operation", str(like), _OPERATIONS)
    operation = like if isinstance(like, str) else "own"
    accepted = DTYPES[:-1] if operation in REDUCING else DTYPES
    dtypes = _listed("dtypes", dtypes, accepted.__contains__, f"some of {', '.join(map(str, accepted))}")
    shapes = _listed("shapes", shapes, _is_shape, "lists of sizes, such as [[2, 3]]")
    layouts = _listed("layouts", layouts, LAYOUTS.__contains__, f"some of {', '.join(LAYOUTS)}", 1)
    num_ranks = _listed(
        "num_ranks", num_ranks, lambda each: _is_count(each, 1), "numbers from 1, such as [2, 4]", 1
    )
    if is_uneven and operation not in _SPLIT:
        raise InputError(
            f"check_collective: is_uneven: tensors of {like} have one size; it is for {', '.join(_SPLIT)}"
        )
    return CallChoices(
        operation,
        num_ranks,
        dtypes or (FLOATS if operation == "own" else accepted),
        tuple(map(tuple, shapes)),
        layouts,
        REDUCE_OPS if _refuse_signature(function, operation) else ("sum",),
        is_uneven,
    )


def _is_count(value: Any, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_shape(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(map(_is_count, value))


def _listed(
    name: str, values: Any, is_right: Callable[[Any], bool], accepted: str, least: int = 0
) -> tuple[Any, ...]:
    """Values of an option that has several, each of which is right."""
    if isinstance(values, Iterable) and not isinstance(values, str):
        found = tuple(values)
        if len(found) >= least and all(map(is_right, found)):
            return found
    raise InputError(f"check_collective: {name}={values!r}: expected a list of {accepted}")


_PARAMETERS = {
    "barrier": "",
    "broadcast": ", tensor, src",
    "scatter": ", tensor, scatter_list, src",
    "reduce": ", tensor, dst",
    "gather": ", tensor, dst",
    "reduce_scatter": ", tensors",
    "all_to_all": ", tensors",
}


def _refuse_signature(function: Callable[..., Any], operation: str) -> bool:
    """Raise InputError where the function cannot be called as the operation is; return whether it takes `op`."""
    call = GroupCall(operation, is_listed=True)
    try:
        number, takes_op = signature_of(function)
        given = call.arguments(2, 0)[: number if number is None else max(number, 0)]
        inspect.signature(function).bind(None, *given, **({"op": "sum"} if takes_op else {}))
        is_right = bool(given) or operation == "barrier"
    except (TypeError, ValueError):
        is_right = False
    if not is_right:
        root = "; the root may be left out" if operation in ROOTED else ""
        op = "; a parameter op may follow" if operation in REDUCING else ""
        parameters = _PARAMETERS.get(operation, ", tensor")
        raise InputError(f"check_collective: {name_of(function)} must take (comm{parameters}){root}{op}")
    return takes_op


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
