"""How long a round waits for whom."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from exogym_core.strategy.options.arguments import Options, number, option
from netsim.files.errors import InputError, unknown_name
from netsim.files.units import parse_seconds

if TYPE_CHECKING:
    from exogym_core.communicator.base import Communicator

__all__ = ["Patience", "PatienceOptions", "Seconds"]

Seconds = float | str
"""A number of seconds, or text with a unit such as "10 min"."""

_STRATEGIES = ("wait_for_all", "no_wait")

# OpenDiLoCo's and hivemind's.
_WAITING, _MATCHMAKING, _AVERAGING = 600.0, 15.0, 60.0


@dataclass(frozen=True)
class Patience:
    """What a rank that is late or cut off costs the others.

    Attributes:
        waiting_seconds: how long the first at the end of a round waits for others.
        averaging_seconds: how long averaging may take before those who do not answer are left out.
        join_at: when ranks come that are not there from the start: rank -> virtual seconds.
    """

    waiting_seconds: float
    averaging_seconds: float
    join_at: Mapping[int, float] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        where: str,
        averaging_timeout: Seconds | None = None,
        all_reduce_strategy: str | None = None,
        timeout_waiting_for_peers: Seconds | None = None,
        matchmaking_time: Seconds | None = None,
        join_at: Mapping[int, Seconds] | None = None,
    ) -> Patience | None:
        """From a strategy's arguments; None where all ranks are waited for as long as it takes.

        Raises:
            UnknownNameError: no such `all_reduce_strategy`.
            InputError: a time without meaning, or one that goes with the other strategy.
        """
        name = str(all_reduce_strategy or "wait_for_all").rsplit(".", maxsplit=1)[-1].lower()
        if name not in _STRATEGIES:
            raise unknown_name("all_reduce_strategy", str(all_reduce_strategy), _STRATEGIES)
        waits = name == "wait_for_all"
        if not waits and timeout_waiting_for_peers is not None:
            raise InputError(
                f"{where}: timeout_waiting_for_peers goes with all_reduce_strategy='wait_for_all'; "
                "use matchmaking_time"
            )
        if waits and averaging_timeout is None and timeout_waiting_for_peers is None and not join_at:
            return None
        waiting = (
            ("timeout_waiting_for_peers", timeout_waiting_for_peers, _WAITING)
            if waits
            else ("matchmaking_time", matchmaking_time, _MATCHMAKING)
        )
        averaging = _seconds(where, "averaging_timeout", averaging_timeout, _AVERAGING)
        extra = _seconds(where, "matchmaking_time", matchmaking_time, 0.0) if waits else 0.0
        if not averaging:
            raise InputError(f"{where}: averaging_timeout={averaging_timeout!r} must be above 0")
        return cls(_seconds(where, *waiting) + extra, averaging, _join_times(where, join_at))

    def check(self, where: str, comm: Communicator, ranks_per_worker: int) -> None:
        """Refuse what time-outs do not go together with."""
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
        late = [site for site in self.join_at if not 0 <= site < num_sites]
        if late or len(self.join_at) == num_sites:
            what = "ranks" if ranks_per_worker == 1 else "sites"
            raise InputError(
                f"{where}: join_at={dict(self.join_at)} must name some of the {what} 0 to {num_sites - 1}, "
                "and leave one that is there from the start"
            )


@dataclass(frozen=True)
class PatienceOptions(Options):
    """Whom a round does without, and when; by default nobody. Times are virtual, in seconds or as "60 s".

    Who downloads the state of a round is waited for besides, and for its steps as much longer as it got it later.

    Args:
        averaging_timeout: how long averaging may take; then those who cannot be reached are left out, or where all
            can, those with the narrowest connection, and the others begin again. 60 s where another time-out is
            given, else there is none.
        all_reduce_strategy: "wait_for_all" waits for ranks that still compute, "no_wait" goes on without them.
        timeout_waiting_for_peers: how long "wait_for_all" does so after the first is there; 600 s where another
            time-out is given, else for ever.
        matchmaking_time: how long "no_wait" gives others to come all the same; 15 s if None. "wait_for_all" gives
            them so much longer.
        join_at: ranks that come late, and when: {3: "10 min"}; with `ranks_per_worker` the numbers of sites.
    """

    averaging_timeout: Seconds | None = option(None)
    all_reduce_strategy: str | None = option(None)
    timeout_waiting_for_peers: Seconds | None = option(None)
    matchmaking_time: Seconds | None = option(None)
    join_at: Mapping[int, Seconds] | None = option(None)

    def check(self, where: str) -> None:
        """Refuse times without meaning."""
        super().check(where)
        self.patience(where)

    def patience(self, where: str) -> Patience | None:
        """How long a round waits for whom; None: for all, as long as it takes."""
        return Patience.of(
            where,
            self.averaging_timeout,
            self.all_reduce_strategy,
            self.timeout_waiting_for_peers,
            self.matchmaking_time,
            self.join_at,
        )


def _seconds(where: str, name: str, value: Seconds | None, default: float) -> float:
    if isinstance(value, str):
        try:
            return parse_seconds(value)
        except InputError as error:
            raise InputError(f"{where}: {name}: {error}") from None
    return default if value is None else number(where, name, value)


def _join_times(where: str, join_at: Mapping[int, Seconds] | None) -> dict[int, float]:
    if join_at is None:
        return {}
    if not isinstance(join_at, Mapping) or not all(str(rank).isdecimal() for rank in join_at):
        raise InputError(f"{where}: join_at={join_at!r} must be a mapping such as {{3: '10 min'}}")
    return {int(rank): _seconds(where, f"join_at[{rank}]", value, 0.0) for rank, value in join_at.items()}
