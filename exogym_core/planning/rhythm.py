"""Rhythm of a strategy: its period, found by running its own code on a model of a few numbers."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from exogym_core.planning.rank import (
    PlannedRank,
    PlannedServer,
    choose_by_number,
    quiet_schedules,
    shapes_alone,
)
from exogym_core.planning.recording import Recording, goes_alone, record, run_alone
from exogym_core.planning.rounds import is_left_out, period_of
from netsim.errors import InputError, NetsimError, RankError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from exogym_core.communicator.base import Communicator
    from exogym_core.planning.recording import Body
    from exogym_core.strategy.base import Strategy

__all__ = ["Rhythm", "making_groups", "rhythm"]

_LONGEST_ROUND = 100_000  # steps: of a longer one the trial takes minutes
_TRIAL_LAYERS = 6
_SIZES = ("topk", "chunk", "bucket", "bytes", "rank", "bits", "size", "seed")
_TRIAL_RANKS = 4
_ROUNDS_OF_PEERS = 8
_STEPS_WITHOUT_RHYTHM = 64
_LONG_RUN = 1_000  # times as long as a trial
_MOST_TRIPLED = 27  # times the longest option: 3, 9 and 27 of it are looked at


class Rhythm(NamedTuple):
    """Repeating pattern of a strategy.

    Attributes:
        period: steps a round; None: it never repeats itself.
        quiet: whether each step of a round sends nothing.
        are_peers_new: ranks meet others in other rounds.
        goes_alone: what a rank requests does not depend on what others send, so one of a kind can stand for all.
        repeats: every step of a round sends as much as the one before, but for the last one.
        asks: ranks ask for the time, so what they request depends on it.
        begins_longer: in a longer run more steps pass before it repeats itself.
        num_steps: without a period: how many steps to simulate, so that every option can show.
    """

    period: int | None
    quiet: tuple[bool, ...] = ()
    are_peers_new: bool = False
    goes_alone: bool = False
    repeats: bool = False
    asks: bool = False
    begins_longer: bool = False
    num_steps: int = 0


def rhythm(strategy: Strategy, num_ranks: int) -> Rhythm:
    """Rhythm of a strategy, from its own code on a model of a few numbers.

    Every whole number among its options that is not a size may be the length of a round, so at least three times the
    largest is looked at. A strategy that does not repeat itself within 27 times the largest has no rhythm.

    Args:
        strategy: not set up.
        num_ranks: workers and servers.

    Raises:
        InputError: an option is too large to be tried, and without it nothing is sent or repeats.
    """
    ranks = num_ranks if num_ranks <= _TRIAL_RANKS else _fewest_ranks(strategy, num_ranks)
    try:
        found = _found(_TinyRuns(strategy, ranks, is_alone=True))
    except (ValueError, RuntimeError):  # what rank 0 does needs the others
        found = None
    return found if found is not None and found.goes_alone else _found(_TinyRuns(strategy, ranks))


def _found(trials: _TinyRuns) -> Rhythm:
    """Rhythm that trials of growing length show."""
    strategy = trials.strategy
    candidates = [4, *(value for value in _lengths(strategy).values() if value <= _LONGEST_ROUND)]
    length, longest = 3 * max(candidates), _MOST_TRIPLED * max(candidates)
    while length <= longest:
        sizes, peers, asks = trials.run(length)
        period = period_of(sizes)
        if not any(sizes):
            _refuse_too_long(strategy)
        if period is not None:
            return _of_period(trials, candidates, sizes, peers, period, asks=asks)
        if asks:  # without a network it has no rhythm, however long the trial
            break
        length *= 3
    _refuse_too_long(strategy)
    return Rhythm(None, num_steps=max(_STEPS_WITHOUT_RHYTHM, 3 * max(candidates)))


def _of_period(
    trials: _TinyRuns,
    candidates: Sequence[int],
    sizes: Sequence[int],
    peers: Sequence[Hashable],
    period: int,
    *,
    asks: bool,
) -> Rhythm:
    strategy = trials.strategy
    start = len(sizes) - period
    quiet = [False] * period
    for step in range(start, len(sizes)):
        quiet[step % period] = sizes[step] == 0
    whole = period
    if strategy.is_synchronous or any("fragments" in name for name in strategy.arguments):
        # Fragments that are alike in a tiny model need not be so in others: a whole round is the option.
        whole = max((count for count in candidates[1:] if count and count % period == 0), default=period)
    quiet *= whole // period
    repeats = whole == period and _all_but_the_last(sizes, period) and not asks
    alone = not asks and trials.is_verified(quiet, repeats=repeats)
    if not alone and _chooses(peers, trials.num_ranks) and whole * _ROUNDS_OF_PEERS > len(sizes):
        _, peers, _ = trials.run(whole * _ROUNDS_OF_PEERS)  # few that draw lots may draw the same again
    are_new = _chooses(peers, trials.num_ranks) and any(
        peers[i] != peers[i + whole] for i in range(whole, len(peers) - whole)
    )
    longer = not asks and _begins_longer(trials, sizes, period)
    return Rhythm(whole, tuple(quiet), are_new, alone, repeats, asks, longer)


def _lengths(strategy: Strategy) -> dict[str, int]:
    """The strategy's options that may be the length of a round: whole numbers that are not sizes."""
    return {
        name: value
        for name, value in strategy.arguments.items()
        if type(value) is int and name != "k" and not any(word in name for word in _SIZES)
    }


def _refuse_too_long(strategy: Strategy) -> None:
    """Raise InputError where an option was too large to be tried as the length of a round."""
    for name, value in _lengths(strategy).items():
        if value > _LONGEST_ROUND:
            raise InputError(
                f"plan: {type(strategy).__name__}: {name} = {value:,} is longer than the rounds that are planned; "
                f"give {_LONGEST_ROUND:,} steps at most"
            )


def _begins_longer(trials: _TinyRuns, sizes: Sequence[int], period: int) -> bool:
    """True if a longer run begins with more steps that do not repeat, such as a warm-up of a share of the run."""
    if sizes[:period] == sizes[period : 2 * period]:
        return False
    longer, _, _ = trials.run(2 * period, max_steps=_LONG_RUN * len(sizes))
    return longer != sizes[: 2 * period]


def _chooses(peers: Sequence[Hashable], num_ranks: int) -> bool:
    """True if ranks call some of the others, which may change from round to round."""
    everyone = tuple(range(num_ranks))
    return any(call != everyone for step in peers for calls in step for call in calls)  # type: ignore[attr-defined]


def _all_but_the_last(sizes: Sequence[int], period: int) -> bool:
    """True if the steps of the second round send the same bytes, except its last one."""
    inner = sizes[period : 2 * period - 1]
    return bool(inner) and inner[0] > 0 and len(set(inner)) == 1


def _fewest_ranks(strategy: Strategy, num_ranks: int) -> int:
    """Twice as few ranks as the strategy accepts: one with sites needs two whole ones to have rounds."""
    for ranks in range(2, num_ranks // 2):
        try:
            _recorded(strategy, _body(strategy, ranks, [0]), ranks)
        except (NetsimError, ValueError):
            continue
        return 2 * ranks
    return num_ranks


def _tiny(num_layers: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(num_layers)))


def _unlike(num_layers: int) -> nn.Module:
    """No two of its layers are alike."""
    return nn.Sequential(*(nn.Linear(width, width + 1) for width in range(2, num_layers + 2)))


def _num_layers(strategy: Strategy) -> int:
    """Enough for as many fragments as the strategy cuts a model into."""
    fragments = [
        value for name, value in strategy.arguments.items() if "fragments" in name and isinstance(value, int)
    ]
    return max(_TRIAL_LAYERS, *fragments, 0)


def _body(
    strategy: Strategy,
    num_ranks: int,
    steps: Sequence[int],
    model: Callable[[int], nn.Module] = _tiny,
    max_steps: int | None = None,
) -> Body:
    """Steps of a run on a model without layers of note; each is marked with the payload sent so far.

    Args:
        strategy: not set up.
        num_ranks: of the run.
        steps: to take, in order; others are counted alone.
        model: makes one of so many layers.
        max_steps: of the run; None: no more than these.
    """

    def body(comm: Communicator, computing: Callable[[int, float], None]) -> None:
        with torch.device("meta"):
            own = model(_num_layers(strategy))
        mine = copy.deepcopy(strategy)
        if comm.rank >= num_ranks - mine.num_servers:
            PlannedServer(comm, own, mine).run()
            return
        choose_by_number(mine)
        runner = PlannedRank(comm, own, mine, computing, max_steps or max(steps, default=0) + 1)
        runner.still_optimizers()
        done = 0
        with shapes_alone(strategy):
            for step in steps:
                mine.local_step += step - done
                runner.step(step)
                done = step + 1
                comm.mark({"payload_bytes": comm.traffic.payload_bytes})
            mine.finish()  # what is in flight comes to its end

    return body


def making_groups(strategy: Strategy, num_ranks: int) -> Body:
    """The beginning of a rank, with its groups and without steps."""
    return _body(strategy, num_ranks, (), max_steps=_LONG_RUN)


def _recorded(strategy: Strategy, body: Body, num_ranks: int) -> Recording:
    with quiet_schedules():
        try:
            return record(body, num_ranks)
        except RankError as error:
            name = type(strategy).__name__
            raise InputError(
                f"plan: {name} computes with values, which a plan has none of, so what it sends is not known before; "
                f"plan another strategy, or run it on a small model\n{error}"
            ) from None


class _TinyRuns(NamedTuple):
    """Runs of a strategy on a model of a few numbers.

    Attributes:
        strategy: not set up.
        num_ranks: of each run.
        is_alone: rank 0 runs alone, in place of all.
    """

    strategy: Strategy
    num_ranks: int
    is_alone: bool = False

    def run(self, length: int, max_steps: int | None = None) -> tuple[list[int], list[Hashable], bool]:
        """Payload bytes of rank 0 in each of `length` steps, whom ranks call, and whether they ask for the time.

        The run is to have `max_steps`; None: no more than these.
        """
        body = _body(self.strategy, self.num_ranks, range(length), max_steps=max_steps)
        if self.is_alone:
            with quiet_schedules():
                made = Recording(1, [run_alone(body, self.num_ranks).requests])
        else:
            made = _recorded(self.strategy, body, self.num_ranks)
        sent = [0, *(row["payload_bytes"] for row in made.rows(0))]
        sizes = [later - earlier for earlier, later in pairwise(sent)]
        return sizes, made.peers(), made.asks_for_time

    def is_verified(self, quiet: Sequence[bool], *, repeats: bool) -> bool:
        """True if no rank depends on others' messages, over a round and a step, on a model with unequal layers.

        Of steps that send nothing, or as much as those before, none is taken.
        """
        period, strategy = len(quiet), self.strategy
        skips = quiet.count(False) == 1 and strategy.is_synchronous
        steps = [
            step
            for step in range(period + 1)
            if not (skips and step and quiet[step % period]) and not (repeats and is_left_out(step, period))
        ]
        body = _body(strategy, self.num_ranks, steps, _unlike)
        made = _recorded(strategy, body, self.num_ranks)
        with quiet_schedules():
            return goes_alone(made, body, making_groups(strategy, self.num_ranks))
