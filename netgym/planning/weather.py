"""Weather and crashes in plans: number of rounds that show changes and random draws, and the cost of a crash."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace
from itertools import chain, pairwise
from typing import TYPE_CHECKING, NamedTuple

from netsim import HostEvent
from netsim.errors import DeadlockError
from netsim.units import format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from netgym.planning.measure import Measured, Plan
    from netgym.planning.setting import Crashes, Setting
    from netsim import Weather

__all__ = [
    "Loss",
    "changes_between",
    "last_change_seconds",
    "loss_of_a_crash",
    "num_rounds_needed",
    "rounds_remarks",
    "with_failures",
]

_MOST_CALLS = 20_000  # of all ranks, that are simulated
_FEWEST, _MOST = 12, 500  # rounds, if that many calls are not too many
_ROUNDS_AFTER = 3  # the last change: they show whether rounds repeat


def last_change_seconds(weather: Weather) -> float:
    """End of the last scheduled change; 0 where there is none."""
    return max(_instants(weather), default=0.0)


def changes_between(weather: Weather, start: float, end: float) -> int:
    """Number of scheduled changes after `start` and before `end`."""
    return sum(start < at < end for at in _instants(weather))


def _instants(weather: Weather) -> Iterator[float]:
    return chain.from_iterable(entry.instants() for entry in weather.entries())


def num_rounds_needed(
    setting: Setting, ends: Sequence[float], calls_a_round: int, budget: float | None
) -> int:
    """Number of rounds to simulate, given the `ends` of those that were simulated.

    Where rounds never repeat, up to a limit, and figures are means; else a few beyond the last change. At most the
    rounds of the budget.

    Args:
        setting: setting with the network's weather.
        ends: end of each simulated round in seconds.
        calls_a_round: calls of all ranks in a round.
        budget: number of rounds; None: unlimited.
    """
    done, weather = len(ends), setting.topology.weather
    if setting.differs_for_ever():
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


def rounds_remarks(setting: Setting, ends: Sequence[float], budget: float | None) -> tuple[str, ...]:
    """Remarks on figures from rounds that end at `ends`."""
    weather = setting.topology.weather
    if not weather and not setting.differs_for_ever():
        return ()
    if budget is not None and len(ends) >= budget:
        late = setting.topology.weather.after(ends[-1])
        whole = "all rounds of the budget were simulated, with the weather and draws that training meets"
        return (whole if late is None else f"{whole}: it ends before {late}",)
    if setting.differs_for_ever():
        rounds = [later - earlier for earlier, later in pairwise(ends)]
        mean = sum(rounds) / len(rounds)
        spread = math.sqrt(sum((each - mean) ** 2 for each in rounds) / len(rounds))
        error = spread / mean / math.sqrt(len(rounds)) if mean else 0.0
        return (
            f"rounds differ by chance, {min(rounds):.6g} to {max(rounds):.6g} s: figures are means over "
            f"{len(rounds)} of them, known to {error:.1%} (one standard error)",
        )
    last = last_change_seconds(weather)
    if ends[-1] < last:
        return (
            f"the network's last change is at {last:.6g} s, and rounds were simulated up to {ends[-1]:.6g} s: later "
            "changes are not in these figures",
        )
    return (f"the network changes until {last:.6g} s, which was simulated; a round is one after that",)


_MOMENTS = 4  # single crashes that are simulated, each of another host in another part of a round
_ROUNDS = 3  # a crash is in the second; in the third all have met again
_MOST_RANKS = 32  # beyond, a crash costs its repair and half of the computing between two calls
_MOST_ROUNDS = 40  # simulated of a repair; a longer one is extrapolated from there
_AFTER = 3  # rounds after the repair, in which the crashed worker returns
_FREQUENT = 0.5  # hosts that are away in the mean: beyond, crashes meet each other


class Loss(NamedTuple):
    """Mean cost of one crash.

    Attributes:
        seconds: delay of the other workers, or of the crashed one where workers go their own pace.
        tokens: tokens lost where rounds continue without the crashed worker.
        fatal: share of crashes that end a run, as a transport gives up a connection before the repair. They cost the
            repair and the current round, as if the run resumed from the round's beginning.
    """

    seconds: float
    tokens: float
    fatal: float = 0.0


def with_failures(measured: Measured, crashes: Crashes) -> Plan:
    """Plan with the cost of crashes: fewer tokens per second, more days and money; figures of a round are unchanged."""
    quiet, setting = measured.plan, measured.setting
    hosts = sorted(set(setting.hosts))
    loss = loss_of_a_crash(measured, crashes, hosts)
    each = crashes.mean_seconds + crashes.repair_seconds
    if measured.rounds.has_absences:
        lost = loss.tokens * len(hosts) / each / quiet.tokens_per_second
        factor = (1 + loss.seconds * len(hosts) / each) / (1 - lost) if lost < 1 else math.inf
    elif measured.strategy.is_synchronous:  # it runs only while all are there
        factor = math.inf
        with suppress(OverflowError):
            factor = (1 + loss.seconds / crashes.mean_seconds) ** len(hosts)
    else:
        factor = 1 + loss.seconds / crashes.mean_seconds
    remarks = list(quiet.remarks)
    if len(hosts) * crashes.repair_seconds / each > _FREQUENT:
        remarks.append(
            "crashes are so frequent that several hosts are often away at once: their cost is an estimate"
        )
    if measured.rounds.has_absences and measured.strategy.patience.rejoin == "next_round":
        remarks.append(
            "a worker that returns begins with the next common round; rejoin: at_once plans torchft's, which trains on"
        )
    if loss.fatal:
        remarks.append(
            f"{loss.fatal:.0%} of crashes end the run: a connection is given up before a repair of "
            f"{format_seconds(crashes.repair_seconds)} is over; they are taken to be resumed from the round's beginning"
        )
    values = {
        "crashes_per_day": len(hosts) / each * 86_400,
        "seconds_lost_per_crash": loss.seconds,
        "tokens_lost_per_crash": loss.tokens,
        "times_as_long": factor,
    }
    slowed = quiet.scaled(factor)
    if slowed.days is not None:
        values["restarts"] = values["crashes_per_day"] * slowed.days
    return replace(slowed, failures=values, remarks=tuple(remarks))


def loss_of_a_crash(measured: Measured, crashes: Crashes, hosts: Sequence[int]) -> Loss:
    """Mean cost of a crash, from simulated crashes of several hosts at several moments of a round."""
    plan, setting, repair = measured.plan, measured.setting, crashes.repair_seconds
    if setting.num_ranks > _MOST_RANKS:
        stretch = plan.seconds_per_round - plan.exposed_seconds_per_round
        return Loss(repair + stretch / 2, 0.0)
    rounds, beyond = measured.rounds, 0.0
    if measured.rounds.has_absences:
        needed = 2 + math.ceil(repair / plan.seconds_per_round) + _AFTER
        rounds = measured.rounds_of(min(needed, _MOST_ROUNDS))
        beyond = max(needed - _MOST_ROUNDS, 0)
        repair -= beyond * plan.seconds_per_round
    elif measured.strategy.is_synchronous:
        rounds = measured.rounds_of(_ROUNDS)
    quiet = rounds.on(setting)
    start = quiet.round_seconds[0]
    length = quiet.round_seconds[1] - start if len(quiet.round_seconds) > 1 else start
    losses, topology = [], setting.topology
    a_worker = plan.steps_per_round * setting.batch_size * setting.model.length  # tokens of a round
    for moment in range(_MOMENTS):
        host = hosts[(moment * len(hosts)) // _MOMENTS if len(hosts) > _MOMENTS else moment % len(hosts)]
        at = start + (moment + 0.5) / _MOMENTS * length
        try:
            crash = HostEvent(at=at, host=topology.hosts[host].name, crash=True, for_=repair)
            weather = topology.weather.with_events([crash])
            crashed = rounds.on(replace(setting, topology=replace(topology, weather=weather)))
        except DeadlockError:  # a connection is given up, as the repair takes longer than TCP waits
            losses.append(Loss(repair + at - start, 0.0, 1.0))
            continue
        later = [a[-1] - b[-1] for a, b in zip(crashed.rank_ends, quiet.rank_ends, strict=True)]
        missed = 0.0
        if measured.strategy.is_synchronous:
            missed, later = sum(crashed.absences) - sum(quiet.absences), [max(min(later), 0.0)]
        losses.append(Loss(max(later), missed * a_worker))
    seconds, tokens, fatal = (sum(column) / len(losses) for column in zip(*losses, strict=True))
    return Loss(seconds, tokens + beyond * a_worker, fatal)
