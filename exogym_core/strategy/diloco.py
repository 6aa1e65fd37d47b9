"""DiLoCo: rounds of H local steps, whose mean displacement is the gradient of an outer optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from exogym_core.strategy.absence.absence import Absence
from exogym_core.strategy.communicate_optimize import CommunicationModule
from exogym_core.strategy.options.arguments import checked_options, refuse_unknown
from exogym_core.strategy.options.diloco import DiLoCoOptions
from exogym_core.strategy.outer_rounds import OuterRounds, OuterStrategy
from exogym_core.strategy.parts.outer import OuterStep
from exogym_core.strategy.sites.sites import Sites

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn

    from exogym_core.strategy.chain import Chain, Module, Scope
    from exogym_core.strategy.options.optim import OptimizerLike
    from exogym_core.strategy.parts.outer import Round

__all__ = ["DiLoCoCommunicator", "DiLoCoStrategy"]


class DiLoCoCommunicator(OuterRounds, CommunicationModule):
    """An outer step every `H` steps.

    Args:
        H: local steps a round.
        outer_optim_spec: the outer optimizer.
        options: of `DiLoCoOptions`. With `ranks_per_worker` it brings `Sites` along.
    """

    Options = DiLoCoOptions

    def __init__(
        self,
        H: int | None = None,  # noqa: N803
        outer_optim_spec: OptimizerLike | None = None,
        **options: Any,
    ) -> None:
        given = {"H": H, "outer_optim_spec": outer_optim_spec, **options}
        self.options, unknown = checked_options(type(self), DiLoCoOptions, given)
        refuse_unknown(type(self), unknown)
        self.H, self.averaging = self.options.H, self.options.averaging()
        patience = self.options.patience(type(self).__name__)
        self.absence = None if patience is None else Absence(patience, self.H)

    def parts(self) -> Sequence[Module]:
        """Behind the sites that it is for, if it is."""
        k, options = self.options.ranks_per_worker, self.options
        sites = [Sites(k, sharding=options.sharding, ranks_per_node=options.ranks_per_node)] if k > 1 else []
        return [*sites, self]

    def enter(self, strategy: Chain, scope: Scope) -> Scope:
        """Line 1: every rank begins with the same theta."""
        super().enter(strategy, scope)
        averaging = self.averaging.charged(strategy.coding, strategy.comm)
        self.outer, self.num_rounds = OuterStep(scope.parameters, self.options.outer_optim(), averaging), 0
        if self.absence is not None and strategy.comm.world_size == 1:
            self.absence = None
        if self.absence is not None:
            self.absence.connect(strategy.comm, self.options.ranks_per_worker, type(strategy).__name__)
            whole = (lambda: None) if scope.gradients is None else scope.gradients.gather
            self.absence.follow(self.outer, scope.site, whole)
        return scope

    def communicate(self, model: nn.Module, rank: int, num_nodes: int, local_step: int) -> None:
        """Lines 2 and 4: a round has H local steps."""
        if (local_step + 1) % self.H:
            return
        if self.absence is None:
            self.apply(self.begin())
        else:
            self.absence.round()

    def begin(self) -> Round:
        """Line 12: the outer gradient, the mean over workers of `theta - theta_i`, is on its way."""
        return self.outer.begin(self.scope.site)

    @property
    def judged_version(self) -> int:
        """Rounds that have ended, or those of all who take part."""
        return self.num_rounds if self.absence is None else self.absence.number

    def state_dict(self) -> dict[str, Any]:
        """Also who is absent."""
        absence = {} if self.absence is None else {"absence": self.absence.state_dict()}
        return {**super().state_dict(), **absence}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore it."""
        super().load_state_dict(state)
        if self.absence is not None:
            self.absence.load_state_dict(state["absence"])


class DiLoCoStrategy(OuterStrategy):
    """`H` local steps, then one step of an outer optimizer on the workers' mean displacement.

    Bytes: a ring sends `2 (n - 1) / n` times the parameters' encoded bytes per worker every `H` steps.

    With `ranks_per_worker=k` it is `Chain([Sites(k), DiLoCoCommunicator(H)])`. With a time-out a round goes on
    without ranks that are late or cut off, see `exogym_core.strategy.absence.absence:Absence`.

    Args:
        optim_spec: the inner optimizer (AdamW by default).
        outer_optim_spec: the outer one (SGD, 0.7, Nesterov momentum 0.9 by default).
        H: local steps a round.
        options: of `DiLoCoOptions`, and of every Strategy: `lr`, `max_norm`, `lr_scheduler`, ...

    References:
        Douillard et al., DiLoCo: Distributed Low-Communication Training of Language Models, arXiv 2311.08105.
        Jaghouar et al., OpenDiLoCo, arXiv 2407.07852.
    """

    Options = DiLoCoOptions
    module = DiLoCoCommunicator
