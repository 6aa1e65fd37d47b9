"""The verdict: which strategy wins and why, or that none does. What is found here is worded by `verdict.txt`."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from exogym_core.names import visible
from exogym_core.results.reading import WALL_CLOCK
from exogym_core.results.recorder import LEAST_LATER
from exogym_core.results.report.table import count_text, evaluated_every, ratio, time_text
from exogym_core.results.seeds import mean_and_deviation, paired_interval
from exogym_core.results.templates import rendered
from netsim.units import format_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from exogym_core.results.reading import Results, SeedResult, StrategyResult

__all__ = ["Verdict", "gap_of", "lead_interval", "unconfirmed_seconds", "verdict", "why_equal"]

_CLOSE = 1.05  # leads below this ratio count as equal: models of networks are less accurate


class Verdict(NamedTuple):
    """The sentences, and the winner's name where there is one."""

    text: str
    winner: str | None = None


def verdict(results: Results) -> Verdict:
    """The winner: the strategy that reaches the target loss first in virtual time, with every seed, and holds it.

    A lead below the time between evaluations of either is none. There is no winner where another strategy touched the
    target sooner and ran out of steps before that could be confirmed. Without a target, the strategy that ends with
    the lowest loss with every seed. Only strategies that ran to their end compete, on the seeds that all of them have
    finished. Those that failed, touched the target without holding it, never sent anything, or continued without ranks
    are named.
    """
    contest, target = _Contest.of(results), results.target_loss
    rivals = contest.rivals
    by_time = target is not None and any(
        run.held_seconds is not None for each in rivals for run in contest.runs(each)
    )
    figure = "held_seconds" if by_time else "final_loss"
    ordered = [each for each in rivals if contest.mean(each, figure) < math.inf]
    ordered.sort(key=lambda each: contest.mean(each, figure))
    wins = contest.wins(figure)
    wins_all = bool(ordered) and wins[ordered[0].name] == len(contest.seeds)
    leaders = [each for each in ordered[:1] if by_time]
    leaders += [each for each in ordered[1:] if by_time and contest.why_equal(ordered[0], each)]
    sooner = contest.touched_sooner(ordered[0]) if leaders else []
    is_timed = any(each.virtual_seconds is not None for each in rivals)
    is_decided = len(leaders) == 1 and not sooner if by_time else target is None or not is_timed
    has_winner = len(rivals) > 1 and wins_all and is_decided
    until = results.settings.get("until")
    limit = f" or {visible(until)} of virtual time, whichever came first" if until is not None else ""
    sentences = rendered(
        "results/report/verdict.txt",
        results=results,
        contest=contest,
        by_time=by_time,
        ordered=ordered,
        wins=wins,
        wins_all=wins_all,
        leaders=leaders,
        sooner=sooner,
        is_timed=is_timed,
        has_winner=has_winner,
        goal=f"loss {target:g}" if target is not None else "",
        span=count_text(results.settings.get("steps"), "step") + limit,
        ratio=ratio,
        time_text=time_text,
    )
    text = " ".join(filter(None, sentences.splitlines()))
    return Verdict(text, ordered[0].name if has_winner and results.running is None else None)


@dataclass(frozen=True)
class _Contest:
    """Strategies that compete, and the seeds that all of them have finished."""

    results: Results
    rivals: Sequence[StrategyResult]
    seeds: Sequence[int]

    @classmethod
    def of(cls, results: Results) -> _Contest:
        rivals = [
            each
            for each in results.strategies
            if each.error is None
            and any(map(_is_judged, each.runs))
            and not any(map(_has_diverged, each.runs))
        ]
        finished = [{run.seed for run in each.runs if _is_judged(run)} for each in rivals]
        seeds = [seed for seed in results.seeds if all(seed in each for each in finished)]
        return cls(results, rivals, seeds if rivals else [])

    def runs(self, strategy: StrategyResult) -> list[SeedResult]:
        """A rival's runs with the seeds that count."""
        judged = {run.seed: run for run in reversed(strategy.runs) if _is_judged(run)}
        return [judged[seed] for seed in self.seeds]

    def wins(self, figure: str) -> Counter[str | None]:
        """Number of seeds that each rival wins alone, by the least value; under None those without a winner."""
        wins: Counter[str | None] = Counter()
        for runs in zip(*map(self.runs, self.rivals), strict=True):
            values = [math.inf if (value := getattr(run, figure)) is None else value for run in runs]
            least = min(values)
            is_alone = values.count(least) == 1 and least < math.inf
            wins[self.rivals[values.index(least)].name if is_alone else None] += 1
        return wins

    def mean(self, strategy: StrategyResult, figure: str = "held_seconds") -> float:
        """Mean of a figure over the seeds; infinite where one lacks it."""
        mean, _ = self.spread(strategy, figure)
        return math.inf if mean is None else float(mean)

    def loss(self, strategy: StrategyResult) -> float:
        """Mean of its final losses."""
        return self.mean(strategy, "final_loss")

    @property
    def lowest(self) -> StrategyResult:
        """The rival that ends with the lowest loss."""
        return min(self.rivals, key=self.loss)

    @property
    def missed(self) -> list[StrategyResult]:
        """Rivals that neither held nor touched the target."""
        return [each for each in self.rivals if not sum(self.targets(each)[:2])]

    def spread(
        self, strategy: StrategyResult, figure: str = "held_seconds"
    ) -> tuple[float | None, float | None]:
        """Mean of a figure and its deviation."""
        return mean_and_deviation([getattr(run, figure) for run in self.runs(strategy)])

    def leads(self, baseline: StrategyResult, winner: StrategyResult) -> list[float]:
        """Ratios of the baseline's time to the winner's, one a seed, the least first."""
        pairs = zip(self.runs(baseline), self.runs(winner), strict=True)
        return sorted((one.held_seconds or 0.0) / (other.held_seconds or 1.0) for one, other in pairs)

    def longer(self, other: StrategyResult, winner: StrategyResult) -> tuple[float, float] | None:
        """Interval of the seconds that another takes longer than the winner, seed by seed."""
        return lead_interval(self.runs(other), self.runs(winner), self.results.target_loss)

    def gap(self, *strategies: StrategyResult) -> float:
        """Mean virtual seconds between the evaluations around the target, the largest of these strategies'."""
        return max(gap_of(self.runs(each), self.results.target_loss) for each in strategies)

    def interval(self, strategy: StrategyResult) -> str:
        """Interval of a strategy's evaluations, in brackets; empty where it is unknown."""
        gap = self.gap(strategy)
        every = evaluated_every(self.results)
        apart = f": {format_seconds(gap)} apart" if gap else ""
        return f" (evaluated every {every}{apart})" if every else ""

    def why_equal(self, first: StrategyResult, other: StrategyResult) -> str:
        """Reason why the lead of the first counts as none; empty where it counts."""
        return why_equal(self.mean(first), self.mean(other), self.gap(first, other))

    def touched_sooner(self, first: StrategyResult) -> list[StrategyResult]:
        """Strategies at the target before `first`, which ended before that could be confirmed with every seed."""
        found = []
        for each in self.rivals:
            touch = unconfirmed_seconds(self.runs(each), self.results.target_loss)
            if touch is not None and touch < self.mean(first):
                found.append(each)
        return found

    def cut_off(self, first: StrategyResult) -> list[StrategyResult]:
        """Strategies that missed the target, and whose steps ended before `first` had reached it."""
        return [each for each in self.missed if self.mean(each, "virtual_seconds") < self.mean(first)]

    def equal_time(self, cut: Sequence[StrategyResult]) -> str:
        """Advice that gives strategies which ran out of steps the time that the slowest had."""
        settings, steps = self.results.settings, self.results.settings.get("steps")
        least = min(self.mean(each, "virtual_seconds") for each in cut)
        is_simulated = self.results.clock != WALL_CLOCK and 0 < least < math.inf
        if settings.get("until") is not None or not isinstance(steps, int) or not is_simulated:
            return "train longer, or evaluate more often (evaluate.every)"
        ends = [self.mean(each, "virtual_seconds") for each in self.rivals]
        longest = max(each for each in ends if each < math.inf)
        unit = 10.0 ** (math.floor(math.log10(longest)) - 2)
        until = math.ceil(longest / unit) * unit  # three digits, and no step of the slowest less
        return (
            f"compare in equal time, --set until='{until:g} s' --set steps={math.ceil(steps * until / least)}"
        )

    def targets(self, strategy: StrategyResult) -> tuple[int, int, str]:
        """Number of seeds that held and that touched the target, and the time of the touches."""
        runs, target = self.runs(strategy), self.results.target_loss
        counts = [[run.target for run in runs].count(state) for state in ("held", "touched")]
        found = [run.crossing(target) for run in runs if run.target == "touched"]
        mean, deviation = mean_and_deviation([each and each.seconds for each in found])
        text = "" if mean is None else time_text(mean, deviation, mean) if deviation else format_seconds(mean)
        return counts[0], counts[1], text and f" after {text}"

    def near(self, strategies: Sequence[StrategyResult]) -> dict[tuple[int, int, str], list[StrategyResult]]:
        """Strategies that held the target with some seeds, or touched it, by their `targets`."""
        near: dict[tuple[int, int, str], list[StrategyResult]] = {}
        for each in strategies:
            held, touched, _ = found = self.targets(each)
            if held + touched > 0 and held < len(self.seeds):
                near.setdefault(found, []).append(each)
        return near

    def diverged(self, strategy: StrategyResult) -> list[int]:
        """Seeds with which a strategy that is known to have diverged ended without a finite loss."""
        is_known = any(map(_is_judged, strategy.runs)) or strategy.first_non_finite_step is not None
        is_named = is_known and strategy.error is None
        return [run.seed for run in strategy.runs if is_named and _has_diverged(run)]

    @property
    def ended_before(self) -> dict[str, list[StrategyResult]]:
        """Strategies that ended before weather of the topology, by the words on it."""
        ended: dict[str, list[StrategyResult]] = {}
        for result in self.results.strategies:
            for line in dict.fromkeys(run.later_weather for run in result.runs if run.later_weather):
                ended.setdefault(line, []).append(result)
        return ended

    @property
    def unused(self) -> list[str]:
        """Operations whose algorithm was chosen, and which no strategy used."""
        chosen = self.results.settings.get("collectives")
        runs = [run for each in self.results.strategies for run in each.runs]
        if not isinstance(chosen, dict) or not all(run.complete for run in runs):
            return []
        return [visible(op, 40) for op in chosen if not any(op in run.collectives for run in runs)]


def why_equal(first: float, other: float, gap: float) -> str:
    """Reason why a lead in time counts as none; empty where it counts.

    Args:
        first, other: seconds to the target.
        gap: seconds between evaluations, of that of the two which has more.
    """
    if other < first * _CLOSE:
        return f"leads of less than {_CLOSE - 1:.0%} change with the protocol and with jitter"
    if other - first < gap:
        return f"the lead is below the time between evaluations, which is up to {format_seconds(gap)}"
    return ""


def gap_of(runs: Sequence[SeedResult], target_loss: float | None) -> float:
    """Mean virtual seconds between the evaluations around the target: the resolution of times to it."""
    crossings = [run.crossing(target_loss) for run in runs]
    return math.fsum(each.gap for each in crossings if each) / len(crossings)


def lead_interval(
    second: Sequence[SeedResult], first: Sequence[SeedResult], target_loss: float | None
) -> tuple[float, float] | None:
    """Interval of the seconds that `second` takes longer to the target than `first`, paired by seed.

    It holds all leads that evaluations cannot tell apart: a target was reached at some instant since the one before.
    """
    times = [[run.held_seconds or 0.0 for run in runs] for runs in (second, first)]
    interval = paired_interval(*times)
    if interval is None:
        return None
    lead = (math.fsum(times[0]) - math.fsum(times[1])) / len(first)
    low, high = lead - gap_of(second, target_loss), lead + gap_of(first, target_loss)
    return min(interval[0], low), max(interval[1], high)


def unconfirmed_seconds(runs: Sequence[SeedResult], target_loss: float | None) -> float | None:
    """Mean seconds to the first models at the target, where runs ended before all of these could be confirmed."""
    crossings = [run.crossing(target_loss) for run in runs]
    seconds = [each.seconds for each in crossings if each is not None and each.seconds is not None]
    is_open = len(seconds) == len(runs) and all(
        run.target == "held" or (crossing is not None and crossing.num_later < LEAST_LATER)
        for run, crossing in zip(runs, crossings, strict=True)
    )
    return (
        math.fsum(seconds) / len(seconds) if is_open and any(run.target != "held" for run in runs) else None
    )


def _is_judged(run: SeedResult) -> bool:
    return run.complete and run.final_loss is not None


def _has_diverged(run: SeedResult) -> bool:
    """True if it ended with a loss that is not finite; such a seed is no missing one."""
    return run.complete and run.final_loss is None
