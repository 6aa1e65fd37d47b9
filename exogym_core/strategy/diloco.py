"""DiLoCo: rounds of H local steps, whose mean displacement is the gradient of an outer optimizer."""

from __future__ import annotations

from exogym_core.strategy.base import Strategy
from exogym_core.strategy.options import option, options_of, positive_int
from exogym_core.strategy.participation.options import ClientOptions, RoundPatienceOptions
from exogym_core.strategy.participation.site import SiteOptions
from exogym_core.strategy.parts.outer import OuterAveraging, OuterOptimizer, OuterStep
from exogym_core.strategy.parts.state import State

__all__ = ["DiLoCoCommunicator", "DiLoCoStrategy"]


class DiLoCoStrategy(Strategy, name="DiLoCo"):
    """`H` local steps, then one step of an outer optimizer on the workers' mean displacement.

    Algorithm 1, with theta equal on all workers at the beginning of a round::

        theta_i = theta after H local steps of worker i        lines 3 to 8
        Delta = mean over workers of theta - theta_i           line 12
        theta = OuterOpt(theta, Delta)                         line 14

    A worker is a rank, or a site of `ranks_per_worker` ranks that average their gradients at each step. With a
    time-out a round continues without workers that are late or cut off; these catch up, see
    `exogym_core.strategy.participation.absence:Absence`.

    Bytes: a ring sends `2 (n - 1) / n` times the parameters' encoded bytes per worker every `H` steps.

    Args:
        optim_spec: the inner optimizer (AdamW by default).
        outer_optim_spec, outer_lr, outer_momentum: the outer one (SGD, 0.7, Nesterov momentum 0.9 by default).
        H: local steps a round, exactly; also `local_steps`, `num_inner_steps` and `sync_every`.
        codec, error_feedback, aggregate, buckets, exchange: of the mean, see `OuterAveraging`.
        ranks_per_worker, sharding, ranks_per_node: of sites, see `SiteOptions`.
        averaging_timeout, all_reduce_strategy, timeout_waiting_for_peers, matchmaking_time, join_at: time-outs, see
            `PatienceOptions`.
        deadline, min_ranks, grace, rejoin: of rounds with time-outs, see `RoundPatienceOptions`.
        options: of every Strategy: `lr`, `max_norm`, `lr_scheduler`, ...

    References:
        Douillard et al., DiLoCo: Distributed Low-Communication Training of Language Models, arXiv 2311.08105.
        Jaghouar et al., OpenDiLoCo, arXiv 2407.07852.
    """

    H: int = option(100, positive_int)
    outer_optimizer: OuterOptimizer = options_of(OuterOptimizer)
    averaging: OuterAveraging = options_of(OuterAveraging)
    sites: SiteOptions = options_of(SiteOptions)
    patience: RoundPatienceOptions = options_of(RoundPatienceOptions)
    clients: ClientOptions = options_of(ClientOptions)
    positional = ("optim_spec", "outer_optim_spec", "H")

    variants = (("IsoLoCo", "aggregate: isotropic"),)
    judged = "outer"
    weighs_by_samples = True
    round_steps = property(lambda self: self.H)
    state = State("outer", "num_rounds")
    plain_steps = True

    def prepare(self) -> None:
        """Begin with the same theta on every worker."""
        self.outer = OuterStep(self.held, self.outer_optimizer.outer_optim(), self.averaging.charged(self))
        self.num_rounds = 0

    def communicate(self, step: int) -> None:
        """At the end of a round: an outer step along the workers' mean displacement."""
        if step % self.H:
            return
        delta = self.workers.mean_of(self.outer)
        if delta is None:  # the others have gone on without this worker: it has their newest theta now
            return
        self.outer.step(delta)
        self.num_rounds += 1
        self.workers.publish(self.outer)


class DiLoCoCommunicator(DiLoCoStrategy, part="DiLoCo", positional=("H", "outer_optim_spec")):
    """DiLoCo as a member of a `Chain`: an outer step every `H` steps."""
