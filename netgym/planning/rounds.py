"""Rounds of a strategy, simulated with its own code on the meta device: figures, repetition, pace.

Requests of ranks do not depend on the network unless they read the clock, and most ranks make the same requests. So
one rank runs once for all of its kind, and its requests are simulated on each network.
"""

from __future__ import annotations

import copy
import math
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from exogym_core.communicator.simulated.communicator import SimulatedCommunicator
from exogym_core.communicator.simulated.simulation import Schedules, World
from exogym_core.names import strategy_name
from exogym_core.run.algorithms import CHOICE_ROUNDS, MOST_STEPS, choose_algorithms, first_rounds, rivals
from exogym_core.run.planned_rank import (
    PlannedRounds,
    listing_once,
    planned_rank,
    take_rounds,
    without_updates,
)
from exogym_core.run.recording import (
    REPEATS,
    ClockReadError,
    Computing,
    Recording,
    by_step,
    extrapolated,
    last_calls,
    last_round,
    no_time,
    record,
    record_kinds,
    run_alone,
    without_network,
)
from exogym_core.run.request import with_servers
from exogym_core.strategy.parts.codecs import coding_report
from exogym_core.workers.run import run_ranks
from netgym.command_options import first_line
from netgym.planning.models import worker_memory
from netgym.planning.stages import planned_stages
from netsim.errors import InputError, RankError
from netsim.ranks import Mark, Post, Wait
from netsim.units import format_count, format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from exogym_core.communicator.base import Communicator
    from exogym_core.run.planned_rank import PlannedRank
    from exogym_core.strategy.base import Strategy
    from exogym_core.workers.run import RunResult
    from netgym.planning.setting import Setting
    from netsim.ranks import Call, StampedRow

__all__ = [
    "Pace",
    "RoundFigures",
    "SimulatedRounds",
    "other_algorithms",
    "pace_apart",
    "pace_together",
    "period_of",
    "repeats_from",
]


@dataclass
class RoundFigures:
    """Figures of some simulated rounds.

    Attributes:
        round_seconds: virtual time at which the last rank finished each round.
        compute_seconds: of each rank, after each round: [rank][round].
        counts: `bytes_sent`, `wan_bytes` and `payload_bytes`, and `coded_values` that were encoded or decoded, of each
            rank, after each round: [rank][round].
        end_seconds: when the last rank ended, after what was in flight.
        quiet_seconds: of one of the steps between exchanges, where these were extrapolated.
        collectives: the algorithms that were used, by operation.
        link_bytes: payload that crossed each link, over all of them.
        request_dollars: price of requests to stores, over all of them.
        peers: ranks that each rank met in each round.
        rank_ends: virtual time at which each worker finished each round: [rank][round].
        coding: what `coding_report` says of each rank.
        server_wan_bytes: payload that servers sent to other regions.
        absences: number of ranks without which each round continued; parts where a rank missed some of its steps.
        num_filling: first rounds, in which chains of stages are not full.
    """

    round_seconds: list[float]
    compute_seconds: list[list[float]]
    counts: dict[str, list[list[int]]]
    coding: list[str | None]
    end_seconds: float = 0.0
    quiet_seconds: float | None = None
    collectives: dict[str, list[str]] = field(default_factory=dict)
    link_bytes: list[float] = field(default_factory=list)
    request_dollars: float = 0.0
    peers: list[Hashable] = field(default_factory=list)
    rank_ends: list[list[float]] = field(default_factory=list)
    server_wan_bytes: int = 0
    absences: list[float] = field(default_factory=list)
    num_filling: int = 0

    def mean_computing(self) -> list[float]:
        """Seconds of computing until the end of each round, mean over ranks."""
        return [sum(each) / len(each) for each in zip(*self.compute_seconds, strict=True)]


_SAME_ROUND = 1e-4  # TCP windows keep growing for a while


def repeats_from(seconds: Sequence[float], tolerance: float = _SAME_ROUND) -> int | None:
    """First round from which at least two rounds, up to the last, take equally long; else None.

    Rounds are equal if they differ by less than the share `tolerance`.

    >>> repeats_from([3.0, 2.5, 2.5]), repeats_from([3.0, 2.5])
    (1, None)
    """
    last = seconds[-1]
    first = len(seconds)
    while first and abs(seconds[first - 1] - last) <= tolerance * last:
        first -= 1
    return first if len(seconds) - first >= 2 else None


def period_of(series: Sequence[Hashable]) -> int | None:
    """Period of `series` without its first period, or None.

    >>> period_of([0, 0, 5, 0, 0, 5, 0, 0, 5]), period_of([1, 2, 3, 4])
    (3, None)
    """
    periods = range(1, len(series) // 3 + 1)
    return next((each for each in periods if series[each:-each] == series[2 * each :]), None)


_SAME_PACE = 1e-3


class Pace(NamedTuple):
    """Pace of rounds from now on.

    Attributes:
        seconds: seconds of a round; where ranks go their own pace, workers / rounds per second of all workers.
        computing_seconds: part of `seconds` in which a worker computes, mean over workers.
        ends: end of each simulated round; empty where only the pace is defined.
        steady: rounds repeat.
        span: number of rounds over which bytes are means.
        remarks: notes on the figures.
        own_seconds: seconds of a round of each rank, where ranks go their own pace; else empty.
    """

    seconds: float
    computing_seconds: float
    ends: Sequence[float]
    steady: bool
    span: int
    remarks: tuple[str, ...] = ()
    own_seconds: Sequence[float] = ()

    def seconds_until(self, num_rounds: float) -> float:
        """Seconds until the end of `num_rounds` rounds: as simulated, then at this pace."""
        whole = int(num_rounds)
        if whole >= len(self.ends):
            last = self.ends[-1] if self.ends else 0.0
            return last + (num_rounds - len(self.ends)) * self.seconds
        began = self.ends[whole - 1] if whole else 0.0
        return began + (num_rounds - whole) * (self.ends[whole] - began)


def pace_together(
    figures: RoundFigures,
    *,
    are_peers_new: bool,
    differ: bool = False,
    has_events: bool = False,
    are_drawn: bool = False,
) -> Pace:
    """Pace of ranks that end their rounds together.

    Args:
        figures: figures of the simulated rounds.
        are_peers_new: ranks meet different peers in different rounds.
        differ: rounds differ randomly, even if two happen to be equal.
        has_events: hosts crash or pause, or links change, in some rounds: means are over all.
        are_drawn: clients are drawn for each round: means are over all but the first.
    """
    ends, remarks = [0.0, *figures.round_seconds], []
    rounds, span = [later - earlier for earlier, later in pairwise(ends)], 1
    computed = [0.0, *figures.mean_computing()]

    def computing(num_kept: int) -> float:
        """Seconds of one of the last rounds, without those in which chains of stages fill."""
        num_kept = min(num_kept, len(figures.round_seconds) - figures.num_filling)
        return (computed[-1] - computed[-1 - num_kept]) / num_kept

    if any(figures.absences) and not has_events:
        period = None if differ else _turn_at_end(figures)
        span = period or max(len(rounds) - 1, 1)
        kept = rounds[-span:]
        if period is None and not differ:
            remarks.append(
                f"workers are late for rounds that differ ({rounds[0]:.6g} s the first, then {min(kept):.6g} to "
                f"{max(kept):.6g} s): figures are means over {format_count(span, 'simulated round')}"
            )
        a_round = sum(kept) / span
        return Pace(
            a_round, min(computing(span), a_round), ends[1:], period is not None, span, tuple(remarks)
        )
    if are_peers_new:
        rounds, span, added = _of_new_peers(rounds, figures.peers)
        remarks += added
    first = None if differ or are_drawn else repeats_from(rounds)
    steady = first is not None
    if first is None:
        first = 1 if len(rounds) > 1 and not has_events else 0
        if span == 1 and len(rounds) > 1 and not differ:
            least, most = min(rounds[first:]), max(rounds[first:])
            reason = "clients are drawn for each round" if are_drawn else "no two rounds took equally long"
            remarks.append(
                f"{reason} ({rounds[0]:.6g} s the first, then {least:.6g} to {most:.6g} s): "
                f"figures are means over the simulated rounds"
            )
    kept = rounds[-1:] if steady else rounds[first:]
    a_round = sum(kept) / len(kept)
    known = ends[1:] if span == 1 else []
    span = len(kept) if span == 1 else span
    of_round = min(computing(len(figures.round_seconds) if are_peers_new else len(kept)), a_round)
    return Pace(a_round, of_round, known, steady, span, tuple(remarks))


def _turn_at_end(figures: RoundFigures) -> int | None:
    """Fewest rounds that repeat in the last three turns of them, or None.

    A late worker may end each round a little later than the one before while the others' rounds take equally long,
    until it misses one more: every worker must advance as the rounds do.
    """
    ends, absences = figures.round_seconds, figures.absences

    def repeats(turn: int) -> bool:
        length = ends[-1] - ends[-1 - turn]
        places = range(len(ends) - 2 * turn, len(ends))
        return all(
            absences[place] == absences[place - turn]
            and all(
                abs(own[place] - own[place - turn] - length) <= _SAME_ROUND * length
                for own in (ends, *figures.rank_ends)
            )
            for place in places
        )

    return next(filter(repeats, range(1, len(ends) // 3 + 1)), None)


def _of_new_peers(rounds: list[float], peers: list[Hashable]) -> tuple[list[float], int, list[str]]:
    """Means over whole turns of changing peers, rounds per turn, and remarks.

    Without turns, one mean over all rounds but the first.
    """
    turn = period_of(peers) if peers else None
    if turn is None:
        span = max(len(rounds) - 1, 1)
        rest = rounds[-span:]
        text = (
            f"the ranks that meet are drawn again each round: figures are means over {span} rounds, the shortest "
            f"{min(rest):.6g} s and the longest {max(rest):.6g} s"
        )
        return [sum(rest) / span] * 2, span, [text]
    turns = [rounds[i : i + turn] for i in range(0, len(rounds) - turn + 1, turn)]
    remarks = (
        [f"ranks meet others in turn: figures are means over the {turn} rounds of a turn"] if turn > 1 else []
    )
    return [sum(each) / turn for each in turns], turn, remarks


def pace_apart(figures: RoundFigures) -> Pace:
    """Pace of ranks at their own speed, from their rounds while all run, without the first."""
    until = min(ends[-1] for ends in figures.rank_ends)
    rates, halves = [], []
    for ends in figures.rank_ends:
        kept = [end for end in ends if end <= until]
        if len(kept) < 3:
            kept = ends
        rates.append(_rate(kept))
        middle = len(kept) // 2
        halves.append(abs(_rate(kept[: middle + 1]) / _rate(kept[middle:]) - 1) if middle else 1.0)
    num_rounds = len(figures.round_seconds)
    a_round = len(rates) / sum(rates)
    computing = [
        min(own[-1] / num_rounds * rate, 1.0)
        for own, rate in zip(figures.compute_seconds, rates, strict=True)
    ]
    fastest, slowest = max(rates), min(rates)
    text = (
        f"workers go their own pace, the fastest {fastest / slowest:.3g} times the slowest: a round and its limit "
        "are of their mean pace, their number over the rounds that all of them do in a second; a run ends with the "
        f"slowest, which takes {format_seconds(1 / slowest)} a round; {num_rounds} of each were simulated"
    )
    return Pace(
        a_round,
        sum(computing) / len(computing) * a_round,
        (),
        max(halves) <= _SAME_PACE,
        max(num_rounds - 1, 1),
        (text,),
        [1 / rate for rate in rates],
    )


def _rate(ends: list[float]) -> float:
    """Rounds per second between the first end and the last."""
    if len(ends) < 2:
        return 1 / ends[0]
    return (len(ends) - 1) / (ends[-1] - ends[0])


_COUNTS = ("bytes_sent", "wan_bytes", "payload_bytes", "coded_values")  # of a rank, after each round
_MOST_LIVE_RANKS = 256  # threads, each with a model of shapes
_MOST_LIVE_STEPS = 50_000  # of all ranks: a few seconds


class SimulatedRounds:
    """Rounds of a strategy that can be simulated on any network.

    Ranks whose requests do not depend on other ranks are recorded alone, one of each kind; others are recorded
    together, and ranks that read the clock run again on each network.

    Args:
        strategy: not set up; every rank that runs gets a copy.
        setting: model, workers, computing and collectives.
        rounds: the rounds.
        apart: record all ranks, since they may send different things.

    Attributes:
        num_rounds: number of recorded rounds.
        has_absences: rounds continue without late or absent ranks.
    """

    def __init__(
        self,
        strategy: Strategy,
        setting: Setting,
        rounds: PlannedRounds,
        *,
        apart: bool = False,
    ) -> None:
        seconds: tuple[float, ...] = ()
        if strategy.clients.balance:
            seconds = tuple(each.mean_seconds for each in setting.durations())
            strategy = copy.deepcopy(strategy)
            strategy.shared_state.run.step_seconds = seconds
        self._strategy, self._setting, self._apart = strategy, setting, apart
        self._rounds, self.num_rounds = rounds, rounds.number
        self._num_ranks = setting.num_ranks * setting.ranks_a_worker + strategy.num_servers
        self._model = setting.model.model
        self._memory: dict[int, dict[str, int]] = {}  # by rank of the first worker
        self._schedules: Schedules | None = None
        self.has_absences = False
        # Of `collectives` requests depend on the algorithm of encoded means alone.
        averaging = without_network(self._num_ranks, setting.collectives).averaging_algorithm
        of_run = (self._num_ranks, setting.max_steps, setting.seed, setting.stages, setting.compute.coding)
        key = ("requests", strategy, self._model, rounds, apart, seconds, averaging, of_run)
        found = setting.known.once(key, lambda: (*self._record_alone(), self._memory, self.has_absences))
        recording, asks_for_time, *_ = found
        if recording is None and not asks_for_time:  # what ranks request together comes with their times
            found = setting.known.once(
                (*key, [each.drawn_from for each in setting.durations()]),
                lambda: (self._record(self._seconds(setting)), True, self._memory, self.has_absences),
            )
        self._recording, _, self._memory, self.has_absences = found

    def _seconds(
        self, setting: Setting, factors: Sequence[float] | None = None
    ) -> list[Callable[[int], float]]:
        """Computing of each rank by step; servers compute nothing."""

        def times(seconds: Callable[[int], float], factor: float) -> Callable[[int], float]:
            return lambda step: seconds(step) * factor

        durations = setting.durations()
        pairs = zip(durations, factors or [1.0] * len(durations), strict=True)
        workers = [times(each.seconds, factor) for each, factor in pairs]
        return [*workers, *[no_time] * self._strategy.num_servers]

    def _record_alone(self) -> tuple[Recording | None, bool]:
        """Requests of one rank per kind, None if they depend on other ranks; and whether they depend on time."""
        # Ranks of a chain send to each other, and those of unequal steps are no kinds.
        if self._apart or self._setting.stages is not None or self._strategy.clients.balance:
            return None, False
        if not self._strategy.is_synchronous:
            return None, True
        try:
            body, listing = partial(self._body, is_alone=True), listing_once(self._model)

            def make_groups(comm: Communicator, computing: Callable[[int, float], None]) -> None:
                setting = self._setting
                planned_rank(self._strategy, comm, listing, computing, setting.max_steps, seed=setting.seed)

            made = record_kinds(body, self._num_ranks, self._setting.collectives, make_groups)
        except (ValueError, RuntimeError) as error:
            return None, isinstance(error, ClockReadError)
        return made, False

    def _record(self, seconds: Sequence[Callable[[int], float]]) -> Recording | None:
        """Requests of all ranks, recorded together; None if they depend on the time."""
        if not self._strategy.is_synchronous:
            return None
        try:
            made = record(self._body, self._num_ranks, seconds, self._setting.collectives)
        except RankError as error:
            raise InputError(
                f"plan: {strategy_name(self._strategy)} computes with values, which a plan does not have, so its "
                f"messages cannot be planned; plan another strategy, or run it on a small model ({first_line(error)})"
            ) from error
        return None if made.asks_for_time or self.has_absences else made.with_all_copies()

    def _body(
        self,
        comm: Communicator,
        computing: Callable[[int, float], None],
        num_rounds: int | None = None,
        *,
        is_alone: bool = False,
    ) -> None:
        """Program of a rank: the steps of `num_rounds` rounds, the remainder, and what is in flight at the end."""
        with without_updates(self._strategy):
            # A client that is not drawn drops its parameters.
            is_own = self._strategy.overlaps_backward or self._strategy.clients.are_drawn
            own = copy.deepcopy(self._model) if is_own else self._model
            setting, coding = self._setting, self._setting.compute.coding
            rounds = self._rounds if num_rounds is None else self._rounds._replace(number=num_rounds)
            max_steps = max(setting.max_steps, rounds.start + rounds.num_steps)
            runner: PlannedRank | None
            if setting.cut is None:
                runner = planned_rank(self._strategy, comm, own, computing, max_steps, coding, setting.seed)
            else:
                runner = planned_stages(comm, setting, self._strategy, computing, max_steps)
            if runner is None:
                return
            mine = runner.strategy
            self.has_absences = mine.workers.has_absences
            # All ranks of the first worker, or of the first that takes part in the first round.
            is_measured = comm.rank // setting.ranks_a_worker in mine.workers.present[:1]
            keeps_state = mine.workers.has_absences  # which heals others: its size counts on every rank
            if not is_measured and not keeps_state:
                runner.still_optimizers()

            has_states, place, num_missed = False, mine.round_place(), 0

            def after_step(step: int) -> None:
                nonlocal has_states, place, num_missed
                if mine.workers.of_steps or step % rounds.period == 0:
                    place = mine.round_place()
                    num_missed += place is not None and not place.are_drawn and place.averaged_ranks is None
                if is_measured and (step in (1, rounds.period) or (step == 2 and not has_states)):
                    # Its optimizers make their states when they step for the first time: one step is enough, or two
                    # where the first one's gradients are still on their way.
                    memory = worker_memory(own if setting.stages is None else mine.model, mine)
                    self._memory[comm.rank] = memory
                    has_states = memory["optimizer"] > 0
                    if has_states or step > 1:
                        runner.still_optimizers(1 if step < rounds.period else None)
                elif keeps_state and step == max(2, rounds.period):
                    runner.still_optimizers()

            for _ in take_rounds(runner, rounds, after_step, is_alone=is_alone):
                traffic = comm.traffic
                missed = num_missed / (rounds.period if mine.workers.of_steps else 1)
                num_missed = 0
                comm.mark(
                    {
                        "payload_bytes": traffic.payload_bytes,
                        "bytes_sent": traffic.bytes_sent,
                        "wan_bytes": traffic.wan_bytes,
                        "coded_values": traffic.charged_values,
                        "coding": coding_report(traffic, mine.trainable),
                        "took_part": place is None or place.are_drawn or place.averaged_ranks is not None,
                        "missed": missed,
                    }
                )

    def keep_for_choice(self) -> None:
        """Keep the requests for the choice of algorithms too, if its own recording would have the same."""
        setting, recording, (_, *others) = self._setting, self._recording, self._rounds
        is_alone = recording is not None and recording.kinds is not None and setting.num_ranks > 1
        is_long = self._rounds.num_steps > min(setting.max_steps, MOST_STEPS)
        if is_alone and not is_long and others == [CHOICE_ROUNDS, 0, 0] and not self._strategy.num_servers:
            setting.known.once((first_rounds, *_of_choice(self._strategy, setting)), lambda: recording)

    @property
    def runs_together(self) -> bool:
        """True if ranks were recorded together, each with its own requests."""
        return self._recording is None or self._recording.kinds is None

    @property
    def has_pairs(self) -> bool:
        """True if some calls have fewer members than all ranks."""
        recording, count = self._recording, self._setting.ranks_a_worker
        if recording is None or recording.kinds is not None:
            return False
        return any(
            len(call.ranks) < self._setting.num_ranks
            for call in recording.calls
            if len({rank // count for rank in call.ranks}) > 1  # else within a worker
        )

    @property
    def sends_codes_direct(self) -> bool:
        """True if means of encoded values go straight from each rank to each, not around a ring."""
        recording, setting = self._recording, self._setting
        if recording is None or "averaging_algorithm" not in recording.reads or self.has_pairs:
            return False
        return without_network(self._num_ranks, setting.collectives).averaging_algorithm == "direct"

    @property
    def peers_change(self) -> bool:
        """True if ranks call different peers in different rounds."""
        assert self._recording is not None
        return len(set(self._recording.peers())) > 1

    def unlike(self, others: SimulatedRounds, first: int) -> int | None:
        """First of these rounds, from `first` on, in which rank 0 requests something else than in the last of `others`.

        None where all request the same, or the others' requests depend on the time or on other ranks.
        """
        if others.runs_together or self._recording is None:
            return None
        kinds = (Post, Wait) if self.runs_together else (Post, Wait, Computing)  # together it is in seconds
        like, rounds = (each._recording.rounds_of(0, *kinds) for each in (others, self))  # type: ignore[union-attr]
        return next((place for place in range(first, len(rounds)) if rounds[place] != like[-1]), None)

    def on(
        self,
        setting: Setting,
        num_rounds: int | None = None,
        *,
        factors: Sequence[float] | None = None,
    ) -> RoundFigures:
        """Simulate the rounds in a setting; collectives use the algorithms chosen in the first one.

        Args:
            setting: network and computing.
            num_rounds: fewer than recorded, without remainder and end; or more, if the last ones repeat; None: all.
            factors: multiply each worker's seconds of computing; None: 1.
        """
        topology, seconds, recording = setting.topology, self._seconds(setting, factors), self._recording
        if factors is not None and recording is not None and recording.kinds is None:
            recording = self._record(seconds)  # of ranks that each ran at their own speed
        if recording is None:
            return self._figures(self._live(setting, seconds, num_rounds))
        shortened = None if not setting.is_even() else recording.with_few_copies
        if num_rounds is not None and num_rounds > self.num_rounds:
            recording = recording.lengthened(num_rounds)
            shortened = shortened and [(each.lengthened(num_rounds), left) for each, left in shortened]
        if num_rounds is not None and num_rounds >= self.num_rounds:
            num_rounds = None  # to the end
        world = _world(self._strategy, setting)
        if self._schedules is None:
            best = replace(world, collectives=chosen_algorithms(self._strategy, setting))
            self._schedules = setting.known.call(Schedules, best)

        def figures(replayed: Recording) -> RoundFigures:
            assert self._schedules is not None
            on_row = self._count_rounds(setting, replayed, num_rounds)
            return self._figures(replayed.replay(world, seconds, self._schedules, num_rounds, on_row=on_row))

        if shortened is None and not topology.weather:
            shortened = recording.shortened
        if shortened is None:
            return figures(recording)
        one, other = (figures(each) for each, _ in shortened)
        more = REPEATS[1] - REPEATS[0]
        made = RoundFigures(**extrapolated(vars(one), vars(other), shortened[1][1], more))
        if recording.with_few_copies is not None and made.round_seconds:
            made.quiet_seconds = (other.end_seconds - one.end_seconds) / (more * len(made.round_seconds))
        return made

    def _count_rounds(
        self, setting: Setting, replayed: Recording, num_rounds: int | None
    ) -> Callable[[], None] | None:
        """Function that counts marks of ranks, and shows the rounds that all of them have ended."""
        known, marked = setting.known, 0
        if known.on_round is None:
            return None
        num_workers = self._setting.num_ranks * self._setting.ranks_a_worker
        total = num_rounds or sum(isinstance(each, Mark) for each in replayed.stream(0))

        def count() -> None:
            nonlocal marked
            marked += 1
            if marked % num_workers == 0 and known.on_round is not None:
                known.on_round(marked // num_workers, total, known.purpose)

        return count

    def calls_of(self, rank: int) -> list[tuple[Call, int]]:
        """Calls of a rank in its last round, each with its position among the members.

        A rank that reads the clock runs alone at time 0, which may change the order of its calls.

        Raises:
            InputError: its requests depend on other ranks.
        """
        if self._recording is not None:
            return last_calls(self._recording.stream(rank))
        return last_calls(run_alone(self._body, self._num_ranks, rank, answers=True).requests)

    @property
    def period(self) -> int:
        """Steps of a round."""
        return self._rounds.period

    @property
    def memory(self) -> list[dict[str, int]]:
        """Bytes by purpose of the states of each rank of a worker; none if only a simulation finds them."""
        if not self._memory:
            with suppress(ValueError, RuntimeError):
                run_alone(self._body, self._num_ranks, answers=True)
        return [states for _, states in sorted(self._memory.items())]

    @property
    def calls_a_round(self) -> int:
        """Calls of all ranks in the last round; 0 if they depend on the time."""
        return self._recording.num_calls(last_round) if self._recording is not None else 0

    @property
    def most_live_rounds(self) -> int:
        """Most rounds to simulate where every rank must run."""
        return max(_MOST_LIVE_STEPS // (self._num_ranks * self._rounds.period), self.num_rounds)

    def _live(
        self, setting: Setting, seconds: Sequence[Callable[[int], float]], num_rounds: int | None
    ) -> RunResult[None]:
        """Run every rank in the simulation, for `num_rounds` rounds at most."""
        if self._num_ranks > _MOST_LIVE_RANKS:
            raise InputError(
                f"plan: {strategy_name(self._strategy)} reads the clock, so each of {self._num_ranks:,} ranks has to "
                f"run, {_MOST_LIVE_RANKS} at most; plan fewer workers, or a strategy whose rounds "
                "do not overlap in stages or leave ranks out"
            )
        number = min(num_rounds or self.num_rounds, self.num_rounds)

        def own(comm: Communicator) -> None:
            assert isinstance(comm, SimulatedCommunicator)
            self._body(comm, by_step(comm, seconds[comm.rank]), number)

        return run_ranks(
            own,
            self._num_ranks,
            setting.topology,
            placement=_places(self._strategy, setting),
            protocol=setting.protocol,
            collectives=chosen_algorithms(self._strategy, setting),
            shared_cores=setting.compute.shared_cores,
        )

    def _figures(self, run: RunResult[None]) -> RoundFigures:
        num_workers = self._setting.num_ranks * self._setting.ranks_a_worker
        rows: list[list[StampedRow]] = [[] for _ in range(num_workers)]
        for stamped in run.rows:
            rows[stamped.rank].append(stamped)
        rank_ends = [[each.virtual_seconds for each in own] for own in rows]
        # A rank that was away marks what it has missed when it is back.
        ends = [
            max([each.virtual_seconds for each in marked if each.row["took_part"]], default=math.inf)
            for marked in zip(*rows, strict=True)
        ]
        return RoundFigures(
            ends,
            [[each.compute_seconds for each in own] for own in rows],
            {name: [[each.row[name] for each in own] for own in rows] for name in _COUNTS},
            [own[-1].row["coding"] if own else None for own in rows],
            end_seconds=run.virtual_seconds or 0.0,
            collectives=run.collectives,
            link_bytes=run.link_bytes,
            request_dollars=run.request_dollars,
            peers=self._recording.peers() if self._recording is not None else [],
            rank_ends=rank_ends,
            server_wan_bytes=sum(traffic.wan_bytes for traffic in run.traffic[num_workers:]),
            absences=[sum(each.row["missed"] for each in marked) for marked in zip(*rows, strict=True)],
            num_filling=max(min(self._setting.rounds_to_fill(self.period), len(ends) - 1), 0),
        )


def _places(strategy: Strategy, setting: Setting) -> Sequence[str] | None:
    """Host of each rank that trains, then of each server."""
    if setting.stages is not None:
        return [setting.topology.hosts[host].name for host in setting.hosts]
    return with_servers(setting.topology, setting.num_ranks, setting.placement, strategy.server_groups)


def _world(strategy: Strategy, setting: Setting) -> World:
    num_ranks = setting.num_ranks * setting.ranks_a_worker + strategy.num_servers
    where = (setting.topology, _places(strategy, setting), setting.protocol, setting.collectives)
    return World.build(num_ranks, *where, setting.compute.shared_cores)


def _of_choice(strategy: Strategy, setting: Setting) -> tuple[Any, ...]:
    """Strategy, model and settings by which `first_rounds` records what ranks ask for."""
    about = (setting.num_ranks, setting.max_steps, setting.compute.coding, setting.collectives)
    return strategy, setting.model.model, *about


def _first_rounds(strategy: Strategy, setting: Setting) -> Recording | None:
    if setting.stages is not None:
        return None  # as in training
    return setting.known.call(first_rounds, *_of_choice(strategy, setting))


def chosen_algorithms(strategy: Strategy, setting: Setting) -> Mapping[str, str]:
    """Algorithms of collectives by operation: the setting's, and those that a training there would choose."""
    world = _world(strategy, setting)
    if world.protocol.library or (recording := _first_rounds(strategy, setting)) is None:
        return world.collectives
    means = [each.mean_seconds for each in setting.durations()]
    return setting.known.call(choose_algorithms, recording, world, means)


def other_algorithms(strategy: Strategy, setting: Setting) -> list[tuple[str, str]]:
    """Pairs of an operation and an algorithm that its calls could go by."""
    if (recording := _first_rounds(strategy, setting)) is None:
        return []
    found = rivals(recording, _world(strategy, setting), every=True)
    return [(op, name) for op, names in found.items() for name in names]
