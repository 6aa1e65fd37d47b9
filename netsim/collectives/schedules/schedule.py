"""A collective as data: messages with sender, receiver and bytes, by step.

A schedule is a sequence of phases, a phase a sequence of steps, a step a set of messages. Each member walks
through the steps on its own: it posts step i of a phase (its sends and receives of that step) when its step
i - window is done, and the first steps of a phase when all of the phase before is done. A member that has no
message in a step passes it at once. Nothing here knows of time or of a network.

Every message carries a contiguous range of the *layout*, the bytes of the whole operation in one line: the
tensor itself, or the parts of all ranks one after the other. So one executor can carry out any schedule on
arrays.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from netsim.collectives.operations import OPERATIONS
from netsim.errors import InputError
from netsim.network.collective import StepMessages, StepSequence

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = [
    "Bytes",
    "ListedPhase",
    "Phase",
    "Problem",
    "Ranks",
    "Schedule",
    "Step",
    "boundaries",
    "refuse_repeated_pairs",
    "step_of",
]

# The messages of a schedule with more of them are made step by step each time, and not kept.
_MOST_KEPT_MESSAGES = 100_000

Ranks = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Step:
    """The messages of one step as arrays of equal length, each sender's in the order of posting."""

    src: Ranks
    dst: Ranks
    offset: Bytes  # first byte of the message in the layout
    num_bytes: Bytes


def refuse_repeated_pairs(step: Step, index: int) -> None:
    """Raise InputError for two messages of one pair in step `index`: their rendezvous would be indistinguishable."""
    pairs = np.sort(step.src << 32 | step.dst)
    if (twice := pairs[1:][pairs[1:] == pairs[:-1]]).size:
        src, dst = int(twice[0]) >> 32, int(twice[0]) & 0xFFFFFFFF
        raise InputError(
            f"step {index} has two messages from member {src} to member {dst}: make them one, or send the second in "
            "a later step"
        )


class Phase(ABC):
    """Steps that follow one another under one window; receivers add what comes (`reduce`) or keep it."""

    num_steps: int
    window: int
    reduce: bool = False
    num_gaps: int = 0  # messages without bytes that a sender leaves out, at most
    num_channels: int = 0  # of NCCL, each with a connection of its own: step i is of channel i % num_channels

    @abstractmethod
    def step(self, index: int) -> Step:
        """The messages of step `index`, 0 <= index < num_steps, made when asked for."""

    def gate(self, index: int) -> int:
        """Number of steps of the phase that a member must have done before it posts step `index`."""
        return max(index - self.window + 1, 0)

    def reduces(self, index: int) -> bool:
        """Return whether receivers add what comes in step `index`."""
        return self.reduce

    def num_bytes(self, index: int) -> Bytes:
        """The bytes of each message of step `index`."""
        return self.step(index).num_bytes

    def sent_bytes(self, num_ranks: int, counted: npt.NDArray[np.bool_] | None = None) -> Bytes:
        """Bytes each of `num_ranks` members sends; with `counted`, an (n, n) mask, only those from i to j."""
        total = np.zeros(num_ranks, np.int64)
        for src, dst, num_bytes in self.pair_bytes(num_ranks):
            np.add.at(total, src, num_bytes if counted is None else num_bytes * counted[src, dst])
        return total

    @property
    def num_messages(self) -> int:
        """Messages over all steps."""
        pairs = self.fixed_pairs()
        if pairs is not None:
            return self.num_steps * len(pairs[0])
        return sum(len(self.step(index).src) for index in range(self.num_steps))

    def pair_bytes(self, num_ranks: int) -> Iterator[tuple[Ranks, Ranks, Bytes]]:
        """(src, dst, bytes) of pairs that exchange messages, in columns; a pair may come more than once.

        Walks through all steps; a regular phase knows better.
        """
        for index in range(self.num_steps):
            step = self.step(index)
            yield step.src, step.dst, step.num_bytes

    def fixed_pairs(self) -> tuple[Ranks, Ranks] | None:
        """The (src, dst) pairs to which every step keeps, one a src; None if steps differ."""
        return None


class ListedPhase(Phase):
    """A phase whose few steps are written out; raises InputError for two messages of one pair in a step."""

    def __init__(self, steps: Sequence[Step], *, reduce: bool = False, window: int = 1) -> None:
        self.steps = tuple(steps)
        for index, step in enumerate(self.steps):
            refuse_repeated_pairs(step, index)
        self.num_steps = len(self.steps)
        self.window = window
        self.reduce = reduce

    def step(self, index: int) -> Step:
        """The messages of step `index`."""
        return self.steps[index]


@dataclass(frozen=True, eq=False)
class Schedule:
    """A collective among `num_ranks` members, as phases of messages.

    Compared by identity: a schedule is made once and kept.

    Attributes:
        op: operation, such as "all_reduce".
        algorithm: name of the algorithm that made it.
        num_ranks: members.
        num_bytes: of its layout: `size`, of all_to_all that of all ranks together.
        phases: its steps, in order.
        layout: boundaries, in bytes, of the parts that the operation distinguishes: one part for a whole tensor, one
            a rank, or one a pair (all_to_all, row by row).
        root: member that sends to all or receives from all, where the operation has one.
        element_bytes: size of an element; parts hold whole elements.
        num_copies: last members that are copies in a store, and no ranks; see `netsim.collectives.schedules.direct`.
    """

    op: str
    algorithm: str
    num_ranks: int
    num_bytes: int
    phases: tuple[Phase, ...]
    layout: Bytes
    root: int = 0
    element_bytes: int = 1
    num_copies: int = 0

    @property
    def size(self) -> int:
        """Size of the request, as `num_bytes` of `netsim.collective`."""
        return self.num_bytes // self.num_ranks if OPERATIONS[self.op].is_per_pair else self.num_bytes

    @cached_property
    def parts(self) -> Bytes:
        """Bytes of each part of the layout."""
        return np.diff(self.layout)

    @cached_property
    def num_steps(self) -> int:
        """Steps over all phases."""
        return sum(phase.num_steps for phase in self.phases)

    @cached_property
    def sent_bytes(self) -> Bytes:
        """Payload bytes each member sends, shape (num_ranks,)."""
        return self._sent_bytes()

    def _sent_bytes(self, *counted: npt.NDArray[np.bool_]) -> Bytes:
        zero = np.zeros(self.num_ranks, np.int64)
        return sum((phase.sent_bytes(self.num_ranks, *counted) for phase in self.phases), zero)

    @cached_property
    def gates(self) -> list[int]:
        """By step, counted over all phases: how many steps a member must have done before it posts that one."""
        gates: list[int] = []
        for phase in self.phases:
            first = len(gates)
            gates.extend(first + phase.gate(index) for index in range(phase.num_steps))
        return gates

    @cached_property
    def num_messages(self) -> int:
        """Messages over all steps, empty ones that are left out included where steps are regular."""
        return sum(phase.num_messages for phase in self.phases)

    @property
    def pair_bytes(self) -> Iterator[tuple[int, int, int]]:
        """(src, dst, bytes) of each pair of members that exchanges any bytes."""
        return zip(*(column.tolist() for column in self.pairs), strict=True)

    @cached_property
    def pairs(self) -> tuple[Ranks, Ranks, Bytes]:
        """`pair_bytes` in columns, in the order in which pairs first send."""
        columns = [column for phase in self.phases for column in phase.pair_bytes(self.num_ranks)]
        none = np.zeros(0, np.int64)
        src, dst, num_bytes = map(np.concatenate, zip((none, none, none), *columns, strict=True))
        pairs, first, place = np.unique(src * self.num_ranks + dst, return_index=True, return_inverse=True)
        total = np.zeros(len(pairs), np.int64)
        np.add.at(total, place, num_bytes)
        order = np.argsort(first)
        order = order[total[order] > 0]
        src, dst = np.divmod(pairs[order], self.num_ranks)
        return src, dst, total[order]

    def region_bytes(self, regions: Sequence[str]) -> Bytes:
        """The part of `sent_bytes` that goes to a member of another region; `regions` names each member's."""
        _, code = np.unique(np.asarray(regions), return_inverse=True)
        if len(code) != self.num_ranks:
            raise ValueError(f"region_bytes: {len(code)} regions for {self.num_ranks} members; give one each")
        crosses = code[:, None] != code[None, :]
        return self._sent_bytes(crosses)

    @cached_property
    def sequence(self) -> StepSequence:
        """The schedule as collectives on a live network walk through it."""

        latest: StepMessages | None = None
        known: dict[float, float] = {}

        def messages(index: int) -> StepMessages:
            nonlocal latest
            step = self.step(index)
            sizes = [known.setdefault(size, size) for size in step.num_bytes.astype(np.float64).tolist()]
            about = step.src.tolist(), step.dst.tolist(), sizes
            if latest is None or not latest.are(*about):
                latest = StepMessages(self.num_ranks, *about, latest)
            return latest

        is_kept = self.num_messages <= _MOST_KEPT_MESSAGES
        return self.walked(messages, is_kept)

    def walked(self, make: Callable[[int], StepMessages], is_kept: bool) -> StepSequence:
        """The schedule as collectives on a live network walk through it, with messages made by the caller.

        Args:
            make: messages of a step, as of `StepSequence`.
            is_kept: they are kept for the next collective.
        """
        operation = OPERATIONS[self.op]
        return StepSequence(
            self.num_ranks,
            self.gates,
            make,
            is_kept,
            operation.is_message,
            operation.sends_first,
            max((phase.num_channels for phase in self.phases), default=0),
        )

    def step(self, index: int) -> Step:
        """The messages of step `index`, counted over all phases."""
        for phase in self.phases:
            if index < phase.num_steps:
                return phase.step(index)
            index -= phase.num_steps
        raise IndexError(f"step {index}: the schedule has {self.num_steps} steps")


@dataclass(frozen=True)
class Problem:
    """Input of an algorithm: operation, members, sizes and layout; see `netsim.schedule`.

    Attributes:
        op, algorithm, num_ranks, num_bytes, root, element_bytes: as `netsim.schedule` takes them.
        parts: uneven shares in bytes, of all_to_all row by row; None: equal ones.
        regions: region of each member, where the algorithm asks for them.
        members: ranks of another problem that take part; (): all of this one.
    """

    op: str
    algorithm: str
    num_ranks: int
    num_bytes: int
    root: int
    element_bytes: int
    parts: tuple[int, ...] | None
    regions: tuple[str, ...]
    members: tuple[int, ...] = ()

    @property
    def ranks(self) -> Ranks:
        """All members in order."""
        return np.array(self.members) if self.members else np.arange(self.num_ranks, dtype=np.int64)

    @property
    def chunks(self) -> Problem:
        """The whole tensor as one equal part for each member."""
        return replace(self, op="reduce_scatter")

    @cached_property
    def layout(self) -> Bytes:
        """Boundaries of the parts that the operation distinguishes."""
        if self.parts is not None:
            return np.concatenate(([0], np.cumsum(np.array(self.parts, np.int64))))
        num_parts = OPERATIONS[self.op].num_parts(self.num_ranks)
        return boundaries(self.num_bytes, num_parts, self.element_bytes)


def boundaries(num_bytes: int, num_parts: int, element_bytes: int = 1) -> Bytes:
    """Boundaries of `num_parts` equal parts of ceil(num_bytes / num_parts), rounded up to whole elements.

    The last parts are shorter or empty where they do not divide; shape (num_parts + 1,).

    >>> boundaries(10, 4).tolist()
    [0, 3, 6, 9, 10]
    """
    elements = -(-num_bytes // element_bytes)
    part = -(-elements // num_parts) * element_bytes if num_parts else 0
    return np.minimum(np.arange(num_parts + 1, dtype=np.int64) * part, num_bytes)


def step_of(rows: Sequence[tuple[int, int, int, int]]) -> Step:
    """A step from rows (src, dst, first byte, end byte), in the order in which senders post them."""
    table = np.array(rows, np.int64).reshape(-1, 4)
    return Step(table[:, 0], table[:, 1], table[:, 2], table[:, 3] - table[:, 2])
