"""The closed event loop, compiled: the `fast` extra. Import this file only where it is wanted.

`play_messages` plays transfers whose start is known, `play_steps` members that post step after step, both on
the ideal network and to the end. They do what `netsim.network` does, transfer for transfer, and agree with it
to 1e-9.

Beyond being compiled, the loop looks no further than a change can reach. Max-min fairness fills all links
from level zero up (level: rate per weight, here one each), so what is settled below the level at which a
change first matters stays as
it is: below the rate of a transfer that ends, and below the least fair share on the route of one that begins.
Only transfers at or above that level, and connected to the change through such transfers, are settled anew.

All of it is one file, long as it is, since numba's cache does not notice changes in other files.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from netsim.fairness import FloatArray, IntArray

__all__ = ["max_min_rates", "play_messages", "play_steps"]

_OF_DURATION = 1e-12  # as in netsim.transfers
_OF_CLOCK = 2.0**-50
_SAME = 1.0 - 1e-12  # as in netsim.fairness

_BLOCK = 64  # slots whose next instants share one minimum

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _compile(function: _Function) -> _Function:
    return cast("_Function", numba.njit(cache=True, nogil=True)(function))


class _Messages(NamedTuple):
    """What is to be played, by message, and how far it is: `next_` is the one behind it on its connection."""

    path: IntArray
    latency: FloatArray
    num_bytes: FloatArray
    begun: FloatArray
    ready: FloatArray
    finish: FloatArray
    next_: IntArray
    last: IntArray  # by path: the last message posted that is not delivered, -1 for none
    heap_time: FloatArray  # instants at which latencies end and members arrive
    heap_item: IntArray  # message, or number of messages + member
    heap_size: IntArray  # one element


class _Members(NamedTuple):
    """The steps of members; a cell is step x members + member."""

    source_cell: IntArray
    target_cell: IntArray
    first: IntArray
    awaited: IntArray
    gate: IntArray
    next_step: IntArray
    oldest: IntArray
    arrived: npt.NDArray[np.bool_]
    done: FloatArray


class _Flows(NamedTuple):
    """Draining transfers by slot; entries (slot << shift) + hop are chained into a list for each link."""

    capacity: FloatArray
    path_links: IntArray
    message: IntArray
    path: IntArray
    begun: FloatArray
    since: FloatArray
    remaining: FloatArray
    rate: FloatArray
    due: FloatArray
    block_due: FloatArray
    block_stale: npt.NDArray[np.bool_]
    free: IntArray  # stack of free slots
    counts: IntArray  # free slots, slots ever used, shift
    head: IntArray  # by link: its first entry
    after: IntArray
    before: IntArray
    crossed: IntArray  # the link of each entry, or the number of links
    crossing: IntArray  # by link: draining transfers
    mark: IntArray  # by slot: the round of settling in which it was met (settled: plus one)


class _Links(NamedTuple):
    """Scratch of one settling: links met, what is left of them, their open transfers, a heap of levels."""

    mark: IntArray
    met: IntArray
    left: FloatArray
    load: IntArray
    heap_level: FloatArray
    heap_link: IntArray
    fresh: IntArray  # slots that began in this instant


def play_messages(
    capacity: FloatArray,
    path_links: IntArray,
    path: IntArray,
    latency_seconds: FloatArray,
    num_bytes: FloatArray,
    start_seconds: FloatArray,
) -> FloatArray:
    """Delivery instants of transfers that start at known instants, each on a connection of its own.

    Args:
        capacity: payload bytes per second of each link; shape (links,).
        path_links: links of each path, filled up with `links`; shape (paths, longest).
        path: path of each transfer; shape (transfers,), as the rest.
        latency_seconds: what each waits before it drains.
        num_bytes: payload of each.
        start_seconds: when each is sent.

    Returns:
        The instant of each delivery; infinity where a link without capacity is in the way.
    """
    none = np.zeros(0, dtype=np.int64)
    finish: FloatArray
    finish, _ = _play(
        capacity, path_links, path, latency_seconds, num_bytes,
        np.ascontiguousarray(start_seconds, dtype=np.float64), none, none, none, none, none, np.zeros(0),
    )  # fmt: skip
    return finish


def play_steps(
    capacity: FloatArray,
    path_links: IntArray,
    path: IntArray,
    latency_seconds: FloatArray,
    num_bytes: FloatArray,
    step: IntArray,
    source: IntArray,
    target: IntArray,
    gate: IntArray,
    arrive_seconds: FloatArray,
) -> tuple[FloatArray, FloatArray]:
    """Delivery instants of messages that members post step by step, and when each member is through.

    Member m posts its messages of step i, in their order here, when it has arrived and its steps 0 .. gate[i]
    - 1 are done. Its step is done when all messages of that step that it sends or receives are delivered.
    Messages over one path leave whole and in order, as those of one connection do.

    Args:
        capacity, path_links, path, latency_seconds, num_bytes: as for `play_messages`; latencies without
            bytes follow the same rule.
        step: number of the step of each message, never falling along the array.
        source, target: member that sends and member that receives it.
        gate: how many steps must be done before each step is posted; shape (steps,).
        arrive_seconds: when each member enters; shape (members,).

    Returns:
        The instant of each message's delivery, and that of each member's last step (or its arrival).
    """
    members = len(arrive_seconds)
    order = np.lexsort((np.arange(len(step)), source, step))
    cell = step * members + source
    first = np.searchsorted(cell[order], np.arange(len(gate) * members + 1))
    awaited = np.bincount(cell, minlength=len(gate) * members)
    awaited += np.bincount(step * members + target, minlength=len(gate) * members)
    finish = np.empty(len(step))
    finish[order], done = _play(
        capacity, path_links, path[order], latency_seconds[order], num_bytes[order],
        np.zeros(0), cell[order], (step * members + target)[order], first, awaited, gate,
        np.ascontiguousarray(arrive_seconds, dtype=np.float64),
    )  # fmt: skip
    return finish, done


@_compile
def _push(heap_time: FloatArray, heap_item: IntArray, size: int, time: float, item: int) -> None:
    """Add to a binary heap of `size` entries ordered by (time, item)."""
    i = size
    while i > 0:
        up = (i - 1) >> 1
        if heap_time[up] < time or (heap_time[up] == time and heap_item[up] < item):
            break
        heap_time[i] = heap_time[up]
        heap_item[i] = heap_item[up]
        i = up
    heap_time[i] = time
    heap_item[i] = item


@_compile
def _pop(heap_time: FloatArray, heap_item: IntArray, size: int) -> None:
    """Remove the root of a binary heap of `size` entries."""
    size -= 1
    time = heap_time[size]
    item = heap_item[size]
    i = 0
    while True:
        down = 2 * i + 1
        if down >= size:
            break
        right = down + 1
        if right < size and (
            heap_time[right] < heap_time[down]
            or (heap_time[right] == heap_time[down] and heap_item[right] < heap_item[down])
        ):
            down = right
        if time < heap_time[down] or (time == heap_time[down] and item <= heap_item[down]):
            break
        heap_time[i] = heap_time[down]
        heap_item[i] = heap_item[down]
        i = down
    heap_time[i] = time
    heap_item[i] = item


@_compile
def _wait(messages: _Messages, instant: float, item: int) -> None:
    _push(messages.heap_time, messages.heap_item, messages.heap_size[0], instant, item)
    messages.heap_size[0] += 1


@_compile
def _post(messages: _Messages, item: int, now: float) -> None:
    """Send a message, behind those of its connection that are under way."""
    messages.begun[item] = now
    messages.ready[item] = now + messages.latency[item]
    path = messages.path[item]
    last = messages.last[path]
    messages.last[path] = item
    if last >= 0:
        messages.next_[last] = item
    else:
        _wait(messages, messages.ready[item], item)


@_compile
def _go_on(messages: _Messages, members: _Members, member: int, now: float) -> None:
    """Let a member post all it may."""
    num_members = len(members.arrived)
    steps = len(members.gate)
    if not members.arrived[member]:
        return
    while True:
        step = members.next_step[member]
        while step < steps and members.oldest[member] >= members.gate[step]:
            cell = step * num_members + member
            for item in range(members.first[cell], members.first[cell + 1]):
                _post(messages, item, now)
            step += 1
        members.next_step[member] = step
        oldest = members.oldest[member]
        while oldest < step and members.awaited[oldest * num_members + member] == 0:
            oldest += 1
        if oldest == members.oldest[member]:
            break
        members.oldest[member] = oldest
    if oldest == steps and members.done[member] == math.inf:
        members.done[member] = now


@_compile
def _deliver(messages: _Messages, members: _Members, item: int, now: float) -> None:
    messages.finish[item] = now
    if not len(members.arrived):
        return
    following = messages.next_[item]
    if following >= 0:
        _wait(messages, max(now, messages.ready[following]), following)
    else:
        messages.last[messages.path[item]] = -1
    for cell in (members.source_cell[item], members.target_cell[item]):
        members.awaited[cell] -= 1
        if members.awaited[cell] == 0:
            _go_on(messages, members, cell % len(members.arrived), now)


@_compile
def _meet(flows: _Flows, links: _Links, path: int, stamp: int, num_met: int) -> int:
    """Note the links of a path for the coming settling. Returns how many links are noted now."""
    for hop in range(flows.path_links.shape[1]):
        link = flows.path_links[path, hop]
        if link == len(flows.head):
            break
        if links.mark[link] != stamp:
            links.mark[link] = stamp
            links.met[num_met] = link
            num_met += 1
    return num_met


@_compile
def _enter(flows: _Flows, messages: _Messages, item: int, now: float) -> int:
    """A message begins to drain. Returns its slot."""
    if flows.counts[0]:
        flows.counts[0] -= 1
        slot = flows.free[flows.counts[0]]
    else:
        slot = flows.counts[1]
        flows.counts[1] += 1
    path = messages.path[item]
    flows.message[slot] = item
    flows.path[slot] = path
    flows.begun[slot] = messages.begun[item]
    flows.since[slot] = now
    flows.remaining[slot] = messages.num_bytes[item]
    flows.rate[slot] = math.inf  # until it is settled: above every level
    entry = slot << flows.counts[2]
    for link in flows.path_links[path]:
        flows.crossed[entry] = link
        if link == len(flows.head):
            break
        first = flows.head[link]
        flows.after[entry] = first
        flows.before[entry] = -1
        if first >= 0:
            flows.before[first] = entry
        flows.head[link] = entry
        flows.crossing[link] += 1
        entry += 1
    return int(slot)


@_compile
def _leave(flows: _Flows, slot: int) -> None:
    """A transfer is through."""
    entry = slot << flows.counts[2]
    while flows.crossed[entry] < len(flows.head):
        link = flows.crossed[entry]
        before = flows.before[entry]
        after = flows.after[entry]
        if before >= 0:
            flows.after[before] = after
        else:
            flows.head[link] = after
        if after >= 0:
            flows.before[after] = before
        flows.crossing[link] -= 1
        entry += 1
    flows.due[slot] = math.inf
    flows.block_stale[slot // _BLOCK] = True
    flows.free[flows.counts[0]] = slot
    flows.counts[0] += 1


@_compile
def _least_level(flows: _Flows, links: _Links, num_fresh: int, threshold: float) -> float:
    """The level below which nothing changes: a link's fair share is least when all on it get the same."""
    for i in range(num_fresh):
        entry = links.fresh[i] << flows.counts[2]
        while flows.crossed[entry] < len(flows.head):
            link = flows.crossed[entry]
            threshold = min(threshold, flows.capacity[link] / flows.crossing[link])
            entry += 1
    return threshold * (1.0 - 1e-9)


@_compile
def _gather(flows: _Flows, links: _Links, num_met: int, threshold: float, stamp: int) -> int:
    """Find what must be settled anew: transfers from the threshold up that are connected to the links met."""
    shift = flows.counts[2]
    num_links = len(flows.head)
    i = 0
    while i < num_met:
        link = links.met[i]
        i += 1
        left = flows.capacity[link]
        load = 0
        entry = flows.head[link]
        while entry >= 0:
            slot = entry >> shift
            if flows.rate[slot] < threshold:
                left -= flows.rate[slot]
            else:
                load += 1
                if flows.mark[slot] != stamp:
                    flows.mark[slot] = stamp
                    crossed = slot << shift
                    while flows.crossed[crossed] < num_links:
                        other = flows.crossed[crossed]
                        if links.mark[other] != stamp:
                            links.mark[other] = stamp
                            links.met[num_met] = other
                            num_met += 1
                        crossed += 1
            entry = flows.after[entry]
        links.left[link] = left
        links.load[link] = load
    return num_met


@_compile
def _settle(flows: _Flows, links: _Links, num_met: int, stamp: int, now: float) -> None:
    """Fill the links met, the tightest first; levels of the others only rise, so stale ones are put back."""
    size = 0
    for i in range(num_met):
        link = links.met[i]
        if links.load[link]:
            level = max(links.left[link], 0.0) / links.load[link]
            _push(links.heap_level, links.heap_link, size, level, link)
            size += 1
    shift = flows.counts[2]
    num_links = len(flows.head)
    while size:
        seen = links.heap_level[0]
        link = links.heap_link[0]
        _pop(links.heap_level, links.heap_link, size)
        size -= 1
        if links.load[link] == 0:
            continue
        level = max(links.left[link], 0.0) / links.load[link]
        if level * _SAME > seen:
            _push(links.heap_level, links.heap_link, size, level, link)
            size += 1
            continue
        entry = flows.head[link]
        while entry >= 0:
            slot = entry >> shift
            if flows.mark[slot] == stamp:
                flows.mark[slot] = stamp + 1
                crossed = slot << shift
                while flows.crossed[crossed] < num_links:
                    other = flows.crossed[crossed]
                    links.left[other] -= level
                    links.load[other] -= 1
                    crossed += 1
                _set_rate(flows, slot, level, now)
            entry = flows.after[entry]


@_compile
def _set_rate(flows: _Flows, slot: int, rate: float, now: float) -> None:
    old = flows.rate[slot]
    if abs(rate - old) <= 1e-12 * old and old < math.inf:
        return
    if old < math.inf:
        flows.remaining[slot] = max(flows.remaining[slot] - old * (now - flows.since[slot]), 0.0)
    flows.since[slot] = now
    flows.rate[slot] = rate
    flows.due[slot] = now + flows.remaining[slot] / rate if rate > 0.0 else math.inf
    flows.block_stale[slot // _BLOCK] = True


@_compile
def _next_due(flows: _Flows) -> float:
    """The earliest instant at which a draining transfer is through."""
    earliest = math.inf
    used = flows.counts[1]
    for block in range((used + _BLOCK - 1) // _BLOCK):
        if flows.block_stale[block]:
            least = math.inf
            for slot in range(block * _BLOCK, min(used, (block + 1) * _BLOCK)):
                least = min(least, flows.due[slot])
            flows.block_due[block] = least
            flows.block_stale[block] = False
        earliest = min(earliest, flows.block_due[block])
    return earliest


@_compile
def _end_due(flows: _Flows, messages: _Messages, members: _Members, links: _Links, stamp: int, num_met: int,
             threshold: float, now: float) -> tuple[int, float]:  # fmt: skip
    """Take out what is through by `now`. Returns the links met, and the least level among what has ended."""
    most_slack = now * (_OF_CLOCK + _OF_DURATION)
    used = flows.counts[1]
    for block in range((used + _BLOCK - 1) // _BLOCK):
        if flows.block_due[block] - most_slack > now:
            continue
        for slot in range(block * _BLOCK, min(used, (block + 1) * _BLOCK)):
            slack = now * _OF_CLOCK + (now - flows.begun[slot]) * _OF_DURATION
            if flows.due[slot] - slack <= now:
                threshold = min(threshold, flows.rate[slot])
                num_met = _meet(flows, links, flows.path[slot], stamp, num_met)
                _leave(flows, slot)
                _deliver(messages, members, flows.message[slot], now)
    return num_met, threshold


@_compile
def _begin_ready(flows: _Flows, messages: _Messages, members: _Members, links: _Links, stamp: int, num_met: int,
                 num_fresh: int, now: float) -> tuple[int, int]:  # fmt: skip
    """Let what has waited its latency drain, and members arrive. Returns links met and fresh slots."""
    num_messages = len(messages.path)
    while messages.heap_size[0]:
        item = messages.heap_item[0]
        slack = now * _OF_CLOCK
        if item < num_messages:
            slack += messages.latency[item] * _OF_DURATION
        if messages.heap_time[0] - slack > now:
            break
        _pop(messages.heap_time, messages.heap_item, messages.heap_size[0])
        messages.heap_size[0] -= 1
        if item >= num_messages:
            members.arrived[item - num_messages] = True
            _go_on(messages, members, item - num_messages, now)
        elif messages.num_bytes[item] == 0.0 or flows.path_links[messages.path[item], 0] >= len(flows.head):
            _deliver(messages, members, item, now)
        else:
            links.fresh[num_fresh] = _enter(flows, messages, item, now)
            num_fresh += 1
            num_met = _meet(flows, links, messages.path[item], stamp, num_met)
    return num_met, num_fresh


@_compile
def _run(flows: _Flows, messages: _Messages, members: _Members, links: _Links) -> None:
    """Go from instant to instant until nothing is due any more."""
    stamp = 0
    while True:
        now = _next_due(flows)
        if messages.heap_size[0]:
            now = min(now, messages.heap_time[0])
        if now == math.inf:
            return
        stamp += 2
        threshold = math.inf
        num_fresh = 0
        num_met, threshold = _end_due(flows, messages, members, links, stamp, 0, threshold, now)
        num_met, num_fresh = _begin_ready(flows, messages, members, links, stamp, num_met, num_fresh, now)
        threshold = _least_level(flows, links, num_fresh, threshold)
        num_met = _gather(flows, links, num_met, threshold, stamp)
        _settle(flows, links, num_met, stamp, now)


@_compile
def _play(capacity: FloatArray, path_links: IntArray, path: IntArray, latency: FloatArray, num_bytes: FloatArray,
          start: FloatArray, source_cell: IntArray, target_cell: IntArray, first: IntArray, awaited: IntArray,
          gate: IntArray, arrive: FloatArray) -> tuple[FloatArray, FloatArray]:  # fmt: skip
    """Set up the state and run; see `play_messages` and `play_steps`."""
    num, num_links, num_members = len(path), len(capacity), len(arrive)
    most = num + num_members + 1
    whole = np.int64
    messages = _Messages(
        path, latency, num_bytes, np.zeros(num), np.zeros(num), np.full(num, math.inf), np.full(num, -1),
        np.full(len(path_links), -1), np.zeros(most), np.zeros(most, whole), np.zeros(1, whole),
    )  # fmt: skip
    members = _Members(
        source_cell, target_cell, first, awaited, gate, np.zeros(num_members, whole), np.zeros(num_members,
        whole), np.zeros(num_members, np.bool_), np.full(num_members, math.inf),
    )  # fmt: skip
    blocks = num // _BLOCK + 1
    shift = 0
    while 1 << shift <= path_links.shape[1]:
        shift += 1
    entries = num << shift
    flows = _Flows(
        capacity, path_links, np.zeros(num, whole), np.zeros(num, whole), np.zeros(num), np.zeros(num),
        np.zeros(num), np.zeros(num), np.full(num, math.inf), np.full(blocks, math.inf), np.zeros(blocks,
        np.bool_), np.zeros(num, whole), np.array([0, 0, shift]), np.full(num_links, -1), np.zeros(entries,
        whole), np.zeros(entries, whole), np.full(entries, num_links), np.zeros(num_links, whole),
        np.zeros(num, whole),
    )  # fmt: skip
    links = _Links(
        np.zeros(num_links, whole), np.zeros(num_links, whole), np.zeros(num_links), np.zeros(num_links,
        whole), np.zeros(num_links + 1), np.zeros(num_links + 1, whole), np.zeros(num, whole),
    )  # fmt: skip
    for item in range(len(start)):
        messages.begun[item] = start[item]
        _wait(messages, start[item] + latency[item], item)
    for member in range(num_members):
        _wait(messages, arrive[member], num + member)
    _run(flows, messages, members, links)
    return messages.finish, members.done


@_compile
def max_min_rates(
    capacity: FloatArray, routes: IntArray, weights: FloatArray, caps: FloatArray
) -> FloatArray:
    """As `netsim.fairness.max_min_rates`: the tightest link first, transfers at their caps before it."""
    num, hops = routes.shape
    num_links = len(capacity) - 1
    left, load, count = capacity.copy(), np.zeros(num_links), np.zeros(num_links + 1, np.int64)
    for slot in range(num):
        for hop in range(hops):
            link = routes[slot, hop]
            if link < num_links:
                load[link] += weights[slot]
                count[link] += 1
    first = np.zeros(num_links + 2, np.int64)  # where each link's transfers begin in `crossing`
    first[1:] = np.cumsum(count)
    crossing, filled = np.empty(first[num_links], np.int64), first[:num_links].copy()
    heap_level, heap_item, size = np.empty(num_links + num), np.empty(num_links + num, np.int64), 0
    for slot in range(num):
        for hop in range(hops):
            link = routes[slot, hop]
            if link < num_links:
                crossing[filled[link]] = slot
                filled[link] += 1
        if caps[slot] < math.inf:
            _push(heap_level, heap_item, size, caps[slot] / weights[slot], num_links + slot)
            size += 1
    for link in range(num_links):
        if count[link]:
            _push(heap_level, heap_item, size, left[link] / load[link], link)
            size += 1
    rates = np.full(num, math.inf)
    while size:
        seen, item = heap_level[0], heap_item[0]
        _pop(heap_level, heap_item, size)
        size -= 1
        if item >= num_links:
            if rates[item - num_links] == math.inf:
                _fix(routes, weights, item - num_links, caps[item - num_links], rates, left, load, count)
            continue
        if count[item] == 0:
            continue
        level = max(left[item], 0.0) / max(load[item], 1e-300)
        if level * _SAME > seen:
            _push(heap_level, heap_item, size, level, item)
            size += 1
            continue
        for i in range(first[item], first[item + 1]):
            slot = crossing[i]
            if rates[slot] == math.inf:
                _fix(routes, weights, slot, min(level * weights[slot], caps[slot]), rates, left, load, count)
    return rates


@_compile
def _fix(
    routes: IntArray, weights: FloatArray, slot: int, rate: float,
    rates: FloatArray, left: FloatArray, load: FloatArray, count: IntArray,
) -> None:  # fmt: skip
    """Settle the rate of a transfer and take it from its links."""
    rates[slot] = rate
    for link in routes[slot]:
        if link < len(load):
            left[link] -= rate
            load[link] -= weights[slot]
            count[link] -= 1
