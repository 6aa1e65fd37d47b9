"""Plays a schedule message by message on a network: the reference for every faster way."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from netsim.collectives.schedules import Schedule
    from netsim.network import Network

__all__ = ["Execution"]


class _Posts:
    """What each member posts in one step: its sends (target, bytes) in order, and from whom it receives."""

    __slots__ = ("num_awaited", "receives", "sends")

    def __init__(self, schedule: Schedule, phase: int, index: int) -> None:
        self.sends: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        self.receives: defaultdict[int, list[int]] = defaultdict(list)
        self.num_awaited = schedule.num_ranks  # members that have not posted this step yet
        step = schedule.phases[phase].step(index)
        rows = zip(step.src.tolist(), step.dst.tolist(), step.num_bytes.tolist(), strict=True)
        for src, dst, num_bytes in rows:
            self.sends[src].append((dst, num_bytes))
            self.receives[dst].append(src)


class _Member:
    """How far one member has come: its next step to post, its oldest step that is not done."""

    __slots__ = ("arrived", "early", "next_step", "oldest", "open")

    def __init__(self) -> None:
        self.arrived = False
        self.next_step = 0
        self.oldest = 0
        self.open: dict[int, int] = {}  # posted step -> sends and receives of it that are not done
        self.early: dict[int, int] = {}  # step not posted yet -> messages of it that are there already


class Execution:
    """One collective under way. Members arrive when they like; `on_done(member)` tells when each is through.

    A message leaves when its sender posts it, or, where the protocol asks for a rendezvous, when also the
    receiver's note has come, which the receiver writes as it posts. A send is done when its bytes are
    delivered; under a rendezvous when they have left, since there a socket buffer takes them.
    """

    def __init__(
        self,
        network: Network,
        schedule: Schedule,
        hosts: Sequence[int],
        group: Hashable,
        on_done: Callable[[int], None],
    ) -> None:
        self.network = network
        self._schedule = schedule
        self._hosts = hosts
        self._group = group
        self._on_done = on_done
        self._members = [_Member() for _ in range(schedule.num_ranks)]
        self._rendezvous = network.protocol.rendezvous
        self._unmatched: Callable[[], None] | None = None
        self._posts: dict[int, _Posts] = {}
        # Of messages that need a rendezvous, the half that has happened: the note has come, or the send is posted.
        self._ready: dict[tuple[int, int, int], int | None] = {}
        self._place: list[tuple[int, int]] = []  # step -> its phase and number there
        self._gate: list[int] = []  # step -> the step that must be reached by `oldest` before it is posted
        for number, phase in enumerate(schedule.phases):
            first = len(self._place)
            for index in range(phase.num_steps):
                self._place.append((number, index))
                self._gate.append(max(first, first + index - phase.window + 1))

    def arrive(self, member: int) -> None:
        """This member enters now."""
        self._members[member].arrived = True
        self._go_on(member)
        if self._unmatched is not None:
            self._unmatched()
            self._unmatched = None

    def _go_on(self, member: int) -> None:
        """Post whatever may be posted."""
        state = self._members[member]
        last = len(self._gate)
        while state.next_step < last and state.oldest >= self._gate[state.next_step]:
            self._post(member, state, state.next_step)
        if state.oldest == last:
            state.oldest += 1  # told once
            self._on_done(member)

    def _post(self, member: int, state: _Member, step: int) -> None:
        posts = self._posts.get(step)
        if posts is None:
            posts = self._posts[step] = _Posts(self._schedule, *self._place[step])
        posts.num_awaited -= 1
        if not posts.num_awaited:
            del self._posts[step]
        sends, receives = posts.sends.get(member, ()), posts.receives.get(member, ())
        state.next_step += 1
        state.open[step] = len(sends) + len(receives) - state.early.pop(step, 0)
        if self._rendezvous:
            for src in receives:
                self._network_send(member, src, 0, partial(self._noted, step, src, member))
        for dst, num_bytes in sends:
            if not self._rendezvous:
                self._network_send(member, dst, num_bytes, partial(self._delivered, step, member, dst))
            elif self._ready.pop((step, member, dst), None) is None:
                self._ready[step, member, dst] = num_bytes
            else:
                self._send_after_note(step, member, dst, num_bytes)
        self._settle(state, step)

    def _settle(self, state: _Member, step: int) -> None:
        """Note it if a step is done, and how far the row of done steps reaches."""
        if not state.open[step]:
            while state.oldest < state.next_step and not state.open.get(state.oldest, 1):
                del state.open[state.oldest]
                state.oldest += 1

    def _network_send(self, src: int, dst: int, num_bytes: int, on_delivered: Callable[[], None]) -> None:
        hosts = self._hosts
        self.network.send(hosts[src], hosts[dst], num_bytes, on_delivered, connection=self._group)

    # -- what the network tells -----------------------------------------------------------------------------------

    def _noted(self, step: int, src: int, dst: int) -> None:
        """The note that `dst` is ready has reached `src`."""
        num_bytes = self._ready.pop((step, src, dst), None)
        if num_bytes is None:
            self._ready[step, src, dst] = -1
        else:
            self._send_after_note(step, src, dst, num_bytes)

    def _send_after_note(self, step: int, src: int, dst: int, num_bytes: int) -> None:
        self.network.send(
            self._hosts[src],
            self._hosts[dst],
            num_bytes,
            partial(self._received, step, dst),
            connection=self._group,
            on_sent=partial(self._part_done, step, src),
        )

    def _delivered(self, step: int, src: int, dst: int) -> None:
        """A message without rendezvous is there: both ends have one thing less to wait for."""
        if self._schedule.op == "sendrecv" and not self._members[dst].arrived:
            # A send completes with its receive: once the receiver arrives, and not before.
            self._members[dst].early[step] = 1
            self._unmatched = partial(self._part_done, step, src)
            return
        self._received(step, dst)
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
