"""How many rounds must be simulated to see what a network's weather does, and what devices draw by chance."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from exogym_core.cost.compute import Compute
    from netsim.topology.weather import Weather

__all__ = [
    "changes_between",
    "differs_for_ever",
    "last_change_seconds",
    "num_rounds_needed",
    "told_of_rounds",
]

_MOST_CALLS = 20_000  # of all ranks, that are simulated
_FEWEST, _MOST = 12, 500  # rounds, if that many calls are not too many
_ROUNDS_AFTER = 3  # the last change: they show whether rounds repeat


def differs_for_ever(compute: Compute, weather: Weather) -> bool:
    """Whether rounds go on to differ: by jitter and stragglers, drift, and others' traffic that does not end."""
    endless = any(traffic.stop_seconds is None for traffic in weather.background)
    return bool(compute.jitter or compute.straggler_fraction or weather.drift or endless)


def last_change_seconds(weather: Weather) -> float:
    """When the last change that is set to come is over; 0 where there is none."""
    return max(_changes(weather), default=0.0)


def changes_between(weather: Weather, start: float, end: float) -> int:
    """Number of scheduled changes after `start` and before `end`."""
    return sum(start < at < end for at in _changes(weather))


def _changes(weather: Weather) -> Iterator[float]:
    spans = [(event.at_seconds, event.for_seconds) for event in weather.link_events]
    spans += [(event.at_seconds, event.for_seconds) for event in weather.host_events]
    for at, lasts in spans:
        yield at
        if lasts is not None:
            yield at + lasts
    for trace in weather.traces:
        yield from trace.times_seconds
    for traffic in weather.background:
        yield traffic.start_seconds
        if traffic.stop_seconds is not None:
            yield traffic.stop_seconds


def num_rounds_needed(
    compute: Compute, weather: Weather, ends: Sequence[float], calls_a_round: int, budget: float | None
) -> int:
    """How many rounds to simulate, where `ends` is when those that have been simulated were over.

    Where rounds differ for ever, as many as are worth it: figures are means. Else some beyond the last change.
    Never more than the budget has.

    Args:
        compute, weather: of the setting.
        ends: seconds.
        calls_a_round: of all ranks.
        budget: rounds; None: no end.
    """
    done = len(ends)
    if differs_for_ever(compute, weather):
        wanted = _MOST
    elif ends[-1] < (last := last_change_seconds(weather)):
        shortest = min(later - earlier for earlier, later in pairwise([0.0, *ends]))
        wanted = done + math.ceil((last - ends[-1]) / shortest) + _ROUNDS_AFTER if shortest > 0 else _MOST
    elif weather:
        wanted = done + _ROUNDS_AFTER
    else:
        return done
    affordable = min(max(_MOST_CALLS // max(calls_a_round, 1), _FEWEST), _MOST)
    return max(done, min(wanted, affordable, math.ceil(budget) if budget is not None else affordable))


def told_of_rounds(
    compute: Compute, weather: Weather, ends: Sequence[float], budget: float | None
) -> tuple[str, ...]:
    """What is to be known of figures that rest on so many rounds."""
    if budget is not None and len(ends) >= budget:
        return ("all rounds of the budget were simulated, with the weather and draws that training meets",)
    if differs_for_ever(compute, weather):
        rounds = [later - earlier for earlier, later in pairwise(ends)]
        mean = sum(rounds) / len(rounds)
        spread = math.sqrt(sum((each - mean) ** 2 for each in rounds) / len(rounds))
        error = spread / mean / math.sqrt(len(rounds)) if mean else 0.0
        return (
            f"rounds differ by chance, {min(rounds):.6g} to {max(rounds):.6g} s: figures are means over "
            f"{len(rounds)} of them, known to {error:.1%} (one standard error)",
        )
    last = last_change_seconds(weather)
    if not weather:
        return ()
    if ends[-1] < last:
        return (
            f"the network's last change is at {last:.6g} s, and rounds were simulated up to {ends[-1]:.6g} s: what "
            "comes later is not in these figures",
        )
    return (f"the network changes until {last:.6g} s, which was simulated; a round is one after that",)
