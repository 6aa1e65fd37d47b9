"""SGP: stochastic gradient push, gossip on directed graphs, with weights that undo what directions distort."""

from __future__ import annotations

import torch

from exogym_core.strategy.chain import Composition
from exogym_core.strategy.options import option
from exogym_core.strategy.parts.flat import write_back
from exogym_core.strategy.parts.flight import Flight
from exogym_core.strategy.parts.gossip import Gossip, GossipOptions, Graph, parse_graph
from exogym_core.strategy.parts.state import State

__all__ = ["SGPCommunicator", "SGPOptions", "SGPStrategy"]


class SGPOptions(GossipOptions):
    """Options of SGP: the directed graph that values are pushed along.

    Args:
        graph: as of `GossipOptions`; any directed graph on which news of every rank reaches every other.
    """

    graph: Graph = option(Graph("exponential"), parse_graph)


class SGPCommunicator(Gossip, name="SGP"):
    """Push parameters and a weight to neighbours after every update.

    Args:
        options: of `SGPOptions`.

    Attributes:
        weight: the push-sum weight w_i; the model holds z_i = x_i / w_i between steps.
    """

    Options = SGPOptions

    balanced = False
    state = State("weight")
    weight: float = 1.0

    @torch.no_grad()
    def before_update(self) -> None:
        """The gradient is that at z; the update is of x = w z (algorithm 1, line 3)."""
        for parameter in self.scope.parameters:
            parameter.mul_(self.weight)

    @torch.no_grad()
    def after_update(self) -> None:
        """Lines 4 to 7: send p_ji x_i and p_ji w_i, add up what has come, and divide."""
        between, row = self.scope.site.between, self.row(self.strategy.local_step)
        if between.world_size == 1:
            return
        weight = torch.tensor([self.weight], dtype=torch.float64)
        flights = self.begin(self.flats(), row)
        self.weight = Flight(row.steps(between, weight)).wait().item()
        for flight, bucket in zip(flights, self.buckets, strict=True):
            write_back(flight.wait() / self.weight, bucket)


class SGPStrategy(Composition, name="SGP"):
    """Stochastic gradient push: after its update a worker pushes parts of its parameters along directed edges.

    With p_ij = 1 / (1 + number of those that j sends to), for j = i and all j that send to i (algorithm 1):

        x_i <- x_i - lr grad f_i(z_i)
        x_i <- sum_j p_ij x_j,  w_i <- sum_j p_ij w_j,  z_i <- x_i / w_i

    Columns of P sum to 1, its rows need not: w_i, 1 at first, is the weight that has gathered at i, and
    z_i is the de-biased model, which the replica holds between steps and which is judged. On graphs of equal degrees
    w stays 1 and this is D-PSGD that mixes after the update.

    Bytes: the parameters' and 8 for each neighbour that a worker sends to, one on the default graph, at every step.

    Args:
        optim_spec: the local optimizer (AdamW by default; the paper's is SGD with Nesterov momentum).
        graph: "exponential" (the paper's: to one rank, 1, 2, 4, ... places on in turn), "static-exponential", "ring",
            "complete", "random", or of each rank those that it sends to.
        options: of every Strategy: `lr`, `max_norm`, `lr_scheduler`, ...

    Raises:
        InputError: the graph has not as many ranks.

    References:
        Assran et al., Stochastic Gradient Push for Distributed Deep Learning, arXiv 1811.10792, algorithm 1; the
        authors' code, facebookresearch/stochastic_gradient_push.
    """

    module = SGPCommunicator
