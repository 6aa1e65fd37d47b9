"""NoLoCo: rounds of local steps that end among a few random workers, without any all-reduce."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from exogym_core.strategy.chain import Chain
from exogym_core.strategy.communicate_optimize import CommunicationModule
from exogym_core.strategy.options.arguments import (
    Options,
    checked_options,
    number,
    option,
    positive_int,
    refuse_unknown,
)
from exogym_core.strategy.parts.average import Averaging
from exogym_core.strategy.parts.flat import flatten, plan_buckets, write_back
from exogym_core.strategy.parts.generators import shared_generator

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from exogym_core.strategy.chain import Scope
    from exogym_core.strategy.options.optim import OptimizerLike

__all__ = ["NoLoCoCommunicator", "NoLoCoOptions", "NoLoCoStrategy"]


@dataclass(frozen=True)
class NoLoCoOptions(Options):
    """What NoLoCo takes.

    Args:
        H: local steps a round; also `local_steps`, `num_inner_steps` and `sync_every`.
        group_size: workers that meet at the end of a round.
        outer_momentum: alpha.
        outer_lr: beta, of the displacements' mean.
        gamma: how strongly a worker is drawn to where the others began; `outer_lr` if None, as in the authors' code.
    """

    H: int = option(50, positive_int)
    group_size: int = option(2, positive_int)
    outer_momentum: float = option(0.5, number)
    outer_lr: float = option(0.7, number)
    gamma: float | None = option(None, number)


class NoLoCoCommunicator(CommunicationModule):
    """An outer step among `group_size` random workers every `H` steps. Judged is every rank's own model.

    Args:
        options: of `NoLoCoOptions`.
    """

    Options = NoLoCoOptions
    judged = "own"

    def __init__(self, **options: Any) -> None:
        self.options, unknown = checked_options(type(self), NoLoCoOptions, options)
        refuse_unknown(type(self), unknown)

    def enter(self, strategy: Chain, scope: Scope) -> Scope:
        """Every worker begins with the same phi, and keeps its own from then on."""
        super().enter(strategy, scope)
        plan = plan_buckets(scope.parameters)
        self._buckets = [[scope.parameters[index] for index in bucket] for bucket in plan]
        self._phi = [flatten(bucket) for bucket in self._buckets]
        self._momenta = [torch.zeros_like(phi) for phi in self._phi]
        return scope

    def group(self, rank: int, num_ranks: int, round_number: int) -> list[int]:
        """Whom `rank` meets in the 0-based round, itself included: every m-th of a permutation, m groups in all."""
        order = torch.randperm(
            num_ranks, generator=shared_generator(self.seed, "NoLoCo", round_number)
        ).tolist()
        num_groups = max(1, num_ranks // self.options.group_size)
        return next(sorted(order[k::num_groups]) for k in range(num_groups) if rank in order[k::num_groups])

    @torch.no_grad()
    def communicate(self, model: nn.Module, rank: int, num_nodes: int, local_step: int) -> None:
        """The outer step, at the end of a round."""
        options, between = self.options, self.scope.site.between
        if (local_step + 1) % options.H:
            return
        gamma = options.outer_lr if options.gamma is None else options.gamma
        number = local_step // options.H
        met = self.scope.site.among(self.group(between.rank, between.world_size, number), number)
        for phi, momentum, bucket in zip(self._phi, self._momenta, self._buckets, strict=True):
            means = torch.cat([flatten(bucket) - phi, phi])
            if met.between.world_size > 1:
                means = met.average(Averaging(), means)
            moved, begun = means.chunk(2)
            momentum.mul_(options.outer_momentum).add_(moved, alpha=options.outer_lr).add_(
                begun - phi, alpha=gamma
            )
            write_back(phi.add_(momentum), bucket)

    def state_dict(self) -> dict[str, Any]:
        """This rank's phi and momentum."""
        return {"phi": [phi.clone() for phi in self._phi], "momenta": [m.clone() for m in self._momenta]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore both."""
        for kept, saved in ((self._phi, state["phi"]), (self._momenta, state["momenta"])):
            for flat, values in zip(kept, saved, strict=True):
                flat.copy_(values)


class NoLoCoStrategy(Chain):
    """`H` local steps, then an outer step with one random other worker; nothing is ever exchanged among all.

    Worker i has phi_i, where its round began, and theta_i, where it ended. Means are over the few that meet:

        m_i <- alpha m_i + beta mean(theta - phi) + gamma (mean(phi) - phi_i)
        phi_i <- phi_i + m_i,  theta_i <- phi_i

    Who meets is drawn from the run's seed and the round, alike on all ranks (the authors' code draws it from the step
    alone). Where `group_size` does not divide the number of workers the rest joins the groups; the authors' code
    refuses such numbers. With one group of all it is DiLoCo with heavy-ball momentum alpha and rate beta.

    Bytes: an all-reduce of displacement and phi among those that meet; in pairs `2 b N` a worker every `H` steps,
    whatever the number of workers.

    Args:
        optim_spec: the inner optimizer (AdamW by default; the authors' is Adam).
        H, group_size, outer_momentum, outer_lr, gamma: see `NoLoCoOptions`; the authors' values by default.
        options: of every Strategy: `lr`, `max_norm`, `lr_scheduler`, ...

    References:
        Kolehmainen et al., NoLoCo: No-all-reduce Low Communication Training Method for Large Models, arXiv 2506.10911;
        the rule as in the authors' code, gensyn-ai/noloco, `sparse_optimizer_c.py`.
    """

    Options = NoLoCoOptions

    def __init__(self, optim_spec: OptimizerLike | None = None, **options: Any) -> None:
        noloco, others = checked_options(type(self), NoLoCoOptions, options)
        super().__init__([NoLoCoCommunicator(**vars(noloco))], optim_spec, **others)
