"""A few rounds of a strategy, played on the network by its own code on every rank, without values.

What ranks do does not depend on the network unless they ask for the time, and most do the same as each other. So a rank
that stands for all runs once, and what it requests is played on as many networks as there are questions.
"""

from __future__ import annotations

import copy
import warnings
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from exogym_core.planning.learner import PlannedLearner
from exogym_core.planning.memory import worker_memory
from exogym_core.planning.rounds import period_of
from exogym_core.ranks.recorded import record, record_alone
from exogym_core.ranks.run import run_ranks
from exogym_core.strategy.context import StepContext
from exogym_core.strategy.parts.selectors import IndexSelector, RandomIndexSelector
from exogym_core.training.loop import take_step
from netsim.files.errors import InputError, NetsimError, RankError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

    from torch import Tensor
    from torch.optim import Optimizer

    from exogym_core.communicator.base import Communicator
    from exogym_core.cost.coding import Coding
    from exogym_core.ranks.recorded import Recording
    from exogym_core.ranks.run import RunResult
    from exogym_core.strategy.base import Strategy
    from netsim.topology.topology import Topology

__all__ = ["Play", "Played", "Rhythm", "draws_bytes", "rhythm"]

_LONGEST_ROUND = 5_000
_TRIAL_LAYERS = 6
_SIZES = ("topk", "chunk", "bucket", "bytes", "rank", "bits", "size", "seed")
_TRIAL_RANKS = 4
_ROUNDS_OF_PEERS = 8


@dataclass
class Played:
    """What playing some rounds has shown.

    Attributes:
        round_seconds: virtual time at which the last rank was through with each round.
        compute_seconds, exposed_seconds: of each rank, over all rounds played.
        bytes_sent, wan_bytes, payload_bytes: of each rank, after each round: [rank][round].
        memory: bytes of the first rank by purpose.
        collectives: the algorithms that were used, by operation.
        link_bytes: payload that crossed each link, over all rounds played.
        peers: whom ranks met in each round.
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


class Rhythm(NamedTuple):
    """What a strategy does again and again.

    Attributes:
        period: steps a round; None: it never repeats itself.
        quiet: whether each step of a round sends nothing.
        are_peers_new: ranks meet others in other rounds.
        are_ranks_alike: every rank does the same, so one can stand for all.
    """

    period: int | None
    quiet: tuple[bool, ...] = ()
    are_peers_new: bool = False
    are_ranks_alike: bool = False


def rhythm(strategy: Strategy, num_ranks: int) -> Rhythm:
    """How a strategy repeats itself, from its own code on a model of a few numbers.

    Every whole number among its options that is not a size may be the length of a round, so at least three times the
    largest is looked at. A strategy that does not repeat itself within thousands of steps has no rhythm.
    """
    candidates = [4]
    for name, value in strategy.arguments.items():
        is_size = name == "k" or any(word in name for word in _SIZES)
        if type(value) is int and value <= _LONGEST_ROUND and not is_size:
            candidates.append(value)
    ranks = num_ranks if num_ranks <= _TRIAL_RANKS else _fewest_ranks(strategy, num_ranks)
    length = 3 * max(candidates)
    while length <= 4 * _LONGEST_ROUND:
        sizes, peers, asks = _trial(strategy, ranks, length)
        period = period_of(sizes)
        if period is not None:
            start = len(sizes) - period
            quiet = [False] * period
            for step in range(start, len(sizes)):
                quiet[step % period] = sizes[step] == 0
            # Fragments that are alike in a tiny model need not be so in others: a whole round is the option.
            whole = max((count for count in candidates[1:] if count and count % period == 0), default=period)
            alike = _are_alike(strategy, ranks, whole)
            if not alike and whole * _ROUNDS_OF_PEERS > length:  # few who draw lots may draw the same again
                _, peers, _ = _trial(strategy, ranks, whole * _ROUNDS_OF_PEERS)
            are_new = any(peers[i] != peers[i + whole] for i in range(whole, len(peers) - whole))
            return Rhythm(whole, tuple(quiet * (whole // period)), are_new, alike)
        if asks:  # without a network it has no rhythm, however long one looks
            break
        length *= 3
    return Rhythm(None)


def _fewest_ranks(strategy: Strategy, num_ranks: int) -> int:
    """Twice as few ranks as the strategy accepts: one with sites needs two whole ones to have rounds."""
    for ranks in range(2, num_ranks // 2):
        try:
            _trial(strategy, ranks, 1)
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


def _recorded(
    strategy: Strategy, num_ranks: int, length: int, model: Callable[[int], nn.Module]
) -> Recording:
    """Some steps on a model without layers of note; each is marked with the payload sent so far."""

    def body(comm: Communicator, computing: Callable[[int, float], None]) -> None:
        with torch.device("meta"):
            own = model(_num_layers(strategy))
        mine = copy.deepcopy(strategy)
        _choose_by_number(mine)
        runner = _Runner(comm, own, mine, computing, length)
        runner.still_optimizers()
        for step in range(length):
            runner.step(step)
            comm.mark({"payload_bytes": comm.traffic.payload_bytes})
        mine.finish()  # what is in flight comes to its end

    with _quiet_schedules():
        try:
            return record(body, num_ranks)
        except RankError as error:
            name = type(strategy).__name__
            raise InputError(
                f"plan: {name} computes with values, which a plan has none of, so what it sends is not known before; "
                f"plan another strategy, or run it on a small model\n{error}"
            ) from None


def _trial(strategy: Strategy, num_ranks: int, length: int) -> tuple[list[int], list[Hashable], bool]:
    """Payload bytes of rank 0 in each of `length` steps, whom all ranks call, and whether they ask for the time."""
    made = _recorded(strategy, num_ranks, length, _tiny)
    sent = [0, *(row["payload_bytes"] for row in made.rows(0))]
    sizes = [later - earlier for earlier, later in pairwise(sent)]
    return sizes, made.peers(), made.asks_for_time


def _are_alike(strategy: Strategy, num_ranks: int, length: int) -> bool:
    """Whether ranks do the same for a round and a step, on a model with layers that differ."""
    made = _recorded(strategy, num_ranks, length + 1, _unlike)
    return made.ranks_are_alike and not made.asks_for_time


class _Runner:
    """One rank of a plan: the strategy's own steps, without its optimizers' arithmetic."""

    def __init__(
        self,
        comm: Communicator,
        model: nn.Module,
        strategy: Strategy,
        computing: Callable[[int, float], None],
        num_steps: int,
        coding: Coding | None = None,
    ) -> None:
        self.comm, self.model, self.strategy = comm, model, strategy
        strategy.setup(model, comm, num_steps, 0, **({} if coding is None else {"coding": coding}))
        # Ranks share a model's gradients, which hold no values: there is nothing to forget.
        strategy.zero_grad = _nothing  # type: ignore[method-assign]
        self.learner = PlannedLearner(model, strategy, computing)
        self._computing = computing
        for optimizer in strategy.optimizers:
            optimizer.step = partial(_step_of_kinds, optimizer, optimizer.step)  # type: ignore[method-assign,assignment]

    def step(self, step: int) -> None:
        """One step as training does it."""
        take_step(self.strategy, self.learner, None, StepContext(step, last_micro_batch=False))

    def quiet_step(self, step: int) -> None:
        """One that sends nothing: time passes and the step is counted."""
        self._computing(step, 1.0)
        self.strategy.local_step += 1

    def still_optimizers(self, number: int | None = None) -> None:
        """From now on the first `number` optimizers' steps do nothing: without values there is nothing to compute."""
        for optimizer in self.strategy.optimizers[:number]:
            optimizer.step = _nothing  # type: ignore[method-assign,assignment]


def _nothing(*_: Any) -> None:
    return None


def _step_of_kinds(optimizer: Optimizer, step: Callable[..., Any], *arguments: Any) -> None:
    """An optimizer's step on one parameter of each shape; the others get the states that it has made for that one.

    Without values all that a step leaves behind is the shapes of states, and those of equal parameters are equal.
    """
    like: dict[tuple[int, torch.Size, torch.dtype], Tensor] = {}
    others: list[tuple[Tensor, Tensor, Tensor]] = []
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            first = like.setdefault((number, parameter.shape, parameter.dtype), parameter)
            if first is not parameter:
                others.append((parameter, first, parameter.grad))
                parameter.grad = None
    step(*arguments)
    for parameter, first, gradient in others:
        parameter.grad = gradient
        if first in optimizer.state and parameter not in optimizer.state:
            optimizer.state[parameter] = {
                name: torch.empty_like(value) if isinstance(value, torch.Tensor) else value
                for name, value in optimizer.state[first].items()
            }


class _ExpectedSelector(IndexSelector):
    """As many indices as a random selector chooses on average, without drawing them."""

    def get_indices(self, param: Tensor, iteration: int) -> Tensor:
        return torch.empty(round(self.p * param.numel()), dtype=torch.long, device="meta")


def _choose_by_number(strategy: Strategy) -> bool:
    """Have random selectors say how many they choose; whether there were any (bytes are then expected ones)."""
    found = False
    for owner in (strategy, *getattr(strategy, "communication_modules", ())):
        if isinstance(getattr(owner, "index_selector", None), RandomIndexSelector):
            owner.index_selector = _ExpectedSelector(owner.index_selector.p)
            found = True
    return found


def draws_bytes(strategy: Strategy) -> bool:
    """Whether its bytes depend on random numbers, so that plans tell what is to be expected."""
    return _choose_by_number(copy.deepcopy(strategy))


@contextmanager
def _quiet_schedules() -> Iterator[None]:
    """Without torch's warning that schedules go on and optimizers do not."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*")
        yield


class Play:
    """A few rounds of a strategy, to be played on any network.

    Args:
        strategy: not set up; every rank that runs gets a copy.
        model: on the meta device.
        num_ranks: ranks.
        num_rounds: rounds to play.
        rhythm: of the strategy; `period` is set.
        seconds: of computing by step, one function a rank.
        collectives: as `run_ranks` has them.
        coding: what the work of codecs costs; None: nothing.
    """

    def __init__(
        self,
        strategy: Strategy,
        model: nn.Module,
        num_ranks: int,
        num_rounds: int,
        rhythm: Rhythm,
        seconds: Sequence[Callable[[int], float]],
        *,
        collectives: str | Mapping[str, str] | None = "auto",
        coding: Coding | None = None,
    ) -> None:
        assert rhythm.period is not None
        self._strategy, self._model, self._num_ranks = strategy, model, num_ranks
        self._num_rounds, self._period, self._quiet = num_rounds, rhythm.period, rhythm.quiet
        self._seconds, self._collectives, self._coding = seconds, collectives, coding
        self._memory: dict[str, int] = {}
        self._schedules: Any = None
        self._recording = self._record(rhythm)

    def _record(self, rhythm: Rhythm) -> Recording | None:
        """What ranks request; None: that depends on the time."""
        with _quiet_schedules():
            if rhythm.are_ranks_alike:
                return record_alone(self._body, self._num_ranks, self._collectives)
            made = record(self._body, self._num_ranks, self._seconds, self._collectives)
        return None if made.asks_for_time else made

    def _body(self, comm: Communicator, computing: Callable[[int, float], None]) -> None:
        """One rank, from its first step to its last."""
        # With several busy steps a round their places may depend on the model, as those of fragments do.
        skips = self._quiet.count(False) == 1
        mine = copy.deepcopy(self._strategy)
        _choose_by_number(mine)
        own = copy.deepcopy(self._model) if mine.overlaps_backward else self._model
        runner = _Runner(comm, own, mine, computing, self._num_rounds * self._period, self._coding)
        if comm.rank:
            runner.still_optimizers()
        for step in range(self._num_rounds * self._period):
            if skips and step and self._quiet[step % self._period]:
                runner.quiet_step(step)
            else:
                runner.step(step)
            if comm.rank == 0 and (step == 0 or step + 1 == self._period):
                # Its optimizers make their states when they step for the first time: one step is enough.
                self._memory.update(worker_memory(own, mine))
                runner.still_optimizers(1 if step + 1 < self._period else None)
            if (step + 1) % self._period == 0:
                traffic = comm.traffic
                comm.mark(
                    {
                        "round": step // self._period,
                        "payload_bytes": traffic.payload_bytes,
                        "bytes_sent": traffic.bytes_sent,
                        "wan_bytes": traffic.wan_bytes,
                    }
                )
        mine.finish()  # what is in flight comes to its end, after the last row

    def on(
        self,
        topology: Topology,
        *,
        placement: Sequence[str] | None = None,
        protocol: str | Mapping[str, Any] | None = None,
        num_rounds: int | None = None,
    ) -> Played:
        """Play it on a network; collectives go by what was chosen on the first one.

        Args:
            topology: the network.
            placement, protocol: as `run_ranks` has them.
            num_rounds: fewer rounds than there are; None: all.
        """
        if self._recording is None:
            run = self._live(topology, placement, protocol)
        else:
            run, self._schedules = self._recording.play(
                topology,
                self._seconds,
                placement=placement,
                protocol=protocol,
                collectives=self._collectives,
                num_marks=num_rounds,
                schedules=self._schedules,
            )
        return self._told(run)

    def _live(
        self, topology: Topology, placement: Sequence[str] | None, protocol: str | Mapping[str, Any] | None
    ) -> RunResult[None]:
        """By ranks that run as it is played."""

        def own(comm: Communicator) -> None:
            self._body(comm, partial(_advance, comm, self._seconds[comm.rank]))

        with _quiet_schedules():
            return run_ranks(
                own,
                self._num_ranks,
                topology,
                placement=placement,
                protocol=protocol,
                collectives=self._collectives,
            )

    def _told(self, run: RunResult[None]) -> Played:
        if run.virtual_seconds is None:
            raise InputError("plan: a topology is needed")
        num_rounds = 1 + max(row.row["round"] for row in run.rows)
        ends = [0.0] * num_rounds
        bytes_sent, wan_bytes, payload = (
            [[0] * num_rounds for _ in range(self._num_ranks)] for _ in range(3)
        )
        for stamped in run.rows:
            row, number = stamped.row, stamped.row["round"]
            ends[number] = max(ends[number], stamped.virtual_seconds)
            bytes_sent[stamped.rank][number] = row["bytes_sent"]
            wan_bytes[stamped.rank][number] = row["wan_bytes"]
            payload[stamped.rank][number] = row["payload_bytes"]
        return Played(
            ends,
            run.compute_seconds,
            run.exposed_seconds,
            bytes_sent,
            wan_bytes,
            payload,
            self._memory,
            run.collectives,
            run.link_bytes,
            self._recording.peers() if self._recording is not None else [],
        )


def _advance(comm: Communicator, seconds: Callable[[int], float], step: int, share: float) -> None:
    comm.advance(seconds(step) * share)
