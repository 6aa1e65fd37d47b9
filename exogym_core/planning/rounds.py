"""Rounds: figures of simulated ones, when they repeat, and the pace at which they continue."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from netsim.ranks import StampedRow

T = TypeVar("T")

__all__ = [
    "FEWEST_STEPS",
    "NUM_SIMULATED",
    "Pace",
    "RoundFigures",
    "add_left_out",
    "extrapolated",
    "is_left_out",
    "is_pace_step",
    "pace_apart",
    "pace_together",
    "period_of",
    "repeats_from",
]


@dataclass
class RoundFigures:
    """Figures of some simulated rounds.

    Attributes:
        round_seconds: virtual time at which the last rank was through with each round.
        compute_seconds, exposed_seconds: of each rank, over all of them.
        bytes_sent, wan_bytes, payload_bytes: of each rank, after each round: [rank][round].
        memory: bytes of the first rank by purpose.
        collectives: the algorithms that were used, by operation.
        link_bytes: payload that crossed each link, over all of them.
        peers: whom ranks met in each round.
        rank_ends: virtual time at which each worker was through with each round: [rank][round].
        staleness: of what servers took in, see `PlannedServer`.
        server_wan_bytes: payload that servers sent to other regions.
        contributions: of ranks to rounds, where rounds may go on without some.
    """

    round_seconds: list[float]
    compute_seconds: list[float]
    exposed_seconds: list[float]
    bytes_sent: list[list[int]]
    wan_bytes: list[list[int]]
    payload_bytes: list[list[int]]
    memory: dict[str, int] = field(default_factory=dict)
    collectives: dict[str, list[str]] = field(default_factory=dict)
    link_bytes: list[float] = field(default_factory=list)
    peers: list[Hashable] = field(default_factory=list)
    rank_ends: list[list[float]] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)
    server_wan_bytes: int = 0
    contributions: int = 0


#: Steps at a round's beginning that are simulated; the last of them stands for what is left out.
NUM_SIMULATED = 3
#: Rounds that are shorter are simulated as they are.
FEWEST_STEPS = NUM_SIMULATED + 2


def is_left_out(place: int, period: int) -> bool:
    """True if the step at this place of a round is inferred from the others."""
    return NUM_SIMULATED <= place < period - 1


def is_pace_step(place: int) -> bool:
    """True if the end of the step at this place shows the length of one."""
    return place in (NUM_SIMULATED - 2, NUM_SIMULATED - 1)


def add_left_out(
    figures: RoundFigures,
    marked: Sequence[StampedRow],
    period: int,
    seconds: Sequence[Callable[[int], float]],
    link_history: Sequence[Mapping[str, float]] = (),
    link_names: Sequence[str] = (),
) -> None:
    """Put into figures of rounds what the steps that were left out take and send.

    Args:
        figures: as they were simulated; changed.
        marked: rows of the pace steps, with `round` and `place`.
        period: steps a round.
        seconds: of computing by step, one function a rank, the same for every step.
        link_history: bytes over links by name until the marks of rank 0.
        link_names: of `figures.link_bytes`.
    """
    num_left = period - FEWEST_STEPS + 1
    rows: dict[tuple[int, int, int], tuple[float, Mapping[str, Any]]] = {
        (row.rank, row.row["round"], row.row["place"]): (row.virtual_seconds, row.row) for row in marked
    }
    first, second = NUM_SIMULATED - 2, NUM_SIMULATED - 1
    crossed = {row["virtual_seconds"]: row for row in link_history}
    later = 0.0
    for number in range(len(figures.round_seconds)):
        ranks = range(len(figures.rank_ends))
        took = max(rows[rank, number, second][0] - rows[rank, number, first][0] for rank in ranks)
        later += num_left * took
        ends = [crossed.get(rows[0, number, place][0], {}) for place in (first, second)]
        for link, name in enumerate(link_names):
            figures.link_bytes[link] += num_left * (ends[1].get(name, 0.0) - ends[0].get(name, 0.0))
        figures.round_seconds[number] += later
        for rank in ranks:
            figures.rank_ends[rank][number] += later
            computing = seconds[rank](0)
            figures.compute_seconds[rank] += num_left * computing
            figures.exposed_seconds[rank] += num_left * max(took - computing, 0.0)
            before, after = rows[rank, number, first][1], rows[rank, number, second][1]
            for name in ("bytes_sent", "wan_bytes", "payload_bytes"):
                counts = getattr(figures, name)[rank]
                for place in range(number, len(counts)):
                    counts[place] += num_left * (after[name] - before[name])


def extrapolated(one: T, other: T, times: int, of: int) -> T:
    """Figures as far beyond `other` as this is beyond `one`, `times` / `of` times; numbers inside grow in proportion.

    >>> extrapolated([3, {"a": 1.0}], [5, {"a": 2.0}], 6, 2)
    [11, {'a': 5.0}]
    """
    first: Any = one
    second: Any = other
    if isinstance(second, bool) or not isinstance(second, int | float | list | dict | RoundFigures):
        return other
    if isinstance(second, RoundFigures):
        grown = {name: extrapolated(value, vars(other)[name], times, of) for name, value in vars(one).items()}
        return RoundFigures(**grown)  # type: ignore[return-value]
    if isinstance(second, dict):
        return {key: extrapolated(first[key], value, times, of) for key, value in second.items()}  # type: ignore[return-value]
    if isinstance(second, list):
        return [extrapolated(*pair, times, of) for pair in zip(first, second, strict=True)]  # type: ignore[return-value]
    more = (second - first) * times
    return second + (more // of if isinstance(more, int) else more / of)  # type: ignore[return-value]


def period_of(series: Sequence[Hashable]) -> int | None:
    """The least number of steps after which `series` repeats itself, its first such stretch left out; None: none.

    >>> period_of([0, 0, 5, 0, 0, 5, 0, 0, 5]), period_of([1, 2, 3, 4])
    (3, None)
    """
    alike = _alike_from(series[::-1])
    for period in range(1, len(series) // 3 + 1):
        if alike[period] >= len(series) - 2 * period:
            return period
    return None


def _alike_from(series: Sequence[Hashable]) -> list[int]:
    """For each place, how many values from there on equal those from the beginning on (the Z function; linear time)."""
    number = len(series)
    alike = [number, *[0] * (number - 1)] if number else []
    first = last = 0  # the match found so far that reaches farthest
    for place in range(1, number):
        count = min(last - place, alike[place - first]) if place < last else 0
        while place + count < number and series[count] == series[place + count]:
            count += 1
        alike[place] = count
        if place + count > last:
            first, last = place, place + count
    return alike


def repeats_from(seconds: Sequence[float], tolerance: float = 1e-4) -> int | None:
    """The first of these rounds from which all take equally long, if at least two do; else None.

    Equal is what differs by less than the share `tolerance`: windows of TCP go on growing for a while.

    >>> repeats_from([3.0, 2.5, 2.5]), repeats_from([3.0, 2.5])
    (1, None)
    """
    last = seconds[-1]
    first = len(seconds)
    while first and abs(seconds[first - 1] - last) <= tolerance * last:
        first -= 1
    return first if len(seconds) - first >= 2 else None


_SAME_PACE = 1e-3


class Pace(NamedTuple):
    """Pace of rounds from now on.

    Attributes:
        seconds: of a round; of ranks that go their own pace, workers over the rounds that all of them do in a second.
        computing_seconds: of these a worker computes, in the mean.
        ends: when the rounds that were simulated were over; none where all there is to know is the pace.
        steady: whether rounds were seen to repeat.
        span: rounds of which bytes are means.
        remarks: what is to be known besides.
    """

    seconds: float
    computing_seconds: float
    ends: Sequence[float]
    steady: bool
    span: int
    remarks: tuple[str, ...] = ()

    def seconds_until(self, num_rounds: float) -> float:
        """End of so many rounds: as simulated, then at this pace."""
        whole = int(num_rounds)
        if whole >= len(self.ends):
            last = self.ends[-1] if self.ends else 0.0
            return last + (num_rounds - len(self.ends)) * self.seconds
        began = self.ends[whole - 1] if whole else 0.0
        return began + (num_rounds - whole) * (self.ends[whole] - began)


def pace_together(figures: RoundFigures, *, are_peers_new: bool, differ: bool = False) -> Pace:
    """Pace of ranks that end their rounds together.

    Args:
        figures: what was simulated.
        are_peers_new: with others in other rounds.
        differ: rounds differ by chance, even where two happen to be equal.
    """
    ends, remarks = [0.0, *figures.round_seconds], []
    num_rounds = len(figures.round_seconds)
    rounds, span = [later - earlier for earlier, later in pairwise(ends)], 1
    if are_peers_new:
        rounds, span, told = _of_new_peers(rounds, figures.peers)
        remarks += told
    first = None if differ else repeats_from(rounds)
    steady = first is not None
    if first is None:
        first = 1 if len(rounds) > 1 else 0
        if span == 1 and not differ:
            least, most = min(rounds[first:]), max(rounds[first:])
            remarks.append(
                f"no two rounds took equally long ({rounds[0]:.6g} s the first, then {least:.6g} to {most:.6g} s): "
                f"figures are means over what was simulated"
            )
    kept = rounds[-1:] if steady else rounds[first:]
    a_round = sum(kept) / len(kept)
    computing = sum(figures.compute_seconds) / len(figures.compute_seconds) / num_rounds
    known = ends[1:] if span == 1 else []
    return Pace(a_round, min(computing, a_round), known, steady, span, tuple(remarks))


def _of_new_peers(rounds: list[float], peers: list[Hashable]) -> tuple[list[float], int, list[str]]:
    """Means over whole turns of changing peers, rounds a turn, and remarks.

    Without such turns there is one mean, over all rounds but the first.
    """
    turn = period_of(peers) if peers else None
    if turn is None:
        span = max(len(rounds) - 1, 1)
        rest = rounds[-span:]
        told = (
            f"whom ranks meet is drawn anew each round: figures are means over {span} rounds, the shortest "
            f"{min(rest):.6g} s and the longest {max(rest):.6g} s"
        )
        return [sum(rest) / span] * 2, span, [told]
    turns = [rounds[i : i + turn] for i in range(0, len(rounds) - turn + 1, turn)]
    remarks = (
        [f"ranks meet others in turn: figures are means over the {turn} rounds of a turn"] if turn > 1 else []
    )
    return [sum(each) / turn for each in turns], turn, remarks


def pace_apart(figures: RoundFigures) -> Pace:
    """Pace of ranks at their own speed: each one's rounds while all run, without the first."""
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
        min(seconds / num_rounds * rate, 1.0)
        for seconds, rate in zip(figures.compute_seconds, rates, strict=True)
    ]
    fastest, slowest = max(rates), min(rates)
    told = (
        f"workers go their own pace, the fastest {fastest / slowest:.3g} times the slowest: a round is their number "
        f"over the rounds that all of them do in a second; {num_rounds} of each were simulated"
    )
    return Pace(
        a_round,
        sum(computing) / len(computing) * a_round,
        (),
        max(halves) <= _SAME_PACE,
        max(num_rounds - 1, 1),
        (told,),
    )


def _rate(ends: list[float]) -> float:
    """Rounds a second between the first end and the last."""
    if len(ends) < 2:
        return 1 / ends[0]
    return (len(ends) - 1) / (ends[-1] - ends[0])
