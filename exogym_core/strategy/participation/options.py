"""Options of who takes part in rounds: waiting for ranks that are late or cut off, and clients drawn for each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from exogym_core.communicator.base import FIXED, Deadline
from exogym_core.strategy.options import Options, flag, fraction, number, one_of, option, positive_int, share
from exogym_core.strategy.participation.absence import Absence, Rejoining, StepAbsence
from exogym_core.strategy.participation.sampling import Sampling
from exogym_core.strategy.participation.site import Everyone
from netsim.errors import InputError, about_option, locate_errors, unknown_name
from netsim.units import parse_seconds

if TYPE_CHECKING:
    from exogym_core.communicator.base import Communicator
    from exogym_core.strategy.base import Strategy

__all__ = [
    "ClientOptions",
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
                f"{here} process{'es' if here > 1 else ''}: make them equal",
                about=("ranks_per_worker",),
            )
        if ranks_per_worker > 1 and not comm.members_change:
            raise InputError(
                f"{where}: time-outs for absent ranks go with ranks_per_worker=1 in simulation; leave one of both out",
                about=("ranks_per_worker",),
            )
        num_sites = comm.world_size // ranks_per_worker
        what = "ranks" if ranks_per_worker == 1 else "sites"
        if self.deadline.quorum > num_sites:
            raise InputError(
                f"{where}: min_ranks={self.deadline.quorum}, but there are {num_sites} {what}: no round could begin; "
                f"give {num_sites} at most",
                about=("min_ranks",),
            )
        late = [site for site in self.join_at if not 0 <= site < num_sites]
        if late or len(self.join_at) == num_sites:
            raise InputError(
                f"{where}: join_at={dict(self.join_at)} must name some of the {what} 0 to {num_sites - 1}, "
                "and leave one that is there from the start",
                about=("join_at",),
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
            with about_option("all_reduce_strategy"):
                raise unknown_name("all_reduce_strategy", str(given), _STRATEGIES)
        waits = name == "wait_for_all"
        if not waits and timeout is not None:
            raise InputError(
                f"{where}: timeout_waiting_for_peers goes with all_reduce_strategy='wait_for_all'; "
                "use matchmaking_time",
                about=("all_reduce_strategy",),
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
        return (StepAbsence if self.of_steps else Absence)(strategy, patience)


class RoundPatienceOptions(PatienceOptions):
    """Options of rounds of an outer step.

    Args:
        rejoin: "next_round": a rank that returns downloads the newest state, and begins with the others' next round.
            "at_once": it trains on at once as torchft's do, is healed where it meets the others, and commits alone
            where it is alone; see `exogym_core.strategy.participation.absence:Rejoining`. By default next_round.
    """

    rejoin: str = option("next_round", one_of(*_REJOIN))  # type: ignore[misc]


class StepPatienceOptions(PatienceOptions):
    """Options of steps that exchange gradients: each is a round, see `StepAbsence`."""

    of_steps = True


class ClientOptions(Options):
    """Options of the workers of a round: how many take part, for how many steps, and what each counts in the mean.

    Args:
        clients_per_round: number of workers that take part in a round, drawn anew for each by the run's seed; the
            number of all workers gives the run without this option.
        fraction: instead, their share of all workers: `max(1, round(fraction * workers))` are drawn.
        balance: `H` is the number of steps of the round's fastest worker, and each other one takes as many as its
            speed allows in the same time (`balanced_steps`), so that all arrive together.
        weigh_by: weights of the mean: "worker", the same for each; "samples", the samples of the worker's own data set
            (n_k of FedAvg), or those of its steps with `batch_by_speed`; "steps", its steps of the round. By default
            steps with `balance`, samples with `batch_by_speed`, else as the strategy's paper has it: samples in FedAvg,
            worker in DiLoCo. With aggregate="median" or "trimmed-mean" all count once.
    """

    clients_per_round: int | None = option(None, positive_int)
    fraction: float | None = option(None, fraction)
    balance: bool = option(default=False, check=flag)
    weigh_by: str | None = option(None)

    def check(self, where: str) -> None:
        """Refuse options that contradict each other."""
        if self.clients_per_round is not None and self.fraction is not None:
            raise InputError(
                f"{where}: clients_per_round and fraction both say how many are drawn; give one of them"
            )
        if self.weigh_by not in (None, "worker", "samples", "steps"):
            raise InputError(
                f"{where}: weigh_by={self.weigh_by!r} must be one of 'worker', 'samples', 'steps'",
                about=("weigh_by",),
            )

    @property
    def are_drawn(self) -> bool:
        """True if workers are drawn for each round."""
        return self.clients_per_round is not None or self.fraction is not None

    def workers(self, strategy: Strategy) -> Everyone | None:
        """Membership of the rounds of a connected strategy; None: all workers take equal parts in all rounds.

        Raises:
            InputError: more clients are drawn than there are, or the strategy or the transport does not go with it.
        """
        where, comm = strategy.where, strategy.comm
        is_patient = strategy.patience.patience(where) is not None
        is_single = strategy.site.inside is None
        if self.weigh_by not in (None, "worker") and (is_patient or not is_single):
            raise InputError(
                f"{where}: weigh_by={self.weigh_by!r} goes neither with time-outs nor with ranks_per_worker; "
                "leave it out",
                about=("weigh_by",),
            )
        if not (self.are_drawn or self.balance):
            return None
        names = "balance" if self.balance else "clients_per_round and fraction"
        if strategy.shared_state.whole is not strategy:
            raise InputError(f"{where}: {names} do not go with a Chain; leave them out")
        if is_patient:
            raise InputError(
                f"{where}: {names} do not go with time-outs for absent ranks; leave one of both out"
            )
        if not is_single:
            raise InputError(f"{where}: {names} are for workers of one rank: leave ranks_per_worker out")
        if not comm.can_leave_behind or comm.members_change:
            raise InputError(f"{where}: {names} need transport='netsim', not {comm.transport!r}")
        num_clients = comm.world_size
        num_drawn = num_clients
        if self.are_drawn:
            num_drawn = self.clients_per_round or max(1, round((self.fraction or 0.0) * num_clients))
        if num_drawn > num_clients:
            raise InputError(
                f"{where}: clients_per_round={num_drawn}, but there are {num_clients} workers; draw at most as many",
                about=("clients_per_round",),
            )
        made = Sampling(strategy, num_drawn)
        is_plain = num_drawn == num_clients and len(set(made.num_steps.values())) == 1
        return None if is_plain else made
