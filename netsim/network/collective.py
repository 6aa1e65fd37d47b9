"""Collectives as owners of transfers: every member walks through the steps of a schedule by itself.

A member posts step i when its step i - window is done. A message leaves when its sender posts it; its receive is done
when it is delivered and the receiver has posted the step. Its send is done when the socket's buffer has taken its
bytes, or, without sockets (`ideal`), when it is delivered. The send of a single message is done with its receive.

**As gloo does it**, data leave only when the receiver's note has come: both sides write a note as they post, and
notes and data of one connection leave in order, so a note may wait behind data. gloo's threads wake some tenths of a
millisecond apart, and post one send and receive after the other.

**Two threads of a member.** One reads from the sockets: where the receiver's note follows data on a connection, it
reads the note as well and writes what that asks for, before the thread that waits for the data has woken (and reduced
them) and posts its next receive. So between two members that send to each other, as in a ring of two, a note stands
behind a whole segment, and no segment leaves before the other's has arrived: each of them costs the latency.

**Through a store** an upload is done when its answer has come, and a download leaves when it was requested and the
copy is there. Each object has connections of its own, so that a rank's downloads are under way together.

Compiled by mypyc where a C compiler is there; see `netsim.network.build`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Final, final

from netsim.network.connections import Connection, Owner, Transfer
from netsim.network.engine import Engine, Timer

# Posting one send and one receive (locks and system calls) before the next pair.
POST_SECONDS: Final = 1e-4
# gloo's own threads wake 0.1 to 0.5 ms apart. It matters in a LAN, where a late rank's notes wait behind the data
# that the early ones already asked it for.
WAKE_SECONDS: Final = 1e-4
WAKES_APART: Final = 8

# Kinds of messages.
DATA: Final = 0
READY: Final = 1  # a receiver's note
NOTE: Final = 2  # a sender's, for which nobody waits

RECEIVED: Final = -1  # a thread's next pair: none, it has received


@final
class StepTransfer(Transfer):
    """Transfer of a collective, from one member to another in one of its steps."""

    def __init__(
        self, connection: Connection, size: float, owner: Owner, step: OpenStep, src: int, dst: int, kind: int
    ) -> None:
        super().__init__(connection, size, owner)
        self.step = step
        self.src = src
        self.dst = dst
        self.kind = kind


@final
class Arrangement:
    """Messages of a step by member.

    Args:
        num_members: members of the group.
        src, dst: sender and receiver of each message; each sender's in the order of posting.

    Attributes:
        place: by message, its send; empty where they are in the same order.
        first: by member, the index of its first send; one more entry at the end.
        targets: by send.
        first_receive, sources: the same of its receives, in the order in which gloo posts them.
    """

    def __init__(self, num_members: int, src: list[int], dst: list[int]) -> None:
        self.src = src
        self.dst = dst
        sends = [0] * (num_members + 1)
        receives = [0] * (num_members + 1)
        for i in range(len(src)):
            sends[src[i] + 1] += 1
            receives[dst[i] + 1] += 1
        for member in range(num_members):
            sends[member + 1] += sends[member]
            receives[member + 1] += receives[member]
        self.first = sends
        self.first_receive = receives
        self.targets = [0] * len(src)
        self.sources = [0] * len(src)
        self.place = [0] * len(src)
        is_in_order = True
        # A member receives in the order of the positions that its messages have among their senders' own.
        following = sends[:]
        by_position: list[list[int]] = []
        for i in range(len(src)):
            at = following[src[i]]
            following[src[i]] = at + 1
            self.targets[at] = dst[i]
            self.place[i] = at
            is_in_order = is_in_order and at == i
            position = at - sends[src[i]]
            if position == len(by_position):
                by_position.append([])
            by_position[position].append(i)
        if is_in_order:
            self.place = []
        following = receives[:]
        for messages in by_position:
            for i in messages:
                self.sources[following[dst[i]]] = src[i]
                following[dst[i]] += 1


@final
class StepMessages:
    """Messages of one step, for all collectives that follow the schedule.

    Most steps send as the one before does. Members are in hundreds of steps at once, whose lists share what is equal:
    those of each step alone would not stay in the processor's cache.

    Args:
        num_members: members of the group.
        src, dst, sizes: sender, receiver and bytes of each message; each sender's in the order of posting.
        before: messages of the step before.

    Attributes:
        arrangement: by member.
        first, targets, first_receive, sources: of the arrangement.
        sizes: by send.
    """

    def __init__(
        self,
        num_members: int,
        src: list[int],
        dst: list[int],
        sizes: list[float],
        before: StepMessages | None = None,
    ) -> None:
        arranged: Arrangement | None = None if before is None else before.arrangement
        if arranged is None or arranged.src != src or arranged.dst != dst:
            arranged = Arrangement(num_members, src, dst)
        self.arrangement: Arrangement = arranged
        self.first = arranged.first
        self.targets = arranged.targets
        self.first_receive = arranged.first_receive
        self.sources = arranged.sources
        self.given = self.sizes = sizes
        if arranged.place:
            self.sizes = sizes[:]
            for i in range(len(sizes)):
                self.sizes[arranged.place[i]] = sizes[i]

    def are(self, src: list[int], dst: list[int], sizes: list[float]) -> bool:
        """Return whether these are the messages."""
        return self.given == sizes and self.arrangement.src == src and self.arrangement.dst == dst

    def num_parts(self, member: int) -> int:
        """Sends and receives of a member."""
        sends = self.first[member + 1] - self.first[member]
        return sends + self.first_receive[member + 1] - self.first_receive[member]


@final
class StepSequence:
    """A schedule as a collective walks through it.

    Args:
        num_members: members of the group.
        gates: by step, how many steps a member must have done before it posts that one.
        make: messages of a step, made when it is first asked for.
        is_kept: the messages are kept for the next collective that follows the schedule.
        is_message: a single message, whose send is done with its receive.
        sends_first: gloo posts the send of a pair before its receive.
        num_channels: channels of NCCL that take turns, each with a connection of its own; 0: not by channels.
    """

    def __init__(
        self,
        num_members: int,
        gates: list[int],
        make: Callable[[int], StepMessages],
        is_kept: bool,
        is_message: bool,
        sends_first: bool,
        num_channels: int,
    ) -> None:
        self.num_members = num_members
        self.gates = gates
        self.is_message = is_message
        self.sends_first = sends_first
        self.num_channels = num_channels
        self._make = make
        self._kept: list[StepMessages | None] = [None] * len(gates) if is_kept else []

    def step(self, index: int) -> StepMessages:
        if not self._kept:
            return self._make(index)
        messages = self._kept[index]
        if messages is None:
            messages = self._kept[index] = self._make(index)
        return messages


@final
class OpenStep:
    """A step of one collective in progress.

    Attributes:
        index: of the step.
        num_open: by member, its sends and receives that are not done; negative before it has posted the step.
        num_members: members that have not finished it.
        halves: of each rendezvous (source x members + target), whether half of it has happened.
    """

    def __init__(self, index: int, messages: StepMessages, num_members: int) -> None:
        self.index = index
        self.messages = messages
        self.num_open = [0] * num_members
        self.num_members = num_members
        self.halves: dict[int, int] = {}


class Collective(Owner):
    """A collective in flight. Members enter at any time; `on_done(member)` is called when each finishes.

    It owns its transfers: the engine calls `delivered`, `sent` and `dropped` with a transfer as it proceeds.

    Args:
        engine: network on which messages are sent.
        sequence: what is sent.
        hosts: host of each member; members may share one.
        group: name of the connections that it uses; collectives of one group share them and their state.
        on_done: called with a member's position at the instant it finishes, which may be within `arrive`.

    Attributes:
        is_cancelled: nothing more is sent.
        has_arrived: by member, True once it has entered.
    """

    def __init__(
        self,
        engine: Engine,
        sequence: StepSequence,
        hosts: list[int],
        group: Hashable,
        on_done: Callable[[int], None],
    ) -> None:
        self.engine = engine
        self.sequence = sequence
        self.hosts = hosts
        self.group = group
        self.on_done = on_done
        self.is_cancelled = False
        self.has_arrived = [False] * sequence.num_members
        self._gates = sequence.gates
        self._num_posted = [0] * sequence.num_members
        self._num_done = [0] * sequence.num_members  # in a row
        self._open: dict[int, OpenStep] = {}
        self._waits_for_receive = False  # the send of a single message, which is delivered
        tcp = engine.connections.tcp
        self._buffers_sends = tcp is not None and tcp.buffers_sends and not sequence.is_message

    def arrive(self, member: int) -> None:
        """A member enters now."""
        self.has_arrived[member] = True
        self._enter(member)
        if self._waits_for_receive and member == 1:
            self._part_done(self._step(0), 0)

    def cancel(self) -> None:
        """Abort: nothing more is sent, and no further member finishes.

        Others of its group in flight lose what they have sent, too: cancel them as well.
        """
        if not self.is_cancelled:
            self.is_cancelled = True
            self.engine.end_connections(self.group)

    def delivered(self, transfer: Transfer) -> None:
        """The receiver has one part less to wait for; then so has the sender, unless a buffer has taken the bytes."""
        if self.is_cancelled:
            return
        assert isinstance(transfer, StepTransfer)
        step = transfer.step
        self._part_done(step, transfer.dst)
        if self.sequence.is_message and not self.has_arrived[transfer.dst]:
            self._waits_for_receive = True  # a send is done with its receive, and that is not posted yet
        elif not self._buffers_sends:
            self._part_done(step, transfer.src)

    def sent(self, transfer: Transfer) -> None:
        """A socket's buffer has taken the bytes."""
        if not self.is_cancelled:
            assert isinstance(transfer, StepTransfer)
            self._part_done(transfer.step, transfer.src)

    def _enter(self, member: int) -> None:
        self._go_on(member)

    def _go_on(self, member: int) -> None:
        """Post every step that may be posted."""
        gates = self._gates
        num_steps = len(gates)
        posted = self._num_posted[member]
        while posted < num_steps and self._num_done[member] >= gates[posted]:
            step = self._step(posted)
            self._num_posted[member] = posted + 1
            step.num_open[member] += step.messages.num_parts(member)
            self._post(member, step)
            self._count_done(member)
            posted = self._num_posted[member]
        if self._num_done[member] == num_steps:
            self._num_done[member] = num_steps + 1  # once
            if not self.is_cancelled:
                self.engine.call_out()
                self.on_done(member)

    def _step(self, index: int) -> OpenStep:
        step = self._open.get(index)
        if step is None:
            step = self._open[index] = OpenStep(index, self.sequence.step(index), self.sequence.num_members)
        return step

    def _count_done(self, member: int) -> None:
        """Count the steps that are done without a gap."""
        done = self._num_done[member]
        posted = self._num_posted[member]
        while done < posted:
            step = self._open[done]
            if step.num_open[member] != 0:
                break
            step.num_members -= 1
            if step.num_members == 0:
                del self._open[done]
            done += 1
        self._num_done[member] = done

    def _part_done(self, step: OpenStep, member: int) -> None:
        """Count a finished send or receive of a step."""
        num_open = step.num_open[member] - 1
        step.num_open[member] = num_open
        if num_open == 0 and self._num_posted[member] > step.index:
            self._count_done(member)
            self._go_on(member)

    def _post(self, member: int, step: OpenStep) -> None:
        """Start the sends of a member in a step."""
        messages = step.messages
        for send in range(messages.first[member], messages.first[member + 1]):
            self._send(member, messages.targets[send], messages.sizes[send], step, DATA, self._buffers_sends)

    def _lane(self, src: int, dst: int, step: OpenStep) -> int:
        """Number of the connection between their hosts that two members use (see `Connection`): one for a group."""
        num_channels = self.sequence.num_channels
        return (
            -1 - step.index % num_channels
            if num_channels > 0 and self.engine.connections.num_channels > 0
            else 0
        )

    def _send(self, src: int, dst: int, size: float, step: OpenStep, kind: int, tells_sent: bool) -> None:
        if self.is_cancelled:
            return
        engine = self.engine
        lane = self._lane(src, dst, step)
        connection = engine.connect(self.group, self.hosts[src], self.hosts[dst], False, lane)
        engine.send(StepTransfer(connection, size, self, step, src, dst, kind), tells_sent)


class RendezvousCollective(Collective):
    """A collective with data that leave when the receiver has asked for them, and the sender has them."""

    def _offer(self, step: OpenStep, src: int, send: int) -> None:
        """The sender has the data: they leave where the receiver has asked for them already."""
        dst = step.messages.targets[send]
        rendezvous = src * self.sequence.num_members + dst
        if rendezvous in step.halves:
            del step.halves[rendezvous]
            self._send(src, dst, step.messages.sizes[send], step, DATA, True)
        else:
            step.halves[rendezvous] = send

    def _meet(self, step: OpenStep, src: int, dst: int) -> None:
        """The receiver has asked: data leave when the sender has them as well."""
        rendezvous = src * self.sequence.num_members + dst
        send = step.halves.get(rendezvous, -1)
        if send >= 0:
            del step.halves[rendezvous]
            self._send(src, dst, step.messages.sizes[send], step, DATA, True)
        else:
            step.halves[rendezvous] = -1


@final
class StoreExchange(RendezvousCollective):
    """Ranks that upload to a store, and download from it or its relays; its copies are members that have arrived.

    Args:
        engine, sequence, hosts, group, on_done: as of `Collective`.
        num_ranks: members before the copies.
        delays: by member, seconds in which its host answers a request.
    """

    def __init__(
        self,
        engine: Engine,
        sequence: StepSequence,
        hosts: list[int],
        group: Hashable,
        on_done: Callable[[int], None],
        num_ranks: int,
        delays: list[float],
    ) -> None:
        super().__init__(engine, sequence, hosts, group, on_done)
        self.num_ranks = num_ranks
        self.delays = delays

    def _lane(self, src: int, dst: int, step: OpenStep) -> int:
        return src * self.sequence.num_members + dst

    def _post(self, member: int, step: OpenStep) -> None:
        """Request a rank's downloads, and send uploads and copies; downloads wait for their request."""
        messages = step.messages
        if member < self.num_ranks:
            for receive in range(messages.first_receive[member], messages.first_receive[member + 1]):
                self._send(member, messages.sources[receive], 0.0, step, READY, False)
        for send in range(messages.first[member], messages.first[member + 1]):
            dst = messages.targets[send]
            if dst < self.num_ranks:
                self._offer(step, member, send)
            else:
                self._send(member, dst, messages.sizes[send], step, DATA, False)

    def delivered(self, transfer: Transfer) -> None:
        if self.is_cancelled:
            return
        assert isinstance(transfer, StepTransfer)
        if transfer.dst < self.num_ranks:  # a download, or the answer to an upload
            self._part_done(transfer.step, transfer.dst)
        else:
            self.engine.set_timer(StoreRequest(self, transfer), self.delays[transfer.dst])

    def answer(self, request: StepTransfer) -> None:
        """A store has worked at a request, or has a copy."""
        if self.is_cancelled:
            return
        step, src, dst = request.step, request.src, request.dst
        if request.kind == READY:
            self._meet(step, dst, src)
            return
        self._part_done(step, dst)
        if src < self.num_ranks:
            self._send(dst, src, 0.0, step, NOTE, False)
        else:
            self._part_done(step, src)


@final
class StoreRequest(Timer):
    """A request, or data, that a store works at."""

    def __init__(self, exchange: StoreExchange, request: StepTransfer) -> None:
        super().__init__(-1)
        self.exchange = exchange
        self.request = request

    def ring(self) -> None:
        self.exchange.answer(self.request)


@final
class GlooCollective(RendezvousCollective):
    """A collective whose every message is a rendezvous, and in which every pair of members has a connection."""

    def __init__(
        self,
        engine: Engine,
        sequence: StepSequence,
        hosts: list[int],
        group: Hashable,
        on_done: Callable[[int], None],
    ) -> None:
        super().__init__(engine, sequence, hosts, group, on_done)
        self._shares_hosts = len(set(hosts)) < len(hosts)

    def _lane(self, src: int, dst: int, step: OpenStep) -> int:
        return src * self.sequence.num_members + dst if self._shares_hosts else 0

    def _enter(self, member: int) -> None:
        """gloo's thread wakes a little later; single messages have none."""
        wakes = 0 if self.sequence.is_message else member % WAKES_APART
        if wakes:
            self.engine.set_timer(Thread(self, member, None, 0), wakes * WAKE_SECONDS)
        else:
            self._go_on(member)

    def wake(self, member: int, step: OpenStep | None, number: int) -> None:
        """A member's thread posts a pair of a step, or has received in it, or, without a step, enters."""
        if self.is_cancelled:
            return
        if step is None:
            self._go_on(member)
            return
        if number == RECEIVED:
            self._part_done(step, member)
            return
        self._post_pair(member, step, number)
        if step.num_open[member] == 0:
            self._count_done(member)
            self._go_on(member)

    def delivered(self, transfer: Transfer) -> None:
        if self.is_cancelled:
            return
        assert isinstance(transfer, StepTransfer)
        if transfer.kind == DATA:  # notes that have arrived with it are read before the waiting thread wakes
            self.engine.set_timer(Thread(self, transfer.dst, transfer.step, RECEIVED), 0.0)
        elif transfer.kind == READY:  # from the receiver, at the sender
            self._meet(transfer.step, transfer.dst, transfer.src)

    def _post(self, member: int, step: OpenStep) -> None:
        """Write the notes of a step, pair by pair."""
        messages = step.messages
        sends = messages.first[member + 1] - messages.first[member]
        receives = messages.first_receive[member + 1] - messages.first_receive[member]
        for number in range(max(sends, receives)):
            if number:
                self.engine.set_timer(Thread(self, member, step, number), number * POST_SECONDS)
            else:
                self._post_pair(member, step, 0)

    def _post_pair(self, member: int, step: OpenStep, number: int) -> None:
        """Post one receive and one send; where both have the same peer, the first one's bytes go before the other's."""
        if self.sequence.sends_first:
            self._post_send(member, step, number)
        messages = step.messages
        receive = messages.first_receive[member] + number
        if receive < messages.first_receive[member + 1]:
            self._send(member, messages.sources[receive], 0.0, step, READY, False)
        if not self.sequence.sends_first:
            self._post_send(member, step, number)

    def _post_send(self, member: int, step: OpenStep, number: int) -> None:
        """Write the note of a send, and its data where the receiver's note has come already."""
        messages = step.messages
        send = messages.first[member] + number
        if send < messages.first[member + 1]:
            self._send(member, messages.targets[send], 0.0, step, NOTE, False)
            self._offer(step, member, send)


@final
class Thread(Timer):
    """gloo's thread of a member that goes on at an instant: enters, posts pair `number` of a step, or has received."""

    def __init__(self, collective: GlooCollective, member: int, step: OpenStep | None, number: int) -> None:
        super().__init__(-1)
        self.collective = collective
        self.member = member
        self.step = step
        self.pair = number

    def ring(self) -> None:
        self.collective.wake(self.member, self.step, self.pair)
