"""One or two sentences: who wins and why, or that nobody does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from exogym_core.names import visible
from exogym_core.results.report.table import ratio
from netsim.files.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from exogym_core.results.report.results import Results, StrategyResult

__all__ = ["Verdict", "verdict"]

_MOST_ABSENCES = 3  # told one by one
_CLOSE = 1.05  # a lead of less than this is called close


@dataclass(frozen=True)
class Verdict:
    """The sentence, and the winner's name where there is one."""

    text: str
    winner: str | None = None


def verdict(results: Results) -> Verdict:
    """The winner: who reaches the target loss first in virtual time, else who ends with the lowest loss.

    Only strategies that ran to their end compete. Those that never sent anything are told apart, and so are
    ranks that a strategy went on without.
    """
    decision = _judged(results)
    return Verdict(decision.text + _silent(results) + _absent(results), decision.winner)


def _judged(results: Results) -> Verdict:
    ended = [result for result in results.strategies if not result.incomplete]
    judged = [result for result in ended if result.final_loss is not None]
    if not judged:
        return Verdict("No strategy ran to its end with a finite loss, so there is no winner.")
    reached = [result for result in ended if result.virtual_seconds_to_target is not None]
    if results.target_loss is not None and reached:
        reached.sort(key=lambda result: (result.virtual_seconds_to_target, result.final_loss))
        return _won_by_time(results, reached)
    return _won_by_loss(results, sorted(judged, key=lambda result: result.final_loss or 0.0))


def _won_by_time(results: Results, reached: Sequence[StrategyResult]) -> Verdict:
    winner = reached[0]
    seconds = winner.virtual_seconds_to_target
    assert seconds is not None
    name = visible(winner.name, 40)
    first = " first" if len(results.strategies) > 1 else ""
    text = (
        f"{name} reaches loss {results.target_loss:g}{first}, after {format_seconds(seconds)} of virtual time"
    )
    text += f"{_lead(results, reached)}.{_why(winner, results.baseline)}"
    others = [result for result in results.strategies if result not in reached and not result.incomplete]
    if others:
        never = " and ".join(visible(result.name, 40) for result in others)
        text += f" {never} did not reach it in {results.settings.get('steps')} steps."
    best = min(reached, key=lambda result: _loss(result))
    if best is not winner and _loss(best) < _loss(winner):
        text += (
            f" The lowest final loss is {visible(best.name, 40)}'s ({_loss(best):.4f} against "
            f"{_loss(winner):.4f})."
        )
    return Verdict(text, winner.name)


def _lead(results: Results, reached: Sequence[StrategyResult]) -> str:
    """How far ahead of the baseline and of the next one."""
    winner, baseline = reached[0], results.baseline
    seconds = winner.virtual_seconds_to_target
    parts = []
    if baseline is not None and baseline is not winner and baseline in reached:
        base = baseline.virtual_seconds_to_target
        assert base is not None
        parts.append(
            f"{ratio(base, seconds)} sooner than {visible(baseline.name, 40)} ({format_seconds(base)})"
        )
    if len(reached) > 1 and reached[1] is not baseline:
        following = reached[1].virtual_seconds_to_target
        assert following is not None
        assert seconds is not None
        close = "close behind" if following < seconds * _CLOSE else "next"
        parts.append(f"{visible(reached[1].name, 40)} is {close} with {format_seconds(following)}")
    return f", {'; '.join(parts)}" if parts else ""


def _won_by_loss(results: Results, judged: Sequence[StrategyResult]) -> Verdict:
    winner = judged[0]
    name = visible(winner.name, 40)
    if len(judged) == 1:
        text = f"Only {name} ran to its end, with a final loss of {_loss(winner):.4f}: nothing to compare."
    else:
        text = f"{name} ends with the lowest loss, {_loss(winner):.4f}"
        text += f" (next: {visible(judged[1].name, 40)}, {_loss(judged[1]):.4f})."
    if winner.virtual_seconds is None:
        text += " There is no topology, so nothing is known of time."
    elif results.target_loss is not None:
        text = f"No strategy reached loss {results.target_loss:g} in {results.settings.get('steps')} steps. {text}"
    else:
        text += f" It took {format_seconds(winner.virtual_seconds)} of virtual time; without a target_loss,"
        text += " how soon strategies get anywhere is not compared."
    if len(judged) == 1:
        return Verdict(text)
    return Verdict(text + _why(winner, results.baseline), winner.name)


def _why(winner: StrategyResult, baseline: StrategyResult | None) -> str:
    """What the winner sent and how busy it was, against the baseline where there is another."""
    if winner.bytes_sent_per_worker is None:
        return ""
    other = baseline if baseline is not winner else None
    text = f" It sends {format_bytes(winner.bytes_sent_per_worker)} per worker"
    if other is not None and other.bytes_sent_per_worker is not None:
        text += f" ({visible(other.name, 40)}: {format_bytes(other.bytes_sent_per_worker)})"
    if winner.compute_utilisation is not None:
        text += f" and its workers compute {winner.compute_utilisation:.1%} of the time"
        if other is not None and other.compute_utilisation is not None:
            text += f" instead of {other.compute_utilisation:.1%}"
    return f"{text}."


def _silent(results: Results) -> str:
    """Who trained without a word to the others: their figures are those of no strategy at all."""
    workers = results.settings.get("workers")
    if not isinstance(workers, dict) or workers.get("count") == 1:
        return ""
    ended = [one for one in results.strategies if not one.incomplete]
    silent = [visible(one.name, 40) for one in ended if one.bytes_sent_per_worker == 0]
    if not silent:
        return ""
    steps = results.settings.get("steps")
    return f" {' and '.join(silent)} sent nothing in {steps} steps: the workers trained each on their own."


def _loss(result: StrategyResult) -> float:
    return float("inf") if result.final_loss is None else result.final_loss


def _absent(results: Results) -> str:
    """Which ranks strategies went on without, and when."""
    text = ""
    for result in results.strategies:
        told = [_absence(each) for each in result.dropped_peers[:_MOST_ABSENCES]]
        more = len(result.dropped_peers) - len(told)
        if told:
            told += [f"and {more} more times somebody was (see dropped_peers)"] if more else []
            text += f" {visible(result.name, 40)} went on without {', '.join(told)}."
    return text


def _absence(row: Mapping[str, Any]) -> str:
    def at(step: str, seconds: str) -> str:
        when = row.get(seconds)
        return f"step {row[step]}" + (f" ({format_seconds(when)})" if when is not None else "")

    until = "to the end" if row["back_step"] is None else f"to {at('back_step', 'back_virtual_seconds')}"
    return f"rank {row['rank']} from {at('step', 'virtual_seconds')} {until}"
