"""GASLoC: rounds of local steps that end in an accelerated gossip step instead of an all-reduce."""

from __future__ import annotations

import torch

from exogym_core.strategy.base import Strategy
from exogym_core.strategy.options import flag, fraction, number, option, positive_int
from exogym_core.strategy.parts.flat import flatten, write_back
from exogym_core.strategy.parts.gossip import Graph, begin_mixing, parse_graph
from exogym_core.strategy.parts.state import State

__all__ = ["GASLoCCommunicator", "GASLoCStrategy"]


class GASLoCStrategy(Strategy, name="GASLoC", experimental=True):
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
            each rank those that it sends to; edges go both ways, or degrees are equal.
        H: local steps a round; also `local_steps`, `num_inner_steps` and `sync_every`. DiLoCo's values by default, as
            the paper's were not found.
        outer_lr: eta, of the displacement.
        outer_momentum: gamma, of the outer iterates.
        gossip_lr: alpha, step of the parameters towards the mean of the neighbourhood.
        mixed_momentum: the momentum is mixed with the neighbours' too.
        options: of every Strategy: `lr`, `max_norm`, `lr_scheduler`, ...

    References:
        Cagnasso, Belilovsky and Oyallon, Unifying Local Communications and Local Updates for LLM Pretraining, arXiv
        2606.11081. Second-hand: the rule is from a summary of the paper, not from its text or code.
    """

    graph: Graph = option(Graph("random"), parse_graph)
    H: int = option(100, positive_int)
    outer_lr: float = option(0.7, number)
    outer_momentum: float = option(0.9, number)
    gossip_lr: float = option(1.0, fraction)
    mixed_momentum: bool = option(default=False, check=flag)
    positional = ("optim_spec",)

    judged = "own"
    takes_complex = True
    round_steps = property(lambda self: self.H)
    state = State("start", "last")
    plain_steps = True

    def prepare(self) -> None:
        """Begin with the same theta on every rank, without momentum."""
        self.graph.check(self.site.between.world_size, self.where, balanced=True)
        self.start, self.last = ([flatten(bucket) for bucket in self.buckets] for _ in range(2))

    @torch.no_grad()
    def communicate(self, step: int) -> None:
        """At the end of a round: take an accelerated gossip step."""
        if step % self.H:
            return
        local = zip(self.start, map(flatten, self.buckets), strict=True)
        ahead = [start + self.outer_lr * (flat - start) for start, flat in local]
        momenta = [self.outer_momentum * (x - last) for x, last in zip(ahead, self.last, strict=True)]
        together = self.mixed_momentum
        sent = [x + m if together else x.clone() for x, m in zip(ahead, momenta, strict=True)]
        row = self.graph.row(self, step // self.H - 1)
        flights = begin_mixing(self, [values.clone() for values in sent], row)
        for index, (flight, bucket) in enumerate(zip(flights, self.buckets, strict=True)):
            theta = sent[index].lerp_(flight.wait(), self.gossip_lr)
            self.start[index] = theta if together else theta.add_(momenta[index])
            write_back(self.start[index], bucket)
        self.last = ahead


class GASLoCCommunicator(GASLoCStrategy, part="GASLoC"):
    """GASLoC as a member of a `Chain`."""
