"""How fast rounds go on once they have begun: of ranks that go together, and of ranks that go their own pace."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from exogym_core.planning.rounds import period_of, repeats_from

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from exogym_core.planning.round_figures import RoundFigures

__all__ = ["Pace", "pace_apart", "pace_together"]

_SAME_PACE = 1e-3


class Pace(NamedTuple):
    """What rounds take from now on.

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
        """When so many rounds are over: as they were simulated, and at this pace from there."""
        whole = int(num_rounds)
        if whole >= len(self.ends):
            last = self.ends[-1] if self.ends else 0.0
            return last + (num_rounds - len(self.ends)) * self.seconds
        began = self.ends[whole - 1] if whole else 0.0
        return began + (num_rounds - whole) * (self.ends[whole] - began)


def pace_together(figures: RoundFigures, *, are_peers_new: bool, differ: bool = False) -> Pace:
    """Of ranks that end their rounds together.

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
    """Where ranks meet others every round: means over whole turns of whom they meet, rounds a turn, and remarks.

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
    """Of ranks that go their own pace: each one's rounds while all are at work, the first left out."""
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
