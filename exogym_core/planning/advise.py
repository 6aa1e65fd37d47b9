"""Advice: which strategy with which settings gets a budget of tokens through first, and for what money."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from exogym_core.planning.alike import merged
from exogym_core.planning.groups import group_seconds, groupings
from exogym_core.planning.measure import Plan, Setting, measure
from exogym_core.planning.ring_order import ring_orders
from exogym_core.planning.search import climbed
from exogym_core.planning.step_ratio import Ratio, steps_range
from exogym_core.strategy import STRATEGIES, build_strategy
from netsim.topology.protocol import Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from netsim.topology.topology import Topology

__all__ = ["CANDIDATES", "SEARCHED", "Advice", "advise", "candidates"]

_STREAMS = (8, 64)
_MOST_IN_GROUPS = 16  # ranks that all run, since those of a group meet others than those of another
_GROUP_STEPS = 30  # steps a round between groups
_MOST_GROUPINGS = 2  # of which rounds are planned
_MOST_SEARCHED = 10  # plans of a search for options
_WORTH_SEARCHING = 2.0  # times the days of a strategy's best codec
_BUCKET_BYTES, _BUCKETS = 26_214_400, 16  # a large model begins with so many buckets, not with thousands
_ABOUT = 50  # plans that are made in all
_MOST_LEFT_OUT = 6  # sites that are left out in turn, those with the narrowest ways
_MORE_LEFT_OUT = 3  # when one is left out already
_MOST_COMPARED = 8  # ways by which a site's width is judged
_MOST_OUTSIDE = 3  # sites that are left out together

#: Options that are searched, of strategies that have them; the first matters most to a loss.
SEARCHED: Mapping[str, Mapping[str, int]] = {
    "AllReduce": {"bucket_bytes": _BUCKET_BYTES},
    "StreamingDiLoCo": {"tau": 0, "num_fragments": 4},
}

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

    Args:
        setting: with `tokens`.
        ratios: steps to the same loss by strategy, of own runs; of others what `steps_range` says.

    Returns:
        As `Advice.result`.
    """
    found = Advice(setting, ratios)
    found.search()
    return found.result()


class Advice:
    """A search for the soonest and cheapest way to a budget of tokens.

    Args:
        setting: with `tokens`.
        ratios: steps to the same loss by strategy, of own runs; of others what `steps_range` says.
        tell: called before each plan with how many were made, about how many there will be, and the next one's name.

    Attributes:
        rows: every plan so far, as a mapping; may be read while the search goes on.
    """

    def __init__(
        self,
        setting: Setting,
        ratios: Mapping[str, Ratio] | None = None,
        tell: Callable[[int, int, str], None] | None = None,
    ) -> None:
        self.rows: list[dict[str, Any]] = []
        self._setting, self._ratios, self._tell = setting, ratios, tell
        self._explained: list[str] = []

    def search(self) -> None:
        """Plan candidates, and from the best of each strategy its options, streams, groups of hosts and sites."""
        setting = self._setting
        for name, options in candidates(setting):
            self._plan(name, options, setting)
        self._search_options()
        self._group()
        self._explained = [*_explained(self.rows), *_what_would_fit(self.rows, setting)]
        self._widen()
        self._leave_out()

    def result(self) -> dict[str, Any]:
        """Results so far.

        Returns:
            `ranked` (mappings of plans with `options`, `alike`: other options that take as long, `streams`, `groups` of
            hosts that act as one, `left_out`, `worker_hours`, `steps_ratio`, the bands `days_low`, `days`, `days_high`
            and `cost_low`, `cost`, `cost_high`, and `place`: rows of one place are equal, as their bands overlap),
            `dominated`: others, which one of these beats in time and money; `ring`, `explained`: what may surprise, and
            `unknown`: what the ranking does not know.
        """
        setting = self._setting
        rows = [self._with_bands(row) for row in self.rows]
        rows = merged(sorted(rows, key=_order), SEARCHED)
        kept = [row for row in rows if not any(_beats(other, row) for other in rows)]
        baseline = min((row for row in rows if row["strategy"] == "AllReduce"), key=_order, default=None)
        if baseline is not None and baseline not in kept:
            kept.append(baseline)
        for row in kept:
            row["place"] = 1 + sum(_is_sooner(other, row) for other in kept)
            row["pareto"] = row["fits"] is not False and not any(_beats(other, row) for other in rows)
        kept.sort(key=lambda row: (row["fits"] is False, row["place"], *_order(row)))
        return {
            "ranked": kept,
            "dominated": [row for row in rows if row not in kept],
            "ring": ring_orders(setting.topology, 4 * setting.model.num_parameters, setting.protocol),
            "explained": self._explained,
            "unknown": _unknown(kept, self._ratios),
        }

    def _with_bands(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """A row with what its strategy needs in time and money to the loss that data-parallel has after the budget."""
        ratio = self._ratio_of(row)
        low, mean, high = ratio.low, ratio.mean, ratio.high
        cost = row["cost"]

        def times(amount: float | None, factor: float) -> float | None:
            return None if amount is None or math.isinf(factor) else amount * factor

        return {
            **row,
            "days_low": row["days"] * low,
            "days": row["days"] * mean,
            "days_high": times(row["days"], high),
            "cost_low": times(cost, low),
            "cost": times(cost, mean),
            "cost_high": times(cost, high),
            "cost_by": {of: times(part, mean) for of, part in row["cost_by"].items()},
            "worker_hours": row["worker_hours"] * mean,
            "steps_ratio": ratio.told(),
        }

    def _ratio_of(self, row: Mapping[str, Any]) -> Ratio:
        """By the user's runs where there are any, else by what was published or measured here."""
        name, options = row["strategy"], row["options"]
        if self._ratios and name in self._ratios:
            return self._ratios[name]
        workers = row["workers"] // options.get("ranks_per_worker", 1)
        return steps_range(name, options, self._setting.model.num_parameters, workers, self._setting.tokens)

    def _plan(self, name: str, options: Mapping[str, Any], setting: Setting, **labels: Any) -> dict[str, Any]:
        """Plan one row more; `labels`: what is to be known of its setting."""
        if self._tell is not None:
            told = ", ".join(f"{key}={value}" for key, value in options.items())
            self._tell(len(self.rows), max(_ABOUT, len(self.rows) + 1), f"{name}({told})")
        made: Plan = measure(build_strategy(name, **options), setting, name)
        row = {
            **made.to_mapping(),
            "options": dict(options),
            "streams": None,
            "left_out": None,
            "groups": None,
            "workers": setting.num_ranks,
            "worker_hours": (made.days or 0.0) * 24 * setting.num_ranks,
            **labels,
        }
        self.rows.append(row)
        return row

    def _search_options(self) -> None:
        """From the best of each strategy whose options are searched, with each codec that is nearly as soon."""
        for name, starts in SEARCHED.items():
            best: dict[Any, dict[str, Any]] = {}
            for row in sorted((row for row in self.rows if row["strategy"] == name), key=_order):
                best.setdefault(row["options"].get("codec"), row)
            soonest = min((row["days"] for row in best.values()), default=0.0)
            for row in best.values():
                if row["days"] <= _WORTH_SEARCHING * soonest:
                    start = {**row["options"]}
                    start |= {key: start.get(key, least) for key, least in starts.items()}
                    planned = partial(self._plan, name, setting=self._setting)
                    climbed(start, row, list(starts), planned, _MOST_SEARCHED)

    def _group(self) -> None:
        """Rounds between groups of near hosts, which average gradients at each step inside.

        For each number of groups its hosts are searched; those that are soonest by one collective inside and one
        between are planned, unless gradients inside alone take longer than the soonest step of all others.
        """
        setting = self._setting
        if setting.num_ranks > _MOST_IN_GROUPS:
            return
        topology, payload = setting.topology, 4 * setting.model.num_parameters
        soonest = min(row["seconds_per_step"] for row in self.rows)
        hosts = topology.place(setting.num_ranks, setting.placement)
        found = []
        for grouping in groupings(topology, hosts, payload):
            inside, between = group_seconds(topology, hosts, grouping, payload)
            if inside < soonest:
                found.append((_GROUP_STEPS * inside + between, grouping))
        for _, (size, order) in sorted(found)[:_MOST_GROUPINGS]:
            names = [topology.hosts[hosts[place]].name for place in order]
            options = {"H": _GROUP_STEPS, "codec": "int8", "ranks_per_worker": size}
            groups = [names[at : at + size] for at in range(0, len(names), size)]
            self._plan("DiLoCo", options, replace(setting, placement=names), groups=groups)

    def _widen(self) -> None:
        """The best of each strategy with more streams, where streams have windows."""
        protocol = (
            self._setting.protocol if self._setting.protocol is not None else self._setting.topology.protocol
        )
        if not Protocol.parse(protocol).has_windows:
            return
        best: dict[str, dict[str, Any]] = {}
        for row in sorted(self.rows, key=_order):
            best.setdefault(row["strategy"], row)
        for row in best.values():
            for streams in _STREAMS:
                wider = _with_streams(_placed(self._setting, row), streams)
                self._plan(row["strategy"], row["options"], wider, streams=streams, groups=row["groups"])

    def _leave_out(self) -> None:
        """The best without one site, and without more while that is sooner, if every worker has a host of its own.

        Of groups that lie in several sites none is broken up.
        """
        best = min(self.rows, key=_order)
        setting = _placed(self._setting, best)
        if best["streams"]:
            setting = _with_streams(setting, best["streams"])
        hosts = setting.topology.place(setting.num_ranks, setting.placement)
        if len(set(hosts)) < len(hosts):
            return
        outside: list[str] = []
        soonest = best["days"]
        while len(outside) < _MOST_OUTSIDE:
            sites = [
                site
                for site in _narrowest_first(setting, hosts)
                if site not in outside and not _is_part_of_a_group(site, best, setting.topology)
            ]
            if len(sites) < 3:
                return
            tried = [
                self._without([*outside, site], best, setting)
                for site in sites[: _MOST_LEFT_OUT if not outside else _MORE_LEFT_OUT]
            ]
            row = min(tried, key=_order)
            if row["fits"] is False or row["days"] >= soonest:
                return
            soonest, outside = row["days"], row["left_out"].split(" and ")

    def _without(self, sites: Sequence[str], best: Mapping[str, Any], setting: Setting) -> dict[str, Any]:
        """The best candidate without some sites."""
        smaller = setting.without(sites)
        kept = set(smaller.placement or ())
        groups = [group for group in best["groups"] or () if set(group) <= kept] or None
        labels = {"streams": best["streams"], "groups": groups, "left_out": " and ".join(sites)}
        return self._plan(best["strategy"], best["options"], smaller, **labels)


def candidates(setting: Setting) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Strategies and options that are tried; those that are not here yet are left out."""
    large = 4 * setting.model.num_parameters // _BUCKETS
    for name, options in CANDIDATES:
        if name in STRATEGIES:
            buckets = {"bucket_bytes": large} if name == "AllReduce" and large > _BUCKET_BYTES else {}
            yield name, {**options, **buckets}


def _with_streams(setting: Setting, streams: int) -> Setting:
    protocol = setting.protocol if setting.protocol is not None else setting.topology.protocol
    mapping = {"preset": protocol} if isinstance(protocol, str) else dict(protocol or {})
    return replace(setting, protocol={**mapping, "streams": streams})


def _money(row: Mapping[str, Any]) -> tuple[float, float]:
    """The ends of what a row costs: dollars, or worker hours where hours have no price."""
    ratio = row["steps_ratio"]
    high = math.inf if ratio["high"] is None else ratio["high"]
    amount = row["cost"] if row["cost_by"].get("workers") is not None else row["worker_hours"]
    a_ratio = amount / ratio["mean"] if ratio["mean"] else amount
    return a_ratio * ratio["low"], a_ratio * high


def _high(row: Mapping[str, Any]) -> float:
    return math.inf if row["days_high"] is None else float(row["days_high"])


def _is_sooner(row: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether a row is sooner whatever the steps are that both need; what does not fit comes last."""
    if (row["fits"] is False) != (other["fits"] is False):
        return other["fits"] is False
    return row is not other and bool(_high(row) < other["days_low"])


def _beats(row: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether a row is both sooner and cheaper, whatever the steps are that both need.

    Of rows that learn alike it is enough that their days and money are less, as they need as many steps.
    """
    if row is other or row["fits"] is False:
        return False
    if other["fits"] is False:
        return True
    if _learning(row) == _learning(other):
        mine, theirs = (row["days"], _money(row)[0]), (other["days"], _money(other)[0])
        return mine != theirs and all(one <= two for one, two in zip(mine, theirs, strict=True))
    return _is_sooner(row, other) and _money(row)[1] < _money(other)[0]


def _learning(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Key of the options on which the number of steps of a row depends."""
    options = tuple(sorted((name, value) for name, value in row["options"].items() if name != "bucket_bytes"))
    return row["strategy"], options, row["workers"]


def _order(row: Mapping[str, Any]) -> tuple[bool, float]:
    """Sort key: rows that fit into the devices' memory first, then the sooner."""
    return row["fits"] is False, row["days"]


def _explained(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Which hosts are groups; where a codec makes a strategy slower, as its values go other ways."""
    told = [
        f"ranks_per_worker={row['options']['ranks_per_worker']}: hosts that average gradients at each step are "
        + " | ".join(", ".join(group) for group in row["groups"])
        for row in rows
        if row["groups"] and not row["streams"]
    ]
    slower: set[tuple[str, str]] = set()
    for row in rows:
        plain = {key: value for key, value in row["options"].items() if key != "codec"}
        same = next(
            (other for other in rows if other["strategy"] == row["strategy"] and other["options"] == plain),
            None,
        )
        pair = (row["strategy"], str(row["options"].get("codec")))
        if (
            "codec" in row["options"]
            and same is not None
            and row["days"] > same["days"]
            and pair not in slower
        ):
            slower.add(pair)
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


def _placed(setting: Setting, row: Mapping[str, Any]) -> Setting:
    """The setting with ranks where a row has its groups."""
    if row["groups"] is None:
        return setting
    return replace(setting, placement=[host for group in row["groups"] for host in group])


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


def _is_part_of_a_group(site: str, row: Mapping[str, Any], topology: Topology) -> bool:
    """Whether a group has hosts of this site and of others."""
    for group in row["groups"] or ():
        regions = {topology.region_of(topology.host_index(host)) for host in group}
        if site in regions and len(regions) > 1:
            return True
    return False


def _unknown(rows: Sequence[Mapping[str, Any]], ratios: Mapping[str, Ratio] | None) -> list[str]:
    told = [
        "the loss at this scale: days and money are bands, from the fewest steps to the most that a strategy may need "
        "to the loss that data-parallel has after the budget; rows whose bands overlap have one place, as nobody knows "
        "which is sooner"
    ]
    told += _told_ratios(rows, ratios or {})
    told.append(
        "what lost workers, weather and other people's traffic cost, unless the topology or --set has them"
    )
    if any(row["fits"] is False for row in rows):
        told.append(
            "how long rows that do not fit would take: their times take them to fit, and they are ranked last"
        )
    return told


def _told_ratios(rows: Sequence[Mapping[str, Any]], ratios: Mapping[str, Ratio]) -> list[str]:
    """A line a strategy: its range of steps over all its rows, and where that comes from."""
    by_strategy: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["steps_ratio"]["low"] != row["steps_ratio"]["high"] or row["strategy"] in ratios:
            by_strategy.setdefault(row["strategy"], []).append(row["steps_ratio"])
    lines = []
    for name, found in by_strategy.items():
        low, ends = min(each["low"] for each in found), [each["high"] for each in found]
        high = "any number of" if None in ends else f"{max(ends):.2f}"
        source = max((each["source"] for each in found), key=len)
        line = f"{name}: {low:.2f} to {high} times data-parallel's steps ({source})"
        lines.append(line + ("; measured on a small model, and applied as it is" if name in ratios else ""))
    return lines if ratios else [*lines, "--runs DIR takes the steps of a run of yours instead"]
