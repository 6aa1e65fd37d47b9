"""Carries out a schedule as gloo does, where every message is a rendezvous.

Both sides write a note as they post; data leave only when the receiver's note has come. Notes and data of
one connection leave in order, so a note may have to wait behind data. A send is done when the socket buffer
has taken its bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Self

from netsim.collectives.times.events import Execution, described, rebound
from netsim.fluid.clock import call_at, to_nanosecond

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from netsim.collectives.times.events import Posts
    from netsim.fluid.network import Network

__all__ = ["RendezvousExecution"]

# Posting one send and one receive (locks and system calls) before the next pair can follow.
POST_SECONDS = 1e-4

# No two ranks begin at the same instant: gloo's own threads wake 0.1 to 0.5 ms apart. It matters in a LAN, where
# a late rank's notes queue behind the data that the early ones already asked it for.
WAKE_SECONDS = 1e-4
WAKES_APART = 8


@dataclass(eq=False, repr=False)
class RendezvousExecution(Execution):
    """An execution in which data wait for the receiver's note."""

    # Half of each rendezvous that has happened: the send is posted (its bytes), or the note has come (None).
    _half: dict[tuple[int, int, int], int | None] = field(default_factory=dict, init=False)
    _planned: dict[Callable[[], None], float] = field(
        default_factory=dict, init=False
    )  # to be called -> when

    def arrive(self, member: int) -> None:
        """This member enters now; gloo's thread wakes a little later (messages have none)."""
        seconds = member % WAKES_APART * WAKE_SECONDS
        if seconds and self.schedule.op != "sendrecv":
            self._later(seconds, partial(super().arrive, member))
        else:
            super().arrive(member)

    def copied(self, network: Network, shift_seconds: float) -> Self:
        """The same on another network, whose clock shows so much more, for what is in flight there as here."""
        other = super().copied(network, shift_seconds)
        other._half = self._half.copy()
        other._planned = {}
        for call, instant in self._planned.items():
            other._plan(instant + shift_seconds, rebound(call, {self: other}))
        return other

    def state(self, now: float) -> Hashable:
        """What sets it apart from others of its schedule, messages in flight aside; times count from `now`."""
        planned = tuple(
            (*described(call)[1:], to_nanosecond(instant - now)) for call, instant in self._planned.items()
        )
        return super().state(now), planned, frozenset(self._half.items())

    def _later(self, seconds: float, call: Callable[[], None]) -> None:
        self._plan(self.network.env.now + seconds, call)

    def _plan(self, instant: float, call: Callable[[], None]) -> None:
        def happen() -> None:
            del self._planned[call]
            call()

        self._planned[call] = instant
        call_at(self.network.env, instant, happen)

    def _post(self, member: int, step: int, posts: Posts) -> None:
        """Write the notes of this step, pair by pair, as gloo posts them."""
        sends = posts.sends_of(member)
        receives = [src for src, _ in sorted(posts.receives.get(member, ()), key=lambda post: post[1])]
        for number in range(max(len(sends), len(receives))):
            send = sends[number] if number < len(sends) else None
            receive = receives[number] if number < len(receives) else None
            if number:
                pair = partial(self._post_pair_later, member, step, send, receive)
                self._later(number * POST_SECONDS, pair)
            else:
                self._post_pair(member, step, send, receive)

    def _post_pair_later(
        self, member: int, step: int, send: tuple[int, int] | None, receive: int | None
    ) -> None:
        self._post_pair(member, step, send, receive)
        state = self._members[member]
        if not state.open[step]:
            self._settle(state, step)
            self._go_on(member)

    def _post_pair(self, member: int, step: int, send: tuple[int, int] | None, receive: int | None) -> None:
        """Write the notes of one send and one receive."""
        if receive is not None:
            self._send(member, receive, 0, partial(self._noted, step, receive, member))
        if send is not None:
            dst, num_bytes = send
            self._send(member, dst, 0, partial(self._nobody_waits))
            if (step, member, dst) not in self._half:
                self._half[step, member, dst] = num_bytes
            else:
                del self._half[step, member, dst]
                self._send_data(step, member, dst, num_bytes)

    def _nobody_waits(self) -> None:
        """The note that a send is ready is there."""

    def _noted(self, step: int, src: int, dst: int) -> None:
        """The note that `dst` is ready has reached `src`."""
        if (step, src, dst) not in self._half:
            self._half[step, src, dst] = None
            return
        num_bytes = self._half.pop((step, src, dst))
        assert num_bytes is not None
        self._send_data(step, src, dst, num_bytes)

    def _send_data(self, step: int, src: int, dst: int, num_bytes: int) -> None:
        """Let the data leave; the send is done when the socket buffer has taken all of them."""
        received, sent = partial(self._received, step, dst), partial(self._part_done, step, src)
        self._send(src, dst, num_bytes, received, sent)
