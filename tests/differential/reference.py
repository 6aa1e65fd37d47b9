"""When ranks get where, computed a second time: under the protocol `ideal`, with nothing of netsim's engine or kernel.

Taken as data are the topology (routes, capacities, latencies), what ranks request, and the schedule of each collective.
Everything else is here once more, in the plainest way: max-min shares by filling all links at once after every event,
connections as queues, members that walk through their steps. It takes seconds where the engine takes milliseconds.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from test_live_collectives import Played

from netsim import Protocol

GRID = 2.0**30
_NOISE = 1e-12  # seconds that rounding may amount to


def up(seconds: float) -> float:
    """The first instant of the ranks' grid that is not before `seconds`."""
    return math.ceil((seconds - _NOISE) * GRID) / GRID


@dataclass(eq=False)
class Transfer:
    """Bytes on their way, or waiting behind others of their connection."""

    links: tuple[int, ...]
    num_left: float
    ready: float
    then: Callable[[], None]
    rate: float = 0.0


class Wires:
    """Links that transfers share: each waits its latency, then drains at a max-min share, in connection order."""

    def __init__(self, topology: Any) -> None:
        self.topology, self.now = topology, 0.0
        self.protocol = Protocol.parse("ideal")
        self.capacity = [link.bits_per_second / 8 for link in topology.links]
        self.queues: dict[Hashable, deque[Transfer]] = defaultdict(deque)

    def send(
        self,
        src: int,
        dst: int,
        num_bytes: float,
        then: Callable[[], None],
        connection: Hashable,
        on_sent: None = None,
    ) -> None:
        ready = self.now + self.topology.route_latency_seconds(src, dst)
        transfer = Transfer(tuple(self.topology.route(src, dst)), num_bytes, ready, then)
        self.queues[connection, src, dst].append(transfer)

    def draining(self) -> list[Transfer]:
        heads = [queue[0] for queue in self.queues.values() if queue]
        return [
            head for head in heads if head.ready <= self.now + _NOISE and head.num_left > 0 and head.links
        ]

    def share(self) -> None:
        """Fill all links alike until each transfer crosses a full one."""
        waiting, room = set(self.draining()), dict(enumerate(self.capacity))
        while waiting:
            users = defaultdict(list)
            for transfer in waiting:
                for link in transfer.links:
                    users[link].append(transfer)
            narrowest = min(users, key=lambda link: room[link] / len(users[link]))
            rate = room[narrowest] / len(users[narrowest])
            for transfer in users[narrowest]:
                transfer.rate = rate
                waiting.discard(transfer)
                for link in transfer.links:
                    room[link] = max(room[link] - rate, 0.0)

    def next_instant(self) -> float:
        """When the next transfer begins to drain, or is there."""
        self.share()
        found = math.inf
        for queue in self.queues.values():
            if queue:
                head = queue[0]
                begins = max(head.ready, self.now)
                if begins <= self.now + _NOISE and head.num_left > 0 and head.links:
                    begins = self.now + head.num_left / head.rate
                found = min(found, begins)
        return found

    def drain_until(self, instant: float) -> None:
        for transfer in self.draining():
            transfer.num_left -= transfer.rate * (instant - self.now)
            if transfer.num_left <= transfer.rate * _NOISE:
                transfer.num_left = 0.0
        self.now = instant

    def delivered(self) -> list[Transfer]:
        """Take out what is there now; those behind it on their connections may be, too."""
        found = []
        for name in list(self.queues):
            queue = self.queues[name]
            while (
                queue and queue[0].ready <= self.now + _NOISE and not (queue[0].num_left and queue[0].links)
            ):
                found.append(queue.popleft())
            if not queue:
                del self.queues[name]
        return found


class Play(Played):
    """One call, played on `Wires`; sizes of all_to_all come with the members."""

    def __init__(self, world: Reference, key: Any, call: Any) -> None:
        self.key, self.call, self.rows = key, call, dict[int, Sequence[int]]()
        hosts = [world.hosts[rank] for rank in call.ranks]
        super().__init__(
            world.wires, world.schedule_of(call), hosts, key.group, lambda member: world.through(self, member)
        )

    def enter(self, member: int, call: Any) -> None:
        if call.parts is not None:
            self.rows[member] = call.parts[0]
        self.arrive(member)

    def send(self, index: int, src: int, dst: int, size: float) -> None:
        super().send(index, src, dst, self.rows[src][dst] if src in self.rows else size)


class Reference:
    """Ranks on a network.

    Args:
        topology: of netsim, as data.
        hosts: the host of each rank.
        schedule_of: the schedule of a call.
        streams: what each rank requests: Advance, Post, Wait, Mark and Exit of `netsim.ranks.requests`.

    Attributes:
        ends: when each rank is through.
        marks: by rank, when it came to each of its marks.
    """

    def __init__(
        self,
        topology: Any,
        hosts: Sequence[int],
        schedule_of: Callable[[Any], Any],
        streams: Sequence[Sequence[Any]],
    ) -> None:
        self.wires, self.hosts, self.schedule_of = Wires(topology), hosts, schedule_of
        self.streams = [deque(stream) for stream in streams]
        self.wake: dict[int, float] = dict.fromkeys(range(len(streams)), 0.0)
        self.asleep: dict[int, Any] = {}  # rank -> the call that it waits for
        self.plays: dict[Any, Play] = {}
        self.done: dict[tuple[Any, int], float] = {}
        self.lanes: dict[tuple[Any, int], deque[Any]] = defaultdict(deque)
        self.ends = [math.nan] * len(streams)
        self.marks: list[list[float]] = [[] for _ in streams]

    def run(self) -> None:
        """To the end of all ranks."""
        while self.wake or self.asleep:
            while self.turn():
                pass
            if not self.wake and not self.asleep:
                return
            instant = min(self.wires.next_instant(), *self.wake.values(), math.inf)
            assert instant < math.inf, f"ranks wait for ever: {self.asleep}"
            self.wires.drain_until(instant)

    def turn(self) -> bool:
        """Whatever happens now; False if nothing does."""
        there = self.wires.delivered()
        for transfer in there:
            transfer.then()
        ranks = [rank for rank, instant in self.wake.items() if instant <= self.wires.now]
        for rank in sorted(ranks):
            del self.wake[rank]
            self.resume(rank)
        return bool(there or ranks)

    def resume(self, rank: int) -> None:
        now, stream = self.wires.now, self.streams[rank]
        while stream:
            request = stream.popleft()
            match type(request).__name__:
                case "Advance":
                    self.wake[rank] = now + up(request.seconds)
                    return
                case "Post":
                    self.post(rank, request)
                case "Mark":
                    self.marks[rank].append(now)
                case "Wait":
                    done = self.done.get((request.key, rank))
                    if done is None or done > now:
                        if done is None:
                            self.asleep[rank] = request.key
                        else:
                            self.wake[rank] = done
                        return
        self.ends[rank] = now

    def post(self, rank: int, request: Any) -> None:
        if len(set(request.call.ranks)) == 1:
            self.done[request.key, rank] = up(self.wires.now)
            return
        play = self.plays.get(request.key)
        if play is None:
            play = self.plays[request.key] = Play(self, request.key, request.call)
        entry = (play, request)
        if request.call.op == "sendrecv":
            play.enter(request.member, request.call)
            return
        lane = self.lanes[request.key.group, rank]
        lane.append(entry)
        if len(lane) == 1:
            play.enter(request.member, request.call)

    def through(self, play: Play, member: int) -> None:
        """A call is over for a member: it goes on if it waits, and its next collective of the group begins."""
        rank = play.call.ranks[member]
        done = self.done[play.key, rank] = up(self.wires.now)
        if self.asleep.get(rank) == play.key:
            del self.asleep[rank]
            self.wake[rank] = done
        if play.call.op != "sendrecv":
            lane = self.lanes[play.key.group, rank]
            lane.popleft()
            if lane:
                following, request = lane[0]
                following.enter(request.member, request.call)
