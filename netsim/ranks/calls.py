"""Calls in flight: the posts of their members, in order, and when each member has finished, and mailboxes."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import islice
from typing import TYPE_CHECKING

from netsim.collectives.operations import OPERATIONS, Side
from netsim.network.clock import Clock, Order, call_at, on_grid
from netsim.network.trace import Span
from netsim.ranks.requests import Call, CallEnding, GroupPart, Key, MailboxMessage, MessageGroup, Post
from netsim.units import format_list

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    import simpy

    from netsim.ranks.kernel import RankSink
    from netsim.ranks.requests import Put, Take

__all__ = [
    "FROM_ROOT",
    "Calls",
    "Cancel",
    "Enter",
    "Mailboxes",
    "StartCall",
    "group_of",
    "needs_nobody",
    "start_at_once",
]

_MOST_NAMED = 16  # ranks in a line

#: Operations whose root has what all others get.
FROM_ROOT = tuple(name for name, each in OPERATIONS.items() if each.gives is Side.ROOT)

Enter = Callable[[int, Call], None]
Cancel = Callable[[], None]
StartCall = Callable[[Call, Hashable, Callable[[int], None]], tuple[Enter, Cancel]]


@dataclass(slots=True, eq=False)
class _InFlight:
    """A call that is not over for all members: the instants at which members finish, and their waiting processes."""

    call: Call
    num_bytes: int  # of all members that have posted, where each knows its own part
    num_ranks: int  # a message to oneself has two members and one rank
    enter: Enter
    cancel: Cancel
    done_at: dict[int, float] = field(default_factory=dict)  # rank -> grid instant
    posted_at: dict[int, float] = field(default_factory=dict)  # rank -> instant, where spans are made
    last_posted_at: float = 0.0
    sleepers: dict[int, simpy.Event] = field(default_factory=dict)
    is_off: bool = False  # ended undone
    members: list[int] = field(default_factory=list)  # ranks that have posted, in order
    alarms: dict[int, tuple[float, simpy.Event]] = field(default_factory=dict)  # rank -> when its time is up
    late: set[int] = field(default_factory=set)  # ranks whose time was up

    def is_given(self, rank: int) -> bool:
        """True if the others need nothing more of this rank: the call is over for it, or only sends for it."""
        call, member = self.call, self.call.ranks.index(rank)
        if OPERATIONS[call.op].is_message:
            sends_on = len(self.members) == len(call.ranks)
        else:
            sends_on = member in self.members and needs_nobody(
                call.op, member == call.root, not call.num_bytes
            )
        return sends_on or rank in self.done_at

    def description(self) -> str:
        """Describe the call; after a colon its ranks, and those that have not come."""
        ranks, op = self.call.ranks, self.call.op
        missing = [rank for member, rank in enumerate(ranks) if member not in self.members]
        members = f"rank {ranks[0]} to rank {ranks[1]}" if OPERATIONS[op].is_message else _listed(ranks)
        come = (
            f"{_listed(missing)} {'has' if len(missing) == 1 else 'have'} not come"
            if missing
            else "all have come"
        )
        return f"in {op}: {members}; {come}"


def group_of(group: Hashable) -> Hashable:
    """Whole group of collectives (`group` itself), messages (a `MessageGroup`) or a `GroupPart` of this name."""
    while isinstance(group, MessageGroup | GroupPart):
        group = group.group
    return group


def needs_nobody(op: str, is_root: bool, is_empty: bool) -> bool:
    """True if a member has its value as soon as it has posted, without any other member's.

    Args:
        op: the operation.
        is_root: the member is the call's root.
        is_empty: the call has no elements.
    """
    operation = OPERATIONS.get(op)
    if operation is None:
        return False
    if is_empty and not operation.is_sent_empty:
        return True
    return operation.gives is Side.ROOT if is_root else operation.takes is Side.ROOT


def start_at_once(call: Call, group: Hashable, on_done: Callable[[int], None]) -> tuple[Enter, Cancel]:
    """Start communication that takes no time: a member finishes when the members that it needs have come."""
    arrived: list[int] = []
    waiting: list[int] = []

    def enter(member: int, posted: Call) -> None:
        arrived.append(member)
        waiting.append(member)
        if len(arrived) == len(call.ranks) or (call.op in FROM_ROOT and call.root in arrived):
            through = sorted(waiting)
        elif needs_nobody(call.op, member == call.root, not call.num_bytes):
            through = [member]
        else:
            return
        for each in through:
            waiting.remove(each)
            on_done(each)

    return enter, _nothing


def _nothing() -> None:
    """Withdraw a call of which no message is under way."""


def _ignore(member: int, call: Call) -> None:
    """Ignore a member of a call that has yet to start or is over."""


def _box_of(key: Key) -> Hashable:
    return key.group.box if isinstance(key.group, MessageGroup) else key.group


class Progress(Enum):
    """Changes of a rank that `on_progress` reports, with the call that they concern, the instant, and seconds.

    Attributes:
        UNDER_WAY: the last member has posted a call of the rank's: from now on it takes the network's time.
        OVER: the call is over for the rank.
        STOPS: the rank begins to wait, for a call or for something else (None), or has ended.
        GOES_ON: it continues; the seconds are those that it has waited for the network.
    """

    UNDER_WAY = auto()
    OVER = auto()
    STOPS = auto()
    GOES_ON = auto()


class _SentMessages:
    """Messages without a receive by box, in the order of their posts; and receives from any rank that wait for one."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._keys: dict[Hashable, OrderedDict[Key, None]] = {}
        self._wanted: dict[Hashable, simpy.Event] = {}

    def add(self, key: Key) -> None:
        """Note a message that was posted."""
        box = _box_of(key)
        self._keys.setdefault(box, OrderedDict())[key] = None
        if box in self._wanted:
            self._wanted.pop(box).succeed()

    def remove(self, key: Key) -> None:
        """Remove a message that is being received, or was withdrawn, from its queue."""
        box = _box_of(key)
        sent = self._keys.get(box, OrderedDict())
        sent.pop(key, None)
        if not sent:
            self._keys.pop(box, None)

    def first(self, box: Hashable) -> Generator[simpy.Event, None, Key]:
        """Key of the first message to a queue that is not being received; wait until there is one."""
        while box not in self._keys:
            self._wanted[box] = self._clock.event()
            yield self._wanted[box]
        return next(iter(self._keys[box]))


#: Called with rank, change, call, instant and seconds.
OnProgress = Callable[[int, Progress, Key | None, float, float], None]


class Calls:
    """Calls in flight: posted by a member, and not over for all of them.

    Args:
        clock: virtual time.
        start: starts a call on the network.
        collectives_in_flight: number of collectives of one group that a rank runs at once, in order.
        sink: gets spans of communication, groups whose calls have ended undone, and withdrawn messages.
        network_seconds: by rank; `wait` adds its seconds after the last member's post.

    Attributes:
        sent: messages that no rank receives yet.
        on_progress: called as calls begin and end; None: not called.
        ends_close: the end of a rank closes its connections, so that calls without a time-out end undone, too.
    """

    def __init__(
        self,
        clock: Clock,
        start: StartCall,
        collectives_in_flight: int,
        sink: RankSink,
        network_seconds: list[float],
    ) -> None:
        self._sink, self._network_seconds = sink, network_seconds
        self._clock, self._start_call = clock, start
        self._width = collectives_in_flight
        self._in_flight: dict[Key, _InFlight] = {}
        # (group, rank) -> that rank's unfinished collectives of the group, oldest first.
        self._queues: dict[tuple[Hashable, int], dict[_InFlight, Post]] = {}
        self._asleep: dict[int, _InFlight] = {}
        self.sent = _SentMessages(clock)
        self._dissolved: set[Hashable] = set()
        self._broken: set[Hashable] = set()
        self._undone: dict[Key, _InFlight | None] = {}  # calls of broken groups; None: it never began
        self._gone: set[int] = set()  # ranks that have ended
        self.on_progress: OnProgress | None = None
        self.ends_close = False

    def post(self, rank: int, post: Post) -> None:
        """Post a call for a rank, behind its earlier collectives of the same group."""
        if self._dissolved and group_of(post.key.group) in self._dissolved:
            return
        if self._broken and group_of(post.key.group) in self._broken:
            self._undone.setdefault(post.key)
        if self._undone and post.key in self._undone:
            return
        operation = OPERATIONS[post.call.op]
        flight = self._in_flight.get(post.key)
        if flight is None:
            flight = self._start(post.key, post.call)
        elif operation.is_per_pair:
            flight.num_bytes += post.call.num_bytes
        flight.members.append(post.member)
        flight.last_posted_at = self._clock.now
        if self.on_progress is not None and len(flight.members) == len(flight.call.ranks):
            for each in dict.fromkeys(flight.call.ranks):
                if each not in flight.done_at:
                    self.on_progress(each, Progress.UNDER_WAY, post.key, self._clock.now, 0.0)
        if self._sink.on_span is not None:
            flight.posted_at[rank] = self._clock.now
        if post.seconds < math.inf:
            self._set_timeout(post.seconds, post.key, flight, rank)
        if self._gone and self._needs_ended(flight):
            self._break_call(post.key, flight)
            return
        if operation.is_message:  # messages do not queue behind collectives
            self._post_message(flight, post)
            return
        queue = self._queues.setdefault((post.key.group, rank), {})
        queue[flight] = post
        if len(queue) <= self._width:
            flight.enter(post.member, post.call)

    def _post_message(self, flight: _InFlight, post: Post) -> None:
        flight.enter(post.member, post.call)
        if post.member == 1:
            self.sent.remove(post.key)
        elif len(flight.members) == 1:
            self.sent.add(post.key)

    def withdraw(self, key: Key) -> bool:
        """Undo the only post of a message; False if both sides have posted, or it is over."""
        flight = self._in_flight.get(key)
        if flight is None or len(flight.members) != 1:
            return False
        flight.is_off = True
        flight.cancel()
        del self._in_flight[key]
        self.sent.remove(key)
        self._sink.withdrawn(key)
        return True

    def _start(self, key: Key, call: Call) -> _InFlight:
        num_ranks = len(set(call.ranks))
        start = self._start_call if num_ranks > 1 else start_at_once
        flight = _InFlight(call, call.num_bytes, num_ranks, _ignore, _nothing)
        flight.enter, flight.cancel = start(call, key.group, lambda member: self._done(key, flight, member))
        self._in_flight[key] = flight
        return flight

    def assemble(self, group: Hashable) -> None:
        """Let calls of this group begin."""
        self._dissolved.discard(group)

    def dissolve(self, group: Hashable) -> None:
        """Fail calls of this group from this instant on, also those that are posted later."""
        self._dissolved.add(group)
        for key, flight in self._take_off(group):
            self._end(key, flight)

    def _take_off(self, group: Hashable) -> list[tuple[Key, _InFlight]]:
        """Cancel the calls in flight of a group; returns them."""
        flights = [item for item in self._in_flight.items() if group_of(item[0].group) == group]
        for key, flight in flights:
            del self._in_flight[key]
            flight.is_off = True
            flight.cancel()
            for rank in flight.call.ranks:
                self._queues.pop((key.group, rank), None)
        return flights

    def _end(self, key: Key, flight: _InFlight) -> None:
        """End a cancelled call for the members that have not finished it, and wake those that wait."""
        self.sent.remove(key)
        if self.on_progress is not None:
            for rank in dict.fromkeys(flight.call.ranks):
                if rank not in flight.done_at:
                    self.on_progress(rank, Progress.OVER, key, self._clock.now, 0.0)
        for sleeper in flight.sleepers.values():
            sleeper.succeed()
        flight.sleepers.clear()

    # --- calls with a time-out ------------------------------------------------------------------------

    def _set_timeout(self, seconds: float, key: Key, flight: _InFlight, rank: int) -> None:
        """Break the group unless the call ends for this rank in time; replaces an earlier time-out."""

        def up() -> None:
            flight.late.add(rank)
            self._break(group_of(key.group))

        earlier = flight.alarms.pop(rank, None)
        if earlier is not None:
            self._clock.cancel(earlier[1])
        instant = self._clock.now + on_grid(seconds)
        flight.alarms[rank] = instant, call_at(self._clock, instant, up, Order.MEETINGS)

    @property
    def seconds_to_alarm(self) -> float:
        """Seconds until the first time-out of a call; infinity without one."""
        instants = (at for flight in self._in_flight.values() for at, _ in flight.alarms.values())
        return min(instants, default=math.inf) - self._clock.now

    def _break(self, group: Hashable) -> None:
        """Fail all calls in flight of a group at this instant: a member does not continue."""
        self._broken.add(group)
        flights = self._take_off(group)
        for key, flight in flights:
            self._set_undone(key, flight)
        self._sink.broken(group)
        for key, flight in flights:
            self._end(key, flight)

    def _break_call(self, key: Key, flight: _InFlight) -> None:
        """Fail one call at this instant, since a rank that has ended does not do its part. Bytes in flight arrive."""
        del self._in_flight[key]
        flight.is_off = True
        for rank in dict.fromkeys(flight.call.ranks):
            self._leave_queue(key, flight, rank)
        self._set_undone(key, flight)
        self._sink.undone(key)
        self._end(key, flight)

    def _set_undone(self, key: Key, flight: _InFlight) -> None:
        self._undone[key] = flight
        for rank, (instant, alarm) in flight.alarms.items():
            self._clock.cancel(alarm)
            if instant <= self._clock.now:  # report all whose time-out is at this instant
                flight.late.add(rank)
        flight.alarms.clear()

    def lose(self, group: Hashable) -> bool:
        """Break a group whose connection was given up, if a call of it has a time-out; else return False."""
        whole = group_of(group)
        if not any(flight.alarms for key, flight in self._in_flight.items() if group_of(key.group) == whole):
            return False
        self._break(whole)
        return True

    def gone(self, rank: int) -> None:
        """End undone the calls to which a rank that has ended has not given its part; see `_needs_ended`."""
        self._gone.add(rank)
        for key, flight in list(self._in_flight.items()):
            if self._needs_ended(flight):
                self._break_call(key, flight)

    def _needs_ended(self, flight: _InFlight) -> bool:
        """True if a call needs more of a rank that has ended.

        With a time-out that is more than its post; without, with `ends_close`, its post.
        """
        if not flight.alarms and (not self.ends_close or len(flight.members) == flight.num_ranks):
            return False
        ended = self._gone.intersection(flight.call.ranks)
        if flight.alarms:
            return not all(flight.is_given(rank) for rank in ended)
        return any(flight.call.ranks.index(rank) not in flight.members for rank in ended)

    def ending(self, rank: int, key: Key) -> CallEnding:
        """End of a call that the rank has waited for."""
        flight = self._undone.get(key)
        if key not in self._undone or (flight is not None and rank in flight.done_at):
            return CallEnding.DONE
        return CallEnding.LATE if flight is not None and rank in flight.late else CallEnding.CLOSED

    def _done(self, key: Key, flight: _InFlight, member: int) -> None:
        """Finish the call for this member at this instant: wake it, enter its next collective."""
        if flight.is_off:
            return
        rank = flight.call.ranks[member]
        flight.done_at[rank] = done_at = on_grid(self._clock.now)
        if self.on_progress is not None:
            self.on_progress(rank, Progress.OVER, key, done_at, 0.0)
        on_span = self._sink.on_span
        if on_span is not None:
            times = (flight.posted_at[rank], done_at)
            on_span(Span(rank, "communication", flight.call.op, *times, flight.num_bytes, key))
        if rank in flight.alarms:
            self._clock.cancel(flight.alarms.pop(rank)[1])
        sleeper = flight.sleepers.pop(rank, None)
        if sleeper is not None:
            self._clock.wake(sleeper, done_at)
        # The grid has no instant between now and `done_at`: a wait from here on ends at once.
        if len(flight.done_at) == flight.num_ranks:
            self._in_flight.pop(key, None)
            # These refer to the flight, too: a cycle that would be left to the garbage collector.
            flight.enter, flight.cancel = _ignore, _nothing
        if not OPERATIONS[flight.call.op].is_message:
            self._leave_queue(key, flight, rank)

    def _leave_queue(self, key: Key, flight: _InFlight, rank: int) -> None:
        """Take a collective that is over for the rank out of its queue, and enter the next that is due."""
        place = (key.group, rank)
        queue = self._queues.get(place, {})
        if len(queue) == 1 and flight in queue:  # nearly always
            del self._queues[place]
            return
        is_entered = flight in islice(queue, self._width)
        queue.pop(flight, None)
        if is_entered and len(queue) >= self._width:
            following, post = next(islice(queue.items(), self._width - 1, None))
            following.enter(post.member, post.call)
        elif is_entered and not queue:
            del self._queues[place]

    def wait(self, rank: int, key: Key, seconds: float = math.inf) -> Generator[simpy.Event, None, None]:
        """Wait until the call is over for this rank, or its group broken; after `seconds` it breaks."""
        flight, begin = self._in_flight.get(key), self._clock.now
        if flight is None:
            return
        if rank not in flight.done_at:
            if seconds < math.inf:
                self._set_timeout(seconds, key, flight, rank)
            self._asleep[rank] = flight
            sleeper = flight.sleepers[rank] = self._clock.event()
            yield sleeper
            del self._asleep[rank]
        elif flight.done_at[rank] > self._clock.now:
            yield self._clock.at(flight.done_at[rank])
        has_come = len(flight.members) == len(flight.call.ranks)
        if has_come or key not in self._undone:
            since = max(begin, flight.last_posted_at) if has_come else begin
            self._network_seconds[rank] += self._clock.now - since

    def network_seconds(self, rank: int, begin: float, instant: float) -> float:
        """Seconds since the last member's post, of a wait from `begin` that is not over at `instant`."""
        flight = self._asleep.get(rank)
        if flight is None or len(flight.members) < len(flight.call.ranks):
            return 0.0
        return max(instant - max(begin, flight.last_posted_at), 0.0)

    # --- state --------------------------------------------------------------------------------------------

    def op(self, key: Key) -> str:
        """Operation of an unfinished call; "" where it is over for all."""
        flight = self._in_flight.get(key)
        return flight.call.op if flight is not None else ""

    def is_done(self, rank: int, key: Key) -> bool:
        """Return whether the call is over for this rank."""
        flight = self._in_flight.get(key)
        return flight is None or flight.done_at.get(rank, math.inf) <= self._clock.now

    def waiting(self) -> dict[int, str]:
        """Ranks that wait for a call, with its operation and, after a colon, details."""
        return {rank: flight.description() for rank, flight in self._asleep.items()}

    def unfinished(self) -> dict[int, str]:
        """Ranks with an unfinished call, with its description."""
        posted = ((flight, rank) for flight in self._in_flight.values() for rank in flight.call.ranks)
        return {rank: flight.description() for flight, rank in posted if rank not in flight.done_at}

    def unfinished_spans(self) -> list[Span]:
        """Spans of unfinished communication, until now."""
        return [
            Span(rank, "communication", flight.call.op, begin, self._clock.now, flight.num_bytes, key)
            for key, flight in self._in_flight.items()
            for rank, begin in sorted(flight.posted_at.items())
            if rank not in flight.done_at
        ]


def _listed(ranks: Sequence[int]) -> str:
    """Names of ranks, the first of many."""
    return f"rank{'s' if len(ranks) > 1 else ''} {format_list([str(rank) for rank in ranks], _MOST_NAMED)}"


# --- mailboxes: messages leave at once, cross the network, and wait until their receiver takes them ---------------


@dataclass(slots=True, eq=False)
class _Traffic:
    """Number of messages in flight from or to one rank, and the seconds in which there were any."""

    num: int = 0
    since: float = 0.0
    seconds: float = 0.0


@dataclass(slots=True, eq=False)
class _Box:
    """Messages that wait in one rank's mailbox, in order of arrival."""

    messages: list[MailboxMessage] = field(default_factory=list)
    awaited: simpy.Event | None = None


class Mailboxes:
    """Serves `Put` and `Take` on a clock.

    A mailbox is always ready to receive. Senders do not wait, and a message that nobody takes is no error.

    Args:
        clock: virtual time.
        start: starts a message on the network, see `netsim.ranks.kernel.Kernel`.
        instant: starts a message of a rank to itself, which takes no time.
    """

    def __init__(self, clock: Clock, start: StartCall, instant: StartCall) -> None:
        self._clock, self._start, self._instant = clock, start, instant
        self._boxes: dict[Hashable, _Box] = {}
        self._waiting: dict[int, tuple[_Box, bool]] = {}  # rank -> its box, and whether its wait ends
        self._traffic: dict[int, _Traffic] = {}
        self._released: set[int] = set()  # ranks resumed without a message since one last arrived

    def put(self, put: Put) -> None:
        """Send a message to a mailbox."""
        call = put.call
        start = self._start if call.ranks[0] != call.ranks[1] else self._instant

        def done(member: int) -> None:
            if member == 1:
                self._count(put, -1)
                box = self._boxes.setdefault(put.box, _Box())
                box.messages.append(MailboxMessage(call.ranks[0], put.number))
                self._released.clear()
                if box.awaited is not None and not box.awaited.triggered:
                    box.awaited.succeed()

        self._count(put, 1)

        enter, _ = start(call, put.box, done)
        enter(1, call)
        enter(0, call)

    def _count(self, put: Put, change: int) -> None:
        for rank in set(put.call.ranks):
            traffic = self._traffic.setdefault(rank, _Traffic())
            if traffic.num:
                traffic.seconds += self._clock.now - traffic.since
            traffic.num, traffic.since = traffic.num + change, self._clock.now

    def seconds_in_flight(self, rank: int) -> float:
        """Seconds until now in which messages from or to this rank were in flight."""
        traffic = self._traffic.get(rank, _Traffic())
        return traffic.seconds + (self._clock.now - traffic.since if traffic.num else 0.0)

    def take(self, rank: int, take: Take) -> Generator[simpy.Event, None, tuple[MailboxMessage, ...]]:
        """Take the messages that have arrived; wait for one if the request says so."""
        box = self._boxes.setdefault(take.box, _Box())
        if not box.messages and take.seconds > 0:
            box.awaited = self._clock.event()
            self._waiting[rank] = (box, math.isfinite(take.seconds))
            if math.isfinite(take.seconds):
                yield box.awaited | self._clock.timeout(on_grid(take.seconds))
            else:
                yield box.awaited
            box.awaited = None
            del self._waiting[rank]
            yield self._clock.at(on_grid(self._clock.now))
        messages, box.messages = tuple(box.messages), []
        return messages

    def let_one_go(self) -> bool:
        """Resume the first rank that waits for a message that can never arrive.

        It may then send messages itself, so each waiting rank is resumed once until a message arrives again.
        Returns False if no rank is left.
        """
        for rank, (box, ends) in sorted(self._waiting.items()):
            if not ends and rank not in self._released and box.awaited is not None:
                self._released.add(rank)
                if not box.awaited.triggered:
                    box.awaited.succeed()
                return True
        return False
