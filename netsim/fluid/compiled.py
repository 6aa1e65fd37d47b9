"""The closed event loop, compiled: the `fast` extra. Import this file only where it is wanted.

`run_messages` simulates transfers whose start is known, `run_steps` members that post step after step, both on
the ideal network and to the end. They do what `netsim.fluid.network` does, transfer for transfer, and agree with it
to 1e-9.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from netsim.fluid.compiled_heap import ITEM, Records, compiled, pop, push, record
from netsim.fluid.compiled_rates import (
    SLOTS_IN_BLOCK,
    LinkArrays,
    enter,
    find_rates,
    leave,
    next_due,
    quiet_network,
    set_rates,
)

if TYPE_CHECKING:
    from netsim.fluid.fairness import FloatArray, IntArray

__all__ = ["run_messages", "run_steps"]

_OF_DURATION = 1e-12  # as in netsim.fluid.transfers
_OF_CLOCK = 2.0**-50

# `next`: the message behind it on its connection; cells: step x members + member.
_MESSAGE = record("path next source_cell target_cell", "latency num_bytes begun ready finish")
_MEMBER = record("next_step oldest has_arrived", "done")


class _Schedule(NamedTuple):
    """What is to be simulated, and how far it is."""

    messages: Records
    members: Records
    first: IntArray  # by cell: its first message
    awaited: IntArray  # by cell: messages to be delivered
    gate: IntArray
    last: IntArray  # by path: the last message posted that is not delivered, -1 for none
    waiting: Records  # heap of instants at which latencies end and members (numbers after messages) arrive
    states: Records


def run_messages(
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
    messages = _messages(path, latency_seconds, num_bytes)
    messages["begun"] = start_seconds
    none = np.zeros(0, dtype=np.int64)
    waiting = _waiting(start_seconds + latency_seconds, 0)
    network, states = quiet_network(capacity, path_links, np.bincount(path, minlength=len(path_links)))
    states["num_waiting"] = len(path)
    _run(_Schedule(messages, np.zeros(0, _MEMBER), none, none, none, none, waiting, states), network)
    return np.ascontiguousarray(messages["finish"])


def run_steps(
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
        capacity, path_links, path, latency_seconds, num_bytes: as for `run_messages`; latencies without
            bytes follow the same rule.
        step: number of the step of each message, never falling along the array.
        source, target: member that sends and member that receives it.
        gate: how many steps must be done before each step is posted; shape (steps,).
        arrive_seconds: when each member enters; shape (members,).

    Returns:
        The instant of each message's delivery, and that of each member's last step (or its arrival).
    """
    num_members = len(arrive_seconds)
    order = np.lexsort((np.arange(len(step)), source, step))
    cell, target_cell = step * num_members + source, step * num_members + target
    num_cells = len(gate) * num_members
    messages = _messages(path[order], latency_seconds[order], num_bytes[order])
    messages["source_cell"], messages["target_cell"] = cell[order], target_cell[order]
    members = np.zeros(num_members, _MEMBER)
    members["done"] = math.inf
    waiting = np.concatenate([_waiting(arrive_seconds, len(path)), np.zeros(len(path), ITEM)])
    network, states = quiet_network(capacity, path_links, np.ones(len(path_links), np.int64))
    states["num_waiting"] = num_members
    schedule = _Schedule(
        messages,
        members,
        np.searchsorted(cell[order], np.arange(num_cells + 1)),
        np.bincount(cell, minlength=num_cells) + np.bincount(target_cell, minlength=num_cells),
        gate,
        np.full(len(path_links), -1),
        waiting,
        states,
    )
    _run(schedule, network)
    finish = np.empty(len(step))
    finish[order] = messages["finish"]
    return finish, np.ascontiguousarray(members["done"])


def _messages(path: IntArray, latency_seconds: FloatArray, num_bytes: FloatArray) -> Records:
    messages = np.zeros(len(path), _MESSAGE)
    messages["path"], messages["latency"], messages["num_bytes"] = path, latency_seconds, num_bytes
    messages["next"], messages["finish"] = -1, math.inf
    return messages


def _waiting(instants: FloatArray, first_item: int) -> Records:
    """A heap of items that are due at instants: what is sorted is one."""
    order = np.argsort(instants, kind="stable")
    waiting = np.zeros(len(instants), ITEM)
    waiting["key"], waiting["item"] = instants[order], order + first_item
    return waiting


@compiled
def _wait(schedule: _Schedule, instant: float, item: int) -> None:
    state = schedule.states[0]
    push(schedule.waiting, state.num_waiting, instant, item)
    state.num_waiting += 1


@compiled
def _post(schedule: _Schedule, item: int, now: float) -> None:
    """Send a message, behind those of its connection that are under way."""
    message = schedule.messages[item]
    message.begun = now
    message.ready = now + message.latency
    before = schedule.last[message.path]
    schedule.last[message.path] = item
    if before >= 0:
        schedule.messages[before].next = item
    else:
        _wait(schedule, message.ready, item)


@compiled
def _go_on(schedule: _Schedule, number: int, now: float) -> None:
    """Let a member post all it may."""
    member = schedule.members[number]
    num_members, num_steps = len(schedule.members), len(schedule.gate)
    if not member.has_arrived:
        return
    while True:
        while member.next_step < num_steps and member.oldest >= schedule.gate[member.next_step]:
            cell = member.next_step * num_members + number
            for item in range(schedule.first[cell], schedule.first[cell + 1]):
                _post(schedule, item, now)
            member.next_step += 1
        oldest = member.oldest
        while oldest < member.next_step and schedule.awaited[oldest * num_members + number] == 0:
            oldest += 1
        if oldest == member.oldest:
            break
        member.oldest = oldest
    if member.oldest == num_steps and member.done == math.inf:
        member.done = now


@compiled
def _deliver(schedule: _Schedule, item: int, now: float) -> None:
    message = schedule.messages[item]
    message.finish = now
    if not len(schedule.members):
        return
    if message.next >= 0:
        _wait(schedule, max(now, schedule.messages[message.next].ready), message.next)
    else:
        schedule.last[message.path] = -1
    for cell in (message.source_cell, message.target_cell):
        schedule.awaited[cell] -= 1
        if schedule.awaited[cell] == 0:
            _go_on(schedule, cell % len(schedule.members), now)


@compiled
def _end_due(flows: Records, links: Records, hops: Records, crossing: Records, lists: Records, due: FloatArray,
             blocks: Records, schedule: _Schedule, now: float) -> None:  # fmt: skip
    """Take out what is through by `now`."""
    state = schedule.states[0]
    most_slack = now * (_OF_CLOCK + _OF_DURATION)
    for number in range((state.num_used + SLOTS_IN_BLOCK - 1) // SLOTS_IN_BLOCK):
        if blocks[number].due - most_slack > now:
            continue
        for slot in range(number * SLOTS_IN_BLOCK, (number + 1) * SLOTS_IN_BLOCK):
            if due[slot] - most_slack > now:
                continue
            flow = flows[slot]
            if due[slot] - now * _OF_CLOCK - (now - flow.begun) * _OF_DURATION <= now:
                state.least = min(state.least, flow.rate)
                due[slot] = math.inf
                blocks[number].is_stale = 1
                leave(links, hops, crossing, lists, state, slot)
                _deliver(schedule, flow.message, now)


@compiled
def _begin_ready(flows: Records, links: Records, hops: Records, crossing: Records, lists: Records,
                 path_links: IntArray, schedule: _Schedule, now: float) -> None:  # fmt: skip
    """Let what has waited its latency drain, and members arrive."""
    messages, waiting, state = schedule.messages, schedule.waiting, schedule.states[0]
    while state.num_waiting:
        item = waiting[0].item
        slack = now * _OF_CLOCK
        if item < len(messages):
            slack += messages[item].latency * _OF_DURATION
        if waiting[0].key - slack > now:
            break
        pop(waiting, state.num_waiting)
        state.num_waiting -= 1
        if item >= len(messages):
            schedule.members[item - len(messages)].has_arrived = 1
            _go_on(schedule, item - len(messages), now)
            continue
        message = messages[item]
        route = path_links[message.path]
        if message.num_bytes == 0.0 or route[0] == len(links) - 1:
            _deliver(schedule, item, now)
        else:
            enter(flows, links, hops, crossing, lists, state, route, item, message, now)


@compiled
def _run(schedule: _Schedule, network: LinkArrays) -> None:
    """Go from instant to instant until nothing is due any more."""
    flows, links, hops, crossing, lists, levels, blocks, due, path_links = network
    state = schedule.states[0]
    while True:
        now = next_due(due, blocks, state.num_used)
        if state.num_waiting:
            now = min(now, schedule.waiting[0].key)
        if now == math.inf:
            return
        state.least = math.inf
        _end_due(flows, links, hops, crossing, lists, due, blocks, schedule, now)
        _begin_ready(flows, links, hops, crossing, lists, path_links, schedule, now)
        num_open = find_rates(flows, links, hops, crossing, lists, levels, state)
        set_rates(flows, links, hops, crossing, lists, due, blocks, state, num_open, now)
