"""Rounds among clients that are drawn anew for each, and rounds of as many steps as each worker's speed allows."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from exogym_core.events import RoundPlace
from exogym_core.strategy.participation.site import LOST, Everyone
from exogym_core.strategy.parts.generators import shared_generator
from exogym_core.strategy.parts.state import State

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from exogym_core.strategy.base import Strategy
    from exogym_core.strategy.parts.outer import SharedModel

__all__ = ["Sampling", "balanced_steps", "draw_clients"]


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

    def mean_of(self, outer: SharedModel) -> list[Tensor] | None:
        """Mean of what the clients of this client's round send."""
        members, strategy = self.members(self._round), self.strategy
        return outer.mean_over(strategy.site.among(members, self._round), strategy.round_weight(members))

    def publish(self, outer: SharedModel) -> None:
        """Count the round, and note its clients for the row of its last step."""
        self.number += 1
        self._news = {"averaged_ranks": list(self.members(self._round))}

    def round_place(self, step: int) -> RoundPlace:
        """Place of a step among the rounds, with the members of a round in the row of its last step."""
        news, self._news = self._news, {}
        return RoundPlace(self._round + 1, **news, are_drawn=True)
