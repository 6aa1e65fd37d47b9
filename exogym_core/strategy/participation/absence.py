"""Rounds among the ranks that arrive in time, and how the others catch up."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from exogym_core.communicator.base import FIXED
from exogym_core.events import RoundPlace
from exogym_core.strategy.options import Options, number, one_of, option, positive_int, share
from exogym_core.strategy.participation.rejoining import Rejoining
from exogym_core.strategy.participation.site import LOST, Everyone
from exogym_core.strategy.participation.steps import GradientSteps
from exogym_core.strategy.parts.state import State
from netsim.errors import InputError, locate_errors, unknown_name
from netsim.ranks.deadlines import Deadline
from netsim.units import parse_seconds

if TYPE_CHECKING:
    from torch import Tensor

    from exogym_core.communicator.base import Communicator, JointWork
    from exogym_core.strategy.base import Strategy
    from exogym_core.strategy.parts.outer import SharedModel

__all__ = [
    "Absence",
    "Patience",
    "PatienceOptions",
    "RoundPatienceOptions",
    "Seconds",
    "StepPatienceOptions",
]


Seconds = float | str
"""A number of seconds, or text with a unit such as "10 min"."""

_STRATEGIES = ("wait_for_all", "no_wait")
_REJOIN = ("at_once", "next_round")

# OpenDiLoCo's and hivemind's.
_WAITING, _MATCHMAKING, _AVERAGING = 600.0, 15.0, 60.0
# After a learned deadline: ranks that have always come together are not left out for a microsecond.
_GRACE = 1.0


@dataclass(frozen=True)
class Patience:
    """Waiting for ranks that are late or cut off.

    Attributes:
        waiting_seconds: wait of the first rank at the end of a round for others.
        averaging_seconds: limit of averaging, after which unreachable ranks are left out.
        join_at: virtual seconds at which late ranks join, by rank.
        deadline: learned limit of the wait, quorum and grace.
    """

    waiting_seconds: float
    averaging_seconds: float
    join_at: Mapping[int, float] = field(default_factory=dict)
    deadline: Deadline = FIXED

    def check(self, where: str, comm: Communicator, ranks_per_worker: int) -> None:
        """Refuse transports and sites that do not go with time-outs."""
        if not comm.can_leave_behind:
            raise InputError(
                f"{where}: time-outs for absent ranks need transport='netsim'; {comm.transport!r} waits for "
                "every rank and ends where one is gone: leave them out"
            )
        here = 1 if comm.inside is None else comm.inside.world_size
        if comm.members_change and here != ranks_per_worker:
            raise InputError(
                f"{where}: ranks_per_worker={ranks_per_worker}, but this site has "
                f"{here} process{'es' if here > 1 else ''}: make them equal"
            )
        if ranks_per_worker > 1 and not comm.members_change:
            raise InputError(
                f"{where}: time-outs for absent ranks go with ranks_per_worker=1 in simulation; leave one of both out"
            )
        num_sites = comm.world_size // ranks_per_worker
        what = "ranks" if ranks_per_worker == 1 else "sites"
        if self.deadline.quorum > num_sites:
            raise InputError(
                f"{where}: min_ranks={self.deadline.quorum}, but there are {num_sites} {what}: no round could begin; "
                f"give {num_sites} at most"
            )
        late = [site for site in self.join_at if not 0 <= site < num_sites]
        if late or len(self.join_at) == num_sites:
            raise InputError(
                f"{where}: join_at={dict(self.join_at)} must name some of the {what} 0 to {num_sites - 1}, "
                "and leave one that is there from the start"
            )


def _seconds(where: str, name: str, value: Seconds) -> float:
    if not isinstance(value, str):
        return number(where, name, value)
    with locate_errors(f"{where}: {name}"):
        return parse_seconds(value)


def _some_seconds(where: str, name: str, value: Seconds) -> float:
    seconds = _seconds(where, name, value)
    if not seconds:
        raise InputError(f"{where}: {name}={value!r} must be above 0")
    return seconds


def _join_times(where: str, name: str, value: Mapping[int, Seconds]) -> dict[int, float]:
    if not isinstance(value, Mapping) or not all(str(rank).isdecimal() for rank in value):
        raise InputError(f"{where}: {name}={value!r} must be a mapping such as {{3: '10 min'}}")
    return {int(rank): _seconds(where, f"{name}[{rank}]", time) for rank, time in value.items()}


def _deadline(where: str, name: str, value: object) -> str | dict[str, float]:
    """`value` as "fixed", or as the multiples or the quantile of a learned deadline."""
    if value == "fixed":
        return "fixed"
    if isinstance(value, Mapping) and value and value.keys() <= {"median", "mad"}:
        rule = {str(key): number(where, f"{name}.{key}", each) for key, each in value.items()}
        if rule.get("median") or ("median" in rule and rule.get("mad")):
            return rule
    if isinstance(value, Mapping) and value.keys() == {"quantile"}:
        quantile = share(where, f"{name}.quantile", value["quantile"])
        if quantile:
            return {"quantile": quantile}
    raise InputError(
        f"{where}: {name}={value!r} must be fixed, {{median: 1, mad: 3}} (multiples of the median of earlier arrivals "
        "and of their deviation; mad may be left out) or {quantile: 0.9}"
    )


class PatienceOptions(Options):
    """Options of rounds that continue without absent ranks; by default rounds wait for all.

    Times are virtual, in seconds or as "60 s". Others also wait for a rank that downloads the state of a round, and
    extend the wait for its steps by its delay.

    Args:
        averaging_timeout: limit of averaging; after it ranks that cannot be reached are left out, or where all
            can, those with the narrowest connection, and the others begin again. 60 s where another time-out is
            given, else there is none.
        all_reduce_strategy: "wait_for_all" waits for ranks that still compute, "no_wait" continues without them.
        timeout_waiting_for_peers: limit of "wait_for_all" after the first rank has arrived; 600 s where another
            time-out is given, else none.
        matchmaking_time: time that "no_wait" leaves others to arrive; 15 s if None. "wait_for_all" gives
            them so much longer.
        join_at: ranks that come late, and when: {3: "10 min"}; with `ranks_per_worker` the numbers of sites.
        deadline: "fixed" (the time-out above), or learned from arrivals at the last 16 rounds, each counted from the
            first one of its round: {median: 1, mad: 3} is their median plus three times their median absolute
            deviation, {median: 2} twice their median, {quantile: 0.9} the time by which nine in ten had arrived. The
            time-out stays its limit.
        min_ranks: fewest ranks of a round, which waits for them beyond its deadline; 1 if None.
        grace: time after the deadline, or after the arrival of the `min_ranks`-th rank if that is later, in which
            others are still taken in; 1 s after a learned deadline, else 0.
    """

    of_steps: ClassVar[bool] = False
    rejoin: ClassVar[Any] = "next_round"

    averaging_timeout: Seconds | None = option(None, _some_seconds)
    all_reduce_strategy: str | None = option(None)
    timeout_waiting_for_peers: Seconds | None = option(None, _seconds)
    matchmaking_time: Seconds | None = option(None, _seconds)
    join_at: Mapping[int, Seconds] | None = option(None, _join_times)
    deadline: str | Mapping[str, float] = option("fixed", _deadline)
    min_ranks: int | None = option(None, positive_int)
    grace: Seconds | None = option(None, _seconds)

    def check(self, where: str) -> None:
        """Refuse times without meaning."""
        super().check(where)
        self.patience(where)

    def patience(self, where: str) -> Patience | None:
        """Waiting times of these options; None: a round waits for all, as long as it takes.

        Raises:
            UnknownNameError: no such `all_reduce_strategy`.
            InputError: a time without meaning, or one that goes with the other strategy.
        """
        given, timeout = self.all_reduce_strategy, self.timeout_waiting_for_peers
        name = str(given or "wait_for_all").rsplit(".", maxsplit=1)[-1].lower()
        if name not in _STRATEGIES:
            raise unknown_name("all_reduce_strategy", str(given), _STRATEGIES)
        waits = name == "wait_for_all"
        if not waits and timeout is not None:
            raise InputError(
                f"{where}: timeout_waiting_for_peers goes with all_reduce_strategy='wait_for_all'; "
                "use matchmaking_time"
            )
        is_plain = self.averaging_timeout is None and timeout is None and not self.join_at
        is_plain = is_plain and (self.deadline, self.min_ranks, self.grace) == ("fixed", None, None)
        if waits and is_plain and self.rejoin != "at_once":
            return None
        times = (self.averaging_timeout, self.matchmaking_time, timeout)
        defaults = (_AVERAGING, 0.0 if waits else _MATCHMAKING, _WAITING if waits else 0.0)
        averaging, matching, waiting = (
            default if given is None else float(given) for given, default in zip(times, defaults, strict=True)
        )
        rule: Mapping[str, float] = {} if isinstance(self.deadline, str) else self.deadline
        grace = (_GRACE if rule else 0.0) if self.grace is None else float(self.grace)
        deadline = Deadline(**rule, grace_seconds=grace, quorum=self.min_ranks or 1)
        late = _join_times(where, "join_at", self.join_at or {})
        return Patience(matching + waiting, averaging, late, deadline)

    def workers(self, strategy: Strategy) -> Everyone:
        """Membership of the rounds of a connected strategy."""
        patience = self.patience(strategy.where)
        if patience is None or strategy.comm.world_size == 1:
            return Everyone(strategy)
        if self.rejoin == "at_once":
            return Rejoining(strategy, patience)
        return Absence(strategy, patience, GradientSteps(strategy) if self.of_steps else None)


class RoundPatienceOptions(PatienceOptions):
    """Options of rounds of an outer step.

    Args:
        rejoin: "next_round": a rank that returns downloads the newest state, and begins with the others' next round.
            "at_once": it trains on at once as torchft's do, is healed where it meets the others, and commits alone
            where it is alone; see `exogym_core.strategy.participation.rejoining:Rejoining`. By default next_round.
    """

    rejoin: str = option("next_round", one_of(*_REJOIN))  # type: ignore[misc]


class StepPatienceOptions(PatienceOptions):
    """Options of steps that exchange gradients: each is a round, see `GradientSteps`."""

    of_steps = True


#: Number of the meeting at which real ranks begin, the first time or after a stop.
BEFORE_ROUNDS = -1


class Absence(Everyone):
    """Membership of rounds that continue without ranks that are late or cut off.

    Ranks of a round publish the state that it led to. A rank that is late or cut off loses its steps of that round,
    downloads the newest state that the others have published, and takes part again in the round after that.

    Args:
        strategy: whose rounds these are, of `strategy.round_steps` steps each.
        patience: waiting times.
        steps: exchange of gradients, whose rounds are steps; None: rounds lead to a model, `strategy.outer`.

    Attributes:
        present: the ranks of the last round, whose models are evaluated together; before the first round, those that
            are there from the start.

    Sites of several ranks are present or absent as a whole: all their ranks make the same calls, each between sites
    for its own part.
    """

    state = State("number", present="_present", has_begun="_has_begun", news="_news")
    has_absences = True
    number: int

    def __init__(self, strategy: Strategy, patience: Patience, steps: GradientSteps | None = None) -> None:
        super().__init__(strategy)
        comm, self._steps = strategy.comm, steps
        self.step_rounds = None if steps is None else self
        self._site_size = comm.world_size // self._meeting.world_size
        patience.check(strategy.where, comm, self._site_size)
        self.patience, self.steps_a_round = patience, 1 if steps is not None else strategy.round_steps or 1
        late = patience.join_at
        self._present = [rank for rank in range(comm.world_size) if rank // self._site_size not in late]
        self.number = 0
        self._has_begun = False
        self._news: dict[str, Any] = {}
        self._states = self._meeting  # ranks with the same state, when they have met

    @property
    def present(self) -> list[int]:
        """Ranks that take part in rounds now."""
        return list(self._present)

    @property
    def _meeting(self) -> Communicator:
        """Group of the ranks at this rank's position in every site; of all ranks where gradients are exchanged."""
        return self.strategy.site.between if self._steps is None else self._comm

    def _sites(self) -> list[int]:
        return sorted({rank // self._site_size for rank in self._present})

    def _all_at_begin(self) -> list[int]:
        """Sites to wait for at the start: those present at a checkpoint, and all that do not join late."""
        all_sites = range(self._comm.world_size // self._site_size)
        return sorted({*self._sites(), *(site for site in all_sites if site not in self.patience.join_at)})

    def _together(
        self,
        work: Callable[[Communicator, list[float]], Any],
        number: int,
        awaited: list[int],
        weight: float = 1.0,
    ) -> Any:
        """Result of `work` among the sites that are present; None: done without this one."""
        about = (*self._waits, weight, number, awaited, self.patience.deadline)
        sites, result = self._meeting.among_present(work, *about)
        size = self._site_size
        self._present = [site * size + place for site in sites for place in range(size)]
        return result

    @property
    def _waits(self) -> tuple[float, float]:
        return self.patience.waiting_seconds, self.patience.averaging_seconds

    @property
    def peers(self) -> Communicator:
        """Connects the ranks that step together, in an exchange of gradients those of the attempt."""
        return super().peers if self._steps is None or self._steps.peers is None else self._steps.peers

    def take_place(self, step: int) -> bool:
        """Join, if this rank has not yet; False: the others have done the step while it was away."""
        self.join()
        return step >= self.number * self.steps_a_round

    def listen(self, last_micro_batch: bool) -> None:
        """Prepare for the backward pass of a step that is a round: ranks meet where gradients leave during it."""

        def meet() -> JointWork:
            weight = float(self.strategy.context.samples or 1)
            about = (*self._waits, weight, self.number, self._present, self.patience.deadline)
            return self._comm.meet(*about)

        assert self._steps is not None
        self._steps.listen(last_micro_batch, meet)

    def exchange(self, work: Callable[[], None]) -> bool:
        """Exchange gradients of a step among ranks that arrive in time; False: this one did not, and has caught up."""

        def among(attempt: Callable[[Communicator, list[float]], Any], early: JointWork | None) -> Any:
            if early is None:
                weight = float(self.strategy.context.samples or 1)
                return self._together(attempt, self.number, self._present, weight)
            result = early.run(attempt)
            self._present = early.members
            return result

        assert self._steps is not None
        if self._steps.exchange(among, work):
            return True
        self._catch_up(self.number + 1, self.number + 1)
        return False

    def end_step(self) -> None:
        """Count a step that is a round, and publish what it led to while ranks are absent."""
        self.number += 1
        self._note_round()
        if len(self._present) < self._comm.world_size:
            self._publish()

    def begin(self) -> None:
        """Catch up where members change: the others may be ahead by many rounds."""
        if self._comm.members_change:
            self.join()

    def join(self) -> None:
        """Join, late where `join_at` says so, with the newest state of the others; called before the first step."""
        if self._has_begun:
            return
        self._has_begun = True
        late = self.patience.join_at
        site = self._comm.rank // self._site_size
        if site in late:
            self._meeting.arrive_at(late[site])
        if self._comm.members_change:
            self._begin_together()
        elif site in late:
            self._catch_up(0, 0)
        elif late:
            self._publish()

    def _begin_together(self) -> None:
        """Share the newest state among real ranks, some of them restarted, or fetch it from running ones."""

        def share(peers: Communicator, weights: list[float]) -> Any:
            source = weights.index(max(weights))
            mine = (self.number, self._mine()) if peers.rank == source else None
            return peers.broadcast_object(mine, src=source)

        state = self._together(share, BEFORE_ROUNDS, self._all_at_begin(), weight=1.0 + self.number)
        if state is None:
            self._catch_up(self.number, self.number)
            return
        number, tensors = state
        if number != self.number:
            self._news = {"missed_round": self.number, "back_in_round": number + 1}
        if number != self.number or number == 0:
            self.number = number
            self._take_over(tensors)
        self._publish()

    def mean_of(self, outer: SharedModel) -> list[Tensor] | None:
        """Mean of what the ranks send that arrive in time; None: this one did not, and has caught up with them."""

        strategy = self.strategy
        own = float(strategy.round_weights.get(self._comm.rank, 1))

        def average(peers: Communicator, weights: list[float]) -> tuple[list[Tensor], list[Tensor | None]]:
            residuals = [None if residual is None else residual.clone() for residual in outer.residuals]
            share = own * len(weights) / sum(weights)
            return outer.averaged(strategy.site, peers, residuals, weight=share), residuals

        result = self._together(average, self.number, self._sites(), own)
        if result is None:
            self._catch_up(self.number + 1, self.number + 1)
            return None
        gradients: list[Tensor] = result[0]
        outer.residuals = result[1]
        outer.spread(self.strategy.site, gradients)
        return gradients

    def publish(self, outer: SharedModel) -> None:
        """Publish the state after a round, for ranks that come later."""
        self.number += 1
        self._note_round()
        self._publish()

    def _note_round(self) -> None:
        # Beside the news of a rank that has joined in front of the step.
        self._news |= {"averaged_ranks": self.present, "num_alive": self._comm.state.num_alive}

    def _mine(self) -> list[Tensor]:
        """State published by this rank: empty if another rank of its site publishes the same."""
        if self._steps is not None:
            return self._steps.packed()
        packed: list[Tensor] = self.strategy.outer.packed() if self.strategy.site.is_first else []
        return packed

    def _publish(self) -> None:
        self._states.publish(self.number, self._mine())

    def _take_over(self, state: list[Tensor]) -> None:
        if self._steps is not None:
            self._steps.unpack(state)
            return
        self.strategy.outer.unpack(self.strategy.site.shared(state))
        self.strategy.site.gather()

    def _catch_up(self, missed: int, at_least: int) -> None:
        fetched = self._states.fetch(at_least, is_open=self._steps is not None)
        if fetched is None:
            self.number = LOST
        else:
            self.number, tensors = fetched
            self._take_over(tensors)
        missed = min(missed, self._news.get("missed_round", missed))  # late again for its first round
        self._news = {"missed_round": missed, "back_in_round": None if fetched is None else self.number + 1}

    def round_place(self, step: int) -> RoundPlace:
        """Place of a step among the rounds, with the news since the last call: its members, or this rank's return."""
        news, self._news = self._news, {}
        return RoundPlace(-(-step // self.steps_a_round), **news)

    def announced(self, step: int) -> RoundPlace | None:
        """Place of a step that ends a round, where members change."""
        if not self._comm.members_change or (step + 1) % self.steps_a_round:
            return None
        return RoundPlace((step + 1) // self.steps_a_round)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state`; where members change, those present are asked for again."""
        super().load_state_dict(state)
        if self._comm.members_change:  # other ranks may be present now
            self._has_begun = False
