"""What modules have in common that mix parameters with neighbours on a graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from exogym_core.strategy.chain import Module
from exogym_core.strategy.options.arguments import Options, option
from exogym_core.strategy.parts.flat import flatten, plan_buckets
from exogym_core.strategy.parts.flight import Flight
from exogym_core.strategy.parts.mixing import Graph, graph_told

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from exogym_core.strategy.chain import Chain, Scope
    from exogym_core.strategy.parts.mixing import Mixing

__all__ = ["Gossip", "GossipOptions"]


@dataclass(frozen=True)
class GossipOptions(Options):
    """Who mixes with whom.

    Args:
        graph: a name of `exogym_core.strategy.parts.mixing:GRAPHS`, or of each rank the list of those that it sends
            to. Behind `Sites` its ranks are sites.
    """

    graph: Graph = option(Graph("ring"), graph_told)


class Gossip(Module):
    """Exchanges with neighbours. Judged is every rank's own model.

    Args:
        graph: who sends to whom.
        balanced: rows and columns of the mixing matrix sum to 1; else only its columns do.
    """

    judged = "own"

    def __init__(self, graph: Graph, balanced: bool = True) -> None:
        self.graph, self._balanced = graph, balanced

    def enter(self, strategy: Chain, scope: Scope) -> Scope:
        """Lay the parameters out flat.

        Raises:
            InputError: the graph is not one of so many ranks.
        """
        super().enter(strategy, scope)
        self.graph.check(scope.site.between.world_size, type(strategy).__name__, self._balanced)
        plan = plan_buckets(scope.parameters)
        self.buckets = [[scope.parameters[index] for index in bucket] for bucket in plan]
        return scope

    def flats(self) -> list[Tensor]:
        """This rank's parameters, flat."""
        return [flatten(bucket) for bucket in self.buckets]

    def row(self, number: int) -> Mixing:
        """Of the matrix of the 0-based exchange `number`, this rank's (this site's) row."""
        between = self.scope.site.between
        edges = self.graph.edges(between.world_size, number, self.seed)
        return (
            self.graph.balanced(between.rank, edges)
            if self._balanced
            else self.graph.pushed(between.rank, edges)
        )

    def begin(self, flats: Sequence[Tensor], row: Mixing) -> list[Flight[Tensor]]:
        """Post the exchange of `flats`; they are mixed when it is waited for."""
        return [Flight(self.scope.site.steps(row, flat)) for flat in flats]
