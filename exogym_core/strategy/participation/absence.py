"""Rounds among the ranks that arrive in time, and how the others catch up, or train on at once and are healed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from exogym_core.events import RoundPlace
from exogym_core.strategy.participation.site import LOST, Everyone
from exogym_core.strategy.parts.flat import pack_plain, unpack_plain
from exogym_core.strategy.parts.outer import OuterStep
from exogym_core.strategy.parts.state import State
from netsim.errors import InputError
from netsim.units import format_seconds

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from exogym_core.communicator.base import Communicator, Deadline, JointWork, NextMeeting
    from exogym_core.strategy.base import Strategy
    from exogym_core.strategy.participation.options import Patience
    from exogym_core.strategy.parts.outer import SharedModel

__all__ = ["Absence", "Rejoining", "StepAbsence"]


_About: TypeAlias = tuple[float, float, float, int, list[int], "Deadline"]

Work = Callable[["Communicator", list[float]], Any]
"""An attempt among the ranks that a communicator connects, with their weights."""

#: Number of the meeting at which real ranks begin, the first time or after a stop.
BEFORE_ROUNDS = -1


class Absence(Everyone):
    """Membership of rounds that continue without ranks that are late or cut off.

    Ranks of a round publish the state that it led to, of `strategy.outer`. A rank that is late or cut off loses its
    steps of that round, downloads the newest state that the others have published, and takes part again in the round
    after that.

    Args:
        strategy: whose rounds these are, of `strategy.round_steps` steps each.
        patience: waiting times.

    Attributes:
        present: the ranks of the last round, whose models are evaluated together; before the first round, those that
            are there from the start.

    Sites of several ranks are present or absent as a whole: all their ranks make the same calls, each between sites
    for its own part.
    """

    state = State("number", present="_present", has_begun="_has_begun", news="_news")
    has_absences = True
    number: int

    def __init__(self, strategy: Strategy, patience: Patience) -> None:
        super().__init__(strategy)
        comm = strategy.comm
        self._site_size = comm.world_size // self._meeting.world_size
        patience.check(strategy.where, comm, self._site_size)
        self.patience, self.steps_a_round = patience, 1 if self.of_steps else strategy.round_steps or 1
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
        """Group of the ranks at this rank's position in every site."""
        return self.strategy.site.between

    def _sites(self) -> list[int]:
        return sorted({rank // self._site_size for rank in self._present})

    def _about(self, number: int, awaited: list[int], weight: float = 1.0) -> _About:
        """Waiting times, weight of this rank, number, awaited members and deadline of a meeting."""
        patience = self.patience
        times = patience.waiting_seconds, patience.averaging_seconds
        return (*times, weight, number, awaited, patience.deadline)

    def _together(self, work: Work, number: int, awaited: list[int], weight: float = 1.0) -> Any:
        """Result of `work` among the sites that are present; None: done without this one."""
        sites, result = self._meeting.among_present(work, *self._about(number, awaited, weight))
        size = self._site_size
        self._present = [site * size + place for site in sites for place in range(size)]
        return result

    def take_place(self, step: int) -> bool:
        """Join, if this rank has not yet; False: the others have done the step while it was away."""
        self.join()
        return step >= self.number * self.steps_a_round

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

        # Those present at a checkpoint, and all that do not join late.
        all_sites = {*range(self._comm.world_size // self._site_size)}
        awaited = sorted({*self._sites(), *(all_sites - self.patience.join_at.keys())})
        state = self._together(share, BEFORE_ROUNDS, awaited, weight=1.0 + self.number)
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
            return outer.averaged(strategy.site, peers, weight=own * len(weights) / sum(weights))

        result = self._together(average, self.number, self._sites(), own)
        if result is None:
            self._catch_up(self.number + 1, self.number + 1)
            return None
        means: list[Tensor]
        means, outer.residuals = result
        outer.spread(self.strategy.site, means)
        return means

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
        packed: list[Tensor] = self.strategy.outer.packed() if self.strategy.site.is_first else []
        return packed

    def _publish(self) -> None:
        self._states.publish(self.number, self._mine())

    def _take_over(self, state: list[Tensor]) -> None:
        self.strategy.outer.unpack(self.strategy.site.shared(state))
        self.strategy.site.gather()

    def _catch_up(self, missed: int, at_least: int) -> None:
        fetched = self._states.fetch(at_least, is_open=self.of_steps)
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


class StepAbsence(Absence):
    """Membership of steps whose gradients are exchanged by the ranks of a meeting, as in torchft's data-parallel.

    Ranks meet when the step's first bucket of gradients is ready, else after the backward pass, and exchange theirs,
    weighed by the samples of those present. If a member is lost meanwhile the others exchange theirs once more: what
    the first attempt has changed is taken back, on the lost one too.

    A rank that returns takes over parameters, buffers, the optimizer's state and what its strategy declares to be equal
    on all ranks (`Strategy.healed`); errors that it keeps for itself stay its own. With a schedule of rates the
    optimizer's settings stay its own too, as it advances the schedule by the steps that it skips.
    """

    of_steps = True

    def __init__(self, strategy: Strategy, patience: Patience) -> None:
        super().__init__(strategy, patience)
        self._peers: Communicator | None = None  # of the exchange under way
        self._early: JointWork | None = None  # of the step, since a bucket was ready in its backward pass

    @property
    def _meeting(self) -> Communicator:
        return self._comm

    @property
    def peers(self) -> Communicator:
        """Connects the ranks that step together, in an exchange of gradients those of the attempt."""
        return super().peers if self._peers is None else self._peers

    @property
    def _weight(self) -> float:
        return float(self.strategy.context.samples or 1)

    def listen(self, last_micro_batch: bool) -> None:
        """Prepare for a backward pass; during the last one of a step ranks meet when a bucket is ready."""
        strategy, gradients = self.strategy, self.strategy.site.gradients
        self._early = None
        if gradients is None or not last_micro_batch:
            return
        if strategy.comm.members_change or strategy.trainable[0].device.type not in ("cpu", "meta"):
            return  # a hook must not wait there: all buckets leave after the pass

        def meet_early() -> bool:
            gathering = self._early = self._comm.meet(*self._about(self.number, self._present, self._weight))
            if gathering.peers is not None:
                self._join_attempt(gathering.peers, gathering.weights)
            return gathering.peers is not None

        gradients.listen(True, before_first=meet_early)

    def exchange(self, work: Callable[[], None]) -> bool:
        """Exchange gradients of a step by `work` among ranks that arrive in time.

        False: others did so without this rank, which has caught up.
        """

        def among(attempt: Work) -> Any:
            if self._early is None:
                return self._together(attempt, self.number, self._present, self._weight)
            result = self._early.run(attempt)
            self._present = self._early.members
            return result

        return self.exchange_among(among, work)

    def exchange_among(self, among: Callable[[Work], Any], work: Callable[[], None]) -> bool:
        """Run `work` among the ranks of this step; False: the others have gone on without this one.

        Args:
            among: runs an attempt among the ranks that arrive in time; None: without this one.
            work: exchanges gradients over `peers`; runs again without members that are lost meanwhile.
        """
        strategy, gradients, before = self.strategy, self.strategy.site.gradients, self.strategy.context
        if before.scaler is not None:
            raise InputError(
                f"{strategy.where}: time-outs for absent ranks do not go with autocast: fp16, whose scaler unscales "
                "gradients once; use bf16, or leave the time-outs out"
            )
        kept = [None if p.grad is None else p.grad.detach().clone() for p in strategy.trainable]
        state = [each.state_of(each.own_state) for each in strategy.acting]
        owed = strategy.site.state_dict()
        num_attempts = 0

        def restore() -> None:
            for each, saved in zip(strategy.acting, state, strict=True):
                each.load_state_of(saved)
            strategy.site.load_state_dict(owed)

        def attempt(peers: Communicator, weights: Sequence[float]) -> bool:
            nonlocal num_attempts
            if num_attempts:
                for parameter, gradient in zip(strategy.trainable, kept, strict=True):
                    parameter.grad = None if gradient is None else gradient.clone()
                restore()
                if gradients is not None:
                    gradients.forget()
            if num_attempts or self._early is None:
                strategy.shared_state.context = before
                self._join_attempt(peers, weights)
            num_attempts += 1
            work()
            return True

        is_in = among(attempt)
        if num_attempts and not is_in:
            restore()
        if gradients is not None:
            gradients.forget()
            gradients.join(strategy.comm)
        self._peers, self._early, strategy.shared_state.context = None, None, before
        if not is_in:
            self._catch_up(self.number + 1, self.number + 1)
        return bool(is_in)

    def _join_attempt(self, peers: Communicator, weights: Sequence[float]) -> None:
        """Exchange with `peers`, weighed by their samples, from now on."""
        strategy = self.strategy
        context = strategy.context
        samples_of = [int(weight) for weight in weights] if context.samples else ()
        self._peers = peers
        strategy.shared_state.context = replace(context, samples_of=samples_of, comm=peers)
        if strategy.site.gradients is not None:
            strategy.site.gradients.join(peers, strategy.context.weight)

    def end_step(self) -> None:
        """Count a step, and publish what it led to while ranks are absent."""
        self.number += 1
        self._note_round()
        if len(self._present) < self._comm.world_size:
            self._publish()

    def _mine(self) -> list[Tensor]:
        strategy = self.strategy
        return pack_plain(
            {
                "model": {**dict(strategy.model.named_parameters()), **dict(strategy.model.named_buffers())},
                "optim": strategy.optim.state_dict(),
                "healed": [each.state_of(each.healed) for each in strategy.acting],
            }
        )

    @torch.no_grad()
    def _take_over(self, state: list[Tensor]) -> None:
        strategy, taken = self.strategy, unpack_plain(state)
        model = {**dict(strategy.model.named_parameters()), **dict(strategy.model.named_buffers())}
        for name, held in model.items():
            held.copy_(taken["model"][name])
        optim = taken["optim"]
        if strategy.scheduler is not None:
            optim = {**optim, "param_groups": strategy.optim.state_dict()["param_groups"]}
        strategy.optim.load_state_dict(optim)
        for each, healed in zip(strategy.acting, taken["healed"], strict=True):
            each.load_state_of(healed)


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
                f"{strategy.where}: rejoin='at_once' goes with simulated workers of one rank each; leave it out",
                about=("rejoin",),
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
