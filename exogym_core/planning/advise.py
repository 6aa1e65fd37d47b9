"""Advice: which strategy with which settings gets a budget of tokens through first, and for what money."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from exogym_core.planning.alike import merged
from exogym_core.planning.groups import group_seconds, groupings
from exogym_core.planning.measure import Plan, Setting, measure
from exogym_core.planning.ring_order import ring_orders
from exogym_core.planning.search import climbed
from exogym_core.planning.step_ratio import Ratio, law_ratio
from exogym_core.strategy import STRATEGIES, build_strategy
from netsim.topology.protocol import Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from netsim.topology.topology import Topology

__all__ = ["CANDIDATES", "SEARCHED", "advise", "candidates"]

_STREAMS = (8, 64)
_MOST_IN_GROUPS = 16  # ranks that all run, since those of a group meet others than those of another
_GROUP_STEPS = 30  # steps a round between groups
_MOST_GROUPINGS = 2  # of which rounds are planned
_REFINED = 3  # of the fastest candidates, how many are tried with more streams
_MOST_SEARCHED = 10  # plans of a search for tau and fragments
_MOST_LEFT_OUT = 6  # sites that are left out in turn, those with the narrowest ways
_MOST_COMPARED = 8  # ways by which a site's width is judged
_MOST_OUTSIDE = 3  # sites that are left out together

#: Options that are searched, of strategies that have them; the first matters most to a loss.
SEARCHED: Mapping[str, Mapping[str, int]] = {"StreamingDiLoCo": {"tau": 0, "num_fragments": 4}}

#: Strategies and options that are tried; those that are not here yet are left out.
CANDIDATES: Sequence[tuple[str, Mapping[str, Any]]] = (
    ("AllReduce", {}),
    ("AllReduce", {"codec": "bf16"}),
    ("DiLoCo", {"H": 30}),
    ("DiLoCo", {"H": 100}),
    ("DiLoCo", {"H": 500}),
    ("DiLoCo", {"H": 30, "codec": "int8"}),
    ("DiLoCo", {"H": 100, "codec": "int8"}),
    ("DiLoCo", {"H": 500, "codec": "int8"}),
    ("StreamingDiLoCo", {"H": 100}),
    ("StreamingDiLoCo", {"H": 100, "codec": "int8"}),
    ("StreamingDiLoCo", {"H": 100, "codec": "int8", "tau": 5}),
    ("StreamingDiLoCo", {"H": 100, "codec": "int8", "tau": 10, "num_fragments": 4}),
    ("SparseLoCo", {"H": 30}),
    ("DeMo", {}),
)


def advise(
    setting: Setting,
    ratios: Mapping[str, Ratio] | None = None,
) -> dict[str, Any]:
    """Plan many strategies and settings, and rank them by the time they need to the budget of tokens.

    What does not fit into the devices' memory is ranked last.

    Args:
        setting: with `tokens`.
        ratios: steps to the same loss by strategy; their days are multiplied with the mean. Without one for any of
            them, DiLoCo's published scaling law is applied to those of which it speaks.

    Returns:
        `ranked` (mappings of plans with `options`, `alike`: other options that take as long, `streams`, `groups` of
        hosts that act as one, `left_out`, `worker_hours`, `days_low`, `days_high` and `pareto`), `ring`, `explained`:
        what may surprise, and `unknown`: what the ranking does not know.
    """
    rows = [_row(name, options, setting) for name, options in candidates(setting)]
    rows += _grouped(setting, min(row["seconds_per_step"] for row in rows))
    rows = merged(sorted([*rows, *_searched(rows, setting)], key=_place), SEARCHED)
    protocol = setting.protocol if setting.protocol is not None else setting.topology.protocol
    if Protocol.parse(protocol).has_windows:
        mapping = {"preset": protocol} if isinstance(protocol, str) else dict(protocol or {})
        rows += [
            {**_row(row["strategy"], row["options"], faster), "streams": streams, "groups": row["groups"]}
            for row in rows[:_REFINED]
            for streams in _STREAMS
            for faster in [replace(_placed(setting, row), protocol={**mapping, "streams": streams})]
        ]
    best = min(rows, key=_place)
    explained = [*_explained(rows), *_what_would_fit(rows, setting)]
    rows += _smaller(best, setting)
    for row in rows:
        _apply(_ratio_of(row, setting, ratios), row)
    rows = merged(sorted(rows, key=_place), SEARCHED)
    rows.sort(key=_place)
    _mark_front(rows)
    payload = 4 * setting.model.num_parameters
    return {
        "ranked": rows,
        "ring": ring_orders(setting.topology, payload, setting.protocol),
        "explained": explained,
        "unknown": _unknown(rows, ratios),
    }


def candidates(setting: Setting) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Strategies and options that are tried; those that are not here yet are left out."""
    for name, options in CANDIDATES:
        if name in STRATEGIES:
            yield name, options


def _grouped(setting: Setting, soonest: float) -> Iterator[dict[str, Any]]:
    """Rounds between groups of near hosts, which average gradients at each step inside.

    For each number of groups its hosts are searched; those that are soonest by one collective inside and one between
    are planned, unless gradients inside alone take longer than the soonest step of all others.
    """
    if setting.num_ranks > _MOST_IN_GROUPS:
        return
    topology = setting.topology
    hosts = topology.place(setting.num_ranks, setting.placement)
    payload = 4 * setting.model.num_parameters
    found = []
    for grouping in groupings(topology, hosts, payload):
        inside, between = group_seconds(topology, hosts, grouping, payload)
        if inside < soonest:
            found.append((_GROUP_STEPS * inside + between, grouping))
    for _, (size, order) in sorted(found)[:_MOST_GROUPINGS]:
        names = [topology.hosts[hosts[place]].name for place in order]
        options = {"H": _GROUP_STEPS, "codec": "int8", "ranks_per_worker": size}
        row = _row("DiLoCo", options, replace(setting, placement=names))
        yield {**row, "groups": [names[at : at + size] for at in range(0, len(names), size)]}


def _ratio_of(row: Mapping[str, Any], setting: Setting, ratios: Mapping[str, Ratio] | None) -> Ratio | None:
    """By the user's runs where there are any, else by the published law."""
    if ratios:
        return ratios.get(row["strategy"])
    workers = row["workers"] // row["options"].get("ranks_per_worker", 1)
    return law_ratio(row["strategy"], row["options"], setting.model.num_parameters, workers, setting.tokens)


def _apply(ratio: Ratio | None, row: dict[str, Any]) -> None:
    """Days and money of a row, and their range, by how many steps it needs.

    A law that has a strategy need fewer steps than data-parallel counts as 1, as it does not speak of all strategies.
    """
    low, mean, high = (ratio.low, ratio.mean, ratio.high) if ratio else (1.0, 1.0, 1.0)
    if ratio is not None and ratio.is_law:
        mean, high = max(mean, 1.0), max(high, 1.0)
    days = row["days"]
    row |= {"days": days * mean, "days_low": days * low, "days_high": days * high}
    row["worker_hours"] *= mean
    row["cost"] = None if row["cost"] is None else row["cost"] * mean
    row["cost_by"] = {of: None if part is None else part * mean for of, part in row["cost_by"].items()}
    row["steps_ratio"] = vars(ratio) if ratio else None


def _searched(rows: Sequence[dict[str, Any]], setting: Setting) -> list[dict[str, Any]]:
    """From the best of each strategy whose options are searched, what the search has planned."""
    found = []
    for name, starts in SEARCHED.items():
        own = [row for row in rows if row["strategy"] == name]
        if not own:
            continue
        best = min(own, key=_place)
        start = {**best["options"], **{key: best["options"].get(key, least) for key, least in starts.items()}}

        def planned(options: Mapping[str, Any], name: str = name) -> dict[str, Any]:
            return _row(name, options, setting)

        found += [dict(row) for row in climbed(start, best, list(starts), planned, _MOST_SEARCHED)]
    return found


def _explained(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Which hosts are groups; where a codec makes a strategy slower, as its values go other ways."""
    told = [
        f"ranks_per_worker={row['options']['ranks_per_worker']}: hosts that average gradients at each step are "
        + " | ".join(", ".join(group) for group in row["groups"])
        for row in rows
        if row["groups"] and not row["streams"]
    ]
    for row in rows:
        plain = {key: value for key, value in row["options"].items() if key != "codec"}
        same = next(
            (other for other in rows if other["strategy"] == row["strategy"] and other["options"] == plain),
            None,
        )
        if "codec" in row["options"] and same is not None and row["days"] > same["days"]:
            told.append(
                f"{row['strategy']} is slower in {row['options']['codec']}: codes cannot be added up on the way, so "
                f"each part goes to one rank and its mean to all, {row['wan_bytes'] / 1e9:.3g} GB between sites a "
                f"round instead of {same['wan_bytes'] / 1e9:.3g} GB"
            )
    return told


def _what_would_fit(rows: Sequence[Mapping[str, Any]], setting: Setting) -> list[str]:
    """Where nothing fits into the devices' memory, how many devices a worker what needs least would fit into."""
    if any(row["fits"] is not False for row in rows):
        return []
    least = min(rows, key=lambda row: row["memory_per_worker"])
    needed, available = least["memory_per_worker"], least["memory_available"]
    given = setting.devices_per_worker
    more = f"{math.ceil(10 * needed / available) / 10:g} times the devices of a worker"
    if isinstance(given, int):
        more = f"--devices-per-worker {math.ceil(needed * given / available)}"
    return [
        f"nothing fits: states take {needed / 1e9:.3g} GB at the least ({least['strategy']}) of a worker's "
        f"{available / 1e9:.3g} GB: {more}, or shard them"
    ]


def _place(row: Mapping[str, Any]) -> tuple[bool, float]:
    """What fits into the devices' memory comes first, and what is sooner."""
    return row["fits"] is False, row["days"]


def _placed(setting: Setting, row: Mapping[str, Any]) -> Setting:
    """The setting with ranks where a row has its groups."""
    if row["groups"] is None:
        return setting
    return replace(setting, placement=[host for group in row["groups"] for host in group])


def _row(name: str, options: Mapping[str, Any], setting: Setting) -> dict[str, Any]:
    made: Plan = measure(build_strategy(name, **options), setting, name)
    days = made.days or 0.0
    return {
        **made.to_mapping(),
        "options": dict(options),
        "streams": None,
        "left_out": None,
        "groups": None,
        "workers": setting.num_ranks,
        "worker_hours": days * 24 * setting.num_ranks,
    }


def _smaller(best: Mapping[str, Any], setting: Setting) -> list[dict[str, Any]]:
    """The best without one site, and without more while that is sooner, if every worker has a host of its own.

    Of groups that lie in several sites none is broken up.
    """
    setting = _placed(setting, best)
    topology = setting.topology
    hosts = topology.place(setting.num_ranks, setting.placement)
    if len(set(hosts)) < len(hosts):
        return []
    rows: list[dict[str, Any]] = []
    outside: list[str] = []
    soonest = best["days"]
    while len(outside) < _MOST_OUTSIDE:
        sites = [
            site
            for site in _narrowest_first(setting, hosts)
            if site not in outside and not _is_part_of_a_group(site, best, topology)
        ]
        if len(sites) < 3:
            break
        tried = [_without([*outside, site], best, setting) for site in sites[:_MOST_LEFT_OUT]]
        rows += tried
        row = min(tried, key=_place)
        if row["fits"] is False or row["days"] >= soonest:
            break
        soonest, outside = row["days"], row["left_out"].split(" and ")
    return rows


def _narrowest_first(setting: Setting, hosts: Sequence[int]) -> list[str]:
    """Sites in the order of the widest of their ways to others, the narrowest first."""
    topology = setting.topology
    first: dict[str, int] = {}
    for host in hosts:
        first.setdefault(topology.region_of(host), host)
    widest = dict.fromkeys(first, 0.0)
    names = list(first)
    for place, site in enumerate(names):
        # Of very many sites a few others tell how wide a site's ways are.
        for other in names[:_MOST_COMPARED] if place >= _MOST_COMPARED else names[: _MOST_COMPARED + 1]:
            if other != site:
                links = topology.route(first[site], first[other])
                narrowest = min((topology.links[link].bits_per_second for link in links), default=0.0)
                widest[site] = max(widest[site], narrowest)
    return sorted(names, key=lambda site: widest[site])


def _without(sites: Sequence[str], best: Mapping[str, Any], setting: Setting) -> dict[str, Any]:
    """What the best candidate needs without some sites."""
    topology = setting.topology
    smaller = setting.without(sites)
    if best["streams"]:
        protocol = setting.protocol if setting.protocol is not None else topology.protocol
        mapping = {"preset": protocol} if isinstance(protocol, str) else dict(protocol or {})
        smaller = replace(smaller, protocol={**mapping, "streams": best["streams"]})
    made = _row(best["strategy"], best["options"], smaller)
    groups = [group for group in best["groups"] or () if set(group) <= set(smaller.placement or ())] or None
    return {**made, "streams": best["streams"], "groups": groups, "left_out": " and ".join(sites)}


def _is_part_of_a_group(site: str, row: Mapping[str, Any], topology: Topology) -> bool:
    """Whether a group has hosts of this site and of others."""
    for group in row["groups"] or ():
        regions = {topology.region_of(topology.host_index(host)) for host in group}
        if site in regions and len(regions) > 1:
            return True
    return False


def _mark_front(rows: Sequence[dict[str, Any]]) -> None:
    """Mark what no other row beats in both days and money (worker hours where no price is known)."""
    cheapest = float("inf")
    for row in rows:  # by days, what does not fit at the end
        priced = row["cost_by"].get("workers") is not None
        money = row["cost"] if priced else row["worker_hours"]
        row["pareto"] = money < cheapest and row["fits"] is not False
        cheapest = min(cheapest, money)


def _unknown(rows: Sequence[Mapping[str, Any]], ratios: Mapping[str, Ratio] | None) -> list[str]:
    told = [
        "the loss at this scale: strategies are ranked by time to the same number of tokens, as if each needed as "
        "many steps to a loss, but for the ratios named here"
    ]
    told += _told_ratios(rows, ratios) if ratios else _told_law(rows)
    told.append(
        "what lost workers, weather and other people's traffic cost, unless the topology or --set has them"
    )
    if any(row["fits"] is False for row in rows):
        told.append(
            "how states that do not fit are sharded or offloaded: such rows are ranked last, and their times take "
            "them to fit"
        )
    told.append("what activations take of a device's memory: weights, gradients and states are counted")
    return told


def _told_ratios(rows: Sequence[Mapping[str, Any]], ratios: Mapping[str, Ratio]) -> list[str]:
    told = [
        f"{name}: {ratio.mean:.2f} times the steps ({ratio.low:.2f} to {ratio.high:.2f}) by {ratio.source}; "
        "measured on a small model, and applied as it is"
        for name, ratio in ratios.items()
    ]
    missing = sorted({row["strategy"] for row in rows} - set(ratios))
    return told + ([f"no ratio of steps for {', '.join(missing)}: taken as 1"] if missing else [])


def _told_law(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The law's ratios, one for each number of workers, as its plainest row has it; else that it says nothing."""
    lawful = [row for row in rows if row["steps_ratio"] is not None]
    if not lawful:
        return [
            "DiLoCo's scaling law (arXiv 2503.09799) is for 35M to 10B parameters, up to 8 workers, H from 30 on "
            "and 10 to 320 tokens a parameter: it is not applied here; --runs applies steps of a run of yours"
        ]
    plainest: dict[float, Mapping[str, Any]] = {}
    for row in sorted(lawful, key=lambda row: len(row["steps_ratio"]["source"])):
        plainest.setdefault(row["steps_ratio"]["mean"], row["steps_ratio"])
    told = [
        f"DiLoCo and StreamingDiLoCo: {ratio['mean']:.2f} times data-parallel's steps ({ratio['low']:.2f} to "
        f"{ratio['high']:.2f}) by {ratio['source']}"
        + ("; fewer than data-parallel's count as 1" if ratio["mean"] < 1 else "")
        for ratio in plainest.values()
    ]
    told.append(
        "what longer rounds than H = 30, codecs and fragments add to that ratio (the law has none of them), and that "
        "of every other strategy, taken as 1; --runs applies steps of a run of yours"
    )
    return told
