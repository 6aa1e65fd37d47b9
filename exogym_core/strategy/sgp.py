"""SGP: stochastic gradient push, gossip on directed graphs, with weights that undo what directions distort."""

from __future__ import annotations

import torch

from exogym_core.strategy.base import Strategy
from exogym_core.strategy.options import option
from exogym_core.strategy.parts.average import Flight
from exogym_core.strategy.parts.flat import flatten, write_back
from exogym_core.strategy.parts.gossip import Graph, begin_mixing, parse_graph
from exogym_core.strategy.parts.state import State

__all__ = ["SGPCommunicator", "SGPStrategy"]


class SGPStrategy(Strategy, name="SGP"):
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
        graph: "exponential" (the paper's: to the rank 1, 2, 4, ... places on, in turn), "static-exponential", "ring",
            "complete", "random", or of each rank those that it sends to; any directed graph on
            which news of every rank reaches every other.
        options: of every Strategy: `lr`, `max_norm`, `lr_scheduler`, ...

    Raises:
        InputError: the graph has another number of ranks.

    References:
        Assran et al., Stochastic Gradient Push for Distributed Deep Learning, arXiv 1811.10792, algorithm 1; the
        authors' code, facebookresearch/stochastic_gradient_push.
    """

    graph: Graph = option(Graph("exponential"), parse_graph)
    positional = ("optim_spec",)

    judged = "own"
    takes_complex = True
    round_steps = 1
    state = State("weight")
    weight: float = 1.0  # w_i; the model holds z_i = x_i / w_i between steps

    def prepare(self) -> None:
        """Refuse a graph whose number of ranks differs."""
        self.graph.check(self.site.between.world_size, self.where, balanced=False)

    @torch.no_grad()
    def before_update(self) -> None:
        """The gradient is that at z; the update is of x = w z (algorithm 1, line 3)."""
        for parameter in self.held:
            parameter.mul_(self.weight)

    @torch.no_grad()
    def communicate(self, step: int) -> None:
        """Lines 4 to 7: send p_ji x_i and p_ji w_i, add what arrives, and divide."""
        between, row = self.site.between, self.graph.row(self, step - 1, balanced=False)
        if between.world_size == 1:
            return
        weight = torch.tensor([self.weight], dtype=torch.float64)
        flights = begin_mixing(self, [flatten(bucket) for bucket in self.buckets], row)
        self.weight = Flight(row.steps(between, weight)).wait().item()
        for flight, bucket in zip(flights, self.buckets, strict=True):
            write_back(flight.wait() / self.weight, bucket)


class SGPCommunicator(SGPStrategy, part="SGP"):
    """SGP as a member of a `Chain`."""
