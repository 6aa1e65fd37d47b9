"""NoLoCo: rounds of local steps that end among a few random workers, without any all-reduce."""

from __future__ import annotations

import torch

from exogym_core.strategy.base import Strategy
from exogym_core.strategy.options import number, option, positive_int
from exogym_core.strategy.parts.average import Averaging
from exogym_core.strategy.parts.flat import flatten, write_back
from exogym_core.strategy.parts.generators import shared_generator
from exogym_core.strategy.parts.state import State

__all__ = ["NoLoCoCommunicator", "NoLoCoStrategy"]


class NoLoCoStrategy(Strategy, name="NoLoCo"):
    """`H` local steps, then an outer step with one random other worker; nothing is ever exchanged among all.

    Worker i has phi_i, where its round began, and theta_i, where it ended. Means are over the few that meet:

        m_i <- alpha m_i + beta mean(theta - phi) + gamma (mean(phi) - phi_i)
        phi_i <- phi_i + m_i,  theta_i <- phi_i

    Pairs are drawn from the run's seed and the round, equally on all ranks (the authors' code draws it from the step
    alone). Where `group_size` does not divide the number of workers the rest joins the groups; the authors' code
    refuses such numbers. With one group of all it is DiLoCo with heavy-ball momentum alpha and rate beta.

    Bytes: an all-reduce of displacement and phi among those that meet; in pairs `2 b N` a worker every `H` steps,
    whatever the number of workers.

    Args:
        optim_spec: the inner optimizer (AdamW by default; the authors' is Adam).
        H: local steps a round; also `local_steps`, `num_inner_steps` and `sync_every`. Defaults are the authors'.
        group_size: workers that meet at the end of a round; all if above their number.
        outer_momentum: alpha.
        outer_lr: beta, of the displacements' mean.
        gamma: how strongly a worker is drawn to where the others began; `outer_lr` if None, as in the authors' code.
        options: of every Strategy: `lr`, `max_norm`, `lr_scheduler`, ...

    References:
        Kolehmainen et al., NoLoCo: No-all-reduce Low Communication Training Method for Large Models, arXiv 2506.10911;
        the rule as in the authors' code, gensyn-ai/noloco, `sparse_optimizer_c.py`.
    """

    H: int = option(50, positive_int)
    group_size: int = option(2, positive_int)
    outer_momentum: float = option(0.5, number)
    outer_lr: float = option(0.7, number)
    gamma: float | None = option(None, number)

    positional = ("optim_spec",)
    judged = "own"
    round_steps = property(lambda self: self.H)
    state = State("phi", "momenta")
    plain_steps = True

    def prepare(self) -> None:
        """Begin with the same phi on every worker, which keeps its own from then on."""
        self.phi = [flatten(bucket) for bucket in self.buckets]
        self.momenta = [torch.zeros_like(phi) for phi in self.phi]

    @torch.no_grad()
    def communicate(self, step: int) -> None:
        """At the end of a round: take the outer step with those that this worker meets."""
        if step % self.H:
            return
        number, between = step // self.H - 1, self.site.between
        gamma = self.outer_lr if self.gamma is None else self.gamma
        met = self.site.among(self.group(between.rank, between.world_size, number), number)
        for phi, momentum, bucket in zip(self.phi, self.momenta, self.buckets, strict=True):
            means = torch.cat([flatten(bucket) - phi, phi])
            if met.between.world_size > 1:
                means = met.average(Averaging(), means)
            moved, begun = means.chunk(2)
            momentum.mul_(self.outer_momentum).add_(moved, alpha=self.outer_lr).add_(begun - phi, alpha=gamma)
            write_back(phi.add_(momentum), bucket)

    def group(self, rank: int, num_ranks: int, round_number: int) -> list[int]:
        """Group of `rank` in the 0-based round: every m-th of a permutation, m groups in all."""
        generator = shared_generator(self.seed, "NoLoCo", round_number)
        order = torch.randperm(num_ranks, generator=generator).tolist()
        num_groups = max(1, num_ranks // self.group_size)
        return next(sorted(order[k::num_groups]) for k in range(num_groups) if rank in order[k::num_groups])


class NoLoCoCommunicator(NoLoCoStrategy, part="NoLoCo"):
    """NoLoCo as a member of a `Chain`."""
