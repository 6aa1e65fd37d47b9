"""Plan of a strategy: time, bytes, memory and money."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from netsim.units import format_seconds

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["NETWORK_ERROR", "PUBLISHED_MFU", "SECONDS_A_DAY", "Plan", "is_sooner", "placed"]

SECONDS_A_DAY = 86_400

#: Relative error of simulated communication: the median of calls between sites that nothing was fitted to, and of flows
#: that share a bottleneck (docs/accuracy.md).
NETWORK_ERROR = 0.076

#: Least and most share of their devices' peak that published trainings reached while computing: Llama 3 405B 38 to 43 %
#: (arXiv 2407.21783), PaLM 540B 46.2 % (2204.02311). INTELLECT-1's 36.2 to 41.4 % (2412.01152, abstract) contain its
#: waiting between sites, 4 to 17 % of the time: while computing it reached 43 to 44 %.
PUBLISHED_MFU = (0.38, 0.46)


def is_sooner(row: Mapping[str, Any], other: Mapping[str, Any], name: str = "days") -> bool:
    """True if a row is sooner anywhere in both bands, or works through more tokens for the same money.

    Rows that do not fit into memory come last.

    Args:
        row, other: plans as mappings, with `days_low`, `days_high` (None: without an end) and `fits`.
        name: `days`, or `cost` for the cheaper one.
    """
    if (row["fits"] is False) != (other["fits"] is False):
        return other["fits"] is False
    if row.get("tokens_low") is not None and other.get("tokens_high") is not None:
        return bool(row["tokens_low"] > other["tokens_high"])  # for the same money
    high = row[f"{name}_high"]
    return row is not other and high is not None and bool(high < other[f"{name}_low"])


def placed(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Plans as mappings with `place`: rows whose bands overlap share one; None without days."""
    with_days = [row for row in rows if row.get("days") is not None]
    places = {id(row): 1 + sum(is_sooner(other, row) for other in with_days) for row in with_days}
    return [dict(row) if "refused" in row else {**row, "place": places.get(id(row))} for row in rows]


@dataclass(frozen=True)
class Plan:
    """Needs of one strategy.

    Attributes:
        strategy: its label.
        seconds_per_step: mean over a round that repeats.
        seconds_per_round: such a round.
        steps_per_round: its length.
        compute_utilisation: computing / all time, mean over ranks.
        exposed_seconds_per_round: waiting without computing, mean over ranks.
        tokens_per_second: of all workers: over the whole budget if there is one, else in a round that repeats.
        days: to the budget of tokens, the first round included.
        cost: dollars until then, for the workers' hours if they have a price, and for traffic that links charge
            (`egress`); None where nothing has a price.
        days_low, days_high, cost_low, cost_high: bands around them: waiting by the network's measured error, computing
            by the published shares of devices' peak where none was given.
        cost_by: its parts, `workers` (None without a price) and `egress`; empty without a budget.
        bytes_per_worker: payload that leaves a worker a round, the largest worker's.
        payload_bytes: the encoded message of a round, once.
        wan_bytes: payload between regions a round, over all workers.
        memory_per_worker: bytes of weights, gradients, optimizers' and outer states, and activations.
        memory: the same by purpose.
        memory_with: bytes with one of `MEMORY_CHOICES` each, and no other.
        mfu: share of the devices' peak that the model's operations are, waiting included, by site.
        memory_available: what the worker with least has on its devices; None: not known.
        fits: whether the one goes into the other; what does not fit as it is has to be sharded or offloaded.
        steady: whether rounds were seen to repeat; else means over what was simulated.
        tokens: that are worked through: the budget in whole rounds, or less where `until` ends it before; None
            without a budget. In `days` they come at `tokens_per_second`.
        tokens_low, tokens_high: band of the tokens that a budget of dollars pays for; None without such a budget.
        tokens_per_parameter: `tokens` over the model's parameters.
        rounds, steps: of the budget; None without one.
        global_batch: sequences of all workers in a step.
        tokens_per_step: of all workers.
        staleness: displacements that a server has taken in since a worker had its parameters, when that worker's own
            comes, in the mean; None without such a server.
        failures: what crashes take: `crashes_per_day` of all hosts, `seconds_lost_per_crash`, `tokens_lost_per_crash`
            (each a restart), `restarts` in all, and `times_as_long`, by which `tokens_per_second`, `days` and `cost`
            are others; None where none are expected.
        limit: what holds it up, and the cheapest remedy.
        cheaper: the `days`, `cost` and `egress` with other `collectives`, where those cost less; None where none do.
        expected_bytes: the bytes are those to be expected, as they depend on random numbers.
        protocol: how transfers use links, with the streams of each.
        placement: number of workers by site.
        collectives: the algorithms that were used, by operation.
        remarks: what is to be known besides.
    """

    strategy: str
    seconds_per_step: float
    seconds_per_round: float
    steps_per_round: int
    compute_utilisation: float
    exposed_seconds_per_round: float
    tokens_per_second: float
    days: float | None
    cost: float | None
    cost_by: dict[str, float | None]
    bytes_per_worker: float
    payload_bytes: float
    wan_bytes: float
    memory_per_worker: int
    memory: dict[str, int]
    memory_available: float | None
    fits: bool | None
    steady: bool
    memory_with: dict[str, int] = field(default_factory=dict)
    mfu: dict[str, float] = field(default_factory=dict)
    tokens: float | None = None
    tokens_low: float | None = None
    tokens_high: float | None = None
    tokens_per_parameter: float | None = None
    rounds: int | None = None
    steps: int | None = None
    global_batch: int = 0
    tokens_per_step: int = 0
    staleness: float | None = None
    failures: dict[str, float] | None = None
    limit: dict[str, Any] = field(default_factory=dict)
    cheaper: dict[str, Any] | None = None
    expected_bytes: bool = False
    protocol: str = ""
    placement: dict[str, int] = field(default_factory=dict)
    days_low: float | None = None
    days_high: float | None = None
    cost_low: float | None = None
    cost_high: float | None = None
    collectives: dict[str, list[str]] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()

    def to_mapping(self) -> dict[str, Any]:
        """Plain data, in the order of the attributes."""
        return {**vars(self), "remarks": list(self.remarks)}

    def with_band(self, computing: tuple[float, float], *, is_of_money: bool = False) -> Plan:
        """With bands of days and cost.

        Args:
            computing: least and most times as long that computing may take.
            is_of_money: dollars are the budget; then the cost has no band, and `tokens` has one.
        """
        if self.days is None:
            return self
        share = self.compute_utilisation
        factors = [
            share * times + (1 - share) * (1 + error)
            for times, error in zip(computing, (-NETWORK_ERROR, NETWORK_ERROR), strict=True)
        ]
        costs = [self._money(factor, 1.0).get("cost") for factor in factors]
        days = [self.days * factor for factor in factors]
        tokens: list[float | None] = [None, None]
        if is_of_money and self.tokens is not None and self.cost:
            dearer = [(cost or self.cost) / self.cost for cost in costs]  # than planned, for the same tokens
            tokens = [self.tokens / times for times in dearer[::-1]]
            days = sorted(each / times for each, times in zip(days, dearer, strict=True))
            costs = [self.cost, self.cost]
        return replace(
            self,
            **{"days_low": days[0], "days_high": days[1], "cost_low": costs[0], "cost_high": costs[1]},
            **{"tokens_low": tokens[0], "tokens_high": tokens[1]},
        )

    def slowed(self, factor: float) -> Plan:
        """With so many times the time to the same tokens."""
        days = None if self.days is None else self.days * factor
        return replace(
            self,
            tokens_per_second=self.tokens_per_second / factor,
            days=days,
            **self._money(factor, 1.0),
        )

    def ended(self, seconds: float) -> Plan:
        """With no more than so many seconds."""
        if self.days is None or self.tokens is None or self.days * SECONDS_A_DAY <= seconds:
            return self
        share = seconds / (self.days * SECONDS_A_DAY)
        remark = f"until = {format_seconds(seconds)} ends it: {share:.3g} of the budget's tokens are worked through"
        return replace(
            self,
            days=seconds / SECONDS_A_DAY,
            tokens=self.tokens * share,
            tokens_per_parameter=None
            if self.tokens_per_parameter is None
            else self.tokens_per_parameter * share,
            rounds=None if self.rounds is None else math.floor(self.rounds * share),
            steps=None if self.steps is None else math.floor(self.steps * share),
            remarks=(*self.remarks, remark),
            **self._money(share, share),
        )

    def _money(self, of_workers: float, of_traffic: float) -> dict[str, Any]:
        """`cost` and `cost_by`, each part so many times as much."""
        if not self.cost_by:
            return {}
        workers, egress = self.cost_by["workers"], self.cost_by["egress"] or 0.0
        paid = None if workers is None else workers * of_workers
        egress *= of_traffic
        total = egress if paid is None and egress else None if paid is None else paid + egress
        return {"cost": total, "cost_by": {"workers": paid, "egress": egress}}
