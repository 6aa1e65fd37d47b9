"""Advice: strategies and settings ranked by the days and dollars that they take for a budget of tokens."""

from __future__ import annotations

import itertools
import math
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from exogym_core.stages.options import BoundaryCodecOptions, Stages
from exogym_core.strategy import build_strategy
from netgym.command_options import first_line
from netgym.planning.coding import uncharged_lines
from netgym.planning.measure import (
    NETWORK_RANGE,
    Setting,
    least_days,
    least_days_in_stages,
    measure,
    memory_states,
    refusal,
    takes_long,
    would_fit,
)
from netgym.planning.rings import first_hosts, ring_orders
from netgym.planning.stages import may_fit
from netgym.planning.step_ratio import Ratio, steps_range, with_coded_boundaries
from netgym.planning.sweep import is_sooner
from netsim import HostEvent
from netsim.errors import DeadlockError, InputError
from netsim.units import format_bytes, format_count

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence

    from exogym_core.strategy.base import Strategy

__all__ = [
    "BY_BOUND",
    "CANDIDATES",
    "ELASTIC",
    "SEARCHED",
    "STAGED",
    "Advice",
    "advise",
    "candidates",
    "is_as_soon",
    "variant_of",
]

#: Begin of the reason of rows whose lower bound a planned row beats.
BY_BOUND = "dominated by bound"

_AS_SOON = 0.005  # relative: rows that differ by less are equal, and smaller options are better then


def is_as_soon(row: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """True if two rows take about the same time."""
    return bool(abs(row["days"] - other["days"]) <= _AS_SOON * other["days"])


def variant_of(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Key of a row, equal for rows that differ only in searched options, streams, algorithms, and figures."""
    names = SEARCHED.get(row["strategy"], ())
    fixed = {key: value for key, value in row["options"].items() if key not in names}
    return row["strategy"], fixed, row["groups"], row["left_out"], row["stages"]


_STREAMS = (8, 64)
_GROUP_STEPS = 30  # steps a round between groups
_WORTH_SEARCHING = 2.0  # times the days of a strategy's best codec
_BUCKET_BYTES, _BUCKETS = 26_214_400, 16  # a large model begins with so many buckets, not with thousands
_MOST_LEFT_OUT = 6  # sites that are left out in turn, those with the narrowest routes
_MORE_LEFT_OUT = 3  # when one is left out already
_MOST_COMPARED = 8  # routes by which a site's width is judged
_MOST_OUTSIDE = 3  # sites that are left out together
_CHAINS_WITHOUT = (1 / 4, 1 / 2, 3 / 4)  # of the sites, the narrowest
_BOUNDARY_CODECS = ("bf16", "int8")
_FEW_IDLE, _MOST_MICRO = 4, 64  # micro-batches a stage: with the first, less than a fifth of a step is idle

#: Values of options of which each is planned with each, the first matters most to a loss; of buckets: a model's number.
SEARCHED: Mapping[str, Mapping[str, Sequence[int]]] = {
    "AllReduce": {"bucket_bytes": (1, 4, 16, 64)},
    "StreamingDiLoCo": {"tau": (2, 5, 10), "num_fragments": (2, 4)},
}

#: Candidate strategies and options.
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

#: Candidates where hosts crash or pause: their rounds go on without absent workers, after time-outs of the network.
ELASTIC: Sequence[tuple[str, Mapping[str, Any]]] = (
    ("AllReduce", {"codec": "bf16"}),
    ("DiLoCo", {"H": 30, "codec": "int8"}),
    ("DiLoCo", {"H": 100, "codec": "int8"}),
    ("DiLoCo", {"H": 500, "codec": "int8"}),
)

#: Candidates of workers that are chains of hosts: each is simulated message by message, so they are few.
STAGED: Sequence[tuple[str, Mapping[str, Any]]] = (
    ("AllReduce", {}),
    ("DiLoCo", {"H": 30, "codec": "int8"}),
    ("DiLoCo", {"H": 100, "codec": "int8"}),
    ("SparseLoCo", {"H": 30}),
)


def advise(
    setting: Setting,
    ratios: Mapping[str, Ratio] | None = None,
) -> dict[str, Any]:
    """Plan many strategies and settings, and rank them by the time they need for the budget of tokens.

    Args:
        setting: with `tokens`.
        ratios: steps to the same loss by strategy, from the user's runs; default: those of `steps_range`.

    Returns:
        See `Advice.result`.
    """
    found = Advice(setting, ratios)
    found.search()
    return found.result()


class Advice:
    """A search for the fastest and cheapest plan for a budget of tokens, or for the most training that dollars buy.

    With `dollars`, every row is planned for the tokens that the money would buy if workers never waited; the result has
    rows for the money itself, ranked by the cost of tokens of equal worth.

    Args:
        setting: with `tokens`, or with `dollars` and prices.
        ratios: steps to the same loss by strategy, from the user's runs; default: those of `steps_range`.
        report: called before each plan with the number made and the next one's name.

    Attributes:
        rows: every plan so far, as a mapping; may be read during the search.

    Raises:
        InputError: only one worker, or no price of an hour.
    """

    def __init__(
        self,
        setting: Setting,
        ratios: Mapping[str, Ratio] | None = None,
        report: Callable[[int, str], None] | None = None,
    ) -> None:
        self.rows: list[dict[str, Any]] = []
        if setting.num_ranks == 1:
            raise InputError(
                "advise: there is one worker, and advice is on how workers communicate: add hosts or --workers, or "
                "plan one with netgym plan"
            )
        self._dollars, self._ratios, self._report = setting.dollars, ratios, report
        if setting.dollars is not None:  # so many tokens as they buy if workers compute all the time
            if not (hourly := setting.hourly_dollars()):
                given = "nothing" if hourly == 0 else "not known"
                raise InputError(
                    f"advise: --budget: what a worker's hour costs is {given}: add --price DOLLARS"
                )
            seconds = max(each.mean_seconds for each in setting.durations())
            tokens = setting.dollars / hourly * 3600 / seconds * setting.tokens_a_round(1)
            setting = replace(setting, tokens=tokens, dollars=None)
        self._setting = setting
        self._explained: list[str] = []
        self._misfits: list[tuple[int, str, Strategy, list[dict[str, int]], Setting]] = []
        self._not_simulated: list[dict[str, Any]] = []

    def search(self) -> None:
        """Plan the candidates, then search options, groups, streams and sites from the best rows."""
        setting = self._setting
        tried = list(candidates(setting))

        def least(candidate: tuple[str, Mapping[str, Any]]) -> float:
            name, options = candidate
            row = {"strategy": name, "options": options, "workers": setting.num_ranks}
            return least_days(build_strategy(name, **options), setting)[1] * self._ratio_of(row).low

        for name, options in sorted(tried, key=least):  # an early row with few days rules others out
            self._plan(name, options, setting)
        self.rows.sort(key=lambda row: tried.index((row["strategy"], row["options"])))
        for name in SEARCHED:  # with each codec that is nearly as soon as the best
            own = (row for row in self.rows if row["strategy"] == name)
            best = _best_by(own, lambda row: row["options"].get("codec"))
            soonest = min((row["days"] for row in best), default=0.0)
            for row in best:
                if row["days"] <= _WORTH_SEARCHING * soonest:
                    self._with_options(row, setting)
        self._group()
        self._explained = _explained(self.rows)
        self._cut_into_stages()
        if self.rows:
            self._widen()
            self._leave_out()

    def best(self) -> dict[str, Any] | None:
        """The fastest row so far by mean days, among those that fit; None before the first."""
        rows = map(self._with_bands, self.rows)
        best = min(rows, key=_order, default=None)
        return best if best is None or self._dollars is None else self._for_money(best, self._dollars)

    def result(self) -> dict[str, Any]:
        """Advice from the plans computed so far.

        Returns:
            `ranked` (mappings of plans with `options`, `streams`, `algorithm`, `groups` of hosts that act as one,
            `left_out`, `worker_hours`, `steps_ratio`, the bands `days_low`, `days`, `days_high` and `cost_low`, `cost`,
            `cost_high`, and `place`: rows of one place are equal, as their bands overlap; for
            dollars also `tokens` that they buy, `tokens_per_parameter`, and `worth_low`, `worth`, `worth_high`: tokens
            with which data-parallel has the same loss), `budget`: its `tokens` or `dollars`,
            `dominated`: others, which one of these beats in time and money; `not_simulated`: those that do not fit or
            take too long, and those that one of these beats whatever the network does, with `days_at_least` and the
            `reason`; `ring`: None if nothing fits; `explained`: what may surprise, and `unknown`: what the ranking does
            not know.
        """
        setting = self._setting
        rows = sorted(map(self._with_bands, self.rows), key=_order)
        kept = [row for row in rows if not any(_beats(other, row) for other in rows)]
        baseline = min((row for row in rows if row["strategy"] == "AllReduce"), key=_order, default=None)
        if baseline is not None and baseline not in kept:
            kept.append(baseline)
        by = "days" if self._dollars is None else "cost"
        for row in kept:
            row["place"] = 1 + sum(is_sooner(other, row, by) for other in kept)
            row["pareto"] = row["fits"] is not False and not any(_beats(other, row) for other in rows)
        kept.sort(key=lambda row: (row["fits"] is False, row["place"], row[by]))
        ranked = kept if self._dollars is None else [self._for_money(row, self._dollars) for row in kept]
        explained = [*self._explained]
        most = max((row["streams"] for row in self.rows if row["streams"]), default=0)
        widest = setting.with_streams(max(most, setting.resolved_protocol.streams))
        if (spare := widest.spare_streams()) is not None:
            explained.append(spare)
        if self._misfits and all(row["fits"] is False for row in self.rows):
            needed, name, strategy, states, there = min(self._misfits, key=lambda each: each[0])
            enough = "; or ".join(would_fit(strategy, there, states)) or "none of the options of a plan"
            chain = f" in {there.ranks_a_worker} stages" if there.stages is not None else ""
            explained = [
                f"nothing fits: {name}{chain} needs {format_bytes(needed)} at the least of a worker's "
                f"{format_bytes(round(setting.memory_available() or 0))}; enough would be {enough}",
                *explained,
            ]
        return {
            "ranked": ranked,
            "budget": {"tokens": setting.tokens} if self._dollars is None else {"dollars": self._dollars},
            "protocol": setting.resolved_protocol.describe(),
            "placement": setting.workers_by_site(),
            "dominated": [
                row if self._dollars is None else self._for_money(row, self._dollars)
                for row in rows
                if row not in kept
            ],
            "not_simulated": self._not_simulated,
            "ring": ring_orders(
                setting.topology, setting.hosts, 4 * setting.model.num_parameters, setting.protocol
            )
            if self.rows
            else None,
            "explained": explained,
            "unknown": [*_unknown(kept, self._ratios), *setting.remarks],
        }

    def _with_bands(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Row with bands of the time and money that reach the loss of data-parallel after the budget."""
        ratio = self._ratio_of(row)
        factors = {"_low": ratio.low, "": ratio.mean, "_high": ratio.high}

        def times(amount: float | None, factor: float) -> float | None:
            return None if amount is None or math.isinf(factor) else amount * factor

        return {
            **row,
            **{
                name + end: times(row[name + end], factor)
                for name in ("days", "cost")
                for end, factor in factors.items()
            },
            "cost_by": {of: times(part, ratio.mean) for of, part in row["cost_by"].items()},
            "worker_hours": row["worker_hours"] * ratio.mean,
            "steps_ratio": ratio.to_json(),
        }

    def _for_money(self, row: Mapping[str, Any], dollars: float) -> dict[str, Any]:
        """Row for a budget of `dollars`: its tokens, and the data-parallel tokens that reach the same loss."""
        planned, parameters = self._setting.tokens, self._setting.model.num_parameters
        assert planned is not None
        worth = {
            name: None if row[end] is None else planned * dollars / row[end]
            for name, end in (("worth_low", "cost_high"), ("worth", "cost"), ("worth_high", "cost_low"))
        }
        share = dollars / row["cost"]
        tokens = worth["worth"] * row["steps_ratio"]["mean"]
        steps = math.floor(row["steps"] * tokens / planned)
        days = [row["days_low"] / row["cost_low"], row["days"] / row["cost"]]
        days.append(days[-1] if row["days_high"] is None else row["days_high"] / row["cost_high"])
        low, middle, high = sorted(each * dollars for each in days)
        return {
            **row,
            **{"days_low": low, "days": middle, "days_high": high},
            **{"cost_low": dollars, "cost": dollars, "cost_high": dollars},
            "cost_by": {of: None if part is None else part * share for of, part in row["cost_by"].items()},
            "worker_hours": row["worker_hours"] * share,
            "tokens": tokens,
            "steps": steps,
            "rounds": steps // row["steps_per_round"],
            "tokens_per_parameter": tokens / parameters,
            **worth,
        }

    def _ratio_of(self, row: Mapping[str, Any]) -> Ratio:
        """Ratio of steps from the user's runs, else from published or measured ones."""
        name, options = row["strategy"], row["options"]
        if self._ratios and name in self._ratios:
            return self._ratios[name]
        workers = row["workers"] // options.get("ranks_per_worker", 1)
        ratio = steps_range(name, options, self._setting.model.num_parameters, workers, self._setting.tokens)
        codec = (row.get("stages") or {}).get("codec")
        return ratio if codec is None else with_coded_boundaries(ratio, codec)

    def _plan(
        self, name: str, options: Mapping[str, Any], setting: Setting, **labels: Any
    ) -> dict[str, Any] | None:
        """Plan another row; None if a planned row surely beats it. `labels` describe its setting."""
        stages = setting.stages
        row = {
            "strategy": name,
            "options": dict(options),
            "streams": None,
            "left_out": None,
            "groups": None,
            "stages": stages
            and {
                "count": stages.count,
                "microbatches": stages.microbatches,
                "schedule": stages.schedule,
                "codec": stages.codec and stages.codec.name,
            },
            "workers": setting.num_ranks,
            "algorithm": setting.collectives or "auto",
            **labels,
        }
        if self._report is not None:
            text = ", ".join(f"{key}={value}" for key, value in options.items())
            self._report(len(self.rows) + len(self._not_simulated), f"{name}({text})")
        strategy, days = build_strategy(name, **options), 0.0
        try:
            days, low = least_days(strategy, setting)
            if setting.fits(states := memory_states(strategy, setting)) is False:
                needed, available = setting.memory_of(states)["total"], setting.memory_available() or 0
                self._misfits.append((needed, name, strategy, states, setting))
                of_available = f"{format_bytes(needed)} of a worker's {format_bytes(round(available))}"
                self._leave(row, days, f"does not fit: {of_available}")
                return None
            if self._is_beaten(row, days, low, setting):
                return None
            if takes_long(strategy, setting):
                reason = "reads the clock, so that simulating thousands of messages at once takes minutes"
                self._leave(row, days, f"{reason}: netgym plan does")
                return None
            made = measure(strategy, setting)
            assert made.steps is not None
            paid = min(self._dollars / made.cost, 1.0) if self._dollars and made.cost else 1.0
            if made.steps * paid < made.steps_per_round:
                run = f"the run of {format_count(int(made.steps * paid), 'step')}"
                self._leave(row, days, f"{run} ends before its first round of {made.steps_per_round:,}")
                return None
        except Exception as error:
            reason = refusal(error)
            if isinstance(error, DeadlockError):  # calls differ from row to row, and their cause does not
                reason = reason.partition(", and rank ")[0]
            self._leave(row, days, reason.removeprefix(f"plan: {name}: "))
            return None
        hours = (made.days or 0.0) * 24 * len(setting.hosts)
        row = {**made.to_mapping(), "worker_hours": hours, **row}
        self.rows.append(row)
        return row

    def _leave(self, row: Mapping[str, Any], days: float, reason: str) -> None:
        """Note that a row is not simulated."""
        named = {
            key: row[key]
            for key in ("strategy", "options", "streams", "algorithm", "left_out", "groups", "stages")
        }
        self._not_simulated.append({**named, "days_at_least": days, "reason": reason})

    def _is_beaten(self, row: Mapping[str, Any], days: float, low: float, setting: Setting) -> bool:
        """True if a planned row beats one with at least `days`, and `low` at its band's lower end; it is then noted.

        Data-parallel is always shown, so its rows are dropped only where another of them is surely faster.
        """
        if not days:
            return False
        hourly = setting.hourly_dollars()
        cost = None if hourly is None else days * 24 * hourly
        least = {
            **row,
            **{"days": days, "days_low": low, "days_high": days, "fits": None},
            **{"cost": cost, "cost_low": cost and cost * low / days, "cost_high": cost},
            "cost_by": {"workers": cost},
            "worker_hours": days * 24 * len(setting.hosts),
        }
        bound = self._with_bands(least)
        banded = [self._with_bands(each) for each in self.rows]
        better = next((each for each in banded if _beats(each, bound)), None)
        if better is not None and row["strategy"] == "AllReduce":
            own = (each for each in banded if each["strategy"] == "AllReduce" and each["fits"] is not False)
            better = next((each for each in own if each["days"] < bound["days"]), None)
        if better is None:
            return False
        reason = (
            f"{BY_BOUND}: its computing and its bytes on the narrowest line take at least that long, "
            f"which {better['strategy']} beats"
        )
        self._leave(row, bound["days_low"], reason)
        return True

    def _with_options(self, row: dict[str, Any], there: Setting) -> dict[str, Any]:
        """Fastest of a row and its plans with options of `SEARCHED`, without those whose bound is no faster."""
        name, labels = row["strategy"], {"streams": row["streams"], "groups": row["groups"]}
        best, axes, model_bytes = row, SEARCHED.get(name, {}), 4 * self._setting.model.num_parameters
        values = [
            [-(-model_bytes // each) for each in reversed(given)] if option == "bucket_bytes" else given
            for option, given in axes.items()
        ]
        for point in itertools.product(*values):
            options = row["options"] | dict(zip(axes, point, strict=True))
            if options == row["options"]:
                continue
            if self._is_soonest(best, there):
                break
            with suppress(InputError):  # options that exclude each other, or need more layers
                if _least(there, name, options) < (1 - _AS_SOON) * best["days"]:
                    found = self._plan(name, options, there, **labels)
                    best = best if found is None else min(best, found, key=_order)
        return best

    def _cut_into_stages(self) -> None:
        """Plan workers that are chains of hosts, each with a stage of the model; the batch of all hosts stays the same.

        Each strategy gets the shortest chains that fit into memory, unless its plan with whole replicas is sooner than
        their lower bound; the best row also with other numbers of micro-batches, with the next longer chains, with
        codecs on its boundaries, under `gpipe`, and without the narrowest sites under both schedules.
        """
        setting, hosts = self._setting, self._setting.num_ranks
        if setting.stages is not None or setting.batch_by_speed:
            return

        fits_whole, smallest = bool(self.rows), None
        made: list[tuple[dict[str, Any], Setting]] = []

        def planned(
            name: str, options: Mapping[str, Any], there: Setting, **labels: Any
        ) -> dict[str, Any] | None:
            row = self._plan(name, options, there, **labels)
            if row is not None:
                made.append((row, there))
            return row

        def best() -> tuple[dict[str, Any], Setting]:
            return min(made, key=lambda pair: _order(pair[0]))

        for name, options in STAGED:
            # One worker has no rounds; there the gradients of data-parallel stay where they are.
            most = hosts if name == "AllReduce" else hosts // 2
            soonest = min((row["days"] for row in self.rows if row["strategy"] == name), default=math.inf)
            (whole,) = memory_states(build_strategy(name, **options), setting) or [{}]
            found: list[tuple[Setting, list[Setting]]] = []
            for count in (each for each in range(2, most + 1) if hosts % each == 0):
                numbers = _micro_batches(setting.batch_size * count, count)
                first, *others = (
                    _in_stages(setting, count, each) for each in ((fits_whole and numbers[1:]) or numbers)
                )
                try:
                    is_possible = may_fit(first, whole)
                except InputError as error:  # the model cannot be cut so, and not into more stages
                    if count == 2:
                        self._explained.append(f"without stages: {first_line(error)}")
                    break
                if is_possible and least_days_in_stages(first) < soonest:
                    found.append((first, others))
                elif smallest is None and may_fit(
                    replace(_in_stages(setting, count, count), batch_size=count), whole
                ):
                    smallest = f"--batch-size 1 in {count} stages for {name}"
            for at, (first, others) in enumerate(found):
                num_misfits = len(self._misfits)
                row = planned(name, options, first)
                if row is None and len(self._misfits) > num_misfits:
                    continue
                if row is not None and row is min(self.rows, key=_order):
                    for there in [*others, *(longer for longer, _ in found[at + 1 : at + 2])]:
                        planned(name, options, there)
                break
        if made:
            row, there = best()
            for codec in _BOUNDARY_CODECS:
                planned(
                    row["strategy"], row["options"], _changed(there, codec=BoundaryCodecOptions(name=codec))
                )
            row, there = best()
            planned(row["strategy"], row["options"], _changed(there, schedule="gpipe"))
            row, there = best()
            if len(set(setting.hosts)) == hosts:
                for name, options, fewer, left_out in self._shorter_chains(row, there):
                    planned(name, options, fewer, left_out=left_out)
            row, there = best()
            stages = {key: value for key, value in row["stages"].items() if value is not None}
            words = ", ".join(f"{key}: {value}" for key, value in stages.items())
            where = " on the hosts left" if row["left_out"] else ""
            self._explained.append(
                f"{stages['count']} stages of {stages['microbatches']} micro-batches: each worker is a chain of "
                f"{stages['count']} hosts{where} with {stages['count']} times a host's batch: "
                f"workers.count={row['workers']}, batch_size={there.batch_size}, stages={{{words}}} (docs/stages.md)"
            )
        elif not fits_whole and smallest is not None:
            self._explained.append(f"stages do not fit with these batches; enough would be {smallest}")

    def _shorter_chains(
        self, best: Mapping[str, Any], of_best: Setting
    ) -> Iterator[tuple[str, Mapping[str, Any], Setting, str]]:
        """Plans to make of the best row with stages without the narrowest sites; on one worker, of data-parallel."""
        setting = self._setting
        assert of_best.stages is not None
        sites = _narrowest_first(setting, setting.hosts)
        for share in _CHAINS_WITHOUT:
            outside = sites[: round(len(sites) * share)]
            kept = [] if len(outside) == len(sites) else list(setting.without(outside).placement or ())
            count = min(best["stages"]["count"], len(kept))
            if not outside or count < 2:
                continue
            used = kept[: len(kept) // count * count]
            number = _micro_batches(setting.batch_size * count, count)[0]
            there = _changed(_in_stages(setting, count, number, used), codec=of_best.stages.codec)
            is_alone = there.num_ranks == 1
            name, options = ("AllReduce", {}) if is_alone else (best["strategy"], best["options"])
            with suppress(InputError):
                (whole,) = memory_states(build_strategy(name, **options), setting) or [{}]
                if may_fit(there, whole) and least_days_in_stages(there) < best["days"]:
                    left_out = " and ".join([*outside, *kept[len(used) :]])
                    yield name, options, there, left_out
                    yield name, options, _changed(there, schedule="gpipe"), left_out

    def _group(self) -> None:
        """Plan rounds between groups of hosts of one region, inside which gradients are averaged at each step."""
        setting = self._setting
        regions: dict[str, list[str]] = {}
        for host in setting.hosts:
            regions.setdefault(setting.topology.region_of(host), []).append(setting.topology.hosts[host].name)
        common = math.gcd(*map(len, regions.values()))
        named = list(itertools.chain.from_iterable(regions.values()))
        for size in range(2, min(common, len(named) // 2) + 1):
            if common % size == 0:
                groups = [named[at : at + size] for at in range(0, len(named), size)]
                options = {"H": _GROUP_STEPS, "codec": "int8", "ranks_per_worker": size}
                self._plan("DiLoCo", options, _placed(setting, {"groups": groups}), groups=groups)

    def _widen(self) -> None:
        """Plan the best row of each strategy with more streams under protocols with windows.

        Plans whose lower bound is no faster are skipped.
        """
        for row in _best_by((row for row in self.rows if not row["stages"]), lambda row: row["strategy"]):
            there = _placed(self._setting, row)
            soonest = row
            if not there.resolved_protocol.has_windows:
                continue
            for streams in _STREAMS:
                if self._is_soonest(soonest, there):
                    break
                wider, labels = there.with_streams(streams), {"streams": streams, "groups": row["groups"]}
                found = self._plan(row["strategy"], row["options"], wider, **labels)
                if found is not None and not self._is_soonest(found, wider):
                    found = self._with_options(found, wider)
                if found is None or found["days"] >= (1 - _AS_SOON) * soonest["days"]:
                    break  # windows do not limit it
                soonest = found

    def _is_soonest(self, row: Mapping[str, Any], there: Setting) -> bool:
        """True if a row takes about as long as its lower bound, which no algorithm and no streams can beat."""
        return bool(_least(there, row["strategy"], row["options"]) >= (1 - _AS_SOON) * row["days"])

    def _leave_out(self) -> None:
        """Plan the best row without one site, and without more while that is faster, if no two workers share a host."""
        best = min(self.rows, key=_order)
        if best["stages"]:  # which all hosts are needed for
            return
        setting = _placed(self._setting, best)
        if best["streams"]:
            setting = setting.with_streams(best["streams"])
        hosts = setting.hosts
        if len(set(hosts)) < len(hosts):
            return
        outside: list[str] = []
        soonest = best["days"]
        while len(outside) < _MOST_OUTSIDE:
            sites = [site for site in _narrowest_first(setting, hosts) if site not in outside]
            if len(sites) < 3:
                return
            tried = []
            for site in sites[: _MOST_LEFT_OUT if not outside else _MORE_LEFT_OUT]:
                smaller = setting.without([*outside, site])
                kept = set(smaller.placement or ())
                groups = [group for group in best["groups"] or () if set(group) <= kept] or None
                labels = {"streams": best["streams"], "groups": groups}
                left_out = " and ".join([*outside, site])
                tried.append(
                    self._plan(best["strategy"], best["options"], smaller, left_out=left_out, **labels)
                )
            row = min((row for row in tried if row is not None), key=_order, default=None)
            if row is None or row["fits"] is False or row["days"] >= soonest:
                return
            soonest, outside = row["days"], row["left_out"].split(" and ")


def _least(setting: Setting, name: str, options: Mapping[str, Any]) -> float:
    """Lower bound on a strategy's days, see `least_days`."""
    return least_days(build_strategy(name, **options), setting)[0]


def _in_stages(setting: Setting, count: int, number: int, at: Sequence[str] | None = None) -> Setting:
    """Setting of chains of `count` hosts (those `at`) with `number` micro-batches; each host's batch stays."""
    stages, batch = Stages(count=count, microbatches=number), setting.batch_size * count
    fixed = setting.compute.fixed  # of a whole worker's batch
    compute = setting.compute.model_copy(update={"fixed": None if fixed is None else count * fixed})
    workers = (setting.num_ranks if at is None else len(at)) // count
    there = replace(setting, num_ranks=workers, batch_size=batch, stages=stages, compute=compute)
    return there if at is None else replace(there, placement=at)


def _changed(setting: Setting, **options: Any) -> Setting:
    """Setting with other options of its stages."""
    assert setting.stages is not None
    return replace(setting, stages=setting.stages.model_copy(update=options))


def _micro_batches(batch: int, count: int) -> list[int]:
    """Numbers of micro-batches to plan: the most (least memory), those with which stages idle little, the fewest."""
    whole = [number for number in range(1, min(batch, _MOST_MICRO * count) + 1) if batch % number == 0]
    enough = [number for number in whole if number >= count] or whole[-1:]
    few_idle = next((number for number in enough if number >= _FEW_IDLE * count), enough[-1])
    return list(dict.fromkeys([enough[-1], few_idle, enough[0]]))


def candidates(setting: Setting) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Candidate strategies and options; with time-outs too where hosts of workers crash or pause."""
    large = 4 * setting.model.num_parameters // _BUCKETS
    tried = [(name, dict(options)) for name, options in CANDIDATES]
    used = {setting.topology.hosts[host].name for host in setting.hosts}
    if any(isinstance(event, HostEvent) and event.host in used for event in setting.topology.weather.events):
        seconds = setting.computing_seconds()
        rates = (link.bits_per_second for link in setting.topology.links)
        averaging = 2 * 2 * 32 * setting.model.num_parameters / min(filter(None, rates), default=math.inf)
        for name, options in ELASTIC:
            late = options.get("H", 1) * (max(seconds) - min(seconds))
            waits = {"timeout_waiting_for_peers": _minutes(late), "averaging_timeout": _minutes(averaging)}
            tried.append((name, {**options, **waits}))
    for name, options in tried:
        buckets = {"bucket_bytes": large} if name == "AllReduce" and large > _BUCKET_BYTES else {}
        yield name, {**options, **buckets}


def _minutes(seconds: float) -> str:
    """Time-out above `seconds`, in whole minutes."""
    return f"{math.floor(seconds / 60) + 1} min"


def _money(row: Mapping[str, Any]) -> tuple[float, float]:
    """Lower and upper cost of a row in dollars, or in worker hours without a price."""
    if row["cost_by"].get("workers") is not None:
        return row["cost_low"], math.inf if row["cost_high"] is None else row["cost_high"]
    hours = row["worker_hours"] / row["days"] if row["days"] else 0.0
    return hours * row["days_low"], hours * _high(row) if hours else 0.0


def _high(row: Mapping[str, Any]) -> float:
    return math.inf if row["days_high"] is None else float(row["days_high"])


def _beats(row: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """True if a row is both sooner and cheaper, for any number of steps in both bands.

    Rows that learn alike need equally many steps, so comparing their days and money suffices.
    """
    if row is other or row["fits"] is False:
        return False
    if other["fits"] is False:
        return True
    if _may_send_dearer(row, other):
        return False
    if _learning(row) == _learning(other):
        mine, theirs = (row["days"], _money(row)[0]), (other["days"], _money(other)[0])
        return mine != theirs and all(one <= two for one, two in zip(mine, theirs, strict=True))
    return is_sooner(row, other) and _money(row)[1] < _money(other)[0]


def _may_send_dearer(row: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """True if only traffic has a price, and a row's may cost more than the other's."""
    if row["cost_by"].get("workers") is not None:
        return False
    dollars, least = row["cost"] or 0.0, other["cost_low"] or 0.0
    if _learning(row) == _learning(other):
        least = other["cost"] or 0.0
    elif dollars:
        dollars = math.inf if row["cost_high"] is None else row["cost_high"]
    return bool(dollars > least)


def _learning(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Key of the options that determine the number of steps of a row."""
    options = tuple(sorted((name, value) for name, value in row["options"].items() if name != "bucket_bytes"))
    return row["strategy"], options, row["workers"], (row.get("stages") or {}).get("codec")


def _best_by(
    rows: Iterable[dict[str, Any]], key: Callable[[Mapping[str, Any]], Hashable]
) -> list[dict[str, Any]]:
    """The best of the rows of each key."""
    best: dict[Hashable, dict[str, Any]] = {}
    for row in sorted(rows, key=_order):
        best.setdefault(key(row), row)
    return list(best.values())


def _order(row: Mapping[str, Any]) -> tuple[bool, float]:
    """Sort key: rows that fit into memory first, then by days."""
    return row["fits"] is False, row["days"]


def _explained(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Sentences on groups of hosts, and on codecs that slow a strategy down: codes cannot be summed on the way."""
    lines = [
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
        if "codec" not in row["options"] or same is None or pair in slower:
            continue
        if row["days"] > (1 + _AS_SOON) * same["days"] and row["wan_bytes"] > same["wan_bytes"]:
            slower.add(pair)
            lines.append(
                f"{row['strategy']} is slower in {row['options']['codec']}: codes cannot be added up on the way, so "
                f"each part goes to one rank and its mean to all, {row['wan_bytes'] / 1e9:.3g} GB between sites a "
                f"round instead of {same['wan_bytes'] / 1e9:.3g} GB"
            )
    return lines


def _placed(setting: Setting, row: Mapping[str, Any]) -> Setting:
    """The setting with ranks placed in a row's groups."""
    if row["groups"] is None:
        return setting
    return replace(setting, placement=[host for group in row["groups"] for host in group])


def _narrowest_first(setting: Setting, hosts: Sequence[int]) -> list[str]:
    """Sites by the bandwidth of their widest route to another site, the narrowest first."""
    topology = setting.topology
    first = first_hosts(topology, hosts)
    widest = dict.fromkeys(first, 0.0)
    names = list(first)
    for place, site in enumerate(names):
        # With very many sites, the bandwidth of a site is judged by its routes to a few others.
        for other in names[:_MOST_COMPARED] if place >= _MOST_COMPARED else names[: _MOST_COMPARED + 1]:
            if other != site:
                links = topology.route(first[site], first[other])
                narrowest = min((topology.links[link].bits_per_second for link in links), default=0.0)
                widest[site] = max(widest[site], narrowest)
    return sorted(names, key=lambda site: widest[site])


def _unknown(rows: Sequence[Mapping[str, Any]], ratios: Mapping[str, Ratio] | None) -> list[str]:
    lines = [
        "the loss at this scale: days and money are bands, from the fewest steps to the most that a strategy may need "
        "to the loss that data-parallel has after the budget; rows whose bands overlap have one place, as the order "
        "between them is unknown",
        f"the network's distance from a real one (communication took {NETWORK_RANGE[0]} to {NETWORK_RANGE[1]} times as "
        "long in eight of ten measured runs) and, without --utilisation, the reached share of devices' peak (38 to 46 "
        "% in published trainings): bands have both",
    ]
    by_strategy: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        name, ratio = row["strategy"], row["steps_ratio"]
        if ratio["low"] != ratio["high"] or name in (ratios or ()):
            by_strategy.setdefault(name, []).append(ratio)
    lines += uncharged_lines(rows)
    for name, found in by_strategy.items():
        low, ends = min(each["low"] for each in found), [each["high"] for each in found]
        high = "any number of" if None in ends else f"{max(ends):.2f}"
        source = max((each["source"] for each in found), key=len)
        line = f"{name}: {low:.2f} to {high} times data-parallel's steps ({source})"
        measured = "; measured on a small model, and applied as it is" if name in (ratios or ()) else ""
        lines.append(line + measured)
    if not ratios:
        lines.append("--runs DIR takes the steps of a run of yours instead")
    lines.append(
        "the cost of lost workers, weather and other people's traffic, unless the topology or --set has them"
    )
    if any(row["fits"] is False for row in rows):
        lines.append(
            "the times of rows that do not fit: theirs assume that they fit, and they are ranked last"
        )
    return lines
