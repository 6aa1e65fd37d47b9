"""Steps of stages among the ranks that are present: routes of micro-batches, repeated steps, and return."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from exogym_core.strategy.participation.absence import StepAbsence
from exogym_core.strategy.parts.gradients import norm_across
from exogym_core.strategy.parts.state import State

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from exogym_core.communicator.base import Communicator
    from exogym_core.data.samples import StepSamples
    from exogym_core.stages.learner import StageLearner, StageRank
    from exogym_core.strategy.base import Strategy

__all__ = ["StageAbsence", "StageRoute"]


class StageRoute:
    """Ranks that compute the micro-batches of each worker: its own, or another at the position of one that is absent.

    The i-th worker whose rank is absent at a position goes there to the i-th present rank, in turn.

    Args:
        members: ranks that are present, with one at each position.
        num_workers: workers of the run.
        count: ranks of a worker.

    Attributes:
        members: these ranks.
        present: workers whose own ranks are present, by position.

    >>> route = StageRoute([0, 1, 2, 5], num_workers=3, count=2)
    >>> route.present, [route.rank_of(worker, 1) for worker in range(3)], route.workers_of(1)
    ([[0, 1], [0, 2]], [1, 1, 5], [0, 1])
    """

    def __init__(self, members: Sequence[int], num_workers: int, count: int) -> None:
        self.members, self._count, self._num_workers = list(members), count, num_workers
        self.present = [[each // count for each in members if each % count == k] for k in range(count)]
        self._holders: list[dict[int, int]] = []
        for own in self.present:
            absent = [worker for worker in range(num_workers) if worker not in own]
            adopted = {worker: own[place % len(own)] for place, worker in enumerate(absent)}
            self._holders.append({**dict(zip(own, own, strict=True)), **adopted})

    @property
    def is_whole(self) -> bool:
        """True if no rank is absent."""
        return len(self.members) == self._num_workers * self._count

    def rank_of(self, worker: int, position: int) -> int:
        """Rank that computes the micro-batches of a worker at a position."""
        return self._holders[position][worker] * self._count + position

    def workers_of(self, rank: int) -> list[int]:
        """Workers whose micro-batches a rank computes."""
        return [w for w in range(self._num_workers) if self.rank_of(w, rank % self._count) == rank]

    def places_of(self, worker: int, positions: Sequence[int]) -> list[int]:
        """Places among the members of a worker's ranks at these positions; of all workers' where ranks are absent."""
        ranks = [divmod(rank, self._count) for rank in self.members]
        return [
            place
            for place, (of, position) in enumerate(ranks)
            if position in positions and (of == worker or not self.is_whole)
        ]


class StageAbsence(StepAbsence):
    """Membership of steps of stages that continue without ranks that are late or cut off (SWARM, arXiv 2301.11913).

    The ranks of all positions meet when a step begins, take its passes along their `StageRoute` and exchange their
    gradients. Where one is lost meanwhile, the others repeat the step without it. A rank that returns takes over the
    state of another at its position.

    Args:
        strategy: of the rank, set up.
        rank: its stages.
        learner: takes the passes.
    """

    state = State(members="_members")

    def __init__(self, strategy: Strategy, rank: StageRank, learner: StageLearner) -> None:
        patience = strategy.patience.patience(strategy.where)
        assert patience is not None
        super().__init__(strategy, patience)
        self._rank, self._learner = rank, learner
        self._states = rank.run.of_part(rank.position)
        self._members = list(range(rank.run.world_size))
        learner.defers = True

    @property
    def present(self) -> list[int]:
        """Workers of which this position deposits its part: as many as at the position with fewest ranks."""
        present = self._route().present
        return present[self._rank.position][: min(map(len, present))]

    def _route(self) -> StageRoute:
        return StageRoute(self._members, self._comm.world_size, self._rank.cut.stages.count)

    def _take_members(self, members: Sequence[int]) -> None:
        self._members = list(members)
        count, position = self._rank.cut.stages.count, self._rank.position
        self._present = [rank // count for rank in members if rank % count == position]

    def listen(self, last_micro_batch: bool) -> None:
        """Do nothing: gradients leave when all passes are taken."""

    def exchange(self, work: Callable[[], None]) -> bool:
        """Take the passes of a step and exchange gradients among the ranks that are present; False: without this."""
        strategy, rank, learner, read = self.strategy, self._rank, self._learner, self._rank.read
        assert read is not None
        assert learner.step is not None
        step, context, kept = learner.step, strategy.context, learner.kept()
        steps_of: dict[int, StepSamples] = {rank.worker: step}
        team: Communicator | None = None
        route = self._route()

        def samples_of(worker: int) -> int:
            return step.samples_of[worker] if step.samples_of else step.samples

        def among(attempt: Callable[[Communicator, list[float]], Any]) -> Any:
            about = self._about(self.number, self._members)
            gathering = rank.run.meet(*about, num_positions=rank.cut.stages.count)

            def on_chains(peers: Communicator, _: list[float]) -> Any:
                nonlocal team, route
                self._take_members(gathering.members)
                team, route = peers, self._route()
                mine = [each for each in route.members if each % rank.cut.stages.count == rank.position]
                weights = [sum(map(samples_of, route.workers_of(each))) for each in mine]
                context.samples = weights[mine.index(rank.run.rank)]
                return attempt(peers.group(list(map(route.members.index, mine))), [*map(float, weights)])

            result = gathering.run(on_chains)
            self._take_members(gathering.members)
            return result

        def take_and_exchange() -> None:
            assert team is not None
            learner.restore(kept)
            own = route.workers_of(rank.run.rank)
            for worker in own:
                if worker not in steps_of:
                    steps_of[worker] = read(worker, context.number)
            learner.go_along(route, team)
            total = sum(map(samples_of, range(self._comm.world_size)))
            unit = None if route.is_whole else total / self._comm.world_size
            context.loss = learner.take_passes({each: steps_of[each] for each in own}, strategy.context, unit)
            rank.sum_shared(route, team, context.samples / total)
            work()
            if strategy.max_norm is not None:
                rank.norm = norm_across(rank.counted, team, 1 / len(self._present))

        return self.exchange_among(among, take_and_exchange)

    def _note_round(self) -> None:
        self._news = {"averaged_ranks": self._members, "num_alive": self._rank.run.state.num_alive}
