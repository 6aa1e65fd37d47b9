"""GASLoC: rounds of local steps that end in an accelerated gossip step instead of an all-reduce."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from exogym_core.strategy.chain import Composition, RoundModule
from exogym_core.strategy.options import (
    flag,
    fraction,
    number,
    option,
    positive_int,
)
from exogym_core.strategy.parts.flat import write_back
from exogym_core.strategy.parts.gossip import Gossip, GossipOptions, Graph, parse_graph
from exogym_core.strategy.parts.state import State

if TYPE_CHECKING:
    from torch import nn


__all__ = ["GASLoCCommunicator", "GASLoCOptions", "GASLoCStrategy"]


class GASLoCOptions(GossipOptions):
    """Options of GASLoC: the graph, local steps a round, and the outer step with its gossip.

    Args:
        graph: as of `GossipOptions`; it needs edges of both directions, or equal degrees.
        H: local steps a round; also `local_steps`, `num_inner_steps` and `sync_every`.
        outer_lr: eta, of the displacement.
        outer_momentum: gamma, of the outer iterates.
        gossip_lr: alpha, how far parameters go towards the mean of the neighbourhood.
        mixed_momentum: the momentum is mixed with the neighbours' too.
    """

    graph: Graph = option(Graph("random"), parse_graph)
    H: int = option(100, positive_int)
    outer_lr: float = option(0.7, number)
    outer_momentum: float = option(0.9, number)
    gossip_lr: float = option(1.0, fraction)
    mixed_momentum: bool = option(default=False, check=flag)


class GASLoCCommunicator(Gossip, RoundModule, name="GASLoC"):
    """An accelerated gossip step every `H` steps.

    Args:
        options: of `GASLoCOptions`.
    """

    Options = GASLoCOptions
    state = State(start="_start", last="_last")
    round_steps = RoundModule.round_steps

    def _init_node(self, model: nn.Module, rank: int, num_nodes: int) -> None:
        """Begin with the same theta on every rank, without momentum."""
        super()._init_node(model, rank, num_nodes)
        self._start, self._last = self.flats(), self.flats()

    @torch.no_grad()
    def end_round(self, number: int) -> None:
        """Take an accelerated gossip step."""
        options = self.options
        local = zip(self._start, self.flats(), strict=True)
        ahead = [start + options.outer_lr * (flat - start) for start, flat in local]
        momenta = [options.outer_momentum * (x - last) for x, last in zip(ahead, self._last, strict=True)]
        together = options.mixed_momentum
        sent = [x + m if together else x.clone() for x, m in zip(ahead, momenta, strict=True)]
        flights = self.begin([values.clone() for values in sent], self.row(number))
        for index, (flight, bucket) in enumerate(zip(flights, self.buckets, strict=True)):
            theta = sent[index].lerp_(flight.wait(), options.gossip_lr)
            self._start[index] = theta if together else theta.add_(momenta[index])
            write_back(self._start[index], bucket)
        self._last = ahead


class GASLoCStrategy(Composition, name="GASLoC"):
    """`H` local steps, then an outer step with momentum whose average is over neighbours on a sparse random graph.

    With g_i the displacement of a round, x_i = theta_i + eta g_i, and W the graph's mixing matrix:

        theta_i <- x_i - alpha (x_i - sum_j w_ij x_j) + gamma (x_i - x_i of the round before)

    `x_i of the round before` is theta at first. The paper's alpha times the weighted Laplacian is here alpha (1 - W), W
    with Metropolis weights, so that alpha = 1 replaces x_i by the neighbourhood's mean. Each worker's momentum is its
    own; with `mixed_momentum` it is sent with x_i, and then on the complete graph this is DiLoCo.

    Bytes: the parameters' for each neighbour, one on the default graph (with an odd number of workers one rests).

    Args:
        optim_spec: the inner optimizer (AdamW by default).
        graph: "random" (pairs drawn again each round), "ring", "complete", "exponential", "static-exponential", or of
            each rank those that it sends to.
        H, outer_lr, outer_momentum, gossip_lr, mixed_momentum: see `GASLoCOptions`; DiLoCo's values by default, as the
            paper's were not found.
        options: of every Strategy: `lr`, `max_norm`, `lr_scheduler`, ...

    References:
        Cagnasso, Belilovsky and Oyallon, Unifying Local Communications and Local Updates for LLM Pretraining, arXiv
        2606.11081. Second-hand: the rule is from a summary of the paper, not from its text or code.
    """

    module = GASLoCCommunicator
