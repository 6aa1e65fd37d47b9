"""Rounds in which a rank that was away trains on at once, and takes part in the next one that is formed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from exogym_core.strategy.participation.absence import Absence
from exogym_core.strategy.participation.site import LOST
from exogym_core.strategy.parts.outer import OuterStep
from exogym_core.strategy.parts.state import State
from netsim.errors import InputError
from netsim.units import format_seconds

if TYPE_CHECKING:
    from exogym_core.communicator.base import Communicator, NextMeeting
    from exogym_core.strategy.base import Strategy
    from exogym_core.strategy.participation.options import Patience
    from exogym_core.strategy.parts.outer import SharedModel

__all__ = ["Rejoining"]


class Rejoining(Absence):
    """Membership of rounds as in torchft's DiLoCo, with synchronous quorums: whoever comes is in the next one.

    At the end of its `H` steps a rank joins the next meeting (see `Communicator.among_next`). Ranks that answer do not
    wait for one that is away, and a rank that is alone commits alone. A rank with fewer rounds behind it than others of
    the meeting is healed there, before the mean: it downloads the state of the first rank with most, which is the
    global parameters, the outer optimizer's state, and that rank's own parameters after its local steps. So it gives
    the mean a second copy of that rank's pseudo-gradient in place of its own, has the same parameters and outer state
    as all others after the outer step, and continues with their step. Its inner optimizer's state stays its own.

    A crash ends a rank's process: the steps since its last round are computed again when its host is back. A pause or
    a cut loses nothing; a rank that is left out of an average that was cut off takes its steps to the next meeting.

    Args:
        strategy: whose rounds these are, of `strategy.round_steps` steps each.
        patience: waiting times.
    """

    state = State(is_newest="_is_newest")

    def __init__(self, strategy: Strategy, patience: Patience) -> None:
        comm = strategy.comm
        patience.check(strategy.where, comm, 1)
        if comm.members_change or strategy.site.between.world_size != comm.world_size:
            raise InputError(
                f"{strategy.where}: rejoin='at_once' goes with simulated workers of one rank each; leave it out"
            )
        super().__init__(strategy, patience)
        self._is_newest = comm.rank in self._present

    @property
    def present(self) -> list[int]:
        """Ranks of the last round; without this one while others have done its steps."""
        is_behind = not self._is_newest or self.strategy.local_step < self.number * self.steps_a_round
        return (
            [rank for rank in self._present if rank != self._comm.rank] if is_behind else list(self._present)
        )

    def join(self) -> None:
        """Begin, late where `join_at` says so, with the parameters of the start; called before the first step."""
        if self._has_begun:
            return
        self._has_begun = True
        if self._comm.rank in self.patience.join_at:
            self._comm.arrive_at(self.patience.join_at[self._comm.rank])
        self._comm.keep_state()

    def can_save(self, step: int) -> bool:
        """False for steps that the others did before they healed this rank: it has a later state from then on."""
        return step >= self.number * self.steps_a_round

    def mean_of(self, outer: SharedModel) -> list[Tensor] | None:
        """Mean displacement over the next meeting, which heals this rank if it is behind; None: all have ended."""
        assert isinstance(outer, OuterStep)
        published = set[int]()

        def average(peers: Communicator, meeting: NextMeeting) -> tuple[Any, list[Tensor] | None]:
            gradients, state = outer.values(peers), None
            if len(meeting.sources) < peers.world_size:
                if peers.rank not in meeting.sources:
                    fetched = self._comm.fetch(meeting.number)
                    if fetched is not None:
                        state = fetched[1]
                        theirs = zip(state[1:], state[-len(outer.flats) :], strict=False)
                        gradients = [torch.sub(flat, own) for flat, own in theirs]
                elif (
                    peers.rank == meeting.sources[0] and meeting.number not in published
                ):  # in an attempt before
                    published.add(meeting.number)
                    replica = [torch.sub(*each) for each in zip(outer.flats, gradients, strict=True)]
                    self._comm.publish(meeting.number, [*outer.packed(), *replica])
            return outer.averaged(self.strategy.site, peers, gradients), state

        while True:
            waits = self.patience.waiting_seconds, self.patience.averaging_seconds
            about = (*waits, 1.0 + self.number, self.patience.deadline)
            meeting, averaged = self._comm.among_next(average, *about)
            if meeting is None:
                self._news = {"missed_round": self.number + 1, "back_in_round": None}
                self.number = LOST
                return None
            if averaged is not None:
                break
        seconds, limit = meeting.since_last, self.patience.waiting_seconds
        if not self.remarks and len(meeting.ranks) == self._comm.world_size and limit < seconds:
            self.remarks = (
                f"{self.strategy.where}: rejoin='at_once' with a time-out of {format_seconds(limit)}, shorter than a "
                f"round of {format_seconds(seconds)}: a rank that has come back out of step waits longer than that, "
                "so each meeting closes without another one and all may never meet again; make "
                "timeout_waiting_for_peers (matchmaking_time under no_wait) longer than a round",
            )
        behind = [rank for place, rank in enumerate(meeting.ranks) if place not in meeting.sources]
        (means, residuals), state = averaged
        if state is not None:  # of the rank that healed this one
            outer.unpack(state)
        rounds = int(max(meeting.weights)) - 1
        if self._comm.rank in behind:
            self._news = {"missed_round": self.number + 1, "back_in_round": rounds + 2}
        elif meeting.is_newest:
            num_alive = self._comm.state.num_alive
            self._news = {"averaged_ranks": meeting.ranks, "healed_ranks": behind, "num_alive": num_alive}
        self._present, self._is_newest, self.number = meeting.ranks, meeting.is_newest, rounds
        outer.residuals = residuals
        gradients: list[Tensor] = means
        return gradients

    def publish(self, outer: SharedModel) -> None:
        """Count the round, and keep the state to which it has led."""
        self.number += 1
        self._comm.keep_state()
