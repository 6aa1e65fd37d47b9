"""Ranks of plans, without values, and the rhythm of a strategy, found by its own steps on a model of a few numbers."""

from __future__ import annotations

import copy
import math
import warnings
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from exogym_core.cost.compute import Coding
from exogym_core.run.loop import set_up, take_step
from exogym_core.strategy.base import StepContext
from exogym_core.strategy.parts.selectors import IndexSelector, RandomIndexSelector
from netgym.planning.recording import Recording, goes_alone, record, run_alone
from netsim.errors import InputError, NetsimError, RankError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from torch.optim import Optimizer

    from exogym_core.communicator.base import Communicator
    from exogym_core.strategy.base import Strategy
    from netgym.planning.recording import Body

__all__ = [
    "FEWEST_STEPS",
    "NUM_SIMULATED",
    "PlannedRank",
    "Rhythm",
    "choose_by_number",
    "draws_bytes",
    "is_left_out",
    "is_pace_step",
    "making_groups",
    "period_of",
    "planned_rank",
    "quiet_schedules",
    "rhythm",
    "without_updates",
]


class _WithoutUpdates(TorchFunctionMode):
    """Updates in place of tensors without values do nothing: a rank alone gets parts as large as its own."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func`, unless it is an update."""
        if func in _UPDATES and args[0].is_meta:
            return args[0]
        return func(*args, **(kwargs or {}))


_UPDATES = (Tensor.add_, Tensor.mul_, Tensor.div_, Tensor.copy_)


def without_updates(strategy: Strategy) -> AbstractContextManager[Any]:
    """`_WithoutUpdates` for strategies that send every step's gradients; others' parts are equal."""
    return _WithoutUpdates() if strategy.overlaps_backward else nullcontext()


def _arrive(parameter: Tensor) -> None:
    """Give a parameter a gradient without values, and call its hooks as a backward pass does."""
    if parameter._backward_hooks:  # torch calls these itself
        torch.autograd.backward(parameter, torch.empty_like(parameter))
        return
    if parameter.grad is None:
        parameter.grad = torch.empty_like(parameter)
    hooks: Any = parameter._post_accumulate_grad_hooks
    for hook in list(hooks.values()) if hooks else ():
        hook(parameter)


_FORWARD_SHARE = 1 / 3  # of a step's computing; the backward pass does two products for each of the forward's


class PlannedRank:
    """A rank of a plan: the strategy's own steps, without gradients' values and its optimizers' arithmetic.

    Where the strategy sends gradients during the backward pass, each parameter's gradient comes when
    its share of that pass is done, the last parameters' first.

    Args:
        comm: the rank's communicator.
        model: on the meta device.
        strategy: its own, not set up.
        computing: called with (step, share) of the computing; all of a 0-based step is a share of 1.
        num_steps: of the run.
        coding: cost of codecs; without speeds it takes no time, and the traffic counts the values.
    """

    def __init__(
        self,
        comm: Communicator,
        model: nn.Module,
        strategy: Strategy,
        computing: Callable[[int, float], None],
        num_steps: int,
        coding: Coding | None = None,
    ) -> None:
        self.strategy, self._computing = strategy, computing
        free = _FreeCoding.model_construct({})
        set_up(strategy, model, comm, num_steps, 0, coding if coding is not None and coding.speeds else free)
        # Ranks share a model's gradients, which hold no values: there is nothing to forget.
        strategy.zero_grad = _nothing  # type: ignore[method-assign]
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._total = sum(parameter.numel() for parameter in self._parameters) or 1
        for optimizer in strategy.optimizers:
            optimizer.step = partial(_step_of_kinds, optimizer, optimizer.step)  # type: ignore[method-assign,assignment]

    def step(self, step: int) -> None:
        """Take a step as training does."""
        take_step(self.strategy, self._gradients, None, StepContext(step, last_micro_batch=False))

    def _gradients(self, step: None, context: StepContext) -> float:
        """Forward and backward pass of the step that `context` numbers; there is no loss."""
        context.last_micro_batch = True
        self.strategy.before_backward(last_micro_batch=True)
        overlaps = self.strategy.overlaps_backward
        self._computing(context.number, _FORWARD_SHARE if overlaps else 1.0)
        for parameter in reversed(self._parameters):
            if overlaps:
                share = (1 - _FORWARD_SHARE) * parameter.numel() / self._total
                self._computing(context.number, share)
                _arrive(parameter)
            elif parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
        return math.nan

    def quiet_step(self, step: int) -> None:
        """Take a step without communication: advance the clock and count the step."""
        self._computing(step, 1.0)
        self.strategy.local_step += 1

    def still_optimizers(self, number: int | None = None) -> None:
        """Disable the steps of the first `number` optimizers: without values there is nothing to compute."""
        for optimizer in self.strategy.optimizers[:number]:
            optimizer.step = _nothing  # type: ignore[method-assign,assignment]


class _FreeCoding(Coding):
    """Coding that takes no time, with speeds in name, so that values are counted."""

    @property
    def speeds(self) -> Mapping[str, Any]:
        return {self.for_all: None}

    def seconds(self, codec: str, way: str, num_values: int) -> float:
        return 0.0


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
    """Selects as many indices as a random selector does on average, without drawing them."""

    def get_indices(self, param: Tensor, iteration: int) -> Tensor:
        return torch.empty(self.count(param.numel()), dtype=torch.long, device="meta")


def choose_by_number(strategy: Strategy) -> bool:
    """Have random selectors say how many they choose; whether there were any (bytes are then expected ones)."""
    found = False
    for owner in (strategy, *getattr(strategy, "modules", ())):
        if isinstance(getattr(owner, "index_selector", None), RandomIndexSelector):
            owner.index_selector = _ExpectedSelector(owner.index_selector.p)
            found = True
    return found


def draws_bytes(strategy: Strategy) -> bool:
    """True if its bytes depend on random numbers, so that plans show expected values."""
    return choose_by_number(copy.deepcopy(strategy))


def planned_rank(
    strategy: Strategy,
    comm: Communicator,
    model: nn.Module,
    computing: Callable[[int, float], None],
    num_steps: int,
    coding: Coding | None = None,
) -> PlannedRank | None:
    """A rank with its own copy of a strategy, see `PlannedRank`; None after a server has served, without arithmetic."""
    mine = copy.deepcopy(strategy)
    if comm.rank < comm.world_size - mine.num_servers:
        choose_by_number(mine)
        return PlannedRank(comm, model, mine, computing, num_steps, coding)
    mine.setup(model, comm, 1, 0)
    for name in getattr(mine, "arithmetic", ()):
        setattr(mine, name, _nothing)
    mine.serve(_nothing)  # until no worker sends anything any more
    mine.finish()
    return None


@contextmanager
def quiet_schedules() -> Iterator[None]:
    """Suppress torch's warning that schedules advance and optimizers do not."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*")
        yield


_LONGEST_ROUND = 100_000  # steps: of a longer one the trial takes minutes
_TRIAL_LAYERS = 6
_SIZES = ("topk", "chunk", "bucket", "bytes", "rank", "bits", "size", "seed")
_TRIAL_RANKS = 4
_ROUNDS_OF_PEERS = 8
_STEPS_WITHOUT_RHYTHM = 64
_LONG_RUN = 1_000  # times as long as a trial
_MOST_TRIPLED = 27  # times the longest option: 3, 9 and 27 of it are looked at


#: Steps at a round's beginning that are simulated; the last of them stands for the steps that are left out.
NUM_SIMULATED = 3
#: Rounds that are shorter are simulated as they are.
FEWEST_STEPS = NUM_SIMULATED + 2


def is_left_out(place: int, period: int) -> bool:
    """True if the step at this place of a round is inferred from the others."""
    return NUM_SIMULATED <= place < period - 1


def is_pace_step(place: int) -> bool:
    """True if the end of the step at this place shows the length of one."""
    return place in (NUM_SIMULATED - 2, NUM_SIMULATED - 1)


class Rhythm(NamedTuple):
    """Repeating pattern of a strategy.

    Attributes:
        period: steps a round; None: it never repeats itself.
        quiet: whether each step of a round sends nothing.
        are_peers_new: ranks meet others in other rounds.
        goes_alone: a rank's requests do not depend on others' messages, so one of a kind can stand for all.
        repeats: every step of a round sends as much as the one before, but for the last one.
        asks: ranks ask for the time, so their requests depend on it.
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
    except (ValueError, RuntimeError):  # rank 0 depends on the others
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
            _recorded(strategy, _body(strategy, [0]), ranks)
        except (NetsimError, ValueError):
            continue
        return 2 * ranks
    return num_ranks


def _tiny(num_layers: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(num_layers)))


def _unlike(num_layers: int) -> nn.Module:
    """Model without two layers that are alike."""
    return nn.Sequential(*(nn.Linear(width, width + 1) for width in range(2, num_layers + 2)))


def _num_layers(strategy: Strategy) -> int:
    """Enough for as many fragments as the strategy cuts a model into."""
    fragments = [
        value for name, value in strategy.arguments.items() if "fragments" in name and isinstance(value, int)
    ]
    return max(_TRIAL_LAYERS, *fragments, 0)


def _body(
    strategy: Strategy,
    steps: Sequence[int],
    model: Callable[[int], nn.Module] = _tiny,
    max_steps: int | None = None,
) -> Body:
    """Steps of a run on a model without layers of note; each is marked with the payload sent so far.

    Args:
        strategy: not set up.
        steps: to take, in order; others are counted alone.
        model: makes one of so many layers.
        max_steps: of the run; None: no more than these.
    """

    def body(comm: Communicator, computing: Callable[[int, float], None]) -> None:
        with torch.device("meta"):
            own = model(_num_layers(strategy))
        runner = planned_rank(strategy, comm, own, computing, max_steps or max(steps, default=0) + 1)
        if runner is None:
            return
        mine = runner.strategy
        runner.still_optimizers()
        done = 0
        with without_updates(strategy):
            for step in steps:
                mine.local_step += step - done
                runner.step(step)
                done = step + 1
                comm.mark({"payload_bytes": comm.traffic.payload_bytes})
            mine.finish()  # calls in flight complete

    return body


def making_groups(strategy: Strategy) -> Body:
    """The beginning of a rank, with its groups and without steps."""
    return _body(strategy, (), max_steps=_LONG_RUN)


def _recorded(strategy: Strategy, body: Body, num_ranks: int) -> Recording:
    with quiet_schedules():
        try:
            return record(body, num_ranks)
        except RankError as error:
            name = type(strategy).__name__
            raise InputError(
                f"plan: {name} computes with values, which a plan does not have, so its messages cannot be planned; "
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
        """Payload bytes of rank 0 in each of `length` steps, the ranks that it calls, and whether it reads the clock.

        The run is to have `max_steps`; None: no more than these.
        """
        body = _body(self.strategy, range(length), max_steps=max_steps)
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
        body = _body(strategy, steps, _unlike)
        made = _recorded(strategy, body, self.num_ranks)
        with quiet_schedules():
            return goes_alone(made, body, making_groups(strategy))


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
    """Number of values, from each place on, that equal those from the beginning on (the Z function; linear time)."""
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
