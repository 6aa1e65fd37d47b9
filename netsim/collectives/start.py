"""Start collectives on a live network: schedules become plans that their members walk through."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from netsim.collectives.schedules.direct import all_to_all_direct
from netsim.network.collective import Collective, GlooCollective, Plan, StepMessages

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from netsim.collectives.schedules.schedule import Schedule, Step
    from netsim.network.network import Network

__all__ = ["Collective", "start_all_to_all", "start_collective"]

# The messages of a schedule with more of them are made step by step each time, and not kept.
_MOST_KEPT_MESSAGES = 100_000


def start_collective(
    network: Network,
    schedule: Schedule,
    hosts: Sequence[int],
    *,
    group: Hashable = None,
    on_done: Callable[[int], None],
) -> Collective:
    """Start one collective among members on `hosts`; nothing happens before they `arrive`.

    Args:
        network: on whose links and clock it runs.
        schedule: what is sent.
        hosts: the host of each member; members may share one.
        group: names the connections it uses; collectives of one group share them, and their state.
        on_done: called with a member's position at the instant it is through, which may be before others
            arrive (the root of a broadcast), and within `arrive` where nothing is to be waited for.
    """
    plan = network.remember(schedule, partial(_plan, schedule))
    return _start(network, plan, hosts[: schedule.num_ranks], group, on_done)


def start_all_to_all(
    network: Network,
    hosts: Sequence[int],
    *,
    group: Hashable = None,
    on_done: Callable[[int], None],
) -> tuple[Callable[[int, Sequence[int]], None], Callable[[], None]]:
    """Start an all_to_all whose sizes become known member by member, as each enters.

    Args:
        network, hosts, group, on_done: as for `start_collective`.

    Returns:
        A function that lets a member enter now with the bytes that it has for each member, and `Collective.cancel`.
    """
    num = len(hosts)
    src, dst = network.remember(("all_to_all", num), partial(_pairs, num))
    messages = StepMessages(num, src, dst, [0.0] * len(src))
    started = _start(network, Plan(num, [0], lambda index: messages, True, False), hosts, group, on_done)

    def enter(member: int, row: Sequence[int]) -> None:
        for send in range(messages.first[member], messages.first[member + 1]):
            messages.sizes[send] = float(row[messages.targets[send]])
        started.arrive(member)

    return enter, started.cancel


def _start(
    network: Network, plan: Plan, hosts: Sequence[int], group: Hashable, on_done: Callable[[int], None]
) -> Collective:
    kind = GlooCollective if network.protocol.rendezvous else Collective
    engine = network.engine
    return kind(engine, plan, list(hosts), engine.group(group), on_done)


def _plan(schedule: Schedule) -> Plan:
    is_kept = schedule.num_messages <= _MOST_KEPT_MESSAGES

    def make(index: int) -> StepMessages:
        return _messages(schedule.num_ranks, schedule.step(index))

    return Plan(schedule.num_ranks, schedule.gates, make, is_kept, schedule.op == "sendrecv")


def _messages(num_ranks: int, step: Step) -> StepMessages:
    sizes = step.num_bytes.astype(np.float64).tolist()
    return StepMessages(num_ranks, step.src.tolist(), step.dst.tolist(), sizes)


def _pairs(num: int) -> tuple[list[int], list[int]]:
    """Sender and receiver of each message of an all_to_all, each sender's in the order of posting."""
    (phase,) = all_to_all_direct(num, np.arange(num * num + 1, dtype=np.int64))
    step = phase.step(0)
    return step.src.tolist(), step.dst.tolist()
