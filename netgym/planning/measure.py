"""Costs of a strategy on a network: seconds, bytes, memory and money, extrapolated from rounds that repeat."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from exogym_core.cost.compute import VALUE_BYTES
from exogym_core.names import strategy_name
from exogym_core.run.planned_rank import PlannedRounds, planned_rank
from exogym_core.run.recording import run_alone
from exogym_core.run.request import by_speed_conflict, with_servers
from exogym_core.stages.options import refuse_with_stages
from exogym_core.strategy import MODULES, STRATEGIES, Chain, CommunicateOptimizeStrategy
from netgym.command_options import first_line
from netgym.planning.coding import coding_remark, direct_remark
from netgym.planning.rounds import Pace, SimulatedRounds, pace_apart, pace_together, repeats_from
from netgym.planning.setting import Setting
from netgym.planning.stages import boundary_bytes, bubble, stage_rows
from netgym.planning.tables import MEMORY_CHOICES
from netgym.planning.weather import (
    changes_between,
    last_change_seconds,
    num_rounds_needed,
    rounds_remarks,
    with_failures,
)
from netgym.tasks import Decoder
from netsim import Weather
from netsim.cli.signals import raise_lost_interrupt
from netsim.collectives.estimate import Estimator
from netsim.collectives.schedules.direct import STORE
from netsim.errors import InputError, NetsimError
from netsim.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from exogym_core.communicator.base import Communicator
    from exogym_core.strategy.base import Strategy
    from netgym.planning.rounds import RoundFigures

__all__ = [
    "NETWORK_RANGE",
    "SECONDS_A_DAY",
    "Measured",
    "Plan",
    "RefusedPlanError",
    "Setting",
    "least_days",
    "least_days_in_stages",
    "measure",
    "memory_states",
    "refusal",
    "takes_long",
    "would_fit",
]

SECONDS_A_DAY = 86_400

#: Measured over predicted times of communication between which eight of ten measured runs of others lie, those that
#: nothing was fitted to; docs/measured_runs.py writes them into docs/accuracy.md.
NETWORK_RANGE = 0.9, 1.49


@dataclass(frozen=True)
class Plan:
    """Costs of one strategy.

    Attributes:
        strategy: its label.
        seconds_per_step: mean over a round that repeats.
        seconds_per_round: such a round.
        steps_per_round: its length.
        compute_utilisation: computing / all time, mean over ranks: of a round; where the network changes, of the whole
            budget, or of all simulated rounds.
        exposed_seconds_per_round: waiting without computing, mean over ranks.
        tokens_per_second: of all workers: over the whole budget if there is one, else in a round that repeats.
        days: of a run of `steps` steps, to the end of what is in flight.
        cost: dollars until then, for the workers' hours if they have a price, and for what links and stores charge
            (`egress`, requests included); None where nothing has a price.
        days_low, days_high, cost_low, cost_high: bands around them: waiting by `NETWORK_RANGE`, computing
            by the published shares of devices' peak where none was given.
        cost_by: its parts, `workers` (None without a price) and `egress`; empty without a budget.
        bytes_per_worker: payload that leaves a worker a round, mean over workers.
        payload_bytes: encoded messages of a worker once each a round, mean over workers.
        wan_bytes: payload between regions a round, over all workers.
        coding: "charged", or "not charged" where a worker encodes and decodes values in no time; None where it sends
            them as they are.
        coding_bytes: fp32 values that a worker encodes and decodes a round, in bytes, the busiest worker's.
        memory_per_worker: bytes of weights, gradients, optimizers' and outer states, and activations.
        memory: the same by purpose.
        memory_with: bytes with one of `MEMORY_CHOICES` each, and no other.
        mfu: share of the devices' peak that the model's operations are, waiting included, by site.
        bubble: least idle share of a step, in the mean of the ranks, by the schedule of stages; None without stages.
        stages: of each rank of a worker's chain its `host` (the first worker's), `computing` (share of the worker's
            operations), `idle` (share of a step in which it computes no pass), `staleness` (updates of the weights
            between a micro-batch's passes), `memory` in bytes, `boundary_bytes` that cross to and from the next rank in
            a step, `boundary_dollars` that links charge for these, and `dollars_per_hour` of the host (None without a
            price); empty without stages.
        memory_available: on the devices of the worker with least, among those that are listed; None: not known.
        fits: the memory needed is available; else it has to be sharded or offloaded; None: not known.
        fits_with: changes, each of which alone makes it fit, as flags; none where it fits.
        steady: simulated rounds repeat; else figures are means over them.
        tokens: that are worked through: the budget in whole steps, or less where `until` ends it before; None
            without a budget. In `days` they come at `tokens_per_second`.
        tokens_low, tokens_high: band of the tokens that a budget of dollars pays for; None without such a budget.
        tokens_per_parameter: `tokens` over the model's parameters.
        steps: of the budget; None without one.
        rounds: whole ones among them.
        global_batch: sequences of all workers in a step.
        tokens_per_step: of all workers.
        failures: cost of crashes: `crashes_per_day` of all hosts, `seconds_lost_per_crash`, `tokens_lost_per_crash`
            (each a restart), `restarts` in all, and `times_as_long`, by which `tokens_per_second`, `days` and `cost`
            are others; None where none are expected.
        limit: resource that delays it most, and the cheapest remedy.
        cheaper: the `days`, `cost` and `egress` with other `collectives`, where those cost less; None where none do.
        expected_bytes: the bytes are those to be expected, as values decide which step sends how much.
        protocol: how transfers use links, with the streams of each.
        placement: number of workers by site.
        algorithm: the setting `collectives` by which it goes.
        collectives: the algorithms that were used, by operation.
        remarks: notes on the figures.
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
    fits_with: tuple[str, ...] = ()
    memory_with: dict[str, int] = field(default_factory=dict)
    bubble: float | None = None
    stages: list[dict[str, Any]] = field(default_factory=list)
    mfu: dict[str, float] = field(default_factory=dict)
    tokens: float | None = None
    tokens_low: float | None = None
    tokens_high: float | None = None
    tokens_per_parameter: float | None = None
    rounds: int | None = None
    steps: int | None = None
    global_batch: int = 0
    tokens_per_step: int = 0
    failures: dict[str, float] | None = None
    limit: dict[str, Any] = field(default_factory=dict)
    cheaper: dict[str, Any] | None = None
    expected_bytes: bool = False
    coding: str | None = None
    coding_bytes: float = 0.0
    protocol: str = ""
    placement: dict[str, int] = field(default_factory=dict)
    days_low: float | None = None
    days_high: float | None = None
    cost_low: float | None = None
    cost_high: float | None = None
    algorithm: str | Mapping[str, str] = "auto"
    collectives: dict[str, list[str]] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()

    def to_mapping(self) -> dict[str, Any]:
        """Plain data, in the order of the attributes."""
        return {**vars(self), "remarks": list(self.remarks), "fits_with": list(self.fits_with)}

    def with_band(self, computing: tuple[float, float], *, is_of_money: bool = False) -> Plan:
        """Plan with bands of days and cost.

        Args:
            computing: least and most times as long that computing may take.
            is_of_money: dollars are the budget; then the cost has no band, and `tokens` has one.
        """
        if self.days is None:
            return self
        share = self.compute_utilisation
        factors = [
            share * times + (1 - share) * waiting
            for times, waiting in zip(computing, NETWORK_RANGE, strict=True)
        ]
        costs = [self.scaled(factor).cost for factor in factors]
        days = [self.days * factor for factor in factors]
        tokens: list[float | None] = [None, None]
        if is_of_money and self.tokens is not None and self.cost:
            dearer = [(cost or self.cost) / self.cost for cost in costs]  # than planned, for the same tokens
            tokens = [self.tokens / times for times in dearer[::-1]]
            days = sorted(each / times for each, times in zip(days, dearer, strict=True))
            costs = [self.cost, self.cost]
        return replace(
            self,
            days_low=days[0],
            days_high=days[1],
            cost_low=costs[0],
            cost_high=costs[1],
            tokens_low=tokens[0],
            tokens_high=tokens[1],
        )

    def scaled(self, seconds: float, rounds: float = 1.0) -> Plan:
        """Plan with its time multiplied by `seconds` and its rounds and tokens by `rounds`."""

        def times(value: float | None, factor: float) -> float | None:
            return None if value is None else value * factor

        def whole(value: int | None) -> int | None:
            return None if value is None else math.floor(value * rounds)

        costs = {}
        if self.cost_by:
            egress = self.cost_by["egress"] or 0.0
            costs = _costs(times(self.cost_by["workers"], seconds), egress * rounds)
        return replace(
            self,
            tokens_per_second=self.tokens_per_second / (seconds / rounds),
            days=times(self.days, seconds),
            tokens=times(self.tokens, rounds),
            tokens_per_parameter=times(self.tokens_per_parameter, rounds),
            rounds=whole(self.rounds),
            steps=whole(self.steps),
            **costs,
        )

    def ended(self, seconds: float) -> Plan:
        """Plan that ends after `seconds` at the latest."""
        if self.days is None or self.tokens is None or self.days * SECONDS_A_DAY <= seconds:
            return self
        share = seconds / (self.days * SECONDS_A_DAY)
        remark = (
            f"until = {format_seconds(seconds)} ends it: {share:.3g} of the budget's tokens are processed; a run "
            "finishes the step or round that it is in"
        )
        days, failures = seconds / SECONDS_A_DAY, self.failures
        if failures is not None:
            failures = {**failures, "restarts": failures["crashes_per_day"] * days}
        return replace(
            self.scaled(share, share), days=days, failures=failures, remarks=(*self.remarks, remark)
        )


def _costs(workers: float | None, egress: float) -> dict[str, Any]:
    """`cost` and `cost_by`; without a price of hours, links' charges alone."""
    parts = [part for part in (workers, egress or None) if part is not None]
    return {"cost": sum(parts) if parts else None, "cost_by": {"workers": workers, "egress": egress}}


_ROUNDS_OF_NEW_PEERS = 24  # ranks that take turns among 256 others do so three times
_ROUNDS = 3  # the first meets cold connections; the next two show that they repeat
_MOST_UNLIKE, _NEARLY = 12, 0.01  # rounds, while the last two differ by more than this share
_SAME = 1e-9  # of rounds' seconds: rounds that differ by less are equal
_ROUNDS_APART = 12  # of each worker, where workers go their own pace
_LONGEST_ROUND = 100_000  # steps: of a longer one the simulation takes minutes
_MOST_STEPS, _MOST_STEPS_OF_ALL = (
    1_000,
    20_000,
)  # of a strategy that does not declare its rounds, and of all ranks
_MOST_CALLS = 20_000  # of a rank, whose rounds are compared
_ALONE = "every worker trains on its own"
_MOST_DEVICES = 1024  # of a worker, tried
_A_CENTURY = 36_525  # days
_LONGER = 2  # times as long by crashes: below, a century is the budget's


class RefusedPlanError(InputError):
    """A strategy cannot be planned correctly in this setting; others of the same request may be."""


def refusal(error: Exception) -> str:
    """Reason why a strategy cannot be planned, as one line.

    Raises:
        KeyboardInterrupt: the error stands for a signal, see `raise_lost_interrupt`.
    """
    if isinstance(error, NetsimError):
        return first_line(error)
    raise_lost_interrupt(error)
    return f"failed: {first_line(error)}; plan it alone, with --debug"


class Measured:
    """A strategy that has been simulated, and can be simulated elsewhere.

    Attributes:
        strategy, setting: what was planned, and where.
        plan: the resulting figures.
        rounds: the simulated rounds.
        rounds_of: makes another number of rounds.
        figures: figures of `rounds`.
        are_peers_new: ranks meet different peers in different rounds.
    """

    def __init__(self, strategy: Strategy, setting: Setting) -> None:
        self.strategy, self.setting = strategy, setting
        if setting.stages is not None:
            refuse_with_stages("plan", strategy)
        conflict = by_speed_conflict(strategy, setting.stages) if setting.batch_by_speed else None
        if conflict is not None:
            raise InputError(f"plan: batch_by_speed does not go with {conflict}: leave it out")
        begun = _begin(strategy, setting)
        name, period, remarks = strategy_name(strategy), begun.period, begun.remarks
        self._is_a_mean, self.rounds_of, self.rounds = not begun.is_declared, begun.rounds_of, begun.rounds
        self._warmup, self._is_whole = begun.warmup, False
        # Requests of ranks that were recorded together cannot be lengthened.
        differ = setting.differs_for_ever() and self.rounds.runs_together
        steps = setting.num_steps()
        budget = None if steps is None else -(-steps // period)
        if begun.is_declared and (self.rounds.has_pairs or differ):
            number = _ROUNDS_OF_NEW_PEERS
            if budget and last_change_seconds(setting.topology.weather) and not differ:
                is_short = budget * period * setting.num_ranks <= _MOST_STEPS_OF_ALL // 4
                number, self._is_whole = (budget, True) if is_short or budget <= number else (number, False)
            self.rounds = self.rounds_of(number)
        self.are_peers_new = self.rounds.has_pairs and self.rounds.peers_change
        verified = self._verify(period, begun.start)
        figures = self.rounds.on(setting)
        if setting.num_ranks > 1 and not any(counts[-1] for counts in figures.counts["payload_bytes"]):
            seen = max(verified, period * len(figures.round_seconds))
            if setting.tokens is None or seen < setting.max_steps:
                raise RefusedPlanError(
                    f"plan: {name} sends nothing in its first {format_count(seen, 'step')}, so a plan does not know "
                    "what it sends: declare in round_steps after how many steps it repeats (docs/own-strategy.md)"
                )
            remarks += (f"{name} sends nothing in its {format_count(setting.max_steps, 'step')}: {_ALONE}",)
        if setting.dollars is not None:  # at most so many, as nothing makes rounds shorter
            until = self._pace(figures).seconds_until
            budget = setting.affordable_rounds(lambda number: (until(number), 0.0))
        if strategy.is_synchronous and (self._is_whole or not self.are_peers_new):
            figures = self._more_rounds(figures, budget)
            remarks += rounds_remarks(setting, figures.round_seconds, budget)
        is_replayed = self.rounds.calls_a_round > 0  # else every message is simulated
        crowds = {"direct", STORE}
        is_crowded = any(crowds.intersection(names) for names in figures.collectives.values()) and is_replayed
        num_ranks = setting.num_ranks + strategy.num_servers
        if is_crowded and _are_crowds(setting, num_ranks) and not setting.topology.weather:
            remarks += (f"messages of {num_ranks:,} ranks at once are computed from the busiest link",)
        self.figures = figures
        pace = self._pace(figures)
        pace = pace._replace(remarks=(*remarks, *pace.remarks))
        if setting.dollars is not None:
            self.setting = setting = self._paid(name, period, pace)
        self.plan = self._priced(name, period, pace)
        if setting.until is not None:
            self.plan = self.plan.ended(setting.until)
        self.plan = self.plan.with_band(setting.computing_range(), is_of_money=setting.dollars is not None)

    def _verify(self, period: int, start: int) -> int:
        """Verify that rounds send the same; return how many steps were verified one after the other.

        Of shipped strategies, which tests verify, the first rounds are compared. Of others rank 0 takes up to a
        thousand steps, and rounds later in the run: the last ones, and those at a half, a quarter, ... of it.

        Raises:
            RefusedPlanError: a round differs from the first ones.
        """
        first, number, most = self.rounds, self.rounds.num_rounds, self.setting.max_steps // period
        late: list[int] = []
        verified = {Chain, CommunicateOptimizeStrategy, *STRATEGIES.values(), *MODULES.values()}
        is_shipped = all(type(each) in verified for each in (self.strategy, *self.strategy.modules))
        if not (first.runs_together or is_shipped):
            calls, steps = max(first.calls_a_round // self.setting.num_ranks, 1), _most_steps(self.setting)
            number = max(number, min(steps // period, _MOST_CALLS // calls, most - start // period))
            while (most - 2) * period >= start + number * period and len(late) < max(steps // period, 1):
                late.insert(0, (most - 2) * period)
                most //= 2
        stretches = [(start, number, first.num_rounds - 2), *((step, 2, 1) for step in late)]
        for step, num_rounds, settled in stretches:
            unlike = self.rounds_of(num_rounds, start=step).unlike(first, settled)
            if unlike is not None:
                raise RefusedPlanError(
                    f"plan: {strategy_name(self.strategy)}: its rounds of {format_count(period, 'step')} do not send "
                    f"the same: the one that begins with step {step + unlike * period + 1:,} differs: declare in "
                    "round_steps after how many steps it repeats, or None, and in warmup_steps how many first steps "
                    "differ (docs/own-strategy.md)"
                )
        return number * period

    def _priced(self, name: str, period: int, pace: Pace) -> Plan:
        """Plan for the setting's tokens, crashes included."""
        setting = self.setting
        made = self._plan_of(name, period, pace)
        fits_with = would_fit(self.strategy, setting, self.rounds.memory)
        self.plan = replace(made, expected_bytes=self.strategy.sends_by_value, fits_with=tuple(fits_with))
        simulated = pace.ends[-1] if pace.ends else 0.0  # workers at their own pace have no common rounds
        end = (made.days or 0.0) * SECONDS_A_DAY
        end = end if setting.until is None else min(end, setting.until)
        if unseen := changes_between(setting.topology.weather, simulated, end):
            when = f"after the {format_seconds(simulated)} whose rounds are simulated one by one, and before the end"
            if not pace.ends:
                kind = "with changing partners" if self.are_peers_new else "of workers at their own pace"
                when = f"before the budget's end, and rounds {kind} are planned by their mean"
            raise RefusedPlanError(
                f"plan: {name}: the network changes {format_count(unseen, 'time')} {when}, so "
                f"its days are not known; plan fewer {'steps' if setting.is_of_steps else '--tokens'}, or give crashes "
                "as a rate: --set failures.mtbf=... --set failures.repair=..."
            )
        if setting.failures is None:
            return self.plan
        plan = with_failures(self, setting.failures)
        assert plan.failures is not None
        longer, lost = plan.failures["times_as_long"], plan.failures["seconds_lost_per_crash"]
        days = plan.seconds_per_round * longer / SECONDS_A_DAY if plan.days is None else plan.days
        if longer >= _LONGER and days >= _A_CENTURY:
            takes = [format_seconds(lost)] if lost else []
            if tokens := plan.failures["tokens_lost_per_crash"]:
                takes.append(format_count(round(tokens), "token"))
            raise RefusedPlanError(
                f"plan: {name}: it never ends: {plan.failures['crashes_per_day']:.3g} crashes a day, each of which "
                f"takes {' and '.join(takes)}, leave {1 / longer:.2g} of the time for training, and "
                f"{'a round' if plan.days is None else 'the budget'} takes more than a century; give a longer "
                "failures.mtbf or a shorter failures.repair, or plan fewer workers"
            )
        return plan

    def _plan_of(self, name: str, period: int, pace: Pace) -> Plan:
        setting, figures = self.setting, self.figures
        num_rounds = len(figures.round_seconds)
        tokens_a_round = setting.tokens_a_round(period)
        days = worked = None
        per_second = tokens_a_round / pace.seconds if pace.seconds else float("inf")
        costs: dict[str, Any] = {"cost": None, "cost_by": {}}
        steps, missed = setting.num_steps(), float(sum(figures.absences))
        if steps is not None:
            steps, missed = self._with_missed(name, steps, period, pace.span)
        remarks, changes = pace.remarks, last_change_seconds(setting.topology.weather)
        if (cut := setting.cut_sequences()) is not None:
            remarks += (cut,)
        if num_servers := self.strategy.num_servers:
            groups = self.strategy.server_groups
            places = with_servers(setting.topology, setting.num_ranks, setting.placement, groups) or ()
            names = ", ".join(places[-num_servers:])
            remarks += (
                f"{format_count(num_servers, 'server')} on {names}"
                + (
                    ": as the placement names no host of servers"
                    * (len(setting.placement or ()) <= setting.num_ranks)
                ),
            )
        if missed:
            remarks += (
                f"{format_count(round(missed), 'time')} a worker was away at a round's end, and its steps do not count",
            )
        if steps is not None:
            seconds, egress, is_silent = self._bill(steps, period, pace)
            if steps < period:
                is_silent = is_silent and setting.num_ranks > 1
                remarks += (_short_remark(steps, period, is_silent, bool(changes)),)
            short = setting.missing_steps(steps)  # in which all wait for the slowest, as in whole ones
            days = (seconds - short * max(setting.computing_seconds())) / SECONDS_A_DAY
            hourly = setting.hourly_dollars()
            workers = None if hourly is None else days * 24 * hourly
            costs = _costs(workers, egress)
            worked = (steps - short - missed * period / setting.num_ranks) * setting.tokens_a_round(1)
            if days:  # cold connections, weather and all
                per_second = worked / (days * SECONDS_A_DAY)
        available = setting.memory_available()
        states = self.rounds.memory
        memory, fits = setting.memory_of(states), setting.fits(states)
        if fits is None and available is not None and (unlisted := setting.devices_of_unknown_memory()):
            remarks += (
                f"the memory of {', '.join(unlisted)} is not listed: whether it fits there is not known",
            )

        def of_a_worker(counts: list[list[int]]) -> float:
            return _whole(sum(_a_round(counts, pace.span)) / setting.num_ranks)

        from_servers = figures.server_wan_bytes / num_rounds
        coding_bytes = VALUE_BYTES * max(_a_round(figures.counts["coded_values"], pace.span))
        coding = "charged" if coding_bytes else None
        if "not charged" in figures.coding or (coding_bytes and not setting.compute.coding.speeds):
            coding = "not charged"
            remarks += (coding_remark(coding_bytes),)
        if self.rounds.sends_codes_direct and (direct := direct_remark(setting.hosts)) is not None:
            remarks += (direct,)
        return Plan(
            strategy=name,
            seconds_per_step=pace.seconds / period,
            seconds_per_round=pace.seconds,
            steps_per_round=period,
            compute_utilisation=self._utilisation(
                pace, num_rounds if steps is None else steps / period, days
            ),
            exposed_seconds_per_round=max(pace.seconds - pace.computing_seconds, 0.0),
            tokens_per_second=per_second,
            days=days,
            **costs,
            bytes_per_worker=of_a_worker(figures.counts["bytes_sent"]),
            payload_bytes=of_a_worker(figures.counts["payload_bytes"]),
            wan_bytes=_whole(sum(_a_round(figures.counts["wan_bytes"], pace.span)) + from_servers),
            memory_per_worker=memory["total"],
            memory=memory,
            memory_with={name: setting.memory_of(states, [name])["total"] for name in MEMORY_CHOICES},
            bubble=None if setting.cut is None else bubble(setting.cut),
            stages=stage_rows(setting, states, pace.seconds / period),
            mfu=setting.mfu(
                [own / period for own in pace.own_seconds or [pace.seconds] * len(setting.hosts)]
            ),
            memory_available=available,
            fits=fits,
            steady=pace.steady,
            coding=coding,
            coding_bytes=coding_bytes,
            tokens=worked,
            tokens_per_parameter=None if worked is None else worked / setting.model.num_parameters,
            rounds=None if steps is None else steps // period,
            steps=steps,
            global_batch=setting.num_ranks * setting.batch_size,
            tokens_per_step=setting.tokens_a_round(1),
            protocol=setting.resolved_protocol.describe(),
            placement=setting.workers_by_site(),
            algorithm=setting.collectives or "auto",
            collectives=figures.collectives,
            remarks=remarks,
        )

    def _utilisation(self, pace: Pace, num_rounds: float, days: float | None) -> float:
        """Share of the time that workers compute; on a changing network of all the time, as a run has it."""
        if not (pace.ends and pace.ends[-1] and last_change_seconds(self.setting.topology.weather)):
            return pace.computing_seconds / pace.seconds if pace.seconds else 1.0
        computed = self.figures.mean_computing()[: int(num_rounds)]
        computing = sum(computed[-1:]) + (num_rounds - len(computed)) * pace.computing_seconds
        return computing / (days * SECONDS_A_DAY if days else pace.ends[-1])

    def _with_missed(self, name: str, steps: int, period: int, span: int) -> tuple[int, float]:
        """Steps of the budget, of which `steps` count, and how often a worker is away at a round's end.

        Raises:
            RefusedPlanError: no worker takes part in later rounds, so no number of steps is enough.
        """
        absences = self.figures.absences
        if not self.setting.is_of_steps and sum(absences[-span:]) >= span * len(self.figures.rank_ends):
            raise RefusedPlanError(
                f"plan: {name}: no worker is in time for later rounds, so its tokens are never processed; give a "
                "longer averaging_timeout"
            )
        while True:
            missed = _over(absences, steps // period, span)
            needed = self.setting.num_steps(missed * period) or 0
            if needed <= steps:
                return steps, missed
            steps = needed

    def _paid(self, name: str, period: int, pace: Pace) -> Setting:
        """Setting with the tokens that its dollars pay for.

        Raises:
            InputError: the first round costs more.
        """
        setting = self.setting
        failures = self._priced(name, period, pace).failures or {}
        longer = failures.get("times_as_long", 1.0)

        def bill(number: int) -> tuple[float, float]:
            seconds, egress, _ = self._bill(number * period, period, pace)
            return longer * seconds, egress

        rounds = setting.affordable_rounds(bill)
        missed = _over(self.figures.absences, rounds, pace.span)
        counted = max(rounds - missed / setting.num_ranks, 1e-9)
        return replace(setting, tokens=counted * setting.tokens_a_round(period))

    def _bill(self, steps: int, period: int, pace: Pace) -> tuple[float, float, bool]:
        """Seconds of `steps` steps to the end of what is in flight, dollars of traffic, and whether nothing is sent.

        Whole rounds are simulated until they repeat, then the remaining steps. Where ranks go their own pace or may be
        absent, or figures are means, the total follows from the pace alone.
        """
        setting, figures = self.setting, self.figures
        num_rounds = len(figures.round_seconds)
        whole, remainder = divmod(steps, period)

        def charged(figures: RoundFigures) -> float:
            return setting.topology.egress_dollars(figures.link_bytes) + figures.request_dollars

        a_round = charged(figures) / num_rounds
        if self._warmup and (in_all := sum(own[-1] for own in figures.counts["bytes_sent"])):
            a_round *= sum(_a_round(figures.counts["bytes_sent"], pace.span)) * num_rounds / in_all
        if not (self.strategy.is_synchronous or self._is_a_mean or self.rounds.has_absences):
            few = min(whole, self.rounds.num_rounds)
            if remainder or few < num_rounds:
                figures = self.rounds_of(few, remainder=remainder).on(setting, few)
            later = whole - few  # of the slowest worker, with which the run ends
            seconds = figures.end_seconds + later * max(pace.own_seconds)
            return seconds, charged(figures) + later * a_round, not whole
        if (self._is_a_mean and steps > period) or self.rounds.has_absences:
            at_end = figures.end_seconds - figures.round_seconds[-1] if self._is_a_mean else 0.0
            sent = [sum(counts) for counts in zip(*figures.counts["bytes_sent"], strict=True)]
            each = [float(later - earlier) for earlier, later in itertools.pairwise([0, *sent])]
            share = _over(each, steps / period, pace.span) / sent[-1] if sent[-1] else 1.0
            return pace.seconds_until(steps / period) + at_end, charged(figures) * share, not whole
        quiet, played = 0.0, min(whole, num_rounds)
        if played and figures.quiet_seconds is not None:
            quiet, remainder = remainder * figures.quiet_seconds, 0
        if remainder or whole < num_rounds:
            alike = self._is_alike(setting)
            first = repeats_from(_lengths(figures.round_seconds), _SAME) if alike else None
            played = min(played, num_rounds if first is None else first + 1)
            few = min(played, self.rounds.num_rounds)
            figures = self.rounds_of(few, remainder=remainder).on(setting, max(played, few))
        later = whole - played
        dollars = charged(figures) + later * a_round
        return (
            figures.end_seconds + later * pace.seconds + quiet,
            dollars,
            not (whole or any(figures.link_bytes)),
        )

    def _more_rounds(self, figures: RoundFigures, budget: int | None) -> RoundFigures:
        """Simulate more rounds while the last two differ, as windows grow or queues drop, and past network changes.

        Rounds of drawn clients, and those that leave a late worker out, differ for ever: all of a short budget.
        """
        setting, ends, calls = self.setting, figures.round_seconds, self.rounds.calls_a_round
        is_quiet = not setting.topology.weather and not setting.differs_for_ever()
        differ = any(figures.absences) or self.strategy.clients.are_drawn
        most = min(_MOST_UNLIKE, budget or _MOST_UNLIKE) if is_quiet else 0
        if not calls:  # every rank runs
            if differ and most:
                most = min(max(most, self.rounds.most_live_rounds // 10), budget or most)
            most = 0 if self._is_a_mean else min(most, self.rounds.most_live_rounds)
        while len(ends) < most and (differ or repeats_from(_lengths(ends), _NEARLY) is None):
            number, before = most if differ else min(2 * len(ends), most), len(ends)
            if not calls:
                self.rounds = self.rounds_of(number)
            figures = self.rounds.on(setting, number)
            ends = figures.round_seconds
            if len(ends) == before:  # its requests cannot be lengthened
                break
        needed = num_rounds_needed(setting, ends, calls, budget)
        if needed > len(ends) and calls:
            return self.rounds.on(setting, needed)
        if needed > len(ends) and not setting.differs_for_ever():  # such requests cannot be lengthened
            self.rounds = self.rounds_of(min(needed, self.rounds.most_live_rounds))
            return self.rounds.on(setting)
        return figures

    def _pace(self, figures: RoundFigures) -> Pace:
        if not self.strategy.is_synchronous:
            return pace_apart(figures)
        return pace_together(
            figures,
            are_peers_new=self.are_peers_new and not self._is_whole,
            differ=self.setting.differs_for_ever() or self._is_whole,
            has_events=bool(self.setting.topology.weather.events),
            are_drawn=self.strategy.clients.are_drawn,
        )

    def own_round(self) -> float:
        """Seconds of a later round in the plan's own setting, equal to `later_round`."""
        setting, figures = self.setting, self.figures
        num_compared = self._num_compared(setting)
        ends = figures.round_seconds[self._warmup : num_compared]
        has_same_weather = setting.differs_for_ever() or not setting.topology.weather
        if not self.strategy.is_synchronous:
            return pace_apart(figures).seconds if has_same_weather else self.later_round(setting)
        is_played = has_same_weather and num_compared == len(figures.round_seconds)
        if len(ends) > 1 and (is_played or (self._is_alike(setting) and not setting.topology.weather)):
            return (ends[-1] - ends[0]) / (len(ends) - 1)
        return self.later_round(setting)

    def _num_compared(self, setting: Setting) -> int:
        """Number of rounds to simulate with a resource doubled: two, unless later rounds differ from the second."""
        first = self._warmup
        number = min(len(self.figures.round_seconds), first + _ROUNDS_OF_NEW_PEERS)
        is_early = repeats_from(_lengths(self.figures.round_seconds)[first : first + 3]) in (0, 1)
        return first + 2 if self._is_alike(setting) and is_early else number

    def _is_alike(self, setting: Setting) -> bool:
        """True if rounds repeat in both settings."""
        differ = setting.differs_for_ever() or self.setting.differs_for_ever() or self.are_peers_new
        return self.strategy.is_synchronous and not differ

    def later_round(self, setting: Setting, factors: Sequence[float] | None = None) -> float:
        """Seconds of a later round in a setting that differs only in its network or computing.

        Collectives use the algorithms chosen on the plan's own network, and scheduled changes of the network are left
        out.

        Args:
            setting: with the same workers.
            factors: multiply each worker's seconds of computing; None: 1.
        """
        if not setting.differs_for_ever():
            setting = replace(setting, topology=replace(setting.topology, weather=Weather()))
        if not self.strategy.is_synchronous:
            return pace_apart(self.rounds.on(setting, factors=factors)).seconds
        ends = self.rounds.on(setting, self._num_compared(setting), factors=factors).round_seconds
        ends = ends[self._warmup :]
        return (ends[-1] - ends[0]) / (len(ends) - 1) if len(ends) > 1 else ends[0]


def _lengths(ends: Sequence[float]) -> list[float]:
    return [later - earlier for earlier, later in itertools.pairwise([0.0, *ends])]


class _Begun(NamedTuple):
    """First rounds of a strategy.

    Attributes:
        period: steps a round; of a strategy that does not declare it, all that are simulated.
        is_declared: by the strategy, with `round_steps`.
        start: steps before the first.
        warmup: first ones that send otherwise than later ones.
        rounds_of: makes a number of them.
        rounds: those to simulate before comparing them.
        remarks: on the figures.
    """

    period: int
    is_declared: bool
    start: int
    warmup: int
    rounds_of: Callable[..., SimulatedRounds]
    rounds: SimulatedRounds
    remarks: tuple[str, ...] = ()


def _begin(strategy: Strategy, setting: Setting) -> _Begun:
    """First rounds of a strategy, of the length that it declares.

    A strategy that does not declare its rounds is simulated step by step, up to the budget's end or a limit.

    Raises:
        RefusedPlanError: with a budget, the first rounds are a warm-up too long to simulate.
    """
    name, own = strategy_name(strategy), _ROUNDS if strategy.is_synchronous else _ROUNDS_APART
    number, key = own, ("declared", strategy, setting.num_ranks, setting.max_steps, setting.model.model)
    declared, warmup = setting.known.once(key, lambda: _declared(strategy, setting))
    period, start, remarks = declared or 1, 0, tuple[str, ...]()
    if declared is None:
        steps, number, own = setting.max_steps, 1, 1
        period = -(-steps // -(-steps // _most_steps(setting)))
        over = "all" if period == steps and setting.tokens is not None else "the first"
        remarks = (
            f"{name} does not declare round_steps: figures are means over {over} {format_count(period, 'step')}",
        )
    elif warmup <= (most := max(_MOST_UNLIKE, _MOST_STEPS_OF_ALL // setting.num_ranks**2)):
        number += warmup
    else:
        start = warmup * period
        text = f"begins with {format_count(start, 'step')} that send otherwise than later ones"
        if setting.tokens is not None or setting.dollars is not None:
            raise RefusedPlanError(
                f"plan: {name}: it {text}, so its days are not those of later rounds; set {most * period:,} at most "
                "(such as freeze_step)"
                + ("" if setting.is_of_steps else ", or plan it without --tokens and --budget")
            )
        remarks = (f"it {text}: figures are for later ones",)

    def rounds_of(number: int, **others: int) -> SimulatedRounds:
        rounds = PlannedRounds(period, number, start)._replace(**others)
        return SimulatedRounds(strategy, setting, rounds, apart=declared is None)

    rounds = rounds_of(number + setting.rounds_to_fill(period))
    if declared is not None and not warmup:
        rounds.keep_for_choice()
    return _Begun(period, declared is not None, start, number - own, rounds_of, rounds, remarks)


def _declared(strategy: Strategy, setting: Setting) -> tuple[int | None, int]:
    """Declared steps a round of a strategy on the setting's model, and rounds of its warm-up.

    Raises:
        InputError: `round_steps` is no number of steps, or too many to simulate.
    """
    name, found = strategy_name(strategy), [strategy]

    def set_up(comm: Communicator, computing: Callable[[int, float], None]) -> None:
        made = planned_rank(
            strategy, comm, setting.model.model, computing, setting.max_steps, seed=setting.seed
        )
        assert made is not None
        found.append(made.strategy)

    with suppress(ValueError, RuntimeError):
        run_alone(set_up, setting.num_ranks + strategy.num_servers)
    period = found[-1].round_steps
    if period is None:
        return None, 0
    if isinstance(period, bool) or not isinstance(period, int) or period < 1:
        raise InputError(f"{name}: round_steps = {period!r} must be a whole number of steps, 1 at least")
    if period > _LONGEST_ROUND:
        raise InputError(
            f"plan: {name}: rounds of {period:,} steps are longer than those that are planned; give "
            f"{_LONGEST_ROUND:,} steps at most"
        )
    warmup = found[-1].warmup_steps if len(found) > 1 else 0
    return period, -(-warmup // period)


def _most_steps(setting: Setting) -> int:
    """Largest number of steps that are simulated or verified one by one."""
    return max(min(_MOST_STEPS, _MOST_STEPS_OF_ALL // setting.num_ranks), 1)


def memory_states(strategy: Strategy, setting: Setting) -> list[dict[str, int]]:
    """Bytes by purpose of the states of each rank of a worker, without simulating; empty where only that finds them."""
    return _begin(strategy, setting).rounds.memory


def takes_long(strategy: Strategy, setting: Setting) -> bool:
    """True if ranks read the clock, so that all must run and thousands of messages be simulated one by one."""
    return _are_crowds(setting, setting.num_ranks) and not _begin(strategy, setting).rounds.calls_a_round


def _are_crowds(setting: Setting, num_ranks: int) -> bool:
    """True if `num_ranks` ranks send too many messages at once to simulate them all."""
    most = Estimator(setting.topology, setting.resolved_protocol).most_at_once(setting.hosts)
    return num_ranks * (num_ranks - 1) > most


def would_fit(strategy: Strategy, setting: Setting, states: Sequence[Mapping[str, int]]) -> list[str]:
    """Changes, each of which makes a worker's states and activations fit into its devices; empty if they fit already.

    The fewest memory-saving choices that suffice, the fewest devices, the most layers, and the smallest sites that
    share a replica.

    Args:
        strategy: not set up.
        setting: where.
        states: of `memory_states`.
    """
    if setting.fits(states) is not False:
        return []
    given = [name for name in MEMORY_CHOICES if name not in setting.memory]
    ways = itertools.chain.from_iterable(
        itertools.combinations(given, count) for count in range(1, len(given) + 1)
    )
    sizes = {way: setting.memory_of(states, [*setting.memory, *way])["total"] for way in ways}
    enough = (way for way in sizes if setting.fits(states, [*setting.memory, *way]) is not False)
    way = next(enough, min(sizes, key=lambda each: sizes[each], default=()))
    saving = replace(setting, memory=(*setting.memory, *way))
    flag = f"--memory {','.join(saving.memory)}"
    others, name = _more_devices(setting, states), strategy_name(strategy)
    for size in range(2, setting.num_ranks + 1) if strategy.arguments.get("ranks_per_worker") == 1 else ():
        # Ranks of a site share all states but the weights.
        part = [
            {of: -(-each // (1 if of == "weights" else size)) for of, each in own.items()} for own in states
        ]
        if setting.num_ranks % size == 0 and setting.fits(part) is not False:
            key = f"--set strategies.{name}"
            others.append(f"{key}.ranks_per_worker={size} {key}.sharding=FULL_SHARD (netgym plan)")
            break
    others += _fewer_layers(setting, states)
    if saving.fits(states) is not False:
        return [f"{flag} ({format_bytes(sizes[way])})", *others]
    together = [*_more_devices(saving, states), *_fewer_layers(saving, states)] if way else []
    return [*others, *(f"{flag} with {each}" for each in together)]


def _more_devices(setting: Setting, states: Sequence[Mapping[str, int]]) -> list[str]:
    """Fewest devices of a worker that suffice, as at most one line."""
    number = setting.devices_per_worker
    if not isinstance(number, int):
        return []
    count = bisect_left(
        range(_MOST_DEVICES),
        True,
        lo=number,
        key=lambda count: replace(setting, devices_per_worker=count).fits(states) is not False,
    )
    return [f"--devices-per-worker {count}"] if count < _MOST_DEVICES else []


def _fewer_layers(setting: Setting, states: Sequence[Mapping[str, int]]) -> list[str]:
    """Most layers whose states fit, with the whole model's activations, as at most one line."""
    model = setting.model.model
    blocks = model.blocks if isinstance(model, Decoder) else ()
    size = every = setting.model.num_parameters
    for layers in range(len(blocks) - 1, 0, -1):
        size -= sum(each.numel() for each in blocks[layers].parameters())
        fewer = [{name: num_bytes * size // every for name, num_bytes in own.items()} for own in states]
        if setting.fits(fewer) is not False:
            return [f"--set model.num_layers={layers} ({size / 1e9:.3g}B parameters)"]
    return []


def least_days(strategy: Strategy, setting: Setting) -> tuple[float, float]:
    """Lower bounds on the days for the budget and on their band, without simulating; 0 where nothing is proven.

    A round takes at least the slowest rank's computing, and at least the time that bytes entering or leaving a site
    with one rank need on all links of that site, for any algorithms and streams. The first round may send less.

    Args:
        strategy: not set up.
        setting: with `tokens`.
    """
    is_proven = strategy.is_synchronous and not strategy.num_servers and setting.is_even()
    if not is_proven or setting.until is not None or setting.tokens is None:
        return 0.0, 0.0
    begun = _begin(strategy, setting)
    rounds = begun.rounds
    if begun.start or rounds.has_pairs or rounds.unlike(rounds, rounds.num_rounds - 2) is not None:
        return 0.0, 0.0
    steps, computing_seconds = setting.max_steps, setting.computing_seconds()
    try:
        on_lines = max(
            (_least_seconds(rounds, rank, *lines) for rank, lines in _narrowest(setting)), default=0.0
        )
    except (ValueError, RuntimeError):  # its requests depend on the others
        on_lines = 0.0
    if rounds.has_absences:
        return 0.0, 0.0
    on_lines /= setting.resolved_protocol.payload_share
    slowest = max(computing_seconds)
    days = max(steps * slowest, (steps // begun.period - 1) * on_lines) / SECONDS_A_DAY
    fast = setting.computing_range()[0]
    computing = sum(computing_seconds) / len(computing_seconds) * steps
    share = (
        min(computing / SECONDS_A_DAY / days, 1.0) if not setting.compute.coding.speeds else float(fast < 1)
    )
    return days, days * (share * fast + (1 - share) * NETWORK_RANGE[0])


def least_days_in_stages(setting: Setting) -> float:
    """Lower bound on the days of any strategy with stages, without simulating.

    A step takes at least a micro-batch's passes through all stages and the others' through the slowest, and at least
    the time of the bytes that cross boundaries on the links of the narrowest site with one rank.

    Args:
        setting: with `stages` and `tokens`.
    """
    assert setting.stages is not None
    assert setting.cut is not None
    if not setting.is_even():
        return 0.0
    count, number = setting.stages.count, setting.stages.microbatches or 1
    seconds = setting.computing_seconds()
    chains = (seconds[at : at + count] for at in range(0, len(seconds), count))
    step = max((sum(each) + (number - 1) * max(each)) / number for each in chains)
    crossing = boundary_bytes(setting.cut, setting.batch_size)
    for rank, (out, into) in _narrowest(setting):
        place = rank % count
        (to_next, from_next), (from_last, to_last) = crossing[place], crossing[place - 1]
        step = max(step, 8 * (to_next + to_last) / out, 8 * (from_next + from_last) / into)
    return setting.max_steps * step / SECONDS_A_DAY


def _narrowest(setting: Setting) -> list[tuple[int, tuple[float, float]]]:
    """Ranks alone at the sites with the narrowest links out and in, with their bits per second out and in."""
    topology = setting.topology
    sites = [topology.region_of(host) for host in setting.hosts]
    alone = {site: rank for rank, site in enumerate(sites) if sites.count(site) == 1}
    site_of = {host.name: topology.region_of(host.index) for host in topology.hosts}
    lines = {site: [0.0, 0.0] for site in alone}
    for link in topology.links:
        # A region's router has its name.
        ends = [site_of.get(name, name) for name in (link.source, link.target)]
        for way, end in enumerate(ends):
            if end in lines and ends[0] != ends[1]:
                lines[end][way] += link.bits_per_second
    chosen = {min(lines, key=lambda site: lines[site][way]) for way in (0, 1) if lines}
    return [(alone[site], (lines[site][0], lines[site][1])) for site in chosen]


def _least_seconds(rounds: SimulatedRounds, rank: int, out: float, into: float) -> float:
    """Least seconds for a rank's bytes of a round, at `out` and `into` bits per second."""
    leaving = entering = 0
    for call, member in rounds.calls_of(rank):
        others = len(call.ranks) - 1
        part = max(call.num_bytes // len(call.ranks) - call.element_bytes, 0)
        if call.op == "all_to_all" and call.parts is not None:
            leaving += sum(call.parts[0]) - call.parts[0][member]
        elif call.op == "all_reduce" and others:
            leaving, entering = leaving + call.num_bytes, entering + call.num_bytes
        elif call.op == "all_gather":
            leaving, entering = leaving + part, entering + others * part
        elif call.op == "reduce_scatter":
            leaving, entering = leaving + others * part, entering + part
        elif call.op == "sendrecv":
            leaving, entering = leaving + call.num_bytes * (not member), entering + call.num_bytes * member
    return 8 * max(leaving / out, entering / into)


def measure(strategy: Strategy, setting: Setting) -> Plan:
    """Plan of `strategy`, not set up, in a setting: simulated until its rounds repeat."""
    return Measured(strategy, setting).plan


def _short_remark(steps: int, period: int, is_silent: bool, is_changing: bool) -> str:
    """Remark on a plan that ends before its first round."""
    given = format_count(steps, "step")
    nothing = (
        f"nothing is sent in {given}, before the first round of {period:,} ends: {_ALONE}"
        if is_silent
        else f"no round of {period:,} steps ends in {given}"
    )
    of_round = "step, round, MFU" if is_changing else "step, round, utilisation, MFU"
    return f"{nothing}; days, dollars and tokens/s are those of {given}; {of_round} and bytes those of a whole round"


def _over(each: Sequence[float], num_rounds: float, span: int) -> float:
    """Sum over `num_rounds` rounds: `each` of the simulated ones, then the mean of the last `span`."""
    whole = min(int(num_rounds), len(each))
    later = each[whole] if whole < len(each) else sum(each[-span:]) / min(span, len(each))
    return sum(each[:whole]) + (num_rounds - whole) * later


def _a_round(counts: list[list[int]], span: int) -> list[float]:
    """Mean bytes that each rank sent in a round, over the last `span` rounds."""
    return [_whole((count[-1] - (count[-1 - span] if len(count) > span else 0)) / span) for count in counts]


def _whole(number: float) -> float:
    return int(number) if number == int(number) else number
