"""Rounds among clients that are drawn anew for each, and rounds of as many steps as each worker's speed allows."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from exogym_core.events import RoundPlace
from exogym_core.strategy.options import Options, flag, fraction, option, positive_int
from exogym_core.strategy.participation.site import LOST, Everyone
from exogym_core.strategy.parts.generators import shared_generator
from exogym_core.strategy.parts.state import State
from netsim.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from exogym_core.strategy.base import Strategy
    from exogym_core.strategy.participation.site import Site
    from exogym_core.strategy.parts.outer import SharedModel

__all__ = ["ClientOptions", "Sampling", "balanced_steps", "draw_clients"]


@lru_cache(maxsize=64)
def draw_clients(seed: int, number: int, num_clients: int, num_drawn: int) -> tuple[int, ...]:
    """Draw the clients of a 0-based round uniformly without replacement; returns them in ascending order.

    >>> draw_clients(0, 0, 4, 4)
    (0, 1, 2, 3)
    """
    if num_drawn == num_clients:
        return tuple(range(num_clients))
    order = torch.randperm(num_clients, generator=shared_generator(seed, "clients", number))
    return tuple(sorted(order[:num_drawn].tolist()))


def balanced_steps(step_seconds: Sequence[float], num_steps: int) -> list[int]:
    """Steps of each worker in the time in which the fastest takes `num_steps`, to the nearest one and one at least.

    Args:
        step_seconds: mean seconds of a step of each worker; where one takes no time, all take `num_steps`.
        num_steps: of the fastest worker.

    >>> balanced_steps([0.1, 0.2, 0.3, 9.0], 10)
    [10, 5, 3, 1]
    """
    fastest = min(step_seconds, default=0.0)
    shares = [fastest / seconds if fastest else 1.0 for seconds in step_seconds]
    return [max(1, round(num_steps * share)) for share in shares]


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
                f"{where}: weigh_by={self.weigh_by!r} must be one of 'worker', 'samples', 'steps'"
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
                "leave it out"
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
                f"{where}: clients_per_round={num_drawn}, but there are {num_clients} workers; draw at most as many"
            )
        made = Sampling(strategy, num_drawn)
        is_plain = num_drawn == num_clients and len(set(made.num_steps.values())) == 1
        return None if is_plain else made


class Sampling(Everyone):
    """Membership of rounds among clients that are drawn for each (algorithm 1 of FedAvg: the random set S_t).

    A round is `strategy.round_steps` local steps of its clients and the exchange among them. A client that is not drawn
    for the next round publishes the global model and drops its replica, `strategy.outer` and its optimizer's state; a
    client that is drawn again downloads the model from one of those that left at the end of the round before, one from
    each. These bytes and their time are charged; the model of the first round is the initial one, which all know.
    Buffers of the model, and parameters that are not trained, stay with each client. A client that is drawn for two
    rounds in a row keeps its optimizer's state, and rounding errors of its codec.

    With `balance` a slower client takes only the last steps of a round, and begins them as soon as it has the model.

    Args:
        strategy: whose rounds these are.
        num_drawn: number of clients of a round.

    Attributes:
        number: rounds behind this client's model.
    """

    state = State("number", "is_out", round="_round")
    has_absences = True
    number: int

    def __init__(self, strategy: Strategy, num_drawn: int) -> None:
        super().__init__(strategy)
        self._num_drawn, self._length = num_drawn, strategy.round_steps or 1
        self.number, self._round = 0, 0
        self.is_out = False
        self._news: dict[str, Any] = {}
        self._seconds = strategy.shared_state.run.step_seconds if strategy.clients.balance else ()

    @property
    def num_steps(self) -> Mapping[int, int]:
        """Steps of each client of this client's round."""
        return self._steps_in(self._round)

    def _steps_in(self, number: int) -> Mapping[int, int]:
        members = self.members(number)
        if not self._seconds:
            return dict.fromkeys(members, self._length)
        seconds = [self._seconds[rank] for rank in members]
        return dict(zip(members, balanced_steps(seconds, self._length), strict=True))

    def members(self, number: int) -> Sequence[int]:
        """Clients of the 0-based round."""
        return draw_clients(self.strategy.seed, number, self._comm.world_size, self._num_drawn)

    @property
    def present(self) -> Sequence[int]:
        """Clients of this client's round; none while it sits out."""
        drawn = self.members(self._round)
        return () if self.is_out or self._comm.rank not in drawn else drawn

    @property
    def site(self) -> Site:
        """Connections to the clients of this client's round."""
        return self.strategy.site.among(self.members(self._round), self._round)

    def sits_out(self, step: int) -> int:
        """Steps from `step` on in which this client takes no part."""
        if self.number == LOST:
            return LOST
        number, place = divmod(step, self._length)
        if self._comm.rank not in self.members(number):
            return self._length - place
        if not self._seconds:
            return 0
        return max(self._length - self._steps_in(number)[self._comm.rank] - place, 0)

    def take_place(self, step: int) -> bool:
        """Take this client's place in the round of `step`: drop the model where it is not drawn, download it if out."""
        number = step // self._length
        if self.number == LOST:
            return False
        if self._comm.rank not in self.members(number):
            if not self.is_out:
                if self.number == number > 0:  # not before, as the run may have ended with the round
                    self._comm.publish(number, self.strategy.outer.packed())
                self.leave()
            return False
        self._round = number
        if self.is_out:
            self._download(number)
        return not self.sits_out(step)

    def leave(self) -> None:
        """Drop the replica, the global model and the optimizer's state."""
        self.is_out = True
        strategy = self.strategy
        strategy.outer = None
        strategy.optim.state.clear()
        for parameter in strategy.trainable:
            parameter.grad = None
            # One value for all: it takes no memory, and an update by mistake raises an error.
            parameter.data = parameter.new_full((), float("nan")).expand(parameter.shape)

    def _download(self, number: int) -> None:
        """Take over the global model from the client that hands it to this one."""
        before, now = self.members(number - 1), self.members(number)
        leaving = [rank for rank in before if rank not in now]
        coming = [rank for rank in now if rank not in before]
        fetched = self._comm.fetch(number, leaving[coming.index(self._comm.rank)])
        if fetched is None:  # the run has ended
            self.number = LOST
            return
        strategy = self.strategy
        for parameter in strategy.trainable:
            parameter.data = torch.empty_like(parameter, memory_format=torch.contiguous_format)
        strategy.prepare()
        strategy.outer.unpack(fetched[1])
        strategy.num_rounds = self.number = number
        self.is_out = False

    def publish(self, outer: SharedModel) -> None:
        """Count the round, and note its clients for the row of its last step."""
        self.number += 1
        self._news = {"averaged_ranks": list(self.members(self._round))}

    def round_place(self, step: int) -> RoundPlace:
        """Place of a step among the rounds, with the members of a round in the row of its last step."""
        news, self._news = self._news, {}
        return RoundPlace(self._round + 1, **news, are_drawn=True)
