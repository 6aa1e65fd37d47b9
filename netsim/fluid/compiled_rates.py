"""Draining transfers and their rates, for the compiled loop: max-min fairness that follows changes.

Max-min fairness fills all links from level zero up (the level is the rate, weights and caps being none). So
what lies below the level at which a change first matters stays as it is: below the rate of a transfer that ends,
and below what one that begins can get at least. From there up a change reaches those that share a full link with
it, and those who share one with them; links that are not full carry nothing on. So only these are settled anew,
as if no other link existed; should one of those be overfull then, it counts as full and all is settled once more.

State lies in arrays of records, one record a transfer or link: what is used together lies together, and numba
counts no references to a record, which would take most of the time. It would for what is taken out of tuples, so
functions that are called often get their arrays one by one.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from netsim.fluid.compiled_heap import ITEM, Records, compiled, pop, push, record

if TYPE_CHECKING:
    from netsim.fluid.fairness import FloatArray, IntArray

__all__ = [
    "SLOTS_IN_BLOCK",
    "LinkArrays",
    "enter",
    "find_rates",
    "leave",
    "next_due",
    "quiet_network",
    "set_rates",
]

SLOTS_IN_BLOCK = 64  # whose next instants share one minimum

_SAME = 1.0 - 1e-12  # as in netsim.fluid.fairness
_FULL = 1e-9  # of its capacity is left on a link that counts as full, at most
_OVERFULL = 1.0 + 1e-11  # times its capacity is more than rounding

# A transfer that drains; `fresh`: its rate to come; `mark`: the round of settling in which it was met (settled:
# plus one).
_FLOW = record("message mark", "rate fresh begun since remaining")
# `first`: of its entries in `crossing`; `is_full`: whether it may limit a transfer; `spare`: at least so much of it
# is free; `level`: see `_entry_level`, in the round `levelled`; `left`, `open`: what is to be shared, and by how
# many.
_LINK = record("first crossing mark is_full is_noted levelled open", "capacity spare level left")
_HOP = record("link entry", "")  # of a slot: those from slot << shift on, up to one that is no link
_ENTRY = record("hop", "rate")  # of a link: a transfer that crosses it
_BLOCK = record("is_stale", "due")  # of slots: their earliest instant
# Stacks: free slots, slots that began, full links that transfers have left; links met and slots opened by settling.
_LIST = record("free fresh noted met opened", "")
# How high the stacks are, and slots ever used; `shift`: see hops; `stamp`: the round of settling; `least`: the
# level below which no rate changes.
_STATE = record("num_free num_fresh num_noted num_used num_waiting shift stamp", "least")


class LinkArrays(NamedTuple):
    """Draining transfers by slot, and the links they cross; the last link stands for none."""

    flows: Records
    links: Records
    hops: Records
    crossing: Records
    lists: Records
    levels: Records
    blocks: Records
    due: FloatArray
    path_links: IntArray


def quiet_network(
    capacity: FloatArray, path_links: IntArray, at_once: IntArray
) -> tuple[LinkArrays, Records]:
    """A quiet network, with room for so many transfers of each path at once, and its state."""
    num, num_links = int(at_once.sum()), len(capacity)
    room = np.zeros(num_links + 1, np.int64)
    np.add.at(room, path_links, at_once[:, None])
    links = np.zeros(num_links + 1, _LINK)
    links["capacity"][:-1] = links["spare"][:-1] = capacity
    links["first"][1:] = np.cumsum(room[:-1])
    links["levelled"] = -1
    states = np.zeros(1, _STATE)
    states["shift"] = shift = path_links.shape[1].bit_length()
    blocks = np.zeros(-(-num // SLOTS_IN_BLOCK), _BLOCK)
    blocks["due"] = math.inf
    network = LinkArrays(
        np.zeros(num, _FLOW),
        links,
        np.zeros(num << shift, _HOP),
        np.zeros(int(room[:-1].sum()), _ENTRY),
        np.zeros(max(num, num_links), _LIST),
        np.zeros(num_links, ITEM),
        blocks,
        np.full(len(blocks) * SLOTS_IN_BLOCK, math.inf),
        path_links,
    )
    return network, states


@compiled
def enter(flows: Records, links: Records, hops: Records, crossing: Records, lists: Records, state: Any,
           route: IntArray, item: int, message: Any, now: float) -> None:  # fmt: skip
    """A message begins to drain."""
    if state.num_free:
        state.num_free -= 1
        slot = lists[state.num_free].free
    else:
        slot = state.num_used
        state.num_used += 1
    flow = flows[slot]
    flow.message, flow.begun, flow.since = item, message.begun, now
    flow.remaining, flow.rate = message.num_bytes, 0.0
    lists[state.num_fresh].fresh = slot
    state.num_fresh += 1
    index = slot << state.shift
    for number in route:
        hop = hops[index]
        hop.link = number
        if number == len(links) - 1:
            break
        link = links[number]
        hop.entry = link.first + link.crossing
        entry = crossing[hop.entry]
        entry.hop, entry.rate = index, math.inf  # until it is settled: above every level
        link.crossing += 1
        index += 1


@compiled
def leave(links: Records, hops: Records, crossing: Records, lists: Records, state: Any, slot: int) -> None:
    """A transfer is through; the last one on each of its links takes its place there."""
    index = slot << state.shift
    while hops[index].link < len(links) - 1:
        link = links[hops[index].link]
        link.crossing -= 1
        entry, last = crossing[hops[index].entry], crossing[link.first + link.crossing]
        entry.hop, entry.rate = last.hop, last.rate
        hops[last.hop].entry = hops[index].entry
        if link.is_full and not link.is_noted:
            link.is_noted = 1
            lists[state.num_noted].noted = hops[index].link
            state.num_noted += 1
        index += 1
    lists[state.num_free].free = slot
    state.num_free += 1


@compiled
def next_due(due: FloatArray, blocks: Records, num_used: int) -> float:
    """The earliest instant at which a draining transfer is through."""
    earliest = math.inf
    for number in range((num_used + SLOTS_IN_BLOCK - 1) // SLOTS_IN_BLOCK):
        block = blocks[number]
        if block.is_stale:
            least = math.inf
            for slot in range(number * SLOTS_IN_BLOCK, (number + 1) * SLOTS_IN_BLOCK):
                least = min(least, due[slot])
            block.due = least
            block.is_stale = 0
        earliest = min(earliest, block.due)
    return earliest


@compiled
def _entry_level(crossing: Records, link: Any) -> float:
    """The level at which a link is full if the fresh take all they can and the others what they have."""
    level = 0.0
    while True:  # Newton's method from below: what is concave is never overshot
        left = link.capacity
        num_open = 0
        for place in range(link.first, link.first + link.crossing):
            if crossing[place].rate < level:
                left -= crossing[place].rate
            else:
                num_open += 1
        following = left / num_open
        if following <= level * (1.0 + 1e-9):
            return level
        level = following


@compiled
def _find_least(links: Records, hops: Records, crossing: Records, lists: Records, state: Any) -> None:
    """Find the level below which no rate changes. The links that limit the fresh count as full from now on."""
    for i in range(state.num_fresh):
        lowest = math.inf
        tightest = len(links) - 1
        index = lists[i].fresh << state.shift
        while hops[index].link < len(links) - 1:
            link = links[hops[index].link]
            if link.levelled != state.stamp:
                link.levelled = state.stamp
                link.level = _entry_level(crossing, link)
            if link.level < lowest:
                lowest = link.level
                tightest = hops[index].link
            index += 1
        links[tightest].is_full = 1
        state.least = min(state.least, lowest)
    state.least *= 1.0 - 1e-9


@compiled
def _open(flows: Records, links: Records, hops: Records, lists: Records, state: Any, slot: int, num_met: int,
          num_open: int) -> int:  # fmt: skip
    """Note that a transfer is to be settled, and the full links it meets. Returns how many links are noted."""
    flows[slot].mark = state.stamp
    lists[num_open].opened = slot
    index = slot << state.shift
    while hops[index].link < len(links) - 1:
        link = links[hops[index].link]
        if link.is_full and link.mark != state.stamp:
            link.mark = state.stamp
            lists[num_met].met = hops[index].link
            num_met += 1
        index += 1
    return num_met


@compiled
def _gather(flows: Records, links: Records, hops: Records, crossing: Records, lists: Records,
            state: Any) -> tuple[int, int]:  # fmt: skip
    """Find what must be settled anew: from the least level up, and connected to a change by full links.

    Returns the number of links and of transfers.
    """
    num_met = num_open = 0
    for i in range(state.num_noted):
        lists[i].met = lists[i].noted
        links[lists[i].met].mark = state.stamp
        num_met += 1
    for i in range(state.num_fresh):
        num_met = _open(flows, links, hops, lists, state, lists[i].fresh, num_met, i)
        num_open += 1
    i = 0
    while i < num_met:
        link = links[lists[i].met]
        link.left = link.capacity
        link.open = 0
        for place in range(link.first, link.first + link.crossing):
            entry = crossing[place]
            if entry.rate < state.least:
                link.left -= entry.rate
                continue
            link.open += 1
            slot = entry.hop >> state.shift
            if flows[slot].mark != state.stamp:
                num_met = _open(flows, links, hops, lists, state, slot, num_met, num_open)
                num_open += 1
        i += 1
    return num_met, num_open


@compiled
def _settle(flows: Records, links: Records, hops: Records, crossing: Records, lists: Records,
            levels: Records, state: Any, num_met: int) -> None:  # fmt: skip
    """Fill the links met, the tightest first; levels of the others only rise, so stale ones are put back."""
    size = 0
    for i in range(num_met):
        link = links[lists[i].met]
        if link.open:
            push(levels, size, max(link.left, 0.0) / link.open, lists[i].met)
            size += 1
    while size:
        seen, number = levels[0].key, levels[0].item
        pop(levels, size)
        size -= 1
        link = links[number]
        if link.open == 0:
            continue
        level = max(link.left, 0.0) / link.open
        if level * _SAME > seen:
            push(levels, size, level, number)
            size += 1
            continue
        for place in range(link.first, link.first + link.crossing):
            slot = crossing[place].hop >> state.shift
            if crossing[place].rate < state.least or flows[slot].mark != state.stamp:
                continue
            flows[slot].mark = state.stamp + 1
            flows[slot].fresh = level
            index = slot << state.shift
            while hops[index].link < len(links) - 1:
                other = links[hops[index].link]
                other.left -= level
                other.open -= 1
                index += 1


@compiled
def _overflows(flows: Records, links: Records, hops: Records, crossing: Records, lists: Records, state: Any,
               num_open: int) -> bool:  # fmt: skip
    """Whether links that were left aside would carry too much; if so, they count as full from now on."""
    found = False
    for i in range(num_open):
        slot = lists[i].opened
        more = flows[slot].fresh - flows[slot].rate
        if more <= 0.0:
            continue
        index = slot << state.shift
        while hops[index].link < len(links) - 1:
            link = links[hops[index].link]
            index += 1
            if link.is_full:
                continue
            link.spare -= more
            if link.spare >= 0.0:
                continue
            used = most = 0.0
            for place in range(link.first, link.first + link.crossing):
                flow = flows[crossing[place].hop >> state.shift]
                coming = flow.fresh if flow.mark == state.stamp + 1 else flow.rate
                used += coming
                most += max(coming, flow.rate)
            link.spare = link.capacity - most
            if used > link.capacity * _OVERFULL:
                link.is_full = 1
                found = True
    return found


@compiled
def find_rates(flows: Records, links: Records, hops: Records, crossing: Records, lists: Records,
                levels: Records, state: Any) -> int:  # fmt: skip
    """Settle rates anew as far as the changes of this instant reach. Returns how many were settled."""
    _find_least(links, hops, crossing, lists, state)
    while True:
        state.stamp += 2
        num_met, num_open = _gather(flows, links, hops, crossing, lists, state)
        _settle(flows, links, hops, crossing, lists, levels, state, num_met)
        if not _overflows(flows, links, hops, crossing, lists, state, num_open):
            break
    for i in range(num_met):
        link = links[lists[i].met]
        link.is_full = link.left <= link.capacity * _FULL
        link.spare = link.left
        link.is_noted = 0
    state.num_noted = state.num_fresh = 0
    return num_open


@compiled
def set_rates(flows: Records, links: Records, hops: Records, crossing: Records, lists: Records, due: FloatArray,
               blocks: Records, state: Any, num_open: int, now: float) -> None:  # fmt: skip
    """Let what was settled drain on at its fresh rate; one that differs by rounding only is kept as it is."""
    for i in range(num_open):
        slot = lists[i].opened
        flow = flows[slot]
        if flow.rate > 0.0:
            if abs(flow.fresh - flow.rate) <= 1e-12 * flow.rate:
                continue
            flow.remaining = max(flow.remaining - flow.rate * (now - flow.since), 0.0)
        flow.since = now
        flow.rate = flow.fresh
        due[slot] = now + flow.remaining / flow.rate if flow.rate > 0.0 else math.inf
        blocks[slot // SLOTS_IN_BLOCK].is_stale = 1
        index = slot << state.shift
        while hops[index].link < len(links) - 1:
            crossing[hops[index].entry].rate = flow.rate
            index += 1
