"""A plan: what a strategy needs, what holds it up, and the cheapest remedy, each by simulating it again."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from exogym_core.cost.devices import DEFAULT_DEVICE
from exogym_core.names import visible
from exogym_core.planning.measure import Measured
from exogym_core.planning.networks import is_wan, with_links
from exogym_core.planning.step_ratio import law_ratio
from netsim.files.units import format_seconds
from netsim.topology.protocol import Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator

    from exogym_core.planning.measure import Plan, Setting
    from exogym_core.strategy.base import Strategy
    from netsim.topology.graph import Link

__all__ = ["plan"]

_HARDLY_WAITS = 0.05  # of the time: then computing is the limit
_WORTH_IT = 0.1  # of the waiting: what a remedy must take away at least
_MOST_LINKS = 4
_MANY_RANKS = 16  # beyond, simulating a round takes so long that the narrowest link alone is tried
_STREAMS = 8
_FASTER = 2.0
_UNLIKE = 1.01  # times as slow as others: then they wait
_UNEVEN = ("compute of ", "stragglers")


def plan(strategy: Strategy, setting: Setting, label: str | None = None) -> Plan:
    """What `strategy` needs, with what limits it.

    A limit is what, if it were otherwise, would save most of the waiting: the first round is simulated with each
    candidate, its collectives by the algorithms of the plan. The remedy is the cheapest of those that save a tenth of
    the waiting or more: a setting before a line.

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
            remarks=(*setting.remarks, *measured.plan.remarks, *_of_the_law(strategy, setting)),
        )

    known = setting.known
    found = known.once(("plan", known.key_of(strategy), setting.key()), limited)
    return replace(found, strategy=label or type(strategy).__name__)


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
    measured = of.plan
    share = 1 - measured.compute_utilisation
    if share < _HARDLY_WAITS:
        remedy = f"faster devices: a network without limits would save {share:.1%} of the time"
        return {"by": "compute", "saves_seconds_per_round": 0.0, "remedy": remedy}
    waiting = measured.exposed_seconds_per_round
    # The first round meets cold connections: of later ones' waiting as large a share is saved.
    first_waiting = of.first_round_seconds - (measured.seconds_per_round - waiting)
    share_of_first = min(waiting / first_waiting, 1.0) if first_waiting > 0 else 1.0
    tried = []
    for by, remedy, first_round in (*_even_work(of, setting), *_remedies(of, setting)):
        tried.append((by, remedy, min((of.first_round_seconds - first_round) * share_of_first, waiting)))
    windows = sum(saved for by, _, saved in tried if by == "window")
    # Without latency no window is too small either: what more streams save is not latency's.
    causes = [(by, saved - windows if by == "latency" else saved) for by, _, saved in tried]
    by, most = max(causes, key=lambda row: row[1])
    worth = [row for row in tried if row[2] >= _WORTH_IT * waiting]
    if not worth:
        return {
            "by": "links",
            "saves_seconds_per_round": most,
            "remedy": "no single link: fewer bytes (a codec, longer rounds) or more bandwidth everywhere",
        }
    # What is due to work that is not even no line mends.
    chosen = next((row for row in worth if row[0] == by and by.startswith(_UNEVEN)), worth[0])
    saved, of_all = format_seconds(chosen[2]), format_seconds(waiting)
    return {
        "by": by,
        "saves_seconds_per_round": most,
        "remedy": f"{chosen[1]}: saves {saved} of {of_all} of waiting a round",
    }


def _even_work(of: Measured, setting: Setting) -> Iterator[tuple[str, str, float]]:
    """As `_remedies`, where ranks wait for each other's computing: for the slowest's, or by chance."""
    if not of.strategy.is_synchronous:
        return
    seconds = [each.mean_seconds for each in setting.durations()]
    slowest = max(seconds)
    if slowest > _UNLIKE * min(seconds):
        hosts = setting.topology.place(setting.num_ranks, setting.placement)
        slow = [host for host, each in zip(hosts, seconds, strict=True) if each * _UNLIKE >= slowest]
        sites = " and ".join(dict.fromkeys(setting.topology.region_of(host) for host in slow))
        device = setting.compute.device or setting.topology.hosts[slow[0]].device or DEFAULT_DEVICE
        by = f"compute of {visible(sites, 60)} ({device})"
        if setting.compute.kind == "flops" and not setting.batch_by_speed:
            shared = of.first_round_computing(replace(setting, batch_by_speed=True))
            yield by, "sequences shared out by speed (--batch-by-speed)", shared
        # All of a step's work, shared out without a rest.
        even = len(seconds) / sum(1 / each for each in seconds)
        factors = [even / each for each in seconds]
        yield (
            by,
            f"as fast devices as the others', or --without {sites}",
            of.first_round_computing(setting, factors),
        )
    if setting.compute.jitter or setting.compute.straggler_fraction:
        steady = replace(setting.compute, jitter=0.0, straggler_fraction=0.0)
        first = of.first_round_computing(replace(setting, compute=steady))
        yield "stragglers", "steadier devices, or a strategy whose workers go their own pace", first


def _remedies(of: Measured, setting: Setting) -> Iterator[tuple[str, str, float]]:
    """(what would be the limit, what to do, seconds of the first round with it done), the cheapest first."""
    for by, remedy, other in _other_networks(setting):
        yield by, remedy, of.first_round_on(other)


def _other_networks(setting: Setting) -> Iterator[tuple[str, str, Setting]]:
    given = setting.protocol if setting.protocol is not None else setting.topology.protocol
    protocol = Protocol.parse(given)
    if protocol.has_windows:
        mapping = {"preset": given} if isinstance(given, str) else dict(given or {})
        streams = protocol.streams * _STREAMS
        yield (
            "window",
            f"{streams} streams a transfer instead of {protocol.streams}",
            replace(setting, protocol={**mapping, "streams": streams}),
        )
    for link in _narrow_links(setting):
        faster = with_links(setting.topology, partial(_faster, both={link.source, link.target}))
        name = f"link {link.source} - {link.target}"
        yield name, f"twice the bandwidth on {name}", replace(setting, topology=faster)
    nearer = with_links(setting.topology, lambda other: replace(other, latency_seconds=0.0))
    yield "latency", "sites that are nearer, or fewer and larger messages", replace(setting, topology=nearer)


def _faster(link: Link, both: set[str]) -> Link:
    if {link.source, link.target} != both:
        return link
    return replace(link, bits_per_second=link.bits_per_second * _FASTER)


def _narrow_links(setting: Setting) -> list[Link]:
    """The narrowest links that workers' ways use, one direction each."""
    topology = setting.topology
    hosts = sorted(set(topology.place(setting.num_ranks, setting.placement)))[:16]
    used = {link for src in hosts for dst in hosts for link in topology.route(src, dst)}
    links = sorted((topology.links[index] for index in used), key=lambda link: link.bits_per_second)
    found: dict[frozenset[str], Link] = {}
    for link in [link for link in links if is_wan(topology, link)] or links:
        found.setdefault(frozenset((link.source, link.target)), link)
    return list(found.values())[: _MOST_LINKS if setting.num_ranks <= _MANY_RANKS else 1]
