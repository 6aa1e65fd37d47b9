"""Plan of a strategy with its limit: the resource whose doubling shortens a round most, found by simulation."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from exogym_core.names import strategy_name, visible
from exogym_core.run.request import by_speed_conflict
from netgym.planning.measure import Measured
from netgym.planning.rounds import other_algorithms
from netgym.planning.step_ratio import law_ratio
from netsim.collectives.choice import parse_collectives
from netsim.collectives.schedules.direct import STORE
from netsim.errors import NetsimError
from netsim.topology.limits import transfer_limits
from netsim.topology.protocol import unlimited_cores
from netsim.units import format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from exogym_core.strategy.base import Strategy
    from netgym.planning.measure import Plan, Setting

__all__ = ["plan"]

_FASTER = 2.0
_CHEAPER = 0.999  # of the dollars: plans that differ by less cost the same
_AS_MUCH = 0.9  # of the largest saving: then the cheaper remedy is named
_WORTH_IT = 0.01  # of a round: a remedy must save this share
_MANY_RANKS = 16  # beyond, simulating a round takes so long that fewer links are tried
_MOST_LINKS, _FEW_LINKS = 4, 2
_MOST_NAMED = 2
_UNLIKE = 1.01  # times as slow as others: then they wait


class _Doubling(NamedTuple):
    """A resource to double."""

    by: str
    remedy: str
    at_most: float  # seconds of a round that it can save
    later_round: Callable[[], float]  # seconds of one with it doubled


def plan(strategy: Strategy, setting: Setting, label: str | None = None) -> Plan:
    """Plan of `strategy`, with its limit.

    The limit is the resource that shortens a round most when it is doubled (latencies halved, stragglers removed):
    later rounds are simulated with each, with the collective algorithms of the plan. Of those that save nearly as much,
    the cheapest is named: a setting before a link.

    Args:
        strategy: not set up.
        setting: where.
        label: its name in results; the strategy's if None.
    """

    def limited() -> Plan:
        setting.known.purpose = "rounds"
        measured = Measured(strategy, setting)
        others = []
        if measured.plan.cost_by.get("egress"):
            fixed = parse_collectives(setting.collectives)
            for op, name in other_algorithms(strategy, setting):
                others.append(Measured(strategy, replace(setting, collectives={**fixed, op: name})).plan)
        found = replace(measured.setting, dollars=None)  # with the tokens that they pay for
        remarks = (*setting.remarks, *measured.plan.remarks, *_of_the_law(strategy, found))
        used = {*chain.from_iterable(measured.plan.collectives.values())}
        with suppress(NetsimError):  # calls that depend on the time do not tell their store
            calls = measured.rounds.calls_of(0) if STORE in used else []
            names = dict.fromkeys(call.store for call, _ in calls if call.store is not None)
            stores = [host for store, *relays in names for host in found.topology.store_hosts(store, relays)]
            if (spare := setting.spare_streams(stores, go_alone=used == {STORE})) is not None:
                remarks += (spare,)
        if (cores := unlimited_cores(found.topology, found.resolved_protocol, found.hosts)) is not None:
            remarks += (cores,)
        return replace(
            measured.plan,
            limit=_limit(measured, found),
            cheaper=_cheaper(measured.plan, others),
            remarks=remarks,
        )

    found = setting.known.once(("plan", strategy, setting), limited)
    return found if label is None else replace(found, strategy=label)


def _cheaper(plan: Plan, others: Sequence[Plan]) -> dict[str, Any] | None:
    """The cheapest of the plans with other algorithms, if it costs less."""
    if plan.cost is None:
        return None
    cheapest = min(others, key=lambda other: other.cost or math.inf, default=plan)
    if cheapest.cost is None or cheapest.cost >= _CHEAPER * plan.cost:
        return None
    values = {"days": cheapest.days, "cost": cheapest.cost, "egress": cheapest.cost_by["egress"]}
    return {"collectives": cheapest.algorithm, **values}


def _of_the_law(strategy: Strategy, setting: Setting) -> tuple[str, ...]:
    """Remark on the ratio of steps by DiLoCo's published law, where the law applies."""
    workers = setting.num_ranks // (strategy.arguments.get("ranks_per_worker") or 1)
    options = {name: value for name, value in strategy.arguments.items() if value not in (None, "fp32")}
    ratio = law_ratio(strategy_name(strategy), options, setting.model.num_parameters, workers, setting.tokens)
    if ratio is None:
        return ()
    return (
        f"to the same loss it needs {ratio.mean:.2f} times data-parallel's steps ({ratio.low:.2f} to "
        f"{ratio.high:.2f}) by {ratio.source}; days are to the tokens, without it",
    )


def _limit(of: Measured, setting: Setting) -> dict[str, Any]:
    """Find the limit; doublings that can save less than nine tenths of the best so far are not simulated."""
    setting.known.purpose = "rounds for the limit"
    of_round, before = of.plan.seconds_per_round, of.own_round()
    doublings = [*_networks(of, setting), *_computing(of, setting)]
    saved: dict[str, float] = {}
    most = 0.0
    for each in sorted(doublings, key=lambda each: -each.at_most):
        if before and each.at_most >= max(_WORTH_IT, _AS_MUCH * most) * before:
            setting.known.purpose = f"rounds for the limit, {each.by}"
            saved[each.by] = 1 - each.later_round() / before
            most = max(most, saved[each.by])
    by, remedy = "links", "no single thing: fewer bytes (a codec, longer rounds) or a faster network"
    if most >= _WORTH_IT:
        enough = (each for each in doublings if saved.get(each.by, -1.0) >= _AS_MUCH * most)
        by, remedy, *_ = next(enough)
    share = saved.get(by, most)
    return {
        "by": by,
        "shortens_by": share,
        "saves_seconds_per_round": share * of_round,
        "remedy": f"{remedy} (shortens a round by {share:.1%}, {format_seconds(share * of_round)} of "
        f"{format_seconds(of_round)})",
        "tried": [
            {"by": by, "saves_seconds_per_round": share * of_round}
            for by, share in sorted(saved.items(), key=lambda item: -item[1])
        ],
    }


def _networks(of: Measured, setting: Setting) -> Iterator[_Doubling]:
    """Doublings of the network: of each of its limits, the cheapest remedy first."""
    num_rounds = len(of.figures.round_seconds)
    found = list(
        transfer_limits(
            setting.topology,
            setting.resolved_protocol.for_ranks(setting.hosts),
            [num_bytes / num_rounds for num_bytes in of.figures.link_bytes],
            _MOST_LINKS if setting.num_ranks <= _MANY_RANKS else _FEW_LINKS,
        )
    )
    waiting = of.plan.exposed_seconds_per_round
    if (
        of.strategy.is_synchronous
    ):  # bytes take a link or a process as long whatever the latency and the streams
        busiest = max((each.busy_seconds or 0.0 for each in found), default=0.0)
        waiting = min(waiting, of.plan.seconds_per_round - busiest)
    for each in found:
        there = replace(setting, topology=each.topology, protocol=each.protocol)
        at_most = waiting if each.busy_seconds is None else each.busy_seconds / _FASTER
        yield _Doubling(each.by, each.remedy, at_most, partial(of.later_round, there))


def _computing(of: Measured, setting: Setting) -> Iterator[_Doubling]:
    """Faster devices: the slowest site's, steady ones, and all."""
    seconds = [each.mean_seconds for each in setting.durations()]
    slowest = max(seconds)
    at_most = slowest * of.plan.steps_per_round / _FASTER
    is_steady = not setting.compute.varies
    if not (of.strategy.is_synchronous and is_steady):
        at_most = of.plan.seconds_per_round
    if of.strategy.is_synchronous and slowest > _UNLIKE * min(seconds):
        slow = [each * _UNLIKE >= slowest for each in seconds]
        there = dict.fromkeys(host for host, is_slow in zip(setting.hosts, slow, strict=True) if is_slow)
        names = list(dict.fromkeys(setting.topology.region_of(host) for host in there))
        device = setting.compute.device or setting.topology.hosts[next(iter(there))].device
        remedy = f"devices there twice as fast, or {' '.join(f'--without {name}' for name in names)}"
        takes_speed = not setting.batch_by_speed and by_speed_conflict(of.strategy, setting.stages) is None
        if setting.compute.flops is not None and takes_speed:
            remedy = "--batch-by-speed (sequences shared out by speed), or devices there twice as fast"
        factors = [1 / _FASTER if is_slow else 1.0 for is_slow in slow]
        sites = " and ".join(names) if len(names) <= _MOST_NAMED else f"{names[0]} ... {names[-1]}"
        by = f"compute of {visible(sites, 60)}" + (f" ({device})" if device else "")
        yield _Doubling(by, remedy, at_most, partial(of.later_round, setting, factors))
    if of.strategy.is_synchronous and not is_steady:
        steady = setting.compute.model_copy(update={"jitter": 0.0, "stragglers": None})
        remedy = "steadier devices, or a strategy whose workers go their own pace"
        later = partial(of.later_round, replace(setting, compute=steady), [1.0] * len(seconds))
        yield _Doubling("stragglers", remedy, at_most, later)
    later = partial(of.later_round, setting, [1 / _FASTER] * len(seconds))
    yield _Doubling("compute", "devices twice as fast", at_most, later)
