"""Schedules played on arrays, to check that the bytes they charge compute the operation."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from netsim.collectives.operations import OPERATIONS, Side
from netsim.collectives.schedules.schedule import refuse_repeated_pairs
from netsim.errors import InputError
from netsim.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from netsim.collectives.schedules.schedule import Schedule

__all__ = ["Message", "check_bytes", "check_result", "messages", "play"]

Array = npt.NDArray[Any]


class Message(NamedTuple):
    """A message from member `src` to member `dst`.

    Attributes:
        step: its step, counted over all phases.
        low, high: first element of the layout that it carries, and the end; of a barrier bytes.
        reduce: the receiver adds it to what it holds.
    """

    step: int
    src: int
    dst: int
    low: int
    high: int
    reduce: bool


def check_bytes(schedule: Schedule) -> None:
    """Raise InputError if a member sends or receives fewer bytes than any algorithm of the operation must.

    Unlike `check_result` it needs no memory for the tensors, and does not see which bytes are sent.
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


def check_result(schedule: Schedule, *, is_strict: bool = False) -> None:
    """Play a schedule on random numbers; raise InputError if a member ends without the operation's result.

    It takes 8 bytes of memory for each member and element, so a schedule of a few kilobytes is the one to check. Each
    message arrives as late as its phase's window allows, which shows members that pass on what they may not have yet;
    then, where windows are wider than a step, as early as possible.

    Args:
        schedule: the collective.
        is_strict: a message with bytes that its receiver holds already, or that no result depends on, is an error too.
    """
    operation, num = OPERATIONS[schedule.op], schedule.num_ranks
    if not operation.has_size:
        heard = [np.arange(num) == member for member in range(num)]
        play(schedule, heard, np.logical_or)
        for member, others in enumerate(heard):
            if not others.all():
                raise InputError(
                    f"member {member} of {num} may finish before member {others.argmin()} has begun"
                )
        return
    bounds = (-(-schedule.layout // schedule.element_bytes)).tolist()
    # What a member does not hold yet is random too, and shows in every result.
    values = np.random.default_rng(0).integers(0, 2**63, (num, bounds[-1]), np.uint64)
    result = np.zeros(bounds[-1], np.uint64)
    taken = np.zeros((num, bounds[-1]), bool)
    for member in range(num):
        for part in operation.parts_of(operation.gives, schedule, member):
            elements = slice(bounds[part], bounds[part + 1])
            result[elements] += values[member][elements]
        for part in operation.parts_of(operation.takes, schedule, member):
            taken[member, bounds[part] : bounds[part + 1]] = True
    order = list(messages(schedule))
    for is_late in (True, False) if any(phase.window > 1 for phase in schedule.phases) else (True,):
        held = values.copy()
        play(schedule, held, order=order if is_late else messages(schedule, is_late=False))
        if (wrong := taken & (held != result)).any():
            member, element = divmod(int(wrong.argmax()), bounds[-1])
            what = "the sum" if operation.gives is Side.ALL else "the values"
            raise InputError(
                f"member {member} of {num} ends without {what} of the bytes from {element * schedule.element_bytes} on"
                f"{'' if is_late else ' if messages arrive early'}"
            )
    if is_strict:
        play(schedule, values, order=order, refuses_known=True)
        _check_use(schedule, order, taken)


def _check_use(schedule: Schedule, order: list[tuple[Message, bool]], needed: npt.NDArray[np.bool_]) -> None:
    """Raise InputError for a message with bytes that no result depends on.

    Args:
        schedule: the collective.
        order: its messages, as they leave and arrive.
        needed: by member and element, those that the operation takes; changed.
    """
    # Backwards: elements that a member needs from here on, and of messages in flight, the last to arrive first.
    in_flight: deque[Array] = deque()
    for message, has_arrived in reversed(order):
        _, src, dst, low, high, reduce = message
        if not has_arrived:
            needed[src, low:high] |= in_flight.popleft()
            continue
        used = needed[dst, low:high].copy()
        if not used.all():
            _refuse(schedule, message, ~used, "no result depends on them")
        if not reduce:
            needed[dst, low:high] = False
        in_flight.append(used)


def play(
    schedule: Schedule,
    held: Sequence[Array] | Array,
    combine: Callable[[Array, Array], Array] = np.add,
    *,
    order: Iterable[tuple[Message, bool]] | None = None,
    refuses_known: bool = False,
) -> None:
    """Carry out a schedule on the layouts that its members hold, one number an element, in place.

    Args:
        schedule: the collective.
        held: layout of each member; of a collective without bytes every message carries all of it.
        combine: reduction of what is there and what arrives.
        order: its messages as they leave and arrive; None: they arrive late.
        refuses_known: raise InputError for bytes that replace equal ones.

    Raises InputError as `messages` does.
    """
    is_whole = not OPERATIONS[schedule.op].has_size
    in_flight: deque[Array] = deque()
    for message, has_arrived in messages(schedule) if order is None else order:
        _, src, dst, low, high, reduce = message
        elements = slice(None) if is_whole else slice(low, high)
        if has_arrived:
            target, values = held[dst][elements], in_flight.popleft()
            if refuses_known and not reduce and (known := target == values).any():
                _refuse(schedule, message, known, "it holds them already")
            target[...] = combine(target, values) if reduce or is_whole else values
        else:
            in_flight.append(held[src][elements].copy())


def _refuse(schedule: Schedule, message: Message, wrong: npt.NDArray[np.bool_], why: str) -> NoReturn:
    """Raise InputError for the first run of `wrong` elements of a message."""
    at = int(wrong.argmax())
    end = at + int(np.append(wrong[at:], False).argmin())
    first, last = ((message.low + each) * schedule.element_bytes for each in (at, end))
    raise InputError(
        f"step {message.step}: bytes {first} to {last} from member {message.src} to member {message.dst}: {why}"
    )


def messages(schedule: Schedule, *, is_late: bool = True) -> Iterator[tuple[Message, bool]]:
    """Messages as they leave (False) and as they arrive (True), which they do in the order in which they left.

    Args:
        schedule: the collective.
        is_late: messages arrive as late as windows allow; else at once.

    Raises InputError for a message between members, or of bytes, that do not exist, and for two of a pair in a step.
    """
    first = 0
    for phase in schedule.phases:
        in_flight: deque[list[Message]] = deque()
        window = phase.window if is_late else 1
        for index in range(phase.num_steps):
            if len(in_flight) >= window:
                yield from ((message, True) for message in in_flight.popleft())
            posted = _messages_of_step(schedule, first + index, phase.reduces(index))
            yield from ((message, False) for message in posted)
            in_flight.append(posted)
        for arriving in in_flight:
            yield from ((message, True) for message in arriving)
        first += phase.num_steps


def _messages_of_step(schedule: Schedule, number: int, reduce: bool) -> list[Message]:
    step = schedule.step(number)
    src, dst, low, high = step.src, step.dst, step.offset, step.offset + step.num_bytes
    size, num, total = schedule.element_bytes, schedule.num_ranks, int(schedule.layout[-1])
    if not OPERATIONS[schedule.op].has_size:  # its bytes are of no tensor
        size, total = 1, int(high.max(initial=0))
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
    refuse_repeated_pairs(step, number)
    columns = (column.tolist() for column in (src, dst, low // size, -(-high // size)))
    rows = zip(*columns, strict=True)
    return [Message(number, src, dst, first, end, reduce) for src, dst, first, end in rows]
