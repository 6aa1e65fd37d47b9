"""D-PSGD: at every step each worker averages its parameters with its neighbours' on a graph."""

from __future__ import annotations

from typing import TYPE_CHECKING

from exogym_core.strategy.base import Strategy
from exogym_core.strategy.options import name_in, option
from exogym_core.strategy.parts.flat import flatten, write_back
from exogym_core.strategy.parts.gossip import Graph, begin_mixing, parse_graph

if TYPE_CHECKING:
    from torch import Tensor

    from exogym_core.strategy.parts.average import Flight

__all__ = ["DPSGDCommunicator", "DPSGDStrategy"]


class DPSGDStrategy(Strategy, name="DPSGD"):
    """Decentralised SGD: parameters are mixed with neighbours' at every step; no rank receives from all.

    With a mixing matrix W whose rows and columns sum to 1 (algorithm 1):

        x_i <- sum_j w_ij x_j - lr grad f_i(x_i)

    The gradient is that at the parameters before they are mixed, so the exchange overlaps with the backward pass.
    With any other optimizer its update is made from the mixed parameters. W has Metropolis weights,
    1 / (1 + the larger degree): on a ring 1/3 each, as in the paper.

    Bytes: the parameters' for each neighbour that a worker sends to, at every step, whatever the number of workers.

    Args:
        optim_spec: the local optimizer (AdamW by default; the paper's is SGD).
        graph: "ring" (the paper's), "complete", "exponential", "static-exponential", "random", or of each rank those
            that it sends to; edges go both ways, or degrees are equal. Behind `Sites` its ranks are sites.
        mix: "before" the update as in the paper, or "after" it: x_i <- sum_j w_ij (x_j - lr grad f_j(x_j)), the order
            in which SGP's authors run it.
        options: of every Strategy: `lr`, `max_norm`, `lr_scheduler`, ...

    Raises:
        InputError: the graph has another number of ranks, or averages would drift on it.

    References:
        Lian et al., Can Decentralized Algorithms Outperform Centralized Algorithms?, arXiv 1705.09056, algorithm 1.
    """

    graph: Graph = option(Graph("ring"), parse_graph)
    mix: str = option("before", name_in("before", "after"))
    positional = ("optim_spec",)

    judged = "own"
    takes_complex = True
    overlaps_backward = property(lambda self: self.mix == "before")
    round_steps = 1

    def prepare(self) -> None:
        """Refuse a graph whose number of ranks differs, or on which averages drift."""
        self.graph.check(self.site.between.world_size, self.where, balanced=True)
        self.flights: list[Flight[Tensor]] = []

    def before_backward(self, last_micro_batch: bool) -> None:
        """Line 4 of algorithm 1 begins: parameters travel while the gradient is computed."""
        super().before_backward(last_micro_batch)
        if self.mix == "before" and not self.flights:
            self.begin()

    def before_update(self) -> None:
        """`mix='before'`: the mean, which has been under way since the backward pass began."""
        if self.mix == "before":
            if not self.flights:
                self.begin()
            self.land()

    def communicate(self, step: int) -> None:
        """`mix='after'`: average after the update."""
        if self.mix == "after":
            self.begin()
            self.land()

    def begin(self) -> None:
        """Send the parameters to the neighbours."""
        flats = [flatten(bucket) for bucket in self.buckets]
        self.flights = begin_mixing(self, flats, self.graph.row(self, self.local_step))

    def land(self) -> None:
        """`x_i = sum_j w_ij x_j`."""
        for flight, bucket in zip(self.flights, self.buckets, strict=True):
            write_back(flight.wait(), bucket)
        self.flights = []


class DPSGDCommunicator(DPSGDStrategy, part="DPSGD"):
    """D-PSGD as a member of a `Chain`."""
