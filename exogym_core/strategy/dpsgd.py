"""D-PSGD: at every step each worker averages its parameters with its neighbours' on a graph."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from exogym_core.strategy.chain import Composition
from exogym_core.strategy.options import name_in, option
from exogym_core.strategy.parts.flat import write_back
from exogym_core.strategy.parts.gossip import Gossip, GossipOptions

if TYPE_CHECKING:
    from torch import Tensor

    from exogym_core.strategy.parts.flight import Flight

__all__ = ["DPSGDCommunicator", "DPSGDOptions", "DPSGDStrategy"]


class DPSGDOptions(GossipOptions):
    """Options of D-PSGD: the graph of neighbours, and when to mix with them.

    Args:
        graph: as of `GossipOptions`; it needs edges of both directions, or equal degrees.
        mix: "before" the update, while the gradient is computed (the paper's), or "after" it.
    """

    mix: str = option("before", name_in("before", "after"))


class DPSGDCommunicator(Gossip, name="DPSGD"):
    """Mix parameters with the neighbours' at every step.

    Args:
        options: of `DPSGDOptions`.
    """

    Options = DPSGDOptions

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.overlaps_backward = self.options.mix == "before"
        self._flights: list[Flight[Tensor]] = []

    def before_backward(self, last_micro_batch: bool) -> None:
        """Algorithm 1, line 4, begins: it travels while the gradient is computed."""
        if self.options.mix == "before" and not self._flights:
            self._flights = self.begin(self.flats(), self.row(self.strategy.local_step))

    def before_update(self) -> None:
        """Line 4 ends; the optimizer's update is line 5."""
        self.before_backward(last_micro_batch=True)
        self._land()

    def after_update(self) -> None:
        """`mix='after'`: average after the update."""
        if self.options.mix == "after":
            self._flights = self.begin(self.flats(), self.row(self.strategy.local_step))
            self._land()

    def _land(self) -> None:
        for flight, bucket in zip(self._flights, self.buckets, strict=bool(self._flights)):
            write_back(flight.wait(), bucket)
        self._flights = []


class DPSGDStrategy(Composition, name="DPSGD"):
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
            that it sends to.
        mix: "before" the update as in the paper, or "after" it: x_i <- sum_j w_ij (x_j - lr grad f_j(x_j)), the order
            in which SGP's authors run it.
        options: of every Strategy: `lr`, `max_norm`, `lr_scheduler`, ...

    Raises:
        InputError: the graph has not as many ranks, or averages would drift on it.

    References:
        Lian et al., Can Decentralized Algorithms Outperform Centralized Algorithms?, arXiv 1705.09056, algorithm 1.
    """

    module = DPSGDCommunicator
