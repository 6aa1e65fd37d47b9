"""The verdict: which strategy wins and why, or that none does."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from exogym_core.names import visible
from exogym_core.results.progress import format_loss
from exogym_core.results.report.table import count_text, ratio, time_text
from exogym_core.results.seeds import mean_and_deviation
from netsim.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from exogym_core.results.reading import Results, SeedResult, StrategyResult

__all__ = ["Verdict", "verdict"]

_MOST_ABSENCES = 3  # listed one by one
_HOLDING = (
    "A target is held if at least two later evaluations confirm it: train longer, or evaluate more often "
    "(evaluate.every)."
)
_CLOSE = 1.05  # leads below this count as equal: models of networks are less accurate


class Verdict(NamedTuple):
    """The sentences, and the winner's name where there is one."""

    text: str
    winner: str | None = None


def verdict(results: Results) -> Verdict:
    """The winner: the strategy that reaches the target loss first in virtual time, with every seed, and holds it.

    Without a target, the strategy that ends with the lowest loss with every seed. Only strategies that ran to their
    end compete, on the seeds that all of them have finished. Those that failed, touched the target without holding it,
    never sent anything, or continued without ranks are named.
    """
    contest = _Contest.of(results)
    decision = _decided(contest)
    text = decision.text + contest.unfinished() + _silent(contest) + _absent(results) + _failed(results)
    text += _diverged(results)
    text += _uncharged(results) + _after_end(results) + _unused(results)
    if results.running is None:
        return Verdict(text, decision.winner)
    so_far = f" So far: {text}" if contest.rivals else ""
    return Verdict(f"This run is in progress ({visible(results.running, 200)}).{so_far}")


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
        seeds = [seed for seed in results.seeds if all(_run(each, seed) for each in rivals)]
        return cls(results, rivals, seeds)

    def runs(self, strategy: StrategyResult) -> list[SeedResult]:
        """A rival's runs with the seeds that count."""
        return [run for seed in self.seeds if (run := _run(strategy, seed)) is not None]

    def first(self, value: Callable[[SeedResult], float | None]) -> Counter[str | None]:
        """Number of seeds that each rival wins alone, by the least value; under None those without a winner."""
        wins: Counter[str | None] = Counter()
        for seed in self.seeds:
            known = [
                (number, each.name)
                for each in self.rivals
                if (run := _run(each, seed)) is not None and (number := value(run)) is not None
            ]
            least = min((number for number, _ in known), default=None)
            names = [name for number, name in known if number == least]
            wins[names[0] if len(names) == 1 else None] += 1
        return wins

    def mean(self, strategy: StrategyResult, value: Callable[[SeedResult], float | None]) -> float:
        """Mean of a value over the seeds; infinite where one lacks it."""
        mean, _ = mean_and_deviation([value(run) for run in self.runs(strategy)])
        return float("inf") if mean is None else float(mean)

    @property
    def with_every_seed(self) -> str:
        return f" with each of {len(self.seeds)} seeds" if len(self.seeds) > 1 else ""

    def unfinished(self) -> str:
        """Sentence on the seeds that are compared, where these are not all."""
        if self.rivals and len(self.seeds) < len(self.results.seeds):
            return (
                f" Compared are the seeds that all have finished: {_listed(map(str, self.seeds)) or 'none'}."
            )
        return ""


def _is_judged(run: SeedResult) -> bool:
    return run.complete and run.final_loss is not None


def _has_diverged(run: SeedResult) -> bool:
    """True if it ended with a loss that is not finite; such a seed is no missing one."""
    return run.complete and run.final_loss is None


def _run(strategy: StrategyResult, seed: int) -> SeedResult | None:
    return next((run for run in strategy.runs if run.seed == seed and _is_judged(run)), None)


_held_at = attrgetter("held_seconds")
_final = attrgetter("final_loss")


def _decided(contest: _Contest) -> Verdict:
    if not contest.seeds or not contest.rivals:
        return Verdict("No strategy ran to its end and was judged with a finite loss, so there is no winner.")
    has_target = contest.results.target_loss is not None
    if has_target and any(_held_at(run) is not None for each in contest.rivals for run in contest.runs(each)):
        return _by_time(contest)
    return _by_loss(contest)


# -- by time ---------------------------------------------------------------------------------------------------


def _by_time(contest: _Contest) -> Verdict:
    holders = [each for each in contest.rivals if contest.mean(each, _held_at) < float("inf")]
    holders.sort(key=lambda each: contest.mean(each, _held_at))
    wins = contest.first(_held_at)
    target = f"loss {contest.results.target_loss:g}"
    named = [name for name in wins if name is not None and wins[name] == len(contest.seeds)]
    if len(contest.rivals) == 1:
        text = f"{_name(contest.rivals[0])} {_reaches(contest, contest.rivals[0])}."
        text += _why(contest.rivals[0], None) if holders else ""
        return Verdict(text)
    if not named:
        return Verdict(
            _split(contest, wins, f"reaches {target} first") + _times(contest, holders) + _others(contest)
        )
    winner = next(each for each in holders if each.name == named[0])
    if len(_leaders(contest, holders)) > 1:
        return Verdict(_equals(contest, holders) + _why(winner, contest.results.baseline) + _others(contest))
    text = f"{_name(winner)} reaches {target} first{contest.with_every_seed}, after {_time(contest, winner)}"
    text += f"{_lead(contest, holders)}.{_why(winner, contest.results.baseline)}{_others(contest)}"
    best = min(contest.rivals, key=lambda each: contest.mean(each, _final))
    if contest.mean(best, _final) < contest.mean(winner, _final):
        losses = (
            f"{format_loss(contest.mean(best, _final))} against {format_loss(contest.mean(winner, _final))}"
        )
        text += f" The lowest final loss is {_name(best)}'s ({losses})."
    return Verdict(text + _one_seed(contest), winner.name)


def _leaders(contest: _Contest, holders: Sequence[StrategyResult]) -> list[StrategyResult]:
    """The first, and those whose lead over it is too small to count."""
    least = contest.mean(holders[0], _held_at)
    return [each for each in holders if each is holders[0] or contest.mean(each, _held_at) < least * _CLOSE]


def _equals(contest: _Contest, holders: Sequence[StrategyResult]) -> str:
    leaders = _leaders(contest, holders)
    names = _listed(f"{_name(each)} ({format_seconds(contest.mean(each, _held_at))})" for each in leaders)
    text = (
        f"{names} reach loss {contest.results.target_loss:g} first and are equal: leads of less than "
        f"{_CLOSE - 1:.0%} change with the protocol and with jitter{_interval(contest.results)}."
    )
    lead = _lead(contest, [leaders[0], *(each for each in holders if each not in leaders)])
    return f"{text} {_name(leaders[0])} is{lead.removeprefix(',')}." if "sooner" in lead else text


def _time(contest: _Contest, strategy: StrategyResult) -> str:
    """Time to the target, with the interval of evaluations."""
    seconds, deviation = mean_and_deviation([_held_at(run) for run in contest.runs(strategy)])
    assert seconds is not None
    if seconds == 0:
        return "0 s: the initial model has it before any training, so choose a lower target"
    shown = time_text(seconds, deviation, seconds) if deviation else format_seconds(seconds)
    return f"{shown} of {contest.results.clock}{_interval(contest.results)}"


def _interval(results: Results) -> str:
    every = results.setting("evaluate.every")
    return "" if every is None else f" (evaluated every {count_text(every, 'step')})"


def _lead(contest: _Contest, holders: Sequence[StrategyResult]) -> str:
    """Lead over the baseline and the next strategy."""
    winner, baseline = holders[0], contest.results.baseline
    seconds = contest.mean(winner, _held_at)
    parts = []
    if baseline is not None and baseline is not winner and baseline in holders:
        base = contest.mean(baseline, _held_at)
        lead = f"{ratio(base, seconds)} sooner than {_name(baseline)} ({format_seconds(base)}"
        parts.append(f"{lead}{_range(contest, baseline, winner)})")
    if len(holders) > 1 and holders[1] is not baseline:
        following = contest.mean(holders[1], _held_at)
        parts.append(f"{_name(holders[1])} is next with {format_seconds(following)}")
    return f", {'; '.join(parts)}" if parts else ""


def _range(contest: _Contest, baseline: StrategyResult, winner: StrategyResult) -> str:
    """The least and the largest lead, seed by seed."""
    pairs = zip(contest.runs(baseline), contest.runs(winner), strict=True)
    leads = sorted((_held_at(one) or 0.0) / (_held_at(other) or 1.0) for one, other in pairs)
    return "" if leads[0] == leads[-1] else f"; by seed {ratio(leads[0], 1.0)} to {ratio(leads[-1], 1.0)}"


def _times(contest: _Contest, holders: Sequence[StrategyResult]) -> str:
    times = [f"{_name(each)} {format_seconds(contest.mean(each, _held_at))}" for each in holders]
    every = _interval(contest.results)
    return f" Mean {contest.results.clock} to it{every}: {', '.join(times)}." if times else ""


def _others(contest: _Contest) -> str:
    """Sentences on strategies that did not hold the target with every seed."""
    missed: list[str] = []
    near: list[StrategyResult] = []
    for each in contest.rivals:
        targets = [run.target for run in contest.runs(each)]
        if all(target == "held" for target in targets):
            continue
        if "held" in targets or "touched" in targets:
            near.append(each)
        else:
            missed.append(_name(each))
    never = f" {_listed(missed)} did not reach it in {_span(contest.results)}." if missed else ""
    return _together(contest, near) + never


def _together(contest: _Contest, strategies: Iterable[StrategyResult]) -> str:
    """Sentences on strategies and the target; those of which the same is true share one."""
    names: dict[str, list[str]] = {}
    for each in strategies:
        names.setdefault(_reaches(contest, each), []).append(_name(each))
    return "".join(
        f" {_listed(who)} {what if len(who) == 1 else what.replace('but was not', 'but were not')}."
        for what, who in names.items()
    )


def _reaches(contest: _Contest, strategy: StrategyResult) -> str:
    """Predicate of a sentence on a strategy and the target."""
    targets = [run.target for run in contest.runs(strategy)]
    held, touched, num_seeds = targets.count("held"), targets.count("touched"), len(targets)
    goal = f"loss {contest.results.target_loss:g}"
    if held == num_seeds:
        return f"reaches {goal}{contest.with_every_seed}, after {_time(contest, strategy)}"
    parts = []
    if held:
        parts.append(f"reaches {goal} with {held} of {num_seeds} seeds only")
    if touched:
        of_seeds = f" with {touched} of {num_seeds} seeds" if num_seeds > 1 else ""
        first = _first_touch(contest, strategy)
        parts.append(f"touched {goal}{first}{of_seeds} but was not seen to hold it")
    return " and ".join(parts)


def _first_touch(contest: _Contest, strategy: StrategyResult) -> str:
    """Time of the first evaluation at the target, with one seed."""
    target = contest.results.target_loss
    if len(contest.seeds) > 1 or target is None:
        return ""
    for run in contest.runs(strategy):
        places = run.at_steps("virtual_seconds")
        for step, loss in run.losses:
            if loss <= target and step in places:
                return f" after {format_seconds(places[step])}"
    return ""


# -- by loss ---------------------------------------------------------------------------------------------------


def _by_loss(contest: _Contest) -> Verdict:
    results = contest.results
    rivals = sorted(contest.rivals, key=lambda each: contest.mean(each, _final))
    best, losses = rivals[0], [format_loss(contest.mean(each, _final)) for each in rivals]
    wins = contest.first(_final)
    wins_all = wins[best.name] == len(contest.seeds)
    if len(rivals) == 1:
        seconds = best.virtual_seconds
        took = "" if seconds is None else f" after {format_seconds(seconds)} of {results.clock}"
        alone = len(results.strategies) == 1 and len(results.settings.get("strategies") or ()) <= 1
        text = f"{_name(best)} ends with a loss of {losses[0]}{took}."
        if not alone:
            text = (
                f"Only {_name(best)} ran to its end, with a loss of {losses[0]}: nothing to compare it with."
            )
    elif wins_all:
        text = f"{_name(best)} ends with the lowest loss{contest.with_every_seed}, {losses[0]}"
        text += f" (next: {_name(rivals[1])}, {losses[1]})."
    else:
        means = ", ".join(f"{_name(each)} {loss}" for each, loss in zip(rivals, losses, strict=True))
        text = f"Mean final loss: {means}."
        if results.target_loss is None:
            text = f"{_split(contest, wins, 'ends with the lowest loss')} {text}"
    is_timed = any(each.virtual_seconds is not None for each in rivals)
    if results.target_loss is not None and is_timed:
        goal = f"loss {results.target_loss:g} in {_span(results)}"
        touched = [each for each in rivals if any(run.target == "touched" for run in contest.runs(each))]
        if len(rivals) > 1:
            lead = f"No strategy {'held' if touched else 'reached'} {goal}, so there is no winner."
        else:
            lead = f"{_name(best)} did not reach {goal}."
        sentences = _together(contest, touched)
        lead = sentences.strip() if touched and len(rivals) == 1 else lead + sentences
        lead += f" {_HOLDING}" if touched else ""
        return Verdict(f"{lead} {text}")
    if not is_timed:
        text += " There is no topology, so there is no virtual time."
    elif len(rivals) > 1 and best.virtual_seconds is not None:
        text += f" It took {format_seconds(best.virtual_seconds)} of {results.clock}; without a target_loss,"
        text += " the time to a loss is not compared."
    if len(rivals) == 1 or not wins_all:
        return Verdict(text)
    return Verdict(text + _why(best, results.baseline) + _one_seed(contest), best.name)


# -- by time and by loss -------------------------------------------------------------------------------------------


def _split(contest: _Contest, wins: Counter[str | None], what: str) -> str:
    """Number of seeds that each strategy wins, where none wins with all."""
    if len(contest.seeds) == 1:
        return f"There is no winner: no strategy alone {what}."
    shares = [
        f"{_name(each)} {what} with {wins[each.name]} of {len(contest.seeds)} seeds"
        for each in contest.rivals
        if wins[each.name]
    ]
    shares += [f"no strategy alone with {wins[None]}"] if wins[None] else []
    return f"No strategy wins with every seed: {', '.join(shares)}."


def _one_seed(contest: _Contest) -> str:
    if len(contest.results.seeds) > 1:
        return ""
    return " This is one seed: run with --set seeds=3 to check it with others."


def _why(winner: StrategyResult, baseline: StrategyResult | None) -> str:
    """Bytes and compute utilisation of the winner, and of the baseline where that is another."""
    if winner.bytes_sent_per_worker is None:
        return ""
    other = baseline if baseline is not winner else None
    text = f" It sends {format_bytes(winner.bytes_sent_per_worker)} per worker"
    if other is not None and other.bytes_sent_per_worker is not None:
        text += f" ({_name(other)}: {format_bytes(other.bytes_sent_per_worker)})"
    if winner.compute_utilisation is not None:
        text += f" and its workers compute {winner.compute_utilisation:.1%} of the time"
        if other is not None and other.compute_utilisation is not None:
            text += f" instead of {other.compute_utilisation:.1%}"
    return f"{text}."


def _silent(contest: _Contest) -> str:
    """Sentence on strategies whose workers sent nothing, so that each trained on its own."""
    results = contest.results
    if results.setting("workers.count") in (None, 1):
        return ""
    silent = [_name(one) for one in results.strategies if one.ended and one.bytes_sent_per_worker == 0]
    if not silent:
        return ""
    return f" {_listed(silent)} sent nothing in {_span(results)}: the workers trained each on their own."


def _failed(results: Results) -> str:
    return "".join(
        f" {_name(each)} failed: {visible(each.error, 200).rstrip('.')}."
        for each in results.strategies
        if each.error is not None
    )


def _diverged(results: Results) -> str:
    """Sentences on strategies that ended with a loss that is not finite, with some seed at least."""
    text = ""
    for each in results.strategies:
        seeds = [str(run.seed) for run in each.runs if _has_diverged(run)]
        is_known = any(map(_is_judged, each.runs)) or each.first_non_finite_step is not None
        if seeds and is_known and each.error is None:
            of = f" with seed {_listed(seeds)}" if len(results.seeds) > 1 else ""
            text += f" {_name(each)} ended without a finite loss{of}, and does not compete."
    return text


def _uncharged(results: Results) -> str:
    """Strategies whose times lack the work of encoding, which the others pay for."""
    named = [_name(each) for each in results.strategies if each.coding is not None]
    return f" Coding is not charged to {_listed(named)}: the times lack what encoding takes." if named else ""


def _after_end(results: Results) -> str:
    """Sentences on weather that strategies ended before."""
    ended: dict[str, list[str]] = {}
    for result in results.strategies:
        for line in dict.fromkeys(run.later_weather for run in result.runs if run.later_weather):
            ended.setdefault(line, []).append(_name(result))
    return "".join(f" {_listed(names)} ended before {line}." for line, names in ended.items())


def _unused(results: Results) -> str:
    """Sentence on operations whose algorithm was chosen, and which no strategy used."""
    chosen, runs = (
        results.settings.get("collectives"),
        [run for each in results.strategies for run in each.runs],
    )
    if not isinstance(chosen, dict) or not all(run.complete for run in runs):
        return ""
    unused = [visible(op, 40) for op in chosen if not any(op in run.collectives for run in runs)]
    return (
        f" No strategy used {_listed(unused)}, of which `collectives` names the algorithm." if unused else ""
    )


def _absent(results: Results) -> str:
    """Sentences on ranks that were absent from rounds."""
    text = ""
    for result in results.strategies:
        for run in result.runs:
            absences = [_absence(each) for each in run.dropped_peers[:_MOST_ABSENCES]]
            more = len(run.dropped_peers) - len(absences)
            if absences:
                absences += [f"in {more} more absences (see dropped_peers)"] if more else []
                seed = f" with seed {run.seed}" if len(results.seeds) > 1 else ""
                text += f" {_name(result)}{seed} continued without {', '.join(absences)}."
    return text


def _absence(row: Mapping[str, Any]) -> str:
    def at(step: str, seconds: str) -> str:
        when = row.get(seconds)
        return f"step {row[step]}" + (f" ({format_seconds(when)})" if when is not None else "")

    until = "to the end" if row["back_step"] is None else f"to {at('back_step', 'back_virtual_seconds')}"
    return f"rank {row['rank']} from {at('step', 'virtual_seconds')} {until}"


def _span(results: Results) -> str:
    """Limit of runs: steps, and virtual time where that may have ended them."""
    steps, until = (results.settings.get(key) for key in ("steps", "until"))
    ends = "" if until is None else f" or {visible(until)} of virtual time, whichever came first"
    return f"{count_text(steps, 'step')}{ends}"


def _name(strategy: StrategyResult) -> str:
    return visible(strategy.name)


def _listed(names: Iterable[str]) -> str:
    *first, last = list(names) or [""]
    return f"{', '.join(first)} and {last}" if first else last
