"""Algorithms of a training's collectives: those by which whole rounds are fastest on a quiet network.

`auto` finds the fastest algorithm of each call alone, with idle links and warm connections. In a round calls overlap,
meet cold connections and fill queues. So the strategy's own rounds are recorded without values, as plans do, and played
on the network by `auto` and by single algorithms: off the clock, at the first call of a training (before it, where
ranks are other processes), and with computing that always takes its mean. Training, plans and retimed trainings choose
alike.
"""

from __future__ import annotations

import copy
import math
import warnings
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from exogym_core.communicator.base import AVERAGING_ALGORITHMS
from exogym_core.communicator.simulated.simulation import Schedules
from exogym_core.run.planned_rank import PlannedRounds, planned_rank, take_rounds, without_updates
from exogym_core.run.recording import MOST_CALLS, record_kinds, seconds_in_order
from exogym_core.workers.rng import kept_rng
from netsim import Weather
from netsim.collectives.closed_form import after_entry
from netsim.collectives.estimate import Estimator
from netsim.collectives.operations import OPERATIONS
from netsim.collectives.schedules.algorithms import ALGORITHMS
from netsim.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from exogym_core.communicator.base import Communicator
    from exogym_core.communicator.simulated.simulation import World
    from exogym_core.cost.compute import Coding
    from exogym_core.run.planned_rank import PlannedRank
    from exogym_core.run.recording import Recording
    from exogym_core.strategy.base import Strategy
    from exogym_core.workers.host import RunResult
    from netsim.ranks import Call
    from netsim.topology.topology import FloatArray

__all__ = ["CHOICE_ROUNDS", "MOST_STEPS", "choose_algorithms", "first_rounds", "rivals", "without_values"]

CHOICE_ROUNDS = 3  # the first meets cold connections; the others are compared
MOST_STEPS = 2_000  # of a recorded rank: some seconds
_FEW_MESSAGES = 20_000  # of a round: it is simulated with every algorithm
_WITHIN = 1.5  # times as long as `auto`'s alone: such a call may be the faster in a round of more messages
# Raised by recordings that are refused, by torch for tensors without values, and by copies of parts that have none.
_NEEDS_VALUES = (InputError, RuntimeError, TypeError)
_MOST_COUNTED = 4_000_000  # messages times members of a call whose bytes are counted for a bound
_MOST_IN_ORDER = 32  # ranks: each call takes as many operations as their number cubed
_ROUNDING, _GRID = 1e-6, 2.0**-30  # of bounds, relative, and of each request's computing, in seconds
_SAME = 1 + 1e-9  # times as long: rounds that differ by less are equal, and `auto` stays


def first_rounds(
    strategy: Strategy,
    model: nn.Module,
    num_ranks: int,
    max_steps: int,
    coding: Coding | None,
    collectives: str | Mapping[str, str] | None,
) -> Recording | None:
    """Requests of all ranks in the first rounds of a strategy, after its warm-up.

    A rank that asks for the time gets the answer at time 0. None where rounds are not declared or the training ends
    before an exchange, where ranks go their own pace, and where their requests depend on values or on other ranks: then
    `auto` holds for each call. So it does where the strategy fails in another way, with a warning.

    Args:
        strategy: not set up.
        model: its copies on the meta device are trained.
        num_ranks: number of workers.
        max_steps: of the training.
        coding: virtual time of codecs; None where it is free.
        collectives: as `fit` takes it.
    """
    if not strategy.is_synchronous or strategy.num_servers or num_ranks < 2:
        return None

    shapes: nn.Module | None = None

    def begin(
        comm: Communicator, computing: Callable[[int, float], None], copies: bool = False
    ) -> PlannedRank:
        nonlocal shapes  # shared by ranks that only make their groups
        if shapes is None:
            shapes = without_values(model)
        own = copy.deepcopy(shapes) if copies else shapes
        runner = planned_rank(strategy, comm, own, computing, max_steps, coding)
        assert runner is not None
        return runner

    def body(comm: Communicator, computing: Callable[[int, float], None]) -> None:
        num_taken = 0

        def count(_: int) -> None:
            nonlocal num_taken
            num_taken += 1
            if num_taken > MOST_STEPS:
                raise InputError("its rounds are too long")

        with without_updates(strategy):
            runner = begin(comm, computing, copies=True)
            mine, period = runner.strategy, runner.strategy.round_steps
            if not period:
                raise InputError("rounds are not declared")
            if mine.steps_to_exchange > max_steps and mine.site.gradients is None:
                raise InputError("nothing is sent")
            runner.still_optimizers()
            rounds = PlannedRounds(period, CHOICE_ROUNDS, start=-(-mine.warmup_steps // period) * period)
            for _ in take_rounds(runner, rounds, count, is_alone=True):
                comm.mark({})

    with kept_rng(torch.device("cpu")):
        try:
            return record_kinds(body, num_ranks, collectives, begin, answers=True)
        except _NEEDS_VALUES:
            return None
        except Exception as error:  # if the training fails alike, it says where
            what = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            warnings.warn(
                f"collectives: auto chooses for each call: a round of {type(strategy).__name__} without values "
                f"raises {what}",
                UserWarning,
                stacklevel=2,
            )
            return None


def without_values(model: nn.Module, device: str = "meta") -> nn.Module:
    """Copy of a model whose tensors have shapes alone; under FakeTensorMode on any device."""
    memo: dict[int, object] = {}
    for each in (*model.parameters(), *model.buffers()):
        shape = torch.empty_like(each, device=device)
        memo[id(each)] = nn.Parameter(shape, each.requires_grad) if isinstance(each, nn.Parameter) else shape
    return copy.deepcopy(model, memo)


def choose_algorithms(recording: Recording, world: World, step_seconds: Sequence[float]) -> dict[str, str]:
    """Algorithms by operation, those that `world` fixes among them, by which rounds are fastest.

    Operations without an entry are fastest by `auto`, which then chooses for each call.

    Args:
        recording: rounds, of `first_rounds`.
        world: ranks and network; its weather is left out.
        step_seconds: mean seconds of computing of each rank's step.
    """
    assert world.topology is not None
    quiet = replace(world, topology=replace(world.topology, weather=Weather()))
    table = tuple((op, *rows.items()) for op, rows in ALGORITHMS.items())
    return dict(_choose(_QuietRounds(recording, quiet, tuple(step_seconds), table)))


@dataclass(frozen=True)
class _QuietRounds:
    """Rounds on a quiet network; equal where the algorithms chosen for them are."""

    recording: Recording
    world: World
    step_seconds: tuple[float, ...]
    table: tuple[tuple[Any, ...], ...]  # of algorithms, to which a user's own may be added

    def __hash__(self) -> int:
        return hash(self.step_seconds)


@lru_cache(maxsize=8)  # for fits that differ in what changes no message, such as learning rates and seeds
def _choose(asked: _QuietRounds) -> dict[str, str]:
    """Choose the algorithm of each operation by playing the rounds with those that can win."""
    recording, fixed = asked.recording, dict(asked.world.collectives)
    if not (names := rivals(recording, asked.world)):
        return fixed
    rounds = _RivalRounds(recording, asked.world, asked.step_seconds)
    if len(names) == 1:
        ((op, of_op),) = names.items()
        # Where all calls are alike, `auto` is one of the algorithms, and need not be found by call.
        are_alike = sum(call.op == op for call in recording.calls) == 1
        return fixed | rounds.fastest([*([] if are_alike else [{}]), *({op: name} for name in of_op)])
    best: dict[str, str] = {}
    for_all = ({op: name for op in names if name in names[op]} for name in chain(*names.values()))
    singly = ({op: name} for op in names for name in names[op])
    for change in chain(for_all, singly):
        best = rounds.fastest([best, {**best, **change} if len(change) == 1 else change])
    return fixed | best


class _RivalRounds:
    """Rounds by different algorithms, each of which is simulated once, unless its lower bound is too long.

    Args:
        recording: rounds of ranks.
        world: ranks and quiet network, with the algorithms that are fixed.
        step_seconds: mean seconds of computing of each rank's step.
    """

    def __init__(self, recording: Recording, world: World, step_seconds: Sequence[float]) -> None:
        few = recording.with_few_copies or recording.shortened if recording.num_calls() > MOST_CALLS else None
        self._recording = recording if few is None else few[-1][0]
        self._world, self._step_seconds = world, step_seconds
        # By algorithm of each operation.
        self._simulated: dict[tuple[tuple[str, str], ...], tuple[float, RunResult[None]]] = {}

    def fastest(self, trials: Sequence[dict[str, str]]) -> dict[str, str]:
        """The first of these choices than which no other is faster. Those with the least bounds are simulated first."""
        keys = [tuple(trial.items()) for trial in trials]
        bounds = [
            self._simulated[key][0]
            if key in self._simulated
            else least_seconds(self._recording, self._by(trial), self._step_seconds)
            for key, trial in zip(keys, trials, strict=True)
        ]
        took = [math.inf] * len(trials)

        def is_hidden(place: int) -> bool:
            """Return whether rounds take no longer than computing alone."""
            if took[place] == math.inf:
                return False
            _, run = self._simulated[keys[place]]
            return took[place] <= max(run.compute_seconds) * (1 - 1 / CHOICE_ROUNDS) * _SAME

        for place in sorted(range(len(trials)), key=bounds.__getitem__):
            key, least = keys[place], min(took)
            if bounds[place] > least * _SAME or any(map(is_hidden, range(place))):
                continue
            if key not in self._simulated:
                runs = [self._simulated[other][1] for other in keys if other in self._simulated]
                if any(all(run.collectives[op] == [name] for op, name in key) for run in runs):
                    continue
                self._simulated[key] = self._simulate(trials[place], least * _SAME)
            took[place] = self._simulated[key][0]
        best = 0
        for place, each in enumerate(took):
            if not is_hidden(best) and each * _SAME < took[best]:
                best = place
        return trials[best]

    def _by(self, trial: Mapping[str, str]) -> World:
        """World with a choice of algorithms."""
        return replace(self._world, collectives={**self._world.collectives, **trial})

    def _simulate(self, trial: Mapping[str, str], most: float) -> tuple[float, RunResult[None]]:
        """Seconds of the rounds that are compared, and their run; infinity if they take more than `most`."""
        there, seconds = self._by(trial), [partial(_same, each) for each in self._step_seconds]
        run = self._recording.replay(there, seconds, Schedules(there), most_seconds=most)
        ends: list[list[float]] = [[] for _ in range(there.num_ranks)]
        for row in run.rows:
            ends[row.rank].append(row.virtual_seconds)
        if min(map(len, ends)) < CHOICE_ROUNDS:
            return math.inf, run
        first, *_, last = map(max, zip(*ends, strict=True))
        return last - first, run


def least_seconds(recording: Recording, world: World, step_seconds: Sequence[float]) -> float:
    """Lower bound of the seconds from the last rank's first mark to its last one.

    Counted are calls among all ranks, by algorithms that `world` fixes: by the bytes of each link, or by the order of
    messages, whichever takes longer.

    Args:
        recording: rounds.
        world: ranks and a network without weather.
        step_seconds: mean seconds of computing of each rank's step.
    """
    topology, protocol = world.topology, world.protocol
    assert topology is not None
    book, estimator = Schedules(world), Estimator(topology, protocol)
    every, computing = tuple(range(world.num_ranks)), np.array(step_seconds)

    @cache
    def after(call: Any) -> tuple[FloatArray, FloatArray] | None:
        """Bounds of what follows a member's entry into a call; None: nothing is known."""
        if call.op not in world.collectives or call.ranks != every or call.store is not None:
            return None
        plan, hosts = book.of(call), book.hosts_of(call)
        is_estimated = estimator.is_long(plan) or estimator.is_crowd(plan, hosts)
        if is_estimated or not 0 < plan.num_messages * plan.num_ranks <= _MOST_COUNTED:
            return None
        return after_entry(plan, hosts, topology, protocol)

    total = _seconds_by_bytes(recording, computing, after)
    if len(recording.streams) == 1 and len(every) <= _MOST_IN_ORDER:
        total = max(total, seconds_in_order(recording.streams[0], computing, after))
    return total * (1 - _ROUNDING) - max(map(len, recording.streams)) * _GRID


def _seconds_by_bytes(
    recording: Recording,
    computing: FloatArray,
    after: Callable[[Call], tuple[FloatArray, FloatArray] | None],
) -> float:
    """Bound by the bytes of each link, of calls that all ranks wait for in the same round.

    The last rank to begin a round enters them at earliest when it has computed what it computes before, and the bytes
    that wait for it cross each link after that. Whoever receives the last of these bytes begins the next round no
    earlier.
    """
    total = 0.0
    for kinds in zip(*recording.posts_by_round, strict=False):
        common = frozenset[Any].intersection(*(frozenset(key for key, *_ in posts) for posts in kinds))
        found = []
        for posts in kinds:
            least, busy = np.zeros(len(computing)), np.zeros((len(computing), 1))
            for key, call, steps in reversed(posts):
                if key in common and (bounds := after(call)) is not None:
                    busy = busy + bounds[0]
                least = np.maximum(least, steps * computing + busy.max(axis=1))
            found.append(least)
        of_ranks = recording.kinds or range(recording.num_ranks)
        total += min(float(found[kind][rank]) for rank, kind in enumerate(of_ranks))
    return total


def _same(seconds: float, step: int) -> float:
    """Seconds of any step."""
    return seconds


def rivals(recording: Recording, world: World, *, every: bool = False) -> dict[str, list[str]]:
    """Algorithms by operation that all calls of it could go by, where there are several and none is fixed.

    Args:
        recording: of rounds.
        world: ranks and network.
        every: also those that take a call alone much longer, where rounds have many messages.
    """
    book = Schedules(world)
    found: dict[str, dict[str, None]] = {}
    for call, number in recording.calls.items():
        if call.op in OPERATIONS and not OPERATIONS[call.op].is_per_pair and call.store is None:
            most = math.inf if every else _FEW_MESSAGES // number
            found.setdefault(call.op, {}).update(dict.fromkeys(book.contenders(call, _WITHIN, most)))
    if "averaging_algorithm" in recording.reads:  # of codes, which others would encode at every hop
        for name in AVERAGING_ALGORITHMS[1:]:
            found.get("all_reduce", {}).pop(name, None)
    return {op: list(names) for op, names in found.items() if len(names) > 1}
