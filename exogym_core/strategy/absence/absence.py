"""Rounds with those who come in time, and the way back for those who do not."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from exogym_core.plain import decode, encode
from exogym_core.strategy.sites.site import Site

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from exogym_core.communicator.base import Communicator
    from exogym_core.strategy.absence.patience import Patience
    from exogym_core.strategy.parts.outer import OuterStep

__all__ = ["LOST", "Absence"]

#: The round of a rank that nobody can be reached from any more: there is nothing left for it to do.
LOST = 1 << 62

#: The number of the meeting at which real ranks begin, for the first time or after a stop.
BEFORE_ROUNDS = -1


class Absence:
    """Who takes part in rounds, where these go on without ranks that are late or cut off.

    Who takes part in a round publishes what it led to. Who is late or cut off loses its own steps of that round,
    downloads the newest state that the others have published, and takes part again in the round after that.

    Before `connect` it is only what users say, and can be copied.

    Args:
        patience: how long ranks wait for each other.
        steps_a_round: local steps.

    Attributes:
        number: the rounds that this rank's parameters have behind them, its own or others'.
        present: the ranks of the last round, whose models are looked at together; those who are there from the
            start before the first.

    Sites of several ranks are there or away as a whole: all their ranks make the same calls, and each does what is
    done between sites for its own part.
    """

    def __init__(self, patience: Patience, steps_a_round: int) -> None:
        self.patience, self.steps_a_round = patience, steps_a_round
        self.number = 0
        self.present: list[int] = []
        self._has_begun = False
        self._news: dict[str, Any] = {}

    def connect(self, comm: Communicator, ranks_per_site: int, where: str) -> None:
        """Meet over `comm`.

        Raises InputError, beginning with `where`, where time-outs do not go with the rest.
        """
        self.patience.check(where, comm, ranks_per_site)
        self._comm, self._site_size, self._site = comm, ranks_per_site, Site(None, comm)
        late = self.patience.join_at
        self.present = [rank for rank in range(comm.world_size) if rank // ranks_per_site not in late]

    def follow(
        self, outer: OuterStep, site: Site | None = None, whole: Callable[[], None] = lambda: None
    ) -> None:
        """Rounds are those of `outer`, by way of `site`; `whole` is called when parameters have been set."""
        self._outer, self._whole = outer, whole
        self._site = self._site if site is None else site

    @property
    def _meeting(self) -> Communicator:
        """Connects this rank to its like in other sites."""
        return self._site.between

    def _sites(self) -> list[int]:
        return sorted({rank // self._site_size for rank in self.present})

    def _all_at_begin(self) -> list[int]:
        """Those who were there last, when it goes on from a checkpoint, and all but who joins late."""
        all_sites = range(self._comm.world_size // self._site_size)
        return sorted({*self._sites(), *(site for site in all_sites if site not in self.patience.join_at)})

    def _are_present(self, sites: Sequence[int]) -> None:
        size = self._site_size
        self.present = [site * size + place for site in sites for place in range(size)]

    def is_ahead(self, step: int) -> bool:
        """Whether the others have done the step after `step` steps while this rank was away."""
        self.begin()
        return step < self.number * self.steps_a_round

    def begin(self) -> None:
        """Called before the first step: who joins late does so, and gets what the others have by then."""
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
        """Real ranks may have died and come again: all get the newest state, of each other or of who runs already."""

        def share(peers: Communicator, weights: list[float]) -> Any:
            source = weights.index(max(weights))
            mine = (self.number, self._mine()) if peers.rank == source else None
            return peers.broadcast_object(mine, src=source)

        present, state = self._meeting.among_present(
            share,
            self.patience.waiting_seconds,
            self.patience.averaging_seconds,
            weight=1.0 + self.number,
            number=BEFORE_ROUNDS,
            awaited=self._all_at_begin(),
        )
        self._are_present(present)
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

    def round(self) -> None:
        """End a round: take the outer step with those who come in time, or catch up with them."""
        outer = self._outer

        def average(peers: Communicator, weights: list[float]) -> tuple[list[Tensor], list[Tensor | None]]:
            residuals = [None if residual is None else residual.clone() for residual in outer.residuals]
            return outer.averaged(self._site, peers, residuals), residuals

        present, result = self._meeting.among_present(
            average,
            self.patience.waiting_seconds,
            self.patience.averaging_seconds,
            number=self.number,
            awaited=self._sites(),
        )
        self._are_present(present)
        if result is None:
            self._catch_up(self.number + 1, self.number + 1)
            return
        gradients, outer.residuals = result
        outer.spread(self._site, gradients)
        outer.apply(gradients)
        outer.reset_parameters()
        self.number += 1
        self._news = {"averaged_ranks": list(self.present)}
        self._publish()

    def _mine(self) -> list[Tensor]:
        """What this rank tells of its state: nothing where another rank of its site tells the same."""
        return _packed(self._outer) if self._site.is_first else []

    def _publish(self) -> None:
        self._meeting.publish(self.number, self._mine())

    def _take_over(self, state: list[Tensor]) -> None:
        _unpack(self._outer, self._site.shared(state))
        self._whole()

    def _catch_up(self, missed: int, at_least: int) -> None:
        fetched = self._meeting.fetch(at_least)
        if fetched is None:
            self.number = LOST
        else:
            self.number, tensors = fetched
            self._take_over(tensors)
        self._news = {"missed_round": missed, "back_in_round": None if fetched is None else self.number + 1}

    def row(self, step: int) -> dict[str, Any]:
        """What the row of a step tells of its round: which it is, and at its end how it went."""
        news, self._news = self._news, {}
        return {**self.place(step), **news}

    def place(self, step: int) -> dict[str, int]:
        """The round in which a step is."""
        return {"round": -(-step // self.steps_a_round)}

    def ends_round(self, step: int) -> bool:
        """Whether the step after `step` steps is the last one of a round."""
        return (step + 1) % self.steps_a_round == 0

    def state_dict(self) -> dict[str, Any]:
        """Where this rank is."""
        return {
            "number": self.number,
            "present": list(self.present),
            "has_begun": self._has_begun,
            "news": dict(self._news),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.number, self.present = state["number"], list(state["present"])
        self._has_begun, self._news = state["has_begun"], dict(state["news"])
        if self._comm.members_change:  # those who are there now need not be those of then
            self._has_begun = False


def _packed(outer: OuterStep) -> list[Tensor]:
    """All that a rank needs to go on from: the global parameters and the outer optimizer's state."""
    tensors: dict[str, Tensor] = {}
    plain = json.dumps(encode(outer.optim.state_dict(), tensors), separators=(",", ":"))
    form = torch.frombuffer(bytearray(plain.encode()), dtype=torch.uint8)
    return [form, *outer.flats, *tensors.values()]


@torch.no_grad()
def _unpack(outer: OuterStep, packed: Sequence[Tensor]) -> None:
    form, *tensors = packed
    states = {str(number): tensor for number, tensor in enumerate(tensors[len(outer.flats) :])}
    for flat, theirs in zip(outer.flats, tensors, strict=False):
        flat.copy_(theirs)
    outer.optim.load_state_dict(decode(json.loads(bytes(form.tolist())), states))
    outer.reset_parameters()
