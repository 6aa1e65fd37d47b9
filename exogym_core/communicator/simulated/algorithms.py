"""The algorithms by which a collective may go on the simulated network."""

from __future__ import annotations

from netsim.collectives.schedules.algorithms import OPERATIONS, algorithm_names

__all__ = ["algorithms_of"]


def algorithms_of(op: str) -> tuple[str, ...]:
    """Their names; none for an operation that has no choice.

    >>> "ring" in algorithms_of("all_reduce"), algorithms_of("put")
    (True, ())
    """
    return tuple(algorithm_names(op)) if op in OPERATIONS else ()
