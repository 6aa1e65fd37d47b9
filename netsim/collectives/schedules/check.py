"""Schedules played on arrays, to check that the bytes they charge compute the operation."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from netsim.collectives.operations import OPERATIONS, Side
from netsim.errors import InputError
from netsim.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from netsim.collectives.schedules.schedule import Schedule, Step

__all__ = ["check_bytes", "check_schedule", "play"]

Array = npt.NDArray[Any]


def check_bytes(schedule: Schedule) -> None:
    """Raise InputError if a member sends or receives fewer bytes than any algorithm of the operation must.

    Unlike `check_schedule` it needs no memory for the tensors, and does not see which bytes are sent.
    """
    operation, num = OPERATIONS[schedule.op], schedule.num_ranks
    sent, received = np.zeros(num, np.int64), np.zeros(num, np.int64)
    for phase in schedule.phases:
        for src, dst, num_bytes in phase.pair_bytes(num):
            if len(src) and (min(src.min(), dst.min()) < 0 or max(src.max(), dst.max()) >= num):
                raise InputError(f"a message of a member that does not exist: members are 0 to {num - 1}")
            np.add.at(sent, src, num_bytes)
            np.add.at(received, dst, num_bytes)
    for verb, moved, least in zip(
        ("sends", "receives"), (sent, received), operation.least_bytes(schedule), strict=True
    ):
        if (short := moved < least).any():
            member = int(short.argmax())
            raise InputError(
                f"member {member} of {num} {verb} {format_bytes(int(moved[member]))}, and {operation.name} takes at "
                f"least {format_bytes(int(least[member]))}"
            )


def check_schedule(schedule: Schedule) -> None:
    """Play a schedule on random numbers; raise InputError if a member ends without the operation's result.

    It takes 8 bytes of memory for each member and element, so a schedule of a few kilobytes is the one to check. Each
    message arrives as late as its phase's window allows, which shows members that pass on what they may not have yet.
    """
    operation, num = OPERATIONS[schedule.op], schedule.num_ranks
    draw = np.random.default_rng(0)
    if not operation.has_size:
        heard = [np.arange(num) == member for member in range(num)]
        play(schedule, heard, np.logical_or)
        for member, others in enumerate(heard):
            if not others.all():
                raise InputError(
                    f"member {member} of {num} may finish before member {others.argmin()} has begun"
                )
        return
    bounds = -(-schedule.layout // schedule.element_bytes)
    # What a member does not hold yet is random too, and shows in every result.
    held = [draw.integers(0, 2**63, int(bounds[-1]), np.uint64) for _ in range(num)]
    result = np.zeros(int(bounds[-1]), np.uint64)
    for member in range(num):
        for part in operation.parts_of(operation.gives, schedule, member):
            elements = slice(bounds[part], bounds[part + 1])
            result[elements] += held[member][elements]
    play(schedule, held)
    for member in range(num):
        for part in operation.parts_of(operation.takes, schedule, member):
            elements = slice(bounds[part], bounds[part + 1])
            if (wrong := held[member][elements] != result[elements]).any():
                at = int(schedule.layout[part]) + int(wrong.argmax()) * schedule.element_bytes
                what = "the sum" if operation.gives is Side.ALL else "the values"
                raise InputError(f"member {member} of {num} ends without {what} of the bytes from {at} on")


def play(
    schedule: Schedule, held: Sequence[Array], combine: Callable[[Array, Array], Array] = np.add
) -> None:
    """Carry out a schedule on the layouts that its members hold, one number an element, in place.

    Args:
        schedule: the collective.
        held: layout of each member; of a collective without bytes every message carries all of it.
        combine: reduction of what is there and what arrives.

    Raises InputError for a message between members, or of bytes, that do not exist.
    """
    is_whole = not OPERATIONS[schedule.op].has_size
    first = 0
    for phase in schedule.phases:
        in_flight: deque[list[tuple[Array, Array]]] = deque()
        for index in range(phase.num_steps + phase.window):
            if len(in_flight) >= phase.window or index >= phase.num_steps:
                for target, values in in_flight.popleft() if in_flight else ():
                    target[...] = combine(target, values) if phase.reduce or is_whole else values
            if index < phase.num_steps:
                rows = _rows(schedule, phase.step(index), first + index)
                ranges = [slice(None) if is_whole else slice(low, high) for _, _, low, high in rows]
                ends = [(held[src], held[dst]) for src, dst, _, _ in rows]
                in_flight.append(
                    [(to[each], of[each].copy()) for (of, to), each in zip(ends, ranges, strict=True)]
                )
        first += phase.num_steps


def _rows(schedule: Schedule, step: Step, number: int) -> list[tuple[int, int, int, int]]:
    """Messages of a step: sender, receiver, first element and end."""
    src, dst, low, high = step.src, step.dst, step.offset, step.offset + step.num_bytes
    size, num, total = schedule.element_bytes, schedule.num_ranks, int(schedule.layout[-1])
    for is_wrong, what in (
        ((src < 0) | (src >= num) | (dst < 0) | (dst >= num), f"members are 0 to {num - 1}"),
        (src == dst, "a member sends nothing to itself"),
        ((low < 0) | (high < low) | (high > total), f"the layout has bytes 0 to {total}"),
        ((low % size > 0) | ((high % size > 0) & (high < total)), f"an element has {size} bytes"),
    ):
        if is_wrong.any():
            at = int(is_wrong.argmax())
            raise InputError(
                f"step {number}: bytes {low[at]} to {high[at]} from member {src[at]} to member {dst[at]}: {what}"
            )
    columns = (src, dst, low // size, -(-high // size))
    return list(zip(*(column.tolist() for column in columns), strict=True))
