"""A few rounds of a strategy, played on the network by its own code on every rank, without values."""

from __future__ import annotations

import copy
import warnings
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from exogym_core.planning.learner import PlannedLearner
from exogym_core.planning.memory import worker_memory
from exogym_core.planning.rounds import period_of
from exogym_core.ranks.run import run_ranks
from exogym_core.strategy.context import StepContext
from exogym_core.strategy.parts.selectors import IndexSelector, RandomIndexSelector
from exogym_core.training.loop import take_step
from netsim.files.errors import InputError, NetsimError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

    from exogym_core.communicator.base import Communicator
    from exogym_core.cost.coding import Coding
    from exogym_core.strategy.base import Strategy
    from netsim.topology.topology import Topology

__all__ = ["Played", "draws_bytes", "play_steps", "rhythm"]

_LONGEST_ROUND = 5_000
_TRIAL_LAYERS = 6
_SIZES = ("topk", "chunk", "bucket", "bytes", "rank", "bits", "size", "seed")
_WORTH_SKIPPING = 4_000  # steps of single ranks
_TRIAL_RANKS = 8


@dataclass
class Played:
    """What playing some steps has shown.

    Attributes:
        step_seconds: virtual time at which the last rank was through with each step.
        compute_seconds, exposed_seconds: of each rank, over all steps played.
        bytes_sent, wan_bytes, payload_bytes: of each rank, after each step: [rank][step].
        memory: bytes of the first rank by purpose.
        collectives: the algorithms that were used, by operation.
        link_bytes: payload that crossed each link, over all steps played.
    """

    step_seconds: list[float]
    compute_seconds: list[float]
    exposed_seconds: list[float]
    bytes_sent: list[list[int]]
    wan_bytes: list[list[int]]
    payload_bytes: list[list[int]]
    memory: dict[str, int] = field(default_factory=dict)
    collectives: dict[str, list[str]] = field(default_factory=dict)
    link_bytes: list[float] = field(default_factory=list)


def rhythm(strategy: Strategy, num_ranks: int) -> tuple[int | None, list[bool]]:
    """(steps a round, whether each of its steps is quiet), from the strategy's own code on a model of a few numbers.

    Every whole number among its options that is not a size may be the length of a round, so at least three times the
    largest is looked at. A strategy that does not repeat itself within thousands of steps has no rhythm: (None, []).
    """
    candidates = [4]
    for name, value in strategy.arguments.items():
        is_size = name == "k" or any(word in name for word in _SIZES)
        if type(value) is int and value <= _LONGEST_ROUND and not is_size:
            candidates.append(value)
    ranks = num_ranks if num_ranks <= _TRIAL_RANKS else _fewest_ranks(strategy, num_ranks)
    length = 3 * max(candidates)
    while length <= 4 * _LONGEST_ROUND:
        sizes = _trial(strategy, ranks, length)
        period = period_of(sizes)
        if period is not None:
            start = len(sizes) - period
            quiet = [False] * period
            for step in range(start, len(sizes)):
                quiet[step % period] = sizes[step] == 0
            # Fragments that are alike in a tiny model need not be so in others: a whole round is the option.
            whole = max((count for count in candidates[1:] if count and count % period == 0), default=period)
            return whole, quiet * (whole // period)
        length *= 3
    return None, []


def _fewest_ranks(strategy: Strategy, num_ranks: int) -> int:
    """Twice as few ranks as the strategy accepts: one with sites needs two whole ones to have rounds."""
    for ranks in range(2, num_ranks // 2):
        try:
            _trial(strategy, ranks, 1)
        except (NetsimError, ValueError):
            continue
        return 2 * ranks
    return num_ranks


def _trial(strategy: Strategy, num_ranks: int, length: int) -> list[int]:
    """Payload bytes of rank 0 in each of `length` steps."""

    def body(comm: Communicator) -> list[int]:
        with torch.device("meta"):
            model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(_TRIAL_LAYERS)))
        mine = copy.deepcopy(strategy)
        _choose_by_number(mine)
        runner = _Runner(comm, model, mine, lambda step: 0.0, length)
        runner.still_optimizers()
        sizes = []
        for step in range(length):
            before = comm.traffic.payload_bytes
            runner.step(step)
            sizes.append(comm.traffic.payload_bytes - before)
        return sizes

    with _quiet_schedules():
        return run_ranks(body, num_ranks).results[0]


class _Runner:
    """One rank of a plan: the strategy's own steps, without its optimizers' arithmetic."""

    def __init__(
        self,
        comm: Communicator,
        model: nn.Module,
        strategy: Strategy,
        seconds: Callable[[int], float],
        num_steps: int,
        coding: Coding | None = None,
    ) -> None:
        self.comm, self.model, self.strategy = comm, model, strategy
        strategy.setup(model, comm, num_steps, 0, **({} if coding is None else {"coding": coding}))
        # Ranks share a model's gradients, which hold no values: there is nothing to forget.
        strategy.zero_grad = _nothing  # type: ignore[method-assign]
        self.learner = PlannedLearner(model, comm, strategy, seconds)
        self._seconds = seconds

    def step(self, step: int) -> None:
        """One step as training does it."""
        take_step(self.strategy, self.learner, None, StepContext(step, last_micro_batch=False))

    def quiet_step(self, step: int) -> None:
        """One that sends nothing: time passes and the step is counted."""
        self.comm.advance(self._seconds(step))
        self.strategy.local_step += 1

    def still_optimizers(self, number: int | None = None) -> None:
        """From now on the first `number` optimizers' steps do nothing: without values there is nothing to compute."""
        for optimizer in self.strategy.optimizers[:number]:
            optimizer.step = _nothing  # type: ignore[method-assign,assignment]


def _nothing(*_: Any) -> None:
    return None


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


def play_steps(
    strategy: Strategy,
    model: nn.Module,
    num_ranks: int,
    num_steps: int,
    seconds: Sequence[Callable[[int], float]],
    topology: Topology,
    *,
    quiet: Sequence[bool] = (),
    placement: Sequence[str] | None = None,
    protocol: str | Mapping[str, Any] | None = None,
    collectives: str | Mapping[str, str] | None = "auto",
    coding: Coding | None = None,
) -> Played:
    """Run `num_steps` steps of `strategy` on every rank, and time what it sends.

    Args:
        strategy: not set up; every rank gets a copy.
        model: on the meta device.
        num_ranks: ranks.
        num_steps: steps to play.
        seconds: of computing by step, one function a rank.
        topology: the network.
        quiet: which steps of a round send nothing (see `rhythm`); they are counted and not carried out.
        placement: as `run_ranks` has it.
        protocol: likewise.
        collectives: likewise.
        coding: what the work of codecs costs; None: nothing.
    """
    # With several busy steps a round their places may depend on the model, as those of fragments do.
    skips = quiet.count(False) == 1 and num_ranks * num_steps > _WORTH_SKIPPING
    memory: dict[str, int] = {}
    sent: list[list[tuple[int, int, int]]] = [[] for _ in range(num_ranks)]

    measured_after = max(len(quiet), 1)  # by then every optimizer has stepped

    def body(comm: Communicator) -> None:
        mine = copy.deepcopy(strategy)
        _choose_by_number(mine)
        own = copy.deepcopy(model) if mine.overlaps_backward else model
        runner = _Runner(comm, own, mine, seconds[comm.rank], num_steps, coding)
        if comm.rank:
            runner.still_optimizers()
        for step in range(num_steps):
            if skips and step and quiet[step % len(quiet)]:
                runner.quiet_step(step)
            else:
                runner.step(step)
            if comm.rank == 0 and (step == 0 or step + 1 == measured_after):
                # Its optimizers make their states when they step for the first time: one step is enough.
                memory.update(worker_memory(own, mine))
                runner.still_optimizers(1 if step + 1 < measured_after else None)
            traffic = comm.traffic
            sent[comm.rank].append((traffic.bytes_sent, traffic.wan_bytes, traffic.payload_bytes))
            comm.mark({"step": step})

    with _quiet_schedules():
        run = run_ranks(
            body, num_ranks, topology, placement=placement, protocol=protocol, collectives=collectives
        )
    ends = [0.0] * num_steps
    for row in run.rows:
        step = row.row["step"]
        ends[step] = max(ends[step], row.virtual_seconds)
    if run.virtual_seconds is None:
        raise InputError("plan: a topology is needed")
    bytes_sent, wan_bytes, payload_bytes = ([[row[i] for row in rank] for rank in sent] for i in range(3))
    return Played(
        ends,
        run.compute_seconds,
        run.exposed_seconds,
        bytes_sent,
        wan_bytes,
        payload_bytes,
        memory,
        run.collectives,
        run.link_bytes,
    )
