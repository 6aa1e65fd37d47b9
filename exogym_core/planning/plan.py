"""A plan: what a strategy needs, and what shortens its round most when it is doubled, each by simulating it again."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from exogym_core.communicator.simulated.algorithms import algorithms_of
from exogym_core.names import visible
from exogym_core.planning.measure import Measured, measure
from exogym_core.planning.networks import with_links
from exogym_core.planning.step_ratio import law_ratio
from netsim.files.units import format_bits_per_second, format_seconds
from netsim.topology.protocol import Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from exogym_core.planning.measure import Plan, Setting
    from exogym_core.strategy.base import Strategy
    from netsim.topology.graph import Link

__all__ = ["plan"]

_FASTER = 2.0
_CHEAPER = 0.999  # of the dollars: what differs by less is as dear
_AS_MUCH = 0.9  # of the largest saving: then the cheaper remedy is named
_WORTH_IT = 0.01  # of a round: what a remedy must take away at least
_MANY_RANKS = 16  # beyond, simulating a round takes so long that fewer links are tried
_MOST_LINKS, _FEW_LINKS = 4, 2
_MOST_NAMED = 2
_LIKE = 1.25  # times the rate: links that differ by less are doubled together
_UNLIKE = 1.01  # times as slow as others: then they wait


class _Doubled(NamedTuple):
    """One thing that was doubled."""

    by: str
    remedy: str
    saved: float  # share of a round


def plan(strategy: Strategy, setting: Setting, label: str | None = None) -> Plan:
    """What `strategy` needs, with what limits it.

    The limit is what shortens a round most when it is doubled (latency: halved; stragglers: without): later rounds are
    simulated with each, collectives by the algorithms of the plan. Of those that save nearly as much the cheapest is
    named: a setting before a line.

    Args:
        strategy: not set up.
        setting: where.
        label: its name in results; its class's if None.
    """

    def limited() -> Plan:
        measured = Measured(strategy, setting)
        return replace(
            measured.plan,
            limit=_limit(measured, setting),
            cheaper=_cheaper(measured, setting),
            remarks=(*setting.remarks, *measured.plan.remarks, *_of_the_law(strategy, setting)),
        )

    known = setting.known
    found = known.once(("plan", known.key_of(strategy), setting.key()), limited)
    return replace(found, strategy=label or type(strategy).__name__)


def _cheaper(of: Measured, setting: Setting) -> dict[str, Any] | None:
    """The cheapest other algorithm of a collective, where links charge for traffic and `auto` took the fastest."""
    plan = of.plan
    if not plan.cost_by.get("egress") or setting.collectives not in (None, "auto") or plan.cost is None:
        return None
    found: list[tuple[float, dict[str, Any]]] = []
    for op, used in plan.collectives.items():
        for name in algorithms_of(op):
            if name not in used:
                other = measure(of.strategy, replace(setting, collectives={op: name}))
                if other.cost is not None and other.cost < _CHEAPER * plan.cost:
                    told = {"days": other.days, "cost": other.cost, "egress": other.cost_by["egress"]}
                    found.append((other.cost, {"collectives": {op: name}, **told}))
    return min(found, key=lambda row: row[0])[1] if found else None


def _of_the_law(strategy: Strategy, setting: Setting) -> tuple[str, ...]:
    """How many steps DiLoCo's published law takes it to need, where that law speaks of it."""
    workers = setting.num_ranks // (strategy.arguments.get("ranks_per_worker") or 1)
    options = {name: value for name, value in strategy.arguments.items() if value not in (None, "fp32")}
    name = type(strategy).__name__.removesuffix("Strategy")
    ratio = law_ratio(name, options, setting.model.num_parameters, workers, setting.tokens)
    if ratio is None:
        return ()
    return (
        f"to the same loss it needs {ratio.mean:.2f} times data-parallel's steps ({ratio.low:.2f} to "
        f"{ratio.high:.2f}) by {ratio.source}; days are to the tokens, without it",
    )


def _limit(of: Measured, setting: Setting) -> dict[str, Any]:
    of_round = of.plan.seconds_per_round
    before = of.later_round(setting)
    tried = [
        _Doubled(by, remedy, 1 - after / before if before else 0.0)
        for by, remedy, after in (*_networks(of, setting), *_computing(of, setting))
    ]
    most = max(each.saved for each in tried)
    limit = next(each for each in tried if each.saved >= _AS_MUCH * most)
    if most < _WORTH_IT:
        limit = _Doubled(
            "links", "no single thing: fewer bytes (a codec, longer rounds) or a faster network", most
        )
    saved = max(limit.saved, 0.0)
    return {
        "by": limit.by,
        "shortens_by": saved,
        "saves_seconds_per_round": saved * of_round,
        "remedy": f"{limit.remedy}: shortens a round by {saved:.1%}, {format_seconds(saved * of_round)} of "
        + format_seconds(of_round),
        "tried": [
            {"by": each.by, "saves_seconds_per_round": each.saved * of_round}
            for each in sorted(tried, key=lambda each: -each.saved)
        ],
    }


def _networks(of: Measured, setting: Setting) -> Iterator[tuple[str, str, float]]:
    """(what would be the limit, what to do, seconds of a round with it doubled), of the network."""
    given = setting.protocol if setting.protocol is not None else setting.topology.protocol
    protocol = Protocol.parse(given)
    if protocol.has_windows:
        mapping = {"preset": given} if isinstance(given, str) else dict(given or {})
        streams = protocol.streams * 2
        wider = replace(setting, protocol={**mapping, "streams": streams})
        yield "window", f"{streams} streams a transfer instead of {protocol.streams}", of.later_round(wider)
    for name, links in _busiest_links(of, setting):
        faster = with_links(
            setting.topology,
            lambda link, links=links: (  # type: ignore[misc]
                replace(link, bits_per_second=link.bits_per_second * _FASTER) if link in links else link
            ),
        )
        yield name, f"twice the bandwidth on {name}", of.later_round(replace(setting, topology=faster))
    nearer = with_links(
        setting.topology, lambda link: replace(link, latency_seconds=link.latency_seconds / _FASTER)
    )
    yield (
        "latency",
        "sites half as far, or fewer and larger messages",
        of.later_round(replace(setting, topology=nearer)),
    )


def _computing(of: Measured, setting: Setting) -> Iterator[tuple[str, str, float]]:
    """Gains by faster devices, in the manner of `_networks`: the slowest's, chance, and all."""
    seconds = [each.mean_seconds for each in setting.durations()]
    slowest = max(seconds)
    if of.strategy.is_synchronous and slowest > _UNLIKE * min(seconds):
        hosts = setting.topology.place(setting.num_ranks, setting.placement)
        slow = [each * _UNLIKE >= slowest for each in seconds]
        there = dict.fromkeys(host for host, is_slow in zip(hosts, slow, strict=True) if is_slow)
        sites = " and ".join(dict.fromkeys(setting.topology.region_of(host) for host in there))
        device = setting.compute.device or setting.topology.hosts[next(iter(there))].device
        remedy = f"devices there twice as fast, or --without {sites}"
        if setting.compute.kind == "flops" and not setting.batch_by_speed:
            remedy = "sequences shared out by speed (--batch-by-speed), or devices there twice as fast"
        yield (
            f"compute of {visible(sites, 60)}" + (f" ({device})" if device else ""),
            remedy,
            of.later_round(setting, [1 / _FASTER if is_slow else 1.0 for is_slow in slow]),
        )
    if of.strategy.is_synchronous and (setting.compute.jitter or setting.compute.straggler_fraction):
        steady = replace(setting.compute, jitter=0.0, straggler_fraction=0.0)
        remedy = "steadier devices, or a strategy whose workers go their own pace"
        yield "stragglers", remedy, of.later_round(replace(setting, compute=steady), [1.0] * len(seconds))
    yield "compute", "devices twice as fast", of.later_round(setting, [1 / _FASTER] * len(seconds))


def _busiest_links(of: Measured, setting: Setting) -> list[tuple[str, Sequence[Link]]]:
    """Groups of links, those that are busiest for their rate first; links of about one rate are a group."""
    topology = setting.topology
    busy = [
        (num_bytes / link.bits_per_second, link)
        for num_bytes, link in zip(of.figures.link_bytes, topology.links, strict=True)
        if num_bytes and link.bits_per_second
    ]
    groups: list[list[Link]] = []
    for _, link in sorted(busy, key=lambda each: -each[0]):
        rate = link.bits_per_second
        like = next((group for group in groups if 1 / _LIKE < rate / group[0].bits_per_second < _LIKE), None)
        if like is not None:
            like.append(link)
        else:
            groups.append([link])
    most = _MOST_LINKS if setting.num_ranks <= _MANY_RANKS else _FEW_LINKS
    return [(_name_of_links(group), group) for group in groups[:most]]


def _name_of_links(links: Sequence[Link]) -> str:
    pairs = dict.fromkeys(" - ".join(sorted((link.source, link.target))) for link in links)
    if len(pairs) == 1:
        return f"link {next(iter(pairs))}"
    named = ", ".join(list(pairs)[:_MOST_NAMED])
    more = f" and {len(pairs) - _MOST_NAMED} more" if len(pairs) > _MOST_NAMED else ""
    return f"{len(pairs)} links of about {format_bits_per_second(links[0].bits_per_second)} ({named}{more})"
