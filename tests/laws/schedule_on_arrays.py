"""Carries out any schedule on arrays, to prove that the bytes it sends compute the right result."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from netsim.collectives.schedules.check import play
from netsim.collectives.schedules.schedule import Schedule
from netsim.errors import unknown_name

__all__ = ["Message", "messages", "run_on_arrays"]

Array = npt.NDArray[Any]

COMBINE: dict[str, Callable[[Array, Array], Array]] = {
    "sum": np.add,
    "product": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
}


class Message(NamedTuple):
    """A message from member `src` to member `dst`, in a step counted over all phases."""

    step: int
    src: int
    dst: int
    num_bytes: int


def messages(schedule: Schedule) -> Iterator[Message]:
    """All messages, step by step."""
    for number in range(schedule.num_steps):
        step = schedule.step(number)
        columns = (column.tolist() for column in (step.src, step.dst, step.num_bytes))
        yield from (Message(number, *row) for row in zip(*columns, strict=True))


def run_on_arrays(schedule: Schedule, inputs: Sequence[Array | None], op: str = "sum") -> list[Array | None]:
    """Carry out `schedule` on `inputs` (flat arrays of one dtype, by member); return what members hold after.

    Inputs and results follow the operation's definition: all_gather and gather take each member's part,
    scatter takes the root's whole array (None elsewhere), reduce_scatter gives each member's part,
    all_to_all takes and gives the parts for and from everyone in rank order. A member that gets nothing has
    None. Messages are delivered as late as the window allows, that is just before the step that may build on
    them is posted: an algorithm that sends on what it need not have yet fails here.
    """
    if op not in COMBINE:
        raise unknown_name("reduce op", op, COMBINE)
    dtype = next(array.dtype for array in inputs if array is not None)
    total = int(schedule.layout[-1]) // dtype.itemsize
    # Bytes that a member does not have yet are poison, which shows in any result.
    held = [np.full(total, _poison(dtype), dtype) for _ in range(schedule.num_ranks)]
    for rank, array in enumerate(inputs):
        _put(schedule, rank, array, held[rank])
    play(schedule, held, COMBINE[op])
    return [_result(schedule, rank, held[rank]) for rank in range(schedule.num_ranks)]


def _poison(dtype: np.dtype[Any]) -> Any:
    return np.nan if dtype.kind == "f" else np.iinfo(dtype).max // 3


def _whole(schedule: Schedule, rank: int) -> list[tuple[int, int]]:
    return [(0, schedule.num_bytes)]


def _nothing(schedule: Schedule, rank: int) -> list[tuple[int, int]]:
    return []


def _root_whole(schedule: Schedule, rank: int) -> list[tuple[int, int]]:
    return _whole(schedule, rank) if rank == schedule.root else []


def _own_part(schedule: Schedule, rank: int) -> list[tuple[int, int]]:
    return [(int(schedule.layout[rank]), int(schedule.layout[rank + 1]))]


def _row(schedule: Schedule, rank: int) -> list[tuple[int, int]]:
    first = rank * schedule.num_ranks
    return [(int(schedule.layout[first]), int(schedule.layout[first + schedule.num_ranks]))]


def _column(schedule: Schedule, rank: int) -> list[tuple[int, int]]:
    parts = range(rank, schedule.num_ranks**2, schedule.num_ranks)
    return [(int(schedule.layout[part]), int(schedule.layout[part + 1])) for part in parts]


def _first(schedule: Schedule, rank: int) -> list[tuple[int, int]]:
    return _whole(schedule, rank) if rank == 0 else []


def _second(schedule: Schedule, rank: int) -> list[tuple[int, int]]:
    return _whole(schedule, rank) if rank == 1 else []


Ranges = Callable[["Schedule", int], list[tuple[int, int]]]

# Bytes of the layout that a member puts in, and those that it takes out.
RANGES: dict[str, tuple[Ranges, Ranges]] = {
    "all_reduce": (_whole, _whole),
    "broadcast": (_root_whole, _whole),
    "reduce": (_whole, _root_whole),
    "all_gather": (_own_part, _whole),
    "gather": (_own_part, _root_whole),
    "scatter": (_root_whole, _own_part),
    "reduce_scatter": (_whole, _own_part),
    "all_to_all": (_row, _column),
    "barrier": (_nothing, _nothing),
    "sendrecv": (_first, _second),
}


def _put(schedule: Schedule, rank: int, array: Array | None, held: Array) -> None:
    begin = 0
    for low, high in RANGES[schedule.op][0](schedule, rank):
        if array is None:
            raise ValueError(f"run_on_arrays: member {rank} needs an input for {schedule.op}, got None")
        first, last = low // held.itemsize, high // held.itemsize
        held[first:last] = array[begin : begin + last - first]
        begin += last - first


def _result(schedule: Schedule, rank: int, held: Array) -> Array | None:
    ranges = RANGES[schedule.op][1](schedule, rank)
    if not ranges:
        return None
    return np.concatenate([held[low // held.itemsize : high // held.itemsize] for low, high in ranges])
