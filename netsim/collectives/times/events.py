"""Carries out a schedule message by message on a network: the reference for every faster way."""

from __future__ import annotations

from collections import defaultdict
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from netsim.collectives.schedules.schedule import Schedule
    from netsim.fluid.network import Network

__all__ = ["Execution", "Posts", "described", "rebound"]


def rebound(call: Callable[[], None], owners: Mapping[Execution, Execution]) -> Callable[[], None]:
    """What an execution is to be called with, for the one that takes its place."""
    execution, function, arguments = _taken_apart(call)
    return partial(MethodType(function, owners[execution]), *arguments)


def described(call: Callable[[], None]) -> tuple[Execution, str, tuple[Any, ...]]:
    """Whom an execution's call is for, and what it tells."""
    execution, function, arguments = _taken_apart(call)
    return execution, function.__qualname__, arguments


def _taken_apart(call: Callable[[], None]) -> tuple[Execution, FunctionType, tuple[Any, ...]]:
    assert isinstance(call, partial)
    method: Any = call.func  # of an execution
    return method.__self__, method.__func__, call.args


class Posts:
    """What each member posts in one step.

    Attributes:
        sends: target of each of a member's sends, in order, and which of the step's messages it is.
        receives: source of each of a member's receives, and which of that source's sends it is.
        num_awaited: members that have not posted this step yet.
    """

    __slots__ = ("_num_bytes", "num_awaited", "receives", "sends")

    def __init__(self, schedule: Schedule, index: int) -> None:
        self.sends: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        self.receives: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        self.num_awaited = schedule.num_ranks
        step = schedule.step(index)
        self._num_bytes = step.num_bytes
        for number, (src, dst) in enumerate(zip(step.src.tolist(), step.dst.tolist(), strict=True)):
            self.receives[dst].append((src, len(self.sends[src])))
            self.sends[src].append((dst, number))

    def sends_of(self, member: int) -> list[tuple[int, int]]:
        """Target and bytes of each of a member's sends, in order; the bytes as they are known by now."""
        return [(dst, int(self._num_bytes[number])) for dst, number in self.sends.get(member, ())]


class _Member:
    """How far one member has come."""

    __slots__ = ("arrived", "early", "next_step", "oldest", "open")

    def __init__(self) -> None:
        self.arrived = False
        self.next_step = 0  # the first step that is not posted
        self.oldest = 0  # the first step that is not done
        self.open: dict[int, int] = {}  # posted step -> sends and receives of it that are not done
        self.early: dict[int, int] = {}  # step not posted yet -> messages of it that are there already

    def copied(self) -> _Member:
        """One that goes on by itself from here."""
        other = copy(self)
        other.open, other.early = self.open.copy(), self.early.copy()
        return other

    def state(self) -> Hashable:
        """All there is to know."""
        waiting = tuple(sorted(self.open.items())), tuple(sorted(self.early.items()))
        return self.arrived, self.next_step, self.oldest, waiting


@dataclass(eq=False, repr=False)
class Execution:
    """One collective under way. Members arrive when they like; `on_done(member)` tells when each is through.

    A message leaves when its sender posts it; its send and its receive are done when it is there (and the
    receiver has posted the step).

    Attributes:
        network: on which messages are sent at present.
        schedule, hosts, group: what is sent, where, and over whose connections.
        on_done: called with each member as it is through.
        numbers: ids for its messages; None where they are numbered with all others.
        num_sent: messages sent so far.
        num_left: members that are not through.
    """

    network: Network
    schedule: Schedule
    hosts: Sequence[int]
    group: Hashable
    on_done: Callable[[int], None]
    numbers: range | None = field(default=None, init=False)
    num_sent: int = field(default=0, init=False)
    num_left: int = field(init=False)
    _unmatched: tuple[int, int] | None = field(default=None, init=False)
    _posts: dict[int, Posts] = field(default_factory=dict, init=False)
    _is_over: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.num_left = self.schedule.num_ranks
        self._members = [_Member() for _ in range(self.num_left)]
        self._gates = self.schedule.gates

    def arrive(self, member: int) -> None:
        """This member enters now."""
        self._members[member].arrived = True
        self._go_on(member)
        if self._unmatched is not None and member == 1:
            self._part_done(*self._unmatched)

    def cancel(self) -> None:
        """End it where it is: nothing more is sent, and nobody is told."""
        self._is_over = True
        self.network.end_connections(self.group)

    def copied(self, network: Network, shift_seconds: float) -> Self:
        """The same on another network, whose clock shows so much more, for what is in flight there as here."""
        other = copy(self)
        other.network = network
        other._members = [member.copied() for member in self._members]
        other._posts = {step: copy(posts) for step, posts in self._posts.items()}
        return other

    def state(self, now: float) -> Hashable:
        """What sets it apart from others of its schedule, messages in flight aside; times count from `now`."""
        return self._unmatched, tuple(member.state() for member in self._members)

    def _go_on(self, member: int) -> None:
        """Post whatever may be posted."""
        state = self._members[member]
        last = len(self._gates)
        while state.next_step < last and state.oldest >= self._gates[state.next_step]:
            step = state.next_step
            posts = self._posts_of(step)
            state.next_step += 1
            state.open[step] = len(posts.sends.get(member, ())) + len(posts.receives.get(member, ()))
            state.open[step] -= state.early.pop(step, 0)
            self._post(member, step, posts)
            self._settle(state, step)
        if state.oldest == last:
            state.oldest += 1  # told once
            self.num_left -= 1
            self.on_done(member)

    def _posts_of(self, step: int) -> Posts:
        posts = self._posts.get(step)
        if posts is None:
            posts = self._posts[step] = Posts(self.schedule, step)
        posts.num_awaited -= 1
        if not posts.num_awaited:
            del self._posts[step]
        return posts

    def _post(self, member: int, step: int, posts: Posts) -> None:
        """Start what this member does in this step."""
        for dst, num_bytes in posts.sends_of(member):
            self._send(member, dst, num_bytes, partial(self._delivered, step, member, dst))

    def _settle(self, state: _Member, step: int) -> None:
        """If a step is done, see how far the row of done steps reaches."""
        if not state.open[step]:
            while state.oldest < state.next_step and not state.open.get(state.oldest, 1):
                del state.open[state.oldest]
                state.oldest += 1

    def _send(
        self,
        src: int,
        dst: int,
        num_bytes: int,
        on_delivered: Callable[[], None],
        on_sent: Callable[[], None] | None = None,
    ) -> None:
        if self._is_over:
            return
        hosts = self.hosts
        number = None if self.numbers is None else self.numbers[self.num_sent]
        self.num_sent += 1
        self.network.send(
            hosts[src],
            hosts[dst],
            num_bytes,
            on_delivered,
            connection=self.group,
            on_sent=on_sent,
            number=number,
        )

    # -- what the network tells --------------------------------------------------------------------------------

    def _delivered(self, step: int, src: int, dst: int) -> None:
        """A message is there: both ends have one thing less to wait for."""
        self._received(step, dst)
        if self.schedule.op == "sendrecv" and not self._members[dst].arrived:
            self._unmatched = (step, src)  # a send completes with its receive, and that is not posted yet
        else:
            self._part_done(step, src)

    def _received(self, step: int, dst: int) -> None:
        state = self._members[dst]
        if step < state.next_step:
            self._part_done(step, dst)
        else:
            state.early[step] = state.early.get(step, 0) + 1

    def _part_done(self, step: int, member: int) -> None:
        """One send or receive of a posted step is done."""
        state = self._members[member]
        state.open[step] -= 1
        if not state.open[step]:
            self._settle(state, step)
            self._go_on(member)
